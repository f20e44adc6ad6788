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
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import host_files

FOLDERS = ("/etc/sysctl.d", "/run/sysctl.d", "/usr/local/lib/sysctl.d", "/usr/lib/sysctl.d", "/lib/sysctl.d")


class Refused(RuntimeError):
    """What is asked for cannot be, or not for long; the message says what to do."""


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


@dataclass(frozen=True)
class Difference:
    """A file of kernel parameters and the kernel, as they are and as they are wanted. No text: there is to be no file."""

    path: str
    text: Optional[str]
    before: Optional[str]
    live: Mapping[str, Optional[str]]
    altered: Mapping[str, str]
    why: Tuple[str, ...]

    def diffs(self) -> List[Dict[str, Any]]:
        """Before and after of the file, and of the kernel's values that are others, as Ansible shows them."""
        found: List[Dict[str, Any]] = [
            {
                "before": self.before or "",
                "after": self.text or "",
                "before_header": self.path,
                "after_header": self.path,
            }
        ]
        if self.altered:
            kernel = {name: self.live[name] for name in self.altered}
            found.append(
                {"before": kernel, "after": dict(self.altered), "before_header": "kernel", "after_header": "kernel"}
            )
        return found


def compare(
    path: str,
    settings: Mapping[str, object],
    header: str,
    root: str = "/proc/sys",
    folders: Tuple[str, ...] = FOLDERS,
) -> Difference:
    """What is not as wanted in the file and in the kernel. Raises Refused; changes nothing."""
    wanted = {normal_name(name): normal_value(value) for name, value in settings.items()}
    live = {name: present(name, root) for name in wanted}
    missing = sorted(name for name, value in live.items() if value is None)
    if missing:
        raise Refused(f"this kernel has no {', '.join(missing)}; correct the name or leave it out. Nothing was changed")
    undone = overridden(path, wanted, folders)
    if undone:
        raise Refused(
            f"{'; '.join(undone)}: the next boot would undo it. Remove the line there, or give the value here. "
            "Nothing was changed"
        )
    text = render(wanted, header) if wanted else None
    before = host_files.read(path)
    altered = {name: value for name, value in wanted.items() if live[name] != value}
    why = _file_faults(path, text, before)
    why += [f"{name} was {live[name]}, wanted {value}" for name, value in altered.items()]
    return Difference(path, text, before, live, altered, tuple(why))


def apply(difference: Difference, root: str = "/proc/sys") -> None:
    """The kernel first: a value it refuses must not wait in the file for the next boot. Raises Refused."""
    path, text = difference.path, difference.text
    for name, value in difference.altered.items():
        _set_live(name, value, root)
    try:
        if text is None:
            if difference.before is not None:
                os.unlink(path)
        elif host_files.wrong(path, text):
            host_files.write(path, text)
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from error


def _file_faults(path: str, text: Optional[str], before: Optional[str]) -> List[str]:
    """What is wrong with the file, as a list of at most one sentence."""
    if text is None:
        return [] if before is None else [f"{path} was there and sets nothing that is wanted"]
    wrong = host_files.wrong(path, text)
    return [wrong] if wrong else []


def _set_live(name: str, value: str, root: str) -> None:
    """Write one value and read it back: some parameters take a value and keep another."""
    try:
        with open(proc_path(name, root), "w", encoding="ascii") as handle:
            handle.write(f"{value}\n")  # with a newline: writing no byte at all would leave the former value
    except OSError as error:
        raise Refused(
            f"{name} cannot be set to {value}: {error.strerror}. Leave it out, or choose a value the kernel takes"
        ) from error
    kept = present(name, root)
    if kept != value:
        raise Refused(f"{name} was set to {value}, but the kernel says {kept}")
