"""`validate` on whole inventories, as a user runs it: every mistake in one message, no host contacted."""

import os
import subprocess
import sys

import pytest
import yaml
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import plan
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import inventory
from conftest import REPOSITORY

KEY = "k" * 40
# Where nobody listens: a task that touched a host would end the run as unreachable.
HOSTS = {
    name: {"ansible_host": "127.0.0.1", "ansible_port": 9, "fleet_address": f"198.51.100.{number}"}
    for number, name in enumerate(("gpu-01", "gpu-02"), 1)
}
GOOD = {
    "fleet_gpus": 2,
    "model_store_models": [{"name": "m", "folder": "/srv/m"}],
    "vllm_services": [{"name": "chat", "model": "m"}],
    "vllm_service_api_keys": {"chat": KEY},
}


def validate(folder, variables=None, hosts=HOSTS, playbook="validate", options=()):
    groups = {"gpu_hosts": {"hosts": hosts, "vars": {**GOOD, **(variables or {})}}}
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"children": groups}}))
    command = [
        f"{os.path.dirname(sys.executable)}/ansible-playbook",
        f"playbooks/{playbook}.yml",
        "-i",
        str(folder),
        *options,
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_a_right_inventory_passes(tmp_path):
    status, said = validate(tmp_path)
    assert status == 0, said
    assert "chat.0: vLLM 0.26.0 cu130 on gpu-01" in said
    assert KEY not in said


def test_the_plan_is_the_same_where_facts_are_no_variables(tmp_path, monkeypatch):
    """A setting of many sites already (inject_facts_as_vars), and what ansible-core 2.24 does without one."""

    def shown():
        status, said = validate(tmp_path, playbook="plan")
        assert status == 0, said
        return said.partition("TASK [Show what each host will run]")[2].partition("PLAY RECAP")[0]

    told = shown()
    assert "chat.0" in told
    monkeypatch.setenv("ANSIBLE_INJECT_FACT_VARS", "False")
    assert shown() == told


def test_a_limit_may_be_spelt_as_systemd_does(tmp_path):
    status, said = validate(tmp_path, {"vllm_service_limit_memlock": "64G", "host_limits_memlock": 8388608})
    assert status == 0, said


def test_one_variable_names_the_service_user_for_all_roles(tmp_path):
    status, said = validate(tmp_path, {"fleet_service_user": "serve"})
    assert status == 0, said


def test_a_service_on_ray_passes_and_its_token_is_not_shown(tmp_path):
    status, said = validate(tmp_path, {**ON_RAY, "ray_cluster_tokens": {"chat": TOKEN}}, playbook="plan")
    assert status == 0, said
    assert "on Ray; http" in said
    assert TOKEN not in said


def test_with_limit_the_whole_fleet_is_still_planned(tmp_path):
    status, said = validate(tmp_path, options=["--limit", "gpu-02"])
    assert status == 0
    assert "chat.0" in said
    assert "chat.1" in said


ON_RAY = {"vllm_services": [{"name": "chat", "model": "m", "executor": "ray", "hosts_per_replica": 2}]}
TOKEN = "t" * 40

MISTAKES = [
    (ON_RAY, "service chat: its Ray cluster has no token"),
    ({**ON_RAY, "ray_cluster_tokens": {"chat": 12}}, "service chat: its Ray token is no text"),
    ({**ON_RAY, "ray_cluster_tokens": {"chat": "short"}}, "service chat: its Ray token is too short"),
    (
        {**ON_RAY, "ray_cluster_tokens": {"chat": TOKEN, "chta": TOKEN}},
        "ray_cluster_tokens.chta: there is no such service",
    ),
    ({"ray_cluster_tokens": {"chat": TOKEN}}, "there is no such service with executor: ray"),
    ({**ON_RAY, "ray_cluster_token": TOKEN}, "Did you mean ray_cluster_tokens"),
    ({"vllm_runtime_version": "0.99.0"}, "vllm_runtime_version is 0.99.0, which is not offered"),
    (
        {"vllm_runtime_version": "0.33.0", "fleet_system": "ubuntu-22.04"},
        "vLLM 0.33.0 does not run on Python 3.10 of ubuntu-22.04",
    ),
    ({"vllm_runtime_accelerator": "cu129"}, "there is no lock of vLLM 0.26.0 for cu129"),
    ({"vllm_runtime_accelerator": "rocm"}, "vllm_runtime_accelerator is 'rocm'"),
    ({"vllm_runtime_verison": "0.26.0"}, "unknown variable vllm_runtime_verison. Did you mean vllm_runtime_version?"),
    ({"vllm_service_start_timeout": "soon"}, "vllm_service_start_timeout is 'soon'"),
    ({"vllm_service_limit_memlock": "64 GB"}, "vllm_service_limit_memlock is '64 GB', which is no size of memory"),
    ({"host_limits_memlock": "64g"}, "Write bytes, a number with K, M, G or T (base 1024, such as 64G), or infinity"),
    (
        {"vllm_service_user": "serve"},
        "the service has more than one user: vllm_service_user serve, host_limits_user vllm",
    ),
    ({"fleet_service_user": "a b"}, "vllm_service_user is 'a b', which is no name of a user"),
    ({"vllm_modells": []}, "unknown variable vllm_modells"),
    ({"fleet_adress": "192.0.2.1"}, "unknown variable fleet_adress. Did you mean fleet_address?"),
    ({"firewall_openingz": []}, "unknown variable firewall_openingz. Did you mean firewall_openings?"),
    ({"fleet_system": "debian-11"}, "fleet_system is 'debian-11'"),
    (
        {"fleet_system": "rocky-9", "gpu_driver_source": "nvidia", "gpu_driver_version": "580.126.20"},
        "drivers are installed on debian-12, debian-13, ubuntu-22.04, ubuntu-24.04, not on rocky-9",
    ),
    ({"gpu_driver_source": "nvidia"}, "gpu_driver_version names no exact version for branch 580"),
    (
        {"gpu_driver_source": "distribution", "gpu_driver_version": "535.261.03"},
        "found driver 535.261.03, CUDA 13 wheels need 580.65.06 or newer",
    ),
    ({"gpu_driver_source": "mirror", "gpu_driver_version": "580.126.20"}, "neither is set"),
    (
        {"gpu_driver_source": "mirror", "gpu_driver_version": "580.126.20", "gpu_driver_folder": "/nowhere"},
        "gpu_driver_folder is /nowhere, which is not on the controller",
    ),
    ({"gpu_driver_sourc": "nvidia"}, "unknown variable gpu_driver_sourc. Did you mean gpu_driver_source?"),
    ({"gpu_driver_reboot": "perhaps"}, "gpu_driver_reboot is 'perhaps'"),
    ({"fleet_gpus": "many"}, "fleet_gpus is 'many'"),
    ({"nccl_variables": {"NCCL_PORT_RANGE": "1-2"}}, "NCCL_PORT_RANGE"),
    ({"nccl_port_range": "50000-50100"}, "has 101 ports, fewer than 4000"),
    ({"vllm_service_api_keys": {}}, "service chat: it has no API key"),
    ({"vllm_service_api_keys": {"chat": "short"}}, "its API key is too short"),
    ({"vllm_service_api_keys": {"chat": f"{KEY}\n"}}, "its API key is too short or has characters"),
    ({"vllm_service_api_keys": {"chat": "{{ nowhere }}"}}, "its API key is a template with an undefined variable"),
    (
        {"vllm_service_api_keys": {"chat": KEY, "chatt": KEY}},
        "vllm_service_api_keys.chatt: there is no such service. Did you mean chat?",
    ),
    (
        {"vllm_services": [{"name": "chat", "model": "m", "args": {"swap-space": 4}}]},
        "args.swap-space is gone since vLLM 0.18.0",
    ),
    ({"vllm_services": [{"name": "chat", "model": "m", "hosts": ["gpu-1"]}]}, "host gpu-1 is not in the inventory"),
    (
        {"vllm_services": [{"name": "chat", "model": "m", "args": {"tensor-parallel-size": 4}}]},
        "= 4 processes, but a replica has 2 GPUs",
    ),
    ({"gpu_topology_expected": {"link": "NVLINK"}}, "gpu_topology_expected.link is 'NVLINK', which is no link"),
    ({"gpu_topology_expected": {"gpuz": 8}}, "gpuz"),
    ({"gpu_topology_expected": [8]}, "gpu_topology_expected"),
    ({"gpu_topology_expected": {"gpus": 8}}, "gpu_topology_expected.gpus is 8, fleet_gpus is 2"),
    ({"gpu_topology_accept": ["persistance-off"]}, "Did you mean persistence-off?"),
    ({"gpu_topology_bandwidth_seconds": -4}, "gpu_topology_bandwidth_seconds is -4"),
    ({"model_store_models": [{"name": "m", "folder": "/x", "folderr": "/x"}]}, "Did you mean folder?"),
    (
        {"model_store_models": [{"name": "m", "hub": "org/m", "revision": "main"}]},
        "1 thing wrong in the inventory; no host was touched: 1. model m: revision 'main' is not a commit",
    ),
]


@pytest.mark.parametrize(("variables", "words"), MISTAKES, ids=[words[:40] for _, words in MISTAKES])
def test_refused(tmp_path, variables, words):
    status, said = validate(tmp_path, variables)
    assert status != 0
    assert words in said
    assert "wrong in the inventory; no host was touched" in said
    assert "Traceback" not in said


def test_values_that_a_host_would_only_trip_over_later(tmp_path):
    variables = {
        "firewall_ssh_ports": [],
        "gpu_driver_lock_timeout": -5,
        "vllm_service_start_timeout": "-1",
        "gpu_driver_source": "nvidia",
        "gpu_driver_version": "580.126.20",
        "gpu_driver_repository": "htp://mirror.example/debian12/",
        "gpu_driver_imex_nodes": ["192.0.2.1", "10.0.0.300"],
        "package_source_folder": "/nowhere/carried",
    }
    status, said = validate(tmp_path, variables)
    assert status != 0
    for words in (
        "6 things wrong in the inventory",
        "firewall_ssh_ports is []",
        "gpu_driver_lock_timeout is -5",
        "vllm_service_start_timeout is '-1'",
        "gpu_driver_repository is 'htp://mirror.example/debian12/', which is no address",
        "gpu_driver_imex_nodes has '10.0.0.300', which is no address",
        "package_source_folder is /nowhere/carried, which is not on the controller",
    ):
        assert words in said, said


def test_the_placeholder_of_a_revision_passes_and_is_told(tmp_path):
    models = [{"name": "m", "hub": "org/m", "revision": "0" * 40}]
    status, said = validate(tmp_path, {"model_store_models": models})
    assert status == 0, said
    assert "note: model m: revision is the placeholder" in said
    assert said.count("placeholder") == 1


def test_every_mistake_at_once_and_before_site_touches_a_host(tmp_path):
    variables = {
        "vllm_runtime_verison": "0.26.0",
        "vllm_services": [
            {
                "name": "chat",
                "model": "m",
                "args": {"swap-space": 4, "max-model-length": 1},
                "hosts": ["gpu-01", "gpu-9"],
            },
            {"name": "other", "model": "x", "gpus": [0], "wrong": 1},
        ],
    }
    status, said = validate(tmp_path, variables, playbook="site")
    assert status != 0
    for words in (
        "vllm_runtime_verison",
        "swap-space",
        "max-model-length",
        "gpu-9",
        "'wrong'",
        "model x",
        "other: it has no API key",
    ):
        assert words in said, words
    assert "Gather the facts" not in said


def test_an_inventory_without_gpu_hosts_is_refused(tmp_path):
    (tmp_path / "more.yml").write_text(
        yaml.safe_dump({"all": {"children": {"gateways": {"hosts": {"gw-01": HOSTS["gpu-01"]}}}}})
    )
    status, said = validate(tmp_path, hosts={})
    assert status != 0
    assert "the group gpu_hosts is empty or missing" in said


def test_two_hosts_with_one_address_are_refused(tmp_path):
    one = {"ansible_host": "127.0.0.1", "ansible_port": 9}
    status, said = validate(tmp_path, hosts={"gpu-01": one, "gpu-02": one})
    assert status != 0
    assert "hosts gpu-01, gpu-02: all have the address 127.0.0.1" in said


def test_an_address_is_a_number(tmp_path):
    status, said = validate(tmp_path, hosts={"gpu-01": {"ansible_host": "gpu-01.example.org"}})
    assert status != 0
    assert "its address is 'gpu-01.example.org', which is not a number" in said


def test_one_address_in_two_spellings_is_one_address(tmp_path):
    spelt = {n: {**HOSTS[n], "fleet_address": a} for n, a in (("gpu-01", "fd00::A"), ("gpu-02", "fd00:0:0::a"))}
    status, said = validate(tmp_path, hosts=spelt)
    assert status != 0
    assert "all have the address fd00::a" in said


def test_gateways_and_monitors_have_addresses_of_their_own(tmp_path):
    groups = {
        "gateways": {"hosts": {"gw-01": {"fleet_address": "198.51.100.2"}, "gpu-01": {}}},
        "monitors": {
            "hosts": {"mon-01": {"fleet_address": "198.51.100.9"}, "mon-02": {"ansible_host": "198.51.100.9"}}
        },
    }
    (tmp_path / "more.yml").write_text(yaml.safe_dump({"all": {"children": groups}}))
    status, said = validate(tmp_path)
    assert status != 0
    assert "hosts gw-01, gpu-02: all have the address 198.51.100.2" in said
    assert "hosts mon-01, mon-02: all have the address 198.51.100.9" in said
    assert "2 things wrong" in said


def test_one_host_may_be_in_all_groups(tmp_path):
    groups = {
        group: {"hosts": {"gpu-01": {}, "gw-01": {"fleet_address": "198.51.100.9"}}}
        for group in ("gateways", "monitors")
    }
    (tmp_path / "more.yml").write_text(yaml.safe_dump({"all": {"children": groups}}))
    status, said = validate(tmp_path)
    assert status == 0, said


def test_gateways_and_monitors_need_addresses_like_gpu_hosts(tmp_path):
    groups = {
        "gateways": {"hosts": {"gw-01": {"ansible_host": "gw-01.example.org"}, "gpu-01": {}}},
        "monitors": {"hosts": {"mon-01": {}, "mon-02": {"fleet_address": "198.51.100.256"}}},
    }
    (tmp_path / "more.yml").write_text(yaml.safe_dump({"all": {"children": groups}}))
    status, said = validate(tmp_path)
    assert status != 0
    assert "host gw-01: its address is 'gw-01.example.org', which is not a number" in said
    assert "host mon-01: it has no address" in said
    assert "host mon-02: its address is '198.51.100.256', which is not a number" in said
    assert "3 things wrong" in said


def test_variables_of_others_that_begin_like_a_role_pass(tmp_path):
    others = {"validate_certs": True, "firewall_allowed_tcp_ports": [22], "monitoring_url": "x", "gateway_name": "x"}
    status, said = validate(tmp_path, others)
    assert status == 0, said


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("firewall_enabled", "firewall_managed_elsewhere: true"),
        ("firewall_extra", "a service's `clients`"),
        ("firewall_manged_elsewhere", "Did you mean firewall_managed_elsewhere?"),
        ("firewall_ssh_port", "Did you mean firewall_ssh_ports?"),
        ("gpu_topology_lern", "Did you mean gpu_topology_learn?"),
        ("nccl_foo", "The role's README lists"),
    ],
)
def test_names_that_no_role_reads(name, words):
    fault = inventory._unknown_variable(name)
    assert fault, name
    assert fault[1] == f"unknown variable {name}"
    assert words in fault[2]


