# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What `apt-get -s install` says would happen, and whether it is what the plan says.

The lines are those of apt's simulation (apt-pkg/edsp and apt-private print them as `Inst NAME [OLD] (NEW LABEL:RELEASE [ARCH]) [...]`,
`Remv NAME [OLD]`, `Conf NAME (NEW LABEL:RELEASE [ARCH])`), under LC_ALL=C; seen with apt 2.6.1.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Collection, Dict, List, Mapping, Optional, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_packages
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.findings import Finding

_INST = re.compile(r"^Inst (\S+)(?: \[([^\]]+)\])? \((\S+)((?: [^()]*)?)\)")
_REMV = re.compile(r"^(?:Remv|Purg) (\S+)(?: \[([^\]]+)\])?")
_SUMMARY = re.compile(r"^\d+ upgraded, \d+ newly installed, .*\d+ to remove and \d+ not upgraded\.")
_BROKEN = re.compile(r"^ (\S+) : (Depends|PreDepends|Conflicts|Breaks|Recommends): (.+)$")


@dataclass(frozen=True)
class Change:
    """One package of a simulation. old: None when it is not installed yet; new: None when it would be removed."""

    name: str
    old: Optional[str]
    new: Optional[str]
    labels: str = ""

    def __str__(self) -> str:
        if self.new is None:
            return f"{self.name} {self.old or ''} would be removed".replace("  ", " ")
        if self.old is None:
            return f"{self.name} {self.new} would be installed"
        return f"{self.name} {self.old} would become {self.new}"


@dataclass
class Simulation:
    """What would be done. errors: apt's own words when it finds no way; unmet: (package, what it lacks)."""

    changes: List[Change] = field(default_factory=list)
    errors: List[str] = field(default_factory=list)
    unmet: List[Tuple[str, str]] = field(default_factory=list)
    held_changed: List[str] = field(default_factory=list)
    finished: bool = False

    @property
    def installed(self) -> Dict[str, str]:
        return {change.name: change.new for change in self.changes if change.new and change.old is None}

    @property
    def upgraded(self) -> Dict[str, Tuple[str, str]]:
        """Also what would be downgraded: name to (old, new)."""
        return {change.name: (change.old, change.new) for change in self.changes if change.new and change.old}

    @property
    def removed(self) -> Dict[str, Optional[str]]:
        return {change.name: change.old for change in self.changes if change.new is None}


def read(text: str) -> Simulation:
    """Parse the output, standard output and error together.

    A text without apt's closing line and without an error is none: `finished` stays false, and `compare` refuses it.
    """
    found = Simulation()
    section = None
    for line in text.splitlines():
        inst, remv, broken = _INST.match(line), _REMV.match(line), _BROKEN.match(line)
        if inst:
            name, old, new, rest = inst.groups()
            labels = re.sub(r"\s*\[[^\]]*\]\s*$", "", rest).strip()
            found.changes.append(Change(_plain(name), old, new, labels))
        elif remv:
            found.changes.append(Change(_plain(remv.group(1)), remv.group(2), None))
        elif broken:
            found.unmet.append((_plain(broken.group(1)), f"{broken.group(2)}: {broken.group(3).strip()}"))
        elif line.startswith("E: "):
            found.errors.append(line[3:])
        elif _SUMMARY.match(line):
            found.finished = True
        if line.startswith(" ") and section == "held":
            found.held_changed += line.split()
        elif not line.startswith(" "):
            section = "held" if line.startswith("The following held packages will be changed") else None
    return found


