# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The fleet's own nftables table as text, and what on a host stands in its way.

An opening, as role firewall takes it::

    {"name": "chat.0 ranks",                     # shown beside the rule
     "ports": ["29501", "40000-60999"],
     "proto": "tcp",                             # tcp or udp, default tcp
     "from": ["10.0.0.2", "fd00::/64"],          # addresses, CIDRs, or the word "any"; empty: nobody
     "interface": "eth1",                        # optional: only what comes in there
     "cluster": True}                            # optional: only what comes in on the cluster's interface, if that is known

A port that an opening names is accepted from its `from` and dropped from everybody else; a port that no
opening names is left alone (policy accept). Loopback and the SSH ports are accepted before anything else.

TCP is judged by its first packet alone (SYN without ACK): whoever cannot send that has no connection, and
established ones go on. So the table needs no connection tracking, whose table can run full on a busy gateway
and would then drop everybody's packets. The input hook comes after reassembly, so flags cannot hide in
fragments. UDP has no first packet and is tracked.

Pure: standard library, Python 3.9 and newer, no Ansible import. Grammar: nft(8) of nftables 1.0.6.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple, Union

FAMILY = "inet"
TABLE = "gpu_fleet"

PortRange = Tuple[int, int]
Network = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]

# What nft takes inside a quoted comment without surprises; its own limit is 128 characters.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._:@/+-]{0,99}")
# IFNAMSIZ is 16 with the closing zero; `*` at the end would be nft's wildcard, and is refused.
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:-]{0,14}")
# Statements that leave a rule's verdict to its matches; a limit or anything unknown does not.
_PLAIN = {"match", "counter", "accept", "jump", "goto", "log"}
_DEPTH = 8  # jumps followed; the kernel's own limit is 16
_KEYS = {"name", "ports", "proto", "from", "interface", "cluster"}
_VERDICTS = ("drop", "reject")


class OpeningError(ValueError):
    """Openings that cannot be used; the message lists every fault."""


@dataclass(frozen=True)
class Opening:
    """One opening, checked. `sources` is None for "any"."""

    name: str
    ports: Tuple[PortRange, ...]
    proto: str = "tcp"
    sources: Optional[Tuple[Network, ...]] = ()
    interface: Optional[str] = None

    def of_family(self, version: int) -> Tuple[Network, ...]:
        """The sources that are IPv4 (4) or IPv6 (6)."""
        return tuple(source for source in self.sources or () if source.version == version)


@dataclass(frozen=True)
class Obstacle:
    """A chain that is not ours and would drop what an opening accepts.

    handle  number of the rule that drops (`nft --handle list chain ...` shows it); None: the policy of the chain
    tool    ufw or firewalld when one of them made the chain, else empty
    """

    chain: str
    reason: str
    remedy: str
    handle: Optional[int] = None
    tool: str = ""

    def as_dict(self) -> Dict[str, Any]:
        """Plain data, as a module returns it."""
        return {"chain": self.chain, "reason": self.reason, "remedy": self.remedy, "tool": self.tool}


def parse_openings(items: Iterable[Dict[str, Any]], cluster_interface: Optional[str] = None) -> List[Opening]:
    """Check openings given as plain data. Raises OpeningError naming all that is wrong, not the first thing only."""
    openings, errors = [], []
    for number, item in enumerate(items, 1):
        try:
            openings.append(_opening(item, cluster_interface))
        except ValueError as error:
            name = item.get("name") if isinstance(item, dict) else None
            errors.append(f"opening {name or number}: {error}")
    if errors:
        raise OpeningError("; ".join(errors))
    return openings


def parse_ports(items: Iterable[Any]) -> Tuple[PortRange, ...]:
    """["8000", "40000-60999"] as sorted, merged ranges. ValueError for what is no port or range."""
    ranges = sorted(_port_range(str(item)) for item in items)
    merged: List[PortRange] = []
    for low, high in ranges:
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def render(openings: Sequence[Opening], ssh_ports: Iterable[Any] = (22,)) -> str:
    """The file that `nft -f` loads: the table replaced in one transaction, other tables untouched."""
    rules = [
        'iif "lo" accept',
        f'tcp dport {_port_set(parse_ports(ssh_ports))} accept comment "SSH, whatever else is said"',
    ]
    protocols = sorted({opening.proto for opening in openings})
    for proto in protocols:
        rules.append(_not_a_new_connection(proto))
    for opening in sorted(openings, key=lambda item: (item.name, item.ports)):
        rules.extend(_accepting(opening))
    for proto in protocols:
        ports = parse_ports(port for item in openings if item.proto == proto for port in map(_port_text, item.ports))
        rules.append(f'{proto} dport {_port_set(ports)} counter drop comment "from nobody the fleet knows"')
    body = "\n".join(f"\t\t{rule}" for rule in rules)
    return (
        "#!/usr/sbin/nft -f\n"
        "# Made by the Ansible role gpu_fleet.vllm.firewall; changes made here by hand are put right by its next run.\n"
        "# Only this table is replaced, in one transaction; deleting needs the table to be there, so it is named first.\n"
        f"table {FAMILY} {TABLE}\n"
        f"delete table {FAMILY} {TABLE}\n"
        f"table {FAMILY} {TABLE} {{\n"
        "\tchain input {\n"
        "\t\ttype filter hook input priority filter; policy accept;\n"
        f"{body}\n"
        "\t}\n"
        "}\n"
    )


