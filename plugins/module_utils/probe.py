"""Does a vLLM server answer? A library for modules, and the program that a unit runs before and after its start.

/health says 200 while nothing answers (measured), so the proof is an authenticated completion of one token that comes
back right within a deadline. Standard library only, Python 3.9: it runs on hosts, as the service user.

As a program (a copy of this file lies in each generation):
  probe.py prepare CACHE             ExecStartPre:  clear the caches of a start that crashed, mark this one as begun
  probe.py head CACHE URL MODEL      ExecStartPost: wait for a right completion, then take the mark away
  probe.py worker CACHE URL          ExecStartPost: wait until the head of the replica is healthy, then the same
The key comes from the environment variable VLLM_API_KEY, never from the command line. How long to wait is systemd's
business (TimeoutStartSec); a server that ends meanwhile ends the wait (MAINPID, systemd.exec(5)).
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any, Dict, List, Optional

# Begun and not yet ready. A start that finds it knows that the one before did not finish: half-written compile caches
# make later starts die (measured: CUBLAS_STATUS_INTERNAL_ERROR), so they are cleared.
MARK = ".starting"
PAUSE = 1.0  # seconds between two tries
# Whom servers that speak TLS are believed by (role vllm_service); a server with another certificate gets no key.
CA = "/etc/gpu_fleet/vllm/ca.pem"


@dataclass(frozen=True)
class Answer:
    """What a request brought: HTTP status (0 when there was no answer), seconds it took, the problem in words or ''."""

    status: int
    seconds: float
    problem: str
    body: Any = None

    @property
    def right(self) -> bool:
        return not self.problem


def trusting(ca: Optional[str] = None) -> ssl.SSLContext:
    """Believes certificates of the fleet's private CA alone. OSError, with the file, where that cannot be read."""
    ca = ca or CA
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise OSError(f"the certificate of the fleet's CA, {ca}: {error.strerror or error}") from error


def opener(url: str) -> urllib.request.OpenerDirector:
    """For a server of the fleet, whose network is its own: a proxy from the environment must not stand between."""
    handlers: List[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if url.startswith("https:"):
        handlers.append(urllib.request.HTTPSHandler(context=trusting()))
    return urllib.request.build_opener(*handlers)


def request(
    url: str, key: Optional[str] = None, payload: Optional[Dict[str, Any]] = None, deadline: float = 10.0
) -> Answer:
    """One HTTP request; JSON in, JSON out. deadline is in seconds, for connecting and for each read."""
    data = json.dumps(payload).encode() if payload is not None else None
    call = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    if key:
        call.add_header("Authorization", f"Bearer {key}")
    began = time.monotonic()
    try:
        with opener(url).open(call, timeout=deadline) as reply:
            text = reply.read(1 << 20)
            return Answer(reply.status, time.monotonic() - began, "", json.loads(text) if text.strip() else None)
    except urllib.error.HTTPError as error:
        return Answer(error.code, time.monotonic() - began, f"HTTP {error.code} from {url}")
    except (OSError, ValueError) as error:
        timed_out = isinstance(error, socket.timeout) or "timed out" in str(error)
        problem = (
            f"no answer from {url} within {deadline:g} s" if timed_out else f"{url}: {getattr(error, 'reason', error)}"
        )
        return Answer(0, time.monotonic() - began, problem)


def completion(base: str, key: Optional[str], model: str, deadline: float = 30.0) -> Answer:
    """One token from /v1/completions, checked: a choice with text or a finish reason, and one token counted."""
    answer = request(
        f"{base}/v1/completions", key, {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}, deadline
    )
    if not answer.right:
        return answer
    try:
        choice, tokens = answer.body["choices"][0], answer.body["usage"]["completion_tokens"]
        wrong = (
            ""
            if tokens == 1 and isinstance(choice["text"], str)
            else f"{tokens} tokens and the text {choice.get('text')!r}"
        )
    except (KeyError, IndexError, TypeError):
        wrong = f"the answer {json.dumps(answer.body)[:200]}"
    return Answer(
        answer.status, answer.seconds, f"{base} gave {wrong} instead of one token" if wrong else "", answer.body
    )


def prepare(cache: str) -> None:
    """Empty a cache folder whose last start did not finish; mark this start as begun."""
    if os.path.exists(os.path.join(cache, MARK)):
        print("the start before did not finish: clearing its caches", flush=True)
        for name in os.listdir(cache):
            path = os.path.join(cache, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
    with open(os.path.join(cache, MARK), "w", encoding="ascii"):
        pass


def gone(pid: str) -> bool:
    """Whether the main process of the unit has ended; systemd itself would wait for this program first."""
    return bool(pid) and not os.path.exists(f"/proc/{pid}")


def wait(ask: Any) -> Answer:
    """Ask until the answer is right; say what is wrong whenever that changes. SystemExit when the server is gone."""
    told = ""
    while True:
        if gone(os.environ.get("MAINPID", "")):
            sys.exit("the server ended before it was ready")
        answer = ask()
        if answer.right:
            return answer
        # While a model loads, nothing listens: that is not worth a line.
        if answer.status and answer.problem != told:
            print(f"not ready: {answer.problem}", flush=True)
            told = answer.problem
        time.sleep(PAUSE)


def main(arguments: Any) -> int:
    verb, cache = arguments[0], arguments[1]
    if verb == "prepare":
        prepare(cache)
        return 0
    if verb == "head":
        answer = wait(lambda: completion(arguments[2], os.environ.get("VLLM_API_KEY"), arguments[3]))
        print(f"ready: one token in {answer.seconds:.2f} s", flush=True)
    else:
        wait(lambda: request(f"{arguments[2]}/health"))
        print("ready: the head of the replica is healthy", flush=True)
    os.unlink(os.path.join(cache, MARK))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
