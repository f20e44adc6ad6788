"""What a host of the fleet is asked when something is wrong, and what its state alone says. Standard library, Python 3.9.

`gather` runs on the host and only reads; nothing secret is in what it gives (secrets.env and keys are not read). `judge` runs on the
controller, over all hosts: it finds what no log line says (a clock, a full disk, a certificate that ended, a rank whose agent the others
do not reach, an interface that is none or the wrong one, a model whose files are gone).
Findings have the shape of diagnosis.Doctor's.
"""

from __future__ import annotations

import base64
import calendar
import glob
import json
import os
import re
import subprocess
import time
import urllib.error
import urllib.request
import zlib
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from . import api_tls, probe

Run = Callable[[Sequence[str], float], Tuple[int, str, str]]

MOST_LINES = 20000  # of a journal, the newest
MOST_BYTES = 64 << 20
MOST_METRICS = 4 << 20
PATIENCE = 60.0
FLEET_TABLE = "inet gpu_fleet"
UNITS = ("vllm@*", "ray@*", "nvidia-fabricmanager*")
PROPERTIES = "Id,ActiveState,SubState,Result,ExecMainStatus,NRestarts,InvocationID,UnitFileState,ActiveEnterTimestamp"
FOLDERS = ("/", "/var/lib/vllm", "/var/cache/vllm", "/opt/vllm", "/tmp", "/dev/shm")
FULL_SHARE, FULL_BYTES = 0.01, 64 << 20  # a disk with less than both left is full
CLOCK_SECONDS = 2.0
FULL_CACHE = 0.95
FRESH = 600.0  # seconds: an agent's state that is older than that says nothing
# Variables that name the interface ranks meet over (NCCL's "Environment Variables"; torch ProcessGroupGloo.cpp), of a generation's
# environment; NCCL's may be in its own file, too.
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
NCCL_CONF = "/etc/nccl.conf"
MOST_DROPS = 20  # rules of others that are named


# --- on the host --------------------------------------------------------------------------------------------------------


def packed(text: str) -> str:
    """A text for the way back: journals are large and much alike."""
    raw = text.encode("utf-8", "replace")[-MOST_BYTES:]
    return base64.b64encode(zlib.compress(raw, 6)).decode("ascii")


def unpacked(text: str) -> str:
    return zlib.decompress(base64.b64decode(text)).decode("utf-8", "replace")


def gather(
    run: Run,
    since: str,
    agents: Mapping[str, str],
    certificates: Sequence[str],
    *,
    pages: Optional[Mapping[str, str]] = None,
    models: str = "",
    root: str = "/",
) -> Dict[str, Any]:
    """since: as journalctl takes it, or empty for all since boot. agents: instance to the URL of this host's agent; pages: name to the
    URL of a page of metrics here. models: the store."""

    def said(*argv: str) -> str:
        try:
            _, out, _ = run(argv, PATIENCE)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return out

    window = [f"--since={since}"] if since else ["-b"]
    journal = ["journalctl", "-o", "json", "--no-pager", f"--lines={MOST_LINES}", *window]
    units = [word for unit in UNITS for word in ("-u", unit)]
    return {
        "time": time.time(),
        "hostname": os.uname().nodename,
        "journal": packed(said(*journal, *units)),
        "kernel": packed(said(*journal, "_TRANSPORT=kernel")),
        "units": _shown(
            said("systemctl", "show", "vllm@*", "vllm-agent@*", "ray@*", "--timestamp=unix", f"--property={PROPERTIES}")
        ),
        "plans": _plans(),
        "agents": {instance: _state(url) for instance, url in agents.items()},
        "metrics": {name: text for name, url in (pages or {}).items() if (text := _page(name, url))},
        "disks": _disks(),
        "certificates": _ends(certificates),
        "models": _models(models),
        "interfaces": _interfaces(root),
        "firewall": said("nft", "list", "table", "inet", "gpu_fleet"),
        "drops": drops(said("nft", "--stateless", "list", "ruleset"))[:MOST_DROPS],
        "addresses": said("ip", "-brief", "address"),
        "topology": said("nvidia-smi", "topo", "-m"),
        "gpus": said("nvidia-smi"),
    }


