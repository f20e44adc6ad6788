"""A replica over two hosts and a replica on each host, after damage by hand was put right."""

from __future__ import annotations

import json

KEY = "chat-key-chat-key-chat-key-chat-key"


def generation(host, instance):
    link = host.file(f"/etc/vllm/{instance}/current")
    assert link.is_symlink
    return host.check_output(f"readlink -f /etc/vllm/{instance}/current")


def show(host, instance, name):
    return host.check_output(f"systemctl show vllm@{instance} --property={name} --value")


def instances(host_name):
    return ["chat.0", f"single.{int(host_name[-1]) - 1}"]


def test_units_run_and_start_at_boot(host, host_name):
    for instance in instances(host_name):
        unit = host.service(f"vllm@{instance}")
        assert unit.is_running
        assert unit.is_enabled


def test_the_process_runs_the_current_generation_as_the_service_user(host, host_name):
    for instance in instances(host_name):
        pid = show(host, instance, "MainPID")
        assert host.check_output(f"readlink /proc/{pid}/cwd") == generation(host, instance)
        assert host.check_output(f"stat -c %U /proc/{pid}") == "vllm"


def test_limits_hold_on_the_running_process(host, host_name):
    limits = host.check_output(f"cat /proc/{show(host, 'chat.0', 'MainPID')}/limits").splitlines()
    found = {line[:26].strip(): line[26:].split()[0] for line in limits}
    assert found["Max open files"] == "4096"
    assert found["Max locked memory"] == "65536"


def test_the_configuration_was_put_right(host):
    assert "port: 8000" in host.file(generation(host, "chat.0") + "/config.yaml").content_string.splitlines()


def test_keys_are_for_root_alone_and_nowhere_else(host, host_name):
    secrets = host.file("/etc/vllm/chat.0/secrets.env")
    assert (secrets.mode, secrets.user) == (0o600, "root")
    assert secrets.content_string == f"VLLM_API_KEY={KEY}\n"
    assert host.run(f"grep -r {KEY} /etc/vllm/chat.0/generations /etc/systemd /var/log").rc == 1
    assert KEY not in host.check_output("ps axww -o args")


def test_the_unit_was_put_right_and_loaded(host, host_name):
    assert show(host, "chat.0", "RestartUSec") == "5s"
    assert show(host, "chat.0", "NeedDaemonReload") == "no"
    assert show(host, instances(host_name)[1], "DropInPaths").endswith("generation.conf")


def test_systemd_has_nothing_to_say_against_the_unit(host, host_name):
    said = host.run(f"systemd-analyze verify vllm@{instances(host_name)[1]}.service")
    assert said.rc == 0
    assert "vllm@" not in said.stderr


def test_the_server_is_confined(host, host_name):
    for instance in instances(host_name):
        score = host.check_output(f"systemd-analyze security --no-pager vllm@{instance}.service | tail -1")
        assert float(score.split(": ")[1].split()[0]) <= 3.0, score


def test_the_head_answers_with_the_key_and_not_without(host):
    plan = json.loads(host.file(generation(host, "chat.0") + "/plan.json").content_string)
    url = f"http://{plan['head']['address']}:{plan['head']['port']}/v1/completions"
    ask = "import urllib.request as u,sys; r=u.Request(sys.argv[1], b'{}', {'Authorization': 'Bearer '+sys.argv[2]}); print(u.urlopen(r, timeout=5).status)"
    assert host.check_output(f'python3 -c "{ask}" {url} {KEY}') == "200"
    assert "401" in host.run(f'python3 -c "{ask}" {url} wrong').stderr


def test_generations_for_a_rollback_are_kept_and_none_is_half_written(host):
    names = host.check_output("ls -A /etc/vllm/chat.0/generations").split()
    current = generation(host, "chat.0").rpartition("/")[2]
    # With vllm_service_keep_generations: 3 the current one and the newest two, and what is none of ours.
    assert sorted(names) == sorted([current, "000000000003", "000000000004", "00000000000f"])
    assert "000000000009" not in host.check_output("ls -A /var/cache/vllm/chat.0")


def test_the_host_knows_why_it_was_planned_so(host):
    why = json.loads(host.file(generation(host, "chat.0") + "/why.json").content_string)
    assert any("tensor-parallel-size" in reason for reason in why["reasons"])
    assert "reasons" not in json.loads(host.file(generation(host, "chat.0") + "/plan.json").content_string)
