"""The agent that watches one rank of a replica: sees, has agent_rules.Judge decide, does, and answers who may ask.

It runs on each host as vllm-agent@INSTANCE.service, from a copy of this file and its neighbours, under the host's own
python3: it has to work when a release does not, and outlives all of them. Standard library only, Python 3.9.

    python3 -I -B FOLDER CONFIG.json       FOLDER holds __main__.py and the package gpu_fleet_agent

What it answers, on GET alone, to the addresses that its configuration allows, and this host's own:
    /          the state of the rank as JSON
    /ready     200 when the last probe was right, else 503: for a gateway's health check, on the head
    /metrics   the same in numbers, for Prometheus
There is no request that changes anything, and nothing secret in an answer. Slow, broken or many clients find a bounded
number of threads, bytes and seconds. It needs root for systemctl and for the key, and no capability: systemd's private
socket and the file ask for the user alone.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import traceback
import uuid
from typing import Any, Dict, List, Mapping, Optional, Tuple

from . import agent_gpu, api_tls, probe
from . import agent_rules as rules

Connection = socket.socket  # by a name that no method of the server below has

TICK = 1.0  # seconds between two looks
PEER_DEADLINE, PEER_BYTES = 3.0, 64 << 10
METRIC_BYTES = 8 << 20
SYSTEMCTL_SECONDS = 60.0
# Seconds between two looks at what the kernel says of the GPUs: while the rank is there, and while it is not.
GPU_EVERY, GPU_HURRY = 60.0, 5.0
# Of the HTTP server: threads at once, seconds a client gets in all, bytes of a request's head.
CLIENTS, CLIENT_SECONDS, HEAD_BYTES = 16, 5.0, 4096
STALE = 90.0  # seconds after which an agent that sees nothing any more says nothing any more
# What moves while vLLM works for anybody (vllm/v1/metrics/loggers.py; prometheus_client appends _total). Its counters grow with
# tokens that come out; while a long prompt is computed piece by piece none does, and only the use of the KV cache moves
# (update_from_output in vllm/v1/core/sched/scheduler.py gives statistics of each step, with an output or without).
PROGRESS = (
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:request_success_total",
    "vllm:iteration_tokens_total_sum",
    "vllm:kv_cache_usage_perc",
)
# How long the processes of a unit all waited for a processor (kernel's Documentation/accounting/psi.rst, the line `full`), and
# over how many seconds that is looked at.
PRESSURE, PRESSURE_SECONDS = "cpu.pressure", 10.0
PROPERTIES = (
    "ActiveState",
    "SubState",
    "MainPID",
    "InvocationID",
    "UnitFileState",
    "Result",
    "NRestarts",
    "ExecStartPre",
    "ControlGroup",
)
# How systemctl shows a command before the server that ended as the firewall's gate does when it refuses (firewall_gate.REFUSED).
GATED = "; code=exited ; status=75 }"


# -- the unit ------------------------------------------------------------------------------------------------------------


def systemctl(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["systemctl", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        check=False,
        timeout=SYSTEMCTL_SECONDS,
    )


def unit_of(text: str) -> rules.Unit:
    """A unit from what `systemctl show` says of it."""
    said = dict(line.partition("=")[::2] for line in text.splitlines())
    active, sub = said.get("ActiveState", ""), said.get("SubState", "")
    if sub.startswith("auto-restart") or sub.endswith("before-auto-restart"):
        phase = rules.BETWEEN
    elif active in ("active", "reloading"):
        phase = rules.UP
    elif active == "activating":
        phase = rules.UP if int(said.get("MainPID") or 0) else rules.COMING
    elif active == "deactivating":
        phase = rules.ENDING
    else:
        phase = rules.DOWN
    return rules.Unit(
        phase=phase,
        invocation=said.get("InvocationID", ""),
        ready=active == "active",
        enabled=said.get("UnitFileState") not in ("disabled", "masked"),
        auto=int(said.get("NRestarts") or 0) > 0,
        said="" if said.get("Result") == "success" else said.get("Result", ""),
        gated=any(line.startswith("ExecStartPre=") and line.endswith(GATED) for line in text.splitlines()),
    )


def waited(group: str, root: str = "/sys/fs/cgroup") -> Optional[float]:
    """Seconds in all that the processes of a control group all waited for a processor; None where the kernel does not say."""
    try:
        with open(f"{root}{group}/{PRESSURE}", encoding="ascii") as text:
            totals = [line.rpartition("total=")[2] for line in text if line.startswith("full ")]
    except (OSError, ValueError):
        return None
    return int(totals[0]) / 1e6 if totals else None


class Waiting:
    """The share of the last seconds in which the processes of a unit all waited for a processor."""

    def __init__(self) -> None:
        self.group = ""
        self.seen: List[Tuple[float, float]] = []

    def share(self, now: float, group: str) -> float:
        total = waited(group) if group else None
        if group != self.group or total is None or (self.seen and total < self.seen[-1][1]):
            self.group, self.seen = group, []
        if total is None:
            return 0.0
        self.seen.append((now, total))
        while len(self.seen) > 2 and now - self.seen[1][0] >= PRESSURE_SECONDS:
            del self.seen[0]
        began, before = self.seen[0]
        return (total - before) / (now - began) if now - began >= PRESSURE_SECONDS / 2 else 0.0


# -- asking ----------------------------------------------------------------------------------------------------------------


def get(
    where: Tuple[str, int],
    path: str,
    deadline: float,
    most: int,
    key: Optional[str] = None,
    *,
    tls: Optional[ssl.SSLContext] = None,
) -> Tuple[int, bytes]:
    """GET with a deadline for the whole of it and a bound on the answer. OSError or HTTPException when it fails."""
    until = time.monotonic() + deadline
    connection = (
        http.client.HTTPSConnection(where[0], where[1], timeout=deadline, context=tls)
        if tls
        else http.client.HTTPConnection(where[0], where[1], timeout=deadline)
    )
    try:
        headers = {"Connection": "close", **({"Authorization": f"Bearer {key}"} if key else {})}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = b""
        while len(body) <= most:
            left = until - time.monotonic()
            if left <= 0:
                raise socket.timeout("the answer took too long")
            if connection.sock is not None:
                connection.sock.settimeout(left)
            part = answer.read1(65536)
            if not part:
                return answer.status, body
            body += part
        raise ValueError("the answer is too long")
    finally:
        connection.close()


def counters(text: str) -> Optional[float]:
    """The sum of what moves in vLLM with its progress; None where there is none of it."""
    found = [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith(PROGRESS) and line.split("{")[0].split(" ")[0] in PROGRESS
    ]
    return sum(found) if found else None


class Asker(threading.Thread):
    """Asks again and again in a thread of its own. One that breaks ends the agent: systemd starts it anew."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)

    def run(self) -> None:
        try:
            while True:
                time.sleep(self.turn())
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def turn(self) -> float:
        raise NotImplementedError


