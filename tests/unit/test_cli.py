"""scripts/fleet: exit statuses and output, on inventories that need no host."""

import json
import shutil

import pytest
import yaml
from conftest import REPOSITORY
from gpu_fleet.cli import app
from typer.testing import CliRunner


@pytest.fixture
def prod(tmp_path):
    shutil.copytree(REPOSITORY / "inventories/prod", tmp_path / "prod", ignore=shutil.ignore_patterns(".secrets"))
    return tmp_path / "prod"


def fleet(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_a_right_inventory(prod):
    done = fleet("validate", "-i", prod)
    assert done.exit_code == 0, done.output
    assert "big.0: vLLM" in done.stdout


def test_the_plan_for_machines(prod):
    done = fleet("plan", "-i", prod, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["plan"]["hosts"]["gpu-03"]["instances"][0]["config"]["pipeline-parallel-size"] == 2


def test_a_refused_inventory_is_status_2_and_one_message(prod):
    variables = yaml.safe_load((prod / "group_vars/gpu_hosts.yml").read_text())
    variables["vllm_services"][0]["args"]["swap-space"] = 4
    (prod / "group_vars/gpu_hosts.yml").write_text(yaml.safe_dump(variables))
    done = fleet("deploy", "-i", prod)
    assert done.exit_code == 2
    assert done.stderr.count("swap-space is gone since vLLM") == 1
    told = json.loads(fleet("deploy", "-i", prod, "--json").stdout)
    assert told["exit_status"] == 2
    assert "swap-space" in told["failures"][0]["message"]


@pytest.mark.parametrize("verb", [["upgrade", "--to", "0.26.0"], ["rollback"]])
def test_a_change_begins_with_the_inventory_as_a_whole(prod, verb):
    variables = yaml.safe_load((prod / "group_vars/gpu_hosts.yml").read_text())
    variables["vllm_services"][0]["args"]["swap-space"] = 4
    (prod / "group_vars/gpu_hosts.yml").write_text(yaml.safe_dump(variables))
    done = fleet(*verb, "-i", prod)
    assert done.exit_code == 2, done.output
    assert "swap-space is gone since vLLM" in done.stderr


def test_an_upgrade_to_what_nobody_knows_is_refused(prod):
    done = fleet("upgrade", "-i", prod, "--to", "9.9.9")
    assert done.exit_code == 2, done.output
    assert "9.9.9" in done.stderr


@pytest.mark.parametrize(
    "arguments", [["validate"], ["upgrade", "-i", "prod"], ["validate", "-i", "/nowhere"], ["nonsense"]]
)
def test_used_wrongly_is_status_2(arguments):
    assert fleet(*arguments).exit_code == 2


def test_a_limit_that_matches_nothing_says_so(prod):
    done = fleet("deploy", "-i", prod, "--limit", "nope")
    assert done.exit_code == 2
    assert "nope" in done.output or "no hosts" in done.output


def test_an_inventory_that_cannot_be_parsed_says_so(tmp_path):
    (tmp_path / "hosts.yml").write_text("[")
    done = fleet("validate", "-i", tmp_path)
    assert done.exit_code == 2
    assert "hosts.yml" in done.output
