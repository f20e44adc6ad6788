"""scripts/fleet status: the fleet on one screen."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

ASKS = "gpu_fleet.vllm.metrics"


def register(app: typer.Typer) -> None:
    """Add the verb `status`."""
    app.command()(status)


def status(
    *,
    inventory: Annotated[
        Path | None, typer.Option("-i", "--inventory", help="Ask the fleet of this inventory.")
    ] = None,
    prometheus: Annotated[
        str | None, typer.Option("--prometheus", help="Ask the Prometheus at this URL, from here; no host is touched.")
    ] = None,
    hosts: Annotated[
        bool, typer.Option("--hosts", help="Ask every host about itself, whether there is a monitor or not.")
    ] = False,
    watch: Annotated[
        float | None, typer.Option("--watch", min=1, help="Ask again every so many seconds, until you end it.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on standard output, nothing else.")] = False,
) -> None:
    """Services, replicas, tokens per second, queue, KV use, TTFT p95, GPUs and alerts on one screen.

    From Prometheus on the monitors; without monitors, or with --hosts, from every host's own /metrics and agents. Exit status 0 all is
    well, 1 a replica does not answer or an alert fires, 2 used wrongly or nobody answered.
    """
    if (inventory is None) == (prometheus is None):
        _stop("give an inventory (-i) or a Prometheus (--prometheus URL), one of them")
    if prometheus is not None and hosts:
        _stop("--hosts asks the hosts of an inventory (-i)")
    if json_ and watch is not None:
        _stop("--watch is for people, --json is one document")

    def ask() -> dict[str, Any]:
        return from_url(prometheus) if prometheus is not None else from_fleet(inventory, hosts)

    from gpu_fleet.domain import module_util

    if watch is not None:
        _watch(ask, watch)
    told = ask()
    if json_:
        typer.echo(json.dumps(told, indent=1))
    else:
        from rich.console import Console

        from gpu_fleet import status_view

        Console(highlight=False).print(status_view.screen(told))
    raise typer.Exit(1 if module_util("status").wrong(told) else 0)


def _stop(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(2)


def _watch(ask: Any, every: float) -> NoReturn:
    from rich.live import Live

    from gpu_fleet import status_view

    try:
        with Live(status_view.screen(ask()), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                live.update(status_view.screen(ask()), refresh=True)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def from_url(url: str) -> dict[str, Any]:
    """Ask a Prometheus that can be reached from here."""
    from gpu_fleet.domain import module_util

    base = url.rstrip("/")
    if urllib.parse.urlsplit(base).scheme not in ("http", "https"):
        _stop(f"{url} is no URL of a Prometheus, such as http://127.0.0.1:9090")

    def get(path: str) -> Any:
        try:
            with urllib.request.urlopen(f"{base}{path}", timeout=30) as answer:
                return json.loads(answer.read())["data"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            _stop(f"{base}: {getattr(error, 'reason', error)}")

    util = module_util("status")
    results = {
        name: get(f"/api/v1/query?{urllib.parse.urlencode({'query': text})}")["result"]
        for name, text in util.queries().items()
    }
    return util.from_prometheus(results, get("/api/v1/alerts")["alerts"])


def from_fleet(inventory: Path | None, hosts: bool) -> dict[str, Any]:
    """Ask the monitors; where there is none, or none answers, every host about itself."""
    from gpu_fleet.domain import data_cached, module_util

    assert inventory is not None
    util = module_util("status")
    if not hosts:
        _, told = _play(inventory, "monitors")
        for answer in told.values():
            if answer.get("answers"):
                return util.from_prometheus(answer["answers"], answer["alerts"])
    plan, told = _play(inventory, "hosts")
    pages = {host: answer["pages"] for host, answer in told.items() if "pages" in answer}
    if plan is None or not told:
        _stop("no host answered")
    gpus = {host: util.gpus_of(answer["gpus"]) for host, answer in told.items() if answer.get("gpus")}
    return util.from_hosts(plan, data_cached("metrics"), pages, gpus)


def _play(inventory: Path, source: str) -> tuple[dict[str, Any] | None, dict[str, dict[str, Any]]]:
    """The plan, and by host what modules brought."""
    from gpu_fleet import runs

    told: dict[str, dict[str, Any]] = {}

    def keep(event: dict[str, Any]) -> None:
        data = event.get("event_data", {})
        if event["event"] != "runner_on_ok":
            return
        action, result = str(data.get("resolved_action") or data.get("task_action")), data.get("res") or {}
        if action.endswith(".metrics"):
            told.setdefault(data["host"], {}).update(result)
        elif action.endswith(".gpu_facts"):
            told.setdefault(data["host"], {})["gpus"] = result

    try:
        outcome = runs.run("status", inventory, variables={"status_source": source}, on_event=keep)
    except FileNotFoundError as error:
        _stop(str(error))
    if outcome.refused:
        _stop("\n".join(failure.message for failure in outcome.failures))
    return outcome.plan, told
