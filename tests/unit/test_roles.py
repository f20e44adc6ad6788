"""Every role says what its variables are, once."""

import subprocess
import sys

import pytest
import yaml
from conftest import REPOSITORY

ROLES = sorted(path for path in (REPOSITORY / "roles").iterdir() if path.is_dir())


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_defaults_and_argument_spec_are_one(role):
    options = yaml.safe_load((role / "meta/argument_specs.yml").read_text())["argument_specs"]["main"].get(
        "options", {}
    )
    defaults = yaml.safe_load((role / "defaults/main.yml").read_text()) or {}
    assert set(options) == set(defaults)
    for name, option in options.items():
        assert name.startswith(f"{role.name}_")
        assert option.get("description"), name
        assert option.get("default") == defaults[name], name


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_a_role_has_the_same_skeleton(role):
    for name in ("tasks/main.yml", "meta/main.yml", "meta/argument_specs.yml", "defaults/main.yml", "README.md"):
        assert (role / name).is_file(), name


def test_generated_documents_are_current():
    run = subprocess.run(
        [sys.executable, "-m", "gpu_fleet.docs", "--check"],
        cwd=REPOSITORY / "scripts",
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
