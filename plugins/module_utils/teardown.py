# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What of the collection goes from a host, and what stays. Pure: data/made.yml comes as an argument.

Standard library only, Python 3.9: it runs on hosts, too.
"""

from __future__ import annotations

import re
from typing import Any, Dict, Iterable, List, Mapping, Sequence

from . import maintenance

INSTANCE = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?\.\d+")


def service_of(instance: str) -> str:
    return instance.rpartition(".")[0]


def instances(names: Iterable[str]) -> List[str]:
    """Those of the names that are instances, SERVICE.N, each once."""
    return sorted({name for name in names if INSTANCE.fullmatch(name)})


def of_instance(made: Mapping[str, Any], kind: str, instance: str) -> List[str]:
    """Units or paths of an instance."""
    return [text.replace("INSTANCE", instance) for text in made["instance"][kind]]


def of_host(made: Mapping[str, Any], kind: str, places: Mapping[str, str]) -> List[str]:
    """Paths of a host, where the variables of the roles put them."""
    return [places.get(path[1:-1], "") if path.startswith("{") else path for path in made["host"][kind]]


def planned_on(plan: Mapping[str, Any], host: str) -> List[str]:
    """Instances that the inventory names on a host, Ray's parts of them included."""
    entry = plan["hosts"].get(host, {})
    named = {rank["instance"] for rank in [*entry.get("instances", ()), *entry.get("ray", ())]}
    return sorted(named | set(maintenance.resting_on(plan, host)))


def going(found: Sequence[str], plan: Mapping[str, Any], host: str, services: Sequence[str], named: bool) -> List[str]:
    """Instances that go from a host: those of the services (none: all) that the inventory does not name there; with `named` those, too."""
    planned = planned_on(plan, host)
    return [name for name in found if (not services or service_of(name) in services) and (named or name not in planned)]


def refused(
    seen: Mapping[str, Sequence[str]],
    plan: Mapping[str, Any],
    groups: Mapping[str, Sequence[str]],
    services: Sequence[str],
    named: bool,
) -> List[str]:
    """Why nothing is taken away, a sentence each; empty where it may be.

    seen      host of this run to the instances found on it
    groups    groups of the inventory
    services  services to take away; empty: all that the hosts have, and the hosts themselves
    """
    found = []
    leaving = {host: going(there, plan, host, services, named) for host, there in seen.items()}
    if not services and not named:
        for host in seen:
            its = [name for name in ("gpu_hosts", "gateways", "monitors") if host in groups.get(name, ())]
            if its:
                found.append(f"{host} is in {', '.join(its)}. Take it out of there, or say that it goes all the same")
    if services and not named and not any(leaving.values()):
        for host, there in seen.items():
            its = [name for name in there if service_of(name) in services and name in planned_on(plan, host)]
            if its:
                found.append(
                    f"the inventory names {', '.join(its)} on {host}. Take it out of vllm_services, or say that it goes all the same"
                )
    for instance, replica in plan["replicas"].items() if named else ():
        hosts = {*replica["hosts"], *(replica.get("ray_hosts") or ())}
        here = {host for host, names in leaving.items() if instance in names}
        if here and hosts - here - {host for host in seen if instance not in seen[host]}:
            others = ", ".join(sorted(hosts - here))
            found.append(
                f"{instance} runs on {others}, too, which would be left with a part of it. Name these hosts as well"
            )
    return found


def servers(names: Iterable[str], host: str) -> List[str]:
    """What a gateway may call them: BACKEND/SERVER, a replica's only API or one a host (module_utils/gateway.py)."""
    return [text for name in names for text in (f"{service_of(name)}/{name}", f"{service_of(name)}/{name}-{host}")]


def weights(
    models: Mapping[str, str], leaving: Sequence[str], plan: Mapping[str, Any], host: str, store: str
) -> List[str]:
    """Names of models in the store that instances leave behind and nobody else on the host uses.

    models   instance found on the host to the folder of its model
    """
    kept = {path for name, path in models.items() if name not in leaving}
    kept |= {
        str(rank["config"].get("model"))
        for rank in plan["hosts"].get(host, {}).get("instances", ())
        if rank["instance"] not in leaving
    }
    begin = store.rstrip("/") + "/"
    names = {
        path[len(begin) :]
        for name, path in models.items()
        if name in leaving and path not in kept and path.startswith(begin)
    }
    return sorted(name for name in names if name and "/" not in name)


def without_block(text: str, begin: str, end: str) -> str:
    """A text without the lines from begin to end; as it is where they are not both there, in this order."""
    lines = text.splitlines(keepends=True)
    bare = [line.strip() for line in lines]
    if begin not in bare or end not in bare[bare.index(begin) :]:
        return text
    first = bare.index(begin)
    last = bare.index(end, first)
    return "".join(lines[:first] + lines[last + 1 :])


def summary(left: Mapping[str, Sequence[str]]) -> Dict[str, List[str]]:
    """Hosts that have something left over."""
    return {host: list(names) for host, names in left.items() if names}
