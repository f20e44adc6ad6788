"""Connections between hosts, with real sockets on this machine's loopback addresses."""

import os
import socket
import threading
import time

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import reach
from plays import played


@pytest.fixture
def listening():
    """Start a listener of the module's in a thread: `listening("gpu-02")` gives its port."""
    held = []

    def start(name, address="127.0.0.1", seconds=10):
        sockets, taken = reach.bind(address, [0])
        assert taken == []
        held.extend(sockets)
        threading.Thread(target=reach.serve, args=(sockets, name, seconds), daemon=True).start()
        return sockets[0].getsockname()[1]

    yield start
    for item in held:
        item.close()


def target(port, host="gpu-02", address="127.0.0.1", ours=True):
    return {"host": host, "address": address, "port": port, "ours": ours}


def connect(*targets, source=None, seconds=2.0):
    return reach.connect_all(targets, source, seconds, True)


@pytest.mark.parametrize(("address", "source"), [("127.0.0.1", "127.0.0.3"), ("::1", "::1")])
def test_a_connection_from_the_hosts_own_address_with_full_sized_packets_both_ways(listening, address, source):
    port = listening("gpu-02", address)
    (result,) = connect(target(port, address=address), source=source)
    assert (result["outcome"], result["name"], result["seen"]) == ("connected", "gpu-02", source)
    assert reach.judge_peers("gpu-01", source, "eth1", [result], {}) == []


def test_nobody_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (result,) = connect(target(free.getsockname()[1]))
    assert result["outcome"] == "refused"
    assert "a firewall on the way rejects" in reach.judge_peers("gpu-01", "127.0.0.1", None, [result], {})[0]
    outside = [{**result, "ours": False}]
    assert reach.judge_peers("gpu-01", "127.0.0.1", None, outside, {}) == [], "the host answers, nobody listens yet"


def test_no_way(listening):
    (result,) = connect(target(1, address="255.255.255.255"))
    assert result["outcome"] == "no way"
    assert "do not meet" in reach.judge_peers("gpu-01", "10.0.0.1", None, [result], {})[0]


def test_silence_takes_its_time_once_for_all_and_is_one_sentence_a_peer():
    """A backlog that is full drops what comes, as a firewall does."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        began = time.monotonic()
        results = connect(*[target(port)] * 8, seconds=0.5)
        took = time.monotonic() - began
        for filler in fillers:
            filler.close()
    assert {item["outcome"] for item in results} == {"silence"}
    assert took < 2
    (sentence,) = reach.judge_peers("gpu-01", "10.0.0.1", "eth1", results, {"gpu-02": "Chain x drops."})
    assert f"gpu-01 (10.0.0.1) to gpu-02 (127.0.0.1), port {port}: no answer" in sentence
    assert sentence.endswith("(interface eth1). Chain x drops.")


def test_a_path_that_drops_full_sized_packets():
    """A listener that greets and then takes nothing, as when only small packets arrive."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        held = []

        def greet():
            connection, peer = server.accept()
            connection.sendall(f"{reach.GREETING} gpu-02 {peer[0]}\n".encode())
            held.append(connection)

        threading.Thread(target=greet, daemon=True).start()
        (result,) = connect(target(server.getsockname()[1]), seconds=0.5)
    assert result["outcome"] == "stalled"
    assert "smaller MTU" in reach.judge_peers("gpu-01", "127.0.0.1", None, [result], {})[0]


def test_another_host_with_the_same_address(listening):
    (result,) = connect(target(listening("gpu-07")))
    (sentence,) = reach.judge_peers("gpu-01", "127.0.0.1", None, [result], {})
    assert "gpu-07 answered, not gpu-02: two hosts have the same address" in sentence


def test_address_translation_on_the_way(listening):
    (result,) = connect(target(listening("gpu-02")))
    (sentence,) = reach.judge_peers("gpu-01", "10.0.0.1", None, [result], {})
    assert "gpu-02 sees 127.0.0.1: the address is translated" in sentence


def test_nothing_is_sent_to_somebody_elses_listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        (result,) = connect(target(server.getsockname()[1], ours=False))
        connection, _peer = server.accept()
        with connection:
            assert connection.recv(16) == b""
    assert (result["outcome"], result["name"]) == ("connected", None)
    assert reach.judge_peers("gpu-01", "10.0.0.1", None, [result], {}) == []


def test_ports_that_are_taken_are_left_alone():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        sockets, taken = reach.bind("127.0.0.1", [port])
    assert (sockets, taken) == ([], [port])


def test_an_address_of_another_host_cannot_be_listened_on():
    with pytest.raises(OSError, match="assign requested address"):
        reach.bind("192.0.2.1", [0])


def test_a_detached_listener_ends_when_told_and_by_itself(tmp_path):
    pid_file = str(tmp_path / "run" / "reach.pid")
    sockets, _taken = reach.bind("127.0.0.1", [0])
    port = sockets[0].getsockname()[1]
    pid = reach.detach(sockets, "gpu-02", 30, pid_file)
    sockets[0].close()
    assert connect(target(port))[0]["outcome"] == "connected"
    while not os.path.exists(pid_file):
        time.sleep(0.01)
    assert reach.stop(pid_file)
    assert not reach.stop(pid_file), "the second time there is none"
    assert _ends(pid)
    sockets, _taken = reach.bind("127.0.0.1", [0])
    assert _ends(reach.detach(sockets, "gpu-02", 0.2, pid_file))
    sockets[0].close()
    assert not reach.stop(pid_file), "it has ended; a process that has its number since then is not ended"


