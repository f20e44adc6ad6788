"""Write the options of `vllm serve`, as the parser of the running release has them.

Runs with the interpreter of a release (not the controller's), so it imports nothing of this project.
Output, one file a version: `flags: {name: kind}` with the long name without dashes and the kinds
  switch  written `true` or `false` in a --config file (the parser has the option and its --no- form)
  int, float, str  one value        list  several values        json  a mapping, or a JSON string
  size    a number that may carry a suffix (16k, 16K) or, for some options, be `auto`
`choices` holds the allowed values where the parser lists them; `aliases` maps other long names.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import pathlib
import sys
import typing


def serve_parser() -> argparse.ArgumentParser:
    """The parser of `vllm serve`, built as vLLM's own command line builds it (vllm/entrypoints/cli/main.py)."""
    from vllm.entrypoints.cli.serve import cmd_init

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:  # before 0.12, where vllm.utils was one module
        from vllm.utils import FlexibleArgumentParser

    subparsers = FlexibleArgumentParser().add_subparsers(dest="subparser")
    return next(command.subparser_init(subparsers) for command in cmd_init())


def type_name(convert: typing.Any) -> str:
    """The name of an option's converter; vLLM wraps it in `optional_type` where None is allowed."""
    name = getattr(convert, "__qualname__", str(convert))
    if "optional_type" in name and getattr(convert, "__closure__", None):
        inner = [c.cell_contents for c in convert.__closure__ if callable(c.cell_contents)]
        return type_name(inner[0]) if inner else name
    return name


def kind(action: argparse.Action) -> str:
    """How a value of this option is written: see the module's docstring."""
    if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0:
        return "switch"
    name = type_name(action.type)
    if action.nargs in ("+", "*") or (isinstance(action.nargs, int) and action.nargs > 1):
        return "list"
    if "json" in name.lower() or "parse_dataclass" in name or name in ("loads", "union_dict_and_str"):
        return "json"
    if name in ("int", "float"):
        return name
    return "size" if name.startswith("human_readable_int") else "str"


def describe(parser: argparse.ArgumentParser) -> dict[str, typing.Any]:
    flags: dict[str, str] = {}
    choices: dict[str, list[str]] = {}
    aliases: dict[str, str] = {}
    for action in parser._actions:
        longs = [o[2:] for o in action.option_strings if o.startswith("--") and not o.startswith("--no-")]
        if not longs or longs[0] == "help":
            continue
        name, *others = longs
        flags[name] = kind(action)
        aliases.update(dict.fromkeys(others, name))
        if action.choices and flags[name] in ("str", "list"):
            choices[name] = sorted(str(c) for c in action.choices)
    return {"flags": dict(sorted(flags.items())), "choices": choices, "aliases": aliases}


def main() -> int:
    import yaml

    # VERSION is given where the sources lie beside the libraries of another release.
    version = sys.argv[2] if len(sys.argv) > 2 else importlib.metadata.version("vllm").split("+")[0]
    target = pathlib.Path(sys.argv[1]) / f"{version}.yml"
    found = describe(serve_parser())
    header = f"---\n# Options of `vllm serve` {version}, written by scripts/flags from the release's own parser. Do not edit.\n"
    target.write_text(header + yaml.safe_dump(found, sort_keys=False, width=120))
    print(f"{target}: {len(found['flags'])} options")
    return 0


if __name__ == "__main__":
    sys.exit(main())
