# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What NVML says about the GPUs, through the module pynvml of nvidia-ml-py, in the words of nvidia-smi.

NVML runs inside the calling process and may hang with the GPU, beyond the reach of any signal. So it is asked in a
child process, `Child`, which can be left behind.

Pure but for that: standard library, Python 3.9 and newer, no Ansible import, pynvml comes as an argument.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

# Every name of pynvml that is used here; nvidia-ml-py 13.610.43 has them all.
USED = (
    "NVMLError",
    "NVML_AGGREGATE_ECC",
    "NVML_ERROR_INVALID_ARGUMENT",
    "NVML_ERROR_NOT_SUPPORTED",
    "NVML_FI_DEV_NVLINK_GET_SPEED",
    "NVML_MEMORY_ERROR_TYPE_CORRECTED",
    "NVML_MEMORY_ERROR_TYPE_UNCORRECTED",
    "NVML_NVLINK_MAX_LINKS",
    "NVML_VOLATILE_ECC",
    "c_nvmlGpuFabricInfo_v2_t",
    "c_nvmlGpuFabricInfo_v3_t",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetCurrPcieLinkGeneration",
    "nvmlDeviceGetCurrPcieLinkWidth",
    "nvmlDeviceGetEccMode",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetGpuMaxPcieLinkGeneration",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetName",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetRetiredPagesPendingStatus",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetUUID",
    "nvmlErrorString",
    "nvmlInit",
    "nvmlShutdown",
    "nvmlSystemGetCudaDriverVersion",
    "nvmlSystemGetDriverVersion",
    "nvmlSystemGetProcessName",
)

# nvml.h: nvmlGpuFabricState_t and NVML_GPU_FABRIC_HEALTH_SUMMARY_*, 0 is not supported; the words are nvidia-smi's.
FABRIC_STATES = {1: "Not Started", 2: "In Progress", 3: "Completed"}
FABRIC_HEALTH = {1: "Healthy", 2: "Unhealthy", 3: "Limited Capacity"}
SWITCHED = {0: "Disabled", 1: "Enabled"}  # nvmlEnableState_t
MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal"}  # nvmlValueType_t to the union's member

Told = Dict[str, Any]


def read(nvml: Any) -> Told:
    """cuda, driver, gpus and unread. Raises NVMLError when it does not start or does not say which GPUs there are.

    Each GPU: index, name, uuid, bus_id, memory_mib, nvlinks, processes, and `fields`, keyed by the fields of nvidia-smi.
    """
    nvml.nvmlInit()
    try:
        reader = _Reader(nvml)
        version = reader.ask("driver.cuda", "nvmlSystemGetCudaDriverVersion")  # 13000 is 13.0
        return {
            "cuda": f"{version // 1000}.{version % 1000 // 10}" if version else None,
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "gpus": [reader.gpu(index) for index in range(nvml.nvmlDeviceGetCount())],
            "unread": reader.unread,
        }
    finally:
        nvml.nvmlShutdown()


def links(speeds: Mapping[int, Optional[float]]) -> List[Optional[float]]:
    """GB/s of each link by number, None for an inactive one; [] when none is active, as nvidia-smi lists none then."""
    if not any(speed is not None for speed in speeds.values()):
        return []
    return [speeds.get(number) for number in range(max(speeds) + 1)]


def process(pid: int, name: Optional[str], memory_mib: Optional[int]) -> Told:
    """A process on a GPU; its unit is for the one who can read /proc."""
    return {"pid": pid, "name": name, "memory_mib": memory_mib, "unit": None}


