"""The fleet from Python: what `scripts/fleet` does, as functions with types.

    from gpu_fleet import deploy
    result = deploy("inventories/prod", on_event=print)

docs/python.md says more. Beside these here is what the scripts of the repository share.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_fleet.api import (
        Event,
        Failure,
        FleetResult,
        Given,
        bench,
        bundle,
        capacity,
        deploy,
        doctor,
        drain,
        mirror,
        plan,
        play,
        report,
        rollback,
        status,
        teardown,
        topology,
        tune,
        upgrade,
        validate,
        verify,
    )

__all__ = [
    "Event",
    "Failure",
    "FleetResult",
    "Given",
    "bench",
    "bundle",
    "capacity",
    "deploy",
    "doctor",
    "drain",
    "mirror",
    "plan",
    "play",
    "report",
    "rollback",
    "status",
    "teardown",
    "topology",
    "tune",
    "upgrade",
    "validate",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import the functions only when one is asked for: `scripts/fleet --help` needs none of them."""
    if name in __all__:
        return getattr(importlib.import_module("gpu_fleet.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