def compare(
    simulation: Simulation,
    packages: Mapping[str, Optional[str]],
    *,
    version: str,
    known: Mapping[str, Any],
    removes: Tuple[str, ...] = (),
    installed: Optional[Mapping[str, str]] = None,
    finishes: Collection[str] = (),
    host: str = "",
) -> List[Finding]:
    """Everything that would happen and that the plan does not say; nothing when they agree.

    packages  of the plan: name to the exact version
    version   of the driver, as its maker numbers it (580.126.20)
    known     data/driver.yml
    removes   what the plan takes away
    installed what is there now, name to version: what is planned, not there and not in the simulation is left out by apt
    finishes  what dpkg left half done: apt configures it without a word of `Inst`, and module driver_install completes the rest
    host      name for messages

    What is new and no part of the driver (dkms, pciutils) is a dependency and allowed; the caller shows it.
    """
    if simulation.errors or not simulation.finished:
        return [_failed(simulation, host)]
    found: List[Finding] = []
    for change in simulation.changes:
        told = _judge(change, packages, version, known, removes)
        if told:
            found.append(
                Finding(told[0], host, f"apt would do what the plan does not say: {change}; {told[1]}", told[2])
            )
    seen = {change.name for change in simulation.changes}
    for name, wanted in packages.items():
        have = (installed or {}).get(name)
        if installed is not None and name not in {*seen, *finishes} and (have is None or (wanted and have != wanted)):
            text = f"apt would leave {name} as it is ({have or 'not installed'}), the plan has {wanted}"
            found.append(
                Finding("apt-leaves-out", host, text, f"Look at `apt-cache policy {name}` and whether it is held")
            )
    return found + [
        Finding(
            "apt-held-changed",
            host,
            f"apt would change {name}, which is held",
            f"apt-mark unhold {name} first, by the role only",
        )
        for name in simulation.held_changed
        if name not in packages and name not in removes
    ]


def _judge(
    change: Change,
    packages: Mapping[str, Optional[str]],
    version: str,
    known: Mapping[str, Any],
    removes: Tuple[str, ...],
) -> Optional[Tuple[str, str, str]]:
    """(id, why, remedy) for a change that the plan does not cover."""
    name = change.name
    told = None
    if change.new is None:
        if name not in removes:
            remedy = (
                f"Find out with `apt-cache rdepends --installed {name}` who needs it; the role removes nothing unasked"
            )
            told = "apt-removes", "the plan does not take it away", remedy
    elif name in packages:
        wanted = packages[name]
        if wanted is not None and change.new != wanted:
            remedy = f"Look at `apt-cache policy {name}`: another pin or source is stronger"
            told = "apt-version", f"the plan has {wanted}", remedy
    elif driver_packages.of_driver(name, known):
        told = _other_driver(name, change.new, version)
    elif driver_packages.matches(name, known["never_changed"]):
        remedy = f"Hold it with `apt-mark hold {name}`, or change the kernel yourself first"
        told = "apt-kernel", "the role never changes a kernel", remedy
    elif change.old is not None and not driver_packages.matches(name, known["own_versions"]):
        told = "apt-upgrades", "it is installed and not in the plan", f"Upgrade {name} by itself first, or hold it"
    return told


def _other_driver(name: str, new: str, version: str) -> Optional[Tuple[str, str, str]]:
    """A part of the driver that is not named in the plan has to be of its version."""
    coming = driver_packages.upstream(new)
    if coming == driver_packages.upstream(version):
        return None
    remedy = f"Choose a version that all packages have and pin it: `apt-cache policy {name}`"
    if driver_packages.branch(coming) != driver_packages.branch(version):
        return (
            "apt-branch",
            f"that is branch {driver_packages.branch(coming)}, the plan is for driver {version}",
            remedy,
        )
    return "apt-version", f"the plan is for driver {version}", remedy


def _failed(simulation: Simulation, host: str) -> Finding:
    if not simulation.errors:
        message, fix = (
            "the output of apt-get -s is not whole: its closing line is missing",
            "Run it again with LC_ALL=C",
        )
        return Finding("apt-unreadable", host, message, fix)
    unmet = "; ".join(f"{name} {what}" for name, what in simulation.unmet)
    held = any("held broken packages" in line for line in simulation.errors)
    fix = (
        "Nothing was changed. Packages of two providers or of two versions stand against each other: choose one provider, "
        "look at `apt-cache policy` of the named packages, and take away yourself what belongs to the other"
        if held
        else "Nothing was changed. Look at apt's words"
    )
    message = f"apt finds no way to install the plan: {' / '.join(simulation.errors)}" + (
        f" ({unmet})" if unmet else ""
    )
    return Finding("apt-held-broken" if held else "apt-error", host, message, fix)


def _plain(name: str) -> str:
    """Without the architecture, unless it is a foreign one."""
    return re.sub(r":(amd64|arm64|all)$", "", name)
