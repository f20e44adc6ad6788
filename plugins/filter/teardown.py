"""Filters of playbooks/teardown.yml: see plugins/module_utils/teardown.py."""

from __future__ import annotations

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import teardown

DOCUMENTATION = r"""
name: teardown
short_description: What of the fleet goes
description: Judges what may be taken away, and what goes with it.
author: The gpu_fleet authors
options:
  _input: {description: What was found on hosts., type: raw, required: true}
"""


class FilterModule:
    def filters(self):
        return {
            "teardown_planned": teardown.planned_on,
            "teardown_going": teardown.going,
            "teardown_refused": teardown.refused,
            "teardown_servers": teardown.servers,
            "teardown_weights": teardown.weights,
        }
