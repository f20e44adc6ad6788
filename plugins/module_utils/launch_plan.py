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
    return _judged(case)[0]


def _judged(case: Case) -> Tuple[Verdict, Memory]:
    found = [remark for rule in launch_rules.RULES for remark in rule(case)]
    memory = memory_of(case)
    # A model that cannot be divided has no memory to speak of.
    if not any(remark.rule in ("heads_tp", "kv_heads_tp", "ffn_tp", "pipeline_layers") for remark in found):
        found.extend(launch_memory.memory_rule(case, memory))
    return _verdict(found, memory), memory


def _verdict(found: List[Remark], memory: Memory) -> Verdict:
    found = sorted(dict.fromkeys(found), key=lambda remark: SEVERITIES.index(remark.severity))
    worst = found[0].severity if found else "info"
    return Verdict({"error": "error", "warning": "warn"}.get(worst, "ok"), tuple(found), memory.as_dict())


# --- Choosing -------------------------------------------------------------------------------------------------------

COMFORT = 4  # requests of the full length that the KV cache should hold at once before more GPUs are left to replicas
LEAST_WEIGHTS_GIB = 1.5  # a GPU: with less to read for a token, the all-reduces cost more than the division saves
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
        return Plan("error", dict(launch.get("args") or {}), (), (), 1, 1, 1, (), verdict)
    given = case
    choices: List[Choice] = []
    for step in (_dtype, _sizes, _share, _length, _batch):
        for choice in step(case):
            choices.append(choice)
            case = with_args(case, **{choice.flag: choice.value})
    verdict = _judged(case)[0]
    if any(f.rule in ("weights_fit", "kv_fit", "headroom") and f.severity != "info" for f in verdict.findings):
        verdict = replace(verdict, findings=(*verdict.findings, *_would_fit(case, given)))
    size = case.tensor * case.pipeline * case.data
    copies = len(case.gpus) // size if size and verdict.outcome != "error" and case.data == 1 else 1
    return Plan(
        outcome=verdict.outcome,
        args=dict(case.args),
        choices=tuple(choices),
        kept=tuple(given.args),
        tensor=case.tensor,
        pipeline=case.pipeline,
        replicas=max(1, copies),
        notes=tuple(_notes(case)),
        verdict=replace(verdict, findings=_without_idle(verdict, copies * size == len(case.gpus))),
    )


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
    free = [gpu for gpu in case.gpus if gpu.free_gib is not None and gpu.free_gib < gpu.gib * share]
    if free:
        tight = min(free, key=lambda gpu: (gpu.free_gib or 0) / gpu.gib)
        share = max(0.05, math.floor(100 * (tight.free_gib or 0) / tight.gib) / 100 - 0.01)
        why = f"only {tight.free_gib:.2f} of {tight.gib:.2f} GiB are free on {tight.name}"
    else:
        found = memory_of(case).estimate
        gib = min(gpu.gib for gpu in case.gpus)
        if found is not None and found.outside_gib > gib * (1 - share):
            share = max(0.5, math.floor(100 * (1 - found.outside_gib / gib)) / 100)
            why = f"CUDA, NCCL and CUDA graphs take about {found.outside_gib:.2f} GiB outside of it"
    left = min(gpu.gib for gpu in case.gpus) * (1 - share)
    reason = f"{why}; it leaves {left:.2f} GiB a GPU as head room for CUDA and communication buffers"
    yield Choice("gpu-memory-utilization", round(share, 2), reason)


# --- Sizes ---


def links_of(case: Case) -> str:
    """all, pairs, none or unknown: how the GPUs of the first host are joined, by `links`, else by their model."""
    group = range(case.per_node)
    told = [str(case.links[f"{i}-{j}"]).upper() for i in group for j in group if i < j and f"{i}-{j}" in case.links]
    if told:
        fast = [link.startswith("NV") for link in told]
        return "all" if all(fast) else ("pairs" if any(fast) else "none")
    return next((gpu.nvlink for gpu in case.gpus if gpu.nvlink), "unknown")


