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
from ..module_utils.findings import Finding, did_you_mean
from ..module_utils.launch_case import Tables, known_gpu
from ..module_utils.models import ModelError
from ..module_utils.services import Service
from . import cache, data, hub

if TYPE_CHECKING:
    from .inventory import Inventory

GIB = 1 << 30
MOST_BYTES = 1 << 50  # of weights: more is a damaged file
# What damaged files lead to.
BROKEN = (
    *(ValueError, KeyError, TypeError, AttributeError, IndexError),
    *(ArithmeticError, RecursionError, MemoryError),
)
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


def gpus_of(inventory: Inventory, host: str) -> tuple[list[dict[str, Any]] | str, dict[str, str]]:
    """The GPUs of a host as a launch has them, or why they are not known, and the links of its pairs."""
    learned, count = _learned(inventory, host), inventory.get(host, "fleet_gpus")
    if isinstance(learned, str):
        return learned, {}
    if learned is not None:
        return _checked([_of_learned(gpu) for gpu in learned["gpus"]], host, count), learned.get("pairs") or {}
    model = inventory.get(host, "fleet_gpu_model")
    if not isinstance(model, str):
        return f"which GPUs {host} has is not known (fleet_gpu_model, or scripts/fleet topology --learn)", {}
    if not known_gpu(model, known().gpus).get("memory_gib"):
        lacks = f"the memory of a {model} as CUDA reports it is not in data/gpus.yml"
        return f"{lacks}; learn the host: scripts/fleet topology --learn", {}
    return [{"name": model} for _gpu in range(count if isinstance(count, int) else 0)], {}


def _checked(gpus: list[dict[str, Any] | None], host: str, count: Any) -> list[dict[str, Any]] | str:
    """What was learned of a host, or what contradicts it."""
    if not all(gpus):
        return f"what was learned of {host} lacks the memory of a GPU; learn it anew"
    if isinstance(count, int) and count != len(gpus):
        return f"{len(gpus)} GPUs were learned of {host}, fleet_gpus says {count}; learn it anew or correct fleet_gpus"
    return [gpu for gpu in gpus if gpu]


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


def _learned(inventory: Inventory, host: str) -> dict[str, Any] | str | None:
    """What role gpu_topology kept of a host, None where it did not, or what is wrong with the file."""
    path = inventory.get(host, "gpu_topology_learned_file")
    folder = inventory.get(host, "inventory_dir")
    if not path and not folder:
        return None
    file = Path(str(path)) if path else Path(str(folder)) / ".topology" / f"{host}.json"
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        return f"{file} cannot be read: {error}"
    told, faults = hardware.read_learned(text, str(file), host)
    return told if told is not None else faults[0].message


def gpu_fault(inventory: Inventory, host: str) -> tuple[str, str, str] | None:
    """A GPU model that the collection does not know, or one without a number of GPUs."""
    model = inventory.get(host, "fleet_gpu_model")
    if not isinstance(model, str):
        return None
    if not known_gpu(model, known().gpus):
        fix = f"{did_you_mean(model, known().gpus['gpus'], 0.5)}data/gpus.yml lists them; or leave it out"
        return "gpu-model", f"fleet_gpu_model is {model!r}, which is not known", fix
    return None


# --- The planner ------------------------------------------------------------------------------------------------


