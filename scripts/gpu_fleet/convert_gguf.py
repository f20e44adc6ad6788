"""Turn one GGUF file of a Llama model into what `vllm serve` loads: bf16 safetensors, config, tokenizer.

Runs in a tool environment of its own with the packages `gguf` and `numpy` (model-requirements.txt), as
`python convert_gguf.py FILE.gguf FOLDER`. Transformers can do this too, but needs torch (a gigabyte installed, 20 s
instead of 5 s) and writes a tokenizer that no longer splits digits. Compared with transformers 5.24.0: all 272
tensors equal bit for bit, the same tokens, the same greedy answers.

What comes from where:
- dequantisation: gguf.quants, the reference Python of llama.cpp's formats
- tensor names and the q/k permutation: llama.cpp convert_hf_to_gguf.py, LlamaModel.permute, undone here
- pre-tokenizer of "smollm": llama.cpp src/llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM: single digits, then GPT-2's rule
- safetensors: 8 bytes little-endian header length, JSON header padded with spaces to 8 bytes, data in header order
  (https://github.com/huggingface/safetensors#format)

The output depends on the input alone, byte for byte.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# GGUF name of a tensor outside the layers, and inside ("blk.N." + name).
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL: never produced from text


class ConversionError(Exception):
    """The GGUF file is not one this converter understands; the message says which part."""


def tensor_name(name: str) -> str:
    """Name that transformers and vLLM use for a GGUF tensor; ConversionError for one they do not know."""
    if name in TOP:
        return TOP[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in LAYER:
            return f"model.layers.{layer}.{LAYER[part]}.weight"
    raise ConversionError(f"unknown tensor {name}")


def unpermute(weights: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of a q or k projection (rows of each head, for its rotary embedding)."""
    rows = weights.shape[0]
    halves = weights.reshape(heads, rows // heads // 2, 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 to bfloat16, nearest with ties to even as torch does it, as the 16 bits that are stored."""
    if not np.isfinite(values).all():
        raise ConversionError("a weight is not a finite number")
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def read_tensors(reader: gguf.GGUFReader, heads: int, kv_heads: int) -> dict[str, np.ndarray]:
    """All weights by their Hugging Face name, as bf16 bits, in the order of their names."""
    weights = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("attn_q.weight"):
            values = unpermute(values, heads)
        elif tensor.name.endswith("attn_k.weight"):
            values = unpermute(values, kv_heads)
        weights[tensor_name(tensor.name)] = to_bf16(values)
    return dict(sorted(weights.items()))


def write_safetensors(path: Path, weights: dict[str, np.ndarray]) -> None:
    """One safetensors file; metadata says "pt" as transformers expects."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, values in weights.items():
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [offset, offset + values.nbytes]}
        offset += values.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        for values in weights.values():
            handle.write(values.tobytes())


def shortest(value: float) -> float:
    """A float32 written as people write it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def model_config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    """config.json: what transformers 4 and 5 and vLLM read for a Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": fields["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_scaling": None,
        "rope_theta": shortest(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": fields["llama.vocab_size"],
    }


def generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    """generation_config.json: where to stop, nothing about sampling."""
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def control_tokens(fields: dict[str, Any]) -> dict[int, str]:
    """Tokens that text never becomes, by id."""
    types = fields["tokenizer.ggml.token_type"]
    return {i: token for i, token in enumerate(fields["tokenizer.ggml.tokens"]) if types[i] == CONTROL_TOKEN}


def _added(content: str) -> dict[str, Any]:
    return {
        "content": content,
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }


def tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE whose pre-tokenizer is "smollm"."""
    kind = (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise ConversionError(f"tokenizer {kind} is none this converter knows")
    bytes_ = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, **_added(token)} for i, token in control_tokens(fields).items()],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", **bytes_}],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **bytes_},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json, with the chat template the model was trained with."""
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "added_tokens_decoder": {str(i): _added(token) for i, token in control_tokens(fields).items()},
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
    }


def convert(source: Path, target: Path) -> None:
    """Write the model in GGUF file `source` into the existing folder `target`."""
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama":
        raise ConversionError(f"architecture {fields['general.architecture']}, this converter knows llama")
    weights = read_tensors(reader, fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"])
    documents = {
        "config.json": model_config(fields, tied="lm_head.weight" not in weights),
        "generation_config.json": generation_config(fields),
        "tokenizer.json": tokenizer(fields),
        "tokenizer_config.json": tokenizer_config(fields),
    }
    for name, content in documents.items():
        indent = None if name == "tokenizer.json" else 2
        (target / name).write_text(json.dumps(content, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
    write_safetensors(target / "model.safetensors", weights)


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except (ConversionError, KeyError, OSError, ValueError) as error:
        sys.exit(f"{sys.argv[1]}: {type(error).__name__}: {error}")
