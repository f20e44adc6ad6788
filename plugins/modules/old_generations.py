#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Take away generations of an instance, and their caches, that no start and no rollback needs."""

from __future__ import annotations

DOCUMENTATION = r"""
module: old_generations
short_description: Take away generations of an instance that no start and no rollback needs
version_added: 0.1.0
description:
  - Keeps the generation that C(current) points at, the one before it (C(previous)), the one that the running process was started from,
    and the newest others up to O(keep).
  - Takes away only what M(gpu_fleet.vllm.generation) made; anything else in the folders is left alone.
  - A cache goes with its generation, and so does one whose generation is gone.
author: The gpu_fleet authors (@gpu-fleet)
options:
  instance: {description: 'Name of the instance, SERVICE.N.', type: str, required: true}
  generation:
    description: ID of the generation that is wanted. Where C(current) points elsewhere, as in check mode, what remains is said as if it had been switched.
    type: str
    required: true
  keep: {description: How many generations stay., type: int, default: 3}
  root: {description: Folder of all instances., type: path, default: /etc/vllm}
  cache: {description: Folder of all instances' caches., type: path, default: /var/cache/vllm}
attributes:
  check_mode: {support: full, description: Says what would go and changes nothing.}
  diff_mode: {support: full, description: Lists the folders that go.}
"""

EXAMPLES = r"""
- name: Take away what no rollback needs
  gpu_fleet.vllm.old_generations:
    instance: chat.0
    generation: 1a2b3c4d5e6f
"""

RETURN = r"""
removed: {description: Folders that went., returned: always, type: list, elements: str}
kept: {description: IDs of the generations that stay., returned: always, type: list, elements: str}
"""

import fcntl
import os
import shutil
import socket

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import old_generations, units


def main():
    """Decide and remove, under the lock of the instance."""
    module = AnsibleModule(
        argument_spec={
            "instance": {"type": "str", "required": True},
            "generation": {"type": "str", "required": True},
            "keep": {"type": "int", "default": 3},
            "root": {"type": "path", "default": "/etc/vllm"},
            "cache": {"type": "path", "default": "/var/cache/vllm"},
        },
        supports_check_mode=True,
    )
    p = module.params
    home, caches = os.path.join(p["root"], p["instance"]), os.path.join(p["cache"], p["instance"])
    if not module.check_mode and os.path.isdir(home):
        lock = open(os.path.join(home, ".lock"), "w", encoding="ascii")  # noqa: SIM115  held until the end
        fcntl.flock(lock, fcntl.LOCK_EX)
    running = units.show(p["instance"]).generation
    going, kept = old_generations.going(home, caches, p["generation"], running, p["keep"])
    if not module.check_mode:
        for folder in going:
            try:
                shutil.rmtree(folder)
            except OSError as error:
                module.fail_json(
                    msg=f"{socket.gethostname()}: {folder} cannot be removed: {error.filename}: {error.strerror}. "
                    "Nothing needs it any more; remove it by hand"
                )
    module.exit_json(
        changed=bool(going),
        removed=going,
        kept=kept,
        diff={"before": "".join(f"{folder}\n" for folder in going), "after": ""},
    )


if __name__ == "__main__":
    main()
