# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Which driver a host gets, from where, with which modules and packages, and what that disturbs; or why it gets none.

Nothing is looked up and nothing changed here: `choose` takes what is known of a host and what is wanted, and gives a plan
that names every package, or findings with remedies. What can only be seen while doing it (apt's simulation, the DKMS
build, cuInit) is in driver_apt.py and driver_state.py.

Pure: standard library, Python 3.9 and newer, no Ansible import. Data comes as arguments.
"""

from __future__ import annotations

import fnmatch
from typing import Any, Dict, List, Mapping, Optional, Sequence

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import (
    driver_beside,
    driver_checks,
    driver_sources,
    driver_state,
)
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_packages as names
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.driver_case import (
    HOST,
    PATHS,
    SOURCES,
    UNPROVED,
    WAITING,
    WANT,
    Case,
    Choice,
    DriverPlan,
)

__all__ = ["HOST", "SOURCES", "WANT", "Choice", "DriverPlan", "choose"]

# Units whose processes serve from the GPUs: on hosts that are not the head, a replica on Ray runs in ray@ alone.
SERVING = ("vllm@", "ray@")
IMEX = "nvidia-imex.service"


def choose(
    facts: Mapping[str, Any],
    want: Mapping[str, Any],
    host: Mapping[str, Any],
    known: Mapping[str, Any],
    *,
    versions: Optional[Mapping[str, Any]] = None,
    where: str = "",
) -> Choice:
    """The plan for a host, or every reason against one.

    facts     what module gpu_facts returned
    want      the role's variables, see WANT
    host      what else is known of the host, see HOST
    known     data/driver.yml
    versions  data/versions.yml, to judge want.releases by
    where     name of the host, for messages

    Raises ValueError for a key that WANT or HOST does not have.
    """
    case = Case(facts, want, host, known, versions=versions, where=where)
    if not driver_checks.possible(case):
        return Choice(None, case.findings)
    if case.want["source"] == "preinstalled":
        return _preinstalled(case)
    version, branch = driver_checks.version_of(case)
    kind, reason = driver_checks.modules_of(case, branch)
    driver_checks.wheels(case, version or branch)
    driver_checks.state(case)
    signed = driver_checks.secure_boot(case, kind)
    wanted = _names(case, branch, kind, signed)
    extra = _fabric(case, branch)
    packages = _exact(case, wanted, extra, version, branch)
    moved = _moved(case, packages, version, kind)
    beside, reasons = driver_beside.plan(case, branch)
    if version is None or kind is None or case.refused:
        return Choice(None, case.findings)
    plan = DriverPlan(
        case.system, case.want["source"], branch, names.upstream(version), kind, reason, {**packages, **moved, **beside}
    )
    plan.moves = sorted(moved)
    plan.because = {name: why for name, why in {**extra, **reasons}.items() if name in plan.packages}
    plan.beside = sorted(beside)
    plan.secure_boot = signed
    _headers(case, plan)
    plan.finishes = driver_checks.finishes(case)
    _options(case, plan)
    _surroundings(case, plan)
    _files(case, plan)
    _disturbs(case, plan)
    return Choice(None if case.refused else plan, case.findings)


def _names(case: Case, branch: str, kind: Optional[str], signed: Optional[str]) -> List[str]:
    if case.want["packages"]:
        return [str(name) for name in case.want["packages"]]
    if kind is None:
        return []
    kernels = sorted(case.host["kernels"]) if signed == "signed" else []
    found = names.names(case.origin, case.system, branch, kind, case.known, signed_for=kernels)
    if found is None and not case.refused:
        case.refuse(
            "driver-names",
            f"the names of the packages of branch {branch}, {kind}, from {case.want['source']} for {case.system} are not known",
            f"Use branch {case.known['default_branch']}, or name them in gpu_driver_packages",
        )
    return found or []


def _fabric(case: Case, branch: str) -> Dict[str, str]:
    """What the NVLink fabric needs, name to why."""
    switches = (case.facts.get("nvswitch") or {}).get("devices") or 0
    rack = [id_ for id_ in case.ids if id_ in case.known["rack_ids"]]
    found: Dict[str, str] = {}
    if rack and (case.facts.get("fabric_manager") or {}).get("installed"):
        case.refuse(
            "fabric-manager-on-rack",
            "a Fabric Manager is installed on the compute tray of a GB200 or GB300 rack, where the switches have their own",
            "Stop and remove it yourself: it takes the fabric from the rack's",
            "warning",
        )
    needs_manager = (switches or case.host["nvlink5"]) and not rack
    if not needs_manager and not (rack and case.want["imex_nodes"]):
        if case.want["imex_nodes"]:
            case.refuse(
                "driver-imex",
                "gpu_driver_imex_nodes is set, these GPUs are not of a GB200 or GB300 rack",
                "Take it away: IMEX joins the nodes of one NVLink domain",
            )
        return {}
    table = names.fabric(case.origin, case.system, branch, case.known)
    if table is None:
        case.refuse(
            "fabric-names",
            f"the host needs {'a Fabric Manager' if needs_manager else 'IMEX'} and {case.want['source']} has none of branch {branch} for {case.system}",
            "Set gpu_driver_source: nvidia",
        )
        return {}
    if rack:
        found[table["imex"]] = f"{len(case.want['imex_nodes'])} nodes of one NVLink domain"
        return found
    if case.host["nvlink5"]:
        found[table["manager"]] = "NVLink 5: an InfiniBand device manages the switches"
        if "nvsdm" in table and case.facts.get("machine") == "x86_64":
            found[table["nvsdm"]] = found[table["manager"]]
        subnet = case.known["sources"][case.origin]["subnet_manager"]
        found.update(dict.fromkeys(subnet, "NVLink 5 needs its subnet manager"))
        if not subnet:
            case.refuse(
                "fabric-names",
                f"NVLink 5 needs nvlsm, which {case.want['source']} does not have",
                "Set gpu_driver_source: nvidia",
            )
        lacking = [
            name
            for name in case.known["fabric_modules"]
            if case.host["modules"] is not None and not case.host["modules"].get(name)
        ]
        if lacking:
            kernel = (case.facts.get("kernel") or {}).get("release")
            case.refuse(
                "fabric-modules",
                f"NVLink 5 needs the kernel modules {', '.join(lacking)}, kernel {kernel} does not have them",
                f"Install linux-modules-extra-{kernel}" if case.family == "ubuntu" else "Boot a kernel that has them",
            )
    else:
        found[table["manager"]] = f"{switches} NVSwitches"
        if "nscq" in table:
            found[table["nscq"]] = f"{switches} NVSwitches"
    return found


def _exact(
    case: Case, wanted: Sequence[str], extra: Mapping[str, str], version: Optional[str], branch: str
) -> Dict[str, Optional[str]]:
    """Every package with the version to install."""
    everything = [*wanted, *extra]
    if case.host["available"] is None or version is None:
        return dict.fromkeys(everything)
    found: Dict[str, Optional[str]] = {}
    lacking: Dict[str, str] = {}
    kept = _kept(case, everything, version)
    for name in everything:
        offered = [item["version"] for item in case.candidates(name)]
        exact = kept.get(name) or _fitting(name, offered, version, case)
        if exact:
            found[name] = exact
        else:
            lacking[name] = ", ".join(offered[:6]) or "none"
    for fabric, group in ((False, wanted), (True, list(extra))):
        _not_offered(case, {name: lacking[name] for name in group if name in lacking}, version, branch, fabric)
    for name in case.persistence(branch) if case.want["persistence"] else []:
        exact = kept.get(name) or _fitting(name, [item["version"] for item in case.candidates(name)], version, case)
        if exact:
            found[name] = exact
    found.update(_pinning(case, kept, version, branch))
    return found


def _pins(case: Case, version: str, branch: str) -> List[str]:
    """Names of NVIDIA's pinning packages for a driver, the closest first; `*` for both gives a glob of all."""
    patterns = case.known["sources"]["nvidia"]["pinning"] if case.origin == "nvidia" else []
    return [pattern.format(version=version, branch=branch) for pattern in patterns]


