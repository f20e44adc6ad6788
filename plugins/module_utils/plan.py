"""From services and hosts to what every host has to run. Pure: no Ansible, no file, no host is asked.

`build` returns the plan and every finding. The plan is computed once, shown, and then only rendered:

services   name -> replicas (instance names), served names, version, accelerator
replicas   instance -> service, hosts in rank order, head, ports, parallel sizes, reasons
exporters  host -> what the firewall lets monitors in to, of every host of the fleet
hosts      host -> instances (this host's rank of each: config for `vllm serve --config`, environment), openings
           (what the firewall lets in, and from whom)
maintenance  hosts that are taken out (vllm_host_state), and replicas that rest with them: replica -> those hosts. A replica
           that rests keeps its entry, ports and openings; `instances` and `ray` of its hosts do not have it

Addresses, ranks and ports come from the inventory alone, so a host that cannot be reached changes nothing elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

from . import api_tls, host_ports, launch_plan, option_ports
from .findings import Finding, did_you_mean
from .services import Service

# Rules of a launch that the inventory's own checks have, too, with their remedy.
JUDGED_ELSEWHERE = ("removed_flag", "unknown_flag", "flag_value", "world_size", "uneven_hosts", "remote_code")
# What a launch by hand has to see to, and roles nccl and firewall and the unit do here.
DONE_BY_ROLES = ("VLLM_HOST_IP", "NCCL takes ports", "without peer access")
# The sizes that `vllm serve` multiplies to the number of processes of a replica (vllm/config/parallel.py, world_size).
PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "prefill-context-parallel-size")


@dataclass(frozen=True)
class Host:
    """What the inventory says of one host.

    gpus     how many GPUs it has (fleet_gpus), None when the inventory does not say
    python   minor version of the releases' interpreter, such as 3.11
    ports    first and last port of nccl_port_range, the kernel's ephemeral ports
    others   whose ports else are there
    maintenance  whether it is taken out, with what runs on it (vllm_host_state)
    tls      whether its servers speak TLS (vllm_service_tls); None leaves it to the plan
    """

    name: str
    address: Optional[str]
    system: str
    python: str
    architecture: str
    accelerator: str
    version: str
    gpus: Optional[int]
    ports: Tuple[int, int]
    others: host_ports.Others = host_ports.NOTHING
    maintenance: bool = False
    tls: Optional[bool] = None


@dataclass(frozen=True)
class Unplanned:
    """Why a launch cannot be planned by memory."""

    reason: str


Launch = Callable[[Service, Tuple[Host, ...], Tuple[int, ...]], Union[launch_plan.Plan, Unplanned]]


@dataclass(frozen=True)
class Fleet:
    """All that the plan is built from besides the services.

    hosts         the hosts of the group gpu_hosts, in the inventory's order
    others        every other host of the inventory (named so that a mistake can be told from a typo)
    gateways      names of the gateways
    watchers      addresses of gateways and monitors: they reach the API port of every service
    monitors      addresses of monitors alone: they reach the exporters
    exporters     host -> ports of its exporters, of every host of the fleet; exporter_addresses their addresses
    models        names in model_store_models;  model_path the folder they lie in
    port_layout   content of data/ports.yml
    ray           content of data/ray.yml
    launch        plans how a service is launched on hosts with these GPUs on each; None where model or GPUs are not known
    outage        whether a service may be left without a replica (vllm_service_allow_outage)
    """

    hosts: Dict[str, Host]
    others: Sequence[str] = ()
    gateways: Sequence[str] = ()
    watchers: Sequence[str] = ()
    monitors: Sequence[str] = ()
    exporters: Mapping[str, Sequence[int]] = field(default_factory=dict)
    exporter_addresses: Mapping[str, Optional[str]] = field(default_factory=dict)
    models: Sequence[str] = ()
    model_path: str = "/var/lib/vllm/models"
    port_layout: Dict[str, Any] = field(default_factory=dict)
    ray: Dict[str, Any] = field(default_factory=dict)
    launch: Optional[Launch] = None
    outage: bool = False

    def planned(
        self, service: Service, hosts: Sequence[Host], gpus: Optional[Sequence[int]]
    ) -> Optional[launch_plan.Plan]:
        """The planned launch, if it can be planned."""
        planned = self.launch(service, tuple(hosts), tuple(gpus)) if self.launch and gpus else None
        return None if isinstance(planned, Unplanned) else planned

    def unplanned(self, service: Service, hosts: Sequence[Host], gpus: Optional[Sequence[int]]) -> List[str]:
        """What is to be said where a launch on GPUs is not planned by memory."""
        planned = self.launch(service, tuple(hosts), tuple(gpus)) if self.launch and gpus else None
        return [f"planned by the number of GPUs alone: {planned.reason}"] if isinstance(planned, Unplanned) else []


@dataclass(frozen=True)
class Replica:
    """One running copy of a service: its hosts in rank order, its place on them, its GPUs on each."""

    service: Service
    index: int
    hosts: Tuple[Host, ...]
    slot: int
    gpus: Optional[Tuple[int, ...]]
    reasons: Tuple[str, ...] = ()  # why there are so many copies
    notes: Tuple[str, ...] = ()

    @property
    def instance(self) -> str:
        return f"{self.service.name}.{self.index}"

    @property
    def resting(self) -> List[str]:
        """Hosts in maintenance that have a rank of it: without them it is nothing."""
        return [host.name for host in self.hosts if host.maintenance]


def build(services: Sequence[Service], fleet: Fleet) -> Tuple[Dict[str, Any], List[Finding]]:
    """The plan for all services that can be planned, and all findings."""
    found: List[Finding] = []
    replicas: List[Replica] = []
    for service in services:
        if not service.whole:
            found.extend(
                _unknown_host(f"service {service.name}", n, fleet)
                for n in service.hosts or ()
                if n and n not in fleet.hosts
            )
            continue
        made, mistakes = _replicas(service, fleet)
        found.extend(mistakes)
        replicas.extend(made)
    sizes: Dict[str, Dict[str, Any]] = {}
    for service in services:
        for replica in replicas:
            if replica.service is service:
                sizes[replica.instance], mistakes = _sizes(replica, fleet)
                found.extend(mistakes)
        found.extend(_model_findings(service, fleet))
        found.extend(_consent_findings(service))
        found.extend(_tls_findings([r for r in replicas if r.service is service]))
        found.extend(_ray_findings([r for r in replicas if r.service is service], fleet))
    found.extend(_gpu_findings(replicas))
    found.extend(_port_findings(replicas, fleet.port_layout))
    found.extend(_foreign_port_findings(replicas, fleet))
    found.extend(_option_port_findings(replicas, sizes, fleet.port_layout["offsets"]["side_channel"]["span"]))
    found.extend(_maintenance_findings(replicas, fleet))
    return _plan(services, replicas, sizes, fleet), list(dict.fromkeys(found))


# --- Which hosts form which replica -----------------------------------------------------------------------------


def _replicas(service: Service, fleet: Fleet) -> Tuple[List[Replica], List[Finding]]:
    where = f"service {service.name}"
    names: List[Optional[str]] = list(service.hosts if service.hosts is not None else fleet.hosts)
    found = [_unknown_host(where, name, fleet) for name in names if name is not None and name not in fleet.hosts]
    if not any(names):
        found.append(
            Finding("no-hosts", where, "it has no hosts", "Put hosts into the group gpu_hosts, or name them in `hosts`")
        )
    size = service.hosts_per_replica
    if names and len(names) % size:
        told = ", ".join(name or "null" for name in names)
        message = f"{len(names)} hosts ({told}) cannot be split into replicas of {size}"
        found.append(
            Finding("replica-size", where, message, f"Name a multiple of {size} hosts, or change hosts_per_replica")
        )
    places = [names[start : start + size] for start in range(0, len(names), size)]
    found.extend(_torn(where, place) for place in places if any(place) and not all(place))
    if found:
        return [], found
    replicas: List[Replica] = []
    number, gone = 0, 0
    for place in places:
        if not any(place):
            gone += 1
            continue
        group = tuple(fleet.hosts[name] for name in place if name is not None)
        found.extend(_group_findings(where, group))
        gpus, mistakes = _gpus(service, group)
        found.extend(mistakes)
        copies, share, used, reasons = _shares(service, group, gpus, fleet)
        idle = len(gpus or ()) - copies * used
        notes = (f"{idle} of the {len(gpus or ())} GPUs of each host stay idle",) if copies and idle else ()
        if copies < 1:
            message = f"{len(gpus or ())} GPUs cannot be split into {service.replicas_per_host} replicas on a host"
            found.append(Finding("replica-size", where, message, "Change replicas_per_host or gpus"))
        # As many replicas were in a place that is empty as are in the next one.
        number, gone = number + gone * copies, 0
        for slot in range(copies):
            own = tuple(gpus[slot * share : slot * share + used]) if gpus else None
            replicas.append(Replica(service, number, group, slot, own, reasons, notes))
            number += 1
    return ([] if found else replicas), found


def _torn(where: str, place: Sequence[Optional[str]]) -> Finding:
    stay = ", ".join(name for name in place if name)
    message = f"of the hosts of one replica only {stay} is left, with null in the place of the others"
    fix = (
        "All hosts of a replica leave together: write null for each, or name another host; or change hosts_per_replica"
    )
    return Finding("replica-size", where, message, fix)


def _shares(
    service: Service, group: Tuple[Host, ...], gpus: Optional[Sequence[int]], fleet: Fleet
) -> Tuple[int, int, int, Tuple[str, ...]]:
    """Copies on each host, GPUs that a copy may have, GPUs that it uses, and why. No copies: they do not divide.

    Where the user did not say how many copies, that is planned, if model and GPUs are known.
    """
    copies = service.replicas_per_host or 1
    reasons: Tuple[str, ...] = ()
    if not gpus:
        return copies, 0, 0, ()
    if len(gpus) % copies:
        return 0, 0, 0, ()
    if service.replicas_per_host is None and len(group) == 1:
        planned = fleet.planned(service, group, gpus)
        if planned and planned.outcome != "error" and planned.replicas > 1 and len(gpus) % planned.replicas == 0:
            copies = planned.replicas
            told = [choice.reason for choice in planned.choices if choice.flag == PARALLEL[0]]
            reasons = (f"replicas_per_host {copies}: {'; '.join(told) or 'the GPUs hold so many of the size given'}",)
    share = len(gpus) // copies
    planned = fleet.planned(service, group, gpus[:share])
    if not planned or planned.outcome == "error" or any(name in service.args for name in PARALLEL):
        return copies, share, share, reasons
    world = planned.tensor * planned.pipeline * int(planned.args.get("data-parallel-size") or 1)
    used = world // len(group) if world % len(group) == 0 else share
    return copies, share, min(share, used), reasons


def _unknown_host(where: str, name: str, fleet: Fleet) -> Finding:
    if name in fleet.others:
        return Finding(
            "host-not-gpu",
            where,
            f"host {name} is not in the group gpu_hosts",
            "Put it into gpu_hosts, or take it out of `hosts`",
        )
    fix = f"{did_you_mean(name, fleet.hosts)}The group gpu_hosts has: {', '.join(fleet.hosts) or 'no host'}"
    return Finding("unknown-host", where, f"host {name} is not in the inventory", fix)


def _group_findings(where: str, group: Tuple[Host, ...]) -> List[Finding]:
    """A replica's hosts run one release, for one kind of accelerator, and have addresses of one kind."""
    found = []
    families = {":" in host.address: host for host in group if host.address}
    if len(families) > 1:
        told = ", ".join(f"{host.name} {host.address}" for host in families.values())
        message = f"the hosts of one replica have addresses of IPv4 and of IPv6: {told}"
        found.append(Finding("mixed-replica", where, message, "Set fleet_address of all to one of them"))
    for fact, variable in (("version", "vllm_runtime_version"), ("accelerator", "vllm_runtime_accelerator")):
        values = {getattr(host, fact): host.name for host in group}
        if len(values) > 1:
            told = ", ".join(f"{name} has {value}" for value, name in values.items())
            found.append(
                Finding(
                    "mixed-replica",
                    where,
                    f"the hosts of one replica differ in {fact}: {told}",
                    f"Set {variable} to one value for all of them",
                )
            )
    return found


