"""A run while it goes on: a live table of hosts by stage on a terminal, plain lines elsewhere. On standard error both."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gpu_fleet.events import ARGUMENTS, Event, HostProgress, Progress

HEARTBEAT_SECONDS = 60.0  # without a terminal: how often a long task says that it still runs
STYLES = {"waits": "dim", "works": "", "ok": "green", "failed": "bold red", "unreachable": "bold red"}
SHORTEST = 6  # characters of a stage's column
NOW = 28  # characters for what a host does


def clock(seconds: float) -> str:
    """12 s, 3:05, 1:02:03."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, hours = whole // 60, whole // 3600
    return f"{hours}:{minutes % 60:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def table(progress: Progress, now: float, width: int, height: int) -> RenderableType:
    """Hosts by stage, with the seconds of each; what does not fit is added up in one column, or counted below."""
    folded, shown = _columns(progress, width)
    out = Table(box=None, pad_edge=False)
    out.add_column("host", no_wrap=True, min_width=min(20, max((len(name) for name in progress.hosts), default=4)))
    if folded:
        out.add_column("before", justify="right", no_wrap=True)
    for stage in shown:
        out.add_column(stage, justify="right", no_wrap=True)
    out.add_column("changes", justify="right", no_wrap=True)
    out.add_column("", no_wrap=True, overflow="ellipsis")
    # What needs a look comes first where there is no room for all.
    order = {"failed": 0, "unreachable": 0, "works": 1, "waits": 2, "ok": 3}
    names = list(progress.hosts)
    room = max(3, height - 4)
    if len(names) > room:
        names = sorted(names, key=lambda name: order[progress.hosts[name].state])[:room]
    for name in names:
        host = progress.hosts[name]
        cells = [_cell(host, stage, now) for stage in shown]
        if folded:
            before = sum(host.stages.get(stage, 0.0) for stage in folded)
            cells.insert(0, Text(clock(before) if before >= 0.5 else "", style="dim"))
        out.add_row(name, *cells, str(host.changes or ""), _now(host))
    more = [host.state for name, host in progress.hosts.items() if name not in names]
    lines: list[RenderableType] = [_head(progress, now), out]
    if more:
        told = ", ".join(f"{more.count(state)} {state}" for state in order if state in more)
        lines.append(Text(f"and {len(more)} more hosts: {told}", style="dim"))
    return Group(*lines)


def _columns(progress: Progress, width: int) -> tuple[list[str], list[str]]:
    """Stages to add up and stages to show: as many of the last ones as there is room for."""
    names = max((len(name) for name in progress.hosts), default=4)
    left = width - names - 2 - len("changes") - 2 - NOW
    shown: list[str] = []
    for stage in reversed(progress.stages):
        left -= max(SHORTEST, len(stage)) + 2
        if left < (len("before") + 2 if len(shown) + 1 < len(progress.stages) else 0) and shown:
            break
        shown.insert(0, stage)
    return progress.stages[: len(progress.stages) - len(shown)], shown


def _cell(host: HostProgress, stage: str, now: float) -> Text:
    if stage not in host.stages:
        return Text("")
    if host.stage == stage and host.state in ("failed", "unreachable"):
        return Text("failed" if host.state == "failed" else "lost", style=STYLES["failed"])
    spent = host.stages[stage]
    if host.stage == stage and host.state == "works":
        return Text(clock(spent + max(0.0, now - host.last)), style="cyan")
    return Text(clock(spent) if spent >= 0.5 else "ok", style="green")


def _now(host: HostProgress) -> Text:
    if host.state == "works":
        return Text(host.task, style="dim")
    return Text({"unreachable": "not reached", "waits": ""}.get(host.state, host.state), style=STYLES[host.state])


def _head(progress: Progress, now: float) -> Text:
    spent = clock(max(0.0, now - progress.began)) if progress.began else ""
    doing = "" if progress.over else ": ".join(part for part in (progress.stage, progress.task) if part)
    return Text(f"{spent}  {doing}".strip(), style="bold", no_wrap=True, overflow="ellipsis")


def mishap(event: Event) -> str:
    """One sentence for a task that failed or a host that was not reached, the moment it happens; the whole comes at the end."""
    first = re.split(r"\. (?=[A-Z])", event.message.partition("\n")[0], maxsplit=1)[0]
    what = "not reached" if event.kind == "unreachable" else f"failed: {event.task}"
    return f"{event.host} {what}: {first}"


class Shown:
    """Shows a run from `with` on; `take` is called with each of its events."""

    def __init__(self, console: Console, now: Callable[[], float] = time.time) -> None:
        self.console, self.now = console, now
        self.progress = Progress()
        self._lock = threading.Lock()

    def take(self, event: Event) -> None:
        with self._lock:
            self.progress.take(event)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class Board(Shown):
    """The live table, on a terminal."""

    def __init__(self, console: Console, now: Callable[[], float] = time.time) -> None:
        super().__init__(console, now)
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=4, transient=False)

    def take(self, event: Event) -> None:
        super().take(event)
        if event.kind in ("failed", "unreachable"):
            line = Text(mishap(event), style=STYLES["failed"], no_wrap=True, overflow="ellipsis")
            self._live.console.print(line)  # above the table

    def _table(self) -> RenderableType:
        with self._lock:
            return table(self.progress, self.now(), self.console.width, self.console.height)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.transient = len(self.progress.stages) < 2  # what the controller did alone is not worth a table
        self._live.stop()


class Lines(Shown):
    """A line a task, once it has run somewhere; one a minute while it runs on; one a host at the end."""

    def __init__(self, console: Console, now: Callable[[], float] = time.time) -> None:
        super().__init__(console, now)
        self._told = self._task = ""
        self._said = 0.0
        self._done = threading.Event()
        self._beat = threading.Thread(target=self._heartbeat, daemon=True)

    def take(self, event: Event) -> None:
        super().take(event)
        if event.kind == "task":
            self._task = str((event.raw.get("event_data") or {}).get("task_uuid") or event.task)
        elif event.kind == "ok" and event.task == ARGUMENTS:
            pass  # one for each role, and always well
        elif event.kind in ("ok", "changed", "failed", "unreachable") and self._told != self._task:
            self._told = self._task
            self._say(f"{event.stage}: {event.task}" if event.stage else event.task)
        if event.kind in ("failed", "unreachable"):
            self._say(mishap(event))
        elif event.kind == "end" and len(self.progress.stages) > 1:
            for name, host in self.progress.hosts.items():
                changes = f", {host.changes} changes" if host.changes else ""
                state = "not reached" if host.state == "unreachable" else host.state
                self._say(f"{name}: {state}{changes}, {clock(sum(host.stages.values()))} of work")

    def _say(self, text: str) -> None:
        self._said = self.now()
        spent = clock(max(0.0, self._said - (self.progress.began or self._said)))
        self.console.print(f"{spent:>7}  {text}", markup=False, highlight=False, soft_wrap=True)

    def _heartbeat(self) -> None:
        while not self._done.wait(1.0):
            if self.progress.task and self.now() - max(self._said, self.progress.began) > HEARTBEAT_SECONDS:
                working = [name for name, host in self.progress.hosts.copy().items() if host.state == "works"]
                where = f" ({', '.join(working[:4])}{' and more' if len(working) > 4 else ''})" if working else ""
                self._say(f"still {self.progress.stage}: {self.progress.task}{where}")

    def __enter__(self) -> Self:
        self._beat.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()


def shown(console: Console | None = None) -> Shown:
    """What fits where standard error goes."""
    console = console or Console(stderr=True, highlight=False)
    return Board(console) if console.is_terminal else Lines(console)
