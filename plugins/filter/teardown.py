"""Filters of playbooks/teardown.yml: see plugins/module_utils/teardown.py."""

from __future__ import annotations

from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils.later import Module

teardown = Module("teardown")


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
            "teardown_planned": teardown.function("planned_on"),
            "teardown_going": teardown.function("going"),
            "teardown_refused": teardown.function("refused"),
            "teardown_servers": teardown.function("servers"),
            "teardown_weights": teardown.function("weights"),
        }
