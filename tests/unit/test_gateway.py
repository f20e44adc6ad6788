"""The gateway's pure half: backends, maps, keys, what HAProxy says, and what of the user's variables is refused."""

import hashlib
import http.server
import json
import threading
from pathlib import Path

import pytest
import yaml
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import gateway

PLAN = {
    "addresses": {"gpu-01": "192.0.2.1", "gpu-02": "2001:db8::2"},
    "services": {
        "chat": {"replicas": ["chat.0", "chat.1"], "served_model_names": ["chat", "org/chat"]},
        "wide": {"replicas": ["wide.0"], "served_model_names": ["wide"]},
    },
    "replicas": {
        "chat.0": {"service": "chat", "urls": {"gpu-01": ""}, "ports": {"api": 8000, "agent": 8003}},
        "chat.1": {"service": "chat", "urls": {"gpu-02": ""}, "ports": {"api": 8000, "agent": 8003}},
        "wide.0": {"service": "wide", "urls": {"gpu-01": "", "gpu-02": ""}, "ports": {"api": 8100, "agent": 8103}},
    },
}
KEY = "k" * 32
SERVED = {"chat": ["chat", "org/chat"], "wide": ["wide"]}


def test_each_api_of_a_replica_is_a_server_and_its_agent_the_check():
    chat, wide = gateway.backends(PLAN, {"wide": 4}, 256)
    assert [(s["name"], s["address"], s["port"], s["agent"], s["most"]) for s in chat["servers"]] == [
        ("chat.0", "192.0.2.1", 8000, 8003, 256),
        ("chat.1", "[2001:db8::2]", 8000, 8003, 256),
    ]
    assert [s["name"] for s in wide["servers"]] == ["wide.0-gpu-01", "wide.0-gpu-02"]
    assert {s["most"] for s in wide["servers"]} == {4}
    assert gateway.servers_of(PLAN, "wide.0") == ["wide/wide.0-gpu-01", "wide/wide.0-gpu-02"]
    assert gateway.servers_of(PLAN, "chat.1") == ["chat/chat.1"]


def test_a_key_is_stored_as_its_digest_alone():
    made = gateway.keys([{"name": "a", "key": KEY}], {"requests_per_minute": 60, "concurrent": 8})
    assert made == {hashlib.sha256(KEY.encode()).hexdigest().upper(): "a|0|60|8"}
    told = gateway.keys(
        [{"name": "a", "sha256": hashlib.sha256(KEY.encode()).hexdigest(), "concurrent": 0, "requests_per_minute": 5}],
        {"requests_per_minute": 60, "concurrent": 8},
    )
    assert list(told) == list(made)
    assert list(told.values()) == ["a|0|5|0"]
    assert gateway.keys([{"name": "later"}], {"requests_per_minute": 0, "concurrent": 0}) == {}


def test_a_former_key_is_the_same_client_until_its_own_last_day():
    entry = {
        "name": "a",
        "key": KEY,
        "concurrent": 3,
        "former": [{"key": "f" * 32, "expires": "1970-01-01"}, {"sha256": "a" * 64, "expires": "1970-01-02"}],
    }
    assert gateway.keys([entry], {"requests_per_minute": 60, "concurrent": 8}) == {
        gateway.digest(KEY): "a|0|60|3",
        gateway.digest("f" * 32): "a|86400|60|3",
        "A" * 64: "a|172800|60|3",
    }
    assert gateway.grants([entry]) == {"a/*": "1"}
    assert findings(keys=[entry, {"name": "b", "made": 2, "former": [{"made": 1, "expires": "2027-01-31"}]}]) == []


def test_a_key_is_good_until_the_end_of_its_last_day():
    assert gateway.expiry("1970-01-01") == 86400
    assert gateway.expiry(None) == 0
    for wrong in ("2027-02-30", "tomorrow", 20270101):
        with pytest.raises(ValueError):
            gateway.expiry(wrong)


def test_grants_name_models_or_all_of_them():
    assert gateway.grants([{"name": "a", "models": ["chat", "org/chat"]}, {"name": "b"}]) == {
        "a/chat": "1",
        "a/org/chat": "1",
        "b/*": "1",
    }


def test_models_of_the_whole_fleet_are_listed_as_openai_does():
    listed = gateway.model_list(PLAN)
    assert [(model["id"], model["owned_by"]) for model in listed["data"]] == [
        ("chat", "chat"),
        ("org/chat", "chat"),
        ("wide", "wide"),
    ]
    assert listed["object"] == "list"
    json.dumps(listed)


