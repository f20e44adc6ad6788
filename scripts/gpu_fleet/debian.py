"""Programs out of Debian packages without installing them: for tests that ask a real Prometheus, Alertmanager or HAProxy.

Installed ones are taken first. Else the package is fetched with the machine's own apt (it checks the archive's signature), unpacked
below the cache of the user and used from there: no service is started, nothing of the system is changed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpu_fleet" / "debian"


def program(name: str, package: str) -> str:
    """Path of a program. Raises FileNotFoundError with what apt said when it cannot be had."""
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"]))
    if found:
        return found
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / package).is_dir():
            _unpack(package, folder)
    for place in ("usr/bin", "usr/sbin"):
        if (folder / package / place / name).is_file():
            return str(folder / package / place / name)
    raise FileNotFoundError(f"the package {package} has no program {name}")


def _unpack(package: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        said = _fetch(package, scratch)
        files = list(Path(scratch).glob("*.deb"))
        if not files:
            # A machine that never fetched package lists, or whose lists are old.
            subprocess.run(["apt-get", "-q", "update"], capture_output=True, text=True, check=False, timeout=300)
            said = _fetch(package, scratch)
            files = list(Path(scratch).glob("*.deb"))
        if not files:
            raise FileNotFoundError(f"apt-get cannot download {package}: {said.strip()}")
        made = Path(scratch) / "made"
        subprocess.run(["dpkg-deb", "-x", str(files[0]), str(made)], check=True, timeout=120)
        made.rename(folder / package)


def _fetch(package: str, into: str) -> str:
    try:
        done = subprocess.run(
            ["apt-get", "-q", "download", package], cwd=into, capture_output=True, text=True, check=False, timeout=300
        )
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{package} is not installed, and there is no apt-get to fetch it with") from error
    return done.stdout + done.stderr
