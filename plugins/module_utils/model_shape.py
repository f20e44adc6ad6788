# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A model as far as memory is concerned, and how fields of a config.json are looked up; model_families.py reads one.

The order in which old field names are looked up is vLLM's (transformers_utils/model_arch_config_convertor.py of 0.32.0).

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

FULL, SLIDING, CHUNKED, MLA, MAMBA = "full", "sliding", "chunked", "mla", "mamba"


class Unknown(Exception):
    """The model's shape cannot be told. `reason` says which field or architecture, and what would help."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Layer:
    """What one layer keeps for each token, or (mamba) for each request. Heads are the whole model's."""

    kind: str
    kv_heads: int = 0
    head_dim: int = 0  # of mla: the latent and the rotary part together
    head_dim_v: int = 0
    window: int = 0  # tokens that a sliding or chunked layer looks back


@dataclass(frozen=True)
class State:
    """The constant state of a mamba or linear-attention layer, before it is divided over GPUs."""

    kind: str  # mamba1 | mamba2 | gated_delta_net | short_conv
    inner: int  # channels, or heads x head_dim
    conv_kernel: int
    size: int = 0  # of the state of one channel (mamba1) or head
    heads: int = 0
    head_dim: int = 0
    groups: int = 0
    key_heads: int = 0
    key_dim: int = 0
    dtype: str = "auto"  # of the recurrent part; auto: the model's


@dataclass(frozen=True)
class Group:
    """Layers of one kind, for people to read."""

    kind: str
    count: int
    window: int = 0


@dataclass(frozen=True)
class Shape:
    """A model as far as memory is concerned. Numbers are the whole model's, before it is divided."""

    architecture: str
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    intermediate: int  # of a dense layer; 0 where there is none
    vocab: int
    max_positions: Optional[int]
    dtype: Optional[str]
    kv_layers: Tuple[Tuple[Layer, ...], ...]  # what each layer keeps; () where it keeps nothing
    feed_forward: Tuple[str, ...]  # of each layer: dense, experts, or "" where it has none
    tied: bool = False
    gated: bool = True  # the feed-forward block has a gate beside its first matrix
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0  # of the experts that every token passes
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_rope: int = 0
    qk_nope: int = 0
    v_dim: int = 0
    state: Optional[State] = None
    quantization: Optional[Mapping[str, Any]] = None  # method, bits, group_size, block, kv_cache_dtype
    multimodal: bool = False
    pooling: bool = False
    encoder_decoder: bool = False
    counted: bool = False  # the parameters follow from these numbers alone
    own_cache_dtype: bool = False  # vLLM's class does not pass --kv-cache-dtype on

    @property
    def groups(self) -> List[Group]:
        counts: Dict[Tuple[str, int], int] = {}
        for kept in self.kv_layers:
            for layer in kept or (Layer("none"),):
                key = (layer.kind, layer.window)
                counts[key] = counts.get(key, 0) + 1
        return [Group(kind, count, window) for (kind, window), count in counts.items()]

    @property
    def mla(self) -> bool:
        return any(layer.kind == MLA for kept in self.kv_layers for layer in kept)

    @property
    def hybrid(self) -> bool:
        """Some layers keep a constant state and some keep every token, as vLLM's is_hybrid."""
        kinds = {layer.kind for kept in self.kv_layers for layer in kept}
        return MAMBA in kinds and len(kinds) > 1


HIDDEN = ("hidden_size", "n_embd", "d_model")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
# The order in which vLLM looks (ModelArchConfigConvertorBase.get_total_num_kv_heads).
KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
INTERMEDIATE = ("intermediate_size", "ffn_dim", "n_inner", "inner_hidden_size", "ffn_hidden_size")
POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "n_ctx",
)
EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")


LARGEST = 10**9  # of a size in config.json: wider than any model by a factor of hundreds
MOST_LAYERS = 10_000


