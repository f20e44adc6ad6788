"""Servers that speak TLS: who does, what its configuration says, and who believes it, against real TLS on loopback."""

from __future__ import annotations

import dataclasses
import http.server
import json
import os
import ssl
import threading
from types import SimpleNamespace

import pytest
import yaml
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import (
    agent,
    agent_config,
    agent_rules,
    api_tls,
    evidence,
    gateway,
    monitoring,
    probe,
    rollout,
    services,
)
from ansible_collections.gpu_fleet.vllm.plugins.modules import generation, metrics, server_certificate
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import certificates, data
from conftest import REPOSITORY
from test_services_and_plan import fleet, ids, judge

KEY = "k" * 32
RIGHT = {"choices": [{"text": " a", "finish_reason": "length"}], "usage": {"completion_tokens": 1}}
ONE = "[{name: a, model: m, gpus: [0], hosts: [gpu-01]}]"


# -- who speaks it ------------------------------------------------------------------------------------------------------------


def planned(text=ONE, gateways=(), **told):
    of = fleet()
    hosts = {name: dataclasses.replace(each, tls=told.get(name.replace("-", "_"))) for name, each in of.hosts.items()}
    return judge(text, dataclasses.replace(of, hosts=hosts, gateways=gateways))


@pytest.mark.parametrize(
    ("gateways", "told", "tls"),
    [
        ((), {}, False),
        (("gw-01",), {}, True),
        (("gpu-01",), {}, False),  # the service's only host is the only gateway
        (("gpu-02",), {}, True),
        (("gpu-01", "gpu-02"), {}, True),  # the other gateway speaks to it over the network
        ((), {"gpu_01": True}, True),
        (("gw-01",), {"gpu_01": False}, False),
    ],
)
def test_it_is_planned_where_a_gateway_speaks_over_a_network(gateways, told, tls):
    made, found = planned(gateways=gateways, **told)
    assert found == []
    replica, (rank,) = made["replicas"]["a.0"], made["hosts"]["gpu-01"]["instances"]
    assert (replica["tls"], rank["tls"]) == (tls, tls)
    assert replica["url"] == f"{'https' if tls else 'http'}://198.51.100.1:8000"
    assert replica["urls"] == {"gpu-01": replica["url"]}
    assert ("ssl-certfile" in rank["config"]) == tls
    if tls:
        assert {name: rank["config"][name] for name in api_tls.options()} == {
            "ssl-certfile": "/etc/gpu_fleet/vllm/tls.pem",
            "ssl-keyfile": "/etc/gpu_fleet/vllm/tls.pem",
            "enable-ssl-refresh": True,
        }


def test_a_rank_without_an_api_has_no_certificate_and_knows_how_its_head_is_spoken_to():
    made, found = planned("[{name: a, model: m, hosts_per_replica: 2}]", gateways=["gw-01"])
    assert found == []
    head, worker = (made["hosts"][name]["instances"][0] for name in ("gpu-01", "gpu-02"))
    assert "ssl-certfile" in head["config"] and "ssl-certfile" not in worker["config"]
    assert head["tls"] and worker["tls"]


def test_hosts_of_a_service_that_say_otherwise_are_refused():
    _, found = planned("[{name: a, model: m}]", gpu_01=True, gpu_02=False)
    assert ids(found) == ["tls-differs"]
    assert "gpu-01 has True, gpu-02 has False" in str(found[0])
    _, found = planned("[{name: a, model: m}]", gpu_01=True)
    assert ids(found) == ["tls-differs"]


@pytest.mark.parametrize(
    "name", ["ssl-certfile", "ssl_keyfile", "--ssl-ca-certs", "ssl-cert-reqs", "enable_ssl_refresh"]
)
def test_a_certificate_of_a_services_own_is_refused_with_what_to_set(name):
    _, found = services.read(yaml.safe_load(f"[{{name: a, model: m, args: {{{name}: /srv/own.pem}}}}]"))
    assert ids(found) == ["owned-args"]
    assert name in str(found[0]) and "vllm_service_tls: true" in str(found[0])


