# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""How large a model's weights are: as files, as its shape says, and on one GPU of many.

What is divided by tensor parallelism and what every GPU holds is vLLM's: vocab_parallel_embedding.py and linear.py divide;
KV projections are held several times once there are more GPUs than KV heads (QKVParallelLinear); the down-projections of
MLA, the routers of experts and the norms are held by every GPU.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils.model_shape import MAMBA, MLA, Shape, State, Unknown

LARGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors format itself


def weights_of_folder(path: str) -> int:
    """Bytes of the tensors that vLLM loads from a folder: the index's total_size, or else the files' own headers.

    Below the folder itself nothing counts (original/), nor do consolidated*.safetensors, nor *.bin beside safetensors.
    Nothing is read but the index, or the header of each file. Unknown where there are no safetensors.
    """
    index = os.path.join(path, "model.safetensors.index.json")
    if os.path.isfile(index):
        with open(index, encoding="utf-8") as handle:
            try:
                total = (json.load(handle).get("metadata") or {}).get("total_size")
            except (ValueError, AttributeError, RecursionError) as error:
                raise Unknown(f"{index} cannot be read as an index of safetensors: {error}") from error
        if isinstance(total, (int, float)) and not isinstance(total, bool) and 0 < total < 2**63:
            return int(total)
    names = sorted(n for n in os.listdir(path) if n.endswith(".safetensors") and not n.startswith("consolidated"))
    if not names:
        raise Unknown(f"{path} has no *.safetensors: the size of the weights cannot be told without loading them")
    return sum(tensor_bytes(os.path.join(path, name)) for name in names)


def tensor_bytes(path: str) -> int:
    """The tensors of one file: an eight-byte little-endian length, then JSON with the data_offsets of each tensor."""
    with open(path, "rb") as handle:
        head = handle.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else None
        if length is None or length > LARGEST_HEADER:
            raise Unknown(f"{path} is no safetensors file: it has no header")
        text = handle.read(length)
    try:
        header = json.loads(text.decode("utf-8"))
        spans = [value["data_offsets"] for key, value in header.items() if key != "__metadata__"]
        return sum(int(end) - int(start) for start, end in spans)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
        raise Unknown(f"{path} is no safetensors file: its header cannot be read ({error})") from error


