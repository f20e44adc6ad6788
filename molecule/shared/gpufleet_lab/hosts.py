"""One host: its overlay, the files that make it a host of its own, its process, and SSH to it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

from . import cgroups, machine
from .errors import LabError, UsageError
from .shell import PATH, run, works
from .state import Lab, write_atomically

REBOOT = 133  # what nspawn ends with when its host wants to boot again (EXIT_FORCE_RESTART)
BOOT_SECONDS = 60.0
# How much a host weighs against a process of this machine, when its processors are short.
WEIGHT_VARIABLE = "LAB_WEIGHT"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


# -- files ------------------------------------------------------------------------------------------------------------


def mounted(path: Path) -> bool:
    return os.path.ismount(path)


def ensure_root(lab: Lab, host: str, base: Path) -> Path:
    """Mount the host's overlay; write its files when it is new."""
    folder = lab.folder(host)
    root = folder / "root"
    for part in ("upper", "work", "root"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    if not mounted(root):
        options = f"lowerdir={base},upperdir={folder / 'upper'},workdir={folder / 'work'}"
        try:
            run(["mount", "-t", "overlay", "-o", options, f"gpufleet-{host}", str(root)])
        except LabError as error:
            raise UsageError(
                f"{host}: no overlay can be mounted below {folder}, which a lab host needs: {error}"
            ) from error
    if not (folder / "prepared").exists():
        _prepare(lab, host, root)
        (folder / "prepared").touch()
    return root


def _prepare(lab: Lab, host: str, root: Path) -> None:
    """What an installer would have asked: name, address, resolver, keys."""
    named = [f"{lab.address(name)} {name}" for name in lab.hosts]
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback", *named]
    gateway = f"Gateway={lab.gateway}\n" if lab.nat else ""
    files = {
        "etc/hostname": f"{host}\n",
        "etc/hosts": "\n".join(lines) + "\n",
        "etc/machine-id": uuid.uuid4().hex + "\n",  # an empty one means a first boot, with everything preset anew
        "etc/resolv.conf": machine.resolv_conf() if lab.nat else "# this lab has no way out\n",
        "etc/systemd/network/10-host0.network": (
            f"[Match]\nName=host0\n\n[Link]\nMTUBytes={machine.uplink_mtu()}\n\n[Network]\nAddress={lab.address(host)}/{lab.network.prefixlen}\n"
            f"{gateway}IPv6AcceptRA=no\nLLMNR=no\n"
        ),
        "root/.ssh/authorized_keys": (lab.names.folder / "id.pub").read_text(encoding="utf-8"),
        **({"etc/pip.conf": pip_conf()} if lab.nat and pip_conf() else {}),
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            path.unlink()
        path.write_text(text, encoding="utf-8")
    os.chmod(root / "root/.ssh", 0o700)
    for suffix in ("", ".pub"):
        target = root / f"etc/ssh/ssh_host_ed25519_key{suffix}"
        shutil.copyfile(lab.folder(host) / f"hostkey{suffix}", target)
        os.chmod(target, 0o644 if suffix else 0o600)
    for bind in lab.binds:
        (root / bind.target.lstrip("/")).mkdir(parents=True, exist_ok=True)


def pip_conf() -> str:
    """pip's settings of this machine as far as another machine can use them: no local folders."""
    from gpu_fleet.pipconf import network_only, pip_settings

    settings = network_only(pip_settings())
    options = {
        "index-url": settings.index_url,
        "extra-index-url": " ".join(settings.extra_index_urls),
        "find-links": " ".join(settings.find_links),
        "proxy": settings.proxy,
        "trusted-host": " ".join(settings.trusted_hosts),
    }
    lines = [f"{name} = {value}" for name, value in options.items() if value]
    return "\n".join(["[global]", *lines]) + "\n" if lines else ""


def ensure_keys(lab: Lab) -> None:
    """A key to log in with and one host key a host, made here so that the first login has nothing to take on trust."""
    pairs = {lab.names.folder / "id": "lab", **{lab.folder(host) / "hostkey": host for host in lab.hosts}}
    for path, comment in pairs.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.with_suffix(".pub").exists():
            path.unlink(missing_ok=True)
            run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)])
    known = [
        f"{lab.address(host)},{host} {(lab.folder(host) / 'hostkey.pub').read_text(encoding='utf-8').strip()}"
        for host in lab.hosts
    ]
    write_atomically(lab.names.folder / "known_hosts", "\n".join(known) + "\n")


# -- process ----------------------------------------------------------------------------------------------------------


