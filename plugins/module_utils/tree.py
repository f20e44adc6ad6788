# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Look at big trees of files without reading gigabytes.

A release has some 40,000 files, a model up to hundreds of GB. Their content is hashed once, when it
arrives; `record` keeps each file's digest together with what the kernel says about it. Later runs ask
the kernel again (one lstat a file, well under a second for 40,000) and hash only what it says changed.

Why ctime is among what is compared: mtime can be set back by anybody who owns the file (`touch -d`),
ctime cannot; the kernel sets it on every change of content, mode, owner or name of the file
(inode(7)). Only a clock set back on purpose defeats it, and against that there is `rehash=True`.

A record, as plain data (JSON keeps it)::

    {"files": {"config.json": {"size": 704,           # bytes
                               "mtime_ns": 17...,      # nanoseconds since 1970, as st_mtime_ns
                               "ctime_ns": 17...,      # the same, st_ctime_ns
                               "inode": 131,
                               "mode": 420,            # permission bits as a number, 420 is 0o644
                               "uid": 0, "gid": 0,
                               "sha256": "9f86..."}},  # hex
     "directories": {".": {"mode": 493, "uid": 0, "gid": 0}}}

A symbolic link is recorded by its target (`"link": "../x"` in place of a digest), never followed.
A device, socket or FIFO has `"special": true`. Paths are relative, with `/`.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

# ruff: noqa: B905  (zip(strict=) came with Python 3.10; hosts have 3.9)
from __future__ import annotations

import concurrent.futures
import fnmatch
import hashlib
import json
import os
import stat
import time
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple

Entry = Dict[str, Any]
Record = Dict[str, Dict[str, Entry]]

_CHUNK = 1 << 20
# What the kernel says about a file that nobody touched. `inode` finds a file replaced by a copy.
_STAT_KEYS = ("size", "mtime_ns", "ctime_ns", "inode", "mode", "uid", "gid")
# The kernel stamps files with a clock that is up to one tick (10 ms at 100 Hz) behind.
_TICK_NS = 20_000_000
_COLUMNS = (*_STAT_KEYS, "sha256", "link", "special")
_VERSION = 1


class TreeError(Exception):
    """The tree or the record cannot be used; the message names the path and the reason."""


@dataclass(frozen=True)
class Difference:
    """One path that is not as recorded."""

    path: str
    what: str  # missing, extra, altered
    detail: str  # what exactly, for a person

    def as_dict(self) -> Dict[str, str]:
        """Plain data, as a module returns it."""
        return {"path": self.path, "what": self.what, "detail": self.detail}


@dataclass
class Examination:
    """What a look at a tree found.

    `differences` is sorted by path. `record` is the old record with the kernel's present values for
    files whose content proved right, so that they are not hashed again next time; `refreshed` says
    whether it differs from the old one and is worth keeping. `hashed` counts files read.
    """

    differences: List[Difference] = field(default_factory=list)
    record: Record = field(default_factory=dict)
    refreshed: bool = False
    hashed: int = 0


def sha256(path: str) -> str:
    """SHA-256 of a file's content, in hex; OSError as open() raises it."""
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as handle:
        while True:
            count = handle.readinto(buffer)
            if not count:
                return digest.hexdigest()
            digest.update(view[:count])


def record(root: str, ignore: Iterable[str] = ()) -> Record:
    """Hash every file under `root` and note what the kernel says about each.

    `ignore` holds names or shell patterns (fnmatch) compared with the last part and with the whole
    relative path, for files and folders: ("__pycache__", ".complete"). Waits up to 20 ms so that
    no file can change within the clock tick of its own record. Raises TreeError when `root` is no
    folder or a file changes while it is read.
    """
    files, directories = look(root, ignore)
    settle(files.values())
    for path, digest in _digests(root, [path for path, entry in files.items() if _has_content(entry)]).items():
        _check_still(root, path, files[path])
        files[path]["sha256"] = digest
    return {"files": files, "directories": directories}


def record_known(root: str, digests: Dict[str, str], ignore: Iterable[str] = ()) -> Record:
    """Like `record`, for files whose digests were found out just now and need no second reading.

    Raises TreeError when a file has no digest in `digests`.
    """
    files, directories = look(root, ignore)
    settle(files.values())
    for path, entry in files.items():
        if _has_content(entry):
            if path not in digests:
                raise TreeError(f"{os.path.join(root, path)}: no digest is known")
            entry["sha256"] = digests[path]
    return {"files": files, "directories": directories}


