"""From the plan to what Prometheus is told: whom it asks, what it computes, when it raises an alert. Pure: data in, dicts out.

data/metrics.yml says how vLLM's metrics are called by version, data/recordings.yml and data/alerts.yml have the rules. In their
expressions stand
    ${running}                the selector of a notion of metrics.yml, for every name that the fleet's versions give it
    ${rate finished 5m}       the rate of a counter; ${rate ttft_bucket 5m} of a histogram's buckets
    ${set waiting}            a threshold
A rule that asks for what no version in the fleet has is left out, and so is what builds on it.
"""

from __future__ import annotations

import calendar
import re
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils.findings import did_you_mean

# Prometheus' model.Duration, without what is mixed.
DURATION = re.compile(r"[1-9]\d*(ms|s|m|h|d|w|y)")
PLACE = re.compile(r"\$\{([a-z_ 0-9]+)\}")
OWN = re.compile(r"gpu_fleet:[a-zA-Z0-9_:]+")
JOB = "vllm"
LOOPBACK = "127.0.0.1"
# What an objective of a service is called, and the constant that rules compare with.
OBJECTIVES = {
    "ttft_seconds": "gpu_fleet:objective_ttft_seconds",
    "itl_seconds": "gpu_fleet:objective_itl_seconds",
    "tokens_per_second": "gpu_fleet:baseline_tokens",
    "running": "gpu_fleet:baseline_running",
}
RUNBOOKS = "docs/runbooks"


class Absent(Exception):
    """No version in the fleet has the metric."""


