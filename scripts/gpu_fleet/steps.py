"""Steps with a time, a log and a line on the screen: what scripts/demo and scripts/test are made of.

A step is a command whose output goes to a log file. On a terminal its name and the last thing it said are shown while
it runs; elsewhere a line a minute says that it still does. A step that fails shows the first cause and the end of its
log, and where the whole log lies.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.status import Status

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / ".cache" / "logs"
VENV_BIN = ROOT / ".venv" / "bin"
LAB = ROOT / "molecule" / "shared" / "lab.py"
TAIL = 25
HEARTBEAT_SECONDS = 60.0
GRACE_SECONDS = 20.0  # for an interrupted command to clean up after itself
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class StepFailed(Exception):
    """A step ended badly; its own lines have been shown already."""


@dataclass
class Step:
    """What became of one step. `seconds` is wall time."""

    name: str
    log: Path
    returncode: int = -1
    seconds: float = 0.0
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        return self.returncode == 0

    def text(self) -> str:
        """The log without the colours that tools write into it."""
        return _ESCAPES.sub("", self.log.read_text(encoding="utf-8", errors="replace")) if self.log.exists() else ""


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The caller's environment with the virtual environment's commands first and the repository's modules to import."""
    path = os.pathsep.join([str(VENV_BIN), os.environ.get("PATH", "/usr/bin:/bin"), "/usr/sbin", "/sbin"])
    return {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(ROOT / "scripts"),
        "PYTHONUNBUFFERED": "1",
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "NO_COLOR": "1",
        "ANSIBLE_NOCOLOR": "1",
        **(extra or {}),
    }


# -- what a log says ----------------------------------------------------------------------------------------------------

# The line that names the cause, in the words of the tools used here; what comes after it is mostly consequence.
_CAUSES = re.compile(
    r"^(fatal: \[|ERROR! |\[ERROR\]: |E   |FAILED |CRITICAL |ERROR |lab: .*|Traceback |error: |E: |\S+: error: )"
)


