"""What a run of site.yml costs by the number of hosts: seconds of processor on the controller and on the hosts, and the clock.

    python tests/bench/scale.py [--hosts 1,2,4,8,16] [--again 3] [--record]

Hosts of the lab with SSH and systemd of their own, and a stand-in for vLLM (tests/standin) as their release, built from a wheel and
a lock by role vllm_runtime like any other: the engine itself would not fit so many times into one machine, and what is measured is
the collection. The controller shares the machine's processors with its hosts, so that the clock says little and the seconds of
processor much. For each number a lab is made, site.yml is run from bare hosts and then again, --again times; that may change nothing,
and the run whose clock is the median stands for all.

Prints a table, and two ratios: seconds of processor a host, the most hosts against one, and the clock against processor seconds
over cores. --record writes docs/validation/DATE-scale.md. Needs root.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "collections"), str(ROOT / "molecule" / "shared")]

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import locks  # noqa: E402
from gpu_fleet import demo  # noqa: E402
from gpu_fleet.steps import LOGS, Runner, environment  # noqa: E402
from gpufleet_lab import cgroups  # noqa: E402
from gpufleet_lab.names import LabNames  # noqa: E402

FOLDER = ROOT / ".cache" / "scale"
VERSION, PYTHON = "0.32.0", "3.11"
KEY = "scale-scale-scale-scale-scale-scale"
CORES = len(os.sched_getaffinity(0))


@dataclass
class Run:
    """One run of site.yml. Seconds of processor of the controller and of all hosts, of the clock; MiB of the controller at most."""

    hosts: int
    kind: str
    clock: float
    controller: float
    on_hosts: float
    memory: float
    changed: int

    @property
    def a_host(self) -> float:
        return (self.controller + self.on_hosts) / self.hosts

    @property
    def stretch(self) -> float:
        """The clock over what all cores at work would take."""
        return self.clock / ((self.controller + self.on_hosts) / CORES)


# -- the stand-in as a release ----------------------------------------------------------------------------------------------


def stand_in(folder: Path) -> Path:
    """A wheel of the stand-in (and an empty torch, which a release is tried with), and its lock; returns the lock's path."""
    folder.mkdir(parents=True, exist_ok=True)
    source = ROOT / "tests" / "standin" / "vllm"
    files = {str(path.relative_to(source.parent)): path.read_text("utf-8") for path in sorted(source.rglob("*.py"))}
    info = f"vllm-{VERSION}.dist-info"
    files |= {
        "torch/__init__.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\nSummary: a stand-in for vLLM\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: gpu_fleet\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nvllm = vllm.server:main\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    wheel = folder / f"vllm-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in files.items():
            archive.writestr(zipfile.ZipInfo(path, date_time=(1980, 1, 1, 0, 0, 0)), content)
    content = wheel.read_bytes()
    parts = (locks.Wheel("vllm", VERSION, wheel.name, len(content), hashlib.sha256(content).hexdigest()),)
    lock = locks.Lock(VERSION, "cpu", PYTHON, "x86_64", "2.17", f"vllm=={VERSION}", "tests/standin", parts)
    path = folder / "standin.lock"
    path.write_text(locks.render(lock), encoding="utf-8")
    return path


def write_inventory(folder: Path, hosts: tuple[str, ...], lock: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "group_vars").mkdir(parents=True)
    settings: dict[str, Any] = {
        "vllm_runtime_version": VERSION,
        "vllm_runtime_accelerator": "cpu",
        "vllm_runtime_source": "wheelhouse",
        "vllm_runtime_lock": str(lock),
        "vllm_runtime_wheelhouse": str(lock.parent),
        "host_limits_nofile": 4096,
        "host_limits_memlock": 65536,
        "vllm_services": [{"name": "chat", "model": "/srv/models/none"}],
        "vllm_service_api_keys": {"chat": KEY},
    }
    (folder / "group_vars" / "gpu_hosts.yml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    groups = {"all": {"children": {"gpu_hosts": {"hosts": dict.fromkeys(hosts)}}}}
    (folder / "hosts.yml").write_text(yaml.safe_dump(groups), encoding="utf-8")


# -- measuring --------------------------------------------------------------------------------------------------------------


def on_hosts(names: LabNames, hosts: tuple[str, ...]) -> float:
    """Seconds of processor that the hosts have used since they were booted, by their control groups."""
    used = 0.0
    for host in hosts:
        for root, kind in cgroups.hierarchies().items():
            group = root / names.cgroup / host
            if kind == "cgroup2" and (group / "cpu.stat").exists():
                stat = dict(line.split() for line in (group / "cpu.stat").read_text("ascii").splitlines())
                used += int(stat["usage_usec"]) / 1e6
                break
            if (group / "cpuacct.usage").exists():
                used += int((group / "cpuacct.usage").read_text("ascii")) / 1e9
                break
    return used


class Memory:
    """The most memory that a process and all below it have had at once (their proportional share of what they share), MiB."""

    def __init__(self, pid: int) -> None:
        self.pid, self.most, self.over = pid, 0.0, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        while not self.over.wait(1.0):
            self.most = max(self.most, sum(self._share(pid) for pid in self._below(self.pid)) / 1024)

    def _below(self, pid: int) -> list[int]:
        found = [pid]
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                for child in (task / "children").read_text("ascii").split():
                    found += self._below(int(child))
        except OSError:
            pass  # it has just ended
        return found

    @staticmethod
    def _share(pid: int) -> float:
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines():
                if line.startswith("Pss:"):
                    return float(line.split()[1])
        except OSError:
            pass
        return 0.0

    def end(self) -> float:
        self.over.set()
        self.thread.join()
        return self.most


def run(fleet: demo.Fleet, names: LabNames, kind: str) -> Run:
    """site.yml once. SystemExit where it fails, or where the second one changes something."""
    hosts, log = fleet.hosts, LOGS / "scale" / f"{len(fleet.hosts)}-{kind}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    before, used = on_hosts(names, hosts), resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as out:
        command = ["ansible-playbook", "-i", str(fleet.inventory), str(ROOT / "site.yml")]
        with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=out, stderr=out) as process:
            memory = Memory(process.pid)
            status = process.wait()
            most = memory.end()
    clock, now = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    text = log.read_text("utf-8")
    if status:
        raise SystemExit(f"site.yml on {len(hosts)} hosts failed ({kind}); its log is {log}:\n{text[-2000:]}")
    recap = [line for line in text.splitlines() if " changed=" in line and " unreachable=" in line]
    changed = sum(int(line.split(" changed=")[1].split()[0]) for line in recap)
    if kind == "second" and changed:
        raise SystemExit(f"the second run on {len(hosts)} hosts changed {changed} things; its log is {log}")
    controller = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return Run(len(hosts), kind, clock, controller, on_hosts(names, hosts) - before, most, changed)


def measure(count: int, lock: Path, again: int) -> list[Run]:
    """A lab of so many hosts: from bare hosts, and again. The lab is taken away in any case."""
    hosts = tuple(f"gpu-{number:02}" for number in range(1, count + 1))
    inventory = FOLDER / "inventory"
    write_inventory(inventory, hosts, lock)
    fleet = demo.Fleet(Runner(LOGS / "scale"), lab="scale", inventory=inventory, hosts=hosts)
    fleet.wheels.mkdir(parents=True, exist_ok=True)
    try:
        demo.boot(fleet)
        names = LabNames.of("scale", ROOT)
        cold = run(fleet, names, "cold")
        seconds = sorted((run(fleet, names, "second") for _ in range(again)), key=lambda one: one.clock)
        return [cold, seconds[again // 2]]
    finally:
        demo.down(fleet)


# -- telling ----------------------------------------------------------------------------------------------------------------


def told(runs: list[Run]) -> str:
    lines = [
        "| hosts | run | clock, s | controller, s of processor | hosts, s of processor | a host, s | clock / (processor / cores) | controller, MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.hosts} | {one.kind} | {one.clock:.1f} | {one.controller:.1f} | {one.on_hosts:.1f} | {one.a_host:.1f} | "
        f"{one.stretch:.2f} | {one.memory:.0f} |"
        for one in runs
    ]
    for kind in ("cold", "second"):
        of_kind = sorted((one for one in runs if one.kind == kind), key=lambda one: one.hosts)
        if len(of_kind) > 1:
            least, most = of_kind[0], of_kind[-1]
            ratio = most.a_host / least.a_host
            lines.append(
                f"\n{kind}: seconds of processor a host, {most.hosts} hosts against {least.hosts}: {ratio:.2f}"
            )
    return "\n".join(lines)


def main() -> int:
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--hosts", default="1,2,4,8,16", help="numbers of hosts, each on a lab of its own")
    words.add_argument("--again", type=int, default=1, help="how often the second run is made")
    words.add_argument("--record", action="store_true", help="write docs/validation/DATE-scale.md")
    given = words.parse_args()
    lock = stand_in(FOLDER / "wheelhouse")
    runs: list[Run] = []
    for count in map(int, given.hosts.split(",")):
        runs += measure(count, lock, given.again)
        print(told(runs), flush=True)
    if given.record:
        record(runs)
    return 0


def record(runs: list[Run]) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    today = datetime.datetime.now(datetime.UTC).date()
    text = (
        f"# What site.yml costs by the number of hosts, {today}\n\nMade by `python tests/bench/scale.py` on commit {commit}: lab hosts "
        f"with a stand-in for vLLM, {CORES} cores for the controller and all hosts together.\n\n{told(runs)}\n"
    )
    (ROOT / "docs" / "validation" / f"{today}-scale.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
