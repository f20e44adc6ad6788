# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Releases on a host: looked at, built from a lock, put right.

A release is a folder ROOT/VERSION-ACCELERATOR-LOCKID. It is built beside its place, in ROOT/.building-PID, and renamed
when everything in it is right, so that a release is there whole or not at all. It holds two files of ours, written last:

    .manifest.json   what every file was when it arrived, see module_utils/tree.py
    .complete        the lock's digest; without it the folder is no release

Nobody runs in it with bytecode switched on: Python would write __pycache__ into it. Files that are in it without having
been installed are removed; a file that was altered or is missing means that the release is built anew.

Pure: standard library, Python 3.9 and newer, no Ansible import. Sizes in bytes.
"""

from __future__ import annotations

import configparser
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from . import locks, tree

OWN_FILES = (".complete", ".manifest.json", ".manifest.json.new")  # not in the manifest
BUILDING = ".building-"
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EIO)
# Installed size over the size of the wheels: 3.4 measured for the CPU release of 0.32.0 (612 MB of wheels), less for CUDA.
GROWTH = 3.6
_SHOWN = 8  # differences named in messages; the count says how many there are

_PROBE = (
    "import json, os, platform, sys, sysconfig;"
    "print(json.dumps({'version': '%d.%d' % sys.version_info[:2], 'full': platform.python_version(),"
    " 'architecture': platform.machine(), 'glibc': os.confstr('CS_GNU_LIBC_VERSION').split()[-1],"
    " 'headers': os.path.exists(os.path.join(sysconfig.get_paths()['include'], 'Python.h'))}))"
)
_LACKING = re.compile(r"was not found|no version|no usable wheels|No solution found")
_SYSTEM_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"  # Debian's ca-certificates
# Loads the biggest compiled part and asks for what vLLM asks at its start: its own version.
_TRIAL = "import importlib.metadata as m, importlib.util as u, torch; assert u.find_spec('vllm'), 'no package vllm'; print(m.version('vllm'))"

# Options of the module gpu_fleet.vllm.release, for its two parts.
ARGUMENTS = {
    "state": {"type": "str", "choices": ["looked", "present"], "default": "present"},
    "version": {"type": "str", "required": True},
    "accelerator": {"type": "str", "required": True},
    "lock": {"type": "path"},
    "addons": {"type": "list", "elements": "str", "default": []},
    "root": {"type": "path", "default": "/opt/vllm/releases"},
    "python": {"type": "path", "default": "/usr/bin/python3"},
    "packages": {"type": "list", "elements": "str", "default": []},
    "source": {"type": "str", "choices": ["index", "mirror", "wheelhouse"], "default": "wheelhouse"},
    "wheelhouse": {"type": "path"},
    "wheelhouse_on_host": {"type": "path"},
    "index_url": {"type": "str"},
    "extra_index_urls": {"type": "list", "elements": "str", "default": []},
    "find_links": {"type": "list", "elements": "str", "default": []},
    "proxy": {"type": "str"},
    "ca_certificate": {"type": "path"},
    "uv": {"type": "path"},
    "wait": {"type": "int", "default": 900},
}


class ReleaseError(Exception):
    """The release cannot be had; the message says what is wrong and what to do, and no user and password of a URL."""

    def __init__(self, message: str) -> None:
        super().__init__(without_user(message))


def without_user(text: str) -> str:
    """The text with user:password@ taken out of its URLs."""
    return re.sub(r"(\w://)[^/\s@]+@", r"\1", text)


@dataclass(frozen=True)
class Source:
    """Where the wheels come from.

    `folder`: a folder on this host, nothing else is asked. Otherwise an index; without one, this host's pip settings.
    `fallbacks`: package to an index that is asked for that package alone, and only when the first place lacks it.
    """

    folder: Optional[str] = None
    index_url: Optional[str] = None
    extra_index_urls: Tuple[str, ...] = ()
    find_links: Tuple[str, ...] = ()
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)  # proxy, CA bundle


def probe_python(path: str) -> Dict[str, Any]:
    """Version, architecture, glibc and headers of an interpreter. Raises ReleaseError."""
    try:
        run = subprocess.run(
            [path, "-I", "-B", "-c", _PROBE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False
        )
    except OSError as error:
        raise ReleaseError(
            f"{path}: {error.strerror}; vllm_runtime_python has to name a Python interpreter on the host"
        ) from error
    if run.returncode:
        raise ReleaseError(f"{path} does not run: {run.stderr.strip()[-300:]}")
    return {"path": path, **json.loads(run.stdout)}


def missing_packages(names: Sequence[str]) -> List[str]:
    """Debian packages of these that are not installed (dpkg-query)."""
    if not names:
        return []
    run = subprocess.run(
        ["dpkg-query", "--show", "--showformat", "${Package} ${db:Status-Status}\n", *names],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False,
    )  # fmt: skip
    installed = {line.split()[0] for line in run.stdout.splitlines() if line.endswith(" installed")}
    return [name for name in names if name not in installed]


def closed_folders(root: str) -> List[str]:
    """Those of a folder and the ones above it that only their owner and group may enter."""
    path, closed = os.path.realpath(root), []
    while path != "/":
        if os.path.isdir(path) and not os.stat(path).st_mode & 0o001:
            closed.append(path)
        path = os.path.dirname(path)
    return closed


def foreign_cuda(listing: Optional[str] = None) -> List[str]:
    """CUDA libraries that the loader would find without any release: a toolkit's libcudart, a cuda-compat libcuda.

    A release brings its own CUDA user space; another one on the loader's path can be picked up in its place.
    `listing` is what `ldconfig -p` printed.
    """
    if listing is None:
        ldconfig = shutil.which("ldconfig", path="/usr/sbin:/sbin:/usr/bin:/bin")
        if ldconfig is None:
            return []
        listing = subprocess.run([ldconfig, "-p"], stdout=subprocess.PIPE, text=True, check=False).stdout
    paths = re.findall(r"=> (\S+)$", listing, re.MULTILINE)
    return sorted({path for path in paths if re.search(r"/libcudart\.so|/compat/[^ ]*libcuda\.so", path)})


@dataclass
class State:
    """What lies at a release's place."""

    state: str  # absent, right, altered, or incomplete
    differences: List[Dict[str, str]] = field(default_factory=list)
    detail: str = ""

    @property
    def removable(self) -> bool:
        """Whether taking away what was added is enough."""
        return (
            self.state == "altered"
            and bool(self.differences)
            and all(item["what"] == "extra" for item in self.differences)
        )


