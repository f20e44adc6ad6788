"""The answer of plugins/module_utils/capacity.py in the terminal, and the files that its input names."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text


def load(source: Path | Mapping[str, Any], measured: Path | None = None) -> Any:
    """The input as one document: `measured` read from its file, results of vllm bench serve put among its points.

    Paths in a file are relative to it, those of a mapping to where the program runs; `-` is standard input. Raises capacity's BadInput
    with the field, for what cannot be read as well.
    """
    from gpu_fleet.domain import module_util

    refuse = module_util("throughput").BadInput
    document = source if isinstance(source, Mapping) else _read(source, "--from", refuse)
    if not isinstance(document, Mapping):
        return document
    document, folder = dict(document), Path() if isinstance(source, Mapping) else source.parent
    if measured is not None:
        document["measured"], folder = _read(measured, "--measured", refuse), measured.parent
    elif isinstance(document.get("measured"), str):
        path = folder / document["measured"]
        document["measured"], folder = _read(path, "measured", refuse), path.parent
    inner = document.get("measured")
    if isinstance(inner, Mapping) and "bench_results" in inner:
        inner = dict(inner)
        names = inner.pop("bench_results")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise refuse("measured.bench_results", "needs a list of paths of results of vllm bench serve")
        points = inner.get("points") or []
        if not isinstance(points, list):
            raise refuse("measured.points", f"needs a list of points, not {points!r}")
        inner["points"] = [*points, *(result for name in names for result in _results(folder / name, refuse))]
        document["measured"] = inner
    return document


def _text(path: Path, field: str, refuse: Any) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise refuse(field, f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise refuse(field, f"{path}: not a text in UTF-8") from error


def _read(path: Path, field: str, refuse: Any) -> Any:
    try:
        return yaml.safe_load(_text(path, field, refuse))
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, refuse):
            raise
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise refuse(field, f"{path}: not YAML{where}: {getattr(error, 'problem', None) or error}") from error


def _results(path: Path, refuse: Any) -> Iterator[Any]:
    """One result, a list of them, or several one after the other, as --append-result writes."""
    field = "measured.bench_results"
    text, decoder, found = _text(path, field, refuse).strip(), json.JSONDecoder(), []
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except ValueError as error:
            raise refuse(field, f"{path}: not JSON: {error}") from error
        found += value if isinstance(value, list) else [value]
        text = text[end:].lstrip()
    for result in found:
        if not isinstance(result, Mapping) or "request_throughput" not in result:
            raise refuse(field, f"{path}: no result of vllm bench serve, which has the field request_throughput")
    if not found:
        raise refuse(field, f"{path}: empty")
    yield from found


def table(answer: Mapping[str, Any]) -> Table:
    """Month by month: traffic, replicas, GPUs, what binds, and both bills where there are prices."""
    costs = answer["costs"]
    grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for head in ("month", "req/s", "replicas", "spare", "GPUs"):
        grid.add_column(head, justify="right", no_wrap=True)
    hosts = any(row["hosts"] is not None for row in answer["months"])
    if hosts:
        grid.add_column("hosts", justify="right", no_wrap=True)
    grid.add_column("load", justify="right", no_wrap=True)
    if costs:
        for head in ("API", "fleet"):
            grid.add_column(Text(f"{head} {costs['currency']}"), justify="right", no_wrap=True)
    grid.add_column("decided by")
    for row in answer["months"]:
        cells: list[Any] = [
            "now" if row["month"] == 0 else f"+{row['month']}",
            _rate(row["requests_per_second"]),
            f"{row['replicas']:,}",
            f"{row['replicas_for_redundancy']:,}",
            f"{row['gpus']:,}",
        ]
        if hosts:
            cells.append(f"{row['hosts']:,}")
        cells.append(f"{row['load_share']:.0%}")
        if costs:
            for who in ("api", "fleet"):
                cells.append(Text(f"{row[f'{who}_per_month']:,.0f}", style="green" if row["cheaper"] == who else ""))
        cells.append(row["binding"].replace(" throughput", "").removeprefix("latency (").removesuffix(")"))
        grid.add_row(*cells)
    return grid


def _rate(value: float) -> str:
    return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"


def sentences(answer: Mapping[str, Any]) -> list[str]:
    """One replica, and where an API costs the same, in words."""
    lines = []
    one, costs = answer["replica"], answer["costs"]
    if one:
        at = one["at"]
        latency = [
            f"{name} {at[key]:.4g} ms"
            for name, key in (("TTFT p95", "ttft_p95_ms"), ("ITL p95", "itl_p95_ms"))
            if at[key] is not None
        ]
        lines.append(
            f"One replica ({answer['measured']['gpus_per_replica']} x {answer['measured']['gpu'] or 'GPU'}) carries "
            f"{one['requests_per_second']:.4g} requests/s of this traffic"
            f"{' at ' + ', '.join(latency) if latency else ''}; with head room "
            f"{one['requests_per_second_with_head_room']:.4g} are counted."
        )
    if costs:
        first = costs["break_even_requests_per_second"]
        lasting = costs["fleet_never_dearer_from_requests_per_second"]
        if first is None:
            lines.append(f"The fleet costs less than the API {costs['no_break_even']}.")
        else:
            lines.append(
                f"API and fleet first cost the same at a peak of {first:.4g} requests/s: "
                f"{costs['break_even_cost_per_month']:,.2f} {costs['currency']} a month."
            )
            if lasting is None:
                lines.append(f"Whether the fleet stays the cheaper one is not known ({costs['no_break_even']}).")
            elif lasting > first:
                lines.append(
                    f"The next host can turn it again; from {lasting:.4g} requests/s on the API never is less."
                )
        month = costs["break_even_month"]
        if month is None:
            lines.append(f"With this growth the API costs less in each of the next {costs['months_searched']} months.")
        else:
            lines.append(
                "The fleet costs no more than the API already now."
                if month == 0
                else (f"With this growth the fleet costs no more than the API in month +{month} for the first time.")
            )
    return lines


def show(answer: Mapping[str, Any], console: Console) -> None:
    """Everything, with each assumption printed."""
    if answer["outcome"] != "answered":
        console.print("[bold]The targets cannot be met.[/bold]")
        for reason in answer["reasons"]:
            console.print(f"  {reason}", markup=False)
    else:
        console.print(table(answer))
        console.print()
        for line in sentences(answer):
            console.print(line, markup=False)
    for warning in answer["warnings"]:
        console.print(f"warning: {warning['field']}: {warning['message']}", markup=False, style="yellow")
    console.print("[bold]Assumptions[/bold]")
    for line in answer["assumptions"]:
        console.print(f"  - {line}", markup=False)
