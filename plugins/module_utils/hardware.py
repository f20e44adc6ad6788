"""Judges what a GPU host says of itself (module gpu_facts): what is wrong, which GPUs belong together, what NCCL should do.

Findings come with evidence and remedy; a healthy host has none. Severities:

    error    serving on this host would fail, hang or give wrong answers, or it is not the host that was ordered
    warning  it serves, slower or less safely than it could
    info     worth knowing, nothing to do
"""

from __future__ import annotations

import collections
import itertools
import json
import math
import re
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import gpu_facts, topology
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.findings import Finding

VENDOR_IDS = {"nvidia": "10de", "amd": "1002"}  # PCI's
SAME_MEMORY = 0.01  # boards of one model differ by what firmware and ECC take
REGULAR = 0.6  # share of NVLinked pairs with one width, from which a narrower one is a fault
SMALL_MIB = 512  # of a foreign process: the daemon of MPS or a display's server leaves enough for vLLM
MOST_GROUPS = 20_000  # groups of GPUs that are all tried
UNANSWERED_BY_DESIGN = ("[Insufficient Permissions]",)
SEVERITIES = ("error", "warning", "info")
# Every finding about a GPU host: how grave it can be, and what it means. docs/findings.md is written from this.
FINDINGS: Dict[str, Tuple[str, str]] = {
    "gpu-none": ("error", "GPUs are expected and none is on the PCI bus"),
    "gpu-lost": ("error", "a card is on the PCI bus and the driver does not answer for it"),
    "gpu-count": ("error", "more or fewer GPUs than expected"),
    "gpu-model-unexpected": ("error", "a GPU of another model than expected"),
    "gpu-memory-unexpected": ("error", "a GPU with more or less memory than expected"),
    "gpu-unanswered": ("error, or warning for [Unknown Error]", "a GPU is listed and does not answer what it is asked"),
    "group-beyond": ("error", "a service wants GPUs that the host does not have"),
    "gpu-models-mixed": ("warning", "GPUs of several models on one host"),
    "gpu-memory-mixed": ("warning", "GPUs of one model with different memory"),
    "gpu-tool-failed": ("error", "nvidia-smi or NVML fails, often since driver and libraries differ in version"),
    "gpu-tool-missing": ("error", "the driver is loaded and nvidia-smi is not there"),
    "driver-mismatch": ("error", "the driver that is loaded is not the one that is installed"),
    "driver-not-loaded": ("error", "NVIDIA cards are there and no NVIDIA driver is loaded"),
    "nouveau-loaded": ("error", "the kernel module nouveau holds the cards"),
    "topology-unreadable": ("warning", "the table of links cannot be read for certain; links were not judged"),
    "topology-changed": ("warning", "cards or links differ from what was learned"),
    "link-asymmetric": ("error", "two GPUs see each other over different links"),
    "link-unexpected": ("error", "pairs of GPUs are joined by less than expected"),
    "nvlink-missing": ("error with NVSwitches, else warning", "a GPU has no NVLink while others of its model do"),
    "nvlink-narrower": ("error", "a GPU has fewer NVLinks than others of its model"),
    "nvlink-inactive": ("error, or info where all GPUs have equally few", "some NVLinks of a GPU are down"),
    "p2p-refused": (
        "error over NVLink, info on boards that never have it, else warning",
        "the driver allows no peer access between two GPUs; traffic goes through the host's memory",
    ),
    "acs-on-path": (
        "error within a tensor-parallel group, else info",
        "access control on PCI bridges sends peer traffic up to the root complex: slow, or it hangs",
    ),
    "fabric-not-ready": ("error", "the NVLink fabric is not Completed and Success"),
    "fabric-unhealthy": ("error, or warning for limited capacity", "the driver reports the NVLink fabric as unhealthy"),
    "fabric-manager-down": ("error", "NVSwitches are there and the Fabric Manager does not run"),
    "fabric-manager-version": ("error", "Fabric Manager and driver differ in version"),
    "mig-tensor-parallel": ("error", "MIG is on where a service spreads over several GPUs"),
    "mig-pending": ("warning", "a change of MIG waits for a reset"),
    "pcie-width": (
        "warning",
        "a card has fewer PCIe lanes than it could; the generation is not judged, it drops at idle",
    ),
    "ecc-uncorrected": ("error", "uncorrected memory errors since the driver was loaded"),
    "ecc-history": ("warning", "uncorrected memory errors earlier in the card's life"),
    "row-remap-failed": ("error", "a bad memory row could not be replaced by a spare one"),
    "row-remap-pending": ("warning", "a spare memory row waits for a reset"),
    "xid-CODE": ("by its code, data/hardware.yml", "the driver reported errors since boot"),
    "foreign-process": (
        "error on GPUs that are to serve unless it is small, else warning",
        "a process of somebody else uses a GPU",
    ),
    "persistence-off": ("warning", "the driver unloads when the last process ends"),
    "tensor-parallel-across-sockets": ("warning", "a tensor-parallel group has pairs joined across NUMA nodes only"),
    "learned-unreadable": ("error", "the file of what was learned cannot be read"),
    "release-unfit": ("error", "driver, GPUs or glibc cannot run the vLLM release that is to run here"),
    "release-none": ("warning", "no known vLLM release runs here"),
    "bandwidth-refused": ("error", "the bandwidth proof did not start"),
    "bandwidth-low": ("warning", "a pair of GPUs is slower than the floor of its link, data/links.yml"),
    "bandwidth-hung": ("error", "traffic between two GPUs hangs"),
    "bandwidth-corrupt": ("error", "data between two GPUs arrives wrong"),
    "bandwidth-failed": ("error", "traffic between two GPUs ends with an error"),
}
# A host of which nothing is known but its links.
EMPTY: Dict[str, Any] = {**gpu_facts.nothing(), "vendor": "nvidia"}
# What is kept of a host to compare with later.
IDENTITY = ("name", "uuid", "pci_address", "memory_mib", "mig", "pcie_width")