def _gpus(service: Service, group: Tuple[Host, ...]) -> Tuple[Optional[List[int]], List[Finding]]:
    """The GPU numbers that the service uses on each host of a replica; None on CPU hosts."""
    where, found = f"service {service.name}", []
    if group[0].accelerator == "cpu":
        if service.gpus is not None:
            found.append(
                Finding(
                    "gpus-on-cpu",
                    where,
                    f"gpus is {list(service.gpus)}, but {group[0].name} serves on its CPU",
                    "Leave gpus out",
                )
            )
        return None, found
    counts = {host.name: host.gpus for host in group}
    none = [f"{name} has {count}" for name, count in counts.items() if count is not None and count < 1]
    if none:
        message = f"it serves on GPUs (accelerator {group[0].accelerator}), and by fleet_gpus {', '.join(none)}"
        fix = (
            "Correct fleet_gpus, take the host out of `hosts`, or serve on its CPU with vllm_runtime_accelerator: cpu "
            "and a vllm_runtime_version that is offered for it"
        )
        found.append(Finding("no-gpus", where, message, fix))
        return [], found
    unknown = [name for name, count in counts.items() if count is None]
    if service.gpus is None:
        if unknown:
            fix = "Give the service `gpus: [0, 1]`, or say how many the host has: fleet_gpus: 2"
            found.append(Finding("gpus-unknown", where, f"how many GPUs {', '.join(unknown)} has is not known", fix))
            return [], found
        if len(set(counts.values())) > 1:
            told = ", ".join(f"{name} {count}" for name, count in counts.items())
            found.append(
                Finding(
                    "gpus-differ",
                    where,
                    f"the hosts of one replica have unequal GPU counts: {told}",
                    "Name the GPUs to use in `gpus`",
                )
            )
    gpus = list(service.gpus) if service.gpus is not None else list(range(group[0].gpus or 0))
    for name, count in counts.items():
        beyond = [number for number in gpus if count is not None and number >= count]
        if beyond:
            found.append(
                Finding(
                    "gpu-missing",
                    where,
                    f"GPU {', '.join(map(str, beyond))} is not on {name}, which has {count} (fleet_gpus)",
                    "Name GPUs that it has",
                )
            )
    return gpus, found


