# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A launch judged before a host is touched, and one chosen: which sizes, which length, which dtype, and why.

    judge(launch, known)   what is wrong with a launch as it is written
    choose(launch, known)  the arguments that a launch leaves open, each with its reason; those it gives are kept or refused

The rules stand in launch_rules.py and launch_memory.py, what a launch is in launch_case.py.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import launch_memory, launch_quantization, launch_rules
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.launch_case import (
    BadLaunch,
    Case,
    Gpu,
    Known,
    Remark,
    max_length,
    read_case,
    size_of,
)
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.launch_memory import Memory, memory_of, with_args

__all__ = ["BadLaunch", "Choice", "Known", "Plan", "Remark", "Verdict", "choose", "judge"]


@dataclass(frozen=True)
class Verdict:
    """outcome: error when any finding is one, else warn when any is a warning, else ok. memory is of the fullest GPU."""

    outcome: str
    findings: Tuple[Remark, ...]
    memory: Dict[str, Any]

    def as_dict(self) -> Dict[str, Any]:
        return {
            "outcome": self.outcome,
            "findings": [finding.as_dict() for finding in self.findings],
            "memory": self.memory,
        }


SEVERITIES = ("error", "warning", "info")


def judge(launch: Mapping[str, Any], known: Known) -> Verdict:
    """Every rule, by the launch's own release. A launch that cannot be read is an error, too."""
    try:
        case = read_case(launch, known)
    except BadLaunch as error:
        return _verdict([Remark("launch", "error", error.reason)], Memory(None, None, False, error.reason))
    return _judged(case)


def _judged(case: Case) -> Verdict:
    found = [remark for rule in launch_rules.RULES for remark in rule(case)]
    rules = {remark.rule for remark in found}
    # A model that cannot be divided has no memory to speak of.
    memory = _memory(case)
    if not rules & {"heads_tp", "kv_heads_tp", "ffn_tp", "pipeline_layers"}:
        found.extend(launch_memory.memory_rule(case, memory))
    return _verdict(found, _of_auto(case, memory))


def _memory(case: Case) -> Memory:
    """What memory_of tells, but nothing of stages without a layer."""
    if case.layers and case.pipeline > case.layers:
        return Memory(None, None, False, f"{case.pipeline} stages are more than the {case.layers} layers")
    return memory_of(case)


def _of_auto(case: Case, memory: Memory) -> Memory:
    """With `--max-model-len auto` vLLM takes the longest length of which one request fits (from 0.14.0 on)."""
    found = memory.estimate
    if size_of(case.args.get("max-model-len", "")) != -1 or found is None or found.request_gib <= found.kv_gib:
        return memory
    longest = launch_memory.longest_length(case, memory, found.kv_gib)
    return memory_of(case, longest) if longest else memory


def _verdict(found: List[Remark], memory: Memory) -> Verdict:
    found = sorted(dict.fromkeys(found), key=lambda remark: SEVERITIES.index(remark.severity))
    worst = found[0].severity if found else "info"
    return Verdict({"error": "error", "warning": "warn"}.get(worst, "ok"), tuple(found), memory.as_dict())


# --- Choosing -------------------------------------------------------------------------------------------------------

COMFORT = 4  # requests of the full length that the KV cache should hold at once before more GPUs are left to replicas
LEAST_WEIGHTS_GIB = 1.5  # a GPU: with less to read for a token, the all-reduces cost more than the division saves
USUAL_HOST = 16  # GPUs; with many more, trying every size would take minutes
LEAST_SHARE = 0.05  # of a GPU's memory; with less free, nothing starts whatever the share
BARE_COMFORT, BARE_MOST = 0.5, 0.9  # of the share that weights may take where KV cache and activations are not known
TOKENS_A_REQUEST = 512  # KV cache that a request has at least, before more requests at once only preempt each other


