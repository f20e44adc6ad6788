#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Find, stop and take away what the collection made on a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: teardown
short_description: Find, stop and take away what the collection made on a host
description:
  - C(looked) says which instances of vLLM the host has, and which of them are left over.
  - C(stopped) stops and disables the units of instances; a server gets its own time for requests in flight (TimeoutStopSec).
  - C(absent) takes away their files, and with O(whole) all that the roles made on the host.
  - Takes away what data/made.yml names and nothing else. A link goes, what it points at stays; of a mount point the content goes.
author: The gpu_fleet authors (@gpu-fleet)
options:
  state:
    description: What to do.
    type: str
    choices: [looked, stopped, absent]
    required: true
  made:
    description: Content of data/made.yml.
    type: dict
    required: true
  instances:
    description: For C(stopped) and C(absent). Which instances.
    type: list
    elements: str
    default: []
  planned:
    description: For C(looked). Instances that the inventory names on the host.
    type: list
    elements: str
    default: []
  whole:
    description: For C(stopped) and C(absent). All that the roles made on the host, too; weights only as O(weights) says.
    type: bool
    default: false
  places:
    description: What the variables of the roles say of the places that data/made.yml names so.
    type: dict
    default: {}
  weights:
    description: For C(absent). Names of models in the store that go.
    type: list
    elements: str
    default: []
  all_weights:
    description: For C(absent). Every model goes that role model_store brought, by its record.
    type: bool
    default: false
attributes:
  check_mode: {support: full, description: Says what would go and takes nothing away.}
  diff_mode: {support: full, description: Lists units and paths that go; never what is in a file.}
"""

EXAMPLES = r"""
- name: Take chat.1 away
  gpu_fleet.vllm.teardown:
    state: absent
    made: "{{ lookup('gpu_fleet.vllm.data', 'made') }}"
    instances: [chat.1]
"""

RETURN = r"""
instances: {description: Instances that the host has., returned: looked, type: list, elements: str}
left_over: {description: Those of them that the inventory does not name., returned: looked, type: list, elements: str}
models: {description: Instance to the folder of its model., returned: looked, type: dict}
gone: {description: Units that are stopped and paths that are taken away., returned: stopped and absent, type: list, elements: str}
kept: {description: "What was left, and why.", returned: absent, type: list, elements: str}
"""

import os
import re
import shutil
import socket
import stat

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import host_files, teardown, units


def names_in(folder):
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def found(made):
    return teardown.instances(name for folder in made["found"] for name in names_in(folder))


def model_of(instance):
    """The folder of an instance's model, by the configuration that it runs with; empty where none can be read."""
    try:
        with open(f"/etc/vllm/{instance}/current/config.yaml", encoding="utf-8", errors="replace") as lines:
            told = [re.match(r"model:\s*(\S.*?)\s*$", line) for line in lines]
    except OSError:
        return ""
    return next((match.group(1).strip("'\"") for match in told if match), "")


def known(unit):
    """Whether systemd has it loaded, running or enabled."""
    said = units.systemctl("show", "--property=ActiveState", "--property=UnitFileState", unit).stdout
    told = dict(line.partition("=")[::2] for line in said.splitlines())
    active = told.get("ActiveState") not in (None, "", "inactive", "failed")
    return active or told.get("UnitFileState") in ("enabled", "enabled-runtime")


class Host:
    """What goes, and the taking away of it; in check mode the first alone."""

    def __init__(self, module):
        self.module, self.gone, self.kept = module, [], []

    def fail(self, text):
        done = f"Gone before: {', '.join(self.gone)}" if self.gone else "Nothing was taken away"
        self.module.fail_json(msg=f"{socket.gethostname()}: {text}. {done}", gone=self.gone, kept=self.kept)

    def stop(self, unit):
        if not known(unit):
            return
        if not self.module.check_mode:
            done = units.systemctl("disable", "--now", unit)
            # One whose file is gone cannot be disabled, and can be stopped.
            if done.returncode and units.systemctl("stop", unit).returncode:
                self.fail(f"systemctl disable --now {unit}: {done.stderr.strip()}")
            units.systemctl("reset-failed", unit)
        self.gone.append(unit)

    def remove(self, path):
        """A file, a link or a folder with all in it."""
        try:
            status = os.lstat(path)
        except OSError:
            return
        if not path.startswith("/") or os.path.normpath(path).count("/") < 2:
            self.fail(f"{path} is no place of the collection's own")
        if not self.module.check_mode:
            try:
                self._remove(path, status)
            except OSError as error:
                self.fail(f"{error.filename or path} cannot be taken away: {error.strerror}")
        self.gone.append(path)

    def _remove(self, path, status):
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(path)
        elif os.path.ismount(path):
            for name in names_in(path):
                self._remove(os.path.join(path, name), os.lstat(os.path.join(path, name)))
        else:
            shutil.rmtree(path)

    def remove_empty(self, folder):
        """A folder without anything in it. In check mode one whose content all goes."""
        if not os.path.isdir(folder) or os.path.islink(folder) or os.path.ismount(folder):
            return
        left = [os.path.join(folder, name) for name in names_in(folder)]
        if all(path in self.gone for path in left):
            if not self.module.check_mode:
                os.rmdir(folder)
            self.gone.append(folder)
        else:
            self.kept.append(f"{folder}, with {', '.join(os.path.basename(path) for path in left)}")

    def remove_block(self, path, begin, end):
        text = host_files.read(path)
        rest = teardown.without_block(text or "", begin, end)
        if text is None or rest == text:
            return
        if not rest.strip():
            self.remove(path)
            return
        if not self.module.check_mode:
            host_files.write(path, rest, stat.S_IMODE(os.stat(path).st_mode))
        self.gone.append(f"{path}, the lines from {begin} to {end}")

    def put_back(self, folders, end):
        for folder in folders:
            for name in names_in(folder):
                if name.endswith(end):
                    path = os.path.join(folder, name)
                    if not self.module.check_mode:
                        os.rename(path, path[: -len(end)])
                    self.gone.append(f"{end} of {path}")

    def drop_table(self, family, name):
        nft = self.module.get_bin_path("nft", opt_dirs=["/usr/sbin", "/sbin"])
        if not nft or self.module.run_command([nft, "list", "table", family, name])[0]:
            return
        if not self.module.check_mode:
            rc, _out, err = self.module.run_command([nft, "delete", "table", family, name])
            if rc:
                self.fail(f"nft delete table {family} {name}: {err.strip()}")
        self.gone.append(f"nftables table {family} {name}")


