"""Each fault of a GPU host raises its own finding and no other; a healthy host raises none."""

from __future__ import annotations

import json
import pathlib
import re
import sys
import time

import pytest
import yaml
from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tests" / "replay"))

import hosts
from ansible_collections.gpu_fleet.vllm.plugins.filter.gpu_judgement import gpu_groups, gpu_judgement
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import hardware, topology

KNOWN = yaml.safe_load((REPOSITORY / "data" / "hardware.yml").read_text())
TOPO = pathlib.Path(__file__).parent / "fixtures" / "topo"
ALL_NVLINK_DOWN_TO = {(3, other): "NV17" for other in range(8) if other != 3}
PCIE = {"links": dict.fromkeys(range(8))}


def pairs(link, numbers=range(8)):
    return {(i, j): link for i in numbers for j in numbers if i < j}


def judge(name="h100x8", expected=None, learned=None, groups=(), **changes):
    return hardware.judge(
        hosts.facts(name, **changes), KNOWN, expected=expected, learned=learned, groups=groups, host="gpu-01"
    )


@pytest.mark.parametrize("name", ["h200x2", "h100x8"])
@pytest.mark.parametrize("groups", [(), [[0, 1]]])
def test_a_healthy_host_has_no_finding(name, groups):
    facts = hosts.facts(name)
    expected = {"gpus": len(facts["gpus"]), "link": "NV18", "model": facts["gpus"][0]["name"]}
    assert hardware.judge(facts, KNOWN, expected=expected, learned=hardware.remember(facts), groups=groups) == []
    settings = {"host": "gpu-01", "releases": [{"version": "0.26.0", "accelerator": "cu130"}], "groups": groups}
    judged = gpu_judgement(facts, settings)
    assert judged["findings"] == []
    assert judged["stops"] == []


ACS = {"*": ["SrcValid", "ReqRedir", "CmpltRedir"]}
REQUIRES_RESET = dict.fromkeys(
    ("ecc.errors.uncorrected.volatile.total", "pcie.link.width.current", "mig.mode.current", "persistence_mode"),
    "[GPU requires reset]",
)


def unit(name):
    return f"/system.slice/{name}"


APP = {"gpu": 2, "pid": 4711, "process_name": "python3", "used_memory": "1200"}
XID = "NVRM: Xid (PCI:0000:{bus}:00): {code}, pid=1, name=x, text"

