# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a host says about its GPUs, its driver and what lies between: facts, no judgement, nothing changed.

Three sources, each for what only it can tell: NVML (nvidia-ml-py) or nvidia-smi for the GPUs, with nvidia-smi's own
topology tables as text; amd-smi or rocm-smi on AMD hosts; sysfs and procfs for the PCI tree and the rest. All commands
go through `run(argv, timeout) -> (exit status, stdout, stderr)`, which raises FileNotFoundError for a tool that is not
there and subprocess.TimeoutExpired for one that hangs; all paths lie under `root`. So a recorded host can be replayed.

Pure but for `command`: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import gpu_amd, gpu_nvml, gpu_sysfs

Run = Callable[[Sequence[str], float], Tuple[int, str, str]]
Facts = Dict[str, Any]

# Seconds that one command may take. nvidia-smi takes 35 to 70 ms where the driver is up, seconds where it must
# first initialise the GPUs (persistence off), and never ends where a GPU hangs.
PATIENCE = 20.0
AT_ONCE = 12
XID_LINES = 100

# Where the tools lie that a login over SSH without a profile does not find.
FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin", "/opt/rocm/bin")

SECURE_BOOT = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)[^)]*\): (\d+)")

# Field of `nvidia-smi --query-gpu` (its --help-query-gpu) -> where the answer goes, and what it is.
CORE = ("index", "name", "uuid", "pci.bus_id", "memory.total", "driver_version")
FIELDS: Dict[str, Tuple[Tuple[str, ...], str]] = {
    "compute_cap": (("compute_capability",), "text"),
    "mig.mode.current": (("mig", "current"), "text"),
    "mig.mode.pending": (("mig", "pending"), "text"),
    "persistence_mode": (("persistence",), "yes"),
    "ecc.mode.current": (("ecc", "mode"), "text"),
    "ecc.errors.uncorrected.volatile.total": (("ecc", "uncorrected_volatile"), "number"),
    "ecc.errors.uncorrected.aggregate.total": (("ecc", "uncorrected_aggregate"), "number"),
    "ecc.errors.corrected.volatile.total": (("ecc", "corrected_volatile"), "number"),
    "remapped_rows.uncorrectable": (("remapped_rows", "uncorrectable"), "number"),
    "remapped_rows.pending": (("remapped_rows", "pending"), "yes"),
    "remapped_rows.failure": (("remapped_rows", "failure"), "yes"),
    "retired_pages.pending": (("retired_pages_pending",), "yes"),
    "pcie.link.gen.current": (("pcie", "gen_current"), "number"),
    "pcie.link.gen.gpumax": (("pcie", "gen_gpumax"), "number"),
    "pcie.link.gen.hostmax": (("pcie", "gen_hostmax"), "number"),
    "pcie.link.width.current": (("pcie", "width_current"), "number"),
    "pcie.link.width.max": (("pcie", "width_max"), "number"),
    "fabric.state": (("fabric", "state"), "text"),
    "fabric.status": (("fabric", "status"), "text"),
    "fabric.health.summary": (("fabric", "health"), "text"),
}
HOSTMAX = "pcie.link.gen.hostmax"  # the one that NVML has no call for

TABLES = {
    ("matrix",): ("nvidia-smi", "topo", "-m"),
    ("p2p", "read"): ("nvidia-smi", "topo", "-p2p", "r"),
    ("p2p", "write"): ("nvidia-smi", "topo", "-p2p", "w"),
    ("p2p", "nvlink"): ("nvidia-smi", "topo", "-p2p", "n"),
}


