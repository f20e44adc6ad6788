"""Models, GPUs and the data of the collection, for the tests and benchmarks of launches.

The numbers of a model are those of its published config.json; weights are its tensors in GiB.
"""

from typing import Any

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import launch_plan
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.launch_case import Tables
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data

KNOWN = launch_plan.Known(
    serve_flags=Tables(data.flag_versions(), lambda version: data.load(f"serve_flags/{version}")),
    removed_flags=data.load("removed_flags"),
    quantization=data.load("quantization"),
    memory=data.load("memory"),
    gpus=data.load("gpus"),
)


def model(architecture: str, kind: str, sizes: str, **more: Any) -> dict[str, Any]:
    """sizes: hidden, intermediate, heads, KV heads, layers, vocabulary and positions, in this order."""
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "num_hidden_layers",
        "vocab_size",
        "max_position_embeddings",
    )
    numbers = dict(zip(names, map(int, sizes.split()), strict=True))
    return {"architectures": [architecture], "model_type": kind, "torch_dtype": "bfloat16", **numbers, **more}


LLAMA_8B = model("LlamaForCausalLM", "llama", "4096 14336 32 8 32 128256 131072")
LLAMA_70B = model("LlamaForCausalLM", "llama", "8192 28672 64 8 80 128256 131072")
LLAMA_405B = model("LlamaForCausalLM", "llama", "16384 53248 128 8 126 128256 131072")
LLAMA2_7B = model("LlamaForCausalLM", "llama", "4096 11008 32 32 32 32000 4096", torch_dtype="float16")
QWEN_05B = model("Qwen2ForCausalLM", "qwen2", "896 4864 14 2 24 151936 32768", tie_word_embeddings=True)
QWEN_7B = model("Qwen2ForCausalLM", "qwen2", "3584 18944 28 4 28 152064 32768")
QWEN_72B = model("Qwen2ForCausalLM", "qwen2", "8192 29568 64 8 80 152064 32768")
QWEN_30B_A3B = model(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    "2048 6144 32 4 48 151936 40960",
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
)
QWEN_235B = model(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    "4096 12288 64 4 94 151936 40960",
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=1536,
)
GEMMA2_9B = model("Gemma2ForCausalLM", "gemma2", "3584 14336 16 8 42 256000 8192", head_dim=256, sliding_window=4096)
SMOL_135M = model("LlamaForCausalLM", "llama", "576 1536 9 3 30 49152 2048", tie_word_embeddings=True)
MIXTRAL = model(
    "MixtralForCausalLM", "mixtral", "4096 14336 32 8 32 32000 32768", num_local_experts=8, num_experts_per_tok=2
)
BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
FP8_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MEMORY = {
    "H200": 139.8,
    "H100 80GB HBM3": 79.18,
    "L40S": 44.4,
    "L4": 22.0,
    "T4": 14.6,
    "A100 80GB": 79.15,
    "V100 32GB": 31.74,
}


def quantized(config: dict[str, Any], how: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**config, "quantization_config": how, **more}


def launch(
    config: dict[str, Any],
    gib: float,
    gpus: str = "H100 80GB HBM3",
    version: str = "0.26.0",
    args: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """gpus: `8 x H200`, or one model's name; more: keys of the launch, or of every GPU (free_gib, mig)."""
    count, name = gpus.split(" x ") if " x " in gpus else ("1", gpus)
    of_gpu = {key: more.pop(key) for key in ("free_gib", "mig") if key in more}
    return {
        "gpus": [{"name": name, "memory_gib": MEMORY[name], **of_gpu}] * int(count),
        "nodes": 1,
        "model_config": config,
        "weights_gib": gib,
        "vllm_version": version,
        "args": {f"--{flag}": value for flag, value in (args or {}).items()},
        **more,
    }