# id, severity, what was changed on the host, what judge is told besides
FAULTS = [
    ("gpu-count", "error", {}, {"expected": {"gpus": 9}}),
    ("gpu-count", "error", {}, {"expected": {"gpus": 7}}),
    ("gpu-count", "error", {"drop": (7,)}, {"expected": {"gpus": 8}}),
    ("gpu-model-unexpected", "error", {}, {"expected": {"model": "NVIDIA H200"}}),
    ("gpu-memory-unexpected", "error", {}, {"expected": {"memory_mib": 1}}),
    ("gpu-models-mixed", "warning", {"gpus": {5: {"name": "NVIDIA A100-SXM4-80GB"}}}, {}),
    ("gpu-memory-mixed", "warning", {"gpus": {5: {"memory.total": "40960"}}}, {}),
    ("nvlink-narrower", "error", {"cells": {(2, 3): "NV17"}}, {}),
    ("nvlink-narrower", "error", {"cells": ALL_NVLINK_DOWN_TO, "links": {3: {4: None}}}, {}),
    ("nvlink-missing", "error", {"cells": {(3, o): "SYS" for o in range(8) if o != 3}, "links": {3: None}}, {}),
    ("nvlink-inactive", "error", {"links": {3: {4: None}}}, {}),
    ("link-unexpected", "error", {}, {"expected": {"link": "nv19"}}),
    ("acs-on-path", "warning", {"name": "pcie", "acs": ACS}, {}),
    ("acs-on-path", "error", {"name": "pcie", "acs": ACS}, {"groups": [[0, 1]]}),
    ("acs-on-path", "info", {"name": "pcie", "acs": ACS}, {"groups": [[0], [1]]}),
    ("gpu-unanswered", "error", {"gpus": {3: {"memory.total": "[N/A]"}}}, {}),
    ("gpu-unanswered", "warning", {"gpus": {3: {"ecc.errors.uncorrected.volatile.total": "[Unknown Error]"}}}, {}),
    ("gpu-unanswered", "error", {"gpus": {3: REQUIRES_RESET}}, {}),
    (
        "nvlink-inactive",
        "info",
        {"links": {index: {4: None, 5: None} for index in range(8)}, "cells": pairs("NV16")},
        {},
    ),
    ("topology-unreadable", "warning", {"calls": {"topo -m": {"rc": 1, "out": "Failed"}}}, {}),
    (
        "topology-unreadable",
        "error",
        {"calls": {"topo -m": {"rc": 1, "out": "Failed"}}},
        {"expected": {"link": "nv18"}},
    ),
    ("group-beyond", "error", {}, {"groups": [[0, 9]]}),
    ("fabric-not-ready", "error", {"gpus": {"*": {"fabric.state": "In Progress", "fabric.status": "N/A"}}}, {}),
    ("fabric-not-ready", "error", {"gpus": {4: {"fabric.status": "Initialization Failed"}}}, {}),
    ("fabric-unhealthy", "error", {"health": "Unhealthy"}, {}),
    ("fabric-unhealthy", "warning", {"health": "Limited Capacity"}, {}),
    ("fabric-manager-version", "error", {"manager": "580.95.05"}, {}),
    ("fabric-manager-down", "error", {"manager_state": "inactive"}, {}),
    (
        "mig-tensor-parallel",
        "error",
        {"gpus": {0: {"mig.mode.current": "Enabled", "mig.mode.pending": "Enabled"}}},
        {"groups": [[0, 1]]},
    ),
    ("mig-pending", "warning", {"gpus": {0: {"mig.mode.pending": "Enabled"}}}, {}),
    ("pcie-width", "warning", {"gpus": {3: {"pcie.link.width.current": "8"}}}, {}),
    (
        "ecc-uncorrected",
        "error",
        {"gpus": {3: {"ecc.errors.uncorrected.volatile.total": "2", "ecc.errors.uncorrected.aggregate.total": "2"}}},
        {},
    ),
    ("ecc-history", "warning", {"gpus": {3: {"ecc.errors.uncorrected.aggregate.total": "2"}}}, {}),
    ("row-remap-failed", "error", {"gpus": {3: {"remapped_rows.failure": "Yes"}}}, {}),
    ("row-remap-pending", "warning", {"gpus": {3: {"remapped_rows.pending": "Yes"}}}, {}),
    ("row-remap-pending", "warning", {"gpus": {3: {"retired_pages.pending": "Yes"}}}, {}),
    ("xid-79", "error", {"xid": [XID.format(bus="1b", code=79)]}, {}),
    ("xid-63", "warning", {"xid": [XID.format(bus="1b", code=63)] * 3}, {}),
    ("xid-999", "warning", {"xid": [XID.format(bus="1b", code=999)]}, {}),
    ("foreign-process", "error", {"apps": [APP]}, {}),
    ("foreign-process", "error", {"apps": [{**APP, "unit": unit("ollama.service")}]}, {"groups": [[2, 3]]}),
    ("foreign-process", "warning", {"apps": [{**APP, "used_memory": "30"}]}, {}),
    ("foreign-process", "warning", {"apps": [APP]}, {"groups": [[0, 1]]}),
    ("persistence-off", "warning", {"gpus": {"*": {"persistence_mode": "Disabled"}}}, {}),
    ("p2p-refused", "error", {"p2p": {"read": {(0, 1): "TNS"}, "write": {(0, 1): "TNS"}}}, {}),
    ("p2p-refused", "warning", {"name": "pcie", "p2p": {"read": pairs("CNS"), "write": pairs("CNS")}}, {}),
    (
        "p2p-refused",
        "info",
        {
            "name": "pcie",
            "gpus": {"*": {"name": "NVIDIA GeForce RTX 4090"}},
            "p2p": {"read": pairs("CNS"), "write": pairs("CNS")},
        },
        {},
    ),
    ("tensor-parallel-across-sockets", "warning", {"name": "pcie"}, {"groups": [[0, 1, 4, 5]]}),
    ("driver-mismatch", "error", {"commands": {"modinfo -F version nvidia": "580.159.05"}}, {}),
    ("nouveau-loaded", "error", {"nouveau": True}, {}),
    ("topology-unreadable", "warning", {"calls": {"topo -m": "GPU0\tGPU1\nGPU0\t X \tNV18\n"}}, {}),
]


