"""Faults done to a real vLLM over two lab hosts, each as often as asked, and a table of what came of them.

    scripts/test long faults --count 3
    scripts/test long faults --count 1 --only cut-30,disk-full --keep

The CPU build of vLLM serves SmolLM2 with half of its layers on each host (the demo's fleet, on a lab of its own). Nobody
helps: what heals are the agents. Faults that were done are kept in .cache/faults, so that a run that was cut short goes on
where it was; --anew begins from nothing, --keep leaves the lab up, --record writes docs/validation/DATE-faults.md.
Needs root and a quiet machine; a fault takes two to eight minutes.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "host")]

from faults import Cut, Flight, answers_within, completion  # noqa: E402
from gpu_fleet import demo  # noqa: E402
from gpu_fleet.steps import LAB, LOGS, Runner  # noqa: E402

NAME = "faults"
FOLDER = ROOT / ".cache" / NAME
DONE = FOLDER / "done.jsonl"
HEAD, WORKER = "gpu-01", "gpu-02"
UNIT = "vllm@chat.0.service"
AGAIN_SECONDS, IN_FLIGHT_SECONDS = 120.0, 30.0  # asked
PATIENCE = 420.0  # beyond which a fault counts as not healed
TOKENS = 1900  # of the request in flight: longer than it takes to notice


@dataclass
class Outcome:
    """One fault. Seconds; again and ended from the fault on, or from its end where `cut` says how long it lasted."""

    fault: str
    number: int
    commit: str
    again: float | None
    ended: float | None
    flight: str
    orphans: int
    restarted: bool
    note: str = ""


# -- the fleet -----------------------------------------------------------------------------------------------------------


class Fleet:
    def __init__(self) -> None:
        inventory = FOLDER / "inventory"
        if not inventory.exists():
            ignore = shutil.ignore_patterns("lab.yml", ".secrets", ".lab.yml*")
            shutil.copytree(demo.INVENTORY, inventory, ignore=ignore)
        self.demo = demo.Fleet(Runner(LOGS / "faults"), lab=NAME, inventory=inventory)

    def up(self) -> None:
        demo.prepare(self.demo)
        demo.boot(self.demo)
        demo.deploy(self.demo)

    @property
    def url(self) -> str:
        return self.demo.url()

    @property
    def key(self) -> str:
        return self.demo.key()

    def on(self, host: str, script: str, check: bool = True) -> str:
        """Run a shell script on a host and return what it printed."""
        done = subprocess.run(
            [sys.executable, str(LAB), "exec", NAME, host, "--", "sh", "-c", script],
            capture_output=True,
            text=True,
            check=False,
        )
        assert not check or done.returncode == 0, f"{host}: {script}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def invocations(self) -> dict[str, str]:
        return {host: self.on(host, f"systemctl show {UNIT} -p InvocationID --value") for host in (HEAD, WORKER)}

    def orphans(self) -> int:
        """Processes of the service user outside of the running unit, on both hosts."""
        script = (
            f"group=$(systemctl show {UNIT} -p ControlGroup --value); "
            'for pid in $(ps -u vllm -o pid=); do grep -qs ":$group" /proc/$pid/cgroup || echo $pid; done'
        )
        return sum(len(self.on(host, script).split()) for host in (HEAD, WORKER))

    def settle(self, seconds: float = 300.0) -> None:
        """It serves, and each agent has seen it."""
        answers_within(self.url, self.key, seconds)
        ask = (
            "import json, urllib.request as u; "
            f"print(json.load(u.urlopen('http://{self.demo.address(HEAD)}:{demo.PORT + 3}/', timeout=5))['answered'])"
        )
        end = time.monotonic() + 60
        while self.on(WORKER, f'python3 -c "{ask}"', check=False) != self.invocations()[HEAD]:
            assert time.monotonic() < end, "the head's agent did not see it answer"
            time.sleep(1)

    def strikes(self, host: str, script: str, check: bool = True) -> float:
        """Run a script that does a fault; when it began on the host, whose clock is this machine's. SSH to a busy host takes long."""
        return float(self.on(host, f"date +%s.%N; {script}", check).splitlines()[0])

    def engine(self, signal: str) -> float:
        """Send a signal to the head's engine process, which vLLM calls VLLM::EngineCore."""
        return self.strikes(
            HEAD,
            f"group=$(systemctl show {UNIT} -p ControlGroup --value); hit=; "
            "for pid in $(cat /sys/fs/cgroup$group/cgroup.procs); do "
            f"if grep -qs EngineCore /proc/$pid/cmdline; then kill -{signal} $pid; hit=1; fi; done; test $hit",
        )


# -- the faults ------------------------------------------------------------------------------------------------------------


# Each does its fault and returns when it began (seconds of the epoch).


def kill_main(fleet: Fleet, host: str) -> float:
    return fleet.strikes(host, f"systemctl kill --signal=KILL --kill-whom=main {UNIT}")