def gather(run: Run, root: str = "/", nvml: Any = None, source: str = "auto") -> Facts:
    """Every fact of the module, each key always there.

    run     runs a command, see above
    root    where sysfs, procfs and the rest are found
    nvml    the module pynvml, or None where there is none
    source  auto (NVML where it answers, nvidia-smi otherwise), nvml or nvidia-smi: who is asked about NVIDIA GPUs
    """
    began = time.monotonic()
    host = gpu_sysfs.Host(root)
    facts = nothing()
    devices = gpu_sysfs.pci_devices(host)
    facts["pci_gpus"] = [device for device in devices if device.pop("class") in gpu_sysfs.GPU_CLASSES]
    vendors = [gpu_sysfs.VENDORS[device["vendor_id"]] for device in facts["pci_gpus"]]
    facts["vendor"] = next((name for name in ("nvidia", "amd") if name in vendors), "none")

    # Before any thread is there: a fork copies none.
    wants_nvml = facts["vendor"] == "nvidia" and nvml is not None and source in ("auto", "nvml")
    child = gpu_nvml.Child(lambda: gpu_nvml.read(nvml)) if wants_nvml else None
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        look = _Look(run, pool, facts["unread"])
        finish = [_system(look, host, facts)]
        if facts["vendor"] == "nvidia":
            finish += [_nvidia_host(look, host, facts), _nvidia_gpus(look, facts, child, source)]
        elif facts["vendor"] == "amd":
            finish += [_amd_host(look, host, facts), _amd_gpus(look, facts)]
        for step in finish:
            step()
    gpu_sysfs.fill(host, facts)
    facts["seconds"] = round(time.monotonic() - began, 3)
    return facts


