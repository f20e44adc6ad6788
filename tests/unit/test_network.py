"""Reading a host's network: recorded answers of iproute2 6.1 (fixtures/network), sysfs and proc as the kernel documents them.

The recording is of a network namespace with veth pairs, a macvlan and a bridge: e2 (10.1.0.1) with e2m on it (IPv6 alone),
e4 in br0 (10.2.0.1), e5 whose other end is down, e6 that is down itself. A bond and a VLAN are written in the same form.
"""

import json
import os
import socket

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import network
from conftest import REPOSITORY

RECORDED = REPOSITORY / "tests/unit/fixtures/network"


@pytest.fixture
def sysfs(tmp_path):
    """Write files and links below a folder that plays /sys: {path: text, or None for a folder entry}."""

    def make(**files):
        for path, text in files.items():
            place = tmp_path / path.replace("__", "/")
            place.parent.mkdir(parents=True, exist_ok=True)
            if text is None:
                place.mkdir(exist_ok=True)
            else:
                place.write_text(text)
        return str(tmp_path)

    return make


@pytest.fixture
def recorded(sysfs):
    shown = json.loads((RECORDED / "address.json").read_text())
    root = sysfs(e2__speed="10000\n", e2m__lower_e2=None, br0__lower_e4=None, br0__speed="-1\n", e5__speed="")
    return {item["name"]: item for item in network.interfaces(shown, root)}


def test_names_kinds_and_states(recorded):
    state = {name: (item["kind"], item["up"], item["running"]) for name, item in recorded.items() if name[0] != "p"}
    assert state == {
        "lo": (None, True, True),
        "e2": ("veth", True, True),
        "e4": ("veth", True, True),
        "e5": ("veth", True, False),
        "e6": ("veth", False, False),
        "e2m": ("macvlan", True, True),
        "br0": ("bridge", True, True),
    }


def test_what_an_interface_stands_on_and_is_part_of(recorded):
    assert (recorded["br0"]["lower"], recorded["e2m"]["lower"], recorded["e2"]["lower"]) == (["e4"], ["e2"], [])
    assert (recorded["e4"]["master"], recorded["e2"]["master"]) == ("br0", None)


def test_speed_where_the_kernel_knows_one(recorded):
    assert [recorded[name]["speed"] for name in ("e2", "br0", "e5", "lo")] == [10000, None, None, None]


def test_addresses_keep_the_kernels_order_with_those_that_cannot_be_used(recorded):
    assert recorded["br0"]["addresses"][:3] == ["10.2.0.1", "10.2.0.9", "fd00:2::1"]
    assert recorded["br0"]["networks"][0] == "10.2.0.1/24"
    assert recorded["br0"]["unusable"] == {"fd00:2::1": "deprecated"}
    assert recorded["e5"]["unusable"] == {"fd00:4::1": "tentative"}


def test_a_failed_duplicate_check_goes_before_the_flag_it_comes_with():
    address = {"local": "fd00::1", "prefixlen": 64, "tentative": True, "dadfailed": True}
    (item,) = network.interfaces([{"ifname": "eth0", "flags": ["UP"], "operstate": "UP", "addr_info": [address]}])
    assert item["unusable"] == {"fd00::1": "dadfailed"}


def test_a_bond_and_a_vlan(sysfs):
    root = sysfs(
        bond0__lower_eth2=None, bond0__lower_eth3=None, bond0__speed="200000", **{"bond0.100__lower_bond0": None}
    )
    bond = {"ifname": "bond0", "flags": ["MASTER", "UP"], "operstate": "UP", "linkinfo": {"info_kind": "bond"}}
    vlan = {"ifname": "bond0.100", "link": "bond0", "flags": ["UP"], "operstate": "LOWERLAYERDOWN"}
    bond, vlan = network.interfaces([bond, {**vlan, "linkinfo": {"info_kind": "vlan"}}], root)
    assert (bond["kind"], bond["lower"], bond["speed"], bond["running"]) == ("bond", ["eth2", "eth3"], 200000, True)
    assert (vlan["kind"], vlan["lower"], vlan["running"]) == ("vlan", ["bond0"], False)


def ways():
    """{address: what `ip -json route get ADDRESS` printed}."""
    parts = (RECORDED / "routes.txt").read_text().split("== ")[1:]
    return {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in parts}


