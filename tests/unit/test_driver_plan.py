"""Which driver a host gets, what that disturbs, and every way in which it is refused.

The fifteen failures that operators of GPU hosts meet most, each with a test of its number here where it can be played on
what is known of a host. What only shows on a host is in the scenarios gpu_driver (Debian's own driver), gpu_driver_nvidia and
gpu_driver_upgrade (a repository of stand-ins), in tests/host, and in test_driver_role.py, test_driver_host.py, test_mig.py:

    1 mismatch after an unattended upgrade      here; pins, holds and block list: gpu_driver, gpu_driver_nvidia
    2 Fabric Manager of another version         here; with the driver only: gpu_driver_nvidia, gpu_driver_upgrade
    3 CUDA error 802, NVSwitches, no manager    here; cuInit by ctypes: test_driver_role.py, gpu_driver_nvidia
    4 NVLink 5 without nvlsm, ib_umad, mlx5_ib  here; the modules before the driver: test_driver_role.py
    5 IMEX                                      here, which hosts get it; nodes and channel: test_driver_role.py
    6 asked for one branch, got another         here, gpu_driver_nvidia
    7 Signed-By, keys                           here, test_driver_role.py, gpu_driver_nvidia
    8 held broken packages, two providers       here, gpu_driver, gpu_driver_nvidia
    9 open or proprietary modules               here, gpu_driver_nvidia, gpu_driver_upgrade
    10 gone after a kernel upgrade              here; the DKMS build: gpu_driver, gpu_driver_nvidia
    11 Key was rejected by service              here, gpu_driver, gpu_driver_nvidia; enrolment needs a console
    12 nouveau                                  here; the initramfs: gpu_driver, test_driver_host.py
    13 MIG layout lost                          here, the refusal; made anew, looked at with -lgi: test_mig.py, gpu_driver_upgrade
    14 nvidia-persistenced                      here, the order of stopping; its drop-in and its state: gpu_driver_upgrade
    15 Xid 119/120, GSP, toolkit packages       here, gpu_driver_nvidia
"""

from __future__ import annotations

import copy
import itertools
import pathlib
import re
import subprocess
import sys

import pytest
import yaml
from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tests" / "replay"))

import hosts
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import (
    driver_apt,
    driver_case,
    driver_plan,
    driver_show,
    driver_state,
)
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_packages as names

KNOWN = yaml.safe_load((REPOSITORY / "data" / "driver.yml").read_text())
VERSIONS = yaml.safe_load((REPOSITORY / "data" / "versions.yml").read_text())
FIXTURES = pathlib.Path(__file__).parent / "fixtures" / "driver"
KERNEL = "6.1.0-18-amd64"
V = "580.126.20"
CU130 = [{"version": "0.26.0", "accelerator": "cu130"}]
NVIDIA_KEY = "/usr/share/keyrings/cuda-archive-keyring.gpg"
REPO_12 = "https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/"
NONE_LOADED = {"loaded": None, "installed": None, "flavour": None, "cuda": None}


def bare(*devices, **changes):
    """A host with cards and no driver."""
    facts = copy.deepcopy(hosts.facts("h200x2"))
    cards = [
        {"address": f"0000:{place:02x}:00.0", "vendor_id": "10de", "device_id": device, "driver": None}
        for place, device in enumerate(devices or ("2335", "2335"))
    ]
    return {**facts, "pci_gpus": cards, "gpus": [], "driver": dict(NONE_LOADED), **changes}


def offered(*versions, origin="NVIDIA", packages=()):
    known = [
        "nvidia-driver-cuda",
        "nvidia-kernel-open-dkms",
        "nvidia-kernel-dkms",
        "nvidia-fabricmanager",
        "libnvidia-nscq",
    ]
    known += ["nvidia-imex", "libnvsdm", *packages]
    return {name: [{"version": f"{version}-1", "origin": origin} for version in versions] for name in known}


def machine(**changes):
    return {
        "system": "debian-12",
        "kernels": {KERNEL: {"headers": True}},
        "available": offered("590.48.01", V, "580.105.08"),
        "sources": [
            {"file": "/etc/apt/sources.list.d/nvidia.sources", "uri": REPO_12, "suite": "/", "signed_by": NVIDIA_KEY}
        ],
        **changes,
    }


def choose(facts=None, want=None, versions=VERSIONS, **host):
    return driver_plan.choose(
        facts or bare(), {"version": V, **(want or {})}, machine(**host), KNOWN, versions=versions, where="gpu-01"
    )


def ids(choice, severity="error"):
    return [finding.id for finding in choice.findings if finding.severity == severity]


def only(choice, id_):
    """The one finding against a host, as text."""
    assert ids(choice) == [id_], [str(finding) for finding in choice.findings]
    assert choice.plan is None
    finding = next(finding for finding in choice.findings if finding.id == id_)
    assert finding.where == "gpu-01"
    assert len(finding.fix) > 15
    return str(finding)


def running(version="580.105.08", kind="open", **changes):
    """A host whose driver was installed by this plan, of a version."""
    facts = bare(driver={"loaded": version, "installed": version, "flavour": kind, "cuda": "13.0"}, **changes)
    packages = {
        name: {"version": f"{version}-1", "origin": "NVIDIA", "hold": True}
        for name in ("nvidia-driver-cuda", "nvidia-kernel-open-dkms" if kind == "open" else "nvidia-kernel-dkms")
    }
    return facts, packages


# A plan


def test_a_fresh_host_gets_open_modules_of_the_exact_version():
    choice = choose(want={"releases": CU130})
    assert choice.findings == []
    plan = choice.plan
    assert plan.packages == {"nvidia-driver-cuda": f"{V}-1", "nvidia-kernel-open-dkms": f"{V}-1"}
    assert plan.arguments == [f"nvidia-driver-cuda={V}-1", f"nvidia-kernel-open-dkms={V}-1"]
    assert (plan.branch, plan.version, plan.modules) == ("580", V, "open")
    assert "recommends the open modules" in plan.reason
    assert (plan.stop, plan.reboot, plan.initramfs, plan.may_remove, plan.headers) == ([], False, False, [], [])
    assert plan.holds == ["nvidia-driver-cuda", "nvidia-kernel-open-dkms"]
    assert plan.as_dict()["arguments"] == plan.arguments


def test_a_host_that_serves_for_ray_alone_serves():
    facts, packages = running()
    consent = {"in_service": False, "reboot": True, "stop_services": True}
    units = ["nvidia-persistenced.service", "ray@chat.0.service"]
    assert "ray@chat.0.service serves" in only(choose(facts, consent, packages=packages, units=units), "driver-serving")
    plan = choose(facts, {**consent, "in_service": True}, packages=packages, units=units).plan
    assert plan.stop == ["ray@chat.0.service", "nvidia-persistenced.service"]


def test_a_job_of_somebody_else_on_the_gpus_is_named_before_it_is_ended():
    facts, packages = running()
    dcgm = {"pid": 17, "name": "nv-hostengine", "memory_mib": 1, "unit": "nvidia-dcgm.service"}
    facts["gpus"] = [{"index": 3, "processes": [{"pid": 4711, "name": "train.py", "memory_mib": 9}, dcgm]}]
    units = ["nvidia-dcgm.service"]
    choice = choose(facts, {"reboot": True, "stop_services": True}, packages=packages, units=units)
    assert (ids(choice), ids(choice, "warning")) == ([], ["driver-in-use"])
    assert "use the GPUs: GPU 3 train.py (pid 4711); a reboot" in str(choice.findings[0])
    quiet = choose(facts, {"reboot": True, "stop_services": True}, packages=packages, units=["vllm@chat.0.service"])
    assert quiet.findings == []


def test_an_initramfs_that_has_our_file_is_not_rebuilt_again_until_the_reboot():
    for ours in (False, True):
        kernels = {KERNEL: {"headers": True, "initrd": {"nouveau": True, "ours": ours}}}
        plan = choose(bare(nouveau=True), {"reboot": False}, kernels=kernels, nouveau_in_initramfs=not ours).plan
        assert (plan.initramfs, plan.reboot) == (not ours, True)


def test_another_build_or_what_is_numbered_by_itself_takes_no_host_out_of_service():
    facts, packages = running(V)
    packages["nvidia-fabricmanager"] = packages["libnvsdm"] = packages["nvidia-driver-cuda"]
    packages["nvlsm"] = {"version": "2025.06.1-1", "origin": "NVIDIA", "hold": True}
    packages["infiniband-diags"] = {"version": "44.0-2", "origin": "Debian", "hold": True}
    packages["nvidia-persistenced"] = {"version": "580.95.05-1", "origin": "NVIDIA", "hold": True}
    available = offered(f"{V}-1+build2", V)
    available["nvlsm"] = [{"version": "2025.10.14-1", "origin": "NVIDIA"}]
    available["infiniband-diags"] = [{"version": "44.0-2+deb12u1", "origin": "Debian"}]
    available["nvidia-persistenced"] = [{"version": "580.142-1", "origin": "NVIDIA"}]
    there = {
        "available": available,
        "nvlink5": True,
        "modules": dict.fromkeys(KNOWN["fabric_modules"], True),
        "units": ["vllm@chat.0.service"],
    }
    plan = choose(facts, {"in_service": False}, packages=packages, **there).plan
    assert (plan.changes, plan.stop) == (False, [])
    assert plan.packages == {name: item["version"] for name, item in packages.items()}
    # A driver that changes takes the newest of them along.
    facts, older = running()
    moved = choose(facts, {"reboot": True}, packages={**packages, **older}, **{**there, "units": []}).plan
    assert moved.packages["nvlsm"] == "2025.10.14-1"


