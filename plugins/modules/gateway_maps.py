#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Keep the gateway's maps on disk and in the running HAProxy."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gateway_maps
short_description: Keep the gateway's maps on disk and in the running HAProxy
description:
  - Writes map files of HAProxy and, where it runs, makes the running process have the same entries, each map at once
    (C(prepare map), C(add map), C(commit map) of its runtime socket), without a reload.
  - A process whose entries differ from a file that is right, as after a change by hand, is put right, too.
author: The gpu_fleet authors (@gpu-fleet)
options:
  maps:
    description: The maps.
    type: list
    elements: dict
    required: true
    suboptions:
      path: {description: Absolute path., type: path, required: true}
      shows:
        description: What a diff may show of an entry; the rest is a secret.
        type: str
        choices: [keys, values, all]
        default: all
  contents:
    description:
      - "The whole file of each map, in the order of O(maps): a key and a value a line."
      - Apart from them, since Ansible writes the options of a module into the host's log, and hides in it only what stands at the top.
    type: list
    elements: str
    required: true
  socket:
    description: HAProxy's runtime socket. Where nobody listens, the files alone are written.
    type: path
    required: true
  group:
    description: Group that may read the files, beside root. Their mode is 0640.
    type: str
    required: true
attributes:
  check_mode: {support: full, description: Says what would change and changes nothing.}
  diff_mode: {support: full, description: Shows entries as far as shows says.}
"""

EXAMPLES = r"""
- name: Write who may come in
  gpu_fleet.vllm.gateway_maps:
    socket: /run/gpu-fleet-gateway/admin.sock
    group: haproxy
    maps:
      - path: /etc/gpu_fleet/gateway/keys.map
        shows: values
    contents: ["{{ content }}"]
"""

RETURN = r"""
running: {description: Whether HAProxy runs and has the maps., returned: success, type: bool}
"""

import grp
import os
import socket as network

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import gateway, haproxy_socket, host_files


def right(path, content, gid):
    """Whether a file has this content, mode and owner."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return host_files.read(path) == content and (status.st_mode, status.st_uid, status.st_gid) == (0o100640, 0, gid)


def write(path, content, gid):
    """Replace a file whole; nobody else reads it at any time."""
    beside = f"{path}.new"
    if os.path.lexists(beside):
        os.unlink(beside)
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        os.fchown(out.fileno(), 0, gid)
        os.fchmod(out.fileno(), 0o640)
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    os.rename(beside, path)


def running(socket, path):
    """The entries of the running process; None where none runs, or where it does not know the map."""
    try:
        said = haproxy_socket.shown(socket, f"show map {path}")
    except OSError:
        return None
    if said.startswith("Unknown map"):
        return None
    return gateway.read_shown_map(said)


def exchange(socket, path, content):
    """Let the running process have these entries and no other, at once."""
    said = haproxy_socket.shown(socket, f"prepare map {path}")
    version = said.strip().rpartition(" ")[2]
    if not version.isdigit():
        raise haproxy_socket.Refused(f"prepare map {path}: {said.strip()}")
    if content:
        haproxy_socket.add_payload(socket, f"add map @{version} {path}", content)
    haproxy_socket.tell(socket, f"commit map @{version} {path}")


def told(text, shows):
    """Entries for a diff."""
    pairs = sorted(gateway.read_map(text or "").items())
    lines = [{"keys": key, "values": value, "all": f"{key} {value}"}[shows] for key, value in pairs]
    return "".join(f"{line}\n" for line in sorted(lines))


def main():
    """Compare each map, change what differs."""
    module = AnsibleModule(
        argument_spec={
            "maps": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "path": {"type": "path", "required": True},
                    "shows": {"type": "str", "choices": ["keys", "values", "all"], "default": "all"},
                },
            },
            "contents": {"type": "list", "elements": "str", "required": True, "no_log": True},
            "socket": {"type": "path", "required": True},
            "group": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    p = module.params
    try:
        gid = grp.getgrnam(p["group"]).gr_gid
    except KeyError:
        if not module.check_mode:
            module.fail_json(
                msg=f"{network.gethostname()}: there is no group {p['group']}; the package haproxy makes it"
            )
        gid = -1
    changed, runs, diffs = False, False, []
    if len(p["maps"]) != len(p["contents"]):
        module.fail_json(msg=f"{len(p['maps'])} maps and {len(p['contents'])} contents: there has to be one for each")
    for item, content in zip(p["maps"], p["contents"]):  # noqa: B905 (as many, seen above; strict= came with Python 3.10)
        path = item["path"]
        try:
            on_disk = right(path, content, gid)
            has = running(p["socket"], path)
            runs = runs or has is not None
            in_process = has is None or has == gateway.read_map(content)
            if on_disk and in_process:
                continue
            changed = True
            before = host_files.read(path) if not on_disk else gateway.map_text(has or {})
            header = path if not on_disk else f"{path} in the running process"
            diffs.append(
                {
                    "before": told(before, item["shows"]),
                    "after": told(content, item["shows"]),
                    "before_header": header,
                    "after_header": header,
                }
            )
            if module.check_mode:
                continue
            if not on_disk:
                write(path, content, gid)
            if not in_process:
                exchange(p["socket"], path, content)
        except (OSError, haproxy_socket.Refused) as error:
            module.fail_json(msg=f"{network.gethostname()}: {path}: {error}")
    module.exit_json(changed=changed, running=runs, diff=diffs)


if __name__ == "__main__":
    main()
