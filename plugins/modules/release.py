#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Keep one release of vLLM on a host, built from a lock."""

from __future__ import annotations

DOCUMENTATION = r"""
module: release
short_description: Keep one release of vLLM on a host, built from a lock
version_added: 0.1.0
description:
  - A release is a folder with exactly the wheels of a lock, built beside its place and renamed when it is whole. Every
    run looks at every file of it (one lstat each) and reads the content of those that the kernel says changed.
  - Files that were added are removed. A release with an altered or missing file is built anew beside the damaged one and
    put in its place. Other releases are listed and never removed.
  - The controller's part (an action plugin of the same name) finds the lock for the host's Python, and brings uv and, from
    a wheelhouse on the controller, exactly the wheels that the host lacks.
author: The gpu_fleet authors (@gpu-fleet)
options:
  state:
    description: V(looked) only looks and returns the facts; V(present) builds or repairs.
    type: str
    choices: [looked, present]
    default: present
  version: {description: 'Release of vLLM, such as V(0.26.0).', type: str, required: true}
  accelerator: {description: 'Such as V(cu130) or V(cpu).', type: str, required: true}
  lock: {description: 'A lock file on the controller; default: the collection''s own for the host''s Python.', type: path}
  addons:
    description: What the release has besides vLLM, such as V(ray); each has a lock in locks/addons, made for the very lock of the release.
    type: list
    elements: str
    default: []
  root: {description: Folder of the releases., type: path, default: /opt/vllm/releases}
  python: {description: Interpreter on the host., type: path, default: /usr/bin/python3}
  packages: {description: Debian packages that have to be there; only looked at., type: list, elements: str, default: []}
  source:
    description: Where wheels come from.
    type: str
    choices: [index, mirror, wheelhouse]
    default: wheelhouse
  wheelhouse: {description: Folder on the controller with the lock's wheels., type: path}
  wheelhouse_on_host: {description: Folder on the host with the lock's wheels; nothing is sent then., type: path}
  index_url: {description: 'Index or mirror; default for V(index): what pip is told on the host.', type: str}
  extra_index_urls: {description: Further indices., type: list, elements: str, default: []}
  find_links: {description: Further folders or pages of wheels., type: list, elements: str, default: []}
  proxy: {description: Proxy for the index., type: str}
  ca_certificate: {description: PEM file on the host that uv trusts., type: path}
  uv: {description: 'Binary of uv on the controller; default: the one of the controller''s environment.', type: path}
  wait: {description: Seconds to wait for another build on the same host., type: int, default: 900}
  host_step: {description: Used by the controller's part alone., type: dict}
  host_secrets:
    description: Used by the controller's part alone. URLs without user and password to those with them.
    type: dict
attributes:
  check_mode: {support: full, description: Says what would be built and changes nothing.}
  diff_mode: {support: full, description: Shows which files are not as installed.}
"""

EXAMPLES = r"""
- name: Build the release
  gpu_fleet.vllm.release:
    version: "0.26.0"
    accelerator: cu130
    source: wheelhouse
    wheelhouse_on_host: /srv/wheelhouse
"""

RETURN = r"""
release:
  description: The release.
  type: dict
  returned: success
  contains:
    id: {description: VERSION-ACCELERATOR-LOCKID., type: str}
    path: {description: Its folder., type: str}
    version: {description: Release of vLLM., type: str}
    accelerator: {description: Such as cu130., type: str}
    python: {description: Path of its interpreter., type: str}
    python_version: {description: Minor version., type: str}
    lock_digest: {description: SHA-256 of the lock, in hex., type: str}
    engine: {description: The package that carries the engine., type: str}
    engine_by: {description: Who built it., type: str}
    kernels_missing: {description: Pre-built kernels that the lock could not bring., type: list, elements: str}
state: {description: 'What was found before: absent, right, altered or incomplete.', type: str, returned: success}
differences: {description: 'Files that are not as installed: path, what, detail.', type: list, elements: dict, returned: success}
other_releases: {description: Names of other releases on the host., type: list, elements: str, returned: success}
packages_missing: {description: Packages of O(packages) that are not installed., type: list, elements: str, returned: success}
foreign_cuda: {description: CUDA libraries on the loader's path that belong to no release., type: list, elements: str, returned: success}
headers: {description: Whether the interpreter's C headers are there., type: bool, returned: success}
seconds: {description: How long the build took., type: float, returned: when built}
"""

