"""Can HAProxy read `model` out of real request bodies? A measurement on this machine's loopback; prints tables.

    .venv/bin/python scripts/validation/gateway_body.py --haproxy /usr/sbin/haproxy
    .venv/bin/python scripts/validation/gateway_body.py --haproxy 'ROOT/lib64/ld-linux-x86-64.so.2 --library-path ROOT/usr/lib/x86_64-linux-gnu ROOT/usr/sbin/haproxy'

Two ways to read are tried: HAProxy's own `json_query`, with buffers of 16 KiB (the default) and of 5 MiB, and the role's
roles/gateway/files/model.lua with buffers of 5 MiB. Bodies of 1 KiB, 20 KiB, 200 KiB and 4 MiB; `model` first, last, after a
nested one, and twice; with a length, chunked, and by HTTP/2 (curl). A right outcome is the right server with the whole body,
or, where `model` stands twice, 400; a body above the limit gets 413. Whatever else happens is counted as wrong and shown.
The server behind is a stand-in that answers with its name and the digest of what it got.
"""

from __future__ import annotations

import argparse
import hashlib
import http.server
import shlex
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

LUA = Path(__file__).resolve().parents[2] / "roles/gateway/files/model.lua"
SIZES = {"1 KiB": 1 << 10, "20 KiB": 20 << 10, "200 KiB": 200 << 10, "4 MiB": 4 << 20}
LIMIT = 4 << 20
PLACES = ("first", "last", "nested", "twice")
WIRES = ("length", "chunked", "h2")
WAYS = (("json_query", 16384), ("json_query", 5 << 20), ("lua", 5 << 20))

CONFIG = """
global
  nbthread 2
  maxconn 2000
  tune.bufsize {bufsize}
  tune.lua.forced-yield 500000
  {lua}
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
frontend f
  bind 127.0.0.1:{h1}
  bind 127.0.0.1:{h2} proto h2
  http-request return status 413 if {{ req.hdr(content-length) -m int gt {limit} }}
  http-request wait-for-body time {wait}s at-least {most}
  http-request return status 413 if {{ req.body_size gt {limit} }}
  http-request set-var(txn.got) req.body_len
  http-request return status 408 if {{ req.body_size,sub(txn.got) gt 0 }}
  {read}
  http-request return status 400 hdr x-fault %[var(txn.fault)] if !{{ var(txn.model) -m found }}
  http-request return status 404 if !{{ var(txn.model) -m str right }}
  default_backend b
backend b
  server s 127.0.0.1:{server}
"""