def judge(
    facts: Dict[str, Any],
    known: Dict[str, Any],
    *,
    expected: Optional[Dict[str, Any]] = None,
    learned: Optional[Dict[str, Any]] = None,
    groups: Sequence[Sequence[int]] = (),
    host: str = "",
) -> List[Finding]:
    """Everything that is wrong with a host's GPUs and links, the worst first.

    facts     what module gpu_facts returned
    known     data/hardware.yml
    expected  any of gpus (number), link (the worst one allowed between two GPUs, as NV18), model, memory_mib
    learned   what `remember` returned when the host was as it should be
    groups    the GPUs of each tensor-parallel group that is to run here, by index
    host      name for messages
    """
    look = _Look(facts, known, expected or {}, [list(group) for group in groups], host)
    found = [
        *_driver(look),
        *_count(look),
        *_answers(look),
        *_models(look),
        *_links(look),
        *_peers(look),
        *_fabric(look),
        *_mig(look),
        *_pcie(look),
        *_errors(look),
        *_others(look),
        *_groups(look),
        *_changed(look, learned),
    ]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def judge_matrix(table: topology.Topology, known: Dict[str, Any]) -> List[Finding]:
    """What the links alone show to be wrong, where nothing but the table is known. The GPUs count as one model."""
    look = _Look(EMPTY, known, {}, [], "")
    look.table = table
    return [*_links(look), *_groups(look)]


def remember(facts: Dict[str, Any]) -> Dict[str, Any]:
    """What of a host is kept to notice a change by: its GPUs, by slot, and the link of every pair."""
    table = _matrix(facts)
    return {
        "gpus": [
            {
                "name": gpu["name"],
                "uuid": gpu["uuid"],
                "pci_address": gpu["pci_address"],
                "memory_mib": gpu["memory_mib"],
                "compute_capability": gpu["compute_capability"],
                "mig": gpu["mig"]["current"],
                "pcie_width": gpu["pcie"]["width_max"],
            }
            for gpu in facts["gpus"]
        ],
        "pairs": table.as_dict()["pairs"] if table else None,
        "nvswitches": facts["nvswitch"]["devices"],
    }


def read_learned(text: str, path: str, where: str) -> Tuple[Optional[Dict[str, Any]], List[Finding]]:
    """What `remember` returned, from the text of its file; a finding where that is something else."""
    if not text.strip():
        reason = "it is empty"
    else:
        try:
            told = json.loads(text)
            if all({"name", "uuid", "pci_address"} <= set(gpu) for gpu in told["gpus"]) and all(
                re.fullmatch(r"\d+-\d+", pair) for pair in told.get("pairs") or {}
            ):
                return told, []
            reason = "its GPUs or links are not as they were written"
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
    fix = (
        "Restore it from version control, or learn the host anew once it is known to be right: gpu_topology_learn: true"
    )
    return None, [Finding("learned-unreadable", where, f"{path} cannot be used: {reason}", fix)]


def recommend(facts: Dict[str, Any], known: Dict[str, Any], groups: Sequence[Sequence[int]] = ()) -> Dict[str, Any]:
    """Which GPUs make good tensor-parallel groups, and which NCCL settings follow for a set of GPUs.

    sizes  for every size of two and more that divides the GPUs: the groups to take, best links first, each with `gpus`,
           `links` (worst and best), `verdict` (good: NVLink throughout; fair: peer access within PCIe switches; poor:
           across host bridges, NUMA nodes or through memory of the host) and `why`
    nccl   for the groups given (else the sizes' groups): `gpus`, `variables`, `why`
    """
    table = _matrix(facts)
    if table is None or table.gpus < 2:
        return {"sizes": {}, "nccl": []}
    look = _Look(facts, known, {}, [], "")
    sizes: Dict[str, List[Dict[str, Any]]] = {}
    for size in range(2, table.gpus + 1):
        if table.gpus % size == 0:
            sizes[str(size)] = [_group(look, group) for group in partition(table, size)]
    wanted = [list(group) for group in groups] or [group["gpus"] for group in sizes[max(sizes, key=int)]]
    return {"sizes": sizes, "nccl": [_nccl(look, group) for group in wanted if len(group) > 1]}


def partition(table: topology.Topology, size: int) -> List[Tuple[int, ...]]:
    """The GPUs in groups of one size: always the best group that is left, the lowest numbers first among equals.

    Best is the group whose worst link is best; then the one with the better sum of links.
    """
    left = list(range(table.gpus))
    groups = []
    while len(left) >= size:
        if math.comb(len(left), size) <= MOST_GROUPS:
            best = min(itertools.combinations(left, size), key=lambda group: (*_worth(table, group), group))
        else:  # too many to try: begin with the best pair and add the nearest
            best = min(itertools.combinations(left, 2), key=lambda group: (*_worth(table, group), group))
            while len(best) < size:
                more = [(*best, gpu) for gpu in left if gpu not in best]
                best = min(more, key=lambda group: (*_worth(table, group), group))
            best = tuple(sorted(best))
        groups.append(best)
        left = [gpu for gpu in left if gpu not in best]
    return groups


def _worth(table: topology.Topology, group: Sequence[int]) -> Tuple[Any, Any]:
    qualities = sorted((topology.quality(link) for link in table.among(group)), reverse=True)
    return qualities[0], qualities


# Inside


