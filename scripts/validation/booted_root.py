"""A machine's own root file system, booted once more under systemd: for a machine that has no systemd itself.

    python3 scripts/validation/booted_root.py up LAYER.tar FOLDER [--bind PATH] ...    (root; prints the pid of systemd)
    python3 scripts/validation/booted_root.py run FOLDER -- COMMAND ...
    python3 scripts/validation/booted_root.py down FOLDER

LAYER.tar: the files of Debian 12's packages systemd, libsystemd-shared, systemd-container and dbus, merged into /usr, and in
usr/lib/gpu_fleet_extra the libraries that they need; of these only what the machine lacks is used. An overlay of the layer
over / is the root, so that everything is there that the machine has; what is written stays in memory, in FOLDER. Other
file systems of the machine are not part of it: each that is wanted is named by --bind, the device nodes of its GPUs too.
The network is the machine's own. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "molecule/shared"))
from gpufleet_lab import cgroups

GROUP = "gpufleet/booted"
BUS = 893  # number of the user and group `messagebus`, where the machine has none
LIBRARIES = "usr/lib/x86_64-linux-gnu"
# What a root that serves needs of systemd is PID 1 and the journal; nothing that would act on the machine itself.
TARGET = """[Unit]
Description=Booted to serve
Requires=sysinit.target dbus.socket
After=sysinit.target dbus.socket
AllowIsolate=yes
"""
MASKED = (
    "systemd-networkd.service",
    "systemd-resolved.service",
    "systemd-timesyncd.service",
    "systemd-udevd.service",
    "systemd-logind.service",
    "systemd-modules-load.service",
    "systemd-sysctl.service",
    "systemd-random-seed.service",
    "systemd-remount-fs.service",
    "systemd-sysusers.service",
    "systemd-firstboot.service",
    "systemd-machine-id-commit.service",
    "systemd-update-utmp.service",
    "systemd-udev-trigger.service",
    "systemd-binfmt.service",
    "systemd-hwdb-update.service",
    "systemd-journal-catalog-update.service",
    "getty.target",
    "console-getty.service",
    "systemd-pstore.service",
    "proc-sys-fs-binfmt_misc.automount",
    "dev-hugepages.mount",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "sys-fs-fuse-connections.mount",
    "systemd-tmpfiles-setup-dev.service",
)


def up(layer: Path, folder: Path, binds: list[str]) -> int:
    folder.mkdir(parents=True)
    # An upper layer must not lie within a lower one, so it is a file system of its own.
    run("mount", "-t", "tmpfs", "-o", "mode=755", "gpufleet-booted", str(folder))
    for name in ("layer", "upper", "work", "root"):
        (folder / name).mkdir()
    run("tar", "--extract", "--file", str(layer), "--directory", str(folder / "layer"))
    extra = folder / "layer/usr/lib/gpu_fleet_extra"
    for library in sorted(extra.iterdir()):
        if not any((Path(place) / library.name).exists() for place in ("/" + LIBRARIES, "/lib/x86_64-linux-gnu")):
            library.rename(folder / "layer" / LIBRARIES / library.name)
    root = folder / "root"
    options = f"lowerdir={folder / 'layer'}:/,upperdir={folder / 'upper'},workdir={folder / 'work'}"
    run("mount", "-t", "overlay", "-o", options, "gpufleet-booted", str(root))
    units = root / "etc/systemd/system"
    units.mkdir(parents=True, exist_ok=True)
    (units / "booted.target").write_text(TARGET, encoding="ascii")
    for name, target in {"default.target": "booted.target", **dict.fromkeys(MASKED, "/dev/null")}.items():
        (units / name).unlink(missing_ok=True)
        (units / name).symlink_to(target)
    for table, line in (
        ("passwd", "messagebus:x:{0}:{0}::/nonexistent:/usr/sbin/nologin"),
        ("group", "messagebus:x:{0}:"),
    ):
        text = (root / "etc" / table).read_text(encoding="utf-8")
        if "\nmessagebus:" not in text:
            (root / "etc" / table).write_text(text + line.format(BUS) + "\n", encoding="utf-8")
    (root / "etc/machine-id").unlink(missing_ok=True)
    (root / "etc/machine-id").write_text("0123456789abcdef0123456789abcdef\n", encoding="ascii")
    for bind in binds:
        point = root / bind.lstrip("/")
        if Path(bind).is_dir():
            point.mkdir(parents=True, exist_ok=True)
    read_only = [bind for bind in binds if not bind.startswith(("/dev/", "/tmp/", "/var/"))]
    command = [
        str(root / "usr/bin/systemd-nspawn"),
        *("--quiet", "--boot", "--register=no", "--keep-unit", "--console=pipe", "--link-journal=no"),
        *("--resolv-conf=off", "--timezone=off", f"--directory={root}", "--machine=booted"),
        *(f"--bind{'-ro' if bind in read_only else ''}={bind}" for bind in binds),
    ]
    # nspawn itself runs on the machine, with the libraries that came along.
    paths = ":".join(str(root / place) for place in (LIBRARIES + "/systemd", LIBRARIES))
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LD_LIBRARY_PATH": paths,
        "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1",
        "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network",
    }
    with open(folder / "console.log", "wb") as console:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: cgroups.enter(GROUP),  # noqa: PLW1509  this program has one thread
        )
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if process.poll() is not None:
            print((folder / "console.log").read_text(encoding="utf-8", errors="replace"), file=sys.stderr)
            raise SystemExit(f"systemd-nspawn ended with status {process.returncode} while it booted")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
        if children:
            (folder / "pid").write_text(f"{process.pid} {children[0]}\n", encoding="ascii")
            state = inside(folder, "systemctl", "is-system-running", capture=True).stdout.strip()
            if state in ("running", "degraded"):
                print(f"systemd is process {children[0]}: {state}")
                return 0
        time.sleep(0.3)
    print((folder / "console.log").read_text(encoding="utf-8", errors="replace")[-4000:], file=sys.stderr)
    raise SystemExit("systemd has not booted within 60 s")


def inside(folder: Path, *command: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
    pid = (folder / "pid").read_text(encoding="ascii").split()[1]
    entered = ["nsenter", "--target", pid, "--mount", "--uts", "--ipc", "--pid", "--", *command]
    return subprocess.run(entered, text=True, capture_output=capture, check=False)


def down(folder: Path) -> int:
    if (folder / "pid").exists():
        inside(folder, "systemctl", "halt", "--force", "--no-wall", capture=True)
    cgroups.remove(GROUP)
    for point in (folder / "root", folder):
        subprocess.run(["umount", "--recursive", str(point)], check=False)
    folder.rmdir()
    return 0


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("up")
    verb.add_argument("layer", type=Path)
    verb.add_argument("folder", type=Path)
    verb.add_argument("--bind", action="append", default=[])
    verb = verbs.add_parser("run")
    verb.add_argument("folder", type=Path)
    verb.add_argument("command", nargs="+")
    verbs.add_parser("down").add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if os.geteuid():
        parser.error("only root may boot a root file system")
    if arguments.verb == "up":
        return up(arguments.layer, arguments.folder, arguments.bind)
    if arguments.verb == "run":
        return inside(arguments.folder, *arguments.command).returncode
    return down(arguments.folder)


if __name__ == "__main__":
    sys.exit(main())
