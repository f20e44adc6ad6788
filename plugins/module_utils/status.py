"""The state of a fleet on one screen, from what Prometheus says or from the hosts' own numbers. Pure: answers in, a dict out.

    source     prometheus, or hosts where no monitor was asked
    services   name, wanted and right replicas, running, waiting, tokens_per_second, prompt_tokens_per_second, kv_usage (0 to 1), ttft_p95,
               itl_p95 (seconds; from hosts: of all requests since the server started)
    replicas   replica, service, right, running, waiting, tokens_per_second, kv_usage, restarts, limit_reached, maintenance (1 where it
               is taken out with its host: then it is not missing)
    hosts      host, maintenance, gpus, gpu_utilization (0 to 1), gpu_memory_used, gpu_memory (bytes)
    alerts     alert, severity, state, summary, since
What nobody said is null.
"""

from __future__ import annotations

import math
import re
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import monitoring

# Field of a service, a replica, a host -> expression. Recording rules have done the work.
SERVICE = {
    "wanted": "sum by (service) (gpu_fleet:replica_wanted)",
    "right": "gpu_fleet:service_replicas_right",
    "running": "gpu_fleet:service_running",
    "waiting": "gpu_fleet:service_waiting",
    "tokens_per_second": "gpu_fleet:service_generation_tokens:rate5m",
    "prompt_tokens_per_second": "gpu_fleet:service_prompt_tokens:rate5m",
    "kv_usage": "gpu_fleet:service_kv_usage:ratio",
    "ttft_p95": "gpu_fleet:service_ttft_seconds:p95",
    "itl_p95": "gpu_fleet:service_itl_seconds:p95",
}
REPLICA = {
    "wanted": "gpu_fleet:replica_wanted",
    "right": "gpu_fleet:replica_right",
    "running": "gpu_fleet:replica_running",
    "waiting": "gpu_fleet:replica_waiting",
    "tokens_per_second": "gpu_fleet:replica_generation_tokens:rate5m",
    "kv_usage": "gpu_fleet:replica_kv_usage:ratio",
    "restarts": "sum by (service, replica) (gpu_fleet_restarts_total)",
    "limit_reached": "max by (service, replica) (gpu_fleet_limit_reached)",
    "maintenance": "gpu_fleet:replica_maintenance",
}
HOST = {
    "up": 'max by (host) (up{job="node"})',
    "maintenance": "gpu_fleet:host_maintenance",
    "gpus": "gpu_fleet:host_gpus",
    "gpu_utilization": "avg by (host) (gpu_fleet_gpu_utilization_ratio)",
    "gpu_memory_used": "sum by (host) (gpu_fleet_gpu_memory_used_bytes)",
    "gpu_memory": "sum by (host) (gpu_fleet_gpu_memory_bytes)",
}
LEVELS = {"service": SERVICE, "replica": REPLICA, "host": HOST}
WORST = {"critical": 0, "warning": 1}

SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Sample(NamedTuple):
    name: str
    labels: Dict[str, str]
    value: float


def queries() -> Dict[str, str]:
    """What Prometheus is asked: LEVEL.FIELD to expression."""
    return {f"{level}.{field}": text for level, fields in LEVELS.items() for field, text in fields.items()}


def from_prometheus(
    results: Mapping[str, Sequence[Mapping[str, Any]]], alerts: Iterable[Mapping[str, Any]]
) -> Dict[str, Any]:
    """results: by query, `data.result` of /api/v1/query; alerts: `data.alerts` of /api/v1/alerts."""
    tables: Dict[str, Dict[str, Dict[str, Any]]] = {level: {} for level in LEVELS}
    for key, found in results.items():
        level, _, field = key.partition(".")
        for entry in found:
            name = entry["metric"].get(level)
            if name is None:
                continue
            row = tables[level].setdefault(name, {level: name, **dict.fromkeys(LEVELS[level])})
            row[field] = _finite(entry["value"][1])
            if level == "replica":
                row["service"] = entry["metric"].get("service")
    raised = [
        {
            "alert": alert["labels"].get("alertname"),
            "severity": alert["labels"].get("severity"),
            "state": alert.get("state"),
            "summary": alert.get("annotations", {}).get("summary", ""),
            "since": alert.get("activeAt"),
        }
        for alert in alerts
    ]
    return _status("prometheus", tables, raised)


