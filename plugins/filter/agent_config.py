"""Filter from an instance to what its agent is told."""

from __future__ import annotations

from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils.later import Module

agent_config = Module("agent_config")

DOCUMENTATION = """
name: agent_config
short_description: What the agent of a rank is told
description:
  - Taken from an entry of C(fleet_plan.hosts[HOST].instances).
positional: plan, host, settings
options:
  _input:
    description: The instance on this host.
    type: dict
    required: true
  plan:
    description: The whole plan, C(fleet_plan).
    type: dict
    required: true
  host:
    description: Name of the host in the inventory.
    type: str
    required: true
  settings:
    description: The variables C(vllm_service_agent_*), without that prefix.
    type: dict
    required: true
"""

EXAMPLES = """
- name: Show what the agents of a host are told
  ansible.builtin.debug:
    msg: "{{ item | gpu_fleet.vllm.agent_config(fleet_plan, inventory_hostname, settings) }}"
  loop: "{{ fleet_plan.hosts[inventory_hostname].instances }}"
"""

RETURN = """
_value:
  description: The configuration, as C(/etc/vllm/INSTANCE/agent.json) has it.
  type: dict
"""


class FilterModule:
    """Filters of this file."""

    def filters(self):
        return {"agent_config": agent_config.function("agent_config")}
