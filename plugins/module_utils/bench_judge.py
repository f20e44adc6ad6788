# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What runs of a load and samples of hosts say: points, knee, verdicts with their evidence, what to set.

A verdict is pass, warn (it works, and this should be known), fail, or unknown (nobody looked, or there is nothing to compare
with): unknown is never counted as pass. Its evidence is what was seen, in numbers, and its remedy what to do.

Limits come from data/objectives.yml. docs/acceptance.md has the rules in words.

Pure: standard library, Python 3.9 and newer, no Ansible import. Data comes as arguments.
"""

from __future__ import annotations

import math
from statistics import mean, median
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import answers, bench_plan

METRICS = (
    "requests_per_second",
    "output_tokens_per_second",
    "prompt_tokens_per_second",
    *(f"{metric}_p{share}_ms" for metric in ("ttft", "itl", "e2el") for share in (50, 95, 99)),
)
NAMES = {
    "requests_per_second": "requests/s",
    "output_tokens_per_second": "output tokens/s",
    "prompt_tokens_per_second": "prompt tokens/s",
    "failed_share": "failed requests",
    "completed": "answered requests",
    **{
        f"{metric}_p{share}_ms": f"{word} p{share}"
        for metric, word in (("ttft", "TTFT"), ("itl", "ITL"), ("e2el", "end to end"))
        for share in (50, 95, 99)
    },
}
WORST = {"fail": 0, "unknown": 1, "warn": 2, "pass": 3}
# What no service is accepted without; others may be not known, as a first run has nothing to compare with.
NEEDED = ("load", "memory", "full prompts")
Verdict = Dict[str, Any]


def verdict(name: str, outcome: str, evidence: Sequence[str], remedy: str = "") -> Verdict:
    return {"name": name, "outcome": outcome, "evidence": list(evidence), "remedy": remedy}


def outcome(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """The worst of the verdicts, without those that are not known and may be."""
    counted = [one["outcome"] for one in verdicts if one["outcome"] != "unknown" or one["name"] in NEEDED]
    return min(counted, key=lambda word: WORST[word], default="unknown")


# Points and knee ------------------------------------------------------------------------------------------------------


def points(runs: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """The sweep by concurrency: of each number its median over the repeats and its range, and how many there are."""
    groups: Dict[float, List[Mapping[str, Any]]] = {}
    for run in runs:
        if run["kind"] == "sweep":
            groups.setdefault(run["concurrency"], []).append(run)
    return [_point({"concurrency": load}, groups[load]) for load in sorted(groups)]


def opened(runs: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """Open loads by rate, likewise."""
    groups: Dict[float, List[Mapping[str, Any]]] = {}
    for run in runs:
        if run["kind"] == "open":
            groups.setdefault(run["rate"], []).append(run)
    return [_point({"rate": rate}, groups[rate]) for rate in sorted(groups)]


def _point(load: Dict[str, Any], runs: Sequence[Mapping[str, Any]]) -> Dict[str, Any]:
    results = [run["result"] for run in runs]
    answered = [result for result in results if result["completed"]]
    found: Dict[str, Any] = {
        **load,
        "repeats": len(runs),
        "completed": sum(result["completed"] for result in results),
        # The worst of the repeats: a load that fails once is not carried.
        "failed_share": max(result["failed_share"] for result in results),
        "median": {},
        "low": {},
        "high": {},
        "generator_cores": None,
        "errors": {},
    }
    for name in METRICS:
        values = [result[name] for result in answered if result.get(name) is not None]
        if values and len(answered) == len(results):
            found["median"][name] = median(values)
            found["low"][name], found["high"][name] = min(values), max(values)
    shares = [run["generator_cores"] for run in runs if run.get("generator_cores") is not None]
    found["generator_cores"] = max(shares) if shares else None
    for run in runs:
        for text, count in [*run.get("errors", {}).items(), *([(run["problem"], 1)] if run.get("problem") else [])]:
            found["errors"][text] = found["errors"].get(text, 0) + count
    return found


def lacks(point: Mapping[str, Any], objective: Mapping[str, Any]) -> List[str]:
    """What a point's medians do not keep of the objective."""
    told = {**point["median"], "completed": point["completed"], "failed_share": point["failed_share"]}
    return bench_plan.missed(told, objective)


