"""What a breaker found in the judging of launches: documents that are none, sizes that vLLM refuses, memory not to be told."""

import datetime
import json
import time
from typing import Any

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import launch_case, launch_plan, launch_rules, model_memory
from launches import FP8_BLOCK, KNOWN, LLAMA_8B, LLAMA_70B, MIXTRAL, QWEN_7B, QWEN_30B_A3B, launch, quantized

DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
    "quantization_config": FP8_BLOCK,
}
HUGE = 10**400
LOOP: list[Any] = []
LOOP.append(LOOP)
DEEP: list[Any] = []
for _level in range(100):
    DEEP = [DEEP]


def judged(case: dict[str, Any]) -> dict[str, launch_plan.Remark]:
    return {f.rule: f for f in launch_plan.judge(case, KNOWN).findings}


def errors(case: dict[str, Any]) -> set[str]:
    return {rule for rule, found in judged(case).items() if found.severity == "error"}


def memory(case: dict[str, Any]) -> dict[str, Any]:
    return launch_plan.judge(case, KNOWN).memory


def good(**changes: Any) -> dict[str, Any]:
    return {**launch(LLAMA_8B, 14.96, args={"max-model-len": 8192}), **changes}


def gpu(**changes: Any) -> dict[str, Any]:
    return good(gpus=[{"name": "H100 80GB HBM3", "memory_gib": 79.18, **changes}])


