"""Each recorded case in other clothes - another shape of log, other hosts, dates, pids, colours, noise around - gives the same answer."""

import json
import random
import re
from pathlib import Path

import conftest  # noqa: F401  makes the collection importable
import noise
import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import log_lines
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import doctor as doctors

LOGS = Path(__file__).parent / "fixtures" / "logs"
CASES = [json.loads(line) for line in (LOGS / "expected.jsonl").read_text().splitlines()]
ISO = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\+00:?00) (\S+) ([^\[:\s]+)(?:\[\d+\])?: (.*)$")
UNIT = "vllm@chat.service"
Entry = tuple[float, str, str, str]  # seconds, host, program, message


def entries(case: dict) -> list[Entry]:
    """A case as journal entries, whatever shape it is kept in; plain ones get a stamp a second."""
    out: list[Entry] = []
    start = 1795000000.0
    for number, raw in enumerate((LOGS / case["file"]).read_text(errors="replace").splitlines()):
        if case["shape"] == "json":
            told = json.loads(raw)
            message = told["MESSAGE"]
            text = bytes(message).decode() if isinstance(message, list) else message
            out.append((int(told["__REALTIME_TIMESTAMP"]) / 1e6, told["_HOSTNAME"], told["SYSLOG_IDENTIFIER"], text))
        elif case["shape"] == "iso":
            found = ISO.match(raw)
            assert found, raw
            time = log_lines.seconds(*(int(part) for part in re.split(r"[-T:]", found.group(1))))
            text = None if found.group(4).endswith("blob data]") else found.group(4)
            out.append((time, found.group(2), found.group(3), text))
        else:
            out.append((start + number, "gpu-01", "kernel" if raw.startswith("NVRM") else "vllm", raw))
    return out


def clock(time: float, form: str) -> str:
    import datetime

    return datetime.datetime.fromtimestamp(time, datetime.UTC).strftime(form)


def plain(told: list[Entry]) -> list[str]:
    """Standard error alone knows no kernel and no systemd: these keep the program in front, as a mixed file has it."""
    return [(f"{p}: {m}" if p in ("kernel", "systemd") else m) for _, _, p, m in told if m is not None]


def iso(told: list[Entry], zone: str = "+0000") -> list[str]:
    return [
        f"{clock(t, '%Y-%m-%dT%H:%M:%S')}{zone} {h} {p}[77]: {m if m is not None else '[4.1K blob data]'}"
        for t, h, p, m in told
    ]


def short(told: list[Entry]) -> list[str]:
    return [
        f"{clock(t, '%b %d %H:%M:%S')} {h} {p}[77]: {m if m is not None else '[4.1K blob data]'}" for t, h, p, m in told
    ]


def as_json(told: list[Entry], array: bool = False) -> list[str]:
    out = []
    for time, host, program, message in told:
        about = re.match(r"(\S+\.service): ", message or "")
        fields: dict = {
            "__REALTIME_TIMESTAMP": str(int(time * 1e6)),
            "_HOSTNAME": host,
            "_TRANSPORT": "kernel" if program == "kernel" else "stdout",
            "PRIORITY": "6",
            "SYSLOG_IDENTIFIER": program,
            "MESSAGE": list(message.encode()) if array and message is not None else message,
        }
        if program == "systemd":
            fields |= {"_SYSTEMD_UNIT": "init.scope", "UNIT": about.group(1) if about else UNIT}
        elif program != "kernel":
            fields["_SYSTEMD_UNIT"] = UNIT
        out.append(json.dumps(fields))
    return out


def coloured(told: list[Entry]) -> list[str]:
    """vLLM's colours around the process tag and the level."""
    out = []
    for line in plain(told):
        tagged = re.sub(r"^(\([^)]*\)) ", "\x1b[1;36m\\1\x1b[0;0m ", line)
        out.append(re.sub(r"\b(ERROR|WARNING|INFO) (\d\d-\d\d)", "\x1b[31m\\1\x1b[0m \\2", tagged))
    return out


def container(told: list[Entry]) -> list[str]:
    """As the CRI keeps it."""
    return [
        f"{clock(t, '%Y-%m-%dT%H:%M:%S')}.123456789Z stderr F {line}"
        for (t, *_), line in zip(_shown(told), plain(told), strict=True)
    ]


def docker_json(told: list[Entry]) -> list[str]:
    return [
        json.dumps({"log": f"{line}\n", "stream": "stderr", "time": clock(t, "%Y-%m-%dT%H:%M:%S.123456789Z")})
        for (t, *_), line in zip(_shown(told), plain(told), strict=True)
    ]


def compose(told: list[Entry]) -> list[str]:
    return [f"vllm-chat-1  | {line}" for line in plain(told)]


def _shown(told: list[Entry]) -> list[Entry]:
    return [entry for entry in told if entry[3] is not None]


def elsewhere(told: list[Entry]) -> list[Entry]:
    """Another host, another year, other pids and ports of the day."""
    rng = random.Random(5)
    pids: dict[str, str] = {}

    def other(found: re.Match) -> str:
        return f"pid={pids.setdefault(found.group(1), str(rng.randint(20000, 90000)))}"

    out = []
    for time, host, program, message in told:
        text = message
        if text is not None:
            text = re.sub(r"pid=(\d+)", other, text).replace("gpu-01", "n17.rack4")
            text = re.sub(r"\b(INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:", r"\1 03-14 02:", text)
        out.append((time - 9 * 30 * 86400, host.replace("gpu-01", "n17.rack4"), program, text))
    return out


def peer(told: list[Entry]) -> list[Entry]:
    """The same journal with a second, healthy host in between."""
    other = noise.plain(len(told), seed=3)
    out = []
    for (time, *rest), line in zip(told, other, strict=True):
        out += [(time - 0.3, "gpu-09", "vllm", line), (time, *rest)]
    return out


LOUD = 300


def surrounded(told: list[Entry], count: int = LOUD) -> list[Entry]:
    first = [
        (told[0][0] - 86400 + n, "gpu-01", "sshd", "Failed password for root from 203.0.113.9 port 22 ssh2")
        for n in range(count)
    ]
    last = [(told[-1][0] + 1 + n, "gpu-01", "cron", "(root) CMD (run-parts /etc/cron.hourly)") for n in range(count)]
    return [*first, *told, *last]


SHAPES = {
    "plain": plain,
    "crlf": lambda told: [f"{line}\r" for line in plain(told)],
    "iso": iso,
    "iso with a colon": lambda told: iso(told, "+00:00"),
    "short": short,
    "json": as_json,
    "json of bytes": lambda told: as_json(told, array=True),
    "colours": coloured,
    "container": container,
    "docker": docker_json,
    "compose": compose,
    "elsewhere": lambda told: iso(elsewhere(told)),
    "elsewhere, json": lambda told: as_json(elsewhere(told)),
    "beside a healthy rank": lambda told: iso(peer(told)),
    "beside a healthy rank, json": lambda told: as_json(peer(told)),
    "a day around it": lambda told: as_json(surrounded(told)),
}


def judged(lines: list[str]) -> dict:
    doctor = doctors.doctor()
    doctor.read("shaped", lines)
    return doctor.answer()


def right(told: dict, case: dict) -> bool:
    wanted = {case["cause_id"], *case["acceptable"]}
    first = told["findings"][0]["cause_id"] if told["findings"] else "none"
    return first in wanted


@pytest.mark.parametrize("shape", SHAPES)
def test_same_answer(shape):
    wrong = []
    for case in CASES:
        told = judged(SHAPES[shape](entries(case)))
        if not right(told, case):
            wrong.append((case["file"], case["cause_id"], [finding["cause_id"] for finding in told["findings"]]))
    assert not wrong


@pytest.mark.parametrize("case", CASES[3::12], ids=[case["file"] for case in CASES[3::12]])
def test_ten_thousand_lines_around(case):
    told = [
        *noise.journal(10000, "json"),
        *as_json(entries(case)),
        *noise.journal(10000, "json", host="gpu-08", seed=4),
    ]
    assert right(judged(told), case)


def test_cut_off_after_the_deciding_line():
    """A log that ends right after the line that says it: the same answer, except where what follows is what decides."""
    wrong = []
    for case in CASES:
        # There the last line, a clean exit, decides; here the key stands above the line that fails.
        if case["cause_id"] == "none" or case["file"] in ("127.log", "13.log", "15.log"):
            continue
        told = [entry for entry in entries(case) if entry[3] is not None]
        last = max(number for number, entry in enumerate(told) if case["key"] in entry[3])
        if not right(judged(iso(told[: last + 1])), case):
            wrong.append((case["file"], case["cause_id"]))
    assert not wrong


def test_two_files_of_two_hosts():
    """The first cause over all ranks: the host whose file is given second failed first."""
    first = [(1795000000.0 + n, "gpu-02", "vllm", m) for n, (_, _, _, m) in enumerate(entries(CASES[4]))]
    peer_lost = [
        (
            1795000060.0,
            "gpu-01",
            "vllm",
            "(Worker pid=1) ERROR 11-18 10:00:00 [multiproc_executor.py:901] RuntimeError: NCCL error: remote process exited or there was a network error",
        )
    ]
    doctor = doctors.doctor()
    doctor.read("gpu-01", iso(peer_lost))
    doctor.read("gpu-02", as_json(first))
    told = doctor.answer()["findings"]
    assert [(finding["cause_id"], finding["host"]) for finding in told] == [
        ("gpu_memory_taken_by_other_process", "gpu-02")
    ]


def test_evidence_is_what_an_exception_says_and_not_the_code_that_raised_it():
    log = """Traceback (most recent call last):
  File "/x/default_loader.py", line 9, in load_weights
    raise ValueError(f"Following weights were not initialized from checkpoint: {left}")
ValueError: Following weights were not initialized from checkpoint: {'lm_head.weight'}"""
    doctor = doctors.doctor()
    doctor.read("log", log.split("\n"))
    (found,) = doctor.answer()["findings"]
    assert found["cause_id"] == "model_weights_incomplete" and found["line"] == 4
    assert found["evidence"] == "ValueError: Following weights were not initialized from checkpoint: {'lm_head.weight'}"


def everything(monkeypatch):
    """A doctor that passes over no line: each one is parsed."""
    monkeypatch.setattr(doctors.diagnosis.log_lines, "message", lambda raw: raw)
    monkeypatch.setattr(doctors.diagnosis.log_lines, "informs", lambda said: False)
    monkeypatch.setattr(doctors.diagnosis.Doctor, "_shape", lambda self, said: "x" * 3000)


@pytest.mark.parametrize("shape", ["json", "iso"])
def test_what_is_passed_over_for_speed_changes_no_answer(shape, monkeypatch):
    quick = [judged(SHAPES[shape](entries(case))) for case in CASES]
    everything(monkeypatch)
    assert quick == [judged(SHAPES[shape](entries(case))) for case in CASES]


@pytest.mark.parametrize(
    "message",
    [
        "INFO 11-29 10:00:00 [core.py:1] loading\nOSError: [Errno 28] No space left on device",
        "INFO 11-29 10:00:00 [core.py:1] loading\rOSError: [Errno 28] No space left on device",
        "\x1b[36m(EngineCore pid=7)\x1b[0m ERROR 11-29 10:00:00 [core.py:1] after INFO 11-29 10:00:00 came No space left on device",
    ],
    ids=["a line below", "a progress bar", "an error that quotes one"],
)
def test_an_error_beside_what_only_informs_is_read(message):
    entry = json.dumps({"MESSAGE": message, "_HOSTNAME": "gpu-01", "SYSLOG_IDENTIFIER": "vllm"})
    for lines in (message.split("\n"), [entry]):
        assert [finding["cause_id"] for finding in judged(lines)["findings"]] == ["disk_full"]
