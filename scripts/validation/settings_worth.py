"""What a setting of `vllm serve` is worth, and how a server ends that loses a process: measured, a log kept of each start.

    PYTHON-WITH-VLLM scripts/validation/settings_worth.py STEPS.json RESULTS

STEPS.json: {model: {config, tokenizer}, arguments, prompts: {input, output}, steps: [...]}. A step has
    servers  [{name, gpus, arguments, environment, until}], started together; `until` is a text of the log at which a server
             that is not to get ready is ended by SIGKILL, with its process group
    bench    [{name, servers, concurrency}], `vllm bench serve` against each of the servers at once; two rounds of prompts
    end      {name: stop | engine | worker | server}: SIGTERM to the server (stop), or SIGKILL to one of its processes
    again    {name: {...}} changes of a server that is started once more after the end, until it is ready or has ended
RESULTS gets results.json, rewritten after each step, a log a start, and the JSON of each bench. The model has random weights.
Only processes that this started are ended, by id. Exit status: 0 every step was made, 1 one was not, 2 used wrongly.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

READY = 420  # seconds that a server gets
NUMBERS = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "completed", "failed", "duration")


def members(session: int) -> dict[int, str]:
    """Processes of a session, id to title."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if entry.name.isdigit() and int(fields[3]) == session and fields[0] != "Z":
                title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                found[int(entry.name)] = title
    return found