def facts_of(changes):
    """The facts of a host with a fault; `name: pcie` is eight cards in two sets of four behind PCIe switches."""
    changes = dict(changes)
    manager, state = changes.pop("manager", None), changes.pop("manager_state", None)
    nouveau, health = changes.pop("nouveau", None), changes.pop("health", None)
    if changes.pop("name", "") == "pcie":
        changes.update(PCIE)
        changes["cells"] = {**pairs("SYS"), **pairs("PIX", range(4)), **pairs("PIX", range(4, 8))}
        changes["gpus"] = {"*": {**changes.get("gpus", {}).get("*", {}), "fabric.state": "N/A", "fabric.status": "N/A"}}
    facts = hosts.facts("h100x8", **changes)
    # What the recording has in other forms on other systems is set in the facts themselves.
    if manager:
        facts["fabric_manager"]["installed"] = manager
    if state:
        facts["fabric_manager"]["state"] = state
    if health:
        facts["gpus"][5]["fabric"]["health"] = health
    if nouveau:
        facts["nouveau"] = True
    return facts


@pytest.mark.parametrize(
    ("id_", "severity", "changes", "told"), FAULTS, ids=lambda value: value if isinstance(value, str) else None
)
def test_a_fault_raises_exactly_its_finding(id_, severity, changes, told):
    found = hardware.judge(facts_of(changes), KNOWN, host="gpu-01", **told)
    assert [(finding.id, finding.severity) for finding in found] == [(id_, severity)]
    (finding,) = found
    assert finding.where == "gpu-01"
    assert len(finding.message) > 10
    assert len(finding.fix) > 10


def test_every_finding_is_documented_and_has_such_a_host():
    """Elsewhere: raised by a test of its own below, or by tests of compatibility and bandwidth."""
    source = "".join(
        (REPOSITORY / "plugins" / "module_utils" / f"{name}.py").read_text()
        for name in ("hardware", "compatibility", "bandwidth")
    )
    raised = set(re.findall(r'(?:look\.finding|Finding)\(\s*"([a-z0-9-]+)"', source))
    raised |= {"gpu-model-unexpected", "gpu-memory-unexpected"}
    raised |= {f"bandwidth-{state}" for state in ("corrupt", "hung", "failed", "low")}
    raised |= {"learned-unreadable", "xid-CODE"}
    assert raised == set(hardware.FINDINGS)
    elsewhere = {"gpu-none", "gpu-lost", "gpu-tool-failed", "gpu-tool-missing", "driver-not-loaded", "link-asymmetric"}
    elsewhere |= {"topology-changed", "release-unfit", "release-none", "learned-unreadable"}
    shown = {re.sub(r"xid-\d+", "xid-CODE", fault[0]) for fault in FAULTS}
    assert {id_ for id_ in raised if not id_.startswith("bandwidth-")} == shown | elsewhere


def test_a_host_that_runs_no_release():
    facts = hosts.facts("h200x2", gpus={"*": {"compute_cap": "6.0"}})
    assert [found["id"] for found in gpu_judgement(facts, {})["findings"]] == ["release-none"]


def test_the_numbers_are_in_the_message():
    (found,) = judge(gpus={3: {"pcie.link.width.current": "8"}})
    assert "8 PCIe lanes of 16" in found.message
    assert "GPU3" in found.message
    (found,) = judge(cells={(2, 3): "NV17"})
    assert "2-3 NV17" in found.message
    assert "NV18" in found.message
    (found,) = judge(apps=[{**APP, "unit": unit("ollama.service")}])
    assert "4711" in found.message
    assert "ollama.service" in found.message