def knee(found: Sequence[Mapping[str, Any]], objective: Mapping[str, Any], known: Mapping[str, Any]) -> Dict[str, Any]:
    """The last point, from the least load up, before the first whose medians miss the objective.

    Without a latency in the objective it is the last one before the load brings no more: a doubled load that adds less than
    `growth` to the output tokens per second. `seen` says whether there is a point beyond it; without one the knee lies at
    `concurrency` or above.
    """
    asks = [name for name in bench_plan.LATENCIES if objective.get(name) is not None]
    by = "objective" if asks else "throughput"
    last: Optional[int] = None
    limit: List[str] = []
    for place, point in enumerate(found):
        limit = lacks(point, objective)
        if not limit and by == "throughput" and last is not None:
            before = found[last]["median"]["output_tokens_per_second"]
            if point["median"]["output_tokens_per_second"] < before * (1 + known["growth"]):
                limit = ["output_tokens_per_second"]
        if limit:
            break
        last = place
    rule = (
        f"the last load before the first that misses {_objective(objective)} (medians of the repeats)"
        if by == "objective"
        else f"the last load before one that adds less than {known['growth']:.0%} output tokens/s (no latency is asked for)"
    )
    beyond = found[(last + 1) if last is not None else 0 :]
    return {
        "rule": rule,
        "by": by,
        "concurrency": found[last]["concurrency"] if last is not None else None,
        "seen": bool(limit),
        "limited_by": limit,
        "next": beyond[0]["concurrency"] if beyond and limit else None,
        "beyond": [point["concurrency"] for point in beyond],
    }


def _objective(objective: Mapping[str, Any]) -> str:
    words = [
        f"{NAMES[name]} {objective[name]:g} ms" for name in bench_plan.LATENCIES if objective.get(name) is not None
    ]
    return ", ".join([*words, f"{objective.get('failed_share', 0.0):g} failed"])


def best(
    found: Sequence[Mapping[str, Any]], bend: Mapping[str, Any], known: Mapping[str, Any]
) -> Optional[Mapping[str, Any]]:
    """The point to run at: of those up to the knee with nearly the most output tokens per second the least loaded one."""
    if bend["concurrency"] is None:
        return None
    inside = [point for point in found if point["concurrency"] <= bend["concurrency"]]
    most = max(point["median"]["output_tokens_per_second"] for point in inside)
    near = [p for p in inside if p["median"]["output_tokens_per_second"] >= most * (1 - known["near_best"])]
    return near[0]


# Samples --------------------------------------------------------------------------------------------------------------


