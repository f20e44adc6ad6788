"""What gpu_facts says on recorded hosts and on broken ones: every source, every failure, nothing made up."""

import ctypes
import inspect
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import gpu_amd, gpu_facts, gpu_nvml, gpu_sysfs
from ansible_collections.gpu_fleet.vllm.plugins.modules import gpu_facts as module

REPLAY = Path(__file__).resolve().parents[1] / "replay"
sys.path.insert(0, str(REPLAY))

import compose  # noqa: E402
import hosts  # noqa: E402
import record  # noqa: E402

MISMATCH = {
    "rc": 18,
    "out": "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.178\n",
}
HANGS = {"hang": 3600}
GPU = "sys/devices/pci0000:00/0000:00:06.0"


def told(facts):
    return {entry["what"]: entry["why"] for entry in facts["unread"]}


# -- shape ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h200x2", "h100x8"])
def test_the_documentation_names_every_key_and_no_other(name):
    documented = yaml.safe_load(module.RETURN)
    facts = hosts.facts(name)
    assert list(documented) == ["root", *facts]  # root is the module's own
    assert list(documented["gpus"]["contains"]) == list(facts["gpus"][0])
    json.dumps(facts)


def test_a_healthy_pair_of_h200s():
    facts = hosts.facts("h200x2")
    assert (facts["vendor"], facts["source"], facts["error"]) == ("nvidia", "nvidia-smi", None)
    assert facts["driver"] == {"loaded": "580.159.04", "installed": None, "flavour": "open", "cuda": "13.0"}
    assert told(facts) == {"driver.installed": "modinfo: command not found"}
    one = facts["gpus"][1]
    assert (one["index"], one["name"], one["memory_mib"]) == (1, "NVIDIA H200", 143771)
    assert (one["pci_address"], one["driver"], one["numa_node"], one["bridges"]) == ("0000:00:07.0", "nvidia", None, [])
    assert (one["compute_capability"], one["persistence"], one["retired_pages_pending"]) == ("9.0", True, None)
    assert one["mig"] == {"current": "Disabled", "pending": "Disabled"}
    assert one["ecc"] == {
        "mode": "Enabled",
        "uncorrected_volatile": 0,
        "uncorrected_aggregate": 0,
        "corrected_volatile": 0,
    }
    assert one["remapped_rows"] == {"uncorrectable": 0, "pending": False, "failure": False}
    assert one["pcie"] == {"gen_current": 5, "gen_gpumax": 5, "gen_hostmax": None, "width_current": 16, "width_max": 16}
    assert one["fabric"] == {"state": "Completed", "status": "Success", "health": None}
    assert one["nvlinks"] == [26.562] * 18
    assert facts["topology"]["matrix"].splitlines()[1] == "GPU0\t X \tNV18\t0-31\t0\t\tN/A"
    assert all(table.startswith(" \t\x1b[4mGPU0\tGPU1\t") for table in facts["topology"]["p2p"].values())


def test_a_healthy_board_of_eight():
    facts = hosts.facts("h100x8")
    assert facts["unread"] == []
    assert facts["nvswitch"] == {"devices": 4}
    assert facts["fabric_manager"] == {"installed": "580.159.04", "state": "active"}
    assert facts["iommu"] == {"groups": 8, "passthrough": True}
    assert facts["secure_boot"] is False
    assert facts["kernel"] == {"release": "6.1.0-18-amd64", "headers": True}
    assert [gpu["numa_node"] for gpu in facts["gpus"]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [bridge["address"] for bridge in facts["gpus"][0]["bridges"]] == [
        "0000:17:00.0",
        "0000:16:00.0",
        "0000:15:01.0",
    ]
    assert facts["nics"][1] == {"name": "mlx5_1", "netdev": "ibs1", "pci_address": "0000:3b:00.0", "numa_node": 0}
    assert (facts["glibc"], facts["python"], facts["machine"]) == ("2.36", "3.11", "x86_64")


def test_a_host_without_gpus_is_asked_nothing_about_them(tmp_path):
    asked = []

    def run(argv, timeout):
        asked.append(argv[0])
        raise FileNotFoundError(argv[0])

    facts = gpu_facts.gather(run, root=str(tmp_path))
    assert (facts["vendor"], facts["source"], facts["error"], facts["gpus"]) == ("none", None, None, [])
    assert sorted(asked) == ["/usr/bin/python3", "getconf", "uname"]
    assert facts["fabric_manager"]["state"] == "absent"


def test_what_may_hang_is_asked_beside_the_rest_not_before_it():
    recorded = hosts.recording("h100x8")
    answer, lock, counts = hosts.runner(recorded), threading.Lock(), {"now": 0, "most": 0}

    def run(argv, timeout):
        with lock:
            counts["now"] += 1
            counts["most"] = max(counts.values())
        time.sleep(0.05)
        with lock:
            counts["now"] -= 1
        return answer(argv, timeout)

    assert hosts.replay(recorded, run=run)["source"] == "nvidia-smi"
    assert counts["most"] > 6


# -- nvidia-smi -----------------------------------------------------------------------------------------------------------


def test_a_broken_driver_is_said_in_the_tools_own_words_once():
    facts = hosts.facts("h100x8", every=MISMATCH)
    assert facts["error"] == MISMATCH["out"].strip().replace("\n", "; ")
    assert (facts["source"], facts["gpus"], facts["unread"]) == (None, [], [])
    assert len(facts["pci_gpus"]) == 8
    assert facts["driver"]["loaded"] == "580.159.04"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (HANGS, "no answer within 20 s"),
        ("No devices were found\n", "No devices were found"),
        ("", "nvidia-smi printed nothing"),
        ("<html>\nnot, a, table, of, GPUs, at all\n", "<html>; not, a, table"),
        ("index, name, uuid, pci.bus_id, memory.total [MiB], driver_version\n", "index, name"),
        ({"rc": 255}, "exit status 255"),
        ({"rc": 9, "err": "NVIDIA-SMI has failed\n"}, "NVIDIA-SMI has failed"),
    ],
)
def test_what_is_no_list_of_gpus_is_an_error(answer, error):
    core = "--query-gpu=index,name,uuid,pci.bus_id,memory.total,driver_version --format=csv,noheader,nounits"
    facts = hosts.facts("h200x2", calls={core: answer})
    assert error in facts["error"]
    assert (facts["source"], facts["gpus"]) == (None, [])


def test_without_nvidia_smi_the_bus_still_shows_the_gpus():
    facts = hosts.facts("h200x2", commands={"nvidia-smi": None})
    assert (facts["vendor"], facts["source"], facts["error"], facts["gpus"]) == ("nvidia", None, None, [])
    assert told(facts)["gpus"] == "nvidia-smi: command not found"
    assert [(gpu["address"], gpu["device_id"], gpu["driver"]) for gpu in facts["pci_gpus"]] == [
        ("0000:00:06.0", "2335", "nvidia"),
        ("0000:00:07.0", "2335", "nvidia"),
    ]


