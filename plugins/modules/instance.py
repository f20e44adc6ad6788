#!/usr/bin/python
from __future__ import annotations

DOCUMENTATION = r"""
module: instance
short_description: Start or stop this host's rank of a vLLM replica, and see it through
description:
  - C(started) points the link C(current) at a generation, starts the unit and waits until it is active. The unit of a head is active only once
    an authenticated completion came back right, that of a worker once its head is healthy.
  - Ends within seconds of the unit's end, of a lost rank of the same replica, or of a head that went away, with the journal's lines that say why,
    and leaves the unit stopped, so that nothing restarts in a circle.
  - C(stopped) stops the unit and waits for the end.
author: The gpu_fleet authors
options:
  instance:
    description: Name of the instance, SERVICE.N.
    type: str
    required: true
  state:
    description: What to reach.
    type: str
    choices: [started, stopped]
    default: started
  generation:
    description: ID of the generation to run. Needed for C(started).
    type: str
  root:
    description: Folder of all instances.
    type: path
    default: /etc/vllm
  rank:
    description: Rank of this host in the replica; 0 is the head.
    type: int
    default: 0
  peers:
    description: How many other ranks the replica has.
    type: int
    default: 0
  store_port:
    description: Port of torch's store on the head, over which the ranks hold a connection for as long as they live.
    type: int
  timeout:
    description: Seconds until a start is given up.
    type: int
    default: 1800
  lost_after:
    description: Seconds without the connection of a rank that was there before, after which it counts as lost.
    type: int
    default: 5
attributes:
  check_mode: {description: Says whether it would start or stop., support: full}
  diff_mode: {description: Shows the state and the generation before and after., support: full}
"""

EXAMPLES = r"""
- name: Start this host's rank
  gpu_fleet.vllm.instance:
    instance: chat.0
    generation: 1a2b3c4d5e6f
    rank: 1
    peers: 1
    store_port: 8001
"""

RETURN = r"""
active: {description: systemd's ActiveState at the end., returned: always, type: str}
seconds: {description: How long the start took., returned: success, type: float}
msg: {description: "Why a start failed, with the lines of the journal that say it.", returned: failure, type: str}
"""

import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import units
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.journal import why

PAUSE = 0.5  # seconds between two looks


def point(link, target):
    """Let a link point elsewhere by rename, so that it is never missing."""
    beside = f"{link}.new"
    if os.path.lexists(beside):
        os.unlink(beside)
    os.symlink(target, beside)
    os.rename(beside, link)


def current_generation(link):
    try:
        return os.path.basename(os.readlink(link))
    except OSError:
        return None


class Watch:
    """One start, watched from outside until it is ready or over."""

    def __init__(self, module, began):
        self.p = module.params
        self.began = began
        self.invocation = ""
        self.seen = 0
        self.missing_since = None

    def look(self):
        """None while it goes on, '' when ready, else what is wrong."""
        unit = units.show(self.p["instance"])
        if unit.active in ("activating", "active", "failed"):
            # Before that, systemd still shows the invocation of the run before.
            self.invocation = self.invocation or unit.invocation
        over = (
            unit.active in ("failed", "deactivating")
            or unit.sub == "auto-restart"
            or (unit.sub == "start-post" and not unit.pid)
        )
        if over or (self.invocation and unit.invocation != self.invocation):
            return f"the unit ended: {unit.result}, {unit.exit}"
        if unit.active == "active":
            return ""
        if unit.active == "inactive" and time.monotonic() - self.began > 10 * PAUSE:
            return "the unit did not start"
        return self.ranks() or self.overdue()

    def ranks(self):
        """A lost rank: its connection to the store was there and has been gone for a while."""
        port, others = self.p["store_port"], self.p["peers"]
        if not port or not others:
            return None
        head = self.p["rank"] == 0
        count = len(set(units.peers_of(port, listening=head)))
        self.seen = max(self.seen, count)
        if count >= self.seen:
            self.missing_since = None
            return None
        self.missing_since = self.missing_since or time.monotonic()
        if time.monotonic() - self.missing_since < self.p["lost_after"]:
            return None
        lost = "another rank of the replica" if head else "the head of the replica"
        return f"{lost} went away during the start; its own host says why"

    def overdue(self):
        if time.monotonic() - self.began < self.p["timeout"]:
            return None
        return f"it was not ready within {self.p['timeout']} s (vllm_service_start_timeout)"


def start(module, unit, link):
    p = module.params
    began = time.monotonic()
    point(link, os.path.join("generations", p["generation"]))
    units.systemctl("daemon-reload")
    units.systemctl("reset-failed", unit.name)
    for verb in (["enable", unit.name], ["start", "--no-block", unit.name]):
        run = units.systemctl(*verb)
        if run.returncode:
            module.fail_json(msg=f"systemctl {' '.join(verb)} on {os.uname().nodename}: {run.stderr.strip()}")
    watch = Watch(module, began)
    outcome = None
    while outcome is None:
        time.sleep(PAUSE)
        outcome = watch.look()
    if outcome:
        units.systemctl("stop", unit.name)
        log = why(units.journal(watch.invocation)) if watch.invocation else []
        module.fail_json(
            msg=f"{p['instance']} did not start on {os.uname().nodename}: {outcome}. It was stopped. The journal says:\n"
            + "\n".join(log),
            active=units.show(p["instance"]).active,
        )
    return time.monotonic() - began


def main():
    module = AnsibleModule(
        argument_spec={
            "instance": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["started", "stopped"], "default": "started"},
            "generation": {"type": "str"},
            "root": {"type": "path", "default": "/etc/vllm"},
            "rank": {"type": "int", "default": 0},
            "peers": {"type": "int", "default": 0},
            "store_port": {"type": "int"},
            "timeout": {"type": "int", "default": 1800},
            "lost_after": {"type": "int", "default": 5},
        },
        required_if=[("state", "started", ["generation"])],
        supports_check_mode=True,
    )
    p = module.params
    unit = units.show(p["instance"])
    link = os.path.join(p["root"], p["instance"], "current")
    if p["state"] == "stopped":
        changed = unit.running or unit.active in ("active", "activating")
        after = {"state": "inactive"}
    else:
        changed = not (unit.active == "active" and unit.enabled and current_generation(link) == p["generation"])
        after = {"state": "active", "generation": p["generation"]}
    before = {"state": unit.active, "generation": current_generation(link)}
    result = {"changed": changed, "active": unit.active, "diff": {"before": before, "after": {**before, **after}}}
    if changed and not module.check_mode:
        if p["state"] == "stopped":
            run = units.systemctl("stop", unit.name)
            if run.returncode:
                module.fail_json(msg=f"systemctl stop {unit.name} on {os.uname().nodename}: {run.stderr.strip()}")
        else:
            result["seconds"] = round(start(module, unit, link), 1)
        result["active"] = units.show(p["instance"]).active
    module.exit_json(**result)


if __name__ == "__main__":
    main()
