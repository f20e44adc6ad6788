"""Documents: every link leads somewhere, every command is understood, every page is listed, one version everywhere."""

import ast
import re
import subprocess
import tomllib

import commands
import gpu_fleet
import pytest
import yaml
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import hardware
from conftest import REPOSITORY
from gpu_fleet import endtoend, site, testing


def documents():
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return [REPOSITORY / name for name in tracked if (REPOSITORY / name).exists()]


DOCUMENTS = documents()
names = {"ids": lambda path: str(path.relative_to(REPOSITORY))}


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def broken(document):
    text = document.read_text(encoding="utf-8")
    out = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        page = (document.parent / path).resolve() if path else document
        if not page.exists() or (
            anchor and page.suffix == ".md" and anchor not in anchors(page.read_text(encoding="utf-8"))
        ):
            out.append(target)
    return out


@pytest.mark.parametrize("document", DOCUMENTS, **names)
def test_links_lead_somewhere(document):
    assert broken(document) == []


@pytest.mark.parametrize("document", DOCUMENTS, **names)
def test_commands_are_understood(document):
    assert [(line, wrong) for _n, line in commands.blocks(document) if (wrong := commands.misused(line))] == []


@pytest.mark.parametrize("document", DOCUMENTS, **names)
def test_python_is_python_and_asks_for_what_there_is(document):
    for block in re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "gpu_fleet":
                assert {name.name for name in node.names} <= set(gpu_fleet.__all__)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "gpu_fleet":
                assert node.attr in gpu_fleet.__all__


def test_every_function_is_in_the_page_about_python():
    functions = {name for name in gpu_fleet.__all__ if name[0].islower()}
    told = set(re.findall(r"^\| `(\w+)\(", (REPOSITORY / "docs/python.md").read_text(), re.MULTILINE))
    assert told == functions


def test_yaml_is_yaml():
    for document in DOCUMENTS:
        for block in re.findall(r"```ya?ml\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL):
            list(yaml.safe_load_all(block))


@pytest.mark.parametrize(
    "line",
    [
        "scripts/fleet depoly -i inventories/prod",
        "scripts/fleet deploy -i inventories/prod --forec",
        "journalctl -b | scripts/fleet doctor --form -",
        "ansible-playbook playbooks/nothing.yml -i inventories/prod",
        "ansible-playbook gpu_fleet.vllm.nothing -i inventories/prod",
        "ansible-playbook site.yml -i prod -e vllm_runtime_verison=1",
        "scripts/dmeo",
        "NO_COLOR=1 scripts/fleet status -i 'x",
    ],
)
def test_a_wrong_command_is_found(line):
    assert commands.misused(line)


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    (tmp_path / "page.md").write_text(
        "# A `b` (c)\n[x](nowhere.md) [y](#nothing) [z](#a-b-c) [w](https://example.org) `[v](code)`"
    )
    assert broken(tmp_path / "page.md") == ["nowhere.md", "#nothing"]


def test_every_page_is_listed():
    index = (REPOSITORY / "docs/README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([^)#\s]+)", index))
    pages = {str(path.relative_to(REPOSITORY / "docs")) for path in (REPOSITORY / "docs").glob("*.md")} - {"README.md"}
    assert pages <= linked
    assert "runbooks/README.md" in linked


def test_pitfalls_name_causes_that_there_are():
    rows = re.findall(r"^\| [^|]+ \| ([^|]*) \|", (REPOSITORY / "docs/pitfalls.md").read_text(), re.MULTILINE)
    named = {name for cell in rows for name in re.findall(r"`([^`]+)`", cell)}
    known = {
        entry["id"] for path in REPOSITORY.glob("data/signatures/*.yml") for entry in yaml.safe_load(path.read_text())
    }
    assert len(named) > 40
    assert named <= known | set(hardware.FINDINGS)


def test_the_fleet_of_the_tutorial_validates(tmp_path):
    """All of its steps in one inventory, as somebody would have it at the end."""
    text = (REPOSITORY / "docs/tutorial.md").read_text()
    first, second, gateway, big, monitor = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
    groups = first["all"]["children"]
    groups["gpu_hosts"]["hosts"] |= second | {f"gpu-0{n}": {"ansible_host": f"192.0.2.1{n}"} for n in (3, 4)}
    fleet = groups["gpu_hosts"]["vars"]
    fleet["vllm_services"][0] = {"name": "chat", "model": "small", "hosts": ["gpu-01", "gpu-02"]}
    fleet["vllm_services"] += big
    fleet["model_store_models"].append({"name": "large", "folder": "/srv/models/large"})
    fleet["vllm_service_api_keys"]["big"] = "0" * 40
    groups |= gateway | monitor
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(first))
    result = gpu_fleet.validate(tmp_path / "hosts.yml")
    assert result.failures == []
    assert [line.split(":")[0] for line in result.summary if not line.startswith(" ")][:3] == [
        "chat.0",
        "chat.1",
        "big.0",
    ]