class PeerAsker(Asker):
    """What another rank's agent says."""

    def __init__(self, instance: str, rank: int, where: Tuple[str, int]) -> None:
        super().__init__(f"rank {rank}")
        self.instance, self.rank, self.where = instance, rank, where
        self.peer = rules.Peer()

    def turn(self) -> float:
        try:
            status, body = get(self.where, "/", PEER_DEADLINE, PEER_BYTES)
            state = peer_state(body, self.instance, self.rank) if status == 200 else None
        except ConnectionRefusedError:
            state = None
            self.peer = dataclasses.replace(self.peer, refused=time.monotonic())
        except (OSError, ValueError, http.client.HTTPException):
            state = None
        if state is not None:
            self.peer = rules.Peer(time.monotonic(), state)
        return TICK


def peer_state(body: bytes, instance: str, rank: int) -> Optional[Dict[str, Any]]:
    """A peer's answer if it is one: of this replica, of this rank, each entry of the type that the rules read."""
    state = json.loads(body)
    if not isinstance(state, dict) or (state.get("instance"), state.get("rank")) != (instance, rank):
        return None
    wanted = {"invocation": str, "phase": str, "mates": dict, "left": str, "blocked": str, "answered": str, "hand": int}
    return state if all(isinstance(state.get(name), kind) for name, kind in wanted.items()) else None


