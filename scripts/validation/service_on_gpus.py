"""A service on real GPUs as role vllm_service makes it, under systemd: what it does, what settings are worth, how it ends.

    python3 scripts/validation/service_on_gpus.py DAY.json RESULTS      (root, on the machine with the GPUs)

DAY.json says where everything is and what is done, in order (docs/validation has one that ran):
    root      folder of booted_root.py, up            python    an interpreter that has ansible-core
    repo      the collection's checkout               play      a playbook that runs the role, and what it is given (vars)
    release   folder of the release                   key       file with the key of the services
    lanes     lists of steps; lanes run beside each other, and a step `{meet: NAME}` waits for the other lanes' step of that name
Steps, each a mapping with one of
    play       inventory to serve; `again: true` runs it twice, and the second must change nothing
    stop       units that are stopped and disabled
    start      units that are enabled and started, by name: {UNIT: URL}; until each answers
    hand       a server by hand: {name, gpus, arguments, environment, port}; it ends at `end: NAME`. With `unit: true` it runs
               in the root as a unit with what vllm@.service says, but for its limits and the agent that watches it
    bench      loads on servers, all at once: {name, servers: {LABEL: URL}, concurrencies, repeats, seconds}
    rounds     loads on servers, one server after the other and in another order each round, by one load generator that lives
               as long as the day: {name, servers: {LABEL: URL}, loads: [{name, concurrency, prompts, ...}], rounds}
    accept     playbooks/accept.yml with an inventory and variables
    fault      {name, unit, url, kill: TITLE | halve: FOLDER | cut: TEXT, dropin: {...}}: what then happens without help; `of` is
               the unit that has the process to kill, where it is not the server's
    command    run inside the root; what it prints is kept
RESULTS gets results.json, rewritten after every step, and the logs. Only what this started is ended, by its process id.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "plugins")]
import booted_root  # noqa: E402

bench_plan = importlib.import_module("module_utils.bench_plan")

READY = 420.0  # seconds that a start may take
MAIN = """import sys
from gpu_fleet_bench import bench_driver
sys.exit(bench_driver.main(sys.argv[1:]))
"""
# The generator of `rounds`: a run and its words on each line of its input, what it brought on a line of its output. vLLM is
# imported once, which takes longer than a run.
BY_LINE = """import json, os, sys
from gpu_fleet_bench import bench_driver
os.environ["OPENAI_API_KEY"] = os.environ.pop("VLLM_API_KEY")
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"
out, sys.stdout = sys.stdout, sys.stderr
serve = bench_driver.vllm()
print("ready", file=out, flush=True)
for line in sys.stdin:
    told = json.loads(line)
    print(json.dumps(bench_driver.one(told["run"], told["words"], serve)), file=out, flush=True)