def within(samples: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> List[Mapping[str, Any]]:
    """Samples while a run's requests were under way."""
    return [sample for sample in samples if run["begin"] <= sample["t"] <= run["end"]]


def around(samples: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> List[Mapping[str, Any]]:
    """The same with the last sample before and the first after them: what counters are read from."""
    before = [sample for sample in samples if sample["t"] < run["begin"]]
    after = [sample for sample in samples if sample["t"] > run["end"]]
    return [*before[-1:], *within(samples, run), *after[:1]]


def peaks(samples: Sequence[Mapping[str, Any]]) -> Dict[int, Dict[str, Any]]:
    """By GPU the most memory in use, of how much, and how often it was looked at."""
    found: Dict[int, Dict[str, Any]] = {}
    for sample in samples:
        for gpu in sample.get("gpus") or []:
            if gpu["used_mib"] is None or gpu["total_mib"] is None:
                continue
            seen = found.setdefault(gpu["index"], {"used_mib": 0.0, "total_mib": gpu["total_mib"], "looks": 0})
            seen["used_mib"] = max(seen["used_mib"], gpu["used_mib"])
            seen["looks"] += 1
    return found


def gap(samples: Sequence[Mapping[str, Any]]) -> Optional[float]:
    """The longest time between two looks, in seconds."""
    times = [sample["t"] for sample in samples]
    return max((times[place] - times[place - 1] for place in range(1, len(times))), default=None)


def server(samples: Sequence[Mapping[str, Any]], notion: str) -> List[float]:
    """What the server said of itself, look by look."""
    return [sample["server"][notion] for sample in samples if sample.get("server") and notion in sample["server"]]


def grew(samples: Sequence[Mapping[str, Any]], notion: str) -> Optional[float]:
    """How much a counter grew; None where it was not told, or began anew, as it does when a server restarts."""
    values = server(samples, notion)
    if len(values) < 2 or any(values[place] < values[place - 1] for place in range(1, len(values))):
        return None
    return values[-1] - values[0]


# Verdicts -------------------------------------------------------------------------------------------------------------


def memory(told: Mapping[str, Any], known: Mapping[str, Any]) -> Verdict:
    """The model is loaded, did not start again meanwhile, and its memory stayed below the limit wherever it lies.

    told: hosts (name to samples, gpus: numbers of the replica's there or None, restarted), utilization
    """
    evidence, worst, remedy = [], "pass", ""

    def note(outcome: str, text: str) -> None:
        nonlocal worst
        evidence.append(text)
        worst = min(worst, outcome, key=lambda one: WORST[one])

    for host, seen in sorted(told["hosts"].items()):
        samples = seen["samples"]
        if seen.get("restarted"):
            note("fail", f"{host}: the server started again meanwhile")
            remedy = "scripts/fleet doctor says why it ended"
        if seen.get("load_s") is not None:
            note("pass", f"{host}: it loaded, to its first right answer, in {seen['load_s']:.0f} s")
        wide = gap(samples)
        if not samples or wide is None:
            note("unknown", f"{host}: no samples")
            continue
        if wide > known["sample_gap"]:
            note("unknown", f"{host}: {wide:.1f} s between two samples, so that a peak may have been missed")
        for outcome, text in _gpus(host, seen, told, known) if seen.get("gpus") else _host(host, samples, known):
            note(outcome, text)
            if outcome == "fail" and not remedy:
                remedy = "lower gpu-memory-utilization, max-num-seqs or max-model-len"
    if not evidence:
        note("unknown", "no host was looked at")
    return verdict("memory", worst, evidence, remedy)


def _gpus(
    host: str, seen: Mapping[str, Any], told: Mapping[str, Any], known: Mapping[str, Any]
) -> List[Tuple[str, str]]:
    found, said = peaks(seen["samples"]), []
    utilization = told.get("utilization")
    for number in seen["gpus"]:
        if number not in found:
            said.append(("unknown", f"{host}: GPU {number} told no memory"))
            continue
        peak = found[number]
        share = peak["used_mib"] / peak["total_mib"]
        text = f"{host}: GPU {number} had {peak['used_mib']:,.0f} of {peak['total_mib']:,.0f} MiB at most ({share:.1%}, {peak['looks']} looks)"
        if share > known["memory_limit"]:
            said.append(("fail", f"{text}; the limit is {known['memory_limit']:.0%}"))
        elif utilization and share > utilization:
            said.append(
                ("warn", f"{text}, above gpu-memory-utilization {utilization:g}, which bounds what vLLM plans with")
            )
        else:
            said.append(("pass", text))
    return said


def _host(host: str, samples: Sequence[Mapping[str, Any]], known: Mapping[str, Any]) -> List[Tuple[str, str]]:
    """A server without GPUs: its own memory against the host's."""
    own = [look["memory"]["server_mib"] for look in samples if look["memory"].get("server_mib")]
    totals = [look["memory"]["host_mib"] for look in samples if look["memory"].get("host_mib")]
    if not own or not totals:
        return [("unknown", f"{host}: nobody could see the server's memory")]
    least = min(look["memory"]["available_mib"] for look in samples if look["memory"].get("available_mib") is not None)
    since = max((look["memory"].get("server_peak_mib") or 0.0 for look in samples), default=0.0)
    share = max(own) / totals[0]
    text = (
        f"{host}: no GPU; the server had {max(own):,.0f} of the host's {totals[0]:,.0f} MiB at most ({share:.1%}, {len(own)} looks), "
        f"at most {since:,.0f} since it started (the sum of its processes' peaks); {least:,.0f} were left at the least"
    )
    return [("fail" if share > known["host_memory_limit"] else "pass", text)]


def full(runs: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, Any]], known: Mapping[str, Any]) -> Verdict:
    """Prompts that fill max-model-len, max-num-seqs of them at once: all answered, and not pushed out again and again."""
    made = [run for run in runs if run["kind"] == "full"]
    if not made:
        return verdict("full prompts", "unknown", ["not run"])
    run = made[-1]
    result, looks = run["result"], within(samples, run)
    text = (
        f"{run['prompts']} prompts of {run['input_tokens']:,} tokens, {run['concurrency']:g} at once: {result['completed']} answered, "
        f"{result['failed']} failed, in {run['end'] - run['begin']:.0f} s"
    )
    evidence = [text]
    if run.get("problem") or result["completed"] < run["prompts"]:
        evidence += [*([run["problem"]] if run.get("problem") else []), *run.get("errors", {})]
        return verdict(
            "full prompts", "fail", evidence, "lower max-num-seqs or max-model-len; scripts/fleet doctor says why"
        )
    kv, most = server(looks, "kv_usage"), server(looks, "running")
    if kv and most:
        evidence.append(f"KV cache {max(kv):.0%} used at most, {max(most):g} running at once at most")
    pushed = grew(around(samples, run), "preemptions")
    if pushed is None:
        return verdict("full prompts", "warn", [*evidence, "the server told no preemptions"], "")
    each = pushed / run["prompts"]
    evidence.append(f"{pushed:g} preemptions, {each:.2g} a request")
    if each > known["preemptions_per_request"]:
        return verdict(
            "full prompts",
            "fail",
            evidence,
            f"the KV cache is too small for so many full prompts: lower max-num-seqs ({run['concurrency']:g}) or max-model-len "
            f"({run['input_tokens'] + run['output_tokens']:,}), or raise gpu-memory-utilization",
        )
    return verdict("full prompts", "warn" if pushed else "pass", evidence, "")


