"""An upgrade, a rollback and a change of key of a service with two replicas of the real vLLM under constant load: no request may fail.

    scripts/test long upgrade [--keep] [--record]

The CPU build of vLLM serves SmolLM2 on two lab hosts, a gateway stands before them on a third and speaks TLS to them. CLIENTS connections ask without a
pause, every second one for a stream, while playbooks/upgrade.yml goes from one release to the next and playbooks/rollback.yml back.
The collection offers one release for CPUs; for the other one the playbooks run from a copy whose table and locks have it besides
(tests/long/releases). --record writes docs/validation/DATE-upgrade-under-load.md, --keep leaves the lab up.
Needs root and a quiet machine; half an hour for each of the two tests.
"""

from __future__ import annotations

import datetime
import http.client
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "host")]

from faults import Door, connect, send  # noqa: E402
from gpu_fleet import demo  # noqa: E402
from gpu_fleet.steps import LAB, LOGS, Runner, Step  # noqa: E402

NAME = "upgrade"
FOLDER = ROOT / ".cache" / NAME
COPY = FOLDER / "collection"
RELEASES = ROOT / "tests" / "long" / "releases"
OLD, NEW = "0.31.0", "0.32.0"
HOSTS, GATEWAY = ("gpu-01", "gpu-02"), "gw-01"
CLIENT = "upgrade-upgrade-upgrade-upgrade-client"
SERVICE_KEY, NEXT_KEY = "upgrade-upgrade-upgrade-upgrade-chat", "changed-changed-changed-changed-changed"
BOTH = ["chat.0", "chat.1"]
CLIENTS, TOKENS, STREAM_TOKENS = 32, 8, 24
STEADY = 60.0  # seconds of load before, between and after the two changes
PATIENCE = 120.0  # seconds without a byte after which a request has failed


# -- the load ---------------------------------------------------------------------------------------------------------------


@dataclass
class Asked:
    """One request: when it was sent and ended (monotonic), when its first event came, the longest pause between two events."""

    stream: bool
    at: float
    first: float = 0.0
    ended: float = 0.0
    pause: float = 0.0
    failure: str = ""


class Clients:
    """So many connections, each of which asks again as soon as it has its answer. One that failed asks on a new connection."""

    def __init__(self, door: Door, count: int) -> None:
        self.door, self.asked, self.over = door, [], threading.Event()
        self.threads = [threading.Thread(target=self._run, args=(n % 2 == 1,), daemon=True) for n in range(count)]

    def start(self) -> Clients:
        for thread in self.threads:
            thread.start()
        return self

    def stop(self) -> None:
        """Each has its last answer."""
        self.over.set()
        for thread in self.threads:
            thread.join()

    def _run(self, stream: bool) -> None:
        link = None
        while not self.over.is_set():
            link = link or connect(self.door.url, PATIENCE, self.door.ca)
            asked = Asked(stream, time.monotonic())
            asked.failure = self._ask(link, asked)
            asked.ended = time.monotonic()
            self.asked.append(asked)
            if asked.failure:
                link.close()
                link = None
                time.sleep(0.2)
        if link:
            link.close()

    def _ask(self, link: http.client.HTTPConnection, asked: Asked) -> str:
        """How it failed, or ''."""
        try:
            reply = send(link, self.door.key, STREAM_TOKENS if asked.stream else TOKENS, stream=asked.stream)
            if reply.status != 200:
                content = reply.read()
                with suppress(ValueError, LookupError):
                    return f"status {reply.status} {json.loads(content)['error']['code']}"
                return f"status {reply.status}"
            if asked.stream:
                return self._stream(reply, asked)
            told = json.loads(reply.read())
            return "" if told["usage"]["completion_tokens"] == TOKENS else "too short"
        except TimeoutError:
            return "no end"
        except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
            return f"cut ({type(error).__name__})"

    def _stream(self, reply: http.client.HTTPResponse, asked: Asked) -> str:
        last, before = b"", 0.0
        while line := reply.readline():
            if line.startswith(b'data: {"error"'):
                return "error in the stream"
            if not line.strip():
                continue
            last, now = line.strip(), time.monotonic()
            asked.first = asked.first or now
            asked.pause = max(asked.pause, now - before if before else 0.0)
            before = now
        return "" if last == b"data: [DONE]" else "cut (in the stream)"


