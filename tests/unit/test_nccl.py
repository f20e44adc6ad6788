"""The interface, the ports and the file of NCCL: what is chosen, and what is refused."""

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import interfaces, nccl
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data

KNOWN = data.load("nccl_variables")
FOUR = "NCCL_SOCKET_FAMILY=AF_INET"


def interface(name, *addresses, up=True, running=True, **more):
    """What network_facts returns of an interface; of an address without a prefix the usual one."""
    bare = [address.partition("/")[0] for address in addresses]
    usual = {4: 24, 6: 64}
    networks = [text if "/" in text else f"{text}/{usual[interfaces.family(text)]}" for text in addresses]
    plain = {"kind": None, "speed": None, "mtu": 1500, "master": None, "lower": [], "unusable": {}}
    return {"name": name, "up": up, "running": running, "addresses": bare, "networks": networks, **plain, **more}


def facts(shown=None, conf=None, *, listeners=(), routes=None, rdma=(), reserved="", sysctl=None):
    """What network_facts returns of a host."""
    return {
        "interfaces": shown
        or [interface("lo", "127.0.0.1"), interface("eth0", "10.0.0.1"), interface("eth1", "10.1.0.1", "fd00::1")],
        "listeners": [{"port": port, "uid": uid, **dict(*more)} for port, uid, *more in listeners],
        "nccl_conf": conf,
        "user_uid": 990,
        "routes": routes or {},
        "rdma": list(rdma),
        "reserved_ports": reserved,
        "sysctl_text": sysctl,
    }


