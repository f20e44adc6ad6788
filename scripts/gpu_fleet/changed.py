"""Which tests stand nearest to a change: `scripts/test --changed [REF]`.

A Python file is followed to everything that imports it, however far. Anything else - a role, a playbook, data, a recorded
answer - asks for the tests that name it, and for those of the Python files that do. A role asks for the scenarios that name it,
a module or a filter for the scenarios of the roles that use it. What cannot be placed, or what every test stands on, asks for
all that runs daily. It is a choice of what fails first, no proof: that is `scripts/test`.

Pure: names and texts of files in, names of tests out.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

COLLECTION = "gpu_fleet.vllm"
# Of these every test depends, or every scenario.
EVERY_TEST = re.compile(
    r"ansible\.cfg|requirements\.txt|scripts/(bootstrap|test)|scripts/gpu_fleet/(steps|testing)\.py|tests/unit/conftest\.py"
)
EVERY_SCENARIO = re.compile(r"molecule/shared/.*|tests/host/conftest\.py|\.config/molecule/.*")
# Tests that look at whole folders, by what is in them.
WHOLE: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"roles/.*", ("test_roles", "test_docs", "test_tarball")),
    (r"playbooks/.*", ("test_docs", "test_tarball")),
    (r"data/.*|plugins/.*", ("test_docs", "test_tarball")),
    (r".*\.md|docs/.*|scripts/(docs|gpu_fleet/(docs|site)\.py)", ("test_docs",)),
    (
        r"galaxy\.yml|meta/.*|execution-environment\.yml|requirements\.(in|yml)|pyproject\.toml",
        ("test_docs", "test_tarball"),
    ),
    (r"inventories/.*|site\.yml|prod", ("test_docs", "test_cli", "test_validate")),
    (r"locks/.*", ("test_locks", "test_releases")),
)
# Nobody's test: the linters look at them, and who runs them sees the rest.
LINTED = re.compile(
    r"\.[^/]*|\.(ci|github)/.*|changelogs/.*|LICENSE|scripts/[a-z]+|scripts/validation/.*|tests/(long|bench)/.*|docs/.*"
)
PLAYED = re.compile(r"tests/(?!unit/|host/|long/)\w+/.*")  # programs that tests start and scenarios copy
TESTS = re.compile(r"tests/unit/\w+\.py")
SPEAKERS = re.compile(r"tests/unit/\w+\.py|(plugins|scripts/gpu_fleet)/.*\.py")


@dataclass(frozen=True)
class Chosen:
    """What to run; `everything` is the reason why that is all of the daily tests, else empty."""

    unit: tuple[str, ...] = ()
    scenarios: tuple[str, ...] = ()
    everything: str = ""


def choose(changed: Iterable[str], texts: Mapping[str, str]) -> Chosen:
    """Unit test files and scenarios for a change.

    changed  paths of files that were changed, added or taken away
    texts    every file of the repository that is text, by its path
    """
    changed = sorted(set(changed))
    for path in changed:
        if EVERY_TEST.fullmatch(path):
            return Chosen(everything=f"{path} is what every test stands on")
    importers = _importers(texts)
    unit: set[str] = set()
    scenarios: set[str] = set()
    for path in changed:
        tests, more = _of(path, texts, importers)
        if not tests and not more and not LINTED.fullmatch(path):
            return Chosen(everything=f"nothing says who looks at {path}")
        unit |= tests
        scenarios |= more
    return Chosen(tuple(sorted(unit)), tuple(sorted(scenarios)))


def _of(path: str, texts: Mapping[str, str], importers: Mapping[str, set[str]]) -> tuple[set[str], set[str]]:
    """Unit tests and scenarios for one file."""
    named = {f"tests/unit/{name}.py" for pattern, names in WHOLE if re.fullmatch(pattern, path) for name in names}
    if EVERY_SCENARIO.fullmatch(path):
        return named & set(texts), _scenarios(texts)
    said = re.compile("|".join(name for other in _with_importing(path, texts) for name in _names(other)))
    where = TESTS if path.startswith(("tests/", "docs/", "molecule/")) or path.endswith(".md") else SPEAKERS
    speak = {other for other, text in texts.items() if other != path and where.fullmatch(other) and said.search(text)}
    code = path.endswith(".py") and not PLAYED.fullmatch(path)
    reached = _followed({path} if code else speak, importers) | {name for name in speak if _is_unit(name)}
    named |= {name for name in reached if _is_unit(name)}
    scenarios = {_scenario(name) for name in (path, *reached)} | _roles_with(reached, texts)
    if not code:
        scenarios |= {_scenario(other) for other, text in texts.items() if _scenario(other) and said.search(text)}
    if path.startswith("roles/"):
        scenarios.add(path.split("/")[1])
    return named & set(texts), _with_borrowers(scenarios & _scenarios(texts), texts)


def _with_importing(path: str, texts: Mapping[str, str]) -> set[str]:
    """A playbook, and those that import it."""
    found, edge = {path}, {path} if path.startswith("playbooks/") else set()
    while edge:
        names = "|".join(re.escape(posixpath.basename(name)) for name in edge)
        imports = re.compile(rf"import_playbook: ({names})$", re.MULTILINE)
        edge = {
            other for other, text in texts.items() if other.startswith("playbooks/") and imports.search(text)
        } - found
        found |= edge
    return found


def _with_borrowers(scenarios: set[str], texts: Mapping[str, str]) -> set[str]:
    """Scenarios, and those that play their files."""
    found, edge = set(scenarios), set(scenarios)
    while edge:
        borrowed = re.compile(rf"\.\./({'|'.join(sorted(edge))})/\w+\.yml")
        edge = {_scenario(other) for other, text in texts.items() if _scenario(other) and borrowed.search(text)} - found
        found |= edge
    return found & _scenarios(texts)


def _roles_with(reached: Iterable[str], texts: Mapping[str, str]) -> set[str]:
    """Roles that use a plugin by its name, or bring a file of module_utils to a host; the scenario of a role has its name."""
    plugins = [name for name in reached if re.fullmatch(r"plugins/(modules|action|filter|lookup)/\w+\.py", name)]
    words = {
        rf"\b{re.escape(COLLECTION)}\.{word}\b" for name in plugins for word in _offered(name, texts.get(name, ""))
    }
    words |= {
        rf"\b{re.escape(posixpath.basename(name))}\b" for name in reached if name.startswith("plugins/module_utils/")
    }
    if not words:
        return set()
    used = re.compile("|".join(sorted(words)))
    return {other.split("/")[1] for other, text in texts.items() if other.startswith("roles/") and used.search(text)}


def _names(path: str) -> Iterator[str]:
    """Expressions for how other files name this one."""
    parts = path.split("/")
    stem = re.escape(posixpath.splitext(parts[-1])[0])
    last = re.escape(parts[-1])
    if parts[0] == "roles" and len(parts) > 2:
        yield from (rf"\broles/{parts[1]}\b", rf"\b{re.escape(COLLECTION)}\.{parts[1]}\b", rf'"roles" / "{parts[1]}"')
    elif parts[0] in ("playbooks", "plugins"):
        yield from (rf"\b{re.escape(COLLECTION)}\.{stem}\b", rf"{re.escape('/'.join(parts[-2:]))}\b")
        if parts[0] == "playbooks":
            yield rf'\bplay\("{stem}"'
    elif parts[0] == "data":
        yield from (rf"\bdata/{last}", rf'\bload\("{stem}"', rf"\.data', '{stem}'")
    elif path.startswith("tests/unit/fixtures/"):
        yield from (rf'fixtures(/|" / "){re.escape(parts[3])}\b', rf'"{re.escape(parts[3])}(/|")')
    elif PLAYED.fullmatch(path):
        yield rf'\btests(/|" / "){parts[1]}\b'
    else:
        yield re.escape(path)


def _offered(plugin: str, text: str) -> set[str]:
    """What a plugin's file brings: its own name, or its filters' names."""
    stem = posixpath.splitext(posixpath.basename(plugin))[0]
    return set(re.findall(r'"(\w+)":', text.partition("def filters(")[2])) if "/filter/" in plugin else {stem}


def _scenarios(texts: Mapping[str, str]) -> set[str]:
    """Folders of molecule/, and the demo, which has its tests beside theirs."""
    found = {name.split("/")[1] for name in texts if re.fullmatch(r"molecule/\w+/molecule\.yml", name)}
    return found | {"demo"} if "tests/host/test_demo.py" in texts else found


def _scenario(path: str) -> str:
    found = re.match(r"molecule/(\w+)/|tests/host/test_(\w+)\.py", path)
    return (found[1] or found[2]) if found else ""


def _is_unit(name: str) -> bool:
    return re.fullmatch(r"tests/unit/test_\w+\.py", name) is not None


def _followed(begun: set[str], users: Mapping[str, set[str]]) -> set[str]:
    reached, edge = set(begun), set(begun)
    while edge:
        edge = {user for name in edge for user in users.get(name, ())} - reached
        reached |= edge
    return reached


def _importers(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """Python files of the repository, and who imports each."""
    users: dict[str, set[str]] = {}
    for path, text in texts.items():
        if path.endswith(".py") and not path.endswith("/conftest.py"):  # what it lends to all says nothing of one
            for used in _imports(path, text, texts):
                users.setdefault(used, set()).add(path)
    return users


def _imports(path: str, text: str, files: Mapping[str, str]) -> Iterator[str]:
    try:
        tree = ast.parse(text)
    except SyntaxError:  # ruff says it better
        return
    folder = posixpath.dirname(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module, names = (node.module or "").replace(".", "/"), [alias.name for alias in node.names]
            if node.level:
                above = posixpath.normpath(posixpath.join(folder, *[".."] * (node.level - 1)))
                yield from _files([posixpath.join(above, module)], names, files)
                continue
        elif isinstance(node, ast.Import):
            module, names = "", [alias.name.replace(".", "/") for alias in node.names]
        else:
            continue
        inside = module.removeprefix(f"ansible_collections/{COLLECTION.replace('.', '/')}/")
        yield from _files(
            [inside, f"scripts/{inside}", f"{folder}/{inside}", f"molecule/shared/{inside}"], names, files
        )


def _files(bases: Iterable[str], names: Iterable[str], files: Mapping[str, str]) -> Iterator[str]:
    """What `from BASE import NAMES` reads: a module of that name in the package, else the package itself."""
    for base in bases:
        for name in names:
            places = (posixpath.normpath(f"{base}/{name}.py"), f"{base}.py", f"{base}/__init__.py")
            yield from [place for place in places if place in files][:1]
