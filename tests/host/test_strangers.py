"""Who reaches which port, by connecting while something listens there; and networks that are wrong, each with one finding.

The tests run in order and run the playbook themselves, with other variables each. Listeners are stand-ins: they accept and
close. What is not open has to be silent: a refused connection would say that the packet came through.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import testinfra
import yaml

ROOT = Path(__file__).resolve().parents[2]
INVENTORY = Path(os.environ["MOLECULE_INVENTORY_FILE"]).parent
HOSTS = ("gpu-01", "gpu-02", "stranger")
SIX = {"gpu-01": "fd00:f1ee::1", "gpu-02": "fd00:f1ee::2", "stranger": "fd00:f1ee::9"}
BASES = {"chat": 8000, "single": 8100}
OFFSETS = yaml.safe_load((ROOT / "data/ports.yml").read_text(encoding="utf-8"))["offsets"]
# Of the range that the kernel hands out: its ends and one between.
RANGE = (40000, 50123, 60999)
LISTENER = (
    "import selectors, socket, sys; s = selectors.DefaultSelector()\n"
    "for port in map(int, sys.argv[1:]):\n"
    "    l = socket.create_server(('::', port), family=socket.AF_INET6, dualstack_ipv6=True); s.register(l, 1)\n"
    "while True:\n"
    "    for key, _ in s.select(): key.fileobj.accept()[0].close()\n"
)
CONNECT = (
    "import concurrent.futures, json, socket, sys\n"
    "def say(where):\n"
    "    try: socket.create_connection(tuple(where), 1.5).close(); return 'connected'\n"
    "    except TimeoutError: return 'silence'\n"
    "    except OSError as error: return str(error)\n"
    "print(json.dumps(list(concurrent.futures.ThreadPoolExecutor(64).map(say, json.loads(sys.argv[1])))))\n"
)


@pytest.fixture(scope="module")
def hosts():
    return {name: testinfra.get_host(f"ansible://{name}?ansible_inventory={INVENTORY}") for name in HOSTS}


@pytest.fixture(scope="module")
def four(hosts):
    """The addresses on the first network."""
    return {name: host.check_output("hostname --all-ip-addresses").split()[0] for name, host in hosts.items()}


def play(*options, **variables):
    """Run the playbook; exit status and what it said on one line."""
    command = [f"{Path(sys.executable).parent}/ansible-playbook", str(ROOT / "molecule/strangers/converge.yml")]
    more = {
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
        "ANSIBLE_FORCE_COLOR": "0",  # colours would be in the middle of sentences
    }
    done = subprocess.run(
        [*command, "-i", str(INVENTORY), "-e", json.dumps(variables), *options],
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def six_only(**more):
    """Variables of a fleet on the second network."""
    return {"addresses": SIX, "fleet_address": "{{ addresses[inventory_hostname] }}", **more}


def ports_of(service):
    """{name of the port: numbers} of a service's block, by data/ports.yml."""
    return {
        name: range(BASES[service] + port["offset"], BASES[service] + port["offset"] + port["span"])
        for name, port in OFFSETS.items()
    }


ALL = sorted({port for service in BASES for span in ports_of(service).values() for port in span} | set(RANGE))


@pytest.fixture
def listening(hosts):
    """Something listens on every port of the fleet, on both hosts, for IPv4 and IPv6."""
    numbers = " ".join(map(str, ALL))
    for name in ("gpu-01", "gpu-02"):
        hosts[name].run("systemctl stop 'vllm@*' 'vllm-agent@*'")
        hosts[name].run_expect([0], f"systemd-run --quiet --collect --unit=listen python3 -c %s {numbers}", LISTENER)
    time.sleep(1)
    yield
    for name in ("gpu-01", "gpu-02"):
        hosts[name].run("systemctl stop listen")


def hears(host, address, ports=ALL):
    """{port: what a host hears from it}."""
    wanted = json.dumps([(address, port) for port in ports])
    return dict(zip(ports, json.loads(host.check_output("python3 -c %s %s", CONNECT, wanted)), strict=True))


