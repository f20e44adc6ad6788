"""Failed tasks become messages that say what to do: no traceback, no JSON.

fixtures/runs/failures.jsonl are events that ansible-runner 2.4.3 with ansible-core 2.18.19 made of hosts that fail in each way, and
failures-2.21.jsonl those that it made with ansible-core 2.21.5.
"""

import json

import pytest
from conftest import REPOSITORY
from gpu_fleet import events, remedies


def recorded(name):
    path = REPOSITORY / "tests" / "unit" / "fixtures" / "runs" / name
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


RECORDED = recorded("failures.jsonl")
NEWER = recorded("failures-2.21.jsonl")
# What each says, whole; or how it begins and what it ends with.
SAYS = {
    "refused": ("Failed to connect to the host via ssh", "are ansible_host and ansible_port right?"),
    "unknown-name": ("Failed to connect to the host via ssh", "write the address into ansible_host, or correct it"),
    "read-only-home": (
        "Failed to create temporary directory: exit status 1. The user who logs in cannot write in their home",
        "set ansible_remote_tmp to a folder that can be written",
    ),
    "old-python": ("exit status 1: ", "install 3.9 or newer, or name it in ansible_python_interpreter"),
    "no-python": (
        "exit status 127: ",
        "install python3 (3.9 or newer) there, or name it in ansible_python_interpreter",
    ),
    "no-sudo": ("exit status 127: ", "Install sudo on the host, or log in as root"),
    "exit-status": ("exit status 3: because",),
    "loop": ("4: exit status 4: non-zero return code",),
    "hidden": ("it failed, and what it says is hidden since it holds secrets (no_log)",),
    "undefined": ("The task includes an option with an undefined variable.. 'nothing' is undefined",),
    "message": ("Destination directory /proc/nope does not exist",),
    "crash": ("exit status 1: KeyError: 'gpus'",),
}
# Where newer ansible-core has other words; what a program wrote is not in its message there.
SAYS_NEWER = {
    **SAYS,
    "no-python": (
        "The module interpreter '/nonexistent/python3' was not found. The host has no Python",
        SAYS["no-python"][-1],
    ),
    "no-sudo": ("Premature end of stream waiting for become success.\n/bin/sh: 1: ", SAYS["no-sudo"][-1]),
    "loop": ("4: exit status 4: The command exited with a non-zero return code.",),
    "undefined": ("Finalization of task args for 'ansible.builtin.debug' failed: ", "'nothing' is undefined"),
    "crash": ("Module failed: 'gpus'",),
    "dies": ("exit status 3: the driver is gone",),
    "unknown-program": ("Error executing command: /nonexistent/program",),
}


@pytest.mark.parametrize(
    ("raw", "says"),
    [*((raw, SAYS) for raw in RECORDED), *((raw, SAYS_NEWER) for raw in NEWER)],
    ids=[*(raw["case"] for raw in RECORDED), *(f"{raw['case']}-2.21" for raw in NEWER)],
)
def test_a_recorded_failure_is_told_with_what_to_do(raw, says):
    event = events.read(raw)
    assert event.kind == ("unreachable" if raw["event"] == "runner_on_unreachable" else "failed")
    assert event.message.startswith(says[raw["case"]][0])
    assert event.message.endswith(says[raw["case"]][-1])
    assert "Traceback" not in event.message
    assert "{" not in event.message
    assert len(event.message.splitlines()) <= 2


def test_every_recorded_failure_is_looked_at():
    assert {raw["case"] for raw in RECORDED} == set(SAYS)
    assert {raw["case"] for raw in NEWER} == set(SAYS_NEWER)


