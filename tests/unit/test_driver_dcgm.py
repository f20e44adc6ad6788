"""What a driver's plan has beside the driver: DCGM of the right CUDA build, its exporter, the container toolkit."""

from __future__ import annotations

import pytest
import yaml
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_apt, driver_case, driver_plan
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_packages as names
from conftest import REPOSITORY
from test_driver_plan import KNOWN, V, bare, choose, ids, offered, only, running

DCGM = KNOWN["dcgm"]
EVERY = [*DCGM["packages"], *DCGM["recommended"]]
CUDA12 = [name.format(cuda="12") for name in EVERY]
CUDA13 = [name.format(cuda="13") for name in EVERY]


def with_dcgm(*versions, exporter=("4.8.2",), without=(), driver=(V,)):
    """What NVIDIA's repository offers, with DCGM in these versions for both CUDA builds."""
    found = offered(*driver)
    for name in [*CUDA12, *CUDA13]:
        if name not in without:
            found[name] = [{"version": f"1:{version}-1", "origin": "NVIDIA"} for version in versions]
    found[DCGM["exporter"]] = [{"version": f"{version}-1", "origin": "NVIDIA"} for version in exporter]
    return found


def test_dcgm_comes_in_the_build_for_the_cuda_of_the_driver_and_all_of_it_in_one_version():
    plan = choose(want={"dcgm": "4.5.3"}, available=with_dcgm("4.6.0", "4.5.3")).plan
    mine = {name: version for name, version in plan.packages.items() if names.matches(name, DCGM["globs"])}
    assert mine == dict.fromkeys(CUDA13, "1:4.5.3-1")
    assert plan.beside == sorted(mine)
    assert plan.because["datacenter-gpu-manager-4-cuda13"] == "DCGM 4.5.3 for CUDA 13"
    assert set(mine) <= set(plan.holds)
    assert "datacenter-gpu-manager-4-cuda13=1:4.5.3-1" in plan.arguments


def test_failure_dcgm_of_the_wrong_cuda_major_follows_the_driver_when_its_branch_changes():
    # NVIDIA/DCGM#255, dsx-ai-factory/infra-controller PR 384: the driver went from 575 to 580, DCGM stayed with cuda12
    older = {"version": "570.211.01", "dcgm": "4.5.3"}
    plan = choose(want=older, available=with_dcgm("4.5.3", driver=("570.211.01",))).plan
    assert plan is None  # of branch 570 no package names are known for Debian 12
    named = {**older, "packages": ["cuda-drivers"]}
    have = {**with_dcgm("4.5.3"), "cuda-drivers": [{"version": "570.211.01-1", "origin": "NVIDIA"}]}
    plan = choose(want=named, available=have).plan
    assert set(CUDA12) <= set(plan.packages)
    assert not set(CUDA13) - set(CUDA12) & set(plan.packages)


@pytest.mark.parametrize(
    ("loaded", "cuda", "branch", "majors"),
    [
        (None, None, "580", ["13"]),
        (None, None, "575", ["12"]),
        (None, None, "610", ["13"]),
        (None, None, "620", []),  # not read which CUDA it brings
        ("620.10.01", "14.0", "620", ["14"]),  # the driver says so itself
        ("575.57.08", "12.9", "580", ["13"]),  # what is loaded now does not count for what comes
    ],
)
def test_the_cuda_of_a_branch(loaded, cuda, branch, majors):
    from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_beside, driver_case

    facts = bare(driver={"loaded": loaded, "installed": loaded, "flavour": "open", "cuda": cuda})
    case = driver_case.Case(facts, {}, {"system": "debian-12"}, KNOWN, versions=None, where="gpu-01")
    assert driver_beside.cuda_majors(case, branch) == majors


def test_gpus_before_turing_get_both_builds():
    plan = choose(bare("1db4"), want={"dcgm": "4.5.3"}, available=with_dcgm("4.5.3")).plan  # V100
    assert {*CUDA12, *CUDA13} <= set(plan.packages)
    assert plan.because["datacenter-gpu-manager-4-cuda12"] == "DCGM 4.5.3 for CUDA 12 and 13"


