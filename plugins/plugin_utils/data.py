"""The collection's own files, found relative to this one, so that an installed tarball works as the checkout does."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import yaml

try:  # libyaml's, eight times as fast, where PyYAML was built with it
    from yaml import CSafeLoader as Loader
except ImportError:  # pragma: no cover
    from yaml import SafeLoader as Loader  # type: ignore[assignment]

ROOT = pathlib.Path(__file__).resolve().parents[2]


def read(path: pathlib.Path) -> Any:
    """Content of a file of YAML."""
    return yaml.load(path.read_text(encoding="utf-8"), Loader)  # a safe one


@functools.cache
def load(name: str) -> Any:
    """Content of data/NAME.yml.

    Raises FileNotFoundError when there is no such file.
    """
    return read(ROOT / "data" / f"{name}.yml")


@functools.cache
def role_names() -> tuple[str, ...]:
    return tuple(sorted(path.parents[1].name for path in ROOT.glob("roles/*/meta/argument_specs.yml")))


@functools.cache
def role_options(role: str) -> dict[str, Any]:
    """The variables of a role: name to the options of its argument spec."""
    spec = read(ROOT / "roles" / role / "meta" / "argument_specs.yml")
    return spec["argument_specs"]["main"].get("options", {})


def role_default(role: str, name: str) -> Any:
    """The default of a role's variable. Raises KeyError when the role has no such variable."""
    return role_options(role)[name].get("default")


def lock_files(folder: str = "") -> tuple[str, ...]:
    """Names of the locks of releases in locks/, or of those in a folder of it, such as addons/, with that folder."""
    return tuple(sorted(f"{folder}{path.name}" for path in (ROOT / "locks" / folder).glob("*.lock")))


def flag_versions() -> tuple[str, ...]:
    """The vLLM versions whose options are known (data/serve_flags)."""
    return tuple(sorted(path.stem for path in (ROOT / "data" / "serve_flags").glob("*.yml")))
