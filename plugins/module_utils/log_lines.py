"""Lines of logs, whatever wrote them down: what was said, when, where and by whom. Pure: text in, lines out.

Read are plain standard error, `journalctl -o short`, `short-iso`, `short-full`, `with-unit` and `json` (journalctl(1)), dmesg(1), and
what container runtimes put before a line (a stamp, the CRI's stream and flag, compose's service name, Docker's json-file).
journald exports a MESSAGE with unprintable characters as an array of byte values and one of 4 KiB or more as null
(systemd, docs/JOURNAL_EXPORT_FORMATS.md); the other formats show `[85B blob data]` instead.

Reading is lazy: a day of journal has few lines that matter, so a line is parsed only when somebody asks for it.
"""

from __future__ import annotations

import calendar
import json
import re
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

# ANSI colours and cursor movements (ECMA-48), and terminal titles.
COLOUR = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
# A journal that is cut short may leave half an escape sequence, journald shows ESC as #033 in syslog files.
SHOWN_ESCAPE = re.compile(r"(?:#033|\\x1b|\\u001b|\^\[)\[[0-9;?]*[A-Za-z]")

ISO = r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d+))?\s?(Z|UTC|[+-]\d\d:?\d\d)?"
# journalctl -o short-iso, short-iso-precise, short-full: the stamp, the host, the program with its process.
JOURNAL = re.compile(r"(?:[A-Z][a-z]{2} )?" + ISO + r" ([A-Za-z0-9][\w.-]*) ([^\s:\[]{1,80})(?:\[\d+\])?: ?")
# The same as -o short, and as syslog files have it.
SYSLOG = re.compile(
    r"([A-Z][a-z]{2}) {1,2}(\d{1,2}) (\d\d):(\d\d):(\d\d)(?:\.\d+)? ([A-Za-z0-9][\w.-]*) ([^\s:\[]{1,80})(?:\[\d+\])?: ?"
)
MONTHS = {name: number for number, name in enumerate(calendar.month_abbr) if name}
# A container runtime's stamp, with the stream and the flag that the CRI adds.
STAMP = re.compile(ISO + r"(?: (?:stdout|stderr) [FP])?[ \t]+(?:\| )?")
# Google's log viewer as text: its own severity, a stamp, the container.
CLOUD = re.compile(r"(?:DEFAULT|DEBUG|INFO|NOTICE|WARNING|ERROR|CRITICAL) (?=\d{4}-\d\d-\d\dT[\d:.]+Z )")
CLOUD_LABEL = re.compile(r"\[resource\.labels\.[^\]]*\] ")
COMPOSE = re.compile(r"[\w.-]{2,60} +\| ")
POD = re.compile(r"\[pod/[^\]]+\] ")
DMESG = re.compile(r"(?:kern  ?:\w+ *: )?\[ *(\d+\.\d{3,6})\](?:\[ *[TC]\d+\])? ")
DMESG_T = re.compile(r"(?:kern  ?:\w+ *: )?\[[A-Z][a-z]{2} ([A-Z][a-z]{2}) +(\d{1,2}) (\d\d):(\d\d):(\d\d) (\d{4})\] ")
# What programs put before a message: vLLM's and Ray's process tag, torch's rank, MPI's; levels of several kinds.
TAG = re.compile(
    r"\(([A-Za-z_][\w.-]*(?: rank=\d+)?(?: [A-Z]{2}\w*)*)(?:,? pid=(\d+))?(?:, ip=([\d.]+))?\) |\[(rank\d+)\]:|\[1,\d+\]<std\w+>: ?"
)
RAYLET = re.compile(r"\(raylet(?:, ip=([\d.]+))?\) ")
VLLM = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) (\d\d)-(\d\d) (\d\d):(\d\d):(\d\d) (?:\[[^\]]*\] ?|\S+\] ?)")
LEVELLED = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d ")
GLOG = re.compile(
    r"\[?([IWEF])(\d\d)(\d\d) (\d\d):(\d\d):(\d\d)(?:\.\d+)?(?: +\d+)* +([\w./-]+:\d+)\] |\[([IWEF]) (\w+\.cpp:\d+)\] "
)
RAY = re.compile(r"\[(\d{4})-(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)[.,]\d+ ([IWEFCD]) \d+ \d+\] ")
LEVEL = re.compile(
    r"(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL|TRACE)(?::? +|:[\w.]+:|\t)|\[(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\] "
)
NCCL = re.compile(
    r"[\w.-]+:\d+:\d+ \[-?\d+\] (?:[\w./]+:\d+ )?NCCL (INFO|WARN|TRACE)|\[?\S* ?\S*\]? ?[\w.-]+:\d+:\d+ \[-?\d+\] (?:[\w./]+:\d+ )?NCCL (INFO|WARN|TRACE)"
)
SGLANG = re.compile(r"\[(\d{4})-(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)[^\]]{0,30}\] ")
HOSTNAME, UNIT = re.compile(r'"_HOSTNAME"\s*:\s*"([^"]*)"'), re.compile(r'"_SYSTEMD_UNIT"\s*:\s*"([^"]*)"')
OWNER = re.compile(
    r"\d{4}-\d\d-\d\dT[\d:.,+Z-]+ ([A-Za-z0-9][\w.-]*) [^\s:\[]{1,80}(?:\[\d+\])?: |[A-Z][a-z]{2} +\d+ [\d:.]+ (\S+) "
)
MICROSECONDS, BREAKS = re.compile("[0-9]{10,16}"), re.compile(r"[\r\n]+")
MESSAGE = re.compile(r'"MESSAGE"\s*:\s*')
TEXT = re.compile(r'"MESSAGE"\s*:\s*"([^"\\]*(?:\\.[^"\\]*)*)"')