def body(size: int, place: str) -> bytes:
    """A chat request of so many bytes, padded with a prompt that has quotes, escapes and braces in it."""
    twice = {"first": "", "last": "", "nested": "", "twice": '"model": "right", '}[place]
    head = {
        "first": '{"model": "right", "messages": [{"role": "user", "content": "',
        "last": '{"messages": [{"role": "user", "content": "',
        "nested": '{"metadata": {"model": "wrong", "x": [{"model": "wrong"}]}, "messages": [{"role": "user", "content": "',
        "twice": '{"model": "wrong", "messages": [{"role": "user", "content": "',
    }[place]
    tail = '"}], "max_tokens": 1' + ("" if place == "first" else f', {twice}"model": "right"') + "}"
    unit = r"A \"model\": \"wrong\" in {braces} [and] text. "
    room = size - len(head) - len(tail)
    text = (unit * (room // len(unit) + 1))[:room]
    while text.endswith("\\") or text.endswith('"'):
        text = text[:-1]
    return (head + text.ljust(room, ".") + tail).encode()


class Listener(http.server.ThreadingHTTPServer):
    request_queue_size = 1024

    def handle_error(self, *_: object) -> None:
        """HAProxy closes connections that it keeps no longer."""


class Server(http.server.BaseHTTPRequestHandler):
    """The stand-in for vLLM."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        if self.headers.get("Transfer-Encoding"):
            digest = hashlib.sha256()
            while count := int(self.rfile.readline(), 16):
                digest.update(self.rfile.read(count))
                self.rfile.readline()
            self.rfile.readline()
        else:
            digest = hashlib.sha256(self.rfile.read(int(self.headers["Content-Length"])))
        said = digest.hexdigest().encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: object) -> None:
        pass


def free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def by_socket(port: int, content: bytes, chunked: bool) -> tuple[int, str]:
    """Status and body of an answer over HTTP/1.1; status 0 where the connection ends before there is one."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        )
        head += "Transfer-Encoding: chunked\r\n\r\n" if chunked else f"Content-Length: {len(content)}\r\n\r\n"
        try:
            link.sendall(head.encode())
            if chunked:
                for at in range(0, len(content), 8000):
                    part = content[at : at + 8000]
                    link.sendall(b"%x\r\n%s\r\n" % (len(part), part))
                link.sendall(b"0\r\n\r\n")
            else:
                link.sendall(content)
        except OSError:
            pass  # an answer may have come before all was sent
        said = b""
        try:
            while got := link.recv(65536):
                said += got
        except OSError:
            pass
    if not said:
        return 0, ""
    top, _, rest = said.partition(b"\r\n\r\n")
    return int(top.split()[1]), rest.decode()


def by_curl(port: int, file: Path) -> tuple[int, str]:
    command = ["curl", "-s", "--http2-prior-knowledge", "-w", "\n%{http_code}", "--data-binary", f"@{file}"]
    command += ["-H", "Content-Type: application/json", f"http://127.0.0.1:{port}/v1/chat/completions"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said, _, status = done.stdout.rpartition("\n")
    return int(status or 0), said


@dataclass
class Proxy:
    """A running HAProxy with one way to read."""

    way: str
    bufsize: int
    command: list[str]
    server: int
    folder: Path

    def __enter__(self) -> Proxy:
        self.h1, self.h2 = free(), free()
        read = (
            "http-request lua.read_model"
            if self.way == "lua"
            else "http-request set-var(txn.model) req.body,json_query('$.model')"
        )
        text = CONFIG.format(
            bufsize=self.bufsize,
            lua=f"lua-load-per-thread {LUA}" if self.way == "lua" else "",
            h1=self.h1,
            h2=self.h2,
            limit=LIMIT,
            most=LIMIT + 1,
            # Where a body does not fit, 3.0 waits for all of this time.
            wait=2 if self.bufsize < LIMIT else 60,
            read=read,
            server=self.server,
        )
        path = self.folder / "haproxy.cfg"
        path.write_text(text)
        self.process = subprocess.Popen([*self.command, "-db", "-f", str(path)], stderr=subprocess.PIPE, text=True)
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.h1)) == 0:
                    return self
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise SystemExit(f"HAProxy does not start: {self.process.communicate()[1]}")

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def memory(self) -> int:
        """Resident MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) >> 10

    def ask(self, content: bytes, wire: str) -> tuple[int, str]:
        if wire == "h2":
            file = self.folder / "body"
            file.write_bytes(content)
            return by_curl(self.h2, file)
        return by_socket(self.h1, content, wire == "chunked")


def judge(status: int, said: str, content: bytes, place: str) -> str:
    if place == "twice":
        return "right" if status == 400 else f"{status or 'cut off'}"
    if status == 200:
        return "right" if said == hashlib.sha256(content).hexdigest() else "200 with another body"
    return f"{status or 'cut off'}"


def cases(proxy: Proxy, times: int) -> None:
    print(f"\n{proxy.way}, tune.bufsize {proxy.bufsize}\n\n| body | " + " | ".join(PLACES) + " | p50 ms |")
    print("|---|" + "---|" * (len(PLACES) + 1))
    for name, size in SIZES.items():
        row, took = [], []
        for place in PLACES:
            content, seen = body(size, place), Counter()
            assert len(content) == size
            for wire in WIRES:
                for _ in range(times):
                    began = time.monotonic()
                    status, said = proxy.ask(content, wire)
                    if wire == "length" and status == 200:
                        took.append(1000 * (time.monotonic() - began))
                    seen[judge(status, said, content, place)] += 1
            row.append(", ".join(f"{count} {what}" for what, count in seen.most_common()))
        print(f"| {name} | " + " | ".join(row) + f" | {statistics.median(took) if took else 0:.1f} |", flush=True)
    above = body(LIMIT + 1, "last")
    seen = Counter(str(proxy.ask(above, wire)[0] or "cut off") for wire in WIRES for _ in range(times))
    print(
        f"\nA body of 4 MiB and 1 byte: {', '.join(f'{n} {what}' for what, n in seen.most_common())}. Resident at most {proxy.memory()} MiB."
    )


def crowd(proxy: Proxy, count: int, size: int) -> None:
    """So many clients that have all sent all but the last byte of their bodies, then send it."""
    content = body(size, "last")
    links = [socket.create_connection(("127.0.0.1", proxy.h1), timeout=120) for _ in range(count)]
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n".encode()
    )
    # More bytes than the kernel's buffers take need a reader on the other side: HAProxy's buffers are what fills.
    threads = [threading.Thread(target=link.sendall, args=(head + content[:-1],)) for link in links]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(1)
    held = proxy.memory()
    seen: Counter[str] = Counter()
    for link in links:
        link.sendall(content[-1:])
    for link in links:
        said = b""
        try:
            while got := link.recv(65536):
                said += got
        except OSError:
            pass
        seen[said.split(b" ", 2)[1].decode() if said else "cut off"] += 1
        link.close()
    told = ", ".join(f"{n} {what}" for what, n in seen.items())
    print(
        f"{count} bodies of {size >> 10} KiB at once: {told}; {held} MiB resident while all were held, {proxy.memory()} at most; {time.monotonic() - began:.1f} s",
        flush=True,
    )


def keep_asking(proxy: Proxy, content: bytes, waits: list[float], done: threading.Event) -> None:
    """Another client, until it is told that it is done; how long each answer took (ms)."""
    while not done.is_set():
        began = time.monotonic()
        proxy.ask(content, "length")
        waits.append(1000 * (time.monotonic() - began))
        time.sleep(0.005)


def hostile(proxy: Proxy) -> None:
    """Bodies made to keep a parser busy, and how long another client waits meanwhile."""
    for what, unit in (("backslashes in a string", "\\\\"), ("brackets", "[]"), ("short strings", '"",')):
        inner = unit * ((LIMIT - 100) // len(unit))
        text = {"backslashes in a string": f'"{inner}"', "brackets": f"[{inner}]", "short strings": f"[{inner}0]"}[what]
        content = ('{"x": ' + text + ', "model": "right"}').encode()
        small, done = body(1 << 10, "last"), threading.Event()
        waits: list[float] = []

        thread = threading.Thread(target=keep_asking, args=(proxy, small, waits, done))
        thread.start()
        began = time.monotonic()
        status, _ = proxy.ask(content, "length")
        took = 1000 * (time.monotonic() - began)
        done.set()
        thread.join()
        print(
            f"4 MiB of {what}: {status} after {took:.0f} ms; others of 1 KiB meanwhile: p50 {statistics.median(waits):.1f}, at most {max(waits):.0f} ms",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--haproxy", default="/usr/sbin/haproxy", help="the command that runs HAProxy")
    parser.add_argument("--times", type=int, default=3, help="repetitions of each case")
    arguments = parser.parse_args()
    command = shlex.split(arguments.haproxy)
    print(subprocess.run([*command, "-v"], capture_output=True, text=True, check=True).stdout.splitlines()[0])
    server = Listener(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        for way, bufsize in WAYS:
            with Proxy(way, bufsize, command, server.server_port, Path(folder)) as proxy:
                cases(proxy, arguments.times)
                if bufsize > LIMIT:
                    hostile(proxy)
        for count, size in ((200, 200 << 10), (16, 4 << 20), (64, 4 << 20)):
            with Proxy("lua", 5 << 20, command, server.server_port, Path(folder)) as proxy:
                crowd(proxy, count, size)


if __name__ == "__main__":
    main()
