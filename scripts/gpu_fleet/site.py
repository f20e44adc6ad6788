"""The documents as a site of HTML pages with a search, for reading without a repository: `scripts/docs --site FOLDER`.

The pages are those of the repository, in their own tree, so that links between them hold; mkdocs builds them, in its
strict mode, from an environment of its own (docs/requirements.txt) that nothing else needs.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from gpu_fleet.domain import uv_binary
from gpu_fleet.pipconf import pip_settings, uv_environment
from gpu_fleet.steps import ROOT, environment

CACHE = ROOT / ".cache" / "site"
LINK = re.compile(r"\]\(([^)\s#]+)")


def pages() -> list[Path]:
    """The documents that are kept in git, by path from the repository's root."""
    command = ["git", "ls-files", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md", "roles/*/README.md"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(line) for line in told.splitlines() if (ROOT / line).is_file()]


def linked(page: Path) -> set[Path]:
    """Files that a page links to and that are no pages themselves."""
    found = set()
    for target in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        path = (ROOT / page.parent / target).resolve()
        if not target.startswith(("http:", "https:", "mailto:")) and path.is_file() and path.suffix != ".md":
            found.add(path.relative_to(ROOT))
    return found


def navigation(files: list[Path]) -> list[Any]:
    """The menu: first steps, then what docs/README.md lists in its order, roles, runbooks, measurements."""
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    listed = [Path("docs") / name for name in dict.fromkeys(LINK.findall(index)) if re.fullmatch(r"[\w-]+\.md", name)]
    first = [Path("README.md"), Path("docs/README.md"), Path("docs/tutorial.md")]

    def under(folder: str) -> list[str]:
        return [str(path) for path in files if str(path).startswith(folder)]

    return [
        *[str(path) for path in first if path in files],
        {"Guides and reference": [str(path) for path in listed if path in files and path not in first]},
        {"Roles": under("roles/")},
        {"Runbooks": under("docs/runbooks/")},
        {"Measurements": under("docs/validation/")},
        {"Project": ["CONTRIBUTING.md", "CHANGELOG.md"]},
    ]


def stage(into: Path) -> Path:
    """Lay out the pages for mkdocs; gives its configuration."""
    shutil.rmtree(into, ignore_errors=True)
    files = pages()
    for path in [*files, *sorted(set().union(*map(linked, files)))]:
        (into / "pages" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, into / "pages" / path)
    settings = {
        "site_name": "gpu_fleet.vllm",
        "docs_dir": "pages",
        "theme": {"name": "mkdocs", "highlightjs": False},  # which would come from elsewhere
        "nav": navigation(files),
        "validation": {"omitted_files": "info", "links": {"anchors": "warn", "not_found": "warn"}},
        "markdown_extensions": ["tables", "fenced_code"],
    }
    config = into / "mkdocs.yml"
    config.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return config


def mkdocs() -> Path:
    """mkdocs in an environment of its own, made anew when its requirements change."""
    wanted = ROOT / "docs/requirements.txt"
    digest = hashlib.sha256(wanted.read_bytes() + sys.version.encode()).hexdigest()
    venv, mark = CACHE / "venv", CACHE / "venv" / ".complete"
    if not mark.is_file() or mark.read_text(encoding="utf-8") != digest:
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
        command = [
            uv_binary(),
            "pip",
            "install",
            "--quiet",
            "--python",
            str(venv / "bin/python"),
            "--require-hashes",
            "-r",
        ]
        subprocess.run([*command, str(wanted)], check=True, env=environment(uv_environment(pip_settings())))
        mark.write_text(digest, encoding="utf-8")
    return venv / "bin" / "mkdocs"


def build(into: Path) -> int:
    """Build the site; mkdocs' exit status, 1 for a link that leads nowhere."""
    config = stage(CACHE / "stage")
    command = [str(mkdocs()), "build", "--strict", "--config-file", str(config), "--site-dir", str(into.resolve())]
    # Not --quiet: then its strict mode counts no warnings.
    done = subprocess.run(command, check=False, env={**environment(), "PYTHONPATH": ""}, capture_output=True, text=True)
    for line in done.stderr.splitlines():
        if not line.startswith("INFO"):
            print(line, file=sys.stderr)
    return done.returncode
