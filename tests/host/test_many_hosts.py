"""Hosts that act as one answer as one host alone: the same tokens, greedy, for twenty prompts. Real vLLM, CPU build.

The tests run in order. Scenario many_hosts has deployed each model on one host; their answers are what the later ones
are held to. Then services over both hosts take their place.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import testinfra
import yaml

ROOT = Path(__file__).resolve().parents[2]
INVENTORY = Path(os.environ["MOLECULE_INVENTORY_FILE"]).parent
HOSTS = ("gpu-01", "gpu-02")
SMOL, LLAMA = "smollm2-135m-instruct", "llama-8-4"
TOKENS = 16
SUBJECTS = ("The capital of France", "A good book", "Water", "The moon", "My dog", "An engineer", "Music", "In winter, birds",
            "The number seven", "Long ago, a king")  # fmt: skip
PROMPTS = [f"{subject} {verb}" for subject in SUBJECTS for verb in ("is", "can never be")]

SCENARIO = yaml.safe_load((ROOT / "molecule/many_hosts/molecule.yml").read_text(encoding="utf-8"))
ALONE = SCENARIO["provisioner"]["inventory"]["group_vars"]["gpu_hosts"]["vllm_services"]


def key(service: str) -> str:
    return f"many-hosts-many-hosts-many-hosts-{service}"


def across(name: str, model: str, port: int, **args: int) -> dict:
    """A service whose one replica takes both hosts."""
    given = {f"{kind}-parallel-size": value for kind, value in args.items()}
    alike = {name: ALONE[0][name] for name in ("clients", "env")}
    shape = {"name": name, "model": model, "hosts": list(HOSTS), "hosts_per_replica": 2, "port_base": port}
    return {**alike, **shape, "args": ALONE[0]["args"] | given}


@pytest.fixture(scope="module")
def hosts():
    return {name: testinfra.get_host(f"ansible://{name}?ansible_inventory={INVENTORY}") for name in HOSTS}


@pytest.fixture(scope="module")
def addresses() -> dict[str, str]:
    content = yaml.safe_load((INVENTORY / "lab.yml").read_text(encoding="utf-8"))
    return {name: content["all"]["hosts"][name]["ansible_host"] for name in HOSTS}


def post(url: str, body: dict | None, service: str) -> str:
    """A request with the service's key, straight to the lab."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key(service)}"}
    request = urllib.request.Request(url, data=json.dumps(body).encode() if body else None, headers=headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as response:
        return response.read().decode()


def answers(address: str, port: int, service: str) -> list[list[int]]:
    """The tokens that follow each prompt, eight requests at a time."""

    def one(prompt: str) -> list[int]:
        body = {"model": service, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        reply = post(f"http://{address}:{port}/v1/completions", body | {"return_token_ids": True}, service)
        return json.loads(reply)["choices"][0]["token_ids"]

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, PROMPTS))


def counts(address: str, port: int, service: str, metric: str = "vllm:generation_tokens_total") -> dict[str, float]:
    """A counter of the server, by engine."""
    text = post(f"http://{address}:{port}/metrics", None, service)
    found = re.findall(rf"^{metric}{{([^}}]*)}} (\S+)$", text, re.MULTILINE)
    return {re.search(r'engine="(\d+)"', labels).group(1): float(value) for labels, value in found}


