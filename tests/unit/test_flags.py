"""Options of `vllm serve`: what is known, gone, misspelt, or given a value that it cannot take."""

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import flags
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data


def check(args, version="0.32.0"):
    return flags.check("chat", args, version, data.load(f"serve_flags/{version}"), data.load("removed_flags"))


@pytest.mark.parametrize(
    "args",
    [
        {"max-model-len": 8192},
        {"max-model-len": "16k"},
        {"max-model-len": "auto"},
        {"enforce-eager": True},
        {"enable-prefix-caching": False},
        {"no-enable-prefix-caching": True},
        {"gpu-memory-utilization": 0.9},
        {"kv-cache-dtype": "fp8"},
        {"speculative-config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"speculative-config": '{"method": "ngram"}'},
        {"allowed-origins": ["https://example.org"]},
        {"tensor-parallel-size": 2},
        {"dtype": "bfloat16"},
        {"runner": "generate"},
        {"convert": "none"},
        {"grpc": False},
        {"no-skip-tokenizer-init": True},
    ],
)
def test_right(args):
    assert check(args) == []


@pytest.mark.parametrize(
    ("args", "id_", "words"),
    [
        ({"swap-space": 4}, "removed-flag", ["swap-space", "0.18.0", "kv-offloading-size"]),
        ({"disable-log-requests": True}, "removed-flag", ["enable-log-requests"]),
        ({"max-model-length": 1}, "unknown-flag", ["Did you mean max-model-len?", "0.32.0"]),
        ({"max_model_len": 1}, "flag-spelling", ["Write max-model-len"]),
        ({"--max-model-len": 1}, "flag-spelling", ["Write max-model-len"]),
        ({"enforce-eager": "yes"}, "flag-value", ["true or false"]),
        ({"no-enable-prefix-caching": False}, "flag-value", ["enable-prefix-caching"]),
        ({"tensor-parallel-size": "two"}, "flag-value", ["whole number"]),
        ({"tensor-parallel-size": "2\n"}, "flag-value", ["whole number"]),
        ({"max-model-len": "16k\n"}, "flag-value", ["a number"]),
        ({"tensor-parallel-size": True}, "flag-value", ["not true or false"]),
        ({"gpu-memory-utilization": "much"}, "flag-value", ["number"]),
        ({"dtype": "int3"}, "flag-value", ["int3", "bfloat16"]),
        ({"kv-cache-dtype": "fp9"}, "flag-value", ["args.kv-cache-dtype is 'fp9'. 'fp9' is not one of auto,"]),
        ({"dtype": "bfloat61"}, "flag-value", ["Did you mean bfloat16? 'bfloat61' is not one of"]),
        ({"speculative-config": "{ngram}"}, "flag-value", ["JSON"]),
        ({"max-model-len": None}, "flag-value", ["no value"]),
        ({"api-key": "x"}, "owned-flag", ["vllm_service_api_keys"]),
        ({"port": 1}, "owned-flag", ["port_base"]),
        ({"node-rank": 1}, "owned-flag", ["hosts"]),
        ({"data-parallel-start-rank": 1}, "owned-flag", ["hosts"]),
        ({"data-parallel-external-lb": True}, "unsupported-flag", ["replicas"]),
        ({"host": "::"}, "owned-flag", ["fleet_address"]),
        ({"ssl-keyfile": "/k"}, "unsupported-flag", ["plain http", "not supported yet"]),
        ({"ssl-certfile": "/c"}, "unsupported-flag", ["plain http"]),
        ({"ssl_ca_certs": "/c"}, "unsupported-flag", ["args.ssl_ca_certs", "plain http"]),
        ({"ssl-cert-reqs": 2}, "unsupported-flag", ["plain http"]),
        ({"ssl-ciphers": "TLSv1"}, "unsupported-flag", ["plain http"]),
        ({"enable-ssl-refresh": True}, "unsupported-flag", ["plain http"]),
        ({"no-enable-ssl-refresh": True}, "unsupported-flag", ["plain http"]),
        ({"root-path": "/x"}, "unsupported-flag", ["/v1/completions"]),
        ({"runner": "pooling"}, "unsupported-flag", ["pooling", "completion"]),
        ({"runner": "draft"}, "unsupported-flag", ["draft", "completion"]),
        ({"convert": "embed"}, "unsupported-flag", ["args.convert is embed", "completion"]),
        ({"convert": "classify"}, "unsupported-flag", ["completion"]),
        ({"grpc": True}, "unsupported-flag", ["args.grpc is true", "gRPC"]),
        ({"skip-tokenizer-init": True}, "unsupported-flag", ["completion of a text"]),
        ({"tokens-only": True}, "unsupported-flag", ["completion of a text"]),
    ],
)
def test_refused(args, id_, words):
    (finding,) = check(args)
    assert finding.id == id_
    for word in words:
        assert word in str(finding)


def test_a_flag_that_one_version_has_and_the_next_has_not():
    assert check({"calculate-kv-scales": True}, "0.26.0") == []
    assert check({"calculate-kv-scales": True}, "0.33.0")[0].id == "removed-flag"


# Those that a fleet can install; older ones are there to be judged, and to be told why not.
OFFERED = [v for v in data.flag_versions() if v in data.load("versions")["releases"]]


@pytest.mark.parametrize("version", OFFERED)
def test_every_version_knows_what_the_planner_writes(version):
    known = data.load(f"serve_flags/{version}")["flags"]
    written = {
        "tensor-parallel-size",
        "pipeline-parallel-size",
        "nnodes",
        "node-rank",
        "master-addr",
        "master-port",
        "headless",
    }
    assert written | {"model", "served-model-name", "host", "port", "shutdown-timeout"} <= set(known)


@pytest.mark.parametrize("version", OFFERED)
def test_what_is_refused_is_there_to_be_refused(version):
    known = data.load(f"serve_flags/{version}")
    assert set(flags.UNSUPPORTED) | set(flags.UNSUPPORTED_VALUES) | set(flags.OWNED) - {"config"} <= set(known["flags"])
    for name, values in flags.UNSUPPORTED_VALUES.items():
        assert set(values) <= set(known["choices"].get(name, ["true"])), name
    assert {name for name in known["flags"] if "ssl" in name} <= set(flags.UNSUPPORTED)


def test_every_offered_release_has_its_flags():
    offered = {
        v
        for v, release in data.load("versions")["releases"].items()
        if any(a["lock"] == "made" for a in release["accelerators"].values())
    }
    assert offered <= set(data.flag_versions())
