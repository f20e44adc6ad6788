"""What can be known of a launch before a host is touched: the model from its files, the GPUs from what was learned or said.

Everything comes from the controller: a model's folder or the hub's cache, the file that role gpu_topology keeps of a host,
and the inventory. What is not known is said, never assumed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..module_utils import hardware, launch_plan, model_memory, plan
from ..module_utils.findings import did_you_mean
from ..module_utils.launch_case import Tables, known_gpu
from ..module_utils.models import ModelError
from ..module_utils.services import Service
from . import cache, data, hub

if TYPE_CHECKING:
    from .inventory import Inventory

GIB = 1 << 30
# Of nvidia-smi's memory.total, what CUDA reports at least: 0.996 on an H200 (143771 MiB, 139.8 GiB), 0.994 on an H100, 0.989 on
# an A100 80GB, 0.978 on an L4 (23034 MiB, 22.0 GiB), which has its ECC in line.
CUDA_SHARE = 0.978


@functools.cache
def known() -> launch_plan.Known:
    """The collection's data, as the planner wants it."""
    return launch_plan.Known(
        serve_flags=Tables(data.flag_versions(), lambda version: data.load(f"serve_flags/{version}")),
        removed_flags=data.load("removed_flags"),
        quantization=data.load("quantization"),
        memory=data.load("memory"),
        gpus=data.load("gpus"),
    )


# --- GPUs -------------------------------------------------------------------------------------------------------


def gpus_of(inventory: Inventory, host: str) -> tuple[list[dict[str, Any]] | None, dict[str, str]]:
    """The GPUs of a host as a launch has them and the links of its pairs; None where nobody said which they are."""
    learned = _learned(inventory, host)
    if learned is not None:
        gpus = [_of_learned(gpu) for gpu in learned["gpus"]]
        return (gpus, learned.get("pairs") or {}) if gpus and all(gpus) else (None, {})
    model, count = inventory.get(host, "fleet_gpu_model"), inventory.get(host, "fleet_gpus")
    if (
        isinstance(model, str)
        and isinstance(count, int)
        and count > 0
        and known_gpu(model, known().gpus).get("memory_gib")
    ):
        return [{"name": model} for _gpu in range(count)], {}
    return None, {}


def _of_learned(gpu: Mapping[str, Any]) -> dict[str, Any] | None:
    """A GPU as a launch has it: memory as CUDA reports it, which is a little less than nvidia-smi's."""
    told = {"name": gpu["name"], "mig": gpu.get("mig") == "Enabled"}
    if gpu.get("compute_capability"):
        told["compute_capability"] = gpu["compute_capability"]
    if known_gpu(gpu["name"], known().gpus).get("memory_gib"):
        return told
    if not gpu.get("memory_mib"):
        return None
    return {**told, "memory_gib": round(gpu["memory_mib"] / 1024 * CUDA_SHARE, 2)}


def _learned(inventory: Inventory, host: str) -> dict[str, Any] | None:
    """What role gpu_topology kept of a host, if it did and the file is whole."""
    path = inventory.get(host, "gpu_topology_learned_file")
    folder = inventory.get(host, "inventory_dir")
    if not path and not folder:
        return None
    file = Path(str(path)) if path else Path(str(folder)) / ".topology" / f"{host}.json"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return hardware.read_learned(text, str(file), host)[0]


def gpu_fault(inventory: Inventory, host: str) -> tuple[str, str, str] | None:
    """A GPU model that the collection does not know, or one without a number of GPUs."""
    model = inventory.get(host, "fleet_gpu_model")
    if not isinstance(model, str):
        return None
    if not known_gpu(model, known().gpus):
        fix = f"{did_you_mean(model, known().gpus['gpus'], 0.5)}data/gpus.yml lists them; or leave it out"
        return "gpu-model", f"fleet_gpu_model is {model!r}, which is not known", fix
    if not known_gpu(model, known().gpus).get("memory_gib"):
        fix = "Leave it out and learn the host: scripts/fleet topology -i INVENTORY --learn"
        return "gpu-model", f"fleet_gpu_model is {model}, whose memory as CUDA reports it is not in data/gpus.yml", fix
    return None


# --- The planner ------------------------------------------------------------------------------------------------


