"""scripts/fleet drain: take replicas out of service at the gateways, and let them in again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer


def register(app: typer.Typer, run: Callable[..., Any], finish: Callable[..., None]) -> None:
    """Add the verb `drain`. run and finish are those of every verb (cli.py)."""

    @app.command()
    def drain(
        inventory: Annotated[
            Path, typer.Option("-i", "--inventory", help="Inventory folder or file, such as inventories/prod.")
        ],
        replicas: Annotated[list[str] | None, typer.Argument(help="Replicas, such as chat.0.")] = None,
        *,
        host: Annotated[list[str] | None, typer.Option("--host", help="All replicas with a part on this host.")] = None,
        admit: Annotated[bool, typer.Option("--admit", help="Let them in again, once their probe is right.")] = False,
        deadline: Annotated[
            int | None, typer.Option("--deadline", min=1, help="Seconds to wait; default: gateway_drain_deadline.")
        ] = None,
        check: Annotated[bool, typer.Option("--check", help="Say what would change, change nothing.")] = False,
        json_: Annotated[
            bool, typer.Option("--json", help="One JSON document on standard output, nothing else.")
        ] = False,
    ) -> None:
        """Give replicas no new request at any gateway, and wait for those in flight (docs/gateway.md).

        Exit status 1: it failed at a gateway. 2: used wrongly, or the inventory is refused.
        """
        if not replicas and not host:
            typer.echo("name replicas, such as chat.0, or hosts (--host)", err=True)
            raise typer.Exit(2)
        variables: dict[str, Any] = {
            "drain_instances": replicas or [],
            "drain_hosts": host or [],
            "drain_state": "admitted" if admit else "drained",
        }
        if deadline:
            variables["gateway_drain_deadline"] = deadline
        outcome = run("drain", inventory, json_, check=check, variables=variables)
        named = ", ".join([*(replicas or []), *(host or [])])
        finish(outcome, json_, f"{named} {variables['drain_state']} at every gateway")