def look(path: str, digest: str, refresh: bool = False) -> State:
    """Compare a release with its manifest: one lstat a file, content only where that differs.

    `refresh` keeps new stat values of files whose content proved right, so that they are not read again next time.
    """
    if not os.path.lexists(path):
        return State("absent")
    try:
        with open(os.path.join(path, ".complete"), encoding="utf-8") as handle:
            complete = json.load(handle)
        manifest = tree.load(os.path.join(path, ".manifest.json"))
    except (OSError, ValueError, tree.TreeError) as error:
        return State("incomplete", detail=str(error))
    if not isinstance(complete, dict) or complete.get("lock_digest") != digest or manifest is None:
        return State("incomplete", detail="it was not made from this lock")
    # Own files are taken out afterwards: matching 35,000 paths with patterns takes longer than the look itself.
    found = tree.examine(path, manifest)
    differences = [item.as_dict() for item in found.differences if item.path not in OWN_FILES]
    if differences:
        return State("altered", differences)
    if refresh and found.refreshed:
        with contextlib.suppress(OSError):  # a disk that is read-only, or full: the next look reads those files again
            tree.save(os.path.join(path, ".manifest.json"), found.record)
    return State("right")


def others(root: str, release_id: str) -> List[str]:
    """Names of the other releases under root, oldest name first; they are listed and left alone."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    return sorted(
        name for name in names if name != release_id and os.path.exists(os.path.join(root, name, ".complete"))
    )


def shown(differences: Sequence[Mapping[str, str]]) -> str:
    """Differences for a person, the first few of them."""
    lines = [f"{item['path']}: {item['what']}, {item['detail']}" for item in differences[:_SHOWN]]
    more = len(differences) - _SHOWN
    return "\n".join([*lines, f"and {more} more"] if more > 0 else lines)


def remove_extra(path: str, state: State) -> None:
    """Take away files that were never installed, and folders that are empty without them."""
    for item in state.differences:
        target = os.path.join(path, item["path"])
        os.unlink(target)
        folder = os.path.dirname(target)
        while folder != path and not os.listdir(folder):
            os.rmdir(folder)
            folder = os.path.dirname(folder)


@dataclass(frozen=True)
class Tools:
    """What builds a release: an interpreter of this host and a binary of uv."""

    python: str
    uv: str


def build(lock_text: str, root: str, tools: Tools, source: Source, wait: int = 900) -> Dict[str, Any]:
    """Build the lock's release in its place; what was there before stays until the new one is right.

    `wait`: seconds to wait for another build on this host. Returns {id, path, seconds}. Raises ReleaseError.
    """
    try:
        lock = locks.parse(lock_text)
    except locks.LockError as error:
        raise ReleaseError(str(error)) from error
    found = probe_python(tools.python)
    _check_fits(lock, found)
    started = time.monotonic()
    with writing(root), _alone(root, wait):
        _remove_dead(root)
        if look(os.path.join(root, lock.id), lock.digest).state == "right":  # another run was faster
            return {"id": lock.id, "path": os.path.join(root, lock.id), "seconds": 0.0}
        _check_space(root, room_for(lock), lock.id)
        _check_inodes(root, lock)
        work = os.path.join(root, f"{BUILDING}{os.getpid()}")
        os.umask(0o022)
        os.mkdir(work, 0o755)
        try:
            release = _install(lock, work, tools, source)
            _try(release)
            _finish(release, lock, found)
            _swap(release, os.path.join(root, lock.id), work)
        finally:
            shutil.rmtree(work, ignore_errors=True)  # the next run removes what is left; the first error matters more
    return {"id": lock.id, "path": os.path.join(root, lock.id), "seconds": round(time.monotonic() - started, 1)}


@contextlib.contextmanager
def writing(folder: str) -> Iterator[None]:
    """Make a folder and write into it. Raises ReleaseError where the disk is full, read-only or broken."""
    try:
        os.makedirs(folder, mode=0o755, exist_ok=True)
        yield
    except OSError as error:
        remedy = (
            f"; {folder} has to lie on a disk with room that root may write to: make it so, or name another folder with "
            "vllm_runtime_root. No release was replaced"
        )
        said = f"{error.filename or folder}: {error.strerror}"
        raise ReleaseError(said + (remedy if error.errno in _DISK else "")) from error


def _check_fits(lock: Any, python: Mapping[str, Any]) -> None:
    have = (python["version"], python["architecture"])
    if have != (lock.python, lock.architecture):
        raise ReleaseError(
            f"the lock is for Python {lock.python} on {lock.architecture}, {python['path']} is {have[0]} on {have[1]}"
        )
    if _numbers(python["glibc"]) < _numbers(lock.glibc):
        raise ReleaseError(
            f"the lock's wheels need glibc {lock.glibc}, this host has {python['glibc']}: a newer system is needed"
        )


def _numbers(text: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


@contextlib.contextmanager
def _alone(root: str, wait: int) -> Iterator[None]:
    """Hold ROOT/.lock; the kernel lets go of it when this process ends, however it ends."""
    with open(os.path.join(root, ".lock"), "w", encoding="utf-8") as handle:
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ReleaseError(
                        f"another run has been building in {root} for {wait} s; wait for it, or end it and run again"
                    ) from None
                time.sleep(0.5)
        yield


def _remove_dead(root: str) -> None:
    """Under the lock every half-built folder belongs to a run that died."""
    for name in os.listdir(root):
        if name.startswith(BUILDING):
            shutil.rmtree(os.path.join(root, name))


def room_for(lock: Any) -> int:
    """Bytes that a build of the lock takes at most, as measured."""
    return int(lock.size * GROWTH)


def _check_space(root: str, needed: int, what: str) -> None:
    """Refuse before anything is written when it will not fit."""
    numbers = os.statvfs(root)
    free = numbers.f_bavail * numbers.f_frsize
    if free < needed:
        raise ReleaseError(
            f"{root}: {what} needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free there; make room, such as by removing "
            "releases that no service uses, or name another folder with vllm_runtime_root"
        )


def _check_inodes(root: str, lock: Any) -> None:
    numbers = os.statvfs(root)
    if numbers.f_files and numbers.f_favail < 300 * len(lock.wheels):
        raise ReleaseError(f"{root}: {numbers.f_favail} inodes are free, about {300 * len(lock.wheels)} are needed")


def _install(lock: Any, work: str, tools: Tools, source: Source) -> str:
    """A relocatable environment with the lock's wheels; returns its path."""
    made = os.path.join(work, "made")
    os.mkdir(made)
    for wheel in lock.wheels:
        if wheel.made:
            filename, content = locks.metadata_wheel(f"{wheel.name}=={wheel.version}", lock.engine)
            with open(os.path.join(made, filename), "wb") as handle:
                handle.write(content)
    if source.folder:
        _check_folder(lock, source.folder)
    release = os.path.join(work, "release")
    environment = {
        **os.environ,
        **source.environment,
        **_place_environment(source),
        "UV_CACHE_DIR": os.path.join(
            work, "cache"
        ),  # the same file system: files are linked, not copied; /tmp may be small
        "UV_LINK_MODE": "hardlink",
        "UV_NO_CONFIG": "1",  # a uv.toml of the host is about something else
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_NO_PROGRESS": "1",
        "NO_COLOR": "1",
    }
    if os.path.exists(_SYSTEM_CERTIFICATES):  # without it uv's own list is all there is
        environment.setdefault("UV_SYSTEM_CERTS", "1")
    environment.pop("VIRTUAL_ENV", None)
    # Relocatable: console scripts would otherwise name the folder the release was built in.
    run = _uv(
        [tools.uv, "venv", "--quiet", "--relocatable", "--no-project", "--python", tools.python, release], environment
    )
    if run.returncode:
        raise ReleaseError(explain(run.stderr, lock, source))
    command = [tools.uv, "pip", "install", "--quiet", "--python", os.path.join(release, "bin", "python")]
    command += ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--find-links", made]
    for number, (wheels, tries) in enumerate(_portions(lock, source, work)):
        requirements = os.path.join(work, f"requirements-{number}.txt")
        with open(requirements, "w", encoding="utf-8") as handle:
            handle.writelines(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in wheels)
        for options in tries:
            run = _uv([*command, "--requirement", requirements, *options], environment)
            if not run.returncode:
                break
            if options is tries[0] and (len(tries) == 1 or not _LACKING.search(run.stderr)):
                raise ReleaseError(explain(run.stderr, lock, source))
        if run.returncode:
            raise ReleaseError(_nowhere(wheels[0], lock, source, run.stderr))
    shutil.rmtree(os.path.join(work, "cache"))  # before the manifest is taken: unlinking changes ctime
    for name in (".lock", ".gitignore", "CACHEDIR.TAG"):  # uv's own; the first is writable for everybody
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(release, name))
    return release


