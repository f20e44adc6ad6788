"""A control group tree for each host, in every hierarchy that is mounted (version 1, 2, or both).

Two hosts in one tree fail in a way that is hard to see: systemd in one of them cannot kill a unit
(`Failed to kill control group ... Input/output error`).

The tree also says what share of this machine's processors a host gets while they are short. A group weighs as much as one
process unless told otherwise, whatever runs in it: all hosts of all labs would share what a single process gets.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from .errors import LabError

# Where a group's weight is written by each version, what one process weighs there (nice 0, sched(7)), and the most that is
# taken (Documentation/scheduler/sched-design-CFS.rst, Documentation/admin-guide/cgroup-v2.rst in the kernel's sources).
WEIGHTS = {"cgroup": ("cpu.shares", 1024, 262144), "cgroup2": ("cpu.weight", 100, 10000)}
# In processes: a host is a machine of its own, on which a few run at once.
HOST_WEIGHT = 4


def hierarchies(mounts: str = "/proc/self/mounts") -> dict[Path, str]:
    """Mount point and type (cgroup or cgroup2) of each hierarchy of this machine."""
    found: dict[Path, str] = {}
    for line in Path(mounts).read_text(encoding="utf-8").splitlines():
        _, point, kind, *_ = line.split()
        if kind in ("cgroup", "cgroup2") and point.startswith("/sys/fs/cgroup"):
            found[Path(point)] = kind
    return found


def _make(root: Path, kind: str, group: str) -> Path:
    folder = root
    for part in Path(group).parts:
        if kind == "cgroup2" and folder.joinpath("cgroup.controllers").exists():
            for controller in folder.joinpath("cgroup.controllers").read_text(encoding="ascii").split():
                # Refused for a controller that is in use otherwise: the host then runs without that one.
                with contextlib.suppress(OSError):
                    folder.joinpath("cgroup.subtree_control").write_text(f"+{controller}", encoding="ascii")
        parent, folder = folder, folder / part
        folder.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):
            # A new version-1 cpuset is empty, and no process may enter it before it is given CPUs and memory.
            if (
                (folder / name).exists()
                and not (folder / name).read_text(encoding="ascii").strip()
                and kind == "cgroup"
            ):
                (folder / name).write_text((parent / name).read_text(encoding="ascii"), encoding="ascii")
    return folder


def enter(group: str, weight: int | None = None) -> None:
    """Make the group in every hierarchy, give it a weight (as many processes), and put this process into it."""
    for root, kind in hierarchies().items():
        folder = _make(root, kind, group)
        if weight is not None:
            _weigh(folder, kind, weight * WEIGHTS[kind][1])
        (folder / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    _weigh_above(group)


def weighing() -> bool:
    """Whether this machine shares its processors by control groups. After the first group was made."""
    return any((root / "gpufleet" / WEIGHTS[kind][0]).exists() for root, kind in hierarchies().items())


def _weigh(folder: Path, kind: str, weight: int) -> None:
    name, least, most = WEIGHTS[kind]
    with contextlib.suppress(OSError):  # the hierarchy has no such controller, or the group has just been removed
        if (folder / name).exists():
            (folder / name).write_text(str(min(max(weight, least), most)), encoding="ascii")


def _weigh_above(group: str) -> None:
    """A group with groups in it weighs as much as these: else two labs, or all labs, would share what one host gets."""
    for root, kind in hierarchies().items():
        for parent in Path(group).parents[:-1]:
            total = 0
            for child in (root / parent).glob(f"*/{WEIGHTS[kind][0]}"):
                with contextlib.suppress(OSError):
                    total += int(child.read_text(encoding="ascii"))
            _weigh(root / parent, kind, total)


def folders(group: str) -> list[Path]:
    """All folders of a group, deepest first."""
    found: list[Path] = []
    for root in hierarchies():
        top = root / group
        if top.is_dir():
            found += [Path(folder) for folder, _, _ in os.walk(top, topdown=False)]
    return found


def members(group: str) -> set[int]:
    pids: set[int] = set()
    for folder in folders(group):
        with contextlib.suppress(OSError):
            pids |= {int(pid) for pid in (folder / "cgroup.procs").read_text(encoding="ascii").split()}
    return pids - {os.getpid()}


def kill(group: str, patience: float = 10.0) -> None:
    """End every process of a group, and wait until it is empty. Nothing else can be hit: members are looked up anew."""
    end = time.monotonic() + patience
    while pids := members(group):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            raise LabError(f"control group {group}: these processes do not end: {sorted(pids)}")
        time.sleep(0.02)


def remove(group: str, patience: float = 5.0) -> None:
    """Kill what is in the group and remove its folders."""
    kill(group)
    end = time.monotonic() + patience
    while left := folders(group):
        for folder in left:
            with contextlib.suppress(OSError):  # a process that has just ended may still count for a moment
                folder.rmdir()
        if folders(group):
            if time.monotonic() > end:
                raise LabError(f"control group {left[-1]} cannot be removed")
            time.sleep(0.02)
    _weigh_above(group)