def _number(version: str) -> Tuple[int, ...]:
    """A version that counts: 0.6.6.post1 and 0.32.0+cpu are 0.6.6 and 0.32.0."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def names(metrics: Mapping[str, Any], notion: str, versions: Iterable[str]) -> List[str]:
    """The names that these versions of vLLM give a notion, each once. Raises Absent where none has it."""
    found: Dict[str, None] = {}
    for version in versions:
        for entry in metrics[notion]["names"]:
            last = entry.get("last")
            if _number(entry["first"]) <= _number(version) and (last is None or _number(version) <= _number(last)):
                found[entry["name"]] = None
                break
    if not found:
        raise Absent(notion)
    return list(found)


def fill(expression: str, metrics: Mapping[str, Any], versions: Sequence[str], thresholds: Mapping[str, float]) -> str:
    """An expression as Prometheus reads it. Raises Absent, and KeyError for what is no notion and no threshold."""

    def one(found: "re.Match[str]") -> str:
        words = found.group(1).split()
        if words[0] == "set":
            return f"{float(thresholds[words[1]]):g}"
        if words[0] == "rate":
            notion, part = words[1], ""
            if notion.endswith("_bucket"):
                notion, part = notion[: -len("_bucket")], "_bucket"
            parts = [f'rate({name}{part}{{job="{JOB}"}}[{words[2]}])' for name in names(metrics, notion, versions)]
        else:
            parts = [f'{name}{{job="{JOB}"}}' for name in names(metrics, words[0], versions)]
        return " or ".join(parts)

    return PLACE.sub(one, expression)


def documented(expression: str, known: Mapping[str, Any]) -> str:
    """An alert's expression for people: with the thresholds' defaults; alerts name no metric of vLLM."""
    defaults = {name: entry["value"] for name, entry in known["thresholds"].items()}
    return " ".join(fill(expression, known["metrics"], (), defaults).split())


def rules(plan: Mapping[str, Any], known: Mapping[str, Any], settings: Mapping[str, Any]) -> Dict[str, Any]:
    """A rule file: its groups.

    known      metrics, recordings, alerts: the content of those files of data/
    settings   thresholds; alert_for: name of an alert to the time that it takes to fire; objectives: service to ttft_seconds, itl_seconds, tokens_per_second, running; keys: name to the
               seconds since 1970 at which it ends; runbooks: what stands before NAME.md in runbook_url
    """
    versions = sorted({replica["version"] for replica in plan["replicas"].values()}, key=_number)
    constants = _constants(plan, settings)
    defined = {rule["record"] for rule in constants}

    def expression(entry: Mapping[str, Any]) -> Optional[str]:
        if set(OWN.findall(entry["expr"])) - defined:
            return None
        try:
            return " ".join(fill(entry["expr"], known["metrics"], versions, settings["thresholds"]).split())
        except Absent:
            return None

    computed = []
    for entry in known["recordings"]:
        told = expression(entry)
        if told:
            computed.append({"record": entry["record"], "expr": told})
            defined.add(entry["record"])
    raised = []
    for entry in known["alerts"]:
        told = expression(entry)
        if told:
            page = f"{str(settings.get('runbooks') or RUNBOOKS).rstrip('/')}/{entry['alert']}.md"
            raised.append(
                {
                    "alert": entry["alert"],
                    "expr": told,
                    **(
                        {"for": lasts}
                        if (lasts := settings.get("alert_for", {}).get(entry["alert"]) or entry.get("for"))
                        else {}
                    ),
                    "labels": {"severity": entry["severity"]},
                    "annotations": {"summary": entry["summary"], "runbook_url": page},
                }
            )
    groups = [("gpu_fleet_plan", constants), ("gpu_fleet", computed), ("gpu_fleet_alerts", raised)]
    return {"groups": [{"name": name, "rules": content} for name, content in groups if content]}


def _constants(plan: Mapping[str, Any], settings: Mapping[str, Any]) -> List[Dict[str, Any]]:
    """What the inventory says, as series: rules compare with them."""

    def constant(record: str, value: float, **labels: str) -> Dict[str, Any]:
        return {"record": record, "expr": f"vector({float(value):.10g})", "labels": labels}

    found = []
    rests = plan.get("maintenance", {})
    found += [constant("gpu_fleet:host_maintenance", 1, host=host) for host in rests.get("hosts", ())]
    for instance, replica in plan["replicas"].items():
        labels = {"service": replica["service"], "replica": instance}
        if instance in rests.get("replicas", ()):  # wanted by nobody, so that nothing is missed
            found.append(constant("gpu_fleet:replica_maintenance", 1, **labels))
            continue
        found.append(constant("gpu_fleet:replica_wanted", 1, **labels))
        found.append(constant("gpu_fleet:replica_ranks", len(replica["hosts"]), **labels))
        most = max_num_seqs(plan, instance)
        if most:
            found.append(constant("gpu_fleet:replica_max_num_seqs", most, **labels))
    for service, objectives in settings.get("objectives", {}).items():
        for name, record in OBJECTIVES.items():
            if objectives.get(name) is not None:
                found.append(constant(record, objectives[name], service=service))
    for key, ends in settings.get("keys", {}).items():
        found.append(constant("gpu_fleet:key_expires_seconds", ends, key=key))
    return found


def max_num_seqs(plan: Mapping[str, Any], instance: str) -> Optional[int]:
    """How many requests a replica works on at once, where the plan says it. Data-parallel ranks have as many each."""
    replica = plan["replicas"][instance]
    for entry in plan["hosts"][replica["head"]]["instances"]:
        value = entry["config"].get("max-num-seqs") if entry["instance"] == instance else None
        if isinstance(value, int) and not isinstance(value, bool):
            return value * int(replica.get("data") or 1)
    return None


def judge(
    settings: Mapping[str, Any], services: Sequence[str], thresholds: Mapping[str, Any], alerts: Sequence[str]
) -> List[Tuple[str, str]]:
    """What is wrong with the variables of role monitoring besides their types: what was seen, and what to do.

    settings are the variables without the role's prefix.
    """
    found: List[Tuple[str, str]] = []
    for name, value in (settings.get("thresholds") or {}).items():
        if name not in thresholds:
            known = f"{did_you_mean(name, thresholds)}There are {', '.join(thresholds)}"
            found.append((f"monitoring_thresholds has {name}, which no alert asks for", known))
        elif not _is_number(value):
            found.append((f"monitoring_thresholds: {name} is {value!r}", f"Give a number: {thresholds[name]['what']}"))
    found += _judge_times(settings.get("alert_for") or {}, alerts)
    for service, objectives in (settings.get("objectives") or {}).items():
        if service not in services:
            known = f"{did_you_mean(service, services)}There are {', '.join(services) or 'none'}"
            found.append((f"monitoring_objectives names {service}, which is no service", known))
        if not isinstance(objectives, dict):
            found.append((f"monitoring_objectives: {service} is {objectives!r}", f"Give {', '.join(OBJECTIVES)}"))
            continue
        for name, value in objectives.items():
            if name not in OBJECTIVES:
                known = f"{did_you_mean(name, OBJECTIVES)}There are {', '.join(OBJECTIVES)}"
                found.append((f"monitoring_objectives: {service} has {name}", known))
            elif not _is_number(value) or value <= 0:
                found.append((f"monitoring_objectives: {service}: {name} is {value!r}", "Give a number above 0"))
    for name in ("interval", "retention"):
        if not DURATION.fullmatch(str(settings.get(name))):
            found.append(
                (f"monitoring_{name} is {settings.get(name)!r}", "Write a time as Prometheus does: 15s, 1m, 15d")
            )
    found += _judge_port(settings.get("haproxy_port"))
    if settings.get("mode") == "files" and not settings.get("files_into"):
        fix = "Name a folder of the controller for rules, targets and prometheus.yml"
        found.append(("monitoring_mode is files, and monitoring_files_into is empty", fix))
    return found


def _judge_times(times: Mapping[str, Any], alerts: Sequence[str]) -> List[Tuple[str, str]]:
    found: List[Tuple[str, str]] = []
    for name, value in times.items():
        if name not in alerts:
            fix = f"{did_you_mean(name, alerts)}docs/runbooks has them all"
            found.append((f"monitoring_alert_for has {name}, which is no alert", fix))
        elif value != "0s" and not DURATION.fullmatch(str(value)):
            fix = "Write a time as Prometheus does: 0s, 30s, 5m"
            found.append((f"monitoring_alert_for: {name} is {value!r}", fix))
    return found


def _judge_port(port: Any) -> List[Tuple[str, str]]:
    """The one variable whose type the role's argument spec leaves open."""
    if port is None or (isinstance(port, int) and not isinstance(port, bool) and 0 < port < 65536):
        return []
    return [(f"monitoring_haproxy_port is {port!r}", "Give a port, a whole number from 1 to 65535, or null")]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# --- Whom Prometheus asks ---------------------------------------------------------------------------------------------


