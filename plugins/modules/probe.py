#!/usr/bin/python
from __future__ import annotations

DOCUMENTATION = r"""
module: probe
short_description: Ask a vLLM server for one token and check the answer
description:
  - An authenticated completion of one token with a deadline. C(/health) proves nothing: it says 200 while every request hangs.
author: The gpu_fleet authors
options:
  url:
    description: Base URL of the API, such as V(http://10.0.0.1:8000).
    type: str
    required: true
  instance:
    description: >-
      Instance on this host that it is. Asked by TLS or in clear as the generation that C(/etc/vllm/INSTANCE/current) points at is spoken
      to, whichever O(url) says.
    type: str
  model:
    description: A served model name.
    type: str
    required: true
  api_key:
    description: Key of the service.
    type: str
    required: true
  deadline:
    description: Seconds to wait for the answer.
    type: float
    default: 60
attributes:
  check_mode: {description: Asks in check mode too; it changes nothing., support: full}
  diff_mode: {description: Changes nothing., support: none}
"""

EXAMPLES = r"""
- name: Ask for one token
  gpu_fleet.vllm.probe:
    url: http://10.0.0.1:8000
    model: chat
    api_key: "{{ key }}"
"""

RETURN = r"""
seconds: {description: How long the answer took., returned: always, type: float}
status: {description: HTTP status; 0 when there was no answer., returned: always, type: int}
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import api_tls
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.probe import completion


def main():
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "instance": {"type": "str"},
            "model": {"type": "str", "required": True},
            "api_key": {"type": "str", "required": True, "no_log": True},
            "deadline": {"type": "float", "default": 60},
        },
        supports_check_mode=True,
    )
    p = module.params
    url = api_tls.url(p["url"], f"/etc/vllm/{p['instance']}/current") if p["instance"] else p["url"]
    answer = completion(url, p["api_key"], p["model"], p["deadline"])
    result = {"changed": False, "seconds": round(answer.seconds, 3), "status": answer.status}
    if not answer.right:
        fix = "The unit runs, but it does not serve. Its journal on all hosts of the replica says more: journalctl -u 'vllm@*'"
        module.fail_json(
            msg=f"{os.uname().nodename}: the probe of {p['model']} failed: {answer.problem}. {fix}", **result
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
