# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Which interface NCCL uses, which ports the kernel gives it, and what stands in /etc/nccl.conf.

Facts about NCCL are from its source (2.27.5 to 2.30.7): every socket binds port 0, so that
net.ipv4.ip_local_port_range decides (src/misc/socket.cc); NCCL_SOCKET_IFNAME is a list of prefixes unless it begins
with `=`, and a name that matches nothing is fatal (src/os/linux.cc); the file has KEY=VALUE lines without quotes or
spaces, `#` only in the first column, and the first assignment of a key holds, since it is setenv(..., 0)
(src/misc/param.cc). So the exact name is written NCCL_SOCKET_IFNAME==eth0.

Pure: standard library, Python 3.9 and newer, no Ansible import. Data comes as arguments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import interfaces, rollout
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.findings import Finding
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.nftables import PortRange, parse_ports

CONF = "/etc/nccl.conf"
BEGIN, END = "# BEGIN gpu_fleet", "# END gpu_fleet"

# Ports in the range that are too few: each rank of each communicator opens several, and every other program's
# outgoing connections draw from the same ones. On a gateway each proxied request is such a connection, and stays for
# a minute in TIME_WAIT (tcp(7)): 20,000 allow 333 new ones a second to each backend.
MINIMUM, MINIMUM_GATEWAY = 4000, 20000

# A rank's server, its agent, its part of a Ray cluster.
_UNIT = re.compile(r"(?P<unit>(?:vllm|vllm-agent|ray)@(?P<instance>.+))\.service")
# The line of the sysctl file that remembers the fleet's own reserved ports: those of others stay, and are told apart by it.
_OWN_PORTS = "Reserved by the fleet: "


@dataclass
class NcclPlan:
    """What the role writes, and what it found wrong. `notes` are worth knowing and stop nothing.

    rdma         RDMA ports as device:port
    in_file      whether /etc/nccl.conf begins with the block already
    net_devices  the same answer for UCX (UCX_NET_DEVICES), which asks for RDMA ports and interfaces in one list
    header       first lines of the sysctl file; they remember which reserved ports are the fleet's own
    in_the_way   instances that the inventory no longer names, and that listen on ports of what it names
    """

    interface: Optional[str] = None
    rdma: List[str] = field(default_factory=list)
    net_devices: str = ""
    block: str = ""
    in_file: bool = False
    header: str = ""
    sysctl: Dict[str, str] = field(default_factory=dict)
    in_the_way: List[str] = field(default_factory=list)
    findings: List[Finding] = field(default_factory=list)
    notes: List[Finding] = field(default_factory=list)


def plan(network: Mapping[str, Any], settings: Mapping[str, Any], known: Mapping[str, Any]) -> NcclPlan:
    """Judge a host.

    network   what module network_facts returned
    settings  what interfaces.choose and interfaces.rdma want, and variables, port_range, reserved_ports, fixed_ports,
              gateway (bool), blocks {instance: {name: port or "first-last"}} of what is planned for the host
    known     data/nccl_variables.yml
    """
    host = settings["host"]
    result = NcclPlan()
    found = result.findings
    chosen = interfaces.choose(network, settings, found, result.notes)
    result.interface = chosen["name"] if chosen else None
    if "NCCL_IB_HCA" not in settings["variables"]:
        result.rdma = interfaces.rdma(network, settings, found, result.notes)
    result.net_devices = ",".join([*result.rdma, result.interface or ""]).rstrip(",")
    found.extend(judge_variables(settings["variables"], known, f"{host}: nccl_variables"))
    result.block = _block(result, settings)
    conf = network.get("nccl_conf") or ""
    result.in_file = bool(network.get("nccl_conf_plain")) and _at_the_top(conf, result.block)
    _judge_file(conf, result, known, host)
    _plan_ports(network, settings, result)
    return result


def judge_variables(variables: Mapping[str, Any], known: Mapping[str, Any], where: str) -> List[Finding]:
    """Variables that NCCL does not read, that do not belong in a host's file, or whose value the file cannot hold."""
    found = []
    for name, value in variables.items():
        reason = known["not_read"].get(name) or known["not_here"].get(name)
        if reason:
            found.append(Finding("nccl-variable", where, f"{name}: {' '.join(reason.split())}", "Leave it out."))
        elif name in ("NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY"):
            fix = "Set nccl_interface; the family follows from fleet_address."
            found.append(Finding("nccl-variable", where, f"{name} is what this role chooses", fix))
        elif name not in known["read"] and name not in known["read_by_some"]:
            fix = "Correct the name; data/nccl_variables.yml lists what NCCL reads."
            found.append(Finding("nccl-variable", where, f"{name} is no variable that NCCL reads", fix))
        elif not re.fullmatch(r"[^\s\"'](?:[^\"'\n]*[^\s\"'])?", str(value)):
            fix = "Write the bare value: NCCL would take quotes and spaces as part of it."
            found.append(Finding("nccl-variable", where, f"{name} has the value {value!r}", fix))
    return found