class ApiAsker(Asker):
    """For a worker: whether the head's API is there, which only counts while the head's agent says nothing."""

    def __init__(self, url: str, current: str) -> None:
        super().__init__("api")
        self.url, self.current = url, current
        self.seen: Optional[float] = None

    def turn(self) -> float:
        began = time.monotonic()
        if probe.request(f"{api_tls.url(self.url, self.current)}/health", deadline=PEER_DEADLINE).right:
            self.seen = began
        return 2 * TICK


class Prober(Asker):
    """Where there is an API: an authenticated completion of one token, every few seconds while the unit is active."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__("probe")
        self.config = config
        self.unit = rules.Unit(rules.DOWN, "")
        self.last: Optional[rules.Probe] = None
        self.seconds: Optional[float] = None
        self.failed = threading.Event()  # the agent need not wait for its next second to look at it

    def turn(self) -> float:
        unit, config = self.unit, self.config
        if not (unit.phase == rules.UP and unit.ready):
            return TICK / 2
        # As the server that runs is spoken to, whatever is planned: `current` is what it was started from.
        url = api_tls.url(config["url"], config["current"])
        began = time.monotonic()
        answer = probe.completion(url, read_key(config["secrets"]), config["model"], config["probe_deadline"])
        ended = time.monotonic()
        self.last = rules.Probe(
            invocation=unit.invocation,
            began=began,
            ended=ended,
            right=answer.right,
            answered=0 < answer.status < 500,
            counters=self.progress(),
            problem=answer.problem[:200],
        )
        self.seconds = ended - began
        if not answer.right:
            self.failed.set()
        # From one's begin to the next one's: after a deadline that passed at once, so that a dead server is known within an
        # interval and two deadlines.
        return max(TICK if answer.right else 0.0, config["probe_every"] - (ended - began))

    def progress(self) -> Optional[float]:
        address, port = self.config["api"]
        try:
            context = probe.trusting() if api_tls.of_generation(self.config["current"]) else None
            key = read_key(self.config["secrets"])
            status, body = get((address, port), "/metrics", PEER_DEADLINE, METRIC_BYTES, key, tls=context)
        except (OSError, ValueError, http.client.HTTPException):
            return None
        return counters(body.decode("utf-8", "replace")) if status == 200 else None


class GpuAsker(Asker):
    """Where the rank has GPUs: whether one of them failed for good. Before a restart it has looked since the server ended."""

    def __init__(self, look: agent_gpu.Look) -> None:
        super().__init__("gpus")
        self.look = look
        self.hurry = False
        self.told = ""
        self.looked = float("-inf")
        self.fault: Optional[agent_gpu.Fault] = None
        self.known = False

    def turn(self) -> float:
        now = time.monotonic()
        if now - self.looked >= (GPU_HURRY if self.hurry else GPU_EVERY):
            self.fault, self.known, self.looked = self.look.fault(), True, now
            if self.look.failed and self.look.failed != self.told:
                say(f"the kernel's log cannot be read for errors of GPUs: {self.look.failed}", 4)
            self.told = self.look.failed
        return TICK / 2


def read_key(path: str) -> Optional[str]:
    """The service's key, read each time: a new one is put there when the server takes it."""
    try:
        with open(path, encoding="utf-8") as lines:
            found = [line.rstrip("\n").partition("=")[2] for line in lines if line.startswith("VLLM_API_KEY=")]
    except OSError:
        return None
    return found[0] if found else None


# -- answering ---------------------------------------------------------------------------------------------------------------