def test_a_map_is_the_same_whatever_the_order_and_reads_back():
    text = gateway.map_text({"b": "2 x", "a": "1"})
    assert text == "a 1\nb 2 x\n"
    assert gateway.read_map("# a comment\n" + text) == {"a": "1", "b": "2 x"}
    assert gateway.read_shown_map("0x55d a 1\n0x55e b 2 x\n\n") == {"a": "1", "b": "2 x"}


# The first columns of HAProxy 2.6's own answer, and the one that tells the state.
STAT = (
    "# pxname,svname,qcur,qmax,scur,status\n"
    "chat,chat.0,0,0,2,UP\n"
    "chat,chat.1,1,1,0,DRAIN\n"
    "chat,chat.2,0,0,0,UP 1/2\n"
    "chat,chat.3,,,,DOWN 1/2\n"
    "chat,BACKEND,0,0,2,UP\n\n"
)


def test_what_haproxy_says_of_its_servers():
    rows = gateway.read_stat(STAT)
    assert [gateway.busy(rows[f"chat/chat.{n}"]) for n in range(4)] == [2, 1, 0, 0]
    assert [gateway.admitted(rows[f"chat/chat.{n}"]) for n in range(4)] == [True, False, True, False]
    assert gateway.read_stat("") == {}


def findings(**settings):
    return [f"{found.where}: {found.message}" for found in gateway.judge(settings, SERVED)]


def test_right_variables_are_refused_nothing():
    right = {"name": "a", "key": KEY, "models": ["org/chat"], "expires": "2027-01-31", "concurrent": 0}
    other = {"name": "b", "sha256": "0" * 64}
    assert (
        findings(keys=[right, other, {"name": "c"}], paths=list(gateway.PATHS), port=443, concurrency={"chat": 1}) == []
    )


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"name": "A b"}, "its name is 'A b'"),
        ({"name": "a|b"}, "its name is 'a|b'"),
        ({"name": "a", "key": "short"}, "fewer than 22 characters"),
        ({"name": "a", "key": f"{KEY} x"}, "no text that a header can carry"),
        ({"name": "a", "key": "{{ vault_key }}{{ vault_key }}"}, "no text that a header can carry"),
        ({"name": "a", "key": KEY, "sha256": "0" * 64}, "more than one of key, sha256 and made"),
        ({"name": "a", "key": KEY, "made": 2}, "more than one of key, sha256 and made"),
        ({"name": "a", "made": 0}, "made is 0"),
        ({"name": "a", "former": [{"key": KEY}]}, "former: it never ends"),
        ({"name": "a", "former": [{"expires": "2027-01-31"}]}, "former: nothing names the key"),
        ({"name": "a", "former": [{"key": "short", "expires": "2027-01-31"}]}, "former: its key has fewer than 22"),
        ({"name": "a", "former": [{"made": 1, "expires": "2027-01-31"}]}, "it is the same key as that of a"),
        ({"name": "a", "sha256": "0" * 63}, "not 64 hexadecimal digits"),
        ({"name": "a", "expires": "31.1.2027"}, "expires is '31.1.2027'"),
        ({"name": "a", "models": ["chatt"]}, "there is no model chatt"),
        ({"name": "a", "concurrent": -1}, "concurrent is -1"),
    ],
)
def test_a_wrong_key_is_told_without_the_key(entry, says):
    (found,) = findings(keys=[entry])
    assert says in found
    assert str(entry.get("key", "no key")) not in found


def test_two_clients_have_neither_one_name_nor_one_key():
    both = findings(keys=[{"name": "a", "key": KEY}, {"name": "a", "sha256": gateway.digest(KEY).lower()}])
    assert [said.partition(": ")[2] for said in both] == ["the name is taken", "it is the same key as that of a"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"paths": ["/metrics"]}, "/metrics is no path that it lets through"),
        ({"concurrency": {"chatt": 1}}, "there is no service chatt"),
        ({"certificate": "a.pem"}, "one of gateway_certificate and gateway_certificate_key is given"),
        ({"port": 0}, "gateway_port is 0"),
        ({"body_max": 1 << 30}, "gateway_body_max is"),
    ],
)
def test_other_mistakes_are_told(settings, says):
    (found,) = findings(**settings)
    assert says in found


