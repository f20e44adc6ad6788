"""A small Llama with weights from a seed, for tests of parallelism: 8 attention and 4 KV heads, so that two ranks can share them.

    python llama_shape.py FOLDER MODEL      FOLDER is made; tokenizer and special tokens are those of the prepared MODEL

It says nothing sensible, but always the same: weights are float32, uniform, scaled so that each layer matters and the
likeliest token is clear. SmolLM2-135M itself has 9 attention heads, which no number of ranks above one but 3 and 9 divides.
"""

from __future__ import annotations

import array
import json
import math
import random
import shutil
import sys
from pathlib import Path

SEED = 20261129
HIDDEN, LAYERS, INNER, HEADS, KV_HEADS, HEAD_DIM = 256, 4, 512, 8, 4, 32


def shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, as transformers' Llama has them."""
    made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        made |= {
            f"{at}self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{at}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{at}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{at}mlp.down_proj.weight": (HIDDEN, INNER),
            f"{at}input_layernorm.weight": (HIDDEN,),
            f"{at}post_attention_layernorm.weight": (HIDDEN,),
        }
    return {**made, "model.norm.weight": (HIDDEN,), "lm_head.weight": (vocabulary, HIDDEN)}


def values(name: str, shape: tuple[int, ...], source: random.Random) -> bytes:
    """The float32 values of one tensor, little-endian."""
    if len(shape) == 1:
        return array.array("f", [1.0] * shape[0]).tobytes()
    width = math.sqrt(3.0 / (1 if "embed_tokens" in name else shape[1]))  # uniform in +-width: variance width^2 / 3
    return array.array("f", [(2.0 * source.random() - 1.0) * width for _ in range(math.prod(shape))]).tobytes()


def write(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    """One safetensors file: 8 bytes of header length, JSON header, data in its order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    source = random.Random(SEED)
    with path.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        for name, shape in tensors.items():
            handle.write(values(name, shape, source))


def make(folder: Path, model: Path) -> None:
    """The model's folder; weights last, so that what is cut short does not look whole."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(model / name, folder / name)
    given = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config = given | {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write(folder / "model.safetensors", shapes(config["vocab_size"]))


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
