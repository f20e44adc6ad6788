# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What sysfs and procfs say about GPUs: the PCI tree above them, ACS, IOMMU, NICs, units of processes.

Pure: standard library, Python 3.9 and newer, no Ansible import. Everything lies under the root of a `Host`.
"""

from __future__ import annotations

import os
import re
from typing import Any, Dict, List, Optional, Sequence

Facts = Dict[str, Any]

VENDORS = {"10de": "nvidia", "1002": "amd"}
# Classes of the PCI code and ID assignment specification: VGA, 3D and other display controllers (the first MI200
# are 0380), processing accelerators (MI300); 0680, other bridge, is what an NVSwitch is.
GPU_CLASSES = ("0300", "0302", "0380", "1200")
NVSWITCH_CLASS = "0680"

# PCI Express Base Specification, Access Control Services: extended capability 000Dh, control register at offset 6;
# names as lspci's ls-ecaps.c prints them, bit 0 first.
ACS_CAPABILITY = 0x000D
ACS_CONTROL = ("SrcValid", "TransBlk", "ReqRedir", "CmpltRedir", "UpstreamFwd", "EgressCtrl", "DirectTrans")
PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def pci_address(text: str) -> Optional[str]:
    """An address as sysfs writes it: `00000000:1B:00.0`, as NVML writes it, is 0000:1b:00.0. None for anything else."""
    found = re.fullmatch(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.([0-7]))?", text.strip())
    if found is None:
        return None
    domain, bus, device, function = found.groups()
    return f"{int(domain, 16):04x}:{bus.lower()}:{device.lower()}.{function or 0}"


class Host:
    """Files below a root. What is not there or may not be read is None or empty."""

    def __init__(self, root: str) -> None:
        self.root = os.path.realpath(root)

    def path(self, name: str) -> str:
        return os.path.join(self.root, name.lstrip("/"))

    def bytes(self, name: str) -> Optional[bytes]:
        try:
            with open(self.path(name), "rb") as handle:
                return handle.read()
        except OSError:
            return None

    def text(self, name: str) -> Optional[str]:
        raw = self.bytes(name)
        return None if raw is None else raw.decode("utf-8", "backslashreplace").strip()

    def names(self, name: str) -> List[str]:
        try:
            return sorted(os.listdir(self.path(name)))
        except OSError:
            return []

    def real(self, name: str) -> str:
        """Where its links lead, below the root."""
        return os.path.relpath(os.path.realpath(self.path(name)), self.root)

    def there(self, name: str) -> bool:
        """A link counts when what it points to is there; one that begins at / is meant from the root."""
        path = self.path(name)
        if os.path.islink(path) and os.path.isabs(os.readlink(path)):
            path = self.path(os.readlink(path))
        return os.path.exists(path)


def pci_devices(host: Host) -> List[Facts]:
    """GPUs and NVSwitches of the PCI bus, by address, with `class`, its first four digits."""
    found = []
    for address in host.names("sys/bus/pci/devices"):
        folder = f"sys/bus/pci/devices/{address}"
        vendor = _hex(host.text(f"{folder}/vendor"))
        kind = _hex(host.text(f"{folder}/class"))[:4]
        if vendor in VENDORS and kind in (*GPU_CLASSES, NVSWITCH_CLASS):
            found.append(
                {
                    "address": address,
                    "vendor_id": vendor,
                    "device_id": _hex(host.text(f"{folder}/device")),
                    "driver": _last(host, f"{folder}/driver"),
                    "class": kind,
                }
            )
    return found


def _hex(text: Optional[str]) -> str:
    return (text or "").lower()[2:]


def _last(host: Host, link: str) -> Optional[str]:
    """Name of what a link of sysfs points to, such as the driver's; None without the link."""
    return os.path.basename(host.real(link)) if os.path.islink(host.path(link)) else None


def _numa_node(host: Host, folder: str) -> Optional[int]:
    text = host.text(f"{folder}/numa_node")
    return int(text) if text is not None and text.isdigit() else None


