# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""In which turns hosts get another driver: hosts that act as one replica together, everything else one after the other.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

from typing import Any, Collection, Dict, List, Mapping, Sequence, Set


def _machines(entry: Mapping[str, Any]) -> Sequence[str]:
    """All hosts whose GPUs a replica uses: with Ray its server is on the head alone."""
    return entry.get("ray_hosts") or entry["hosts"]


def turns(plan: Mapping[str, Any], hosts: Sequence[str]) -> List[Dict[str, List[str]]]:
    """Turns in the order of hosts, each with its hosts and the replicas that are out of service during it.

    plan   the fact fleet_plan
    hosts  of the run
    A host of a replica that is not of the run is in the turn all the same: see `absent`.
    """
    found: List[Dict[str, List[str]]] = []
    seen: Set[str] = set()
    for host in hosts:
        if host in seen:
            continue
        mine: Set[str] = {host}
        replicas: Set[str] = set()
        while True:
            more = {name for name, entry in plan["replicas"].items() if mine & set(_machines(entry))}
            wider = mine.union(*(_machines(plan["replicas"][name]) for name in more))
            if more == replicas and wider == mine:
                break
            replicas, mine = more, wider
        seen |= mine
        ordered = [name for name in hosts if name in mine] + sorted(mine - set(hosts))
        found.append({"hosts": ordered, "replicas": sorted(replicas)})
    return found


def absent(turn: Mapping[str, Sequence[str]], hosts: Collection[str]) -> List[str]:
    """Hosts of a turn that are not of the run."""
    return [name for name in turn["hosts"] if name not in hosts]


def outages(
    plan: Mapping[str, Any], turn: Mapping[str, Sequence[str]], active: Mapping[str, Collection[str]]
) -> List[str]:
    """Services that would have no replica left, though one serves now.

    active  host to the instances whose unit is active there
    """

    def serves(name: str) -> bool:
        return all(name in active.get(host, ()) for host in plan["replicas"][name]["hosts"])

    services = {name: name.rpartition(".")[0] for name in plan["replicas"]}
    leaving = {services[name] for name in turn["replicas"] if name in services and serves(name)}
    staying = {services[name] for name in plan["replicas"] if name not in turn["replicas"] and serves(name)}
    return sorted(leaving - staying)


def waiting(plan: Mapping[str, Any], turn: Mapping[str, Sequence[str]], hosts: Collection[str]) -> List[str]:
    """Other replicas of the turn's services that are out of service until somebody reboots one of these hosts, as text."""
    services = {name.rpartition(".")[0] for name in turn["replicas"]}
    found = []
    for name, entry in plan["replicas"].items():
        mine = [host for host in _machines(entry) if host in hosts and host not in turn["hosts"]]
        if mine and name not in turn["replicas"] and name.rpartition(".")[0] in services:
            found.append(f"{name} on {', '.join(mine)}")
    return found
