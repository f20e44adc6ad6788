"""Collisions of ports on a host that the inventory alone shows."""

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import host_ports
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data
from test_validate import HOSTS, validate

KERNEL = (40000, 60999)
BLOCK = host_ports.Block("service a", "a.0", "port_base", range(8000, 8016), ((8001, 8002), (8008, 8015)))


def told(blocks=(BLOCK,), **others):
    return [str(item) for item in host_ports.findings("gpu-01", host_ports.Others(**others), KERNEL, blocks)]


@pytest.mark.parametrize("port", [8000, 8015])
def test_a_block_that_covers_a_listener(port):
    (finding,) = told(listens=((port, "SSH"),))
    assert f"service a: ports 8000 to 8015 of a.0 cover {port} of gpu-01, where SSH listens" in finding


@pytest.mark.parametrize("port", [22, 7999, 8016, 39999, 61000])
def test_a_listener_elsewhere_is_none(port):
    assert told(listens=((port, "SSH"),)) == []


def test_a_listener_in_the_kernels_range_has_to_be_reserved():
    (finding,) = told(listens=((50051, "yours"),))
    assert "nccl_port_range 40000-60999 covers 50051, where yours listens. Add 50051 to nccl_reserved_ports" in finding
    assert told(listens=((50051, "yours"),), reserved=((50000, 50100),)) == []


@pytest.mark.parametrize(
    ("ports", "word"),
    [
        (((8001, 8001),), "port 8001 would be open to others than the ranks of a.0"),
        (((8003, 8010),), "port 8003-8010 would be open"),
        (((9000, 9000), (45000, 45000)), "port 45000 lies in nccl_port_range 40000-60999"),
        (((1, 65535),), "port 1-65535 would be open"),
    ],
)
def test_a_users_opening_never_opens_the_ports_of_ranks(ports, word):
    (finding,) = told(openings=(("mine", ports),))
    assert finding.startswith("host gpu-01: firewall_openings, mine: ")
    assert word in finding


@pytest.mark.parametrize("ports", [((8000, 8000),), ((8003, 8003),), ((9000, 9100),), ((39000, 39999),)])
def test_a_users_opening_of_other_ports_is_right(ports):
    assert told(openings=(("mine", ports),)) == []


def test_a_fixed_port_of_the_user_in_the_kernels_range_may_be_opened_when_it_is_reserved():
    assert told(openings=(("mine", ((45000, 45001),)),), reserved=((45000, 45010),)) == []
    assert told(blocks=(), openings=(("mine", ((45000, 45001),)),)) == [], "no ranks here"


def test_known_listeners_go_by_group():
    layout = data.load("ports")
    assert (9400, "the DCGM exporter") in host_ports.known_listeners(["gpu_hosts"], layout)
    assert 9400 not in dict(host_ports.known_listeners(["gateways"], layout))
    assert 443 in dict(host_ports.known_listeners(["gpu_hosts", "gateways"], layout))


def test_validate_finds_all_of_them_at_once(tmp_path):
    services = [
        {"name": "one", "model": "m", "port_base": 9392, "gpus": [0]},
        {"name": "two", "model": "m", "port_base": 2210, "gpus": [1]},
    ]
    mine = {"name": "mine", "ports": ["9393"], "from": ["any"]}
    variables = {
        "vllm_services": services,
        "vllm_service_api_keys": {"one": "k" * 40, "two": "k" * 40},
        "firewall_openings": [mine, {**mine, "name": "of nobody", "from": []}],
        "nccl_fixed_ports": ["50051"],
    }
    hosts = {name: {**host, "ansible_port": 2222} for name, host in HOSTS.items()}
    status, said = validate(tmp_path, variables, hosts)
    assert status != 0
    assert "service one: ports 9392 to 9407 of one.0 cover 9400 of gpu-01, where the DCGM exporter listens" in said
    assert "service two: ports 2210 to 2225 of two.0 cover 2222 of gpu-01, where SSH listens" in said
    assert "host gpu-01: firewall_openings, mine: port 9393 would be open to others than the ranks of one.0" in said
    assert "host gpu-01: nccl_port_range 40000-60999 covers 50051, where a service of yours" in said
    assert "of nobody" not in said


def test_hosts_of_a_replica_have_addresses_of_one_kind(tmp_path):
    hosts = {**HOSTS, "gpu-02": {**HOSTS["gpu-02"], "fleet_address": "fd00::2"}}
    status, said = validate(
        tmp_path, {"vllm_services": [{"name": "chat", "model": "m", "hosts_per_replica": 2}]}, hosts
    )
    assert status != 0
    assert "addresses of IPv4 and of IPv6: gpu-01 198.51.100.1, gpu-02 fd00::2" in said