# --- How many processes a replica has ---------------------------------------------------------------------------


def _sizes(replica: Replica, fleet: Fleet) -> Tuple[Dict[str, Any], List[Finding]]:
    """Parallel sizes of a replica, planned where the user gave none, what else is planned, and why.

    Tensor parallelism stays within a host (its traffic needs NVLink or PCIe), pipeline parallelism goes across. Data
    parallel ranks are never cut: each host has as many of them, whole.
    """
    service, where = replica.service, f"service {replica.service.name}"
    nodes = len(replica.hosts)
    given = {name: int(service.args[name]) for name in PARALLEL if _whole(service.args.get(name))}
    tensor, pipeline, data, prefill = (given.get(name) for name in PARALLEL)
    reasons: List[str] = []
    found: List[Finding] = []
    places = nodes * len(replica.gpus) if replica.gpus is not None else None
    planned = fleet.planned(service, replica.hosts, replica.gpus)
    unplanned = fleet.unplanned(service, replica.hosts, replica.gpus)
    more: Dict[str, Any] = {"config": {}, "memory": None, "notes": [*replica.notes, *unplanned]}
    reasons.extend(replica.reasons)
    if planned:
        more, mistakes = _planned(planned, where)
        more["notes"] = [*replica.notes, *more["notes"]]
        found.extend(mistakes)
        reasons.extend(f"{choice.flag} {choice.value}: {choice.reason}" for choice in planned.choices)
        tensor, pipeline = tensor or planned.tensor, pipeline or planned.pipeline
        data = data or _whole_or_none(planned.args.get("data-parallel-size"))
    local = _ranks_of_host(data or 1, nodes)
    if tensor is None:
        tensor = _share(places // nodes if places else 1, local * (prefill or 1))
        reasons.append(f"tensor-parallel-size {tensor}: the {'GPUs of one host' if places else 'CPU of one host'}")
    if pipeline is None:
        pipeline = (
            _share(places, tensor * (data or 1) * (prefill or 1)) if places else max(1, nodes // (tensor * (data or 1)))
        )
        reasons.append(f"pipeline-parallel-size {pipeline}: across {nodes} host{'s' if nodes > 1 else ''}")
    world = tensor * pipeline * (data or 1) * (prefill or 1)
    told = " x ".join(
        f"{name.replace('-parallel-size', '')} {value}"
        for name, value in zip(PARALLEL, (tensor, pipeline, data, prefill), strict=False)
        if value
    )
    if planned and planned.outcome == "error" and not given:
        pass  # refused for what it is; its sizes mean nothing
    elif places is not None and world != places:
        message = f"{told} = {world} processes, but a replica has {places} GPUs ({nodes} host{'s' if nodes > 1 else ''} with {places // nodes})"
        found.append(
            Finding(
                "world-size",
                where,
                message,
                "Change the sizes in args, or `gpus`, or hosts_per_replica, so that the two are equal",
            )
        )
    elif world % nodes:
        message = f"{told} = {world} processes cannot be spread evenly over {nodes} hosts"
        found.append(
            Finding(
                "world-size", where, message, f"Make the product a multiple of {nodes}, or change hosts_per_replica"
            )
        )
    if nodes > 1 and (data or 1) > 1:
        found.extend(_data_findings(where, data or 1, nodes))
        balancing = (
            "each host's own API balances over its ranks" if _hybrid(service) else "the head's API balances over all"
        )
        reasons.append(f"data-parallel-size {data}: {local} on each of {nodes} hosts, {balancing}")
    sizes = {"tensor": tensor, "pipeline": pipeline, "data": data or 1, "world": world}
    return {**sizes, "reasons": reasons, **more}, found


def _ranks_of_host(data: int, nodes: int) -> int:
    """Data-parallel ranks on each host of a replica, where they divide; else as if all were on one."""
    return data // nodes if data % nodes == 0 else data


def _hybrid(service: Service) -> bool:
    """Whether each host of a replica has an API of its own, for its own data-parallel ranks."""
    return service.args.get("data-parallel-hybrid-lb") is True


def _data_findings(where: str, data: int, nodes: int) -> List[Finding]:
    """Data parallelism within a replica of several hosts: whole ranks on each, as many on one as on the other.

    A rank that spans hosts would need --nnodes besides, and vLLM lets all ranks of a model without experts meet at one
    master port then (reconfigure_for_independent_dp_rank in vllm/config/parallel.py of 0.32.0): not offered.
    """
    if data % nodes == 0:
        return []
    message = f"data-parallel-size {data} cannot be spread over the {nodes} hosts of a replica in whole ranks, as many on each"
    fix = f"Make it a multiple of {nodes}, or use several replicas instead: a smaller hosts_per_replica"
    return [Finding("data-parallel-hosts", where, message, fix)]


def _planned(planned: launch_plan.Plan, where: str) -> Tuple[Dict[str, Any], List[Finding]]:
    """What a planned launch adds to a replica: further arguments, memory, what is worth knowing; and what refuses it."""
    judged = [remark for remark in planned.verdict.findings if remark.rule not in JUDGED_ELSEWHERE]
    found = [
        Finding(remark.rule.replace("_", "-"), where, remark.message.rstrip("."), remark.fix)
        for remark in judged
        if remark.severity == "error"
    ]
    config = {choice.flag: choice.value for choice in planned.choices if choice.flag not in PARALLEL[:2]}
    notes = [f"{remark.message.rstrip('.')}. {remark.fix}" for remark in judged if remark.severity != "error"]
    notes += [note for note in planned.notes if not note.startswith(DONE_BY_ROLES)]
    return {"config": config, "memory": planned.verdict.memory, "notes": notes}, found


def _whole_or_none(value: Any) -> Optional[int]:
    return int(value) if _whole(value) else None


def _whole(value: Any) -> bool:
    return str(value).isdecimal() and int(value) > 0


def _share(places: int, taken: int) -> int:
    return max(1, places // taken) if places % taken == 0 else 1


# --- What collides, what is missing -----------------------------------------------------------------------------


def _model_findings(service: Service, fleet: Fleet) -> List[Finding]:
    if not service.model or service.model.startswith("/") or service.model in fleet.models:
        return []
    fix = f"{did_you_mean(service.model, fleet.models)}Known: {', '.join(fleet.models) or 'none'}; an absolute path on the hosts is fine, too"
    return [
        Finding("unknown-model", f"service {service.name}", f"model {service.model} is not in model_store_models", fix)
    ]


def _consent_findings(service: Service) -> List[Finding]:
    if service.args.get("trust-remote-code") and not service.allow_remote_code:
        fix = "Read that code, pin its revision, and then give the service allow_remote_code: true"
        return [
            Finding(
                "remote-code",
                f"service {service.name}",
                "args.trust-remote-code runs the model's own Python on the hosts",
                fix,
            )
        ]
    return []


def _tls(replicas: Sequence[Replica], fleet: Fleet) -> bool:
    """Whether the servers of a service speak TLS: as its hosts say, else where a gateway speaks to one of them over a network."""
    hosts = {host.name: host for replica in replicas for host in replica.hosts}
    told = [host.tls for host in hosts.values() if host.tls is not None]
    return told[0] if told else any(host != gateway for host in hosts for gateway in fleet.gateways)


def _tls_findings(replicas: Sequence[Replica]) -> List[Finding]:
    """A service is one for its clients: all of it speaks TLS, or nothing of it."""
    told = {host.tls: host.name for replica in replicas for host in replica.hosts}
    if len(told) < 2:
        return []
    message = (
        f"vllm_service_tls differs between its hosts: {', '.join(f'{name} has {tls}' for tls, name in told.items())}"
    )
    fix = "Set it to one value for the group gpu_hosts"
    return [Finding("tls-differs", f"service {replicas[0].service.name}", message, fix)]


def _ray_findings(replicas: Sequence[Replica], fleet: Fleet) -> List[Finding]:
    """What keeps a service from running on Ray; the same of all its replicas is said once."""
    found: List[Finding] = []
    for replica in replicas:
        if replica.service.executor != "ray":
            continue
        where, head = f"service {replica.service.name}", replica.hosts[0]
        if len(replica.hosts) == 1:
            message = "executor is ray, but a replica is one host, where vLLM starts its processes itself"
            found.append(Finding("ray-one-host", where, message, "Leave executor out, or set hosts_per_replica"))
        if head.accelerator == "cpu":
            message = f"executor is ray, which vLLM's CPU build cannot use (it says: {fleet.ray['refused_on_cpu']})"
            found.append(Finding("ray-cpu", where, message, "Leave executor out: vLLM's own works over hosts, too"))
        elif head.version not in fleet.ray["releases"]:
            message = f"executor is ray, and which Ray goes with vLLM {head.version} is not known"
            fix = f"Choose one of vLLM {', '.join(fleet.ray['releases'])}, or leave executor out"
            found.append(Finding("ray-version", where, message, fix))
        if "data-parallel-size" in replica.service.args:
            message = "executor is ray, and args has data-parallel-size: ranks by Ray are not supported yet"
            found.append(Finding("ray-data-parallel", where, message, "Leave executor out, or data-parallel-size"))
    return found


def _gpu_findings(replicas: Iterable[Replica]) -> List[Finding]:
    owner: Dict[Tuple[str, int], str] = {}
    found = []
    for replica in replicas:
        for host in replica.hosts:
            clash: Dict[str, List[int]] = {}
            for number in replica.gpus or ():
                other = owner.setdefault((host.name, number), replica.instance)
                if other != replica.instance:
                    clash.setdefault(other, []).append(number)
            for other, numbers in clash.items():
                message = f"GPU {', '.join(map(str, numbers))} of {host.name} is used by {other} and {replica.instance}"
                found.append(
                    Finding(
                        "gpu-taken",
                        f"service {replica.service.name}",
                        message,
                        "Give each service its own `gpus`, or its own hosts",
                    )
                )
    return found


def ports_of(replica: Replica, layout: Dict[str, Any]) -> Dict[str, int]:
    """The named ports of a replica, the same on each of its hosts."""
    base = replica.service.port_base + replica.slot * layout["stride"]
    return {name: base + port["offset"] for name, port in layout["offsets"].items()}


def ray_ports(service: Service, layout: Dict[str, Any]) -> Dict[str, int]:
    """The named ports of a service's Ray cluster, the same on each of its hosts; of the workers the first and the last."""
    offsets = layout["ray"]["offsets"]
    ports = {name: service.ray_port_base + port["offset"] for name, port in offsets.items() if name != "workers"}
    first = service.ray_port_base + offsets["workers"]["offset"]
    return {**ports, "workers_first": first, "workers_last": first + offsets["workers"]["span"] - 1}


def _ray_block(service: Service, layout: Dict[str, Any]) -> Dict[str, Any]:
    """The ports of a Ray cluster under names that are not vLLM's own; those of its workers as one range."""
    ports = ray_ports(service, layout)
    first, last = ports.pop("workers_first"), ports.pop("workers_last")
    return {**{f"ray_{name}": port for name, port in ports.items()}, "ray_workers": f"{first}-{last}"}


def ray_folder(ports: Dict[str, int]) -> str:
    """Where a Ray cluster keeps its sockets and logs on a host; short, since the path of a socket ends at 107 characters."""
    return f"/run/ray/{ports['gcs']}"


def _blocks(replica: Replica, layout: Dict[str, Any]) -> List[Tuple[str, range, int]]:
    """The blocks of ports that a replica takes on each of its hosts: the key that moves it, the ports, the size."""
    first = replica.service.port_base + replica.slot * layout["stride"]
    blocks = [("port_base", range(first, first + layout["stride"]), layout["stride"])]
    if replica.service.executor == "ray":
        span, first = layout["ray"]["span"], replica.service.ray_port_base
        blocks.append(("ray_port_base", range(first, first + span), span))
    return blocks


def _port_findings(replicas: Iterable[Replica], layout: Dict[str, Any]) -> List[Finding]:
    owner: Dict[Tuple[str, int], str] = {}
    found = []
    for replica, (key, block, size) in ((r, b) for r in replicas for b in _blocks(r, layout)):
        where = f"service {replica.service.name}"
        if block[-1] > 65535:
            found.append(
                Finding(
                    "port-range",
                    where,
                    f"the ports of {replica.instance} end at {block[-1]}",
                    f"Choose a smaller {key}",
                )
            )
            continue
        for host in replica.hosts:
            others = {owner[host.name, port] for port in block if (host.name, port) in owner}
            owner.update({(host.name, port): replica.instance for port in block if (host.name, port) not in owner})
            for other in sorted(others):
                message = f"ports {block[0]} to {block[-1]} on {host.name} overlap with those of {other}"
                fix = f"Each replica takes {size} ports from {key} on: choose one that is that far away, such as {block[0] + 100}"
                found.append(Finding("port-taken", where, message, fix))
            low, high = host.ports
            if block[0] <= high and block[-1] >= low:
                message = f"ports {block[0]} to {block[-1]} lie in nccl_port_range {low}-{high} of {host.name}, where the kernel hands ports out"
                found.append(Finding("port-ephemeral", where, message, f"Choose a {key} below {low - size}"))
    return found


def _foreign_port_findings(replicas: Iterable[Replica], fleet: Fleet) -> List[Finding]:
    """Collisions with what is not the fleet's, host by host; of several replicas of a service the first is told."""
    blocks: Dict[str, List[host_ports.Block]] = {}
    for replica in replicas:
        for key, ports, size in _blocks(replica, fleet.port_layout):
            low = ports[0]
            ranks: Tuple[Tuple[int, int], ...] = ((low, low + size - 1),)
            if key == "port_base":
                offsets = fleet.port_layout["offsets"]
                guarded = (offsets[name] for name in ("rank_store", "dp_rpc", "side_channel"))
                ranks = tuple((low + item["offset"], low + item["offset"] + item["span"] - 1) for item in guarded)
            for host in replica.hosts:
                block = host_ports.Block(f"service {replica.service.name}", replica.instance, key, ports, ranks)
                blocks.setdefault(host.name, []).append(block)
    return [
        finding
        for host in fleet.hosts.values()
        for finding in host_ports.findings(host.name, host.others, host.ports, blocks.get(host.name, []))
    ]


def _option_port_findings(
    replicas: Iterable[Replica], sizes: Mapping[str, Mapping[str, Any]], channels: int
) -> List[Finding]:
    """Ports that options open beside the blocks: known to nobody, the same for two replicas on a host, or more than a block has."""
    owner: Dict[Tuple[str, int], Tuple[str, str]] = {}
    found = []
    for replica in replicas:
        size, service = sizes[replica.instance], replica.service
        # Each data-parallel rank has one (base_scheduler.py of vLLM's connector); what is beyond the block is another replica's.
        if size["data"] > channels and any(name.startswith("Nixl") for name in option_ports.connectors(service.args)):
            message = f"{size['data']} data-parallel ranks each open a side channel for KV transfer, and a block has {channels} ports for them"
            fix = f"Choose a data-parallel-size of {channels} at most, or leave kv-transfer-config out"
            found.append(Finding("port-range", f"service {service.name}", message, fix))
        for item in option_ports.of_service(service.args, service.env, size["tensor"], size["data"]):
            where, who = f"service {service.name}", (replica.instance, item.option)
            for host in replica.hosts:
                strange = [port for port in item.ports if port not in host.others.fixed]
                if strange:
                    message = f"{item.option}: {item.what} listens on port {strange[0]} of {host.name} for everybody, which no rule guards"
                    fix = (
                        f"Name {strange[0]} in nccl_fixed_ports of the host, and in firewall_openings who may reach it "
                        "(an empty `from`: nobody), or leave the option out"
                    )
                    found.append(Finding("port-of-option", where, message, fix))
                taken = [(port, owner.setdefault((host.name, port), who)) for port in item.ports]
                number, other = next(((port, other) for port, other in taken if other != who), (0, who))
                if other != who:
                    theirs = other[0] if other[0] != replica.instance else other[1]
                    message = f"{item.option}: port {number} on {host.name} is that of {theirs}, too"
                    found.append(
                        Finding("port-taken", where, message, "Let one of them have the host, or another port")
                    )
    return found


def _maintenance_findings(replicas: Sequence[Replica], fleet: Fleet) -> List[Finding]:
    """Services that maintenance leaves without any replica."""
    found = []
    for service in dict.fromkeys(replica.service.name for replica in replicas):
        own = [replica for replica in replicas if replica.service.name == service]
        if not all(replica.resting for replica in own):
            continue
        hosts = dict.fromkeys(name for replica in own for name in replica.resting)
        message = (
            f"nobody serves it: all its replicas ({', '.join(r.instance for r in own)}) are in maintenance, with "
            f"{', '.join(hosts)} (vllm_host_state)"
        )
        fix = "Leave hosts of one replica in service, or allow the outage: vllm_service_allow_outage: true"
        if fleet.outage:
            fix = "It serves again once vllm_host_state is taken away and site.yml has run"
        found.append(Finding("maintenance", f"service {service}", message, fix, "info" if fleet.outage else "error"))
    return found


# --- The plan itself --------------------------------------------------------------------------------------------


def _plan(
    services: Sequence[Service], replicas: Sequence[Replica], sizes: Dict[str, Any], fleet: Fleet
) -> Dict[str, Any]:
    plan: Dict[str, Any] = {
        "addresses": {host.name: host.address for host in fleet.hosts.values()},
        "services": {},
        "replicas": {},
        "exporters": {},
        "maintenance": {
            "hosts": [host.name for host in fleet.hosts.values() if host.maintenance],
            "replicas": {replica.instance: replica.resting for replica in replicas if replica.resting},
        },
        "hosts": {
            name: {"instances": [], "ray": [], "blocks": {}, "openings": [], "peers": {}} for name in fleet.hosts
        },
    }
    for service in services:
        own = [r for r in replicas if r.service is service]
        plan["services"][service.name] = {
            "replicas": [r.instance for r in own],
            "served_model_names": list(service.served_model_names),
            "model": _model_path(service, fleet),
        }
    speak = {service.name: _tls([r for r in replicas if r.service is service], fleet) for service in services}
    for replica in replicas:
        size, ports = sizes[replica.instance], ports_of(replica, fleet.port_layout)
        head, tls = replica.hosts[0], speak[replica.service.name]
        plan["replicas"][replica.instance] = {
            "service": replica.service.name,
            # With Ray only the head has a server; Ray's own units are on all of them.
            "hosts": [host.name for host in _serving_ranks(replica)],
            "ray_hosts": [host.name for host in replica.hosts] if replica.service.executor == "ray" else [],
            "head": head.name,
            "tls": tls,
            "url": _url(head, ports, tls),
            # The head's and, with hybrid balancing of data-parallel ranks, every other host's.
            "urls": {host.name: _url(host, ports, tls) for host in serving(replica, size)},
            "ports": ports,
            "gpus": list(replica.gpus) if replica.gpus is not None else None,
            "version": head.version,
            "accelerator": head.accelerator,
            **{key: value for key, value in size.items() if key != "config"},
        }
        for rank, host in enumerate(replica.hosts):
            entry = plan["hosts"][host.name]
            if host in _serving_ranks(replica):
                if not replica.resting:
                    entry["instances"].append(_rank(replica, rank, size, ports, fleet, tls=tls))
                entry["blocks"][replica.instance] = dict(ports)
            if replica.service.executor == "ray":
                if not replica.resting:
                    entry["ray"].append(_ray_node(replica, rank, size, fleet))
                entry["blocks"].setdefault(replica.instance, {}).update(_ray_block(replica.service, fleet.port_layout))
            entry["openings"].extend(_openings(replica, rank, size, fleet))
            entry["peers"].update({h.name: h.address for h in replica.hosts if h.name != host.name and h.address})
    for name, asked in fleet.exporters.items() if fleet.monitors else ():
        # Their numbers are the monitors' alone. A monitor that is this host needs no opening.
        sources = [address for address in fleet.monitors if address != fleet.exporter_addresses.get(name)]
        opening = {"name": "exporters", "ports": [str(port) for port in asked], "proto": "tcp", "from": sources}
        plan["exporters"][name] = [opening]
        if name in plan["hosts"]:
            plan["hosts"][name]["openings"].append(opening)
    return plan


def _model_path(service: Service, fleet: Fleet) -> str:
    return service.model if service.model.startswith("/") else f"{fleet.model_path.rstrip('/')}/{service.model}"


def _bracketed(address: Optional[str]) -> str:
    return f"[{address}]" if address and ":" in address else str(address)


def _url(host: Host, ports: Mapping[str, int], tls: bool) -> str:
    return f"http{'s' if tls else ''}://{_bracketed(host.address)}:{ports['api']}"


def _serving_ranks(replica: Replica) -> Tuple[Host, ...]:
    """Hosts of a replica on which a unit of vLLM runs: with Ray the head alone, which starts the others' processes."""
    return replica.hosts[:1] if replica.service.executor == "ray" else replica.hosts


def _gpu_env(replica: Replica) -> Dict[str, str]:
    # Numbers as nvidia-smi shows them; CUDA's own order is by speed unless told (CUDA programming guide).
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, replica.gpus or ()))}