def targets(
    plan: Mapping[str, Any], hosts: Mapping[str, Mapping[str, Any]], ports: Mapping[str, Optional[int]]
) -> Dict[str, List[Dict[str, Any]]]:
    """By job, entries of a file of targets (file_sd_config of Prometheus).

    hosts   every host of the fleet by name: address, groups, local (whether it is this monitor itself)
    ports   by job what is asked on each host: node on all; dcgm on GPU hosts, haproxy on gateways, where they are given
    """
    found: Dict[str, List[Dict[str, Any]]] = {JOB: [], "vllm_agent": []}
    rests = plan.get("maintenance", {})
    for instance, replica in plan["replicas"].items():
        if instance in rests.get("replicas", ()):
            continue
        labels = {"service": replica["service"], "replica": instance}
        for host, url in replica["urls"].items():
            # With hybrid balancing every host has an API; the rank is its place among the replica's hosts.
            rank = replica["hosts"].index(host) if host in replica["hosts"] else 0
            scheme, _, where = url.partition("://")
            # Prometheus' own label for how a target is asked, gone afterwards.
            spoken = {"__scheme__": scheme} if scheme == "https" else {}
            found[JOB].append(_target(where, {**labels, "host": host, "rank": str(rank), **spoken}))
    for host, entry in plan["hosts"].items():
        for rank in entry["instances"]:
            # An agent that nobody else may ask listens on the host itself alone (agent_config.py).
            address = plan["addresses"][host] if rank["agent_clients"] else LOOPBACK
            labels = {"service": rank["service"], "replica": rank["instance"], "host": host, "rank": str(rank["rank"])}
            found["vllm_agent"].append(_target(_joined(address, rank["ports"]["agent"]), labels))
    for job, group in (("node", None), ("dcgm", "gpu_hosts"), ("haproxy", "gateways")):
        port = ports.get(job)
        if port:
            found[job] = [
                _target(_joined(told["address"], port), {"host": name})
                for name, told in hosts.items()
                if group is None or group in told["groups"]
                # One in maintenance may be off; what else it is for the fleet is not.
                if name not in rests.get("hosts", ()) or {"gateways", "monitors"} & {*told["groups"]}
            ]
    return found


def _target(where: str, labels: Mapping[str, str]) -> Dict[str, Any]:
    return {"targets": [where], "labels": dict(labels)}


def _joined(address: Any, port: int) -> str:
    return f"[{address}]:{port}" if ":" in str(address) else f"{address}:{port}"


def by_tls(plan: Mapping[str, Any]) -> bool:
    """Whether any server is asked by TLS, so that a monitor needs the fleet's CA."""
    return any(replica.get("tls") for replica in plan["replicas"].values())


def scrape_configs(jobs: Iterable[str], folder: str, interval: str, ca: str = "") -> List[Dict[str, Any]]:
    """Prometheus' scrape_configs: a job a file of targets. What agents say of themselves is in the targets' labels already.

    ca   by which servers that speak TLS are believed; those that do not are asked in clear all the same
    """
    found = []
    for job in jobs:
        config: Dict[str, Any] = {
            "job_name": job,
            "scrape_interval": interval,
            "file_sd_configs": [{"files": [f"{folder.rstrip('/')}/{job}.json"]}],
        }
        if job == JOB and ca:
            config["tls_config"] = {"ca_file": ca}
        if job == "vllm_agent":
            config["metric_relabel_configs"] = [
                {"action": "labeldrop", "regex": "exported_(instance|service|rank)"},
            ]
        found.append(config)
    return found


