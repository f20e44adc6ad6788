"""A lab killed at any moment can be removed, and leaves nothing behind. Needs root; takes about two minutes.

scripts/test long tests/long/test_lab.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "molecule" / "shared" / "lab.py"
sys.path[:0] = [str(LAB.parent), str(ROOT / "scripts")]

from gpufleet_lab import cgroups  # noqa: E402
from gpufleet_lab.names import LabNames  # noqa: E402

NAMES = [f"long-{number}" for number in range(4)]


def lab(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(LAB), *arguments], capture_output=True, text=True, check=False, **options
    )


def up(name: str) -> subprocess.CompletedProcess[str]:
    return lab("up", name, "--host", "gpu-01", "--host", "gpu-02")


def remains(name: str) -> list[str]:
    """Whatever of a lab is still on this machine."""
    names = LabNames.of(name, ROOT)
    found = [str(folder) for folder in cgroups.folders(names.cgroup)]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(names.folder) in line]
    found += [str(path) for path in (names.folder, Path(f"/sys/class/net/{names.bridge}")) if path.exists()]
    tables = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout
    found += [names.table] if names.table in tables else []
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    found += [line for line in processes.splitlines() if names.lab_id in line]
    return found


@pytest.fixture(autouse=True)
def clean():
    """Nothing of these labs before, nothing after; and ip_forward as it was, where no other lab holds it."""
    for name in NAMES:
        lab("down", name)
    others = lab("list").stdout
    forward = Path("/proc/sys/net/ipv4/ip_forward").read_text()
    yield
    for name in NAMES:
        assert lab("down", name).returncode == 0
        assert remains(name) == []
    if not others:
        assert Path("/proc/sys/net/ipv4/ip_forward").read_text() == forward


@pytest.fixture(scope="module", autouse=True)
def base():
    """The root file system, so that the kills below hit the making of the lab."""
    assert lab("base").returncode == 0


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("after", [0.05, 0.15, 0.25, 0.35, 0.5, 0.7, 0.9, 1.2])
def test_an_up_that_is_cut_short_can_be_removed_or_finished(after, signal_number):
    name = NAMES[0]
    process = subprocess.Popen(
        [sys.executable, str(LAB), "up", name, "--host", "gpu-01", "--host", "gpu-02"],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    time.sleep(after)
    process.send_signal(signal_number)
    process.wait(30)
    if after in (0.25, 0.7):  # either way out
        assert up(name).returncode == 0, "a half-made lab was not finished by the next up"
        assert lab("exec", name, "gpu-02", "--", "true").returncode == 0
    assert lab("down", name).returncode == 0
    assert remains(name) == []


def test_killed_hosts_come_back_with_their_disk():
    name = NAMES[0]
    assert up(name).returncode == 0
    assert lab("exec", name, "gpu-01", "--", "touch", "/root/kept").returncode == 0
    cgroups.kill(f"{LabNames.of(name, ROOT).cgroup}/supervisors")
    cgroups.kill(f"{LabNames.of(name, ROOT).cgroup}/gpu-01")
    again = up(name)
    assert again.returncode == 0, again.stderr
    assert "started gpu-01, gpu-02" in again.stderr
    assert lab("exec", name, "gpu-01", "--", "ls", "/root/kept").returncode == 0


def test_a_host_reboots():
    name = NAMES[0]
    assert up(name).returncode == 0
    boot = ["exec", name, "gpu-01", "--", "cat", "/proc/1/stat"]
    before = lab(*boot).stdout.split()[21]
    lab("exec", name, "gpu-01", "--", "shutdown", "-r", "now")
    end = time.monotonic() + 60
    while time.monotonic() < end:
        after = lab(*boot)
        if after.returncode == 0 and after.stdout.split()[21] != before:
            break
        time.sleep(0.5)
    else:
        pytest.fail("the host did not come back within 60 s")
    peer = "import socket; socket.create_connection(('gpu-02', 22), 5)"
    assert lab("exec", name, "gpu-01", "--", "python3", "-c", peer).returncode == 0


def test_labs_made_at_once_do_not_meet():
    with ThreadPoolExecutor(len(NAMES)) as pool:
        made = list(pool.map(up, NAMES))
    assert [done.returncode for done in made] == [0] * len(NAMES), [done.stderr for done in made]
    states = [json.loads((LabNames.of(name, ROOT).folder / "lab.json").read_text()) for name in NAMES]
    assert len({state["subnet"] for state in states}) == len(NAMES)
    assert lab("down", NAMES[1]).returncode == 0
    assert lab("exec", NAMES[0], "gpu-02", "--", "true").returncode == 0, "removing one lab broke another"


def test_two_ups_of_one_lab_take_turns():
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(up, [NAMES[0]] * 2))
    assert [done.returncode for done in made] == [0, 0]
    assert sum("was up already" in done.stderr for done in made) == 1


def test_what_leaves_the_lab_is_counted_and_named():
    name = NAMES[0]
    assert up(name).returncode == 0
    lab("counters", name, "--reset")
    inside = "import socket; socket.create_connection(('gpu-02', 22), 5)"
    assert lab("exec", name, "gpu-01", "--", "python3", "-c", inside).returncode == 0
    assert json.loads(lab("counters", name).stdout)["packets"] == 0
    # A documentation address (RFC 5737): the packet is counted on its way out, an answer is not waited for.
    outside = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('198.51.100.7', 9))"
    assert lab("exec", name, "gpu-01", "--", "python3", "-c", outside).returncode == 0
    said = json.loads(lab("counters", name).stdout)
    assert said["packets"] == said["hosts"]["gpu-01"]["packets"] == 1
    assert said["hosts"]["gpu-02"]["packets"] == 0
    assert [target["to"] for target in said["targets"]] == ["198.51.100.7"]


def test_another_set_of_hosts_is_refused():
    name = NAMES[0]
    assert up(name).returncode == 0
    other = lab("up", name, "--host", "gpu-01")
    assert other.returncode == 2
    assert "exists with other hosts" in other.stderr


def test_without_root_it_is_one_line():
    done = subprocess.run(
        [
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "/usr/bin/python3",
            str(LAB),
            "up",
            NAMES[0],
            "--host",
            "gpu-01",
        ],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"]},
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "root" in done.stderr
