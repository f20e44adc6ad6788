#!/usr/bin/python
from __future__ import annotations

DOCUMENTATION = r"""
module: start_time
short_description: Say how long the starts of vLLM instances may take, by the weights on the host
description:
  - 600 s, which is vLLM's own patience for its engine, and for each GiB of weights 11 s to read them at 100 MB/s and 9 s of engine
    initialisation (measured with cold caches), in whole minutes. Changes nothing.
author: The gpu_fleet authors
options:
  models:
    description: Instance to path of its model, a folder or a file. What is not there weighs nothing.
    type: dict
    required: true
attributes:
  check_mode: {description: Looks alike., support: full}
"""

EXAMPLES = r"""
- name: Weigh a model
  gpu_fleet.vllm.start_time:
    models: {chat.0: /var/lib/vllm/models/chat}
  register: start
"""

RETURN = r"""
seconds: {description: Instance to seconds., returned: always, type: dict}
bytes: {description: Instance to bytes of weights., returned: always, type: dict}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import start_time


def main():
    module = AnsibleModule(argument_spec={"models": {"type": "dict", "required": True}}, supports_check_mode=True)
    size = {instance: start_time.weights(path) for instance, path in module.params["models"].items()}
    module.exit_json(
        changed=False, bytes=size, seconds={instance: start_time.seconds(count) for instance, count in size.items()}
    )


if __name__ == "__main__":
    main()
