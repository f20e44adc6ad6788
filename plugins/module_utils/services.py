"""What a user writes in `vllm_services`, read and checked. Pure: no Ansible, no file, no host.

`read(raw)` turns the list into Service objects and returns every mistake that the list alone shows.
What needs hosts, versions or ports is judged in plan.py.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import api_tls
from .findings import Finding, did_you_mean

# Keys that say on which hosts and GPUs a service runs, and as how many processes.
SHAPE = ("hosts", "hosts_per_replica", "replicas_per_host", "gpus", "args")
# A service's name is part of unit names, paths and metrics labels; the dot separates it from the replica number.
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")
# Names of a model stand in the command line of a unit: nothing in them may mean something to systemd or a shell.
MODEL_NAME = re.compile(r"(?!-)[A-Za-z0-9._:/-]+")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET_NAME = re.compile(r"(.*_)?(TOKEN|KEY|SECRET|PASSWORD)", re.IGNORECASE)

# What the collection sets for the unit by the plan: in `env` it would override the plan unseen. What to use instead.
_CACHE = "Leave it out: each generation compiles and caches in a folder of its own below /var/cache/vllm"
OWNED_ENV = {
    "CUDA_VISIBLE_DEVICES": "Use the key `gpus` of the service",
    "CUDA_DEVICE_ORDER": "Leave it out: the numbers of the key `gpus` are those of nvidia-smi",
    "VLLM_HOST_IP": "Use the variable fleet_address of the host",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "Use the variable fleet_address of the host",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "Use the key port_base of the service",
    # With it vLLM counts up from there where it would ask the kernel (get_open_port, vllm/utils/network_utils.py).
    "VLLM_PORT": "Leave it out: ranks take ports of nccl_port_range, which peers are let in to",
    "VLLM_ENGINE_READY_TIMEOUT_S": "Use the variable vllm_service_start_timeout",
    "GLOO_SOCKET_IFNAME": "Use the variable nccl_interface",
    "NCCL_SOCKET_IFNAME": "Use the variable nccl_interface",
    "UCX_NET_DEVICES": "Use the variables nccl_interface and nccl_rdma_devices",
    "RAY_ADDRESS": "Leave it out: it is the first host of the replica, and its port follows the key `ray_port_base`",
    "RAY_AUTH_MODE": "Leave it out: Ray asks for the token of ray_cluster_tokens, always",
    "RAY_AUTH_TOKEN_PATH": "Use the variable ray_cluster_tokens",
    "RAY_USAGE_STATS_ENABLED": "Leave it out: nothing is reported to anybody",
    "VLLM_RPC_BASE_PATH": "Leave it out: with Ray it is the cluster's own folder",
    "HF_HUB_OFFLINE": "Leave it out: models come by model_store_models, and hosts ask no hub",
    **dict.fromkeys(
        (
            "HOME",
            "XDG_CACHE_HOME",
            "VLLM_CACHE_ROOT",
            "VLLM_CONFIG_ROOT",
            "TORCHINDUCTOR_CACHE_DIR",
            "TRITON_CACHE_DIR",
            "CUDA_CACHE_PATH",
            "PYTHONPYCACHEPREFIX",
        ),
        _CACHE,
    ),
}
# Set for the unit, too, but as a preference that nothing else goes by: a service may say otherwise. PYTHONPATH is set while a former
# key is taken alone, and refused then (plugin_utils/inventory.py).
FREE_ENV = (
    "VLLM_NO_USAGE_STATS",
    "HF_HUB_DISABLE_TELEMETRY",
    "VLLM_LOGGING_COLOR",
    "VLLM_USE_FLASHINFER_SAMPLER",
    "PYTHONPATH",
)


def address(text: Any) -> Optional[str]:
    """An IPv4 or IPv6 address in its one usual spelling; None for a name, a network, or an address with a zone."""
    try:
        return None if "%" in str(text) else str(ipaddress.ip_address(str(text)))
    except ValueError:
        return None


def _is_source(value: Any) -> bool:
    """Something that a firewall rule can name: an address, a CIDR, or the word any."""
    if not isinstance(value, str) or "%" in value:
        return False
    try:
        return value == "any" or bool(ipaddress.ip_network(value, strict=False))
    except ValueError:
        return False


@dataclass(frozen=True)
class Key:
    """One key of a service: its type as words and as a check, and what it means."""

    kind: str
    required: bool
    description: str


KEYS: Dict[str, Key] = {
    "name": Key("name", True, "Name of the service; its replicas are NAME.0, NAME.1 and so on."),
    "model": Key("text", True, "An entry of model_store_models, or an absolute path on the hosts."),
    "served_model_names": Key(
        "model_names",
        False,
        "Names that requests may use, of letters, digits and . _ : / -; the first one labels metrics. Default: the service's name.",
    ),
    "hosts": Key(
        "places",
        False,
        "Hosts that serve it, in rank order, which numbers its replicas; null keeps the place of one that left. Default: the group gpu_hosts.",
    ),
    "hosts_per_replica": Key("count", False, "How many hosts act as one replica. Default 1."),
    "replicas_per_host": Key(
        "count",
        False,
        "Copies on each host, when hosts_per_replica is 1. Default: planned where model and GPUs are known, else 1.",
    ),
    "gpus": Key("gpus", False, "GPU numbers used on every host. Default: all that fleet_gpus says."),
    "port_base": Key("port", False, "First port of the block of 16 that a replica uses. Default 8000."),
    "clients": Key(
        "cidrs",
        False,
        "Addresses or CIDRs that may reach the API port besides gateways and monitors; the word any opens it to all.",
    ),
    "allow_remote_code": Key(
        "flag", False, "Consent to args.trust-remote-code: the model's own Python runs on the hosts. Default false."
    ),
    "executor": Key(
        "executor",
        False,
        "What starts the processes of a replica on its hosts: mp is vLLM's own (the default), ray a Ray cluster of the replica's hosts.",
    ),
    "ray_port_base": Key(
        "port", False, "First port of the block of 64 that Ray uses on each host, with executor: ray. Default 20000."
    ),
    "args": Key("mapping", False, "Options of `vllm serve`, as its own --config YAML spells them."),
    "env": Key(
        "env", False, "Further environment variables of the server. All users of the host can read them: no secrets."
    ),
}

_EXPECT = {
    "name": "a name of small letters, digits and dashes, 42 characters at most",
    "text": "a text without line breaks or blanks at its ends",
    "places": "a list of names of hosts without line breaks or blanks at their ends, each once, or null",
    "model_names": "a list of names, each once, of letters, digits and . _ : / - only, the dash not first: they stand in the unit's command line",
    "count": "a whole number of 1 or more",
    "gpus": "a list of GPU numbers, each once, such as [0, 1]",
    "port": "a port from 1024 to 65520",
    "cidrs": "a list of addresses or CIDRs, or [any]",
    "flag": "true or false",
    "executor": "mp or ray",
    "mapping": "a mapping of option to value",
    "env": "a mapping of variable to text or number",
}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_line(value: Any) -> bool:
    return _is_text(value) and value == value.strip() and len(value.splitlines()) == 1


def _list_of(value: Any, check: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(check(v) for v in value)
        and len(set(map(str, value))) == len(value)
    )


def _are_places(value: Any) -> bool:
    """Hosts, each once, and None where one left, as often as that was."""
    named = [name for name in value if name is not None] if isinstance(value, list) else value
    return _list_of(named, _is_line) or (named == [] and bool(value))


def _env_findings(where: str, env: Dict[Any, Any]) -> List[Finding]:
    """What is wrong with single variables of `env`; the value of one that looks like a secret is not shown."""
    found = []
    for name, value in env.items():
        if not ENV_NAME.fullmatch(str(name)):
            message, fix = f"env.{name} is no variable's name", "Use letters, digits and underscores"
            found.append(Finding("wrong-type", where, message, fix))
        elif name in OWNED_ENV:
            message = f"env.{name} is set by the collection, and would override what was planned"
            found.append(Finding("owned-env", where, message, OWNED_ENV[name]))
        elif SECRET_NAME.fullmatch(str(name)):
            message = f"env.{name} looks like a secret, and env is readable by all users of the host"
            fix = "Leave it out: API keys belong in vllm_service_api_keys, and the hosts need no hub token"
            found.append(Finding("env-secret", where, message, fix))
        elif not (_is_text(value) or _is_int(value)):
            found.append(
                Finding(
                    "wrong-type", where, f"env.{name} is {value!r}", "It must be a text or a whole number, not empty"
                )
            )
        elif str(value) != str(value).strip() or any(sign in str(value) for sign in "\\'\"\n\r\0"):
            fix = "Write it without backslashes, quotes, line breaks and blanks at its ends: systemd's EnvironmentFile would change them"
            found.append(Finding("env-value", where, f"env.{name} is {value!r}", fix))
    return found


_CHECKS: Dict[str, Callable[[Any], bool]] = {
    "name": lambda v: isinstance(v, str) and bool(NAME.fullmatch(v)),
    "text": _is_line,
    "places": _are_places,
    "model_names": lambda v: _list_of(v, lambda n: isinstance(n, str) and bool(MODEL_NAME.fullmatch(n))),
    "count": lambda v: _is_int(v) and v >= 1,
    "gpus": lambda v: _list_of(v, lambda n: _is_int(n) and n >= 0),
    "port": lambda v: _is_int(v) and 1024 <= v <= 65520,
    "cidrs": lambda v: isinstance(v, list) and all(map(_is_source, v)),
    "flag": lambda v: isinstance(v, bool),
    "executor": lambda v: v in ("mp", "ray"),
    "mapping": lambda v: isinstance(v, dict) and all(isinstance(k, str) for k in v),
    "env": lambda v: isinstance(v, dict) and not _env_findings("", v),
}


@dataclass(frozen=True)
class Service:
    """One served model. Counts are whole numbers, ports TCP ports, gpus the numbers nvidia-smi shows.

    whole is False when keys of the entry had to be left out: then only what remains is judged, and nothing planned.
    hosts has None in the place of one that left.
    shaped is False when hosts, GPUs or sizes are among those, or may be: then they mean nothing.
    """

    name: str
    model: str
    served_model_names: Tuple[str, ...]
    hosts: Optional[Tuple[Optional[str], ...]]
    hosts_per_replica: int = 1
    replicas_per_host: Optional[int] = None
    gpus: Optional[Tuple[int, ...]] = None
    port_base: int = 8000
    clients: Tuple[str, ...] = ()
    allow_remote_code: bool = False
    executor: str = "mp"
    ray_port_base: int = 20000
    args: Dict[str, Any] = field(default_factory=dict)
    env: Dict[str, str] = field(default_factory=dict)
    whole: bool = True
    shaped: bool = True


def _tls_options(args: Dict[Any, Any]) -> List[str]:
    return [str(name) for name in args if str(name).lstrip("-").replace("_", "-") in api_tls.OWNED]


def _check_keys(where: str, raw: Dict[str, Any]) -> List[Finding]:
    found = []
    for key in raw:
        if key not in KEYS:
            found.append(
                Finding(
                    "unknown-key",
                    where,
                    f"unknown key {key!r}",
                    f"{did_you_mean(key, KEYS)}Known keys: {', '.join(sorted(KEYS))}",
                )
            )
    for key, spec in KEYS.items():
        if key not in raw:
            if spec.required:
                found.append(Finding("missing-key", where, f"the key {key} is missing", spec.description))
        elif spec.kind == "env" and isinstance(raw[key], dict):
            found.extend(_env_findings(where, raw[key]))
        elif key == "args" and isinstance(raw[key], dict) and (own := _tls_options(raw[key])):
            message = f"args.{', args.'.join(own)}: how a server speaks TLS is the collection's, since gateways, agents and monitors follow it"
            fix = "Leave it out and set vllm_service_tls: true; certificates come from the fleet's private CA"
            found.append(Finding("owned-args", where, message, fix))
        elif not _CHECKS[spec.kind](raw[key]):
            found.append(Finding("wrong-type", where, f"{key} is {raw[key]!r}", f"It must be {_EXPECT[spec.kind]}"))
    return found


def _is_shaped(entry: Dict[str, Any]) -> bool:
    """Whether the keys of SHAPE are as the user means them: none is wrong, and no unknown key looks like one of them."""
    wrong = [key for key in SHAPE if key in entry and not _CHECKS[KEYS[key].kind](entry[key])]
    both = entry.get("replicas_per_host", 1) != 1 and entry.get("hosts_per_replica", 1) != 1
    return not wrong and not both and not any(did_you_mean(key, SHAPE) for key in entry if key not in KEYS)


def _service(raw: Dict[str, Any], whole: bool, shaped: bool = True) -> Service:
    hosts, gpus = raw.get("hosts"), raw.get("gpus")
    return Service(
        name=raw["name"],
        model=raw["model"],
        served_model_names=tuple(raw.get("served_model_names") or [raw["name"]]),
        hosts=tuple(hosts) if hosts is not None else None,
        hosts_per_replica=raw.get("hosts_per_replica", 1),
        replicas_per_host=raw.get("replicas_per_host"),
        gpus=tuple(gpus) if gpus is not None else None,
        port_base=raw.get("port_base", 8000),
        clients=tuple(raw.get("clients", ())),
        allow_remote_code=raw.get("allow_remote_code", False),
        executor=raw.get("executor", "mp"),
        ray_port_base=raw.get("ray_port_base", 20000),
        args=dict(raw.get("args", {})),
        env={str(k): str(v) for k, v in raw.get("env", {}).items()},
        whole=whole,
        shaped=shaped,
    )


def read(raw: Any) -> Tuple[List[Service], List[Finding]]:
    """The services of `vllm_services` that can be read, and every mistake in the list.

    An entry with mistakes is read without the keys that are wrong, so that one run reports what else is wrong in it.
    """
    if not isinstance(raw, list):
        message = f"vllm_services is {type(raw).__name__}, not a list"
        return [], [
            Finding("wrong-type", "vllm_services", message, "Write one entry a served model, beginning with `- name:`")
        ]
    services: List[Service] = []
    found: List[Finding] = []
    names: Dict[str, int] = {}
    for number, entry in enumerate(raw, 1):
        if not isinstance(entry, dict):
            found.append(
                Finding(
                    "wrong-type",
                    f"vllm_services, entry {number}",
                    f"it is {entry!r}",
                    "It must be a mapping with at least name and model",
                )
            )
            continue
        where = f"service {entry['name']}" if _is_text(entry.get("name")) else f"vllm_services, entry {number}"
        mistakes = _check_keys(where, entry)
        if _is_text(entry.get("name")) and entry["name"] in names:
            mistakes.append(
                Finding(
                    "name-taken",
                    where,
                    f"entries {names[entry['name']]} and {number} have the same name",
                    "Give each service its own name",
                )
            )
        names.setdefault(str(entry.get("name")), number)
        if entry.get("replicas_per_host", 1) != 1 and entry.get("hosts_per_replica", 1) != 1:
            mistakes.append(
                Finding(
                    "replica-shape",
                    where,
                    "hosts_per_replica and replicas_per_host are both above 1",
                    "A replica either spans hosts or shares one: leave one of them out",
                )
            )
        if "ray_port_base" in entry and entry.get("executor") != "ray":
            message, fix = "ray_port_base is given, but executor is not ray", "Leave it out, or set executor: ray"
            mistakes.append(Finding("ray-ports", where, message, fix))
        found.extend(mistakes)
        right = {key: value for key, value in entry.items() if key in KEYS and _CHECKS[KEYS[key].kind](value)}
        if "name" in right and names[right["name"]] == number:
            services.append(_service({"model": "", **right}, whole=not mistakes, shaped=_is_shaped(entry)))
    return services, found
