"""Filters that judge a host's GPUs and links, on the controller."""

from __future__ import annotations

DOCUMENTATION = """
name: gpu_judgement
short_description: Say what is wrong with a host's GPUs and links, and which GPUs belong together
description:
  - Takes what P(gpu_fleet.vllm.gpu_facts#module) returned and judges it by data/hardware.yml.
positional: settings
options:
  _input:
    description: The result of gpu_facts.
    type: dict
    required: true
  settings:
    description:
      - C(host), C(expected), C(has_learned), C(learned) (the text of
        what was kept), C(learned_file), C(groups), C(releases), C(accept) (ids of findings that are known and wanted),
        C(fail_on) (error, warning or never), as the variables of role gpu_topology say them, and C(measured), what the
        bandwidth proof printed.
    type: dict
    required: true
"""

EXAMPLES = """
- name: Judge
  ansible.builtin.set_fact:
    judged: "{{ facts | gpu_fleet.vllm.gpu_judgement({'host': inventory_hostname, 'expected': {'gpus': 8}}) }}"
"""

RETURN = """
_value:
  description: >-
    C(findings) (id, severity, evidence, remedy), C(stops), C(errors) and C(notes) as lists of text, C(recommendation) and
    C(advice) (the same as text), C(wheels) (as filter gpu_wheels), C(remember) (what to compare with later), C(summary)
    (one line).
  type: dict
"""

import json  # noqa: E402

from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data  # noqa: E402
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils.later import Module  # noqa: E402

bandwidth = Module("bandwidth")
compatibility = Module("compatibility")
hardware = Module("hardware")


def gpu_judgement(facts, settings):
    """See DOCUMENTATION."""
    known = data.load("hardware")
    groups = settings.get("groups") or []
    where = settings.get("host", "") or "this host"
    learned, unreadable = None, []
    if settings.get("has_learned"):
        text = settings["learned"]  # templating turns a text that reads like a dictionary into one
        text = text if isinstance(text, str) else json.dumps(text)
        learned, unreadable = hardware.read_learned(text, settings.get("learned_file", ""), where)
    found = hardware.judge(
        facts,
        known,
        expected={key: value for key, value in (settings.get("expected") or {}).items() if value is not None},
        learned=learned,
        groups=groups,
        host=settings.get("host", ""),
    )
    measured = settings.get("measured") or {}
    judged = [] if not measured or "refused" in measured else _judged(measured, facts)
    # A card that no service uses, such as one for a display, decides nothing.
    used = {number for group in groups for number in group}
    serving = [gpu for gpu in facts["gpus"] if not used or gpu["index"] in used]
    wheels = compatibility.wheels({**facts, "gpus": serving}, data.load("versions"))
    found = sorted(
        [
            *unreadable,
            *found,
            *compatibility.findings(wheels, settings.get("releases") or [], where),
            *_measured(settings.get("measured"), facts, where),
        ],
        key=lambda finding: hardware.SEVERITIES.index(finding.severity),
    )
    accepted = set(settings.get("accept") or ())
    fatal = {"error": ["error"], "warning": ["error", "warning"], "never": []}[settings.get("fail_on") or "error"]
    advised = hardware.recommend(facts, known, groups)
    told = [finding for finding in found if finding.id not in accepted]
    return {
        "findings": [hardware.as_dict(finding) for finding in told],
        "accepted": [hardware.as_dict(finding) for finding in found if finding.id in accepted],
        "stops": [hardware.line(finding) for finding in told if finding.severity in fatal],
        "errors": [hardware.line(finding) for finding in told if finding.severity == "error"],
        "notes": [hardware.line(finding) for finding in told if finding.severity not in fatal],
        "recommendation": advised,
        "advice": hardware.advice(advised),
        "wheels": wheels.as_dict(),
        "remember": hardware.remember(facts),
        "summary": hardware.summary(facts),
        "measured": judged,
        "measured_lines": bandwidth.lines(judged),
    }


def _measured(measured, facts, where):
    """What the bandwidth proof found wrong, if it was made."""
    if not measured:
        return []
    links = hardware.links(facts)
    return bandwidth.findings(measured, links, facts, data.load("links"), where)


def _judged(measured, facts):
    """Every rate that the bandwidth proof measured, with its floor."""
    return bandwidth.judge(measured, hardware.links(facts), facts, data.load("links"))


def gpu_groups(instances):
    """The GPUs of each tensor-parallel group that a host's instances (fleet_plan.hosts[HOST].instances) will run."""
    groups = []
    for instance in instances:
        numbers = [int(number) for number in instance["env"].get("CUDA_VISIBLE_DEVICES", "").split(",") if number]
        size = max(1, int(instance["config"].get("tensor-parallel-size", 1)))
        groups.extend(numbers[at : at + size] for at in range(0, len(numbers), size))
    return groups


class FilterModule:
    """Filters of this file."""

    def filters(self):
        return {"gpu_judgement": gpu_judgement, "gpu_groups": gpu_groups}
