"""The search for secrets that the host tests end with: it finds them wherever others may read them, and says no more than where."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
import urllib.parse

import pytest
from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tests" / "host"))

import secrets_search

SECRET = "a/secret+of=forty-characters-and-nothing-e"
KEY = {"key of chat": SECRET}


def test_a_file_in_a_folder_for_what_is_passing_whatever_its_mode(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "kept").write_text(f"VLLM_API_KEY={SECRET}\n")
    (tmp_path / "deep" / "kept").chmod(0o600)
    (found,) = secrets_search.found_here(KEY, [tmp_path])
    assert found == f"key of chat: {tmp_path}/deep/kept"
    assert SECRET not in found
    assert secrets_search.found_here({"another": "another-secret-that-is-nowhere"}, [tmp_path]) == []


def test_a_scenarios_own_inventory_is_where_they_are_from(tmp_path):
    for name in ("molecule.1a2b.gateway", "ansible-local-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "hosts.yml").write_text(SECRET)
    assert secrets_search.found_here(KEY, [tmp_path]) == [f"key of chat: {tmp_path}/ansible-local-1/hosts.yml"]


@pytest.mark.parametrize("before", ["", "a", "ab", "Bearer "])
def test_in_other_spellings(tmp_path, before):
    text = f"{before}{SECRET} and more"
    for number, spelt in enumerate((base64.b64encode(text.encode()).decode(), urllib.parse.quote(text, safe=""))):
        (tmp_path / str(number)).write_text(spelt)
    assert len(secrets_search.found_here(KEY, [tmp_path])) == 2


def test_a_process_that_has_it_in_its_arguments():
    with subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)", SECRET], stdout=-1
    ) as other:
        other.stdout.readline()
        try:
            assert secrets_search.found_here(KEY) == ["key of chat: command line of a process"]
        finally:
            other.kill()
    time.sleep(0.1)
    assert secrets_search.found_here(KEY) == []


def whole(folder, secrets):
    """The search as a host does it, below a folder instead of `/`, with a journal and units of its own."""
    programs = folder / "bin"
    program = secrets_search.PROGRAM.replace('files("/", every=False)', f'files("{folder}/root", every=False)')
    assert program != secrets_search.PROGRAM
    told = secrets_search._told(secrets, [str(folder / "tmp")], True)
    done = subprocess.run(
        [sys.executable, "-c", program, told], env={"PATH": str(programs)}, capture_output=True, text=True, check=True
    )
    return {where.replace(str(folder), "") for where, _ in json.loads(done.stdout)}


def test_what_everybody_may_read_the_journal_and_the_units_and_not_what_only_root_may(tmp_path):
    root, programs = tmp_path / "root", tmp_path / "bin"
    for name, mode, above in (
        ("etc/unit.service", 0o644, 0o755),
        ("etc/vllm/secrets.env", 0o600, 0o755),
        ("root/kept", 0o644, 0o700),
        ("etc/group.map", 0o640, 0o755),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(SECRET)
        (root / name).chmod(mode)
        (root / name).parent.chmod(above)
    (tmp_path / "tmp").mkdir()
    programs.mkdir()
    for name in ("journalctl", "systemctl"):
        (programs / name).write_text(f"#!/bin/sh\n# Stand-in, made for a test.\necho 'Invoked with key={SECRET}'\n")
        (programs / name).chmod(0o755)
    assert whole(tmp_path, KEY) == {"/root/etc/unit.service", "the journal", "what systemd shows of its units"}
    for name in ("journalctl", "systemctl"):
        (programs / name).unlink()
    assert whole(tmp_path, KEY) == {"/root/etc/unit.service", "the journal", "what systemd shows of its units"}, (
        "what could not be looked at is said"
    )


def test_what_is_too_short_to_mean_anything_is_refused():
    with pytest.raises(AssertionError, match="too short"):
        secrets_search.found_here({"key": "short"})
