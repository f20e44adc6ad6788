"""A host without nft, in check mode and not: what module nft_table says, and that it then changes nothing."""

from __future__ import annotations

import shutil

import pytest
import yaml
from ansible_collections.gpu_fleet.vllm.plugins.modules import nft_table
from conftest import REPOSITORY
from module_run import ran
from plays import played, recorded, stand_ins

OPENING = {"name": "api", "ports": ["8000"], "proto": "tcp", "from": ["any"], "interface": None, "cluster": False}


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """Call it to ask of a table on a host without nft."""
    monkeypatch.setattr(nft_table, "PROGRAM", str(tmp_path / "nft"))

    def ask(check, missing_ok, openings=(OPENING,), programs=None):
        params = {"openings": list(openings), "path": str(tmp_path / "firewall.nft"), "missing_ok": missing_ok}
        return ran(monkeypatch, nft_table, params, check=check, programs=programs or {"nft": None})

    return ask


@pytest.mark.parametrize("missing_ok", [False, True])
def test_check_mode_says_what_would_come(bare, missing_ok):
    said = bare(True, missing_ok)
    assert (said["changed"], said["missing"], said["why"]) == (True, True, ["nft is not installed yet"])
    assert "8000" in said["diff"]["after"]
    assert said["on_trial"] == 0


def test_otherwise_it_says_only_that_it_is_missing(bare, tmp_path):
    said = bare(False, True)
    assert (said["changed"], said["missing"], said["on_trial"]) == (False, True, 0)
    assert not list(tmp_path.iterdir())


def test_once_it_has_to_be_there_it_is_an_error(bare):
    with pytest.raises(AssertionError, match="nft"):
        bare(False, False)


@pytest.mark.parametrize("check", [False, True])
def test_an_nft_elsewhere_is_not_the_one_that_units_run(bare, check):
    assert bare(check, True, programs={"nft": "/opt/bin/nft"})["missing"]


def test_openings_are_judged_before(bare):
    said = bare(False, True, openings=[{**OPENING, "ports": ["0"]}])
    assert said["failed"]
    assert said["msg"].endswith("Nothing was changed")


# A host that has nft once apt has run.
NFT = """#!/usr/bin/python
# Stand-in, made for a test.
import os
from ansible.module_utils.basic import AnsibleModule

names = ("openings", "cluster_interface", "consent", "ssh_ports", "return_after", "path", "missing_ok")
module = AnsibleModule({{name: {{"type": "raw"}} for name in names}}, supports_check_mode=True)
there = os.path.exists({installed!r})
with open({record!r}, "a") as record:
    record.write("nft" + ("" if there else ", missing") + "\\n")
if not there and not module.params["missing_ok"] and not module.check_mode:
    module.fail_json(msg="no nft")
module.exit_json(changed=module.check_mode or there, missing=not there)
"""
UNITS = {"files": [], "reload": False, "running": []}


@pytest.mark.parametrize(
    ("there", "options", "asked"),
    [
        (True, [], ["nft", "units"]),
        (False, [], ["nft, missing", "nft", "units"]),
        (False, ["--check"], ["nft, missing", "units"]),
    ],
)
def test_the_role_installs_it_where_it_is_missing_and_asks_once_more(tmp_path, there, options, asked):
    home = stand_ins(tmp_path, {"files": (UNITS, "units"), "reach": ({}, "")})
    files = home / "plugins" / "modules" / "files.py"
    files.write_text(files.read_text().replace("AnsibleModule(", "AnsibleModule(supports_check_mode=True, "))
    installed = tmp_path / "installed"
    if there:
        installed.touch()
    (home / "plugins" / "modules" / "nft_table.py").write_text(
        NFT.format(installed=str(installed), record=str(tmp_path / "record"))
    )
    role = shutil.copytree(REPOSITORY / "roles" / "firewall", home / "roles" / "firewall")
    # No test installs packages on the machine that it runs on.
    tasks = yaml.safe_load((role / "tasks" / "table.yml").read_text())
    for task in tasks:
        if task.pop("ansible.builtin.apt", None):
            task["ansible.builtin.file"] = {"path": str(installed), "state": "touch", "mode": "0644"}
    (role / "tasks" / "table.yml").write_text(yaml.safe_dump(tasks))
    play = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "roles": [{"role": "gpu_fleet.vllm.firewall", "firewall_openings": []}],
    }
    status, said = played(tmp_path, [play], "localhost,", *options)
    assert status == 0, said
    assert recorded(tmp_path) == asked
    assert installed.exists() is not (options == ["--check"])
