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
BLOB = re.compile(r"\[(\d+(?:\.\d+)?[KMG]?i?B?) blob data\]$")
HOSTNAME, UNIT = re.compile(r'"_HOSTNAME"\s*:\s*"([^"]*)"'), re.compile(r'"_SYSTEMD_UNIT"\s*:\s*"([^"]*)"')
OWNER = re.compile(
    r"\d{4}-\d\d-\d\dT[\d:.,+Z-]+ ([A-Za-z0-9][\w.-]*) [^\s:\[]{1,80}(?:\[\d+\])?: |[A-Z][a-z]{2} +\d+ [\d:.]+ (\S+) "
)
MESSAGE = re.compile(r'"MESSAGE"\s*:\s*')

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


def seconds(year: int, month: int, day: int, hour: int, minute: int, second: int, zone: str = "") -> Optional[float]:
    """Seconds since 1970; None for a date that does not exist."""
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60):
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
        return bool(found) and raw.startswith("null", found.end())
    return False


def opaque(raw: str) -> bool:
    """Whether a search in the raw line may miss words of its message: bytes in an array, or escaped letters."""
    if not raw.startswith("{"):
        return False
    found = MESSAGE.search(raw)
    return bool(found) and raw.startswith("[", found.end())


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
    for part in re.split(r"[\r\n]+", clean(text)):
        if part.strip():
            out.append(_line(part, dict(meta), place))
    return out


def _json(text: str, meta: Dict[str, Any]) -> str:
    """The message of a JSON line: journald's export, Docker's json-file, or a program's own log."""
    try:
        told = json.loads(text)
    except ValueError:
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
        if stamp.isdigit():
            meta["time"] = int(stamp) / 1e6
        return _text(message)
    stamp = STAMP.match(_text(told.get("time") or told.get("timestamp") or told.get("ts")) + " ")
    if stamp:
        meta["time"] = _iso(stamp)
    fields = told.get("fields")
    message = told.get("log") or told.get("message") or told.get("msg") or (fields or {}).get("message")
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


def _iso(found: "re.Match[str]", first: int = 1) -> Optional[float]:
    year, month, day, hour, minute, second, fraction, zone = found.groups()[first - 1 : first + 7]
    whole = seconds(int(year), int(month), int(day), int(hour), int(minute), int(second), zone or "")
    return None if whole is None else whole + (float(f"0.{fraction}") if fraction else 0.0)


def _line(text: str, meta: Dict[str, Any], place: Tuple[int, int]) -> Line:
    text = _stamps(text, meta)
    said, level = text, ""
    time = meta["time"]
    for _ in range(4):
        found = TAG.match(said) or RAYLET.match(said)
        if found:
            groups = found.groups()
            meta["process"] = (groups[3] or groups[1] or groups[0]) if len(groups) > 1 else "raylet"
            said = said[found.end() :]
            continue
        found = VLLM.match(said)
        if found:
            level = LEVELS[found.group(1)]
            if time is None:
                time = seconds(1970, *(int(found.group(n)) for n in range(2, 7)))
            said = said[found.end() :]
            break
        found = GLOG.match(said)
        if found:
            level = LEVELS[found.group(1) or found.group(8)]
            if time is None and found.group(2):
                time = seconds(1970, *(int(found.group(n)) for n in range(2, 7)))
            said = said[found.end() :]
            break
        found = RAY.match(said)
        if found:
            level = LEVELS[found.group(7)]
            if time is None:
                time = seconds(*(int(found.group(n)) for n in range(1, 7)))
            said = said[found.end() :]
            break
        found = LEVEL.match(said)
        if found:
            level = LEVELS[found.group(1) or found.group(2)]
            said = said[found.end() :]
            break
        found = SGLANG.match(said)
        if found:
            if time is None:
                time = seconds(*(int(found.group(n)) for n in range(1, 7)))
            said = said[found.end() :]
            continue
        break
    if not level and "NCCL " in said:
        found = NCCL.match(said)
        if found:
            level = "error" if (found.group(1) or found.group(2)) == "WARN" else "info"
    kernel = meta["kernel"] or meta["program"] == "kernel"
    if kernel:
        level = ""  # the kernel says INFO where it means a hung task
    return Line(text, said, level, time, place, meta["host"], meta["unit"], meta["program"], meta["process"], kernel)


def _stamps(text: str, meta: Dict[str, Any]) -> str:
    """Take off what the journal, syslog, dmesg and container runtimes put before a message; remember what it says."""
    cloud = CLOUD.match(text)
    if cloud:
        text = text[cloud.end() :]
    for _ in range(4):
        first = text[:1]
        if first == "[":
            label = CLOUD_LABEL.match(text)
            if label:
                text = text[label.end() :]
                continue
        if first.isdigit() or (first.isupper() and text[3:4] == " "):
            found = JOURNAL.match(text)
            # A plain line such as `2026-11-07 13:38:08,498 INFO worker.py:1654 -- ...` has no host and program.
            if found and found.group(9) not in LEVELS:
                meta["time"] = _iso(found)
                _journal(meta, found.group(9), found.group(10))
                text = text[found.end() :]
                continue
            found = SYSLOG.match(text)
            if found and found.group(1) in MONTHS:
                clock = (int(found.group(n)) for n in range(2, 6))
                meta["time"] = seconds(1970, MONTHS[found.group(1)], *clock)
                _journal(meta, found.group(6), found.group(7))
                text = text[found.end() :]
                continue
            found = STAMP.match(text)
            if found:
                if meta["time"] is None:
                    meta["time"] = _iso(found)
                text = text[found.end() :]
                continue
        if first == "[" or text.startswith("kern"):
            found = POD.match(text)
            if found:
                text = text[found.end() :]
                continue
            found = DMESG.match(text)
            if found:
                meta["kernel"] = True
                if meta["time"] is None:
                    meta["time"] = float(found.group(1))
                text = text[found.end() :]
                continue
            found = DMESG_T.match(text)
            if found and found.group(1) in MONTHS:
                month, day, hour, minute, second, year = found.groups()
                meta["kernel"] = True
                meta["time"] = seconds(int(year), MONTHS[month], int(day), int(hour), int(minute), int(second))
                text = text[found.end() :]
                continue
        if " | " in text[:70]:
            found = COMPOSE.match(text)
            if found:
                text = text[found.end() :]
                continue
        break
    return text


def _journal(meta: Dict[str, Any], host: str, program: str) -> None:
    meta["host"], meta["program"] = host, program
    meta["kernel"] = program == "kernel"
    if program.endswith(".service"):  # -o with-unit
        meta["unit"] = program
