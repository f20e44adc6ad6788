"""Filter that says what is wrong with the ways between hosts."""

from __future__ import annotations

from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils.later import Module

reach = Module("reach")

DOCUMENTATION = """
name: reach_faults
short_description: Say which ways between hosts do not work, and which strangers were let in
description:
  - Takes the results of P(gpu_fleet.vllm.reach#module), from this host to its peers.
positional: settings
options:
  _input:
    description: Results of connections from this host to its peers.
    type: list
    elements: dict
    required: true
  settings:
    description:
      - C(host), C(address) and C(interface) of this host, C(stranger) (results of connections that the controller made to this host)
        and C(openings) (what the firewall lets in here).
    type: dict
    required: true
"""

EXAMPLES = """
- name: Judge
  ansible.builtin.set_fact:
    faults: "{{ came.results | gpu_fleet.vllm.reach_faults(settings) }}"
"""

RETURN = """
_value:
  description: One sentence for each fault.
  type: list
  elements: str
"""


def reach_faults(results, settings):
    """See DOCUMENTATION."""
    peers = reach.judge_peers(settings["host"], settings["address"], settings.get("interface"), results, {})
    return peers + reach.judge_stranger(settings.get("stranger") or [], settings.get("openings") or [])


class FilterModule:
    """Filters of this file."""

    def filters(self):
        return {"reach_faults": reach_faults}