@dataclass(frozen=True)
class Choice:
    """One argument that the launch left open."""

    flag: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Plan:
    """args is the whole launch: the user's own, unchanged, and the choices. replicas: copies that the GPUs hold.

    outcome is error when the verdict is: then the launch is refused, and the findings say what would fit.
    """

    outcome: str
    args: Dict[str, Any]
    choices: Tuple[Choice, ...]
    kept: Tuple[str, ...]
    tensor: int
    pipeline: int
    replicas: int
    notes: Tuple[str, ...]
    verdict: Verdict

    def as_dict(self) -> Dict[str, Any]:
        return {
            "outcome": self.outcome,
            "args": self.args,
            "choices": [[c.flag, c.value, c.reason] for c in self.choices],
            "kept": list(self.kept),
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "replicas": self.replicas,
            "notes": list(self.notes),
            "findings": [finding.as_dict() for finding in self.verdict.findings],
            "memory": self.verdict.memory,
        }


def choose(launch: Mapping[str, Any], known: Known) -> Plan:
    """Fill what the arguments do not say. Nothing that they say is changed: it is kept, or the plan is refused."""
    try:
        case = read_case(launch, known)
    except BadLaunch as error:
        verdict = _verdict([Remark("launch", "error", error.reason)], Memory(None, None, False, error.reason))
        args = launch.get("args")
        return Plan("error", dict(args) if isinstance(args, Mapping) else {}, (), (), 1, 1, 1, (), verdict)
    given = case
    case, choices, verdict = _chosen(given)
    if any(f.rule in ("weights_fit", "kv_fit", "headroom") and f.severity != "info" for f in verdict.findings):
        verdict = replace(verdict, findings=(*verdict.findings, *_would_fit(case, given)))
    size = case.world
    copies, left = _copies(case) if verdict.outcome != "error" else (1, ())
    notes = [*_notes(case, given), *_other_ways(case, given, verdict)]
    if left:
        notes.append(f"GPUs {', '.join(map(str, left))} stay idle: a copy of this launch does not start on them")
    return Plan(
        outcome=verdict.outcome,
        args=dict(case.args),
        choices=choices,
        kept=tuple(given.args),
        tensor=case.tensor,
        pipeline=case.pipeline,
        replicas=max(1, copies),
        notes=tuple(notes),
        verdict=replace(verdict, findings=_without_idle(verdict, copies * size == len(case.gpus))),
    )


def _with(case: Case, changes: Mapping[str, Any]) -> Case:
    """The case with these arguments besides its own; a switch that was written without a value stays."""
    return replace(case, args={**case.args, **changes})


# Errors that no other sizes would mend.
WHATEVER_THE_SIZES = {
    "removed_flag",
    "unknown_flag",
    "flag_value",
    "utilization_range",
    "uneven_hosts",
    "fp16_model",
    "unsupported_quant",
    "quant_plugin",
    "quant_mismatch",
    "max_len_above_config",
    "batch_below_length",
    "batch_below_seqs",
}


def _chosen(given: Case) -> Tuple[Case, Tuple[Choice, ...], Verdict]:
    """The launch with the first sizes that are not refused; where all are, with those that were wanted most."""
    first = None
    too_heavy: List[Tuple[int, int]] = []
    for tensor, pipeline in _ranked(given):
        if any(tensor <= t and pipeline <= p for t, p in too_heavy):
            continue
        tried = _filled(given, tensor, pipeline)
        if tried[2].outcome != "error":
            return tried
        first = first or tried
        wrong = {finding.rule for finding in tried[2].findings if finding.severity == "error"}
        if wrong & WHATEVER_THE_SIZES:
            break
        # Too heavy for more GPUs, too heavy for fewer; but those may be larger, or have more memory free.
        if "weights_fit" in wrong and tensor * pipeline > 1 and len(set(given.gpus)) == 1:
            too_heavy.append((tensor, pipeline))
    return first or _filled(given, given.tensor, given.pipeline)


