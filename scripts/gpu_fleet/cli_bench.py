"""scripts/fleet bench and report: put load on a service, judge it, and show what came of it."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

WAITING = "Wait for the runs"
KEPT = "Keep the document, and what the capacity table reads"


def register(app: typer.Typer, run: Callable[..., Any], finish: Callable[..., NoReturn]) -> None:
    """Add the verbs `bench` and `report`. run and finish are those of every verb (verbs.py)."""

    @app.command()
    def bench(
        inventory: Annotated[
            Path, typer.Option("-i", "--inventory", help="Inventory folder or file, such as inventories/prod.")
        ],
        service: Annotated[str, typer.Argument(help="A service; of several one has to be named.")] = "",
        *,
        replica: Annotated[str, typer.Option("--replica", help="This replica, such as chat.1.")] = "",
        url: Annotated[
            str, typer.Option("--url", help="Through this address, a gateway's say; needs accept_key.")
        ] = "",
        input_tokens: Annotated[
            int | None, typer.Option("--input-tokens", min=1, help="Tokens of each prompt; default 512.")
        ] = None,
        output_tokens: Annotated[
            int | None, typer.Option("--output-tokens", min=1, help="Tokens of each answer; default 128.")
        ] = None,
        prompts: Annotated[
            Path | None, typer.Option("--prompts", help='Your own, JSONL with a line such as {"prompt": "..."} each.')
        ] = None,
        concurrency: Annotated[
            list[int] | None, typer.Option("--concurrency", min=1, help="Requests at once; give it once a load.")
        ] = None,
        rate: Annotated[
            list[float] | None, typer.Option("--rate", help="Open load in requests/s; give it once a load.")
        ] = None,
        repeats: Annotated[
            int | None, typer.Option("--repeats", min=1, help="How often each load is measured; default 3.")
        ] = None,
        budget: Annotated[
            float | None, typer.Option("--budget", min=1, help="Seconds; no repeat begins beyond; default 360.")
        ] = None,
        peak: Annotated[
            float | None, typer.Option("--peak", help="Requests/s at peak that the replicas are counted for.")
        ] = None,
        rebase: Annotated[
            bool, typer.Option("--rebase", help="Take the answers as right, whatever they were.")
        ] = False,
        json_: Annotated[
            bool, typer.Option("--json", help="One JSON document on standard output, nothing else.")
        ] = False,
    ) -> None:
        """Measure a service under load and judge it; a report is kept beside the inventory (docs/acceptance.md).

        Exit status 0 accepted, 1 a verdict failed or it could not be measured, 2 used wrongly or the inventory is refused.
        """
        settings: dict[str, Any] = {
            "service": service,
            "replica": replica,
            "url": url,
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
            "prompts": str(prompts.expanduser().resolve()) if prompts else "",
            "concurrencies": concurrency or [],
            "rates": rate or [],
            "repeats": repeats,
            "budget": budget,
            "rebase": rebase,
            "requests_per_second": peak,
        }
        # What is not said here is the inventory's to say.
        given = {f"accept_{name}": value for name, value in settings.items() if value}
        outcome, run_file = _measure(partial(run, "accept", inventory, True, variables=given), quiet=json_)
        if run_file is None:
            finish(outcome, json_, "")
        told = _read(run_file)
        page = _write_page(run_file.parent, told)
        if json_:
            typer.echo(json.dumps(told, indent=1))
        else:
            from gpu_fleet.domain import module_util

            typer.echo("\n".join([*module_util("bench_document").lines(told), f"report: {page}"]))
        raise typer.Exit(outcome.exit_status)

    @app.command()
    def report(
        source: Annotated[
            Path | None, typer.Argument(help="A kept run (JSON); else the last of the inventory's.")
        ] = None,
        *,
        inventory: Annotated[Path | None, typer.Option("-i", "--inventory", help="Take its last run.")] = None,
        service: Annotated[str, typer.Option("--service", help="Of this service.")] = "",
        against: Annotated[
            Path | None, typer.Option("--against", help="Compare with this run, not with the one before.")
        ] = None,
        out: Annotated[Path | None, typer.Option("--out", help="Write the page here; else beside the run.")] = None,
        serve: Annotated[
            int | None,
            typer.Option("--serve", min=0, max=65535, help="Serve it on this port of 127.0.0.1; 0 picks one."),
        ] = None,
        open_: Annotated[bool, typer.Option("--open", help="Open it in a browser of this machine.")] = False,
        json_: Annotated[
            bool, typer.Option("--json", help="The run as JSON on standard output, nothing else.")
        ] = False,
    ) -> None:
        """The page of an acceptance: written, opened, or served. Exit status 2: there is no such run."""
        if (source is None) == (inventory is None):
            _stop("give a run (a JSON file) or an inventory (-i), one of them")
        path = source or _last(_folder(inventory), service)
        told = _read(path)
        if against is not None:
            from gpu_fleet.domain import module_util

            told["differences"] = module_util("bench_compare").compare(_read(against), told)
        if json_:
            typer.echo(json.dumps(told, indent=1))
            raise typer.Exit(0)
        page = _write_page(path.parent, told, out)
        typer.echo(str(page))
        if open_:
            import webbrowser

            webbrowser.open(page.resolve().as_uri())
        if serve is not None:
            _serve(page, serve)


def _stop(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(2)


def _folder(inventory: Path | None) -> Path:
    """Where playbooks/accept.yml keeps runs: beside the inventory, as Ansible's inventory_dir has it."""
    assert inventory is not None
    return (inventory if inventory.is_dir() else inventory.parent) / ".acceptance"


