#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Collect from a host what bears on why something does not work."""

from __future__ import annotations

DOCUMENTATION = r"""
module: evidence
short_description: Collect from a host what bears on why something does not work
version_added: 0.1.0
description:
  - Journal of the servers and of the kernel, state of the units, plans, what the agents say, metrics, disks, ends of certificates, whether the
    models' files are there, interfaces that ranks are told, the fleet's firewall table, topology. It only reads, and reads no key and
    no file of secrets.
author: The gpu_fleet authors (@gpu-fleet)
options:
  since: {description: "As C(journalctl --since) takes it. Empty, since the host came up.", type: str, default: ""}
  agents: {description: Instance to the URL of this host's agent., type: dict, default: {}}
  certificates: {description: Certificates whose end is looked at., type: list, elements: path, default: []}
  pages: {description: Name of a page of metrics on this host to its URL., type: dict, default: {}}
  models: {description: Folder of the models that role model_store brought. Empty, they are not looked at., type: str, default: ""}
attributes:
  check_mode: {support: full, description: Only looks.}
  diff_mode: {support: none, description: Changes nothing.}
"""

EXAMPLES = r"""
- name: Collect
  gpu_fleet.vllm.evidence:
    since: -2h
"""

RETURN = r"""
evidence:
  description: See module_utils/evidence.py; journals are packed (zlib, base64).
  type: dict
  returned: success
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import evidence, gpu_facts


def main():
    module = AnsibleModule(
        argument_spec={
            "since": {"type": "str", "default": ""},
            "agents": {"type": "dict", "default": {}},
            "certificates": {"type": "list", "elements": "path", "default": []},
            "pages": {"type": "dict", "default": {}},
            "models": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    p = module.params
    found = evidence.gather(
        gpu_facts.command, p["since"], p["agents"], p["certificates"], pages=p["pages"], models=p["models"]
    )
    module.exit_json(changed=False, evidence=found)


if __name__ == "__main__":
    main()
