"""Filter over gpu_fleet.vllm's rollout rules."""

from __future__ import annotations

from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils.later import Module

rollout = Module("rollout")

DOCUMENTATION = """
name: replica_actions
short_description: Which replicas to start or restart, and what must not be done
description:
  - Judges the results of M(gpu_fleet.vllm.generation) of all hosts of a run by the plan.
positional: results, allow_outage, started
options:
  _input:
    description: The fact C(fleet_plan).
    type: dict
    required: true
  results:
    description: Host to its list of results.
    type: dict
    required: true
  allow_outage:
    description: Whether a replica may be restarted while no other one of its service serves.
    type: bool
    default: false
  started:
    description: Instances that this run has started already.
    type: list
    elements: str
    default: []
"""

EXAMPLES = """
- name: Decide
  ansible.builtin.set_fact:
    actions: "{{ fleet_plan | gpu_fleet.vllm.replica_actions(results) }}"
"""

RETURN = """
_value:
  description: Lists C(start), C(restart) and C(refuse).
  type: dict
"""


class FilterModule:
    def filters(self):
        return {"replica_actions": rollout.function("actions")}
