"""Read an Ansible inventory into what the planner judges, and check every variable of every role in it.

Runs on the controller only. A variable that cannot be templated yet (it waits for facts) is left unjudged.
"""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible.errors import AnsibleError
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.module_utils.parsing.convert_bool import boolean
from jinja2.exceptions import UndefinedError

from ..module_utils import (
    driver_want,
    flags,
    gateway,
    hardware,
    host_ports,
    limits,
    locks,
    models,
    monitoring,
    nccl,
    nftables,
    plan,
    services,
)
from ..module_utils.findings import Finding, did_you_mean
from . import data, hub, launches

# Variables that belong to no single role: data/fleet_variables.yml says what they mean; fleet_plan is the plan itself.
FLEET_VARIABLES = {name: entry["type"] for name, entry in data.load("fleet_variables").items()} | {"fleet_plan": "dict"}
# Facts that roles set for each other during a run; a second play of the same run sees them as variables.
FACTS = (
    "vllm_runtime_release",
    "vllm_runtime_other_releases",
    "nccl_chosen_interface",
    "nccl_chosen_net_devices",
    "nccl_chosen_settings",
    "nccl_in_the_way",
    "firewall_gate",
    "gateway_drained",
    "gpu_topology_facts",
    "gpu_topology_findings",
    "gpu_topology_measured",
    "gpu_topology_recommendation",
    "gpu_driver_facts",
    "host_limits_effective",
    "model_store_digests",
    "vllm_service_in_the_way",
    "vllm_service_spoken",
)
HOST_STATES = ("serving", "maintenance")  # of vllm_host_state
USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,30}")  # as systemd takes it in User=, less what begins with a digit
KEY_LENGTH = 32  # characters; 128 random bits are 22 in base64, 32 in hex


class Inventory:
    """hostvars and groups, with each value templated when asked for."""

    def __init__(self, hostvars: Mapping[str, Any], groups: Mapping[str, list[str]]):
        self.hostvars, self.groups = hostvars, groups
        self.names = list(dict.fromkeys(groups.get("all", [])))

    def group(self, name: str) -> list[str]:
        return list(self.groups.get(name, []))

    def get(self, host: str, name: str, default: Any = None) -> Any:
        """A variable of a host; the default where it is absent or cannot be known yet."""
        try:
            value = self.hostvars[host].get(name, default)
        except (AnsibleError, UndefinedError):
            return default
        return default if value is None else value

    def is_null(self, host: str, name: str) -> bool:
        """Whether a variable is given as null, where that means something."""
        try:
            return name in self.hostvars[host] and self.hostvars[host][name] is None
        except (AnsibleError, UndefinedError):
            return False

    def role_value(self, host: str, role: str, name: str) -> Any:
        """A role's variable: the host's, else the role's own default."""
        return self.get(host, name, data.role_default(role, name))


def read(
    inventory: Inventory, folder: str = "", ask_hub: bool = False
) -> tuple[list[services.Service], plan.Fleet, list[Finding]]:
    """Services, fleet and all findings except those that the planner makes.

    folder: what relative folders of models are relative to. ask_hub: fetch what the plan needs to know of hub models.
    """
    found = _variable_findings(inventory)
    hosts = {}
    for name in inventory.group("gpu_hosts"):
        host, mistakes = _host(inventory, name)
        hosts[name] = host
        found.extend(mistakes)
    found.extend(_grouped((fault, name) for name in hosts if (fault := _system_fault(inventory, name))))
    found.extend(_grouped((fault, name) for name in hosts for fault in _nccl_faults(inventory, name)))
    found.extend(_grouped((fault, name) for name in hosts for fault in _limit_faults(inventory, name)))
    found.extend(_grouped((fault, name) for name in hosts for fault in _user_faults(inventory, name)))
    found.extend(_grouped((fault, name) for name in hosts for fault in _topology_faults(inventory, name)))
    found.extend(_grouped((fault, name) for name, host in hosts.items() for fault in _driver_faults(inventory, host)))
    found.extend(_grouped((fault, name) for name in hosts for fault in _opening_faults(inventory, name)))
    found.extend(_grouped((fault, name) for name in hosts if (fault := _tls_fault(inventory, name))))
    found.extend(_grouped((fault, name) for name in hosts for fault in _package_faults(inventory, name)))
    found.extend(_grouped((fault, name) for name in inventory.names if (fault := _state_fault(inventory, name, hosts))))
    if not hosts:
        found.append(
            Finding(
                "no-hosts",
                "inventory",
                "the group gpu_hosts is empty or missing",
                "Name the hosts that serve models in it",
            )
        )
    raw, mistakes = _same_everywhere(inventory, hosts, "vllm_services", [])
    found.extend(mistakes)
    read_services, mistakes = services.read(raw)
    found.extend(mistakes)
    found.extend(_count_findings(inventory, raw, hosts))
    own_lock = {name for name in hosts if inventory.role_value(name, "vllm_runtime", "vllm_runtime_lock")}
    found.extend(
        _grouped(
            (fault, host.name) for host in hosts.values() if (fault := _release_fault(host, host.name in own_lock))
        )
    )
    found.extend(_args_findings(read_services, hosts))
    found.extend(_key_findings(inventory, read_services, hosts))
    names = [service.name for service in read_services]
    found.extend(
        _grouped(
            (fault, name) for name in inventory.group("monitors") for fault in _monitor_faults(inventory, name, names)
        )
    )
    found.extend(_ray_findings(inventory, read_services, hosts))
    found.extend(_gateway_findings(inventory, read_services))
    entries = inventory.role_value(next(iter(hosts)), "model_store", "model_store_models") if hosts else []
    entries = entries if isinstance(entries, list) else []
    found.extend(_model_findings(inventory, hosts))
    watchers, mistakes = _watchers(inventory, hosts)
    found.extend(mistakes)
    found.extend(_address_findings({**watchers, **{name: host.address for name, host in hosts.items()}}))
    fleet = plan.Fleet(
        hosts=hosts,
        others=[name for name in inventory.names if name not in hosts],
        gateways=inventory.group("gateways"),
        watchers=list(dict.fromkeys(address for address in watchers.values() if address)),
        monitors=[address for name in inventory.group("monitors") if (address := watchers.get(name))],
        exporters={name: ports for name in (*hosts, *watchers) if (ports := _exporters(inventory, name))},
        exporter_addresses={**watchers, **{name: host.address for name, host in hosts.items()}},
        models=[entry.get("name", "") for entry in entries if isinstance(entry, dict)],
        model_path=inventory.role_value(next(iter(hosts)), "model_store", "model_store_path") if hosts else "",
        port_layout=data.load("ports"),
        ray=data.load("ray"),
        launch=launches.Planner(inventory, entries, folder, ask_hub),
        outage=any(
            boolean(inventory.role_value(name, "vllm_service", "vllm_service_allow_outage"), strict=False)
            for name in hosts
        ),
    )
    found.extend(_shape_findings(read_services, fleet))
    found.extend(_grouped((fault, name) for name in hosts if (fault := launches.gpu_fault(inventory, name))))
    return read_services, fleet, found