def started_at(pid: int) -> str | None:
    """When a process began, in ticks since boot: with the pid it names one process, whatever pids are used again.

    None when it has ended, though nobody may have asked for its exit status yet (a container's pid 1 may never do).
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]


def supervisor(lab: Lab, host: str) -> int | None:
    """The pid that keeps the host running, if it is alive and the one that was written down."""
    try:
        record = json.loads((lab.folder(host) / "process.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    alive = record["boot_id"] == BOOT_ID.read_text(encoding="ascii") and record["started"] == started_at(record["pid"])
    return record["pid"] if alive else None


def ended(lab: Lab, host: str) -> bool:
    """Whether the process that ran the host wrote itself down and is gone: the host will not come up any more."""
    return (lab.folder(host) / "process.json").exists() and supervisor(lab, host) is None


def start(lab: Lab, host: str) -> None:
    """Start the process that runs the host, in a session of its own so that Ctrl-C here does not end it."""
    shim = Path(__file__).resolve().parents[1] / "lab.py"
    (lab.folder(host) / "process.json").unlink(missing_ok=True)
    with open(lab.folder(host) / "console.log", "ab") as console:
        subprocess.Popen(
            [sys.executable, str(shim), "_supervise", lab.lab_id, host],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
            env={"PATH": PATH, "LANG": "C.UTF-8", WEIGHT_VARIABLE: str(weight())},
        )


def weight() -> int:
    """What a host that is started now weighs, as many processes."""
    said = os.environ.get(WEIGHT_VARIABLE) or str(cgroups.HOST_WEIGHT)
    if not said.isdecimal() or not 1 <= int(said) <= 100:
        raise UsageError(f"{WEIGHT_VARIABLE}={said} is no number of processes from 1 to 100")
    return int(said)


def supervise(lab: Lab, host: str) -> int:
    """Run nspawn, again each time the host reboots. This is the process that `start` leaves behind."""
    cgroups.enter(f"{lab.names.cgroup}/supervisors")
    record = {"pid": os.getpid(), "started": started_at(os.getpid()), "boot_id": BOOT_ID.read_text(encoding="ascii")}
    write_atomically(lab.folder(host) / "process.json", json.dumps(record))
    command = nspawn_command(lab, host)
    group = f"{lab.names.cgroup}/{host}"
    while True:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: cgroups.enter(group, weight()),
            # A host sees one control group tree, version 2, as current systems do, whatever this machine has.
            env={"PATH": PATH, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1", "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network"},
        )
        if done.returncode != REBOOT:
            return done.returncode
        cgroups.remove(group)


def nspawn_command(lab: Lab, host: str) -> list[str]:
    return [
        *("systemd-nspawn", "--quiet", "--boot", "--register=no", "--keep-unit", "--console=read-only"),
        *("--link-journal=no", "--resolv-conf=off", "--timezone=off"),
        f"--directory={lab.folder(host) / 'root'}",
        f"--machine={lab.names.machine(host)}",
        f"--hostname={host}",
        f"--network-bridge={lab.names.bridge}",
        *(f"--bind-ro={bind.source}:{bind.target}" for bind in lab.binds),
    ]


# -- SSH --------------------------------------------------------------------------------------------------------------


# A machine that is short of memory or of processor time has kept a new connection waiting for more than ten seconds.
SSH_SECONDS = 30


def ssh_options(lab: Lab) -> list[str]:
    """Options that keep the user's own SSH configuration and known hosts out of it."""
    folder = lab.names.folder
    return [
        *(
            "-F",
            "/dev/null",
            "-o",
            f"UserKnownHostsFile={folder / 'known_hosts'}",
            "-o",
            "GlobalKnownHostsFile=/dev/null",
        ),
        *("-o", "StrictHostKeyChecking=yes", "-o", "IdentitiesOnly=yes", "-o", f"ConnectTimeout={SSH_SECONDS}"),
    ]


def ssh_command(lab: Lab, host: str) -> list[str]:
    return ["ssh", *ssh_options(lab), "-i", str(lab.names.folder / "id"), f"root@{lab.address(host)}"]


def wait_ready(lab: Lab, host: str) -> None:
    """Wait until the host has booted and lets us in. LabError with the end of its console when it does not."""
    end = time.monotonic() + BOOT_SECONDS
    while not _answers(lab.address(host)):
        if ended(lab, host):
            raise LabError(f"{host}: it ended while it booted{_console(lab, host)}")
        if time.monotonic() > end:
            raise LabError(f"{host}: no SSH at {lab.address(host)} within {BOOT_SECONDS:.0f} s{_console(lab, host)}")
        time.sleep(0.05)
    while not works([*ssh_command(lab, host), "systemctl is-system-running --wait | grep -qx -e running -e degraded"]):
        if time.monotonic() > end:
            raise LabError(
                f"{host}: SSH answers, but the host has not booted within {BOOT_SECONDS:.0f} s{_console(lab, host)}"
            )
        time.sleep(0.2)


def _answers(address: str) -> bool:
    try:
        with socket.create_connection((address, 22), timeout=1.0) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def _console(lab: Lab, host: str) -> str:
    path = lab.folder(host) / "console.log"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-5:] if path.exists() else []
    return "".join(f"\n    {line}" for line in lines) + f"\n    (console: {path})"
