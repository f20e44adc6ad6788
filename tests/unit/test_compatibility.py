"""Which wheel a host can run: real hosts and their drivers, and what must hold for every host."""

import functools
import itertools
import json
import re

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.filter import gpu_wheels
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import compatibility
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data

VERSIONS = data.load("versions")
# NVIDIA's table "CUDA GPUs": model to compute capability.
CAPABILITY = {
    "Tesla P100-PCIE-16GB": "6.0",
    "Tesla V100-SXM2-32GB": "7.0",
    "Tesla T4": "7.5",
    "NVIDIA A100 80GB PCIe": "8.0",
    "NVIDIA A100-SXM4-80GB": "8.0",
    "NVIDIA A10": "8.6",
    "NVIDIA A10G": "8.6",
    "NVIDIA A40": "8.6",
    "NVIDIA RTX A6000": "8.6",
    "NVIDIA GeForce RTX 3090": "8.6",
    "NVIDIA GeForce RTX 3090 Ti": "8.6",
    "Orin (nvgpu)": "8.7",
    "NVIDIA GeForce RTX 4090": "8.9",
    "NVIDIA L20": "8.9",
    "NVIDIA L40": "8.9",
    "NVIDIA RTX 6000 Ada Generation": "8.9",
    "NVIDIA H20": "9.0",
    "NVIDIA H100 80GB HBM3": "9.0",
    "NVIDIA H200": "9.0",
    "NVIDIA GH200 480GB": "9.0",
    "NVIDIA B200": "10.0",
    "NVIDIA B300 SXM6 AC": "10.3",
    "NVIDIA GeForce RTX 5090": "12.0",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "12.0",
    "NVIDIA GB10": "12.1",
}
SYSTEMS = {name: (system["glibc"], system["python"]) for name, system in VERSIONS["systems"].items()}
SYSTEMS |= {
    "debian-11": ("2.31", "3.9"),
    "ubuntu-20.04": ("2.31", "3.8"),
    "rhel-9": ("2.34", "3.9"),
    "old": ("2.17", "3.12"),
}


def host(models, driver, system="debian-12", **more):
    glibc, python = SYSTEMS[system]
    gpus = [
        {"index": index, "name": model, "compute_capability": CAPABILITY[model]} for index, model in enumerate(models)
    ]
    usual = {
        "vendor": "nvidia",
        "error": None,
        "pci_gpus": [],
        "gpus": gpus,
        "driver": {"loaded": driver, "installed": driver, "flavour": None, "cuda": None},
        "glibc": glibc,
        "python": python,
        "machine": "x86_64",
    }
    return {**usual, **more}


def judge(facts):
    return compatibility.wheels(facts, VERSIONS)


def everything(answer):
    return json.dumps(answer.as_dict())


NEWEST, CU129, VOLTA = ("0.33.0", "cu130"), ("0.32.0", "cu129"), ("0.18.1", "cu129")
UPGRADE = ("580.65.06", "upgrade the driver")
ARM = {"machine": "aarch64"}