def test_a_branch_whose_cuda_is_not_known_is_refused_until_it_is_named():
    have = with_dcgm("4.6.0", driver=("620.10.01",))
    want = {"version": "620.10.01", "dcgm": "4.6.0"}
    assert "nvidia-smi shows as CUDA Version" in only(choose(want=want, available=have), "dcgm-cuda")
    assert set(CUDA13) <= set(choose(want={**want, "dcgm_cuda": "13"}, available=have).plan.packages)
    assert "no DCGM 4.6.0 for CUDA 14 is known" in only(
        choose(want={**want, "dcgm_cuda": "14"}, available=have), "dcgm-cuda"
    )


def test_a_version_from_before_cuda_13_is_refused_before_the_lists_are_read():
    told = only(choose(want={"dcgm": "4.3.1"}, available=None), "dcgm-cuda")
    assert "no DCGM 4.3.1 for CUDA 13" in told
    assert "gpu_driver_dcgm to 4.4.0 or newer" in told


def test_every_package_is_named_before_the_lists_are_read():
    plan_without_lists = choose(want={"dcgm": "4.5.3", "dcgm_exporter": "4.8.2", "toolkit": "1.17.8"}, available=None)
    packages = plan_without_lists.plan.packages
    assert {packages[name] for name in [*CUDA13, DCGM["exporter"], *KNOWN["toolkit"]]} == {None}


def test_a_build_that_lacks_the_version_is_refused_with_what_is_offered():
    have = with_dcgm("4.6.0", "4.5.3")
    have["datacenter-gpu-manager-4-cuda13"] = have["datacenter-gpu-manager-4-cuda13"][1:]
    told = only(choose(want={"dcgm": "4.6.0"}, available=have), "dcgm-version")
    assert "datacenter-gpu-manager-4-cuda13 4.6.0 is not offered (1:4.5.3-1 is)" in told


def test_a_source_without_the_recommended_packages_leaves_profiling_out_and_says_so():
    without = [name for name in CUDA13 if "proprietary" in name]
    choice = choose(want={"dcgm": "4.5.3"}, available=with_dcgm("4.5.3", without=without))
    assert ids(choice, "warning") == ["dcgm-profiling"]
    assert not set(without) & set(choice.plan.packages)


def test_a_distribution_has_no_dcgm():
    have = {
        name: [{"version": "535.309.01-1", "origin": "Debian"}]
        for name in ("nvidia-open-kernel-dkms", "libcuda1", "nvidia-smi")
    }
    want = {"source": "distribution", "version": "535.309.01", "dcgm": "4.5.3"}
    told = only(choose(want=want, available=have, sources=[]), "dcgm-version")
    assert "the distribution has not" in told


def test_the_exporter_goes_with_its_dcgm():
    want = {"dcgm": "4.5.3", "dcgm_exporter": "4.8.2"}
    plan = choose(want=want, available=with_dcgm("4.5.3")).plan
    assert plan.packages[DCGM["exporter"]] == "4.8.2-1"
    assert DCGM["exporter"] in plan.beside
    have = with_dcgm("4.6.0", exporter=("4.8.3", "4.8.2"))
    told = only(choose(want={**want, "dcgm": "4.6.0"}, available=have), "dcgm-pair")
    assert "exporter 4.8.2 goes with DCGM 4.5.3" in told
    assert "gpu_driver_dcgm_exporter: 4.8.3" in told


def test_an_exporter_whose_pair_is_not_known_is_said_to_be():
    choice = choose(want={"dcgm": "4.7.0", "dcgm_exporter": "4.9.0"}, available=with_dcgm("4.7.0", exporter=("4.9.0",)))
    assert ids(choice, "warning") == ["dcgm-pair"]
    assert choice.plan.packages[DCGM["exporter"]] == "4.9.0-1"


def test_an_exporter_without_dcgm_is_refused_with_the_version_that_it_needs():
    told = only(choose(want={"dcgm_exporter": "4.8.2"}, available=with_dcgm("4.5.3")), "dcgm-version")
    assert "Set gpu_driver_dcgm: 4.5.3" in told


def test_dcgm_3_has_to_be_taken_away_by_hand():
    there = {"datacenter-gpu-manager": {"version": "1:3.3.9", "origin": "NVIDIA"}}
    told = only(choose(want={"dcgm": "4.5.3"}, available=with_dcgm("4.5.3"), packages=there), "dcgm-old")
    assert "apt-get purge datacenter-gpu-manager" in told


