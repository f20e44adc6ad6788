#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The host's side of delivering models; the action plugin of the same name is the controller's."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_files
short_description: Deliver models to a host, checked and whole or not at all
version_added: 0.1.0
description:
  - The controller finds out what a model consists of (a folder of its own, or a hub repository at a pinned revision that
    it fetches into its cache), asks the host what of it is missing or altered, and sends just that.
  - What arrives lies beside the model until every digest has been checked, then the two folders are swapped in one step.
    A run that is interrupted, or a disk that is full, leaves the former model as it was; whole files that already
    arrived are kept for the next run.
  - The digests and what the kernel says about each file are recorded on arrival, so that later runs find a file that was
    altered, removed or added by one lstat a file.
author: The gpu_fleet authors (@gpu-fleet)
options:
  models:
    description: The models. On the host's side each has C(name) and C(files), the manifest.
    type: list
    elements: dict
    required: true
    suboptions:
      name: {description: Folder in the store., type: str, required: true}
      folder: {description: A folder of the controller., type: path}
      hub: {description: 'A repository of the hub, C(ORGANISATION/NAME).', type: str}
      revision: {description: 'Its commit, 40 hex digits.', type: str}
  path:
    description: The store on the host.
    type: path
    default: /var/lib/vllm/models
  allow_pickle:
    description: Deliver formats that run code when they are loaded.
    type: bool
    default: false
  rehash:
    description: Read every file instead of asking the kernel whether it changed.
    type: bool
    default: false
  step:
    description: For the action plugin only. What the host is to do.
    type: str
    choices: [look, install]
  owner:
    description: For the action plugin only. Number of the user that brings the files.
    type: int
attributes:
  check_mode: {support: full, description: Says what would come and changes nothing.}
  diff_mode: {support: full, description: Lists what was not as it should be.}
"""

EXAMPLES = r"""
- name: Deliver a model that the controller has in a folder
  gpu_fleet.vllm.model_files:
    models:
      - name: smollm2-135m-instruct
        folder: /srv/models/smollm2-135m-instruct
      - name: qwen
        hub: Qwen/Qwen3-8B
        revision: b968826d9c46dd6066d109eabc6255188de91218
"""

RETURN = r"""
faults:
  description: What was not as it should be on the host, by model.
  type: dict
  returned: success
notes:
  description: What is worth knowing about the sources, such as files that were left out.
  type: list
  elements: str
  returned: success
sent_bytes:
  description: Bytes that were sent.
  type: int
  returned: success
digests:
  description: One SHA-256 a model, of its files' paths and digests.
  type: dict
  returned: success
left_over:
  description: Folders of the store that no model is called after. They are never touched.
  type: list
  elements: str
  returned: success
"""

import os
import shutil
import socket
import stat
import tarfile

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import models, tree

BUNDLE = ".bundle.tar"  # small files travel in one


def look(module, store, wanted):
    """What of each model is missing or altered, and where it may be brought to."""
    answer = {"faults": {}, "need": {}, "staging": {}}
    here, closed = {}, opened(store, module.check_mode)
    for name, manifest in wanted.items():
        if not module.check_mode:
            models.recover(store, name)
        seen = models.examine(store, name, manifest, module.params["rehash"])
        faults, closed = closed + seen.faults, []
        if not faults:
            continue
        here[name] = models.staged(store, name, manifest, seen.need)
        answer["faults"][name] = faults
        answer["need"][name] = [path for path in seen.need if path not in here[name]]
    need = {name: sum(wanted[name][path]["size"] for path in paths) for name, paths in answer["need"].items()}
    if need:
        models.check_space(store, ", ".join(name for name in need if need[name]), sum(need.values()))
    owner = os.geteuid() if module.params["owner"] is None else module.params["owner"]
    if not module.check_mode:
        for name, coming in answer["need"].items():
            answer["staging"][name] = models.prepare_staging(store, name, coming, here[name], owner)
    answer["left_over"] = models.left_over(store, list(wanted))
    return answer


def opened(store, check_mode):
    """Let every user into the store, as a hardened umask once may not have; what was wrong, as sentences."""
    parent, said = os.path.dirname(store), []
    for folder in [parent, store] if os.path.basename(parent) == "vllm" else [store]:  # ours, /var/lib/vllm
        mode = stat.S_IMODE(os.stat(folder).st_mode) if os.path.isdir(folder) else 0o755
        if mode & 0o005 != 0o005:
            said.append(f"{folder}: access {mode:04o}, wanted {mode | 0o055:04o}")
            if not check_mode:
                os.chmod(folder, mode | 0o055)
    return said


def install(store, wanted):
    """Check what arrived and put it in place."""
    for name, manifest in wanted.items():
        unpack(os.path.join(models.staging_path(store, name), BUNDLE), manifest)
        seen = models.examine(store, name, manifest)
        models.install(store, name, manifest, seen.need)


def unpack(bundle, manifest):
    """Take the small files out of the bundle: plain files the manifest names, nothing else."""
    if not os.path.exists(bundle):
        return
    folder = os.path.dirname(bundle)
    with tarfile.open(bundle) as archive:
        for member in archive:
            if not member.isfile() or member.name not in manifest:
                raise models.ModelError(f"{bundle} holds {member.name}, which nobody sent")
            target = os.path.join(folder, member.name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with archive.extractfile(member) as source, open(target, "wb") as handle:
                shutil.copyfileobj(source, handle)
    os.unlink(bundle)


def main():
    """One step of the action plugin."""
    os.umask(0o022)  # a hardened host's own would hide what is made here from the service user
    module = AnsibleModule(
        argument_spec={
            "models": {"type": "list", "elements": "dict", "required": True},
            "path": {"type": "path", "default": "/var/lib/vllm/models"},
            "allow_pickle": {"type": "bool", "default": False},
            "rehash": {"type": "bool", "default": False},
            "step": {"type": "str", "choices": ["look", "install"]},
            "owner": {"type": "int"},
        },
        supports_check_mode=True,
    )
    store = module.params["path"]
    wanted = {item["name"]: item.get("files") or {} for item in module.params["models"]}
    try:
        if module.params["step"] == "look":
            module.exit_json(changed=False, **look(module, store, wanted))
        if module.params["step"] == "install":
            install(store, wanted)
            module.exit_json(changed=True)
    except (models.ModelError, tree.TreeError, tarfile.TarError, OSError) as error:
        module.fail_json(msg=f"{socket.gethostname()}: {error}")
    module.fail_json(msg="model_files needs its action plugin; call it by its full name, gpu_fleet.vllm.model_files")


if __name__ == "__main__":
    main()
