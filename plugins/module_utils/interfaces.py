# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Which interface and which RDMA ports the ranks on a host use, or why none is right.

The address of every rank comes from the inventory (fleet_address), so that one host's facts never decide what another
host is told. What a host adds: whether the interface with that address can be the one, on what it stands, how fast it is,
and whether the ways to the peers lead over it.

Why the address has to be the first one of its interface: NCCL and gloo are told a name, and both take the first address
of that name which getifaddrs(3) returns (NCCL 2.30.7: src/os/linux.cc, ncclOsFindInterfaces; gloo:
gloo/transport/tcp/device.cc, lookupAddrForIface), IPv4 before IPv6; only NCCL can be told a family (NCCL_SOCKET_FAMILY).

Pure: standard library, Python 3.9 and newer, no Ansible import. Facts are what module network_facts returns.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils.findings import Finding

Facts = Mapping[str, Any]

# Bridges that container and virtual machine tools make for guests of their own host; docker and virbr are those that NCCL
# itself leaves out (src/misc/socket.cc), `br-` and twelve hex digits is how docker names further ones.
_GUESTS = re.compile(r"(docker|virbr|lxcbr|lxdbr|podman|cni|nerdctl)\d*|br-[0-9a-f]{12}")
_PARTS = {"bond": "port", "bridge": "port", "vlan": "parent"}


def choose(network: Facts, settings: Mapping[str, Any], found: List[Finding], notes: List[Finding]) -> Optional[Facts]:
    """The interface, or None with one finding in `found`.

    settings   host, address, interface (or None), address_stated (bool), peers {host: address of the other ranks of its
               replicas}, others {host: what network_facts returned there, where it is known}
    """
    carrier = _carrier(network, settings, found)
    if carrier is None:
        return None
    fault = _state(network, carrier, settings)
    if fault is None and settings["peers"]:
        fault = _for_peers(carrier, settings) or _routes(network, carrier, settings)
        fault = fault or _faster(network, carrier, settings, notes)
        _mtu(carrier, settings, notes)
    if fault:
        found.append(fault)
    return carrier


def speed(network: Facts, name: str, seen: Tuple[str, ...] = ()) -> Optional[int]:
    """Mb/s of an interface; where the kernel has no number for it, that of what it stands on. None: not known."""
    own = next((item for item in network["interfaces"] if item["name"] == name), None)
    if own is None or name in seen:
        return None
    if own["speed"] or not own["lower"]:
        return own["speed"]
    below = [value for part in own["lower"] if (value := speed(network, part, (*seen, name)))]
    return (sum(below) if own["kind"] == "bond" else max(below)) if below else None


def shown_speed(value: Optional[int]) -> str:
    """1000 as `1 Gb/s`, None as `unknown speed`."""
    if value is None:
        return "unknown speed"
    return f"{value / 1000:g} Gb/s" if value >= 1000 else f"{value} Mb/s"


def _finding(settings: Mapping[str, Any], message: str, fix: str, severity: str = "error") -> Finding:
    name = "nccl_interface" if settings["interface"] else "fleet_address"
    return Finding("nccl-interface", f"{settings['host']}: {name}", message, fix, severity)


def _carrier(network: Facts, settings: Mapping[str, Any], found: List[Finding]) -> Optional[Facts]:
    """The interface with the fleet's address, or the one that was named, which has to carry it, too."""
    interfaces = network["interfaces"]
    try:
        address = str(ipaddress.ip_address(settings["address"]))
    except ValueError:
        message = f"{settings['address']!r} is no IP address"
        fix = "Give the host's address on the cluster network: NCCL and the firewall need it as such, names are not looked up."
        found.append(Finding("nccl-interface", f"{settings['host']}: fleet_address", message, fix))
        return None
    carrier = next((item for item in interfaces if address in item["addresses"]), None)
    has = "; ".join(f"{item['name']} {', '.join(item['addresses']) or 'none'}" for item in interfaces)
    if settings["interface"]:
        named = next((item for item in interfaces if item["name"] == settings["interface"]), None)
        if named is None:
            fix = f"Name one of {', '.join(item['name'] for item in interfaces)}, or leave it out."
            found.append(_finding(settings, f"there is no interface {settings['interface']}", fix))
            return None
        if named is not carrier:
            there = f"it is on {carrier['name']}" if carrier else "no interface has it"
            message = f"{named['name']} does not carry the fleet's address {address}; {there}"
            fix = ""
            if carrier and named["name"] in carrier["lower"]:
                fix = f"{named['name']} is only a {_PARTS.get(carrier['kind'], 'part')} of it. "
            found.append(_finding(settings, message, f"{fix}Addresses here: {has}."))
            return None
    elif carrier is None:
        fix = f"Set it to an address of the cluster network. Addresses here: {has}."
        found.append(_finding(settings, f"no interface carries {address}", fix))
        return None
    return carrier


