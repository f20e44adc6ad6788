# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a plan has beside the driver: DCGM with its exporter, and the container toolkit. See driver_plan.py.

They change without the driver: no service of it stops for them, and nothing reboots.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_packages as names
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.driver_case import Case


def plan(case: Case, branch: str) -> Tuple[Dict[str, Optional[str]], Dict[str, str]]:
    """Packages with exact versions (None where the lists were not read yet), and why each is there.

    branch  of the driver that is planned, or that is there
    """
    found: Dict[str, Optional[str]] = {}
    because: Dict[str, str] = {}
    _toolkit(case, found, because)
    _dcgm(case, branch, found, because)
    return found, because


def pins(case: Case, found: Mapping[str, Optional[str]]) -> List[Dict[str, Any]]:
    """Records for apt_preferences(5), so that the parts of DCGM which it asks for come in its version, too."""
    version = found.get(case.known["dcgm"]["packages"][0])
    if not version:
        return []
    what = {"why": "DCGM, of one version", "packages": list(case.known["dcgm"]["globs"])}
    return [{**what, "pin": f"version {version}", "priority": 1001}]


def globs(case: Case) -> List[str]:
    """What unattended-upgrades has to leave alone beside the driver."""
    entry = case.known["dcgm"]
    return [*entry["globs"], entry["exporter"]] if case.want["dcgm"] else []


def cuda_majors(case: Case, branch: str) -> List[str]:
    """For which CUDA DCGM is to be built here: the major version of the driver's; none when it is not known.

    What a loaded driver of that branch says of itself counts before what is known of branches.
    """
    entry, told = case.known["dcgm"], case.want["dcgm_cuda"]
    if told:
        return [str(told)]
    said = str(case.driver.get("cuda") or "").split(".")[0]
    mine = names.numbers(branch)
    major = said if said and names.branch(case.driver.get("loaded")) == branch else None
    for span in entry["cuda"]:
        if major is None and names.numbers(span["from"]) <= mine < names.numbers(span["before"]):
            major = str(span["major"])
    if major is None:
        return []
    generations = {names.generation(id_, case.known) for id_ in case.ids}
    return list(entry["older_gpus"].get(major, [major])) if "before-turing" in generations else [major]


def _toolkit(case: Case, found: Dict[str, Optional[str]], because: Dict[str, str]) -> None:
    """All four packages of the container toolkit at one version, where they are wanted."""
    version = case.want["toolkit"]
    if not version:
        return
    lacking = _take(case, list(case.known["toolkit"]), str(version), found)
    because.update(dict.fromkeys(case.known["toolkit"], f"container toolkit {version}"))
    if lacking:
        case.refuse(
            "toolkit-version",
            "; ".join(lacking),
            "Choose a version that all four packages of the container toolkit have",
        )


def _dcgm(case: Case, branch: str, found: Dict[str, Optional[str]], because: Dict[str, str]) -> None:
    """Host engine and CUDA builds at one version, the exporter at its own, which goes with it."""
    entry, version = case.known["dcgm"], case.want["dcgm"] and str(case.want["dcgm"])
    if not version:
        if case.want["dcgm_exporter"]:
            case.refuse(
                "dcgm-version",
                "gpu_driver_dcgm_exporter is set and gpu_driver_dcgm is not: the exporter asks the host engine",
                f"Set gpu_driver_dcgm: {_partner(case, str(case.want['dcgm_exporter'])) or 'the version that goes with it'}",
            )
        return
    majors = cuda_majors(case, branch)
    if not majors:
        case.refuse(
            "dcgm-cuda",
            f"which CUDA branch {branch} of the driver brings is not known, and DCGM has a build for each",
            "Set gpu_driver_dcgm_cuda to the major version that nvidia-smi shows as CUDA Version",
        )
        return
    for major in majors:
        first = entry["first"].get(major)
        if first is None or names.numbers(names.upstream(version)) < names.numbers(first):
            have = ", ".join(f"CUDA {key} since {value}" for key, value in sorted(entry["first"].items()))
            case.refuse(
                "dcgm-cuda",
                f"no DCGM {version} for CUDA {major} is known ({have})",
                f"Set gpu_driver_dcgm to {first} or newer" if first else "Set gpu_driver_dcgm_cuda to one of these",
            )
            return
    _old(case)
    wanted = _names(entry["packages"], majors)
    recommended = _names(entry["recommended"], majors)
    absent = [
        name for name in recommended if case.host["available"] is not None and not case.host["available"].get(name)
    ]
    if absent:
        case.refuse(
            "dcgm-profiling",
            f"{', '.join(absent)} is offered in no version: DCGM comes without its profiling metrics (DCGM_FI_PROF_*)",
            "Use a repository that has them, as NVIDIA's has",
            "warning",
        )
    wanted += [name for name in recommended if name not in absent]
    why = f"DCGM {version} for CUDA {' and '.join(majors)}"
    because.update(dict.fromkeys(wanted, why))
    # What is there of it moves along, or apt would take it away: each part asks for exactly its own version.
    along = [
        name for name in sorted(case.host["packages"]) if names.matches(name, entry["globs"]) and name not in wanted
    ]
    because.update(dict.fromkeys(along, f"is there, and belongs to DCGM {version}"))
    lacking = _take(case, [*wanted, *along], version, found)
    if lacking:
        source = "" if case.origin == "nvidia" else "NVIDIA's repository has DCGM, the distribution has not. "
        case.refuse(
            "dcgm-version", "; ".join(lacking), f"{source}Choose a version that all of these have: gpu_driver_dcgm"
        )
    _exporter(case, version, found, because)


