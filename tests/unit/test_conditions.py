"""Playbooks and roles hold with newer ansible-core, too: conditions are boolean, results have names of their own.

From 2.19 on a condition whose value is no boolean is an error (porting guide of ansible-core 2.19, "broken
conditionals"); from 2.21 on `invocation`, Ansible's own name for a module's arguments, is no part of results
(INJECT_INVOCATION in ansible/config/base.yml).
"""

import re

import pytest
import yaml
from conftest import REPOSITORY
from jinja2 import Environment, nodes

FILES = sorted(
    path
    for pattern in ("roles/*/tasks/*.yml", "roles/*/handlers/*.yml", "playbooks/*.yml")
    for path in REPOSITORY.glob(pattern)
)
CONDITIONS = {"when", "that", "until", "failed_when", "changed_when"}
# Names that are booleans without a word that says so: Ansible's own, and results of modules and filters of ours.
BOOLEAN = {
    "ansible_check_mode",
    "exists",  # module stat
    "missing",  # module nft_table
    "works",  # filter driver_plan, and the next two
    "changes_driver",
    "satisfied",
    "initramfs",
    "reboot",
    "done",  # the load generator's progress
    "full",
    "teardown_whole",
    "__firewall_proves",
    "__monitoring_bare",
    "__ray_cluster_stale",
    "__vllm_service_comparable",
}
ENVIRONMENT = Environment()


class Loader(yaml.SafeLoader):
    """YAML with tags of Ansible's, whose values are not looked at."""


Loader.add_multi_constructor("!", lambda loader, suffix, node: None)


def options():
    """Variables of roles that are booleans."""
    found = set()
    for path in REPOSITORY.glob("roles/*/meta/argument_specs.yml"):
        spec = yaml.safe_load(path.read_text())["argument_specs"]["main"].get("options", {})
        found |= {name for name, option in spec.items() if option["type"] == "bool"}
    return found


KNOWN = BOOLEAN | options()


def conditions(node):
    if isinstance(node, dict):
        for key, value in node.items():
            if key in CONDITIONS:
                yield from (str(item) for item in (value if isinstance(value, list) else [value]))
            yield from conditions(value)
    elif isinstance(node, list):
        for item in node:
            yield from conditions(item)


def boolean(node):
    if isinstance(node, (nodes.Compare, nodes.Test, nodes.Not)):
        return True
    if isinstance(node, (nodes.And, nodes.Or)):
        return boolean(node.left) and boolean(node.right)
    if isinstance(node, nodes.Const):
        return isinstance(node.value, bool)
    if isinstance(node, nodes.Filter):
        return node.name == "bool" or (node.name == "default" and boolean(node.node) and boolean(node.args[0]))
    if isinstance(node, nodes.Getattr):
        return node.attr in KNOWN
    return isinstance(node, nodes.Name) and (node.name in KNOWN or node.name.lower() in ("true", "false"))


def is_boolean(condition):
    (output,) = ENVIRONMENT.parse("{{ " + condition + " }}").body
    return boolean(output.nodes[0])


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # of regular expressions in conditions
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_conditions_are_boolean(path):
    documents = list(yaml.load_all(path.read_text(), Loader))
    assert [condition for condition in conditions(documents) if not is_boolean(condition)] == []


@pytest.mark.parametrize(
    ("condition", "right"),
    [
        ("vllm_runtime_version is defined and vllm_runtime_version", False),
        ("not ansible_check_mode or ansible_facts['getent_passwd'][ray_cluster_user]", False),
        ("found | length", False),
        ("found | length > 0 and not ansible_check_mode", True),
        ("whatever | bool", True),
        ("firewall_managed_elsewhere", True),
        ("monitoring_node_exporter | default(true)", True),
    ],
)
def test_what_is_no_condition_is_found(condition, right):
    assert is_boolean(condition) == right


def test_nobody_reads_or_returns_what_ansible_takes_away():
    for path in [*FILES, *REPOSITORY.glob("molecule/*/*.yml")]:
        assert not re.search(r"\.invocation\b(?!_)", path.read_text()), path
    for path in REPOSITORY.glob("plugins/modules/*.py"):
        told = re.search(r'^RETURN = r?"""(.*?)"""', path.read_text(), re.DOTALL | re.MULTILINE)
        assert "invocation" not in (yaml.safe_load(told[1]) or {}) if told else True, path
