"""A stand-in for one replica of vLLM and its agent, for the gateway's tests: it says what reached it.

    replica_stand_in.py NAME ADDRESS API_PORT AGENT_PORT KEY [PEM]

The API wants the key, answers any POST with its name, and writes a line a request to /run/NAME.log. A body's `wait` is slept
before the answer, with `stream` one event comes each `wait` seconds, and `status` is that of the answer. The agent's /ready is 503
while /run/NAME.unready is there. With PEM, a certificate and its key, the API speaks TLS; /run/NAME.pem goes before it, and while
/run/NAME.clear is there it starts in clear all the same.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import ssl
import sys
import threading
import time

NAME, ADDRESS, API, AGENT, KEY = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]


class Agent(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if os.path.exists(f"/run/{NAME}.unready") or self.path != "/ready" else 200)
        self.end_headers()

    def log_message(self, *_):
        """Checks are many."""


class Api(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while count := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(count))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def handle_any(self):
        body = self.body()
        told = {"path": self.path, "method": self.command, "headers": dict(self.headers), "size": len(body)}
        with open(f"/run/{NAME}.log", "a", encoding="utf-8") as log:
            log.write(json.dumps(told) + "\n")
        if self.headers.get("Authorization") != f"Bearer {KEY}":
            return self.answer(401, {"replica": NAME})
        asked = json.loads(body or b"{}")
        wait = float(asked.get("wait", 0))
        if asked.get("stream"):
            return self.stream(int(asked["stream"]), wait)
        time.sleep(wait)
        said = {"replica": NAME, "digest": hashlib.sha256(body).hexdigest(), "model": asked.get("model"), **told}
        return self.answer(int(asked.get("status", 200)), said)

    do_GET = do_POST = do_PUT = do_DELETE = handle_any

    def answer(self, status, body):
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Organization", NAME)
        self.end_headers()
        self.wfile.write(content)

    def stream(self, count, wait):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(count):
            event = f"data: {number} {time.time()}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
            self.wfile.flush()
            time.sleep(wait)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_):
        """What came is in the file."""


class Listener(http.server.ThreadingHTTPServer):
    request_queue_size = 1024


threading.Thread(target=Listener((ADDRESS, AGENT), Agent).serve_forever, daemon=True).start()
served = Listener((ADDRESS, API), Api)
if len(sys.argv) > 6 and not os.path.exists(f"/run/{NAME}.clear"):
    speaking = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    other = f"/run/{NAME}.pem"
    speaking.load_cert_chain(other if os.path.exists(other) else sys.argv[6])
    # The handshake in the thread of the connection: one that never ends one holds up nobody.
    served.socket = speaking.wrap_socket(served.socket, server_side=True, do_handshake_on_connect=False)
served.serve_forever()
