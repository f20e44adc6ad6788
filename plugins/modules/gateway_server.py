#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Take servers of the running gateway out of service, and let them in again."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gateway_server
short_description: Take servers of the running gateway out of service, and let them in again
description:
  - C(drained) gives servers no new request and waits until those in flight have ended, for so many seconds.
  - C(admitted) lets them in again, and waits until the gateway's own check, the agent's last probe, is right.
  - Works on HAProxy's runtime socket. What it did is kept over reloads and restarts of the gateway.
  - C(repaired) lets in what is drained without C(keep), and what the servers are called does not matter. A run that was cut short may have
    left it so; what an operator drained stays, and so do servers of O(resting).
  - A gateway that does not run, or does not know a server, gives it no request; that is told and is no failure.
author: The gpu_fleet authors (@gpu-fleet)
options:
  servers:
    description: Servers, BACKEND/SERVER.
    type: list
    elements: str
    default: []
  state:
    description: What to reach.
    type: str
    choices: [drained, admitted, repaired]
    required: true
  keep:
    description: >-
      An operator wants it. C(drained) then stays until an operator admits it, whatever runs meanwhile; C(admitted) without it leaves
      out what an operator drained.
    type: bool
    default: false
  deadline:
    description: Seconds to wait.
    type: int
    default: 300
  addresses:
    description: Servers at these addresses alone. One of the same name elsewhere is not meant, and told as unknown.
    type: list
    elements: str
    default: []
  resting:
    description: For C(repaired). Servers that stay as they are, such as those with a host in maintenance.
    type: list
    elements: str
    default: []
  others:
    description: >-
      For C(drained). Refuse it where no other server of the backend is admitted. One that nobody took out is waited for, 30 s at most,
      since what was just started is not admitted at once.
    type: bool
    default: false
  socket:
    description: HAProxy's runtime socket.
    type: path
    default: /run/gpu-fleet-gateway/admin.sock
  state_file:
    description: Where it is kept for the next process.
    type: path
    default: /var/lib/gpu-fleet-gateway/servers
