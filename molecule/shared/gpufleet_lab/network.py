"""The lab's network: a bridge, a /24 nobody uses, NAT, and a count of every packet that leaves the lab."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable
from pathlib import Path

from . import machine
from .errors import LabError, UsageError
from .names import STATE_ROOT, LabNames
from .shell import run, works
from .state import Lab, readable

IP_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
REMEMBERED = STATE_ROOT / "ip_forward"
# Candidates, all private: first the part of 10/8 that site networks rarely use, then 172.16/12.
CANDIDATES = (
    ipaddress.IPv4Network("10.213.0.0/16"),
    ipaddress.IPv4Network("10.87.0.0/16"),
    ipaddress.IPv4Network("172.27.0.0/16"),
)


# -- choosing ---------------------------------------------------------------------------------------------------------


def networks_in_use() -> list[ipaddress.IPv4Network]:
    """Networks this machine routes to or has an address in, and the addresses of its resolvers."""
    used = []
    for route in json.loads(run(["ip", "-j", "-4", "route", "show", "table", "all"]) or "[]"):
        if route.get("dst", "default") != "default":
            used.append(ipaddress.IPv4Network(route["dst"], strict=False))
    for link in json.loads(run(["ip", "-j", "-4", "address"]) or "[]"):
        used += [
            ipaddress.IPv4Network(f"{a['local']}/{a['prefixlen']}", strict=False)
            for a in link.get("addr_info", [])
            if "local" in a
        ]
    for line in machine.resolv_conf().splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == "nameserver" and "." in words[1]:
            used.append(ipaddress.IPv4Network(words[1]))
    return used


def choose(tag: str, used: Iterable[ipaddress.IPv4Network]) -> ipaddress.IPv4Network:
    """A free /24. The search starts at a place that depends on the lab, so that a lab tends to get the same one again."""
    used = list(used)
    for candidate in CANDIDATES:
        subnets = list(candidate.subnets(new_prefix=24))
        start = int(tag, 16) % len(subnets)
        for subnet in (*subnets[start:], *subnets[:start]):
            if not any(subnet.overlaps(other) for other in used):
                return subnet
    raise LabError(
        "no free /24 is left in " + ", ".join(map(str, CANDIDATES)) + "; `lab.py list` shows the labs of this machine"
    )


# -- bridge -----------------------------------------------------------------------------------------------------------


def ensure_bridge(lab: Lab) -> None:
    bridge, address = lab.names.bridge, f"{lab.gateway}/{lab.network.prefixlen}"
    if not Path(f"/sys/class/net/{bridge}").exists():
        try:
            run(
                [
                    "ip",
                    "link",
                    "add",
                    bridge,
                    "address",
                    lab.names.bridge_address,
                    "mtu",
                    str(machine.uplink_mtu()),
                    "type",
                    "bridge",
                    "forward_delay",
                    "0",
                    "stp_state",
                    "0",
                ]
            )
        except LabError as error:
            raise UsageError(f"this machine lets no bridge be made, which a lab needs: {error}") from error
    run(["ip", "address", "replace", address, "dev", bridge])
    run(["ip", "link", "set", bridge, "up"])


# -- packet filter ----------------------------------------------------------------------------------------------------


def ruleset(lab: Lab) -> str:
    """The lab's own nftables table.

    `beyond` counts, before anything is routed, translated or dropped, what a host sends to an address that is not in
    the lab: one counter a host, and the set `targets` remembers where it went. Multicast and broadcast stay on the
    bridge and are not counted. Only addresses of the lab are translated.
    """
    names, bridge, subnet = lab.names, lab.names.bridge, lab.network
    counters = "".join(f"  counter beyond_{number} {{ }}\n" for number in range(len(lab.hosts) + 1))
    counted = "".join(
        f"    ip saddr {lab.address(host)} counter name beyond_{number + 1}\n" for number, host in enumerate(lab.hosts)
    )
    nat = f"    ip saddr {subnet} ip daddr != {subnet} masquerade\n" if lab.nat else ""
    forward = "" if lab.nat else f'    iifname "{bridge}" oifname != "{bridge}" drop\n'
    return f"""table inet {names.table} {{
  set targets {{ type ipv4_addr . ipv4_addr . inet_proto . inet_service; size 4096; flags dynamic; }}
{counters}
  chain beyond {{
    type filter hook prerouting priority raw; policy accept;
    iifname != "{bridge}" accept
    meta nfproto ipv6 fib daddr type {{ multicast, local }} accept
    meta nfproto ipv6 ip6 daddr fe80::/10 accept
    ip daddr {{ {subnet}, 224.0.0.0/4, 255.255.255.255 }} accept
    counter name beyond_0
    meta l4proto {{ tcp, udp }} add @targets {{ ip saddr . ip daddr . meta l4proto . th dport }}
{counted}  }}
  chain forward {{
    type filter hook forward priority filter; policy accept;
{forward}  }}
  chain outbound {{
    type nat hook postrouting priority srcnat; policy accept;
{nat}  }}
}}
"""


def ensure_rules(lab: Lab, say) -> None:
    if not works(["nft", "list", "table", "inet", lab.names.table]):
        run(["nft", "-f", "-"], stdin=ruleset(lab), doing="loading the lab's packet filter")
    if lab.nat:
        _pass_foreign_chains(lab, say)


def _foreign_forward_drops() -> list[tuple[str, str, str]]:
    """Forward chains of others that drop by policy (Docker's, a firewall's): our accept would not undo their drop."""
    rules = json.loads(run(["nft", "-j", "list", "chains"]))["nftables"]
    chains = [item["chain"] for item in rules if "chain" in item]
    return [
        (chain["family"], chain["table"], chain["name"])
        for chain in chains
        if chain.get("hook") == "forward"
        and chain.get("policy") == "drop"
        and not chain["table"].startswith("gpufleet_")
    ]


def _pass_foreign_chains(lab: Lab, say) -> None:
    comment = lab.names.table
    for family, table, chain in _foreign_forward_drops():
        if comment in run(["nft", "list", "chain", family, table, chain]):
            continue
        say(
            f"the chain {family} {table} {chain} drops what is forwarded: a rule in it lets this lab pass until it is removed"
        )
        for side in ("iifname", "oifname"):
            rule = f'insert rule {family} {table} {chain} {side} "{lab.names.bridge}" accept comment "{comment}"'
            run(["nft", "-f", "-"], stdin=rule + "\n")


def _foreign_rules(names: LabNames) -> list[tuple[str, str, str, str]]:
    rules = [item["rule"] for item in json.loads(run(["nft", "-j", "list", "ruleset"]))["nftables"] if "rule" in item]
    return [(r["family"], r["table"], r["chain"], str(r["handle"])) for r in rules if r.get("comment") == names.table]


# -- ip_forward -------------------------------------------------------------------------------------------------------


def ensure_forwarding() -> None:
    """Switch forwarding on, having remembered how it was. The caller holds the machine's lock."""
    if IP_FORWARD.read_text(encoding="ascii").strip() == "1":
        return
    REMEMBERED.write_text(IP_FORWARD.read_text(encoding="ascii"), encoding="ascii")
    IP_FORWARD.write_text("1\n", encoding="ascii")


