"""What the gateways are made of: from plan and keys to maps and backends, and HAProxy's own answers read. Pure.

Words of HAProxy's manual (configuration.txt and management.txt, 2.6 and 3.0) are used as they are: backend, server, map.
A service is a backend, each of its replicas' APIs a server; the server is called INSTANCE, or INSTANCE-HOST where a
replica has several APIs.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import re
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from . import api_tls
from .findings import Finding, did_you_mean

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")
DIGEST = re.compile(r"[0-9a-fA-F]{64}")
DATE = re.compile(r"\d{4}-\d\d-\d\d")
EXTERNAL_CONCURRENT = 64
KEY_LENGTH = 22  # characters: 128 random bits in base64
EVERYTHING = "*"
URL = re.compile(r"https://([A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*)(?::(\d{1,5}))?((?:/[A-Za-z0-9._~-]+)*)/?")
MODEL = re.compile(r"[A-Za-z0-9._:@/-]{1,200}")  # a name that needs no escape in JSON, in a map and in an answer
# Paths of vLLM's API whose body is JSON with a `model` in it (vllm/entrypoints/openai/api_server.py and its routers). Those
# with files (audio) have no JSON, and those that look up an earlier answer name no model.
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/rerank",
    "/v1/score",
    "/tokenize",
    "/detokenize",
)


def digest(key: str) -> str:
    """How a key is stored: SHA-256 in capitals, as HAProxy's `sha2(256),hex` writes it."""
    return hashlib.sha256(key.encode()).hexdigest().upper()


def backends(plan: Mapping[str, Any], concurrency: Mapping[str, int], default: int) -> List[Dict[str, Any]]:
    """A backend a service: name, models, and servers (name, the name in its certificate, address, port, agent's port, most requests at once, whether it
    is planned to speak TLS, and whether it rests, since a host of it is in maintenance)."""
    found = []
    resting = plan.get("maintenance", {}).get("replicas", {})
    for service, entry in plan["services"].items():
        servers = []
        for instance in entry["replicas"]:
            replica = plan["replicas"][instance]
            for host in replica["urls"]:
                address = plan["addresses"][host]
                servers.append(
                    {
                        "name": instance if len(replica["urls"]) == 1 else f"{instance}-{host}",
                        "instance": instance,
                        "certificate": api_tls.name(host),
                        "tls": bool(replica.get("tls")),
                        "address": f"[{address}]" if ":" in address else address,
                        "port": replica["ports"]["api"],
                        "agent": replica["ports"]["agent"],
                        "most": int(concurrency.get(service, default)),
                        "resting": instance in resting,
                    }
                )
        found.append({"name": service, "models": list(entry["served_model_names"]), "servers": servers})
    return found


def servers_of(plan: Mapping[str, Any], instance: str) -> List[str]:
    """BACKEND/SERVER of a replica, as the runtime socket names them."""
    service = plan["replicas"][instance]["service"]
    return [
        f"{service}/{server['name']}"
        for backend in backends(plan, {}, 1)
        if backend["name"] == service
        for server in backend["servers"]
        if server["instance"] == instance
    ]


def spoken(plan: Mapping[str, Any], told: Iterable[Mapping[str, bool]]) -> Dict[str, bool]:
    """BACKEND/SERVER to whether it speaks TLS, of the replicas that hosts of this run have told of (INSTANCE to that)."""
    known = {instance: tls for each in told for instance, tls in each.items() if instance in plan["replicas"]}
    return {server: tls for instance, tls in known.items() for server in servers_of(plan, instance)}


def replicas_on(plan: Mapping[str, Any], hosts: Sequence[str]) -> List[str]:
    """Replicas that have a rank on any of these hosts."""
    return [
        name
        for name, replica in plan["replicas"].items()
        if set(hosts) & {*replica["hosts"], *replica.get("ray_hosts", ())}
    ]


