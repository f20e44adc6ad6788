#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a host says about its interfaces, its TCP listeners and NCCL's own file."""

from __future__ import annotations

DOCUMENTATION = r"""
module: network_facts
short_description: Interfaces, TCP listeners and /etc/nccl.conf of a host, without judgement
version_added: 0.1.0
description:
  - Reads what role nccl judges on the controller. Changes nothing, returns no facts by itself.
author: The gpu_fleet authors (@gpu-fleet)
options:
  user:
    description: A user whose id is wanted, too.
    type: str
requirements: [ip]
attributes:
  check_mode: {support: full, description: Only looks.}
  diff_mode: {support: none, description: Changes nothing.}
"""

EXAMPLES = r"""
- name: Ask the host about its network
  gpu_fleet.vllm.network_facts:
    user: vllm
  register: network
"""

RETURN = r"""
interfaces:
  description: Every interface; C(running) is the kernel's IFF_RUNNING, which NCCL asks for.
  type: list
  elements: dict
  returned: success
  sample: [{name: eth0, up: true, running: true, mtu: 1500, addresses: [10.0.0.1, "fe80::1"]}]
listeners:
  description: TCP ports somebody listens on, with the user id of the listener.
  type: list
  elements: dict
  returned: success
  sample: [{port: 22, uid: 0}]
user_uid:
  description: Id of the user; null when there is none.
  type: int
  returned: success
nccl_conf:
  description: Text of /etc/nccl.conf; null when there is none.
  type: str
  returned: success
"""

import json
import pwd
import socket

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import host_files

LISTEN = "0A"  # TCP_LISTEN of include/net/tcp_states.h, as /proc/net/tcp prints it


def interfaces(module):
    """`ip -json address`, reduced. operstate UNKNOWN is what loopback and tunnels have while they work."""
    ip = module.get_bin_path("ip", opt_dirs=["/usr/sbin", "/sbin"])
    if ip is None:
        module.fail_json(msg=f"{socket.gethostname()}: the command ip is missing; install the package iproute2")
    out = module.run_command([ip, "-json", "address", "show"], check_rc=True)[1]
    return [
        {
            "name": item["ifname"],
            "up": "UP" in item["flags"],
            "running": item.get("operstate") in ("UP", "UNKNOWN"),
            "mtu": item.get("mtu"),
            "addresses": [address["local"] for address in item.get("addr_info", []) if "local" in address],
        }
        for item in json.loads(out)
        if "ifname" in item
    ]


def listeners():
    """Lines of /proc/net/tcp and tcp6 in state LISTEN (proc_pid_net(5)): port in hex after the last colon, uid."""
    found = set()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (host_files.read(path) or "").splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN:
                found.add((int(fields[1].rsplit(":", 1)[1], 16), int(fields[7])))
    return [{"port": port, "uid": uid} for port, uid in sorted(found)]


def uid_of(name):
    """The user's id; None for a user that does not exist (yet)."""
    try:
        return pwd.getpwnam(name).pw_uid if name else None
    except KeyError:
        return None


def main():
    """Look, and return."""
    module = AnsibleModule(argument_spec={"user": {"type": "str"}}, supports_check_mode=True)
    module.exit_json(
        changed=False,
        interfaces=interfaces(module),
        listeners=listeners(),
        user_uid=uid_of(module.params["user"]),
        nccl_conf=host_files.read("/etc/nccl.conf"),
    )


if __name__ == "__main__":
    main()
