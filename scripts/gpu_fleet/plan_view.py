"""What a launch needs of a GPU's memory, drawn in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

BAR = 40  # characters for the whole memory of a GPU
# Part of the memory, its field in gpu_fleet.vllm's Memory.as_dict, letter and style of the bar.
PARTS = (
    ("weights", ("weights_gib",), "█", "blue"),
    ("held", ("activation_gib", "cudagraph_gib", "non_torch_gib", "outside_gib"), "▒", "yellow"),
    ("KV cache", ("kv_gib",), "▓", "green"),
)
MARKS = {"error": "bold red", "warning": "yellow", "warn": "yellow", "info": "dim", "ok": "green"}


def parts(memory: Mapping[str, Any]) -> dict[str, float] | None:
    """GiB of each part of a GPU, and what is free of it; None where memory is not known."""
    if memory.get("weights_gib") is None or memory.get("total_gib") is None:
        return None
    told = {name: sum(float(memory.get(key) or 0) for key in keys) for name, keys, _letter, _style in PARTS}
    told["KV cache"] = max(0.0, told["KV cache"])
    told["free"] = max(0.0, float(memory["total_gib"]) - sum(told.values()))
    return told


def bar(memory: Mapping[str, Any]) -> Text:
    """The memory of a GPU, BAR characters wide; what does not fit stands out on the right."""
    told, text = parts(memory), Text()
    if told is None:
        return Text("not known", style="dim")
    total, used = float(memory["total_gib"]), 0
    for name, _keys, letter, style in PARTS:
        width = min(BAR - used, round(told[name] / total * BAR))
        text.append(letter * width, style=style)
        used += width
    text.append("░" * (BAR - used), style="dim")
    if told["weights"] > total:
        text.append(f" +{told['weights'] - total:.1f} GiB", style=MARKS["error"])
    return text


def table(rows: Mapping[str, Mapping[str, Any]]) -> RenderableType:
    """A line a launch: per GPU weights, KV cache, what else is held and free, tokens, requests at full length."""
    out = Table(box=None, pad_edge=False)
    for head in ("", "weights", "KV", "held", "free", "tokens", "at full length"):
        out.add_column(head, justify="left" if head in ("", "at full length") else "right", no_wrap=True)
    bars = []
    for name, memory in rows.items():
        told = parts(memory)
        if told is None:
            out.add_row(name, *["?"] * 5, str(memory.get("unknown") or "not known"))
            continue
        at = f"{memory['max_concurrency']:.1f} x {memory['max_model_len']:,}" if memory.get("max_concurrency") else "-"
        gib = [f"{told[key]:.1f}" for key in ("weights", "KV cache", "held", "free")]
        out.add_row(name, *gib, f"{memory['kv_tokens']:,}" if memory.get("kv_tokens") else "-", at)
        bars.append(Text.assemble(bar(memory), f" {name}"))
    legend = Text("GiB a GPU.  ")
    for name, _keys, letter, style in PARTS:
        legend.append(f"{letter} {name}  ", style=style)
    legend.append("░ free", style="dim")
    return Group(out, *bars, legend)
