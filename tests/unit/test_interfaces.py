"""Which interface and RDMA ports the ranks use, on hosts of every kind: right, or one clear finding."""

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import interfaces
from test_nccl import FOUR, facts, interface, judge, said

LO = interface("lo", "127.0.0.1/8", "::1/128")
PEER = {"gpu-02": "10.1.0.2"}


def way(dev="eth1", source="10.1.0.1", via=None, error=None):
    return {"dev": dev, "source": source, "via": via, "error": error}


def across(shown=None, way_to_peer=None, peers=PEER, **settings):
    """The judgement of a host that has a peer."""
    address = next(iter(peers.values()))
    return judge(shown=shown, routes={address: way_to_peer or way()}, peers=peers, **settings)


def one(result):
    (finding,) = said(result.findings)
    assert finding.startswith("gpu-01: ")
    return finding


# -- what carries the address ---------------------------------------------------------------------------------------------


def test_a_bond_is_named_not_its_ports():
    ports = [interface(name, master="bond0", speed=100000) for name in ("eth2", "eth3")]
    bond = interface("bond0", "10.1.0.1", kind="bond", lower=["eth2", "eth3"])
    result = across([LO, *ports, bond], way("bond0"))
    assert (result.interface, said(result.findings)) == ("bond0", [])
    fix = "eth2 is only a port of it"
    assert fix in one(across([LO, *ports, bond], way("bond0"), interface="eth2"))


def test_a_bond_without_a_working_port_says_which_are_dead():
    ports = [interface("eth2", up=False, running=False), interface("eth3", running=False)]
    bond = interface("bond0", "10.1.0.1", kind="bond", lower=["eth2", "eth3"], running=False)
    finding = one(across([LO, *ports, bond], way("bond0")))
    assert "bond0 is up, but has no carrier: of what it stands on, eth2 is down, eth3 has no carrier" in finding
    assert "ip link set eth2 up" in finding


def test_a_vlan_is_taken_with_its_whole_name_and_told_when_its_parent_is_down():
    parent = interface("eth1")
    vlan = interface("eth1.100", "10.1.0.1", kind="vlan", lower=["eth1"])
    result = across([LO, parent, vlan], way("eth1.100"))
    assert result.block == f"NCCL_SOCKET_IFNAME==eth1.100\n{FOUR}"
    down = [{**parent, "up": False, "running": False}, {**vlan, "running": False}]
    assert "eth1.100 is up, but has no carrier: of what it stands on, eth1 is down" in one(across([LO, *down]))
    assert "eth1 is only a parent of it" in one(across([LO, parent, vlan], way("eth1.100"), interface="eth1"))


def test_a_bridge_of_the_host_itself_is_taken():
    bridge = interface("br0", "10.1.0.1", kind="bridge", lower=["eth1"])
    result = across([LO, interface("eth1", master="br0"), bridge], way("br0"))
    assert (result.interface, said(result.findings)) == ("br0", [])


@pytest.mark.parametrize("name", ["docker0", "virbr0", "br-0123456789ab", "lxcbr0", "cni0"])
def test_a_bridge_for_guests_is_no_network_of_the_fleet(name):
    shown = [LO, interface(name, "172.17.0.1", kind="bridge")]
    finding = one(across(shown, way(name, "172.17.0.1"), address="172.17.0.1"))
    assert f"172.17.0.1 is on {name}, a bridge for guests of this host, which gpu-02 cannot reach" in finding
    alone = judge(shown=shown, address="172.17.0.1")
    assert (alone.interface, alone.findings) == (name, [])


def test_loopback_is_refused_only_where_there_are_peers():
    assert "loopback interface, which gpu-02 cannot reach" in one(across([LO], way("lo"), address="127.0.0.1"))
    assert judge(shown=[LO], address="127.0.0.1").findings == []


@pytest.mark.parametrize(
    ("flag", "word"),
    [("dadfailed", "another host has the same address"), ("tentative", "still looks"), ("deprecated", "deprecated")],
)
def test_an_address_that_the_kernel_does_not_use(flag, word):
    shown = [LO, interface("eth1", "fd00::1", unusable={"fd00::1": flag})]
    finding = one(judge(shown=shown, address="fd00::1"))
    assert "fd00::1 on eth1: " in finding
    assert word in finding


# -- several addresses, IPv6 ----------------------------------------------------------------------------------------------


def test_the_fleets_address_has_to_be_the_one_that_nccl_and_gloo_take():
    shown = [LO, interface("eth1", "10.1.0.9", "10.1.0.1")]
    finding = one(across(shown))
    assert "NCCL and gloo take its first one, 10.1.0.9, not 10.1.0.1" in finding
    assert judge(shown=shown).findings == []
    assert across([LO, interface("eth1", "10.1.0.1", "10.1.0.9")]).findings == []


def test_ipv6_only_hosts_are_served():
    shown = [LO, interface("eth1", "fd00::1", "fe80::1")]
    result = across(shown, way(source="fd00::1"), {"gpu-02": "fd00::2"}, address="fd00:0::1")
    assert (result.block, result.findings) == ("NCCL_SOCKET_IFNAME==eth1\nNCCL_SOCKET_FAMILY=AF_INET6", [])


