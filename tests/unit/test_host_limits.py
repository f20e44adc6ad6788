"""Limits of a host in one module: what is written, what is refused before, and what is proved."""

from __future__ import annotations

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import limits, sysctl
from ansible_collections.gpu_fleet.vllm.plugins.modules import host_limits, sysctl_file
from module_run import anybodys, nothing, ran

LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max open files            {nofile}                {nofile}                files
Max locked memory         {memlock}              {memlock}              bytes
"""
PARAMETER = "net.core.somaxconn"


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host below a folder; call it to run the module there."""
    anybodys(monkeypatch)
    kernel = tmp_path / "proc" / "net" / "core" / "somaxconn"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("4096\n")
    etc = tmp_path / "etc"
    etc.mkdir()
    compare, apply, granted = sysctl.compare, sysctl.apply, limits.granted
    below = str(tmp_path / "proc")
    monkeypatch.setattr(sysctl, "compare", lambda *given: compare(*given, below, (str(etc),)))
    monkeypatch.setattr(sysctl, "apply", lambda difference: apply(difference, below))
    monkeypatch.setattr(limits, "granted", lambda *given: granted(*given, str(tmp_path)))
    asked = []

    def run(*, nofile=1024, memlock="64G", settings=None, grants=None, refuses="", check=False, logins="vllm - x\n"):
        def systemd_run(command):
            asked.append(list(command))
            if refuses:
                return 1, "", refuses
            output = next(word.partition("truncate:")[2] for word in command if "StandardOutput" in word)
            shown = {"nofile": "1024", "memlock": str(64 << 30), **(grants or {})}
            with open(output, "w", encoding="ascii") as file:
                file.write(LIMITS.format(**shown))
            return 0, "", ""

        params = {
            "nofile": nofile,
            "memlock": memlock,
            "logins": logins,
            "logins_path": str(etc / "limits.d" / "60-x.conf"),
            "settings": {PARAMETER: 8192} if settings is None else settings,
            "settings_path": str(etc / "60-x.conf"),
            "header": "Made.",
        }
        return ran(monkeypatch, host_limits, params, check=check, commands=systemd_run)

    run.kernel, run.etc, run.asked = kernel, etc, asked
    run.logins, run.settings = etc / "limits.d" / "60-x.conf", etc / "60-x.conf"
    return run


def test_all_is_written_and_a_second_run_changes_nothing(host):
    said = host()
    assert said["changed"] is True
    assert said["why"] == [
        f"{host.logins} was missing",
        f"{host.settings} was missing",
        f"{PARAMETER} was 4096, wanted 8192",
    ]
    assert [item["after_header"] for item in said["diff"]] == [str(host.logins), str(host.settings), "kernel"]
    assert host.logins.read_text() == "vllm - x\n"
    assert host.settings.read_text() == f"# Made.\n{PARAMETER} = 8192\n"
    assert host.kernel.read_text() == "8192\n"
    said = host()
    assert (said["changed"], said["why"]) == (False, [])
    assert said["granted"] == {"nofile": ("1024", "1024"), "memlock": (str(64 << 30),) * 2}


def test_check_mode_says_the_same_proves_and_writes_nothing(host):
    looked = host(check=True)
    assert looked["changed"] is True
    assert len(host.asked) == 1
    assert not host.logins.exists()
    assert not host.settings.exists()
    assert host.kernel.read_text() == "4096\n"
    assert looked["why"] == host()["why"]


def test_a_parameter_that_is_not_wanted_any_more_leaves_its_file(host):
    host()
    said = host(settings={})
    assert said["why"] == [f"{host.settings} was there and sets nothing that is wanted"]
    assert not host.settings.exists()
    assert not host(settings={})["changed"]


def test_the_process_is_started_with_what_is_asked_for_and_nothing_is_left_of_it(host, tmp_path):
    host()
    (command,) = host.asked
    assert command[:4] == ["/usr/bin/systemd-run", "--quiet", "--collect", "--service-type=oneshot"]
    assert command[4:6] == ["--property=LimitNOFILE=1024", "--property=LimitMEMLOCK=64G"]
    assert command[-2:] == ["cat", "/proc/self/limits"]
    assert not list(tmp_path.glob("gpu-fleet-limits-*"))


def test_infinity_is_what_the_kernel_calls_unlimited(host):
    assert "failed" not in host(memlock="infinity", grants={"memlock": "unlimited"})


@pytest.mark.parametrize(
    ("grants", "told"),
    [
        ({"memlock": "65536"}, "host_limits_memlock is 64G, granted are 65536 (soft) and 65536 (hard)"),
        ({"nofile": "512"}, "host_limits_nofile is 1024, granted are 512 (soft) and 512 (hard)"),
    ],
)
def test_less_than_is_asked_for_fails_and_the_files_stay(host, grants, told):
    said = host(grants=grants)
    assert said["failed"]
    assert f"a process that systemd starts gets less than is asked for: {told}. Set the variable" in said["msg"]
    assert said["changed"]
    assert said["granted"]
    assert host.logins.exists()


def test_systemds_own_words_are_told(host):
    said = host(refuses="Failed to start transient service unit\n")
    assert said["msg"].endswith(
        "no process starts with LimitNOFILE=1024 and LimitMEMLOCK=64G: Failed to start transient service unit"
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"memlock": "64g"}, "host_limits_memlock: '64g' is no size of memory. Write bytes"),
        ({"settings": {"net.core.none": 1}}, "this kernel has no net.core.none; correct the name or leave it out"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_changed(host, given, told):
    said = host(**given)
    assert said["failed"]
    assert told in said["msg"]
    assert not host.logins.exists()
    assert not host.asked


def test_a_later_file_that_would_undo_it_is_refused_by_both_modules(host, monkeypatch):
    (host.etc / "99-later.conf").write_text(f"{PARAMETER} = 1\n")
    told = (
        f"{host.etc}/99-later.conf sets {PARAMETER} = 1 and is read after {host.settings}: the next boot would undo it"
    )
    assert told in host()["msg"]
    params = {"path": str(host.settings), "settings": {PARAMETER: 8192}}
    assert told in ran(monkeypatch, sysctl_file, params, commands=nothing)["msg"]
    assert not host.logins.exists()


def test_the_module_of_parameters_alone_does_what_it_did(host, monkeypatch):
    params = {"path": str(host.settings), "settings": {PARAMETER.replace(".", "/"): "8192"}}
    looked = ran(monkeypatch, sysctl_file, params, check=True)
    assert not host.settings.exists()
    done = ran(monkeypatch, sysctl_file, params)
    assert looked == done
    assert done["why"] == [f"{host.settings} was missing", f"{PARAMETER} was 4096, wanted 8192"]
    assert host.settings.read_text() == f"# Made by Ansible.\n{PARAMETER} = 8192\n"
    assert ran(monkeypatch, sysctl_file, params)["changed"] is False


def test_a_value_that_the_kernel_keeps_otherwise_is_told_and_not_left_for_the_next_boot(host, monkeypatch):
    kept = sysctl.present
    monkeypatch.setattr(sysctl, "present", lambda name, root: "4096" if kept(name, root) else None)
    assert f"{PARAMETER} was set to 8192, but the kernel says 4096" in host()["msg"]
    assert not host.settings.exists()