def let_in(host, address):
    """Ports on which a connection comes through; every other one has to be silent."""
    heard = hears(host, address)
    assert set(heard.values()) <= {"connected", "silence"}, heard
    return {port for port, word in heard.items() if word == "connected"}


def needed(target):
    """Ports that gpu-01 and gpu-02 need of each other: chat runs over both, single on each alone."""
    chat = ports_of("chat")
    ranks = {port for name in ("rank_store", "dp_rpc", "agent", "side_channel") for port in chat[name]} | set(RANGE)
    return ranks | (set(chat["api"]) if target == "gpu-01" else set())


def opened(target):
    """Ports that the plan names on a host; the API of a worker is none, nobody listens there."""
    named = set(ALL)
    return named - (set(ports_of("chat")["api"]) if target == "gpu-02" else set())


def check(hosts, addresses):
    """Peers reach what they need and nothing else of what is named; a stranger nothing of it, on either network."""
    for source, target in (("gpu-01", "gpu-02"), ("gpu-02", "gpu-01")):
        assert let_in(hosts[source], addresses[target]) & opened(target) == needed(target), (source, target)
    for target in ("gpu-01", "gpu-02"):
        assert not let_in(hosts["stranger"], addresses[target]) & opened(target), target


def test_over_ipv4(hosts, four, listening):
    check(hosts, four)


def test_a_rank_port_is_open_on_the_clusters_interface_alone(hosts, listening):
    """The same peer, by its other network: no way in, although something listens there, too."""
    for source, target in (("gpu-01", "gpu-02"), ("gpu-02", "gpu-01")):
        assert not let_in(hosts[source], SIX[target]) & opened(target)


def test_after_reloads(hosts, four, listening):
    for name in ("gpu-01", "gpu-02"):
        hosts[name].run_expect([0], "systemctl start nftables.service")
        hosts[name].run_expect([0], "systemctl reload nftables.service gpu-fleet-firewall.service")
    check(hosts, four)


def reboot(hosts, name):
    before = hosts[name].check_output("stat -c %Y /run/systemd")
    hosts[name].run("systemd-run --quiet --on-active=1 /sbin/reboot")
    for _ in range(60):
        time.sleep(1)
        done = hosts[name].run("stat -c %Y /run/systemd")
        if done.rc == 0 and done.stdout.strip() != before:
            return
    raise AssertionError(f"{name} did not come back")


def test_after_a_reboot(hosts, four):
    reboot(hosts, "gpu-02")


def test_nothing_is_open_after_it(hosts, four, listening):
    check(hosts, four)


def test_over_ipv6_alone(hosts):
    status, said = play(**six_only())
    assert status == 0, said
    file = hosts["gpu-01"].file("/etc/nccl.conf").content_string
    assert "NCCL_SOCKET_IFNAME==fleet0\nNCCL_SOCKET_FAMILY=AF_INET6\n" in file


def test_who_reaches_what_over_ipv6(hosts, four, listening):
    check(hosts, SIX)
    for source, target in (("gpu-01", "gpu-02"), ("gpu-02", "gpu-01")):
        assert not let_in(hosts[source], four[target]) & opened(target)
    assert not let_in(hosts["stranger"], four["gpu-01"]) & opened("gpu-01")


def test_a_second_run_changes_nothing(hosts):
    status, said = play(**six_only())
    assert status == 0, said
    assert said.count("changed=0") == len(HOSTS)


def test_one_host_alone_gets_the_same_files(hosts):
    """With --limit the other host is not compared, and connected to all the same."""
    before = hosts["gpu-01"].check_output(
        "cat /etc/nccl.conf /etc/gpu_fleet/firewall.nft /etc/sysctl.d/60-gpu-fleet-nccl.conf"
    )
    status, said = play("--limit", "gpu-01", **six_only())
    assert status == 0, said
    assert "changed=0" in said
    after = hosts["gpu-01"].check_output(
        "cat /etc/nccl.conf /etc/gpu_fleet/firewall.nft /etc/sysctl.d/60-gpu-fleet-nccl.conf"
    )
    assert after == before


