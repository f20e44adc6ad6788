# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A host's network as plain data: interfaces, RDMA ports, routes and listeners, read from `ip -json`, sysfs and proc.

No judgement: that is in interfaces.py, on the controller. Every function that reads a folder takes it as an argument, so
that recorded trees can be read. Sources: ip-address(8), ip-route(8), the kernel's Documentation/ABI (sysfs-class-net,
sysfs-class-infiniband), proc_pid_net(5).

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

LISTEN = "0A"  # TCP_LISTEN of include/net/tcp_states.h, as /proc/net/tcp prints it
# Flags of an address (rtnetlink(7), IFA_F_*) with which the kernel does not use it for new connections.
UNUSABLE = ("dadfailed", "tentative", "deprecated")


def interfaces(shown: Sequence[Mapping[str, Any]], root: str = "/sys/class/net") -> List[Dict[str, Any]]:
    """`ip -json -details address show`, reduced.

    operstate UNKNOWN is what loopback, dummies and tunnels have while they work.
    """
    return [_interface(item, root) for item in shown if "ifname" in item]


def _interface(item: Mapping[str, Any], root: str) -> Dict[str, Any]:
    name = item["ifname"]
    addresses = [address for address in item.get("addr_info", []) if "local" in address]
    return {
        "name": name,
        "kind": (item.get("linkinfo") or {}).get("info_kind"),
        "up": "UP" in item["flags"],
        "running": item.get("operstate") in ("UP", "UNKNOWN"),
        "speed": _speed(os.path.join(root, name, "speed")),
        "mtu": item.get("mtu"),
        "master": item.get("master"),
        "lower": _lower(os.path.join(root, name)),
        "addresses": [address["local"] for address in addresses],
        "networks": [f"{address['local']}/{address['prefixlen']}" for address in addresses],
        "unusable": {
            address["local"]: flag for address in addresses for flag in reversed(UNUSABLE) if address.get(flag)
        },
    }


def _speed(path: str) -> Optional[int]:
    """Mb/s; the file says -1 for unknown, and cannot be read while the link is down or where there is no such thing."""
    text = _text(path)
    return int(text) if text and text.isdecimal() and int(text) > 0 else None


def _lower(folder: str) -> List[str]:
    """What an interface stands on: a bond's and a bridge's ports, a VLAN's parent."""
    try:
        return sorted(entry[len("lower_") :] for entry in os.listdir(folder) if entry.startswith("lower_"))
    except OSError:
        return []


def rdma_ports(root: str = "/sys/class/infiniband") -> List[Dict[str, Any]]:
    """Every port of every RDMA device. `state` reads `4: ACTIVE`, `phys_state` `5: LinkUp`, `rate` `400 Gb/sec (4X NDR)`."""
    found = []
    for device in _entries(root):
        for port in _entries(os.path.join(root, device, "ports")):
            folder = os.path.join(root, device, "ports", port)
            rate = re.match(r"[\d.]+", _text(os.path.join(folder, "rate")) or "")
            found.append(
                {
                    "device": device,
                    "port": int(port),
                    "state": _word(_text(os.path.join(folder, "state"))),
                    "phys_state": _word(_text(os.path.join(folder, "phys_state"))),
                    "link_layer": _text(os.path.join(folder, "link_layer")),
                    "rate": float(rate.group()) if rate else None,
                    "netdev": _netdev(root, device, folder),
                }
            )
    return found


def _netdev(root: str, device: str, folder: str) -> Optional[str]:
    """The interface of a port: that of its first GID, or the only one on the same PCI function."""
    named = _text(os.path.join(folder, "gid_attrs", "ndevs", "0"))
    beside = _entries(os.path.join(root, device, "device", "net"))
    return named or (beside[0] if len(beside) == 1 else None)


def _word(text: Optional[str]) -> Optional[str]:
    return text.partition(":")[2].strip() if text and ":" in text else text


def route(answer: Sequence[Mapping[str, Any]], error: Optional[str]) -> Dict[str, Any]:
    """One answer of `ip -json route get`; where there is no way, `ip` fails with `RTNETLINK answers: ...`."""
    if error or not answer:
        return {"dev": None, "source": None, "via": None, "error": (error or "no answer").rpartition("answers: ")[2]}
    first = answer[0]
    if first.get("type") in ("unreachable", "prohibit", "blackhole"):
        return {"dev": None, "source": None, "via": None, "error": f"the route is {first['type']}"}
    via = first.get("gateway") or (first.get("via") or {}).get("host")
    return {"dev": first.get("dev"), "source": first.get("prefsrc"), "via": via, "error": None}


def listeners(root: str = "/proc") -> List[Dict[str, Any]]:
    """TCP sockets in state LISTEN, with process and systemd unit where the caller may see them."""
    found: Dict[Tuple[int, str, int], int] = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in (_text(os.path.join(root, "net", name)) or "").splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN:
                address, port = fields[1].rsplit(":", 1)
                found[int(port, 16), _address(address, family), int(fields[7])] = int(fields[9])
    owners = _owners(set(found.values()), root)
    return [
        {"port": port, "uid": uid, "address": address, **_process(owners.get(inode), root)}
        for (port, address, uid), inode in sorted(found.items())
    ]


def _address(text: str, family: int) -> str:
    """An address as /proc/net/tcp prints it: words of 32 bits in the machine's own order."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))


def _owners(inodes: Any, root: str) -> Dict[int, int]:
    """Which process has each of these sockets open; of several, which share it, the first."""
    found: Dict[int, int] = {}
    for pid in sorted(map(int, filter(str.isdecimal, _entries(root)))):
        folder = os.path.join(root, str(pid), "fd")
        for handle in _entries(folder):
            try:
                target = os.readlink(os.path.join(folder, handle))
            except OSError:
                continue
            if target.startswith("socket:[") and int(target[8:-1]) in inodes:
                found.setdefault(int(target[8:-1]), pid)
    return found


def _process(pid: Optional[int], root: str) -> Dict[str, Any]:
    if pid is None:
        return {"pid": None, "process": None, "unit": None}
    groups = _text(os.path.join(root, str(pid), "cgroup")) or ""
    units = [unit for line in groups.splitlines() for unit in re.findall(r"/([^/\n]+\.service)(?=/|$)", line)]
    return {"pid": pid, "process": _text(os.path.join(root, str(pid), "comm")), "unit": units[-1] if units else None}


def _entries(folder: str) -> List[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _text(path: str) -> Optional[str]:
    """The file's text without blanks at its ends; None where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="backslashreplace") as handle:
            return handle.read().strip()
    except (OSError, ValueError):
        return None