def judge(
    conf=None,
    shown=None,
    *,
    listeners=(),
    routes=None,
    rdma_ports=(),
    reserved="",
    sysctl=None,
    network=None,
    **settings,
):
    """The judgement of a host whose network is as given."""
    more = {"listeners": listeners, "routes": routes, "rdma": rdma_ports, "reserved": reserved, "sysctl": sysctl}
    network = network or facts(shown, conf, **more)
    usual = {
        "host": "gpu-01",
        "address": "10.1.0.1",
        "address_stated": True,
        "interface": None,
        "rdma": None,
        "peers": {},
        "others": {},
        "blocks": {},
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
    assert (result.interface, result.block, said(result.findings)) == ("eth1", f"NCCL_SOCKET_IFNAME==eth1\n{FOUR}", [])


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
    (finding,) = said(judge(shown=[interface("eth1", "10.1.0.1", **state)]).findings)
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
    assert result.block.splitlines()[2:] == ["NCCL_DEBUG=WARN", "NCCL_IB_HCA==mlx5_0:1"]


def test_lines_of_others_are_notes_where_they_do_nothing_and_findings_where_they_contradict():
    conf = "# BEGIN gpu_fleet\nNCCL_SOCKET_IFNAME==eth9\n# END gpu_fleet\n#x\nNCCL_TIMEOUT=3\nNCCL_DEBUG = WARN\nNCCL_SOCKET_IFNAME=eth0\nNCCL_IB_HCA=a\n"
    result = judge(conf)
    (finding,) = said(result.findings)
    assert "line 'NCCL_SOCKET_IFNAME=eth0': the role would write NCCL_SOCKET_IFNAME==eth1" in finding
    assert ["NCCL_TIMEOUT" in note or "spaces" in note for note in said(result.notes)] == [True, True]


@pytest.mark.parametrize(
    ("change", "there"),
    [
        (lambda text: text, True),
        (lambda text: f"{text}NCCL_DEBUG=WARN\n", True),
        (lambda text: f"NCCL_DEBUG=WARN\n{text}", False),  # of two lines with one key NCCL takes the first
        (lambda text: text.replace("eth1", "eth0"), False),
        (lambda text: text + text, False),
        (lambda text: text.rpartition("#")[0], False),
        (lambda text: "", False),
    ],
)
def test_the_block_is_written_only_where_it_is_not(change, there):
    text = f"# BEGIN gpu_fleet\n{judge().block}\n# END gpu_fleet\n"
    network = {**facts(), "nccl_conf": change(text), "nccl_conf_plain": True}
    assert judge(network=network).in_file is there
    assert not judge(network={**network, "nccl_conf_plain": False}).in_file


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
    named = {"process": "rpc.statd", "pid": 700, "unit": "rpc-statd.service"}
    listening = [(45001, 0), (45003, 0, named), (45002, 990), (22, 0), (50051, 0)]
    result = judge(listeners=listening, reserved_ports=["50051"])
    (note,) = said(result.notes)
    assert "inside 40000-60999: 45001 (user id 0), 45003 (rpc.statd, process 700, rpc-statd.service). " in note
    assert result.findings == []


def test_reserved_ports_of_others_stay_and_the_fleets_own_go_when_they_are_no_longer_wanted():
    result = judge(reserved_ports=["50051"], reserved="30000,45000-45010")
    assert result.sysctl["net.ipv4.ip_local_reserved_ports"] == "30000,45000-45010,50051"
    assert result.header == "Reserved by the fleet: 50051"
    later = judge(reserved="30000,45000-45010,50051", sysctl=f"# x\n# {result.header}\n")
    assert later.sysctl["net.ipv4.ip_local_reserved_ports"] == "30000,45000-45010"
    assert judge(reserved="50051", sysctl=f"# {result.header}").sysctl["net.ipv4.ip_local_reserved_ports"] == ""


def test_a_second_run_reserves_the_same():
    first = judge(reserved_ports=["50051"], reserved="30000").sysctl["net.ipv4.ip_local_reserved_ports"]
    again = judge(reserved_ports=["50051"], reserved=first, sysctl="# Reserved by the fleet: 50051")
    assert again.sysctl["net.ipv4.ip_local_reserved_ports"] == first


BLOCK = {"chat.0": {"api": 8000, "rank_store": 8001}}


def test_a_foreign_listener_on_a_port_of_a_replica_is_named():
    foreign = {"process": "nginx", "pid": 812, "unit": "nginx.service"}
    own = {"process": "python", "pid": 900, "unit": "vllm@chat.0.service"}
    (finding,) = said(judge(blocks=BLOCK, listeners=[(8000, 0, foreign), (8001, 990, own)]).findings)
    assert finding.startswith("gpu-01: port 8000 (api of chat.0) is taken (nginx, process 812, nginx.service). ")
    (finding,) = said(judge(blocks=BLOCK, listeners=[(8001, 990, {**own, "unit": "vllm@old.0.service"})]).findings)
    assert "vllm@old.0.service" in finding


def test_what_the_inventory_no_longer_names_makes_room_as_the_fleet_takes_it_away():
    """Not by hand, and not by another port_base."""
    server, agent = {"unit": "vllm@old.0.service"}, {"unit": "vllm-agent@old.0.service"}
    made = judge(blocks=BLOCK, listeners=[(8000, 990, server), (8001, 0, agent)])
    (finding,) = said(made.findings)
    assert "chat.0 is to be started where instances run that the inventory no longer names" in finding
    assert "vllm@old.0 runs on gpu-01" in finding and "scripts/fleet teardown -i INVENTORY old (" in finding
    assert "Stop that listener" not in finding
    assert made.in_the_way == ["old.0"]
    (finding,) = said(judge(blocks=BLOCK, listeners=[(8000, 990, {"unit": "vllm@chat.1.service"})]).findings)
    assert "vllm@chat.1 runs on gpu-01" in finding and "null in the place of each host that left" in finding


def test_what_the_inventory_names_at_other_ports_is_a_listener_as_any():
    both = {**BLOCK, "talk.0": {"api": 8100}}
    made = judge(blocks=both, listeners=[(8000, 990, {"unit": "vllm@talk.0.service"})])
    assert "Stop that listener" in said(made.findings)[0] and made.in_the_way == []


def test_a_foreign_listener_among_the_ports_of_ray_is_named():
    block = {"chat.0": {"ray_gcs": 20000, "ray_workers": "20016-20063"}}
    own = [(20000, 990, {"unit": "ray@chat.0.service"}), (20016, 990, {"unit": "ray@chat.0.service"})]
    assert judge(blocks=block, listeners=own).findings == []
    foreign = {"process": "nginx", "pid": 812, "unit": "nginx.service"}
    (finding,) = said(judge(blocks=block, listeners=[*own, (20063, 0, foreign)]).findings)
    assert finding.startswith(
        "gpu-01: port 20063 (ray_workers of chat.0) is taken (nginx, process 812, nginx.service). "
    )
    assert "another ray_port_base" in finding
    (finding,) = said(judge(blocks=block, listeners=[(20000, 990, {"unit": "ray@other.0.service"})]).findings)
    assert "port 20000 (ray_gcs of chat.0)" in finding


def test_listeners_of_the_replica_and_its_agent_and_on_other_ports_are_none():
    own = [(8000, 990, {"unit": "vllm@chat.0.service"}), (8001, 0, {"unit": "vllm-agent@chat.0.service"}), (8002, 0)]
    assert judge(blocks=BLOCK, listeners=own).findings == []
