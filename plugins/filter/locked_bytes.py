"""Filter that reads a limit of locked memory as systemd does."""

from __future__ import annotations

DOCUMENTATION = """
name: locked_bytes
short_description: Bytes of a limit of locked memory
description:
  - Reads the spellings of systemd.exec(5), C(LimitMEMLOCK), bytes, a number with C(K), C(M), C(G) or C(T), base 1024, and C(infinity).
options:
  _input:
    description: The limit.
    type: str
    required: true
"""

EXAMPLES = """
- name: Show a limit in bytes
  ansible.builtin.debug:
    msg: "{{ '64G' | gpu_fleet.vllm.locked_bytes }}"
"""

RETURN = """
_value:
  description: Bytes; -1 is unlimited.
  type: int
"""

from ansible.errors import AnsibleFilterError  # noqa: E402
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils.later import Module  # noqa: E402

limits = Module("limits")


def locked_bytes(text):
    """See DOCUMENTATION."""
    try:
        return limits.locked_bytes(text)
    except ValueError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """Filters of this file."""

    def filters(self):
        return {"locked_bytes": locked_bytes}
