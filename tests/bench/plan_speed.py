"""How long a hundred services take to be chosen and judged, without a network: has to stay under a second.

    python tests/bench/plan_speed.py

Prints the seconds by the clock and of the processor; exits 1 when those of the processor are one or more (the clock's say
more about what else the machine does).
"""

import itertools
import sys
import time
from pathlib import Path

UNIT = Path(__file__).resolve().parents[1] / "unit"
sys.path.insert(0, str(UNIT))
import conftest  # noqa: E402, F401  makes the collection importable
import launches  # noqa: E402
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import launch_plan  # noqa: E402

MODELS = (
    (launches.LLAMA_8B, 14.96),
    (launches.LLAMA_70B, 131.4),
    (launches.QWEN_7B, 14.19),
    (launches.QWEN_05B, 0.92),
    (launches.QWEN_30B_A3B, 56.9),
    (launches.GEMMA2_9B, 17.2),
    (launches.MIXTRAL, 87.0),
    (launches.quantized(launches.LLAMA_405B, {"quant_method": "fp8"}), 378.0),
)
FLEETS = (("8 x H100 80GB HBM3", 1), ("2 x H200", 1), ("8 x L40S", 1), ("16 x H100 80GB HBM3", 2), ("4 x T4", 1))


def hundred() -> list[dict]:
    mixed = itertools.cycle(itertools.product(MODELS, FLEETS, ("0.26.0", "0.33.0", "0.13.0")))
    return [
        launches.launch(config, gib, gpus, version, nodes=nodes)
        for (config, gib), (gpus, nodes), version in itertools.islice(mixed, 100)
    ]


def main() -> int:
    services = hundred()
    start, used = time.perf_counter(), time.process_time()
    plans = [launch_plan.choose(service, launches.KNOWN) for service in services]
    chosen = time.process_time() - used
    for service, plan in zip(services, plans, strict=True):
        launch_plan.judge({**service, "args": plan.args}, launches.KNOWN)
    both, clock = time.process_time() - used, time.perf_counter() - start
    refused = sum(plan.outcome == "error" for plan in plans)
    print(
        f"{len(services)} services ({refused} refused): {clock:.3f} s, of the processor {both:.3f} s "
        f"(chosen {chosen:.3f}, judged {both - chosen:.3f})"
    )
    return 0 if both < 1 else 1


if __name__ == "__main__":
    sys.exit(main())
