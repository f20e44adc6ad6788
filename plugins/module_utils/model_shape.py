# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a config.json says about a model: layers, heads, which layers hold KV and of which kind.

An architecture or a field that is not known here is Unknown; nothing is guessed. Names of architectures and the order
in which old field names are looked up are vLLM's (model_executor/models/registry.py and
transformers_utils/model_arch_config_convertor.py of 0.32.0); which layers slide, share or hold a state is from the
model's own file there, named in the comment of each family.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

FULL, SLIDING, CHUNKED, MLA, MAMBA, NONE = "full", "sliding", "chunked", "mla", "mamba", "none"


class Unknown(Exception):
    """The model's shape cannot be told. `reason` says which field or architecture, and what would help."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Layer:
    """What one layer keeps for each token (or, mamba, for each request). kv_heads are the whole model's."""

    kind: str
    kv_heads: int = 0
    head_dim: int = 0
    head_dim_v: int = 0
    window: int = 0  # tokens that a sliding or chunked layer looks back


@dataclass(frozen=True)
class State:
    """The constant state of a mamba or linear-attention layer, before it is split over GPUs."""

    kind: str  # mamba1 | mamba2 | gated_delta_net | short_conv | linear
    channels: int = 0  # width of the convolution without groups
    heads: int = 0
    head_dim: int = 0
    state: int = 0
    groups: int = 0
    conv_kernel: int = 0
    key_heads: int = 0
    key_dim: int = 0
    dtype: str = "auto"  # of the recurrent state


@dataclass(frozen=True)
class Group:
    """Layers of one kind, for people to read."""

    kind: str
    count: int
    window: int = 0


@dataclass(frozen=True)
class Shape:
    """A model as far as memory is concerned. Numbers are the whole model's, before it is split."""

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
    kv_layers: Tuple[Layer, ...]
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_expert_intermediate: int = 0
    dense_layers: int = 0  # of a model with experts: layers without them
    gated: bool = True  # the feed-forward block has a gate
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
    family: str = ""
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def groups(self) -> List[Group]:
        counts: Dict[Tuple[str, int], int] = {}
        for layer in self.kv_layers:
            key = (layer.kind, layer.window)
            counts[key] = counts.get(key, 0) + 1
        return [Group(kind, count, window) for (kind, window), count in counts.items()]

    @property
    def mla(self) -> bool:
        return any(layer.kind == MLA for layer in self.kv_layers)


def _integer(config: Mapping[str, Any], names: Sequence[str], default: Optional[int] = None, what: str = "") -> int:
    """The first of `names` with a value, as vLLM's getattr_iter takes it."""
    for name in names:
        value = config.get(name)
        if isinstance(value, bool) or value is None:
            continue
        if isinstance(value, int):
            return value
        raise Unknown(f"{name} is {value!r} in config.json, a whole number was expected")
    if default is None:
        raise Unknown(f"config.json has no {what or names[0]} (looked for {', '.join(names)})")
    return default


HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
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


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that describes the language model."""
    for name in ("text_config", "llm_config", "language_config"):
        inner = config.get(name)
        if isinstance(inner, Mapping):
            return inner
    thinker = config.get("thinker_config")
    if isinstance(thinker, Mapping):
        return text_of(thinker)
    return config


def dtype_of(config: Mapping[str, Any]) -> Optional[str]:
    for part in (config, text_of(config)):
        value = part.get("dtype", part.get("torch_dtype"))
        if value is not None:
            return str(value).replace("torch.", "")
    return None


def shape(config: Mapping[str, Any]) -> Shape:
    """Read config.json (already parsed). Raises Unknown, never guesses."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or not names:
        raise Unknown("config.json names no architecture (`architectures`)")
    architecture = str(names[0])
    family = FAMILIES.get(architecture)
    if family is None:
        raise Unknown(f"architecture {architecture} is not known: its memory has to be measured, not planned")
    return family(architecture, config)