def test_our_own_servers_are_no_foreigners():
    assert judge(apps=[{**APP, "unit": unit("vllm@chat.0.service")}]) == []


def test_what_an_application_did_to_itself_is_no_finding():
    assert judge(xid=[XID.format(bus="1b", code=code) for code in (13, 31, 43, 45)]) == []


def test_generation_at_idle_is_no_finding():
    assert judge(gpus={"*": {"pcie.link.gen.current": "1"}}) == []


def test_what_nobody_could_tell_is_no_finding():
    facts = hosts.facts("h100x8")
    facts["fabric_manager"].update(state=None, installed=None)
    for gpu in facts["gpus"]:
        gpu.update(persistence=None, fabric=dict.fromkeys(gpu["fabric"]), ecc=dict.fromkeys(gpu["ecc"]))
        gpu.update(pcie=dict.fromkeys(gpu["pcie"]), mig=dict.fromkeys(gpu["mig"]), nvlinks=[], bridges=[])
        gpu.update(remapped_rows=dict.fromkeys(gpu["remapped_rows"]), retired_pages_pending=None)
    assert hardware.judge(facts, KNOWN) == []


def test_acs_does_not_matter_to_gpus_that_nvlink_joins():
    assert judge(acs={"*": ["SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd"]}) == []


def test_a_card_that_fell_off_the_bus():
    facts = hosts.facts("h100x8", drop=(7,))
    facts["pci_gpus"] = hosts.facts("h100x8")["pci_gpus"]
    (found,) = hardware.judge(facts, KNOWN)
    assert found.id == "gpu-lost"
    assert facts["pci_gpus"][7]["address"] in found.message


def test_a_tool_that_fails_says_why():
    words = "Failed to initialize NVML: Driver/library version mismatch"
    facts = hosts.facts("h200x2", every={"out": words, "status": 18})
    found = hardware.judge(facts, KNOWN)
    assert [finding.id for finding in found] == ["gpu-tool-failed"]
    assert words in found[0].message


def test_no_gpu_is_a_finding_only_where_some_are_expected():
    facts = hosts.facts("h200x2", drop=(0, 1), commands={"nvidia-smi": None})
    facts.update(vendor="none", gpus=[], pci_gpus=[], error=None)
    assert hardware.judge(facts, KNOWN) == []
    assert [finding.id for finding in hardware.judge(facts, KNOWN, expected={"gpus": 2})] == ["gpu-none"]
    assert hardware.summary(facts) == "no GPU"


def test_a_card_without_a_driver():
    facts = hosts.facts("h200x2", commands={"nvidia-smi": None})
    assert [finding.id for finding in hardware.judge(facts, KNOWN)] == ["gpu-tool-missing"]
    facts["driver"]["loaded"] = None
    assert [finding.id for finding in hardware.judge(facts, KNOWN)] == ["driver-not-loaded"]


def test_halves_of_a_link_that_differ():
    facts = hosts.facts("h200x2")
    facts["topology"]["matrix"] = facts["topology"]["matrix"].replace("GPU1\tNV18", "GPU1\tSYS")
    found = [finding.id for finding in hardware.judge(facts, KNOWN)]
    assert found[0] == "link-asymmetric"


def test_a_mesh_of_unequal_links_is_healthy():
    """Eight V100s: two links here, one there, six each."""
    for case in ("43", "45", "23", "25", "47"):
        table = topology.read((TOPO / f"{case}.txt").read_bytes().decode())
        assert hardware.judge_matrix(table, KNOWN) == []


def test_one_link_less_than_its_siblings_in_a_saved_matrix():
    table = topology.read((TOPO / "41.txt").read_text())
    (found,) = hardware.judge_matrix(table, KNOWN)
    assert found.id == "nvlink-narrower"
    assert "GPU2, GPU3" in found.message
    assert "2-3 NV17" in found.message


def test_a_repair_is_noticed():
    before = json.loads(json.dumps(hardware.remember(hosts.facts("h100x8"))))
    (found,) = judge(learned=before, gpus={3: {"uuid": "GPU-ffffffff-0000-4000-8000-000000000000"}})
    assert found.id == "topology-changed"
    assert "uuid" in found.message
    found = judge(learned=before, cells={(2, 3): "NV17"})
    assert {finding.id for finding in found} == {"topology-changed", "nvlink-narrower"}
    assert judge(learned=before) == []


