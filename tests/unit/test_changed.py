"""scripts/test --changed: which tests a change asks for."""

import subprocess

import pytest
from gpu_fleet import changed, testing

HERE = "ansible_collections.gpu_fleet.vllm.plugins"
TEXTS = {
    "plugins/module_utils/links.py": "import re\n",
    "plugins/module_utils/pairs.py": f"from {HERE}.module_utils import links\n",
    "plugins/module_utils/agent.py": "from . import links\n",
    "plugins/modules/pair_facts.py": f"from {HERE}.module_utils.pairs import read\n",
    "plugins/filter/pairs.py": f'import {HERE}.module_utils.pairs\ndef filters(self):\n    return {{"pair_groups": groups}}\n',
    "scripts/gpu_fleet/__init__.py": "",
    "scripts/gpu_fleet/view.py": f"from {HERE}.module_utils.pairs import read\nvalues = load('speeds')\nmore = load(\"speeds\")\n",
    "roles/wires/tasks/main.yml": "gpu_fleet.vllm.pair_facts:\n",
    "roles/judge/tasks/main.yml": "when: x | gpu_fleet.vllm.pair_groups\n",
    "roles/keeper/vars/main.yml": "source: ../../plugins/module_utils/agent.py\n",
    "playbooks/deploy.yml": "roles: [gpu_fleet.vllm.wires]\n",
    "playbooks/site.yml": "ansible.builtin.import_playbook: deploy.yml\n",
    "data/speeds.yml": "a: 1\n",
    "docs/page.md": "words\n",
    "molecule/wires/molecule.yml": "",
    "molecule/wires/converge.yml": "roles: [gpu_fleet.vllm.wires]\n",
    "molecule/keeper/molecule.yml": "",
    "molecule/whole/molecule.yml": "",
    "molecule/whole/converge.yml": "import_playbook: gpu_fleet.vllm.site\n",
    "molecule/whole/prepare.yml": "import_playbook: ../wires/prepare.yml\n",
    "molecule/apart/molecule.yml": "",
    "molecule/shared/gpufleet_lab/nets.py": "",
    "tests/host/conftest.py": "",
    "tests/host/waits.py": "",
    "tests/host/test_wires.py": "import waits\n",
    "tests/host/test_demo.py": "",
    "tests/standin/server": "",
    "tests/unit/conftest.py": f"import {HERE}.module_utils.links\n",
    "tests/unit/world.py": "",
    "tests/unit/test_links.py": f"from {HERE}.module_utils.links import x\n",
    "tests/unit/test_pairs.py": f"import world\nfrom {HERE}.modules.pair_facts import y\n",
    "tests/unit/test_view.py": "from gpu_fleet import view\n",
    "tests/unit/test_site.py": 'run("playbooks/site.yml")\nREPOSITORY / "tests" / "standin"\n',
    "tests/unit/test_roles.py": "",
    "tests/unit/test_docs.py": "",
    "tests/unit/test_tarball.py": "",
    "tests/unit/fixtures/pairs/a.txt": "",
    "tests/unit/test_read.py": 'REPOSITORY / "tests/unit/fixtures/pairs"\n',
}
PLUGIN = ["docs", "tarball"]  # look at every plugin


@pytest.mark.parametrize(
    ("path", "unit", "scenarios"),
    [
        ("tests/unit/test_links.py", ["links"], []),
        ("tests/unit/world.py", ["pairs"], []),
        ("tests/unit/fixtures/pairs/a.txt", ["read"], []),
        ("tests/unit/fixtures/pairs/new.txt", ["read"], []),
        # Over imports as far as they go, but not through what conftest lends to all; roles by the names of what they use.
        ("plugins/module_utils/links.py", ["links", "pairs", "view", *PLUGIN], ["keeper", "wires", "whole"]),
        ("plugins/modules/pair_facts.py", ["pairs", *PLUGIN], ["wires", "whole"]),
        ("plugins/filter/pairs.py", PLUGIN, []),
        ("plugins/module_utils/agent.py", PLUGIN, ["keeper"]),
        ("data/speeds.yml", ["view", *PLUGIN], []),
        ("roles/wires/tasks/main.yml", ["roles", *PLUGIN], ["wires", "whole"]),
        ("roles/keeper/defaults/main.yml", ["roles", *PLUGIN], ["keeper"]),
        ("playbooks/deploy.yml", ["site", *PLUGIN], ["whole"]),
        ("docs/page.md", ["docs"], []),
        ("molecule/wires/converge.yml", [], ["wires", "whole"]),
        ("molecule/apart/verify.yml", [], ["apart"]),
        ("molecule/shared/gpufleet_lab/nets.py", [], ["apart", "demo", "keeper", "whole", "wires"]),
        ("tests/host/test_wires.py", [], ["wires", "whole"]),
        ("tests/host/waits.py", [], ["wires", "whole"]),
        ("tests/host/test_demo.py", [], ["demo"]),
        ("tests/standin/server", ["site"], []),
        ("tests/bench/speed.py", [], []),
        (".gitignore", [], []),
        ("docs/picture.svg", ["docs"], []),
    ],
)
def test_who_looks_at_a_file(path, unit, scenarios):
    chosen = changed.choose([path], TEXTS)
    assert chosen.everything == ""
    assert [name.removeprefix("tests/unit/test_").removesuffix(".py") for name in chosen.unit] == sorted(unit)
    assert list(chosen.scenarios) == sorted(scenarios)


