"""scripts/fleet: one command line over the collection's playbooks.

Everywhere: -i INVENTORY, --json for machines; exit status 0 good, 1 something was found or failed, 2 used wrongly or
input refused.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from gpu_fleet import cli_bundle, cli_capacity, cli_doctor, cli_drain, cli_status, runs

app = typer.Typer(
    no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, help="Run a fleet of vLLM hosts."
)

# What reading a document of another shape raises.
MALFORMED = (KeyError, TypeError, AttributeError, ValueError, IndexError)

Inventory = Annotated[
    Path, typer.Option("-i", "--inventory", help="Inventory folder or file, such as inventories/prod.")
]
Limit = Annotated[str | None, typer.Option("--limit", help="Only these hosts, as ansible-playbook --limit takes them.")]
Check = Annotated[bool, typer.Option("--check", help="Say what would change, change nothing.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output, nothing else.")]


_SAID: set[str] = set()


def _line(event: dict[str, Any]) -> None:
    """A line a task while a playbook runs, once it has run somewhere: skipped ones say nothing."""
    told = event.get("event_data", {})
    if event["event"] in ("runner_on_ok", "runner_on_failed") and told.get("task_uuid") not in _SAID:
        _SAID.add(told.get("task_uuid"))
        typer.echo(f"  {told.get('task', '')}", err=True)


def _finish(outcome: runs.Outcome, as_json: bool, text: str) -> None:
    """Print the outcome and leave with its status."""
    if as_json:
        typer.echo(json.dumps(outcome.as_dict(), indent=1))
    else:
        _complain(outcome)
        if not outcome.exit_status:
            typer.echo(text)
    raise typer.Exit(outcome.exit_status)


def _complain(outcome: runs.Outcome) -> None:
    """Every failure and every host that was not reached, a line each."""
    for failure in outcome.failures:
        where = f"{failure.host}: {failure.task}: " if failure.host and not outcome.refused else ""
        typer.echo(f"{where}{failure.message}", err=True)
    for host in outcome.unreachable:
        typer.echo(
            f"{host}: not reached; nothing was changed there. {outcome.why_unreachable.get(host, '')}".rstrip(),
            err=True,
        )


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
def plan(
    *,
    inventory: Annotated[
        Path | None, typer.Option("-i", "--inventory", help="Plan the services of this inventory.")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Judge one launch, a YAML file; - reads standard input (docs/plan.md)."),
    ] = None,
    json_: Json = False,
) -> None:
    """What every service will be launched with, and why; no host is touched.

    Exit status 1: a saved launch cannot work. 2: the inventory is refused, or the file is no launch.
    """
    if (inventory is None) == (source is None):
        typer.echo("give an inventory (-i) or a launch (--from), one of them", err=True)
        raise typer.Exit(2)
    if source is not None:
        _judge_launch(source, json_)
    assert inventory is not None
    outcome = _run("validate", inventory, json_, variables={"validate_ask_hub": True})
    if json_ or outcome.exit_status:
        _finish(outcome, json_, "")
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
    raise typer.Exit(0)


def _judge_launch(source: Path, as_json: bool) -> NoReturn:
    """Judge a saved launch: outcome, findings, memory, and what would be chosen for what it leaves open."""
    import yaml

    from gpu_fleet.domain import module_util, plugin_util

    launch_plan = module_util("launch_plan")
    try:
        launch = yaml.safe_load(_saved(source))
    except (yaml.YAMLError, RecursionError) as error:
        where = " ".join(str(error).split())
        _refuse(source, {"refused": f"this is no YAML: {where}"}, as_json)
    if not isinstance(launch, dict):
        _refuse(
            source, {"refused": "this is no launch: a mapping with gpus, model_config and vllm_version is"}, as_json
        )
    known = plugin_util("launches").known()
    verdict = launch_plan.judge(launch, known)
    if any(finding.rule == "launch" for finding in verdict.findings):
        _refuse(source, {"refused": "; ".join(f.message for f in verdict.findings if f.rule == "launch")}, as_json)
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
        shows = f".venv/bin/ansible-playbook playbooks/verify.yml -i {inventory} --check --diff shows how"
        outcome.failures = [
            runs.Failure(host, "verify", f"{'; '.join(outcome.differing.get(host, [])) or count} differ. {shows}")
            for host, count in differ.items()
        ]
    _finish(outcome, json_, "everything is as it should be")


@app.command()
def upgrade(
    inventory: Inventory,
    to: Annotated[str, typer.Option("--to", help="Release of vLLM, such as 0.32.0 (docs/releases.md).")],
    limit: Limit = None,
    check: Check = False,
    json_: Json = False,
) -> None:
    """Another release of vLLM, one replica after the other; what goes wrong goes back, and the run stops (docs/change.md)."""
    outcome = _run("upgrade", inventory, json_, limit=limit, check=check, variables={"vllm_runtime_version": to})
    _finish(outcome, json_, "\n".join(outcome.summary))


@app.command()
def rollback(
    inventory: Inventory,
    service: Annotated[str, typer.Option("--service", help="This service only.")] = "",
    limit: Limit = None,
    check: Check = False,
    json_: Json = False,
) -> None:
    """Back to what each replica ran before its last change, whole, one replica after the other (docs/change.md)."""
    outcome = _run("rollback", inventory, json_, limit=limit, check=check, variables={"vllm_service_rollback": service})
    _finish(outcome, json_, "\n".join(outcome.summary))


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
    variables = {"mirror_folder": str(into.expanduser().resolve()) if into else ""}
    outcome = _run("mirror", inventory, json_, check=check, variables=variables)
    _finish(outcome, json_, "\n".join(outcome.summary))


def _saved(source: Path) -> str:
    """The text of a saved matrix, - for standard input."""
    try:
        raw = sys.stdin.buffer.read() if str(source) == "-" else source.read_bytes()
    except OSError as error:
        typer.echo(f"{source}: {error.strerror}", err=True)
        raise typer.Exit(2) from error
    wide = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # what a redirection of PowerShell writes
    return raw.decode("utf-16" if wide else "utf-8-sig", errors="replace")


def _seen(source: Path, as_json: bool) -> dict[str, Any]:
    """What a saved file tells of a host, judged: the matrix of topo -m, or the result of module gpu_facts as JSON."""
    from gpu_fleet.domain import data, module_util

    topology, hardware = module_util("topology"), module_util("hardware")
    text, known = _saved(source), data("hardware")
    facts = _facts_of(text)
    if facts is not None:
        try:
            return {
                "of": facts,
                "findings": [hardware.as_dict(found) for found in hardware.judge(facts, known, host=str(source))],
                "recommendation": hardware.recommend(facts, known),
            }
        except MALFORMED as error:
            _refuse(source, {"refused": f"this is no whole result of gpu_facts: {error!r}", "kind": "none"}, as_json)
    try:
        table = topology.read(text)
    except topology.Refused as refused:
        answer: dict[str, Any] = {"refused": refused.reason, "kind": refused.kind}
        if refused.kind == "amd_rocm_smi":
            with contextlib.suppress(topology.Refused):
                answer.update(topology.read_amd(text))
        _refuse(source, answer, as_json)
    return {
        "of": table,
        "findings": [hardware.as_dict(found) for found in hardware.judge_matrix(table, known)],
        "recommendation": hardware.recommend({**hardware.EMPTY, "topology": {"matrix": text, "p2p": {}}}, known),
    }


def _refuse(source: Path, answer: dict[str, Any], as_json: bool) -> NoReturn:
    """Say why a saved file is not taken, and leave with 2."""
    typer.echo(json.dumps(answer, indent=1) if as_json else f"{source}: {answer['refused']}", err=not as_json)
    raise typer.Exit(2)


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
        typer.Option("--svg", help="Draw the host into this file; for several hosts each name is added to the file's."),
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
        variables = {"gpu_topology_fail_on": "never", "gpu_topology_learn": learn, "gpu_topology_bandwidth": bandwidth}
        outcome = _run("topology", inventory, json_, limit=limit, variables=variables)
        if outcome.refused or not (outcome.hosts or outcome.unreachable):
            _finish(outcome, json_, "no GPU host")
        hosts = {
            name: {"of": told["facts"], **{key: told[key] for key in ("findings", "recommendation", "measured")}}
            for name, told in sorted(outcome.hosts.items())
        }
    try:
        answer, found = _shown(hosts, svg, json_)
    except MALFORMED as error:
        if source is None:
            raise
        _refuse(source, {"refused": f"this is no whole result of gpu_facts: {error!r}", "kind": "none"}, json_)
    if json_ and outcome is None:
        typer.echo(json.dumps(answer[str(source)], indent=1))
    elif json_ and outcome is not None:
        failures = [vars(failure) for failure in outcome.failures]
        typer.echo(json.dumps({"hosts": answer, "unreachable": outcome.unreachable, "failures": failures}, indent=1))
    elif outcome is not None:
        _complain(outcome)
    raise typer.Exit(1 if found or (outcome is not None and outcome.exit_status) else 0)


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


cli_bundle.register(app)
cli_capacity.register(app)
cli_doctor.register(app)
cli_drain.register(app, _run, _finish)
cli_status.register(app)

if __name__ == "__main__":
    app(prog_name="scripts/fleet")