def _state(network: Facts, carrier: Facts, settings: Mapping[str, Any]) -> Optional[Finding]:
    """Down, without a carrier, or with an address that the kernel does not use."""
    name = carrier["name"]
    if not (carrier["up"] and carrier["running"]):
        message = f"{name} is {'up, but has no carrier' if carrier['up'] else 'down'}"
        below = [item for item in network["interfaces"] if item["name"] in carrier["lower"]]
        dead = [f"{item['name']} {'has no carrier' if item['up'] else 'is down'}" for item in below if not _works(item)]
        if dead:
            message += f": of what it stands on, {', '.join(dead)}"
        fix = f"Bring it up: ip link set {(below[0] if dead else carrier)['name']} up; look at cable and switch."
        return _finding(settings, message, fix)
    flag = carrier["unusable"].get(str(ipaddress.ip_address(settings["address"])))
    told = {
        "dadfailed": ("another host has the same address (duplicate address detection failed)", "Give each its own."),
        "tentative": ("the kernel still looks whether another host has it", "Run again in a few seconds."),
        "deprecated": ("the kernel uses it for no new connection (deprecated)", "Use another, or renew its lifetime."),
    }
    if flag:
        return _finding(settings, f"{settings['address']} on {name}: {told[flag][0]}", told[flag][1])
    return None


def _for_peers(carrier: Facts, settings: Mapping[str, Any]) -> Optional[Finding]:
    """What makes an address no address for other hosts."""
    address, name = ipaddress.ip_address(settings["address"]), carrier["name"]
    others = ", ".join(settings["peers"])
    fix = "Set fleet_address to the host's address on the network that the hosts of the replica share."
    if address.is_loopback or name == "lo":
        return _finding(settings, f"{address} is on the loopback interface, which {others} cannot reach", fix)
    if _GUESTS.fullmatch(name):
        message = f"{address} is on {name}, a bridge for guests of this host, which {others} cannot reach"
        return _finding(settings, message, fix)
    if address.is_link_local and address.version == 6:
        message = f"{address} is link-local: it means something only together with an interface, which no rank can say"
        return _finding(settings, message, fix)
    first = next(item for item in carrier["addresses"] if family(item) == address.version)
    if first != str(address):
        message = f"{name} has several addresses, and NCCL and gloo take its first one, {first}, not {address}"
        fix = f"Set fleet_address: {first}, or take {first} off {name}: peers let in fleet_address alone."
        return _finding(settings, message, fix)
    four = [item for item in carrier["addresses"] if family(item) == 4]
    if address.version == 6 and four:
        message = f"{name} has an IPv4 address, too, and gloo takes that one, {four[0]}, not {address}"
        fix = f"Set fleet_address: {four[0]}, or take {four[0]} off {name}: gloo cannot be told a family."
        return _finding(settings, message, fix)
    return None


def family(address: str) -> int:
    """4 or 6."""
    return 6 if ":" in address else 4


