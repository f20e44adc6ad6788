"""What the planner says against what vLLM says of the same launches: the table of a validation document.

    .venv/bin/python scripts/validation/plan_truth.py points TRUTH.yml > POINTS.json    for memory_points.py, on the GPUs
    .venv/bin/python scripts/validation/plan_truth.py table TRUTH.yml RESULTS/points.json [--write DOCUMENT.md]

TRUTH.yml has the machine's GPUs, the release, and the launches: {name, shape (of tests/unit/fixtures/kv_specs.json), queue,
args}. The planner gets each as `scripts/fleet plan --from` would; vLLM got the same arguments (memory_points.py), a shape
without weights and --load-format dummy. Needs neither vLLM nor a GPU.
Exit status: 0 every KV cache within 3 % of what vLLM made, 1 one is not or was not measured, 2 used wrongly.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "collections"))

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import launch_plan  # noqa: E402
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils.launches import known  # noqa: E402

SPECS = ROOT / "tests/unit/fixtures/kv_specs.json"
BEGIN, END = "<!-- plan_truth.py -->", "<!-- end -->"
WITHIN = 3.0  # per cent of the tokens


def launches(truth: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any], str]]:
    """Each launch with its config and the GPUs that it has."""
    shapes = {m["name"]: m["config"] for m in json.loads(SPECS.read_text(encoding="utf-8"))["models"]}
    for item in truth["launches"]:
        world = item["args"].get("tensor-parallel-size", 1) * item["args"].get("pipeline-parallel-size", 1)
        gpus = ",".join(map(str, range(world))) if world > 1 else str(item.get("gpu", 0))
        yield item, {**shapes[item["shape"]], **item.get("config", {})}, gpus


def points(truth: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    queues: dict[str, list[dict[str, Any]]] = {}
    for item, config, gpus in launches(truth):
        arguments = {name.replace("-", "_"): value for name, value in item["args"].items()}
        point = {"name": item["name"], "gpus": gpus, "config": config, "arguments": arguments}
        queues.setdefault("both" if "," in gpus else f"gpu{gpus}", []).append(point)
    return queues


def rows(truth: dict[str, Any], measured: list[dict[str, Any]]) -> Iterator[tuple[list[str], bool]]:
    found, facts = {point["name"]: point for point in measured}, known()
    for item, config, gpus in launches(truth):
        told = found.get(item["name"], {})
        launch = {
            "gpus": [truth["gpu"]] * (gpus.count(",") + 1),
            "nodes": 1,
            "model_config": config,
            "vllm_version": truth["vllm_version"],
            "args": {f"--{name}": value for name, value in item["args"].items()},
            **({"weights_gib": item["weights_gib"]} if "weights_gib" in item else {}),
        }
        memory = launch_plan.judge(launch, facts).memory
        tokens = memory["kv_tokens"]
        cells = [item["name"], ", ".join(item["kinds"])]
        if "kv_tokens" not in told:
            yield [*cells, "not measured", f"{tokens:,}" if tokens else "-", "", "", ""], False
            continue
        off = 100 * ((tokens or 0) / told["kv_tokens"] - 1)
        pairs = [
            f"{told.get(theirs, '-')} / {memory[ours] or 0:.2f}"
            for theirs, ours in (("weights_gib", "weights_gib"), ("peak_activation_gib", "activation_gib"))
        ]
        yield [*cells, f"{told['kv_tokens']:,}", f"{tokens or 0:,}", f"{off:+.2f} %", *pairs], abs(off) <= WITHIN


def table(truth: dict[str, Any], measured: list[dict[str, Any]]) -> tuple[str, bool]:
    head = ["launch", "kinds", "KV tokens, vLLM", "planner", "off", "weights GiB, vLLM / planner", "activation GiB"]
    lines, good = [head, ["---"] * len(head)], True
    for cells, within in rows(truth, measured):
        lines.append(cells)
        good = good and within
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines), good


def main() -> int:
    match sys.argv[1:]:
        case ["points", truth]:
            print(json.dumps(points(yaml.safe_load(Path(truth).read_text(encoding="utf-8"))), indent=1))
            return 0
        case ["table", truth, measured, *rest] if rest[:1] in ([], ["--write"]) and len(rest) in (0, 2):
            told = json.loads(Path(measured).read_text(encoding="utf-8"))
            text, good = table(yaml.safe_load(Path(truth).read_text(encoding="utf-8")), told)
            if not rest:
                print(text)
                return 0 if good else 1
            document = Path(rest[1])
            old = document.read_text(encoding="utf-8")
            start, end = old.index(BEGIN) + len(BEGIN), old.index(END)
            document.write_text(f"{old[:start]}\n{text}\n{old[end:]}", encoding="utf-8")
            return 0 if good else 1
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
