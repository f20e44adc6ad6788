"""Which lines of a failed start's journal say why. Pure: lines in, lines out.

vLLM's own last words are the least useful ones ("Engine core initialization failed. See root cause above."): the cause
stands further up, in another process's traceback. So the first error line that is not such an echo is shown with what
led to it, and the very end.
"""

from __future__ import annotations

import re
from typing import List, Sequence

# What stands before a message: vLLM's process tag, its level, date, time and source; torch's and glog's stamps.
PREFIX = re.compile(
    r"^(\([^)]*pid=\d+[^)]*\)\s*)?((DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+\d\d-\d\d \d\d:\d\d:\d\d\s+)?(\[?[\w./-]+:\d+\]\s*)?"
)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# The line that ends a traceback, argparse's refusal, the kernel's and the loader's words.
ERROR = re.compile(
    r"^([A-Za-z_][\w.]*\.)?\w*(Error|Exception|Interrupt|Exit|Failure|Timeout)\b\s*(:|\(|$)"
    r"|: error: |error while loading shared libraries|cannot open shared object file|bad interpreter|Watchdog caught|is not compatible with|[Oo]ut of memory|oom-kill|Killed process|Segmentation fault|core dumped"
    r"|No space left on device|NCCL WARN|status=\d+/[A-Z]|Failed at step|FATAL|panicked at|terminate called"
)
ECHO = re.compile(
    r"See root cause above|Engine core initialization failed|WorkerProc initialization failed|EngineDeadError|"
    r"Engine core proc .* died|cancelled|CancelledError|BrokenPipeError|resource_tracker|leaked|Deactivated|Consumed|KeyboardInterrupt|SystemExit|"
    r"ended before it was ready|Control process exited"
)

# What a rank says when another one went away, which is that one's story: NCCL's and gloo's words for a connection that
# ended, torch's store's for a head that never came.
PEER = re.compile(
    r"[Ff]ailed to recv, got 0 bytes|[Cc]onnection closed by peer|[Cc]onnection reset by peer|a rank went away|ncclRemoteError"
    r"|remote process exited or there was a network error|recvValue failed|client socket has (timed out|failed to connect)"
)


def strip(line: str) -> str:
    """A line without vLLM's stamps."""
    return PREFIX.sub("", COLOUR.sub("", line), count=1).strip()


def _errors(lines: Sequence[str]) -> List[int]:
    """Places of lines that may be a cause, as they come."""
    return [
        number
        for number, line in enumerate(lines)
        if (ERROR.search(strip(line)) or PEER.search(line)) and not ECHO.search(line)
    ]


def kind(lines: Sequence[str]) -> str:
    """Whether the first cause is the rank's own ("own"), the loss of another rank ("peer"), or none is seen ("").

    What is said after another rank was lost only follows from it.
    """
    places = _errors(lines)
    if not places:
        return ""
    return "peer" if PEER.search(lines[places[0]]) else "own"


def why(lines: Sequence[str], before: int = 6, last: int = 8) -> List[str]:
    """The lines that say why: the first cause with `before` lines that led to it, then the `last` lines of all."""
    places = _errors(lines)
    tail = range(max(0, len(lines) - last), len(lines))
    shown = sorted(
        {*(n for n in range(places[0] - before, places[0] + 3) if 0 <= n < len(lines)), *places[-1:], *tail}
        if places
        else set(tail)
    )
    out: List[str] = []
    for number, place in enumerate(shown):
        if number and place != shown[number - 1] + 1:
            out.append("[...]")
        out.append(lines[place])
    return out