def stop(host, params):
    made = params["made"]
    for kind in made["instance"]["units"]:
        for instance in params["instances"]:
            host.stop(kind.replace("INSTANCE", instance))
    if params["whole"]:
        for unit in made["host"]["units"]:
            # The table stays until the ports behind it are closed; its unit has nothing that stops.
            host.stop(unit)
        for unit, path in made["host"]["borrowed"].items():
            if os.path.lexists(path):
                host.stop(unit)


def take_instance(host, made, instance):
    if units.show(instance).running and not host.module.check_mode:
        host.fail(f"{units.unit_name(instance)} runs; stop it first")
    for path in teardown.of_instance(made, "paths", instance):
        host.remove(path)
    for path in teardown.of_instance(made, "empty", instance):
        host.remove_empty(path)


def take_weights(host, store, names, every):
    """Models with their records; all that have one, or those of the names."""
    begin, end = ".", ".record.json"
    recorded = [n[len(begin) : -len(end)] for n in names_in(store) if n.startswith(begin) and n.endswith(end)]
    for name in sorted(set(recorded if every else names)):
        host.remove(os.path.join(store, name))
        host.remove(os.path.join(store, f"{begin}{name}{end}"))


def take_host(host, made, places):
    for family, name in made["tables"]:
        host.drop_table(family, name)
    for path in filter(None, teardown.of_host({"host": made}, "paths", places)):
        host.remove(path)
    for path, (begin, end) in made["blocks"].items():
        host.remove_block(path, begin, end)
    host.put_back(made["aside"]["folders"], made["aside"]["end"])
    for path in filter(None, teardown.of_host({"host": made}, "empty", places)):
        host.remove_empty(path)


def take_away(host, params):
    for instance in params["instances"]:
        take_instance(host, params["made"], instance)
    take_weights(host, params["places"].get("models", "/var/lib/vllm/models"), params["weights"], params["all_weights"])
    if params["whole"]:
        take_host(host, params["made"]["host"], params["places"])
    if host.gone and not host.module.check_mode:
        done = units.systemctl("daemon-reload")
        if done.returncode:
            host.fail(f"systemctl daemon-reload: {done.stderr.strip()}")


def main():
    """Look, stop or take away."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["looked", "stopped", "absent"], "required": True},
            "made": {"type": "dict", "required": True},
            "instances": {"type": "list", "elements": "str", "default": []},
            "planned": {"type": "list", "elements": "str", "default": []},
            "whole": {"type": "bool", "default": False},
            "places": {"type": "dict", "default": {}},
            "weights": {"type": "list", "elements": "str", "default": []},
            "all_weights": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    p = module.params
    if p["state"] == "looked":
        there = found(p["made"])
        left = [name for name in there if name not in p["planned"]]
        models = {name: model for name in there if (model := model_of(name))}
        module.exit_json(changed=False, instances=there, left_over=left, models=models)
    wrong = [name for name in p["instances"] if not teardown.INSTANCE.fullmatch(name)]
    wrong += [name for name in p["weights"] if "/" in name or name.startswith(".")]
    if wrong:
        module.fail_json(msg=f"{socket.gethostname()}: {', '.join(wrong)}: no name of an instance or a model")
    host = Host(module)
    (stop if p["state"] == "stopped" else take_away)(host, p)
    gone = "".join(f"{text}\n" for text in host.gone)
    module.exit_json(changed=bool(host.gone), gone=host.gone, kept=host.kept, diff={"before": gone, "after": ""})


if __name__ == "__main__":
    main()
