# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The SSH session that the present process came by: sshd puts SSH_CONNECTION into its environment (ssh(1), ENVIRONMENT).

sudo takes it away, so the ancestors' environments are looked at, too, as far as they can be read.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import os
from typing import NamedTuple, Optional


class Session(NamedTuple):
    """Who connected, and to which port of this host."""

    client: str
    port: int


def ssh_session(pid: Optional[int] = None, root: str = "/proc") -> Optional[Session]:
    """The session of a process, by default this one; None without SSH, or when nothing can be read."""
    current = os.getpid() if pid is None else pid
    while current > 1:
        try:
            with open(f"{root}/{current}/environ", "rb") as handle:
                for item in handle.read().split(b"\0"):
                    if item.startswith(b"SSH_CONNECTION="):
                        client, _client_port, _server, port = item.partition(b"=")[2].decode().split()
                        return Session(client, int(port))
            with open(f"{root}/{current}/stat", encoding="utf-8", errors="replace") as handle:
                current = int(handle.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return None
    return None
