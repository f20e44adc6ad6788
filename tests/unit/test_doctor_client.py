"""The doctor as a client, against small servers on the loopback interface: each of the seven errors is told from the others."""

import json
import subprocess
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import conftest  # noqa: F401  makes scripts/gpu_fleet importable
import pytest
from gpu_fleet import doctor_client

LATER = "20990101000000Z"
KEY = "k-3141592653589793"
RIGHT = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "length"}],
    "usage": {},
}


class Server(BaseHTTPRequestHandler):
    """A stand-in for vLLM: /v1/models and /v1/chat/completions, with a key; its subclasses are wrong in one thing."""

    base, key, model, answer, status = "/v1", KEY, "chat", RIGHT, 200
    protocol_version = "HTTP/1.0"

    def log_message(self, *_):
        pass

    def say(self, status, told):
        body = told.encode() if isinstance(told, str) else json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle_any(self, payload=None):
        if self.key and self.headers["Authorization"] != f"Bearer {self.key}":
            return self.say(401, {"error": "Unauthorized"})
        if self.path == f"{self.base}/models":
            return self.say(200, {"object": "list", "data": [{"id": self.model}]})
        if payload and self.path == f"{self.base}/chat/completions":
            return self.say(self.status, self.answer)
        return self.say(404, {"detail": "Not Found"})

    def do_GET(self):
        self.handle_any()

    def do_POST(self):
        self.handle_any(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))


class Unpathed(Server):
    base = "/openai/v1"


class ErrorAsSuccess(Server):
    answer = {"error": {"message": "no replica", "code": 502}}  # noqa: RUF012


class Page(Server):
    answer = "<html>Welcome</html>"


class NoChat(Server):
    """A base model: chat is refused for want of a template."""

    def handle_any(self, payload=None):
        if payload and self.path == "/v1/completions":
            return self.say(200, {"choices": [{"text": " world", "finish_reason": "length"}], "usage": {}})
        if payload and "messages" in payload:
            return self.say(400, {"error": {"message": "default chat template is no longer allowed"}})
        return super().handle_any(payload)


class Narrow(Server):
    """Turns requests away while it has more than two."""

    busy = threading.Semaphore(2)
    gate = threading.Event()

    def handle_any(self, payload=None):
        if not self.busy.acquire(blocking=False):
            return self.say(503, {"error": "too many connections"})
        try:
            self.gate.wait(0.2)
            return super().handle_any(payload)
        finally:
            self.busy.release()


