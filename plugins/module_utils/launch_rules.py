# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What vLLM would refuse, or do badly, of a launch, from its files alone: one function a rule.

A rule yields remarks. error: vLLM does not start, or the first request fails. warning: it serves, worse than it could.
info: worth knowing. Every message carries the numbers it was judged by. Where a rule differs by release, the release is in
the rule, with the file of vLLM that decides; memory is judged in launch_memory.py.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import functools
import re
from dataclasses import asdict, dataclass
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import flags as flag_rules
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.findings import did_you_mean
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.launch_case import (
    TRUE,
    Case,
    max_length,
    pairs,
    release,
    size_of,
)

# The measured all-reduce over two H200s (64 MiB, bus bandwidth): NVLink, through host memory, through sockets.
ALL_REDUCE = "250 GB/s over NVLink, 25.7 through host memory and 2.5 through sockets, measured between two H200s"


@dataclass(frozen=True)
class Remark:
    """One judgement. severity: error, warning or info."""

    rule: str
    severity: str
    message: str
    fix: str = ""

    def as_dict(self) -> Dict[str, str]:
        return asdict(self)


# --- Options --------------------------------------------------------------------------------------------------------


def _names(options: Mapping[str, Any]) -> Mapping[str, str]:
    """Every spelling that a release takes, to the option's own name."""
    own = {name: name for name in options.get("flags", {})}
    return {**own, **options.get("aliases", {})}


@functools.lru_cache(maxsize=256)
def _order(versions: Tuple[str, ...]) -> Tuple[str, ...]:
    return tuple(sorted(versions, key=release))


def neighbours(case: Case) -> Tuple[Optional[str], Optional[str]]:
    """The releases next to the launch's whose options are known: below or equal, and above."""
    order = _order(tuple(case.known.serve_flags))
    below = [v for v in order if release(v) <= case.release]
    above = [v for v in order if release(v) > case.release]
    return (below[-1] if below else None), (above[0] if above else None)


def options_rule(case: Case) -> Iterator[Remark]:
    """Options that are gone, not there yet, misspelt, or given a value that they cannot take."""
    below, above = neighbours(case)
    exact = below is not None and release(below) == case.release
    near = [v for v in ((below,) if exact else (below, above)) if v]
    if not exact and near:
        told = " and ".join(near)
        yield Remark(
            "version_unknown",
            "info",
            f"the options of vLLM {case.version} are not known here; those of {told} are, and were taken where they agree",
            "Ask the release itself once it is installed: scripts/flags PYTHON",
        )
    tables = [case.known.serve_flags[v] for v in near]
    for name, value in case.args.items():
        yield from _option(case, name, value, tables=tables, exact=exact, bounded=bool(below and above))


def _option(
    case: Case, written: str, value: Any, *, tables: Sequence[Mapping[str, Any]], exact: bool, bounded: bool
) -> Iterator[Remark]:
    name = written.split(".")[0]
    names = [_names(table) for table in tables]
    bare = name[3:] if name.startswith("no-") and any(name[3:] in n for n in names) else name
    gone = case.known.removed_flags.get(name)
    is_gone = bool(gone) and release(gone["gone_in"]) <= case.release
    there = [bare in n for n in names]
    if is_gone and not (exact and all(there)):
        newest = _names(case.known.serve_flags[_order(tuple(case.known.serve_flags))[-1]]) if names else {}
        instead = _dashed(gone["instead"], newest)
        message = f"--{name} is not an option of vLLM {case.version}: gone since {gone['gone_in']}, instead: {instead}"
        yield Remark("removed_flag", "error", message, f"Instead: {instead}")
    elif any(there):
        if exact and "." not in written:
            table = tables[0]
            own = names[0][bare]
            fault = _value(own, table, value)
            if fault:
                yield Remark("flag_value", "error", f"--{written} is {value!r}: {fault}", "Correct the value")
    elif tables and not gone:
        yield from _strange(case, name, names, exact=exact, bounded=bounded)


