"""Which servers the gateway's module takes aside and lets in, with HAProxy's runtime socket played."""

from __future__ import annotations

import json

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.modules import gateway_server


class Over(Exception):
    """How the module ended."""


@pytest.fixture(name="gateway")
def played(monkeypatch, tmp_path):
    """A gateway before two replicas: server to status; and the module, asked."""
    status = {"chat/chat.0": "UP", "chat/chat.1": "UP"}
    monkeypatch.setattr(
        gateway_server,
        "look",
        lambda _path: {name: {"status": word, "scur": "0", "svname": name} for name, word in status.items()},
    )

    def tell(_path, command):
        _set, _server, name, _state, to = command.split()
        status[name] = "DRAIN" if to == "drain" else "UP"

    monkeypatch.setattr(gateway_server.haproxy_socket, "tell", tell)
    monkeypatch.setattr(gateway_server.haproxy_socket, "keep", lambda *_: None)

    def ask(state, *servers, **more):
        class Module:
            check_mode = False

            def __init__(self, argument_spec, supports_check_mode):
                told = {name: entry.get("default") for name, entry in argument_spec.items()}
                told.update(
                    state=state, servers=list(servers), state_file=str(tmp_path / "servers"), deadline=0, **more
                )
                self.params = told

            def exit_json(self, **told):
                raise Over(json.dumps(told))

            def fail_json(self, msg, **_):
                raise Over(json.dumps({"msg": msg, "changed": False}))

        monkeypatch.setattr(gateway_server, "AnsibleModule", Module)
        with pytest.raises(Over) as over:
            gateway_server.main()
        return json.loads(str(over.value))

    return status, ask


def test_a_change_takes_aside_and_lets_in_again(gateway):
    status, ask = gateway
    assert ask("drained", "chat/chat.0")["changed"]
    assert status == {"chat/chat.0": "DRAIN", "chat/chat.1": "UP"}
    assert not ask("drained", "chat/chat.0")["changed"]
    assert ask("admitted", "chat/chat.0")["changed"]
    assert set(status.values()) == {"UP"}


def test_what_an_operator_drained_is_let_in_by_an_operator_alone(gateway):
    status, ask = gateway
    ask("drained", "chat/chat.0", keep=True)
    assert not ask("admitted", "chat/chat.0")["changed"]
    assert not ask("repaired")["changed"]
    assert status["chat/chat.0"] == "DRAIN"
    assert ask("admitted", "chat/chat.0", keep=True)["changed"]
    assert status["chat/chat.0"] == "UP"
    # It is forgotten that it was drained: the next change lets it in.
    ask("drained", "chat/chat.0")
    assert ask("admitted", "chat/chat.0")["changed"]


def test_nothing_is_taken_aside_where_no_other_is_let_in(gateway):
    status, ask = gateway
    ask("drained", "chat/chat.1", keep=True)
    assert "no replica of chat is admitted" in ask("drained", "chat/chat.0", others=True)["msg"]
    assert status["chat/chat.0"] == "UP"
    assert ask("drained", "chat/chat.0")["changed"]