def replacing(listed: str) -> str:
    """A file that brings back what `nft list table` printed, or, when there was no table, that there is none."""
    return f"table {FAMILY} {TABLE}\ndelete table {FAMILY} {TABLE}\n{listed}"


def holds(ports: Iterable[PortRange], port: int) -> bool:
    """Whether a port is among the ranges."""
    return any(low <= port <= high for low, high in ports)


def obstacles(ruleset: Dict[str, Any], openings: Sequence[Opening]) -> List[Obstacle]:
    """Chains of `nft -j list ruleset` that would drop what the openings accept.

    An accept of ours does not undo another chain's drop: a packet has to pass every base chain of its hook. The rules of
    each are followed in their order, with jumps, until one accepts the whole opening, or one drops some of it, or the
    chain's policy does. Rules with matches this code does not know (iptables' own ones, for instance) are taken neither
    for an accept, better one question too many than a fleet that waits for packets that never come, nor for a drop, which
    a real connection shows.
    """
    index = _Ruleset(ruleset)
    found = []
    for chain in index.input_chains():
        versions = {"ip": (4,), "ip6": (6,), "inet": (4, 6)}[chain["family"]]
        shut: Dict[Optional[int], List[Opening]] = {}
        for opening in openings:
            ends = dict.fromkeys(index.end(chain, opening, version) for version in versions)
            for handle in ends:
                if handle is not None:
                    shut.setdefault(None if handle == POLICY else handle, []).append(opening)
        found += [_obstacle(chain, index, handle, closed) for handle, closed in shut.items()]
    return found


def legacy_obstacles(saved: str, command: str, openings: Sequence[Opening]) -> List[Obstacle]:
    """The same for old iptables, which nft does not show: `saved` is what iptables-legacy-save prints."""
    if not openings or not re.search(r"^:INPUT (DROP|REJECT)\b", saved, re.MULTILINE):
        return []
    rules = "; ".join(
        f"{command} -I INPUT -p {item.proto} -m multiport --dports {','.join(_port_text(p, ':') for p in item.ports)} -j ACCEPT"
        for item in openings
    )
    where, tool = f"{command} filter INPUT", "ufw" if ":ufw" in saved else ""
    remedy = f"{tool} made it" if tool else f"accept it there ({rules})"
    return [Obstacle(where, "its policy drops what no rule accepts", remedy, tool=tool)]


def _opening(item: Dict[str, Any], cluster_interface: Optional[str]) -> Opening:
    if not isinstance(item, dict):
        raise ValueError(f"{item!r} is no opening; it has to be a mapping with name, ports and from")
    unknown = sorted(set(item) - _KEYS)
    if unknown:
        raise ValueError(f"unknown key {', '.join(unknown)}; known are {', '.join(sorted(_KEYS))}")
    name, proto, interface = str(item.get("name", "")), item.get("proto") or "tcp", item.get("interface") or None
    if interface is None and item.get("cluster"):
        interface = cluster_interface or None
    if not _NAME.fullmatch(name):
        raise ValueError("name has to be 1 to 100 letters, digits, spaces or . _ : @ / + -")
    if proto not in ("tcp", "udp"):
        raise ValueError(f"proto {proto!r} is neither tcp nor udp")
    if interface is not None and not _INTERFACE.fullmatch(str(interface)):
        raise ValueError(f"interface {interface!r} is no interface name (1 to 15 characters)")
    if not item.get("ports"):
        raise ValueError("ports is empty")
    return Opening(name, parse_ports(item["ports"]), proto, _sources(item.get("from")), interface)


def _port_range(text: str) -> PortRange:
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text.strip())
    low, high = (int(match.group(1)), int(match.group(2) or match.group(1))) if match else (0, 0)
    if not 1 <= low <= high <= 65535:
        raise ValueError(f"{text!r} is no port or range of ports between 1 and 65535, such as 8000 or 40000-60999")
    return low, high


