"""scripts/fleet teardown: take away what is left over of services, or hosts that leave the fleet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer


def register(app: typer.Typer, run: Callable[..., Any], finish: Callable[..., None]) -> None:
    """Add the verb `teardown`. run and finish are those of every verb (cli.py)."""

    @app.command()
    def teardown(
        inventory: Annotated[
            Path, typer.Option("-i", "--inventory", help="Inventory folder or file, such as inventories/prod.")
        ],
        services: Annotated[list[str] | None, typer.Argument(help="Services, such as chat.")] = None,
        *,
        limit: Annotated[
            str | None, typer.Option("--limit", help="These hosts only; without a service, all of the fleet on them.")
        ] = None,
        named: Annotated[
            bool, typer.Option("--named", help="Also what the inventory still names, which is refused else.")
        ] = False,
        weights: Annotated[bool, typer.Option("--weights", help="Also the weights that nobody uses any more.")] = False,
        check: Annotated[bool, typer.Option("--check", help="Say what would go, take nothing away.")] = False,
        json_: Annotated[
            bool, typer.Option("--json", help="One JSON document on standard output, nothing else.")
        ] = False,
    ) -> None:
        """Drain, stop and take away what the inventory names no longer, and nothing that the collection did not make (docs/change.md).

        Exit status 1: it was refused or failed on a host. 2: used wrongly, or the inventory is refused.
        """
        if not services and not limit:
            typer.echo("name services, such as chat, or hosts that leave the fleet (--limit)", err=True)
            raise typer.Exit(2)
        variables = {"teardown_services": services or [], "teardown_named": named, "teardown_weights": weights}
        outcome = run("teardown", inventory, json_, limit=limit, check=check, variables=variables)
        changes = ", ".join(f"{host} {count}" for host, count in outcome.changed.items() if count)
        finish(outcome, json_, f"{'would go' if check else 'gone'}: {changes or 'nothing, there is nothing left over'}")
