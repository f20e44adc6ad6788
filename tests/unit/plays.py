"""ansible-playbook run for real in a test, on this machine alone: the play, what it is given, what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from conftest import REPOSITORY

# A module in place of one that would reach a host; what it leaves in the file is a line of some of its parameters.
MODULE = """#!/usr/bin/python
# Stand-in, made for a test.
from ansible.module_utils.basic import AnsibleModule

names = {names}
module = AnsibleModule(argument_spec={{name: {{"type": "raw", "default": names[name]}} for name in names}})
line = {line!r}.format(**module.params)
if line:
    with open({record!r}, "a") as record:
        record.write(line + "\\n")
module.exit_json(changed=False, invocation_id="1", seconds=dict.fromkeys(["chat.0", "chat.1", "off.0"], 9))
"""
OWN = ("data", "meta", "plugins/filter", "plugins/module_utils", "plugins/plugin_utils", "plugins/lookup")


def played(
    folder: Path,
    plays: str | list[dict[str, Any]],
    hosts: str | Mapping[str, Any] = "localhost,",
    *options: str,
    environment: Mapping[str, str] | None = None,
    **variables: Any,
) -> tuple[int, str]:
    """The status, and what is said, in single spaces. The folder gets the play and the inventory.

    With a `collections` in the folder (stand_ins makes one) these are taken, and the checkout's configuration is not.
    """
    (folder / "play.yml").write_text(plays if isinstance(plays, str) else yaml.safe_dump(plays))
    if not isinstance(hosts, str):
        (folder / "hosts.json").write_text(json.dumps(hosts))
        hosts = str(folder / "hosts.json")
    own: dict[str, str] = {}
    if (folder / "collections").exists():
        own = {"ANSIBLE_COLLECTIONS_PATH": str(folder / "collections"), "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"}
    given = json.dumps({"ansible_python_interpreter": sys.executable, **variables})
    program = f"{os.path.dirname(sys.executable)}/ansible-playbook"
    done = subprocess.run(
        [program, str(folder / "play.yml"), "-i", hosts, "-e", given, *options],
        cwd=folder if own else REPOSITORY,
        env={**os.environ, **own, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout[-6000:], done.stderr[-2000:])
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def stand_ins(folder: Path, modules: Mapping[str, tuple[Mapping[str, Any], str]]) -> Path:
    """The collection in folder/collections with its own plugins, and these modules: parameters with defaults, and the line."""
    home = folder / "collections" / "ansible_collections" / "gpu_fleet" / "vllm"
    (home / "plugins" / "modules").mkdir(parents=True)
    for name in OWN:
        (home / name).symlink_to(REPOSITORY / name)
    for name, (options, line) in modules.items():
        text = MODULE.format(names=dict(options), line=line, record=str(folder / "record"))
        (home / "plugins" / "modules" / f"{name}.py").write_text(text)
    return home


def recorded(folder: Path) -> list[str]:
    """What the stand-ins left."""
    path = folder / "record"
    return path.read_text().splitlines() if path.exists() else []