@dataclass
class Phase:
    """What the clients met in a stretch of time."""

    name: str
    began: float
    ended: float
    asked: list[Asked]

    @property
    def failures(self) -> Counter[str]:
        return Counter(one.failure for one in self.asked if one.failure)

    @property
    def gap(self) -> float:
        """The longest time in which no right answer ended."""
        right = sorted(one.ended for one in self.asked if not one.failure and self.began <= one.ended <= self.ended)
        return max(after - before for before, after in itertools.pairwise([self.began, *right, self.ended]))

    def share(self, which: str, percent: int) -> float:
        """Of right answers: seconds of a whole answer, to a stream's first event, or its longest pause."""
        values = {
            "answer": [one.ended - one.at for one in self.asked if not one.failure and not one.stream],
            "first": [one.first - one.at for one in self.asked if not one.failure and one.stream],
            "pause": [one.pause for one in self.asked if not one.failure and one.stream],
        }[which]
        return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else 0.0

    def row(self) -> str:
        longest = max((one.pause for one in self.asked if not one.failure), default=0.0)
        told = [
            self.name,
            f"{self.ended - self.began:.0f}",
            str(len(self.asked)),
            ", ".join(f"{count} {how}" for how, count in self.failures.items()) or "0",
            f"{self.gap:.1f}",
            *(f"{self.share('answer', percent):.2f}" for percent in (50, 99)),
            *(f"{self.share('first', percent):.2f}" for percent in (50, 99)),
            f"{longest:.1f}",
        ]
        return f"| {' | '.join(told)} |"


HEAD = (
    "| while | seconds | requests | failed | longest time without a right answer, s | answer p50, s | p99 | a stream's first event "
    "p50, s | p99 | longest pause in a stream, s |\n|---|---|---|---|---|---|---|---|---|---|"
)


# -- the fleet ----------------------------------------------------------------------------------------------------------------


def copy_collection() -> None:
    """The tracked files, with one release more in the table and in locks/."""
    shutil.rmtree(COPY, ignore_errors=True)
    COPY.mkdir(parents=True)
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    packed = subprocess.run(
        ["tar", "--create", "--null", "--files-from=-"], cwd=ROOT, input=names, capture_output=True, check=True
    )
    subprocess.run(["tar", "--extract"], cwd=COPY, input=packed.stdout, check=True)
    table = COPY / "data" / "versions.yml"
    known = yaml.safe_load(table.read_text(encoding="utf-8"))
    known["known"].pop(OLD, None)
    known["releases"] |= yaml.safe_load((RELEASES / "releases.yml").read_text(encoding="utf-8"))
    table.write_text(yaml.safe_dump(known, sort_keys=False), encoding="utf-8")
    for lock in RELEASES.glob("*.lock"):
        shutil.copy(lock, COPY / "locks")


