# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What stands against a driver on a host: its GPUs, the wheels, other packages, sources, Secure Boot. See driver_plan.py.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import (
    compatibility,
    driver_host,
    driver_sources,
    driver_state,
)
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_packages as names
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.driver_case import SOURCES, Case


def possible(case: Case) -> bool:
    """Whether there is anything to plan at all."""
    want, known = case.want, case.known
    systems = sorted(known["sources"]["nvidia"]["releases"])
    if want["source"] not in SOURCES:
        case.refuse("driver-source", f"gpu_driver_source is {want['source']}", f"Choose one of {', '.join(SOURCES)}")
    elif want["source"] == "mirror" and not want["repository"]:
        case.refuse(
            "driver-source",
            "gpu_driver_source is mirror and gpu_driver_repository is empty",
            "Name the mirror's address",
        )
    elif case.system not in systems and want["source"] != "preinstalled":
        case.refuse(
            "driver-system",
            f"drivers are installed on {', '.join(systems)}, this host has {case.system}",
            "Install the driver yourself and set gpu_driver_source: preinstalled",
        )
    elif not case.ids:
        case.refuse(
            "driver-no-gpu", "no NVIDIA GPU is on the PCI bus", "Take the host out of gpu_hosts, or look at its slots"
        )
    elif case.host["runfile"] and want["source"] != "preinstalled":
        case.refuse(
            "driver-runfile",
            "a driver of NVIDIA's .run installer is there (nvidia-uninstall), which packages would overwrite in part",
            "Run nvidia-uninstall yourself, or set gpu_driver_source: preinstalled",
        )
    return not case.refused


def version_of(case: Case) -> Tuple[Optional[str], str]:
    """Version as wanted, and its branch."""
    want, known = case.want, case.known
    version = want["version"] and str(want["version"])
    branch = str(want["branch"]) if want["branch"] else None
    if version and branch and names.branch(version) != branch:
        case.refuse(
            "driver-version",
            f"version {version} is not of branch {branch}",
            "Name one of gpu_driver_version and gpu_driver_branch",
        )
    only = known["sources"]["distribution"]["branch"].get(case.system) if case.origin == "distribution" else None
    branch = names.branch(version) if version else branch or only or known["default_branch"]
    if only and branch != only and not want["packages"]:
        case.refuse(
            "driver-branch",
            f"{case.system} itself has branch {only}, wanted is {branch}",
            f"Set gpu_driver_branch: '{only}', or gpu_driver_source: nvidia",
        )
    for entry in known["sources"]["distribution"]["transitional"]:
        if case.origin == "distribution" and case.system in entry["systems"] and entry["branch"] == branch:
            case.refuse(
                "driver-transitional",
                f"{case.system}'s packages of branch {branch} are transitional: asking for them brings {entry['becomes']}",
                f"Set gpu_driver_branch: '{entry['becomes']}', or gpu_driver_source: nvidia, which may still have {branch}",
            )
    ended = known["branches"].get(branch, {})
    if ended.get("support") == "ended":
        case.refuse(
            "driver-branch-ended",
            f"branch {branch} gets no more fixes",
            f"Use {known['default_branch']}, with long-term support",
            "warning",
        )
    if not version:
        newest = next(iter(case.offers(branch)), None)
        case.refuse(
            "driver-version",
            f"gpu_driver_version names no exact version for branch {branch}, so that it could change with every run",
            f"Set gpu_driver_version: {newest}, the newest that is offered"
            if newest
            else f"Set gpu_driver_version to one of branch {branch}",
        )
    return version or None, branch


def modules_of(case: Case, branch: str) -> Tuple[Optional[str], str]:
    """Kind of modules for all GPUs of the host, and why."""
    known, takes = case.known, {id_: names.takes(id_, case.known) for id_ in case.ids}
    told = {f"{names.generation(id_, known)} (10de:{id_})": need for id_, need in takes.items() if need}
    unknown = sorted(id_ for id_, need in takes.items() if need is None)
    needs = set(told.values()) - {"either"}
    want = case.want["modules"]
    if unknown and want == "auto":
        case.refuse(
            "driver-gpu-unknown",
            f"GPU 10de:{', 10de:'.join(unknown)} is in no known range, so the kind of modules is not known",
            "Set gpu_driver_modules to open or proprietary as the driver's README says",
        )
    _branch_of_gpus(case, branch)
    if needs == {"open", "proprietary"}:
        case.refuse(
            "driver-modules",
            f"{_those(told, 'open')} work with the open modules only and {_those(told, 'proprietary')} with the proprietary ones only: no driver runs both",
            "Put the cards into different hosts",
        )
        return None, ""
    must = next(iter(needs), None)
    if want != "auto" and must and want != must:
        case.refuse(
            "driver-modules",
            f"gpu_driver_modules is {want}, {_those(told, must)} work with the {must} modules only",
            f"Set gpu_driver_modules: auto or {must}",
        )
    kind = must or (want if want != "auto" else "open")
    if kind == "proprietary" and names.numbers(branch) >= names.numbers(known["proprietary_ends_before"]):
        case.refuse(
            "driver-modules",
            f"branch {branch} has no proprietary modules, they end before {known['proprietary_ends_before']}",
            "Set gpu_driver_modules: open" if must is None else "Choose an older branch",
        )
    if not case.want["gpu_firmware"] and kind == "open":
        case.refuse(
            "driver-gsp",
            "gpu_driver_gpu_firmware is false, the open modules do not work without the GPU's firmware (GSP)",
            "Move to a driver that has the fix for Xid 119 and 120"
            + ("" if must else ", or set gpu_driver_modules: proprietary"),
        )
    if must:
        return kind, f"{_those(told, must)} work with the {must} modules only"
    return (
        kind,
        "as wanted" if want != "auto" else "every GPU here works with either, NVIDIA recommends the open modules",
    )