def _dashed(text: str, options: Mapping[str, Any]) -> str:
    """An advice with the dashes of the command line: `runner` becomes `--runner`."""

    def dashed(match: re.Match[str]) -> str:
        word = match.group(0)
        return f"--{word}" if ("-" in word or word in ("runner", "convert")) and word in options else word

    return re.sub(r"[a-z0-9]+(?:-[a-z0-9]+)*", dashed, text)


def _strange(
    case: Case, name: str, names: Sequence[Mapping[str, str]], *, exact: bool, bounded: bool
) -> Iterator[Remark]:
    later = [
        v
        for v in _order(tuple(case.known.serve_flags))
        if release(v) > case.release and name in _names(case.known.serve_flags[v])
    ]
    if later:
        message = (
            f"--{name} is not an option of vLLM {case.version} yet: {later[0]} is the first release known to have it"
        )
        yield Remark("unknown_flag", "error" if exact or bounded else "warning", message, "Leave it out, or upgrade")
        return
    message = f"--{name} is not an option of vLLM {case.version}"
    if not (exact or bounded):
        message = f"--{name} is in no release whose options are known here; {case.version} is none of them"
    yield Remark(
        "unknown_flag",
        "error" if exact or bounded else "warning",
        message,
        f"{did_you_mean(name, names[0])}`vllm serve --help=all` of the release lists what there is",
    )


def _value(name: str, table: Mapping[str, Any], value: Any) -> Optional[str]:
    kind = table["flags"].get(name, "str")
    if kind == "switch":
        if isinstance(value, bool) or value in (None, "") or str(value).lower() in ("true", "false"):
            return None
        return "it is a switch, true or false"
    if value is None:
        return "it has no value"
    if kind in ("str", "list") and not isinstance(value, (list, dict)):
        value = str(value)
    if kind == "float" and isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return "it wants a number"
    # Methods of quantization have a rule of their own that says more.
    choices = None if name == "quantization" else table.get("choices", {}).get(name)
    return flag_rules._value_fault(kind, value, choices)


def sizes_rule(case: Case) -> Iterator[Remark]:
    """Numbers that no release takes."""
    share = case.args.get("gpu-memory-utilization")
    if share is not None:
        try:
            right = 0 < float(share) <= 1
        except (TypeError, ValueError):
            right = False
        if not right:
            message = (
                f"--gpu-memory-utilization is {share}: a share of the GPU's memory, above 0 and at most 1, was expected"
            )
            yield Remark("utilization_range", "error", message, "Write 0.9 for nine tenths")
    for name in ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "max-num-seqs"):
        value = case.args.get(name)
        if value is not None and (size_of(value) or 0) < 1:
            yield Remark("flag_value", "error", f"--{name} is {value!r}: a whole number above 0 was expected")


# --- Dividing the model over GPUs -----------------------------------------------------------------------------------


def fits_heads(case: Case, tensor: int) -> bool:
    return not list(_heads(case, tensor)) and not list(_intermediate(case, tensor)) and not list(_groups(case, tensor))


def divisors(case: Case, limit: int) -> List[int]:
    """The tensor-parallel sizes up to limit that the model can be divided by."""
    return [t for t in range(1, limit + 1) if fits_heads(case, t)]


def _sizes_that_go(case: Case) -> str:
    sizes = divisors(case, max(case.per_node, case.tensor, 1))
    return f"--tensor-parallel-size {' or '.join(map(str, sizes))} goes" if sizes else "No size above 1 goes"


def _heads(case: Case, tensor: int) -> Iterator[Remark]:
    """config/model.py, verify_with_parallel_config; models/llama.py, LlamaAttention; layers/linear.py, QKVParallelLinear."""
    heads, kv_heads = case.heads, case.kv_heads
    if tensor > 1 and heads and heads % tensor:
        message = f"{heads} attention heads are not divisible by --tensor-parallel-size {tensor}: every GPU needs as many heads"
        yield Remark("heads_tp", "error", message)
    if tensor > 1 and kv_heads and not case.mla and max(kv_heads, tensor) % min(kv_heads, tensor):
        message = (
            f"{kv_heads} KV heads (keys and values) and --tensor-parallel-size {tensor}: neither is divisible by the other, "
            "so the KV heads can be neither divided nor repeated evenly"
        )
        yield Remark("kv_heads_tp", "error", message)


