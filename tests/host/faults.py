"""Faults that are done to lab hosts from outside and inside, and the watching of what comes of them."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path


def completion(url: str, key: str, tokens: int = 1, deadline: float = 5.0, model: str = "chat") -> str:
    """One completion's text. OSError when it fails in any way."""
    body = {"model": model, "prompt": "Hello", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=deadline) as reply:
            return json.load(reply)["choices"][0]["text"]
    except (OSError, ValueError, KeyError) as error:
        raise OSError(str(error)) from error
    except Exception as error:  # http.client's own: a connection that ends in the middle of an answer
        raise OSError(repr(error)) from error


@dataclass
class Flight:
    """A long request in flight, in a thread of its own: when and how it ended."""

    url: str
    key: str
    tokens: int
    deadline: float = 900.0
    began: float = 0.0
    ended: float | None = None
    outcome: str = "in flight"
    thread: threading.Thread | None = field(default=None, repr=False)

    def start(self) -> Flight:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        return self

    def _run(self) -> None:
        self.began = time.monotonic()
        try:
            completion(self.url, self.key, self.tokens, self.deadline)
            self.outcome = "answered"
        except OSError as error:
            self.outcome = f"failed: {error}"
        self.ended = time.monotonic()


def answers_within(url: str, key: str, seconds: float, since: float | None = None) -> float:
    """Seconds until a right completion, counted from `since` (monotonic) or now. AssertionError when none comes."""
    since = time.monotonic() if since is None else since
    while True:
        try:
            completion(url, key)
            return time.monotonic() - since
        except OSError as error:
            last = error
        assert time.monotonic() - since < seconds, f"no right answer within {seconds:.0f} s: {last}"
        time.sleep(0.5)


# -- the network, from the machine's side -------------------------------------------------------------------------------


def bridge_port(index: int) -> str:
    """The name of this machine's end of a host's interface; index is what the host has in /sys/class/net/host0/iflink."""
    for path in Path("/sys/class/net").iterdir():
        if (path / "ifindex").read_text(encoding="ascii").strip() == str(index):
            return path.name
    raise LookupError(f"no interface has the index {index}")


class Cut:
    """A host off the lab's bridge, as if the switch had lost it: its own link stays up."""

    def __init__(self, index: int) -> None:
        self.port = bridge_port(index)
        self.bridge = Path(f"/sys/class/net/{self.port}/master").resolve().name

    def __enter__(self) -> Cut:
        subprocess.run(["ip", "link", "set", self.port, "nomaster"], check=True)
        return self

    def __exit__(self, *_) -> None:
        subprocess.run(["ip", "link", "set", self.port, "master", self.bridge], check=True)