def models(plan: Mapping[str, Any], external: Iterable[Mapping[str, Any]] = ()) -> Dict[str, str]:
    """Every name that a request may use, and the service, or the external upstream, that has it."""
    bought = {name: entry["name"] for entry in external for name in entry["models"]}
    own = {name: service for service, entry in plan["services"].items() for name in entry["served_model_names"]}
    return {**bought, **own}


def externals(entries: Iterable[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """A backend each upstream that is not of the fleet: name, models, host, port, path, most requests at once, ca_file, dns."""
    found = []
    for entry in entries:
        told = URL.fullmatch(entry["url"])
        if not told:
            raise ValueError(f"{entry['name']}: {entry['url']} is no https:// URL of a host by its name")
        found.append(
            {
                "name": entry["name"],
                "models": sorted(entry["models"]),
                "host": told[1],
                "port": int(told[2] or 443),
                "path": told[3],
                "most": int(entry.get("concurrent") or EXTERNAL_CONCURRENT),
                "ca_file": entry.get("ca_file") or "",
                "dns": bool(entry.get("dns", True)),
            }
        )
    return found


def aliases(entries: Iterable[Mapping[str, Any]]) -> Dict[str, str]:
    """What an upstream calls a model, by the name that clients use."""
    return {alias: name for entry in entries for alias, name in entry["models"].items()}


def expiry(text: Any) -> int:
    """The second (since the epoch, UTC) from which a key is refused; 0 never. A date is good until its end.

    Raises ValueError where it is neither empty nor a date.
    """
    if text in (None, ""):
        return 0
    if isinstance(text, datetime.date):
        text = text.isoformat()[:10]
    if not DATE.fullmatch(str(text)):
        raise ValueError(text)
    day = datetime.datetime.strptime(str(text), "%Y-%m-%d").replace(tzinfo=datetime.timezone.utc)
    return int(day.timestamp()) + 86400


def keys(entries: Iterable[Mapping[str, Any]], defaults: Mapping[str, int]) -> Dict[str, str]:
    """The map of keys: digest to NAME|EXPIRES|REQUESTS A MINUTE|AT ONCE. Limits of 0 are none.

    A client's former keys are the same client: its name, its limits, and a last day of their own.
    """
    found: Dict[str, str] = {}
    for entry in entries:
        rate = entry.get("requests_per_minute")
        most = entry.get("concurrent")
        limits = (
            defaults["requests_per_minute"] if rate is None else rate,
            defaults["concurrent"] if most is None else most,
        )
        for one in (*(entry.get("former") or ()), entry):
            told = _stored(one)
            if told:
                found[told] = "|".join(map(str, (entry["name"], expiry(one.get("expires")), *limits)))
    return found


def grants(entries: Iterable[Mapping[str, Any]]) -> Dict[str, str]:
    """Who may use which model: NAME/MODEL to 1, NAME/* for all of them."""
    return {f"{entry['name']}/{model}": "1" for entry in entries for model in (entry.get("models") or [EVERYTHING])}


def model_list(plan: Mapping[str, Any], external: Iterable[Mapping[str, Any]] = ()) -> Dict[str, Any]:
    """What /v1/models answers for the whole fleet (OpenAI's list of model objects)."""
    names = sorted(models(plan, external).items())
    data = [{"id": name, "object": "model", "created": 0, "owned_by": service} for name, service in names]
    return {"object": "list", "data": data}


def error(message: str, kind: str = "invalid_request_error", code: Optional[str] = None) -> Dict[str, Any]:
    """An error as OpenAI's API shapes it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def map_text(entries: Mapping[str, str]) -> str:
    """A map file. Sorted, so that the same entries are the same file."""
    return "".join(f"{key} {value}\n" for key, value in sorted(entries.items()))


def read_map(text: str) -> Dict[str, str]:
    """A map file, or what `show map` prints with the entries' addresses cut off."""
    pairs = (line.partition(" ") for line in text.splitlines() if line.strip() and not line.startswith("#"))
    return {key: value.strip() for key, _, value in pairs}


# -- what HAProxy says ---------------------------------------------------------------------------------------------------


def read_shown_map(text: str) -> Dict[str, str]:
    """`show map FILE`: an address, a key and a value a line (management.txt)."""
    return read_map("\n".join(line.partition(" ")[2] for line in text.splitlines() if line.startswith("0x")))


def read_stat(text: str) -> Dict[str, Dict[str, str]]:
    """`show stat`: PROXY/NAME to its columns (management.txt, CSV format)."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines or not lines[0].startswith("# "):
        return {}
    head = lines[0][2:].split(",")
    rows = [dict(zip(head, line.split(","))) for line in lines[1:]]  # noqa: B905 (a column more or less is no fault)
    return {f"{row.get('pxname')}/{row.get('svname')}": row for row in rows}


def read_servers(text: str) -> Dict[str, Dict[str, str]]:
    """`show servers state`: BACKEND/SERVER to its columns (management.txt).

    srv_admin_state is read here, since a server that is down says nothing of it in `show stat`, drained or not
    (stats_fill_sv_computestate of HAProxy's stats.c).
    """
    lines = [line.split() for line in text.splitlines() if line.strip()]
    head = next((line[1:] for line in lines if line[0] == "#"), [])
    rows = [dict(zip(head, line)) for line in lines if len(line) > 6 and line[0] != "#"]  # noqa: B905 (as above)
    return {f"{row.get('be_name')}/{row.get('srv_name')}": row for row in rows}


def by_tls(row: Mapping[str, Any]) -> bool:
    """Whether a server is spoken to by TLS: srv_use_ssl of read_servers, in the row's `tls`; 0 and -1 are in clear."""
    return str(row.get("tls")) == "1"


def drained(row: Mapping[str, Any]) -> bool:
    """Whether somebody took a server out: FMAINT 1 or FDRAIN 8 of srv_admin_state, in the row's `admin`, or its status."""
    status = str(row.get("status", ""))
    return bool(int(row.get("admin") or 0) & 9) or "DRAIN" in status or status.startswith("MAINT")


def resting(row: Mapping[str, Any]) -> bool:
    """Whether the configuration has a server out of service (`disabled`: CMAINT 4 of srv_admin_state), for maintenance of its host."""
    return bool(int(row.get("admin") or 0) & 4)


def busy(row: Mapping[str, str]) -> int:
    """Requests that a server works on or that wait for it alone."""
    return int(row.get("scur") or 0) + int(row.get("qcur") or 0)


def admitted(row: Mapping[str, str]) -> bool:
    """Whether a server gets new requests; the status is `UP`, or `UP 1/2` on its way down."""
    return str(row.get("status", "")).split(" ")[0] == "UP"


def interface(facts: Mapping[str, Any], address: str) -> str:
    """The interface of a host that has an address, by what Ansible's module setup says of its network; empty where none has."""
    for told in facts.values():
        if not isinstance(told, Mapping) or not told.get("device"):
            continue
        own = [told.get("ipv4"), *(told.get("ipv4_secondaries") or ()), *(told.get("ipv6") or ())]
        if address in [one.get("address") for one in own if isinstance(one, Mapping)]:
            return str(told["device"])
    return ""


def is_at(row: Mapping[str, str], addresses: Sequence[str]) -> bool:
    """Whether a server is at one of these addresses (column `addr`: ADDRESS:PORT, IPv6 in brackets); without any, it is."""
    return not addresses or str(row.get("addr", "")).rpartition(":")[0].strip("[]") in addresses


# -- judging what the user says --------------------------------------------------------------------------------------------


def judge(settings: Mapping[str, Any], plan_services: Mapping[str, Sequence[str]]) -> List[Finding]:
    """What is wrong with a gateway's variables. No key is ever part of a message.

    settings        the role's variables without their prefix
    plan_services   service to the names of models that requests may use
    """
    bought = {name: entry["name"] for entry in _whole_externals(settings) for name in entry["models"]}
    found = _key_findings(settings, {**plan_services, "": list(bought)})
    found += _external_findings(settings, plan_services)
    names: Dict[str, str] = {}
    for service, served in plan_services.items():
        for name in served:
            if name in names and names[name] != service:
                message = (
                    f"the name {name} is served by {names[name]} and by {service}: a gateway cannot tell them apart"
                )
                found.append(Finding("model-name", "gateway", message, "Give each its own in served_model_names"))
            names.setdefault(name, service)
    for path in settings.get("paths") or []:
        if path not in PATHS:
            fix = f"{did_you_mean(path, PATHS)}The gateway knows: {', '.join(PATHS)}"
            found.append(Finding("gateway-path", "gateway_paths", f"{path} is no path that it lets through", fix))
    for service in settings.get("concurrency") or {}:
        if service not in plan_services:
            fix = f"{did_you_mean(service, plan_services)}Services: {', '.join(plan_services) or 'none'}"
            found.append(Finding("unknown-service", "gateway_concurrency", f"there is no service {service}", fix))
    if bool(settings.get("certificate")) != bool(settings.get("certificate_key")):
        fix = "Give both, or neither: then the gateway's certificate comes from a private CA of the fleet"
        message = "one of gateway_certificate and gateway_certificate_key is given"
        found.append(Finding("gateway-certificate", "gateway", message, fix))
    found += _virtual_findings(settings)
    for name, low, high in (
        ("port", 1, 65535),
        ("virtual_router_id", 1, 255),
        ("body_max", 1024, 1 << 26),
        ("maxconn", 16, 1000000),
        ("queue_deadline", 1, 3600),
        ("answer_deadline", 1, 86400),
    ):
        value = settings.get(name)
        if isinstance(value, int) and not low <= value <= high:
            message = f"gateway_{name} is {value}"
            found.append(Finding("gateway-value", f"gateway_{name}", message, f"It must be from {low} to {high}"))
    return found


def _virtual_findings(settings: Mapping[str, Any]) -> Iterable[Finding]:
    """An address that all gateways share has to be one, and one that HAProxy listens on wherever it is."""
    told = settings.get("virtual_address")
    if not told:
        return
    where = "gateway_virtual_address"
    try:
        version: int = ipaddress.ip_interface(str(told)).version
    except ValueError:
        version = 0
    if not version or "/" not in str(told):
        fix = "Write it with the length of its network, such as 192.0.2.100/24"
        yield Finding("gateway-virtual", where, f"it is {told!r}", fix)
    elif ("*" if version == 4 else "::") not in (settings.get("addresses") or []):
        every = "*" if version == 4 else "::"
        fix = f'Leave gateway_addresses out, or have "{every}" in it: a gateway that does not hold the address cannot listen on it alone'
        yield Finding("gateway-virtual", where, f"gateway_addresses is {settings.get('addresses')}", fix)


def judge_pair(told: Mapping[str, Mapping[str, Any]], addresses: Mapping[str, Optional[str]]) -> List[Finding]:
    """What is wrong with an address that gateways share, between them.

    told       gateway to its variables without their prefix
    addresses  every host of the fleet to its address
    """
    shared = {host: str(settings.get("virtual_address") or "") for host, settings in told.items()}
    if not any(shared.values()):
        return []
    found = []
    where = "gateway_virtual_address"
    groups = {(shared[host], settings.get("virtual_router_id")) for host, settings in told.items()}
    if len(groups) > 1:
        message = f"it is not the same, with gateway_virtual_router_id, on all of {', '.join(told)}"
        found.append(
            Finding("gateway-virtual", where, message, "Set both for the group gateways, not for single hosts")
        )
    if len(told) < 2:
        fix = "Put a second host into the group gateways, or leave the address out"
        found.append(Finding("gateway-virtual", where, f"{', '.join(told)} is the only gateway", fix))
    for host, address in addresses.items():
        if address and address in [text.partition("/")[0] for text in shared.values()]:
            fix = "Give the gateways one that no host has"
            found.append(Finding("gateway-virtual", where, f"{address} is the address of {host}", fix))
    return found


def _whole_externals(settings: Mapping[str, Any]) -> List[Mapping[str, Any]]:
    """Entries whose shape is right; what is wrong with the others is told where types are."""
    entries = settings.get("external") or []
    return [e for e in entries if isinstance(e, dict) and e.get("name") and isinstance(e.get("models"), dict)]


def _external_findings(settings: Mapping[str, Any], plan_services: Mapping[str, Sequence[str]]) -> List[Finding]:
    """A name is served in the house or outside, never both: what should stay would go out when the house is full, or the other way."""
    found: List[Finding] = []
    own = {name: service for service, served in plan_services.items() for name in served}
    names: List[str] = []
    taken: Dict[str, str] = {}
    for entry in _whole_externals(settings):
        name = str(entry["name"])
        faults = []
        if not NAME.fullmatch(name) or name in plan_services or name in names:
            fix = "Use small letters, digits and dashes, and no name of a service or of another one"
            faults.append((f"its name is {name!r}, which is taken or no name", fix))
        url = URL.fullmatch(str(entry.get("url", "")))
        if not url:
            fix = "Write it as https://api.example.com/v1: TLS, and a host by its name, which its certificate is for"
            faults.append((f"its url is {entry.get('url')!r}", fix))
        if bool(entry.get("key")) == bool(entry.get("key_file")):
            faults.append(
                ("it has no key, or two", "Give key (better in a vault) or key_file, a file of the controller")
            )
        if entry.get("key") and (
            len(str(entry["key"])) < KEY_LENGTH
            or not re.fullmatch(r"[!-~]+", str(entry["key"]))
            or "{{" in str(entry["key"])
        ):
            faults.append(
                (
                    "its key is no text that a header can carry, or too short",
                    "Give it as the upstream's owner printed it",
                )
            )
        if not entry["models"]:
            faults.append(("it has no models", "Name them: the name that clients use, and the upstream's own"))
        for alias, theirs in entry["models"].items():
            if not MODEL.fullmatch(str(alias)) or not MODEL.fullmatch(str(theirs)):
                faults.append(
                    (f"its model {alias}: {theirs} is no name", "Use letters, digits and . _ : @ / -, 200 at most")
                )
            if alias in own:
                fix = "Give it another name outside: the house's own never goes out in its place, and clients know which is which"
                faults.append((f"the name {alias} is served by {own[alias]} in the fleet and by {name} outside", fix))
            elif alias in taken:
                faults.append((f"the name {alias} is that of {taken[alias]}, too", "Give each its own"))
            taken.setdefault(alias, name)
        names.append(name)
        found.extend(Finding("gateway-external", f"gateway_external, {name}", message, fix) for message, fix in faults)
        if url and not faults:
            message = f"{', '.join(entry['models'])}: requests leave the fleet for {url[1]}"
            fix = "A client may send them only where `models` of its key names them"
            found.append(Finding("gateway-external", f"gateway_external, {name}", message, fix, "info"))
    return found


def _key_findings(settings: Mapping[str, Any], plan_services: Mapping[str, Sequence[str]]) -> List[Finding]:
    found: List[Finding] = []
    known = [name for served in plan_services.values() for name in served]
    seen: Dict[str, str] = {}
    names: List[str] = []
    for number, entry in enumerate(settings.get("keys") or [], 1):
        if not isinstance(entry, dict):
            continue
        name = str(entry.get("name", ""))
        where = f"gateway_keys, {name or f'entry {number}'}"
        former = [one for one in entry.get("former") or [] if isinstance(one, dict)]
        faults = [*_name_faults(name, names), *_secret_faults(entry), *_value_faults(entry, known)]
        faults += [(f"former: {message}", fix) for one in former for message, fix in _former_faults(one)]
        for one in (entry, *(one for one in former if _named(one))):
            stored = _stored(one) or f"made/{key_file(name, one.get('made'))}"
            if stored in seen:
                faults.append((f"it is the same key as that of {seen[stored]}", "Give each client a key of its own"))
            seen.setdefault(stored, name)
        names.append(name)
        found.extend(Finding("gateway-key", where, message, fix) for message, fix in faults)
    return found


def _stored(entry: Mapping[str, Any]) -> str:
    """The digest of an entry's key in capitals; empty where the key is one that is made, and not there yet."""
    if entry.get("sha256"):
        return str(entry["sha256"]).upper()
    return digest(entry["key"]) if isinstance(entry.get("key"), str) and entry["key"] else ""


def key_file(name: str, number: Any) -> str:
    """The file, below the folder of keys, of a client's key that is made: NAME the first one, NAME.2 the second. Names have no dot."""
    return name if number in (None, 1) else f"{name}.{number}"


def _named(entry: Mapping[str, Any]) -> List[str]:
    return [name for name in ("key", "sha256", "made") if entry.get(name) is not None]


def _former_faults(entry: Mapping[str, Any]) -> Iterable[Tuple[str, str]]:
    """A former key is named, by itself, its digest or its number, and ends."""
    yield from _secret_faults(entry)
    if not _named(entry):
        yield "nothing names the key", "Give key, sha256, or made: the number of one that was made"
    if entry.get("expires") in (None, ""):
        yield "it never ends", "Give `expires`, the last day that it is good for"
    yield from _expiry_faults(entry)


def _name_faults(name: str, names: Sequence[str]) -> Iterable[Tuple[str, str]]:
    if not NAME.fullmatch(name):
        yield f"its name is {name!r}", "Use small letters, digits and dashes, 42 characters at most"
    if name in names:
        yield "the name is taken", "Two keys of one client, the old and the new one, have two names"


def _secret_faults(entry: Mapping[str, Any]) -> Iterable[Tuple[str, str]]:
    key, told = entry.get("key"), entry.get("sha256")
    if len(_named(entry)) > 1:
        yield "it has more than one of key, sha256 and made", "Leave the others out"
    if isinstance(entry.get("made"), int) and entry["made"] < 1:
        yield f"made is {entry['made']}", "It counts the keys that are made for the client, from 1 on"
    if key is not None and (not isinstance(key, str) or "{{" in key or not re.fullmatch(r"[!-~]+", key)):
        yield "its key is no text that a header can carry", "Use printable characters without blanks"
    elif key is not None and len(key) < KEY_LENGTH:
        yield f"its key has fewer than {KEY_LENGTH} characters", "Take the output of `openssl rand -hex 32`"
    if told is not None and not DIGEST.fullmatch(str(told)):
        yield "its sha256 is not 64 hexadecimal digits", "Take what `printf %s KEY | sha256sum` prints"


def _expiry_faults(entry: Mapping[str, Any]) -> Iterable[Tuple[str, str]]:
    try:
        expiry(entry.get("expires"))
    except ValueError:
        yield f"expires is {entry.get('expires')!r}", "Write a day as 2027-01-31; the key is good until its end"


def _value_faults(entry: Mapping[str, Any], known: Sequence[str]) -> Iterable[Tuple[str, str]]:
    yield from _expiry_faults(entry)
    for model in entry.get("models") or []:
        if model not in known:
            yield f"there is no model {model}", f"{did_you_mean(model, known)}Models: {', '.join(known) or 'none'}"
    for limit in ("requests_per_minute", "concurrent"):
        value = entry.get(limit)
        if isinstance(value, int) and value < 0:
            yield f"{limit} is {value}", "Use a number of 1 or more, or 0 for no limit"
