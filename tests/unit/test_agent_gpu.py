"""GPUs that failed for good: what is read of them, and that the agent takes their rank out once and starts it no more.

The kernel's log is a stand-in's: a journalctl on the PATH that prints lines as the driver writes them.
"""

from __future__ import annotations

import json
import re
import time

import pytest
from agent_world import World
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import (
    agent,
    agent_config,
    agent_gpu,
    gpu_facts,
    host_metrics,
)
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import agent_rules as rules
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data
from conftest import REPOSITORY

XID = "NVRM: Xid (PCI:0000:{bus}:00): {code}, pid='<unknown>', name=<unknown>"
OUT = {"79": "the GPU has fallen off the bus", "48": "uncorrectable (double bit) ECC error"}
KNOWN = agent_gpu.places(["0000:1b:00.0", "0000:43:00.0", "0000:9a:00.0"])


def judged(*lines, counts=None, gpus=(1,), known=KNOWN):
    return agent_gpu.judge(agent_gpu.events("\n".join(lines)), counts or {}, gpus, known, OUT)


# -- what is read ----------------------------------------------------------------------------------------------------------


def test_an_xid_is_read_as_elsewhere():
    assert agent_gpu.XID.pattern == gpu_facts.XID.pattern


@pytest.mark.parametrize("address", ["0000:43:00", "0000:43:00.0", "00000000:43:00.0", "0000:43:00.1"])
def test_one_place_in_every_spelling(address):
    assert agent_gpu.place(address) == (0, 0x43, 0)
    assert agent_gpu.place(address.replace("43", "9A")) == (0, 0x9A, 0)


def test_no_address_is_no_place():
    assert agent_gpu.place("43:00.0") is agent_gpu.place("") is agent_gpu.place("nvidia0") is None


def test_the_codes_are_those_that_no_restart_mends():
    """Of the codes that mean `do not serve on it`, those of a lost GPU and of uncorrected, uncontained memory errors."""
    xid = data.load("hardware")["xid"]
    assert {code for code, entry in xid.items() if entry.get("out")} == {48, 79, 95, 140}
    assert {entry["severity"] for entry in xid.values() if entry.get("out")} == {"error"}


def test_a_gpu_of_the_rank_and_a_code_for_good():
    fault = judged(XID.format(bus="43", code=79))
    assert fault is not None
    assert fault.reason == "GPU 1 (0000:43:00) had Xid 79 since boot: the GPU has fallen off the bus"


@pytest.mark.parametrize("code", [13, 31, 43, 45, 63, 94, 119, 999])
def test_other_codes_are_none(code):
    assert judged(XID.format(bus="43", code=code)) is None


def test_another_ranks_gpu_is_none_and_one_that_nobody_knows_may_be_ours():
    assert judged(XID.format(bus="1b", code=79)) is None
    fault = judged(XID.format(bus="c1", code=79))
    assert fault is not None and fault.reason.startswith("a GPU (0000:c1:00) had Xid 79")


def test_a_new_event_is_another_mark_and_the_same_reason():
    once, twice = judged(XID.format(bus="43", code=79)), judged(*[XID.format(bus="43", code=79)] * 2)
    assert once.reason == twice.reason and once.mark != twice.mark


NUMBERS = """# HELP gpu_fleet_gpu_ecc_uncorrected Memory errors
gpu_fleet_host_metrics_time_seconds{{}} {time}
gpu_fleet_gpu_ecc_uncorrected{{gpu="0"}} 0
gpu_fleet_gpu_ecc_uncorrected{{gpu="1"}} 2
gpu_fleet_gpu_ecc_uncorrected{{gpu="2"}} 7
"""


def test_uncorrected_errors_are_those_of_the_hosts_numbers_of_this_boot():
    assert agent_gpu.uncorrected(NUMBERS.format(time=1000), 900.0) == {1: 2, 2: 7}
    assert agent_gpu.uncorrected(NUMBERS.format(time=800), 900.0) == {}
    assert agent_gpu.uncorrected("", 900.0) == {}
    fault = judged(counts={1: 2, 2: 7})
    assert fault is not None
    assert fault.reason == "GPU 1 has uncorrected memory errors since its driver was loaded"
    assert judged(counts={0: 1, 2: 7}) is None


