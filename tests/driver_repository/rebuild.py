"""Debian's own driver under a higher version, made on a host: `rebuild.py FOLDER UPSTREAM REVISION`.

Every installed package that has the version of the kernel modules' package (`nvidia-*kernel-dkms`) is fetched from the host's own
sources, unpacked and packed anew with UPSTREAM-REVISION in the place of that version: in its control file and scripts, in names of
files and links and in every text, the modules' sources included. Those are then built by DKMS as they are and say the new version.
Programs and libraries are the old ones. A rebuilt package is named so by its revision. FOLDER becomes a flat repository.

Runs on the lab host as root: standard library, Python 3.9 and newer; dpkg-scanpackages comes with what DKMS needs.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path


def out(*command: str, cwd: str = "/") -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=cwd).stdout


def installed() -> dict:
    lines = out("dpkg-query", "-W", "-f", "${db:Status-Status} ${Package} ${Version}\n").splitlines()
    return {name: version for state, name, version in map(str.split, lines) if state == "installed"}


def renamed(root: Path, old: str, new: str) -> None:
    """old becomes new in the names below root and in what links point to."""
    for folder, directories, files in os.walk(str(root), topdown=False):
        for name in directories + files:
            path = Path(folder, name)
            if path.is_symlink() and old in os.readlink(path):
                target = os.readlink(path).replace(old, new)
                path.unlink()
                path.symlink_to(target)
            if old in name:
                path.rename(path.with_name(name.replace(old, new)))


def rewritten(root: Path, changes) -> None:
    """The changes, one after the other, in every file below root that is text."""
    for path in root.rglob("*"):
        if path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        if b"\0" in content[:8192]:
            continue
        changed = content
        for old, new in changes:
            changed = changed.replace(old.encode(), new.encode())
        if changed != content:
            path.write_bytes(changed)


def rebuild(package: Path, into: Path, old: str, new: str) -> None:
    upstream, wanted = old.rpartition("-")[0], new.rpartition("-")[0]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        root = Path(folder, "package")
        out("dpkg-deb", "-R", str(package), str(root))
        (root / "DEBIAN" / "md5sums").unlink(missing_ok=True)
        rewritten(root, [(old, new), (upstream, wanted)])
        renamed(root, upstream, wanted)
        out("dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "-b", str(root), str(into))


def main(folder: str, upstream: str, revision: str) -> None:
    have = installed()
    modules = [name for name in have if re.fullmatch(r"nvidia-(open-)?kernel-dkms", name)]
    assert len(modules) == 1, modules
    # The open modules are of another source than the rest, with a revision of their own.
    before = have[modules[0]].rpartition("-")[0]
    into = Path(folder)
    into.mkdir(parents=True)
    for name, version in have.items():
        if version.rpartition("-")[0] == before:
            with tempfile.TemporaryDirectory(dir="/var/tmp") as fetched:
                os.chmod(fetched, 0o777)  # apt fetches as its user _apt
                out("apt-get", "download", f"{name}={version}", cwd=fetched)
                rebuild(next(Path(fetched).iterdir()), into, version, f"{upstream}-{revision}")
            print(name, version, f"{upstream}-{revision}")
    (into / "Packages").write_text(out("dpkg-scanpackages", "--multiversion", ".", cwd=folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
