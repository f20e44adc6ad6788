"""What is told of a run that was ended before its end: how far each host is, and the command for the rest."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from gpu_fleet.events import HostProgress, Progress

NAMES = 4  # hosts that are named where several are equally far
_SECRET = re.compile(r"key|pass|token|secret", re.IGNORECASE)
_EXTRA = ("-e", "--extra-vars")
HIDDEN = "..."


def reached(progress: Progress) -> list[str]:
    """A line for all hosts that are equally far: the stages that are done there, and where it was ended."""
    alike: dict[str, list[str]] = {}
    for name, host in progress.hosts.items():
        if host.stages or host.state != "waits":
            alike.setdefault(_far(host), []).append(name)
    found = []
    for far, names in alike.items():
        more = len(names) - NAMES
        found.append(f"{', '.join(names[:NAMES])}{f' and {more} more' if more > 0 else ''}: {far}")
    return found


def _far(host: HostProgress) -> str:
    under_way = host.state == "works"
    done = [stage for stage in host.stages if not (under_way and stage == host.stage)]
    said = [f"done {', '.join(done)}"] if done else ["nothing is done"]
    if host.changes:
        said.append(f"{host.changes} changes" if host.changes > 1 else "one change")
    if under_way:
        said.append(f"ended in {host.stage}: {host.task}" if host.stage else f"ended in {host.task}")
    elif host.state in ("failed", "unreachable"):
        said.append("failed" if host.state == "failed" else "not reached")
    return "; ".join(said)


def again(program: str, words: Sequence[str]) -> str:
    """The command once more, as a shell takes it. Of variables that look like a secret only the name is told."""
    return shlex.join([program, *_told(words)])


def _told(words: Sequence[str]) -> Iterator[str]:
    extra = False
    for word in words:
        if extra:
            yield _hidden(word)
        elif word.startswith("--extra-vars="):
            yield f"--extra-vars={_hidden(word.removeprefix('--extra-vars='))}"
        elif word.startswith("-e") and word not in _EXTRA:
            yield f"-e{_hidden(word[2:])}"
        else:
            yield word
        extra = word in _EXTRA and not extra


def _hidden(value: str) -> str:
    name, equals, _ = value.partition("=")
    if value.startswith("@") or not _SECRET.search(value if value.startswith(("{", "[")) else name):
        return value
    return HIDDEN if value.startswith(("{", "[")) else f"{name}{equals}{HIDDEN}"
