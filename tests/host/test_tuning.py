"""Other settings tried on a replica under load, and the replica serving as before, also after a kill: real vLLM (CPU build), one host.

What is measured here depends on the machine; that four seats do more than two does not.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import testinfra

ROOT = Path(__file__).resolve().parents[2]
INVENTORY = Path(os.environ["MOLECULE_INVENTORY_FILE"]).parent
KEPT = INVENTORY / ".acceptance" / "tight"
PROGRAM = [sys.executable, "-m", "gpu_fleet.cli"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}


@pytest.fixture(scope="module")
def gpu_01():
    return testinfra.get_host(f"ansible://gpu-01?ansible_inventory={INVENTORY}")


def fleet(*words: str) -> subprocess.CompletedProcess[str]:
    """scripts/fleet, without its bootstrap."""
    command = [*PROGRAM, *words]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, cwd=ROOT, timeout=2400)


def links(host) -> dict[str, str]:
    # There is no `previous` before the first change.
    found = {}
    for name in ("current", "previous"):
        path = f"/etc/vllm/tight.0/{name}"
        found[name] = host.check_output(f"readlink {path}") if host.file(path).is_symlink else ""
    return found


def settled() -> None:
    """The fleet is as the inventory says: a run of all of it changes nothing."""
    told = json.loads(fleet("deploy", "-i", str(INVENTORY), "--json").stdout)
    assert (told["exit_status"], told["changed"]) == (0, {"gpu-01": 0}), told


def test_the_better_setting_is_offered_and_nothing_is_kept(gpu_01):
    before, began = links(gpu_01), time.monotonic()
    # The first candidate is four seats; the second, one seat, only where there is time for it.
    done = fleet("tune", "-i", str(INVENTORY), "tight", "--yes", "--json", "--only", "max-num-seqs", "--budget", "700")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    told = json.loads(done.stdout)
    print(f"measured: tune: {time.monotonic() - began:.0f} s")
    for trial in told["trials"]:
        print(f"measured: tune: {json.dumps(trial)}")
    assert told["best"] == "max-num-seqs" and told["settings"] == {"args": {"max-num-seqs": 4}}
    assert told["trials"][1]["against_as_it_is"] == "better"
    assert links(gpu_01) == before, "it serves as before, and a rollback goes where it went before"
    assert not (KEPT / "tuning.json").exists() and (KEPT / "tuned.yml").is_file()
    settled()


def test_killed_in_the_middle_of_a_trial_the_next_run_brings_it_back(gpu_01):
    before = links(gpu_01)
    quick = ["-e", "accept_repeats=1", "-e", "accept_seconds_per_point=1", "-e", '{"accept_concurrencies": [1]}']
    command = [*PROGRAM, "tune", "-i", str(INVENTORY), "tight", "--yes", "--only", "max-num-seqs", *quick]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, start_new_session=True, **quiet) as one:
        until = time.monotonic() + 600
        while links(gpu_01)["current"] == before["current"] and one.poll() is None and time.monotonic() < until:
            time.sleep(0.5)
        # Another generation is current, its server begins to start.
        for group in {os.getpgid(pid) for pid in (one.pid, *below(one.pid))}:
            os.killpg(group, signal.SIGKILL)
    assert links(gpu_01)["current"] != before["current"], "it was killed too early, or too late"
    assert (KEPT / "tuning.json").is_file()
    began = time.monotonic()
    done = fleet("tune", "-i", str(INVENTORY), "tight", "--put-back")
    print(f"measured: put back after a kill: {time.monotonic() - began:.0f} s")
    assert done.returncode == 0 and "serves as before" in done.stdout, done.stdout + done.stderr
    assert links(gpu_01) == before and not (KEPT / "tuning.json").exists()
    settled()


def below(pid: int) -> list[int]:
    """All processes that a process began."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if parent == pid:
            found += [int(folder.name), *below(int(folder.name))]
    return found
