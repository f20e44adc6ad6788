# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Whether the driver that a host has is the planned one and works: what is loaded, what is installed, what CUDA says.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

from typing import Any, List, Mapping

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_packages as names
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_state
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.driver_case import NVIDIA
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.findings import Finding


def findings(
    facts: Mapping[str, Any], cuda: Mapping[str, Any], plan: Mapping[str, Any], known: Mapping[str, Any], host: str = ""
) -> List[Finding]:
    """Everything that is not as planned; nothing when the driver is proved.

    facts  what module gpu_facts returned
    cuda   what module cuda_init returned
    plan   a DriverPlan as a dictionary
    """
    found: List[Finding] = []
    driver, version = facts.get("driver") or {}, str(plan["version"])
    loaded = names.upstream(str(driver.get("loaded") or ""))
    if not loaded:
        fix = "Look at the kernel log for NVRM and nvidia: `journalctl -k -g 'NVRM|nvidia'`, then `modprobe nvidia`"
        return [Finding("driver-not-loaded", host, f"driver {version} is planned and none is loaded", fix)]
    if loaded != version:
        fix = "Reboot the host (gpu_driver_reboot: true lets the role do it)"
        found.append(Finding("driver-mismatch", host, f"driver {version} is planned, {loaded} is loaded", fix))
    fault = driver_state.mismatch(loaded, driver.get("installed"), host)
    found += [fault] if fault else []
    found += _cuda(facts, cuda, known, host)
    found += _counts(facts, cuda, host)
    manager = facts.get("fabric_manager") or {}
    if (facts.get("nvswitch") or {}).get("devices") or manager.get("installed"):
        if manager.get("installed") != loaded:
            have = f"Fabric Manager {manager['installed']}" if manager.get("installed") else "no Fabric Manager"
            message = f"{have} is installed and driver {loaded} is loaded"
            found.append(Finding("fabric-version", host, message, f"Install the Fabric Manager {loaded}"))
        elif manager.get("state") != "active":
            fix = "Read `journalctl -u nvidia-fabricmanager`; it starts with a driver of its own version only"
            found.append(Finding("fabric-manager", host, f"the Fabric Manager is {manager.get('state')}", fix))
    return found


def options(plan: Mapping[str, Any], params: Mapping[str, str], host: str = "") -> List[Finding]:
    """Options that the loaded driver was to have and has not. params: as module driver_facts returns them."""
    fix = "Look for another file of /etc/modprobe.d, and at the kernel's command line, that says otherwise"
    return [
        Finding("driver-options", host, f"the loaded driver has {name} {params[name]}, planned is {value}", fix)
        for name, value in sorted((plan.get("options") or {}).items())
        if params.get(name, value) != value
    ]


def fabric(facts: Mapping[str, Any], host: str = "") -> List[Finding]:
    """GPUs whose NVLink fabric is not set up; on NVLink 5 cuInit may return 0 all the same, and peers do not reach each other."""
    states = {
        str(gpu.get("index")): (told.get("state"), told.get("status"))
        for gpu in facts.get("gpus") or []
        for told in [gpu.get("fabric") or {}]
        if told.get("state") not in (None, "Completed", "Not Supported")
        or (told.get("state") == "Completed" and told.get("status") not in (None, "Success"))
    }
    if not states:
        return []
    state, status = next(iter(states.values()))
    message = (
        f"the NVLink fabric of GPU {', '.join(states)} has state {state} and status {status or 'not told'}, in the place of "
        "Completed and Success"
    )
    fix = "Read `journalctl -u nvidia-fabricmanager`, on NVLink 5 its subnet manager's log too (/var/log/nvlsm.log)"
    return [Finding("fabric-not-ready", host, message, fix)]


def nouveau(kernels: Mapping[str, Any], host: str = "", loaded: bool = False) -> List[Finding]:
    """Whether nouveau is loaded, and kernels that would load it at their next boot. kernels: as module driver_facts returns them."""
    if loaded:
        fix = "Look which file of /etc/modprobe.d or /etc/modules-load.d loads it, and reboot"
        return [Finding("nouveau-loaded", host, "nouveau is still loaded and holds the cards", fix)]
    stale = [
        release
        for release, entry in sorted(kernels.items())
        if (entry.get("initrd") or {}).get("nouveau") and not entry["initrd"].get("ours")
    ]
    if not stale:
        return []
    message = (
        f"nouveau is in the initramfs of kernel {', '.join(stale)}, and the file that keeps it away is not, or is older"
    )
    fix = "Look at what `update-initramfs -u -k all` says, and at the room in /boot"
    return [Finding("nouveau-initramfs", host, message, fix)]


def _cuda(facts: Mapping[str, Any], cuda: Mapping[str, Any], known: Mapping[str, Any], host: str) -> List[Finding]:
    if cuda.get("code") is None:
        fix = "Look whether libcuda.so.1 is there (`ldconfig -p`) and of the driver's version, and at the kernel log for NVRM"
        return [Finding("cuda-init", host, f"cuInit was not reached: {cuda.get('error')}", fix)]
    return driver_state.cuinit(int(cuda["code"]), known, facts, host)


def _counts(facts: Mapping[str, Any], cuda: Mapping[str, Any], host: str) -> List[Finding]:
    """Cards on the bus, GPUs that the driver has, devices that CUDA has."""
    found = []
    cards = [card for card in facts.get("pci_gpus") or [] if card.get("vendor_id") == NVIDIA]
    gpus = facts.get("gpus") or []
    if len(gpus) != len(cards):
        message = f"{len(cards)} NVIDIA cards are on the PCI bus, the driver has {len(gpus)}"
        found.append(
            Finding(
                "driver-gpus",
                host,
                message,
                "Look at the kernel log for NVRM: a card that failed, or one of another kind of modules",
            )
        )
    sliced = any((gpu.get("mig") or {}).get("current") == "Enabled" for gpu in gpus)
    if cuda.get("code") == 0 and not sliced and cuda.get("devices") not in (None, len(gpus)):
        message = f"CUDA sees {cuda['devices']} devices, the driver has {len(gpus)} GPUs"
        found.append(
            Finding(
                "cuda-devices",
                host,
                message,
                "Look for CUDA_VISIBLE_DEVICES in /etc/environment, and at the kernel log",
            )
        )
    return found
