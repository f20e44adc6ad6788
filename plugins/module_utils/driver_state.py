# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What tools say about the driver that is there: DKMS, mokutil, /proc/driver/nvidia/version, cuInit.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Mapping, Optional, Set

from ansible_collections.gpu_fleet.vllm.plugins.module_utils.findings import Finding

# `nvidia/580.126.20, 6.1.0-18-amd64, x86_64: installed` since DKMS 3, `nvidia, 580.126.20, 6.1..., x86_64: installed` before;
# `nvidia/580.126.20: added` before any build. Warnings follow in brackets: "(WARNING! Diff between built and installed module!)".
_DKMS = re.compile(r"^([^,/:\s]+)(?:/|, )([^,:\s]+)(?:, ([^,:\s]+), ([^,:\s]+))?: ?(\w+)(.*)$")
_PROC = re.compile(r"^NVRM version: NVIDIA UNIX (Open )?(?:\S+ )?Kernel Module(?: for \S+)?\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Built:
    """One module of DKMS for one kernel. state: added, built or installed; kernel None before any build."""

    module: str
    version: str
    kernel: Optional[str]
    state: str
    warning: str = ""


def dkms(text: str) -> List[Built]:
    """What `dkms status` prints; lines of another form are left out."""
    found = []
    for line in text.splitlines():
        match = _DKMS.match(line.strip())
        if match:
            module, version, kernel, _machine, state, rest = match.groups()
            found.append(Built(module, version, kernel, state, rest.strip(" ()")))
    return found


def of_version(text: str, version: str) -> List[Built]:
    """What DKMS has of a driver's version."""
    return [item for item in dkms(text) if item.module.startswith("nvidia") and item.version == version]


def built(text: str, version: str) -> Set[str]:
    """Kernels that a driver's version is installed for, whole."""
    return {str(item.kernel) for item in of_version(text, version) if item.state == "installed" and not item.warning}


def with_installed(driver: Mapping[str, Any], text: str, kernel: Optional[str]) -> Dict[str, Any]:
    """The driver's facts with what DKMS installed for the running kernel, where modinfo knew no module of the name nvidia.

    Debian's own packages give it another one (nvidia-current-open).
    """
    there = {
        item.version
        for item in dkms(text)
        if item.kernel == kernel and item.state == "installed" and item.module.startswith("nvidia")
    }
    if driver.get("installed") or len(there) != 1:
        return dict(driver)
    return {**driver, "installed": there.pop()}


def dkms_findings(
    text: str, *, version: str, kernels: Mapping[str, Mapping[str, Any]], host: str = ""
) -> List[Finding]:
    """A finding for every kernel that the driver is not installed for.

    version  as its maker numbers it
    kernels  every installed one: {release: {headers: bool}}
    """
    nvidia = [item for item in dkms(text) if item.module.startswith("nvidia")]
    found = []
    for release, entry in sorted(kernels.items()):
        mine = [item for item in nvidia if item.version == version and item.kernel == release]
        good = [item for item in mine if item.state == "installed" and not item.warning]
        if good:
            continue
        others = sorted({item.version for item in nvidia if item.kernel == release and item.state == "installed"})
        if mine:
            state = f"it is only {mine[0].state}" if mine[0].state != "installed" else mine[0].warning
        elif others:
            state = f"{', '.join(others)} is installed for it"
        else:
            state = "there is none"
        name = next((item.module for item in nvidia if item.version == version), "nvidia")
        fix = f"Read /var/lib/dkms/{name}/{version}/build/make.log, then `dkms install {name}/{version} -k {release}`"
        if not entry.get("headers"):
            fix = f"Install linux-headers-{release} first; its headers are missing. {fix}"
        found.append(
            Finding("dkms-missing", host, f"no module {version} for kernel {release}: {state}. Do not boot it", fix)
        )
    return found


def secure_boot(text: Optional[str]) -> Optional[bool]:
    """What `mokutil --sb-state` says, standard output and error together; None: no EFI, or not told.

    `SecureBoot enabled` with shim's own check switched off (`SecureBoot validation is disabled in shim`) lets unsigned modules load.
    """
    if not text:
        return None
    if re.search(r"^SecureBoot enabled", text, re.MULTILINE):
        return not re.search(r"^SecureBoot validation is disabled in shim", text, re.MULTILINE)
    return False if re.search(r"^SecureBoot disabled", text, re.MULTILINE) else None


def loaded(text: Optional[str]) -> Optional[Dict[str, str]]:
    """Version and kind (open, proprietary) in /proc/driver/nvidia/version; None when nothing is loaded."""
    match = _PROC.search(text or "")
    if not match:
        return None
    return {"version": match.group(2), "kind": "open" if match.group(1) else "proprietary"}


def mismatch(loaded_: Optional[str], installed: Optional[str], host: str = "") -> Optional[Finding]:
    """Driver/library version mismatch: what runs is not what is installed. None: equal, or one of them is not there."""
    if not loaded_ or not installed or loaded_ == installed:
        return None
    return Finding(
        "driver-mismatch",
        host,
        f"driver {loaded_} is loaded and {installed} is installed: new processes get "
        "`Failed to initialize NVML: Driver/library version mismatch`, sooner or later",
        "Reboot the host (gpu_driver_reboot: true lets the role do it), then keep the version by pin, hold and block list",
    )


def cuinit(
    code: int, known: Mapping[str, Any], facts: Optional[Mapping[str, Any]] = None, host: str = ""
) -> List[Finding]:
    """What cuInit(0) returned, as findings; none for 0.

    known  data/driver.yml
    facts  what module gpu_facts returned; its parts that explain the code are named
    """
    if code == 0:
        return []
    entry = known["cuinit"].get(code)
    if entry is None:
        fix = "Look the number up under CUresult in cuda.h, and at the kernel log for NVRM"
        return [Finding("cuda-init", host, f"cuInit returned {code}", fix)]
    message = f"cuInit returned {code}, {entry['name']}: {entry['means']}"
    seen = "; ".join(_evidence(code, facts or {}))
    return [Finding("cuda-init", host, message + (f" ({seen})" if seen else ""), entry["fix"])]


def _evidence(code: int, facts: Mapping[str, Any]) -> Iterable[str]:
    driver, manager = facts.get("driver") or {}, facts.get("fabric_manager") or {}
    if code == 802:
        switches = (facts.get("nvswitch") or {}).get("devices")
        if switches:
            yield f"{switches} NVSwitches, Fabric Manager {manager.get('state') or 'unknown'}"
        if manager.get("installed") and driver.get("loaded") and manager["installed"] != driver["loaded"]:
            yield f"Fabric Manager {manager['installed']}, driver {driver['loaded']}"
        states = sorted({str((gpu.get("fabric") or {}).get("state")) for gpu in facts.get("gpus") or []} - {"None"})
        if states:
            yield f"fabric.state {', '.join(states)}"
    elif code == 803 and driver.get("loaded"):
        yield f"loaded {driver['loaded']}, installed {driver.get('installed')}"
