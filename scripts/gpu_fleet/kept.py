"""What a run leaves on the controller: a folder of its own, and a lock while it changes a fleet.

    ~/.local/state/gpu_fleet/runs/2026-11-30T07.15.00-site-x1y2z3/    (XDG_STATE_HOME in place of ~/.local/state)
        result.json                    what `--json` prints
        artifacts/run/stdout           what ansible-playbook said
        artifacts/run/job_events/      every event, a JSON file each

0700; secrets are not in it as long as tasks hide them (no_log), which those of the collection do.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

KEEP = 20  # finished runs
UNFINISHED_DAYS = 7.0  # a run that was killed leaves no result


class CannotKeep(Exception):
    """There is no place for what a run leaves; the message has the remedy."""


class Busy(Exception):
    """Another run changes the same fleet; the message says which."""


def state() -> Path:
    """The folder of everything that runs leave."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "gpu_fleet"


def new(name: str) -> Path:
    """A new folder for a run, for this user alone; the oldest ones go."""
    folder = state() / "runs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f"{time.strftime('%Y-%m-%dT%H.%M.%S')}-{name}-", dir=folder))
    except (OSError, RuntimeError) as error:
        raise CannotKeep(
            f"{folder}: {getattr(error, 'strerror', None) or error}; runs leave their logs there. "
            "Name a folder that can be written in XDG_STATE_HOME, and one in ANSIBLE_HOME where ~/.ansible cannot be written either"
        ) from error
    _prune(folder)
    return made


def _prune(folder: Path) -> None:
    runs = sorted(path for path in folder.iterdir() if path.is_dir())
    finished = [path for path in runs if (path / "result.json").exists()]
    old = time.time() - UNFINISHED_DAYS * 86400
    for path in [*finished[:-KEEP], *(path for path in runs if path not in finished and path.stat().st_mtime < old)]:
        shutil.rmtree(path, ignore_errors=True)


def clean(folder: Path) -> None:
    """Take away what a run needed and nobody reads later: variables, passwords, the environment."""
    shutil.rmtree(folder / "env", ignore_errors=True)
    for path in folder.glob("artifacts/*/command"):
        path.unlink()
    for path in folder.glob("artifacts/*/fact_cache"):
        shutil.rmtree(path, ignore_errors=True)


def write(path: Path, document: object) -> None:
    """JSON that its owner alone may read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
        json.dump(document, out, indent=1, default=str)


@contextlib.contextmanager
def changing(inventory: Path, what: str) -> Iterator[None]:
    """One run at a time changes the fleet of an inventory from this machine. Raises Busy."""
    folder = state() / "locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(str(inventory.resolve()).encode()).hexdigest()[:16]
        lock = open(folder / name, "a+", encoding="utf-8")  # noqa: SIM115  closed below
    except OSError as error:
        raise CannotKeep(f"{folder}: {error.strerror}; name a folder that can be written in XDG_STATE_HOME") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise Busy(
                f"{inventory} is being changed by another run ({lock.read().strip() or 'just begun'}); wait for it, or end it"
            ) from None
        lock.truncate(0)
        lock.write(f"{what}, process {os.getpid()}, since {time.strftime('%H:%M:%S')}")
        lock.flush()
        yield
