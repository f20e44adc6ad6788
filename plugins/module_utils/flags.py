"""Are a service's `args` options that this version of `vllm serve` takes, with values it can read?

The options come from data/serve_flags/VERSION.yml (written from the parser itself by scripts/flags), what became of
removed ones from data/removed_flags.yml. vLLM drops a `false` for an option without a --no- form and cannot read an
empty list; both are said here instead of being lost (vllm/utils/argparse_utils.py, load_config_file).
"""

from __future__ import annotations

import json
import re
from typing import Any, Dict, List, Optional

from .findings import Finding, did_you_mean

# What the collection plans and writes itself: setting it twice would let two truths part.
OWNED = {
    "model": "the key `model` of the service",
    "served-model-name": "the key `served_model_names` of the service",
    "host": "the variable fleet_address of the host, which the probe and the firewall go by, too",
    "port": "the key `port_base` of the service",
    "nnodes": "the key `hosts_per_replica` of the service",
    "node-rank": "the order of `hosts`",
    "master-addr": "the first host of the replica and its fleet_address",
    "master-port": "the key `port_base` of the service",
    "headless": "the rank of the host",
    "data-parallel-address": "the first host of the replica and its fleet_address",
    "data-parallel-rpc-port": "the key `port_base` of the service",
    "data-parallel-size-local": "data-parallel-size, which is spread evenly over the hosts of a replica",
    "data-parallel-start-rank": "the order of `hosts`",
    "data-parallel-rank": "the order of `hosts`",
    "api-key": "the variable vllm_service_api_keys, which keeps keys out of files that others may read",
    "config": "this mapping itself",
    "uds": "TCP ports, which peers and the gateway reach",
}
# Options that `vllm serve` has, but that would leave the service never ready: why, and what to do.
_NO_TLS = "the readiness probe and the replicas' URLs speak plain http, TLS in the server is not supported yet"
_TLS_FIX = "Leave it out, and end TLS at a gateway"
UNSUPPORTED = {
    **dict.fromkeys(
        ("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs", "ssl-ciphers", "enable-ssl-refresh"),
        (_NO_TLS, _TLS_FIX),
    ),
    # Every data-parallel rank with an API of its own, balanced by somebody else.
    **dict.fromkeys(
        ("data-parallel-external-lb", "data-parallel-multi-port-external-lb", "data-parallel-supervisor-port"),
        (
            "it gives every rank an API and a port of its own, which no probe asks and no rule opens",
            "Leave it out: several replicas are balanced by a gateway, and data-parallel-hybrid-lb gives each host an API",
        ),
    ),
    "root-path": (
        "the readiness probe asks /v1/completions, another path is not supported yet",
        "Leave it out, and set the path at a gateway",
    ),
}
# The same for single values of an option (of a switch: true).
_NO_TEXT = "the readiness probe asks for a completion of a text, which it leaves no way to give; not supported yet"
_NO_COMPLETION = "the readiness probe asks for a completion, which a {} model has not; not supported yet"
UNSUPPORTED_VALUES = {
    "runner": {
        "pooling": _NO_COMPLETION.format("pooling"),
        "draft": _NO_COMPLETION.format("draft"),
    },
    # Each turns a model that writes text into a pooling one (vllm/config/model.py, _RUNNER_CONVERTS).
    "convert": {"embed": _NO_COMPLETION.format("converted"), "classify": _NO_COMPLETION.format("converted")},
    "grpc": {"true": "the readiness probe and the gateway speak HTTP, a gRPC server is not supported yet"},
    "skip-tokenizer-init": {"true": _NO_TEXT},
    "tokens-only": {"true": _NO_TEXT},
}
SIZE = re.compile(r"auto|-1|[0-9]+(\.[0-9]+)?[kKmMgGtT]?")


def _whole_number(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, str) and bool(re.fullmatch(r"-?[0-9]+", value)))


# Kinds that one look decides: what must hold, and what to say when it does not.
_SIMPLE = {
    "int": (_whole_number, "it wants a whole number"),
    "float": (lambda value: isinstance(value, (int, float)), "it wants a number"),
    "size": (lambda value: bool(SIZE.fullmatch(str(value))), "it wants a number, with k or K and the like at most"),
}