def _widths(case: Case) -> List[Tuple[str, int]]:
    """The inner widths that tensor parallelism divides: of dense layers, and of experts unless they go whole to GPUs."""
    shape = case.shape
    if shape is None:
        width = case.number(("intermediate_size", "ffn_dim", "n_inner", "inner_hidden_size", "ffn_hidden_size"))
        return [("intermediate size", width)] if width else []
    found = []
    if shape.intermediate and "dense" in shape.feed_forward:
        found.append(("intermediate size", shape.intermediate))
    if "experts" in shape.feed_forward and shape.expert_intermediate and not case.on("enable-expert-parallel"):
        found.append(("intermediate size of the experts", shape.expert_intermediate))
    if "experts" in shape.feed_forward and shape.shared_intermediate:
        found.append(("intermediate size of the shared experts", shape.shared_intermediate))
    return found


def _intermediate(case: Case, tensor: int) -> Iterator[Remark]:
    """distributed/utils.py, divide."""
    for what, width in _widths(case):
        if tensor > 1 and width % tensor:
            message = f"{what} {width} is not divisible by --tensor-parallel-size {tensor}"
            yield Remark("ffn_tp", "error", message)


def _groups(case: Case, tensor: int) -> Iterator[Remark]:
    """Quantization that shares a scale among a group or a block of weights: a group must lie on one GPU.

    Groups: auto_awq.py and gptq.py (create_weights), verify_group_size_divides_partition in distributed/utils.py and
    marlin_utils.py. Experts are not held to it: moe_wna16.py halves the group. Blocks: fp8_utils.py,
    validate_fp8_block_shape, and fp8.py for experts, which refines the blocks down to 32 from 0.29 on.
    """
    known = case.quantization
    if tensor < 2 or not known or case.shape is None:
        return
    shape = case.shape
    rows = [(what, width) for what, width in _widths(case) if "of the experts" not in what]
    if shape.heads and (shape.v_dim or shape.head_dim_v):
        rows.append(("attention width", shape.heads * (shape.v_dim or shape.head_dim_v)))
    group, bits = known.get("group_size"), known.get("bits")
    if isinstance(group, int) and group > 0 and bits in (2, 3, 4, 8, None) and known["method"] not in ("mxfp4", "fp8"):
        for what, width in rows:
            if width % tensor == 0 and (width // tensor) % group and width % group == 0:
                message = (
                    f"{what} {width} over {tensor} GPUs is {width // tensor}, which is not divisible by the quantization's "
                    f"group size {group}: --tensor-parallel-size {tensor} is too large for this checkpoint"
                )
                yield Remark("quant_group_tp", "error", message)
    block = known.get("block")
    if known["method"] in ("fp8", "compressed-tensors") and isinstance(block, (list, tuple)) and len(block) == 2:
        step = max(int(size) for size in block)
        experts = [(what, width) for what, width in _widths(case) if what == "intermediate size of the experts"]
        for what, width in rows + experts:
            part = width // tensor
            refined = (what, width) in experts and case.release >= (0, 29, 0) and _power_of_two(part) >= 32
            if width % tensor == 0 and part % step and not refined:
                message = (
                    f"{what} {width} over {tensor} GPUs is {part}, which is not divisible by the fp8 block of {step}: "
                    f"--tensor-parallel-size {tensor} is too large for this checkpoint"
                )
                yield Remark("quant_group_tp", "error", message)


def _power_of_two(value: int) -> int:
    return value & -value


def division_rule(case: Case) -> Iterator[Remark]:
    tensor = case.tensor
    for remark in [*_heads(case, tensor), *_intermediate(case, tensor), *_groups(case, tensor)]:
        fix = _sizes_that_go(case)
        if remark.rule == "quant_group_tp" and case.shape and case.shape.experts:
            fix += ", or --enable-expert-parallel, which keeps experts whole"
        yield Remark(remark.rule, remark.severity, remark.message, fix)
    if case.layers and case.pipeline > case.layers:
        message = f"--pipeline-parallel-size {case.pipeline} for {case.layers} layers: a stage would have none"
        yield Remark("pipeline_layers", "error", message, f"At most {case.layers}")


def world_rule(case: Case) -> Iterator[Remark]:
    """Processes against GPUs and hosts (config/parallel.py)."""
    total, nodes = len(case.gpus), case.nodes
    told = " x ".join(
        f"{word} {size}"
        for word, size in (("tensor", case.tensor), ("pipeline", case.pipeline), ("data", case.data))
        if size > 1 or word == "tensor"
    )
    if total % nodes:
        message = f"{total} GPUs on {nodes} hosts: the hosts differ, and ranks are spread evenly"
        yield Remark("uneven_hosts", "error", message, "Use as many GPUs on each host")
    if case.world > total:
        message = f"{told} needs {case.world} GPUs, but there {'is' if total == 1 else 'are'} {total}"
        yield Remark("world_size", "error", message, f"Sizes whose product is at most {total}")
    elif nodes > 1 and case.world % nodes and case.world > case.per_node:
        message = f"{told} is {case.world} processes, which cannot be spread evenly over {nodes} hosts"
        yield Remark("world_size", "error", message, f"Make the product a multiple of {nodes}")
    elif case.world < total:
        message = f"{told} uses {case.world} of {total} GPUs"
        yield Remark("gpus_idle", "info", message, "Start more replicas, or use larger sizes, if the rest is for it")
    if case.nodes > 1 and case.tensor > case.per_node:
        yield _cross_host(case)
    if nodes > 1 and case.release < (0, 11, 2) and case.args.get("distributed-executor-backend") != "ray":
        message = f"vLLM {case.version} spreads over hosts with Ray only; --nnodes came with 0.11.2"
        yield Remark("multi_host_backend", "warning", message, "--distributed-executor-backend ray, or a newer release")


def _cross_host(case: Case) -> Remark:
    width = case.shape.hidden if case.shape else case.number(("hidden_size", "n_embd", "d_model"))
    cost = ""
    if width and case.layers:
        each = 2 * case.layers * width * 2
        cost = (
            f": two all-reduces a layer, {each / 2**20:.1f} MiB for every token ({case.layers} layers of width {width}), wait "
            f"for the network"
        )
    message = f"--tensor-parallel-size {case.tensor} spans hosts of {case.per_node} GPUs{cost}. All-reduce reaches {ALL_REDUCE}"
    fix = (
        f"--tensor-parallel-size {case.per_node} --pipeline-parallel-size {max(1, case.tensor // case.per_node)} sends one "
        "hidden state a token and stage instead; without RDMA between the hosts do not use it otherwise"
    )
    return Remark("cross_host_tp", "warning", message, fix)


# --- GPUs -----------------------------------------------------------------------------------------------------------


def gpus_rule(case: Case) -> Iterator[Remark]:
    used = case.used
    if case.world > 1 and any(gpu.mig for gpu in used):
        message = (
            f"MIG is on and the launch spreads over {case.world} GPUs: NCCL has no way between MIG instances, so tensor and "
            "pipeline parallelism do not start"
        )
        yield Remark("mig_tp", "error", message, "One instance a service (all sizes 1), or switch MIG off")
    kinds = list(dict.fromkeys((gpu.name, gpu.gib) for gpu in used))
    if case.tensor * case.pipeline > 1 and len(kinds) > 1:
        told = ", ".join(f"{name} with {gib:g} GiB" for name, gib in kinds)
        message = f"GPUs of several kinds in one replica ({told}): the smallest and slowest sets the pace and the memory of all"
        yield Remark("mixed_gpus", "warning", message, "One replica for each kind of GPU")


def links_rule(case: Case) -> Iterator[Remark]:
    """Tensor parallelism over anything but NVLink (custom_all_reduce.py has none beyond a pair of PCIe GPUs)."""
    if case.tensor < 2:
        return
    slow = {name: case.links[name] for name in pairs(case) if not str(case.links[name]).upper().startswith("NV")}
    if slow:
        name, link = max(
            slow.items(),
            key=lambda item: (
                ("PIX", "PXB", "PHB", "NODE", "SYS").index(item[1])
                if item[1] in ("PIX", "PXB", "PHB", "NODE", "SYS")
                else -1
            ),
        )
        more = f", and {len(slow) - 1} more pairs without NVLink" if len(slow) > 1 else ""
        message = (
            f"GPUs {name.replace('-', ' and ')} of the tensor-parallel group are joined by {link}{more}: two all-reduces a "
            f"layer go that way; {ALL_REDUCE}"
        )
        fix = "Tensor parallelism within GPUs that NVLink joins, and pipeline parallelism across"
        if case.tensor > 2:
            fix += "; vLLM's own all-reduce is off beyond a pair of PCIe GPUs"
        yield Remark("slow_links_tp", "warning", message, fix)


# --- dtype and quantization -----------------------------------------------------------------------------------------

DTYPES = {"half": "float16", "float": "float32"}
# config/model.py, _FLOAT16_NOT_SUPPORTED_MODELS
NOT_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "plamo2", "glm4")