def _routes(network: Facts, carrier: Facts, settings: Mapping[str, Any]) -> Optional[Finding]:
    """Whether the kernel would reach every peer over this interface, and from this address."""
    none, other, source = [], [], []
    for peer, address in settings["peers"].items():
        way = network["routes"].get(address)
        if way is None:
            continue
        if way["error"]:
            none.append(f"{peer} ({address}): {way['error']}")
        elif way["dev"] != carrier["name"]:
            other.append(f"{peer} ({address}) by {way['dev']}")
        elif way["source"] and way["source"] != str(ipaddress.ip_address(settings["address"])):
            source.append(f"{peer} sees {way['source']}")
    if none:
        fix = "Set fleet_address of both to addresses on a network that they share, or add a route."
        return _finding(settings, f"the networks of the hosts do not meet; no way to {', '.join(none)}", fix)
    if other:
        message = f"it is on {carrier['name']}, but packets leave to {', '.join(other)}"
        fix = (
            f"Put a route by {carrier['name']}, or set fleet_address to the network that is used: ip route get ADDRESS."
        )
        return _finding(settings, message, fix)
    if source:
        message = f"connections from here carry another address than {settings['address']}: {', '.join(source)}"
        fix = "Correct the route's `src`: peers let in fleet_address alone."
        return _finding(settings, message, fix)
    return None


def _faster(network: Facts, carrier: Facts, settings: Mapping[str, Any], notes: List[Finding]) -> Optional[Finding]:
    """A faster network that all hosts of the replicas share: stops the role where nobody chose the slower one."""
    slow = speed(network, carrier["name"])
    if slow is None or any(peer not in settings["others"] for peer in settings["peers"]):
        return None
    sides = {settings["host"]: network, **{peer: settings["others"][peer] for peer in settings["peers"]}}
    best: Optional[Tuple[int, Dict[str, Tuple[str, str]]]] = None
    for item in network["interfaces"]:
        for text in item["networks"]:
            shared = _shared(ipaddress.ip_interface(text).network, sides)
            rate = shared and min(speed(sides[host], name) or 0 for host, (name, _address) in shared.items())
            if shared and rate and rate > slow and (best is None or rate > best[0]):
                best = (rate, shared)
    if best is None:
        return None
    rate, shared = best
    told = ", ".join(f"{host} {address}" for host, (_name, address) in shared.items())
    message = (
        f"{settings['address']} is on {carrier['name']} with {shown_speed(slow)}, and all hosts of the replica share a "
        f"network with {shown_speed(rate)}, here on {shared[settings['host']][0]}"
    )
    fix = f"To use it, set fleet_address of each: {told}"
    if settings["address_stated"]:
        notes.append(_finding(settings, message, f"{fix}.", "warning"))
        return None
    return _finding(settings, message, f"{fix}. To stay, set fleet_address to {settings['address']}.")


def _shared(network: Any, sides: Mapping[str, Facts]) -> Dict[str, Tuple[str, str]]:
    """{host: (interface, address)} in a network in which all hosts have a usable address; empty where one has none."""
    found: Dict[str, Tuple[str, str]] = {}
    if network.is_link_local or network.is_loopback or network.num_addresses == 1:
        return {}
    for host, facts in sides.items():
        for item in facts["interfaces"]:
            if not _works(item) or _GUESTS.fullmatch(item["name"]) or item["master"]:
                continue
            for text in item["networks"]:
                here = ipaddress.ip_interface(text)
                if here.network == network and str(here.ip) not in item["unusable"]:
                    found.setdefault(host, (item["name"], str(here.ip)))
    addresses = [address for _name, address in found.values()]
    return found if len(found) == len(sides) and len(set(addresses)) == len(addresses) else {}


def _mtu(carrier: Facts, settings: Mapping[str, Any], notes: List[Finding]) -> None:
    """TCP agrees on the smaller one; a switch below both is what hurts, and that is seen only by sending."""
    for peer, address in settings["peers"].items():
        there = settings["others"].get(peer)
        other = next((item for item in there["interfaces"] if address in item["addresses"]), None) if there else None
        if other and other["mtu"] != carrier["mtu"]:
            message = f"{carrier['name']} has MTU {carrier['mtu']}, {other['name']} of {peer} {other['mtu']}"
            notes.append(_finding(settings, message, "Set the same on all hosts and on the switch.", "warning"))


def _works(item: Facts) -> bool:
    return bool(item["up"] and item["running"])


# --- RDMA -------------------------------------------------------------------------------------------------------


