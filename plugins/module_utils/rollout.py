"""Which replicas to start, which to restart, and what must not be done. Pure.

A replica's ranks live and die together: a rank that came back alone never gets in again (measured), so whatever has to
be restarted is restarted on all hosts of the replica, one replica of a service at a time, and never while no other
replica can serve, unless the user allows the outage.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence, Tuple

Result = Mapping[str, Any]  # what gpu_fleet.vllm.generation returned for one instance on one host


def actions(
    plan: Mapping[str, Any],
    results: Mapping[str, Sequence[Result]],
    allow_outage: bool = False,
    started: Sequence[str] = (),
) -> Dict[str, List[Any]]:
    """What to do with each replica.

    results       host to the results of gpu_fleet.vllm.generation, each with `item` as the loop had it; hosts that are
                  not part of the run (--limit), have failed in it or could not be reached are absent
    started       instances that this run has started already: they serve now, as far as their hosts are still there
    start         instances to start on all their hosts; nothing of them serves now
    restart       instances to stop and start, in this order, one after the other; first what an earlier run did not finish
    unjudged      of these, what an earlier run changed, or stopped for a change, and was cut off before it judged the outcome
    judge         of these, what serves as wanted: only the outcome is to be judged
    refuse        what is needed and must not be done now: instance, its hosts in this run, message, and what is in its way:
                  instances that run in its place, and that the plan does not name
    """
    known = {
        (result["item"]["instance"], host): result
        for host, all_of_host in results.items()
        for result in all_of_host
        if "restart_reasons" in result
    }
    serving = _serving(plan, known, started)
    serving += _coming(plan, known)
    out: Dict[str, List[Any]] = {"start": [], "restart": [], "unjudged": [], "judge": [], "refuse": []}
    for instance, replica in plan["replicas"].items():
        ranks = {host: known[instance, host] for host in replica["hosts"] if (instance, host) in known}
        if not ranks or instance in started or all(rank["settled"] for rank in ranks.values()):
            continue
        missing = [host for host in replica["hosts"] if host not in ranks]
        reasons = [f"{reason} ({host})" for host, rank in ranks.items() for reason in rank["restart_reasons"]]
        active = [host for host, rank in ranks.items() if rank["active"] == "active"]
        strangers = [(host, name) for host, rank in ranks.items() for name in rank.get("strangers", ())]
        others = [other for other in plan["services"][replica["service"]]["replicas"] if other != instance]
        message, in_the_way = "", []
        if missing:
            message = _missing(instance, missing, reasons)
        elif strangers and len(active) < len(ranks):
            message = ". ".join(in_its_place(instance, [(host, f"vllm@{name}") for host, name in strangers]))
            in_the_way = list(dict.fromkeys(name for _host, name in strangers))
        elif not reasons and len(active) in (0, len(ranks)):
            out["start"].append(instance)
        elif len(active) < len(ranks) or allow_outage or any(other in serving for other in others):
            out["restart"].append(instance)
            if any(rank.get("unjudged") for rank in ranks.values()):
                out["unjudged"].append(instance)
            if all(rank.get("only_unjudged") for rank in ranks.values()):
                out["judge"].append(instance)
        else:
            message = _outage(instance, replica, reasons)
        if message:
            refused = {"instance": instance, "hosts": list(ranks), "message": message, "in_the_way": in_the_way}
            out["refuse"].append(refused)
    out["restart"].sort(key=lambda instance: instance not in out["unjudged"])
    return out


def _serving(plan: Mapping[str, Any], known: Mapping[Tuple[str, str], Result], started: Sequence[str]) -> List[str]:
    """Instances that serve: all ranks active, or started by this run on hosts that are still part of it."""
    found = []
    for instance, replica in plan["replicas"].items():
        ranks = [known.get((instance, host)) for host in replica["hosts"]]
        if all(rank is not None and (instance in started or rank["active"] == "active") for rank in ranks):
            found.append(instance)
    return found


def _coming(plan: Mapping[str, Any], known: Mapping[Tuple[str, str], Result]) -> List[str]:
    """Instances that an earlier run stopped for a change: they come first, and nothing after them is touched unless they serve."""
    found = []
    for instance, replica in plan["replicas"].items():
        ranks = [known.get((instance, host)) for host in replica["hosts"]]
        free = all(rank is not None and not rank.get("strangers") for rank in ranks)
        if free and any(rank and rank.get("unjudged") for rank in ranks):
            found.append(instance)
    return found


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


def returns(results: Mapping[str, Sequence[Result]], instance: str, host: str) -> List[Dict[str, Any]]:
    """As `starts`, to bring back on one host what a replica ran before it was changed; empty where there is nothing to go back to.

    results     host to the results that the change began with, as of `actions`
    Only where every rank served, and with another generation: one rank alone never gets in, and what failed is not tried again. What
    an earlier run stopped for a change that it did not finish (`unjudged`) served, too.
    """
    ranks = {
        name: result for name, all_of in results.items() for result in all_of if result["item"]["instance"] == instance
    }
    if host not in ranks or set(ranks) != set(ranks[host]["item"]["hosts"]):
        return []
    served = all(rank["active"] == "active" or rank.get("unjudged") for rank in ranks.values())
    if not served or any(rank["running_generation"] in (None, "", rank["id"]) for rank in ranks.values()):
        return []
    return starts([{**ranks[host], "id": ranks[host]["running_generation"]}], [instance])


def tls(results: Mapping[str, Sequence[Result]], instance: str, before: bool = False) -> bool:
    """Whether a replica speaks TLS with what is to run on its hosts, or with what `returns` brings back; the same on all of them."""
    told = [each for all_of in results.values() for each in all_of if each["item"]["instance"] == instance]
    return any(each.get("tls_running" if before else "tls") for each in told)


def spoken(results: Mapping[str, Sequence[Result]]) -> Dict[str, bool]:
    """Instance to whether it speaks TLS as its hosts were found: with what `current` points at."""
    told = [each for all_of in results.values() for each in all_of if each.get("tls_before") is not None]
    return {each["item"]["instance"]: bool(each["tls_before"]) for each in told}


def speaking(results: Sequence[Result], instances: Sequence[str], refused: Sequence[str]) -> Dict[str, bool]:
    """Instance to whether it speaks TLS by now on one host, from that host's results: what is wanted, but for those that were to be
    restarted and may not be, which go on as they were."""
    found = {}
    for result in results:
        instance = result["item"]["instance"]
        if instance in instances:
            stays = instance in refused and result["tls_before"] is not None
            found[instance] = bool(result["tls_before"] if stays else result["tls"])
    return found


def turned(results: Mapping[str, Sequence[Result]]) -> List[str]:
    """Instances that will speak TLS and did not, or the other way round; not those that never ran."""
    told = [each for all_of in results.values() for each in all_of]
    found = [each["item"]["instance"] for each in told if each.get("tls_before") not in (None, each.get("tls"))]
    return list(dict.fromkeys(found))


def _missing(instance: str, missing: Sequence[str], reasons: Sequence[str]) -> str:
    what = f"has to be restarted: {'; '.join(reasons)}" if reasons else "does not serve"
    return (
        f"{instance} {what}, but {', '.join(missing)} is not part of this run (left out by --limit, failed or unreachable). "
        "All ranks of a replica start together: run again with all of its hosts. Its servers were left as they are"
    )


def in_its_place(instance: str, running: Sequence[Tuple[str, str]]) -> Tuple[str, str]:
    """What is wrong and what to do where others run in the place of an instance, which the inventory names no longer.

    running   host and unit of each, such as vllm@old.0
    """
    told = "; ".join(f"{unit} runs on {host}" for host, unit in running)
    services = list(dict.fromkeys(unit.partition("@")[2].rpartition(".")[0] for _host, unit in running))
    service = instance.rpartition(".")[0]
    if service in services:
        return (
            f"{instance} is to be started where replicas of {service} run under other numbers: {told}",
            # What is told of others would end every replica behind the host that left, at once.
            "They are numbered in the order of hosts, and a host before them left, came or changed its place, or has another number of "
            f"copies. All of them go on as they are. To have them keep their numbers, name the hosts of {service} in its `hosts`, a new "
            "one at the end and null in the place of each host that left; one that comes back stays where it is with vllm_host_state: "
            f"maintenance. To have them numbered anew, scripts/fleet teardown -i INVENTORY {service} ends all of them at once, and the "
            "next deploy starts them",
        )
    return (
        f"{instance} is to be started where instances run that the inventory no longer names, with GPUs and ports that it needs: {told}",
        f"They go on until you take them away: scripts/fleet teardown -i INVENTORY {' '.join(services)} (playbooks/teardown.yml "
        f"-e teardown_services={','.join(services)}). Then run this again",
    )


def _outage(instance: str, replica: Mapping[str, Any], reasons: Sequence[str]) -> str:
    return (
        f"{instance} has to be restarted: {'; '.join(reasons)}. No other replica of {replica['service']} serves, so its users would wait. "
        "Its servers were left as they are. Set vllm_service_allow_outage: true for this run to allow it"
    )
