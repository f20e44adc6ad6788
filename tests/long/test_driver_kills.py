"""Role gpu_driver, killed while it changes a driver, finds its way when it is run again. Prints a dated table.

The packages are stand-ins (tests/driver_repository) and the machine is played; apt, dpkg, DKMS, systemd and reboots are
real. At each point the role brings one version in the place of the other and is killed: ansible-playbook with SIGKILL, and
with it whatever it had started on the host, apt and dpkg included. One point cuts the host's power instead. Then the
playbook runs again, with nothing done by hand in between, and a third time, which may change nothing. Needs root and an
hour. --record writes docs/validation/DATE-driver-kills.md.

    scripts/test long driver_kills --record
"""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "molecule" / "shared" / "lab.py"
SCENARIO = ROOT / "molecule" / "gpu_driver_nvidia"
NAME, HOST = "long-driver", "gpu-01"
sys.path[:0] = [str(LAB.parent), str(ROOT / "scripts"), str(ROOT / "tests" / "driver_repository")]

import packages  # noqa: E402
from gpufleet_lab import cgroups  # noqa: E402
from gpufleet_lab.names import LabNames  # noqa: E402

PAIR = (packages.OLD, packages.NEW)
CUINIT = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
FOUND = 300.0  # seconds to wait for the point
PATIENCE = 900.0


@dataclass(frozen=True)
class Point:
    """Where it is killed: when a process on the host has `pattern` in its arguments, or when Ansible names `task`; then `after`
    seconds pass. fresh: on a host that has no driver yet. power: the host loses its power."""

    name: str
    pattern: str = ""
    task: str = ""
    after: float = 0.0
    fresh: bool = False
    power: bool = False


POINTS = (
    Point("lists of packages being read", r"^apt-get .*update", fresh=True),
    Point("headers of the kernel being unpacked", r"^(/usr/bin/)?dpkg .*--unpack", after=1.0, fresh=True),
    Point("first build by DKMS", r"dkms.* build |/cc1 ", fresh=True),
    Point("files of apt being written", task="Write the source, the pins"),
    Point("services stopped, nothing installed", task="Install exactly that"),
    Point("new packages being unpacked", r"^(/usr/bin/)?dpkg .*--unpack"),
    Point("modules of the old version being removed", r"dkms remove"),
    Point("modules of the new version being built", r"/cc1 "),
    Point("packages being configured", r"^(/usr/bin/)?dpkg .*--configure"),
    Point("installed, not yet held", task="Hold it"),
    Point("before the reboot", task="Reboot, as the plan says"),
    Point("services being started again", task="Start what was stopped"),
    Point("proved, what serves not yet let start", task="Let start what serves"),
    Point("power cut while DKMS builds", r"/cc1 ", power=True),
)


@dataclass
class Row:
    """One line of the table."""

    point: str
    cut: str = ""
    left: str = ""
    again: str = ""
    seconds: float = 0.0
    third: str = ""
    faults: list[str] = field(default_factory=list)


def lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(LAB), *arguments], capture_output=True, text=True, check=False)


def ask(command: str) -> str:
    """What a command of the host prints, nothing where it fails."""
    return lab("exec", NAME, HOST, "--", "sh", "-c", command).stdout.strip()


