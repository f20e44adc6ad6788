# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Ports of a host that are not the fleet's, as the inventory alone shows them, and what collides with them.

SSH, what data/ports.yml knows to listen on hosts of a group, and fixed ports that the user names: a replica's block must not
cover them, and the range that the kernel hands out only where they are reserved. And openings that the user adds: none may
let anybody in to the ports of ranks, which have no authentication.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .findings import Finding
from .nftables import PortRange, parse_ports


@dataclass(frozen=True)
class Others:
    """What else is on a host.

    listens   (port, who listens there), such as (22, "SSH")
    fixed     those of them that the user named (nccl_fixed_ports)
    reserved  nccl_reserved_ports, which the kernel hands out to nobody
    openings  (name, ports) of the user's own openings that let somebody in
    """

    listens: Tuple[Tuple[int, str], ...] = ()
    fixed: FrozenSet[int] = frozenset()
    reserved: Tuple[PortRange, ...] = ()
    openings: Tuple[Tuple[str, Tuple[PortRange, ...]], ...] = ()


NOTHING = Others()


class Block(NamedTuple):
    """The ports of a replica on a host: the key of the service that moves them, and those that only ranks may reach."""

    where: str
    instance: str
    key: str
    ports: range
    ranks: Tuple[PortRange, ...]


def spans(items: Any) -> Tuple[PortRange, ...]:
    """Ports of a variable as ranges; what is none is told where types are, and left out here."""
    try:
        return parse_ports(items if isinstance(items, list) else [])
    except ValueError:
        return ()


def known_listeners(groups: Iterable[str], layout: Mapping[str, Any]) -> List[Tuple[int, str]]:
    """Who listens by default on a host of these groups (`known` of data/ports.yml)."""
    inside = set(groups)
    return [(item["port"], item["what"]) for item in layout.get("known", []) if inside & set(item["groups"])]


def findings(host: str, others: Others, kernel: PortRange, blocks: Sequence[Block]) -> List[Finding]:
    """All that collides on one host. `kernel` is the range that it hands out."""
    found = []
    for port, who in others.listens:
        for block in blocks:
            if port in block.ports:
                message = f"ports {block.ports[0]} to {block.ports[-1]} of {block.instance} cover {port} of {host}, where {who} listens"
                found.append(Finding("port-known", block.where, message, f"Choose a {block.key} that leaves it out"))
        if kernel[0] <= port <= kernel[1] and not _holds(others.reserved, (port, port)):
            message = f"nccl_port_range {kernel[0]}-{kernel[1]} covers {port}, where {who} listens"
            fix = f"Add {port} to nccl_reserved_ports, so that the kernel hands it out to nobody"
            found.append(Finding("port-known", f"host {host}", message, fix))
    for name, ports in others.openings:
        fault = _opening_fault(ports, others, kernel, blocks)
        if fault:
            fix = "Take it out of firewall_openings. For the API of a service there is its key `clients`"
            found.append(Finding("opening-of-ranks", f"host {host}: firewall_openings, {name}", fault, fix))
    return found


def _opening_fault(
    ports: Iterable[PortRange], others: Others, kernel: PortRange, blocks: Iterable[Block]
) -> Optional[str]:
    guarded = [(span, f"ranks of {block.instance}") for block in blocks for span in block.ranks]
    for span in ports:
        for ranks, who in guarded:
            if _meet(span, ranks):
                return f"port {_text(span)} would be open to others than the {who}: whoever reaches it can run code in the server"
        if _meet(span, kernel) and blocks and not _holds(others.reserved, span):
            return (
                f"port {_text(span)} lies in nccl_port_range {_text(kernel)}, where ranks listen: whoever reaches them can run code in the "
                "server. A fixed port of yours has to be in nccl_reserved_ports, too"
            )
    return None


def _meet(one: PortRange, other: PortRange) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def _holds(ranges: Iterable[PortRange], span: PortRange) -> bool:
    return any(low <= span[0] and span[1] <= high for low, high in ranges)


def _text(span: PortRange) -> str:
    return str(span[0]) if span[0] == span[1] else f"{span[0]}-{span[1]}"
