"""Write the options of `vllm serve` (or of its API server) as they stand in the sources of a release.

For releases whose parser cannot be asked any more, since the libraries that it needs are no longer to be had: before 0.8.5
every option is an `add_argument` call, so the sources say it all. Nothing is imported:

    python scripts/gpu_fleet/flags_read.py data/serve_flags 0.7.3 /path/with/vllm

Newer releases make options of the fields of their configuration: ask those with scripts/flags. The format is the same.
"""

from __future__ import annotations

import ast
import pathlib
import sys
from typing import Any

FILES = (
    "engine/arg_utils.py",
    "entrypoints/openai/cli_args.py",
    "entrypoints/openai/api_server.py",
    "scripts.py",
)
# Subcommands beside `serve` in the same file, and options that belong to them.
NOT_SERVE = {"url", "model-name", "system-prompt", "version"}


def word(node: ast.AST | None) -> str:
    """`int` of int, `json.loads` as loads, a wrapper as the name of the function that is called."""
    if isinstance(node, ast.Call):
        return word(node.func)
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def kind(keywords: dict[str, ast.expr]) -> str:
    action = keywords.get("action")
    named = action.value if isinstance(action, ast.Constant) else word(action)
    if named in ("store_true", "store_false", "StoreBoolean", "BooleanOptionalAction"):
        return "switch"
    nargs = keywords.get("nargs")
    several = isinstance(nargs, ast.Constant) and nargs.value in ("+", "*")
    name = word(keywords.get("type"))
    if several or named in ("append", "LoRAParserAction", "PromptAdapterParserAction"):
        return "list"
    if name in ("loads", "nullable_kvs"):
        return "json"
    return name if name in ("int", "float") else "str"


def describe(folder: pathlib.Path) -> dict[str, Any]:
    flags: dict[str, str] = {}
    choices: dict[str, list[str]] = {}
    aliases: dict[str, str] = {}
    for path in (folder / "vllm" / name for name in FILES):
        if not path.is_file():
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"):
                continue
            written = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            longs = [w[2:].replace("_", "-") for w in written if w.startswith("--")]
            if not longs or longs[0] in NOT_SERVE:
                continue
            keywords = {k.arg: k.value for k in node.keywords if k.arg}
            flags[longs[0]] = kind(keywords)
            aliases.update(dict.fromkeys(longs[1:], longs[0]))
            listed = keywords.get("choices")
            if isinstance(listed, (ast.List, ast.Tuple)) and all(isinstance(e, ast.Constant) for e in listed.elts):
                values = sorted(str(e.value) for e in listed.elts if isinstance(e, ast.Constant))
                if flags[longs[0]] in ("str", "list"):
                    choices[longs[0]] = values
    return {"flags": dict(sorted(flags.items())), "choices": dict(sorted(choices.items())), "aliases": aliases}


def main() -> int:
    import yaml

    target, version, folder = sys.argv[1:4]
    found = describe(pathlib.Path(folder))
    header = (
        f"---\n# Options of the server of vLLM {version}, read from that release's sources by scripts/gpu_fleet/flags_read.py;\n"
        "# its parser was not asked. Do not edit.\n"
    )
    path = pathlib.Path(target) / f"{version}.yml"
    path.write_text(header + yaml.safe_dump(found, sort_keys=False, width=120), encoding="utf-8")
    print(f"{path}: {len(found['flags'])} options")
    return 0


if __name__ == "__main__":
    sys.exit(main())