def _pinning(case: Case, kept: Mapping[str, str], version: str, branch: str) -> Dict[str, Optional[str]]:
    """The pinning package: beside a driver that stays, one that fits stays, whichever it is."""
    fitting = _pins(case, names.upstream(version), branch)
    for name in fitting:
        if name in kept:
            return {name: kept[name]}
    for name in fitting:
        if case.candidates(name):
            return {name: str(case.candidates(name)[0]["version"])}
    return {}


def _former_pins(case: Case, plan: DriverPlan) -> List[str]:
    """Pinning packages that go: there is one at a time, they conflict; where none comes, those for another driver."""
    if case.host["available"] is None:
        return []  # which one comes is not known yet
    there = {*case.host["packages"], *case.host["unsettled"]}.difference(plan.packages)
    found = [name for name in sorted(there) if names.matches(name, _pins(case, "*", "*"))]
    fitting = _pins(case, plan.version, plan.branch)
    return found if set(fitting) & set(plan.packages) else [name for name in found if name not in fitting]


def _kept(case: Case, everything: Sequence[str], version: str) -> Dict[str, str]:
    """What is installed, name to version, where all of it already is of the driver wanted; nothing otherwise.

    Another build of the same driver, or a newer release of what is numbered by itself (nvlsm, infiniband-diags, nvidia-persistenced),
    is no reason to take a host out of service; who wants a build names its whole version.
    """
    there = {name: str(item["version"]) for name, item in case.host["packages"].items()}
    for name in everything:
        fits = version in (there.get(name), names.upstream(there.get(name)))
        of_kernel = name.startswith("linux-modules-nvidia-")  # its version is the kernel's
        if name not in there or not (fits or of_kernel or not names.of_driver(name, case.known)):
            return {}
    return there


