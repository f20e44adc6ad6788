"""scripts/fleet bundle: one archive for a report of a fault."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verb `bundle`."""
    app.command()(bundle)


def bundle(
    inventory: Annotated[Path, typer.Option("-i", "--inventory", help="Collect from every host of this fleet.")],
    into: Annotated[
        Path | None, typer.Option("--into", help="The archive to write; default: fleet-case-DATE.tar.gz here.")
    ] = None,
    since: Annotated[
        str, typer.Option("--since", help="How far back, as `journalctl --since` takes it; default: since boot.")
    ] = "",
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on standard output, nothing else.")] = False,
) -> None:
    """Journals, plans, topology, state and the doctor's findings of every host in one archive, secrets and addresses replaced.

    Exit status 1: a host was not reached (the archive has the others). 2: used wrongly, refused, or nobody answered.
    """
    from gpu_fleet import archive as maker
    from gpu_fleet import collect

    path = into or Path(f"fleet-case-{time.strftime('%Y-%m-%d-%H%M%S')}.tar.gz")
    if path.exists():
        typer.echo(f"{path} is there already; name another file with --into", err=True)
        raise typer.Exit(2)
    try:
        case = collect.collect(inventory, since)
    except FileNotFoundError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    if case.silence or not case.evidence:
        for line in case.silence:
            typer.echo(line, err=True)
        raise typer.Exit(2)
    files = maker.of(case)
    try:
        maker.write(path, files)
    except OSError as error:
        typer.echo(f"{path}: {error.strerror}", err=True)
        raise typer.Exit(2) from error
    if json_:
        typer.echo(json.dumps({"archive": str(path), "files": list(files), "unreachable": case.outcome.unreachable}))
    else:
        typer.echo(f"{path}: {len(files)} files; index.md in it says what they are")
        for host in case.outcome.unreachable:
            typer.echo(f"{host}: not reached. {case.outcome.why_unreachable.get(host, '')}".rstrip(), err=True)
    raise typer.Exit(1 if case.outcome.unreachable else 0)
