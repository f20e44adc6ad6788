#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Tell which groups a service has to be in to open the device nodes of a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: device_groups
short_description: Tell which groups a service has to be in to open the device nodes of a host
version_added: 0.1.0
description:
  - Looks at character devices and names the groups of those that their group may read and write and not everybody.
  - Where no node of an NVIDIA GPU is there yet, says what nvidia-modprobe would make, from C(/proc/driver/nvidia/params).
author: The gpu_fleet authors (@gpu-fleet)
options:
  paths: {description: 'Patterns of paths, such as V(/dev/nvidia*).', type: list, elements: str, required: true}
attributes:
  check_mode: {support: full, description: 'Looks in check mode, too: it changes nothing.'}
  diff_mode: {support: none, description: Changes nothing.}
"""

EXAMPLES = r"""
- name: Look at the GPUs' device nodes
  gpu_fleet.vllm.device_groups:
    paths: [/dev/nvidia*]
"""

RETURN = r"""
groups:
  description: Names of the groups, or numbers where a group has no name.
  type: list
  elements: str
  returned: always
  sample: [video]
nodes:
  description: The nodes that were found and what their access is.
  type: list
  elements: dict
  returned: always
  sample: [{path: /dev/nvidia0, mode: "0660", gid: 44}]
"""

import glob
import grp
import os
import stat

from ansible.module_utils.basic import AnsibleModule

PARAMS = "/proc/driver/nvidia/params"
BOTH = 0o6  # read and write, of one of the three triples of a mode


def nodes(patterns):
    """Character devices of these patterns: path, mode, gid."""
    found = []
    for path in sorted({path for pattern in patterns for path in glob.glob(pattern)}):
        status = os.stat(path)
        if stat.S_ISCHR(status.st_mode):
            found.append({"path": path, "mode": stat.S_IMODE(status.st_mode), "gid": status.st_gid})
    return found


def promised(text):
    """The nodes that the NVIDIA module's parameters ask for; mode and group are decimal there."""
    told = dict(line.replace(" ", "").partition(":")[::2] for line in text.splitlines())
    try:
        mode, gid = int(told["DeviceFileMode"]), int(told["DeviceFileGID"])
    except (KeyError, ValueError):
        return []
    return [{"path": "/dev/nvidia0", "mode": mode, "gid": gid}]


def groups(found):
    """Groups that may open nodes which not everybody may; root's is none to be in."""
    wanted = {
        node["gid"]
        for node in found
        if node["gid"] and node["mode"] & BOTH != BOTH and node["mode"] >> 3 & BOTH == BOTH
    }
    return sorted(map(name, wanted))


def name(gid):
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def main():
    """Look and tell."""
    module = AnsibleModule(
        argument_spec={"paths": {"type": "list", "elements": "str", "required": True}}, supports_check_mode=True
    )
    found = nodes(module.params["paths"])
    if not any(node["path"].startswith("/dev/nvidia") for node in found) and os.path.exists(PARAMS):
        with open(PARAMS, encoding="ascii", errors="replace") as handle:
            found += promised(handle.read())
    shown = [{**node, "mode": f"{node['mode']:04o}"} for node in found]
    module.exit_json(changed=False, groups=groups(found), nodes=shown)


if __name__ == "__main__":
    main()