def _moved(
    case: Case, packages: Mapping[str, Optional[str]], version: Optional[str], kind: Optional[str]
) -> Dict[str, Optional[str]]:
    """Other parts of the driver that are installed in another version: apt leaves them where a dependency says >=, as on the
    way back to an older driver, and cuInit returns 803 then. Those that dpkg left half done, too, in whatever version: one that it
    deconfigured to bring another is as it was, and apt finds no way while it is held."""
    found: Dict[str, Optional[str]] = {}
    there = {
        **dict.fromkeys(case.host["unsettled"], ""),
        **{n: item["version"] for n, item in case.host["packages"].items()},
    }
    for name, have in there.items() if case.host["available"] is not None and version else []:
        other = names.kind_of(name, case.known) not in (None, kind) or name.startswith("linux-modules-nvidia-")
        same = names.upstream(have) == names.upstream(str(version))
        if name in packages or other or same or not names.of_driver(name, case.known):
            continue
        exact = _fitting(name, [item["version"] for item in case.candidates(name)], str(version), case)
        if exact:
            found[name] = exact
    return found


def _fitting(name: str, offered: Sequence[str], version: str, case: Case) -> Optional[str]:
    """The version of a package that goes with a driver: the same; of what is numbered by itself the nearest, else the newest."""
    same = [item for item in offered if version in (item, names.upstream(item))]
    if same:
        return same[0]
    by_itself = names.matches(name, case.known["own_versions"]) or not names.of_driver(name, case.known)
    if not by_itself and not name.startswith("linux-modules-nvidia-"):  # its version is the kernel's
        return None
    return next((item for item in offered if names.branch(item) == names.branch(version)), next(iter(offered), None))


def _not_offered(case: Case, lacking: Mapping[str, str], version: str, branch: str, fabric: bool) -> None:
    if not lacking:
        return
    fix = f"Choose a version that every package has: {', '.join(case.offers(branch)[:6]) or 'none is offered'}"
    first = case.known["sources"]["nvidia"]["first_branch"].get(case.system)
    if case.origin == "nvidia" and first and names.numbers(branch) < names.numbers(first):
        fix += f". NVIDIA's repository for {case.system} began with branch {first}"
    told = "; ".join(f"{name} {version} is not offered ({have} is)" for name, have in lacking.items())
    if fabric:
        told += ", and it has to be of exactly the driver's version"
    case.refuse("fabric-version" if fabric else "driver-not-offered", told, fix)


def _headers(case: Case, plan: DriverPlan) -> None:
    """Headers for every kernel that can be booted, or DKMS builds for none of them and the GPU is gone after the next boot."""
    if plan.secure_boot == "signed":
        return
    pattern = case.known["headers"][case.family]
    for release, entry in sorted(case.host["kernels"].items()):
        name = pattern.format(kernel=release)
        if entry.get("headers"):
            continue
        if case.host["available"] is not None and not case.host["available"].get(name):
            case.refuse(
                "kernel-headers",
                f"kernel {release} is installed, its headers are not, and no source offers {name}",
                f"Remove kernel {release} yourself if it is not booted any more, or install a kernel whose headers are offered; the role never changes a kernel",
            )
        plan.headers.append(name)


def _options(case: Case, plan: DriverPlan) -> None:
    """Options of the module nvidia, by their names in /proc/driver/nvidia/params."""
    if not case.want["gpu_firmware"]:
        plan.options["EnableGpuFirmware"] = "0"
    if any("imex" in name for name in plan.because):
        plan.options["CreateImexChannel0"] = "1"  # the one channel that processes of one user need