def test_a_name_of_two_services_cannot_be_routed():
    (found,) = gateway.judge({}, {"a": ["x"], "b": ["x"]})
    assert "served by a and by b" in found.message


def test_a_key_is_made_once_and_for_its_owner_alone(tmp_path):
    from ansible_collections.gpu_fleet.vllm.plugins.lookup.gateway_keys import key_of

    path = tmp_path / "keys" / "team"
    assert key_of(str(path), make=False) is None
    made = key_of(str(path), make=True)
    assert len(made) >= 43
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert key_of(str(path), make=True) == made
    assert [entry.name for entry in path.parent.iterdir()] == ["team"]


BOUGHT = {
    "name": "bought",
    "url": "https://api.example.com/v1",
    "key": "upstream-key-upstream-key",
    "models": {"big": "theirs/big-2"},
}


def test_what_is_not_of_the_fleet_has_a_backend_of_its_own_and_its_own_names():
    other = {**BOUGHT, "name": "b", "url": "https://h:8443", "models": {"x": "y"}, "concurrent": 3, "dns": False}
    assert [(e["host"], e["port"], e["path"], e["most"], e["dns"]) for e in gateway.externals([BOUGHT, other])] == [
        ("api.example.com", 443, "/v1", 64, True),
        ("h", 8443, "", 3, False),
    ]
    assert gateway.models(PLAN, [BOUGHT]) == {**gateway.models(PLAN), "big": "bought"}
    assert gateway.aliases([BOUGHT, other]) == {"big": "theirs/big-2", "x": "y"}
    assert [m["owned_by"] for m in gateway.model_list(PLAN, [BOUGHT])["data"] if m["id"] == "big"] == ["bought"]
    with pytest.raises(ValueError, match="bought: http://h is no https"):
        gateway.externals([{**BOUGHT, "url": "http://h"}])


def test_what_leaves_the_fleet_is_told():
    (found,) = gateway.judge({"external": [BOUGHT], "keys": [{"name": "a", "key": KEY, "models": ["big"]}]}, SERVED)
    assert (found.severity, found.message) == ("info", "big: requests leave the fleet for api.example.com")
    assert gateway.judge({"external": []}, SERVED) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"models": {"chat": "gpt"}}, "the name chat is served by chat in the fleet and by bought outside"),
        ({"models": {"org/chat": "gpt"}}, "the name org/chat is served by chat in the fleet and by bought outside"),
        ({"models": {}}, "it has no models"),
        ({"models": {"a b": "x"}}, "its model a b: x is no name"),
        ({"models": {"a": 'x"y'}}, 'its model a: x"y is no name'),
        ({"url": "http://api.example.com/v1"}, "its url is 'http://api.example.com/v1'"),
        ({"url": "https://api.example.com/v1?x=1"}, "its url is"),
        ({"url": "https://a b/"}, "its url is"),
        ({"name": "wide"}, "its name is 'wide', which is taken or no name"),
        ({"name": "a.b"}, "its name is 'a.b', which is taken or no name"),
        ({"key": None}, "it has no key, or two"),
        ({"key_file": "/x"}, "it has no key, or two"),
        ({"key": "with a blank and long enough"}, "its key is no text that a header can carry"),
    ],
)
def test_an_external_upstream_that_is_wrong_is_refused(change, says):
    (found,) = gateway.judge({"external": [{**BOUGHT, **change}]}, SERVED)
    assert says in found.message
    assert found.severity == "error"
    assert str(change.get("key") or "no key of this") not in str(found)


def test_two_upstreams_share_neither_name_nor_model():
    found = [f.message for f in gateway.judge({"external": [BOUGHT, BOUGHT]}, SERVED) if f.severity == "error"]
    assert found == ["its name is 'bought', which is taken or no name", "the name big is that of bought, too"]


def virtual(address, addresses=("*",), router=51):
    return {"virtual_address": address, "addresses": list(addresses), "virtual_router_id": router}


def test_an_address_that_gateways_share():
    assert gateway.judge(virtual("192.0.2.100/24"), SERVED) == []
    assert gateway.judge(virtual(""), SERVED) == []
    for address, addresses, says in (
        ("192.0.2.100", ["*"], "it is '192.0.2.100'"),
        ("gw/24", ["*"], "it is 'gw/24'"),
        ("192.0.2.100/24", ["192.0.2.1"], "gateway_addresses is ['192.0.2.1']"),
        ("2001:db8::9/64", ["*"], "gateway_addresses is ['*']"),
    ):
        (found,) = gateway.judge(virtual(address, addresses), SERVED)
        assert says in found.message
    (found,) = gateway.judge(virtual("192.0.2.100/24", router=256), SERVED)
    assert "gateway_virtual_router_id is 256" in found.message