def test_ciphers_are_the_services_own():
    _, found = services.read([{"name": "a", "model": "m", "args": {"ssl-ciphers": "ECDHE+AESGCM"}}])
    assert found == []


@pytest.mark.parametrize("version", sorted(data.load("versions")["releases"]))
def test_every_release_that_is_offered_has_the_options(version):
    known = yaml.safe_load((REPOSITORY / f"data/serve_flags/{version}.yml").read_text())
    assert set(api_tls.OWNED) <= set(known["flags"])


# -- who follows --------------------------------------------------------------------------------------------------------------


def test_a_gateway_is_told_of_each_server_how_it_speaks_and_by_which_name_it_is_believed():
    made, _ = planned("[{name: a, model: m}]", gateways=["gw-01"])
    (backend,) = gateway.backends(made, {}, 1)
    assert [(each["tls"], each["certificate"]) for each in backend["servers"]] == [
        (True, "gpu-01.vllm"),
        (True, "gpu-02.vllm"),
    ]
    told = [{"a.0": True, "gone.0": True}, {}, {"a.1": False}]
    assert gateway.spoken(made, told) == {"a/a.0": True, "a/a.1": False}
    assert api_tls.name("2001:db8::1") == "2001-db8--1.vllm"


def test_haproxys_word_on_how_a_server_is_spoken_to_is_read():
    """As 2.6.12 prints it: 1 by TLS, 0 turned off, -1 by `no-ssl`."""
    head = (
        "# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight srv_iweight srv_time_since_last_change "
        "srv_check_status srv_check_result srv_check_health srv_check_state srv_agent_state bk_f_forced_id srv_f_forced_id srv_fqdn "
        "srv_port srvrecord srv_use_ssl srv_check_port srv_check_addr srv_agent_addr srv_agent_port"
    )
    lines = [
        f"3 a 1 a.{n} 127.0.0.1 2 0 1 1 2 1 0 2 0 0 0 0 - 19001 - {tls} 0 - - 0" for n, tls in enumerate((1, 0, -1))
    ]
    found = gateway.read_servers("\n".join(["1", head, *lines, ""]))
    assert {name: gateway.by_tls({"tls": row["srv_use_ssl"]}) for name, row in found.items()} == {
        "a/a.0": True,
        "a/a.1": False,
        "a/a.2": False,
    }


def test_a_monitor_asks_by_tls_what_speaks_it():
    made, _ = planned(gateways=["gw-01"])
    (target,) = monitoring.targets(made, {}, {})["vllm"]
    assert (target["targets"], target["labels"]["__scheme__"]) == (["198.51.100.1:8000"], "https")
    (config,) = monitoring.scrape_configs(["vllm"], "/t", "15s", "/t/ca.pem")
    assert config["tls_config"] == {"ca_file": "/t/ca.pem"}
    clear, _ = planned()
    assert "__scheme__" not in monitoring.targets(clear, {}, {})["vllm"][0]["labels"]
    assert not monitoring.by_tls(clear) and monitoring.by_tls(made)


def test_who_changes_how_it_speaks_is_told_from_who_does_not():
    def rank(instance, before, then):
        return {"item": {"instance": instance}, "tls_before": before, "tls_running": before, "tls": then}

    results = {
        "x": [rank("a.0", False, True), rank("b.0", True, True)],
        "y": [rank("a.1", None, True), rank("c.0", True, False)],
    }
    assert rollout.turned(results) == ["a.0", "c.0"]
    assert (rollout.tls(results, "a.0"), rollout.tls(results, "a.0", before=True)) == (True, False)
    assert not rollout.tls(results, "a.1", before=True)
    assert rollout.spoken(results) == {"a.0": False, "b.0": True, "c.0": True}


# -- over TLS -----------------------------------------------------------------------------------------------------------------


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(json.dumps(RIGHT).encode())

    def do_GET(self):
        self.answer(b'vllm:generation_tokens_total{engine="0"} 7.0\n' if self.path == "/metrics" else b"{}")

    def answer(self, content):
        self.server.keys.append(self.headers.get("Authorization"))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        """No lines on the terminal."""


