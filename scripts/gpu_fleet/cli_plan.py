"""scripts/fleet plan: what every service will be launched with, or a saved launch judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from gpu_fleet import saved
from gpu_fleet.verbs import Json, call, finish


def register(app: typer.Typer) -> None:
    """Add the verb `plan`."""

    @app.command()
    def plan(
        *,
        inventory: Annotated[
            Path | None, typer.Option("-i", "--inventory", help="Plan the services of this inventory.")
        ] = None,
        source: Annotated[
            Path | None,
            typer.Option("--from", help="Judge one launch, a YAML file; - reads standard input (docs/plan.md)."),
        ] = None,
        ask_hosts: Annotated[
            bool,
            typer.Option(
                "--ask-hosts", help="Ask the hosts, too, what the inventory no longer names (docs/change.md)."
            ),
        ] = False,
        json_: Json = False,
    ) -> None:
        """What every service will be launched with, and why; no host is touched.

        Exit status 1: a saved launch cannot work, or a host has something left over. 2: the inventory is refused, or the file is no launch.
        """
        if (inventory is None) == (source is None):
            typer.echo("give an inventory (-i) or a launch (--from), one of them", err=True)
            raise typer.Exit(2)
        if source is not None:
            _judge_launch(source, json_)
        assert inventory is not None
        from gpu_fleet import api

        outcome = call(api.plan, json_, inventory, ask_hosts=ask_hosts)
        if json_ or (outcome.exit_status and not outcome.left_over):
            finish(outcome, json_, "")
        from rich.console import Console

        from gpu_fleet import plan_view

        console, replicas = Console(highlight=False), (outcome.plan or {}).get("replicas", {})
        console.print("\n".join(outcome.summary), markup=False)
        rows = {name: replica["memory"] for name, replica in replicas.items() if replica.get("memory")}
        if rows:
            console.print(plan_view.table(rows))
        for name, replica in replicas.items():
            for reason in replica["reasons"]:
                console.print(f"{name}: {reason}", markup=False)
        for failure in outcome.failures:
            console.print(f"{failure.host}: {failure.message}", markup=False)
        raise typer.Exit(outcome.exit_status)


def _judge_launch(source: Path, as_json: bool) -> NoReturn:
    """Judge a saved launch: outcome, findings, memory, and what would be chosen for what it leaves open."""
    import yaml

    from gpu_fleet.domain import module_util, plugin_util

    launch_plan = module_util("launch_plan")
    try:
        launch = yaml.safe_load(saved.text(source))
    except (yaml.YAMLError, RecursionError) as error:
        where = " ".join(str(error).split())
        saved.refuse(source, {"refused": f"this is no YAML: {where}"}, as_json)
    if not isinstance(launch, dict):
        saved.refuse(
            source, {"refused": "this is no launch: a mapping with gpus, model_config and vllm_version is"}, as_json
        )
    known = plugin_util("launches").known()
    verdict = launch_plan.judge(launch, known)
    if any(finding.rule == "launch" for finding in verdict.findings):
        saved.refuse(source, {"refused": "; ".join(f.message for f in verdict.findings if f.rule == "launch")}, as_json)
    chosen = launch_plan.choose(launch, known)
    if as_json:
        typer.echo(json.dumps({**verdict.as_dict(), "plan": chosen.as_dict()}, indent=1))
    else:
        _show_launch(source, verdict, chosen)
    raise typer.Exit(1 if verdict.outcome == "error" else 0)


def _show_launch(source: Path, verdict: Any, chosen: Any) -> None:
    from rich.console import Console

    from gpu_fleet import plan_view

    console = Console(highlight=False)
    console.print(plan_view.table({source.stem: verdict.memory}))
    for finding in verdict.findings:
        style = plan_view.MARKS[finding.severity]
        console.print(f"{finding.severity} {finding.rule}: {finding.message} {finding.fix}", style=style, markup=False)
    for choice in chosen.choices:
        console.print(f"--{choice.flag} {choice.value}: {choice.reason}", markup=False)
    console.print(f"outcome: {verdict.outcome}", style=plan_view.MARKS[verdict.outcome])
