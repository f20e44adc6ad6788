"""A release on the hosts, after hands and others were at it."""

from __future__ import annotations

import json

import pytest

ROOT = "/opt/vllm/releases"


@pytest.fixture
def release(host) -> str:
    """Path of the one release."""
    found = host.check_output(f"ls -A {ROOT}").split()
    assert [name for name in found if name != ".lock"] == [name for name in found if name.startswith("0.32.0-cpu-")]
    (name,) = [name for name in found if name != ".lock"]
    return f"{ROOT}/{name}"


def test_console_script_runs_from_its_place(host, release):
    """It was built under another path, and needs the metadata wheel that no index has."""
    assert host.check_output(f"env PYTHONDONTWRITEBYTECODE=1 {release}/bin/vllm") == "0.32.0+cpu"


def test_it_is_complete_and_names_its_lock(host, release):
    said = json.loads(host.file(f"{release}/.complete").content_string)
    assert release.endswith(said["lock_digest"][:12])
    assert said["python"] == "/usr/bin/python3"


def test_everybody_can_read_and_only_root_can_write(host, release):
    host.run_expect(
        [0], f"setpriv --reuid=nobody --regid=nogroup --clear-groups env PYTHONDONTWRITEBYTECODE=1 {release}/bin/vllm"
    )
    assert host.check_output(f"find {release} ! -type l \\( -perm /022 -o ! -user root \\)") == ""


def test_harm_was_put_right(host, release, host_name):
    assert "altered" not in host.file(f"{release}/lib/python3.11/site-packages/vllm/cli.py").content_string
    assert host.check_output(f"find {release} -name __pycache__") == ""
    inode, path = host.check_output("cat /root/before").split()
    now = host.check_output(f"stat -c %i {path}")
    # An altered file: built anew. Only bytecode added: taken away, nothing else touched.
    assert (now == inode) == (host_name == "gpu-02")


def test_nothing_is_left_of_builds(host):
    for folder in ("/opt/vllm", "/opt/mirrored", "/opt/forged", "/srv/small"):
        if host.file(folder).exists:
            assert host.check_output(f"find {folder} -name '.building-*'") == ""
    assert not host.file("/opt/vllm/releases/.incoming").exists


def test_refused_builds_left_no_release(host):
    for folder in ("/opt/forged", "/srv/small"):
        if host.file(folder).exists:
            assert host.check_output(f"find {folder} -name .complete") == ""


def test_the_mirrors_release_is_the_same(host, host_name, release):
    if host_name != "gpu-01":
        assert not host.file("/opt/mirrored").exists
        return
    assert "GET /torch/" in host.file("/srv/mirror.log").content_string  # from the mirror, over HTTP
    mirrored = release.replace(ROOT, "/opt/mirrored/releases")
    assert host.check_output(f"env PYTHONDONTWRITEBYTECODE=1 {mirrored}/bin/vllm") == "0.32.0+cpu"
