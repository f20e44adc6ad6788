"""Run a playbook of the collection through ansible-runner and read what came of it.

The command line and any other Python program use this; whatever it does, `ansible-playbook` does too.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_fleet import events, kept, remedies, timing
from gpu_fleet.domain import COLLECTION, COLLECTIONS
from gpu_fleet.events import Event

PLAN_TASK = "fleet_plan"
MIRROR_TASK = "vllm.mirror"
TEARDOWN_TASK = "vllm.teardown"
OLDEST_ANSIBLE = (2, 18)  # requires_ansible of meta/runtime.yml
# Playbooks that change hosts: from one machine one at a time on a fleet. A drain may come in between, as on a gateway.
CHANGING = frozenset({"site", "deploy", "upgrade", "rollback", "driver", "gateway", "monitoring", "teardown", "tune"})
GRACE_SECONDS = 15.0  # for ansible-playbook to end by itself, once it was interrupted
POLL_SECONDS = 1  # how often a run looks whether it is to end
INTERRUPTED = 130


@dataclass(frozen=True)
class Failure:
    """One task that failed on one host: its name and its message, with what to do about it."""

    host: str
    task: str
    message: str


@dataclass
class FleetResult:
    """What a run brought.

    status       of ansible-playbook: 0 when all went well
    refused      nothing was touched: the inventory, or what was asked for, is wrong
    interrupted  it was told to end before it was done; the next run goes on where it stopped
    changed      number of changes by host
    failures     what failed, host by host; also what a playbook answered by going back (rescued), unless all went well
    unreachable  hosts that were not reached; why_unreachable says why
    differing    names of the tasks that changed or would change something, by host
    plan         the plan, once the inventory was judged right; summary is it in lines for people
    hosts        what role gpu_topology published, by host
    left_over    instances that a host has and the inventory does not name there, by host, where hosts were asked
    stages       seconds by host and stage
    times        tasks and what each took (timing.py), longest first; also in the folder's profile.json
    seconds      in all
    folder       where the logs are (kept.py)
    acceptance   the run of `bench`, as it is kept beside the inventory
    tuning       what `tune` found, as it is kept beside the inventory
    """

    status: int = 0
    refused: bool = False
    interrupted: bool = False
    changed: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)
    why_unreachable: dict[str, str] = field(default_factory=dict)
    differing: dict[str, list[str]] = field(default_factory=dict)
    plan: dict[str, Any] | None = None
    summary: list[str] = field(default_factory=list)
    hosts: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_over: dict[str, list[str]] = field(default_factory=dict)
    stages: dict[str, dict[str, float]] = field(default_factory=dict)
    times: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    folder: Path | None = None
    acceptance: dict[str, Any] | None = None
    tuning: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        return not self.exit_status

    @property
    def exit_status(self) -> int:
        """0 good, 1 something failed, 2 refused, 130 interrupted."""
        if self.interrupted:
            return INTERRUPTED
        if self.refused:
            return 2
        return 1 if self.status else 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "exit_status": self.exit_status,
            "changed": self.changed,
            "failures": [vars(failure) for failure in self.failures],
            "unreachable": self.unreachable,
            "why_unreachable": self.why_unreachable,
            "summary": self.summary,
            "plan": self.plan,
            "hosts": self.hosts,
            "left_over": self.left_over,
            "stages": {
                host: {stage: round(spent, 1) for stage, spent in stages.items()}
                for host, stages in self.stages.items()
            },
            "seconds": round(self.seconds, 1),
            "folder": str(self.folder) if self.folder else None,
        }


@dataclass(frozen=True)
class Given:
    """What a program says once for all of its runs, as the command line does with options that every verb has.

    variables    as `ansible-playbook -e` takes them: KEY=VALUE, JSON, or @FILE
    environment  of ansible-playbook, such as ANSIBLE_VAULT_PASSWORD_FILE
    passwords    by a pattern of the question that ansible-playbook asks; flags make it ask
    """

    variables: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    passwords: Mapping[str, str] = field(default_factory=dict)
    flags: Sequence[str] = ()


GIVEN: ContextVar[Given | None] = ContextVar("GIVEN", default=None)


def _read(result: FleetResult, event: Event) -> None:
    """Take what an event tells into the result."""
    told: Mapping[str, Any] = event.raw.get("event_data") or {}
    brought = told.get("res") or {}
    action = str(told.get("resolved_action") or told.get("task_action") or "")
    if event.kind in ("ok", "changed"):
        if action.endswith(PLAN_TASK):
            result.plan = brought.get("ansible_facts", {}).get(PLAN_TASK)
            result.summary = brought.get("summary", [])
        elif action.endswith(MIRROR_TASK) and "summary" in brought:
            left = brought.get("left_over") or []
            strange = [f"left over, needed by nothing and not touched: {', '.join(left)}"] if left else []
            result.summary = [*brought["summary"], *brought.get("notes", []), *strange]
        elif action.endswith(TEARDOWN_TASK) and brought.get("left_over"):
            result.left_over[event.host] = brought["left_over"]
        elif "gpu_topology_facts" in (brought.get("ansible_facts") or {}):
            result.hosts[event.host] = {
                key: brought["ansible_facts"][f"gpu_topology_{key}"]
                for key in ("facts", "findings", "recommendation", "measured")
            }
    if event.kind == "changed":
        result.differing.setdefault(event.host, []).append(event.task)
    elif event.kind == "failed" and not told.get("ignore_errors"):
        result.failures.append(Failure(event.host, event.task, event.message))
        result.refused = result.refused or action.endswith(PLAN_TASK)
    elif event.kind == "unreachable":
        result.unreachable.append(event.host)
        result.why_unreachable[event.host] = event.message
    elif event.kind == "end":
        result.changed = {host: told.get("changed", {}).get(host, 0) for host in told.get("processed", {})}


def _environment() -> dict[str, str]:
    """What ansible-playbook gets besides this process's own: the collection, and settings where nobody else has any."""
    here = str(Path(sys.executable).parent)
    settings = os.environ.get("ANSIBLE_CONFIG") or (
        str(Path("ansible.cfg").resolve()) if Path("ansible.cfg").is_file() else str(COLLECTION / "ansible.cfg")
    )
    paths = [str(COLLECTIONS), *filter(None, [os.environ.get("ANSIBLE_COLLECTIONS_PATH")])]
    return {
        "ANSIBLE_CONFIG": settings,
        "ANSIBLE_COLLECTIONS_PATH": os.pathsep.join(paths),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_HOST_KEY_CHECKING": os.environ.get("ANSIBLE_HOST_KEY_CHECKING") or _host_keys(settings),
        "PATH": os.pathsep.join([here, os.environ.get("PATH", os.defpath)]),
    }