def test_ipv6_beside_ipv4_is_told_since_gloo_takes_the_latter():
    shown = [LO, interface("eth1", "10.1.0.1", "fd00::1")]
    finding = one(across(shown, way(source="fd00::1"), {"gpu-02": "fd00::2"}, address="fd00::1"))
    assert "eth1 has an IPv4 address, too, and gloo takes that one, 10.1.0.1, not fd00::1" in finding


def test_a_link_local_address_is_refused():
    shown = [LO, interface("eth1", "fe80::1")]
    assert "link-local" in one(across(shown, way(source="fe80::1"), {"gpu-02": "fe80::2"}, address="fe80::1"))


# -- ways to the peers ----------------------------------------------------------------------------------------------------


def test_networks_that_do_not_meet_are_one_finding_for_all_peers():
    peers = {"gpu-02": "10.2.0.2", "gpu-03": "10.2.0.3"}
    none = {address: way(None, None, error="Network is unreachable") for address in peers.values()}
    finding = one(judge(routes=none, peers=peers))
    assert "do not meet; no way to gpu-02 (10.2.0.2): Network is unreachable, gpu-03 (10.2.0.3): " in finding


def test_a_way_by_another_interface_is_found():
    finding = one(across(way_to_peer=way("eth0", "10.0.0.1", "10.0.0.254")))
    assert "it is on eth1, but packets leave to gpu-02 (10.1.0.2) by eth0" in finding


def test_a_way_from_another_address_is_found():
    assert "another address than 10.1.0.1: gpu-02 sees 10.1.0.77" in one(across(way_to_peer=way(source="10.1.0.77")))


def test_a_routed_network_is_right():
    assert across(way_to_peer=way(via="10.1.0.254"), peers={"gpu-02": "10.7.0.2"}).findings == []


# -- multi-homed hosts ----------------------------------------------------------------------------------------------------

SLOW = interface("eno1", "10.0.0.1", speed=1000)
FAST = interface("eth4", "10.1.0.1", speed=100000)


def other(slow=True, fast=True, **more):
    shown = [LO, interface("eno1", "10.0.0.2", speed=1000)] if slow else [LO]
    return facts([*shown, interface("eth5", "10.1.0.2", speed=100000, **more)] if fast else shown)


def homed(there, stated=False, shown=(LO, SLOW, FAST), peers=None):
    peers = peers or {"gpu-02": "10.0.0.2"}
    settings = {"address": "10.0.0.1", "address_stated": stated, "others": {"gpu-02": there} if there else {}}
    return judge(shown=list(shown), routes={"10.0.0.2": way("eno1", "10.0.0.1")}, peers=peers, **settings)


def test_a_faster_network_that_all_share_stops_where_nobody_chose():
    finding = one(homed(other()))
    assert "10.0.0.1 is on eno1 with 1 Gb/s, and all hosts of the replica share a network with 100 Gb/s" in finding
    assert (
        "set fleet_address of each: gpu-01 10.1.0.1, gpu-02 10.1.0.2. To stay, set fleet_address to 10.0.0.1" in finding
    )


def test_it_is_a_note_where_somebody_chose():
    result = homed(other(), stated=True)
    assert result.findings == []
    assert ["share a network with 100 Gb/s" in note for note in said(result.notes)] == [True]


@pytest.mark.parametrize(
    "there",
    [
        other(fast=False),
        other(running=False),
        other(unusable={"10.1.0.2": "dadfailed"}),
        facts([LO, SLOW, interface("docker0", "10.1.0.2", speed=100000)]),
        facts([LO, SLOW, interface("eth5", "10.9.0.2", speed=100000)]),
        facts([LO, SLOW, interface("eth5", "10.1.0.1", speed=100000)]),
        None,
    ],
    ids=["none", "down", "duplicate", "guests", "another-network", "same-address", "not-in-the-play"],
)
def test_a_faster_network_counts_only_when_every_host_has_it_and_is_known(there):
    result = homed(there)
    assert (said(result.findings), said(result.notes)) == ([], [])


def test_a_network_is_as_fast_as_its_slowest_host_and_a_bond_as_its_ports():
    slower = facts([LO, interface("eno1", "10.0.0.2", speed=1000), interface("eth5", "10.1.0.2", speed=1000)])
    assert homed(slower).findings == []
    ports = [interface(name, master="bond0", speed=25000) for name in ("eth6", "eth7")]
    bond = interface("bond0", "10.1.0.1", kind="bond", lower=["eth6", "eth7"])
    assert "with 50 Gb/s" in one(homed(other(), shown=(LO, SLOW, *ports, bond)))
    assert interfaces.speed(facts([*ports, bond]), "bond0") == 50000


