"""Faults on two lab hosts, without a controller: the ranks restart and meet again, and nothing else is touched.

The engine is a stand-in for vLLM that hangs as the real one does when it lost a rank. The tests run in order; each begins
with a fleet that serves and leaves one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import faults
import pytest
import testinfra
from faults import Cut

INVENTORY = Path(os.environ["MOLECULE_INVENTORY_FILE"]).parent
KEY = "chat-key-chat-key-chat-key-chat-key"
AGENT = 8003
SOON = 40.0  # the stand-in starts within seconds; the machine may be busy

# Servers speak TLS (vllm_service_tls); whoever asks them believes the fleet's CA alone.
CA = str(INVENTORY / ".secrets" / "gateway" / "ca.pem")
Flight, answers_within, completion = (
    functools.partial(of, ca=CA) for of in (faults.Flight, faults.answers_within, faults.completion)
)

ASK = "import urllib.request as u,sys; print(u.urlopen(sys.argv[1], timeout=5).read().decode())"


@pytest.fixture(scope="module")
def hosts():
    names = ("gpu-01", "gpu-02", "gateway", "stranger")
    return {name: testinfra.get_host(f"ansible://{name}?ansible_inventory={INVENTORY}") for name in names}


@pytest.fixture(scope="module")
def url(hosts):
    plan = hosts["gpu-01"].check_output("cat /etc/vllm/chat.0/current/plan.json")
    head = json.loads(plan)["head"]
    return f"https://{head['address']}:{head['port']}"


@pytest.fixture(autouse=True)
def serves(hosts, url):
    """Before each test the fleet serves, its runs know each other, and the stories so far are over."""
    answers_within(url, KEY, SOON)
    wait(lambda: agent(hosts, "gpu-01")["mates"] == {"1": invocation(hosts, "gpu-02")}, "the ranks did not pair")
    wait(lambda: agent(hosts, "gpu-02")["mates"] == {"0": invocation(hosts, "gpu-01")}, "the ranks did not pair")
    wait(lambda: agent(hosts, "gpu-01")["answered"] == invocation(hosts, "gpu-01"), "no right answer was seen")


def wait(so, otherwise, seconds=SOON):
    end = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < end, otherwise
        time.sleep(0.3)


def agent(hosts, name, source="gateway", path=""):
    return json.loads(hosts[source].check_output(f'python3 -c "{ASK}" http://{name}:{AGENT}/{path}'))


def show(hosts, name, prop, instance="chat.0"):
    return hosts[name].check_output(f"systemctl show vllm@{instance} --property={prop} --value")


def invocation(hosts, name, instance="chat.0"):
    return show(hosts, name, "InvocationID", instance)


def both(hosts):
    return {name: invocation(hosts, name) for name in ("gpu-01", "gpu-02")}


def journal(hosts, name, since):
    return hosts[name].check_output(f"journalctl --no-pager -o cat -u vllm-agent@chat.0 --since=@{since:.0f}")


def kill(hosts, name, signal="KILL", instance="chat.0"):
    hosts[name].check_output(f"systemctl kill --signal={signal} --kill-whom=main vllm@{instance}")


def healed(hosts, url, before, began, seconds=SOON):
    """It answers again, with new runs on both hosts; the seconds it took since `began`."""
    took = answers_within(url, KEY, seconds, began)
    after = both(hosts)
    assert all(after[name] != before[name] for name in before), (before, after)
    return took


@pytest.mark.parametrize("victim", ["gpu-02", "gpu-01"], ids=["worker", "head"])
def test_a_killed_rank_brings_both_to_restart_and_meet(hosts, url, victim):
    before, clock, other = both(hosts), time.time(), invocation(hosts, "gpu-02", "single.0")
    flight = Flight(url, KEY, 600).start()
    time.sleep(1)
    began = time.monotonic()
    kill(hosts, victim)
    healed(hosts, url, before, began)
    flight.thread.join(1)
    assert flight.outcome.startswith("failed"), "the request in flight still hangs"
    assert flight.ended - began < 30
    assert invocation(hosts, "gpu-02", "single.0") == other, "another replica on the host was touched"
    wait(lambda: "healed" in journal(hosts, "gpu-01", clock), "no story in the journal")
    wait(lambda: "healed" in journal(hosts, "gpu-02", clock), "no story in the journal")
    (story,) = [line for line in journal(hosts, "gpu-01", clock).splitlines() if "healed" in line]
    assert ("rank 1 is gone" if victim == "gpu-02" else "its server ended") in story
    assert "1 start; right answer" in story


def test_a_hung_engine_is_killed_and_its_request_ended(hosts, url):
    before, clock = both(hosts), time.time()
    began = time.monotonic()
    kill(hosts, "gpu-01", "USR1")
    flight = Flight(url, KEY, 1).start()
    healed(hosts, url, before, began)
    flight.thread.join(1)
    assert flight.outcome.startswith("failed")
    assert flight.ended - began < 30
    assert "no answer twice and no progress in between: killed" in journal(hosts, "gpu-01", clock)


def test_a_busy_server_is_left_alone(hosts, url):
    before = both(hosts)
    kill(hosts, "gpu-01", "USR2")
    time.sleep(15)  # three probes in vain
    try:
        assert agent(hosts, "gpu-01")["probe"]["right"] is False
        assert both(hosts) == before
    finally:
        kill(hosts, "gpu-01", "USR2")
    answers_within(url, KEY, SOON)
    assert both(hosts) == before


def test_an_agent_that_dies_disturbs_nothing(hosts, url):
    before = both(hosts)
    for name in ("gpu-01", "gpu-02"):
        hosts[name].check_output("systemctl kill --signal=KILL vllm-agent@chat.0")
    time.sleep(5)
    hosts["gpu-02"].check_output("systemctl stop vllm-agent@chat.0")
    time.sleep(20)
    try:
        completion(url, KEY)
        assert both(hosts) == before, "a rank whose agent is gone, and that works, was taken for lost"
    finally:
        hosts["gpu-02"].check_output("systemctl start vllm-agent@chat.0")
    completion(url, KEY)
    assert both(hosts) == before


@pytest.mark.parametrize("cut", ["gpu-02", "gpu-01"], ids=["worker", "head"])
def test_a_cut_ends_what_cannot_be_answered_and_heals(hosts, url, cut):
    before, clock = both(hosts), time.time()
    index = int(hosts[cut].check_output("cat /sys/class/net/host0/iflink"))
    flight = Flight(url, KEY, 600).start()
    time.sleep(1)
    began = time.monotonic()
    with Cut(index):
        time.sleep(30)
    healed(hosts, url, before, began, 30 + SOON)
    if cut == "gpu-02":  # of a head that is cut off itself, nobody sees the end
        flight.thread.join(1)
        assert flight.outcome.startswith("failed")
        assert flight.ended - began < 30
    for name, other in (("gpu-01", 1), ("gpu-02", 0)):
        assert re.search(rf"rank {other} has not answered for (1[5-9]|2\d) s: killed", journal(hosts, name, clock))


def test_a_short_cut_is_sat_out(hosts, url):
    before = both(hosts)
    with Cut(int(hosts["gpu-02"].check_output("cat /sys/class/net/host0/iflink"))):
        time.sleep(9)
    time.sleep(16)
    assert both(hosts) == before


@pytest.mark.parametrize("victim", ["gpu-02", "gpu-01"], ids=["worker", "head"])
def test_a_reboot_heals_without_help(hosts, url, victim):
    before, began = both(hosts), time.monotonic()
    hosts[victim].run("systemctl reboot")
    wait(lambda: not serving(url), "it did not go down")
    healed(hosts, url, before, began, 90)
    assert hosts[victim].service("vllm-agent@chat.0").is_enabled


def serving(url):
    with contextlib.suppress(OSError):
        completion(url, KEY)
        return True
    return False


def test_what_an_operator_stops_stays_stopped_and_the_others_wait(hosts, url):
    clock = time.time()
    hosts["gpu-02"].check_output("systemctl stop vllm@chat.0")
    wait(lambda: show(hosts, "gpu-01", "ActiveState") in ("inactive", "failed"), "the head did not stop")
    time.sleep(20)
    assert show(hosts, "gpu-02", "ActiveState") in ("inactive", "failed")
    assert show(hosts, "gpu-01", "ActiveState") in ("inactive", "failed")
    assert agent(hosts, "gpu-02")["blocked"] == "stopped by an operator or a play"
    assert agent(hosts, "gpu-01")["waiting"] == "rank 1: stopped by an operator or a play"
    assert "rank 1 is gone: stopped by an operator or a play: killed" in journal(hosts, "gpu-01", clock)
    hosts["gpu-02"].check_output("systemctl start --no-block vllm@chat.0")
    answers_within(url, KEY, SOON)


def test_the_limit_is_reached_said_and_ended_by_hand(hosts, url):
    clock = time.time()
    hosts["gpu-02"].check_output("mkdir -p /var/lib/standin && touch /var/lib/standin/broken")
    try:
        kill(hosts, "gpu-02")
        wait(lambda: agent(hosts, "gpu-01")["limit_reached"], "the limit was not reached", 150)
        before = both(hosts)
        time.sleep(15)
        assert both(hosts) == before, "it goes on restarting"
        assert "LIMIT: 3 starts without a right answer" in journal(hosts, "gpu-01", clock)
        numbers = hosts["gateway"].check_output(f'python3 -c "{ASK}" http://gpu-01:{AGENT}/metrics')
        assert 'gpu_fleet_limit_reached{instance="chat.0",service="chat",rank="0"} 1' in numbers
    finally:
        hosts["gpu-02"].check_output("rm /var/lib/standin/broken")
    hosts["gpu-01"].check_output("systemctl start --no-block vllm@chat.0")
    answers_within(url, KEY, 2 * SOON)
    wait(lambda: not agent(hosts, "gpu-01")["limit_reached"], "the limit did not end")


def test_a_full_disk_waits_for_room(hosts, url):
    hosts["gpu-02"].check_output("systemctl stop vllm@single.0")
    hosts["gpu-02"].check_output("mount -t tmpfs -o size=80m,mode=755 tmpfs /var/cache/vllm")
    answers_within(url, KEY, SOON)
    try:
        hosts["gpu-02"].check_output("head -c 79M /dev/zero > /var/cache/vllm/filler")
        kill(hosts, "gpu-02")
        wait(lambda: "MiB are free" in agent(hosts, "gpu-01")["waiting"], "nobody waits for room")
        time.sleep(10)
        assert not serving(url)
        assert not agent(hosts, "gpu-01")["limit_reached"]
        began = time.monotonic()
        hosts["gpu-02"].check_output("rm /var/cache/vllm/filler")
        answers_within(url, KEY, SOON, began)
    finally:
        hosts["gpu-02"].check_output(
            "systemctl stop vllm@chat.0; umount /var/cache/vllm; systemctl start vllm@single.0"
        )
        hosts["gpu-02"].check_output("systemctl start --no-block vllm@chat.0")


# -- who may ask, and how ------------------------------------------------------------------------------------------------


def test_peers_and_gateways_are_answered_and_a_stranger_is_not(hosts):
    assert agent(hosts, "gpu-01", source="gpu-02")["rank"] == 0
    assert agent(hosts, "gpu-02", source="gpu-01")["rank"] == 1
    assert hosts["gateway"].run(f'python3 -c "{ASK}" http://gpu-01:{AGENT}/ready').stdout == "ready\n\n"
    refused = hosts["stranger"].run(f'python3 -c "{ASK}" http://gpu-01:{AGENT}/')
    assert refused.rc != 0
    assert not refused.stdout
    # One host alone, and a gateway that asks: not on the loopback address only.
    assert hosts["gateway"].run(f'python3 -c "{ASK}" http://gpu-02:8103/ready').stdout == "ready\n\n"
    assert hosts["gpu-01"].run(f'python3 -c "{ASK}" http://gpu-02:8103/').rc != 0, "no peer of this replica"


def test_nothing_secret_and_nothing_that_changes_anything(hosts):
    said = json.dumps([agent(hosts, name) for name in ("gpu-01", "gpu-02")])
    said += hosts["gateway"].check_output(f'python3 -c "{ASK}" http://gpu-01:{AGENT}/metrics')
    assert "key" not in said.lower()
    post = f"import urllib.request as u; u.urlopen('http://gpu-01:{AGENT}/', b'x', timeout=5)"
    assert "405" in hosts["gateway"].run(f'python3 -c "{post}"').stderr


def test_rude_clients_hurt_nobody(hosts, url):
    before = both(hosts)
    rude = (
        (
            "import socket, time\\n"
            "held = [socket.create_connection(('gpu-01', 8003), 5) for _ in range(200)]\\n"
            "held[0].sendall(b'GET / HTTP/1.1\\\\r\\\\n' + b'X: y\\\\r\\\\n' * 5000)\\n"
            "held[1].sendall(bytes(range(256)) * 40)\\n"
            "time.sleep(8)\\n"
        )
        .replace("\\n", "\n")
        .replace("\\\\r", "\\r")
    )
    hosts["gateway"].run("cat > /tmp/rude.py <<'E'\n" + rude + "E\n")
    done = hosts["gateway"].run("python3 /tmp/rude.py")
    assert "Error" not in done.stderr.replace("ConnectionResetError", "").replace("BrokenPipeError", ""), done.stderr
    assert both(hosts) == before
    assert agent(hosts, "gpu-01")["probe"]["right"]
    threads = "ls /proc/$(systemctl show vllm-agent@chat.0 -p MainPID --value)/task | wc -l"
    assert int(hosts["gpu-01"].check_output(threads)) <= 24


def test_the_agents_are_confined_and_start_at_boot(hosts):
    for name in ("gpu-01", "gpu-02"):
        assert hosts[name].service("vllm-agent@chat.0").is_enabled
        assert hosts[name].service("vllm-agent@chat.0").is_running
        score = hosts[name].check_output("systemd-analyze security --no-pager vllm-agent@chat.0.service | tail -1")
        assert float(score.split(": ")[1].split()[0]) <= 2.0, score
        said = hosts[name].run("systemd-analyze verify vllm-agent@chat.0.service")
        assert said.rc == 0
        assert "vllm-agent@" not in said.stderr
        pid = hosts[name].check_output("systemctl show vllm-agent@chat.0 -p MainPID --value")
        assert "CapEff:\t0000000000000000" in hosts[name].check_output(f"cat /proc/{pid}/status")


def test_a_changed_agent_is_restarted_and_no_server(hosts, url):
    before, agents = both(hosts), {}
    for name in ("gpu-01", "gpu-02"):
        agents[name] = hosts[name].check_output("systemctl show vllm-agent@chat.0 -p InvocationID --value")
        hosts[name].check_output("echo '# by hand' >> /opt/vllm/agent/gpu_fleet_agent/agent.py")
        hosts[name].check_output("systemctl stop vllm-agent@chat.0; systemctl disable vllm-agent@chat.0")
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [
            f"{Path(sys.executable).parent}/ansible-playbook",
            str(root / "molecule/healing/converge.yml"),
            "-i",
            str(INVENTORY),
        ],
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(root / "ansible.cfg"),
            "ANSIBLE_COLLECTIONS_PATH": str(root / "collections"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("gpu-01", "gpu-02"):
        now = hosts[name].check_output("systemctl show vllm-agent@chat.0 -p InvocationID --value")
        assert now != agents[name]
        assert hosts[name].service("vllm-agent@chat.0").is_enabled
        assert "by hand" not in hosts[name].check_output("cat /opt/vllm/agent/gpu_fleet_agent/agent.py")
    assert both(hosts) == before
    completion(url, KEY)