class Planner:
    """Plans the launch of a service on hosts with GPUs, each once; `faults` is what stops a deployment."""

    def __init__(self, inventory: Inventory, entries: list[Any], folder: str, ask_hub: bool) -> None:
        self.inventory, self.models = inventory, Models(entries, folder, ask_hub)
        self.gpus: dict[str, tuple[list[dict[str, Any]] | str, dict[str, str]]] = {}
        self.made: dict[Any, launch_plan.Plan | plan.Unplanned] = {}
        self.faults: list[Finding] = []

    def __call__(
        self, service: Service, hosts: tuple[plan.Host, ...], numbers: tuple[int, ...]
    ) -> launch_plan.Plan | plan.Unplanned:
        launch = self._launch(service, hosts, numbers)
        if isinstance(launch, str):
            return plan.Unplanned(launch)
        key = json.dumps(launch, sort_keys=True, default=str)
        if key not in self.made:
            self.made[key] = _choose(service, launch)
        return self.made[key]

    def _launch(self, service: Service, hosts: tuple[plan.Host, ...], numbers: tuple[int, ...]) -> dict[str, Any] | str:
        """The launch as launch_plan takes it, or why it is not known."""
        used: list[dict[str, Any]] = []
        for host in hosts:
            if host.name not in self.gpus:
                self.gpus[host.name] = gpus_of(self.inventory, host.name)
            own = self.gpus[host.name][0]
            if isinstance(own, str):
                return own
            if any(number >= len(own) for number in numbers):
                return f"{host.name} has {len(own)} GPUs by what is known of it"
            used += [{**own[number], "index": number} for number in numbers]
        model = self.models.get(service.model)
        if isinstance(model, str):
            if self.models.failed and service.model in self.models.failed:
                where = f"service {service.name}"
                fix = "Reach the hub (HF_ENDPOINT names a mirror), or give the model as a folder: its launch is planned by its config.json"
                fault = Finding("model-unreachable", where, f"model {service.model}: {model.rstrip('.')}", fix)
                self.faults += [] if fault in self.faults else [fault]
            return f"model {service.model}: {model}"
        place = {number: at for at, number in enumerate(numbers)}
        links = {
            f"{place[one]}-{place[other]}": link
            for pair, link in self.gpus[hosts[0].name][1].items()
            for one, other in [sorted(int(part) for part in pair.split("-"))]
            if one in place and other in place and isinstance(link, str)
        }
        return {
            "gpus": used,
            "nodes": len(hosts),
            "model_config": model[0],
            "weights_gib": model[1] / GIB,
            "vllm_version": hosts[0].version,
            "args": {f"--{name}": value for name, value in service.args.items()},
            "links": links,
        }


def _choose(service: Service, launch: dict[str, Any]) -> launch_plan.Plan | plan.Unplanned:
    """A damaged config.json is the model's fault and not the inventory's: it is named, and nothing else fails with it."""
    try:
        return launch_plan.choose(launch, known())
    except BROKEN as error:
        return plan.Unplanned(
            f"model {service.model}: its config.json makes no sense ({type(error).__name__}: {error})"
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
        self.failed: dict[str, str] = {}  # hub models that were asked for in vain
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
            if not folder.is_dir():
                return f"the controller has no folder {folder}"
            config, size = model_memory.read(str(folder))
            if not isinstance(config, dict) or not config:
                return f"{folder}/config.json is no mapping"
            return (config, size) if 0 < size < MOST_BYTES else f"its files say {str(size)[:20]} bytes of weights"
        except (ModelError, model_memory.Unknown, OSError, *BROKEN) as error:
            return str(error) or type(error).__name__

    def _of_hub(self, name: str, entry: Mapping[str, Any]) -> tuple[dict[str, Any], int] | str:
        repository, revision = str(entry["hub"]), str(entry.get("revision") or "")
        if self.fetch:
            try:
                if self.failed:  # an endpoint that does not answer is asked once
                    raise ModelError(next(iter(self.failed.values())))
                target = hub.fetch(name, repository, revision, self.allow_pickle, look=True)[0]
            except ModelError as error:
                self.failed[name] = str(error)
                raise
        else:
            target = cache.folder("models", "hub") / repository.replace("/", "--") / revision
        listing = target.with_suffix(".json")
        if not (target / "config.json").is_file() or not listing.is_file():
            return "the hub was not asked yet; playbooks/plan.yml and site.yml ask it"
        config = json.loads((target / "config.json").read_text(encoding="utf-8"))
        index = target / "model.safetensors.index.json"
        if index.is_file():
            size = int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
            return (config, size) if 0 < size < MOST_BYTES else f"its index says {str(size)[:20]} bytes of weights"
        sizes = [
            int((item.get("lfs") or {}).get("size") or item.get("size") or 0)
            for item in json.loads(listing.read_text(encoding="utf-8"))
            if str(item["rfilename"]).endswith(".safetensors") and "/" not in str(item["rfilename"])
        ]
        return (config, sum(sizes)) if sizes else "it has no safetensors, by which weights are counted"
