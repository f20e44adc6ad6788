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
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import host_files, sysctl


def fail(module, text):
    """End with an error that names the host."""
    module.fail_json(msg=f"{socket.gethostname()}: {text}")


def set_live(module, name, value):
    """Write one value and read it back: some parameters take a value and keep another."""
    path = sysctl.proc_path(name)
    try:
        with open(path, "w", encoding="ascii") as handle:
            handle.write(f"{value}\n")  # with a newline: writing no byte at all would leave the former value
    except OSError as error:
        fail(
            module,
            f"{name} cannot be set to {value}: {error.strerror}. Leave it out, or choose a value the kernel takes",
        )
    if sysctl.present(name) != value:
        fail(module, f"{name} was set to {value}, but the kernel says {sysctl.present(name)}")


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
    path = module.params["path"]
    settings = {
        sysctl.normal_name(name): sysctl.normal_value(value) for name, value in module.params["settings"].items()
    }
    live = {name: sysctl.present(name) for name in settings}
    missing = sorted(name for name, value in live.items() if value is None)
    if missing:
        fail(module, f"this kernel has no {', '.join(missing)}; correct the name or leave it out. Nothing was changed")
    undone = sysctl.overridden(path, settings)
    if undone:
        fail(
            module,
            f"{'; '.join(undone)}: the next boot would undo it. Remove the line there, or give the value here. Nothing was changed",
        )
    text = sysctl.render(settings, module.params["header"]) if settings else None
    before = host_files.read(path)
    why = file_faults(path, text, before)
    altered = {name: value for name, value in settings.items() if live[name] != value}
    why += [f"{name} was {live[name]}, wanted {value}" for name, value in altered.items()]
    if not module.check_mode:
        apply(module, path, text, before, altered)
    diff = [{"before": before or "", "after": text or "", "before_header": path, "after_header": path}]
    if altered:
        kernel = {name: live[name] for name in altered}
        diff.append({"before": kernel, "after": altered, "before_header": "kernel", "after_header": "kernel"})
    module.exit_json(changed=bool(why), why=why, diff=diff)


def file_faults(path, text, before):
    """What is wrong with the file, as a list of at most one sentence."""
    if text is None:
        return [] if before is None else [f"{path} was there and sets nothing that is wanted"]
    wrong = host_files.wrong(path, text)
    return [wrong] if wrong else []


def apply(module, path, text, before, altered):
    """The kernel first: a value it refuses must not wait in the file for the next boot."""
    for name, value in altered.items():
        set_live(module, name, value)
    try:
        if text is None:
            if before is not None:
                os.unlink(path)
        elif host_files.wrong(path, text):
            host_files.write(path, text)
    except OSError as error:
        fail(module, f"{path}: {error.strerror}")


if __name__ == "__main__":
    main()