# -- networks that are wrong ------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(hosts):
    """Do something to a host and undo it: `broken("gpu-02", "ip ...", "ip ...")`."""
    undo = []

    def act(name, command, back):
        undo.append((name, back))
        hosts[name].run_expect([0], command)

    yield act
    for name, back in reversed(undo):
        hosts[name].run_expect([0], back)


def refused(*words, **variables):
    status, said = play(**{**six_only(), **variables})
    assert status != 0, said
    for word in words:
        assert word in said, said
    return said


UP = "ip link set fleet0 up; ip address replace fd00:f1ee::2/64 dev fleet0 nodad"


def test_an_interface_that_is_down(broken):
    # Down, an interface loses its IPv6 addresses.
    broken("gpu-02", "sysctl -qw net.ipv6.conf.fleet0.keep_addr_on_down=1; ip link set fleet0 down", f"sh -c '{UP}'")
    refused("gpu-02: fleet_address: fleet0 is down", "ip link set fleet0 up")


def test_networks_that_do_not_meet(broken):
    broken("gpu-02", "ip address add fd00:bad::2/64 dev fleet0 nodad", "ip address del fd00:bad::2/64 dev fleet0")
    refused(
        "gpu-01: fleet_address: the networks of the hosts do not meet; no way to gpu-02 (fd00:bad::2): Network is unreachable",
        addresses={**SIX, "gpu-02": "fd00:bad::2"},
    )


def test_a_way_by_another_interface(broken):
    way = f"{SIX['gpu-02']}/128 dev host0"
    broken("gpu-01", f"ip -6 route add {way}", f"ip -6 route del {way}")
    refused("it is on fleet0, but packets leave to gpu-02 (fd00:f1ee::2) by host0")


def test_a_bridge_for_guests(broken):
    name = "docker0"
    make = f"ip link add {name} type bridge; ip address add fd00:d::1/64 dev {name} nodad; ip link set {name} up"
    broken("gpu-01", f"sh -c '{make}'", f"ip link del {name}")
    # A port that has a carrier gives the bridge its own.
    broken(
        "gpu-01",
        f"sh -c 'ip link add v0 type veth peer name v1; ip link set v0 master {name} up; ip link set v1 up'",
        "ip link del v0",
    )
    refused("is on docker0, a bridge for guests of this host", addresses={**SIX, "gpu-01": "fd00:d::1"})


def test_several_addresses_on_the_interface(broken):
    broken("gpu-01", "ip address add fd00:f1ee::77/64 dev fleet0 nodad", "ip address del fd00:f1ee::77/64 dev fleet0")
    refused("NCCL and gloo take its first one, fd00:f1ee::77, not fd00:f1ee::1")


# -- packets that do not pass ------------------------------------------------------------------------------------------------

TABLE = "table inet theirs"


def hook(rule, priority="-200"):
    """A table of somebody else's: before the hooks that the role looks at, so that only a connection shows it."""
    return f"nft '{TABLE} {{ chain early {{ type filter hook prerouting priority {priority}; {rule}; }}; }}'"


GONE = f"nft delete {TABLE}"


def test_a_network_that_drops(broken):
    broken("gpu-02", hook("iifname fleet0 tcp dport 40000 drop"), GONE)
    said = refused("gpu-01 (fd00:f1ee::1) to gpu-02 (fd00:f1ee::2), port 40000: no answer: packets are dropped")
    assert "port 8001" not in said


def test_a_network_that_rejects(broken):
    broken("gpu-02", f"nft '{TABLE} {{ chain out {{ type filter hook output priority 0; "
           "tcp sport 8001 reject with tcp reset; }; }'", GONE)  # fmt: skip
    refused("to gpu-02 (fd00:f1ee::2), port 8001: ")


def test_a_path_for_small_packets_only(broken):
    """A stand-in for a switch with a smaller MTU whose ICMP is filtered."""
    broken("gpu-02", hook("iifname fleet0 meta length > 700 drop"), GONE)
    refused("gpu-01 (fd00:f1ee::1) to gpu-02", "small packets pass, full-sized ones do not")


def test_a_chain_of_others_that_drops_is_named_with_its_rule(broken):
    rule = "type filter hook input priority 0; policy accept; tcp dport 40000-41000 drop"
    broken("gpu-02", f"nft '{TABLE} {{ chain input {{ {rule}; }}; }}'", GONE)
    said = refused(
        "gpu-02: another firewall would drop what the fleet needs", "inet theirs input: its rule with handle"
    )
    assert "`tcp dport 40000-41000 drop`" in said


