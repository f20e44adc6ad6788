# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a config.json says about a model: layers, heads, which layers keep KV and of which kind.

An architecture or a field that is not known here is Unknown; nothing is guessed. Names of architectures are vLLM's
(model_executor/models/registry.py of 0.26.0 and 0.32.0); which layers slide, share or hold a state is from the model's own
file there, named in the first line of each family. tests/unit/fixtures/kv_specs.json has what vLLM itself makes of them.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils.model_shape import (
    CHUNKED,
    EXPERTS,
    EXPERTS_PER_TOKEN,
    FULL,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    MAMBA,
    MLA,
    MOST_LAYERS,
    POSITIONS,
    SLIDING,
    Layer,
    Shape,
    State,
    Unknown,
    dtype_of,
    integer,
    numbers,
    positive,
    quantization_of,
    text_of,
    told,
    words,
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Read config.json (already parsed). Raises Unknown, never guesses."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise Unknown("config.json names no architecture (`architectures`)")
    architecture = str(names[0])
    text = text_of(config)
    family = FAMILIES.get(architecture)
    if family is None and architecture in WRAPPERS:
        inner = str(text.get("model_type") or "")
        family = MODEL_TYPES.get(inner or WRAPPERS[architecture])
        if family is None:
            raise Unknown(f"{architecture} holds a language model of type {inner or 'none'}, which is not known here")
    if family is None:
        raise Unknown(f"architecture {architecture} is not known here: its memory has to be measured")
    try:
        return _sane(family(architecture, config, text))
    except (ArithmeticError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise Unknown(f"config.json cannot be read as {architecture}: {error}") from error


def _sane(known: Shape) -> Shape:
    """Every number that something is divided by is there, and a state has a size."""
    sizes = {"hidden size": known.hidden, "heads": known.heads, "KV heads": known.kv_heads, "head size": known.head_dim}
    state = known.state
    if state is not None:
        sizes.update(
            {"channels of the state": state.inner, "kernel of the convolution less one": state.conv_kernel - 1}
        )
        if state.kind != "short_conv":
            sizes["size of the state"] = state.key_dim if state.kind == "gated_delta_net" else state.size
    if any(layer.kind == MLA for kept in known.kv_layers for layer in kept):
        sizes.update({"kv_lora_rank": known.kv_lora_rank, "v_head_dim": known.v_dim})
    for what, size in {**sizes, "vocabulary": known.vocab}.items():
        if size < 1:
            raise Unknown(f"config.json makes the {what} of {known.architecture} {size}, a number above 0 was expected")
    return known


def _head_dim(text: Mapping[str, Any], hidden: int, heads: int) -> int:
    for name in ("head_dim", "attention_head_dim", "hidden_size_per_head", "kv_channels"):
        value = text.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return integer(text, (name,))
    if not heads or hidden % heads:
        raise Unknown(f"hidden size {hidden} is no multiple of {heads} heads and config.json has no head_dim")
    return hidden // heads


def _base(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any], **changes: Any) -> Shape:
    """A decoder whose layers all keep keys and values of every token."""
    hidden, layers = positive(text, HIDDEN), positive(text, LAYERS)
    if layers > MOST_LAYERS:
        raise Unknown(f"config.json has {layers} layers: at most {MOST_LAYERS} were expected")
    heads = changes.pop("heads", None) or positive(text, HEADS)
    kv_heads = changes.pop("kv_heads", None) or positive(text, KV_HEADS, heads)
    head_dim = changes.pop("head_dim", None) or _head_dim(text, hidden, heads)
    inner = changes.pop("intermediate", None)
    experts = integer(text, EXPERTS, 0)
    result = Shape(
        architecture=architecture,
        model_type=str(text.get("model_type") or config.get("model_type") or ""),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        intermediate=integer(text, INTERMEDIATE, 0) if inner is None else inner,
        vocab=positive(text, ("vocab_size", "padded_vocab_size")),
        max_positions=integer(text, POSITIONS, 0) or None,
        dtype=dtype_of(config),
        kv_layers=((Layer(FULL, kv_heads, head_dim, head_dim),),) * layers,
        feed_forward=(("experts" if experts else "dense"),) * layers,
        tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        experts=experts,
        experts_per_token=integer(text, EXPERTS_PER_TOKEN, 0),
        expert_intermediate=integer(text, ("moe_intermediate_size", "intermediate_size"), 0) if experts else 0,
        quantization=quantization_of(config),
        multimodal=architecture in WRAPPERS or architecture in FLAT_WRAPPERS,
        pooling=architecture in POOLING,
    )
    return replace(result, **changes)


def _experts(where: Sequence[bool]) -> Tuple[str, ...]:
    return tuple("experts" if here else "dense" for here in where)


def _types(text: Mapping[str, Any], layers: int) -> Optional[List[str]]:
    found = text.get("layer_types")
    if found is None:
        return None
    if not isinstance(found, list) or len(found) < layers:
        raise Unknown(f"layer_types has {len(found) if isinstance(found, list) else 'no'} entries for {layers} layers")
    return [str(kind) for kind in found[:layers]]


def _sliding(known: Shape, slides: Sequence[bool], window: Optional[int]) -> Shape:
    """Layers where `slides` is true keep `window` tokens; none does where the window is null or 0."""
    full = Layer(FULL, known.kv_heads, known.head_dim, known.head_dim_v)
    short = replace(full, kind=SLIDING, window=window) if window else full
    return replace(known, kv_layers=tuple((short if slide else full,) for slide in slides))


def _by_type(known: Shape, text: Mapping[str, Any], otherwise: Optional[Sequence[bool]] = None) -> Shape:
    types = _types(text, known.layers)
    if types is None:
        return known if otherwise is None else _sliding(known, otherwise, _window(text))
    strange = sorted(set(types) - {"full_attention", "sliding_attention"})
    if strange:
        raise Unknown(f"{known.architecture} has layers of type {', '.join(strange)}, which are not known here")
    return _sliding(known, [kind == "sliding_attention" for kind in types], _window(text))


def _window(text: Mapping[str, Any]) -> Optional[int]:
    value = text.get("sliding_window")
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise Unknown(f"sliding_window is {told(value)} in config.json, a whole number was expected")
    return integer(text, ("sliding_window",), 0) or None


def llama(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    """llama.py and the classes built like it: layer_types, or one window for all (EngineArgs.create_engine_config)."""
    known = _base(architecture, config, text, counted=not integer(text, EXPERTS, 0))
    if _types(text, known.layers):
        return _by_type(known, text)
    window = _window(text)
    if known.model_type == "mistral" and "sliding_window" not in text:
        window = 4096  # transformers' MistralConfig has it where config.json has none
    return _sliding(known, [bool(window)] * known.layers, window)


def tied_llama(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    """gemma.py and commandr.py: like llama, and the head is the embedding unless config.json says no."""
    known = llama(architecture, config, text)
    return replace(known, tied=bool(text.get("tie_word_embeddings", True)))


def starcoder2(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    """Run by vLLM's Transformers backend: one window for all layers, no gate."""
    return replace(tied_llama(architecture, config, text), gated=False)


def qwen(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    """qwen2.py, qwen3.py, qwen2_moe.py, qwen3_moe.py: a window counts only with use_sliding_window."""
    if text.get("use_sliding_window") and _window(text):
        raise Unknown(f"{architecture} with use_sliding_window is not known here")
    known = _base(architecture, config, text)
    if not known.experts:
        return replace(known, counted=True)
    step, dense = positive(text, ("decoder_sparse_step",), 1), set(numbers(text, "mlp_only_layers"))
    moe = _experts([i not in dense and (i + 1) % step == 0 for i in range(known.layers)])
    shared = integer(text, ("shared_expert_intermediate_size",), 0)
    return replace(known, feed_forward=moe, shared_intermediate=shared, counted=True)


def mixtral(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    return replace(llama(architecture, config, text), counted=True)


def ungated(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    """opt.py, gpt2.py, gpt_j.py, bloom.py, falcon.py, jais.py: two matrices a block, four times as wide unless told."""
    hidden = integer(text, HIDDEN)
    known = _base(architecture, config, text, gated=False, intermediate=integer(text, INTERMEDIATE, 4 * hidden))
    return replace(known, tied=bool(text.get("tie_word_embeddings", True)))


def falcon(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    """falcon.py and FalconModelArchConfigConvertor: one KV head with multi_query, unless new_decoder_architecture. Its
    attention is made without the cache's configuration, so that --kv-cache-dtype changes nothing."""
    heads = integer(text, HEADS)
    if text.get("new_decoder_architecture"):
        kv_heads = integer(text, KV_HEADS, heads)
    else:
        kv_heads = 1 if text.get("multi_query", True) else heads
    hidden = integer(text, HIDDEN)
    inner = integer(text, INTERMEDIATE, 4 * hidden)
    known = _base(
        architecture, config, text, heads=heads, kv_heads=kv_heads, gated=False, intermediate=inner, tied=True
    )
    return replace(known, own_cache_dtype=True)


def chatglm(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    """chatglm.py: KV heads are multi_query_group_num with multi_query_attention. The first generation has neither."""
    heads = integer(text, HEADS)
    grouped = text.get("multi_query_attention")
    kv_heads = integer(text, ("multi_query_group_num",)) if grouped else heads
    return _base(architecture, config, text, heads=heads, kv_heads=kv_heads, tied=False)


def gemma2(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    """gemma2.py: layer_types, which transformers fills in with every other layer sliding, the first one too."""
    known = _base(architecture, config, text, tied=bool(text.get("tie_word_embeddings", True)), counted=True)
    return _by_type(known, text, [i % 2 == 0 for i in range(known.layers)])


def patterned(default: int) -> Callable[[str, Mapping[str, Any], Mapping[str, Any]], Shape]:
    """gemma3.py (6) and commandr.py (4): layer_types, or one full layer in every sliding_window_pattern."""

    def family(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
        known = _base(architecture, config, text, tied=bool(text.get("tie_word_embeddings", True)), counted=True)
        every = positive(text, ("sliding_window_pattern",), default)
        return _by_type(known, text, [bool((i + 1) % every) for i in range(known.layers)])

    return family


def exaone4(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    """exaone4.py: layer_types, or a pattern of L and G."""
    known = _base(architecture, config, text, counted=True)
    pattern = text.get("sliding_window_pattern")
    if text.get("layer_types") is None and isinstance(pattern, str) and pattern:
        return _sliding(known, [pattern[i % len(pattern)] == "L" for i in range(known.layers)], _window(text))
    return _by_type(known, text)


def gemma3n(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    """gemma3n.py: the last num_kv_shared_layers use the cache of an earlier layer and keep none."""
    inner = text.get("intermediate_size")
    widest = max(inner) if isinstance(inner, list) and inner else integer(text, INTERMEDIATE)
    known = _by_type(_base(architecture, config, text, intermediate=widest, tied=True), text)
    if text.get("layer_types") is None:
        raise Unknown(f"{architecture} without layer_types is not known here")
    own = known.layers - integer(text, ("num_kv_shared_layers",), 0)
    return replace(known, kv_layers=tuple(kept if i < own else () for i, kept in enumerate(known.kv_layers)))


def gpt_oss(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    """gpt_oss.py: layer_types, which transformers fills in with every other layer sliding, the first one too."""
    known = _base(architecture, config, text, counted=True)
    return _by_type(known, text, [i % 2 == 0 for i in range(known.layers)])


def llama4(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    """llama4.py: layers with rotary positions look back within one chunk; experts in every so many-th layer."""
    known = _base(architecture, config, text)
    rope = numbers(text, "no_rope_layers")
    if not rope:
        every = positive(text, ("no_rope_layer_interval",), 4)
        rope = [int(bool((i + 1) % every)) for i in range(known.layers)]
    if len(rope) < known.layers:
        raise Unknown(f"no_rope_layers has {len(rope)} entries for {known.layers} layers")
    full, chunk = known.kv_layers[0][0], integer(text, ("attention_chunk_size",), 0)
    local = replace(full, kind=CHUNKED, window=chunk) if chunk else full
    step = integer(text, ("interleave_moe_layer_step",), 1)
    which = numbers(text, "moe_layers")
    moe = _experts([i in which if which else step > 0 and (i + 1) % step == 0 for i in range(known.layers)])
    inner = integer(text, ("intermediate_size",))
    return replace(
        known,
        kv_layers=tuple((local if rope[i] else full,) for i in range(known.layers)),
        feed_forward=moe,
        intermediate=integer(text, ("intermediate_size_mlp",), inner),
        expert_intermediate=inner,
        shared_intermediate=inner,
        counted=True,
    )


def deepseek(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    """deepseek_v2.py: one latent and one rotary part a token, not divided by tensor parallelism."""
    if text.get("index_topk") is not None or text.get("compress_ratios") is not None:
        raise Unknown(f"{architecture} with a sparse index (index_topk) keeps more than a latent: not known here")
    rank, rope = integer(text, ("kv_lora_rank",)), integer(text, ("qk_rope_head_dim",))
    nope, value = integer(text, ("qk_nope_head_dim",)), integer(text, ("v_head_dim",))
    known = _base(architecture, config, text, head_dim=nope + rope)
    dense, step = integer(text, ("first_k_dense_replace",), 0), positive(text, ("moe_layer_freq",), 1)
    moe = _experts([bool(known.experts) and i >= dense and i % step == 0 for i in range(known.layers)])
    return replace(
        known,
        kv_layers=((Layer(MLA, 1, rank + rope, 0),),) * known.layers,
        feed_forward=moe,
        head_dim_v=value,
        shared_intermediate=integer(text, ("n_shared_experts",), 0) * known.expert_intermediate,
        kv_lora_rank=rank,
        q_lora_rank=integer(text, ("q_lora_rank",), 0),
        qk_rope=rope,
        qk_nope=nope,
        v_dim=value,
        counted=True,
    )


def glm4_moe(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    """glm4_moe.py: dense layers first, then experts and shared experts."""
    known = _base(architecture, config, text)
    dense = integer(text, ("first_k_dense_replace",), 0)
    shared = integer(text, ("n_shared_experts",), 0) * known.expert_intermediate
    moe = _experts([i >= dense for i in range(known.layers)])
    return replace(known, feed_forward=moe, shared_intermediate=shared, counted=True)


def _mixed(known: Shape, state: State, mamba: Sequence[bool], attention: Sequence[bool]) -> Shape:
    """Which layers keep a state, which keep tokens; one may do both."""
    full = Layer(FULL, known.kv_heads, known.head_dim, known.head_dim_v)
    kept = tuple(((Layer(MAMBA),) if mamba[i] else ()) + ((full,) if attention[i] else ()) for i in range(known.layers))
    return replace(known, kv_layers=kept, state=state)


def jamba(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    """jamba.py, JambaConfig.layers_block_type and layers_num_experts."""
    known = _base(architecture, config, text)
    period, offset = positive(text, ("attn_layer_period",)), integer(text, ("attn_layer_offset",))
    attention = [i % period == offset for i in range(known.layers)]
    state = State(
        "mamba1",
        inner=integer(text, ("mamba_expand",)) * known.hidden,
        conv_kernel=integer(text, ("mamba_d_conv",)),
        size=integer(text, ("mamba_d_state",)),
    )
    period, offset = positive(text, ("expert_layer_period",), 2), integer(text, ("expert_layer_offset",), 1)
    moe = _experts([known.experts > 1 and i % period == offset for i in range(known.layers)])
    return replace(_mixed(known, state, [not a for a in attention], attention), feed_forward=moe)


def _mamba2(text: Mapping[str, Any], inner: int, names: Sequence[str], dtype: str = "auto") -> State:
    heads, head_dim, size, groups, kernel = (integer(text, (name,)) for name in names)
    return State("mamba2", inner, kernel, size, heads, head_dim, groups, dtype=dtype)


def nemotron_h(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    """nemotron_h.py: a letter a layer, M mamba, * attention, - and E feed-forward. The state is float32 unless told."""
    pattern = text.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or set(pattern) - set("M*-E"):
        raise Unknown(f"hybrid_override_pattern is {pattern!r}, letters M, *, - and E were expected")
    known = _base(architecture, config, text, gated=False)
    if len(pattern) != known.layers:
        raise Unknown(f"hybrid_override_pattern has {len(pattern)} letters for {known.layers} layers")
    names = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
    inner = integer(text, ("mamba_num_heads",)) * integer(text, ("mamba_head_dim",))
    state = _mamba2(text, inner, names, str(text.get("mamba_ssm_cache_dtype") or "float32"))
    mixed = _mixed(known, state, [c == "M" for c in pattern], [c == "*" for c in pattern])
    letters = {"E": "experts", "-": "dense"}
    return replace(mixed, feed_forward=tuple(letters.get(c, "") for c in pattern))


def qwen3_next(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    """qwen3_next.py: linear attention with a state (gated delta net), full attention in every so many-th layer."""
    known = _base(architecture, config, text)
    types, every = _types(text, known.layers), positive(text, ("full_attention_interval",), 4)
    if types is None:
        attention = [(i + 1) % every == 0 for i in range(known.layers)]
    elif set(types) - {"full_attention", "linear_attention"}:
        raise Unknown(f"{architecture} has layers of type {', '.join(sorted(set(types)))}, which are not known here")
    else:
        attention = [kind == "full_attention" for kind in types]
    heads, width = integer(text, ("linear_num_value_heads",)), integer(text, ("linear_value_head_dim",))
    state = State(
        "gated_delta_net",
        inner=heads * width,
        conv_kernel=integer(text, ("linear_conv_kernel_dim",)),
        heads=heads,
        head_dim=width,
        key_heads=integer(text, ("linear_num_key_heads",)),
        key_dim=integer(text, ("linear_key_head_dim",)),
    )
    step, dense = positive(text, ("decoder_sparse_step",), 1), set(numbers(text, "mlp_only_layers"))
    moe = _experts([known.experts > 0 and i not in dense and (i + 1) % step == 0 for i in range(known.layers)])
    shared = integer(text, ("shared_expert_intermediate_size",), 0)
    mixed = _mixed(known, state, [not a for a in attention], attention)
    return replace(mixed, feed_forward=moe, shared_intermediate=shared)


def zamba2(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    """zamba2.py: mamba in every layer, attention beside it in the hybrid ones, twice as wide as the hidden size."""
    known = _base(architecture, config, text)
    types = words(text, "layers_block_type")
    if types is None or len(types) != known.layers or set(types) - {"mamba", "hybrid"}:
        raise Unknown("layers_block_type with mamba and hybrid was expected, one entry a layer")
    names = ("n_mamba_heads", "mamba_headdim", "mamba_d_state", "mamba_ngroups", "mamba_d_conv")
    state = _mamba2(text, integer(text, ("mamba_expand",)) * known.hidden, names)
    return _mixed(known, state, [True] * known.layers, [kind == "hybrid" for kind in types])


def granite_hybrid(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    """granitemoehybrid.py: layer_types with mamba and attention."""
    known = _base(architecture, config, text)
    types = _types(text, known.layers) or words(text, "layers_block_type")
    if types is None or len(types) != known.layers or set(types) - {"mamba", "attention"}:
        raise Unknown("layer_types with mamba and attention was expected, one entry a layer")
    names = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
    state = _mamba2(text, integer(text, ("mamba_expand",)) * known.hidden, names)
    shared = integer(text, ("shared_intermediate_size",), 0)
    mixed = _mixed(known, state, [kind == "mamba" for kind in types], [kind == "attention" for kind in types])
    return replace(mixed, shared_intermediate=shared)


def falcon_h1(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    """falcon_h1.py: mamba and attention side by side in every layer."""
    known = _base(architecture, config, text)
    names = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
    inner = integer(text, ("mamba_d_ssm",), integer(text, ("mamba_expand",), 0) * known.hidden)
    every = [True] * known.layers
    return _mixed(known, _mamba2(text, inner, names), every, every)


def lfm2(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    """lfm2.py: short convolutions beside full attention."""
    known = _base(architecture, config, text, tied=True)
    types = _types(text, known.layers)
    if types is None:
        full = text.get("full_attn_idxs")
        if not isinstance(full, list):
            raise Unknown(f"{architecture} without layer_types and full_attn_idxs is not known here")
        types = ["full_attention" if i in full else "conv" for i in range(known.layers)]
    if set(types) - {"full_attention", "conv"}:
        raise Unknown(f"{architecture} has layers of type {', '.join(sorted(set(types)))}, which are not known here")
    width = integer(text, ("conv_dim",), known.hidden)
    state = State("short_conv", inner=width, conv_kernel=integer(text, ("conv_L_cache",)))
    attention = [kind == "full_attention" for kind in types]
    return _mixed(known, state, [not a for a in attention], attention)


def mamba(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    """mamba.py and mamba2.py: no layer keeps tokens."""
    known = _base(
        architecture, config, text, heads=1, kv_heads=1, head_dim=1, tied=bool(text.get("tie_word_embeddings", True))
    )
    inner = integer(text, ("intermediate_size",), integer(text, ("expand",), 2) * known.hidden)
    if architecture == "Mamba2ForCausalLM":
        inner = integer(text, ("expand",)) * known.hidden
        state = _mamba2(text, inner, ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel"))
    else:
        kernel, size = integer(text, ("conv_kernel",)), integer(text, ("state_size",))
        state = State("mamba1", inner=inner, conv_kernel=kernel, size=size)
    return _mixed(known, state, [True] * known.layers, [False] * known.layers)


def encoder(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Shape:
    """bert.py, roberta.py, modernbert.py: attention in one pass, nothing is kept."""
    known = _base(architecture, config, text, gated=False, tied=True, pooling=True)
    return replace(known, kv_layers=((),) * known.layers)


# Wrappers around a language model of a type below: images or sound beside it, and more weights for those.
WRAPPERS: Dict[str, str] = {  # with the type where the inner configuration names none and only one is possible
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma3nForConditionalGeneration": "gemma3n_text",
    "InternVLChatModel": "",
    "InternVLForConditionalGeneration": "",
    "Llama4ForConditionalGeneration": "llama4_text",
    "LlavaForConditionalGeneration": "",
    "LlavaNextForConditionalGeneration": "",
    "LlavaOnevisionForConditionalGeneration": "",
    "Mistral3ForConditionalGeneration": "mistral",
    "PixtralForConditionalGeneration": "",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe_text",
}
FLAT_WRAPPERS = {"Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"}
POOLING = {"Qwen2ForRewardModel", "Qwen2ForProcessRewardModel", "InternLM2ForRewardModel", "Qwen2Model", "LlamaModel"}

MODEL_TYPES: Dict[str, Callable[[str, Mapping[str, Any], Mapping[str, Any]], Shape]] = {
    "gemma2": gemma2,
    "gemma3_text": patterned(6),
    "gemma3n_text": gemma3n,
    "internlm2": llama,
    "llama": llama,
    "llama4_text": llama4,
    "mistral": llama,
    "mixtral": mixtral,
    "qwen2": qwen,
    "qwen3": qwen,
    "qwen3_moe": qwen,
    "qwen3_vl_text": qwen,
    "qwen3_vl_moe_text": qwen,
}

FAMILIES: Dict[str, Callable[[str, Mapping[str, Any], Mapping[str, Any]], Shape]] = {
    "BertForSequenceClassification": encoder,
    "BertModel": encoder,
    "BloomForCausalLM": ungated,
    "ChatGLMForConditionalGeneration": chatglm,
    "ChatGLMModel": chatglm,
    "Cohere2ForCausalLM": patterned(4),
    "CohereForCausalLM": tied_llama,
    "DeepseekV2ForCausalLM": deepseek,
    "DeepseekV3ForCausalLM": deepseek,
    "Exaone4ForCausalLM": exaone4,
    "FalconForCausalLM": falcon,
    "FalconH1ForCausalLM": falcon_h1,
    "FalconMambaForCausalLM": mamba,
    "GPT2LMHeadModel": ungated,
    "GPTJForCausalLM": ungated,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": patterned(6),
    "Gemma3nForCausalLM": gemma3n,
    "GemmaForCausalLM": tied_llama,
    "Glm4ForCausalLM": llama,
    "Glm4MoeForCausalLM": glm4_moe,
    "GptOssForCausalLM": gpt_oss,
    "GraniteForCausalLM": llama,
    "GraniteMoeHybridForCausalLM": granite_hybrid,
    "InternLM2ForCausalLM": llama,
    "InternLM2ForRewardModel": llama,
    "InternLM3ForCausalLM": llama,
    "JAISLMHeadModel": ungated,
    "JambaForCausalLM": jamba,
    "LLaMAForCausalLM": llama,
    "Lfm2ForCausalLM": lfm2,
    "Llama4ForCausalLM": llama4,
    "LlamaForCausalLM": llama,
    "LlamaModel": llama,
    "Mamba2ForCausalLM": mamba,
    "MambaForCausalLM": mamba,
    "MiniMaxM2ForCausalLM": mixtral,
    "MistralForCausalLM": llama,
    "MistralModel": llama,
    "MixtralForCausalLM": mixtral,
    "NemotronHForCausalLM": nemotron_h,
    "OPTForCausalLM": ungated,
    "Phi3ForCausalLM": llama,
    "Qwen2ForCausalLM": qwen,
    "Qwen2ForProcessRewardModel": qwen,
    "Qwen2ForRewardModel": qwen,
    "Qwen2Model": qwen,
    "Qwen2MoeForCausalLM": qwen,
    "Qwen2VLForConditionalGeneration": qwen,
    "Qwen2_5_VLForConditionalGeneration": qwen,
    "Qwen3ForCausalLM": qwen,
    "Qwen3MoeForCausalLM": qwen,
    "Qwen3NextForCausalLM": qwen3_next,
    "RobertaModel": encoder,
    "Starcoder2ForCausalLM": starcoder2,
    "XLMRobertaForSequenceClassification": encoder,
    "XLMRobertaModel": encoder,
    "Zamba2ForCausalLM": zamba2,
}
