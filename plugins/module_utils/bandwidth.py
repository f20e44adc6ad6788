# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Judge what roles/gpu_topology/files/bandwidth.py measured against the floor of each link (data/links.yml).

All rates are GB/s, 10^9 bytes a second; an all-reduce counts by its bus bandwidth. Where the data has no floor, or the
facts do not tell what it needs, the value is reported and not judged (`ok` is None).

Pure: standard library, Python 3.9 and newer, no Ansible import. Data comes as arguments.
"""

from __future__ import annotations

import re
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils.findings import Finding

Floor = Tuple[Optional[float], str]  # the floor, and how it was derived or why there is none


def judge(
    measured: Mapping[str, Any], links: Mapping[str, str], facts: Mapping[str, Any], floors: Mapping[str, Any]
) -> List[Dict[str, Any]]:
    """One entry a copy and an all-reduce.

    measured  the document of bandwidth.py
    links     "0-1" to "NV18", as Topology.as_dict()["pairs"] has them
    facts     what gpu_facts returned; `gpus` is read (compute_capability, pcie)
    floors    data/links.yml

    Gives [{pair, what, link, measured_gbps, floor_gbps, ok, why}]: `pair` is "0-1", or "0-1-2" for an all-reduce over
    all GPUs; `what` is `allreduce`, or `copy 1-0` with the direction; `ok` is True, False, or None where nothing is
    expected. Wrong data, a hang and an error are never ok, whatever the floor. Empty when nothing was measured.
    """
    gpus = {gpu["index"]: gpu for gpu in facts.get("gpus") or ()}
    environment = measured.get("environment") or {}
    judged = []
    for pair, told in (measured.get("pairs") or {}).items():
        link = _link(links, pair)
        around = {"environment": environment, "peer_access": told["peer_access"]}
        for direction, result in told["copy"].items():
            floor = copy_floor(link, pair, gpus, floors, told["peer_access"])
            judged.append(_entry((pair, f"copy {direction}"), link, result, floor, around))
        floor = allreduce_floor(link, pair, gpus, floors, told["peer_access"])
        judged.append(_entry((pair, "allreduce"), link, told["allreduce"], floor, around))
    everything = measured.get("all")
    if everything:
        name = "-".join(map(str, everything["gpus"]))
        link, floor = _floor_of_all(everything["gpus"], links, gpus, floors)
        judged.append(_entry((name, "allreduce"), link, everything["allreduce"], floor, {"environment": environment}))
    return judged


def findings(
    measured: Mapping[str, Any],
    links: Mapping[str, str],
    facts: Mapping[str, Any],
    floors: Mapping[str, Any],
    where: str,
) -> List[Finding]:
    """What the proof found wrong: a pair a finding, its worst result first.

    Wrong data, a hang and a failure are errors, a rate below the floor is a warning.
    """
    if "refused" in measured:
        why = str(measured["refused"]).rstrip(".")
        fix = "Mend that, or leave the proof out: gpu_topology_bandwidth: false"
        return [Finding("bandwidth-refused", where, f"the bandwidth proof did not start: {why}", fix)]
    found = []
    for entry in judge(measured, links, facts, floors):
        if entry["ok"] is not False:
            continue
        state = entry["why"].split(":", 1)[0]
        severity = "error" if state in _REMEDIES else "warning"
        id_ = f"bandwidth-{state}" if severity == "error" else "bandwidth-low"
        what = "all-reduce" if entry["what"] == "allreduce" else f"peer {entry['what']}"
        fix = _REMEDIES.get(
            state, "Compare with nvidia-smi topo -m and nvlink -s; access control (ACS) and a lost link look like this"
        )
        found.append(Finding(id_, where, f"GPUs {entry['pair']}, {what}: {entry['why']}", fix, severity))
    return found


def lines(judged: Sequence[Mapping[str, Any]]) -> List[str]:
    """Every rate in words: what was measured over which link, and the floor that it had to reach."""
    told = []
    for entry in judged:
        rate = entry["measured_gbps"]
        what = "all-reduce" if entry["what"] == "allreduce" else entry["what"]
        floor = f"at least {entry['floor_gbps']:.0f}" if entry["floor_gbps"] else "nothing is expected"
        link = f"{entry['link']}, " if entry["link"] else ""
        told.append(
            f"GPUs {entry['pair']}, {what}: {'no rate' if rate is None else f'{rate:.1f} GB/s'} ({link}{floor})"
        )
    return told


_REMEDIES = {
    "corrupt": "Do not serve on these GPUs: data arrives wrong. Look for Xid 74 and ECC errors, and have the link repaired",
    "hung": "Switch access control (ACS) off on the PCI bridges or set NCCL_P2P_DISABLE=1, then measure again",
    "failed": "The message names the cause; NCCL_DEBUG=INFO in the environment of the proof tells more",
}


def copy_floor(
    link: Optional[str], pair: str, gpus: Mapping[int, Any], floors: Mapping[str, Any], peer_access: Optional[bool]
) -> Floor:
    """What a peer copy in one direction must reach."""
    if _kind(link) != "NV" and peer_access is False:
        return None, "without peer access it goes through the host's memory, for which no floor is known"
    return _floor("copy", link, pair, gpus, floors)


def allreduce_floor(
    link: Optional[str], pair: str, gpus: Mapping[int, Any], floors: Mapping[str, Any], peer_access: Optional[bool]
) -> Floor:
    """What an NCCL all-reduce must reach. Over PCIe without peer access that is what shared memory gives."""
    if _kind(link) in ("PIX", "PXB") and peer_access is False:
        floor, how = _floor("allreduce", "PHB", pair, gpus, floors)
        return floor, f"{how}, as through shared memory, since there is no peer access"
    return _floor("allreduce", link, pair, gpus, floors)


def _kind(link: Optional[str]) -> Optional[str]:
    return "NV" if re.fullmatch(r"NV\d+", link or "") else link


def _link(links: Mapping[str, str], pair: str) -> Optional[str]:
    first, second = pair.split("-")
    return links.get(pair) or links.get(f"{second}-{first}")


def _floor(what: str, link: Optional[str], pair: str, gpus: Mapping[int, Any], floors: Mapping[str, Any]) -> Floor:
    kind = _kind(link)
    if link is None:
        return None, f"the topology does not tell how {pair} are linked"
    fraction = floors[what].get(kind)
    if fraction is None:
        return None, f"no floor is known for {link}"
    ends = [gpus.get(int(index)) for index in pair.split("-")]
    rates = [_nvlink(gpu, link, floors) if kind == "NV" else _pcie(gpu, floors) for gpu in ends]
    slowest = min(rates, key=lambda rate: (rate[0] is not None, rate[0]))
    if slowest[0] is None:
        return None, slowest[1]
    return round(slowest[0] * fraction, 1), f"{slowest[1]} x {fraction:g}"


def _nvlink(gpu: Optional[Mapping[str, Any]], link: str, floors: Mapping[str, Any]) -> Floor:
    """Rate of all bonded links of a pair."""
    capability = _version((gpu or {}).get("compute_capability"))
    below = [key for key in floors["nvlink"] if capability and _version(key) <= capability]
    if not below:
        return None, "the compute capability, and with it the rate of an NVLink, is not known"
    rate = floors["nvlink"][max(below, key=_version)]
    count = int(link[2:])
    return rate * count, f"{count} links x {rate:g} GB/s"


def _pcie(gpu: Optional[Mapping[str, Any]], floors: Mapping[str, Any]) -> Floor:
    """Rate of a GPU's slot at its best: the generation falls when the GPU idles, so the current one says nothing."""
    pcie = (gpu or {}).get("pcie") or {}
    generations = [pcie[key] for key in ("gen_gpumax", "gen_hostmax") if pcie.get(key)]
    width = pcie.get("width_max")
    if not generations or not width:
        return None, "the PCIe generation or width is not known"
    lane = floors["pcie_lane"].get(min(generations))
    if lane is None:
        return None, f"no rate is known for PCIe generation {min(generations)}"
    return lane * width, f"PCIe gen {min(generations)} x{width}, {lane * width:.1f} GB/s"


