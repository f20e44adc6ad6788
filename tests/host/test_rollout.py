"""The rules of a live fleet, played on two hosts: the playbook is run with other variables, and its words are read.

The tests run in order and leave the fleet serving, each with what the one before left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import testinfra

ROOT = Path(__file__).resolve().parents[2]
INVENTORY = Path(os.environ["MOLECULE_INVENTORY_FILE"]).parent
HOSTS = ("gpu-01", "gpu-02")


@dataclass
class Run:
    """One run of the playbook: exit status, what it printed, how long it took (seconds)."""

    status: int
    said: str
    seconds: float

    def changed(self) -> int:
        return sum(int(word.split("=")[1]) for word in self.said.split() if word.startswith("changed="))


def services(chat=None, single=None, env=None):
    chat_service = {
        "name": "chat",
        "model": "/srv/models/none",
        "hosts_per_replica": 2,
        "args": chat or {},
        "env": env or {},
    }
    return [chat_service, {"name": "single", "model": "/srv/models/none", "port_base": 8100, "args": single or {}}]


def play(*options, playbook="molecule/rollout/converge.yml", **variables) -> Run:
    command = [
        f"{Path(sys.executable).parent}/ansible-playbook",
        str(ROOT / playbook),
        "-i",
        str(INVENTORY),
    ]
    began = time.monotonic()
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
    }
    done = subprocess.run(
        [*command, "-e", json.dumps(variables), *options], env=environment, capture_output=True, text=True, check=False
    )
    said = " ".join((done.stdout + done.stderr).split())  # the callback wraps long lines
    return Run(done.returncode, said, time.monotonic() - began)


@pytest.fixture(scope="module")
def hosts():
    return {name: testinfra.get_host(f"ansible://{name}?ansible_inventory={INVENTORY}") for name in HOSTS}


def show(host, instance, name="InvocationID"):
    return host.check_output(f"systemctl show vllm@{instance} --property={name} --value")


def current(host, instance="chat.0"):
    return host.check_output(f"readlink /etc/vllm/{instance}/current").rpartition("/")[2]


def invocations(hosts):
    return {name: show(host, "chat.0") for name, host in hosts.items()}


def test_a_run_with_nothing_to_do_does_nothing(hosts):
    before = invocations(hosts)
    run = play()
    assert run.status == 0
    assert run.changed() == 0
    assert invocations(hosts) == before


def test_the_only_replica_is_not_restarted_by_surprise(hosts):
    before, generation = invocations(hosts), current(hosts["gpu-01"])
    run = play(vllm_services=services(chat={"seed": 1}))
    assert run.status != 0
    assert "vllm_service_allow_outage: true" in run.said
    assert "chat.0 has to be restarted" in run.said
    assert invocations(hosts) == before
    assert current(hosts["gpu-01"]) == generation


def test_limit_to_one_host_of_a_replica_changes_nothing_or_says_what_is_missing(hosts):
    before = invocations(hosts)
    assert play("--limit", "gpu-01").changed() == 0
    run = play("--limit", "gpu-01", vllm_services=services(chat={"seed": 1}), vllm_service_allow_outage=True)
    assert run.status != 0
    assert "gpu-02 is not part of this run" in run.said
    assert invocations(hosts) == before


def test_with_consent_all_ranks_restart_with_the_new_generation(hosts):
    before, generation = invocations(hosts), current(hosts["gpu-01"])
    run = play(vllm_services=services(chat={"seed": 1}), vllm_service_allow_outage=True)
    assert run.status == 0, run.said
    for name, host in hosts.items():
        assert show(host, "chat.0") != before[name]
        assert current(host) != generation
        assert generation in hosts["gpu-01"].check_output("ls /etc/vllm/chat.0/generations"), (
            "the former generation is kept"
        )
        assert show(host, "chat.0", "ActiveState") == "active"
    again = play(vllm_services=services(chat={"seed": 1}))
    assert (again.status, again.changed()) == (0, 0)


def test_two_replicas_restart_one_after_the_other_without_consent(hosts):
    run = play(vllm_services=services(chat={"seed": 1}, single={"seed": 7}))
    assert run.status == 0, run.said
    first_up = float(
        hosts["gpu-01"]
        .check_output("systemctl show vllm@single.0 -p ActiveEnterTimestamp --value --timestamp=unix")
        .strip("@")
    )
    second_down = float(
        hosts["gpu-02"]
        .check_output("systemctl show vllm@single.1 -p InactiveEnterTimestamp --value --timestamp=unix")
        .strip("@")
    )
    assert second_down >= first_up


def test_a_change_that_fails_on_the_first_replica_never_reaches_the_second(hosts):
    healthy, former = show(hosts["gpu-02"], "single.1"), current(hosts["gpu-01"], "single.0")
    failing = services(chat={"seed": 1}, single={"seed": 8})
    failing[1]["env"] = {"STANDIN_FAIL_RANK": "0", "STANDIN_FAIL": "a bad change"}
    run = play(vllm_services=failing)
    assert run.status != 0
    assert "a bad change" in run.said
    assert "single.1 was not restarted and goes on as it was: gpu-01 failed before its turn" in run.said
    assert show(hosts["gpu-02"], "single.1") == healthy
    assert show(hosts["gpu-02"], "single.1", "ActiveState") == "active"
    assert f"single.0 serves again as before, with generation {former}" in run.said
    assert current(hosts["gpu-01"], "single.0") == former
    assert show(hosts["gpu-01"], "single.0", "ActiveState") == "active"


@pytest.mark.parametrize(
    ("bad", "told"),
    [({"STANDIN_SAYS": "!!!!"}, "0 of 8 answers begin as before"), ({"STANDIN_SLOW": "1.5"}, "tokens/s, it was")],
    ids=["nonsense", "slow"],
)
def test_one_that_starts_and_is_not_what_it_was_goes_back(hosts, bad, told):
    healthy, former = show(hosts["gpu-02"], "single.1"), current(hosts["gpu-01"], "single.0")
    worse = services(chat={"seed": 1}, single={"seed": 7})
    worse[1]["env"] = bad
    run = play(vllm_services=worse)
    assert run.status != 0
    assert told in run.said
    assert f"single.0 serves again as before, with generation {former}" in run.said
    assert show(hosts["gpu-01"], "single.0", "ActiveState") == "active"
    assert show(hosts["gpu-02"], "single.1") == healthy


def test_a_change_that_was_made_is_taken_back_whole(hosts):
    former = {name: current(host, f"single.{HOSTS.index(name)}") for name, host in hosts.items()}
    wanted = {"vllm_services": services(chat={"seed": 1}, single={"seed": 9}), "vllm_service_rollback": "single"}
    assert play(**wanted).status == 0
    chat = invocations(hosts)
    run = play(playbook="playbooks/rollback.yml", **wanted)
    assert run.status == 0, run.said
    assert f"single.0 goes back to generation {former['gpu-01']}" in run.said
    for name, host in hosts.items():
        assert current(host, f"single.{HOSTS.index(name)}") == former[name]
        assert show(host, f"single.{HOSTS.index(name)}", "ActiveState") == "active"
    again = play(playbook="playbooks/rollback.yml", **wanted)
    assert (again.status, again.changed()) == (0, 0), again.said
    assert "single.0 is back already" in again.said
    assert invocations(hosts) == chat
    refused = play(playbook="playbooks/rollback.yml", **{**wanted, "vllm_service_rollback": "none"})
    assert refused.status != 0
    assert "vllm_service_rollback: none is no service of this inventory; there are chat, single" in refused.said


@pytest.mark.parametrize(
    ("rank", "when"), [(0, {}), (1, {}), (0, {"STANDIN_FAIL_EARLY": "1"})], ids=["head", "worker", "before-they-met"]
)
def test_a_failed_start_says_why_at_once_and_leaves_nothing_in_a_circle(hosts, rank, when):
    for host in hosts.values():
        host.check_output("systemctl stop vllm@chat.0")
    failing = services(
        chat={"seed": 2 + rank},
        single={"seed": 7},
        env={"STANDIN_FAIL_RANK": str(rank), "STANDIN_FAIL": "the very cause", **when},
    )
    run = play(vllm_services=failing, vllm_service_allow_outage=True)
    assert run.status != 0
    assert "ValueError: the very cause" in run.said
    assert f"chat.0 did not start on {HOSTS[rank]}: the unit ended" in run.said
    assert run.seconds < 100, "start timeout is 150 s: the end of the unit has to end the play"
    for host in hosts.values():
        assert show(host, "chat.0", "ActiveState") in ("inactive", "failed")
        assert show(host, f"single.{HOSTS.index(host.backend.host)}", "ActiveState") == "active"


def test_the_next_run_brings_it_back(hosts):
    run = play(vllm_services=services(chat={"seed": 1}, single={"seed": 7}))
    assert run.status == 0, run.said
    assert {show(host, "chat.0", "ActiveState") for host in hosts.values()} == {"active"}


def test_a_change_that_fails_on_a_worker_takes_all_ranks_back(hosts):
    former = {name: current(host) for name, host in hosts.items()}
    failing = services(
        chat={"seed": 5}, single={"seed": 7}, env={"STANDIN_FAIL_RANK": "1", "STANDIN_FAIL": "only on the worker"}
    )
    secrets = "cat /etc/vllm/chat.0/secrets.env"
    key = hosts["gpu-01"].check_output(secrets)
    keys = {"chat": "vain-key-vain-key-vain-key-vain-key", "single": "single-key-single-key-single-key-si"}
    run = play(vllm_services=failing, vllm_service_allow_outage=True, vllm_service_api_keys=keys)
    assert run.status != 0
    assert hosts["gpu-01"].check_output(secrets) == key, "what came back takes a key that nobody has"
    assert keys["chat"] in hosts["gpu-01"].check_output(f"{secrets}.next"), "it was no change of the key"
    assert "ValueError: only on the worker" in run.said
    assert "chat.0 serves again as before" in run.said
    for name, host in hosts.items():
        assert current(host) == former[name]
        assert show(host, "chat.0", "ActiveState") == "active"


def test_what_the_release_refuses_is_never_switched_to(hosts):
    before, generation = invocations(hosts), current(hosts["gpu-01"])
    run = play(vllm_services=services(chat={"enforce-eager": True}, single={"seed": 7}), vllm_service_allow_outage=True)
    assert run.status != 0
    assert "unrecognized arguments: --enforce-eager" in run.said
    assert "Nothing was switched" in run.said
    assert invocations(hosts) == before
    assert current(hosts["gpu-01"]) == generation
    assert ".new" not in hosts["gpu-01"].check_output("ls -A /etc/vllm/chat.0/generations")


def test_a_new_key_needs_a_restart_and_says_so(hosts):
    keys = {"chat": "new-key-new-key-new-key-new-key-new", "single": "single-key-single-key-single-key-si"}
    wanted = services(chat={"seed": 1}, single={"seed": 7})
    run = play(vllm_services=wanted, vllm_service_api_keys=keys)
    assert run.status != 0
    assert "refuses the key" in run.said
    assert keys["chat"] not in run.said
    run = play(vllm_services=wanted, vllm_service_api_keys=keys, vllm_service_allow_outage=True)
    assert run.status == 0, run.said


def test_a_lost_rank_is_started_together_with_the_other(hosts):
    keys = {"chat": "new-key-new-key-new-key-new-key-new", "single": "single-key-single-key-single-key-si"}
    hosts["gpu-02"].check_output("systemctl stop vllm@chat.0")
    before = invocations(hosts)
    run = play(vllm_services=services(chat={"seed": 1}, single={"seed": 7}), vllm_service_api_keys=keys)
    assert run.status == 0, run.said
    assert all(show(host, "chat.0") != before[name] for name, host in hosts.items())


def test_a_service_that_is_no_longer_named_is_shown_and_left_alone(hosts):
    keys = {"chat": "new-key-new-key-new-key-new-key-new"}
    run = play(vllm_services=services(chat={"seed": 1})[:1], vllm_service_api_keys=keys)
    assert run.status == 0, run.said
    assert "Left over on gpu-01 and not touched: single.0" in run.said
    assert show(hosts["gpu-01"], "single.0", "ActiveState") == "active"
