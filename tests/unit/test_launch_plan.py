"""Launches judged by the release they name, and chosen: the handed cases, own ones derived from vLLM's sources, choices.

A source such as `u33 config/model.py:1561` is a line of vLLM 0.33.0 below vllm/, `u26` of 0.26.0, others are named.
"""

import dataclasses
import json
import pathlib
import re
import time

import launches
import pytest
import yaml
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import (
    launch_case,
    launch_memory,
    launch_plan,
    launch_quantization,
    launch_rules,
)
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data
from hypothesis import HealthCheck, given, settings, strategies
from launches import (
    AWQ,
    BERT,
    FP8_BLOCK,
    GEMMA2_9B,
    GPTQ,
    KNOWN,
    LLAMA2_7B,
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_405B,
    MIXTRAL,
    QWEN_7B,
    QWEN_30B_A3B,
    QWEN_72B,
    QWEN_235B,
    SMOL_135M,
    launch,
    quantized,
)

PLANS = pathlib.Path(__file__).parent / "fixtures" / "plans"
EXPECTED = [json.loads(line) for line in (PLANS / "expected.jsonl").read_text().splitlines()]
NEWER = ("0.26.0", "0.27.1", "0.29.0")


def judge(case):
    return launch_plan.judge(case, KNOWN)


def says(message, words):
    """Every entry stands in the message, any case; a|b means either."""
    return all(any(part.lower() in message.lower() for part in word.split("|")) for word in words)


# Each in its own release, and in newer ones where the verdict still holds.
HANDED = [(e, version) for e in EXPECTED for version in (None, *(NEWER if e["current"] else ()))]


@pytest.mark.parametrize(
    ("expected", "version"), HANDED, ids=lambda value: value["file"] if isinstance(value, dict) else value
)
def test_handed(expected, version):
    case = yaml.safe_load((PLANS / expected["file"]).read_text())
    if version:
        case["vllm_version"] = version
    verdict = judge(case)
    assert verdict.outcome in [expected["outcome"], *expected["acceptable"]], verdict.findings
    if expected["must_mention"]:
        grave = [f.message for f in verdict.findings if f.severity != "info"]
        assert any(says(message, expected["must_mention"]) for message in grave), grave
    if verdict.outcome == "error" and expected["outcome"] == "error":
        assert expected["rule"] in {f.rule for f in verdict.findings if f.severity == "error"}
    observed = expected.get("observed", {})
    if "kv_bytes_per_token_per_gpu" in observed:
        assert verdict.memory["kv_bytes_per_token"] == observed["kv_bytes_per_token_per_gpu"]
    if "weights_gib_per_gpu" in observed:
        assert verdict.memory["weights_gib"] == pytest.approx(observed["weights_gib_per_gpu"], rel=0.05)