def least_scaling(gpus: int, known: Mapping[str, Any]) -> float:
    """What so many GPUs have to do, as a multiple of one."""
    own = {int(number): value for number, value in known["scaling"].items()}
    return float(own.get(gpus, known["scaling_share"] * gpus))


def scaling(
    gpus: int,
    throughput: Optional[float],
    one: Optional[Mapping[str, Any]],
    links: Mapping[str, str],
    known: Mapping[str, Any],
) -> Verdict:
    """Throughput of this run against the same with one GPU.

    one     that run: throughput, name; None where none was kept
    links   pairs of the replica's GPUs to their link, such as 0-1: NV18; hosts between them as `hosts`: network
    """
    name = "scaling"
    if gpus < 2:
        return verdict(name, "unknown", ["one GPU, or none: nothing to compare"], "")
    if not throughput or one is None or not one.get("throughput"):
        return verdict(
            name,
            "unknown",
            [
                f"no accepted run of the same model, release and lengths with one GPU is kept; {gpus} GPUs have to do {least_scaling(gpus, known):g} times as much"
            ],
            "scripts/fleet tune SERVICE --one-gpu measures it; then run this one again",
        )
    ratio, least = throughput / one["throughput"], least_scaling(gpus, known)
    text = (
        f"{gpus} GPUs: {throughput:,.0f} output tokens/s, one ({one['name']}): {one['throughput']:,.0f}; "
        f"{ratio:.2f} times, at least {least:g} wanted"
    )
    if ratio >= least:
        return verdict(name, "pass", [text], "")
    return verdict(
        name, "fail", [text, *_likely(links)], "scripts/fleet topology -i INVENTORY --bandwidth measures every pair"
    )


