"""Which replica may be started or restarted when."""

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.rollout import actions, returns, speaking

PLAN = {
    "services": {"chat": {"replicas": ["chat.0", "chat.1"]}},
    "replicas": {
        "chat.0": {"service": "chat", "hosts": ["a", "b"]},
        "chat.1": {"service": "chat", "hosts": ["c", "d"]},
    },
}


def rank(instance, active="active", reasons=(), settled=None):
    settled = (active == "active" and not reasons) if settled is None else settled
    return {"item": {"instance": instance}, "active": active, "restart_reasons": list(reasons), "settled": settled}


def results(**states):
    made = {}
    for host, state in states.items():
        made[host] = [rank("chat.0" if host in "ab" else "chat.1", **state)]
    return made


NOTHING = {"start": [], "restart": [], "unjudged": [], "judge": [], "refuse": []}
WELL, OFF, OLD = {}, {"active": "inactive"}, {"reasons": ["it runs generation 1, wanted is 2"]}


def test_nothing_to_do():
    assert actions(PLAN, results(a=WELL, b=WELL, c=WELL, d=WELL)) == NOTHING


def test_stopped_replicas_start():
    assert actions(PLAN, results(a=OFF, b=OFF, c=OFF, d=OFF))["start"] == ["chat.0", "chat.1"]


def test_a_changed_replica_restarts_while_the_other_serves():
    assert actions(PLAN, results(a=OLD, b=OLD, c=WELL, d=WELL))["restart"] == ["chat.0"]
    assert actions(PLAN, results(a=OLD, b=WELL, c=WELL, d=WELL))["restart"] == ["chat.0"]


def test_the_last_serving_replica_is_not_restarted_unless_allowed():
    last = results(a=OLD, b=OLD, c=OFF, d=OFF)
    (refused,) = actions(PLAN, last)["refuse"]
    message = refused["message"]
    assert refused["hosts"] == ["a", "b"]
    assert "vllm_service_allow_outage" in message
    assert "generation 1" in message
    assert actions(PLAN, last, allow_outage=True)["restart"] == ["chat.0"]


def test_a_replica_with_a_dead_rank_serves_nobody_and_may_restart():
    assert actions(PLAN, results(a=WELL, b=OFF, c=OFF, d=OFF))["restart"] == ["chat.0"]


def test_a_replica_whose_hosts_are_not_all_here_is_not_touched():
    for state in (OFF, OLD):
        done = actions(PLAN, results(a=state))
        assert done["start"] == done["restart"] == []
        assert "b is not part of this run" in done["refuse"][0]["message"]
    assert actions(PLAN, results(a=WELL)) == NOTHING


def test_a_failed_host_has_no_result():
    assert actions(PLAN, {"a": [{"item": {"instance": "chat.0"}, "failed": True}], "b": [rank("chat.0", "inactive")]})[
        "refuse"
    ]


def test_a_replica_that_this_run_started_lets_the_other_restart():
    states = results(a=OFF, b=OFF, c=OLD, d=OLD)
    assert actions(PLAN, states)["start"] == ["chat.0"]
    done = actions(PLAN, states, started=["chat.0"])
    assert done == {**NOTHING, "restart": ["chat.1"]}


def test_a_replica_whose_start_failed_lets_nothing_restart():
    states = results(a=OFF, b=OFF, c=OLD, d=OLD)
    del states["a"]  # it left the run
    assert [entry["instance"] for entry in actions(PLAN, states, started=["chat.0"])["refuse"]] == ["chat.1"]


def test_one_refusal_does_not_keep_another_service_from_starting():
    plan = {**PLAN, "services": {"chat": {"replicas": ["chat.0"]}, "big": {"replicas": ["chat.1"]}}}
    plan["replicas"] = {**PLAN["replicas"], "chat.1": {"service": "big", "hosts": ["c", "d"]}}
    done = actions(plan, results(a=OFF, c=OFF, d=OFF))
    assert done["start"] == ["chat.1"]
    assert [entry["instance"] for entry in done["refuse"]] == ["chat.0"]


def test_nothing_starts_beside_an_instance_that_nobody_names():
    states = results(a=OFF, b=OFF, c=WELL, d=WELL)
    states["a"][0]["strangers"] = ["old.0"]
    done = actions(PLAN, states)
    assert done["start"] == []
    assert "vllm@old.0 runs on a" in done["refuse"][0]["message"]
    assert "scripts/fleet teardown -i INVENTORY old (" in done["refuse"][0]["message"]
    assert done["refuse"][0]["in_the_way"] == ["old.0"]


def test_what_is_refused_for_another_reason_has_nothing_in_its_way():
    (refused,) = actions(PLAN, results(a=OLD, b=OLD, c=OFF, d=OFF))["refuse"]
    assert refused["in_the_way"] == []