def sorted_out(found: Iterable[Finding], of_plan: Iterable[Finding]) -> tuple[list[Finding], list[Finding]]:
    """What refuses the inventory, and what is only worth knowing."""
    # The plan knows counts alone; what a host lacks, or has instead of a count, is said by read, once for all hosts.
    every = [*found, *(finding for finding in of_plan if finding.id != "gpus-unknown")]
    every = list(dict.fromkeys(every))
    return [finding for finding in every if finding.severity == "error"], [
        finding for finding in every if finding.severity != "error"
    ]


def _model_findings(inventory: Inventory, hosts: Iterable[str]) -> list[Finding]:
    """The list of models as role model_store judges it, each mistake once: it is the group's, not a host's."""
    found: dict[Finding, None] = {}
    for name in hosts:
        entries = inventory.role_value(name, "model_store", "model_store_models")
        found.update(dict.fromkeys(models.judge(entries, hub.endpoint())))
    return list(found)


def _same_everywhere(inventory: Inventory, hosts: Iterable[str], name: str, default: Any) -> tuple[Any, list[Finding]]:
    """A variable that has to be one for the whole fleet."""
    values = {host: inventory.get(host, name, default) for host in hosts}
    first = next(iter(values.values()), default)
    differ = [host for host, value in values.items() if value != first]
    if not differ:
        return first, []
    fix = "Set it for the whole group gpu_hosts, not for single hosts"
    return first, [
        Finding(
            "not-one-value", name, f"it differs between hosts ({', '.join(differ)} against {next(iter(values))})", fix
        )
    ]


# --- Hosts ------------------------------------------------------------------------------------------------------


def _address(inventory: Inventory, name: str) -> tuple[str | None, list[Finding]]:
    """The host's address in its usual spelling, None where it has none; a finding where it is missing or a name."""
    told = inventory.get(name, "fleet_address", inventory.get(name, "ansible_host"))
    where = f"host {name}"
    if told is None or not str(told).strip():
        fix = "Set fleet_address (its address on the cluster network) or ansible_host"
        return None, [Finding("no-address", where, "it has no address", fix)]
    address = services.address(told)
    if address:
        return address, []
    fix = (
        "Set fleet_address to its IPv4 or IPv6 address on the cluster network; firewall rules and ranks need the number"
    )
    return None, [Finding("address-name", where, f"its address is {told!r}, which is not a number", fix)]


def _watchers(inventory: Inventory, hosts: Iterable[str]) -> tuple[dict[str, str | None], list[Finding]]:
    """Gateways and monitors with their addresses, and what is wrong with those that are not judged as GPU hosts already."""
    names = dict.fromkeys(name for group in ("gateways", "monitors") for name in inventory.group(group))
    judged = {name: _address(inventory, name) for name in names}
    addresses = {name: address for name, (address, _) in judged.items()}
    return addresses, [fault for name in names if name not in hosts for fault in judged[name][1]]


def _monitor_faults(inventory: Inventory, name: str, services_: list[str]) -> list[tuple[str, str, str]]:
    """What role monitoring would do nothing with, or fail on, and can be known here."""
    own = data.role_options("monitoring")
    settings = {option.removeprefix("monitoring_"): inventory.role_value(name, "monitoring", option) for option in own}
    # What has the wrong type is told where types are.
    for option in ("thresholds", "alert_for", "objectives"):
        settings[option] = settings[option] if isinstance(settings[option], dict) else {}
    return [
        ("monitoring", message, fix)
        for message, fix in monitoring.judge(
            settings, services_, data.load("thresholds"), [entry["alert"] for entry in data.load("alerts")]
        )
    ]


def _exporters(inventory: Inventory, name: str) -> list[int]:
    """Ports of a host's exporters, as role monitoring has them."""

    def told(variable: str) -> Any:
        # Null is an answer here: no such exporter.
        if inventory.is_null(name, f"monitoring_{variable}"):
            return None
        return inventory.role_value(name, "monitoring", f"monitoring_{variable}")

    ports = [told("node_exporter_port")] if told("node_exporter") else []
    ports += [told("dcgm_port")] if name in inventory.group("gpu_hosts") else []
    ports += [told("haproxy_port")] if name in inventory.group("gateways") else []
    return [port for port in ports if _is_count(port)]


