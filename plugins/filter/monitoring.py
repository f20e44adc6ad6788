"""Filter from the plan to what a monitor reads."""

from __future__ import annotations

DOCUMENTATION = """
name: monitoring_files
short_description: Rules, targets and configuration of Prometheus and Alertmanager
description:
  - Rules are those of data/recordings.yml and data/alerts.yml, with the names that the fleet's versions of vLLM give their metrics
    (data/metrics.yml).
positional: hosts, settings
options:
  _input:
    description: The whole plan, C(fleet_plan).
    type: dict
    required: true
  hosts:
    description: Every host of the fleet, name to C(address) and C(groups).
    type: dict
    required: true
  settings:
    description: The variables of role monitoring without their prefix, and C(host), C(folder), C(local).
    type: dict
    required: true
"""

EXAMPLES = """
- name: Show the rules
  ansible.builtin.debug:
    msg: "{{ (fleet_plan | gpu_fleet.vllm.monitoring_files(hosts, settings))['rules.yml'] }}"
"""

RETURN = """
_value:
  description: Name of a file to its content.
  type: dict
"""

from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data  # noqa: E402
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils.later import Module  # noqa: E402

monitoring = Module("monitoring")


def monitoring_files(plan, hosts, settings):
    known = {name: data.load(name) for name in ("metrics", "recordings", "alerts", "thresholds")}
    return monitoring.files(plan, known, hosts, settings)


class FilterModule:
    """Filters of this file."""

    def filters(self):
        return {"monitoring_files": monitoring_files}