def own_block(text: str) -> Tuple[List[str], List[str]]:
    """Lines of the file inside this role's block, and those outside it."""
    inside: List[str] = []
    outside: List[str] = []
    into = outside
    for line in text.splitlines():
        if line.strip() == BEGIN:
            into = inside
        elif line.strip() == END:
            into = outside
        else:
            into.append(line)
    return inside, outside


def _at_the_top(text: str, block: str) -> bool:
    """Whether a file begins with this role's block, and has no other of it."""
    return text.startswith(f"{BEGIN}\n{block}\n{END}\n") and text.count(BEGIN) == text.count(END) == 1


def _block(result: NcclPlan, settings: Mapping[str, Any]) -> str:
    """The family is always said: without it NCCL takes whichever address of the interface comes first."""
    lines = []
    if result.interface:
        family = "AF_INET6" if ":" in str(settings["address"]) else "AF_INET"
        lines = [f"NCCL_SOCKET_IFNAME=={result.interface}", f"NCCL_SOCKET_FAMILY={family}"]
    if result.rdma:
        lines.append(f"NCCL_IB_HCA=={','.join(result.rdma)}")
    elif settings["rdma"] is not None and "NCCL_IB_DISABLE" not in settings["variables"]:
        lines.append("NCCL_IB_DISABLE=1")
    lines += [f"{name}={value}" for name, value in sorted(settings["variables"].items())]
    return "\n".join(lines)


def _judge_file(text: str, result: NcclPlan, known: Mapping[str, Any], host: str) -> None:
    """What somebody else wrote stays; it is an error where it contradicts, a note where NCCL ignores it."""
    ours = dict(line.split("=", 1) for line in result.block.splitlines())
    for line in own_block(text)[1]:
        if line.startswith("#") or not line.strip():
            continue
        name, equals, value = line.partition("=")
        where = f"{host}: {CONF}, line {line!r}"
        if not equals or name != name.strip():
            fix = "Write KEY=VALUE without spaces, or # in the first column."
            result.notes.append(Finding("nccl-conf", where, "NCCL does not understand it", fix))
        elif name in ours and value != ours[name]:
            fix = f"Remove the line, or set nccl_interface or nccl_variables so that both say {name}={value}."
            result.findings.append(Finding("nccl-conf", where, f"the role would write {name}={ours[name]}", fix))
        elif name in known["not_read"]:
            reason = " ".join(known["not_read"][name].split())
            result.notes.append(Finding("nccl-conf", where, f"it does nothing: {reason}", "Remove the line."))


def _plan_ports(network: Mapping[str, Any], settings: Mapping[str, Any], result: NcclPlan) -> None:
    where = f"{settings['host']}: nccl_port_range"
    span = judge_range(settings["port_range"], where, result.findings, gateway=settings["gateway"])
    if span is None:
        return
    low, high = span
    reserved = _reserved(settings, span, result.findings)
    for port in _fixed(settings, span, result.findings):
        if not _inside(port, reserved):
            message = f"port {port} of a service lies inside {settings['port_range']}, so that any connection may take it first"
            result.findings.append(
                Finding("nccl-port-range", where, message, "Move the port, or add it to nccl_reserved_ports.")
            )
    _judge_blocks(network, settings, result)
    strangers = {
        item["port"]: item
        for item in network["listeners"]
        if low <= item["port"] <= high and item["uid"] != network["user_uid"] and not _inside(item["port"], reserved)
    }
    if strangers:
        told = ", ".join(f"{port}{_listener(item)}" for port, item in sorted(strangers.items()))
        message = f"somebody listens inside {settings['port_range']}: {told}"
        fix = "If one of them is a fixed port of a service, add it to nccl_reserved_ports; a port that the kernel chose does no harm."
        result.notes.append(Finding("nccl-port-range", where, message, fix))
    result.sysctl["net.ipv4.ip_local_port_range"] = f"{low} {high}"
    theirs = _of_others(network)
    former = _remembered(network)
    if reserved or former or theirs:
        both = parse_ports([*map(_port_text, reserved), *map(_port_text, theirs)])
        # The empty value is the kernel's own for none: what the fleet no longer reserves is given back.
        result.sysctl["net.ipv4.ip_local_reserved_ports"] = ",".join(map(_port_text, both))
    result.header = f"{_OWN_PORTS}{','.join(map(_port_text, reserved)) or 'none'}"


def _port_text(span: PortRange) -> str:
    return str(span[0]) if span[0] == span[1] else f"{span[0]}-{span[1]}"


def _listener(item: Mapping[str, Any]) -> str:
    """` (nginx, process 812, nginx.service)`, as far as it is known."""
    told = [item.get("process"), f"process {item['pid']}" if item.get("pid") else None, item.get("unit")]
    return f" ({', '.join(filter(None, told))})" if any(told) else f" (user id {item['uid']})"


