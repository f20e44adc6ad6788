# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""How much GPU memory a model needs under vLLM: weights, KV cache, and what is held besides.

The KV cache follows vLLM's own rules to the byte (v1/kv_cache_interface.py, v1/core/kv_cache_utils.py and
platforms/interface.py of 0.26.0 and 0.32.0); tests/unit/test_model_memory.py compares it with what vLLM's classes answer
(scripts/validation/kv_specs.py). What is held besides is fitted to measurements: every such constant stands in
data/memory.yml with the measurement it comes from.

Sizes are bytes unless the name ends in _gib. Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils.model_families import shape
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.model_shape import (
    CHUNKED,
    FULL,
    MAMBA,
    MLA,
    SLIDING,
    Layer,
    Shape,
    State,
    Unknown,
)
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.model_weights import (
    read,
    stages,
    weights_of_config,
    weights_of_folder,
    weights_per_gpu,
)

__all__ = [
    "Estimate",
    "Pool",
    "Shape",
    "Term",
    "Unknown",
    "activation_bytes",
    "defaults",
    "estimate",
    "kv_bytes_per_request",
    "kv_bytes_per_token",
    "kv_pool",
    "read",
    "shape",
    "stages",
    "weights_of_config",
    "weights_of_folder",
    "weights_per_gpu",
]

GIB, MIB = 1 << 30, 1 << 20
BLOCK = 16  # CacheConfig.DEFAULT_BLOCK_SIZE, vllm/config/cache.py

# Bytes of one value. Formats that pack scales beside the values (int8_per_token_head, nvfp4, ...) are not known here.
SIZES = {
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
}


def element_size(known: Shape, cache_dtype: str) -> int:
    """Bytes of one value in the KV cache. auto: the checkpoint's own KV scheme, or else the dtype of the model, which is
    two bytes wide unless vLLM is told to run it as float32 (give "float32" then)."""
    if known.own_cache_dtype:
        return 2
    if cache_dtype == "auto":
        own = (known.quantization or {}).get("kv_cache_dtype")
        if own and own not in SIZES:
            raise Unknown(f"the checkpoint's own KV cache is {own}: its size is not known here")
        return SIZES[own] if own else 2
    if cache_dtype not in SIZES:
        raise Unknown(f"kv-cache-dtype {cache_dtype} packs scales beside the values: its size is not known here")
    return SIZES[cache_dtype]


