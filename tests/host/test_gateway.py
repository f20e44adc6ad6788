"""The gateway, asked as clients ask it, and as nobody should. The replicas behind are stand-ins that say what reached them.

The tests run in order; those at the end change the gateway, and leave it as they found it.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import http.client
import itertools
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import secrets_search
import testinfra
import yaml
from faults import Cut

ROOT = Path(__file__).resolve().parents[2]
EPHEMERAL = Path(os.environ["MOLECULE_INVENTORY_FILE"]).parents[1]
INVENTORY = EPHEMERAL / "inventory"
ALL, CHAT, EXPIRED = (
    "client-all-client-all-client-all",
    "client-chat-client-chat-client-chat",
    "client-expired-client-expired-1",
)
SLOW, TWO = "client-slow-client-slow-client-1", "client-two-client-two-client-two"
SERVICE_KEYS = ("chat-key-chat-key-chat-key-chat-key", "other-key-other-key-other-key-other")
PORT = 8443
PROMPT = "a prompt that nobody may keep"


def address(name: str) -> str:
    told = yaml.safe_load((INVENTORY / "lab.yml").read_text())
    found = [hosts[name]["ansible_host"] for hosts in _hosts(told) if name in hosts]
    return found[0]


def _hosts(node):
    if isinstance(node, dict):
        if isinstance(node.get("hosts"), dict):
            yield {name: values or {} for name, values in node["hosts"].items() if values}
        for value in node.values():
            yield from _hosts(value)


GATEWAY = address("gw-01")


@pytest.fixture(scope="module")
def hosts():
    return {
        n: testinfra.get_host(f"ansible://{n}?ansible_inventory={INVENTORY}") for n in ("gpu-01", "gpu-02", "gw-01")
    }


def trusting() -> ssl.SSLContext:
    """A client that knows the fleet's CA alone."""
    return ssl.create_default_context(cafile=str(EPHEMERAL / "secrets" / "ca.pem"))


Answer = collections.namedtuple("Answer", "status headers body")


def ask(body=None, key=ALL, path="/v1/completions", method="POST", headers=None) -> Answer:
    link = http.client.HTTPSConnection(GATEWAY, PORT, timeout=60, context=trusting())
    told = {
        "Content-Type": "application/json",
        **({"Authorization": f"Bearer {key}"} if key else {}),
        **(headers or {}),
    }
    body = json.dumps({"prompt": PROMPT, **body}).encode() if isinstance(body, dict) else body
    try:
        link.request(method, path, body, told)
        reply = link.getresponse()
        return Answer(reply.status, dict(reply.getheaders()), reply.read())
    finally:
        link.close()


def raw(content: bytes, patience: float = 60) -> bytes:
    """What comes back for these bytes, until the gateway ends the connection."""
    with trusting().wrap_socket(
        socket.create_connection((GATEWAY, PORT), timeout=patience), server_hostname=GATEWAY
    ) as link:
        said = b""
        try:
            link.sendall(content)
            while part := link.recv(65536):
                said += part
        except OSError:
            pass
        return said


def head(*lines: str, key: str = ALL, path: str = "/v1/completions") -> bytes:
    told = [f"POST {path} HTTP/1.1", f"Host: {GATEWAY}", f"Authorization: Bearer {key}", "Connection: close", *lines]
    return "\r\n".join([*told, "", ""]).encode()


def reached(hosts) -> list[dict]:
    """Every request that reached a replica."""
    lines = [hosts[name].run("cat /run/*.log 2>/dev/null").stdout.splitlines() for name in ("gpu-01", "gpu-02")]
    return [json.loads(line) for text in lines for line in text]


def wait(so, otherwise, seconds=60.0):
    end = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < end, otherwise
        time.sleep(0.3)