def cut(fleet: Fleet, seconds: float) -> float:
    with Cut(int(fleet.on(WORKER, "cat /sys/class/net/host0/iflink"))):
        began = time.time()
        time.sleep(seconds)
    return began


def reboot(fleet: Fleet, host: str) -> float:
    return fleet.strikes(host, "systemctl reboot", check=False)


def rebooted(number: int) -> str:
    return (WORKER, HEAD)[number % 2]


def disk_full(fleet: Fleet) -> float:
    """The disk of the worker's caches is full when its rank ends, and there is room again 60 s later."""
    began = fleet.strikes(
        WORKER,
        "mount -t tmpfs -o size=64m,mode=755 tmpfs /var/cache/vllm && head -c 64M /dev/zero > /var/cache/vllm/filler; "
        "systemd-run --quiet --on-active=60 --timer-property=AccuracySec=100ms umount --lazy /var/cache/vllm; "
        f"systemctl kill --signal=KILL --kill-whom=main {UNIT}",
    )
    time.sleep(max(0.0, began + 55 - time.time()))
    with pytest.raises(OSError):
        completion(fleet.url, fleet.key)
    time.sleep(max(0.0, began + 60 - time.time()))
    return began


# Name to what is done, how long it lasts (answers are asked for that much later), and what the table calls it.
FAULTS = {
    "rank-killed": (lambda fleet, number: kill_main(fleet, WORKER), 0, "rank killed (worker, SIGKILL)"),
    "head-killed": (lambda fleet, number: kill_main(fleet, HEAD), 0, "head killed (SIGKILL)"),
    "engine-killed": (lambda fleet, number: fleet.engine("KILL"), 0, "engine process killed (SIGKILL)"),
    "engine-hung": (lambda fleet, number: fleet.engine("STOP"), 0, "engine process hung (SIGSTOP)"),
    "host-rebooted": (
        lambda fleet, number: reboot(fleet, rebooted(number)),
        0,
        "host rebooted (worker and head in turn; a head that is told to stop lets requests finish for 30 s)",
    ),
    "cut-30": (lambda fleet, number: cut(fleet, 30), 30, "network cut for 30 s"),
    "cut-300": (lambda fleet, number: cut(fleet, 300), 300, "network cut for 5 min"),
    "disk-full": (lambda fleet, number: disk_full(fleet), 60, "disk of the caches full for 60 s, rank killed"),
    "firewall-reloaded": (None, 0, "firewall reloaded 20 times under load"),
}


def commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def strike(fleet: Fleet, name: str, number: int) -> Outcome:
    """Do one fault with a request in flight, and see what comes of it."""
    fleet.settle()
    before = fleet.invocations()
    flight = Flight(fleet.url, fleet.key, TOKENS).start()
    time.sleep(3)
    assert flight.ended is None, f"the request in flight did not last: {flight.outcome}"
    act, lasts, _ = FAULTS[name]
    with ThreadPoolExecutor(1) as pool:
        doing = pool.submit(act, fleet, number)
        if not lasts:
            wait_until_down(fleet, flight)
        began = doing.result(lasts + 120) - time.time() + time.monotonic()
    again = None
    with contextlib.suppress(AssertionError):  # what is asked counts from the end of what lasts
        again = max(0.0, answers_within(fleet.url, fleet.key, PATIENCE, began + lasts))
    flight.thread.join(60)
    after = fleet.invocations()
    return Outcome(
        fault=name,
        number=number,
        commit=commit(),
        again=again and round(again, 1),
        ended=round(flight.ended - began, 1) if flight.ended else None,
        flight=flight.outcome[:120],
        orphans=fleet.orphans(),
        restarted=all(after[host] != before[host] for host in before),
    )


def wait_until_down(fleet: Fleet, flight: Flight) -> None:
    """Until the fault shows: an answer that comes before it would be one of the server that is about to end."""
    end = time.monotonic() + 60
    while flight.ended is None and time.monotonic() < end:
        time.sleep(0.2)


