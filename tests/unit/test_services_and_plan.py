"""What `validate` refuses and what the planner answers: one test a kind of mistake of the issue's list."""

import dataclasses
import re

import pytest
import yaml
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import plan, services
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data
from conftest import REPOSITORY

LAYOUT = data.load("ports")


def host(name, number, **more):
    known = {
        "system": "debian-12",
        "python": "3.11",
        "architecture": "x86_64",
        "accelerator": "cu130",
        "version": "0.26.0",
        "gpus": 8,
    }
    return plan.Host(name=name, address=f"198.51.100.{number}", ports=(40000, 60999), **{**known, **more})


def fleet(count=2, **more):
    hosts = {f"gpu-0{n}": host(f"gpu-0{n}", n, **more) for n in range(1, count + 1)}
    return plan.Fleet(
        hosts=hosts,
        others=["gw-01"],
        watchers=["198.51.100.200"],
        models=["m"],
        model_path="/var/lib/vllm/models",
        port_layout=LAYOUT,
        ray=data.load("ray"),
    )


def judge(text, where=None):
    read, found = services.read(yaml.safe_load(text))
    made, more = plan.build(read, where or fleet())
    return made, found + more


@pytest.mark.parametrize("text", ["198.51.100.1\n", "fd00::1\n", "198.51.100.1 "])
def test_an_address_is_nothing_but_an_address(text):
    assert services.address(text) is None


@pytest.mark.parametrize("size", ["2\n", "²"])
def test_a_size_that_is_no_number_is_left_to_the_check_of_options(size):
    _, found = plan.build([services.Service("a", "m", ("a",), None, args={"tensor-parallel-size": size})], fleet())
    assert found == []


@pytest.mark.parametrize("count", [0, -1])
@pytest.mark.parametrize("more", ["", ", gpus: [0]"])
def test_a_gpu_service_on_a_host_without_gpus_is_refused_once(count, more):
    made, found = judge(f"[{{name: a, model: m{more}}}]", fleet(1, gpus=count))
    assert [finding.id for finding in found] == ["no-gpus"]
    assert f"gpu-01 has {count}" in str(found[0])
    assert "vllm_runtime_accelerator: cpu" in str(found[0])
    assert made["replicas"] == {}


def test_a_cpu_service_needs_no_gpus():
    made, found = judge("[{name: a, model: m}]", fleet(1, gpus=0, accelerator="cpu"))
    assert found == []
    assert list(made["replicas"]) == ["a.0"]


def ids(found):
    return [finding.id for finding in found]