def _anew(case: Case, plan: DriverPlan) -> List[str]:
    """Options that the loaded driver does not have: it takes them when it is loaded, not before."""
    have, found = case.host["params"], []
    for name, value in sorted(plan.options.items()):
        if have.get(name, value) != value:
            found.append(f"the loaded driver has {name} {have[name]}, planned is {value}")
    if "EnableGpuFirmware" not in plan.options and have.get("EnableGpuFirmware") == "0":
        if "NVreg_EnableGpuFirmware=0" in ((case.host["files"] or {}).get(PATHS["modprobe"]) or ""):
            found.append("the loaded driver has EnableGpuFirmware 0, planned is its default")
        else:
            case.refuse(
                "driver-gsp",
                "the loaded driver runs without the GPU's firmware (EnableGpuFirmware 0), and no file of the role says so",
                "Reboot, if gpu_driver_gpu_firmware was false before; otherwise look for NVreg_EnableGpuFirmware in /etc/modprobe.d and "
                "on the kernel's command line",
                "warning",
            )
    return found


def _surroundings(case: Case, plan: DriverPlan) -> None:
    known, installed = case.known, case.host["packages"]
    others = [
        name
        for name in sorted({*installed, *case.host["unsettled"]})
        if name not in plan.packages and names.kind_of(name, known) not in (None, plan.modules)
    ]
    coming = [name for name in plan.packages if names.kind_of(name, known) == plan.modules and name not in installed]
    going, pins = others if coming else [], _former_pins(case, plan)
    plan.may_remove, plan.removes = [*others, *pins], [*going, *pins]
    plan.because.update(dict.fromkeys(pins, "it pins another version"))
    held = [name for name, item in sorted(installed.items()) if item.get("hold")]
    plan.unhold = [name for name in held if name in plan.packages and installed[name]["version"] != plan.packages[name]]
    there = {*installed, *case.host["unsettled"]}  # what is finished is there afterwards, and apt says nothing of it
    parts = {name for name in there if names.of_driver(name, known) and name not in plan.may_remove}
    plan.holds = sorted(parts.union(plan.packages))
    plan.blocklist = names.blocklist([*known["globs"], *driver_beside.globs(case)])
    if case.host["nvlink5"]:
        plan.load = list(known["fabric_modules"])
    loaded = names.upstream(str(case.driver.get("loaded") or ""))
    same = loaded == plan.version and case.driver.get("flavour") in (plan.modules, None)
    lacks = _lacks(case, plan)
    complete = set(lacks) <= set(plan.beside) and not going
    plan.changes = not (complete and case.driver.get("installed") in (plan.version, None))
    plan.beside_changes = bool(set(lacks) & set(plan.beside))
    if loaded and not same:
        kind = case.driver.get("flavour")
        plan.reboot_because.append(f"driver {loaded} ({kind}) is loaded, planned is {plan.version} ({plan.modules})")
    elif case.driver.get("installed") and loaded and case.driver["installed"] != loaded:
        plan.reboot_because.append(f"driver {loaded} is loaded, {case.driver['installed']} is installed")
    elif loaded and not plan.changes:
        plan.reboot_because += _anew(case, plan)
    if case.facts.get("nouveau"):
        plan.reboot_because.append("nouveau holds the GPUs")
    kernels, running = case.host["kernels"], case.host["kernel"]
    if not loaded and running and kernels and running not in kernels:
        plan.reboot_because.append(
            f"kernel {running} runs and is not installed any more, so that no module is built for it"
        )
    plan.builds = _builds(case, plan)
    # Once each initramfs has our file, nouveau stays loaded until the reboot, and nothing more is to be rebuilt.
    ours = bool(kernels) and all((entry.get("initrd") or {}).get("ours") for entry in kernels.values())
    plan.initramfs = bool((case.facts.get("nouveau") and not ours) or case.host["nouveau_in_initramfs"])
    plan.reboot = bool(plan.reboot_because)


def _lacks(case: Case, plan: DriverPlan) -> List[str]:
    installed, known = case.host["packages"], case.known
    return [
        name for name, version in plan.packages.items() if not _there(name, version, installed.get(name), plan, known)
    ]


def _builds(case: Case, plan: DriverPlan) -> List[str]:
    """Kernels that DKMS has no whole module for yet; all where nobody looked."""
    if plan.secure_boot == "signed" or not any("dkms" in name for name in plan.packages):
        return []
    return sorted(set(case.host["kernels"]) - driver_state.built(case.host["dkms"] or "", plan.version))


