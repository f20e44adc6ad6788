"""scripts/fleet status: the fleet on one screen."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

# How it is told that nobody answered, or that there is no such inventory.
UNANSWERED = (FileNotFoundError, ValueError)


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

    from gpu_fleet import asked_status
    from gpu_fleet.domain import module_util

    def ask() -> dict[str, Any]:
        if prometheus is not None:
            return asked_status.from_url(prometheus)
        assert inventory is not None
        return asked_status.from_fleet(inventory, hosts)

    try:
        told = ask()
    except UNANSWERED as error:
        _stop(str(error))
    if watch is not None:
        _watch(ask, told, watch)
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


def _watch(ask: Callable[[], dict[str, Any]], told: dict[str, Any], every: float) -> NoReturn:
    """One screen in the place of the other; into a file, one below the other."""
    from rich.console import Console
    from rich.live import Live

    console, screens = Console(highlight=False), _screens(ask, told, every)
    with contextlib.suppress(KeyboardInterrupt):
        if console.is_terminal:
            with Live(next(screens), console=console, screen=True, auto_refresh=False) as live:
                for screen in screens:
                    live.update(screen, refresh=True)
        for screen in screens:
            console.print(screen)
    raise typer.Exit(0)


def _screens(ask: Callable[[], dict[str, Any]], told: dict[str, Any], every: float) -> Iterator[Any]:
    """Who gives no answer once may do so the next time."""
    from gpu_fleet import status_view

    failure = ""
    while True:
        yield status_view.screen(told, failure)
        time.sleep(every)
        try:
            told, failure = ask(), ""
        except UNANSWERED as error:
            failure = str(error)
