"""Ports that options of a service open beside its block: found where nobody knows of them, and where two want the same."""

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import option_ports
from test_services_and_plan import ids, judge
from test_validate import HOSTS, validate

EVENTS = {"enable_kv_cache_events": True, "publisher": "zmq"}
MOONCAKE = {"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"}


def ports(args, env=None, **sizes):
    return [list(item.ports) for item in option_ports.of_service(args, env or {}, **sizes)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (EVENTS, [[5557]]),
        ({"enable_kv_cache_events": True}, [[5557]]),
        ('{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:6000"}', [[6000]]),
        ({**EVENTS, "endpoint": "tcp://[::]:6000", "replay_endpoint": "tcp://192.0.2.1:6001"}, [[6000], [6001]]),
        # It connects, stays on the host, takes a port of the kernel, or publishes nothing.
        ({**EVENTS, "endpoint": "tcp://192.0.2.7:5557"}, []),
        ({**EVENTS, "endpoint": "ipc:///run/events", "replay_endpoint": "tcp://127.0.0.1:6001"}, []),
        ({**EVENTS, "endpoint": "tcp://*:0"}, []),
        ({"enable_kv_cache_events": False}, []),
        ({**EVENTS, "publisher": "null"}, []),
        ("no JSON", []),
    ],
)
def test_where_the_publisher_of_kv_events_listens(config, expected):
    assert ports({"kv-events-config": config}) == expected


def test_each_data_parallel_rank_has_a_port():
    assert ports({"kv-events-config": EVENTS}, data=3) == [[5557, 5558, 5559]]
    assert ports({"kv-transfer-config": MOONCAKE}, tensor=2, data=2) == [[8998, 8999, 9000]]
    ec = {"ec_connector": "ECMooncakeConnector", "ec_role": "ec_producer"}
    assert ports({"ec-transfer-config": ec}, tensor=2, data=2) == [[14579, 14580, 14581, 14582]]


def test_connectors():
    inside = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [MOONCAKE]}}
    assert ports({"kv-transfer-config": inside}, {"VLLM_MOONCAKE_BOOTSTRAP_PORT": 9100}) == [[9100]]
    # Its port is of the block.
    assert ports({"kv-transfer-config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}}) == []


def test_moriio_listens_twice_a_rank():
    moriio = {"kv_connector": "MoRIIOConnector", "kv_role": "kv_both"}
    assert ports({"kv-transfer-config": moriio}, tensor=2, data=2) == [
        [6301, 6302, 6303, 6304],
        [61005, 61006, 61007, 61008],
    ]
    given = {**moriio, "kv_connector_extra_config": {"handshake_port": 7000, "notify_port": "7100"}}
    inside = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [given]}}
    assert ports({"kv-transfer-config": inside}) == [[7000], [7100]]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"VLLM_P2P_SIDE_CHANNEL_HOST": "192.0.2.1"}, [[5710]]),
        ({"VLLM_EC_SIDE_CHANNEL_HOST": "0.0.0.0", "VLLM_EC_SIDE_CHANNEL_PORT": 5700}, [[5700]]),
        # On the host alone.
        ({"VLLM_P2P_SIDE_CHANNEL_HOST": "127.0.0.1"}, []),
        ({"VLLM_P2P_SIDE_CHANNEL_PORT": 5800}, []),
    ],
)
def test_side_channels_that_leave_the_host(env, expected):
    assert ports({}, env) == expected


@pytest.mark.parametrize(("ranks", "said"), [(8, []), (16, ["port-range"])])
def test_side_channels_stay_in_the_block(ranks, said):
    nixl = "{kv_connector: NixlConnector, kv_role: kv_both}"
    text = f"[{{name: a, model: m, hosts_per_replica: 2, args: {{data-parallel-size: {ranks}, kv-transfer-config: {nixl}}}}}]"
    assert ids(judge(text)[1]) == said


def test_ranges_that_meet_are_found_wherever_they_meet():
    moriio = "{kv_connector: MoRIIOConnector, kv_role: kv_both, kv_connector_extra_config: {handshake_port: %d, notify_port: %d}}"
    sizes = "tensor-parallel-size: 4, kv-transfer-config"
    text = "[" + ", ".join(
        f"{{name: {name}, model: m, port_base: {base}, hosts: [gpu-01], args: {{{sizes}: {moriio % ports}}}}}"
        for name, base, ports in (("a", 8000, (6301, 6310)), ("b", 8100, (6299, 6312)))
    )
    said = {item.message for item in judge(text + "]")[1] if item.id == "port-taken"}
    assert said == {
        "args.kv-transfer-config, handshake_port: port 6301 on gpu-01 is that of a.0, too",
        "args.kv-transfer-config, notify_port: port 6312 on gpu-01 is that of a.0, too",
    }
    text = f"[{{name: a, model: m, hosts: [gpu-01], args: {{{sizes}: {moriio % (6301, 6303)}}}}}]"
    said = [item.message for item in judge(text)[1] if item.id == "port-taken"]
    assert said == [
        "args.kv-transfer-config, notify_port: port 6303 on gpu-01 is that of args.kv-transfer-config, handshake_port, too"
    ]


def test_two_replicas_on_a_host_cannot_have_the_same():
    text = "[{name: a, model: m, replicas_per_host: 2, hosts: [gpu-01], args: {kv-events-config: {enable_kv_cache_events: true}}}]"
    found = judge(text)[1]
    assert ids(found) == ["port-of-option", "port-taken"]
    assert "port 5557 on gpu-01 is that of a.0, too" in str(found[1])


def test_a_port_that_ranks_would_count_up_from_is_refused():
    (finding,) = judge("[{name: a, model: m, gpus: [0], env: {VLLM_PORT: 5000}}]")[1]
    assert (finding.id, "nccl_port_range" in str(finding)) == ("owned-env", True)


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (
            {},
            "service one: args.kv-events-config, endpoint: the publisher of KV events listens on port 5557 of gpu-01 for everybody",
        ),
        ({"nccl_fixed_ports": ["5557"]}, ""),
    ],
)
def test_validate_wants_it_named_and_apart_from_blocks(tmp_path, more, word):
    service = {"name": "one", "model": "m", "args": {"kv-events-config": EVENTS}}
    variables = {"vllm_services": [service], "vllm_service_api_keys": {"one": "k" * 40}, **more}
    status, said = validate(tmp_path, variables, HOSTS)
    assert (status != 0) == bool(word), said
    assert word in said