class Server(threading.Thread):
    """A small HTTP server that cannot be hurt: few threads, short deadlines, GET of three paths."""

    def __init__(self, listen: Tuple[str, int], allow: List[str]) -> None:
        super().__init__(name="http", daemon=True)
        self.listen = listen
        self.allow = {*allow, listen[0], "127.0.0.1", "::1"}
        self.places = threading.BoundedSemaphore(CLIENTS)
        self.pages: Dict[str, Tuple[int, str, bytes]] = {}
        self.refused = 0
        self.published = float("-inf")

    def publish(self, state: Mapping[str, Any]) -> None:
        """What is answered from now on."""
        right = bool(state["probe"] and state["probe"]["right"] and state["active"])
        self.published = time.monotonic()
        word = b"ready\n" if right else b"not ready\n"
        self.pages = {
            "/": (200, "application/json", json.dumps(state).encode() + b"\n"),
            "/ready": (200 if right else 503, "text/plain", word),
            "/metrics": (200, "text/plain; version=0.0.4", metrics(state, self.refused).encode()),
        }

    def socket(self) -> socket.socket:
        """The listening socket; at boot the address may take a while to come."""
        family = socket.AF_INET6 if ":" in self.listen[0] else socket.AF_INET
        told = False
        while True:
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(self.listen)
                listener.listen(64)
                return listener
            except OSError as error:
                listener.close()
                if not told:
                    say(f"cannot listen on {self.listen[0]} port {self.listen[1]} yet: {error}", 4)
                    told = True
                time.sleep(TICK)

    def run(self) -> None:
        try:
            listener = self.socket()
            while True:
                try:
                    client, address = listener.accept()
                except OSError:  # the client was gone before, or no file is left for now
                    time.sleep(0.05)
                    continue
                name = address[0][7:] if address[0].startswith("::ffff:") else address[0]
                if name not in self.allow or not self.places.acquire(blocking=False):
                    self.refused += 1
                    client.close()
                    continue
                try:
                    threading.Thread(target=self.serve, args=(client,), daemon=True).start()
                except RuntimeError:  # no thread to be had
                    self.places.release()
                    client.close()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def serve(self, client: Connection) -> None:
        try:
            status, kind, body = self.answer(self.head(client, time.monotonic() + CLIENT_SECONDS))
            reason = http.client.responses.get(status, "")
            head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            client.settimeout(CLIENT_SECONDS)
            client.sendall(head.encode() + body)
            client.shutdown(socket.SHUT_WR)
        except (OSError, ValueError):
            pass  # a client that is slow, broken or gone is its own affair
        finally:
            client.close()
            self.places.release()

    @staticmethod
    def head(client: Connection, until: float) -> bytes:
        head = b""
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            left = until - time.monotonic()
            if left <= 0 or len(head) > HEAD_BYTES:
                raise ValueError("no request")
            client.settimeout(left)
            part = client.recv(HEAD_BYTES)
            if not part:
                raise ValueError("no request")
            head += part
        return head

    def answer(self, head: bytes) -> Tuple[int, str, bytes]:
        words = head.split(b"\r\n")[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/"):
            return 400, "text/plain", b"no HTTP request\n"
        if words[0] != b"GET":
            return 405, "text/plain", b"GET alone\n"
        path = words[1].split(b"?")[0].decode("ascii", "replace")
        if path in ("/", "/ready", "/metrics") and time.monotonic() - self.published > STALE:
            return 503, "text/plain", b"it has nothing new to say\n"
        return self.pages.get(path, (404, "text/plain", b"/, /ready and /metrics are there\n"))


METRICS = {
    "gpu_fleet_rank_running": "Whether this host's rank has a process.",
    "gpu_fleet_rank_held": "Whether the agent keeps its rank stopped until it can start together with the others.",
    "gpu_fleet_rank_stopped": "Whether somebody else stopped the rank.",
    "gpu_fleet_restarts_total": "Starts by the agent or by systemd, counted since the host came up.",
    "gpu_fleet_restarts_without_answer": "Starts since the last right completion, or since a pause as long as the window.",
    "gpu_fleet_limit_reached": "Whether the limit of starts without a right completion is reached: nothing starts any more.",
    "gpu_fleet_probe_right": "Whether the last probe, a completion of one token, was right. Where the rank has an API.",
    "gpu_fleet_probe_seconds": "How long the last probe took. Where the rank has an API.",
    "gpu_fleet_peers_reachable": "Other ranks whose agents answer this one.",
    "gpu_fleet_agent_refused_total": "Connections from addresses that may not ask, or beyond what is served at once.",
}


def metrics(state: Mapping[str, Any], refused: int) -> str:
    """The state for Prometheus (text format 0.0.4). Every name is in METRICS."""
    last = state["probe"]
    values: Dict[str, Optional[float]] = {
        "gpu_fleet_rank_running": state["phase"] == rules.UP,
        "gpu_fleet_rank_held": bool(state["held"]),
        "gpu_fleet_rank_stopped": state["phase"] == rules.DOWN and not state["held"],
        "gpu_fleet_restarts_total": state["restarts"],
        "gpu_fleet_restarts_without_answer": state["restarts_without_answer"],
        "gpu_fleet_limit_reached": state["limit_reached"],
        "gpu_fleet_probe_right": last["right"] if last else (0 if state["answers"] else None),
        "gpu_fleet_probe_seconds": last["seconds"] if last else None,
        "gpu_fleet_peers_reachable": sum(
            1 for seconds in state["peers"].values() if seconds is not None and seconds < 6
        ),
        "gpu_fleet_agent_refused_total": refused,
    }
    lines = []
    for name, value in values.items():
        if value is None:
            continue
        kind = "counter" if name.endswith("_total") else "gauge"
        label = f'{{instance="{state["instance"]}",service="{state["service"]}",rank="{state["rank"]}"}}'
        lines += [f"# HELP {name} {METRICS[name]}", f"# TYPE {name} {kind}", f"{name}{label} {float(value):g}"]
    return "\n".join(lines) + "\n"


# -- the agent ----------------------------------------------------------------------------------------------------------------


def say(line: str, level: int = 5) -> None:
    """One line in the journal (sd-daemon(3): the number is its level)."""
    print(f"<{level}>{line}", flush=True)


def write(path: str, content: str) -> None:
    with open(f"{path}.new", "w", encoding="utf-8") as out:
        out.write(content)
    os.replace(f"{path}.new", path)


def room_at(path: str) -> Optional[int]:
    """Bytes free for others than root where a folder is, or will be; 0 when no inode is left."""
    while path and not os.path.isdir(path):
        path = os.path.dirname(path)
    try:
        found = os.statvfs(path or "/")
    except OSError:
        return None
    return 0 if found.f_files and not found.f_favail else found.f_bavail * found.f_frsize


def paused(path: str, now: float) -> bool:
    """Whether a play works on the instance: it leaves a file that says until when (monotonic seconds)."""
    try:
        with open(path, encoding="utf-8") as text:
            return float(json.load(text)["until"]) > now
    except (OSError, ValueError, KeyError, TypeError):
        return False


class Agent:
    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.unit_name = f"vllm@{config['instance']}.service"
        self.memory_path = os.path.join(config["runtime"], "state.json")
        self.judge = rules.Judge(rules.Settings(**config["settings"]), self.remembered())
        self.kept = ""
        rank = config["settings"]["rank"]
        self.peers = {
            int(name): PeerAsker(config["instance"], int(name), (where[0], where[1]))
            for name, where in config["peers"].items()
        }
        self.prober = Prober(config) if config["answers"] else None
        self.api = ApiAsker(config["head_url"], config["current"]) if rank else None
        gpus = config.get("gpus")
        kept = os.path.join(config["runtime"], "gpus")
        self.gpus = GpuAsker(agent_gpu.Look(gpus, config["xid_out"], kept)) if gpus else None
        self.began: Optional[float] = None  # the turn before this one; None when it did something, which takes its time
        self.group, self.waiting = "", Waiting()
        self.server = Server((config["listen"][0], config["listen"][1]), config["allow"])

    def remembered(self) -> rules.Memory:
        """What the agent before this one left, unless the host came up since. A new memory has a name of its own."""
        try:
            with open(self.memory_path, encoding="utf-8") as text:
                return rules.Memory.load(json.load(text))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError) as error:
            say(f"{self.memory_path} cannot be read, begun anew: {error}", 4)
        return rules.Memory(boot=uuid.uuid4().hex)

    def unit(self) -> rules.Unit:
        said = systemctl("show", self.unit_name, "--property=" + ",".join(PROPERTIES)).stdout
        self.group = next((line[13:] for line in said.splitlines() if line.startswith("ControlGroup=")), "")
        return unit_of(said)

    def run(self) -> None:
        for asker in [*self.peers.values(), *filter(None, (self.prober, self.api, self.gpus)), self.server]:
            asker.start()
        while True:
            self.turn()
            if self.prober is None:
                time.sleep(TICK)
            elif self.prober.failed.wait(TICK):
                self.prober.failed.clear()

    def turn(self) -> None:
        world = self.world()
        self.began = world.now
        if self.prober:
            self.prober.unit = world.unit
        if self.gpus:
            self.gpus.hurry = not world.unit.ready
        action = self.judge.step(world)
        self.keep()  # before it is done: an agent that dies in between must know that it was itself
        self.speak()
        if action.kind != "none":
            self.do(action)
            self.began = None
            unit = self.unit()
            self.judge.acted(unit)
            self.keep()
            world = self.world()
        self.server.publish(self.state(world))

    def world(self) -> rules.World:
        now = time.monotonic()
        late = max(0.0, now - self.began - TICK) if self.began is not None else 0.0
        unit = self.unit()
        gpus = self.gpus if self.gpus and self.gpus.known else None
        fault = gpus.fault if gpus else None
        return rules.World(
            now=now,
            unit=unit,
            peers={rank: asker.peer for rank, asker in self.peers.items()},
            probe=self.prober.last if self.prober else None,
            room=room_at(self.config["cache"]),
            paused=paused(os.path.join(self.config["runtime"], "paused"), now),
            api_seen=self.api.seen if self.api else None,
            late=late,
            waiting=self.waiting.share(now, self.group),
            gpu=(fault.reason if fault else "") if gpus else None,
            gpu_mark=fault.mark if fault else "",
        )

    def do(self, action: rules.Action) -> None:
        if action.kind == "start":
            said = systemctl("start", "--no-block", self.unit_name)
            say(f"{self.config['instance']} rank {self.judge.s.rank}: started, after: {action.reason}")
        elif action.kind == "stop":
            said = systemctl("stop", self.unit_name)
        else:
            # The stop first, so that systemd does not start it again; then its end, without a drain.
            systemctl("stop", "--no-block", self.unit_name)
            systemctl("kill", "--signal=SIGKILL", self.unit_name)
            said = systemctl("stop", self.unit_name)
        if said.returncode:
            say(f"systemctl {action.kind}: {said.stderr.strip()}", 3)

    def keep(self) -> None:
        content = json.dumps(self.judge.m.dump(), sort_keys=True)
        if content != self.kept:
            write(self.memory_path, content)
            self.kept = content

    def speak(self) -> None:
        for line in self.judge.lines:
            say(
                f"{self.config['instance']} rank {self.judge.s.rank}: {line}",
                3 if line.startswith(("LIMIT", "OUT")) else 5,
            )
        self.judge.lines.clear()

    def state(self, world: rules.World) -> Dict[str, Any]:
        """What is answered: what peers need, and what an operator wants to see."""
        hold, last = self.judge.m.hold, self.prober.last if self.prober else None
        if last and last.invocation != world.unit.invocation:
            last = None
        return {
            "format": 1,
            "instance": self.config["instance"],
            "service": self.config["service"],
            "ranks": self.judge.s.ranks,
            **self.judge.told(world),
            "answers": self.prober is not None,
            "unit": self.unit_name,
            "active": world.unit.ready,
            "held": {"kind": hold.kind, "reason": hold.reason, "seconds": round(world.now - hold.since)}
            if hold
            else None,
            "probe": {
                "right": last.right,
                "seconds": round(last.ended - last.began, 3),
                "ago": round(world.now - last.ended, 1),
                "problem": last.problem,
            }
            if last
            else None,
            "peers": {
                str(rank): None if peer.seen is None else round(world.now - peer.seen, 1)
                for rank, peer in world.peers.items()
            },
            "last_story": self.judge.m.last_story,
        }


def main(arguments: List[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # nothing to finish: the memory is on the disk already
    with open(arguments[0], encoding="utf-8") as text:
        config = json.load(text)
    try:
        Agent(config).run()
    except subprocess.TimeoutExpired as error:
        say(f"systemd did not answer: {error}", 3)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
