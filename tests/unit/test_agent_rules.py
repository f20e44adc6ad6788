"""The agents' rules, played: whatever happens to ranks, hosts and network, the ranks meet again, and then it is quiet."""

from __future__ import annotations

import dataclasses
import itertools
import json

import agent_world
import pytest
from agent_world import START_TIMEOUT, Server, World
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import agent_rules as rules
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SOON = 150.0  # a start takes up to a minute here; two of them and what was lost by waiting


def serving(ranks=2, seed=0, spans=True):
    world = World(ranks, seed, spans)
    world.until_serves(SOON)
    world.run(10)
    return world


def starts(world):
    return sum(len(host.starts) for host in world.hosts)


def quiet(world, seconds=400):
    """From now on nothing is restarted any more, and runs belong together."""
    world.until_serves(SOON)
    world.run(15)
    before = starts(world)
    world.run(seconds)
    assert starts(world) == before, world.story()
    assert world.serves, world.story()
    head = world.hosts[0]
    for host in world.hosts[1:]:
        assert host.judge.m.mates == {"0": head.invocation}
        assert head.judge.m.mates[str(host.rank)] == host.invocation


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_a_start_of_all_is_left_alone(ranks, seed):
    world = serving(ranks, seed)
    assert starts(world) == ranks
    quiet(world, 1000)
    assert not [host.actions for host in world.hosts if host.actions]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_rank_that_ends_brings_all_to_restart_and_meet(victim, seed):
    world = serving(4, seed)
    world.hosts[victim].crash()
    world.run(3)
    assert not world.serves
    quiet(world)
    assert all(2 <= len(host.starts) <= 4 for host in world.hosts), world.story()


def test_a_single_rank_that_ends_starts_again():
    world = serving(1)
    world.hosts[0].crash()
    quiet(world)
    assert len(world.hosts[0].starts) == 2


def test_a_hung_engine_is_killed_within_half_a_minute():
    for ranks in (1, 2):
        world = serving(ranks)
        world.hosts[0].server.hung = True
        hung = world.now
        world.run(60)
        when, kind, reason = world.hosts[0].actions[0]
        assert kind == "kill"
        assert when - hung <= 27
        assert "no progress" in reason
        quiet(world)


def test_load_alone_restarts_nothing():
    world = serving(2)
    world.hosts[0].load = True
    before = starts(world)
    world.run(1800)
    assert starts(world) == before


@pytest.mark.parametrize("cut", [0, 1])
def test_a_cut_ends_requests_in_flight_and_heals_when_it_is_over(cut):
    world = serving(2)
    world.hosts[cut].cut = True
    began = world.now
    world.run(300)
    when, kind, _ = world.hosts[0].actions[0]
    assert kind == "kill"
    assert when - began <= 20
    assert [len(host.starts) for host in world.hosts] == [1, 1], "nothing starts that cannot meet"
    world.hosts[cut].cut = False
    assert world.until_serves(SOON) < 80
    quiet(world)


def test_a_short_cut_is_sat_out():
    world = serving(2)
    world.hosts[1].cut = True
    world.run(9)
    world.hosts[1].cut = False
    quiet(world)
    assert starts(world) == 2


def test_completions_that_a_short_cut_held_up_are_no_dead_engine(monkeypatch):
    monkeypatch.setattr(agent_world, "DEADLINE", 3)
    world = serving(2)
    for seconds in (9, 12):
        world.hosts[1].cut = True
        world.run(seconds)
        world.hosts[1].cut = False
        world.hosts[0].load = True  # TCP sends again only after a while
        world.run(2)
        world.hosts[0].load = False
        world.run(30)
    assert starts(world) == 2


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("seconds", [3, 40, 600])
def test_a_host_that_reboots(victim, seconds):
    world = serving(3)
    world.hosts[victim].reboot(seconds)
    world.run(seconds + 2)
    quiet(world)


def test_all_hosts_reboot_at_different_times():
    world = serving(3)
    for host, seconds in zip(world.hosts, (20, 90, 4), strict=True):
        host.reboot(seconds)
    world.run(95)
    quiet(world)


def test_what_an_operator_stopped_stays_stopped_and_its_peers_wait():
    world = serving(2)
    world.hosts[1].stop()
    world.run(600)
    assert [host.phase for host in world.hosts] == [rules.DOWN] * 2
    assert len(world.hosts[1].starts) == 1
    assert "stopped by an operator" in world.hosts[0].judge.waiting
    world.hosts[1].start(auto=False)
    quiet(world)


