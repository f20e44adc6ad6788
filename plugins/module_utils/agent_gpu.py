"""GPUs of a rank that failed for good: what the kernel's log and the host's own numbers say of them. For the agent.

A GPU that has fallen off the bus (Xid 79), or whose memory returned what could not be corrected, is not mended by a restart of
the server: it needs a reset or a new card. What is a failure for good is data/hardware.yml's to say (`out`), and comes with the
configuration. Standard library only, Python 3.9.

The driver writes `NVRM: Xid (PCI:0000:1b:00): 79, ...` to the kernel's log, whose owner, root, the agent is. Uncorrected errors
are counted by nvidia-smi, which needs the GPUs' device nodes; the agent has none, and reads what gpu-fleet-host-metrics, which asks
nvidia-smi each minute, wrote for the node exporter (role monitoring). Where no monitor is, the kernel's log alone is left: it
names uncorrected errors, too (Xid 48, 95 and 140).
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import dataclass
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)[^)]*\): (\d+)")
JOURNAL = ("journalctl", "-k", "-b", "-q", "-o", "cat", "--no-pager", "-g", "NVRM: Xid")
JOURNAL_SECONDS = 20.0
GPUS = "/proc/driver/nvidia/gpus"  # a folder a GPU, called by its PCI address (the driver's README, chapter on /proc)
NUMBERS = "/var/lib/prometheus/node-exporter/gpu_fleet.prom"
ECC = re.compile(r'^gpu_fleet_gpu_ecc_uncorrected\{[^}]*\bgpu="(\d+)"[^}]*\} ([0-9.eE+]+)$', re.MULTILINE)
WRITTEN = re.compile(r"^gpu_fleet_host_metrics_time_seconds(?:\{\})? ([0-9.eE+]+)$", re.MULTILINE)

Place = Tuple[int, int, int]  # PCI domain, bus, device
Event = Tuple[Place, int]


@dataclass(frozen=True)
class Fault:
    """reason: for people. mark: another one where something new happened."""

    reason: str
    mark: str


def place(address: str) -> Optional[Place]:
    """A PCI address as the driver, /proc or nvidia-smi write it: 0000:1b:00, 0000:1B:00.0, 00000000:1B:00.0."""
    parts = address.partition(".")[0].split(":")
    try:
        domain, bus, device = (int(part, 16) for part in parts)
    except ValueError:
        return None
    return domain, bus, device


def events(log: str) -> List[Event]:
    """Place and code of each Xid, in the order of the log."""
    found = [(place(match.group(1)), int(match.group(2))) for match in XID.finditer(log)]
    return [(where, code) for where, code in found if where is not None]


def places(names: Iterable[str]) -> List[Place]:
    """GPUs by their number: nvidia-smi counts them by PCI address, and so does CUDA with CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    return sorted(where for where in map(place, names) if where is not None)


def uncorrected(numbers: str, booted: float) -> Dict[int, int]:
    """Uncorrected errors by GPU, of numbers that were written since the host came up (seconds since 1970)."""
    written = WRITTEN.search(numbers)
    if written is None or float(written.group(1)) < booted:
        return {}
    return {int(gpu): int(float(count)) for gpu, count in ECC.findall(numbers) if float(count) > 0}


def judge(
    seen: Sequence[Event],
    counts: Mapping[int, int],
    gpus: Sequence[int],
    known: Sequence[Place],
    out: Mapping[str, str],
) -> Optional[Fault]:
    """What takes the rank's GPUs out, or None.

    gpus    numbers of the rank's GPUs
    known   places of all GPUs of the host, by number. One that is not among them may be the rank's, and counts as such
    out     code of an Xid that is a failure for good, and what it is called
    """
    told: Dict[str, int] = {}
    for where, code in seen:
        number = known.index(where) if where in known else None
        if str(code) not in out or (number is not None and number not in gpus):
            continue
        which = f"GPU {number}" if number is not None else "a GPU"
        address = f"{where[0]:04x}:{where[1]:02x}:{where[2]:02x}"
        text = f"{which} ({address}) had Xid {code} since boot: {out[str(code)]}"
        told[text] = told.get(text, 0) + 1
    for number, count in sorted(counts.items()):
        if number in gpus:
            told[f"GPU {number} has uncorrected memory errors since its driver was loaded"] = count
    if not told:
        return None
    return Fault("; ".join(told), "; ".join(f"{text} x{count}" for text, count in told.items()))


class Look:
    """What there is to know now. The places of GPUs are those of the first look that found enough: one that fell off the bus may be
    missing in a later one."""

    def __init__(
        self, gpus: Sequence[int], out: Mapping[str, str], kept: str, folder: str = GPUS, numbers: str = NUMBERS
    ):
        self.gpus, self.out, self.kept, self.folder, self.numbers = list(gpus), dict(out), kept, folder, numbers
        self.known: List[Place] = places(_lines(kept))
        self.failed = ""  # why the log cannot be read

    def fault(self) -> Optional[Fault]:
        self._places()
        return judge(events(self._log()), self._counts(), self.gpus, self.known, self.out)

    def _places(self) -> None:
        try:
            names = sorted(os.listdir(self.folder))
        except OSError:
            return
        found = places(names)
        if len(found) > len(self.known):
            self.known = found
            with open(f"{self.kept}.new", "w", encoding="utf-8") as text:
                text.write("".join(f"{name}\n" for name in names))
            os.replace(f"{self.kept}.new", self.kept)

    def _log(self) -> str:
        try:
            done = subprocess.run(
                JOURNAL,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                universal_newlines=True,
                errors="replace",
                check=False,
                timeout=JOURNAL_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            self.failed = str(error)
            return ""
        # journalctl ends with 1 where no line is found.
        self.failed = done.stderr.strip()[:200] if done.returncode and done.stderr.strip() else ""
        return done.stdout

    def _counts(self) -> Dict[int, int]:
        return uncorrected("\n".join(_lines(self.numbers)), time.time() - time.monotonic())


def _lines(path: str) -> List[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as text:
            return text.read().splitlines()
    except OSError:
        return []
