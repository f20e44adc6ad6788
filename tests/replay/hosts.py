"""Recorded hosts, whole: the facts that module gpu_facts gives on them, also with one thing or another changed.

    import hosts                                                           with tests/replay on sys.path
    hosts.facts("h100x8")                                                  healthy
    hosts.facts("h100x8", gpus={3: {"pcie.link.width.current": "8"}})      GPU 3 has eight lanes
    hosts.facts("h100x8", acs={"*": ["SrcValid", "ReqRedir"]})             ACS is on everywhere

A recording is a JSON file of tests/unit/fixtures/hosts: `about`; `nvidia_smi`, see the stand-in beside this file, or
null where the tool is missing; `commands`, answers of other commands by command line, in the same form, where a command
that is not named is not there; `files`, what lies below the root, each one a text, {"base64": ..}, {"link": ..},
{"folder": true} or {"config": [names]}, the PCI configuration space of a bridge with those bits of ACS set.
"""

import base64
import copy
import json
import re
import shutil
import subprocess
import tempfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import gpu_facts, gpu_sysfs

HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parent / "unit" / "fixtures" / "hosts"
STAND_IN = HERE / "nvidia-smi"
P2P = {"read": "topo -p2p r", "write": "topo -p2p w", "nvlink": "topo -p2p n"}
UNDERLINE = "\x1b[4m"
JOURNAL = "journalctl -k -b -o cat --no-pager -g NVRM: Xid"

_spec = spec_from_loader("stand_in", SourceFileLoader("stand_in", str(STAND_IN)))
stand_in = module_from_spec(_spec)
_spec.loader.exec_module(stand_in)


def facts(name, *, source="auto", nvml=None, **changes):
    """The facts of a recorded host. `changes` are those of `recording`."""
    return replay(recording(name, **changes), source=source, nvml=nvml)


def replay(recorded, *, source="auto", nvml=None, run=None):
    """The facts that a recording gives, gathered by the very code of the module. `run` may stand in for `runner`'s."""
    with tempfile.TemporaryDirectory() as folder:
        lay_out(recorded, folder)
        return gpu_facts.gather(run or runner(recorded), root=folder, nvml=nvml, source=source)


def recording(
    name,
    *,
    gpus=None,
    unknown=(),
    links=None,
    apps=(),
    drop=(),
    cells=None,
    p2p=None,
    calls=None,
    every=None,
    commands=None,
    files=None,
    acs=None,
    xid=(),
):
    """A recording with changes.

    gpus      {index or "*": {field of nvidia-smi: value as it prints it}}
    unknown   fields that this driver does not know
    links     {index: {link: speed as printed, or None for inactive}}; {index: None} takes all of the GPU's links away
    apps      processes: {gpu: index, pid, process_name, used_memory in MiB, unit: path of its cgroup or absent}
    drop      indices of GPUs that are gone from the bus; the others are counted anew, as the driver does
    cells     {(i, j): link} of the matrix, both (i, j) and (j, i)
    p2p       {"read", "write" or "nvlink": {(i, j): status}}, both ways
    calls     {arguments of nvidia-smi as one string: answer}
    every     one answer to every call of nvidia-smi
    commands  {command line: answer, or None to take it away}; {"nvidia-smi": None} takes nvidia-smi away
    files     {path: file, or None to take it away}
    acs       {address of a bridge or "*": bits that are set; None: no such capability}
    xid       lines of the kernel log since boot
    """
    made = json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))
    smi, tree = made["nvidia_smi"], made["files"]
    for index, fields in (gpus or {}).items():
        _set_fields(smi, index, fields)
    for index, speeds in (links or {}).items():
        have = smi["gpus"][index]["nvlinks"]
        smi["gpus"][index]["nvlinks"] = [] if speeds is None else [speeds.get(n, speed) for n, speed in enumerate(have)]
    for call, table in {"topo -m": cells, **{P2P[what]: table for what, table in (p2p or {}).items()}}.items():
        for (i, j), value in (table or {}).items():
            _set_cells(smi, call, i, j, value)
    for app in apps:
        row = {key: app[key] for key in ("pid", "process_name", "used_memory")}
        smi["apps"].append({"gpu_uuid": smi["gpus"][app["gpu"]]["fields"]["uuid"], **row})
        if "unit" in app:
            tree[f"proc/{app['pid']}/cgroup"] = f"0::{app['unit']}\n"
    for address, bits in (acs or {}).items():
        _set_acs(tree, address, bits)
    if drop:
        _drop(made, set(drop))
    smi["fields"] = [field for field in smi["fields"] if field not in unknown]
    smi["calls"].update(calls or {})
    smi.update({"every": every} if every is not None else {})
    made["commands"].update({JOURNAL: list(xid)} if xid else {})
    _update(made["commands"], commands)
    _update(made["files"], files)
    if "nvidia-smi" in (commands or {}):
        made["nvidia_smi"] = None
    return made


def runner(recorded):
    """What `gather` takes as `run`: answers from the recording, and nothing else is ever started."""

    def run(argv, timeout):
        if argv[0] == "nvidia-smi" and recorded["nvidia_smi"] is not None:
            status, out, err, hang = stand_in.answer(recorded, list(argv[1:]))
            if status == stand_in.UNRECORDED:
                raise AssertionError(err)
        elif " ".join(argv) in recorded["commands"]:
            status, out, err, hang = stand_in.reply_of(recorded["commands"][" ".join(argv)])
        else:
            raise FileNotFoundError(argv[0])
        if hang >= timeout:
            raise subprocess.TimeoutExpired(argv, timeout)
        return status, out, err

    return run


