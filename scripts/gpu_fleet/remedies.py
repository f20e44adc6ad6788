"""What a failed task says, in a few lines that a person can act on: its message, and what to do where Ansible's own says only what."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

LINES = 12  # of a program's own words; the whole is in the folder of the run
# Phrases of ssh and sshpass, of sudo, and of ansible-core 2.18 (plugins/connection/ssh.py, plugins/become/sudo.py,
# plugins/action/__init__.py, executor/interpreter_discovery.py), with what helps.
REMEDIES: tuple[tuple[str, str], ...] = (
    (
        r"via ssh.*Connection refused",
        "nothing listens there: is SSH running on the host, and are ansible_host and ansible_port right?",
    ),
    (
        r"via ssh.*(Could not resolve hostname|Name or service not known)",
        "no such name here: write the address into ansible_host, or correct it",
    ),
    (
        r"via ssh.*(Connection timed out|No route to host|Network is unreachable|Operation timed out)",
        "the host is down, or something on the way drops SSH: try `ssh HOST` from this machine",
    ),
    (
        r"the host's SSH key has changed",
        "the host was installed anew, or somebody is in between: compare with `ssh-keygen -lf /etc/ssh/ssh_host_TYPE_key.pub` on its own "
        "console, then have the former key forgotten as said here, and the new one known (`ssh HOST` once)",
    ),
    (
        r"Host key verification failed|Host Key checking is enabled",
        "this machine has never seen the host's key: `ssh HOST` once, look at the key, and say yes",
    ),
    (
        # ansible-core 2.21 hands on what ssh says when sshpass is told to give the password.
        r"Invalid/incorrect (username/)?password|incorrect password attempt|^exit status 5: Permission denied, please try again",
        "the password is wrong: ansible_password or --ask-pass",
    ),
    (r"you must install the sshpass program", "install sshpass here, or log in with a key"),
    (
        # ansible-core 2.19 and newer hand a password on by SSH_ASKPASS, and ssh says no more of a wrong one.
        r"Permission denied \([a-z,-]*password",
        "the password is wrong, or the host knows neither the user nor the key: say who logs in (ansible_user) and with what "
        "(ansible_ssh_private_key_file, or ansible_password or --ask-pass)",
    ),
    (
        r"Permission denied \((publickey|password|keyboard|gssapi|hostbased)",
        "the host knows neither the user nor the key: say who logs in (ansible_user) and with what (ansible_ssh_private_key_file)",
    ),
    (
        r"Incorrect \S+ password|Sorry, try again",
        "the password for sudo is wrong: ansible_become_password in a vault, or --ask-become-pass",
    ),
    (
        r"Missing \S+ password|a password is required|Timeout \(\S+\) waiting for privilege escalation prompt",
        "sudo asks for a password: ansible_become_password in a vault, or --ask-become-pass",
    ),
    (r"is not in the sudoers file|is not allowed to execute", "give the user the right to sudo, or log in as root"),
    (
        r"sudo: (not found|command not found)|sudo: No such file|/sudo: not found",
        "install sudo on the host, or log in as root",
    ),
    (
        r"Read-only file system",
        "a file system of the host is read-only: see `dmesg` there, and remount it once its disk is well",
    ),
    (r"No space left on device", "a file system of the host is full: see `df -h` there"),
    (
        r"Failed to create temporary directory",
        "the user who logs in cannot write in their home: give them one, or set ansible_remote_tmp to a folder that can be written",
    ),
    (
        r"No python interpreters found|python3?(\.\d+)?: (not found|command not found|No such file)|interpreter .* was not found",
        "the host has no Python: install python3 (3.9 or newer) there, or name it in ansible_python_interpreter",
    ),
    (
        r"^exit status \S+ .*SyntaxError|ansible.* requires a minimum of Python",
        "the host's Python is too old for Ansible: install 3.9 or newer, or name it in ansible_python_interpreter",
    ),
    (
        r"[Dd]ecryption failed|Attempting to decrypt but no vault secrets",
        "say where the vault's password is: --vault-password-file FILE",
    ),
    (
        r"couldn't resolve module/action '(ansible\.posix|community\.crypto)\.",
        "a collection is missing: ansible-galaxy collection install -r requirements.yml, or pip install -r requirements.txt",
    ),
    (
        r"specified hosts and/or --limit does not match any hosts|Specified inventory, host pattern and/or --limit",
        "no host of the inventory has that name: ansible-inventory -i INVENTORY --graph shows them all",
    ),
)
_KNOWN = tuple((re.compile(phrase, re.DOTALL), remedy) for phrase, remedy in REMEDIES)
# Of a temporary directory that could not be made Ansible tells the whole shell command.
_COMMAND = re.compile(
    r" In some cases, you may have been able to authenticate.*?(?=Failed command was|$)|Failed command was: .*(?=, exited)",
    re.DOTALL,
)
# What OpenSSH (sshconnect.c, and Debian's words on how to remove it) says in fifteen lines of a host whose key is another one.
_CHANGED = re.compile(
    r"REMOTE HOST IDENTIFICATION HAS CHANGED.*?fingerprint for the (?P<type>\S+) key sent by the remote host is\s+(?P<print>\S+?)\.?\s"
    r".*?Offending \S+ key in (?P<file>.+?):(?P<line>\d+)\s+(?:remove with:\s+(?P<remove>ssh-keygen [^\n]+))?",
    re.DOTALL,
)
# Messages that leave what happened to the output of the program: of ansible-core 2.18, and of 2.19 and newer.
_ELSEWHERE = (
    "non-zero return code",
    "MODULE FAILURE",
    "The module failed to execute",
    "The command exited with a non-zero return code",
    "Module result deserialization failed",
)
# Lines that come with every message of its kind and say nothing.
_EMPTY = re.compile(
    r"^(See stdout/stderr for the exact error|Shared connection to \S+ closed\.|The error appears to be in|be elsewhere in the file|"
    r"The offending line appears to be:|Pseudo-terminal will not be allocated|>>> Standard (Error|Output))"
)


def message(result: Mapping[str, Any]) -> str:
    """What a task's result says of its failure: no traceback, no JSON."""
    if "censored" in result:
        return "it failed, and what it says is hidden since it holds secrets (no_log)"
    items = [item for item in result.get("results") or [] if isinstance(item, Mapping) and _failed(item)]
    if items:
        return "\n".join(f"{_label(item)}: {message(item)}" for item in items)
    said = _clean(str(result.get("msg") or result.get("reason") or "").strip().removeprefix("Task failed: "))
    if said.startswith(_ELSEWHERE):
        words = list(_words(result))
        said = f"exit status {result.get('rc', '?')}: " + ("\n".join(words) if words else said)
    elif said == "Error executing command." and result.get("cmd"):
        command = result["cmd"]
        said = f"{said.rstrip('.')}: {(command if isinstance(command, list) else str(command).split())[0]}"
    return said or "it failed and said nothing"


