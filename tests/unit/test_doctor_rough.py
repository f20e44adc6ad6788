"""What logs never are: the doctor takes any bytes and any JSON, and gives an answer; signatures that explain each other end."""

import json
import random

import conftest  # noqa: F401  makes the collection importable
import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import diagnosis, log_lines, signatures
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import doctor as doctors

ODD = [
    "{",
    "{}",
    '{"MESSAGE": {"a": 1}}',
    '{"MESSAGE": [1, 2, 999]}',
    '{"MESSAGE": [[67, 85], [68]]}',
    '{"MESSAGE": "CUDA out of memory", "__REALTIME_TIMESTAMP": "99999999999999999999"}',
    '{"MESSAGE": "CUDA out of memory", "__REALTIME_TIMESTAMP": "\u00b2\u00b3"}',
    '{"message": "CUDA out of memory", "fields": "x", "level": 7}',
    '{"fields": ["CUDA out of memory"]}',
    "[" * 5000 + "CUDA out of memory",
    '{"a":' * 5000 + "CUDA out of memory",
    "0000-00-00T00:00:00+0000 gpu-01 vllm[1]: CUDA out of memory",
    "2026-02-31T25:61:61+9999 gpu-01 vllm[1]: CUDA out of memory",
    "Feb 31 99:99:99 gpu-01 vllm[1]: CUDA out of memory",
    "[99999999999.123456] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
    "ERROR 99-99 99:99:99 [core.py:1] CUDA out of memory",
    "\x00\x1b[\x1b]0;title\x07CUDA out of memory\x1b",
    "Traceback (most recent call last):",
    "x" * 100000 + "CUDA out of memory" + "y" * 100000,
    "vllm: error: unrecognized arguments:",
    "vllm: error: unrecognized arguments: --",
]


@pytest.mark.parametrize("line", ODD, ids=range(len(ODD)))
def test_odd_lines(line):
    doctor = doctors.doctor()
    doctor.read("odd", [line, line, "RuntimeError: Engine core initialization failed. See root cause above."])
    json.dumps(doctor.answer())


def test_random_bytes():
    rng = random.Random(7)
    words = [
        "CUDA error: ",
        "NCCL WARN ",
        "Xid (",
        "Error",
        '{"MESSAGE": [',
        "\x1b[31m",
        "failed",
        "\r",
        "\t",
        "memory",
        "Traceback",
        ": ",
    ]
    lines = [
        "".join(rng.choice([*words, chr(rng.randint(1, 0x2FF))]) for _ in range(rng.randint(1, 30)))
        for _ in range(3000)
    ]
    doctor = doctors.doctor()
    doctor.read("noise", lines)
    json.dumps(doctor.answer())


def test_no_input_at_all():
    doctor = doctors.doctor()
    assert doctor.answer()["findings"] == []
    doctor.read("nothing", [])
    assert doctor.answer()["findings"] == []


def test_signatures_that_explain_each_other_in_a_circle():
    """One of them is named, and it comes to an end."""
    base = {"cause": "c", "fix": "f", "source": "s"}
    ring = {"a": "b", "b": "c", "c": "a"}
    family = [{**base, "id": name, "patterns": [f"failure {name}"], "over": [other]} for name, other in ring.items()]
    doctor = diagnosis.Doctor(signatures.compile_book({"family": family}))
    doctor.read("ring", ["failure a", "failure b", "failure c"])
    assert len(doctor.answer()["findings"]) == 1


@pytest.mark.parametrize(
    ("line", "said", "level", "host"),
    [
        (
            "2026-11-29T10:00:00+0000 gpu-01 vllm[7]: (Worker_TP0 pid=9) ERROR 11-29 10:00:00 [core.py:1] words",
            "words",
            "error",
            "gpu-01",
        ),
        ("Nov 29 10:00:00 gpu-01 kernel: INFO: task x blocked", "task x blocked", "", "gpu-01"),
        ("[rank1]:[E1012 04:54:12.329145 ProcessGroupNCCL.cpp:1595] words", "words", "error", ""),
        ("(EngineCore_0 pid=6) (VllmWorker TP0 pid=7) INFO 08-25 11:01:23 [x.py:1] words", "words", "info", ""),
        ("2026-11-29T10:00:00.5Z stderr F WARNING 11-29 10:00:00 [core.py:1] words", "words", "warning", ""),
        ("n1:1:2 [0] misc/socket.cc:5 NCCL WARN words", "n1:1:2 [0] misc/socket.cc:5 NCCL WARN words", "error", ""),
        ("INFO:     10.0.0.1:5 - words", "10.0.0.1:5 - words", "info", ""),
    ],
)
def test_what_stands_before_a_message(line, said, level, host):
    (told,) = log_lines.parse(line, (0, 0))
    assert (told.said, told.level, told.host) == (said, level, host)


def test_times_are_utc_whatever_the_zone():
    (east,) = log_lines.parse("2026-11-29T12:00:00+02:00 gpu-01 vllm[7]: words", (0, 0))
    (utc,) = log_lines.parse("2026-11-29T10:00:00+0000 gpu-01 vllm[7]: words", (0, 0))
    assert east.time == utc.time
