"""Keep what HAProxy knows of its servers, drained or not, up or not, for the process that comes next.

As a program, in the gateway's unit: gateway_state.py SOCKET FILE. Standard library only, Python 3.9.
"""

from __future__ import annotations

import os
import socket
import sys


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
    with open(f"{file}.new", "w", encoding="utf-8") as out:
        os.fchmod(out.fileno(), 0o644)
        out.write(said)
    os.replace(f"{file}.new", file)


if __name__ == "__main__":
    try:
        keep(sys.argv[1], sys.argv[2])
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error}")
