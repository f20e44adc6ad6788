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
import math
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import model_memory, model_shape
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.findings import did_you_mean

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
    """capability is (9, 0); None where neither the launch nor data/gpus.yml tells it. sized is false for a MIG instance whose
    memory_gib nobody told: gib is the whole card's then, and no judgement of memory may go by it."""

    name: str
    gib: float
    capability: Optional[Tuple[int, int]]
    free_gib: Optional[float]
    mig: bool
    nvlink: Optional[str]  # all | pairs | none
    index: Optional[int] = None  # as the host's tools number it
    sized: bool = True


def release(version: str) -> Tuple[int, ...]:
    """(0, 26, 0) of 0.26.0, 0.26, v0.26.0+cu130."""
    found = re.match(r"v?(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?(?!\d)", str(version))
    if not found:
        raise BadLaunch(f"vllm_version is {shown(version)}: a release such as 0.26.0 was expected")
    return tuple(int(part or 0) for part in found.groups())


def size_of(value: Any) -> Optional[int]:
    """16384 of 16384, "16384", 16.384k or 16K; -1 of auto; None of anything else, as 1.5K or 16.5, which vLLM refuses
    (human_readable_int in utils/argparse_utils.py: 2**10 takes no decimals)."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    word = str(value).strip()
    if re.fullmatch(r"[-+]?\d{1,18}", word):
        return int(word)
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)([kKmMgGtT])", word)
    if found and ("." not in found.group(1) or found.group(2).islower()):
        number = found.group(1)
        return int((float(number) if "." in number else int(number)) * SIZES[found.group(2)])
    return -1 if word == "auto" else None


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


def shown(value: Any) -> str:
    """A value in a message: cut, and a number by its length where Python would not even print it."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        return f"a whole number of about {int(value.bit_length() * math.log10(2)) + 1} digits"
    if isinstance(value, (Mapping, list, tuple, set)):
        return {"dict": "a mapping", "list": "a list"}.get(type(value).__name__, f"a {type(value).__name__}")
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else f"{value} (a {type(value).__name__})"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _number(value: Any, what: str, most: float, zero: bool = False) -> float:
    """A finite number above 0 (or 0 as well) and at most `most`."""
    least = "0 or more" if zero else "above 0"
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not (value >= 0 if zero else value > 0)
        or value > most
    ):
        quotes = ", without quotes," if isinstance(value, str) else ""
        raise BadLaunch(f"{what} is {shown(value)}: a number{quotes} {least} and at most {most:g} was expected")
    return float(value)


def _keys(raw: Mapping[Any, Any], known: Tuple[str, ...], what: str) -> None:
    for key in raw:
        if key not in known:
            near = did_you_mean(key, known) if isinstance(key, str) else ""
            raise BadLaunch(
                f"{what} has the key {shown(key)}, which is not known. {near}It may have {', '.join(known)}"
            )


MOST_GIB = 1e6  # a petabyte: a number that a GPU or a model may have at most
MOST_GPUS = 65536
# id, confidence and source are remarks of whoever wrote the launch down; nothing is judged by them.
LAUNCH_KEYS = (
    "gpus",
    "nodes",
    "model_config",
    "weights_gib",
    "vllm_version",
    "args",
    "links",
    "id",
    "confidence",
    "source",
)
GPU_KEYS = ("name", "memory_gib", "compute_capability", "free_gib", "mig", "index")
NO_MIG = ("", "disabled", "false", "none", "n/a", "[n/a]")
LINK = re.compile(r"NV[1-9]\d?|PIX|PXB|PHB|NODE|SYS|SOC|XGMI|PCIE")
DEEPEST, LONGEST = 64, 500_000  # of nested values, and values in all


def _plain(value: Any, what: str, strict: bool) -> None:
    """Values as YAML and JSON have them, of a sane depth and size. strict: what becomes an argument, so also no date and no
    number that is not finite; config.json may have Infinity where nothing here looks."""
    most = 2**63 if strict else 10**40
    waiting, seen = [(value, what, 0)], 0
    while waiting:
        one, where, depth = waiting.pop()
        seen += len(one) if isinstance(one, (Mapping, list, tuple)) else 0
        if depth > DEEPEST or seen > LONGEST:
            raise BadLaunch(f"{what} is nested too deeply or holds too many values to be read")
        if isinstance(one, Mapping):
            for key, inner in one.items():
                if not isinstance(key, str) and (strict or not isinstance(key, (int, float))):
                    raise BadLaunch(f"{where} has the key {shown(key)}: a word was expected")
                waiting.append((inner, f"{where}.{key}"[:80], depth + 1))
        elif isinstance(one, (list, tuple)):
            waiting.extend((inner, f"{where}[{at}]"[:80], depth + 1) for at, inner in enumerate(one))
        elif isinstance(one, float):
            if strict and not math.isfinite(one):
                raise BadLaunch(f"{where} is {one}: a finite number was expected")
        elif isinstance(one, int):
            if not -most <= one <= most:
                raise BadLaunch(f"{where} is {shown(one)}: no option or size is that large")
        elif strict and not (one is None or isinstance(one, str)):
            raise BadLaunch(f"{where} is {shown(one)}: write it in quotes if it is a word")


