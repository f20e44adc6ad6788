"""Limits as systemd spells them, and what a process that it starts is really granted.

systemd quietly gives a unit less than it asks for where the host does not allow as much (setrlimit_closest in its
src/basic/rlimit-util.c), so that neither files nor `systemctl show` say what a service gets.

Pure: standard library, Python 3.9 and newer, no Ansible import. What runs commands is given: run(argv) -> (rc, output).
"""

from __future__ import annotations

import os
import re
import tempfile
from typing import Any, Callable, Dict, List, Sequence, Tuple

Run = Callable[[Sequence[str]], Tuple[int, str]]
Granted = Dict[str, Tuple[str, str]]

INFINITE = "infinity"
INFINITY = -1  # as the kernel's RLIM_INFINITY reads, and as module_utils/units.py tells an unlimited one
# systemd.exec(5), "Process Properties": sizes with these suffixes, base 1024. Fractions and SOFT:HARD, which systemd
# takes as well, are left out: limits.conf cannot say the same.
_SIZE = re.compile(r"([1-9][0-9]*)([KMGTPE]?)")
_LINES = {"nofile": "Max open files", "memlock": "Max locked memory"}
_LARGEST = 2**63 - 1
SPELLINGS = "Write bytes, a number with K, M, G or T (base 1024, such as 64G), or infinity"


def locked_bytes(text: Any) -> int:
    """Bytes of a limit of locked memory, INFINITY for the word infinity. Raises ValueError with the remedy."""
    if str(text) == INFINITE:
        return INFINITY
    told = _SIZE.fullmatch(str(text))
    size = int(told.group(1)) << 10 * " KMGTPE".index(told.group(2) or " ") if told else 0
    if not 0 < size <= _LARGEST:
        raise ValueError(f"{text!r} is no size of memory. {SPELLINGS}")
    return size


class NotStarted(RuntimeError):
    """systemd starts no process with these limits; the message has what it said."""


def granted(systemd_run: str, run: Run, nofile: int, memlock: str, folder: str = "/run") -> Granted:
    """Soft and hard limits, as proc_pid_limits(5) prints them, of a process that systemd started with these.

    The output goes to a file: `systemd-run --wait` would need the system bus, which a minimal host lacks, while a
    oneshot unit is started when it has ended. Raises NotStarted; leaves nothing behind.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix="gpu-fleet-limits-") as place:
        output = os.path.join(place, "limits")
        properties = [f"LimitNOFILE={nofile}", f"LimitMEMLOCK={memlock}", f"StandardOutput=truncate:{output}"]
        command = [systemd_run, "--quiet", "--collect", "--service-type=oneshot"]
        code, said = run([*command, *(f"--property={item}" for item in properties), "cat", "/proc/self/limits"])
        if code:
            raise NotStarted(f"no process starts with LimitNOFILE={nofile} and LimitMEMLOCK={memlock}: {said.strip()}")
        with open(output, encoding="ascii") as handle:
            return read_granted(handle.read())


def read_granted(text: str) -> Granted:
    """Soft and hard of the limits of interest, from the text of a /proc/PID/limits."""
    found = {}
    for key, title in _LINES.items():
        told = re.search(rf"^{title}\s+(\S+)\s+(\S+)", text, re.MULTILINE)
        if told is None:
            raise NotStarted(f"/proc/self/limits of a process that systemd started has no line `{title}`")
        found[key] = (told.group(1), told.group(2))
    return found


def less_than_asked(found: Granted, nofile: int, memlock: str) -> List[str]:
    """One sentence for each limit that is not what is asked for. Raises ValueError where memlock is no size."""
    locked = locked_bytes(memlock)
    asked = {"nofile": str(nofile), "memlock": memlock}
    wanted = {"nofile": str(nofile), "memlock": "unlimited" if locked == INFINITY else str(locked)}
    return [
        f"host_limits_{key} is {asked[key]}, granted are {soft} (soft) and {hard} (hard)"
        for key, (soft, hard) in found.items()
        if {soft, hard} != {wanted[key]}
    ]
