"""Which generations of an instance, and which of their caches, no start and no rollback needs. Standard library, Python 3.9 and newer."""

from __future__ import annotations

import os
import re
from typing import List, Optional, Sequence, Set, Tuple

_ID = re.compile(r"[0-9a-f]{12}")


def going(home: str, caches: str, wanted: str, running: Optional[str], most: int) -> Tuple[List[str], List[str]]:
    """Folders that go, and IDs of the generations that stay.

    home, caches  the instance's folders, such as /etc/vllm/chat.0 and /var/cache/vllm/chat.0
    wanted        ID of the generation that `current` points at, or will
    running       ID of the one that the running process was started from; None where none runs
    most          how many stay: what is needed, then the newest
    """
    there = os.path.join(home, "generations")
    generations = [name for name in _folders(there) if _is_ours(os.path.join(there, name), os.path.basename(home))]
    keep = _staying(home, generations, wanted, running, most)
    found = [os.path.join(there, name) for name in sorted(set(generations) - keep)]
    # A folder that is not ours keeps its cache.
    stay = keep | (set(_folders(there)) - set(generations))
    found += [os.path.join(caches, name) for name in sorted(set(_folders(caches)) - stay)]
    return found, sorted(keep & set(generations))


def _folders(where: str) -> List[str]:
    """Real folders that are called like a generation."""
    try:
        entries = list(os.scandir(where))
    except FileNotFoundError:
        return []
    return [entry.name for entry in entries if _ID.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)]


def _is_ours(folder: str, instance: str) -> bool:
    """Whether module generation wrote it for this instance: its drop-in says so in the first line."""
    try:
        with open(os.path.join(folder, "unit.conf"), encoding="utf-8", errors="replace") as lines:
            return lines.readline().startswith(f"# Generation {os.path.basename(folder)} of {instance},")
    except OSError:
        return False


def _target(link: str) -> Optional[str]:
    """The generation that a link points at."""
    try:
        return os.path.basename(os.readlink(link))
    except OSError:
        return None


def _staying(home: str, generations: Sequence[str], wanted: str, running: Optional[str], most: int) -> Set[str]:
    """IDs that stay."""
    current, before = _target(os.path.join(home, "current")), _target(os.path.join(home, "previous"))
    if current != wanted:
        current, before = wanted, current
    needed = {name for name in (current, before, running) if name}

    def age(name: str) -> float:
        return os.stat(os.path.join(home, "generations", name)).st_mtime

    others = sorted(set(generations) - needed, key=age, reverse=True)
    return needed | set(others[: max(0, most - len(needed))])
