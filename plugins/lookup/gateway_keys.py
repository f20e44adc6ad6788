"""Lookup of the gateway's clients, each with a key."""

from __future__ import annotations

DOCUMENTATION = """
name: gateway_keys
short_description: Clients of the gateway, each with a key
description:
  - Gives the entries of C(gateway_keys). One that has neither C(key) nor C(sha256) gets the key in a file of the controller named after
    it, with C(made) above 1 in NAME.MADE, which is made, 256 random bits, where it is missing.
  - An entry of C(former) with C(made) gets the key in that file; one that is not there is an error, since it cannot be good any more.
options:
  _terms:
    description: The list C(gateway_keys).
    required: true
    type: list
    elements: dict
  folder:
    description: Folder of the controller with the keys, 0700.
    type: path
    required: true
  make:
    description: Make what is missing. Without it an entry without a key is given as it is.
    type: bool
    default: true
"""

EXAMPLES = """
- name: Have the keys
  ansible.builtin.set_fact:
    clients: "{{ lookup('gpu_fleet.vllm.gateway_keys', gateway_keys, folder='/srv/secrets/keys') }}"
  no_log: true
"""

RETURN = """
_raw:
  description: The entries.
  type: list
  elements: dict
"""

import os  # noqa: E402
import secrets  # noqa: E402

from ansible.errors import AnsibleLookupError  # noqa: E402
from ansible.plugins.lookup import LookupBase  # noqa: E402
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.gateway import key_file  # noqa: E402


def key_of(path: str, make: bool) -> str | None:
    """The key in a file, made where it is missing and wanted. Two runs at once end with one key."""
    if make and not os.path.exists(path):
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        beside = f"{path}.{os.getpid()}.new"
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="ascii") as out:
            out.write(secrets.token_urlsafe(32) + "\n")
        try:
            os.link(beside, path)
        except FileExistsError:
            pass  # another run was first
        finally:
            os.unlink(beside)
    try:
        with open(path, encoding="ascii") as text:
            return text.read().strip()
    except FileNotFoundError:
        return None


def with_keys(entry: dict, folder: str, make: bool) -> dict:
    """A client with the keys that are made for it, its present one and the former ones.

    Raises OSError where a file cannot be read or made, and AnsibleLookupError where a former key is no longer there.
    """
    name, found = entry["name"], dict(entry)
    if not (entry.get("key") or entry.get("sha256")):
        key = key_of(f"{folder}/{key_file(name, entry.get('made'))}", make)
        found.update({"key": key} if key else {})
    if entry.get("former"):
        found["former"] = [_former(name, one, folder) for one in entry["former"]]
    return found


def _former(name: str, entry: dict, folder: str) -> dict:
    if entry.get("made") is None:
        return entry
    path = f"{folder}/{key_file(name, entry['made'])}"
    key = key_of(path, make=False)
    if not key:
        message = f"the former key of {name}: there is no {path} on the controller. Take the entry out of `former`, or bring the file back"
        raise AnsibleLookupError(message)
    return {**entry, "key": key}


class LookupModule(LookupBase):
    def run(self, terms, variables=None, **kwargs):
        self.set_options(var_options=variables, direct=kwargs)
        folder, make = self.get_option("folder"), self.get_option("make")
        found = []
        for entry in self._flatten(terms):
            try:
                found.append(with_keys(entry, folder, make))
            except OSError as error:
                raise AnsibleLookupError(f"the key of {entry['name']}: {error}") from error
        return found
