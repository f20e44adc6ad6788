"""A fleet's life, on real hosts: the controller is killed, hosts come, die and are replaced, services are renamed and moved.

A light load goes through the gateway all the while, and what fails of it is counted. The tests run in order, each with what the
one before left.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import testinfra
import yaml

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "molecule" / "shared" / "lab.py"
sys.path[:0] = [str(LAB.parent), str(ROOT / "tests" / "replay"), str(ROOT / "collections"), str(ROOT / "scripts")]

import hosts as recorded  # noqa: E402
from faults import Door, Sent, connect, send  # noqa: E402
from gpufleet_lab import cgroups  # noqa: E402
from gpufleet_lab import hosts as lab_hosts  # noqa: E402
from gpufleet_lab.labs import find  # noqa: E402

EPHEMERAL = Path(os.environ["MOLECULE_INVENTORY_FILE"]).parents[1]
INVENTORY = EPHEMERAL / "inventory"
HOSTS = ("gpu-01", "gpu-02", "gpu-03", "gw-01")
NAME = "test-life"
RELEASES = "/opt/vllm/releases"
UPGRADE = "playbooks/upgrade.yml"
ADDRESSES = {
    name: values["ansible_host"] for name, values in yaml.safe_load((INVENTORY / "lab.yml").read_text())["all"]["hosts"].items()
}  # fmt: skip
DOOR = Door(
    f"https://{ADDRESSES['gw-01']}:8443", "client-all-client-all-client-all", str(EPHEMERAL / "secrets" / "ca.pem")
)
CHAT = {"name": "chat", "model": "/srv/models/none"}


# -- playbooks ----------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One run of a playbook: exit status and what it printed."""

    status: int
    said: str

    def changed(self) -> int:
        return sum(int(word.split("=")[1]) for word in self.said.split() if word.startswith("changed="))


