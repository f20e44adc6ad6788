"""A service that states name, model and hosts, planned from its model's files and the GPUs that the inventory names."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml
from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tests" / "replay"))

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import hardware
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import launches

KEY = "k" * 40
GIB = 1 << 30
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "max_position_embeddings": 131072,
}


HEADS_28 = {
    **LLAMA_8B,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}


class Facts:
    """An inventory of one host, as launches asks it."""

    def __init__(self, **variables):
        self.variables = variables

    def get(self, host, name, default=None):
        return self.variables.get(name, default)


def model(folder, config, size):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": {}})
    )
    return folder


def plan(tmp_path, hosts, services, models):
    tmp_path.joinpath("inv").mkdir()
    groups = {"gpu_hosts": {"hosts": hosts}}
    (tmp_path / "inv" / "hosts.yml").write_text(yaml.safe_dump({"all": {"children": groups}}))
    variables = {
        "model_store_models": [{"name": name, "folder": str(path)} for name, path in models.items()],
        "vllm_services": services,
        "vllm_service_api_keys": {service["name"]: KEY for service in services},
    }
    folder = tmp_path / "inv" / "group_vars"
    folder.mkdir()
    (folder / "gpu_hosts.yml").write_text(yaml.safe_dump(variables))
    done = subprocess.run(
        [sys.executable, "-m", "gpu_fleet.cli", "plan", "-i", str(tmp_path / "inv"), "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "scripts")},
    )
    return json.loads(done.stdout)


def host(number, gpus, name):
    return {"ansible_host": f"192.0.2.{number}", "fleet_gpus": gpus, "fleet_gpu_model": name}


def test_name_model_and_hosts_are_enough(tmp_path):
    models = {"m": model(tmp_path / "m", LLAMA_8B, 16060522496)}
    told = plan(tmp_path, {"a": host(1, 1, "H200")}, [{"name": "chat", "model": "m"}], models)
    assert told["exit_status"] == 0, told
    config = told["plan"]["hosts"]["a"]["instances"][0]["config"]
    assert (config["tensor-parallel-size"], config["max-model-len"], config["dtype"]) == (1, 8192, "bfloat16")
    memory = told["plan"]["replicas"]["chat.0"]["memory"]
    # Measured on an H200 with vLLM 0.26.0 at its own share: 112.51 GiB, 921,696 tokens.
    assert memory["kv_gib"] == pytest.approx(112.51, rel=0.03)
    assert memory["kv_tokens"] == pytest.approx(921_696, rel=0.03)
    assert all(":" in reason for reason in told["plan"]["replicas"]["chat.0"]["reasons"])
    assert any("tokens" in line for line in told["summary"])


def test_what_the_user_says_is_kept(tmp_path):
    models = {"m": model(tmp_path / "m", LLAMA_8B, 16060522496)}
    args = {"max-model-len": 4096, "gpu-memory-utilization": 0.5, "tensor-parallel-size": 2}
    service = {"name": "chat", "model": "m", "args": args, "gpus": [0, 1]}
    told = plan(tmp_path, {"a": host(1, 8, "H100 80GB HBM3")}, [service], models)
    config = told["plan"]["hosts"]["a"]["instances"][0]["config"]
    assert {name: config[name] for name in args} == args


def test_what_cannot_fit_is_refused_with_the_numbers(tmp_path):
    models = {"m": model(tmp_path / "m", LLAMA_70B, 141107412992)}
    told = plan(tmp_path, {"a": host(1, 1, "H100 80GB HBM3")}, [{"name": "chat", "model": "m"}], models)
    assert told["exit_status"] == 2
    (failure,) = told["failures"]
    assert "131.4" in failure["message"]
    assert "no host was touched" in failure["message"]


def test_copies_are_planned_where_heads_do_not_divide(tmp_path):
    """28 heads on eight GPUs: four a replica, two replicas."""
    models = {"m": model(tmp_path / "m", HEADS_28, 15231233024)}
    told = plan(tmp_path, {"a": host(1, 8, "A100 80GB")}, [{"name": "chat", "model": "m"}], models)
    replicas = told["plan"]["replicas"]
    used = sorted(gpu for replica in replicas.values() for gpu in replica["gpus"])
    assert len(replicas) >= 2
    assert len(set(used)) == len(used)
    assert {replica["tensor"] for replica in replicas.values()} <= {1, 2, 4}


def test_without_knowledge_of_the_gpus_nothing_is_assumed(tmp_path):
    models = {"m": model(tmp_path / "m", LLAMA_8B, 16060522496)}
    told = plan(
        tmp_path, {"a": {"ansible_host": "192.0.2.1", "fleet_gpus": 2}}, [{"name": "chat", "model": "m"}], models
    )
    assert told["plan"]["replicas"]["chat.0"]["memory"] is None
    (note,) = told["plan"]["replicas"]["chat.0"]["notes"]
    assert "which GPUs a has is not known" in note
    assert told["plan"]["hosts"]["a"]["instances"][0]["config"]["tensor-parallel-size"] == 2


def test_a_gpu_model_that_nobody_knows_is_refused(tmp_path):
    models = {"m": model(tmp_path / "m", LLAMA_8B, 16060522496)}
    told = plan(tmp_path, {"a": host(1, 1, "H2OO")}, [{"name": "chat", "model": "m"}], models)
    assert told["exit_status"] == 2
    assert "Did you mean H2" in told["failures"][0]["message"]


def test_a_gpu_model_without_a_reported_memory_is_planned_by_count_and_said(tmp_path):
    models = {"m": model(tmp_path / "m", LLAMA_8B, 16060522496)}
    told = plan(tmp_path, {"a": host(1, 1, "L40S")}, [{"name": "chat", "model": "m"}], models)
    assert told["exit_status"] == 0
    assert any("learn the host" in line for line in told["summary"])


@pytest.mark.parametrize(("copies", "idle"), [(None, None), (1, "4 of the 8 GPUs of each host stay idle"), (2, None)])
def test_copies_have_their_reason_and_idle_gpus_are_said(tmp_path, copies, idle):
    """28 heads go over four GPUs and not over eight."""
    models = {"m": model(tmp_path / "m", HEADS_28, 15231233024)}
    service = {"name": "chat", "model": "m", **({"replicas_per_host": copies} if copies else {})}
    told = plan(tmp_path, {"a": host(1, 8, "H100 80GB HBM3")}, [service], models)
    replicas = told["plan"]["replicas"]
    assert len(replicas) == (copies or 2)
    for replica in replicas.values():
        assert any("replicas_per_host 2: " in reason for reason in replica["reasons"]) is (copies is None)
        assert any((idle or "stay idle") in note for note in replica["notes"]) is bool(idle)


def test_a_hub_that_cannot_be_reached_stops_a_plan_and_not_validate(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    folder = tmp_path / "inv"
    variables = {
        "model_store_models": [{"name": "m", "hub": "org/model", "revision": "b" * 40}],
        "vllm_services": [{"name": "chat", "model": "m"}],
        "vllm_service_api_keys": {"chat": KEY},
    }
    (folder / "group_vars").mkdir(parents=True)
    (folder / "group_vars" / "gpu_hosts.yml").write_text(yaml.safe_dump(variables))
    groups = {"gpu_hosts": {"hosts": {"a": host(1, 1, "H200")}}}
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"children": groups}}))
    for verb, status, says in (("validate", 0, "the hub was not asked yet"), ("plan", 2, "cannot be reached")):
        done = subprocess.run(
            [sys.executable, "-m", "gpu_fleet.cli", verb, "-i", str(folder)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY / "scripts")},
        )
        assert done.returncode == status, done.stdout + done.stderr
        assert says in " ".join((done.stdout + done.stderr).split())


def test_what_was_learned_of_a_host_goes_before_what_the_inventory_says(tmp_path):
    import hosts

    learned = tmp_path / ".topology"
    learned.mkdir()
    (learned / "a.json").write_text(json.dumps(hardware.remember(hosts.facts("h100x8"))))
    facts = Facts(inventory_dir=str(tmp_path), fleet_gpu_model="H200")
    gpus, links = launches.gpus_of(facts, "a")
    assert [gpu["name"] for gpu in gpus] == ["NVIDIA H100 80GB HBM3"] * 8
    assert links["0-7"] == "NV18"
    (learned / "a.json").write_text("{")
    assert "a.json" in launches.gpus_of(facts, "a")[0]
    (learned / "a.json").write_text(json.dumps(hardware.remember(hosts.facts("h100x8"))))
    facts = Facts(inventory_dir=str(tmp_path), fleet_gpus=1, fleet_gpu_model="H200")
    assert "8 GPUs were learned of a, fleet_gpus says 1" in launches.gpus_of(facts, "a")[0]
    (learned / "a.json").unlink()
    assert launches.gpus_of(facts, "a")[0] == [{"name": "H200"}]


def test_a_hub_model_is_known_from_the_cache_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    revision = "a" * 40
    entry = {"name": "m", "hub": "org/model", "revision": revision}
    models = launches.Models([entry], "", fetch=False)
    assert "hub was not asked" in models.get("m")
    target = tmp_path / "gpu_fleet" / "models" / "hub" / "org--model" / revision
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(LLAMA_8B))
    siblings = [
        {"rfilename": "model.safetensors", "lfs": {"size": 5 * GIB}},
        {"rfilename": "original/x.safetensors", "size": 9},
    ]
    target.with_suffix(".json").write_text(json.dumps(siblings))
    assert launches.Models([entry], "", fetch=False).get("m") == (LLAMA_8B, 5 * GIB)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"architectures": 3}', "[" * 200_000])
def test_a_damaged_model_is_said_to_be_unknown(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    assert isinstance(launches.Models([{"name": "m", "folder": str(tmp_path)}], "", fetch=False).get("m"), str)


@pytest.mark.parametrize("index", ["[]", '"x"', '{"metadata": "x"}', '{"metadata": {"total_size": 1e300}}', "{"])
def test_a_damaged_index_is_said_to_be_unknown(tmp_path, index):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert isinstance(launches.Models([{"name": "m", "folder": str(tmp_path)}], "", fetch=False).get("m"), str)


@pytest.mark.parametrize("change", [{"hidden_size": 0}, {"num_hidden_layers": 10**12}, {"num_attention_heads": "x"}])
def test_a_model_that_makes_no_sense_fails_nothing_else(tmp_path, change):
    models = {"m": model(tmp_path / "m", {**LLAMA_8B, **change}, 16060522496)}
    told = plan(tmp_path, {"a": host(1, 1, "H200")}, [{"name": "chat", "model": "m"}], models)
    text = json.dumps(told)
    assert "Unexpected failure" not in text
    assert "Traceback" not in text


def test_what_the_roles_do_is_no_note(tmp_path):
    models = {"m": model(tmp_path / "m", LLAMA_8B, 16060522496)}
    service = {"name": "chat", "model": "m", "hosts_per_replica": 2}
    told = plan(tmp_path, {n: host(i, 8, "H100 80GB HBM3") for i, n in enumerate("ab", 1)}, [service], models)
    notes = " ".join(told["plan"]["replicas"]["chat.0"]["notes"])
    assert "one host suffices" in notes
    assert "VLLM_HOST_IP" not in notes
