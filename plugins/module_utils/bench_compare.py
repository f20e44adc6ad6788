# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Two acceptance runs side by side, with what the noise allows to say.

Each number is the median of a run's repeats, and its range goes from the least to the most of them. Slower or faster is said only
where the ranges do not touch; a run without repeats has no range, so nothing is said of it. What was measured otherwise (lengths,
way, hosts) is told first: numbers of different loads are shown and not judged.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils.bench_judge import NAMES

# What is compared, and whether more is better.
COMPARED: Tuple[Tuple[str, bool], ...] = (
    ("output_tokens_per_second", True),
    ("requests_per_second", True),
    ("ttft_p50_ms", False),
    ("ttft_p95_ms", False),
    ("itl_p50_ms", False),
    ("itl_p95_ms", False),
    ("e2el_p95_ms", False),
)
# What has to be the same for numbers to be of the same load, by its place in a run's document.
LOAD = (
    ("settings", "dataset"),
    ("settings", "input_tokens"),
    ("settings", "output_tokens"),
    ("settings", "prompts_digest"),
    ("through",),
    ("model",),
)
REPEATS = 2  # below so many there is no range


def _at(document: Mapping[str, Any], path: Sequence[str]) -> Any:
    value: Any = document
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def other_load(old: Mapping[str, Any], new: Mapping[str, Any]) -> List[str]:
    """In words, what makes the loads of two runs different ones."""
    return [
        f"{path[-1]} was {_at(old, path)!r} and is {_at(new, path)!r}"
        for path in LOAD
        if _at(old, path) != _at(new, path)
    ]


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> List[str]:
    """What else is not as it was: versions, options of the server, GPUs."""
    said = []
    for what in ("versions", "config", "shape"):
        before, after = old.get(what) or {}, new.get(what) or {}
        for key in sorted({*before, *after}):
            if before.get(key) != after.get(key):
                said.append(f"{key}: {_shown(before.get(key))} -> {_shown(after.get(key))}")
    return said


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)


def judge(old: Mapping[str, Any], new: Mapping[str, Any], name: str, more_is_better: bool) -> Dict[str, Any]:
    """One number of one load. verdict: faster, slower, same (the ranges touch), or unknown (no repeats, or not measured)."""
    row: Dict[str, Any] = {"metric": name, "name": NAMES[name]}
    for side, point in (("old", old), ("new", new)):
        told = point["median"].get(name)
        row[side] = (
            None
            if told is None
            else {"median": told, "low": point["low"][name], "high": point["high"][name], "repeats": point["repeats"]}
        )
    before, after = row["old"], row["new"]
    if before is None or after is None or min(before["repeats"], after["repeats"]) < REPEATS:
        row["verdict"] = "unknown"
    elif after["low"] > before["high"]:
        row["verdict"] = "faster" if more_is_better else "slower"
    elif after["high"] < before["low"]:
        row["verdict"] = "slower" if more_is_better else "faster"
    else:
        row["verdict"] = "same"
    row["change"] = after["median"] / before["median"] - 1 if before and after and before["median"] else None
    return row


def spread(point: Mapping[str, Any], name: str) -> Optional[float]:
    """The range of a number as a share of its median."""
    middle = point["median"].get(name)
    return (point["high"][name] - point["low"][name]) / middle if middle and point["repeats"] >= REPEATS else None


def noise(points: Sequence[Mapping[str, Any]]) -> Dict[str, Any]:
    """How far repeats of one run lie apart: by number the largest spread over all loads."""
    worst: Dict[str, float] = {}
    for name, _ in COMPARED:
        spreads = [value for value in (spread(point, name) for point in points) if value is not None]
        if spreads:
            worst[name] = max(spreads)
    repeats = min((point["repeats"] for point in points), default=0)
    if not worst:
        text = f"{repeats} run of each load: how much is noise is not known, and no difference can be told from it"
    else:
        text = f"{repeats} repeats of each load at the least; they lie apart by up to " + ", ".join(
            f"{value:.0%} ({NAMES[name]})" for name, value in worst.items()
        )
    return {"repeats": repeats, "spread": worst, "text": text}


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> Dict[str, Any]:
    """Two documents of acceptance runs: load (what differs in it), changed, rows by concurrency, knee, text."""
    different = other_load(old, new)
    before = {point["concurrency"]: point for point in old["points"]}
    rows = []
    for point in new["points"]:
        if point["concurrency"] not in before:
            continue
        for name, more in COMPARED:
            row = judge(before[point["concurrency"]], point, name, more)
            if different:
                row["verdict"] = "unknown"
            rows.append({"concurrency": point["concurrency"], **row})
    slower = [row for row in rows if row["verdict"] == "slower"]
    faster = [row for row in rows if row["verdict"] == "faster"]
    known = [row for row in rows if row["verdict"] != "unknown"]
    return {
        "old": old["name"],
        "new": new["name"],
        "other_load": different,
        "changed": changed(old, new),
        "rows": rows,
        "knee": {"old": old["knee"]["concurrency"], "new": new["knee"]["concurrency"]},
        "noise": {"old": noise(old["points"]), "new": noise(new["points"])},
        "text": _text(different, slower, faster, known),
    }


def _text(
    different: Sequence[str],
    slower: Sequence[Mapping[str, Any]],
    faster: Sequence[Mapping[str, Any]],
    known: Sequence[Mapping[str, Any]],
) -> str:
    if different:
        return f"other loads, so nothing is judged: {'; '.join(different)}"
    if not known:
        return "nothing can be said: it needs the same loads in both, and repeats of each"
    parts = []
    for word, rows in (("slower", slower), ("faster", faster)):
        if rows:
            most = max(rows, key=lambda row: abs(row["change"] or 0.0))
            parts.append(
                f"{len(rows)} {word}, most {most['name']} at concurrency {most['concurrency']:g} ({most['change']:+.0%})"
            )
    rest = len(known) - len(slower) - len(faster)
    return "; ".join([*parts, f"{rest} of {len(known)} within the noise (their ranges touch)"])
