# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The one entry of apt's sources that a driver comes from, and what stands against it.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Set

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_packages as names
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.driver_case import MIRROR_KEYRING, PATHS, Case


def repository(case: Case) -> Optional[Dict[str, Any]]:
    """uri, suite, components, signed_by and key (url and fingerprint, or None) of NVIDIA's repository or a mirror."""
    if case.origin != "nvidia" or case.want["source"] == "preinstalled":
        return None
    entry = case.known["sources"]["nvidia"]
    machine = str(case.facts.get("machine") or "x86_64")
    official = entry["repository"].format(
        release=entry["releases"].get(case.system, case.system),
        architecture=entry["architectures"].get(machine, machine),
    )
    uri = str(case.want["repository"] or official)
    mirror = case.want["source"] == "mirror"
    key = entry["keys"].get(case.system)
    return {
        "uri": uri,
        "suite": case.want["suite"],
        "components": list(case.want["components"]),
        "signed_by": None if case.want["trusted"] else MIRROR_KEYRING if mirror else entry["keyring"]["path"],
        "key": {"url": f"{uri.rstrip('/')}/{key['file']}", "fingerprint": key["fingerprint"]}
        if key and not mirror
        else None,
    }


def text(case: Case) -> Optional[str]:
    """The file that the role writes; None where the host has all that it needs."""
    entry = repository(case)
    if entry is not None:
        if _there(case, entry):
            return None
        return names.source_text(
            uri=entry["uri"], suite=entry["suite"], signed_by=entry["signed_by"], components=entry["components"]
        )
    return _components(case) if case.want["source"] == "distribution" else None


def gone(case: Case, mine: Optional[str]) -> List[str]:
    """Files that go: our own of another source, and with consent those that other ways of installing left."""
    files = {item["file"] for item in case.host["sources"]}
    found = [PATHS["source"]] if mine is None and PATHS["source"] in files else []
    return found + (_others(case) if case.want["replace_sources"] is True else [])


def after(case: Case) -> List[Mapping[str, Any]]:
    """The entries that apt would read after the change."""
    entry = repository(case)
    leaving = {PATHS["source"], *(_others(case) if case.want["replace_sources"] is True else [])}
    kept = [item for item in case.host["sources"] if item["file"] not in leaving]
    if entry is not None and not _there(case, entry):
        kept.append({"file": PATHS["source"], **{key: entry[key] for key in ("uri", "suite", "signed_by")}})
    return kept


def consent(case: Case) -> str:
    """How to have the role take the others away, where it can."""
    others = _others(case)
    if not others or case.want["replace_sources"] is True:
        return ""
    return f", or let the role take {' and '.join(others)} away: gpu_driver_replace_sources: true"


def _others(case: Case) -> List[str]:
    """Files of the host that are known to come from another way of installing the same repository."""
    entry = case.known["sources"]["nvidia"]
    if repository(case) is None:
        return []
    machine = str(case.facts.get("machine") or "x86_64")
    known = {
        name.format(
            release=entry["releases"].get(case.system, ""), architecture=entry["architectures"].get(machine, machine)
        )
        for name in entry["other_files"]
    }
    return sorted({item["file"] for item in case.host["sources"]} & known)


def _there(case: Case, entry: Mapping[str, Any]) -> bool:
    """Whether another file has the very entry already: twice the same is a warning of apt at every run."""
    leaving = {PATHS["source"], *(_others(case) if case.want["replace_sources"] is True else [])}
    return any(
        item["file"] not in leaving
        and item["uri"].rstrip("/") == entry["uri"].rstrip("/")
        and item["suite"] == entry["suite"]
        and item.get("signed_by") == entry["signed_by"]
        and set(entry["components"]) <= set(item.get("components") or [])
        for item in case.host["sources"]
    )


def _components(case: Case) -> Optional[str]:
    """The distribution's further components (contrib, non-free), from where the host has main: its own mirror and suites."""
    wanted = case.known["sources"]["distribution"]["components"].get(case.system)
    others = [item for item in case.host["sources"] if item["file"] != PATHS["source"]]
    have: Dict[Any, Set[str]] = {}
    signed: Dict[Any, Any] = {}
    for item in others:
        place = item["uri"].rstrip("/"), item["suite"]
        have.setdefault(place, set()).update(item.get("components") or [])
        signed.setdefault(place, item.get("signed_by"))
    paragraphs = []
    for place, components in have.items():
        lacking = [name for name in wanted or [] if name not in components]
        if "main" not in components or not lacking:
            continue
        paragraphs.append(names.source_text(uri=place[0], suite=place[1], signed_by=signed[place], components=lacking))
    return "\n".join(paragraphs) or None