def _host_keys(settings: str) -> str:
    """Whether hosts have to show the key that this machine knows: as the settings say, else yes, which is Ansible's own default.

    ansible-runner says no where nobody says anything in the environment (its config/_base.py), whatever ansible.cfg has.
    """
    read = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        read.read(settings)
    except (configparser.Error, UnicodeDecodeError):
        return "True"  # ansible-playbook says what is wrong with it
    told = read.get("defaults", "host_key_checking", fallback="True")
    return read.get("ssh_connection", "host_key_checking", fallback=told)


# ansible-runner gives ansible-playbook a terminal that nobody sees, on which ssh would wait for an answer about a key that is new.
_NEW_KEY = {r"continue connecting \(yes/no.*\)\?": "no"}


# Of an inventory that cannot be read Ansible tells what each of its plugins thinks of it; these were not meant.
_NOT_MEANT = re.compile(
    r"Failed to parse \S+ with (auto|host_list|script|advanced_host_list) plugin|"
    r"Failed to parse \S+\.(ya?ml|json) with ini plugin|Could not match supplied host pattern"
)


def _last_words(done: Any) -> str:
    """What ansible-playbook said before it gave up: whole sentences, without colours and what does not belong to it."""
    said = "".join(stream.read() for stream in (done.stderr, done.stdout) if stream)
    paragraphs: list[str] = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", said).splitlines():
        if not line.strip():
            continue
        if line.startswith(("[WARNING]", "[ERROR]", "ERROR!", "[DEPRECATION")) or not paragraphs:
            paragraphs.append(line.strip())
        elif paragraphs[-1].startswith("[WARNING]"):
            paragraphs[-1] += f" {line.strip()}"  # Ansible breaks warnings at 80 characters
        else:
            paragraphs.append(line.rstrip())
    kept = [
        re.sub(r"^(\[WARNING\]:?|\[ERROR\]:?|ERROR!)[ *]*", "", text)
        for text in paragraphs
        if not _NOT_MEANT.search(text) and not text.startswith("[DEPRECATION")
    ]
    words = "\n".join(kept[-12:]) or "ansible-playbook failed and said nothing"
    return remedies.explained(words)