@pytest.mark.parametrize(
    ("address", "dev", "source", "via"),
    [
        ("10.1.0.2", "e2", "10.1.0.1", None),
        ("fd00:1::2", "e2m", "fd00:1::1", None),
        ("10.6.0.1", "e2", "10.1.0.1", "10.1.0.9"),
        ("10.7.0.1", "e2m", "10.1.0.1", "fd00:1::9"),
        ("10.2.0.1", "lo", "10.2.0.1", None),
    ],
)
def test_a_way(address, dev, source, via):
    found = network.route(json.loads(ways()[address]), None)
    assert found == {"dev": dev, "source": source, "via": via, "error": None}


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("10.8.0.1", "No route to host"),
        ("10.9.0.1", "Network is unreachable"),
        ("fd00:9::1", "Network is unreachable"),
    ],
)
def test_no_way(address, error):
    assert network.route([], ways()[address])["error"] == error


def test_a_route_that_says_so_itself_is_no_way():
    found = network.route([{"type": "unreachable", "dst": "fd00::1", "dev": "lo"}], None)
    assert (found["dev"], found["error"]) == (None, "the route is unreachable")


def test_rdma_ports_by_state_rate_and_interface(sysfs):
    root = sysfs(
        mlx5_0__ports__1__state="4: ACTIVE\n",
        mlx5_0__ports__1__phys_state="5: LinkUp\n",
        mlx5_0__ports__1__link_layer="InfiniBand\n",
        mlx5_0__ports__1__rate="400 Gb/sec (4X NDR)\n",
        mlx5_1__ports__1__state="1: DOWN\n",
        mlx5_1__ports__1__phys_state="3: Disabled\n",
        mlx5_1__ports__1__link_layer="Ethernet\n",
        mlx5_1__ports__1__rate="2.5 Gb/sec (1X SDR)\n",
        mlx5_1__ports__1__gid_attrs__ndevs__0="eth4\n",
        mlx5_1__ports__2__state="4: ACTIVE\n",
        mlx5_1__device__net__eth5=None,
    )
    active = {"device": "mlx5_0", "port": 1, "state": "ACTIVE", "phys_state": "LinkUp", "link_layer": "InfiniBand"}
    first, second, third = network.rdma_ports(root)
    assert first == {**active, "rate": 400.0, "netdev": None}
    assert (second["state"], second["phys_state"], second["rate"], second["netdev"]) == (
        "DOWN",
        "Disabled",
        2.5,
        "eth4",
    )
    assert (third["port"], third["rate"], third["netdev"]) == (2, None, "eth5")


def test_a_host_without_rdma_has_no_ports(tmp_path):
    assert network.rdma_ports(str(tmp_path / "infiniband")) == []


TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000   990        0 4711 1 0000 100 0 0 10 0
   1: 0100000A:0016 0200000A:9C40 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0000 20 4 31 10 -1
"""
TCP6 = """\
  sl  local_address                         remote_address                        st tx rx tr uid timeout inode
   0: 00000000000000000000000000000000:01BB 00000000000000000000000000000000:0000 0A 0:0 00:0 0 0 0 4713 1 0000
"""


def test_listeners_with_process_and_unit(sysfs):
    cgroup = "1:name=systemd:/system.slice/system-vllm.slice/vllm@chat.0.service\n0::/system.slice/x.service/inner\n"
    root = sysfs(net__tcp=TCP, net__tcp6=TCP6, **{"812__comm": "python3\n", "812__cgroup": cgroup, "812__fd": None})
    os.symlink("socket:[4711]", f"{root}/812/fd/3")
    os.symlink("socket:[4712]", f"{root}/812/fd/4")
    foreign, own = network.listeners(root)
    assert foreign == {"port": 443, "uid": 0, "address": "::", "pid": None, "process": None, "unit": None}
    assert (own["port"], own["address"], own["uid"], own["pid"]) == (8000, "127.0.0.1", 990, 812)
    assert (own["process"], own["unit"]) == ("python3", "x.service")


def test_own_listener_is_found_in_the_machines_own_proc():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (found,) = [item for item in network.listeners() if item["port"] == port]
    assert (found["pid"], found["address"], found["uid"]) == (os.getpid(), "127.0.0.1", os.getuid())
