"""Finds the collection from the command line's side: its pure modules, its data, its locks.

What a lock or a version is, is written once, in plugins/module_utils, since hosts need it as well.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import yaml

COLLECTION = Path(__file__).resolve().parents[2]
LOCKS = COLLECTION / "locks"


def module_util(name: str) -> Any:
    """The module plugins/module_utils/NAME.py, by its full name in the checkout's collections folder."""
    folder = str(COLLECTION / "collections")
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