def _host(inventory: Inventory, name: str) -> tuple[plan.Host, list[Finding]]:
    address, found = _address(inventory, name)
    system = str(inventory.get(name, "fleet_system", "debian-12"))
    accelerator = inventory.role_value(name, "vllm_runtime", "vllm_runtime_accelerator")
    version = inventory.role_value(name, "vllm_runtime", "vllm_runtime_version") or _default_version(accelerator)
    low, _, high = str(inventory.role_value(name, "nccl", "nccl_port_range")).partition("-")
    gpus = inventory.get(name, "fleet_gpus")
    host = plan.Host(
        name=name,
        address=address,
        system=system,
        python=_python_minor(inventory.role_value(name, "vllm_runtime", "vllm_runtime_python"), system),
        architecture=inventory.get(name, "fleet_architecture", "x86_64"),
        accelerator=str(accelerator),
        version=str(version),
        gpus=gpus if _is_count(gpus) else None,
        ports=(int(low), int(high)) if low.strip().isdecimal() and high.strip().isdecimal() else (0, 0),
        others=_others(inventory, name),
        maintenance=_state(inventory, name) == "maintenance",
        tls=_tls(inventory, name),
    )
    return host, found


def _tls(inventory: Inventory, name: str) -> bool | None:
    """As vllm_service_tls says, null being the plan's to decide."""
    if inventory.is_null(name, "vllm_service_tls"):
        return None
    return bool(boolean(inventory.role_value(name, "vllm_service", "vllm_service_tls"), strict=False))


def _tls_fault(inventory: Inventory, name: str) -> tuple[str, str, str] | None:
    """A value that is neither a truth value nor null."""
    told = inventory.role_value(name, "vllm_service", "vllm_service_tls")
    try:
        boolean(told)
    except TypeError:
        return ("wrong-type", f"vllm_service_tls is {told!r}", "It must be true, false, or null, which plans it")
    return None


def _state(inventory: Inventory, name: str) -> Any:
    return inventory.get(name, "vllm_host_state", HOST_STATES[0])


def _state_fault(inventory: Inventory, name: str, hosts: Iterable[str]) -> tuple[str, str, str] | None:
    """A state that there is not, or of a host that serves no model."""
    state = _state(inventory, name)
    if state not in HOST_STATES:
        fix = f"{did_you_mean(str(state), HOST_STATES)}It must be {' or '.join(HOST_STATES)}"
        return ("host-state", f"vllm_host_state is {state!r}", fix)
    if state != HOST_STATES[0] and name not in hosts:
        fix = "It is for hosts of the group gpu_hosts; docs/gateway.md says how a gateway is taken out"
        return ("host-state", f"vllm_host_state is {state}, and the host serves no model", fix)
    return None


def _others(inventory: Inventory, name: str) -> host_ports.Others:
    """Whose ports else are on a host, as far as the inventory says."""
    groups = [group for group in ("gpu_hosts", "gateways", "monitors") if name in inventory.group(group)]
    listens = dict(host_ports.known_listeners(groups, data.load("ports")))
    named = host_ports.spans(inventory.role_value(name, "nccl", "nccl_fixed_ports"))
    fixed = frozenset(port for low, high in named for port in range(low, high + 1))
    listens.update(dict.fromkeys(fixed, "a service of yours (nccl_fixed_ports)"))
    ssh = [inventory.get(name, "ansible_port", 22), *(inventory.get(name, "firewall_ssh_ports") or [22])]
    listens.update({int(port): "SSH" for port in ssh if str(port).isdecimal()})
    own = inventory.get(name, "firewall_openings", [])
    openings = [item for item in own if isinstance(item, dict) and item.get("from")] if isinstance(own, list) else []
    return host_ports.Others(
        listens=tuple(sorted(listens.items())),
        fixed=fixed,
        reserved=host_ports.spans(inventory.role_value(name, "nccl", "nccl_reserved_ports")),
        openings=tuple(
            (str(item.get("name", "without a name")), host_ports.spans(item.get("ports"))) for item in openings
        ),
    )


def _default_version(accelerator: Any) -> str:
    return data.load("versions")["defaults"]["cpu" if accelerator == "cpu" else "cuda"]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _system_fault(inventory: Inventory, name: str) -> tuple[str, str, str] | None:
    """A system that the collection does not know."""
    system, known = str(inventory.get(name, "fleet_system", "debian-12")), data.load("versions")["systems"]
    if system in known:
        return None
    return (
        "unknown-system",
        f"fleet_system is {system!r}",
        f"{did_you_mean(system, known)}Supported: {', '.join(known)}",
    )


def _count_findings(inventory: Inventory, raw: Any, hosts: Mapping[str, plan.Host]) -> list[Finding]:
    """GPU hosts whose number of GPUs nobody said, although a service wants all of them; whatever else is wrong.

    A number that is none is told where types are.
    """
    faults = []
    for entry in raw if isinstance(raw, list) else []:
        if not isinstance(entry, dict) or entry.get("gpus") is not None:
            continue
        named = entry.get("hosts")
        for name in named if isinstance(named, list) else hosts:
            host = hosts.get(name) if isinstance(name, str) else None
            if host and host.accelerator != "cpu" and inventory.get(name, "fleet_gpus") is None:
                faults.append((name, str(entry.get("name", "without a name"))))
    wanting: dict[str, list[str]] = {}
    for name, service in faults:
        wanting.setdefault(name, []).append(service)
    fix = "Set fleet_gpus to the number of its GPUs (`nvidia-smi -L` on the host lists them), or name those to use in `gpus`"
    return _grouped(
        (
            (
                "gpus-unknown",
                f"fleet_gpus is missing, and service {', '.join(dict.fromkeys(names))} names no `gpus`",
                fix,
            ),
            name,
        )
        for name, names in wanting.items()
    )