# id: launch, outcome, rule of a finding (None: no finding but info), words in its message, source
CASES = {
    "heads over 8": (
        launch(QWEN_7B, 14.19, "8 x H100 80GB HBM3", args={"tensor-parallel-size": 8, "max-model-len": 8192}),
        ("error", "heads_tp", ["28", "8", "divi"]),
        "u33 config/model.py:1561",
    ),
    "heads over 4": (
        launch(QWEN_7B, 14.19, "4 x H100 80GB HBM3", args={"tensor-parallel-size": 4, "max-model-len": 8192}),
        ("ok", None, []),
        "u33 config/model.py:1561",
    ),
    "nine heads": (
        launch(SMOL_135M, 0.25, "2 x L4", args={"tensor-parallel-size": 2}),
        ("error", "heads_tp", ["9", "2"]),
        "u26 config/model.py:1232",
    ),
    "three KV heads over nine": (
        launch(SMOL_135M, 0.25, "3 x L4", args={"tensor-parallel-size": 3}),
        ("ok", None, []),
        "u33 model_executor/models/llama.py:151",
    ),
    "KV heads repeated": (
        launch(QWEN_235B, 437.9, "8 x H200", args={"tensor-parallel-size": 8, "max-model-len": 16384}),
        ("ok", None, []),
        "u33 model_executor/models/llama.py:155: 8 is divisible by 4 KV heads",
    ),
    "KV heads neither way": (
        launch(
            {
                **LLAMA_8B,
                "num_attention_heads": 48,
                "num_key_value_heads": 6,
                "head_dim": 128,
                "intermediate_size": 16384,
            },
            20.0,
            "4 x H100 80GB HBM3",
            args={"tensor-parallel-size": 4, "max-model-len": 8192},
        ),
        ("error", "kv_heads_tp", ["6", "4", "KV"]),
        "u33 model_executor/models/llama.py:151",
    ),
    "one KV head": (
        launch(
            {**LLAMA_8B, "num_key_value_heads": 1},
            14.0,
            "8 x H100 80GB HBM3",
            args={"tensor-parallel-size": 8, "max-model-len": 8192},
        ),
        ("ok", None, []),
        "u33 model_executor/models/llama.py:155",
    ),
    "intermediate size": (
        launch(
            {**LLAMA_8B, "intermediate_size": 13652},
            14.0,
            "8 x H100 80GB HBM3",
            args={"tensor-parallel-size": 8, "max-model-len": 8192},
        ),
        ("error", "ffn_tp", ["13652", "8"]),
        "u33 distributed/utils.py:54",
    ),
    "GPTQ group over 8": (
        launch(
            quantized(QWEN_72B, GPTQ, torch_dtype="float16"),
            38.8,
            "8 x H100 80GB HBM3",
            args={"tensor-parallel-size": 8, "max-model-len": 8192},
        ),
        ("error", "quant_group_tp", ["29568", "3696", "128"]),
        "u33 distributed/utils.py:148",
    ),
    "GPTQ group over 2": (
        launch(
            quantized(QWEN_72B, GPTQ, torch_dtype="float16"),
            38.8,
            "2 x H100 80GB HBM3",
            args={"tensor-parallel-size": 2, "max-model-len": 8192},
        ),
        ("error", "quant_group_tp", ["14784", "128"]),
        "u33 distributed/utils.py:148: 14784 is 115.5 groups",
    ),
    "AWQ group of an 11008 wide model": (
        launch(quantized(LLAMA2_7B, AWQ), 3.6, "4 x H100 80GB HBM3", args={"tensor-parallel-size": 4}),
        ("error", "quant_group_tp", ["2752", "128"]),
        "u33 model_executor/layers/quantization/auto_awq.py:821",
    ),
    "AWQ group that fits": (
        launch(quantized(LLAMA2_7B, AWQ), 3.6, "2 x H100 80GB HBM3", args={"tensor-parallel-size": 2}),
        ("ok", None, []),
        "u33 model_executor/layers/quantization/auto_awq.py:821: 5504 is 43 groups",
    ),
    "fp8 block of experts": (
        launch(
            quantized(QWEN_235B, FP8_BLOCK),
            220.0,
            "8 x H100 80GB HBM3",
            args={"tensor-parallel-size": 8, "max-model-len": 8192},
        ),
        ("error", "quant_group_tp", ["1536", "192", "128"]),
        "u26 model_executor/layers/quantization/fp8.py:566",
    ),
    "fp8 block of experts, refined": (
        launch(
            quantized(QWEN_235B, FP8_BLOCK),
            220.0,
            "8 x H100 80GB HBM3",
            "0.33.0",
            args={"tensor-parallel-size": 8, "max-model-len": 8192},
        ),
        ("ok", None, []),
        "u33 model_executor/layers/quantization/fp8.py:557: scales are refined down to 32",
    ),
    "fp8 block, experts whole": (
        launch(
            quantized(QWEN_235B, FP8_BLOCK),
            220.0,
            "8 x H100 80GB HBM3",
            args={"tensor-parallel-size": 8, "max-model-len": 8192, "enable-expert-parallel": True},
        ),
        ("ok", None, []),
        "u26 model_executor/layers/fused_moe/config.py: experts are not divided under expert parallelism",
    ),
    "fp8 block over 4": (
        launch(
            quantized(QWEN_30B_A3B, FP8_BLOCK),
            29.0,
            "4 x H100 80GB HBM3",
            args={"tensor-parallel-size": 4, "max-model-len": 8192},
        ),
        ("error", "quant_group_tp", ["768", "192"]),
        "u26 model_executor/layers/quantization/fp8.py:566",
    ),
    "bf16 asked of a T4": (
        launch(QWEN_7B, 14.19, "4 x T4", args={"tensor-parallel-size": 4, "dtype": "bfloat16", "max-model-len": 4096}),
        ("error", "bf16_cc", ["7.5", "bfloat16", "float16|half"]),
        "u33 platforms/cuda.py:651",
    ),
    "bf16 checkpoint on a T4": (
        launch(
            QWEN_7B,
            14.19,
            "4 x T4",
            args={"tensor-parallel-size": 4, "max-model-len": 4096, "gpu-memory-utilization": 0.8},
        ),
        ("ok", None, []),
        "u33 config/model.py:2423: auto falls back to float16",
    ),
    "bf16 checkpoint on a V100 before 0.9": (
        launch(QWEN_7B, 14.19, "V100 32GB", "0.8.5", args={"max-model-len": 4096}),
        ("error", "bf16_cc", ["7.0", "bfloat16", "float16|half"]),
        "0.8.5 config.py, _get_and_verify_dtype: the checkpoint's dtype is taken",
    ),
    "float16 for Gemma 2": (
        launch(GEMMA2_9B, 17.2, args={"dtype": "half", "max-model-len": 4096}),
        ("error", "fp16_model", ["gemma2", "float16"]),
        "u33 config/model.py:2398",
    ),
    "Gemma 2 on a T4": (
        launch(GEMMA2_9B, 17.2, "4 x T4", args={"tensor-parallel-size": 4, "max-model-len": 2048}),
        ("warn", "float32_fallback", ["float32"]),
        "u33 config/model.py:2423: neither bfloat16 nor float16",
    ),
    "AWQ asked for with bf16 before 0.24": (
        launch(
            quantized(LLAMA_8B, AWQ), 5.4, "A100 80GB", "0.20.2", args={"quantization": "awq", "max-model-len": 8192}
        ),
        ("error", "quant_dtype", ["bfloat16", "awq", "float16"]),
        "0.20.2 model_executor/layers/quantization/awq.py, get_supported_act_dtypes",
    ),
    "AWQ asked for with bf16 since 0.24": (
        launch(
            quantized(LLAMA_8B, AWQ), 5.4, "A100 80GB", "0.24.0", args={"quantization": "awq", "max-model-len": 8192}
        ),
        ("ok", None, []),
        "0.24.0 model_executor/layers/quantization/auto_awq.py",
    ),
    "AWQ left to Marlin with bf16": (
        launch(quantized(LLAMA_8B, AWQ), 5.4, "A100 80GB", "0.20.2", args={"max-model-len": 8192}),
        ("ok", None, []),
        "0.20.2 model_executor/layers/quantization/awq_marlin.py, override_quantization_method",
    ),
    "AWQ on a T4 before Marlin reached it": (
        launch(quantized(LLAMA_8B, AWQ, torch_dtype="float16"), 5.4, "T4", "0.11.0", args={"max-model-len": 8192}),
        ("ok", None, []),
        "0.11.0 model_executor/layers/quantization/awq.py: 7.5 and float16",
    ),
    "GPTQ asked for with bf16": (
        launch(
            quantized(LLAMA_8B, GPTQ), 5.4, "A100 80GB", "0.18.1", args={"quantization": "gptq", "max-model-len": 8192}
        ),
        ("error", "quant_dtype", ["bfloat16", "gptq"]),
        "0.18.1 model_executor/layers/quantization/gptq.py",
    ),
    "fp8 on a T4": (
        launch(
            quantized(LLAMA_8B, {"quant_method": "fp8"}),
            8.5,
            "2 x T4",
            "0.11.0",
            args={"tensor-parallel-size": 2, "max-model-len": 4096},
        ),
        ("error", "quant_capability", ["8.0", "7.5", "fp8"]),
        "0.11.0 config/vllm.py: Minimum capability",
    ),
    "MXFP4 on a T4": (
        launch(quantized(LLAMA_8B, {"quant_method": "mxfp4"}), 5.0, "T4", args={"max-model-len": 4096}),
        ("error", "quant_capability", ["8.0", "7.5"]),
        "u26 config/vllm.py:687",
    ),
    "a method before its time": (
        launch(quantized(LLAMA_8B, {"quant_method": "mxfp4"}), 5.0, version="0.8.5", args={"max-model-len": 4096}),
        ("error", "unsupported_quant", ["mxfp4", "0.8.5", "quantiz"]),
        "0.8.5 model_executor/layers/quantization/__init__.py",
    ),
    "a method that vLLM never had": (
        launch(quantized(LLAMA_8B, {"quant_method": "exl2"}), 5.0, args={"max-model-len": 4096}),
        ("error", "unsupported_quant", ["exl2"]),
        "u33 config/model.py:1467",
    ),
    "GGUF in a newer release": (
        launch(LLAMA_8B, 5.0, version="0.24.0", args={"quantization": "gguf", "max-model-len": 4096}),
        ("error", "quant_plugin", ["gguf", "plugin"]),
        "0.24.0 model_executor/layers/quantization/__init__.py",
    ),
    "bitsandbytes in 0.27": (
        launch(LLAMA_8B, 5.3, version="0.27.1", args={"quantization": "bitsandbytes", "max-model-len": 4096}),
        ("ok", None, []),
        "0.27.1 model_executor/layers/quantization/__init__.py",
    ),
    "bitsandbytes in 0.28": (
        launch(LLAMA_8B, 5.3, version="0.28.0", args={"quantization": "bitsandbytes", "max-model-len": 4096}),
        ("error", "quant_plugin", ["bitsandbytes", "0.28"]),
        "0.28.0 model_executor/layers/quantization/__init__.py",
    ),
    "another method than the checkpoint's": (
        launch(quantized(LLAMA_8B, AWQ), 5.4, args={"quantization": "gptq", "max-model-len": 4096}),
        ("error", "quant_mismatch", ["gptq", "awq"]),
        "u33 config/model.py:1459",
    ),
    "AWQ of a checkpoint that is none": (
        launch(LLAMA_8B, 14.96, args={"quantization": "awq", "max-model-len": 4096}),
        ("error", "quant_mismatch", ["quantization_config"]),
        "u33 model_executor/model_loader/weight_utils.py:380",
    ),
    "length above the model's": (
        launch(QWEN_7B, 14.19, args={"max-model-len": 65536}),
        ("error", "max_len_above_config", ["65536", "32768"]),
        "u33 config/model.py:2664",
    ),
    "length with yarn before 0.30": (
        launch(
            {**QWEN_7B, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
            14.19,
            args={"max-model-len": 65536},
        ),
        ("ok", None, []),
        "u26 config/model.py:2225: original length times the factor",
    ),
    "length with yarn, already scaled": (
        launch(
            {
                **QWEN_7B,
                "max_position_embeddings": 131072,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            14.19,
            args={"max-model-len": 200000},
        ),
        ("error", "max_len_above_config", ["200000", "131072"]),
        "u26 config/model.py:2225",
    ),
    "length with yarn since 0.30": (
        launch(
            {**QWEN_7B, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
            14.19,
            version="0.33.0",
            args={"max-model-len": 65536},
        ),
        ("error", "max_len_above_config", ["65536", "32768"]),
        "u33 config/model.py:2617: the factor is in max_position_embeddings",
    ),
    "a small batch, prompts in chunks": (
        launch(LLAMA_8B, 14.96, args={"max-num-batched-tokens": 2048, "max-model-len": 8192}),
        ("ok", None, []),
        "u33 config/scheduler.py:319",
    ),
    "length with linear scaling": (
        launch({**LLAMA2_7B, "rope_scaling": {"type": "linear", "factor": 2.0}}, 12.6, args={"max-model-len": 8192}),
        ("ok", None, []),
        "u33 config/model.py:2634",
    ),
    "length with llama3 scaling": (
        launch(
            {**LLAMA_8B, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 14.96, args={"max-model-len": 200000}
        ),
        ("error", "max_len_above_config", ["200000", "131072"]),
        "u33 config/model.py:2616",
    ),
    "length by K": (
        launch(QWEN_7B, 14.19, args={"max-model-len": "64K"}),
        ("error", "max_len_above_config", ["65536"]),
        "u33 engine/arg_utils.py, human_readable_int",
    ),
    "length left to the model, too long": (
        launch(LLAMA_8B, 14.96, "L4"),
        ("error", "kv_fit", ["131072", "KV", "16.00"]),
        "u26 v1/core/kv_cache_utils.py:779",
    ),
    "length asked for, too long": (
        launch(LLAMA_8B, 14.96, "L4", args={"max-model-len": 65536}),
        ("error", "kv_fit", ["65536", "KV", "8.00"]),
        "u26 v1/core/kv_cache_utils.py:779",
    ),
    "length fitted by vLLM": (
        launch(LLAMA_8B, 14.96, "L4", args={"max-model-len": "auto"}),
        ("ok", None, []),
        "u26 v1/core/kv_cache_utils.py, _auto_fit_max_model_len",
    ),
    "an fp8 KV cache": (
        launch(LLAMA_8B, 14.96, "L4", args={"max-model-len": 20480, "kv-cache-dtype": "fp8"}),
        ("ok", None, []),
        "u26 v1/kv_cache_interface.py: half the bytes",
    ),
    "weights above the GPU": (
        launch(LLAMA_70B, 131.4, args={"max-model-len": 4096}),
        ("error", "weights_fit", ["weights", "131.4", "72.8"]),
        "u26 v1/core/kv_cache_utils.py:759",
    ),
    "weights over two small GPUs": (
        launch(LLAMA_70B, 131.4, "2 x L40S", args={"tensor-parallel-size": 2, "max-model-len": 4096}),
        ("error", "weights_fit", ["65.7", "40.8"]),
        "u26 v1/core/kv_cache_utils.py:759",
    ),
    "free memory": (
        launch(LLAMA_8B, 14.96, "H200", args={"max-model-len": 8192}, free_gib=120.0),
        ("error", "free_memory", ["120.00", "128.6", "0.92"]),
        "u26 v1/worker/utils.py:439",
    ),
    "free memory of an older default": (
        launch(LLAMA_8B, 14.96, "H200", "0.16.0", args={"max-model-len": 8192}, free_gib=127.0),
        ("ok", None, []),
        "0.16.0 config/cache.py: gpu_memory_utilization 0.9",
    ),
    "more processes than GPUs": (
        launch(LLAMA_8B, 14.96, "2 x L4", args={"tensor-parallel-size": 4, "max-model-len": 4096}),
        ("error", "world_size", ["4", "2"]),
        "u33 config/parallel.py: World size is larger than the number of available GPUs",
    ),
    "data parallel beyond the GPUs": (
        launch(
            LLAMA_8B,
            14.96,
            "4 x H100 80GB HBM3",
            args={"tensor-parallel-size": 2, "data-parallel-size": 4, "max-model-len": 4096},
        ),
        ("error", "world_size", ["8", "4"]),
        "u33 config/parallel.py",
    ),
    "more stages than layers": (
        launch(
            QWEN_7B, 14.19, "32 x H100 80GB HBM3", nodes=4, args={"pipeline-parallel-size": 32, "max-model-len": 4096}
        ),
        ("error", "pipeline_layers", ["32", "28"]),
        "u33 distributed/utils.py, get_pp_indices",
    ),
    "tensor parallel over hosts": (
        launch(
            LLAMA_70B, 131.4, "16 x H100 80GB HBM3", nodes=2, args={"tensor-parallel-size": 16, "max-model-len": 8192}
        ),
        ("warn", "cross_host_tp", ["16", "8", "all-reduce", "MiB"]),
        "u33 docs/serving/parallelism_scaling.md: tensor parallel inside a host",
    ),
    "tensor parallel over SYS": (
        launch(
            LLAMA_8B, 14.96, "2 x L40S", args={"tensor-parallel-size": 2, "max-model-len": 8192}, links={"0-1": "SYS"}
        ),
        ("warn", "slow_links_tp", ["SYS"]),
        "u33 distributed/device_communicators/custom_all_reduce.py",
    ),
    "tensor parallel over NVLink": (
        launch(
            LLAMA_8B, 14.96, "2 x H200", args={"tensor-parallel-size": 2, "max-model-len": 8192}, links={"0-1": "NV18"}
        ),
        ("ok", None, []),
        "u33 distributed/device_communicators/custom_all_reduce.py",
    ),
    "MIG": (
        launch(
            LLAMA_8B,
            14.96,
            "2 x H100 80GB HBM3",
            args={"tensor-parallel-size": 2, "max-model-len": 8192},
            mig="3g.40gb",
        ),
        ("error", "mig_tp", ["MIG"]),
        "NCCL has no peer access between MIG instances",
    ),
    "eager": (
        launch(LLAMA_8B, 14.96, args={"enforce-eager": True, "max-model-len": 8192}),
        ("warn", "eager", ["--enforce-eager"]),
        "measured",
    ),
    "a removed option": (
        launch(LLAMA_8B, 14.96, version="0.18.1", args={"swap-space": 4, "max-model-len": 8192}),
        ("error", "removed_flag", ["--swap-space", "0.18", "--kv-offloading-size"]),
        "data/serve_flags/0.18.1.yml",
    ),
    "the same option before": (
        launch(LLAMA_8B, 14.96, version="0.16.0", args={"swap-space": 4, "max-model-len": 8192}),
        ("ok", None, []),
        "data/serve_flags/0.16.0.yml",
    ),
    "an option of a later release": (
        launch(LLAMA_8B, 14.96, version="0.8.5", args={"kv-cache-memory-bytes": 10**10, "max-model-len": 8192}),
        ("error", "unknown_flag", ["--kv-cache-memory-bytes", "0.10.2"]),
        "data/serve_flags/0.8.5.yml",
    ),
    "a misspelt option": (
        launch(LLAMA_8B, 14.96, args={"max-model-length": 8192}),
        ("error", "unknown_flag", ["--max-model-length"]),
        "data/serve_flags/0.26.0.yml",
    ),
    "a choice that is none": (
        launch(LLAMA_8B, 14.96, args={"dtype": "int3", "max-model-len": 8192}),
        ("error", "flag_value", ["int3"]),
        "data/serve_flags/0.26.0.yml",
    ),
    "an option between known releases": (
        launch(LLAMA_8B, 14.96, version="0.10.1", args={"num-scheduler-steps": 8, "max-model-len": 8192}),
        ("ok", None, []),
        "data/serve_flags: 0.8.5 has it, 0.10.2 does not; where it went is not known",
    ),
    "a share above one": (
        launch(LLAMA_8B, 14.96, args={"gpu-memory-utilization": 90, "max-model-len": 8192}),
        ("error", "utilization_range", ["90"]),
        "u33 config/cache.py: gt=0, le=1",
    ),
    "a batch below the length, whole prompts": (
        launch(
            LLAMA_8B,
            14.96,
            args={"max-num-batched-tokens": 2048, "max-model-len": 8192, "no-enable-chunked-prefill": True},
        ),
        ("error", "batch_below_length", ["2048", "8192"]),
        "u33 config/scheduler.py, verify_max_model_len",
    ),
    "a batch below the requests": (
        launch(LLAMA_8B, 14.96, args={"max-num-batched-tokens": 128, "max-num-seqs": 256, "max-model-len": 8192}),
        ("error", "batch_below_seqs", ["128", "256"]),
        "u33 config/scheduler.py:334",
    ),
    "an encoder": (
        launch(BERT, 1.25, "T4", args={"runner": "pooling"}),
        ("ok", None, []),
        "u33 model_executor/models/bert.py: nothing is kept",
    ),
    "experts in 4 bits over 8": (
        launch(
            quantized(MIXTRAL, GPTQ, torch_dtype="float16"),
            22.2,
            "8 x L4",
            args={"tensor-parallel-size": 8, "max-model-len": 8192},
        ),
        ("ok", None, []),
        "u33 model_executor/layers/quantization/moe_wna16.py: 1792 is 14 groups",
    ),
    "405B in fp8 on one host": (
        launch(
            quantized(LLAMA_405B, {"quant_method": "fp8"}),
            378.0,
            "8 x H100 80GB HBM3",
            args={"tensor-parallel-size": 8, "max-model-len": 16384},
        ),
        ("ok", None, []),
        "u26 v1/core/kv_cache_utils.py:779: 47 GiB of weights a GPU",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_derived(name):
    case, (outcome, rule, words), _source = CASES[name]
    verdict = judge(case)
    told = [(f.rule, f.severity, f.message) for f in verdict.findings]
    assert verdict.outcome == outcome, told
    grave = [f for f in verdict.findings if f.severity != "info"]
    if rule is None:
        assert grave == []
    else:
        assert rule in {f.rule for f in grave}, told
        assert any(says(f.message, words) for f in grave if f.rule == rule), told
        assert all(f.fix for f in grave if f.severity == "error" and f.rule == rule), told


def test_every_rule_is_told_and_as_grave_as_told():
    modules = (launch_memory, launch_plan, launch_quantization, launch_rules)
    sources = "".join(pathlib.Path(module.__file__).read_text() for module in modules)
    raised = set(re.findall(r'Remark\(\s*"([a-z0-9_]+)",', sources))
    assert raised == set(launch_rules.MEANINGS)
    for case, _expected, _source in CASES.values():
        for finding in judge(case).findings:
            assert finding.severity in launch_rules.MEANINGS[finding.rule][0], finding


@pytest.mark.parametrize("written", ["-tp", "--tensor_parallel_size", "tensor-parallel-size", "--tensor-parallel-size"])
def test_spellings_of_the_command_line(written):
    case = {**launch(QWEN_7B, 14.19, "8 x H100 80GB HBM3"), "args": {written: 8, "--max-model-len": "8K"}}
    assert {f.rule for f in judge(case).findings if f.severity == "error"} == {"heads_tp"}


def test_chunks_are_kept_apart_from_0_14_on():
    """0.13.0 and 0.14.1 vllm/envs.py, VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE."""
    case = yaml.safe_load((PLANS / "13.yml").read_text())
    case["args"] = {"--tensor-parallel-size": 8, "--max-model-len": 262144}
    needed = {v: judge({**case, "vllm_version": v}).memory["request_gib"] for v in ("0.13.0", "0.14.1", "0.26.0")}
    assert needed["0.13.0"] == pytest.approx(262144 * 24576 / 2**30, rel=0.01)
    assert needed["0.14.1"] < needed["0.13.0"] / 2
    assert needed["0.26.0"] < needed["0.13.0"] / 2


def test_weights_in_the_host_count_for_each_gpu():
    args = {"tensor-parallel-size": 2, "max-model-len": 4096, "cpu-offload-gb": 40}
    assert judge(launch(LLAMA_70B, 131.4, "2 x L40S", args=args)).memory["weights_gib"] == pytest.approx(25.7, abs=0.1)


def test_tables_are_loaded_when_they_are_asked_for():
    asked = []
    tables = launch_case.Tables(
        ("0.26.0", "0.33.0"), lambda name: asked.append(name) or data.load(f"serve_flags/{name}")
    )
    known = dataclasses.replace(KNOWN, serve_flags=tables)
    assert launch_plan.judge(launch(LLAMA_8B, 14.96, args={"max-model-len": 8192}), known).outcome == "ok"
    assert asked == ["0.26.0"]
    assert list(tables) == ["0.26.0", "0.33.0"]
    assert "0.1.0" not in tables


def test_there_are_enough_cases():
    assert len(CASES) >= 40


# --- What is not known is said, never guessed -----------------------------------------------------------------------


def test_a_release_that_is_not_known_is_said():
    verdict = judge(launch(LLAMA_8B, 14.96, version="0.6.3", args={"max-model-len": 8192}))
    assert verdict.outcome == "ok"
    assert any(f.rule == "version_unknown" and says(f.message, ["0.6.3", "0.5.4", "0.6.6"]) for f in verdict.findings)


def test_a_release_newer_than_all_is_not_taken_for_the_newest():
    verdict = judge(launch(LLAMA_8B, 14.96, version="0.99.0", args={"max-model-len": 8192, "brand-new-option": 1}))
    found = {f.rule: f for f in verdict.findings}
    assert found["version_unknown"].severity == "info"
    assert found["unknown_flag"].severity == "warning"


def test_an_architecture_that_is_not_known_has_no_memory():
    verdict = judge(launch({**LLAMA_8B, "architectures": ["StrangeForCausalLM"]}, 14.96, args={"max-model-len": 8192}))
    assert verdict.memory["kv_gib"] is None
    assert any(f.rule == "memory_unknown" and "StrangeForCausalLM" in f.message for f in verdict.findings)


def test_an_architecture_that_is_not_known_still_has_heads_and_weights():
    strange = {**LLAMA_70B, "architectures": ["StrangeForCausalLM"]}
    rules = {
        f.rule for f in judge(launch(strange, 131.4, "6 x H100 80GB HBM3", args={"tensor-parallel-size": 6})).findings
    }
    assert {"heads_tp", "kv_heads_tp"} <= rules
    assert "weights_fit" in {f.rule for f in judge(launch(strange, 131.4)).findings}


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        ({"gpus": []}, "gpus"),
        ({"nodes": 0}, "nodes"),
        ({"model_config": None}, "model_config"),
        ({"vllm_version": "latest"}, "latest"),
        ({"gpus": [{"name": "Unheard Of"}]}, "memory_gib"),
    ],
)
def test_a_launch_that_cannot_be_read(broken, word):
    case = {**launch(LLAMA_8B, 14.96), **broken}
    for verdict in (judge(case), launch_plan.choose(case, KNOWN)):
        assert verdict.outcome == "error"
    assert word in judge(case).findings[0].message


def test_mixed_gpus():
    case = launch(LLAMA_8B, 14.96, "2 x H200", args={"tensor-parallel-size": 2, "max-model-len": 8192})
    case["gpus"] = [case["gpus"][0], {"name": "H100 80GB HBM3", "memory_gib": 79.18}]
    verdict = judge(case)
    assert verdict.outcome == "warn"
    assert any(f.rule == "mixed_gpus" and says(f.message, ["139.8", "79.18"]) for f in verdict.findings)
    assert verdict.memory["requested_gib"] == pytest.approx(79.18 * 0.92, abs=0.01)


def test_overrides_of_the_config_count():
    args = {"max-model-len": 65536, "hf-overrides": '{"max_position_embeddings": 65536}'}
    assert "max_len_above_config" not in {f.rule for f in judge(launch(QWEN_7B, 14.19, args=args)).findings}


def test_a_verdict_as_a_mapping():
    told = judge(launch(LLAMA_8B, 14.96, args={"max-model-len": 8192})).as_dict()
    assert json.loads(json.dumps(told)) == told
    assert set(told) == {"outcome", "findings", "memory"}
    assert {"weights_gib", "kv_gib", "kv_tokens", "max_concurrency"} <= set(told["memory"])


# As nvidia-smi names them.
@pytest.mark.parametrize(
    ("name", "capability", "nvlink"),
    [
        ("NVIDIA H200", "9.0", "all"),
        ("NVIDIA H100 80GB HBM3", "9.0", "all"),
        ("NVIDIA H100 NVL", "9.0", "pairs"),
        ("NVIDIA A100-SXM4-80GB", "8.0", "all"),
        ("NVIDIA A100 80GB PCIe", "8.0", "pairs"),
        ("NVIDIA A100-PCIE-40GB", "8.0", "pairs"),
        ("NVIDIA L40S", "8.9", "none"),
        ("NVIDIA L4", "8.9", "none"),
        ("Tesla T4", "7.5", "none"),
        ("Tesla V100-SXM2-32GB", "7.0", "all"),
        ("NVIDIA GeForce RTX 3090", "8.6", "pairs"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "12.0", "none"),
    ],
)
def test_models_of_gpus(name, capability, nvlink):
    entry = launch_case.known_gpu(name, KNOWN.gpus)
    assert (entry["compute_capability"], entry["nvlink"]) == (capability, nvlink)


def test_a_gpu_that_is_not_known():
    assert launch_case.known_gpu("NVIDIA L400", KNOWN.gpus) == {}


# --- Choosing -------------------------------------------------------------------------------------------------------


def choose(*given, **more):
    return launch_plan.choose(launch(*given, **more), KNOWN)


def reason(plan, flag):
    return next(choice.reason for choice in plan.choices if choice.flag == flag)


def test_choose_one_gpu():
    plan = choose(LLAMA_8B, 14.96, "H200")
    assert (plan.outcome, plan.tensor, plan.pipeline, plan.replicas) == ("ok", 1, 1, 1)
    assert plan.args["max-model-len"] == 131072
    assert all(choice.reason for choice in plan.choices)


def test_choose_a_host_for_70b():
    plan = choose(LLAMA_70B, 131.4, "8 x H100 80GB HBM3")
    assert (plan.outcome, plan.tensor, plan.pipeline, plan.replicas) == ("ok", 8, 1, 1)


def test_choose_70b_on_a_pair_is_tight_and_says_what_would_not_be():
    plan = choose(LLAMA_70B, 131.4, "2 x H100 80GB HBM3")
    assert plan.outcome == "warn"
    assert plan.args["max-model-len"] < 32768
    told = {f.rule: f.message for f in plan.verdict.findings}
    assert says(told["headroom"], ["65.70", "72.8"])
    assert says(told["would_fit"], ["fp8", "131072"])


def test_choose_refuses_with_numbers_and_says_what_would_fit():
    plan = choose(LLAMA_70B, 131.4, "2 x L40S")
    assert plan.outcome == "error"
    told = {f.rule: f.message for f in plan.verdict.findings}
    assert says(told["weights_fit"], ["131.40", "65.70", "44.40"])
    assert says(told["would_fit"], ["such GPUs"])


def test_choose_28_heads_on_8_gpus():
    plan = choose(QWEN_7B, 14.19, "8 x H100 80GB HBM3")
    assert (plan.outcome, plan.tensor, plan.replicas) == ("ok", 4, 2)
    assert says(reason(plan, "tensor-parallel-size"), ["not 8", "28"])


def test_choose_two_hosts_for_405b():
    plan = choose(quantized(LLAMA_405B, {"quant_method": "fp8"}), 378.0, "16 x H100 80GB HBM3", nodes=2)
    assert (plan.outcome, plan.tensor, plan.pipeline, plan.replicas) == ("ok", 8, 2, 1)
    assert any("NCCL_SOCKET_IFNAME" in note for note in plan.notes)


def test_choose_stages_without_nvlink():
    plan = choose(LLAMA_70B, 131.4, "8 x L40S")
    assert (plan.outcome, plan.tensor, plan.pipeline) == ("ok", 2, 4)
    assert "no NVLink" in reason(plan, "pipeline-parallel-size")


def test_choose_by_links_before_the_model_of_the_gpu():
    slow = {f"{i}-{j}": "SYS" for i in range(8) for j in range(i + 1, 8)}
    assert choose(LLAMA_70B, 131.4, "8 x H100 80GB HBM3", links=slow).tensor <= 2


def test_choose_half_for_a_t4():
    plan = choose(QWEN_7B, 14.19, "4 x T4")
    assert (plan.outcome, plan.args["dtype"]) == ("ok", "half")
    assert "7.5" in reason(plan, "dtype")


def test_choose_half_for_awq_before_its_bfloat16():
    plan = choose(quantized(LLAMA_8B, AWQ), 5.4, "T4", "0.13.0")
    assert plan.args["dtype"] == "half"


def test_choose_a_length_that_fits():
    plan = choose(LLAMA_8B, 14.96, "L4")
    assert plan.outcome == "ok"
    assert 8192 <= plan.args["max-model-len"] < 131072
    assert plan.args["max-num-seqs"] < 256
    assert says(reason(plan, "max-model-len"), ["131072", "16.00"])


def test_choose_replicas_for_a_small_model():
    plan = choose(launches.QWEN_05B, 0.92, "8 x H100 80GB HBM3")
    assert (plan.tensor, plan.pipeline, plan.replicas) == (1, 1, 8)
    assert "replicas" in reason(plan, "tensor-parallel-size")


def test_choose_a_share_by_what_is_free():
    plan = choose(LLAMA_8B, 14.96, "H200", free_gib=100.0)
    assert plan.outcome == "ok"
    assert plan.args["gpu-memory-utilization"] * 139.8 < 100.0
    assert "100.00" in reason(plan, "gpu-memory-utilization")


@pytest.mark.parametrize(
    "args",
    [
        {"tensor-parallel-size": 2},
        {"pipeline-parallel-size": 2},
        {"max-model-len": 4096},
        {"dtype": "float16"},
        {"gpu-memory-utilization": 0.5},
        {"max-num-seqs": 7},
        {"tensor-parallel-size": 2, "max-model-len": 4096, "seed": 3},
    ],
)
def test_what_the_user_says_is_kept(args):
    plan = choose(LLAMA_8B, 14.96, "8 x H100 80GB HBM3", args=args)
    assert plan.outcome == "ok"
    assert {name: plan.args[name] for name in args} == args
    assert not set(args) & {choice.flag for choice in plan.choices}


@pytest.mark.parametrize(
    ("args", "rule"),
    [
        ({"tensor-parallel-size": 8}, "heads_tp"),
        ({"max-model-len": 1000000}, "max_len_above_config"),
        ({"swap-space": 4}, "removed_flag"),
        ({"quantization": "awq"}, "quant_mismatch"),
    ],
)
def test_what_the_user_says_is_refused_not_changed(args, rule):
    plan = choose(QWEN_7B, 14.19, "8 x H100 80GB HBM3", args=args)
    assert plan.outcome == "error"
    assert rule in {f.rule for f in plan.verdict.findings}
    assert {name: plan.args[name] for name in args} == args


def test_what_is_chosen_is_judged_right():
    for version in ("0.11.2", "0.20.2", "0.26.0", "0.33.0"):
        for gpus in ("H200", "8 x H100 80GB HBM3", "4 x L40S", "2 x L4", "4 x T4"):
            plan = choose(LLAMA_8B, 14.96, gpus, version)
            again = {**launch(LLAMA_8B, 14.96, gpus, version), "args": plan.args}
            assert judge(again).outcome == plan.outcome != "error", (version, gpus, plan.as_dict())


# --- Choosing: sizes that are given, several hosts, what fits nowhere else ------------------------------------------

H100S = "8 x H100 80GB HBM3"
LLAMA_28_HEADS = launches.model("LlamaForCausalLM", "llama", "7168 28672 28 4 80 128256 131072")
EIGHT_HEADS = launches.model("LlamaForCausalLM", "llama", "1024 4096 8 8 32 32000 32768")
STRANGE = {"architectures": ["StrangeForCausalLM"], "model_type": "strange", "num_attention_heads": 64}


def sizes(plan):
    return plan.tensor, plan.pipeline


def rules(plan):
    return {finding.rule for finding in plan.verdict.findings}


@pytest.mark.parametrize(("data_size", "expected"), [(2, (4, 1)), (4, (2, 1)), (8, (1, 1))])
def test_data_parallelism_takes_its_share_of_the_gpus(data_size, expected):
    plan = choose(LLAMA_8B, 14.96, H100S, args={"data-parallel-size": data_size})
    assert (plan.outcome, sizes(plan), plan.replicas) == ("ok", expected, 1)


def test_prefill_context_parallelism_takes_its_share_of_the_gpus():
    assert sizes(choose(LLAMA_8B, 14.96, H100S, args={"prefill-context-parallel-size": 2})) == (4, 1)


@pytest.mark.parametrize(
    ("gpus", "nodes", "args", "expected"),
    [
        ("16 x H100 80GB HBM3", 2, {"tensor-parallel-size": 8}, (8, 2)),
        ("16 x H100 80GB HBM3", 2, {"tensor-parallel-size": 4}, (4, 4)),
        (H100S, 1, {"tensor-parallel-size": 4}, (4, 2)),
        (H100S, 1, {"tensor-parallel-size": 2, "data-parallel-size": 2}, (2, 2)),
        (H100S, 1, {"pipeline-parallel-size": 2}, (4, 2)),
        ("16 x H100 80GB HBM3", 2, {"pipeline-parallel-size": 2}, (8, 2)),
        ("16 x H100 80GB HBM3", 2, {"pipeline-parallel-size": 1}, (16, 1)),
        ("16 x H100 80GB HBM3", 2, {"data-parallel-size": 2}, (8, 1)),
    ],
)
def test_the_size_that_is_left_open_follows_from_the_one_that_is_given(gpus, nodes, args, expected):
    plan = choose(LLAMA_8B, 14.96, gpus, nodes=nodes, args=args)
    assert (plan.outcome in ("ok", "warn"), sizes(plan)) == (True, expected)
    assert "gpus_idle" not in rules(plan)


def test_stages_beside_a_given_tensor_size_could_be_replicas():
    plan = choose(LLAMA_8B, 14.96, H100S, args={"tensor-parallel-size": 4})
    assert any("replicas_per_host 2" in note for note in plan.notes)
    assert not any("replicas_per_host" in note for note in choose(LLAMA_8B, 14.96, H100S).notes)


def test_both_hosts_are_used_though_one_suffices():
    plan = choose(LLAMA_8B, 14.96, "16 x H100 80GB HBM3", nodes=2)
    assert (plan.outcome, sizes(plan), plan.replicas) == ("ok", (8, 2), 1)
    assert any("hosts_per_replica 1 gives 2 replicas" in note for note in plan.notes)
    small = choose(launches.QWEN_05B, 0.92, "16 x H100 80GB HBM3", nodes=2)
    assert any("hosts_per_replica 1 gives 16 replicas" in note for note in small.notes)


def test_one_host_does_not_suffice_for_405b():
    plan = choose(quantized(LLAMA_405B, {"quant_method": "fp8"}), 600.0, "16 x H100 80GB HBM3", nodes=2)
    assert not any("suffices" in note for note in plan.notes)


def test_heads_that_leave_a_part_of_each_host_to_stages():
    plan = choose(QWEN_7B, 14.19, "16 x H100 80GB HBM3", nodes=2)
    assert (plan.outcome, sizes(plan)) == ("ok", (4, 4))
    assert "2 on each" in reason(plan, "pipeline-parallel-size")


def test_gpus_that_the_heads_leave_idle_on_several_hosts_are_said():
    three_layers = launches.model("LlamaForCausalLM", "llama", "4096 14336 32 8 3 128256 131072")
    plan = choose(three_layers, 4.0, "6 x H100 80GB HBM3", nodes=2)
    assert (plan.outcome, sizes(plan)) == ("ok", (1, 2))
    assert "gpus_idle" in rules(plan)


def test_what_cannot_be_spread_over_the_hosts_is_refused_and_one_host_suffices():
    plan = choose(SMOL_135M, 0.25, "4 x L4", nodes=2, args={"pipeline-parallel-size": 1})
    assert (plan.outcome, "heads_tp" in rules(plan)) == ("error", True)
    one_head = launches.model("LlamaForCausalLM", "llama", "128 256 1 1 1 32000 2048")
    plan = choose(one_head, 0.1, "4 x L4", nodes=2)
    assert (plan.outcome, "pipeline_layers" in rules(plan)) == ("error", True)
    assert any("hosts_per_replica 1 gives 4 replicas" in note for note in plan.notes)


def test_tensor_parallelism_over_hosts_is_said_where_a_given_size_leaves_nothing_else():
    plan = choose(EIGHT_HEADS, 14.0, "16 x H100 80GB HBM3", nodes=2, args={"pipeline-parallel-size": 1})
    assert sizes(plan) == (8, 1)
    assert "over 2 hosts" in reason(plan, "tensor-parallel-size")


@pytest.mark.parametrize("nodes", [1, 2])
def test_very_many_gpus_take_no_minutes(nodes):
    start = time.monotonic()
    for config, gib in ((LLAMA_8B, 14.96), (LLAMA_28_HEADS, 500000.0)):
        choose(config, gib, "4096 x H100 80GB HBM3", nodes=nodes)
    assert time.monotonic() - start < 30


def test_more_hosts_than_gpus_are_refused_at_once():
    assert choose(LLAMA_8B, 14.96, H100S, nodes=100_000_000_000).outcome == "error"


def test_more_stages_than_layers_are_refused_at_once():
    plan = choose(LLAMA_8B, 14.96, H100S, args={"pipeline-parallel-size": 10**9})
    assert plan.outcome == "error"
    assert "pipeline_layers" in rules(plan)
    assert "stages" in plan.verdict.memory["unknown"]


def test_stages_inside_a_host_with_nvlink_where_heads_leave_no_other_way():
    plan = choose(LLAMA_70B, 131.4, "3 x H100 80GB HBM3")
    assert (plan.outcome != "error", sizes(plan)) == (True, (1, 3))
    plan = choose(LLAMA_28_HEADS, 330.0, H100S)
    assert (plan.outcome != "error", sizes(plan)) == (True, (4, 2))


@pytest.mark.parametrize("tokens", [512, "512", "0.512k"])
def test_no_more_requests_than_tokens_of_a_batch(tokens):
    plan = choose(LLAMA_8B, 14.96, "H100 80GB HBM3", args={"max-num-batched-tokens": tokens})
    assert (plan.outcome, plan.args["max-num-seqs"]) == ("ok", 512)
    assert "max-num-batched-tokens 512" in reason(plan, "max-num-seqs").replace(str(tokens), "512")


def test_copies_are_counted_on_gpus_where_they_start():
    kinds = [{"name": "H100 80GB HBM3", "memory_gib": 79.18}, {"name": "T4", "memory_gib": 14.6}]
    plan = launch_plan.choose({**launch(LLAMA_8B, 5.0), "gpus": kinds}, KNOWN)
    assert (plan.outcome, plan.args["dtype"], plan.replicas) == ("ok", "bfloat16", 1)
    assert "gpus_idle" in rules(plan)
    assert any("GPUs 1 stay idle" in note for note in plan.notes)


def test_the_dtype_is_that_of_all_gpus_that_are_joined():
    kinds = [{"name": "A100 80GB", "memory_gib": 79.15}] + 3 * [{"name": "V100 32GB", "memory_gib": 31.74}]
    plan = launch_plan.choose({**launch(LLAMA_8B, 60.0), "gpus": kinds}, KNOWN)
    assert (plan.outcome, plan.tensor, plan.args["dtype"]) == ("warn", 4, "half")


def test_an_unknown_model_is_spread_by_its_weights_alone():
    plan = choose(STRANGE, 100.0, "8 x L40S")
    assert (plan.outcome, plan.tensor * plan.pipeline) == ("ok", 8)
    assert not any("the model fits" in choice.reason for choice in plan.choices)
    assert sizes(choose(STRANGE, 3.0, "H100 80GB HBM3")) == (1, 1)


def test_an_unknown_model_is_not_said_to_fit():
    plan = choose(STRANGE, 20.0, "8 x L40S")
    assert (plan.outcome, plan.tensor * plan.pipeline) == ("ok", 1)
    assert not any("fits" in choice.reason or "replicas" in choice.reason for choice in plan.choices)


def test_a_refused_model_is_not_said_to_fit():
    plan = choose(LLAMA_405B, 756.0, H100S)
    assert (plan.outcome, rules(plan) >= {"weights_fit"}) == ("error", True)
    assert not any("fits" in choice.reason for choice in plan.choices)


@pytest.mark.parametrize(
    ("shape", "gib", "gpus", "version"),
    [
        ("3584 10752 28 1 2 152064 2048", 72.5, "A100 80GB", "0.26.0"),
        ("128 128 1 1 28 152064 2048", 75.57, "2 x L40S", "0.11.2"),
        ("128 512 1 1 2 152064 32768", 39.12, "L40S", "0.24.0"),
        ("896 3584 7 7 60 152064 2048", 22.53, "2 x T4", "0.11.2"),
    ],
)
def test_the_length_is_chosen_whenever_a_launch_starts(shape, gib, gpus, version):
    """Even where two requests of no length fit by the numbers, and where they do once fewer requests are served at once."""
    plan = choose(launches.model("Qwen2ForCausalLM", "qwen2", shape), gib, gpus, version)
    assert plan.outcome == "warn"
    assert plan.args["max-model-len"]


def test_the_length_is_chosen_again_with_fewer_requests_at_once():
    shape = launches.model("Qwen2ForCausalLM", "qwen2", "128 384 1 1 28 152064 2048")
    plan = choose(shape, 24.94, "2 x T4")
    assert (plan.outcome, plan.args["max-model-len"] < 2048) == ("warn", True)
    assert "two requests" in reason(plan, "max-model-len")


def test_a_smaller_share_does_not_refuse_what_starts_without_it():
    shape = launches.model("Qwen2ForCausalLM", "qwen2", "3584 3584 28 7 60 152064 32768")
    plan = choose(shape, 11.87, "T4")
    assert (plan.outcome, plan.args["gpu-memory-utilization"]) == ("warn", 0.92)


def test_a_length_that_cannot_be_read_is_kept():
    plan = choose(LLAMA_8B, 14.96, args={"max-model-len": "long"})
    assert (plan.outcome, plan.args["max-model-len"]) == ("error", "long")


def test_a_switch_without_a_value_is_kept():
    plan = choose(LLAMA_8B, 14.96, args={"enforce-eager": None})
    assert plan.args["enforce-eager"] is None
    assert "eager" in rules(plan)


def test_memory_of_an_automatic_length_is_of_the_length_that_fits():
    memory = judge(launch(LLAMA_8B, 14.96, "L4", args={"max-model-len": "auto"})).memory
    assert memory["max_model_len"] < 131072
    assert memory["max_concurrency"] >= 1
    large = judge(launch(LLAMA_8B, 14.96, "H200", args={"max-model-len": "auto"})).memory
    assert large["max_model_len"] == 131072


@pytest.mark.parametrize("free", [0, 2])
def test_a_gpu_with_nothing_free_is_refused_with_the_share_of_the_release(free):
    plan = choose(LLAMA_8B, 14.96, "H200", free_gib=free)
    assert (plan.outcome, "free_memory" in rules(plan)) == ("error", True)
    assert "gpu-memory-utilization" not in plan.args


def test_a_gpu_that_others_use_does_not_refuse_the_copies_beside_it():
    raw = launch(launches.QWEN_05B, 0.92, "4 x H100 80GB HBM3")
    raw["gpus"] = [*raw["gpus"][:3], {**raw["gpus"][3], "free_gib": 0}]
    plan = launch_plan.choose(raw, KNOWN)
    assert (plan.outcome, plan.replicas) == ("ok", 3)


def test_fewer_gpus_are_tried_where_one_of_them_has_little_memory_free():
    raw = launch(LLAMA_70B, 130.0, "7 x L40S")
    raw["gpus"] = [{**gpu, "free_gib": 13.32} if at == 5 else gpu for at, gpu in enumerate(raw["gpus"])]
    plan = launch_plan.choose(raw, KNOWN)
    assert (plan.outcome, sizes(plan)) == ("ok", (1, 5))


def test_a_share_for_all_gpus_that_is_too_small_for_the_model_is_not_taken():
    raw = launch(LLAMA_8B, 14.96, "2 x H100 80GB HBM3", args={"tensor-parallel-size": 1, "pipeline-parallel-size": 1})
    raw["gpus"] = [raw["gpus"][0], {**raw["gpus"][1], "free_gib": 8.0}]
    plan = launch_plan.choose(raw, KNOWN)
    assert (plan.outcome, plan.args["gpu-memory-utilization"], plan.replicas) == ("ok", 0.92, 1)


def test_pairs_stay_pairs_on_several_hosts_without_nvlink():
    plan = choose(LLAMA_70B, 131.4, "16 x L40S", nodes=2)
    assert (plan.outcome, sizes(plan)) == ("ok", (2, 8))


def test_replicas_are_no_reason_where_all_gpus_are_one_replica():
    plan = choose(LLAMA_8B, 14.96, "12 x H100 80GB HBM3", nodes=2)
    assert sizes(plan) == (2, 6)
    assert "replicas" not in reason(plan, "tensor-parallel-size")


def test_replicas_are_not_advised_where_they_would_be_tight():
    plan = choose(LLAMA_70B, 131.4, H100S, args={"tensor-parallel-size": 2})
    assert sizes(plan) == (2, 4)
    assert not any("replicas_per_host" in note for note in plan.notes)


def test_no_other_sizes_are_tried_for_what_they_would_not_mend(monkeypatch):
    tried = []
    filled = launch_plan._filled
    monkeypatch.setattr(launch_plan, "_filled", lambda *args: tried.append(args[1:]) or filled(*args))
    assert choose(LLAMA_8B, 14.96, H100S, args={"max-modl-len": 1}).outcome == "error"
    assert len(tried) == 1


# What may differ from case to case; sizes are given or left open.
NUMBERS = strategies.sampled_from([None, None, None, 1, 2, 3, 4, 8])
SHAPES = strategies.builds(
    lambda heads, kv, wide, layers: launches.model(
        "LlamaForCausalLM", "llama", f"{heads * 128} {wide * heads * 128} {heads} {kv} {layers} 32000 32768"
    ),
    strategies.sampled_from([1, 2, 6, 7, 12, 14, 28, 32, 40, 64]),
    strategies.sampled_from([1, 2, 4, 7, 8]),
    strategies.sampled_from([2, 3]),
    strategies.integers(2, 80),
)


def spread(nodes, count, fixed):
    """Every pair of tensor and pipeline sizes that the GPUs allow, given ones kept, all hosts used alike."""
    tensor, pipeline, copies = fixed
    for t in [tensor] if tensor else range(1, count + 1):
        for p in [pipeline] if pipeline else range(1, count + 1):
            world = t * p * (copies or 1)
            if world <= count * nodes and world % nodes == 0:
                yield t, p


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    shape=SHAPES,
    weights=strategies.sampled_from([1.0, 14.0, 60.0, 130.0, 250.0, 500.0]),
    gpu=strategies.sampled_from(["H100 80GB HBM3", "L40S", "L4", "H200"]),
    count=strategies.integers(1, 16),
    nodes=strategies.integers(1, 2),
    fixed=strategies.tuples(NUMBERS, NUMBERS, NUMBERS),
    version=strategies.sampled_from(["0.11.2", "0.26.0", "0.33.0"]),
)
def test_what_is_chosen_holds(*, shape, weights, gpu, count, nodes, fixed, version):
    """count GPUs on each host (on two hosts at most 8)."""
    count = min(count, 16 // nodes)
    names = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
    args = {name: size for name, size in zip(names, fixed, strict=True) if size}
    raw = launch(shape, weights, f"{count * nodes} x {gpu}", version, args=args, nodes=nodes)
    plan = launch_plan.choose(raw, KNOWN)
    again = launch_plan.judge({**raw, "args": plan.args}, KNOWN)
    assert again.outcome == plan.outcome
    assert {name: plan.args[name] for name in args} == args
    possible = list(spread(nodes, count, fixed))
    if possible:
        world = plan.tensor * plan.pipeline * (fixed[2] or 1)
        assert world <= count * nodes
        assert world % nodes == 0 or (fixed[0] and fixed[1])
        assert "world_size" not in rules(plan)
    if plan.outcome == "error":
        for tensor, pipeline in possible:
            chosen = {names[0]: tensor, names[1]: pipeline}
            other = launch_plan.judge({**raw, "args": {**args, **chosen}}, KNOWN)
            assert other.outcome == "error", (chosen, plan.as_dict())
    elif shape["max_position_embeddings"]:
        assert plan.args["max-model-len"]