# --- Prometheus and Alertmanager ----------------------------------------------------------------------------------------


def files(
    plan: Mapping[str, Any],
    known: Mapping[str, Any],
    hosts: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> Dict[str, Any]:
    """What a monitor reads, by file name below `folder`: rules.yml, prometheus.yml, alertmanager.yml, targets/JOB.json.

    settings are the variables of role monitoring without its prefix, and host (this monitor's name), folder, local (whether Prometheus
    and Alertmanager run on it).
    """
    ports = {"node": settings["node_exporter_port"] if settings["node_exporter"] else None}
    ports.update({job: settings[f"{job}_port"] for job in ("dcgm", "haproxy")})
    defaults = {name: entry["value"] for name, entry in known["thresholds"].items()}
    told = {
        "thresholds": {**defaults, **settings["thresholds"]},
        "alert_for": settings["alert_for"],
        "objectives": settings["objectives"],
        "keys": key_ends(settings["keys"]),
        "runbooks": settings["runbooks"],
    }
    found = targets(plan, hosts, ports)
    made: Dict[str, Any] = {f"targets/{job}.json": entries for job, entries in found.items()}
    made["rules.yml"] = rules(plan, known, told)
    ca = f"{settings['folder']}/ca.pem" if by_tls(plan) else ""
    made["prometheus.yml"] = prometheus(found, settings, ca)
    if settings["local"]:
        made["alertmanager.yml"] = alertmanager(settings)
    return made


def prometheus(jobs: Iterable[str], settings: Mapping[str, Any], ca: str = "") -> Dict[str, Any]:
    """Prometheus' configuration; for somebody else's Prometheus the part of it that is ours."""
    folder, interval = settings["folder"], settings["interval"]
    config: Dict[str, Any] = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [f"{folder}/rules.yml"],
        "scrape_configs": scrape_configs(jobs, f"{folder}/targets", interval, ca),
    }
    if not settings["local"]:
        return config
    own = {
        "prometheus": _joined(settings["listen"], settings["prometheus_port"]),
        "alertmanager": _joined(settings["listen"], settings["alertmanager_port"]),
    }
    config["scrape_configs"] += [
        {"job_name": job, "static_configs": [_target(where, {"host": settings["host"]})]} for job, where in own.items()
    ]
    config["alerting"] = {
        "alertmanagers": [{"static_configs": [{"targets": [own["alertmanager"], *settings["alertmanagers"]]}]}]
    }
    if settings["external_labels"]:
        config["global"]["external_labels"] = dict(settings["external_labels"])
    if settings["remote_write"]:
        config["remote_write"] = list(settings["remote_write"])
    return config


def alertmanager(settings: Mapping[str, Any]) -> Dict[str, Any]:
    """Alertmanager's configuration. Without receivers of the user's it shows alerts and tells nobody."""
    receivers = [*settings["receivers"]] or [{"name": "nobody"}]
    route = {
        "receiver": receivers[0]["name"],
        "group_by": ["alertname", "service", "host"],
        "group_wait": "30s",
        "group_interval": "5m",
        "repeat_interval": "4h",
        **settings["route"],
    }
    return {
        "route": route,
        "receivers": receivers,
        # What another alert explains.
        "inhibit_rules": [
            {
                "source_matchers": ['alertname="ServiceDown"'],
                "target_matchers": ['alertname="ReplicaDown"'],
                "equal": ["service"],
            },
            {
                "source_matchers": ['alertname="HostDown"'],
                "target_matchers": ['alertname=~"AgentDown|RankDown|PeersUnreachable|HostMetricsOld|GatewayDown"'],
                "equal": ["host"],
            },
        ],
    }


def key_ends(keys: Iterable[Mapping[str, Any]]) -> Dict[str, float]:
    """When clients' keys end, seconds since 1970: those with `expires`, a day, to whose end in UTC the key is good."""
    ends = {}
    for key in keys:
        day = re.fullmatch(r"(\d{4})-(\d{2})-(\d{2})", str(key.get("expires") or ""))
        if day:
            ends[str(key["name"])] = float(calendar.timegm((*map(int, day.groups()), 24, 0, 0)))
    return ends