def memory() -> list[int]:
    """MiB in use, a GPU each."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    run = subprocess.run(query, capture_output=True, text=True, check=True)
    return [int(line) for line in run.stdout.split()]


def health(port: int, path: str = "/health", body: bytes | None = None, seconds: float = 5) -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=body)
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return str(answer.status)
    except urllib.error.HTTPError as error:
        return str(error.code)
    except OSError as error:
        return type(getattr(error, "reason", error)).__name__


class Server:
    def __init__(self, told: dict[str, Any], plan: dict[str, Any], port: int, log: Path):
        self.told, self.port, self.log = told, port, log
        arguments = {**plan["arguments"], **told.get("arguments", {})}
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", plan["folder"]]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        for name, value in arguments.items():
            command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        environment = {**os.environ, "VLLM_LOGGING_COLOR": "0", "CUDA_VISIBLE_DEVICES": told["gpus"]}
        environment.update({name: str(value) for name, value in told.get("environment", {}).items()})
        self.began = time.monotonic()
        with log.open("wb") as handle:
            self.process = subprocess.Popen(
                command, stdout=handle, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def wait(self) -> dict[str, Any]:
        """Until it is ready, has ended, or says what `until` waits for."""
        until, seconds = self.told.get("until"), 0.0
        while (seconds := time.monotonic() - self.began) < READY:
            if self.process.poll() is not None:
                return {"ready": None, "exit": self.process.returncode, "seconds": round(seconds, 1)}
            if until and until in self.log.read_text(encoding="utf-8", errors="replace"):
                self.kill()
                return {"ready": None, "killed_at": until, "seconds": round(seconds, 1)}
            if health(self.port, seconds=2) == "200":
                body = json.dumps({"model": "worth", "prompt": "The", "max_tokens": 1}).encode()
                if health(self.port, "/v1/completions", body, 120) == "200":
                    return {"ready": round(time.monotonic() - self.began, 1), "memory_mib": memory()}
            time.sleep(0.5)
        self.kill()
        return {"ready": None, "exit": "not within the time", "seconds": round(seconds, 1)}

    def kill(self) -> None:
        for pid in members(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for _look in range(40):
            if not members(self.process.pid):
                break
            time.sleep(0.25)

    def end(self, how: str) -> dict[str, Any]:
        """What is left after one process was ended, and for how long /health and completions went on as if nothing was."""
        titles = {"engine": r"EngineCore", "worker": r"Worker\w*_TP1"}
        target = self.process.pid
        if how in titles:
            found = [pid for pid, title in members(self.process.pid).items() if re.search(titles[how], title)]
            if not found:
                return {
                    "how": how,
                    "error": f"no process of that title among {sorted(members(self.process.pid).values())}",
                }
            target = found[0]
        begun = time.monotonic()
        os.kill(target, signal.SIGTERM if how == "stop" else signal.SIGKILL)
        answer: dict[str, Any] = {"how": how, "health": []}
        while time.monotonic() - begun < 45 and (how == "server" or self.process.poll() is None):
            if how == "server":
                self.process.wait()
                time.sleep(5)
                break
            if how != "stop":
                answer["health"].append([round(time.monotonic() - begun, 1), health(self.port, seconds=2)])
            time.sleep(0.5)
        answer["seconds"] = round(time.monotonic() - begun, 1)
        answer["exit"] = self.process.poll()
        answer["left"] = sorted(members(self.process.pid).values())
        answer["memory_mib"] = memory()
        return answer


class Worth:
    def __init__(self, plan: dict[str, Any], results: Path):
        self.plan, self.results = plan, results
        self.found: dict[str, Any] = {"servers": {}, "bench": {}, "ends": {}, "again": {}}
        self.port, self.seed = 8100, 0

    def keep(self) -> None:
        text = json.dumps(self.found, indent=1)
        (self.results / "results.json").write_text(text + "\n", encoding="utf-8")

    def start(self, told: dict[str, Any], suffix: str = "") -> Server:
        self.port += 1
        return Server(told, self.plan, self.port, self.results / f"{told['name']}{suffix}.log")

    def bench(self, told: dict[str, Any], servers: dict[str, Server]) -> None:
        for concurrency in told["concurrency"]:
            runs = [(name, self.client(told["name"], servers[name], concurrency)) for name in told["servers"]]
            for name, (process, path) in runs:
                process.wait()
                try:
                    answer = json.loads(path.read_text(encoding="utf-8"))
                    numbers = {key: answer.get(key) for key in NUMBERS}
                except (OSError, ValueError) as error:
                    numbers = {"error": str(error)}
                self.found["bench"].setdefault(told["name"], []).append(
                    {"server": name, "concurrency": concurrency, **numbers}
                )
                print(told["name"], name, concurrency, json.dumps(numbers), flush=True)
            self.keep()

    def client(self, name: str, server: Server, concurrency: int) -> tuple[subprocess.Popen[bytes], Path]:
        file = f"bench-{name}-{server.told['name']}-{concurrency}.json"
        count = max(8, concurrency * 4)
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"]
        command += ["--base-url", f"http://127.0.0.1:{server.port}", "--model", "worth"]
        command += ["--tokenizer", self.plan["model"]["tokenizer"], "--dataset-name", "random", "--ignore-eos"]
        command += ["--random-input-len", str(self.plan["prompts"]["input"])]
        command += ["--random-output-len", str(self.plan["prompts"]["output"])]
        command += ["--num-prompts", str(count), "--max-concurrency", str(concurrency), "--num-warmups", "2"]
        self.seed += 1  # the same prompts again would be answered out of the prefix cache
        command += ["--seed", str(self.seed)]
        command += ["--save-result", "--result-dir", str(self.results), "--result-filename", file, "--disable-tqdm"]
        with (self.results / "bench.log").open("ab") as handle:
            return subprocess.Popen(command, stdout=handle, stderr=subprocess.STDOUT), self.results / file

    def step(self, told: dict[str, Any]) -> bool:
        servers = {item["name"]: self.start(item) for item in told["servers"]}
        good = True
        try:
            for name, server in servers.items():
                answer = self.found["servers"][name] = server.wait()
                good = good and (
                    answer["ready"] is not None or "until" in server.told or server.told.get("fails", False)
                )
                print(name, json.dumps(answer), flush=True)
                self.keep()
            for bench in told.get("bench", []):
                if all(servers[name].process.poll() is None for name in bench["servers"]):
                    self.bench(bench, servers)
            for name, how in told.get("end", {}).items():
                if servers[name].process.poll() is None:
                    self.found["ends"][name] = servers[name].end(how)
                    print(name, json.dumps(self.found["ends"][name]), flush=True)
            for name, changes in told.get("again", {}).items():
                second = self.start({**servers[name].told, "until": None, **changes}, "-again")
                self.found["again"][name] = second.wait()
                print(name, "again", json.dumps(self.found["again"][name]), flush=True)
                second.kill()
        finally:
            for server in servers.values():
                server.kill()
            self.keep()
        return good


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    # Ended from outside (timeout), it still ends what it started: a server left behind holds its GPU for the next run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    results = Path(sys.argv[2])
    results.mkdir(parents=True, exist_ok=True)
    folder = Path("/tmp/worth-model")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(plan["model"]["config"]), encoding="utf-8")
    plan["folder"] = str(folder)
    plan["arguments"] = {
        "tokenizer": plan["model"]["tokenizer"],
        "load-format": "dummy",
        "served-model-name": "worth",
        **plan["arguments"],
    }
    worth = Worth(plan, results)
    made = [worth.step(step) for step in plan["steps"]]
    return 0 if all(made) else 1


if __name__ == "__main__":
    sys.exit(main())
