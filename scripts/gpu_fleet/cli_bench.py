"""scripts/fleet bench, report and tune: put load on a service, judge it, show what came of it, try other settings."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from gpu_fleet.verbs import needed

WAITING = "Wait for the runs"


def register(app: typer.Typer, run: Callable[..., Any], finish: Callable[..., NoReturn]) -> None:
    """Add the verbs `bench`, `report` and `tune`. run and finish are those of every verb (verbs.py)."""

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
        from gpu_fleet import acceptances

        # What is not said here is the inventory's to say.
        given = {f"accept_{name}": value for name, value in settings.items() if value}
        needed(inventory, json_)
        outcome, run_file = _measure(partial(run, "accept", inventory, True, variables=given), quiet=json_)
        if run_file is None:
            finish(outcome, json_, "")
        told = acceptances.read(run_file)
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
        if inventory is not None:
            needed(inventory, json_)
        from gpu_fleet import acceptances

        try:
            path = source or acceptances.last(acceptances.folder(inventory or Path()), service)
            told = acceptances.compared(acceptances.read(path), against)
        except ValueError as error:
            _stop(str(error))
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

    @app.command()
    def tune(
        inventory: Annotated[
            Path, typer.Option("-i", "--inventory", help="Inventory folder or file, such as inventories/prod.")
        ],
        service: Annotated[str, typer.Argument(help="A service; its last replica is tried on.")],
        *,
        only: Annotated[
            list[str] | None,
            typer.Option("--only", help="This setting alone, such as max-num-seqs; several may follow."),
        ] = None,
        budget: Annotated[float, typer.Option("--budget", min=1, help="Seconds for all of it.")] = 1800,
        yes: Annotated[bool, typer.Option("--yes", help="Start the replica anew for each without asking.")] = False,
        one_gpu: Annotated[
            bool, typer.Option("--one-gpu", help="Only measure it with one GPU, for the verdict on scaling.")
        ] = False,
        put_back: Annotated[
            bool, typer.Option("--put-back", help="Only have it serve as before a run that was cut short.")
        ] = False,
        json_: Annotated[
            bool, typer.Option("--json", help="One JSON document on standard output, nothing else.")
        ] = False,
    ) -> None:
        """Try a small set of settings on one replica, drained at the gateways meanwhile, and offer the best (docs/acceptance.md).

        Exit status 0 tried, whether something is better or not; 1 it does not serve as before, or one GPU does not serve it; 2 refused, nothing changed.
        """
        needed(inventory, json_)
        if put_back:
            _put_back(run, inventory, service, json_)
        asked = {"only": only or [], "one_gpu": one_gpu, "budget": budget, "yes": yes}
        _tune(run, inventory, service, asked, as_json=json_)


def _stop(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(2)


def _play(run: Callable[..., Any], inventory: Path, as_json: bool) -> Callable[..., Any]:
    """Plays a playbook as a tuning asks for it; that of the plan is not shown."""

    def play(playbook: str, limit: str | None, variables: Any, check: bool) -> Any:
        quiet = as_json or playbook == "validate"
        return run(playbook, inventory, quiet, limit=limit, variables=variables, check=check)

    return play


def _said(as_json: bool) -> Callable[[str], None]:
    return lambda line: None if as_json else typer.echo(line, err=True)


def _put_back(run: Callable[..., Any], inventory: Path, service: str, as_json: bool) -> NoReturn:
    """Only repair what a run that was cut short left."""
    from gpu_fleet import kept, tuned, tuning

    try:
        there = tuned.put_back(_play(run, inventory, as_json), inventory, service, _said(as_json))
    except kept.Busy as busy:
        _stop(str(busy))
    except tuning.NotBack as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    text = "serves as before" if there else "nothing to put back: no run was cut short"
    typer.echo(json.dumps({"service": service, "put_back": there}) if as_json else f"{service}: {text}")
    raise typer.Exit(0)


def _tune(run: Callable[..., Any], inventory: Path, service: str, asked: dict[str, Any], *, as_json: bool) -> None:
    from gpu_fleet import kept, tuned, tuning

    wanted = tuned.Asked(asked["only"], asked["budget"], asked["one_gpu"])
    try:
        prepared = tuned.prepare(_play(run, inventory, as_json), inventory, service, wanted, said=_said(as_json))
        if not asked["yes"]:
            _ask(prepared)
        trials = prepared.run()
    except (tuning.Refused, kept.Busy) as refused:
        _stop(str(refused))
    except tuning.NotBack as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    except tuning.Interrupted:
        typer.echo("interrupted; it serves as before", err=True)
        raise typer.Exit(130) from None
    if wanted.one_gpu:
        _say_one_gpu(service, trials[0], as_json)
    best = tuned.judge(trials)
    path, found = tuned.keep(prepared, trials, best)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        typer.echo("\n".join([*tuning.lines(trials, best, service), f"kept: {path}"]))


def _say_one_gpu(service: str, trial: Any, as_json: bool) -> NoReturn:
    """What one GPU does; the run is kept, and the next acceptance judges by it."""
    from gpu_fleet import tuning

    if as_json:
        typer.echo(json.dumps(trial.told(), indent=1))
    else:
        typer.echo(tuning.lines([trial], None, service)[0])
        if trial.document:
            typer.echo(f"kept as a run; scripts/fleet bench {service} now judges its scaling. It serves as before.")
    raise typer.Exit(0 if trial.document else 1)


def _ask(prepared: Any) -> None:
    """Nothing is changed without a yes."""
    from gpu_fleet import tuning

    away = prepared.trying.gateways
    meanwhile = "out of service at the gateways meanwhile" if away else "no gateway takes it out of service"
    names = "; ".join(tuning.label(one) for one in prepared.tried if one.args)
    typer.echo(
        f"{prepared.replica} on {', '.join(prepared.hosts)} is started anew for each of: {names} ({meanwhile}).",
        err=True,
    )
    if not typer.confirm("Go on?", err=True):
        _stop("Nothing was changed")


def _write_page(folder: Path, told: dict[str, Any], out: Path | None = None) -> Path:
    from gpu_fleet import report_page

    path = out or folder / f"{told['name']}.html"
    try:
        path.write_text(report_page.page(told), encoding="utf-8")
    except OSError as error:
        _stop(f"{path}: {error.strerror}")
    except (AttributeError, KeyError, TypeError) as error:
        _stop(f"the run {told['name']} is not whole ({error!r}); scripts/fleet bench makes another one")
    return path


def _measure(run: Callable[..., Any], quiet: bool) -> tuple[Any, Path | None]:
    """Run the playbook with a bar; its outcome, and the file of the document once there is one."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from gpu_fleet import acceptances

    kept: list[Path] = []
    console = Console(stderr=True, quiet=quiet)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        shown = bar.add_task("getting ready", total=1)

        def watch(event: Any) -> None:
            written = acceptances.kept_by(event)
            if written:
                kept.append(written)
            elif event.task == WAITING:
                state = progress((event.raw.get("event_data") or {}).get("res") or {})
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
