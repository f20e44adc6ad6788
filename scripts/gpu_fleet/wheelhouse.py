"""The controller's wheelhouse: a folder with exactly the wheels that locks name, each proved by its hash.

Downloading is pip's work (so index, proxy, CA bundle and find-links are whatever pip is told on this machine), a few pips
at a time, each with the hash it must find. Files come in under a temporary name and are renamed when they are right, so an
interrupted run leaves whole wheels only and the next run goes on from there. Runs at once take turns.

A second look costs one stat a wheel: size, mtime and inode are kept beside the hash in `.record.json`; a wheel whose stat
changed is hashed again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any

from gpu_fleet import domain

locks = domain.module_util("locks")

WORKERS = 4  # pips at a time: one alone waits for the network between files, more fight over two cores
BATCH_BYTES = 24_000_000  # small wheels share one pip, whose start costs half a second
BATCH_WHEELS = 12
_PART = ".part-"


class WheelhouseError(Exception):
    """Wheels are missing or wrong; the message names them and the remedy."""


@dataclass(frozen=True)
class Need:
    """A wheel and the lock it was first asked for by (which says for what Python and which indices)."""

    wheel: Any
    lock: Any


@dataclass
class Result:
    """What a fetch did: counts of wheels, bytes fetched, names of wheels that had been altered and were replaced."""

    wheels: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    altered: list[str] = field(default_factory=list)
    seconds: float = 0.0


def default_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """${XDG_CACHE_HOME:-~/.cache}/gpu_fleet/wheels, shared by every checkout of one user."""
    cache = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "~").expanduser() / ".cache"
    return Path(cache) / "gpu_fleet" / "wheels"


def read_lock(path: Path) -> Any:
    """Parse a lock file. Raises WheelhouseError with the path and what is wrong."""
    try:
        return locks.parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise WheelhouseError(f"{path}: {error.strerror}") from error
    except locks.LockError as error:
        raise WheelhouseError(str(error)) from error


class Wheelhouse:
    """One folder of wheels with its record."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record: dict[str, list[Any]] = {}

    def load(self) -> None:
        """Read the record; a missing or broken one means that everything is hashed again."""
        try:
            self.record = dict(json.loads((self.folder / ".record.json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            self.record = {}

    def save(self) -> None:
        """Write the record, whole or not at all."""
        beside = self.folder / f".record.json.{os.getpid()}"
        beside.write_text(json.dumps(self.record, indent=0, sort_keys=True), encoding="utf-8")
        beside.replace(self.folder / ".record.json")

    def state(self, wheel: Any) -> str:
        """`right`, `missing` or `altered`; hashes only what the record does not vouch for."""
        path = self.folder / wheel.filename
        try:
            now = _stat(path)
        except FileNotFoundError:
            return "missing"
        known = self.record.get(wheel.filename)
        if known != [*now, wheel.sha256]:
            if now[0] != wheel.size or _sha256(path) != wheel.sha256:
                return "altered"
            self.record[wheel.filename] = [*now, wheel.sha256]
        return "right"

    def take(self, path: Path, wheel: Any) -> None:
        """Move a fetched file in, once its hash proved right."""
        if path.stat().st_size != wheel.size or _sha256(path) != wheel.sha256:
            raise WheelhouseError(
                f"{wheel.filename}: what was fetched has another hash than the lock; nothing was kept"
            )
        os.chmod(path, 0o644)
        target = self.folder / wheel.filename
        os.replace(path, target)
        self.record[wheel.filename] = [*_stat(target), wheel.sha256]

    @contextmanager
    def turn(self, say: Callable[[str], None]) -> Iterator[None]:
        """Hold the folder alone; what dead runs left is removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "w", encoding="utf-8") as handle:
            try:
                flock(handle, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                say(f"another run is filling {self.folder}; waiting for it")
                flock(handle, LOCK_EX)
            for left in self.folder.glob(f"{_PART}*"):
                # A pip that outlives its run by a moment still takes things away there; what stays goes the next time.
                shutil.rmtree(left, ignore_errors=True)
            self.load()
            yield


def _stat(path: Path) -> list[int]:
    info = path.stat()
    return [info.st_size, info.st_mtime_ns, info.st_ino]


def _sha256(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def batches(needs: Iterable[Need]) -> list[list[Need]]:
    """Groups for one pip each, the biggest first: big wheels alone, small ones of the same target together.

    A wheel that may have to come from a named index is alone as well, since its pip may be asked again.
    """
    groups: list[list[Need]] = []
    for need in sorted(needs, key=lambda item: (-item.wheel.size, item.wheel.name)):
        last = groups[-1] if groups else []
        small = need.wheel.size < BATCH_BYTES / 4 and not special_index(need)
        fits = (
            small
            and last
            and last[0].wheel.size < BATCH_BYTES / 4
            and not special_index(last[0])
            and (last[0].lock.python, last[0].lock.architecture) == (need.lock.python, need.lock.architecture)
            and len(last) < BATCH_WHEELS
        )
        if fits:
            last.append(need)
        else:
            groups.append([need])
    return groups


def special_index(need: Need) -> str | None:
    """Address of the index that has a wheel when pip's own places lack it; None for ordinary packages."""
    ordinary = "+" not in need.wheel.version
    for index in domain.data_cached("versions")["indices"].values():
        if need.wheel.name in index["packages"] and not (
            ordinary and need.wheel.name in ("torch", "vllm", "torchvision", "torchaudio")
        ):
            return str(index["url"].format(version=need.lock.version, accelerator=need.lock.accelerator))
    return None


class Fetcher:
    """One pip at work on one batch, in a folder of its own."""

    def __init__(self, batch: list[Need], folder: Path, index: str | None = None) -> None:
        self.batch = batch
        self.folder = folder
        self.index = index
        (folder / "wheels").mkdir(parents=True, exist_ok=True)
        requirements = folder / "requirements.txt"
        requirements.write_text(
            "".join(f"{need.wheel.name}=={need.wheel.version} --hash=sha256:{need.wheel.sha256}\n" for need in batch),
            encoding="utf-8",
        )
        self.log = open(folder / "log", "w+", encoding="utf-8")  # noqa: SIM115 (closed in `finish`)
        # TMPDIR: pip unpacks downloads there, and /tmp may be a small tmpfs. It also makes progress visible.
        environment = {**os.environ, "TMPDIR": str(folder), "PIP_REQUIRE_VIRTUALENV": "0"}
        self.process = subprocess.Popen(
            _pip_command(batch[0].lock, folder, index),
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    def bytes_so_far(self) -> int:
        """Bytes that lie in its folder at this moment."""
        total = 0
        for folder, _, names in os.walk(self.folder):  # unlike rglob, walk does not mind folders that vanish meanwhile
            for name in names:
                try:
                    total += os.stat(os.path.join(folder, name)).st_size if name.endswith(".whl") else 0
                except FileNotFoundError:  # pip moved it since
                    continue
        return min(total, sum(need.wheel.size for need in self.batch))

    def stop(self) -> None:
        """End it and what it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait()
        self.log.close()

    def complaint(self) -> str:
        """pip's own errors, without its warnings about folders that lack a package."""
        self.log.seek(0)
        lines = [line.strip() for line in self.log if re.match(r"\s*(ERROR|Expected|Got)", line)]
        return " ".join(lines[-4:]) or f"pip ended with status {self.process.returncode}"


def _pip_command(lock: Any, folder: Path, index: str | None) -> list[str]:
    """`pip download` for the lock's Python and platform, whatever Python runs it."""
    from gpu_fleet.locks import target_tags

    platforms = dict.fromkeys(tag.platform for tag in target_tags(lock.python, lock.architecture, lock.glibc))
    command = [
        *_pip(),
        "download",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--only-binary",
        ":all:",
        "--no-cache-dir",
    ]
    command += ["--disable-pip-version-check", "--no-input", "--implementation", "cp", "--python-version", lock.python]
    for platform in platforms:
        if platform != "any":
            command += ["--platform", platform]
    if index:
        command += ["--index-url", index, "--retries", "1"]
    return [*command, "--dest", str(folder / "wheels"), "--requirement", str(folder / "requirements.txt")]


def _pip() -> list[str]:
    """This environment's pip, or the system's."""
    import importlib.util

    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    pip = shutil.which("pip3") or shutil.which("pip")
    if not pip:
        raise WheelhouseError("there is no pip; run scripts/bootstrap")
    return [pip]


def fetch(
    lock_list: Iterable[Any],
    folder: Path,
    say: Callable[[str], None] = print,
    progress: Callable[[int, int, str], None] | None = None,
) -> Result:
    """Bring every wheel of the locks into the folder. `progress` is called with (bytes done, bytes in all, names).

    Raises WheelhouseError that lists every wheel that could not be had; the others are kept.
    """
    started = time.monotonic()
    needs: dict[str, Need] = {}
    for lock in lock_list:
        for wheel in lock.wheels:
            needs.setdefault(wheel.filename, Need(wheel, lock))
    house = Wheelhouse(folder)
    result = Result(wheels=len(needs))
    with house.turn(say):
        before = dict(house.record)
        wanted = []
        for need in needs.values():
            state = house.state(need.wheel)
            if state == "altered":
                say(f"{need.wheel.filename}: not what the lock names any more; fetching it again")
                result.altered.append(need.wheel.filename)
            if state != "right":
                wanted.append(need)
        try:
            problems = _fetch(wanted, house, result, progress)
        finally:
            if house.record != before:
                house.save()
    result.seconds = time.monotonic() - started
    if problems:
        raise WheelhouseError("\n".join(problems))
    return result


def _fetch(
    wanted: list[Need], house: Wheelhouse, result: Result, progress: Callable[[int, int, str], None] | None
) -> list[str]:
    """Make what is made here, let pips fetch the rest; returns what went wrong, one line a wheel."""
    for need in wanted:
        if need.wheel.made:
            _make(need, house)
            result.fetched += 1
    queue = batches(need for need in wanted if not need.wheel.made)
    total = sum(need.wheel.size for need in wanted)
    _check_space(house.folder, total)
    part = house.folder / f"{_PART}{os.getpid()}"
    at_work: list[Fetcher] = []
    problems: list[str] = []
    started = 0
    try:
        while queue or at_work:
            while queue and len(at_work) < WORKERS:
                at_work.append(Fetcher(queue.pop(0), part / str(started)))
                started += 1
            if progress:
                progress(result.fetched_bytes + sum(item.bytes_so_far() for item in at_work), total, _names(at_work))
            for fetcher in [item for item in at_work if item.process.poll() is not None]:
                at_work.remove(fetcher)
                index = special_index(fetcher.batch[0])
                if fetcher.process.returncode and len(fetcher.batch) > 1:
                    # pip keeps nothing when one of several fails: the others get another chance, each alone.
                    queue += [[need] for need in fetcher.batch]
                elif fetcher.process.returncode and index and not fetcher.index:
                    at_work.append(Fetcher(fetcher.batch, part / f"{started}", index))
                    started += 1
                else:
                    problems += _finish(fetcher, house, result)
                fetcher.log.close()
            time.sleep(0.1)
    finally:
        for fetcher in at_work:
            fetcher.stop()
        shutil.rmtree(
            part, ignore_errors=True
        )  # a leftover is removed by the next run, and the reason for it matters more
    return problems


def _finish(fetcher: Fetcher, house: Wheelhouse, result: Result) -> list[str]:
    """Take in what a pip brought."""
    problems = []
    for need in fetcher.batch:
        path = fetcher.folder / "wheels" / need.wheel.filename
        try:
            if not path.exists():
                raise WheelhouseError(_not_had(need, fetcher))
            house.take(path, need.wheel)
            result.fetched += 1
            result.fetched_bytes += need.wheel.size
        except WheelhouseError as error:
            problems.append(str(error))
    shutil.rmtree(fetcher.folder, ignore_errors=True)  # as above
    return problems


def _not_had(need: Need, fetcher: Fetcher) -> str:
    places = "where pip looks on this machine" + (f" nor at {fetcher.index}" if fetcher.index else "")
    return (
        f"{need.wheel.name}=={need.wheel.version} ({need.wheel.filename}) was found neither {places}; name a folder that has it with "
        f"PIP_FIND_LINKS or an index with PIP_EXTRA_INDEX_URL. pip says: {fetcher.complaint()}"
        if fetcher.index
        else f"{need.wheel.name}=={need.wheel.version} ({need.wheel.filename}) could not be fetched from {places}: {fetcher.complaint()}"
    )


def _make(need: Need, house: Wheelhouse) -> None:
    filename, content = locks.metadata_wheel(f"{need.wheel.name}=={need.wheel.version}", need.lock.engine)
    beside = house.folder / f"{_PART}{os.getpid()}-{filename}"
    beside.write_bytes(content)
    house.take(beside, need.wheel)


def _check_space(folder: Path, wanted: int) -> None:
    free = shutil.disk_usage(folder).free
    if wanted * 1.05 > free:
        raise WheelhouseError(
            f"{folder}: {wanted / 1e9:.1f} GB of wheels are to come and {free / 1e9:.1f} GB are free; make room or name another folder with --into"
        )


def _names(fetchers: Iterable[Fetcher]) -> str:
    return ", ".join(
        item.batch[0].wheel.name + (f" and {len(item.batch) - 1} more" if len(item.batch) > 1 else "")
        for item in fetchers
    )


def _fetch_with_bar(lock_list: list[Any], folder: Path) -> Result:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("wheels"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        return fetch(
            lock_list,
            folder,
            say=lambda text: console.print(text, highlight=False),
            progress=lambda done, total, names: bar.update(task, completed=done, total=total, description=names[:60]),
        )


def main(arguments: list[str] | None = None) -> int:
    """`python -m gpu_fleet.wheelhouse`: 0 all there, 1 wheels are missing, 2 used wrongly."""
    parser = argparse.ArgumentParser(
        prog="python -m gpu_fleet.wheelhouse", description="Fill a folder with exactly the wheels that locks name."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("fetch", help="bring in what is missing, put right what was altered")
    verb.add_argument("locks", nargs="+", type=Path, metavar="LOCK")
    verb.add_argument("--into", type=Path, default=default_folder(), help="the folder (default: %(default)s)")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` ends the pips
    try:
        result = _fetch_with_bar([read_lock(path) for path in given.locks], given.into)
    except WheelhouseError as error:
        print(f"wheelhouse: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("wheelhouse: stopped; whole wheels are kept, the next run goes on from there", file=sys.stderr)
        return 130
    print(
        f"{given.into}: {result.wheels} wheels, {result.fetched} of them fetched now ({result.fetched_bytes / 1e6:.0f} MB) in {result.seconds:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
