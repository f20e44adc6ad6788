# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Does a launch fit into its GPUs: weights, KV cache for the longest request, free memory, head room.

The order is vLLM's own at start (v1/worker/utils.py, request_memory; v1/core/kv_cache_utils.py, check_enough_kv_cache_memory):
free memory against the asked share, then weights and activations within it, then the KV cache of one request of
max-model-len in what is left. The numbers are model_memory.py's.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import model_memory, model_shape
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.launch_case import GIB, Case, Remark, max_length, size_of
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.launch_quantization import (
    dtype_of,
    fp8_cache_runs,
    narrowed,
    on_load,
)

# The prediction's own doubt. Within it a launch is tight, neither right nor wrong.
DOUBT_SHARE, DOUBT_GIB = 0.25, 0.3  # of what is fitted, and besides
# What may be held more than that. The first engine (before 0.8.5) is fitted to no launch; of a vision tower's profile nothing
# is fitted (1.6 GiB a GPU more, Qwen2.5-VL-72B on four A100, vllm-project/vllm#16570); what CUDA and NCCL take was measured
# on H200s only.
DOUBT_BEFORE = (((0, 8, 5), 0.5),)
DOUBT_OUTSIDE = 0.5
DOUBT_MULTIMODAL_GIB = 1.6
# Of the share, for the KV cache; a launch of vllm-project/vllm#16570 with a twentieth left started and then ran out of memory.
LEAST_KV_SHARE = 0.1
LEAST_REQUESTS = 1.5  # of the full length, at once


@dataclass(frozen=True)
class Memory:
    """One GPU of a launch, the fullest one. reason says why nothing is known, where estimate is None; even_weights is false
    where not even weights divided evenly may be held against the GPU."""

    estimate: Optional[model_memory.Estimate]
    length: Optional[int]
    own_length: bool
    reason: str = ""
    total_gib: Optional[float] = None  # the GPU's, as CUDA reports it
    even_weights: bool = True

    def as_dict(self) -> Dict[str, Any]:
        found = self.estimate
        names = (
            "weights_gib",
            "kv_gib",
            "kv_tokens",
            "max_concurrency",
            "kv_bytes_per_token",
            "activation_gib",
            "cudagraph_gib",
            "non_torch_gib",
            "outside_gib",
            "requested_gib",
            "request_gib",
        )
        told: Dict[str, Any] = {name: None if found is None else getattr(found, name) for name in names}
        told = {name: round(value, 4) if isinstance(value, float) else value for name, value in told.items()}
        return {**told, "total_gib": self.total_gib, "max_model_len": self.length, "unknown": self.reason or None}


def cache_dtype_of(case: Case) -> str:
    """The dtype of the KV cache: what was asked, or else the model's; twice as wide for float32."""
    asked = str(case.args.get("kv-cache-dtype", "auto"))
    return "float32" if asked == "auto" and dtype_of(case) == "float32" else asked


def offloaded_bytes(case: Case) -> int:
    """Weights that --cpu-offload-gb, a number for each GPU, keeps in the host's memory."""
    try:
        each = float(case.args.get("cpu-offload-gb") or 0)
    except (TypeError, ValueError):
        each = 0.0
    if not math.isfinite(each):
        return 0
    return int(min(max(each, 0.0) * GIB * case.tensor * case.pipeline, case.weights_bytes or 0))


def kept_shape(case: Case) -> Optional[model_memory.Shape]:
    """The shape, without windows where the release keeps every token of every layer all the same: before 0.9.2, where the
    manager of mixed layers is off, and for chunked layers before 0.14, when keeping them apart had to be asked for
    (VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE in envs.py)."""
    shape = case.shape
    if shape is None:
        return None
    kinds = {layer.kind for kept in shape.kv_layers for layer in kept}
    mixed = bool(kinds & {model_shape.FULL, model_shape.MLA}) and bool(
        kinds & {model_shape.SLIDING, model_shape.CHUNKED}
    )
    off = (
        case.release < (0, 9, 2)
        or case.on("disable-hybrid-kv-cache-manager")
        or (model_shape.CHUNKED in kinds and case.release < (0, 14, 0))
    )
    if not (mixed and off):
        return shape
    layers = tuple(
        tuple(
            replace(layer, kind=model_shape.FULL, window=0)
            if layer.kind in (model_shape.SLIDING, model_shape.CHUNKED)
            else layer
            for layer in kept
        )
        for kept in shape.kv_layers
    )
    return replace(shape, kv_layers=layers)


# Experts are divided over the copies of data parallelism in 0.26.0 and 0.33.0 (flatten_tp_across_dp_and_pcp in
# layers/fused_moe/config.py); what older releases do was not read.
EXPERTS_OVER_COPIES = (0, 26, 0)


