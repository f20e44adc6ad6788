"""A whole fleet's case: journals of several hosts and the state of each, judged together."""

import json
import re
import socket
import time
from pathlib import Path

import conftest  # noqa: F401  makes scripts/gpu_fleet importable
import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import evidence, gpu_facts, model_presence, tree
from gpu_fleet import collect, runs
from gpu_fleet.cli import app
from typer.testing import CliRunner

LOGS = Path(__file__).parent / "fixtures" / "logs"
NOW = 1_800_000_000.0
PLAN = {
    "replicas": {"chat.0": {"hosts": ["gpu-01", "gpu-02"], "version": "0.32.0"}},
    "addresses": {"gpu-01": "10.0.0.1", "gpu-02": "10.0.0.2"},
}


def told(host, **changes):
    return {
        "time": NOW,
        "hostname": host,
        "journal": evidence.packed(""),
        "kernel": evidence.packed(""),
        "units": [],
        "plans": {},
        "agents": {},
        "disks": [{"path": "/", "size": 1 << 40, "free": 1 << 39, "inodes": 100, "inodes_free": 50}],
        "certificates": {},
        "models": {},
        "interfaces": {},
        "metrics": {},
        "drops": [],
        "addresses": "",
        **changes,
    }


def case(**hosts):
    made = collect.Case(runs.FleetResult(plan=PLAN))
    for name, changes in hosts.items():
        host = name.replace("_", "-")
        made.evidence[host], made.asked[host] = told(host, **changes), (NOW - 1, NOW + 1)
    return made


def causes(made):
    return [(finding["cause_id"], finding["host"]) for finding in collect.examine(made)["findings"]]


def line(host, at, message, **fields):
    stamp = str(int((NOW + at) * 1e6))
    return json.dumps(
        {
            "__REALTIME_TIMESTAMP": stamp,
            "_HOSTNAME": host,
            "_SYSTEMD_UNIT": "vllm@chat.0.service",
            "SYSLOG_IDENTIFIER": "python",
            "PRIORITY": "6",
            "_PID": "7",
            "MESSAGE": message,
            **fields,
        }
    )


def test_a_healthy_fleet_has_nothing():
    assert causes(case(gpu_01={}, gpu_02={})) == []


def test_the_first_cause_is_that_of_the_other_host():
    head = [line("gpu-01", 30, "RuntimeError: Engine core initialization failed. See root cause above.")]
    worker = [
        line(
            "gpu-02", 10, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB free"
        )
    ]
    made = case(
        gpu_01={"journal": evidence.packed("\n".join(head))}, gpu_02={"journal": evidence.packed("\n".join(worker))}
    )
    (first, *_rest) = collect.examine(made)["findings"]
    assert first["host"] == "gpu-02" and "out of memory" in first["evidence"]


@pytest.mark.parametrize(("off", "says"), [(-300.0, "299 s behind"), (90.0, "89 s ahead of")])
def test_a_wrong_clock(off, says):
    made = case(gpu_01={"time": NOW + off}, gpu_02={})
    (found,) = collect.examine(made)["findings"]
    assert (found["cause_id"], found["host"]) == ("clock_wrong", "gpu-01") and says in found["evidence"]


def test_a_full_disk_and_one_without_inodes():
    full = {"path": "/var/cache/vllm", "size": 1 << 40, "free": 4096, "inodes": 100, "inodes_free": 50}
    none = {"path": "/tmp", "size": 1 << 30, "free": 1 << 29, "inodes": 100, "inodes_free": 0}
    made = case(gpu_01={"disks": [full]}, gpu_02={"disks": [none]})
    assert causes(made) == [("disk_full", "gpu-01"), ("disk_full", "gpu-02")]


def test_a_certificate_that_ended():
    made = case(gpu_01={"certificates": {"/a.pem": NOW - 60, "/b.pem": NOW + 60, "/c.pem": None}})
    (found,) = collect.examine(made)["findings"]
    assert found["cause_id"] == "tls_certificate_invalid" and found["evidence"].startswith("/a.pem ended 2027-01-15")