def _portions(lock: Any, source: Source, work: str) -> List[Tuple[List[Any], List[List[str]]]]:
    """Wheels that are installed together, each portion with the places to try in turn (as options of uv)."""
    ordinary = [wheel for wheel in lock.wheels if wheel.name not in source.fallbacks]
    special = [wheel for wheel in lock.wheels if wheel.name in source.fallbacks]
    where = _where(source, work)
    found = [(ordinary, [where])] if ordinary else []
    # Each alone and first, so that a place out of reach is known before gigabytes have come from the others.
    return [([wheel], [where, ["--default-index", source.fallbacks[wheel.name]]]) for wheel in special] + found


def _nowhere(wheel: Any, lock: Any, source: Source, stderr: str) -> str:
    last = " | ".join(line.strip() for line in stderr.strip().splitlines()[-2:])
    return (
        f"{lock.id}: {wheel.name}=={wheel.version} was found neither at {_place(source)} nor at {source.fallbacks[wheel.name]}; name a folder or page "
        f"that has it with vllm_runtime_find_links, an index with vllm_runtime_extra_index_urls, or set vllm_runtime_source: wheelhouse. uv says: {last}"
    )


def _place(source: Source) -> str:
    return source.folder or source.index_url or "the index that pip is told on this host"


def _check_folder(lock: Any, folder: str) -> None:
    """Name every wheel that a folder lacks, before uv names the first."""
    wrong = []
    for wheel in lock.wheels:
        path = os.path.join(folder, wheel.filename)
        if wheel.made:
            continue
        if not os.path.exists(path):
            wrong.append(f"{wheel.filename} is missing")
        elif os.path.getsize(path) != wheel.size:
            wrong.append(f"{wheel.filename} has {os.path.getsize(path)} bytes, the lock says {wheel.size}")
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ReleaseError(
            f"{folder}: {len(wrong)} of {len(lock.wheels)} wheels of {lock.id} are not as the lock says: {'; '.join(wrong[:5])}{more}. "
            "Fill it on the controller with `python -m gpu_fleet.wheelhouse fetch`"
        )