def test_dcgm_alone_changes_without_stopping_what_serves_and_starts_anew_with_consent():
    facts, packages = running(V)
    units = ["vllm@chat.0.service", "nvidia-dcgm.service"]
    there = {"available": with_dcgm("4.5.3"), "packages": packages}
    want = {"dcgm": "4.5.3", "in_service": False}
    choice = choose(facts, want, **there)
    assert choice.findings == []
    plan = choice.plan
    assert (plan.changes, plan.beside_changes, plan.reboot, plan.stop) == (False, True, False, [])
    told = only(choose(facts, want, units=units, **there), "stop-consent")
    assert "nvidia-dcgm.service runs on this host, and DCGM cannot change under it" in told
    agreed = choose(facts, {**want, "stop_services": True}, units=units, **there).plan
    assert (agreed.changes, agreed.stop) == (False, ["nvidia-dcgm.service"])
    packages.update({name: {"version": "1:4.5.3-1", "origin": "NVIDIA"} for name in plan.beside})
    files = {driver_case.PATHS[kind]: text for kind, text in plan.files.items()}
    again = choose(facts, want, units=units, files=files, **there).plan
    assert (again.changes, again.beside_changes, again.stop) == (False, False, [])
    other = {**files, driver_case.PATHS["dcgm_engine"]: None}
    assert "nvidia-dcgm.service runs" in only(choose(facts, want, units=units, files=other, **there), "stop-consent")


def test_parts_that_are_there_move_along_and_the_simulation_agrees():
    facts, packages = running(V)
    there = [*CUDA13, "datacenter-gpu-manager-4-cuda12", "libdcgm", "dcgmi"]
    packages.update({name: {"version": "1:4.6.0-1", "origin": "NVIDIA", "hold": True} for name in there})
    have = with_dcgm("4.7.0", "4.6.0")
    have.update(dict.fromkeys(("libdcgm", "dcgmi"), have["datacenter-gpu-manager-4-core"]))
    plan = choose(facts, {"dcgm": "4.7.0"}, available=have, packages=packages).plan
    assert {plan.packages[name] for name in there} == {"1:4.7.0-1"}
    assert set(there) <= set(plan.unhold)
    lines = [f"Inst {name} [1:4.6.0-1] (1:4.7.0-1 NVIDIA:1.0 [amd64])" for name in there]
    lines += ["Inst nv-hostengine (1:4.7.0-1 NVIDIA:1.0 [amd64])"]
    lines += ["7 upgraded, 1 newly installed, 0 to remove and 0 not upgraded."]
    seen = driver_apt.read("\n".join(lines))
    assert driver_apt.compare(seen, plan.packages, version=V, known=KNOWN) == []


def test_the_parts_of_a_metapackage_are_pinned_to_its_version():
    plan = choose(want={"dcgm": "4.7.0"}, available=with_dcgm("4.7.0")).plan
    records = plan.files["preferences"].split("\n\n")
    mine = [record for record in records if "libdcgm" in record]
    assert len(mine) == 1
    assert "Pin: version 1:4.7.0-1\nPin-Priority: 1001" in mine[0]
    without = choose(available=with_dcgm("4.7.0")).plan
    assert "libdcgm" not in without.files["preferences"]


def test_unattended_upgrades_leave_dcgm_alone_where_it_is_planned():
    plan = choose(want={"dcgm": "4.5.3"}, available=with_dcgm("4.5.3")).plan
    assert {"datacenter-gpu-manager-4-", "libdcgm$", "nv-hostengine$"} <= set(plan.blocklist)
    assert "libdcgm$" not in choose(available=with_dcgm("4.5.3")).plan.blocklist


def test_preinstalled_installs_nothing_beside_the_driver_either():
    facts, packages = running(V)
    for want in ({"dcgm": "4.5.3"}, {"toolkit": "1.17.8"}):
        told = only(choose(facts, {"source": "preinstalled", **want}, packages=packages), "driver-source")
        assert "installs nothing" in told


def test_the_units_of_dcgm_are_stopped_before_the_driver_changes():
    order = KNOWN["stop_order"]
    assert (
        order.index("nvidia-dcgm-exporter.service")
        < order.index("nvidia-dcgm.service")
        < order.index("nvidia-persistenced.service")
    )
    assert set(DCGM["units"].values()) <= set(order)


def test_the_data_names_versions_as_text():
    told = yaml.safe_load((REPOSITORY / "data" / "driver.yml").read_text())["dcgm"]
    assert all(isinstance(part, str) for pair in told["pairs"].items() for part in pair)
    assert driver_plan.WANT["dcgm"] is None