def command(playbook: str, options: tuple[str, ...], variables: dict) -> dict:
    """How subprocess runs a playbook."""
    program = f"{Path(sys.executable).parent}/ansible-playbook"
    told = {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections")}
    return {
        "args": [program, str(ROOT / playbook), "-i", str(INVENTORY), "-e", json.dumps(variables), *options],
        "env": {**os.environ, **told},
        "cwd": ROOT,
    }


def play(*options, playbook="playbooks/site.yml", **variables) -> Run:
    done = subprocess.run(**command(playbook, options, variables), capture_output=True, text=True, check=False)
    return Run(done.returncode, " ".join((done.stdout + done.stderr).split()))


def verify(*options, **variables) -> Run:
    return play("--check", "--diff", *options, playbook="playbooks/verify.yml", **variables)


@dataclass
class Killed:
    """A run whose controller was killed: whether it still ran then, and what it had printed."""

    alive: bool
    said: str


def killed_when(host, condition: str, folder: Path, *options, playbook=UPGRADE, **variables) -> Killed:
    """Start a playbook; as soon as a condition holds on a host, kill all of the controller's processes."""
    with open(folder / "killed.log", "w+", encoding="utf-8") as log:
        run = subprocess.Popen(
            **command(playbook, options, variables), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        seen: list[int] = []
        watch = threading.Thread(
            target=lambda: seen.append(host.run(f"timeout 900 sh -c '{condition}'").rc), daemon=True
        )
        watch.start()
        while watch.is_alive() and run.poll() is None:
            time.sleep(0.01)
        alive = run.poll() is None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        log.seek(0)
        said = " ".join(log.read().split())
    assert seen == [0], f"it did not come so far: {said[-3000:]}"
    return Killed(alive, said)


def release(name: str) -> dict:
    """Variables with which an upgrade goes to one of the two releases."""
    return {"vllm_runtime_version": "0.32.0", "vllm_runtime_lock": f"{os.environ['STANDINS']}/{name}/tiny.lock"}


# -- hosts --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hosts():
    return {name: testinfra.get_host(f"ansible://{name}?ansible_inventory={INVENTORY}") for name in HOSTS}


def power_off(name: str) -> None:
    """As if somebody pulled the plug: nothing of the host runs any more, its disk stays."""
    lab = find(NAME, ROOT)
    os.kill(lab_hosts.supervisor(lab, name), signal.SIGKILL)
    cgroups.kill(f"{lab.names.cgroup}/{name}")


def power_on(name: str, anew: bool = False) -> None:
    """Boot it; anew: with an empty disk and another SSH key."""
    lab = find(NAME, ROOT)
    if anew:
        subprocess.run(["umount", "--lazy", str(lab.folder(name) / "root")], check=True)
        shutil.rmtree(lab.folder(name))
    named = [word for host in lab.hosts for word in ("--host", host)]
    done = subprocess.run([sys.executable, str(LAB), "up", NAME, *named], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"started {name}" in done.stderr, done.stderr


def runs(host, instance: str) -> str:
    """Which release a replica runs: the stand-in's wheels say their name. Empty while it does not run."""
    pid = host.check_output(f"systemctl show vllm@{instance} --property=MainPID --value")
    told = host.run(f"cat $(readlink /proc/{pid}/cwd)/release/lib/python3.11/site-packages/vllm/release")
    return told.stdout.strip() if pid != "0" and told.rc == 0 else ""


def invocation(host, instance: str) -> str:
    return host.check_output(f"systemctl show vllm@{instance} --property=InvocationID --value")


def made(host) -> dict[str, str]:
    """What the collection wrote on a host, by path: digests. Caches and what runs is left out."""
    # A gateway lacks some of these folders, which find ends with 1 for; what is compared is what there is.
    said = host.check_output(
        "find /etc/vllm /etc/gpu_fleet /etc/systemd/system /etc/sysctl.d /etc/security /opt/vllm/agent -xdev -type f "
        "! -name .lock -exec sha256sum {} + 2>/dev/null || true"
    )
    return {line.split(None, 1)[1]: line.split()[0] for line in said.splitlines()}


# What the gateway says of its servers: a loop that ends when the condition on `rows`, server to status, holds.
WATCH = (
    "import socket,time\n"
    "def rows():\n"
    " s=socket.socket(socket.AF_UNIX);s.connect('/run/gpu-fleet-gateway/admin.sock');s.sendall(b'show stat\\n')\n"
    " return {r[1]:r[17] for r in (l.split(',') for l in s.makefile()) if len(r)>17 and '.' in r[1]}\n"
)
LOOK = "print(rows())\n"


def python(program: str) -> str:
    """A shell command without a quote in it."""
    return f'python3 -c "exec(bytes.fromhex(\\"{program.encode().hex()}\\"))"'


def until(condition: str) -> str:
    return python(f"{WATCH}while not ({condition}): time.sleep(0.05)\n")


def at_the_gateway(hosts) -> dict[str, str]:
    said = hosts["gw-01"].check_output(python(WATCH + LOOK))
    return json.loads(said.replace("'", '"'))


def wait(so, otherwise, seconds=60.0):
    end = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < end, otherwise
        time.sleep(0.5)


def all_up(hosts, *instances: str) -> None:
    wait(lambda: at_the_gateway(hosts) == dict.fromkeys(instances, "UP"), f"not {instances}: {at_the_gateway(hosts)}")


# -- requests -----------------------------------------------------------------------------------------------------------------


def fails(model: str, tokens: int, deadline: float = 90) -> str:
    """How a completion through the gateway failed, '' when it did not. The stand-in takes a second a token beyond the first."""
    try:
        with contextlib.closing(connect(DOOR.url, deadline, DOOR.ca)) as link:
            reply = send(link, DOOR.key, tokens, model=model)
            content = reply.read()
            if reply.status != 200:
                return f"status {reply.status}"
            return "" if json.loads(content)["choices"][0]["text"] else "empty"
    except TimeoutError:
        return "no end"
    except (OSError, ValueError, LookupError, http.client.HTTPException):
        return "cut"


class Light:
    """Two requests a second through the gateway, each in a thread of its own and with a second of work, until it is ended."""

    def __init__(self, model: str) -> None:
        self.model, self.sent, self.over = model, [], threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        threads = []
        while not self.over.is_set():
            threads.append(threading.Thread(target=self._one, daemon=True))
            threads[-1].start()
            time.sleep(0.5)
        for thread in threads:
            thread.join()

    def _one(self) -> None:
        sent = Sent(time.monotonic())
        sent.failure = fails(self.model, 2)
        self.sent.append(sent)

    def failed(self) -> list[tuple[float, str]]:
        """When each was sent that failed, in seconds since the first, and how."""
        began = min(sent.at for sent in self.sent)
        return sorted((round(sent.at - began, 1), sent.failure) for sent in self.sent if sent.failure)


@contextlib.contextmanager
def light_of(model: str) -> Iterator[Light]:
    load = Light(model)
    load.thread.start()
    try:
        yield load
    finally:
        load.over.set()
        load.thread.join(120)


@pytest.fixture
def light() -> Iterator[Light]:
    with light_of("chat") as load:
        yield load


def quiet(load: Light) -> list[tuple[float, str]]:
    """End the load; what of it failed. It has to have been there."""
    load.over.set()
    load.thread.join(120)
    assert len(load.sent) > 10
    print(f"{len(load.sent)} requests, failed: {load.failed() or 'none'}")
    return load.failed()


def ask(model: str) -> int:
    with contextlib.closing(connect(DOOR.url, 30, DOOR.ca)) as link:
        reply = send(link, DOOR.key, 1, model=model)
        reply.read()
        return reply.status


class Flight(threading.Thread):
    """A request that takes so many seconds; `failure` says how it failed."""

    def __init__(self, tokens: int) -> None:
        super().__init__(daemon=True)
        self.tokens, self.failure = tokens, "in flight"
        self.start()

    def run(self) -> None:
        self.failure = fails("chat", self.tokens, self.tokens + 300)


# -- the controller is killed ---------------------------------------------------------------------------------------------------

# One upgrade that is killed again and again, each time a little later: the same command goes on where it was.
SWITCHED = "until test $(readlink /etc/vllm/chat.0/current) != {}; do sleep 0.02; done"


def serving(hosts) -> dict[str, str]:
    return {name: runs(hosts[name], f"chat.{number}") for number, name in enumerate(HOSTS[:2])}


def processes(hosts) -> dict[str, str]:
    return {name: invocation(hosts[name], f"chat.{number}") for number, name in enumerate(HOSTS[:2])}


def test_two_replicas_serve(hosts):
    all_up(hosts, "chat.0", "chat.1")
    assert serving(hosts) == {"gpu-01": "first", "gpu-02": "first"}
    assert ask("chat") == 200


def test_killed_while_the_release_is_built(hosts, light, tmp_path):
    before = processes(hosts)
    building = f"until ls -d {RELEASES}/.building-*/* > /dev/null 2>&1; do sleep 0.02; done"
    killed = killed_when(hosts["gpu-01"], building, tmp_path, **release("second"))
    assert killed.alive, killed.said[-2000:]
    assert processes(hosts) == before
    assert at_the_gateway(hosts) == {"chat.0": "UP", "chat.1": "UP"}
    assert quiet(light) == []


def test_killed_while_a_replica_is_drained(hosts, light, tmp_path):
    before = processes(hosts)
    flights = [Flight(100) for _ in range(2)]  # one on each replica
    drained = until("rows().get('chat.0') == 'DRAIN'")
    killed = killed_when(hosts["gw-01"], drained, tmp_path, **release("second"))
    assert killed.alive, killed.said[-2000:]
    assert hosts["gpu-01"].run(f"ls -d {RELEASES}/.building-*").rc != 0, "what the run before left is still there"
    assert processes(hosts) == before
    assert at_the_gateway(hosts) == {"chat.0": "DRAIN", "chat.1": "UP"}
    told = verify()
    assert told.status == 0, told.said[-3000:]
    assert told.said.count("changed: [") == told.changed() == 1, "what serves is what the inventory says"
    assert "changed: [gw-01]" in told.said.partition("[Let in what was left out of service]")[2][:200]
    for flight in flights:
        flight.join(120)
        assert flight.failure == ""
    assert quiet(light) == []


def test_killed_after_the_switch_of_a_replica(hosts, light, tmp_path):
    """It comes up by itself, and stays drained."""
    former = hosts["gpu-01"].check_output("readlink /etc/vllm/chat.0/current")
    killed = killed_when(hosts["gpu-01"], SWITCHED.format(former), tmp_path, **release("second"))
    assert killed.alive, killed.said[-2000:]
    wait(lambda: serving(hosts) == {"gpu-01": "second", "gpu-02": "first"}, "it does not come up")
    wait(lambda: at_the_gateway(hosts) == {"chat.0": "DRAIN", "chat.1": "UP"}, "it is not drained")
    told = verify(**release("second"))
    assert told.status == 0, told.said[-3000:]
    assert "changed: [gpu-01]" in told.said.partition(": Call it judged]")[2][:200]
    assert "changed: [gw-01]" in told.said.partition("[Let in what was left out of service]")[2][:200]
    assert quiet(light) == []


def test_killed_between_two_replicas(hosts, light, tmp_path):
    """The first one has been judged without another restart, and is let in before the other is taken aside: nobody fails."""
    before = processes(hosts)
    judged = "until test ! -e /etc/vllm/chat.0/unjudged.json; do sleep 0.02; done"
    killed = killed_when(hosts["gpu-01"], judged, tmp_path, **release("second"))
    assert killed.alive, killed.said[-2000:]
    assert processes(hosts) == before
    assert serving(hosts) == {"gpu-01": "second", "gpu-02": "first"}
    told = verify(**release("second"))
    assert told.status == 0 and "Call it judged] **************************** changed: [gpu-01]" not in told.said
    assert "changed: [gpu-02]" in told.said.partition(": Stop this host's rank]")[2][:1000]
    assert quiet(light) == []


def test_the_next_run_finishes_it_and_another_one_changes_nothing(hosts, light):
    first = invocation(hosts["gpu-01"], "chat.0")
    run = play(playbook=UPGRADE, **release("second"))
    assert run.status == 0, run.said[-3000:]
    assert serving(hosts) == {"gpu-01": "second", "gpu-02": "second"}
    assert invocation(hosts["gpu-01"], "chat.0") == first, "what was right was started again"
    all_up(hosts, "chat.0", "chat.1")
    run = play(playbook=UPGRADE, **release("second"))
    assert (run.status, run.changed()) == (0, 0), run.said[-3000:]
    assert quiet(light) == []


def test_killed_after_the_switch_to_what_answers_nonsense(hosts, light, tmp_path):
    """The run that was killed can judge it no more: the next one does, by what was answered before, and takes it back."""
    nonsense = {"vllm_services": [{**CHAT, "env": {"STANDIN_SAYS": "!!!!"}}]}
    former, other = hosts["gpu-01"].check_output("readlink /etc/vllm/chat.0/current"), processes(hosts)["gpu-02"]
    killed = killed_when(hosts["gpu-01"], SWITCHED.format(former), tmp_path, **nonsense, **release("first"))
    assert killed.alive, killed.said[-2000:]
    wait(lambda: serving(hosts) == {"gpu-01": "first", "gpu-02": "second"}, "it does not come up")
    run = play(playbook=UPGRADE, **nonsense, **release("first"))
    assert run.status != 0
    assert "0 of 8 answers begin as before" in run.said
    assert f"chat.0 serves again as before, with generation {former.rpartition('/')[2]}" in run.said
    assert hosts["gpu-01"].check_output("readlink /etc/vllm/chat.0/current") == former
    assert processes(hosts)["gpu-02"] == other
    all_up(hosts, "chat.0", "chat.1")
    assert hosts["gpu-01"].run("ls /etc/vllm/chat.0/unjudged.json").rc != 0
    assert quiet(light) == []


# -- a host is added --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def more(tmp_path_factory) -> tuple[str, str]:
    """Options with which gpu-03 is of the fleet, too."""
    inventory = tmp_path_factory.mktemp("more") / "more.yml"
    inventory.write_text("all: {children: {gpu_hosts: {hosts: {gpu-03: {}}}}}\n")
    return "-i", str(inventory)


def test_a_host_is_added_to_a_service_that_runs(hosts, light, more):
    """The others notice nothing: not a file of theirs is another, not a process was started again."""
    peers = HOSTS[:2]
    before = {name: (made(hosts[name]), invocation(hosts[name], f"chat.{n}")) for n, name in enumerate(peers)}
    run = play(*more, **release("second"))
    assert run.status == 0, run.said[-3000:]
    after = {name: (made(hosts[name]), invocation(hosts[name], f"chat.{n}")) for n, name in enumerate(peers)}
    assert after == before
    all_up(hosts, "chat.0", "chat.1", "chat.2")
    run = play(*more, **release("second"))
    assert (run.status, run.changed()) == (0, 0), run.said[-3000:]
    assert quiet(light) == []


# -- hosts die in the middle ------------------------------------------------------------------------------------------------------


def dies(host, condition: str, name: str, *options, **variables) -> Run:
    """An upgrade in the middle of which a host loses its power, as soon as a condition holds on another one."""
    result: list[Run] = []
    thread = threading.Thread(target=lambda: result.append(play(*options, playbook=UPGRADE, **variables)))
    thread.start()
    seen = host.run(f"timeout 900 sh -c '{condition}'")
    power_off(name)
    thread.join(1200)
    assert seen.rc == 0 and result, "the upgrade did not end, or never came so far"
    return result[0]


def lost(failed: list[tuple[float, str]]) -> None:
    """What was in hand on a host that died: of a second's work, two a second, over three replicas, one or two."""
    assert len(failed) <= 2 and {how for _at, how in failed} <= {"cut", "status 502", "status 504"}, failed


def test_a_host_dies_while_its_replica_is_changed(hosts, light, more):
    """Nothing was in hand there. The others are not touched, and the run says so."""
    others = {name: invocation(hosts[name], f"chat.{n}") for n, name in ((1, "gpu-02"), (2, "gpu-03"))}
    former = hosts["gpu-01"].check_output("readlink /etc/vllm/chat.0/current")
    run = dies(hosts["gpu-01"], SWITCHED.format(former), "gpu-01", *more, **release("first"))
    assert run.status != 0
    assert "gpu-01 : ok=" in run.said and "unreachable=1" in run.said
    assert "chat.1 was not restarted and goes on as it was: gpu-01 failed before its turn" in run.said
    assert {name: invocation(hosts[name], f"chat.{n}") for n, name in ((1, "gpu-02"), (2, "gpu-03"))} == others
    power_on("gpu-01")
    wait(lambda: runs(hosts["gpu-01"], "chat.0") == "first", "it does not come up with its host")
    assert quiet(light) == []


def test_another_host_dies_while_a_replica_is_changed(hosts, light, more):
    """The next run judges chat.0 and changes chat.1; meanwhile the host of chat.2 dies. What it had in hand is lost, and no more."""
    first = invocation(hosts["gpu-01"], "chat.0")
    drained = until("rows().get('chat.1') == 'DRAIN'")
    run = dies(hosts["gw-01"], drained, "gpu-03", *more, **release("first"))
    assert run.status != 0
    assert (runs(hosts["gpu-01"], "chat.0"), runs(hosts["gpu-02"], "chat.1")) == ("first", "first"), run.said[-3000:]
    assert invocation(hosts["gpu-01"], "chat.0") == first
    power_on("gpu-03")
    wait(lambda: runs(hosts["gpu-03"], "chat.2") == "second", "it does not come up with its host")
    all_up(hosts, "chat.0", "chat.1", "chat.2")  # nobody has to help
    lost(quiet(light))


def test_the_next_run_changes_what_the_dead_host_missed_and_another_one_nothing(hosts, light, more):
    run = play(*more, playbook=UPGRADE, **release("first"))
    assert run.status == 0, run.said[-3000:]
    all_up(hosts, "chat.0", "chat.1", "chat.2")
    assert [runs(hosts[name], f"chat.{n}") for n, name in enumerate(HOSTS[:3])] == ["first"] * 3
    run = play(*more, playbook=UPGRADE, **release("first"))
    assert (run.status, run.changed()) == (0, 0), run.said[-3000:]
    assert quiet(light) == []


# -- a host is replaced under its name ----------------------------------------------------------------------------------------------


def topology(*options, **variables) -> Run:
    where = {"gpu_topology_root": "/srv/replay", "gpu_topology_learned_file": str(EPHEMERAL / "gpu-02.json")}
    return play("--limit", "gpu-02", *options, playbook="playbooks/topology.yml", **{**where, **variables})


def lay_out(recording: dict) -> None:
    """Have gpu-02 answer as a recorded host with GPUs (tests/replay)."""
    root = find(NAME, ROOT).folder("gpu-02") / "root"
    (root / "srv/replay").mkdir(parents=True)
    recorded.lay_out(recording, root / "srv/replay")
    recorded.install(recording, root / "usr/local/bin")


def test_a_host_is_replaced_under_the_same_name(hosts, light, more, tmp_path):
    lay_out(recorded.recording("h200x2"))
    learned = topology(gpu_topology_learn=True)
    assert learned.status == 0, learned.said[-3000:]
    peers = {"gpu-01": "chat.0", "gpu-03": "chat.2"}
    before = {name: (made(hosts[name]), invocation(hosts[name], one)) for name, one in peers.items()}
    gateway = made(hosts["gw-01"])
    # What an operator's machine knows: the key of the host as it was.
    knows = tmp_path / "inventory"
    shutil.copytree(INVENTORY, knows, symlinks=False)
    known = find(NAME, ROOT).names.folder / "known_hosts"
    shutil.copy(known, tmp_path / "known_hosts")
    power_off("gpu-02")
    power_on("gpu-02", anew=True)
    lab = (knows / "lab.yml").read_text()
    (knows / "lab.yml").write_text(lab.replace(str(known), str(tmp_path / "known_hosts")))
    done = subprocess.run(
        [sys.executable, "-m", "gpu_fleet.cli", "deploy", "-i", str(knows), "--limit", "gpu-02", "--check"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    said = " ".join((done.stdout + done.stderr).split())
    (tmp_path / "said").write_text(done.stdout + done.stderr)
    assert done.returncode == 1, said
    assert said.count("the host's SSH key has changed. It sent ED25519 SHA256:") == 1, said
    assert f'ssh-keygen -f "{tmp_path}/known_hosts" -R "{ADDRESSES["gpu-02"]}"' in said
    assert "somebody is in between: compare" in said and "@@@@" not in said
    # The new key is known now, and the disk is empty.
    run = play(*more)
    assert run.status == 0, run.said[-3000:]
    all_up(hosts, "chat.0", "chat.1", "chat.2")
    assert {name: (made(hosts[name]), invocation(hosts[name], one)) for name, one in peers.items()} == before
    assert made(hosts["gw-01"]) == gateway
    run = play(*more)
    assert (run.status, run.changed()) == (0, 0), run.said[-3000:]
    lost(quiet(light))
    lay_out(recorded.recording("h200x2", drop=[1]))
    other = topology()
    assert "not as it was learned: " in other.said and "NVIDIA H200 is gone" in other.said, other.said[-3000:]
    assert "learn it anew: gpu_topology_learn: true" in other.said
    wrong = topology(gpu_topology_expected={"gpus": 2})
    assert wrong.status != 0 and "it has 1 GPU, expected are 2" in wrong.said, wrong.said[-3000:]


# -- a host leaves from the middle ----------------------------------------------------------------------------------------------------


def served_by(*hosts: str | None) -> dict:
    """Variables with which chat is on these hosts."""
    return {"vllm_services": [{**CHAT, "hosts": list(hosts)}]}


def test_a_host_leaves_from_the_middle_and_nothing_is_started_again(hosts, light, more):
    """As it is written first the others would have other numbers, which is refused; with its place kept they notice nothing."""
    stay = {"gpu-01": "chat.0", "gpu-03": "chat.2"}
    before = {name: invocation(hosts[name], one) for name, one in stay.items()}
    run = play(*more, **served_by("gpu-01", "gpu-03"))
    assert run.status != 0
    assert (
        "chat.1 is to be started where replicas of chat run under other numbers: vllm@chat.2 runs on gpu-03" in run.said
    )
    assert "null in the place of each host that left" in run.said
    assert {name: invocation(hosts[name], one) for name, one in stay.items()} == before
    all_up(hosts, "chat.0", "chat.1", "chat.2")
    kept = served_by("gpu-01", None, "gpu-03")
    run = play(*more, **kept)
    assert run.status == 0, run.said[-3000:]
    assert "Left over on gpu-02 and not touched: chat.1" in run.said
    all_up(hosts, "chat.0", "chat.2")
    run = play(*more, playbook="playbooks/teardown.yml", teardown_services="chat", **kept)
    assert run.status == 0, run.said[-3000:]
    for name in ("gpu-02", "gpu-03"):
        assert hosts[name].run("ls -d /etc/vllm/chat.1").rc != 0
    assert {name: invocation(hosts[name], one) for name, one in stay.items()} == before
    # It comes back into its place.
    run = play(*more)
    assert run.status == 0, run.said[-3000:]
    all_up(hosts, "chat.0", "chat.1", "chat.2")
    assert {name: invocation(hosts[name], one) for name, one in stay.items()} == before
    run = play(*more)
    assert (run.status, run.changed()) == (0, 0), run.said[-3000:]
    assert quiet(light) == []


# -- services are moved and renamed ---------------------------------------------------------------------------------------------------


def beside(name: str, host: str, port: int) -> dict:
    """Variables with which another service runs beside chat."""
    keys = {"chat": "chat-key-chat-key-chat-key-chat-key", name: f"{name}-key-{name}-key-{name}-key-{name}-key"}
    services = [CHAT, {**CHAT, "name": name, "hosts": [host], "port_base": port}]
    return {"vllm_services": services, "vllm_service_api_keys": keys}


def test_a_service_moves_to_another_host_and_other_ports(hosts, more):
    """Clients notice nothing. Where it was it goes on until it is taken away."""
    run = play(*more, **beside("talk", "gpu-01", 8100))
    assert run.status == 0, run.said[-3000:]
    wait(lambda: ask("talk") == 200, "it does not serve")
    former = invocation(hosts["gpu-01"], "talk.0")
    with light_of("talk") as load:
        run = play(*more, **beside("talk", "gpu-02", 8300))
        assert run.status == 0, run.said[-3000:]
        assert "Left over on gpu-01 and not touched: talk.0" in run.said
        assert "scripts/fleet teardown -i INVENTORY talk" in run.said
        assert invocation(hosts["gpu-01"], "talk.0") == former
        time.sleep(3)
        hosts["gpu-01"].check_output("systemctl stop vllm-agent@talk.0 vllm@talk.0")
        time.sleep(3)
        assert quiet(load) == [], "requests still went to where it was"
    assert runs(hosts["gpu-02"], "talk.0") == "first"


def test_a_service_is_renamed_in_its_place(hosts, light, more):
    """What has its place goes on, and the run says how it is taken away; then the new one comes. Others notice nothing."""
    former = invocation(hosts["gpu-02"], "talk.0")
    renamed = beside("speak", "gpu-02", 8300)
    run = play(*more, **renamed)
    assert run.status != 0
    assert "speak.0 is to be started where instances run that the inventory no longer names" in run.said
    assert "vllm@talk.0 runs on gpu-02" in run.said
    assert "scripts/fleet teardown -i INVENTORY talk (playbooks/teardown.yml -e teardown_services=talk)" in run.said
    assert invocation(hosts["gpu-02"], "talk.0") == former
    assert "gw-01 was left as it is: talk.0 goes on" in run.said
    assert (ask("talk"), ask("speak")) == (200, 404), "clients know the one that serves"
    assert hosts["gpu-02"].run("systemctl is-enabled vllm-agent@speak.0").rc != 0, "it has the ports of talk's"
    run = play(*more, playbook="playbooks/teardown.yml", teardown_services="talk", **renamed)
    assert run.status == 0, run.said[-3000:]
    for name in ("gpu-01", "gpu-02"):
        assert hosts[name].run("ls -d /etc/vllm/talk.0").rc != 0
    run = play(*more, **renamed)
    assert run.status == 0, run.said[-3000:]
    wait(lambda: ask("speak") == 200, "it does not serve")
    assert ask("talk") == 404
    run = play(*more, **renamed)
    assert (run.status, run.changed()) == (0, 0), run.said[-3000:]
    assert quiet(light) == []
