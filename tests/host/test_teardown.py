"""Services and hosts leave the fleet, each by the playbook. The tests run in order, each with what the one before left."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import ssl
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import secrets_search
import testinfra
import yaml

ROOT = Path(__file__).resolve().parents[2]
EPHEMERAL = Path(os.environ["MOLECULE_INVENTORY_FILE"]).parents[1]
INVENTORY = EPHEMERAL / "inventory"
HOSTS = ("gpu-01", "gpu-02", "gw-01")
CHAT = {"name": "chat", "model": "/srv/models/none"}
OLD = {"name": "old", "model": "/srv/models/none", "hosts": ["gpu-01"], "port_base": 8100}
KEYS = {"chat": "chat-key-chat-key-chat-key-chat-key"}
ONLY_CHAT = {"vllm_services": [CHAT], "vllm_service_api_keys": KEYS}
ON_ONE = {"vllm_services": [{**CHAT, "hosts": ["gpu-01"]}], "vllm_service_api_keys": KEYS}
# What a host may have more than before once it left: files of packages, and what systems note of packages and users.
NOTED = (
    "/var/lib/dpkg",
    "/var/lib/apt",
    "/var/cache",
    "/var/lib/systemd",
    "/etc/passwd",
    "/etc/group",
    "/etc/shadow",
    "/etc/gshadow",
)
NOTED += ("/etc/ld.so.cache", "/root/.ansible", "/etc/subuid", "/etc/subgid", "/etc/.pwd.lock", "/var/lib/polkit-1")


@dataclass
class Run:
    """One run of a playbook: exit status and what it printed."""

    status: int
    said: str

    def changed(self) -> int:
        return sum(int(word.split("=")[1]) for word in self.said.split() if word.startswith("changed="))


def play(*options, playbook="playbooks/teardown.yml", **variables) -> Run:
    command = [f"{Path(sys.executable).parent}/ansible-playbook", str(ROOT / playbook), "-i", str(INVENTORY)]
    told = {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections")}
    done = subprocess.run(
        [*command, "-e", json.dumps(variables), *options],
        env={**os.environ, **told},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    return Run(done.returncode, " ".join((done.stdout + done.stderr).split()))


@pytest.fixture(scope="module")
def hosts():
    return {name: testinfra.get_host(f"ansible://{name}?ansible_inventory={INVENTORY}") for name in HOSTS}


def _addresses(node):
    if isinstance(node, dict):
        for name, values in (node.get("hosts") or {}).items() if isinstance(node.get("hosts"), dict) else ():
            if values:
                yield name, values["ansible_host"]
        for value in node.values():
            yield from _addresses(value)


ADDRESSES = dict(_addresses(yaml.safe_load((INVENTORY / "lab.yml").read_text())))
GATEWAY = ADDRESSES["gw-01"]


def ask(model: str, tokens: int = 1) -> int:
    """A completion through the gateway; the stand-in takes a second a token."""
    trusting = ssl.create_default_context(cafile=str(EPHEMERAL / "secrets" / "ca.pem"))
    link = http.client.HTTPSConnection(GATEWAY, 8443, timeout=60, context=trusting)
    body = {"model": model, "prompt": "a", "max_tokens": tokens, "ignore_eos": True}
    told = {"Content-Type": "application/json", "Authorization": "Bearer client-all-client-all-client-all"}
    try:
        link.request("POST", "/v1/completions", json.dumps(body), told)
        reply = link.getresponse()
        reply.read()
        return reply.status
    finally:
        link.close()


def units(host) -> set[str]:
    """Units of the fleet that are there, run or are enabled."""
    said = host.check_output(
        "systemctl list-units --all --plain --no-legend 'vllm*' 'ray@*' 'gpu-fleet*' | cut -d' ' -f1"
    )
    links = host.check_output(
        "find /etc/systemd/system -lname '*vllm*' -o -lname '*gpu-fleet*' | xargs -r -n1 basename"
    )
    return {*said.split(), *links.split()}


def files(host) -> set[str]:
    return set(host.check_output("find /etc /opt /usr/local /var/lib /var/cache /root /srv -xdev").splitlines())


def wait(so, otherwise, seconds=60.0):
    end = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < end, otherwise
        time.sleep(0.3)


def test_both_services_answer_by_the_gateway(hosts):
    wait(lambda: ask("chat") == 200 == ask("old"), "they do not serve")
    assert {"vllm@chat.0.service", "vllm@old.0.service"} <= units(hosts["gpu-01"])


def test_no_key_is_where_others_may_read_it(hosts):
    """After a whole run of the roles; only the engine is a stand-in."""
    known = {
        "chat's": KEYS["chat"],
        "old's": "old-key-old-key-old-key-old-key-old",
        "a client's": "client-all-client-all-client-all",
        # Of a private key a line in its middle.
        **{
            name: (EPHEMERAL / f"secrets/{name}.key").read_text().splitlines()[1]
            for name in ("ca", "gw-01", "vllm/gpu-01", "vllm/gpu-02")
        },
    }
    for name in HOSTS:
        assert secrets_search.found_on(hosts[name], known) == [], name
    assert secrets_search.found_here(known, secrets_search.logs()) == []


SHOWN = (
    "import hashlib, socket, ssl; t = ssl.create_default_context(cafile='/etc/gpu_fleet/vllm/ca.pem'); "
    "link = t.wrap_socket(socket.create_connection(('{0}', 8000), timeout=10), server_hostname='{0}'); "
    "print(hashlib.sha256(link.getpeercert(binary_form=True)).hexdigest())"
)


def certificate(hosts, name: str) -> str:
    """The digest of what chat's server on a host shows to its own host; empty where it speaks in clear."""
    said = hosts[name].run(f'python3 -c "{SHOWN.format(ADDRESSES[name])}"')
    assert said.rc == 0 or "WRONG_VERSION_NUMBER" in said.stderr, said.stderr
    return said.stdout.strip()