def _ends(pid):
    for _ in range(300):
        try:
            reach.start_time(pid)
        except OSError:
            return True
        time.sleep(0.02)
    return False


# -- strangers --------------------------------------------------------------------------------------------------------------

RANKS = {"name": "chat.0 ranks", "ports": ["8001", "40000-60999"], "from": ["10.0.0.2", "fd00::/64"]}


def came(seen, port=8001, outcome="connected"):
    return {"host": "gpu-01", "address": "10.0.0.1", "port": port, "outcome": outcome, "seen": seen, "name": "gpu-01"}


@pytest.mark.parametrize("seen", ["10.0.0.9", "::ffff:10.0.0.9", "fd01::1"])
@pytest.mark.parametrize(("port", "outcome"), [(8001, "connected"), (40000, "stalled")])
def test_a_stranger_that_was_let_in(seen, port, outcome):
    (sentence,) = reach.judge_stranger([came(seen, port, outcome)], [RANKS])
    assert f"gpu-01 (10.0.0.1), port {port}: a connection from {seen}, which is no peer, was let in" in sentence


@pytest.mark.parametrize(
    "result",
    [
        came("10.0.0.2"),
        came("::ffff:10.0.0.2"),
        came("fd00::7"),
        came(None, outcome="silence"),
        came(None, outcome="refused"),
        came(None, outcome="no way"),
    ],
)
def test_a_stranger_that_was_kept_out_or_is_none(result):
    assert reach.judge_stranger([result], [RANKS]) == []


def test_what_is_open_to_any_is_meant_so():
    assert reach.judge_stranger([came("10.0.0.9")], [{**RANKS, "from": ["any"]}]) == []


# -- what is proved ---------------------------------------------------------------------------------------------------------


def plan():
    """Two replicas over the same two hosts, whose ranges of ports differ, one of them on Ray, and one on a host alone."""

    def openings(span, **stores):
        names = {"a.0": stores["a"], "b.0": stores["b"], "c.0": 9001}
        return [{"name": f"{name} ranks", "ports": [str(port), "8008-8015", span]} for name, port in names.items()]

    def replica(store, *hosts, **more):
        return {"ports": {"rank_store": store}, "hosts": list(hosts), **more}

    both = ["gpu-01", "gpu-02"]
    return {
        "addresses": {"gpu-01": "10.0.0.1", "gpu-02": "10.0.0.2"},
        "replicas": {
            "a.0": replica(8001, *both),
            "b.0": replica(8101, "gpu-01", ray_hosts=both),
            "c.0": replica(9001, "gpu-01", ray_hosts=[]),
        },
        "hosts": {
            "gpu-01": {"openings": openings("40000-60999", a=8001, b=8101)},
            "gpu-02": {"openings": openings("50000-60999", a=8001, b=8101)},
        },
    }


def test_where_ranks_meet_and_the_start_of_the_other_hosts_range_are_proved():
    assert reach.proof(plan(), "gpu-01")["ports"] == [8001, 8101, 9001, 40000]
    there = {"host": "gpu-02", "address": "10.0.0.2"}
    assert reach.proof(plan(), "gpu-01")["targets"] == [{**there, "port": port} for port in (8001, 50000, 8101)]
    assert [item["port"] for item in reach.proof(plan(), "gpu-02")["targets"]] == [8001, 40000, 8101]


# -- the controller's part --------------------------------------------------------------------------------------------------

PROOF = """
- hosts: localhost
  connection: local
  gather_facts: false
  vars:
    firewall_consent: true
    firewall_managed_elsewhere: false
    firewall_cluster_interface: ""
    firewall_proof_seconds: 1
    firewall_planned_openings: "{{ openings }}"
    firewall_openings: []
    fleet_address: 127.0.0.1
    ansible_port: "{{ port }}"
    firewall_proof: {ports: ["{{ port | int }}"], targets: "{{ targets | default([]) }}"}
  tasks:
    - ansible.builtin.include_role:
        name: gpu_fleet.vllm.firewall
        tasks_from: prove
        rolespec_validate: false
    - ansible.builtin.debug:
        msg: "reached {{ __firewall_reached | to_json }}"
"""


def _free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _proved(folder, **variables):
    return played(folder, PROOF, "localhost,", port=str(_free_port()), **variables)


def test_the_controller_connects_as_a_stranger_while_the_host_listens(tmp_path):
    """One that is let in is a stop; the listener has ended after it all the same."""
    status, said = _proved(tmp_path, openings=[])
    assert status == 2
    assert "a connection from 127.0.0.1, which is no peer, was let in" in said


def test_who_may_connect_is_no_stranger(tmp_path):
    opening = {"name": "ranks", "ports": ["1-65535"], "from": ["127.0.0.1"]}
    status, said = _proved(tmp_path, openings=[opening])
    assert status == 0, said
    assert '"outcome": "connected"' in said
    assert '"results": []' in said, "without a peer nothing is asked of the host"


def test_peers_are_reached_beside_it(tmp_path):
    """Nobody listens there; that the host answers shows that packets pass."""
    peer = {"host": "gpu-02", "address": "127.0.0.1", "port": _free_port(), "ours": False}
    status, said = _proved(tmp_path, openings=[{"name": "r", "ports": ["1-65535"], "from": ["any"]}], targets=[peer])
    assert status == 0, said
    assert '"outcome": "refused"' in said
    assert '"outcome": "connected"' in said