def _likely(links: Mapping[str, str]) -> List[str]:
    """The slowest link between the GPUs and what that means for the sums that each layer exchanges."""
    order = ("hosts", "SYS", "NODE", "PHB", "PXB", "PIX")
    if not links:
        return ["the links between its GPUs are not known"]
    kinds = set(links.values())
    if "network" in kinds:
        return ["likely cause: the replica reaches over hosts, so that every layer's sums go over the network"]
    for kind in order[1:]:
        if kind in kinds:
            pairs = sorted(pair for pair, link in links.items() if link == kind)
            way = {"SYS": "between the sockets", "NODE": "between host bridges", "PHB": "through a host bridge"}.get(
                kind, "through PCIe switches"
            )
            return [
                f"likely cause: link class {kind} between GPUs {', '.join(pairs)}: every layer's sums go {way}, not over NVLink"
            ]
    return [
        f"links are {', '.join(sorted(kinds))}: NVLink, so the cause lies elsewhere (batches too small for so many GPUs, or a link that is slow)"
    ]


def sameness(now: Mapping[str, Any], before: Optional[Mapping[str, Any]], known: Mapping[str, Any]) -> Verdict:
    """The same prompts at temperature 0 against the last accepted run.

    now      answers (texts, in the order of answers.PROMPTS), problem
    before   answers and name of the last accepted run; None where there is none
    """
    name = "sameness"
    if now.get("problem"):
        return verdict(name, "fail", [f"it does not answer: {now['problem']}"], "scripts/fleet doctor says why")
    if before is None:
        return verdict(
            name, "unknown", ["nothing was accepted before; these answers are what the next run is compared with"], ""
        )
    texts, old = list(now["answers"]), list(before["answers"])
    if len(texts) != len(old):
        return verdict(name, "unknown", [f"{len(texts)} answers now, {len(old)} then: they are of other prompts"], "")
    alike, equal = answers.alike(old, texts), [one == other for one, other in zip(old, texts)]  # noqa: B905
    evidence = [
        f"{sum(equal)} of {len(texts)} answers are those of {before['name']} to the letter, {sum(alike)} begin alike "
        f"({answers.BEGINNING} characters)"
    ]
    for place, same in enumerate(equal):
        if not same:
            evidence.append(f"{answers.PROMPTS[place]!r}: it was {old[place]!r} and is {texts[place]!r}")
    if sum(alike) < known["same"] * len(texts):
        return verdict(
            name,
            "fail",
            evidence,
            "another model, template or quantization? accept_rebase: true takes the new answers as right",
        )
    return verdict(name, "pass" if all(equal) else "warn", evidence, "")


def generator(point: Optional[Mapping[str, Any]], known: Mapping[str, Any]) -> Verdict:
    """Whether the generator itself was the limit at the knee."""
    name = "generator"
    if point is None or point["generator_cores"] is None:
        return verdict(name, "unknown", ["its processor time at the knee is not known"], "")
    cores = point["generator_cores"]
    text = f"the load generator took {cores:.1%} of a core at concurrency {point['concurrency']:g}"
    if cores >= known["generator_limit"]:
        return verdict(
            name,
            "fail",
            [f"{text}: it was the limit, not the server"],
            "run it from a host with a faster core, or split the load",
        )
    if cores >= known["generator_told"]:
        return verdict(
            name, "warn", [f"{text}, above {known['generator_told']:.0%}: latencies hold its share, too"], ""
        )
    return verdict(name, "pass", [text], "")


# Settings -------------------------------------------------------------------------------------------------------------