def command(argv: Sequence[str], timeout: float) -> Tuple[int, str, str]:
    """Run it: exit status, stdout, stderr. FileNotFoundError: no such command; subprocess.TimeoutExpired: it hangs.

    A command that hangs is killed and then left: one that sleeps in a driver's call cannot be waited for, and holds
    nothing of ours but its own pipes.
    """
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *FOLDERS])
    program = shutil.which(argv[0], path=path)
    if program is None:
        raise FileNotFoundError(argv[0])
    process = subprocess.Popen(
        [program, *argv[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PATH": path, "LC_ALL": "C"},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        raise
    return process.returncode, out.decode("utf-8", "backslashreplace"), err.decode("utf-8", "backslashreplace")


# --- what there is to fill


def nothing() -> Facts:
    return {
        "vendor": "none",
        "source": None,
        "error": None,
        "pci_gpus": [],
        "gpus": [],
        "driver": {"loaded": None, "installed": None, "flavour": None, "cuda": None},
        "nvswitch": {"devices": 0},
        "fabric_manager": {"installed": None, "state": "absent"},
        "iommu": {"groups": 0, "passthrough": None},
        "xid": [],
        "nouveau": False,
        "secure_boot": None,
        "kernel": {"release": None, "headers": False},
        "glibc": None,
        "python": None,
        "machine": None,
        "topology": {"matrix": None, "p2p": {"read": None, "write": None, "nvlink": None}},
        "nics": [],
        "unread": [],
        "seconds": 0.0,
    }


def _gpu(index: int) -> Facts:
    return {
        "index": index,
        "name": None,
        "uuid": None,
        "pci_address": None,
        "memory_mib": None,
        "compute_capability": None,
        "driver": None,
        "mig": {"current": None, "pending": None},
        "persistence": None,
        "ecc": {"mode": None, "uncorrected_volatile": None, "uncorrected_aggregate": None, "corrected_volatile": None},
        "remapped_rows": {"uncorrectable": None, "pending": None, "failure": None},
        "retired_pages_pending": None,
        "pcie": dict.fromkeys(("gen_current", "gen_gpumax", "gen_hostmax", "width_current", "width_max")),
        "numa_node": None,
        "fabric": {"state": None, "status": None, "health": None},
        "processes": [],
        "nvlinks": [],
        "bridges": [],
    }


def _put(place: Facts, path: Sequence[str], value: Any) -> None:
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value


# --- commands


class _Answer(NamedTuple):
    out: str
    err: str
    why: Optional[str]  # None: exit status 0; otherwise what the tool said, or what happened to it
    missing: bool = False


def _ask(run: Run, argv: Sequence[str]) -> _Answer:
    try:
        status, out, err = run(argv, PATIENCE)
    except FileNotFoundError:
        return _Answer("", "", f"{argv[0]}: command not found", missing=True)
    except subprocess.TimeoutExpired:
        return _Answer("", "", f"{' '.join(argv)}: no answer within {PATIENCE:g} s")
    except OSError as error:
        return _Answer("", "", f"{argv[0]}: {error.strerror or error}")
    if status == 0:
        return _Answer(out, err, None)
    return _Answer(out, err, _words(out) or _words(err) or f"{' '.join(argv)}: exit status {status}")


def _words(text: str) -> str:
    """A tool's message on one line; nvidia-smi gives it on standard output, most others on standard error."""
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


class _Look:
    """Commands under way, and the list of what was not told."""

    def __init__(self, run: Run, pool: ThreadPoolExecutor, unread: List[Facts]) -> None:
        self.run, self.pool, self.unread = run, pool, unread

    def ask(self, *argv: str) -> "Future[_Answer]":
        return self.pool.submit(_ask, self.run, argv)

    def tell(self, what: str, why: Optional[str]) -> None:
        gpu_sysfs.tell(self.unread, what, why)

    def one(self, what: str, pattern: str, answer: "Future[_Answer]") -> Optional[str]:
        """What the pattern's group finds in the answer; None, and why, when there is nothing."""
        reply = answer.result()
        found = re.search(pattern, reply.out, re.MULTILINE) if reply.why is None else None
        if found is None:
            self.tell(what, reply.why or f"not understood: {_words(reply.out)[:200]!r}")
            return None
        return found.group(1)


# --- the system


def _system(look: _Look, host: gpu_sysfs.Host, facts: Facts) -> Callable[[], None]:
    asked = {
        "glibc": (r"^glibc (\S+)", look.ask("getconf", "GNU_LIBC_VERSION")),
        "python": (r"^Python (\d+\.\d+)", look.ask("/usr/bin/python3", "--version")),
        "machine": (r"^(\S+)", look.ask("uname", "-m")),
    }

    def finish() -> None:
        for name, (pattern, answer) in asked.items():
            facts[name] = look.one(name, pattern, answer)
        release = host.text("proc/sys/kernel/osrelease")
        facts["kernel"] = {
            "release": release,
            "headers": release is not None and host.there(f"lib/modules/{release}/build"),
        }
        modules = (host.text("proc/modules") or "").splitlines()
        facts["nouveau"] = any(line.startswith("nouveau ") for line in modules)
        raw = host.bytes(SECURE_BOOT)  # four bytes of attributes, then the value (efivarfs)
        facts["secure_boot"] = bool(raw[4]) if raw is not None and len(raw) > 4 else None

    return finish


def _modinfo(look: _Look, answer: "Future[_Answer]") -> Optional[str]:
    """Version of a module on disk. That it is not found is an answer; that modinfo is not there is none."""
    reply = answer.result()
    if reply.why is None:
        return reply.out.strip() or None
    if "not found" not in reply.why or reply.missing:
        look.tell("driver.installed", reply.why)
    return None


def _nvidia_host(look: _Look, host: gpu_sysfs.Host, facts: Facts) -> Callable[[], None]:
    modinfo = look.ask("modinfo", "-F", "version", "nvidia")
    manager = look.ask("nv-fabricmanager", "--version")
    unit = look.ask("systemctl", "show", "nvidia-fabricmanager.service", "-p", "LoadState,ActiveState")
    journal = look.ask("journalctl", "-k", "-b", "-o", "cat", "--no-pager", "-g", "NVRM: Xid")
    dmesg = look.ask("dmesg")

    def finish() -> None:
        driver = facts["driver"]
        found = re.search(
            r"^NVRM version:\s+NVIDIA UNIX (.*?)\s+(\d+\.\d[\d.]*)(?:\s|$)",
            host.text("proc/driver/nvidia/version") or "",
        )
        if found is not None:
            driver["loaded"] = found.group(2)
            driver["flavour"] = "open" if "Open Kernel Module" in found.group(1) else "proprietary"
        driver["installed"] = _modinfo(look, modinfo)
        switches = [device for device in gpu_sysfs.pci_devices(host) if device["class"] == gpu_sysfs.NVSWITCH_CLASS]
        in_proc = host.names("proc/driver/nvidia-nvswitch/devices")
        facts["nvswitch"]["devices"] = max(len(in_proc), sum(1 for device in switches if device["vendor_id"] == "10de"))
        facts["fabric_manager"] = _fabric_manager(look, manager.result(), unit.result())
        facts["xid"] = _xid(look, journal.result(), dmesg.result())

    return finish


def _fabric_manager(look: _Look, program: _Answer, unit: _Answer) -> Facts:
    """state: systemd's ActiveState; absent without the unit and the program; None when nobody could tell."""
    version = re.search(r"Fabric Manager version is\s*:\s*(\S+)", program.out + program.err)
    if version is None and not program.missing:
        look.tell("fabric_manager.installed", program.why or f"not understood: {_words(program.out)[:200]!r}")
    told = dict(line.partition("=")[::2] for line in unit.out.splitlines()) if unit.why is None else {}
    state: Optional[str] = None
    if told.get("LoadState", "not-found") != "not-found":
        state = told.get("ActiveState")
    elif program.missing:
        state = "absent"
    elif unit.why is None:
        state = "inactive"
    else:
        look.tell("fabric_manager.state", unit.why)
    return {"installed": version.group(1) if version else None, "state": state}


def _xid(look: _Look, journal: _Answer, dmesg: _Answer) -> List[Facts]:
    """From the journal, which keeps all since boot, and from the kernel's own buffer where the journal has none.

    journalctl ends with status 1 and no word when no line matches.
    """
    found = [XID.search(line) for line in journal.out.splitlines()]
    if not any(found):
        found = [XID.search(line) for line in dmesg.out.splitlines()]
    nothing_matched = journal.why is not None and not journal.missing and not (journal.out + journal.err).strip()
    if journal.why is not None and not nothing_matched and dmesg.why is not None:
        look.tell("xid", f"{journal.why}; {dmesg.why}")
    events = [
        {
            "address": gpu_sysfs.pci_address(hit.group(1)),
            "code": int(hit.group(2)),
            "line": hit.string[hit.start() :].strip(),
        }
        for hit in found
        if hit is not None
    ]
    return events[-XID_LINES:]


# --- NVIDIA's GPUs


def _nvidia_gpus(look: _Look, facts: Facts, child: Optional[gpu_nvml.Child], source: str) -> Callable[[], None]:
    """NVML first where it is wanted, nvidia-smi otherwise or after it; the tables are nvidia-smi's in any case."""
    tables = {place: look.ask(*argv) for place, argv in TABLES.items()}
    hostmax = look.ask(*_query(("index", HOSTMAX))) if child is not None else None
    smi = _Smi(look) if child is None and source != "nvml" else None

    def finish() -> None:
        error = None
        if smi is not None:
            error = smi.take(facts)
        elif child is None or hostmax is None:
            error = "There is no module pynvml in the Python that the module runs with"
        else:
            told, error = child.answer(PATIENCE)
            if told is not None:
                _take_nvml(look, facts, told, hostmax)
            elif source == "auto" and not child.hung:
                look.tell("nvml", error)
                error = _Smi(look).take(facts) or (None if facts["source"] else error)
        facts["error"] = error
        for place, answer in tables.items():
            reply = answer.result()
            if reply.why is None:
                _put(facts["topology"], place, reply.out)
            elif facts["source"] is not None:
                look.tell(".".join(("topology", *place)), reply.why)

    return finish


def _take_nvml(look: _Look, facts: Facts, told: Facts, hostmax: "Future[_Answer]") -> None:
    facts["source"] = "nvml"
    facts["driver"]["cuda"] = told["cuda"]
    facts["driver"]["loaded"] = facts["driver"]["loaded"] or told["driver"]
    for item in told["gpus"]:
        gpu = _gpu(item["index"])
        gpu.update({key: item[key] for key in ("name", "uuid", "memory_mib", "nvlinks", "processes")})
        gpu["pci_address"] = gpu_sysfs.pci_address(item["bus_id"])
        for field, value in item["fields"].items():
            _put(gpu, FIELDS[field][0], value)
        facts["gpus"].append(gpu)
    look.unread.extend(told["unread"])
    _take_fields(look, facts["gpus"], (HOSTMAX,), hostmax.result())


def _query(fields: Sequence[str]) -> Tuple[str, ...]:
    return ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")


def _rows(text: str, columns: int) -> Optional[List[List[str]]]:
    """Cells of a table in CSV, its last column taken whole; None when it is none."""
    rows = [[cell.strip() for cell in line.split(",", columns - 1)] for line in text.splitlines() if line.strip()]
    return rows if all(len(row) == columns for row in rows) else None


def _take_fields(look: _Look, gpus: Sequence[Facts], fields: Sequence[str], reply: _Answer) -> None:
    """Answers of a query for index and fields go where they belong; what was refused or makes no sense is told."""
    rows = _rows(reply.out, len(fields) + 1) if reply.why is None else None
    by_index = {row[0]: row[1:] for row in rows or []}
    for position, field in enumerate(fields):
        place, kind = FIELDS[field]
        for gpu in gpus:
            row = by_index.get(str(gpu["index"]))
            if row is None:
                look.tell(field, reply.why or f"GPU {gpu['index']}: not in the answer: {_words(reply.out)[:200]!r}")
                continue
            value, why = _value(kind, row[position])
            _put(gpu, place, value)
            if why is not None:
                look.tell(field, f"GPU {gpu['index']}: {why}")


def _value(kind: str, text: str) -> Tuple[Any, Optional[str]]:
    """nvidia-smi's answer as a value, or None; and why it is none where the GPU has the thing and does not say."""
    if text in ("", "None", "N/A", "[N/A]", "[Not Supported]"):
        return None, None
    if text.startswith("["):  # such as [Unknown Error], [GPU requires reset]
        return None, text
    if kind == "text":
        return text, None
    if kind == "yes" and text in ("Yes", "No", "Enabled", "Disabled"):
        return text in ("Yes", "Enabled"), None
    if kind == "number" and text.isdigit():
        return int(text), None
    return None, f"not understood: {text!r}"


class _Smi:
    """nvidia-smi's account of the GPUs; all questions are under way at once."""

    def __init__(self, look: _Look) -> None:
        self.look = look
        self.core = look.ask(*_query(CORE))
        self.optional = look.ask(*_query(("index", *FIELDS)))
        self.links = look.ask("nvidia-smi", "nvlink", "-s")
        self.apps = look.ask(
            "nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory,process_name", "--format=csv,noheader,nounits"
        )
        # CUDA has no field of its own; the head of every -q has it.
        self.cuda = look.ask("nvidia-smi", "-q", "-d", "COMPUTE")

    def take(self, facts: Facts) -> Optional[str]:
        """Fill in GPUs and CUDA; the tool's own words when it is there and fails."""
        core = self.core.result()
        if core.missing:
            self.look.tell("gpus", core.why)
            return None
        rows = _rows(core.out, len(CORE)) if core.why is None else None
        if not rows or not all(row[0].isdigit() for row in rows):
            return core.why or _words(core.out)[:500] or "nvidia-smi printed nothing"
        facts["source"] = "nvidia-smi"
        for index, name, uuid, bus_id, memory, driver in rows:
            gpu = _gpu(int(index))
            gpu.update(
                name=_value("text", name)[0], uuid=_value("text", uuid)[0], pci_address=gpu_sysfs.pci_address(bus_id)
            )
            gpu["memory_mib"] = _value("number", memory)[0]
            facts["gpus"].append(gpu)
            facts["driver"]["loaded"] = facts["driver"]["loaded"] or _value("text", driver)[0]
        self._take_optional(facts["gpus"])
        self._take_links(facts["gpus"])
        self._take_processes(facts["gpus"])
        facts["driver"]["cuda"] = self.look.one("driver.cuda", r"^CUDA (?:UMD )?Version\s*: *(\d+\.\d+)", self.cuda)
        return None

    def _take_optional(self, gpus: Sequence[Facts]) -> None:
        """One query for all; where the driver does not know one of the fields, it refuses the query, so each alone."""
        reply = self.optional.result()
        if reply.why is None or "is not a valid field to query" not in reply.why:
            _take_fields(self.look, gpus, tuple(FIELDS), reply)
            return
        alone = {field: self.look.ask(*_query(("index", field))) for field in FIELDS}
        for field, answer in alone.items():
            _take_fields(self.look, gpus, (field,), answer.result())

    def _take_links(self, gpus: Sequence[Facts]) -> None:
        reply = self.links.result()
        if reply.why is not None and "all links are inactive" not in reply.why.lower():
            self.look.tell("nvlinks", reply.why)
            return
        speeds: Dict[str, Dict[int, Optional[float]]] = {}
        current: Dict[int, Optional[float]] = {}
        for line in reply.out.splitlines():
            head = re.match(r"GPU \d+: .*\(UUID: (\S+)\)", line)
            link = re.match(r"\s+Link (\d+): (?:([\d.]+) GB/s)?", line)
            if head:
                current = speeds.setdefault(head.group(1), {})
            elif link:
                current[int(link.group(1))] = float(link.group(2)) if link.group(2) else None
        for gpu in gpus:
            gpu["nvlinks"] = gpu_nvml.links(speeds.get(gpu["uuid"], {}))

    def _take_processes(self, gpus: Sequence[Facts]) -> None:
        reply = self.apps.result()
        rows = _rows(reply.out, 4) if reply.why is None else None
        if rows is None or not all(row[1].isdigit() for row in rows):
            self.look.tell("processes", reply.why or f"not understood: {_words(reply.out)[:200]!r}")
            return
        for gpu in gpus:
            gpu["processes"] = [
                gpu_nvml.process(int(pid), _value("text", name)[0], _value("number", memory)[0])
                for uuid, pid, memory, name in rows
                if uuid == gpu["uuid"]
            ]


# --- AMD


def _amd_host(look: _Look, host: gpu_sysfs.Host, facts: Facts) -> Callable[[], None]:
    modinfo = look.ask("modinfo", "-F", "version", "amdgpu")

    def finish() -> None:
        facts["driver"]["loaded"] = host.text(
            "sys/module/amdgpu/version"
        )  # of DKMS packages; the kernel's own has none
        facts["driver"]["installed"] = _modinfo(look, modinfo)

    return finish


def _amd_gpus(look: _Look, facts: Facts) -> Callable[[], None]:
    """amd-smi, or the older rocm-smi. What they do not say of what this module asks stays None."""
    listed = look.ask("amd-smi", "list", "--json")
    static = look.ask("amd-smi", "static", "--asic", "--vram", "--json")
    topology = look.ask("amd-smi", "topology")
    old = look.ask("rocm-smi", "--showproductname", "--showuniqueid", "--showbus", "--showmeminfo", "vram", "--json")
    old_topology = look.ask("rocm-smi", "--showtopo")

    def finish() -> None:
        replies = listed.result(), static.result()
        why = next((reply.why for reply in replies if reply.why is not None), None)
        table = gpu_amd.amd_smi(*(reply.out for reply in replies)) if why is None else None
        if table is not None:
            _take_amd(look, facts, "amd-smi", table, topology.result())
            return
        why = why or f"amd-smi: not understood: {_words(replies[0].out)[:200]!r}"
        reply = old.result()
        table = gpu_amd.rocm_smi(reply.out) if reply.why is None else None
        if table is not None:
            if not replies[0].missing:
                look.tell("amd-smi", why)
            _take_amd(look, facts, "rocm-smi", table, old_topology.result())
            return
        old_why = reply.why or f"rocm-smi: not understood: {_words(reply.out)[:200]!r}"
        failed = [text for text, absent in ((why, replies[0].missing), (old_why, reply.missing)) if not absent]
        facts["error"] = "; ".join(failed) or None
        if not failed:
            look.tell("gpus", f"{why}; {old_why}")

    return finish


def _take_amd(look: _Look, facts: Facts, source: str, table: gpu_amd.Gpus, topology: _Answer) -> None:
    facts["source"] = source
    for item in table:
        facts["gpus"].append({**_gpu(item["index"]), **item})
    if topology.why is None:
        facts["topology"]["matrix"] = topology.out
    else:
        look.tell("topology.matrix", topology.why)
