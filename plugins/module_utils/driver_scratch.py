# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""apt with other sources and pins than the host's, in a folder of its own, so that nothing of the host changes.

The names of apt's settings are those of apt.conf(5), DIRECTORIES: Dir::Etc::sourcelist, sourceparts, preferences,
preferencesparts, Dir::State::lists, Dir::Cache::pkgcache and srcpkgcache. dpkg's status, and with it what is installed
and held, is the host's own.

Pure but for the folder: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence

from ansible_collections.gpu_fleet.vllm.plugins.module_utils.driver_host import Run

PREFIX = "gpu-fleet-driver."
LISTS = "/var/lib/apt/lists"
# Big lists over a slow line; apt itself has no limit.
PATIENCE = 600.0
# What makes apt install the very things that were compared: nothing that is only recommended; what is held and named may change, and
# a version may fall, since the plan names both. driver_install has the same.
INSTALL = ("install", "--no-install-recommends", "--allow-change-held-packages", "--allow-downgrades", "-f")


class Scratch:
    """A folder with apt's configuration as it would be."""

    def __init__(self, folder: Optional[str] = None) -> None:
        there = folder is not None and os.path.isdir(folder)
        self.folder = str(folder) if there else tempfile.mkdtemp(prefix=PREFIX, dir="/var/tmp")
        os.chmod(self.folder, 0o755)  # apt reads keys and writes lists as its user _apt
        self.lists = LISTS

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    @property
    def options(self) -> List[str]:
        told = {
            "Dir::Etc::sourcelist": self.path("sources.list"),
            "Dir::Etc::sourceparts": self.path("sources.list.d"),
            "Dir::Etc::preferences": self.path("preferences"),
            "Dir::Etc::preferencesparts": self.path("preferences.d"),
            "Dir::State::lists": self.lists,
            "Dir::Cache::pkgcache": self.path("pkgcache.bin"),
            "Dir::Cache::srcpkgcache": self.path("srcpkgcache.bin"),
        }
        return [part for key, value in told.items() for part in ("-o", f"{key}={value}")]

    def configure(
        self,
        *,
        files: Mapping[str, str],
        gone: Iterable[str] = (),
        keyring: Optional[Mapping[str, Any]] = None,
        carried: Optional[Mapping[str, str]] = None,
    ) -> None:
        """Lay the host's configuration out with these files in the place of, or beside, its own.

        files    path below /etc/apt to text
        gone     paths of the host that are left out
        keyring  path that the files name, and bytes: they are read from the folder
        carried  uri of a flat repository that is not on the host yet, and its packages and release: apt plans with these alone
        """
        left_out = {*gone, *files}
        for name in ("sources.list", "preferences"):
            self._take(f"/etc/apt/{name}", name, left_out)
        for folder in ("sources.list.d", "preferences.d"):
            shutil.rmtree(self.path(folder), ignore_errors=True)
            os.makedirs(self.path(folder), mode=0o755)
            own = os.path.join("/etc/apt", folder)
            for name in sorted(os.listdir(own)) if os.path.isdir(own) else []:
                self._take(os.path.join(own, name), f"{folder}/{name}", left_out)
        if keyring is not None:
            with open(self.path("keyring.gpg"), "wb") as handle:
                handle.write(keyring["raw"])
            os.chmod(self.path("keyring.gpg"), 0o644)
        if carried is not None:
            os.makedirs(self.path("carried"), mode=0o755, exist_ok=True)
            for name in ("Packages", "Release"):
                self._write(f"carried/{name}", carried[name.lower()])
        for path, told in files.items():
            text = (
                told.replace(f"URIs: {carried['uri']}\n", f"URIs: file:{self.path('carried')}/\n") if carried else told
            )
            key = f"Signed-By: {keyring['path']}\n" if keyring is not None else "\n"
            mine = f"Signed-By: {self.path('keyring.gpg')}\n" if keyring is not None else "\n"
            self._write(path[len("/etc/apt/") :], text.replace(key, mine))

    def _take(self, path: str, name: str, left_out: Iterable[str]) -> None:
        if path not in left_out and os.path.isfile(path):
            shutil.copyfile(path, self.path(name))
            os.chmod(self.path(name), 0o644)

    def _write(self, name: str, text: str) -> None:
        with open(self.path(name), "w", encoding="utf-8") as handle:
            handle.write(text)
        os.chmod(self.path(name), 0o644)

    def own_lists(self) -> None:
        """Lists of its own, begun with the host's, so that only what changed is fetched."""
        self.lists = self.path("lists")
        if os.path.isdir(self.lists):
            return
        os.makedirs(os.path.join(self.lists, "partial"), mode=0o755)
        for name in os.listdir(LISTS) if os.path.isdir(LISTS) else []:
            own = os.path.join(LISTS, name)
            if os.path.isfile(own) and name != "lock":
                shutil.copy2(own, os.path.join(self.lists, name))

    def update(self, run: Run) -> Dict[str, Any]:
        """apt-get update there: rc, and what it warned of or failed at."""
        try:
            status, out, err = run(["apt-get", *self.options, "update", "-q"], PATIENCE)
        except subprocess.TimeoutExpired:
            return {"rc": -1, "said": [f"apt-get update gave no answer within {PATIENCE:g} s"]}
        return {"rc": status, "said": [line for line in (out + err).splitlines() if re.match(r"^(E|W|Err):", line)]}

    def simulate(self, run: Run, arguments: Sequence[str]) -> str:
        """What `apt-get -s install` prints, both streams."""
        _status, out, err = run(["apt-get", *self.options, "-s", *INSTALL, *arguments], PATIENCE)
        return f"{out}\n{err}"

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def ours(folder: str) -> bool:
    """Whether a folder is one that was made here."""
    return os.path.dirname(folder) == "/var/tmp" and os.path.basename(folder).startswith(PREFIX)
