"""Two keys of a service at once, while keys change: the middleware that its server gets, and what comes to the host for it."""

from __future__ import annotations

import asyncio
import json
import os

import pytest
import yaml
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import gpu_fleet_former_key as former
from conftest import REPOSITORY
from plays import played
from test_validate import KEY, chat, judged

OLD = "o" * 40


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    monkeypatch.setenv("GPU_FLEET_FORMER_KEY", OLD)


def asked(headers, kind="http"):
    """The headers that reach what is inside."""
    seen = []

    async def inside(scope, _receive, _send):
        seen.append(scope)

    scope = {"type": kind, "headers": headers}
    asyncio.run(former.FormerKey(inside)(scope, None, None))
    return seen[0]


@pytest.mark.parametrize("name", [b"authorization", b"Authorization"])
@pytest.mark.parametrize("scheme", [b"Bearer", b"bearer"])
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_the_former_key_becomes_the_services_own(name, scheme, kind):
    told = [(b"host", b"h"), (name, scheme + b" " + OLD.encode()), (b"x", b"y")]
    assert asked(told, kind)["headers"] == [
        (b"host", b"h"),
        (b"x", b"y"),
        (b"authorization", b"Bearer " + KEY.encode()),
    ]
    assert told[1][0] == name, "the caller's own list is not changed"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"Bearer " + KEY.encode())],
        [(b"authorization", b"Bearer " + OLD.encode() + b" ")],
        [(b"authorization", b"Bearer  " + OLD.encode())],
        [(b"authorization", b"Basic " + OLD.encode())],
        [(b"authorization", OLD.encode())],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer \xff")],
        [(b"x-authorization", b"Bearer " + OLD.encode())],
        [(b"authorization", b"Bearer " + OLD.encode()), (b"authorization", b"Bearer x")],
    ],
    ids=str,
)
def test_whatever_else_it_is_goes_on_as_it_came(headers):
    assert asked(list(headers))["headers"] == headers


def test_what_is_no_request_goes_on():
    assert asked([], "lifespan") == {"type": "lifespan", "headers": []}


def test_without_the_services_own_key_no_server_starts(monkeypatch):
    """vLLM asks for none then, and would serve everybody."""
    monkeypatch.setenv("VLLM_API_KEY", "")
    with pytest.raises(RuntimeError, match="VLLM_API_KEY has to be set"):
        former.FormerKey(None)


@pytest.mark.parametrize("told", [OLD, KEY, ""])
def test_without_a_former_key_nothing_is_one_and_the_server_starts(told, monkeypatch):
    """A generation that takes one may be started again after the key is gone: by a crash, or by a way back."""
    monkeypatch.delenv("GPU_FLEET_FORMER_KEY")
    headers = [(b"authorization", b"Bearer " + told.encode())]
    assert asked(list(headers))["headers"] == headers


# -- the inventory ---------------------------------------------------------------------------------------------------------


def test_a_former_key_is_judged_and_never_shown():
    assert judged(vllm_service_former_keys={"chat": OLD}) == []
    for told, words in (
        ({"chta": OLD}, "Did you mean chat?"),
        ({"chat": "short"}, "its former key is too short"),
        ({"chat": KEY}, "its former key is its key"),
    ):
        (line,) = judged(vllm_service_former_keys=told)
        assert words in line and OLD not in line and KEY not in line
    for more in ({"args": {"middleware": "a.B"}}, {"env": {"PYTHONPATH": "/srv"}}):
        lines = judged(vllm_service_former_keys={"chat": OLD}, vllm_services=chat(**more))
        assert any("args.middleware or env.PYTHONPATH of its own" in line for line in lines), lines


# -- the role --------------------------------------------------------------------------------------------------------------

PLAY = """
- hosts: localhost
  connection: local
  gather_facts: false
  vars:
    role_path: {role}
    __vllm_service_instance: {{instance: chat.0, service: chat, rank: 0, peers: [], env: {{A: b}}, config: {{model: m}}}}
    __vllm_service_timeout: 60
    vllm_runtime_release: {{accelerator: cpu}}
    shown:
      config: "{{{{ __vllm_service_config }}}}"
      env: "{{{{ lookup('ansible.builtin.template', role_path ~ '/templates/env.j2') }}}}"
      key: "{{{{ __vllm_service_former or 'none' }}}}"
  tasks:
    - ansible.builtin.include_vars: {role}/defaults/main.yml
    - ansible.builtin.include_vars: {role}/vars/main.yml
    - ansible.builtin.copy: {{content: "{{{{ shown | to_json }}}}", dest: "{into}", mode: "0600"}}
"""


def rendered(folder, **variables):
    play = PLAY.format(role=REPOSITORY / "roles/vllm_service", into=folder / "shown.json")
    status, said = played(folder, play, vllm_service_start_timeout=60, **variables)
    assert status == 0, said
    return json.loads((folder / "shown.json").read_text())


def test_a_service_with_a_former_key_gets_it_and_another_one_nothing_of_it(tmp_path):
    (tmp_path / "one").mkdir()
    found = rendered(tmp_path / "one", vllm_service_former_keys={"chat": OLD})
    assert found["config"] == {"shutdown-timeout": 15, "model": "m", "middleware": "gpu_fleet_former_key.FormerKey"}
    assert found["key"] == OLD
    before = found["env"].replace(
        "# Where gpu_fleet_former_key lies, which takes the service's former key, too.\nPYTHONPATH=@DIR@\n", ""
    )
    found = rendered(tmp_path, vllm_service_former_keys={"other": OLD})
    assert found == {"config": {"shutdown-timeout": 15, "model": "m"}, "env": before, "key": "none"}


def test_the_middleware_is_a_file_and_a_class_that_there_is():
    variables = yaml.safe_load((REPOSITORY / "roles/vllm_service/vars/main.yml").read_text())
    path = variables["__vllm_service_former_source"].replace("{{ role_path }}", str(REPOSITORY / "roles/vllm_service"))
    assert os.path.samefile(path, former.__file__)
    assert former.__name__.endswith(".gpu_fleet_former_key") and former.FormerKey.__name__ == "FormerKey"
