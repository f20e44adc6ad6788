#!/usr/bin/python
from __future__ import annotations

DOCUMENTATION = r"""
module: instance
short_description: Start or stop this host's rank of a vLLM replica, and see it through
description:
  - C(started) points the link C(current) at a generation and starts the unit; it returns as soon as the unit has begun, so that all ranks of
    a replica start together, however few hosts Ansible works on at a time.
  - C(watched) waits until the unit is active. The unit of a head is active only once an authenticated completion came back right, that of a
    worker once its head is healthy. It ends within seconds of the unit's end, of a lost rank, or of another host's failure, with the
    journal's lines that say why, and leaves the unit stopped, so that nothing restarts in a circle.
  - C(stopped) stops the unit and waits for the end.
  - C(judged) ends what O(unjudged) began.
  - From C(stopped) or C(started) until C(watched) has ended, the agent of the instance keeps its hands off; a file in its run time folder
    tells it so, with the time until when, so that a play that was cut short does not keep it from healing for ever.
author: The gpu_fleet authors
options:
  instance:
    description: Name of the instance, SERVICE.N.
    type: str
    required: true
  state:
    description: What to reach.
    type: str
    choices: [started, watched, stopped, judged]
    default: started
  generation:
    description: ID of the generation to run. Needed for C(started).
    type: str
  previous:
    description:
      - For C(started), to go back after a change that failed. ID of the generation that the link C(previous) is to point at again; empty
        takes the link away. Without it, C(previous) becomes what C(current) was.
    type: str
  unjudged:
    description:
      - For C(stopped), before a change. C(former), the generation that serves, and C(said), what it answered (M(gpu_fleet.vllm.answers); empty on
        a host without its API). Kept on the host until C(judged), so that after a run that was cut off the next one can judge, and go back.
      - Empty keeps nothing.
    type: dict
    default: {}
  root:
    description: Folder of all instances.
    type: path
    default: /etc/vllm
  invocation:
    description: For C(watched). The C(invocation_id) that C(started) returned; another one is a restart and so a failure.
    type: str
    default: ""
  hosts:
    description: For C(watched). All hosts of the replica; one that has failed in this run ends the wait.
    type: list
    elements: str
    default: []
  rank:
    description: Rank of this host in the replica; 0 is the head.
    type: int
    default: 0
  store_port:
    description: Port of torch's store on the head, over which the ranks hold a connection for as long as they live.
    type: int
  explain:
    description: >-
      For C(stopped). Invocation of a start that goes wrong; its journal is read before the stop, and told in C(journal) and C(cause).
    type: str
    default: ""
  explain_for:
    description: For C(stopped) with C(explain). Seconds that the journal gets to name a cause of this rank's own.
    type: int
    default: 0
  timeout:
    description: Seconds until a start is given up.
    type: int
    default: 1800
  lost_after:
    description: Seconds without the connection of a rank that was there before, after which it counts as lost.
    type: int
    default: 5
  look_for:
    description: For the action plugin only. Seconds of one look, after which it asks how the other hosts fare.
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
  register: started

- name: See it through
  gpu_fleet.vllm.instance:
    instance: chat.0
    state: watched
    invocation: "{{ started.invocation_id }}"
    hosts: [gpu-01, gpu-02]
    rank: 1
    store_port: 8001
"""

RETURN = r"""
active: {description: systemd's ActiveState at the end., returned: always, type: str}
previous: {description: "ID that the link C(previous) pointed at before, or empty.", returned: started, type: str}
invocation_id: {description: systemd's InvocationID of the start., returned: started and stopped, type: str}
pending: {description: Whether the wait goes on; for the action plugin only., returned: watched, type: bool}
journal: {description: "Lines of the journal that say why a start failed.", returned: failure and with explain, type: list, elements: str}
cause: {description: "Whose the cause is, own or peer, or empty.", returned: failure and with explain, type: str}
msg: {description: "Why a start failed, with the lines of the journal that say it.", returned: failure, type: str}
"""

import json
import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import units, unjudged
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.journal import kind, why