def too_small(
    runs: Sequence[Mapping[str, Any]],
    samples: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    known: Mapping[str, Any],
) -> List[Dict[str, Any]]:
    """Settings that bound the sweep, by name: setting, value, evidence, remedy.

    settings: max_num_seqs, max_model_len, cache (the setting that sizes the KV cache, and its value in words)
    """
    found: Dict[str, Dict[str, Any]] = {}
    at = {point["concurrency"]: point for point in points(runs)}
    for run in runs:
        if run["kind"] != "sweep":
            continue
        looks = within(samples, run)
        waiting, running = server(looks, "waiting"), server(looks, "running")
        kv = server(looks, "kv_usage")
        if not waiting or not running or not kv:
            continue
        pushed = grew(around(samples, run), "preemptions") or 0.0
        seats = settings["max_num_seqs"]
        if max(waiting) > 0 and max(running) >= seats and max(kv) < known["kv_full"]:
            gain = _gain(at, seats)
            if gain is not None and gain >= known["growth"]:
                found.setdefault(
                    "max-num-seqs",
                    {
                        "setting": "max-num-seqs",
                        "value": seats,
                        "evidence": f"at concurrency {run['concurrency']:g} {max(running):g} ran and {max(waiting):g} waited, with {max(kv):.0%} of "
                        f"the KV cache used; output tokens/s still grew by {gain:.0%} up to {seats} at once",
                        "remedy": f"raise max-num-seqs above {seats}",
                    },
                )
        if pushed or (max(kv) >= known["kv_full"] and max(waiting) > 0):
            found.setdefault(
                "kv-cache",
                {
                    "setting": settings["cache"]["setting"],
                    "value": settings["cache"]["value"],
                    "evidence": f"at concurrency {run['concurrency']:g} {max(kv):.0%} of the KV cache was used, {max(waiting):g} requests waited "
                    f"and {pushed:g} were preempted",
                    "remedy": f"raise {settings['cache']['setting']}, or lower max-num-seqs ({seats})",
                },
            )
    for run in runs:
        refused = [text for text in run.get("errors", {}) if "Bad Request" in text]
        if refused and run["dataset"] != "random":
            found.setdefault(
                "max-model-len",
                {
                    "setting": "max-model-len",
                    "value": settings["max_model_len"],
                    "evidence": f"{sum(run['errors'][text] for text in refused)} requests of {run['name']} were refused (400 Bad Request)",
                    "remedy": "raise max-model-len, or leave out the longest prompts",
                },
            )
    return list(found.values())


def settings(
    small: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, Any]]
) -> Verdict:
    """Settings that bound the sweep, as a verdict; not known where the server told nothing of itself."""
    name = "settings"
    if small:
        evidence = [f"{one['setting']} {one['value']} is too small: {one['evidence']}" for one in small]
        return verdict(name, "warn", evidence, "; ".join(one["remedy"] for one in small))
    if not any(run["kind"] == "sweep" and run["result"]["completed"] for run in runs):
        return verdict(name, "unknown", ["no load was answered"], "")
    if not any(sample.get("server") for sample in samples):
        return verdict(name, "unknown", ["the server told nothing of itself (/metrics)"], "")
    return verdict(name, "pass", ["no setting was seen to bound the sweep"], "")


def _gain(at: Mapping[float, Mapping[str, Any]], seats: int) -> Optional[float]:
    """By what share throughput grew over the last doubling that all fits into max-num-seqs."""
    inside = [load for load in sorted(at) if load <= seats and at[load]["median"]]
    if len(inside) < 2:
        return None
    low, high = (at[load]["median"]["output_tokens_per_second"] for load in inside[-2:])
    return high / low - 1


def busy_of(samples: Sequence[Mapping[str, Any]], gpus: Optional[Sequence[int]]) -> Tuple[List[float], List[float]]:
    """Shares of time, look by look and GPU by GPU: in which a kernel ran, and in which memory was read or written."""
    seen = [gpu for sample in samples for gpu in sample.get("gpus") or [] if gpus is None or gpu["index"] in gpus]
    return (
        [gpu["busy"] for gpu in seen if gpu["busy"] is not None],
        [gpu["memory_busy"] for gpu in seen if gpu["memory_busy"] is not None],
    )


def use(
    found: Sequence[Dict[str, Any]],
    runs: Sequence[Mapping[str, Any]],
    samples: Sequence[Mapping[str, Any]],
    gpus: Optional[Sequence[int]],
) -> None:
    """Add to each point how busy the GPUs were (gpu_busy, gpu_memory_busy), or None where none told it."""
    for point in found:
        key = "concurrency" if "concurrency" in point else "rate"
        kind = "sweep" if key == "concurrency" else "open"
        looks = [
            look for run in runs if run["kind"] == kind and run[key] == point[key] for look in within(samples, run)
        ]
        for name, shares in zip(("gpu_busy", "gpu_memory_busy"), busy_of(looks, gpus)):  # noqa: B905
            point[name] = mean(shares) if shares else None