def _mig(raw: Any, name: str) -> bool:
    value = raw.get("current") if isinstance(raw, Mapping) else raw
    if isinstance(value, str):
        word = value.lower()
        if word in NO_MIG:
            return False
        if word in ("enabled", "true") or re.fullmatch(r"(mig )?\dg\.\d+gb\S*", word):
            return True
    elif value is None or isinstance(value, bool):
        return bool(value)
    raise BadLaunch(f"GPU {name}: mig is {shown(value)}: true, false, Enabled or Disabled was expected")


def _gpu(raw: Mapping[str, Any], gpus: Mapping[str, Any]) -> Gpu:
    _keys(raw, GPU_KEYS, "a GPU")
    name = raw.get("name")
    if name is not None and not isinstance(name, str):
        raise BadLaunch(f"a GPU's name is {shown(name)}: a word was expected")
    name = name or "GPU"
    entry = known_gpu(name, gpus)
    mig = _mig(raw.get("mig"), name) or "MIG" in name.split()
    told = raw.get("memory_gib")
    gib = entry.get("memory_gib") if told is None else told
    capability = raw.get("compute_capability")
    if capability is None:
        capability = entry.get("compute_capability")
    elif isinstance(capability, bool) or not isinstance(capability, (float, str)) or not capability_of(capability):
        raise BadLaunch(f"GPU {name}: compute_capability is {shown(capability)}: two numbers such as 9.0 were expected")
    free = raw.get("free_gib")
    return Gpu(
        name=name,
        gib=_number(gib, f"GPU {name}: memory_gib", MOST_GIB),
        capability=capability_of(capability),
        free_gib=None if free is None else _number(free, f"GPU {name}: free_gib", MOST_GIB, zero=True),
        mig=mig,
        nvlink=entry.get("nvlink"),
        sized=not mig or told is not None,
    )


def _gpus(raw: List[Any], gpus: Mapping[str, Any]) -> Tuple[Gpu, ...]:
    """Equal cards are read once."""
    if len(raw) > MOST_GPUS:
        raise BadLaunch(f"gpus has {len(raw)} entries: at most {MOST_GPUS} were expected")
    read: List[Tuple[Any, Gpu]] = []
    found = []
    for one in raw:
        if not isinstance(one, Mapping):
            raise BadLaunch(f"a GPU is {shown(one)}: name and memory_gib were expected")
        card = {key: value for key, value in one.items() if key != "index"}
        same = next((gpu for entry, gpu in read if entry == card), None)
        if same is None:
            same = _gpu(card, gpus)
            read.append((card, same))
        index = one.get("index")
        if index is not None and (isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < MOST_GPUS):
            raise BadLaunch(f"GPU {same.name}: index is {shown(index)}: a whole number, 0 or more, was expected")
        found.append(same if index is None else replace(same, index=index))
    return tuple(found)


def _links(raw: Any, count: int) -> Mapping[str, str]:
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise BadLaunch(f'links is {shown(raw)}: a mapping such as {{"0-1": NV18}} was expected')
    links = {}
    for pair, link in raw.items():
        found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", pair) if isinstance(pair, str) else None
        one, other = sorted(map(int, found.groups())) if found else (0, 0)
        if not one < other < count:
            raise BadLaunch(
                f"links has the pair {shown(pair)}: two places of the {count} GPUs, such as 0-1, were expected"
            )
        if not isinstance(link, str) or not LINK.fullmatch(link.upper()):
            raise BadLaunch(f"links.{pair} is {shown(link)}: NV18, PIX, PXB, PHB, NODE or SYS was expected")
        links[f"{one}-{other}"] = link
    return links


def arguments(raw: Mapping[str, Any], number: Tuple[int, ...] = (999,)) -> Dict[str, Any]:
    """Long names without dashes, in the spelling of a --config file; a switch's no- form as false.

    -O3 is --optimization-level 3 (utils/argparse_utils.py), which 0.12.0 is the first release known to have; before, it is
    the level of --compilation-config. What follows a dot is a field inside of the option, and keeps its spelling.
    """
    found: Dict[str, Any] = {}
    level = "optimization-level" if number >= (0, 12, 0) else "compilation-config.level"
    for written, value in raw.items():
        head, dot, inner = written.lstrip("-").partition(".")
        name = head.replace("_", "-")
        glued = re.fullmatch(r"O=?(\d)", name)
        if glued and not dot:
            found[level] = int(glued.group(1))
        elif name == "O":
            found[f"compilation-config{dot}{inner}" if dot else level] = value
        else:
            found[SHORT.get(name, name) + dot + inner] = value
    return found


