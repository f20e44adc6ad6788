"""The root file system that all hosts of one Debian release share, read-only, below their overlays."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from .errors import LabError, UsageError
from .machine import MachineSettings
from .names import CACHE_ROOT
from .shell import PATH
from .state import locked

SCHEMA = 4  # count up when anything below changes what a base holds
# A bare Debian with SSH, as an installer leaves it. What the roles need beyond this they must bring themselves.
# python3-apt is part of Debian's standard system; without it Ansible's apt module cannot run in check mode.
PACKAGES = (
    "systemd",
    "systemd-sysv",
    "openssh-server",
    "python3",
    "python3-apt",
    "iproute2",
    "ca-certificates",
    "procps",
)
# They would wait for hardware or names a lab host does not have, or start work nobody asked for.
MASKED = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "console-getty.service",
    "container-getty@.service",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty@.service",
    "getty.target",
    "systemd-firstboot.service",
    "systemd-networkd-wait-online.service",
    "systemd-time-wait-sync.service",
    "systemd-timesyncd.service",
)


def key(suite: str, settings: MachineSettings) -> str:
    """Digest of all that decides what a base holds: another mirror or certificate makes another base."""
    digest = hashlib.sha256(
        repr((SCHEMA, suite, PACKAGES, MASKED, settings.apt.sources, settings.apt.options)).encode()
    )
    for path in (*settings.apt.keyrings, *settings.apt.logins, *settings.certificates):
        digest.update(str(path).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def folder(suite: str, settings: MachineSettings) -> Path:
    return CACHE_ROOT / f"base-{suite}-{key(suite, settings)}"


def ensure(suite: str, settings: MachineSettings, say) -> Path:
    """The base for a release, made if it is not there. Two runs that want it wait for one of them to make it."""
    wanted = folder(suite, settings)
    if wanted.is_dir():
        return wanted
    with locked(CACHE_ROOT / ".lock", doing="making the base root file system"):
        if wanted.is_dir():
            return wanted
        _sweep(suite)
        say(f"making the root file system of Debian {suite} (once; kept in {CACHE_ROOT})")
        # In a name of its own until it is whole: what a kill leaves is swept by the next run.
        building = Path(tempfile.mkdtemp(prefix=f".building-{suite}-", dir=CACHE_ROOT))
        try:
            _bootstrap(suite, building / "root", settings)
            os.rename(building / "root", wanted)
        finally:
            shutil.rmtree(building, ignore_errors=True)
        return wanted


def _sweep(suite: str) -> None:
    """Remove what killed runs left, and bases of the same release made from other settings that no host stands on."""
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
    for path in (*CACHE_ROOT.glob(f".building-{suite}-*"), *CACHE_ROOT.glob(f"base-{suite}-*")):
        if str(path) not in mounts:
            shutil.rmtree(path)


def _bootstrap(suite: str, root: Path, settings: MachineSettings) -> None:
    log = CACHE_ROOT / f"mmdebstrap-{suite}.log"
    with tempfile.TemporaryDirectory() as scratch:
        options = Path(scratch) / "apt-options"
        options.write_text(settings.apt.options, encoding="utf-8")
        sources = Path(scratch) / "debian.sources"
        sources.write_text(settings.apt.sources, encoding="utf-8")
        certificates = Path(scratch) / "certificates"
        certificates.mkdir()
        for path in settings.certificates:
            shutil.copy(path, certificates / path.name)
        command = [
            # A mount namespace of its own: what a killed mmdebstrap had mounted goes with it.
            *("unshare", "--mount", "--fork", "--kill-child", "--"),
            *(
                "mmdebstrap",
                "--mode=root",
                "--variant=minbase",
                "--format=directory",
                f"--include={','.join(PACKAGES)}",
            ),
            "--dpkgopt=force-unsafe-io",
            "--skip=cleanup/apt/lists",  # an installed system has its package lists, and check mode cannot fetch any
            f"--aptopt={options}",
            *(f'--setup-hook=install -D -m 0644 "{path}" "$1{path}"' for path in settings.apt.keyrings),
            *(f'--setup-hook=install -D -m 0600 "{path}" "$1{path}"' for path in settings.apt.logins),
            f'--customize-hook=mkdir -p "$1/usr/local/share/ca-certificates" && cp -r {certificates}/. "$1/usr/local/share/ca-certificates/"',
            '--customize-hook=chroot "$1" update-ca-certificates',
            '--customize-hook=chroot "$1" systemctl enable systemd-networkd.service ssh.service',
            '--customize-hook=chroot "$1" systemctl mask ' + " ".join(MASKED),
            # Each host gets keys and an identity of its own.
            '--customize-hook=rm -f "$1"/etc/ssh/ssh_host_* && : >"$1/etc/machine-id"',
            *(suite, str(root), str(sources)),
        ]
        with open(log, "w", encoding="utf-8") as stream:
            done = subprocess.run(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                check=False,
                env={**os.environ, "PATH": PATH, "TMPDIR": "/tmp"},
            )
    if done.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        first = next(
            (line for line in lines if line.startswith(("E:", "Err", "dpkg: error", "unshare:"))),
            lines[-1] if lines else "",
        )
        kind = UsageError if "Operation not permitted" in first and "unshare" in first else LabError
        raise kind(f"mmdebstrap could not make Debian {suite}: {first} (log: {log})")
