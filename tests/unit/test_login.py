"""Who brings files to a host, and how a release's wheels get there."""

from types import SimpleNamespace

import pytest
from ansible.errors import AnsibleActionFail, AnsibleError
from ansible_collections.gpu_fleet.vllm.plugins.action.release import ActionModule
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import login


def action(become, answer=None):
    asked = []

    def execute(command, sudoable):
        asked.append((command, sudoable))
        return answer

    return SimpleNamespace(_connection=SimpleNamespace(become=become), _low_level_execute_command=execute, asked=asked)


def test_without_become_it_is_who_runs_the_modules():
    one = action(None)
    assert login.uid(one) is None
    assert one.asked == []


def test_with_become_the_host_says_who_logs_in():
    one = action("sudo", {"rc": 0, "stdout": "1001\n"})
    assert login.uid(one) == 1001
    assert one.asked == [("id -u", False)]


def test_an_answer_that_is_no_number_is_an_error():
    with pytest.raises(AnsibleActionFail, match="This account is disabled"):
        login.uid(action("sudo", {"rc": 1, "stdout": "This account is disabled"}))


FILES = [{"name": name, "path": f"/wheels/{name}", "size": 5, "sha256": "0" * 64} for name in ("a.whl", "b.whl")]


def sender(wanted, put_file):
    """The action plugin, less Ansible: steps of the host are noted."""
    one = object.__new__(ActionModule)
    one._connection = SimpleNamespace(become=None, put_file=put_file)
    one.steps = []

    def host(do, **step):
        one.steps.append((do, step))
        return {"wanted": wanted, "arriving": "/opt/.incoming/arriving"}

    one._host = host
    return one


def test_only_what_the_host_lacks_is_sent_and_straight_to_its_disk():
    sent = []
    one = sender(["b.whl"], lambda *where: sent.append(where))
    one._send(FILES, "/opt/.incoming", 100)
    assert sent == [("/wheels/b.whl", "/opt/.incoming/arriving/b.whl")]
    assert [(do, step.get("room")) for do, step in one.steps] == [("want", 100), ("receive", None)]


def test_a_transfer_that_fails_says_what_and_keeps_the_rest():
    def put_file(source, target):
        raise AnsibleError("No space left on device")

    one = sender(["a.whl", "b.whl"], put_file)
    with pytest.raises(AnsibleActionFail, match=r"a\.whl .* could not be sent .* kept for the next run"):
        one._send(FILES, "/opt/.incoming", 100)
    assert [do for do, _ in one.steps] == ["want"]