def _names(patterns: Sequence[str], majors: Sequence[str]) -> List[str]:
    return list(dict.fromkeys(pattern.format(cuda=major) for pattern in patterns for major in majors))


def _exporter(case: Case, dcgm: str, found: Dict[str, Optional[str]], because: Dict[str, str]) -> None:
    version, name = case.want["dcgm_exporter"], case.known["dcgm"]["exporter"]
    if not version:
        return
    mine = names.upstream(dcgm)
    partner = _partner(case, str(version))
    if partner is None:
        case.refuse(
            "dcgm-pair",
            f"which DCGM exporter {version} goes with is not known, gpu_driver_dcgm is {dcgm}",
            f"Ask `dcgm-exporter --version`, or take one of a known pair: {_pairs(case)}",
            "warning",
        )
    elif partner != mine:
        goes = [key for key, value in case.known["dcgm"]["pairs"].items() if value == mine]
        fix = f"Set gpu_driver_dcgm: {partner}" + (f", or gpu_driver_dcgm_exporter: {goes[-1]}" if goes else "")
        case.refuse("dcgm-pair", f"exporter {version} goes with DCGM {partner}, gpu_driver_dcgm is {dcgm}", fix)
    because[name] = f"exporter of DCGM {dcgm}"
    lacking = _take(case, [name], str(version), found)
    if lacking:
        case.refuse("dcgm-version", "; ".join(lacking), "Choose a version that is offered: gpu_driver_dcgm_exporter")


def _partner(case: Case, exporter: str) -> Optional[str]:
    found = case.known["dcgm"]["pairs"].get(names.upstream(exporter))
    return str(found) if found else None


def _pairs(case: Case) -> str:
    newest = sorted(case.known["dcgm"]["pairs"].items(), key=lambda pair: names.numbers(pair[0]), reverse=True)[:3]
    return ", ".join(f"{exporter} with DCGM {dcgm}" for exporter, dcgm in newest)


def _old(case: Case) -> None:
    there = [name for name in case.known["dcgm"]["old"] if name in case.host["packages"]]
    if there:
        told = ", ".join(f"{name} {case.host['packages'][name]['version']}" for name in there)
        case.refuse(
            "dcgm-old",
            f"{told} is installed, which DCGM 4 cannot stand beside",
            f"Take it away yourself: systemctl stop nvidia-dcgm; apt-get purge {' '.join(there)}. The role removes none of it",
        )


def _take(case: Case, wanted: List[str], version: str, found: Dict[str, Optional[str]]) -> List[str]:
    """Put the exact version of each package into `found`; returns what is not offered, as sentences."""
    if case.host["available"] is None:
        found.update(dict.fromkeys(wanted))
        return []
    lacking = []
    for name in wanted:
        offered = [item["version"] for item in case.host["available"].get(name) or []]
        fits = [item for item in offered if version in (item, names.upstream(item))]
        if fits:
            found[name] = fits[0]
        else:
            lacking.append(f"{name} {version} is not offered ({', '.join(offered[:6]) or 'none'} is)")
    return lacking