class _Look:
    """Everything the checks need, worked out once."""

    def __init__(
        self,
        facts: Dict[str, Any],
        known: Dict[str, Any],
        expected: Dict[str, Any],
        groups: List[List[int]],
        host: str,
    ) -> None:
        self.facts, self.known, self.expected, self.groups = facts, known, expected, groups
        self.where = host or "this host"
        self.gpus: List[Dict[str, Any]] = facts["gpus"]
        self.table: Optional[topology.Topology] = None
        self.unreadable: Optional[str] = None
        text = facts["topology"]["matrix"]
        if text and facts["vendor"] == "nvidia":
            try:
                self.table = topology.read(text)
            except topology.Refused as refused:
                self.unreadable = refused.reason
        self.p2p: Dict[str, Dict[str, str]] = {}
        for kind, printed in facts["topology"]["p2p"].items():
            try:
                self.p2p[kind] = topology.read_p2p(printed) if printed else {}
            except topology.Refused:
                self.p2p[kind] = {}

    def peer_state(self, pair: Sequence[int]) -> str:
        """OK, or why the driver allows no peer access between two GPUs; OK where nobody told."""
        states = [self.p2p.get(kind, {}).get(topology.name(sorted(pair)), "OK") for kind in ("read", "write")]
        return next((state for state in states if state != "OK"), "OK")

    def finding(self, id_: str, severity: str, message: str, fix: str) -> Finding:
        return Finding(id_, self.where, message, fix, severity)

    def redirected(self, pair: Sequence[int]) -> List[str]:
        """Bridges between two GPUs on PCIe switches whose access control sends peer traffic up to the root.

        NVLink does not pass them, and what goes through a host bridge is at the root anyway.
        """
        if self.table is None or self.table.link(*pair) not in ("PIX", "PXB"):
            return []
        mine, other = (self.gpus[number]["bridges"] if number < len(self.gpus) else [] for number in pair)
        shared = {bridge["address"] for bridge in mine} & {bridge["address"] for bridge in other}
        path = [bridge for bridge in mine + other if bridge["address"] not in shared]
        return sorted(
            {bridge["address"] for bridge in path if set(bridge["acs"] or ()) & set(self.known["acs_redirects"])}
        )


def _matrix(facts: Dict[str, Any]) -> Optional[topology.Topology]:
    text = facts["topology"]["matrix"]
    if not text or facts["vendor"] != "nvidia":
        return None
    try:
        return topology.read(text)
    except topology.Refused:
        return None


def links(facts: Dict[str, Any]) -> Dict[str, str]:
    """The link of every pair of GPUs, {"0-1": "NV18"}; nothing where the host's table cannot be read."""
    table = _matrix(facts)
    return table.as_dict()["pairs"] if table else {}


def _list(numbers: Iterable[Any]) -> str:
    return ", ".join(f"GPU{number}" for number in numbers)


def _driver(look: _Look) -> Iterator[Finding]:
    facts, driver = look.facts, look.facts["driver"]
    if facts["nouveau"]:
        yield look.finding(
            "nouveau-loaded",
            "error",
            "the kernel module nouveau is loaded and holds the cards",
            "Blacklist nouveau, rebuild the initramfs and reboot; then NVIDIA's module can take the cards",
        )
    if facts["vendor"] != "nvidia":
        return
    loaded, installed = driver["loaded"], driver["installed"]
    if loaded and installed and loaded != installed:
        yield look.finding(
            "driver-mismatch",
            "error",
            f"the kernel runs driver {loaded}, installed is {installed}",
            "Reboot, or stop everything that uses the GPUs and reload the nvidia modules; pin the driver's packages",
        )
    if facts["error"]:
        yield look.finding(
            "gpu-tool-failed",
            "error",
            f"{facts['source'] or 'nvidia-smi'} says: {facts['error']}",
            "Reboot when driver and libraries differ in version; else look at the kernel's messages: dmesg | grep NVRM",
        )
    elif not loaded:
        yield look.finding(
            "driver-not-loaded",
            "error",
            f"{len(facts['pci_gpus'])} NVIDIA card{'s are' if len(facts['pci_gpus']) != 1 else ' is'} on the bus and no "
            "NVIDIA driver is loaded" + (f" (installed: {installed})" if installed else ""),
            "Install the driver, or load it: modprobe nvidia; the kernel's messages say why it is not",
        )
    elif not look.gpus:
        yield look.finding(
            "gpu-tool-missing",
            "error",
            f"driver {loaded} is loaded, and nobody tells of its GPUs: nvidia-smi is not there, nor nvidia-ml-py",
            f"Install the driver's user space of the same version ({loaded}), which brings nvidia-smi",
        )


def _count(look: _Look) -> Iterator[Finding]:
    # Cards of another maker (a display in the CPU) and those given to virtual machines are not the driver's.
    cards = [
        card["address"]
        for card in look.facts["pci_gpus"]
        if card["vendor_id"] == VENDOR_IDS.get(look.facts["vendor"]) and card["driver"] != "vfio-pci"
    ]
    there, bus, wanted = len(look.gpus), len(cards), look.expected.get("gpus")
    if look.facts["vendor"] == "none":
        if wanted:
            yield look.finding(
                "gpu-none",
                "error",
                f"no GPU is on the PCI bus, expected are {wanted}",
                "Look whether the cards have power and sit in their slots, or correct what is expected of this host",
            )
        return
    answered = bool(look.gpus)
    if answered and there < bus:
        silent = sorted(set(cards) - {gpu["pci_address"] for gpu in look.gpus})
        yield look.finding(
            "gpu-lost",
            "error",
            f"{bus} cards are on the PCI bus, the driver answers for {there}; silent: {', '.join(silent)}",
            "Look for Xid 79 in the kernel's messages; a power cycle brings a card back that has fallen off the bus",
        )
    if wanted is not None and answered and there != wanted:
        yield look.finding(
            "gpu-count",
            "error",
            f"it has {there} GPU{'s' if there != 1 else ''}, expected are {wanted}",
            "Find the missing card (lspci -d 10de:), or correct what is expected"
            if there < wanted
            else "Correct what is expected of this host (gpu_topology_expected.gpus, fleet_gpus)",
        )