def _failed(item: Mapping[str, Any]) -> bool:
    """ansible-core 2.19 and newer do not say so of the items of a loop; what failed has this key there, whatever is in it."""
    return bool(item.get("failed", "exception" in item))


def remedy(said: str) -> str:
    """What to do about a message of Ansible, SSH or sudo; empty for one that says it itself."""
    return next((words for phrase, words in _KNOWN if phrase.search(said)), "")


def explained(said: str) -> str:
    """A message with its remedy, where there is one."""
    words = remedy(said)
    return f"{said.rstrip('. ')}. {words[0].upper()}{words[1:]}" if words else said


def _label(item: Mapping[str, Any]) -> str:
    label = item.get("_ansible_item_label", item.get("item"))
    return str(label.get("name", "an item") if isinstance(label, Mapping) else label)[:80]


def _clean(said: str) -> str:
    if changed := _CHANGED.search(said):
        forget = (changed["remove"] or f"ssh-keygen -f '{changed['file']}' -R HOST").strip()
        return (
            f"Failed to connect to the host via ssh: the host's SSH key has changed. It sent {changed['type']} {changed['print']}, another one "
            f"than in line {changed['line']} of {changed['file']}, which `{forget}` forgets"
        )
    said = _COMMAND.sub("", said).replace("., exited with result", ": exit status")
    kept = [line.rstrip() for line in said.splitlines() if not _EMPTY.match(line.strip())]
    place = next((number for number, line in enumerate(kept) if line.strip() == "^ here"), None)
    if place is not None:  # the source around a faulty line of YAML, as ansible-core shows it
        kept = [line for line in kept[:place] if not line.startswith("    ")]
    return "\n".join(line for line in kept if line.strip())


def _words(result: Mapping[str, Any]) -> Iterator[str]:
    """The end of what a program wrote; of a Python traceback the last line, which names the error."""
    for stream in ("stderr", "module_stderr", "stdout", "module_stdout"):
        lines = [line.strip() for line in str(result.get(stream) or "").splitlines() if line.strip()]
        lines = [line for line in lines if not _EMPTY.match(line)]
        if lines:
            error = any(line.startswith("Traceback") for line in lines) or lines[-1].startswith("SyntaxError: ")
            yield from (lines[-1:] if error else lines[-LINES:])
            return
