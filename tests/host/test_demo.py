"""The demo's fleet, looked at from outside and inside: two lab hosts that serve one model together.

scripts/test e2e deploys it and runs these tests in order; some of them damage what they find and have it put right.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from gpu_fleet import demo  # noqa: E402
from gpu_fleet.endtoend import STRANGER  # noqa: E402
from gpu_fleet.steps import LAB, Runner, environment  # noqa: E402

SECOND_RUN_SECONDS = 25.0
RANK_PORT = 8001  # the ranks' meeting place of replica 0, by data/ports.yml; listens on the head
CONNECT = "import socket; socket.create_connection(('{address}', {port}), 3).close()"


@pytest.fixture(scope="session")
def fleet(tmp_path_factory) -> demo.Fleet:
    """The fleet that scripts/test e2e has just deployed."""
    runner = Runner(tmp_path_factory.mktemp("logs"))
    return demo.Fleet(runner, lab=os.environ["GPU_FLEET_LAB"], inventory=Path(os.environ["GPU_FLEET_INVENTORY"]))


def inside(fleet: demo.Fleet, host: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command on a host of the lab, the stranger among them."""
    return subprocess.run(
        [sys.executable, str(LAB), "exec", fleet.lab, host, "--", *command], capture_output=True, text=True, check=False
    )


def connects(fleet: demo.Fleet, source: str, host: str, port: int) -> bool:
    return (
        inside(fleet, source, "python3", "-c", CONNECT.format(address=fleet.address(host), port=port)).returncode == 0
    )