def _status(
    source: str, tables: Mapping[str, Mapping[str, Dict[str, Any]]], alerts: List[Dict[str, Any]]
) -> Dict[str, Any]:
    services = []
    for name, row in sorted(tables["service"].items()):
        services.append({"name": name, **{key: value for key, value in row.items() if key != "service"}})
    alerts.sort(key=lambda alert: (alert["state"] != "firing", WORST.get(alert["severity"], 2), str(alert["alert"])))
    return {
        "source": source,
        "services": services,
        "replicas": [row for _, row in sorted(tables["replica"].items())],
        "hosts": [row for _, row in sorted(tables["host"].items())],
        "alerts": alerts,
    }


def _finite(text: Any) -> Optional[float]:
    value = float(text)
    return value if math.isfinite(value) else None


def wrong(status: Mapping[str, Any]) -> bool:
    """Whether something is not as it should be: a replica without a right answer, or an alert that fires."""
    unwell = any(row["right"] != 1 and not row["maintenance"] for row in status["replicas"])
    return unwell or any(a["state"] == "firing" and a["severity"] in WORST for a in status["alerts"])


# --- From the hosts themselves ----------------------------------------------------------------------------------------


def samples(text: str) -> List[Sample]:
    """Prometheus' text format 0.0.4. Lines that are none are left out."""
    found = []
    for line in text.splitlines():
        hit = SAMPLE.match(line)
        if hit and not line.startswith("#"):
            try:
                found.append(Sample(hit.group(1), dict(LABEL.findall(hit.group(2) or "")), float(hit.group(3))))
            except ValueError:
                continue
    return found


def agent_urls(plan: Mapping[str, Any], host: str) -> Dict[str, str]:
    """Where the agents of a host answer, by instance."""
    found = {}
    for rank in plan["hosts"].get(host, {}).get("instances", []):
        address = plan["addresses"][host] if rank["agent_clients"] else monitoring.LOOPBACK
        joined = f"[{address}]" if ":" in address else address
        found[rank["instance"]] = f"http://{joined}:{rank['ports']['agent']}/"
    return found


def pages(plan: Mapping[str, Any], host: str) -> Dict[str, str]:
    """What a host is asked about itself: KIND INSTANCE to URL."""
    found = {f"agent {instance}": f"{url}metrics" for instance, url in agent_urls(plan, host).items()}
    for instance, replica in plan["replicas"].items():
        if host in replica["urls"] and instance not in plan.get("maintenance", {}).get("replicas", ()):
            found[f"vllm {instance}"] = f"{replica['urls'][host]}/metrics"
    return found


def from_hosts(
    plan: Mapping[str, Any],
    metrics: Mapping[str, Any],
    told: Mapping[str, Mapping[str, Mapping[str, Any]]],
    gpus: Mapping[str, Mapping[str, Any]],
) -> Dict[str, Any]:
    """told: by host and page, `first` and `second` text and the `seconds` between; gpus: by host, numbers of its GPUs."""
    tables: Dict[str, Dict[str, Dict[str, Any]]] = {level: {} for level in LEVELS}
    buckets: Dict[Tuple[str, str], Dict[float, float]] = {}
    rests = plan.get("maintenance", {})
    for instance, replica in plan["replicas"].items():
        service = replica["service"]
        if instance in rests.get("replicas", ()):
            away = {
                "replica": instance,
                "service": service,
                **dict.fromkeys(REPLICA),
                "wanted": 0.0,
                "maintenance": 1.0,
            }
            tables["replica"][instance] = away
            tables["service"].setdefault(service, {**dict.fromkeys(SERVICE), "wanted": 0.0, "right": 0.0})
            continue
        row = {"replica": instance, "service": service, **dict.fromkeys(REPLICA), "wanted": 1.0, "right": 0.0}
        tables["replica"][instance] = row
        total = tables["service"].setdefault(service, {**dict.fromkeys(SERVICE), "wanted": 0.0, "right": 0.0})
        for answers in told.values():
            agent = samples(answers.get(f"agent {instance}", {}).get("second", ""))
            for field, name in (("restarts", "gpu_fleet_restarts_total"), ("limit_reached", "gpu_fleet_limit_reached")):
                for sample in agent:
                    if sample.name == name:
                        row[field] = (row[field] or 0.0) + sample.value
            row["right"] = max([row["right"], *(s.value for s in agent if s.name == "gpu_fleet_probe_right")])
            page = answers.get(f"vllm {instance}")
            if page and page.get("second"):
                _server(row, total, buckets, page, _names(metrics, replica["version"]))
        total["wanted"] += 1.0
        total["right"] += row["right"]
    for (service, field), counts in buckets.items():
        tables["service"][service][field] = quantile(0.95, counts)
    for host in plan["hosts"]:
        tables["host"][host] = {
            "host": host,
            **dict.fromkeys(HOST),
            "up": 1.0 if host in told else 0.0,
            "maintenance": 1.0 if host in rests.get("hosts", ()) else None,
            **gpus.get(host, {}),
        }
    return _status("hosts", tables, [])