def _shown(text: str) -> List[Dict[str, str]]:
    blocks = [dict(line.partition("=")[::2] for line in block.splitlines()) for block in text.split("\n\n")]
    return [block for block in blocks if block.get("Id")]


def _plans() -> Dict[str, Any]:
    found: Dict[str, Any] = {}
    for path in glob.glob("/etc/vllm/*/current/plan.json"):
        try:
            with open(path, encoding="utf-8") as text:
                found[path.split("/")[3]] = json.load(text)
        except (OSError, ValueError):
            found[path.split("/")[3]] = None
    return found


def _state(url: str) -> Optional[Dict[str, Any]]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as answer:
            state = json.loads(answer.read(1 << 20))
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def _page(name: str, url: str) -> str:
    """A page of metrics, without what only histograms and explanations fill it with; empty where nobody answers.

    name   `vllm INSTANCE` for a server, which is asked as what it runs is spoken to
    """
    kind, _, instance = name.partition(" ")
    url = api_tls.url(url, f"/etc/vllm/{instance}/current") if kind == "vllm" else url
    try:
        with probe.opener(url).open(url, timeout=5) as answer:
            text = answer.read(MOST_METRICS).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""
    return "".join(f"{line}\n" for line in text.splitlines() if line[:1] != "#" and "_bucket{" not in line)


def _disks() -> List[Dict[str, Any]]:
    found: Dict[int, Dict[str, Any]] = {}
    for folder in FOLDERS:
        try:
            device, told = os.stat(folder).st_dev, os.statvfs(folder)
        except OSError:
            continue
        found.setdefault(
            device,
            {
                "path": folder,
                "size": told.f_blocks * told.f_frsize,
                "free": told.f_bavail * told.f_frsize,
                "inodes": told.f_files,
                "inodes_free": told.f_favail,
            },
        )
    return list(found.values())


def _ends(paths: Sequence[str]) -> Dict[str, Optional[float]]:
    from ansible_collections.gpu_fleet.vllm.plugins.module_utils import host_metrics

    found: Dict[str, Optional[float]] = {}
    for path in paths:
        try:
            with open(path, encoding="utf-8", errors="replace") as text:
                found[path] = host_metrics.expires(text.read())
        except (OSError, ValueError):
            found[path] = None
    return found


def drops(ruleset: str) -> List[str]:
    """Rules of tables other than the fleet's own that drop or reject packets, and chains that do so with all: `inet filter input: ...`.

    As nft(8) lists them: a table a block, a chain a block in it, a rule a line. Rules of iptables are among them where they are nft's.
    """
    found: List[str] = []
    table = chain = ""
    for raw in ruleset.splitlines():
        line = raw.strip()
        words = line.split()
        if line.endswith("{") and words[0] in ("table", "chain"):
            table, chain = (" ".join(words[1:-1]), "") if words[0] == "table" else (table, words[1])
        elif chain and table != FLEET_TABLE and re.search(r"\b(?:drop|reject)\b", line.partition(" comment ")[0]):
            found.append(f"{table} {chain}: {line}")
    return found


def _models(store: str) -> Dict[str, List[str]]:
    from ansible_collections.gpu_fleet.vllm.plugins.module_utils import model_presence

    return {name: faults for name, faults in model_presence.look(store).items() if faults} if store else {}


