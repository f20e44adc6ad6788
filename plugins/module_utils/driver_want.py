# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What is wrong with the variables of a host's driver, as far as it is known without the host.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_checks
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_packages as names
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.driver_case import SOURCES, WANT, Case

Fault = Tuple[str, str, str]  # id, message, fix
# As NVIDIA numbers drivers: 580.126.20, 550.54; with what a package adds: 580.126.20-1, 580.95.05-0ubuntu1.
VERSION = re.compile(r"(\d+:)?\d{3,}\.\d+(\.\d+)?(-[A-Za-z0-9.+~]+)?")
# As apt takes it, sources.list(5) and the page of each method; with another method before it, as tor+https
ADDRESS = re.compile(r"([a-z]+\+)?(https?://[^/\s]\S*|(file|copy|mirror):/\S+)")
# A card that runs every release, so that only the driver is judged.
ANY_GPU = {"index": 0, "name": "any", "compute_capability": "9.0", "memory_mib": None}


def judge(
    want: Mapping[str, Any],
    *,
    system: str,
    machine: str,
    release: Optional[Mapping[str, str]],
    known: Mapping[str, Any],
    versions: Mapping[str, Any],
) -> List[Fault]:
    """Every mistake, as (id, message, fix).

    want     the role's variables without gpu_driver_
    release  version and accelerator of vLLM that is to run there
    known    data/driver.yml
    """
    source = want.get("source")
    if source not in SOURCES:
        return []  # told where values are judged
    found = _source(want)
    if str(want.get("in_service") or "no").lower() not in ("no", "false", "off", "n", "f", "0"):
        found.append(
            (
                "driver-serving",
                f"gpu_driver_in_service is {want['in_service']!r}: site.yml, too, would change the driver under a service",
                "Take it away: playbooks/driver.yml sets it where it takes the host's replicas out of service",
            )
        )
    version = want.get("version")
    # A number without quotes has lost its last zeros: 550.90 is 550.9.
    if version is not None and (isinstance(version, float) or not VERSION.fullmatch(str(version))):
        found.append(
            (
                "driver-version",
                f"gpu_driver_version is {version!r}, which is no version of a driver",
                "Write it whole, in quotes, as '580.126.20'; `apt-cache policy` or nvidia-smi shows it",
            )
        )
        return found
    found += _mig(want.get("mig_layout")) + _imex(want.get("imex_nodes"))
    if source == "preinstalled":
        return found
    systems = sorted(known["sources"]["nvidia"]["releases"])
    if system not in systems:
        return [
            *found,
            (
                "driver-system",
                f"gpu_driver_source is {source}, and drivers are installed on {', '.join(systems)}, not on {system}",
                "Install the driver yourself and set gpu_driver_source: preinstalled, which verifies it",
            ),
        ]
    return found + _plan(want, system=system, machine=machine, release=release, known=known, versions=versions)


def _plan(
    want: Mapping[str, Any],
    *,
    system: str,
    machine: str,
    release: Optional[Mapping[str, str]],
    known: Mapping[str, Any],
    versions: Mapping[str, Any],
) -> List[Fault]:
    """What the plan of every such host would be refused for."""
    asked: Dict[str, Any] = {key: value for key, value in want.items() if key in WANT}
    asked["releases"] = [release] if release and str(release.get("accelerator")).startswith("cu") else []
    card = {"address": "0000:00:00.0", "vendor_id": "10de", "device_id": "2330", "driver": None}
    facts = {"vendor": "nvidia", "machine": machine, "pci_gpus": [card], "gpus": [ANY_GPU], "driver": {}}
    case = Case(facts, asked, {"system": system}, known, versions=versions, where="")
    version, branch = driver_checks.version_of(case)
    driver_checks.wheels(case, version or branch)
    if not case.refused and not asked.get("packages"):
        kinds: Sequence[str] = [asked["modules"]] if asked.get("modules") in names.KINDS else names.KINDS
        if all(names.names(case.origin, system, branch, kind, known) is None for kind in kinds):
            case.refuse(
                "driver-names",
                f"the names of the packages of branch {branch} from {asked['source']} for {system} are not known",
                f"Use branch {known['default_branch']}, or name them in gpu_driver_packages",
            )
    first = known["sources"]["nvidia"]["first_branch"].get(system)
    if (
        asked["source"] == "nvidia"
        and first
        and not asked.get("repository")
        and names.numbers(branch) < names.numbers(first)
    ):
        case.refuse(
            "driver-branch",
            f"NVIDIA's repository for {system} began with branch {first}, wanted is {branch}",
            "Set gpu_driver_source: mirror with a repository of yours that has it, or choose a newer branch",
        )
    return [(item.id, item.message, item.fix) for item in case.findings if item.severity == "error"]


