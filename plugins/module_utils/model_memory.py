# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""How much GPU memory a model needs under vLLM: weights, KV cache, and what is held besides.

The KV cache follows vLLM's own rules to the byte (v1/kv_cache_interface.py and v1/core/kv_cache_utils.py of 0.26.0,
0.32.0 and 0.33.0, compared by tests/unit/test_model_memory.py with what vLLM's classes answer). What is held besides
is fitted to measurements: every such constant stands in data/memory.yml with the measurement it comes from.

Sizes are bytes, unless the name ends in _gib. Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils.model_shape import (
    CHUNKED,
    FULL,
    MAMBA,
    MLA,
    NONE,
    SLIDING,
    Layer,
    Shape,
    State,
    Unknown,
    shape,
)

__all__ = [
    "Estimate",
    "Layer",
    "Shape",
    "State",
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

GIB = 1 << 30
BLOCK = 16  # CacheConfig.DEFAULT_BLOCK_SIZE, vllm/config/cache.py

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
    two bytes wide for every checkpoint that is not run as float32 (give "float32" then)."""
    if cache_dtype == "auto":
        own = (known.quantization or {}).get("kv_cache_dtype")
        return SIZES["fp8"] if own in ("fp8", "fp8_e4m3") else 2
    if cache_dtype not in SIZES:
        raise Unknown(f"kv-cache-dtype {cache_dtype} packs scales beside the values: its size is not known here")
    return SIZES[cache_dtype]


def stages(layers: int, pipeline: int) -> List[Tuple[int, int]]:
    """The layers [start, end) of each pipeline stage, as get_pp_indices in vllm/distributed/utils.py divides them."""
    if pipeline < 1 or pipeline > layers:
        raise Unknown(f"{layers} layers cannot be divided over {pipeline} pipeline stages")
    parts = [layers // pipeline] * pipeline
    for i in range(2, layers % pipeline + 2):
        parts[-i] += 1
    ends = [sum(parts[: i + 1]) for i in range(pipeline)]
    return [(end - part, end) for end, part in zip(ends, parts)]


def _heads(kv_heads: int, tensor: int) -> int:
    """KV heads on one GPU: replicated once there are more GPUs than heads."""
    return max(1, kv_heads // tensor)


@dataclass(frozen=True)
class Page:
    """What one layer takes in one block of the pool, and how many blocks it makes a request hold."""

    kind: str
    size: int
    block: int  # tokens
    window: int = 0


def _page(layer: Layer, known: Shape, tensor: int, size: int, block: int) -> Optional[Page]:
    if layer.kind == NONE:
        return None
    if layer.kind == MLA:
        return Page(MLA, block * layer.head_dim * size, block)
    if layer.kind == MAMBA:
        raise Unknown(f"the state of {known.architecture} is not known")
    width = _heads(layer.kv_heads, tensor) * (layer.head_dim + layer.head_dim_v) * size
    return Page(layer.kind, block * width, block, layer.window)


def kv_bytes_per_token(
    known: Shape, tensor: int = 1, pipeline: int = 1, cache_dtype: str = "auto", version: Optional[str] = None
) -> int:
    """Bytes that one more token takes on one GPU while every layer still keeps it, on the largest pipeline stage.

    A layer with a window stops to grow after it; constant states (mamba) are not counted. The same in all versions.
    """
    size = element_size(known, cache_dtype)
    pages = [_page(layer, known, tensor, size, 1) if layer.kind != MAMBA else None for layer in known.kv_layers]
    return max(sum(page.size for page in pages[start:end] if page) for start, end in stages(len(pages), pipeline))


@dataclass(frozen=True)
class Pool:
    """One GPU's KV pool (of the largest stage): bytes of a block over all layers that share it, and the groups."""

    block_bytes: int
    groups: Tuple[Tuple[Page, int], ...]  # (page, layers in the group)

    def blocks(self, length: int, in_flight: int) -> int:
        """Blocks that one request of `length` tokens holds, over all groups."""
        return sum(_blocks(page, length, in_flight) for page, _count in self.groups)


def _blocks(page: Page, length: int, in_flight: int) -> int:
    if page.kind == SLIDING:
        return -(-min(page.window - 1 + in_flight, length) // page.block) + 1
    if page.kind == CHUNKED:
        return -(-min(page.window + in_flight, length) // page.block)
    return -(-length // page.block)


def kv_pool(
    known: Shape,
    tensor: int = 1,
    pipeline: int = 1,
    cache_dtype: str = "auto",
    block_size: Optional[int] = None,
    hybrid: bool = True,
    version: Optional[str] = None,
) -> Pool:
    """How vLLM divides the layers into groups that draw blocks from one pool."""
    block = block_size or BLOCK
    size = element_size(known, cache_dtype)
    pages = [_page(layer, known, tensor, size, block) for layer in known.kv_layers]
    kinds = {page for page in pages if page}
    if len(kinds) != 1:
        raise Unknown(f"{known.architecture} mixes kinds of layers")
    largest = max(sum(1 for page in pages[start:end] if page) for start, end in stages(len(pages), pipeline))
    page = kinds.pop()
    return Pool(page.size * largest, ((page, largest),))


def kv_bytes_per_request(
    known: Shape,
    length: int,
    tensor: int = 1,
    pipeline: int = 1,
    cache_dtype: str = "auto",
    block_size: Optional[int] = None,
    max_num_batched_tokens: int = 8192,
    batches: Optional[int] = None,
    hybrid: bool = True,
    version: Optional[str] = None,
) -> int:
    """KV bytes on one GPU for one request of `length` tokens: whole blocks of every group."""
    pool = kv_pool(known, tensor, pipeline, cache_dtype, block_size, hybrid, version)
    return pool.block_bytes * pool.blocks(length, (batches or pipeline + 1) * max_num_batched_tokens)


def weights_of_folder(path: str) -> int:
    """Bytes of the tensors that vLLM loads from a folder: the index's total_size, or else the files' own headers.

    original/**, consolidated* and *.bin beside safetensors are not loaded and not counted. Nothing is read but the
    index or the header of each file. Unknown where there are no safetensors.
    """
    index = os.path.join(path, "model.safetensors.index.json")
    if os.path.isfile(index):
        with open(index, encoding="utf-8") as handle:
            total = (json.load(handle).get("metadata") or {}).get("total_size")
        if isinstance(total, (int, float)) and total > 0:
            return int(total)
    names = sorted(n for n in os.listdir(path) if n.endswith(".safetensors") and not n.startswith("consolidated"))
    if not names:
        raise Unknown(f"{path} has no *.safetensors: the size of the weights cannot be told without loading them")
    return sum(_tensor_bytes(os.path.join(path, name)) for name in names)


def _tensor_bytes(path: str) -> int:
    """The tensors of one file: an eight-byte little-endian length, then JSON with data_offsets of each tensor."""
    with open(path, "rb") as handle:
        head = handle.read(8)
        if len(head) < 8:
            raise Unknown(f"{path} is no safetensors file: shorter than its header")
        (length,) = struct.unpack("<Q", head)
        if length > 100_000_000:
            raise Unknown(f"{path} is no safetensors file: its header would be {length} bytes long")
        header = json.loads(handle.read(length).decode("utf-8"))
    spans = [value["data_offsets"] for key, value in header.items() if key != "__metadata__"]
    return sum(int(end) - int(start) for start, end in spans)


def read(folder: str) -> Tuple[Dict[str, Any], int]:
    """config.json and the bytes of the weights of a local folder."""
    path = os.path.join(folder, "config.json")
    if not os.path.isfile(path):
        raise Unknown(f"{folder} has no config.json")
    with open(path, encoding="utf-8") as handle:
        config = json.load(handle)
    return config, weights_of_folder(folder)


def weights_of_config(known: Shape) -> Optional[int]:
    """Bytes of the weights as the shape tells them, where that is certain; None elsewhere."""
    return None


def weights_per_gpu(known: Shape, weights_bytes: int, tensor: int = 1, pipeline: int = 1) -> int:
    """Bytes of weights on the fullest GPU."""
    start, end = max(stages(known.layers, pipeline), key=lambda part: part[1] - part[0])
    share = (end - start) / known.layers
    return math.ceil(weights_bytes * share / tensor)


@dataclass(frozen=True)
class Term:
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
    utilization: float,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    memory: Mapping[str, Any],
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
    tokens = max_num_batched_tokens
    feed_forward = max(known.intermediate, 1)
    forward = 2 * tokens * (3 * known.hidden + 3 * feed_forward // tensor)
    logits = 2 * min(tokens, max_num_seqs) * known.vocab * (1 if tensor == 1 else 2) + 2 * tokens * known.hidden
    activation = max(forward, logits) + fitted["workspace_mib"]["value"] * (1 << 20)
    non_torch = fitted["non_torch_mib"]["value"] * (1 << 20)
    graphs = 0 if enforce_eager else fitted["cudagraph_mib"]["value"] * (1 << 20)
    kv = requested - weights - activation - non_torch
    pool = kv_pool(known, tensor, pipeline, cache_dtype, block_size, True, version)
    per_request = pool.blocks(max_model_len, (pipeline + 1) * tokens)
    blocks = max(0, kv) // pool.block_bytes
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
