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
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import flags as flag_rules
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.findings import did_you_mean
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.launch_case import (
    Case,
    Remark,
    max_length,
    pairs,
    release,
    shown,
    size_of,
)
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.launch_quantization import (
    cache_dtype_rule,
    dtype_rule,
    quantization_rule,
    runs,
)

# The measured all-reduce over two H200s (64 MiB, bus bandwidth): NVLink, through host memory, through sockets.
ALL_REDUCE = "250 GB/s over NVLink, 25.7 through host memory and 2.5 through sockets, measured between two H200s"


# --- Options --------------------------------------------------------------------------------------------------------


# By the table's id; the table is kept beside, so that no other can get its id.
_NAMES: Dict[int, Tuple[Mapping[str, Any], Mapping[str, str]]] = {}


def _names(options: Mapping[str, Any]) -> Mapping[str, str]:
    """Every spelling that a release takes, to the option's own name."""
    kept = _NAMES.get(id(options))
    if kept is None or kept[0] is not options:
        own = {name: name for name in options.get("flags", {})}
        kept = (options, {**own, **options.get("aliases", {})})
        _NAMES[id(options)] = kept
    return kept[1]


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
    name = written.split(".", maxsplit=1)[0]
    names = [_names(table) for table in tables]
    bare = name[3:] if name.startswith("no-") and any(name[3:] in n for n in names) else name
    gone = case.known.removed_flags.get(name, {})
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
                yield Remark("flag_value", "error", f"--{written} is {shown(value)}: {fault}", "Correct the value")
    elif tables and not gone:
        yield from _strange(case, name, names, exact=exact, bounded=bounded)


def _dashed(text: str, options: Mapping[str, Any]) -> str:
    """An advice with the dashes of the command line: `runner` becomes `--runner`."""

    def dashed(match: re.Match[str]) -> str:
        word = match.group(0)
        return f"--{word}" if ("-" in word or word in ("runner", "convert")) and word in options else word

    return re.sub(r"(--[a-z-]+): ", r"\1 ", re.sub(r"[a-z0-9]+(?:-[a-z0-9]+)*", dashed, text))


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
    try:
        return flag_rules._value_fault(kind, value, choices)
    except RecursionError:
        return "it is nested too deeply to be read"


COUNTS = (
    "tensor-parallel-size",
    "pipeline-parallel-size",
    "data-parallel-size",
    "decode-context-parallel-size",
    "prefill-context-parallel-size",
    "max-num-seqs",
    "max-num-batched-tokens",
    "block-size",
)


def sizes_rule(case: Case) -> Iterator[Remark]:
    """Numbers that no release takes."""
    share = case.args.get("gpu-memory-utilization")
    if share is not None:
        try:
            right = 0 < float(share) <= 1
        except (TypeError, ValueError):
            right = False
        if not right:
            message = f"--gpu-memory-utilization is {shown(share)}: a share of the GPU's memory, above 0 and at most 1, was expected"
            yield Remark("utilization_range", "error", message, "Write 0.9 for nine tenths")
    for name in COUNTS:
        value = case.args.get(name)
        if value is not None and (size_of(value) or 0) < 1:
            yield Remark("flag_value", "error", f"--{name} is {shown(value)}: a whole number above 0 was expected")


# --- Dividing the model over GPUs -----------------------------------------------------------------------------------


def fits_heads(case: Case, tensor: int) -> bool:
    return not list(_heads(case, tensor)) and not list(_intermediate(case, tensor)) and not list(_groups(case, tensor))


def divisors(case: Case, limit: int) -> List[int]:
    """The tensor-parallel sizes up to limit that the model can be divided by."""
    return [t for t in range(1, limit + 1) if fits_heads(case, t)]


def _sizes_that_go(case: Case) -> str:
    sizes = divisors(case, len(case.gpus))
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
        if remark.rule == "quant_group_tp" and remark.message.startswith("intermediate size of the experts"):
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


