#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Write a host's certificate and key so that servers that run read it again."""

from __future__ import annotations

DOCUMENTATION = r"""
module: server_certificate
short_description: Write a certificate and its key so that vLLM servers that run read it again
version_added: 0.1.0
description:
  - The file is 0400 of one user, and its content is changed in place, by one write. vLLM's C(--enable-ssl-refresh) watches the file itself,
    and would not see the second one that is put in its place.
author: The gpu_fleet authors (@gpu-fleet)
options:
  path: {description: Absolute path; a missing folder is made with mode 0755., type: path, required: true}
  content: {description: "Key and certificate, PEM.", type: str, required: true}
  owner: {description: User that alone may read it., type: str, required: true}
attributes:
  check_mode: {support: full, description: Says what would change and changes nothing.}
  diff_mode: {support: full, description: "Shows the certificate's digest and the permissions, never the content."}
"""

EXAMPLES = r"""
- name: Write the host's certificate
  gpu_fleet.vllm.server_certificate:
    path: /etc/gpu_fleet/vllm/tls.pem
    content: "{{ key ~ certificate }}"
    owner: vllm
"""

RETURN = r"""
digest: {description: SHA-256 of the first certificate in it., returned: success, type: str}
"""

import hashlib
import os
import pwd
import re
import socket
import ssl
import stat

from ansible.module_utils.basic import AnsibleModule

MODE = 0o400
CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.S)


def digest(content):
    """SHA-256 of the first certificate; empty where there is none."""
    found = CERTIFICATE.search(content)
    try:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(found.group())).hexdigest() if found else ""
    except ValueError:
        return ""


def look(path):
    """Content, mode, owner and group of a plain file; empty and None where it is none."""
    try:
        info = os.lstat(path)
        if not stat.S_ISREG(info.st_mode):
            return "", None
        with open(path, encoding="ascii", errors="replace") as text:
            return text.read(), (stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid)
    except FileNotFoundError:
        return "", None


def write(path, content, uid):
    """In place where there is a plain file; what is none goes."""
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    if os.path.lexists(path) and look(path)[1] is None:
        os.unlink(path)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.fchown(handle, uid, 0)
        os.fchmod(handle, MODE)
        raw = content.encode("ascii")
        # At once, and shortened afterwards: whoever reads meanwhile finds the whole of it.
        os.write(handle, raw)
        os.ftruncate(handle, len(raw))
        os.fsync(handle)
    finally:
        os.close(handle)


def main():
    """Compare, and write where anything differs."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "content": {"type": "str", "required": True, "no_log": True},
            "owner": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    p, host = module.params, socket.gethostname()
    try:
        uid = pwd.getpwnam(p["owner"]).pw_uid
    except KeyError:
        if not module.check_mode:
            module.fail_json(
                msg=f"{host}: there is no user {p['owner']}, who is to read {p['path']}. Set vllm_service_user"
            )
        uid = None
    have, rights = look(p["path"])
    changed = have != p["content"] or rights != (MODE, uid, 0)
    if changed and not module.check_mode:
        try:
            write(p["path"], p["content"], uid)
        except OSError as error:
            module.fail_json(msg=f"{host}: {p['path']}: {error.strerror}")

    def shown(content, rights):
        mode, owner, group = rights or (0, None, None)
        return (
            f"certificate sha256 {digest(content)}\nmode {mode:04o}, owner {owner}, group {group}\n" if rights else ""
        )

    diff = {"before": shown(have, rights), "after": shown(p["content"], (MODE, uid, 0))}
    diff["before_header"] = diff["after_header"] = p["path"]
    module.exit_json(changed=changed, digest=digest(p["content"]), diff=diff)


if __name__ == "__main__":
    main()
