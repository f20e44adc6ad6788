"""What vLLM itself reports about GPU memory, for shapes with random weights: the measurements behind data/memory.yml.

Runs on a machine with GPUs and with a Python that has vLLM:
    PYTHON scripts/validation/memory_points.py POINTS.json RESULTS [--last-start SECONDS] [--end SECONDS]

POINTS.json maps a queue to a list of points, {name, gpus, config, arguments}; `gpus` is what CUDA_VISIBLE_DEVICES becomes.
The queues whose names begin with `gpu` run beside each other, then the others one after the other. Each point is an
engine of its own with --load-format dummy, started until it says how much it uses and then ended by the process group
that it was started in. RESULTS gets one log a point and points.json with the lines that matter.
Exit status: 0 all points measured, 1 some not, 2 used wrongly.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ENGINE = """
import json, sys
if __name__ == "__main__":
    from vllm import LLM
    LLM(model=sys.argv[1], load_format="dummy", skip_tokenizer_init=True, **json.loads(sys.argv[2]))
    print("ENGINE STARTED", flush=True)
"""
PATTERNS = {
    "runner": r"Using (V\d) Model Runner",
    "attention": r"Using (\w+) attention backend",
    "weights_gib": r"Model loading took ([\d.]+) GiB",
    "kv_gib": r"Available KV cache memory: ([\d.]+) GiB",
    "kv_tokens": r"GPU KV cache size: ([\d,]+) tokens",
    "concurrency": r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x",
    "cudagraph_estimate_gib": r"Estimated CUDA graph memory: ([\d.]+) GiB",
    "cudagraph_gib": r"Graph capturing finished in \d+ secs, took ([\d.]+) GiB",
    "actual": r"(Free memory on device .*)",
}
ACTUAL = {
    "free_gib": r"Free memory on device \(([\d.]+)/",
    "total_gib": r"Free memory on device \([\d.]+/([\d.]+) GiB\)",
    "requested_gib": r"utilization is \([\d.]+, ([\d.]+) GiB\)",
    "peak_activation_gib": r"([\d.]+) GiB for peak activation",
    "non_torch_gib": r"([\d.]+) GiB for non-torch memory",
}


def read(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, pattern in PATTERNS.items():
        match = re.search(pattern, text)
        if match:
            found[name] = match.group(1)
    for name, pattern in ACTUAL.items():
        match = re.search(pattern, found.get("actual", ""))
        if match:
            found[name] = match.group(1)
    for name, value in found.items():
        if re.fullmatch(r"[\d,]+(\.\d+)?", value):
            found[name] = float(value.replace(",", "")) if "." in value else int(value.replace(",", ""))
    return found


class Points:
    def __init__(self, results: Path, last_start: float, end: float):
        self.results, self.began = results, time.monotonic()
        self.last_start, self.end = last_start, end
        self.lock, self.found = threading.Lock(), []

    def queue(self, points: list[dict[str, Any]]) -> None:
        for point in points:
            seconds = time.monotonic() - self.began
            answer = self.measure(point) if seconds < self.last_start else {"error": "no time left"}
            with self.lock:
                self.found.append({**point, **answer})
                text = json.dumps(self.found, indent=1)
                (self.results / "points.json").write_text(text + "\n", encoding="utf-8")
            print(point["name"], json.dumps({k: v for k, v in answer.items() if k != "actual"}), flush=True)

    def measure(self, point: dict[str, Any]) -> dict[str, Any]:
        folder = Path("/tmp/points", point["name"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(point["config"]), encoding="utf-8")
        script = folder / "engine.py"
        script.write_text(ENGINE, encoding="utf-8")
        log = self.results / f"{point['name']}.log"
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": point["gpus"], "VLLM_LOGGING_COLOR": "0"}
        begun = time.monotonic()
        with log.open("wb") as handle:
            process = subprocess.Popen(
                [sys.executable, str(script), str(folder), json.dumps(point["arguments"])],
                stdout=handle,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        try:
            while True:
                text = log.read_text(encoding="utf-8", errors="replace")
                told = "Actual usage" in text or ("enforce_eager" in point["arguments"] and "GPU KV cache size" in text)
                if told or "ENGINE STARTED" in text or process.poll() is not None:
                    break
                if time.monotonic() - self.began > self.end:
                    break
                time.sleep(0.5)
            time.sleep(1)
            answer = read(log.read_text(encoding="utf-8", errors="replace"))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            time.sleep(2)
        answer["seconds"] = round(time.monotonic() - begun, 1)
        return answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--last-start", type=float, default=1e9)
    parser.add_argument("--end", type=float, default=1e9)
    arguments = parser.parse_args()
    queues = json.loads(arguments.points.read_text(encoding="utf-8"))
    points = Points(arguments.results, arguments.last_start, arguments.end)
    beside = [threading.Thread(target=points.queue, args=(q,)) for name, q in queues.items() if name.startswith("gpu")]
    for thread in beside:
        thread.start()
    for thread in beside:
        thread.join()
    for name, queue in queues.items():
        if not name.startswith("gpu"):
            points.queue(queue)
    return 0 if all("kv_gib" in point for point in points.found) else 1


if __name__ == "__main__":
    sys.exit(main())