def _interfaces(root: str) -> Dict[str, Dict[str, str]]:
    """By instance what its environment says of interfaces, with an empty name what NCCL's own file says."""
    found: Dict[str, Dict[str, str]] = {}
    paths = {path.split("/")[-3]: path for path in glob.glob(f"{root}etc/vllm/*/current/env")}
    for instance, path in [*paths.items(), ("", f"{root}{NCCL_CONF.lstrip('/')}")]:
        try:
            with open(path, encoding="utf-8", errors="replace") as lines:
                told = dict(line.strip().partition("=")[::2] for line in lines)
        except OSError:
            continue
        named = {name: told[name].strip("'\"") for name in INTERFACES if told.get(name)}
        if named:
            found[instance] = named
    return found


# --- on the controller --------------------------------------------------------------------------------------------------


def judge(
    hosts: Mapping[str, Mapping[str, Any]],
    asked: Mapping[str, Tuple[float, float]],
    plan: Optional[Mapping[str, Any]] = None,
) -> List[Dict[str, Any]]:
    """hosts: what each gave; asked: when each was asked and had answered, by the controller's clock; plan: that of the fleet."""
    found: List[Dict[str, Any]] = []
    for host, told in hosts.items():
        found += _clock(host, told, asked.get(host))
        found += _full(host, told)
        found += _certificates(host, told, asked.get(host, (told["time"], told["time"]))[1])
        found += _incomplete(host, told)
        found += _wrong_interface(host, told, plan or {})
    return found + _cut_off(hosts)


def _finding(cause_id: str, host: str, evidence: str, cause: str, fix: str) -> Dict[str, Any]:
    return {
        "cause_id": cause_id,
        "severity": "error",
        "host": host,
        "evidence": evidence,
        "cause": cause,
        "fix": fix,
        "confidence": "high",
        "source": "",
        "line": None,
        "time": None,
        "hosts": [host],
        "count": 1,
        "recovered": False,
    }


def _clock(host: str, told: Mapping[str, Any], span: Optional[Tuple[float, float]]) -> List[Dict[str, Any]]:
    if span is None:
        return []
    began, ended = span
    # The host looked at its clock at some time in between.
    off = told["time"] - (began if told["time"] < began else ended if told["time"] > ended else told["time"])
    if abs(off) <= CLOCK_SECONDS:
        return []
    return [
        _finding(
            "clock_wrong",
            host,
            f"its clock is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} the controller's",
            "The clock of this host, or of the controller, is wrong: certificates and keys fail, logs of several hosts lose their order.",
            "Have one time service run on all hosts: `timedatectl set-ntp true` or chrony; `timedatectl` shows whether it works.",
        )
    ]


def _full(host: str, told: Mapping[str, Any]) -> List[Dict[str, Any]]:
    found = []
    for disk in told["disks"]:
        room = disk["size"] and disk["free"] < FULL_BYTES and disk["free"] < FULL_SHARE * disk["size"]
        inodes = disk["inodes"] and disk["inodes_free"] == 0
        if room or inodes:
            what = "no inode is left" if inodes else f"{disk['free'] >> 20} MiB of {disk['size'] >> 20} MiB are left"
            found.append(
                _finding(
                    "disk_full",
                    host,
                    f"{disk['path']}: {what}",
                    "A file system is full.",
                    f"Free space on it (`df -h {disk['path']}`, `du -xh --max-depth=2 {disk['path']} | sort -h | tail`), or give more.",
                )
            )
    return found


def _certificates(host: str, told: Mapping[str, Any], now: float) -> List[Dict[str, Any]]:
    return [
        _finding(
            "tls_certificate_invalid",
            host,
            f"{path} ended {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(ends))} UTC",
            "A certificate has expired: clients refuse the connection.",
            f"Renew it and run playbooks/site.yml; `openssl x509 -noout -subject -enddate -in {path}` shows it.",
        )
        for path, ends in told["certificates"].items()
        if ends is not None and ends <= now
    ]


def _incomplete(host: str, told: Mapping[str, Any]) -> List[Dict[str, Any]]:
    return [
        _finding(
            "model_weights_incomplete",
            host,
            f"model {name}: {'; '.join(faults)}",
            "The model's folder is not what role model_store brought: a start fails, or has failed, on it.",
            "Run playbooks/site.yml, which brings what is missing; see what removed it, and whether the disk is sound.",
        )
        for name, faults in told["models"].items()
    ]


