"""What vLLM's own classes say about KV caches and weights of real model shapes: the judge of module_utils/model_memory.

Runs with a Python that has vLLM's CPU build, needs no GPU, no weights and no network:
    PYTHON scripts/validation/kv_specs.py tests/unit/fixtures/kv_specs.json [--into OTHER.json] [NAME ...]

The file maps models to {name, source, config, tensor, pipeline, lengths} and gets the answers beside them; with names it
asks for those models alone and leaves the others as they are. Each config is written to a folder of its own and vLLM builds
its model of it on torch's meta device, once for each pipeline stage, as rank 0 of TENSOR ranks (the group objects are told
how many they are; no process is started). Then it is asked, as the engine asks it:
    layer.get_kv_cache_spec(...)            of every layer that holds a cache,
    get_kv_cache_groups, get_kv_cache_configs, get_kv_cache_capacity   of v1/core/kv_cache_utils.py,
    and the bytes of the parameters.
Four things are set as they are on CUDA, because the CPU platform has others: the attention kernel takes blocks that are a
multiple of 16 tokens (FlashAttention and Triton, vllm/v1/attention/backends), the block is 16 tokens long, the batches in
flight are one more than the stages (model runner V2, VllmConfig.max_concurrent_batches), and recurrent states have the
dtype that the model's own configuration class gives them (the CPU platform makes them float32).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

BLOCK = 16
BATCHED = 8192
AVAILABLE = 40 * 1024**3  # bytes for the KV cache of each GPU, taken to see how many blocks vLLM makes of them


def patch() -> None:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.oracle import unquantized
    from vllm.model_executor.models import bloom
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends import cpu_attn

    cpu_attn.CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda spec=None: [MultipleOf(BLOCK)])
    choose = unquantized_fused_moe_method.select_unquantized_moe_backend

    def chosen(*args: Any, **kwargs: Any) -> Any:
        try:
            return choose(*args, **kwargs)
        except NotImplementedError:  # no CPU kernel for this width: the parameters are the same without one
            return unquantized.UnquantizedMoeBackend.CPU, None

    unquantized_fused_moe_method.select_unquantized_moe_backend = chosen
    slopes = bloom._get_alibi_slopes
    bloom._get_alibi_slopes = lambda heads: on_cpu(slopes, heads)
    VllmConfig.max_concurrent_batches = property(lambda self: self.parallel_config.pipeline_parallel_size + 1)


def on_cpu(function: Any, *args: Any) -> Any:
    import torch

    with torch.device("cpu"):
        return function(*args)


def engine_config(config: dict[str, Any], length: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
    args = EngineArgs(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        block_size=BLOCK,
        max_model_len=length,
        max_num_batched_tokens=BATCHED,
        max_num_seqs=256,
        trust_remote_code=False,
        limit_mm_per_prompt={},
    )
    vllm_config = args.create_engine_config()
    vllm_config.cache_config.mamba_ssm_cache_dtype = "auto"
    own = MODELS_CONFIG_MAP.get(vllm_config.model_config.architecture)
    if hasattr(own, "update_mamba_ssm_cache_dtype"):
        own.update_mamba_ssm_cache_dtype(
            cache_config=vllm_config.cache_config, hf_config=vllm_config.model_config.hf_text_config
        )
    return vllm_config


def groups(tensor: int, pipeline: int, stage: int) -> None:
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.init_distributed_environment(1, 0, "file://" + tempfile.mktemp(), 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
    if parallel_state._EP is None:  # made for models with experts only, and the first model may have none
        parallel_state._EP = copy.copy(parallel_state._TP)
    for group, size, rank in (
        (parallel_state._TP, tensor, 0),
        (parallel_state._PP, pipeline, stage),
        (parallel_state._EP, tensor, 0),
    ):
        if group is not None:
            group.world_size, group.rank_in_group, group.ranks = size, rank, list(range(size))


def build(  # noqa: PLR0917
    config: dict[str, Any], length: int, tensor: int, pipeline: int, stage: int, cache_dtype: str
) -> Any:
    """(vllm_config, layer name to spec, bytes of parameters) of one GPU."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.platforms.interface import Platform

    vllm_config = engine_config(config, length)
    vllm_config.cache_config.cache_dtype = cache_dtype
    vllm_config.cache_config.kv_cache_layout = "LBNHC"
    parallel = vllm_config.parallel_config
    with set_current_vllm_config(vllm_config):
        groups(tensor, pipeline, stage)
        parallel.tensor_parallel_size, parallel.pipeline_parallel_size = tensor, pipeline
        parallel.rank = stage * tensor
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            model = initialize_model(vllm_config)
        torch.set_default_dtype(torch.float32)
        Platform.update_block_size_for_backend.__func__(type(current_platform), vllm_config)
        specs = {}
        for name, layer in vllm_config.compilation_config.static_forward_context.items():
            if not hasattr(layer, "get_kv_cache_spec") or getattr(layer, "kv_sharing_target_layer_name", None):
                continue
            spec = layer.get_kv_cache_spec(vllm_config)
            if spec is not None:
                specs[name] = spec
        seen: dict[int, int] = {}
        for parameter in model.parameters():
            seen[id(parameter)] = parameter.numel() * parameter.element_size()
    return vllm_config, specs, sum(seen.values())