def write_inventory(folder: Path) -> None:
    """The demo's variables, with two replicas of one host each, the older release and a gateway."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "group_vars").mkdir(parents=True)
    settings = yaml.safe_load((demo.INVENTORY / "group_vars" / "gpu_hosts.yml").read_text(encoding="utf-8"))
    (service,) = settings["vllm_services"]
    service = {name: value for name, value in service.items() if name not in ("clients", "hosts_per_replica")}
    service["args"] |= {"max-num-seqs": CLIENTS}  # one replica takes all of the load while the other is away
    settings |= {
        "vllm_runtime_version": OLD,
        "vllm_service_allow_outage": False,
        "vllm_service_tls": None,  # planned: the gateway is another host
        "vllm_services": [service],
        "vllm_service_api_keys": {"chat": SERVICE_KEY},
    }
    groups = {"gpu_hosts": {"hosts": dict.fromkeys(HOSTS)}, "gateways": {"hosts": {GATEWAY: None}}}
    gateways = {"gateway_keys": [{"name": "load", "key": CLIENT}]}
    for name, content in (
        ("hosts.yml", {"all": {"children": groups}}),
        ("group_vars/gpu_hosts.yml", settings),
        ("group_vars/gateways.yml", gateways),
    ):
        (folder / name).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


class Fleet:
    def __init__(self) -> None:
        self.runner = Runner(LOGS / NAME)
        demo.prepare(wheels := demo.Fleet(self.runner))
        for lock in RELEASES.glob("*.lock"):
            fetch = [sys.executable, "-m", "gpu_fleet.wheelhouse", "fetch", str(lock), "--into", str(wheels.wheels)]
            demo.need(self.runner.run(f"wheels of {lock.name}", fetch))
        copy_collection()
        write_inventory(FOLDER / "inventory")
        self.demo = demo.Fleet(self.runner, NAME, FOLDER / "inventory", (*HOSTS, GATEWAY), wheels.model)
        demo.boot(self.demo)
        demo.need(self.play("site.yml"))

    def play(self, playbook: str, *arguments: str) -> Step:
        """A playbook of the copy."""
        return self.runner.run(
            playbook.replace("/", " "),
            ["ansible-playbook", "-i", str(self.demo.inventory), str(COPY / playbook), *arguments],
            timeout=2400,
            extra={"ANSIBLE_CONFIG": str(COPY / "ansible.cfg")},
        )

    @property
    def door(self) -> Door:
        ca = self.demo.inventory / ".secrets" / "gateway" / "ca.pem"
        return Door(f"https://{self.demo.address(GATEWAY)}:443", CLIENT, str(ca))

    def on(self, host: str, script: str) -> str:
        done = subprocess.run(
            [sys.executable, str(LAB), "exec", NAME, host, "--", "sh", "-c", script],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{host}: {script}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def asked(self, path: str, key: str = "") -> list[tuple[int, str]]:
        """What each server answers to its own host, by TLS: the firewall lets nobody else in but the gateway."""
        told = []
        for host in HOSTS:
            ask = (
                "import http.client as c, ssl; t = ssl.create_default_context(cafile='/etc/gpu_fleet/vllm/ca.pem'); "
                f"l = c.HTTPSConnection('{self.demo.address(host)}', {demo.PORT}, timeout=30, context=t); "
                f"l.request('GET', '{path}', headers={{'Authorization': 'Bearer {key}'}}); a = l.getresponse(); "
                "print(a.status, a.read().decode())"
            )
            status, _, content = self.on(host, f'python3 -c "{ask}"').partition(" ")
            told.append((int(status), content))
        return told

    def versions(self) -> list[str]:
        """What each server says that it is."""
        return [json.loads(content)["version"] for _, content in self.asked("/version")]

    def takes(self, key: str) -> list[int]:
        """What each server answers to a key."""
        return [status for status, _ in self.asked("/v1/models", key)]

    def admitted(self) -> list[str]:
        """Replicas that are UP, by HAProxy's `show stat`: after proxy and server, the 18th column is the status."""
        ask = (
            "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/run/gpu-fleet-gateway/admin.sock'); "
            "s.sendall(b'show stat\\n'); print(s.makefile().read())"
        )
        rows = [line.split(",") for line in self.on(GATEWAY, f'python3 -c "{ask}"').splitlines() if "," in line]
        return sorted(row[1] for row in rows if row[1].startswith("chat.") and row[17] == "UP")


@pytest.fixture(scope="module")
def fleet(request):
    try:
        yield Fleet()
    finally:
        if not request.config.getoption("--keep"):
            subprocess.run([sys.executable, str(LAB), "down", NAME], check=True)


def rest() -> bool:
    time.sleep(STEADY)
    return True


