"""Lookup of the collection's data files."""

from __future__ import annotations

DOCUMENTATION = """
name: data
short_description: Content of one of the collection's data files
description:
  - Facts live in C(data/) as YAML; roles read them with this lookup, never by a path.
options:
  _terms:
    description: Names of files in C(data/), without C(.yml), such as V(versions).
    required: true
    type: list
    elements: str
"""

EXAMPLES = """
- name: Show the packages that a release needs from Debian 12
  ansible.builtin.debug:
    msg: "{{ lookup('gpu_fleet.vllm.data', 'versions').systems['debian-12'].packages }}"
"""

RETURN = """
_raw:
  description: The content of each file.
  type: list
  elements: raw
"""

from ansible.errors import AnsibleLookupError  # noqa: E402
from ansible.plugins.lookup import LookupBase  # noqa: E402
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data  # noqa: E402


class LookupModule(LookupBase):
    def run(self, terms, variables=None, **kwargs):
        self.set_options(var_options=variables, direct=kwargs)
        try:
            return [data.load(term) for term in terms]
        except FileNotFoundError as error:
            raise AnsibleLookupError(f"the collection has no data file {error.filename}") from error
