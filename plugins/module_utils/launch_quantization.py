# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The dtype that vLLM takes, and the quantization that a release reads, by GPU: what it would refuse of a launch.

Methods, their dtypes and least compute capability come from data/quantization.yml, read from the sources of the releases.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

from typing import Any, Iterator, List, Mapping, Optional, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import model_weights
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.findings import did_you_mean
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.launch_case import Case, Remark, release

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
# Of these, what turns every layer's weights into one byte each, layer by layer while loading, so that the unquantized model
# never lies on the GPU: layers/quantization/fp8.py and online/fp8.py of 0.26.0 and 0.33.0 (uses_meta_device). How much the
# others take at most is not known here.
ONLINE_FP8 = ("fp8", "fp8_per_tensor")
ONLINE_FP8_FROM = (0, 26, 0)
QUANTIZED_SHARE = 0.8  # of two bytes a parameter: weights below it are not the unquantized ones
PLUGINS = {
    "bitsandbytes": "bitsandbytes left vLLM with 0.28 and is a plugin package now (vllm-bnb-plugin)",
    "gguf": "GGUF left vLLM with 0.24 and is a plugin package now",
}


def on_load(case: Case) -> str:
    """The method that quantizes while loading; empty where the checkpoint is loaded as it is."""
    asked = str(case.args.get("quantization") or "").lower()
    return asked if asked in ONLINE and case.quantization is None else ""


def narrowed(case: Case) -> Optional[float]:
    """What quantizing on load leaves of the bytes of every layer: 1 without it, or where the size that was told is already
    the one after it; None where that is not known."""
    method = on_load(case)
    if not method:
        return 1.0
    if case.shape is None or case.weights_bytes is None:
        return None
    if case.weights_bytes < QUANTIZED_SHARE * 2 * model_weights.parameters(case.shape):
        return 1.0
    two_bytes = checkpoint_dtype(case) in ("bfloat16", "float16")
    return 0.5 if method in ONLINE_FP8 and case.release >= ONLINE_FP8_FROM and two_bytes else None


def fp8_cache_runs(case: Case) -> bool:
    """Whether an fp8 KV cache is worth proposing: no attention backend of 0.26.0 takes one below capability 8.0."""
    return case.capability is None or case.capability >= (8, 0)


def cache_dtype_rule(case: Case) -> Iterator[Remark]:
    """flash_attn.py and flashinfer.py begin at 8.0, triton_attn.py refuses fp8 below 8.9; attention.py for fp8_e5m2. Read
    from 0.26.0 and 0.33.0; what older releases do is not known here."""
    asked = str(case.args.get("kv-cache-dtype", "auto")).lower()
    if case.release < (0, 26, 0) or not asked.startswith("fp8"):
        return
    if not fp8_cache_runs(case):
        old = min((gpu for gpu in case.used if gpu.capability), key=lambda gpu: gpu.capability or (0, 0))
        message = (
            f"--kv-cache-dtype {asked} on {old.name} with compute capability {'.'.join(map(str, case.capability or ()))}: "
            f"no attention backend of vLLM {case.version} takes an fp8 KV cache there"
        )
        yield Remark("kv_cache_dtype", "error", message, "Leave --kv-cache-dtype out")
    if asked == "fp8_e5m2" and case.quantization and case.quantization["method"] == "fp8":
        message = "--kv-cache-dtype fp8_e5m2 does not go with a checkpoint in fp8, and vLLM refuses it"
        yield Remark("kv_cache_dtype", "error", message, "--kv-cache-dtype fp8_e4m3")


def spans(case: Case, method: str) -> List[Mapping[str, Any]]:
    return list((case.known.quantization.get("methods") or {}).get(method) or ())


def span_of(case: Case, method: str) -> Optional[Mapping[str, Any]]:
    """What the release says of a method. Between two releases that were read, what either of them has is taken to be there;
    before the oldest, what that one has."""
    read = [release(v) for v in case.known.quantization.get("releases") or ()]
    below = max((v for v in read if v <= case.release), default=None)
    above = min((v for v in read if v > case.release), default=None)
    exact = below == case.release
    for at in (below,) if exact else (below, above):
        begun = [s for s in spans(case, method) if at is not None and release(s["from"]) <= at]
        if begun and not ("gone" in begun[-1] and release(begun[-1]["gone"]) <= (at or ())):
            return begun[-1]
    return None


def runs(case: Case, method: str) -> bool:
    """The release has the method, and it runs on these GPUs as far as their capability is known."""
    span = span_of(case, method)
    return bool(span) and (case.capability is None or case.capability >= _tuple((span or {}).get("capability")))


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
    if method in PLUGINS and first and release(first[0]["from"]) <= case.release:
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
        if method in ("awq", "gptq") and case.args.get("quantization") and runs(case, f"{method}_marlin"):
            fix += f", or leave --quantization out so that {method}_marlin is chosen, which takes bfloat16 as well"
        yield Remark("quant_dtype", "error", message, fix)
