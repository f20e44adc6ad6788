"""What the agent of one rank is told: whom it watches, who may ask it, how patient it is. Pure: the plan in, a dict out."""

from __future__ import annotations

from typing import Any, Dict, Mapping

LOOPBACK = "127.0.0.1"


def agent_config(
    instance: Mapping[str, Any], plan: Mapping[str, Any], host: str, settings: Mapping[str, Any]
) -> Dict[str, Any]:
    """The configuration of agent.py.

    instance   an entry of plan["hosts"][host]["instances"]
    settings   probe_interval, probe_deadline, lost_after, backoff, backoff_max, restart_limit, restart_window (seconds and
               counts) and cache_room (MiB), as the role's variables vllm_service_agent_* have them; xid, as
               data/hardware.yml has it
    """
    name, rank, ports = instance["instance"], instance["rank"], instance["ports"]
    replica, addresses = plan["replicas"][name], plan["addresses"]
    ranks = instance["hosts"]
    # The head watches every worker, a worker its head.
    watched = range(1, len(ranks)) if rank == 0 else (0,)
    return {
        "instance": name,
        "service": instance["service"],
        # Where nobody else may ask, nobody else reaches it.
        "listen": [addresses[host] if instance["agent_clients"] else LOOPBACK, ports["agent"]],
        "allow": list(instance["agent_clients"]),
        "peers": {str(other): [addresses[ranks[other]], ports["agent"]] for other in watched},
        "answers": host in replica["urls"],
        # In clear or by TLS is what the server that runs says (`current`): a change of that is no reason to restart agents.
        "url": _clear(replica["urls"].get(host, replica["url"])),
        "head_url": _clear(replica["url"]),
        "api": [addresses[host], ports["api"]],
        "model": instance["config"]["served-model-name"][0],
        "secrets": f"/etc/vllm/{name}/secrets.env",
        "current": f"/etc/vllm/{name}/current",
        "cache": f"/var/cache/vllm/{name}",
        "runtime": f"/run/vllm-agent/{name}",
        **_gpus(replica, settings),
        "probe_every": float(settings["probe_interval"]),
        "probe_deadline": float(settings["probe_deadline"]),
        "settings": {
            "rank": rank,
            "ranks": len(ranks),
            "lost_after": float(settings["lost_after"]),
            "backoff": float(settings["backoff"]),
            "backoff_most": float(settings["backoff_max"]),
            "limit": int(settings["restart_limit"]),
            "window": float(settings["restart_window"]),
            # A token that all ranks have worked for proves that all are there; with data parallel ranks it does not.
            "spans": int(replica.get("data") or 1) == 1,
            "room": int(settings["cache_room"]) << 20,
        },
    }


def _clear(url: str) -> str:
    return f"http://{url.partition('://')[2]}"


def _gpus(replica: Mapping[str, Any], settings: Mapping[str, Any]) -> Dict[str, Any]:
    """Its GPUs, and which Xids of them are failures for good; nothing for a replica without GPUs."""
    if not replica.get("gpus"):
        return {}
    known = settings.get("xid", {})
    out = {str(code): entry["what"] for code, entry in known.items() if entry.get("out")}
    return {"gpus": list(replica["gpus"]), "xid_out": out}