def test_the_hosts_numbers_are_where_role_monitoring_writes_them():
    variables = (REPOSITORY / "roles/monitoring/vars/main.yml").read_text()
    folder = re.search(r"^__monitoring_textfiles: (\S+)$", variables, re.MULTILINE)
    assert folder and f"{folder[1]}/gpu_fleet.prom" == agent_gpu.NUMBERS
    text = host_metrics.page(
        [("gpu_fleet_gpu_ecc_uncorrected", {"gpu": "3"}, 5), ("gpu_fleet_host_metrics_time_seconds", {}, 1e9)]
    )
    assert agent_gpu.uncorrected(text, 0.0) == {3: 5}


@pytest.fixture(name="look")
def looked(tmp_path, monkeypatch):
    """A host with three GPUs and a journalctl of its own; `log` is what it prints."""
    programs, gpus = tmp_path / "bin", tmp_path / "gpus"
    programs.mkdir()
    for name in ("0000:9a:00.0", "0000:1b:00.0", "0000:43:00.0"):
        (gpus / name).mkdir(parents=True)
    (programs / "journalctl").write_text(
        f'#!/bin/sh\n# Stand-in, made for a test.\necho "$@" > {tmp_path}/asked\ncat {tmp_path}/log 2>/dev/null || exit 1\n'
    )
    (programs / "journalctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")

    def make():
        return agent_gpu.Look([1], OUT, str(tmp_path / "kept"), str(gpus), str(tmp_path / "numbers"))

    return tmp_path, make


def test_a_look_asks_the_kernels_log_of_this_boot(look):
    folder, make = look
    assert make().fault() is None
    assert (folder / "asked").read_text() == "-k -b -q -o cat --no-pager -g NVRM: Xid\n"
    (folder / "log").write_text(XID.format(bus="43", code=79) + "\n")
    assert "GPU 1 (0000:43:00) had Xid 79" in make().fault().reason
    (folder / "log").write_text("")
    (folder / "numbers").write_text(NUMBERS.format(time=time.time()))
    assert "GPU 1 has uncorrected memory errors" in make().fault().reason


def test_a_gpu_that_is_missing_after_it_fell_off_is_still_known_by_its_number(look):
    """By an agent that was started since, too."""
    folder, make = look
    assert make().fault() is None
    (folder / "gpus" / "0000:43:00.0").rmdir()
    (folder / "log").write_text(XID.format(bus="9a", code=79) + "\n")
    assert make().fault() is None, "the third GPU is another rank's, also with two left"
    (folder / "log").write_text(XID.format(bus="43", code=79) + "\n")
    assert "GPU 1 (0000:43:00)" in make().fault().reason


def test_a_log_that_cannot_be_read_is_said_and_takes_nothing_out(look):
    folder, make = look
    (folder / "bin" / "journalctl").write_text("#!/bin/sh\n# Stand-in, made for a test.\necho no journal >&2; exit 1\n")
    one = make()
    assert (one.fault(), one.failed) == (None, "no journal")


# -- what is done ----------------------------------------------------------------------------------------------------------


def worlds(ranks=1, seed=0):
    world = World(ranks, seed)
    world.until_serves(150.0)
    world.run(10)
    return world


def lines(world, rank=0):
    return [line for line in world.hosts[rank].judge.lines if line.startswith("OUT")]


def starts(world):
    return sum(len(host.starts) for host in world.hosts)


def test_it_is_taken_out_and_not_restarted_for_ever():
    world = worlds()
    head = world.hosts[0]
    head.gpu, head.mark = "GPU 1 had Xid 79", "1"
    before = starts(world)
    world.run(3600)
    assert starts(world) == before and head.phase == rules.DOWN
    assert lines(world) == [f"OUT: GPU 1 had Xid 79. {rules.OUT}"], "one line"
    told = head.judge.told(rules.World(world.now, head.unit(), gpu=head.gpu, gpu_mark=head.mark))
    assert (told["gpu_out"], told["blocked"], told["limit_reached"]) == (True, "GPU 1 had Xid 79", False)