def test_all_gpus_gone_is_noticed():
    before = hardware.remember(hosts.facts("h100x8"))
    (found,) = hardware.judge({**hardware.EMPTY, "vendor": "none"}, KNOWN, learned=before)
    assert found.id == "gpu-none"


def test_what_was_not_told_is_no_change():
    before = hardware.remember(hosts.facts("h100x8"))
    found = judge(learned=before, calls={"topo -m": {"rc": 1, "out": "Failed"}})
    assert [finding.id for finding in found] == ["topology-unreadable"]


@pytest.mark.parametrize(
    "text", ["", "{garbage", "[]", '{"gpus": null}', '{"gpus": [{"name": 1}]}', '{"pairs": {}}', "[" * 100000]
)
def test_a_damaged_file_of_what_was_learned_is_named(text):
    judged = gpu_judgement(
        hosts.facts("h200x2"),
        {"host": "gpu-01", "has_learned": True, "learned": text, "learned_file": "/x/gpu-01.json"},
    )
    (stop,) = judged["stops"]
    assert stop.startswith("error learned-unreadable: gpu-01: /x/gpu-01.json")
    assert "gpu_topology_learn" in stop


def test_what_was_learned_can_be_read_again():
    facts = hosts.facts("h100x8")
    text = json.dumps(hardware.remember(facts))
    assert gpu_judgement(facts, {"has_learned": True, "learned": text, "learned_file": "x"})["findings"] == []


@pytest.mark.parametrize("driver", ["amdgpu", "vfio-pci", None])
def test_a_display_of_another_maker_and_a_card_given_away_are_not_lost(driver):
    facts = hosts.facts("h100x8")
    card = {"address": "0000:0c:00.0", "vendor_id": "10de" if driver == "vfio-pci" else "1002", "device_id": "164e"}
    facts["pci_gpus"].append({**card, "driver": driver})
    assert hardware.judge(facts, KNOWN) == []


def test_half_of_an_unequal_mesh_is_healthy():
    cells = {(0, 1): "NV1", (0, 2): "NV1", (0, 3): "NV2", (1, 2): "NV2", (1, 3): "NV1", (2, 3): "NV2"}
    rows = ["\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity"]
    for i in range(4):
        rows.append(
            "\t".join([f"GPU{i}", *(" X " if i == j else cells[min(i, j), max(i, j)] for j in range(4)), "0-7"])
        )
    assert hardware.judge_matrix(topology.read("\n".join(rows)), KNOWN) == []


def test_acs_never_switches_nvlink_off():
    facts = hosts.facts("h100x8", acs=ACS)
    assert hardware.recommend(facts, KNOWN)["nccl"][0]["variables"] == {}
    cells = {**pairs("SYS", range(4)), (0, 1): "NV4", (2, 3): "NV4"}
    facts = hosts.facts("h100x8", cells=cells, acs=ACS)
    told = hardware.recommend(facts, KNOWN, [[0, 1], [0, 1, 2, 3]])["nccl"]
    assert [entry["variables"] for entry in told] == [{}, {"NCCL_P2P_LEVEL": "NVL"}]