def state(rank, peers):
    return {"agents": {"chat.0": {"rank": rank, "peers": peers}}}


def test_a_rank_that_is_firewalled_off():
    made = case(gpu_01=state(0, {"1": 40.0}), gpu_02=state(1, {"0": 1.0}))
    (found,) = collect.examine(made)["findings"]
    assert (found["cause_id"], found["host"]) == ("firewall_blocks_port", "gpu-02")
    assert "not for 40 s" in found["evidence"]


def test_ranks_that_are_cut_off_from_each_other_are_one_finding_of_whoever_drops():
    one, other = state(0, {"1": 40.0}), state(1, {"0": None})
    (found,) = collect.examine(case(gpu_02=other, gpu_01=one))["findings"]
    assert found["host"] == "gpu-02" and "not for 40 s" in found["evidence"] and "reached it never" in found["evidence"]
    made = case(gpu_02=other, gpu_01={**one, "drops": ["inet other in: ip saddr 10.0.0.2 drop"]})
    (found,) = collect.examine(made)["findings"]
    assert found["host"] == "gpu-01" and "gpu-01 has inet other in: ip saddr 10.0.0.2 drop" in found["evidence"]


def test_rules_of_others_that_drop():
    ruleset = """
table inet gpu_fleet {
	chain input {
		type filter hook input priority filter; policy accept;
		tcp dport 8003 drop
	}
}
table ip filter {
	set drop {
		type ipv4_addr
	}
	chain INPUT {
		type filter hook input priority filter; policy drop;
		iifname "lo" accept comment "never drop"
		ip saddr 10.0.0.2 reject with icmp port-unreachable
	}
}
"""
    assert evidence.drops(ruleset) == [
        "ip filter INPUT: type filter hook input priority filter; policy drop;",
        "ip filter INPUT: ip saddr 10.0.0.2 reject with icmp port-unreachable",
    ]


def test_a_rank_whose_agent_does_not_run_is_not_firewalled_off():
    made = case(gpu_01=state(0, {"1": None}), gpu_02={"agents": {"chat.0": None}})
    assert causes(made) == []


ADDRESSES = """\
lo               UNKNOWN        127.0.0.1/8 ::1/128
host0@if12       UP             10.0.0.1/24 fe80::1/64
eth1             DOWN           10.1.0.1/24
docker0          DOWN
"""


