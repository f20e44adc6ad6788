"""Which servers the gateway's module takes aside and lets in, with HAProxy's runtime socket played."""

from __future__ import annotations

import json

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.modules import gateway_server


class Over(Exception):
    """How the module ended."""


class Servers:
    """Two replicas as HAProxy knows them: `up`, and what was said of each, of which a server that is down says nothing."""

    def __init__(self) -> None:
        self.up = {"chat/chat.0": True, "chat/chat.1": True}
        self.admin = dict.fromkeys(self.up, 0)
        self.tls = dict.fromkeys(self.up, "-1")
        self.turns: list[tuple[str, str, str]] = []
        self.refuses = False  # as one whose configuration has nothing of TLS

    def status(self, name: str) -> str:
        return ("DRAIN" if self.admin[name] else "UP") if self.up[name] else "DOWN"

    def shown(self, _path: str, command: str) -> str:
        if command == "show stat":
            rows = [f"{name.replace('/', ',')},0,0,{self.status(name)}" for name in self.up]
            return "\n".join(["# pxname,svname,qcur,scur,status", *rows])
        if command.startswith("set server"):
            _set, _server, name, what, to = command.split()
            assert what == "ssl"
            if self.refuses:
                return "'set server <srv> ssl' cannot be set.\n default-server should define ssl settings\n\n"
            self.turns.append((name, to, self.status(name)))
            self.tls[name] = {"on": "1", "off": "0"}[to]
            return "server ssl setting updated.\n\n"
        assert command == "show servers state"
        rows = [
            f"3 chat 1 {name.split('/')[1]} 192.0.2.1 {2 * self.up[name]} {said} {self.tls[name]}"
            for name, said in self.admin.items()
        ]
        head = "# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_use_ssl"
        return "\n".join(["1", head, *rows])

    def tell(self, _path: str, command: str) -> None:
        _set, _server, name, _state, to = command.split()
        self.admin[name] = {"drain": 8, "ready": 0}[to]


@pytest.fixture(name="gateway")
def played(monkeypatch, tmp_path):
    """A gateway before two replicas, and the module, asked."""
    servers = Servers()
    monkeypatch.setattr(gateway_server.haproxy_socket, "shown", servers.shown)
    monkeypatch.setattr(gateway_server.haproxy_socket, "tell", servers.tell)
    monkeypatch.setattr(gateway_server.haproxy_socket, "keep", lambda *_: None)

    def ask(state, *names, check=False, **more):
        class Module:
            check_mode = check

            def __init__(self, argument_spec, supports_check_mode):
                told = {name: entry.get("default") for name, entry in argument_spec.items()}
                told.update(state=state, servers=list(names), state_file=str(tmp_path / "servers"), deadline=0, **more)
                self.params = told

            def exit_json(self, **told):
                raise Over(json.dumps(told))

            def fail_json(self, msg, **_):
                raise Over(json.dumps({"msg": msg, "changed": False}))

        monkeypatch.setattr(gateway_server, "AnsibleModule", Module)
        with pytest.raises(Over) as over:
            gateway_server.main()
        return json.loads(str(over.value))

    return servers, ask


def test_a_change_takes_aside_and_lets_in_again(gateway):
    servers, ask = gateway
    assert ask("drained", "chat/chat.0")["changed"]
    assert (servers.status("chat/chat.0"), servers.status("chat/chat.1")) == ("DRAIN", "UP")
    assert not ask("drained", "chat/chat.0")["changed"]
    assert ask("admitted", "chat/chat.0")["changed"]
    assert servers.status("chat/chat.0") == "UP"


@pytest.mark.parametrize(("state", "names"), [("admitted", ["chat/chat.0"]), ("repaired", [])])
def test_what_is_down_since_it_was_drained_is_let_in_too(gateway, state, names):
    """Of a server that is down the status is DOWN, drained or not: it came back as DRAIN with the next right probe."""
    servers, ask = gateway
    ask("drained", "chat/chat.0")
    servers.up["chat/chat.0"] = False
    assert not ask("drained", "chat/chat.0")["changed"]
    ask(state, *names)
    servers.up["chat/chat.0"] = True
    assert servers.status("chat/chat.0") == "UP"


def test_what_an_operator_drained_is_let_in_by_an_operator_alone(gateway):
    servers, ask = gateway
    ask("drained", "chat/chat.0", keep=True)
    assert not ask("admitted", "chat/chat.0")["changed"]
    assert not ask("repaired")["changed"]
    assert servers.status("chat/chat.0") == "DRAIN"
    assert ask("admitted", "chat/chat.0", keep=True)["changed"]
    assert servers.status("chat/chat.0") == "UP"
    # It is forgotten that it was drained: the next change lets it in.
    ask("drained", "chat/chat.0")
    assert ask("admitted", "chat/chat.0")["changed"]


def test_nothing_is_taken_aside_where_no_other_is_let_in(gateway):
    servers, ask = gateway
    ask("drained", "chat/chat.1", keep=True)
    assert "no replica of chat is admitted" in ask("drained", "chat/chat.0", others=True)["msg"]
    assert servers.status("chat/chat.0") == "UP"
    assert ask("drained", "chat/chat.0")["changed"]


class Clock:
    """Time that passes while somebody sleeps; meanwhile something may happen to the servers."""

    def __init__(self, happens=lambda now: None):
        self.now, self.happens = 0.0, happens

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.happens(self.now)