"""
# What /metrics says of speculation, the prefix cache and preemption (vllm/v1/metrics/loggers.py, vllm/v1/spec_decode/metrics.py).
COUNTED = re.compile(
    r"^vllm:(spec_decode_num_drafts|spec_decode_num_draft_tokens|spec_decode_num_accepted_tokens|prefix_cache_hits"
    r"|num_preemptions)_total\{[^}]*\} ([0-9.e+]+)$",
    re.MULTILINE,
)
CLOCKS = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader,nounits"]


class Day:
    def __init__(self, told: dict[str, Any], results: Path):
        self.told, self.results = told, results
        self.root, self.release = Path(told["root"]), Path(told["release"])
        self.key = Path(told["key"]).read_text(encoding="ascii").strip()
        self.found: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.hands: dict[str, subprocess.Popen[bytes]] = {}
        self.units: set[str] = set()  # of those by hand
        self.generator: subprocess.Popen[str] | None = None
        self.awake = False  # whether the generator has imported vLLM
        self.meetings: dict[str, threading.Barrier] = {}
        self.began, self.seed = time.monotonic(), 1
        self._program()

    # -- what is kept

    def keep(self, lane: int, step: dict[str, Any], seconds: float, **what: Any) -> None:
        with self.lock:
            entry = {
                "at": round(time.monotonic() - self.began, 1),
                "lane": lane,
                "seconds": round(seconds, 1),
                "step": step,
            }
            self.found.append({**entry, **what})
            new = self.results / "results.new"
            new.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
            new.replace(self.results / "results.json")
        print(f"{entry['at']:7.1f} s lane {lane} {next(iter(step))}: {json.dumps(what)[:400]}", flush=True)

    def log(self, name: str) -> Path:
        return self.results / f"{name}.log"

    # -- the machine

    def inside(self, *command: str) -> subprocess.CompletedProcess[str]:
        return booted_root.inside(self.root, *command, capture=True)

    def ask(self, url: str, path: str, body: dict[str, Any] | None = None, seconds: float = 5) -> tuple[str, Any]:
        request = urllib.request.Request(url + path, data=json.dumps(body).encode() if body else None)
        request.add_header("Content-Type", "application/json")
        request.add_header("Authorization", f"Bearer {self.key}")
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                text = answer.read()
                return str(answer.status), json.loads(text) if text and path != "/health" else None
        except urllib.error.HTTPError as error:
            return str(error.code), None
        except (OSError, ValueError) as error:
            return type(getattr(error, "reason", error)).__name__, None

    def completes(self, url: str, seconds: float = 60) -> str | None:
        """The text of a completion, or None."""
        _, models = self.ask(url, "/v1/models")
        if not models:
            return None
        body = {
            "model": models["data"][0]["id"],
            "prompt": "The capital of France is",
            "max_tokens": 8,
            "temperature": 0,
        }
        status, answer = self.ask(url, "/v1/completions", body, seconds)
        return answer["choices"][0]["text"] if status == "200" and answer else None

    def until_answers(self, url: str, alive: Any = lambda: True, limit: float = READY) -> tuple[float, str | None]:
        began = time.monotonic()
        while time.monotonic() - began < limit and alive():
            text = self.completes(url)
            if text is not None:
                return time.monotonic() - began, text
            time.sleep(0.3)
        return time.monotonic() - began, None

    def journal(self, unit: str, name: str, since: str) -> None:
        run = self.inside("journalctl", "--no-pager", "-o", "short-iso", "-u", unit, "--since", since)
        self.log(name).write_text(run.stdout, encoding="utf-8")

    def now(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S")

    # -- steps

    def ansible(self, playbook: str, inventory: str, name: str, more: dict[str, Any]) -> tuple[int, str]:
        command = [self.told["python"], "-m", "ansible", "playbook", playbook, "-i", inventory, "-e", json.dumps(more)]
        environment = {
            "PYTHONPATH": self.told["pythonpath"],
            "ANSIBLE_CONFIG": f"{self.told['repo']}/ansible.cfg",
            "ANSIBLE_COLLECTIONS_PATH": f"{self.told['repo']}/collections",
            "ANSIBLE_HOME": "/tmp/day/ansible",
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "ANSIBLE_NOCOLOR": "1",
            "PATH": self.told["path"],
        }
        words = " ".join(f"{key}={shlex.quote(value)}" for key, value in environment.items())
        run = self.inside("sh", "-c", f"cd {self.told['repo']} && env -i {words} {shlex.join(command)} 2>&1")
        self.log(name).write_text(run.stdout, encoding="utf-8")
        recap = re.findall(r"ok=\d+ .*", run.stdout)
        return run.returncode, re.sub(r"\s+", " ", recap[-1]) if recap else run.stdout[-300:]

    def play(self, lane: int, step: dict[str, Any]) -> None:
        for turn in range(2 if step.get("again") else 1):
            began = time.monotonic()
            name = f"play-{Path(step['play']).stem}{'-second' if turn else ''}"
            status, recap = self.ansible(self.told["play"], step["play"], name, self.told["vars"])
            self.keep(lane, step, time.monotonic() - began, turn=turn + 1, status=status, recap=recap, memory=memory())
            if status:
                return

    def accept(self, lane: int, step: dict[str, Any]) -> None:
        began = time.monotonic()
        more = {**step["vars"], "accept_folder": "/tmp/day/acceptance"}
        playbook = f"{self.told['repo']}/playbooks/accept.yml"
        status, recap = self.ansible(playbook, step["accept"], f"accept-{step['name']}", more)
        self.keep(lane, step, time.monotonic() - began, status=status, recap=recap)

    def stop(self, lane: int, step: dict[str, Any]) -> None:
        began = time.monotonic()
        for unit in step["stop"]:
            self.inside("systemctl", "disable", "--now", f"vllm-agent@{unit}", f"vllm@{unit}")
        time.sleep(2)  # the driver gives memory back a moment after the last process
        self.keep(lane, step, time.monotonic() - began, memory=memory())

    def start(self, lane: int, step: dict[str, Any]) -> None:
        began = time.monotonic()
        for unit in step["start"]:
            self.inside("systemctl", "enable", "--now", f"vllm-agent@{unit}")
            self.inside("systemctl", "enable", "--now", "--no-block", f"vllm@{unit}")
        texts = {unit: self.until_answers(url)[1] for unit, url in step["start"].items()}
        self.keep(lane, step, time.monotonic() - began, texts=texts, memory=memory())

    def hand(self, lane: int, step: dict[str, Any]) -> None:
        told, began = step["hand"], time.monotonic()
        environment = {
            "PATH": self.told["path"],
            "HOME": f"/tmp/day/home-{told['name']}",
            "LANG": "C.UTF-8",
            "VLLM_API_KEY": self.key,
            "CUDA_VISIBLE_DEVICES": told["gpus"],
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_COLOR": "0",
            **told.get("environment", {}),
        }
        command = [str(self.release / "bin/vllm"), "serve", *told["arguments"], "--port", str(told["port"])]
        if told.get("unit"):
            self.hand_as_unit(lane, step, command, environment)
            return
        Path(environment["HOME"]).mkdir(exist_ok=True)
        with self.log(told["name"]).open("wb") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.hands[told["name"]] = process
        url = f"http://127.0.0.1:{told['port']}"
        _, text = self.until_answers(url, lambda: process.poll() is None, told.get("limit", READY))
        self.keep(lane, step, time.monotonic() - began, ready=text is not None, exit=process.poll(), memory=memory())

    def hand_as_unit(self, lane: int, step: dict[str, Any], command: list[str], environment: dict[str, str]) -> None:
        """The same command as a unit of its own that has the sandbox of the role's."""
        told, began = step["hand"], time.monotonic()
        unit, cache = f"try-{told['name']}.service", f"/var/cache/vllm/try-{told['name']}"
        environment["HOME"] = cache
        text = (self.root / "root/etc/systemd/system/vllm@.service").read_text(encoding="utf-8")
        text = text.replace(
            "[Install]", "".join(f'Environment="{k}={v}"\n' for k, v in environment.items()) + "[Install]"
        )
        text = text.replace("Restart=always\n", "")
        own = f"CacheDirectory=vllm/try-{told['name']}\nWorkingDirectory={cache}\nDevicePolicy=closed\n"
        own += f"DeviceAllow=char-nvidia* rw\nExecStart={shlex.join(command)}\n"
        place = self.root / "root/etc/systemd/system" / unit
        place.touch(mode=0o600)  # it has the key
        place.write_text(text.replace("[Install]", own + "[Install]"), encoding="utf-8")
        since = self.now()
        self.inside("systemctl", "daemon-reload")
        self.inside("systemctl", "start", unit)
        self.units.add(told["name"])
        running = ("systemctl", "is-active", "--quiet", unit)
        url, limit = f"http://127.0.0.1:{told['port']}", told.get("limit", READY)
        _, said = self.until_answers(url, lambda: not self.inside(*running).returncode, limit)
        self.journal(unit, told["name"], since)
        self.keep(lane, step, time.monotonic() - began, ready=said is not None, memory=memory())

    def end(self, lane: int, step: dict[str, Any]) -> None:
        began = time.monotonic()
        if step["end"] in self.units:
            self.units.remove(step["end"])
            self.inside("systemctl", "stop", f"try-{step['end']}.service")
            self.keep(lane, step, time.monotonic() - began, memory=memory())
            return
        process = self.hands.pop(step["end"])
        end_session(process)
        time.sleep(2)
        self.keep(lane, step, time.monotonic() - began, exit=process.returncode, memory=memory())

    def _program(self) -> None:
        package = Path("/tmp/day/program/gpu_fleet_bench")
        package.mkdir(parents=True, exist_ok=True)
        (package.parent / "__main__.py").write_text(MAIN, encoding="utf-8")
        (package / "__init__.py").touch()
        for name in ("bench_plan.py", "bench_driver.py"):
            source = HERE.parents[1] / "plugins/module_utils" / name
            (package / name).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")

    def bench(self, lane: int, step: dict[str, Any]) -> None:
        """The load generator of playbooks/accept.yml on several servers at once, a process each."""
        told, began, runs = step["bench"], time.monotonic(), {}
        for label, url in told["servers"].items():
            folder = Path("/tmp/day/bench") / f"{told['name']}-{label}"
            folder.mkdir(parents=True, exist_ok=True)
            _, models = self.ask(url, "/v1/models")
            if not models:
                continue
            with self.lock:
                self.seed += 1000
            job = {
                "base_url": url,
                "model": models["data"][0]["id"],
                "tokenizer": told["tokenizer"],
                "dataset": "random",
                "input_tokens": told.get("input", 1024),
                "output_tokens": told.get("output", 128),
                "max_model_len": 4096,
                "max_num_seqs": 256,
                "concurrencies": told["concurrencies"],
                "repeats": told["repeats"],
                "seconds_per_point": told["seconds"],
                "least_prompts": 8,
                "budget_seconds": 600,
                "full": False,
                "objective": {},
                "seed": self.seed,
            }
            (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
            environment = {
                "PATH": self.told["path"],
                "HOME": str(folder),
                "VLLM_API_KEY": self.key,
                "CUDA_VISIBLE_DEVICES": "",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "OMP_NUM_THREADS": "1",
            }
            command = [str(self.release / "bin/python"), "-I", "-B", "/tmp/day/program", str(folder)]
            with (folder / "log").open("wb") as out:
                process = subprocess.Popen(
                    command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                )
            runs[label] = (process, folder)
        brought = {}
        for label, (process, folder) in runs.items():
            try:
                process.wait(timeout=240)
            except subprocess.TimeoutExpired:
                end_session(process)
            try:
                progress = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
                brought[label] = [
                    {
                        "concurrency": run["concurrency"],
                        "repeat": run["repeat"],
                        "cores": run["generator_cores"],
                        **run["result"],
                    }
                    for run in progress["runs"]
                    if run["kind"] == "sweep"
                ]
            except (OSError, ValueError) as error:
                brought[label] = [{"problem": f"{error}: {(folder / 'log').read_text(errors='replace')[-600:]}"}]
        self.keep(lane, step, time.monotonic() - began, runs=brought)

    def generate(self, run: dict[str, Any], words: list[str]) -> dict[str, Any]:
        """One run of the generator that lives as long as the day."""
        if self.generator is None:
            self.wake_generator()
        assert self.generator and self.generator.stdin and self.generator.stdout
        if not self.awake:
            self.awake = self.generator.stdout.readline() == "ready\n"
        self.generator.stdin.write(json.dumps({"run": run, "words": words}) + "\n")
        self.generator.stdin.flush()
        line = self.generator.stdout.readline()
        if not line:
            raise OSError(f"the load generator ended: {self.log('generator').read_text(errors='replace')[-600:]}")
        brought: dict[str, Any] = json.loads(line)
        return brought

    def wake_generator(self) -> None:
        (Path("/tmp/day/program") / "by_line.py").write_text(BY_LINE, encoding="utf-8")
        environment = {
            "PATH": self.told["path"],
            "HOME": "/tmp/day/program",
            "VLLM_API_KEY": self.key,
            "CUDA_VISIBLE_DEVICES": "",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": "/tmp/day/program",
        }
        with self.log("generator").open("wb") as errors:
            self.generator = subprocess.Popen(
                [str(self.release / "bin/python"), "-B", "/tmp/day/program/by_line.py"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
                start_new_session=True,
            )

    def counted(self, url: str) -> dict[str, float]:
        request = urllib.request.Request(f"{url}/metrics")
        request.add_header("Authorization", f"Bearer {self.key}")
        with urllib.request.urlopen(request, timeout=10) as answer:
            return {name: float(value) for name, value in COUNTED.findall(answer.read().decode())}

    def rounds(self, lane: int, step: dict[str, Any]) -> None:
        told, began, runs = step["rounds"], time.monotonic(), []
        labels = list(told["servers"])
        models = {label: self.ask(url, "/v1/models")[1] for label, url in told["servers"].items()}
        for number in range(told.get("rounds", 1)):
            # Whoever comes first in a round is another one each time, and every second round goes backwards.
            order = labels[number % len(labels) :] + labels[: number % len(labels)]
            for label in order if number % 2 == 0 else order[::-1]:
                for load in told["loads"]:
                    if models[label] and label not in load.get("not", []):
                        runs.append(self.one_load(told, label, models[label]["data"][0]["id"], load, number))
        self.keep(lane, step, time.monotonic() - began, runs=runs)

    def one_load(
        self, told: dict[str, Any], label: str, model: str, load: dict[str, Any], number: int
    ) -> dict[str, Any]:
        url = told["servers"][label]
        with self.lock:
            self.seed += 1  # the same prompts again would come out of the prefix cache
        path = load.get("path")
        job = {"base_url": url, "model": model, "tokenizer": told["tokenizer"], "path": path}
        run = {
            "kind": "sweep",
            "concurrency": load["concurrency"],
            "rate": None,
            "repeat": number,
            "input_tokens": load.get("input", 1024),
            "output_tokens": load.get("output", 128),
            "dataset": "jsonl" if path else "random",
            "seed": self.seed,
            "prompts": load["prompts"],
        }
        words = [*bench_plan.arguments(job, run), *load.get("words", [])]
        before, clocks = self.counted(url), []
        look = threading.Timer(1.5, lambda: clocks.append(seen(CLOCKS)))
        look.start()
        brought = self.generate(run, words)
        look.cancel()
        grown = {name: value - before.get(name, 0.0) for name, value in self.counted(url).items()}
        entry = {"server": label, "load": load["name"], "round": number, "cores": brought["generator_cores"]}
        entry.update(clocks=clocks, counted=grown, **brought["result"])
        if brought["problem"] or brought["errors"]:
            entry.update(problem=brought["problem"], errors=brought["errors"])
        return entry

    def fault(self, lane: int, step: dict[str, Any]) -> None:
        told, began = step["fault"], time.monotonic()
        unit, since = f"vllm@{told['unit']}.service", self.now()
        what = self.bring_about(told, unit, since)
        if "problem" in what:
            self.keep(lane, step, time.monotonic() - began, **what)
            return
        hurt, health = time.monotonic(), []
        # Until nothing answers as if all were well; then until it does again.
        while told.get("kill") and time.monotonic() - hurt < 60:
            status, _ = self.ask(told["url"], "/health", seconds=2)
            health.append([round(time.monotonic() - hurt, 1), status])
            if status not in ("200", "503"):
                break
            time.sleep(0.3)
        if told.get("fails"):
            time.sleep(told["fails"])
        else:
            _, text = self.until_answers(told["url"], limit=told.get("limit", 240))
            what.update(answers_after=round(time.monotonic() - hurt, 1), text=text)
        self.journal(unit, f"fault-{told['name']}", since)
        shown = self.inside("systemctl", "show", unit, "-P", "NRestarts").stdout.strip()
        said = ("journalctl", "--no-pager", "-o", "cat", "-u", f"vllm-agent@{told['unit']}", "--since", since)
        agent = self.inside(*said).stdout.splitlines()[-6:]
        what.update(health=thinned(health), restarts=shown, agent=agent, memory=memory())
        self.keep(lane, step, time.monotonic() - began, **what)

    def bring_about(self, told: dict[str, Any], unit: str, since: str) -> dict[str, Any]:
        """Do what the fault is; what is to be told of it."""
        if told.get("dropin"):
            folder = self.root / f"root/etc/systemd/system/{unit}.d"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "99-try.conf").write_text(told["dropin"], encoding="utf-8")
            self.inside("systemctl", "daemon-reload")
            self.inside("systemctl", "restart", "--no-block", unit)
        if told.get("halve"):
            self.inside("systemctl", "stop", unit)
            halved = halve(self.root / "root" / told["halve"].lstrip("/"))
            self.inside("systemctl", "start", "--no-block", unit)
            return {"halved": halved}
        if told.get("cut"):
            return {"cut_at": self.cut(told, unit, since)}
        if told.get("kill"):
            titles = self.titles(told.get("of", unit))
            hit = [pid for pid, title in titles.items() if re.search(told["kill"], title)]
            if not hit:
                return {"problem": "no such process", "processes": sorted(titles.values())}
            os.kill(hit[0], signal.SIGKILL)
            return {"killed": titles[hit[0]], "processes": sorted(titles.values())}
        return {}

    def cut(self, told: dict[str, Any], unit: str, since: str) -> float:
        """Start a unit with empty caches, and kill all of it when its journal says `cut`; seconds until then."""
        began = time.monotonic()
        self.inside("systemctl", "stop", unit)
        self.inside("rm", "-rf", told["cache"])
        self.inside("systemctl", "start", "--no-block", unit)
        while time.monotonic() - began < 150:
            text = self.inside("journalctl", "--no-pager", "-o", "cat", "-u", unit, "--since", since).stdout
            if told["cut"] in text:
                break
            time.sleep(0.3)
        seconds = round(time.monotonic() - began, 1)
        time.sleep(1)
        self.inside("systemctl", "kill", "--signal=KILL", "--kill-who=all", unit)
        return seconds

    def titles(self, unit: str) -> dict[int, str]:
        """Processes of a unit by their control group, as the machine numbers them."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and f"/{unit}" in (entry / "cgroup").read_text():
                    title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    found[int(entry.name)] = title[:200]
            except OSError:
                continue
        return found

    def command(self, lane: int, step: dict[str, Any]) -> None:
        began = time.monotonic()
        run = self.inside("sh", "-c", step["command"])
        self.log(f"command-{step['name']}").write_text(run.stdout + run.stderr, encoding="utf-8")
        self.keep(lane, step, time.monotonic() - began, status=run.returncode, said=(run.stdout + run.stderr)[-1500:])

    def meet(self, lane: int, step: dict[str, Any]) -> None:
        with self.lock:
            barrier = self.meetings.setdefault(step["meet"], threading.Barrier(len(self.told["lanes"])))
        barrier.wait()

    # -- all of it

    def lane(self, number: int) -> None:
        for step in self.told["lanes"][number]:
            kind = next(name for name in step if hasattr(self, name))
            try:
                getattr(self, kind)(number, step)
            except Exception as error:
                traceback.print_exc()
                self.keep(number, step, 0, problem=f"{type(error).__name__}: {error}")

    def all(self) -> None:
        if any("rounds" in step for lane in self.told["lanes"] for step in lane):
            self.wake_generator()
        lanes = [threading.Thread(target=self.lane, args=(number,)) for number in range(len(self.told["lanes"]))]
        try:
            for lane in lanes:
                lane.start()
            for lane in lanes:
                lane.join()
        finally:
            for process in self.hands.values():
                end_session(process)
            for name in self.units:
                self.inside("systemctl", "stop", f"try-{name}.service")
            if self.generator:
                self.generator.kill()
                self.generator.wait()


def seen(command: list[str]) -> str:
    """What a command prints, or why it did not run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return str(error)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server, then SIGKILL to what is left of its session."""
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == process.pid:
                os.kill(int(entry.name), signal.SIGKILL)
        except (OSError, ValueError, IndexError):
            continue
    process.wait()


def halve(folder: Path) -> int:
    """Cut every file of a folder in two; how many."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink() and path.suffix != ".pyc"]
    files = [path for path in files if path.stat().st_size > 1]
    for path in files:
        os.truncate(path, path.stat().st_size // 2)
    return len(files)


def thinned(looks: list[list[Any]]) -> list[list[Any]]:
    """The first of each run of the same answer, and the last."""
    return [look for number, look in enumerate(looks) if not number or look[1] != looks[number - 1][1]] + looks[-1:]


def memory() -> list[str]:
    return seen(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]).splitlines()


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    results = Path(sys.argv[2])
    results.mkdir(parents=True, exist_ok=True)
    Day(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), results).all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
