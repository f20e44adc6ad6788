# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""One launch of `vllm serve`, read: the GPUs, the model, the release and the arguments, in the words the rules use.

A launch is a mapping with gpus (all of them over all nodes: name, memory_gib as CUDA reports it, compute_capability, and
free_gib or mig where a host was looked at), nodes, model_config (config.json), weights_gib (the whole model, as loaded),
vllm_version, args (flag: value) and, where known, links ({"0-1": "NV18"}). What a launch does not say is None here, never
guessed.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import model_memory, model_shape

GIB = 1 << 30
# Spellings of the command line that are not in the lists of options (vllm/engine/arg_utils.py, add_cli_args).
SHORT = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "dcp": "decode-context-parallel-size",
    "pcp": "prefill-context-parallel-size",
    "dpn": "data-parallel-rank",
    "dpr": "data-parallel-start-rank",
    "dpl": "data-parallel-size-local",
    "dpa": "data-parallel-address",
    "dpp": "data-parallel-rpc-port",
    "dpb": "data-parallel-backend",
    "dph": "data-parallel-hybrid-lb",
    "dpe": "data-parallel-external-lb",
    "ep": "enable-expert-parallel",
    "n": "nnodes",
    "r": "node-rank",
    "q": "quantization",
    "cc": "compilation-config",
    "sc": "speculative-config",
}
SIZES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
TRUE = {True, "true", "True", "", None}


class BadLaunch(Exception):
    """The launch itself cannot be read. `reason` names the key and its value."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Remark:
    """One judgement of a rule. severity: error, warning or info."""

    rule: str
    severity: str
    message: str
    fix: str = ""

    def as_dict(self) -> Dict[str, str]:
        return asdict(self)


class Tables(Mapping[str, Any]):
    """Tables by name, each loaded when it is first asked for: a launch needs one or two of the many releases."""

    def __init__(self, names: Iterable[str], load: Callable[[str], Any]):
        self._names = tuple(names)
        self._load = load
        self._loaded: Dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class Known:
    """Data that the rules go by, parsed.

    serve_flags    version to data/serve_flags/VERSION.yml; Tables loads them when they are asked for
    removed_flags  data/removed_flags.yml
    quantization   data/quantization.yml
    memory         data/memory.yml
    gpus           data/gpus.yml
    """

    serve_flags: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    removed_flags: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    quantization: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)
    gpus: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Gpu:
    """capability is (9, 0); None where neither the launch nor data/gpus.yml tells it."""

    name: str
    gib: float
    capability: Optional[Tuple[int, int]]
    free_gib: Optional[float]
    mig: bool
    nvlink: Optional[str]  # all | pairs | none


def release(version: str) -> Tuple[int, ...]:
    """(0, 26, 0) of 0.26.0, 0.26, v0.26.0+cu130."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", str(version))
    if not found:
        raise BadLaunch(f"vllm_version is {version!r}: a release such as 0.26.0 was expected")
    return tuple(int(part or 0) for part in found.groups())


def size_of(value: Any) -> Optional[int]:
    """16384 of 16384, "16384", 16.384k or 16K; -1 of auto; None of anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    found = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kKmMgGtT]?)", str(value).strip())
    if found:
        return int(float(found.group(1)) * SIZES.get(found.group(2), 1))
    return -1 if str(value).strip() == "auto" else None


def capability_of(value: Any) -> Optional[Tuple[int, int]]:
    found = re.fullmatch(r"(\d+)\.(\d+)", str(value))
    return (int(found.group(1)), int(found.group(2))) if found else None


def known_gpu(name: str, gpus: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entry of data/gpus.yml whose name is contained in this one, the longest such; {} where there is none."""
    words = _squeezed(name)
    models = gpus.get("gpus") or {}
    fits = [
        (len(_squeezed(alias)), model)
        for model, entry in models.items()
        for alias in [model, *(entry.get("also") or ())]
        if _squeezed(alias) in words
    ]
    return models[max(fits)[1]] if fits else {}