@pytest.mark.parametrize(
    ("text", "id_", "words"),
    [
        ("[{name: a, model: m, gpu: [0]}]", "unknown-key", ["'gpu'", "gpus"]),
        ("[{model: m}]", "missing-key", ["name"]),
        ("[{name: a}]", "missing-key", ["model"]),
        ("[{name: A_b, model: m}]", "wrong-type", ["'A_b'"]),
        ('[{name: "a\\n", model: m}]', "wrong-type", ["42 characters"]),
        ('[{name: a, model: "/srv/m\\n"}]', "wrong-type", ["line breaks"]),
        ('[{name: a, model: m, hosts: ["gpu-01\\n"]}]', "wrong-type", ["line breaks"]),
        ('[{name: a, model: m, clients: ["10.0.0.0/8\\n"]}]', "wrong-type", ["CIDRs"]),
        ("[{name: a, model: m, hosts: [null]}]", "no-hosts", ["no hosts"]),
        ("[{name: a, model: m, hosts: [gpu-01, gpu-01]}]", "wrong-type", ["each once"]),
        (
            "[{name: a, model: m, hosts_per_replica: 2, hosts: [gpu-01, null]}]",
            "replica-size",
            ["gpu-01", "null", "hosts_per_replica"],
        ),
        ("[{name: a, model: m, hosts_per_replica: two}]", "wrong-type", ["'two'", "whole number"]),
        ("[{name: a, model: m, gpus: [0, 0]}]", "wrong-type", ["[0, 0]"]),
        ("[{name: a, model: m, port_base: 80}]", "wrong-type", ["80", "1024"]),
        ("[{name: a, model: m, clients: [example.org]}]", "wrong-type", ["example.org"]),
        ("[{name: a, model: m, clients: [999.1.1.1]}]", "wrong-type", ["999.1.1.1"]),
        ("[{name: a, model: m, clients: [10.0.0.0/33]}]", "wrong-type", ["10.0.0.0/33"]),
        ("[{name: a, model: m, clients: ['::::']}]", "wrong-type", ["::::"]),
        ("[{name: a, model: m, clients: ['fe80::1%eth0']}]", "wrong-type", ["fe80::1%eth0"]),
        ("[{name: a, model: m, served_model_names: ['a b']}]", "wrong-type", ["'a b'", "letters, digits", "command"]),
        ("[{name: a, model: m, served_model_names: [--x]}]", "wrong-type", ["'--x'"]),
        ("[{name: a, model: m, served_model_names: ['a%i']}]", "wrong-type", ["'a%i'"]),
        ('[{name: a, model: m, served_model_names: ["a\\n"]}]', "wrong-type", ["command line"]),
        ("[{name: a, model: m, env: {A: 'b\\c'}}]", "env-value", ["env.A", "EnvironmentFile"]),
        ("""[{name: a, model: m, env: {A: 'say "b"'}}]""", "env-value", ["env.A"]),
        ("""[{name: a, model: m, env: {A: "it's"}}]""", "env-value", ["env.A"]),
        ("[{name: a, model: m, env: {A: ' b'}}]", "env-value", ["env.A"]),
        ("[{name: a, model: m, env: {A: 'b '}}]", "env-value", ["env.A"]),
        (
            "[{name: a, model: m, env: {CUDA_VISIBLE_DEVICES: '0'}}]",
            "owned-env",
            ["env.CUDA_VISIBLE_DEVICES", "`gpus`"],
        ),
        ("[{name: a, model: m, env: {CUDA_DEVICE_ORDER: FASTEST_FIRST}}]", "owned-env", ["nvidia-smi"]),
        ("[{name: a, model: m, env: {VLLM_HOST_IP: 192.0.2.1}}]", "owned-env", ["fleet_address"]),
        ("[{name: a, model: m, env: {HF_TOKEN: x}}]", "env-secret", ["env.HF_TOKEN", "readable by all users"]),
        ("[{name: a, model: m, env: {MY_API_KEY: x}}]", "env-secret", ["vllm_service_api_keys"]),
        ("[{name: a, model: m, env: {S3_SECRET: x}}]", "env-secret", ["S3_SECRET"]),
        ("[{name: a, model: m, env: {DB_PASSWORD: x}}]", "env-secret", ["DB_PASSWORD"]),
        ("[{name: a, model: m, env: {'A B': 1}}]", "wrong-type", ["A B"]),
        ("[a]", "wrong-type", ["'a'"]),
        ("{name: a}", "wrong-type", ["dict"]),
        ("[{name: a, model: m, hosts: [gpu-01]}, {name: a, model: m, hosts: [gpu-02]}]", "name-taken", ["1 and 2"]),
        ("[{name: a, model: m, hosts_per_replica: 2, replicas_per_host: 2}]", "replica-shape", ["both"]),
        ("[{name: a, model: m, hosts: [gpu-1]}]", "unknown-host", ["gpu-1", "Did you mean gpu-01"]),
        ("[{name: a, model: m, hosts: [gw-01]}]", "host-not-gpu", ["gw-01", "gpu_hosts"]),
        ("[{name: a, model: m, hosts: [gpu-01, gpu-02], hosts_per_replica: 3}]", "replica-size", ["2 hosts", "3"]),
        ("[{name: a, model: m, replicas_per_host: 3}]", "replica-size", ["8 GPUs", "3 replicas"]),
        ("[{name: a, model: x}]", "unknown-model", ["x", "Known: m"]),
        ("[{name: a, model: m, gpus: [8]}]", "gpu-missing", ["GPU 8", "has 8"]),
        ("[{name: a, model: m, gpus: [0, 1], args: {tensor-parallel-size: 4}}]", "world-size", ["tensor 4", "2 GPUs"]),
        (
            "[{name: a, model: m, hosts_per_replica: 2, args: {data-parallel-size: 3}}]",
            "data-parallel-hosts",
            ["2 hosts", "multiple of 2"],
        ),
        ("[{name: a, model: m, args: {trust-remote-code: true}}]", "remote-code", ["allow_remote_code"]),
        ("[{name: a, model: m, port_base: 41000}]", "port-ephemeral", ["41000", "40000-60999"]),
        (
            "[{name: a, model: m, gpus: [0, 1]}, {name: b, model: m, gpus: [1, 2], port_base: 8100}]",
            "gpu-taken",
            ["GPU 1", "a.0", "b.0"],
        ),
        (
            "[{name: a, model: m, gpus: [0]}, {name: b, model: m, gpus: [1], port_base: 8015}]",
            "port-taken",
            ["8015 to 8030", "gpu-01"],
        ),
        ("[{name: a, model: m, port_base: 65520, replicas_per_host: 2}]", "port-range", ["65551"]),
        ("[{name: a, model: m, executor: mpi}]", "wrong-type", ["executor", "mp or ray"]),
        ("[{name: a, model: m, ray_port_base: 21000}]", "ray-ports", ["executor is not ray"]),
        ("[{name: a, model: m, executor: ray}]", "ray-one-host", ["one host", "hosts_per_replica"]),
        (
            "[{name: a, model: m, executor: ray, hosts_per_replica: 2, args: {data-parallel-size: 2}}]",
            "ray-data-parallel",
            ["not supported"],
        ),
        (
            "[{name: a, model: m, executor: ray, hosts_per_replica: 2, ray_port_base: 8010}]",
            "port-taken",
            ["8010 to 8073"],
        ),
        (
            "[{name: a, model: m, executor: ray, hosts_per_replica: 2, ray_port_base: 39990}]",
            "port-ephemeral",
            ["39990", "a ray_port_base below 39936"],
        ),
        (
            "[{name: a, model: m, executor: ray, hosts_per_replica: 2, env: {RAY_AUTH_MODE: disabled}}]",
            "owned-env",
            ["ray_cluster_tokens"],
        ),
    ],
)
def test_refused(text, id_, words):
    _, found = judge(text)
    matching = [f for f in found if f.id == id_]
    assert matching, ids(found)
    for word in words:
        assert any(word in str(f) for f in matching), (word, [str(f) for f in matching])
    assert all(f.fix for f in found)