def gpus_of(facts: Mapping[str, Any]) -> Dict[str, Any]:
    """Numbers of a host's GPUs from the result of module gpu_facts."""
    gpus = facts.get("gpus") or []
    if not gpus:
        return {}
    memory = [gpu["memory_mib"] for gpu in gpus if gpu.get("memory_mib")]
    return {"gpus": float(len(gpus)), "gpu_memory": float(sum(memory) << 20) if memory else None}


def _names(metrics: Mapping[str, Any], version: str) -> Dict[str, str]:
    found = {}
    for notion in metrics:
        try:
            found[notion] = monitoring.names(metrics, notion, [version])[0]
        except monitoring.Absent:
            continue
    return found


def _server(
    row: Dict[str, Any],
    total: Dict[str, Any],
    buckets: Dict[Tuple[str, str], Dict[float, float]],
    page: Mapping[str, Any],
    names: Mapping[str, str],
) -> None:
    """Add what one server says to its replica and its service."""
    first, second = samples(page["first"]), samples(page["second"])

    def summed(found: Sequence[Sample], notion: str) -> Optional[float]:
        values = [sample.value for sample in found if sample.name == names.get(notion)]
        return sum(values) if values else None

    fresh: Dict[str, Optional[float]] = {name: summed(second, name) for name in ("running", "waiting", "kv_usage")}
    for field, notion in (
        ("tokens_per_second", "generation_tokens"),
        ("prompt_tokens_per_second", "prompt_tokens"),
    ):
        before, after = summed(first, notion), summed(second, notion)
        if before is not None and after is not None and page["seconds"] > 0:
            fresh[field] = max(0.0, after - before) / page["seconds"]
    for field, value in fresh.items():
        for place in (row, total):
            if value is None or field not in place:
                continue
            if field == "kv_usage":
                place[field] = max(place[field] or 0.0, value)
            else:
                place[field] = (place[field] or 0.0) + value
    for field, notion in (("ttft_p95", "ttft"), ("itl_p95", "itl")):
        for sample in second:
            if sample.name == f"{names.get(notion)}_bucket":
                counts = buckets.setdefault((row["service"], field), {})
                bound = float(sample.labels.get("le", "nan"))
                counts[bound] = counts.get(bound, 0.0) + sample.value


def quantile(share: float, counts: Mapping[float, float]) -> Optional[float]:
    """A quantile from cumulative buckets, as Prometheus' histogram_quantile has it."""
    bounds = sorted(counts)
    if len(bounds) < 2 or not math.isinf(bounds[-1]) or counts[bounds[-1]] <= 0:
        return None
    rank = share * counts[bounds[-1]]
    low, before = 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= rank:
            if math.isinf(bound):
                return bounds[-2]
            return low + (bound - low) * (rank - before) / (counts[bound] - before or 1.0)
        low, before = bound, counts[bound]
    return None