# Models, driver, system, what else; best, and what message and remedy together have to say. Drivers of the hosts up to
# the first None are those that their owners showed in public issues.
HOSTS = [
    (["NVIDIA GeForce RTX 4090"], "550.90.07", "debian-12", {}, CU129, ("found driver 550.90.07", *UPGRADE)),
    (["NVIDIA H200"], "570.124.06", "debian-12", {}, CU129, ("found driver 570.124.06, CUDA 13 wheels need 580.65.06 or newer; choose cu129 up to vLLM 0.32.0 or upgrade the driver",)),
    (["NVIDIA GeForce RTX 3090 Ti"], "570.124.04", "ubuntu-24.04", {}, CU129, UPGRADE),
    (["NVIDIA L20"] * 2, "550.135", "debian-13", {}, CU129, ("550.135", *UPGRADE)),
    (["NVIDIA A100 80GB PCIe"] * 4, "535.161.08", "debian-12", {}, CU129, ("535.161.08", "cuda-compat-13-0", "VLLM_ENABLE_CUDA_COMPATIBILITY=1")),
    (["NVIDIA H100 80GB HBM3"] * 8, "550.90.07", "debian-12", {}, CU129, UPGRADE),
    (["NVIDIA H100 80GB HBM3"] * 8, "550.54.14", "ubuntu-22.04", {}, ("0.26.0", "cu129"), (*UPGRADE, "found Python 3.10", "3.11 to 3.14", "vllm_runtime_python")),
    (["NVIDIA RTX 6000 Ada Generation"] * 2, "535.154.05", "debian-12", {}, CU129, UPGRADE),
    (["NVIDIA L40", "NVIDIA A100 80GB PCIe"], "550.54.15", "debian-12", {}, CU129, UPGRADE),
    (["NVIDIA GeForce RTX 3090"] * 2, "520.61.05", "debian-12", {}, None, ("found driver 520.61.05", "580.65.06", "525.60.13 is enough for cu129 up to vLLM 0.32.0")),
    (["NVIDIA A40"] * 4, "535.161.08", "debian-11", {}, ("0.10.2", "cu128"), ("found Python 3.9", *UPGRADE, "vllm_runtime_python")),
    (["NVIDIA RTX A6000"] * 2, "530.30.02", "ubuntu-24.04", {}, CU129, ("530.30.02", *UPGRADE)),
    (["NVIDIA A10"] * 4, "525.147.05", "debian-12", {}, CU129, ("525.147.05", *UPGRADE)),
    (["NVIDIA H100 80GB HBM3"] * 8, "525.105.17", "debian-12", {}, CU129, ("525.105.17", *UPGRADE)),
    (["NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 5090"], "575.57.08", "debian-12", {}, CU129, ("575.57.08", *UPGRADE)),
    (["NVIDIA H100 80GB HBM3"] * 8, "570.86.15", "debian-12", {}, CU129, UPGRADE),
    (["Tesla V100-SXM2-32GB"] * 8, "560.35.03", "debian-12", {}, VOLTA, ("compute capability 7.0", "7.5", "No driver changes that", "choose cu129 up to vLLM 0.18.1")),
    (["Tesla V100-SXM2-32GB"] * 4, "535.129.03", "ubuntu-22.04", {}, VOLTA, ("compute capability 7.0", "No driver changes that")),
    (["NVIDIA A10G"] * 4, "535.104.12", "debian-12", {}, CU129, UPGRADE),
    (["NVIDIA B200"] * 8, "575.64", "debian-12", {}, CU129, ("found driver 575.64", *UPGRADE)),
    (["Tesla T4"] * 4, "560.35.03", "debian-12", {}, CU129, UPGRADE),
    (["NVIDIA RTX PRO 6000 Blackwell Workstation Edition"] * 2, "575.51.03", "debian-12", {}, CU129, UPGRADE),
    (["NVIDIA H20"] * 8, "535.161.08", "rhel-9", {}, ("0.10.2", "cu128"), ("found Python 3.9", *UPGRADE)),
    (["NVIDIA H200"] * 2, "580.159.04", "debian-12", {}, NEWEST, ("driver 580.159.04", "9.0", "glibc 2.36", "Python 3.11")),
    (["NVIDIA H200"] * 2, "580.159.04", "ubuntu-22.04", {}, ("0.26.0", "cu130"), ("found Python 3.10", "3.11 to 3.14", "vllm_runtime_python")),
    (["NVIDIA L20"], None, "debian-12", {}, None, ("No driver is loaded", "580.65.06", "525.60.13 is enough for cu129")),
    (["Tesla V100-SXM2-32GB"] * 8, "580.65.06", "debian-13", {}, VOLTA, ("compute capability 7.0", "No driver changes that")),
    (["Tesla V100-SXM2-32GB"] * 8, "520.61.05", "debian-12", {}, None, ("525.60.13", "vLLM 0.18.1 cu129 runs", "Branch 580 is the last")),
    (["Tesla V100-SXM2-32GB"] * 8, None, "debian-12", {}, None, ("525.60.13", "vLLM 0.18.1 cu129 runs", "Branch 580 is the last")),
    (["Tesla P100-PCIE-16GB"] * 2, "535.183.01", "debian-12", {}, None, ("compute capability 6.0", "the oldest known begins at 7.0", "No driver changes that", "vLLM 0.32.0 cpu")),
    (["Tesla V100-SXM2-32GB", "NVIDIA H100 80GB HBM3"], "580.65.06", "debian-12", {}, VOLTA, ("GPU 0 (Tesla V100-SXM2-32GB)", "7.0")),
    (["NVIDIA H100 80GB HBM3", "Tesla P100-PCIE-16GB"], "580.65.06", "debian-12", {}, None, ("GPU 1 (Tesla P100-PCIE-16GB)", "6.0")),
    (["NVIDIA B300 SXM6 AC"] * 8, "580.95.05", "debian-12", {}, NEWEST, ("580.95.05", "10.3")),
    (["NVIDIA B200"] * 8, "580.95.05", "old", {}, None, ("found glibc 2.17", "2.28", "debian-12 (2.36)")),
    (["NVIDIA GH200 480GB"], "580.95.05", "ubuntu-24.04", ARM, None, ("The host is aarch64", "x86_64", "vLLM 0.33.0 for aarch64", "cu130")),
    (["NVIDIA GH200 480GB"] * 4, "550.54.15", "ubuntu-22.04", ARM, None, ("The host is aarch64", "vLLM 0.18.1 for aarch64", "cu129")),
    (["NVIDIA GB10"], "580.95.05", "ubuntu-24.04", ARM, None, ("The host is aarch64", "vLLM 0.33.0 for aarch64")),
    (["NVIDIA GB10"], "535.104.05", "old", {"machine": "riscv64"}, None, ("The host is riscv64", "Use a host of architecture x86_64")),
    (["Orin (nvgpu)"], "580.65.06", "debian-12", {}, None, ("compute capability 8.7", "Tegra")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("models", "driver", "system", "more", "best", "words"),
    HOSTS,
    ids=[f"{row[0][0]} {row[1]} {row[2]}" for row in HOSTS],
)
def test_a_host_gets_its_release_and_the_numbers(models, driver, system, more, best, words):  # noqa: PLR0917 (a table)
    answer = judge(host(models, driver, system, **more))
    assert (answer.best and (answer.best.version, answer.best.accelerator)) == best
    told = f"{answer.message} {answer.remedy}"
    for word in words:
        assert word.lower() in told.lower()


def test_the_table_is_of_use():
    assert len(HOSTS) >= 25
    assert {model for row in HOSTS for model in row[0]} | {"NVIDIA A100-SXM4-80GB"} == set(CAPABILITY)


# What is said beside yes and no


def only(answer, version, accelerator):
    (found,) = [wheel for wheel in answer.runs if (wheel.version, wheel.accelerator) == (version, accelerator)]
    return found


def reasons(answer, version, accelerator):
    (found,) = [item for item in answer.refused if (item.version, item.accelerator) == (version, accelerator)]
    return [reason.text for reason in found.reasons]


@pytest.mark.parametrize(
    ("driver", "accelerator", "toolkit"),
    [
        ("580.50", "cu130", "580.65.06"),
        ("580.65.06", "cu130", None),
        ("570.124.06", "cu129", "575.51.03"),
        ("575.51.03", "cu129", None),
    ],
)
def test_between_branch_and_toolkit_run_time_compilation_is_a_note(driver, accelerator, toolkit):
    notes = only(judge(host(["NVIDIA H200"], driver)), "0.32.0", accelerator).notes
    said = [note for note in notes if "222" in note]
    assert bool(said) == bool(toolkit)
    for note in said:
        assert driver in note
        assert toolkit in note
        assert "cudaErrorUnsupportedPtxVersion" in note


@pytest.mark.parametrize("driver", ["579.99", "525.60.12", "525"])
def test_just_below_a_limit_is_refused(driver):
    (reason,) = reasons(judge(host(["NVIDIA H200"], driver)), "0.32.0", "cu130")
    assert reason == f"found driver {driver}, CUDA 13 wheels need 580.65.06 or newer"
    assert ("0.32.0", "cu129") in {(w.version, w.accelerator) for w in judge(host(["NVIDIA H200"], "525.60.13")).runs}
    if driver.startswith("525"):
        (reason,) = reasons(judge(host(["NVIDIA H200"], driver)), "0.32.0", "cu129")
        assert reason == f"found driver {driver}, CUDA 12 wheels need 525.60.13 or newer"


@pytest.mark.parametrize(
    ("models", "mentioned"),
    [
        (["NVIDIA H200"], True),
        (["NVIDIA A10G", "Tesla T4"], True),
        (["NVIDIA GeForce RTX 4090"], False),
        (["NVIDIA H200", "NVIDIA GeForce RTX 4090"], False),
        (["NVIDIA RTX A6000"], False),
    ],
)
def test_forward_compatibility_is_for_data_centre_gpus_alone(models, mentioned):
    answer = judge(host(models, "550.90.07"))
    assert ("cuda-compat-13-0" in everything(answer)) == mentioned
    assert ("VLLM_ENABLE_CUDA_COMPATIBILITY=1" in everything(answer)) == mentioned


def test_blackwell_needs_cuda_12_8():
    (reason,) = reasons(judge(host(["NVIDIA B200"], "580.95.05")), "0.8.5", "cu124")
    assert "10.0" in reason
    assert "12.8" in reason
    assert only(judge(host(["NVIDIA B200"], "580.95.05")), "0.10.2", "cu128")


@pytest.mark.parametrize(
    ("model", "version", "accelerator", "words"),
    [
        ("NVIDIA A10", "0.18.1", "cu129", ("8.6 is not listed", "code for 8.0 runs on it")),
        ("NVIDIA B300 SXM6 AC", "0.33.0", "cu130", ("10.3 is not listed", "not kernels built for 10.0a")),
    ],
)
def test_a_capability_served_by_a_lower_one_is_a_note(model, version, accelerator, words):
    answer = judge(host([model], "580.95.05"))
    assert any(all(word in note for word in words) for note in only(answer, version, accelerator).notes)


def test_a_listed_capability_is_no_note():
    assert not any("not listed" in note for note in only(judge(host(["NVIDIA H200"], "580.95.05")), *NEWEST).notes)


def test_lock_and_status_are_those_of_this_hosts_python():
    answer = judge(host(["NVIDIA H200"], "580.95.05"))
    assert (only(answer, *NEWEST).status, only(answer, *NEWEST).lock) == ("untested", "made")
    assert only(answer, "0.26.0", "cu130").status == "tested"
    newer = only(judge(host(["NVIDIA H200"], "580.95.05", python="3.14")), *NEWEST)
    assert newer.lock == "missing"
    assert "scripts/lock 0.33.0 cu130 --python 3.14" in newer.notes[0]
    known = only(answer, "0.31.0", "cu129")
    assert (known.status, known.lock) == (compatibility.NOT_OFFERED, None)
    assert any("published is not known" in note for note in known.notes)


def test_every_reason_is_told():
    found = reasons(judge(host(["Tesla P100-PCIE-16GB"], "470.1", "old", python="3.8", machine="ppc64le")), *NEWEST)
    for word in ("driver 470.1", "capability 6.0", "glibc 2.17", "Python 3.8", "ppc64le"):
        assert sum(word in reason for reason in found) == 1
    assert len(found) == 5


# Hosts that do not answer, or have none


def test_without_a_driver_the_capability_is_not_guessed():
    answer = judge(host([], None))
    assert answer.best is None
    assert "depends on the GPU's compute capability" in answer.remedy
    assert "then vLLM" not in answer.remedy
    assert {reason for item in answer.refused for reason in [r.text for r in item.reasons]} == {
        "no driver is loaded (none is installed), CUDA 13 wheels need 580.65.06 or newer",
        "no driver is loaded (none is installed), CUDA 12 wheels need 525.60.13 or newer",
    } | {r.text for item in answer.refused for r in item.reasons if r.kind == "python"}


def test_a_driver_that_does_not_answer():
    words = "Failed to initialize NVML: Driver/library version mismatch"
    facts = host([], "580.95.05", error=words)
    answer = judge(facts)
    assert answer.best is None
    assert words in answer.message
    facts["driver"]["installed"] = "580.126.09"
    assert "Driver 580.95.05 is loaded, 580.126.09 is installed: reboot" in judge(facts).remedy


def test_a_gpu_that_hides_its_capability_is_no_yes():
    facts = host(["NVIDIA H200"] * 2, "580.95.05")
    facts["gpus"][1]["compute_capability"] = None
    answer = judge(facts)
    assert not answer.runs
    assert "GPU 1 (NVIDIA H200) did not tell its compute capability" in answer.message


@pytest.mark.parametrize("change", [{"glibc": None}, {"python": None}, {"machine": None}])
def test_what_a_host_does_not_tell_is_no_yes(change):
    assert not judge({**host(["NVIDIA H200"], "580.95.05"), **change}).runs


def test_amd():
    answer = judge(host([], None, vendor="amd"))
    assert not answer.runs
    for word in ("AMD", "https://wheels.vllm.ai/rocm/", "rocm72", "Python 3.12", "vLLM 0.32.0 cpu"):
        assert word in f"{answer.message} {answer.remedy}"
    assert all(item.reasons[0].kind == "vendor" for item in answer.refused)


@pytest.mark.parametrize(
    ("system", "machine", "best", "words"),
    [
        ("debian-12", "x86_64", "vLLM 0.32.0 cpu", ("no NVIDIA GPU", "glibc 2.36")),
        ("ubuntu-22.04", "x86_64", None, ("found Python 3.10", "vllm_runtime_python", "then vLLM 0.32.0 cpu runs")),
        ("debian-12", "aarch64", None, ("aarch64", "x86_64")),
    ],
)
def test_no_gpu(system, machine, best, words):
    answer = judge(host([], None, system, vendor="none", machine=machine))
    assert (str(answer.best) if answer.best else None) == best
    for word in words:
        assert word in f"{answer.message} {answer.remedy}"


# What holds for every host

DRIVERS = [None, "470.256.02", "520.61.05", "525.60.13", "535.129.03", "550.54.15", "570.124.06", "575.57.08",
           "580.50", "580.65.06", "580.159.04", "590.44.01", "610.57.04"]  # fmt: skip
SETS = [[model] for model in CAPABILITY] + [list(pair) for pair in itertools.combinations(list(CAPABILITY)[::6], 2)]


def pairs(answer):
    return [(wheel.version, wheel.accelerator) for wheel in answer.runs]


@functools.cache
def every_host():
    """Hosts and their answers: each model, and some mixed, with each driver and system; one model on aarch64."""
    hosts = [host(*row) for row in itertools.product(SETS, DRIVERS, SYSTEMS)]
    hosts += [host(["NVIDIA GH200 480GB"], *row, **ARM) for row in itertools.product(DRIVERS, SYSTEMS)]
    return [(facts, judge(facts)) for facts in hosts]


def entry_of(version, accelerator):
    release = VERSIONS["releases"].get(version) or VERSIONS["known"][version]
    return release["python"], release["accelerators"][accelerator]


def as_number(text):
    return [int(part) for part in re.findall(r"\d+", text)]


def test_no_answer_is_refused_by_the_table_and_every_build_is_answered_once():
    """Judged a second time, by the table alone."""
    builds = [
        (version, accelerator)
        for table in ("releases", "known")
        for version, release in VERSIONS[table].items()
        for accelerator, entry in release["accelerators"].items()
        if entry["cuda"]
    ]
    for facts, answer in every_host():
        refused = [(item.version, item.accelerator) for item in answer.refused]
        assert sorted(pairs(answer) + refused) == sorted(builds)
        assert all(item.reasons for item in answer.refused)
        for version, accelerator in builds:
            pythons, entry = entry_of(version, accelerator)
            least, driver = entry["min_driver"]["minor_compatibility"], facts["driver"]["loaded"]
            runs = (
                bool(driver)
                and as_number(driver) >= as_number(least)
                and as_number(facts["glibc"]) >= as_number(entry["glibc"])
                and facts["python"] in pythons
                and facts["machine"] in entry["architectures"]
                and all(served(gpu["compute_capability"], entry["compute_capabilities"]) for gpu in facts["gpus"])
            )
            assert ((version, accelerator) in pairs(answer)) == runs, (facts, version, accelerator)


def served(capability, listed):
    if capability in listed:
        return True
    major, minor = as_number(capability)
    return capability != "8.7" and any(as_number(item)[0] == major and as_number(item)[1] < minor for item in listed)


def test_order_is_offered_then_newest_then_highest_cuda():
    for _, answer in every_host():
        keys = [(wheel.offered, as_number(wheel.version), as_number(wheel.accelerator)) for wheel in answer.runs]
        assert keys == sorted(keys, reverse=True)


def test_raising_the_driver_never_loses_a_release():
    before = {}
    for facts, answer in every_host():  # drivers rise, for each set of GPUs
        rest = json.dumps({**facts, "driver": None})
        now = set(pairs(answer))
        assert before.get(rest, set()) <= now, facts
        before[rest] = now


def test_a_remedy_is_possible_and_of_use():
    """What it asks for, done, gives a better release than before; where nothing helps, no change is named."""
    asked = 0
    for facts, answer in every_host():
        if not answer.changes:
            assert facts["machine"] != "x86_64" or not re.search(
                "pgrade|vllm_runtime_python", f"{answer.message} {answer.remedy}"
            )
            continue
        asked += 1
        changed = {**facts, **{key: value for key, value in answer.changes.items() if key != "driver"}}
        if "driver" in answer.changes:
            changed["driver"] = {**facts["driver"], "loaded": answer.changes["driver"]}
        order = pairs(judge(changed))
        assert order, facts
        assert f"vLLM {order[0][0]} {order[0][1]} runs" in answer.remedy
        assert answer.best is None or (order[0] != pairs(answer)[0] and pairs(answer)[0] in order[1:])
        for number in answer.changes.values():
            assert number in answer.remedy
    assert asked > 1000


def test_every_host_with_something_to_gain_is_told_how():
    for _, answer in every_host():
        assert answer.message.endswith(".")
        if answer.remedy is None:
            assert answer.best.offered
            assert pairs(answer)[0] == NEWEST
        else:
            assert answer.remedy.endswith(".")


# Filter and table


def test_the_filter_gives_plain_data():
    found = gpu_wheels.FilterModule().filters()["gpu_wheels"](host(["NVIDIA H200"], "570.124.06"))
    assert set(found) == {"runs", "refused", "best", "message", "remedy"}
    assert json.loads(json.dumps(found)) == found
    assert set(found["best"]) == {"version", "accelerator", "status", "lock", "notes"}
    assert set(found["refused"][0]) == {"version", "accelerator", "reasons"}
    assert found["best"] == found["runs"][0]


def test_what_is_known_is_not_offered_and_every_entry_is_whole():
    assert not set(VERSIONS["known"]) & set(VERSIONS["releases"])
    for table in ("releases", "known"):
        for version, release in VERSIONS[table].items():
            for accelerator, entry in release["accelerators"].items():
                where = f"{version} {accelerator}"
                assert {"cuda", "glibc", "architectures", "compute_capabilities", "min_driver"} <= set(entry), where
                if entry["cuda"]:
                    least, toolkit = entry["min_driver"]["minor_compatibility"], entry["min_driver"]["toolkit"]
                    assert as_number(least) <= as_number(toolkit), where
                    assert accelerator == "cu" + entry["cuda"].replace(".", ""), where