def _there(
    name: str, version: Optional[str], have: Optional[Mapping[str, Any]], plan: DriverPlan, known: Mapping[str, Any]
) -> bool:
    """Whether a package is as planned; before the lists are read that is by the driver's version alone."""
    if have is None or version is not None:
        return have is not None and have["version"] == version
    return not names.of_driver(name, known) or names.upstream(have["version"]) == plan.version


def _disturbs(case: Case, plan: DriverPlan) -> None:
    """Services to stop and the reboot, each only with consent."""
    plan.starts = _left(case)
    changing = plan.changes or (plan.reboot and case.want["reboot"] is not False)
    of_dcgm = _dcgm_anew(case, plan)
    nodes = not changing and _nodes_change(case, plan)
    if not changing and not nodes and not of_dcgm:
        return
    known, units = case.known, case.host["units"]
    globs = known["stop_order"]
    if not changing:
        parts = [*(f"{name}*" for name in (*SERVING, "vllm-agent@")), IMEX] if nodes else []
        globs = [glob for glob in globs if names.matches(glob, parts) or glob in of_dcgm]
    plan.stop = [unit for glob in globs for unit in sorted(fnmatch.filter(units, glob))]
    gpus = (case.facts.get("gpus") or []) if changing else []
    mig = [str(gpu.get("index")) for gpu in gpus if (gpu.get("mig") or {}).get("current") == "Enabled"]
    if mig and not case.want["mig_layout"]:
        case.refuse(
            "mig-lost",
            f"GPU {', '.join(mig)} has MIG on; its instances are gone after the driver is loaded anew or the host reboots",
            "Describe them in gpu_driver_mig_layout, so that they are made anew, or switch MIG off",
        )
    serving = [unit for unit in plan.stop if unit.startswith(SERVING)]
    what = "the driver" if changing else "the nodes of its NVLink domain" if nodes else "DCGM"
    if serving and not case.want["in_service"]:
        case.refuse(
            "driver-serving",
            f"{', '.join(serving)} serves on this host, and this playbook never changes {what} under a running service",
            "Use playbooks/driver.yml, which takes one replica at a time out of service and proves it afterwards",
        )
    elif plan.stop and case.want["stop_services"] is not True:
        runs = f"{', '.join(serving)} serves" if serving else f"{', '.join(plan.stop)} runs"
        case.refuse(
            "stop-consent",
            f"{runs} on this host, and {what} cannot change under it",
            "Set gpu_driver_stop_services: true and use playbooks/driver.yml, which takes one host at a time out of service",
        )
    # Whose a process is cannot be told while services of ours run; what is left without them is somebody else's.
    strange = [
        f"GPU {gpu.get('index')} {item.get('name')} (pid {item.get('pid')})"
        for gpu in ([] if serving else gpus)
        for item in gpu.get("processes") or []
        if item.get("unit") not in plan.stop
    ]
    if strange:
        case.refuse(
            "driver-in-use",
            f"processes of no service that the role knows use the GPUs: {', '.join(strange)}; a reboot ends them, another driver fails them",
            "End them first, or choose another time",
            "warning",
        )
    if plan.reboot and case.want["reboot"] is None:
        case.refuse(
            "reboot-consent",
            f"it takes a reboot: {'; '.join(plan.reboot_because)}",
            "Set gpu_driver_reboot: true to let the role reboot this host, or false to leave it to you; until then nothing is changed",
        )


def _left(case: Case) -> List[str]:
    """What an earlier run stopped and did not start again."""
    return [unit for unit in (case.host["mark"] or {}).get("stopped") or [] if unit not in case.host["units"]]


def _nodes_change(case: Case, plan: DriverPlan) -> bool:
    """Whether IMEX runs and has other nodes: it reads them when it starts, and what communicates through it ends with it."""
    return IMEX in plan.fabric and IMEX in case.host["units"] and PATHS["imex"] in plan.writes


def _dcgm_anew(case: Case, plan: DriverPlan) -> List[str]:
    """Units of DCGM that run with what changes, so that they have to start anew."""
    if not case.want["dcgm"]:
        return []
    entry, lacks = case.known["dcgm"], _lacks(case, plan)
    engine, exporter = entry["units"]["engine"], entry["units"]["exporter"]
    packages = any(names.matches(name, entry["globs"]) for name in lacks)
    found = [engine] if packages or PATHS["dcgm_engine"] in plan.writes else []
    if case.want["dcgm_exporter"] and (found or entry["exporter"] in lacks or PATHS["dcgm_exporter"] in plan.writes):
        found.append(exporter)
    return [unit for unit in found if unit in case.host["units"]]