def kind(spec: Any) -> str:
    return type(spec).__name__


def describe(specs: dict[str, Any]) -> list[dict[str, Any]]:
    """Equal specs counted together, in the order of the layers' first appearance."""
    found: list[dict[str, Any]] = []
    for spec in specs.values():
        entry = {"spec": kind(spec), "block": spec.block_size, "page": spec.page_size_bytes}
        for name in ("sliding_window", "attention_chunk_size"):
            if getattr(spec, name, None):
                entry["window"] = getattr(spec, name)
        if hasattr(spec, "real_page_size_bytes"):
            entry["real_page"] = spec.real_page_size_bytes
        same = next((e for e in found if {k: v for k, v in e.items() if k != "layers"} == entry), None)
        if same:
            same["layers"] += 1
        else:
            found.append({**entry, "layers": 1})
    return found


def ask(config: dict[str, Any], length: int, tensor: int, pipeline: int, cache_dtype: str) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.v1.core import kv_cache_utils as utils

    built = [build(config, length, tensor, pipeline, stage, cache_dtype) for stage in range(pipeline)]
    vllm_config = built[0][0]
    kept: list[list[dict[str, Any]]] = []
    for _config, specs, _weights in built:
        if describe(specs) not in kept:
            kept.append(describe(specs))
    answer: dict[str, Any] = {
        "tensor": tensor,
        "pipeline": pipeline,
        "cache_dtype": cache_dtype,
        "length": length,
        "weights": max(weights for _config, _specs, weights in built),
        "bytes_per_token": max(
            sum(s.real_page_size_bytes // s.block_size for s in specs.values() if kind(s) != "MambaSpec")
            for _c, specs, _w in built
        ),
    }
    with set_current_vllm_config(vllm_config):
        configs = utils.get_kv_cache_configs(vllm_config, [dict(b[1]) for b in built], [AVAILABLE] * pipeline)
        tokens, concurrency = utils.get_kv_cache_capacity(vllm_config, configs[0])
        answer["blocks"] = configs[0].num_blocks
        answer["tokens"], answer["concurrency"] = tokens, concurrency
        answer["block_bytes"] = max(utils._pool_bytes_per_block(vllm_config, c.kv_cache_groups) for c in configs)
        answer["request_bytes"] = max(
            utils._max_memory_usage_bytes_from_groups(vllm_config, c.kv_cache_groups) for c in configs
        )
        grouped: dict[tuple[str, int, int], int] = {}
        for group in configs[0].kv_cache_groups:
            key = (kind(group.kv_cache_spec), len(group.layer_names), group.kv_cache_spec.block_size)
            grouped[key] = grouped.get(key, 0) + 1
        answer["groups"] = [
            dict(zip(("spec", "layers", "block"), k, strict=True), groups=n) for k, n in grouped.items()
        ]
    answer["layers"] = kept
    return answer


def points(entry: dict[str, Any]) -> list[tuple[int, int, int, str]]:
    """Every TENSOR by every PIPELINE at the first length; fp8 and the other lengths at the smallest and largest TENSOR."""
    ends = sorted({entry["tensor"][0], entry["tensor"][-1]})
    found = [(entry["lengths"][0], t, p, "auto") for t in entry["tensor"] for p in entry["pipeline"]]
    found += [(entry["lengths"][0], t, 1, "fp8_e4m3") for t in ends]
    return found + [(length, t, p, "auto") for length in entry["lengths"][1:] for t in ends for p in entry["pipeline"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fixture", type=Path)
    parser.add_argument("--into", type=Path, help="write there instead")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_intermixed_args()
    models = json.loads(arguments.fixture.read_text(encoding="utf-8"))["models"]
    patch()
    failed = False
    for entry in models:
        if arguments.names and entry["name"] not in arguments.names:
            continue
        entry["answers"] = []
        for length, tensor, pipeline, cache_dtype in points(entry):
            try:
                entry["answers"].append(ask(entry["config"], length, tensor, pipeline, cache_dtype))
            except Exception as error:
                failed = True
                print(
                    f"{entry['name']} {tensor=} {pipeline=} {cache_dtype=} {length=}: {type(error).__name__}: {error}"
                )
                if os.environ.get("TRACE"):
                    traceback.print_exc()
        print(f"{entry['name']}: {len(entry['answers'])} answers", flush=True)
        write(arguments.into or arguments.fixture, models)
    return 1 if failed else 0


def write(path: Path, models: list[dict[str, Any]]) -> None:
    """One answer a line, so that a change can be read."""
    import vllm

    head = {"vllm": vllm.__version__, "block": BLOCK, "max_num_batched_tokens": BATCHED, "available": AVAILABLE}
    lines = []
    for model in models:
        told = json.dumps({k: v for k, v in model.items() if k != "answers"})
        answers = ",\n".join(json.dumps(answer) for answer in model.get("answers", []))
        lines.append(f'{told[:-1]}, "answers": [\n{answers}]}}')
    path.write_text(f'{json.dumps(head)[:-1]}, "models": [\n' + ",\n".join(lines) + "]}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
