"""Filter from results to what a replica goes back to."""

from __future__ import annotations

from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils.later import Module

rollout = Module("rollout")

DOCUMENTATION = """
name: instance_returns
short_description: What M(gpu_fleet.vllm.instance) needs to bring back on one host what a replica ran before a change
description:
  - Taken from the results of M(gpu_fleet.vllm.generation) on all hosts, from before the change.
positional: instance, host
options:
  _input:
    description: Host to results of the loop over M(gpu_fleet.vllm.generation).
    type: dict
    required: true
  instance:
    description: Name of the instance.
    type: str
    required: true
  host:
    description: The host.
    type: str
    required: true
"""

EXAMPLES = """
- name: Show what would come back
  ansible.builtin.debug:
    msg: "{{ results | gpu_fleet.vllm.instance_returns('chat.0', inventory_hostname) }}"
"""

RETURN = """
_value:
  description: One dict with C(instance), C(generation), C(rank), C(hosts) and C(store_port), or nothing.
  type: list
  elements: dict
"""


class FilterModule:
    """Filters of this file."""

    def filters(self):
        return {"instance_returns": rollout.function("returns")}