def _answers(look: _Look) -> Iterator[Finding]:
    """GPUs that are listed and do not say what they are asked."""
    silent: Dict[str, Set[int]] = collections.defaultdict(set)
    for item in look.facts.get("unread") or []:
        told = re.match(r"GPU (\d+): (\[[^\]]+\])", str(item["why"]))
        if told and told.group(2) not in UNANSWERED_BY_DESIGN:
            silent[told.group(2)].add(int(told.group(1)))
    for gpu in look.gpus:
        if look.facts["vendor"] == "nvidia" and (not gpu["name"] or not gpu["memory_mib"]):
            silent["no name or no memory"].add(gpu["index"])
    for words, numbers in sorted(silent.items()):
        yield look.finding(
            "gpu-unanswered",
            "warning" if words == "[Unknown Error]" else "error",
            f"{_list(sorted(numbers))} {'answer' if len(numbers) > 1 else 'answers'} {words} to questions of nvidia-smi",
            "Look at the kernel's messages (dmesg | grep NVRM); reset the GPU while nothing uses it, or reboot",
        )


def _models(look: _Look) -> Iterator[Finding]:
    # Where it is known which GPUs serve together, only those have to be alike.
    for group in look.groups or [[gpu["index"] for gpu in look.gpus]]:
        members = [gpu for gpu in look.gpus if gpu["index"] in group]
        names = sorted({str(gpu["name"]) for gpu in members})
        if len(names) > 1:
            told = "; ".join(
                f"{name}: {_list(gpu['index'] for gpu in members if str(gpu['name']) == name)}" for name in names
            )
            yield look.finding(
                "gpu-models-mixed",
                "warning",
                f"GPUs {'of one service' if look.groups else 'of this host'} are of {len(names)} models ({told})",
                "Give each service GPUs of one model (`gpus`): a tensor-parallel group runs at the slowest one's pace",
            )
    memory: Dict[str, Set[int]] = collections.defaultdict(set)
    for gpu in look.gpus:
        if gpu["memory_mib"]:
            memory[str(gpu["name"])].add(gpu["memory_mib"])
    for name, sizes in sorted(memory.items()):
        if max(sizes) - min(sizes) > SAME_MEMORY * max(sizes):
            least = [gpu["index"] for gpu in look.gpus if str(gpu["name"]) == name and gpu["memory_mib"] == min(sizes)]
            yield look.finding(
                "gpu-memory-mixed",
                "warning",
                f"GPUs of the model {name} have {' and '.join(str(size) for size in sorted(sizes))} MiB; the least on "
                f"{_list(least)}",
                "Give each service GPUs of one size: vLLM takes the smallest one's memory for all",
            )
    for key, what in (("model", "name"), ("memory_mib", "memory_mib")):
        wanted = look.expected.get(key)
        other = [gpu for gpu in look.gpus if wanted is not None and gpu[what] != wanted]
        if other:
            yield look.finding(
                f"gpu-{key.replace('_mib', '')}-unexpected",
                "error",
                f"{_list(gpu['index'] for gpu in other)}: {other[0][what]}{' MiB' if key == 'memory_mib' else ''}, "
                f"expected is {wanted}",
                "Correct what is expected of this host (gpu_topology_expected), or ask why it was given other cards",
            )


def _links(look: _Look) -> Iterator[Finding]:
    if look.unreadable and look.gpus:
        yield look.finding(
            "topology-unreadable",
            "error" if look.expected.get("link") else "warning",
            f"nvidia-smi topo -m cannot be read: {look.unreadable}",
            "Send its output with a report; links were not judged on this host",
        )
    table = look.table
    if table is None and not look.unreadable and look.facts["vendor"] == "nvidia" and len(look.gpus) > 1:
        yield look.finding(
            "topology-unreadable",
            "error" if look.expected.get("link") else "warning",
            "nvidia-smi topo -m gave no table",
            "Run it on the host and look at what it says; links were not judged",
        )
    if table is None or table.gpus < 2:
        return
    if look.gpus and table.gpus != len(look.gpus):
        yield look.finding(
            "topology-unreadable",
            "warning",
            f"nvidia-smi topo -m shows {table.gpus} GPUs, the driver answers for {len(look.gpus)}",
            "Run the check again; if it stays so, look at the kernel's messages: a GPU may just have been lost",
        )
        return
    pairs = table.pairs()
    for pair in table.asymmetric():
        yield look.finding(
            "link-asymmetric",
            "error",
            f"GPU{pair[0]} sees GPU{pair[1]} over {table.cells[pair]}, GPU{pair[1]} sees GPU{pair[0]} over "
            f"{table.cells[pair[1], pair[0]]}",
            "A link is down on one side: reset both GPUs or reboot; if it stays so, have the hardware looked at",
        )
    allowed = str(look.expected.get("link") or "").upper().replace("SOC", "SYS")
    if allowed:
        worse = {pair: link for pair, link in pairs.items() if topology.quality(link) > topology.quality(allowed)}
        if worse:
            told = ", ".join(f"{topology.name(pair)} {link}" for pair, link in list(worse.items())[:6])
            yield look.finding(
                "link-unexpected",
                "error",
                f"{len(worse)} of {len(pairs)} pairs are joined by less than {allowed}: {told}",
                "Look at the links of these GPUs: nvidia-smi nvlink -s, nvidia-smi topo -m",
            )
    yield from _siblings(look, table, pairs)