attributes:
  check_mode: {support: full, description: Says what would change and changes nothing.}
  diff_mode: {support: full, description: Shows each server's status before and after.}
"""

EXAMPLES = r"""
- name: Give chat.0 nothing new, and wait for what it works on
  gpu_fleet.vllm.gateway_server:
    servers: [chat/chat.0]
    state: drained
    deadline: 120
"""

RETURN = r"""
running: {description: Whether the gateway runs., returned: always, type: bool}
unknown: {description: Servers that it does not know., returned: success, type: list, elements: str}
servers: {description: Servers that it knows., returned: success, type: list, elements: str}
left: {description: Requests that were still in flight at the deadline., returned: success, type: int}
waited: {description: Seconds that it took., returned: success, type: float}
"""

import json
import os
import socket
import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import gateway, haproxy_socket

PAUSE = 0.25  # seconds between two looks
# Seconds that another server gets until it is admitted: the agent's next probe, and the gateway's next check.
COMING = 30


def look(path):
    """All servers of the running gateway, with what was said of each (admin); None where none runs."""
    try:
        rows = gateway.read_stat(haproxy_socket.shown(path, "show stat"))
        said = gateway.read_admin(haproxy_socket.shown(path, "show servers state"))
    except OSError:
        return None
    return {name: {**row, "admin": said.get(name, 0)} for name, row in rows.items()}


def wait(path, servers, deadline, done):
    """Look until it is done or the time is up; the last look."""
    until = time.monotonic() + deadline
    while True:
        rows = look(path) or {}
        if all(done(rows[name]) for name in servers if name in rows) or time.monotonic() >= until:
            return rows
        time.sleep(PAUSE)


def kept(path):
    """Servers that an operator drained."""
    try:
        with open(path, encoding="utf-8") as text:
            return sorted(set(json.load(text)))
    except (OSError, ValueError):
        return []


def keep(path, names):
    """Note which these are. Raises OSError."""
    with open(f"{path}.new", "w", encoding="utf-8") as out:
        json.dump(sorted(set(names)), out)
    os.replace(f"{path}.new", path)


def alone(rows, servers, good=gateway.admitted):
    """Backends of which no server would be left that is good."""
    found = []
    for backend in sorted({name.partition("/")[0] for name in servers if name in rows}):
        others = [
            name
            for name, row in rows.items()
            if name.startswith(f"{backend}/")
            and name not in servers
            and row.get("svname") not in ("BACKEND", "FRONTEND")
        ]
        if not any(good(rows[name]) for name in others):
            found.append(backend)
    return found


def left_alone(path, rows, servers, operators, check_mode):
    """Backends of which no server would be left, once others had their time to come; the last look.

    In check mode what a run that was cut short left out counts: the run itself lets it in before.
    """
    if check_mode:
        back = {name for name, row in rows.items() if name not in operators and not gateway.resting(row)}
        return alone(rows, servers, lambda row: gateway.admitted(row) or (gateway.drained(row) and _name(row) in back))
    until = time.monotonic() + COMING
    while True:
        found = alone(rows, servers)
        hopeless = alone(rows, servers, lambda row: gateway.admitted(row) or not gateway.drained(row))
        if not found or hopeless or time.monotonic() >= until:
            return found
        time.sleep(PAUSE)
        rows = look(path) or rows


def _name(row):
    return f"{row.get('pxname')}/{row.get('svname')}"


def main():
    """Bring each server where it should be."""
    module = AnsibleModule(
        argument_spec={
            "servers": {"type": "list", "elements": "str", "default": []},
            "state": {"type": "str", "choices": ["drained", "admitted", "repaired"], "required": True},
            "keep": {"type": "bool", "default": False},
            "deadline": {"type": "int", "default": 300},
            "addresses": {"type": "list", "elements": "str", "default": []},
            "resting": {"type": "list", "elements": "str", "default": []},
            "others": {"type": "bool", "default": False},
            "socket": {"type": "path", "default": "/run/gpu-fleet-gateway/admin.sock"},
            "state_file": {"type": "path", "default": "/var/lib/gpu-fleet-gateway/servers"},
        },
        supports_check_mode=True,
    )
    p, host, began = module.params, socket.gethostname(), time.monotonic()
    rows = look(p["socket"])
    if rows is None:
        module.exit_json(changed=False, running=False, servers=[], unknown=p["servers"], left=0, waited=0.0)
    noted = f"{p['state_file']}.kept"
    operators = kept(noted)
    if p["state"] == "repaired":
        # What its configuration has out of service is neither.
        p["servers"] = [
            name
            for name, row in rows.items()
            if gateway.drained(row) and not gateway.resting(row) and name not in [*operators, *p["resting"]]
        ]
    elif p["state"] == "admitted" and not p["keep"]:
        p["servers"] = [name for name in p["servers"] if name not in operators]
    known = [name for name in p["servers"] if name in rows and gateway.is_at(rows[name], p["addresses"])]
    unknown = [name for name in p["servers"] if name not in known]
    drain = p["state"] == "drained"
    todo = [name for name in known if gateway.drained(rows[name]) != drain]
    lonely = (
        left_alone(p["socket"], rows, known, operators, module.check_mode) if drain and p["others"] and todo else []
    )
    if lonely:
        module.fail_json(
            msg=(
                f"{host}: without {', '.join(known)} no replica of {', '.join(lonely)} is admitted at this gateway. "
                "Nothing was drained. Have another one serve first (playbooks/gateway.yml lets in one that is new), or allow the outage: "
                "vllm_service_allow_outage: true"
            )
        )
    wanted = sorted({*operators, *known}) if drain and p["keep"] else operators
    if p["state"] == "admitted":
        wanted = [name for name in operators if name not in known]
    before = {name: rows[name]["status"] for name in known}
    result = {
        "changed": bool(todo) or wanted != operators,
        "running": True,
        "servers": known,
        "unknown": unknown,
        "left": 0,
    }
    if module.check_mode:
        after = {**before, **dict.fromkeys(todo, "DRAIN" if drain else "UP")}
        module.exit_json(waited=0.0, diff={"before": before, "after": after}, **result)
    try:
        for name in todo:
            haproxy_socket.tell(p["socket"], f"set server {name} state {'drain' if drain else 'ready'}")
        if todo:
            haproxy_socket.keep(p["socket"], p["state_file"])
        if wanted != operators:
            keep(noted, wanted)
    except (OSError, haproxy_socket.Refused) as error:
        module.fail_json(msg=f"{host}: {error}")
    if p["state"] != "repaired":
        rows = wait(
            p["socket"], known, p["deadline"], (lambda row: gateway.busy(row) == 0) if drain else gateway.admitted
        )
    after = {name: rows[name]["status"] for name in known if name in rows}
    result["left"] = sum(gateway.busy(rows[name]) for name in known if name in rows) if drain else 0
    result["waited"] = round(time.monotonic() - began, 1)
    outside = [name for name in known if p["state"] == "admitted" and not gateway.admitted(rows.get(name, {}))]
    if outside:
        told = "; ".join(
            f"{name} is {rows[name]['status']} ({rows[name].get('last_chk', '')})" for name in outside if name in rows
        )
        module.fail_json(
            msg=(
                f"{host}: not admitted within {p['deadline']} s: {told}. The check asks the replica's agent for its last probe; "
                "the journal of vllm-agent@ on the replica's host says what is wrong"
            ),
            **result,
        )
    module.exit_json(diff={"before": before, "after": after}, **result)


if __name__ == "__main__":
    main()