def test_the_same_plan_a_second_time_changes_nothing_and_asks_for_nothing():
    facts, packages = running(V)
    choice = choose(facts, packages=packages, units=["vllm@chat.0.service", "nvidia-persistenced.service"])
    assert choice.findings == []
    plan = choice.plan
    assert (plan.changes, plan.reboot, plan.stop, plan.unhold) == (False, False, [], [])


def test_before_the_lists_are_read_a_driver_that_is_there_disturbs_nobody():
    facts, packages = running(V)
    units = ["vllm@chat.0.service", "nvidia-persistenced.service"]
    plan = choose(facts, packages=packages, units=units, available=None).plan
    assert (plan.changes, plan.stop) == (False, [])
    facts, packages = running("580.105.08")
    assert "stop-consent" in ids(choose(facts, packages=packages, units=units, available=None))


def test_an_upgrade_stops_what_uses_the_driver_in_order_and_reboots():
    facts, packages = running(nvswitch={"devices": 4})
    for name in ("nvidia-fabricmanager", "libnvidia-nscq"):
        packages[name] = {"version": "580.105.08-1", "origin": "NVIDIA", "hold": True}
    units = ["nvidia-fabricmanager.service", "nvidia-persistenced.service", "ssh.service", "nvidia-dcgm.service"]
    units += ["vllm@chat.0.service", "vllm-agent@chat.0.service", "dcgm-exporter.service"]
    plan = choose(facts, {"stop_services": True, "reboot": True}, packages=packages, units=units).plan
    assert plan.stop == [
        "vllm-agent@chat.0.service",
        "vllm@chat.0.service",
        "dcgm-exporter.service",
        "nvidia-dcgm.service",
        "nvidia-persistenced.service",
        "nvidia-fabricmanager.service",
    ]
    assert plan.reboot
    assert plan.reboot_because == [f"driver 580.105.08 (open) is loaded, planned is {V} (open)"]
    assert plan.unhold == ["libnvidia-nscq", "nvidia-driver-cuda", "nvidia-fabricmanager", "nvidia-kernel-open-dkms"]
    assert set(plan.packages.values()) == {f"{V}-1"}


def test_on_the_way_back_the_libraries_move_too():
    facts, packages = running("590.48.01")
    for name in ("libcuda1", "libnvidia-ml1", "nvidia-modprobe"):
        packages[name] = {"version": "590.48.01-1", "origin": "NVIDIA", "hold": False}
    available = offered("590.48.01", V, packages=("libcuda1", "libnvidia-ml1", "nvidia-modprobe"))
    want = {"stop_services": True, "reboot": True}
    plan = choose(facts, want, packages=packages, available=available).plan
    assert (plan.packages["libcuda1"], plan.packages["libnvidia-ml1"]) == (f"{V}-1", f"{V}-1")
    assert "nvidia-modprobe" not in plan.packages
    there = {name: {**item, "version": f"{V}-1"} for name, item in packages.items()}
    settled = choose({**facts, "driver": running(V)[0]["driver"]}, want, packages=there, available=available).plan
    assert "libcuda1" not in settled.packages
    assert not settled.changes
    assert (settled.files, settled.holds) == (plan.files, plan.holds)


def test_nothing_is_stopped_and_nothing_rebooted_without_consent():
    facts, packages = running()
    choice = choose(facts, packages=packages, units=["vllm@chat.0.service"])
    assert ids(choice) == ["stop-consent", "reboot-consent"]
    assert "gpu_driver_stop_services: true" in choice.findings[0].fix
    assert "gpu_driver_reboot: true" in choice.findings[1].fix
    assert choice.plan is None
    left = choose(facts, {"stop_services": True, "reboot": False}, packages=packages).plan
    assert left.reboot  # told, and left to the owner


def test_what_is_held_and_goes_with_the_kind_is_no_surprise():
    text = (
        "The following held packages will be changed:\n  nvidia-kernel-open-dkms\n"
        f"Remv nvidia-kernel-open-dkms [{V}-1]\nInst nvidia-kernel-dkms ({V}-1 NVIDIA [all])\n"
        "0 upgraded, 1 newly installed, 1 to remove and 3 not upgraded.\n"
    )
    told = {"version": V, "known": KNOWN}
    packages = {"nvidia-kernel-dkms": f"{V}-1"}
    assert driver_apt.compare(driver_apt.read(text), packages, removes=("nvidia-kernel-open-dkms",), **told) == []
    unplanned = driver_apt.compare(driver_apt.read(text), packages, **told)
    assert [finding.id for finding in unplanned] == ["apt-removes", "apt-held-changed"]


def test_a_change_of_the_kind_takes_every_part_of_the_other_one_away():
    # Debian's open modules have a support package, which is held as every part is (seen with apt 2.6.1: no way without the minus).
    want = {"source": "distribution", "version": "535.309.01", "modules": "proprietary", "reboot": True}
    old = {
        name: {"version": "535.261.03-1", "origin": "Debian", "hold": True}
        for name in ("nvidia-open-kernel-dkms", "nvidia-open-kernel-support", "libcuda1", "nvidia-smi")
    }
    available = {
        name: [{"version": "535.309.01-0+deb12u1", "origin": "Debian"}]
        for name in ("nvidia-kernel-dkms", "libcuda1", "nvidia-smi")
    }
    facts = bare(driver={"loaded": "535.261.03", "installed": None, "flavour": "open", "cuda": "12.2"})
    plan = choose(facts, want, packages=old, available=available).plan
    assert plan.removes == ["nvidia-open-kernel-dkms", "nvidia-open-kernel-support"]
    # Once the kind that is wanted is there, what belongs to the other one stays.
    new = {"nvidia-kernel-dkms": {"version": "535.309.01-0+deb12u1", "origin": "Debian", "hold": True}}
    assert choose(facts, want, packages={**old, **new}, available=available).plan.removes == []


def test_a_change_of_the_kind_names_what_may_go():
    facts, packages = running()
    want = {"modules": "proprietary", "reboot": True, "stop_services": True}
    plan = choose(facts, want, packages=packages).plan
    assert plan.may_remove == plan.removes == ["nvidia-kernel-open-dkms"]
    assert plan.arguments == [
        f"nvidia-driver-cuda={V}-1",
        f"nvidia-kernel-dkms={V}-1",
        "nvidia-kernel-open-dkms-",
    ]
    # Of one version, too: the other kind is held and pinned, so that apt on its own finds no way.
    facts, packages = running(V)
    plan = choose(facts, want, packages=packages).plan
    assert plan.changes
    assert "nvidia-kernel-open-dkms-" in plan.arguments
    assert "nvidia-kernel-open-dkms" not in plan.holds
    assert plan.packages["nvidia-kernel-dkms"] == f"{V}-1"


def test_before_the_lists_are_read_the_plan_has_names_and_no_versions():
    plan = choose(available=None).plan
    assert plan.packages == {"nvidia-driver-cuda": None, "nvidia-kernel-open-dkms": None}
    assert plan.arguments == ["nvidia-driver-cuda", "nvidia-kernel-open-dkms"]


def test_the_pinning_package_is_taken_where_it_is_offered():
    exact = {f"nvidia-driver-pinning-{V}": [{"version": f"{V}-1", "origin": "NVIDIA"}]}
    branch = {"nvidia-driver-pinning-580": [{"version": "580-5", "origin": "NVIDIA"}]}
    base = offered(V)
    assert choose(available={**base, **exact, **branch}).plan.packages[f"nvidia-driver-pinning-{V}"] == f"{V}-1"
    assert choose(available={**base, **branch}).plan.packages["nvidia-driver-pinning-580"] == "580-5"


OLD_PIN, PIN = "nvidia-driver-pinning-580.105.08", f"nvidia-driver-pinning-{V}"


def with_pins(facts, packages, *pins, versions=("590.48.01", V, "580.105.08"), branch=True):
    """Plan on a host that has these pinning packages, held; the source offers that of each version, and that of the branch."""
    have = {name: {"version": version, "origin": "NVIDIA", "hold": True} for name, version in pins}
    pins_offered = {f"nvidia-driver-pinning-{version}": f"{version}-1" for version in versions}
    pins_offered.update({"nvidia-driver-pinning-580": "580-5"} if branch else {})
    available = {
        **offered("590.48.01", V, "580.105.08"),
        **{name: [{"version": version, "origin": "NVIDIA"}] for name, version in pins_offered.items()},
    }
    return choose(facts, {"reboot": True}, packages={**packages, **have}, available=available).plan


def test_the_former_pinning_package_goes_by_name_since_there_is_one_at_a_time():
    plan = with_pins(*running(), (OLD_PIN, "580.105.08-1"))
    assert plan.packages[PIN] == f"{V}-1"
    assert (plan.removes, plan.arguments[-1], OLD_PIN in plan.holds) == ([OLD_PIN], f"{OLD_PIN}-", False)
    # As apt says it, of packages that conflict.
    text = (
        f"Remv {OLD_PIN} [580.105.08-1]\n"
        f"Inst {PIN} ({V}-1 NVIDIA CUDA: [all])\n"
        f"Inst nvidia-driver-cuda [580.105.08-1] ({V}-1 NVIDIA CUDA: [amd64])\n"
        f"Inst nvidia-kernel-open-dkms [580.105.08-1] ({V}-1 NVIDIA CUDA: [amd64])\n"
        "2 upgraded, 1 newly installed, 1 to remove and 9 not upgraded.\n"
    )
    simulation = driver_apt.read(text)
    told = {"version": V, "known": KNOWN}
    assert driver_apt.compare(simulation, plan.packages, removes=tuple(plan.may_remove), **told) == []
    assert [item.id for item in driver_apt.compare(simulation, plan.packages, **told)] == ["apt-removes"]
    lines = driver_show.lines(plan, driver_show.changes(simulation, plan), {"packages": {}})
    assert f"remove {OLD_PIN} 580.105.08-1 (it pins another version)" in lines


