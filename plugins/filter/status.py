"""Filters that say what is asked for the state of the fleet."""

from __future__ import annotations

from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils.later import Module

status = Module("status")

DOCUMENTATION = """
name: status_pages
short_description: Pages of metrics of the servers and agents of a host
description:
  - The result goes to P(gpu_fleet.vllm.metrics#module) as C(pages).
  - C(status_queries), of the same file, gives what Prometheus is asked, name to expression; C(agent_urls) where the agents of a host
    answer, by instance.
positional: host
options:
  _input:
    description: The whole plan, C(fleet_plan).
    type: dict
    required: true
  host:
    description: Name of the host in the inventory.
    type: str
    required: true
"""

EXAMPLES = """
- name: Ask servers and agents of this host
  gpu_fleet.vllm.metrics:
    pages: "{{ fleet_plan | gpu_fleet.vllm.status_pages(inventory_hostname) }}"
"""

RETURN = """
_value:
  description: Name of a page to its URL.
  type: dict
"""


class FilterModule:
    """Filters of this file."""

    def filters(self):
        return {
            "status_pages": status.function("pages"),
            "status_queries": lambda _plan: status.queries(),
            "agent_urls": status.function("agent_urls"),
        }
