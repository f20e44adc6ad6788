"""scripts/fleet doctor: the first cause in a fleet or in recorded logs, or what keeps a client from an endpoint."""

from __future__ import annotations

import gzip
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

JOURNAL_FILE = b"LPKSHHRH"  # systemd, docs/JOURNAL_FILE_FORMAT.md
GZIP = b"\x1f\x8b"
LONGEST_LINE = 1 << 20


def register(app: typer.Typer) -> None:
    """Add the verb `doctor`."""
    app.command()(doctor)


def doctor(
    *,
    inventory: Annotated[
        Path | None,
        typer.Option("-i", "--inventory", help="Look at every host of this fleet; nothing is changed there."),
    ] = None,
    since: Annotated[
        str,
        typer.Option("--since", help="With -i, how far back, as `journalctl --since` takes it; default: since boot."),
    ] = "",
    sources: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            help="A log: plain, `journalctl -o short-iso` or `-o json`; - reads standard input. Several may follow.",
        ),
    ] = None,
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]...", help="Further logs, of other hosts.")
    ] = None,
    facts: Annotated[
        Path | None, typer.Option("--facts", help="What module gpu_facts returned for the host, as JSON.")
    ] = None,
    vllm: Annotated[str | None, typer.Option("--vllm", help="Version of vLLM, where the logs do not say it.")] = None,
    endpoint: Annotated[str | None, typer.Option("--endpoint", help="Play a client of this base URL instead.")] = None,
    key_file: Annotated[
        Path | None, typer.Option("--key-file", help="File whose first line is the client's key.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Name that the client asks for; default: the first that is served.")
    ] = None,
    authority: Annotated[
        Path | None, typer.Option("--ca", help="Certificate authority of the endpoint, a PEM file.")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds that the endpoint has for an answer.")
    ] = 30.0,
    parallel: Annotated[
        int, typer.Option("--parallel", min=1, max=512, help="Requests at once, as the client's pool would make them.")
    ] = 16,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on standard output, nothing else.")] = False,
) -> None:
    """Why it does not start, died, or does not answer: the first cause, its line, what to do, what cannot be told.

    Exit status 0 nothing found, 1 something was found, 2 used wrongly or nothing readable.
    """
    files = [*(sources or []), *(more or [])]
    if sum(map(bool, (inventory, files, endpoint))) != 1:
        _stop("give a fleet (-i INVENTORY), logs (--from FILE ...) or an endpoint (--endpoint URL), one of them")
    if since and not inventory:
        _stop("--since goes with -i")
    if inventory and (key_file or model or authority or facts or vllm):
        _stop("--key-file, --model and --ca go with --endpoint, --facts and --vllm with logs")
    if inventory:
        answer = _fleet(inventory, since)
    elif endpoint:
        answer = _play(endpoint, key_file, authority, model=model, timeout=timeout, parallel=parallel)
    elif key_file or model or authority:
        _stop("--key-file, --model and --ca go with --endpoint")
    else:
        answer = _read(files, facts, vllm)
    if json_:
        typer.echo(json.dumps(answer, indent=1))
    else:
        _show(answer)
    raise typer.Exit(1 if answer["findings"] else 0)


