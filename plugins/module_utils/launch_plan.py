# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A launch judged before a host is touched, and one chosen: which sizes, which length, which dtype, and why.

    judge(launch, known)   what is wrong with a launch as it is written
    choose(launch, known)  the arguments that a launch leaves open, each with its reason; those it gives are kept or refused

The rules stand in launch_rules.py and launch_memory.py, what a launch is in launch_case.py.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import launch_memory, launch_rules
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.launch_case import (
    BadLaunch,
    Case,
    Known,
    max_length,
    read_case,
    size_of,
)
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.launch_memory import Memory, memory_of, with_args
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.launch_rules import Remark

__all__ = ["BadLaunch", "Choice", "Known", "Plan", "Remark", "Verdict", "choose", "judge"]


@dataclass(frozen=True)
class Verdict:
    """outcome: error when any finding is one, else warn when any is a warning, else ok. memory is of the fullest GPU."""

    outcome: str
    findings: Tuple[Remark, ...]
    memory: Dict[str, Any]

    def as_dict(self) -> Dict[str, Any]:
        return {
            "outcome": self.outcome,
            "findings": [finding.as_dict() for finding in self.findings],
            "memory": self.memory,
        }


SEVERITIES = ("error", "warning", "info")


def judge(launch: Mapping[str, Any], known: Known) -> Verdict:
    """Every rule, by the launch's own release. A launch that cannot be read is an error, too."""
    try:
        case = read_case(launch, known)
    except BadLaunch as error:
        return _verdict([Remark("launch", "error", error.reason)], Memory(None, None, False, error.reason))
    return _judged(case)[0]


def _judged(case: Case) -> Tuple[Verdict, Memory]:
    found = [remark for rule in launch_rules.RULES for remark in rule(case)]
    memory = memory_of(case)
    # A model that cannot be divided has no memory to speak of.
    if not any(remark.rule in ("heads_tp", "kv_heads_tp", "ffn_tp", "pipeline_layers") for remark in found):
        found.extend(launch_memory.memory_rule(case, memory))
    return _verdict(found, memory), memory


def _verdict(found: List[Remark], memory: Memory) -> Verdict:
    found = sorted(dict.fromkeys(found), key=lambda remark: SEVERITIES.index(remark.severity))
    worst = found[0].severity if found else "info"
    return Verdict({"error": "error", "warning": "warn"}.get(worst, "ok"), tuple(found), memory.as_dict())