@pytest.mark.parametrize(
    "name", ["firewall_managed_elsewhere", "firewall_state", "firewall_allowed_tcp_ports", "firewall_enabled_at_boot"]
)
def test_names_that_are_ours_or_another_collections(name):
    assert inventory._unknown_variable(name) is None


def judged(**variables):
    """All that is wrong, as lines, without a run of Ansible; a variable that is None is left out."""
    known = {name: value for name, value in {**GOOD, **variables}.items() if value is not None}
    hosts = {name: {**known, **host} for name, host in HOSTS.items()}
    read, fleet, found = inventory.read(inventory.Inventory(hosts, {"all": list(hosts), "gpu_hosts": list(hosts)}))
    wrong, _notes = inventory.sorted_out(found, plan.build(read, fleet)[1])
    return [str(finding) for finding in wrong]


def chat(**keys):
    return [{"name": "chat", "model": "m", **keys}]


def test_a_right_inventory_has_nothing_wrong():
    assert judged() == []


BOTH = "hosts gpu-01, gpu-02: "
TEXTS = [
    # one finding each, its whole text
    ({"fleet_gpus": "eight"}, "fleet_gpus is 'eight'. It must be a whole number. How many GPUs it has."),
    ({"fleet_gpus": "8"}, "fleet_gpus is '8'. It must be a whole number, without quotes."),
    ({"fleet_gpus": True}, "fleet_gpus is True. It must be a whole number."),
    (
        {"fleet_gpus": None},
        "fleet_gpus is missing, and service chat names no `gpus`. Set fleet_gpus to the number of its GPUs",
    ),
    ({"fleet_system": "debian-11"}, "fleet_system is 'debian-11'. Did you mean debian-13?"),
    (
        {"vllm_runtime_version": "0.99.0"},
        "vllm_runtime_version is 0.99.0, which is not offered. With a lock for cu130: 0.26.0, 0.33.0; "
        "offered without one: 0.32.0 (scripts/lock makes it)",
    ),
    (
        {"vllm_runtime_version": "0.32.0"},
        "there is no lock of vLLM 0.32.0 for cu130, Python 3.11, x86_64. Make it: scripts/lock 0.32.0 cu130 "
        "--python 3.11. With a lock for cu130: 0.26.0, 0.33.0;",
    ),
    ({"vllm_runtime_accelerator": "rocm"}, "vllm_runtime_accelerator is 'rocm'. It must be one of cpu, cu129, cu130."),
    (
        {"vllm_service_start_timeout": "soon"},
        "vllm_service_start_timeout is 'soon'. It must be a whole number. Seconds",
    ),
    ({"gpu_topology_fail_on": "eror"}, "gpu_topology_fail_on is 'eror'. Did you mean error? It must be one of error,"),
    ({"model_store_rehash": "perhaps"}, "model_store_rehash is 'perhaps'. It must be true or false. Read every"),
    (
        {"gpu_topology_expected": {"gpuz": 8}},
        "gpu_topology_expected: unknown key gpuz. Did you mean gpus? Known keys: gpus, link, memory_mib, model",
    ),
    (
        {"gpu_topology_expected": {"gpus": "many"}},
        "gpu_topology_expected.gpus is 'many'. It must be a whole number. How many GPUs it has",
    ),
    (
        {"gpu_topology_accept": {"a": 1}},
        "gpu_topology_accept is {'a': 1}. It must be a list. Ids of findings that are known and wanted on this host, "
        "such as `persistence-off` or `xid-63`",
    ),
    (
        {"firewall_openings": [{"name": "x", "ports": ["1"], "from": ["any"], "proto": "tpc"}]},
        "firewall_openings, entry 1, proto is 'tpc'. It must be one of tcp, udp. Transport protocol",
    ),
    (
        {"firewall_openings": [{"nam": "x", "name": "x", "ports": ["1"], "from": ["any"]}]},
        "firewall_openings, entry 1, unknown key nam. Did you mean name? Known keys: cluster, from,",
    ),
    ({"firewall_openings": [{"ports": ["1"], "from": []}]}, "firewall_openings, entry 1, the key name is missing."),
    (
        {"firewall_openings": [{"name": "x", "ports": ["800o", "9"], "from": ["192.0.2.1"]}]},
        "firewall_openings, opening x: '800o' is no port or range of ports between 1 and 65535",
    ),
    (
        {"firewall_openings": [{"name": "x", "ports": [9999], "from": ["10.0.0.300"]}]},
        "firewall_openings, opening x: from: '10.0.0.300' is no IP address, no CIDR and not the word any",
    ),
]


