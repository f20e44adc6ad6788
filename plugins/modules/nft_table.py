#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Keep the fleet's own nftables table as its openings say, in the file and in the kernel."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nft_table
short_description: Keep the fleet's own nftables table as its openings say
version_added: 0.1.0
description:
  - Renders the table C(inet gpu_fleet) from a list of openings, writes it to a file that C(nft -f) loads, and loads
    it when the kernel's table is not the one the file describes. Other tables are never touched.
  - What the kernel holds is compared on every run, so that a table altered, flushed or deleted by hand is found. To
    know how the kernel would print the wanted table, it is loaded into an empty network namespace first, which also
    proves that it loads.
  - Looks for chains of others that would drop what the openings accept, and refuses to go on while there are any. Where ufw
    or firewalld made the chain, the openings count as accepted once that tool has rules for them; with O(consent) this module
    adds those.
  - With O(return_after) a new table is loaded on trial. A timer of systemd brings the former one back unless the same task is run
    with O(confirm) in time, which is what the action plugin of this module does over a new connection. The file is written
    only then, so that a reboot in between goes back, too.
author: The gpu_fleet authors (@gpu-fleet)
options:
  openings:
    description: Ports and who may reach them. A port named here is dropped for everybody else.
    type: list
    elements: dict
    required: true
    suboptions:
      name: {description: Shown beside the rule., type: str, required: true}
      ports: {description: 'Ports and ranges, such as C(8000) or C(40000-60999).', type: list, elements: str, required: true}
      proto: {description: Transport protocol., type: str, choices: [tcp, udp], default: tcp}
      from: {description: 'Addresses, CIDRs (IPv4 or IPv6) or the word C(any).', type: list, elements: str, required: true}
      interface: {description: Only what comes in there., type: str}
      cluster: {description: Only what comes in on O(cluster_interface)., type: bool, default: false}
  cluster_interface:
    description: The interface of openings that are for the cluster network alone; null when it is not known.
    type: str
  consent:
    description: Tools that made a chain which drops the openings, and to whose own rules they may be added.
    type: list
    elements: str
    choices: [ufw, firewalld]
    default: []
  return_after:
    description: Seconds after which the former table is back unless this is confirmed. 0 loads the new one for good.
    type: int
    default: 0
  confirm:
    description: The table that is loaded on trial stays.
    type: bool
    default: false
  ssh_ports:
    description: Ports that are accepted before anything else.
    type: list
    elements: int
    default: [22]
  missing_ok:
    description:
      - Say with RV(missing) that the host has no /usr/sbin/nft, which is what units run, and change nothing, so that it can be
        installed. Without this a missing nft is an error, but in check mode.
    type: bool
    default: false
  path:
    description: The file that the unit loads at boot.
    type: path
    default: /etc/gpu_fleet/firewall.nft