class Refusing(BaseHTTPRequestHandler):
    """A proxy that lets nothing through."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send_response(403)
        self.end_headers()
        self.wfile.write(b"blocked by policy")

    do_POST = do_CONNECT = do_GET


@contextmanager
def running(handler, tls=None):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    if tls:
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in doctor_client.PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """A certificate that names 127.0.0.1, one for another name, one that is out of date; each is its own authority."""
    folder = tmp_path_factory.mktemp("tls")

    ca = folder / "ca.cnf"
    ca.write_text(
        f"[ca]\ndefault_ca=d\n[d]\nnew_certs_dir={folder}\ndatabase={folder}/index\nrand_serial=yes\ndefault_md=sha256\npolicy=p\n"
        "unique_subject=no\ncopy_extensions=copy\n[p]\ncommonName=supplied\n"
    )
    (folder / "index").write_text("")

    def openssl(*arguments):
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)

    def make(name, alternative, until):
        key, request, certificate = (folder / f"{name}.{kind}" for kind in ("key", "csr", "pem"))
        names = ("-subj", f"/CN={name}", "-addext", f"subjectAltName={alternative}")
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", request, *names)
        dates = ("-startdate", "20200101000000Z", "-enddate", until)
        openssl(
            "ca",
            "-config",
            ca,
            "-selfsign",
            "-batch",
            "-keyfile",
            key,
            "-in",
            request,
            "-out",
            certificate,
            "-notext",
            *dates,
        )
        return certificate, key

    return {
        "right": make("right", "IP:127.0.0.1", LATER),
        "other": make("other", "DNS:other.example", LATER),
        "old": make("old", "IP:127.0.0.1", "20200102000000Z"),
    }


def play(url, key=KEY, model="chat", **options):
    return doctor_client.play(url, key, model, timeout=5, parallel=options.pop("parallel", 4), **options)


def cause(told):
    assert len(told["findings"]) <= 1
    return told["findings"][0]["cause_id"] if told["findings"] else "none"


def test_all_is_well():
    with running(Server) as url:
        told = play(f"{url}/v1")
        assert cause(told) == "none"
        assert told["seconds"] is not None
        assert cause(play(f"{url}/v1/chat/completions", model=None)) == "none"


@pytest.mark.parametrize("key", ["", "wrong-key-that-must-not-show"])
def test_key_refused(key):
    with running(Server) as url:
        told = play(f"{url}/v1", key=key)
        assert cause(told) == "client_unauthorized"
        assert not key or key not in json.dumps(told)


def test_a_key_that_the_server_repeats_is_not_shown():
    class Repeats(Server):
        key = "another"

        def say(self, status, told):
            super().say(status, {"error": f"no such key: {self.headers['Authorization']}"})

    with running(Repeats) as url:
        told = play(f"{url}/v1")
        assert cause(told) == "client_unauthorized"
        assert KEY not in json.dumps(told)
        assert "***" in told["findings"][0]["evidence"]


@pytest.mark.parametrize(
    ("handler", "path", "right"), [(Server, "", "/v1"), (Server, "/v1/v1", "/v1"), (Unpathed, "/v1", "/openai/v1")]
)
def test_wrong_path(handler, path, right):
    class Open(handler):
        key = ""

    with running(Open) as url:
        told = play(f"{url}{path}", key="")
        assert cause(told) == "client_wrong_path"
        assert f"Use {url}{right} as" in told["findings"][0]["fix"]


def test_model_not_found():
    with running(Server) as url:
        told = play(f"{url}/v1", model="chatt")
        assert cause(told) == "client_model_not_found"
        assert "Did you mean chat?" in told["findings"][0]["fix"]


@pytest.mark.parametrize("handler", [ErrorAsSuccess, Page])
def test_no_choices(handler):
    with running(handler) as url:
        assert cause(play(f"{url}/v1")) == "client_no_choices"


def test_a_base_model_without_chat_is_no_error():
    with running(NoChat) as url:
        told = play(f"{url}/v1")
        assert cause(told) == "none"
        assert "chat does not work" in told["notes"][0]


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
def test_proxy_in_the_way(monkeypatch, variable):
    with running(Server) as url, running(Refusing) as proxy:
        monkeypatch.setenv(variable.lower() if variable == "HTTP_PROXY" else variable, proxy)
        told = play(f"{url}/v1")
        assert cause(told) == "client_proxy_in_the_way"
        assert "blocked by policy" in told["findings"][0]["evidence"]
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert cause(play(f"{url}/v1")) == "none"


def test_password_of_a_proxy_is_not_shown(monkeypatch):
    with running(Server) as url, running(Refusing) as proxy:
        monkeypatch.setenv("http_proxy", proxy.replace("//", "//user:hunter22@"))
        assert "hunter22" not in json.dumps(play(f"{url}/v1"))


def test_pool_exhausted():
    with running(Narrow) as url:
        told = play(f"{url}/v1", parallel=12)
        assert cause(told) == "client_connection_pool_exhausted"
        assert "of 12 requests" in told["findings"][0]["evidence"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("right", "does not know the authority"),
        ("old", "does not know|out of date"),
        ("other", "another name|does not know"),
    ],
)
def test_tls_of_an_unknown_authority(certificates, name, why):
    import re

    with running(Server, certificates[name]) as url:
        told = play(f"{url}/v1")
        assert cause(told) == "client_tls"
        assert re.search(why, told["findings"][0]["cause"])


@pytest.mark.parametrize(("name", "why"), [("old", "out of date"), ("other", "another name")])
def test_tls_with_its_authority(certificates, name, why):
    with running(Server, certificates[name]) as url:
        told = play(f"{url}/v1", authority=str(certificates[name][0]))
        assert cause(told) == "client_tls"
        assert why in told["findings"][0]["cause"]


def test_tls_that_is_right(certificates):
    with running(Server, certificates["right"]) as url:
        assert cause(play(f"{url}/v1", authority=str(certificates["right"][0]))) == "none"


def test_tls_to_a_plain_port_and_the_other_way_round(certificates):
    with running(Server) as url:
        told = play(f"{url.replace('http:', 'https:')}/v1")
        assert (cause(told), "plain HTTP on this port" in told["findings"][0]["cause"]) == ("client_tls", True)
    with running(Server, certificates["right"]) as url:
        told = play(f"{url.replace('https:', 'http:')}/v1")
        assert (cause(told), "speaks TLS on this port" in told["findings"][0]["cause"]) == ("client_tls", True)


def test_nobody_there():
    with running(Server) as url:
        pass
    assert cause(play(f"{url}/v1")) == "client_cannot_connect"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x/v1", "http://", "http://127.0.0.1:99999/v1"])
def test_no_url(url):
    with pytest.raises(ValueError):
        play(url)
