# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""An acceptance, from the plan of a fleet to a job for its hosts, and from what they measured to one document.

The document is what is kept (JSON), compared and reported: docs/acceptance.md lists its fields. Nothing secret is in it.

Pure: standard library, Python 3.9 and newer, no Ansible import. Data comes as arguments.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Dict, List, Mapping, Optional, Sequence

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import (
    bench_compare,
    bench_judge,
    bench_plan,
    hardware,
    maintenance,
    monitoring,
)
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.findings import did_you_mean
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.launch_case import size_of

FORMAT = 1
NOTIONS = (
    "running",
    "waiting",
    "kv_usage",
    "preemptions",
    "prompt_tokens",
    "generation_tokens",
    "prefix_queries",
    "prefix_hits",
)
# Seats of a server whose plan names none: what vLLM takes where nothing else is said (256 in vllm/engine/arg_utils.py).
SEATS = 256
OBJECTIVE = (*bench_plan.LATENCIES, "failed_share")
KEPT_LOOKS = 600  # samples of a host that a document keeps, of several in a row the one with the most memory


class BadSetting(ValueError):
    """What cannot be measured as it was asked for; the message names it and says what to do."""


# The job --------------------------------------------------------------------------------------------------------------


def chosen(plan: Mapping[str, Any], service: str = "", replica: str = "") -> str:
    """The replica that is measured: the one that is named, or the first of its service, or of the only service."""
    if replica:
        if replica not in plan["replicas"]:
            hint = did_you_mean(replica, plan["replicas"])
            raise BadSetting(f"accept_replica: there is no {replica}. {hint}There are {', '.join(plan['replicas'])}")
        if replica in maintenance.resting(plan):
            raise BadSetting(f"accept_replica: {replica} is in maintenance (vllm_host_state)")
        return replica
    if service and service not in plan["services"]:
        hint = did_you_mean(service, plan["services"])
        raise BadSetting(f"accept_service: there is no {service}. {hint}There are {', '.join(plan['services'])}")
    if not service and len(plan["services"]) != 1:
        raise BadSetting(f"accept_service: name one of {', '.join(plan['services']) or 'no service at all'}")
    name = service or next(iter(plan["services"]))
    serving = [one for one in plan["services"][name]["replicas"] if one not in maintenance.resting(plan)]
    if not serving:
        raise BadSetting(f"accept_service: all replicas of {name} are in maintenance (vllm_host_state)")
    return serving[0]


def hosts_of(of: Mapping[str, Any]) -> List[str]:
    """Every host with a part in a replica; with Ray more than those that have a server."""
    return list(of.get("ray_hosts") or of["hosts"])


def rank(plan: Mapping[str, Any], replica: str, host: str) -> Mapping[str, Any]:
    """What a host runs of a replica."""
    return next(one for one in plan["hosts"][host]["instances"] if one["instance"] == replica)


def objective(settings: Mapping[str, Any], watched: Mapping[str, Any], known: Mapping[str, Any]) -> Dict[str, Any]:
    """The user's accept_objective, else the service's monitoring_objectives, else the default of data/objectives.yml."""
    own = settings.get("objective") or {}
    for name in own:
        if name not in OBJECTIVE:
            raise BadSetting(
                f"accept_objective: there is no {name}. {did_you_mean(name, OBJECTIVE)}There are {', '.join(OBJECTIVE)}"
            )
        if isinstance(own[name], bool) or not isinstance(own[name], (int, float)) or own[name] < 0:
            raise BadSetting(f"accept_objective: {name} is {own[name]!r}; give a number")
    if own:
        return {"failed_share": 0.0, **own, "from": "accept_objective"}
    found = {
        f"{metric}_p95_ms": watched[f"{metric}_seconds"] * 1000
        for metric in ("ttft", "itl")
        if watched.get(f"{metric}_seconds") is not None
    }
    if found:
        return {"failed_share": 0.0, **found, "from": "monitoring_objectives"}
    return {**known["default"], "from": "the default of data/objectives.yml"}


WHOLE = ("input_tokens", "output_tokens", "repeats", "least_prompts", "seed")
NUMBERS = ("seconds_per_point", "budget")


