"""What the stand-in does: ranks that find each other over the store port, and a head that answers completions.

Like the real one, it says nothing over HTTP until all ranks are there, wants the key, dies with its peers, and lets
the real cause stand above an echo of it. STANDIN_FAIL_RANK=N with STANDIN_FAIL=TEXT makes rank N die at start, with
STANDIN_FAIL_EARLY=1 before the ranks have met. With STANDIN_HANGS=1 a rank that lost another hangs instead of dying, as the
real one was measured to: /health stays good, completions never come back. SIGUSR1 hangs it alone; SIGUSR2 lets
completions hang while the counters move, as under load. An answer ends after a token, unless ignore_eos is asked for: then it
takes as many seconds as it has tokens beyond one; as a stream, a token a second. STANDIN_SAYS is what it answers, STANDIN_SLOW
the seconds before it.
With --ssl-certfile and --ssl-keyfile it speaks TLS, and with --enable-ssl-refresh it reads them again as the real one does: as often
as the file itself changes, and once more when another one is put in its place.
A file /var/lib/standin/broken lets every start fail (starts.py has others); what is in /var/lib/standin/metrics is said on /metrics, too.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import socket
import ssl
import sys
import threading
import time

from vllm import starts

HUNG, BUSY = threading.Event(), threading.Event()
BROKEN, METRICS = "/var/lib/standin/broken", "/var/lib/standin/metrics"


class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def allowed(self):
        return self.headers.get("Authorization") == f"Bearer {os.environ.get('VLLM_API_KEY')}"

    def do_GET(self):
        if self.path == "/health":
            self.answer(200, {})
        elif self.path == "/metrics":
            self.send_response(200)
            self.end_headers()
            tokens = time.monotonic() if BUSY.is_set() else 1.0
            self.wfile.write(f'vllm:generation_tokens_total{{engine="0"}} {tokens}\n'.encode())
            with contextlib.suppress(OSError), open(METRICS, "rb") as more:
                self.wfile.write(more.read())
        elif self.allowed():
            self.answer(200, {"data": [{"id": self.server.names[0]}]})
        else:
            self.answer(401, {"error": "Unauthorized"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if self.allowed():
            wait = int(body.get("max_tokens", 1)) - 1 if body.get("ignore_eos") else 0
            if body.get("stream"):
                return self.stream(1 + wait)
            self.work(wait)
            self.answer(
                200,
                {
                    "choices": [{"text": os.environ.get("STANDIN_SAYS", " a"), "finish_reason": "length"}],
                    "usage": {"completion_tokens": 1},
                },
            )
        else:
            self.answer(401, {"error": "Unauthorized"})

    def work(self, seconds):
        """What takes so long, and all ranks."""
        until = time.monotonic() + seconds + float(os.environ.get("STANDIN_SLOW", "0"))
        while HUNG.is_set() or BUSY.is_set() or time.monotonic() < until:
            time.sleep(0.1)
        for link in self.server.links:
            link.ask()

    def stream(self, tokens):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for number in range(tokens):
            self.work(number > 0)
            event = {"choices": [{"text": os.environ.get("STANDIN_SAYS", " a")}]}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        """The journal is for what the tests look for."""


class Link:
    """A connection to another rank. Each completion of the head needs an echo of every worker."""

    def __init__(self, connection, head):
        self.connection, self.head = connection, head
        self.turn, self.echoes = threading.Lock(), threading.Semaphore(0)
        threading.Thread(target=self.listen, daemon=True).start()

    def ask(self):
        with self.turn:
            with contextlib.suppress(OSError):
                self.connection.sendall(b"t")
            self.echoes.acquire()

    def listen(self):
        try:
            while self.connection.recv(1):
                if self.head:
                    self.echoes.release()
                elif not HUNG.is_set():
                    self.connection.sendall(b"t")
        except OSError:
            pass
        print("a rank went away", flush=True)
        if not os.environ.get("STANDIN_HANGS"):
            os._exit(0)
        HUNG.set()


def family(address):
    return socket.AF_INET6 if ":" in str(address) else socket.AF_INET


class Server(http.server.ThreadingHTTPServer):
    def __init__(self, address):
        self.address_family = family(address[0])
        super().__init__(address, Handler)

    def speak_tls(self, arguments):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(arguments.ssl_certfile, arguments.ssl_keyfile)
        # The handshake in the thread of the connection: one that never ends one holds up nobody.
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        if arguments.enable_ssl_refresh:
            threading.Thread(target=refresh, args=(context, arguments), daemon=True).start()

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], OSError):  # whose handshake fails, or who goes, is his own affair
            super().handle_error(request, client_address)


def refresh(context, arguments):
    """As inotify sees one file: what is put in its place is not looked at again."""
    known = os.stat(arguments.ssl_certfile)
    while True:
        time.sleep(0.5)
        now = os.stat(arguments.ssl_certfile)
        if (now.st_ino, now.st_mtime_ns) == (known.st_ino, known.st_mtime_ns):
            continue
        context.load_cert_chain(arguments.ssl_certfile, arguments.ssl_keyfile)
        print("Reloading SSL certificate chain", flush=True)
        if now.st_ino != known.st_ino:
            return
        known = now


def meet(arguments):
    """Ranks hold one connection to the head's store port for as long as they live."""
    if arguments.nnodes == 1:
        return []
    if arguments.node_rank:
        while True:
            try:
                connections = [socket.create_connection((arguments.master_addr, arguments.master_port), timeout=5)]
                break
            except OSError:
                time.sleep(0.5)
        connections[0].settimeout(None)
    else:
        store = socket.create_server(("", arguments.master_port), family=family(arguments.master_addr))
        connections = [store.accept()[0] for _ in range(arguments.nnodes - 1)]
    return connections


