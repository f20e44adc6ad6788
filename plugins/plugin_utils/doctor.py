"""A doctor with the collection's data: signatures, removed options, the options that releases know."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ..module_utils import diagnosis, signatures
from . import data


@functools.cache
def families() -> dict[str, Any]:
    """Entries of data/signatures/*.yml, by the name of their file."""
    folder = data.ROOT / "data" / "signatures"
    return {path.stem: data.load(f"signatures/{path.stem}") for path in sorted(folder.glob("*.yml"))}


@functools.cache
def book() -> signatures.Book:
    """All signatures, ready to be looked for."""
    return diagnosis.ready(signatures.compile_book(families()))


@functools.cache
def tables() -> dict[str, Any]:
    """What judges of signatures look things up in."""
    newest = data.flag_versions()[-1]
    return {"removed_flags": data.load("removed_flags"), "flags": list(data.load(f"serve_flags/{newest}")["flags"])}


def doctor(facts: Mapping[str, Mapping[str, Any]] | None = None) -> diagnosis.Doctor:
    """A doctor that has read nothing yet; facts as diagnosis.Doctor takes them."""
    return diagnosis.Doctor(book(), tables(), facts)