def test_both_stopped_stay_stopped_whoever_comes_first():
    for order in ((0, 1), (1, 0)):
        world = serving(2)
        for rank in order:
            world.hosts[rank].stop()
            world.run(6)
        world.run(600)
        assert starts(world) == 2
        for rank in order:
            world.hosts[rank].start(auto=False)
            world.run(6)
        quiet(world)


def test_an_operators_restart_of_one_rank_is_followed():
    for rank in (0, 1):
        world = serving(2)
        world.hosts[rank].stop()
        world.hosts[rank].start(auto=False)
        quiet(world)


@pytest.mark.parametrize("seed", range(6))
def test_a_run_that_ended_before_its_agent_saw_it_is_left_by_the_head(seed):
    """Measured: started by its agent, stopped and started by an operator a second later. The head had met the first run, hung
    while it started, and the second run was taken for the first."""
    world = serving(2, seed)
    head, worker = world.hosts
    worker.crash()
    while len(worker.starts) < 2:
        world.step()
    if head.server is None:
        head.phase, head.server = rules.UP, Server(world.now, 8)
    ended = Server(world.now, 8)
    ended.alive = False
    head.server.met[1], head.server.hung = ended, True
    worker.stop()
    world.step()
    assert worker.told["blocked"] == "stopped by an operator or a play"
    worker.start(auto=False)
    assert worker.judge.m.hold is None
    began = world.now
    world.until_serves(SOON)
    assert world.now - began < START_TIMEOUT, world.story()
    assert any("rank 1" in reason for when, kind, reason in head.actions if kind == "kill" and when >= began), (
        world.story()
    )
    assert worker.told["hand"] == 1
    quiet(world)


def test_a_disabled_unit_is_not_started():
    world = serving(2)
    world.hosts[0].enabled = False
    world.hosts[0].crash()
    world.run(300)
    assert world.hosts[0].phase == rules.DOWN
    assert world.hosts[0].judge.waiting == "it is disabled"


def test_hands_off_while_a_play_works():
    world = serving(2)
    for host in world.hosts:
        host.paused = True
    world.hosts[1].stop()
    world.run(60)
    world.hosts[0].stop()
    world.run(60)
    assert not [host.actions for host in world.hosts if host.actions]
    for host in reversed(world.hosts):
        host.start(auto=False)
        world.run(20)
    world.until_serves(SOON)
    for host in world.hosts:
        host.paused = False
    quiet(world)
    assert not [host.actions for host in world.hosts if host.actions]


def test_a_play_that_stops_what_the_agent_held_is_the_one_who_stopped_it():
    world = serving(2)
    world.hosts[1].stop()
    world.run(5)
    assert world.hosts[0].judge.m.hold
    world.hosts[0].paused = True
    world.run(2)
    world.hosts[0].paused = False
    world.hosts[1].start(auto=False)
    world.run(60)
    assert world.hosts[0].phase == rules.DOWN
    assert len(world.hosts[0].starts) == 1


def test_the_limit_is_reached_said_and_ended_by_hand():
    world = serving(2)
    world.hosts[1].fails = 100
    world.hosts[1].crash()
    world.run(2000)
    head = world.hosts[0]
    assert head.told["limit_reached"]
    assert any("LIMIT" in line for line in head.judge.lines)
    assert len(head.starts) == 1 + 5
    before = starts(world)
    world.run(4000)
    assert starts(world) == before
    world.hosts[1].fails = 0
    head.start(auto=False)
    quiet(world)
    assert not head.told["limit_reached"]


def test_the_wait_grows_with_each_start_in_vain():
    world = serving(1)
    world.hosts[0].fails = 100
    world.hosts[0].crash()
    world.run(600)
    times = [when for when, _ in world.hosts[0].starts][1:]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert len(times) == 5
    assert all(after > 1.5 * before for before, after in itertools.pairwise(gaps)), gaps


def test_the_limit_ends_when_a_lost_host_is_back():
    world = serving(2)
    world.hosts[1].fails = 100
    world.hosts[1].crash()
    world.run(2000)
    assert world.hosts[0].told["limit_reached"]
    world.hosts[1].fails = 0
    world.hosts[1].reboot(30)
    world.run(31)
    quiet(world)


