"""One archive for a report of a fault: what playbooks/doctor.yml collected, secrets and addresses replaced, and an index."""

from __future__ import annotations

import io
import json
import tarfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpu_fleet import collect, domain
from gpu_fleet.collect import Case

# What each file is, for the index.
ABOUT = {
    "journal.json": "journal of the servers (vllm@, ray@, fabric manager), journalctl -o json",
    "kernel.json": "the kernel's messages, journalctl -o json",
    "units.json": "state of the units",
    "plans.json": "what each replica was launched with here",
    "agents.json": "what the agents say",
    "metrics.txt": "what servers and agents count, without histograms",
    "disks.json": "file systems",
    "certificates.json": "ends of certificates",
    "models.json": "models whose files are missing or cut off",
    "interfaces.json": "interfaces that ranks are told to meet over",
    "drops.json": "rules of others that drop packets",
    "firewall.txt": "the fleet's nftables table",
    "addresses.txt": "interfaces",
    "topology.txt": "nvidia-smi topo -m",
    "gpus.txt": "nvidia-smi",
    "facts.json": "what module gpu_facts found",
    "findings.json": "what the doctor says",
    "plan.json": "the plan of the fleet",
    "versions.json": "versions of the collection and of Ansible",
}


def contents(
    case: Case, answer: dict[str, Any], versions: dict[str, str], secrets: tuple[str, ...] = ()
) -> dict[str, str]:
    """Name to text of every file of the archive, the index first."""
    from gpu_fleet.domain import module_util

    evidence = module_util("evidence")
    names = {name for host, told in case.evidence.items() for name in (host, told["hostname"])}
    names |= set((case.outcome.plan or {}).get("addresses", {})) | set(case.outcome.unreachable)
    redactor = module_util("redact").Redactor(names, secrets)
    files = {
        "findings.json": _json(answer),
        "plan.json": _json(case.outcome.plan),
        "versions.json": _json(versions),
    }
    for host, told in sorted(case.evidence.items()):
        folder = redactor.text(host)
        for name in ("journal", "kernel"):
            files[f"{folder}/{name}.json"] = evidence.unpacked(told[name])
        for name in ("units", "plans", "agents", "disks", "certificates", "models", "interfaces", "drops"):
            files[f"{folder}/{name}.json"] = _json(told[name])
        for name in ("firewall", "addresses", "topology", "gpus"):
            files[f"{folder}/{name}.txt"] = told[name]
        files[f"{folder}/metrics.txt"] = "".join(f"# {page}\n{text}" for page, text in sorted(told["metrics"].items()))
        if host in case.facts:
            files[f"{folder}/facts.json"] = _json(case.facts[host])
    clean = {name: redactor.text(text) for name, text in files.items() if text.strip()}
    return {"index.md": _index(clean, redactor.counts, case), **clean}


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def _index(files: dict[str, str], counts: dict[str, int], case: Case) -> str:
    rows = [f"| {name} | {len(text)} | {ABOUT[name.rpartition('/')[2]]} |" for name, text in sorted(files.items())]
    replaced = ", ".join(f"{count} of kind {kind}" for kind, count in sorted(counts.items()) if count) or "nothing"
    missing = f"{len(case.outcome.unreachable)} hosts were not reached.\n\n" if case.outcome.unreachable else ""
    return (
        "# A fleet's case\n\n"
        f"Collected {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC by `scripts/fleet bundle` of gpu_fleet.vllm.\n\n"
        f"Replaced: {replaced}. The same thing has the same name everywhere (host-1, address-1). Look through it before you send it:\n"
        "what a program of yours logs, in words of its own, is known to you alone.\n\n"
        f"{missing}| file | characters | what it is |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )


def of(case: Case) -> dict[str, str]:
    """The files of an archive for what was brought from a fleet."""
    versions = {"gpu_fleet.vllm": domain.version(), "ansible-core": version("ansible-core")}
    return contents(case, collect.examine(case), versions)


def write(path: Path, files: dict[str, str]) -> None:
    """A tar.gz that only its owner may read. Raises OSError; FileExistsError where there is such a file."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name, text in files.items():
            content = text.encode()
            member = tarfile.TarInfo(f"{path.name.removesuffix('.tar.gz')}/{name}")
            member.size, member.mode, member.mtime = len(content), 0o600, int(time.time())
            archive.addfile(member, io.BytesIO(content))
    with open(path, "xb", opener=_private) as out:
        out.write(raw.getvalue())


def _private(name: str, flags: int) -> int:
    import os

    return os.open(name, flags, 0o600)