def _siblings(look: _Look, table: topology.Topology, pairs: Dict[Tuple[int, int], str]) -> Iterator[Finding]:
    """GPUs with fewer NVLinks than GPUs of the same model beside them.

    A GPU's links are added up over its peers, so that a mesh of unequal but complete links (two here, one there, as on
    eight V100s) is none; where a switch joins all GPUs each pair has all links, and the sum tells as well.
    """
    inactive = {
        gpu["index"]: [number for number, speed in enumerate(gpu["nvlinks"]) if speed is None] for gpu in look.gpus
    }
    down = {index: links for index, links in inactive.items() if links}
    total = {
        number: sum(topology.nvlinks(table.link(number, peer)) for peer in range(table.gpus) if peer != number)
        for number in range(table.gpus)
    }
    by_model: Dict[str, List[int]] = collections.defaultdict(list)
    for number in range(table.gpus):
        by_model[str(look.gpus[number]["name"]) if look.gpus else ""].append(number)
    # Several widths side by side are a mesh by design, such as the one of eight V100s or half of it, unless most pairs
    # have one width and few have less.
    widths = collections.Counter(link for link in pairs.values() if topology.is_nvlink(link))
    regular = bool(widths) and max(widths.values()) >= REGULAR * sum(widths.values())
    for numbers in by_model.values():
        most = max(total[number] for number in numbers)
        less = [number for number in numbers if total[number] < most]
        if not less:
            continue
        none = [number for number in less if total[number] == 0]
        narrower = [number for number in less if total[number]]
        if none:
            switched = look.facts["nvswitch"]["devices"] > 0
            yield look.finding(
                "nvlink-missing",
                "error" if switched else "warning",
                f"{_list(none)} {'have' if len(none) > 1 else 'has'} no NVLink, while "
                f"{_list(number for number in numbers if total[number] == most)} of the same model "
                f"{'have' if most else 'has'} some",
                "Look at nvidia-smi nvlink -s and the Fabric Manager's log"
                if switched
                else "If a bridge belongs there, look whether it sits; else keep tensor-parallel groups within the bridges",
            )
        if narrower and regular:
            thin = {
                pair: link
                for pair, link in pairs.items()
                if topology.is_nvlink(link) and (pair[0] in narrower or pair[1] in narrower)
            }
            best = min((link for link in pairs.values() if topology.is_nvlink(link)), key=topology.quality)
            told = ", ".join(
                f"{topology.name(pair)} {link}" for pair, link in thin.items() if link != best
            ) or ", ".join(f"GPU{number} {total[number]} of {most}" for number in narrower)
            yield look.finding(
                "nvlink-narrower",
                "error",
                f"{_list(narrower)} {'have' if len(narrower) > 1 else 'has'} fewer NVLinks than siblings (best {best}): "
                f"{told}" + (f"; inactive: {_down(down)}" if down else ""),
                "A link is down: nvidia-smi nvlink -s and -e name it; reset the GPUs or reboot, then have it repaired",
            )
            down = {}
    if down:
        # The same number on every GPU may be how the host was built or sold; a GPU that stands out is not.
        unequal = len({len(links) for links in inactive.values()}) > 1
        switched = look.facts["nvswitch"]["devices"] > 0 or any(
            gpu["fabric"]["state"] == "Completed" for gpu in look.gpus
        )
        bridged = not switched and not all(gpu["nvlinks"] for gpu in look.gpus)
        if switched or (unequal and not bridged):
            yield look.finding(
                "nvlink-inactive",
                "error" if unequal else "info",
                f"NVLinks are down: {_down(down)}",
                "nvidia-smi nvlink -s and -e name the link; reset the GPUs or reboot, then have it repaired"
                if unequal
                else "If this host should have them all, a switch may be lost: look at the Fabric Manager's log",
            )


def _down(down: Dict[int, List[int]]) -> str:
    return "; ".join(f"GPU{index} link {', '.join(map(str, links))}" for index, links in sorted(down.items()))


def _peers(look: _Look) -> Iterator[Finding]:
    """Pairs that cannot reach each other's memory, or only by way of the root complex."""
    if look.table is None:
        return
    refused: Dict[str, List[str]] = collections.defaultdict(list)
    redirected: Dict[Tuple[str, ...], List[str]] = collections.defaultdict(list)
    for pair in look.table.pairs():
        state = look.peer_state(pair)
        if state != "OK":
            refused[state].append(topology.name(pair))
        else:
            bridges = look.redirected(pair)
            if bridges:
                redirected[tuple(bridges)].append(topology.name(pair))
    for state, pairs in sorted(refused.items()):
        by_design = all(
            any(gpu["name"].startswith(family) for family in look.known["no_p2p_by_design"]) for gpu in look.gpus
        )
        nvlinked = [pair for pair in pairs if topology.is_nvlink(look.table.link(*map(int, pair.split("-"))))]
        severity = "error" if nvlinked else "info" if by_design else "warning"
        yield look.finding(
            "p2p-refused",
            severity,
            f"no peer access between GPUs {_few(pairs)}: {state} ({topology.P2P_STATES.get(state, 'not in the legend')})",
            "The driver joins NVLinked GPUs as a rule: look at the kernel's messages and the Fabric Manager"
            if nvlinked
            else "NCCL goes through the host's memory by itself; prefer pipeline to tensor parallelism over these pairs",
        )
    if redirected:
        bridges = sorted({bridge for path in redirected for bridge in path})
        pairs = [pair for path in redirected.values() for pair in path]
        within = {topology.name(pair) for group in look.groups for pair in itertools.combinations(sorted(group), 2)}
        used = [pair for pair in pairs if pair in within]
        yield look.finding(
            "acs-on-path",
            "error" if used else "info" if look.groups else "warning",
            f"access control (ACS) on the PCI bridges {_few(bridges)} sends peer traffic of GPUs {_few(used or pairs)} up to "
            "the root complex: NCCL is slow or hangs",
            "On bare metal switch ACS off in the firmware, or at each boot with setpci -s BRIDGE ECAP_ACS+0x6.w=0000; in a "
            "virtual machine leave it and set NCCL_P2P_DISABLE=1",
        )