def fill(host: Host, facts: Facts) -> None:
    """What lies around the GPUs that are in `facts` already."""
    drivers = {device["address"]: device["driver"] for device in facts["pci_gpus"]}
    control: Dict[str, Optional[List[str]]] = {}
    for gpu in facts["gpus"]:
        for process in gpu["processes"]:
            process["unit"] = unit(host, process["pid"])
        if gpu["pci_address"] is None:
            continue
        folder = f"sys/bus/pci/devices/{gpu['pci_address']}"
        gpu["driver"] = drivers.get(gpu["pci_address"])
        gpu["numa_node"] = _numa_node(host, folder)
        above = [part for part in host.real(folder).split(os.sep)[:-1] if PCI_ADDRESS.fullmatch(part)]
        for address in reversed(above):
            if address not in control:
                control[address] = acs(host, address, facts["unread"])
            gpu["bridges"].append({"address": address, "acs": control[address]})
    facts["nics"] = _nics(host)
    facts["iommu"] = _iommu(host, facts["pci_gpus"])


def tell(unread: List[Facts], what: str, why: Optional[str]) -> None:
    """Note what was asked and not told, each thing once."""
    entry = {"what": what, "why": why}
    if entry not in unread:
        unread.append(entry)


def acs(host: Host, address: str, unread: List[Facts]) -> Optional[List[str]]:
    """Bits that are set in the bridge's ACS control register, as `setpci ECAP_ACS+6.w` reads it.

    None: it has no such capability, or its configuration space is not readable; others than root get 64 bytes of it.
    """
    raw = host.bytes(f"sys/bus/pci/devices/{address}/config") or b""
    if len(raw) <= 256:
        # A conventional PCI bridge has 256 bytes; so has an Express one under a host that hides the rest.
        if len(raw) < 256:
            tell(
                unread,
                "bridges.acs",
                f"{len(raw)} bytes of the configuration space of {address} are readable; root reads all",
            )
        return None
    offset, seen = 0x100, set()
    while 0x100 <= offset <= len(raw) - 8 and offset not in seen:
        seen.add(offset)
        header = int.from_bytes(raw[offset : offset + 4], "little")
        if header in (0, 0xFFFFFFFF):
            return None
        if header & 0xFFFF == ACS_CAPABILITY:
            bits = int.from_bytes(raw[offset + 6 : offset + 8], "little")
            return [name for bit, name in enumerate(ACS_CONTROL) if bits >> bit & 1]
        offset = header >> 20 & 0xFFC
    return None


def unit(host: Host, pid: int) -> Optional[str]:
    """The systemd unit of a process, from /proc/PID/cgroup (cgroups(7)): the innermost service or scope."""
    for line in (host.text(f"proc/{pid}/cgroup") or "").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" or controllers == "name=systemd":
            units = [part for part in path.split("/") if part.endswith((".service", ".scope"))]
            if units:
                return units[-1]
    return None


def _nics(host: Host) -> List[Facts]:
    found = []
    for name in host.names("sys/class/infiniband"):
        folder = f"sys/class/infiniband/{name}/device"
        address = os.path.basename(host.real(folder))
        netdevs = host.names(f"{folder}/net")
        found.append(
            {
                "name": name,
                "netdev": netdevs[0] if netdevs else None,
                "pci_address": address if PCI_ADDRESS.fullmatch(address) else None,
                "numa_node": _numa_node(host, folder),
            }
        )
    return found


def _iommu(host: Host, pci_gpus: Sequence[Facts]) -> Facts:
    """passthrough: the default domain of the groups with GPUs, or of all when none has one, is `identity`."""
    groups = host.names("sys/kernel/iommu_groups")
    of_gpus = [_last(host, f"sys/bus/pci/devices/{device['address']}/iommu_group") for device in pci_gpus]
    asked = [group for group in of_gpus if group is not None] or groups
    kinds = [host.text(f"sys/kernel/iommu_groups/{group}/type") for group in asked]
    told = [kind for kind in kinds if kind]
    return {"groups": len(groups), "passthrough": all(kind == "identity" for kind in told) if told else None}