@pytest.mark.parametrize(
    ("said", "helps"),
    [
        # ansible-core 2.18, plugins/connection/ssh.py, and OpenSSH's own words
        ("Invalid/incorrect password: Permission denied, please try again.", "--ask-pass"),
        ("exit status 5: Permission denied, please try again.", "--ask-pass"),  # 2.21, sshpass
        (
            "Failed to connect to the host via ssh: root@192.0.2.1: Permission denied (publickey,password).",
            "The password is wrong, or the host knows neither the user nor the key",
        ),
        (
            "Failed to connect to the host via ssh: root@192.0.2.1: Permission denied (publickey).",
            "ansible_user",
        ),
        ("Failed to connect to the host via ssh: Host key verification failed.", "say yes"),
        ("Failed to connect to the host via ssh: ssh: connect to host x port 22: Connection timed out", "is down"),
        (
            "to use the 'ssh' connection type with passwords or pkcs11_provider, you must install the sshpass program",
            "sshpass",
        ),
        # plugins/become/sudo.py
        ("Missing sudo password", "--ask-become-pass"),
        ("Incorrect sudo password", "is wrong"),
        ("exit status 1: deploy is not in the sudoers file.", "the right to sudo"),
        ("Timeout (12s) waiting for privilege escalation prompt: ", "--ask-become-pass"),
        # parsing/vault, executor, cli
        ("Attempting to decrypt but no vault secrets found", "--vault-password-file"),
        ("ERROR! Specified inventory, host pattern and/or --limit leaves us with no hosts to target.", "--graph"),
        (
            "couldn't resolve module/action 'ansible.posix.sysctl'. This often indicates a misspelling",
            "requirements.yml",
        ),
    ],
)
def test_words_of_ssh_sudo_and_ansible_have_a_remedy(said, helps):
    assert helps in remedies.explained(said)


# OpenSSH 9.2p1 of Debian 12, of a lab host that was made anew, as ansible-core 2.18 passes it on.
CHANGED = """Failed to connect to the host via ssh: @@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@\r
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\r
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@\r
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!\r
Someone could be eavesdropping on you right now (man-in-the-middle attack)!\r
It is also possible that a host key has just been changed.\r
The fingerprint for the ED25519 key sent by the remote host is\r
SHA256:Yc8W3SUPPOSED0f7XyV4mZbB2C0vLQe9hHn1u4o3kQw.\r
Please contact your system administrator.\r
Add correct host key in /home/me/.ssh/known_hosts to get rid of this message.\r
Offending ED25519 key in /home/me/.ssh/known_hosts:2\r
{remove}Host key for 192.0.2.12 has changed and you have requested strict checking.\r
Host key verification failed."""


@pytest.mark.parametrize(
    ("remove", "forgets"),
    [
        (
            '  remove with:\r\n  ssh-keygen -f "/home/me/.ssh/known_hosts" -R "192.0.2.12"\r\n',
            '`ssh-keygen -f "/home/me/.ssh/known_hosts" -R "192.0.2.12"` forgets',
        ),
        ("", "`ssh-keygen -f '/home/me/.ssh/known_hosts' -R HOST` forgets"),
    ],
    ids=["debian", "others"],
)
def test_a_host_that_was_made_anew_is_told_in_one_line_with_what_to_compare_and_what_to_do(remove, forgets):
    told = remedies.explained(remedies.message({"msg": CHANGED.format(remove=remove), "unreachable": True}))
    assert len(told.splitlines()) == 1
    assert "the host's SSH key has changed. It sent ED25519 SHA256:Yc8W3SUPPOSED0f7XyV4mZbB2C0vLQe9hHn1u4o3kQw," in told
    assert "line 2 of /home/me/.ssh/known_hosts" in told
    assert forgets in told
    assert "The host was installed anew, or somebody is in between" in told
    assert "say yes" not in told


def test_a_message_of_a_role_is_left_as_it_is():
    said = "chat.0 did not answer: Connection refused on 198.51.100.11:8000. Look at journalctl -u vllm@chat.0"
    assert remedies.explained(said) == said


def test_what_says_nothing_is_still_a_message():
    assert remedies.message({}) == "it failed and said nothing"
    assert remedies.message({"msg": "non-zero return code", "rc": 4}) == "exit status 4: non-zero return code"
