"""What the module that installs a driver does with apt, which is played: never what was not compared before."""

from __future__ import annotations

from typing import ClassVar

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_change
from ansible_collections.gpu_fleet.vllm.plugins.modules import driver_install

NOTHING = {"install": {}, "upgrade": {}, "remove": {}}
EXPECTED = {"install": {"linux-headers-6": "1", "nvidia-smi": "580-1"}}
STEPS = [["linux-headers-6"], ["linux-headers-6", "nvidia-smi=580-1"]]


class Failed(Exception):
    """What fail_json said."""


class Module:
    """Its parameters, and the end of it."""

    params: ClassVar = {"steps": STEPS, "finish": False, "update": False, "lock_timeout": 1}

    @staticmethod
    def fail_json(msg, **_):
        raise Failed(msg)


@pytest.fixture(name="apt")
def played(monkeypatch):
    """Would do what it is told to; a list of what it installed."""
    done, would = [], {}
    coming = {"linux-headers-6": {"linux-headers-6": "1"}, "nvidia-smi=580-1": {"nvidia-smi": "580-1"}}

    def simulated(_run, arguments):
        return would.get(tuple(arguments)) or (
            {**NOTHING, "install": {name: it for told in arguments for name, it in coming[told].items()}},
            [],
        )

    def install(arguments, _lock):
        done.append(list(arguments))
        return 0, ""

    def packages(_run):
        return {name: version for step in done for told in step for name, version in coming[told].items()}

    monkeypatch.setattr(driver_change, "simulated", simulated)
    monkeypatch.setattr(driver_change, "install", install)
    monkeypatch.setattr(driver_change, "packages", packages)
    monkeypatch.setattr(driver_change, "unsettled", lambda _run: set())
    return done, would


def test_step_by_step_what_was_planned_is_done(apt):
    done = driver_install._change(Module, Module.params, EXPECTED)
    assert (apt[0], done["install"]) == (STEPS, EXPECTED["install"])


def test_a_step_that_alone_would_do_something_else_is_not_taken(apt):
    apt[1][("linux-headers-6",)] = ({**NOTHING, "remove": {"nvidia-smi": "570-1"}}, [])
    with pytest.raises(Failed, match="linux-headers-6 alone: remove nvidia-smi 570-1"):
        driver_install._change(Module, Module.params, EXPECTED)
    assert apt[0] == []


def test_to_compare_only_installs_nothing_and_refuses_as_well(apt):
    assert driver_install._compare(Module, Module.params, EXPECTED) == STEPS
    assert apt[0] == []
    with pytest.raises(Failed, match="no package was changed: install nvidia-smi 580-1"):
        driver_install._compare(Module, Module.params, {"install": {"linux-headers-6": "1"}})


def test_what_is_half_done_is_completed_in_the_planned_version_by_name(apt, monkeypatch):
    half = [{"nvidia-smi"}, {"nvidia-smi"}, set()]
    monkeypatch.setattr(driver_change, "unsettled", lambda _run: half.pop(0))
    monkeypatch.setattr(
        driver_change.driver_host,
        "packages",
        lambda _run, _globs: {"nvidia-smi": {"version": "570-1", "state": "unpacked"}},
    )
    apt[1][("--reinstall", "nvidia-smi=580-1")] = (NOTHING, [])
    done, install = [], driver_change.install

    def told(arguments, lock):
        if arguments[0] == "--reinstall":
            done.append(list(arguments))
            return 0, ""
        return install(arguments, lock)

    monkeypatch.setattr(driver_change, "install", told)
    driver_install._change(Module, Module.params, EXPECTED)
    assert done == [["--reinstall", "nvidia-smi=580-1"]]


def test_a_package_half_done_that_no_step_names_keeps_the_version_that_dpkg_has(monkeypatch):
    have = {"libc-bin": {"version": "2.36-9", "state": "triggers-pending"}}
    monkeypatch.setattr(driver_change.driver_host, "packages", lambda _run, _globs: have)
    assert driver_change.exact(None, STEPS, EXPECTED, ["libc-bin", "nvidia-smi"]) == {
        "libc-bin": "2.36-9",
        "nvidia-smi": "580-1",
    }