import gc
import os
import shutil

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import releases


def whole(value, secrets):
    """The value with the URLs' users and passwords back in their places."""
    if isinstance(value, dict):
        return {key: whole(item, secrets) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item, secrets) for item in value]
    return secrets.get(value, value)


def looked(step, check_mode):
    """Everything about the host and the release that the controller asks for, in one go."""
    python = releases.probe_python(step["python"])
    answer = {
        "python": python,
        "packages_missing": releases.missing_packages(step["packages"]),
        "closed": releases.closed_folders(step["root"]),
        "foreign_cuda": releases.foreign_cuda() if step["cuda"] else [],
    }
    candidate = step["candidates"].get(f"{python['version']} {python['architecture']}")
    if candidate:
        path = os.path.join(step["root"], candidate["id"])
        state = releases.look(path, candidate["digest"], refresh=not check_mode)
        answer.update(
            state=state.state,
            detail=state.detail,
            differences=state.differences,
            removable=state.removable,
            other_releases=releases.others(step["root"], candidate["id"]),
        )
    return answer


def repaired(step):
    """Remove what was added to a release."""
    path = os.path.join(step["root"], step["id"])
    state = releases.look(path, step["digest"])
    if state.removable:
        with releases.writing(step["root"]):
            releases.remove_extra(path, state)
    return {"changed": True}


def wanted(step):
    wanted_files = releases.wanted_files(step["folder"], step["files"], step["room"], step["uid"])
    return {"wanted": wanted_files, "arriving": releases.arriving(step["folder"])}


def received(step):
    releases.receive(step["folder"], step["files"])
    return {}


def built(step):
    given = step["source"]
    for key in ("index_url", "extra_index_urls", "find_links", "environment"):
        given[key] = whole(given[key], step["secrets"])
    source = releases.host_pip_settings() if given["host_pip"] else releases.Source()
    source = releases.Source(
        folder=given["folder"],
        index_url=given["index_url"] or source.index_url,
        extra_index_urls=(*source.extra_index_urls, *given["extra_index_urls"]),
        find_links=(*source.find_links, *given["find_links"]),
        fallbacks=given["fallbacks"],
        environment={**source.environment, **given["environment"]},
    )
    answer = releases.build(
        step["lock"], step["root"], releases.Tools(step["python"], step["uv"]), source, step["wait"]
    )
    shutil.rmtree(step["incoming"], ignore_errors=True)  # only copies lie there; a leftover costs nothing but room
    return {"changed": True, **answer}


def main():
    os.umask(0o022)  # a hardened host's own would hide what is made here from the service user
    module = AnsibleModule(
        argument_spec={
            **releases.ARGUMENTS,
            "host_step": {"type": "dict"},
            "host_secrets": {"type": "dict", "no_log": True},
        },
        supports_check_mode=True,
    )
    gc.disable()  # 35,000 file entries and a short life: collecting takes a third of the look's time and frees nothing
    step = module.params["host_step"]
    if step is None:
        module.fail_json(
            msg="this module has a part on the controller, which was not found; install the collection whole"
        )
    step["secrets"] = module.params["host_secrets"] or {}
    try:
        if step["do"] == "look":
            module.exit_json(**looked(step, module.check_mode))
        if module.check_mode:
            module.fail_json(msg="in check mode the controller's part only looks; this is a mistake in it")
        module.exit_json(**{"repair": repaired, "want": wanted, "receive": received, "build": built}[step["do"]](step))
    except releases.ReleaseError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
