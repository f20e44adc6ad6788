"""Filters from the results of M(gpu_fleet.vllm.generation) to how servers are spoken to."""

from __future__ import annotations

from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils.later import Module

rollout = Module("rollout")

DOCUMENTATION = """
name: instance_tls
short_description: Whether a replica speaks TLS with what it is to run, or with what ran before
description:
  - Taken from the results of M(gpu_fleet.vllm.generation) on all hosts.
positional: instance, before
options:
  _input:
    description: Host to results of the loop over M(gpu_fleet.vllm.generation).
    type: dict
    required: true
  instance:
    description: Name of the instance.
    type: str
    required: true
  before:
    description: With what is brought back where the change goes wrong.
    type: bool
    default: false
"""

EXAMPLES = """
- name: Show how chat.0 will be spoken to
  ansible.builtin.debug:
    msg: "{{ results | gpu_fleet.vllm.instance_tls('chat.0') }}"
"""

RETURN = """
_value:
  description: Whether it speaks TLS.
  type: bool
"""


class FilterModule:
    """Filters of this file."""

    def filters(self):
        return {
            "instance_tls": rollout.function("tls"),
            "instances_spoken": rollout.function("spoken"),
            "instances_speaking": rollout.function("speaking"),
            "instances_turned": rollout.function("turned"),
        }