def deploy(services: list[dict], **more: object) -> None:
    """site.yml with these services in place of the scenario's, and more variables."""
    began = time.monotonic()
    keys = {service["name"]: key(service["name"]) for service in services}
    variables = json.dumps({"vllm_services": services, "vllm_service_api_keys": keys, **more})
    playbook = str(ROOT / "molecule/many_hosts/converge.yml")
    settings = {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections")}
    done = subprocess.run(
        [f"{Path(sys.executable).parent}/ansible-playbook", playbook, "-i", str(INVENTORY), "-e", variables],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    print(
        f"measured: {', '.join(service['name'] for service in services)} deployed in {time.monotonic() - began:.0f} s"
    )


def take_away(hosts, *instances: str) -> None:
    """As the role says for what the inventory no longer names."""
    for host in hosts.values():
        for instance in instances:
            host.run(f"systemctl disable --now vllm-agent@{instance}.service vllm@{instance}.service")


def journal(host, instance: str) -> str:
    return host.check_output(f"journalctl --no-pager -o cat -u vllm@{instance}.service")


@pytest.fixture(scope="module")
def alone(addresses) -> dict[str, list[list[int]]]:
    """What one host says, by model."""
    return {SMOL: answers(addresses["gpu-01"], 8000, "solo"), LLAMA: answers(addresses["gpu-02"], 8100, "small")}


# -- one host each ----------------------------------------------------------------------------------------------------------


def test_replicas_stand_side_by_side(hosts, addresses, alone):
    units = hosts["gpu-01"].check_output("systemctl list-units --plain --no-legend --state=active 'vllm@*'")
    assert re.findall(r"^vllm@(\S+)\.service", units, re.MULTILINE) == ["solo.0", "solo.1"]
    assert answers(addresses["gpu-01"], 8016, "solo") == alone[SMOL]


@pytest.mark.parametrize("model", [SMOL, LLAMA])
def test_the_answers_can_be_told_apart(alone, model):
    assert all(len(answer) == TOKENS for answer in alone[model])
    assert len(set(map(tuple, alone[model]))) == len(PROMPTS), "prompts with the same answer prove little"
    assert len({token for answer in alone[model] for token in answer}) > 50


# -- two hosts as one, two services on them ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_services(hosts, alone):
    take_away(hosts, "solo.0", "solo.1", "small.0")
    deploy([across("tp", LLAMA, 8200, tensor=2), across("pp", SMOL, 8300, pipeline=2)])


def test_tensor_parallel_over_two_hosts_says_the_same(two_services, hosts, addresses, alone):
    assert answers(addresses["gpu-01"], 8200, "tp") == alone[LLAMA]
    assert "TP rank 1" in journal(hosts["gpu-02"], "tp.0")


def test_pipeline_parallel_over_two_hosts_says_the_same(two_services, hosts, addresses, alone):
    assert answers(addresses["gpu-01"], 8300, "pp") == alone[SMOL]
    assert "PP rank 1" in journal(hosts["gpu-02"], "pp.0")


def test_both_at_once_say_the_same(two_services, addresses, alone):
    with ThreadPoolExecutor(2) as pool:
        tensor = pool.submit(answers, addresses["gpu-01"], 8200, "tp")
        pipeline = pool.submit(answers, addresses["gpu-01"], 8300, "pp")
        assert tensor.result() == alone[LLAMA]
        assert pipeline.result() == alone[SMOL]


def test_nccl_gloo_vllm_and_ucx_are_told_the_same_network(two_services, hosts, addresses):
    for name, host in hosts.items():
        assert "NCCL_SOCKET_IFNAME==host0\n" in host.file("/etc/nccl.conf").content_string
        for instance in ("tp.0", "pp.0"):
            pid = host.check_output(f"systemctl show vllm@{instance} --property=MainPID --value")
            told = host.check_output(f"tr '\\0' '\\n' < /proc/{pid}/environ").splitlines()
            assert {"GLOO_SOCKET_IFNAME=host0", "UCX_NET_DEVICES=host0", f"VLLM_HOST_IP={addresses[name]}"} <= set(told)


def test_every_listener_is_of_its_block_or_of_the_kernels_range(two_services, hosts):
    for name, host in hosts.items():
        low, high = map(int, host.check_output("cat /proc/sys/net/ipv4/ip_local_port_range").split())
        listening = host.check_output("ss -Hltnp").splitlines()
        for instance, base in (("tp.0", 8200), ("pp.0", 8300)):
            group = host.check_output(f"systemctl show vllm@{instance} --property=ControlGroup --value")
            pids = host.check_output(f"cat /sys/fs/cgroup{group}/cgroup.procs").split()
            own = [line.split()[3] for line in listening if any(f"pid={pid}," in line for pid in pids)]
            ports = {int(address.rpartition(":")[2]) for address in own}
            assert {port for port in ports if not low <= port <= high} == (
                {base, base + 1} if name == "gpu-01" else set()
            )
            assert ports, "a rank without a listener would prove nothing"


# -- data parallel ranks on both hosts --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data_parallel(hosts, two_services):
    take_away(hosts, "tp.0", "pp.0")
    deploy([across("dp", SMOL, 8400, data=2)])


def test_data_parallel_over_two_hosts_says_the_same(data_parallel, addresses, alone):
    assert answers(addresses["gpu-01"], 8400, "dp") == alone[SMOL]


def test_both_data_parallel_ranks_work(data_parallel, hosts, addresses):
    """The head's API hands requests to its own rank and to the other host's; the other host has no API."""
    assert {rank for rank, tokens in counts(addresses["gpu-01"], 8400, "dp").items() if tokens > 0} == {"0", "1"}
    assert not hosts["gpu-02"].socket(f"tcp://{addresses['gpu-02']}:8400").is_listening


@pytest.fixture(scope="module")
def hybrid(hosts, data_parallel):
    take_away(hosts, "dp.0")
    service = across("hybrid", LLAMA, 8500, data=4)
    deploy([service | {"args": service["args"] | {"data-parallel-hybrid-lb": True}}])


@pytest.mark.parametrize("name", HOSTS)
def test_with_hybrid_balancing_each_host_answers_with_its_own_ranks(hybrid, addresses, alone, name):
    before = counts(addresses[name], 8500, "hybrid")
    assert answers(addresses[name], 8500, "hybrid") == alone[LLAMA]
    after = counts(addresses[name], 8500, "hybrid")
    worked = {rank for rank, tokens in after.items() if tokens > before.get(rank, 0)}
    assert worked == ({"0", "1"} if name == "gpu-01" else {"2", "3"})


# -- over a network that has IPv6 alone -------------------------------------------------------------------------------------

SIX = {"gpu-01": "fd00:f1ee::1", "gpu-02": "fd00:f1ee::2"}
# Asked on the head: the controller has no way into that network.
ASK = """
import json, sys, urllib.request
for prompt in json.load(sys.stdin):
    body = {"model": "six", "prompt": prompt, "max_tokens": %d, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer %s"}
    request = urllib.request.Request("http://[%s]:8600/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as reply:
        print(json.dumps(json.load(reply)["choices"][0]["token_ids"]))
"""


@pytest.fixture(scope="module")
def six(hosts, hybrid):
    take_away(hosts, "hybrid.0")
    address = {"fleet_address": "{{ addresses[inventory_hostname] }}", "addresses": SIX}
    deploy([across("six", SMOL, 8600, pipeline=2)], **address)


def test_over_ipv6_alone_two_hosts_say_the_same(six, hosts, alone):
    script = ASK % (TOKENS, key("six"), SIX["gpu-01"])
    told = hosts["gpu-01"].run_expect([0], f"echo '{json.dumps(PROMPTS)}' | python3 -c '{script}'").stdout
    assert [json.loads(line) for line in told.splitlines()] == alone[SMOL]
    assert "PP rank 1" in journal(hosts["gpu-02"], "six.0")


def test_no_rank_speaks_over_the_other_network(six, hosts, addresses):
    """Every connection between the two hosts that a rank holds is in the network that was named."""
    for host in hosts.values():
        group = host.check_output("systemctl show vllm@six.0 --property=ControlGroup --value")
        pids = host.check_output(f"cat /sys/fs/cgroup{group}/cgroup.procs").split()
        lines = [
            line for line in host.check_output("ss -Htnp").splitlines() if any(f"pid={pid}," in line for pid in pids)
        ]
        peers = {line.split()[4].rpartition(":")[0].strip("[]") for line in lines}
        assert peers & set(SIX.values()), "a rank without a connection to the other host would prove nothing"
        assert not {peer for peer in peers if peer.removeprefix("::ffff:") in addresses.values()}