def test_one_that_was_just_started_is_waited_for_before_the_next_is_taken_aside(gateway, monkeypatch):
    """It is down at the gateway until the agent's next probe and the gateway's next check: nobody served meanwhile."""
    servers, ask = gateway
    servers.up["chat/chat.1"] = False
    clock = Clock(lambda now: servers.up.update({"chat/chat.1": now >= 4}))
    monkeypatch.setattr(gateway_server, "time", clock)
    assert ask("drained", "chat/chat.0", others=True)["changed"]
    assert servers.status("chat/chat.1") == "UP"
    assert 4 <= clock.now < 5


def test_one_that_does_not_come_keeps_the_other_in(gateway, monkeypatch):
    servers, ask = gateway
    servers.up["chat/chat.1"] = False
    monkeypatch.setattr(gateway_server, "time", Clock())
    assert "Nothing was drained" in ask("drained", "chat/chat.0", others=True)["msg"]
    assert servers.status("chat/chat.0") == "UP"


def test_one_that_an_operator_drained_is_not_waited_for(gateway, monkeypatch):
    _servers, ask = gateway
    ask("drained", "chat/chat.1", keep=True)
    clock = Clock()
    monkeypatch.setattr(gateway_server, "time", clock)
    assert "Nothing was drained" in ask("drained", "chat/chat.0", others=True)["msg"]
    assert clock.now == 0


def test_check_mode_counts_on_what_the_run_itself_lets_in_before(gateway):
    """And on nothing that an operator drained."""
    servers, ask = gateway
    ask("drained", "chat/chat.1")
    assert ask("drained", "chat/chat.0", others=True, check=True)["changed"]
    assert servers.status("chat/chat.0") == "UP"
    ask("drained", "chat/chat.1", keep=True)
    assert "Nothing was drained" in ask("drained", "chat/chat.0", others=True, check=True)["msg"]


def test_what_rests_for_maintenance_is_not_let_in_before_the_configuration_says_so(gateway):
    """A run that has no play for gateways drains it, and would have let it in at its end."""
    servers, ask = gateway
    ask("drained", "chat/chat.1")
    assert not ask("repaired", resting=["chat/chat.1"])["changed"]
    assert servers.status("chat/chat.1") == "DRAIN"


def test_what_its_configuration_has_out_of_service_is_repaired_by_nobody(gateway):
    """For maintenance of its host (`disabled`): CMAINT 4 and FMAINT 1. A drain of it is done at once, and changes nothing."""
    servers, ask = gateway
    servers.admin["chat/chat.0"] = 5
    assert not ask("repaired")["changed"]
    assert not ask("drained", "chat/chat.0", others=True)["changed"]
    assert servers.admin["chat/chat.0"] == 5


def test_a_server_is_turned_to_tls_while_it_gets_nothing_and_let_in_afterwards(gateway):
    servers, ask = gateway
    assert ask("drained", "chat/chat.0", tls={"chat/chat.0": True})["turned"] == ["chat/chat.0"]
    assert servers.turns == [("chat/chat.0", "on", "DRAIN")]
    assert ask("admitted", "chat/chat.0", tls={"chat/chat.0": True})["turned"] == []
    assert (servers.status("chat/chat.0"), servers.tls) == ("UP", {"chat/chat.0": "1", "chat/chat.1": "-1"})
    # What went wrong and came back speaks as before: turned before it gets a request.
    ask("drained", "chat/chat.1", tls={"chat/chat.1": True})
    ask("admitted", "chat/chat.1", tls={"chat/chat.1": False})
    assert servers.turns[-1] == ("chat/chat.1", "off", "DRAIN")
    assert servers.status("chat/chat.1") == "UP"


def test_one_that_is_spoken_to_as_wanted_is_let_alone(gateway):
    _servers, ask = gateway
    assert not ask("spoken", tls={"chat/chat.0": False, "chat/chat.1": False, "gone/gone.0": True})["changed"]
    assert ask("spoken", tls={"chat/chat.0": True})["changed"]
    assert not ask("spoken", tls={"chat/chat.0": True})["changed"]


def test_a_gateway_that_cannot_speak_so_gives_requests_as_before_and_says_what_to_run(gateway):
    servers, ask = gateway
    servers.refuses = True
    told = ask("drained", "chat/chat.0", tls={"chat/chat.0": True})
    assert "chat/chat.0 cannot be spoken to by TLS" in told["msg"] and "playbooks/gateway.yml" in told["msg"]
    assert servers.status("chat/chat.0") == "UP"
    servers.admin["chat/chat.0"] = 8  # as a run that was cut short left it, before it was turned
    assert ask("repaired")["changed"]
    assert servers.status("chat/chat.0") == "UP"


def test_one_whose_change_was_cut_short_is_let_in_only_once_it_is_known_how_it_speaks(gateway):
    servers, ask = gateway
    ask("drained", "chat/chat.0", tls={"chat/chat.0": True})  # and then the run was cut off: nobody knows what it runs
    assert not ask("repaired")["changed"]
    assert servers.status("chat/chat.0") == "DRAIN"
    assert ask("repaired", tls={"chat/chat.0": False})["turned"] == ["chat/chat.0"]
    assert (servers.status("chat/chat.0"), servers.tls["chat/chat.0"]) == ("UP", "0")


def test_how_it_is_spoken_to_is_turned_also_of_one_that_an_operator_drained(gateway):
    servers, ask = gateway
    ask("drained", "chat/chat.0", keep=True)
    ask("drained", "chat/chat.0", tls={"chat/chat.0": True})
    ask("admitted", "chat/chat.0", tls={"chat/chat.0": True})
    assert (servers.status("chat/chat.0"), servers.tls["chat/chat.0"]) == ("DRAIN", "1")
