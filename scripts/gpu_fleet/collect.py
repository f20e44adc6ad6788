"""Bring from every host of a fleet what bears on why something does not work (playbooks/doctor.yml)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_fleet import runs
from gpu_fleet.events import Event


@dataclass
class Case:
    """What was brought, by host: evidence (module evidence), facts (module gpu_facts), and when each was asked and had answered."""

    outcome: runs.FleetResult
    evidence: dict[str, dict[str, Any]] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def silence(self) -> list[str]:
        """Why there is nothing to look at, host by host; empty when somebody answered."""
        if self.outcome.refused:
            return [failure.message for failure in self.outcome.failures]
        if self.evidence:
            return []
        failed = [f"{failure.host}: {failure.message}" for failure in self.outcome.failures]
        return [*failed, *(f"{host}: not reached. {said}" for host, said in self.outcome.why_unreachable.items())]


def collect(
    inventory: Path, since: str = "", limit: str | None = None, on_event: Callable[[Event], None] | None = None
) -> Case:
    """Raises FileNotFoundError when there is no such inventory."""
    case = Case(runs.FleetResult())
    began: dict[str, float] = {}

    def keep(told: Event) -> None:
        event = told.raw
        data = event.get("event_data", {})
        action = str(data.get("resolved_action") or data.get("task_action") or "")
        if action.endswith(".evidence"):
            if event["event"] == "runner_on_start":
                began[data["host"]] = time.time()
            elif event["event"] == "runner_on_ok":
                case.evidence[data["host"]] = data["res"]["evidence"]
                case.asked[data["host"]] = (began.get(data["host"], 0.0), time.time())
        elif action.endswith(".gpu_facts") and event["event"] == "runner_on_ok":
            case.facts[data["host"]] = data["res"]
        if on_event:
            on_event(told)

    case.outcome = runs.run("doctor", inventory, limit=limit, variables={"doctor_since": since}, on_event=keep)
    return case


def examine(case: Case) -> dict[str, Any]:
    """The doctor's answer for a case: first cause over all hosts, by their logs and by their state."""
    from gpu_fleet.domain import data_cached, module_util, plugin_util

    evidence = module_util("evidence")
    known: dict[str, dict[str, Any]] = {}
    replicas = (case.outcome.plan or {}).get("replicas", {})
    for host, told in case.evidence.items():
        known[told["hostname"]] = {}
        versions = {replica["version"] for replica in replicas.values() if host in replica["hosts"]}
        if len(versions) == 1:
            known[told["hostname"]]["vllm"] = versions.pop()
        if host in case.facts:
            known[told["hostname"]]["nvswitch"] = bool(case.facts[host]["nvswitch"]["devices"])
    made = plugin_util("doctor").doctor(known)
    for host, told in case.evidence.items():
        for name in ("journal", "kernel"):
            text = evidence.unpacked(told[name])
            if text.strip():
                made.read(f"{host} {name}", text.splitlines())
    names = {host: told["hostname"] for host, told in case.evidence.items()}
    judged = made.answer()
    _past(judged["findings"], case, evidence)
    answer: dict[str, Any] = evidence.merged(
        judged, evidence.judge(case.evidence, case.asked, case.outcome.plan), names
    )
    metrics = data_cached("metrics")
    notions = {name: [entry["name"] for entry in metrics[name]["names"]] for name in ("running", "waiting", "kv_usage")}
    for host, told in case.evidence.items():
        answer["notes"] += [f"{host}: {said}" for said in evidence.load(told, notions)]
    for failure in case.outcome.failures:
        answer["notes"].append(f"{failure.host}: {failure.task}: {failure.message}")
    for host in case.outcome.unreachable:
        why = case.outcome.why_unreachable.get(host, "")
        answer["notes"].append(f"{host} was not reached, so that nothing is known of it. {why}".rstrip())
    return answer


def _past(findings: list[dict[str, Any]], case: Case, evidence: Any) -> None:
    """What a server's journal said before it came up and answered is over: it is told, last, and not for sure."""
    up = {host: evidence.serves_since(told) for host, told in case.evidence.items()}
    for finding in findings:
        host = str(finding.get("source") or "").removesuffix(" journal")
        at = evidence.seconds(finding.get("time"))
        if up.get(host) is not None and at is not None and at < up[host]:
            finding.update(recovered=True, confidence="low", severity="warning")
    findings.sort(key=lambda finding: bool(finding.get("recovered")))
