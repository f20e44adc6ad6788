#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Look at what a host has for serving models."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_facts
short_description: Look at what a host has for serving models
version_added: 0.1.0
description:
  - Everything that role vllm_service asks a host before it writes, in one go, since each task costs a round trip on every host.
  - Changes nothing.
author: The gpu_fleet authors (@gpu-fleet)
options:
  user: {description: Name of the user that servers run as., type: str, required: true}
  device_nodes:
    description:
      - Patterns of device nodes that servers open, such as V(/dev/nvidia*).
      - Where no node of an NVIDIA GPU is there yet, it is said what nvidia-modprobe would make, from C(/proc/driver/nvidia/params).
    type: list
    elements: str
    default: []
  models:
    description: Instance to path of its model, a folder or a file. What is not there weighs nothing.
    type: dict
    default: {}
  named: {description: 'Instances that the inventory names on this host.', type: list, elements: str, default: []}
  named_ray: {description: 'Instances whose Ray the inventory names on this host.', type: list, elements: str, default: []}
  root: {description: Folder of all instances., type: path, default: /etc/vllm}
  ray_root: {description: Folder of all clusters of Ray., type: path, default: /etc/ray}
  systemd:
    description: Folders of systemd's configuration.
    type: list
    elements: path
    default: [/etc/systemd, /run/systemd]
attributes:
  check_mode: {support: full, description: 'Looks in check mode, too: it changes nothing.'}
  diff_mode: {support: none, description: Changes nothing.}
"""

EXAMPLES = r"""
- name: Look at what is there
  gpu_fleet.vllm.serving_facts:
    user: vllm
    device_nodes: [/dev/nvidia*]
    models: {chat.0: /var/lib/vllm/models/chat}
    named: [chat.0]
  register: serving
"""

RETURN = r"""
driver: {description: Whether an NVIDIA driver is loaded., type: bool, returned: always}
user: {description: Whether the user is there., type: bool, returned: always}
groups:
  description: Groups that a server has to be in to open the device nodes; numbers where a group has no name.
  type: list
  elements: str
  returned: always
  sample: [video]
nodes:
  description: The device nodes that were found and what their access is.
  type: list
  elements: dict
  returned: always
  sample: [{path: /dev/nvidia0, mode: "0660", gid: 44}]
seconds: {description: Instance to the seconds that its start may take; see M(gpu_fleet.vllm.start_time)., type: dict, returned: always}
left_over: {description: Instances on the host that the inventory does not name., type: list, elements: str, returned: always}
left_over_ray: {description: Clusters of Ray that the inventory does not name., type: list, elements: str, returned: always}
drop_ins: {description: Drop-ins of units of vLLM that are not the collection's., type: list, elements: str, returned: always}
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import device_groups, serving_facts, start_time

DRIVER = "/proc/driver/nvidia/version"


def main():
    """Look and tell."""
    module = AnsibleModule(
        argument_spec={
            "user": {"type": "str", "required": True},
            "device_nodes": {"type": "list", "elements": "str", "default": []},
            "models": {"type": "dict", "default": {}},
            "named": {"type": "list", "elements": "str", "default": []},
            "named_ray": {"type": "list", "elements": "str", "default": []},
            "root": {"type": "path", "default": "/etc/vllm"},
            "ray_root": {"type": "path", "default": "/etc/ray"},
            "systemd": {"type": "list", "elements": "path", "default": ["/etc/systemd", "/run/systemd"]},
        },
        supports_check_mode=True,
    )
    p = module.params
    module.exit_json(
        changed=False,
        driver=os.path.exists(DRIVER),
        user=serving_facts.has_user(p["user"]),
        **device_groups.look(p["device_nodes"]),
        seconds=start_time.of_models(p["models"]),
        left_over=serving_facts.left_over(p["root"], p["named"]),
        left_over_ray=serving_facts.left_over(p["ray_root"], p["named_ray"]),
        drop_ins=serving_facts.drop_ins(p["systemd"]),
    )


if __name__ == "__main__":
    main()