def _sizes(case: Case) -> Iterator[Choice]:
    asked_t, asked_p = "tensor-parallel-size" in case.args, "pipeline-parallel-size" in case.args
    if asked_t and asked_p:
        return
    tensor, pipeline, why_t, why_p = _best(case)
    if not asked_t:
        yield Choice("tensor-parallel-size", tensor, why_t)
    if not asked_p:
        yield Choice("pipeline-parallel-size", pipeline, why_p)


def _best(case: Case) -> Tuple[int, int, str, str]:
    """The sizes, and why. Tensor parallelism stays inside a host, and inside what NVLink joins."""
    links = links_of(case)
    limit = {"none": 2, "pairs": 2}.get(links, case.per_node)
    if any(gpu.mig for gpu in case.gpus):
        return 1, 1, "MIG instances cannot be joined", "MIG instances cannot be joined"
    if "tensor-parallel-size" in case.args:
        tensors = [case.tensor]
    else:
        tensors = [t for t in launch_rules.divisors(case, min(limit, case.per_node)) if case.per_node % t == 0] or [1]
    hosts = [p for p in range(1, case.nodes + 1) if case.nodes % p == 0]
    stages = [case.pipeline] if "pipeline-parallel-size" in case.args else hosts
    largest = max(tensors)
    if links in ("none", "pairs") and "pipeline-parallel-size" not in case.args:
        inner = case.per_node // largest
        stages = sorted({p * q for p in hosts for q in range(1, inner + 1) if inner % q == 0})
    stages = [p for p in stages if not case.layers or p <= case.layers] or [1]
    order = [(t, p) for p in stages for t in sorted(tensors, reverse=links in ("all", "unknown"))]
    order.sort(key=lambda size: size[1])
    fitting = [(t, p, _concurrency(case, t, p)) for t, p in order]
    comfortable = [(t, p, c) for t, p, c in fitting if c is None or c >= COMFORT]
    usable = [(t, p, c) for t, p, c in fitting if c is None or c >= 1]
    some = comfortable or usable
    # Of what is comfortable, the fewest stages; of those, the widest that still has enough to read, or without NVLink the
    # narrowest. Where nothing is comfortable, all GPUs there are.
    if comfortable:
        fewest = min(p for _t, p, _c in some)
        same = [t for t, p, _c in some if p == fewest]
        wide = [t for t in same if _weights_gib(case, t, fewest) >= LEAST_WEIGHTS_GIB]
        tensor = (max(wide) if wide else min(same)) if links in ("all", "unknown") else min(same)
        pipeline = fewest
    elif usable:
        tensor, pipeline, _c = max(usable, key=lambda size: (size[2] or 0, -size[1]))
    else:
        tensor, pipeline = largest, max(stages)
    return (tensor, pipeline, *_reasons(case, tensor, pipeline, links=links, limit=limit))


