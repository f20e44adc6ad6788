"""A whole lab: up, down, and what it tells Ansible."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import base, cgroups, hosts, machine, network
from .errors import LabError, UsageError
from .names import LabNames
from .shell import PATH, run
from .state import Bind, Lab, load, locked, machine_lock, readable, save, write_atomically

MACHINE_ID = Path("/etc/machine-id")
# What a lab cannot do without, and the Debian package that brings it.
TOOLS = {
    "systemd-nspawn": "systemd-container",
    "mmdebstrap": "mmdebstrap",
    "nft": "nftables",
    "ip": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "unshare": "util-linux",
    "mount": "mount",
}


def say(text: str) -> None:
    """Progress goes to standard error: standard output is the answer."""
    print(f"lab: {text}", file=sys.stderr, flush=True)


def check_machine() -> None:
    """UsageError, in one line, when this machine lacks a right or a tool."""
    if os.geteuid() != 0:
        raise UsageError("a lab needs root: it boots systems, makes a bridge and mounts overlays; run this as root")
    missing = {tool: package for tool, package in TOOLS.items() if not shutil.which(tool, path=PATH)}
    if missing:
        raise UsageError(
            f"missing on this machine: {', '.join(missing)}; scripts/bootstrap installs them (apt-get install {' '.join(sorted(set(missing.values())))})"
        )
    if not cgroups.hierarchies():
        raise UsageError(
            "no control group hierarchy is mounted below /sys/fs/cgroup: a lab host could not kill its own units"
        )
    if not MACHINE_ID.exists() or MACHINE_ID.stat().st_size < 32:
        raise UsageError(
            f"{MACHINE_ID} is empty, and systemd-nspawn needs it for the hosts' network; run systemd-machine-id-setup"
        )
    try:
        run(["nft", "list", "tables"])
    except LabError as error:
        raise UsageError(f"nftables cannot be used here: {error}") from error


@dataclass(frozen=True)
class Request:
    """A lab as it is asked for. `suite` None means this machine's own Debian release."""

    name: str
    checkout: Path
    hosts: tuple[str, ...]
    binds: tuple[Bind, ...] = ()
    nat: bool = True
    suite: str | None = None

    @property
    def names(self) -> LabNames:
        return LabNames.of(self.name, self.checkout)


def prepare_base(suite: str | None = None) -> Path:
    """Make the root file system that hosts stand on, ahead of the time they are wanted."""
    check_machine()
    suite = suite or machine.debian_suite()
    return base.ensure(suite, machine.settings(suite), say)


def up(request: Request) -> Lab:
    """Make the lab, or what is missing of it. Hosts that run are left alone."""
    check_machine()
    hosts.weight()  # refused before anything is made
    for bind in request.binds:
        if not Path(bind.source).is_dir():
            raise UsageError(f"--bind {bind.source}:{bind.target}: there is no folder {bind.source}")
    with locked(request.names.lock, doing=f"lab {request.name}"):
        began = time.monotonic()
        lab = _reserve(request)
        root = base.ensure(lab.suite, machine.settings(lab.suite), say)
        network.ensure_bridge(lab)
        network.ensure_rules(lab, say)
        hosts.ensure_keys(lab)
        fresh = [host for host in lab.hosts if hosts.supervisor(lab, host) is None]
        for host in fresh:
            # What a host that has gone down left in its groups would keep the new one from starting.
            cgroups.remove(f"{lab.names.cgroup}/{host}")
            hosts.ensure_root(lab, host, _base_of(lab, host, root))
            hosts.start(lab, host)
        with ThreadPoolExecutor(max_workers=8) as pool:
            list(pool.map(lambda host: hosts.wait_ready(lab, host), lab.hosts))
        write_inventory(lab)
        if fresh and not cgroups.weighing():
            say("no control group shares this machine's processors: hosts are slow while something else runs here")
        what = f"started {', '.join(fresh)}" if fresh else "was up already"
        say(f"{lab.name}: {what} ({time.monotonic() - began:.1f} s)")
    return lab