def test_a_gpu_without_its_driver_is_bound_to_none_or_to_another():
    files = {
        f"{GPU}/driver": None,
        "sys/devices/pci0000:00/0000:00:07.0/driver": {"link": "../../../bus/pci/drivers/vfio-pci"},
    }
    facts = hosts.facts("h200x2", files=files)
    assert [gpu["driver"] for gpu in facts["pci_gpus"]] == [None, "vfio-pci"]
    assert [gpu["driver"] for gpu in facts["gpus"]] == [None, "vfio-pci"]


@pytest.mark.parametrize("field", sorted(gpu_facts.FIELDS))
def test_one_unknown_field_costs_only_itself(field):
    whole, less = hosts.facts("h200x2"), hosts.facts("h200x2", unknown=(field,))
    assert [entry for entry in less["unread"] if entry not in whole["unread"]] == [
        {"what": field, "why": f'Field "{field}" is not a valid field to query.'}
    ]
    place = gpu_facts.FIELDS[field][0]
    for gpu in (*whole["gpus"], *less["gpus"]):
        for key in place[:-1]:
            gpu = gpu[key]  # noqa: PLW2901
        gpu[place[-1]] = None
    assert less["gpus"] == whole["gpus"]


def test_a_driver_that_knows_no_optional_field_still_gives_the_gpus():
    facts = hosts.facts("h200x2", unknown=tuple(gpu_facts.FIELDS))
    assert [gpu["name"] for gpu in facts["gpus"]] == ["NVIDIA H200"] * 2
    assert set(told(facts)) == {*gpu_facts.FIELDS, "driver.installed"}


@pytest.mark.parametrize(
    ("field", "printed", "value", "why"),
    [
        ("compute_cap", "[N/A]", None, None),
        ("mig.mode.current", "N/A", None, None),
        ("mig.mode.current", "None", None, None),
        ("persistence_mode", "Disabled", False, None),
        ("retired_pages.pending", "Yes", True, None),
        ("ecc.errors.corrected.volatile.total", "[Not Supported]", None, None),
        ("ecc.errors.corrected.volatile.total", "17", 17, None),
        ("ecc.mode.current", "[Unknown Error]", None, "GPU 1: [Unknown Error]"),
        ("pcie.link.width.current", "[GPU requires reset]", None, "GPU 1: [GPU requires reset]"),
        ("pcie.link.width.current", "x16", None, "GPU 1: not understood: 'x16'"),
        ("remapped_rows.pending", "Maybe", None, "GPU 1: not understood: 'Maybe'"),
        ("fabric.state", "In Progress", "In Progress", None),
        ("fabric.health.summary", "Unhealthy", "Unhealthy", None),
    ],
)
def test_a_value_is_what_was_printed_or_null_with_the_reason(field, printed, value, why):
    facts = hosts.facts("h200x2", gpus={1: {field: printed}})
    got = facts["gpus"][1]
    for key in gpu_facts.FIELDS[field][0]:
        got = got[key]
    assert got == value
    assert told(facts).get(field) == why


def test_optional_answers_that_never_come_cost_only_themselves():
    fields = ",".join(("index", *gpu_facts.FIELDS))
    facts = hosts.facts(
        "h200x2", calls={f"--query-gpu={fields} --format=csv,noheader,nounits": HANGS, "topo -m": HANGS}
    )
    assert [gpu["nvlinks"][0] for gpu in facts["gpus"]] == [26.562, 26.562]
    assert facts["topology"]["matrix"] is None
    assert facts["topology"]["p2p"]["read"] is not None
    assert told(facts)["topology.matrix"] == "nvidia-smi topo -m: no answer within 20 s"
    assert set(gpu_facts.FIELDS) < set(told(facts))


def test_memory_that_a_gpu_shares_with_its_host_is_not_told():
    facts = hosts.facts("h200x2", gpus={"*": {"memory.total": "[N/A]"}})
    assert [gpu["memory_mib"] for gpu in facts["gpus"]] == [None, None]
    assert facts["error"] is None


def test_links_are_numbered_and_the_inactive_ones_null():
    facts = hosts.facts("h100x8", links={2: {3: None, 17: None}, 4: None, 5: dict.fromkeys(range(18))})
    assert facts["gpus"][2]["nvlinks"] == [*[26.562] * 3, None, *[26.562] * 13, None]
    assert [facts["gpus"][index]["nvlinks"] for index in (4, 5)] == [[], []]


def test_nvlink_that_cannot_be_asked_is_told():
    facts = hosts.facts("h200x2", calls={"nvlink -s": {"rc": 3, "out": "Unable to query NVLink\n"}})
    assert told(facts)["nvlinks"] == "Unable to query NVLink"
    inactive = {"rc": 3, "out": "NVML: Unable to retrieve NVLink information as all links are inActive\n"}
    assert "nvlinks" not in told(hosts.facts("h200x2", calls={"nvlink -s": inactive}))


def test_processes_are_on_their_gpu_with_their_unit():
    apps = [
        {
            "gpu": 1,
            "pid": 4711,
            "process_name": "/usr/bin/python3 -m a, b",
            "used_memory": "1200",
            "unit": "/system.slice/system-vllm.slice/vllm@chat.0.service/worker",
        },
        {"gpu": 1, "pid": 12, "process_name": "[Not Found]", "used_memory": "[N/A]"},
    ]
    facts = hosts.facts("h200x2", apps=apps)
    assert facts["gpus"][0]["processes"] == []
    assert facts["gpus"][1]["processes"] == [
        {"pid": 4711, "name": "/usr/bin/python3 -m a, b", "memory_mib": 1200, "unit": "vllm@chat.0.service"},
        {"pid": 12, "name": None, "memory_mib": None, "unit": None},
    ]


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/user.slice/user-1000.slice/session-3.scope\n", "session-3.scope"),
        ("0::/system.slice/docker-abc.scope\n", "docker-abc.scope"),
        ("0::/user.slice/user@7.service/app.slice/run-u1.service/x\n", "run-u1.service"),
        ("0::/\n", None),
        ("12:pids:/system.slice/wrong.service\n1:name=systemd:/system.slice/right.service\n", "right.service"),
        ("garbage\n", None),
    ],
)
def test_the_unit_of_a_process(tmp_path, cgroup, unit):
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/cgroup").write_text(cgroup)
    assert gpu_sysfs.unit(gpu_sysfs.Host(str(tmp_path)), 7) == unit


