#!/usr/bin/python
from __future__ import annotations

DOCUMENTATION = r"""
module: generation
short_description: Write a generation of a vLLM instance, checked by the release's own parser
description:
  - Writes all files of a generation below C(ROOT/INSTANCE/generations/ID), where ID is taken from their content, so the same content is
    the same generation. A new one is written beside, given to the release's own argument parser, and renamed into place whole.
  - Nothing is switched and nothing is started; M(gpu_fleet.vllm.instance) does that.
  - A file of an existing generation that was altered, lost or added by hand is put right, and the module says whether the running process may
    have read it.
  - Tells what runs now, and why that would have to be restarted to be what is wanted.
author: The gpu_fleet authors
options:
  instance:
    description: Name of the instance, SERVICE.N.
    type: str
    required: true
  root:
    description: Folder of all instances.
    type: path
    default: /etc/vllm
  files:
    description:
      - Name to content. C(@ID@) in a content becomes the generation's ID, C(@DIR@) its folder. Files are 0644 and root's.
      - C(config.yaml) is what the parser checks. C(why.json), why it was planned so, is kept and is not part of the identity.
    type: dict
    required: true
  release:
    description: Folder of the release; the generation gets a link C(release) to it.
    type: path
    required: true
  api_key:
    description: Key of the service, written to C(ROOT/INSTANCE/secrets.env), 0600 and root's.
    type: str
    required: true
  former_key:
    description: A former key that the server takes beside it, written to the same file.
    type: str
  former_source:
    description: With it, what the generation gets as C(gpu_fleet_former_key.py), which takes it.
    type: str
  probe_url:
    description:
      - Base URL of the API when this host runs the head, to ask the running server whether it takes the key. By TLS or in clear as that
        server's generation is spoken to, whichever the URL says.
    type: str
  cache:
    description: Folder of all instances' caches; the generation's own gets the bytecode that its check compiles.
    type: path
    default: /var/cache/vllm
  unit_directory:
    description: Where the drop-in of the unit goes.
    type: path
    default: /etc/systemd/system
  planned:
    description: All instances that the plan puts on this host; others that run are told.
    type: list
    elements: str
    default: []
  nofile:
    description: Open files that the running process must be allowed, to compare with what it has.
    type: int
    required: true
  memlock:
    description: Memory that it must be allowed to lock, as systemd writes it.
    type: str
    default: infinity
  keep: {description: 'How many generations stay, for RV(superfluous).', type: int, default: 3}
attributes:
  check_mode: {description: Says what would change., support: full}
  diff_mode: {description: Shows the current generation's files against the new one's; never the key., support: full}
"""

EXAMPLES = r"""
- name: Write what chat.0 runs with
  gpu_fleet.vllm.generation:
    instance: chat.0
    release: /opt/vllm/releases/0.32.0-cpu-1a2b3c4d
    files:
      config.yaml: "{{ config | to_nice_yaml }}"
    api_key: "{{ key }}"
    nofile: 65536
"""

RETURN = r"""
id: {description: ID of the generation., returned: always, type: str}
path: {description: Its folder., returned: always, type: str}
repaired: {description: Files of the generation that were put right, returned: always, type: list, elements: str}
active: {description: systemd's ActiveState of the unit., returned: always, type: str}
running: {description: Whether the unit has a process., returned: always, type: bool}
enabled: {description: Whether the unit starts at boot., returned: always, type: bool}
settled: {description: "Whether it is active with nothing to restart for, starts at boot, and C(current) points at it.", returned: always, type: bool}
running_generation: {description: "ID that the running process was started from; of a change that nobody has judged, the one before it.", returned: always, type: str}
unjudged: {description: "What is kept of a change that nobody has judged (O(gpu_fleet.vllm.instance#module:unjudged)), or empty.", returned: always, type: dict}
only_unjudged: {description: Whether that is all there is to do., returned: always, type: bool}
strangers: {description: Instances that run here and that the plan does not name., returned: always, type: list, elements: str}
tls: {description: Whether a server with this generation speaks TLS., returned: always, type: bool}
tls_before: {description: "Whether one with the generation that C(current) points at does; null where there is none.", returned: always, type: bool}
tls_running: {description: Whether one with RV(running_generation) does; null where there is none., returned: always, type: bool}
superfluous:
  description: Folders of generations and of their caches that M(gpu_fleet.vllm.old_generations) would take away now.
  returned: always
  type: list
  elements: str
restart_reasons: {description: Why the running process is not what is wanted., returned: always, type: list, elements: str}
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import (
    api_tls,
    limits,
    old_generations,
    probe,
    units,
    unjudged,
)

# What the release's own command line does before it starts a server (vllm/entrypoints/cli/main.py), and no more.
PARSE = """
import sys
from vllm.entrypoints.cli.serve import cmd_init
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser(prog="vllm")
subparsers = parser.add_subparsers(required=False, dest="subparser")
commands = {}
for command in cmd_init():
    command.subparser_init(subparsers).set_defaults(dispatch_function=command.cmd)
    commands[command.name] = command