def test_a_replica_that_would_only_get_another_number_goes_on_and_is_told_how_it_keeps_its_own():
    """Hosts were [x, y, a, b], and x and y left: what serves on a and b is chat.1, and would be chat.0."""
    states = results(a=OFF, b=OFF)
    for name in "ab":
        states[name][0]["strangers"] = ["chat.1"]
    (refused,) = actions(PLAN, states)["refuse"]
    message = refused["message"]
    assert refused["instance"] == "chat.0" and refused["in_the_way"] == ["chat.1"]
    assert "vllm@chat.1 runs on a; vllm@chat.1 runs on b" in message
    assert "numbered in the order of hosts" in message
    assert "null in the place of each host that left" in message
    assert "vllm_host_state: maintenance" in message
    # It would end all of them at once.
    assert "until you take them away" not in message


# -- what an earlier run was cut off in -------------------------------------------------------------------------------------

CUT_OFF = "the run that changed it was cut off before its answers were compared with those before"


def opened(states, *hosts, only=True):
    """These hosts' ranks were changed by a run that did not judge it."""
    for name in hosts:
        states[name][0].update(unjudged={"former": "1", "said": {}}, only_unjudged=only)
    return states


def test_what_was_changed_and_not_judged_is_judged_first_and_not_restarted_for_it():
    cut = {"reasons": [CUT_OFF], "settled": False}
    done = actions(PLAN, opened(results(a=OLD, b=OLD, c=cut, d=cut), "c", "d"))
    assert done == {**NOTHING, "restart": ["chat.1", "chat.0"], "unjudged": ["chat.1"], "judge": ["chat.1"]}


def test_where_a_rank_is_not_what_is_wanted_all_are_restarted():
    cut = {"reasons": [CUT_OFF], "settled": False}
    states = opened(results(a=WELL, b=WELL, c=cut, d=OLD), "c")
    done = actions(PLAN, opened(states, "d", only=False))
    assert done == {**NOTHING, "restart": ["chat.1"], "unjudged": ["chat.1"]}


def test_what_was_stopped_for_a_change_is_judged_too_and_needs_nobody_beside_it():
    """It would be started, and never compared."""
    off = {"active": "inactive", "reasons": [CUT_OFF], "settled": False}
    done = actions(PLAN, opened(results(a=OFF, b=OFF, c=off, d=off), "c", "d", only=False))
    assert done == {**NOTHING, "start": ["chat.0"], "restart": ["chat.1"], "unjudged": ["chat.1"]}


def test_what_was_stopped_for_a_change_comes_first_and_the_others_in_the_same_run():
    off = {"active": "inactive", "reasons": [CUT_OFF], "settled": False}
    states = opened(results(a=OLD, b=OLD, c=off, d=off), "c", "d", only=False)
    done = actions(PLAN, states)
    assert done == {**NOTHING, "restart": ["chat.1", "chat.0"], "unjudged": ["chat.1"]}
    # Where it cannot be started nobody stands in for the other one.
    states["c"][0]["strangers"] = ["old.0"]
    done = actions(PLAN, states)
    assert (done["restart"], [entry["instance"] for entry in done["refuse"]]) == ([], ["chat.0", "chat.1"])


def test_what_an_earlier_run_stopped_for_a_change_goes_back_too():
    ranks = {"a": [{**ran(0, active="inactive"), "unjudged": {"former": "old"}}], "b": [ran(1)]}
    assert returns(ranks, "chat.0", "a")[0]["generation"] == "old"
    ranks["b"] = [ran(1, active="inactive")]
    assert returns(ranks, "chat.0", "a") == []


# -- back to what served before a change ------------------------------------------------------------------------------------


def ran(rank_of, active="active", running="old", wanted="new"):
    item = {"instance": "chat.0", "rank": rank_of, "hosts": ["a", "b"], "ports": {"rank_store": 8001}}
    return {"item": item, "active": active, "running_generation": running, "id": wanted}


def test_every_rank_goes_back_to_its_own_former_generation():
    ranks = {"a": [ran(0, running="old-a")], "b": [ran(1, running="old-b")]}
    assert returns(ranks, "chat.0", "b") == [
        {"instance": "chat.0", "generation": "old-b", "rank": 1, "hosts": ["a", "b"], "store_port": 8001}
    ]
    assert returns(ranks, "chat.0", "a")[0]["generation"] == "old-a"


@pytest.mark.parametrize(
    "other",
    [ran(1, active="inactive"), ran(1, running=None), ran(1, running="new"), None],
    ids=["not active", "unknown", "the same", "its host is gone"],
)
def test_nothing_comes_back_unless_every_rank_can(other):
    ranks = {"a": [ran(0)], **({"b": [other]} if other else {})}
    assert returns(ranks, "chat.0", "a") == []
    assert returns(ranks, "chat.0", "c") == []


@pytest.mark.parametrize(
    ("before", "wanted", "refused", "speaks"),
    [
        (False, True, [], True),
        (True, False, [], False),
        (False, True, ["chat.0"], False),  # was to be restarted and may not be: it goes on as it was
        (True, False, ["chat.0"], True),
        (None, True, ["chat.0"], True),  # nothing ran before
        (False, True, ["chat.1"], True),
    ],
)
def test_a_head_speaks_as_is_wanted_unless_it_may_not_be_restarted(before, wanted, refused, speaks):
    told = [
        {**rank("chat.0"), "tls_before": before, "tls": wanted},
        {**rank("talk.0"), "tls_before": None, "tls": True},
    ]
    assert speaking(told, ["chat.0"], refused) == {"chat.0": speaks}
