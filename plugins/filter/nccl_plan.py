"""Filter that judges a host's network for NCCL, on the controller."""

from __future__ import annotations

DOCUMENTATION = """
name: nccl_plan
short_description: Choose NCCL's interface and ports on a host, or say what is wrong
description:
  - Takes what P(gpu_fleet.vllm.network_facts#module) returned and gives what role nccl writes.
positional: settings
options:
  _input:
    description: The result of network_facts.
    type: dict
    required: true
  settings:
    description: Host, address, interface, peers, variables, port_range and what else module_utils/nccl.py names.
    type: dict
    required: true
"""

EXAMPLES = """
- name: Judge
  ansible.builtin.set_fact:
    judged: "{{ network | gpu_fleet.vllm.nccl_plan(settings) }}"
"""

RETURN = """
_value:
  description: >-
    C(interface), C(rdma), C(net_devices), C(block) (lines for /etc/nccl.conf), C(in_file) (whether they are there), C(sysctl), C(header),
    C(in_the_way) (instances), C(findings) and
    C(notes) as lists of text.
  type: dict
"""

from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data  # noqa: E402
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils.later import Module  # noqa: E402

nccl = Module("nccl")


def nccl_plan(network, settings):
    """See DOCUMENTATION."""
    judged = nccl.plan(network, settings, data.load("nccl_variables"))
    return {
        "interface": judged.interface,
        "rdma": judged.rdma,
        "net_devices": judged.net_devices,
        "block": judged.block,
        "in_file": judged.in_file,
        "header": judged.header,
        "sysctl": judged.sysctl,
        "in_the_way": judged.in_the_way,
        "findings": [str(item) for item in judged.findings],
        "notes": [str(item) for item in judged.notes],
    }


class FilterModule:
    """Filters of this file."""

    def filters(self):
        return {"nccl_plan": nccl_plan}
