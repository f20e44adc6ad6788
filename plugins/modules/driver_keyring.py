#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The key of a package repository, as a file that apt reads."""

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_keyring
short_description: Write the key of a package repository
version_added: 0.1.0
description:
  - Writes a binary keyring, as apt's Signed-By wants it under the name C(.gpg), which no module that takes text can.
author: The gpu_fleet authors (@gpu-fleet)
options:
  path: {description: Where., type: path, required: true}
  content: {description: "The key, base64, as M(gpu_fleet.vllm.driver_apt) returned it.", type: str, required: true}
attributes:
  check_mode: {support: full, description: Says whether it would change.}
  diff_mode: {support: full, description: Shows the fingerprints before and after.}
"""

EXAMPLES = r"""
- name: Write the key
  gpu_fleet.vllm.driver_keyring:
    path: /usr/share/keyrings/cuda-archive-keyring.gpg
    content: "{{ offers.keyring.base64 }}"
"""

RETURN = r"""
fingerprints: {description: Those of the keys in it., type: list, elements: str, returned: success}
"""

import base64
import os
import socket

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_key, host_files


def main():
    """Compare, and write what is not as wanted."""
    module = AnsibleModule(
        argument_spec={"path": {"type": "path", "required": True}, "content": {"type": "str", "required": True}},
        supports_check_mode=True,
    )
    path = module.params["path"]
    try:
        raw = base64.b64decode(module.params["content"])
        new = driver_key.fingerprints(raw)
    except ValueError as error:
        module.fail_json(msg=f"{socket.gethostname()}: what is to be written to {path} is no key: {error}")
    old = _there(path)
    try:
        changed = old is None or old != raw or os.stat(path).st_mode & 0o777 != 0o644
        if changed and not module.check_mode:
            host_files.write_bytes(path, raw)
    except OSError as error:
        module.fail_json(msg=f"{socket.gethostname()}: {path}: {error.strerror}")
    module.exit_json(
        changed=changed,
        fingerprints=new,
        diff={"before": _shown(old), "after": _shown(raw), "before_header": path, "after_header": path},
    )


def _there(path):
    try:
        with open(path, "rb") as handle:
            return handle.read()
    except OSError:
        return None


def _shown(raw):
    if raw is None:
        return ""
    try:
        return "".join(f"{one}\n" for one in driver_key.fingerprints(driver_key.dearmor(raw)))
    except ValueError as error:
        return f"no key: {error}\n"


if __name__ == "__main__":
    main()
