"""The tasks of a rollout, in their order: who is let in, taken aside, judged, stopped and started, after a run that was cut off.

They run for real on no host: the modules that would reach systemd, HAProxy and a server are stand-ins that write down what they
were asked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import unjudged
from conftest import REPOSITORY

MODULE = """#!/usr/bin/python
# Stand-in, made for a test.
from ansible.module_utils.basic import AnsibleModule

module = AnsibleModule(argument_spec={{name: {{"type": "raw"}} for name in {names}}})
p = module.params
with open({record!r}, "a") as record:
    record.write({line} + "\\n")
if {wrong}:
    module.fail_json(msg="0 of 8 answers begin as before")
module.exit_json(changed=False, invocation_id="1", previous="", answers=[" a"], problem="")
"""
# Parameters, and the line that is written.
MODULES = {
    "gateway_server": (
        ["servers", "state", "others", "deadline", "resting", "tls"],
        "' '.join([p['state'], *(p['servers'] or []), 'others' if p['others'] in (True, 'True') else '']).strip()"
        " + (' but ' + ' '.join(p['resting']) if p['resting'] else '')",
    ),
    "instance": (
        ["instance", "generation", "timeout", "hosts", "rank", "store_port", "invocation", "state", "unjudged", "previous"],
        "' '.join([p['instance'], p['state'] or 'started', p['generation'] or '', str((p['unjudged'] or {}).get('former', ''))]).strip()",
    ),
    "answers": (
        ["url", "model", "api_key", "deadline", "plan", "wanted", "said", "before", "same", "speed", "instance"],
        "p['url'] + (' compared' if p['before'] else ' by what was said' if p['said'] else ' asked')",
    ),
}  # fmt: skip
PLAY = """
- hosts: gpu_hosts
  gather_facts: false
  tasks:
    - ansible.builtin.set_fact: {__vllm_service_generations: "{{ generations[inventory_hostname] }}"}
    - ansible.builtin.include_role: {name: gpu_fleet.vllm.vllm_service, tasks_from: rollout.yml}
"""
HOSTS = ("gpu-01", "gpu-02")


def result(number, **more):
    """What module generation says of a replica that runs what is not wanted any more."""
    item = {"instance": f"chat.{number}", "service": "chat", "rank": 0, "hosts": [HOSTS[number]], "model": "m"}
    item |= {"ports": {"rank_store": 1}, "config": {"served-model-name": ["chat"], "model": "m"}}
    told = {"active": "active", "settled": False, "restart_reasons": ["it runs generation old"], "unjudged": {}}
    return {"item": item, "id": "new", "running_generation": "old", "only_unjudged": False, **told, **more}


def cut_off(number, **more):
    """What it says of one that an earlier run changed."""
    said = {"answers": [" a"], "problem": ""}
    reasons = [unjudged.REASON]
    return result(
        number, restart_reasons=reasons, unjudged={"former": "old", "said": said}, **{"only_unjudged": True, **more}
    )


def run(folder, *results, nonsense=False, **variables):
    home = folder / "collections" / "ansible_collections" / "gpu_fleet" / "vllm"
    (home / "plugins" / "modules").mkdir(parents=True)
    (home / "roles").mkdir()
    for name in ("data", "meta", "plugins/filter", "plugins/module_utils", "plugins/plugin_utils", "plugins/lookup"):
        (home / name).symlink_to(REPOSITORY / name)
    for name in ("gateway", "vllm_service"):
        (home / "roles" / name).symlink_to(REPOSITORY / "roles" / name)
    for name, (names, line) in MODULES.items():
        wrong = "bool(p['before'])" if nonsense and name == "answers" else "False"
        text = MODULE.format(names=names, line=line, record=str(folder / "record"), wrong=wrong)
        (home / "plugins" / "modules" / f"{name}.py").write_text(text)
    (folder / "play.yml").write_text(PLAY)
    names = [f"chat.{number}" for number in range(2)]
    url = [f"http://192.0.2.{number}" for number in range(2)]
    replicas = {
        name: {
            "service": "chat",
            "head": host,
            "hosts": [host],
            "urls": {host: address},
            "url": address,
            "ports": {"api": 8000, "agent": 8003},
            "world": 1,
        }
        for name, host, address in zip(names, HOSTS, url, strict=True)
    }
    plan = {
        "replicas": replicas,
        "services": {"chat": {"served_model_names": ["chat"], "replicas": names}},
        "addresses": dict.fromkeys(HOSTS, "192.0.2.1"),
        "hosts": {host: {"instances": [], "ray": []} for host in HOSTS},
        "maintenance": {"hosts": [], "replicas": {}},
    }
    given = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "fleet_plan": plan,
        "generations": {host: {"results": [one]} for host, one in zip(HOSTS, results, strict=True)},
        "vllm_service_api_keys": {"chat": "k"},
        "vllm_service_start_timeout": 9,
        **variables,
    }
    groups = {"gpu_hosts": {"hosts": dict.fromkeys(HOSTS)}, "gateways": {"hosts": {"gw-01": None}}}
    (folder / "hosts.json").write_text(json.dumps({"all": {"children": groups}}))
    told = {
        "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
        "ANSIBLE_COLLECTIONS_PATH": str(folder / "collections"),
        "ANSIBLE_INVENTORY_ENABLED": "ansible.builtin.yaml",
        "ANSIBLE_PIPELINING": "1",
    }
    program = f"{os.path.dirname(sys.executable)}/ansible-playbook"
    done = subprocess.run(
        [program, str(folder / "play.yml"), "-i", str(folder / "hosts.json"), "-e", json.dumps(given)],
        cwd=folder,
        env={**os.environ, **told},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout[-8000:], done.stderr[-2000:])
    return done.returncode, " ".join(done.stdout.split()), (folder / "record").read_text().splitlines()


def turn(number, *between):
    """What each replica's turn begins and ends with."""
    return [f"drained chat/chat.{number} others", *between, f"admitted chat/chat.{number}"]