def told(value: Any) -> str:
    """A value of config.json in a message, cut."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value) if isinstance(value, (str, int, float)) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."


def integer(config: Mapping[str, Any], names: Sequence[str], default: Optional[int] = None) -> int:
    """The first of `names` that has a value."""
    for name in names:
        value = config.get(name)
        if value is None or isinstance(value, bool):
            continue
        if isinstance(value, int) and 0 <= value <= LARGEST:
            return value
        raise Unknown(f"{name} is {told(value)} in config.json, a whole number up to {LARGEST} was expected")
    if default is None:
        raise Unknown(f"config.json has no {names[0]}" + (f" (nor {', '.join(names[1:])})" if names[1:] else ""))
    return default


def positive(config: Mapping[str, Any], names: Sequence[str], default: Optional[int] = None) -> int:
    """As integer(), for what is divided by or has to be there: 0 is no such number."""
    value = integer(config, names, default)
    if not value:
        name = next((name for name in names if config.get(name) == 0), names[0])
        raise Unknown(f"{name} is 0 in config.json, a whole number above 0 was expected")
    return value


def numbers(config: Mapping[str, Any], name: str) -> List[int]:
    """A list of whole numbers; empty where there is none."""
    value = config.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, int) for one in value):
        raise Unknown(f"{name} is {told(value)} in config.json, a list of whole numbers was expected")
    return value


def words(config: Mapping[str, Any], name: str) -> Optional[List[str]]:
    """A list of words; None where there is none."""
    value = config.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise Unknown(f"{name} is {told(value)} in config.json, a list of words was expected")
    return value


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that describes the language model."""
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        inner = config.get(name)
        if isinstance(inner, Mapping):
            return text_of(inner) if name == "thinker_config" else inner
    return config


def dtype_of(config: Mapping[str, Any]) -> Optional[str]:
    for part in (config, text_of(config)):
        value = part.get("dtype", part.get("torch_dtype"))
        if value is not None:
            return str(value).replace("torch.", "")
    return None


def quantization_of(config: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
    """method, bits, group_size and block of the checkpoint's own quantization; None where there is none."""
    for part in (config, text_of(config)):
        for name in ("quantization_config", "compression_config"):
            found = part.get(name)
            if isinstance(found, Mapping):
                return _quantization(found)
    bits = config.get("quantization_bit")
    if isinstance(bits, int) and bits:
        return {"method": "own", "bits": bits, "group_size": None, "block": None, "kv_cache_dtype": None}
    return None


def _quantization(found: Mapping[str, Any]) -> Dict[str, Any]:
    method = str(found.get("quant_method") or "").lower().replace("compressed_tensors", "compressed-tensors")
    bits, group = found.get("bits", found.get("w_bit")), found.get("group_size", found.get("q_group_size"))
    block, kv_cache = found.get("weight_block_size"), None
    if method == "compressed-tensors":
        groups = found.get("config_groups")
        schemes = [s for s in groups.values() if isinstance(s, Mapping)] if isinstance(groups, Mapping) else []
        weights = [s["weights"] for s in schemes if isinstance(s.get("weights"), Mapping)]
        if weights:
            bits, group = weights[0].get("num_bits"), weights[0].get("group_size")
            block = weights[0].get("block_structure")
        if isinstance(found.get("kv_cache_scheme"), Mapping):
            kv_cache = "fp8"
    if not method and isinstance(found.get("quantization"), Mapping):
        method = "modelopt"
        kv_cache = str(found["quantization"].get("kv_cache_quant_algo") or "").lower() or None
    if bits is None:
        bits = {"fp8": 8, "mxfp4": 4, "modelopt_fp4": 4, "fbgemm_fp8": 8}.get(method)
    if isinstance(block, (list, tuple)) and not all(isinstance(size, int) and 0 < size <= LARGEST for size in block):
        raise Unknown("the blocks of quantization_config are not two whole numbers above 0")
    return {"method": method, "bits": bits, "group_size": group, "block": block, "kv_cache_dtype": kv_cache}