def test_an_address_is_shared_by_all_gateways_and_by_no_host():
    both = {"gw-01": virtual("192.0.2.100/24"), "gw-02": virtual("192.0.2.100/24")}
    hosts = {"gw-01": "192.0.2.1", "gw-02": "192.0.2.2", "other": None}

    def said(told, addresses=hosts):
        return [found.message for found in gateway.judge_pair(told, addresses)]

    assert said(both) == []
    assert said({"gw-01": virtual("")}) == []
    assert said({"gw-01": both["gw-01"]}) == ["gw-01 is the only gateway"]
    assert "not the same" in said({**both, "gw-02": virtual("192.0.2.100/24", router=52)})[0]
    assert "not the same" in said({**both, "gw-02": virtual("")})[0]
    assert said(both, {**hosts, "gpu-01": "192.0.2.100"}) == ["192.0.2.100 is the address of gpu-01"]


def test_the_interface_of_an_address():
    facts = {
        "interfaces": ["lo", "eth0"],
        "lo": {"device": "lo", "ipv4": {"address": "127.0.0.1"}},
        "eth0": {
            "device": "eth0",
            "ipv4": {"address": "192.0.2.100"},
            "ipv4_secondaries": [{"address": "192.0.2.1"}],
            "ipv6": [{"address": "2001:db8::1"}],
        },
    }
    assert gateway.interface(facts, "192.0.2.1") == gateway.interface(facts, "2001:db8::1") == "eth0"
    assert gateway.interface(facts, "192.0.2.7") == ""


def test_whether_a_gateway_answers():
    from ansible_collections.gpu_fleet.vllm.plugins.module_utils import gateway_answers

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/healthz" else 503)
            self.end_headers()

        def log_message(self, *_):
            """Nothing to tell."""

    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    there = f"http://127.0.0.1:{served.server_port}"
    try:
        assert gateway_answers.answers(f"{there}/healthz")
        assert not gateway_answers.answers(f"{there}/other")
    finally:
        served.shutdown()
        served.server_close()
    assert not gateway_answers.answers(f"{there}/healthz")


def test_a_made_key_is_followed_by_another_and_the_former_one_stays(tmp_path):
    from ansible.errors import AnsibleError
    from ansible_collections.gpu_fleet.vllm.plugins.lookup.gateway_keys import with_keys

    first = with_keys({"name": "a"}, str(tmp_path), make=True)
    later = {"name": "a", "made": 2, "former": [{"made": 1, "expires": "2027-01-31"}]}
    second = with_keys(later, str(tmp_path), make=True)
    assert second["former"] == [{"made": 1, "expires": "2027-01-31", "key": first["key"]}]
    assert second["key"] != first["key"] == (tmp_path / "a").read_text().strip()
    assert with_keys(later, str(tmp_path), make=True) == second
    (tmp_path / "a").unlink()
    with pytest.raises(AnsibleError, match="former key of a: there is no"):
        with_keys(later, str(tmp_path), make=True)


def test_the_exporter_listens_where_monitors_ask():
    """One number for gateway, monitoring and the ports that no replica may cover."""
    root = Path(__file__).resolve().parents[2]
    (known,) = [
        item for item in yaml.safe_load((root / "data/ports.yml").read_text())["known"] if "HAProxy" in item["what"]
    ]
    asked = yaml.safe_load((root / "roles/monitoring/defaults/main.yml").read_text())["monitoring_haproxy_port"]
    listens = yaml.safe_load((root / "roles/gateway/vars/main.yml").read_text())["__gateway_exporter_port"]
    assert known == {"port": asked, "what": "HAProxy's exporter (monitoring_haproxy_port)", "groups": ["gateways"]}
    assert listens == f"{{{{ monitoring_haproxy_port | default({asked}) }}}}"


def test_replicas_with_a_part_on_a_host():
    plan = {
        "replicas": {"a.0": {"hosts": ["x"]}, "b.0": {"hosts": ["y"], "ray_hosts": ["y", "x"]}, "c.0": {"hosts": ["z"]}}
    }
    assert gateway.replicas_on(plan, ["x"]) == ["a.0", "b.0"]
    assert gateway.replicas_on(plan, []) == []