LONGEST, TAIL = 4000, 1000  # letters of a message that are looked at, and how many of these at its end

LEVELS = {
    "DEBUG": "info",
    "TRACE": "info",
    "INFO": "info",
    "I": "info",
    "D": "info",
    "WARNING": "warning",
    "WARN": "warning",
    "W": "warning",
    "ERROR": "error",
    "E": "error",
    "C": "error",
    "CRITICAL": "error",
    "FATAL": "error",
    "F": "error",
}


class Line(NamedTuple):
    """One line.

    text    without colours, runtime stamps and host; with the program's own level and time, as a person would quote it
    said    the message alone, without those
    level   error, warning, info or '' (a traceback, the kernel, a program without levels)
    time    seconds since 1970 in UTC, None when the line does not say; stamps without a year count from 1970
    place   file of the input and number of the line in it, both from 0
    process whose line it is, by the tag before the message: `Worker_TP0 pid=7`, `rank3`; '' without one
    """

    text: str
    said: str
    level: str
    time: Optional[float]
    place: Tuple[int, int]
    host: str
    unit: str
    program: str
    process: str
    kernel: bool


def seconds(*clock: int, zone: str = "") -> Optional[float]:
    """Seconds since 1970 of year, month, day, hour, minute and second; None for a date that does not exist."""
    year, month, day, hour, minute, second = clock
    if not (1 <= year <= 9999 and 1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60):
        return None
    offset = 0
    if zone and zone[0] in "+-":
        digits = zone[1:].replace(":", "")
        offset = (int(digits[:2]) * 3600 + int(digits[2:4] or 0) * 60) * (1 if zone[0] == "+" else -1)
    return calendar.timegm((year, month, day, hour, minute, second)) - offset


def clean(text: str) -> str:
    """Without colours and what else a terminal would not print."""
    if "\x1b" in text:
        text = COLOUR.sub("", text)
    if "[" in text and ("#033" in text or "\\x1b" in text or "\\u001b" in text or "^[" in text):
        text = SHOWN_ESCAPE.sub("", text)
    return text.replace("\x00", "").replace("\ufeff", "")


def unread(raw: str) -> bool:
    """Whether the journal left this line's message out: null in JSON, blob data elsewhere."""
    if raw.endswith(("blob data]", "blob data]\r")):
        return True
    if raw.startswith("{"):
        found = MESSAGE.search(raw)
        return found is not None and raw.startswith("null", found.end())
    return False


def opaque(raw: str) -> bool:
    """Whether a search in the raw line may miss words of its message: bytes in an array, or escaped letters."""
    if not raw.startswith("{"):
        return False
    found = MESSAGE.search(raw)
    return found is not None and raw.startswith("[", found.end())