# --- Documents that are no launch -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ([], "a list"),
        (good(args=[1]), "args is a list"),
        (good(args="--max-model-len 8"), "args is '--max-model-len 8'"),
        (good(args={1: 2}), "args has the key 1"),
        (good(args={"--seed": datetime.date(2026, 1, 1)}), "args.--seed is 2026-01-01"),
        (good(args={"--cpu-offload-gb": float("nan")}), "args.--cpu-offload-gb is nan"),
        (good(args={"--gpu-memory-utilization": float("nan")}), "args.--gpu-memory-utilization is nan"),
        (good(args={"--max-model-len": HUGE}), "args.--max-model-len is a whole number of about 40"),
        (good(args={"--additional-config": LOOP}), "args is nested"),
        (good(args={"--additional-config": DEEP}), "args is nested"),
        (good(args={"--additional-config": [0] * 500_001}), "args is nested"),
        (good(nodes=100000000000), "nodes is 100000000000"),
        (good(nodes=2), "nodes is 2"),
        (good(nodes=HUGE), "nodes is a whole number of about 40"),
        (good(nodes="1"), "nodes is '1'"),
        (good(weights_gib=float("nan")), "weights_gib is nan"),
        (good(weights_gib=float("inf")), "weights_gib is inf"),
        (good(weights_gib=HUGE), "weights_gib is a whole number"),
        (good(weights_gib=-5), "weights_gib is -5"),
        (good(weights_gib=0), "weights_gib is 0"),
        (good(weights_gib="14.96"), "weights_gib is '14.96'"),
        (good(weights_gib=True), "weights_gib is True"),
        (gpu(memory_gib=float("nan")), "memory_gib is nan"),
        (gpu(memory_gib="79"), "memory_gib is '79'"),
        (gpu(free_gib="3"), "free_gib is '3'"),
        (gpu(free_gib=-5), "free_gib is -5"),
        (gpu(compute_capability=7), "compute_capability is 7"),
        (gpu(compute_capability="sm_75"), "compute_capability is 'sm_75'"),
        (gpu(compute_capability=[7, 5]), "compute_capability is a list"),
        (gpu(mig=3), "mig is 3"),
        (gpu(mig="perhaps"), "mig is 'perhaps'"),
        (gpu(index=-1), "index is -1"),
        (gpu(index="0"), "index is '0'"),
        (gpu(name=4090), "name is 4090"),
        (gpu(memory_gb=80), "Did you mean memory_gib"),
        (good(gpus=["H100"]), "a GPU is 'H100'"),
        (good(gpus={"name": "H100"}), "gpus"),
        (good(links="NV4"), "links is 'NV4'"),
        (good(links={"0-1": "NV4"}), "links has the pair '0-1'"),
        ({**launch(LLAMA_8B, 14.96, "2 x H200"), "links": {"0-1": 4}}, "links.0-1 is 4"),
        ({**launch(LLAMA_8B, 14.96, "2 x H200"), "links": {"one-two": "NV4"}}, "'one-two'"),
        (good(arg={}), "Did you mean args"),
        (good(weight_gib=3), "Did you mean weights_gib"),
        (good(vllm_version=0.1), "vllm_version is 0.1"),
        (good(vllm_version="1" * 400 + ".0"), "vllm_version is"),
        (good(vllm_version=None), "vllm_version is None"),
        (good(model_config=[]), "model_config"),
        (good(model_config={**LLAMA_8B, "deep": LOOP}), "model_config is nested"),
        (good(model_config={**LLAMA_8B, "vocab_size": HUGE}), "vocab_size is a whole number"),
        (good(model_config={**LLAMA_8B, "quantization_config": "fp8"}), "quantization_config is 'fp8'"),
        (
            good(model_config=quantized(LLAMA_8B, {"quant_method": "fp8", "weight_block_size": [0, "x"]})),
            "blocks of quantization_config",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_document_is_refused_in_one_sentence(case, words):
    findings = launch_plan.judge(case, KNOWN).findings
    assert [f.rule for f in findings] == ["launch"]
    assert words in findings[0].message
    assert "\n" not in findings[0].message
    assert len(findings[0].message) < 300
    with pytest.raises(launch_case.BadLaunch):
        launch_case.read_case(case, KNOWN)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 0},
        {"num_hidden_layers": 10**12},
        {"num_hidden_layers": 20000},
        {"num_hidden_layers": 0},
        {"num_attention_heads": 0},
        {"num_attention_heads": -4},
        {"num_key_value_heads": 0},
        {"vocab_size": 0},
        {"vocab_size": 10**12},
        {"head_dim": 10**12},
        {"sliding_window": 10**12},
        {"intermediate_size": 1.5},
        {"layer_types": [{}] * 32},
        {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "mlp_only_layers": 1.5},
        {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "decoder_sparse_step": 0},
        {"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 0, "sliding_window": 512},
        {"architectures": ["Llama4ForCausalLM"], "no_rope_layer_interval": 0, "attention_chunk_size": 64},
        {"architectures": ["Llama4ForCausalLM"], "moe_layers": 3, "attention_chunk_size": 64},
        {
            "architectures": ["JambaForCausalLM"],
            "attn_layer_period": 0,
            "attn_layer_offset": 0,
        },
        {
            "architectures": ["JambaForCausalLM"],
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_expand": 0,
            "mamba_d_conv": 4,
            "mamba_d_state": 16,
        },
        {"architectures": ["GraniteMoeHybridForCausalLM"], "layers_block_type": [[]] * 32},
    ],
    ids=str,
)
def test_impossible_numbers_of_a_model_are_unknown(changes):
    config = {**LLAMA_8B, **changes}
    with pytest.raises(model_memory.Unknown):
        model_memory.shape(config)
    assert "memory_unknown" in judged(good(model_config=config))


@pytest.mark.parametrize("factor", [float("inf"), float("nan"), 1e300, "8", 0, -2])
def test_a_scaling_of_positions_that_is_none(factor):
    config = {**LLAMA_8B, "rope_scaling": {"rope_type": "linear", "factor": factor}}
    assert errors(good(model_config=config)) == set()


def test_infinity_that_nobody_asks_for_is_no_fault_of_the_model():
    assert errors(good(model_config={**LLAMA_8B, "time_step_limit": [0.0, float("inf")]})) == set()


@pytest.mark.parametrize("value", ["nan", "inf", "-3", "x"])
def test_offloaded_weights_that_are_no_number(value):
    assert memory(good(args={"--cpu-offload-gb": value}))["weights_gib"] == pytest.approx(14.96, abs=0.1)


def test_nothing_that_is_not_finite_is_told():
    for value in ("nan", "inf"):
        told = launch_plan.judge(good(args={"--gpu-memory-utilization": value}), KNOWN).as_dict()
        json.dumps(told, allow_nan=False)
        assert told["outcome"] == "error"