def _address_findings(addresses: Mapping[str, str | None]) -> list[Finding]:
    """Two hosts with one address, whatever groups they are in, would be taken for each other by ranks and firewall."""
    by_address: dict[str, list[str]] = {}
    for name, address in addresses.items():
        if address:
            by_address.setdefault(address, []).append(name)
    fix = "Give each host its own fleet_address"
    return [
        Finding("address-taken", f"hosts {', '.join(names)}", f"all have the address {address}", fix)
        for address, names in by_address.items()
        if len(names) > 1
    ]


def _nccl_faults(inventory: Inventory, name: str) -> list[tuple[str, str, str]]:
    """What the role nccl would refuse on the host and can be known here."""
    variables = inventory.role_value(name, "nccl", "nccl_variables")
    variables = variables if isinstance(variables, dict) else {}
    found = nccl.judge_variables(variables, data.load("nccl_variables"), "nccl_variables")
    span = inventory.role_value(name, "nccl", "nccl_port_range")
    nccl.judge_range(span, "nccl_port_range", found, gateway=name in inventory.group("gateways"))
    return [(finding.id, f"{finding.where}: {finding.message}", finding.fix) for finding in found]


def _user_faults(inventory: Inventory, name: str) -> list[tuple[str, str, str]]:
    """A service user that no unit can name, or that the roles do not agree on."""
    fleet = inventory.get(name, "fleet_service_user", "vllm")
    told = {
        variable: str(inventory.get(name, variable, fleet))
        for variable in ("vllm_service_user", "host_limits_user", "nccl_service_user")
    }
    fix = "Set fleet_service_user for the group gpu_hosts; the variables of the roles follow it"
    faults = []
    for variable, user in told.items():
        if not USER.fullmatch(user):
            faults.append(("user", f"{variable} is {user!r}, which is no name of a user", fix))
    if len(set(told.values())) > 1:
        differ = ", ".join(f"{variable} {user}" for variable, user in told.items())
        faults.append(("user", f"the service has more than one user: {differ}", fix))
    return faults


def _limit_faults(inventory: Inventory, name: str) -> list[tuple[str, str, str]]:
    """Limits of locked memory that systemd could not read."""
    faults = []
    for role, variable in (("host_limits", "host_limits_memlock"), ("vllm_service", "vllm_service_limit_memlock")):
        value = inventory.role_value(name, role, variable)
        try:
            # Null is the default of the second: what the role host_limits set.
            limits.locked_bytes(limits.INFINITE if value is None else value)
        except ValueError:
            faults.append(("limit", f"{variable} is {value!r}, which is no size of memory", limits.SPELLINGS))
    return faults


def _opening_faults(inventory: Inventory, name: str) -> list[tuple[str, str, str]]:
    """Ports and addresses of the user's own openings that role firewall would refuse; keys and types are judged elsewhere."""
    own = inventory.get(name, "firewall_openings", [])
    fix = "Ports are written as 8000 or 40000-60999, sources as addresses, CIDRs or the word any"
    faults = []
    ssh = inventory.role_value(name, "firewall", "firewall_ssh_ports")
    ports = ssh if isinstance(ssh, list) else []
    if ssh == [] or any(_is_count(port) and not 0 < port < 65536 for port in ports):
        keep = (
            "Leave it out, or name every port that SSH listens on: it is accepted before any opening can lock you out"
        )
        faults.append(("opening", f"firewall_ssh_ports is {ssh!r}", keep))
    for item in own if isinstance(own, list) else []:
        lists = isinstance(item, dict) and all(isinstance(item.get(key), list) for key in ("ports", "from"))
        if not lists or "name" not in item:
            continue
        try:
            nftables.parse_openings([{key: item[key] for key in ("name", "ports", "from", "interface") if key in item}])
        except nftables.OpeningError as error:
            faults.append(("opening", f"firewall_openings, {error}", fix))
    return faults


def _driver_faults(inventory: Inventory, host: plan.Host) -> list[tuple[str, str, str]]:
    """What role gpu_driver would refuse on every such host."""
    want = {
        name.removeprefix("gpu_driver_"): inventory.role_value(host.name, "gpu_driver", name)
        for name in data.role_options("gpu_driver")
    }
    if not isinstance(want["source"], str) or not isinstance(want["packages"], list):
        return []  # said where values are judged
    faults = driver_want.judge(
        want,
        system=host.system,
        machine=host.architecture,
        release={"version": host.version, "accelerator": host.accelerator},
        known=data.load("driver"),
        versions=data.load("versions"),
    )
    for name in ("repository_key", "folder"):
        told = want[name]
        if isinstance(told, str) and told and "BEGIN PGP" not in told and not pathlib.Path(told).exists():
            fix = "Name one that is there, relative to the folder that Ansible runs in or, better, absolute"
            faults.append(("driver-source", f"gpu_driver_{name} is {told}, which is not on the controller", fix))
    return faults


def _package_faults(inventory: Inventory, name: str) -> list[tuple[str, str, str]]:
    """A folder of carried packages that is not there, or is none."""
    told = inventory.role_value(name, "package_source", "package_source_folder")
    if not isinstance(told, str) or not told or "{{" in told:
        return []
    lacking = [part for part in ("Packages", "Release") if not (pathlib.Path(told) / part).is_file()]
    if not lacking:
        return []
    fix = "Name the folder of the host's system that playbooks/mirror.yml filled, such as /srv/carried/packages/debian-12-x86_64"
    what = f"has no {', '.join(lacking)}" if pathlib.Path(told).is_dir() else "is not on the controller"
    return [("package-source", f"package_source_folder is {told}, which {what}", fix)]


