"""The interface, the ports and the file of NCCL: what is chosen, and what is refused."""

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import nccl
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data

KNOWN = data.load("nccl_variables")


def interface(name, *addresses, up=True, running=True):
    return {"name": name, "up": up, "running": running, "mtu": 1500, "addresses": list(addresses)}


def judge(conf=None, interfaces=None, listeners=(), **settings):
    network = {
        "interfaces": interfaces
        or [interface("lo", "127.0.0.1"), interface("eth0", "10.0.0.1"), interface("eth1", "10.1.0.1", "fd00::1")],
        "listeners": [{"port": port, "uid": uid} for port, uid in listeners],
        "nccl_conf": conf,
        "user_uid": 990,
    }
    usual = {
        "host": "gpu-01",
        "address": "10.1.0.1",
        "interface": None,
        "variables": {},
        "port_range": "40000-60999",
        "reserved_ports": [],
        "fixed_ports": [],
        "gateway": False,
    }
    return nccl.plan(network, {**usual, **settings}, KNOWN)


def said(found):
    return [str(item) for item in found]


def test_the_interface_with_the_fleets_address_is_chosen():
    result = judge()
    assert (result.interface, result.block, said(result.findings)) == ("eth1", "NCCL_SOCKET_IFNAME==eth1", [])


def test_an_ipv6_address_is_found_however_it_is_written_and_sets_the_family():
    result = judge(address="fd00:0:0::1")
    assert result.block == "NCCL_SOCKET_IFNAME==eth1\nNCCL_SOCKET_FAMILY=AF_INET6"


def test_a_named_interface_is_taken_when_it_carries_the_address():
    assert judge(interface="eth1").interface == "eth1"


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"interface": "eth7"}, "there is no interface eth7. Name one of lo, eth0, eth1"),
        ({"interface": "eth0"}, "eth0 does not carry the fleet's address 10.1.0.1; it is on eth1"),
        ({"address": "10.9.9.9"}, "no interface carries 10.9.9.9"),
        ({"address": "gpu-01.example"}, "'gpu-01.example' is no IP address"),
    ],
)
def test_a_wrong_interface_or_address_is_one_clear_finding(settings, word):
    (finding,) = said(judge(**settings).findings)
    assert word in finding
    assert finding.startswith("gpu-01: ")


@pytest.mark.parametrize(
    ("state", "word"), [({"up": False, "running": False}, "eth1 is down"), ({"running": False}, "has no carrier")]
)
def test_an_interface_that_is_down_is_found(state, word):
    (finding,) = said(judge(interfaces=[interface("eth1", "10.1.0.1", **state)]).findings)
    assert word in finding


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("NCCL_PORT_RANGE", "1-2", "Set nccl_port_range"),
        ("NCCL_TIMEOUT", "30", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"),
        ("NCCL_COMM_ID", "10.0.0.1:1", "they would collide"),
        ("NCCL_SOCKET_IFNAME", "eth0", "Set nccl_interface"),
        ("NCCL_DEBUGG", "WARN", "is no variable that NCCL reads"),
        ("nccl_debug", "WARN", "is no variable that NCCL reads"),
        ("NCCL_DEBUG", '"WARN"', "Write the bare value"),
        ("NCCL_DEBUG", "WARN ", "Write the bare value"),
        ("NCCL_DEBUG", "", "Write the bare value"),
    ],
)
def test_variables_that_do_nothing_or_harm_are_refused(name, value, word):
    (finding,) = said(judge(variables={name: value}).findings)
    assert word in finding


def test_variables_of_nccl_are_written_in_order():
    result = judge(variables={"NCCL_IB_HCA": "=mlx5_0:1", "NCCL_DEBUG": "WARN"})
    assert result.block.splitlines()[1:] == ["NCCL_DEBUG=WARN", "NCCL_IB_HCA==mlx5_0:1"]


def test_lines_of_others_are_notes_where_they_do_nothing_and_findings_where_they_contradict():
    conf = "# BEGIN gpu_fleet\nNCCL_SOCKET_IFNAME==eth9\n# END gpu_fleet\n#x\nNCCL_TIMEOUT=3\nNCCL_DEBUG = WARN\nNCCL_SOCKET_IFNAME=eth0\nNCCL_IB_HCA=a\n"
    result = judge(conf)
    (finding,) = said(result.findings)
    assert "line 'NCCL_SOCKET_IFNAME=eth0': the role would write NCCL_SOCKET_IFNAME==eth1" in finding
    assert ["NCCL_TIMEOUT" in note or "spaces" in note for note in said(result.notes)] == [True, True]


def test_the_range_is_set_and_nothing_is_reserved_by_default():
    assert judge().sysctl == {"net.ipv4.ip_local_port_range": "40000 60999"}


def test_reserved_ports_inside_the_range_are_kept_those_outside_left_out():
    result = judge(reserved_ports=["50051", "50000-50010", "8000", "60990-65000"], fixed_ports=["50051", "8000"])
    assert result.sysctl["net.ipv4.ip_local_reserved_ports"] == "50000-50010,50051,60990-60999"
    assert result.findings == []


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"port_range": "40000-43998"}, "has 3999 ports, fewer than 4000"),
        ({"port_range": "40000-59998", "gateway": True}, "has 19999 ports, fewer than 20000 for a gateway"),
        ({"port_range": "many"}, "'many' is no range of ports"),
        ({"port_range": "1000-60999"}, "begins below 1024"),
        ({"fixed_ports": ["45000"]}, "port 45000 of a service lies inside 40000-60999"),
        ({"reserved_ports": ["x"]}, "'x' is no port"),
    ],
)
def test_a_wrong_range_is_one_clear_finding(settings, word):
    (finding,) = said(judge(**settings).findings)
    assert word in finding


@pytest.mark.parametrize("settings", [{"port_range": "40000-43999"}, {"port_range": "40000-59999", "gateway": True}])
def test_the_smallest_ranges_that_are_allowed(settings):
    assert judge(**settings).findings == []


def test_a_strangers_listener_inside_the_range_is_a_note_the_services_own_is_none():
    result = judge(listeners=[(45001, 0), (45002, 990), (22, 0), (50051, 0)], reserved_ports=["50051"])
    (note,) = said(result.notes)
    assert "somebody listens inside 40000-60999: 45001. " in note
    assert result.findings == []
