"""scripts/fleet topology: GPUs, links and what is wrong with them, of hosts or of a saved file."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gpu_fleet import saved
from gpu_fleet.verbs import Json, Limit, call, complain, finish


def register(app: typer.Typer) -> None:
    """Add the verb `topology`."""

    @app.command()
    def topology(
        *,
        inventory: Annotated[
            Path | None, typer.Option("-i", "--inventory", help="Ask the GPU hosts of this inventory.")
        ] = None,
        source: Annotated[
            Path | None,
            typer.Option(
                "--from", help="A saved `nvidia-smi topo -m`, or a saved result of gpu_facts; - reads standard input."
            ),
        ] = None,
        svg: Annotated[
            Path | None,
            typer.Option(
                "--svg", help="Draw the host into this file; for several hosts each name is added to the file's."
            ),
        ] = None,
        limit: Limit = None,
        learn: Annotated[bool, typer.Option("--learn", help="Keep what each host has, to compare with later.")] = False,
        bandwidth: Annotated[bool, typer.Option("--bandwidth", help="Measure every pair of GPUs, too.")] = False,
        json_: Json = False,
    ) -> None:
        """GPUs, links and what is wrong with them. Exit status 0 all well, 1 something was found, 2 refused."""
        if (inventory is None) == (source is None):
            typer.echo("give an inventory (-i) or a saved file (--from), one of them", err=True)
            raise typer.Exit(2)
        if source is not None and (learn or bandwidth or limit):
            typer.echo("--learn, --bandwidth and --limit ask hosts; they go with an inventory (-i)", err=True)
            raise typer.Exit(2)
        outcome = None
        if source is not None:
            hosts = {str(source): _seen(source, json_)}
        else:
            assert inventory is not None
            from gpu_fleet import api

            outcome = call(api.topology, json_, inventory, limit, learn=learn, bandwidth=bandwidth)
            if outcome.refused or not (outcome.hosts or outcome.unreachable):
                finish(outcome, json_, "no GPU host")
            hosts = {
                name: {"of": told["facts"], **{key: told[key] for key in ("findings", "recommendation", "measured")}}
                for name, told in sorted(outcome.hosts.items())
            }
        try:
            answer, found = _shown(hosts, svg, json_)
        except saved.MALFORMED as error:
            if source is None:
                raise
            saved.refuse(source, {"refused": f"this is no whole result of gpu_facts: {error!r}", "kind": "none"}, json_)
        if json_ and outcome is None:
            typer.echo(json.dumps(answer[str(source)], indent=1))
        elif json_ and outcome is not None:
            failures = [vars(failure) for failure in outcome.failures]
            typer.echo(
                json.dumps({"hosts": answer, "unreachable": outcome.unreachable, "failures": failures}, indent=1)
            )
        elif outcome is not None:
            complain(outcome)
        raise typer.Exit(1 if found or (outcome is not None and outcome.exit_status) else 0)


def _seen(source: Path, as_json: bool) -> dict[str, Any]:
    """What a saved file tells of a host, judged: the matrix of topo -m, or the result of module gpu_facts as JSON."""
    from gpu_fleet.domain import data, module_util

    topology, hardware = module_util("topology"), module_util("hardware")
    text, known = saved.text(source), data("hardware")
    facts = _facts_of(text)
    if facts is not None:
        try:
            return {
                "of": facts,
                "findings": [hardware.as_dict(found) for found in hardware.judge(facts, known, host=str(source))],
                "recommendation": hardware.recommend(facts, known),
            }
        except saved.MALFORMED as error:
            saved.refuse(
                source, {"refused": f"this is no whole result of gpu_facts: {error!r}", "kind": "none"}, as_json
            )
    try:
        table = topology.read(text)
    except topology.Refused as refused:
        answer: dict[str, Any] = {"refused": refused.reason, "kind": refused.kind}
        if refused.kind == "amd_rocm_smi":
            with contextlib.suppress(topology.Refused):
                answer.update(topology.read_amd(text))
        saved.refuse(source, answer, as_json)
    return {
        "of": table,
        "findings": [hardware.as_dict(found) for found in hardware.judge_matrix(table, known)],
        "recommendation": hardware.recommend({**hardware.EMPTY, "topology": {"matrix": text, "p2p": {}}}, known),
    }


def _drawn(told: dict[str, Any], marked: bool) -> Any:
    """The picture of a host; without links where its table cannot be read, which the findings say."""
    from gpu_fleet import picture
    from gpu_fleet.domain import module_util

    findings = [{**found, "message": found["evidence"]} for found in told["findings"]] if marked else []
    try:
        return picture.describe(told["of"], findings=findings)
    except module_util("topology").Refused:
        facts = {**told["of"], "topology": {**told["of"]["topology"], "matrix": None}}
        return picture.describe(facts, findings=findings)


def _facts_of(text: str) -> dict[str, Any] | None:
    """The facts of a host, if the text is the JSON that gpu_facts returned."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return facts if {"gpus", "topology", "driver"} <= set(facts) else None


def _shown(hosts: dict[str, dict[str, Any]], svg: Path | None, as_json: bool) -> tuple[dict[str, Any], bool]:
    """Draw and print hosts; gives them for machines, and whether anything was found."""
    from gpu_fleet import picture

    answer: dict[str, Any] = {}
    found = False
    for name, told in hosts.items():
        drawn = _drawn(told, marked=True)
        answer[name] = {
            **picture.as_json(drawn),
            "findings": told["findings"],
            "recommendation": told["recommendation"],
            "measured": told.get("measured") or [],
        }
        found |= any(finding["severity"] != "info" for finding in told["findings"])
        if svg is not None:
            into = svg if len(hosts) == 1 else svg.with_name(f"{svg.stem}-{name}{svg.suffix}")
            _write(into, picture.svg(drawn))
        if not as_json:
            _show(name, told)
    return answer, found


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        typer.echo(f"{path}: {error.strerror}", err=True)
        raise typer.Exit(2) from error


def _show(name: str, told: dict[str, Any]) -> None:
    """One host in the terminal: its table, what was found, which GPUs belong together."""
    from rich.console import Console

    from gpu_fleet import picture
    from gpu_fleet.domain import module_util

    console = Console(highlight=False)
    console.print(name, style="bold", markup=False)
    console.print(picture.table(_drawn(told, marked=False)))
    for found in told["findings"]:
        console.print(f"{found['severity']} {found['id']}: {found['evidence']}. {found['remedy']}", markup=False)
    measured = module_util("bandwidth").lines(told.get("measured") or [])
    for text in [*measured, *module_util("hardware").advice(told["recommendation"])]:
        console.print(text, markup=False)