def _not_judged(case: Case) -> str:
    """Why memory of this launch may not be told, though the model's shape is; empty where it may."""
    card = next((gpu for gpu in case.used if not gpu.sized), None)
    if card is not None:
        return f"{card.name} is a MIG instance, and memory_gib does not say how large it is"
    method = on_load(case)
    if method and (narrowed(case) is None or (narrowed(case) != 1.0 and offloaded_bytes(case))):
        return (
            f"--quantization {method} makes the weights smaller while loading, and how much they take is not known here"
        )
    experts = bool(case.shape and case.shape.experts) or any(
        _has_number(case.text, name) for name in model_shape.EXPERTS
    )
    if experts and case.data * case.prefill > 1 and (case.shape is None or case.release < EXPERTS_OVER_COPIES):
        return (
            f"experts over {case.data * case.prefill} copies: how vLLM {case.version} divides these is not known here"
        )
    return ""


def _has_number(text: Mapping[str, Any], name: str) -> bool:
    value = text.get(name)
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def memory_of(case: Case, length: Optional[int] = None) -> Memory:
    """What vLLM will find; for `length` instead of the launch's own max-model-len where it is given."""
    asked = size_of(case.args.get("max-model-len", ""))
    own, _name = max_length(case)
    wanted = length or (asked if asked and asked > 0 else own) or 2048
    mine = length is None and not (asked and asked > 0)
    shape = kept_shape(case)
    reason = _not_judged(case)
    if reason:
        return Memory(None, wanted, mine, reason, even_weights=False)
    if shape is None:
        return Memory(None, wanted, mine, case.shape_reason)
    if case.weights_bytes is None:
        return Memory(None, wanted, mine, "the size of the weights is not known")
    defaults = case.defaults
    given = {
        name: size_of(case.args.get(name, "")) for name in ("max-num-batched-tokens", "max-num-seqs", "block-size")
    }
    settings: Dict[str, Any] = {
        "utilization": case.utilization,
        "max_model_len": wanted,
        "max_num_seqs": given["max-num-seqs"] or defaults["max-num-seqs"],
        "max_num_batched_tokens": given["max-num-batched-tokens"] or defaults["max-num-batched-tokens"],
        "cache_dtype": cache_dtype_of(case),
        "block_size": given["block-size"],
        "enforce_eager": case.on("enforce-eager"),
        "contexts": case.contexts,
        "copies": case.data * case.prefill,
        "whole_experts": case.on("enable-expert-parallel"),
        "narrowed": narrowed(case) or 1.0,
    }
    weights = case.weights_bytes - offloaded_bytes(case)
    key = (weights, case.smallest.gib, case.tensor, case.pipeline, *settings.values())
    if key not in case.estimates:
        try:
            case.estimates[key] = model_memory.estimate(
                shape,
                weights,
                int(case.smallest.gib * GIB),
                case.tensor,
                case.pipeline,
                memory=case.known.memory,
                version=case.version.lstrip("v"),
                **settings,
            )
        except model_memory.Unknown as error:
            case.estimates[key] = error.reason
        except (ArithmeticError, ValueError, LookupError) as error:
            case.estimates[key] = f"the numbers of config.json make no model ({error})"
    found = case.estimates[key]
    if isinstance(found, str):
        return Memory(None, wanted, mine, found)
    return Memory(found, wanted, mine, total_gib=case.smallest.gib)


def doubt_gib(found: model_memory.Estimate) -> float:
    """How much more there may be than predicted."""
    return DOUBT_SHARE * (found.activation_gib + found.non_torch_gib) + DOUBT_GIB


def shortage_gib(case: Case, found: model_memory.Estimate) -> float:
    """How much less there may be than predicted."""
    old = next((share for before, share in DOUBT_BEFORE if case.release < before), 0.0) * found.activation_gib
    seen = DOUBT_MULTIMODAL_GIB if case.shape and case.shape.multimodal else 0.0
    return max(doubt_gib(found), old) + seen


def left_gib(found: model_memory.Estimate) -> float:
    """What is left of the share for KV; below 0 where even the rest does not fit."""
    return found.requested_gib - found.weights_gib - found.activation_gib - found.non_torch_gib


def room_gib(found: model_memory.Estimate) -> float:
    """KV cache that one request of the longest length may take."""
    return found.kv_gib if found.kv_gib > 0 else left_gib(found)