def asked_dtype(case: Case) -> str:
    value = str(case.args.get("dtype", "auto")).lower()
    return DTYPES.get(value, value)


def checkpoint_dtype(case: Case) -> str:
    """As config.json says; empty where it does not."""
    for part in (case.config, case.text):
        value = part.get("dtype", part.get("torch_dtype"))
        if value is not None:
            value = str(value).replace("torch.", "")
            return DTYPES.get(value, value)
    return ""


def no_float16(case: Case) -> bool:
    return str(case.text.get("model_type", case.config.get("model_type", ""))) in NOT_FLOAT16 and (
        case.release >= (0, 9, 0) and (case.text.get("model_type") != "plamo2" or case.release < (0, 30, 0))
    )


def old_gpu(case: Case) -> bool:
    """Without bfloat16 (platforms/cuda.py, supported_dtypes)."""
    return case.capability is not None and case.capability < (8, 0)


def dtype_of(case: Case) -> str:
    """The dtype that vLLM takes (config/model.py, _resolve_auto_dtype; before 0.9 without a look at the GPU)."""
    asked = asked_dtype(case)
    if asked != "auto":
        return asked
    own = checkpoint_dtype(case)
    if own == "float32":
        own = "bfloat16" if case.release >= (0, 9, 0) and not old_gpu(case) and no_float16(case) else "float16"
    if own == "bfloat16" and old_gpu(case) and case.release >= (0, 9, 0):
        return "float32" if no_float16(case) else "float16"
    return own