@pytest.mark.parametrize(
    "more",
    [
        {"id": "1", "confidence": "low", "source": "owner/repo#1"},
        {"links": None},
        {"args": None},
        {"gpus": [{"name": "H100", "memory_gib": 79, "compute_capability": 9.0, "free_gib": None, "mig": None}]},
        {"gpus": [{"name": "H100", "index": 3, "mig": {"current": "Disabled", "pending": "Disabled"}}]},
        {"gpus": [{"name": "H100", "mig": "[N/A]"}]},
    ],
    ids=str,
)
def test_what_may_stand_in_a_launch(more):
    assert errors(good(**more)) == set()


# --- Sizes and options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1000000, 10**15])
def test_sizes_beyond_the_gpus_take_no_time(size):
    case = launch(QWEN_7B, 14.19, "8 x H200", args={"tensor-parallel-size": size, "max-model-len": 8192})
    begun = time.process_time()
    assert {"heads_tp", "world_size"} <= errors(case)
    assert time.process_time() - begun < 2


def test_only_sizes_that_there_are_gpus_for_are_advised():
    fix = judged(launch(LLAMA_8B, 14.96, "8 x H200", args={"tensor-parallel-size": 48}))["heads_tp"].fix
    assert fix == "--tensor-parallel-size 1 or 2 or 4 or 8 goes"


@pytest.mark.parametrize(
    ("sizes", "wrong"),
    [
        ({"decode-context-parallel-size": 8}, True),
        ({"decode-context-parallel-size": 3, "tensor-parallel-size": 8}, True),
        ({"decode-context-parallel-size": 2, "tensor-parallel-size": 8}, True),
        ({"decode-context-parallel-size": 2, "tensor-parallel-size": 16}, False),
        ({"decode-context-parallel-size": 4, "tensor-parallel-size": 16}, True),
        ({"decode-context-parallel-size": 1, "tensor-parallel-size": 8}, False),
        ({"prefill-context-parallel-size": 2, "data-parallel-size": 2}, True),
        ({"prefill-context-parallel-size": 2, "decode-context-parallel-size": 3}, True),
    ],
    ids=str,
)
def test_context_parallelism(sizes, wrong):
    case = launch(LLAMA_8B, 14.96, "16 x H200", args={**sizes, "max-model-len": 8192})
    assert ("context_parallel" in errors(case)) is wrong


@pytest.mark.parametrize(("shared", "wrong"), [(3, True), (8, False), (16, True)])
def test_contexts_of_a_latent_cache_divide_the_tensor_size(shared, wrong):
    args = {"tensor-parallel-size": 8, "decode-context-parallel-size": shared, "max-model-len": 8192}
    assert ("context_parallel" in errors(launch(DEEPSEEK, 642, "8 x H200", args=args))) is wrong


def test_query_heads_of_a_kv_head_are_divided_too():
    config = {**LLAMA_8B, "num_attention_heads": 48, "num_key_value_heads": 4, "head_dim": 128}
    args = {"tensor-parallel-size": 32, "decode-context-parallel-size": 8, "max-model-len": 8192}
    assert "12 query heads" in judged(launch(config, 14.96, "32 x H200", args=args))["context_parallel"].message


def test_prefill_contexts_with_copies_are_refused_by_0_26_alone():
    args = {"prefill-context-parallel-size": 2, "data-parallel-size": 2, "max-model-len": 8192}
    for version, wrong in (("0.26.0", True), ("0.33.0", False)):
        case = launch(LLAMA_8B, 14.96, "4 x H200", version, args=args)
        assert ("context_parallel" in errors(case)) is wrong


def test_one_request_is_divided_over_contexts():
    args = {"tensor-parallel-size": 8, "max-model-len": 131072}
    alone = memory(launch(DEEPSEEK, 642, "8 x H200", args=args))
    shared = memory(launch(DEEPSEEK, 642, "8 x H200", args={**args, "decode-context-parallel-size": 8}))
    assert shared["request_gib"] == pytest.approx(alone["request_gib"] / 8, rel=0.01)
    assert shared["max_concurrency"] == pytest.approx(alone["max_concurrency"] * 8, rel=0.01)