def typed(settings: Mapping[str, Any]) -> Dict[str, Any]:
    """Settings as numbers and truths: from a playbook's templates they come as texts. Raises BadSetting."""
    found = dict(settings)
    for name in (*WHOLE, *NUMBERS):
        try:
            found[name] = float(settings[name])
            if name in WHOLE:
                if found[name] != int(found[name]):
                    raise ValueError
                found[name] = int(found[name])
        except (TypeError, ValueError, OverflowError) as error:
            kind = "a whole number" if name in WHOLE else "a number"
            raise BadSetting(f"accept_{name} is {settings[name]!r}; give {kind}") from error
    found["full"] = truth(settings.get("full", True))
    return found


def truth(value: Any) -> bool:
    return str(value).strip().lower() in ("true", "yes", "on", "1")


def job(
    plan: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    watched: Mapping[str, Any],
    metrics: Mapping[str, Any],
    known: Mapping[str, Any],
    folder: str,
) -> Dict[str, Any]:
    """What the hosts are given. Raises BadSetting and bench_plan.BadJob.

    settings   the variables of playbooks/accept.yml without their `accept_`
    watched    monitoring_objectives, by service
    folder     of the hosts, for the job and what it brings
    """
    settings = typed(settings)
    replica = chosen(plan, settings.get("service", ""), settings.get("replica", ""))
    of = plan["replicas"][replica]
    config = rank(plan, replica, of["head"])["config"]
    length = size_of(config.get("max-model-len"))
    longest = length if length and length > 0 else None  # -1 is vLLM's own choice
    seats = size_of(config.get("max-num-seqs")) or SEATS
    prompts = settings.get("prompts_text") or ""
    if settings.get("url") and not truth(settings.get("has_key")):
        raise BadSetting("accept_url needs accept_key: the service's own key is not good for another way to it")
    load: Dict[str, Any] = {
        "replica": replica,
        "service": of["service"],
        "head": of["head"],
        "hosts": hosts_of(of),
        "through": settings.get("url") or "direct",
        "base_url": (settings.get("url") or of["url"]).rstrip("/"),
        "metrics_url": f"{of['url']}/metrics",
        "names": _names(metrics, of["version"]),
        "model": config["served-model-name"][0],
        "tokenizer": config.get("tokenizer") or config["model"],
        "trust_remote_code": bool(config.get("trust-remote-code")),
        "dataset": "jsonl" if prompts else "random",
        "path": f"{folder}/prompts.jsonl",
        "prompts_digest": hashlib.sha256(prompts.encode()).hexdigest()[:16] if prompts else None,
        "input_tokens": settings["input_tokens"],
        "output_tokens": settings["output_tokens"],
        "max_model_len": longest,
        "max_num_seqs": seats,
        "concurrencies": settings.get("concurrencies") or bench_plan.concurrencies(2 * seats),
        "rates": settings.get("rates") or [],
        "repeats": settings["repeats"],
        "seconds_per_point": settings["seconds_per_point"],
        "least_prompts": settings["least_prompts"],
        "budget_seconds": settings["budget"],
        "full": settings["full"] and longest is not None,
        "objective": objective(settings, watched.get(of["service"]) or {}, known),
        "seed": settings["seed"],
    }
    bench_plan.check(load)
    return load


def _names(metrics: Mapping[str, Any], version: str) -> Dict[str, str]:
    found = {}
    for notion in NOTIONS:
        try:
            found[notion] = monitoring.names(metrics, notion, [version])[0]
        except monitoring.Absent:
            continue
    return found


def prompts(text: str) -> str:
    """A user's JSONL as the generator reads it: each line's `prompt` as the text of one user message.

    Raises BadSetting with the number of the line.
    """
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            told = json.loads(line)
        except ValueError as error:
            raise BadSetting(f"accept_prompts: line {number} is no JSON: {error}") from error
        prompt = told.get("prompt") if isinstance(told, dict) else None
        if not isinstance(prompt, str) or not prompt:
            raise BadSetting(
                f'accept_prompts: line {number} has no text `prompt`; a line is such as {{"prompt": "Who are you?"}}'
            )
        lines.append(json.dumps({"content": [{"type": "text", "text": prompt}]}))
    if not lines:
        raise BadSetting("accept_prompts: no line in it")
    return "\n".join(lines) + "\n"


# The document ---------------------------------------------------------------------------------------------------------


