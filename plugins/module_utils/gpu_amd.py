# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What amd-smi and rocm-smi print as JSON about the GPUs of an AMD host.

Shapes from their own sources: amdsmi_cli/amdsmi_commands.py of amd-smi, python_smi_tools/rocm_smi.py of rocm-smi.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import json
import re
from typing import Any, Dict, List, Mapping, Optional

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import gpu_sysfs

Gpus = List[Dict[str, Any]]


def _json(text: str) -> Any:
    """The JSON in a tool's answer, which may warn first; None when there is none."""
    begin = re.search(r"^[\[{]", text, re.MULTILINE)
    try:
        return json.loads(text[begin.start() :]) if begin else None
    except ValueError:
        return None


def amd_smi(listed: str, static: str) -> Optional[Gpus]:
    """From `amd-smi list --json` (gpu, bdf, uuid) and `amd-smi static --json` (asic.market_name, vram.size).

    Newer ones put the second list under `gpu_data`. The unit that they call MB is 2**20 bytes. None: not understood.
    """
    told = _json(static)
    details: Any = told.get("gpu_data") if isinstance(told, dict) else told
    items = _json(listed)
    if not _objects(items) or not _objects(details):
        return None
    more = {item.get("gpu"): item for item in details}
    found = []
    for item in items:
        if isinstance(item.get("gpu"), int):
            about = more.get(item["gpu"], {})
            size = _part(about, "vram", "size")
            value = _part(size, "value") if _part(size, "unit") == "MB" else None
            name = _part(about, "asic", "market_name")
            found.append(_gpu(item["gpu"], name, item.get("uuid"), item.get("bdf"), value))
    return found or None


def rocm_smi(text: str) -> Optional[Gpus]:
    """From `rocm-smi --json`: cardN with Card Series, Unique ID, PCI Bus, VRAM Total Memory (B). None: not understood."""
    cards = _json(text)
    found = []
    for card, values in cards.items() if isinstance(cards, dict) else ():
        if re.fullmatch(r"card\d+", card) and isinstance(values, dict):
            said = {key.lower(): value for key, value in values.items()}  # older ones write `Card series`
            size = str(said.get("vram total memory (b)"))
            memory = int(size) // 2**20 if size.isdigit() else None
            name, uuid, bus = (said.get(key) for key in ("card series", "unique id", "pci bus"))
            found.append(_gpu(int(card[4:]), name, uuid, bus, memory))
    return sorted(found, key=lambda gpu: gpu["index"]) or None


def _gpu(index: int, name: Any, uuid: Any, bus_id: Any, memory_mib: Any) -> Dict[str, Any]:
    return {
        "index": index,
        "name": _said(name),
        "uuid": _said(uuid),
        "pci_address": gpu_sysfs.pci_address(str(bus_id)),
        "memory_mib": memory_mib if isinstance(memory_mib, int) else None,
    }


def _objects(items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(item, dict) for item in items)


def _part(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _said(value: Any) -> Optional[str]:
    return value if isinstance(value, str) and value not in ("", "N/A") else None