def _topology_faults(inventory: Inventory, name: str) -> list[tuple[str, str, str]]:
    """What role gpu_topology would trip over: a link that is none, ids of no finding, counts that contradict."""
    faults = []
    expected = inventory.role_value(name, "gpu_topology", "gpu_topology_expected")
    expected = expected if isinstance(expected, dict) else {}
    link, gpus = expected.get("link"), inventory.get(name, "fleet_gpus")
    if isinstance(link, str) and not re.fullmatch(r"NV[1-9]\d?|PIX|PXB|PHB|NODE|SYS|SOC", str(link).upper()):
        faults.append(
            (
                "topology",
                f"gpu_topology_expected.link is {link!r}, which is no link",
                "Write it as nvidia-smi topo -m does: NV18, PIX, PXB, PHB, NODE or SYS",
            )
        )
    if _is_count(expected.get("gpus")) and _is_count(gpus) and expected["gpus"] != gpus:
        message = f"gpu_topology_expected.gpus is {expected['gpus']}, fleet_gpus is {gpus}"
        faults.append(("topology", message, "Leave gpu_topology_expected.gpus out: fleet_gpus is expected anyway"))
    accepted = inventory.role_value(name, "gpu_topology", "gpu_topology_accept")
    for id_ in accepted if isinstance(accepted, list) else []:
        if str(id_) not in hardware.FINDINGS and not re.fullmatch(r"xid-\d+", str(id_)):
            fix = f"{did_you_mean(id_, hardware.FINDINGS)}docs/findings.md lists them"
            faults.append(("topology", f"gpu_topology_accept has {id_!r}, which is no finding", fix))
    seconds = inventory.role_value(name, "gpu_topology", "gpu_topology_bandwidth_seconds")
    if seconds == 0:  # less than that is told where values are judged
        message = f"gpu_topology_bandwidth_seconds is {seconds}"
        faults.append(("topology", message, "Give it at least 60, or leave it out"))
    return faults


def _python_minor(path: str | None, system: str) -> str:
    """3.12 for /usr/bin/python3.12; for a path that does not tell, what the system's python3 is."""
    told = re.search(r"python(3\.\d+)\Z", path or "")
    return told.group(1) if told else data.load("versions")["systems"].get(system, {}).get("python", "")


def _grouped(faults: Iterable[tuple[tuple[str, str, str], str]]) -> list[Finding]:
    """One finding for all hosts that share it."""
    by_fault: dict[tuple[str, str, str], list[str]] = {}
    for fault, host in faults:
        if host not in by_fault.setdefault(fault, []):
            by_fault[fault].append(host)
    return [
        Finding(fault[0], f"host{'s' if len(hosts) > 1 else ''} {', '.join(hosts)}", *fault[1:])
        for fault, hosts in by_fault.items()
    ]


def _release_fault(host: plan.Host, own_lock: bool) -> tuple[str, str, str] | None:
    """Is the release offered for this accelerator, Python and architecture, and is its lock there?"""
    if host.accelerator not in data.role_options("vllm_runtime")["vllm_runtime_accelerator"]["choices"]:
        return None  # said where values are judged
    release = data.load("versions")["releases"].get(host.version)
    if release is None:
        return (
            "unknown-release",
            f"vllm_runtime_version is {host.version}, which is not offered",
            _offered(host.accelerator),
        )
    if host.accelerator not in release["accelerators"]:
        offered = ", ".join(release["accelerators"])
        return (
            "unknown-accelerator",
            f"vLLM {host.version} is not offered for accelerator {host.accelerator}",
            f"Offered for {host.version}: {offered}",
        )
    if host.python and host.python not in release["python"]:
        fix = (
            f"It runs on Python {', '.join(release['python'])}: install one of them and name it in vllm_runtime_python "
            f"(such as /usr/bin/python{release['python'][0]}), or choose an older release"
        )
        return ("no-python", f"vLLM {host.version} does not run on Python {host.python} of {host.system}", fix)
    if (
        host.python
        and not own_lock
        and f"vllm-{host.version}-{host.accelerator}-py{host.python.replace('.', '')}-{host.architecture}.lock"
        not in data.lock_files()
    ):
        locked = [name for name in data.lock_files() if name.startswith(f"vllm-{host.version}-{host.accelerator}-")]
        there = f"There are: {', '.join(locked)}" if locked else _offered(host.accelerator)
        fix = f"Make it: scripts/lock {host.version} {host.accelerator} --python {host.python}. {there}"
        return (
            "no-lock",
            f"there is no lock of vLLM {host.version} for {host.accelerator}, Python {host.python}, {host.architecture}",
            fix,
        )
    return None


def _offered(accelerator: str) -> str:
    """Which releases a host with this accelerator can have: those with a lock first."""
    releases = [v for v, r in data.load("versions")["releases"].items() if accelerator in r["accelerators"]]
    locked = [v for v in releases if any(name.startswith(f"vllm-{v}-{accelerator}-") for name in data.lock_files())]
    others = [v for v in releases if v not in locked]
    without = f"; offered without one: {', '.join(others)} (scripts/lock makes it)" if others else ""
    return f"With a lock for {accelerator}: {', '.join(locked) or 'none'}{without}"


# --- Services ---------------------------------------------------------------------------------------------------


def _args_findings(read_services: Iterable[services.Service], hosts: Mapping[str, plan.Host]) -> list[Finding]:
    """Options of the services, by the releases of their hosts; where one is not known, by the default one, and said so."""
    found: list[Finding] = []
    known = set(data.flag_versions())
    for service in read_services:
        names = service.hosts if service.hosts is not None else tuple(hosts)
        judged_by: dict[str, list[str]] = {}
        for host in (hosts[name] for name in names if name and name in hosts):
            version = host.version if host.version in known else _default_version(host.accelerator)
            judged_by.setdefault(version, []).append(host.version)
        for version, asked in sorted(judged_by.items()):
            options = data.load(f"serve_flags/{version}")
            mistakes = flags.check(service.name, service.args, version, options, data.load("removed_flags"))
            if version not in asked:
                because = f" (judged by the default, {version}, since {', '.join(dict.fromkeys(asked))} is not known)"
                mistakes = [dataclasses.replace(finding, message=finding.message + because) for finding in mistakes]
            found.extend(mistakes)
    return found