class Fleet:
    """The lab with its one host, and playbooks on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inventory = folder / "inventory"
        self.environment = {
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
            "PLAYED": str(folder / "played"),
            # A connection that outlives what was killed would be taken again by the next run.
            "ANSIBLE_SSH_ARGS": "-o ControlMaster=no -o ServerAliveInterval=15",
        }

    def begin(self) -> None:
        """A host without a driver."""
        lab("down", NAME)
        up = lab("up", NAME, "--host", HOST)
        assert up.returncode == 0, up.stderr
        self.inventory.mkdir(exist_ok=True)
        (self.inventory / "lab.yml").write_text(Path(up.stdout.strip()).read_text(encoding="utf-8"), encoding="utf-8")
        groups = {"gpu_hosts": {"hosts": {HOST: None}, "vars": self.variables()}}
        (self.inventory / "groups.yml").write_text(json.dumps(groups), encoding="utf-8")
        assert self.play(SCENARIO / "prepare.yml").returncode == 0

    @staticmethod
    def variables() -> dict:
        import yaml

        told = yaml.safe_load((SCENARIO / "molecule.yml").read_text(encoding="utf-8"))
        consent = {"gpu_driver_reboot": True, "gpu_driver_stop_services": True, "gpu_driver_replace_sources": True}
        return {**told["provisioner"]["inventory"]["group_vars"]["gpu_hosts"], **consent}

    def command(self, playbook: Path, version: str = "") -> list[str]:
        program = str(Path(sys.executable).parent / "ansible-playbook")
        extra = ["-e", json.dumps({"gpu_driver_version": version})] if version else []
        return [program, str(playbook), "-i", str(self.inventory), *extra]

    def play(self, playbook: Path, version: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(playbook, version),
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )

    def converge(self, version: str) -> subprocess.CompletedProcess[str]:
        return self.play(SCENARIO / "converge.yml", version)

    def cut(self, point: Point, version: str) -> str:
        """Run it and kill it there; what was going on then."""
        watcher = self.watch(point) if point.pattern else None
        run = subprocess.Popen(
            self.command(SCENARIO / "converge.yml", version),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            return self.seen(point, run, watcher)
        finally:
            for process in (run, watcher):
                if process is not None and process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def seen(self, point: Point, run: subprocess.Popen[str], watcher: subprocess.Popen[str] | None) -> str:
        if watcher is not None:
            said, _ = watcher.communicate(timeout=FOUND)
            if point.power:
                cgroups.kill(f"{LabNames.of(NAME, ROOT).cgroup}/supervisors")
                cgroups.kill(f"{LabNames.of(NAME, ROOT).cgroup}/{HOST}")
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
            if point.power:
                assert lab("up", NAME, "--host", HOST).returncode == 0
            assert said, "the point was not reached"
            told = json.loads(said)
            return f"{len(told['killed'])} processes at `{told['seen'][:60]}`" if not point.power else "the host"
        for line in run.stdout:
            if line.startswith("TASK [") and point.task in line:
                time.sleep(point.after)
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
                killed = json.loads(self.kill_on_host())
                return f"ansible-playbook and {len(killed['killed'])} processes"
        raise AssertionError(f"the point was not reached: {point.task}")

    def watch(self, point: Point) -> subprocess.Popen[str]:
        """The watcher on the host; the power is cut from here, so it kills nothing then."""
        self.bring()
        command = [sys.executable, str(LAB), "exec", NAME, HOST, "--", "python3", "/root/cut_short.py"]
        options = [point.pattern, str(point.after), *(["--only-tell"] if point.power else [])]
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, start_new_session=True)
        time.sleep(1)
        return process

    def kill_on_host(self) -> str:
        self.bring()
        return lab("exec", NAME, HOST, "--", "python3", "/root/cut_short.py", ".", "0").stdout

    @staticmethod
    def bring() -> None:
        program = (ROOT / "tests" / "long" / "cut_short.py").read_text(encoding="utf-8")
        command = [sys.executable, str(LAB), "exec", NAME, HOST, "--", "tee", "/root/cut_short.py"]
        subprocess.run(command, input=program, text=True, check=True, capture_output=True)


def recap(run: subprocess.CompletedProcess[str]) -> dict[str, int]:
    return {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", run.stdout.rpartition("PLAY RECAP")[2])}


def left() -> str:
    """What the kill left behind, in short."""
    audit = len(ask("dpkg --audit").splitlines())
    half = ask("dpkg -l | grep -cE '^.[UHFWt]'") or "0"
    mark = "note" if ask("ls /var/lib/gpu_fleet/driver-change.json") else "no note"
    return f"{half} packages half done, {mark}" + (", dpkg --audit speaks" if audit else "")


def faults(version: str) -> list[str]:
    """What is not as it has to be after the second run."""
    found = []
    names = ("libcuda1", "libnvidia-ml1", "nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-persistenced")
    for name in (*names, "nvidia-fabricmanager", "libnvidia-nscq"):
        have = ask(f"dpkg-query -W -f '${{Version}}' {name}")
        found += [f"{name} is {have or 'not there'}"] if have != f"{version}-1" else []
    held = set(ask("apt-mark showhold").split())
    found += [
        f"{name} is not held"
        for name in ("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-fabricmanager")
        if name not in held
    ]
    kernel = ask("cat /srv/replay/proc/sys/kernel/osrelease")
    if f"nvidia/{version}, {kernel}, x86_64: installed" not in ask("dkms status"):
        found.append(f"DKMS says {ask('dkms status')}")
    if f"  {version}  " not in ask("cat /srv/replay/proc/driver/nvidia/version"):
        found.append("another driver is loaded")
    for unit in ("nvidia-fabricmanager", "nvidia-persistenced"):
        found += [f"{unit} does not run"] if ask(f"systemctl is-active {unit}") != "active" else []
    told = lab("exec", NAME, HOST, "--", "python3", "-c", CUINIT)
    found += [] if told.stdout.strip() == "0" else [f"cuInit says {told.stdout}{told.stderr}"]
    found += ["dpkg --audit speaks"] if ask("dpkg --audit") else []
    for name in ("driver-change.json", "driver-unproved"):
        found += [f"{name} is still there"] if ask(f"ls /var/lib/gpu_fleet/{name}") else []
    return found + (["a folder of apt was left"] if ask("ls -d /var/tmp/gpu-fleet-driver.*") else [])


@pytest.fixture(scope="module")
def fleet():
    with tempfile.TemporaryDirectory() as folder:
        yield Fleet(Path(folder))
        assert lab("down", NAME).returncode == 0


def lines(rows: list[Row]) -> list[str]:
    found = ["| killed | what died | what it left | the next run | a third run |", "|---|---|---|---|---|"]
    for row in rows:
        again = f"{row.again}, {row.seconds:.0f} s" + "".join(f"; {fault}" for fault in row.faults)
        found.append(f"| {row.point} | {row.cut} | {row.left} | {again} | {row.third} |")
    return found


def document(rows: list[Row], commit: str, path: Path) -> None:
    good = sum(row.again == "converges" and not row.faults and row.third == "0 changes" for row in rows)
    path.write_text(
        f"# Runs of role gpu_driver, killed, {datetime.date.today()}\n\n"
        f"Made by `scripts/test long driver_kills --record` on commit {commit}. Packages and machine are stand-ins "
        "(tests/driver_repository); apt, dpkg, DKMS, systemd and reboots are real, on a lab host of Debian 12. At each point the role "
        f"brings one of {PAIR[0]} and {PAIR[1]} in the place of the other, or the first driver, and is killed with everything it had "
        "started on the host; the playbook then runs again, with nothing done by hand in between, and a third time. Seconds are of a "
        f"machine that others used, too. {good} of {len(rows)} converge, with a third run that changes nothing.\n\n"
        + "\n".join(lines(rows))
        + "\n",
        encoding="utf-8",
    )


@pytest.fixture(scope="module")
def table(request):
    rows: list[Row] = []
    yield rows
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    print(f"\n{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, commit {commit.strip()}\n")
    print("\n".join(lines(rows)))
    if request.config.getoption("--record"):
        document(rows, commit[:12].strip(), ROOT / "docs" / "validation" / f"{datetime.date.today()}-driver-kills.md")


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name.replace(" ", "-"))
def test_a_killed_run_is_finished_by_the_next(fleet, table, point):
    if point.fresh or lab("exec", NAME, HOST, "--", "true").returncode:
        fleet.begin()
    version = PAIR[0]
    if not point.fresh:
        have = ask("dpkg-query -W -f '${Version}' nvidia-driver-cuda")
        if not have:
            assert fleet.converge(PAIR[0]).returncode == 0
            have = f"{PAIR[0]}-1"
        version = PAIR[have.startswith(PAIR[0])]
    row = Row(point.name)
    table.append(row)
    row.cut = fleet.cut(point, version)
    row.left = left()
    began = time.monotonic()
    again = fleet.converge(version)
    row.seconds = time.monotonic() - began
    row.again = "converges" if again.returncode == 0 else "FAILS"
    row.faults = faults(version)
    third = fleet.converge(version)
    row.third = f"{recap(third).get('changed', -1)} changes" if third.returncode == 0 else "FAILS"
    assert again.returncode == 0, again.stdout[-6000:] + again.stderr[-1000:]
    assert row.faults == []
    assert third.returncode == 0, third.stdout[-6000:]
    assert recap(third)["changed"] == 0, third.stdout[-6000:]