def bound(
    samples: Sequence[Mapping[str, Any]], gpus: Optional[Sequence[int]], known: Mapping[str, Any]
) -> Dict[str, Any]:
    """What bounds a run, by how busy its GPUs were: by = compute, memory bandwidth, neither, or unknown.

    Shares are NVML's: of time in which a kernel ran, and in which memory was read or written.
    """
    busy, memory_busy = busy_of(samples, gpus)
    if not busy or not memory_busy:
        return {"by": "unknown", "text": "no GPU told how busy it was"}
    kernel, reads = mean(busy), mean(memory_busy)
    seen = f"kernels ran {kernel:.0%} of the time, memory was read or written {reads:.0%} of it (NVML's shares)"
    if kernel < known["busy"]:
        return {"by": "neither", "text": f"neither: {seen}; the GPUs wait for the host, the network or more load"}
    by = "memory bandwidth" if reads >= known["busy"] else "compute"
    return {"by": by, "text": f"{by}: {seen}"}


def recommend(
    found: Sequence[Mapping[str, Any]],
    bend: Mapping[str, Any],
    replica_gpus: int,
    rate: Optional[float],
    known: Mapping[str, Any],
) -> Optional[Dict[str, Any]]:
    """Settings for one replica, and replicas for a rate (requests per second at peak) where one is asked for."""
    point = best(found, bend, known)
    if point is None:
        return None
    at = point["median"]
    settings: Dict[str, Any] = {"max-num-seqs": math.ceil(point["concurrency"])}
    evidence = [
        f"concurrency {point['concurrency']:g}: {at['output_tokens_per_second']:,.1f} output tokens/s, {at['requests_per_second']:.4g} requests/s, "
        f"TTFT p95 {at['ttft_p95_ms']:,.0f} ms, ITL p95 {at.get('itl_p95_ms', 0.0):,.1f} ms (medians of {point['repeats']})"
    ]
    if point["concurrency"] != bend["concurrency"]:
        evidence.append(
            f"the knee is at {bend['concurrency']:g}, but up to there nothing brings {known['near_best']:.0%} more"
        )
    if not bend["seen"]:
        evidence.append("no load missed the objective: the knee lies here or above, and more was not measured")
    replicas = None
    if rate:
        each = at["requests_per_second"] * (1 - known["head_room"])
        replicas = max(1, math.ceil(rate / each))
        evidence.append(
            f"{rate:g} requests/s at peak / ({at['requests_per_second']:.4g} x {1 - known['head_room']:g}) = {replicas} replicas "
            f"of {replica_gpus or 'no'} GPU{'s' if replica_gpus != 1 else ''}"
        )
    return {
        "concurrency": point["concurrency"],
        "settings": settings,
        "replicas": replicas,
        "monitoring_objectives": {
            "tokens_per_second": round(at["output_tokens_per_second"], 2),
            "running": math.ceil(point["concurrency"]),
        },
        "evidence": evidence,
    }


def measured(about: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], cached: float) -> Dict[str, Any]:
    """The sweep as `measured` of docs/capacity.md. about: service, model, gpu, release, date, gpus_per_replica, max_model_len."""
    sweep = [run for run in runs if run["kind"] == "sweep" and run["result"]["completed"]]
    completed = sum(run["result"]["completed"] for run in sweep)
    rows = []
    for run in sweep:
        result = run["result"]
        row = {
            "concurrency": run["concurrency"],
            **{name: round(result[name], 4) for name in METRICS[:3]},
            "failed_share": result["failed_share"],
        }
        for name in ("ttft_p95_ms", "itl_p95_ms"):
            if result.get(name) is not None:
                row[name] = round(result[name], 3)
        rows.append(row)
    lengths = {
        f"{side}_tokens": {"mean": round(sum(run["result"][f"{key}_tokens"] for run in sweep) / completed, 2)}
        for side, key in (("prompt", "input"), ("output", "output"))
        if completed
    }
    told = {name: value for name, value in about.items() if value is not None}
    return {**told, **lengths, "cached_share_of_prompt": round(min(max(cached, 0.0), 0.99), 4), "points": rows}