def _few(items: Sequence[str], most: int = 6) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def _fabric(look: _Look) -> Iterator[Finding]:
    manager, switches = look.facts["fabric_manager"], look.facts["nvswitch"]["devices"]
    not_ready = [
        gpu
        for gpu in look.gpus
        if gpu["fabric"]["state"] not in (None, "Completed", "Not Supported")
        or (gpu["fabric"]["state"] == "Completed" and gpu["fabric"]["status"] not in (None, "Success"))
    ]
    if not_ready:
        first = not_ready[0]["fabric"]
        yield look.finding(
            "fabric-not-ready",
            "error",
            f"NVLink fabric of {_list(gpu['index'] for gpu in not_ready)}: state {first['state']}, status "
            f"{first['status'] or 'not told'}; it must be Completed and Success",
            "Start nvidia-fabricmanager and look at its log; CUDA fails with error 802 until then",
        )
    for words, severity in (("Unhealthy", "error"), ("Limited Capacity", "warning")):
        ill = [gpu["index"] for gpu in look.gpus if gpu["fabric"].get("health") == words]
        if ill:
            yield look.finding(
                "fabric-unhealthy",
                severity,
                f"the driver calls the NVLink fabric of {_list(ill)} {words}",
                "nvidia-smi -q shows under Fabric, Health which part; reset the GPUs or reboot, then have it repaired",
            )
    if not switches:
        return
    if manager["state"] not in ("active", None):
        yield look.finding(
            "fabric-manager-down",
            "error",
            f"{switches} NVSwitches are there and nvidia-fabricmanager is {manager['state']}",
            "Install the Fabric Manager of the driver's very version and start it: systemctl enable --now "
            "nvidia-fabricmanager",
        )
    loaded = look.facts["driver"]["loaded"]
    if manager["installed"] and loaded and manager["installed"] != loaded:
        yield look.finding(
            "fabric-manager-version",
            "error",
            f"the Fabric Manager is {manager['installed']}, the driver {loaded}; they must be equal",
            f"Install nvidia-fabricmanager {loaded} and pin both packages to one version",
        )


def _mig(look: _Look) -> Iterator[Finding]:
    on = [gpu["index"] for gpu in look.gpus if gpu["mig"]["current"] == "Enabled"]
    changing = [
        gpu
        for gpu in look.gpus
        if gpu["mig"]["pending"] and gpu["mig"]["current"] and gpu["mig"]["pending"] != gpu["mig"]["current"]
    ]
    if changing:
        yield look.finding(
            "mig-pending",
            "warning",
            f"{_list(gpu['index'] for gpu in changing)}: MIG is {changing[0]['mig']['current']} and will be "
            f"{changing[0]['mig']['pending']} after a reset",
            "Reset these GPUs while nothing uses them, or take the change back",
        )
    wide = [group for group in look.groups if len(group) > 1 and set(group) & set(on)]
    if wide:
        yield look.finding(
            "mig-tensor-parallel",
            "error",
            f"MIG is on for {_list(on)}, and a service spreads over GPUs {', '.join(map(str, wide[0]))}: instances of MIG "
            "have no peer access and NCCL cannot join them",
            f"Switch MIG off (nvidia-smi -i {on[0]} -mig 0) or serve one GPU a replica (tensor-parallel-size: 1)",
        )


def _pcie(look: _Look) -> Iterator[Finding]:
    # The generation drops while a GPU idles and is no finding; the width stays on most boards.
    narrow = [
        gpu
        for gpu in look.gpus
        if gpu["pcie"]["width_current"]
        and gpu["pcie"]["width_max"]
        and gpu["pcie"]["width_current"] < gpu["pcie"]["width_max"]
        and not any(gpu["name"].startswith(name) for name in look.known["idle_width"])
    ]
    for gpu in narrow:
        yield look.finding(
            "pcie-width",
            "warning",
            f"GPU{gpu['index']} ({gpu['pci_address']}) has {gpu['pcie']['width_current']} PCIe lanes of "
            f"{gpu['pcie']['width_max']}",
            "Reseat the card, look at riser and slot (some slots share lanes); loading weights and traffic over PCIe are "
            "slower by that share",
        )


def _errors(look: _Look) -> Iterator[Finding]:
    for gpu in look.gpus:
        name, ecc, rows = f"GPU{gpu['index']}", gpu["ecc"], gpu["remapped_rows"]
        if ecc["uncorrected_volatile"]:
            yield look.finding(
                "ecc-uncorrected",
                "error",
                f"{name} counts {ecc['uncorrected_volatile']} uncorrected memory errors since the driver was loaded",
                f"Stop what runs there and reset it: nvidia-smi -i {gpu['index']} --gpu-reset; if they come back, have it "
                "replaced",
            )
        elif ecc["uncorrected_aggregate"]:
            yield look.finding(
                "ecc-history",
                "warning",
                f"{name} has had {ecc['uncorrected_aggregate']} uncorrected memory errors in its life, none since the "
                "driver was loaded",
                "Watch it; a growing number is a reason to have it replaced",
            )
        if rows["failure"]:
            yield look.finding(
                "row-remap-failed",
                "error",
                f"remapping a memory row of {name} failed",
                "Have the card replaced; until then take it out of `gpus`",
            )
        if rows["pending"] or gpu["retired_pages_pending"]:
            yield look.finding(
                "row-remap-pending",
                "warning",
                f"{name} waits for a reset to put a spare row in the place of a bad one",
                f"Reset it while nothing uses it: nvidia-smi -i {gpu['index']} --gpu-reset",
            )
    by_code: Dict[Tuple[int, str], List[Dict[str, Any]]] = collections.defaultdict(list)
    for event in look.facts["xid"]:
        by_code[event["code"], event["address"]].append(event)
    for (code, address), events in sorted(by_code.items()):
        entry = look.known["xid"].get(code, {"what": "not in the list", "severity": "warning"})
        if entry["severity"] == "info":
            continue
        times = f" ({len(events)} times)" if len(events) > 1 else ""
        yield look.finding(
            f"xid-{code}",
            entry["severity"],
            f"Xid {code} since boot on {address}{times}: {entry['what']}; {events[-1]['line'].strip()}",
            "Reboot and look whether it comes back (the message stays in the log of this boot); NVIDIA's Xid catalog says what "
            f"to do for this code. What is known and settled is accepted by its id: gpu_topology_accept: [xid-{code}]",
        )