def memory_rule(case: Case, memory: Memory) -> Iterator[Remark]:
    yield from _free(case)
    found = memory.estimate
    if found is None:
        message = f"memory cannot be told: {memory.reason}"
        yield Remark(
            "memory_unknown", "info", message, "Give weights_gib and a config.json whose architecture is known"
        )
        if memory.even_weights:
            yield from _bare_weights(case)
        return
    yield from _uncounted(case)
    weights = list(_weights(case, found))
    yield from weights
    if not weights:
        yield from _kv(case, memory, found)
        yield from _headroom(case, memory, found)


def _uncounted(case: Case) -> Iterator[Remark]:
    """What lies on the GPU besides, and is in no number here."""
    parts = []
    settings = case.args.get("speculative-config")
    text = f"{settings} {case.args.get('speculative-config.method', '')}"
    if (case.given("speculative-config") or case.given("speculative-model")) and "ngram" not in text:
        parts.append("the draft model of speculative decoding and its KV cache")
    if case.on("enable-lora"):
        parts.append("the LoRA adapters of --enable-lora")
    if parts:
        message = f"not counted: {' and '.join(parts)}; the KV cache is smaller than told by as much"
        yield Remark("memory_uncounted", "info", message, "Leave room for it, and read the KV cache's size in the log")


def _free(case: Case) -> Iterator[Remark]:
    if case.args.get("kv-cache-memory-bytes") and case.release < (0, 10, 2):
        return
    short: List[Tuple[float, Any]] = []
    for gpu in case.used:
        if gpu.sized and gpu.free_gib is not None and gpu.free_gib < gpu.gib * case.utilization:
            short.append((gpu.gib * case.utilization - gpu.free_gib, gpu))
    if short:
        missing, gpu = max(short, key=lambda item: item[0])
        asked = gpu.gib * case.utilization
        message = (
            f"free memory {gpu.free_gib:.2f} of {gpu.gib:.2f} GiB on {gpu.name} is less than the asked share {asked:.2f} GiB "
            f"(--gpu-memory-utilization {case.utilization:g}): {missing:.2f} GiB short, and vLLM refuses to start"
        )
        share = math.floor(100 * gpu.free_gib / gpu.gib) / 100 - 0.01
        fix = "End the process that holds the rest (an orphan of a killed server holds memory, too)"
        if share > 0:
            fix += f", or --gpu-memory-utilization {share:.2f}"
        yield Remark("free_memory", "error", message, fix)


def _bare_weights(case: Case) -> Iterator[Remark]:
    """Without a known shape: weights divided evenly over tensor and pipeline, the best that can be."""
    if case.weights_bytes is None:
        return
    each = (case.weights_bytes - offloaded_bytes(case)) / GIB / (case.tensor * case.pipeline)
    share = case.smallest.gib * case.utilization
    if each >= share:
        yield _too_heavy(case, each, share)


def _too_heavy(case: Case, each: float, share: float, besides: float = 0.0) -> Remark:
    parts = case.tensor * case.pipeline
    whole = each * parts if narrowed(case) != 1.0 else (case.weights_bytes or 0) / GIB
    spread = f"{whole:.2f} GiB of weights" if parts == 1 else f"{whole:.2f} GiB of weights over {parts} GPUs"
    more = f" and {besides:.2f} GiB for activations" if besides else ""
    gpu = case.smallest
    message = (
        f"the weights do not fit: {spread}, {each:.2f} GiB a GPU{more}, against {share:.2f} GiB that vLLM may take of "
        f"{gpu.name} ({gpu.gib:.2f} GiB x {case.utilization:g})"
    )
    return Remark("weights_fit", "error", message, _more_gpus(case, whole, share))


def _more_gpus(case: Case, whole: float, share: float) -> str:
    need = math.ceil(whole / max(share * 0.9, 0.1))
    have = len(case.gpus)
    bits = (case.quantization or {}).get("bits")
    smaller = (
        ""
        if case.quantization or on_load(case)
        else f", or a checkpoint in fp8 ({whole / 2:.0f} GiB) or 4 bits ({whole / 3.6:.0f} GiB)"
    )
    if (bits or on_load(case)) and not smaller:
        smaller = ", or a smaller model"
    if need <= have and need > case.tensor * case.pipeline:
        return f"Spread it over {need} or more of the {have} GPUs{smaller}"
    return f"At least {need} such GPUs{smaller}"


def _weights(case: Case, found: model_memory.Estimate) -> Iterator[Remark]:
    left = left_gib(found)
    if found.weights_gib >= found.requested_gib or left + doubt_gib(found) <= 0:
        yield _too_heavy(case, found.weights_gib, found.requested_gib, found.activation_gib + found.non_torch_gib)


