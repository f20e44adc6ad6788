"""Whole logs of vLLM 0.26.0 on real H200s: healthy ones give nothing, failed ones the cause that was brought about on purpose."""

from pathlib import Path

import conftest
import pytest
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import doctor as doctors

VALIDATION = conftest.REPOSITORY / "docs" / "validation"
KEPT = Path(__file__).parent / "fixtures" / "logs_h200"
HEALTHY = [
    *sorted((VALIDATION / "2026-11-30-know-and-plan-h200").glob("*.log")),
    KEPT / "two-gpus-healthy.log",
    KEPT / "server-killed.log",
]
FIRST = VALIDATION / "2026-11-29-vllm-0.26.0-cu130-h200"
HEALTHY += [
    FIRST / f"{name}.log" for name in ("default.server-1", "one-gpu.server-1", "one-gpu.server-2", "two-gpus.server-1")
]
HEALTHY += [FIRST / "release-nvcc-13.0-links.server-1.log"]
FAILED = {
    FIRST / "default-sampler.server-1.log": ("compiler_or_headers_missing", "No such file or directory: 'ninja'"),
    FIRST / "release-nvcc.server-1.log": ("compiler_or_headers_missing", "ninja"),
    FIRST / "release-nvcc-13.0.server-1.log": ("compiler_or_headers_missing", "ninja"),
    # The engine was killed with SIGKILL; the server then ended with status 0. That it was killed is in no line.
    KEPT / "engine-killed.log": ("engine_dead_clean_exit", "engine core exited unexpectedly"),
    # A server was killed, its engine lived on and held the GPU.
    KEPT / "orphan-holds-memory.log": ("gpu_memory_taken_by_other_process", "(10.94/139.8 GiB)"),
    KEPT / "orphan-holds-memory-of-a-rank.log": ("gpu_memory_taken_by_other_process", "is less than desired"),
    KEPT / "port-taken.log": ("port_in_use", "Address already in use"),
    KEPT / "interface-wrong.log": ("nccl_bootstrap_failed", "NCCL error: invalid usage"),
    # The journals of units that a role had made (docs/validation/2026-11-30-service-h200.md), up to the end of the server.
    KEPT / "unit-engine-killed.log": ("engine_dead_clean_exit", "engine core exited unexpectedly"),
    KEPT / "unit-cache-halved.log": ("compile_cache_corrupt", "Compiling model again due to a load failure"),
    KEPT / "unit-killed-while-compiling.log": ("killed_on_request", "on client request"),
    # On Ray (docs/validation/2026-11-30-ratio-ray-speculation-h200.md): its worker killed, and servers that had another token or none.
    KEPT / "unit-ray-worker-killed.log": ("ray_actor_died", "Worker exit type: SYSTEM_ERROR"),
    KEPT / "ray-token-wrong.log": ("ray_token_refused", "InvalidAuthToken"),
    KEPT / "ray-token-missing.log": ("ray_token_refused", "InvalidAuthToken"),
}


def read(path):
    doctor = doctors.doctor()
    with open(path, encoding="utf-8", newline="\n") as handle:
        doctor.read(path.name, handle)
    return doctor.answer()


def test_they_are_there():
    assert len(HEALTHY) == 16 + 2 + 5
    assert all(path.exists() for path in [*HEALTHY, *FAILED])


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_healthy(path):
    assert read(path)["findings"] == []


@pytest.mark.parametrize("path", FAILED, ids=lambda path: path.stem)
def test_failed(path):
    first = read(path)["findings"][0]
    cause, key = FAILED[path]
    assert first["cause_id"] == cause
    assert key in first["evidence"]


def test_a_killed_engine_asks_for_the_kernels_lines():
    """These lines cannot tell who killed it; the kernel's would."""
    told = read(KEPT / "engine-killed.log")
    assert told["findings"][0]["confidence"] == "low"
    assert any("journalctl -k" in entry["command"] for entry in told["unknown"])


@pytest.mark.parametrize(
    "name",
    ["unit-engine-killed", "unit-cache-halved", "unit-killed-while-compiling", "unit-ray-worker-killed"],
)
def test_what_healed_is_the_same_answer_marked_as_over(name):
    """The same journals, and after them the server that the agent's restart brought back."""
    path = KEPT / f"{name}.log"
    lines = path.read_text(encoding="utf-8").splitlines()
    head = next(line for line in reversed(lines) if " vllm[" in line).partition("(APIServer pid=")[0]
    doctor = doctors.doctor()
    back = [
        f"{head}(EngineCore pid=10) INFO 11-30 11:40:00 [core.py:116] Initializing a V1 LLM engine (v0.26.0) with config: a",
        f"{head}(APIServer pid=9) INFO:     Application startup complete.",
        f'{head}(APIServer pid=9) INFO:     127.0.0.1:40000 - "POST /v1/completions HTTP/1.1" 200 OK',
    ]
    doctor.read(path.name, [*lines, *back])
    told = doctor.answer()["findings"]
    assert [(found["cause_id"], found["recovered"]) for found in told] == [(FAILED[path][0], True)]