def test_the_longest_length_is_divided_over_contexts():
    found = []
    for contexts in (1, 8):
        args = {"tensor-parallel-size": 8, "decode-context-parallel-size": contexts, "max-model-len": 1000000000}
        fix = judged(launch(DEEPSEEK, 642, "8 x H200", args=args))["kv_fit"].fix
        found.append(int(fix.split()[1]))
    assert 7 < found[1] / found[0] < 9


def test_windows_over_contexts_are_not_known():
    config = {**LLAMA_8B, "sliding_window": 4096, "num_key_value_heads": 1}
    args = {"tensor-parallel-size": 2, "decode-context-parallel-size": 2, "max-model-len": 8192}
    assert "memory_unknown" in judged(launch(config, 14.96, "2 x H200", args=args))


def test_expert_parallelism_wants_experts():
    args = {"enable-expert-parallel": True, "max-model-len": 8192}
    assert "expert_parallel" in errors(launch(LLAMA_8B, 14.96, args=args))
    assert "expert_parallel" not in errors(launch(QWEN_30B_A3B, 56.9, args=args))
    strange = {**LLAMA_8B, "architectures": ["StrangeForCausalLM"]}
    assert "expert_parallel" not in errors(launch(strange, 14.96, args=args))


@pytest.mark.parametrize(
    ("gpus", "version", "wrong"),
    [("T4", "0.26.0", True), ("T4", "0.33.0", True), ("A100 80GB", "0.26.0", False), ("T4", "0.9.2", False)],
)
def test_fp8_cache_on_old_gpus(gpus, version, wrong):
    case = launch(LLAMA_8B, 5.0, gpus, version, args={"kv-cache-dtype": "fp8", "max-model-len": 4096})
    assert ("kv_cache_dtype" in errors(case)) is wrong


def test_fp8_cache_is_not_advised_where_it_does_not_run():
    for gpus, advised in (("T4", False), ("L4", True)):
        found = judged(launch(LLAMA_8B, 9.0, gpus, args={"max-model-len": 131072, "dtype": "half"}))["kv_fit"]
        assert ("--kv-cache-dtype fp8" in found.fix) is advised


def test_e5m2_does_not_go_with_an_fp8_checkpoint():
    args = {"kv-cache-dtype": "fp8_e5m2", "max-model-len": 8192}
    assert "kv_cache_dtype" in errors(launch(quantized(LLAMA_8B, {"quant_method": "fp8"}), 8.5, args=args))
    assert "kv_cache_dtype" not in errors(launch(LLAMA_8B, 14.96, args=args))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max-num-batched-tokens", 0),
        ("block-size", 0),
        ("block-size", -16),
        ("decode-context-parallel-size", 0),
        ("max-model-len", "1.5K"),
        ("max-model-len", 16.5),
        ("max-model-len", "16.5"),
        ("max-model-len", -7),
        ("max-num-seqs", "9" * 400),
    ],
)
def test_numbers_that_vllm_does_not_take(option, value):
    assert "flag_value" in errors(launch(LLAMA_8B, 14.96, args={"max-model-len": 8192, option: value}))


def test_a_length_below_auto_is_none_of_any_release():
    assert "flag_value" in errors(launch(LLAMA_8B, 14.96, version="0.6.3", args={"max-model-len": -7}))


@pytest.mark.parametrize(
    ("written", "size"),
    [("1.5k", 1500), ("2K", 2048), ("8192", 8192), (" 4k ", 4000), ("1.5K", None), ("16.5", None), ("-1", -1)],
)
def test_sizes_as_people_write_them(written, size):
    assert launch_case.size_of(written) == size


@pytest.mark.parametrize(
    ("written", "value", "read"),
    [
        ("-O3", None, {"optimization-level": 3}),
        ("-O=2", True, {"optimization-level": 2}),
        ("-O", 1, {"optimization-level": 1}),
        ("-cc.mode", 3, {"compilation-config.mode": 3}),
        ("--hf_overrides.max_position_embeddings", 9, {"hf-overrides.max_position_embeddings": 9}),
    ],
)
def test_short_and_dotted_spellings(written, value, read):
    assert launch_case.arguments({written: value}) == read
    found = judged(good(args={written: value, "--max-model-len": 8}))
    assert not {"flag_value", "unknown_flag"} & set(found)