def agree(arguments, connections):
    """The head serves when every other rank has said that it is ready; from then on all die with any of them."""
    links = []
    for connection in connections:
        if arguments.node_rank:
            connection.sendall(b"r")
        elif not connection.recv(1):
            print("a rank went away", flush=True)
            sys.exit(0)
        links.append(Link(connection, head=not arguments.node_rank))
    return links


def fail():
    """Die as vLLM does: the cause first, an echo of it last."""
    time.sleep(2)
    try:
        raise ValueError(os.environ["STANDIN_FAIL"])
    finally:
        print("RuntimeError: Engine core initialization failed. See root cause above.", file=sys.stderr, flush=True)


def run(arguments):
    print(f"stand-in for vLLM, rank {arguments.node_rank} of {arguments.nnodes}", flush=True)
    signal.signal(signal.SIGUSR1, lambda *_: HUNG.set())
    signal.signal(signal.SIGUSR2, lambda *_: BUSY.clear() if BUSY.is_set() else BUSY.set())
    if os.path.exists(BROKEN):
        raise ValueError("broken by hand")
    starts.look(arguments)
    fails = os.environ.get("STANDIN_FAIL_RANK") == str(arguments.node_rank)
    if fails and "STANDIN_FAIL_EARLY" in os.environ:
        fail()
    connections = meet(arguments)
    if fails:
        fail()
    links = agree(arguments, connections)
    while arguments.headless:  # an endless wait in C would put off the signals
        time.sleep(0.5)
    server = Server((arguments.host, arguments.port))
    server.names, server.links = arguments.served_model_name, links
    if arguments.ssl_certfile and arguments.ssl_keyfile:
        server.speak_tls(arguments)
    print("stand-in ready", flush=True)
    server.serve_forever()


def main():
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    subparsers = (parser := FlexibleArgumentParser(prog="vllm")).add_subparsers(dest="subparser")
    for command in cmd_init():
        command.subparser_init(subparsers).set_defaults(dispatch_function=command.cmd)
    arguments = parser.parse_args(sys.argv[1:])
    arguments.dispatch_function(arguments)