@functools.lru_cache(maxsize=1024)
def _squeezed(name: str) -> str:
    return " " + " ".join(re.sub(r"nvidia|geforce|tesla|-", " ", str(name).lower()).split()) + " "


def _gpu(raw: Mapping[str, Any], gpus: Mapping[str, Any]) -> Gpu:
    name = str(raw.get("name") or "GPU")
    entry = known_gpu(name, gpus)
    gib = raw.get("memory_gib", entry.get("memory_gib"))
    if not isinstance(gib, (int, float)) or isinstance(gib, bool) or gib <= 0:
        raise BadLaunch(f"GPU {name}: memory_gib is {gib!r}, a number above 0 was expected")
    free = raw.get("free_gib")
    mig = raw.get("mig")
    if isinstance(mig, Mapping):
        mig = mig.get("current")
    return Gpu(
        name=name,
        gib=float(gib),
        capability=capability_of(raw.get("compute_capability", entry.get("compute_capability"))),
        free_gib=float(free) if isinstance(free, (int, float)) and not isinstance(free, bool) else None,
        mig=(bool(mig) and str(mig).lower() not in ("disabled", "false", "none", "[n/a]")) or "MIG" in name.split(),
        nvlink=entry.get("nvlink"),
    )


def _gpus(raw: List[Any], gpus: Mapping[str, Any]) -> Tuple[Gpu, ...]:
    """Equal cards are read once."""
    read: List[Tuple[Any, Gpu]] = []
    found = []
    for one in raw:
        if not isinstance(one, Mapping):
            raise BadLaunch(f"a GPU is {one!r}: name and memory_gib were expected")
        same = next((gpu for entry, gpu in read if entry == one), None)
        if same is None:
            same = _gpu(one, gpus)
            read.append((one, same))
        found.append(same)
    return tuple(found)


def arguments(raw: Mapping[str, Any]) -> Dict[str, Any]:
    """Long names without dashes, in the spelling of a --config file; a switch's no- form as false."""
    found: Dict[str, Any] = {}
    for written, value in raw.items():
        name = str(written).lstrip("-").replace("_", "-")
        name = "compilation-config" if re.fullmatch(r"O([0-9]|\..+)?", name) else SHORT.get(name, name)
        found[name] = value
    return found