def _where(source: Source, work: str) -> List[str]:
    """Options of uv for the source; the indices are in the environment, see _place_environment.

    Pages of wheels stand in a file that root alone reads, for the same reason; UV_FIND_LINKS would not do, since an
    argument --find-links takes its place.
    """
    if source.folder:
        return ["--no-index", "--find-links", source.folder]
    pages = [link for link in source.find_links if "://" in link]
    options = []
    for link in source.find_links:
        if link not in pages:
            options += ["--find-links", link]
    if pages:
        path = os.path.join(work, "pages.txt")
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as handle:
            handle.writelines(f"--find-links {link}\n" for link in pages)
        options += ["--requirement", path]
    return options


def _place_environment(source: Source) -> Dict[str, str]:
    """uv's variables for the indices: a URL may hold a password, and every user of a host can read arguments.

    Further indices are each asked for every package as pip does; the hashes say which file is right.
    """
    environment = {}
    if source.index_url and not source.folder:
        environment["UV_DEFAULT_INDEX"] = source.index_url
    if source.extra_index_urls and not source.folder:
        environment["UV_INDEX"] = " ".join(source.extra_index_urls)
        environment["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return environment


def _uv(command: Sequence[str], environment: Mapping[str, str]) -> Any:
    return subprocess.run(
        command,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        preexec_fn=_die_with_parent,
    )


def _die_with_parent() -> None:
    """In the child: end when the module is killed, or it would go on writing into a folder that the next run removes."""
    pr_set_pdeathsig = 1  # prctl(2)
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def explain(stderr: str, lock: Any, source: Source) -> str:
    """uv's error in the words of this collection, with the remedy; uv's own last lines follow."""
    place = _place(source)
    last = " | ".join(line.strip() for line in stderr.strip().splitlines()[-6:])
    if "No space left on device" in stderr:
        what = "the disk is full; make room and run again"
    elif "Hash mismatch" in stderr or "Failed to extract archive" in stderr:
        name = re.search(r"(?:Hash mismatch for|Failed to \w+) `([^`]+)`", stderr)
        what = (
            f"the wheel of {name.group(1) if name else 'a package'} in {place} is not the one the lock names (tampered with, damaged, or another "
            "build); nothing of it was installed. Fetch it again from where you trust it"
        )
    elif "invalid peer certificate" in stderr:
        what = f"{place} shows a certificate that this host does not trust; put its authority into the system's store, or name it with vllm_runtime_ca_certificate"
    elif _LACKING.search(stderr):
        what = f"{place} lacks wheels of the lock"
    elif re.search(r"error sending request|dns error|[Cc]onnection refused|timed out", stderr):
        what = (
            f"{place} cannot be reached from this host; set vllm_runtime_index_url, or vllm_runtime_source: wheelhouse"
        )
    else:
        what = "uv failed"
    return f"{lock.id}: {what}. uv says: {last}"


def _try(release: str) -> None:
    """Import what is compiled, once: a missing system library shows here and not at the first start."""
    python = os.path.join(release, "bin", "python")
    run = subprocess.run(
        [python, "-I", "-B", "-c", _TRIAL], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False
    )
    if run.returncode:
        raise ReleaseError(f"the release was installed and does not import: {run.stderr.strip()[-600:]}")


def _finish(release: str, lock: Any, python: Mapping[str, Any]) -> None:
    """Write the manifest, then the mark that makes it a release."""
    tree.save(os.path.join(release, ".manifest.json"), tree.record(release))
    content = {"lock_digest": lock.digest, "id": lock.id, "python": python["path"], "python_version": python["full"]}
    with open(os.path.join(release, ".complete"), "w", encoding="utf-8") as handle:
        json.dump(content, handle)
        handle.write("\n")


def _swap(release: str, place: str, work: str) -> None:
    """Put the new release into its place; what was there goes into the working folder, which is removed."""
    if os.path.lexists(place):
        os.rename(place, os.path.join(work, "former"))
    os.rename(release, place)


def arriving(folder: str) -> str:
    """Where files for a folder are put by whoever logs in: on the same disk, so that they only have to be renamed."""
    return os.path.join(folder, "arriving")


def wanted_files(folder: str, files: Sequence[Mapping[str, Any]], room: int, uid: Optional[int] = None) -> List[str]:
    """Names of the files ({name, size, sha256}) that a folder lacks; a wrong one counts as lacking and is removed.

    What an interrupted run left in `arriving(folder)` counts as there when it is whole. That folder is made for the
    user `uid`. `room`: bytes that are needed on the same disk besides. Raises ReleaseError when it will not all fit.
    """
    wanted = []
    with writing(folder):
        for item in files:
            target = os.path.join(folder, item["name"])
            if not _take(arriving(folder), folder, item) and os.path.exists(target) and not _is_whole(target, item):
                os.unlink(target)
            if not os.path.exists(target):
                wanted.append(item)
        shutil.rmtree(arriving(folder), ignore_errors=True)
        _check_space(folder, sum(item["size"] for item in wanted) + room, "the release with what is sent for it")
        os.makedirs(arriving(folder), mode=0o700)
        if uid is not None:
            os.chown(arriving(folder), uid, -1)
    return [item["name"] for item in wanted]


def receive(folder: str, files: Sequence[Mapping[str, Any]]) -> None:
    """Move files that arrived into their folder, each once its hash is right; the others were there."""
    with writing(folder):
        for item in files:
            came = os.path.join(arriving(folder), item["name"])
            if os.path.lexists(came) and not _take(arriving(folder), folder, item):
                os.unlink(came)
                raise ReleaseError(
                    f"{item['name']} arrived damaged on this host, or changed on the controller meanwhile; run again"
                )
        shutil.rmtree(arriving(folder), ignore_errors=True)


def _is_whole(path: str, item: Mapping[str, Any]) -> bool:
    """Whether a file is the one that was sent."""
    return (
        os.path.isfile(path)
        and not os.path.islink(path)
        and os.path.getsize(path) == item["size"]
        and tree.sha256(path) == item["sha256"]
    )


def _take(arrived: str, folder: str, item: Mapping[str, Any]) -> bool:
    """Move a file that arrived whole to its place, as root's; False when it did not."""
    came = os.path.join(arrived, item["name"])
    if not _is_whole(came, item):
        return False
    os.chown(came, os.geteuid(), os.getegid())
    os.chmod(came, 0o755 if item["name"] == "uv" else 0o644)
    os.rename(came, os.path.join(folder, item["name"]))
    return True


def host_pip_settings(files: Optional[Sequence[str]] = None) -> Source:
    """Where pip looks on this host (/etc/xdg/pip/pip.conf, /etc/pip.conf, root's own), for an index source without a URL.

    uv does not read pip's configuration. Sections [global], then [install], as pip reads them.
    """
    if files is None:
        home = os.path.expanduser("~")
        files = ["/etc/xdg/pip/pip.conf", "/etc/pip.conf", f"{home}/.pip/pip.conf", f"{home}/.config/pip/pip.conf"]
    parser = configparser.RawConfigParser()
    options: Dict[str, str] = {}
    try:
        parser.read(files, encoding="utf-8")
    except configparser.Error as error:
        raise ReleaseError(f"pip's configuration on this host cannot be read: {error}") from error
    for section in ("global", "install"):
        if parser.has_section(section):
            options.update({key.replace("_", "-"): value for key, value in parser.items(section)})
    environment = {}
    if options.get("cert"):
        environment["SSL_CERT_FILE"] = options["cert"]
    if options.get("proxy"):
        environment["ALL_PROXY"] = options["proxy"]
    if options.get("trusted-host"):
        environment["UV_INSECURE_HOST"] = " ".join(options["trusted-host"].split())
    return Source(
        index_url=options.get("index-url") or None,
        extra_index_urls=tuple(options.get("extra-index-url", "").split()),
        find_links=tuple(options.get("find-links", "").split()),
        environment=environment,
    )
