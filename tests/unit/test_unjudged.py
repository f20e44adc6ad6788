"""What a host keeps of a change until its outcome was judged."""

import json
import os
from types import SimpleNamespace

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import unjudged
from ansible_collections.gpu_fleet.vllm.plugins.modules import answers, generation, instance

CHANGE = {"former": "aaaaaaaaaaaa", "said": {"answers": [" a"], "problem": ""}}


class Over(Exception):
    """How a module ended."""


@pytest.fixture
def home(tmp_path):
    """An instance that serves a generation."""
    (tmp_path / "chat.0/generations/aaaaaaaaaaaa").mkdir(parents=True)
    return tmp_path / "chat.0"


def run(monkeypatch, module, check=False, **params):
    """What a module returns."""

    class Module:
        check_mode = check

        def __init__(self, argument_spec, **_):
            self.params = {**{name: entry.get("default") for name, entry in argument_spec.items()}, **params}

        def exit_json(self, **told):
            raise Over(json.dumps(told))

    monkeypatch.setattr(module, "AnsibleModule", Module)
    with pytest.raises(Over) as over:
        module.main()
    return json.loads(str(over.value))


def test_it_is_there_until_it_is_judged_and_for_root_alone(home):
    assert unjudged.read(str(home)) == {}
    unjudged.keep(str(home), {**CHANGE, "more": 1})
    assert unjudged.read(str(home)) == CHANGE
    assert os.stat(home / unjudged.NAME).st_mode & 0o777 == 0o600
    assert unjudged.forget(str(home), check=True)
    assert unjudged.forget(str(home))
    assert (unjudged.read(str(home)), unjudged.forget(str(home))) == ({}, False)
    assert os.listdir(home) == ["generations"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"former": "", "said": {}}',
        '{"former": "bbbbbbbbbbbb", "said": {}}',
        '{"former": "aaaaaaaaaaaa"}',
    ],
    ids=["empty", "a list", "nothing", "no name", "its generation is gone", "no answers"],
)
def test_what_cannot_be_gone_by_counts_as_nothing(home, text):
    (home / unjudged.NAME).write_text(text)
    assert unjudged.read(str(home)) == {}


def test_it_is_kept_before_the_server_stops(home, monkeypatch):
    """A controller that is killed in between leaves a stopped server, and what it answered."""
    unit = SimpleNamespace(name="vllm@chat.0", active="active", running=True, invocation="i", enabled=True)
    kept = []
    monkeypatch.setattr(instance.units, "show", lambda _: unit)
    monkeypatch.setattr(instance, "AGENT", str(home.parent / "agent"))
    monkeypatch.setattr(instance, "call", lambda _module, *what: kept.append((what, unjudged.read(str(home)))))
    told = {"instance": "chat.0", "root": str(home.parent)}
    assert run(monkeypatch, instance, check=True, state="stopped", unjudged=CHANGE, **told)["changed"]
    assert unjudged.read(str(home)) == {}
    assert run(monkeypatch, instance, state="stopped", unjudged=CHANGE, **told)["changed"]
    assert kept == [(("stop", "vllm@chat.0"), CHANGE)]
    run(monkeypatch, instance, state="stopped", unjudged={}, **told)
    assert unjudged.read(str(home)) == CHANGE, "a stop that is no change forgets what was kept"
    assert run(monkeypatch, instance, state="judged", **told)["changed"]
    assert not run(monkeypatch, instance, state="judged", **told)["changed"]


def test_what_was_said_then_is_gone_by_while_model_and_weights_are_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(answers.answers, "ask", lambda *_: pytest.fail("somebody was asked"))
    (tmp_path / "plan.json").write_text('{"model": "m", "weights": null}')
    told = {"said": CHANGE["said"], "plan": str(tmp_path / "plan.json")}
    same = run(monkeypatch, answers, wanted={"model": "m", "weights": None}, **told)
    assert (same["answers"], same["problem"]) == ([" a"], "")
    other = run(monkeypatch, answers, wanted={"model": "n", "weights": None}, **told)
    assert other["problem"] == "another model"
    nothing = run(monkeypatch, answers, said={})
    assert nothing["problem"] == "nothing was asked before"


@pytest.mark.parametrize(
    ("wanted", "check"), [("bbbbbbbbbbbb", False), ("aaaaaaaaaaaa", True), ("aaaaaaaaaaaa", False)]
)
def test_it_is_a_reason_to_look_and_none_where_what_served_before_is_wanted_again(home, wanted, check):
    unjudged.keep(str(home), CHANGE)
    module, one = SimpleNamespace(check_mode=check), SimpleNamespace(home=str(home), id=wanted)
    reasons, changes = [], []
    kept = generation.to_judge(module, one, reasons, changes)
    back = wanted == CHANGE["former"]
    assert kept == ({} if back else CHANGE)
    assert (reasons, changes) == (([], [unjudged.NAME]) if back else ([unjudged.REASON], []))
    assert unjudged.read(str(home)) == ({} if back and not check else CHANGE)