def _ray_node(replica: Replica, rank: int, size: Dict[str, Any], fleet: Fleet) -> Dict[str, Any]:
    """One host's part of a replica's Ray cluster.

    env is what vLLM's workers get from `ray start`, since the server copies none of it (VLLM_HOST_IP, CUDA's device
    numbers: WORKER_SPECIFIC_ENV_VARS in vllm/v1/executor/ray_utils.py), and what else the service says.
    """
    service, host, head = replica.service, replica.hosts[rank], replica.hosts[0]
    ports = ray_ports(service, fleet.port_layout)
    return {
        "instance": replica.instance,
        "service": service.name,
        "rank": rank,
        "hosts": [h.name for h in replica.hosts],
        "address": host.address,
        "head": f"{_bracketed(head.address)}:{ports['gcs']}",
        "ports": ports,
        "gpus": len(replica.gpus or ()),
        "config": {"tensor-parallel-size": size["tensor"]},
        "folder": ray_folder(ports),
        "env": {"VLLM_HOST_IP": host.address, **(_gpu_env(replica) if replica.gpus is not None else {}), **service.env},
    }


def _ray_driver_env(replica: Replica, fleet: Fleet) -> Dict[str, str]:
    """What vLLM's server needs to find and enter its Ray cluster (ray/_private/ray_constants.py; role ray_cluster)."""
    head, folder = replica.hosts[0], f"/etc/ray/{replica.instance}"
    ports = ray_ports(replica.service, fleet.port_layout)
    return {
        "RAY_ADDRESS": f"{_bracketed(head.address)}:{ports['gcs']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": f"{folder}/token",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Where vLLM reads which variables not to copy to workers (vllm/ray/ray_env.py): its key, and folders of this host.
        "VLLM_CONFIG_ROOT": f"{folder}/vllm",
        # Sockets between the server and the workers beside it, which are of another unit and have another /tmp.
        "VLLM_RPC_BASE_PATH": ray_folder(ports),
    }