def _concurrency(case: Case, tensor: int, pipeline: int) -> Optional[float]:
    """Requests of the longest length at once; None where memory cannot be told, 0 where the launch does not fit."""
    sized = with_args(case, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    found = memory_of(sized).estimate
    if found is None:
        return None
    if launch_memory.left_gib(found) < launch_memory.shortage_gib(sized, found) - launch_memory.DOUBT_GIB:
        return 0.0
    return found.max_concurrency if found.request_gib > 0 else float(COMFORT)


def _weights_gib(case: Case, tensor: int, pipeline: int) -> float:
    return (case.weights_bytes or 0) / 2**30 / (tensor * pipeline)


def _reasons(case: Case, tensor: int, pipeline: int, *, links: str, limit: int) -> Tuple[str, str]:
    each = (
        f"{_weights_gib(case, tensor, pipeline):.2f} GiB of weights a GPU" if case.weights_bytes else "weights unknown"
    )
    joined = {
        "all": "NVLink joins them",
        "pairs": "NVLink joins pairs only",
        "none": "there is no NVLink between them",
        "unknown": "how they are joined is not known",
    }[links]
    why = f"{tensor} of the {case.per_node} GPUs of a host, {each}; {joined}"
    widest = max(launch_rules.divisors(case, min(limit, case.per_node)) or [1])
    refused = next(iter(_why_not(case, case.per_node)), "") if tensor < min(limit, case.per_node) else ""
    if refused and tensor == widest:
        why += f"; not {case.per_node}: {refused}"
    elif tensor < widest and _weights_gib(case, 2 * tensor, pipeline) < LEAST_WEIGHTS_GIB and case.weights_bytes:
        why += (
            f"; with less than {LEAST_WEIGHTS_GIB} GiB a GPU to read, all-reduces cost more than dividing saves: further GPUs "
            "serve better as replicas"
        )
    elif tensor < min(limit, case.per_node):
        why += "; the model fits, and further GPUs serve better as replicas than divided further"
    elif limit < case.per_node and tensor == limit:
        why += "; beyond a pair, stages of a pipeline send less than tensor parallelism does"
    if pipeline == 1:
        stages = "one stage: the model fits into one host" if case.nodes > 1 else "one stage: one host"
    elif case.nodes > 1 and pipeline % case.nodes == 0:
        stages = (
            f"{pipeline} stages over {case.nodes} hosts: between hosts one hidden state a token instead of all-reduces"
        )
    else:
        stages = f"{pipeline} stages inside the host, {joined}"
    return why, stages


def _why_not(case: Case, tensor: int) -> Iterator[str]:
    sized = with_args(case, tensor_parallel_size=tensor)
    for remark in launch_rules.division_rule(sized):
        if remark.rule != "pipeline_layers":
            yield remark.message


# --- Length and requests ---


def _length(case: Case) -> Iterator[Choice]:
    """Never left to the model's own length: written down, and shorter where that would not fit twice."""
    asked = size_of(case.args["max-model-len"]) if "max-model-len" in case.args else None
    own, field_name = max_length(case)
    if asked is not None or not own:
        return
    memory = memory_of(case)
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


def _batch(case: Case) -> Iterator[Choice]:
    if "max-num-seqs" in case.args:
        return
    default = case.defaults["max-num-seqs"]
    found = memory_of(case).estimate
    if found is None or found.kv_tokens <= 0:
        return
    most = max(1, found.kv_tokens // TOKENS_A_REQUEST)
    if most < default:
        value = max(1, most // 8 * 8 or most)
        reason = (
            f"the KV cache holds {found.kv_tokens} tokens; with vLLM's own {default} requests at once each would have less "
            f"than {TOKENS_A_REQUEST}, and they would preempt each other"
        )
        yield Choice("max-num-seqs", value, reason)
    else:
        yield Choice("max-num-seqs", default, f"vLLM {case.version}'s own; the KV cache holds {found.kv_tokens} tokens")


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
    memory = memory_of(case)
    found = memory.estimate
    if found is None or launch_memory.left_gib(found) <= launch_memory.shortage_gib(case, found):
        return 0
    room = found.kv_gib - launch_memory.shortage_gib(case, found)
    if found.request_gib <= room:
        return memory.length or 0
    return launch_memory.longest_length(case, memory, room)


def _notes(case: Case) -> Sequence[str]:
    """Settings of NCCL and the network that go with the sizes."""
    notes = []
    if case.nodes > 1 and case.world > case.per_node:
        notes.append(
            "VLLM_HOST_IP and NCCL_SOCKET_IFNAME==INTERFACE on each host, GLOO_SOCKET_IFNAME the same: several networks"
        )
        notes.append("NCCL takes ports of net.ipv4.ip_local_port_range: open it between the hosts")
    alone = _concurrency(case, 1, 1)
    if case.tensor > 1 and case.pipeline == 1 and alone is not None and alone >= COMFORT:
        notes.append(
            f"for throughput rather than a short answer time: {case.per_node} replicas of --tensor-parallel-size 1 a host fit, too"
        )
    if case.tensor > 2 and links_of(case) in ("none", "pairs"):
        notes.append("vLLM's own all-reduce is off beyond a pair of PCIe GPUs; NCCL's is used")
    if case.tensor > 1 and links_of(case) == "none":
        notes.append("without peer access NCCL goes through /dev/shm: it has to be large enough")
    return notes