def _overridden(config: Mapping[str, Any], override: Any) -> Mapping[str, Any]:
    """config.json with --hf-overrides on top (nested mappings are merged, ModelConfig)."""
    if isinstance(override, str):
        try:
            override = json.loads(override)
        except ValueError:
            return config
    if not isinstance(override, Mapping):
        return config
    merged = dict(config)
    for name, value in override.items():
        old = merged.get(name)
        merged[name] = {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


@dataclass(frozen=True)
class Case:
    """A launch that could be read."""

    gpus: Tuple[Gpu, ...]
    nodes: int
    config: Mapping[str, Any]
    text: Mapping[str, Any]
    shape: Optional[model_memory.Shape]
    shape_reason: str
    weights_bytes: Optional[int]
    version: str
    release: Tuple[int, ...]
    args: Dict[str, Any]
    links: Mapping[str, str]
    known: Known
    # Estimates of this model by everything that they depend on; shared by copies of the case with other arguments.
    estimates: Dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def per_node(self) -> int:
        return len(self.gpus) // self.nodes

    def whole(self, name: str, default: int = 1) -> int:
        """A size given as an argument; the default where it is missing or no whole number above 0."""
        value = size_of(self.args.get(name, default))
        return value if value and value > 0 else default

    @property
    def tensor(self) -> int:
        return self.whole("tensor-parallel-size")

    @property
    def pipeline(self) -> int:
        return self.whole("pipeline-parallel-size")

    @property
    def data(self) -> int:
        return self.whole("data-parallel-size")

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data * self.whole("prefill-context-parallel-size")

    @property
    def used(self) -> Tuple[Gpu, ...]:
        """The GPUs that the launch takes: the first ones, as many on each node."""
        if self.world >= len(self.gpus):
            return self.gpus
        if self.world % self.nodes or self.nodes == 1:
            return self.gpus[: self.world]
        share, each = self.world // self.nodes, self.per_node
        return tuple(self.gpus[node * each + i] for node in range(self.nodes) for i in range(share))

    @property
    def smallest(self) -> Gpu:
        return min(self.used, key=lambda gpu: gpu.gib)

    @property
    def capability(self) -> Optional[Tuple[int, int]]:
        """Of the oldest GPU in use."""
        told = [gpu.capability for gpu in self.used if gpu.capability]
        return min(told) if told else None

    def on(self, name: str) -> bool:
        """A switch that was given and is on."""
        value = self.args.get(name, False)
        return value is not False and (value in TRUE if not isinstance(value, (dict, list)) else True)

    def off(self, name: str) -> bool:
        return self.on(f"no-{name}") or str(self.args.get(name, "")).lower() == "false"

    @property
    def utilization(self) -> float:
        value = self.args.get("gpu-memory-utilization")
        try:
            share = float(value) if value is not None and not isinstance(value, bool) else 0.0
        except (TypeError, ValueError):
            share = 0.0
        return share if 0 < share <= 1 else self.defaults["gpu-memory-utilization"]

    @property
    def defaults(self) -> Dict[str, Any]:
        return defaults_of(self)

    @property
    def pooling(self) -> bool:
        task = str(self.args.get("task", ""))
        return (
            str(self.args.get("runner", "")) == "pooling"
            or task in ("embed", "embedding", "classify", "score", "reward")
            or str(self.args.get("convert", "")) in ("embed", "classify", "reward")
            or bool(self.shape and self.shape.pooling)
        )

    def number(self, names: Tuple[str, ...]) -> int:
        """The first of these fields of config.json that has a whole number; 0 where none has."""
        for name in names:
            value = self.text.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return 0

    @property
    def heads(self) -> int:
        return self.shape.heads if self.shape else self.number(model_shape.HEADS)

    @property
    def kv_heads(self) -> int:
        if self.shape:
            return self.shape.kv_heads
        return self.number(model_shape.KV_HEADS) or self.heads

    @property
    def layers(self) -> int:
        return self.shape.layers if self.shape else self.number(model_shape.LAYERS)

    @property
    def mla(self) -> bool:
        return self.shape.mla if self.shape else bool(self.text.get("kv_lora_rank"))

    @property
    def quantization(self) -> Optional[Dict[str, Any]]:
        return model_shape.quantization_of(self.config)

    def says(self, name: str, value: Any) -> str:
        """`gpu-memory-utilization 0.9`, as a message names it."""
        return f"--{name} {value}"


def defaults_of(case: Case) -> Dict[str, Any]:
    """What vLLM takes where an argument is missing: data/memory.yml, and what only the launch decides."""
    gpu = min(case.gpus, key=lambda g: g.gib)
    told = model_memory.defaults(case.known.memory, int(gpu.gib * GIB), gpu.name, case.version.lstrip("v"))
    tokens, seqs = told["max_num_batched_tokens"], told["max_num_seqs"]
    if case.release < (0, 8, 0):
        # The first engine: a whole prompt in one batch, 2048 tokens at least; above 32768 tokens in chunks of 2048
        # (engine/arg_utils.py and config.py of 0.6.6 and 0.7.3).
        length = max_length(case)[0] or 2048
        chunked = case.on("enable-chunked-prefill") or (length > 32768 and not case.off("enable-chunked-prefill"))
        tokens, seqs = (2048 if chunked else max(length, 2048)), 256
    if str(case.args.get("performance-mode", "")) == "throughput":
        tokens, seqs = 2 * tokens, 2 * seqs
    return {
        "gpu-memory-utilization": told["utilization"],
        "max-num-batched-tokens": tokens,
        "max-num-seqs": min(seqs, tokens),
    }


# Fields of config.json that bound the length, of which vLLM takes the least
# (derive_max_model_len_and_key in transformers_utils/model_arch_config_convertor.py).
LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
    "model_max_length",
    "max_target_positions",
)
# Kinds of rope scaling whose factor is already in max_position_embeddings (_get_and_verify_max_len in config/model.py).
SCALED = ("su", "longrope", "llama3", "deepseek_yarn", "deepseek_llama_scaling", "mrope", "default")


