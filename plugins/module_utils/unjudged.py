"""A change of a replica whose outcome nobody has judged yet: kept on the host from before the stop until its answers were compared.

A run that is cut off in between leaves it, and the next one judges by it. Standard library only; runs on hosts.
"""

from __future__ import annotations

import json
import os
from typing import Any, Dict, Mapping

NAME = "unjudged.json"
# Why a replica that is what is wanted is not left at that.
REASON = "the run that changed it was cut off before its answers were compared with those before"


def read(home: str) -> Dict[str, Any]:
    """What is kept of an instance, by its folder: `former`, the generation that served before, and `said`, what it answered; {} for none."""
    try:
        with open(os.path.join(home, NAME), encoding="utf-8") as text:
            kept = json.load(text)
    except (OSError, ValueError):
        return {}
    whole = isinstance(kept, dict) and isinstance(kept.get("former"), str) and isinstance(kept.get("said"), dict)
    there = whole and os.path.isdir(os.path.join(home, "generations", os.path.basename(kept["former"]) or "none"))
    return kept if there else {}


def keep(home: str, change: Mapping[str, Any]) -> None:
    """Keep a change; answers are root's alone, as prompts and logs are."""
    beside = os.path.join(home, f"{NAME}.new")
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
        json.dump({"former": change["former"], "said": change["said"]}, out)
        out.flush()
        os.fsync(out.fileno())
    os.rename(beside, os.path.join(home, NAME))


def forget(home: str, check: bool = False) -> bool:
    """It is judged; whether something was kept."""
    path = os.path.join(home, NAME)
    if not os.path.lexists(path):
        return False
    if not check:
        os.unlink(path)
    return True
