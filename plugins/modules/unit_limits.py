#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Prove on a process that systemd starts which limits a host really grants."""

from __future__ import annotations

DOCUMENTATION = r"""
module: unit_limits
short_description: Prove on a process that systemd starts which limits a host really grants
version_added: 0.1.0
description:
  - systemd quietly gives a unit less than it asks for where the host does not allow as much (setrlimit_closest in its
    src/basic/rlimit-util.c), so that neither files nor C(systemctl show) say what a service gets. This module starts a
    process as a unit with the wanted limits, reads its /proc/PID/limits, and fails when it got less.
  - Leaves nothing behind and needs no system bus.
author: The gpu_fleet authors (@gpu-fleet)
options:
  nofile: {description: Open files., type: int, required: true}
  memlock: {description: 'Locked memory as systemd writes it: bytes, V(64G) and the like, or V(infinity).', type: str, required: true}
requirements: [systemd-run]
attributes:
  check_mode: {support: full, description: 'Looks in check mode, too: it changes nothing.'}
  diff_mode: {support: none, description: Changes nothing.}
"""

EXAMPLES = r"""
- name: Prove that the service can open as many files as it needs
  gpu_fleet.vllm.unit_limits:
    nofile: 524288
    memlock: infinity
"""

RETURN = r"""
granted:
  description: Soft and hard limits of the process as proc_pid_limits(5) prints them.
  type: dict
  returned: always
  sample: {nofile: ["524288", "524288"], memlock: [unlimited, unlimited]}
"""

import os
import re
import socket
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import limits

LINES = {"nofile": "Max open files", "memlock": "Max locked memory"}


def fail(module, text, **more):
    """End with an error that names the host."""
    module.fail_json(msg=f"{socket.gethostname()}: {text}", **more)


def granted_limits(module, nofile, memlock):
    """Limits of a process that systemd started with these.

    The output goes to a file: `systemd-run --wait` would need the system bus, which a minimal host lacks, while a
    oneshot unit is started when it has ended.
    """
    run = module.get_bin_path("systemd-run", required=True)
    with tempfile.TemporaryDirectory(dir="/run", prefix="gpu-fleet-limits-") as folder:
        output = os.path.join(folder, "limits")
        properties = [f"LimitNOFILE={nofile}", f"LimitMEMLOCK={memlock}", f"StandardOutput=truncate:{output}"]
        command = [run, "--quiet", "--collect", "--service-type=oneshot"]
        rc, _out, err = module.run_command(
            [*command, *(f"--property={item}" for item in properties), "cat", "/proc/self/limits"]
        )
        if rc:
            fail(module, f"no process starts with LimitNOFILE={nofile} and LimitMEMLOCK={memlock}: {err.strip()}")
        with open(output, encoding="ascii") as handle:
            text = handle.read()
    return {key: re.search(rf"^{line}\s+(\S+)\s+(\S+)", text, re.MULTILINE).groups() for key, line in LINES.items()}


def main():
    """Start, read, compare."""
    module = AnsibleModule(
        argument_spec={"nofile": {"type": "int", "required": True}, "memlock": {"type": "str", "required": True}},
        supports_check_mode=True,
    )
    nofile, memlock = module.params["nofile"], module.params["memlock"]
    try:
        locked = limits.locked_bytes(memlock)
    except ValueError as error:
        fail(module, f"host_limits_memlock: {error}")
    granted = granted_limits(module, nofile, memlock)
    wanted = {"nofile": str(nofile), "memlock": "unlimited" if locked == limits.INFINITY else str(locked)}
    less = [
        f"host_limits_{key} is {module.params[key]}, granted are {soft} (soft) and {hard} (hard)"
        for key, (soft, hard) in granted.items()
        if {soft, hard} != {wanted[key]}
    ]
    if less:
        remedy = "Set the variable to what the host grants, or raise the limit of what contains this host"
        fail(
            module,
            f"a process that systemd starts gets less than is asked for: {'; '.join(less)}. {remedy}",
            granted=granted,
        )
    module.exit_json(changed=False, granted=granted)


if __name__ == "__main__":
    main()
