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
  - Looks for chains of others that would drop what the openings accept, and refuses to go on while there are any.
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
  ssh_ports:
    description: Ports that are accepted before anything else.
    type: list
    elements: int
    default: [22]
  path:
    description: The file that the unit loads at boot.
    type: path
    default: /etc/gpu_fleet/firewall.nft
requirements: [nft, unshare]
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
  sample: [{chain: ip filter INPUT, reason: its policy is drop, remedy: accept it there}]
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

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import host_files, nftables

NAME = [nftables.FAMILY, nftables.TABLE]


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
    found = nftables.obstacles(json.loads(out), openings)
    for tables, command in (("ip_tables_names", "iptables-legacy"), ("ip6_tables_names", "ip6tables-legacy")):
        save = shutil.which(f"{command}-save")
        # The kernel lists a table here only when old iptables made it; asking would make it.
        if save and "filter" in (host_files.read(f"/proc/net/{tables}") or "").split():
            rc, out, err = module.run_command([save, "-t", "filter"])
            if rc:
                fail(module, f"{command}-save: {err.strip()}")
            found += nftables.legacy_obstacles(out, command, openings)
    return [obstacle.as_dict() for obstacle in found]


def fail(module, text, **more):
    """End with an error that names the host."""
    module.fail_json(msg=f"{socket.gethostname()}: {text}", **more)


def load(module, nft, path):
    """Replace the kernel's table by the file's, in one transaction."""
    rc, _out, err = module.run_command([nft, "-f", path])
    if rc:
        fail(module, f"nft -f {path}: {err.strip()}")


def main():
    """Compare, and put right what is not as wanted."""
    os.umask(0o022)  # a hardened host's own would hide what is made here from the service user
    module = AnsibleModule(
        argument_spec={
            "openings": {"type": "list", "elements": "dict", "required": True},
            "ssh_ports": {"type": "list", "elements": "int", "default": [22]},
            "path": {"type": "path", "default": "/etc/gpu_fleet/firewall.nft"},
        },
        supports_check_mode=True,
    )
    path = module.params["path"]
    try:
        openings = nftables.parse_openings(module.params["openings"])
        text = nftables.render(openings, module.params["ssh_ports"])
    except ValueError as error:
        fail(module, f"{error}. Nothing was changed")
    nft = module.get_bin_path("nft", required=not module.check_mode, opt_dirs=["/usr/sbin", "/sbin"])
    if nft is None:
        diff = {"before": "", "after": text}
        module.exit_json(changed=True, table="", obstacles=[], why=["nft is not installed yet"], diff=diff)
    found = find_obstacles(module, nft, openings)
    if found:
        lines = "\n".join(f"  {item['chain']}: {item['reason']}.\n    {item['remedy']}." for item in found)
        fail(
            module,
            f"another firewall would drop what the fleet needs; an accept of ours does not undo its drop:\n{lines}\n"
            "Or set firewall_managed_elsewhere: true when that firewall is to decide alone. Nothing was changed",
            obstacles=found,
        )
    wanted, live = as_the_kernel_prints_it(module, nft, text), live_table(module, nft)
    why = list(filter(None, [host_files.wrong(path, text)]))
    if live != wanted:
        why.append("the kernel had no such table" if not live else "the kernel's table was not as wanted")
    if why and not module.check_mode:
        host_files.write(path, text)
        if live != wanted:
            load(module, nft, path)
            if live_table(module, nft) != wanted:
                fail(module, "the table was loaded, but the kernel's is another; is something else writing it?")
    module.exit_json(changed=bool(why), table=wanted, obstacles=[], why=why, diff=diff_of(path, text, live, wanted))


def diff_of(path, text, live, wanted):
    """The kernel's table before and after; the file's when only that changes."""
    if live != wanted:
        return {"before": live, "after": wanted, "before_header": "kernel", "after_header": "kernel"}
    return {"before": host_files.read(path) or "", "after": text, "before_header": path, "after_header": path}


if __name__ == "__main__":
    main()
