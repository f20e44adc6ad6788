"""Keep what HAProxy knows of its servers, drained or not, up or not, for the process that comes next.

As a program, in the gateway's unit: gateway_state.py SOCKET FILE CONFIGURATION; with - for SOCKET what was kept before is only made to
fit. Standard library only, Python 3.9.
"""

from __future__ import annotations

import os
import re
import socket
import sys

# A server of haproxy.cfg: name, address (of IPv6 in brackets), port, and where it is given the port of its check.
SERVER = re.compile(r"\s+server (\S+) (\S+):(\d+)(?=\s|$)(?:.* check .*?\bport (\d+))?")


def shown(path: str, command: str) -> str:
    """The answer of a runtime socket to one command. Raises OSError where nobody listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(10)
        link.connect(path)
        link.sendall(command.encode() + b"\n")
        said = b""
        while True:
            part = link.recv(65536)
            if not part:
                return said.decode("utf-8", "replace")
            said += part


def keep(path: str, file: str) -> None:
    """Write `show servers state` where server-state-file says, whole. Raises OSError."""
    said = shown(path, "show servers state")
    if not said.strip():
        return
    _write(file, said)


def _write(file: str, text: str) -> None:
    with open(f"{file}.new", "w", encoding="utf-8") as out:
        os.fchmod(out.fileno(), 0o644)
        out.write(text)
    os.replace(f"{file}.new", file)


def fitted(state: str, configuration: str) -> str:
    """The state with the ports of a configuration: of one that moved HAProxy takes the new address, and its ports from the state.

    Columns by their names in `show servers state` (management.txt, 2.6 and 3.0).
    """
    ports, backend = {}, ""
    for line in configuration.splitlines():
        section = re.match(r"(\w+)(?:\s+(\S+))?", line)
        server = SERVER.match(line)
        if section:
            backend = section[2] if section[1] == "backend" else ""
        elif server and backend:
            ports[backend, server[1]] = (server[3], server[4])
    at, out = {}, []
    for line in state.splitlines():
        fields = line.split(" ")
        if line.startswith("# "):
            at = {name: number for number, name in enumerate(fields[1:])}
        elif at and len(fields) == len(at):
            port, check = ports.get((fields[at["be_name"]], fields[at["srv_name"]]), ("", ""))
            fields[at["srv_port"]] = port or fields[at["srv_port"]]
            for name in ("srv_check_port", "srv_agent_port"):
                fields[at[name]] = check or fields[at[name]]
        out.append(" ".join(fields))
    return "\n".join(out) + "\n"


def fit(file: str, configuration: str) -> None:
    """Have what was kept fit the configuration that is loaded next. Raises OSError, but not where nothing was kept."""
    try:
        with open(file, encoding="utf-8") as kept:
            state = kept.read()
    except FileNotFoundError:
        return
    with open(configuration, encoding="utf-8") as wanted:
        right = fitted(state, wanted.read())
    if right != state:
        _write(file, right)


if __name__ == "__main__":
    try:
        if sys.argv[1] != "-":
            keep(sys.argv[1], sys.argv[2])
        fit(sys.argv[2], sys.argv[3])
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error}")