def read(folder: str) -> Tuple[Dict[str, Any], int]:
    """config.json and the bytes of the weights of a local folder."""
    path = os.path.join(folder, "config.json")
    if not os.path.isfile(path):
        raise Unknown(f"{folder} has no config.json")
    with open(path, encoding="utf-8") as handle:
        try:
            config = json.load(handle)
        except (ValueError, RecursionError) as error:
            raise Unknown(f"{path} is no JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise Unknown(f"{path} is no mapping")
    return dict(config), weights_of_folder(folder)


def stages(layers: int, pipeline: int) -> List[Tuple[int, int]]:
    """The layers [start, end) of each pipeline stage, as get_pp_indices in vllm/distributed/utils.py divides them."""
    if pipeline < 1 or pipeline > layers:
        raise Unknown(f"{layers} layers cannot be divided over {pipeline} pipeline stages")
    parts = [layers // pipeline] * pipeline
    for i in range(2, layers % pipeline + 2):
        parts[-i] += 1
    ends = [0, *itertools.accumulate(parts)]
    return [(ends[i], ends[i + 1]) for i in range(pipeline)]


@dataclass(frozen=True)
class Parts:
    """Parameters of one layer: divided by tensor parallelism, of the KV projection, held by every GPU, and of experts that
    are chosen for each token."""

    divided: int = 0
    kv: int = 0
    whole: int = 0
    experts: int = 0

    def on_gpu(self, known: Shape, tensor: int, expert_share: float) -> float:
        copies = max(1.0, tensor / known.kv_heads)
        return self.divided / tensor + self.kv * copies / tensor + self.whole + self.experts * expert_share


def layer_parts(known: Shape, i: int) -> Parts:
    """Parameters of layer i, without norms and biases (less than a thousandth)."""
    divided = kv = whole = experts = 0
    h = known.hidden
    for layer in known.kv_layers[i]:
        if layer.kind == MLA:
            query = known.heads * (known.qk_nope + known.qk_rope)
            if known.q_lora_rank:
                whole += h * known.q_lora_rank
                divided += known.q_lora_rank * query
            else:
                divided += h * query
            whole += h * (known.kv_lora_rank + known.qk_rope)
            divided += known.kv_lora_rank * known.heads * (known.qk_nope + known.v_dim) + known.heads * known.v_dim * h
        elif layer.kind == MAMBA and known.state:
            divided += _state_parameters(known, known.state)
            if known.state.kind == "mamba2":  # one group is held by every GPU, several are divided
                groups = 2 * h * known.state.groups * known.state.size
                divided, whole = (divided, whole + groups) if known.state.groups == 1 else (divided + groups, whole)
        else:
            divided += 2 * h * known.heads * known.head_dim
            kv += h * known.kv_heads * (known.head_dim + known.head_dim_v)
    if not known.kv_layers[i] and not any(known.kv_layers):
        divided += 4 * h * h  # an encoder: attention that keeps nothing
    matrices = 3 if known.gated else 2
    if known.feed_forward[i] == "experts":
        experts = matrices * h * known.experts * known.expert_intermediate
        divided += matrices * h * known.shared_intermediate
        whole += h * known.experts
    elif known.feed_forward[i] == "dense":
        divided += matrices * h * known.intermediate
    return Parts(divided, kv, whole, experts)


def _state_parameters(known: Shape, state: State) -> int:
    if state.kind == "mamba2":
        return known.hidden * (3 * state.inner + state.heads)
    if state.kind == "gated_delta_net":
        return known.hidden * (3 * state.inner + 2 * state.key_heads * state.key_dim + 2 * state.heads)
    return 3 * known.hidden * state.inner


# Models whose classes hold the embedding and the head on every stage (found by building them, see kv_specs.py).
ENDS_EVERYWHERE = {
    "ChatGLMForConditionalGeneration",
    "ChatGLMModel",
    "GptOssForCausalLM",
    "JambaForCausalLM",
    "NemotronHForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
}


def _embedding(known: Shape) -> int:
    return known.vocab * known.hidden


def parameters(known: Shape) -> int:
    """All parameters, nearly: exact where `counted`, without norms and biases."""
    parts = [layer_parts(known, i) for i in range(known.layers)]
    ends = _embedding(known) * (1 if known.tied else 2)
    return sum(p.divided + p.kv + p.whole + p.experts for p in parts) + ends


def weights_of_config(known: Shape) -> Optional[int]:
    """Bytes of the weights as the shape alone tells them, to half a percent; None where that is not certain: quantized
    weights, images or sound beside the text, and architectures with parts that the shape does not have."""
    if not known.counted or known.multimodal or known.quantization:
        return None
    return parameters(known) * (4 if known.dtype in ("float32", "float") else 2)


def weights_per_gpu(
    known: Shape,
    weights_bytes: int,
    tensor: int = 1,
    pipeline: int = 1,
    *,
    copies: int = 1,
    whole_experts: bool = False,
    narrowed: float = 1.0,
) -> int:
    """Bytes of weights on the fullest GPU, out of the bytes of the whole model.

    The embedding stands on the first stage and the head on the last; a tied head stands on both once there are several
    (vLLM's PPMissingLayer). Every part is taken as large as its share of the parameters.

    copies         data-parallel times prefill-context-parallel size: experts are divided over these, too
                   (flatten_tp_across_dp_and_pcp in layers/fused_moe/config.py)
    whole_experts  --enable-expert-parallel: a GPU holds whole experts, instead of a part of each
    narrowed       what quantizing on load leaves of every layer's bytes; embedding and head stay as they are
    """
    over = tensor * copies
    share = 1 / over
    if whole_experts and known.experts:
        share = -(-known.experts // over) / known.experts
    parts = [layer_parts(known, i) for i in range(known.layers)]
    scale = weights_bytes / parameters(known)
    spans = stages(known.layers, pipeline)
    loads = []
    for stage, (start, end) in enumerate(spans):
        load = narrowed * sum(p.on_gpu(known, tensor, share) for p in parts[start:end])
        first, last = stage == 0, stage == len(spans) - 1
        if known.architecture in ENDS_EVERYWHERE:
            first = last = True
        ends = (1 if first else 0) + (1 if last and not (known.tied and first) else 0)
        loads.append(load + ends * _embedding(known) / tensor)
    return math.ceil(max(loads) * scale)