def under_load(fleet: Fleet, acts: dict[str, Callable[[], bool]], look: Callable[[], object]) -> tuple[str, dict]:
    """Do one after the other while clients ask; the table, and what there was to see after each. No request may fail, nor any act."""
    end = time.monotonic() + 60
    while fleet.admitted() != BOTH:
        assert time.monotonic() < end, "the gateway does not let both replicas have requests"
        time.sleep(1)
    marks, seen = [], {}
    clients = Clients(fleet.door, CLIENTS).start()
    try:
        for name, act in acts.items():
            began = time.monotonic()
            marks.append((name, act(), began, time.monotonic()))
            seen[name] = look()
    finally:
        clients.stop()
    phases = [
        Phase(name, began, ended, [one for one in clients.asked if began <= one.at < ended])
        for name, _, began, ended in marks
    ]
    table = "\n".join([HEAD, *(phase.row() for phase in phases)])
    print(f"\n{table}\n{seen}")
    assert all(ok for _, ok, *_ in marks), marks
    assert all(len(phase.asked) > CLIENTS for phase in phases), "the load was none"
    assert not [one.failure for one in clients.asked if one.failure], table
    return table, seen


def test_no_request_fails_while_the_release_changes_and_changes_back(fleet, request):
    acts = {
        "before": rest,
        f"upgrade to {NEW}": lambda: fleet.play("playbooks/upgrade.yml", "-e", f"vllm_runtime_version={NEW}").ok,
        "between": rest,
        f"rollback to {OLD}": lambda: fleet.play("playbooks/rollback.yml").ok,
        "after": rest,
    }
    table, seen = under_load(fleet, acts, lambda: (fleet.versions(), fleet.admitted()))
    for name, version in (("before", OLD), ("between", NEW), ("after", OLD)):
        versions, admitted = seen[name]
        assert [told.partition("+")[0] for told in versions] == [version] * 2 and admitted == BOTH, seen
    if request.config.getoption("--record"):
        document(table)


def test_no_request_fails_while_the_key_of_the_service_changes(fleet):
    """In two runs, between which servers take both."""
    both = {"vllm_service_api_keys": {"chat": NEXT_KEY}, "vllm_service_former_keys": {"chat": SERVICE_KEY}}
    acts = {
        "before": rest,
        "both keys": lambda: fleet.play("site.yml", "-e", json.dumps(both)).ok,
        "between": rest,
        "the new one alone": lambda: (
            fleet.play("site.yml", "-e", json.dumps({"vllm_service_api_keys": {"chat": NEXT_KEY}})).ok
        ),
        "after": rest,
    }
    _, seen = under_load(fleet, acts, lambda: [fleet.takes(key) for key in (SERVICE_KEY, NEXT_KEY, "x" * 40)])
    assert seen["before"] == [[200, 200], [401, 401], [401, 401]]
    assert seen["between"] == [[200, 200], [200, 200], [401, 401]]
    assert seen["after"] == [[401, 401], [200, 200], [401, 401]]


def document(table: str) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    path = ROOT / "docs" / "validation" / f"{datetime.date.today()}-upgrade-under-load.md"
    path.write_text(
        f"# An upgrade and a rollback under constant load, {datetime.date.today()}\n\n"
        f"Made by `scripts/test long upgrade --record` on commit {commit}: SmolLM2-135M by the CPU build of vLLM, two replicas on two "
        f"lab hosts, the gateway on a third, which speaks TLS to them, all on the same two cores. {CLIENTS} connections ask without a pause, every second one "
        f"for a stream of {STREAM_TOKENS} tokens, the others for {TOKENS}; one that has its answer asks again at once. Upgrade from "
        f"{OLD} to {NEW} by playbooks/upgrade.yml and back by playbooks/rollback.yml, with `max-num-seqs: {CLIENTS}`. Times are "
        "those of a machine that is full; what is asked is that no request fails.\n\n" + table + "\n",
        encoding="utf-8",
    )
