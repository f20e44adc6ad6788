# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Runs vLLM's own load generator on a host, one load after the other, in one process.

It is `vllm bench serve` of the installed release: the same parser and the same `main` that the command calls
(vllm/entrypoints/cli/benchmark/serve.py of 0.26.0 and 0.32.0). Each start of the command imports all of vLLM, seconds of a
core that the server may be using; here that is paid once, before the first load.

    FOLDER/release/bin/python -I -B PROGRAM drive JOB_FOLDER

JOB_FOLDER has job.json (bench_plan.py) and gets progress.json, replaced whole after each run. VLLM_API_KEY of the environment is
the key. The generator's own processor time is measured while requests are under way, and no second longer.

Standard library and vLLM; Python 3.9 and newer.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
import time
import traceback
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from . import bench_plan

TICK = 0.2  # seconds between two looks at the own processor time
ERRORS, ERROR_LETTERS = 5, 300  # kept of a run


class Own:
    """Processor seconds of this process over time, on the clock that vLLM's start times are of (time.perf_counter)."""

    def __init__(self) -> None:
        self.seen: List[Tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Own:
        self._mark()
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()
        self._mark()

    def _mark(self) -> None:
        self.seen.append((time.perf_counter(), time.process_time()))

    def _look(self) -> None:
        while not self._over.wait(TICK):
            self._mark()

    def share(self, begin: float, end: float) -> Optional[float]:
        return share(self.seen, begin, end)


def share(seen: Sequence[Tuple[float, float]], begin: float, end: float) -> Optional[float]:
    """Processor seconds a second between two times; None where fewer than two looks lie there."""
    inside = [look for look in seen if begin <= look[0] <= end]
    if len(inside) < 2 or inside[-1][0] <= inside[0][0]:
        return None
    return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])


def told_errors(errors: Any) -> Dict[str, int]:
    """Last lines of errors, and how often each came."""
    found: Dict[str, int] = {}
    for text in errors or []:
        if text:
            line = str(text).strip().splitlines()[-1][:ERROR_LETTERS]
            found[line] = found.get(line, 0) + 1
    return dict(sorted(found.items(), key=lambda item: -item[1])[:ERRORS])


def one(
    run: Mapping[str, Any], words: Sequence[str], serve: Callable[[Sequence[str]], Mapping[str, Any]]
) -> Dict[str, Any]:
    """Make one run; what it brought beside what it was."""
    began, out = time.perf_counter(), io.StringIO()
    told: Mapping[str, Any] = {}
    problem = ""
    with Own() as own:
        try:
            with contextlib.redirect_stdout(out):
                told = serve(words)
        except (Exception, SystemExit) as error:
            problem = f"{type(error).__name__}: {error}"[:ERROR_LETTERS]
            traceback.print_exc()
    ended = time.perf_counter()
    starts = [start for start in told.get("start_times") or [] if start]
    begin = min(starts) if starts else began
    end = min(ended, begin + float(told["duration"])) if told.get("duration") else ended
    return {
        **run,
        "result": bench_plan.result(told),
        "errors": told_errors(told.get("errors")),
        "problem": problem,
        "begin": begin,
        "end": end,
        "seconds": ended - began,
        "generator_cores": own.share(begin, end),
        "said": out.getvalue()[-2000:] if problem else "",
    }


def write(folder: str, content: Mapping[str, Any]) -> None:
    path = os.path.join(folder, "progress.json")
    with open(f"{path}.new", "w", encoding="utf-8") as text:
        json.dump(content, text)
    os.replace(f"{path}.new", path)


def all_runs(
    folder: str, job: Mapping[str, Any], serve: Callable[[Sequence[str]], Mapping[str, Any]]
) -> List[Dict[str, Any]]:
    """Every run that the plan asks for; progress.json says how far it is."""
    done: List[Dict[str, Any]] = []
    began = time.perf_counter()
    while True:
        elapsed = time.perf_counter() - began
        run = bench_plan.next_run(job, done, elapsed)
        state = {
            "runs": done,
            "elapsed": elapsed,
            "expected": bench_plan.expected(job, done),
            "now": run and run["name"],
        }
        write(folder, {**state, "done": run is None})
        if run is None:
            return done
        done.append(one(run, bench_plan.arguments(job, run), serve))
        if run["kind"] == "warm" and not done[-1]["result"]["completed"]:
            write(folder, {**state, "runs": done, "done": True})
            return done  # nothing answers: no load would


def vllm() -> Callable[[Sequence[str]], Mapping[str, Any]]:
    """`vllm bench serve` as a function of its words."""
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm bench serve")
    add_cli_args(parser)
    return lambda words: main(parser.parse_args(list(words)))


def ended(arguments: Sequence[str]) -> int:
    """When the generator's unit has ended, whatever the way: progress.json says so, for whoever waits for it."""
    folder, told = arguments[0], {"runs": [], "elapsed": 0.0, "expected": 0, "now": None}
    with (
        contextlib.suppress(OSError, ValueError),
        open(os.path.join(folder, "progress.json"), encoding="utf-8") as text,
    ):
        told = json.load(text)
    if not told.get("done"):
        how = f"{os.environ.get('SERVICE_RESULT', 'no result')}, {os.environ.get('EXIT_STATUS', 'no status')}"  # systemd.exec(5)
        write(folder, {**told, "done": True, "problem": f"the load generator ended before it was done ({how})"})
    return 0


def main(arguments: Sequence[str]) -> int:
    folder = arguments[0]
    with open(os.path.join(folder, "job.json"), encoding="utf-8") as text:
        job = json.load(text)
    key = os.environ.pop("VLLM_API_KEY", "")
    if key:
        os.environ["OPENAI_API_KEY"] = key  # vllm/benchmarks/lib/endpoint_request_func.py
    # aiohttp takes proxies from the environment (trust_env in serve.py); none stands between the fleet's own hosts.
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"
    try:
        bench_plan.check(job)
        all_runs(folder, job, vllm())
    except Exception as error:
        write(
            folder, {"runs": [], "elapsed": 0.0, "expected": 0, "now": None, "done": True, "problem": str(error)[:1000]}
        )
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
