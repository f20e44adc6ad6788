"""Tuning: what is tried, that the replica serves as before whatever happens, and that only what is better beyond the noise is offered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import bench_compare
from bench_world import PLAN, made
from gpu_fleet import api, kept, runs
from gpu_fleet import tuned as whole
from gpu_fleet import tuning as tune
from gpu_fleet.cli import app
from gpu_fleet.runs import Failure, FleetResult
from typer.testing import CliRunner

SERVICES = [{"name": "chat", "model": "smol", "args": {"max-num-seqs": 8}}, {"name": "else", "model": "{{ theirs }}"}]
CONFIG = {"max-num-seqs": 8, "max-model-len": 2048}
CPU = PLAN["replicas"]["chat.0"]
GPU = {**CPU, "accelerator": "cu130", "gpus": [4, 5, 6, 7], "tensor": 4}


# -- what is tried -------------------------------------------------------------------------------------------------------


def test_candidates_are_few_and_named():
    found = tune.candidates(CONFIG, CPU)
    assert [one.name for one in found] == [
        *(tune.AS_IT_IS, "max-num-seqs", "max-num-seqs", "max-num-batched-tokens", "max-num-batched-tokens"),
        *("prefix-caching", "speculative-ngram"),
    ]
    assert [dict(one.args) for one in found[:3]] == [{}, {"max-num-seqs": 16}, {"max-num-seqs": 4}]
    assert len(tune.candidates(CONFIG, CPU, ["max-num-seqs"])) == 3
    with pytest.raises(tune.Refused, match="there is no candidate seats; there are max-num-seqs"):
        tune.candidates(CONFIG, CPU, ["seats"])


def named(found, name):
    return [one for one in found if one.name == name]


def test_with_gpus_there_are_utilization_and_replicas_in_place_of_tensor_parallelism():
    found = tune.candidates({**CONFIG, "gpu-memory-utilization": 0.9, "speculative-config": {"method": "x"}}, GPU)
    assert [dict(one.args) for one in named(found, "gpu-memory-utilization")] == [{"gpu-memory-utilization": 0.93}]
    assert not named(found, "speculative-ngram"), "it has one"
    (half,) = named(found, "tensor-parallel-size")
    assert tune.changed(SERVICES, "chat", half)[0] == {
        **{"name": "chat", "model": "smol", "gpus": [4, 5], "replicas_per_host": 1},
        "args": {"max-num-seqs": 8, "tensor-parallel-size": 2},
    }
    assert half.settings == {"replicas_per_host": 2, "args": {"tensor-parallel-size": 2}}
    assert tune.label(half) == "replicas_per_host 2, tensor-parallel-size 2"
    assert not named(tune.candidates({"gpu-memory-utilization": 0.95}, GPU), "gpu-memory-utilization")
    (most,) = named(tune.candidates({}, GPU), "gpu-memory-utilization")
    assert most.args == {"gpu-memory-utilization": 0.95}, "vLLM's own is less"


@pytest.mark.parametrize(
    "of", [CPU, {**GPU, "hosts": ["a", "b"]}, {**GPU, "tensor": 2, "data": 2}, {**GPU, "gpus": [0], "tensor": 1}]
)
def test_what_is_no_tensor_parallelism_of_one_host_is_not_split(of):
    assert not named(tune.candidates(CONFIG, of), "tensor-parallel-size")


def test_half_the_size_counts_twice():
    half = tune.candidates(CONFIG, GPU, ["tensor-parallel-size"])[1]
    document = made(tokens=60.0)
    whole = tune.Trial(tune.Candidate(tune.AS_IT_IS, {}, ""), document).throughput["median"]
    assert tune.Trial(half, document).throughput["median"] == pytest.approx(2 * whole)


def test_an_option_can_be_taken_away():
    services = [{"name": "chat", "args": {"no-enable-prefix-caching": True, "max-num-seqs": 8}}]
    (on,) = named(tune.candidates({**CONFIG, "no-enable-prefix-caching": True}, CPU), "prefix-caching")
    assert tune.changed(services, "chat", on)[0]["args"] == {"max-num-seqs": 8}
    assert tune.label(on) == "without no-enable-prefix-caching"


# -- a tuning ------------------------------------------------------------------------------------------------------------


class Fleet:
    """Playbooks that are none: they note what they were asked for; throughput depends on max-num-seqs; a stand-in."""

    def __init__(self, folder, *, fails=(), due=(), cut=None):
        self.asked, self.now, self.note = [], 0.0, folder / "chat" / "tuning.json"
        self.fails, self.due, self.cut = fails, due, cut

    def play(self, playbook, limit, variables, check):
        self.asked.append((playbook, limit, dict(variables), check))
        self.now += 60
        step = (playbook, variables.get("tune_state", "check" if check else "do"))
        if self.cut and self.cut(playbook, variables, check):
            self.cut = None
            return FleetResult(status=1, interrupted=True)
        if step in self.fails:
            return FleetResult(status=1, failures=[Failure("gpu-01", "Start", "it does not start")])
        if check:
            return FleetResult(differing={"gpu-01": list(self.due)})
        if playbook == "tune" and variables["tune_state"] == "noted":
            self.note.parent.mkdir(exist_ok=True)
            self.note.write_text("{}")
        if playbook == "tune" and variables["tune_state"] == "back":
            self.note.unlink()
        if playbook == "accept":
            args = (variables.get("vllm_services") or SERVICES)[0]["args"]
            folder = Path(variables["accept_folder"]) / "chat"
            folder.mkdir(exist_ok=True)
            tokens = 100.0 * args["max-num-seqs"] / 8
            (folder / "2026-11-30T10-00-00Z.json").write_text(json.dumps(made(tokens=tokens, noise=0.1)))
        return FleetResult()

    @property
    def steps(self):
        return [
            f"{playbook} {variables['tune_state']}" if playbook == "tune" else f"{playbook}{' --check' * check}"
            for playbook, _, variables, check in self.asked
        ]


def tuning(fleet, *, budget=1e6, services=SERVICES, plan=PLAN, gateways=False, allow=True, **more):
    return tune.Tuning(
        play=fleet.play, plan=plan, services=services, service="chat", gateways=gateways, allow=allow, note=fleet.note,
        budget=budget, clock=lambda: fleet.now, **more,
    )  # fmt: skip


def tuned(fleet, **more):
    return tuning(fleet, **more).run(tune.candidates(CONFIG, CPU, ["max-num-seqs"]))


def test_each_is_tried_measured_and_the_replica_is_brought_back(tmp_path):
    fleet = Fleet(tmp_path)
    trials = tuned(fleet, load_budget=90.0)
    assert fleet.steps == [
        *("deploy --check", "tune noted", "accept", "deploy", "accept", "deploy", "accept", "tune back"),
    ]
    changes = [variables for playbook, _, variables, check in fleet.asked if playbook == "deploy" and not check]
    assert [one["vllm_services"][0]["args"] for one in changes] == [{"max-num-seqs": 16}, {"max-num-seqs": 4}]
    assert all(one["vllm_service_keep_generations"] > 100 for one in changes), (
        "what served before is there to go back to"
    )
    assert {one["vllm_service_compare_speed"] for one in changes} == {0}, "one that is slow is measured, not sent back"
    assert SERVICES[0]["args"] == {"max-num-seqs": 8}
    assert {limit for playbook, limit, _, _ in fleet.asked if playbook == "deploy"} == {"gpu-01"}
    loads = [variables for playbook, _, variables, _ in fleet.asked if playbook == "accept"]
    assert {(one["accept_replica"], one["accept_budget"], one["accept_full"]) for one in loads} == {
        ("chat.0", 90.0, False)
    }
    best = tune.judge(trials, bench_compare.judge)
    assert best is trials[1] and [trial.verdict for trial in trials] == ["", "better", "worse"]
    said = tune.lines(trials, best, "chat")
    assert 'write {"args": {"max-num-seqs": 16}} into chat' in said[-1] and "+100%, better" in said[1]
    told = tune.kept(trials, best, service="chat", replica="chat.0", when="2026-11-30")
    assert told["settings"] == {"args": {"max-num-seqs": 16}} and len(told["trials"]) == 3
    assert yaml.safe_load(yaml.safe_dump(told)) == told == json.loads(json.dumps(told))


def test_what_does_not_start_is_told_and_the_replica_is_brought_back(tmp_path):
    fleet = Fleet(tmp_path, fails=[("deploy", "do")])
    trials = tuned(fleet)
    assert [trial.problem for trial in trials[1:]] == ["does not serve: it does not start"] * 2
    assert fleet.steps[-1] == "tune back"
    best = tune.judge(trials, bench_compare.judge)
    assert best is None and "Nothing was better" in tune.lines(trials, best, "chat")[-1]
    assert tune.kept(trials, best, service="chat", replica="chat.0", when="")["settings"] == {}


def test_where_no_load_keeps_the_objective_that_is_said(tmp_path):
    trials = tuned(Fleet(tmp_path))
    for trial in trials:
        document, worst = trial.document, {"ttft_p95_ms": 9000.0}
        points = [{**one, "median": {**one["median"], **worst}} for one in document["points"]]
        trial.document = {
            **document,
            "points": points,
            "knee": {**document["knee"], "concurrency": None, "limited_by": list(worst)},
        }
    best = tune.judge(trials, bench_compare.judge)
    assert best is None and [trial.verdict for trial in trials] == ["", "unknown", "unknown"]
    said = "no load kept the objective, so that nothing can be compared (ttft_p95_ms 9,000 at concurrency 1); accept_objective says what is asked"
    assert {trial.told()["problem"] for trial in trials} == {said}
    lines = tune.lines(trials, best, "chat")
    assert said in lines[0] and lines[-1] == "There is nothing to compare with. It serves as before."


@pytest.mark.parametrize("playbook", ["deploy", "accept"])
def test_an_interrupted_run_is_the_last_one_and_the_replica_is_brought_back(tmp_path, playbook):
    fleet = Fleet(tmp_path, cut=lambda name, variables, check: name == playbook and not check)
    with pytest.raises(tune.Interrupted):
        tuned(fleet)
    assert fleet.steps[-2:] == [playbook, "tune back"] and not fleet.note.exists()


def test_whatever_is_raised_the_replica_is_brought_back(tmp_path):
    fleet = Fleet(tmp_path)

    def cut(playbook, variables, check):
        if playbook == "accept" and "vllm_services" in variables:
            raise KeyboardInterrupt
        return False

    fleet.cut = cut
    with pytest.raises(KeyboardInterrupt):
        tuned(fleet)
    assert fleet.steps[-1] == "tune back" and not fleet.note.exists()


def test_the_next_run_begins_with_what_a_killed_one_left(tmp_path):
    fleet = Fleet(tmp_path)
    fleet.note.parent.mkdir()
    fleet.note.write_text("{}")  # as a run that was killed leaves it
    tuned(fleet)
    assert fleet.steps[:3] == ["tune back", "deploy --check", "tune noted"]


def test_what_cannot_be_brought_back_says_how_to_go_on(tmp_path):
    fleet = Fleet(tmp_path, fails=[("tune", "back")])
    with pytest.raises(tune.NotBack, match=r"it does not start\. scripts/fleet tune .* --put-back"):
        tuned(fleet)
    assert fleet.note.exists()


def test_a_drain_that_fails_ends_it_and_the_replica_is_let_in_again(tmp_path):
    fleet = Fleet(tmp_path)

    def cut(playbook, variables, check):
        if variables.get("tune_state") == "noted":
            fleet.note.parent.mkdir()
            fleet.note.write_text("{}")
            fleet.fails = [("tune", "noted")]
        return False

    fleet.cut = cut
    with pytest.raises(tune.Refused, match="it does not start"):
        tuned(fleet)
    assert fleet.steps == ["deploy --check", "tune noted", "tune back"]


def test_the_budget_leaves_the_rest_untried(tmp_path):
    fleet = Fleet(tmp_path)
    trials = tuned(fleet, budget=200)
    assert trials[0].document and "budget" in trials[-1].problem
    assert fleet.steps[-1] == "tune back" and fleet.now < 500
    assert tune.load_budget(1800, 7) == pytest.approx(154, abs=1) and tune.load_budget(60, 7) == tune.LEAST_LOAD


def test_a_little_is_no_better():
    trials = [tune.Trial(tune.Candidate("a", {"x": n}, ""), made(noise=0.3)) for n in range(2)]
    assert tune.judge(trials, bench_compare.judge) is None and trials[1].verdict == "same"
    trials = [tune.Trial(tune.Candidate("a", {"x": n}, ""), made(noise=0.3, tokens=100 + n)) for n in range(2)]
    assert tune.judge(trials, bench_compare.judge) is None and trials[1].verdict == "same"


# -- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("services", "word"), [("{{ made }}", "made by a template"), ([{"name": "{{ a }}"}], "names no chat")]
)
def test_what_cannot_be_tried_is_refused_before_anything_is_changed(tmp_path, services, word):
    fleet = Fleet(tmp_path)
    with pytest.raises(tune.Refused, match=word):
        tuned(fleet, services=services)
    assert not fleet.asked


def test_a_fleet_that_is_not_as_the_inventory_says_is_refused(tmp_path):
    fleet = Fleet(tmp_path, due=["Write the generation and the key of each instance"])
    with pytest.raises(tune.Refused, match=r"gpu-01: Write the generation .* Run scripts/fleet deploy first"):
        tuned(fleet)
    assert fleet.steps == ["deploy --check"]


TWO = {
    **PLAN,
    "services": {"chat": {"replicas": ["chat.0", "chat.1"]}},
    "replicas": {"chat.0": CPU, "chat.1": {**CPU, "hosts": ["gpu-02"], "head": "gpu-02"}},
}


@pytest.mark.parametrize(
    ("plan", "gateways", "allow", "why"),
    [
        (PLAN, True, False, "no other replica of chat"),
        (TWO, False, False, "no gateway"),
        (TWO, True, False, ""),
        (PLAN, False, True, ""),
    ],
)
def test_users_wait_only_where_it_was_allowed(tmp_path, plan, gateways, allow, why):
    fleet = Fleet(tmp_path)
    if not why:
        assert tuned(fleet, plan=plan, gateways=gateways, allow=allow)
        return
    with pytest.raises(tune.Refused, match=f"{why}.*vllm_service_allow_outage=true"):
        tuned(fleet, plan=plan, gateways=gateways, allow=allow)
    assert not fleet.asked


def test_replicas_that_share_a_host_are_refused():
    plan = {**PLAN, "services": TWO["services"], "replicas": dict.fromkeys(("chat.0", "chat.1"), CPU)}
    with pytest.raises(tune.Refused, match=r"chat\.1 shares gpu-01 with chat\.0"):
        tune.replica_of(plan, "chat")
    with pytest.raises(tune.Refused, match="there is no service chta"):
        tune.replica_of(PLAN, "chta")


# -- one GPU -------------------------------------------------------------------------------------------------------------


def test_one_gpu_is_measured_in_its_place_and_the_run_is_kept(tmp_path):
    fleet = Fleet(tmp_path)
    services = [
        {"name": "chat", "args": {"tensor-parallel-size": 4, "enable-expert-parallel": True, "max-num-seqs": 8}}
    ]
    plan = {**PLAN, "replicas": {"chat.0": GPU}}
    (trial,) = tuning(fleet, services=services, plan=plan, keep=tmp_path).run([tune.one_gpu(GPU)])
    assert fleet.steps == ["deploy --check", "tune noted", "deploy", "accept", "tune back"]
    changes = next(variables for playbook, _, variables, check in fleet.asked if playbook == "deploy" and not check)
    assert changes["vllm_services"] == [
        {"name": "chat", "gpus": [4], "replicas_per_host": 1, "args": {"max-num-seqs": 8}}
    ]
    assert trial.document and list((tmp_path / "chat").glob("*Z.json")), "kept where the acceptance looks for it"
    assert tune.label(trial.candidate) == "one GPU"


@pytest.mark.parametrize("of", [CPU, {**GPU, "gpus": [0]}, {**GPU, "hosts": ["a", "b"]}])
def test_what_has_no_more_than_one_gpu_or_is_several_hosts_is_not_cut_down(of):
    with pytest.raises(tune.Refused, match="Nothing was changed"):
        tune.one_gpu(of)


# -- the verb ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def inventory(tmp_path, monkeypatch):
    """An inventory whose playbooks are a stand-in's."""
    folder = tmp_path / "inventory"
    (folder / ".acceptance").mkdir(parents=True)
    fleet = Fleet(folder / ".acceptance")

    fleet.given = []

    def play(playbook, inventory, limit=None, *, check=False, variables=None, **given):
        fleet.given.append((playbook, given))
        if playbook == "validate":
            return FleetResult(plan=PLAN)
        assert runs.HELD.get() == folder.resolve(), "nobody else's change comes in between"
        return fleet.play(playbook, limit, variables, check)

    monkeypatch.setattr(api, "play", play)
    told = {"variables": {"vllm_services": SERVICES, "vllm_service_allow_outage": "true"}, "gateways": False}
    monkeypatch.setattr(whole, "host_variables", lambda *_: told)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return folder, fleet