class _Reader:
    """Questions to NVML of which each may fail alone."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.unread: List[Told] = []

    def ask(self, what: str, function: str, *arguments: Any) -> Any:
        """The function's answer; None when the GPU has no such thing, and also, then told, when it fails."""
        try:
            return getattr(self.nvml, function)(*arguments)
        except AttributeError:
            why = f"this pynvml has no {function}"
        except Exception as error:  # pynvml's NVMLLibraryMismatchError is no NVMLError, and older ones lack it
            if getattr(error, "value", None) == self.nvml.NVML_ERROR_NOT_SUPPORTED:
                return None
            why = str(error)
        entry = {"what": what, "why": why}
        if entry not in self.unread:
            self.unread.append(entry)
        return None

    def gpu(self, index: int) -> Told:
        nvml = self.nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = self.ask("memory.total", "nvmlDeviceGetMemoryInfo", handle)
        return {
            "index": index,
            "name": nvml.nvmlDeviceGetName(handle),
            "uuid": nvml.nvmlDeviceGetUUID(handle),
            "bus_id": _text(nvml.nvmlDeviceGetPciInfo(handle).busId),
            "memory_mib": memory.total // 2**20 if memory is not None else None,
            "fields": self.fields(handle),
            "nvlinks": self.nvlinks(handle),
            "processes": self.processes(handle),
        }

    def fields(self, handle: Any) -> Told:
        nvml, ask = self.nvml, self.ask
        capability = ask("compute_cap", "nvmlDeviceGetCudaComputeCapability", handle)
        mig: Tuple[Any, Any] = ask("mig.mode.current", "nvmlDeviceGetMigMode", handle) or (None, None)
        ecc: Tuple[Any, Any] = ask("ecc.mode.current", "nvmlDeviceGetEccMode", handle) or (None, None)
        rows = ask("remapped_rows.uncorrectable", "nvmlDeviceGetRemappedRows", handle) or (None,) * 4

        def errors(field: str, kind: int, counter: int) -> Optional[int]:
            return ask(field, "nvmlDeviceGetTotalEccErrors", handle, kind, counter)

        corrected, uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        volatile, aggregate = nvml.NVML_VOLATILE_ECC, nvml.NVML_AGGREGATE_ECC
        found = {
            "compute_cap": ".".join(map(str, capability)) if capability else None,
            "mig.mode.current": SWITCHED.get(mig[0]),
            "mig.mode.pending": SWITCHED.get(mig[1]),
            "ecc.mode.current": SWITCHED.get(ecc[0]),
            "remapped_rows.uncorrectable": rows[1],
            "remapped_rows.pending": _yes(rows[2]),
            "remapped_rows.failure": _yes(rows[3]),
        }
        for field, kind, counter in (
            ("ecc.errors.uncorrected.volatile.total", uncorrected, volatile),
            ("ecc.errors.uncorrected.aggregate.total", uncorrected, aggregate),
            ("ecc.errors.corrected.volatile.total", corrected, volatile),
        ):
            found[field] = errors(field, kind, counter)
        for field, function in (
            ("persistence_mode", "nvmlDeviceGetPersistenceMode"),
            ("retired_pages.pending", "nvmlDeviceGetRetiredPagesPendingStatus"),
        ):
            found[field] = _yes(ask(field, function, handle))
        for field, function in (
            ("pcie.link.gen.current", "nvmlDeviceGetCurrPcieLinkGeneration"),
            ("pcie.link.gen.gpumax", "nvmlDeviceGetGpuMaxPcieLinkGeneration"),
            ("pcie.link.width.current", "nvmlDeviceGetCurrPcieLinkWidth"),
            ("pcie.link.width.max", "nvmlDeviceGetMaxPcieLinkWidth"),
        ):
            found[field] = ask(field, function, handle)
        found.update(self.fabric(handle))
        return found

    def fabric(self, handle: Any) -> Told:
        """An older driver refuses version 3 of the structure; version 2 has no health summary."""
        nvml = self.nvml
        failed: List[str] = []
        for kind in ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t"):
            try:
                info = getattr(nvml, kind)()
                nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
            except AttributeError as error:
                failed.append(str(error))
                continue
            except nvml.NVMLError as error:
                failed.append("" if error.value == nvml.NVML_ERROR_NOT_SUPPORTED else str(error))
                continue
            state = FABRIC_STATES.get(info.state)
            return {
                "fabric.state": state,
                "fabric.status": nvml.nvmlErrorString(info.status) if state is not None else None,
                "fabric.health.summary": FABRIC_HEALTH.get(getattr(info, "healthSummary", 0)),
            }
        if failed[-1]:
            self.unread.append({"what": "fabric.state", "why": failed[-1]})
        return {}

    def nvlinks(self, handle: Any) -> List[Optional[float]]:
        """Links are numbered from 0; NVML answers Invalid Argument for the first number that the GPU lacks."""
        nvml = self.nvml
        speeds: Dict[int, Optional[float]] = {}
        for number in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                speeds[number] = self.speed(handle, number) if nvml.nvmlDeviceGetNvLinkState(handle, number) else None
            except nvml.NVMLError as error:
                if error.value not in (nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.NVML_ERROR_NOT_SUPPORTED):
                    self.unread.append({"what": "nvlinks", "why": str(error)})
                break
        return links(speeds)

    def speed(self, handle: Any, number: int) -> Optional[float]:
        """GB/s of an active link; NVML says MB/s (NVML_FI_DEV_NVLINK_GET_SPEED, nvml.h)."""
        (value,) = self.nvml.nvmlDeviceGetFieldValues(handle, [(self.nvml.NVML_FI_DEV_NVLINK_GET_SPEED, number)])
        if value.nvmlReturn != 0 or value.valueType not in MEMBERS:
            raise self.nvml.NVMLError(value.nvmlReturn)
        return getattr(value.value, MEMBERS[value.valueType]) / 1000

    def processes(self, handle: Any) -> List[Told]:
        found = self.ask("processes", "nvmlDeviceGetComputeRunningProcesses", handle) or []
        return [
            process(
                item.pid,
                self.ask("processes", "nvmlSystemGetProcessName", item.pid),
                item.usedGpuMemory // 2**20 if item.usedGpuMemory is not None else None,
            )
            for item in found
        ]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _yes(value: Optional[int]) -> Optional[bool]:
    return None if value is None else bool(value)


