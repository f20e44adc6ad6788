#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""MIG instances as they are wanted."""

from __future__ import annotations

DOCUMENTATION = r"""
module: mig
short_description: Make the MIG instances that a layout wants
version_added: 0.1.0
description:
  - Compares what C(nvidia-smi mig -lgi) lists with the layout, makes what is missing, and looks again, since making can succeed with
    nothing made. Instances of another layout are never destroyed; the module fails and says how.
author: The gpu_fleet authors (@gpu-fleet)
options:
  layout:
    description: Index of a GPU to a list of profiles, by name or number.
    type: dict
    required: true
attributes:
  check_mode: {support: full, description: Says what would be made.}
  diff_mode: {support: none, description: The result names the instances.}
"""

EXAMPLES = r"""
- name: Cut the first GPU into seven
  gpu_fleet.vllm.mig:
    layout: {0: [1g.18gb, 1g.18gb, 1g.18gb, 1g.18gb, 1g.18gb, 1g.18gb, 1g.18gb]}
"""

RETURN = r"""
made: {description: "What was missing, GPU to profiles.", type: dict, returned: success}
"""

import socket

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import gpu_facts, mig


def main():
    """Compare, make, compare."""
    module = AnsibleModule(argument_spec={"layout": {"type": "dict", "required": True}}, supports_check_mode=True)
    layout = {str(gpu): profiles for gpu, profiles in module.params["layout"].items()}
    try:
        made = mig.judge(_run, layout) if module.check_mode else mig.make(_run, layout)
    except mig.Wrong as error:
        module.fail_json(msg=f"{socket.gethostname()}: {error}")
    module.exit_json(changed=bool(made), made=made)


def _run(argv):
    try:
        status, out, err = gpu_facts.command(argv, mig.PATIENCE)
    except FileNotFoundError as error:
        raise mig.Wrong(f"{argv[0]} is not there. Install the driver first") from error
    return status, f"{out}\n{err}"


if __name__ == "__main__":
    main()
