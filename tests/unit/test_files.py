"""Files of root's in one go, and the units that run once they are there; systemd is played."""

from __future__ import annotations

import subprocess

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import units
from ansible_collections.gpu_fleet.vllm.plugins.modules import files
from module_run import anybodys, ran

UNIT = "example.service"
RIGHT = {"load": "loaded", "active": "active", "enabled": "enabled"}
BARE = {"load": "not-found", "active": "inactive", "enabled": ""}
# is-enabled(systemctl(1)): states with exit status 0.
ON = ("enabled", "enabled-runtime", "static", "alias", "indirect", "generated")


class Systemd:
    """What systemctl answers of one unit, and the commands that it was given."""

    def __init__(self, unread=False, refuses=(), **state):
        self.state, self.unread, self.refuses, self.done = state, unread, refuses, []

    def systemctl(self, *arguments):
        verb = arguments[0]
        said, code = "", 0
        if "--property=NeedDaemonReload" in arguments:
            said = "yes\n" if self.unread else "no\n"
        elif verb == "show":
            said = f"LoadState={self.state['load']}\nLoadError={self.state.get('error', '')}\n"
            said += f"ActiveState={self.state['active']}\n"
        elif verb == "is-enabled":
            said, code = f"{self.state['enabled']}\n", 0 if self.state["enabled"] in ON else 1
        else:
            self.done.append(arguments)
            if verb in self.refuses:
                return subprocess.CompletedProcess(arguments, 1, "", f"Failed to {verb} unit: it is so.\n")
            self.state |= {"active": "active"} if verb == "start" else {"enabled": "enabled"}
        return subprocess.CompletedProcess(arguments, code, said, "")

    def command(self, command):
        assert command == ["systemctl", "daemon-reload"]
        self.done.append(("daemon-reload",))
        if self.state["load"] == "not-found":
            self.state |= {"load": "loaded", "enabled": "disabled"}
        return 0, "", ""


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Call it with what systemd is and what is asked for."""
    anybodys(monkeypatch)
    path = tmp_path / UNIT

    def run(systemd, *, check=False, running=(UNIT,), reload=True, name=UNIT):
        monkeypatch.setattr(units, "systemctl", systemd.systemctl)
        wanted = [{"path": str(tmp_path / name), "content": "[Service]\n", "mode": "0644"}]
        params = {"files": wanted, "reload": reload, "running": list(running)}
        return ran(monkeypatch, files, params, check=check, commands=systemd.command)

    run.path = path
    return run


def written(host):
    host.path.write_text("[Service]\n")
    host.path.chmod(0o644)


def test_a_bare_host_gets_file_reload_enable_and_start_in_this_order(host):
    systemd = Systemd(**BARE)
    said = host(systemd)
    assert systemd.done == [("daemon-reload",), ("enable", UNIT), ("start", UNIT)]
    assert said["why"] == [
        f"{host.path} was missing",
        f"{UNIT} was not enabled",
        f"{UNIT} was not running (inactive)",
    ]
    assert (said["changed"], said["reloaded"], said["started"]) == (True, True, [UNIT])


def test_check_mode_on_a_bare_host_says_the_same_and_does_nothing(host):
    systemd = Systemd(**BARE)
    looked = host(systemd, check=True)
    assert systemd.done == []
    assert not host.path.exists()
    assert looked == host(Systemd(**BARE))


def test_what_is_enabled_and_runs_is_left_alone(host):
    written(host)
    systemd = Systemd(**RIGHT)
    said = host(systemd)
    assert (said["changed"], said["why"], said["started"]) == (False, [], [])
    assert systemd.done == []


def test_a_unit_that_runs_is_not_restarted_for_another_file(host):
    systemd = Systemd(**RIGHT)
    said = host(systemd)
    assert systemd.done == [("daemon-reload",)]
    assert (said["why"], said["started"]) == ([f"{host.path} was missing"], [])


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    ("state", "why", "done"),
    [
        ({"enabled": "disabled"}, [f"{UNIT} was not enabled"], ["enable"]),
        ({"enabled": "enabled-runtime"}, [f"{UNIT} was not enabled"], ["enable"]),
        ({"enabled": "indirect"}, [f"{UNIT} was not enabled"], ["enable"]),
        ({"enabled": "static"}, [], []),
        ({"active": "activating"}, [], []),
        ({"active": "inactive"}, [f"{UNIT} was not running (inactive)"], ["start"]),
        ({"active": "failed"}, [f"{UNIT} was not running (failed)"], ["start"]),
        (
            {"active": "failed", "enabled": "disabled"},
            [f"{UNIT} was not enabled", f"{UNIT} was not running (failed)"],
            ["enable", "start"],
        ),
    ],
)
def test_what_was_stopped_or_disabled_by_hand_is_put_right(host, state, why, done, check):
    written(host)
    systemd = Systemd(**{**RIGHT, **state})
    said = host(systemd, check=check)
    assert (said["changed"], said["why"]) == (bool(why), why)
    assert [command[0] for command in systemd.done] == ([] if check else done)
    assert said["reloaded"] is False


@pytest.mark.parametrize(
    ("state", "refuses", "told"),
    [
        ({"active": "failed"}, ["start"], f"{UNIT} does not start: Failed to start unit: it is so."),
        (
            {"load": "masked", "active": "inactive", "enabled": "masked"},
            ["enable"],
            f"{UNIT} cannot be enabled: Failed to enable unit: it is so.",
        ),
        (
            {"load": "bad-setting", "active": "inactive", "error": "no ExecStart"},
            [],
            f"systemd cannot use the file of {UNIT}: no ExecStart",
        ),
    ],
)
def test_what_does_not_start_is_told_with_host_unit_and_where_to_look(host, monkeypatch, state, refuses, told):
    monkeypatch.setattr(files.socket, "gethostname", lambda: "gpu-01")
    written(host)
    said = host(Systemd(refuses=refuses, **{**RIGHT, **state}))
    assert said["failed"]
    assert said["msg"].startswith(f"gpu-01: {told}")
    assert f"`systemctl status {UNIT}` and `journalctl -u {UNIT}` on that host say why" in said["msg"]


@pytest.mark.parametrize("check", [False, True])
def test_a_unit_that_no_file_makes_is_an_error(host, check):
    said = host(Systemd(**BARE), check=check, name="other.service", reload=False)
    assert said["failed"]
    assert f"there is no unit {UNIT} that could be started" in said["msg"]


def test_without_units_systemd_is_asked_for_nothing_new(host):
    written(host)
    systemd = Systemd(unread=True, **BARE)
    said = host(systemd, running=())
    assert systemd.done == [("daemon-reload",)]
    assert (said["changed"], said["reloaded"], said["started"]) == (False, True, [])


def test_a_new_instance_of_a_template_that_is_yet_to_be_written_would_be_started(host):
    said = host(Systemd(**BARE), check=True, running=("example@1.service",), name="example@.service")
    assert said["why"][1:] == ["example@1.service was not enabled", "example@1.service was not running (inactive)"]