def _loaded(value: Any) -> Any:
    """A value that may be JSON in quotes; as it is where it is none."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _merged(config: Mapping[str, Any], override: Mapping[str, Any]) -> Dict[str, Any]:
    merged = dict(config)
    for name, value in override.items():
        old = merged.get(name)
        merged[name] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _overridden(config: Mapping[str, Any], args: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json with --hf-overrides on top, whole or field by field (nested mappings are merged, ModelConfig)."""
    for name, value in args.items():
        head, dot, inner = name.partition(".")
        if head != "hf-overrides":
            continue
        override = _loaded(value)
        _plain(override, f"--{name}", strict=False)
        for part in reversed(inner.split(".") if dot else ()):
            override = {part: override}
        if isinstance(override, Mapping):
            config = _merged(config, override)
    return config


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
        return self.tensor * self.pipeline * self.data * self.prefill

    @property
    def prefill(self) -> int:
        return self.whole("prefill-context-parallel-size")

    @property
    def contexts(self) -> int:
        """GPUs that share the KV cache of one request (decode context parallelism)."""
        return self.whole("decode-context-parallel-size")

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

    def given(self, name: str) -> bool:
        """An option that was given, whole or by one of its fields (`--speculative-config.method`)."""
        return any(written.partition(".")[0] == name for written in self.args)

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
        # Left open, it is the lesser of its own and of the batch that was asked for (get_batch_defaults in engine/arg_utils.py).
        "max-num-seqs": min(seqs, case.whole("max-num-batched-tokens", tokens)),
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
MOST_ROPE = 1e6
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
    rope = _loaded(rope)
    if isinstance(rope, Mapping) and "gemma3" not in str(case.text.get("model_type", "")):
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        factor = rope.get("factor")
        if kind == "yarn" and case.release < (0, 30, 0):
            own = rope.get("original_max_position_embeddings")
            length = own if _positive(own) else length
        scaled = kind in SCALED or (kind == "yarn" and case.release >= (0, 30, 0))
        usable = isinstance(factor, (int, float)) and not isinstance(factor, bool) and 0 < factor <= MOST_ROPE
        if usable and not scaled:
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
    """Raises BadLaunch, for whatever was written: one sentence with the field and its value."""
    if not isinstance(launch, Mapping):
        raise BadLaunch(f"the launch is {shown(launch)}: a mapping with {', '.join(LAUNCH_KEYS[:6])} was expected")
    _keys(launch, LAUNCH_KEYS, "the launch")
    raw = launch.get("gpus")
    if not isinstance(raw, list) or not raw:
        raise BadLaunch("the launch names no gpus (a list)")
    nodes = launch.get("nodes", 1)
    if not _positive(nodes) or nodes > len(raw):
        raise BadLaunch(
            f"nodes is {shown(nodes)}: a whole number above 0, at most one a GPU ({len(raw)}), was expected"
        )
    gpus = _gpus(raw, known.gpus)
    version = launch.get("vllm_version")
    if not isinstance(version, str):
        quotes = ", in quotes (0.10 is the number 0.1 without)" if isinstance(version, (int, float)) else ""
        raise BadLaunch(f'vllm_version is {shown(version)}: a release such as "0.26.0"{quotes} was expected')
    number = release(version)
    args = _args(launch.get("args"), number)
    config = _config(launch.get("model_config"), args)
    shape, reason = None, ""
    try:
        shape = model_memory.shape(config)
    except model_memory.Unknown as error:
        reason = error.reason
    weights = launch.get("weights_gib")
    size = None if weights is None else int(_number(weights, "weights_gib", MOST_GIB) * GIB)
    if size is None and shape is not None:
        size = model_memory.weights_of_config(shape)
    return Case(
        gpus=gpus,
        nodes=nodes,
        config=config,
        text=model_shape.text_of(config),
        shape=shape,
        shape_reason=reason,
        weights_bytes=size,
        version=version,
        release=number,
        args=args,
        links=_links(launch.get("links"), len(gpus)),
        known=known,
    )


def _args(raw: Any, number: Tuple[int, ...]) -> Dict[str, Any]:
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise BadLaunch(
            f"args is {shown(raw)}: a mapping of options and values, such as --max-model-len: 8192, was expected"
        )
    _plain(raw, "args", strict=True)
    return arguments(raw, number)


def _config(config: Any, args: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(config, Mapping):
        raise BadLaunch("the launch has no model_config (the content of config.json, a mapping)")
    _plain(config, "model_config", strict=False)
    config = _with_text_type(_overridden(config, args))
    for part in (config, model_shape.text_of(config)):
        own = part.get("quantization_config")
        if own is not None and not isinstance(own, Mapping):
            raise BadLaunch(f"model_config.quantization_config is {shown(own)}: a mapping was expected")
    try:
        model_shape.quantization_of(config)
    except model_memory.Unknown as error:
        raise BadLaunch(f"model_config: {error.reason}") from error
    return config


def pairs(case: Case) -> List[str]:
    """The links among the GPUs of the first tensor-parallel group, where they are known."""
    group = range(min(case.tensor, case.per_node))
    names = [f"{i}-{j}" for i in group for j in group if i < j]
    return [name for name in names if name in case.links]
