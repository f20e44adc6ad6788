"""What systemd and the kernel say of one unit on this host. Runs on hosts: standard library only."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from typing import Dict, List, Optional

PROPERTIES = (
    "ActiveState",
    "SubState",
    "MainPID",
    "InvocationID",
    "UnitFileState",
    "Result",
    "ExecMainCode",
    "ExecMainStatus",
    "LoadState",
)
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Unit:
    """A unit as `systemctl show` has it. pid is 0 when nothing runs, started seconds since the epoch or None."""

    name: str
    active: str
    sub: str
    pid: int
    invocation: str
    enabled: bool
    result: str
    exit: str
    started: Optional[float]
    generation: Optional[str]

    @property
    def running(self) -> bool:
        return self.pid > 0


def systemctl(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["systemctl", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, check=False
    )


def of_files(paths: List[str]) -> List[str]:
    """Units that unit files and drop-ins belong to; of a template, the pattern of all its instances (systemctl(1))."""
    names = set()
    for path in paths:
        folder, name = os.path.split(path)
        if folder.endswith(".d"):
            name = os.path.basename(folder)[: -len(".d")]
        if name.rpartition(".")[2] in ("service", "socket", "timer", "target"):
            names.add(name.replace("@.", "@*."))
    return sorted(names)


def unread(paths: List[str]) -> bool:
    """Whether systemd has yet to read one of these unit files again; it reads those of units that are not loaded anyway."""
    names = of_files(paths)
    if not names:
        return False
    return "yes" in systemctl("show", "--property=NeedDaemonReload", "--value", *names).stdout.split()


@dataclass(frozen=True)
class Standing:
    """Whether a unit is there, starts at boot and runs. error: why systemd cannot use its file; empty when it can."""

    name: str
    found: bool
    enabled: bool
    active: str
    error: str

    @property
    def running(self) -> bool:
        return self.active in ("active", "activating")


def standing(name: str) -> Standing:
    """A unit as ansible.builtin.systemd_service judges it.

    `is-enabled`, since the property UnitFileState is remembered by systemd and does not see a link that was removed by
    hand. What is enabled until the next boot only, or through another unit, is not enabled.
    """
    said: Dict[str, str] = dict(
        line.partition("=")[::2]
        for line in systemctl("show", "--property=LoadState,LoadError,ActiveState", name).stdout.splitlines()
    )
    load = said.get("LoadState", "not-found")
    at_boot = systemctl("is-enabled", name)
    return Standing(
        name=name,
        found=load != "not-found",
        enabled=at_boot.returncode == 0 and at_boot.stdout.strip() not in ("enabled-runtime", "indirect", "alias"),
        active=said.get("ActiveState", "unknown"),
        error=said.get("LoadError", "") if load not in ("not-found", "masked") else "",
    )


def unit_name(instance: str) -> str:
    return f"vllm@{instance}.service"


def show(instance: str) -> Unit:
    """The state of an instance's unit; a unit that does not exist is inactive."""
    name = unit_name(instance)
    said: Dict[str, str] = dict(
        line.partition("=")[::2]
        for line in systemctl("show", name, "--property=" + ",".join(PROPERTIES)).stdout.splitlines()
    )
    pid = int(said.get("MainPID") or 0)
    return Unit(
        name=name,
        active=said.get("ActiveState", "unknown"),
        sub=said.get("SubState", "unknown"),
        pid=pid,
        invocation=said.get("InvocationID", ""),
        enabled=said.get("UnitFileState") == "enabled",
        result=said.get("Result", ""),
        exit=f"code {said.get('ExecMainCode', '')}, status {said.get('ExecMainStatus', '')}",
        started=started(pid),
        generation=generation_of(pid),
    )


def started(pid: int) -> Optional[float]:
    """When a process began, seconds since the epoch (proc(5): field 22 of stat, in ticks since boot)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            ticks = int(stat.read().rpartition(")")[2].split()[19])
        with open("/proc/stat", encoding="ascii") as stat:
            boot = next(int(line.split()[1]) for line in stat if line.startswith("btime"))
    except (OSError, StopIteration, IndexError, ValueError):
        return None
    return boot + ticks / _TICKS


def generation_of(pid: int) -> Optional[str]:
    """The generation that a process was started from: its unit makes that folder the working directory.

    The command line would not do: vLLM renames its processes.
    """
    try:
        where = os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return None
    told = re.search(r"/generations/([0-9a-f]+)( \(deleted\))?\Z", where)
    return told.group(1) if told else None


def limits(pid: int) -> Dict[str, int]:
    """Soft limits of a running process: nofile (files) and memlock (bytes); -1 is unlimited."""
    found = {}
    with open(f"/proc/{pid}/limits", encoding="ascii") as lines:
        for line in lines:
            for name, title in (("nofile", "Max open files"), ("memlock", "Max locked memory")):
                if line.startswith(title):
                    value = line[len(title) :].split()[0]
                    found[name] = -1 if value == "unlimited" else int(value)
    return found


def journal(invocation: str, most: int = 4000) -> List[str]:
    """The messages of one invocation of a unit, systemd's own about it included, oldest first."""
    run = subprocess.run(
        [
            "journalctl",
            "--no-pager",
            "--output=cat",
            f"--lines={most}",
            f"_SYSTEMD_INVOCATION_ID={invocation}",
            "+",
            f"INVOCATION_ID={invocation}",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        universal_newlines=True,
        errors="replace",
        check=False,
    )
    return run.stdout.splitlines()


def peers_of(port: int, listening: bool) -> List[str]:
    """Far addresses of the established TCP connections of this host, as hex of /proc/net/tcp and tcp6.

    listening True: connections to this host's port; False: connections to that port elsewhere.
    """
    wanted = f"{port:04X}"
    far = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as lines:
                rows = [line.split() for line in lines][1:]
        except OSError:
            continue
        for row in rows:
            near_port, (far_address, far_port) = row[1].split(":")[1], row[2].split(":")
            if row[3] == "01" and (near_port if listening else far_port) == wanted:
                far.append(far_address)
    return far
