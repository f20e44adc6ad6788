"""Where the time of a run went: its tasks, by what each took on the clock and on the hosts.

Fed with a run's events in order (events.py). Tasks of a play come one after the other, each on all hosts side by side, so that the
clock times add up to the run, and a host that takes longer than others is what these wait for.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from gpu_fleet.events import Event

_ENDS = ("ok", "changed", "skipped", "failed", "unreachable")


@dataclass
class Task:
    """One task of a play.

    wall      seconds on the clock, from its begin to the last result
    work      seconds added up over its hosts, as ansible-core measured them
    hosts     how many had a result other than skipped
    slowest   the host that took longest; longest: its seconds
    """

    stage: str
    task: str
    wall: float = 0.0
    work: float = 0.0
    hosts: int = 0
    slowest: str = ""
    longest: float = 0.0
    began: float = field(default=0.0, repr=False)


@dataclass
class Timing:
    """All tasks of a run, in their order. between: seconds in which no task ran, which are the controller's own."""

    tasks: list[Task] = field(default_factory=list)
    between: float = 0.0
    _last: float = 0.0

    def take(self, event: Event) -> None:
        if event.kind == "task":
            self.between += max(0.0, event.at - self._last) if self._last else 0.0
            self.tasks.append(Task(event.stage, event.task, began=event.at))
        elif event.kind == "end":
            self.between += max(0.0, event.at - self._last) if self._last else 0.0
        elif event.kind in _ENDS and self.tasks:
            self._result(self.tasks[-1], event)
        else:
            return
        self._last = max(self._last, event.at)

    @staticmethod
    def _result(task: Task, event: Event) -> None:
        task.wall = max(task.wall, event.at - task.began)
        seconds = event.seconds or 0.0
        task.work += seconds
        task.hosts += event.kind != "skipped"
        if seconds > task.longest:
            task.slowest, task.longest = event.host, seconds

    def as_dict(self) -> dict[str, Any]:
        """seconds: of all tasks and between them; tasks: each as Task says, longest first."""
        told = [
            {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(task).items()}
            for task in sorted(self.tasks, key=lambda task: -task.wall)
        ]
        for task in told:
            del task["began"]
        whole = sum(task.wall for task in self.tasks) + self.between
        return {"seconds": round(whole, 3), "between": round(self.between, 3), "tasks": told}


def lines(told: dict[str, Any], most: int = 15) -> list[str]:
    """What as_dict gave, for people: seconds by stage, then the `most` tasks that took longest."""
    whole = told["seconds"] or 1.0

    def row(seconds: float, what: str, more: str = "") -> str:
        return f"{seconds:8.1f} s {100 * seconds / whole:4.0f} %  {what}{more}"

    stages: dict[str, float] = {}
    for task in told["tasks"]:
        stages[task["stage"] or "playbook"] = stages.get(task["stage"] or "playbook", 0.0) + task["wall"]
    out = [f"{told['seconds']:.1f} s in {len(told['tasks'])} tasks, by stage:"]
    out += [row(seconds, stage) for stage, seconds in sorted(stages.items(), key=lambda item: -item[1])]
    out += [row(told["between"], "between tasks"), "by task:"]
    for task in told["tasks"][:most]:
        slowest = f", {task['slowest']} longest with {task['longest']:.1f} s" if task["hosts"] > 1 else ""
        many = f" ({task['hosts']} hosts, {task['work']:.1f} s of work{slowest})" if task["hosts"] > 1 else ""
        out.append(row(task["wall"], f"{task['stage']}: {task['task']}", many))
    return out