# What the planner says of a service's shape. It plans no service whose entry has a mistake; the shape is judged all the
# same where the mistake is elsewhere in the entry, so that one run tells both.
OF_SHAPE = ("data-parallel-hosts", "gpu-missing", "gpus-differ", "gpus-on-cpu", "no-gpus", "replica-size", "world-size")


def _shape_findings(read_services: Iterable[services.Service], fleet: plan.Fleet) -> list[Finding]:
    found: list[Finding] = []
    for service in read_services:
        if service.shaped and not service.whole:
            _, mistakes = plan.build([dataclasses.replace(service, whole=True)], fleet)
            found.extend(mistake for mistake in mistakes if mistake.id in OF_SHAPE)
    return found


def _key_findings(inventory: Inventory, read_services: list[services.Service], hosts: Iterable[str]) -> list[Finding]:
    """Every service has a key of its own; the keys themselves are never part of a message."""
    keys, found = _same_everywhere(inventory, hosts, "vllm_service_api_keys", {})
    if not isinstance(keys, dict):
        return [
            *found,
            Finding(
                "wrong-type", "vllm_service_api_keys", "it is not a mapping", "Write one line a service: NAME: KEY"
            ),
        ]
    names = [service.name for service in read_services]
    for name in names:
        key = keys.get(name)
        if key is None:
            fix = f"Add it to vllm_service_api_keys (better in a vault): {name}: followed by the output of `openssl rand -hex 32`"
            found.append(Finding("no-key", f"service {name}", "it has no API key", fix))
        elif fault := _key_fault(key):
            fix = f"It must be a text of {KEY_LENGTH} or more printable characters without blanks, such as the output of `openssl rand -hex 32`"
            found.append(Finding("weak-key", f"service {name}", fault, fix))
    for name in keys:
        if name not in names:
            found.append(
                Finding(
                    "unknown-service",
                    f"vllm_service_api_keys.{name}",
                    "there is no such service",
                    f"{did_you_mean(name, names)}Services: {', '.join(names) or 'none; vllm_services is empty or missing'}",
                )
            )
    return [*found, *_former_findings(inventory, read_services, hosts, keys)]


def _former_findings(
    inventory: Inventory, read_services: list[services.Service], hosts: Iterable[str], keys: Mapping[str, Any]
) -> list[Finding]:
    """Former keys belong to a service and are others than its own; no key is part of a message."""
    variable = "vllm_service_former_keys"
    former, found = _same_everywhere(inventory, hosts, variable, {})
    known = {service.name: service for service in read_services}
    for name, key in former.items() if isinstance(former, dict) else ():
        where, service = f"{variable}.{name}", known.get(name)
        if service is None:
            fix = f"{did_you_mean(name, known)}Services: {', '.join(known) or 'none'}"
            found.append(Finding("unknown-service", where, "there is no such service", fix))
        elif fault := _key_fault(key, "former key"):
            found.append(Finding("weak-key", f"service {name}", fault, "Give it as it was in vllm_service_api_keys"))
        elif key == keys.get(name):
            fix = "Put the new key into vllm_service_api_keys, or leave the former one out"
            found.append(Finding("former-key", f"service {name}", "its former key is its key", fix))
        elif "middleware" in service.args or "PYTHONPATH" in service.env:
            fix = "Leave them out while keys change: the former key is taken by a middleware, and a configuration names one"
            message = "it has a former key, and args.middleware or env.PYTHONPATH of its own"
            found.append(Finding("former-key", f"service {name}", message, fix))
    return found


def _key_fault(key: Any, what: str = "API key") -> str | None:
    if not isinstance(key, str):
        return f"its {what} is no text (a number needs quotes)"
    if "{{" in key:
        # Ansible leaves a template as it is when a variable in it is undefined.
        return f"its {what} is a template with an undefined variable"
    if len(key) < KEY_LENGTH or not re.fullmatch(r"[!-~]+", key):
        return f"its {what} is too short or has characters that a header cannot carry"
    return None


def _ray_findings(
    inventory: Inventory, read_services: list[services.Service], hosts: Mapping[str, plan.Host]
) -> list[Finding]:
    """Services on Ray: each cluster has a token of its own, and each release a lock of its Ray. No token is ever shown."""
    tokens, found = _same_everywhere(inventory, hosts, "ray_cluster_tokens", {})
    if not isinstance(tokens, dict):
        fix = "Write one line a service: NAME: TOKEN"
        return [*found, Finding("wrong-type", "ray_cluster_tokens", "it is not a mapping", fix)]
    names = [service.name for service in read_services if service.executor == "ray"]
    make = "the output of `openssl rand -hex 32`"
    for service in (service for service in read_services if service.executor == "ray"):
        where = f"service {service.name}"
        if service.name not in tokens:
            fix = f"Add it to ray_cluster_tokens (better in a vault): {service.name}: followed by {make}"
            found.append(Finding("no-token", where, "its Ray cluster has no token", fix))
        elif fault := _key_fault(tokens[service.name], "Ray token"):
            fix = f"It must be a text of {KEY_LENGTH} or more printable characters without blanks, such as {make}"
            found.append(Finding("weak-token", where, fault, fix))
        own = [
            hosts[name] for name in (service.hosts if service.hosts is not None else hosts) if name and name in hosts
        ]
        found.extend(dict.fromkeys(lacks for host in own if (lacks := _ray_lock_fault(where, host))))
    for name in tokens:
        if name not in names:
            told = f"{did_you_mean(name, names)}Services with executor: ray: {', '.join(names) or 'none'}"
            message = "there is no such service with executor: ray"
            found.append(Finding("unknown-service", f"ray_cluster_tokens.{name}", message, told))
    return found


