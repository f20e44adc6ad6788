"""Debian packages for a system that is not this one: resolved and fetched by apt itself, in a root of its own.

That apt knows no installed package, so that what it resolves is whole, down to the C library: any host of that system can
install from it, whatever it has already. It uses the target's sources and keys, and of this machine's apt only how things are
fetched (proxies, certificates, logins). Nothing of this machine's packages or lists is touched, and no right of root is needed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from email.utils import formatdate
from pathlib import Path
from typing import Any

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_host, driver_key, mirror, tree
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.mirror import File, MirrorError, Target

TIMEOUT = 600.0  # seconds without an end: an index of a big archive over a slow line
HELPER = "/usr/lib/apt/apt-helper"
KEY = "key.asc"  # beside the repositories
BATCH = 24  # files for one apt-helper, so that its progress can be said
# apt settings that decide how things are fetched; the rest (hooks, what to keep) is this machine's own business.
_FETCHING = re.compile(r"Acquire::(http|https|ftp|Check-|Retries|ForceIPv)", re.IGNORECASE)


class PrivateApt:
    """apt for one target, below a folder."""

    def __init__(self, root: Path, target: Target, architecture: str) -> None:
        self.root, self.target, self.architecture = root, target, architecture
        self.holds: int | None = None  # a lock that what is started here shares

    def prepare(self, sources: Sequence[tuple[str, str]]) -> None:
        """Write configuration and sources, (name, deb822 text). Raises MirrorError when this machine has no apt."""
        if not shutil.which("apt-get") or not Path(HELPER).exists():
            raise MirrorError(
                f"packages of {self.target.system} are resolved by apt, which this machine does not have: run this on Debian or Ubuntu, "
                "or leave them out (mirror_parts)"
            )
        for name in (
            "etc/sources.list.d",
            "etc/preferences.d",
            "etc/apt.conf.d",
            "state/lists/partial",
            "cache/archives/partial",
            "log",
        ):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        (self.root / "state/status").touch()
        for old in (self.root / "etc/sources.list.d").iterdir():
            old.unlink()
        for path in re.findall(r"(?m)^Signed-By: (/\S+)$", "\n".join(text for _name, text in sources)):
            if not Path(path).is_file():
                raise MirrorError(
                    f"packages of {self.target.system}: this machine has no {path}, the key of their archive; install it (on Debian and "
                    "Ubuntu it is in debian-archive-keyring or ubuntu-keyring), or name other sources in mirror_sources"
                )
        for name, text in sources:
            (self.root / "etc/sources.list.d" / f"{name}.sources").write_text(text, encoding="utf-8")
        config = mirror.apt_conf(str(self.root), self.architecture, _acquire())
        (self.root / "apt.conf").write_text(config, encoding="utf-8")

    def prefer(self, text: str) -> None:
        """The preferences that the role writes on a host, or none."""
        (self.root / "etc/preferences").write_text(text, encoding="utf-8")

    def update(self) -> None:
        """Fetch the lists of packages. Every source has to answer: what is missing would be resolved without being noticed."""
        status, out, err = self.run(["apt-get", "update", "--error-on=any"], TIMEOUT)
        if status:
            raise MirrorError(f"apt-get update for {self.target.system}: {_words(out, err)}")

    def available(self, globs: Sequence[str], exact: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
        """What the sources offer of some packages, as HOST of driver_case.py has it."""
        return driver_host.available(self.run, globs, exact)

    def resolve(self, packages: Sequence[str]) -> list[File]:
        """The packages and all that they need, as files; `name=version` for an exact one."""
        if not packages:
            return []
        status, out, err = self.run(["apt-get", "install", "--print-uris", "-y", "-qq", *packages], TIMEOUT)
        if status:
            raise MirrorError(
                f"{self.target.system}: apt finds no way to install {' '.join(packages)}: {_words(out, err)}"
            )
        return mirror.read_uris(out)

    def run(self, argv: Sequence[str], timeout: float) -> tuple[int, str, str]:
        environment = {
            **os.environ,
            "APT_CONFIG": str(self.root / "apt.conf"),
            "LC_ALL": "C",
            "DEBIAN_FRONTEND": "noninteractive",
        }
        try:
            done = subprocess.run(
                list(argv),
                capture_output=True,
                text=True,
                timeout=timeout,
                env=environment,
                check=False,
                pass_fds=[self.holds] if self.holds is not None else [],
            )
        except subprocess.TimeoutExpired as error:
            raise MirrorError(
                f"{' '.join(argv[:2])} took more than {timeout:.0f} s for {self.target.system}"
            ) from error
        return done.returncode, done.stdout, done.stderr

    def fetch(self, files: Sequence[File], into: Path, work: Path, say: Callable[[str], None]) -> None:
        """Bring files into a folder, each proved by its hash and renamed into place; a partial one is continued.

        work  where they arrive, on the same file system
        """
        work.mkdir(parents=True, exist_ok=True)
        into.mkdir(parents=True, exist_ok=True)
        for start in range(0, len(files), BATCH):
            batch = files[start : start + BATCH]
            say(f"packages of {self.target.system}: {start + len(batch)} of {len(files)}")
            self._fetch_batch(batch, work)
            for item in batch:
                _keep(work / item.path, into / item.path, item)
        shutil.rmtree(work)

    def _fetch_batch(self, batch: Sequence[File], work: Path) -> None:
        remote = []
        for item in batch:
            if item.source.startswith("file:"):
                shutil.copyfile(
                    urllib.request.url2pathname(item.source.removeprefix("file:").replace("///", "/", 1)),
                    work / item.path,
                )
            else:
                remote += [item.source, str(work / item.path), f"SHA256:{item.sha256}"]
        if remote:
            status, out, err = self.run([HELPER, "download-file", *remote], 6 * TIMEOUT)
            if status:
                raise MirrorError(
                    f"packages of {self.target.system} could not be fetched: {_words(out, err)}. Run again; what came is kept"
                )


def _keep(came: Path, final: Path, item: File) -> None:
    digest = tree.sha256(str(came)) if came.is_file() else None
    if digest != item.sha256:
        came.unlink(missing_ok=True)
        raise MirrorError(
            f"{item.path} did not come as {item.source} announced it (SHA256 {item.sha256}). Run again; what is good is kept"
        )
    came.chmod(0o644)
    came.replace(final)


def write_repository(folder: Path, target: Target, architecture: str, files: Sequence[File]) -> bool:
    """Packages and Release of a flat repository, where they are not as they should be; returns whether they changed."""
    paragraphs = [
        mirror.entry(_control(folder / item.path), item.path, item.size, str(item.sha256))
        for item in sorted(files, key=lambda item: item.path)
    ]
    text = "\n".join(paragraphs).encode()
    changed = _write(folder / "Packages", text)
    told = mirror.release(target, architecture, (len(text), hashlib.sha256(text).hexdigest()), formatdate(usegmt=True))
    there = folder / "Release"
    if there.is_file() and mirror.same_release(there.read_text(encoding="utf-8"), told):
        return changed
    return _write(there, told.encode()) or changed


def sign(folder: Path, key_id: str) -> None:
    """InRelease by a key of gpg's, and that key beside the repository; without a key neither is there."""
    signed, told = folder / "InRelease", folder / "Release"
    if not key_id:
        signed.unlink(missing_ok=True)
        return
    # Release is written anew only when it says something else.
    if not signed.is_file() or told.stat().st_mtime_ns > signed.stat().st_mtime_ns:
        beside = folder / ".InRelease.new"
        _gpg(["--yes", "--local-user", key_id, "--clearsign", "--output", str(beside), str(told)], key_id)
        beside.replace(signed)
    exported = _gpg(["--armor", "--export", key_id], key_id)
    if not exported:
        raise MirrorError(f"mirror_sign_with: gpg has no key {key_id}")
    _write(folder.parent / KEY, exported)


