# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Which load is put on a server, run by run, as arguments of `vllm bench serve`; and when it is enough.

The sweep doubles the concurrency until two loads in a row miss the objective, which leaves the knee and points beyond it.
Then come full prompts, open loads, and the sweep's repeats. A budget in seconds ends the repeats first, never what a verdict
needs. docs/acceptance.md has the order and the reasons.

Options are those of vllm/benchmarks/serve.py and vllm/benchmarks/datasets/datasets.py of 0.26.0 and 0.32.0. Of the classes
there, CustomImageDataset reads JSONL with the standard library alone, so that a user's prompts go as its text parts; the class
for text alone (`custom`) needs pandas, which no release has.

Pure: standard library, Python 3.9 and newer. It travels to the host beside bench_driver.py, which asks `next_run`.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, Optional, Sequence

# What an objective may ask of a load, as the fields of a run's result are called.
LATENCIES = ("ttft_p95_ms", "itl_p95_ms", "e2el_p95_ms")
BEYOND = 2  # loads in a row that miss the objective and end a sweep
MOST_PROMPTS = 2000  # of one run
WARM_PROMPTS = 2
# Tokens that an answer to a full prompt has: enough to see it decode while the others are there, too.
FULL_OUTPUT = 16
SWEEP_SHARE = 0.6  # of the budget that the first sweep may take


class BadJob(ValueError):
    """A setting that cannot be used; the message names it, its value and the remedy."""


def concurrencies(most: int) -> List[int]:
    """1, 2, 4 ... up to the first that is not below `most`."""
    found = [1]
    while found[-1] < most:
        found.append(found[-1] * 2)
    return found


def missed(result: Mapping[str, Any], objective: Mapping[str, Any]) -> List[str]:
    """Names of what a load's result does not keep. A result without one answer keeps nothing."""
    if not result.get("completed"):
        return ["completed"]
    names = [
        name
        for name in LATENCIES
        if objective.get(name) is not None and (result.get(name) is None or result[name] > objective[name])
    ]
    if result.get("failed_share", 0.0) > objective.get("failed_share", 0.0):
        names.append("failed_share")
    return names


def check(job: Mapping[str, Any]) -> None:
    """Raises BadJob for what no server could do."""
    for name in ("input_tokens", "output_tokens", "repeats", "least_prompts", "max_num_seqs"):
        value = job.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadJob(f"{name} is {value!r}; give a whole number of at least 1")
    for name in ("seconds_per_point", "budget_seconds"):
        value = job.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            raise BadJob(f"{name} is {value!r}; give a number above 0")
    for name in ("concurrencies", "rates"):
        for value in job.get(name) or []:
            if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
                raise BadJob(f"{name} has {value!r}; give numbers above 0")
    if not job.get("concurrencies"):
        raise BadJob("concurrencies is empty; a sweep needs at least one")
    room = job.get("max_model_len")
    if job.get("dataset") == "random" and room and job["input_tokens"] + job["output_tokens"] > room:
        raise BadJob(
            f"input_tokens {job['input_tokens']} and output_tokens {job['output_tokens']} are more than the service's "
            f"max-model-len of {room}; it would refuse every request. Ask for shorter ones, or serve with a longer max-model-len"
        )


def full_input(job: Mapping[str, Any]) -> int:
    """Tokens of a prompt that leaves no room in max-model-len but for a short answer."""
    return max(1, int(job["max_model_len"]) - FULL_OUTPUT)


def _prompts(job: Mapping[str, Any], concurrency: float, rate: float) -> int:
    """Requests of one run: about seconds_per_point at the rate that was seen before, and two rounds at least.

    least_prompts hold as far as all repeats of all loads stay within the budget: of a slow server, so many would be most of it.
    """
    fit = rate * job["budget_seconds"] / (len(job["concurrencies"]) * job["repeats"])
    wanted = max(2 * concurrency, min(job["least_prompts"], fit), rate * job["seconds_per_point"])
    return int(min(MOST_PROMPTS, math.ceil(wanted)))


def _run(kind: str, job: Mapping[str, Any], number: int, **what: Any) -> Dict[str, Any]:
    run: Dict[str, Any] = {
        "kind": kind,
        "number": number,
        "concurrency": None,
        "rate": None,
        "repeat": 0,
        "input_tokens": job["input_tokens"],
        "output_tokens": job["output_tokens"],
        "dataset": job["dataset"],
        # Another seed each time: the same prompts again would come out of the prefix cache.
        "seed": int(job["seed"]) + number,
        **what,
    }
    run["name"] = name(run)
    return run


def name(run: Mapping[str, Any]) -> str:
    """A run in words."""
    if run["kind"] == "warm":
        return "warm up"
    if run["kind"] == "full":
        return f"prompts of {run['input_tokens']} tokens, {run['concurrency']:g} at once"
    load = f"{run['rate']:g} requests/s" if run["rate"] else f"concurrency {run['concurrency']:g}"
    return f"{load}, repeat {run['repeat'] + 1}"