class Child:
    """A function at work in a child process, its answer as JSON. To be made before any thread is started.

    hung    whether it was given up; it is then left to itself, and holds nothing of the parent's
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.hung = False
        self.reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _serve(function, writer)
        os.close(writer)

    def answer(self, patience: float) -> Tuple[Any, Optional[str]]:
        """What the function returned and None; or None and why, after `patience` seconds at most."""
        end = time.monotonic() + patience
        parts: List[bytes] = []
        while not parts or parts[-1]:
            ready = select.select([self.reader], [], [], max(0.0, end - time.monotonic()))[0]
            if not ready:
                self.hung = True
                os.kill(self.pid, signal.SIGKILL)
                break
            parts.append(os.read(self.reader, 65536))
        os.close(self.reader)
        self._reap()
        if self.hung:
            return None, f"NVML: no answer within {patience:g} s"
        try:
            told, why = json.loads(b"".join(parts))
        except ValueError:
            return None, "NVML: the process that asked it died"
        return told, why

    def _reap(self) -> None:
        """Wait, but not for one that cannot end: it sleeps in the driver until the host restarts."""
        for _ in range(50):
            try:
                if os.waitpid(self.pid, os.WNOHANG)[0]:
                    return
            except ChildProcessError:
                return
            time.sleep(0.02)


def _serve(function: Callable[[], Any], writer: int) -> None:
    """In the child: no word of ours may reach the module's own output, and no exception the caller's frames."""
    status = 1
    try:
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        try:
            answer = [function(), None]
        except Exception as error:
            answer = [None, str(error) or type(error).__name__]
        with os.fdopen(writer, "w", encoding="utf-8") as pipe:
            json.dump(answer, pipe)
        status = 0
    finally:
        os._exit(status)