def _branch_of_gpus(case: Case, branch: str) -> None:
    for id_ in case.ids:
        generation = names.generation(id_, case.known)
        entry = case.known["generations"].get(generation or "", {})
        last, first = entry.get("last_branch"), entry.get("first_branch")
        if last and names.numbers(branch) > names.numbers(last):
            case.refuse(
                "driver-branch",
                f"GPU 10de:{id_} ({generation}) is not known to branch {branch}: {last} is the last for it",
                f"Set gpu_driver_branch: '{last}' and a version of it",
            )
        if first and names.numbers(branch) < names.numbers(first):
            case.refuse(
                "driver-branch",
                f"GPU 10de:{id_} ({generation}) is not known to branch {branch}: {first} is the first for it",
                f"Set gpu_driver_branch: '{case.known['default_branch']}' and a version of it, with gpu_driver_source: nvidia where the distribution has none",
            )


def _those(told: Mapping[str, Any], need: str) -> str:
    return ", ".join(sorted(name for name, mine in told.items() if mine == need))


def wheels(case: Case, version: str) -> None:
    """Whether the releases that are to run here run on that driver, by the rules of compatibility.py."""
    if not case.versions or not case.want["releases"]:
        return
    driver = {**case.driver, "loaded": names.upstream(version)}
    answer = compatibility.wheels({**case.facts, "driver": driver}, case.versions)
    for release in case.want["releases"]:
        for refused in answer.refused:
            mine = (refused.version, refused.accelerator) == (str(release["version"]), str(release["accelerator"]))
            reasons = [reason.text for reason in refused.reasons if reason.kind == "driver"] if mine else []
            if reasons:
                case.refuse(
                    "driver-wheels",
                    f"{refused} is to run here: {'; '.join(reasons)}",
                    f"Choose branch {case.known['default_branch']} or newer (gpu_driver_branch), or a release of an older CUDA (vllm_runtime_version)",
                )


def state(case: Case) -> None:
    """What stands in the way: broken or foreign packages, sources against each other, a driver changed under a running one."""
    host = case.host
    if not finishes(case) and (host["audit"].strip() or host["unsettled"] or host["interrupted"]):
        told = host["audit"].strip() or ", ".join(
            f"{name} is {what}" for name, what in sorted(host["unsettled"].items())
        )
        case.refuse(
            "dpkg-broken",
            f"dpkg --audit says: {' '.join(told.split()) or 'nothing, but dpkg was interrupted'}",
            "Finish it first: dpkg --configure -a, then apt-get -f install, and read what they would remove",
        )
    _signed_by(case)
    foreign = [
        f"{name} {item['version']} ({item.get('origin') or 'offered by no source'})" for name, item in _foreign(case)
    ]
    if foreign and host["available"] is not None:
        case.refuse(
            "driver-foreign",
            f"packages of another provider than {case.want['source']} are installed: {', '.join(foreign)}",
            "Choose that provider with gpu_driver_source, or take these packages away yourself; the role removes none of them",
        )
    fault = driver_state.mismatch(case.driver.get("loaded"), case.driver.get("installed"), case.where)
    if fault and case.want["reboot"] is None:
        case.findings.append(fault)
    for item in case.facts.get("xid") or []:
        if item.get("code") in (119, 120):
            case.refuse(
                "driver-gsp",
                f"Xid {item['code']} at {item.get('address')} since boot: the GPU's system processor hung under driver {case.driver.get('loaded')}",
                "Upgrade to a newer version of the branch, and power-cycle the host if it comes back",
                "warning",
            )
    if host["compat"]:
        case.refuse(
            "cuda-compat",
            f"cuda-compat is on the loader's path: {', '.join(host['compat'])}; cuInit returns 803 or 804 where it does not fit",
            "Take it out of LD_LIBRARY_PATH and /etc/ld.so.conf.d",
            "warning",
        )


