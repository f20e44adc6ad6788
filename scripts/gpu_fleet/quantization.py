"""Write data/quantization.yml: which quantization methods each release of vLLM has, for which dtypes and GPUs.

Read from the sources of the releases (the folder `vllm` of a wheel), nothing is imported:

    python scripts/gpu_fleet/quantization.py data/quantization.yml 0.26.0=/path/with/vllm 0.33.0=/other/path ...

Methods are QUANTIZATION_METHODS of model_executor/layers/quantization/__init__.py, the class of each is from its
get_quantization_config, and its dtypes and least compute capability are what the class's get_supported_act_dtypes and
get_min_capability return, also where it inherits them. One line a span of releases that agree: `from` is the first of
the releases read that has it so, `gone` the first that lacks the method again.
"""

from __future__ import annotations

import ast
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

HERE = "vllm/model_executor/layers/quantization"


def key(version: str) -> tuple[int, ...]:
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in version.split(".")[:3])


def strings(node: ast.AST) -> list[str]:
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def methods(tree: ast.Module) -> list[str]:
    """QuantizationMethods, a Literal of names; in old releases the keys of a dict."""
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if getattr(target, "id", "") in (
            "QuantizationMethods",
            "QUANTIZATION_METHODS",
            "_QUANTIZATION_CONFIG_REGISTRY",
        ):
            names = strings(getattr(node, "value", node))
            if names:
                return names
    return []


def classes_of(tree: ast.Module) -> dict[str, str]:
    """Method to class name, out of every dict whose values are names of classes."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict) and all(isinstance(v, ast.Name) for v in node.values) and node.keys:
            for name, value in zip(node.keys, node.values, strict=True):
                if isinstance(name, ast.Constant) and isinstance(value, ast.Name):
                    found[str(name.value)] = value.id
    return found


def classes(folder: pathlib.Path) -> dict[str, ast.ClassDef]:
    found: dict[str, ast.ClassDef] = {}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, node)
    return found


def answers(name: str, function: str, known: dict[str, ast.ClassDef]) -> Iterator[ast.expr]:
    """What `function` of the class returns; of the first class up the line that has it."""
    node = known.get(name)
    if node is None:
        return
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == function:
            yield from (n.value for n in ast.walk(inner) if isinstance(n, ast.Return) and n.value)
            return
    for base in node.bases:
        yield from answers(getattr(base, "id", ""), function, known)


def facts(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Method to {capability, dtypes}; None where the source computes it."""
    tree = ast.parse((folder / HERE / "__init__.py").read_text(encoding="utf-8"))
    owners, known, found = classes_of(tree), classes(folder / HERE), {}
    for method in methods(tree):
        owner = owners.get(method, "")
        numbers = [n.value for n in answers(owner, "get_min_capability", known) if isinstance(n, ast.Constant)]
        dtypes = {
            n.attr.replace("half", "float16")
            for answer in answers(owner, "get_supported_act_dtypes", known)
            for n in ast.walk(answer)
            if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "torch"
        }
        found[method] = {"capability": numbers[0] if numbers else None, "dtypes": sorted(dtypes) or None}
    return found


def spans(read: dict[str, dict[str, dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for version in sorted(read, key=key):
        for method, fact in read[version].items():
            line = found.setdefault(method, [])
            if not line or "gone" in line[-1] or {k: line[-1][k] for k in fact} != fact:
                line.append({"from": version, **fact})
        for method, line in found.items():
            if method not in read[version] and "gone" not in line[-1]:
                line[-1]["gone"] = version
    return found


def main() -> int:
    target = pathlib.Path(sys.argv[1])
    read = {version: facts(pathlib.Path(path)) for version, path in (arg.split("=", 1) for arg in sys.argv[2:])}
    releases = sorted(read, key=key)
    quoted = ", ".join(f'"{r}"' for r in releases)
    lines = [
        "---",
        "# Quantization methods by release, read from the sources of the releases by scripts/gpu_fleet/quantization.py.",
        "# from: the first release read that has it so; gone: the first that lacks it; capability 75 is 7.5. Do not edit.",
        f"releases: [{quoted}]",
        "methods:",
    ]
    for method, line in sorted(spans(read).items()):
        lines.append(f"  {method}:")
        for span in line:
            capability = "null" if span["capability"] is None else span["capability"]
            dtypes = "null" if span["dtypes"] is None else f"[{', '.join(span['dtypes'])}]"
            gone = f', gone: "{span["gone"]}"' if "gone" in span else ""
            lines.append(f'    - {{from: "{span["from"]}", capability: {capability}, dtypes: {dtypes}{gone}}}')
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{target}: {len(spans(read))} methods in {len(releases)} releases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
