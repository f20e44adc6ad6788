"""What role gpu_driver judges beside the plan: variables without a host, turns, the plan as text, the proof by cuInit."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import yaml
from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tests" / "replay"))

import hosts
from ansible_collections.gpu_fleet.vllm.plugins.filter import driver
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import cuda, driver_proof, driver_turns, driver_want

KNOWN = yaml.safe_load((REPOSITORY / "data" / "driver.yml").read_text())
VERSIONS = yaml.safe_load((REPOSITORY / "data" / "versions.yml").read_text())
V = "580.126.20"
DEBIAN = "http://deb.example/debian"


# Variables


def judge(system="debian-12", accelerator="cu130", **want):
    return driver_want.judge(
        {"source": "nvidia", "version": V, **want},
        system=system,
        machine="x86_64",
        release={"version": "0.26.0", "accelerator": accelerator},
        known=KNOWN,
        versions=VERSIONS,
    )


@pytest.mark.parametrize(
    "want",
    [
        {},
        {"source": "preinstalled", "version": None},
        {"source": "preinstalled", "version": None, "system": "rocky-9"},
        {"source": "preinstalled", "mig_layout": {0: ["1g.10gb", 19, "1g.10gb+me"]}},
        {"source": "distribution", "version": "535.261.03", "accelerator": "cpu"},
        {"source": "mirror", "folder": "/srv/packages", "in_service": "false"},
        {"source": "mirror", "repository": "https://m.example/", "repository_key": "/k.asc"},
        {"system": "debian-13", "version": "590.48.01"},
        {"version": "580.95.05-0ubuntu1", "system": "ubuntu-24.04"},
        {"repository": "file:/srv/driver-repository/nvidia/", "imex_nodes": ["192.0.2.1", "fd00::1"]},
        {"repository_fingerprint": "EB69 3B30 35CD 5710 E231 E123 A4B4 6996 3BF8 63CC"},
    ],
    ids=str,
)
def test_variables_that_are_right(want):
    assert judge(**want) == []


@pytest.mark.parametrize(
    ("want", "id_", "says"),
    [
        ({"version": None}, "driver-version", "no exact version"),
        ({"version": 580}, "driver-version", "no version of a driver"),
        ({"version": "580"}, "driver-version", "no version of a driver"),
        ({"source": "preinstalled", "version": 550.90}, "driver-version", "in quotes"),
        ({"source": "preinstalled", "in_service": True}, "driver-serving", "site.yml, too"),
        ({"in_service": "yes"}, "driver-serving", "Take it away"),
        ({"version": "latest"}, "driver-version", "'latest'"),
        ({"branch": "590"}, "driver-version", "not of branch 590"),
        ({"system": "rocky-9"}, "driver-system", "not on rocky-9"),
        ({"source": "distribution", "version": "535.261.03"}, "driver-wheels", "CUDA 13 wheels need 580"),
        ({"source": "distribution", "accelerator": "cpu"}, "driver-branch", "debian-12 itself has branch 535"),
        (
            {"source": "distribution", "system": "ubuntu-24.04", "version": "570.1.1", "accelerator": "cu129"},
            "driver-transitional",
            "brings 580",
        ),
        ({"source": "mirror"}, "driver-source", "neither is set"),
        ({"source": "mirror", "repository": "https://m.example/"}, "driver-key", "which key"),
        (
            {"source": "mirror", "repository": "https://m.example/", "repository_key": "k", "folder": "/f"},
            "driver-source",
            "both are set",
        ),
        ({"folder": "/f"}, "driver-source", "gpu_driver_source is nvidia"),
        ({"source": "preinstalled", "repository": "https://m.example/"}, "driver-source", "is preinstalled"),
        ({"repository_fingerprint": "3BF863CC"}, "driver-key", "no fingerprint"),
        ({"repository": "htp://m.example/"}, "driver-source", "no address of a repository"),
        ({"repository": "m.example/debian12"}, "driver-source", "no address of a repository"),
        ({"source": "preinstalled", "imex_nodes": ["10.0.0.300"]}, "driver-imex", "10.0.0.300"),
        ({"system": "debian-13"}, "driver-branch", "began with branch 590"),
        ({"source": "preinstalled", "mig_layout": {0: []}}, "driver-mig", "0: []"),
        ({"source": "preinstalled", "mig_layout": {"all": ["1g.10gb"]}}, "driver-mig", "'all'"),
        ({"source": "preinstalled", "mig_layout": {1: ["1g10gb; reboot"]}}, "driver-mig", "reboot"),
    ],
    ids=str,
)
def test_variables_that_are_wrong(want, id_, says):
    found = judge(**want)
    assert [fault[0] for fault in found] == [id_], found
    assert says in found[0][1] + found[0][2]
    assert len(found[0][2]) > 15


# Turns

REPLICAS = {
    "chat.0": {"hosts": ["a"]},
    "chat.1": {"hosts": ["b"]},
    "big.0": {"hosts": ["c", "d"]},
    "mix.0": {"hosts": ["d", "e"]},
}


def test_hosts_that_act_as_one_take_one_turn_together_and_others_alone():
    assert driver_turns.turns({"replicas": REPLICAS}, ["a", "b", "c", "d", "e", "f"]) == [
        {"hosts": ["a"], "replicas": ["chat.0"]},
        {"hosts": ["b"], "replicas": ["chat.1"]},
        {"hosts": ["c", "d", "e"], "replicas": ["big.0", "mix.0"]},
        {"hosts": ["f"], "replicas": []},
    ]


def test_hosts_of_a_replica_on_ray_take_one_turn_though_its_server_is_on_the_head_alone():
    replicas = {"ray.0": {"hosts": ["a"], "ray_hosts": ["a", "b"]}, "chat.0": {"hosts": ["c"], "ray_hosts": []}}
    assert driver_turns.turns({"replicas": replicas}, ["b", "a", "c"]) == [
        {"hosts": ["b", "a"], "replicas": ["ray.0"]},
        {"hosts": ["c"], "replicas": ["chat.0"]},
    ]
    assert driver.driver_turns({"replicas": replicas}, ["b"])[0]["absent"] == ["a"]


def test_a_run_that_leaves_out_a_host_of_a_replica_knows_it():
    turn = driver_turns.turns({"replicas": REPLICAS}, ["c"])[0]
    assert turn["hosts"] == ["c", "d", "e"]
    assert driver_turns.absent(turn, ["c"]) == ["d", "e"]
    assert driver.driver_turns({"replicas": REPLICAS}, ["c"])[0]["absent"] == ["d", "e"]


@pytest.mark.parametrize(
    ("active", "lost"),
    [
        ({"a": ["chat.0"], "b": ["chat.1"]}, []),
        ({"a": ["chat.0"], "b": []}, ["chat"]),
        ({"a": ["chat.0"]}, ["chat"]),
        ({"a": [], "b": []}, []),  # nothing serves, so nothing is lost
    ],
)
def test_a_service_keeps_a_server(active, lost):
    turn = {"hosts": ["a"], "replicas": ["chat.0"]}
    assert driver_turns.outages({"replicas": REPLICAS}, turn, active) == lost
    units = {host: [f"vllm@{name}.service" for name in names] for host, names in active.items()}
    assert driver.driver_outages({"replicas": REPLICAS}, {"turn": turn, "active": units}) == lost


def test_no_other_replica_of_a_service_leaves_while_one_waits_for_its_reboot():
    turn = {"hosts": ["b"], "replicas": ["chat.1"]}
    asked = {"turn": turn, "waiting": ["a", "c"]}
    assert driver.driver_waiting({"replicas": REPLICAS}, asked) == ["chat.0 on a"]
    assert driver.driver_waiting({"replicas": REPLICAS}, {**asked, "waiting": ["b", "e"]}) == []
    bare_host = {"turn": {"hosts": ["f"], "replicas": []}, "waiting": ["a"]}
    assert driver.driver_waiting({"replicas": REPLICAS}, bare_host) == []


def test_half_a_replica_serves_nobody():
    turn = {"hosts": ["a"], "replicas": ["chat.0"]}
    replicas = {"chat.0": {"hosts": ["a"]}, "chat.1": {"hosts": ["c", "d"]}}
    assert driver_turns.outages({"replicas": replicas}, turn, {"a": ["chat.0"], "c": ["chat.1"], "d": []}) == ["chat"]


# The plan as the role shows it


def surroundings(**changes):
    """What module driver_facts returns on a bare Debian 12."""
    return {
        "system": "debian-12",
        "kernel": "6.1.0-50-cloud-amd64",
        "kernels": {"6.1.0-50-cloud-amd64": {"headers": True, "initrd": None}},
        "packages": {},
        "unsettled": {},
        "interrupted": False,
        "audit": "",
        "sources": [
            {
                "file": "/etc/apt/sources.list",
                "uri": DEBIAN,
                "suite": "bookworm",
                "components": ["main"],
                "signed_by": "/k",
            }
        ],
        "secure_boot": None,
        "key_enrolled": None,
        "nvlink5": False,
        "modules": None,
        "units": [],
        "dkms": "",
        "runfile": False,
        "compat": [],
        "mark": None,
        **changes,
    }


OPEN = {"nvidia-open-kernel-dkms": "535.261.03-1", "libcuda1": "535.261.03-1", "nvidia-smi": "535.261.03-1"}
OFFERED = {name: [{"version": version, "origin": "Debian"}] for name, version in OPEN.items()}
WANT = {"source": "distribution", "version": "535.261.03", "persistence": False}
SIMULATED = "".join(f"Inst {name} ({version} Debian:12 [amd64])\n" for name, version in OPEN.items())
CLOSING = "3 upgraded, 3 newly installed, 0 to remove and 9 not upgraded.\n"


def bare(**changes):
    facts = hosts.facts("h200x2")
    return {
        **facts,
        "gpus": [],
        "driver": {"loaded": None, "installed": None, "flavour": None, "cuda": None},
        **changes,
    }


def planned(simulation=None, available=OFFERED, facts=None, want=None, **host):
    look = {"gpu": facts or bare(), "host": surroundings(**host), "available": available}
    return driver.plan_driver(
        {**look, **({"simulation": simulation} if simulation else {})},
        {"host": "gpu-01", "want": {**WANT, **(want or {})}},
    )


def test_before_apt_was_asked_a_missing_version_stops_nothing():
    found = planned(available=None, want={"version": None})
    assert (found["stops"], found["plan"], found["satisfied"]) == ([], None, False)
    assert "Components: contrib non-free non-free-firmware\n" in found["source"]
    assert "deb.example" in found["source"]


def test_asked_it_names_the_newest():
    assert "Set gpu_driver_version: 535.261.03" in planned(want={"version": None})["stops"][0]


@pytest.mark.parametrize(
    ("told", "stops"), [(None, True), ("", True), ("false", False), (False, False), ("true", False)]
)
def test_consent_that_nobody_gave_is_asked_for_however_null_arrives(told, stops):
    loaded = bare(driver={"loaded": "525.1.1", "installed": "525.1.1", "flavour": "open", "cuda": "12.0"})
    found = planned(facts=loaded, want={"reboot": told, "stop_services": "true"})
    assert [stop for stop in found["stops"] if "gpu_driver_reboot: true" in stop] != [] if stops else not found["stops"]


def test_every_package_of_the_simulation_stands_in_the_plan():
    along = "Inst dkms (3.0.10 Debian:12 [all])\nInst libnvidia-ml1 (535.261.03-1 Debian:12 [amd64])\n"
    found = planned(SIMULATED + along + CLOSING)
    assert found["stops"] == []
    assert found["changes"]["along"] == {"dkms": "3.0.10", "libnvidia-ml1": "535.261.03-1"}
    for line in (
        "install nvidia-open-kernel-dkms 535.261.03-1",
        "install dkms 3.0.10 (they need it)",
        "hold libcuda1",
        "build the modules for kernel 6.1.0-50-cloud-amd64",
    ):
        assert line in found["lines"]
    assert found["mark"]["packages"] == {**OPEN, "dkms": "3.0.10", "libnvidia-ml1": "535.261.03-1"}
    assert found["works"]
    assert {item["path"] for item in found["files"]} >= {
        "/etc/apt/preferences.d/gpu-fleet-driver",
        "/etc/apt/sources.list.d/gpu-fleet-driver.sources",
    }


def test_headers_bring_what_they_need_and_no_kernel_comes():
    kernels = {"6.1.0-50-cloud-amd64": {"headers": False, "initrd": None}}
    name = "linux-headers-6.1.0-50-cloud-amd64"
    offered = {**OFFERED, name: [{"version": "6.1.176-1", "origin": "Debian"}]}
    headers = (
        f"Inst {name} (6.1.176-1 Debian:12 [amd64])\nInst linux-headers-6.1.0-50-common (6.1.176-1 Debian:12 [all])\n"
    )
    found = planned(SIMULATED + headers + CLOSING, offered, kernels=kernels)
    assert found["stops"] == []
    assert f"install {name} 6.1.176-1 (to build the modules for that kernel)" in found["lines"]
    image = "Inst linux-image-6.1.0-57-amd64 (6.1.192-3 Debian:12 [amd64])\n"
    assert (
        "never changes a kernel" in planned(SIMULATED + headers + image + CLOSING, offered, kernels=kernels)["stops"][0]
    )


def test_failure_8_packages_of_another_provider_stop_only_when_it_is_known_whose_they_are():
    packages = {"nvidia-smi": {"version": "580.1-1", "hold": False, "state": "installed", "origin": None}}
    assert planned(available=None, packages=packages)["stops"] == []
    offered = {**OFFERED, "nvidia-smi": [*OFFERED["nvidia-smi"], {"version": "580.1-1", "origin": "NVIDIA"}]}
    assert "packages of another provider" in planned(available=offered, packages=packages)["stops"][0]


DONE = {
    name: {"version": version, "hold": True, "state": "installed", "origin": None} for name, version in OPEN.items()
}
DKMS = "nvidia-current-open/535.261.03, 6.1.0-50-cloud-amd64, x86_64: installed\n"
NOTHING = "0 upgraded, 0 newly installed, 0 to remove and 9 not upgraded.\n"


def loaded(version="535.261.03"):
    return bare(driver={"loaded": version, "installed": version, "flavour": "open", "cuda": "12.2"})


def test_a_host_that_has_everything_works_no_more():
    facts = loaded()
    found = planned(NOTHING, facts=facts, packages=DONE, dkms=DKMS)
    assert (found["works"], found["disturbs"], found["satisfied"]) == (False, False, True)
    assert found["lines"][-1] == "nothing changes"


def texts(found):
    """The files of the role, as they are once a plan was carried out."""
    return {item["path"]: item["content"] for item in found["files"]}


def test_a_file_that_changes_is_no_nothing():
    there = {"packages": DONE, "dkms": DKMS}
    files = texts(planned(NOTHING, facts=loaded(), **there))
    same = planned(NOTHING, facts=loaded(), files=files, **there)
    assert (same["lines"][-1], same["plan"]["writes"]) == ("nothing changes", [])
    path = "/etc/modprobe.d/gpu-fleet-driver.conf"
    for text in (None, "blacklist nouveau\n"):
        lines = planned(NOTHING, facts=loaded(), files={**files, path: text}, **there)["lines"]
        assert lines[1:] == [f"write {path}"]


def test_libraries_that_come_as_dependencies_are_held_too_and_stay_so():
    along = "Inst dkms (3.0.10 Debian:12 [all])\nInst libnvidia-ml1 (535.261.03-1 Debian:12 [amd64])\n"
    found = planned(SIMULATED + along + CLOSING)
    assert found["plan"]["holds"] == sorted([*OPEN, "libnvidia-ml1"])
    assert "hold libnvidia-ml1" in found["lines"]
    library = {"libnvidia-ml1": {**DONE["libcuda1"]}, "dkms": {**DONE["libcuda1"], "version": "3.0.10", "hold": False}}
    offers = {**OFFERED, "libnvidia-ml1": OFFERED["libcuda1"]}
    again = planned(NOTHING, offers, facts=loaded(), packages={**DONE, **library}, dkms=DKMS)
    assert again["plan"]["holds"] == found["plan"]["holds"]
    assert [line for line in again["lines"] if line.startswith("hold ")] == []


def test_what_serves_waits_for_the_proof_over_a_reboot():
    found = planned(SIMULATED + CLOSING, facts=loaded("535.216.01"), want={"reboot": True})
    assert found["changes_driver"]
    units = [path for path in texts(found) if path.endswith("gpu-fleet-driver.conf") and "systemd" in path]
    assert [path.split("/")[4] for path in units] == ["vllm@.service.d", "vllm-agent@.service.d", "ray@.service.d"]
    for path in units:
        assert "ConditionPathExists=!/var/lib/gpu_fleet/driver-unproved\n" in texts(found)[path]
    assert not planned(NOTHING, facts=loaded(), packages=DONE, dkms=DKMS)["changes_driver"]


def test_an_option_that_the_loaded_driver_lacks_takes_effect_or_is_said_not_to():
    params = {"EnableGpuFirmware": "18"}
    facts = loaded()
    facts["driver"]["flavour"] = "proprietary"
    packages = {("nvidia-kernel-dkms" if "open" in name else name): item for name, item in DONE.items()}
    offers = dict.fromkeys(packages, OFFERED["nvidia-smi"])
    there = {"packages": packages, "dkms": DKMS.replace("-open", ""), "params": params, "available": offers}
    want = {"modules": "proprietary", "gpu_firmware": False}
    asked = planned(NOTHING, facts=facts, want=want, **there)
    assert "it takes a reboot: the loaded driver has EnableGpuFirmware 18, planned is 0" in asked["stops"][0]
    done = planned(NOTHING, facts=facts, want={**want, "reboot": True}, **there)
    assert (done["works"], done["disturbs"], done["plan"]["reboot"]) == (True, True, True)
    plan = done["plan"]
    assert [str(item) for item in driver_proof.options(plan, params)] != []
    for right in ({"EnableGpuFirmware": "0"}, {}):
        assert driver_proof.options(plan, right) == []
        assert not planned(NOTHING, facts=facts, want=want, **{**there, "params": right})["plan"]["reboot"]


def test_the_gpu_firmware_comes_back_with_a_reboot_where_the_role_had_switched_it_off():
    off = {"EnableGpuFirmware": "0"}
    ours = {"/etc/modprobe.d/gpu-fleet-driver.conf": "options nvidia NVreg_EnableGpuFirmware=0\n"}
    there = {"packages": DONE, "dkms": DKMS, "params": off}
    assert "it takes a reboot" in planned(NOTHING, facts=loaded(), files=ours, **there)["stops"][0]
    strange = planned(NOTHING, facts=loaded(), files={}, **there)
    assert (strange["stops"], strange["plan"]["reboot"]) == ([], False)
    assert "no file of the role says so" in strange["notes"][0]


def test_failure_10_a_kernel_that_came_later_is_built_for_without_disturbing_anybody():
    kernels = {name: {"headers": True, "initrd": None} for name in ("6.1.0-50-cloud-amd64", "6.1.0-57-cloud-amd64")}
    found = planned(NOTHING, facts=loaded(), packages=DONE, dkms=DKMS, kernels=kernels, units=["vllm@chat.0.service"])
    assert (found["works"], found["disturbs"], found["plan"]["builds"]) == (True, False, ["6.1.0-57-cloud-amd64"])
    failed = {"status": DKMS, "words": {"6.1.0-57-cloud-amd64": ["error: too few arguments"]}}
    told = driver.driver_builds(failed, {"plan": found["plan"], "kernels": kernels, "host": "gpu-01"})
    assert "no module 535.261.03 for kernel 6.1.0-57-cloud-amd64" in told[0]
    assert "make.log" in told[0]
    assert "too few arguments" in told[1]
    built = {"status": DKMS + DKMS.replace("-50-", "-57-"), "words": {}}
    assert driver.driver_builds(built, {"plan": found["plan"], "kernels": kernels, "host": "gpu-01"}) == []


def test_a_driver_under_a_service_changes_with_its_own_playbook_only():
    facts = loaded("535.216.01")
    units = ["vllm@chat.0.service"]
    want = {"reboot": True, "stop_services": True, "in_service": False}
    assert "Use playbooks/driver.yml" in planned(SIMULATED + CLOSING, facts=facts, units=units, want=want)["stops"][0]
    found = planned(SIMULATED + CLOSING, facts=facts, units=units, want={**want, "in_service": True})
    assert found["stops"] == []
    assert "stop vllm@chat.0.service, start it again afterwards" in found["lines"]
    assert found["disturbs"]


def test_a_plan_that_only_lacks_a_yes_is_shown_before_it_is_refused():
    facts = loaded("535.216.01")
    units = ["nvidia-dcgm.service"]
    before = planned(available=None, facts=facts, units=units)
    assert (before["stops"], before["plan"] is None, before["shown"]["version"]) == ([], True, "535.261.03")
    found = planned(SIMULATED + CLOSING, facts=facts, units=units)
    assert found["plan"] is None
    assert ["runs on this host" in line or "takes a reboot" in line for line in found["stops"]] == [True, True]
    for line in ("install libcuda1 535.261.03-1", "stop nvidia-dcgm.service, start it again afterwards"):
        assert line in found["lines"]
    assert any(line.startswith("reboot: ") for line in found["lines"])


def test_a_reboot_that_is_left_to_the_operator_is_not_announced_as_one():
    facts = loaded("535.216.01")
    want = {"reboot": False, "stop_services": True}
    found = planned(SIMULATED + CLOSING, facts=facts, units=["nvidia-dcgm.service"], want=want)
    assert "stop nvidia-dcgm.service, start it again by the next run after the reboot" in found["lines"]
    assert [line for line in found["lines"] if line.startswith("reboot: ")] == []
    assert any(line.startswith("no reboot, though one is due and left to you: ") for line in found["lines"])


def test_nothing_works_while_that_reboot_is_waited_for():
    facts = loaded("535.261.03")
    facts["driver"]["loaded"] = "535.216.01"
    mark = {"packages": {}, "stopped": ["nvidia-dcgm.service"]}
    there = {"packages": DONE, "dkms": DKMS, "mark": mark}
    found = planned(NOTHING, facts=facts, want={"reboot": False}, **there)
    assert (found["stops"], found["works"], found["plan"]["starts"]) == ([], False, ["nvidia-dcgm.service"])
    assert "start nvidia-dcgm.service, which an earlier run stopped" not in found["lines"]
    found = planned(NOTHING, facts=loaded("535.261.03"), want={"reboot": False}, **there)
    assert found["works"]
    assert "start nvidia-dcgm.service, which an earlier run stopped" in found["lines"]


def test_what_an_ended_run_left_is_finished_where_it_is_all_ours():
    half = {
        "unsettled": {"nvidia-open-kernel-dkms": "half-configured"},
        "audit": "nvidia-open-kernel-dkms is half configured",
    }
    packages = {name: item for name, item in DONE.items() if name != "nvidia-open-kernel-dkms"}
    mark = {"packages": OPEN, "stopped": ["nvidia-dcgm.service", "nvidia-persistenced.service"]}
    units = ["nvidia-persistenced.service"]
    want = {"stop_services": True}
    found = planned(SIMULATED + CLOSING, packages=packages, mark=mark, units=units, want=want, **half)
    assert found["stops"] == []
    assert "finish what an earlier run left half done: nvidia-open-kernel-dkms (half-configured)" in found["lines"]
    assert "start nvidia-dcgm.service, which an earlier run stopped" in found["lines"]
    assert found["plan"]["starts"] == ["nvidia-dcgm.service"]
    for strange in ({"mark": None}, {"mark": {"packages": {"libcuda1": None}}}):
        assert (
            "dpkg --configure -a" in planned(SIMULATED + CLOSING, packages=packages, **{**half, **strange})["stops"][0]
        )


def test_what_apt_only_configures_is_not_left_out():
    half = {
        "unsettled": {"nvidia-open-kernel-dkms": "half-configured"},
        "audit": "nvidia-open-kernel-dkms is half configured",
    }
    packages = {name: item for name, item in DONE.items() if name != "nvidia-open-kernel-dkms"}
    told = "Conf nvidia-open-kernel-dkms (535.261.03-1 Debian:12 [amd64])\n"
    found = planned(told + CLOSING, packages=packages, mark={"packages": OPEN}, **half)
    assert found["stops"] == []
    assert found["plan"]["finishes"] == half["unsettled"]
    del packages["libcuda1"]
    (stop,) = planned(told + CLOSING, packages=packages, mark={"packages": OPEN}, **half)["stops"]
    assert "apt would leave libcuda1 as it is" in stop


def test_a_library_that_nobody_named_is_held_when_it_is_finished():
    half = {"unsettled": {"libnvidia-ml1": "unpacked"}, "audit": "libnvidia-ml1 is unpacked"}
    packages = {name: item for name, item in DONE.items() if name != "libnvidia-ml1"}
    offered = {**OFFERED, "libnvidia-ml1": OFFERED["libcuda1"]}
    mark = {"packages": {**OPEN, "libnvidia-ml1": "535.261.03-1"}}
    found = planned(CLOSING, available=offered, packages=packages, mark=mark, **half)
    assert found["stops"] == []
    # Or apt leaves the version that dpkg deconfigured.
    assert "libnvidia-ml1=535.261.03-1" in found["plan"]["arguments"]
    assert "libnvidia-ml1" in found["plan"]["holds"]


def test_a_package_of_somebody_else_that_is_half_done_is_never_finished_silently():
    half = {"unsettled": {"postfix": "half-configured", "libcuda1": "unpacked"}, "audit": "postfix libcuda1"}
    assert "dpkg-broken" in [item["id"] for item in planned(mark={"packages": OPEN}, **half)["findings"]]


def test_a_journal_of_dpkg_that_an_ended_run_left_is_taken_in():
    assert planned(mark={"packages": OPEN}, interrupted=True)["plan"]["finishes"] == {"dpkg": "interrupted"}
    assert "dpkg was interrupted" in planned(interrupted=True)["stops"][0]


def test_a_running_kernel_that_is_gone_needs_a_reboot():
    assert "is not installed any more" in planned(kernel="6.1.0-9-gone")["stops"][0]
    assert planned(kernel="6.1.0-9-gone", want={"reboot": True})["plan"]["reboot"]


# Failure 7, sources

NVIDIA = {
    "file": "/etc/apt/sources.list.d/cuda.list",
    "uri": "https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/",
}


def test_failure_7_a_second_source_with_another_key_is_named_and_goes_with_consent_only():
    old = {**NVIDIA, "suite": "/", "components": [], "signed_by": None}
    offered = {
        name: [{"version": f"{V}-1", "origin": "NVIDIA"}] for name in ("nvidia-driver-cuda", "nvidia-kernel-open-dkms")
    }
    want = {"source": "nvidia", "version": V}
    told = planned(available=offered, want=want, sources=[old])
    assert "Conflicting values set for option Signed-By" in told["stops"][0]
    assert "gpu_driver_replace_sources: true" in told["stops"][0]
    found = planned(available=offered, want={**want, "replace_sources": True}, sources=[old])
    assert (found["stops"], found["gone"]) == ([], ["/etc/apt/sources.list.d/cuda.list"])
    assert "take away /etc/apt/sources.list.d/cuda.list" in found["lines"]
    strange = {**old, "file": "/etc/apt/sources.list.d/mine.list"}
    assert planned(available=offered, want={**want, "replace_sources": True}, sources=[strange])["stops"]


def test_a_source_that_is_there_already_is_not_written_twice():
    there = {**NVIDIA, "suite": "/", "components": [], "signed_by": "/usr/share/keyrings/cuda-archive-keyring.gpg"}
    assert planned(available=None, want={"source": "nvidia", "version": V}, sources=[there])["source"] is None


# The proof


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A stand-in for libcuda, made for a test: cuInit returns what the environment says."""
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "stand_in.c").write_text(
        "#include <stdlib.h>\n#include <unistd.h>\n"
        'int cuInit(unsigned int f) { if (getenv("HANG")) sleep(60); return f ? 1 : atoi(getenv("CUINIT")); }\n'
        "int cuDriverGetVersion(int *v) { *v = 13000; return 0; }\n"
        "int cuDeviceGetCount(int *n) { *n = 2; return 0; }\n"
    )
    made = folder / "libcuda_stand_in.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(made), str(folder / "stand_in.c")], check=True)
    return str(made)