def test_all_mistakes_at_once():
    _, found = judge(
        "[{name: a, model: x, hosts: [nope], gpuz: 1, port_base: two}, {name: b, model: m, hosts: [gw-01]}]"
    )
    assert {"unknown-key", "wrong-type", "unknown-host", "unknown-model", "host-not-gpu"} <= set(ids(found))


def test_mixed_releases_in_one_replica():
    hosts = {"gpu-01": host("gpu-01", 1), "gpu-02": host("gpu-02", 2, version="0.33.0")}
    _, found = judge(
        "[{name: a, model: m, hosts_per_replica: 2}]", plan.Fleet(hosts=hosts, models=["m"], port_layout=LAYOUT)
    )
    assert "mixed-replica" in ids(found)


def test_gpus_unknown_and_on_cpu():
    assert "gpus-unknown" in ids(judge("[{name: a, model: m}]", fleet(gpus=None))[1])
    assert "gpus-on-cpu" in ids(judge("[{name: a, model: m, gpus: [0]}]", fleet(accelerator="cpu"))[1])


def test_two_hosts_on_cpu_become_a_pipeline():
    made, found = judge("[{name: chat, model: m, hosts_per_replica: 2}]", fleet(accelerator="cpu", gpus=None))
    assert not found
    head, worker = (made["hosts"][name]["instances"][0]["config"] for name in ("gpu-01", "gpu-02"))
    assert (head["tensor-parallel-size"], head["pipeline-parallel-size"]) == (1, 2)
    assert head["master-addr"] == worker["master-addr"] == "198.51.100.1"
    assert (head["node-rank"], worker["node-rank"]) == (0, 1)
    assert "headless" not in head
    assert worker["headless"] is True
    assert head["model"] == "/var/lib/vllm/models/m"


