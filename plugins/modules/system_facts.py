#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Say what the roles have to know of a host's system."""

from __future__ import annotations

DOCUMENTATION = r"""
module: system_facts
short_description: Say what the roles have to know of a host's system
version_added: 0.1.0
description:
  - The few facts of M(ansible.builtin.setup) that roles of this collection use, with the values that it gives them on Debian and
    Ubuntu, and what role package_source left. Setup with the same facts takes a second on a host, this module a quarter of it.
author: The gpu_fleet authors (@gpu-fleet)
options:
  package_source:
    description: What role package_source writes, as data/package_source.yml has it. Without it nothing is looked for.
    type: dict
    suboptions:
      file: {description: The source of carried packages., type: path, required: true}
      silence: {description: The setting of apt that goes with it., type: path, required: true}
      aside: {description: The end of the names of sources that are set aside., type: str, required: true}
      folders: {description: Where to look., type: list, elements: path, required: true}
attributes:
  check_mode: {support: full, description: Changes nothing.}
  diff_mode: {support: none, description: Changes nothing.}
"""

EXAMPLES = r"""
- name: Ask for the system
  gpu_fleet.vllm.system_facts:

- name: Say which it is
  ansible.builtin.debug:
    msg: "{{ ansible_facts['distribution'] }} {{ ansible_facts['distribution_version'] }}"
"""

RETURN = r"""
ansible_facts:
  description: C(distribution), C(distribution_version), C(distribution_major_version) and C(nodename), as M(ansible.builtin.setup) has them.
  type: dict
  returned: success
  sample:
    ansible_distribution: Debian
    ansible_distribution_version: "12.9"
    ansible_distribution_major_version: "12"
    ansible_nodename: gpu-01
package_source_left:
  description: Files that role package_source wrote or set aside.
  type: list
  elements: str
  returned: success
  sample: [/etc/apt/sources.list.d/gpu-fleet-carried.sources]
"""

import platform

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.common.sys_info import get_distribution, get_distribution_version
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import host_files, system_facts


def main():
    """Look and say."""
    options = {
        "file": {"type": "path", "required": True},
        "silence": {"type": "path", "required": True},
        "aside": {"type": "str", "required": True},
        "folders": {"type": "list", "elements": "path", "required": True},
    }
    module = AnsibleModule(
        argument_spec={"package_source": {"type": "dict", "options": options}}, supports_check_mode=True
    )
    found = system_facts.facts(
        host_files.read(system_facts.OS_RELEASE) or "",
        get_distribution(),
        get_distribution_version(),
        platform.node(),
    )
    source = module.params["package_source"]
    left = system_facts.package_source_left(**source) if source else []
    module.exit_json(changed=False, ansible_facts=found, package_source_left=left)


if __name__ == "__main__":
    main()
