"""Predicted against measured GPU memory, as the table of docs/validation/2026-11-29-kv-cache-memory.md.

    .venv/bin/python scripts/validation/memory_table.py [--write]

Without --write it prints the table; with it, it puts it into the document. Needs neither vLLM nor a GPU.
Exit status: 0; 2 used wrongly.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "collections"))

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import model_memory as mm  # noqa: E402

DOCUMENT = ROOT / "docs/validation/2026-11-29-kv-cache-memory.md"
POINTS = DOCUMENT.with_suffix("") / "points.json"
SERVED = ROOT / "docs/validation/2026-11-29-vllm-0.26.0-cu130-h200"
PLANS = ROOT / "tests/unit/fixtures/plans"
SPECS = ROOT / "tests/unit/fixtures/kv_specs.json"
BEGIN, END = "<!-- memory_table.py -->", "<!-- end -->"
GIB = 1 << 30
H200 = 150_110_011_392
MEMORY = yaml.safe_load((ROOT / "data/memory.yml").read_text(encoding="utf-8"))


def line(what: str, told: dict[str, Any], found: mm.Estimate) -> str:
    def pair(name: str, measured: str) -> str:
        return f"{measured} / {getattr(found, name):.2f}"

    weights, activation, other = (told.get(n) for n in ("weights_gib", "activation_gib", "non_torch_gib"))
    off = 100 * (found.kv_gib / told["kv_gib"] - 1)
    cells = [
        what,
        pair("weights_gib", f"{weights:.2f}" if weights else "-"),
        pair("activation_gib", f"{activation:.2f}" if activation else "-"),
        pair("non_torch_gib", f"{other:.2f}" if other else "-"),
        pair("kv_gib", f"{told['kv_gib']:.2f}"),
        f"{off:+.1f} %",
    ]
    return "| " + " | ".join(cells) + " |"


def h200() -> Iterator[str]:
    specs = {m["name"]: m["config"] for m in json.loads(SPECS.read_text(encoding="utf-8"))["models"]}
    usual = {"memory": MEMORY, "utilization": 0.92, "max_model_len": 8192, "max_num_seqs": 1024}
    for point in json.loads(POINTS.read_text(encoding="utf-8")):
        arguments = point["arguments"]
        found = mm.estimate(
            mm.shape(point["config"]),
            None,
            H200,
            arguments.get("tensor_parallel_size", 1),
            **{**usual, "max_model_len": arguments["max_model_len"]},
            max_num_batched_tokens=arguments["max_num_batched_tokens"],
            enforce_eager=arguments.get("enforce_eager", False),
        )
        told = {**point, "activation_gib": point["peak_activation_gib"]}
        yield line(f"{point['name']}, 0.26.0, H200", told, found)
    shape = json.loads((SERVED / "two-gpus.model-config.json").read_text(encoding="utf-8"))
    for name, config, log, tensor in (
        ("smollm2-135m, server", specs["smollm2-135m"], "one-gpu.server-1.log", 1),
        ("1B shape, server, TP=2", shape, "two-gpus.server-1.log", 2),
    ):
        text = (SERVED / log).read_text(encoding="utf-8")
        patterns = {
            "kv_gib": r"Available KV cache memory: ([\d.]+)",
            "weights_gib": r"usage is ([\d.]+) GiB for weight",
            "activation_gib": r"([\d.]+) GiB for peak activation",
            "non_torch_gib": r"([\d.]+) GiB for non-torch",
        }
        told = {key: float(re.search(pattern, text)[1]) for key, pattern in patterns.items()}  # type: ignore[index]
        found = mm.estimate(mm.shape(config), None, H200, tensor, **usual, max_num_batched_tokens=8192)
        yield line(f"{name}, 0.26.0, H200", told, found)
    found = mm.estimate(mm.shape(specs["llama-3-8b"]), None, H200, **usual, max_num_batched_tokens=8192)
    yield line("llama-3-8b, server of the bandwidth day, 0.26.0, H200", {"weights_gib": 15.0, "kv_gib": 112.51}, found)


def cases() -> Iterator[str]:
    for case in map(json.loads, (PLANS / "expected.jsonl").read_text(encoding="utf-8").splitlines()):
        observed = case.get("observed", {})
        launch = yaml.safe_load((PLANS / case["file"]).read_text(encoding="utf-8"))
        arguments, gpu = launch["args"], launch["gpus"][0]
        tensor = arguments.get("--tensor-parallel-size", 1)
        known = mm.shape(launch["model_config"])
        told = {"kv_gib": observed.get("kv_gib"), "weights_gib": observed.get("weights_gib_per_gpu")}
        if "kv_tokens" in observed and not told["kv_gib"]:
            told["kv_gib"] = observed["kv_tokens"] * mm.kv_bytes_per_token(known, tensor) / GIB
        if not told["kv_gib"]:
            continue
        told.update({name: observed.get(name) for name in ("activation_gib", "non_torch_gib")})
        size = int(gpu["memory_gib"] * GIB)
        usual = mm.defaults(MEMORY, size, gpu["name"], launch["vllm_version"])
        found = mm.estimate(
            known,
            int(launch["weights_gib"] * GIB),
            size,
            tensor,
            memory=MEMORY,
            utilization=arguments.get("--gpu-memory-utilization", usual["utilization"]),
            max_model_len=arguments.get("--max-model-len", known.max_positions),
            max_num_seqs=usual["max_num_seqs"],
            max_num_batched_tokens=usual["max_num_batched_tokens"],
            version=launch["vllm_version"],
        )
        what = f"plans/{case['file'][:2]} {known.architecture}, {launch['vllm_version']}, {gpu['name']}"
        yield line(what + (f", TP={tensor}" if tensor > 1 else ""), told, found)


def table() -> str:
    head = "| shape, vLLM, GPU | weights | activation | non-torch | KV cache | off |\n| --- | --- | --- | --- | --- | --- |"
    return "\n".join([head, *h200(), *cases()])


def main() -> int:
    if sys.argv[1:] not in ([], ["--write"]):
        print(__doc__, file=sys.stderr)
        return 2
    if not sys.argv[1:]:
        print(table())
        return 0
    text = DOCUMENT.read_text(encoding="utf-8")
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    DOCUMENT.write_text(f"{text[:start]}\n{table()}\n{text[end:]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