def test_other_mtu_of_a_peer_is_a_note():
    there = facts([LO, interface("eth5", "10.1.0.2", mtu=9000)])
    (note,) = said(across(others={"gpu-02": there}).notes)
    assert "eth1 has MTU 1500, eth5 of gpu-02 9000" in note


def test_hosts_outside_the_play_change_nothing_that_is_written():
    there = facts([LO, interface("eth1", "10.1.0.2", mtu=9000)], rdma=[])
    assert across().block == across(others={"gpu-02": there}).block


# -- RDMA -----------------------------------------------------------------------------------------------------------------


def port(device, number=1, *, state="ACTIVE", layer="InfiniBand", rate=400.0, netdev=None):
    physical = "LinkUp" if state == "ACTIVE" else "Disabled"
    more = {"phys_state": physical, "link_layer": layer, "rate": rate, "netdev": netdev}
    return {"device": device, "port": number, "state": state, **more}


def test_the_fastest_ports_that_work_are_named_exactly_and_ucx_gets_the_same():
    ports = [port("mlx5_0"), port("mlx5_1", state="DOWN"), port("mlx5_10"), port("mlx5_2", rate=100.0)]
    result = judge(rdma_ports=ports)
    assert "NCCL_IB_HCA==mlx5_0:1,mlx5_10:1" in result.block.splitlines()
    assert result.net_devices == "mlx5_0:1,mlx5_10:1,eth1"
    told = said(result.notes)
    assert any("mlx5_1:1 is left out: its state is DOWN (physically Disabled)" in note for note in told)
    assert any("mlx5_2:1 is left out: InfiniBand with 400 Gb/s is there" in note for note in told)


def test_without_rdma_nothing_is_said_of_it():
    result = judge()
    assert "NCCL_IB" not in result.block
    assert result.net_devices == "eth1"


@pytest.mark.parametrize(
    ("netdev", "used"),
    [
        (interface("eth4", "10.4.0.1"), True),
        (interface("eth4", "fe80::1"), False),
        (interface("eth4", "10.4.0.1", running=False), False),
        (interface("eth9", "10.4.0.1"), False),
        (interface("eth4", master="bond4"), True),
    ],
)
def test_a_roce_port_needs_an_interface_with_an_address(netdev, used):
    shown = [LO, interface("eth1", "10.1.0.1"), netdev, interface("bond4", "10.4.0.9", kind="bond", lower=["eth4"])]
    result = judge(shown=shown, rdma_ports=[port("mlx5_0", layer="Ethernet", netdev="eth4")])
    assert result.rdma == (["mlx5_0:1"] if used else [])


def test_infiniband_goes_before_roce_of_the_same_rate():
    shown = [LO, interface("eth1", "10.1.0.1"), interface("eth4", "10.4.0.1")]
    ports = [port("mlx5_0", layer="Ethernet", netdev="eth4"), port("mlx5_1")]
    assert judge(shown=shown, rdma_ports=ports).rdma == ["mlx5_1:1"]


def test_named_ports_are_checked():
    ports = [port("mlx5_0"), port("mlx5_1", state="DOWN"), port("mlx5_2"), port("mlx5_2", 2)]
    assert judge(rdma_ports=ports, rdma=["mlx5_0:1", "mlx5_2"]).rdma == ["mlx5_0:1", "mlx5_2:1", "mlx5_2:2"]
    assert "mlx5_1:1 has the state DOWN" in one(judge(rdma_ports=ports, rdma=["mlx5_1:1"]))
    assert "there is no RDMA port mlx5_0:2. Ports here: mlx5_0:1 ACTIVE, " in one(
        judge(rdma_ports=ports, rdma=["mlx5_0:2"])
    )


def test_no_port_wanted_is_said_to_nccl():
    result = judge(rdma_ports=[port("mlx5_0")], rdma=[])
    assert (result.rdma, result.net_devices) == ([], "eth1")
    assert "NCCL_IB_DISABLE=1" in result.block.splitlines()


def test_the_users_own_variable_stands_alone():
    result = judge(rdma_ports=[port("mlx5_0"), port("mlx5_1")], variables={"NCCL_IB_HCA": "=mlx5_1:1"})
    assert [line for line in result.block.splitlines() if "HCA" in line] == ["NCCL_IB_HCA==mlx5_1:1"]


@pytest.mark.parametrize(
    ("theirs", "word"), [([], "no RDMA port that works"), ([port("mlx5_0", state="DOWN")], "no RDMA port that works")]
)
def test_hosts_of_one_replica_with_different_networks_are_found(theirs, word):
    there = facts([LO, interface("eth1", "10.1.0.2")], rdma=theirs)
    finding = one(across(rdma_ports=[port("mlx5_0")], others={"gpu-02": there}))
    assert f"here is InfiniBand, gpu-02 has {word}" in finding
    assert "nccl_rdma_devices: []" in finding


def test_hosts_of_one_replica_with_the_same_network_are_right():
    there = facts([LO, interface("eth1", "10.1.0.2")], rdma=[port("mlx5_7")])
    assert across(rdma_ports=[port("mlx5_0")], others={"gpu-02": there}).findings == []