@pytest.mark.parametrize("line", ["CUDA Version                 : 13.0", "CUDA UMD Version             : 13.3"])
def test_cuda_of_the_driver_in_both_spellings(line):
    facts = hosts.facts("h200x2", calls={"-q -d COMPUTE": ["==NVSMI LOG==", "", line]})
    assert facts["driver"]["cuda"] == line[-4:]


def test_a_cuda_version_that_is_not_printed_is_told():
    facts = hosts.facts("h200x2", calls={"-q -d COMPUTE": "CUDA Version : N/A\n"})
    assert facts["driver"]["cuda"] is None
    assert "CUDA Version : N/A" in told(facts)["driver.cuda"]


# -- NVML -----------------------------------------------------------------------------------------------------------------


NVML_WORDS = {
    2: "Invalid Argument",
    3: "Not Supported",
    15: "GPU is lost",
    18: "RM has detected an NVML/RM version mismatch.",
}


class NVMLError(Exception):
    """As pynvml's: a number, and the library's words."""

    def __init__(self, value):
        super().__init__(value)
        self.value = value

    def __str__(self):
        return NVML_WORDS.get(self.value, f"NVML Error with code {self.value}")


class FabricInfo3(ctypes.Structure):
    """c_nvmlGpuFabricInfo_v3_t, less what is not read."""

    _fields_ = [("status", ctypes.c_uint), ("state", ctypes.c_uint), ("healthSummary", ctypes.c_uint8)]


class FabricInfo2(ctypes.Structure):
    """c_nvmlGpuFabricInfo_v2_t, likewise."""

    _fields_ = [("status", ctypes.c_uint), ("state", ctypes.c_uint)]


def fake_nvml(recorded, **other):
    """A pynvml that says what the recorded nvidia-smi says; it has the names of USED and no other."""
    gpus = recorded["nvidia_smi"]["gpus"]
    apps = recorded["nvidia_smi"]["apps"]

    def number(field, missing=3):
        def read(handle, *_):
            text = gpus[handle]["fields"][field]
            if not text.isdigit():
                raise NVMLError(missing)
            return int(text)

        return read

    def switch(field):
        def read(handle):
            words = {"Enabled": 1, "Disabled": 0, "Yes": 1, "No": 0}
            text = gpus[handle]["fields"][field]
            if text not in words:
                raise NVMLError(3)
            return words[text]

        return read

    def ecc(handle, kind, counter):
        what = f"ecc.errors.{('corrected', 'uncorrected')[kind]}.{('volatile', 'aggregate')[counter]}.total"
        return number(what)(handle)

    def fabric(handle, info):
        fields = gpus[handle]["fields"]
        info._obj.state = {"Not Started": 1, "In Progress": 2, "Completed": 3}.get(fields["fabric.state"], 0)
        info._obj.status = 0 if fields["fabric.status"] == "Success" else 999
        if isinstance(info._obj, FabricInfo3):
            words = {"Healthy": 1, "Unhealthy": 2, "Limited Capacity": 3}
            info._obj.healthSummary = words.get(fields["fabric.health.summary"], 0)

    def link_state(handle, link):
        if link >= len(gpus[handle]["nvlinks"]):
            raise NVMLError(2 if gpus[handle]["nvlinks"] else 3)
        return int(gpus[handle]["nvlinks"][link] is not None)

    def values(handle, fields):
        megabytes = [round(float(gpus[handle]["nvlinks"][link].split()[0]) * 1000) for _, link in fields]
        return [SimpleNamespace(nvmlReturn=0, valueType=1, value=SimpleNamespace(uiVal=value)) for value in megabytes]

    def processes(handle):
        return [
            SimpleNamespace(pid=app["pid"], usedGpuMemory=int(app["used_memory"]) * 2**20 + 4096)
            for app in apps
            if app["gpu_uuid"] == gpus[handle]["fields"]["uuid"]
        ]

    def rows(handle):
        pending, failure = (switch(f"remapped_rows.{what}")(handle) for what in ("pending", "failure"))
        return 5, number("remapped_rows.uncorrectable")(handle), pending, failure

    names = {
        "NVMLError": NVMLError,
        "NVML_AGGREGATE_ECC": 1,
        "NVML_ERROR_INVALID_ARGUMENT": 2,
        "NVML_ERROR_NOT_SUPPORTED": 3,
        "NVML_FI_DEV_NVLINK_GET_SPEED": 164,
        "NVML_MEMORY_ERROR_TYPE_CORRECTED": 0,
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
        "NVML_NVLINK_MAX_LINKS": 36,
        "NVML_VOLATILE_ECC": 0,
        "c_nvmlGpuFabricInfo_v2_t": FabricInfo2,
        "c_nvmlGpuFabricInfo_v3_t": FabricInfo3,
        "nvmlDeviceGetComputeRunningProcesses": processes,
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetCudaComputeCapability": lambda h: tuple(map(int, gpus[h]["fields"]["compute_cap"].split("."))),
        "nvmlDeviceGetCurrPcieLinkGeneration": number("pcie.link.gen.current"),
        "nvmlDeviceGetCurrPcieLinkWidth": number("pcie.link.width.current"),
        "nvmlDeviceGetEccMode": lambda h: [switch("ecc.mode.current")(h), 1],
        "nvmlDeviceGetFieldValues": values,
        "nvmlDeviceGetGpuFabricInfoV": fabric,
        "nvmlDeviceGetGpuMaxPcieLinkGeneration": number("pcie.link.gen.gpumax"),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMaxPcieLinkWidth": number("pcie.link.width.max"),
        "nvmlDeviceGetMemoryInfo": lambda h: SimpleNamespace(total=number("memory.total")(h) * 2**20 + 12345),
        "nvmlDeviceGetMigMode": lambda h: [switch(f"mig.mode.{when}")(h) for when in ("current", "pending")],
        "nvmlDeviceGetName": lambda h: gpus[h]["fields"]["name"],
        "nvmlDeviceGetNvLinkState": link_state,
        "nvmlDeviceGetPciInfo": lambda h: SimpleNamespace(busId=gpus[h]["fields"]["pci.bus_id"].encode()),
        "nvmlDeviceGetPersistenceMode": switch("persistence_mode"),
        "nvmlDeviceGetRemappedRows": rows,
        "nvmlDeviceGetRetiredPagesPendingStatus": switch("retired_pages.pending"),
        "nvmlDeviceGetTotalEccErrors": ecc,
        "nvmlDeviceGetUUID": lambda h: gpus[h]["fields"]["uuid"],
        "nvmlErrorString": lambda status: "Success" if status == 0 else "Unknown Error",
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetCudaDriverVersion": lambda: 13000,
        "nvmlSystemGetDriverVersion": lambda: gpus[0]["fields"]["driver_version"],
        "nvmlSystemGetProcessName": lambda pid: next(app["process_name"] for app in apps if app["pid"] == pid),
    }
    assert sorted(names) == sorted(gpu_nvml.USED)
    return SimpleNamespace(**{**names, **other})


