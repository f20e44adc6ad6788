"""HAProxy's runtime socket: one command, its answer. Standard library only, Python 3.9: it runs on hosts."""

from __future__ import annotations

from .gateway_state import keep, shown

__all__ = ["Refused", "add_payload", "keep", "shown", "tell"]


class Refused(Exception):
    """HAProxy did not take a command; the message is its own."""


def tell(path: str, command: str) -> None:
    """A command whose success has nothing to say.

    Raises Refused with what was said instead, and OSError where nobody listens.
    """
    said = shown(path, command).strip()
    if said:
        raise Refused(f"{command}: {said}")


def add_payload(path: str, command: str, lines: str) -> None:
    """A command whose payload ends at an empty line (management.txt). What the lines say is never part of a message."""
    said = shown(path, f"{command} <<\n{lines}").strip()
    if said:
        raise Refused(f"{command}: HAProxy did not take its lines")