def _kv(case: Case, memory: Memory, found: model_memory.Estimate) -> Iterator[Remark]:
    if size_of(case.args.get("max-model-len", "")) == -1 or found.request_gib <= 0:
        return
    given = size_of(case.args.get("kv-cache-memory-bytes", ""))
    room = given / GIB if given and given > 0 else room_gib(found)
    need = found.request_gib
    if need <= room - (0.0 if given else shortage_gib(case, found)):
        return
    wrong = need > room + (0.0 if given else doubt_gib(found))
    safe = room if given else max(room - shortage_gib(case, found), room / 2)
    longest = longest_length(case, memory, safe)
    which = (
        f"--max-model-len, left to the model's own {memory.length},"
        if memory.own_length
        else f"--max-model-len {memory.length}"
    )
    verb = "does not fit" if wrong else "may not fit"
    message = (
        f"{which} {verb}: one request of that length needs {need:.2f} GiB of KV cache a GPU, and {max(room, 0):.2f} GiB are "
        f"available ({found.requested_gib:.2f} GiB asked for, less weights {found.weights_gib:.2f}, activations "
        f"{found.activation_gib:.2f}, other {found.non_torch_gib:.2f})"
    )
    fix = f"--max-model-len {longest} or less" if longest else "More or larger GPUs"
    if case.args.get("kv-cache-dtype") is None and not (case.quantization or {}).get("kv_cache_dtype"):
        fix += "; --kv-cache-dtype fp8 halves the KV cache" if fp8_cache_runs(case) else ""
        fix += "; more tensor or pipeline parallelism divides weights and KV cache"
    yield Remark("kv_fit", "error" if wrong else "warning", message, fix)


def longest_length(case: Case, memory: Memory, room: float) -> int:
    """The longest request that fits into `room` GiB, in steps of 1024 tokens (below 1024: of 256)."""
    shape = kept_shape(case)
    if shape is None or memory.length is None or room <= 0:
        return 0
    low, high = 0, memory.length
    tokens = size_of(case.args.get("max-num-batched-tokens", "")) or case.defaults["max-num-batched-tokens"]
    while high - low > 255:
        middle = (low + high) // 2
        try:
            need = model_memory.kv_bytes_per_request(
                shape,
                middle,
                case.tensor,
                case.pipeline,
                cache_dtype_of(case),
                block_size=size_of(case.args.get("block-size", "")),
                max_num_batched_tokens=tokens,
                contexts=case.contexts,
                version=case.version.lstrip("v"),
            )
        except model_memory.Unknown:
            return 0
        low, high = (middle, high) if need <= room * GIB else (low, middle)
    return low // 1024 * 1024 or low // 256 * 256


def _headroom(case: Case, memory: Memory, found: model_memory.Estimate) -> Iterator[Remark]:
    gpu = case.smallest
    outside = gpu.gib - found.requested_gib
    numbers = (
        f"weights {found.weights_gib:.2f}, activations {found.activation_gib:.2f} and KV cache {found.kv_gib:.2f} of "
        f"{gpu.gib:.2f} GiB"
    )
    if found.outside_gib > (1 + DOUBT_OUTSIDE) * outside + DOUBT_GIB:
        message = (
            f"--gpu-memory-utilization {case.utilization:g} leaves {outside:.2f} GiB of {gpu.name} for CUDA, NCCL and CUDA "
            f"graphs, which take about {found.outside_gib:.2f} GiB: {numbers}"
        )
        share = math.floor(100 * (gpu.gib - found.outside_gib) / gpu.gib) / 100
        yield Remark("headroom", "warning", message, f"--gpu-memory-utilization {share:.2f} or less")
    elif found.kv_gib < LEAST_KV_SHARE * found.requested_gib and found.request_gib > 0:
        message = (
            f"little head room: the weights take {found.weights_gib:.2f} of the {found.requested_gib:.2f} GiB asked for, and "
            f"{found.kv_gib:.2f} GiB are left for the KV cache ({numbers}); a peak that was not foreseen takes all of it"
        )
        yield Remark("headroom", "warning", message, "More GPUs, or a checkpoint with fewer bits")
    elif 0 < found.max_concurrency < LEAST_REQUESTS and not case.pooling and found.request_gib <= room_gib(found):
        message = (
            f"the KV cache holds {found.kv_tokens} tokens, {found.max_concurrency:.2f} requests of the full length "
            f"{memory.length}: a second one waits or is preempted, and little is left for peaks ({numbers})"
        )
        halved = " --kv-cache-dtype fp8," if fp8_cache_runs(case) else ""
        yield Remark("headroom", "warning", message, f"A shorter --max-model-len,{halved} or more GPUs")


def with_args(case: Case, **changes: Any) -> Case:
    """The same launch with other arguments; names with _ for -."""
    args = {**case.args, **{name.replace("_", "-"): value for name, value in changes.items()}}
    return replace(case, args={name: value for name, value in args.items() if value is not None})