@pytest.mark.parametrize("where", [0, 1])
def test_a_full_disk_waits_for_room_and_is_no_start_in_vain(where):
    world = serving(2)
    world.hosts[where].full = True
    world.hosts[where].crash()
    world.run(3000)
    assert not world.serves
    assert not world.hosts[0].told["limit_reached"]
    assert starts(world) <= 5
    world.hosts[where].full = False
    assert world.until_serves(SOON) < 90
    quiet(world)


@pytest.mark.parametrize("where", [[0], [1], [0, 1, 2]])
def test_what_the_firewalls_gate_refuses_is_a_wait_and_no_start_in_vain(where):
    for seed in range(4):
        world = serving(3, seed)
        for rank in where:
            world.hosts[rank].open = True
        world.hosts[where[-1]].crash()
        world.run(3000)
        assert not world.serves
        head = world.hosts[0]
        assert not head.told["limit_reached"], world.story()
        assert head.told["restarts_without_answer"] <= 1
        refused = [rank for rank in where if world.hosts[rank].judge.m.gated]
        assert refused, "nobody met the gate"
        for rank in refused:
            host = world.hosts[rank]
            assert host.told["blocked"] == rules.UNGUARDED, world.story()
            said = [line for line in host.judge.lines if rules.UNGUARDED in line]
            assert said[0] == "the firewall does not guard its ports: tried again every 15 s until it does"
            assert len(said) <= 2, "the same again and again"
        for rank in where:
            world.hosts[rank].open = False
        assert world.until_serves(SOON) < 110, world.story()
        quiet(world)
        for host in world.hosts:
            assert len([line for line in host.judge.lines if line.startswith("healed")]) == 1


def test_what_systemd_cannot_start_is_a_wait_and_no_start_in_vain(monkeypatch):
    """The unit's requirement fails, Ray's for one: the start ends without a run of the unit."""
    world = serving(1)
    host = world.hosts[0]
    able = host.start
    monkeypatch.setattr(host, "start", lambda auto: None)
    host.crash()
    world.run(1000)
    assert not host.told["limit_reached"]
    assert len([line for line in host.judge.lines if "systemd did not start it" in line]) == 1
    monkeypatch.setattr(host, "start", able)
    world.until_serves(SOON)
    quiet(world)


def test_a_gate_that_opens_does_not_forgive_starts_in_vain():
    world = serving(1)
    host = world.hosts[0]
    host.fails = 100
    host.crash()
    world.run(20)
    vain = host.told["restarts_without_answer"]
    assert vain >= 1
    host.open = True
    world.run(300)
    assert host.told["restarts_without_answer"] == vain
    host.open = False
    world.run(2000)
    assert host.told["limit_reached"]


def test_a_rank_that_comes_and_goes_does_not_keep_the_limit_away():
    """Each time it is back there is one start more, no five."""
    world = serving(2)
    world.hosts[1].fails = 1000
    world.hosts[1].crash()
    world.run(400)  # less than the window, which ends the count
    head = world.hosts[0]
    assert head.told["limit_reached"]
    for _ in range(5):
        before = len(head.starts)
        world.hosts[1].cut = True
        world.run(30)
        world.hosts[1].cut = False
        world.run(200)
        assert head.told["limit_reached"], world.story()
        assert len(head.starts) == before + 1
    world.hosts[1].fails = 0
    world.hosts[1].cut = True
    world.run(30)
    world.hosts[1].cut = False
    quiet(world)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("spans", [True, False])
def test_an_agent_that_is_away_disturbs_nothing(rank, spans):
    world = serving(2, spans=spans)
    for _ in range(5):
        world.hosts[rank].agent_back_at = world.now + 40
        world.run(50)
    assert starts(world) == 2
    assert world.serves


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("victim", [0, 1])
def test_what_happened_while_an_agent_was_away_is_healed_when_it_is_back(rank, victim):
    for seed in range(6):
        world = serving(2, seed)
        world.hosts[rank].agent_back_at = world.now + 60
        world.hosts[victim].crash()
        world.run(61)
        quiet(world)


def test_an_agent_that_nobody_lets_through_does_not_end_what_works():
    """Only the agent's port is shut: completions prove that all ranks are there."""
    world = serving(2)
    world.hosts[1].told = {}
    world.hosts[1].agent_step = lambda: None
    world.run(600)
    assert world.serves
    assert starts(world) == 2


def test_with_data_parallel_ranks_a_completion_proves_nothing():
    world = serving(2, spans=False)
    world.hosts[1].agent_step = lambda: None
    world.hosts[1].told = {}
    world.run(20)
    assert world.hosts[0].actions[0][1] == "kill"