def both(name, **changes):
    recorded = hosts.recording(name, **changes)
    return hosts.replay(recorded, nvml=fake_nvml(recorded)), hosts.replay(recorded)


def fails(value):
    def function(*_):
        raise NVMLError(value)

    return function


def test_the_table_has_every_name_of_pynvml_that_the_reader_uses():
    source = inspect.getsource(gpu_nvml)
    used = re.findall(r'(?:nvml\.|", ?"|["(])((?:c_)?(?:nvml[A-Z]|NVML_|NVMLError)\w*)', source)
    assert set(used) - {"NVML_GPU_FABRIC_HEALTH_SUMMARY_"} == set(gpu_nvml.USED)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("h200x2", {}),
        ("h100x8", {}),
        ("h100x8", {"links": {2: {3: None}, 4: None, 5: dict.fromkeys(range(18))}}),
        ("h200x2", {"gpus": {1: {"mig.mode.current": "Enabled", "persistence_mode": "Disabled"}}}),
        ("h200x2", {"gpus": {"*": {"fabric.state": "In Progress", "fabric.status": "Unknown Error"}}}),
        ("h200x2", {"gpus": {"*": {"fabric.state": "[N/A]", "fabric.status": "[N/A]"}}}),
        ("h200x2", {"gpus": {0: {"fabric.health.summary": "Limited Capacity"}}}),
        ("h200x2", {"gpus": {0: {"ecc.mode.current": "[N/A]", "ecc.errors.corrected.volatile.total": "[N/A]"}}}),
        ("h200x2", {"gpus": {0: {"ecc.errors.uncorrected.aggregate.total": "2", "remapped_rows.failure": "Yes"}}}),
        ("h200x2", {"apps": [{"gpu": 1, "pid": 9, "process_name": "python3", "used_memory": "512"}]}),
    ],
)
def test_nvml_and_nvidia_smi_agree(name, changes):
    nvml, smi = both(name, **changes)
    assert (nvml.pop("source"), smi.pop("source")) == ("nvml", "nvidia-smi")
    del nvml["seconds"], smi["seconds"]
    assert nvml == smi


def test_an_nvml_that_does_not_start_leaves_it_to_nvidia_smi():
    recorded = hosts.recording("h200x2")
    facts = hosts.replay(recorded, nvml=fake_nvml(recorded, nvmlInit=fails(18)))
    assert (facts["source"], facts["error"], len(facts["gpus"])) == ("nvidia-smi", None, 2)
    assert told(facts)["nvml"] == "RM has detected an NVML/RM version mismatch."


def test_a_lost_gpu_is_said_by_the_last_that_was_asked():
    recorded = hosts.recording("h200x2", every={"rc": 15, "out": "Unable to determine the device handle\n"})
    facts = hosts.replay(recorded, nvml=fake_nvml(recorded, nvmlDeviceGetHandleByIndex=fails(15)))
    assert facts["error"] == "Unable to determine the device handle"
    recorded = hosts.recording("h200x2", commands={"nvidia-smi": None})
    nvml = fake_nvml(hosts.recording("h200x2"), nvmlDeviceGetHandleByIndex=fails(15))
    facts = hosts.replay(recorded, nvml=nvml)
    assert (facts["source"], facts["error"]) == (None, "GPU is lost")


@pytest.mark.parametrize(("number", "cuda"), [(12090, "12.9"), (13000, "13.0")])
def test_cuda_as_nvml_counts_it(number, cuda):
    recorded = hosts.recording("h200x2")
    nvml = fake_nvml(recorded, nvmlSystemGetCudaDriverVersion=lambda: number)
    assert hosts.replay(recorded, nvml=nvml)["driver"]["cuda"] == cuda


def test_nvml_alone_is_asked_where_it_was_chosen():
    recorded = hosts.recording("h200x2")
    facts = hosts.replay(recorded, nvml=fake_nvml(recorded, nvmlInit=fails(18)), source="nvml")
    assert (facts["source"], facts["gpus"]) == (None, [])
    assert facts["error"] == "RM has detected an NVML/RM version mismatch."
    facts = hosts.facts("h200x2", source="nvml")
    assert "no module pynvml" in facts["error"]
    facts = hosts.replay(recorded, nvml=fake_nvml(recorded), source="nvidia-smi")
    assert facts["source"] == "nvidia-smi"


def test_nvml_without_nvidia_smi_gives_the_gpus_and_tells_what_is_missing():
    recorded = hosts.recording("h200x2")
    nvml = fake_nvml(recorded)
    recorded["nvidia_smi"] = None
    facts = hosts.replay(recorded, nvml=nvml)
    assert (facts["source"], facts["driver"]["cuda"], len(facts["gpus"])) == ("nvml", "13.0", 2)
    missing = {
        "topology.matrix",
        "topology.p2p.read",
        "topology.p2p.write",
        "topology.p2p.nvlink",
        "pcie.link.gen.hostmax",
    }
    assert {what for what, why in told(facts).items() if why == "nvidia-smi: command not found"} == missing


def test_a_question_that_nvml_refuses_costs_only_itself():
    recorded = hosts.recording("h200x2")
    nvml = fake_nvml(recorded, nvmlDeviceGetMigMode=fails(999), nvmlDeviceGetPersistenceMode=fails(3))
    del nvml.nvmlDeviceGetRemappedRows
    facts = hosts.replay(recorded, nvml=nvml)
    assert facts["source"] == "nvml"
    assert facts["gpus"][0]["mig"] == {"current": None, "pending": None}
    assert facts["gpus"][0]["ecc"]["mode"] == "Enabled"
    assert told(facts)["mig.mode.current"] == "NVML Error with code 999"
    assert told(facts)["remapped_rows.uncorrectable"] == "this pynvml has no nvmlDeviceGetRemappedRows"
    assert "persistence_mode" not in told(facts)


def test_an_older_driver_gives_the_fabric_without_its_health():
    recorded = hosts.recording("h200x2", gpus={"*": {"fabric.health.summary": "Healthy"}})
    nvml = fake_nvml(recorded)
    newest = nvml.nvmlDeviceGetGpuFabricInfoV

    def refuses_the_newest(handle, info):
        if isinstance(info._obj, FabricInfo3):
            raise NVMLError(25)
        newest(handle, info)

    nvml.nvmlDeviceGetGpuFabricInfoV = refuses_the_newest
    facts = hosts.replay(recorded, nvml=nvml)
    assert facts["gpus"][0]["fabric"] == {"state": "Completed", "status": "Success", "health": None}
    assert "fabric.state" not in told(facts)
    nvml.nvmlDeviceGetGpuFabricInfoV = fails(999)
    assert told(hosts.replay(recorded, nvml=nvml))["fabric.state"] == "NVML Error with code 999"


