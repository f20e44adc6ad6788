#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a host says about its driver's surroundings."""

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_facts
short_description: Kernels, packages, sources, DKMS and units that a change of the GPU driver has to know, without judgement
version_added: 0.1.0
description:
  - Looks at what surrounds the GPU driver of a Debian or Ubuntu host. Changes nothing. What a host does not have (dpkg, mokutil,
    dkms) is an empty answer, not a failure.
  - What the sources offer is asked by M(gpu_fleet.vllm.driver_apt), which reads the lists of packages anew.
author: The gpu_fleet authors (@gpu-fleet)
options:
  globs:
    description: Names of packages to look for, with C(*).
    type: list
    elements: str
    default: []
  modules:
    description: Kernel modules to look for in the running kernel's folder.
    type: list
    elements: str
    default: []
  modprobe_file:
    description: Name of the role's file in /etc/modprobe.d, looked for in each initramfs.
    type: str
    default: ""
  root:
    description: Where sysfs and procfs of a recorded host lie; packages, kernels and units are always those of this host.
    type: path
    default: /
attributes:
  check_mode: {support: full, description: Only looks.}
  diff_mode: {support: none, description: Changes nothing.}
"""

EXAMPLES = r"""
- name: Look at what surrounds the driver
  gpu_fleet.vllm.driver_facts:
    globs: ["nvidia-*", "libnvidia-*", libcuda1]
  register: surroundings
"""

RETURN = r"""
system: {description: ID and version of os-release; null when it has none., type: str, returned: success, sample: debian-12}
kernel: {description: Release of the running kernel., type: str, returned: success, sample: 6.1.0-18-amd64}
kernels:
  description: >-
    Every kernel that can be booted, by release. C(headers) says whether modules can be built for it, C(initrd) whether
    C(nouveau) and the role's file (C(ours)) are in its initramfs, null where it has none.
  type: dict
  returned: success
  sample: {6.1.0-18-amd64: {headers: true, initrd: {nouveau: false, ours: true}}}
packages:
  description: Installed packages that a glob matches, with C(version), C(hold) and C(state). C(origin) is always null here.
  type: dict
  returned: success
unsettled: {description: "Packages that dpkg left half done: name to state.", type: dict, returned: success}
interrupted: {description: Whether dpkg was stopped while it wrote its status., type: bool, returned: success}
audit: {description: "Output of C(dpkg --audit).", type: str, returned: success}
sources:
  description: Enabled entries of apt's sources with C(file), C(uri), C(suite), C(components) and C(signed_by).
  type: list
  elements: dict
  returned: success
secure_boot: {description: "What C(mokutil --sb-state) prints; null without mokutil.", type: str, returned: success}
dkms_key: {description: "The certificate that DKMS signs with: C(path), and C(there), whether it is made yet.", type: dict, returned: success}
key_enrolled: {description: "Whether the firmware knows DKMS's key; null when nobody can tell.", type: bool, returned: success}
nvlink5: {description: Whether an InfiniBand adapter manages NVLink switches; its module need not be loaded., type: bool, returned: success}
modules: {description: Which of the modules the running kernel has; null without a list of them., type: dict, returned: success}
loaded: {description: Which of the modules are loaded., type: list, elements: str, returned: success}
units: {description: Active services., type: list, elements: str, returned: success}
dkms: {description: "Output of C(dkms status).", type: str, returned: success}
runfile: {description: Whether a driver of NVIDIA's .run installer is there., type: bool, returned: success}
compat: {description: Folders of cuda-compat that the loader finds., type: list, elements: str, returned: success}
files: {description: "What role gpu_driver writes, as it is: path to text, null where there is none.", type: dict, returned: success}
params: {description: "Parameters of the loaded driver, C(/proc/driver/nvidia/params).", type: dict, returned: success}
mark: {description: What a run of role gpu_driver left that was not finished; null without., type: dict, returned: success}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_case, driver_host, gpu_facts


def main():
    """Look, and return."""
    module = AnsibleModule(
        argument_spec={
            "globs": {"type": "list", "elements": "str", "default": []},
            "modules": {"type": "list", "elements": "str", "default": []},
            "modprobe_file": {"type": "str", "default": ""},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    told = module.params
    module.exit_json(
        changed=False,
        **driver_host.gather(
            gpu_facts.command,
            root=told["root"],
            globs=told["globs"],
            modules=told["modules"],
            names=told["modprobe_file"],
            files=driver_case.PATHS.values(),
        ),
    )


if __name__ == "__main__":
    main()
