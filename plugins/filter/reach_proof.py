"""Filters around real connections between hosts: what to prove, and what came of it."""

from __future__ import annotations

from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils.later import Module

reach = Module("reach")

DOCUMENTATION = """
name: reach_proof
short_description: Ports of ranks to listen on at a host, and those of its peers to connect to
description:
  - Takes the plan of the fleet. The result is what role firewall proves with P(gpu_fleet.vllm.reach#module).
positional: host
options:
  _input:
    description: The fact C(fleet_plan).
    type: dict
    required: true
  host:
    description: Name of the host.
    type: str
    required: true
"""

EXAMPLES = """
- name: See what is to be proved
  ansible.builtin.debug:
    msg: "{{ fleet_plan | gpu_fleet.vllm.reach_proof(inventory_hostname) }}"
"""

RETURN = """
_value:
  description: C(ports), a list of numbers, and C(targets), a list of host, address and port.
  type: dict
"""


def reach_targets(targets, listening):
    """Targets with `ours`: whether a listener of the module's is there. listening {host: its ports}."""
    return [{**item, "ours": item["port"] in (listening.get(item["host"]) or [])} for item in targets]


class FilterModule:
    """Filters of this file."""

    def filters(self):
        return {"reach_proof": reach.function("proof"), "reach_targets": reach_targets}