def release(version: Optional[str]) -> Tuple[int, ...]:
    """(0, 26, 0) of "0.26.0" or "0.26.0+cu130"; no version is the newest."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version or "")
    return tuple(int(part or 0) for part in found.groups()) if found else (999, 0, 0)


@dataclass(frozen=True)
class Page:
    """What one layer takes of one block of the pool."""

    kind: str
    size: int
    block: int  # tokens; of a state: the whole request
    window: int = 0

    def blocks(self, length: int, in_flight: int, states: int, contexts: int = 1) -> int:
        """Blocks that a request of `length` tokens holds at most, while `in_flight` tokens are not yet settled. contexts:
        GPUs that share its tokens (FullAttentionSpec.max_memory_usage_bytes in v1/kv_cache_interface.py)."""
        if contexts > 1:
            if self.kind not in (FULL, MLA):
                raise Unknown("layers with a window or a state under decode context parallelism are not known here")
            return -(-length // (self.block * contexts))
        if self.kind == MAMBA:
            return states
        if self.kind == SLIDING:
            return -(-min(self.window - 1 + in_flight, length) // self.block) + 1
        if self.kind == CHUNKED:
            return -(-min(self.window + in_flight, length) // self.block)
        return -(-length // self.block)


def _heads(kv_heads: int, tensor: int) -> int:
    """KV heads on one GPU: replicated once there are more GPUs than heads."""
    return max(1, kv_heads // tensor)


def _token_bytes(layer: Layer, tensor: int, size: int) -> int:
    if layer.kind == MLA:
        return layer.head_dim * size
    return _heads(layer.kv_heads, tensor) * (layer.head_dim + layer.head_dim_v) * size


def _divided(value: int, tensor: int, what: str) -> int:
    if value % tensor:
        raise Unknown(f"{value} {what} cannot be divided over {tensor} GPUs")
    return value // tensor


def state_bytes(state: State, tensor: int) -> int:
    """The constant state of one layer on one GPU (MambaStateShapeCalculator in layers/mamba/mamba_utils.py)."""
    recurrent = SIZES.get(state.dtype, 2)
    width, kernel = state.inner, state.conv_kernel - 1
    if state.kind == "mamba1":
        channels = _divided(width, tensor, "channels of the state")
        return channels * kernel * 2 + channels * state.size * recurrent
    if state.kind == "mamba2":
        # Groups are added until every GPU has those that its heads need.
        groups = state.groups if state.groups % tensor == 0 else tensor
        width += 2 * groups * state.size
        recurrent *= _divided(state.heads, tensor, "heads of the state") * state.head_dim * state.size
        return _divided(width, tensor, "channels of the convolution") * kernel * 2 + recurrent
    if state.kind == "gated_delta_net":
        width += 2 * state.key_heads * state.key_dim
        recurrent *= _divided(state.heads, tensor, "heads of the state") * state.head_dim * state.key_dim
        return _divided(width, tensor, "channels of the convolution") * kernel * 2 + recurrent
    return _divided(width, tensor, "channels of the convolution") * kernel * 2


def kv_bytes_per_token(
    known: Shape, tensor: int = 1, pipeline: int = 1, cache_dtype: str = "auto", version: Optional[str] = None
) -> int:
    """Bytes that one more token takes on one GPU while every layer still keeps it, on the largest pipeline stage.

    A layer with a window grows no further after it, and constant states (mamba) are not counted: kv_bytes_per_request
    has them. The same in all versions.
    """
    size = element_size(known, cache_dtype)
    tokens = [
        sum(_token_bytes(layer, tensor, size) for layer in kept if layer.kind != MAMBA) for kept in known.kv_layers
    ]
    return max(sum(tokens[start:end]) for start, end in stages(known.layers, pipeline))


@dataclass(frozen=True)
class Pool:
    """The KV pool of one GPU: groups of layers draw blocks of one size from it."""

    block_bytes: int  # on the fullest stage
    pages: Tuple[Page, ...]  # one a group
    states: int  # blocks that a constant state takes

    def blocks(self, length: int, in_flight: int, contexts: int = 1) -> int:
        """Blocks that one request of `length` tokens holds at most, over all groups."""
        return sum(page.blocks(length, in_flight, self.states, contexts) for page in self.pages)


def kv_pool(
    known: Shape,
    tensor: int = 1,
    pipeline: int = 1,
    cache_dtype: str = "auto",
    *,
    block_size: Optional[int] = None,
    hybrid: bool = True,
    version: Optional[str] = None,
) -> Pool:
    """How vLLM divides the layers into groups (get_kv_cache_groups), and how large a block is on the fullest stage.

    block_size  --block-size; None is vLLM's own choice, 16 tokens. Attention kernels that want larger blocks only round
                coarser.
    hybrid      false is --disable-hybrid-kv-cache-manager: layers with a window keep every token
    """
    size, block = element_size(known, cache_dtype), block_size or BLOCK
    state = state_bytes(known.state, tensor) if known.state else 0
    if known.hybrid:
        block, state = _aligned(known, tensor, size, block, state)
    layers = [[_page(layer, tensor, size, block, state) for layer in kept] for kept in known.kv_layers]
    if not hybrid:
        layers = _without_windows(layers)
    grouped = _groups(_one_size([(i, page) for i, kept in enumerate(layers) for page in kept]))
    block_bytes = 0
    for start, end in stages(known.layers, pipeline):
        widest = max((sum(p.size for i, p in group if start <= i < end) for group in grouped), default=0)
        block_bytes = max(block_bytes, widest)
    return Pool(block_bytes, tuple(group[0][1] for group in grouped), _states(known, version))


def _states(known: Shape, version: Optional[str]) -> int:
    """States that one request holds: one, or with prefix caching (mamba_cache_mode align) two, and of mamba2 a third one
    for a checkpoint within the prompt. Hybrid models have prefix caching by default in 0.28.0 and not yet in 0.26.0
    (engine/arg_utils.py); the checkpoint is in 0.30.0 and not in 0.28.0."""
    number = release(version)
    if not known.state or not known.hybrid or number <= (0, 26, 0):
        return 1
    return 3 if known.state.kind == "mamba2" and number > (0, 28, 0) else 2


def _page(layer: Layer, tensor: int, size: int, block: int, state: int) -> Page:
    if layer.kind == MAMBA:
        return Page(MAMBA, state, 0)
    return Page(layer.kind, block * _token_bytes(layer, tensor, size), block, layer.window)


def _aligned(known: Shape, tensor: int, size: int, block: int, state: int) -> Tuple[int, int]:
    """Block and padded state of a hybrid model: the block grows until an attention page holds a state, and the state is
    padded to that page (Platform._align_hybrid_block_size)."""
    layer = next(layer for kept in known.kv_layers for layer in kept if layer.kind != MAMBA)
    token = _token_bytes(layer, tensor, size)
    block = max(block, block * -(-state // (block * token)))
    return block, block * token


def _without_windows(layers: List[List[Page]]) -> List[List[Page]]:
    """unify_hybrid_kv_cache_specs: windows are dropped where some layer keeps everything."""
    if not any(page.kind in (FULL, MLA) for kept in layers for page in kept):
        return layers
    return [
        [replace(page, kind=FULL, window=0) if page.kind in (SLIDING, CHUNKED) else page for page in kept]
        for kept in layers
    ]


def _one_size(layers: List[Tuple[int, Page]]) -> List[Tuple[int, Page]]:
    """unify_kv_cache_spec_page_size: smaller pages take more tokens. Not for layers that may differ in one group."""
    pages = {page for _i, page in layers}
    if len({page.size for page in pages}) < 2 or len({(p.kind, p.window) for p in pages}) == 1:
        return layers
    largest = max(page.size for page in pages)
    if any(largest % page.size for page in pages):
        raise Unknown(
            "layers keep pages of sizes that do not divide each other: how vLLM groups them is not known here"
        )
    return [(i, replace(p, size=largest, block=p.block * (largest // p.size))) for i, p in layers]


def _groups(layers: List[Tuple[int, Page]]) -> List[List[Tuple[int, Page]]]:
    """_get_kv_cache_groups_uniform_page_size: layers of one kind, divided into groups of as many layers as the kind with
    the fewest has, or as the largest kind has where that is less than half as many again."""
    kinds: Dict[Tuple[str, int], List[Tuple[int, Page]]] = {}
    for i, page in layers:
        kinds.setdefault((page.kind, page.window), []).append((i, page))
    if len(kinds) < 2:
        return list(kinds.values())
    fewest = min(len(members) for members in kinds.values())
    most = max(len(members) for members in kinds.values())
    count = most if most < fewest * 1.5 else fewest
    grouped: List[List[Tuple[int, Page]]] = []
    for members in kinds.values():
        number = -(-len(members) // count)
        grouped.extend(members[i::number] for i in range(number))
    return grouped


def in_flight(known: Shape, pipeline: int, max_num_batched_tokens: int, version: Optional[str]) -> int:
    """Tokens scheduled and not yet settled, for which windows keep room (VllmConfig.max_in_flight_tokens).

    As many batches as stages, and one more under asynchronous scheduling; model runner V1 (see `runner`) has that one only
    without pipeline stages. Up to 0.24.0 it is one batch (kv_cache_interface.py).
    """
    if release(version) < (0, 25, 0):
        return max_num_batched_tokens
    extra = 1 if runner(known, version) == "v2" or pipeline == 1 else 0
    return (pipeline + extra) * max_num_batched_tokens


def kv_bytes_per_request(
    known: Shape,
    length: int,
    tensor: int = 1,
    pipeline: int = 1,
    cache_dtype: str = "auto",
    *,
    block_size: Optional[int] = None,
    max_num_batched_tokens: int = 8192,
    contexts: int = 1,
    hybrid: bool = True,
    version: Optional[str] = None,
) -> int:
    """KV bytes on one GPU that one request of `length` tokens needs at most: whole blocks of every group. contexts: the
    decode-context-parallel size, over which its tokens are divided."""
    pool = kv_pool(known, tensor, pipeline, cache_dtype, block_size=block_size, hybrid=hybrid, version=version)
    flight = in_flight(known, pipeline, max_num_batched_tokens, version)
    return pool.block_bytes * pool.blocks(length, flight, contexts)


# Which models a release runs with model runner V2 (VllmConfig._is_default_v2_model_runner_model of each).
V2_IN_0_22 = {"Qwen3ForCausalLM"}
V2_IN_0_24 = V2_IN_0_22 | {"DeepseekV2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2MoeForCausalLM"}
V2_WITH_EXPERTS = {"DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM"}


def runner(known: Shape, version: Optional[str]) -> str:
    """v1 or v2: which of vLLM's model runners, without speculative decoding and what else V2 refuses."""
    number = release(version)
    if number >= (0, 30, 0):
        return "v2"
    if number < (0, 22, 0) or known.pooling:
        return "v1"
    if number < (0, 24, 0):
        new = known.architecture in V2_IN_0_22 and not known.quantization
    elif number < (0, 26, 0):
        new = known.architecture in V2_IN_0_24
    else:
        new = not known.state and (not known.experts or known.architecture in V2_WITH_EXPERTS)
    return "v2" if new else "v1"


