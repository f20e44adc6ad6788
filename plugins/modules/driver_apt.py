#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What apt would offer and do with other sources and pins."""

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_apt
short_description: Ask apt what it would offer and do with other sources and pins, without changing those of the host
version_added: 0.1.0
description:
  - Lays the host's apt configuration out in a folder of /var/tmp, with the given files in it, reads the lists of packages there, says
    what is offered and what an installation would do. Nothing of the host's own configuration, lists or packages changes, in check
    mode and out of it; so a plan is whole before anything is written.
  - The folder is kept between two calls when O(keep) says so, and removed otherwise.
author: The gpu_fleet authors (@gpu-fleet)
options:
  files:
    description: Files below /etc/apt as they would be, path to text.
    type: dict
    default: {}
  gone:
    description: Files below /etc/apt that would be gone.
    type: list
    elements: str
    default: []
  keyring:
    description: >-
      The key of the source: C(path), where it would lie; C(url), where it is fetched, or C(text), the key itself; C(fingerprint), which
      it has to have. What already lies at the path is taken where it fits.
    type: dict
  carried:
    description: >-
      A flat repository that is to come to the host and is not there yet, for check mode: C(uri), where it would lie, C(packages) and
      C(release), its files of these names. apt plans with them; nothing can be installed from them.
    type: dict
  update:
    description: Whether to read the lists anew; otherwise those that the host has are taken.
    type: bool
    default: true
  globs:
    description: Names of packages to ask for, with C(*).
    type: list
    elements: str
    default: []
  names:
    description: Further names of packages to ask for.
    type: list
    elements: str
    default: []
  install:
    description: Arguments of C(apt-get install) to simulate.
    type: list
    elements: str
    default: []
  folder:
    description: Folder of an earlier call that kept it.
    type: path
  keep:
    description: Whether to keep the folder.
    type: bool
    default: false
attributes:
  check_mode: {support: full, description: Changes nothing of the host.}
  diff_mode: {support: none, description: Changes nothing.}
"""

EXAMPLES = r"""
- name: See what the distribution offers
  gpu_fleet.vllm.driver_apt:
    globs: ["nvidia-*"]
  register: offers
"""

RETURN = r"""
available:
  description: What is offered, name to a list of C(version) and C(origin), newest first. Only with O(globs) or O(names).
  type: dict
  returned: success
simulation: {description: What C(apt-get -s) printed; null without O(install)., type: str, returned: success}
warnings_of_apt: {description: What apt-get update warned of., type: list, elements: str, returned: success}
keyring:
  description: The key with C(path), C(base64) and C(fingerprints); null without one.
  type: dict
  returned: success
folder: {description: The folder where it was kept; null otherwise., type: str, returned: success}
"""

import base64
import os
import socket
import urllib.error

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import open_url
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_host, driver_key, driver_scratch, gpu_facts


def main():
    """Look, and return."""
    module = AnsibleModule(
        argument_spec={
            "files": {"type": "dict", "default": {}},
            "gone": {"type": "list", "elements": "str", "default": []},
            "keyring": {"type": "dict", "no_log": False},
            "carried": {"type": "dict"},
            "update": {"type": "bool", "default": True},
            "globs": {"type": "list", "elements": "str", "default": []},
            "names": {"type": "list", "elements": "str", "default": []},
            "install": {"type": "list", "elements": "str", "default": []},
            "folder": {"type": "path"},
            "keep": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    told = module.params
    if told["folder"] and not driver_scratch.ours(told["folder"]):
        module.fail_json(
            msg=f"{socket.gethostname()}: {told['folder']} is no folder of this module's. Leave folder out"
        )
    keyring = _keyring(module, told["keyring"]) if told["keyring"] else None
    scratch = driver_scratch.Scratch(told["folder"])
    try:
        result = _look(module, scratch, told, keyring)
    except BaseException:
        scratch.remove()
        raise
    if not told["keep"]:
        scratch.remove()
    public = keyring and {
        "path": keyring["path"],
        "base64": base64.b64encode(keyring["raw"]).decode(),
        "fingerprints": driver_key.fingerprints(keyring["raw"]),
    }
    module.exit_json(changed=False, keyring=public, folder=scratch.folder if told["keep"] else None, **result)


def _look(module, scratch, told, keyring):
    run = gpu_facts.command
    scratch.configure(files=told["files"], gone=told["gone"], keyring=keyring, carried=told["carried"])
    warnings = []
    if told["update"]:
        scratch.own_lists()
        updated = scratch.update(run)
        warnings = updated["said"]
        if updated["rc"]:
            scratch.remove()
            module.fail_json(
                msg=f"{socket.gethostname()}: apt-get update with the planned sources failed, nothing was changed: "
                f"{' / '.join(warnings) or 'exit status ' + str(updated['rc'])}. Look at the address and the key of the source that it "
                "names; behind a proxy set one for apt",
                said=warnings,
            )
    elif os.path.isdir(scratch.path("lists")):
        scratch.own_lists()
    asks = bool(told["globs"] or told["names"])
    return {
        "available": driver_host.available(run, told["globs"], told["names"], scratch.options) if asks else None,
        "simulation": scratch.simulate(run, told["install"]) if told["install"] else None,
        "warnings_of_apt": warnings,
    }


def _keyring(module, wanted):
    """The key, from where it lies, as text, or fetched; one with another fingerprint is none."""
    expected = (wanted.get("fingerprint") or "").replace(" ", "").upper()
    path = wanted["path"]
    found = None
    if not wanted.get("text") and os.path.exists(path):
        found = _read(module, path, expected)
    if found is None and wanted.get("text"):
        found = _packets(module, wanted["text"].encode(), "the key that was given")
    if found is None:
        found = _packets(module, _fetch(module, wanted["url"]), wanted["url"])
    prints = driver_key.fingerprints(found)
    if not wanted.get("text") and not expected:
        module.fail_json(
            msg=f"{socket.gethostname()}: the key {wanted['url']} has the fingerprint {', '.join(prints)}, and nothing says which one is "
            "right. Compare it with the installation guide of the repository's owner and set gpu_driver_repository_fingerprint, or "
            "give the key itself (gpu_driver_repository_key)"
        )
    if expected and any(one != expected for one in prints):
        module.fail_json(
            msg=f"{socket.gethostname()}: the key of the repository has the fingerprint {', '.join(prints)}, expected is {expected}. "
            "Nothing was changed. If its owner has a new key, set gpu_driver_repository_fingerprint; otherwise somebody else answers"
        )
    return {"path": path, "raw": found}


def _read(module, path, expected):
    """What lies there, if it is a key with the fingerprint; an old one is replaced."""
    try:
        with open(path, "rb") as handle:
            raw = driver_key.dearmor(handle.read())
    except (OSError, ValueError):
        return None
    return raw if expected and all(one == expected for one in driver_key.fingerprints(raw)) else None


def _packets(module, raw, where):
    try:
        return driver_key.dearmor(raw)
    except ValueError as error:
        module.fail_json(
            msg=f"{socket.gethostname()}: {where} is no key: {error}. Give the .pub, .asc or .gpg file of the repository"
        )


def _fetch(module, url):
    try:
        return open_url(url, timeout=60, http_agent="gpu_fleet").read()
    except (OSError, urllib.error.URLError, ValueError) as error:
        module.fail_json(
            msg=f"{socket.gethostname()}: the key {url} cannot be fetched: {error}. Nothing was changed. Behind a proxy set "
            "gpu_driver_proxy, without a network give the key itself (gpu_driver_repository_key)"
        )


if __name__ == "__main__":
    main()
