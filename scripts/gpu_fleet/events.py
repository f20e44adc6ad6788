"""What goes on in a run, as typed events, and how long each host took for each stage.

ansible-runner hands on an event as a dictionary (docs of ansible-runner, "Runner Artifact Job Events"); here is what of
it a person or a program asks for. A stage is a role, or outside of roles the playbook.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpu_fleet import remedies

Kind = Literal["task", "start", "ok", "changed", "skipped", "failed", "unreachable", "retry", "end", "other"]

_KINDS: dict[str, Kind] = {
    "playbook_on_task_start": "task",
    "playbook_on_handler_task_start": "task",
    "runner_on_start": "start",
    "runner_on_ok": "ok",
    "runner_on_skipped": "skipped",
    "runner_on_failed": "failed",
    "runner_on_unreachable": "unreachable",
    "runner_retry": "retry",
    "playbook_on_stats": "end",
}
ARGUMENTS = "Check the variables"


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    kind      task: a task begins; start: it begins on a host; ok, changed, skipped, failed, unreachable: how it ended
              there; retry: it is waited for; end: the run is over; other: nothing for people
    at        seconds since 1970, by the clock of this machine
    message   of a failure: what it says, with the remedy
    raw       the event as ansible-runner made it
    """

    kind: Kind
    at: float
    stage: str = ""
    task: str = ""
    host: str = ""
    message: str = ""
    seconds: float | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


def read(raw: Mapping[str, Any]) -> Event:
    """An event of ansible-runner."""
    told = raw.get("event_data") or {}
    result = told.get("res") or {}
    kind = _KINDS.get(str(raw.get("event")), "other")
    if kind == "ok" and result.get("changed"):
        kind = "changed"
    said = ""
    if kind in ("failed", "unreachable"):
        said = remedies.explained(remedies.message(result))
    elif kind == "retry":
        said = f"try {result.get('attempts', '?')} of {int(result.get('retries') or 1) - 1}"
    return Event(
        kind=kind,
        at=_seconds(raw.get("created")),
        stage=_stage(told),
        task=_task(told),
        host=str(told.get("host") or ""),
        message=said,
        seconds=told.get("duration"),
        raw=raw,
    )


def _stage(told: Mapping[str, Any]) -> str:
    role = str(told.get("role") or "").rpartition(".")[2]
    if role:
        return role
    path = str(told.get("task_path") or "").rpartition(":")[0]
    return Path(path).stem if path else ""


def _task(told: Mapping[str, Any]) -> str:
    name = str(told.get("task") or "")
    # ansible-core's own name for it has the role's whole description (playbook/role/__init__.py)
    return ARGUMENTS if name.startswith("Validating arguments against arg spec") else name


def _seconds(created: Any) -> float:
    try:
        at = datetime.datetime.fromisoformat(str(created))
    except ValueError:
        return 0.0
    return (at if at.tzinfo else at.replace(tzinfo=datetime.UTC)).timestamp()


@dataclass
class HostProgress:
    """Where one host is.

    stages    seconds by stage, from its first task to the end of its last one
    state     waits, works, ok, failed or unreachable
    """

    stages: dict[str, float] = field(default_factory=dict)
    state: Literal["waits", "works", "ok", "failed", "unreachable"] = "waits"
    stage: str = ""
    task: str = ""
    since: float = 0.0  # when the current stage began
    last: float = 0.0  # when it was last counted
    changes: int = 0


@dataclass
class Progress:
    """Where a run is: fed with its events in order."""

    hosts: dict[str, HostProgress] = field(default_factory=dict)
    stages: list[str] = field(default_factory=list)  # in the order in which they began
    stage: str = ""
    task: str = ""
    began: float = 0.0
    over: bool = False

    def take(self, event: Event) -> None:
        self.began = self.began or event.at
        if event.kind == "task":
            self.stage, self.task = event.stage, event.task
        elif event.kind == "end":
            self._end(event)
        elif event.host and event.kind != "other":
            self._host(event)

    def _host(self, event: Event) -> None:
        host = self.hosts.setdefault(event.host, HostProgress())
        if event.kind == "start":
            host.task = event.task
            if host.stage != event.stage or host.state != "works":
                host.stage, host.since, host.last = event.stage, event.at, event.at
            host.state = "works"
            return
        if event.kind == "skipped":
            # Skipped tasks alone make no stage: it would be shown though nothing was done.
            if host.stage in host.stages:
                self._count(host, event)
            return
        self._count(host, event)
        if event.kind == "changed":
            host.changes += 1
        elif event.kind == "unreachable" or (event.kind == "failed" and not _ignored(event)):
            host.state = "unreachable" if event.kind == "unreachable" else "failed"

    def _count(self, host: HostProgress, event: Event) -> None:
        if not event.stage:
            return
        if event.stage not in self.stages:
            self.stages.append(event.stage)
        if host.stage != event.stage:  # a result without a start, as a delegated one may have
            host.stage, host.since, host.last = event.stage, event.at, event.at
        host.stages[event.stage] = host.stages.get(event.stage, 0.0) + max(0.0, event.at - host.last)
        host.last = event.at

    def _end(self, event: Event) -> None:
        told = event.raw.get("event_data") or {}
        self.over = True
        for name, host in self.hosts.items():
            if told.get("dark", {}).get(name):
                host.state = "unreachable"
            elif told.get("failures", {}).get(name):
                host.state = "failed"
            else:
                host.state = "ok"


def _ignored(event: Event) -> bool:
    return bool((event.raw.get("event_data") or {}).get("ignore_errors"))