@pytest.mark.parametrize(
    ("text", "tensor", "pipeline"),
    [
        ("{}", 8, 1),
        ("{hosts_per_replica: 2}", 8, 2),
        ("{gpus: [0, 1, 2, 3]}", 4, 1),
        ("{replicas_per_host: 4}", 2, 1),
        ("{args: {tensor-parallel-size: 2, pipeline-parallel-size: 4}}", 2, 4),
        ("{args: {pipeline-parallel-size: 1}, gpus: [0]}", 1, 1),
        ("{args: {data-parallel-size: 2}}", 4, 1),
        ("{hosts_per_replica: 2, args: {data-parallel-size: 2}}", 8, 1),
        ("{hosts_per_replica: 2, args: {data-parallel-size: 8}}", 2, 1),
        ("{hosts_per_replica: 2, args: {data-parallel-size: 4, tensor-parallel-size: 2}}", 2, 2),
        ("{hosts_per_replica: 2, args: {tensor-parallel-size: 16}}", 16, 1),
    ],
)
def test_sizes(text, tensor, pipeline):
    made, found = judge(yaml.safe_dump([{"name": "a", "model": "m", **yaml.safe_load(text)}]))
    assert not found, [str(f) for f in found]
    assert (made["replicas"]["a.0"]["tensor"], made["replicas"]["a.0"]["pipeline"]) == (tensor, pipeline)


OVER_HOSTS = "[{name: a, model: m, hosts_per_replica: 2, args: {data-parallel-size: 4%s}}]"
OF_RANKS = {"nnodes", "node-rank", "master-addr", "master-port", "headless", "data-parallel-hybrid-lb"} | {
    f"data-parallel-{name}" for name in ("size", "size-local", "start-rank", "address", "rpc-port")
}


def ranks_of(made):
    """What the configurations of both hosts say of ranks."""
    configs = [made["hosts"][name]["instances"][0]["config"] for name in ("gpu-01", "gpu-02")]
    return [{name: value for name, value in config.items() if name in OF_RANKS} for config in configs]


def test_data_parallel_ranks_over_hosts_with_one_api():
    made, found = judge(OVER_HOSTS % "")
    assert not found
    common = {
        "data-parallel-size": 4,
        "data-parallel-size-local": 2,
        "data-parallel-address": "198.51.100.1",
        "data-parallel-rpc-port": 8002,
    }
    # No first rank on the head: without headless it would mean an API a host (vllm/engine/arg_utils.py of 0.32.0).
    assert ranks_of(made) == [common, {**common, "data-parallel-start-rank": 2, "headless": True}]
    assert made["replicas"]["a.0"]["urls"] == {"gpu-01": "http://198.51.100.1:8000"}
    assert [made["replicas"]["a.0"][name] for name in ("tensor", "data", "world")] == [4, 4, 16]
    assert any("the head's API balances" in reason for reason in made["replicas"]["a.0"]["reasons"])
    names = {name: [o["name"] for o in made["hosts"][name]["openings"]] for name in ("gpu-01", "gpu-02")}
    assert "a.0 api" in names["gpu-01"]
    assert "a.0 api" not in names["gpu-02"]
    (ranks,) = [o for o in made["hosts"]["gpu-01"]["openings"] if o["name"] == "a.0 ranks"]
    assert (ranks["from"], {"8002", "40000-60999"} <= set(ranks["ports"])) == (["198.51.100.2"], True)