def _filled(given: Case, tensor: int, pipeline: int) -> Tuple[Case, Tuple[Choice, ...], Verdict]:
    """The launch with these sizes and everything else that it leaves open."""
    sizes = list(_sizes(given, tensor, pipeline))
    sized = _with(given, {choice.flag: choice.value for choice in sizes})
    tried = _rest(sized, sizes, (_dtype, _share, _length, _batch))
    if tried[2].outcome == "error" and any(c.flag == "gpu-memory-utilization" for c in tried[1]):
        # A smaller share is a precaution; it must not refuse what starts without it.
        again = _rest(sized, sizes, (_dtype, _default_share, _length, _batch))
        tried = again if again[2].outcome != "error" else tried
    return tried


def _rest(case: Case, sizes: Sequence[Choice], steps: Sequence[Any]) -> Tuple[Case, Tuple[Choice, ...], Verdict]:
    choices: List[Choice] = []

    def take(step: Any) -> None:
        nonlocal case
        for choice in step(case):
            choices.append(choice)
            case = _with(case, {choice.flag: choice.value})

    for step in steps:
        take(step)
    # Fewer requests at once leave more for the length.
    take(_length)
    verdict = _judged(case)
    if verdict.outcome != "error" and "max-model-len" not in case.args:
        take(_own_length)
        verdict = _judged(case)
    found = [c for c in choices if c.flag == "dtype"] + list(sizes) + [c for c in choices if c.flag != "dtype"]
    return case, tuple(found), verdict


def _copies(case: Case) -> Tuple[int, Tuple[int, ...]]:
    """How many copies of the launch the GPUs hold, and the GPUs on which one would be refused. Each is judged."""
    if case.data > 1 or case.nodes > 1 or not case.world or case.per_node < case.world:
        return 1, ()
    size, right = case.world, {case.gpus[: case.world]: True}
    left: List[int] = []
    for start in range(size, len(case.gpus) - size + 1, size):
        own = case.gpus[start : start + size]
        if own not in right:
            right[own] = _judged(replace(case, gpus=own, links={}, estimates={})).outcome != "error"
        if not right[own]:
            left.extend(range(start, start + size))
    return len(case.gpus) // size - len(left) // size, tuple(left)


def _without_idle(verdict: Verdict, full: bool) -> Tuple[Remark, ...]:
    """GPUs are not idle when other replicas use them."""
    return tuple(f for f in verdict.findings if not (full and f.rule == "gpus_idle"))


def _dtype(case: Case) -> Iterator[Choice]:
    if "dtype" in case.args:
        return
    own, taken = launch_quantization.checkpoint_dtype(case), launch_quantization.dtype_of(case)
    if not own:
        return
    capability = ".".join(map(str, case.capability)) if case.capability else "unknown"
    if own == "bfloat16" and launch_quantization.old_gpu(case):
        if not launch_quantization.no_float16(case):
            reason = f"bfloat16 begins at compute capability 8.0, {case.smallest.name} has {capability}"
            yield Choice("dtype", "half", reason)
        return
    method = launch_quantization.effective_method(case)
    span = launch_quantization.span_of(case, method)
    if span and span.get("dtypes") and taken not in span["dtypes"] and "float16" in span["dtypes"]:
        yield Choice("dtype", "half", f"quantization {method} of vLLM {case.version} takes float16 only")
    elif own in ("bfloat16", "float16"):
        why = "the checkpoint's own" + (f"; compute capability {capability} has it" if case.capability else "")
        yield Choice("dtype", own, why)


