#!/usr/bin/python
"""Documentation of the action plugin of the same name; it runs on the controller, so this file does nothing."""

from __future__ import annotations

DOCUMENTATION = r"""
module: fleet_plan
short_description: Judge the inventory and plan every service
description:
  - Reads C(vllm_services), the groups C(gpu_hosts), C(gateways) and C(monitors), and every variable of every role of the collection.
  - Reports every mistake that can be known without touching a host, all at once, and fails.
  - Otherwise sets the fact C(fleet_plan), from which the roles render what each host runs.
  - Runs on the controller; no host is contacted. Use it with C(run_once).
author: The gpu_fleet authors
options:
  ask_hub:
    description:
      - Fetch what the plan needs to know of models at a hub (config.json and the list of files) into the controller's cache.
        Without it only what the cache has is known, and no network is asked.
    type: bool
    default: false
attributes:
  check_mode: {description: Runs fully in check mode., support: full}
  diff_mode: {description: Changes nothing, so there is nothing to show., support: none}
"""

EXAMPLES = r"""
- name: Judge the inventory and plan the services
  gpu_fleet.vllm.fleet_plan:
  run_once: true
"""

RETURN = r"""
msg:
  description: Every mistake, numbered, with where it is and its remedy.
  returned: failure
  type: str
summary:
  description: One line a replica, for people.
  returned: success
  type: list
  elements: str
ansible_facts:
  description: The plan.
  returned: success
  type: dict
  contains:
    fleet_plan:
      description: C(services), C(replicas) and C(hosts), as C(plugins/module_utils/plan.py) documents them.
      type: dict
"""