requirements: [nft, unshare, systemd-run]
attributes:
  check_mode: {support: full, description: Says what would change and changes nothing.}
  diff_mode: {support: full, description: Shows the kernel's table before and after.}
"""

EXAMPLES = r"""
- name: Only the peer reaches the rank ports
  gpu_fleet.vllm.nft_table:
    openings:
      - name: chat.0 ranks
        ports: ["29501", "40000-60999"]
        from: [10.0.0.2]
"""

RETURN = r"""
table:
  description: The table as the kernel holds it after the run, counters left out; empty in check mode on a host without nft.
  type: str
  returned: success
obstacles:
  description: Chains of others that would drop what the openings accept.
  type: list
  elements: dict
  returned: always
  sample: [{chain: ip filter INPUT, reason: its policy is drop, remedy: accept it there, tool: ""}]
missing:
  description: Whether the host has no nft yet, so that nothing was compared.
  type: bool
  returned: success
on_trial:
  description: Seconds until the former table is back; 0 when nothing is on trial.
  type: int
  returned: success
why:
  description: What was not as it should be.
  type: list
  elements: str
  returned: success
  sample: [the kernel's table was altered]
"""

import json
import os
import shutil
import socket
from typing import NamedTuple

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import host_files, nftables, other_firewalls, sessions

PROGRAM = "/usr/sbin/nft"  # of Debian's and Ubuntu's package
NAME = [nftables.FAMILY, nftables.TABLE]
FORMER, TRIAL = "/run/gpu_fleet/firewall-former.nft", "/run/gpu_fleet/firewall-trial.nft"
TIMER = "gpu-fleet-firewall-return"


def live_table(module, nft):
    """The kernel's table as text without counters; empty when there is none."""
    rc, out, err = module.run_command([nft, "--stateless", "list", "table", *NAME])
    if rc == 0:
        return out
    if "No such file or directory" in err:
        return ""
    return fail(module, f"nft cannot list the table: {err.strip()}")


def as_the_kernel_prints_it(module, nft, text):
    """Load the text into an empty network namespace and list it there. Fails with nft's own words."""
    unshare = module.get_bin_path("unshare", required=True)
    script = f"{nft} -f - && exec {nft} --stateless list table {' '.join(NAME)}"
    rc, out, err = module.run_command([unshare, "--net", "/bin/sh", "-c", script], data=text)
    if rc:
        fail(module, f"the table cannot be tried in a network namespace: {err.strip()}")
    return out


def find_obstacles(module, nft, openings):
    """Chains of others that would drop what the openings accept, nftables' and old iptables'."""
    rc, out, err = module.run_command([nft, "--json", "list", "ruleset"])
    if rc:
        fail(module, f"nft cannot list the ruleset: {err.strip()}")
    found = [with_line(module, nft, item) for item in nftables.obstacles(json.loads(out), openings)]
    for tables, command in (("ip_tables_names", "iptables-legacy"), ("ip6_tables_names", "ip6tables-legacy")):
        save = shutil.which(f"{command}-save")
        # The kernel lists a table here only when old iptables made it; asking would make it.
        if save and "filter" in (host_files.read(f"/proc/net/{tables}") or "").split():
            rc, out, err = module.run_command([save, "-t", "filter"])
            if rc:
                fail(module, f"{command}-save: {err.strip()}")
            found += [item.as_dict() for item in nftables.legacy_obstacles(out, command, openings)]
    return found


def with_line(module, nft, obstacle):
    """The obstacle as plain data, with the text of the rule that drops."""
    told = obstacle.as_dict()
    if obstacle.handle is None:
        return told
    # The rule may be in a chain that this one jumps to: a handle is unique within its table.
    table = obstacle.chain.split()[:2]
    listed = module.run_command([nft, "--stateless", "--handle", "list", "table", *table])[1]
    line = next((text for text in listed.splitlines() if text.endswith(f"# handle {obstacle.handle}")), "")
    rule = line.rpartition("#")[0].strip()
    return {**told, "reason": f"{told['reason']}: `{rule}`" if rule else told["reason"]}


def clear_obstacles(module, nft, openings):
    """Fail at what stays in the way; return commands of other tools that open it by consent, not yet run."""
    found = find_obstacles(module, nft, openings)
    commands, stay = {}, []
    for tool in dict.fromkeys(item["tool"] for item in found):
        if not tool:
            stay += [item for item in found if not item["tool"]]
            continue
        try:
            commands[tool] = other_firewalls.missing(tool, openings, runner(module))
        except other_firewalls.ToolError as error:
            fail(module, f"{tool} cannot be asked what it lets in: {error}. Nothing was changed", obstacles=found)
        if commands[tool] and tool not in module.params["consent"]:
            lines = "".join(f"\n      {other_firewalls.shown(command)}" for command in commands[tool])
            fix = f"Run there, or let this role do it (firewall_consent: [{tool}]):{lines}"
            stay += [{**item, "remedy": f"{tool} made it. {fix}"} for item in found if item["tool"] == tool]
    if stay:
        lines = "\n".join(f"  {item['chain']}: {item['reason']}.\n    {item['remedy']}" for item in stay)
        fail(
            module,
            f"another firewall would drop what the fleet needs; an accept of ours does not undo its drop:\n{lines}\n"
            "Or set firewall_managed_elsewhere: true when that firewall is to decide alone. Nothing was changed",
            obstacles=stay,
        )
    return [command for several in commands.values() for command in several]


def runner(module):
    """How other_firewalls runs a command."""

    def run(command):
        rc, out, err = module.run_command(list(command))
        return rc, out if rc == 0 else err or out

    return run


def open_elsewhere(module, commands):
    """Add the rules to the other tools; their own words when one refuses."""
    for command in commands:
        rc, out, err = module.run_command(command)
        if rc:
            fail(module, f"{other_firewalls.shown(command)}: {(err or out).strip()}. Rules before it were added")


def fail(module, text, **more):
    """End with an error that names the host."""
    module.fail_json(msg=f"{socket.gethostname()}: {text}", **more)


def load(module, nft, path):
    """Replace the kernel's table by the file's, in one transaction."""
    rc, _out, err = module.run_command([nft, "-f", path])
    if rc:
        fail(module, f"nft -f {path}: {err.strip()}")


class Table(NamedTuple):
    """The table as its file says it, as the kernel would print that, and as the kernel prints what it has."""

    text: str
    wanted: str
    live: str


def try_out(module, nft, table, seconds):
    """Load the table on trial: the timer that brings the former one back runs before the new one does anything."""
    stop_timer(module)
    host_files.write(FORMER, nftables.replacing(table.live), 0o600)
    host_files.write(TRIAL, table.text, 0o600)
    command = [
        *("systemd-run", "--quiet", "--collect", f"--unit={TIMER}", f"--on-active={seconds}"),
        *("--timer-property=AccuracySec=200ms", nft, "-f", FORMER),
    ]
    rc, _out, err = module.run_command(command)
    if rc:
        fail(module, f"no timer can be set that would bring the former table back: {err.strip()}. Nothing was changed")
    rc, _out, err = module.run_command([nft, "-f", TRIAL])
    said = f"nft -f {TRIAL}: {err.strip()}" if rc else ""
    if not said and live_table(module, nft) != table.wanted:
        said = "the table was loaded, but the kernel's is another; is something else writing it?"
    if said:
        load(module, nft, FORMER)
        stop_timer(module)
        fail(module, f"{said}. The former table is back")


def stop_timer(module):
    """End an earlier trial's timer, if there is one."""
    module.run_command(["systemctl", "stop", f"{TIMER}.timer"])


def keep(module, nft, path, text, wanted):
    """What is on trial stays: first the timer, then a look whether it was in time."""
    stop_timer(module)
    if live_table(module, nft) != wanted:
        fail(
            module,
            f"the new table was not confirmed within {module.params['return_after']} s (firewall_return_after): the former "
            "one is back. If this host or the way to it is slow, raise firewall_return_after; if the new table shuts the "
            f"controller out, see firewall_ssh_ports ({', '.join(map(str, module.params['ssh_ports']))})",
        )
    host_files.write(path, text)
    for leftover in (FORMER, TRIAL):
        if os.path.exists(leftover):
            os.unlink(leftover)


def refuse_lockout(module, openings):
    """An opening that names the port this very session came in by would drop the next one."""
    session = sessions.ssh_session()
    if session is None or session.port in module.params["ssh_ports"]:
        return
    names = [item.name for item in openings if item.proto == "tcp" and nftables.holds(item.ports, session.port)]
    if names:
        fail(
            module,
            f"Ansible came in by SSH on port {session.port}, which is not in firewall_ssh_ports and would be closed by "
            f"{', '.join(names)}. Add it to firewall_ssh_ports. Nothing was changed",
        )


def arguments():
    """The argument spec of DOCUMENTATION."""
    opening = {
        "name": {"type": "str", "required": True},
        "ports": {"type": "list", "elements": "str", "required": True},
        "proto": {"type": "str", "choices": ["tcp", "udp"], "default": "tcp"},
        "from": {"type": "list", "elements": "str", "required": True},
        "interface": {"type": "str"},
        "cluster": {"type": "bool", "default": False},
    }
    return {
        "openings": {"type": "list", "elements": "dict", "required": True, "options": opening},
        "cluster_interface": {"type": "str"},
        "ssh_ports": {"type": "list", "elements": "int", "default": [22]},
        "path": {"type": "path", "default": "/etc/gpu_fleet/firewall.nft"},
        "consent": {"type": "list", "elements": "str", "choices": list(other_firewalls.TOOLS), "default": []},
        "return_after": {"type": "int", "default": 0},
        "confirm": {"type": "bool", "default": False},
        "missing_ok": {"type": "bool", "default": False},
    }


def main():
    """Compare, and put right what is not as wanted."""
    os.umask(0o022)  # a hardened host's own would hide what is made here from the service user
    module = AnsibleModule(argument_spec=arguments(), supports_check_mode=True)
    given = module.params
    path = given["path"]
    try:
        openings = nftables.parse_openings(given["openings"], given["cluster_interface"])
        text = nftables.render(openings, given["ssh_ports"])
    except ValueError as error:
        fail(module, f"{error}. Nothing was changed")
    nft = None
    if not given["missing_ok"] or os.path.exists(PROGRAM):
        nft = module.get_bin_path("nft", required=not module.check_mode, opt_dirs=["/usr/sbin", "/sbin"])
    if nft is None:
        # In check mode this is the last word on the table; otherwise it is installed, and that task changes something.
        module.exit_json(
            **{"changed": module.check_mode, "missing": True, "table": "", "obstacles": [], "on_trial": 0},
            why=["nft is not installed yet"],
            diff={"before": "", "after": text} if module.check_mode else [],
        )
    wanted, live = as_the_kernel_prints_it(module, nft, text), live_table(module, nft)
    if given["confirm"]:
        keep(module, nft, path, text, wanted)
        module.exit_json(changed=True, missing=False, table=wanted, obstacles=[], on_trial=0, why=["confirmed"])
    refuse_lockout(module, openings)
    elsewhere = clear_obstacles(module, nft, openings)
    why = list(filter(None, [host_files.wrong(path, text)]))
    if live != wanted:
        why.append("the kernel had no such table" if not live else "the kernel's table was not as wanted")
    why += [f"not open there yet: {other_firewalls.shown(command)}" for command in elsewhere]
    diff, trial = diff_of(path, text, live, wanted), 0
    if elsewhere:
        more = "".join(f"{other_firewalls.shown(command)}\n" for command in elsewhere)
        diff = [
            diff,
            {"before": "", "after": more, "before_header": "other firewalls", "after_header": "other firewalls"},
        ]
    if why and not module.check_mode:
        open_elsewhere(module, elsewhere)
        trial = given["return_after"] if live != wanted else 0
        if trial:
            try_out(module, nft, Table(text, wanted, live), trial)
        else:
            host_files.write(path, text)
            if live != wanted:
                load(module, nft, path)
                if live_table(module, nft) != wanted:
                    fail(module, "the table was loaded, but the kernel's is another; is something else writing it?")
    result = {"table": wanted, "obstacles": [], "on_trial": trial, "why": why, "diff": diff}
    module.exit_json(changed=bool(why), missing=False, **result)


def diff_of(path, text, live, wanted):
    """The kernel's table before and after; the file's when only that changes."""
    if live != wanted:
        return {"before": live, "after": wanted, "before_header": "kernel", "after_header": "kernel"}
    return {"before": host_files.read(path) or "", "after": text, "before_header": path, "after_header": path}


if __name__ == "__main__":
    main()