def test_data_parallel_ranks_over_hosts_with_an_api_each():
    made, found = judge(OVER_HOSTS % ", data-parallel-hybrid-lb: true")
    assert not found
    head, other = ranks_of(made)
    assert head["data-parallel-hybrid-lb"] is other["data-parallel-hybrid-lb"] is True
    assert "headless" not in other
    assert (head.get("data-parallel-start-rank"), other["data-parallel-start-rank"]) == (None, 2)
    assert made["replicas"]["a.0"]["urls"] == {
        "gpu-01": "http://198.51.100.1:8000",
        "gpu-02": "http://198.51.100.2:8000",
    }
    (api,) = [o for o in made["hosts"]["gpu-02"]["openings"] if o["name"] == "a.0 api"]
    assert api["from"] == ["198.51.100.200", "198.51.100.1"]


@pytest.mark.parametrize("version", sorted(data.load("versions")["releases"]))
@pytest.mark.parametrize("more", ["", ", data-parallel-hybrid-lb: true"])
def test_every_offered_release_takes_the_options_of_ranks(version, more):
    made, _ = judge(OVER_HOSTS % more, fleet(version=version))
    known = set(data.load(f"serve_flags/{version}")["flags"])
    for name in ("gpu-01", "gpu-02"):
        assert set(made["hosts"][name]["instances"][0]["config"]) - known <= {"model"}


ON_RAY = (
    "[{name: a, model: m, executor: ray, hosts_per_replica: 2, gpus: [0, 1], args: {max-num-seqs: 8}, env: {A: b}}]"
)