def _gateway_findings(inventory: Inventory, read_services: list[services.Service]) -> list[Finding]:
    """What role gateway would refuse or could not route, each mistake once for all gateways."""
    served = {service.name: list(service.served_model_names) for service in read_services}
    found: dict[Finding, None] = {}
    every: dict[str, dict[str, Any]] = {}
    for host in inventory.group("gateways"):
        settings = every[host] = {
            name.removeprefix("gateway_"): inventory.role_value(host, "gateway", name)
            for name in data.role_options("gateway")
        }
        found.update(dict.fromkeys(gateway.judge(settings, served)))
        entries = settings["external"] if isinstance(settings["external"], list) else []
        found.update(dict.fromkeys(fault for entry in entries if isinstance(entry, dict) for fault in _lacking(entry)))
    addresses = {host: _address(inventory, host)[0] for host in inventory.names}
    return [*found, *gateway.judge_pair(every, addresses)]


def _lacking(entry: Mapping[str, Any]) -> Iterable[Finding]:
    """Files of an external upstream that are not on the controller."""
    for name in ("key_file", "ca_file"):
        told = entry.get(name)
        if isinstance(told, str) and told and "{{" not in told and not pathlib.Path(told).expanduser().is_file():
            fix = "Name one that is there, better with its whole path"
            where = f"gateway_external, {entry.get('name')}"
            yield Finding("gateway-external", where, f"{name} is {told}, which is no file of the controller", fix)


def _ray_lock_fault(where: str, host: plan.Host) -> Finding | None:
    """Is there a lock of Ray for the release of this host? A release that has none itself is told elsewhere."""
    known = host.accelerator != "cpu" and host.version in data.load("ray")["releases"]
    release = locks.lock_name(host.version, host.accelerator, host.python, host.architecture)
    addon = locks.addon_name("ray", host.version, host.accelerator, host.python, host.architecture)
    if not known or release not in data.lock_files() or f"addons/{addon}" in data.lock_files("addons/"):
        return None
    fix = f"Make it: scripts/lock {host.version} {host.accelerator} --python {host.python} --addon ray"
    return Finding("no-lock", where, f"there is no lock of Ray for {release.removesuffix('.lock')}", fix)


# --- Variables of roles -----------------------------------------------------------------------------------------


def _variable_findings(inventory: Inventory) -> list[Finding]:
    """Unknown variables under a role's prefix and values of the wrong type, each once for all hosts that have it."""
    faults = []
    for host in inventory.names:
        names = [str(name) for name in inventory.hostvars[host]]
        for name in names:
            fault = _unknown_variable(name)
            if fault:
                faults.append((fault, host))
        for role in data.role_names():
            faults.extend((fault, host) for fault in _type_faults(inventory, host, role, names))
        faults.extend((fault, host) for fault in _fleet_type_faults(inventory, host, names))
    return _grouped(faults)


# Beginnings that nobody else's variables have: every unknown name under them is a mistake. Other roles' prefixes are
# common words (validate_certs, firewall_allowed_tcp_ports), where a near miss of a known variable is one, and what looks
# like a switch of the role that it does not have.
STRICT = ("vllm_", "fleet_", "model_store_", "host_limits_", "nccl_", "ray_cluster_")
NEAR = 0.8
_SWITCH = "The role is part of site.yml; firewall_managed_elsewhere: true leaves the rules to somebody else"
_OPENINGS = "site.yml opens what the plan needs; a service's `clients` says who else reaches it"
NO_SUCH = {
    **dict.fromkeys(
        (
            "firewall_enabled",
            "firewall_enable",
            "firewall_disabled",
            "firewall_disable",
            "firewall_managed",
            "firewall_manage",
        ),
        _SWITCH,
    ),
    **dict.fromkeys(("firewall_extra", "firewall_extra_openings", "firewall_clients"), _OPENINGS),
}


def _unknown_variable(name: str) -> tuple[str, str, str] | None:
    if name in FACTS or name in FLEET_VARIABLES or name == "vllm_services":
        return None
    fix = NO_SUCH.get(name)
    role = max((role for role in data.role_names() if name.startswith(f"{role}_")), key=len, default=None)
    if fix:
        pass
    elif name.startswith("fleet_"):
        fix = f"{did_you_mean(name, FLEET_VARIABLES)}Known: {', '.join(sorted(FLEET_VARIABLES))}"
    elif role:
        fix = _not_of_role(name, role)
    elif name.startswith("vllm_"):
        known = ["vllm_services", *(o for role in data.role_names() for o in data.role_options(role))]
        fix = f"{did_you_mean(name, known)}No role of the collection reads it"
    return ("unknown-variable", f"unknown variable {name}", fix) if fix else None


def _not_of_role(name: str, role: str) -> str | None:
    """What to do about a name that begins like a role's variables; None where it is one, or somebody else's."""
    options = data.role_options(role)
    if name in options:
        return None
    if name.startswith(STRICT):
        return f"{did_you_mean(name, options)}The role's README lists what {role} knows"
    # Without the common beginning, which would make everything under it look alike.
    ends = {option[len(role) :]: option for option in options}
    near = difflib.get_close_matches(name[len(role) :], ends, n=1, cutoff=NEAR)
    return f"Did you mean {ends[near[0]]}? The role's README lists what {role} knows" if near else None


# Judged by themselves, with more to say than a type: services.read, models.judge, _key_findings.
JUDGED = ("vllm_services", "model_store_models", "vllm_service_api_keys")
KINDS = {
    "bool": "true or false",
    "dict": "a mapping",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "path": "a path",
    "str": "a text",
}