def _stop(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(2)


# --- a fleet -----------------------------------------------------------------------------------------------------------


def _fleet(inventory: Path, since: str) -> dict[str, Any]:
    from gpu_fleet import collect

    try:
        case = collect.collect(inventory, since)
    except FileNotFoundError as error:
        _stop(str(error))
    if case.silence or not case.evidence:
        _stop("\n".join(case.silence))
    return collect.examine(case)


# --- logs -------------------------------------------------------------------------------------------------------------


def _read(files: list[Path], facts: Path | None, vllm: str | None) -> dict[str, Any]:
    from gpu_fleet.domain import plugin_util

    known: dict[str, dict[str, Any]] = {"": _known(facts)}
    if vllm:
        known[""]["vllm"] = vllm
    made = plugin_util("doctor").doctor(known)
    for path in files:
        made.read("standard input" if str(path) == "-" else str(path), _lines(path))
    answer = made.answer()
    if not answer["read"]["lines"]:
        _stop(f"{', '.join(map(str, files))}: no line in it")
    return answer


def _known(facts: Path | None) -> dict[str, Any]:
    """What signatures may ask of a host."""
    if facts is None:
        return {}
    try:
        told = json.loads(facts.read_text(encoding="utf-8"))
        return {"nvswitch": bool(told["nvswitch"]["devices"])}
    except OSError as error:
        _stop(f"{facts}: {error.strerror}")
    except (ValueError, KeyError, TypeError, RecursionError):
        _stop(f"{facts}: this is no result of gpu_facts")


def _lines(path: Path) -> Iterator[str]:
    """The lines of a log, also of a compressed one; standard input for -."""
    try:
        raw = sys.stdin.buffer if str(path) == "-" else open(path, "rb")  # noqa: SIM115  closed below
        with raw:
            stream: Any = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw)
            head = stream.peek(8)[:8]
            if head == JOURNAL_FILE:
                _stop(f"{path}: this is a journal file; read it with `journalctl --file {path} -o json`")
            if head.startswith(GZIP):
                stream = gzip.open(stream)  # noqa: SIM115  ends with the file under it
            encoding = "utf-16" if head[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
            text = io.TextIOWrapper(stream, encoding=encoding, errors="replace", newline="\n")
            while True:
                line = text.readline(LONGEST_LINE)
                if not line:
                    return
                yield line.rstrip("\n")
    except OSError as error:
        _stop(f"{path}: {error.strerror or error}")
    except EOFError:
        return  # a compressed log that was cut off: what is there counts


# --- endpoint ---------------------------------------------------------------------------------------------------------


def _play(endpoint: str, key_file: Path | None, authority: Path | None, **options: Any) -> dict[str, Any]:
    from gpu_fleet import doctor_client

    try:
        key = _key(key_file)
        if authority is not None:
            authority.read_bytes()
    except (OSError, UnicodeDecodeError) as error:
        _stop(f"{key_file if authority is None else authority}: {getattr(error, 'strerror', None) or error}")
    try:
        return doctor_client.play(endpoint, key, authority=str(authority) if authority else None, **options)
    except ValueError as error:
        _stop(str(error))


def _key(key_file: Path | None) -> str:
    """The first line of the file; blanks around it are no part of a key. KEY=VALUE, as an environment file has it, gives the value."""
    if key_file is None:
        return ""
    lines = key_file.read_text(encoding="utf-8").splitlines()
    first = lines[0].strip() if lines else ""
    if first.startswith("VLLM_API_KEY="):
        first = first.partition("=")[2].strip().strip("'\"")
    if not first:
        _stop(f"{key_file}: no key in it")
    if not first.isascii() or any(letter.isspace() for letter in first):
        _stop(f"{key_file}: the first line is no key: blanks or letters that a header cannot carry")
    return first


# --- terminal ---------------------------------------------------------------------------------------------------------

STYLES = {"error": "bold red", "warning": "yellow"}


def _show(answer: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for number, found in enumerate(answer["findings"], 1):
        where = " ".join(
            part
            for part in (
                found["host"],
                found.get("time"),
                f"{found['source']}:{found['line']}" if found.get("source") else "",
                f"seen {found['count']} times" if found.get("count", 1) > 1 else "",
                "recovered since" if found.get("recovered") else "",
                f"confidence {found['confidence']}",
            )
            if part
        )
        console.print(f"{number}. {found['cause_id']}", style=STYLES.get(found["severity"], ""), markup=False, end="  ")
        console.print(where, style="dim", markup=False)
        console.print(f"   {found['cause']}", markup=False)
        for line in found["evidence"].split("\n"):
            console.print(f"   | {line}", style="cyan", markup=False)
        console.print(f"   Fix: {found['fix']}", markup=False)
    if not answer["findings"]:
        console.print("nothing found", markup=False)
    for entry in answer.get("unknown", []):
        console.print(f"Not told: {entry['what']}", markup=False)
        console.print(f"   {entry['command']}", markup=False)
    for note in answer["notes"]:
        if isinstance(note, str):
            console.print(f"Note: {note}", style="dim", markup=False)
        else:
            console.print(f"No cause: {note['evidence'][:120]}: {note['meaning']}", style="dim", markup=False)
    if answer.get("seconds") is not None:
        console.print(f"One token of {answer['model']} took {answer['seconds']} s", markup=False)