def test_what_the_controller_cannot_show_is_said(hosts):
    """It has no way to the second network: whether another firewall keeps strangers out of there is not known."""
    status, said = play(**six_only(firewall_managed_elsewhere=True))
    assert status == 0, said
    assert "the controller has no way to fd00:f1ee::1, not even to SSH there" in said


# -- lock-out -----------------------------------------------------------------------------------------------------------------


def table(host):
    return host.check_output("nft --stateless list table inet gpu_fleet")


def test_an_opening_of_the_ssh_port_is_refused_before_anything_is_changed(hosts):
    before = table(hosts["gpu-01"])
    openings = [{"name": "mine", "ports": ["22"], "from": []}]
    refused(
        "Ansible came in by SSH on port 22, which is not in firewall_ssh_ports",
        firewall_openings=openings,
        firewall_ssh_ports=[2222],
    )
    assert table(hosts["gpu-01"]) == before


def test_a_controller_that_cannot_come_back_gets_the_former_table(hosts):
    """The open connection goes on, a new one does not come through: something else drops it, which is gone after a while."""
    host = hosts["gpu-01"]
    before, file = table(host), host.file("/etc/gpu_fleet/firewall.nft").content_string
    drop = f"nft '{TABLE} {{ chain early {{ type filter hook prerouting priority -200; tcp dport 22 tcp flags syn / syn,ack drop; }}; }}'"
    # Later than the play has begun, and before the table is loaded: when the first file of the run is there (no name of a
    # process: modules come by standard input, and this very command would have that name in it).
    wait = "until ls -d /tmp/ansible_*network_facts_payload* >/dev/null 2>&1; do sleep 0.02; done; sleep 1"
    host.run_expect([0], "systemd-run --quiet --collect --unit=cut sh -c %s", f"{wait}; {drop}; sleep 45; {GONE}")
    began = time.monotonic()
    status, said = play(
        **six_only(firewall_openings=[{"name": "mine", "ports": ["9000"], "from": ["any"]}], firewall_return_after=12),
        # The lab's own patience for a connection is longer than the cut: its first try would come through at the end of it.
        ansible_ssh_timeout=5,
        ansible_ssh_retries=0,
    )
    assert status != 0, said
    assert "no new connection came through within 12 s" in said, said
    time.sleep(max(0.0, 60 - (time.monotonic() - began)))
    assert table(host) == before
    assert host.file("/etc/gpu_fleet/firewall.nft").content_string == file
    assert host.run("systemctl is-active gpu-fleet-firewall-return.timer").rc != 0


def test_a_users_own_opening_is_added_to_the_plans(hosts):
    openings = [{"name": "mine", "ports": ["9000"], "from": [SIX["stranger"]]}]
    status, said = play(**six_only(firewall_openings=openings))
    assert status == 0, said
    hosts["gpu-01"].run_expect([0], "systemd-run --quiet --collect --unit=listen python3 -c %s 9000", LISTENER)
    time.sleep(1)
    try:
        assert hears(hosts["stranger"], SIX["gpu-01"], [9000, 8001]) == {9000: "connected", 8001: "silence"}
        assert hears(hosts["gpu-02"], SIX["gpu-01"], [9000]) == {9000: "silence"}
    finally:
        hosts["gpu-01"].run("systemctl stop listen")


# -- ports that somebody has --------------------------------------------------------------------------------------------------


def test_a_foreign_listener_on_a_port_of_a_replica_is_named(hosts):
    hosts["gpu-02"].run_expect([0], "systemd-run --quiet --collect --unit=foreign python3 -c %s 8001", LISTENER)
    time.sleep(1)
    try:
        refused("gpu-02: port 8001 (rank_store of chat.0) is taken (python3, process", "foreign.service")
    finally:
        hosts["gpu-02"].run("systemctl stop foreign")


# -- no start without the table: over IPv4 again --------------------------------------------------------------------------------