def _base(architecture: str, config: Mapping[str, Any], **changes: Any) -> Shape:
    """A decoder whose layers all hold keys and values for every token."""
    text = text_of(config)
    hidden = _integer(text, HIDDEN)
    layers = _integer(text, LAYERS)
    heads = changes.pop("heads", None) or _integer(text, HEADS)
    kv_heads = changes.pop("kv_heads", None) or _integer(text, KV_HEADS, heads)
    head_dim = changes.pop("head_dim", None) or _head_dim(text, hidden, heads)
    head_dim_v = changes.pop("head_dim_v", None) or head_dim
    experts = _integer(text, EXPERTS, 0)
    result = Shape(
        architecture=architecture,
        model_type=str(text.get("model_type") or config.get("model_type") or ""),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        intermediate=_integer(text, INTERMEDIATE, 4 * hidden if architecture in FOUR_TIMES else 0),
        vocab=_integer(text, ("vocab_size", "padded_vocab_size")),
        max_positions=_integer(text, POSITIONS, 0) or None,
        dtype=dtype_of(config),
        kv_layers=tuple([Layer(FULL, kv_heads, head_dim, head_dim_v)] * layers),
        tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        experts=experts,
        experts_per_token=_integer(text, EXPERTS_PER_TOKEN, 0),
        expert_intermediate=_integer(text, ("moe_intermediate_size", "expert_ffn_hidden_size"), 0),
        quantization=quantization_of(config),
        multimodal=_multimodal(architecture, config),
        pooling=architecture in POOLING,
        config=config,
    )
    return replace(result, **changes)


def _head_dim(text: Mapping[str, Any], hidden: int, heads: int) -> int:
    for name in ("head_dim", "hidden_size_per_head", "kv_channels"):
        value = text.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    if not heads or hidden % heads:
        raise Unknown(f"hidden size {hidden} is no multiple of {heads} heads and config.json has no head_dim")
    return hidden // heads


def _multimodal(architecture: str, config: Mapping[str, Any]) -> bool:
    return any(isinstance(config.get(name), Mapping) for name in ("vision_config", "audio_config", "visual")) or (
        architecture in MULTIMODAL
    )


def quantization_of(config: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
    """method, bits, group_size and block of the checkpoint's own quantization; None where there is none."""
    for part in (config, text_of(config)):
        for name in ("quantization_config", "compression_config"):
            found = part.get(name)
            if isinstance(found, Mapping):
                return _quantization(found)
    if isinstance(config.get("quantization_bit"), int) and config["quantization_bit"]:
        return {"method": "own", "bits": config["quantization_bit"], "group_size": None, "block": None}
    return None


def _quantization(found: Mapping[str, Any]) -> Dict[str, Any]:
    method = str(found.get("quant_method") or "").lower().replace("compressed_tensors", "compressed-tensors")
    bits, group = found.get("bits", found.get("w_bit")), found.get("group_size", found.get("q_group_size"))
    block = found.get("weight_block_size")
    kv_cache = None
    if method == "compressed-tensors":
        schemes = [s for s in (found.get("config_groups") or {}).values() if isinstance(s, Mapping)]
        weights = [s["weights"] for s in schemes if isinstance(s.get("weights"), Mapping)]
        if weights:
            bits, group = weights[0].get("num_bits"), weights[0].get("group_size")
            block = weights[0].get("block_structure")
        if isinstance(found.get("kv_cache_scheme"), Mapping):
            kv_cache = "fp8"
    if not method and isinstance(found.get("quantization"), Mapping):
        inner = found["quantization"]
        method = "modelopt"
        if inner.get("kv_cache_quant_algo"):
            kv_cache = str(inner["kv_cache_quant_algo"]).lower()
    if bits is None:
        bits = {"fp8": 8, "mxfp4": 4, "modelopt_fp4": 4, "fbgemm_fp8": 8}.get(method)
    return {"method": method, "bits": bits, "group_size": group, "block": block, "kv_cache_dtype": kv_cache}


def plain(architecture: str, config: Mapping[str, Any]) -> Shape:
    return replace(_base(architecture, config), family="plain")


FOUR_TIMES = {"GPT2LMHeadModel", "GPTJForCausalLM", "BloomForCausalLM", "FalconForCausalLM", "GPTBigCodeForCausalLM"}
MULTIMODAL = {"Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"}
POOLING = {"Qwen2ForRewardModel", "Qwen2ForProcessRewardModel", "InternLM2ForRewardModel", "Qwen2Model", "LlamaModel"}

FAMILIES: Dict[str, Callable[[str, Mapping[str, Any]], Shape]] = {
    "LlamaForCausalLM": plain,
    "MistralForCausalLM": plain,
    "Qwen2ForCausalLM": plain,
    "Qwen3ForCausalLM": plain,
    "MixtralForCausalLM": plain,
    "Qwen3MoeForCausalLM": plain,
    "Phi3ForCausalLM": plain,
    "OPTForCausalLM": plain,
    "JAISLMHeadModel": plain,
    "Qwen2VLForConditionalGeneration": plain,
    "Qwen2_5_VLForConditionalGeneration": plain,
}