def test_an_nvml_that_hangs_is_left_behind(monkeypatch):
    monkeypatch.setattr(gpu_facts, "PATIENCE", 0.2)
    recorded = hosts.recording("h200x2")
    began = time.monotonic()
    facts = hosts.replay(recorded, nvml=fake_nvml(recorded, nvmlInit=lambda: time.sleep(60)))
    assert time.monotonic() - began < 5
    assert (facts["source"], facts["error"]) == (None, "NVML: no answer within 0.2 s")


def test_an_nvml_that_dies_or_prints_does_neither_harm(capfd):
    recorded = hosts.recording("h200x2")
    facts = hosts.replay(recorded, nvml=fake_nvml(recorded, nvmlInit=lambda: os._exit(11)))
    assert facts["source"] == "nvidia-smi"
    assert told(facts)["nvml"] == "NVML: the process that asked it died"
    facts = hosts.replay(recorded, nvml=fake_nvml(recorded, nvmlInit=lambda: os.write(1, b"noise")))
    assert facts["source"] == "nvml"
    assert capfd.readouterr().out == ""


# -- PCI tree, processes, system ------------------------------------------------------------------------------------------


def test_the_bits_of_acs_by_their_names():
    everything = list(gpu_sysfs.ACS_CONTROL)
    acs = {
        "0000:17:00.0": everything,
        "0000:16:00.0": ["SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd"],
        "0000:15:01.0": None,
    }
    bridges = hosts.facts("h100x8", acs=acs)["gpus"][0]["bridges"]
    assert [bridge["acs"] for bridge in bridges] == [everything, acs["0000:16:00.0"], None]


def config(tmp_path, raw):
    folder = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "config").write_bytes(raw)
    unread = []
    return gpu_sysfs.acs(gpu_sysfs.Host(str(tmp_path)), "0000:01:00.0", unread), unread


def test_the_configuration_space_as_others_than_root_see_it_is_told(tmp_path):
    acs, unread = config(tmp_path, bytes(64))
    assert acs is None
    assert unread == [
        {
            "what": "bridges.acs",
            "why": "64 bytes of the configuration space of 0000:01:00.0 are readable; root reads all",
        }
    ]


@pytest.mark.parametrize(
    "raw",
    [
        bytes(256),
        bytes(4096),
        b"\xff" * 4096,
        bytes(0x100) + (0x100 << 20 | 1 << 16 | 0x0001).to_bytes(4, "little") + bytes(4096 - 0x104),
        bytes(0x100) + (0xFFC << 20 | 1 << 16 | 0x0001).to_bytes(4, "little") + bytes(4096 - 0x104),
    ],
    ids=["conventional", "no capabilities", "gone", "a circle", "to the end"],
)
def test_a_bridge_without_that_capability_has_no_acs_to_tell(tmp_path, raw):
    assert config(tmp_path, raw) == (None, [])


def test_acs_as_it_lies_in_the_configuration_space(tmp_path):
    raw = bytearray(4096)
    raw[0x100:0x104] = bytes.fromhex("01000214")  # AER, version 2, next at 140h
    raw[0x140:0x148] = bytes.fromhex("0d00010000001d00")  # ACS, version 1, last; capability 0, control 001Dh
    assert config(tmp_path, bytes(raw)) == (["SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd"], [])


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:1B:00.0", "0000:1b:00.0"),
        ("0000:65:00", "0000:65:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("00000009:01:00.0", "0009:01:00.0"),
        ("65:00.0", None),
        ("[N/A]", None),
    ],
)
def test_addresses_are_written_as_sysfs_writes_them(text, address):
    assert gpu_sysfs.pci_address(text) == address


@pytest.mark.parametrize("kind", ["0x030000", "0x030200", "0x038000", "0x120000"])
def test_every_class_of_gpu_is_seen(kind):
    facts = hosts.facts("h200x2", files={f"{GPU}/class": f"{kind}\n", f"{GPU}/vendor": "0x1002\n"})
    assert [(gpu["vendor_id"], gpu["device_id"]) for gpu in facts["pci_gpus"]] == [("1002", "2335"), ("10de", "2335")]
    assert facts["vendor"] == "nvidia"


def test_a_display_controller_of_another_vendor_is_no_gpu():
    files = {f"{GPU}/vendor": "0x1a03\n", "sys/devices/pci0000:00/0000:00:07.0/class": "0x020000\n"}
    assert hosts.facts("h200x2", files=files)["vendor"] == "none"


@pytest.mark.parametrize(
    ("kinds", "passthrough"),
    [(["identity"] * 8, True), (["DMA-FQ"] + ["identity"] * 7, False), ([None] * 8, None)],
)
def test_the_iommu_passes_through_when_it_does_for_every_gpu(kinds, passthrough):
    files = {f"sys/kernel/iommu_groups/{n}/type": kind and f"{kind}\n" for n, kind in enumerate(kinds)}
    files["sys/kernel/iommu_groups/9/type"] = "DMA\n"  # of a device that is no GPU
    assert hosts.facts("h100x8", files=files)["iommu"]["passthrough"] is passthrough


def test_without_groups_of_gpus_all_groups_count():
    files = {f"sys/kernel/iommu_groups/{n}/type": kind for n, kind in ((0, "DMA\n"), (1, "identity\n"))}
    assert hosts.facts("h200x2", files=files)["iommu"] == {"groups": 2, "passthrough": False}


@pytest.mark.parametrize(
    ("text", "loaded", "flavour"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n",
            "535.104.05",
            "proprietary",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.65.06  Release Build  (x)\n",
            "580.65.06",
            "open",
        ),
        ("something else\n", "580.159.04", None),
        (None, "580.159.04", None),
    ],
    ids=["proprietary", "open", "garbage", "none"],
)
def test_the_loaded_driver_and_its_flavour(text, loaded, flavour):
    facts = hosts.facts("h200x2", files={"proc/driver/nvidia/version": text})
    assert (facts["driver"]["loaded"], facts["driver"]["flavour"]) == (loaded, flavour)


def test_a_driver_on_disk_that_is_not_there_is_an_answer():
    absent = {"modinfo -F version nvidia": {"rc": 1, "err": "modinfo: ERROR: Module nvidia not found.\n"}}
    facts = hosts.facts("h100x8", commands=absent)
    assert (facts["driver"]["installed"], facts["unread"]) == (None, [])
    facts = hosts.facts("h100x8", commands={"modinfo -F version nvidia": HANGS})
    assert "no answer within 20 s" in told(facts)["driver.installed"]


