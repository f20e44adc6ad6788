"""Filter that says which releases of vLLM a host can run, on the controller."""

from __future__ import annotations

DOCUMENTATION = """
name: gpu_wheels
short_description: Say which releases and builds of vLLM a host can run, and if none, what to change
description:
  - Judges what P(gpu_fleet.vllm.gpu_facts#module) returned by C(data/versions.yml).
options:
  _input:
    description: The result of gpu_facts.
    type: dict
    required: true
"""

EXAMPLES = """
- name: Say which wheel
  ansible.builtin.debug:
    msg: "{{ (gpu_facts | gpu_fleet.vllm.gpu_wheels).message }}"
"""

RETURN = """
_value:
  description:
    - C(runs), what the host runs, newest first, the releases that the collection offers before the others; each with C(version),
      C(accelerator), C(status), C(lock) (made or missing for the host's Python, null where the collection makes none) and C(notes).
    - C(refused), the rest, each with C(version), C(accelerator) and all its C(reasons).
    - C(best), the first of C(runs) or null; C(message), one or two sentences; C(remedy), what to change, or null.
  type: dict
"""

from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data  # noqa: E402
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils.later import Module  # noqa: E402

compatibility = Module("compatibility")


def gpu_wheels(facts):
    """See DOCUMENTATION."""
    return compatibility.wheels(facts, data.load("versions")).as_dict()


class FilterModule:
    """Filters of this file."""

    def filters(self):
        return {"gpu_wheels": gpu_wheels}