def test_a_pin_of_the_branch_gives_way_to_that_of_the_version_with_another_driver_only():
    branch = ("nvidia-driver-pinning-580", "580-4")
    plan = with_pins(*running(), branch)
    assert (PIN in plan.packages, plan.removes) == (True, ["nvidia-driver-pinning-580"])
    there = with_pins(*running(V), branch)
    assert (there.packages["nvidia-driver-pinning-580"], there.removes, there.changes) == ("580-4", [], False)


def test_a_pin_of_another_version_that_nobody_replaces_goes_without_disturbing_anybody():
    plan = with_pins(*running(V), (OLD_PIN, "580.105.08-1"), versions=(), branch=False)
    assert (plan.removes, plan.changes, plan.stop, plan.reboot) == ([OLD_PIN], False, [], False)
    fits = with_pins(*running(V), ("nvidia-driver-pinning-580", "580-5"), versions=(), branch=False)
    assert fits.removes == []


def test_what_is_planned_is_stronger_than_a_pinning_package_that_still_counts():
    text = names.preferences_text(
        names.pins({"libcuda1": f"{V}-1"}, source="nvidia", version=V, known=KNOWN, family="debian")
    )
    priorities = [int(word) for word in re.findall(r"Pin: version .*\nPin-Priority: (\d+)", text)]
    assert min(priorities) > 1000, text


@pytest.mark.parametrize(
    ("system", "source", "branch", "kind", "expected"),
    [
        ("debian-12", "nvidia", "580", "open", ["nvidia-driver-cuda", "nvidia-kernel-open-dkms"]),
        ("debian-13", "nvidia", "595", "proprietary", ["nvidia-driver-cuda", "nvidia-kernel-dkms"]),
        ("debian-12", "nvidia", "535", "open", None),
        (
            "ubuntu-24.04",
            "nvidia",
            "580",
            "open",
            ["libnvidia-compute-580", "nvidia-dkms-580-open", "nvidia-utils-580"],
        ),
        (
            "ubuntu-24.04",
            "nvidia",
            "580",
            "proprietary",
            ["libnvidia-compute-580", "nvidia-dkms-580", "nvidia-utils-580"],
        ),
        ("ubuntu-22.04", "nvidia", "590", "open", ["libnvidia-compute", "nvidia-dkms-open"]),
        ("ubuntu-22.04", "nvidia", "610", "proprietary", ["libnvidia-compute", "nvidia-dkms"]),
        ("ubuntu-24.04", "distribution", "580", "open", ["nvidia-headless-580-server-open", "nvidia-utils-580-server"]),
        ("ubuntu-24.04", "distribution", "595", "open", None),
        ("debian-12", "distribution", "535", "open", ["nvidia-open-kernel-dkms", "libcuda1", "nvidia-smi"]),
        ("debian-13", "distribution", "550", "proprietary", ["nvidia-kernel-dkms", "libcuda1", "nvidia-smi"]),
        ("debian-13", "distribution", "580", "open", None),
    ],
)
def test_names_by_source_system_and_branch(system, source, branch, kind, expected):
    assert names.names(source, system, branch, kind, KNOWN) == expected


@pytest.mark.parametrize(
    ("source", "system", "branch", "manager"),
    [
        ("nvidia", "debian-12", "575", "nvidia-fabricmanager-575"),
        ("nvidia", "debian-12", "580", "nvidia-fabricmanager"),
        ("nvidia", "ubuntu-24.04", "610", "nvidia-fabricmanager"),
        ("distribution", "ubuntu-24.04", "580", "nvidia-fabricmanager-580"),
        ("distribution", "debian-12", "535", None),
    ],
)
def test_names_of_the_fabric_manager(source, system, branch, manager):
    assert (names.fabric(source, system, branch, KNOWN) or {}).get("manager") == manager


@pytest.mark.parametrize(
    ("device", "generation", "takes"),
    [
        ("1db6", "before-turing", "proprietary"),  # V100
        ("1d01", "before-turing", "proprietary"),  # GT 1030
        ("1e04", "turing", "either"),
        ("2182", "turing", "either"),
        ("20b2", "ampere", "either"),
        ("2204", "ampere", "either"),
        ("2503", "ampere", "either"),
        ("2330", "hopper", "either"),
        ("2342", "hopper", "open"),  # GH200
        ("2684", "ada", "either"),
        ("2901", "blackwell", "open"),
        ("2b85", "blackwell", "open"),
        ("3182", "blackwell", "open"),
        ("4000", None, None),
        ("None", None, None),
    ],
)
def test_generations(device, generation, takes):
    assert (names.generation(device, KNOWN), names.takes(device, KNOWN)) == (generation, takes)


def test_no_device_id_is_in_two_generations():
    spans = sorted(
        tuple(int(end, 16) for end in span.split("-"))
        for entry in KNOWN["generations"].values()
        for span in entry["ids"]
    )
    assert all(low <= high for low, high in spans)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(spans))


def test_every_repository_has_a_key_with_a_whole_fingerprint():
    """NVIDIA names the file of a key by the last eight digits of its fingerprint."""
    sources = KNOWN["sources"]["nvidia"]
    assert set(sources["keys"]) == set(sources["releases"])
    for key in sources["keys"].values():
        assert re.fullmatch(r"[0-9A-F]{40}", key["fingerprint"])
        assert key["file"].upper() == f"{key['fingerprint'][-8:]}.PUB"


# Refused before anything is looked at


def test_another_system_is_refused():
    assert "debian-12, debian-13, ubuntu-22.04, ubuntu-24.04, this host has fedora-42" in only(
        choose(system="fedora-42"), "driver-system"
    )


def test_a_host_without_a_gpu_is_refused():
    only(choose(bare(pci_gpus=[])), "driver-no-gpu")


def test_a_driver_of_the_run_installer_is_refused():
    assert "nvidia-uninstall" in only(choose(runfile=True), "driver-runfile")


def test_a_source_that_is_none_and_a_mirror_without_an_address():
    only(choose(want={"source": "ppa"}), "driver-source")
    only(choose(want={"source": "mirror"}), "driver-source")


def test_an_unknown_key_is_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="want has no versoin"):
        choose(want={"versoin": V})
    with pytest.raises(ValueError, match="host has no kernls"):
        choose(kernls={})


def test_without_an_exact_version_the_newest_of_the_branch_is_named():
    assert f"gpu_driver_version: {V}" in only(choose(want={"version": None}), "driver-version")
    assert "580.126.20 is not of branch 595" in only(choose(want={"branch": "595"}), "driver-version")


def test_a_broken_dpkg_comes_first():
    text = "The following packages are only half configured:\n nvidia-kernel-open-dkms NVIDIA kernel modules\n"
    assert "half configured: nvidia-kernel-open-dkms" in only(choose(audit=text), "dpkg-broken")


def test_a_mirror_takes_any_origin_and_its_own_address():
    available = offered(V, origin="our mirror")
    want = {"source": "mirror", "repository": "file:///srv/driver/"}
    plan = choose(want=want, available=available).plan
    assert "URIs: file:///srv/driver/\n" in plan.files["source"]
    assert plan.packages["nvidia-driver-cuda"] == f"{V}-1"


def test_a_version_that_is_not_offered_names_what_is():
    told = only(choose(want={"version": "580.999.01"}, available=offered("590.48.01", V)), "driver-not-offered")
    assert (
        "nvidia-driver-cuda 580.999.01 is not offered (590.48.01-1, 580.126.20-1 is); nvidia-kernel-open-dkms" in told
    )
    assert told.endswith(f"every package has: {V}")
    told = only(choose(system="debian-13", available=offered("590.48.01")), "driver-not-offered")
    assert "NVIDIA's repository for debian-13 began with branch 590" in told


def test_the_persistence_daemon_comes_from_where_the_driver_does():
    own = [{"version": "590.48.01-1", "origin": "NVIDIA"}, {"version": "580.105.08-1", "origin": "NVIDIA"}]
    available = {**offered(V), "nvidia-persistenced": [{"version": "535.171.04-1", "origin": "Debian"}, *own]}
    assert choose(available=available).plan.packages["nvidia-persistenced"] == "580.105.08-1"
    assert "nvidia-persistenced" not in choose(want={"persistence": False}, available=available).plan.packages
    assert "nvidia-persistenced" not in choose().plan.packages


# The fifteen failures


def test_failure_1_driver_library_version_mismatch_after_an_unattended_upgrade():
    facts, packages = running("580.105.08")
    facts["driver"]["installed"] = V
    for item in packages.values():
        item["version"] = f"{V}-1"
    told = only(choose(facts, packages=packages), "driver-mismatch")
    assert "driver 580.105.08 is loaded and 580.126.20 is installed" in told
    assert "gpu_driver_reboot: true" in told
    plan = choose(facts, {"reboot": True}, packages=packages).plan
    assert (plan.reboot, plan.changes) == (True, False)
    # what did it: Debian 12, open modules 535.261.03, nobody pinned them
    simulation = driver_apt.read((FIXTURES / "debian12-libcuda1-upgrade-removes-open-modules.txt").read_text())
    plan = {"libcuda1": "535.261.03-1", "nvidia-smi": "535.261.03-1", "nvidia-open-kernel-dkms": "535.261.03-1"}
    found = driver_apt.compare(simulation, plan, version="535.261.03", known=KNOWN, host="gpu-01")
    assert [finding.id for finding in found].count("apt-removes") == 2
    assert "nvidia-open-kernel-dkms 535.261.03-1 would be removed" in str(found[0])
    assert any("libcuda1 535.261.03-1 would become 535.309.01-0+deb12u1" in str(finding) for finding in found)
    assert all(finding.where == "gpu-01" for finding in found)