def message(raw: str) -> str:
    """What a line of the journal's JSON says, without parsing it: escaped as it is, the kernel's with a mark.

    The whole line where more of it matters: systemd speaks of units, and a message may be no text.
    """
    found = TEXT.search(raw) if '"systemd"' not in raw else None
    if not found:
        return raw
    return f"kernel: {found.group(1)}" if '"kernel"' in raw else found.group(1)


def informs(said: str) -> bool:
    """Whether a line is, as a whole, one that vLLM logs with the level info or debug. Its first level counts, as in parse."""
    found = LEVELLED.search(said)
    return (
        found is not None
        and found.group(1) in ("INFO", "DEBUG")
        and not ("\\n" in said or "\\r" in said or "\r" in said)
    )


def owner(raw: str) -> Tuple[str, str]:
    """Host and unit of a raw line, without parsing it; '' for what it does not say."""
    if raw.startswith("{"):
        host, unit = HOSTNAME.search(raw), UNIT.search(raw)
        return (host.group(1) if host else "", unit.group(1) if unit else "")
    found = OWNER.match(raw)
    return ((found.group(1) or found.group(2)) if found else "", "")


def parse(raw: str, place: Tuple[int, int]) -> List[Line]:
    """The lines that one raw line holds: several when its message has line breaks or carriage returns (progress bars)."""
    meta: Dict[str, Any] = {"time": None, "host": "", "unit": "", "program": "", "process": "", "kernel": False}
    text = raw.rstrip("\r\n")
    if text.startswith("{") and text.endswith("}"):
        text = _json(text, meta)
    out = []
    for part in BREAKS.split(clean(text)):
        if part.strip():
            out.append(_line(part, dict(meta), place))
    return out


