"""The part of vLLM's parser that `--config FILE.yaml` needs, reading the simple YAML that the role writes."""

from __future__ import annotations

import argparse


def load(path: str) -> dict[str, object]:
    """Top-level `key: value` lines and `- item` lists: what the scenario's configurations hold."""
    config: dict[str, object] = {}
    key = ""
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            text = line.rstrip()
            if text.lstrip().startswith("- "):
                if not isinstance(config[key], list):
                    config[key] = []
                config[key].append(text.lstrip()[2:].strip("'\""))  # type: ignore[union-attr]
            elif text and not text.startswith("#"):
                key, _, value = text.partition(":")
                config[key] = {"true": True, "false": False}.get(value.strip(), value.strip().strip("'\""))
    return config


class FlexibleArgumentParser(argparse.ArgumentParser):
    def parse_args(self, args=None, namespace=None):  # type: ignore[override]
        args = list(args or [])
        if "--config" in args:
            place = args.index("--config")
            expanded = []
            for key, value in load(args[place + 1]).items():
                if value is True:
                    expanded.append(f"--{key}")
                elif isinstance(value, list):
                    expanded += [f"--{key}", *value]
                elif value is not False:
                    expanded += [f"--{key}", str(value)]
            args = args[:place] + expanded + args[place + 2 :]
        return super().parse_args(args, namespace)
