#!/usr/bin/env python3
"""Make a signed apt repository of stand-in packages, in the place of NVIDIA's.

    repository.py FOLDER

Writes FOLDER/nvidia, a flat repository (suite /) whose Release says Origin: NVIDIA; FOLDER/debian, one that says Debian,
with the same names in other versions; FOLDER/key.gpg, FOLDER/key.asc and FOLDER/old-key.gpg, public keys; FOLDER/fingerprint,
that of the first. The secret keys are thrown away when it is done. No package holds anything of NVIDIA's: each says in its description that it is a stand-in. Needs dpkg-deb,
gpg and a C compiler.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import packages
from packages import FILES, Package

NEEDS = {"dpkg-deb": "dpkg", "gpg": "gnupg", "cc": "gcc"}
USER = "stand-in repository of a test"


def make(folder: Path) -> Path:
    """Both repositories and their keys, in a folder that is emptied first."""
    lacking = [f"{command} (package {package})" for command, package in NEEDS.items() if not shutil.which(command)]
    if lacking:
        raise SystemExit(f"repository.py: {', '.join(lacking)} is not there")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # gpg-agent's socket has a short path only
    with tempfile.TemporaryDirectory(prefix="gpg-") as home:
        key, old = Key(Path(home) / "new"), Key(Path(home) / "old")
        try:
            key.export(folder / "key.gpg")
            key.export(folder / "key.asc", "--armor")
            (folder / "fingerprint").write_text(f"{key.fingerprint()}\n", encoding="ascii")
            old.export(folder / "old-key.gpg")
            with tempfile.TemporaryDirectory() as scratch:
                libraries = {version: library(Path(scratch), version) for version in packages.DRIVERS}
                repository(folder / "nvidia", packages.nvidia(libraries, folder / "key.gpg"), "NVIDIA", key)
                repository(folder / "debian", packages.debian(), "Debian", key)
        finally:
            key.close()
            old.close()
    return folder


class Key:
    """A key that is thrown away with its folder."""

    def __init__(self, home: Path) -> None:
        home.mkdir(mode=0o700)
        self.command = ["gpg", "--homedir", str(home), "--batch", "--yes", "--quiet", "--no-tty"]
        run([*self.command, "--passphrase", "", "--quick-gen-key", USER, "rsa3072", "sign", "never"])

    def export(self, path: Path, *options: str) -> None:
        run([*self.command, *options, "--output", str(path), "--export", USER])

    def fingerprint(self) -> str:
        listed = run([*self.command, "--with-colons", "--list-keys", USER]).splitlines()
        return next(line.split(":")[9] for line in listed if line.startswith("fpr:"))

    def sign(self, release: Path) -> None:
        run([*self.command, "--output", str(release.parent / "InRelease"), "--clearsign", str(release)])
        run([*self.command, "--output", f"{release}.gpg", "--armor", "--detach-sign", str(release)])

    def close(self) -> None:
        subprocess.run(["gpgconf", "--homedir", self.command[2], "--kill", "all"], check=False, capture_output=True)


def run(command: list[str], **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise SystemExit(f"repository.py: {' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout


def library(folder: Path, version: str) -> Path:
    """The stand-in for libcuda.so.1 of a version."""
    path = folder / f"libcuda-{version}.so.1"
    define = f'-DSTAND_IN_VERSION="{version}"'
    flags = ["-shared", "-fPIC", "-nostdlib", "-O1", "-Wall", "-Werror", "-fno-builtin", "-Wl,-soname,libcuda.so.1"]
    run(["cc", *flags, define, "-o", str(path), str(FILES / "libcuda.c")])
    return path


def build(package: Package, folder: Path) -> Path:
    """One package, as dpkg-deb (1) makes it."""
    target = folder / package.file_name
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for name, content in package.files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, path)
            else:
                path.write_text(content, encoding="utf-8")
            path.chmod(0o755 if name in package.programs else 0o644)
        control = root / "DEBIAN"
        control.mkdir()
        kept = [f"/{name}\n" for name in package.files if name.startswith("etc/")]
        if kept:
            (control / "conffiles").write_text("".join(kept), encoding="ascii")
        (control / "control").write_text(description(package), encoding="utf-8")
        for name, text in package.scripts.items():
            (control / name).write_text(
                f"#!/bin/sh\n# Of a stand-in, made for a test.\nset -e\n{text}", encoding="utf-8"
            )
            (control / name).chmod(0o755)
        run(["dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", str(root), str(target)])
    return target


def description(package: Package) -> str:
    fields = {
        "Package": package.name,
        "Version": package.version,
        "Architecture": package.architecture,
        "Maintainer": "stand-in <root@localhost>",
        "Section": "non-free/libs",
        "Priority": "optional",
        **package.relations,
        "Description": f"stand-in, {package.about}\n Made for a test. It is not NVIDIA's and does not drive anything.",
    }
    return "".join(f"{name}: {value}\n" for name, value in fields.items())


def repository(folder: Path, made: Iterable[Package], origin: str, key: Key) -> None:
    """A flat repository: the packages, their index, and a Release with its signature."""
    folder.mkdir()
    stanzas = []
    for package in made:
        path = build(package, folder)
        data = path.read_bytes()
        about = f"Filename: ./{path.name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n"
        stanzas.append(run(["dpkg-deb", "--field", str(path)]).rstrip("\n") + "\n" + about)
    index = folder / "Packages"
    index.write_text("\n".join(stanzas), encoding="utf-8")
    data = index.read_bytes()
    # In NVIDIA's stands Origin: NVIDIA and Label: NVIDIA CUDA, as `apt-cache policy` shows in public logs.
    release = folder / "Release"
    release.write_text(
        f"Origin: {origin}\nLabel: {'NVIDIA CUDA' if origin == 'NVIDIA' else 'stand-in'}\n"
        "Architecture: amd64\nDescription: stand-ins, made for a test\n"
        f"Date: {datetime.datetime.now(datetime.UTC):%a, %d %b %Y %H:%M:%S UTC}\n"
        f"SHA256:\n {hashlib.sha256(data).hexdigest()} {len(data)} Packages\n",
        encoding="utf-8",
    )
    key.sign(release)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    print(make(parser.parse_args().folder))


if __name__ == "__main__":
    sys.exit(main())
