"""The check of a generation by the release's parser: where it writes, and where root must not."""

import os
from types import SimpleNamespace

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.modules import generation

PYTHON = '#!/bin/sh\nprintf "%s\\n" "$HOME" "$PYTHONPYCACHEPREFIX" > "{said}"\nmkdir -p "$PYTHONPYCACHEPREFIX"\nexit {status}\n'


def made(tmp_path, status=0):
    """A generation whose release's Python tells where it may write; less what asks systemd."""
    python, beside = tmp_path / "release/bin/python", tmp_path / "generations/.new"
    python.parent.mkdir(parents=True)
    beside.mkdir(parents=True)
    python.write_text(PYTHON.format(said=tmp_path / "said", status=status))
    python.chmod(0o755)

    def fail(**result):
        raise SystemExit(result["msg"])

    one = object.__new__(generation.Generation)
    one.cache, one.release = str(tmp_path / "cache/chat.0/id"), str(tmp_path / "release")
    one.module = SimpleNamespace(params={"instance": "chat.0"}, fail_json=fail)
    return one, str(beside / "config.yaml")


def test_the_bytecode_of_the_check_is_kept_for_the_server(tmp_path):
    one, config = made(tmp_path)
    one.judge(config)
    assert (tmp_path / "said").read_text().split() == [one.cache, f"{one.cache}/pycache"]
    assert os.path.isdir(f"{one.cache}/pycache")
    assert os.stat(one.cache).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("status", [0, 1])
def test_a_folder_of_the_service_user_is_left_alone(tmp_path, monkeypatch, status):
    one, config = made(tmp_path, status)
    os.makedirs(one.cache)
    monkeypatch.setattr(generation.os, "geteuid", lambda: os.getuid() + 1)
    if status:
        with pytest.raises(SystemExit, match="refuses the configuration"):
            one.judge(config)
    else:
        one.judge(config)
    home = (tmp_path / "said").read_text().split()[0]
    assert home != one.cache
    assert not os.path.exists(home)
    assert os.listdir(one.cache) == []


def test_why_a_generation_was_planned_so_is_no_part_of_what_it_is():
    files = {"config.yaml": "model: m\n", "why.json": "{}"}
    same = generation.identity({**files, "why.json": '{"reasons": ["other words"]}'}, "/opt/r")
    assert generation.identity(files, "/opt/r") == same
    assert generation.identity({**files, "config.yaml": "model: n\n"}, "/opt/r") != same
