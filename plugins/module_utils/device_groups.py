"""Which groups a service has to be in to open the device nodes of a host. Runs on hosts: standard library, Python 3.9 and newer."""

from __future__ import annotations

import glob
import grp
import os
import stat
from typing import Any, Dict, List, Sequence

PARAMS = "/proc/driver/nvidia/params"
BOTH = 0o6  # read and write, of one of the three triples of a mode


def nodes(patterns: Sequence[str]) -> List[Dict[str, Any]]:
    """Character devices of these patterns: path, mode, gid."""
    found = []
    for path in sorted({path for pattern in patterns for path in glob.glob(pattern)}):
        status = os.stat(path)
        if stat.S_ISCHR(status.st_mode):
            found.append({"path": path, "mode": stat.S_IMODE(status.st_mode), "gid": status.st_gid})
    return found


def promised(text: str) -> List[Dict[str, Any]]:
    """The nodes that the NVIDIA module's parameters ask for; mode and group are decimal there."""
    told = dict(line.replace(" ", "").partition(":")[::2] for line in text.splitlines())
    try:
        mode, gid = int(told["DeviceFileMode"]), int(told["DeviceFileGID"])
    except (KeyError, ValueError):
        return []
    return [{"path": "/dev/nvidia0", "mode": mode, "gid": gid}]


def groups(found: Sequence[Dict[str, Any]]) -> List[str]:
    """Groups that may open nodes which not everybody may; root's is none to be in."""
    wanted = {
        node["gid"]
        for node in found
        if node["gid"] and node["mode"] & BOTH != BOTH and node["mode"] >> 3 & BOTH == BOTH
    }
    return sorted(map(name, wanted))


def name(gid: int) -> str:
    """The group's name, or its number where it has none."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def look(patterns: Sequence[str]) -> Dict[str, Any]:
    """`groups`, and `nodes` with their modes in octal; where no node of a GPU is there yet, those that nvidia-modprobe would make."""
    found = nodes(patterns)
    wants_gpus = any(pattern.startswith("/dev/nvidia") for pattern in patterns)
    if wants_gpus and not any(node["path"].startswith("/dev/nvidia") for node in found) and os.path.exists(PARAMS):
        with open(PARAMS, encoding="ascii", errors="replace") as handle:
            found += promised(handle.read())
    return {"groups": groups(found), "nodes": [{**node, "mode": f"{node['mode']:04o}"} for node in found]}
