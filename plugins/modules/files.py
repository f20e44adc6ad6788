#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Write several small files of root's in one go."""

from __future__ import annotations

DOCUMENTATION = r"""
module: files
short_description: Write several small text files of root's in one go
version_added: 0.1.0
description:
  - What a loop over M(ansible.builtin.copy) does, in one task, since each task costs a round trip on every host.
  - Files are compared by content, mode and owner, and replaced by rename. Missing folders are made with mode 0755.
author: The gpu_fleet authors (@gpu-fleet)
options:
  files:
    description: The files.
    type: list
    elements: dict
    required: true
    suboptions:
      path: {description: Absolute path., type: path, required: true}
      content: {description: The whole text., type: str, required: true}
      mode: {description: Permissions in octal., type: str, default: "0644"}
  reload:
    description:
      - Have systemd read its unit files again where one of O(files) was written, and where systemd says that it has yet to read
        them (C(NeedDaemonReload)), as after a run that was cut off in between.
    type: bool
    default: false
  running:
    description:
      - Units that are enabled and started once the files are written and systemd has read them again, as
        M(ansible.builtin.systemd_service) would do with C(enabled) and C(state=started). A unit that runs is left alone.
      - In check mode a unit whose file is yet to be written counts as one that would be enabled and started.
    type: list
    elements: str
    default: []
attributes:
  check_mode: {support: full, description: Says what would change and changes nothing.}
  diff_mode: {support: full, description: Shows each file before and after.}
"""

EXAMPLES = r"""
- name: Write a unit and its drop-in
  gpu_fleet.vllm.files:
    files:
      - path: /etc/systemd/system/example.service
        content: "{{ lookup('ansible.builtin.template', 'example.service.j2') }}"

- name: Write a unit, and have it run now and at boot
  gpu_fleet.vllm.files:
    files:
      - path: /etc/systemd/system/example.service
        content: "{{ lookup('ansible.builtin.template', 'example.service.j2') }}"
    reload: true
    running: [example.service]
"""

RETURN = r"""
why:
  description: What was not as it should be, one sentence a file, and one for each unit that was not enabled or not running.
  type: list
  elements: str
  returned: success
  sample: [/etc/nccl.conf had another content]
reloaded:
  description: Whether systemd read its unit files again.
  type: bool
  returned: success
started:
  description: Those of O(running) that were started.
  type: list
  elements: str
  returned: success
"""

import fnmatch
import os
import socket

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import host_files, units


def reload_systemd(module):
    """systemctl daemon-reload, or fail."""
    rc, _out, err = module.run_command(["systemctl", "daemon-reload"])
    if rc:
        module.fail_json(msg=f"{socket.gethostname()}: systemctl daemon-reload failed: {err.strip()}")


def have_running(module, name, written):
    """What was not as wanted of a unit, as sentences; afterwards it is enabled and runs. Says whether it was started.

    written: units whose files were not as wanted, as patterns. In check mode systemd knows the old ones, or none.
    """
    unit, host = units.standing(name), socket.gethostname()
    look = f"`systemctl status {name}` and `journalctl -u {name}` on that host say why"
    yet_to_come = module.check_mode and any(fnmatch.fnmatchcase(name, pattern) for pattern in written)
    if not unit.found and not yet_to_come:
        module.fail_json(msg=f"{host}: there is no unit {name} that could be started. Write its file, or leave it out")
    if unit.error and not yet_to_come:
        module.fail_json(msg=f"{host}: systemd cannot use the file of {name}: {unit.error}. {look}")
    wanted = []
    if not unit.enabled:
        wanted.append(("enable", f"{name} was not enabled", f"{name} cannot be enabled"))
    if not unit.running:
        wanted.append(("start", f"{name} was not running ({unit.active})", f"{name} does not start"))
    for verb, _was, failed in wanted if not module.check_mode else []:
        done = units.systemctl(verb, name)
        if done.returncode:
            module.fail_json(msg=f"{host}: {failed}: {(done.stderr or done.stdout).strip()}. {look}")
    return [was for _verb, was, _failed in wanted], not unit.running


def main():
    """Compare each file, write those that are not as wanted; then its units."""
    os.umask(0o022)  # a hardened host's own would hide what is made here from the service user
    module = AnsibleModule(
        argument_spec={
            "files": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "path": {"type": "path", "required": True},
                    "content": {"type": "str", "required": True},
                    "mode": {"type": "str", "default": "0644"},
                },
            },
            "reload": {"type": "bool", "default": False},
            "running": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    why, diffs, written, started = [], [], [], []
    for item in module.params["files"]:
        path, text, mode = item["path"], item["content"], int(item["mode"], 8)
        try:
            wrong = host_files.wrong(path, text, mode)
            if wrong:
                why.append(wrong)
                written.append(path)
                before = host_files.read(path) or ""
                diffs.append({"before": before, "after": text, "before_header": path, "after_header": path})
                if not module.check_mode:
                    host_files.write(path, text, mode)
        except OSError as error:
            module.fail_json(msg=f"{socket.gethostname()}: {path}: {error.strerror}")
    reloaded = module.params["reload"] and (
        bool(why) or units.unread([item["path"] for item in module.params["files"]])
    )
    if reloaded and not module.check_mode:
        reload_systemd(module)
    for name in module.params["running"]:
        faults, was_started = have_running(module, name, units.of_files(written))
        why += faults
        started += [name] if was_started else []
    module.exit_json(changed=bool(why), why=why, diff=diffs, reloaded=reloaded, started=started)


if __name__ == "__main__":
    main()