class Quiet(http.server.ThreadingHTTPServer):
    def handle_error(self, *_):
        """A handshake that is broken off is what some tests want."""


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Starts a server with a certificate of the fleet's CA, of another one, for another host, or in clear; its port, and keys that came."""
    made = []
    monkeypatch.setattr(probe, "CA", str(tmp_path / "fleet/ca.pem"))
    certificates.have(str(tmp_path / "fleet"))

    def start(kind="right"):
        server = Quiet(("127.0.0.1", 0), Handler)
        server.keys = []
        if kind != "clear":
            folder = tmp_path / ("strange" if kind == "strange" else "fleet")
            called = ["192.0.2.7"] if kind == "elsewhere" else ["127.0.0.1"]
            own = certificates.have(str(folder), "own", called)
            (tmp_path / "own.pem").write_text(own.key + own.certificate)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tmp_path / "own.pem")
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made.append(server)
        return server.server_address[1], server.keys

    yield start
    for server in made:
        server.shutdown()
        server.server_close()


def runs(folder, tls):
    """A generation that says so."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps({"tls": tls}))
    return str(folder)


def test_the_probe_believes_the_fleets_ca(served, monkeypatch):
    port, keys = served()
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # must not be used
    assert probe.completion(f"https://127.0.0.1:{port}", KEY, "chat").right
    assert keys == [f"Bearer {KEY}"]


@pytest.mark.parametrize("kind", ["strange", "elsewhere", "clear"])
def test_whoever_else_listens_gets_no_key(served, kind):
    port, keys = served(kind)
    answer = probe.completion(f"https://127.0.0.1:{port}", KEY, "chat", 5)
    assert (answer.right, answer.status) == (False, 0)
    assert answer.problem
    assert keys == []


def test_a_ca_that_is_not_there_is_named(served, monkeypatch):
    port, _ = served()
    monkeypatch.setattr(probe, "CA", "/nowhere/ca.pem")
    assert "/nowhere/ca.pem" in probe.request(f"https://127.0.0.1:{port}/health").problem


@pytest.mark.parametrize(
    ("kind", "tls", "right"), [("right", True, True), ("strange", True, False), ("clear", False, True)]
)
def test_the_agent_asks_as_what_runs_is_spoken_to(served, tmp_path, kind, tls, right):
    """Whatever is planned: a replica whose turn to change has not come goes on as it was."""
    port, keys = served(kind)
    (tmp_path / "secrets.env").write_text(f"VLLM_API_KEY={KEY}\n")
    config = {
        "url": f"{'http' if tls else 'https'}://127.0.0.1:{port}",
        "api": ["127.0.0.1", port],
        "current": runs(tmp_path / "current", tls),
        "secrets": str(tmp_path / "secrets.env"),
        "model": "chat",
        "probe_every": 5.0,
        "probe_deadline": 5.0,
    }
    prober = agent.Prober(config)
    prober.unit = agent_rules.Unit(agent_rules.UP, "a", ready=True)
    prober.turn()
    assert prober.last.right == right
    assert prober.last.counters == (7.0 if right else None)
    assert set(keys) == ({f"Bearer {KEY}"} if right else set())
    asker = agent.ApiAsker(config["url"], config["current"])
    asker.turn()
    assert (asker.seen is not None) == right


def test_the_agent_is_told_where_what_runs_says_so_and_the_same_whatever_is_planned():
    """Another configuration would restart all agents of a service at once, and a gateway would see none of its replicas well."""
    settings = dict.fromkeys(
        [
            "probe_interval",
            "probe_deadline",
            "lost_after",
            "backoff",
            "backoff_max",
            "restart_limit",
            "restart_window",
            "cache_room",
        ],
        1,
    )
    told = []
    for gateways in ([], ["gw-01"]):
        made, _ = planned(gateways=gateways)
        (rank,) = made["hosts"]["gpu-01"]["instances"]
        told.append(agent_config.agent_config(rank, made, "gpu-01", settings))
    assert told[0] == told[1]
    assert (told[0]["current"], told[0]["url"]) == ("/etc/vllm/a.0/current", "http://198.51.100.1:8000")


def test_a_url_is_as_planned_where_no_generation_says_otherwise(tmp_path):
    assert api_tls.url("https://a:1", str(tmp_path)) == "https://a:1"
    (tmp_path / "plan.json").write_text("{}")  # of a release of the collection before TLS
    assert api_tls.url("https://a:1", str(tmp_path)) == "http://a:1"
    assert api_tls.url("http://a:1", runs(tmp_path, True)) == "https://a:1"


def test_a_running_server_is_asked_for_its_key_as_it_is_spoken_to(served, tmp_path):
    port, keys = served("clear")
    runs(tmp_path / "generations/old", False)
    one = SimpleNamespace(
        id="new",
        home=str(tmp_path),
        stale=[],
        memlock=-1,
        unit=SimpleNamespace(running=True, generation="old", active="active", pid=os.getpid()),
    )
    params = {"probe_url": f"https://127.0.0.1:{port}", "api_key": KEY, "former_key": None, "nofile": 1}
    reasons = generation.restart_reasons(SimpleNamespace(params=params), one)
    assert "it runs generation old, wanted is new" in reasons
    assert keys == [f"Bearer {KEY}"]


def test_pages_of_a_server_are_read_as_it_is_spoken_to(served, monkeypatch):
    port, _ = served()
    asked = []
    monkeypatch.setattr(api_tls, "of_generation", lambda folder: asked.append(folder) or True)
    assert "vllm:generation_tokens_total" in evidence._page("vllm a.0", f"http://127.0.0.1:{port}/metrics")
    assert metrics.spoken("vllm a.0", "http://127.0.0.1:1/metrics") == "https://127.0.0.1:1/metrics"
    assert metrics.spoken("agent a.0", "http://127.0.0.1:1/metrics") == "http://127.0.0.1:1/metrics"
    assert asked == ["/etc/vllm/a.0/current"] * 2


# -- the file on the host -----------------------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path):
    return [certificates.have(str(tmp_path / "ca"), f"vllm/{number}", ["127.0.0.1"]) for number in range(2)]


def test_its_content_is_changed_in_place_and_one_user_reads_it(tmp_path, made):
    """inotify watches the file that vLLM opened: what is renamed into its place is seen once, and never again."""
    path = tmp_path / "vllm/tls.pem"
    long, short = (each.key + each.certificate for each in made)
    server_certificate.write(str(path), long + "\n" * 100, os.getuid())
    before = path.stat()
    assert (before.st_mode & 0o777, before.st_uid) == (0o400, os.getuid())
    server_certificate.write(str(path), short, os.getuid())
    assert path.stat().st_ino == before.st_ino
    assert path.read_text() == short
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(path)


def test_what_is_no_plain_file_there_is_replaced_and_its_target_left_alone(tmp_path, made):
    (tmp_path / "target").write_text("somebody's")
    (tmp_path / "tls.pem").symlink_to(tmp_path / "target")
    server_certificate.write(str(tmp_path / "tls.pem"), made[0].key + made[0].certificate, os.getuid())
    assert (tmp_path / "target").read_text() == "somebody's"
    assert not (tmp_path / "tls.pem").is_symlink()


@pytest.mark.parametrize("check", [True, False])
def test_the_module_shows_a_digest_and_never_the_key(tmp_path, made, monkeypatch, check):
    content = made[0].key + made[0].certificate

    class Module:
        check_mode = check

        def __init__(self, argument_spec, supports_check_mode):
            self.params = {"path": str(tmp_path / "tls.pem"), "content": content, "owner": "root"}
            assert argument_spec["content"]["no_log"] and supports_check_mode

        def exit_json(self, **told):
            raise SystemExit(json.dumps(told))

    monkeypatch.setattr(server_certificate, "AnsibleModule", Module)
    monkeypatch.setattr(server_certificate.pwd, "getpwnam", lambda _: SimpleNamespace(pw_uid=os.getuid()))
    for expected in (True, check):
        with pytest.raises(SystemExit) as over:
            server_certificate.main()
        told = json.loads(str(over.value))
        assert told["changed"] is expected
        assert made[0].key.splitlines()[1] not in str(over.value)
        assert told["digest"] in told["diff"]["after"]
    assert (tmp_path / "tls.pem").exists() != check