def _sweep_over(job: Mapping[str, Any], first: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the first sweep has what it needs: all loads, or enough of them beyond the knee."""
    if len(first) >= len(job["concurrencies"]):
        return True
    last = first[-BEYOND:]
    return len(last) == BEYOND and all(missed(done["result"], job["objective"]) for done in last)


def next_run(job: Mapping[str, Any], done: Sequence[Mapping[str, Any]], elapsed: float) -> Optional[Dict[str, Any]]:
    """The next run, or None when all is done or the budget is used up.

    job       settings (docs/acceptance.md)
    done      runs that were made, each with its `result` and `seconds`
    elapsed   seconds since the first one began
    """
    number = len(done)
    if not done:
        return _run("warm", job, 0, concurrency=1, prompts=WARM_PROMPTS)
    first = [run for run in done if run["kind"] == "sweep" and run["repeat"] == 0]
    late = elapsed > SWEEP_SHARE * job["budget_seconds"]
    if not (_sweep_over(job, first) or (first and late)):
        load = job["concurrencies"][len(first)]
        before = first[-1] if first else done[0]
        rate = before["result"].get("requests_per_second") or 0.0
        return _run("sweep", job, number, concurrency=load, prompts=_prompts(job, load, rate))
    if job.get("full") and not any(run["kind"] == "full" for run in done):
        at_once = job["max_num_seqs"]
        return _run(
            "full",
            job,
            number,
            concurrency=at_once,
            prompts=at_once,
            input_tokens=full_input(job),
            output_tokens=FULL_OUTPUT,
            # Stated lengths, whatever the sweep's prompts are.
            dataset="random",
        )
    opened = [run for run in done if run["kind"] == "open"]
    for rate in (job.get("rates") or [])[len(opened) :]:
        return _run("open", job, number, rate=rate, prompts=_prompts(job, 1, rate))
    return _repeat(job, done, first, elapsed)


def _repeat(
    job: Mapping[str, Any], done: Sequence[Mapping[str, Any]], first: Sequence[Mapping[str, Any]], elapsed: float
) -> Optional[Dict[str, Any]]:
    """The sweep once more, with the same loads and as many requests, a whole one at a time."""
    again = [run for run in done if run["kind"] == "sweep" and run["repeat"] > 0]
    repeat, place = divmod(len(again), len(first))
    repeat += 1
    if repeat >= job["repeats"]:
        return None
    if place == 0 and elapsed + sum(run["seconds"] for run in first) > job["budget_seconds"]:
        return None
    like = first[place]
    return _run("sweep", job, len(done), concurrency=like["concurrency"], prompts=like["prompts"], repeat=repeat)


def expected(job: Mapping[str, Any], done: Sequence[Mapping[str, Any]]) -> int:
    """How many runs there will be, as far as can be told now: what a progress bar goes by."""
    first = [run for run in done if run["kind"] == "sweep" and run["repeat"] == 0]
    loads = len(first) if first and _sweep_over(job, first) else len(job["concurrencies"])
    total = 1 + loads * job["repeats"] + int(bool(job.get("full"))) + len(job.get("rates") or [])
    return max(total, len(done))


def arguments(job: Mapping[str, Any], run: Mapping[str, Any]) -> List[str]:
    """The words after `vllm bench serve` of one run. The key is not among them: OPENAI_API_KEY has it."""
    words = ["--base-url", job["base_url"], "--model", job["model"], "--tokenizer", job["tokenizer"]]
    if run["dataset"] == "random":
        words += ["--backend", "openai", "--endpoint", "/v1/completions", "--dataset-name", "random"]
        words += ["--random-input-len", str(run["input_tokens"]), "--random-output-len", str(run["output_tokens"])]
    else:
        words += ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
        words += ["--dataset-name", "custom_image", "--dataset-path", job["path"]]
        words += ["--custom-output-len", str(run["output_tokens"])]
    words += ["--num-prompts", str(run["prompts"]), "--seed", str(run["seed"]), "--temperature", "0"]
    if run["concurrency"]:
        words += ["--max-concurrency", f"{run['concurrency']:g}"]
    if run["rate"]:
        words += ["--request-rate", f"{run['rate']:g}"]
    words += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,95,99"]
    words += ["--disable-tqdm", "--save-detailed"]
    if job.get("trust_remote_code"):
        words.append("--trust-remote-code")
    return words


def result(told: Mapping[str, Any]) -> Dict[str, Any]:
    """What is kept of a result of `vllm bench serve`: one number a field, units in the names."""
    completed, failed = int(told.get("completed") or 0), int(told.get("failed") or 0)
    kept: Dict[str, Any] = {
        "completed": completed,
        "failed": failed,
        "failed_share": failed / (failed + completed) if failed + completed else 1.0,
        "duration_s": told.get("duration"),
        "input_tokens": told.get("total_input_tokens"),
        "output_tokens": told.get("total_output_tokens"),
    }
    if not completed:
        return kept  # percentiles of nothing are zeros
    seconds = float(told["duration"])
    kept["requests_per_second"] = float(told["request_throughput"])
    kept["output_tokens_per_second"] = float(told["output_throughput"])
    kept["prompt_tokens_per_second"] = float(told["total_input_tokens"]) / seconds
    for metric in ("ttft", "itl", "e2el"):
        for share in (50, 95, 99):
            value = told.get(f"p{share}_{metric}_ms")
            if value is not None:
                kept[f"{metric}_p{share}_ms"] = float(value)
    return kept
