"""scripts/fleet: one command line over the collection's playbooks.

Everywhere: -i INVENTORY, --json for machines; exit status 0 good, 1 something was found or failed, 2 used wrongly or
input refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gpu_fleet import runs

app = typer.Typer(
    no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, help="Run a fleet of vLLM hosts."
)

Inventory = Annotated[
    Path, typer.Option("-i", "--inventory", help="Inventory folder or file, such as inventories/prod.")
]
Limit = Annotated[str | None, typer.Option("--limit", help="Only these hosts, as ansible-playbook --limit takes them.")]
Check = Annotated[bool, typer.Option("--check", help="Say what would change, change nothing.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output, nothing else.")]


def _line(event: dict[str, Any]) -> None:
    """A line a task while a playbook runs."""
    if event["event"] == "playbook_on_task_start":
        typer.echo(f"  {event['event_data'].get('name', '')}", err=True)


def _finish(outcome: runs.Outcome, as_json: bool, text: str) -> None:
    """Print the outcome and leave with its status."""
    if as_json:
        typer.echo(json.dumps(outcome.as_dict(), indent=1))
    else:
        for failure in outcome.failures:
            typer.echo(
                failure.message if outcome.refused else f"{failure.host}: {failure.task}: {failure.message}", err=True
            )
        for host in outcome.unreachable:
            typer.echo(f"{host}: not reached; nothing was changed there", err=True)
        if not outcome.exit_status:
            typer.echo(text)
    raise typer.Exit(outcome.exit_status)


def _run(playbook: str, inventory: Path, as_json: bool, **options: Any) -> runs.Outcome:
    try:
        return runs.run(playbook, inventory, on_event=None if as_json else _line, **options)
    except FileNotFoundError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error


@app.command()
def validate(inventory: Inventory, json_: Json = False) -> None:
    """Every mistake in an inventory that can be known without touching a host."""
    outcome = _run("validate", inventory, json_)
    _finish(outcome, json_, "\n".join(outcome.summary))


@app.command()
def plan(inventory: Inventory, json_: Json = False) -> None:
    """What every service will be launched with, and why; no host is touched."""
    outcome = _run("validate", inventory, json_)
    _finish(outcome, json_, json.dumps((outcome.plan or {}).get("hosts", {}), indent=1))


@app.command()
def deploy(inventory: Inventory, limit: Limit = None, check: Check = False, json_: Json = False) -> None:
    """From bare hosts to services that answer; a second run changes nothing."""
    outcome = _run("site", inventory, json_, limit=limit, check=check)
    changes = ", ".join(f"{host} {count}" for host, count in outcome.changed.items())
    _finish(outcome, json_, "\n".join([*outcome.summary, f"changes: {changes}"]))


@app.command()
def verify(inventory: Inventory, limit: Limit = None, json_: Json = False) -> None:
    """Look at everything again, weights hashed, and say what differs; exit status 1 when something does."""
    outcome = _run("verify", inventory, json_, limit=limit, check=True)
    differ = {host: count for host, count in outcome.changed.items() if count}
    if differ and not outcome.status:
        outcome.status = 1
        outcome.failures = [
            runs.Failure(
                host,
                "verify",
                f"{count} things differ; ansible-playbook playbooks/verify.yml --check --diff shows them",
            )
            for host, count in differ.items()
        ]
    _finish(outcome, json_, "everything is as it should be")


if __name__ == "__main__":
    app()