def max_length(case: Case) -> Tuple[Optional[int], str]:
    """The longest request that the model itself is made for, and the field that says so."""
    found = {n: case.text[n] for n in LENGTHS if _positive(case.text.get(n))}
    if case.shape and case.shape.max_positions and not found:
        found = {"max_positions": case.shape.max_positions}
    if not found:
        return None, ""
    field_name = min(found, key=lambda n: found[n])
    length = found[field_name]
    rope = case.args.get("rope-scaling") or case.text.get("rope_scaling") or case.text.get("rope_parameters")
    if isinstance(rope, str):
        try:
            rope = json.loads(rope)
        except ValueError:
            rope = None
    if isinstance(rope, Mapping) and "gemma3" not in str(case.text.get("model_type", "")):
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        factor = rope.get("factor")
        if kind == "yarn" and case.release < (0, 30, 0):
            length = rope.get("original_max_position_embeddings") or length
        scaled = kind in SCALED or (kind == "yarn" and case.release >= (0, 30, 0))
        if isinstance(factor, (int, float)) and not scaled:
            length = int(length * factor)
            field_name = f"{field_name} x rope factor {factor:g}"
    return int(length), field_name


# The text model that transformers takes where text_config names none (the default of the wrapper's config class).
TEXT_TYPES = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "mistral3": "mistral",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}


def _with_text_type(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner, own = config.get("text_config"), TEXT_TYPES.get(str(config.get("model_type")))
    if own and isinstance(inner, Mapping) and not inner.get("model_type"):
        return {**config, "text_config": {**inner, "model_type": own}}
    return config


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def read_case(launch: Mapping[str, Any], known: Known) -> Case:
    """Raises BadLaunch."""
    raw = launch.get("gpus")
    if not isinstance(raw, list) or not raw:
        raise BadLaunch("the launch names no gpus")
    nodes = launch.get("nodes", 1)
    if not _positive(nodes):
        raise BadLaunch(f"nodes is {nodes!r}, a whole number above 0 was expected")
    config, args = launch.get("model_config"), arguments(launch.get("args") or {})
    if not isinstance(config, Mapping):
        raise BadLaunch("the launch has no model_config (the content of config.json)")
    config = _with_text_type(_overridden(config, args.get("hf-overrides")))
    shape, reason = None, ""
    try:
        shape = model_memory.shape(config)
    except model_memory.Unknown as error:
        reason = error.reason
    weights = launch.get("weights_gib")
    size = int(weights * GIB) if isinstance(weights, (int, float)) and not isinstance(weights, bool) else None
    if size is None and shape is not None:
        try:
            size = model_memory.weights_of_config(shape)
        except model_memory.Unknown:
            size = None
    version = str(launch.get("vllm_version") or "")
    return Case(
        gpus=_gpus(raw, known.gpus),
        nodes=nodes,
        config=config,
        text=model_shape.text_of(config),
        shape=shape,
        shape_reason=reason,
        weights_bytes=size,
        version=version,
        release=release(version),
        args=args,
        links=launch.get("links") or {},
        known=known,
    )


def pairs(case: Case) -> List[str]:
    """The links among the GPUs of the first tensor-parallel group, where they are known."""
    group = range(min(case.tensor, case.per_node))
    names = [f"{i}-{j}" for i in group for j in group if i < j]
    return [name for name in names if name in case.links]
