"""Finds the collection from the command line's side: its pure modules, its data, its locks.

The package gpu_fleet lies in the collection's folder scripts, in a checkout as in an installed tarball; installed by pip
on its own, it takes the collection that ansible-galaxy put where Ansible looks.

What a lock or a version is, is written once, in plugins/module_utils, since hosts need it as well.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from gpu_fleet.places import find

COLLECTION = find(Path(__file__).resolve().parents[2])
# The folder that holds ansible_collections: Ansible finds the collection by its full name from there.
COLLECTIONS = (
    COLLECTION.parents[2]
    if COLLECTION.parts[-3:] == ("ansible_collections", "gpu_fleet", "vllm")
    else COLLECTION / "collections"
)
LOCKS = COLLECTION / "locks"


def version() -> str:
    """The collection's version: from galaxy.yml in a checkout, from MANIFEST.json where it was installed."""
    manifest = COLLECTION / "MANIFEST.json"
    if manifest.is_file():
        return str(json.loads(manifest.read_text(encoding="utf-8"))["collection_info"]["version"])
    return str(yaml.safe_load((COLLECTION / "galaxy.yml").read_text(encoding="utf-8"))["version"])


def module_util(name: str) -> Any:
    """The module plugins/module_utils/NAME.py, by its full name."""
    folder = str(COLLECTIONS)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(f"ansible_collections.gpu_fleet.vllm.plugins.module_utils.{name}")


def plugin_util(name: str) -> Any:
    """The module plugins/plugin_utils/NAME.py, likewise."""
    module_util("findings")
    return importlib.import_module(f"ansible_collections.gpu_fleet.vllm.plugins.plugin_utils.{name}")


def data(name: str) -> Any:
    """The content of data/NAME.yml."""
    with open(COLLECTION / "data" / f"{name}.yml", encoding="utf-8") as handle:
        return yaml.safe_load(handle)


@functools.cache
def data_cached(name: str) -> Any:
    """`data`, read once a run."""
    return data(name)


def uv_binary() -> str:
    """Path of the pinned uv of this environment. Raises FileNotFoundError with the remedy."""
    try:
        from uv import find_uv_bin
    except ImportError as error:
        raise FileNotFoundError("uv is not installed beside this Python; run scripts/bootstrap") from error
    return str(find_uv_bin())
