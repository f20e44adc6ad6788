"""Fetching from a model hub, played by a server in this process."""

import hashlib
import http.server
import json
import threading

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.models import ModelError
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import hub

REVISION = "a" * 40
FILES = {
    "config.json": b"{}",
    "sub/tokenizer.json": b"tokens",
    "model.safetensors": b"w" * 300_000,
    "pytorch_model.bin": b"pickle",
}


class Server(http.server.ThreadingHTTPServer):
    """One repository; the attributes say how it misbehaves."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.cut, self.lie, self.elsewhere, self.listed = [], 0, False, None, dict(FILES)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.asked.append((self.path, self.headers.get("Range"), self.headers.get("Authorization")))
        if self.path.startswith("/api/models/org/model/revision/"):
            return self.answer(
                json.dumps({"sha": REVISION, "siblings": list(map(self.describe, server.listed))}).encode()
            )
        content = FILES.get(self.path.partition(f"/resolve/{REVISION}/")[2] or self.path.removeprefix("/store/"))
        if content is None:
            return self.send_error(404)
        if server.elsewhere and "/resolve/" in self.path:
            self.send_response(302)
            self.send_header("Location", f"{server.elsewhere}/store/{self.path.partition(f'/resolve/{REVISION}/')[2]}")
            return self.end_headers()
        if server.lie:
            content = content[:-1] + b"X"
        start = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        if server.cut and len(content) > 1000 and start < len(content) - server.cut:
            content = content[: start + server.cut]
        return self.answer(content[start:], 206 if start else 200)

    def describe(self, path):
        content = FILES.get(path, b"")
        said = {
            "rfilename": path,
            "size": len(content),
            "blobId": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(),
        }
        if len(content) > 1000:
            said["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        return said

    def answer(self, content, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_args):
        pass


@pytest.fixture
def server():
    with Server() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path, server):
    for name in ("HF_TOKEN", "HF_TOKEN_PATH", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")


def fetch():
    return hub.fetch("chat", "org/model", REVISION, False)[:2]


def test_a_look_leaves_the_weights_at_the_hub_and_knows_their_digest(server):
    folder, _notes, absent = hub.fetch("chat", "org/model", REVISION, False, look=True)
    weights = FILES["model.safetensors"]
    assert absent == {"model.safetensors": {"size": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}}
    assert not (folder / "model.safetensors").exists()
    assert (folder / "config.json").read_bytes() == b"{}"
    assert not any("model.safetensors" in path for path, _range, _token in server.asked)
    fetch()
    assert hub.fetch("chat", "org/model", REVISION, False, look=True)[2] == {}


def test_files_come_once_and_pickles_do_not(server):
    folder, notes = fetch()
    got = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert got == {path: content for path, content in FILES.items() if not path.endswith(".bin")}
    assert "pytorch_model.bin left out" in notes[0]
    asked = len(server.asked)
    assert fetch()[0] == folder
    assert len(server.asked) == asked


def test_a_cut_connection_is_continued(server):
    server.cut = 150_000
    folder, _notes = fetch()
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert [span for _path, span, _token in server.asked if span] == ["bytes=150000-"]


def test_a_connection_cut_too_often_is_an_error_and_the_next_run_goes_on(server):
    server.cut = 80_000
    with pytest.raises(ModelError, match=r"model.safetensors did not come .* in 3 attempts"):
        fetch()
    server.cut = 0
    assert (fetch()[0] / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert server.asked[-1][1] == "bytes=240000-"


def test_another_content_than_announced_is_refused_and_not_kept(server):
    server.lie = True
    with pytest.raises(ModelError, match="did not come as"):
        fetch()
    server.lie = False
    assert (fetch()[0] / "config.json").read_bytes() == b"{}"


def test_altered_cache_is_fetched_again(server):
    folder, _notes = fetch()
    (folder / "model.safetensors").write_bytes(b"X" * 300_000)
    (folder / "config.json").write_bytes(b"[]")
    fetch()
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert (folder / "config.json").read_bytes() == b"{}"


def test_the_token_goes_to_the_hub_and_not_where_it_redirects(server, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    with Server() as store:
        threading.Thread(target=store.serve_forever, daemon=True).start()
        server.elsewhere = f"http://127.0.0.1:{store.server_port}"
        folder, _notes = fetch()
        store.shutdown()
    assert (folder / "config.json").read_bytes() == b"{}"
    assert {token for _path, _span, token in server.asked} == {"Bearer secret"}
    assert {token for _path, _span, token in store.asked} == {None}


def test_the_token_of_the_file_is_used(server, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("from-file\n")
    fetch()
    assert server.asked[0][2] == "Bearer from-file"


@pytest.mark.parametrize("revision", ["main", "", "v1.0", "A" * 40, "a" * 39, "0" * 40])
def test_a_moving_revision_is_refused_before_anything_is_asked(server, revision):
    with pytest.raises(ModelError, match=r"not a commit of 40 hex digits|which is no commit"):
        hub.fetch("chat", "org/model", revision, False)
    assert server.asked == []


def test_unknown_repository_and_wrong_name(server):
    with pytest.raises(ModelError, match=r"answered 404 .* Look at name and revision"):
        hub.fetch("chat", "org/other", REVISION, False)
    with pytest.raises(ModelError, match="is no ORGANISATION/NAME"):
        hub.fetch("chat", "https://x/y/z", REVISION, False)


def test_a_hub_that_cannot_be_reached_says_what_to_do(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match="Set HF_ENDPOINT to a mirror, or give the model as a folder"):
        fetch()


@pytest.mark.parametrize("path", ["../evil.safetensors", "/etc/evil.safetensors", "a//b.safetensors"])
def test_a_file_outside_the_folder_is_refused(server, path):
    server.listed = {path: b""}
    with pytest.raises(ModelError, match="outside its folder"):
        fetch()


def test_into_a_folder_a_model_comes_once_continued_and_from_the_cache_where_that_has_it(server, tmp_path):
    into = tmp_path / "carried/chat"
    (into / "sub").mkdir(parents=True)
    (into / "model.safetensors.part").write_bytes(FILES["model.safetensors"][:1000])
    folder, _notes, left = hub.fetch("chat", "org/model", REVISION, False, into=into)
    assert (folder, left) == (into, {})
    assert (into / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    ranges = [told for path, told, _token in server.asked if path.endswith("model.safetensors")]
    assert ranges == ["bytes=1000-"]
    server.asked.clear()
    hub.fetch("chat", "org/model", REVISION, False, into=into)
    assert server.asked == []
    fetch()  # into the cache
    server.asked.clear()
    other = tmp_path / "other/chat"
    hub.fetch("chat", "org/model", REVISION, False, into=other)
    assert server.asked == []
    assert (other / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_the_contents_of_a_repository_are_known_without_fetching_it(server):
    remote, notes = hub.contents("chat", "org/model", REVISION, False)
    assert [item.path for item in remote] == ["config.json", "model.safetensors", "sub/tokenizer.json"]
    assert {item.path: item.size for item in remote}["model.safetensors"] == 300_000
    assert "pytorch_model.bin left out" in notes[0]
    assert [path for path, _range, _token in server.asked if "/resolve/" in path] == []
