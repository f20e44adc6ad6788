"""Acceptances for tests: a stand-in's load, played through the plan of runs on a clock of its own, judged as a real one is."""

from __future__ import annotations

import random

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import bench_document, bench_plan
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data

KNOWN = data.load("objectives")
METRICS = data.load("metrics")
OBJECTIVE = {"ttft_p95_ms": 1000.0, "itl_p95_ms": 100.0, "failed_share": 0.0}


def job(**more):
    return {
        "base_url": "http://10.0.0.1:8000",
        "model": "chat",
        "tokenizer": "/var/lib/vllm/models/chat",
        "dataset": "random",
        "path": "/nowhere/prompts.jsonl",
        "input_tokens": 64,
        "output_tokens": 32,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "concurrencies": [1, 2, 4, 8, 16, 32],
        "rates": [],
        "repeats": 3,
        "seconds_per_point": 10,
        "least_prompts": 8,
        "budget_seconds": 400,
        "full": True,
        "objective": OBJECTIVE,
        "seed": 7,
        **more,
    }


def served(run, knee=8, tokens=100.0, noise=0.0, seed=0):
    """A stand-in's result: throughput grows to the knee and then stays, TTFT grows beyond it."""
    noisy = 1 + noise * (random.Random(seed).random() - 0.5)
    load = run["concurrency"] or 1
    rate = tokens * min(load, knee) / run["output_tokens"] * noisy
    ttft = 100.0 if load <= knee else 1000.0 * load / knee
    metrics = {
        f"{m}_p{p}_ms": v * p / 95 for m, v in (("ttft", ttft), ("itl", 20.0), ("e2el", 900.0)) for p in (50, 95, 99)
    }
    return {
        "completed": run["prompts"],
        "failed": 0,
        "failed_share": 0.0,
        "duration_s": run["prompts"] / rate,
        "input_tokens": run["prompts"] * run["input_tokens"],
        "output_tokens": run["prompts"] * run["output_tokens"],
        "requests_per_second": rate,
        "output_tokens_per_second": rate * run["output_tokens"],
        "prompt_tokens_per_second": rate * run["input_tokens"],
        **metrics,
    }


def played(load, **how):
    """All runs of a job against the stand-in, one after the other on a clock of its own."""
    done, now = [], 0.0
    while (run := bench_plan.next_run(load, done, now)) is not None:
        result = served(run, seed=len(done), **how)
        begin, now = now, now + result["duration_s"]
        done.append(
            {
                **run,
                "result": result,
                "seconds": now - begin,
                "begin": begin,
                "end": now,
                "errors": {},
                "problem": "",
                "generator_cores": 0.05,
            }
        )
    return done


def look(at, used=None, server=None, *, busy=0.9, reads=0.2, own=1000.0, total=1000.0):
    gpus = [
        {"index": n, "used_mib": u, "total_mib": total, "busy": busy, "memory_busy": reads}
        for n, u in enumerate(used or [])
    ]
    memory = {"server_mib": own, "server_peak_mib": own * 2, "host_mib": 10000.0, "available_mib": 5000.0}
    return {"t": at, "gpus": gpus, "memory": memory, "server": server}


PLAN = {
    "services": {"chat": {"replicas": ["chat.0"], "served_model_names": ["chat"], "model": "/var/lib/vllm/models/smol"}},
    "replicas": {
        "chat.0": {
            "service": "chat", "hosts": ["gpu-01"], "head": "gpu-01", "url": "http://10.0.0.1:8000", "urls": {"gpu-01": "http://10.0.0.1:8000"},
            "gpus": None, "version": "0.32.0", "accelerator": "cpu", "tensor": 1, "pipeline": 1, "data": 1, "memory": None, "notes": [],
        }
    },
    "hosts": {
        "gpu-01": {
            "instances": [
                {"instance": "chat.0", "env": {"VLLM_CPU_KVCACHE_SPACE": 1}, "config": {"model": "/var/lib/vllm/models/smol", "served-model-name": ["chat"], "max-model-len": 2048, "max-num-seqs": 8, "host": "10.0.0.1"}}
            ]
        }
    },
}  # fmt: skip
ASKED = {
    "input_tokens": 64, "output_tokens": 32, "repeats": 3, "seconds_per_point": 10, "least_prompts": 8, "budget": 4000, "seed": 7, "full": True,
}  # fmt: skip


def asked(watched=None, **more):
    return bench_document.job(
        PLAN, {**ASKED, **more}, watched=watched or {}, metrics=METRICS, known=KNOWN, folder="/var/lib/gpu_fleet/bench"
    )


def made(name="2026-11-30T10:00:00", *, kept=(), texts=None, plan=PLAN, rate=None, used=None, facts=None, **how):
    load = asked(objective=OBJECTIVE)
    runs = played(load, **how)
    samples = [
        look(t, used, total=143771.0, server={"running": 8.0, "waiting": 0.0, "kv_usage": 0.3, "preemptions": 0.0})
        for t in range(int(runs[-1]["end"]) + 1)
    ]
    same = {"InvocationID": "one"}
    raw = {
        "name": name, "started": name, "collection": "0.1.0", "progress": {"runs": runs, "elapsed": runs[-1]["end"]}, "rate": rate,
        "answers": {"answers": texts or [f"answer number {n}" for n in range(8)], "problem": ""},
        "hosts": {"gpu-01": {"samples": samples, "before": same, "after": same, "gpu_facts": facts}},
    }  # fmt: skip
    return bench_document.document(load, plan, raw, list(kept), KNOWN)
