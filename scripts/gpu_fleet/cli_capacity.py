"""scripts/fleet capacity: how many replicas and GPUs a traffic needs, and what an API would cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verb `capacity`."""
    app.command()(capacity)


def capacity(
    source: Annotated[
        Path, typer.Option("--from", help="The input, such as docs/examples/capacity.yml; - reads standard input.")
    ],
    measured: Annotated[
        Path | None, typer.Option("--measured", help="Measured throughput, in place of what the input says.")
    ] = None,
    months: Annotated[
        int | None, typer.Option("--months", help="How many months after now; default: the input's, or 6.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on standard output, nothing else.")] = False,
) -> None:
    """Replicas and GPUs for a traffic, month by month, and an API's bill beside the fleet's.

    Exit status 0 answered, 1 the targets cannot be met, 2 the input cannot be used.
    """
    from gpu_fleet import capacity_view
    from gpu_fleet.domain import module_util

    domain = module_util("capacity")
    try:
        answer = domain.answer(capacity_view.load(source, measured), months)
    except domain.BadInput as refused:
        if json_:
            told = {"outcome": "refused", "field": refused.field, "refused": refused.reason}
            typer.echo(json.dumps(told, indent=1))
        else:
            typer.echo(f"{source}: {refused}", err=True)
        raise typer.Exit(2) from refused
    if json_:
        typer.echo(json.dumps(answer, indent=1))
    else:
        from rich.console import Console

        capacity_view.show(answer, Console(highlight=False))
    raise typer.Exit(0 if answer["outcome"] == "answered" else 1)
