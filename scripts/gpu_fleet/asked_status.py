"""How a fleet is: asked of Prometheus, or of every host about itself (playbooks/status.yml)."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from gpu_fleet import runs
from gpu_fleet.events import Event


def from_url(url: str) -> dict[str, Any]:
    """Ask a Prometheus that can be reached from here. Raises ValueError with what is wrong when it does not answer."""
    from gpu_fleet.domain import module_util

    base = url.rstrip("/")
    if urllib.parse.urlsplit(base).scheme not in ("http", "https"):
        raise ValueError(f"{url} is no URL of a Prometheus, such as http://127.0.0.1:9090")

    def get(path: str) -> Any:
        try:
            with urllib.request.urlopen(f"{base}{path}", timeout=30) as answer:
                return json.loads(answer.read())["data"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{base}: {getattr(error, 'reason', error)}") from error

    util = module_util("status")
    results = {
        name: get(f"/api/v1/query?{urllib.parse.urlencode({'query': text})}")["result"]
        for name, text in util.queries().items()
    }
    return util.from_prometheus(results, get("/api/v1/alerts")["alerts"])


def from_fleet(inventory: Path, hosts: bool) -> dict[str, Any]:
    """Ask the monitors; where there is none, or none answers, every host about itself.

    Raises FileNotFoundError without such an inventory, and ValueError with what is wrong when nobody answered.
    """
    from gpu_fleet.domain import data_cached, module_util

    util = module_util("status")
    if not hosts:
        _, told = _play(inventory, "monitors")
        for answer in told.values():
            if answer.get("answers"):
                return util.from_prometheus(answer["answers"], answer["alerts"])
    result, told = _play(inventory, "hosts")
    pages = {host: answer["pages"] for host, answer in told.items() if "pages" in answer}
    if result.plan is None or not told:
        why = [f"{host}: {said}" for host, said in result.why_unreachable.items()]
        raise ValueError("\n".join(["no host answered", *why, *(failure.message for failure in result.failures)]))
    gpus = {host: util.gpus_of(answer["gpus"]) for host, answer in told.items() if answer.get("gpus")}
    return util.from_hosts(result.plan, data_cached("metrics"), pages, gpus)


def _play(inventory: Path, source: str) -> tuple[runs.FleetResult, dict[str, dict[str, Any]]]:
    """How it went, and by host what modules brought."""
    told: dict[str, dict[str, Any]] = {}

    def keep(happened: Event) -> None:
        event = happened.raw
        data = event.get("event_data", {})
        if event["event"] != "runner_on_ok":
            return
        action, result = str(data.get("resolved_action") or data.get("task_action")), data.get("res") or {}
        if action.endswith(".metrics"):
            told.setdefault(data["host"], {}).update(result)
        elif action.endswith(".gpu_facts"):
            told.setdefault(data["host"], {})["gpus"] = result

    outcome = runs.run("status", inventory, variables={"status_source": source}, on_event=keep)
    if outcome.refused:
        raise ValueError("\n".join(failure.message for failure in outcome.failures))
    return outcome, told