def document(
    job: Mapping[str, Any],
    plan: Mapping[str, Any],
    raw: Mapping[str, Any],
    kept: Sequence[Mapping[str, Any]],
    known: Mapping[str, Any],
) -> Dict[str, Any]:
    """One acceptance.

    raw     name, started (ISO 8601), collection (its version), progress (bench_driver), answers (module answers), rate (requests/s at
            peak or None), rebase; hosts: by name samples (bench_sample), before and after (`systemctl show`), gpu_facts or None
    kept    documents of earlier runs in the same folder
    """
    replica, of = job["replica"], plan["replicas"][job["replica"]]
    config = dict(rank(plan, replica, of["head"])["config"])
    runs = raw["progress"].get("runs", [])
    looks = raw["hosts"].get(of["head"], {}).get("samples", [])
    found, opened = bench_judge.points(runs), bench_judge.opened(runs)
    for some in (found, opened):
        bench_judge.use(some, runs, looks, of["gpus"])
    bend = bench_judge.knee(found, job["objective"], known)
    at = bench_judge.best(found, bend, known)
    gpus = len(of["gpus"] or []) * len(hosts_of(of))
    told: Dict[str, Any] = {
        "format": FORMAT,
        "name": raw["name"],
        "started": raw["started"],
        "seconds": round(raw["progress"].get("elapsed", 0.0), 1),
        "service": job["service"],
        "replica": replica,
        "model": plan["services"][job["service"]]["model"],
        "through": job["through"],
        "versions": {"vllm": of["version"], "accelerator": of["accelerator"], "collection": raw["collection"]},
        "config": {key: config[key] for key in sorted(config) if key not in ("host", "port", "master-addr")},
        "shape": {
            "hosts": ", ".join(hosts_of(of)),
            "GPUs": gpus,
            "GPU": _model_of(raw["hosts"], hosts_of(of)),
            "tensor": of["tensor"],
            "pipeline": of["pipeline"],
            "data": of.get("data", 1),
        },
        "memory_planned": of.get("memory"),
        "notes": list(of.get("notes") or []),
        "settings": {
            key: job[key]
            for key in (
                *("dataset", "prompts_digest", "input_tokens", "output_tokens", "concurrencies", "rates", "repeats"),
                *("seconds_per_point", "least_prompts", "budget_seconds", "max_num_seqs", "max_model_len", "seed"),
            )
        },
        "objective": job["objective"],
        "points": found,
        "open": opened,
        "runs": [{key: value for key, value in run.items() if key != "said"} for run in runs],
        "knee": bend,
        "answers": raw["answers"].get("answers", []),
        "samples": {host: thinned(seen["samples"]) for host, seen in raw["hosts"].items()},
        "gpu_facts": {host: seen.get("gpu_facts") for host, seen in raw["hosts"].items()},
        "problem": raw["progress"].get("problem", ""),
    }
    told["too_small"] = bench_judge.too_small(runs, looks, _settings(job, config, of, plan), known)
    at_best = [
        look
        for run in runs
        if at and run["concurrency"] == at["concurrency"]
        for look in bench_judge.within(looks, run)
    ]
    told["bound"] = bench_judge.bound(at_best, of["gpus"], known)
    told["recommendation"] = bench_judge.recommend(found, bend, gpus, _rate(raw.get("rate")), known)
    told["measured"] = _measured(told, runs, looks, max(gpus, 1))
    told["scaling"] = {"gpus": gpus, "throughput": at["median"]["output_tokens_per_second"] if at else None}
    earlier = sorted((one for one in kept if one["service"] == job["service"]), key=lambda one: one["started"])
    accepted = [one for one in earlier if one["outcome"] in ("pass", "warn") and one.get("answers")]
    before = (
        None
        if truth(raw.get("rebase")) or not accepted
        else {"name": _told(accepted[-1]), "answers": accepted[-1]["answers"]}
    )
    point = next((one for one in found if one["concurrency"] == bend["concurrency"]), None)
    told["verdicts"] = [
        *_broken(told, found),
        bench_judge.memory(
            {"hosts": _hosts(raw["hosts"], of), "utilization": config.get("gpu-memory-utilization")}, known
        ),
        bench_judge.full(runs, looks, known),
        bench_judge.scaling(gpus, told["scaling"]["throughput"], _one_gpu(told, kept), _links(raw["hosts"], of), known),
        bench_judge.sameness(raw["answers"], before, known),
        bench_judge.settings(told["too_small"], runs, looks),
        bench_judge.generator(point, known),
    ]
    told["outcome"] = bench_judge.outcome(told["verdicts"])
    # The last one of the same load, since no other can be judged, and of as many GPUs if there is one; else the last.
    like = [one for one in earlier if not bench_compare.other_load(one, told)]
    like = [one for one in like if one["scaling"]["gpus"] == gpus] or like or earlier
    told["differences"] = bench_compare.compare(like[-1], told) if like and found else None
    return told