def changed(number):
    url, name = f"http://192.0.2.{number}", f"chat.{number}"
    return turn(
        number,
        f"{url} asked",
        f"{name} stopped  old",
        f"{name} started new",
        f"{name} watched",
        f"{url} compared",
        f"{name} judged",
    )


def test_what_was_said_before_is_kept_with_the_stop_and_each_gateway_is_asked_for_another(tmp_path):
    status, _, record = run(tmp_path, result(0), result(1))
    assert status == 0
    assert record == ["repaired", *changed(0), *changed(1)]


def test_what_was_changed_by_a_run_that_was_cut_off_is_judged_and_not_started_again(tmp_path):
    """And it is not let in before, though everything else is that such a run took out."""
    status, _, record = run(tmp_path, result(0), cut_off(1))
    assert status == 0
    judged = turn(1, "http://192.0.2.1 by what was said", "http://192.0.2.1 compared", "chat.1 judged")
    assert record == ["repaired but chat/chat.1", *judged, *changed(0)]


def test_what_it_stopped_is_started_and_judged(tmp_path):
    """No other replica has to be let in for one that does not run."""
    status, _, record = run(tmp_path, cut_off(0, active="inactive", only_unjudged=False), result(1))
    assert status == 0
    assert record[:3] == ["repaired but chat/chat.0", "drained chat/chat.0", "http://192.0.2.0 by what was said"]
    assert record[3:8] == [
        "chat.0 stopped  old",
        "chat.0 started new",
        "chat.0 watched",
        "http://192.0.2.0 compared",
        "chat.0 judged",
    ]
    assert record[8:] == ["admitted chat/chat.0", *changed(1)]


def test_what_answers_nonsense_goes_back_to_what_served_before_that_run(tmp_path):
    status, said, record = run(tmp_path, cut_off(0), result(1), nonsense=True)
    assert status != 0
    assert record == [
        "repaired but chat/chat.0",
        "drained chat/chat.0 others",
        "http://192.0.2.0 by what was said",
        "http://192.0.2.0 compared",
        "chat.0 stopped",
        "chat.0 started old",
        "chat.0 watched",
        "chat.0 judged",
        "admitted chat/chat.0",
    ]
    assert "0 of 8 answers begin as before" in said
    assert "chat.0 serves again as before, with generation old" in said
    assert "chat.1 was not restarted and goes on as it was: gpu-01 failed before its turn" in said


@pytest.mark.parametrize("consent", [True, "true"])
def test_with_consent_no_gateway_is_asked_for_another(tmp_path, consent):
    status, _, record = run(tmp_path, result(0), result(1), vllm_service_allow_outage=consent)
    assert status == 0
    assert [line for line in record if line.startswith("drained")] == ["drained chat/chat.0", "drained chat/chat.1"]