PAUSE = 0.5  # seconds between two looks
BEGIN = 30  # seconds that systemd gets to begin a unit
AGENT = "/run/vllm-agent"  # run time folders of the agents
MARGIN = 120  # seconds beyond the time of a start that the agent is kept off, should nobody let it go on
STOPPED = 900  # seconds for a stop, with its drain, until the start that follows


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


def call(module, *arguments):
    """systemctl, or the end of the module with what it said."""
    run = units.systemctl(*arguments)
    if run.returncode:
        module.fail_json(msg=f"systemctl {' '.join(arguments)} on {os.uname().nodename}: {run.stderr.strip()}")


def keep_agent_off(instance, seconds):
    """Have the agent do nothing for so many seconds; 0 lets it go on."""
    path = os.path.join(AGENT, instance, "paused")
    if not seconds:
        if os.path.lexists(path):
            os.unlink(path)
        return
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    with open(f"{path}.new", "w", encoding="ascii") as out:
        json.dump({"until": time.monotonic() + seconds}, out)
    os.rename(f"{path}.new", path)


def take_over_key(home):
    """A key that the running server refused waits beside until the start that takes it; the one before it is kept for a way back."""
    secrets = os.path.join(home, "secrets.env")
    waiting, before = f"{secrets}.next", f"{secrets}.before"
    if os.path.lexists(before):
        os.unlink(before)  # of an earlier start, and nothing to go back to
    if os.path.exists(waiting):
        if os.path.exists(secrets):
            os.link(secrets, before)
        os.rename(waiting, secrets)


def give_back_key(home):
    """What served before comes back with the key that it had, which is the one that gateways still send; the new one waits again."""
    secrets = os.path.join(home, "secrets.env")
    waiting, before = f"{secrets}.next", f"{secrets}.before"
    if os.path.exists(before):
        os.rename(secrets, waiting)  # its server is stopped
        os.rename(before, secrets)


def start(module, unit, link):
    """Point `current` at the generation, start the unit, return the invocation that this began."""
    p = module.params
    keep_agent_off(p["instance"], p["timeout"] + MARGIN)
    before = current_generation(link)
    former = os.path.join(os.path.dirname(link), "previous")
    if p["previous"] is not None:
        if p["previous"]:
            point(former, os.path.join("generations", p["previous"]))
        elif os.path.lexists(former):
            os.unlink(former)
    elif before and before != p["generation"]:
        point(former, os.path.join("generations", before))
    point(link, os.path.join("generations", p["generation"]))
    if p["previous"] is None:
        take_over_key(os.path.dirname(link))
    elif before != p["generation"]:  # else the start that is undone did not come to this host
        give_back_key(os.path.dirname(link))
    call(module, "daemon-reload")
    if unit.sub == "auto-restart" or unit.active == "deactivating":
        # A start would only wait for the restart that is pending, or for a stop that goes on, and look like neither.
        call(module, "stop", unit.name)
    if unit.active == "failed":
        call(module, "reset-failed", unit.name)
    call(module, "enable", unit.name)
    call(module, "start", "--no-block", unit.name)
    runs = unit.active == "active" or (unit.active == "activating" and unit.sub != "auto-restart")
    deadline = time.monotonic() + BEGIN
    while time.monotonic() < deadline:
        now = units.show(p["instance"])
        if now.invocation and (runs or now.invocation != unit.invocation):
            return now.invocation
        time.sleep(PAUSE / 5)
    return module.fail_json(
        msg=f"{unit.name} on {os.uname().nodename} did not begin within {BEGIN} s; systemctl status {unit.name} says more"
    )


class Watch:
    """One start, watched from outside until it is ready or over."""

    def __init__(self, parameters):
        self.p = parameters
        self.seen = 0
        self.missing_since = None

    def look(self):
        """None while it goes on, '' when ready, else what is wrong."""
        unit = units.show(self.p["instance"])
        over = unit.active in ("failed", "inactive", "deactivating") or unit.sub == "auto-restart"
        if over or (unit.sub == "start-post" and not unit.pid):
            return f"the unit ended: {unit.result}, {unit.exit}"
        if self.p["invocation"] and unit.invocation != self.p["invocation"]:
            return "the unit ended and was started again"
        return "" if unit.active == "active" else self.ranks()

    def ranks(self):
        """A lost rank: its connection to the store was there and has been gone for a while."""
        port, others = self.p["store_port"], len(self.p["hosts"]) - 1
        if not port or others < 1:
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

    def see(self):
        """Look until something is known or the time of this look is up; None when nothing is.

        A rank that is missing when the time is up is looked for until it counts as lost or is back.
        """
        until = time.monotonic() + self.p["look_for"]
        while True:
            outcome = self.look()
            if outcome is not None or (time.monotonic() >= until and self.missing_since is None):
                return outcome
            time.sleep(PAUSE)


