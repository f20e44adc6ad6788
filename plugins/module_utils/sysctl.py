# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Kernel parameters: the file that sets them at boot, the kernel's present values, and who would override them.

systemd-sysctl(8) reads the files of the folders below in the order of their names, whatever folder they are in; of two
files of one name the one in the earlier folder is read; of two assignments the later one holds. Debian and Ubuntu
make /etc/sysctl.conf the last but few by the link /etc/sysctl.d/99-sysctl.conf (sysctl.d(5)).

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import os
from typing import Dict, List, Mapping, Optional, Tuple

FOLDERS = ("/etc/sysctl.d", "/run/sysctl.d", "/usr/local/lib/sysctl.d", "/usr/lib/sysctl.d", "/lib/sysctl.d")


def normal_name(name: str) -> str:
    """`net/ipv4/ip_forward` and `net.ipv4.ip_forward` are one parameter: the form with dots."""
    first = next((char for char in name if char in "./"), ".")
    return name if first == "." else name.replace(".", "\0").replace("/", ".").replace("\0", "/")


def proc_path(name: str, root: str = "/proc/sys") -> str:
    """The file of a parameter; the inverse of `normal_name` for names with a dot in them (`eth0/100`)."""
    return os.path.join(root, *(part.replace("/", ".") for part in name.split(".")))


def normal_value(value: object) -> str:
    """Values are compared without regard to tabs and spaces: the kernel prints "40000\\t60999"."""
    return " ".join(str(value).split())


def render(settings: Mapping[str, object], header: str) -> str:
    """The file, in the order given."""
    lines = [f"# {line}" for line in header.splitlines()]
    lines += [f"{name} = {normal_value(value)}" for name, value in settings.items()]
    return "\n".join(lines) + "\n"


def assignments(text: str) -> Dict[str, str]:
    """What a file sets; comments, empty lines and lines without `=` say nothing. A leading `-` means: may fail."""
    found = {}
    for line in map(str.strip, text.splitlines()):
        if line and line[0] not in "#;" and "=" in line:
            name, value = line.split("=", 1)
            found[normal_name(name.strip().lstrip("-").strip())] = normal_value(value)
    return found


def later_files(path: str, folders: Tuple[str, ...] = FOLDERS) -> List[str]:
    """Files that systemd-sysctl reads after `path`, in its order."""
    seen: Dict[str, str] = {}
    for folder in folders:
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            if name.endswith(".conf"):
                seen.setdefault(name, os.path.join(folder, name))
    mine = os.path.basename(path)
    return [seen[name] for name in sorted(seen) if name > mine]


def overridden(path: str, settings: Mapping[str, object], folders: Tuple[str, ...] = FOLDERS) -> List[str]:
    """One sentence for each parameter that a later file would set to another value at the next boot."""
    found = []
    for later in later_files(path, folders):
        text = _read(later)
        theirs = assignments(text) if text is not None else {}
        for name, value in settings.items():
            if theirs.get(name, normal_value(value)) != normal_value(value):
                found.append(f"{later} sets {name} = {theirs[name]} and is read after {path}")
    return found


def present(name: str, root: str = "/proc/sys") -> Optional[str]:
    """The kernel's value; None when this kernel has no such parameter."""
    text = _read(proc_path(name, root))
    return None if text is None else normal_value(text)


def _read(path: str) -> Optional[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read()
    except OSError:
        return None
