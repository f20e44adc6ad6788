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
  - C(spoken) changes nothing but how servers are spoken to, by O(tls).
  - How a server is spoken to is the gateway's to keep, like what is drained, and goes before its configuration, which says it of servers
    that it sees for the first time. A server that O(tls) turned while it was drained is let in only where O(tls) says again how it
    speaks, since it may run either way by then.
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
    choices: [drained, admitted, repaired, spoken]
    required: true
  tls:
    description:
      - Server to whether it is spoken to by TLS from now on; with C(drained) once it has nothing in flight, with C(admitted) before it is
        let in. Servers that it does not name stay as they are.
      - Refused where the configuration of the gateway does not have what TLS needs, before anything of it is changed.
    type: dict
    default: {}
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
turned: {description: Servers that are spoken to otherwise than before., returned: success, type: list, elements: str}
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
        said = gateway.read_servers(haproxy_socket.shown(path, "show servers state"))
    except OSError:
        return None
    more = {name: {"admin": row.get("srv_admin_state"), "tls": row.get("srv_use_ssl")} for name, row in said.items()}
    return {name: {**row, **more.get(name, {})} for name, row in rows.items()}


def wait(path, servers, deadline, done):
    """Look until it is done or the time is up; the last look."""
    until = time.monotonic() + deadline
    while True:
        rows = look(path) or {}
        if all(done(rows[name]) for name in servers if name in rows) or time.monotonic() >= until:
            return rows
        time.sleep(PAUSE)


def kept(path):
    """Servers that a file names: those that an operator drained, or those that were turned while they were drained."""
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


def to_turn(p, rows):
    """Servers that are spoken to otherwise than they are to be."""
    return [
        name
        for name, tls in p["tls"].items()
        if name in rows and gateway.is_at(rows[name], p["addresses"]) and gateway.by_tls(rows[name]) != tls
    ]


def turn(p, names):
    """Speak to servers as wanted. Raises OSError, and Refused where one cannot be spoken to so."""
    for name in names:
        said = haproxy_socket.shown(p["socket"], f"set server {name} ssl {'on' if p['tls'][name] else 'off'}").strip()
        # Success has a sentence of its own here (cli_parse_set_server of HAProxy's server.c).
        if said != "server ssl setting updated.":
            raise haproxy_socket.Refused(
                f"{name} cannot be spoken to {'by TLS' if p['tls'][name] else 'in clear'}: {said}. Run playbooks/gateway.yml, which "
                "writes what TLS to replicas needs, and then again what was to be done"
            )


def take_over(p, turned, todo):
    """Turn what was drained; where it cannot be, it gets requests again as before."""
    try:
        turn(p, turned)
    except haproxy_socket.Refused:
        for name in todo:
            haproxy_socket.tell(p["socket"], f"set server {name} state ready")
        between = f"{p['state_file']}.turning"
        keep(between, [name for name in kept(between) if name not in turned])
        raise
    finally:
        haproxy_socket.keep(p["socket"], p["state_file"])


def meant(p, rows, operators, turning):
    """Servers that this is about; what is drained and may be let in, where none is named."""
    if p["state"] == "repaired":
        # What its configuration has out of service is neither.
        out = [name for name, row in rows.items() if gateway.drained(row) and not gateway.resting(row)]
        unknown = [name for name in turning if name not in p["tls"]]
        return [name for name in out if name not in [*operators, *p["resting"], *unknown]]
    if p["state"] == "admitted" and not p["keep"]:
        return [name for name in p["servers"] if name not in operators]
    return p["servers"]


def finish(module, known, before, result, began):
    """The end of the module: what is left in flight, and a failure where one was not let in."""
    p, host = module.params, socket.gethostname()
    rows = result.pop("rows")
    after = {name: rows[name]["status"] for name in known if name in rows}
    if p["state"] == "drained":
        result["left"] = sum(gateway.busy(rows[name]) for name in known if name in rows)
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
            "state": {"type": "str", "choices": ["drained", "admitted", "repaired", "spoken"], "required": True},
            "tls": {"type": "dict", "default": {}},
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
        module.exit_json(changed=False, running=False, servers=[], unknown=p["servers"], turned=[], left=0, waited=0.0)
    noted, between = f"{p['state_file']}.kept", f"{p['state_file']}.turning"
    operators, turning = kept(noted), kept(between)
    p["servers"] = meant(p, rows, operators, turning)
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
    turned = to_turn(p, rows)
    begun = sorted({*turning, *turned}) if drain else [name for name in turning if name not in p["tls"]]
    result = {
        "changed": bool(todo or turned) or wanted != operators or begun != turning,
        "running": True,
        "turned": turned,
        "servers": known,
        "unknown": unknown,
        "left": 0,
    }
    if module.check_mode:
        after = {**before, **dict.fromkeys(todo, "DRAIN" if drain else "UP")}
        module.exit_json(waited=0.0, diff={"before": before, "after": after}, **result)
    try:
        if not drain:
            turn(p, turned)
        for name in todo:
            haproxy_socket.tell(p["socket"], f"set server {name} state {'drain' if drain else 'ready'}")
        if wanted != operators:
            keep(noted, wanted)
        if todo or turned:
            haproxy_socket.keep(p["socket"], p["state_file"])
        if p["state"] in ("drained", "admitted"):
            rows = wait(
                p["socket"], known, p["deadline"], (lambda row: gateway.busy(row) == 0) if drain else gateway.admitted
            )
        if begun != turning:
            keep(between, begun)
        if drain and turned:
            take_over(p, turned, todo)
    except (OSError, haproxy_socket.Refused) as error:
        module.fail_json(msg=f"{host}: {error}")
    finish(module, known, before, {**result, "rows": rows}, began)


if __name__ == "__main__":
    main()