def watch(module, unit):
    """See a start through for a while; whether it goes on. Fails when the start has."""
    p = module.params
    outcome = Watch(p).see()
    if outcome is not None:
        if outcome:
            units.systemctl("stop", unit.name)
        keep_agent_off(p["instance"], 0)
    if outcome:
        lines = units.journal(p["invocation"] or unit.invocation)
        log = why(lines)
        said = f"{p['instance']} did not start on {os.uname().nodename}: {outcome}. It was stopped. The journal says:"
        module.fail_json(
            msg="\n".join([said, *log]), journal=log, cause=kind(lines), active=units.show(p["instance"]).active
        )
    return outcome is None


def explain(p):
    """What the journal of a start says, and whose the cause is."""
    until = time.monotonic() + p["explain_for"]
    while True:
        lines = units.journal(p["explain"])
        if kind(lines) == "own" or time.monotonic() >= until:
            return {"journal": why(lines), "cause": kind(lines)}
        time.sleep(2 * PAUSE)


def main():
    os.umask(0o022)  # a hardened host's own would hide what is made here from the service user
    module = AnsibleModule(
        argument_spec={
            "instance": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["started", "watched", "stopped", "judged"], "default": "started"},
            "generation": {"type": "str"},
            "previous": {"type": "str"},
            "unjudged": {"type": "dict", "default": {}},
            "root": {"type": "path", "default": "/etc/vllm"},
            "invocation": {"type": "str", "default": ""},
            "hosts": {"type": "list", "elements": "str", "default": []},
            "rank": {"type": "int", "default": 0},
            "store_port": {"type": "int"},
            "explain": {"type": "str", "default": ""},
            "explain_for": {"type": "int", "default": 0},
            "timeout": {"type": "int", "default": 1800},
            "lost_after": {"type": "int", "default": 5},
            "look_for": {"type": "int", "default": 5},
        },
        required_if=[("state", "started", ["generation"])],
        supports_check_mode=True,
    )
    p = module.params
    unit = units.show(p["instance"])
    if p["state"] == "watched":
        pending = False if module.check_mode else watch(module, unit)
        module.exit_json(changed=False, pending=pending, active=units.show(p["instance"]).active)
    home = os.path.join(p["root"], p["instance"])
    if p["state"] == "judged":
        module.exit_json(changed=unjudged.forget(home, module.check_mode), active=unit.active)
    link = os.path.join(home, "current")
    before = {"state": unit.active, "generation": current_generation(link)}
    former = {}
    if p["state"] == "stopped":
        changed = unit.running or unit.active in ("active", "activating")
        after = {"state": "inactive"}
    else:
        changed = not (unit.active == "active" and unit.enabled and before["generation"] == p["generation"])
        after = {"state": "active", "generation": p["generation"]}
        former = {"previous": current_generation(os.path.join(os.path.dirname(link), "previous")) or ""}
    result = {
        **former,
        **(explain(p) if p["explain"] and not module.check_mode else {}),
        "changed": changed,
        # Not `invocation`: that is Ansible's own name for a module's arguments, and 2.21 takes it out of results.
        "invocation_id": unit.invocation,
        "diff": {"before": before, "after": {**before, **after}},
    }
    if p["state"] == "stopped" and not module.check_mode:
        if p["unjudged"]:
            unjudged.keep(home, p["unjudged"])
        # Also when nothing runs: what the agent holds until it can start it is now stopped by the play.
        keep_agent_off(p["instance"], STOPPED)
    if changed and not module.check_mode:
        if p["state"] == "started":
            result["invocation_id"] = start(module, unit, link)
        else:
            call(module, "stop", unit.name)
    module.exit_json(active=units.show(p["instance"]).active, **result)


if __name__ == "__main__":
    main()