def test_the_level_before_it_had_an_option():
    assert launch_case.arguments({"-O3": None}, (0, 10, 0)) == {"compilation-config.level": 3}
    assert errors({**good(args={"-O3": None, "--max-model-len": 8192}), "vllm_version": "0.10.0"}) == set()


@pytest.mark.parametrize("value", [131072, "131072"])
def test_overrides_of_one_field_count(value):
    args = {"max-model-len": 65536, "hf-overrides.max_position_embeddings": value}
    assert "max_len_above_config" in errors(launch(QWEN_7B, 14.19, args={"max-model-len": 65536}))
    assert "max_len_above_config" not in errors(launch(QWEN_7B, 14.19, args=args))


def test_overrides_that_are_bad_input():
    assert errors(good(args={"--hf-overrides": '{"vocab_size": ' + "9" * 400 + "}"})) == {"launch"}
    found = judged(good(args={"--hf-overrides": "[" * 100000}))["flag_value"]
    assert "nested too deeply" in found.message
    assert len(found.message) < 200


# --- Memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "card",
    [
        {"name": "NVIDIA A100-SXM4-80GB MIG 1g.10gb"},
        {"name": "A100 80GB", "mig": True},
        {"name": "A100 80GB", "mig": {"current": "Enabled"}, "free_gib": 9.0},
        {"name": "A100 80GB", "mig": "1g.10gb"},
    ],
    ids=str,
)
def test_a_mig_instance_is_as_large_as_it_says(card):
    case = launch(LLAMA_8B, 14.96, args={"max-model-len": 8192})
    found = judged({**case, "gpus": [card]})
    assert "MIG" in found["memory_unknown"].message
    assert "free_memory" not in found
    assert memory({**case, "gpus": [card]})["kv_gib"] is None
    assert "weights_fit" not in errors({**case, "gpus": [card], "weights_gib": 90})
    assert "weights_fit" in errors({**case, "gpus": [{**card, "memory_gib": 9.5}]})


def test_experts_are_divided_over_copies():
    """layers/fused_moe/config.py of 0.26.0: tensor x data x prefill-context sizes."""
    args = {"data-parallel-size": 8, "enable-expert-parallel": True, "max-model-len": 8192}
    case = launch(DEEPSEEK, 642, "8 x H200", args=args)
    assert "weights_fit" not in errors(case)
    # 256 experts of 3 x 7168 x 2048 in 58 layers are 97.5 % of the parameters.
    assert 0.11 * 642 < memory(case)["weights_gib"] < 0.17 * 642
    tensor = memory(launch(DEEPSEEK, 642, "8 x H200", args={"tensor-parallel-size": 8, "max-model-len": 8192}))
    assert tensor["weights_gib"] < memory(case)["weights_gib"]


def test_whole_experts_are_rounded_up():
    shape = model_memory.shape(MIXTRAL)
    size = 10**9
    parts = model_memory.weights_per_gpu(shape, size, 1, 1, copies=3)
    whole = model_memory.weights_per_gpu(shape, size, 1, 1, copies=3, whole_experts=True)
    assert whole > parts
    assert model_memory.weights_per_gpu(shape, size) == model_memory.weights_per_gpu(shape, size, whole_experts=True)


def test_expert_parallelism_counts_whole_experts():
    args = {"data-parallel-size": 3, "max-model-len": 8192}
    parts = memory(launch(MIXTRAL, 87, "3 x H200", args=args))["weights_gib"]
    whole = memory(launch(MIXTRAL, 87, "3 x H200", args={**args, "enable-expert-parallel": True}))["weights_gib"]
    assert 1.05 * parts < whole < 1.15 * parts  # three of eight experts instead of eight thirds


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "StrangeForCausalLM"])
def test_experts_over_copies_of_an_older_release_are_not_known(architecture):
    config = {**MIXTRAL, "architectures": [architecture]}
    version = "0.20.2" if architecture == "MixtralForCausalLM" else "0.26.0"
    case = launch(config, 700, "8 x H200", version, args={"data-parallel-size": 8, "max-model-len": 8192})
    assert "memory_unknown" in judged(case)
    assert "weights_fit" not in errors(case)


