"""Run a playbook of the collection through ansible-runner and read what came of it.

The command line and any other Python program use this; whatever it does, `ansible-playbook` does too.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLAN_TASK = "fleet_plan"
MIRROR_TASK = "vllm.mirror"


@dataclass(frozen=True)
class Failure:
    """One task that failed on one host: its name and its message."""

    host: str
    task: str
    message: str


@dataclass
class Outcome:
    """What a run brought.

    status    of ansible-playbook: 0 when all went well
    refused   the inventory was refused before any host was touched
    changed   number of changes by host
    plan      the plan, once the inventory was judged right; summary is it in lines for people
    """

    status: int = 0
    refused: bool = False
    changed: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)
    why_unreachable: dict[str, str] = field(default_factory=dict)
    differing: dict[str, list[str]] = field(
        default_factory=dict
    )  # names of the tasks that changed or would change something
    plan: dict[str, Any] | None = None
    summary: list[str] = field(default_factory=list)
    hosts: dict[str, dict[str, Any]] = field(default_factory=dict)  # what role gpu_topology published, by host

    @property
    def exit_status(self) -> int:
        """0 good, 1 something failed, 2 input refused."""
        if self.refused:
            return 2
        return 1 if self.status else 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "exit_status": self.exit_status,
            "changed": self.changed,
            "failures": [vars(failure) for failure in self.failures],
            "unreachable": self.unreachable,
            "summary": self.summary,
            "plan": self.plan,
            "hosts": self.hosts,
        }


def _read(outcome: Outcome, event: dict[str, Any]) -> None:
    """Take what an event of ansible-runner tells into the outcome."""
    told = event.get("event_data", {})
    result = told.get("res") or {}
    action = str(told.get("resolved_action") or told.get("task_action") or "")
    if event["event"] == "runner_on_ok" and action.endswith(PLAN_TASK):
        outcome.plan = result.get("ansible_facts", {}).get(PLAN_TASK)
        outcome.summary = result.get("summary", [])
    elif event["event"] == "runner_on_ok" and action.endswith(MIRROR_TASK) and "summary" in result:
        left = result.get("left_over") or []
        strange = [f"left over, needed by nothing and not touched: {', '.join(left)}"] if left else []
        outcome.summary = [*result["summary"], *result.get("notes", []), *strange]
    elif event["event"] == "runner_on_ok" and "gpu_topology_facts" in (result.get("ansible_facts") or {}):
        outcome.hosts[told["host"]] = {
            key: result["ansible_facts"][f"gpu_topology_{key}"]
            for key in ("facts", "findings", "recommendation", "measured")
        }
    if event["event"] == "runner_on_ok" and result.get("changed"):
        outcome.differing.setdefault(told["host"], []).append(str(told.get("task", "")))
    if event["event"] == "runner_on_failed" and not told.get("ignore_errors"):
        outcome.failures.append(Failure(told["host"], told.get("task", ""), str(result.get("msg", ""))))
        outcome.refused = outcome.refused or action.endswith(PLAN_TASK)
    elif event["event"] == "runner_on_unreachable":
        outcome.unreachable.append(told["host"])
        outcome.why_unreachable[told["host"]] = str(result.get("msg", "")).strip()
    elif event["event"] == "playbook_on_stats":
        outcome.changed = {host: told.get("changed", {}).get(host, 0) for host in told.get("processed", {})}


def _environment() -> dict[str, str]:
    """The repository's settings, and the ansible-playbook that belongs to this interpreter."""
    here = str(Path(sys.executable).parent)
    return {
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
        "PATH": os.pathsep.join([here, os.environ.get("PATH", os.defpath)]),
    }


def _last_words(done: Any) -> str:
    """What ansible-playbook said before it gave up, without colours."""
    said = "".join(stream.read() for stream in (done.stderr, done.stdout) if stream)
    lines = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", said).splitlines() if line.strip()]
    return "\n".join(lines[-12:]) or "ansible-playbook failed and said nothing"


def run(
    playbook: str,
    inventory: Path,
    *,
    limit: str | None = None,
    check: bool = False,
    variables: dict[str, Any] | None = None,
    on_event: Callable[[dict[str, Any]], None] | None = None,
) -> Outcome:
    """Run playbooks/PLAYBOOK.yml on an inventory. Each run has a private data directory of its own.

    Raises FileNotFoundError when there is no such inventory.
    """
    import ansible_runner

    if not inventory.exists():
        raise FileNotFoundError(f"there is no inventory {inventory}")
    outcome = Outcome()

    def handle(event: dict[str, Any]) -> bool:
        _read(outcome, event)
        if on_event:
            on_event(event)
        return False  # ansible-runner keeps no file of it

    with tempfile.TemporaryDirectory(prefix="gpu_fleet-run-") as private:
        done = ansible_runner.run(
            private_data_dir=private,
            project_dir=str(ROOT),
            playbook=f"playbooks/{playbook}.yml",
            inventory=str(inventory.resolve()),
            limit=limit,
            cmdline="--check --diff" if check else None,
            extravars=variables or {},
            envvars=_environment(),
            event_handler=handle,
            quiet=True,
        )
        outcome.status = done.rc if done.rc is not None else 1
        if outcome.status and not (outcome.failures or outcome.unreachable):
            # It ended before the first task: an inventory that cannot be read, a limit that matches nothing.
            outcome.failures.append(Failure("", "", _last_words(done)))
            outcome.refused = True
    return outcome