def shown_interfaces(text: str) -> Dict[str, Tuple[str, List[str]]]:
    """`ip -brief address`: name to state and addresses."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2:
            found[words[0].partition("@")[0]] = (
                words[1],
                [word.partition("/")[0] for word in words[2:] if "/" in word],
            )
    return found


def meant(variable: str, value: str, names: Sequence[str]) -> List[str]:
    """Which of a host's interfaces a variable means: gloo takes whole names, NCCL beginnings of names, = whole ones, ^ all others."""
    words = [word for word in re.split(r"[,\s]+", value.lstrip("^=")) if word]
    if variable == "GLOO_SOCKET_IFNAME" or value.lstrip("^").startswith("="):
        among = [name for name in names if name in words]
    else:
        among = [name for name in names if name.startswith(tuple(words))]
    return [name for name in names if name not in among] if value.startswith("^") else among


def _wrong_interface(host: str, told: Mapping[str, Any], plan: Mapping[str, Any]) -> List[Dict[str, Any]]:
    """An interface that is not there or is down; and one that others cannot know, since the fleet's address is on another."""
    there = shown_interfaces(told["addresses"])
    if not there:
        return []
    replicas = plan.get("replicas", {})
    address = str(plan.get("addresses", {}).get(host) or "")
    carrier = next((name for name, (_, addresses) in there.items() if address in addresses), None)
    shared = [name for name, entry in replicas.items() if host in entry["hosts"] and len(entry["hosts"]) > 1]
    has = "; ".join(f"{name} {' '.join(addresses) or 'none'}" for name, (_, addresses) in there.items())
    found = []
    for instance, variables in told["interfaces"].items():
        where = f"in the environment of {instance}" if instance else f"in {NCCL_CONF}"
        for variable, value in variables.items():
            names = meant(variable, value, list(there))
            down = [name for name in names if there[name][0] == "DOWN"]
            said = f"{variable}={value} {where}"
            fix = (
                f"Interfaces here: {has}. The role nccl chooses the one with the fleet's address (nccl_interface): playbooks/site.yml "
                "writes it again, then restart the replica."
            )
            if not names or names == down:
                what = f"{', '.join(down)} is down" if down else "there is no such interface"
                cause = "Ranks are told to meet over an interface that this host does not have, or that is down."
                found.append(_finding("nccl_no_socket_interface", host, f"{said}: {what}", cause, fix))
            elif (instance in shared or (not instance and shared)) and carrier and carrier not in names:
                what = f"the fleet's address {address} is on {carrier}"
                cause = "Ranks are told to meet over an interface other than the one by whose address their peers know this host."
                found.append(_finding("wrong_interface", host, f"{said}: {what}", cause, fix))
    return found


