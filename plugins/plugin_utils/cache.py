"""The controller's cache of big things: ${XDG_CACHE_HOME:-~/.cache}/gpu_fleet, and digests of files that did not change."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import tree


def folder(*parts: str) -> Path:
    """A folder of the cache; made when absent."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = base.joinpath("gpu_fleet", *parts)
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel lets go of it when the process ends, however it ends."""
    with path.open("w", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def digests(root: Path, paths: Iterable[str]) -> dict[str, dict[str, Any]]:
    """{relative path: {"size", "sha256"}} of files under `root`; links to files are followed.

    A file is read again only when the kernel says that it changed (size, mtime, ctime or inode). Tasks for several
    hosts run at once: one of them reads, the others wait and find the digests. Raises OSError naming the file.
    """
    store = folder("models") / "digests.json"
    with locked(store.with_suffix(".lock")):
        known = _load(store)
        wanted = {path: _seen(root / path) for path in paths}
        stale = [path for path, seen in wanted.items() if known.get(_key(root / path), [None])[:-1] != seen]
        if stale:
            # A file changed within the kernel's clock tick of its own record would look unchanged ever after.
            tree.settle({"ctime_ns": wanted[path][2]} for path in stale)
            with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
                fresh = pool.map(lambda path: tree.sha256(str(root / path)), stale)
                known.update(
                    {_key(root / path): [*wanted[path], digest] for path, digest in zip(stale, fresh, strict=True)}
                )
            _save(store, known)
        return {path: {"size": seen[0], "sha256": known[_key(root / path)][-1]} for path, seen in wanted.items()}


def _key(path: Path) -> str:
    return os.path.realpath(path)


def _seen(path: Path) -> list[int]:
    info = path.stat()
    return [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]


def _load(store: Path) -> dict[str, list[Any]]:
    try:
        return json.loads(store.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # none yet, or one cut short: everything is read again
        return {}


def _save(store: Path, known: dict[str, list[Any]]) -> None:
    kept = {path: entry for path, entry in known.items() if os.path.exists(path)}
    beside = store.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps(kept), encoding="utf-8")
    beside.replace(store)
