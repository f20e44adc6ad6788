"""Filter from results to starts."""

from __future__ import annotations

from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils.later import Module

rollout = Module("rollout")

DOCUMENTATION = """
name: instance_starts
short_description: What M(gpu_fleet.vllm.instance) needs to start instances on one host
description:
  - Taken from the results of M(gpu_fleet.vllm.generation) on that host.
positional: instances
options:
  _input:
    description: Results of the loop over M(gpu_fleet.vllm.generation).
    type: list
    elements: dict
    required: true
  instances:
    description: Names of the instances to start.
    type: list
    elements: str
    required: true
"""

EXAMPLES = """
- name: Show what would be started
  ansible.builtin.debug:
    msg: "{{ generations.results | gpu_fleet.vllm.instance_starts(['chat.0']) }}"
"""

RETURN = """
_value:
  description: One dict an instance, with C(instance), C(generation), C(rank), C(hosts) and C(store_port).
  type: list
  elements: dict
"""


class FilterModule:
    def filters(self):
        return {"instance_starts": rollout.function("starts")}