def _last(folder: Path, service: str) -> Path:
    runs = sorted(folder.glob(f"{service or '*'}/*Z.json"), key=lambda path: path.name)
    if not runs:
        _stop(f"{folder} has no run{f' of {service}' if service else ''}; scripts/fleet bench makes one")
    return runs[-1]


def _read(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        _stop(f"{path}: {error}")
    if not isinstance(told, dict) or not {"verdicts", "points", "knee"} <= set(told):
        _stop(f"{path} is no acceptance; scripts/fleet bench writes one")
    return told


def _write_page(folder: Path, told: dict[str, Any], out: Path | None = None) -> Path:
    from gpu_fleet import report

    path = out or folder / f"{told['name']}.html"
    try:
        path.write_text(report.page(told), encoding="utf-8")
    except OSError as error:
        _stop(f"{path}: {error.strerror}")
    return path


def _measure(run: Callable[..., Any], quiet: bool) -> tuple[Any, Path | None]:
    """Run the playbook with a bar; its outcome, and the file of the document once there is one."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    kept: list[Path] = []
    console = Console(stderr=True, quiet=quiet)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        shown = bar.add_task("getting ready", total=1)

        def watch(event: Any) -> None:
            told = (event.raw.get("event_data") or {}).get("res") or {}
            if event.task == KEPT and str(told.get("dest", "")).endswith(".json"):
                kept.append(Path(told["dest"]))
            elif event.task == WAITING:
                state = progress(told)
                if state:
                    bar.update(shown, description=state[0], completed=state[1], total=state[2])
            elif event.kind == "task":
                bar.update(shown, description=event.task)

        outcome = run(on_event=watch)
    return outcome, kept[-1] if kept else None


def progress(result: dict[str, Any]) -> tuple[str, int, int] | None:
    """What runs now, how many runs are done, and of how many, from a look at progress.json (slurp)."""
    try:
        state = json.loads(base64.b64decode(result["content"]))
        return state.get("now") or "done", len(state["runs"]), max(state["expected"], 1)
    except (KeyError, TypeError, ValueError):
        return None


def _serve(page: Path, port: int) -> None:
    """Serve one file on loopback until it is interrupted."""
    import http.server

    body = page.read_bytes()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Nobody asked for a line a request."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        typer.echo(f"http://127.0.0.1:{server.server_address[1]}/ until you end it (Ctrl-C)", err=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            raise typer.Exit(0) from None