def _json(text: str, meta: Dict[str, Any]) -> str:
    """The message of a JSON line: journald's export, Docker's json-file, or a program's own log."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(told, dict):
        return text
    if "MESSAGE" in told or "__REALTIME_TIMESTAMP" in told:
        message = told.get("MESSAGE")
        meta["host"] = _text(told.get("_HOSTNAME"))
        program = _text(told.get("SYSLOG_IDENTIFIER") or told.get("_COMM"))
        meta["program"] = program
        meta["unit"] = _text(told.get("UNIT") or told.get("USER_UNIT") or told.get("_SYSTEMD_UNIT"))
        meta["kernel"] = told.get("_TRANSPORT") == "kernel" or (program == "kernel" and not meta["unit"])
        stamp = _text(told.get("__REALTIME_TIMESTAMP") or told.get("_SOURCE_REALTIME_TIMESTAMP"))
        if MICROSECONDS.fullmatch(stamp):
            meta["time"] = int(stamp) / 1e6
        return _text(message)
    when = STAMP.match(_text(told.get("time") or told.get("timestamp") or told.get("ts")) + " ")
    if when:
        meta["time"] = _iso(when)
    fields = told.get("fields")
    message = (
        told.get("log")
        or told.get("message")
        or told.get("msg")
        or (fields.get("message") if isinstance(fields, dict) else None)
    )
    if not isinstance(message, str):
        return text
    level = _text(told.get("level") or told.get("levelname") or told.get("severity")).upper()
    return f"{level}: {message}" if level in LEVELS else message


def _text(value: Any) -> str:
    """A field of a journal entry: a string, an array of byte values, or an array of several such."""
    if isinstance(value, list):
        if all(isinstance(item, int) and 0 <= item < 256 for item in value):
            return bytes(value).decode("utf-8", "replace")
        return _text(value[0]) if value else ""
    return "" if value is None else str(value)


def _numbers(found: "re.Match[str]", first: int, last: int) -> List[int]:
    return [int(found.group(number)) for number in range(first, last + 1)]


def _iso(found: "re.Match[str]") -> Optional[float]:
    whole = seconds(*_numbers(found, 1, 6), zone=found.group(8) or "")
    fraction = found.group(7)
    return None if whole is None else whole + (float(f"0.{fraction}") if fraction else 0.0)


def _line(text: str, meta: Dict[str, Any], place: Tuple[int, int]) -> Line:
    if len(text) > LONGEST:
        # What matters stands at one of the ends; expressions take long over a whole megabyte.
        text = f"{text[: LONGEST - TAIL]} [...] {text[-TAIL:]}"
    text = _stamps(text, meta)
    said, level = text, ""
    for _ in range(4):
        end, level = _prefix(said, meta)
        said = said[end:]
        if level or not end:
            break
    if not level and "NCCL " in said:
        found = NCCL.match(said)
        if found:
            level = "error" if (found.group(1) or found.group(2)) == "WARN" else "info"
    kernel = meta["kernel"] or meta["program"] == "kernel"
    if kernel:
        level = ""  # the kernel says INFO where it means a hung task
    return Line(
        text, said, level, meta["time"], place, meta["host"], meta["unit"], meta["program"], meta["process"], kernel
    )


def _prefix(said: str, meta: Dict[str, Any]) -> Tuple[int, str]:
    """Where what a program put before its message ends, and the level that it says; 0 when there is nothing more."""
    found = TAG.match(said) or RAYLET.match(said)
    if found:
        groups = found.groups()
        meta["process"] = (groups[3] or groups[1] or groups[0]) if len(groups) > 1 else "raylet"
        return found.end(), ""
    for pattern, first, name, other in (
        (VLLM, 2, 1, 1),
        (GLOG, 2, 1, 8),
        (RAY, 1, 7, 7),
        (LEVEL, 0, 1, 2),
        (SGLANG, 1, 0, 0),
    ):
        found = pattern.match(said)
        if not found:
            continue
        if meta["time"] is None and first and found.group(first):
            # Those whose stamp begins with the month have no year.
            clock = _numbers(found, first, 6)
            meta["time"] = seconds(*([1970] * (6 - len(clock))), *clock)
        return found.end(), LEVELS[found.group(name) or found.group(other)] if name else ""
    return 0, ""


def _stamps(text: str, meta: Dict[str, Any]) -> str:
    """Take off what the journal, syslog, dmesg and container runtimes put before a message; remember what it says."""
    cloud = CLOUD.match(text)
    if cloud:
        text = text[cloud.end() :]
    for _ in range(4):
        first, end = text[:1], 0
        if first.isdigit() or (first.isupper() and text[3:4] == " "):
            end = _dated(text, meta)
        elif first == "[" or text.startswith("kern"):
            end = _bracketed(text, meta)
        if not end and " | " in text[:70]:
            found = COMPOSE.match(text)
            end = found.end() if found else 0
        if not end:
            break
        text = text[end:]
    return text


def _dated(text: str, meta: Dict[str, Any]) -> int:
    """A stamp at the beginning, with the host and the program that the journal and syslog add."""
    found = JOURNAL.match(text)
    # A plain line such as `2026-11-07 13:38:08,498 INFO worker.py:1654 -- ...` has no host and program.
    if found and found.group(9) not in LEVELS:
        meta["time"] = _iso(found)
        _journal(meta, found.group(9), found.group(10))
        return found.end()
    found = SYSLOG.match(text)
    if found and found.group(1) in MONTHS:
        meta["time"] = seconds(1970, MONTHS[found.group(1)], *_numbers(found, 2, 5))
        _journal(meta, found.group(6), found.group(7))
        return found.end()
    found = STAMP.match(text)
    if found and meta["time"] is None:
        meta["time"] = _iso(found)
    return found.end() if found else 0


def _bracketed(text: str, meta: Dict[str, Any]) -> int:
    """What stands in brackets at the beginning: a pod's name, a label, dmesg's stamps."""
    found = POD.match(text) or CLOUD_LABEL.match(text)
    if found:
        return found.end()
    found = DMESG.match(text)
    if found:
        meta["kernel"] = True
        if meta["time"] is None:
            meta["time"] = float(found.group(1))
        return found.end()
    found = DMESG_T.match(text)
    if found and found.group(1) in MONTHS:
        month, day, hour, minute, second, year = found.groups()
        meta["kernel"] = True
        meta["time"] = seconds(int(year), MONTHS[month], int(day), int(hour), int(minute), int(second))
        return found.end()
    return 0


def _journal(meta: Dict[str, Any], host: str, program: str) -> None:
    meta["host"], meta["program"] = host, program
    meta["kernel"] = program == "kernel"
    if program.endswith(".service"):  # -o with-unit
        meta["unit"] = program