def test_failure_1_pin_hold_and_block_list_cover_every_package_of_the_plan():
    import re

    facts = bare(nvswitch={"devices": 4})
    plan = choose(facts).plan
    assert set(plan.holds) == set(plan.packages)
    for name in [
        *plan.packages,
        "libcuda1",
        "libnvidia-ml1",
        "nvidia-smi",
        "firmware-nvidia-gsp",
        "cuda-drivers",
        "cuda-drivers-580",
    ]:
        assert any(re.match(pattern, name) for pattern in plan.blocklist), name
    for name in ("libc6", "cuda-toolkit-13-0", "linux-image-amd64", "libcuda1-foo"):
        assert not any(re.match(pattern, name) for pattern in plan.blocklist), name


def test_failure_2_fabric_manager_of_another_version():
    facts = bare(nvswitch={"devices": 4})
    plan = choose(facts).plan
    assert (
        plan.packages["nvidia-fabricmanager"] == plan.packages["libnvidia-nscq"] == plan.packages["nvidia-driver-cuda"]
    )
    assert plan.because["nvidia-fabricmanager"] == "4 NVSwitches"
    available = offered(V)
    available["nvidia-fabricmanager"] = [{"version": "580.105.08-1", "origin": "NVIDIA"}]
    told = only(choose(facts, available=available), "fabric-version")
    assert (
        f"nvidia-fabricmanager {V} is not offered (580.105.08-1 is), and it has to be of exactly the driver's version"
        in told
    )
    own = bare(
        nvswitch={"devices": 4},
        driver={"loaded": V, "installed": V, "flavour": "open"},
        fabric_manager={"installed": "580.105.08", "state": "failed"},
    )
    assert "Fabric Manager 580.105.08 is installed, driver 580.126.20 is loaded" in only(
        choose(own, {"source": "preinstalled"}), "fabric-version"
    )


def test_failure_3_cuda_error_802_for_want_of_a_fabric_manager():
    assert "nvidia-fabricmanager" not in choose().plan.packages
    assert "nvidia-fabricmanager" in choose(bare(nvswitch={"devices": 4})).plan.packages
    told = only(
        choose(
            bare("20b2", nvswitch={"devices": 6}), {"source": "distribution", "version": "535.261.03"}, available=DEBIAN
        ),
        "fabric-names",
    )
    assert "gpu_driver_source: nvidia" in told
    facts = hosts.facts("h100x8")
    facts["fabric_manager"] = {"installed": "580.105.08", "state": "failed"}
    told = str(driver_state.cuinit(802, KNOWN, facts, "gpu-01")[0])
    assert "cuInit returned 802, CUDA_ERROR_SYSTEM_NOT_READY" in told
    assert "4 NVSwitches, Fabric Manager failed; Fabric Manager 580.105.08, driver 580.159.04" in told


def test_failure_4_nvlink_5_needs_its_subnet_manager_and_kernel_modules():
    facts = bare("2901", "2901")
    available = {**offered(V), "nvlsm": [{"version": "2025.10.14-1", "origin": "NVIDIA"}]}
    available["infiniband-diags"] = [{"version": "44.0-2", "origin": "Debian"}]
    there = {"ib_umad": True, "mlx5_ib": True}
    plan = choose(facts, nvlink5=True, modules=there, available=available).plan
    assert (plan.packages["nvlsm"], plan.packages["infiniband-diags"]) == ("2025.10.14-1", "44.0-2")
    assert plan.packages["nvidia-fabricmanager"] == plan.packages["libnvsdm"] == f"{V}-1"
    assert "libnvidia-nscq" not in plan.packages
    assert plan.load == ["ib_umad", "mlx5_ib"]
    told = only(
        choose(facts, nvlink5=True, modules={"ib_umad": False, "mlx5_ib": True}, available=available), "fabric-modules"
    )
    assert "ib_umad" in told
    assert "mlx5_ib," not in told


def test_failure_5_imex_only_in_a_rack_and_no_fabric_manager_there():
    nodes = ["192.0.2.1", "192.0.2.2"]
    plan = choose(bare("2941", "2941", nvswitch={"devices": 2}), {"imex_nodes": nodes}).plan
    assert plan.packages["nvidia-imex"] == f"{V}-1"
    assert "nvidia-fabricmanager" not in plan.packages
    assert "nvidia-imex" not in choose(bare("2330", nvswitch={"devices": 4})).plan.packages
    only(choose(want={"imex_nodes": nodes}), "driver-imex")
    choice = choose(bare("2941", fabric_manager={"installed": V, "state": "active"}), {"imex_nodes": nodes})
    assert ids(choice, "warning") == ["fabric-manager-on-rack"]


def test_failure_5_other_nodes_restart_imex_with_consent_and_out_of_service_only():
    nodes = ["192.0.2.1", "192.0.2.2"]
    driver = {"loaded": V, "installed": V, "flavour": "open", "cuda": "13.0"}
    facts, packages = bare("2941", "2941", driver=driver), running(V)[1]
    packages["nvidia-imex"] = packages["nvidia-driver-cuda"]
    fresh = choose(facts, {"imex_nodes": nodes}, packages=packages).plan
    files = {driver_case.PATHS[kind]: text for kind, text in fresh.files.items()}
    serving = ["vllm-agent@chat.0.service", "vllm@chat.0.service", "nvidia-imex.service", "nvidia-persistenced.service"]
    there = {"packages": packages, "files": files}
    same = choose(facts, {"imex_nodes": nodes}, units=serving, **there).plan
    assert (same.stop, same.writes) == ([], [])
    want = {"imex_nodes": [*nodes, "192.0.2.3"]}
    assert "nodes of its NVLink domain" in only(choose(facts, want, units=serving, **there), "stop-consent")
    site = {**want, "in_service": False, "stop_services": True}
    assert "playbooks/driver.yml" in only(choose(facts, site, units=serving, **there), "driver-serving")
    plan = choose(facts, {**want, "stop_services": True}, units=serving, **there).plan
    assert plan.stop == ["vllm-agent@chat.0.service", "vllm@chat.0.service", "nvidia-imex.service"]
    assert (plan.changes, plan.reboot) == (False, False)


def test_failure_6_asked_for_one_branch_and_got_another():
    told = only(
        choose(system="ubuntu-24.04", want={"source": "distribution", "version": "570.211.01"}, available={}),
        "driver-transitional",
    )
    assert "asking for them brings 580" in told
    simulation = driver_apt.read((FIXTURES / "standin-ubuntu-570-is-transitional.txt").read_text())
    plan = {"nvidia-driver-570-server-open": "570.211.01-0ubuntu1.24.04.1"}
    found = driver_apt.compare(simulation, plan, version="570.211.01", known=KNOWN)
    assert [finding.id for finding in found] == ["apt-branch", "apt-branch"]
    assert "nvidia-dkms-580-server-open 580.95.05-0ubuntu0.24.04.3 would be installed; that is branch 580" in str(
        found[0]
    )
    simulation = driver_apt.read((FIXTURES / "standin-debian-cuda-drivers-580-brings-590.txt").read_text())
    found = driver_apt.compare(simulation, {"cuda-drivers-580": "580.105.08-1"}, version="580.105.08", known=KNOWN)
    assert [finding.id for finding in found] == ["apt-branch"] * 3
    assert any("nvidia-kernel-dkms 590.48.01-1" in str(finding) for finding in found)


def test_failure_7_two_sources_with_different_keys():
    old = {"file": "/etc/apt/sources.list.d/cuda.list", "uri": REPO_12.rstrip("/"), "suite": "/", "signed_by": None}
    new = {"file": "/etc/apt/sources.list.d/nvidia.sources", "uri": REPO_12, "suite": "/", "signed_by": NVIDIA_KEY}
    told = only(choose(sources=[old, new]), "apt-signed-by")
    assert "/etc/apt/sources.list.d/cuda.list: no Signed-By; /etc/apt/sources.list.d/nvidia.sources: /usr/share" in told
    assert "Conflicting values set for option Signed-By" in told
    assert choose(sources=[new, {**new, "file": "/etc/apt/sources.list.d/again.sources"}]).plan
    other = {**old, "uri": "https://developer.download.nvidia.com/compute/cuda/repos/debian11/x86_64/"}
    assert choose(sources=[other, new]).plan


def test_failure_8_packages_of_another_provider_are_listed_and_none_is_removed():
    packages = {
        "libcuda1": {"version": "535.261.03-1", "origin": "Debian"},
        "nvidia-smi": {"version": "535.309.01-0+deb12u1", "origin": "Debian"},
        "libnvidia-ml1": {"version": "570.1-1", "origin": None},
        "nvidia-support": {"version": "20220217+3~deb12u1", "origin": "Debian"},
        "nvidia-container-toolkit": {"version": "1.17.8-1", "origin": "https://nvidia.github.io/"},
        "bash": {"version": "5.2", "origin": "Debian"},
    }
    told = only(choose(packages=packages), "driver-foreign")
    assert (
        "libcuda1 535.261.03-1 (Debian), libnvidia-ml1 570.1-1 (offered by no source), nvidia-smi 535.309.01-0+deb12u1 (Debian)"
        in told
    )
    assert "nvidia-support" not in told
    assert "the role removes none of them" in told
    ppa = {"libnvidia-compute-580": {"version": "580.1-0", "origin": "LP-PPA-graphics-drivers"}}
    only(choose(packages=ppa), "driver-foreign")


