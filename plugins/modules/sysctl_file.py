#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Keep kernel parameters in a file of their own and in the running kernel."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sysctl_file
short_description: Keep kernel parameters in a file of their own and in the running kernel
version_added: 0.1.0
description:
  - The whole file is this module's, so that a parameter that is no longer wanted leaves it. (M(ansible.posix.sysctl) edits
    one parameter a task and leaves what it once wrote.) Both the file and the kernel's value are compared on every run.
  - A file that is read later at boot and sets another value would undo this one at the next boot; that is an error.
author: The gpu_fleet authors (@gpu-fleet)
options:
  path:
    description: The file, in /etc/sysctl.d.
    type: path
    required: true
  settings:
    description: Parameters and their values. Empty removes the file; the kernel's values then stay until the next boot.
    type: dict
    required: true
  header:
    description: A comment for the top of the file.
    type: str
    default: Made by Ansible.
attributes:
  check_mode: {support: full, description: Says what would change and changes nothing.}
  diff_mode: {support: full, description: Shows the file and the kernel's values before and after.}
"""

EXAMPLES = r"""
- name: Choose the ports that sockets without a port of their own get
  gpu_fleet.vllm.sysctl_file:
    path: /etc/sysctl.d/60-example.conf
    settings:
      net.ipv4.ip_local_port_range: 40000 60999
"""

RETURN = r"""
why:
  description: What was not as it should be.
  type: list
  elements: str
  returned: success
  sample: ["net.ipv4.ip_local_port_range was 32768 60999, wanted 40000 60999"]
"""

import os
import socket

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import sysctl


def main():
    """Compare file and kernel, and put right what is not as wanted."""
    os.umask(0o022)  # a hardened host's own would hide what is made here from the service user
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "settings": {"type": "dict", "required": True},
            "header": {"type": "str", "default": "Made by Ansible."},
        },
        supports_check_mode=True,
    )
    given = module.params
    try:
        found = sysctl.compare(given["path"], given["settings"], given["header"])
        if not module.check_mode:
            sysctl.apply(found)
    except sysctl.Refused as refused:
        module.fail_json(msg=f"{socket.gethostname()}: {refused}")
    module.exit_json(changed=bool(found.why), why=list(found.why), diff=found.diffs())


if __name__ == "__main__":
    main()