def dtype_rule(case: Case) -> Iterator[Remark]:
    dtype, asked = dtype_of(case), asked_dtype(case)
    if dtype == "bfloat16" and old_gpu(case):
        old = min((gpu for gpu in case.used if gpu.capability), key=lambda gpu: gpu.capability or (0, 0))
        major, minor = case.capability or (0, 0)
        why = "was asked for" if asked != "auto" else f"is the checkpoint's, which vLLM {case.version} keeps"
        message = f"bfloat16 {why}, but {old.name} has compute capability {major}.{minor}; bfloat16 begins at 8.0, float16 works"
        yield Remark(
            "bf16_cc",
            "error",
            message,
            "--dtype half (float16)" + (", or leave --dtype out" if asked != "auto" else ""),
        )
    if dtype == "float16" and no_float16(case):
        kind = case.text.get("model_type", case.config.get("model_type"))
        message = f"models of type {kind} are numerically unstable in float16, and vLLM refuses it"
        yield Remark(
            "fp16_model", "error", message, "--dtype bfloat16 on compute capability 8.0 and newer, else float32"
        )
    if dtype == "float32" and asked == "auto" and checkpoint_dtype(case) == "bfloat16":
        message = "the GPU has no bfloat16 and the model no float16: vLLM takes float32, which doubles the weights"
        yield Remark("float32_fallback", "warning", message, "A GPU of compute capability 8.0 or newer")


