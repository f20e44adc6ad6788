# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Small text files of root's on a host: is one as wanted, and write it whole or not at all.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import os
import stat
from typing import Optional


def read(path: str) -> Optional[str]:
    """The file's text; None when there is none. What is not UTF-8 is shown as such, not an error."""
    try:
        with open(path, encoding="utf-8", errors="backslashreplace") as handle:
            return handle.read()
    except FileNotFoundError:
        return None


def wrong(path: str, text: str, mode: int = 0o644) -> Optional[str]:
    """What is not as wanted, as one sentence; None when the file is a plain one of root's with this text and mode."""
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return f"{path} was missing"
    if not stat.S_ISREG(info.st_mode):
        return f"{path} was no plain file"
    if read(path) != text:
        return f"{path} had another content"
    if (stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid) != (mode, 0, 0):
        return f"{path} was {stat.S_IMODE(info.st_mode):04o} of {info.st_uid}:{info.st_gid}, wanted {mode:04o} of root"
    return None


def write(path: str, text: str, mode: int = 0o644) -> None:
    """Write beside and rename; missing folders are made with 0755. OSError as the system raises it."""
    write_bytes(path, text.encode("utf-8"), mode)


def write_bytes(path: str, raw: bytes, mode: int = 0o644) -> None:
    """As `write`, of what is no text."""
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    beside = f"{path}.new"
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    with os.fdopen(handle, "wb") as stream:
        os.fchmod(stream.fileno(), mode)
        os.fchown(stream.fileno(), 0, 0)
        stream.write(raw)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(beside, path)