def test_fp8_on_load_halves_the_layers():
    args = {"quantization": "fp8", "max-model-len": 4096, "max-num-seqs": 16}
    case = launch(LLAMA_70B, 131.4, args=args)
    assert "weights_fit" not in errors(case)
    ends = 2 * 2 * 128256 * 8192 / 2**30  # embedding and head in two bytes
    assert memory(case)["weights_gib"] == pytest.approx((131.4 - ends) / 2 + ends, rel=0.01)
    heavy = judged(launch(LLAMA_70B, 131.4, "L40S", args=args))["weights_fit"]
    assert heavy.severity == "error"
    assert "checkpoint in fp8" not in heavy.fix


@pytest.mark.parametrize(
    ("method", "version", "more"),
    [
        ("fp8", "0.20.2", {}),
        ("bitsandbytes", "0.26.0", {}),
        ("fp8_per_block", "0.26.0", {}),
        ("fp8", "0.26.0", {"cpu-offload-gb": 4}),
    ],
)
def test_other_quantizing_on_load_is_not_weighed(method, version, more):
    args = {"quantization": method, "max-model-len": 4096, **more}
    case = launch(LLAMA_70B, 131.4, version=version, args=args)
    assert method in judged(case)["memory_unknown"].message
    assert not {"weights_fit", "kv_fit"} & errors(case)


def test_the_size_after_quantizing_on_load_may_be_told():
    args = {"quantization": "bitsandbytes", "max-model-len": 8192}
    assert memory(launch(LLAMA_8B, 5.31, args=args))["weights_gib"] == pytest.approx(5.31, abs=0.01)


def test_requests_at_once_are_at_most_the_tokens_of_a_batch():
    """engine/arg_utils.py of 0.26.0, where max-num-seqs is left open."""
    case = launch_case.read_case(good(args={"--max-num-batched-tokens": 512}), KNOWN)
    assert case.defaults["max-num-seqs"] == 512
    assert launch_case.read_case(good(), KNOWN).defaults["max-num-seqs"] == 1024
    assert launch_plan.choose(good(args={"--max-num-batched-tokens": 512}), KNOWN).outcome != "error"


def test_the_estimate_has_as_few_requests():
    args = {"--max-num-batched-tokens": 64, "--max-model-len": 8192}
    left = memory(good(vllm_version="0.20.2", args=args))
    given = memory(good(vllm_version="0.20.2", args={**args, "--max-num-seqs": 64}))
    assert left["activation_gib"] == given["activation_gib"]


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ({"speculative-config": {"model": "draft", "num_speculative_tokens": 3}}, "draft"),
        ({"speculative-config": '{"model": "draft"}'}, "draft"),
        ({"speculative-config.model": "draft"}, "draft"),
        ({"enable-lora": True}, "LoRA"),
        ({"speculative-config": {"method": "ngram"}}, None),
        ({}, None),
    ],
    ids=str,
)
def test_what_is_not_counted_is_said(args, word):
    found = judged(launch(LLAMA_8B, 14.96, args={**args, "max-model-len": 8192})).get("memory_uncounted")
    assert (found is None) is (word is None)
    assert word is None or (word in found.message and found.severity == "info")


def test_slow_links_name_the_numbers_of_the_host():
    case = launch(LLAMA_8B, 14.96, "2 x H200", args={"tensor-parallel-size": 2, "max-model-len": 8192})
    for numbers, told in (((4, 7), "GPUs 4 and 7 "), ((None, None), "GPUs 0 and 1 ")):
        gpus = [{**gpu, "index": number} for gpu, number in zip(case["gpus"], numbers, strict=True)]
        for pair in ("0-1", "1-0"):
            assert told in judged({**case, "gpus": gpus, "links": {pair: "SYS"}})["slow_links_tp"].message


def test_the_new_rules_are_told():
    assert {"context_parallel", "expert_parallel", "kv_cache_dtype", "memory_uncounted"} <= set(launch_rules.MEANINGS)