def _sources(items: Any) -> Optional[Tuple[Network, ...]]:
    if items is None:
        raise ValueError("from is missing; say who may come in: addresses, CIDRs, or [any]")
    if isinstance(items, str):
        raise ValueError(f"from is {items!r}, it has to be a list")
    if "any" in items:
        return None
    networks = []
    for item in items:
        try:
            networks.append(ipaddress.ip_network(str(item).strip(), strict=False))
        except ValueError:
            raise ValueError(f"from: {item!r} is no IP address, no CIDR and not the word any") from None
    four = ipaddress.collapse_addresses(item for item in networks if item.version == 4)
    six = ipaddress.collapse_addresses(item for item in networks if item.version == 6)
    return tuple(four) + tuple(six)


def _port_text(ports: PortRange, between: str = "-") -> str:
    low, high = ports
    return str(low) if low == high else f"{low}{between}{high}"


def _port_set(ports: Sequence[PortRange]) -> str:
    return "{ " + ", ".join(map(_port_text, ports)) + " }"


def _address_set(networks: Sequence[Network]) -> str:
    plain = (str(item.network_address) if item.num_addresses == 1 else str(item) for item in networks)
    return "{ " + ", ".join(plain) + " }"


def _not_a_new_connection(proto: str) -> str:
    if proto == "tcp":
        return 'tcp flags & (fin | syn | rst | ack) != syn accept comment "only what opens a connection is judged"'
    return 'meta l4proto udp ct state established,related accept comment "answers"'


def _accepting(opening: Opening) -> List[str]:
    """One rule for each address family that has sources; none when nobody may come in."""
    first = f'iifname "{opening.interface}" ' if opening.interface else ""
    last = f'{opening.proto} dport {_port_set(opening.ports)} accept comment "{opening.name}"'
    if opening.sources is None:
        return [f"{first}{last}"]
    return [
        f"{first}{family} saddr {_address_set(opening.of_family(version))} {last}"
        for family, version in (("ip", 4), ("ip6", 6))
        if opening.of_family(version)
    ]


POLICY = -1  # instead of a rule's handle: the chain's own policy drops


class _Ruleset:
    """Base chains, rules and sets of `nft -j list ruleset` (libnftables-json(5))."""

    def __init__(self, ruleset: Dict[str, Any]) -> None:
        self.chains: List[Dict[str, Any]] = []
        self.rules: Dict[Tuple[str, str, str], List[Dict[str, Any]]] = {}
        self.sets: Dict[Tuple[str, str, str], List[Any]] = {}
        for item in ruleset.get("nftables", []):
            if "chain" in item:
                self.chains.append(item["chain"])
            elif "rule" in item:
                rule = item["rule"]
                self.rules.setdefault((rule["family"], rule["table"], rule["chain"]), []).append(rule)
            elif "set" in item:
                found = item["set"]
                self.sets[(found["family"], found["table"], found["name"])] = found.get("elem", [])

    def input_chains(self) -> List[Dict[str, Any]]:
        """Base chains of the input hook, ours left out."""
        return [
            chain
            for chain in self.chains
            if chain.get("hook") == "input"
            and chain["family"] in ("ip", "ip6", "inet")
            and (chain["family"], chain["table"]) != (FAMILY, TABLE)
        ]

    def end(self, chain: Dict[str, Any], opening: Opening, version: int) -> Optional[int]:
        """What drops some of the opening in IPv4 (4) or IPv6 (6): a rule's handle, POLICY, or None for nothing."""
        if opening.sources is not None and not opening.of_family(version):
            return None  # nobody of that family is meant to come in
        place = (chain["family"], chain["table"], chain["name"])
        for ports in opening.ports:
            verdict = self._follow(place, _Traffic(opening, ports, version))
            if verdict is None and chain.get("policy") == "drop":
                return POLICY
            if verdict is not None and verdict != "accept":
                return int(verdict)
        return None

    def _follow(self, place: Tuple[str, str, str], traffic: "_Traffic", depth: int = 0) -> Optional[str]:
        """`accept` when a rule takes all of the traffic, the handle of the first that drops some, None at the end."""
        for rule in self.rules.get(place, []):
            expr = rule["expr"]
            matches = [item["match"] for item in expr if "match" in item]
            if any(set(item) - _PLAIN - set(_VERDICTS) for item in expr):
                continue
            some = all(self._covers(place, match, traffic, some=True) for match in matches)
            if some and any(verdict in item for item in expr for verdict in _VERDICTS):
                return str(rule.get("handle", 0))
            whole = all(self._covers(place, match, traffic) for match in matches)
            if whole and any("accept" in item for item in expr):
                return "accept"
            targets = [(item.get("jump") or item.get("goto") or {}).get("target") for item in expr]
            for target in filter(None, targets):
                inside = self._follow((place[0], place[1], target), traffic, depth + 1) if depth < _DEPTH else None
                if inside is not None and (whole or (some and inside != "accept")):
                    return inside
        return None

    def _covers(
        self, place: Tuple[str, str, str], match: Dict[str, Any], traffic: "_Traffic", *, some: bool = False
    ) -> bool:
        """Whether a match lets through every packet of the traffic, or, with `some`, any one; False for unknown ones."""
        left = match["left"]
        if match["op"] not in ("==", "in") or not isinstance(left, dict):
            return False
        values = self._values(place, match["right"])
        if "meta" in left:
            return traffic.passes_meta(left["meta"].get("key"), values)
        if "ct" in left:
            return left["ct"].get("key") == "state" and "new" in values
        return traffic.passes_payload(left.get("payload", {}), values, some=some)

    def _values(self, place: Tuple[str, str, str], right: Any) -> List[Any]:
        """The right side of a match as a list: one value, an unnamed set, or a named one."""
        if isinstance(right, str) and right.startswith("@"):
            return self.sets.get((place[0], place[1], right[1:]), [])
        if isinstance(right, dict) and "set" in right:
            return right["set"]
        return right if isinstance(right, list) else [right]


