"""Where the collection lies whose playbooks, modules and data this package uses."""

from __future__ import annotations

import os
import sys
from pathlib import Path


class NoCollection(Exception):
    """The collection is not where Ansible looks; the message has the remedy."""


def _is_collection(folder: Path) -> bool:
    return (folder / "galaxy.yml").is_file() or (folder / "MANIFEST.json").is_file()


def find(own: Path) -> Path:
    """The collection's folder: `own`, or else the first one on Ansible's search path (COLLECTIONS_PATHS of its documentation)."""
    if _is_collection(own):
        return own
    named = os.environ.get("ANSIBLE_COLLECTIONS_PATH", "").split(os.pathsep)
    folders = [
        *filter(None, named),
        "collections",
        "~/.ansible/collections",
        "/usr/share/ansible/collections",
        *sys.path,
    ]
    for folder in folders:
        found = Path(folder).expanduser() / "ansible_collections" / "gpu_fleet" / "vllm"
        if _is_collection(found):
            return found.resolve()
    raise NoCollection(
        "the collection gpu_fleet.vllm is not installed where Ansible looks: ansible-galaxy collection install "
        "gpu_fleet-vllm-VERSION.tar.gz, or name the folder that holds ansible_collections in ANSIBLE_COLLECTIONS_PATH"
    )