@pytest.mark.parametrize(
    "path", ["ansible.cfg", "requirements.txt", "scripts/gpu_fleet/testing.py", "tests/unit/conftest.py"]
)
def test_what_all_stands_on_asks_for_all(path):
    assert changed.choose(["docs/page.md", path], TEXTS).everything == f"{path} is what every test stands on"


@pytest.mark.parametrize("path", ["new/thing.yml", "scripts/gpu_fleet/lonely.py", "Makefile"])
def test_what_nobody_is_known_to_look_at_asks_for_all(path):
    assert changed.choose([path], TEXTS).everything == f"nothing says who looks at {path}"


def test_several_changes_are_added_up():
    chosen = changed.choose(["docs/page.md", "tests/unit/test_links.py", "molecule/apart/molecule.yml"], TEXTS)
    assert chosen.unit == ("tests/unit/test_docs.py", "tests/unit/test_links.py")
    assert chosen.scenarios == ("apart",)


def test_a_file_that_went_away_is_placed_as_before():
    rest = {path: text for path, text in TEXTS.items() if path != "data/speeds.yml"}
    assert "tests/unit/test_view.py" in changed.choose(["data/speeds.yml"], rest).unit


def test_in_this_repository():
    """A few whose tests are known, so that a move of files is noticed."""
    texts = testing.texts()
    assert {f"tests/unit/{name}.py" for _pattern, names in changed.WHOLE for name in names} <= set(texts)
    chosen = changed.choose(["roles/nccl/tasks/main.yml", "plugins/module_utils/agent_rules.py"], texts)
    assert {"tests/unit/test_agent_rules.py", "tests/unit/test_roles.py"} <= set(chosen.unit)
    assert {"nccl", "healing"} <= set(chosen.scenarios)
    assert "tests/unit/test_driver_plan.py" not in chosen.unit, "everything is no choice"


# -- the program ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@example", *words], cwd=tmp_path, check=True)

    (tmp_path / "kept.yml").write_text("a: 1\n")
    (tmp_path / "gone.yml").write_text("a: 1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    (tmp_path / "kept.yml").write_text("a: 2\n")
    git("commit", "-qam", "second")
    (tmp_path / "gone.yml").unlink()
    (tmp_path / "new file.yml").write_text("b: 1\n")
    monkeypatch.setattr(testing, "ROOT", tmp_path)


def test_changes_are_those_of_the_working_tree_or_since_a_commit(checkout):
    assert testing.changes("HEAD") == ["gone.yml", "new file.yml"]
    assert testing.changes("HEAD~1") == ["gone.yml", "kept.yml", "new file.yml"]


def test_a_commit_that_there_is_not(checkout):
    with pytest.raises(testing.Usage, match="there is no commit nowhere"):
        testing.changes("nowhere")


def test_it_is_listed_before_it_runs(monkeypatch, capsys):
    by_name = {"molecule/strangers/molecule.yml": "", "molecule/strangers/converge.yml": "gpu_fleet.vllm.wires"}
    monkeypatch.setattr(testing, "changes", lambda ref: ["roles/wires/tasks/main.yml", f"docs/{ref}.md"])
    monkeypatch.setattr(testing, "texts", lambda: {**TEXTS, **by_name})
    assert testing.main(["--changed", "since", "--list"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["2", "files", "are", "changed", "since", "since;", "nearest", "to", "them:"],
        ["lint"],
        ["unit", *(f"tests/unit/test_{name}.py" for name in ("docs", "roles", "tarball"))],
        ["lab", "whole", "wires"],
        ["takes", "longer,", "by", "name:", "scripts/test", "lab", "strangers"],
    ]


def test_nothing_changed_is_said(monkeypatch, capsys):
    monkeypatch.setattr(testing, "changes", lambda ref: [])
    assert testing.main(["--changed"]) == 0
    assert "nothing is changed since HEAD" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--changed", "a", "b"], ["--changed", "--lost"]])
def test_used_wrongly(words):
    assert testing.main(words) == 2