def test_failure_8_held_broken_packages():
    simulation = driver_apt.read((FIXTURES / "debian12-unpinned-held-broken.txt").read_text())
    assert simulation.changes == []
    found = driver_apt.compare(simulation, {"libcuda1": "535.261.03-1"}, version="535.261.03", known=KNOWN)
    assert [finding.id for finding in found] == ["apt-held-broken"]
    assert "libcuda1 Depends: nvidia-alternative (= 535.261.03-1) but 535.309.01-0+deb12u1 is to be installed" in str(
        found[0]
    )


def test_failure_9_open_modules_on_pascal_and_volta():
    for device in ("1db6", "15f8"):
        told = only(choose(bare(device), {"modules": "open"}), "driver-modules")
        assert f"before-turing (10de:{device}) work with the proprietary modules only" in told
        assert choose(bare(device)).plan.modules == "proprietary"


def test_failure_9_proprietary_modules_on_blackwell():
    told = only(choose(bare("2901"), {"modules": "proprietary"}), "driver-modules")
    assert "blackwell (10de:2901) work with the open modules only" in told
    assert choose(bare("2901")).plan.reason == "blackwell (10de:2901) work with the open modules only"


def test_failure_9_v100_with_a_branch_that_does_not_know_it():
    told = only(choose(bare("1db6"), {"version": "590.48.01"}), "driver-branch")
    assert "580 is the last for it" in told
    assert choose(bare("1db6")).plan


def test_failure_9_blackwell_with_a_branch_from_before_it():
    told = only(
        choose(bare("2b85"), {"source": "distribution", "version": "535.261.03"}, available=DEBIAN), "driver-branch"
    )
    assert "570 is the first for it" in told


def test_failure_9_pascal_beside_blackwell_has_no_driver():
    assert "no driver runs both" in only(choose(bare("1db6", "2901")), "driver-modules")
    assert choose(bare("1db6", "1e04")).plan.modules == "proprietary"


def test_failure_9_a_gpu_that_is_not_known_needs_an_answer():
    assert "10de:4000" in only(choose(bare("4000")), "driver-gpu-unknown")
    assert choose(bare("4000"), {"modules": "open"}).plan.modules == "open"


def test_failure_9_proprietary_modules_after_their_end():
    available = offered("615.1.1")
    only(choose(bare("2335"), {"modules": "proprietary", "version": "615.1.1"}, available=available), "driver-modules")


def test_failure_10_headers_for_every_kernel_before_the_driver():
    kernels = {KERNEL: {"headers": True}, "6.1.0-40-amd64": {"headers": False}, "6.1.0-41-amd64": {"headers": False}}
    headers = {f"linux-headers-6.1.0-{n}-amd64": [{"version": "6.1.1-1", "origin": "Debian"}] for n in (40, 41)}
    plan = choose(kernels=kernels, available={**offered(V), **headers}).plan
    assert plan.headers == ["linux-headers-6.1.0-40-amd64", "linux-headers-6.1.0-41-amd64"]
    assert plan.arguments[:2] == plan.headers
    del headers["linux-headers-6.1.0-41-amd64"]
    told = only(choose(kernels=kernels, available={**offered(V), **headers}), "kernel-headers")
    assert "kernel 6.1.0-41-amd64 is installed, its headers are not" in told


def test_failure_10_dkms_is_read_for_every_kernel():
    text = (
        f"nvidia/{V}, {KERNEL}, x86_64: installed\n"
        f"nvidia/{V}, 6.1.0-40-amd64, x86_64: built\n"
        "nvidia/580.105.08, 6.1.0-41-amd64, x86_64: installed\n"
        f"nvidia/{V}, 6.1.0-42-amd64, x86_64: installed (WARNING! Diff between built and installed module!)\n"
        "zfs/2.1.11, 6.1.0-43-amd64, x86_64: installed\n"
    )
    kernels = {KERNEL: {"headers": True}, **{f"6.1.0-{n}-amd64": {"headers": n != 43} for n in (40, 41, 42, 43)}}
    found = driver_state.dkms_findings(text, version=V, kernels=kernels, host="gpu-01")
    told = {finding.message.split()[5].rstrip(":"): str(finding) for finding in found}
    assert list(told) == [f"6.1.0-{n}-amd64" for n in (40, 41, 42, 43)]
    assert "it is only built" in told["6.1.0-40-amd64"]
    assert "580.105.08 is installed for it" in told["6.1.0-41-amd64"]
    assert "Diff between built and installed module" in told["6.1.0-42-amd64"]
    assert "there is none" in told["6.1.0-43-amd64"]
    assert "Install linux-headers-6.1.0-43-amd64 first" in told["6.1.0-43-amd64"]
    assert driver_state.dkms_findings(text, version=V, kernels={KERNEL: {"headers": True}}) == []


def test_failure_10_the_kernel_is_never_changed_by_the_driver():
    text = f"Inst linux-image-amd64 [6.1.170-1] (6.1.180-1 Debian:12 [amd64])\nInst nvidia-driver-cuda ({V}-1 NVIDIA [amd64])\n1 upgraded, 1 newly installed, 0 to remove and 3 not upgraded.\n"
    found = driver_apt.compare(driver_apt.read(text), {"nvidia-driver-cuda": f"{V}-1"}, version=V, known=KNOWN)
    assert [finding.id for finding in found] == ["apt-kernel"]


UBUNTU = {
    "available": {
        name: [{"version": f"{V}-1ubuntu1", "origin": "NVIDIA"}]
        for name in ("libnvidia-compute-580", "nvidia-dkms-580-open", "nvidia-utils-580")
    }
}


def test_failure_11_key_was_rejected_by_service():
    told = only(choose(secure_boot="SecureBoot enabled\n"), "secure-boot")
    assert "mokutil --import /var/lib/dkms/mok.pub" in told
    assert "console" in told
    assert choose(secure_boot="SecureBoot enabled\n", key_enrolled=True).plan.secure_boot == "enrolled"
    only(choose(bare(secure_boot=True)), "secure-boot")
    assert "openssl req -new -x509" in told  # DKMS makes its key with the first build only
    key = {"path": "/var/lib/dkms/mok.pub", "there": True}
    told = only(choose(secure_boot="SecureBoot enabled\n", dkms_key=key), "secure-boot")
    assert "Run mokutil --import /var/lib/dkms/mok.pub, reboot" in told
    assert "openssl" not in told
    ubuntu = {"path": "/var/lib/shim-signed/mok/MOK.der", "there": False}
    told = only(
        choose(system="ubuntu-24.04", secure_boot="SecureBoot enabled\n", dkms_key=ubuntu, **UBUNTU), "secure-boot"
    )
    assert "update-secureboot-policy --new-key, then mokutil --import /var/lib/shim-signed/mok/MOK.der" in told
    assert "gpu_driver_source: distribution" in told
    for off in ("SecureBoot disabled\n", "EFI variables are not supported on this system\n"):
        assert choose(bare(), secure_boot=off).plan.secure_boot is None


def test_failure_11_ubuntu_has_signed_modules_for_every_kernel():
    kernels = {"6.8.0-45-generic": {"headers": False}, "6.8.0-48-generic": {"headers": False}}
    version = "580.95.05-0ubuntu0.24.04.3"
    packages = ["nvidia-headless-no-dkms-580-server-open", "nvidia-utils-580-server"]
    available = {name: [{"version": version, "origin": "Ubuntu"}] for name in packages}
    for kernel in kernels:
        available[f"linux-modules-nvidia-580-server-open-{kernel}"] = [{"version": "6.8.0-45.45+1", "origin": "Ubuntu"}]
    want = {"source": "distribution", "version": "580.95.05"}
    choice = choose(
        want=want, system="ubuntu-24.04", kernels=kernels, available=available, secure_boot="SecureBoot enabled\n"
    )
    plan = choice.plan
    assert (plan.secure_boot, plan.headers) == ("signed", [])
    assert sorted(plan.packages) == sorted(available)
    assert set(plan.packages.values()) == {version, "6.8.0-45.45+1"}


def test_failure_12_nouveau_is_kept_out_and_the_initramfs_is_made_anew():
    assert choose().plan.files["modprobe"] == "blacklist nouveau\noptions nouveau modeset=0\n"
    choice = choose(bare(nouveau=True))
    assert "nouveau holds the GPUs" in only(choice, "reboot-consent")
    plan = choose(bare(nouveau=True), {"reboot": True}).plan
    assert (plan.initramfs, plan.reboot) == (True, True)
    plan = choose(nouveau_in_initramfs=True).plan
    assert (plan.initramfs, plan.reboot) == (True, False)


def test_failure_13_mig_instances_are_lost_by_a_reboot():
    facts, packages = running()
    facts["gpus"] = [
        {
            "index": 1,
            "mig": {"current": "Enabled", "pending": "Enabled"},
            "name": "NVIDIA H200",
            "compute_capability": "9.0",
        }
    ]
    want = {"reboot": True, "stop_services": True}
    assert "GPU 1 has MIG on" in only(choose(facts, want, packages=packages), "mig-lost")
    assert choose(facts, {**want, "mig_layout": {"1": ["3g.71gb", "3g.71gb"]}}, packages=packages).plan


