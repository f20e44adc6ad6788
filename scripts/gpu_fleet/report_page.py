"""An acceptance as one HTML page: nothing is loaded from anywhere, no script runs, phone and print included.

Pure: a document of plugins/module_utils/bench_document.py in, text out.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from gpu_fleet.report_plots import Chart, Line, svg

OUTCOMES = {"pass": "pass", "warn": "warning", "fail": "failed", "unknown": "not known"}
METRICS = (("ttft", "time to first token"), ("itl", "time between two tokens"), ("e2el", "whole request"))
SHARES = (50, 95, 99)
SINCE = "seconds since the first look"
STYLE = """
:root{color-scheme:light}*{box-sizing:border-box}
body{font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;color:#1b1f24;background:#fff;margin:0 auto;
max-width:72rem;padding:1rem}
h1{font-size:1.5rem;margin:.2rem 0}h2{font-size:1.2rem;margin:2rem 0 .5rem;border-bottom:1px solid #d0d7de}h3{font-size:1rem;margin:0 0 .2rem}
p{margin:.4rem 0}.quiet{color:#57606a}ul{margin:.2rem 0;padding-left:1.2rem}
.badge{display:inline-block;border:2px solid;border-radius:.4rem;padding:0 .5rem;font-weight:600;white-space:nowrap}
.pass{color:#116329}.warn{color:#7d4e00}.fail{color:#a40e26}.unknown{color:#57606a}
.wide{overflow-x:auto;margin:.5rem 0}table{border-collapse:collapse;font-size:.9rem}
th,td{border-bottom:1px solid #d0d7de;padding:.25rem .6rem;text-align:left;vertical-align:top}
th.n,td.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
td.range{color:#57606a}tr.knee{background:#fff8c5}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1.2rem}
figure{margin:0;max-width:31rem}svg.chart{width:100%;height:auto;font:13px system-ui,"DejaVu Sans",sans-serif}
.grid{stroke:#e4e8ec}.axis{stroke:#57606a}.tick,.small{font-size:12px;fill:#3d444d}.label{font-size:13px;fill:#1b1f24}
.limit{stroke:#a40e26;stroke-dasharray:4 3}.ring{fill:none;stroke:#a40e26;stroke-width:2}.band{fill:#0072b2;fill-opacity:.1}
.none{font-size:13px;fill:#57606a}img{max-width:100%;height:auto}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.85rem}.evidence{overflow-wrap:anywhere}
@media(max-width:40rem){.verdicts,.verdicts tbody,.verdicts tr,.verdicts td{display:block;border:0}
.verdicts thead{display:none}.verdicts tr{border-bottom:1px solid #d0d7de;padding:.4rem 0}.verdicts td{padding:.1rem 0}}
@media print{body{max-width:none;padding:0;font-size:10pt}table{font-size:7pt}h2{break-after:avoid}figure,tr{break-inside:avoid}
.wide{overflow:visible}th,td{padding:.1rem .22rem}.charts{grid-template-columns:1fr 1fr}details>*{display:block}}
@page{margin:14mm}
"""


def page(told: Mapping[str, Any]) -> str:
    """The whole page. Whatever comes from outside is escaped."""
    title = f"Acceptance of {told['service']}, {told['name']}"
    parts = [
        _head(told),
        _section("Verdicts", _verdicts(told)),
        _section("What to run at", _advice(told)),
        _section(
            "Latency and throughput",
            "<p>Numbers beside points are requests at once; the ring is the knee.</p>" + _charts(latency(told)),
        ),
        _section("Sweep", _sweep(told)),
        _section("Open load", _open(told)) if told["open"] else "",
        _section("Memory and load over time", _charts(courses(told))),
        _section("Against the last run", _differences(told)),
        _section("What ran where", _what(told)),
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        # A page without a picture of its own is asked for one by browsers.
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


# -- pieces -----------------------------------------------------------------------------------------------------------------


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inner}</section>"


def _badge(outcome: str) -> str:
    return f'<span class="badge {escape(outcome)}">{escape(OUTCOMES[outcome])}</span>'


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], classes: Sequence[str] = (), marked: int = -1) -> str:
    """A table that scrolls by itself where it is too wide. Cells are HTML already; classes: one a column."""
    kinds = [*classes, *[""] * (len(heads) - len(classes))]

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(f'<{tag} class="{kind}">{value}</{tag}>' for kind, value in zip(kinds, values, strict=True))

    body = "".join(
        f'<tr class="{"knee" if number == marked else ""}">{cells("td", row)}</tr>' for number, row in enumerate(rows)
    )
    return f'<div class="wide"><table><thead><tr>{cells("th", heads)}</tr></thead><tbody>{body}</tbody></table></div>'


def _number(value: float | None, digits: int = 4) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def _head(told: Mapping[str, Any]) -> str:
    shape, versions = told["shape"], told["versions"]
    where = f"{shape['hosts']}; {shape['GPUs']} GPUs: {shape['GPU']}" if shape["GPUs"] else f"{shape['hosts']}; no GPU"
    return (
        f"<header><h1>{escape(told['service'])} {_badge(told['outcome'])}</h1>"
        f"<p>vLLM {escape(versions['vllm'])} ({escape(versions['accelerator'])}), {escape(told['model'].rpartition('/')[2])}, on {escape(where)}</p>"
        f'<p class="quiet">{escape(told["name"])}; measured for {told["seconds"]:,.0f} s, {escape(_way(told))}; '
        f"gpu_fleet.vllm {escape(versions['collection'])}{escape(_unknown(told))}</p></header>"
    )


def _unknown(told: Mapping[str, Any]) -> str:
    names = [one["name"] for one in told["verdicts"] if one["outcome"] == "unknown"]
    return f"; not known: {', '.join(names)}" if names else ""


def _way(told: Mapping[str, Any]) -> str:
    return "directly at the replica" if told["through"] == "direct" else f"through {told['through']}"


def _verdicts(told: Mapping[str, Any]) -> str:
    rows = []
    for one in told["verdicts"]:
        remedy = f"<p><b>{escape(one['remedy'])}</b></p>" if one["remedy"] and one["outcome"] != "pass" else ""
        rows.append(
            f"<tr><td><b>{escape(one['name'])}</b></td><td>{_badge(one['outcome'])}</td>"
            f'<td class="evidence">{_list(one["evidence"])}{remedy}</td></tr>'
        )
    head = "<thead><tr><th>verdict</th><th>outcome</th><th>evidence</th></tr></thead>"
    return f'<table class="verdicts">{head}<tbody>{"".join(rows)}</tbody></table>'


def _advice(told: Mapping[str, Any]) -> str:
    bend, advice = told["knee"], told["recommendation"]
    parts = []
    if advice:
        words = [f"{name}: {value}" for name, value in advice["settings"].items()]
        if advice["replicas"]:
            words.append(f"{advice['replicas']} replicas")
        parts.append(f"<p><b>{escape(', '.join(words))}</b></p>{_list(advice['evidence'])}")
        objectives = json.dumps(advice["monitoring_objectives"])
        parts.append(
            f"<p>For alerts, monitoring_objectives: <code>{escape(told['service'])}: {escape(objectives)}</code></p>"
        )
    if bend["concurrency"] is None:
        parts.append("<p>No load kept the objective: there is no knee.</p>")
    else:
        seen = "" if bend["seen"] else " or above: no load missed it"
        parts.append(f"<p>Knee: concurrency {bend['concurrency']:g}{seen}. It is {escape(bend['rule'])}.</p>")
    parts.append(f'<p class="quiet">Objective from {escape(told["objective"]["from"])}.</p>')
    bound = told["bound"]
    lead = "What bounds it is not known: " if bound["by"] == "unknown" else "Bound by "
    parts.append(f"<p>{lead}{escape(bound['text'])}.</p>")
    return "".join(parts)


def _charts(charts: Iterable[Chart]) -> str:
    figures = "".join(f"<figure><h3>{escape(chart.title)}</h3>{svg(chart)}</figure>" for chart in charts)
    return f'<div class="charts">{figures}</div>'


def _at(point: Mapping[str, Any], name: str) -> float | None:
    return point["median"].get(name)


def latency(told: Mapping[str, Any]) -> list[Chart]:
    """Latency against throughput, a chart a latency and a line a percentile; throughput by concurrency."""
    points = [point for point in told["points"] if point["median"]]
    knee = next((point for point in points if point["concurrency"] == told["knee"]["concurrency"]), None)
    charts = []
    for metric, words in METRICS:
        lines = []
        for share in SHARES:
            name = f"{metric}_p{share}_ms"
            told_points = [point for point in points if _at(point, name) is not None]
            lines.append(
                Line(
                    f"p{share}",
                    [(point["median"]["output_tokens_per_second"], point["median"][name]) for point in told_points],
                    # The load beside the highest line, which has room above it.
                    [f"{point['concurrency']:g}" for point in told_points] if share == SHARES[-1] else (),
                )
            )
        wanted = told["objective"].get(f"{metric}_p95_ms")
        ring = None
        if knee and _at(knee, f"{metric}_p95_ms") is not None:
            ring = (knee["median"]["output_tokens_per_second"], knee["median"][f"{metric}_p95_ms"])
        charts.append(
            Chart(
                title=f"{words[0].upper()}{words[1:]} against throughput",
                x="output tokens/s",
                y=f"{words}, ms",
                lines=lines,
                limits=[("objective, p95", wanted)] if wanted is not None else [],
                ring=ring,
                from_zero=False,
            )
        )
    rates = [(point["concurrency"], point["median"]["output_tokens_per_second"]) for point in points]
    ring = (knee["concurrency"], knee["median"]["output_tokens_per_second"]) if knee else None
    charts.append(
        Chart("Throughput by load", "requests at once", "output tokens/s", [Line("output tokens/s", rates)], ring=ring)
    )
    return charts


def courses(told: Mapping[str, Any]) -> list[Chart]:
    """Memory of each GPU, or of the server, over time; what the server said of itself; how busy GPUs were."""
    charts = []
    for host, samples in told["samples"].items():
        if not samples:
            continue
        begin = samples[0]["t"]
        # The clock of a run is that of the replica's head, the first host.
        head = host == told["shape"]["hosts"].split(", ")[0]
        bands = [
            ("full prompts", run["begin"] - begin, run["end"] - begin)
            for run in told["runs"]
            if head and run["kind"] == "full" and run["begin"] >= begin
        ]
        by_gpu: dict[int, list[tuple[float, Mapping[str, Any]]]] = {}
        for sample in samples:
            for gpu in sample["gpus"]:
                by_gpu.setdefault(gpu["index"], []).append((sample["t"] - begin, gpu))
        if by_gpu:
            charts += _gpu_charts(host, by_gpu, bands)
        else:
            own = [
                (sample["t"] - begin, sample["memory"]["server_mib"])
                for sample in samples
                if sample["memory"]["server_mib"]
            ]
            charts.append(
                Chart(
                    f"{host}: memory of the server",
                    SINCE,
                    "MiB",
                    [Line("server (no GPU)", own)],
                    bands=bands,
                    marked=False,
                )
            )
        said = [(sample["t"] - begin, sample["server"]) for sample in samples if sample["server"]]
        if said:
            lines = [
                Line(name, [(at, server[name]) for at, server in said if name in server])
                for name in ("running", "waiting")
            ]
            charts.append(Chart(f"{host}: requests in the server", SINCE, "requests", lines, bands=bands, marked=False))
            kv = [(at, server["kv_usage"] * 100) for at, server in said if "kv_usage" in server]
            charts.append(
                Chart(f"{host}: KV cache in use", SINCE, "%", [Line("KV cache", kv)], bands=bands, marked=False)
            )
    return charts


def _gpu_charts(
    host: str,
    by_gpu: Mapping[int, Sequence[tuple[float, Mapping[str, Any]]]],
    bands: Sequence[tuple[str, float, float]],
) -> list[Chart]:
    memory = [
        Line(f"GPU {number}", [(at, gpu["used_mib"]) for at, gpu in seen if gpu["used_mib"] is not None])
        for number, seen in sorted(by_gpu.items())
    ]
    total = max((gpu["total_mib"] or 0.0 for seen in by_gpu.values() for _, gpu in seen), default=0.0)
    limits = [("memory of a GPU", total)] if total else []
    busy = []
    for key, words in (("busy", "a kernel ran"), ("memory_busy", "memory was read or written")):
        shares: dict[float, list[float]] = {}
        for seen in by_gpu.values():
            for at, gpu in seen:
                if gpu[key] is not None:
                    shares.setdefault(at, []).append(gpu[key] * 100)
        mean = [(at, sum(values) / len(values)) for at, values in sorted(shares.items())]
        busy.append(Line(f"{words} (mean of the GPUs)", mean))
    return [
        Chart(f"{host}: memory of the GPUs", SINCE, "MiB", memory, limits=limits, bands=bands, marked=False),
        Chart(f"{host}: share of time in use (NVML)", SINCE, "% of the time", busy, bands=bands, marked=False),
    ]


LATENCIES = (("ttft", "TTFT"), ("itl", "between tokens"), ("e2el", "whole request"))
RATES = (("output_tokens_per_second", "output<br>tokens/s"), ("requests_per_second", "requests/s"))
HEADS = (
    *(name for _, name in RATES),
    *(f"{name}, ms<br>p50 / p95 / p99" for _, name in LATENCIES),
    "GPUs<br>busy",
    "generator,<br>of a core",
    "failed",
)


def _range(point: Mapping[str, Any], name: str, before: str = "") -> str:
    """The least and the most of the repeats, on a line of their own."""
    if point["repeats"] < 2 or _at(point, name) is None:
        return ""
    return f'<br><span class="quiet">{before}{_number(point["low"][name], 3)}-{_number(point["high"][name], 3)}</span>'


def _rows(points: Iterable[Mapping[str, Any]], load: str) -> list[list[str]]:
    rows = []
    for point in points:
        cells = [f'{_number(point[load])}<br><span class="quiet">x {point["repeats"]}</span>']
        cells += [_number(_at(point, name)) + _range(point, name) for name, _ in RATES]
        for metric, _ in LATENCIES:
            values = " / ".join(_number(_at(point, f"{metric}_p{share}_ms")) for share in SHARES)
            cells.append(values + _range(point, f"{metric}_p95_ms", "p95 "))
        shares = [point.get(name) for name in ("gpu_busy", "gpu_memory_busy")]
        told = "-" if None in shares else f'{shares[0]:.0%}<br><span class="quiet">memory {shares[1]:.0%}</span>'
        cells.append(told)
        cores = point["generator_cores"]
        rows.append([*cells, "-" if cores is None else f"{cores:.0%}", f"{point['failed_share']:.1%}"])
    return rows


def _loads(points: Sequence[Mapping[str, Any]], load: str, head: str, knee: int = -1) -> str:
    """A row a load, and below the table what failed."""
    heads = [head, *HEADS]
    errors = [f"at {point[load]:g}: {count} x {text}" for point in points for text, count in point["errors"].items()]
    table = _table(heads, _rows(points, load), ["n"] * len(heads), knee)
    return table + (f"<p>Errors:</p>{_list(errors)}" if errors else "")


def _sweep(told: Mapping[str, Any]) -> str:
    knee = next(
        (place for place, point in enumerate(told["points"]) if point["concurrency"] == told["knee"]["concurrency"]), -1
    )
    noise = told.get("differences") and told["differences"]["noise"]["new"]["text"]
    lengths = (
        f"{told['settings']['input_tokens']} tokens in, {told['settings']['output_tokens']} out"
        if told["settings"]["dataset"] == "random"
        else f"a JSONL of prompts ({told['settings']['prompts_digest']}), {told['settings']['output_tokens']} tokens out"
    )
    text = f"<p>{escape(lengths)}. Medians of the repeats, below them the least and the most (x 3: three of them); the knee is marked.</p>"
    more = f"<p>{escape(noise)}.</p>" if noise else ""
    return text + more + _loads(told["points"], "concurrency", "requests<br>at once", knee)


def _open(told: Mapping[str, Any]) -> str:
    text = "<p>Requests arrive by chance at a rate (Poisson), however many are under way.</p>"
    return text + _loads(told["open"], "rate", "requests/s<br>sent")


def _differences(told: Mapping[str, Any]) -> str:
    seen = told["differences"]
    if not seen:
        return "<p>There is no earlier run of this service.</p>"
    parts = [f"<p><b>{escape(seen['text'])}</b> (against {escape(seen['old'])})</p>"]
    if seen["changed"]:
        parts.append(f"<p>Changed since:</p>{_list(seen['changed'])}")
    knees = ["none" if seen["knee"][side] is None else f"{seen['knee'][side]:g}" for side in ("old", "new")]
    parts.append(f"<p>Knee: {knees[0]}, now {knees[1]}.</p>")
    rows = []
    for row in seen["rows"]:
        sides = []
        for side in ("old", "new"):
            one = row[side]
            sides.append(
                "-" if one is None else f"{_number(one['median'])} ({_number(one['low'], 3)}-{_number(one['high'], 3)})"
            )
        change = "-" if row["change"] is None else f"{row['change']:+.1%}"
        word = {"same": "within the noise", "unknown": "cannot be told"}.get(row["verdict"], row["verdict"])
        kind = {"slower": "fail", "faster": "pass"}.get(row["verdict"], "unknown")
        rows.append(
            [f"{row['concurrency']:g}", escape(row["name"]), *sides, change, f'<span class="{kind}">{word}</span>']
        )
    if rows:
        heads = ["requests at once", "number", "then", "now", "change", "verdict"]
        parts.append(_table(heads, rows, ["n", "", "n", "n", "n", ""]))
    parts.append(
        f'<p class="quiet">Then: {escape(seen["noise"]["old"]["text"])}.<br>Now: {escape(seen["noise"]["new"]["text"])}.</p>'
    )
    return "".join(parts)


def _pairs(told: Mapping[str, Any]) -> str:
    return _table(["", ""], [[escape(str(key)), escape(_text(value))] for key, value in told.items()])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _what(told: Mapping[str, Any]) -> str:
    parts = [_pairs({**told["versions"], **told["shape"], "through": told["through"]}), *_pictures(told)]
    if told["notes"]:
        parts.append(_list(told["notes"]))
    if told["memory_planned"]:
        parts.append(f"<details><summary>Memory, as planned</summary>{_pairs(told['memory_planned'])}</details>")
    parts.append(f"<details><summary>Options of the server</summary>{_pairs(told['config'])}</details>")
    parts.append(f"<details><summary>Settings of this measurement</summary>{_pairs(told['settings'])}</details>")
    return "".join(parts)


def _pictures(told: Mapping[str, Any]) -> list[str]:
    """GPUs and links of each host that told them, as a picture of its own: its styles stay in it."""
    from gpu_fleet import picture
    from gpu_fleet.domain import module_util

    found = []
    for host, facts in told["gpu_facts"].items():
        if not facts or not facts.get("gpus"):
            continue
        try:
            drawn = picture.svg(picture.describe(facts, host=host))
        except module_util("topology").Refused as refused:
            found.append(f"<p>{escape(host)}: its table of links cannot be read: {escape(refused.reason)}</p>")
            continue
        data = base64.b64encode(drawn.encode()).decode()
        found.append(
            f'<figure><img alt="GPUs and links of {escape(host, quote=True)}" src="data:image/svg+xml;base64,{data}"></figure>'
        )
    return found