TRIGGERS = ("triggers-awaited", "triggers-pending")  # dpkg(1), PACKAGE STATES


def finishes(case: Case) -> Dict[str, str]:
    """What dpkg left half done, where all of it is what an earlier run of the role was at; nothing otherwise.

    A trigger that waits (libc-bin's, for new libraries) is the work of what was unpacked, and of no plan.
    """
    mark, unsettled = case.host["mark"], case.host["unsettled"]
    ours = set((mark or {}).get("packages") or ())
    if mark is None or any(name not in ours and state not in TRIGGERS for name, state in unsettled.items()):
        return {}
    return dict(sorted(unsettled.items())) or ({"dpkg": "interrupted"} if case.host["interrupted"] else {})


def _signed_by(case: Case) -> None:
    """apt stops when two entries for one address name different keys, the one to be written among them."""
    seen: Dict[Tuple[str, str], Dict[Optional[str], List[str]]] = {}
    for item in driver_sources.after(case):
        key = (item["uri"].rstrip("/"), item["suite"])
        files = seen.setdefault(key, {}).setdefault(item.get("signed_by"), [])
        files.append(item["file"])
    keyring = case.known["sources"]["nvidia"]["keyring"]["path"]
    for (uri, suite), keys in seen.items():
        if len(keys) > 1:
            told = "; ".join(f"{', '.join(files)}: {key or 'no Signed-By'}" for key, files in keys.items())
            case.refuse(
                "apt-signed-by",
                f"{uri} {suite} stands in several sources with different keys ({told}): apt says `Conflicting values set for option Signed-By` and stops",
                f"Keep one of these files, for NVIDIA's repository the one with Signed-By: {keyring}"
                + driver_sources.consent(case),
            )


def _foreign(case: Case) -> List[Tuple[str, Mapping[str, Any]]]:
    """Installed driver packages that do not come from where the driver is to come from."""
    return [
        (name, item)
        for name, item in sorted(case.host["packages"].items())
        if names.of_driver(name, case.known) and not _at_home(case, name, item.get("origin"))
    ]


def _at_home(case: Case, name: str, origin: Optional[str]) -> bool:
    """A version that no source offers any more is ours where a source of ours offers the package; a mirror's has any origin."""
    if (
        case.want["source"] == "mirror"
        and origin not in case.distribution
        and origin not in case.known["other_providers"]
    ):
        return True
    return case.ours(origin) or (origin is None and bool(case.candidates(name)))


def secure_boot(case: Case, kind: Optional[str]) -> Optional[str]:
    """How modules get loaded under Secure Boot: signed (by the distribution) or enrolled (DKMS's key); None: it is off."""
    told = case.host["secure_boot"]
    on = driver_state.secure_boot(told) if told is not None else case.facts.get("secure_boot")
    if not on:
        return None
    if case.host["key_enrolled"]:
        return "enrolled"
    branch = names.branch(str(case.want["version"] or case.want["branch"] or case.known["default_branch"]))
    kernels = sorted(case.host["kernels"])
    signed = kind and kernels and names.names(case.origin, case.system, branch, kind, case.known, signed_for=kernels)
    if signed:
        return "signed"
    case.refuse(
        "secure-boot",
        "Secure Boot is on, and modules that DKMS builds are refused (`Key was rejected by service`) until their key is enrolled",
        f"{_enrolment(case)}, reboot, and confirm at the machine's console with the password given; or switch Secure Boot off in the "
        "firmware",
    )
    return None


def _enrolment(case: Case) -> str:
    """How DKMS's key gets into the firmware's list: by the system, and by whether DKMS has made it yet."""
    key = case.host["dkms_key"] or {"path": driver_host.DKMS_KEYS[""], "there": False}
    found = f"mokutil --import {key['path']}"
    if case.family == "ubuntu":
        made = "" if key["there"] else "make DKMS's key with update-secureboot-policy --new-key, then "
        return f"Take gpu_driver_source: distribution, whose modules are signed. Otherwise {made}{found}"
    if key["there"]:
        return f"Run {found}"
    if key["path"] not in driver_host.DKMS_KEYS.values():
        return f"Put the key where framework.conf of DKMS names it ({key['path']}, which is not there), then {found}"
    # As DKMS 3.0.10 makes it with its first build; its action generate_mok came later.
    return (
        "DKMS's key is not made yet. Make it as DKMS would: openssl req -new -x509 -nodes -days 36500 -newkey rsa:2048 "
        f"-subj '/CN=DKMS module signing key' -keyout {key['path'].rpartition('.')[0]}.key -outform DER -out {key['path']}, "
        f"then {found}"
    )