def graphs_in_budget(known: Shape, version: Optional[str]) -> bool:
    """Whether vLLM takes an estimate of its CUDA graphs off the KV cache: VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS is in
    0.20.2 and not in 0.16.0, and profile_cudagraph_memory of runner V2 answers 0 up to 0.28.0 (gpu/model_runner.py)."""
    number = release(version)
    return number >= (0, 20, 0) and (runner(known, version) == "v1" or number >= (0, 30, 0))


def _since(entries: Sequence[Mapping[str, Any]], version: Optional[str]) -> Mapping[str, Any]:
    """The last entry that the release has reached."""
    return [entry for entry in entries if release(str(entry["since"])) <= release(version)][-1]


def defaults(
    memory: Mapping[str, Any], gpu_bytes: int, gpu_name: str = "", version: Optional[str] = None
) -> Dict[str, Any]:
    """utilization, block_size, max_num_batched_tokens and max_num_seqs that `vllm serve` takes on such a GPU where nothing
    is said. `memory` is data/memory.yml, parsed."""
    known = memory["defaults"]
    rows = _since(known["batch"], version)["rows"]
    name = gpu_name.lower()
    row = next(r for r in rows if gpu_bytes >= r["gib"] * GIB and not (r.get("not") and r["not"] in name))
    return {
        "utilization": _since(known["utilization"], version)["value"],
        "block_size": _since(known["block_size"], version)["value"],
        "max_num_batched_tokens": row["max_num_batched_tokens"],
        "max_num_seqs": row["max_num_seqs"],
    }


