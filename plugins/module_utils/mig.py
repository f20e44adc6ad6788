#!/usr/bin/env python3
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""MIG instances as they are wanted: they end with the driver, so they are made anew at each boot, and it is looked whether they came.

One file for both: module mig of the collection, and the program that gpu-fleet-mig.service runs at boot:

    mig.py FILE        FILE is JSON, the index of a GPU to a list of profiles: {"0": ["1g.10gb", "1g.10gb", "19"]}

The commands are those of `nvidia-smi mig -h` and of NVIDIA's MIG user guide: -mig 1 switches MIG on, `mig -lgi` lists GPU
instances with the name and the number of their profile, `mig -cgi PROFILE,... -C` makes them with a compute instance each.
Nothing is destroyed here: instances of another layout may be in use.

Standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

Run = Callable[[Sequence[str]], Tuple[int, str]]

PATIENCE = 120.0
# `|   0  MIG 1g.10gb         19        9          2:1     |`
ROW = re.compile(r"^\|\s*(\d+)\s+MIG (\S+)\s+(\d+)\s+(\d+)\s+\d+:\d+\s*\|", re.MULTILINE)


class Wrong(Exception):
    """MIG is not as wanted, and cannot be made so here; the message says why and what to do."""


def command(argv: Sequence[str]) -> Tuple[int, str]:
    try:
        done = subprocess.run(list(argv), capture_output=True, text=True, timeout=PATIENCE, check=False)
    except FileNotFoundError as error:
        raise Wrong(f"{argv[0]} is not there. Install the driver first") from error
    except subprocess.TimeoutExpired as error:
        raise Wrong(
            f"{' '.join(argv)} gave no answer within {PATIENCE:g} s. Look at the kernel log for NVRM"
        ) from error
    return done.returncode, f"{done.stdout}\n{done.stderr}"


def instances(run: Run, gpu: str) -> List[Tuple[str, str]]:
    """(name, number of the profile) of each GPU instance."""
    _status, text = run(["nvidia-smi", "mig", "-i", gpu, "-lgi"])
    return [(name, number) for index, name, number, _ in ROW.findall(text) if index == gpu]


def lacking(found: Sequence[Tuple[str, str]], wanted: Sequence[str]) -> Tuple[List[str], List[str]]:
    """Profiles that are wanted and not there, and instances that are there and not wanted."""
    left = list(found)
    missing = []
    for profile in wanted:
        mine = next((item for item in left if profile in item), None)
        if mine is None:
            missing.append(profile)
        else:
            left.remove(mine)
    return missing, [name for name, _ in left]


def mode(run: Run, gpu: str) -> Tuple[str, str]:
    """Current and pending mode."""
    fields = "mig.mode.current,mig.mode.pending"
    status, text = run(["nvidia-smi", "-i", gpu, f"--query-gpu={fields}", "--format=csv,noheader"])
    words = [word.strip() for word in text.strip().split("\n")[0].split(",")]
    if status or len(words) != 2:
        raise Wrong(
            f"GPU {gpu}: nvidia-smi says {' '.join(text.split())[:200]!r} when asked for its MIG mode. Look whether it is there"
        )
    if words[0] == "[N/A]":
        raise Wrong(f"GPU {gpu} has no MIG. Take it out of gpu_driver_mig_layout")
    return words[0], words[1]


def judge(run: Run, layout: Mapping[str, Sequence[Any]]) -> Dict[str, List[str]]:
    """What has to be made, GPU to profiles; an empty list where only MIG has to be switched on does not happen.

    Raises Wrong for instances of another layout.
    """
    made: Dict[str, List[str]] = {}
    for gpu, wanted in sorted(layout.items()):
        current, _pending = mode(run, str(gpu))
        found = instances(run, str(gpu)) if current == "Enabled" else []
        missing, strange = lacking(found, [str(profile) for profile in wanted])
        if strange:
            raise Wrong(
                f"GPU {gpu} has the MIG instances {', '.join(name for name, _ in found)}, wanted are {', '.join(map(str, wanted))}. They may be in "
                f"use: stop what uses them, then `nvidia-smi mig -i {gpu} -dci; nvidia-smi mig -i {gpu} -dgi`, and run this again"
            )
        if missing:
            made[str(gpu)] = missing
    return made


def make(run: Run, layout: Mapping[str, Sequence[Any]]) -> Dict[str, List[str]]:
    """Make what is missing, and look whether it came: creating can succeed with nothing made. Returns what was made."""
    made = judge(run, layout)
    for gpu, profiles in made.items():
        if mode(run, gpu)[0] != "Enabled":
            _status, text = run(["nvidia-smi", "-i", gpu, "-mig", "1"])
            current, pending = mode(run, gpu)
            if current != "Enabled":
                raise Wrong(
                    f"GPU {gpu}: MIG is {current}, pending is {pending} ({' '.join(text.split())[:200]}). Stop what uses the GPU, then "
                    f"`nvidia-smi -i {gpu} --gpu-reset`, or reboot, and run this again"
                )
        status, text = run(["nvidia-smi", "mig", "-i", gpu, "-cgi", ",".join(profiles), "-C"])
        if status:
            raise Wrong(
                f"GPU {gpu}: the instances {', '.join(profiles)} cannot be made: {' '.join(text.split())[:300]}. `nvidia-smi mig -i {gpu} "
                "-lgip` lists the profiles and how many fit"
            )
    left = judge(run, layout)
    if left:
        told = "; ".join(f"GPU {gpu}: {', '.join(profiles)}" for gpu, profiles in left.items())
        raise Wrong(
            f"nvidia-smi said that it made the MIG instances, and -lgi does not list them: {told}. Run this again, or reset the GPU"
        )
    return made


def main(arguments: Sequence[str]) -> int:
    try:
        with open(arguments[0], encoding="utf-8") as handle:
            made = make(command, json.load(handle))
    except Wrong as error:
        print(error, file=sys.stderr)
        return 1
    for gpu, profiles in made.items():
        counted = ", ".join(f"{number} x {name}" for name, number in Counter(profiles).items())
        print(f"GPU {gpu}: made {counted}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