@pytest.mark.parametrize("page", ["docs/tutorial.md", "docs/cli.md", "docs/change.md", "README.md"])
def test_a_release_to_upgrade_to_is_one_that_a_debian_12_has_a_lock_of(page):
    text = (REPOSITORY / page).read_text()
    for version in re.findall(r"fleet upgrade .*--to (\S+)", text):
        assert list(REPOSITORY.glob(f"locks/vllm-{version}-cu130-py311-*.lock")), f"{page}: {version}"


def test_every_playbook_and_role_is_in_the_readme():
    told = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    playbooks = {path.stem: path.read_text() for path in (REPOSITORY / "playbooks").glob("*.yml")}
    parts = set(re.findall(r"import_playbook: (\w+)\.yml", "".join(playbooks.values())))
    assert [name for name in sorted(playbooks) if f"`{name}`" not in told and name not in parts] == []
    assert [
        path.name for path in (REPOSITORY / "roles").iterdir() if f"(roles/{path.name}/README.md)" not in told
    ] == []


def test_what_runs_by_name_only_is_in_the_readme():
    (told,) = re.findall(r"What takes longer than the daily tests have (.*)", (REPOSITORY / "README.md").read_text())
    names = set(re.findall(r"`(?:scripts/test \w+ )?(\w+)`", told.split(" and `scripts/test long`")[0]))
    assert names == {*testing.HEAVY, *endtoend.SCENARIOS}


def test_one_version_everywhere():
    version = yaml.safe_load((REPOSITORY / "galaxy.yml").read_text())["version"]
    assert tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"] == version
    assert re.search(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == version


def test_dependencies_are_the_same_for_galaxy_and_by_hand():
    needs = yaml.safe_load((REPOSITORY / "galaxy.yml").read_text())["dependencies"]
    for name in ("requirements.yml", "collections/requirements.yml"):
        listed = yaml.safe_load((REPOSITORY / name).read_text())["collections"]
        assert {entry["name"]: entry["version"] for entry in listed} == needs, name


def test_the_execution_environment_is_this_version_with_the_pins_of_the_checkout():
    made = yaml.safe_load((REPOSITORY / "execution-environment.yml").read_text())
    galaxy = yaml.safe_load((REPOSITORY / "galaxy.yml").read_text())
    pins = dict(re.findall(r"^([a-z-]+)==(\S+)", (REPOSITORY / "requirements.in").read_text(), re.MULTILINE))
    tarball = f"gpu_fleet-vllm-{galaxy['version']}.tar.gz"
    assert [entry["src"] for entry in made["additional_build_files"]] == [tarball]
    wanted = made["dependencies"]["galaxy"]["collections"]
    assert wanted[0] == {"name": f"collections/{tarball}", "type": "file"}
    assert {entry["name"]: entry["version"] for entry in wanted[1:]} == galaxy["dependencies"]
    for name in ("ansible-core", "ansible-runner"):
        assert made["dependencies"][name.replace("-", "_")]["package_pip"] == f"{name}=={pins[name]}"
    own = yaml.safe_load((REPOSITORY / "meta/execution-environment.yml").read_text())["dependencies"]
    assert f"uv=={pins['uv']}" in (REPOSITORY / own["python"]).read_text()
    assert "openssh-clients [platform:rpm]" in (REPOSITORY / own["system"]).read_text()


def test_the_site_has_every_page_and_what_pages_link_to(tmp_path):
    """What mkdocs is given; `scripts/docs --site` builds it in its strict mode."""
    config = yaml.safe_load(site.stage(tmp_path / "site").read_text())
    menu = []
    for entry in config["nav"]:
        menu += [entry] if isinstance(entry, str) else next(iter(entry.values()))
    assert sorted(menu) == sorted(map(str, site.pages()))
    assert menu[:3] == ["README.md", "docs/README.md", "docs/tutorial.md"]
    staged = tmp_path / "site/pages"
    for page in site.pages():
        assert (staged / page).read_bytes() == (REPOSITORY / page).read_bytes()
        assert all((staged / path).is_file() for path in site.linked(page))
    pinned = (REPOSITORY / "docs/requirements.txt").read_text()
    assert all(
        line in pinned for line in (REPOSITORY / "docs/requirements.in").read_text().splitlines() if "==" in line
    )
