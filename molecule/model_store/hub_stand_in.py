"""A stand-in for a model hub: serves one repository at one commit, as plugin_utils/hub.py asks for it.

    hub_stand_in.py FOLDER PORT     FOLDER/files: the repository, FOLDER/requests.log: what was asked

It answers the two kinds of request that are made, with digests of its own making, and stops in the middle of
the biggest file the first time, as networks do.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import sys
from pathlib import Path

FOLDER = Path(sys.argv[1])
REPOSITORY, REVISION = "stand-in/model", "0123456789abcdef0123456789abcdef01234567"
BIG = 1 << 20


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers GET alone."""

    cut = False

    def do_GET(self) -> None:
        with (FOLDER / "requests.log").open("a", encoding="utf-8") as log:
            log.write(f"{self.path} {self.headers.get('Range', '')}\n")
        if self.path == f"/api/models/{REPOSITORY}/revision/{REVISION}?blobs=true":
            self.answer(json.dumps({"sha": REVISION, "siblings": [self.describe(p) for p in self.files()]}).encode())
        elif self.path.startswith(f"/{REPOSITORY}/resolve/{REVISION}/"):
            self.send(FOLDER / "files" / self.path.split(f"/{REVISION}/", 1)[1])
        else:
            self.send_error(404)

    def files(self) -> list[Path]:
        return sorted(path for path in (FOLDER / "files").rglob("*") if path.is_file())

    def describe(self, path: Path) -> dict:
        content = path.read_bytes()
        said = {"rfilename": str(path.relative_to(FOLDER / "files")), "size": len(content)}
        said["blobId"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        if len(content) >= BIG:
            said["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        return said

    def send(self, path: Path) -> None:
        content = path.read_bytes()
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        if len(content) >= BIG and not start and not Hub.cut:
            Hub.cut = True
            content = content[: len(content) // 2]
        self.answer(content[start:], 206 if start else 200)

    def answer(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class Server(http.server.ThreadingHTTPServer):
    """Ends by itself when nobody has asked for a while: no test has to remember it."""

    timeout = 90  # seconds

    def handle_timeout(self) -> None:
        raise SystemExit


server = Server(("127.0.0.1", int(sys.argv[2])), Hub)
while True:
    server.handle_request()