def _reserve(request: Request) -> Lab:
    """Write down what this lab is to be, with a network nobody else has, before the first thing of it exists."""
    names, suite = request.names, request.suite or machine.debian_suite()
    with machine_lock():
        lab = load(names)
        if lab is None:
            if names.folder.exists():
                raise LabError(f"{names.folder} is the rest of a lab; `lab.py down {request.name}` removes it")
            # Every lab that is written down has its network, whether or not its bridge exists at this moment.
            taken = [other.network for other in readable()]
            subnet = str(network.choose(names.tag, [*network.networks_in_use(), *taken]))
            checkout = str(request.checkout)
            lab = Lab(names.lab_id, request.name, checkout, suite, subnet, request.nat, request.hosts, request.binds)
            save(lab)
        if lab.wanted() != (suite, request.nat, request.hosts, request.binds):
            raise UsageError(
                f"lab {lab.name} exists with other hosts or settings: {', '.join(lab.hosts)}; suite {lab.suite}, nat {lab.nat}, "
                f"binds {[f'{bind.source}:{bind.target}' for bind in lab.binds]}; `lab.py down {lab.name}` removes it"
            )
        if lab.nat:
            network.ensure_forwarding()
    return lab


def _base_of(lab: Lab, host: str, root: Path) -> Path:
    """The base a host was made on: an overlay must never be mounted over another one than before."""
    record = lab.folder(host) / "base"
    if not record.exists():
        record.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(record, str(root))
    known = Path(record.read_text(encoding="utf-8"))
    if not known.is_dir():
        raise LabError(
            f"{host}: the root file system it stands on is gone ({known}); `lab.py down {lab.name}` and up again"
        )
    return known


def inventory(lab: Lab) -> str:
    """The lab's hosts for Ansible, as YAML written by hand: nothing but the standard library may be needed here.

    JSON strings are YAML strings, which settles all quoting.
    """
    options = shlex.join(hosts.ssh_options(lab))
    # An address a host has always been reached at is its address on the cluster's network, too.
    lines = ["---", f"# Written by lab.py for lab {lab.name}; gone with it.", "all:", "  hosts:"]
    for host in lab.hosts:
        values = {"ansible_host": lab.address(host), "fleet_address": lab.address(host)}
        lines += [f"    {host}:", *(f"      {name}: {json.dumps(value)}" for name, value in values.items())]
    common = {
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(lab.names.folder / "id"),
        "ansible_ssh_common_args": options,
        "ansible_ssh_timeout": hosts.SSH_SECONDS,
        "ansible_ssh_retries": 2,
        "ansible_python_interpreter": "/usr/bin/python3",
        "fleet_system": {"bookworm": "debian-12", "trixie": "debian-13"}.get(lab.suite, lab.suite),
        **({"fleet_http_proxy": machine.http_proxy()} if machine.http_proxy() else {}),
    }
    lines += ["  vars:", *(f"    {name}: {json.dumps(value)}" for name, value in common.items())]
    return "\n".join(lines) + "\n"


def write_inventory(lab: Lab) -> Path:
    path = lab.names.folder / "inventory.yml"
    write_atomically(path, inventory(lab))
    return path


def find(name: str, checkout: Path) -> Lab:
    lab = load(LabNames.of(name, checkout))
    if lab is None:
        raise UsageError(f"there is no lab {name} of {checkout}; `lab.py list` shows those of this machine")
    return lab


def down(names: LabNames) -> bool:
    """Remove a lab, however much of it there is. True when there was anything."""
    if os.geteuid() != 0:
        raise UsageError("removing a lab needs root")
    with locked(names.lock, doing=f"removing lab {names.lab_id}"):
        existed = names.folder.exists() or Path(f"/sys/class/net/{names.bridge}").exists()
        # Supervisors first: they would take a killed host for a reboot.
        cgroups.remove(f"{names.cgroup}/supervisors")
        cgroups.remove(names.cgroup)
        network.remove(names)
        _unmount_below(names.folder)
        if names.folder.exists():
            # The record goes last: a removal that is cut short is still a lab that `down --all` finds.
            for entry in sorted(names.folder.iterdir(), key=lambda path: path.name == "lab.json"):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            names.folder.rmdir()
        with machine_lock():
            network.restore_forwarding()
    return existed


def _mounts_below(folder: Path) -> list[str]:
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()]
    return sorted((point for point in points if point.startswith(f"{folder}/")), key=len, reverse=True)


def _unmount_below(folder: Path) -> None:
    """Unmount everything below a folder. Nothing is deleted while a mount is left: it could be somebody's files."""
    for point in _mounts_below(folder):
        run(["umount", "--lazy", point])
    if left := _mounts_below(folder):
        raise LabError(f"these cannot be unmounted: {', '.join(left)}; nothing below {folder} was deleted")
