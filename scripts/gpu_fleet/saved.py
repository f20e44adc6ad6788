"""Files that verbs take with --from, and how one that is not taken is refused."""

from __future__ import annotations

import codecs
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import typer

# What reading a document of another shape raises.
MALFORMED = (KeyError, TypeError, AttributeError, ValueError, IndexError)


def text(source: Path) -> str:
    """The text of a saved file, - for standard input."""
    try:
        raw = sys.stdin.buffer.read() if str(source) == "-" else source.read_bytes()
    except OSError as error:
        typer.echo(f"{source}: {error.strerror}", err=True)
        raise typer.Exit(2) from error
    wide = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # what a redirection of PowerShell writes
    return raw.decode("utf-16" if wide else "utf-8-sig", errors="replace")


def refuse(source: Path, answer: dict[str, Any], as_json: bool) -> NoReturn:
    """Say why a saved file is not taken, and leave with 2."""
    typer.echo(json.dumps(answer, indent=1) if as_json else f"{source}: {answer['refused']}", err=not as_json)
    raise typer.Exit(2)