def rdma(network: Facts, settings: Mapping[str, Any], found: List[Finding], notes: List[Finding]) -> List[str]:
    """The RDMA ports to use as `device:port`, the fastest ones of one kind that work; empty for none.

    settings["rdma"]: None chooses, a list of device or device:port is checked, an empty list wants none.
    """
    wanted = settings["rdma"]
    if wanted is not None:
        return _named_ports(network, settings, found)
    ports, left = usable_ports(network)
    chosen = [f"{item['device']}:{item['port']}" for item in ports]
    for item, reason in left:
        message = f"{item['device']}:{item['port']} is left out: {reason}"
        fix = "Name the ports to use in nccl_rdma_devices when it has to be otherwise."
        notes.append(Finding("nccl-rdma", f"{settings['host']}: RDMA", message, fix, "warning"))
    _same_rdma(ports, settings, found)
    return chosen


def usable_ports(network: Facts) -> Tuple[List[Facts], List[Tuple[Facts, str]]]:
    """Ports that work, of the fastest kind, and those left out with the reason.

    A RoCE port needs an interface that works and has an address: its GID is made of it. InfiniBand goes before RoCE of
    the same rate.
    """
    good, left = [], []
    by_name = {item["name"]: item for item in network["interfaces"]}
    for item in network["rdma"]:
        reason = None
        if item["state"] != "ACTIVE":
            reason = f"its state is {item['state']} (physically {item['phys_state']})"
        elif item["link_layer"] not in ("InfiniBand", "Ethernet"):
            reason = f"its link layer is {item['link_layer']}"
        elif item["link_layer"] == "Ethernet":
            below = by_name.get(item["netdev"] or "")
            top = by_name.get(below["master"]) if below and below["master"] else below
            if top is None or not _works(top):
                reason = f"its interface {item['netdev'] or ''} does not work".replace("  ", " ")
            elif not any(not ipaddress.ip_address(address).is_link_local for address in top["addresses"]):
                reason = f"its interface {top['name']} has no address"
        if reason:
            left.append((item, reason))
        else:
            good.append(item)
    if not good:
        return [], left
    best = max(good, key=lambda item: (item["rate"] or 0, item["link_layer"] == "InfiniBand"))
    kind = (best["link_layer"], best["rate"])
    told = f"{kind[0]} with {kind[1] or 0:g} Gb/s is there"
    left += [(item, told) for item in good if (item["link_layer"], item["rate"]) != kind]
    return [item for item in good if (item["link_layer"], item["rate"]) == kind], left


def _named_ports(network: Facts, settings: Mapping[str, Any], found: List[Finding]) -> List[str]:
    where, chosen = f"{settings['host']}: nccl_rdma_devices", []
    has = ", ".join(f"{item['device']}:{item['port']} {item['state']}" for item in network["rdma"]) or "none"
    for text in map(str, settings["rdma"]):
        device, _, port = text.partition(":")
        ports = [item for item in network["rdma"] if item["device"] == device and port in ("", str(item["port"]))]
        if not ports:
            found.append(Finding("nccl-rdma", where, f"there is no RDMA port {text}", f"Ports here: {has}."))
        dead = [item for item in ports if item["state"] != "ACTIVE"]
        for item in dead:
            message = f"{text} has the state {item['state']} (physically {item['phys_state']})"
            fix = f"Look at cable, switch and subnet manager, or leave it out. Ports here: {has}."
            found.append(Finding("nccl-rdma", where, message, fix))
        chosen += [f"{item['device']}:{item['port']}" for item in ports if item not in dead]
    return chosen


def _same_rdma(ports: Sequence[Facts], settings: Mapping[str, Any], found: List[Finding]) -> None:
    """NCCL chooses its network rank by rank, and InfiniBand, RoCE and sockets do not speak with each other."""
    mine = ports[0]["link_layer"] if ports else None
    differ = {}
    for peer in settings["peers"]:
        if peer in settings["others"]:
            theirs = usable_ports(settings["others"][peer])[0]
            kind = theirs[0]["link_layer"] if theirs else None
            if kind != mine:
                differ[peer] = kind or "no RDMA port that works"
    if differ:
        told = ", ".join(f"{peer} has {kind}" for peer, kind in differ.items())
        message = f"the hosts of one replica differ: here is {mine or 'no RDMA port that works'}, {told}"
        fix = "Repair the ports (ibstat, rdma link), or set nccl_rdma_devices: [] for all of these hosts to use TCP."
        found.append(Finding("nccl-rdma", f"{settings['host']}: RDMA", message, fix))