def _remembered(network: Mapping[str, Any]) -> Tuple[PortRange, ...]:
    """The ports that the fleet's own file said it reserves; an altered line is taken for none."""
    line = next((part for part in (network["sysctl_text"] or "").splitlines() if _OWN_PORTS in part), "")
    try:
        return parse_ports(filter(None, line.partition(_OWN_PORTS)[2].replace("none", "").split(",")))
    except ValueError:
        return ()


def _of_others(network: Mapping[str, Any]) -> Tuple[PortRange, ...]:
    """Ports that the kernel keeps back and the fleet did not ask for: somebody else did, and they stay."""
    own = {port for low, high in _remembered(network) for port in range(low, high + 1)}
    try:
        present = parse_ports(filter(None, network["reserved_ports"].split(",")))
    except ValueError:
        return ()
    return parse_ports(port for low, high in present for port in range(low, high + 1) if port not in own)


def _judge_blocks(network: Mapping[str, Any], settings: Mapping[str, Any], result: NcclPlan) -> None:
    """Somebody who listens on a port of a planned replica and is not that replica's own unit.

    Of a unit of the fleet whose instance is not planned here any more one finding says how it makes room.
    """
    for instance, ports in settings["blocks"].items():
        own = {f"{unit}@{instance}.service" for unit in ("vllm", "vllm-agent", "ray")}
        spans = {name: parse_ports([port])[0] for name, port in ports.items()}
        former: Dict[str, Tuple[str, str]] = {}
        for name, (low, high) in sorted(spans.items(), key=lambda item: item[1]):
            listening = (item for item in network["listeners"] if low <= item["port"] <= high)
            taken = next((item for item in listening if item.get("unit") not in own), None)
            if taken:
                message = f"port {taken['port']} ({name} of {instance}) is taken{_listener(taken)}"
                unit = _UNIT.fullmatch(taken.get("unit") or "")
                if unit and unit["instance"] not in settings["blocks"]:
                    former.setdefault(unit["instance"], (unit["unit"], message))
                    continue
                key = "ray_port_base" if name.startswith("ray_") else "port_base"
                fix = f"Stop that listener, or give the service another {key}."
                result.findings.append(Finding("port-taken", settings["host"], message, fix))
        if former:
            running = [(settings["host"], unit) for unit, _message in former.values()]
            message, fix = rollout.in_its_place(instance, running)
            evidence = "; ".join(told for _unit, told in former.values())
            result.findings.append(Finding("port-taken", settings["host"], f"{message} ({evidence})", f"{fix}."))
            result.in_the_way += [name for name in former if name not in result.in_the_way]


def judge_range(text: Any, where: str, found: List[Finding], *, gateway: bool) -> Optional[PortRange]:
    """First and last port of the kernel's range, or None; what is wrong with it is added to `found`."""
    try:
        (span,) = parse_ports([text])
    except ValueError:
        found.append(Finding("nccl-port-range", where, f"{text!r} is no range of ports", "Write it as 40000-60999."))
        return None
    if span[0] < 1024:
        found.append(
            Finding(
                "nccl-port-range",
                where,
                f"{text} begins below 1024, among the ports of known services",
                "Begin at 1024 or above.",
            )
        )
    need = MINIMUM_GATEWAY if gateway else MINIMUM
    if span[1] - span[0] + 1 < need:
        message = f"{text} has {span[1] - span[0] + 1} ports, fewer than {need}" + (" for a gateway" if gateway else "")
        found.append(
            Finding("nccl-port-range", where, message, "Every outgoing connection of the host draws from it. Widen it.")
        )
    return span


def _reserved(settings: Mapping[str, Any], span: PortRange, found: List[Finding]) -> Tuple[PortRange, ...]:
    """Reserved ports that fall inside the range; outside it the kernel hands out none anyway."""
    try:
        ranges = parse_ports(settings["reserved_ports"])
    except ValueError as error:
        found.append(
            Finding(
                "nccl-port-range",
                f"{settings['host']}: nccl_reserved_ports",
                str(error),
                "Write ports as 50051 or 50000-50010.",
            )
        )
        return ()
    cut = ((max(low, span[0]), min(high, span[1])) for low, high in ranges)
    return tuple((low, high) for low, high in cut if low <= high)


def _fixed(settings: Mapping[str, Any], span: PortRange, found: List[Finding]) -> Iterable[int]:
    try:
        ranges = parse_ports(settings["fixed_ports"])
    except ValueError as error:
        found.append(
            Finding(
                "nccl-port-range",
                f"{settings['host']}: nccl_fixed_ports",
                str(error),
                "Write ports as 8000 or 8000-8010.",
            )
        )
        return []
    return [port for low, high in ranges for port in range(max(low, span[0]), min(high, span[1]) + 1)]


def _inside(port: int, ranges: Sequence[PortRange]) -> bool:
    return any(low <= port <= high for low, high in ranges)