def _share(case: Case) -> Iterator[Choice]:
    if "gpu-memory-utilization" in case.args:
        return
    default = case.defaults["gpu-memory-utilization"]
    share, why = default, f"vLLM {case.version}'s own share"
    # By the fullest of all GPUs, so that one share is right for every copy; by those of this one where that is too little.
    free = _free_share(case, case.gpus, default)
    if free and (free[0] < LEAST_SHARE or _judged(_with(case, {"gpu-memory-utilization": free[0]})).outcome == "error"):
        free = _free_share(case, case.used, default)
        if free and free[0] < LEAST_SHARE:
            return
    if free:
        share, why = free
    else:
        found = _memory(case).estimate
        gib = min(gpu.gib for gpu in case.gpus)
        if found is not None and found.outside_gib > gib * (1 - share):
            share = max(0.5, math.floor(100 * (1 - found.outside_gib / gib)) / 100)
            why = f"CUDA, NCCL and CUDA graphs take about {found.outside_gib:.2f} GiB outside of it"
    left = min(gpu.gib for gpu in case.gpus) * (1 - share)
    reason = f"{why}; it leaves {left:.2f} GiB a GPU as head room for CUDA and communication buffers"
    yield Choice("gpu-memory-utilization", round(share, 2), reason)


def _default_share(case: Case) -> Iterator[Choice]:
    default = case.defaults["gpu-memory-utilization"]
    yield Choice(
        "gpu-memory-utilization", default, f"vLLM {case.version}'s own share; with less the model would not fit"
    )


def _free_share(case: Case, gpus: Sequence[Gpu], default: float) -> Optional[Tuple[float, str]]:
    """The share that the fullest of these GPUs has free, and why; None where all have the default share free."""
    free = [(gpu.free_gib / gpu.gib, gpu.free_gib, gpu) for gpu in gpus if gpu.free_gib is not None]
    if not free:
        return None
    part, gib, gpu = min(free, key=lambda item: item[0])
    if part >= default:
        return None
    return math.floor(100 * part) / 100 - 0.01, f"only {gib:.2f} of {gpu.gib:.2f} GiB are free on {gpu.name}"


# --- Sizes ---


def links_of(case: Case) -> str:
    """all, pairs, none or unknown: how the GPUs of the first host are joined, by `links`, else by their model."""
    group = range(case.per_node if case.links else 0)
    told = [str(case.links[f"{i}-{j}"]).upper() for i in group for j in group if i < j and f"{i}-{j}" in case.links]
    if told:
        fast = [link.startswith("NV") for link in told]
        return "all" if all(fast) else ("pairs" if any(fast) else "none")
    return next((gpu.nvlink for gpu in case.gpus if gpu.nvlink), "unknown")


def _others(case: Case) -> int:
    """Processes besides tensor and pipeline parallelism: the product of the sizes that are never chosen."""
    return case.data * case.whole("prefill-context-parallel-size")


def _limit(case: Case) -> int:
    """The widest tensor parallelism that does not leave what NVLink joins; a pair where there is no NVLink."""
    return min(2 if links_of(case) in ("none", "pairs") else case.per_node, case.per_node)


def _asked(case: Case) -> Tuple[bool, bool]:
    return "tensor-parallel-size" in case.args, "pipeline-parallel-size" in case.args


def _sizes(case: Case, tensor: int, pipeline: int) -> Iterator[Choice]:
    asked_t, asked_p = _asked(case)
    if asked_t and asked_p:
        return
    why_t, why_p = _reasons(case, tensor, pipeline)
    if not asked_t:
        yield Choice("tensor-parallel-size", tensor, why_t)
    if not asked_p:
        yield Choice("pipeline-parallel-size", pipeline, why_p)


