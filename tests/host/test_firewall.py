"""Only the fleet reaches the fleet's ports, with real connections, after hands and a reboot."""

from __future__ import annotations

import json

import pytest
import testinfra

RANK, IN_RANGE, API, NOT_OPENED, ELSEWHERE = 29501, 45000, 8000, 9000, 29700
PORTS = (RANK, IN_RANGE, API, NOT_OPENED, ELSEWHERE)
LISTENER = (
    "import selectors, socket; s = selectors.DefaultSelector()\n"
    f"for port in {PORTS}:\n"
    "    l = socket.create_server(('::', port), family=socket.AF_INET6, dualstack_ipv6=True); s.register(l, 1)\n"
    "while True:\n"
    "    for key, _ in s.select(): key.fileobj.accept()[0].close()\n"
)
# All at once, since each drop takes the whole second. A refused connection would say that the packet came through to a
# port nobody listens on: only silence is a drop.
CONNECT = (
    "import concurrent.futures, json, socket, sys\n"
    "def say(where):\n"
    "    try: socket.create_connection(tuple(where), 1); return 'connected'\n"
    "    except TimeoutError: return 'silence'\n"
    "    except OSError as error: return str(error)\n"
    "wanted = json.loads(sys.argv[1])\n"
    "print(json.dumps(list(concurrent.futures.ThreadPoolExecutor(32).map(say, wanted))))\n"
)
SIXES = {"gpu-01": "fd00:f1ee::1", "gpu-02": "fd00:f1ee::2", "stranger": "fd00:f1ee::9"}


@pytest.fixture(scope="module")
def fleet(request):
    """The three hosts by name, listening (gpu-02) and with an IPv6 address each."""
    inventory = request.config.option.ansible_inventory
    hosts = {name: testinfra.get_host(f"ansible://{name}", ansible_inventory=inventory) for name in SIXES}
    for name, address in SIXES.items():
        hosts[name].run_expect([0], f"ip -6 address replace {address}/64 dev host0 nodad")
    for name in ("gpu-01", "gpu-02"):
        hosts[name].run_expect([0], "systemd-run --quiet --collect --unit=listen python3 -c %s", LISTENER)
    yield hosts
    for name in ("gpu-01", "gpu-02"):
        hosts[name].run_expect([0], "systemctl stop listen")


def say(host, targets):
    """What a host hears from each (address, port): connected, silence or the error."""
    return dict(
        zip(targets, json.loads(host.check_output("python3 -c %s %s", CONNECT, json.dumps(targets))), strict=True)
    )


@pytest.fixture(scope="module")
def said(fleet):
    """{host: {(address, port): what it heard}} for all that the tests ask."""
    own = address_of(fleet["gpu-02"])
    plain = [(name, port) for name in ("gpu-01", "gpu-02") for port in (22, *PORTS)]
    six = [(SIXES["gpu-02"], port) for port in (RANK, API)]
    return {
        "gpu-01": say(fleet["gpu-01"], plain + six),
        "gpu-02": say(fleet["gpu-02"], [("gpu-01", port) for port in PORTS] + [("127.0.0.1", RANK), (own, RANK)]),
        "stranger": say(fleet["stranger"], plain + six),
    }


def address_of(host):
    return host.check_output("hostname --all-ip-addresses").split()[0]


@pytest.mark.parametrize("port", [RANK, IN_RANGE, API, NOT_OPENED])
def test_the_peer_passes(said, port):
    assert said["gpu-01"]["gpu-02", port] == "connected"
    assert said["gpu-02"]["gpu-01", port] == "connected"


@pytest.mark.parametrize("port", [RANK, IN_RANGE])
@pytest.mark.parametrize("target", ["gpu-01", "gpu-02"])
def test_a_stranger_is_dropped(said, target, port):
    assert said["stranger"][target, port] == "silence"


@pytest.mark.parametrize("port", [22, API, NOT_OPENED])
def test_a_stranger_reaches_what_is_open_to_all_or_none_of_ours(said, port):
    assert said["stranger"]["gpu-02", port] == "connected"


def test_an_opening_of_another_interface_is_none_here(said):
    assert said["gpu-01"]["gpu-02", ELSEWHERE] == "silence"


def test_ipv6_is_judged_alike(said):
    assert said["gpu-01"][SIXES["gpu-02"], RANK] == "connected"
    assert said["stranger"][SIXES["gpu-02"], RANK] == "silence"
    assert said["stranger"][SIXES["gpu-02"], API] == "connected"


def test_loopback_passes_also_by_the_hosts_own_address(said, fleet):
    assert said["gpu-02"]["127.0.0.1", RANK] == "connected"
    assert said["gpu-02"][address_of(fleet["gpu-02"]), RANK] == "connected"


def test_drops_are_counted(said, fleet):
    assert said["stranger"]["gpu-02", RANK] == "silence"
    line = next(
        line for line in fleet["gpu-02"].check_output("nft list table inet gpu_fleet").splitlines() if " drop " in line
    )
    assert int(line.split("packets ")[1].split()[0]) > 0


def test_an_established_connection_outlives_a_reload(fleet):
    """A connection from a port in the range to somebody outside the fleet: answers are no new connections."""
    code = (
        "import socket, subprocess; c = socket.socket(); c.bind(('', 50505)); c.connect(('stranger', 22)); c.recv(8)\n"
        "subprocess.run(['nft', '-f', '/etc/gpu_fleet/firewall.nft'], check=True)\n"
        "c.send(b'SSH-2.0-test\\r\\n'); c.settimeout(3); print(len(c.recv(4096)) > 0)"
    )
    assert fleet["gpu-02"].check_output("python3 -c %s", code) == "True"


@pytest.mark.parametrize("verb", ["start", "reload", "restart", "stop"])
def test_the_table_is_back_whatever_is_done_to_nftables_service(fleet, verb):
    host = fleet["gpu-01"]
    before = host.check_output("nft --stateless list table inet gpu_fleet")
    host.run_expect([0], f"systemctl {'stop' if verb == 'start' else 'start'} nftables.service")
    host.run_expect([0], "nft add table ip somebody_else")
    host.run_expect([0], f"systemctl {verb} nftables.service")
    assert host.check_output("nft --stateless list table inet gpu_fleet") == before
    assert "somebody_else" not in host.check_output("nft list tables"), "nothing was flushed: nothing was tested"


def test_tables_of_others_are_left_alone(fleet):
    host = fleet["gpu-01"]
    host.run_expect([0], "nft add table ip theirs")
    host.run_expect([0], "systemctl reload gpu-fleet-firewall.service")
    assert "table ip theirs" in host.check_output("nft list tables")
    host.run_expect([0], "nft delete table ip theirs")


@pytest.mark.parametrize("name", ["gpu-01", "gpu-02"])
def test_the_unit_is_on_and_no_unit_failed(fleet, name):
    assert fleet[name].service("gpu-fleet-firewall").is_enabled
    assert fleet[name].check_output("systemctl list-units --failed --plain --no-legend") == ""
    fleet[name].run_expect([0], "nft --check --file /etc/gpu_fleet/firewall.nft")
    assert fleet[name].file("/etc/gpu_fleet/firewall.nft").mode == 0o644


def test_the_stranger_was_not_touched(fleet):
    assert not fleet["stranger"].exists("nft")