def restore_forwarding() -> None:
    """Set ip_forward back when no lab is left that needs it. The caller holds the machine's lock."""
    if REMEMBERED.exists() and not any(lab.nat for lab in readable()):
        IP_FORWARD.write_text(REMEMBERED.read_text(encoding="ascii"), encoding="ascii")
        REMEMBERED.unlink()


# -- counters ---------------------------------------------------------------------------------------------------------


def counters(lab: Lab, reset: bool = False) -> dict:
    """Packets and bytes sent beyond the lab since it came up or was last reset, in all and by host, and where to."""
    table = lab.names.table
    found = json.loads(
        run(["nft", "-j", "list", "table", "inet", table], doing=f"reading the counters of lab {lab.name}")
    )["nftables"]
    by_name = {item["counter"]["name"]: item["counter"] for item in found if "counter" in item}
    targets = next((item["set"].get("elem", []) for item in found if "set" in item), [])
    if reset:
        run(["nft", "reset", "counters", "table", "inet", table])
        run(["nft", "flush", "set", "inet", table, "targets"])

    def count(number: int) -> dict[str, int]:
        return {"packets": by_name[f"beyond_{number}"]["packets"], "bytes": by_name[f"beyond_{number}"]["bytes"]}

    fields = ("from", "to", "protocol", "port")
    return {
        **count(0),
        "hosts": {host: count(number + 1) for number, host in enumerate(lab.hosts)},
        "targets": [dict(zip(fields, element["concat"], strict=True)) for element in map(_element, targets)],
    }


def _element(element: dict) -> dict:
    """An element of a set, with or without what nft adds to it (a counter, an expiry)."""
    return element["elem"]["val"] if "elem" in element else element


# -- removal ----------------------------------------------------------------------------------------------------------


def remove(names: LabNames) -> None:
    """Take the packet filter and the bridge away, as far as they exist."""
    for family, table, chain, handle in _foreign_rules(names):
        run(["nft", "delete", "rule", family, table, chain, "handle", handle])
    if works(["nft", "list", "table", "inet", names.table]):
        run(["nft", "delete", "table", "inet", names.table])
    if Path(f"/sys/class/net/{names.bridge}").exists():
        run(["ip", "link", "delete", names.bridge])