def _ranked(case: Case) -> Iterator[Tuple[int, int]]:
    """Tensor and pipeline sizes that the GPUs allow, the most wanted first. Given sizes stay.

    All of them spread evenly over the hosts. Where several hosts are one replica, or a size was given, all GPUs are wanted;
    otherwise as few as serve the model well, since the rest can be replicas.
    """
    asked_t, asked_p = _asked(case)
    each, others = case.per_node, _others(case)
    total = each * case.nodes
    if case.nodes == 1 and any(gpu.mig for gpu in case.gpus):
        yield case.tensor, case.pipeline  # MIG instances cannot be joined
        return
    if (asked_t and asked_p) or not total:
        yield case.tensor, case.pipeline
        return
    tensors = [case.tensor] if asked_t else launch_rules.divisors(case, total // others)
    sizes = _spread(case, tensors, case.layers or total)
    if not sizes and case.nodes > 1:
        # Neither heads nor layers can be spread over the hosts: refused for that, rather than started on one of them.
        anyway = _spread(case, [case.tensor] if asked_t else range(1, total // others + 1), total)
        sizes = sorted(anyway, key=lambda size: _filling(case, *size))[:1]
    if case.nodes > 1 or asked_t or asked_p or others > 1:
        yield from sorted(sizes, key=lambda size: _filling(case, *size))
    else:
        yield from _sparing(case, sizes)


def _spread(case: Case, tensors: Sequence[int], stages: int) -> List[Tuple[int, int]]:
    """Every pair of these tensor sizes and at most so many stages that takes as many GPUs of each host."""
    total, asked_p = case.per_node * case.nodes, _asked(case)[1]
    sizes = []
    for tensor in tensors:
        base = tensor * _others(case)
        for pipeline in [case.pipeline] if asked_p else range(1, min(total // base, stages) + 1):
            if base * pipeline <= total and base * pipeline % case.nodes == 0:
                sizes.append((tensor, pipeline))
    return sizes


def _filling(case: Case, tensor: int, pipeline: int) -> Tuple[Any, ...]:
    """The order of sizes where all GPUs are wanted: the smallest first."""
    total, world = case.per_node * case.nodes, tensor * pipeline * _others(case)
    # Stages, or copies of data parallelism, lie on one host each; tensor parallelism does not leave it.
    spread = (pipeline * case.data) % case.nodes == 0 and tensor <= case.per_node
    return (not spread, total % world != 0, -world, tensor > _limit(case), pipeline)


def _sparing(case: Case, sizes: Sequence[Tuple[int, int]]) -> Iterator[Tuple[int, int]]:
    """The order of sizes of one host where GPUs that are left over can be replicas."""
    links, limit, each = links_of(case), _limit(case), case.per_node
    joined = links in ("all", "unknown")
    narrow = [t for t, _p in sizes if t <= limit and each % t == 0]
    largest = max(narrow or [1])
    usual = [
        (t, p)
        for t, p in sizes
        if t <= limit and each % (t * p) == 0 and (p == 1 or (not joined and p * largest <= each))
    ]
    scores = {size: _score(case, *size) for size in usual}
    comfortable = [size for size in usual if scores[size] >= COMFORT]
    usable = [size for size in usual if scores[size] >= 1]
    best: List[Tuple[int, int]] = []
    # Of what is comfortable, the fewest stages; of those, the widest that still has enough to read, or without NVLink the
    # narrowest. Where nothing is comfortable, what holds most requests.
    if comfortable:
        fewest = min(p for _t, p in comfortable)
        same = [t for t, p in comfortable if p == fewest]
        wide = [t for t in same if _weights_gib(case, t, fewest) >= LEAST_WEIGHTS_GIB]
        best = [((max(wide) if wide else min(same)) if joined else min(same), fewest)]
    elif usable:
        best = [max(usable, key=lambda size: (scores[size], -size[1]))]
    yield from best

    # Where that is refused, or nothing is usable: stages inside the host, too, and as many GPUs as there are; on a host of
    # usual size even so many that the rest cannot be a replica.
    rest = [size for size in sizes if size not in best and (each <= USUAL_HOST or each % (size[0] * size[1]) == 0)]
    scores.update({size: _score(case, *size) for size in rest if size not in scores})

    def order(size: Tuple[int, int]) -> Tuple[Any, ...]:
        tensor, pipeline = size
        return (each % (tensor * pipeline) != 0, tensor > limit, scores[size] < 1, -tensor * pipeline, pipeline)

    yield from sorted(rest, key=order)


def _score(case: Case, tensor: int, pipeline: int) -> float:
    """Requests of the longest length at once, or the like where it cannot be told: by the bare weights, then by GPUs."""
    found = _concurrency(case, tensor, pipeline)
    if found is not None:
        return found
    if case.weights_bytes is None:
        return COMFORT if tensor * pipeline == case.per_node else 1.0
    sized = _with(case, {"tensor-parallel-size": tensor, "pipeline-parallel-size": pipeline})
    each = (case.weights_bytes - launch_memory.offloaded_bytes(sized)) / 2**30 / (tensor * pipeline)
    part = each / (sized.smallest.gib * sized.utilization)
    return float(COMFORT) if part <= BARE_COMFORT else (1.0 if part <= BARE_MOST else 0.0)


def _concurrency(case: Case, tensor: int, pipeline: int) -> Optional[float]:
    """Requests of the longest length at once; None where memory cannot be told, 0 where the launch does not fit."""
    sized = _with(case, {"tensor-parallel-size": tensor, "pipeline-parallel-size": pipeline})
    found = _memory(sized).estimate
    if found is None:
        return None
    if launch_memory.left_gib(found) < launch_memory.shortage_gib(sized, found) - launch_memory.DOUBT_GIB:
        return 0.0
    return found.max_concurrency if found.request_gib > 0 else float(COMFORT)


def _weights_gib(case: Case, tensor: int, pipeline: int) -> float:
    return (case.weights_bytes or 0) / 2**30 / (tensor * pipeline)


def _reasons(case: Case, tensor: int, pipeline: int) -> Tuple[str, str]:
    if case.nodes == 1 and any(gpu.mig for gpu in case.gpus):
        return "MIG instances cannot be joined", "MIG instances cannot be joined"
    links, limit, each = links_of(case), _limit(case), case.per_node
    joined = {
        "all": "NVLink joins them",
        "pairs": "NVLink joins pairs only",
        "none": "there is no NVLink between them",
        "unknown": "how they are joined is not known",
    }[links]
    return (
        _why_tensor(case, tensor, pipeline, limit=limit, joined=joined),
        _why_pipeline(case, tensor, pipeline, joined=joined if each > 1 else "which has one GPU"),
    )


def _why_tensor(case: Case, tensor: int, pipeline: int, *, limit: int, joined: str) -> str:
    each = case.per_node
    read = (
        f"{_weights_gib(case, tensor, pipeline):.2f} GiB of weights a GPU" if case.weights_bytes else "weights unknown"
    )
    if tensor > each or (pipeline * case.data) % case.nodes:
        return f"{tensor} GPUs over {case.nodes} hosts of {each}, {read}: nothing else uses all hosts"
    if each == 1:
        return f"the one GPU of a host, {read}"
    why = f"{tensor} of the {each} GPUs of a host, {read}; {joined}"
    asked_p = _asked(case)[1]
    top = min(limit, max(1, each * case.nodes // (_others(case) * (case.pipeline if asked_p else 1))))
    refused = next(iter(_why_not(case, top)), "") if tensor < top else ""
    concurrency = _concurrency(case, tensor, pipeline)
    spare = case.nodes == 1 and not asked_p and _others(case) == 1 and pipeline == 1
    if refused and tensor == max(launch_rules.divisors(case, top) or [1]):
        why += f"; not {top}: {refused}"
    elif tensor < top and spare and concurrency is not None and concurrency >= 1:
        if case.weights_bytes and _weights_gib(case, 2 * tensor, pipeline) < LEAST_WEIGHTS_GIB:
            why += (
                f"; with less than {LEAST_WEIGHTS_GIB} GiB a GPU to read, all-reduces cost more than dividing saves: further "
                "GPUs serve better as replicas"
            )
        else:
            why += "; the model fits, and further GPUs serve better as replicas than divided further"
    elif limit < each and tensor == limit:
        why += "; beyond a pair, stages of a pipeline send less than tensor parallelism does"
    return why


def _why_pipeline(case: Case, tensor: int, pipeline: int, *, joined: str) -> str:
    if pipeline == 1:
        if case.nodes == 1:
            return "one stage: one host"
        return (
            "one stage: "
            + ("copies of data parallelism" if case.data > 1 else "tensor parallelism")
            + " over the hosts"
        )
    if case.nodes > 1 and pipeline % case.nodes == 0:
        more = f", {pipeline // case.nodes} on each" if pipeline > case.nodes else ""
        return f"{pipeline} stages over {case.nodes} hosts{more}: between hosts one hidden state a token instead of all-reduces"
    why = f"{pipeline} stages inside the host, {joined}"
    if _asked(case)[0]:
        why += f": the rest of its {case.per_node} GPUs, with --tensor-parallel-size {tensor} as given"
    return why


def _why_not(case: Case, tensor: int) -> Iterator[str]:
    sized = with_args(case, tensor_parallel_size=tensor)
    for remark in launch_rules.division_rule(sized):
        if remark.rule != "pipeline_layers":
            yield remark.message


# --- Length and requests ---


def _length(case: Case) -> Iterator[Choice]:
    """Never left to the model's own length: written down, and shorter where that would not fit twice."""
    own, field_name = max_length(case)
    if "max-model-len" in case.args or not own:
        return
    memory = _memory(case)
    found = memory.estimate
    if found is None or found.request_gib <= 0:
        yield Choice("max-model-len", own, f"the model's own ({field_name}); memory cannot be told")
        return
    room = found.kv_gib - launch_memory.shortage_gib(case, found)
    if found.max_concurrency >= 2 and found.request_gib <= room:
        reason = f"the model's own ({field_name}); {found.max_concurrency:.1f} requests of it fit at once"
        yield Choice("max-model-len", own, reason)
        return
    longest = launch_memory.longest_length(case, memory, min(found.kv_gib / 2, max(room, 0.0)))
    if longest <= 0:
        return
    reason = (
        f"the model's own {own} would need {found.request_gib:.2f} GiB of KV cache for one request, of {found.kv_gib:.2f} "
        f"available; two requests of {longest} fit at once"
    )
    yield Choice("max-model-len", longest, reason)


def _own_length(case: Case) -> Iterator[Choice]:
    """The model's own, for a launch that starts by all that is known although two requests of no length were found to fit."""
    own, field_name = max_length(case)
    if own:
        yield Choice("max-model-len", own, f"the model's own ({field_name}); whether two requests fit at once is open")


def _batch(case: Case) -> Iterator[Choice]:
    if "max-num-seqs" in case.args:
        return
    default, whose = case.defaults["max-num-seqs"], f"vLLM {case.version}'s own"
    tokens = size_of(case.args.get("max-num-batched-tokens", ""))
    if tokens and 0 < tokens <= default:
        # It takes the lesser itself where both are left to it (engine/arg_utils.py), and refuses what is written.
        default, whose = tokens, f"as many as --max-num-batched-tokens {tokens}, since each needs a token a step"
    found = _memory(case).estimate
    if found is None or found.kv_tokens <= 0:
        return
    most = max(1, found.kv_tokens // TOKENS_A_REQUEST)
    if most < default:
        value = max(1, most // 8 * 8 or most)
        reason = (
            f"the KV cache holds {found.kv_tokens} tokens; with {default} requests at once each would have less "
            f"than {TOKENS_A_REQUEST}, and they would preempt each other"
        )
        yield Choice("max-num-seqs", value, reason)
    else:
        yield Choice("max-num-seqs", default, f"{whose}; the KV cache holds {found.kv_tokens} tokens")


# --- What else is worth saying ---


def _would_fit(case: Case, given: Case) -> Iterator[Remark]:
    """For a model that is too heavy: fewer bits, or more GPUs, tried."""
    if "max-model-len" not in given.args:
        case = with_args(case, max_model_len=None)
    if case.weights_bytes is None or case.shape is None:
        return
    said: List[str] = []
    if not case.quantization and "quantization" not in case.args:
        fp8 = launch_quantization.runs(case, "fp8")
        for name, part in ((("fp8", 0.5),) if fp8 else ()) + (("4 bits", 0.28),):
            lighter = replace(case, weights_bytes=int(case.weights_bytes * part))
            length = _fitting_length(lighter)
            if length:
                gib = case.weights_bytes * part / 2**30
                said.append(f"a checkpoint in {name} ({gib:.0f} GiB) fits with --max-model-len {length}")
                break
    for gpus in (2, 4, 8, 16, 32):
        if gpus <= case.tensor * case.pipeline or gpus % case.tensor:
            continue
        wider = with_args(case, pipeline_parallel_size=gpus // case.tensor)
        if gpus <= 8 and launch_rules.fits_heads(case, gpus):
            wider = with_args(case, tensor_parallel_size=gpus, pipeline_parallel_size=1)
        if _fitting_length(wider):
            said.append(f"{gpus} such GPUs hold it")
            break
    if said:
        yield Remark("would_fit", "info", "; ".join(said), "")


def _fitting_length(case: Case) -> int:
    memory = _memory(case)
    found = memory.estimate
    if found is None or launch_memory.left_gib(found) <= launch_memory.shortage_gib(case, found):
        return 0
    room = found.kv_gib - launch_memory.shortage_gib(case, found)
    if found.request_gib <= room:
        return memory.length or 0
    return launch_memory.longest_length(case, memory, room)


def _other_ways(case: Case, given: Case, verdict: Verdict) -> Iterator[str]:
    """Replicas instead of one launch over everything, where that would do."""
    if case.nodes > 1:
        host = replace(given, gpus=given.gpus[: given.per_node], nodes=1, estimates={})
        alone = _chosen(host) if host.gpus else None
        if alone is not None and alone[2].outcome == "ok" and alone[0].world <= given.per_node:
            copies = case.nodes * _copies(alone[0])[0]
            yield f"one host suffices: hosts_per_replica 1 gives {copies} replicas"
        return
    apart = case.per_node // case.tensor
    if verdict.outcome == "error" or case.pipeline == 1 or _asked(given) != (True, False) or _others(case) > 1:
        return
    concurrency = _concurrency(case, case.tensor, 1)
    if concurrency is not None and concurrency >= COMFORT:
        yield f"without stages {apart} replicas of --tensor-parallel-size {case.tensor} fit: replicas_per_host {apart}"


def _notes(case: Case, given: Case) -> Sequence[str]:
    """Settings of NCCL and the network that go with the sizes."""
    notes = []
    if case.nodes > 1:
        notes.append(
            "VLLM_HOST_IP and NCCL_SOCKET_IFNAME==INTERFACE on each host, GLOO_SOCKET_IFNAME the same: several networks"
        )
        notes.append("NCCL takes ports of net.ipv4.ip_local_port_range: open it between the hosts")
    alone = _concurrency(case, 1, 1) if case.nodes == 1 and not any(_asked(given)) and _others(case) == 1 else None
    if case.tensor > 1 and case.pipeline == 1 and alone is not None and alone >= COMFORT:
        notes.append(
            f"for throughput rather than a short answer time: {case.per_node} replicas of --tensor-parallel-size 1 a host fit, too"
        )
    if case.tensor > 2 and links_of(case) in ("none", "pairs"):
        notes.append("vLLM's own all-reduce is off beyond a pair of PCIe GPUs; NCCL's is used")
    if case.tensor > 1 and links_of(case) == "none":
        notes.append("without peer access NCCL goes through /dev/shm: it has to be large enough")
    return notes