def _source(want: Mapping[str, Any]) -> List[Fault]:
    source, repository, folder = want["source"], want.get("repository"), want.get("folder")
    found: List[Fault] = []
    if source == "mirror" and bool(repository) == bool(folder):
        which = "both are set" if repository else "neither is set"
        fix = "Name one: gpu_driver_repository, the address of a repository, or gpu_driver_folder, a folder of the controller"
        found.append(
            (
                "driver-source",
                f"gpu_driver_source is mirror, of gpu_driver_repository and gpu_driver_folder {which}",
                fix,
            )
        )
    if source == "mirror" and repository and not want.get("repository_key"):
        message = "gpu_driver_source is mirror, and nothing says which key its repository is signed with"
        found.append(("driver-key", message, "Give the key in gpu_driver_repository_key, as text or as a file"))
    if source not in ("mirror",) and folder:
        fix = "Set gpu_driver_source: mirror, or take the folder away"
        found.append(("driver-source", f"gpu_driver_folder is set, and gpu_driver_source is {source}", fix))
    if source in ("distribution", "preinstalled") and repository:
        fix = "Set gpu_driver_source: nvidia or mirror, or take the address away"
        found.append(("driver-source", f"gpu_driver_repository is set, and gpu_driver_source is {source}", fix))
    if repository and not ADDRESS.fullmatch(str(repository)):
        message = f"gpu_driver_repository is {repository!r}, which is no address of a repository"
        found.append(
            ("driver-source", message, "Write it as https://mirror.example/cuda/debian12/ or file:/srv/packages/")
        )
    print_ = want.get("repository_fingerprint")
    if print_ and not re.fullmatch(r"[0-9A-Fa-f]{40}", str(print_).replace(" ", "")):
        message = f"gpu_driver_repository_fingerprint is {print_!r}, which is no fingerprint"
        found.append(("driver-key", message, "Write all 40 hexadecimal digits"))
    return found


def _mig(layout: Any) -> List[Fault]:
    """Index of a GPU to a list of profiles, by number or name (`nvidia-smi mig -lgip`)."""
    if not isinstance(layout, Mapping):
        return []
    found: List[Fault] = []
    for index, profiles in layout.items():
        good = isinstance(profiles, list) and profiles
        if (
            not re.fullmatch(r"\d+", str(index))
            or not good
            or not all(re.fullmatch(r"\d+|\d+g\.\d+gb(\+me|\+me\.all|\+gfx)?", str(item)) for item in profiles)
        ):
            message = f"gpu_driver_mig_layout has {index!r}: {profiles!r}"
            fix = "Write the index of a GPU and a list of its profiles, such as {0: [1g.10gb, 1g.10gb, 2g.20gb]}"
            found.append(("driver-mig", message, fix))
    return found


def _imex(nodes: Any) -> List[Fault]:
    """Every node of an NVLink domain by its number; IMEX looks up no names."""
    found: List[Fault] = []
    for node in nodes if isinstance(nodes, list) else []:
        try:
            ipaddress.ip_address(str(node))
        except ValueError:
            message = f"gpu_driver_imex_nodes has {node!r}, which is no address"
            fix = "Write the IPv4 or IPv6 address of every node of the NVLink domain, this host's too"
            found.append(("driver-imex", message, fix))
    return found
