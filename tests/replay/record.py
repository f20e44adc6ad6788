#!/usr/bin/env python3
"""Turn folders of nvidia-smi's answers and of a host's files, as saved by hand, into a recording for the stand-in.

    record.py FOLDER... --about TEXT --output FILE

A file of a later folder replaces one of the same name. Read where there is one:
  topo-m.txt topo-p2p-r.txt topo-p2p-w.txt topo-p2p-n.txt   nvidia-smi topo ...
  q-compute.txt                                             nvidia-smi -q -d COMPUTE
  nvlink-s.txt                                              nvidia-smi nvlink -s
  query-gpu.csv                                             --query-gpu=... --format=csv, with head and units
  each.txt                                                  `FIELD: VALUE;VALUE;` a line, from one query a field
  help-query-gpu.txt                                        nvidia-smi --help-query-gpu
  proc-driver-nvidia-version.txt mods.txt                   /proc/driver/nvidia/version, /proc/modules
  sysfs.txt                                                 `LINK PATH class=.. dev=.. numa=.. drv=..` a device
  system.json                                               {command: answer} and {path: file}, see tests/replay/hosts.py
UUIDs are replaced by made-up ones, in the order of the GPUs.
"""

import argparse
import csv
import io
import json
import re
from pathlib import Path

CALLS = {
    "topo -m": "topo-m.txt",
    "topo -p2p r": "topo-p2p-r.txt",
    "topo -p2p w": "topo-p2p-w.txt",
    "topo -p2p n": "topo-p2p-n.txt",
    "-q -d COMPUTE": "q-compute.txt",
}
UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def read(folders):
    """Texts by file name, with every UUID replaced."""
    texts = {path.name: path.read_text(encoding="utf-8") for folder in folders for path in sorted(folder.iterdir())}
    seen = {}
    for name in ("L.txt", "core.txt", "nvlink-s.txt", "query-gpu.csv"):
        order = {uuid: number for number, uuid in enumerate(dict.fromkeys(UUID.findall(texts.get(name, ""))))}
        seen.update(order)

    def other(match):
        number = seen[match.group()]
        return f"GPU-{number:08x}-0000-4000-8000-000000000000"

    return {name: UUID.sub(other, text) for name, text in texts.items()}


def gpus(texts):
    """Fields by GPU: query-gpu.csv without its units, then what each.txt has."""
    rows = list(csv.reader(io.StringIO(texts["query-gpu.csv"]), skipinitialspace=True))
    fields = [re.sub(r" \[.*\]$", "", name) for name in rows[0]]
    united = [name != field for name, field in zip(rows[0], fields, strict=True)]
    found = [
        {field: value.split()[0] if unit else value for field, value, unit in zip(fields, row, united, strict=True)}
        for row in rows[1:]
    ]
    for line in texts.get("each.txt", "").splitlines():
        field, _, values = line.partition(": ")
        for gpu, value in zip(found, values.rstrip(";").split(";"), strict=True):
            gpu[field] = value
    return found


def nvlinks(text):
    """Speeds by link for each GPU, in order."""
    found = []
    for line in text.splitlines():
        link = re.match(r"\s+Link (\d+): (.*)", line)
        if link:
            found[-1].append(link.group(2) if "inactive" not in link.group(2) else None)
        else:
            found.append([])
    return found


def known_fields(text):
    """Names of `--help-query-gpu`, which stand alone on a line in quotes, several with `or`."""
    lines = re.findall(r'^("[^"]+"(?: or "[^"]+")*)$', text, re.MULTILINE)
    return [name for line in lines for name in re.findall(r'"([^"]+)"', line)]


def pci_files(text):
    """Files of sysfs for each device of sysfs.txt, which has NVIDIA's alone."""
    found = {}
    for line in text.splitlines():
        link, path = line.split(" ", 2)[:2]
        about = dict(re.findall(r"(\w+)=(\S+)", line))
        place = path.lstrip("/")
        found[link.lstrip("/")] = {"link": "../../../" + place.removeprefix("sys/")}
        found[f"{place}/vendor"] = "0x10de\n"
        found[f"{place}/device"] = about["dev"] + "\n"
        found[f"{place}/class"] = about["class"] + "\n"
        found[f"{place}/numa_node"] = about["numa"] + "\n"
        up = "../" * len(Path(place).relative_to("sys").parts)
        found[f"{place}/driver"] = {"link": up + re.sub(r"^(\.\./)*", "", about["drv"])}
    return found


def record(folders, about):
    """The recording as it is written down."""
    texts = read(folders)
    system = json.loads(texts.get("system.json", "{}"))
    links = nvlinks(texts["nvlink-s.txt"])
    files = pci_files(texts.get("sysfs.txt", ""))
    for name, path in (
        ("proc-driver-nvidia-version.txt", "proc/driver/nvidia/version"),
        ("mods.txt", "proc/modules"),
    ):
        if name in texts:
            files[path] = texts[name]
    return {
        "about": about,
        "nvidia_smi": {
            "fields": known_fields(texts["help-query-gpu.txt"]),
            "gpus": [{"fields": fields, "nvlinks": speeds} for fields, speeds in zip(gpus(texts), links, strict=True)],
            "apps": [],
            "calls": {call: texts[name].splitlines() for call, name in CALLS.items() if name in texts},
        },
        "commands": system.get("commands", {}),
        "files": {**files, **system.get("files", {})},
    }


def main():
    """Read, and write the recording."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--about", required=True, help="what was recorded, and when")
    parser.add_argument("--output", required=True, type=Path)
    options = parser.parse_args()
    made = json.dumps(record(options.folders, options.about), indent=1, ensure_ascii=True)
    options.output.write_text(made + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
