# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Names, versions and files of the driver's packages: what data/driver.yml says, applied.

Pure: standard library, Python 3.9 and newer, no Ansible import. `known` is data/driver.yml everywhere.
"""

from __future__ import annotations

import fnmatch
import re
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

KINDS = ("open", "proprietary")


def numbers(text: Any) -> Tuple[int, ...]:
    """(580, 126, 20) for `580.126.20`; () for None."""
    return tuple(int(part) for part in re.findall(r"\d+", str(text))) if text is not None else ()


def upstream(version: Optional[str]) -> str:
    """NVIDIA's number in a package's version: 535.261.03 for `535.261.03-1` and `1:535.261.03-0ubuntu1`."""
    return re.sub(r"-[^-]*$", "", re.sub(r"^\d+:", "", version or ""))


def branch(version: Optional[str]) -> str:
    """580 for `580.126.20-1`."""
    return upstream(version).split(".")[0]


def matches(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in globs)


def of_driver(name: str, known: Mapping[str, Any]) -> bool:
    """Whether a package is part of the driver and of its version."""
    return matches(name, known["globs"]) and not matches(name, known["own_versions"])


def kind_of(name: str, known: Mapping[str, Any]) -> Optional[str]:
    """Which kind of kernel modules a package is for; None when it is for neither."""
    if matches(name, known["own_versions"]):
        return None
    return next((kind for kind in KINDS if matches(name, known["kinds"][kind])), None)


def generation(device_id: str, known: Mapping[str, Any]) -> Optional[str]:
    """The generation of a GPU by its PCI device id (`2335`), None when no range has it."""
    try:
        number = int(device_id, 16)
    except (TypeError, ValueError):
        return None
    for name, entry in known["generations"].items():
        for span in entry["ids"]:
            low, high = (int(end, 16) for end in span.split("-"))
            if low <= number <= high:
                return str(name)
    return None


def takes(device_id: str, known: Mapping[str, Any]) -> Optional[str]:
    """open, proprietary or either; None for a GPU that is not known."""
    if device_id in known["open_only_ids"]:
        return "open"
    found = generation(device_id, known)
    return known["generations"][found]["modules"] if found else None


def _applies(entry: Mapping[str, Any], system: str, branch_: str) -> bool:
    if system not in entry.get("systems", [system]):
        return False
    mine = numbers(branch_)
    return numbers(entry.get("from", "0")) <= mine and ("before" not in entry or mine < numbers(entry["before"]))


def names(
    source: str, system: str, branch_: str, kind: str, known: Mapping[str, Any], *, signed_for: Sequence[str] = ()
) -> Optional[List[str]]:
    """What to install, None when it is not known.

    source      nvidia or distribution
    signed_for  kernels; then the set whose modules are built and signed by the distribution, None where it has none
    """
    for entry in known["sources"][source]["names"]:
        if _applies(entry, system, branch_):
            if not signed_for:
                return [name.format(branch=branch_) for name in entry[kind]]
            patterns = entry.get(f"signed_{kind}")
            if patterns is None:
                return None
            filled = [
                name.format(branch=branch_, kernel=kernel)
                for name in patterns
                for kernel in (signed_for if "{kernel}" in name else signed_for[:1])
            ]
            return filled
    return None


def fabric(source: str, system: str, branch_: str, known: Mapping[str, Any]) -> Optional[Dict[str, str]]:
    """Names of manager, nscq, imex and nvsdm, where the source has them."""
    for entry in known["sources"][source]["fabric"]:
        if _applies(entry, system, branch_):
            parts = ("manager", "nscq", "imex", "nvsdm")
            return {part: entry[part].format(branch=branch_) for part in parts if part in entry}
    return None


# Files

MADE = "# Made by the Ansible role gpu_fleet.vllm.gpu_driver.\n"


def source_text(
    *,
    uri: str,
    suite: str,
    signed_by: Optional[str],
    components: Sequence[str] = (),
    architecture: Optional[str] = None,
) -> str:
    """One deb822 source, sources.list(5). A suite that ends in a slash is a flat repository and has no components.

    signed_by  None only for a local folder, whose files were compared with their checksums: apt is told to trust it
    """
    lines = ["Types: deb", f"URIs: {uri}", f"Suites: {suite}"]
    if components and not suite.endswith("/"):
        lines.append(f"Components: {' '.join(components)}")
    if architecture:
        lines.append(f"Architectures: {architecture}")
    local = uri.startswith(("file:", "copy:"))
    lines += [f"Signed-By: {signed_by}"] if signed_by else ["Trusted: yes"] if local else []
    return "\n".join(lines) + "\n"


def pins(
    packages: Mapping[str, Optional[str]],
    *,
    source: str,
    version: str,
    known: Mapping[str, Any],
    family: str,
    nvidia_host: Optional[str] = None,
) -> List[Dict[str, Any]]:
    """Records for apt_preferences(5), strongest first: apt takes the first that names a package and matches a version.

    packages     of the plan, name to exact version
    source       nvidia or distribution
    family       debian or ubuntu
    nvidia_host  where NVIDIA's repository is asked for, when the driver comes from the distribution
    """
    if source == "distribution":
        others = [f'origin "{nvidia_host}"'] if nvidia_host else []
    else:
        others = [f"release o={known['origins'][family]}"]
    others += [f"release o={name}" for name in known["other_providers"]]
    records = []
    if source != "distribution":
        records.append(
            {
                "why": "what both need stays with the distribution",
                "packages": list(known["shared"]),
                "pin": f"release o={known['origins'][family]}",
                "priority": 500,
            }
        )
    for pin in others:
        records.append(
            {"why": "the driver comes from one provider", "packages": list(known["globs"]), "pin": pin, "priority": -1}
        )
    by_version: Dict[str, List[str]] = {}
    for name, exact in sorted(packages.items()):
        if exact:
            by_version.setdefault(exact, []).append(name)
    for exact, group in sorted(by_version.items()):
        records.append({"why": "as planned", "packages": group, "pin": f"version {exact}", "priority": 1002})
    records.append(
        {
            "why": "what they need, of the same version",
            "packages": list(known["globs"]),
            "pin": f"version {upstream(version)}-*",
            # above NVIDIA's pinning packages, of which the former one still counts while the plan is made
            "priority": 1001,
        }
    )
    return records


def preferences_text(records: Iterable[Mapping[str, Any]]) -> str:
    return "\n".join(
        f"Explanation: {record['why']}\nPackage: {' '.join(record['packages'])}\nPin: {record['pin']}\n"
        f"Pin-Priority: {record['priority']}\n"
        for record in records
    )


def blocklist(globs: Iterable[str]) -> List[str]:
    """Regular expressions for unattended-upgrades, which matches them at the beginning of a name."""
    found = []
    for pattern in globs:
        text = re.escape(pattern).replace(r"\*", ".*").replace(r"\-", "-")
        found.append(text[:-2] if text.endswith(".*") else text + "$")
    return sorted(set(found))


def blocklist_text(patterns: Iterable[str]) -> str:
    inner = "".join(f'  "{pattern}";\n' for pattern in patterns)
    return "Unattended-Upgrade::Package-Blacklist {\n" + inner + "};\n"


# Debian's own packages name the module's file by its kind (`install nvidia modprobe -i nvidia-current-open` in its nvidia.conf), and
# modprobe takes options by that name.
MODULE_NAMES = ("nvidia", "nvidia-current", "nvidia-current-open")


def modprobe_text(options: Optional[Mapping[str, str]] = None) -> str:
    """Keeps nouveau away; options of the module nvidia as given, by the names of /proc/driver/nvidia/params, without NVreg_."""
    lines = ["blacklist nouveau", "options nouveau modeset=0"]
    told = " ".join(f"NVreg_{name}={value}" for name, value in sorted((options or {}).items()))
    lines += [f"options {module} {told}" for module in MODULE_NAMES if told]
    return "\n".join(lines) + "\n"


def persistenced_text(root: str) -> str:
    """A drop-in, systemd.unit(5): the daemon opens the driver when it starts; too early, and it fails for good (Azure/aks-gpu PR 105).

    root  where procfs is
    """
    return (
        f"{MADE}[Unit]\nAfter=systemd-modules-load.service\n"
        f"ConditionPathExists={root.rstrip('/')}/proc/driver/nvidia/version\n"
    )


def waiting_text(path: str) -> str:
    """A drop-in, systemd.unit(5), of what serves: it does not start, at a boot least of all, with a driver that is not proved.

    path  of the file that is there until then
    """
    return f"{MADE}[Unit]\nConditionPathExists=!{path}\n"


def dcgm_engine_text() -> str:
    return f"{MADE}[Unit]\nAfter=nvidia-persistenced.service nvidia-fabricmanager.service\n"


def dcgm_exporter_text(address: str, listen: str) -> str:
    """A drop-in. The exporter runs a host engine of its own unless it is told where the host's is, and only one of two can read
    the profiling counters. Its unit has Restart=on-abort, which leaves it down where the host engine was not there yet.
    """
    return (
        f"{MADE}[Service]\nEnvironment=DCGM_REMOTE_HOSTENGINE_INFO={address}\nEnvironment=DCGM_EXPORTER_LISTEN={listen}\n"
        "Restart=on-failure\nRestartSec=5\n"
    )


def modules_text(modules: Iterable[str]) -> str:
    """modules-load.d(5): loaded at boot before anything that uses them."""
    return MADE + "".join(f"{name}\n" for name in modules)
