"""The first command of the README on a machine that has nothing: a fresh Debian in place of this one's root.

The machine is played by a minimal root file system with git, python3 and pip, entered with `pivot_root` in a mount
namespace; kernel, network and control groups are this machine's. Nothing is cached in it. Needs root, 12 GB of disk
below /var/tmp and about ten minutes.

    scripts/test long tests/long/test_fresh_machine.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "molecule" / "shared" / "lab.py"
COLD_SECONDS, WARM_SECONDS = 600.0, 240.0
# What pip is told on this machine belongs to the machine that is played, too; its certificates are in the lab's base.
CARRIED = ("/etc/resolv.conf", "/etc/pip.conf", "/etc/xdg/pip", "/root/.config/pip")
PASSED_ON = (
    "PIP_",
    "SSL_CERT",
    "REQUESTS_CA",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
)

ENTER = r"""
set -eu
mount --bind "$ROOT" "$ROOT"
for kind in proc dev sys; do mount --rbind /$kind "$ROOT/$kind"; done
mount -t tmpfs tmpfs "$ROOT/run"
mkdir -p "$ROOT/.former"
for folder in $FOLDERS; do mkdir -p "$ROOT$folder"; mount --rbind "$folder" "$ROOT$folder"; done
cd "$ROOT"
pivot_root . .former
umount --lazy /.former
exec env HOME=/root /bin/bash -c "$COMMAND"
"""


@pytest.fixture(scope="module")
def machine() -> Path:
    """The root file system of a machine with git, python3 and pip, and a clone of this repository in /root/fleet."""
    base = subprocess.run([sys.executable, str(LAB), "base"], capture_output=True, text=True, check=True).stdout.strip()
    folder = Path(tempfile.mkdtemp(prefix="fresh-machine-", dir="/var/tmp"))
    root = folder / "root"
    subprocess.run(["cp", "-a", "--reflink=auto", base, root], check=True)
    for path in map(Path, CARRIED):
        if path.exists():
            (root / path.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-aT", "--remove-destination", path, root / path.relative_to("/")], check=True)
    run(root, "apt-get -qq update && apt-get -qq -y install --no-install-recommends git python3-pip >/dev/null", 300)
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(root / "root" / "fleet")], check=True)
    yield root
    run(root, "cd /root/fleet && scripts/demo down; molecule/shared/lab.py down --all", 300)
    assert str(folder) not in Path("/proc/self/mountinfo").read_text()
    shutil.rmtree(folder)


def local_folders() -> list[str]:
    """Folders of this machine that pip's configuration names: they are part of what the machine offers."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from gpu_fleet.pipconf import local_path, pip_settings, usable

    settings = pip_settings()
    paths = [local_path(address) for address in usable((*settings.extra_index_urls, *settings.find_links))]
    return sorted({str(path.parent if path.name == "simple" else path) for path in paths if path})


def run(root: Path, command: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command on the machine, its mounts gone with it."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    environment = {**kept, "ROOT": str(root), "FOLDERS": " ".join(local_folders()), "COMMAND": command}
    environment["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "bash", "-c", ENTER],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )
    print(done.stdout[-4000:], done.stderr[-2000:])
    return done


def test_one_command_from_nothing_to_an_answer(machine):
    began = time.monotonic()
    done = run(machine, "cd /root/fleet && scripts/demo", 1500)
    seconds = time.monotonic() - began
    print(f"measured: scripts/demo with nothing cached {seconds:.0f} s (at most {COLD_SECONDS:.0f})")
    assert done.returncode == 0
    assert "Paris" in done.stdout
    assert seconds <= COLD_SECONDS


def test_again_from_what_was_kept(machine):
    assert run(machine, "cd /root/fleet && scripts/demo down", 300).returncode == 0
    began = time.monotonic()
    done = run(machine, "cd /root/fleet && scripts/demo", 900)
    seconds = time.monotonic() - began
    print(f"measured: scripts/demo from its caches {seconds:.0f} s (at most {WARM_SECONDS:.0f})")
    assert done.returncode == 0
    assert seconds <= WARM_SECONDS
