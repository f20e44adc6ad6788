#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Whether CUDA starts on a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cuda_init
short_description: Call cuInit of the driver's library, and say what it returned
version_added: 0.1.0
description:
  - C(nvidia-smi) answers on hosts where no program can use CUDA, such as one whose NVLink fabric is not set up. This calls what every
    program calls first, C(cuInit), by ctypes, in a process of its own with a deadline. Changes nothing.
author: The gpu_fleet authors (@gpu-fleet)
options:
  library:
    description: The library, by name or path.
    type: str
    default: libcuda.so.1
  timeout:
    description: Seconds it may take.
    type: float
    default: 120
attributes:
  check_mode: {support: full, description: Only looks.}
  diff_mode: {support: none, description: Changes nothing.}
"""

EXAMPLES = r"""
- name: See whether CUDA starts
  gpu_fleet.vllm.cuda_init:
  register: cuda
"""

RETURN = r"""
code: {description: "What cuInit returned, 0 for success; null when it was not reached.", type: int, returned: success, sample: 802}
devices: {description: How many GPUs CUDA sees; null after a failure., type: int, returned: success, sample: 8}
cuda: {description: "The driver's CUDA, 13000 for 13.0; null when not told.", type: int, returned: success, sample: 13000}
error: {description: Why cuInit was not reached; null otherwise., type: str, returned: success}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import cuda


def main():
    """Look, and return."""
    module = AnsibleModule(
        argument_spec={
            "library": {"type": "str", "default": "libcuda.so.1"},
            "timeout": {"type": "float", "default": cuda.PATIENCE},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, **cuda.init(module.params["library"], module.params["timeout"]))


if __name__ == "__main__":
    main()
