"""Who logs in on a host: connections put files there as that user, while modules run as the one they become."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleActionFail


def uid(action: Any) -> int | None:
    """Number of the user that an action plugin's connection logs in as; None when modules run as that user anyway.

    The host is asked: the name may stand in ansible_user, in ansible_ssh_user, or in the controller's ssh_config.
    """
    if not action._connection.become:
        return None
    answer = action._low_level_execute_command("id -u", sudoable=False)
    said = answer["stdout"].strip()
    if answer["rc"] or not said.isdecimal():
        raise AnsibleActionFail(f"`id -u` of the user who logs in failed: {said} {answer.get('stderr', '').strip()}")
    return int(said)
