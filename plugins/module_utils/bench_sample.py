# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Looks at a host again and again while a load runs: memory, GPUs, and what the server says of itself.

A peak that is read once is missed, so it is sampled. Where there is nvidia-smi it runs all the while (--loop-ms), since each
start of it costs more than a reading. Memory of a server without GPUs is what its processes hold of their own and the largest
share of what they hold together (RssAnon, RssShmem in proc(5), status). Pss would be exacter, but counting it stops a process.

    python3 -I -B PROGRAM sample JOB_FOLDER

JOB_FOLDER has sample.json (instance, url of /metrics or null, names of metrics by notion, interval, seconds), and gets
samples.jsonl, a line a look, until there is a file `stop` or the seconds are over. Times are of time.monotonic(), which on Linux
is the clock of the generator's start times.

Standard library, Python 3.9 and newer.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from typing import Any, Dict, List, Mapping, Optional, Sequence

from . import probe

# Fields of `nvidia-smi --query-gpu` (its --help-query-gpu). utilization.gpu is the share of time in which a kernel ran,
# utilization.memory the share in which memory was read or written.
FIELDS = ("index", "memory.used", "memory.total", "utilization.gpu", "utilization.memory", "power.draw")
NAMES = ("index", "used_mib", "total_mib", "busy", "memory_busy", "watts")
SHARES = ("busy", "memory_busy")
PAGE_BYTES, PAGE_SECONDS = 4 << 20, 5.0
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)")


def gpu(line: str) -> Optional[Dict[str, Any]]:
    """A GPU by one line of nvidia-smi; a field that is no number ([N/A]) is None."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(FIELDS) or not cells[0].isdigit():
        return None
    found: Dict[str, Any] = {}
    for key, cell in zip(NAMES, cells):  # noqa: B905  Python 3.9 has no strict=
        number = float(cell) if re.fullmatch(r"[0-9.]+", cell) else None
        found[key] = number / 100 if number is not None and key in SHARES else number
    found["index"] = int(cells[0])
    return found


class Gpus:
    """Readings of each GPU, from an nvidia-smi that runs all the while; nothing where there is none.

    Several may come at once, since what writes to a pipe may keep it for a while: of those the one with the most memory counts.
    """

    def __init__(self, milliseconds: int) -> None:
        self.seen: Dict[int, Dict[str, Any]] = {}
        self._lock = threading.Lock()
        query = f"--query-gpu={','.join(FIELDS)}"
        try:
            self._process: Optional[subprocess.Popen[str]] = subprocess.Popen(
                ["nvidia-smi", query, "--format=csv,noheader,nounits", f"--loop-ms={milliseconds}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError:
            self._process = None
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            found = gpu(line)
            if found:
                with self._lock:
                    former = self.seen.get(found["index"])
                    if former is None or (found["used_mib"] or 0.0) >= (former["used_mib"] or 0.0):
                        self.seen[found["index"]] = found

    def now(self) -> List[Dict[str, Any]]:
        """What came since the last question."""
        with self._lock:
            found, self.seen = list(self.seen.values()), {}
        return found

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def processes(instance: str, proc: str = "/proc") -> List[str]:
    """Numbers of the processes of a server's unit, by their control group."""
    unit, found = f"/vllm@{instance}.service", []
    for name in os.listdir(proc):
        if not name.isdigit():
            continue
        try:
            with open(f"{proc}/{name}/cgroup", encoding="ascii", errors="replace") as text:
                groups = text.read()
        except OSError:
            continue
        if any(line.rpartition(":")[2].endswith(unit) or f"{unit}/" in line for line in groups.splitlines()):
            found.append(name)
    return found


def _kib(path: str, field: str) -> Optional[int]:
    try:
        with open(path, encoding="ascii", errors="replace") as text:
            for line in text:
                if line.startswith(f"{field}:"):
                    return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return None


def memory(instance: str, proc: str = "/proc") -> Dict[str, Optional[float]]:
    """MiB: the server's own, the most since its start (a sum of peaks, so at most too high), the host's, and what is available."""
    own, together, peak = [], [], []
    for pid in processes(instance, proc):
        status = f"{proc}/{pid}/status"
        own.append(_kib(status, "RssAnon"))
        together.append(_kib(status, "RssShmem"))
        peak.append(_kib(status, "VmHWM"))
    total, available = _kib(f"{proc}/meminfo", "MemTotal"), _kib(f"{proc}/meminfo", "MemAvailable")
    return {
        "server_mib": (sum(value or 0 for value in own) + max(value or 0 for value in together)) / 1024
        if own
        else None,
        "server_peak_mib": sum(value for value in peak if value) / 1024 if peak else None,
        "host_mib": total / 1024 if total else None,
        "available_mib": available / 1024 if available else None,
    }


def numbers(page: str, names: Mapping[str, str]) -> Dict[str, float]:
    """Metrics by notion, summed over engines; names: notion to name."""
    wanted = {name: notion for notion, name in names.items()}
    found: Dict[str, float] = {}
    for line in page.splitlines():
        hit = SAMPLE.match(line)
        if hit and hit.group(1) in wanted:
            try:
                value = float(hit.group(2))
            except ValueError:
                continue
            notion = wanted[hit.group(1)]
            if notion == "kv_usage":
                found[notion] = max(found.get(notion, 0.0), value)
            else:
                found[notion] = found.get(notion, 0.0) + value
    return found


def said(url: Optional[str], names: Mapping[str, str]) -> Optional[Dict[str, float]]:
    if not url:
        return None
    try:
        with probe.opener(url).open(url, timeout=PAGE_SECONDS) as answer:
            return numbers(answer.read(PAGE_BYTES).decode("utf-8", "replace"), names)
    except (OSError, ValueError):
        return None


def main(arguments: Sequence[str]) -> int:
    folder = arguments[0]
    with open(os.path.join(folder, "sample.json"), encoding="utf-8") as text:
        job = json.load(text)
    over = time.monotonic() + float(job["seconds"])
    interval, stop = float(job["interval"]), os.path.join(folder, "stop")
    gpus = Gpus(int(interval * 1000))
    try:
        with open(os.path.join(folder, "samples.jsonl"), "w", encoding="utf-8") as out:
            while time.monotonic() < over and not os.path.exists(stop):
                began = time.monotonic()
                look = {
                    "t": began,
                    "gpus": gpus.now(),
                    "memory": memory(job["instance"]),
                    "server": said(job.get("url"), job.get("names") or {}),
                }
                out.write(json.dumps(look) + "\n")
                out.flush()
                time.sleep(max(0.05, interval - (time.monotonic() - began)))
    finally:
        gpus.end()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
