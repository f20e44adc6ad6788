"""A whole fleet's case: journals of several hosts and the state of each, judged together."""

import json
import socket
import time
from pathlib import Path

import conftest  # noqa: F401  makes scripts/gpu_fleet importable
import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import evidence, gpu_facts
from gpu_fleet import collect, runs
from gpu_fleet.cli import app
from typer.testing import CliRunner

LOGS = Path(__file__).parent / "fixtures" / "logs"
NOW = 1_800_000_000.0
PLAN = {"replicas": {"chat.0": {"hosts": ["gpu-01", "gpu-02"], "version": "0.32.0"}}}


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
        **changes,
    }


def case(**hosts):
    made = collect.Case(runs.Outcome(plan=PLAN))
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


def test_a_rank_whose_agent_does_not_run_is_not_firewalled_off():
    made = case(gpu_01=state(0, {"1": None}), gpu_02={"agents": {"chat.0": None}})
    assert causes(made) == []


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