def _wrong_here(environment: Mapping[str, str]) -> str:
    """Why this machine cannot run a playbook; empty when it can."""
    from importlib import metadata

    if shutil.which("ansible-playbook", path=environment["PATH"]) is None:
        return f"there is no ansible-playbook beside {sys.executable} nor on the PATH: scripts/bootstrap, or pip install ansible-core"
    try:
        have = metadata.version("ansible-core")
    except metadata.PackageNotFoundError:
        return ""  # ansible-playbook is another Python's; it says itself what it lacks
    if tuple(int(part) for part in re.findall(r"\d+", have)[:2]) < OLDEST_ANSIBLE:
        wanted = ".".join(map(str, OLDEST_ANSIBLE))
        return f"ansible-core {have} is too old, {wanted} or newer is needed: scripts/bootstrap, or pip install 'ansible-core>={wanted}'"
    return ""


@dataclass
class _Ending:
    """Ends ansible-playbook as Ctrl-C on a terminal would, and after a while for good."""

    wanted: Callable[[], bool]
    pid: int | None = None
    since: float | None = None

    def __call__(self) -> bool:
        """For ansible-runner, which asks once a second: True kills."""
        if self.since is None:
            if not self.wanted():
                return False
            self.since = time.monotonic()
            if self.pid is None:
                return True
            self.send(signal.SIGINT)
        return time.monotonic() - self.since > GRACE_SECONDS

    def send(self, number: int) -> None:
        if self.pid is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            group = os.getpgid(self.pid)
            if group != os.getpgrp():  # it has a session of its own (pexpect)
                os.killpg(group, number)


def run(
    playbook: str,
    inventory: Path,
    *,
    limit: str | None = None,
    check: bool = False,
    variables: Mapping[str, Any] | None = None,
    on_event: Callable[[Event], None] | None = None,
    cancel: Callable[[], bool] | None = None,
    given: Given | None = None,
) -> FleetResult:
    """Run playbooks/PLAYBOOK.yml on an inventory. Each run has a private data directory of its own, which is kept.

    on_event is called with each event in turn; what it raises ends the run and is raised here. cancel is asked once a
    second whether the run is to end. Raises FileNotFoundError when there is no such inventory.
    """
    if not inventory.exists():
        raise FileNotFoundError(f"there is no inventory {inventory}")
    given = given or GIVEN.get() or Given()
    environment = {**_environment(), **given.environment}
    try:
        if wrong := _wrong_here(environment):
            return _refusal(wrong)
        with _turn(playbook, inventory, check):
            folder = kept.new(playbook)
            asked = _asked(limit, check, variables or {}, given, environment)
            asked |= {
                "playbook": str(COLLECTION / "playbooks" / f"{playbook}.yml"),
                "inventory": str(inventory.resolve()),
            }
            return _play(folder, asked, on_event, cancel or (lambda: False))
    except (kept.Busy, kept.CannotKeep) as refused:
        return _refusal(str(refused))


