"""scripts/fleet: one command line over the collection's playbooks.

Everywhere: -i INVENTORY, --json for machines; exit status 0 good, 1 something was found or failed, 2 used wrongly or
input refused, 130 interrupted.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from gpu_fleet import (
    cli_bench,
    cli_bundle,
    cli_capacity,
    cli_doctor,
    cli_drain,
    cli_plan,
    cli_status,
    cli_teardown,
    cli_topology,
)
from gpu_fleet.places import NoCollection
from gpu_fleet.verbs import Check, Inventory, Json, Limit, Profile, Verbs, call, finish, program, run

COMPLETE = "_FLEET_COMPLETE"  # set by the shell that asks for words

# Plain help: what draws panels takes half of the time that --help has.
app = Verbs(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="Run a fleet of vLLM hosts.",
    epilog="Exit status: 0 good, 1 something was found or failed, 2 used wrongly or input refused, 130 interrupted. "
    "scripts/fleet VERB --help has an example each; docs/cli.md has all of them.",
)


@app.command()
def validate(inventory: Inventory, json_: Json = False) -> None:
    """Every mistake in an inventory that can be known without touching a host."""
    from gpu_fleet import api

    outcome = call(api.validate, json_, inventory)
    finish(outcome, json_, "\n".join(outcome.summary))


cli_plan.register(app)


@app.command()
def deploy(
    inventory: Inventory, limit: Limit = None, check: Check = False, profile: Profile = False, json_: Json = False
) -> None:
    """From bare hosts to services that answer; a second run changes nothing."""
    from gpu_fleet import api

    outcome = call(api.deploy, json_, inventory, limit, check=check)
    changes = ", ".join(f"{host} {count}" for host, count in outcome.changed.items())
    finish(outcome, json_, "\n".join([*outcome.summary, f"changes: {changes}"]), profile)


@app.command()
def verify(inventory: Inventory, limit: Limit = None, profile: Profile = False, json_: Json = False) -> None:
    """Look at everything again, weights hashed, and say what differs; exit status 1 when something does."""
    from gpu_fleet import api

    finish(call(api.verify, json_, inventory, limit), json_, "everything is as it should be", profile)


@app.command()
def upgrade(
    inventory: Inventory,
    to: Annotated[str, typer.Option("--to", help="Release of vLLM, such as 0.32.0 (docs/releases.md).")],
    *,
    limit: Limit = None,
    check: Check = False,
    profile: Profile = False,
    json_: Json = False,
) -> None:
    """Another release of vLLM, one replica after the other; what goes wrong goes back, and the run stops (docs/change.md)."""
    from gpu_fleet import api

    outcome = call(api.upgrade, json_, inventory, to, limit, check=check)
    finish(outcome, json_, "\n".join(outcome.summary), profile)


@app.command()
def rollback(
    inventory: Inventory,
    service: Annotated[str, typer.Option("--service", help="This service only.")] = "",
    *,
    limit: Limit = None,
    check: Check = False,
    profile: Profile = False,
    json_: Json = False,
) -> None:
    """Back to what each replica ran before its last change, whole, one replica after the other (docs/change.md)."""
    from gpu_fleet import api

    outcome = call(api.rollback, json_, inventory, service, limit, check=check)
    finish(outcome, json_, "\n".join(outcome.summary), profile)


cli_drain.register(app, run, finish)
cli_teardown.register(app, run, finish)
cli_bench.register(app, run, finish)


@app.command()
def mirror(
    inventory: Inventory,
    into: Annotated[
        Path | None,
        typer.Option("--into", help="Fetch into this folder what it lacks; without it everything is listed only."),
    ] = None,
    check: Check = False,
    json_: Json = False,
) -> None:
    """Every package, wheel and model that the fleet needs, in one folder for a site without a way out (docs/airgap.md).

    Exit status 1: something could not be had. 2: the inventory is refused.
    """
    from gpu_fleet import api

    outcome = call(api.mirror, json_, inventory, into, check=check)
    finish(outcome, json_, "\n".join(outcome.summary))


for module in (cli_topology, cli_status, cli_doctor, cli_bundle, cli_capacity):
    module.register(app)


@app.command()
def completion(shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="Whose words.")]) -> None:
    """Print what makes a shell complete verbs and options of `fleet` and `scripts/fleet`; source it from its profile."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # typer's own, re-exported

    typer.echo(get_completion_script(prog_name="fleet", complete_var=COMPLETE, shell=shell))


def main() -> None:
    """The command `fleet` and scripts/fleet."""
    if COMPLETE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
    try:
        app(prog_name=program(), complete_var=COMPLETE)
    except NoCollection as missing:
        typer.echo(str(missing), err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
