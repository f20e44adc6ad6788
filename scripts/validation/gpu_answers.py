"""Does a service that the collection plans answer on this machine's GPUs? The evidence, as JSON and a log.

On the controller, from an inventory to what a host would run with (planner, templates and ID are the collection's own):
    .venv/bin/python scripts/validation/gpu_answers.py render INVENTORY LOCK INTO
On the machine with the GPUs, as root and with nothing but Python 3.9, for a release that is in its place:
    python3 scripts/validation/gpu_answers.py serve INTO/INSTANCE.json RESULTS [--requests 100] [--expect Paris] ...

`serve` does by hand what systemd does with the unit of roles/vllm_service: the folders, prepare, `vllm serve --config`,
and the probe that waits for a right completion; then it asks, stops the server and starts it again with warm caches.
RESULTS gets result.json, rewritten after every step so that a machine that vanishes takes little along, and one log a
start. The API key is made on the spot and written nowhere but into secrets.env; an instance that the roles have deployed
has one already and is refused.
Exit status: 0 shown, 1 not shown (result.json says what failed), 2 used wrongly.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import glob
import hashlib
import importlib.util
import ipaddress
import json
import os
import pwd
import re
import resource
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# What systemd gives a unit that says nothing about it (systemd.exec(5), $PATH): no CUDA toolkit of the machine is on it.
SYSTEMD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"
NOFILE = 524288  # host_limits_nofile
STOP_SECONDS = 40  # --shutdown-timeout and 10 more, as TimeoutStopSec of the unit

# Asked of the release itself, in the server's own environment.
FACTS = """
import importlib.metadata as m, json, platform, shutil, sys, torch
from vllm.usage.usage_lib import is_usage_stats_enabled
from vllm.utils.flashinfer import has_flashinfer
import vllm
print(json.dumps({
  "python": platform.python_version(), "vllm": vllm.__version__, "vllm_file": vllm.__file__, "torch": torch.__version__,
  "torch_file": torch.__file__, "cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version())),
  "cudnn": torch.backends.cudnn.version(), "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
  "capability": list(torch.cuda.get_device_capability(0)), "usage_stats_enabled": is_usage_stats_enabled(),
  "has_flashinfer": has_flashinfer(), "nvcc": shutil.which("nvcc"), "gcc": shutil.which("gcc"),
  "distributions": {d.metadata["Name"]: d.version for d in m.distributions()},
}))
"""


class NotShown(Exception):
    """What was to be shown did not happen; the message says what did."""


# --- On the controller -----------------------------------------------------------------------------------------


def render(inventory: Path, lock: Path, into: Path) -> None:
    """One file an instance: its release and the files of its generation, with their ID."""
    sys.path.insert(0, str(ROOT / "collections"))
    from ansible_collections.gpu_fleet.vllm.plugins.module_utils import locks
    from ansible_collections.gpu_fleet.vllm.plugins.modules import generation

    locked = locks.parse(lock.read_text(encoding="utf-8"), str(lock))
    release = f"/opt/vllm/releases/{locked.id}"
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as raw:
        command = [
            str(Path(sys.executable).parent / "ansible-playbook"),
            "scripts/validation/render.yml",
            "-i",
            str(inventory.resolve()),
        ]
        facts = {
            "id": locked.id,
            "path": release,
            "version": locked.version,
            "accelerator": locked.accelerator,
            "kernels_missing": list(locked.kernels_missing),
        }
        given = json.dumps({"render_into": raw, "render_release": facts})
        subprocess.run([*command, "--extra-vars", given], cwd=ROOT, check=True, stdout=sys.stderr)
        for name in sorted(os.listdir(raw)):
            files = json.loads((Path(raw) / name).read_text(encoding="utf-8"))
            instance = json.loads(files["plan.json"])["instance"]
            identity = generation.identity(files, release)
            path = f"/etc/vllm/{instance}/generations/{identity}"
            filled = {key: generation.fill(content, identity, path) for key, content in files.items()}
            made = {
                "instance": instance,
                "id": identity,
                "path": path,
                "release": release,
                "files": filled,
                "parse": generation.PARSE,
            }
            (into / f"{instance}.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
            print(into / f"{instance}.json")


# --- On the machine with the GPUs ------------------------------------------------------------------------------


class Result:
    """What was seen, on disk after every step."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "result.json"
        self.seen: dict[str, Any] = {}

    def put(self, name: str, value: Any) -> None:
        self.seen[name] = value
        self.path.with_suffix(".new").write_text(json.dumps(self.seen, indent=1) + "\n", encoding="utf-8")
        self.path.with_suffix(".new").replace(self.path)
        print(f"{now()} {name}: {json.dumps(value)[:300]}", flush=True)


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def output(command: list[str]) -> str:
    """What a command prints, or why it did not run."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False
        )
        return done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"


def machine() -> dict[str, Any]:
    """GPUs, driver and system, as their own tools tell."""
    names = (
        "index,name,driver_version,memory.total,memory.used,compute_cap,vbios_version,mig.mode.current,ecc.mode.current"
    )
    with open("/etc/os-release", encoding="utf-8") as lines:
        system = re.search(r'^PRETTY_NAME="?([^"\n]+)', lines.read(), re.MULTILINE)
    return {
        "nvidia-smi": output(["nvidia-smi"]),
        "gpus": output(["nvidia-smi", f"--query-gpu={names}", "--format=csv"]).splitlines(),
        "topology": output(["nvidia-smi", "topo", "-m"]),
        "kernel": os.uname().release,
        "system": system.group(1) if system else "",
        "glibc": os.confstr("CS_GNU_LIBC_VERSION"),
        "cpus": os.cpu_count(),
    }


def gpu_memory() -> list[str]:
    return output(["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader"]).splitlines()


def place(made: dict[str, Any], user: str, key: str) -> dict[str, str]:
    """Lay the generation, its key and its cache where the role lays them; returns the server's environment."""
    path, release = Path(made["path"]), Path(made["release"])
    path.mkdir(parents=True, exist_ok=True)
    for name, content in made["files"].items():
        (path / name).write_text(content, encoding="utf-8")
    if not (path / "release").is_symlink():
        (path / "release").symlink_to(release)
    keys = path.parents[1] / "secrets.env"
    keys.touch(mode=0o600)
    keys.write_text(f"VLLM_API_KEY={key}\n", encoding="utf-8")
    account = pwd.getpwnam(user)
    cache = cache_of(made)
    cache.mkdir(parents=True, exist_ok=True)
    cache.chmod(0o700)
    os.chown(cache, account.pw_uid, account.pw_gid)
    environment = {"PATH": SYSTEMD_PATH, "LANG": "C.UTF-8", "USER": user, "LOGNAME": user, "SHELL": account.pw_shell}
    for line in (*made["files"]["env"].splitlines(), f"VLLM_API_KEY={key}"):
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            environment[name] = value
    return environment


