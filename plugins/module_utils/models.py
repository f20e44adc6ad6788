# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a model's folder may hold, and how one is replaced on a host.

A manifest says what has to be there: {relative path: {"size": bytes, "sha256": hex}}.

On a host, in the store's folder (/var/lib/vllm/models)::

    NAME/               the model: files 0644, folders 0755, root's
    .NAME.record.json   digests and what the kernel said on arrival (module_utils/tree.py)
    .NAME.new/          what is arriving; kept when interrupted, so that whole files need not come again
    .NAME.old/          only between two renames, where the file system cannot swap two folders in one step

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import tree
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.findings import Finding, did_you_mean

Manifest = Mapping[str, Mapping[str, Any]]

# Formats that run code when they are loaded (Python's pickle): torch.save and its kin.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
WEIGHTS = (".safetensors", ".gguf")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
# What an entry of model_store_models may say; each is a text.
KEYS = ("name", "folder", "hub", "revision")
HUB = "https://huggingface.co"
REPOSITORY = re.compile(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+")
COMMIT = re.compile(r"[0-9a-f]{40}")
PLACEHOLDER = "0" * 40  # git's own for "no commit"; an example may have it until somebody chose a commit
# Left free on the disk beyond what arrives, so that the host itself goes on: 1 % of it, 256 MiB at least.
RESERVE, RESERVE_SHARE = 256 << 20, 0.01
_RENAME_EXCHANGE = 2  # linux/fs.h


class ModelError(Exception):
    """The model cannot be used or delivered; the message says why and what to do."""


@dataclass
class Content:
    """What is delivered of a source, and what is worth saying about it."""

    files: List[str] = field(default_factory=list)
    notes: List[str] = field(default_factory=list)


@dataclass
class Look:
    """What a host has of a model."""

    faults: List[str] = field(default_factory=list)  # sentences; empty: all is right
    need: List[str] = field(default_factory=list)  # paths that have to come
    hashed: int = 0


def judge(entries: Any, endpoint: str = HUB) -> List[Finding]:
    """What is wrong with model_store_models as it is written; no file and no hub is asked.

    A revision that is the placeholder is a warning: the inventory can be judged with it, but not deployed.
    """
    if not isinstance(entries, list):
        fix = "Write one entry a model, beginning with `- name:`"
        return [Finding("model", "model_store_models", f"it is {entries!r}, not a list", fix)]
    found: List[Finding] = []
    names: Dict[str, int] = {}
    for number, entry in enumerate(entries, 1):
        found.extend(judge_entry(entry, f"model_store_models, entry {number}", endpoint))
        name = str(entry.get("name") or "") if isinstance(entry, dict) else ""
        if name and name in names:
            message = f"two models are called {name} (entries {names[name]} and {number} of model_store_models)"
            found.append(Finding("model", f"model {name}", message, "Each needs a name of its own"))
        names.setdefault(name, number)
    return found


def judge_entry(entry: Any, where: str, endpoint: str = HUB) -> List[Finding]:
    """What is wrong with one entry; `where` is said of one that has no name."""
    if not isinstance(entry, dict) or not NAME.fullmatch(str(entry.get("name", ""))):
        shown = repr(entry.get("name", "missing") if isinstance(entry, dict) else entry)
        fix = "Its name has to be letters, digits, dots, dashes or underscores, a letter or digit first"
        what = f"the name is {shown}" if isinstance(entry, dict) else f"it is {shown}, which is no model"
        return [Finding("model", where, what, fix)]
    where = f"model {entry['name']}"
    found = []
    for key in entry:
        if key not in KEYS:
            fix = f"{did_you_mean(key, KEYS)}Known keys: {', '.join(sorted(KEYS))}"
            found.append(Finding("model", where, f"unknown key {key}", fix))
    if bool(entry.get("folder")) == bool(entry.get("hub")):
        has, fix = ("both", "Take one of them out") if entry.get("hub") else ("neither", "Add one of them")
        message = f"it has {has} of two sources: give either folder (of the controller) or hub with revision"
        found.append(Finding("model", where, message, fix))
    for key in ("folder", "hub"):
        if entry.get(key) and not isinstance(entry[key], str):
            found.append(Finding("model", where, f"{key} is {entry[key]!r}, which is no text", "Write it as a text"))
    if isinstance(entry.get("hub"), str) and entry["hub"]:
        found.extend(judge_hub(str(entry["name"]), entry["hub"], entry.get("revision"), endpoint))
    return found


def judge_hub(name: str, repository: str, revision: Any, endpoint: str = HUB) -> List[Finding]:
    """What is wrong with a repository's name and revision; the placeholder alone is only a warning."""
    where, found = f"model {name}", []
    right = bool(REPOSITORY.fullmatch(repository))
    if not right:
        found.append(Finding("model", where, f"hub {repository!r} is no ORGANISATION/NAME", "Write it as the hub does"))
    commits = f"{endpoint}/{repository}/commits/main shows the commits" if right else "The hub shows the commits"
    if revision is None or revision == "":
        message = "revision is missing, which is not a commit of 40 hex digits"
        fix = f"Without one the model could become another one overnight. {commits}"
        found.append(Finding("model", where, message, fix))
    elif not isinstance(revision, str):
        message = f"revision is {revision!r}, a number to YAML, which is not a commit of 40 hex digits"
        found.append(Finding("model", where, message, f"Put it in quotes. {commits}"))
    elif not COMMIT.fullmatch(revision):
        message = f"revision {revision!r} is not a commit of 40 hex digits"
        fix = f"A branch or a tag can become another model overnight. {commits}"
        found.append(Finding("model", where, message, fix))
    elif revision == PLACEHOLDER:
        message = "revision is the placeholder of forty zeros, which is no commit; it cannot be deployed"
        fix = f"Choose the commit that you have looked at. {commits}"
        found.append(Finding("model", where, message, fix, "warning"))
    return found


def choose(name: str, paths: List[str], allow_pickle: bool) -> Content:
    """Which files of a source are delivered. ModelError when the weights are only there as pickles.

    Hidden files and folders (.git, .cache, .gitattributes) are not part of a model.
    """
    visible = sorted(path for path in paths if not any(part.startswith(".") for part in path.split("/")))
    pickles = [path for path in visible if path.lower().endswith(PICKLES)]
    kept = visible if allow_pickle else [path for path in visible if path not in pickles]
    if pickles and not allow_pickle and not any(path.lower().endswith(WEIGHTS) for path in kept):
        raise ModelError(
            f"model {name}: the weights are there only in a format that runs code when it is loaded ({_some(pickles)}). "
            "Take a source with safetensors, or set model_store_allow_pickle: true if you trust this one"
        )
    if not kept:
        raise ModelError(f"model {name}: the source has no file")
    notes = []
    if pickles:
        what = (
            "delivered, as model_store_allow_pickle says"
            if allow_pickle
            else "left out: they run code when they are loaded"
        )
        notes.append(f"model {name}: {_some(pickles)} {what}")
    code = [path for path in kept if path.endswith(".py")]
    if code:
        notes.append(f"model {name}: has code of its own ({_some(code)}), which runs only with trust-remote-code")
    return Content(kept, notes)


def examine(store: str, name: str, manifest: Manifest, rehash: bool = False) -> Look:
    """Compare a host's folder with the manifest, by stat against the record of its arrival.

    Without a usable record every file is hashed. The record is refreshed where only times or inode changed.
    """
    root, result = os.path.join(store, name), Look()
    recorded = _record_of(store, name)
    if recorded is None:
        there = _everything_hashed(root)
        recorded = there or {"files": {}, "directories": {}}
        result.hashed = len(recorded["files"])
        found = {} if there else dict.fromkeys(manifest, "missing")
        faults = [] if there is None else [f"{root} had no usable record"]
    else:
        looked = tree.examine(root, recorded, rehash)
        if looked.refreshed and not looked.differences:
            tree.save(record_path(store, name), looked.record)
        result.hashed = looked.hashed
        found = {item.path: f"{item.what} ({item.detail})" for item in looked.differences}
        faults = []
    _access_faults(root, found)
    for path, wanted in manifest.items():
        entry = recorded["files"].get(path)
        if entry is None or entry.get("sha256") != wanted["sha256"]:
            found.setdefault(path, "missing" if entry is None else "another content than the source's")
    for path in set(recorded["files"]) - set(manifest):
        found.setdefault(path, "extra")
    result.faults = faults + [f"{os.path.join(root, path)}: {what}" for path, what in sorted(found.items())]
    result.need = [
        path for path in manifest if path in found and not _only_access(root, path, manifest[path], found[path])
    ]
    return result


def staged(store: str, name: str, manifest: Manifest, need: List[str]) -> List[str]:
    """Those of the needed files that an interrupted run already brought whole."""
    folder = staging_path(store, name)
    right = []
    for path in need:
        full = os.path.join(folder, path)
        whole = os.path.isfile(full) and not os.path.islink(full) and os.path.getsize(full) == manifest[path]["size"]
        if whole and tree.sha256(full) == manifest[path]["sha256"]:
            right.append(path)
    return right


def check_space(store: str, name: str, need_bytes: int) -> None:
    """ModelError when what has to come does not fit; says how much is needed and free."""
    free, total = space(store)
    reserve = max(RESERVE, int(total * RESERVE_SHARE)) if need_bytes else 0
    if need_bytes + reserve > free:
        raise ModelError(
            f"model {name} does not fit: {size(need_bytes)} have to come to {store}, {size(free)} are free there "
            f"and {size(reserve)} are to stay free. Make room, or set model_store_path to a bigger disk. "
            "Nothing was changed, a former model is as it was"
        )


def space(store: str) -> "tuple[int, int]":
    """Bytes that root may still write on the disk of the store (or of the nearest folder above it), and its size."""
    folder = store
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    info = os.statvfs(folder)
    return info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize


def prepare_staging(store: str, name: str, paths: List[str], keep: List[str], uid: int) -> str:
    """Make the folder that files arrive in, owned by who brings them; returns it. What is not in `keep` is removed."""
    os.makedirs(store, mode=0o755, exist_ok=True)
    folder = staging_path(store, name)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    for path in _files_below(folder):
        if path not in keep:
            os.unlink(os.path.join(folder, path))
    for path in [*paths, *keep]:
        os.makedirs(os.path.dirname(os.path.join(folder, path)), exist_ok=True)
    for where, _dirs, _files in os.walk(folder):
        os.chown(where, uid, -1)
    return folder


def install(store: str, name: str, manifest: Manifest, need: List[str]) -> None:
    """Put what arrived in place: check every digest, complete it with what is right already, swap, record.

    ModelError when a file did not arrive as it was sent; the former model then stays.
    """
    root, folder = os.path.join(store, name), staging_path(store, name)
    for path in need:
        full = os.path.join(folder, path)
        if not os.path.isfile(full) or tree.sha256(full) != manifest[path]["sha256"]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(full)
            raise ModelError(
                f"model {name}: {path} did not arrive as it was sent. Run again; the former model is as it was"
            )
    for path in _files_below(folder):
        if path not in need:
            os.unlink(os.path.join(folder, path))
    for path in manifest:
        if path not in need:
            _take_over(os.path.join(root, path), os.path.join(folder, path))
    _set_access(folder)
    _sync(folder, need)
    with contextlib.suppress(FileNotFoundError):
        # From here to the end of the next line but one no record is true; without one the next run hashes.
        os.unlink(record_path(store, name))
    swap(folder, root)
    tree.save(
        record_path(store, name), tree.record_known(root, {path: entry["sha256"] for path, entry in manifest.items()})
    )
    if os.path.islink(folder):
        os.unlink(folder)  # somebody had put a link in the model's place
    shutil.rmtree(folder, ignore_errors=True)  # the former model; what is left is removed by the next delivery


def swap(new: str, current: str) -> None:
    """Make `new` the folder `current`, and the former one, if there is one, `new`: in one step where the kernel can."""
    if not os.path.lexists(current):
        os.rename(new, current)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    at_cwd = -100  # AT_FDCWD, fcntl.h; both paths are absolute anyway
    if (
        hasattr(libc, "renameat2")
        and libc.renameat2(at_cwd, os.fsencode(new), at_cwd, os.fsencode(current), _RENAME_EXCHANGE) == 0
    ):
        return
    old = old_path(current)
    shutil.rmtree(old, ignore_errors=True)
    os.rename(current, old)
    os.rename(new, current)
    os.rename(old, new)


def recover(store: str, name: str) -> None:
    """Undo a swap that was cut between its renames."""
    current = os.path.join(store, name)
    if not os.path.lexists(current) and os.path.isdir(old_path(current)):
        os.rename(old_path(current), current)


def left_over(store: str, names: List[str]) -> List[str]:
    """Folders of the store that no model of the inventory is called after."""
    try:
        entries = os.listdir(store)
    except FileNotFoundError:
        return []
    return sorted(item for item in entries if not item.startswith(".") and item not in names and item != "lost+found")


def record_path(store: str, name: str) -> str:
    return os.path.join(store, f".{name}.record.json")


def staging_path(store: str, name: str) -> str:
    return os.path.join(store, f".{name}.new")


def old_path(current: str) -> str:
    return os.path.join(os.path.dirname(current), f".{os.path.basename(current)}.old")


def size(count: int) -> str:
    """Bytes for people: 1.5 GiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _some(paths: List[str]) -> str:
    shown = ", ".join(paths[:3])
    return shown if len(paths) <= 3 else f"{shown} and {len(paths) - 3} more"


def _record_of(store: str, name: str) -> Optional[tree.Record]:
    try:
        return tree.load(record_path(store, name))
    except tree.TreeError:
        return None


def _everything_hashed(root: str) -> Optional[tree.Record]:
    if not os.path.isdir(root) or os.path.islink(root):
        return None
    return tree.record(root)


def _access_faults(root: str, found: Dict[str, str]) -> None:
    """Whatever was recorded: every file has to be 0644 of root's, every folder 0755, so that any user can read it."""
    if not os.path.isdir(root) or os.path.islink(root):
        return
    files, directories = tree.look(root)
    for entries, mode in ((files, 0o644), (directories, 0o755)):
        for path, entry in entries.items():
            if (entry["mode"], entry["uid"], entry["gid"]) != (mode, os.geteuid(), os.getegid()):
                shown = f"{entry['mode']:04o} of {entry['uid']}:{entry['gid']}"
                found.setdefault(path, f"access {shown}, wanted {mode:04o} of root")


def _only_access(root: str, path: str, wanted: Mapping[str, Any], why: str) -> bool:
    """Whether a file's content is right although something about it is not: then nothing has to come."""
    if why.startswith(("missing", "extra", "another content")):
        return False
    full = os.path.join(root, path)
    return os.path.isfile(full) and not os.path.islink(full) and tree.sha256(full) == wanted["sha256"]


def _files_below(folder: str) -> List[str]:
    return [
        os.path.relpath(os.path.join(where, name), folder) for where, _dirs, names in os.walk(folder) for name in names
    ]


def _take_over(source: str, target: str) -> None:
    """The same file under a second name, without copying; a copy where the file system has no links."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _set_access(folder: str) -> None:
    """Readable by every service user, writable by root alone; empty folders are no part of a model."""
    for where, dirs, names in os.walk(folder, topdown=False):
        if not dirs and not names and where != folder:
            os.rmdir(where)
            continue
        for name in names:
            full = os.path.join(where, name)
            os.chown(full, os.geteuid(), os.getegid())
            os.chmod(full, 0o644)
        os.chown(where, os.geteuid(), os.getegid())
        os.chmod(where, 0o755)


def _sync(folder: str, paths: List[str]) -> None:
    """On the disk before the rename: after a power cut a model is the former or the new one."""
    for path in paths:
        handle = os.open(os.path.join(folder, path), os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