def _rank(
    replica: Replica, rank: int, size: Dict[str, Any], ports: Dict[str, int], fleet: Fleet, *, tls: bool
) -> Dict[str, Any]:
    """What one host runs of a replica."""
    service, host, head = replica.service, replica.hosts[rank], replica.hosts[0]
    ranks, nodes = _serving_ranks(replica), len(replica.hosts)
    config: Dict[str, Any] = {
        "model": _model_path(service, fleet),
        "served-model-name": list(service.served_model_names),
        "host": host.address,
        "port": ports["api"],
        "tensor-parallel-size": size["tensor"],
        "pipeline-parallel-size": size["pipeline"],
    }
    if service.executor == "ray":
        config["distributed-executor-backend"] = "ray"
    elif nodes > 1 and size["data"] > 1:
        config.update(_data_parallel(service, size["data"], nodes, rank))
        config.update({"data-parallel-address": head.address, "data-parallel-rpc-port": ports["dp_rpc"]})
    elif nodes > 1:
        config.update(
            {"nnodes": nodes, "node-rank": rank, "master-addr": head.address, "master-port": ports["rank_store"]}
        )
        if rank:
            config["headless"] = True
    if tls and host in serving(replica, size):
        config.update(api_tls.options())
    config.update(size["config"])
    config.update(service.args)
    env = {
        "VLLM_HOST_IP": host.address,
        # KV transfer by NIXL; without these port 5600 of localhost (vllm/envs.py). One more for each data-parallel rank.
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host.address,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports["side_channel"]),
    }
    if replica.gpus is not None:
        env.update(_gpu_env(replica))
    if service.executor == "ray":
        env.update(_ray_driver_env(replica, fleet))
    env.update(service.env)
    return {
        "instance": replica.instance,
        "service": service.name,
        "model": service.model,
        "rank": rank,
        "hosts": [h.name for h in ranks],
        "head": {"host": head.name, "address": head.address, "port": ports["api"]},
        "tls": tls,
        "peers": [h.address for h in ranks if h.name != host.name],
        "agent_clients": agent_clients(replica, rank, fleet),
        "ports": ports,
        "config": config,
        "env": env,
        "reasons": size["reasons"],
    }