def test_each_restart_is_one_line_with_its_time():
    world = serving(2)
    world.hosts[1].crash()
    quiet(world)
    (line,) = [line for line in world.hosts[0].judge.lines if line.startswith("healed")]
    assert line.startswith("healed: rank 1 is gone: its server ended")
    assert "1 start; right answer " in line
    assert any(line.startswith("healed") for line in world.hosts[1].judge.lines)


def test_a_memory_survives_as_json():
    world = serving(2)
    world.hosts[1].crash()
    world.run(4)
    for host in world.hosts:
        kept = json.loads(json.dumps(host.judge.m.dump()))
        assert rules.Memory.load(kept) == host.judge.m


# -- whatever comes --------------------------------------------------------------------------------------------------------

FAULTS = st.lists(
    st.tuples(
        st.sampled_from(["crash", "hang", "cut", "reboot", "agent", "stop", "restart", "full", "load", "fail", "open"]),
        st.integers(0, 3),  # whose
        st.integers(1, 70),  # seconds until the next one
        st.integers(1, 120),  # how long
    ),
    min_size=1,
    max_size=7,
)


def strike(world, kind, host, length):
    """One fault; what takes it back, or None."""
    if kind == "crash":
        host.crash()
    elif kind == "hang" and host.server:
        host.server.hung = True
    elif kind == "reboot":
        host.reboot(length)
    elif kind == "agent":
        host.agent_back_at = world.now + min(length, 60)
    elif kind == "restart" and host.up:
        host.stop()
        host.start(auto=False)
    elif kind == "fail":
        host.fails = length % 3
        host.crash()
    elif kind == "stop" and host.up:
        host.stop()
        return lambda: host.up and host.start(auto=False)
    elif kind in ("cut", "full", "load", "open"):
        setattr(host, kind, True)
        return lambda: setattr(host, kind, False)
    return None


@given(st.integers(1, 4), st.integers(0, 10**6), FAULTS)
@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_happens_the_ranks_meet_again(ranks, seed, faults):
    world = World(ranks, seed)
    over = []
    for kind, whose, pause, length in faults:
        host = world.hosts[whose % ranks]
        undo = strike(world, kind, host, length)
        if undo:
            over.append((world.now + length, undo))
        for _ in range(pause):
            world.step()
            for when, back in [item for item in over if item[0] <= world.now]:
                back()
                over.remove((when, back))
    while over:
        world.step()
        for when, back in [item for item in over if item[0] <= world.now]:
            back()
            over.remove((when, back))
    for host in world.hosts:  # somebody starts what somebody stopped, and ends a limit
        host.fails = 0
    world.run(130)
    for host in world.hosts:
        if host.up and host.phase == rules.DOWN and (host.judge.m.hold is None or host.judge.m.hold.kind == "limit"):
            host.start(auto=False)
    began = world.now
    while not world.serves:
        assert world.now - began < 900, world.story()
        world.step()
    world.run(20)
    before = starts(world)
    world.run(300)
    assert starts(world) == before, world.story()
    assert world.serves, world.story()


@pytest.mark.parametrize(("late", "killed"), [(0.0, True), (1.0, True), (5.0, False)])
def test_no_answer_proves_nothing_on_a_host_that_starves_its_processes(late, killed):
    """Seen at a load of 50 on two cores: an idle server gave no answer in time, and its counters could not move."""
    unit = rules.Unit(rules.UP, "a", ready=True)
    judge = rules.Judge(rules.Settings(rank=0, ranks=1))
    kinds = set()
    for now in range(100, 160):
        began = now - now % 10 - 10.0
        probe = rules.Probe("a", began, began + 10.0, right=False, answered=False, counters=7.0)
        kinds.add(judge.step(rules.World(float(now), unit, probe=probe, late=late if now % 5 == 0 else 0.0)).kind)
    assert ("kill" in kinds) == killed


@pytest.mark.parametrize(("waiting", "killed"), [(0.3, True), (0.8, False)])
def test_no_answer_proves_nothing_while_others_have_the_processors(waiting, killed):
    """Seen with a share of a tenth of two cores: no answer in time, though the agent itself was never late."""
    unit = rules.Unit(rules.UP, "a", ready=True)
    judge = rules.Judge(rules.Settings(rank=0, ranks=1))
    when = None
    for now in range(100, 1400):
        began = now - now % 10 - 10.0
        probe = rules.Probe("a", began, began + 10.0, right=False, answered=False, counters=7.0)
        if judge.step(rules.World(float(now), unit, probe=probe, waiting=waiting)).kind == "kill":
            when = now - 100
            break
    assert when is not None, "for ever"
    assert when < 30 if killed else rules.WAITING_MOST <= when < rules.WAITING_MOST + 40


