"""A new table stays only when the controller came back over a new connection. That it really goes back is shown on a host
(tests/host/test_strangers.py)."""

import types

import pytest
from ansible.errors import AnsibleConnectionFailure
from ansible_collections.gpu_fleet.vllm.plugins.action import nft_table


@pytest.fixture
def action(monkeypatch):
    """The plugin with a connection that counts, and a module that answers from a list."""
    made = nft_table.ActionModule.__new__(nft_table.ActionModule)
    made._task = types.SimpleNamespace(args={"openings": [], "return_after": 1})
    made.resets, made.asked, made.answers = 0, [], []

    def reset():
        made.resets += 1

    def module(arguments, _task_vars):
        made.asked.append(arguments.get("confirm", False))
        answer = made.answers.pop(0) if len(made.answers) > 1 else made.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    made._connection = types.SimpleNamespace(transport="ssh", reset=reset)
    made._module = module
    monkeypatch.setattr(nft_table.ActionBase, "run", lambda *_arguments, **_more: {})
    monkeypatch.setattr(nft_table, "PAUSE", 0.05)
    return made


def run(action, *answers):
    action.answers = list(answers)
    return action.run(task_vars={"inventory_hostname": "gpu-01"})


LOADED = {"changed": True, "on_trial": 1, "why": ["new"]}
CUT = AnsibleConnectionFailure("Failed to connect to the host via ssh")


def test_what_is_not_on_trial_is_not_confirmed(action):
    assert run(action, {"changed": False, "on_trial": 0}) == {"changed": False, "on_trial": 0}
    assert (action.asked, action.resets) == ([False], 0)


def test_a_new_connection_confirms(action):
    assert run(action, LOADED, {"changed": True}) == {**LOADED, "on_trial": 0}
    assert (action.asked, action.resets) == ([False, True], 1)


def test_a_local_connection_has_nothing_to_reset(action):
    action._connection.transport = "local"
    assert run(action, LOADED, {"changed": True})["on_trial"] == 0
    assert action.resets == 0


def test_it_tries_again_until_it_comes_back(action):
    assert run(action, LOADED, CUT, CUT, {"changed": True})["on_trial"] == 0
    assert action.resets == 3


def test_who_cannot_come_back_in_time_says_so(action):
    said = run(action, LOADED, CUT)
    assert said["failed"]
    assert "gpu-01: with the new table no new connection came through within 1 s (Failed to connect" in said["msg"]


def test_what_was_not_confirmed_in_time_is_the_modules_word(action):
    assert run(action, LOADED, {"failed": True, "msg": "not confirmed in time"})["msg"] == "not confirmed in time"


def test_a_failed_load_is_not_confirmed(action):
    assert run(action, {"failed": True, "msg": "no"})["msg"] == "no"
    assert action.asked == [False]