def first_cause(text: str, length: int = 14) -> list[str]:
    """The first lines of a log that say what went wrong: the first failed task, test or error with what belongs to it."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.startswith(("fatal: [", "failed: [")) and "...ignoring" not in "".join(lines[number : number + 2]):
            task = next(
                (
                    earlier
                    for earlier in reversed(lines[:number])
                    if earlier.startswith(("TASK [", "RUNNING HANDLER ["))
                ),
                None,
            )
            return ([task.rstrip(" *")] if task else []) + _block(lines[number:], length)
    for number, line in enumerate(lines):
        if _CAUSES.match(line):
            return _block(lines[number:], length)
    return []


def _block(lines: Sequence[str], length: int) -> list[str]:
    """A line and the indented ones after it."""
    block = [lines[0]]
    for line in lines[1:length]:
        if not line.startswith((" ", "E  ")):
            break
        block.append(line.rstrip())
    return block


def doing_now(log: Path) -> str:
    """What a running command said last that tells where it is: an Ansible task, or else its last line."""
    try:
        with open(log, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - 8192))
            lines = _ESCAPES.sub("", stream.read().decode("utf-8", "replace")).splitlines()
    except OSError:
        return ""
    task = next((line for line in reversed(lines) if line.startswith(("TASK [", "RUNNING HANDLER ["))), None)
    last = task.strip(" *") if task else next((line for line in reversed(lines) if line.strip()), "")
    return last.strip()[:90]


# -- running --------------------------------------------------------------------------------------------------------------


@dataclass
class Runner:
    """Runs steps, prints a line for each and remembers them."""

    folder: Path
    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))
    steps: list[Step] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _stopping: bool = False

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def run(
        self,
        name: str,
        command: Sequence[str],
        *,
        timeout: float = 1200.0,
        extra: Mapping[str, str] | None = None,
        label: str | None = None,
        quiet: bool = False,
    ) -> Step:
        """Run a command to its end. Never raises for a failure of the command: the caller looks at the step."""
        step = Step(name, self.folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}.log")
        began = time.monotonic()
        with open(step.log, "wb") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            # A session of its own: Ctrl-C reaches this program, which ends the command in an order that cleans up.
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment(extra),
                start_new_session=True,
            )
            self._running[name] = process
            try:
                step.timed_out = not self._wait(process, step, began, timeout, label or name)
            finally:
                del self._running[name]
        step.returncode = process.returncode
        step.seconds = time.monotonic() - began
        with self._lock:
            self.steps.append(step)
            if not quiet:
                self.report(step, label or name, timeout)
        return step

    def _wait(self, process: subprocess.Popen[bytes], step: Step, began: float, timeout: float, label: str) -> bool:
        """Wait for the end, showing what goes on. False when the time is up and the command was ended."""
        beat = began + HEARTBEAT_SECONDS
        with self._shown(label) as show:
            try:
                while True:
                    try:
                        process.wait(0.5)
                        return True
                    except subprocess.TimeoutExpired:
                        pass
                    now = time.monotonic()
                    show(f"{label}  {now - began:.0f} s  [dim]{_plain(doing_now(step.log))}[/dim]")
                    if now > beat and not self.console.is_terminal:
                        self.console.print(f"  …   {label}  {now - began:.0f} s  {_plain(doing_now(step.log))}")
                        beat = now + HEARTBEAT_SECONDS
                    if now - began > timeout:
                        end_group(process)
                        return False
            except BaseException:
                end_group(process)
                raise

    @contextlib.contextmanager
    def _shown(self, label: str) -> Iterator[Callable[[str], None]]:
        """A line that changes, on a terminal and outside of parallel steps; nothing otherwise."""
        if (
            not self.console.is_terminal
            or len(self._running) > 1
            or threading.current_thread() is not threading.main_thread()
        ):
            yield lambda text: None
            return
        with Status(label, console=self.console) as status:
            yield status.update

    def report(self, step: Step, label: str, timeout: float) -> None:
        """One line for what went well; the cause, the end of the log and its place for what did not."""
        if step.ok:
            self.console.print(f"  [green]ok[/green]  {_plain(label)}  [dim]{step.seconds:.1f} s[/dim]")
            return
        if self._stopping:
            return
        why = f"did not end within {timeout:.0f} s" if step.timed_out else f"exit status {step.returncode}"
        self.console.print(f"  [red]FAILED[/red]  {_plain(label)}  {step.seconds:.1f} s: {why}")
        text = step.text()
        if cause := first_cause(text):
            self.console.print("      first cause:")
            for line in cause:
                self.console.print(f"      | {_plain(line)}")
        self.console.print(f"      end of {step.log}:")
        for line in text.splitlines()[-TAIL:]:
            self.console.print(f"      | {_plain(line)}")

    def together(
        self, commands: Mapping[str, Sequence[str]], *, timeout: float = 1200.0, label: str = "preparing"
    ) -> dict[str, Step]:
        """Run several commands at once. The first that fails ends the others: they would only be waited for."""
        began = time.monotonic()
        done: dict[str, Step] = {}

        def one(name: str) -> None:
            done[name] = self.run(name, commands[name], timeout=timeout)
            if not done[name].ok:
                self.stop()

        threads = [threading.Thread(target=one, args=(name,), daemon=True) for name in commands]
        for thread in threads:
            thread.start()
        shown = Status(label, console=self.console) if self.console.is_terminal else contextlib.nullcontext()
        with shown as status:
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.2)
                if status:
                    left = [name for name in commands if name not in done]
                    status.update(f"{label}: {', '.join(left)}  {time.monotonic() - began:.0f} s")
        self._stopping = False
        return done

    def stop(self) -> None:
        """End what runs, after an interrupt."""
        self._stopping = True
        for process in list(self._running.values()):
            end_group(process)


def _plain(text: str) -> str:
    """Text of others for rich: its square brackets are not ours to read."""
    return text.replace("[", r"\[")


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a command and all it started, as Ctrl-C would; after a while make it final."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
            return


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM end the program the way Ctrl-C does."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGTERM, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """For cleaning up: a second Ctrl-C must not cut it short."""
    former = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