def lay_out(recorded, folder):
    """Write the recording's files below a folder."""
    for name, value in recorded["files"].items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(value, str):
            path.write_text(value, encoding="utf-8")
        elif "link" in value:
            path.symlink_to(value["link"])
        elif "base64" in value:
            path.write_bytes(base64.b64decode(value["base64"]))
        elif "config" in value:
            path.write_bytes(configuration_space(value["config"]))
        else:
            path.mkdir(parents=True, exist_ok=True)


def install(recorded, folder):
    """Put the stand-in and the recording into a folder, for a PATH on a host; for tests with real processes."""
    Path(folder, "replay.json").write_text(json.dumps(recorded), encoding="utf-8")
    return Path(shutil.copy(STAND_IN, Path(folder, "nvidia-smi")))


def configuration_space(acs, size=4096):
    """A PCI Express bridge's: Advanced Error Reporting (0001h) first, then ACS unless `acs` is None."""
    raw = bytearray(size)
    if size == 4096:
        following = 0x148 if acs is not None else 0
        raw[0x100:0x104] = (following << 20 | 2 << 16 | 0x0001).to_bytes(4, "little")
        if acs is not None:
            raw[0x148:0x14C] = (1 << 16 | gpu_sysfs.ACS_CAPABILITY).to_bytes(4, "little")
            raw[0x14C:0x14E] = (0x5F).to_bytes(2, "little")  # the bits that it could set
            bits = sum(1 << gpu_sysfs.ACS_CONTROL.index(name) for name in acs)
            raw[0x14E:0x150] = bits.to_bytes(2, "little")
    return bytes(raw)


def _update(have, changes):
    for key, value in (changes or {}).items():
        if value is None:
            have.pop(key, None)
        else:
            have[key] = value


def _lines(smi, call):
    text = smi["calls"][call]
    return text.splitlines() if isinstance(text, str) else text


def _row(line):
    """Number of the GPU whose row this is, else None."""
    head = re.match(r" ?GPU(\d+)\t", line)
    return int(head.group(1)) if head else None


def _set_fields(smi, index, fields):
    strange = set(fields) - set(smi["fields"])
    if strange:
        raise KeyError(f"the recorded nvidia-smi knows no field {', '.join(sorted(strange))}")
    for gpu in smi["gpus"] if index == "*" else [smi["gpus"][index]]:
        gpu["fields"].update(fields)


def _set_acs(tree, address, bits):
    bridges = [path for path in tree if path.endswith("/config") and address in ("*", path.split("/")[-2])]
    if not bridges:
        raise KeyError(f"the recording has no bridge {address}")
    tree.update({path: {"config": bits} for path in bridges})


def _set_cells(smi, call, i, j, value):
    """A cell of a table, and the one across the diagonal; the first cell of a row is its name."""
    lines = _lines(smi, call)
    for one, other in ((i, j), (j, i)):
        (number,) = [number for number, line in enumerate(lines) if _row(line) == one]
        row = lines[number].split("\t")
        row[other + 1] = value
        lines[number] = "\t".join(row)
    smi["calls"][call] = lines


def _drop(made, gone):
    """GPUs leave the tool's lists, the tables and the bus; an index is a place in the list, so it moves up."""
    smi = made["nvidia_smi"]
    addresses = [gpu_sysfs.pci_address(smi["gpus"][index]["fields"]["pci.bus_id"]) for index in gone]
    left = [index for index in range(len(smi["gpus"])) if index not in gone]
    smi["gpus"] = [copy.deepcopy(smi["gpus"][index]) for index in left]
    for index, gpu in enumerate(smi["gpus"]):
        gpu["fields"]["index"] = str(index)
    for call in ("topo -m", *P2P.values()):
        kept = [line for line in _lines(smi, call) if _row(line) not in gone]
        smi["calls"][call] = [_without(line, gone, left) for line in kept]
    made["files"] = {path: value for path, value in made["files"].items() if not _below(path, addresses)}


def _without(line, gone, left):
    """A line of a table less the columns of the GPUs that are gone, its names counted anew.

    Columns follow one cell, which is empty in the head; what underlines the head begins at the first column.
    """
    if re.match(r" ?\t|(?: ?GPU|NIC)\d+\t", line):
        first, *cells = line.replace(UNDERLINE, "").split("\t")
        cells = [cell for n, cell in enumerate(cells) if n not in gone]
        line = "\t".join([first, (UNDERLINE if UNDERLINE in line else "") + cells[0], *cells[1:]])
    return re.sub(r"(?<=GPU)\d+(?=\t)", lambda hit: str(left.index(int(hit.group()))), line)


def _below(path, addresses):
    return any(part in addresses for part in path.split("/"))


def main():
    """`python hosts.py RECORDING FOLDER`: lay a recorded host out for a test host, FOLDER/root and FOLDER/bin."""
    import sys

    recorded, folder = recording(sys.argv[1]), Path(sys.argv[2])
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "bin").mkdir(parents=True)
    lay_out(recorded, folder / "root")
    install(recorded, folder / "bin")


if __name__ == "__main__":
    main()
