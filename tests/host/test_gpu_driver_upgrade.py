"""Another driver under a fleet that serves: playbooks/driver.yml, consent, reboots, MIG.

Two replicas of a service, one a host, behind a gateway; packages and machines are stand-ins, the engine is one for vLLM. apt,
dpkg, DKMS, systemd, reboots, agents and the gateway are real. The tests run in order, each with what the one before left. Names say
which of the fifteen failures (tests/unit/test_driver_plan.py) a test plays.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import ssl
import threading
import time
from pathlib import Path

import pytest
from driver_play import (
    CONSENT,
    CUINIT,
    DRIVER,
    HGX,
    NEW,
    NEXT,
    OLD,
    PLAIN,
    connect,
    installed,
    play,
    refused,
    state,
    versions,
)

PLAYBOOK = "playbooks/driver.yml"
CHAT = {HGX: "vllm@chat.0.service", PLAIN: "vllm@chat.1.service"}
GATEWAY, PORT, KEY = "gw-01", 8443, "client-of-the-tests-client-of-the-tests"
CA = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"]) / "secrets" / "ca.pem"


@pytest.fixture(scope="module")
def hgx():
    return connect(HGX)


@pytest.fixture(scope="module")
def plain():
    return connect(PLAIN)


def active(machine, unit: str) -> bool:
    return machine.run(f"systemctl is-active {unit}").stdout.strip() == "active"


def boot(machine) -> str:
    return machine.check_output("cut -d' ' -f22 /proc/1/stat")


def restart(machine) -> None:
    """Reboot it by hand and wait until it has booted."""
    before = boot(machine)
    # While it is away SSH itself fails, which testinfra raises.
    with contextlib.suppress(RuntimeError):
        machine.run("systemctl reboot")
    end = time.monotonic() + 180
    while time.monotonic() < end:
        time.sleep(1)
        with contextlib.suppress(RuntimeError):
            told = machine.run("cut -d' ' -f22 /proc/1/stat; systemctl is-system-running --wait")
            if told.stdout.split()[:1] not in ([], [before]):
                return
    pytest.fail("the host did not come back within 180 s")


def loaded(machine) -> str:
    return machine.check_output("grep -oE '  [0-9.]+  ' /srv/replay/proc/driver/nvidia/version").strip()


@pytest.fixture(scope="module")
def gateway():
    return connect(GATEWAY)


def let_in(gateway) -> dict[str, str]:
    """What each replica is at the gateway: up, down, or aside, of which `show stat` says nothing where it is down."""
    code = (
        "import socket;s=socket.socket(socket.AF_UNIX);s.connect('/run/gpu-fleet-gateway/admin.sock');"
        "s.sendall(b'show servers state\\n');print(s.makefile().read())"
    )
    rows = [line.split() for line in gateway.check_output(f'python3 -c "{code}"').splitlines()[2:] if line.strip()]
    # srv_name, srv_op_state (2: running), srv_admin_state (8: drained by the runtime socket)
    found = {row[3]: (int(row[5]), int(row[6])) for row in rows}
    return {name: "aside" if said & 8 else "up" if runs == 2 else "down" for name, (runs, said) in found.items()}


class Clients:
    """Four ask the gateway for completions of two seconds, one after the other, until they are told to end. The stand-in
    for vLLM drops what it works on when its unit stops."""

    def __init__(self, gateway) -> None:
        self.address = gateway.check_output("hostname -I").split()[0]
        self.answers: list[str] = []
        self.over = threading.Event()
        self.threads = [threading.Thread(target=self.run) for _ in range(4)]

    def __enter__(self) -> Clients:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()

    def run(self) -> None:
        while not self.over.wait(0.1):
            self.answers.append(self.ask())

    def ask(self) -> str:
        link = http.client.HTTPSConnection(
            self.address, PORT, timeout=60, context=ssl.create_default_context(cafile=str(CA))
        )
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        try:
            asked = {"model": "chat", "prompt": "a", "max_tokens": 3, "ignore_eos": True}
            link.request("POST", "/v1/completions", json.dumps(asked), headers)
            reply = link.getresponse()
            return f"{reply.status} {json.loads(reply.read()).get('choices')}"
        except (OSError, http.client.HTTPException, ValueError) as error:
            return repr(error)
        finally:
            link.close()


def test_the_fleet_serves_with_the_first_driver(hgx, plain, gateway):
    for name, machine in ((HGX, hgx), (PLAIN, plain)):
        assert active(machine, CHAT[name])
        assert loaded(machine) == OLD
    assert let_in(gateway) == {"chat.0": "up", "chat.1": "up"}


# Consent


def test_nothing_is_stopped_without_consent():
    told = refused(
        f"{HGX},{PLAIN}",
        "serves on this host",
        "gpu_driver_stop_services: true",
        playbook=PLAYBOOK,
        gpu_driver_version=NEW,
    )
    assert f"{CHAT[HGX]} serves" in told.said


def test_no_driver_changes_on_a_serving_host_outside_of_its_playbook():
    refused(HGX, "playbooks/driver.yml", gpu_driver_version=NEW, **CONSENT)


def test_reboot_null_is_refused_with_the_instruction():
    told = refused(
        f"{HGX},{PLAIN}",
        "it takes a reboot",
        "gpu_driver_reboot: true",
        playbook=PLAYBOOK,
        gpu_driver_version=NEW,
        gpu_driver_stop_services=True,
    )
    assert f"driver {OLD} (open) is loaded, planned is {NEW} (open)" in told.said


# The upgrade


def test_check_and_diff_name_everything_that_then_happens_and_change_nothing_and_no_client_notices(hgx, plain, gateway):
    before = {machine: state(machine) for machine in (hgx, plain)}
    told = play("", "--check", "--diff", playbook=PLAYBOOK, gpu_driver_version=NEW, **CONSENT)
    assert told.status == 0
    assert {machine: state(machine) for machine in (hgx, plain)} == before
    assert active(hgx, CHAT[HGX]) and active(plain, CHAT[PLAIN])
    have = {machine: installed(machine) for machine in (hgx, plain)}
    boots = {machine: boot(machine) for machine in (hgx, plain)}

    with Clients(gateway) as clients:
        run = play("", playbook=PLAYBOOK, gpu_driver_version=NEW, **CONSENT)
    assert run.status == 0
    print(f"{len(clients.answers)} requests meanwhile")
    assert len(clients.answers) > 60
    assert {answer.split()[0] for answer in clients.answers} == {"200"}, clients.answers
    assert let_in(gateway) == {"chat.0": "up", "chat.1": "up"}
    happened = set()
    for machine in (hgx, plain):
        now = installed(machine)
        for name in {*now, *have[machine]}:
            old, new = have[machine].get(name, ""), now.get(name, "")
            happened |= {(name, old, new)} if old != new else set()
        assert boot(machine) != boots[machine]
    assert happened == told.planned == run.planned
    assert ("nvidia-driver-cuda", f"{OLD}-1", f"{NEW}-1") in happened
    assert (f"nvidia-driver-pinning-{OLD}", f"{OLD}-1", "") in happened
    for machine in (hgx, plain):
        assert f"version {NEW}-*" in machine.check_output("cat /etc/apt/preferences.d/nvidia-driver-pin")
    assert not [item for item in happened if item[0] == "libc6" or item[0].startswith("linux-image")]


def test_both_serve_with_the_new_driver(hgx, plain):
    for name, machine in ((HGX, hgx), (PLAIN, plain)):
        assert versions(machine, *DRIVER) == {f"{NEW}-1"}
        assert loaded(machine) == NEW
        assert machine.check_output(CUINIT) == "0"
        assert active(machine, CHAT[name])
        assert "nvidia-driver-cuda" in machine.check_output("apt-mark showhold").split()


def test_failure_2_the_fabric_manager_went_with_the_driver(hgx):
    assert versions(hgx, "nvidia-fabricmanager", "libnvidia-nscq") == {f"{NEW}-1"}
    assert active(hgx, "nvidia-fabricmanager")
    assert NEW in hgx.check_output("nv-fabricmanager --version")


def test_a_second_run_of_the_playbook_changes_nothing_and_disturbs_nobody(hgx, plain):
    before = [
        machine.check_output(f"systemctl show {CHAT[name]} -p InvocationID")
        for name, machine in ((HGX, hgx), (PLAIN, plain))
    ]
    run = play("", playbook=PLAYBOOK, gpu_driver_version=NEW)
    assert (run.status, run.changed) == (0, 0)
    after = [
        machine.check_output(f"systemctl show {CHAT[name]} -p InvocationID")
        for name, machine in ((HGX, hgx), (PLAIN, plain))
    ]
    assert after == before


def test_the_playbook_stops_at_the_first_failure_and_leaves_the_next_host_as_it_is(hgx, plain, gateway):
    hgx.check_output("echo 999 > /srv/replay/cuinit")
    before = state(plain)
    serving = plain.check_output(f"systemctl show {CHAT[PLAIN]} -p InvocationID")
    run = play("", playbook=PLAYBOOK, gpu_driver_version=NEXT, **CONSENT)
    hgx.check_output("rm /srv/replay/cuinit")
    assert run.status != 0
    assert "cuInit returned 999, " in run.said
    assert "What was taken aside at the gateways (gw-01) stays so: chat.0." in run.said
    assert let_in(gateway) == {"chat.0": "aside", "chat.1": "up"}
    assert versions(hgx, *DRIVER) == {f"{NEXT}-1"}
    assert not active(hgx, CHAT[HGX])
    assert state(plain) == before
    assert plain.check_output(f"systemctl show {CHAT[PLAIN]} -p InvocationID") == serving


def test_put_right_it_goes_on_where_it_stopped(hgx, plain, gateway):
    run = play("", playbook=PLAYBOOK, gpu_driver_version=NEXT, **CONSENT)
    assert run.status == 0
    assert let_in(gateway) == {"chat.0": "up", "chat.1": "up"}
    for name, machine in ((HGX, hgx), (PLAIN, plain)):
        assert loaded(machine) == NEXT
        assert versions(machine, *DRIVER) == {f"{NEXT}-1"}
        assert active(machine, CHAT[name])


def test_failure_14_persistenced_starts_after_the_module_and_not_without_it(plain):
    unit = "nvidia-persistenced.service"
    assert active(plain, unit)
    assert (
        plain.check_output("nvidia-smi --query-gpu=persistence_mode --format=csv,noheader,nounits").split()
        == ["Enabled"] * 2
    )
    assert "gpu-fleet.conf" in plain.check_output(f"systemctl show {unit} -p DropInPaths")
    plain.check_output(
        "rm -f /srv/replay/proc/driver/nvidia/version.away; mv /srv/replay/proc/driver/nvidia/version /srv/replay/version.away"
    )
    plain.check_output(f"systemctl stop {unit}; systemctl start {unit}")
    shown = plain.check_output(f"systemctl show {unit} -p ActiveState,ConditionResult")
    plain.check_output("mv /srv/replay/version.away /srv/replay/proc/driver/nvidia/version")
    assert set(shown.split()) == {"ActiveState=inactive", "ConditionResult=no"}, (
        "it fails in the place of waiting for the module"
    )
    assert play(PLAIN, gpu_driver_version=NEXT).status == 0
    assert active(plain, unit)


# Reboots


def test_reboot_false_leaves_the_reboot_to_its_owner_and_takes_no_other_replica_meanwhile(hgx, plain, gateway):
    before = {machine: boot(machine) for machine in (hgx, plain)}
    other = state(plain)
    told = {"gpu_driver_version": NEW, "gpu_driver_reboot": False, "gpu_driver_stop_services": True}
    run = play("", playbook=PLAYBOOK, **told)
    assert run.status != 0
    assert "chat.0 on gpu-01 waits for the reboot" in run.said
    assert (boot(hgx), loaded(hgx)) == (before[hgx], NEXT)
    assert versions(hgx, *DRIVER) == {f"{NEW}-1"}
    assert not active(hgx, CHAT[HGX])
    assert (state(plain), active(plain, CHAT[PLAIN])) == (other, True)
    # What is enabled does not serve with a driver that nobody proved, though the host boots.
    restart(hgx)
    assert loaded(hgx) == NEW
    assert not active(hgx, CHAT[HGX])
    assert let_in(gateway) == {"chat.0": "aside", "chat.1": "up"}
    run = play("", playbook=PLAYBOOK, **told)
    assert run.status == 0
    assert active(hgx, CHAT[HGX])
    assert let_in(gateway) == {"chat.0": "up", "chat.1": "aside"}
    assert (boot(plain), loaded(plain)) == (before[plain], NEXT)
    assert versions(plain, *DRIVER) == {f"{NEW}-1"}
    assert not active(plain, CHAT[PLAIN])


def test_failure_1_a_driver_that_was_changed_under_a_loaded_one_is_told(plain):
    smi = plain.run("nvidia-smi -L")
    assert (smi.rc, "Driver/library version mismatch" in smi.stdout) == (18, True)
    told = refused(
        PLAIN, f"driver {NEXT} is loaded and {NEW} is installed", "gpu_driver_reboot: true", gpu_driver_version=NEW
    )
    assert "Driver/library version mismatch" in told.said


def test_a_second_run_with_reboot_false_changes_nothing(plain):
    run = play(PLAIN, gpu_driver_version=NEW, gpu_driver_reboot=False, gpu_driver_stop_services=True)
    assert (run.status, run.changed) == (0, 0)


def test_reboot_true_reboots_and_proves(plain):
    before = boot(plain)
    run = play(PLAIN, gpu_driver_version=NEW, **CONSENT)
    assert run.status == 0
    assert boot(plain) != before
    assert loaded(plain) == NEW
    assert plain.check_output(CUINIT) == "0"


def test_failure_9_another_kind_of_modules_names_what_goes_and_takes_nothing_else(plain):
    plain.check_output(f"systemctl stop {CHAT[PLAIN]}")
    before = installed(plain)
    run = play(PLAIN, gpu_driver_version=NEW, gpu_driver_modules="proprietary", **CONSENT)
    assert run.status == 0
    after = installed(plain)
    assert ("nvidia-kernel-open-dkms", f"{NEW}-1", "") in run.planned
    assert set(before) - set(after) == {"nvidia-kernel-open-dkms"}
    assert set(after) - set(before) == {"nvidia-kernel-dkms"}
    assert "Kernel Module  " in plain.check_output("cat /srv/replay/proc/driver/nvidia/version")
    assert "Open" not in plain.check_output("cat /srv/replay/proc/driver/nvidia/version")


# MIG


LAYOUT = {"0": ["3g.40gb", "1g.10gb"], "1": ["19", "19"]}


def slices(machine) -> list[str]:
    """Profiles that -lgi lists, GPU by GPU."""
    return re.findall(r"^\|\s+(\d+)\s+MIG (\S+)", machine.run("nvidia-smi mig -lgi").stdout, re.MULTILINE)


def test_failure_13_a_mig_layout_is_made_and_made_anew_at_each_boot(hgx):
    run = play(HGX, gpu_driver_version=NEW, gpu_driver_mig_layout=LAYOUT)
    assert run.status == 0
    made = [("0", "3g.40gb"), ("0", "1g.10gb"), ("1", "1g.10gb"), ("1", "1g.10gb")]
    assert slices(hgx) == made
    again = play(HGX, gpu_driver_version=NEW, gpu_driver_mig_layout=LAYOUT)
    assert (again.status, again.changed) == (0, 0)
    restart(hgx)
    assert slices(hgx) == made


def test_failure_13_a_change_of_the_driver_that_would_lose_the_instances_is_refused():
    refused(
        HGX, "its instances are gone after the driver is loaded anew", "gpu_driver_mig_layout", gpu_driver_version=NEXT
    )


def test_failure_13_instances_that_were_said_to_be_made_and_are_not_stop_it(hgx):
    hgx.check_output("nvidia-smi mig -dci; nvidia-smi mig -dgi; touch /srv/replay/mig_makes_nothing")
    run = play(HGX, gpu_driver_version=NEW, gpu_driver_mig_layout=LAYOUT)
    hgx.check_output("rm /srv/replay/mig_makes_nothing")
    assert run.status != 0
    assert "-lgi does not list them" in run.said


def test_failure_13_instances_of_another_layout_are_never_destroyed(hgx):
    assert play(HGX, gpu_driver_version=NEW, gpu_driver_mig_layout=LAYOUT).status == 0
    before = slices(hgx)
    run = play(HGX, gpu_driver_version=NEW, gpu_driver_mig_layout={"0": ["7g.80gb"]})
    assert run.status != 0
    assert "wanted are 7g.80gb" in run.said
    assert slices(hgx) == before