def test_on_ray_the_head_serves_and_every_host_is_of_the_cluster():
    made, found = judge(ON_RAY)
    assert not found, [str(f) for f in found]
    (head,) = made["hosts"]["gpu-01"]["instances"]
    assert made["hosts"]["gpu-02"]["instances"] == []
    assert head["config"]["distributed-executor-backend"] == "ray"
    assert not OF_RANKS & set(head["config"])
    assert [head["config"][f"{name}-parallel-size"] for name in ("tensor", "pipeline")] == [2, 2]
    assert head["env"]["RAY_ADDRESS"] == "198.51.100.1:20000"
    assert (head["hosts"], head["peers"]) == (["gpu-01"], [])  # whose units start and stop together
    first, second = (made["hosts"][name]["ray"][0] for name in ("gpu-01", "gpu-02"))
    assert [node["rank"] for node in (first, second)] == [0, 1]
    assert first["head"] == second["head"] == "198.51.100.1:20000"
    assert [node["env"]["VLLM_HOST_IP"] for node in (first, second)] == ["198.51.100.1", "198.51.100.2"]
    assert second["env"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert second["env"]["A"] == "b"
    assert (second["gpus"], second["config"]) == (2, {"tensor-parallel-size": 2})
    replica = made["replicas"]["a.0"]
    assert (replica["hosts"], replica["ray_hosts"]) == (["gpu-01"], ["gpu-01", "gpu-02"])
    assert plan.summary(made)[0].startswith("a.0: vLLM 0.26.0 cu130 on gpu-01, gpu-02")
    assert " on Ray; http" in plan.summary(made)[0]


def test_the_ports_of_ray_are_pinned_apart_and_open_to_peers_only():
    made, _ = judge(ON_RAY)
    ports = made["hosts"]["gpu-02"]["ray"][0]["ports"]
    single = [port for name, port in ports.items() if not name.startswith("workers")]
    workers = range(ports["workers_first"], ports["workers_last"] + 1)
    assert len(set(single)) == len(single)
    assert not set(single) & set(workers)
    assert len(workers) == 48
    assert set(single) | set(workers) <= set(range(20000, 20064))
    # What nobody else may listen on: the head has vLLM's server, the others only Ray's processes.
    block = {
        **{f"ray_{name}": port for name, port in ports.items() if "workers" not in name},
        "ray_workers": "20016-20063",
    }
    assert made["hosts"]["gpu-02"]["blocks"] == {"a.0": block}
    assert made["hosts"]["gpu-01"]["blocks"] == {"a.0": {**made["replicas"]["a.0"]["ports"], **block}}
    (ray,) = [o for o in made["hosts"]["gpu-02"]["openings"] if o["name"] == "a.0 ray"]
    assert (ray["ports"], ray["from"]) == (["20000-20063"], ["198.51.100.1"])


@pytest.mark.parametrize(
    ("where", "id_", "word"),
    [
        (fleet(accelerator="cpu", gpus=None), "ray-cpu", "does not support ray"),
        (fleet(version="0.31.0"), "ray-version", "0.31.0"),
    ],
)
def test_where_vllm_has_no_ray_it_is_refused(where, id_, word):
    _, found = judge(ON_RAY.replace(", gpus: [0, 1]", ""), where)
    assert ids(found) == [id_]
    assert word in found[0].message


def test_two_services_on_ray_need_two_blocks():
    two = (
        "[{name: a, model: m, executor: ray, hosts_per_replica: 2, gpus: [0]}, "
        "{name: b, model: m, executor: ray, hosts_per_replica: 2, gpus: [1], port_base: 8100%s}]"
    )
    assert set(ids(judge(two % "")[1])) == {"port-taken"}
    assert ids(judge(two % ", ray_port_base: 20064")[1]) == []


def test_data_parallel_ranks_of_one_host_stay_there():
    made, _ = judge("[{name: a, model: m, hosts: [gpu-01], args: {data-parallel-size: 2}}]")
    config = made["hosts"]["gpu-01"]["instances"][0]["config"]
    assert {name: value for name, value in config.items() if name in OF_RANKS} == {"data-parallel-size": 2}


def test_replicas_on_one_host_share_neither_gpu_nor_port():
    made, found = judge("[{name: a, model: m, hosts: [gpu-01], replicas_per_host: 2}]")
    assert not found
    first, second = made["hosts"]["gpu-01"]["instances"]
    assert first["env"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert second["env"]["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert first["env"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert second["config"]["port"] - first["config"]["port"] == LAYOUT["stride"]


def test_a_host_that_left_keeps_its_place_and_the_others_their_names():
    """What the hosts that stay run with is what they ran with before, to the last word."""
    before, _ = judge("[{name: a, model: m, hosts: [gpu-01, gpu-02, gpu-03]}]", fleet(3))
    made, found = judge("[{name: a, model: m, hosts: [gpu-01, null, gpu-03]}]", fleet(3))
    assert not found
    assert list(made["replicas"]) == made["services"]["a"]["replicas"] == ["a.0", "a.2"]
    assert made["hosts"]["gpu-02"]["instances"] == []
    for name in ("gpu-01", "gpu-03"):
        assert made["hosts"][name]["instances"] == before["hosts"][name]["instances"]


def test_places_of_hosts_that_left_count_as_many_replicas_as_they_had():
    over_two = "[{name: a, model: m, hosts_per_replica: 2, hosts: [null, null, gpu-01, gpu-02]}]"
    made, found = judge(over_two)
    assert (list(made["replicas"]), found) == (["a.1"], [])
    copies = "[{name: a, model: m, replicas_per_host: 2, hosts: [null, gpu-01]}]"
    made, found = judge(copies)
    assert (list(made["replicas"]), found) == (["a.2", "a.3"], [])


def test_openings_admit_ranks_only_from_peers():
    made, _ = judge("[{name: a, model: m, hosts_per_replica: 2, clients: [192.0.2.0/24]}]", fleet(3 - 1))
    api, ranks, agent = made["hosts"]["gpu-01"]["openings"]
    assert api["from"] == ["192.0.2.0/24", "198.51.100.200", "198.51.100.2"]
    assert ranks["from"] == ["198.51.100.2"]
    assert "40000-60999" in ranks["ports"]
    assert agent == {
        "name": "a.0 agent",
        "ports": ["8003"],
        "proto": "tcp",
        "from": ["198.51.100.2", "198.51.100.200"],  # the other rank and the gateway, no client
    }
    worker, agent = made["hosts"]["gpu-02"]["openings"]
    assert worker["from"] == ["198.51.100.1"]
    assert agent["from"] == ["198.51.100.1", "198.51.100.200"]


def test_replicas_on_unequal_hosts_have_sizes_of_their_own():
    hosts = {"gpu-01": host("gpu-01", 1, gpus=8), "gpu-02": host("gpu-02", 2, gpus=4)}
    where = plan.Fleet(hosts=hosts, models=["m"], port_layout=LAYOUT)
    made, found = judge("[{name: a, model: m}]", where)
    assert not found
    assert [made["replicas"][name]["tensor"] for name in ("a.0", "a.1")] == [8, 4]
    assert made["hosts"]["gpu-02"]["instances"][0]["config"]["tensor-parallel-size"] == 4
    _, found = judge("[{name: a, model: m, args: {tensor-parallel-size: 8}}]", where)
    assert [f.message for f in found] == [
        "tensor 8 x pipeline 1 = 8 processes, but a replica has 4 GPUs (1 host with 4)"
    ]


def test_a_mistake_of_all_replicas_is_said_once():
    _, found = judge("[{name: a, model: m, args: {tensor-parallel-size: 3}}]")
    assert ids(found) == ["world-size"]


def test_a_secret_in_env_is_not_shown():
    _, found = judge("[{name: a, model: m, env: {HF_TOKEN: hf_abc, 'A B': 1}}]")
    assert "hf_abc" not in "".join(map(str, found))


def test_every_variable_that_the_unit_gets_is_owned_or_free():
    """What the plan and the template set: one that is added there has to be decided on here."""
    made, found = judge("[{name: a, model: m, gpus: [0]}]")
    assert not found
    template = (REPOSITORY / "roles/vllm_service/templates/env.j2").read_text()
    written = set(re.findall(r"^([A-Z_]+)=", template, re.MULTILINE)) | set(
        made["hosts"]["gpu-01"]["instances"][0]["env"]
    )
    written |= set(judge(ON_RAY.replace("env: {A: b}", "env: {}"))[0]["hosts"]["gpu-01"]["instances"][0]["env"])
    assert {"HOME", "CUDA_VISIBLE_DEVICES", "VLLM_HOST_IP", "GLOO_SOCKET_IFNAME"} <= written
    assert written <= set(services.OWNED_ENV) | set(services.FREE_ENV)
    # In /etc/nccl.conf, and the kernel's range.
    assert set(services.OWNED_ENV) - written == {"NCCL_SOCKET_IFNAME", "VLLM_PORT"}


def test_what_stands_in_units_and_rules_as_it_should():
    made, found = judge(
        "[{name: a, model: m, clients: [192.0.2.7, 'fd00::/64', any], served_model_names: ['org/A-1.5_b:x'], "
        "env: {A: 'b c', N: 1, MY_KEYS: x}}]"
    )
    assert not found
    assert made["hosts"]["gpu-01"]["instances"][0]["env"]["A"] == "b c"


def test_a_single_process_lets_nobody_to_its_store():
    made, _ = judge("[{name: a, model: m, hosts: [gpu-01], gpus: [0]}]")
    (ranks,) = [o for o in made["hosts"]["gpu-01"]["openings"] if o["name"] == "a.0 ranks"]
    assert ranks["from"] == []
    assert str(made["replicas"]["a.0"]["ports"]["rank_store"]) in ranks["ports"]


def test_a_host_without_an_address_is_no_source():
    hosts = {"gpu-01": host("gpu-01", 1), "gpu-02": dataclasses.replace(host("gpu-02", 2), address=None)}
    made, _ = judge("[{name: a, model: m, hosts_per_replica: 2}]", plan.Fleet(hosts=hosts, port_layout=LAYOUT))
    assert [o["from"] for o in made["hosts"]["gpu-01"]["openings"]] == [[], [], []]


def test_a_single_host_with_several_ranks_lets_nobody_in():
    made, _ = judge("[{name: a, model: m, hosts: [gpu-01]}]")
    assert [o["from"] for o in made["hosts"]["gpu-01"]["openings"] if o["name"].endswith("ranks")] == [[]]


def test_plan_of_a_host_does_not_depend_on_other_hosts_of_other_replicas():
    two = "[{name: a, model: m, hosts: [gpu-01, gpu-02]}]"
    assert judge(two)[0]["hosts"]["gpu-01"] == judge(two, fleet(3))[0]["hosts"]["gpu-01"]