def cache_of(made: dict[str, Any]) -> Path:
    return Path("/var/cache/vllm") / made["instance"] / made["id"]


class Server:
    """The server as the unit runs it: user, working folder, limits, environment, and the programs before and after."""

    def __init__(self, made: dict[str, Any], environment: dict[str, str], user: str) -> None:
        self.made, self.environment = made, environment
        account = pwd.getpwnam(user)
        self.run_as: dict[str, Any] = (
            {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
            if os.geteuid() != account.pw_uid
            else {}
        )
        self.python = f"{made['path']}/release/bin/python"
        plan = json.loads(made["files"]["plan.json"])
        self.model = plan["config"]["served-model-name"][0]
        self.url = f"http://{plan['head']['address']}:{plan['head']['port']}"
        self.process: subprocess.Popen[bytes] | None = None
        self.watch: Connections | None = None

    def beside(self, command: list[str], timeout: float = 300, **more: str) -> subprocess.CompletedProcess[str]:
        """A program in the unit's environment, as its user."""
        return subprocess.run(
            command,
            env={**self.environment, **more},
            cwd=self.made["path"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
            **self.run_as,
        )

    def probe(self, *arguments: str, timeout: float = 300, **more: str) -> str:
        done = self.beside([self.python, "-I", "-B", f"{self.made['path']}/probe.py", *arguments], timeout, **more)
        if done.returncode:
            raise NotShown(f"probe.py {arguments[0]} ended with status {done.returncode}: {done.stdout[-2000:]}")
        return done.stdout.strip()

    def start(self, log: Path, patience: float) -> dict[str, Any]:
        """Start it and wait for a right completion; seconds from the start of the process to that answer."""
        cache = str(cache_of(self.made))
        began = time.monotonic()
        self.probe("prepare", cache)
        prepared = time.monotonic()
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        limit = min(NOFILE, hard) if hard != resource.RLIM_INFINITY else NOFILE
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # the server inherits it
        with open(log, "wb") as out:
            self.process = subprocess.Popen(
                [f"{self.made['path']}/release/bin/vllm", "serve", "--config", f"{self.made['path']}/config.yaml"],
                env=self.environment,
                cwd=self.made["path"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=0o077,
                **self.run_as,
            )
        # Collected as soon as it ends, or the probe would take what is left of it in /proc for a running server.
        threading.Thread(target=self.process.wait, daemon=True).start()
        self.watch = Connections(self.process.pid)
        self.watch.start()
        started = now()
        try:
            told = self.probe("head", cache, self.url, self.model, timeout=patience, MAINPID=str(self.process.pid))
        except subprocess.TimeoutExpired as error:
            raise NotShown(f"no right completion within {patience:g} s") from error
        return {
            "started": started,
            "seconds_to_ready": round(time.monotonic() - prepared, 1),
            "seconds_of_prepare": round(prepared - began, 2),
            "probe": told.splitlines(),
            "open_files": limit,
            "starting_mark_left": os.path.exists(f"{cache}/.starting"),
            "gpu_memory_used": gpu_memory(),
        }

    def stop(self) -> dict[str, Any]:
        """SIGTERM to the server alone, as KillMode=mixed does; what outlives the wait is killed, group and all."""
        process = self.process
        if process is None:
            return {}
        family = descendants(process.pid)
        if self.watch is not None:
            self.watch.ended.set()
            self.watch.join()
        began = time.monotonic()
        if process.poll() is None:
            process.terminate()
        killed = False
        try:
            process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            killed = True
        left = [f"{pid} {command}" for pid, command in family.items() if pid != process.pid and alive(pid)]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        self.process = None
        seconds = round(time.monotonic() - began, 1)
        time.sleep(2)  # the driver gives memory back a moment after the last process
        return {
            "exit_status": status,
            "seconds": seconds,
            "had_to_be_killed": killed,
            "processes_left": left,
            "gpu_memory_used": gpu_memory(),
        }


def descendants(pid: int) -> dict[int, str]:
    """A process and all that came from it, with what they call themselves."""
    parents: dict[int, list[int]] = {}
    for stat in glob.glob("/proc/[0-9]*/stat"):
        try:
            with open(stat, encoding="utf-8", errors="replace") as text:
                content = text.read()
        except OSError:
            continue
        parents.setdefault(int(content.rpartition(")")[2].split()[1]), []).append(int(content.split()[0]))
    found, todo = {}, [pid]
    while todo:
        one = todo.pop()
        try:
            with open(f"/proc/{one}/cmdline", "rb") as text:
                found[one] = text.read().replace(b"\0", b" ").decode(errors="replace").strip()[:120]
        except OSError:
            continue
        todo.extend(parents.get(one, ()))
    return found


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as text:
            return text.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Connections(threading.Thread):
    """Twice a second: which addresses do the sockets of a process and its descendants point at?"""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.looks, self.remote = pid, 0, set[str]()
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.is_set():
            inodes = set()
            for pid in descendants(self.pid):
                for link in glob.glob(f"/proc/{pid}/fd/*"):
                    try:
                        target = os.readlink(link)
                    except OSError:
                        continue
                    if target.startswith("socket:["):
                        inodes.add(target[8:-1])
            for kind in ("tcp", "tcp6", "udp", "udp6"):
                with open(f"/proc/net/{kind}", encoding="ascii") as table:
                    for fields in (line.split() for line in list(table)[1:]):
                        if fields[9] in inodes and int(fields[2].split(":")[0], 16):
                            self.remote.add(f"{kind} {address(fields[2].split(':')[0])}")
            self.looks += 1
            self.ended.wait(0.5)


def address(words: str) -> str:
    """An address of /proc/net: words of 32 bits in the machine's order (proc_net_tcp.rst)."""
    data = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
    return str(ipaddress.ip_address(data))


def metric(server: Server, name: str) -> float:
    """Sum of a counter over its labels, from /metrics."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{server.url}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    return sum(
        float(line.rpartition(" ")[2]) for line in text.splitlines() if re.match(rf"{re.escape(name)}(\{{|\s)", line)
    )


def keys_refused(probe: Any, server: Server, key: str) -> dict[str, int]:
    """HTTP statuses with the right key, a wrong one and none."""
    asked = {"model": server.model, "prompt": "Hello", "max_tokens": 1}
    statuses = {
        "health, no key": probe.request(f"{server.url}/health").status,
        "models, right key": probe.request(f"{server.url}/v1/models", key).status,
        "models, wrong key": probe.request(f"{server.url}/v1/models", secrets.token_hex(32)).status,
        "models, no key": probe.request(f"{server.url}/v1/models").status,
        "completion, wrong key": probe.request(f"{server.url}/v1/completions", secrets.token_hex(32), asked).status,
    }
    if list(statuses.values()) != [200, 200, 401, 401, 401]:
        raise NotShown(f"statuses: {statuses}")
    return statuses


def ask(probe: Any, server: Server, key: str, question: str) -> Any:
    payload = {
        "model": server.model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 64,
        "temperature": 0,
    }
    return probe.request(f"{server.url}/v1/chat/completions", key, payload, deadline=60)


def text_of(answer: Any) -> str:
    return str(answer.body["choices"][0]["message"]["content"]) if answer.right else ""


def question_answered(probe: Any, server: Server, key: str, arguments: argparse.Namespace) -> dict[str, Any]:
    question, expect = arguments.question, arguments.expect
    answer = ask(probe, server, key, question)
    if not answer.right:
        raise NotShown(f"the question brought {answer.problem}")
    found = {"question": question, "status": answer.status, "seconds": round(answer.seconds, 3), "answer": answer.body}
    if expect:
        found["expected"], found["expected_is_in_it"] = expect, expect in text_of(answer)
    return found


def many(probe: Any, server: Server, key: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The question many times, some at a time."""
    count, at_once = arguments.requests, arguments.at_once
    names = ("vllm:request_success_total", "vllm:generation_tokens_total", "vllm:prompt_tokens_total")
    before = {name: metric(server, name) for name in names}
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda _: ask(probe, server, key, arguments.question), range(count)))
    seconds = time.monotonic() - began
    took = sorted(answer.seconds for answer in answers)
    texts = [text_of(answer) for answer in answers]
    found = {
        "requests": count,
        "at_once": at_once,
        "answered_200": sum(answer.status == 200 for answer in answers),
        "problems": sorted({answer.problem for answer in answers if answer.problem}),
        "different_answers": len(set(texts)),
        "seconds": round(seconds, 2),
        "latency_seconds": {
            "median": round(statistics.median(took), 3),
            "p95": round(took[int(0.95 * (count - 1))], 3),
            "max": round(took[-1], 3),
        },
        "counters_grew_by": {name: metric(server, name) - before[name] for name in names},
    }
    if arguments.expect:
        found["answers_with_expected"] = sum(arguments.expect in text for text in texts)
    return found


def usage_files(made: dict[str, Any]) -> list[str]:
    """vLLM writes usage_stats.json before it sends it, whenever statistics are on (vllm/usage/usage_lib.py)."""
    folders = (cache_of(made), Path.home() / ".config" / "vllm")
    return [path for folder in folders for path in map(str, folder.rglob("usage_stats.json"))]


def serve(made: dict[str, Any], arguments: argparse.Namespace) -> int:
    arguments.results.mkdir(parents=True, exist_ok=True)
    result = Result(arguments.results)
    spec = importlib.util.spec_from_file_location("probe", ROOT / "plugins/module_utils/probe.py")
    assert spec and spec.loader
    probe = importlib.util.module_from_spec(spec)
    sys.modules["probe"] = probe
    spec.loader.exec_module(probe)
    digests = {name: hashlib.sha256(content.encode()).hexdigest() for name, content in made["files"].items()}
    result.put(
        "generation", {"instance": made["instance"], "id": made["id"], "release": made["release"], "sha256": digests}
    )
    result.put("machine", machine())
    key = secrets.token_hex(32)
    environment = place(made, arguments.user, key)
    for name in arguments.pass_environment:
        if name in os.environ:
            environment[name] = os.environ[name]
    shown = {name: value for name, value in environment.items() if name != "VLLM_API_KEY"}
    result.put(
        "environment",
        {
            "user": arguments.user,
            "variables": shown,
            "added_by_hand": [n for n in arguments.pass_environment if n in os.environ],
        },
    )
    server = Server(made, environment, arguments.user)
    try:
        evidence(result, probe, server, key, arguments)
    except (NotShown, OSError, KeyError, subprocess.SubprocessError) as error:
        result.put("failed", f"{type(error).__name__}: {error}")
        if server.process is not None:
            result.put("stop_after_failure", server.stop())
        return 1
    return 0


def evidence(result: Result, probe: Any, server: Server, key: str, arguments: argparse.Namespace) -> None:
    made = server.made
    answer = server.beside([server.python, "-B", "-c", FACTS])
    try:
        facts = json.loads(answer.stdout.splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise NotShown(f"the release does not say what it is: {answer.stdout[-2000:]}") from error
    result.put("release", facts)
    if facts["has_flashinfer"] and arguments.refuse_flashinfer:
        raise NotShown("FlashInfer works here, and --refuse-flashinfer was given")
    parsed = server.beside([server.python, "-B", "-c", made["parse"], f"{made['path']}/config.yaml"])
    result.put("parser", {"exit_status": parsed.returncode, "last_lines": parsed.stdout.splitlines()[-3:]})
    if parsed.returncode:
        raise NotShown("the release's parser refuses the configuration")
    for number in range(1, arguments.starts + 1):
        start = server.start(arguments.results / f"server-{number}.log", arguments.patience)
        assert server.process is not None
        start["processes"] = sorted(descendants(server.process.pid).values())
        result.put(f"start {number}", start)
        result.put(f"keys {number}", keys_refused(probe, server, key))
        result.put(f"question {number}", question_answered(probe, server, key, arguments))
        if number == 1:
            result.put("requests", many(probe, server, key, arguments))
        result.put(f"stop {number}", server.stop())
        assert server.watch is not None
        watched = {"looks": server.watch.looks, "remote_addresses": sorted(server.watch.remote)}
        result.put(f"network {number}", {**watched, "usage_files": usage_files(made)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("render", help="on the controller: from an inventory to what a host runs with")
    for name in ("inventory", "lock", "into"):
        verb.add_argument(name, type=Path)
    verb = verbs.add_parser("serve", help="on the machine: start it, ask it, stop it")
    verb.add_argument("made", type=Path, help="what render wrote")
    verb.add_argument("results", type=Path)
    verb.add_argument("--user", default="vllm")
    verb.add_argument("--question", default="What is the capital of France?")
    verb.add_argument("--expect", default="", help="a word that the answer should have; it is recorded, not demanded")
    verb.add_argument("--requests", type=int, default=100)
    verb.add_argument("--at-once", type=int, default=10)
    verb.add_argument("--starts", type=int, default=2, help="the second start has warm compile caches")
    verb.add_argument("--patience", type=float, default=300, help="seconds that a start may take")
    verb.add_argument(
        "--pass-environment",
        action="append",
        default=[],
        metavar="NAME",
        help="a variable of this shell that the server gets, too",
    )
    verb.add_argument("--refuse-flashinfer", action="store_true", help="start nothing where vLLM would use FlashInfer")
    arguments = parser.parse_args()
    if arguments.verb == "render":
        render(arguments.inventory, arguments.lock, arguments.into)
        return 0
    if not shutil.which("nvidia-smi"):
        parser.error("there is no nvidia-smi on this machine")
    made = json.loads(arguments.made.read_text(encoding="utf-8"))
    if os.path.lexists(Path(made["path"]).parents[1] / "current"):
        parser.error(f"{made['instance']} is deployed on this machine; give the service of the inventory another name")
    return serve(made, arguments)


if __name__ == "__main__":
    sys.exit(main())
