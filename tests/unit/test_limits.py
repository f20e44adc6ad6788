"""Limits of locked memory: what systemd reads, in the file of a login and on a running process."""

from types import SimpleNamespace

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.gpu_fleet.vllm.plugins.filter import locked_bytes
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import limits
from ansible_collections.gpu_fleet.vllm.plugins.modules import generation


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("infinity", -1),
        ("65536", 65536),
        (65536, 65536),
        ("64K", 65536),
        ("8M", 8 << 20),
        ("64G", 64 << 30),
        ("1T", 1 << 40),
    ],
)
def test_systemds_spellings_are_read(text, bytes_):
    assert limits.locked_bytes(text) == bytes_


@pytest.mark.parametrize("text", ["0", "-1", "64GB", "64 G", "64g", "unlimited", "64G\n", "", "1.5G", "٣", "9E", None])
def test_others_are_refused_with_the_remedy(text):
    with pytest.raises(ValueError, match="such as 64G"):
        limits.locked_bytes(text)
    with pytest.raises(AnsibleFilterError, match="such as 64G"):
        locked_bytes.locked_bytes(text)


def test_a_running_process_is_compared_in_bytes(monkeypatch):
    unit = SimpleNamespace(running=True, generation="a", pid=1, active="active")
    monkeypatch.setattr(generation.units, "show", lambda instance: unit)
    monkeypatch.setattr(generation.units, "limits", lambda pid: {"nofile": 1024, "memlock": 64 << 30})

    def reasons(memlock):
        params = {"root": "/etc/vllm", "cache": "/c", "instance": "chat.0", "files": {}, "release": "/r"}
        module = SimpleNamespace(params={**params, "nofile": 1024, "memlock": memlock, "probe_url": None})
        one = generation.Generation(module)
        one.id = "a"
        return generation.restart_reasons(module, one)

    assert reasons("64G") == []
    assert reasons("infinity") == ["its limit is 68719476736 bytes of locked memory (-1: unlimited), wanted -1"]


@pytest.mark.parametrize(("granted", "right"), [("68719476736", True), ("65536", False)])
def test_the_proof_reads_the_same_spellings(granted, right):
    found = {"nofile": ("1024", "1024"), "memlock": (granted, granted)}
    assert (limits.less_than_asked(found, 1024, "64G") == []) is right
