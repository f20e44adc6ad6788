"""Filters of playbooks/maintenance.yml: see plugins/module_utils/maintenance.py."""

from __future__ import annotations

from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils.later import Module

maintenance = Module("maintenance")


DOCUMENTATION = r"""
name: maintenance
short_description: What rests while hosts are in maintenance
description: Reads the plan for replicas that have a part on a host in maintenance.
author: The gpu_fleet authors
options:
  _input: {description: The plan., type: dict, required: true}
"""


class FilterModule:
    def filters(self):
        return {"resting_on": maintenance.function("resting_on"), "resting_speakers": maintenance.function("speakers")}