def _files(case: Case, plan: DriverPlan) -> None:
    sources, host = case.known["sources"], None
    text = driver_sources.text(case)
    if text is not None:
        plan.files["source"] = text
    plan.gone = driver_sources.gone(case, text)
    if case.origin == "distribution":
        uris = [
            item["uri"]
            for item in case.host["sources"]
            if any(part in item["uri"] for part in sources["nvidia"]["known_by"])
        ]
        host = uris[0].split("//", 1)[-1].split("/", 1)[0] if uris else None
    records = names.pins(
        {name: version for name, version in plan.packages.items() if name not in plan.moves},
        source=case.origin,
        version=plan.version,
        known=case.known,
        family=case.family,
        nvidia_host=host,
    )
    records += driver_beside.pins(case, plan.packages)
    plan.files["preferences"] = names.preferences_text(records)
    plan.files["blocklist"] = names.blocklist_text(plan.blocklist)
    if any("fabricmanager" in name for name in plan.because):
        plan.fabric.append("nvidia-fabricmanager.service")
    if any("imex" in name for name in plan.because):
        plan.fabric.append(IMEX)
        plan.files["imex"] = "".join(f"{address}\n" for address in case.want["imex_nodes"])
    plan.files["modprobe"] = names.modprobe_text(plan.options)
    # What the fabric needs first, then the driver itself.
    plan.files["modules"] = names.modules_text([*plan.load, "nvidia"])
    if set(case.persistence(plan.branch)) & set(plan.packages):
        plan.files["persistenced"] = names.persistenced_text(case.want["root"])
    if case.want["dcgm"]:
        plan.files["dcgm_engine"] = names.dcgm_engine_text()
    if case.want["dcgm"] and case.want["dcgm_exporter"]:
        plan.files["dcgm_exporter"] = names.dcgm_exporter_text(case.known["dcgm"]["address"], case.want["dcgm_listen"])
    plan.files.update(dict.fromkeys(WAITING, names.waiting_text(UNPROVED)))
    there = case.host["files"]
    if there is not None:
        plan.writes = [PATHS[kind] for kind, text_ in plan.files.items() if there.get(PATHS[kind]) != text_]


def _preinstalled(case: Case) -> Choice:
    """Nothing is installed; what is there has to be right."""
    driver, want = case.driver, case.want
    beside = [f"gpu_driver_{name}" for name in ("dcgm", "dcgm_exporter", "toolkit") if want[name]]
    if beside:
        case.refuse(
            "driver-source",
            f"{' and '.join(beside)} is set, and gpu_driver_source preinstalled installs nothing",
            "Let the role install (gpu_driver_source: nvidia), or install these yourself and take the variable away",
        )
    loaded = str(driver.get("loaded") or "")
    if not loaded:
        case.refuse(
            "driver-not-loaded",
            "no driver is loaded, and gpu_driver_source is preinstalled",
            "Load it, or let the role install one: gpu_driver_source: nvidia",
        )
        return Choice(None, case.findings)
    if want["version"] and names.upstream(str(want["version"])) != loaded:
        case.refuse(
            "driver-version",
            f"driver {loaded} is loaded, gpu_driver_version is {want['version']}",
            f"Set gpu_driver_version: {loaded}, or install that version",
        )
    fault = driver_state.mismatch(loaded, driver.get("installed"), case.where)
    case.findings += [fault] if fault else []
    branch = names.branch(loaded)
    want["modules"] = driver.get("flavour") or want["modules"]
    kind, _ = driver_checks.modules_of(case, branch)
    driver_checks.wheels(case, loaded)
    manager = (case.facts.get("fabric_manager") or {}).get("installed")
    if (case.facts.get("nvswitch") or {}).get("devices") and not manager:
        case.refuse(
            "fabric-version",
            "NVSwitches are there and no Fabric Manager: cuInit returns 802",
            f"Install the Fabric Manager {loaded}",
        )
    if manager and manager != loaded:
        case.refuse(
            "fabric-version",
            f"Fabric Manager {manager} is installed, driver {loaded} is loaded",
            f"Install the Fabric Manager {loaded}",
        )
    plan = DriverPlan(case.system, "preinstalled", branch, loaded, str(kind), "as it is", changes=False)
    plan.starts = _left(case)
    return Choice(None if case.refused else plan, case.findings)
