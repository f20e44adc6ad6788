"""Command lines of documents, looked at: is each one understood by the program it calls?"""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import typer
import yaml
from conftest import REPOSITORY
from gpu_fleet.cli import app

OURS = ("scripts/", "molecule/shared/", ".venv/bin/", "./scripts/")
# Options of ansible-playbook and ansible-galaxy that documents use (ansible-core 2.18, `--help`).
PLAYBOOK_OPTIONS = {
    "-i",
    "-e",
    "--check",
    "--diff",
    "--limit",
    "--ask-become-pass",
    "--syntax-check",
    "-K",
    "--vault-password-file",
}


@cache
def fleet_command():
    return typer.main.get_command(app)


@cache
def variables() -> set[str]:
    """Every variable that -e may set: of roles, of the inventory, of playbooks."""
    known = set(yaml.safe_load((REPOSITORY / "data/fleet_variables.yml").read_text()))
    for path in REPOSITORY.glob("roles/*/defaults/main.yml"):
        known |= set(yaml.safe_load(path.read_text()) or {})
    for path in REPOSITORY.glob("playbooks/*.yml"):
        known |= set(re.findall(r"\b([a-z]+_[a-z_]+) \| default\(", path.read_text()))
    known |= set(re.findall(r"^\s+([a-z_]+):", (REPOSITORY / "playbooks/mirror.yml").read_text(), re.MULTILINE))
    return known


def blocks(document: Path) -> list[tuple[int, str]]:
    """Lines of a document's shell blocks, by number; lines that go on are joined."""
    found, inside, held = [], None, ""
    for number, written in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        if written.lstrip().startswith("```"):
            inside = None if inside is not None else written.strip()[3:]
            continue
        if inside not in ("", "bash", "console", "sh"):
            continue
        line = held + written.strip().removeprefix("$ ")
        held = ""
        if line.endswith("\\"):
            held = line[:-1]
        elif line:
            found.append((number, line))
    return found


def programs(line: str) -> list[list[str]]:
    """The programs that a line calls, with their arguments."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&()<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    out: list[list[str]] = [[]]
    skip = False
    for word in lexer:
        if word in (";", "|", "&&", "||", "&"):
            out.append([])
        elif set(word) <= set("<>"):
            skip = True
        elif skip:
            skip = False
        elif out[-1] or not re.fullmatch(r"[A-Z_]+=.*", word):
            out[-1].append(word)
    return [words for words in out if words]


def misused(line: str) -> str:
    """What is wrong with a line; empty when it is understood, or calls nothing of ours."""
    try:
        called = programs(line)
    except ValueError as error:
        return str(error)
    return "; ".join(filter(None, (_wrong(words) for words in called)))


def _wrong(words: list[str]) -> str:
    name = words[0]
    if name in ("scripts/fleet", "fleet"):
        return _fleet(words[1:])
    if name.endswith("ansible-playbook"):
        return _playbook(words[1:])
    if name.startswith(OURS) and not name.startswith(".venv") and not (REPOSITORY / name).is_file():
        return f"there is no {name}"
    return ""


def _fleet(arguments: list[str]) -> str:
    group = fleet_command()
    if not arguments or arguments[0] in ("VERB", "--help", "-h"):
        return ""
    command = group.commands.get(arguments[0])
    if command is None:
        return f"fleet has no verb {arguments[0]}"
    try:
        with group.make_context("fleet", [], resilient_parsing=True) as above:
            command.make_context(arguments[0], list(arguments[1:]), parent=above)
    except typer.Exit:
        return ""
    except Exception as error:  # the parser's own, which typer does not offer by name
        return error.format_message() if hasattr(error, "format_message") else repr(error)
    return ""


def _playbook(arguments: list[str]) -> str:
    wrong, rest = [], iter(arguments)
    for word in rest:
        if word in ("-e", "--extra-vars"):
            value = next(rest, "")
            name = value.partition("=")[0]
            if not value.startswith(("@", "{", "ansible_")) and name not in variables():
                wrong.append(f"nobody reads the variable {name}")
        elif word in ("-i", "--limit", "--vault-password-file"):
            next(rest, "")
        elif word.startswith("-"):
            if word not in PLAYBOOK_OPTIONS:
                wrong.append(f"ansible-playbook {word} is not known here")
        elif not _is_playbook(word):
            wrong.append(f"there is no playbook {word}")
    return "; ".join(wrong)


def _is_playbook(word: str) -> bool:
    name = word.removeprefix("gpu_fleet.vllm.")
    if name != word:
        return (REPOSITORY / f"playbooks/{name}.yml").is_file()
    return (REPOSITORY / word).is_file()