def asked(*words, **more):
    return CliRunner().invoke(app, ["tune", *(str(word) for word in words)], **more)


def test_nothing_is_changed_without_a_yes(inventory):
    folder, fleet = inventory
    done = asked("-i", folder, "chat", "--only", "max-num-seqs", input="n\n")
    assert done.exit_code == 2 and not fleet.asked
    assert "chat.0 on gpu-01 is started anew for each of: max-num-seqs 16; max-num-seqs 4" in done.output


def test_what_was_found_stays_as_settings_to_copy(inventory):
    folder, _ = inventory
    done = asked("-i", folder, "chat", "--only", "max-num-seqs", input="y\n")
    assert done.exit_code == 0, done.output
    assert "Best: max-num-seqs 16" in done.output
    found = yaml.safe_load((folder / ".acceptance" / "chat" / "tuned.yml").read_text())
    assert found["settings"] == {"args": {"max-num-seqs": 16}} and found["best"] == "max-num-seqs"
    assert found["trials"][1]["output_tokens_per_second"]["repeats"] == 3


def test_json_is_one_document(inventory):
    folder, _ = inventory
    done = asked("-i", folder, "chat", "--only", "max-num-seqs", "--yes", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["best"] == "max-num-seqs"


def test_one_gpu_by_the_verb(inventory, monkeypatch):
    folder, fleet = inventory
    assert asked("-i", folder, "chat", "--one-gpu", "--yes").exit_code == 2, "it has none"
    monkeypatch.setitem(PLAN["replicas"], "chat.0", GPU)
    done = asked("-i", folder, "chat", "--one-gpu", input="y\n")
    assert done.exit_code == 0 and "one GPU: 8" in done.output, done.output
    assert "now judges its scaling" in done.output and fleet.steps[-1] == "tune back"


def test_putting_back_alone_tries_nothing(inventory):
    folder, fleet = inventory
    done = asked("-i", folder, "chat", "--put-back")
    assert done.exit_code == 0 and "nothing to put back" in done.output and not fleet.asked
    fleet.note.parent.mkdir()
    fleet.note.write_text("{}")
    done = asked("-i", folder, "chat", "--put-back")
    assert done.exit_code == 0 and "serves as before" in done.output and fleet.steps == ["tune back"]
    fleet.note.write_text("{}")
    fleet.fails = [("tune", "back")]
    assert asked("-i", folder, "chat", "--put-back").exit_code == 1


def test_another_change_of_the_same_fleet_is_waited_for(inventory):
    folder, fleet = inventory
    with kept.changing(folder, "site"):
        done = asked("-i", folder, "chat", "--yes")
    assert done.exit_code == 2 and "is being changed by another run (site" in done.output and not fleet.asked


# -- from Python ---------------------------------------------------------------------------------------------------------


def test_from_python_what_was_found_is_in_the_result_and_nobody_is_asked(inventory):
    folder, fleet = inventory
    result = api.tune(folder, "chat", ["max-num-seqs"], variables={"accept_repeats": 2})
    assert (result.exit_status, result.tuning["best"]) == (0, "max-num-seqs")
    assert result.tuning == yaml.safe_load((folder / ".acceptance" / "chat" / "tuned.yml").read_text())
    assert fleet.steps[-1] == "tune back"
    assert all(variables["accept_repeats"] == 2 for _, _, variables, _ in fleet.asked), (
        "what is said counts for each run"
    )


def test_from_python_a_refusal_is_a_result(inventory):
    folder, fleet = inventory
    for result, words in (
        (api.tune(folder, "chta"), "there is no service chta"),
        (api.tune(folder, "chat", ["seats"]), "there is no candidate seats"),
        (api.tune(folder, "chat", one_gpu=True), "has one GPU, or none"),
    ):
        assert (result.exit_status, result.tuning) == (2, None)
        assert words in result.failures[0].message
    assert not fleet.asked
    with pytest.raises(FileNotFoundError, match="no inventory"):
        api.tune(folder / "none", "chat")


def test_from_python_it_serves_as_before_whatever_the_caller_ends(inventory):
    """Neither cancel nor a callback that raises reaches the run that brings it back."""
    folder, fleet = inventory
    fleet.cut = lambda playbook, *_: playbook == "accept"
    result = api.tune(folder, "chat", cancel=lambda: True, on_event=print)
    assert (result.exit_status, result.interrupted, fleet.steps[-1]) == (130, True, "tune back")
    assert set(fleet.given[-2][1]) == {"cancel", "on_event"} and set(fleet.given[-1][1]) == {"on_event"}

    def raises(playbook, *_):
        if playbook == "accept":
            raise KeyError("mine")

    fleet.cut = raises
    with pytest.raises(KeyError, match="mine"):
        api.tune(folder, "chat", on_event=print)
    assert fleet.steps[-1] == "tune back" and fleet.given[-1] == ("tune", {})


def test_from_python_only_putting_back(inventory):
    folder, fleet = inventory
    assert api.tune(folder, "chat", put_back=True).tuning == {"service": "chat", "put_back": False}
    fleet.note.parent.mkdir()
    fleet.note.write_text("{}")
    fleet.fails = [("tune", "back")]
    result = api.tune(folder, "chat", put_back=True)
    assert result.exit_status == 1 and "--put-back tries again" in result.failures[0].message
    fleet.fails = []
    assert api.tune(folder, "chat", put_back=True).tuning == {"service": "chat", "put_back": True}


def test_from_python_one_gpu_that_was_not_measured_is_a_failure(inventory, monkeypatch):
    folder, fleet = inventory
    monkeypatch.setitem(PLAN["replicas"], "chat.0", GPU)
    result = api.tune(folder, "chat", one_gpu=True)
    assert (result.exit_status, result.tuning["name"]) == (0, "one GPU")
    fleet.fails = [("accept", "do")]
    result = api.tune(folder, "chat", one_gpu=True)
    assert result.exit_status == 1 and "was not measured" in result.failures[0].message


def test_variables_of_a_host_are_those_of_the_inventory_and_of_the_call(tmp_path):
    (tmp_path / "hosts.yml").write_text(
        yaml.safe_dump({"all": {"children": {"gpu_hosts": {"hosts": {"gpu-01": {"a": 1}}}}}})
    )
    given = runs.Given(variables=('{"vllm_services": [{"name": "chat"}]}',))
    told = whole.host_variables(tmp_path / "hosts.yml", "gpu-01", given)
    assert told == {"variables": {"a": 1, "vllm_services": [{"name": "chat"}]}, "gateways": False}
    (tmp_path / "hosts.yml").write_text("$ANSIBLE_VAULT;1.1;AES256\n3030\n")
    with pytest.raises(tune.Refused, match="no vault secrets found"):
        whole.host_variables(tmp_path / "hosts.yml", "gpu-01")