def test_a_server_that_ended_by_it_is_not_started_before_anybody_looked():
    world = worlds()
    head = world.hosts[0]
    head.crash()
    world.run(2)
    head.gpu, head.mark = "GPU 1 had Xid 79", "1"
    before = starts(world)
    world.run(3600)
    assert starts(world) == before and len(lines(world)) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_wait_for_the_one_and_count_no_start(rank):
    world = worlds(2)
    world.hosts[rank].gpu, world.hosts[rank].mark = "GPU 1 had Xid 79", "1"
    world.run(60)
    before = starts(world)
    world.run(3600)
    assert starts(world) == before
    assert all(host.phase == rules.DOWN for host in world.hosts)
    assert "GPU 1 had Xid 79" in world.hosts[1 - rank].judge.waiting
    assert not any(line.startswith("LIMIT") for host in world.hosts for line in host.judge.lines)


def test_it_ends_when_the_host_rebooted():
    world = worlds(2)
    world.hosts[1].gpu, world.hosts[1].mark = "GPU 1 had Xid 79", "1"
    world.run(300)
    assert not world.serves
    world.hosts[1].gpu, world.hosts[1].mark = "", ""
    world.hosts[1].reboot(60)
    world.run(61)
    world.until_serves(200.0)


def test_it_ends_when_somebody_starts_it_until_it_happens_again():
    world = worlds()
    head = world.hosts[0]
    head.gpu, head.mark = "GPU 1 had Xid 79", "1"
    world.run(300)
    head.start(auto=False)
    world.until_serves(150.0)
    world.run(600)
    assert world.serves, "it is the operator's word"
    head.crash()
    world.run(20)
    world.until_serves(150.0)
    head.mark = "2"
    world.run(600)
    assert not world.serves and len(lines(world)) == 2


def test_an_agent_that_is_restarted_itself_starts_nothing_before_it_looked():
    world = worlds()
    head = world.hosts[0]
    head.gpu, head.mark = "GPU 1 had Xid 79", "1"
    world.run(300)
    before = starts(world)
    head.gpu = None
    head.agent_starts()
    world.run(300)
    assert starts(world) == before
    head.gpu, head.mark = "", ""  # the driver was loaded anew, and the log with it
    world.run(5)
    world.until_serves(150.0)


def test_what_it_remembers_is_kept_and_read_by_the_next_agent():
    world = worlds()
    head = world.hosts[0]
    head.gpu, head.mark = "GPU 1 had Xid 79", "1"
    world.run(30)
    memory = rules.Memory.load(json.loads(json.dumps(head.judge.m.dump())))
    assert (memory.hold.kind, memory.hold.reason) == ("gpu", "GPU 1 had Xid 79")
    # Of an agent before this one, which knew nothing of it.
    kept = head.judge.m.dump()
    del kept["excused"]
    assert rules.Memory.load(kept).excused == ""


# -- the agent -------------------------------------------------------------------------------------------------------------


def test_the_agent_looks_at_once_then_seldom_and_often_while_the_rank_is_away(monkeypatch):
    now, asked = [1000.0], []

    class Look:
        failed = ""

        def fault(self):
            asked.append(now[0])

    monkeypatch.setattr(agent.time, "monotonic", lambda: now[0])
    asker = agent.GpuAsker(Look())
    assert not asker.known
    for _ in range(240):
        asker.turn()
        now[0] += 0.5
    assert asker.known and asked == [1000.0, 1060.0]
    asker.hurry = True
    del asked[:]
    for _ in range(40):
        asker.turn()
        now[0] += 0.5
    assert len(asked) == 4


def test_only_a_rank_with_gpus_is_told_of_them():
    instance = {
        "instance": "chat.0",
        "service": "chat",
        "rank": 0,
        "hosts": ["a"],
        "ports": {"api": 8000, "agent": 8003},
        "agent_clients": [],
        "config": {"served-model-name": ["m"]},
    }
    replica = {"url": "http://192.0.2.1:8000", "urls": {"a": "http://192.0.2.1:8000"}}
    settings = {
        **dict.fromkeys(["probe_interval", "probe_deadline", "lost_after", "backoff", "backoff_max"], 5),
        **{"restart_limit": 5, "restart_window": 5, "cache_room": 5, "xid": data.load("hardware")["xid"]},
    }

    def told(gpus):
        plan = {"addresses": {"a": "192.0.2.1"}, "replicas": {"chat.0": {**replica, "gpus": gpus}}}
        return agent_config.agent_config(instance, plan, "a", settings)

    assert not {"gpus", "xid_out"} & set(told(None))
    assert told([2, 3])["gpus"] == [2, 3]
    assert set(told([2, 3])["xid_out"]) == {"48", "79", "95", "140"}
