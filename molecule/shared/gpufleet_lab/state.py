"""What is written down about a lab, and the locks that keep two runs apart."""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .errors import LabError
from .names import STATE_ROOT, LabNames

STATE_FILE = "lab.json"


@dataclass(frozen=True)
class Bind:
    """A folder of this machine, seen read-only by every host."""

    source: str
    target: str


@dataclass(frozen=True)
class Lab:
    """One lab as it was asked for. Times, pids and files of its hosts lie beside this record, not in it."""

    lab_id: str
    name: str
    checkout: str
    suite: str
    subnet: str
    nat: bool
    hosts: tuple[str, ...]
    binds: tuple[Bind, ...] = field(default=())

    @property
    def names(self) -> LabNames:
        return LabNames(self.lab_id)

    @property
    def network(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(self.subnet)

    @property
    def gateway(self) -> str:
        """This machine's own address on the lab's bridge."""
        return str(self.network[1])

    def address(self, host: str) -> str:
        """Hosts count from .11 in the order they were named."""
        return str(self.network[11 + self.hosts.index(host)])

    def folder(self, host: str) -> Path:
        return self.names.folder / "hosts" / host

    def wanted(self) -> tuple:
        """What must agree for an existing lab to be the one that is asked for."""
        return (self.suite, self.nat, self.hosts, self.binds)


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file so that a reader, or a crash, sees the old or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.chmod(temporary, mode)
    os.replace(temporary, path)


def save(lab: Lab) -> None:
    lab.names.folder.mkdir(parents=True, exist_ok=True)
    os.chmod(lab.names.folder, 0o755)
    write_atomically(lab.names.folder / STATE_FILE, json.dumps(asdict(lab), indent=2) + "\n")


def load(names: LabNames) -> Lab | None:
    """The record of a lab; None when there is none. LabError when it cannot be read."""
    path = names.folder / STATE_FILE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        record["hosts"] = tuple(record["hosts"])
        record["binds"] = tuple(Bind(**bind) for bind in record["binds"])
        return Lab(**record)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise LabError(f"{path} is damaged ({error}); `lab.py down --all` removes that lab") from error


def all_ids() -> list[str]:
    """Ids of every lab of this machine that has a state file, whichever clone it belongs to."""
    return sorted(path.parent.name for path in STATE_ROOT.glob(f"*/{STATE_FILE}"))


def readable() -> list[Lab]:
    """Every lab of this machine whose record can be read. A damaged one must not stand in the way of the others."""
    labs = []
    for lab_id in all_ids():
        with suppress(LabError):
            labs.append(load(LabNames(lab_id)))
    return [lab for lab in labs if lab]


@contextmanager
def locked(path: Path, patience: float = 900.0, doing: str = "") -> Iterator[None]:
    """Hold an exclusive lock on a file. It goes with the process, however that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as stream:
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise LabError(
                        f"{doing or path.name}: another run has held {path} for {patience:.0f} s; wait for it or end it"
                    ) from None
                time.sleep(0.1)
        yield


@contextmanager
def machine_lock() -> Iterator[None]:
    """For what all labs share: choosing a network, and ip_forward."""
    with locked(STATE_ROOT / "locks" / ".machine.lock", doing="choosing a network"):
        yield
