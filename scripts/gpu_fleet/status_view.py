"""One screen of a fleet's state, for the terminal."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

STYLES = {"critical": "bold red", "warning": "yellow", "info": "cyan"}


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def gib(value: float | None) -> str:
    return "-" if value is None else f"{value / (1 << 30):.0f}"


def screen(status: dict[str, Any], failure: str = "") -> Group:
    """failure: why the last question got no answer; then the state is of the one before."""
    services = _table("service", "replicas", "tok/s", "prompt tok/s", "run", "wait", "KV", "TTFT p95", "ITL p95")
    for row in status["services"]:
        right, wanted = row["right"] or 0.0, row["wanted"] or 0.0
        services.add_row(
            escape(row["name"]),
            Text(f"{right:.0f}/{wanted:.0f}", style="green" if right >= wanted else "bold red"),
            number(row["tokens_per_second"]),
            number(row["prompt_tokens_per_second"]),
            number(row["running"]),
            number(row["waiting"]),
            share(row["kv_usage"]),
            seconds(row["ttft_p95"]),
            seconds(row["itl_p95"]),
        )
    replicas = _table("replica", "answers", "tok/s", "run", "wait", "KV", "restarts")
    for row in status["replicas"]:
        answers = "yes" if row["right"] == 1 else "given up" if row["limit_reached"] else "no"
        answers = "maintenance" if row["maintenance"] else answers
        replicas.add_row(
            escape(row["replica"]),
            Text(answers, style={"yes": "green", "maintenance": "cyan"}.get(answers, "bold red")),
            number(row["tokens_per_second"]),
            number(row["running"]),
            number(row["waiting"]),
            share(row["kv_usage"]),
            number(row["restarts"]),
        )
    hosts = _table("host", "reached", "GPUs", "used", "GPU memory GiB")
    for row in status["hosts"]:
        hosts.add_row(
            escape(row["host"]),
            Text("maintenance", style="cyan")
            if row["maintenance"]
            else Text("yes", style="green")
            if row["up"]
            else Text("no", style="bold red"),
            number(row["gpus"]),
            share(row["gpu_utilization"]),
            f"{gib(row['gpu_memory_used'])} of {gib(row['gpu_memory'])}" if row["gpu_memory"] else "-",
        )
    alerts: list[Text] = []
    for alert in status["alerts"]:
        style = STYLES.get(alert["severity"], "") if alert["state"] == "firing" else "dim"
        alerts.append(Text(f"{alert['severity']} {alert['alert']} ({alert['state']}): {alert['summary']}", style=style))
    if not alerts:
        told = "no alert" if status["source"] == "prometheus" else "alerts are Prometheus', which was not asked"
        alerts.append(Text(told, style="dim"))
    head = [Text(f"{time.strftime('%H:%M:%S')}  from {status['source']}", style="dim")]
    if failure:
        head.append(Text(f"no answer, so that this is what was known before: {failure}", style="bold red"))
    return Group(*head, services, replicas, hosts, *alerts)


def _table(first: str, *rest: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first)
    for head in rest:
        table.add_column(head, justify="right")
    return table