def _floor_of_all(
    indexes: List[int], links: Mapping[str, str], gpus: Mapping[int, Any], floors: Mapping[str, Any]
) -> Tuple[Optional[str], Floor]:
    pairs = [f"{a}-{b}" for number, a in enumerate(indexes) for b in indexes[number + 1 :]]
    found = {pair: _link(links, pair) for pair in pairs}
    if any(_kind(link) != "NV" for link in found.values()):
        return None, (None, "no floor is known for all GPUs where not every pair has NVLink")
    pair = min(found, key=lambda name: int((found[name] or "NV0")[2:]))
    return found[pair], _floor("allreduce", found[pair], pair, gpus, floors)


def _version(text: Any) -> Tuple[int, ...]:
    return tuple(int(part) for part in str(text).split(".")) if re.fullmatch(r"\d+(\.\d+)*", str(text)) else ()


def _entry(
    name: Tuple[str, str], link: Optional[str], result: Mapping[str, Any], floor: Floor, around: Mapping[str, Any]
) -> Dict[str, Any]:
    """name: pair and what; around: `environment` and `peer_access`."""
    least, how = floor
    rate = result["gbps"]
    if result["state"] != "measured":
        ok: Optional[bool] = None if result["state"] == "skipped" else False
        why = f"{result['state']}: {result['why']}"
    elif least is None:
        ok, why = None, how
    else:
        ok = rate >= least
        over = f"at least {least:g} GB/s is expected over {link} ({how})"
        why = over if ok else f"{rate:g} GB/s, where {over}"
    if ok is False:
        why += _hints(name[1], result, around)
    return {
        "pair": name[0],
        "what": name[1],
        "link": link,
        "measured_gbps": rate,
        "floor_gbps": least,
        "ok": ok,
        "why": why,
    }


def _hints(what: str, result: Mapping[str, Any], around: Mapping[str, Any]) -> str:
    """What is known besides: the way NCCL took, missing peer access, and variables that change the way."""
    hints = []
    if result.get("transport"):
        hints.append(f"NCCL used {', '.join(result['transport'])}")
    if around.get("peer_access") is False:
        hints.append("the driver refuses peer access between the two")
    ways = [
        f"{k}={v}" for k, v in sorted(around["environment"].items()) if re.fullmatch(r"NCCL_(P2P|SHM|NET|IB)_\w+", k)
    ]
    if what == "allreduce" and ways:
        hints.append(f"the environment has {', '.join(ways)}")
    return "".join(f"; {hint}" for hint in hints)
