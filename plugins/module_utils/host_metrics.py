# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What only the host itself can tell a monitor: its driver, its GPUs' errors, its topology, the end of its certificates, whether its
models are whole, and room where the node exporter does not look.

Written for the node exporter's textfile collector (Debian's reads /var/lib/prometheus/node-exporter/*.prom), by a timer. Where
the DCGM exporter runs it tells more of the same GPUs; this needs nvidia-smi alone. Standard library only, Python 3.9.

    python3 -I -B FOLDER CONFIG.json     config: certificates (paths), models (the store), folder (what is kept), into (the .prom file)
"""

from __future__ import annotations

import base64
import calendar
import json
import os
import re
import subprocess
import sys
import time
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import gpu_facts, model_presence

HELP = {
    "gpu_fleet_host_metrics_time_seconds": "When this was written, seconds since 1970.",
    "gpu_fleet_driver_info": "Version of the NVIDIA driver, loaded and installed on disk.",
    "gpu_fleet_driver_matches": "Whether the loaded driver is the one on disk.",
    "gpu_fleet_xid_events": "Xid messages of a GPU in the kernel's log since the host came up, the last 100 at most.",
    "gpu_fleet_gpu_info": "A GPU.",
    "gpu_fleet_gpu_memory_bytes": "Memory of a GPU.",
    "gpu_fleet_gpu_memory_used_bytes": "Memory of a GPU in use.",
    "gpu_fleet_gpu_utilization_ratio": "Share of time in which a kernel ran.",
    "gpu_fleet_gpu_temperature_celsius": "Temperature of a GPU.",
    "gpu_fleet_gpu_power_watts": "Power that a GPU draws.",
    "gpu_fleet_gpu_ecc_uncorrected": "Memory errors that could not be corrected since the driver was loaded.",
    "gpu_fleet_gpu_row_remap_pending": "Whether a bad row of memory waits for a reset to be replaced.",
    "gpu_fleet_gpu_row_remap_failed": "Whether a bad row of memory could not be replaced.",
    "gpu_fleet_gpu_throttled": "Whether the GPU runs slower now, by reason.",
    "gpu_fleet_gpu_nvlink_errors": "Errors of all links of a GPU since its driver was loaded, by kind.",
    "gpu_fleet_topology_changed": "Whether GPUs or links differ from those of the first look.",
    "gpu_fleet_certificate_expires_seconds": "When a certificate ends, seconds since 1970; of several in a file the first to end.",
    "gpu_fleet_certificate_readable": "Whether a certificate could be read.",
    "gpu_fleet_model_complete": "Whether a model's files are there with their sizes, by the record of their arrival.",
    "gpu_fleet_folder_size_bytes": "Size of the file system under a folder that servers need, where it is one in memory or an overlay.",
    "gpu_fleet_folder_avail_bytes": "What of it is free for others than root.",
}
# Fields of `nvidia-smi --query-gpu` (its --help-query-gpu): metric, labels, factor. Those of clocks had another name before 535.
QUERY: Dict[str, Tuple[str, Dict[str, str], float]] = {
    "memory.used": ("gpu_fleet_gpu_memory_used_bytes", {}, 1 << 20),
    "utilization.gpu": ("gpu_fleet_gpu_utilization_ratio", {}, 0.01),
    "temperature.gpu": ("gpu_fleet_gpu_temperature_celsius", {}, 1),
    "power.draw": ("gpu_fleet_gpu_power_watts", {}, 1),
}
REASONS = {
    "hw_thermal_slowdown": "thermal",
    "sw_thermal_slowdown": "thermal",
    "hw_power_brake_slowdown": "power_brake",
    "sw_power_cap": "power_cap",
}
CLOCKS = ("clocks_event_reasons", "clocks_throttle_reasons")
LINK_ERRORS = re.compile(r"Link \d+: (Replay|Recovery|CRC) Errors: (\d+)")
GPU_LINE = re.compile(r"^GPU (\d+):")
BLOCK = re.compile(r"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)

# Where servers write: weights, caches, releases, scratch, shared memory. On disks the node exporter tells the room; it leaves overlays
# out, and the alert leaves out what is in memory, since most of that is no matter.
FOLDERS = ("/var/lib/vllm", "/var/cache/vllm", "/opt/vllm", "/tmp", "/dev/shm")
OTHERS = ("tmpfs", "ramfs", "overlay")

Sample = Tuple[str, Dict[str, str], float]


# --- certificates -----------------------------------------------------------------------------------------------------


def _piece(raw: bytes, place: int) -> Tuple[int, bytes, int]:
    """Tag, content and end of the DER element at a place (X.690). Raises ValueError for what is none."""
    try:
        tag, size, place = raw[place], raw[place + 1], place + 2
        if size & 0x80:
            count = size & 0x7F
            size, place = int.from_bytes(raw[place : place + count], "big"), place + count
    except IndexError as error:
        raise ValueError("the certificate is cut off") from error
    if place + size > len(raw):
        raise ValueError("the certificate is cut off")
    return tag, raw[place : place + size], place + size


def not_after(der: bytes) -> float:
    """When a certificate ends: Certificate, TBSCertificate, then version, serialNumber, signature, issuer, validity (RFC 5280)."""
    _, certificate, _ = _piece(der, 0)
    _, tbs, _ = _piece(certificate, 0)
    tag, _, place = _piece(tbs, 0)
    if tag == 0xA0:  # the version, which the first one leaves out
        _, _, place = _piece(tbs, place)
    for _skipped in ("signature", "issuer"):
        _, _, place = _piece(tbs, place)
    _, validity, _ = _piece(tbs, place)
    _, _, place = _piece(validity, 0)
    tag, text, _ = _piece(validity, place)
    word = text.decode("ascii").rstrip("Z")
    if tag == 0x17:  # UTCTime: years of two digits, from 50 on those of the last century
        word = ("19" if int(word[:2]) >= 50 else "20") + word
    return float(calendar.timegm(time.strptime(word, "%Y%m%d%H%M%S")))


def expires(pem: str) -> float:
    """The first end among the certificates of a PEM file. Raises ValueError where there is none."""
    found = [not_after(base64.b64decode(block)) for block in BLOCK.findall(pem)]
    if not found:
        raise ValueError("no certificate in it")
    return min(found)


def certificate_samples(paths: Iterable[str]) -> List[Sample]:
    samples: List[Sample] = []
    for path in paths:
        try:
            with open(path, encoding="utf-8", errors="replace") as text:
                samples.append(("gpu_fleet_certificate_expires_seconds", {"path": path}, expires(text.read())))
        except (OSError, ValueError):
            samples.append(("gpu_fleet_certificate_readable", {"path": path}, 0))
            continue
        samples.append(("gpu_fleet_certificate_readable", {"path": path}, 1))
    return samples


# --- models and room ------------------------------------------------------------------------------------------------------


def model_samples(store: str) -> List[Sample]:
    return [
        ("gpu_fleet_model_complete", {"model": name}, not faults) for name, faults in model_presence.look(store).items()
    ]


def fstype(mounts: str, folder: str) -> str:
    """Of which type the file system is that a folder is on: the last one mounted on it, or on the nearest folder above (proc(5))."""
    found, length = "", -1
    for line in mounts.splitlines():
        words = line.split(" ")
        point = words[1].replace("\\040", " ") if len(words) > 2 else ""
        if point and (point in ("/", folder) or folder.startswith(f"{point}/")) and len(point) >= length:
            found, length = words[2], len(point)
    return found


def folder_samples(mounts: str, folders: Sequence[str] = FOLDERS) -> List[Sample]:
    samples: List[Sample] = []
    for folder in folders:
        kind = fstype(mounts, folder)
        if kind not in OTHERS:
            continue
        try:
            told = os.statvfs(folder)
        except OSError:
            continue
        if told.f_blocks:
            labels = {"mountpoint": folder, "fstype": kind}
            samples.append(("gpu_fleet_folder_size_bytes", labels, told.f_blocks * told.f_frsize))
            samples.append(("gpu_fleet_folder_avail_bytes", labels, told.f_bavail * told.f_frsize))
    return samples


# --- GPUs -------------------------------------------------------------------------------------------------------------


def gpu_samples(facts: Mapping[str, Any]) -> List[Sample]:
    """What the facts of module gpu_facts say in numbers."""
    samples: List[Sample] = []
    loaded, installed = facts["driver"]["loaded"], facts["driver"]["installed"]
    for kind, version in (("loaded", loaded), ("installed", installed)):
        if version:
            samples.append(("gpu_fleet_driver_info", {"kind": kind, "version": version}, 1))
    if loaded and installed:
        samples.append(("gpu_fleet_driver_matches", {}, loaded == installed))
    counts: Dict[Tuple[str, int], int] = {}
    for event in facts["xid"]:
        key = (event["address"] or "", event["code"])
        counts[key] = counts.get(key, 0) + 1
    for (address, code), count in counts.items():
        samples.append(("gpu_fleet_xid_events", {"pci": address, "xid": str(code)}, count))
    for gpu in facts["gpus"]:
        name = {"gpu": str(gpu["index"])}
        samples.append(
            ("gpu_fleet_gpu_info", {**name, "uuid": gpu["uuid"] or "", "model": gpu["name"] or ""}, 1),
        )
        rows = gpu["remapped_rows"]
        for metric, value in (
            ("gpu_fleet_gpu_memory_bytes", gpu["memory_mib"] and gpu["memory_mib"] * (1 << 20)),
            ("gpu_fleet_gpu_ecc_uncorrected", gpu["ecc"]["uncorrected_volatile"]),
            ("gpu_fleet_gpu_row_remap_pending", rows["pending"]),
            ("gpu_fleet_gpu_row_remap_failed", rows["failure"]),
        ):
            if value is not None:
                samples.append((metric, name, value))
    return samples


def query_samples(fields: Sequence[str], text: str) -> List[Sample]:
    """Rows of `nvidia-smi --query-gpu=index,FIELDS --format=csv,noheader,nounits`. What is not a number is left out."""
    samples: List[Sample] = []
    throttled: Dict[Tuple[str, str], bool] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(fields) + 1:
            continue
        for field, cell in zip(fields, cells[1:]):  # noqa: B905  Python 3.9 has no strict=
            reason = REASONS.get(field.rpartition(".")[2])
            if reason and cell in ("Active", "Not Active"):
                key = (cells[0], reason)
                throttled[key] = throttled.get(key, False) or cell == "Active"
            elif field in QUERY and re.fullmatch(r"[0-9.]+", cell):
                metric, labels, factor = QUERY[field]
                samples.append((metric, {"gpu": cells[0], **labels}, float(cell) * factor))
    return samples + [
        ("gpu_fleet_gpu_throttled", {"gpu": gpu, "reason": reason}, value) for (gpu, reason), value in throttled.items()
    ]


def link_samples(text: str) -> List[Sample]:
    """`nvidia-smi nvlink -e`, summed over the links of a GPU."""
    sums: Dict[Tuple[str, str], int] = {}
    gpu = ""
    for line in text.splitlines():
        begins = GPU_LINE.match(line.strip())
        gpu = begins.group(1) if begins else gpu
        found = LINK_ERRORS.search(line)
        if found and gpu:
            key = (gpu, found.group(1).lower())
            sums[key] = sums.get(key, 0) + int(found.group(2))
    return [("gpu_fleet_gpu_nvlink_errors", {"gpu": gpu, "kind": kind}, count) for (gpu, kind), count in sums.items()]


def topology_text(facts: Mapping[str, Any]) -> str:
    """What a topology is compared by: GPUs in order, and the matrix without colours and blanks at the ends."""
    matrix = re.sub(r"\x1b\[[0-9;]*m", "", facts["topology"]["matrix"] or "")
    lines = [f"{gpu['index']} {gpu['uuid']} {gpu['name']}" for gpu in facts["gpus"]]
    return "\n".join([*lines, *(line.rstrip() for line in matrix.splitlines())]) + "\n"


def topology_samples(facts: Mapping[str, Any], folder: str) -> List[Sample]:
    """Compare with what the first look kept; that one lasts until somebody removes it."""
    if facts["vendor"] == "none" or not facts["gpus"]:
        gone = os.path.exists(os.path.join(folder, "topology.txt"))
        return [("gpu_fleet_topology_changed", {}, 1)] if gone else []
    now = topology_text(facts)
    kept = os.path.join(folder, "topology.txt")
    write(os.path.join(folder, "topology.now.txt"), now)
    try:
        with open(kept, encoding="utf-8") as text:
            first = text.read()
    except FileNotFoundError:
        write(kept, now)
        first = now
    return [("gpu_fleet_topology_changed", {}, first != now)]


# --- all of it --------------------------------------------------------------------------------------------------------


def page(samples: Iterable[Sample]) -> str:
    """Prometheus' text format 0.0.4, samples of a metric together."""
    lines: List[str] = []
    by_name: Dict[str, List[str]] = {}
    for name, labels, value in samples:
        inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in sorted(labels.items()))
        by_name.setdefault(name, []).append(f"{name}{{{inner}}} {float(value):.10g}")
    for name, told in by_name.items():
        lines += [f"# HELP {name} {HELP[name]}", f"# TYPE {name} gauge", *told]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def write(path: str, text: str) -> None:
    with open(f"{path}.new", "w", encoding="utf-8") as out:
        out.write(text)
    os.chmod(f"{path}.new", 0o644)
    os.replace(f"{path}.new", path)


def _asked(run: gpu_facts.Run, *argv: str) -> Optional[str]:
    try:
        status, out, _ = run(argv, gpu_facts.PATIENCE)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return out if status == 0 else None


def collect(config: Mapping[str, Any], run: gpu_facts.Run, now: float, root: str = "/") -> str:
    facts = gpu_facts.gather(run, root=root)
    samples: List[Sample] = [("gpu_fleet_host_metrics_time_seconds", {}, now)]
    samples += gpu_samples(facts) + topology_samples(facts, config["folder"])
    if facts["vendor"] == "nvidia" and facts["gpus"]:
        for clocks in CLOCKS:
            fields = [*QUERY, *(f"{clocks}.{name}" for name in REASONS)]
            # A driver refuses the whole query for one field that it does not know.
            told = _asked(run, "nvidia-smi", f"--query-gpu=index,{','.join(fields)}", "--format=csv,noheader,nounits")
            if told is not None:
                samples += query_samples(fields, told)
                break
        samples += link_samples(_asked(run, "nvidia-smi", "nvlink", "-e") or "")
    samples += certificate_samples(config["certificates"]) + model_samples(config["models"])
    try:
        with open(os.path.join(root, "proc/self/mounts"), encoding="utf-8", errors="replace") as text:
            samples += folder_samples(text.read())
    except OSError:
        pass
    return page(samples)


def main(arguments: Sequence[str]) -> int:
    with open(arguments[0], encoding="utf-8") as text:
        config = json.load(text)
    os.makedirs(config["folder"], mode=0o755, exist_ok=True)
    write(config["into"], collect(config, gpu_facts.command, time.time()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
