#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Tell which generation of an instance a rollback would bring back."""

from __future__ import annotations

DOCUMENTATION = r"""
module: former_generation
short_description: Tell which generation of a vLLM instance a rollback would bring back
version_added: 0.1.0
description:
  - The one that the link C(previous) points at, with all its files and its release. Changes nothing.
  - Where C(current) was written before C(previous), the instance is back already and C(current) is what is wanted, so that a rollback
    that was cut short goes on when it is run again, and a second one does not go forward.
  - Returns what M(gpu_fleet.vllm.generation) returns of a generation that is wanted, so that what follows is the same.
author: The gpu_fleet authors (@gpu-fleet)
options:
  instance: {description: 'Name of the instance, SERVICE.N.', type: str, required: true}
  root: {description: Folder of all instances., type: path, default: /etc/vllm}
attributes:
  check_mode: {support: full, description: 'Looks in check mode, too: it changes nothing.'}
  diff_mode: {support: none, description: Changes nothing.}
"""

EXAMPLES = r"""
- name: See what there was before
  gpu_fleet.vllm.former_generation:
    instance: chat.0
"""

RETURN = r"""
id: {description: ID of the generation to go back to., returned: success, type: str}
back: {description: Whether C(current) is that one already., returned: success, type: bool}
release: {description: Name of its release., returned: success, type: str}
running_generation: {description: ID that the running process was started from., returned: success, type: str}
active: {description: systemd's ActiveState of the unit., returned: success, type: str}
tls: {description: Whether a server with that generation speaks TLS., returned: success, type: bool}
tls_before: {description: 'Whether one with the generation that C(current) points at does.', returned: success, type: bool}
tls_running: {description: Whether the one that runs does., returned: success, type: bool}
settled: {description: 'Whether it is active from the former generation already.', returned: success, type: bool}
strangers: {description: 'Always empty; here for M(gpu_fleet.vllm.generation).', returned: success, type: list, elements: str}
restart_reasons: {description: Why the running process would have to be restarted., returned: success, type: list, elements: str}
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import api_tls, units

NEEDED = ("config.yaml", "env", "unit.conf", "plan.json")


def problem(home, identifier):
    """Why the former generation cannot be gone back to, or empty."""
    if not identifier:
        return "there is no former generation: it was never changed, or the change did not succeed"
    path = os.path.join(home, "generations", identifier)
    missing = [name for name in NEEDED if not os.path.isfile(os.path.join(path, name))]
    if missing:
        return f"its former generation {identifier} lacks {', '.join(missing)}"
    if not os.path.isfile(os.path.join(path, "release", ".complete")):
        link = os.path.join(path, "release")
        where = os.readlink(link) if os.path.islink(link) else link
        return f"the release of its former generation {identifier}, {where}, is gone or not whole"
    return ""


def written(home, identifier):
    """When a generation was written, in seconds since the epoch; 0 when it is not there."""
    try:
        return os.stat(os.path.join(home, "generations", identifier, "plan.json")).st_mtime
    except OSError:
        return 0


def target(link):
    try:
        return os.path.basename(os.readlink(link))
    except OSError:
        return ""


def main():
    module = AnsibleModule(
        argument_spec={
            "instance": {"type": "str", "required": True},
            "root": {"type": "path", "default": "/etc/vllm"},
        },
        supports_check_mode=True,
    )
    p = module.params
    home = os.path.join(p["root"], p["instance"])
    current, former = target(os.path.join(home, "current")), target(os.path.join(home, "previous"))
    back = bool(current and former) and written(home, current) < written(home, former)
    if back:
        former = current
    wrong = problem(home, former)
    if wrong:
        module.fail_json(
            msg=f"{p['instance']} on {os.uname().nodename} cannot go back: {wrong}. Nothing was changed. "
            "Say in the inventory what is wanted, and run site.yml"
        )
    unit = units.show(p["instance"])
    running = unit.generation or ""
    reasons = [f"it runs generation {running or 'unknown'}, the former is {former}"] if unit.running else []
    module.exit_json(
        changed=False,
        id=former,
        back=back,
        tls=bool(api_tls.of_generation(os.path.join(home, "generations", former))),
        tls_before=api_tls.of_generation(os.path.join(home, "current")),
        tls_running=api_tls.of_generation(os.path.join(home, "generations", running)),
        release=os.path.basename(os.path.realpath(os.path.join(home, "generations", former, "release"))),
        active=unit.active,
        running=unit.running,
        running_generation=running,
        settled=unit.active == "active" and running == former,
        strangers=[],
        restart_reasons=[] if running == former else reasons,
    )


if __name__ == "__main__":
    main()
