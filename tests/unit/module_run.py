"""A module run in the test's own process: what it is given, what its commands are answered, what it says at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import host_files

Answer = Callable[[Sequence[str]], tuple[int, str, str]]


class Ended(Exception):
    """The module said its last word."""


def nothing(command: Sequence[str]) -> tuple[int, str, str]:
    raise AssertionError(f"no command was expected: {command}")


def ran(
    patch: pytest.MonkeyPatch,
    module: ModuleType,
    params: Mapping[str, Any],
    *,
    check: bool = False,
    commands: Answer = nothing,
    programs: Mapping[str, str | None] | None = None,
) -> dict[str, Any]:
    """What the module returns, `failed` in it or not; defaults of its arguments are filled in, top level alone."""
    said: dict[str, Any] = {}

    class Module:
        def __init__(self, argument_spec: Mapping[str, Any], **_: Any) -> None:
            self.check_mode = check
            unknown = sorted(set(params) - set(argument_spec))
            assert not unknown, unknown
            self.params = {name: params.get(name, spec.get("default")) for name, spec in argument_spec.items()}

        def exit_json(self, **result: Any) -> None:
            said.update(result)
            raise Ended

        def fail_json(self, **result: Any) -> None:
            self.exit_json(failed=True, **result)

        def get_bin_path(self, name: str, required: bool = False, opt_dirs: Sequence[str] = ()) -> str | None:
            found = (programs or {}).get(name, f"/usr/bin/{name}")
            assert found or not required, name
            return found

        def run_command(self, command: Sequence[str]) -> tuple[int, str, str]:
            return commands(command)

    patch.setattr(module, "AnsibleModule", Module)
    with pytest.raises(Ended):
        module.main()  # type: ignore[attr-defined]
    return said


def anybodys(patch: pytest.MonkeyPatch) -> None:
    """Files are written and compared whoever runs the test; on hosts they are root's."""
    right = host_files.wrong

    def wrong(path: str, text: str, mode: int = 0o644) -> str | None:
        told = right(path, text, mode)
        return None if told and f" was {mode:04o} of " in told else told

    patch.setattr(host_files, "wrong", wrong)
    patch.setattr(host_files.os, "fchown", lambda *_: None)
