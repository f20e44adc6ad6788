"""Modules that are imported when something of them is first asked for.

Ansible reads every file of plugins/filter, from a to the name that is asked for, in each process that evaluates a template, and
compiles what a collection's file imports anew each time. What a run of site.yml never uses has to cost it nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

_PACKAGE = "ansible_collections.gpu_fleet.vllm.plugins.module_utils"


class Module:
    """A module of plugins/module_utils by its name, in place of its import. Any attribute imports it."""

    def __init__(self, name: str) -> None:
        self._name = f"{_PACKAGE}.{name}"

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)

    def function(self, name: str) -> Callable[..., Any]:
        """A function of it that imports it when it is called."""

        def call(*args: Any, **options: Any) -> Any:
            return getattr(self, name)(*args, **options)

        call.__name__ = call.__qualname__ = name
        return call