UNIT = "systemctl show nvidia-fabricmanager.service -p LoadState,ActiveState"
PROGRAM = "nv-fabricmanager --version"
NOT_BOOTED = {"rc": 1, "err": "System has not been booted with systemd as init system (PID 1). Can't operate.\n"}


@pytest.mark.parametrize(
    ("commands", "manager", "unread"),
    [
        ({UNIT: ["LoadState=loaded", "ActiveState=failed"]}, {"installed": "580.159.04", "state": "failed"}, {}),
        ({UNIT: ["LoadState=not-found", "ActiveState=inactive"]}, {"installed": "580.159.04", "state": "inactive"}, {}),
        (
            {UNIT: ["LoadState=not-found", "ActiveState=inactive"], PROGRAM: None},
            {"installed": None, "state": "absent"},
            {},
        ),
        ({UNIT: None, PROGRAM: None}, {"installed": None, "state": "absent"}, {}),
        (
            {UNIT: NOT_BOOTED},
            {"installed": "580.159.04", "state": None},
            {"fabric_manager.state": NOT_BOOTED["err"].strip()},
        ),
        (
            {PROGRAM: {"rc": 127, "err": "error while loading shared libraries\n"}},
            {"installed": None, "state": "active"},
            {"fabric_manager.installed": "error while loading shared libraries"},
        ),
    ],
)
def test_the_fabric_manager(commands, manager, unread):
    facts = hosts.facts("h100x8", commands=commands)
    assert facts["fabric_manager"] == manager
    assert told(facts) == unread


def test_nvswitches_are_counted_on_the_bus_when_their_driver_is_not_loaded():
    recorded = hosts.recording("h100x8")
    recorded["files"] = {path: file for path, file in recorded["files"].items() if "nvidia-nvswitch" not in path}
    assert hosts.replay(recorded)["nvswitch"] == {"devices": 4}
    files = {f"proc/driver/nvidia-nvswitch/devices/{n}": {"folder": True} for n in range(6)}
    assert hosts.facts("h200x2", files=files)["nvswitch"] == {"devices": 6}


XID = "NVRM: Xid (PCI:0000:2a:00): 79, pid=1234, GPU has fallen off the bus."


def test_xid_lines_from_the_journal():
    facts = hosts.facts("h100x8", xid=["NVRM: Xid (PCI:0000:2A:00 GPU-I:05): 13, pid=7, Graphics Exception", XID])
    assert [(event["address"], event["code"]) for event in facts["xid"]] == [("0000:2a:00.0", 13), ("0000:2a:00.0", 79)]
    assert facts["xid"][1]["line"] == XID


def test_xid_lines_from_the_kernel_where_the_journal_has_none():
    for journal in (None, {"rc": 1, "err": "No such boot ID in journal\n"}):
        commands = {hosts.JOURNAL: journal, "dmesg": ["[    1.0] x", f"[  222.123456] {XID}"]}
        facts = hosts.facts("h100x8", commands=commands)
        assert facts["xid"] == [{"address": "0000:2a:00.0", "code": 79, "line": XID}]
        assert facts["unread"] == []


def test_a_kernel_log_that_nobody_may_read_is_told():
    refused = {"rc": 1, "err": "dmesg: read kernel buffer failed: Operation not permitted\n"}
    facts = hosts.facts("h100x8", commands={hosts.JOURNAL: None, "dmesg": refused})
    assert told(facts)["xid"] == f"journalctl: command not found; {refused['err'].strip()}"
    assert "xid" not in told(hosts.facts("h100x8", commands={"dmesg": refused}))


def test_only_the_last_hundred_xid_lines_are_kept():
    facts = hosts.facts("h100x8", xid=[f"NVRM: Xid (PCI:0000:2a:00): {code}, x" for code in range(1, 151)])
    assert [event["code"] for event in facts["xid"]] == list(range(51, 151))


def test_headers_that_a_link_points_to_in_vain_are_not_there():
    build = "lib/modules/6.1.0-18-amd64/build"
    lost = {build: {"link": "/usr/src/linux-headers-6.1.0-18-amd64"}}
    assert hosts.facts("h100x8", files=lost)["kernel"]["headers"] is False
    found = {**lost, "usr/src/linux-headers-6.1.0-18-amd64": {"folder": True}}
    assert hosts.facts("h100x8", files=found)["kernel"]["headers"] is True


def test_nouveau_and_secure_boot():
    files = {"proc/modules": "nouveau_like 1 0 - Live 0x0\n", gpu_facts.SECURE_BOOT: {"base64": "BgAAAAE="}}
    facts = hosts.facts("h100x8", files=files)
    assert (facts["nouveau"], facts["secure_boot"]) == (False, True)
    facts = hosts.facts("h100x8", files={"proc/modules": "video 1 1 nouveau, Live 0x0\nnouveau 2 0 - Live 0x0\n"})
    assert facts["nouveau"] is True
    assert hosts.facts("h200x2")["secure_boot"] is None


# -- AMD ------------------------------------------------------------------------------------------------------------------

AMD_GPU = "sys/devices/pci0000:00/0000:00:01.0/0000:05:00.0"
AMD_FILES = {
    "sys/bus/pci/devices/0000:05:00.0": {"link": "../../../devices/pci0000:00/0000:00:01.0/0000:05:00.0"},
    "sys/bus/pci/devices/0000:00:01.0": {"link": "../../../devices/pci0000:00/0000:00:01.0"},
    f"{AMD_GPU}/vendor": "0x1002\n",
    f"{AMD_GPU}/device": "0x74a1\n",
    f"{AMD_GPU}/class": "0x120000\n",
    f"{AMD_GPU}/numa_node": "0\n",
    f"{AMD_GPU}/driver": {"link": "../../../../bus/pci/drivers/amdgpu"},
    "sys/devices/pci0000:00/0000:00:01.0/config": {"config": ["SrcValid"]},
    "sys/module/amdgpu/version": "6.10.5\n",
}
LISTED = [{"gpu": 0, "bdf": "0000:05:00.0", "uuid": "b8ff74a1-0000-1000-80ea-1c0b1b1b1b1b", "kfd_id": 1, "node_id": 2}]
STATIC = [
    {
        "gpu": 0,
        "asic": {"market_name": "AMD Instinct MI300X", "vendor_id": "0x1002"},
        "vram": {"type": "HBM", "vendor": "N/A", "size": {"value": 196592, "unit": "MB"}},
    }
]
ROCM = {
    "card0": {
        "Card Series": "AMD Instinct MI300X",
        "Unique ID": "0x1c0b1b1b1b1b1b1b",
        "PCI Bus": "0000:05:00.0",
        "VRAM Total Memory (B)": "206141652992",
        "VRAM Total Used Memory (B)": "297807872",
    },
    "system": {"Driver version": "6.10.5"},
}
AMD_LIST, AMD_STATIC, AMD_TOPO = "amd-smi list --json", "amd-smi static --asic --vram --json", "amd-smi topology"
ROCM_CALL = "rocm-smi --showproductname --showuniqueid --showbus --showmeminfo vram --json"
ROCM_TOPO = "rocm-smi --showtopo"


