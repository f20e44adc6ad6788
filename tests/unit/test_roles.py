"""Every role says what its variables are, once."""

import subprocess
import sys

import pytest
import yaml
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import inventory
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


def published(tasks):
    """Names of facts that tasks set, also those in blocks; two underscores begin what is a role's own."""
    for task in tasks or []:
        yield from (name for name in task.get("ansible.builtin.set_fact") or {} if not name.startswith("__"))
        for part in ("block", "rescue", "always"):
            yield from published(task.get(part))


def test_what_roles_publish_is_known_to_validate():
    """Else a second play of the same run is refused for a variable that nobody knows."""
    files = [path for role in ROLES for path in (role / "tasks").glob("*.yml")]
    facts = {name for path in files for name in published(yaml.safe_load(path.read_text()))}
    assert facts - {"fleet_plan"} <= set(inventory.FACTS)


def test_generated_documents_are_current():
    run = subprocess.run(
        [sys.executable, "-m", "gpu_fleet.docs", "--check"],
        cwd=REPOSITORY / "scripts",
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
