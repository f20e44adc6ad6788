# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Ports on which a server listens because an option or a variable of its service says so.

They are of no replica's block: no rule of the plan guards them, and nothing else would find that two of them are the same. From
vLLM 0.32.0, where each listens on all addresses of the host and asks nobody who he is:

kv-events-config        the publisher binds an endpoint with `*` or `::`, replay always, a port a data-parallel rank
                        (vllm/config/kv_events.py, vllm/distributed/kv_events.py); events hold the tokens of prompts
MooncakeConnector       its bootstrap server, 0.0.0.0, VLLM_MOONCAKE_BOOTSTRAP_PORT
                        (vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py)
ECMooncakeConnector     ec_port of ec-transfer-config, one a tensor-parallel rank of each data-parallel one
                        (vllm/distributed/ec_transfer/ec_connector/mooncake/config.py)
MoRIIOConnector         handshake_port and notify_port of kv_connector_extra_config, `*`, each one a tensor-parallel rank of
                        each data-parallel one (vllm/distributed/kv_transfer/kv_connector/v1/moriio/moriio_common.py)
VLLM_P2P_SIDE_CHANNEL_* the control socket of the P2P tier of KV offloading, one a data-parallel rank
                        (vllm/v1/kv_offload/tiering/p2p/manager.py), and VLLM_EC_SIDE_CHANNEL_* the one of the EC connector:
                        on localhost, unless the variable names another host (vllm/envs.py)

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import json
from typing import Any, Iterator, List, Mapping, NamedTuple, Optional

EVENTS, BOOTSTRAP, EC = 5557, 8998, 14579  # vLLM's own defaults
MORIIO = {"handshake_port": 6301, "notify_port": 61005}
# Of the variables VLLM_NAME_SIDE_CHANNEL_HOST and _PORT: NAME, the port's default, whether each data-parallel rank has one,
# what listens there.
SIDE_CHANNELS = (
    ("P2P", 5710, True, "the P2P tier of KV offloading"),
    ("EC", 5601, False, "the EC connector's side channel"),
)
LOCAL = ("127.0.0.1", "localhost", "::1", "[::1]")


class Listening(NamedTuple):
    """Ports of one option, and what listens there."""

    option: str
    ports: range
    what: str


def of_service(args: Mapping[str, Any], env: Mapping[str, Any], tensor: int = 1, data: int = 1) -> List[Listening]:
    """All of a server with so many tensor-parallel ranks in each of so many data-parallel ones."""
    found = list(_events(_mapping(args.get("kv-events-config")), data))
    first = _number(env.get("VLLM_MOONCAKE_BOOTSTRAP_PORT", BOOTSTRAP))
    if "MooncakeConnector" in connectors(args) and first:
        ports = range(first, first + (data - 1) * tensor + 1)
        found.append(Listening("args.kv-transfer-config", ports, "the bootstrap server of Mooncake"))
    for extra in _extras(_mapping(args.get("kv-transfer-config")), "MoRIIOConnector"):
        for key, default in MORIIO.items():
            first = _number(extra.get(key) or default)
            if first:
                ports = range(first, first + data * tensor)
                found.append(Listening(f"args.kv-transfer-config, {key}", ports, "MoRIIO"))
    for name, default, each, what in SIDE_CHANNELS:
        host, first = f"VLLM_{name}_SIDE_CHANNEL_HOST", _number(env.get(f"VLLM_{name}_SIDE_CHANNEL_PORT", default))
        if str(env.get(host) or LOCAL[0]) not in LOCAL and first:
            found.append(Listening(f"env.{host}", range(first, first + (data if each else 1)), what))
    ec = _mapping(args.get("ec-transfer-config"))
    first = _number(ec.get("ec_port", EC))
    if ec.get("ec_connector") == "ECMooncakeConnector" and first:
        found.append(
            Listening("args.ec-transfer-config", range(first, first + data * tensor), "Mooncake's EC connector")
        )
    return found


def _events(config: Mapping[str, Any], data: int) -> Iterator[Listening]:
    publisher = config.get("publisher") or ("zmq" if config.get("enable_kv_cache_events") else "null")
    if publisher != "zmq":
        return
    endpoints = {
        "endpoint": config.get("endpoint", f"tcp://*:{EVENTS}"),
        "replay_endpoint": config.get("replay_endpoint"),
    }
    for key, endpoint in endpoints.items():
        first = _bound(str(endpoint or ""), always=key == "replay_endpoint")
        if first:
            yield Listening(f"args.kv-events-config, {key}", range(first, first + data), "the publisher of KV events")


def _bound(endpoint: str, always: bool) -> Optional[int]:
    """The port that the publisher binds for others; None where it connects, stays on the host, or asks the kernel for one."""
    address, _, port = endpoint.partition("://")[2].rpartition(":")
    if not endpoint.startswith("tcp://") or not (always or "*" in endpoint or "::" in endpoint):
        return None
    return None if address in LOCAL else _number(port)


def connectors(args: Mapping[str, Any]) -> List[str]:
    """The connectors that move KV caches, by name."""
    return [str(config["kv_connector"]) for config in _configs(_mapping(args.get("kv-transfer-config")))]


def _configs(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The connector's own configuration and, for MultiConnector, those in it."""
    if "kv_connector" in config:
        yield config
        inner = _mapping(config.get("kv_connector_extra_config")).get("connectors")
        for item in inner if isinstance(inner, list) else []:
            yield from _configs(_mapping(item))


def _extras(config: Mapping[str, Any], name: str) -> Iterator[Mapping[str, Any]]:
    """What is given to each connector of a name."""
    for item in _configs(config):
        if item["kv_connector"] == name:
            yield _mapping(item.get("kv_connector_extra_config"))


def _mapping(value: Any) -> Mapping[str, Any]:
    """A mapping, or JSON in quotes; what is neither is told where values of options are, and left out here."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> Optional[int]:
    """A port; None for what is none, and for 0, by which the kernel chooses."""
    text = str(value)
    return int(text) if text.isdecimal() and 0 < int(text) < 65536 else None