def test_starving_excuses_a_dead_engine_for_a_while_only():
    unit = rules.Unit(rules.UP, "a", ready=True)
    judge = rules.Judge(rules.Settings(rank=0, ranks=1))
    for now in range(100, 400):
        began = now - now % 10 - 10.0
        probe = rules.Probe("a", began, began + 10.0, right=False, answered=False, counters=7.0)
        if judge.step(rules.World(float(now), unit, probe=probe, late=3.0)).kind == "kill":
            break
    assert rules.STARVED_MOST <= now - 100 <= rules.STARVED_MOST + 40


@pytest.mark.parametrize(("late", "killed"), [(0.0, True), (20.0, False)])
def test_an_agent_that_stood_still_itself_calls_nobody_lost_at_once(late, killed):
    said = {"invocation": "b", "phase": rules.UP, "mates": {"0": "a"}, "left": "", "blocked": "", "answered": ""}
    unit, judge = rules.Unit(rules.UP, "a", ready=True), rules.Judge(rules.Settings(rank=0, ranks=2))
    seen = rules.World(100.0, unit, {1: rules.Peer(100.0, said)})
    assert judge.step(seen).kind == "none"
    woken = [
        judge.step(dataclasses.replace(seen, now=121.0 + now, late=0.0 if now else late)).kind for now in range(15)
    ]
    assert ("kill" in woken, 1 in judge.m.lost) == (killed, killed)
    assert judge.step(dataclasses.replace(seen, now=137.0)).kind == ("none" if killed else "kill")


@pytest.mark.parametrize(("spans", "killed"), [(True, True), (False, False)])
def test_a_worker_that_is_told_to_stop_ends_the_head_at_once(spans, killed):
    """Data parallel ranks work for themselves, and finish what they have."""
    said = {"invocation": "b", "phase": rules.UP, "mates": {"0": "a"}, "left": "", "blocked": "", "answered": ""}
    unit, judge = rules.Unit(rules.UP, "a", ready=True), rules.Judge(rules.Settings(rank=0, ranks=2, spans=spans))
    assert judge.step(rules.World(100.0, unit, {1: rules.Peer(100.0, said)})).kind == "none"
    seen = judge.step(rules.World(101.0, unit, {1: rules.Peer(101.0, {**said, "phase": rules.ENDING})}))
    assert seen.kind == ("kill" if killed else "none")


def test_a_head_that_is_told_to_stop_finishes_its_requests_with_its_workers():
    said = {"invocation": "a", "phase": rules.UP, "mates": {"1": "b"}, "left": "", "blocked": "", "answered": ""}
    unit, judge = rules.Unit(rules.UP, "b", ready=True), rules.Judge(rules.Settings(rank=1, ranks=2))
    for now in range(100, 130):
        state = {**said, "phase": rules.ENDING} if now > 100 else said
        assert judge.step(rules.World(float(now), unit, {0: rules.Peer(float(now), state)})).kind == "none"


@pytest.mark.parametrize(("moves", "killed"), [(0.004, False), (-0.004, False), (0.0, True)])
def test_whatever_moves_in_the_metrics_is_progress(moves, killed):
    unit, judge = rules.Unit(rules.UP, "a", ready=True), rules.Judge(rules.Settings(rank=0, ranks=1))
    kinds = set()
    for now in range(100, 160):
        began = now - now % 10 - 10.0
        probe = rules.Probe("a", began, began + 10.0, right=False, answered=False, counters=7.5 + moves * (now // 10))
        kinds.add(judge.step(rules.World(float(now), unit, probe=probe)).kind)
    assert ("kill" in kinds) == killed


def test_starts_in_vain_count_however_long_each_took():
    """A model that takes seven minutes to fail: twelve starts, and the window of half an hour held four of them."""
    judge = rules.Judge(rules.Settings(rank=0, ranks=1, limit=5, window=1800.0))
    judge.m.restarts = [420.0 * number for number in range(12)]
    assert judge._recent(420.0 * 11 + 60) == 12
    assert judge._recent(420.0 * 11 + 1801) == 0
