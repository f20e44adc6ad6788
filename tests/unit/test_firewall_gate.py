"""The gate before each rank: a table that guards its ports, or no start."""

import subprocess

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import firewall_gate

CHAIN = {"chain": {"family": "inet", "table": "gpu_fleet", "name": "input", "hook": "input", "policy": "accept"}}
DPORT = {"payload": {"protocol": "tcp", "field": "dport"}}


def rule(*expr):
    return {"rule": {"family": "inet", "table": "gpu_fleet", "chain": "input", "expr": list(expr)}}


def ports(*values, op="=="):
    return {"match": {"op": op, "left": DPORT, "right": {"set": list(values)}}}


DROP = rule(ports(8000, {"range": [8001, 8003]}, {"range": [40000, 60999]}), {"counter": {}}, {"drop": None})


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ([CHAIN, DROP], []),
        ([CHAIN, rule({"match": {"op": "==", "left": DPORT, "right": 8001}}, {"drop": None})], ["40000-60999"]),
        ([CHAIN, rule(ports(8001, {"range": [40000, 50000]}), {"drop": None})], ["40000-60999"]),
        ([DROP], ["8001", "40000-60999"]),
        ([CHAIN], ["8001", "40000-60999"]),
        ([], ["8001", "40000-60999"]),
        ([CHAIN, rule(ports(8001, {"range": [40000, 60999]}), {"accept": None})], ["8001", "40000-60999"]),
        ([CHAIN, rule({"limit": {}}, {"drop": None})], ["8001", "40000-60999"]),
        (
            [
                CHAIN,
                rule(
                    ports(8001, {"range": [40000, 60999]}),
                    {"match": {"op": "==", "left": {"meta": {"key": "iifname"}}, "right": "eth0"}},
                    {"drop": None},
                ),
            ],
            ["8001", "40000-60999"],
        ),
        ([CHAIN, rule(ports(8001, {"range": [40000, 60999]}, op="!="), {"drop": None})], ["8001", "40000-60999"]),
    ],
    ids=["guarded", "one", "half", "no-hook", "empty", "nothing", "accepts", "no-port", "one-interface", "others"],
)
def test_what_is_guarded(rules, left):
    assert firewall_gate.unguarded({"nftables": rules}, [(8001, 8001), (40000, 60999)]) == left


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        (subprocess.CompletedProcess([], 0, '{"nftables": []}', ""), 75, "does not guard 8001, 40000-60999. Load it"),
        (
            subprocess.CompletedProcess([], 1, "", "Error: No such file or directory\nlist"),
            75,
            "is not loaded (Error: No",
        ),
        (OSError(2, "No such file or directory"), 75, "cannot be asked (/usr/sbin/nft: No such file"),
    ],
)
def test_no_start_says_why(monkeypatch, capsys, answer, status, said):
    def run(*_arguments, **_options):
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(firewall_gate.subprocess, "run", run)
    assert firewall_gate.main(["8001", "40000-60999"]) == status
    assert said in capsys.readouterr().err


def test_a_start(monkeypatch, capsys):
    import json

    loaded = subprocess.CompletedProcess([], 0, json.dumps({"nftables": [CHAIN, DROP]}), "")
    monkeypatch.setattr(firewall_gate.subprocess, "run", lambda *_arguments, **_options: loaded)
    assert firewall_gate.main(["8001", "8002", "8003", "40000-60999"]) == 0
    assert capsys.readouterr().err == ""
