"""Which replicas to start, which to restart, and what must not be done. Pure.

A replica's ranks live and die together: a rank that came back alone never gets in again (measured), so whatever has to
be restarted is restarted on all hosts of the replica, one replica of a service at a time, and never while no other
replica can serve, unless the user allows the outage.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence

Result = Mapping[str, Any]  # what gpu_fleet.vllm.generation returned for one instance on one host


def actions(
    plan: Mapping[str, Any], results: Mapping[str, Sequence[Result]], allow_outage: bool = False
) -> Dict[str, List[str]]:
    """What to do with each replica.

    results       host to the results of gpu_fleet.vllm.generation, each with `item` as the loop had it; hosts that are
                  not part of the run (--limit) or could not be reached are absent
    start         instances to start on all their hosts; nothing of them serves now
    restart       instances to stop and start, in this order, one after the other
    refuse        messages: what is needed and must not be done now
    """
    known = {
        (result["item"]["instance"], host): result
        for host, all_of_host in results.items()
        for result in all_of_host
        if "restart_reasons" in result
    }
    out: Dict[str, List[str]] = {"start": [], "restart": [], "refuse": []}
    for instance, replica in plan["replicas"].items():
        ranks = {host: known[instance, host] for host in replica["hosts"] if (instance, host) in known}
        if not ranks or all(rank["settled"] for rank in ranks.values()):
            continue
        missing = [host for host in replica["hosts"] if host not in ranks]
        reasons = [f"{reason} ({host})" for host, rank in ranks.items() for reason in rank["restart_reasons"]]
        active = [host for host, rank in ranks.items() if rank["active"] == "active"]
        if missing:
            out["refuse"].append(_missing(instance, missing, reasons))
        elif not reasons and len(active) in (0, len(ranks)):
            out["start"].append(instance)
        elif len(active) < len(ranks) or allow_outage or _other_serves(plan, instance, known):
            out["restart"].append(instance)
        else:
            out["refuse"].append(_outage(instance, replica, reasons))
    return out


def starts(results: Sequence[Result], instances: Sequence[str]) -> List[Dict[str, Any]]:
    """What gpu_fleet.vllm.instance needs to start these instances on one host, from that host's results."""
    return [
        {
            "instance": result["item"]["instance"],
            "generation": result["id"],
            "rank": result["item"]["rank"],
            "hosts": result["item"]["hosts"],
            "store_port": result["item"]["ports"]["rank_store"],
        }
        for result in results
        if result["item"]["instance"] in instances
    ]


def _missing(instance: str, missing: Sequence[str], reasons: Sequence[str]) -> str:
    what = f"has to be restarted: {'; '.join(reasons)}" if reasons else "does not serve"
    return (
        f"{instance} {what}, but {', '.join(missing)} is not part of this run (left out by --limit, failed or unreachable). "
        "All ranks of a replica start together: run again with all of its hosts. Nothing was switched"
    )


def _outage(instance: str, replica: Mapping[str, Any], reasons: Sequence[str]) -> str:
    return (
        f"{instance} has to be restarted: {'; '.join(reasons)}. No other replica of {replica['service']} serves, so its users would wait. "
        "Nothing was switched. Set vllm_service_allow_outage: true for this run to allow it"
    )


def _other_serves(plan: Mapping[str, Any], instance: str, known: Mapping[Any, Result]) -> bool:
    service = plan["replicas"][instance]["service"]
    for other in plan["services"][service]["replicas"]:
        ranks = [known.get((other, host)) for host in plan["replicas"][other]["hosts"]]
        if other != instance and all(rank is not None and rank["active"] == "active" for rank in ranks):
            return True
    return False