def prove(told, facts=None, version="580.159.04"):
    plan = {"version": version}
    return [str(item) for item in driver_proof.findings(facts or hosts.facts("h200x2"), told, plan, KNOWN, "gpu-01")]


@pytest.mark.parametrize("code", [0, 802, 803, 999])
def test_failure_3_cuinit_is_called_and_its_code_told(library, monkeypatch, code):
    monkeypatch.setenv("CUINIT", str(code))
    told = cuda.init(library)
    assert (told["code"], told["error"], told["cuda"]) == (code, None, 13000)
    assert told["devices"] == (2 if code == 0 else None)
    found = prove(told)
    assert len(found) == (0 if code == 0 else 1), found
    if code:
        assert f"cuInit returned {code}, CUDA_ERROR_" in found[0]


def test_failure_3_802_names_the_switches_and_the_manager(library, monkeypatch):
    monkeypatch.setenv("CUINIT", "802")
    facts = hosts.facts("h100x8", files={})
    facts["nvswitch"], facts["fabric_manager"] = {"devices": 4}, {"installed": None, "state": "absent"}
    found = prove(cuda.init(library), facts, facts["driver"]["loaded"])
    assert any("4 NVSwitches, Fabric Manager absent" in line for line in found)
    assert any("no Fabric Manager is installed" in line for line in found)


