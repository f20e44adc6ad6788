"""The probe against a real HTTP server on loopback that answers rightly, wrongly, or not at all."""

import http.server
import json
import subprocess
import threading
import time

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import probe

KEY = "k" * 32
RIGHT = {"choices": [{"text": " a", "finish_reason": "length"}], "usage": {"completion_tokens": 1}}


class Handler(http.server.BaseHTTPRequestHandler):
    reply = RIGHT
    pause = 0.0

    def do_POST(self):
        self.server.seen = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(self.server.pause)
        status = 200 if self.headers.get("Authorization") == f"Bearer {KEY}" else 401
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(self.server.reply).encode())

    def log_message(self, *_):
        """No lines on the terminal."""


@pytest.fixture
def server():
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.reply, made.pause = RIGHT, 0.0
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    made.url = f"http://127.0.0.1:{made.server_address[1]}"
    yield made
    made.shutdown()
    made.server_close()


def test_right(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be used
    answer = probe.completion(server.url, KEY, "chat")
    assert answer.right
    assert server.seen == {"model": "chat", "prompt": "Hello", "max_tokens": 1, "temperature": 0}


def test_wrong_key(server):
    assert probe.completion(server.url, "x", "chat").status == 401


@pytest.mark.parametrize(
    "reply", [{}, {"choices": []}, [], {**RIGHT, "usage": {"completion_tokens": 0}}, {"choices": [{}], "usage": {}}]
)
def test_wrong_answers(server, reply):
    server.reply = reply
    answer = probe.completion(server.url, KEY, "chat")
    assert answer.status == 200
    assert "instead of one token" in answer.problem


def test_silence_has_a_deadline(server):
    server.pause = 2.0
    answer = probe.completion(server.url, KEY, "chat", deadline=0.3)
    assert "within 0.3 s" in answer.problem
    assert answer.seconds < 1.5


def test_nobody_there():
    answer = probe.completion("http://127.0.0.1:9", KEY, "chat")
    assert answer.status == 0
    assert "refused" in answer.problem


def test_a_server_that_ended_ends_the_wait(tmp_path, monkeypatch):
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setenv("MAINPID", str(ended.pid))
    with pytest.raises(SystemExit, match="ended before it was ready"):
        probe.main(["head", str(tmp_path), "http://127.0.0.1:9", "chat"])


def test_caches_of_a_crashed_start_are_cleared(tmp_path):
    (tmp_path / "inductor").mkdir()
    (tmp_path / "inductor" / "half").write_text("x")
    probe.prepare(str(tmp_path))
    assert (tmp_path / "inductor" / "half").exists(), "a first start clears nothing"
    probe.prepare(str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == [probe.MARK]


def test_a_start_that_got_ready_keeps_its_caches(tmp_path, server, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    (tmp_path / "warm").write_text("x")
    for _ in range(2):
        assert probe.main(["prepare", str(tmp_path)]) == 0
        assert probe.main(["head", str(tmp_path), server.url, "chat"]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["warm"]
