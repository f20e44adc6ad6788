"""Faults that are done to lab hosts from outside and inside, and the watching of what comes of them."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import ssl
import subprocess
import threading
import time
import urllib.parse
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path


def connect(url: str, deadline: float, ca: str = "") -> http.client.HTTPConnection:
    """A connection to whom the URL names, straight; over TLS with the CA alone that is given as a file."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "https":
        context = ssl.create_default_context(cafile=ca)
        return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=deadline, context=context)
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=deadline)


def send(link: http.client.HTTPConnection, key: str, tokens: int, **more) -> http.client.HTTPResponse:
    """Ask for a completion; the answer's head is read."""
    body = {"model": "chat", "prompt": "Hello", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    link.request("POST", "/v1/completions", json.dumps(body), headers)
    return link.getresponse()


def text_of(reply: http.client.HTTPResponse) -> str:
    """A completion's text out of an answer that is no stream."""
    content = reply.read()
    if reply.status != 200:
        raise OSError(f"HTTP {reply.status}: {content[:200].decode(errors='replace')}")
    return json.loads(content)["choices"][0]["text"]


def completion(url: str, key: str, tokens: int = 1, deadline: float = 5.0, *, ca: str = "") -> str:
    """One completion's text. OSError when it fails in any way."""
    try:
        with closing(connect(url, deadline, ca)) as link:
            return text_of(send(link, key, tokens))
    except (OSError, ValueError, LookupError) as error:
        raise OSError(str(error)) from error
    except http.client.HTTPException as error:  # a connection that ends in the middle of an answer
        raise OSError(repr(error)) from error


@dataclass
class Flight:
    """A long request in flight, in a thread of its own: when and how it ended."""

    url: str
    key: str
    tokens: int
    deadline: float = 900.0
    ca: str = ""
    began: float = 0.0
    ended: float | None = None
    outcome: str = "in flight"
    thread: threading.Thread | None = field(default=None, repr=False)
    link: http.client.HTTPConnection | None = field(default=None, repr=False)

    def start(self) -> Flight:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        return self

    def _run(self) -> None:
        self.began = time.monotonic()
        try:
            with closing(connect(self.url, self.deadline, self.ca)) as self.link:
                text_of(send(self.link, self.key, self.tokens))
            self.outcome = "answered"
        except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
            self.outcome = f"failed: {error}"
        self.ended = time.monotonic()

    def give_up(self) -> None:
        """End it from here, as a client that goes away."""
        with suppress(OSError, AttributeError):  # it has ended
            self.link.sock.shutdown(socket.SHUT_RDWR)
        self.thread.join(10)


# -- many requests, spread over a fault -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Door:
    """Where requests go, with which key, and over TLS the file of the CA."""

    url: str
    key: str
    ca: str = ""


def failure_of(door: Door, tokens: int, stream: bool, sent: Sent, deadline: float = 90.0) -> str:
    """Send one request and say how it failed: `status N`, `cut`, `error in the stream`, `no end`; '' when it did not."""
    try:
        with closing(connect(door.url, deadline, door.ca)) as link:
            link.connect()
            sent.connected = time.monotonic()
            reply = send(link, door.key, tokens, stream=stream)
            sent.id = reply.getheader("X-Request-Id", "")
            if reply.status != 200:
                return f"status {reply.status}"
            if stream:
                return stream_failure(reply, time.monotonic() + deadline)
            return "" if text_of(reply) else "empty"
    except TimeoutError:
        return "no end"
    except (OSError, ValueError, LookupError, http.client.HTTPException):
        return "cut"


def stream_failure(reply: http.client.HTTPResponse, until: float) -> str:
    """How a stream of events failed, '' when it came to its own end."""
    last = b""
    while line := reply.readline():
        if line.startswith(b'data: {"error"'):
            return "error in the stream"
        last = line.strip() or last
        if time.monotonic() > until:
            return "no end"
    return "" if last == b"data: [DONE]" else "cut"


@dataclass
class Sent:
    """A request of a load: when it was sent, had its connection (with TLS) and ended (monotonic), how it failed, its ID."""

    at: float
    connected: float | None = None
    ended: float = 0.0
    failure: str = ""
    id: str = ""


class Load:
    """So many requests spread evenly over so many seconds, each in a thread of its own: none waits for another. Every fourth is a
    stream, three times as long. One more follows, again and again until it is answered: the end of the last gap."""

    def __init__(self, door: Door, count: int, seconds: float, tokens: int = 4, patience: float = 420.0) -> None:
        self.patience = patience
        self.door, self.count, self.pause, self.tokens = door, count, seconds / count, tokens
        self.sent: list[Sent] = []
        self.began, self.answered = time.monotonic(), None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> Load:
        self.began = time.monotonic()
        self.thread.start()
        return self

    def _run(self) -> None:
        threads = [threading.Thread(target=self._one, args=(number,), daemon=True) for number in range(self.count)]
        for number, thread in enumerate(threads):
            time.sleep(max(0.0, self.began + number * self.pause - time.monotonic()))
            thread.start()
        with suppress(AssertionError):
            answers_within(self.door.url, self.door.key, self.patience, ca=self.door.ca)
            self.answered = time.monotonic()
        for thread in threads:
            thread.join()

    def _one(self, number: int) -> None:
        stream, sent = number % 4 == 3, Sent(time.monotonic())
        sent.failure = failure_of(self.door, self.tokens * (3 if stream else 1), stream, sent)
        sent.ended = time.monotonic()
        self.sent.append(sent)

    def failures(self) -> Counter[str]:
        return Counter(sent.failure for sent in self.sent if sent.failure)

    def gap(self) -> float | None:
        """The longest time without a right answer from the first request on; None when there was none in the end."""
        if self.answered is None:
            return None
        right = sorted(sent.ended for sent in self.sent if not sent.failure and sent.ended < self.answered)
        return max(after - before for before, after in itertools.pairwise([self.began, *right, self.answered]))

    def slowest(self, since: float) -> list[tuple[float, Sent]]:
        """Those that failed, and how long each was kept waiting for its end after `since`; the one that waited longest is first."""
        waits = [(sent.ended - max(sent.at, since), sent) for sent in self.sent if sent.failure]
        return sorted(waits, key=lambda each: -each[0])


def answers_within(url: str, key: str, seconds: float, since: float | None = None, ca: str = "") -> float:
    """Seconds until a right completion, counted from `since` (monotonic) or now. AssertionError when none comes."""
    since = time.monotonic() if since is None else since
    while True:
        try:
            completion(url, key, ca=ca)
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