@pytest.mark.parametrize(("variables", "words"), TEXTS, ids=[words[:40] for _, words in TEXTS])
def test_one_finding_in_plain_words(variables, words):
    (said,) = judged(**variables)
    assert said.startswith(BOTH + words), said
    assert "unable to convert" not in said
    assert "C(" not in said


def test_a_long_value_is_cut_between_its_parts():
    shown = inventory._shown(list(range(1000, 1100)))
    assert shown.endswith(", ...")
    assert shown[1:-5].split(", ")[-1] in map(str, range(1000, 1100))
    assert len(shown) <= 80


def test_without_services_the_list_of_them_says_so():
    said = judged(vllm_services=None, vllm_service=chat())
    assert any("Did you mean vllm_services?" in line for line in said)
    assert said[-1].endswith("Services: none; vllm_services is empty or missing")


def test_options_are_judged_whatever_the_release_and_counts_whatever_the_options():
    said = judged(vllm_runtime_version="0.99.0", fleet_gpus=None, vllm_services=chat(args={"max-model-length": 1}))
    assert len(said) == 3, said
    assert any("fleet_gpus is missing" in line for line in said)
    (option,) = [line for line in said if "max-model-length" in line]
    assert "(judged by the default, 0.26.0, since 0.99.0 is not known). Did you mean max-model-len?" in option
    assert "judged by" not in "".join(judged(vllm_services=chat(args={"max-model-length": 1})))


@pytest.mark.parametrize("wrong", [{"port_base": "x"}, {"env": {"HOME": "/"}}, {"zzz": 1}, {"args": {"swap-space": 1}}])
def test_sizes_are_judged_although_something_else_is_wrong(wrong):
    args = {"tensor-parallel-size": 3, **wrong.pop("args", {})}
    said = judged(vllm_services=chat(args=args, **wrong))
    assert len(said) == 2, said
    assert "tensor 3 x pipeline 1 = 3 processes, but a replica has 2 GPUs" in said[1]


@pytest.mark.parametrize("wrong", [{"gpus": [0, 0]}, {"gpuz": [0]}, {"hosts": "gpu-01"}, {"replicas_per_host": 0}])
def test_sizes_that_a_mistake_may_explain_are_left_alone(wrong):
    (said,) = judged(vllm_services=chat(args={"tensor-parallel-size": 3}, **wrong))
    assert next(iter(wrong)) in said


def test_one_mistake_of_a_group_is_one_line(tmp_path):
    _, said = validate(tmp_path, {"nccl_variables": {"NCCL_TIMEOUT": "1"}})
    assert said.count("NCCL_TIMEOUT") == 1
    assert "hosts gpu-01, gpu-02" in said