def _gpg(argv: Sequence[str], key_id: str) -> bytes:
    try:
        done = subprocess.run(["gpg", "--batch", *argv], capture_output=True, check=False)
    except FileNotFoundError as error:
        raise MirrorError("mirror_sign_with is set and gpg is not on this machine; install gnupg") from error
    if done.returncode:
        raise MirrorError(f"mirror_sign_with {key_id}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def _control(path: Path) -> str:
    try:
        done = subprocess.run(["dpkg-deb", "--field", str(path)], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise MirrorError("dpkg-deb is not on this machine; install the package dpkg") from error
    if done.returncode:
        raise MirrorError(f"{path}: {done.stderr.strip()}")
    return done.stdout


def _write(path: Path, content: bytes) -> bool:
    if path.is_file() and path.read_bytes() == content:
        return False
    beside = path.with_name(f".{path.name}.new")
    beside.write_bytes(content)
    beside.replace(path)
    return True


def key(root: Path, entry: Mapping[str, Any] | None, keyring: str, system: str) -> Path:
    """The key of the driver's repository as a file of the private root: the given one, or the known one, proved by its fingerprint.

    entry  url and fingerprint, as driver_sources.repository gives it
    """
    path = root / "etc/driver-key.gpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    if keyring:
        given = Path(keyring).expanduser()
        if not given.is_file():
            raise MirrorError(f"mirror_driver_keyring: there is no file {given}")
        path.write_bytes(_packets(given.read_bytes(), str(given)))
        return path
    if entry is None or not entry.get("fingerprint"):
        raise MirrorError(
            f"the key of the driver's repository for {system} is not known; name the file that has it with mirror_driver_keyring"
        )
    if path.is_file() and driver_key.fingerprints(path.read_bytes()) == [entry["fingerprint"]]:
        return path
    try:
        with urllib.request.urlopen(str(entry["url"]), timeout=60) as answer:
            raw = _packets(answer.read(), str(entry["url"]))
    except OSError as error:
        raise MirrorError(f"{entry['url']} cannot be reached ({getattr(error, 'reason', error)})") from error
    found = driver_key.fingerprints(raw)
    if found != [entry["fingerprint"]]:
        raise MirrorError(
            f"{entry['url']} has the key {', '.join(found)}, expected is {entry['fingerprint']}. Nothing was fetched. If its owner has "
            "a new key, compare it with their installation guide and name its file with mirror_driver_keyring"
        )
    path.write_bytes(raw)
    return path


def _packets(raw: bytes, where: str) -> bytes:
    try:
        return driver_key.dearmor(raw)
    except ValueError as error:
        raise MirrorError(f"{where} is no key: {error}") from error


def own_system() -> tuple[str | None, str]:
    """debian-12 and bookworm of this machine."""
    try:
        text = Path("/etc/os-release").read_text(encoding="utf-8")
    except OSError:
        return None, ""
    code = re.search(r'^VERSION_CODENAME="?([a-z]+)"?$', text, re.MULTILINE)
    return driver_host.system(text), code.group(1) if code else ""


def _acquire() -> str:
    done = subprocess.run(["apt-config", "dump", "--format", '%F "%v";%n'], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if _FETCHING.match(line) and not line.endswith('"";')]
    for scheme in ("http", "https"):
        proxy = os.environ.get(f"{scheme}_proxy") or os.environ.get(f"{scheme.upper()}_PROXY")
        if proxy and not any(line.lower().startswith(f"acquire::{scheme}::proxy ") for line in lines):
            lines.append(f'Acquire::{scheme}::Proxy "{proxy}";')
    return "".join(f"{line}\n" for line in lines)


def _words(out: str, err: str) -> str:
    """apt's own words of what went wrong."""
    lines = [line.strip() for line in f"{out}\n{err}".splitlines() if re.match(r"(E:|W:|Err:| \S+ : )", line)]
    return " / ".join(lines[-6:]) or " ".join(err.split())[-400:] or "it failed and said nothing"