@contextlib.contextmanager
def requests_all_along():
    """Clients that ask for chat without a pause; none may fail."""
    over, failed, served = threading.Event(), [], []

    def ask_on():
        while not over.is_set():
            try:
                (served if (status := ask("chat")) == 200 else failed).append(status)
            except OSError as error:
                failed.append(error)
            time.sleep(0.2)

    threads = [threading.Thread(target=ask_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield served
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert failed == []


def test_servers_on_other_hosts_speak_tls_to_gateway_and_agents_alike(hosts):
    for name in ("gpu-01", "gpu-02"):
        assert certificate(hosts, name)
        file = hosts[name].file("/etc/gpu_fleet/vllm/tls.pem")
        assert (file.mode, file.user, file.group) == (0o400, "vllm", "root")
        assert "ssl-certfile: /etc/gpu_fleet/vllm/tls.pem" in hosts[name].check_output(
            "cat /etc/vllm/chat.*/current/config.yaml"
        )


def test_a_certificate_is_renewed_without_a_restart_and_as_often_as_it_has_to_be(hosts):
    """Twice, since a file that is put in the place of another one is noticed once; seen by whoever connects anew."""
    before = hosts["gpu-01"].check_output("systemctl show vllm@chat.0 --property=InvocationID --value")
    for _ in range(2):
        shown = certificate(hosts, "gpu-01")
        (EPHEMERAL / "secrets/vllm/gpu-01.pem").unlink()  # as if its last month had come
        run = play(playbook="molecule/teardown/converge.yml")
        assert run.status == 0, run.said
        wait(lambda shown=shown: certificate(hosts, "gpu-01") != shown, "the server shows the old one")
    assert hosts["gpu-01"].check_output("systemctl show vllm@chat.0 --property=InvocationID --value") == before
    assert ask("chat") == 200


def test_servers_turn_to_clear_and_to_tls_again_one_after_the_other_and_no_request_fails(hosts):
    allowed = {"vllm_service_allow_outage": True}  # for `old`, which has one replica
    with requests_all_along() as served:
        run = play(playbook="molecule/teardown/converge.yml", vllm_service_tls=False, **allowed)
        assert run.status == 0, run.said
        assert certificate(hosts, "gpu-01") == certificate(hosts, "gpu-02") == ""
        assert ask("old") == 200
        # By a run that is of one host alone: each gateway speaks to each replica as that does.
        run = play("--limit", "gpu-01", playbook="molecule/teardown/converge.yml", **allowed)
        assert certificate(hosts, "gpu-01") and not certificate(hosts, "gpu-02")
        count = len(served)
        wait(lambda: len(served) > count + 20, "requests are not answered")
        run = play(playbook="molecule/teardown/converge.yml", **allowed)
        assert run.status == 0, run.said
        assert certificate(hosts, "gpu-02")
        assert ask("old") == 200


# -- maintenance: a host rests and comes back ------------------------------------------------------------------------------

CONVERGE = "molecule/teardown/converge.yml"
OUT = {"vllm_host_state": "{{ 'maintenance' if inventory_hostname == 'gpu-02' else 'serving' }}"}
ALL_OUT = {"vllm_host_state": "maintenance"}


def state(host, unit: str) -> tuple[str, str]:
    return host.run(f"systemctl is-active {unit}").stdout.strip(), host.run(
        f"systemctl is-enabled {unit}"
    ).stdout.strip()


def at_the_gateway(host) -> dict[str, str]:
    program = (
        "import socket;s=socket.socket(socket.AF_UNIX);s.connect('/run/gpu-fleet-gateway/admin.sock');"
        "s.sendall(b'show stat\\n');print(s.makefile().read())"
    )
    rows = [line.split(",") for line in host.check_output(f'python3 -c "{program}"').splitlines() if line]
    return {row[1]: row[17] for row in rows if "." in row[1]}


def test_a_host_in_maintenance_is_drained_stopped_and_off_and_cuts_off_nobody(hosts):
    gpu = hosts["gpu-02"]
    before = gpu.check_output("nft list table inet gpu_fleet"), files(gpu)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        running = [pool.submit(ask, "chat", 21) for _ in range(4)]
        time.sleep(1)
        run = play(playbook=CONVERGE, **OUT)
        assert run.status == 0, run.said[-3000:]
        assert [one.result() for one in running] == [200] * 4
    for unit in ("vllm@chat.1.service", "vllm-agent@chat.1.service"):
        assert state(gpu, unit) == ("inactive", "disabled"), unit
        assert state(hosts["gpu-01"], unit.replace(".1", ".0")) == ("active", "enabled")
    assert gpu.check_output("nft list table inet gpu_fleet") == before[0]
    gone = {
        path
        for path in before[1] - files(gpu)
        if not path.endswith((".wants/vllm@chat.1.service", ".wants/vllm-agent@chat.1.service"))
    }
    assert not {path for path in gone if "/etc/" in path or "/opt/" in path}
    assert at_the_gateway(hosts["gw-01"]) == {"chat.0": "UP", "chat.1": "MAINT", "old.0": "UP"}
    assert [ask("chat") for _ in range(4)] == [200] * 4


def test_a_second_run_leaves_it_at_that_and_says_what_it_is():
    run = play(playbook=CONVERGE, **OUT)
    assert run.status == 0, run.said[-3000:]
    assert run.changed() == 0, run.said[-3000:]
    assert "chat.1: in maintenance with gpu-02 (vllm_host_state)" in run.said
    assert "Left over" not in play(playbook="playbooks/plan.yml", plan_ask_hosts=True, **OUT).said
    run = play(playbook=CONVERGE, **ALL_OUT)
    assert run.status != 0 and run.changed() == 0
    assert "service chat: nobody serves it: all its replicas (chat.0, chat.1) are in maintenance" in run.said
    assert "changed=0" in run.said and ask("chat") == 200


def test_no_boot_starts_it_and_a_host_that_is_off_fails_no_run(hosts, tmp_path):
    gpu = hosts["gpu-02"]

    def booted() -> str:
        """When it did; nothing while nobody answers."""
        try:
            return gpu.run(
                "systemctl show --property=UserspaceTimestampMonotonic --value; stat -c %Z /run/systemd"
            ).stdout
        except RuntimeError:  # testinfra's word for an SSH that has no connection
            return ""

    before = booted()
    with contextlib.suppress(RuntimeError):  # the connection ends with the host
        gpu.run("systemctl reboot")
    wait(lambda: booted() not in ("", before), "it is not back", 120)
    time.sleep(5)
    assert state(gpu, "vllm@chat.1.service") == ("inactive", "disabled")
    assert at_the_gateway(hosts["gw-01"])["chat.1"] == "MAINT"
    # Where nobody listens. Said by an inventory: a variable of the command line would be that of whom a task is delegated to, too.
    off = tmp_path / "off.yml"
    off.write_text("all: {hosts: {gpu-02: {ansible_port: 9}}}\n")
    run = play("-i", str(off), playbook=CONVERGE, **OUT)
    assert run.status == 0, run.said[-3000:]
    assert "gpu-02 was not reached" in run.said and ask("chat") == 200


def test_taken_away_again_it_serves_again(hosts):
    run = play(playbook=CONVERGE)
    assert run.status == 0, run.said[-3000:]
    for unit in ("vllm@chat.1.service", "vllm-agent@chat.1.service"):
        assert state(hosts["gpu-02"], unit) == ("active", "enabled"), unit
    wait(lambda: at_the_gateway(hosts["gw-01"]) == {"chat.0": "UP", "chat.1": "UP", "old.0": "UP"}, "it is not let in")
    assert play(playbook=CONVERGE).changed() == 0


# -- a GPU that fell off the bus: its rank rests, too -----------------------------------------------------------------------

# On the PATH before the real one, which it is as long as there is no such file.
KERNEL_LOG = """#!/bin/sh
# Stand-in, made for a test: the kernel's log of a host with a GPU.
[ -e /run/fallen ] && exec cat /run/fallen
exec /usr/bin/journalctl "$@"
"""
FALLEN = "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
# What the agent of a replica with GPUs is told besides (agent_config.py); this one's engine has none.
GPUS = {"gpus": [0], "xid_out": {"79": "the GPU has fallen off the bus"}}


def agent_of(host) -> dict:
    program = (
        "import json,urllib.request as r;c=json.load(open('/etc/vllm/chat.1/agent.json'));"
        "print(r.urlopen('http://%s:%s/' % tuple(c['listen'])).read().decode())"
    )
    said = host.run(f'python3 -c "{program}"')
    return json.loads(said.stdout) if said.rc == 0 else {}


def test_a_rank_whose_gpu_fell_off_the_bus_is_not_restarted_for_ever(hosts):
    gpu = hosts["gpu-02"]
    write = (
        f"import sys;open('/usr/local/bin/journalctl','w').write(bytes.fromhex('{KERNEL_LOG.encode().hex()}').decode())"
    )
    gpu.check_output(f'python3 -c "{write}" && chmod 0755 /usr/local/bin/journalctl')
    told = f"c=json.load(open(p));c.update(json.loads(bytes.fromhex('{json.dumps(GPUS).encode().hex()}')))"
    edit = f"import json;p='/etc/vllm/chat.1/agent.json';{told};json.dump(c,open(p,'w'))"
    gpu.check_output(f'python3 -c "{edit}" && systemctl restart vllm-agent@chat.1')
    wait(lambda: agent_of(gpu).get("active") and not agent_of(gpu)["gpu_out"], "the agent does not answer")
    time.sleep(5)
    # Not the stand-in, which is before it on the PATH.
    said = "/usr/bin/journalctl -u vllm-agent@chat.1 -o cat --no-pager"
    assert "cannot be read for errors of GPUs" not in gpu.check_output(said), (
        "its sandbox keeps the kernel's log from it"
    )
    gpu.check_output(f'echo "{FALLEN}" > /run/fallen')
    wait(lambda: agent_of(gpu).get("gpu_out"), "it is not taken out", 120)
    time.sleep(30)
    assert state(gpu, "vllm@chat.1.service")[0] in ("inactive", "failed")
    assert gpu.check_output(said).count("OUT: a GPU (0000:1b:00) had Xid 79 since boot") == 1
    assert agent_of(gpu)["held"]["kind"] == "gpu" and agent_of(gpu)["restarts_without_answer"] == 0
    assert [ask("chat") for _ in range(4)] == [200] * 4
    gpu.check_output("systemctl start vllm@chat.1")
    wait(lambda: at_the_gateway(hosts["gw-01"])["chat.1"] == "UP", "somebody's start is not its word")
    gpu.check_output("rm -f /run/fallen /usr/local/bin/journalctl")
    assert play(playbook=CONVERGE).status == 0
    assert "gpus" not in json.loads(gpu.file("/etc/vllm/chat.1/agent.json").content_string)


# -- what goes ----------------------------------------------------------------------------------------------------------------


def test_without_a_name_nothing_goes():
    run = play()
    assert run.status != 0
    assert "Name what goes" in run.said


def test_what_the_inventory_names_is_refused(hosts):
    before = files(hosts["gpu-01"])
    for options, variables in (((), {"teardown_services": ["chat"]}), (("--limit", "gpu-02"), {})):
        run = play(*options, **variables)
        assert run.status != 0
        assert "teardown_named: true" in run.said
        assert "changed=0" in run.said
        assert run.changed() == 0
    assert files(hosts["gpu-01"]) == before
    assert ask("chat") == 200


def test_what_is_left_over_is_shown_and_check_mode_says_what_would_go(hosts):
    run = play(playbook="playbooks/plan.yml", plan_ask_hosts=True, **ONLY_CHAT)
    assert run.status == 0, run.said[-3000:]
    assert "Left over on gpu-01: old.0" in run.said
    assert "Left over on gpu-02" not in run.said
    before = files(hosts["gpu-01"]), units(hosts["gpu-01"])
    run = play("--check", "--diff", teardown_services="old", **ONLY_CHAT)
    assert run.status == 0, run.said[-3000:]
    for text in ("vllm-agent@old.0.service", "vllm@old.0.service", "/etc/vllm/old.0", "/var/cache/vllm/old.0"):
        assert text in run.said
    assert "old-key-old" not in run.said
    assert (files(hosts["gpu-01"]), units(hosts["gpu-01"])) == before
    assert ask("old") == 200


def test_a_service_goes_and_cuts_off_nobody(hosts):
    openings = hosts["gpu-01"].check_output("nft list table inet gpu_fleet")
    assert "8100" in openings
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, "old", 31)
        time.sleep(1)
        run = play(teardown_services="old", **ONLY_CHAT)
        assert run.status == 0, run.said[-3000:]
        assert running.result() == 200
    gpu = hosts["gpu-01"]
    assert not {path for path in files(gpu) if "old.0" in path}
    assert not {unit for unit in units(gpu) if "old.0" in unit}
    assert "8100" not in gpu.check_output("nft list table inet gpu_fleet")
    assert ask("old") == 404
    assert ask("chat") == 200
    assert {"vllm@chat.0.service", "vllm-agent@chat.0.service"} <= units(gpu)
    assert gpu.file("/etc/vllm/chat.0/secrets.env").exists
    for name in HOSTS:
        assert hosts[name].run("grep -rqs -e old-key-old-key /etc /var/lib /var/cache /opt /run").rc == 1, name


def test_a_second_run_changes_nothing():
    run = play(teardown_services="old", **ONLY_CHAT)
    assert run.status == 0
    assert run.changed() == 0, run.said[-3000:]


def test_what_a_service_that_moved_left_behind_goes_and_the_service_stays(hosts):
    run = play(teardown_services="chat", **ON_ONE)
    assert run.status == 0, run.said[-3000:]
    assert not {path for path in files(hosts["gpu-02"]) if "chat.1" in path}
    assert hosts["gpu-02"].file("/etc/systemd/system/vllm@.service").exists, "the host is of the fleet still"
    assert "vllm@chat.0.service" in units(hosts["gpu-01"])
    assert ask("chat") == 200
    assert "Left over" not in play(playbook="playbooks/plan.yml", plan_ask_hosts=True, **ON_ONE).said


def test_a_host_leaves_with_all_that_the_fleet_made_on_it_and_nothing_else(hosts):
    gpu = hosts["gpu-02"]
    gpu.check_output(
        "printf 'NCCL_SOCKET_NTHREADS=2\\n' >> /etc/nccl.conf; mkdir -p /etc/vllm; touch /etc/vllm/somebody-elses"
    )
    gpu.check_output(
        "mkdir -p /var/lib/vllm/models/m && touch /var/lib/vllm/models/m/x /var/lib/vllm/models/.m.record.json"
    )
    run = play("--limit", "gpu-02", teardown_named=True, **ON_ONE)
    assert run.status == 0, run.said[-3000:]
    assert "/etc/vllm, with somebody-elses" in run.said
    assert "gpu-02: the inventory still names what went (gpu_hosts)" in run.said
    assert gpu.file("/etc/nccl.conf").content_string == "NCCL_SOCKET_NTHREADS=2\n"
    assert gpu.file("/var/lib/vllm/models/m/x").exists, "weights go only when asked"
    assert gpu.run("nft list table inet gpu_fleet").rc != 0
    assert units(gpu) == set()
    left = files(gpu) - set(gpu.check_output("cat /var/log/before").splitlines())
    mine = {"/etc/nccl.conf", "/etc/vllm", "/etc/vllm/somebody-elses", "/srv", "/var/lib/vllm"}
    strange = sorted(p for p in left if not p.startswith((*NOTED, "/var/lib/vllm/models")) and p not in mine)
    of_packages = {p for p in strange if gpu.run(f"dpkg -S '{p}'").rc == 0}
    assert [path for path in strange if path not in of_packages] == []
    assert play("--limit", "gpu-02", teardown_named=True, **ON_ONE).changed() == 0
    run = play("--limit", "gpu-02", teardown_named=True, teardown_weights=True, **ON_ONE)
    assert run.status == 0
    assert not gpu.file("/var/lib/vllm").exists
    assert ask("chat") == 200


def test_a_gateway_leaves(hosts):
    run = play("--limit", "gw-01", teardown_named=True, **ON_ONE)
    assert run.status == 0, run.said[-3000:]
    gateway = hosts["gw-01"]
    assert units(gateway) == set()
    assert not {path for path in files(gateway) if "gpu-fleet" in path or "gpu_fleet" in path}
    assert gateway.run("pgrep -x haproxy").rc == 1