def activation_bytes(
    known: Shape,
    tensor: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    *,
    fitted: Mapping[str, Any],
    version: str,
) -> float:
    """Peak of vLLM's profile run: what the widest layer holds for all tokens, or what the sampler holds for all requests.

    In a layer, at once: two tensors of the hidden size, the attention's output, the feed-forward block's two inner ones and
    their product. Of experts each token passes several.
    """
    tokens = max_num_batched_tokens
    wide = 3 if known.gated else 2
    inner = 0.0
    if "dense" in known.feed_forward:
        inner = wide * known.intermediate / tensor
    if "experts" in known.feed_forward:
        expert = known.expert_intermediate / tensor
        routed = known.experts_per_token * (max(2 * expert, known.hidden) + expert)
        inner = max(inner, routed + wide * known.shared_intermediate / tensor)
    attention = known.heads * (known.v_dim or known.head_dim_v) / tensor
    forward = 2 * tokens * (2 * known.hidden + attention + inner)
    each = 2.0 if tensor == 1 else 4.0  # the logits themselves, and gathered from several GPUs
    if runner(known, version) == "v1":
        each = _since(fitted["logits_bytes_v1"], version)["value"]
    sampler = min(tokens, max_num_seqs) * known.vocab * each + 2 * tokens * known.hidden
    return max(forward, 0.0 if known.pooling else sampler) + _since(fitted["workspace_mib"], version)["value"] * MIB