def amd(commands):
    system = {
        "uname -m": "x86_64\n",
        "getconf GNU_LIBC_VERSION": "glibc 2.39\n",
        "/usr/bin/python3 --version": "Python 3.12.3\n",
    }
    commands = {**system, "modinfo -F version amdgpu": "6.10.5\n", **commands}
    return hosts.replay({"nvidia_smi": None, "commands": commands, "files": AMD_FILES})


@pytest.mark.parametrize("static", [STATIC, {"gpu_data": STATIC}], ids=["a list", "under gpu_data"])
def test_amd_smi(static):
    facts = amd({AMD_LIST: json.dumps(LISTED, indent=4), AMD_STATIC: json.dumps(static), AMD_TOPO: "ACCESS TABLE:\n"})
    assert (facts["vendor"], facts["source"], facts["error"], facts["unread"]) == ("amd", "amd-smi", None, [])
    (gpu,) = facts["gpus"]
    assert (gpu["name"], gpu["uuid"], gpu["memory_mib"]) == ("AMD Instinct MI300X", LISTED[0]["uuid"], 196592)
    assert (gpu["pci_address"], gpu["driver"], gpu["numa_node"]) == ("0000:05:00.0", "amdgpu", 0)
    assert gpu["bridges"] == [{"address": "0000:00:01.0", "acs": ["SrcValid"]}]
    assert (gpu["compute_capability"], gpu["persistence"], gpu["nvlinks"]) == (None, None, [])
    assert facts["topology"]["matrix"] == "ACCESS TABLE:\n"
    assert facts["driver"] == {"loaded": "6.10.5", "installed": "6.10.5", "flavour": None, "cuda": None}


@pytest.mark.parametrize("series", ["Card Series", "Card series"])
def test_rocm_smi_where_amd_smi_is_not(series):
    card = {series if key == "Card Series" else key: value for key, value in ROCM["card0"].items()}
    printed = "WARNING: AMD GPU device(s) is/are in a low-power state.\n\n" + json.dumps({**ROCM, "card0": card})
    facts = amd({ROCM_CALL: printed, ROCM_TOPO: "=== Weight between two GPUs ===\n"})
    assert (facts["source"], facts["error"], facts["unread"]) == ("rocm-smi", None, [])
    (gpu,) = facts["gpus"]
    assert (gpu["name"], gpu["uuid"], gpu["memory_mib"]) == ("AMD Instinct MI300X", "0x1c0b1b1b1b1b1b1b", 196592)
    assert gpu["pci_address"] == "0000:05:00.0"
    assert facts["topology"]["matrix"].startswith("=== Weight")


def test_rocm_smi_where_amd_smi_fails():
    commands = {AMD_LIST: {"rc": 200, "out": "Command 'list' is not supported\n"}, AMD_STATIC: "[]", AMD_TOPO: ""}
    facts = amd({**commands, ROCM_CALL: json.dumps(ROCM)})
    assert (facts["source"], facts["error"], len(facts["gpus"])) == ("rocm-smi", None, 1)
    assert told(facts)["amd-smi"] == "Command 'list' is not supported"
    assert told(facts)["topology.matrix"] == "rocm-smi: command not found"


def test_amd_without_tools_or_with_broken_ones():
    facts = amd({})
    assert (facts["vendor"], facts["source"], facts["error"], facts["gpus"]) == ("amd", None, None, [])
    assert told(facts)["gpus"] == "amd-smi: command not found; rocm-smi: command not found"
    assert facts["pci_gpus"][0]["driver"] == "amdgpu"
    facts = amd({AMD_LIST: "garbage", AMD_STATIC: "garbage", AMD_TOPO: "", ROCM_CALL: {"rc": 2, "err": "no driver\n"}})
    assert (facts["source"], facts["gpus"]) == (None, [])
    assert facts["error"] == "amd-smi: not understood: 'garbage'; no driver"


@pytest.mark.parametrize("text", ["", "[", "null", "7", '"gpu"', "[1]", "{}", '{"gpu_data": 3}', '[{"gpu": "zero"}]'])
def test_json_of_another_shape_is_not_understood(text):
    assert gpu_amd.amd_smi(text, text) is None
    assert gpu_amd.amd_smi(text, json.dumps(STATIC)) is None
    assert gpu_amd.rocm_smi(text) is None


def test_what_amds_tools_leave_out_stays_null():
    (gpu,) = gpu_amd.amd_smi(
        json.dumps([{"gpu": 3, "bdf": "N/A", "uuid": "N/A"}]), '[{"gpu": 3, "vram": {"size": "N/A"}}]'
    )
    assert gpu == {"index": 3, "name": None, "uuid": None, "pci_address": None, "memory_mib": None}
    other_unit = '[{"gpu": 3, "vram": {"size": {"value": 192, "unit": "GB"}}}]'
    assert gpu_amd.amd_smi('[{"gpu": 3}]', other_unit) == [gpu]
    assert gpu_amd.rocm_smi('{"card2": {}}') == [{**gpu, "index": 2}]


# -- real processes -------------------------------------------------------------------------------------------------------


def test_a_command_gives_status_and_both_outputs_in_the_languages_of_programs():
    script = "printf '%s' \"$LC_ALL\"; printf '\\377' >&2; cat; exit 3"
    assert gpu_facts.command(["sh", "-c", script], 5) == (3, "C", "\\xff")


def test_a_command_that_is_not_there():
    with pytest.raises(FileNotFoundError):
        gpu_facts.command(["no-such-command-here"], 5)


def test_a_command_that_hangs_is_ended_with_its_children():
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        gpu_facts.command(["sh", "-c", "sleep 60 & sleep 60"], 0.2)
    assert time.monotonic() - began < 5