def contexts_rule(case: Case) -> Iterator[Remark]:
    """Context parallelism, which takes the GPUs of tensor parallelism (config/parallel.py and config/model.py,
    verify_with_parallel_config, of 0.26.0 and 0.33.0)."""
    tensor, shared, prefill = case.tensor, case.contexts, case.prefill
    if prefill > 1 and case.data > 1 and case.release[:2] == (0, 26):
        message = (
            f"--prefill-context-parallel-size {prefill} and --data-parallel-size {case.data}: vLLM {case.version} takes "
            "only one of them"
        )
        yield Remark("context_parallel", "error", message, "Leave one of them out")
    if shared < 2:
        return
    option = f"--decode-context-parallel-size {shared}"
    if prefill == 1 and tensor % shared:
        message = f"{option} shares the KV cache among the GPUs of --tensor-parallel-size {tensor}, which is no multiple of it"
        yield Remark("context_parallel", "error", message, f"A divisor of {tensor}")
        return
    if prefill > 1 and shared not in (prefill, tensor * prefill) and case.release >= (0, 26, 0):
        message = f"{option} with --prefill-context-parallel-size {prefill} and --tensor-parallel-size {tensor}"
        fix = f"1, {prefill} or {tensor * prefill}"
        yield Remark("context_parallel", "error", f"{message}: {fix} was expected", fix)
        return
    heads, kv_heads = case.heads, case.kv_heads
    if case.mla or not heads or not kv_heads:
        return
    most = tensor // kv_heads
    if shared > most:
        message = (
            f"{option} with {kv_heads} KV heads and --tensor-parallel-size {tensor}: at most {max(most, 1)}, as many GPUs "
            "as hold the same KV head"
        )
        yield Remark("context_parallel", "error", message, f"{max(most, 1)} or less, or a larger tensor-parallel size")
    elif heads // kv_heads % shared:
        message = f"{option}: each KV head has {heads // kv_heads} query heads, which is no multiple of it"
        yield Remark("context_parallel", "error", message, f"A divisor of {heads // kv_heads}")


def experts_rule(case: Case) -> Iterator[Remark]:
    """_verify_with_expert_parallelism in config/model.py of 0.26.0 and 0.33.0."""
    dense = case.shape is not None and not case.shape.experts
    if dense and case.on("enable-expert-parallel") and case.release >= (0, 26, 0):
        message = "--enable-expert-parallel for a model without experts, and vLLM refuses it"
        yield Remark("expert_parallel", "error", message, "Leave it out")


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
        numbers = {place: case.gpus[int(place)].index for place in name.split("-")}
        told = [place if number is None else str(number) for place, number in numbers.items()]
        message = (
            f"GPUs {' and '.join(told)} of the tensor-parallel group are joined by {link}{more}: two all-reduces a "
            f"layer go that way; {ALL_REDUCE}"
        )
        fix = "Tensor parallelism within GPUs that NVLink joins, and pipeline parallelism across"
        if case.tensor > 2:
            fix += "; vLLM's own all-reduce is off beyond a pair of PCIe GPUs"
        yield Remark("slow_links_tp", "warning", message, fix)


# --- Length and batch -----------------------------------------------------------------------------------------------


def length_rule(case: Case) -> Iterator[Remark]:
    """config/model.py, _get_and_verify_max_len."""
    raw = case.args.get("max-model-len")
    asked = size_of(raw) if raw is not None else None
    own, field_name = max_length(case)
    if asked == -1 and case.release < (0, 14, 0):
        message = f"--max-model-len {raw} (fit to memory) is not in vLLM {case.version}"
        yield Remark("flag_value", "error", message, "Write the number of tokens")
    if raw is not None and (asked is None or asked < -1):
        yield Remark("flag_value", "error", f"--max-model-len is {shown(raw)}: a number of tokens was expected")
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
    name = case.args.get("quantization")
    if name in ("awq", "gptq") and case.quantization and case.release < (0, 22, 0) and runs(case, f"{name}_marlin"):
        message = f"--quantization {name} keeps vLLM {case.version} from its faster {name}_marlin kernels"
        yield Remark("quant_slow", "info", message, "Leave --quantization out")