def planner(inventory: Inventory, entries: list[Any], folder: str, ask_hub: bool) -> plan.Launch:
    """A function that plans the launch of a service on hosts with GPUs; None for what is not known. Each once."""
    models = Models(entries, folder, ask_hub)
    gpus: dict[str, tuple[list[dict[str, Any]] | None, dict[str, str]]] = {}
    made: dict[Any, launch_plan.Plan | None] = {}

    def launch(service: Service, hosts: tuple[plan.Host, ...], numbers: tuple[int, ...]) -> launch_plan.Plan | None:
        key = (service.name, tuple(host.name for host in hosts), numbers)
        if key not in made:
            for host in hosts:
                gpus.setdefault(host.name, gpus_of(inventory, host.name))
            made[key] = _plan(service, hosts, numbers, models, {host.name: gpus[host.name] for host in hosts})
        return made[key]

    return launch


def _plan(
    service: Service,
    hosts: tuple[plan.Host, ...],
    numbers: tuple[int, ...],
    models: Models,
    gpus: dict[str, tuple[list[dict[str, Any]] | None, dict[str, str]]],
) -> launch_plan.Plan | None:
    used = []
    for host in hosts:
        own = gpus[host.name][0]
        if own is None or any(number >= len(own) for number in numbers):
            return None
        used += [own[number] for number in numbers]
    model = models.get(service.model)
    if isinstance(model, str):
        return None
    place = {number: at for at, number in enumerate(numbers)}
    links = {
        f"{place[one]}-{place[other]}": link
        for pair, link in gpus[hosts[0].name][1].items()
        for one, other in [sorted(int(part) for part in pair.split("-"))]
        if one in place and other in place
    }
    return launch_plan.choose(
        {
            "gpus": used,
            "nodes": len(hosts),
            "model_config": model[0],
            "weights_gib": model[1] / GIB,
            "vllm_version": hosts[0].version,
            "args": {f"--{name}": value for name, value in service.args.items()},
            "links": links,
        },
        known(),
    )


# --- Models -----------------------------------------------------------------------------------------------------


class Models:
    """The models of an inventory by name: config.json and bytes of weights, each read once."""

    def __init__(self, entries: list[Any], folder: str, fetch: bool, allow_pickle: bool = False) -> None:
        """folder: what relative paths are relative to. fetch: ask the hub for what the cache lacks (small files only)."""
        self.entries = {
            entry["name"]: entry
            for entry in entries
            if isinstance(entry, Mapping) and isinstance(entry.get("name"), str)
        }
        self.folder, self.fetch, self.allow_pickle = folder, fetch, allow_pickle
        self.read: dict[str, tuple[dict[str, Any], int] | str] = {}

    def get(self, name: str) -> tuple[dict[str, Any], int] | str:
        """The model's configuration and the bytes of its weights, or why they are not known."""
        if name not in self.read:
            self.read[name] = self._look(name)
        return self.read[name]

    def _look(self, name: str) -> tuple[dict[str, Any], int] | str:
        entry = self.entries.get(name)
        if entry is None:
            return "it lies on the hosts alone"
        try:
            if entry.get("hub"):
                return self._of_hub(name, entry)
            folder = Path(str(entry.get("folder", ""))).expanduser()
            folder = folder if folder.is_absolute() else Path(self.folder) / folder
            return model_memory.read(str(folder)) if folder.is_dir() else f"the controller has no folder {folder}"
        except (ModelError, model_memory.Unknown, OSError, ValueError, KeyError, TypeError) as error:
            return str(error) or type(error).__name__

    def _of_hub(self, name: str, entry: Mapping[str, Any]) -> tuple[dict[str, Any], int] | str:
        repository, revision = str(entry["hub"]), str(entry.get("revision") or "")
        if self.fetch:
            target = hub.fetch(name, repository, revision, self.allow_pickle, look=True)[0]
        else:
            target = cache.folder("models", "hub") / repository.replace("/", "--") / revision
        listing = target.with_suffix(".json")
        if not (target / "config.json").is_file() or not listing.is_file():
            return "the hub was not asked yet; playbooks/plan.yml and site.yml ask it"
        config = json.loads((target / "config.json").read_text(encoding="utf-8"))
        index = target / "model.safetensors.index.json"
        if index.is_file():
            return config, int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
        sizes = [
            int((item.get("lfs") or {}).get("size") or item.get("size") or 0)
            for item in json.loads(listing.read_text(encoding="utf-8"))
            if str(item["rfilename"]).endswith(".safetensors") and "/" not in str(item["rfilename"])
        ]
        return (config, sum(sizes)) if sizes else "it has no safetensors, by which weights are counted"
