#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a host says about its interfaces, its TCP listeners and NCCL's own file."""

from __future__ import annotations

DOCUMENTATION = r"""
module: network_facts
short_description: Interfaces, RDMA ports, routes, TCP listeners and /etc/nccl.conf of a host, without judgement
version_added: 0.1.0
description:
  - Reads what role nccl judges on the controller. Changes nothing, returns no facts by itself.
  - Interfaces and routes are what C(ip) of iproute2 prints as JSON; RDMA ports what the kernel shows below
    /sys/class/infiniband (Documentation/ABI/stable/sysfs-class-infiniband of the kernel).
author: The gpu_fleet authors (@gpu-fleet)
options:
  user:
    description: A user whose id is wanted, too.
    type: str
  peers:
    description: Addresses whose route is wanted, too.
    type: list
    elements: str
    default: []
  sysctl_file:
    description: A file of sysctl.d(5) whose text is wanted, too.
    type: path
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
  description:
    - Every interface. C(running) is the kernel's IFF_RUNNING, which NCCL asks for. C(speed) is in Mb/s, null where the
      kernel knows none; C(kind) is null for hardware, C(lower) names what it stands on and C(master) what it is part of.
    - C(addresses) are in the kernel's order, with C(networks) beside them; C(unusable) says which of them cannot be used,
      and why.
  type: list
  elements: dict
  returned: success
  sample:
    - name: bond0
      kind: bond
      up: true
      running: true
      speed: 200000
      mtu: 9000
      master: null
      lower: [eth2, eth3]
      addresses: [10.0.0.1, "fe80::1"]
      networks: [10.0.0.1/24, "fe80::1/64"]
      unusable: {"fe80::1": tentative}
rdma:
  description: Every port of every RDMA device; C(rate) is in Gb/s, C(netdev) the interface of a RoCE port.
  type: list
  elements: dict
  returned: success
  sample: [{device: mlx5_0, port: 1, state: ACTIVE, phys_state: LinkUp, link_layer: InfiniBand, rate: 400.0, netdev: ib0}]
routes:
  description: For each peer how the kernel would reach it, C(dev), C(source) and C(via), or C(error).
  type: dict
  returned: success
  sample: {10.0.0.2: {dev: bond0, source: 10.0.0.1, via: null, error: null}}
listeners:
  description: TCP sockets that listen, with the user id, and process and systemd unit of the listener where they are known.
  type: list
  elements: dict
  returned: success
  sample: [{port: 22, uid: 0, address: 0.0.0.0, pid: 612, process: sshd, unit: ssh.service}]
user_uid:
  description: Id of the user; null when there is none.
  type: int
  returned: success
nccl_conf:
  description: Text of /etc/nccl.conf; null when there is none.
  type: str
  returned: success
nccl_conf_plain:
  description: Whether it is a plain file of root's that all may read, and no one else write.
  type: bool
  returned: success
reserved_ports:
  description: What net.ipv4.ip_local_reserved_ports says.
  type: str
  returned: success
sysctl_text:
  description: Text of sysctl_file; null when there is none.
  type: str
  returned: success
"""

import json
import pwd
import socket

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import host_files, network

NCCL_CONF = "/etc/nccl.conf"


def ip_json(module, *arguments):
    """What `ip -json ARGUMENTS` prints, parsed; the error's text where it fails."""
    ip = module.get_bin_path("ip", opt_dirs=["/usr/sbin", "/sbin"])
    if ip is None:
        module.fail_json(msg=f"{socket.gethostname()}: the command ip is missing; install the package iproute2")
    rc, out, err = module.run_command([ip, "-json", *arguments])
    return (json.loads(out or "[]"), None) if rc == 0 else ([], err.strip())


def interfaces(module):
    """`ip -json -details address`, reduced, with the speeds of sysfs."""
    found, error = ip_json(module, "-details", "address", "show")
    if error:
        module.fail_json(msg=f"{socket.gethostname()}: ip address show: {error}")
    return network.interfaces(found)


def routes(module, peers):
    """How the kernel would reach each peer, with what ip says where it would not."""
    found = {}
    for peer in peers:
        answer, error = ip_json(module, "route", "get", peer)
        found[peer] = network.route(answer, error)
    return found


def uid_of(name):
    """The user's id; None for a user that does not exist (yet)."""
    try:
        return pwd.getpwnam(name).pw_uid if name else None
    except KeyError:
        return None


def main():
    """Look, and return."""
    module = AnsibleModule(
        argument_spec={
            "user": {"type": "str"},
            "peers": {"type": "list", "elements": "str", "default": []},
            "sysctl_file": {"type": "path"},
        },
        supports_check_mode=True,
    )
    given = module.params
    conf = host_files.read(NCCL_CONF)
    module.exit_json(
        changed=False,
        interfaces=interfaces(module),
        rdma=network.rdma_ports(),
        routes=routes(module, given["peers"]),
        listeners=network.listeners(),
        user_uid=uid_of(given["user"]),
        nccl_conf=conf,
        nccl_conf_plain=conf is not None and host_files.wrong(NCCL_CONF, conf) is None,
        reserved_ports=(host_files.read("/proc/sys/net/ipv4/ip_local_reserved_ports") or "").strip(),
        sysctl_text=host_files.read(given["sysctl_file"]) if given["sysctl_file"] else None,
    )


if __name__ == "__main__":
    main()