arguments = parser.parse_args(["serve", "--config", sys.argv[1]])
commands["serve"].validate(arguments)
"""

WHY = "why.json"  # reasons, memory and notes of the plan: other words for them are no other generation


class Generation:
    def __init__(self, module):
        p = module.params
        self.module = module
        self.home = os.path.join(p["root"], p["instance"])
        self.id = identity(p["files"], p["release"])
        self.path = os.path.join(self.home, "generations", self.id)
        self.files = {name: fill(content, self.id, self.path) for name, content in p["files"].items()}
        self.cache = os.path.join(p["cache"], p["instance"], self.id)
        self.release = p["release"]
        self.unit = units.show(p["instance"])
        self.memlock = limits.locked_bytes(p["memlock"])
        self.repaired = []
        self.stale = []

    @property
    def exists(self):
        return os.path.isdir(self.path)

    def faults(self):
        """Names of files that are not as they should be, with the time of the change (seconds since the epoch)."""
        found = {}
        for name, content in self.files.items():
            path = os.path.join(self.path, name)
            if read(path) != content or mode(path) != (0o100644, 0, 0):
                found[name] = changed_at(path)
        link = os.path.join(self.path, "release")
        if not os.path.islink(link) or os.readlink(link) != self.release:
            found["release"] = changed_at(link)
        for name in set(os.listdir(self.path)) - set(self.files) - {"release"}:
            found[name] = None
        if mode(self.path) != (0o040755, 0, 0):
            found["."] = None
        return found

    def repair(self):
        """Put right what was altered by hand; remember what the running process may have read."""
        faults = self.faults()
        self.repaired = sorted(faults)
        started = self.unit.started
        if self.unit.generation == self.id and started:
            self.stale = sorted(
                n for n, when in faults.items() if n in self.files and n != WHY and when is not None and when < started
            )
        if self.module.check_mode:
            return
        for name in faults:
            path = os.path.join(self.path, name)
            if name in self.files:
                write(path, self.files[name], 0o644)
            elif name == "release":
                relink(path, self.release)
            elif name == ".":
                os.chmod(self.path, 0o755)
                os.chown(self.path, 0, 0)
            elif os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)

    def create(self):
        """Write the generation beside, let the release's parser judge it, rename it into place."""
        beside = os.path.join(self.home, "generations", ".new")
        if os.path.lexists(beside):
            shutil.rmtree(beside)
        os.makedirs(beside, mode=0o755)
        os.chmod(beside, 0o755)
        for name, content in self.files.items():
            write(os.path.join(beside, name), content, 0o644)
        os.symlink(self.release, os.path.join(beside, "release"))
        self.judge(os.path.join(beside, "config.yaml"))
        os.rename(beside, self.path)

    def judge(self, config):
        os.makedirs(self.cache, mode=0o755, exist_ok=True)
        # Root neither writes into a folder of the service user nor runs bytecode that lies there.
        ours = os.lstat(self.cache).st_uid == os.geteuid()
        cache = self.cache if ours else tempfile.mkdtemp(prefix="vllm-check-")
        os.chmod(cache, 0o700)
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": cache,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            # The parser imports half of vLLM (15 s of CPU without bytecode, 7 s with it): what it compiles is kept where
            # the server looks for it. systemd gives the folder to the service user when the unit starts.
            "PYTHONPYCACHEPREFIX": os.path.join(cache, "pycache"),
        }
        run = subprocess.run(
            [os.path.join(self.release, "bin", "python"), "-c", PARSE, config],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            universal_newlines=True,
            env=environment,
            check=False,
        )
        if run.returncode or not ours:
            shutil.rmtree(cache)
        if run.returncode:
            shutil.rmtree(os.path.dirname(config))
            last = [line for line in run.stdout.splitlines() if line.strip()][-1:] or [f"exit status {run.returncode}"]
            self.module.fail_json(
                msg=(
                    f"The parser of {self.release} refuses the configuration of {self.module.params['instance']}: {last[0]}. "
                    f"Nothing was switched. Correct `args` of the service, or choose another vllm_runtime_version"
                ),
                output=run.stdout[-4000:],
            )