@dataclass(frozen=True)
class _Traffic:
    """One range of ports of an opening, in IPv4 (4) or IPv6 (6)."""

    opening: Opening
    ports: PortRange
    version: int

    def passes_meta(self, key: Optional[str], values: Sequence[Any]) -> bool:
        """Whether a match of an interface or a protocol lets all of it through."""
        if key in ("iifname", "iif"):
            return self.opening.interface is not None and self.opening.interface in values
        if key == "l4proto":
            return self.opening.proto in values
        return key == "nfproto" and f"ipv{self.version}" in values

    def passes_payload(self, payload: Dict[str, Any], values: Sequence[Any], *, some: bool = False) -> bool:
        """Whether a match of ports or source addresses lets all of it through, or, with `some`, a part."""
        protocol, field = payload.get("protocol"), payload.get("field")
        if field == "dport" and protocol in (self.opening.proto, "th"):
            if some:
                return any(low <= self.ports[1] and self.ports[0] <= high for low, high in map(_as_range, values))
            return any(low <= self.ports[0] and self.ports[1] <= high for low, high in map(_as_range, values))
        if field == "saddr" and protocol == {4: "ip", 6: "ip6"}[self.version]:
            # All of one family, which their types do not say.
            networks: List[Any] = [n for n in map(_as_network, values) if n is not None and n.version == self.version]
            if self.opening.sources is None:
                return some and bool(networks)
            inside = [
                any(source.overlaps(item) if some else source.subnet_of(item) for item in networks)
                for source in self.opening.of_family(self.version)
            ]
            return any(inside) if some else all(inside)
        return False


def _as_range(value: Any) -> PortRange:
    """A port or a range in libnftables' JSON; (1, 0), which covers nothing, for anything else."""
    if isinstance(value, int):
        return value, value
    if isinstance(value, dict) and "range" in value and all(isinstance(end, int) for end in value["range"]):
        return value["range"][0], value["range"][1]
    return 1, 0


def _as_network(value: Any) -> Optional[Network]:
    """An address or a prefix in libnftables' JSON; None for anything else (a host name, an interval)."""
    try:
        if isinstance(value, dict) and "prefix" in value:
            return ipaddress.ip_network(f"{value['prefix']['addr']}/{value['prefix']['len']}")
        return ipaddress.ip_network(str(value))
    except (ValueError, KeyError, TypeError):
        return None


def _obstacle(chain: Dict[str, Any], index: _Ruleset, handle: Optional[int], shut: Sequence[Opening]) -> Obstacle:
    where = f"{chain['family']} {chain['table']} {chain['name']}"
    names = ", ".join(
        dict.fromkeys(f"{item.name} ({item.proto} {', '.join(map(_port_text, item.ports))})" for item in shut)
    )
    why = "its policy is drop" if handle is None else f"its rule with handle {handle} drops"
    reason = f"{why}, and no plain rule before it accepts {names}"
    return Obstacle(where, reason, _remedy(chain, index, shut), handle, _tool(chain, index))


def _tool(chain: Dict[str, Any], index: _Ruleset) -> str:
    """Who made a chain."""
    if chain["table"] == "firewalld":
        return "firewalld"
    names = {item["name"] for item in index.chains if item["table"] == chain["table"]}
    return "ufw" if any(name.startswith(("ufw-", "ufw6-")) for name in names) else ""


def _remedy(chain: Dict[str, Any], index: _Ruleset, shut: Sequence[Opening]) -> str:
    """What opens it, in the words of the tool that made the chain."""
    tool = _tool(chain, index)
    if tool:
        return f"{tool} made it"
    first = shut[0]
    rule = f"{first.proto} dport {_port_set(first.ports)} accept"
    if first.sources:
        rule = f"{'ip' if first.sources[0].version == 4 else 'ip6'} saddr {first.sources[0]} {rule}"
    return f"accept it in the file that makes this chain, for instance: nft insert rule {chain['family']} {chain['table']} {chain['name']} {rule}"