def differences(root: str, recorded: Record, rehash: bool = False, ignore: Iterable[str] = ()) -> List[Dict[str, str]]:
    """What under `root` is not as recorded, as a list of {path, what, detail}; see `examine`."""
    return [item.as_dict() for item in examine(root, recorded, rehash, ignore).differences]


def examine(root: str, recorded: Record, rehash: bool = False, ignore: Iterable[str] = ()) -> Examination:
    """Compare a tree with its record.

    Every file is asked for by lstat. Where the answer is not the recorded one the content is hashed
    and decides: the same content with the same mode and owner is no difference (and the record is
    refreshed). `rehash` reads every file whatever the kernel says. A missing `root` makes every
    recorded file missing.
    """
    ignore = tuple(ignore)
    if os.path.isdir(root) and not os.path.islink(root):
        files, directories = look(root, ignore)
    else:
        files, directories = {}, {}
    wanted = {path: entry for path, entry in recorded["files"].items() if not _ignored(path, ignore)}
    result = Examination(record={"files": dict(wanted), "directories": recorded.get("directories", {})})
    doubtful = _doubtful(files, wanted, rehash, result)
    settle(files[path] for path in doubtful)
    for path, digest in _digests(root, doubtful).items():
        result.hashed += 1
        _decide(path, files[path], digest, wanted[path], result)
    _compare_directories(directories, recorded.get("directories", {}), result)
    result.differences.sort(key=lambda item: item.path)
    return result


def look(root: str, ignore: Iterable[str] = ()) -> Tuple[Dict[str, Entry], Dict[str, Entry]]:
    """What the kernel says about everything under `root`, nothing read: (files, directories)."""
    try:
        top = os.lstat(root)
    except OSError as error:
        raise TreeError(f"{root}: {error.strerror}") from error
    if not stat.S_ISDIR(top.st_mode):
        raise TreeError(f"{root}: not a folder")
    files: Dict[str, Entry] = {}
    directories = {".": _access(top)}
    for path, info in _walk(root, "", tuple(ignore)):
        if stat.S_ISDIR(info.st_mode):
            directories[path] = _access(info)
        else:
            files[path] = _entry(os.path.join(root, path), info)
    return files, directories


def save(path: str, recorded: Record) -> None:
    """Write a record beside its final place and rename it: whole or not at all. Mode 0644."""
    rows = {name: [entry.get(column) for column in _COLUMNS] for name, entry in sorted(recorded["files"].items())}
    content = {
        "version": _VERSION,
        "columns": list(_COLUMNS),
        "files": rows,
        "directories": recorded.get("directories", {}),
    }
    beside = f"{path}.new"
    with open(beside, "w", encoding="utf-8") as handle:
        json.dump(content, handle, separators=(",", ":"))
        handle.flush()
        os.fsync(handle.fileno())
    os.chmod(beside, 0o644)
    os.replace(beside, path)


def load(path: str) -> Optional[Record]:
    """Read what `save` wrote; None where there is none.

    A record that cannot be read or was cut short raises TreeError: the caller decides whether that
    means "hash again" or "stop".
    """
    try:
        with open(path, encoding="utf-8") as handle:
            content = json.load(handle)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TreeError(f"{path}: not a readable record ({error})") from error
    try:
        if content["version"] != _VERSION:
            raise TreeError(f"{path}: a record of version {content['version']}, this code reads {_VERSION}")
        columns = content["columns"]
        files = {
            name: {key: value for key, value in zip(columns, row) if value is not None}
            for name, row in content["files"].items()
        }
        return {"files": files, "directories": content["directories"]}
    except (KeyError, TypeError, AttributeError) as error:
        raise TreeError(f"{path}: not a record of a tree ({error})") from error


def _walk(root: str, below: str, ignore: Tuple[str, ...]) -> Iterator[Tuple[str, os.stat_result]]:
    """Every path under root with its lstat, folders before what is in them."""
    with os.scandir(os.path.join(root, below) if below else root) as entries:
        for entry in entries:
            path = f"{below}/{entry.name}" if below else entry.name
            if ignore and _matches(entry.name, path, ignore):
                continue
            info = entry.stat(follow_symlinks=False)
            yield path, info
            if stat.S_ISDIR(info.st_mode):
                yield from _walk(root, path, ignore)


def _matches(name: str, path: str, ignore: Tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, item) or fnmatch.fnmatchcase(path, item) for item in ignore)


def _ignored(path: str, ignore: Tuple[str, ...]) -> bool:
    """Whether the walk would have left this path out: itself or a folder above it."""
    if not ignore:
        return False
    parts = path.split("/")
    return any(_matches(part, "/".join(parts[: count + 1]), ignore) for count, part in enumerate(parts))


