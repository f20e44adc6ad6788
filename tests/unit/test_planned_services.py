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
    config = {
        **LLAMA_8B,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    }
    models = {"m": model(tmp_path / "m", config, 15231233024)}
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
    assert told["plan"]["hosts"]["a"]["instances"][0]["config"]["tensor-parallel-size"] == 2


@pytest.mark.parametrize(("name", "says"), [("H2OO", "Did you mean H2"), ("L40S", "scripts/fleet topology")])
def test_a_gpu_model_that_cannot_be_planned_with_is_refused(tmp_path, name, says):
    models = {"m": model(tmp_path / "m", LLAMA_8B, 16060522496)}
    told = plan(tmp_path, {"a": host(1, 1, name)}, [{"name": "chat", "model": "m"}], models)
    assert told["exit_status"] == 2
    assert says in told["failures"][0]["message"]


def test_what_was_learned_of_a_host_goes_before_what_the_inventory_says(tmp_path):
    import hosts

    learned = tmp_path / ".topology"
    learned.mkdir()
    (learned / "a.json").write_text(json.dumps(hardware.remember(hosts.facts("h100x8"))))
    facts = Facts(inventory_dir=str(tmp_path), fleet_gpus=1, fleet_gpu_model="H200")
    gpus, links = launches.gpus_of(facts, "a")
    assert [gpu["name"] for gpu in gpus] == ["NVIDIA H100 80GB HBM3"] * 8
    assert links["0-7"] == "NV18"
    (learned / "a.json").write_text("{")
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


@pytest.mark.parametrize("content", ["", "{", "[]", '{"architectures": 3}'])
def test_a_damaged_model_is_said_to_be_unknown(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    assert isinstance(launches.Models([{"name": "m", "folder": str(tmp_path)}], "", fetch=False).get("m"), str)