def test_failure_13_mig_is_no_matter_when_nothing_changes():
    facts, packages = running(V)
    facts["gpus"] = [
        {
            "index": 0,
            "mig": {"current": "Enabled", "pending": "Enabled"},
            "name": "NVIDIA H200",
            "compute_capability": "9.0",
        }
    ]
    assert choose(facts, packages=packages).findings == []


def test_failure_14_persistenced_is_stopped_after_what_uses_it():
    facts, packages = running()
    want = {"reboot": True, "stop_services": True}
    plan = choose(facts, want, packages=packages, units=["nvidia-persistenced.service", "vllm@a.0.service"]).plan
    assert plan.stop == ["vllm@a.0.service", "nvidia-persistenced.service"]


def test_failure_15_gpu_firmware_off_needs_proprietary_modules():
    assert "Xid 119 and 120" in only(choose(want={"gpu_firmware": False}), "driver-gsp")
    assert "proprietary" not in only(choose(bare("2901"), {"gpu_firmware": False}), "driver-gsp")
    plan = choose(want={"gpu_firmware": False, "modules": "proprietary"}).plan
    # By all names that the module's file has, Debian's own among them.
    for name in ("nvidia", "nvidia-current", "nvidia-current-open"):
        assert f"options {name} NVreg_EnableGpuFirmware=0\n" in plan.files["modprobe"]


def test_failure_15_xid_119_is_told_with_the_driver_it_came_under():
    facts, packages = running(xid=[{"address": "0000:18:00.0", "code": 119, "line": ""}])
    choice = choose(facts, {"reboot": True, "stop_services": True}, packages=packages)
    assert choice.plan
    assert ids(choice, "warning") == ["driver-gsp"]
    assert "under driver 580.105.08" in choice.findings[0].message


def test_failure_15_the_four_packages_of_the_container_toolkit_are_of_one_version():
    toolkit = {
        name: [{"version": "1.18.0-1", "origin": "x"}, {"version": "1.17.8-1", "origin": "x"}]
        for name in KNOWN["toolkit"]
    }
    plan = choose(want={"toolkit": "1.17.8"}, available={**offered(V), **toolkit}).plan
    assert {plan.packages[name] for name in KNOWN["toolkit"]} == {"1.17.8-1"}
    toolkit["libnvidia-container1"] = toolkit["libnvidia-container1"][:1]
    assert "libnvidia-container1 1.17.8 is not offered" in only(
        choose(want={"toolkit": "1.17.8"}, available={**offered(V), **toolkit}), "toolkit-version"
    )


# Wheels


def test_cuda_13_wheels_refuse_a_535_driver_by_the_rules_of_the_version_matrix():
    want = {"source": "distribution", "version": "535.261.03", "releases": CU130}
    told = only(choose(bare("20b2"), want, available=DEBIAN), "driver-wheels")
    assert "vLLM 0.26.0 cu130 is to run here: found driver 535.261.03, CUDA 13 wheels need 580.65.06 or newer" in told
    want["releases"] = [{"version": "0.26.0", "accelerator": "cu129"}]
    assert choose(bare("20b2"), want, available=DEBIAN).plan


DEBIAN = {
    name: [
        {"version": "535.309.01-0+deb12u1", "origin": "Debian"},
        {"version": "535.261.03-1", "origin": "Debian"},
    ]
    for name in ("nvidia-kernel-dkms", "libcuda1", "nvidia-smi")
}
DEBIAN["nvidia-open-kernel-dkms"] = [{"version": "535.261.03-1", "origin": "Debian"}]


def test_debians_own_open_modules_decide_the_version():
    want = {"source": "distribution", "version": "535.261.03"}
    plan = choose(want=want, available=DEBIAN).plan
    assert plan.packages == dict.fromkeys(("nvidia-open-kernel-dkms", "libcuda1", "nvidia-smi"), "535.261.03-1")
    simulation = driver_apt.read((FIXTURES / "debian12-pinned-open-535.261.03.txt").read_text())
    assert driver_apt.compare(simulation, plan.packages, version=plan.version, known=KNOWN, installed={}) == []
    assert simulation.installed["libnvidia-ml1"] == "535.261.03-1"
    assert simulation.installed["nvidia-modprobe"] == "535.309.01-0+deb12u1"  # a source of its own
    told = only(choose(want={**want, "version": "535.309.01"}, available=DEBIAN), "driver-not-offered")
    assert "nvidia-open-kernel-dkms 535.309.01 is not offered (535.261.03-1 is)" in told
    assert "535.261.03" in told.rsplit("every package has", 1)[1]
    assert "gpu_driver_branch: '535'" in only(
        choose(want={"source": "distribution"}, available=DEBIAN), "driver-branch"
    )


# What is there already


@pytest.mark.parametrize("want", [{}, {"version": V}])
def test_preinstalled_changes_nothing_and_judges(want):
    facts, _ = running(V)
    choice = driver_plan.choose(
        facts, {"source": "preinstalled", **want}, {"system": "fedora-42"}, KNOWN, where="gpu-01"
    )
    assert choice.findings == []
    assert (choice.plan.packages, choice.plan.changes, choice.plan.version) == ({}, False, V)


def test_preinstalled_and_wrong():
    facts, _ = running("535.261.03")
    only(choose(facts, {"source": "preinstalled"}), "driver-version")
    only(choose(facts, {"source": "preinstalled", "version": None, "releases": CU130}), "driver-wheels")
    only(choose(bare(), {"source": "preinstalled"}), "driver-not-loaded")
    facts["driver"]["installed"] = V
    only(choose(facts, {"source": "preinstalled", "version": None}), "driver-mismatch")
    only(
        choose(
            bare(driver={"loaded": V, "installed": V, "flavour": "open"}, nvswitch={"devices": 4}),
            {"source": "preinstalled"},
        ),
        "fabric-version",
    )


def test_cuda_compat_on_the_loaders_path_is_told():
    choice = choose(compat=["/usr/local/cuda/compat"])
    assert ids(choice, "warning") == ["cuda-compat"]
    assert choice.plan


# Files


def test_the_source_is_one_deb822_file():
    assert choose(sources=[]).plan.files["source"] == (
        "Types: deb\n"
        "URIs: https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/\n"
        "Suites: /\n"
        "Signed-By: /usr/share/keyrings/cuda-archive-keyring.gpg\n"
    )
    assert names.source_text(
        uri="http://deb.example/debian",
        suite="bookworm",
        signed_by="/k.gpg",
        components=["main", "contrib"],
        architecture="amd64",
    ) == (
        "Types: deb\nURIs: http://deb.example/debian\nSuites: bookworm\nComponents: main contrib\nArchitectures: amd64\nSigned-By: /k.gpg\n"
    )
    assert (
        "repos/ubuntu2404/sbsa/"
        in choose(bare(machine="aarch64"), system="ubuntu-24.04", available=None).plan.files["source"]
    )


def test_preferences_text():
    globs = " ".join(KNOWN["globs"])
    assert choose().plan.files["preferences"] == (
        "Explanation: what both need stays with the distribution\n"
        "Package: nvidia-support nvidia-installer-cleanup nvidia-kernel-common glx-alternative-*\n"
        "Pin: release o=Debian\n"
        "Pin-Priority: 500\n"
        "\n"
        "Explanation: the driver comes from one provider\n"
        f"Package: {globs}\n"
        "Pin: release o=Debian\n"
        "Pin-Priority: -1\n"
        "\n"
        "Explanation: the driver comes from one provider\n"
        f"Package: {globs}\n"
        "Pin: release o=LP-PPA-graphics-drivers\n"
        "Pin-Priority: -1\n"
        "\n"
        "Explanation: as planned\n"
        "Package: nvidia-driver-cuda nvidia-kernel-open-dkms\n"
        f"Pin: version {V}-1\n"
        "Pin-Priority: 1002\n"
        "\n"
        "Explanation: what they need, of the same version\n"
        f"Package: {globs}\n"
        f"Pin: version {V}-*\n"
        "Pin-Priority: 1001\n"
    )


def test_the_distributions_driver_keeps_nvidias_repository_away():
    plan = choose(want={"source": "distribution", "version": "535.261.03"}, available=DEBIAN).plan
    globs = " ".join(KNOWN["globs"])
    assert plan.files["preferences"].startswith(
        "Explanation: the driver comes from one provider\n"
        f"Package: {globs}\n"
        'Pin: origin "developer.download.nvidia.com"\n'
        "Pin-Priority: -1\n\n"
    )
    assert "source" not in plan.files
    without = choose(want={"source": "distribution", "version": "535.261.03"}, available=DEBIAN, sources=[]).plan
    assert "origin" not in without.files["preferences"]


def test_block_list_text():
    assert names.blocklist_text(
        names.blocklist(["nvidia-*", "libcuda1", "linux-modules-nvidia-*", "nvlsm", "cuda-drivers*"])
    ) == (
        "Unattended-Upgrade::Package-Blacklist {\n"
        '  "cuda-drivers";\n'
        '  "libcuda1$";\n'
        '  "linux-modules-nvidia-";\n'
        '  "nvidia-";\n'
        '  "nvlsm$";\n'
        "};\n"
    )


# apt's simulation


