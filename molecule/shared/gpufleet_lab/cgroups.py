"""A control group tree for each host, in every hierarchy that is mounted (version 1, 2, or both).

Two hosts in one tree fail in a way that is hard to see: systemd in one of them cannot kill a unit
(`Failed to kill control group ... Input/output error`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from .errors import LabError


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


def enter(group: str) -> None:
    """Make the group in every hierarchy and put this process into it."""
    for root, kind in hierarchies().items():
        (_make(root, kind, group) / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")


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
