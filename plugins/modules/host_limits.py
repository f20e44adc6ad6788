#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Write the limits of a host, and prove on a process that it grants them."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_limits
short_description: Write the limits of a host, and prove on a process that it grants them
version_added: 0.1.0
description:
  - Writes the limits of logins and the kernel parameters, each in a file of its own, sets the parameters in the running kernel, and
    starts a process as a unit with O(nofile) and O(memlock). It reads that process's /proc/PID/limits and fails when it got less.
  - systemd quietly gives a unit less than it asks for where the host does not allow as much (setrlimit_closest in its
    src/basic/rlimit-util.c), so that neither files nor C(systemctl show) say what a service gets.
  - The proof leaves nothing behind and needs no system bus. A file that is read later at boot and sets another value of a parameter
    is an error, before anything is changed, as with M(gpu_fleet.vllm.sysctl_file).
author: The gpu_fleet authors (@gpu-fleet)
options:
  nofile: {description: Open files., type: int, required: true}
  memlock: {description: 'Locked memory as systemd writes it: bytes, V(64G) and the like, or V(infinity).', type: str, required: true}
  logins: {description: The whole file of limits.conf(5)., type: str, required: true}
  logins_path: {description: 'Where it goes, in /etc/security/limits.d.', type: path, required: true}
  settings:
    description: Kernel parameters and their values. Empty removes their file; the kernel's values then stay until the next boot.
    type: dict
    default: {}
  settings_path: {description: 'The file of the kernel parameters, in /etc/sysctl.d.', type: path, required: true}
  header: {description: A comment for the top of the file of kernel parameters., type: str, default: Made by Ansible.}
requirements: [systemd-run]
attributes:
  check_mode: {support: full, description: 'Says what would change and changes nothing. The proof is made in check mode, too.'}
  diff_mode: {support: full, description: Shows the files and the kernel's values before and after.}
"""

EXAMPLES = r"""
- name: Let the service open as many files as it needs
  gpu_fleet.vllm.host_limits:
    nofile: 524288
    memlock: infinity
    logins: |
      vllm - nofile 524288
      vllm - memlock unlimited
    logins_path: /etc/security/limits.d/60-example.conf
    settings:
      net.core.somaxconn: 8192
    settings_path: /etc/sysctl.d/60-example.conf
"""

RETURN = r"""
why:
  description: What was not as it should be.
  type: list
  elements: str
  returned: always
  sample: ["net.core.somaxconn was 4096, wanted 8192"]
granted:
  description: Soft and hard limits of the process as proc_pid_limits(5) prints them.
  type: dict
  returned: success, and when less was granted
  sample: {nofile: ["524288", "524288"], memlock: [unlimited, unlimited]}
"""

import os
import socket

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import host_files, limits, sysctl


def fail(module, text, **more):
    """End with an error that names the host."""
    module.fail_json(msg=f"{socket.gethostname()}: {text}", **more)


def write_logins(module):
    """What was wrong with the file of logins, and its diff; it is right afterwards. In check mode only what is wrong."""
    path, text = module.params["logins_path"], module.params["logins"]
    try:
        wrong = host_files.wrong(path, text)
        before = host_files.read(path) or ""
        if wrong and not module.check_mode:
            host_files.write(path, text)
    except OSError as error:
        fail(module, f"{path}: {error.strerror}")
    if not wrong:
        return [], []
    return [wrong], [{"before": before, "after": text, "before_header": path, "after_header": path}]


def prove(module, **so_far):
    """The limits of a process that systemd starts with those that are asked for, or fail."""
    nofile, memlock = module.params["nofile"], module.params["memlock"]
    program = module.get_bin_path("systemd-run", required=True)

    def run(command):
        rc, _out, err = module.run_command(list(command))
        return rc, err

    try:
        granted = limits.granted(program, run, nofile, memlock)
        less = limits.less_than_asked(granted, nofile, memlock)
    except limits.NotStarted as error:
        fail(module, str(error), **so_far)
    if less:
        remedy = "Set the variable to what the host grants, or raise the limit of what contains this host"
        fail(
            module,
            f"a process that systemd starts gets less than is asked for: {'; '.join(less)}. {remedy}",
            granted=granted,
            **so_far,
        )
    return granted


def main():
    """Refuse what cannot be, write, prove."""
    os.umask(0o022)  # a hardened host's own would hide what is made here from the service user
    module = AnsibleModule(
        argument_spec={
            "nofile": {"type": "int", "required": True},
            "memlock": {"type": "str", "required": True},
            "logins": {"type": "str", "required": True},
            "logins_path": {"type": "path", "required": True},
            "settings": {"type": "dict", "default": {}},
            "settings_path": {"type": "path", "required": True},
            "header": {"type": "str", "default": "Made by Ansible."},
        },
        supports_check_mode=True,
    )
    given = module.params
    try:
        limits.locked_bytes(given["memlock"])
    except ValueError as error:
        fail(module, f"host_limits_memlock: {error}")
    why, diffs = [], []
    try:
        found = sysctl.compare(given["settings_path"], given["settings"], given["header"])
        why, diffs = write_logins(module)
        if not module.check_mode:
            sysctl.apply(found)
    except sysctl.Refused as refused:
        fail(module, str(refused), changed=bool(why), why=why, diff=diffs)
    why, diffs = [*why, *found.why], [*diffs, *found.diffs()]
    granted = prove(module, changed=bool(why), why=why, diff=diffs)
    module.exit_json(changed=bool(why), why=why, diff=diffs, granted=granted)


if __name__ == "__main__":
    main()
