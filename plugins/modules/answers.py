#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Ask a server the same questions before and after a change."""

from __future__ import annotations

DOCUMENTATION = r"""
module: answers
short_description: Ask a vLLM server the same questions before and after a change, and compare
version_added: 0.1.0
description:
  - Eight short prompts at temperature 0, 24 tokens each, four at a time, after one that warms up.
  - Without O(before) it never fails. A server that does not answer leaves RV(problem), and there is nothing to compare with.
  - With O(before) it fails where the answers do not begin alike, or come too slowly. What is too slow is measured up to three times.
author: The gpu_fleet authors (@gpu-fleet)
options:
  url: {description: 'Base URL of the API, such as V(http://10.0.0.1:8000).', type: str, required: true}
  instance:
    description: >-
      Instance on this host that it is. Asked by TLS or in clear as the generation that C(/etc/vllm/INSTANCE/current) points at is spoken
      to, whichever O(url) says.
    type: str
  model: {description: A served model name., type: str, required: true}
  api_key: {description: Key of the service., type: str, required: true}
  deadline: {description: Seconds for each answer., type: float, default: 60}
  plan:
    description:
      - Path of the C(plan.json) of the generation that serves. Where its model or weights are others than O(wanted), the answers
        will differ, and RV(problem) says so.
    type: path
  wanted: {description: 'The plan that is to come, with C(model) and C(weights).', type: dict}
  said: {description: 'What it answered, where an earlier run asked: nobody is asked, only O(plan) is compared with O(wanted).', type: dict}
  before: {description: 'What this module returned before the change.', type: dict}
  same: {description: Share of prompts whose answers have to begin alike., type: float, default: 0.5}
  speed: {description: 'Tokens per second that are needed, as a share of those before.', type: float, default: 0.5}
attributes:
  check_mode: {support: full, description: 'Asks in check mode, too: it changes nothing.'}
  diff_mode: {support: none, description: Changes nothing.}
"""

EXAMPLES = r"""
- name: Ask what serves
  gpu_fleet.vllm.answers:
    url: http://10.0.0.1:8000
    model: chat
    api_key: "{{ key }}"
  register: before

- name: Compare
  gpu_fleet.vllm.answers:
    url: http://10.0.0.1:8000
    model: chat
    api_key: "{{ key }}"
    before: "{{ before }}"
"""

RETURN = r"""
answers: {description: 'Text of each answer, in the order of the prompts.', returned: always, type: list, elements: str}
tokens: {description: Tokens that came., returned: always, type: int}
seconds: {description: How long all answers took., returned: always, type: float}
tokens_per_second: {description: Their ratio., returned: always, type: float}
problem: {description: 'Why there is nothing to compare with, or empty.', returned: always, type: str}
"""

import json
import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import answers, api_tls

TRIES = 3  # measurements of a speed that is too low


def other_model(path, wanted):
    """In words, when the generation that serves has another model or other weights than the one to come."""
    try:
        with open(path, encoding="utf-8") as text:
            have = json.load(text)
    except (OSError, ValueError):
        return "what serves has no plan.json"
    names = [name for name in ("model", "weights") if have.get(name) != wanted.get(name)]
    return f"another {' and other '.join(names)}" if names else ""


def main():
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "instance": {"type": "str"},
            "model": {"type": "str", "required": True},
            "api_key": {"type": "str", "required": True, "no_log": True},
            "deadline": {"type": "float", "default": 60},
            "plan": {"type": "path"},
            "wanted": {"type": "dict"},
            "said": {"type": "dict"},
            "before": {"type": "dict"},
            "same": {"type": "float", "default": 0.5},
            "speed": {"type": "float", "default": 0.5},
        },
        required_together=[["plan", "wanted"]],
        supports_check_mode=True,
    )
    p = module.params
    problem = other_model(p["plan"], p["wanted"]) if p["plan"] else ""
    if problem:
        module.exit_json(changed=False, answers=[], tokens=0, seconds=0.0, tokens_per_second=0.0, problem=problem)
    if p["said"] is not None:
        nothing = {
            "answers": [],
            "tokens": 0,
            "seconds": 0.0,
            "tokens_per_second": 0.0,
            "problem": "nothing was asked before",
        }
        module.exit_json(changed=False, **{**nothing, **p["said"]})
    before = p["before"]
    url = api_tls.url(p["url"], f"/etc/vllm/{p['instance']}/current") if p["instance"] else p["url"]
    for _ in range(TRIES if before else 1):
        said = answers.ask(url, p["api_key"], p["model"], p["deadline"])
        wrong = answers.faults(before, said, p["same"], p["speed"]) if before else []
        if not wrong:
            module.exit_json(changed=False, **said)
    module.fail_json(
        msg=f"{p['model']} on {os.uname().nodename} is not what it was before the change: {'; '.join(wrong)}", **said
    )


if __name__ == "__main__":
    main()