def _data_parallel(service: Service, data: int, nodes: int, rank: int) -> Dict[str, Any]:
    """Options of one host of a replica whose data-parallel ranks are spread over its hosts.

    As vLLM's docs/serving/data_parallel_deployment.md has it, internal or hybrid load balancing. The head never says
    its first rank: without --headless that alone means hybrid balancing to vLLM 0.32 (create_engine_config in
    vllm/engine/arg_utils.py).
    """
    local = data // nodes
    options: Dict[str, Any] = {"data-parallel-size": data, "data-parallel-size-local": local}
    if rank:
        options["data-parallel-start-rank"] = rank * local
        if not _hybrid(service):
            options["headless"] = True
    return options


def serving(replica: Replica, size: Dict[str, Any]) -> Tuple[Host, ...]:
    """Hosts of a replica that have an API: the head, and with hybrid balancing over hosts all of them."""
    every = size["data"] > 1 and len(replica.hosts) > 1 and _hybrid(replica.service)
    return replica.hosts if every else replica.hosts[:1]


def _openings(replica: Replica, rank: int, size: Dict[str, Any], fleet: Fleet) -> List[Dict[str, Any]]:
    """What the firewall lets in on this host for this replica; an empty `from` is nobody."""
    service, host, ports = replica.service, replica.hosts[rank], ports_of(replica, fleet.port_layout)
    # A host without an address is a finding of the inventory; it can be nobody's source.
    peers = [h.address for h in replica.hosts if h.name != host.name and h.address]
    openings: List[Dict[str, Any]] = []
    if host in serving(replica, size):
        sources = list(service.clients) + [a for a in [*fleet.watchers, *peers] if a not in service.clients]
        openings.append(
            {"name": f"{replica.instance} api", "ports": [str(ports["api"])], "proto": "tcp", "from": sources}
        )
    # Torch's store, vLLM's queues, gloo and NCCL have no authentication: ranks of this replica only. A single process
    # opens torch's store, too, so the ports are closed whatever the number of ranks.
    # So is the side channel of KV transfer; nobody but the replica's own hosts is let in while no service asks for it.
    channel = ports["side_channel"], ports["side_channel"] + fleet.port_layout["offsets"]["side_channel"]["span"] - 1
    ranks = [str(ports["rank_store"]), str(ports["dp_rpc"])]
    ranks += [f"{low}-{high}" for low, high in (channel, host.ports)]
    openings.append(
        {"name": f"{replica.instance} ranks", "ports": ranks, "proto": "tcp", "from": peers, "cluster": True}
    )
    if service.executor == "ray":
        # Whoever reaches Ray and has its token runs code; without the token nothing, but the ports are closed all the same.
        base, span = service.ray_port_base, fleet.port_layout["ray"]["span"]
        block = f"{base}-{base + span - 1}"
        openings.append(
            {"name": f"{replica.instance} ray", "ports": [block], "proto": "tcp", "from": peers, "cluster": True}
        )
    # Gateways ask the agents for health, monitors for numbers; an agent refuses everybody else itself, too.
    openings.append(
        {
            "name": f"{replica.instance} agent",
            "ports": [str(ports["agent"])],
            "proto": "tcp",
            "from": agent_clients(replica, rank, fleet),
        }
    )
    return openings