def graph_bytes(known: Shape, layers: int, *, fitted: Mapping[str, Any], version: str) -> float:
    """CUDA graphs of one GPU that runs so many layers."""
    entry = _since(fitted[f"cudagraph_gib_{runner(known, version)}"], version)
    return layers * min(entry["most"], entry["base"] + entry["by_hidden"] * known.hidden / 1000) * GIB


@dataclass(frozen=True)
class Term:
    """One part of a GPU's memory, with where the number comes from."""

    name: str
    gib: float
    source: str


@dataclass(frozen=True)
class Estimate:
    """One GPU, the fullest one."""

    weights_gib: float
    kv_bytes_per_token: int
    activation_gib: float
    cudagraph_gib: float
    non_torch_gib: float
    outside_gib: float  # outside of the budget from the start: context, communication, graphs by release
    load_gib: float  # more outside of it once there is load
    requested_gib: float  # vLLM's budget
    kv_gib: float
    kv_tokens: int  # as vLLM logs it
    request_gib: float  # KV that one request of max_model_len needs
    max_concurrency: float  # such requests at once
    verdict: str  # fits | tight | no
    reason: str  # of the verdict, in a sentence
    terms: Sequence[Term] = field(default_factory=list)
    notes: Sequence[str] = field(default_factory=list)  # what is not counted or not measured


