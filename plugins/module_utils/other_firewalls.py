# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The fleet's openings in the words of ufw and firewalld, where one of them keeps the host's firewall.

Only added to, never taken from: what the tools hold is the operator's. A rule that the fleet no longer needs stays there
until somebody removes it; the fleet's own table keeps strangers out of the ports that it opens meanwhile.

ufw: ufw(8) 0.36, whose `ufw show added` prints the rules as they would be typed. firewalld: firewall-cmd(1) and
firewalld.richlanguage(5) of 1.3.

Pure: standard library, Python 3.9 and newer, no Ansible import. What runs commands is given: run(argv) -> (rc, output).
"""

from __future__ import annotations

import shlex
from typing import Callable, FrozenSet, List, Optional, Sequence, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils.nftables import Opening, PortRange

Run = Callable[[Sequence[str]], Tuple[int, str]]
TOOLS = ("ufw", "firewalld")
_MULTIPORT = 15  # ports of one ufw rule, a range counts twice (iptables-extensions(8), multiport)


class ToolError(RuntimeError):
    """A tool refused; the message has the command and what it said."""


def missing(tool: str, openings: Sequence[Opening], run: Run) -> List[List[str]]:
    """Commands that would open there what is not open yet, in order. Raises ToolError when the tool cannot be asked."""
    return _ufw_missing(openings, run) if tool == "ufw" else _firewalld_missing(openings, run)


def shown(command: Sequence[str]) -> str:
    """A command as it is typed."""
    return " ".join(map(shlex.quote, command))


def _asked(run: Run, *command: str) -> str:
    code, output = run(command)
    if code:
        raise ToolError(f"{shown(command)}: {output.strip()}")
    return output


def _families(opening: Opening) -> List[Optional[str]]:
    """Its sources as text; [None] for anybody."""
    if opening.sources is None:
        return [None]
    return [str(item.network_address) if item.num_addresses == 1 else str(item) for item in opening.sources]


# --- ufw --------------------------------------------------------------------------------------------------------


def ufw_commands(opening: Opening) -> List[List[str]]:
    """One rule for each source and up to fifteen ports."""
    commands = []
    for ports in _chunks(opening.ports):
        for source in _families(opening):
            where = ["in", "on", opening.interface] if opening.interface else []
            text = ",".join(str(low) if low == high else f"{low}:{high}" for low, high in ports)
            commands.append(
                [
                    *("ufw", "allow", *where, "proto", opening.proto, "from", source or "any"),
                    *("to", "any", "port", text, "comment", f"gpu_fleet {opening.name}"),
                ]
            )
    return commands


def _chunks(ports: Sequence[PortRange]) -> List[List[PortRange]]:
    chunks: List[List[PortRange]] = [[]]
    used = 0
    for span in ports:
        size = 1 if span[0] == span[1] else 2
        if used + size > _MULTIPORT:
            chunks.append([])
            used = 0
        chunks[-1].append(span)
        used += size
    return chunks


def _ufw_missing(openings: Sequence[Opening], run: Run) -> List[List[str]]:
    there = {_ufw_words(line) for line in _asked(run, "ufw", "show", "added").splitlines() if line.startswith("ufw ")}
    wanted = [command for opening in openings for command in ufw_commands(opening)]
    return [command for command in wanted if _ufw_words(shown(command)) not in there]


def _ufw_words(line: str) -> FrozenSet[Tuple[str, str]]:
    """A rule without its comment, whatever the order of its clauses. From anybody, ufw prints `allow 8000/tcp`."""
    words = shlex.split(line)[1:]
    action, rest = words[0] if words else "", words[1:]
    if rest[:2] == ["in", "on"]:
        rest = ["in-on", *rest[2:]]
    elif rest and rest[0].endswith(("/tcp", "/udp")):
        port, _, proto = rest[0].rpartition("/")
        rest = ["to", "any", "port", port, "proto", proto, *rest[1:]]
    pairs = {(rest[number], rest[number + 1]) for number in range(0, len(rest) - 1, 2)}
    # Printed only where it says something: `from any` with a port is left out, `to any` is kept.
    return frozenset({("", action)} | {pair for pair in pairs if pair[0] != "comment" and pair != ("from", "any")})


# --- firewalld --------------------------------------------------------------------------------------------------


def rich_rules(opening: Opening) -> List[str]:
    """One rich rule for each source and range of ports."""
    rules = []
    for source in _families(opening):
        family = f' family="ipv{6 if ":" in source else 4}" source address="{source}"' if source else ""
        for low, high in opening.ports:
            text = str(low) if low == high else f"{low}-{high}"
            rules.append(f'rule{family} port port="{text}" protocol="{opening.proto}" accept')
    return rules


def _firewalld_missing(openings: Sequence[Opening], run: Run) -> List[List[str]]:
    """In the zone of the opening's interface, else the default one; now and at the next start, without a reload."""
    commands = []
    for opening in openings:
        zone = _zone(opening, run)
        for rule in rich_rules(opening):
            for permanent in ([], ["--permanent"]):
                if run(["firewall-cmd", *permanent, f"--zone={zone}", f"--query-rich-rule={rule}"])[0]:
                    commands.append(["firewall-cmd", *permanent, f"--zone={zone}", f"--add-rich-rule={rule}"])
    return commands


def _zone(opening: Opening, run: Run) -> str:
    default = _asked(run, "firewall-cmd", "--get-default-zone").strip()
    if opening.interface:
        code, output = run(["firewall-cmd", f"--get-zone-of-interface={opening.interface}"])
        return output.strip() if code == 0 and output.strip() else default  # "no zone": the default one takes it
    return default