def test_a_simulation_is_read_whole():
    simulation = driver_apt.read((FIXTURES / "debian12-open-to-proprietary.txt").read_text())
    assert simulation.finished
    assert simulation.removed == {
        "nvidia-open-kernel-dkms": "535.261.03-1",
        "nvidia-open-kernel-support": "535.261.03-1",
    }
    assert simulation.installed == dict.fromkeys(
        ("nvidia-kernel-support", "nvidia-kernel-dkms"), "535.309.01-0+deb12u1"
    )
    assert simulation.upgraded["libcuda1"] == ("535.261.03-1", "535.309.01-0+deb12u1")
    assert len(simulation.upgraded) == 9
    assert simulation.changes[2].labels == "Debian-Security:12/oldstable-security"
    plan = dict.fromkeys(("nvidia-kernel-dkms", "libcuda1", "nvidia-smi"), "535.309.01-0+deb12u1")
    named = ("nvidia-open-kernel-dkms", "nvidia-open-kernel-support")
    settled = {"version": "535.309.01", "known": KNOWN}
    assert driver_apt.compare(simulation, plan, removes=named, **settled) == []
    found = driver_apt.compare(simulation, plan, removes=named[:1], **settled)
    assert [finding.id for finding in found] == ["apt-removes"]
    assert "nvidia-open-kernel-support" in str(found[0])


@pytest.mark.parametrize(
    ("line", "id_"),
    [
        ("Inst nvidia-driver-cuda (580.105.08-1 NVIDIA [amd64])", "apt-version"),
        ("Inst libnvidia-ml1 (580.105.08-1 NVIDIA [amd64])", "apt-version"),
        ("Inst libnvidia-ml1 (590.48.01-1 NVIDIA [amd64])", "apt-branch"),
        ("Inst libc6 [2.36-9] (2.36-10 Debian [amd64])", "apt-upgrades"),
        ("Inst linux-image-6.1.0-50-amd64 (6.1.1-1 Debian [amd64])", "apt-kernel"),
        ("Remv docker-ce [5:24.0]", "apt-removes"),
        ("Purg docker-ce [5:24.0]", "apt-removes"),
        ("Remv nvidia-container-toolkit:amd64 [1.17.8-1]", "apt-removes"),
        (f"Inst libnvidia-ml1 ({V}-1 NVIDIA [amd64])", None),
        ("Inst dkms (3.0.10-8 Debian [all])", None),
        ("Inst nvidia-modprobe [535.1-1] (580.1-1 NVIDIA [amd64])", None),
    ],
)
def test_what_the_plan_does_not_say_is_refused(line, id_):
    text = f"{line}\n1 upgraded, 1 newly installed, 0 to remove and 3 not upgraded.\n"
    found = driver_apt.compare(driver_apt.read(text), {"nvidia-driver-cuda": f"{V}-1"}, version=V, known=KNOWN)
    assert [finding.id for finding in found] == ([id_] if id_ else [])


def test_downgrades_held_packages_and_half_an_output():
    text = (
        "The following held packages will be changed:\n  libnvidia-ml1\n  bash\n"
        "Inst nvidia-driver-cuda [590.48.01-1] (580.126.20-1 NVIDIA [amd64])\n"
        "0 upgraded, 0 newly installed, 1 downgraded, 0 to remove and 3 not upgraded.\n"
    )
    simulation = driver_apt.read(text)
    assert simulation.held_changed == ["libnvidia-ml1", "bash"]
    plan = {"nvidia-driver-cuda": f"{V}-1"}
    assert [f.id for f in driver_apt.compare(simulation, plan, version=V, known=KNOWN)] == ["apt-held-changed"] * 2
    half = driver_apt.read(text.rsplit("\n0 upgraded", 1)[0])
    assert [f.id for f in driver_apt.compare(half, plan, version=V, known=KNOWN)] == ["apt-unreadable"]
    nothing = driver_apt.read("0 upgraded, 0 newly installed, 0 to remove and 0 not upgraded.\n")
    settled = {"version": V, "known": KNOWN}
    assert driver_apt.compare(nothing, plan, installed={"nvidia-driver-cuda": f"{V}-1"}, **settled) == []
    left = driver_apt.compare(nothing, plan, installed={"nvidia-driver-cuda": "580.105.08-1"}, **settled)
    assert [f.id for f in left] == ["apt-leaves-out"]
    located = driver_apt.read("E: Unable to locate package nvidia-driver-cuda\n")
    assert [f.id for f in driver_apt.compare(located, plan, **settled)] == ["apt-error"]


class Apt:
    """apt-get over lists made here, in a folder of its own; nothing of the machine is asked or changed."""

    def __init__(self, folder):
        self.folder = folder
        for name in (
            "etc/preferences.d",
            "etc/apt.conf.d",
            "etc/trusted.gpg.d",
            "etc/sources.list.d",
            "state/lists/partial",
            "cache/archives/partial",
        ):
            (folder / name).mkdir(parents=True)
        (folder / "status").touch()

    def offer(self, origin, packages):
        repository = self.folder / origin
        repository.mkdir()
        (repository / "Release").write_text(f"Origin: {origin}\nLabel: {origin}\n")
        (repository / "Packages").write_text(
            "\n".join(
                f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: stand-in <root@localhost>\n"
                + (f"Depends: {depends}\n" if depends else "")
                + f"Filename: ./{name}_{version}_amd64.deb\nSize: 1000\nSHA256: {'0' * 64}\nDescription: stand-in\n"
                for name, version, depends in packages
            )
        )
        path = self.folder / "etc" / "sources.list.d" / f"{origin}.list"
        path.write_text(f"deb [trusted=yes arch=amd64] file:{repository} ./\n")

    def __call__(self, *arguments):
        folder = self.folder
        options = [f"Dir::Etc={folder}/etc", f"Dir::State={folder}/state", f"Dir::State::status={folder}/status"]
        options += [
            f"Dir::Cache={folder}/cache",
            "Debug::NoLocking=1",
            "APT::Architecture=amd64",
            "APT::Sandbox::User=root",
        ]
        argv = ["apt-get", *[word for option in options for word in ("-o", option)], *arguments]
        ran = subprocess.run(
            argv, capture_output=True, text=True, env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"}, check=False
        )
        return ran.stdout + ran.stderr


def test_apt_itself_follows_the_preferences_and_jumps_without_them(tmp_path):
    apt = Apt(tmp_path)
    nvidia, needs = [], "libnvidia-ml1 (>= 580.65.06)"
    for version in (f"{V}-1", f"{V}-2", "580.105.08-1", "590.48.01-1"):
        nvidia += [("nvidia-driver-cuda", version, needs), ("nvidia-kernel-open-dkms", version, "nvidia-support")]
        nvidia += [("libnvidia-ml1", version, "")]
    apt.offer("NVIDIA", nvidia)
    apt.offer(
        "Debian",
        [
            ("nvidia-support", "20220217+3", ""),
            ("libnvidia-ml1", f"{V}-9debian1", ""),
            ("libnvidia-ml1", "600.1-1", ""),
        ],
    )
    apt("update")
    available = {
        name: [{"version": item[1], "origin": "NVIDIA"} for item in nvidia if item[0] == name] for name, *_ in nvidia
    }
    plan = choose(want={"version": f"{V}-1"}, available=available).plan
    assert plan.arguments == [f"nvidia-driver-cuda={V}-1", f"nvidia-kernel-open-dkms={V}-1"]

    def look():
        simulation = driver_apt.read(apt("-s", "install", "--no-install-recommends", *plan.arguments))
        return simulation, driver_apt.compare(
            simulation, plan.packages, version=plan.version, known=KNOWN, installed={}
        )

    simulation, found = look()
    assert [finding.id for finding in found] == ["apt-branch"]
    assert simulation.installed["libnvidia-ml1"] == "600.1-1"
    (tmp_path / "etc" / "preferences.d" / "driver").write_text(plan.files["preferences"])
    simulation, found = look()
    assert found == []
    assert simulation.installed == {
        "libnvidia-ml1": f"{V}-2",
        "nvidia-driver-cuda": f"{V}-1",
        "nvidia-kernel-open-dkms": f"{V}-1",
        "nvidia-support": "20220217+3",
    }


# What is easily lost


def test_cards_of_others_do_not_count():
    facts = bare("2335")
    facts["pci_gpus"].append({"address": "0000:09:00.0", "vendor_id": "1002", "device_id": "74a1", "driver": None})
    assert choose(facts).plan.modules == "open"


def test_a_variable_that_is_null_has_its_default():
    plan = choose(want={"modules": None, "gpu_firmware": None, "packages": None, "source": None}).plan
    assert (plan.modules, plan.source) == ("open", "nvidia")


def test_kinds_that_are_wanted_and_fit():
    assert choose(bare("2901"), {"modules": "open"}).plan.modules == "open"
    assert choose(want={"modules": "open"}).plan.reason == "as wanted"
    end = choose(bare("1db6"), {"version": "615.1.1"}, available=offered("615.1.1"))
    assert ids(end) == ["driver-branch", "driver-modules"]
    assert end.findings[1].fix == "Choose an older branch"


def test_only_what_the_wanted_provider_offers_is_taken():
    told = only(choose(available=offered(V, origin="Debian")), "driver-not-offered")
    assert "(none is)" in told
    only(choose(available=offered(V, origin="LP-PPA-graphics-drivers")), "driver-not-offered")
    want = {"source": "distribution", "version": "535.261.03"}
    elsewhere = {name: [{**item, "origin": "NVIDIA"} for item in items] for name, items in DEBIAN.items()}
    only(choose(want=want, available=elsewhere), "driver-not-offered")


def test_only_packages_of_the_other_kind_may_go():
    facts, packages = running()
    packages["nvidia-modprobe"] = {"version": "580.1-1", "origin": "NVIDIA"}
    packages["nvidia-smi"] = {"version": "580.105.08-1", "origin": "NVIDIA"}
    want = {"modules": "proprietary", "reboot": True, "stop_services": True}
    assert choose(facts, want, packages=packages).plan.may_remove == ["nvidia-kernel-open-dkms"]