def agent_clients(replica: Replica, rank: int, fleet: Fleet) -> List[str]:
    """Addresses that a rank's agent answers: the other ranks, then gateways and monitors."""
    own = replica.hosts[rank]
    peers = [h.address for h in replica.hosts if h.name != own.name and h.address]
    return peers + [address for address in fleet.watchers if address not in (*peers, own.address)]


def summary(plan: Dict[str, Any]) -> List[str]:
    """One line a replica: where it runs, in which shape, and where it answers."""
    lines = []
    for instance, replica in plan["replicas"].items():
        gpus = f", GPU {', '.join(map(str, replica['gpus']))} of each" if replica["gpus"] is not None else ""
        shape = f"tensor {replica['tensor']} x pipeline {replica['pipeline']}"
        resting = plan.get("maintenance", {}).get("replicas", {}).get(instance)
        if resting:
            lines.append(
                f"{instance}: in maintenance with {', '.join(resting)} (vllm_host_state): stopped, and started by nobody"
            )
            continue
        release = f"vLLM {replica['version']} {replica['accelerator']}"
        lines.append(
            f"{instance}: {release} on {', '.join(replica['ray_hosts'] or replica['hosts'])}{gpus}; {shape}{' on Ray' if replica['ray_hosts'] else ''}; {replica['url']}"
        )
        memory = replica["memory"]
        if memory and memory.get("kv_tokens"):
            lines.append(
                f"  a GPU of it: weights {memory['weights_gib']:.1f} GiB, KV cache {memory['kv_gib']:.1f} GiB = "
                f"{memory['kv_tokens']:,} tokens, {memory['max_concurrency']:.1f} requests of {memory['max_model_len']:,}"
            )
        lines.extend(f"  {note}" for note in replica["notes"])
    return lines