def test_many_gpus_are_grouped_in_time():
    count = 24
    rows = ["\t" + "\t".join(f"GPU{i}" for i in range(count)) + "\tCPU Affinity"]
    for i in range(count):
        links = (" X " if i == j else "PIX" if i // 8 == j // 8 else "SYS" for j in range(count))
        rows.append("\t".join([f"GPU{i}", *links, "0-7"]))
    began = time.monotonic()
    groups = hardware.partition(topology.read("\n".join(rows)), 8)
    assert [list(group) for group in groups] == [list(range(start, start + 8)) for start in (0, 8, 16)]
    assert time.monotonic() - began < 5


def test_a_card_for_the_display_decides_nothing():
    changes = {0: {"name": "NVIDIA GeForce GT 1030", "compute_cap": "6.1"}}
    settings = {"groups": [[1, 2]], "releases": [{"version": "0.26.0", "accelerator": "cu130"}]}
    assert gpu_judgement(hosts.facts("h100x8", gpus=changes), settings)["stops"] == []


def test_the_groups_of_a_plan():
    instance = {"env": {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "config": {"tensor-parallel-size": 2}}
    assert gpu_groups([instance, {"env": {}, "config": {}}]) == [[0, 1], [2, 3]]


def advice(case, groups=()):
    facts = {**hardware.EMPTY, "topology": {"matrix": (TOPO / f"{case}.txt").read_bytes().decode(), "p2p": {}}}
    return hardware.recommend(facts, KNOWN, groups)


def test_pairs_with_a_bridge_are_taken_together():
    told = advice("25")  # four A6000s, bridges 0-3 and 1-2
    assert [group["gpus"] for group in told["sizes"]["2"]] == [[0, 3], [1, 2]]
    assert {group["verdict"] for group in told["sizes"]["2"]} == {"good"}
    assert told["sizes"]["4"][0]["verdict"] == "poor"
    assert told["nccl"] == [
        {"gpus": [0, 1, 2, 3], "variables": {"NCCL_P2P_LEVEL": "NVL"}, "why": told["nccl"][0]["why"]}
    ]
    assert "SYS" in told["nccl"][0]["why"]


def test_groups_stay_within_a_switch():
    told = advice("53")  # 0-3 and 4-7 behind switches, PIX and PXB
    assert [group["gpus"] for group in told["sizes"]["4"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [group["verdict"] for group in told["sizes"]["4"]] == ["fair", "fair"]
    assert told["sizes"]["2"][0]["gpus"] == [0, 1]


def test_nvlink_throughout_needs_nothing():
    told = advice("65")
    assert told["sizes"]["8"][0]["verdict"] == "good"
    assert told["nccl"][0]["variables"] == {}


def test_peer_access_is_switched_off_only_where_it_is_impossible_or_goes_wrong():
    refused = facts_of({"name": "pcie", "p2p": {"read": pairs("CNS"), "write": pairs("CNS")}})
    assert hardware.recommend(refused, KNOWN, [[0, 1]])["nccl"][0]["variables"] == {"NCCL_P2P_DISABLE": "1"}
    redirected = facts_of({"name": "pcie", "acs": {"*": ["ReqRedir"]}})
    assert hardware.recommend(redirected, KNOWN, [[0, 1]])["nccl"][0]["variables"] == {"NCCL_P2P_DISABLE": "1"}
    healthy = facts_of({"name": "pcie"})
    told = hardware.recommend(healthy, KNOWN, [[0, 1], [0, 1, 4, 5]])["nccl"]
    assert [entry["variables"] for entry in told] == [{}, {"NCCL_P2P_LEVEL": "PIX"}]


def test_every_recommended_group_is_a_partition():
    for path in sorted(TOPO.glob("*.txt")):
        try:
            table = topology.read(path.read_bytes().decode())
        except topology.Refused:
            continue
        for size, groups in advice(path.stem)["sizes"].items():
            members = [gpu for group in groups for gpu in group["gpus"]]
            assert sorted(members) == list(range(table.gpus))
            assert {len(group["gpus"]) for group in groups} == {int(size)}
            worst = [max(topology.quality(link) for link in table.among(group["gpus"])) for group in groups]
            assert worst == sorted(worst), path.stem


def test_a_release_that_the_host_cannot_run_stops_it():
    facts = hosts.facts("h200x2")
    facts["driver"].update(loaded="570.124.06", installed="570.124.06")
    settings = {"host": "gpu-01", "releases": [{"version": "0.26.0", "accelerator": "cu130"}]}
    judged = gpu_judgement(facts, settings)
    (stop,) = judged["stops"]
    assert "found driver 570.124.06" in stop
    assert "580.65.06" in stop
    assert gpu_judgement(facts, {**settings, "accept": ["release-unfit"]})["stops"] == []
    assert gpu_judgement(facts, {**settings, "fail_on": "never"})["stops"] == []
