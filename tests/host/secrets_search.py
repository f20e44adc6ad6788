"""Whether known secrets are where others may read them, after a run: on a host of a lab, and on this controller.

    found_on(host, {"key of chat": KEY})            on a host of testinfra's
    found_here({...}, folders)                      on the controller: processes, Ansible's own folders, and these

Looked at: the command line of every process, the whole journal, what systemd shows of its units, every file that everybody may read
(with every folder above it), and every file at all in the folders for what is passing: /tmp, /var/tmp, /var/log, Ansible's own.
Looked for: the secret as it is, in base64 and percent-encoded. Answers name the secret, and never show it. It travels to the host as hex, so
that the search does not find itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

# Standard library only, Python 3.9: it runs on hosts.
PROGRAM = r'''
import base64, json, os, stat, subprocess, sys, urllib.parse

asked = json.loads(bytes.fromhex(sys.argv[1]))
MOST = 32 << 20  # bytes of a file: releases and weights are larger, and nobody's key
LEFT_OUT = ("/proc", "/sys", "/dev")
OF_TESTS = "molecule."  # a scenario's own folder: its inventory is where the secrets are from
found = []


def spellings(secret):
    plain = secret.encode()
    # In base64 of something longer the secret begins at one of three places of a group; its first and last group may differ.
    parts = {base64.b64encode(b"x" * begin + plain)[4:-4] for begin in range(3)}
    return {plain, urllib.parse.quote(secret, safe="").encode(), *(part for part in parts if len(part) >= 12)}


WANTED = [(name, one) for name, secret in asked["secrets"].items() for one in spellings(secret)]


def look(where, content):
    found.extend((where, name) for name, one in WANTED if one in content)


def processes():
    own = os.readlink("/proc/self/ns/pid")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{pid}/ns/pid") == own:  # those of a lab's hosts are theirs
                with open(f"/proc/{pid}/cmdline", "rb") as text:
                    look("command line of a process", text.read())
        except OSError:
            continue


def printed(where, *command):
    try:
        look(where, subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False).stdout)
    except FileNotFoundError:
        found.append((where, "nothing: there is no " + command[0]))


def files(top, every):
    """Regular files below a folder: all of them, or those that everybody may read."""
    for folder, folders, names in os.walk(top):
        folders[:] = [
            name
            for name in folders
            if os.path.join(folder, name) not in LEFT_OUT
            and not name.startswith(OF_TESTS)
            and (every or open_to_all(os.path.join(folder, name), stat.S_IXOTH))
        ]
        for name in names:
            path = os.path.join(folder, name)
            try:
                status = os.lstat(path)
                if not stat.S_ISREG(status.st_mode) or status.st_size > MOST or not (every or status.st_mode & stat.S_IROTH):
                    continue
                with open(path, "rb") as content:
                    look(path, content.read())
            except OSError:
                continue


def open_to_all(path, bit):
    try:
        return bool(os.stat(path).st_mode & bit)
    except OSError:
        return False


processes()
if asked["whole"]:
    printed("the journal", "journalctl", "-o", "cat", "-a", "--no-pager")
    printed("what systemd shows of its units", "systemctl", "show", "*")
    files("/", every=False)
for folder in asked["folders"]:
    files(os.path.expanduser(folder), every=True)
print(json.dumps(sorted(set(found))))
'''
PASSING = ("/tmp", "/var/tmp", "/var/log", "~/.ansible")


def _told(secrets: Mapping[str, str], folders: Iterable[str], whole: bool) -> str:
    for name, secret in secrets.items():
        assert len(secret) >= 16, f"{name} is too short to be looked for"
    return json.dumps({"secrets": dict(secrets), "folders": list(folders), "whole": whole}).encode().hex()


def found_on(host, secrets: Mapping[str, str], folders: Iterable[str] = PASSING) -> list[str]:
    """Where secrets are on a host of a lab, in words; empty where they are nowhere."""
    program = PROGRAM.encode().hex()
    command = f"python3 -c \"exec(bytes.fromhex('{program}'))\" {_told(secrets, folders, True)}"
    return _words(host.check_output(command))


def found_here(secrets: Mapping[str, str], folders: Iterable[str | Path] = ()) -> list[str]:
    """Where secrets are on this controller: processes, Ansible's own folder, and these folders."""
    told = _told(secrets, ["~/.ansible", *map(str, folders)], False)
    done = subprocess.run([sys.executable, "-c", PROGRAM, told], capture_output=True, text=True, check=True)
    return _words(done.stdout)


def _words(said: str) -> list[str]:
    return [f"{name}: {where}" for where, name in json.loads(said)]


def logs() -> list[Path]:
    """What runs of Ansible leave beside the checkout: logs of scenarios, and the command line's own runs."""
    root = Path(__file__).resolve().parents[2]
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "gpu_fleet"
    return [root / ".cache/logs", state]