RULES = (
    options_rule,
    sizes_rule,
    division_rule,
    world_rule,
    contexts_rule,
    experts_rule,
    gpus_rule,
    links_rule,
    dtype_rule,
    cache_dtype_rule,
    quantization_rule,
    length_rule,
    batch_rule,
    eager_rule,
    habits_rule,
)

# Every rule: how grave it can be, and what it means, for people to read.
MEANINGS: Dict[str, Tuple[str, str]] = {
    "launch": ("error", "the launch itself cannot be read"),
    "version_unknown": ("info", "the options of this release are not known; those of its neighbours were taken"),
    "removed_flag": ("error", "an option that the release no longer has, with what to write instead"),
    "unknown_flag": ("error, or warning outside of the known releases", "an option that the release does not have"),
    "flag_value": ("error", "a value that the option cannot take"),
    "utilization_range": ("error", "the share of GPU memory is not above 0 and at most 1"),
    "heads_tp": ("error", "attention heads cannot be divided by the tensor-parallel size"),
    "kv_heads_tp": ("error", "KV heads can be neither divided nor repeated evenly"),
    "ffn_tp": ("error", "the intermediate size cannot be divided by the tensor-parallel size"),
    "quant_group_tp": ("error", "a group or block of quantized weights would lie on two GPUs"),
    "pipeline_layers": ("error", "more pipeline stages than layers"),
    "world_size": ("error", "the sizes need more GPUs than there are, or cannot be spread evenly over the hosts"),
    "uneven_hosts": ("error", "the hosts have different numbers of GPUs"),
    "gpus_idle": ("info", "GPUs are left over"),
    "cross_host_tp": ("warning", "tensor parallelism spans hosts; its traffic is told"),
    "multi_host_backend": ("warning", "the release spreads over hosts with Ray only"),
    "context_parallel": ("error", "sizes of context parallelism that do not go with the others"),
    "expert_parallel": ("error", "expert parallelism for a model without experts"),
    "mig_tp": ("error", "MIG instances cannot be joined"),
    "mixed_gpus": ("warning", "GPUs of several kinds in one replica"),
    "slow_links_tp": ("warning", "tensor parallelism over links that are not NVLink"),
    "bf16_cc": ("error", "bfloat16 on a GPU that has none"),
    "fp16_model": ("error", "a model that is unstable in float16"),
    "float32_fallback": ("warning", "neither bfloat16 nor float16 is possible, so the weights double"),
    "unsupported_quant": ("error", "a quantization that the release does not read"),
    "quant_plugin": ("error", "a quantization that left vLLM for a plugin package"),
    "quant_mismatch": ("error", "the quantization that is asked for is not the checkpoint's"),
    "quant_capability": ("error", "the GPU is too old for the quantization"),
    "quant_dtype": ("error", "the quantization does not take the dtype"),
    "quant_slow": ("info", "a slower kernel than necessary was asked for"),
    "kv_cache_dtype": ("error", "a dtype of the KV cache that the GPU or the checkpoint does not take"),
    "max_len_above_config": ("error", "a length above what the model is made for"),
    "batch_below_length": ("error", "whole prompts do not fit into a batch"),
    "batch_below_seqs": ("error", "fewer tokens than requests in a batch"),
    "eager": ("warning", "no CUDA graphs"),
    "remote_code": ("info", "Python out of the model's folder"),
    "pooling": ("info", "a model without completions"),
    "memory_unknown": ("info", "what the memory follows from is not known, so it is not judged"),
    "memory_uncounted": ("info", "a draft model or adapters that are in no number"),
    "free_memory": ("error", "less memory is free than is asked for"),
    "weights_fit": ("error", "the weights do not fit"),
    "kv_fit": (
        "error, or warning where the prediction leaves it open",
        "the KV cache of one longest request does not fit",
    ),
    "headroom": ("warning", "little is left: for CUDA and NCCL, for a second long request, or for peaks"),
    "would_fit": ("info", "what would fit, in a plan that was refused or is tight"),
}