def identity(files, release):
    """What a generation is called by: everything that a server runs with, and not why it was chosen."""
    digest = hashlib.sha256(release.encode())
    for name in sorted(set(files) - {WHY}):
        digest.update(f"\0{name}\0{files[name]}".encode())
    return digest.hexdigest()[:12]


def fill(content, identifier, path):
    return content.replace("@ID@", identifier).replace("@DIR@", path)


def read(path):
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as lines:
            return lines.read()
    except OSError:
        return None


def mode(path):
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return (status.st_mode, status.st_uid, status.st_gid)


def changed_at(path):
    try:
        return os.lstat(path).st_ctime
    except OSError:
        return None


def write(path, content, bits):
    """Replace a file whole: written beside with its final mode, flushed, renamed."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    beside = f"{path}.new"
    if os.path.lexists(beside):
        os.unlink(beside)
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, bits)
    with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape", newline="") as out:
        os.fchmod(out.fileno(), bits)
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    os.rename(beside, path)


def relink(path, target):
    beside = f"{path}.new"
    if os.path.lexists(beside):
        os.unlink(beside)
    os.symlink(target, beside)
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    os.rename(beside, path)


def strangers(planned):
    """Instances that run on this host and that the plan does not name."""
    listed = units.systemctl(
        "list-units", "vllm@*.service", "--plain", "--no-legend", "--state=active,activating"
    ).stdout
    names = [
        line.split()[0][len("vllm@") : -len(".service")] for line in listed.splitlines() if line.startswith("vllm@")
    ]
    return [name for name in names if planned and name not in planned]


def points_at(link, identifier):
    return os.path.islink(link) and os.readlink(link) == os.path.join("generations", identifier)


def secrets_right(path, content):
    return read(path) == content and mode(path) == (0o100600, 0, 0)


def keep_key(module, secrets, key_line, refused):
    """Put the key where the next start finds it; what changed.

    A running server that refuses it goes on with its old key until it is restarted, also when it crashes before: then
    the new one waits beside.
    """
    waiting = f"{secrets}.next"
    target = waiting if refused else secrets
    changed = []
    if not refused and os.path.lexists(waiting):
        changed.append(os.path.basename(waiting))
        if not module.check_mode:
            os.unlink(waiting)
    if not secrets_right(target, key_line):
        changed.append(os.path.basename(target))
        if not module.check_mode:
            write(target, key_line, 0o600)
    return changed


def with_former_key(p):
    """The content of secrets.env; with a former key, what takes it becomes part of the generation."""
    own = f"VLLM_API_KEY={p['api_key']}\n"
    if not p["former_key"]:
        return own
    p["files"] = {**p["files"], "gpu_fleet_former_key.py": p["former_source"]}
    return f"{own}GPU_FLEET_FORMER_KEY={p['former_key']}\n"


def restart_reasons(module, generation):
    """Why the running process has to be restarted to be what is wanted."""
    unit, p = generation.unit, module.params
    if not unit.running:
        return []
    reasons = []
    if unit.generation != generation.id:
        reasons.append(f"it runs generation {unit.generation or 'unknown'}, wanted is {generation.id}")
    if generation.stale:
        reasons.append(f"it started after {', '.join(generation.stale)} had been altered by hand")
    have = units.limits(unit.pid)
    wanted = {"nofile": p["nofile"], "memlock": generation.memlock}
    for name, what in (("nofile", "open files"), ("memlock", "bytes of locked memory (-1: unlimited)")):
        if have.get(name) != wanted[name]:
            reasons.append(f"its limit is {have.get(name)} {what}, wanted {wanted[name]}")
    if p["probe_url"] and unit.active == "active":
        url = api_tls.url(p["probe_url"], os.path.join(generation.home, "generations", unit.generation or ""))
        answer = probe.request(f"{url}/v1/models", p["api_key"])
        if answer.status == 401:
            reasons.append("it refuses the key of vllm_service_api_keys")
        elif p["former_key"] and probe.request(f"{url}/v1/models", p["former_key"]).status == 401:
            reasons.append("it refuses the key of vllm_service_former_keys")
    return reasons


def to_judge(module, generation, reasons, changes):
    """What is kept of a change that nobody has judged, which is a reason to look at it; nothing is to be judged where what served before it
    is wanted again."""
    kept = unjudged.read(generation.home)
    if kept.get("former") == generation.id:
        unjudged.forget(generation.home, module.check_mode)
        changes.append(unjudged.NAME)
        return {}
    if kept:
        reasons.append(unjudged.REASON)
    return kept


def main():
    os.umask(0o022)  # a hardened host's own would hide what is made here from the service user
    module = AnsibleModule(
        argument_spec={
            "instance": {"type": "str", "required": True},
            "root": {"type": "path", "default": "/etc/vllm"},
            "files": {"type": "dict", "required": True},
            "release": {"type": "path", "required": True},
            "api_key": {"type": "str", "required": True, "no_log": True},
            "former_key": {"type": "str", "no_log": True},
            "former_source": {"type": "str"},
            "probe_url": {"type": "str"},
            "cache": {"type": "path", "default": "/var/cache/vllm"},
            "unit_directory": {"type": "path", "default": "/etc/systemd/system"},
            "planned": {"type": "list", "elements": "str", "default": []},
            "nofile": {"type": "int", "required": True},
            "memlock": {"type": "str", "default": "infinity"},
            "keep": {"type": "int", "default": 3},
        },
        required_together=[("former_key", "former_source")],
        supports_check_mode=True,
    )
    p = module.params
    key_line = with_former_key(p)
    try:
        generation = Generation(module)
    except ValueError as error:
        module.fail_json(msg=f"The limit of locked memory of {p['instance']}: {error}")
    current = os.path.join(generation.home, "current")
    secrets = os.path.join(generation.home, "secrets.env")
    drop_in = os.path.join(p["unit_directory"], f"{units.unit_name(p['instance'])}.d", "generation.conf")
    wanted_link = os.path.join(current, "unit.conf")
    before = {name: read(os.path.join(current, name)) or "" for name in generation.files}
    tls_before = api_tls.of_generation(current)
    changes = []

    if not module.check_mode:
        os.makedirs(os.path.join(generation.home, "generations"), mode=0o755, exist_ok=True)
        lock = open(os.path.join(generation.home, ".lock"), "w", encoding="ascii")  # noqa: SIM115  held until the end
        fcntl.flock(lock, fcntl.LOCK_EX)
    # The service user has to get through all of them; a link is the operator's, and so is where it leads.
    for folder in (
        p["root"],
        generation.home,
        os.path.join(generation.home, "generations"),
        p["cache"],
        os.path.dirname(generation.cache),
    ):
        if not os.path.islink(folder) and mode(folder) not in ((0o040755, 0, 0), None):
            changes.append(folder)
            if not module.check_mode:
                os.chmod(folder, 0o755)
                os.chown(folder, 0, 0)
    if generation.exists:
        generation.repair()
        changes += generation.repaired
    else:
        changes.append("generation")
        if not module.check_mode:
            generation.create()
    if not os.path.islink(drop_in) or os.readlink(drop_in) != wanted_link:
        changes.append(drop_in)
        if not module.check_mode:
            os.makedirs(os.path.dirname(drop_in), mode=0o755, exist_ok=True)
            relink(drop_in, wanted_link)

    reasons = restart_reasons(module, generation)
    changes += keep_key(module, secrets, key_line, any("refuses the key" in reason for reason in reasons))
    unit = generation.unit
    right = unit.active == "active" and not reasons and unit.enabled and points_at(current, generation.id)
    open_change = to_judge(module, generation, reasons, changes)
    result = {
        "changed": bool(changes),
        "id": generation.id,
        "path": generation.path,
        "changes": changes,
        "repaired": generation.repaired,
        "active": unit.active,
        "running": unit.running,
        "enabled": unit.enabled,
        "settled": right and not reasons,
        "running_generation": open_change.get("former") or unit.generation,
        "unjudged": open_change,
        "only_unjudged": right and bool(reasons),
        "restart_reasons": reasons,
        "tls": bool(json.loads(generation.files["plan.json"]).get("tls")) if "plan.json" in generation.files else False,
        "tls_before": tls_before,
        "tls_running": api_tls.of_generation(
            os.path.join(generation.home, "generations", open_change.get("former") or unit.generation or "")
        ),
        "strangers": strangers(p["planned"]),
        "superfluous": old_generations.going(
            generation.home, os.path.dirname(generation.cache), generation.id, unit.generation, p["keep"]
        )[0],
    }
    if changes:
        shown = {
            name: read(os.path.join(generation.path, name)) for name in generation.repaired if name in generation.files
        }
        result["diff"] = [
            {
                "before": before[name],
                "after": content,
                "before_header": os.path.join(current, name),
                "after_header": os.path.join(generation.path, name),
            }
            for name, content in generation.files.items()
            if before[name] != content or name in shown
        ]
        result["diff"].append(
            {
                "before": "",
                "after": "".join(f"{change}\n" for change in changes),
                "after_header": f"{generation.home}: written or put right",
            }
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
