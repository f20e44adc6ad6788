"""A host without nft, in check mode and not: what module nft_table says, and that it then changes nothing."""

from __future__ import annotations

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.modules import nft_table
from module_run import ran

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