def reload_firewall(fleet: Fleet, number: int) -> Outcome:
    """Requests all the while: none may fail, nothing may restart. `again` is the longest wait of one of them."""
    fleet.settle()
    before, waits, failed = fleet.invocations(), [], []
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            began = time.monotonic()
            try:
                completion(fleet.url, fleet.key, 8, 60.0)
                waits.append(time.monotonic() - began)
            except OSError as error:
                failed.append(str(error))

    threads = [threading.Thread(target=load, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for host in (HEAD, WORKER):
        fleet.on(
            host, "for turn in $(seq 20); do systemctl reload gpu-fleet-firewall.service || exit 1; sleep 0.5; done"
        )
    stop.set()
    for thread in threads:
        thread.join(60)
    assert len(waits) > 20, "there was no load"
    return Outcome(
        fault="firewall-reloaded",
        number=number,
        commit=commit(),
        again=round(max(waits), 1),
        ended=None,
        flight=f"{len(failed)} of {len(waits) + len(failed)} requests failed",
        orphans=fleet.orphans(),
        restarted=fleet.invocations() != before,
        note="; ".join(sorted(set(failed)))[:200],
    )


def wrong(outcome: Outcome) -> str:
    """Why an outcome is not what is asked, or ''."""
    if outcome.fault == "firewall-reloaded":
        fine = not outcome.restarted and outcome.flight.startswith("0 of") and not outcome.orphans
        return "" if fine else f"{outcome}"
    problems = []
    if outcome.again is None or outcome.again > AGAIN_SECONDS:
        problems.append(f"answers again after {outcome.again} s")
    if outcome.ended is None or outcome.ended > IN_FLIGHT_SECONDS:
        problems.append(f"the request in flight ended after {outcome.ended} s ({outcome.flight})")
    if outcome.orphans:
        problems.append(f"{outcome.orphans} orphans")
    if not outcome.restarted:
        problems.append("not all ranks were restarted")
    return "; ".join(problems)


# -- the table ---------------------------------------------------------------------------------------------------------------


def done() -> list[Outcome]:
    if not DONE.exists():
        return []
    return [Outcome(**json.loads(line)) for line in DONE.read_text(encoding="utf-8").splitlines()]


def seconds(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    lost = len(values) - len(known)
    told = f"{statistics.median(known):.0f} ({min(known):.0f} to {max(known):.0f})"
    return told + (f", {lost} never" if lost else "")


def table(outcomes: list[Outcome]) -> str:
    lines = [
        "| fault | times | answers again after, s: median (least to most) | request in flight ended after, s | orphans | as asked |",
        "|---|---|---|---|---|---|",
    ]
    for name, (_, lasts, title) in FAULTS.items():
        own = [outcome for outcome in outcomes if outcome.fault == name]
        if not own:
            continue
        again, ended = seconds([o.again for o in own]), seconds([o.ended for o in own])
        if name == "firewall-reloaded":
            again, ended = f"longest wait {max(o.again or 0 for o in own):.0f}", ", ".join(o.flight for o in own)
        elif lasts:
            again += " after its end"
        good = sum(not wrong(o) for o in own)
        lines.append(
            f"| {title} | {len(own)} | {again} | {ended} | {sum(o.orphans for o in own)} | {good} of {len(own)} |"
        )
    return "\n".join(lines)


def document(outcomes: list[Outcome], path: Path) -> None:
    commits = ", ".join(sorted({outcome.commit for outcome in outcomes}))
    count = min((sum(o.fault == name for o in outcomes) for name in {o.fault for o in outcomes}), default=0)
    path.write_text(
        f"# Faults of a replica over two hosts, {datetime.date.today()}\n\n"
        f"Made by `scripts/test long faults --count {count}` on commit {commits}: vLLM 0.32.0, CPU build, SmolLM2-135M with half of its layers on "
        "each of two lab hosts (two cores in all), a long request in flight. Nobody helps; the agents heal. Asked: answers again within "
        f"{AGAIN_SECONDS:.0f} s (from the end of what lasts), the request in flight ended within {IN_FLIGHT_SECONDS:.0f} s, no orphan.\n\n"
        + table(outcomes)
        + "\n",
        encoding="utf-8",
    )


# -- the tests ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fleet(request):
    if request.config.getoption("--anew"):
        DONE.unlink(missing_ok=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    made = Fleet()
    made.up()
    yield made
    outcomes = done()
    print("\n" + table(outcomes))
    if request.config.getoption("--record"):
        document(outcomes, ROOT / "docs" / "validation" / f"{datetime.date.today()}-faults.md")
    if not request.config.getoption("--keep"):
        subprocess.run([sys.executable, str(LAB), "down", NAME], check=True)
        shutil.rmtree(FOLDER / "inventory")


def pytest_generate_tests(metafunc):
    only = [name for name in metafunc.config.getoption("--only").split(",") if name]
    if unknown := [name for name in only if name not in FAULTS]:
        raise pytest.UsageError(f"no fault {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    turns = [
        (name, number)
        for number in range(metafunc.config.getoption("--count"))
        for name in FAULTS
        if not only or name in only
    ]
    metafunc.parametrize(("name", "number"), turns, ids=[f"{name}-{number + 1}" for name, number in turns])


def test_it_heals(fleet, name, number):
    kept = [outcome for outcome in done() if (outcome.fault, outcome.number) == (name, number)]
    if kept:
        outcome = kept[-1]
        print(f"done before on commit {outcome.commit}: {outcome}")
    else:
        outcome = reload_firewall(fleet, number) if name == "firewall-reloaded" else strike(fleet, name, number)
        print(f"measured: {outcome}")
        with DONE.open("a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(outcome)) + "\n")
    assert not wrong(outcome), wrong(outcome)