def site(fleet: demo.Fleet, *arguments: str, inventory: Path | None = None) -> tuple[int, str, float]:
    """Run site.yml; exit status, output and seconds."""
    began = time.monotonic()
    done = subprocess.run(
        ["ansible-playbook", "-i", str(inventory or fleet.inventory), "--diff", "site.yml", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment(),
    )
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began


def recap(output: str) -> dict[str, dict[str, int]]:
    """Ansible's closing counts by host."""
    lines = re.findall(r"^(\S+)\s+: (ok=.*)$", output, re.MULTILINE)
    return {host: {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", counts)} for host, counts in lines}


def fingerprint(fleet: demo.Fleet, host: str) -> str:
    """Content and modes of all that the fleet keeps on a host besides wheels and weights, and its packet filter."""
    script = (
        "find /etc /root/.config -type f -exec sha256sum {} + 2>/dev/null | sort -k 2;"
        "find /etc /opt/vllm /var/lib/vllm -printf '%p %m %U:%G %y %l\\n' | sort; nft --stateless list ruleset;"
        "systemctl show -p InvocationID 'vllm@*'"
    )
    done = inside(fleet, host, "sh", "-c", script)
    assert len(done.stdout) > 1000, f"{host}: the fingerprint holds nothing: {done.stderr}"
    return done.stdout


def differences(before: str, after: str) -> list[str]:
    """Lines of two fingerprints that only one of them has."""
    one, other = set(before.splitlines()), set(after.splitlines())
    return sorted([f"- {line}" for line in one - other] + [f"+ {line}" for line in other - one])


# -- it answers -------------------------------------------------------------------------------------------------------------


def test_it_answers_in_plain_english(fleet):
    answer = demo.ask(fleet, demo.QUESTION)
    assert "Paris" in answer, answer


@pytest.mark.parametrize("key", ["", "wrong", "x" * 43])
def test_a_wrong_key_is_refused(fleet, key):
    with pytest.raises(demo.Refused) as refused:
        demo.ask(fleet, demo.QUESTION, key=key)
    assert refused.value.status == 401


# -- on the hosts -----------------------------------------------------------------------------------------------------------


def test_every_rank_runs_and_starts_with_its_host(host):
    unit = host.service("vllm@chat.0.service")
    assert unit.is_running
    assert unit.is_enabled


def test_no_process_of_the_server_is_roots(host):
    group = host.check_output("systemctl show vllm@chat.0.service --property=ControlGroup --value")
    users = host.check_output(f"xargs -I PID stat --format=%U /proc/PID < /sys/fs/cgroup{group}/cgroup.procs").split()
    assert len(users) >= 2, f"a server and its worker at least, not {users}"
    assert set(users) == {"vllm"}


def test_no_key_can_be_read_by_others(host, fleet):
    secrets = host.file("/etc/vllm/chat.0/secrets.env")
    assert secrets.mode == 0o600
    assert secrets.user == "root"
    shown = host.check_output("cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'; journalctl --no-pager")
    assert "vllm" in shown
    assert fleet.key() not in shown


# -- who may connect ----------------------------------------------------------------------------------------------------------


def test_a_peer_reaches_the_rank_port_and_a_stranger_does_not(fleet):
    assert connects(fleet, "gpu-02", "gpu-01", RANK_PORT), (
        "the peer is kept out, or nothing listens: nothing would be proved"
    )
    assert not connects(fleet, STRANGER, "gpu-01", RANK_PORT)


def test_the_api_is_for_its_clients_only(fleet):
    assert demo.ask(fleet, "Say hello.", tokens=4)
    assert not connects(fleet, STRANGER, "gpu-01", demo.PORT)


def test_ssh_stays_open_to_all(fleet):
    assert connects(fleet, STRANGER, "gpu-01", 22)
    assert connects(fleet, STRANGER, "gpu-02", 22)


# -- again, and in part --------------------------------------------------------------------------------------------------------


def test_a_second_run_changes_nothing_and_is_quick(fleet):
    status, output, seconds = site(fleet)
    print(f"measured: second site.yml on two hosts {seconds:.1f} s (at most {SECOND_RUN_SECONDS:.0f})")
    assert status == 0, output[-3000:]
    assert {host: counts["changed"] for host, counts in recap(output).items()} == {"gpu-01": 0, "gpu-02": 0}, output[
        -6000:
    ]
    assert seconds <= SECOND_RUN_SECONDS


def test_one_host_alone_leaves_the_other_as_it_was(fleet):
    before = fingerprint(fleet, "gpu-02")
    status, output, _ = site(fleet, "--limit", "gpu-01")
    assert status == 0, output[-3000:]
    assert set(recap(output)) == {"gpu-01"}
    assert recap(output)["gpu-01"]["changed"] == 0, output[-6000:]
    assert differences(before, fingerprint(fleet, "gpu-02")) == []


def test_an_unreachable_host_leaves_the_other_as_it_was(fleet, tmp_path):
    before = fingerprint(fleet, "gpu-01")
    cut_off = tmp_path / "cut-off.yml"
    cut_off.write_text("all:\n  hosts:\n    gpu-02:\n      ansible_port: 1\n")
    status, output, _ = site(fleet, "--inventory", str(cut_off))
    assert status == 4, output[-3000:]
    assert recap(output)["gpu-02"]["unreachable"] == 1
    assert recap(output)["gpu-01"]["changed"] == 0, output[-6000:]
    assert differences(before, fingerprint(fleet, "gpu-01")) == []
    assert "Paris" in demo.ask(fleet, demo.QUESTION)


def test_what_was_altered_by_hand_is_put_right(fleet):
    before = fingerprint(fleet, "gpu-02")
    damage = (
        "sed -i 's/^NCCL_SOCKET_IFNAME=.*/NCCL_SOCKET_IFNAME==wrong0/' /etc/nccl.conf;"
        "nft flush ruleset; chmod 0644 /etc/vllm/chat.0/secrets.env"
    )
    assert inside(fleet, "gpu-02", "sh", "-c", damage).returncode == 0
    assert len(differences(before, fingerprint(fleet, "gpu-02"))) > 3
    status, output, _ = site(fleet)
    assert status == 0, output[-3000:]
    assert recap(output)["gpu-01"]["changed"] == 0
    assert recap(output)["gpu-02"]["changed"] > 0
    assert differences(before, fingerprint(fleet, "gpu-02")) == []


# -- alone ------------------------------------------------------------------------------------------------------------------


def test_no_packet_leaves_the_fleet_while_it_starts_and_answers(fleet, lab_counters):
    for host in fleet.hosts:
        assert inside(fleet, host, "systemctl", "stop", "vllm@chat.0.service").returncode == 0
    lab_counters(fleet.lab, reset=True)
    status, output, seconds = site(fleet)
    assert status == 0, output[-3000:]
    print(f"measured: site.yml that starts a stopped service {seconds:.1f} s")
    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: demo.ask(fleet, f"What is {number} plus one?", tokens=4), range(100)))
    print(f"measured: 100 requests {time.monotonic() - began:.1f} s")
    assert len(answers) == 100
    sent = lab_counters(fleet.lab)
    assert sent["packets"] == 0, sent