@pytest.mark.parametrize(
    ("variables", "cause", "says"),
    [
        (
            {"GLOO_SOCKET_IFNAME": "eth9"},
            "nccl_no_socket_interface",
            "GLOO_SOCKET_IFNAME=eth9 in the environment of chat.0: there is no",
        ),
        ({"GLOO_SOCKET_IFNAME": "host"}, "nccl_no_socket_interface", "there is no such interface"),
        ({"NCCL_SOCKET_IFNAME": "=host"}, "nccl_no_socket_interface", "there is no such interface"),
        ({"NCCL_SOCKET_IFNAME": "^host,lo,eth"}, "nccl_no_socket_interface", "docker0 is down"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, "nccl_no_socket_interface", "eth1 is down"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, "wrong_interface", "the fleet's address 10.0.0.1 is on host0"),
        ({"NCCL_SOCKET_IFNAME": "lo,docker"}, "wrong_interface", "is on host0"),
        ({"NCCL_SOCKET_IFNAME": "host"}, "", ""),
        ({"NCCL_SOCKET_IFNAME": "=eth1,host0"}, "", ""),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, "", ""),
        ({"GLOO_SOCKET_IFNAME": "host0"}, "", ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_interface_that_ranks_are_told(variables, cause, says):
    made = case(gpu_01={"interfaces": {"chat.0": variables}, "addresses": ADDRESSES}, gpu_02={})
    assert causes(made) == ([(cause, "gpu-01")] if cause else [])
    assert says in "".join(finding["evidence"] for finding in collect.examine(made)["findings"])


def test_an_interface_in_nccls_own_file_counts_for_replicas_of_several_hosts():
    told_ = {"interfaces": {"": {"NCCL_SOCKET_IFNAME": "lo"}}, "addresses": ADDRESSES}
    made = case(gpu_01=told_)
    (found,) = collect.examine(made)["findings"]
    assert found["cause_id"] == "wrong_interface" and "in /etc/nccl.conf" in found["evidence"]
    made.outcome.plan = {**PLAN, "replicas": {"chat.0": {"hosts": ["gpu-01"], "version": "0.32.0"}}}
    assert causes(made) == []


def test_interfaces_are_read_from_the_generation_in_use_and_from_nccls_file(tmp_path):
    folder = tmp_path / "etc/vllm/chat.0/generations/a"
    folder.mkdir(parents=True)
    (folder / "env").write_text("# x\nHOME=/x\nGLOO_SOCKET_IFNAME=eth9\nVLLM_API_KEY=secret\n")
    (tmp_path / "etc/vllm/chat.0/current").symlink_to(folder)
    (tmp_path / "etc/nccl.conf").write_text("NCCL_SOCKET_IFNAME==host0\nNCCL_DEBUG=WARN\n")
    found = evidence.gather(lambda *_: (0, "", ""), "", {}, [], root=f"{tmp_path}/")["interfaces"]
    assert found == {"chat.0": {"GLOO_SOCKET_IFNAME": "eth9"}, "": {"NCCL_SOCKET_IFNAME": "=host0"}}


def test_a_model_whose_files_are_gone(tmp_path):
    folder = tmp_path / "chat"
    folder.mkdir()
    for name in ("config.json", "one.safetensors", "two.safetensors"):
        (folder / name).write_text("x" * 100)
    tree.save(str(tmp_path / ".chat.record.json"), tree.record(str(folder)))
    tree.save(str(tmp_path / ".gone.record.json"), tree.record(str(folder)))
    (tmp_path / ".odd.record.json").write_text("{")
    assert model_presence.look(str(tmp_path)) == {"chat": [], "gone": [f"{tmp_path}/gone is not there"]}
    (folder / "one.safetensors").write_text("x" * 40)
    (folder / "two.safetensors").unlink()
    found = evidence.gather(lambda *_: (0, "", ""), "", {}, [], models=str(tmp_path))["models"]
    assert found["chat"] == ["one.safetensors has 40 of 100 bytes", "two.safetensors is not there"]
    (finding,) = collect.examine(case(gpu_01={"models": {"chat": found["chat"]}}))["findings"]
    assert (finding["cause_id"], finding["severity"]) == ("model_weights_incomplete", "error")
    assert "model chat: one.safetensors has 40" in finding["evidence"]


def test_of_many_missing_files_a_few_are_named(tmp_path):
    folder = tmp_path / "chat"
    folder.mkdir()
    for number in range(9):
        (folder / f"{number}.safetensors").write_text("x")
    tree.save(str(tmp_path / ".chat.record.json"), tree.record(str(folder)))
    for path in folder.iterdir():
        path.unlink()
    assert model_presence.look(str(tmp_path))["chat"][-1] == "and 4 more"


def test_what_lines_and_state_both_say_is_one_finding():
    journal = [line("gpu-01", 1, "OSError: [Errno 28] No space left on device")]
    full = {"path": "/", "size": 1 << 40, "free": 0, "inodes": 100, "inodes_free": 50}
    (found,) = collect.examine(case(gpu_01={"journal": evidence.packed("\n".join(journal)), "disks": [full]}))[
        "findings"
    ]
    assert found["cause_id"] == "disk_full" and "Errno 28" in found["evidence"] and "MiB are left" in found["evidence"]


def test_hosts_that_were_not_reached_are_told():
    made = case(gpu_01={})
    made.outcome.unreachable.append("gpu-02")
    assert any("gpu-02 was not reached" in note for note in collect.examine(made)["notes"])


def test_collecting_reads_and_says_nothing_secret():
    asked = []

    def run(argv, _timeout):
        asked.append(argv)
        return 0, "Id=vllm@chat.0.service\nActiveState=active\n" if argv[0] == "systemctl" else "", ""

    found = evidence.gather(run, "-1h", {"chat.0": "http://127.0.0.1:1/"}, ["/absent.pem"])
    assert found["units"] == [{"Id": "vllm@chat.0.service", "ActiveState": "active"}]
    assert found["agents"] == {"chat.0": None} and found["certificates"] == {"/absent.pem": None}
    assert abs(found["time"] - time.time()) < 60 and found["hostname"] == socket.gethostname()
    assert all(argv[0] in ("journalctl", "systemctl", "nft", "ip", "nvidia-smi") for argv in asked)
    assert [word for word in asked[0] if word.startswith("--since")] == ["--since=-1h"]
    assert not any("secrets" in word or "--show-environment" in word for argv in asked for word in argv)


RECORDED = Path(__file__).parent / "fixtures/metrics/vllm-0.32.0-cpu.txt"


@pytest.mark.parametrize(
    ("waiting", "usage", "says"),
    [
        ("0.0", "0.2", ""),
        ("7.0", "0.2", "gpu-01: chat.0: 0 requests run, 7 wait, 20% of the KV cache are in use"),
        ("0.0", "0.98", "gpu-01: chat.0: 0 requests run, 0 wait, 98% of the KV cache are in use"),
    ],
)
def test_a_server_with_much_to_do_is_a_note_and_no_finding(waiting, usage, says):
    text = RECORDED.read_text()
    for name, value in (("vllm:num_requests_waiting", waiting), ("vllm:kv_cache_usage_perc", usage)):
        text, count = re.subn(rf"^({name}\{{[^}}]*\}}) .*$", rf"\1 {value}", text, flags=re.MULTILINE)
        assert count == 1
    answer = collect.examine(case(gpu_01={"metrics": {"vllm chat.0": text}}))
    assert answer["findings"] == [] and answer["notes"] == ([says] if says else [])


def test_pages_of_metrics_come_without_histograms():
    import metrics_world

    with metrics_world.serving({"/metrics": RECORDED.read_text()}) as port:
        pages = {"vllm chat.0": f"http://127.0.0.1:{port}/metrics", "vllm chat.1": f"http://127.0.0.1:{port}/absent"}
        found = evidence.gather(lambda *_: (0, "", ""), "", {}, [], pages=pages)["metrics"]
    assert list(found) == ["vllm chat.0"] and "vllm:num_requests_waiting{" in found["vllm chat.0"]
    assert "_bucket{" not in found["vllm chat.0"] and "# HELP" not in found["vllm chat.0"]


def test_commands_that_are_missing_or_hang_are_no_failure():
    def run(argv, timeout):
        raise gpu_facts.subprocess.TimeoutExpired(argv, timeout)

    assert evidence.unpacked(evidence.gather(run, "", {}, [])["journal"]) == ""


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["-i", "inventories/prod", "--endpoint", "http://x"],
        ["--since", "-1h", "--from", str(LOGS / "105.log")],
        ["-i", "inventories/prod", "--vllm", "0.32.0"],
        ["-i", "/absent"],
    ],
)
def test_used_wrongly(arguments):
    assert CliRunner().invoke(app, ["doctor", *arguments]).exit_code == 2


def serving(since, right=True, **changes):
    """The state of a host whose head came up then."""
    return {
        "units": [{"Id": "vllm@chat.0.service", "ActiveState": "active", "ActiveEnterTimestamp": f"@{since:.0f}"}],
        "agents": {"chat.0": {"rank": 0, "peers": {}, "answers": True, "probe": {"right": right}}},
        **changes,
    }


@pytest.mark.parametrize(
    ("since", "right", "over"), [(NOW + 60, True, True), (NOW + 60, False, False), (NOW - 60, True, False)]
)
def test_what_a_server_said_before_it_came_up_and_answered_is_over(since, right, over):
    journal = [line("gpu-01", 1, "OSError: [Errno 28] No space left on device")]
    made = case(gpu_01=serving(since, right, journal=evidence.packed("\n".join(journal))))
    (found,) = collect.examine(made)["findings"]
    assert found["recovered"] is over and (found["confidence"] == "low") is over


def test_a_journal_of_a_host_without_servers_is_never_over():
    assert evidence.serves_since(told("mon")) is None