def _cut_off(hosts: Mapping[str, Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """Ranks whose agents run and answer on their own host, and which another rank's agent does not reach.

    Where it is so in both directions, it is one finding. Whose firewall it is, a rule of others that drops packets tells; else it is told
    of the rank that is not reached, and of two of the later one.
    """
    states: Dict[Tuple[str, int], str] = {}
    for host, told in hosts.items():
        for instance, state in told["agents"].items():
            if state:
                states[instance, int(state["rank"])] = host
    cut: Dict[Tuple[str, int, int], str] = {}
    for (instance, own), host in states.items():
        for rank, seconds in hosts[host]["agents"][instance].get("peers", {}).items():
            if (instance, int(rank)) in states and (seconds is None or seconds >= 6):
                cut[instance, own, int(rank)] = "never" if seconds is None else f"not for {seconds:.0f} s"
    found = []
    for (instance, own, rank), since in sorted(cut.items()):
        both = (instance, rank, own) in cut
        if both and rank < own:
            continue
        host, other = states[instance, own], states[instance, rank]
        said = [f"{instance}: the agent of rank {rank} answers on {other} itself; that on {host} reached it {since}"]
        if both:
            back = cut[instance, rank, own]
            said.append(
                f"{instance}: the agent of rank {own} answers on {host} itself; that on {other} reached it {back}"
            )
        blamed = next((name for name in (other, host) if hosts[name]["drops"]), other)
        said += [f"{blamed} has {rule}" for rule in hosts[blamed]["drops"]]
        way = f"between {host} and {other}" if both else f"from {host} to {other}"
        found.append(
            _finding(
                "firewall_blocks_port",
                blamed,
                "\n".join(said),
                f"Packets {way} are dropped on the way or by the firewall of {blamed}: the ranks cannot meet.",
                f"On {blamed}: `nft list ruleset` and look for who drops packets {way}; playbooks/site.yml puts the fleet's own table right.",
            )
        )
    return found


def load(told: Mapping[str, Any], names: Mapping[str, Sequence[str]]) -> List[str]:
    """What a host's servers have to do, where it is much: requests wait, or the KV cache is full. names: notion to names of its metric."""
    found = []
    for page, text in sorted(told["metrics"].items()):
        sums: Dict[str, float] = {}
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            notion = next((notion for notion, known in names.items() if name.partition("{")[0] in known), None)
            if notion:
                try:
                    sums[notion] = (
                        max(sums.get(notion, 0.0), float(value))
                        if notion == "kv_usage"
                        else sums.get(notion, 0.0) + float(value)
                    )
                except ValueError:
                    continue
        if sums.get("waiting") or sums.get("kv_usage", 0.0) >= FULL_CACHE:
            found.append(
                f"{page.rpartition(' ')[2]}: {sums.get('running', 0):.0f} requests run, {sums.get('waiting', 0):.0f} wait, "
                f"{sums.get('kv_usage', 0):.0%} of the KV cache are in use"
            )
    return found


def serves_since(told: Mapping[str, Any]) -> Optional[float]:
    """When the last of a host's servers came up, where all of them run and give right answers; None otherwise.

    `systemctl show --timestamp=unix` says @SECONDS (systemctl(1), since version 247).
    """
    states = {f"vllm@{instance}.service": state for instance, state in told["agents"].items()}
    since = []
    for unit in told["units"]:
        if unit["Id"] not in states:
            continue
        state, stamp = states[unit["Id"]] or {}, unit.get("ActiveEnterTimestamp", "")
        probe = state.get("probe")
        wrong = not (probe and probe["right"]) if state.get("answers") else not state
        if wrong or unit.get("ActiveState") != "active" or not stamp.startswith("@"):
            return None
        since.append(float(stamp[1:]))
    return max(since) if since and len(since) == len(states) else None


def seconds(stamp: Optional[str]) -> Optional[float]:
    """Seconds since 1970 of a finding's time."""
    if not stamp:
        return None
    try:
        return float(calendar.timegm(time.strptime(stamp[:19], "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return None


def merged(answer: Dict[str, Any], state: Sequence[Mapping[str, Any]], hostnames: Mapping[str, str]) -> Dict[str, Any]:
    """The doctor's answer with findings of the hosts' state: after what lines say for sure, before what they only hint at.

    A cause that both name, on the same host, is one finding, with both as evidence. hostnames: of hosts of the inventory, as logs say them.
    """
    sure = [dict(f) for f in answer["findings"] if f["confidence"] == "high"]
    rest = [f for f in answer["findings"] if f["confidence"] != "high"]
    added = []
    for finding in state:
        names = (finding["host"], hostnames.get(finding["host"]))
        same = next((f for f in sure if f["cause_id"] == finding["cause_id"] and f["host"] in names), None)
        if same:
            same["evidence"] = f"{same['evidence']}\n{finding['evidence']}"
        else:
            added.append(dict(finding))
    return {**answer, "findings": [*sure, *added, *rest]}
