"""Documents of acceptances for the page's tests: a stand-in without GPUs, and one on the recorded host with two H200s."""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path

from bench_world import PLAN, made

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "replay"))

import hosts


@functools.cache
def _made():
    plan = copy.deepcopy(PLAN)
    plan["replicas"]["chat.0"] |= {
        "gpus": [0, 1],
        "tensor": 2,
        "accelerator": "cu130",
        "memory": {"weights_gib": 1.5, "kv_gib": 100.2},
    }
    facts = hosts.facts("h200x2")
    return [
        made("cpu", noise=0.2),
        made("gpus", noise=0.2, tokens=5000.0, plan=plan, used=(60000.0, 61000.0), facts=facts),
    ]


def documents():
    return copy.deepcopy(_made())


def compared():
    """A run that is slower than the one before it."""
    first, _ = documents()
    return made("later", noise=0.2, tokens=50.0, kept=[first])
