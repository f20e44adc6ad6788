#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Real connections between hosts: listen for a moment, connect, stop listening."""

from __future__ import annotations

DOCUMENTATION = r"""
module: reach
short_description: Listen for a moment on one host, and connect to it from others
version_added: 0.1.0
description:
  - Whether traffic passes between hosts is shown by a connection, not by reading rules. With O(state=listening) the host listens on
    some ports for a limited time, in a process that ends by itself; with O(state=connected) another host connects to them,
    and sends and takes 256 KiB, so that a path with too small an MTU shows; with O(state=stopped) the listener ends.
  - A port on which somebody listens already is left alone, and nothing is sent to it.
  - Nothing on the host is changed.
author: The gpu_fleet authors (@gpu-fleet)
options:
  state:
    description: What to do.
    type: str
    choices: [listening, connected, stopped]
    required: true
  name:
    description: Name with which the listener greets.
    type: str
  address:
    description: The host's own address, to listen on and to connect from. Without it connections come from whichever.
    type: str
  ports:
    description: Ports to listen on.
    type: list
    elements: int
    default: []
  targets:
    description: Where to connect to. C(ours) says that a listener of this module is there, which may be sent something.
    type: list
    elements: dict
    default: []
    suboptions: &target
      host: {description: Name of the host., type: str, required: true}
      address: {description: Its address., type: str, required: true}
      port: {description: Its port., type: int, required: true}
      ours: {description: Whether a listener of this module is there., type: bool, default: false}
  strange:
    description:
      - As O(targets), with O(state=connected). Where the controller connects to itself meanwhile, as a stranger, for 1.5 s at most; a
        listener gets nothing but the connection. Left out where the module runs without its part on the controller.
    type: list
    elements: dict
    default: []
    suboptions: *target
  bulk:
    description: Whether to send and take 256 KiB.
    type: bool
    default: true
  seconds:
    description: How long to listen, or to wait for each connection.
    type: float
    default: 3
attributes:
  check_mode: {support: full, description: Does the same; nothing is changed.}
  diff_mode: {support: none, description: Changes nothing.}
"""

EXAMPLES = r"""
- name: Listen for a minute
  gpu_fleet.vllm.reach:
    state: listening
    name: gpu-01
    address: 10.0.0.1
    ports: [8001, 40000]
    seconds: 60
"""

RETURN = r"""
address: {description: The address that is listened on., type: str, returned: with O(state=listening)}
ours: {description: Ports that are listened on now., type: list, elements: int, returned: with O(state=listening)}
taken: {description: Ports on which somebody else listens., type: list, elements: int, returned: with O(state=listening)}
strange: {description: 'As RV(results), of O(strange).', type: list, elements: dict, returned: with O(state=connected)}
results:
  description: The targets with what came of each.
  type: list
  elements: dict
  returned: with O(state=connected)
  sample:
    - host: gpu-02
      address: 10.0.0.2
      port: 8001
      ours: true
      outcome: connected
      name: gpu-02
      seen: 10.0.0.1
      error: null
"""

import socket

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import reach

PID_FILE = "/run/gpu_fleet/reach.pid"


def listen(module):
    """Listen on the free ones of the ports, after an earlier listener of this module has ended."""
    given = module.params
    reach.stop(PID_FILE)
    try:
        sockets, taken = reach.bind(given["address"], given["ports"])
    except OSError as error:
        module.fail_json(
            msg=f"{socket.gethostname()}: cannot listen on {given['address']}: {error.strerror}. Is it an address of this host?"
        )
    ours = [item.getsockname()[1] for item in sockets]
    if sockets:
        reach.detach(sockets, given["name"] or socket.gethostname(), given["seconds"], PID_FILE)
    return {"address": given["address"], "ours": ours, "taken": taken}


def main():
    """Do one of the three."""
    target = {
        "host": {"type": "str", "required": True},
        "address": {"type": "str", "required": True},
        "port": {"type": "int", "required": True},
        "ours": {"type": "bool", "default": False},
    }
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["listening", "connected", "stopped"], "required": True},
            "name": {"type": "str"},
            "address": {"type": "str"},
            "ports": {"type": "list", "elements": "int", "default": []},
            "targets": {"type": "list", "elements": "dict", "default": [], "options": target},
            "strange": {"type": "list", "elements": "dict", "default": [], "options": target},
            "bulk": {"type": "bool", "default": True},
            "seconds": {"type": "float", "default": 3},
        },
        required_if=[("state", "listening", ("address", "ports"))],
        supports_check_mode=True,
    )
    given = module.params
    if given["state"] == "listening":
        result = listen(module)
    elif given["state"] == "connected":
        result = {"results": reach.connect_all(given["targets"], given["address"], given["seconds"], given["bulk"])}
    else:
        result = {"ended": reach.stop(PID_FILE)}
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
