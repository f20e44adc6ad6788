"""What rests while a host is in maintenance (vllm_host_state), by the plan. Pure; standard library only, Python 3.9: it runs on hosts, too."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence


def resting(plan: Mapping[str, Any]) -> Mapping[str, List[str]]:
    """Replicas that rest, each with its hosts in maintenance. A plan of an earlier collection has none."""
    return plan.get("maintenance", {}).get("replicas", {})


def hosts_of(plan: Mapping[str, Any], instance: str) -> List[str]:
    """Hosts on which units of a replica are: of vLLM, of Ray, or both."""
    replica = plan["replicas"][instance]
    return list(dict.fromkeys([*replica["hosts"], *(replica.get("ray_hosts") or ())]))


def resting_on(plan: Mapping[str, Any], host: str) -> List[str]:
    """Instances of a host that rest, since it or another of their hosts is in maintenance."""
    return [name for name in resting(plan) if host in hosts_of(plan, name)]


def speakers(plan: Mapping[str, Any], run: Sequence[str], left: Optional[Sequence[str]] = None) -> Dict[str, str]:
    """By replica that rests, the first of its hosts that is in the run. left: those alone whose speaker is still part of it."""
    found = {}
    for name in resting(plan):
        here = [host for host in hosts_of(plan, name) if host in run]
        if here and (left is None or here[0] in left):
            found[name] = here[0]
    return found
