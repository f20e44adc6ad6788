#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Build a driver's modules for kernels that have none yet."""

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_dkms
short_description: Have DKMS build a driver's modules for every kernel that lacks them
version_added: 0.1.0
description:
  - The packages build for the running kernel and the newest one; a host may boot another. Looks at C(dkms status), builds what is
    missing, and says how it ended; whether that is good is judged on the controller.
author: The gpu_fleet authors (@gpu-fleet)
options:
  version: {description: "The driver's version, as DKMS has it.", type: str, required: true}
  kernels: {description: Releases of the kernels., type: list, elements: str, required: true}
attributes:
  check_mode: {support: full, description: Says what would be built; where DKMS is not there yet, everything.}
  diff_mode: {support: none, description: The result names the kernels.}
"""

EXAMPLES = r"""
- name: Build for every kernel
  gpu_fleet.vllm.driver_dkms:
    version: 535.261.03
    kernels: [6.1.0-18-amd64]
"""

RETURN = r"""
built: {description: "Kernels that were built for, or would be.", type: list, elements: str, returned: success}
status: {description: "Output of C(dkms status) afterwards.", type: str, returned: success}
words: {description: "The last words of a build that failed, by kernel.", type: dict, returned: success}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_state

LINES = 12  # of a build's output; the whole is in make.log, which the finding names


def main():
    """Look, build, look."""
    module = AnsibleModule(
        argument_spec={
            "version": {"type": "str", "required": True},
            "kernels": {"type": "list", "elements": "str", "required": True},
        },
        supports_check_mode=True,
    )
    version, kernels = module.params["version"], module.params["kernels"]
    program = module.get_bin_path("dkms")
    text = _status(module, program)
    mine = driver_state.of_version(text, version)
    lacking = sorted(set(kernels) - driver_state.built(text, version))
    words = {}
    if not module.check_mode and program:
        for kernel in lacking:
            for name in sorted({item.module for item in mine}):
                status, out, err = module.run_command(
                    [program, "install", "--force", f"{name}/{version}", "-k", kernel]
                )
                if status:
                    words[kernel] = [line for line in (out + err).splitlines() if line.strip()][-LINES:]
        text = _status(module, program)
    module.exit_json(changed=bool(lacking), built=lacking, status=text, words=words)


def _status(module, program):
    return module.run_command([program, "status"])[1] if program else ""


if __name__ == "__main__":
    main()
