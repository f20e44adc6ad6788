"""Every name a lab leaves on the machine comes from its id, so that `down` finds them all without any record."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from .errors import UsageError

STATE_ROOT = Path("/var/lib/gpu_fleet_lab")
CACHE_ROOT = Path("/var/cache/gpu_fleet_lab")
BRIDGE_PREFIX = "gpufleet"  # 8 characters; a network interface's name has room for 15
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_HOST = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")


def _digest(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]


@dataclass(frozen=True)
class LabNames:
    """The names of one lab. `checkout` is the clone it belongs to: two clones may both have a lab called demo."""

    lab_id: str

    @classmethod
    def of(cls, name: str, checkout: Path) -> LabNames:
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"'{name}' is no name for a lab: lower-case letters, digits, - and _, at most 40 characters"
            )
        return cls(f"{name}-{_digest(str(checkout), 6)}")

    @property
    def tag(self) -> str:
        return _digest(self.lab_id, 7)

    @property
    def bridge(self) -> str:
        return BRIDGE_PREFIX + self.tag

    @property
    def bridge_address(self) -> str:
        """The bridge's own MAC address, locally administered. Without one of its own it has the lowest of its ports, another one
        whenever a host comes or goes, and hosts that know the former one send this machine's packets to nobody for half a minute.
        """
        digits = _digest(self.lab_id, 10)
        return ":".join(["02", *(digits[at : at + 2] for at in range(0, 10, 2))])

    @property
    def table(self) -> str:
        return f"gpufleet_{self.tag}"

    @property
    def folder(self) -> Path:
        return STATE_ROOT / self.lab_id

    @property
    def lock(self) -> Path:
        return STATE_ROOT / "locks" / f"{self.lab_id}.lock"

    @property
    def cgroup(self) -> str:
        """Path below the root of each control group hierarchy."""
        return f"gpufleet/{self.lab_id}"

    def machine(self, host: str) -> str:
        """nspawn's name of a host. It also names the host's end of the network on this machine, hence the tag."""
        return f"{host}-{self.tag}"


def check_host_name(host: str) -> str:
    if not _HOST.fullmatch(host):
        raise UsageError(f"'{host}' is no host name: lower-case letters, digits and -, at most 40 characters")
    return host
