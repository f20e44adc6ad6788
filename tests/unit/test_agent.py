"""The agent itself: what it reads of units, peers and counters, what it answers to whom, and what it does in which order."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import yaml
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import (
    agent,
    agent_config,
    firewall_gate,
    probe,
    start_time,
)
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import agent_rules as rules
from ansible_collections.gpu_fleet.vllm.plugins.modules import instance
from conftest import REPOSITORY

ROLE = REPOSITORY / "roles/vllm_service"


def shown(active="active", sub="running", pid=7, **more):
    said = {"ActiveState": active, "SubState": sub, "MainPID": pid, "InvocationID": "i", "UnitFileState": "enabled"}
    return agent.unit_of("\n".join(f"{name}={value}" for name, value in {**said, **more}.items()))


@pytest.mark.parametrize(
    ("unit", "phase", "ready"),
    [
        (shown(), rules.UP, True),
        (shown("activating", "start-post"), rules.UP, False),
        (shown("activating", "start-pre", 0), rules.COMING, False),
        (shown("activating", "auto-restart", 0), rules.BETWEEN, False),
        (shown("activating", "auto-restart-queued", 0), rules.BETWEEN, False),
        (shown("deactivating", "stop-sigterm"), rules.ENDING, False),
        (shown("inactive", "dead", 0), rules.DOWN, False),
        (shown("failed", "failed", 0), rules.DOWN, False),
    ],
)
def test_phases_of_a_unit(unit, phase, ready):
    assert (unit.phase, unit.ready) == (phase, ready)


# As systemctl shows a unit's commands (systemd 252).
PRE = "{ path=/bin/python ; argv[]=/bin/python -I -B /opt/vllm/firewall_gate.py 8001 ; ignore_errors=no ; start_time=[n/a] ; stop_time=[n/a] ; pid=69 ; %s }"
NEXT = "\nExecStartPre={ path=/bin/true ; argv[]=/bin/true ; ignore_errors=no ; start_time=[n/a] ; stop_time=[n/a] ; pid=0 ; code=(null) ; status=0/0 }"


@pytest.mark.parametrize(
    ("ended", "gated"),
    [
        ("code=exited ; status=75", True),
        ("code=exited ; status=1", False),
        ("code=exited ; status=0", False),
        ("code=killed ; status=15/TERM", False),
        ("code=(null) ; status=0/0", False),
    ],
)
def test_a_start_that_the_firewalls_gate_refused_is_told_from_others(ended, gated):
    assert firewall_gate.REFUSED == 75
    assert shown("activating", "auto-restart", 0, ExecStartPre=PRE % ended + NEXT).gated is gated


def test_who_started_a_unit_and_whether_it_may_be_started():
    assert shown(NRestarts="3").auto
    assert not shown(NRestarts="0").auto
    assert not shown(UnitFileState="disabled").enabled
    assert not shown(UnitFileState="masked").enabled
    assert shown(Result="exit-code").said == "exit-code"
    assert shown(Result="success").said == ""


def test_progress_is_the_sum_of_the_servers_counters():
    text = (
        "# HELP vllm:generation_tokens_total x\n"
        'vllm:generation_tokens_total{engine="0",model_name="a b"} 12.0\n'
        'vllm:generation_tokens_total{engine="1",model_name="a b"} 3.0\n'
        'vllm:request_success_total{finished_reason="stop"} 2.0\n'
        'vllm:generation_tokens_created{engine="0"} 1.7e9\n'
        'vllm:num_requests_running{engine="0"} 5.0\n'
    )
    assert agent.counters(text) == 17.0
    assert agent.counters("up 1\n") is None


def test_a_long_prompt_that_is_computed_piece_by_piece_is_progress():
    """No token comes out of it for as long as it takes; the use of the KV cache grows with each piece."""
    text = 'vllm:generation_tokens_total{{engine="0"}} 1e9\nvllm:kv_cache_usage_perc{{engine="0"}} {}\n'
    assert agent.counters(text.format(0.0712)) != agent.counters(text.format(0.0753))


STATE = {"instance": "chat.0", "rank": 1, "invocation": "i", "phase": "up", "mates": {}, "left": "", "blocked": ""}


def test_a_peer_is_who_it_should_be_and_well_formed():
    good = {**STATE, "answered": "", "hand": 0}
    assert agent.peer_state(json.dumps(good).encode(), "chat.0", 1) == good
    for bad in ({"rank": 0}, {"instance": "x.0"}, {"mates": []}, {"invocation": 5}, {"hand": None}):
        assert agent.peer_state(json.dumps({**good, **bad}).encode(), "chat.0", 1) is None
    assert agent.peer_state(b"[]", "chat.0", 1) is None
    with pytest.raises(ValueError):
        agent.peer_state(b"<html>", "chat.0", 1)


def test_a_play_keeps_it_off_for_a_while_and_no_longer(tmp_path):
    path = tmp_path / "paused"
    assert not agent.paused(str(path), 5.0)
    path.write_text('{"until": 10}')
    assert agent.paused(str(path), 5.0)
    assert not agent.paused(str(path), 11.0)
    for broken in ("", "[]", '{"until": "x"}'):
        path.write_text(broken)
        assert not agent.paused(str(path), 5.0)


def test_the_module_keeps_it_off_and_lets_it_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(instance, "AGENT", str(tmp_path))
    path = str(tmp_path / "chat.0" / "paused")
    instance.keep_agent_off("chat.0", 60)
    assert agent.paused(path, time.monotonic() + 50)
    assert not agent.paused(path, time.monotonic() + 70)
    instance.keep_agent_off("chat.0", 0)
    instance.keep_agent_off("chat.0", 0)
    assert not agent.paused(path, time.monotonic())


def test_a_host_that_refuses_is_told_from_one_that_is_lost():
    asker = agent.PeerAsker("chat.0", 1, ("127.0.0.1", 1))
    asker.turn()
    assert asker.peer.seen is None
    assert asker.peer.refused <= time.monotonic()


def test_the_key_is_read_and_room_is_measured(tmp_path):
    secrets = tmp_path / "secrets.env"
    assert agent.read_key(str(secrets)) is None
    secrets.write_text("VLLM_API_KEY=a=b\n")
    assert agent.read_key(str(secrets)) == "a=b"
    assert agent.room_at(str(tmp_path / "not" / "there")) > 0


# -- the server ------------------------------------------------------------------------------------------------------------


def state(**more):
    judge = rules.Judge(rules.Settings(0, 2))
    world = rules.World(1.0, rules.Unit(rules.UP, "i", True))
    probe = {"right": True, "seconds": 0.1, "ago": 1, "problem": ""}
    made = {
        **judge.told(world),
        "instance": "chat.0",
        "service": "chat",
        "active": True,
        "answers": True,
        "held": None,
        "probe": probe,
        "peers": {"1": 0.5},
    }
    return {**made, **more}


def serve(address):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    made = agent.Server((address, port), [])
    made.start()
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            socket.create_connection((address, port), 1).close()
            break
        except OSError:
            time.sleep(0.02)
    return made


@pytest.fixture
def server():
    return serve("127.0.0.1")


def ask(server, request=b"GET / HTTP/1.1\r\n\r\n"):
    with socket.create_connection(server.listen, 5) as connection:
        connection.settimeout(8)
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


def test_it_answers_its_state_its_numbers_and_whether_it_is_ready(server):
    assert b" 503 " in ask(server), "nothing is known yet"
    server.publish(state())
    assert json.loads(ask(server).split(b"\r\n\r\n")[1])["instance"] == "chat.0"
    assert b" 200 " in ask(server, b"GET /ready HTTP/1.0\r\n\r\n")
    assert b"gpu_fleet_probe_right" in ask(server, b"GET /metrics?x=y HTTP/1.1\r\n\r\n")
    for more in ({"probe": None}, {"active": False}, {"probe": {**state()["probe"], "right": False}}):
        server.publish(state(**more))
        assert b" 503 " in ask(server, b"GET /ready HTTP/1.1\r\n\r\n")


def test_what_is_stale_is_not_said(server, monkeypatch):
    server.publish(state())
    monkeypatch.setattr(agent, "STALE", -1.0)
    assert b" 503 " in ask(server)


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"POST / HTTP/1.1", b"405"),
        (b"DELETE / HTTP/1.1", b"405"),
        (b"GET /restart HTTP/1.1", b"404"),
        (b"GET /../etc/passwd HTTP/1.1", b"404"),
        (b"GET /\xff HTTP/1.1", b"404"),
        (b"hello", b"400"),
        (b"\x16\x03\x01\x02\x00\x01", b"400"),
    ],
)
def test_everything_else_is_refused(server, request_line, status):
    server.publish(state())
    assert ask(server, request_line + b"\r\n\r\n").split(b" ")[1] == status


def test_slow_and_many_and_endless_clients_hurt_nobody(server, monkeypatch):
    monkeypatch.setattr(agent, "CLIENT_SECONDS", 1.0)
    server.publish(state())
    with socket.create_connection(server.listen, 5) as endless:
        endless.settimeout(5)
        try:
            endless.sendall(b"x" * 100_000)
            assert endless.recv(10) == b""
        except OSError:
            pass  # it was reset, which is as good
    held = [socket.create_connection(server.listen, 5) for _ in range(60)]
    time.sleep(0.3)
    assert server.refused >= 60 - agent.CLIENTS
    time.sleep(1.2)
    assert b" 200 " in ask(server), "a place has become free"
    for connection in held:
        connection.close()


def test_a_stranger_is_not_listened_to(server):
    server.publish(state())
    server.allow = {"192.0.2.1"}
    with socket.create_connection(server.listen, 5) as connection:
        connection.settimeout(3)
        assert connection.recv(10) == b""
    assert server.refused


def test_over_ipv6_alone_it_answers_those_who_may_ask():
    server = serve("::1")
    server.publish(state())
    status, body = agent.get(server.listen, "/", 5.0, 1 << 20)
    assert (status, json.loads(body)["instance"]) == (200, "chat.0")
    server.allow = {"fd00::1"}
    with pytest.raises((OSError, http.client.HTTPException)):
        agent.get(server.listen, "/", 5.0, 1 << 20)


def test_every_number_is_documented_in_the_text(server):
    text = agent.metrics(state(), 0)
    names = set(re.findall(r"^(gpu_fleet_\w+)\{", text, re.MULTILINE))
    assert names == set(agent.METRICS)
    documented = (REPOSITORY / "docs/healing.md").read_text()
    assert all(f"`{name}`" in documented for name in agent.METRICS)


# -- what it does ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path):
    return {
        "instance": "chat.0",
        "service": "chat",
        "listen": ["127.0.0.1", 1],
        "allow": [],
        "peers": {},
        "answers": True,
        "url": "http://127.0.0.1:1",
        "head_url": "http://127.0.0.1:1",
        "api": ["127.0.0.1", 1],
        "model": "chat",
        "secrets": str(tmp_path / "secrets.env"),
        "current": str(tmp_path / "current"),
        "cache": str(tmp_path),
        "runtime": str(tmp_path),
        "probe_every": 1.0,
        "probe_deadline": 1.0,
        "settings": {"rank": 0, "ranks": 1, "room": 0},
    }


def test_it_kills_without_a_drain_and_starts_again(config, monkeypatch, capsys):
    """systemctl is played: a unit that ended, which systemd is about to start, and is taken over."""
    calls, unit = [], {"ActiveState": "active", "SubState": "running", "MainPID": "7", "InvocationID": "a"}

    def systemctl(*arguments):
        if arguments[0] == "show":
            return SimpleNamespace(stdout="\n".join(f"{name}={value}" for name, value in unit.items()), returncode=0)
        calls.append(arguments)
        if arguments[0] in ("stop", "kill"):
            unit.update(ActiveState="inactive", SubState="dead", MainPID="0")
        return SimpleNamespace(stdout="", stderr="", returncode=0)

    clock = [1000.0]
    monkeypatch.setattr(agent, "systemctl", systemctl)
    monkeypatch.setattr(agent.time, "monotonic", lambda: clock[0])
    made = agent.Agent(config)
    made.turn()
    assert not calls
    for began in (1001.0, 1012.0):
        clock[0] = began + 10
        made.prober.last = rules.Probe("a", began, began + 10, False, False, 5.0)
        made.began = clock[0] - agent.TICK  # in time, as the turns in between were
        made.turn()
    unit_name = "vllm@chat.0.service"
    assert calls == [
        ("stop", "--no-block", unit_name),
        ("kill", "--signal=SIGKILL", unit_name),
        ("stop", unit_name),
    ]
    # The agent itself is restarted meanwhile: it knows that it was the one who stopped it.
    made = agent.Agent(config)
    clock[0] += 2
    made.turn()
    assert len(calls) == 3
    clock[0] += 5
    made.turn()
    assert calls[3:] == [("start", "--no-block", unit_name)]
    unit.update(ActiveState="active", SubState="running", MainPID="8", InvocationID="b")
    clock[0] += 30
    made.prober.last = rules.Probe("b", clock[0] - 1, clock[0], True, True, 6.0)
    made.turn()
    said = capsys.readouterr().out
    assert "<5>chat.0 rank 0: no answer twice and no progress in between: killed" in said
    assert "healed: no answer twice and no progress in between; 1 start; right answer 37 s later" in said
    assert made.state(made.world())["probe"]["right"]


def test_what_a_units_processes_wait_is_read_and_counted_over_the_last_seconds(tmp_path, monkeypatch):
    folder = tmp_path / "system.slice"
    folder.mkdir()

    def says(total):
        (folder / "cpu.pressure").write_text(
            f"some avg10=11.98 avg60=11.55 avg300=7.13 total=99358718\nfull avg10=7.96 avg60=6.46 avg300=4.27 total={total}\n"
        )

    reads = agent.waited
    says(20371079)
    assert reads("/system.slice", str(tmp_path)) == 20.371079
    assert reads("/none", str(tmp_path)) is None
    monkeypatch.setattr(agent, "waited", lambda group: reads(group, str(tmp_path)))
    waiting = agent.Waiting()
    shares = []
    for second in range(40):  # nothing, then three quarters of each second
        says(max(0, second - 20) * 750_000)
        shares.append(waiting.share(1000.0 + second, "/system.slice"))
    assert shares[20] == 0
    assert shares[25] == pytest.approx(0.75 * 5 / 10)
    assert shares[30:] == pytest.approx([0.75] * 10)
    says(0)  # another run of the unit has counters of its own
    assert waiting.share(1040.0, "/system.slice") == 0
    (folder / "cpu.pressure").write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=5\n")  # Linux before 5.13
    assert waiting.share(1050.0, "/system.slice") == 0
    assert waiting.share(1060.0, "") == 0


@pytest.mark.parametrize(
    ("answer", "pause", "looks"),
    [
        ((0.1, ""), 4.9, False),
        ((2.0, ""), 3.0, False),
        ((8.0, ""), 1.0, False),
        ((10.0, "late"), 0.0, True),
        ((0.1, "refused"), 4.9, True),
    ],
)
def test_a_hung_server_is_known_within_an_interval_and_two_deadlines(config, monkeypatch, answer, pause, looks):
    took, problem = answer
    clock = [1000.0]

    def completion(*_arguments):
        clock[0] += took
        return probe.Answer(0 if problem else 200, took, problem)

    monkeypatch.setattr(agent.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(agent.probe, "completion", completion)
    prober = agent.Prober({**config, "probe_every": 5.0, "probe_deadline": 10.0})
    monkeypatch.setattr(prober, "progress", lambda: None)
    prober.unit = rules.Unit(rules.UP, "a", ready=True)
    assert prober.turn() == pytest.approx(pause)
    assert prober.failed.is_set() == looks


def test_what_somebody_else_stopped_stays_stopped(config, monkeypatch):
    calls = []

    def systemctl(*arguments):
        if arguments[0] != "show":
            calls.append(arguments)
        return SimpleNamespace(stdout="ActiveState=inactive\nSubState=dead\nInvocationID=a\n", stderr="", returncode=0)

    monkeypatch.setattr(agent, "systemctl", systemctl)
    made = agent.Agent(config)
    for _ in range(5):
        made.turn()
    assert not calls
    assert made.state(made.world())["blocked"] == "stopped by an operator or a play"


def test_a_memory_that_cannot_be_read_is_begun_anew(config, tmp_path, capsys):
    (tmp_path / "state.json").write_text('{"no": "memory"}')
    assert agent.Agent(config).judge.m.boot
    assert "begun anew" in capsys.readouterr().out


def test_it_runs_as_it_is_installed(tmp_path):
    """The folder that the role makes, run isolated, as the unit does."""
    package = tmp_path / "gpu_fleet_agent"
    package.mkdir()
    variables = yaml.safe_load((ROLE / "vars/main.yml").read_text())
    for name, content in variables["__vllm_service_agent_starter"].items():
        (tmp_path / name).write_text(content)
    for name in variables["__vllm_service_agent_modules"]:
        (package / name).write_text((REPOSITORY / "plugins/module_utils" / name).read_text())
    done = subprocess.run(
        [sys.executable, "-I", "-B", str(tmp_path), str(tmp_path / "none.json")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "FileNotFoundError" in done.stderr, done.stderr
    assert "ImportError" not in done.stderr


# -- what it is told -----------------------------------------------------------------------------------------------------------

SETTINGS = {
    "probe_interval": "5",
    "probe_deadline": "10",
    "lost_after": 15,
    "backoff": 5,
    "backoff_max": 300,
    "restart_limit": "5",
    "restart_window": 1800,
    "cache_room": "64",
}


def told(rank, data=1, clients=("192.0.2.9",)):
    instance = {
        "instance": "chat.0",
        "service": "chat",
        "rank": rank,
        "hosts": ["a", "b", "c"],
        "ports": {"api": 8000, "agent": 8003},
        "agent_clients": list(clients),
        "config": {"served-model-name": ["m"]},
    }
    plan = {
        "addresses": {"a": "192.0.2.1", "b": "192.0.2.2", "c": "192.0.2.3"},
        "replicas": {"chat.0": {"url": "http://192.0.2.1:8000", "urls": {"a": "http://192.0.2.1:8000"}, "data": data}},
    }
    return agent_config.agent_config(instance, plan, "abc"[rank], SETTINGS)


def test_the_head_watches_all_and_a_worker_its_head():
    assert told(0)["peers"] == {"1": ["192.0.2.2", 8003], "2": ["192.0.2.3", 8003]}
    assert told(2)["peers"] == {"0": ["192.0.2.1", 8003]}
    assert (told(0)["answers"], told(2)["answers"]) == (True, False)
    assert told(1)["listen"] == ["192.0.2.2", 8003]
    assert told(0, clients=())["listen"] == ["127.0.0.1", 8003]


def test_settings_are_numbers_that_the_rules_take():
    settings = rules.Settings(**told(1)["settings"])
    assert (settings.rank, settings.ranks, settings.limit, settings.room) == (1, 3, 5, 64 << 20)
    assert settings.spans
    assert not told(0, data=3)["settings"]["spans"]


# -- how long a start may take ---------------------------------------------------------------------------------------------------


def test_a_start_may_take_as_long_as_its_weights_need(tmp_path):
    assert start_time.seconds(0) == 600
    assert start_time.seconds(15 << 30) == 900  # 8B in 16 bit
    assert start_time.seconds(131 << 30) == 3240  # 70B in 16 bit
    (tmp_path / "model").mkdir()
    blob = tmp_path / "blob"
    blob.write_bytes(b"x" * 100)
    (tmp_path / "model" / "a.safetensors").symlink_to(blob)  # as a hub's cache has it
    (tmp_path / "model" / "b.gguf").write_bytes(b"x" * 10)
    (tmp_path / "model" / "tokenizer.json").write_bytes(b"x" * 1000)
    assert start_time.weights(str(tmp_path / "model")) == 110
    assert start_time.weights(str(blob)) == 100
    assert start_time.weights(str(tmp_path / "none")) == 0