def _refusal(message: str) -> FleetResult:
    return FleetResult(status=1, refused=True, failures=[Failure("", "", message)])


HELD: ContextVar[Path | None] = ContextVar("HELD", default=None)


@contextlib.contextmanager
def hold(inventory: Path, what: str) -> Iterator[None]:
    """Several runs that are one change: nobody else's comes in between. Raises kept.Busy."""
    with kept.changing(inventory, what):
        held = HELD.set(inventory.resolve())
        try:
            yield
        finally:
            HELD.reset(held)


@contextlib.contextmanager
def _turn(playbook: str, inventory: Path, check: bool) -> Iterator[None]:
    if check or playbook not in CHANGING or HELD.get() == inventory.resolve():
        yield
        return
    with kept.changing(inventory, playbook):
        yield


def _asked(
    limit: str | None, check: bool, variables: Mapping[str, Any], given: Given, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Arguments of ansible_runner.run that say what is wanted."""
    flags = [*(["--check", "--diff"] if check else []), *given.flags]
    for variable in given.variables:
        flags += ["-e", variable]
    return {
        "limit": limit,
        "cmdline": shlex.join(flags) or None,
        "extravars": dict(variables),
        "envvars": dict(environment),
        "passwords": {**_NEW_KEY, **given.passwords},
    }


def _play(
    folder: Path, asked: dict[str, Any], on_event: Callable[[Event], None] | None, cancel: Callable[[], bool]
) -> FleetResult:
    import ansible_runner

    result, progress, times = FleetResult(folder=folder), events.Progress(), timing.Timing()
    raised: list[BaseException] = []
    empty: list[str] = []
    ending = _Ending(lambda: bool(raised) or cancel())

    def handle(raw: dict[str, Any]) -> bool:
        ending.pid = raw.get("pid") or ending.pid
        event = events.read(raw)
        _read(result, event)
        progress.take(event)
        times.take(event)
        if raw["event"] == "playbook_on_no_hosts_matched":
            empty.append(event.task)
        if on_event and not raised:
            try:
                on_event(event)
            except BaseException as error:  # raised again below, once ansible-playbook has ended
                raised.append(error)
        return True  # ansible-runner keeps a file of it

    began = time.monotonic()
    try:
        done = ansible_runner.run(
            private_data_dir=str(folder),
            ident="run",
            project_dir=str(Path.cwd()),  # where ansible-playbook looks up relative paths, as when it is run by hand
            settings={"pexpect_timeout": POLL_SECONDS},
            event_handler=handle,
            cancel_callback=ending,
            quiet=True,
            **asked,
        )
    except BaseException:
        ending.send(signal.SIGKILL)
        raise
    finally:
        kept.clean(folder)
    if raised:
        raise raised[0]
    result.status = done.rc if done.rc is not None else 1
    result.interrupted = ending.since is not None and bool(result.status)
    result.seconds = time.monotonic() - began
    result.stages = {name: dict(host.stages) for name, host in progress.hosts.items() if host.stages}
    result.times = times.as_dict()
    kept.write(folder / "profile.json", result.times)
    if not result.status and empty and not progress.hosts:
        result.status, result.refused = 1, True
        result.failures = [
            Failure(
                "", "", f"{asked['inventory']} has no host that is asked; docs/inventory.md says what an inventory has"
            )
        ]
    elif not result.status:
        result.failures = []  # a playbook answered them itself
    elif not (result.failures or result.unreachable or result.interrupted):
        # It ended before the first task: an inventory that cannot be read, a limit that matches nothing.
        result.failures.append(Failure("", "", _last_words(done)))
        result.refused = True
    kept.write(folder / "result.json", result.as_dict())
    return result