def _rate(value: Any) -> Optional[float]:
    """Requests per second at peak, as a template tells it: an empty text is none."""
    if value is None or value == "":
        return None
    try:
        return float(value)
    except ValueError as error:
        raise BadSetting(f"accept_requests_per_second is {value!r}; give a number") from error


def _told(one: Mapping[str, Any]) -> str:
    return f"{one['name']} (vLLM {one['versions']['vllm']})"


def _broken(told: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """What keeps the run from saying anything: no load answered, or none kept the objective."""
    if told["problem"]:
        return [
            bench_judge.verdict(
                "load", "fail", [told["problem"]], "journalctl -u gpu-fleet-bench on the replica's head"
            )
        ]
    if not any(point["completed"] for point in found):
        texts = [text for run in told["runs"] for text in [run["problem"], *run["errors"]] if text]
        return [
            bench_judge.verdict(
                "load", "fail", ["no request was answered", *texts[:3]], "scripts/fleet doctor says why"
            )
        ]
    if told["knee"]["concurrency"] is None:
        first = found[0]
        names = [bench_judge.NAMES[name] for name in bench_judge.lacks(first, told["objective"])]
        return [
            bench_judge.verdict(
                "load",
                "fail",
                [f"even concurrency {first['concurrency']:g} misses the objective: {', '.join(names)}"],
                "a smaller or quantized model, faster GPUs, or another objective (accept_objective)",
            )
        ]
    return []


def _hosts(raw: Mapping[str, Mapping[str, Any]], of: Mapping[str, Any]) -> Dict[str, Any]:
    """By host of the replica: samples, its GPUs there, and whether the server began anew meanwhile."""
    found = {}
    for host in hosts_of(of):
        seen = raw.get(host, {})
        before, after = seen.get("before") or {}, seen.get("after") or {}
        found[host] = {
            "samples": seen.get("samples", []),
            "gpus": of["gpus"],
            "restarted": before.get("InvocationID") != after.get("InvocationID"),
            "load_s": _load_seconds(before),
        }
    return found


def _load_seconds(unit: Mapping[str, Any]) -> Optional[float]:
    """From the start of a server's unit to its first right answer, which the unit waits for (systemd.exec's microseconds)."""
    try:
        return (float(unit["ActiveEnterTimestampMonotonic"]) - float(unit["InactiveExitTimestampMonotonic"])) / 1e6
    except (KeyError, TypeError, ValueError):
        return None


def _model_of(raw: Mapping[str, Mapping[str, Any]], hosts: Sequence[str]) -> str:
    for host in hosts:
        gpus = (raw.get(host, {}).get("gpu_facts") or {}).get("gpus") or []
        if gpus:
            return str(gpus[0]["name"])
    return "none (CPU)"


def _links(raw: Mapping[str, Mapping[str, Any]], of: Mapping[str, Any]) -> Dict[str, str]:
    """The links between a replica's GPUs; over several hosts the network is the slowest of them."""
    if len(hosts_of(of)) > 1:
        return {"hosts": "network"}
    facts = raw.get(of["head"], {}).get("gpu_facts")
    if not facts or not of["gpus"]:
        return {}
    own = {str(number) for number in of["gpus"]}
    return {pair: link for pair, link in hardware.links(facts).items() if set(pair.split("-")) <= own}


def _settings(
    job: Mapping[str, Any], config: Mapping[str, Any], of: Mapping[str, Any], plan: Mapping[str, Any]
) -> Dict[str, Any]:
    if of["accelerator"] == "cpu":
        env = rank(plan, job["replica"], of["head"])["env"]
        cache = {"setting": "VLLM_CPU_KVCACHE_SPACE", "value": f"{env.get('VLLM_CPU_KVCACHE_SPACE', 'not set')}"}
    else:
        cache = {"setting": "gpu-memory-utilization", "value": f"{config.get('gpu-memory-utilization', 'not set')}"}
    return {"max_num_seqs": job["max_num_seqs"], "max_model_len": job["max_model_len"], "cache": cache}


def _measured(
    told: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], looks: Sequence[Mapping[str, Any]], gpus: int
) -> Optional[Dict[str, Any]]:
    """The sweep for the capacity table; None where it brought nothing."""
    sweep = [run for run in runs if run["kind"] == "sweep"]
    if not any(run["result"]["completed"] for run in sweep):
        return None
    inside = [look for run in sweep for look in bench_judge.within(looks, run)]
    asked, hit = (bench_judge.grew(inside, notion) for notion in ("prefix_queries", "prefix_hits"))
    about = {
        "service": told["service"],
        "model": told["model"].rpartition("/")[2],
        "gpu": told["shape"]["GPU"],
        "release": f"{told['versions']['vllm']} {told['versions']['accelerator']}",
        "date": told["started"][:10],
        "gpus_per_replica": gpus,
        "max_model_len": told["settings"]["max_model_len"],
    }
    return bench_judge.measured(about, runs, hit / asked if asked and hit is not None else 0.0)