def estimate(
    known: Shape,
    weights_bytes: Optional[int],
    gpu_bytes: int,
    tensor: int = 1,
    pipeline: int = 1,
    *,
    memory: Mapping[str, Any],
    utilization: float,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    cache_dtype: str = "auto",
    block_size: Optional[int] = None,
    enforce_eager: bool = False,
    hybrid: bool = True,
    version: str = "0.26.0",
    free_bytes: Optional[int] = None,
    contexts: int = 1,
    copies: int = 1,
    whole_experts: bool = False,
    narrowed: float = 1.0,
) -> Estimate:
    """What vLLM will find on the fullest GPU when it starts.

    weights_bytes  of the whole model; None: from the shape, where that is certain, else Unknown
    gpu_bytes      memory of one GPU as CUDA reports it; free_bytes: what of it is free before the start
    memory         data/memory.yml, parsed
    contexts       decode-context-parallel size; copies, whole_experts and narrowed as in weights_per_gpu

    no: vLLM refuses to start. tight: one request of full length takes over nine tenths of the KV cache, or what is held
    outside of the budget does not fit beside it.
    """
    fitted = memory["fitted"]
    whole = weights_of_config(known) if weights_bytes is None else weights_bytes
    if whole is None:
        raise Unknown(f"the size of the weights of {known.architecture} does not follow from config.json")
    place = "one" if tensor * pipeline == 1 and (copies == 1 or not known.experts) else "several"
    layers = max(end - start for start, end in stages(known.layers, pipeline))
    weights = weights_per_gpu(
        known, whole, tensor, pipeline, copies=copies, whole_experts=whole_experts, narrowed=narrowed
    )
    activation = activation_bytes(known, tensor, max_num_batched_tokens, max_num_seqs, fitted=fitted, version=version)
    graphs = 0.0 if enforce_eager else graph_bytes(known, layers, fitted=fitted, version=version)
    inside = graphs if graphs_in_budget(known, version) else 0.0
    other = _since(fitted["non_torch_gib"], version)
    context = _since(fitted["context_gib"], version)
    load = _since(fitted["load_share"], version)
    outside = context[place] * GIB + graphs - inside
    requested = math.ceil(gpu_bytes * utilization)
    kv = max(0, int(requested - weights - activation - inside - other[place] * GIB))

    pool = kv_pool(known, tensor, pipeline, cache_dtype, block_size=block_size, hybrid=hybrid, version=version)
    flight = in_flight(known, pipeline, max_num_batched_tokens, version)
    per_request = pool.blocks(max_model_len, flight, contexts)
    concurrency = kv // pool.block_bytes / per_request if per_request and pool.block_bytes else 0.0
    request = pool.block_bytes * per_request
    verdict, reason = _verdict(
        kv, request + pool.block_bytes, max_model_len, requested, gpu_bytes, outside=outside, free=free_bytes
    )
    source = _since(fitted["workspace_mib"], version)["measured"]
    terms = [
        Term("weights", weights / GIB, "the files' tensors, divided as vLLM divides them"),
        Term("activation", activation / GIB, f"the widest layer or the sampler, and work space: {source}"),
        Term("non-torch", other[place], other["measured"]),
        Term(
            "CUDA graphs" + ("" if inside else " (outside)"), graphs / GIB, "fitted, cudagraph_gib in data/memory.yml"
        ),
        Term("context (outside)", context[place], context["measured"]),
        Term("growth under load (outside)", load["value"] * gpu_bytes / GIB, load["measured"]),
    ]
    return Estimate(
        weights_gib=weights / GIB,
        kv_bytes_per_token=kv_bytes_per_token(known, tensor, pipeline, cache_dtype, version),
        activation_gib=activation / GIB,
        cudagraph_gib=graphs / GIB,
        non_torch_gib=other[place],
        outside_gib=outside / GIB,
        load_gib=load["value"] * gpu_bytes / GIB,
        requested_gib=requested / GIB,
        kv_gib=kv / GIB,
        kv_tokens=int(concurrency * max_model_len),
        request_gib=request / GIB,
        max_concurrency=concurrency,
        verdict=verdict,
        reason=reason,
        terms=terms,
        notes=_notes(known, tensor * pipeline, version),
    )


def _verdict(
    kv: int, need: int, length: int, requested: int, gpu_bytes: int, *, outside: float, free: Optional[int]
) -> Tuple[str, str]:
    if free is not None and free < requested:
        return "no", f"{free / GIB:.2f} GiB are free, less than the {requested / GIB:.2f} GiB that vLLM is to take"
    if kv <= 0:
        return "no", "weights and activations leave nothing for the KV cache"
    told = f"one request of {length} tokens needs {need / GIB:.2f} GiB of KV cache, {kv / GIB:.2f} GiB are there"
    if need > kv:
        return "no", told
    if need > 0.9 * kv:
        return "tight", told
    left = gpu_bytes - requested
    if outside > left:
        return (
            "tight",
            f"{outside / GIB:.2f} GiB are held outside of the budget, {left / GIB:.2f} GiB are left for that",
        )
    return "fits", told


def _notes(known: Shape, gpus: int, version: str) -> List[str]:
    notes = []
    if known.multimodal:
        notes.append("memory for images or sound is not counted")
    if gpus > 2:
        notes.append("what communication holds was measured on two GPUs")
    number = release(version)
    if number < (0, 11, 0) or (0, 11, 0) < number < (0, 26, 0) or number > (0, 26, 0):
        notes.append(f"the constants were measured with 0.11.0 and 0.26.0, not with {version}")
    return notes