# A checkpoint's method, and the methods that vLLM reads it with.
FAMILIES = {
    "gptq": ("gptq", "gptq_marlin", "auto_gptq", "marlin", "moe_wna16", "gptq_bitblas", "humming"),
    "awq": ("awq", "awq_marlin", "auto_awq", "marlin", "moe_wna16", "ipex", "cpu_awq", "humming"),
    "auto-round": ("auto-round", "inc", "gptq", "awq", "gptq_marlin", "awq_marlin"),
    "auto_round": ("auto-round", "inc"),
    "intel/auto-round": ("auto-round", "inc"),
    "inc": ("inc", "auto-round"),
    "modelopt": ("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "nvfp4"),
    "modelopt_fp4": ("modelopt", "modelopt_fp4", "nvfp4"),
    "nvfp4": ("modelopt_fp4", "modelopt", "nvfp4"),
    "mxfp4": ("mxfp4", "gpt_oss_mxfp4", "humming"),
    "fp8": ("fp8", "deepseek_v4_fp8", "humming"),
}
# Methods that quantize while loading; every other one needs a checkpoint made for it.
ONLINE = (
    "fp8",
    "bitsandbytes",
    "experts_int8",
    "torchao",
    "online",
    "gguf",
    "humming",
    "tpu_int8",
    "deepspeedfp",
    "ptpc_fp8",
    "int8_per_channel_weight_only",
    "nvfp4_per_token",
    "mxfp8",
    "fp8_per_tensor",
    "fp8_per_block",
    "fp8_per_channel",
    "inc",
    "rtn",
    "quark",
    "moe_wna16",
    "neuron_quant",
    "ipex",
)
PLUGINS = {
    "bitsandbytes": "bitsandbytes left vLLM with 0.28 and is a plugin package now (vllm-bnb-plugin)",
    "gguf": "GGUF left vLLM with 0.24 and is a plugin package now",
}


def spans(case: Case, method: str) -> List[Mapping[str, Any]]:
    return list((case.known.quantization.get("methods") or {}).get(method) or ())


def span_of(case: Case, method: str) -> Optional[Mapping[str, Any]]:
    """What the release says of a method; of releases older than those read, the oldest that was read."""
    found = None
    for span in spans(case, method):
        first = found is None and span["from"] == _oldest(case)
        if release(span["from"]) <= case.release or first:
            found = None if "gone" in span and release(span["gone"]) <= case.release else span
    return found


def _oldest(case: Case) -> str:
    releases = case.known.quantization.get("releases") or ("0.0.0",)
    return str(releases[0])


def methods_that_read(case: Case) -> Tuple[str, Tuple[str, ...]]:
    """The checkpoint's method, and those of this release that read it."""
    known = case.quantization
    own = known["method"] if known else ""
    return own, tuple(m for m in FAMILIES.get(own, (own,)) if span_of(case, m))


def effective_method(case: Case) -> str:
    """The method that vLLM ends up with: Marlin for AWQ and GPTQ where GPU and checkpoint allow it and nothing else was
    asked for (override_quantization_method of awq_marlin.py and gptq_marlin.py)."""
    asked = str(case.args.get("quantization") or "").lower()
    known = case.quantization
    own = known["method"] if known else ""
    if own in ("awq", "gptq") and asked in ("", "marlin", f"{own}_marlin", "none"):
        marlin = f"{own}_marlin"
        span = span_of(case, marlin)
        enough = span and (case.capability is None or case.capability >= _tuple(span.get("capability")))
        group = known.get("group_size") if known else None
        symmetric = own == "awq" or (case.config.get("quantization_config") or {}).get("sym") is not False
        if enough and known and known.get("bits") in (4, 8, None) and group in (None, -1, 32, 64, 128) and symmetric:
            return marlin
        return own if asked in ("", "none") else asked
    return asked if asked and asked != "none" else own


def _tuple(capability: Any) -> Tuple[int, int]:
    return divmod(int(capability), 10) if capability else (0, 0)


def quantization_rule(case: Case) -> Iterator[Remark]:
    if not case.known.quantization:
        return
    known, asked = case.quantization, str(case.args.get("quantization") or "").lower()
    own, readers = methods_that_read(case)
    if known and own == "own":
        size = f" ({case.weights_bytes / 2**30:.2f} GiB as float16)" if case.weights_bytes else ""
        message = (
            f"quantization_bit {known['bits']} in config.json is a quantization of the model's own code, which vLLM does not "
            f"read: it loads the weights unquantized{size}, or fails at their names"
        )
        yield Remark("unsupported_quant", "error", message, "A checkpoint in AWQ, GPTQ, fp8 or compressed-tensors")
        return
    if known and own and not readers:
        yield _unknown_method(case, own, "the checkpoint is quantized with")
        return
    if asked and asked != "none":
        if asked != "marlin" and not span_of(case, asked):
            yield _unknown_method(case, asked, "--quantization is")
            return
        if own and asked != own and asked not in FAMILIES.get(own, ()):
            message = f"--quantization {asked} does not match the checkpoint, which is quantized with {own}"
            yield Remark(
                "quant_mismatch", "error", message, "Leave --quantization out: vLLM reads the checkpoint's own"
            )
            return
        if not own and asked not in ONLINE:
            message = f"--quantization {asked} needs a checkpoint quantized that way; this config.json has no quantization_config"
            yield Remark(
                "quant_mismatch", "error", message, "A quantized checkpoint, or --quantization fp8, made on loading"
            )
            return
    yield from _method_limits(case, effective_method(case))


def _unknown_method(case: Case, method: str, how: str) -> Remark:
    first = spans(case, method)
    if method in PLUGINS and first:
        message = f"{how} {method}: {PLUGINS[method]}; vLLM {case.version} alone does not know this quantization"
        return Remark(
            "quant_plugin", "error", message, "Install the plugin into the release, or take another checkpoint"
        )
    word = f"{how} {method}, a quantization that vLLM {case.version} does not know"
    if first and release(first[0]["from"]) > case.release:
        return Remark(
            "unsupported_quant", "error", f"{word}: {first[0]['from']} is the first release seen with it", "Upgrade"
        )
    if first:
        return Remark(
            "unsupported_quant", "error", f"{word} any more: gone by {first[-1].get('gone')}", "Another checkpoint"
        )
    names = sorted(m for m in (case.known.quantization.get("methods") or {}) if span_of(case, m))
    return Remark("unsupported_quant", "error", word, f"{did_you_mean(method, names)}It knows {', '.join(names)}")


def _method_limits(case: Case, method: str) -> Iterator[Remark]:
    """config/vllm.py, _get_quantization_config: the GPU, then the dtype."""
    span = span_of(case, method)
    if not span:
        return
    if case.capability and span.get("capability") and case.capability < _tuple(span["capability"]):
        need, have = _tuple(span["capability"]), case.capability
        message = (
            f"quantization {method} needs compute capability {need[0]}.{need[1]} in vLLM {case.version}, {case.used[0].name} "
            f"has {have[0]}.{have[1]}"
        )
        later = [s for s in spans(case, method) if release(s["from"]) > case.release]
        lower = [s for s in later if s.get("capability") and _tuple(s["capability"]) <= have]
        fix = f"vLLM {lower[0]['from']} takes it from {have[0]}.{have[1]} on" if lower else "Another checkpoint or GPU"
        yield Remark("quant_capability", "error", message, fix)
    dtype = dtype_of(case)
    if dtype and span.get("dtypes") and dtype not in span["dtypes"] and not (dtype == "bfloat16" and old_gpu(case)):
        message = f"{dtype} is not supported by quantization {method} in vLLM {case.version}, which takes {' or '.join(span['dtypes'])}"
        fix = f"--dtype {'half' if 'float16' in span['dtypes'] else span['dtypes'][0]}"
        if method in ("awq", "gptq") and case.args.get("quantization"):
            fix += f", or leave --quantization out so that {method}_marlin is chosen, which takes bfloat16 as well"
        yield Remark("quant_dtype", "error", message, fix)


# --- Length and batch -----------------------------------------------------------------------------------------------


def length_rule(case: Case) -> Iterator[Remark]:
    """config/model.py, _get_and_verify_max_len."""
    raw = case.args.get("max-model-len")
    asked = size_of(raw) if raw is not None else None
    own, field_name = max_length(case)
    if asked == -1 and case.release < (0, 14, 0):
        message = f"--max-model-len {raw} (fit to memory) is not in vLLM {case.version}"
        yield Remark("flag_value", "error", message, "Write the number of tokens")
    if raw is not None and asked is None:
        yield Remark("flag_value", "error", f"--max-model-len is {raw!r}: a number of tokens was expected")
    allowed = case.text.get("model_max_length")
    if asked and own and asked > own and not (isinstance(allowed, int) and allowed >= asked):
        message = f"--max-model-len {asked} is above the {own} tokens that the model is made for ({field_name} in config.json)"
        fix = f"At most {own}; a longer context needs rope scaling that the model was trained or tested with (--hf-overrides)"
        yield Remark("max_len_above_config", "error", message, fix)


def batch_rule(case: Case) -> Iterator[Remark]:
    """config/scheduler.py."""
    tokens, seqs = size_of(case.args.get("max-num-batched-tokens", "")), size_of(case.args.get("max-num-seqs", ""))
    own, _name = max_length(case)
    length = size_of(case.args.get("max-model-len", "")) or own
    whole = case.off("enable-chunked-prefill") or (case.release < (0, 8, 0) and not case.on("enable-chunked-prefill"))
    if tokens and length and 0 < tokens < length and whole:
        message = f"--max-num-batched-tokens {tokens} is smaller than --max-model-len {length}, and prompts are not cut in chunks"
        yield Remark("batch_below_length", "error", message, f"At least {length}, or --enable-chunked-prefill")
    if tokens and seqs and 0 < tokens < seqs:
        message = f"--max-num-batched-tokens {tokens} is smaller than --max-num-seqs {seqs}: every request needs a token a step"
        yield Remark("batch_below_seqs", "error", message, f"At least {seqs}")


# --- Habits ---------------------------------------------------------------------------------------------------------


def eager_rule(case: Case) -> Iterator[Remark]:
    if case.on("enforce-eager"):
        message = (
            "--enforce-eager runs without CUDA graphs: 69 instead of 194 output tokens per second for one request, and 2524 "
            "instead of 3991 for 64 at once, measured with an 8B model on an H200"
        )
        yield Remark("eager", "warning", message, "Leave it out, except to find a fault")


def habits_rule(case: Case) -> Iterator[Remark]:
    if case.on("trust-remote-code"):
        message = "--trust-remote-code runs Python out of the model's folder, as the service's user"
        yield Remark(
            "remote_code", "info", message, "Read that code and pin its revision, or take a model that vLLM knows"
        )
    elif case.config.get("auto_map") and case.shape is None:
        message = "config.json names code of the model's own (auto_map), and this architecture is not known here"
        yield Remark("remote_code", "info", message, "If vLLM does not know it either, it needs --trust-remote-code")
    if case.pooling:
        message = "a pooling model answers embeddings or scores and has no completion"
        yield Remark("pooling", "info", message, "Ask /v1/embeddings, /pooling or /score to see whether it is ready")
    if case.args.get("quantization") in ("awq", "gptq") and case.quantization and case.release < (0, 22, 0):
        name = case.args["quantization"]
        message = f"--quantization {name} keeps vLLM {case.version} from its faster {name}_marlin kernels"
        yield Remark("quant_slow", "info", message, "Leave --quantization out")


RULES = (
    options_rule,
    sizes_rule,
    division_rule,
    world_rule,
    gpus_rule,
    links_rule,
    dtype_rule,
    quantization_rule,
    length_rule,
    batch_rule,
    eager_rule,
    habits_rule,
)
__all__ = ["RULES", "TRUE", "Remark", "divisors", "dtype_of", "fits_heads"]