def _others(look: _Look) -> Iterator[Finding]:
    for gpu in look.gpus:
        foreign = [process for process in gpu["processes"] if not str(process["unit"] or "").startswith("vllm@")]
        if foreign:
            told = ", ".join(
                f"{process['name'] or 'a process'} (pid {process['pid']}"
                + (f", {process['memory_mib']} MiB" if process["memory_mib"] is not None else "")
                + (f", {process['unit']}" if process["unit"] else "")
                + ")"
                for process in foreign[:4]
            )
            wanted = any(gpu["index"] in group for group in look.groups) or not look.groups
            held = [process["memory_mib"] for process in foreign]
            small = None not in held and sum(held) < SMALL_MIB
            yield look.finding(
                "foreign-process",
                "error" if wanted and not small else "warning",
                f"GPU{gpu['index']} is used by {told}",
                "Stop it through whoever started it, or leave this GPU out of `gpus`: vLLM refuses to start when its share "
                "of the memory is not free",
            )
    off = [gpu["index"] for gpu in look.gpus if gpu["persistence"] is False]
    if off:
        yield look.finding(
            "persistence-off",
            "warning",
            f"persistence mode is off on {_list(off)}: the driver unloads when the last process ends, and each start waits",
            "Enable nvidia-persistenced (systemctl enable --now nvidia-persistenced)",
        )


def _groups(look: _Look) -> Iterator[Finding]:
    if look.table is None:
        return
    for group in look.groups:
        within = [gpu for gpu in group if gpu < look.table.gpus]
        if len(within) < len(group):
            yield look.finding(
                "group-beyond",
                "error",
                f"a service wants GPUs {', '.join(map(str, group))}, the host has {look.table.gpus}",
                "Correct `gpus` of the service or fleet_gpus of the host",
            )
        if len(within) < 2 or len(within) < len(group):
            continue
        far = [pair for pair in itertools.combinations(sorted(within), 2) if look.table.link(*pair) == "SYS"]
        if not far:
            continue
        better = [
            option
            for option in partition(look.table, len(within))
            if all(look.table.link(*pair) != "SYS" for pair in itertools.combinations(option, 2))
        ]
        yield look.finding(
            "tensor-parallel-across-sockets",
            "warning",
            f"the tensor-parallel group {', '.join(map(str, group))} has pairs joined only across NUMA nodes (SYS): "
            f"{_few([topology.name(pair) for pair in far])}",
            f"Take GPUs {' or '.join(', '.join(map(str, option)) for option in better[:2])}, which are nearer"
            if better
            else "Use a smaller tensor-parallel-size and pipeline parallelism across the NUMA nodes",
        )


def _changed(look: _Look, learned: Optional[Dict[str, Any]]) -> Iterator[Finding]:
    if not learned:
        return
    if not look.gpus:
        if learned["gpus"] and look.facts["vendor"] == "none" and not look.expected.get("gpus"):
            yield look.finding(
                "gpu-none",
                "error",
                f"no GPU is on the PCI bus, {len(learned['gpus'])} were learned",
                "Look whether the cards have power and sit in their slots, or learn the host anew",
            )
        return
    now = remember(look.facts)
    fix = "If it was repaired or changed on purpose, learn it anew: gpu_topology_learn: true"
    before = {gpu["pci_address"]: gpu for gpu in learned["gpus"]}
    after = {gpu["pci_address"]: gpu for gpu in now["gpus"]}
    changes = [f"{address} {before[address]['name']} is gone" for address in sorted(set(before) - set(after))]
    changes += [f"{address} {after[address]['name']} is new" for address in sorted(set(after) - set(before))]
    for address in sorted(set(before) & set(after)):
        for key in IDENTITY:
            if before[address].get(key) != after[address][key] and None not in (
                before[address].get(key),
                after[address][key],
            ):
                changes.append(f"{address} {key}: {before[address].get(key)} became {after[address][key]}")
    was, is_now = learned.get("pairs") or {}, now["pairs"] or {}
    if was and is_now and not set(before) ^ set(after):
        for pair in sorted(set(was) | set(is_now), key=lambda text: [int(part) for part in text.split("-")]):
            if was.get(pair) != is_now.get(pair):
                changes.append(f"link {pair}: {was.get(pair)} became {is_now.get(pair)}")
    if learned.get("nvswitches", 0) != now["nvswitches"]:
        changes.append(f"NVSwitches: {learned.get('nvswitches', 0)} became {now['nvswitches']}")
    if changes:
        yield look.finding("topology-changed", "warning", f"not as it was learned: {_few(changes)}", fix)


