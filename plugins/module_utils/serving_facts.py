"""What is on a host of serving models, before anything is written. Runs on hosts: standard library, Python 3.9 and newer."""

from __future__ import annotations

import glob
import os
import pwd
import re
from typing import Iterable, List, Sequence

# Generation.conf is an instance's own, gpu-fleet-driver.conf of role gpu_driver.
_OURS = re.compile(r"/vllm@[^/]+[.]service[.]d/generation[.]conf$|/vllm@[.]service[.]d/gpu-fleet-driver[.]conf$")


def left_over(folder: str, named: Iterable[str]) -> List[str]:
    """Folders of instances that are not among the named ones, sorted; none where there is no such folder."""
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return []
    there = {entry.name for entry in entries if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")}
    return sorted(there - set(named))


def drop_ins(folders: Sequence[str]) -> List[str]:
    """Drop-ins of units of vLLM that others made, in folders such as /etc/systemd: for all instances, for one, or for all whose names
    begin alike (vllm@my-.service.d). Also what systemd was not told to read yet: it would hold from the next start on."""
    found = [
        path
        for folder in folders
        for kind in ("system", "system.control")
        for path in glob.glob(os.path.join(glob.escape(folder), kind, "vllm@*.service.d", "*.conf"))
    ]
    return sorted(path for path in found if not _OURS.search(path))


def has_user(name: str) -> bool:
    """Whether the host knows this user, be it a directory's."""
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
