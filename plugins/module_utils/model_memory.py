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
    shape,
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

    def blocks(self, length: int, in_flight: int, states: int) -> int:
        """Blocks that a request of `length` tokens holds at most, while `in_flight` tokens are not yet settled."""
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

    def blocks(self, length: int, in_flight: int) -> int:
        """Blocks that one request of `length` tokens holds at most, over all groups."""
        return sum(page.blocks(length, in_flight, self.states) for page in self.pages)


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
    for a checkpoint within the prompt. Hybrid models have prefix caching by default in 0.32.0 and not yet in 0.26.0
    (engine/arg_utils.py); in between the larger number is taken."""
    if not known.state or not known.hybrid or release(version) <= (0, 26, 0):
        return 1
    return 3 if known.state.kind == "mamba2" else 2


def _page(layer: Layer, tensor: int, size: int, block: int, state: int) -> Page:
    if layer.kind == MAMBA:
        return Page(MAMBA, state, 0)
    return Page(layer.kind, block * _token_bytes(layer, tensor, size), block, layer.window)


def _aligned(known: Shape, tensor: int, size: int, block: int, state: int) -> Tuple[int, int]:
    """Block and padded state of a hybrid model: the block grows until an attention page holds a state, and the state is
    padded to that page (Platform._align_hybrid_block_size)."""
    layer = next(layer for kept in known.kv_layers for layer in kept if layer.kind != MAMBA)
    token = _token_bytes(layer, tensor, size)
    step = max(block, 128) if layer.kind == MLA else block
    block = max(block, step * -(-state // (step * token)))
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
    grouped = []
    for members in kinds.values():
        number = -(-len(members) // count)
        grouped.extend(members[i::number] for i in range(number))
    return grouped


def in_flight(known: Shape, pipeline: int, max_num_batched_tokens: int, version: Optional[str]) -> int:
    """Tokens scheduled and not yet settled, for which windows keep room (VllmConfig.max_in_flight_tokens).

    As many batches as stages, and one more under asynchronous scheduling; model runner V1 (see `runner`) has that one only
    without pipeline stages. Before 0.26.0 one batch is taken, as 0.11 does.
    """
    if release(version) < (0, 26, 0):
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
    hybrid: bool = True,
    version: Optional[str] = None,
) -> int:
    """KV bytes on one GPU that one request of `length` tokens needs at most: whole blocks of every group."""
    pool = kv_pool(known, tensor, pipeline, cache_dtype, block_size=block_size, hybrid=hybrid, version=version)
    return pool.block_bytes * pool.blocks(length, in_flight(known, pipeline, max_num_batched_tokens, version))


# Models with experts that 0.26.0 runs with model runner V2 all the same (DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES).
V2_WITH_EXPERTS = {"DeepseekV2ForCausalLM", "GraniteMoeForCausalLM", "Qwen2MoeForCausalLM"}


def runner(known: Shape, version: Optional[str]) -> str:
    """v1 or v2: which of vLLM's model runners (VllmConfig.use_v2_model_runner, without speculative decoding and such)."""
    number = release(version)
    if number < (0, 26, 0):
        return "v1"
    if number >= (0, 32, 0):
        return "v2"
    if known.pooling or known.state:
        return "v1"
    return "v2" if not known.experts or known.architecture in V2_WITH_EXPERTS else "v1"


def activation_bytes(
    known: Shape, tensor: int, max_num_batched_tokens: int, max_num_seqs: int, fitted: Mapping[str, Any], version: str
) -> float:
    """Peak of the profile run over what stays: the widest layer's tensors for all tokens, or the logits of all requests."""
    tokens = max_num_batched_tokens
    wide = 3 if known.gated else 2
    inner = wide * known.intermediate / tensor if "dense" in known.feed_forward else 0.0
    if "experts" in known.feed_forward:
        each = max(wide * known.expert_intermediate / tensor, known.hidden + known.expert_intermediate / tensor)
        inner = max(inner, known.experts_per_token * each + wide * known.shared_intermediate / tensor)
    forward = 2 * tokens * (3 * known.hidden + inner)
    rows = min(tokens, max_num_seqs)
    # One copy of the logits in the model's dtype, and gathered from the GPUs; runner V1 makes two of float32 besides.
    copies = (2 if tensor == 1 else 4) + (0 if runner(known, version) == "v2" else 8)
    logits = rows * known.vocab * copies + 2 * tokens * known.hidden
    return max(forward, logits) + float(fitted["workspace_mib"]["value"]) * MIB


@dataclass(frozen=True)
class Term:
    """One part of a GPU's memory, with where the number comes from."""

    name: str
    gib: float
    source: str


@dataclass(frozen=True)
class Estimate:
    """One GPU, the fullest one. request_gib is for one request of max_model_len."""

    weights_gib: float
    kv_bytes_per_token: int
    activation_gib: float
    cudagraph_gib: float
    non_torch_gib: float
    outside_gib: float
    requested_gib: float
    kv_gib: float
    kv_tokens: int
    request_gib: float
    max_concurrency: float
    verdict: str
    terms: Sequence[Term] = field(default_factory=list)


def estimate(
    known: Shape,
    weights_bytes: int,
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
    version: str = "0.26.0",
    free_bytes: Optional[int] = None,
) -> Estimate:
    """What vLLM will find when it starts. `memory` is data/memory.yml, parsed."""
    fitted = memory["fitted"]
    requested = math.ceil(gpu_bytes * utilization)
    weights = weights_per_gpu(known, weights_bytes, tensor, pipeline)
    activation = activation_bytes(known, tensor, max_num_batched_tokens, max_num_seqs, fitted, version)
    non_torch = fitted["non_torch_mib"]["value"] * MIB
    graphs = 0.0 if enforce_eager else fitted["cudagraph_mib"]["value"] * MIB
    kv = requested - weights - activation - non_torch
    pool = kv_pool(known, tensor, pipeline, cache_dtype, block_size=block_size, version=version)
    per_request = pool.blocks(max_model_len, in_flight(known, pipeline, max_num_batched_tokens, version))
    blocks = int(max(0, kv)) // pool.block_bytes if pool.block_bytes else 0
    concurrency = blocks / per_request if per_request else 0.0
    need = pool.block_bytes * (per_request + 1)
    verdict = "no" if kv <= 0 or need > kv else ("tight" if need > 0.9 * kv else "fits")
    return Estimate(
        weights_gib=weights / GIB,
        kv_bytes_per_token=kv_bytes_per_token(known, tensor, pipeline, cache_dtype, version),
        activation_gib=activation / GIB,
        cudagraph_gib=graphs / GIB,
        non_torch_gib=non_torch / GIB,
        outside_gib=graphs / GIB,
        requested_gib=requested / GIB,
        kv_gib=max(0, kv) / GIB,
        kv_tokens=int(concurrency * max_model_len),
        request_gib=pool.block_bytes * per_request / GIB,
        max_concurrency=concurrency,
        verdict=verdict,
        terms=[
            Term("weights", weights / GIB, "files"),
            Term("activation", activation / GIB, "fitted"),
            Term("non-torch", non_torch / GIB, "fitted"),
        ],
    )