def _group(look: _Look, group: Sequence[int]) -> Dict[str, Any]:
    assert look.table is not None
    links = sorted(look.table.among(group), key=topology.quality)
    states = {look.peer_state(pair) for pair in itertools.combinations(sorted(group), 2)}
    mig = [gpu for gpu in group if gpu < len(look.gpus) and look.gpus[gpu]["mig"]["current"] == "Enabled"]
    if mig:
        verdict, why = "poor", f"MIG is on for {_list(mig)}: NCCL cannot join instances of MIG"
    elif topology.is_nvlink(links[-1]) and states == {"OK"}:
        verdict, why = "good", "NVLink between every pair"
    elif states != {"OK"}:
        refused = ", ".join(sorted(states - {"OK"}))
        verdict, why = "poor", f"no peer access between some pairs ({refused}): traffic goes through the host's memory"
    elif links[-1] in ("PIX", "PXB"):
        verdict, why = "fair", f"every pair within PCIe switches ({links[-1]} at worst)"
        if any(look.redirected(pair) for pair in itertools.combinations(sorted(group), 2)):
            verdict, why = "poor", "access control (ACS) sends traffic within the PCIe switches up to the root complex"
    else:
        verdict, why = "poor", f"its worst link is {links[-1]}; pipeline parallelism asks less of it"
    if len(group) > 2 and not topology.is_nvlink(links[-1]):
        why += "; vLLM has no custom all-reduce for more than two GPUs without NVLink throughout"
    return {"gpus": list(group), "worst": links[-1], "best": links[0], "verdict": verdict, "why": why}


def _nccl(look: _Look, group: Sequence[int]) -> Dict[str, Any]:
    """NCCL's settings for a set of GPUs: peer access off where it is impossible or goes wrong, else limited in distance.

    NCCL_P2P_LEVEL is the farthest distance at which peer access is still used; its words are LOC NVL PIX PXB PHB SYS, an
    unknown one is ignored. Without it NCCL goes to SYS, on Intel and ARM CPUs to PXB. What nvidia-smi calls NODE is PHB
    for NCCL, which counts CPUs by NUMA node (src/graph/paths.cc, src/graph/topo.cc).
    """
    assert look.table is not None
    pairs = list(itertools.combinations(sorted(group), 2))
    links = {pair: look.table.link(*pair) for pair in pairs}
    refused = [pair for pair in pairs if look.peer_state(pair) != "OK"]
    redirected = [pair for pair in pairs if pair not in refused and look.redirected(pair)]
    across = [pair for pair in pairs if pair not in refused and links[pair] == "SYS"]
    good = [pair for pair in pairs if pair not in refused + redirected + across]
    if redirected:  # the limit has to lie before the nearest of them
        nearest = min(topology.quality(links[pair]) for pair in redirected)
        good = [pair for pair in good if topology.quality(links[pair]) < nearest]
    reasons = [
        f"{_few([topology.name(pair) for pair in some])} {what}"
        for some, what in (
            (refused, "refused by the driver"),
            (redirected, "sent up to the root complex by access control (ACS)"),
            (across, "across NUMA nodes (SYS)"),
        )
        if some
    ]
    answer: Dict[str, Any] = {"gpus": list(group), "variables": {}, "why": "NCCL's own choice is right"}
    if not reasons:
        return answer
    why = "pairs " + "; ".join(reasons)
    if good:
        worst = max((links[pair] for pair in good), key=topology.quality)
        level = "NVL" if topology.is_nvlink(worst) else "PHB" if worst == "NODE" else worst
        answer.update(variables={"NCCL_P2P_LEVEL": level}, why=f"peer access no farther than {level}: {why}")
    elif across and not redirected:
        answer.update(variables={"NCCL_P2P_LEVEL": "PHB"}, why=f"no peer access between NUMA nodes: {why}")
    else:
        answer.update(variables={"NCCL_P2P_DISABLE": "1"}, why=f"the host's memory is the way that works: {why}")
    return answer


def as_dict(finding: Finding) -> Dict[str, str]:
    """A finding for machines: id, severity, where, evidence, remedy."""
    return {
        "id": finding.id,
        "severity": finding.severity,
        "where": finding.where,
        "evidence": finding.message,
        "remedy": finding.fix,
    }


def line(finding: Finding) -> str:
    """A finding for people, on one line."""
    return f"{finding.severity} {finding.id}: {finding}"


def summary(facts: Dict[str, Any]) -> str:
    """What a host has, in one line: `8 x NVIDIA H100 80GB HBM3 (81559 MiB), driver 580.159.04, every pair NV18`."""
    replay = f" (replay of {facts['root']})" if facts.get("root", "/") != "/" else ""
    if facts["vendor"] == "none":
        return f"no GPU{replay}"
    counts = collections.Counter((gpu["name"], gpu["memory_mib"]) for gpu in facts["gpus"])
    parts = [
        f"{count} x {name}" + (f" ({memory} MiB)" if memory else "")
        for (name, memory), count in sorted(counts.items(), key=str)
    ] or [f"{len(facts['pci_gpus'])} {facts['vendor'].upper()} cards on the bus, none answers"]
    if facts["driver"]["loaded"]:
        parts.append(f"driver {facts['driver']['loaded']}")
    table = _matrix(facts)
    if table is not None and table.gpus > 1:
        told = table.as_dict()
        parts.append(
            f"every pair {told['best']}"
            if told["best"] == told["worst"]
            else f"links {told['best']} to {told['worst']}"
        )
    return ", ".join(parts) + replay


def advice(recommendation: Dict[str, Any]) -> List[str]:
    """A recommendation for people: a line for each size of tensor-parallel group, and one for each set of NCCL settings."""
    lines = []
    for size, groups in sorted(recommendation["sizes"].items(), key=lambda item: int(item[0])):
        told = "; ".join(f"{', '.join(map(str, group['gpus']))} {group['verdict']}" for group in groups)
        whys = list(dict.fromkeys(group["why"] for group in groups))
        lines.append(f"tensor parallel {size}: GPUs {told} ({' / '.join(whys)})")
    for entry in recommendation["nccl"]:
        variables = (
            " ".join(f"{name}={value}" for name, value in sorted(entry["variables"].items())) or "nothing to set"
        )
        lines.append(f"NCCL for GPUs {', '.join(map(str, entry['gpus']))}: {variables} ({entry['why']})")
    return lines
