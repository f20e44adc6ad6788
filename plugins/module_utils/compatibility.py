# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Which releases of vLLM, in which build, a host can run; where none or only an older one, why, and what to change.

What each release needs stands in data/versions.yml, with where it was read. The rules that are applied to it:

- Driver: a CUDA toolkit runs on the driver branch its major version began with (525.60.13 for CUDA 12, 580 for CUDA 13,
  "Minor Version Compatibility" in NVIDIA's CUDA Compatibility). Below the driver that came with the toolkit, code that
  is compiled to PTX at run time fails with error 222, cudaErrorUnsupportedPtxVersion: a note.
- GPU: code for compute capability X.y runs on X.z with z >= y, and on no other major version; on Tegra only on X.y
  itself ("Binary Compatibility" in the CUDA C++ Programming Guide). Every GPU of the host has to be served.
- glibc: not older than the one in the wheel's manylinux tag. Python and machine: among those the release has.

A host with a GPU is judged for its GPUs; the CPU build is judged on hosts without one. What a host did not tell counts
as not fitting, never as fitting.

Pure: standard library, Python 3.9 and newer, no Ansible import. Data comes as arguments.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils.findings import Finding

NOT_OFFERED = "not offered"  # the status of a release that the collection only knows of
# What an owner can change without another machine or other GPUs.
_FIXABLE = {"driver", "driver-absent", "glibc", "python"}


@dataclass(frozen=True)
class Wheel:
    """A build of a release that the host runs.

    status  as in data/versions.yml, or `not offered`
    lock    made or missing, for the Python of this host; None: the collection makes no lock for it
    """

    version: str
    accelerator: str
    status: str
    lock: Optional[str]
    notes: Tuple[str, ...] = ()

    @property
    def offered(self) -> bool:
        return self.status != NOT_OFFERED

    def __str__(self) -> str:
        return f"vLLM {self.version} {self.accelerator}"


@dataclass(frozen=True)
class Reason:
    """Why a build does not run. kind: vendor, gpu, driver, driver-absent, capability, glibc, python or machine."""

    kind: str
    text: str


@dataclass(frozen=True)
class Refused:
    """A build that the host does not run, and every reason."""

    version: str
    accelerator: str
    reasons: Tuple[Reason, ...]

    def __str__(self) -> str:
        return f"vLLM {self.version} {self.accelerator}"


@dataclass
class Answer:
    """Releases in order: those offered before the others, newest first, higher CUDA first.

    runs     what the host runs; the first is the best
    refused  the rest
    message  one or two sentences, with the numbers
    remedy   what to change for a newer release, or for any; None when nothing is to be gained
    changes  the same for programs: driver, glibc, python, each the least that is needed, or nothing
    """

    runs: List[Wheel] = field(default_factory=list)
    refused: List[Refused] = field(default_factory=list)
    message: str = ""
    remedy: Optional[str] = None
    changes: Dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> Optional[Wheel]:
        return self.runs[0] if self.runs else None

    def as_dict(self) -> Dict[str, Any]:
        """Plain lists and dictionaries: runs, refused, best, message, remedy."""
        runs = [{**asdict(wheel), "notes": list(wheel.notes)} for wheel in self.runs]
        return {
            "runs": runs,
            "refused": [
                {
                    "version": item.version,
                    "accelerator": item.accelerator,
                    "reasons": [reason.text for reason in item.reasons],
                }
                for item in self.refused
            ],
            "best": runs[0] if runs else None,
            "message": self.message,
            "remedy": self.remedy,
        }


@dataclass(frozen=True, eq=False)
class _Build:
    """One build of one release, as the table has it."""

    version: str
    accelerator: str
    offered: bool
    pythons: Tuple[str, ...]
    entry: Mapping[str, Any]

    def __str__(self) -> str:
        return f"vLLM {self.version} {self.accelerator}"

    @property
    def cuda(self) -> Tuple[int, ...]:
        return numbers(self.entry["cuda"])

    @property
    def driver(self) -> str:
        """The least driver, as a number that can be installed: for a bare branch, the toolkit's own driver of it."""
        least, toolkit = self.entry["min_driver"]["minor_compatibility"], self.entry["min_driver"]["toolkit"]
        return toolkit if toolkit.split(".")[0] == least else least


def numbers(text: Any) -> Tuple[int, ...]:
    """(580, 65, 6) for `580.65.06`; () for None and for what has no number."""
    return tuple(int(part) for part in re.findall(r"\d+", str(text))) if text is not None else ()


def wheels(facts: Mapping[str, Any], versions: Mapping[str, Any]) -> Answer:
    """Judge a host.

    facts     what module gpu_facts returned; of it vendor, error, pci_gpus, gpus (index, name, compute_capability), driver
              (loaded, installed, cuda), glibc, python, machine
    versions  data/versions.yml
    """
    answer = Answer()
    judged: Dict[_Build, List[Reason]] = {}
    builds = _builds(versions, cuda=facts.get("vendor") in ("nvidia", "amd"))
    for build in builds:
        reasons, notes = _judge(build, facts, versions)
        if reasons:
            judged[build] = reasons
            answer.refused.append(Refused(build.version, build.accelerator, tuple(reasons)))
        else:
            answer.runs.append(_wheel(build, facts, notes))
    if facts.get("vendor") == "nvidia":
        best = next((place for place, build in enumerate(builds) if build not in judged), len(builds))
        _advise_nvidia(answer, builds[:best], judged, facts, versions)
    else:
        _advise_others(answer, judged, facts, versions)
    return answer


def _builds(versions: Mapping[str, Any], cuda: bool) -> List[_Build]:
    """Builds for GPUs, in the order of an answer; on a host without a GPU the CPU builds stand among them."""
    found = [
        _Build(version, accelerator, offered, tuple(release["python"]), entry)
        for offered, table in ((True, versions["releases"]), (False, versions["known"]))
        for version, release in table.items()
        for accelerator, entry in release["accelerators"].items()
        if entry["cuda"] or not cuda
    ]
    return sorted(found, key=lambda build: (build.offered, numbers(build.version), build.cuda), reverse=True)


def _wheel(build: _Build, facts: Mapping[str, Any], notes: Sequence[str]) -> Wheel:
    if not build.offered:
        first = ["the collection does not install it"]
        if "published" in build.entry:
            first.append(f"whether this build was published is {build.entry['published']}")
        return Wheel(build.version, build.accelerator, NOT_OFFERED, None, (*first, *notes))
    python = facts.get("python")
    if python in build.entry["locked"]:
        return Wheel(build.version, build.accelerator, build.entry["status"], "made", tuple(notes))
    make = f"no lock for Python {python} yet: scripts/lock {build.version} {build.accelerator} --python {python}"
    return Wheel(build.version, build.accelerator, build.entry["status"], "missing", (make, *notes))


def findings(answer: Answer, releases: Sequence[Mapping[str, Any]], where: str) -> List[Finding]:
    """What keeps a host from running the releases that are meant for it (each with version and accelerator).

    The host's Python is left to `validate`, which knows vllm_runtime_python. Without releases: whether there is any.
    """
    found = []
    for wanted in sorted({(str(release["version"]), str(release["accelerator"])) for release in releases}):
        for refused in answer.refused:
            reasons = [reason for reason in refused.reasons if reason.kind != "python"]
            if (refused.version, refused.accelerator) == wanted and reasons:
                found.append(
                    Finding(
                        "release-unfit",
                        where,
                        f"{refused} is to run here: {_joined(reasons)}",
                        answer.remedy or answer.message,
                    )
                )
    if not releases and not answer.runs:
        found.append(Finding("release-none", where, answer.message, answer.remedy or "Serve on other hosts", "warning"))
    return found


# Judging one build


def _judge(build: _Build, facts: Mapping[str, Any], versions: Mapping[str, Any]) -> Tuple[List[Reason], List[str]]:
    """Every reason against it, and what is worth knowing if there is none."""
    reasons: List[Reason] = []
    notes: List[str] = []
    if build.entry["cuda"]:
        vendor = facts.get("vendor")
        if vendor != "nvidia":
            has = "its GPUs are AMD's" if vendor == "amd" else "the host has no NVIDIA GPU"
            reasons.append(Reason("vendor", f"CUDA wheels do not apply, {has}"))
        else:
            _judge_driver(build, facts, reasons, notes)
            _judge_gpus(build, facts, versions["compatibility"], reasons, notes)
    _judge_system(build, facts, reasons)
    return reasons, notes


def _judge_driver(build: _Build, facts: Mapping[str, Any], reasons: List[Reason], notes: List[str]) -> None:
    loaded, needed = _driver(facts), f"CUDA {build.cuda[0]} wheels need {build.driver} or newer"
    if not numbers(loaded):
        installed = (facts.get("driver") or {}).get("installed")
        reasons.append(Reason("driver-absent", f"no driver is loaded ({installed or 'none'} is installed), {needed}"))
    elif numbers(loaded) < numbers(build.entry["min_driver"]["minor_compatibility"]):
        reasons.append(Reason("driver", f"found driver {loaded}, {needed}"))
    elif numbers(loaded) < numbers(build.entry["min_driver"]["toolkit"]):
        notes.append(
            f"driver {loaded} is older than CUDA {build.entry['cuda']}'s own {build.entry['min_driver']['toolkit']}: by minor-version "
            "compatibility it runs, but what is compiled to PTX at run time fails with error 222, cudaErrorUnsupportedPtxVersion"
        )


def _judge_gpus(
    build: _Build, facts: Mapping[str, Any], rules: Mapping[str, Any], reasons: List[Reason], notes: List[str]
) -> None:
    gpus = facts.get("gpus") or []
    if not gpus and numbers(_driver(facts)):
        error = facts.get("error")
        reasons.append(Reason("gpu", "no GPU answered through the driver" + (f": {error}" if error else "")))
    listed = build.entry["compute_capabilities"]
    for name, capability in _models(gpus):
        if capability is None or not numbers(capability):
            reasons.append(Reason("gpu", f"{name} did not tell its compute capability"))
            continue
        told = _capability(capability, listed, rules)
        if told is None:
            text = f"{name} has compute capability {capability}, {build} is built for {', '.join(listed)}"
            blackwell = rules["blackwell"]
            if numbers(capability)[0] in blackwell["majors"] and build.cuda < numbers(blackwell["cuda"]):
                text += f"; Blackwell needs wheels of CUDA {blackwell['cuda']} or newer, this one is of {build.entry['cuda']}"
            reasons.append(Reason("capability", text))
        elif told:
            notes.append(f"{name}: {told}")


def _capability(capability: str, listed: Sequence[str], rules: Mapping[str, Any]) -> Optional[str]:
    """None: not served. Otherwise what is to be said about it, which is nothing when it is listed."""
    if capability in listed:
        return ""
    mine = numbers(capability)
    lower = [item for item in listed if numbers(item)[0] == mine[0] and numbers(item) < mine]
    if not lower or capability in rules["tegra"]:
        return None
    nearest = max(lower, key=numbers)
    text = f"compute capability {capability} is not listed; code for {nearest} runs on it"
    if mine >= (9, 0):  # the first with such features
        text += f", but not kernels built for {nearest}a, whose features are of that capability alone"
    return text


def _judge_system(build: _Build, facts: Mapping[str, Any], reasons: List[Reason]) -> None:
    glibc, python, machine = facts.get("glibc"), facts.get("python"), facts.get("machine")
    if not numbers(glibc) or numbers(glibc) < numbers(build.entry["glibc"]):
        found = f"found glibc {glibc}" if numbers(glibc) else "found no glibc"
        reasons.append(Reason("glibc", f"{found}, {build} needs {build.entry['glibc']} or newer"))
    if python not in build.pythons:
        found = f"found Python {python}" if python else "found no Python"
        reasons.append(Reason("python", f"{found}, vLLM {build.version} runs on {_span(build.pythons)}"))
    if machine not in build.entry["architectures"]:
        offered = " and ".join(build.entry["architectures"])
        reasons.append(
            Reason("machine", f"the host is {machine or 'of unknown architecture'}, {build} is known for {offered}")
        )


def _driver(facts: Mapping[str, Any]) -> Optional[str]:
    return (facts.get("driver") or {}).get("loaded")


def _models(gpus: Sequence[Mapping[str, Any]]) -> List[Tuple[str, Optional[str]]]:
    """Each model once, as (what to call it, compute capability)."""
    grouped: Dict[Tuple[str, Optional[str]], List[str]] = {}
    for place, gpu in enumerate(gpus):
        key = (str(gpu.get("name")), gpu.get("compute_capability"))
        grouped.setdefault(key, []).append(str(gpu.get("index", place)))
    return [(f"GPU {', '.join(places)} ({name})", capability) for (name, capability), places in grouped.items()]


def _span(pythons: Sequence[str]) -> str:
    return f"{pythons[0]} to {pythons[-1]}" if len(pythons) > 1 else pythons[0]


# Message and remedy


def _advise_others(
    answer: Answer, judged: Mapping[_Build, List[Reason]], facts: Mapping[str, Any], versions: Mapping[str, Any]
) -> None:
    cpu = _cpu(versions)
    if facts.get("vendor") == "amd":
        rocm = versions["compatibility"]["rocm"]
        answer.message = "CUDA wheels do not apply: the host's GPUs are AMD's, and the collection offers no ROCm build."
        answer.remedy = (
            f"The vLLM project has ROCm wheels at {rocm['index']} (VARIANT is one of {', '.join(rocm['variants'])}; Python "
            f"{rocm['python']} only), to be installed by hand.{_idle(facts, versions)}"
        )
        return
    lead = "CUDA wheels do not apply: the host has no NVIDIA GPU"
    if answer.best:
        answer.message = f"{lead}. {answer.best} runs ({_system(facts)})."
        return
    target = next((build for build, reasons in judged.items() if not build.entry["cuda"]), None)
    reasons = judged[target] if target else []
    answer.message = f"{lead}; {cpu} does not run either: {_joined(reasons)}."
    if target and {reason.kind for reason in reasons} <= _FIXABLE:
        steps = _steps(target, reasons, answer, versions)
        answer.remedy = f"{steps[0].upper()}{steps[1:]}, then {cpu} runs."


def _advise_nvidia(
    answer: Answer,
    better: Sequence[_Build],
    judged: Mapping[_Build, List[Reason]],
    facts: Mapping[str, Any],
    versions: Mapping[str, Any],
) -> None:
    """`better` are the builds that come before the best and do not run."""
    best = answer.best
    if best and not better:
        answer.message = f"{best} runs ({_system(facts)})."
        return
    choose = f"choose {best.accelerator} up to vLLM {best.version}" if best else ""
    if best and not best.offered:
        choose += " (the collection does not install it)"
    # The newest that a change on this host would give; one that no change would give is not worth asking for.
    target = next((build for build in better if {reason.kind for reason in judged[build]} <= _FIXABLE), None)
    if target is None:
        _advise_without_change(answer, judged, better[0], choose=choose, facts=facts, versions=versions)
        return
    steps = _steps(target, judged[target], answer, versions)
    short = steps.replace(f"the driver to {target.driver} or newer", "the driver")  # the number stands before it
    answer.message = f"{_sentence(judged[target])}; {choose + ' or ' if choose else ''}{short}."
    if not facts.get("gpus"):  # without a driver nobody told what the GPUs are
        then = " and look again: which release fits depends on the GPU's compute capability, which the driver tells"
    else:
        then = f", then {target} runs"
        then += "" if target.offered else " (the collection does not install it)"
    then += _cheaper(target, best, better, judged) + _forward(target, judged[target], facts, versions)
    answer.remedy = f"{steps[0].upper()}{steps[1:]}{then}."
    _last_branch(answer, facts, versions)


def _advise_without_change(
    answer: Answer,
    judged: Mapping[_Build, List[Reason]],
    newest: _Build,
    *,
    choose: str,
    facts: Mapping[str, Any],
    versions: Mapping[str, Any],
) -> None:
    """Nothing on this host helps: other GPUs, another machine, or what is wrong with the driver."""
    lasting = [reason for reason in judged[newest] if reason.kind not in _FIXABLE]
    kinds = {reason.kind for reason in lasting}
    answer.message = f"{_sentence(lasting)}; {choose or 'no release known here runs'}."
    if "gpu" in kinds:
        installed = (facts.get("driver") or {}).get("installed")
        differs = installed and installed != _driver(facts)
        answer.remedy = (
            f"Driver {_driver(facts)} is loaded, {installed} is installed: reboot into the installed one and look again."
            if differs
            else "Make nvidia-smi --query-gpu=name,compute_cap answer for every GPU, and look again."
        )
    elif "capability" in kinds:
        served = sorted({item for build in judged for item in build.entry["compute_capabilities"]}, key=numbers)
        offered = sorted(
            {item for build in judged if build.offered for item in build.entry["compute_capabilities"]}, key=numbers
        )
        answer.remedy = (
            f"No driver changes that: the releases offered serve compute capability {', '.join(offered)} and higher ones of the same "
            f"major version, Tegra excepted, and the oldest known begins at {served[0]}. Use other GPUs."
        )
        if not choose:
            answer.remedy += _idle(facts, versions)
    else:
        answer.remedy = _elsewhere(facts, versions)


def _elsewhere(facts: Mapping[str, Any], versions: Mapping[str, Any]) -> str:
    """For a machine of an architecture that the collection has no wheels for."""
    machine = facts.get("machine")
    there = versions["compatibility"]["other_machines"].get(machine)
    if not there:
        return "Use a host of architecture x86_64: the collection has recipes and locks for no other."
    # The index has one build of each, that of the highest CUDA. Judged as if it were x86_64, to name what the rest allows.
    as_if = wheels({**facts, "machine": "x86_64"}, versions)
    highest: Dict[str, str] = {}
    for build in _builds(versions, cuda=True):
        highest.setdefault(build.version, build.accelerator)
    fits = [w for w in as_if.runs if w.version in there and w.accelerator == highest[w.version]]
    lead = "The collection has recipes and locks for x86_64 only"
    if not fits:
        return f"{lead}; the package index has wheels for {machine} ({', '.join(there)}), but on x86_64 it would be: {as_if.message}"
    newest = max(fits, key=lambda wheel: numbers(wheel.version))
    return (
        f"{lead}; the package index has vLLM {newest.version} for {machine}, whose {newest.accelerator} build fits driver, glibc and "
        "Python here. Which GPUs that wheel is built for was not looked at."
    )


def _steps(build: _Build, reasons: Sequence[Reason], answer: Answer, versions: Mapping[str, Any]) -> str:
    """What to do so that this build runs, as one clause; kept in answer.changes, too."""
    steps = []
    kinds = {reason.kind for reason in reasons}
    if kinds & {"driver", "driver-absent"}:
        answer.changes["driver"] = build.driver
        verb = "upgrade the driver to" if "driver" in kinds else "install and load driver"
        steps.append(f"{verb} {build.driver} or newer")
    if "glibc" in kinds:
        need = build.entry["glibc"]
        answer.changes["glibc"] = need
        have = [
            f"{name} ({item['glibc']})"
            for name, item in versions["systems"].items()
            if numbers(item["glibc"]) >= numbers(need)
        ]
        steps.append(f"use a system with glibc {need} or newer, such as {have[0]}")
    if "python" in kinds:
        answer.changes["python"] = build.pythons[0]
        steps.append(f"name an interpreter of Python {_span(build.pythons)} in vllm_runtime_python")
    return " and ".join(steps)


def _cheaper(
    target: _Build, best: Optional[Wheel], better: Sequence[_Build], judged: Mapping[_Build, List[Reason]]
) -> str:
    """Where nothing runs and the newest asks for a new driver: the newest that an older one is enough for."""
    kinds = {reason.kind for reason in judged[target]}
    if best or not kinds & {"driver", "driver-absent"}:
        return ""
    for build in better:
        if (
            build.offered
            and numbers(build.driver) < numbers(target.driver)
            and {r.kind for r in judged[build]} <= kinds
        ):
            return f"; driver {build.driver} is enough for {build.accelerator} up to vLLM {build.version}"
    return ""


def _forward(target: _Build, reasons: Sequence[Reason], facts: Mapping[str, Any], versions: Mapping[str, Any]) -> str:
    """Forward compatibility, where NVIDIA has it: on data-centre GPUs, for a driver that is there and too old."""
    rule, gpus = versions["compatibility"]["forward"], facts.get("gpus") or []
    centre = gpus and all(re.search(rule["gpus"], str(gpu.get("name"))) for gpu in gpus)
    if not centre or {reason.kind for reason in reasons} != {"driver"}:
        return ""
    package = "cuda-compat-" + "-".join(str(part) for part in target.cuda)
    return (
        f"; on data-centre GPUs like these the package {package} with {rule['switch']} may do instead, "
        f"if NVIDIA's table of forward compatibility has driver {_driver(facts)}"
    )


def _last_branch(answer: Answer, facts: Mapping[str, Any], versions: Mapping[str, Any]) -> None:
    """No driver above the last one that knows the GPU."""
    rule = versions["compatibility"]["last_driver_branch"]
    old = [gpu for gpu in facts.get("gpus") or [] if numbers(gpu.get("compute_capability")) < numbers(rule["below"])]
    if "driver" in answer.changes and (old or not facts.get("gpus")):
        answer.remedy = (
            f"{answer.remedy} Branch {rule['branch']} is the last for compute capability below {rule['below']}."
        )


def _idle(facts: Mapping[str, Any], versions: Mapping[str, Any]) -> str:
    """The CPU build, if the host runs it."""
    best = wheels({**facts, "vendor": "none"}, versions).best
    return f" {best} runs here, without the GPUs." if best else ""


def _cpu(versions: Mapping[str, Any]) -> str:
    return f"vLLM {versions['defaults']['cpu']} cpu"


def _system(facts: Mapping[str, Any]) -> str:
    """The host in one line, for messages."""
    told = []
    driver = facts.get("driver") or {}
    if facts.get("vendor") == "nvidia":
        told.append(f"driver {driver.get('loaded')}" + (f" with CUDA {driver['cuda']}" if driver.get("cuda") else ""))
        told += [f"{name} {capability}" for name, capability in _models(facts.get("gpus") or [])]
    return ", ".join([*told, f"glibc {facts.get('glibc')}", f"Python {facts.get('python')}"])


def _joined(reasons: Sequence[Reason]) -> str:
    return "; ".join(reason.text for reason in reasons)


def _sentence(reasons: Sequence[Reason]) -> str:
    text = _joined(reasons)
    return text if text.startswith(("vLLM", "found")) else text[:1].upper() + text[1:]