def play(name: str, **variables) -> str:
    """A playbook of the collection on this lab; what it printed."""
    command = [
        f"{Path(sys.executable).parent}/ansible-playbook",
        name,
        "-i",
        str(INVENTORY),
        "-e",
        json.dumps(variables),
    ]
    told = {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections")}
    done = subprocess.run(command, env={**os.environ, **told}, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return " ".join(done.stdout.split())


def test_a_request_goes_to_the_service_of_its_model_with_the_services_own_key(hosts):
    for model, service in (("chat", "chat"), ("org/chat", "chat"), ("other", "other")):
        answer = ask({"model": model})
        told = json.loads(answer.body)
        assert (answer.status, told["replica"].split(".")[0]) == (200, service)
        assert told["headers"]["authorization"] == f"Bearer {SERVICE_KEYS[service == 'other']}"
    assert not any(key in json.dumps(reached(hosts)) for key in (ALL, CHAT))


def test_requests_are_spread_over_the_replicas():
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        told = list(pool.map(lambda _: json.loads(ask({"model": "chat", "wait": 0.5}).body)["replica"], range(8)))
    assert set(told) == {"chat.0", "chat.1"}


def test_headers_that_mean_something_to_the_server_end_here():
    strange = {
        "X-Data-Parallel-Rank": "1",
        "X-Forwarded-For": "192.0.2.1",
        "X-Request-Id": "mine",
        "Cookie": "a=b",
        "X-Api-Key": "x",
        "User-Agent": "test",
    }
    answer = ask({"model": "chat"}, headers=strange, path="/v1/completions?x=/metrics")
    told = json.loads(answer.body)
    assert set(told["headers"]) == {
        "host",
        "content-type",
        "content-length",
        "user-agent",
        "x-request-id",
        "authorization",
        "connection",
    }
    assert told["headers"]["x-request-id"] == answer.headers["x-request-id"] != "mine"
    assert told["path"] == "/v1/completions"


def test_models_of_the_whole_fleet():
    listed = json.loads(ask(method="GET", path="/v1/models").body)
    assert [model["id"] for model in listed["data"]] == ["chat", "org/chat", "other"]
    assert json.loads(ask(method="GET", path="/v1/models/org%2Fchat").body)["id"] == "org/chat"
    assert ask(method="GET", path="/v1/models/none").status == 404
    assert ask(method="GET", path="/v1/models", key=None).status == 401


def body_of(size: int, where: str) -> bytes:
    first, last = ('"model": "chat", ', "") if where == "first" else ("", ', "model": "chat"')
    nested = '"metadata": {"model": "other"}, ' if where == "nested" else ""
    text = "{" + first + nested + '"prompt": "%s"' + last + "}"
    return (
        text
        % (r"\"model\": \"other\" " * (size // 20))[: size - len(text) + 2]
        .rstrip("\\")
        .ljust(size - len(text) + 2, ".")
    ).encode()


@pytest.mark.parametrize("size", [1 << 10, 200 << 10, 4 << 20])
def test_the_model_is_found_wherever_it_stands(size, tmp_path):
    for where in ("first", "last", "nested"):
        content = body_of(size, where)
        json.loads(content)
        (tmp_path / "body").write_bytes(content)
        curl = ["curl", "-sS", "--cacert", str(EPHEMERAL / "secrets/ca.pem"), "--data-binary", f"@{tmp_path / 'body'}"]
        curl += ["-w", "\n%{http_version} %{http_code}", "-H", f"Authorization: Bearer {ALL}"]
        for more, version in (
            (["--http2"], "2"),
            (["--http1.1", "-H", "Transfer-Encoding: chunked"], "1.1"),
            (["--http1.1"], "1.1"),
        ):
            done = subprocess.run(
                [*curl, *more, f"https://{GATEWAY}:{PORT}/v1/completions"], capture_output=True, text=True, check=False
            )
            told, _, status = done.stdout.rpartition("\n")
            assert status == f"{version} 200", done
            assert json.loads(told)["replica"].startswith("chat.")
            assert json.loads(told)["size"] == len(content)


# What is sent, and the status that refuses it. Nothing of it may reach a replica.
BAD_KEYS = [
    ("", 401),
    ("x" * 32, 401),
    (EXPIRED, 401),
    (ALL[:-1], 401),
    (ALL.upper(), 401),
    (f"{ALL} {CHAT}", 401),
    (f"{ALL},", 401),
]
BAD_PATHS = [
    "/metrics", "/pause", "/invocations", "/health", "/version", "/load", "/docs", "/openapi.json", "/ping", "/score", "/rerank",
    "/v1", "/v1/", "/v1/completions/", "//v1/completions", "/v1//completions", "/v1/./completions", "/v1/../v1/completions",
    "/v1/completions%2f", "/v1/%63ompletions", "/V1/completions", "/v1/completions;x", "/v1/completions%00", "/v1/audio/speech",
    "/v1/completions/../../metrics", "/%2e%2e/metrics", "/v1/load_lora_adapter",
]  # fmt: skip
BAD_BODIES = [
    (b"", 400),
    (b"hello", 400),
    (b"[]", 400),
    (b'"chat"', 400),
    (b"{}", 400),
    (b'{"model": "chat"', 400),
    (b'{"model": "chat"} {"model": "other"}', 400),
    (b'{"model": "chat", "model": "other"}', 400),
    (b'{"model": "chat", "mod\\u0065l": "other"}', 400),
    (b'{"model": ["chat"]}', 400),
    (b'{"model": null}', 400),
    (b'{"metadata": {"model": "chat"}}', 400),
    (b"\xef\xbb\xbf" + b'{"model": "chat"}', 400),
    ('{"model": "chat"}'.encode("utf-16"), 400),
    (b'{"model": "none"}', 404),
    (b'{"model": ""}', 404),
    (b'{"model": "chat "}', 404),
    (b'{"model": "CHAT"}', 404),
    (b'{"model": "chat/../other"}', 404),
    (b'{"model": "chat\\u0000"}', 404),
    (b'{"model": "' + b"a" * 500 + b'"}', 404),
    (b'{"p": "' + b"x" * (4 << 20) + b'", "model": "chat"}', 413),
]
OK_BODY = b'{"model": "chat"}'
SIZED = f"Content-Length: {len(OK_BODY)}"
SMUGGLED = b"POST /pause HTTP/1.1\r\nHost: x\r\n\r\n"
RAW = [
    (head(SIZED, "Content-Length: 3") + OK_BODY, b"400"),
    (head("Content-Length: -1") + OK_BODY, b"400"),
    (head("Content-Length: 1e1") + OK_BODY, b"400"),
    (head("Transfer-Encoding: chunked", "Transfer-Encoding: identity") + OK_BODY, b"4"),
    (head("Transfer-Encoding: xchunked", SIZED) + OK_BODY, b"4"),
    (head("Transfer-Encoding: chunked") + b"zz\r\n" + OK_BODY + b"\r\n0\r\n\r\n" + SMUGGLED, b"4"),
    (head(SIZED, "X Y: z") + OK_BODY, b"400"),
    (head(SIZED, " folded: z") + OK_BODY, b"4"),
    (head(SIZED, f"Authorization: Bearer {CHAT}") + OK_BODY, b"401"),
    (head(SIZED, path="http://elsewhere/v1/completions") + OK_BODY, b"400"),
    (head(SIZED).replace(b"HTTP/1.1", b"HTTQ/1.1") + OK_BODY, b"400"),
    (head(SIZED).replace(b"POST", b"PO ST") + OK_BODY, b"400"),
    (b"\x16\x03\x01\x00" * 20, b"400"),
    (head("Content-Length: 1000") + OK_BODY, b"408"),
]


def shaped(body: bytes) -> bool:
    """As OpenAI's API shapes an error."""
    told = json.loads(body)["error"]
    return bool(told["message"]) and {"type", "param", "code"} <= set(told)


def test_what_should_not_pass_is_refused_in_the_shape_of_openai_and_reaches_nobody(hosts):
    before = len(reached(hosts))
    cases = [((OK_BODY, key, "/v1/completions", "POST"), status) for key, status in BAD_KEYS]
    cases += [((OK_BODY, ALL, path, "POST"), 404) for path in BAD_PATHS]
    cases += [((body, ALL, "/v1/completions", "POST"), status) for body, status in BAD_BODIES]
    cases += [((OK_BODY, ALL, "/v1/completions", method), 405) for method in ("GET", "PUT", "DELETE", "OPTIONS")]
    cases += [
        ((b'{"model": "other"}', CHAT, "/v1/completions", "POST"), 403),
        ((OK_BODY, ALL, "/v1/models", "POST"), 405),
    ]
    wrong = []
    for arguments, status in cases:
        answer = ask(*arguments)
        if answer.status != status or not shaped(answer.body):
            wrong.append((arguments[0][:60], *arguments[1:], answer.status, answer.body[:200]))
    for content, status in RAW:
        said = raw(content)
        if not said.startswith(b"HTTP/1.1 " + status) or b"200 OK" in said:
            wrong.append((content[:200], said[:200]))
    assert wrong == []
    assert len(cases) + len(RAW) >= 60
    assert len(reached(hosts)) == before
    assert "chat, org/chat, other" in json.loads(ask(b'{"model": "none"}').body)["error"]["message"]


def test_a_message_with_both_lengths_is_one_message(hosts):
    """RFC 9112, 6.3: the chunks count. What follows them is no request, since the connection ends."""
    before = len(reached(hosts))
    said = raw(
        head("Content-Length: 4", "Transfer-Encoding: chunked") + b"11\r\n" + OK_BODY + b"\r\n0\r\n\r\n" + SMUGGLED
    )
    assert said.count(b"HTTP/1.1 ") == 1
    assert all(told["path"] == "/v1/completions" for told in reached(hosts)[before:])


def test_who_sends_slowly_is_cut_off_and_holds_up_nobody():
    began = time.monotonic()
    assert raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: b").startswith(b"HTTP/1.1 408")
    assert time.monotonic() - began < 40  # gateway_header_deadline is 8 s here


def test_headers_without_end_are_refused(hosts):
    assert raw(head(SIZED, *(f"X-{n}: a" for n in range(200))) + OK_BODY).startswith(b"HTTP/1.1 4")
    assert ask({"model": "chat"}).status == 200


def test_a_stream_comes_event_by_event():
    link = http.client.HTTPSConnection(GATEWAY, PORT, timeout=60, context=trusting())
    link.request(
        "POST",
        "/v1/completions",
        json.dumps({"model": "chat", "stream": 6, "wait": 0.5}),
        {"Authorization": f"Bearer {ALL}"},
    )
    reply = link.getresponse()
    assert reply.headers["Content-Type"] == "text/event-stream"
    seen = []
    while line := reply.readline():
        if line.startswith(b"data: "):
            seen.append(time.monotonic())
    assert len(seen) == 6
    assert seen[-1] - seen[0] > 2.0, "events were kept back and came together"
    assert min(after - before for before, after in itertools.pairwise(seen)) > 0.1


def test_limits_of_a_key():
    statuses = [ask({"model": "chat"}, key=SLOW).status for _ in range(5)]
    assert statuses == [200, 200, 200, 429, 429]
    refused = ask({"model": "chat"}, key=SLOW)
    assert int(refused.headers["retry-after"]) > 0
    assert shaped(refused.body)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        statuses = sorted(pool.map(lambda _: ask({"model": "chat", "wait": 3}, key=TWO).status, range(4)))
    assert statuses == [200, 200, 429, 429]
    assert ask({"model": "chat"}, key=TWO).status == 200


def test_what_waits_too_long_for_a_replica_is_told_to_come_again():
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: ask({"model": "other", "wait": 6}), range(2)))
    assert sorted(answer.status for answer in answers) == [200, 429]
    refused = next(answer for answer in answers if answer.status == 429)
    assert refused.headers["retry-after"] == "5"
    assert shaped(refused.body)


def test_a_replica_whose_probe_fails_gets_nothing_and_a_model_without_any_says_so(hosts):
    hosts["gpu-01"].check_output("touch /run/chat.0.unready /run/other.0.unready")
    try:
        for name in ("chat.0", "other.0"):
            wait(
                lambda name=name: show(hosts, "status")[name].startswith("DOWN"),
                f"{name} is in although its probe fails",
            )
        assert ask({"model": "other"}).status == 503
        assert {json.loads(ask({"model": "chat"}).body)["replica"] for _ in range(4)} == {"chat.1"}
        assert shaped(ask({"model": "other"}).body)
        assert "retry-after" in ask({"model": "other"}).headers
    finally:
        hosts["gpu-01"].check_output("rm /run/chat.0.unready /run/other.0.unready")
    wait(lambda: ask({"model": "other"}).status == 200, "other.0 did not come back")


def test_requests_on_a_host_that_is_cut_off_are_ended_and_the_others_go_on(hosts):
    """Nothing tells of their end there: without a look at the connection they would wait for gateway_answer_deadline."""
    wait(lambda: show(hosts, "status")["chat.0"] == "UP" == show(hosts, "status")["chat.1"], "not both are in")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        running = [pool.submit(_timed, {"model": "chat", "wait": 45}) for _ in range(2)]  # one on each replica
        wait(lambda: show(hosts, "scur")["chat.0"] == "1" == show(hosts, "scur")["chat.1"], "the two are not spread")
        with Cut(int(hosts["gpu-02"].check_output("cat /sys/class/net/host0/iflink"))):
            began = time.monotonic()
            (ended,) = concurrent.futures.wait(running, 30, concurrent.futures.FIRST_COMPLETED).done
            answer, when = ended.result()
            assert answer.status == 502
            assert shaped(answer.body)
            assert when - began < 30
            assert {json.loads(ask({"model": "chat"}).body)["replica"] for _ in range(4)} == {"chat.0"}
        (other,) = [future for future in running if future is not ended]
        assert other.result()[0].status == 200
    wait(lambda: show(hosts, "status")["chat.1"] == "UP", "chat.1 did not come back")


def _timed(body):
    return ask(body), time.monotonic()


def test_what_a_replica_says_of_the_services_key_is_not_told_as_the_clients_fault():
    answer = ask({"model": "chat", "status": 401})
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (503, "replica_key")
    assert answer.headers["retry-after"] == "1"
    assert ask({"model": "chat", "status": 400}).status == 400


def test_many_connections_of_one_client_shut_out_nobody_else(hosts):
    links = []
    for _ in range(1200):
        with contextlib.suppress(ConnectionResetError):  # what is beyond gateway_source_maxconn is closed at once
            links.append(socket.create_connection((GATEWAY, PORT), timeout=30))
    try:
        code = (
            "import http.client,ssl;c=http.client.HTTPSConnection('%s',%d,timeout=30,context=ssl._create_unverified_context());"
            "c.request('GET','/v1/models',headers={'Authorization':'Bearer %s'});print(c.getresponse().status)"
        )
        assert hosts["gpu-02"].check_output(f'python3 -c "{code % (GATEWAY, PORT, ALL)}"') == "200"
    finally:
        for link in links:
            link.close()
    wait(_alive, "it does not answer any more")


# So many connections from one address, kept open without a word; how many of them are still open at the end.
HERD = """
import resource, socket, sys, time
gateway, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
links = []
for _ in range(count):
    try:
        links.append(socket.create_connection((gateway, port), timeout=30))
    except OSError:
        pass
print('open', flush=True)
time.sleep(3)
kept = 0
for link in links:
    link.setblocking(False)
    try:
        link.recv(1)
    except BlockingIOError:
        kept += 1
    except OSError:
        pass
print(kept)
"""


def test_ten_thousand_connections_are_no_more_than_are_let_in_and_others_go_on(hosts):
    gateway = hosts["gw-01"]
    pid = gateway.check_output("pgrep -u haproxy -x haproxy")
    for name in ("gpu-01", "gpu-02"):
        hosts[name].check_output(f"cat > /run/herd.py <<'END'\n{HERD}\nEND")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        herds = [
            pool.submit(
                lambda: (
                    subprocess.run(
                        [sys.executable, "-c", HERD, GATEWAY, str(PORT), "4000"],
                        capture_output=True,
                        text=True,
                        check=True,
                    ).stdout
                )
            )
        ]
        for name in ("gpu-01", "gpu-02"):
            herds.append(
                pool.submit(lambda name=name: hosts[name].check_output(f"python3 /run/herd.py {GATEWAY} {PORT} 3000"))
            )
        # A client at another address, the gateway's own, while they come.
        code = (
            "import http.client,ssl;c=http.client.HTTPSConnection('%s',%d,timeout=30,context=ssl._create_unverified_context());"
            "c.request('GET','/v1/models',headers={'Authorization':'Bearer %s'});print(c.getresponse().status)"
        )
        statuses = []
        while not all(herd.done() for herd in herds):
            statuses.append(gateway.check_output(f'python3 -c "{code % (GATEWAY, PORT, ALL)}"'))
    kept = [int(herd.result().split()[-1]) for herd in herds]
    assert statuses
    assert set(statuses) == {"200"}
    assert all(count <= 1000 for count in kept), kept  # gateway_source_maxconn
    assert int(show(hosts, "smax")["FRONTEND"]) <= 4000  # gateway_maxconn
    wait(_alive, "it does not answer any more")
    assert gateway.check_output("pgrep -u haproxy -x haproxy") == pid


def _alive() -> bool:
    try:
        return ask({"model": "chat"}).status == 200
    except OSError:
        return False


def test_the_log_says_who_asked_for_what_and_no_more(hosts):
    lines = hosts["gw-01"].check_output("journalctl -t gpu-fleet-gateway -o cat --no-pager").splitlines()
    told = [json.loads(line) for line in lines if line.startswith("{")]
    right = [entry for entry in told if entry["status"] == 200 and entry["path"] == "/v1/completions"]
    assert {entry["key"] for entry in right} >= {"all", "slow", "two"}
    assert {entry["model"] for entry in right} == {"chat", "org/chat", "other"}
    assert all(entry["total_ms"] >= 0 and entry["replica"].split(".")[0] in ("chat", "other") for entry in right)
    everything = hosts["gw-01"].check_output("journalctl -o cat --no-pager")
    for secret in (ALL, CHAT, SLOW, TWO, EXPIRED, *SERVICE_KEYS, PROMPT, "/metrics"):
        assert secret not in everything


def test_keys_of_clients_are_on_no_host_and_those_of_services_for_the_gateway_alone(hosts):
    gateway = hosts["gw-01"]
    made = (EPHEMERAL / "secrets/keys/made").read_text().strip()
    assert len(made) >= 43
    assert ((EPHEMERAL / "secrets/keys/made").stat().st_mode & 0o777) == 0o600
    assert ask({"model": "chat"}, key=made).status == 200
    for key in (ALL, CHAT, SLOW, TWO, made):
        assert gateway.run(f"grep -rqs -e {key} /etc /run /var /usr/local /tmp").rc == 1
    assert (
        gateway.check_output(f"grep -rls -e {SERVICE_KEYS[0]} /etc /run /var /usr/local /tmp")
        == "/etc/gpu_fleet/gateway/services.map"
    )
    for name in ("services.map", "keys.map", "tls.pem"):
        file = gateway.file(f"/etc/gpu_fleet/gateway/{name}")
        assert (file.mode, file.user, file.group) == (0o640, "root", "haproxy")
    assert not any(key in gateway.check_output("ps axww -o args") for key in (*SERVICE_KEYS, ALL))


def test_the_unit_is_hardened_and_the_packages_own_is_off(hosts):
    said = hosts["gw-01"].check_output("systemd-analyze security --no-pager gpu-fleet-gateway.service").splitlines()[-1]
    assert float(said.split(": ")[1].split()[0]) <= 3.0
    assert not hosts["gw-01"].service("haproxy").is_running


def show(hosts, what):
    """A column of HAProxy's `show stat` by server."""
    code = (
        "import socket;s=socket.socket(socket.AF_UNIX);s.connect('/run/gpu-fleet-gateway/admin.sock');"
        "s.sendall(b'show stat\\n');print(s.makefile().read())"
    )
    lines = [
        line.split(",") for line in hosts["gw-01"].check_output(f'python3 -c "{code}"').splitlines() if line.strip()
    ]
    column = lines[0].index(what)
    return {row[1]: row[column] for row in lines[1:] if len(row) > column}


def test_a_drained_replica_finishes_what_it_has_and_gets_nothing_new(hosts):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = [pool.submit(ask, {"model": "chat", "wait": 25}) for _ in range(2)]  # one on each replica
        wait(lambda: show(hosts, "scur")["chat.0"] == "1" == show(hosts, "scur")["chat.1"], "the two are not spread")
        play(f"{ROOT}/playbooks/drain.yml", drain_instances=["chat.0"])
        assert [future.result().status for future in running] == [200, 200]
    assert show(hosts, "status")["chat.0"] == "DRAIN"
    assert show(hosts, "scur")["chat.0"] == "0"
    assert {json.loads(ask({"model": "chat"}).body)["replica"] for _ in range(6)} == {"chat.1"}


def test_a_reload_and_a_restart_keep_what_is_drained_and_cut_off_nobody(hosts):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, {"model": "chat", "wait": 5})
        wait(lambda: show(hosts, "scur")["chat.1"] == "1", "nothing runs")
        hosts["gw-01"].check_output("systemctl reload gpu-fleet-gateway")
        assert ask({"model": "other"}).status == 200
        assert running.result().status == 200
    assert show(hosts, "status")["chat.0"] == "DRAIN"
    hosts["gw-01"].check_output("systemctl restart gpu-fleet-gateway")
    assert show(hosts, "status")["chat.0"] == "DRAIN"
    assert ask({"model": "chat"}).status == 200


def test_admitted_again_it_gets_requests(hosts):
    play(f"{ROOT}/playbooks/drain.yml", drain_instances=["chat.0"], drain_state="admitted")
    assert show(hosts, "status")["chat.0"] == "UP"
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        told = list(pool.map(lambda _: json.loads(ask({"model": "chat", "wait": 0.5}).body)["replica"], range(8)))
    assert set(told) == {"chat.0", "chat.1"}


def test_a_change_takes_its_replica_aside_and_the_next_run_repairs_one_that_was_cut_short(hosts, tmp_path):
    """As a play on a replica's hosts does it, around its restart; here one that ends in between."""
    steps = "[{include_role: {name: gpu_fleet.vllm.gateway, tasks_from: aside.yml}}]"
    text = f"- import_playbook: gpu_fleet.vllm.validate\n- {{hosts: gpu_hosts, gather_facts: false, tasks: {steps}}}\n"
    (tmp_path / "aside.yml").write_text(text)
    play(str(tmp_path / "aside.yml"), gateway_aside_replica="chat.1", gateway_aside_state="drained")
    play(f"{ROOT}/playbooks/drain.yml", drain_instances=["other.0"], vllm_service_allow_outage=True)
    assert show(hosts, "status")["chat.1"] == show(hosts, "status")["other.0"] == "DRAIN"
    play(f"{ROOT}/molecule/gateway/converge.yml")
    assert show(hosts, "status")["chat.1"] == "UP"
    assert show(hosts, "status")["other.0"] == "DRAIN", "what an operator drained is let in by nobody else"
    play(f"{ROOT}/playbooks/drain.yml", drain_instances=["other.0"], drain_state="admitted")
    assert ask({"model": "other"}).status == 200


AT = {"chat.0": ("gpu-01", 8000), "chat.1": ("gpu-02", 8000), "other.0": ("gpu-01", 8100)}


def spoken(hosts) -> dict[str, str]:
    """How each replica is spoken to, as HAProxy says: 1 by TLS."""
    lines = hosts["gw-01"].check_output(
        "python3 -c \"import socket;s=socket.socket(socket.AF_UNIX);s.connect('/run/gpu-fleet-gateway/admin.sock');"
        "s.sendall(b'show servers state\\n');print(s.makefile().read())\""
    )
    head, *rows = [line.split() for line in lines.splitlines() if len(line.split()) > 6]
    return {row[3]: row[head.index("srv_use_ssl") - 1] for row in rows}


def lines_of(hosts, name) -> int:
    return int(hosts[AT[name][0]].check_output(f"cat /run/{name}.log 2>/dev/null | wc -l"))


def standin(hosts, name, *steps) -> None:
    """The stand-in of a replica, started anew after some steps on its host."""
    for step in steps:
        hosts[AT[name][0]].check_output(step)
    hosts[AT[name][0]].check_output(f"systemctl restart standin-{name}")


def in_again(hosts, name) -> None:
    wait(lambda: show(hosts, "status")[name] == "UP", f"{name} is not in")


def test_replicas_on_other_hosts_are_asked_by_tls_alone(hosts):
    assert set(spoken(hosts).values()) == {"1"}
    host, port = AT["chat.1"]
    link = http.client.HTTPConnection(address(host), port, timeout=10)
    with pytest.raises((OSError, http.client.HTTPException)), contextlib.closing(link):
        link.request("GET", "/v1/models", headers={"Authorization": f"Bearer {SERVICE_KEYS[0]}"})
        link.getresponse()
    link = http.client.HTTPSConnection(address(host), port, timeout=10, context=trusting())
    with contextlib.closing(link):
        link.request("GET", "/v1/models", headers={"Authorization": f"Bearer {SERVICE_KEYS[0]}"})
        assert link.getresponse().status == 200
    assert ask({"model": "chat"}).status == 200
    ca = hosts["gw-01"].file("/etc/gpu_fleet/gateway/ca.pem")
    assert (ca.mode, ca.content_string) == (0o644, (EPHEMERAL / "secrets/ca.pem").read_text())
    assert "PRIVATE" not in ca.content_string


@pytest.mark.parametrize("wrong", ["another CA", "another host", "in clear"])
def test_a_server_that_is_not_the_replica_gets_no_request_and_no_key(hosts, wrong):
    """It listens where the replica did, and its agent is well: only what it shows says that it is another one."""
    if wrong == "another CA":
        step = "cp /run/strange.pem /run/chat.0.pem"
    elif wrong == "another host":
        folder = EPHEMERAL / "secrets/vllm"  # a host of the fleet that poses as another one
        text = "".join((folder / f"gpu-02.{kind}").read_text() for kind in ("key", "pem"))
        step = f"printf %s '{text}' > /run/chat.0.pem"
    else:
        step = "touch /run/chat.0.clear"
    standin(hosts, "chat.0", step)
    try:
        in_again(hosts, "chat.0")
        before = lines_of(hosts, "chat.0")
        assert [json.loads(ask({"model": "chat"}).body)["replica"] for _ in range(6)] == ["chat.1"] * 6
        assert lines_of(hosts, "chat.0") == before
        hosts["gpu-02"].check_output("touch /run/chat.1.unready")
        wait(lambda: show(hosts, "status")["chat.1"].startswith("DOWN"), "chat.1 is in although its probe fails")
        refused = ask({"model": "chat"})  # nobody took it, which is told like a full queue
        assert (refused.status, shaped(refused.body)) == (429, True)
        assert lines_of(hosts, "chat.0") == before
    finally:
        hosts["gpu-02"].check_output("rm -f /run/chat.1.unready")
        standin(hosts, "chat.0", "rm -f /run/chat.0.pem /run/chat.0.clear")
        in_again(hosts, "chat.1")
        in_again(hosts, "chat.0")


def test_each_replica_is_spoken_to_as_it_does_while_they_change_and_no_request_fails(hosts, tmp_path):
    """As role vllm_service does it around each restart. In between one speaks TLS and the other one does not, over a reload, too."""
    steps = "[{include_role: {name: gpu_fleet.vllm.gateway, tasks_from: aside.yml}}]"
    text = f"- import_playbook: gpu_fleet.vllm.validate\n- {{hosts: gpu_hosts, gather_facts: false, tasks: {steps}}}\n"
    (tmp_path / "aside.yml").write_text(text)

    def change(name, tls):
        told = {"gateway_aside_replica": name, "gateway_aside_tls": tls}
        play(str(tmp_path / "aside.yml"), gateway_aside_state="drained", **told)
        standin(hosts, name, f"{'rm -f' if tls else 'touch'} /run/{name}.clear")
        play(str(tmp_path / "aside.yml"), gateway_aside_state="admitted", **told)

    over, failed, served = threading.Event(), [], collections.Counter()

    def ask_on():
        while not over.is_set():
            try:
                answer = ask({"model": "chat"})
            except (OSError, http.client.HTTPException) as error:  # else it ends its thread, and nobody hears of it
                failed.append((time.strftime("%T"), error))
                continue
            if answer.status != 200:
                failed.append((time.strftime("%T"), answer))
            else:
                served[json.loads(answer.body)["replica"]] += 1
            time.sleep(0.05)

    threads = [threading.Thread(target=ask_on) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        change("chat.0", False)
        assert (spoken(hosts)["chat.0"], spoken(hosts)["chat.1"]) == ("0", "1")
        hosts["gw-01"].check_output("systemctl reload gpu-fleet-gateway")
        time.sleep(3)
        served.clear()
        time.sleep(3)
        assert set(served) == {"chat.0", "chat.1"}, "both serve, one by TLS and one in clear"
        assert spoken(hosts)["chat.0"] == "0"
        play(f"{ROOT}/playbooks/gateway.yml")  # knows nothing of the hosts, and leaves it so
        assert spoken(hosts)["chat.0"] == "0"
        change("chat.1", False)
        change("chat.0", True)
        change("chat.1", True)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert failed == [], hosts["gw-01"].check_output(
        "journalctl -u gpu-fleet-gateway -o short-precise --no-pager -n 60"
    )
    assert set(spoken(hosts).values()) == {"1"}


def test_a_change_that_was_cut_short_leaves_it_out_until_it_is_known_how_it_speaks(hosts, tmp_path):
    steps = "[{include_role: {name: gpu_fleet.vllm.gateway, tasks_from: aside.yml}}]"
    text = f"- import_playbook: gpu_fleet.vllm.validate\n- {{hosts: gpu_hosts, gather_facts: false, tasks: {steps}}}\n"
    (tmp_path / "aside.yml").write_text(text)
    told = {"gateway_aside_replica": "chat.0", "gateway_aside_state": "drained", "gateway_aside_tls": False}
    play(str(tmp_path / "aside.yml"), **told)  # and no more: it was turned and speaks TLS as before
    play(f"{ROOT}/playbooks/gateway.yml")
    assert show(hosts, "status")["chat.0"] == "DRAIN"
    assert ask({"model": "chat"}).status == 200
    play(f"{ROOT}/molecule/gateway/spoken.yml")  # a run that looked at the hosts
    in_again(hosts, "chat.0")
    assert {json.loads(ask({"model": "chat"}).body)["replica"] for _ in range(6)} == {"chat.0", "chat.1"}


def test_keys_change_without_a_restart(hosts):
    pid = hosts["gw-01"].check_output("pgrep -u haproxy -x haproxy")
    new = "client-new-client-new-client-new"
    keys = [{"name": "new", "key": new}, {"name": "all", "key": ALL, "models": ["other"]}]
    said = play(f"{ROOT}/molecule/gateway/converge.yml", gateway_keys=keys)
    assert new not in said
    assert ask({"model": "chat"}, key=new).status == 200
    assert ask({"model": "chat"}, key=CHAT).status == 401
    assert ask({"model": "chat"}).status == 403
    assert hosts["gw-01"].check_output("pgrep -u haproxy -x haproxy") == pid
    play(f"{ROOT}/molecule/gateway/converge.yml")
    assert ask({"model": "chat"}).status == 200
    assert ask({"model": "chat"}, key=new).status == 401


def test_a_former_key_is_good_beside_the_new_one_as_the_same_client(hosts):
    new, past = "client-all-2-client-all-2-client-all-2", "client-past-client-past-client-past"
    former = [{"key": ALL, "expires": "2099-12-31"}, {"key": past, "expires": "2026-01-01"}]
    keys = [
        {"name": "both", "key": new, "requests_per_minute": 4, "former": former},
        {"name": "made", "made": 2, "former": [{"made": 1, "expires": "2099-12-31"}]},
    ]
    said = play(f"{ROOT}/molecule/gateway/converge.yml", gateway_keys=keys)
    assert not any(key in said for key in (new, past, ALL))
    assert json.loads(ask({"model": "chat"}, key=past).body)["error"]["code"] == "expired_api_key"
    first, second = ((EPHEMERAL / "secrets/keys" / name).read_text().strip() for name in ("made", "made.2"))
    assert [ask({"model": "chat"}, key=key).status for key in (first, second)] == [200, 200]
    # One client: what both send counts together.
    assert [ask({"model": "chat"}, key=key).status for key in (new, ALL) * 3] == [200] * 4 + [429] * 2
    play(f"{ROOT}/molecule/gateway/converge.yml")
    assert ask({"model": "chat"}).status == 200
    assert ask({"model": "chat"}, key=second).status == 401


def test_an_external_upstream_gets_its_own_models_under_its_own_names_and_nothing_of_the_client(hosts):
    bought = {
        "name": "bought",
        "url": "https://upstream.test:9443/base/v1",
        "key": "upstream-key-upstream-key",
        "models": {"big": "vendor/big-model-2"},
        "ca_file": str(EPHEMERAL / "upstream.pem"),
        "dns": False,
    }
    rich = "client-rich-client-rich-client-rich"
    keys = [{"name": "all", "key": ALL}, {"name": "rich", "key": rich, "models": ["chat", "big"]}]
    said = play(f"{ROOT}/molecule/gateway/converge.yml", gateway_external=[bought], gateway_keys=keys)
    assert "requests leave the fleet for upstream.test" in said
    assert bought["key"] not in said
    assert "big" in {model["id"] for model in json.loads(ask(method="GET", path="/v1/models").body)["data"]}
    wait(lambda: ask({"model": "big"}, key=rich).status == 200, "the upstream is not in")
    for body, more in ((b'{"p": "' + b"x" * 3000000 + b'", "model": "b\\u0069g"}', {}), ({"model": "big"}, {})):
        answer = ask(body, key=rich, headers={"traceparent": "00-1", "User-Agent": "mine", **more})
        told = json.loads(answer.body)
        assert (answer.status, told["replica"], told["model"]) == (200, "upstream", "vendor/big-model-2")
        assert told["path"] == "/base/v1/completions"
        assert told["headers"]["host"] == "upstream.test:9443"
        assert told["headers"]["authorization"] == "Bearer upstream-key-upstream-key"
        assert not {"traceparent", "user-agent"} & set(told["headers"])
        assert "x-organization" not in {name.lower() for name in answer.headers}
    # Its word on the fleet's key is not the client's, a key for all models is none for those outside, and what else there is stays.
    assert ask({"model": "big", "status": 401}, key=rich).status == 502
    assert ask({"model": "big"}).status == 403
    assert ask({"model": "chat"}, key=rich).status == 200
    assert {json.loads(ask({"model": "chat"}).body)["replica"].split(".")[0] for _ in range(4)} == {"chat"}
    lines = hosts["gw-01"].check_output("journalctl -t gpu-fleet-gateway -o cat --no-pager -n 40").splitlines()
    assert any(json.loads(line)["model"] == "big" for line in lines if line.startswith("{"))
    # Never one in place of the other: without the upstream its models are not served, without replicas the fleet's are not.
    hosts["gpu-02"].check_output("systemctl stop standin-upstream")
    hosts["gpu-01"].check_output("touch /run/other.0.unready")
    try:
        wait(lambda: ask({"model": "big"}, key=rich).status == 503, "the upstream is still in")
        wait(lambda: ask({"model": "other"}).status == 503, "other is still in")
    finally:
        hosts["gpu-02"].check_output("systemctl start standin-upstream")
        hosts["gpu-01"].check_output("rm -f /run/other.0.unready")
        play(f"{ROOT}/molecule/gateway/converge.yml")
    assert ask({"model": "big"}).status == 404
    wait(lambda: ask({"model": "other"}).status == 200, "other.0 did not come back")


def test_after_all_of_it_no_key_is_where_others_may_read_it(hosts):
    """Command lines, journals, units, what everybody may read, temporary folders, Ansible's own; on hosts and here."""
    folder = EPHEMERAL / "secrets"
    clients = {
        "all": ALL,
        "only-chat": CHAT,
        "expired": EXPIRED,
        "slow": SLOW,
        "two": TWO,
        "new": "client-new-client-new-client-new",
        "new of two": "client-all-2-client-all-2-client-all-2",
        "past": "client-past-client-past-client-past",
        "rich": "client-rich-client-rich-client-rich",
        **{f"{name}, made": (folder / "keys" / name).read_text().strip() for name in ("made", "made.2")},
    }
    # Of a private key a line in its middle.
    private = {name: (folder / name).read_text().splitlines()[1] for name in ("ca.key", "gw-01.key")}
    services = {"chat's": SERVICE_KEYS[0], "other's": SERVICE_KEYS[1], "upstream's": "upstream-key-upstream-key"}
    assert secrets_search.found_on(hosts["gw-01"], {**clients, **private, **services}) == []
    # The stand-ins for replicas are told the services' keys on their command lines, and write down what reached them.
    for name in ("gpu-01", "gpu-02"):
        assert secrets_search.found_on(hosts[name], {**clients, **private}) == [], name
    assert secrets_search.found_here({**clients, **private, **services}, secrets_search.logs()) == []