def _access(info: os.stat_result) -> Entry:
    return {"mode": stat.S_IMODE(info.st_mode), "uid": info.st_uid, "gid": info.st_gid}


def _entry(path: str, info: os.stat_result) -> Entry:
    entry: Entry = {
        "size": info.st_size,
        "mtime_ns": info.st_mtime_ns,
        "ctime_ns": info.st_ctime_ns,
        "inode": info.st_ino,
        **_access(info),
    }
    if stat.S_ISLNK(info.st_mode):
        entry["link"] = os.readlink(path)
    elif not stat.S_ISREG(info.st_mode):
        entry["special"] = True
    return entry


def _has_content(entry: Entry) -> bool:
    return "link" not in entry and not entry.get("special")


def _kind(entry: Entry) -> str:
    if "link" in entry:
        return "a symbolic link"
    return "a special file" if entry.get("special") else "a file"


def settle(entries: Iterable[Entry]) -> None:
    """Wait until the newest change lies more than a clock tick in the past.

    Otherwise a second change within the same tick would leave size and both times as recorded. A
    stamp from the future (clock set back) is not waited for: it cannot come again by itself.
    """
    now = time.time_ns()
    newest = max((entry["ctime_ns"] for entry in entries if entry["ctime_ns"] <= now), default=0)
    left = newest + _TICK_NS - now
    if left > 0:
        time.sleep(left / 1e9)


def _digests(root: str, paths: List[str]) -> Dict[str, str]:
    """Digest of each path. Threads help: hashlib lets go of the interpreter lock on big buffers."""
    full = [os.path.join(root, path) for path in paths]
    workers = min(8, os.cpu_count() or 1, len(paths))
    try:
        if workers < 2:
            return dict(zip(paths, map(sha256, full)))
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            return dict(zip(paths, pool.map(sha256, full)))
    except OSError as error:
        raise TreeError(f"{error.filename}: {error.strerror}") from error


def _check_still(root: str, path: str, entry: Entry) -> None:
    full = os.path.join(root, path)
    now = _entry(full, os.lstat(full))
    if any(now[key] != entry[key] for key in _STAT_KEYS):
        raise TreeError(f"{full}: changed while it was read")


def _doubtful(files: Dict[str, Entry], wanted: Dict[str, Entry], rehash: bool, result: Examination) -> List[str]:
    """The paths whose content has to decide; notes what is missing, extra or of another kind."""
    found = result.differences
    doubtful = []
    for path in wanted.keys() - files.keys():
        found.append(Difference(path, "missing", "recorded, but not there"))
    for path in files.keys() - wanted.keys():
        found.append(Difference(path, "extra", "there, but not recorded"))
    for path in files.keys() & wanted.keys():
        now, then = files[path], wanted[path]
        if _kind(now) != _kind(then):
            found.append(Difference(path, "altered", f"{_kind(now)}, recorded was {_kind(then)}"))
        elif now.get("link") != then.get("link"):
            found.append(Difference(path, "altered", f"points at {now['link']}, recorded was {then['link']}"))
        elif _has_content(now) and (rehash or any(now[key] != then[key] for key in _STAT_KEYS)):
            doubtful.append(path)
    return doubtful


def _decide(path: str, now: Entry, digest: str, then: Entry, result: Examination) -> None:
    """Content and access decide; times and inode alone are only refreshed."""
    if digest != then["sha256"]:
        detail = f"content is {digest[:12]}, recorded was {then['sha256'][:12]}"
        result.differences.append(Difference(path, "altered", detail))
        return
    wrong = _access_detail(now, then)
    if wrong:
        result.differences.append(Difference(path, "altered", wrong))
        return
    fresh = {**now, "sha256": digest}
    if fresh != then:
        result.record["files"][path] = fresh
        result.refreshed = True


def _access_detail(now: Entry, then: Entry) -> str:
    words = []
    if now["mode"] != then["mode"]:
        words.append(f"mode {now['mode']:04o}, recorded was {then['mode']:04o}")
    if (now["uid"], now["gid"]) != (then["uid"], then["gid"]):
        words.append(f"owner {now['uid']}:{now['gid']}, recorded was {then['uid']}:{then['gid']}")
    return "; ".join(words)


def _compare_directories(now: Dict[str, Entry], then: Dict[str, Entry], result: Examination) -> None:
    """A folder nobody may enter hides right files; an extra empty one harms nothing."""
    for path in now.keys() & then.keys():
        wrong = _access_detail(now[path], then[path])
        if wrong:
            result.differences.append(Difference(path, "altered", wrong))