def _one_gpu(told: Mapping[str, Any], kept: Sequence[Mapping[str, Any]]) -> Optional[Dict[str, Any]]:
    """The last kept run of the same load, model and release with one GPU of the same model."""
    for one in sorted(kept, key=lambda other: other["started"], reverse=True):
        same = (
            one["scaling"]["gpus"] == 1
            and one["outcome"] != "fail"
            and one["versions"]["vllm"] == told["versions"]["vllm"]
            and one["shape"]["GPU"] == told["shape"]["GPU"]
            and not bench_compare.other_load(one, told)
        )
        if same:
            return {"name": one["name"], "throughput": one["scaling"]["throughput"]}
    return None


def thinned(samples: Sequence[Mapping[str, Any]], most: int = KEPT_LOOKS) -> List[Mapping[str, Any]]:
    """So many samples at most, of several in a row the one with the most memory: a peak is kept."""
    if len(samples) <= most:
        return list(samples)
    step = -(-len(samples) // most)
    return [max(samples[place : place + step], key=used) for place in range(0, len(samples), step)]


def used(sample: Mapping[str, Any]) -> float:
    """MiB in use, over all GPUs; without any the server's own."""
    gpus = [gpu["used_mib"] for gpu in sample.get("gpus") or [] if gpu["used_mib"] is not None]
    return float(sum(gpus) if gpus else sample["memory"].get("server_mib") or 0.0)


def lines(told: Mapping[str, Any]) -> List[str]:
    """The outcome for people, a line each."""
    words = {"pass": "ok", "warn": "warning", "fail": "FAILED", "unknown": "not known"}
    whole = {"pass": "accepted", "warn": "accepted, with warnings", "fail": "NOT ACCEPTED", "unknown": "not known"}
    found = [f"{told['service']} ({told['replica']}), vLLM {told['versions']['vllm']}: {whole[told['outcome']]}"]
    for one in told["verdicts"]:
        found.append(f"  {one['name']}: {words[one['outcome']]}: {'; '.join(one['evidence'])}")
        if one["remedy"] and one["outcome"] != "pass":
            found.append(f"    {one['remedy']}")
    bend = told["knee"]
    if bend["concurrency"] is not None:
        where = f"{bend['concurrency']:g}" if bend["seen"] else f"{bend['concurrency']:g} or above (no load missed it)"
        found.append(f"  knee: concurrency {where}; {bend['rule']}")
    if told["recommendation"]:
        settings = ", ".join(f"{name} {value}" for name, value in told["recommendation"]["settings"].items())
        replicas = told["recommendation"]["replicas"]
        more = f", {replicas} replicas" if replicas else ""
        found.append(f"  run at: {settings}{more}: {'; '.join(told['recommendation']['evidence'])}")
    if told["differences"]:
        found.append(f"  against {told['differences']['old']}: {told['differences']['text']}")
    return found
