"""Lines of a healthy day, as vLLM, uvicorn, the kernel and other services of a host write them: for tests of size and speed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

PLAIN = (
    "(APIServer pid={pid}) INFO {month:02d}-{day:02d} {clock} [loggers.py:310] Engine 000: Avg prompt throughput: {n}.1 tokens/s, Avg "
    "generation throughput: {n}.5 tokens/s, Running: {k} reqs, Waiting: 0 reqs, GPU KV cache usage: {k}.3%, Prefix cache hit rate: 12.0%",
    '(APIServer pid={pid}) INFO:     10.0.0.{k}:{n} - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    '(APIServer pid={pid}) INFO:     10.0.0.{k}:{n} - "GET /health HTTP/1.1" 200 OK',
    '(APIServer pid={pid}) INFO:     10.0.0.{k}:{n} - "GET /metrics HTTP/1.1" 200 OK',
    "(APIServer pid={pid}) INFO {month:02d}-{day:02d} {clock} [logger.py:43] Received request chatcmpl-{name}: prompt: 'why does it say "
    "CUDA out of memory, Connection refused and No space left on device?', params: SamplingParams(n=1), lora_request: None.",
    "(Worker_TP0 pid={pid}) WARNING {month:02d}-{day:02d} {clock} [fused_moe.py:1091] Using default MoE config. Performance might be "
    "sub-optimal! Config file not found at /opt/vllm/configs/E=128,N=704.json",
    '(APIServer pid={pid}) INFO:     10.0.0.{k}:{n} - "POST /v1/completions HTTP/1.1" 200 OK',
)
OTHERS = (
    ("sshd", "Received disconnect from 10.0.0.{k} port {n}:11: disconnected by user"),
    ("sshd", "Failed password for invalid user admin from 203.0.113.{k} port {n} ssh2"),
    ("CRON", "(root) CMD (command -v debian-sa1 > /dev/null && debian-sa1 1 1)"),
    ("kernel", 'audit: type=1400 audit(17.{n}:{k}): apparmor="STATUS" operation="profile_load" name="cups" pid={n}'),
    (
        "haproxy",
        '10.0.0.{k}:{n} [29/Nov/2026:10:00:00.000] fleet~ chat/gpu-01 0/0/1/840/841 200 1532 - - ---- 4/4/0/0/0 0/0 "POST /v1/chat/completions HTTP/1.1"',
    ),
)


def _values(number: int, rng: random.Random) -> dict:
    clock = f"{number // 3600 % 24:02d}:{number // 60 % 60:02d}:{number % 60:02d}"
    return {
        "pid": 9111,
        "month": 11,
        "day": 29,
        "clock": clock,
        "n": rng.randint(1000, 60000),
        "k": rng.randint(1, 90),
        "name": f"{rng.getrandbits(128):032x}",
    }


def plain(count: int, seed: int = 1) -> list[str]:
    """Standard error of a healthy server."""
    rng = random.Random(seed)
    return [PLAIN[number % len(PLAIN)].format(**_values(number, rng)) for number in range(count)]


def _fields(number: int, rng: random.Random) -> dict:
    """What else journald says of a line (systemd.journal-fields(7)): much, and a cursor that no other line has."""
    boot, machine, stream = "b0" * 16, "ac" * 16, "5e" * 16
    return {
        "__CURSOR": f"s={machine};i={number:x};b={boot};m={number:09x};t={number:013x};x={rng.getrandbits(64):016x}",
        "__MONOTONIC_TIMESTAMP": str(1000000 + number),
        **{"_BOOT_ID": boot, "_MACHINE_ID": machine, "_STREAM_ID": stream, "_UID": "997", "_GID": "997"},
        **{"_COMM": "vllm", "_EXE": "/opt/vllm/releases/0.32.0-cu130-1f2e3d4c/bin/python3.12", "SYSLOG_FACILITY": "3"},
        "_CMDLINE": "/opt/vllm/releases/0.32.0-cu130-1f2e3d4c/bin/python3 "
        "/opt/vllm/releases/0.32.0-cu130-1f2e3d4c/bin/vllm serve --config /etc/vllm/chat.0/current/config.yaml",
        **{"_CAP_EFFECTIVE": "0", "_SELINUX_CONTEXT": "unconfined\n", "_SYSTEMD_SLICE": "system-vllm.slice"},
        "_SYSTEMD_CGROUP": "/system.slice/system-vllm.slice/vllm@chat.service",
        **{"_SYSTEMD_INVOCATION_ID": "1d" * 16, "_RUNTIME_SCOPE": "system"},
    }


def journal(count: int, shape: str, host: str = "gpu-07", seed: int = 1) -> Iterator[str]:
    """A journal in which other services write, too; one message in 50 has colours, one in 200 is left out.

    shape is `iso`, `json`, or `full`: JSON with all the fields that journald has.
    """
    rng = random.Random(seed)
    for number in range(count):
        values = _values(number, rng)
        if number % 4:
            program, message = "vllm", PLAIN[number % len(PLAIN)].format(**values)
        else:
            program, message = (
                OTHERS[number // 4 % len(OTHERS)][0],
                OTHERS[number // 4 % len(OTHERS)][1].format(**values),
            )
        if shape == "iso":
            yield f"2026-11-29T{values['clock']}+0000 {host} {program}[{values['pid']}]: {message}"
            continue
        told: object = message
        if number % 50 == 1:
            told = list(f"\x1b[1;36m{message}\x1b[0;0m".encode())
        elif number % 200 == 2:
            told = None
        yield json.dumps(
            {
                "__REALTIME_TIMESTAMP": str(1795946400000000 + number * 1000000),
                "_HOSTNAME": host,
                "_TRANSPORT": "kernel" if program == "kernel" else "stdout",
                "PRIORITY": "6",
                "SYSLOG_IDENTIFIER": program,
                **({} if program == "kernel" else {"_SYSTEMD_UNIT": "vllm@chat.service"}),
                "_PID": "3111",
                "MESSAGE": told,
                **(_fields(number, rng) if shape == "full" else {}),
            }
        )