def test_tools_are_found_beside_a_poor_path(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert gpu_facts.command(["uname", "-s"], 5) == (0, "Linux\n", "")


@pytest.mark.parametrize("variable", [True, False], ids=["named by the variable", "beside the stand-in"])
def test_the_stand_in_as_a_program_gives_the_same_facts(tmp_path, monkeypatch, variable):
    recorded = hosts.recording("h100x8", unknown=("fabric.status",), links={1: {0: None}})
    tool, root = tmp_path / "bin", tmp_path / "root"
    tool.mkdir()
    root.mkdir()
    hosts.lay_out(recorded, root)
    hosts.install(recorded, tool)
    if variable:
        (tool / "replay.json").rename(tmp_path / "other.json")
        monkeypatch.setenv("GPU_FLEET_REPLAY", str(tmp_path / "other.json"))
    monkeypatch.setenv("PATH", f"{tool}:/usr/bin:/bin")
    answer = hosts.runner(recorded)

    def run(argv, timeout):
        return (gpu_facts.command if argv[0] == "nvidia-smi" else answer)(argv, timeout)

    facts, expected = gpu_facts.gather(run, root=str(root)), hosts.replay(recorded)
    del facts["seconds"], expected["seconds"]
    assert facts == expected


def stand_in(tmp_path, *arguments, **changes):
    program = hosts.install(hosts.recording("h200x2", **changes), tmp_path)
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_the_stand_in_says_that_it_is_a_replay(tmp_path):
    for argument in ("-h", "--help", "--version"):
        status, out, _ = stand_in(tmp_path, argument)
        assert status == 0
        assert out.startswith("nvidia-smi: replay of a recording: two H200")


def test_the_stand_in_lists_and_refuses_as_the_recorded_one(tmp_path):
    assert stand_in(tmp_path, "-L")[1].splitlines() == [
        "GPU 0: NVIDIA H200 (UUID: GPU-00000000-0000-4000-8000-000000000000)",
        "GPU 1: NVIDIA H200 (UUID: GPU-00000001-0000-4000-8000-000000000000)",
    ]
    query = stand_in(tmp_path, "--query-gpu=index,foo.bar", "--format=csv,noheader,nounits")
    assert query == (2, 'Field "foo.bar" is not a valid field to query.\n\n', "")
    assert stand_in(tmp_path, "--query-gpu=index,compute_cap", "--format=csv,noheader,nounits")[1] == "0, 9.0\n1, 9.0\n"
    assert stand_in(tmp_path, "topo", "-m", every=MISMATCH) == (18, MISMATCH["out"], "")


def test_the_stand_in_makes_nothing_up(tmp_path):
    for arguments in (("topo", "-p2p", "a"), ("--query-gpu=temperature.gpu", "--format=csv,noheader,nounits"), ()):
        status, out, err = stand_in(tmp_path, *arguments)
        assert (status, out) == (hosts.stand_in.UNRECORDED, "")
        assert "replay of a recording" in err


# -- recordings -----------------------------------------------------------------------------------------------------------


def test_the_composed_host_is_what_its_script_writes():
    pair, composed = (json.loads((hosts.FIXTURES / f"{name}.json").read_text()) for name in ("h200x2", "h100x8"))
    assert compose.compose(pair) == composed


def test_a_recording_from_saved_answers(tmp_path):
    uuids = ["GPU-12345678-1234-1234-1234-1234567890ab", "GPU-abcdefab-1234-1234-1234-1234567890ab"]
    saved = {
        "query-gpu.csv": "index, name, uuid, memory.total [MiB]\n"
        + "".join(f"{n}, NVIDIA X, {uuid}, 100 MiB\n" for n, uuid in enumerate(uuids)),
        "each.txt": "compute_cap: 9.0;8.0;\n",
        "nvlink-s.txt": f"GPU 0: NVIDIA X (UUID: {uuids[0]})\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n"
        f"GPU 1: NVIDIA X (UUID: {uuids[1]})\n",
        "help-query-gpu.txt": '"name" or "gpu_name"\nText with "quotes" in it.\n\n"uuid"\n',
        "topo-m.txt": "\tGPU0\nGPU0\t X \n",
        "sysfs.txt": "/sys/bus/pci/devices/0000:00:06.0 /sys/devices/pci0000:00/0000:00:06.0 class=0x030200 dev=0x2335"
        " numa=-1 drv=../../../bus/pci/drivers/nvidia cfg=4096\n",
    }
    for name, text in saved.items():
        (tmp_path / name).write_text(text)
    made = record.record([tmp_path], "a test")
    assert made["nvidia_smi"]["fields"] == ["name", "gpu_name", "uuid"]
    assert made["nvidia_smi"]["gpus"] == [
        {
            "fields": {
                "index": "0",
                "name": "NVIDIA X",
                "uuid": "GPU-00000000-0000-4000-8000-000000000000",
                "memory.total": "100",
                "compute_cap": "9.0",
            },
            "nvlinks": ["26.562 GB/s", None],
        },
        {
            "fields": {
                "index": "1",
                "name": "NVIDIA X",
                "uuid": "GPU-00000001-0000-4000-8000-000000000000",
                "memory.total": "100",
                "compute_cap": "8.0",
            },
            "nvlinks": [],
        },
    ]
    assert made["nvidia_smi"]["calls"] == {"topo -m": ["\tGPU0", "GPU0\t X "]}
    assert made["files"]["sys/bus/pci/devices/0000:00:06.0"] == {"link": "../../../devices/pci0000:00/0000:00:06.0"}
    assert made["files"]["sys/devices/pci0000:00/0000:00:06.0/driver"] == {"link": "../../../bus/pci/drivers/nvidia"}
    assert uuids[0] not in json.dumps(made)


def test_a_gpu_that_is_gone_is_gone_everywhere_and_the_rest_counted_anew():
    facts = hosts.facts("h100x8", drop=[3])
    assert [gpu["index"] for gpu in facts["gpus"]] == list(range(7))
    assert len(facts["pci_gpus"]) == 7
    assert "0000:5d:00.0" not in json.dumps(facts)
    head, first = facts["topology"]["matrix"].splitlines()[:2]
    assert head.split("\t")[1:9] == ["\x1b[4mGPU0", *(f"GPU{n}" for n in range(1, 7)), "NIC0"]
    assert first.split("\t")[:9] == ["GPU0", " X ", *["NV18"] * 6, "PIX"]
    assert facts["unread"] == []


def test_cells_are_changed_both_ways_and_a_wrong_name_is_refused():
    facts = hosts.facts("h100x8", cells={(0, 1): "SYS"}, p2p={"read": {(2, 5): "CNS"}})
    rows = [line.split("\t") for line in facts["topology"]["matrix"].splitlines()]
    assert (rows[1][2], rows[2][1], rows[1][3]) == ("SYS", "SYS", "NV18")
    rows = [line.split("\t") for line in facts["topology"]["p2p"]["read"].splitlines()]
    assert (rows[3][6], rows[6][3], rows[3][5]) == ("CNS", "CNS", "OK")
    with pytest.raises(KeyError, match="no field fabrik"):
        hosts.recording("h100x8", gpus={0: {"fabrik": "x"}})
    with pytest.raises(KeyError, match="no bridge 0000:ff"):
        hosts.recording("h100x8", acs={"0000:ff:00.0": []})
