"""What systemd says of unit files: which units they belong to, and whether it has read them."""

from __future__ import annotations

import subprocess

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import units


@pytest.mark.parametrize(
    "path, names",
    [
        ("/etc/systemd/system/gpu-fleet-firewall.service", ["gpu-fleet-firewall.service"]),
        ("/etc/systemd/system/nftables.service.d/gpu-fleet-firewall.conf", ["nftables.service"]),
        ("/etc/systemd/system/vllm-agent@.service", ["vllm-agent@*.service"]),
        ("/etc/systemd/system/vllm@chat.0.service.d/generation.conf", ["vllm@chat.0.service"]),
        ("/opt/vllm/agent/__main__.py", []),
        ("/etc/sysctl.d/99-gpu-fleet.conf", []),
    ],
)
def test_units_that_a_file_belongs_to(path, names):
    assert units.of_files([path]) == names


@pytest.mark.parametrize("said, unread", [("no\n\nno\n", False), ("no\n\nyes\n", True), ("", False)])
def test_systemd_is_asked_whether_it_has_read_them(monkeypatch, said, unread):
    asked = []

    def answer(*arguments):
        asked.append(arguments)
        return subprocess.CompletedProcess(arguments, 0, said, "")

    monkeypatch.setattr(units, "systemctl", answer)
    assert units.unread(["/etc/systemd/system/vllm-agent@.service", "/etc/x"]) is unread
    assert asked == [("show", "--property=NeedDaemonReload", "--value", "vllm-agent@*.service")]


def test_nothing_is_asked_of_files_that_are_no_units(monkeypatch):
    monkeypatch.setattr(units, "systemctl", None)
    assert not units.unread(["/etc/hosts"])
