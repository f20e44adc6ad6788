"""Runs of an acceptance, kept beside the inventory by playbooks/accept.yml: .acceptance/SERVICE/TIME.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu_fleet.events import Event

KEPT = "Keep the document, and what the capacity table reads"  # the playbook's task


def folder(inventory: Path) -> Path:
    """Where they lie: beside the inventory, as Ansible's inventory_dir has it."""
    return (inventory if inventory.is_dir() else inventory.parent) / ".acceptance"


def last(where: Path, service: str = "") -> Path:
    """The last run of a service, or of any. Raises ValueError when there is none."""
    runs = sorted(where.glob(f"{service or '*'}/*Z.json"), key=lambda path: path.name)
    if not runs:
        raise ValueError(f"{where} has no run{f' of {service}' if service else ''}; scripts/fleet bench makes one")
    return runs[-1]


def read(path: Path) -> dict[str, Any]:
    """Raises ValueError for what cannot be read or is no run."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(told, dict) or not {"name", "service", "verdicts", "points", "knee", "objective"} <= set(told):
        raise ValueError(f"{path} is no acceptance; scripts/fleet bench writes one")
    return told


def compared(told: dict[str, Any], against: Path | None) -> dict[str, Any]:
    """A run with its differences to another one than the one before."""
    if against is None:
        return told
    from gpu_fleet.domain import module_util

    return {**told, "differences": module_util("bench_compare").compare(read(against), told)}


def kept_by(event: Event) -> Path | None:
    """The file of the run, from the event that says that it was written."""
    told = (event.raw.get("event_data") or {}).get("res") or {}
    written = event.task == KEPT and str(told.get("dest", "")).endswith(".json")
    return Path(told["dest"]) if written else None