def _type_faults(inventory: Inventory, host: str, role: str, names: list[str]) -> list[tuple[str, str, str]]:
    """Values that the argument spec of their role would refuse."""
    faults: list[tuple[str, str, str]] = []
    for name, option in data.role_options(role).items():
        value = inventory.get(host, name) if name in names and name not in JUDGED else None
        if value is not None:
            faults.extend(("wrong-type", *fault) for fault in _value_faults(name, option, value))
    return faults


def _value_faults(name: str, option: Mapping[str, Any], value: Any) -> list[tuple[str, str]]:
    """What is wrong with a value and what it is for. Ansible decides; the words for what it refuses are ours."""
    about = _first_line(option.get("description", ""))
    errors = _type_errors({**_spec(option), "required": False}, value)
    if not errors:
        # Counts, sizes and times: no variable of a role may be below nothing.
        below = option.get("type") in ("int", "float") and float(value) < 0
        return [(f"{name} is {_shown(value)}", _sentences("It must not be negative", about))] if below else []
    if option.get("no_log"):
        return [(f"{name} is a secret: it has the wrong type", about)]
    faults = _inner_faults(name, option, value)
    return faults or [(f"{name} is {_shown(value)}: {_plain(errors[0])}", about)]


def _inner_faults(name: str, option: Mapping[str, Any], value: Any) -> list[tuple[str, str]]:
    """Each wrong part of a value with its place: name.key, or the number of an entry."""
    about, kind = _first_line(option.get("description", "")), option.get("type", "str")
    if _type_errors({"type": kind}, value):
        return [(f"{name} is {_shown(value)}", _sentences(f"It must be {KINDS.get(kind, kind)}", about))]
    choices = [str(choice) for choice in option.get("choices") or []]
    wrong = [item for item in (value if kind == "list" else [value]) if choices and str(item) not in choices]
    if wrong:
        fix = f"{did_you_mean(wrong[0], choices)}It must be one of {', '.join(choices)}"
        return [(f"{name} is {_shown(wrong[0])}", _sentences(fix, about))]
    if kind == "list" and isinstance(value, list) and option.get("elements"):
        inner = {"type": option["elements"], "options": option.get("options")}
        return [
            fault
            for number, item in enumerate(value, 1)
            for fault in _inner_faults(f"{name}, entry {number},", inner, item)
        ]
    if kind == "dict" and isinstance(value, dict) and option.get("options"):
        return _key_faults(name, option["options"], value)
    return []


def _key_faults(name: str, options: Mapping[str, Any], value: Mapping[Any, Any]) -> list[tuple[str, str]]:
    """Keys of a mapping that are unknown, missing, or have a wrong value."""
    faults = []
    at = name if name.endswith(",") else f"{name}:"
    for key in value:
        if key not in options:
            known = f"{did_you_mean(key, options)}Known keys: {', '.join(sorted(options))}"
            faults.append((f"{at} unknown key {key}", known))
    for key, option in options.items():
        if value.get(key) is None:
            if option.get("required"):
                faults.append((f"{at} the key {key} is missing", _first_line(option.get("description", ""))))
            continue
        place = f"{name} {key}" if name.endswith(",") else f"{name}.{key}"
        faults.extend(_inner_faults(place, option, value[key]))
    return faults


def _type_errors(spec: Mapping[str, Any], value: Any) -> list[str]:
    """What Ansible's judge says of a value; of some shapes it can say nothing and fails itself."""
    try:
        return list(ArgumentSpecValidator({"value": dict(spec)}).validate({"value": value}).error_messages)
    except (TypeError, AttributeError, ValueError):
        return [f"it is no {spec.get('type', 'str')}"]


def _shown(value: Any) -> str:
    """A value for people, cut between its parts when it is long."""
    text = repr(value)
    if len(text) <= 80:
        return text
    head = text[:76].rpartition(", ")[0] or text[:76]
    return f"{head}, ..." if isinstance(value, (list, dict)) else f"{text[:76]}..."


def _sentences(*parts: str) -> str:
    return ". ".join(part.rstrip(".") for part in parts if part)


def _plain(error: str) -> str:
    """Ansible's words without the names of Python's classes."""
    return re.sub(r"<class '(?:[\w.]*\.)?(?:Ansible)?(\w+)'>", lambda found: found.group(1).lower(), error)


def _spec(option: Mapping[str, Any]) -> dict[str, Any]:
    """An option of an argument spec as ArgumentSpecValidator takes it: without the words for people."""
    drop: Callable[[str], bool] = lambda key: key in ("description", "version_added", "default")  # noqa: E731
    spec = {key: value for key, value in option.items() if not drop(key)}
    if isinstance(spec.get("options"), dict):
        spec["options"] = {
            name: _spec(inner) | ({"default": inner["default"]} if "default" in inner else {})
            for name, inner in spec["options"].items()
        }
    return spec


def _fleet_type_faults(inventory: Inventory, host: str, names: list[str]) -> list[tuple[str, str, str]]:
    faults = []
    meanings = data.load("fleet_variables")
    for name, kind in FLEET_VARIABLES.items():
        value = inventory.get(host, name) if name in names else None
        if value is None or name == "fleet_plan":
            continue
        # The plan counts with it, so that a text of digits will not do.
        if not _type_errors({"type": kind}, value) and (kind != "int" or _is_count(value)):
            continue
        quoted = ", without quotes" if kind == "int" and str(value).isdecimal() else ""
        fix = _sentences(f"It must be {KINDS[kind]}{quoted}", _first_line(meanings[name]["what"]))
        faults.append(("wrong-type", f"{name} is {_shown(value)}", fix))
    return faults


def _first_line(description: str | list[str]) -> str:
    """The first paragraph of a description, without Ansible's markup."""
    text = description[0] if isinstance(description, list) else description
    return re.sub(r"\b[BCIMOPUV]\(([^)]*)\)", r"`\1`", " ".join(str(text).split())).rstrip(".")