def test_failure_2_a_manager_of_another_version_is_found_after_the_change(library, monkeypatch):
    monkeypatch.setenv("CUINIT", "0")
    facts = hosts.facts("h100x8")
    loaded_ = facts["driver"]["loaded"]
    facts["fabric_manager"] = {"installed": "570.1.1", "state": "active"}
    assert any("Fabric Manager 570.1.1 is installed" in line for line in prove(cuda.init(library), facts, loaded_))
    facts["fabric_manager"] = {"installed": loaded_, "state": "failed"}
    facts["nvswitch"] = {"devices": 4}
    assert any("the Fabric Manager is failed" in line for line in prove(cuda.init(library), facts, loaded_))


def test_a_cuinit_that_hangs_ends(library, monkeypatch):
    monkeypatch.setenv("CUINIT", "0")
    monkeypatch.setenv("HANG", "1")
    began = time.monotonic()
    told = cuda.init(library, 1)
    assert time.monotonic() - began < 20
    assert (told["code"], told["error"]) == (None, "no answer within 1 s")
    assert "cuInit was not reached" in prove(told)[0]


def test_a_library_that_is_not_there_or_crashes_is_an_answer(tmp_path):
    assert "cannot open shared object file" in cuda.init("libcuda_nowhere.so")["error"]
    (tmp_path / "crash.c").write_text("int cuInit(unsigned int f) { return *(volatile int *)0; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(tmp_path / "c.so"), str(tmp_path / "crash.c")], check=True)
    assert "ended with status -11" in cuda.init(os.fspath(tmp_path / "c.so"))["error"]


def test_failure_1_loaded_and_installed_and_planned_are_compared(library, monkeypatch):
    monkeypatch.setenv("CUINIT", "0")
    told = cuda.init(library)
    facts = hosts.facts("h200x2")
    assert "580.126.20 is planned, 580.159.04 is loaded" in prove(told, facts, V)[0]
    other = {**facts, "driver": {**facts["driver"], "installed": "580.178.04"}}
    assert "Driver/library version mismatch" in prove(told, other)[0]
    none = {**facts, "driver": {**facts["driver"], "loaded": None}}
    assert "none is loaded" in prove(told, none)[0]


def test_failure_12_an_initramfs_that_brings_nouveau_back_is_named(library, monkeypatch):
    monkeypatch.setenv("CUINIT", "0")
    facts, cuda_said = hosts.facts("h200x2"), cuda.init(library)
    kernels = {
        "6.1.0-50": {"headers": True, "initrd": {"nouveau": True, "ours": True}},
        "6.1.0-57": {"headers": True, "initrd": {"nouveau": True, "ours": False}},
        "6.1.0-58": {"headers": True, "initrd": None},
    }

    def told(source):
        plan = {"version": "580.159.04", "source": source}
        settings = {"cuda": cuda_said, "plan": plan, "surroundings": surroundings(kernels=kernels), "host": "gpu-01"}
        return driver.prove_driver(facts, settings)

    assert len(told("nvidia")) == 1
    assert "initramfs of kernel 6.1.0-57, and" in told("nvidia")[0]
    assert told("preinstalled") == []
    facts = {**facts, "nouveau": True}
    assert "nouveau is still loaded" in told("nvidia")[0]


@pytest.mark.parametrize(
    ("state", "status"), [("In Progress", None), ("Completed", "Initialization Failed"), ("Not Started", None)]
)
def test_failure_4_a_fabric_that_is_not_set_up_is_no_proof_though_cuinit_is_right(library, monkeypatch, state, status):
    monkeypatch.setenv("CUINIT", "0")
    facts = hosts.facts("h200x2")
    settings = {"cuda": cuda.init(library), "surroundings": surroundings(), "host": "gpu-01"}
    settings["plan"] = {"version": "580.159.04", "source": "nvidia"}
    for right in (("Completed", "Success"), ("Not Supported", None), (None, None)):
        facts["gpus"][1]["fabric"] = {"state": right[0], "status": right[1], "health": None}
        assert driver.prove_driver(facts, settings) == []
    facts["gpus"][1]["fabric"] = {"state": state, "status": status, "health": None}
    told = driver.prove_driver(facts, settings)
    assert len(told) == 1
    assert f"the NVLink fabric of GPU 1 has state {state} and status {status or 'not told'}" in told[0]


def test_failure_1_debians_module_of_another_name_is_known_by_dkms():
    """`modinfo nvidia` finds none there: the file is nvidia-current-open.ko."""
    facts = bare(driver={"loaded": "535.216.01", "installed": None, "flavour": "open", "cuda": "12.2"})
    settings = {
        "cuda": {"code": 0, "devices": 0},
        "plan": {"version": "535.261.03", "source": "distribution"},
        "surroundings": surroundings(dkms=DKMS),
        "host": "gpu-01",
    }
    assert any(
        "535.216.01 is loaded and 535.261.03 is installed" in line for line in driver.prove_driver(facts, settings)
    )
    found = planned(NOTHING, facts=facts, packages=DONE, dkms=DKMS)
    assert [item["id"] for item in found["findings"]] == ["driver-mismatch"]


def test_failure_9_a_card_that_the_driver_does_not_take_is_counted(library, monkeypatch):
    monkeypatch.setenv("CUINIT", "0")
    facts = hosts.facts("h200x2")
    assert "the driver has 1" in prove(cuda.init(library), {**facts, "gpus": facts["gpus"][:1]})[0]
    assert "CUDA sees 2 devices" in prove(cuda.init(library), {**facts, "gpus": facts["gpus"][:1]})[1]


# What is written for the fabric and the daemon

NVIDIA_NAMES = (
    "nvidia-driver-cuda",
    "nvidia-kernel-open-dkms",
    "nvidia-fabricmanager",
    "libnvidia-nscq",
    "nvidia-imex",
)
OF_NVIDIA = {
    name: [{"version": f"{V}-1", "origin": "NVIDIA"}] for name in (*NVIDIA_NAMES, "libnvsdm", "nvidia-persistenced")
}
OF_NVIDIA.update({name: [{"version": "2025.10.14-1", "origin": "NVIDIA"}] for name in ("nvlsm", "infiniband-diags")})


def written(found):
    return {item["path"]: item["content"] for item in found["files"]}


def cards(device, number=2):
    return [
        {"address": f"0000:{place:02x}:00.0", "vendor_id": "10de", "device_id": device, "driver": None}
        for place in range(number)
    ]


def from_nvidia(want=None, **changes):
    host = {key: changes.pop(key) for key in ("nvlink5", "modules") if key in changes}
    want = {"source": "nvidia", "version": V, "persistence": True, **(want or {})}
    return planned(available=OF_NVIDIA, want=want, facts=bare(**changes), **host)


def test_failure_5_imex_gets_every_node_and_its_channel_on_a_rack_only():
    found = from_nvidia({"imex_nodes": ["192.0.2.1", "192.0.2.2"]}, pci_gpus=cards("2941"))
    assert found["stops"] == []
    assert found["plan"]["fabric"] == ["nvidia-imex.service"]
    files = written(found)
    assert files["/etc/nvidia-imex/nodes_config.cfg"] == "192.0.2.1\n192.0.2.2\n"
    assert "options nvidia NVreg_CreateImexChannel0=1\n" in files["/etc/modprobe.d/gpu-fleet-driver.conf"]
    assert "imex" not in "".join(written(from_nvidia()))


def test_failure_4_what_nvlink_5_needs_is_loaded_before_the_driver_and_at_each_boot():
    found = from_nvidia(pci_gpus=cards("2901"), nvlink5=True, modules={"ib_umad": True, "mlx5_ib": True})
    assert found["stops"] == []
    assert found["plan"]["fabric"] == ["nvidia-fabricmanager.service"]
    lines = written(found)["/etc/modules-load.d/gpu-fleet-driver.conf"].splitlines()
    assert lines[1:] == ["ib_umad", "mlx5_ib", "nvidia"]


def test_failure_14_the_daemon_waits_for_the_module():
    text = written(from_nvidia())["/etc/systemd/system/nvidia-persistenced.service.d/gpu-fleet.conf"]
    assert "ConditionPathExists=/proc/driver/nvidia/version\n" in text
    assert "After=systemd-modules-load.service\n" in text
    without = written(from_nvidia({"persistence": False}))
    assert not any("persistenced" in path for path in without)
    replayed = written(from_nvidia({"root": "/srv/replay"}))
    assert "=/srv/replay/proc/driver" in replayed["/etc/systemd/system/nvidia-persistenced.service.d/gpu-fleet.conf"]


def test_failure_1_the_files_hold_and_pin_what_is_installed():
    files = written(from_nvidia())
    assert "Pin: version 580.126.20-1\nPin-Priority: 1002" in files["/etc/apt/preferences.d/gpu-fleet-driver"]
    assert '"nvidia-";' in files["/etc/apt/apt.conf.d/52gpu-fleet-driver"]


# The order of the tasks


def tasks(name):
    return yaml.safe_load((REPOSITORY / "roles/gpu_driver/tasks" / f"{name}.yml").read_text())


def flat(tasks):
    """Tasks in the order they run, those of a block in its place."""
    return [inner for task in tasks for inner in (flat(task["block"]) if "block" in task else [task])]


def place(name, part, value):
    """Where the first task stands that has this value at a module's argument, or in a module's free form."""
    for number, task in enumerate(flat(tasks(name))):
        for module, told in task.items():
            if module.startswith(("ansible.", "gpu_fleet.")) and (
                told == value if not part else isinstance(told, dict) and told.get(part) == value
            ):
                return number
    raise AssertionError(f"{name}.yml has no {part} {value}")


def test_apt_is_asked_before_anything_stops():
    asked, stopped = place("change", "compare_only", True), place("change", "state", "stopped")
    assert asked < stopped < place("change", "", "install.yml")


def test_nothing_serves_before_the_proof():
    bar = next(number for number, task in enumerate(tasks("change")) if "__gpu_driver_unproved" in str(task))
    assert bar < place("change", "state", "stopped")
    started = tasks("change")[place("change", "state", "started")]
    assert "reject('search', __gpu_driver_serves)" in started["loop"]
    assert place("main", "", "prove.yml") < place("main", "", "finish.yml")
    assert place("turn", "", "main.yml") < place("turn", "", "admit.yml")
    assert place("turn", "", "look.yml") < place("turn", "", "drain.yml") < place("turn", "", "main.yml")
