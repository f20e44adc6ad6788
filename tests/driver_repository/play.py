#!/usr/bin/env python3
"""Lay out a machine with GPUs and no driver, to be played by a lab host.

    play.py RECORDING FOLDER

FOLDER/srv/replay gets the files of the recorded host (tests/replay/hosts.py) as they are before any driver is loaded, and the
recording for nvidia-smi; FOLDER/usr/local/sbin and FOLDER/etc the stand-ins that load and boot. Copy FOLDER over a lab
host's root and write its kernel into /srv/replay/proc/sys/kernel/osrelease.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "replay"))

import hosts  # noqa: E402

PROGRAMS = ("played-gpus", "modprobe", "modinfo")


def bare(name: str) -> dict:
    """The recording without a driver."""
    made = hosts.recording(name, files={"proc/driver/nvidia/version": None, "proc/modules": ""})
    loaded = ("lib/modules/", "proc/driver/nvidia-nvswitch/")
    bound = [
        path
        for path, value in made["files"].items()
        if path.startswith(loaded) or (path.endswith("/driver") and "drivers/nvidia" in str(value))
    ]
    for path in bound:
        del made["files"][path]
    return made


def lay_out(name: str, folder: Path) -> None:
    recording = bare(name)
    shutil.rmtree(folder, ignore_errors=True)
    replay, programs, units = folder / "srv/replay", folder / "usr/local/sbin", folder / "etc/systemd/system"
    for path in (replay, programs, units):
        path.mkdir(parents=True)
    hosts.lay_out(recording, replay)
    (replay / "replay.json").write_text(json.dumps(recording), encoding="utf-8")
    (replay / "cuda_devices").write_text(f"{len(recording['nvidia_smi']['gpus'])}\n", encoding="ascii")
    for program in PROGRAMS:
        shutil.copy(HERE / "machine" / program, programs / program)
    shutil.copy(HERE / "machine" / "played-gpus.service", units)


if __name__ == "__main__":
    lay_out(sys.argv[1], Path(sys.argv[2]))
