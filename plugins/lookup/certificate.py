"""Lookup of certificates of the fleet's private CA."""

from __future__ import annotations

DOCUMENTATION = """
name: certificate
short_description: Certificates of the fleet's private CA, made and renewed on the controller
description:
  - Gives the CA's certificate and, for each term, the certificate and key of what it names, in the files NAME.pem and NAME.key of the
    folder. Without a term the CA's certificate alone.
  - The CA is made once, for ten years. A certificate is good for 397 days, and renewed with the same key in its last month, or where names
    or the CA are others.
  - The CA's key stays on the controller. What is given has a private key in it, for tasks with C(no_log).
options:
  _terms:
    description: Name of the files, which may have a folder before it.
    type: list
    elements: str
  folder:
    description: Folder of the controller with the CA, 0700.
    type: path
    required: true
  called:
    description: Names and addresses that the certificate is for.
    type: list
    elements: str
    default: []
  make:
    description: Make and renew. Without it what is there is given as it is, and an empty text for what is not.
    type: bool
    default: true
"""

EXAMPLES = """
- name: Have a certificate for a host
  ansible.builtin.set_fact:
    own: "{{ lookup('gpu_fleet.vllm.certificate', 'gpu-01', folder='/srv/secrets', called=['gpu-01', '192.0.2.1']) }}"
  no_log: true
"""

RETURN = """
_raw:
  description: >-
    A dict with C(ca), C(certificate) and C(key), PEM texts, and C(due), whether a certificate that was not to be made would be made or renewed.
  type: list
  elements: dict
"""

import dataclasses  # noqa: E402

from ansible.errors import AnsibleLookupError  # noqa: E402
from ansible.plugins.lookup import LookupBase  # noqa: E402
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import certificates  # noqa: E402


class LookupModule(LookupBase):
    def run(self, terms, variables=None, **kwargs):
        self.set_options(var_options=variables, direct=kwargs)
        folder, called, make = (self.get_option(name) for name in ("folder", "called", "make"))
        try:
            return [dataclasses.asdict(certificates.have(folder, name, called, make)) for name in terms or [""]]
        except (OSError, ValueError) as error:
            raise AnsibleLookupError(f"certificates of the fleet's CA in {folder}: {error}") from error