def _value_fault(kind: str, value: Any, choices: Optional[List[str]]) -> Optional[str]:
    """Why this value does not fit this kind of option, or None."""
    fault: Optional[str] = None
    if value is None:
        fault = "it has no value"
    elif kind == "switch":
        fault = None if isinstance(value, bool) else "it is a switch: write true or false"
    elif isinstance(value, bool):
        fault = "it wants a value, not true or false"
    elif kind in _SIMPLE:
        holds, say = _SIMPLE[kind]
        fault = None if holds(value) else say
    elif kind == "json":
        fault = _json_fault(value)
    elif kind == "list":
        values = value if isinstance(value, list) else [value]
        fault = _choice_fault(values, choices) if values else "an empty list is dropped by vLLM: leave the option out"
    else:
        fault = "it wants one value" if isinstance(value, (dict, list)) else _choice_fault([value], choices)
    return fault


def _json_fault(value: Any) -> Optional[str]:
    if not isinstance(value, str):
        return None
    try:
        json.loads(value)
    except ValueError:
        return "it wants a mapping, or JSON in quotes"
    return None


def _choice_fault(values: List[Any], choices: Optional[List[str]]) -> Optional[str]:
    wrong = [repr(v) for v in values if choices and str(v) not in choices]
    return f"{', '.join(wrong)} is not one of {', '.join(choices or [])}" if wrong else None


def check(
    service: str, args: Dict[str, Any], version: str, options: Dict[str, Any], removed: Dict[str, Dict[str, str]]
) -> List[Finding]:
    """Findings for one service's args.

    options  content of data/serve_flags/VERSION.yml: flags (name to kind), choices, aliases
    removed  content of data/removed_flags.yml: name to {gone_in, instead}
    """
    where = f"service {service}"
    flags, aliases, choices = options["flags"], options.get("aliases", {}), options.get("choices", {})
    found = []
    for written, value in args.items():
        name = written.lstrip("-").replace("_", "-")
        bare = name[3:] if name.startswith("no-") and name[3:] in flags else name
        bare = aliases.get(bare, bare)
        if bare in OWNED:
            found.append(Finding("owned-flag", where, f"args.{written} is set by the collection", f"Use {OWNED[bare]}"))
        elif bare in UNSUPPORTED:
            reason, fix = UNSUPPORTED[bare]
            found.append(Finding("unsupported-flag", where, f"args.{written}: {reason}", fix))
        elif bare == name and str(value).lower() in UNSUPPORTED_VALUES.get(bare, {}):
            reason = UNSUPPORTED_VALUES[bare][str(value).lower()]
            message = f"args.{written} is {str(value).lower()}: {reason}"
            found.append(Finding("unsupported-flag", where, message, "Leave it out"))
        elif bare not in flags:
            found.append(_unknown(where, written, bare, version=version, flags=flags, removed=removed))
        elif written != name:
            found.append(
                Finding("flag-spelling", where, f"args.{written} is not how a --config file spells it", f"Write {name}")
            )
        else:
            kind = flags[bare]
            fault = _value_fault(kind, value, choices.get(bare))
            if fault is None and kind == "switch" and name.startswith("no-") and value is not True:
                fault = f"a double negation: write {bare}: true or {bare}: false"
            if fault:
                fix = did_you_mean(value, choices.get(bare, [])) + fault[0].upper() + fault[1:]
                found.append(Finding("flag-value", where, f"args.{written} is {value!r}", fix))
    return found


def _unknown(
    where: str, written: str, name: str, *, version: str, flags: Dict[str, str], removed: Dict[str, Dict[str, str]]
) -> Finding:
    if name in removed:
        gone = removed[name]
        return Finding(
            "removed-flag",
            where,
            f"args.{written} is gone since vLLM {gone['gone_in']} (this is {version})",
            f"Instead: {gone['instead']}",
        )
    fix = f"{did_you_mean(name, flags)}`vllm serve --help=all` of {version} lists what there is"
    return Finding("unknown-flag", where, f"args.{written} is not an option of `vllm serve` {version}", fix)