def test_a_reboot_alone_needs_consent_and_stops_what_serves():
    facts, packages = running(V)
    facts["driver"]["installed"] = "580.105.08"
    plan = choose(facts, {"reboot": True, "stop_services": True}, packages=packages, units=["vllm@a.0.service"]).plan
    assert plan.reboot_because == [f"driver {V} is loaded, 580.105.08 is installed"]
    facts, packages = running("580.105.08")
    facts["driver"]["installed"] = V
    packages = {name: {**item, "version": f"{V}-1"} for name, item in packages.items()}
    told = only(choose(facts, {"reboot": True}, packages=packages, units=["vllm@a.0.service"]), "stop-consent")
    assert "vllm@a.0.service serves on this host" in told
    idle = only(choose(facts, {"reboot": True}, packages=packages, units=["nvidia-dcgm.service"]), "stop-consent")
    assert "nvidia-dcgm.service runs on this host" in idle


def test_a_version_that_no_source_offers_any_more_is_not_foreign():
    facts, packages = running()
    packages = {name: {**item, "origin": None} for name, item in packages.items()}
    want = {"reboot": True, "stop_services": True}
    assert choose(facts, want, packages=packages).plan
    only(choose(facts, want, packages={"libnvidia-old": {"version": "1", "origin": None}}), "driver-foreign")


def test_a_mirror_knows_the_distributions_packages_as_foreign():
    want = {"source": "mirror", "repository": "https://mirror.example/driver/"}
    available = offered(V, origin="our mirror")
    for origin in ("Debian", "LP-PPA-graphics-drivers"):
        packages = {"libcuda1": {"version": "1", "origin": origin}}
        only(choose(want=want, available=available, packages=packages), "driver-foreign")
    for origin in ("our mirror", None):
        assert choose(want=want, available=available, packages={"libcuda1": {"version": "1", "origin": origin}}).plan


def test_where_kernel_modules_for_nvlink_5_come_from():
    lacking = {"nvlink5": True, "modules": {"ib_umad": True, "mlx5_ib": False}}
    available = {name: [{"version": "1-1", "origin": "NVIDIA"}] for name in ("nvlsm", "infiniband-diags")}
    nvidia = {
        name: [{"version": f"{V}-1", "origin": "NVIDIA"}]
        for name in names.names("nvidia", "ubuntu-24.04", "580", "open", KNOWN)
    }
    facts = bare("2901", kernel={"release": "6.8.0-45-generic", "headers": True})
    told = only(
        choose(facts, system="ubuntu-24.04", available={**offered(V), **available, **nvidia}, **lacking),
        "fabric-modules",
    )
    assert told.endswith("Install linux-modules-extra-6.8.0-45-generic")
    told = only(choose(facts, available={**offered(V), **available}, **lacking), "fabric-modules")
    assert told.endswith("Boot a kernel that has them")
    assert "fabric-manager-on-rack" not in ids(choose(hosts.facts("h100x8"), {"version": "580.159.04"}), "warning")


def test_preinstalled_with_a_fabric_manager_that_matches():
    facts = hosts.facts("h100x8")
    choice = choose(facts, {"source": "preinstalled", "version": None, "releases": CU130})
    assert choice.findings == []
    assert (choice.plan.version, choice.plan.modules) == ("580.159.04", "open")
    facts["driver"]["flavour"] = None
    assert (
        choose(facts, {"source": "preinstalled", "version": None, "modules": "proprietary"}).plan.modules
        == "proprietary"
    )


def test_remedies_say_what_there_is():
    told = only(choose(available={}), "driver-not-offered")
    assert "nvidia-driver-cuda 580.126.20 is not offered (none is)" in told
    assert told.endswith("none is offered")
    simulation = driver_apt.read((FIXTURES / "debian12-unpinned-held-broken.txt").read_text())
    (broken,) = driver_apt.compare(simulation, {}, version=V, known=KNOWN)
    assert "choose one provider" in broken.fix
    (other,) = driver_apt.compare(driver_apt.read("E: Unable to locate package x\n"), {}, version=V, known=KNOWN)
    assert other.message == "apt finds no way to install the plan: Unable to locate package x"
    assert "choose one provider" not in other.fix


def test_signed_modules_are_named_once_a_kernel():
    assert names.names("distribution", "ubuntu-24.04", "580", "open", KNOWN, signed_for=["6.8.0-1", "6.8.0-2"]) == [
        "nvidia-headless-no-dkms-580-server-open",
        "nvidia-utils-580-server",
        "linux-modules-nvidia-580-server-open-6.8.0-1",
        "linux-modules-nvidia-580-server-open-6.8.0-2",
    ]
    assert names.names("nvidia", "ubuntu-24.04", "580", "open", KNOWN, signed_for=["6.8.0-1"]) is None


def test_a_flat_repository_has_no_components():
    text = names.source_text(uri="https://a.example/", suite="/", signed_by="/k.gpg", components=["main"])
    assert "Components" not in text
    assert "Components" not in names.source_text(uri="https://a.example/", suite="bookworm", signed_by="/k.gpg")


def test_dkms_remedies():
    text = f"nvidia-current-open/{V}, {KERNEL}, x86_64: built\nnvidia-old/1.0, {KERNEL}, x86_64: added\n"
    (finding,) = driver_state.dkms_findings(text, version=V, kernels={KERNEL: {"headers": True}}, host="gpu-01")
    assert finding.fix == (
        f"Read /var/lib/dkms/nvidia-current-open/{V}/build/make.log, then `dkms install nvidia-current-open/{V} -k {KERNEL}`"
    )
    assert f"no module {V} for kernel {KERNEL}: it is only built. Do not boot it" in finding.message
    (finding,) = driver_state.dkms_findings("", version=V, kernels={KERNEL: {"headers": False}})
    assert finding.fix.startswith(f"Install linux-headers-{KERNEL} first")


def test_a_trigger_that_waits_is_finished_with_what_an_ended_run_left():
    left = {"libctf0": "unpacked", "libc-bin": "triggers-pending"}
    mark = {"packages": {"libctf0": "2.40-2"}, "stopped": []}
    choice = choose(mark=mark, unsettled=left, audit="half done")
    assert ids(choice) == []
    assert choice.plan.finishes == left
    assert "dpkg-broken" in ids(choose(mark=mark, unsettled={**left, "bash": "unpacked"}, audit="half done"))


# Tools


def test_secure_boot_states():
    assert driver_state.secure_boot("SecureBoot enabled\n") is True
    assert driver_state.secure_boot("SecureBoot enabled\nSecureBoot validation is disabled in shim\n") is False
    assert driver_state.secure_boot("SecureBoot disabled\nPlatform is in Setup Mode\n") is False
    assert driver_state.secure_boot("EFI variables are not supported on this system\n") is None
    assert driver_state.secure_boot(None) is None


def test_dkms_status_in_its_forms():
    read = driver_state.dkms(
        "nvidia/580.126.20: added\nnvidia, 470.1, 5.10.0-8-amd64, x86_64: installed\nnvidia-current/535.261.03, 6.1.0-18-cloud-amd64, x86_64: installed\nrubbish\n"
    )
    assert [(item.module, item.version, item.kernel, item.state) for item in read] == [
        ("nvidia", "580.126.20", None, "added"),
        ("nvidia", "470.1", "5.10.0-8-amd64", "installed"),
        ("nvidia-current", "535.261.03", "6.1.0-18-cloud-amd64", "installed"),
    ]


def test_proc_driver_nvidia_version():
    old = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Tue Aug 12 00:00:00 UTC 2025\nGCC version:  gcc\n"
    )
    new = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@build)\n"
    assert driver_state.loaded(old) == {"version": "535.261.03", "kind": "proprietary"}
    assert driver_state.loaded(new) == {"version": "580.159.04", "kind": "open"}
    assert driver_state.loaded(None) is None
    assert driver_state.mismatch("580.1", "580.1") is None
    assert driver_state.mismatch(None, "580.1") is None


@pytest.mark.parametrize("code", [35, 100, 802, 803, 804, 999])
def test_every_code_of_cuinit_has_a_meaning_and_a_remedy(code):
    (finding,) = driver_state.cuinit(code, KNOWN, host="gpu-01")
    assert str(code) in finding.message
    assert KNOWN["cuinit"][code]["name"] in finding.message
    assert len(finding.fix) > 30


def test_what_explains_a_code_is_named():
    facts = {"driver": {"loaded": "580.1", "installed": "590.1"}, "gpus": [{"fabric": {"state": "In Progress"}}]}
    assert "(loaded 580.1, installed 590.1)" in driver_state.cuinit(803, KNOWN, facts)[0].message
    assert "(fabric.state In Progress)" in driver_state.cuinit(802, KNOWN, facts)[0].message
    for code in (100, 999):
        assert "580.1" not in driver_state.cuinit(code, KNOWN, facts)[0].message
    assert "(loaded" not in driver_state.cuinit(803, KNOWN)[0].message


def test_the_table_of_codes_has_its_shape():
    for code, entry in KNOWN["cuinit"].items():
        assert set(entry) == {"name", "means", "fix"}, code
    for branch in KNOWN["branches"].values():
        assert set(branch) <= {"support", "ends"}
    assert KNOWN["default_branch"] in KNOWN["branches"]


def test_cuinit_that_works_and_one_that_nobody_knows():
    assert driver_state.cuinit(0, KNOWN) == []
    assert "cuInit returned 217" in driver_state.cuinit(217, KNOWN)[0].message