def test_a_stranger_that_is_let_in_elsewhere(hosts, four, broken):
    """One host's table away, and another firewall said to decide, which keeps nobody out: the controller gets in there."""
    broken("gpu-02", "nft delete table inet gpu_fleet", "systemctl reload gpu-fleet-firewall")
    status, said = play(firewall_managed_elsewhere=True)
    assert status != 0, said
    assert f"gpu-02 ({four['gpu-02']}), port 40000: a connection from" in said
    assert "which is no peer, was let in" in said
    assert said.count("a connection from") == said.count(f"gpu-02 ({four['gpu-02']}), port")


def test_ranks_start_behind_the_table(hosts):
    status, said = play(serve=True)
    assert status == 0, said
    for name in ("gpu-01", "gpu-02"):
        assert hosts[name].service("vllm@chat.0").is_running


def test_the_proof_leaves_a_service_alone_that_runs(hosts):
    before = hosts["gpu-01"].check_output("systemctl show vllm@chat.0 --property=InvocationID --value")
    status, said = play(serve=True)
    assert status == 0, said
    assert hosts["gpu-01"].check_output("systemctl show vllm@chat.0 --property=InvocationID --value") == before


def told(host):
    """What the agent of a host's rank says of itself."""
    ask = "import urllib.request as u; print(u.urlopen('http://HOST:8003/', timeout=5).read().decode())".replace(
        "HOST", host.check_output("hostname")
    )
    return json.loads(host.check_output(f'python3 -c "{ask}"'))


def within(seconds, seen):
    """Waits until something is seen."""
    end = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < end
        time.sleep(1)


def test_what_the_gate_refuses_is_a_wait_of_all_ranks_and_no_start_in_vain(hosts):
    head, worker = hosts["gpu-01"], hosts["gpu-02"]
    within(90, lambda: told(head)["answered"])
    worker.run_expect([0], "nft delete table inet gpu_fleet; systemctl kill --signal=KILL --kill-whom=main vllm@chat.0")
    within(90, lambda: told(head)["waiting"] == "rank 1: the firewall does not guard its ports")
    time.sleep(35)  # two more starts that the gate refuses
    assert told(head)["restarts_without_answer"] <= 1
    assert not told(head)["limit_reached"]
    said = worker.check_output("journalctl -u vllm-agent@chat.0 -o cat")
    assert said.count("the firewall does not guard its ports: tried again every 15 s until it does") == 1
    worker.run_expect([0], "systemctl reload gpu-fleet-firewall")
    within(120, lambda: told(head)["probe"] and told(head)["probe"]["right"])


def test_no_rank_starts_while_the_table_is_not_loaded_and_each_does_when_it_is(hosts):
    host = hosts["gpu-02"]
    host.run_expect([0], "systemctl stop vllm-agent@single.1 vllm-agent@chat.0 vllm@single.1")
    host.run_expect([0], "nft delete table inet gpu_fleet")
    assert host.run("systemctl start vllm@single.1").rc != 0
    said = host.check_output("journalctl -u vllm@single.1 -n 20 -o cat")
    assert "The fleet's firewall table is not loaded" in said
    host.run_expect([0], "systemctl reload gpu-fleet-firewall")
    for _ in range(30):
        time.sleep(1)
        if host.service("vllm@single.1").is_running:
            return
    raise AssertionError("it did not start after the table was back")


# -- and over IPv6 alone ------------------------------------------------------------------------------------------------------


def test_ranks_and_their_agents_meet_over_ipv6_alone(hosts):
    status, said = play(serve=True, vllm_service_allow_outage=True, **six_only())
    assert status == 0, said
    head = hosts["gpu-01"]
    ask = f"import urllib.request as u; print(u.urlopen('http://[{SIX['gpu-01']}]:8003/', timeout=5).read().decode())"

    def state():
        return json.loads(head.check_output(f'python3 -c "{ask}"'))

    within(60, lambda: (state()["probe"] or {}).get("right"))
    before = state()["answered"]
    hosts["gpu-02"].run_expect([0], "systemctl kill --signal=KILL --kill-whom=main vllm@chat.0")
    within(90, lambda: state()["answered"] not in ("", before))
