"""Filters that judge a host's driver, on the controller."""

from __future__ import annotations

DOCUMENTATION = """
name: driver_plan
short_description: Say which driver a host gets, with every package, and what stands against it
description:
  - Takes what P(gpu_fleet.vllm.gpu_facts#module) and P(gpu_fleet.vllm.driver_facts#module) returned, and what apt offers and would
    do as P(gpu_fleet.vllm.driver_apt#module) returned it, and judges it by data/driver.yml and data/versions.yml.
positional: settings
options:
  _input:
    description: >-
      C(gpu) and C(host), the results of both modules; C(available) and C(simulation), of the third; both are left out before it was
      asked.
    type: dict
    required: true
  settings:
    description: C(host), its name in messages, and C(want), the variables of role gpu_driver without their prefix.
    type: dict
    required: true
"""

EXAMPLES = """
- name: Plan the driver
  ansible.builtin.set_fact:
    planned: "{{ {'gpu': gpu, 'host': surroundings} | gpu_fleet.vllm.driver_plan({'host': inventory_hostname, 'want': {}}) }}"
"""

RETURN = """
_value:
  description: >-
    C(plan) (see module_utils/driver_case.py, DriverPlan), null where something stands against one; C(shown), the same also where only
    consent is missing; C(changes), what apt would do, by
    C(install), C(upgrade), C(remove) and C(along) (dependencies that the plan does not name); C(repository), the source that apt needs
    with its key; C(satisfied), whether every package that is wanted is there; C(stops) and C(notes), lists of text; C(lines), the
    plan as text; C(works), whether packages, modules or services change; C(changes_driver), whether
    another driver comes or is loaded, which has to be proved before anything serves; C(disturbs), whether nothing may serve
    meanwhile; C(waits), whether everything is done but a reboot that is left to the operator; C(files), what the role
    writes; C(mark), what the next run has to know if this one is ended; C(findings).
  type: dict
"""

from ansible.module_utils.parsing.convert_bool import boolean  # noqa: E402
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data  # noqa: E402
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils.later import Module  # noqa: E402

driver_apt = Module("driver_apt")
driver_plan = Module("driver_plan")
driver_proof = Module("driver_proof")
driver_show = Module("driver_show")
driver_sources = Module("driver_sources")
driver_state = Module("driver_state")
names = Module("driver_packages")
turns = Module("driver_turns")
driver_case = Module("driver_case")

# Nothing can be said of a version before the lists of packages are read; it is asked again then.
LATER = {"driver-version"}
# What only lacks a yes: the plan is whole, and shown before it is refused.
UNASKED = {"reboot-consent", "stop-consent", "driver-serving"}
# Null asks, see WANT in driver_case.py; on the command line a word stands for true or false.
CONSENT = ("reboot", "stop_services", "replace_sources")


def _consent(value):
    """true, false or None. A template that decides on null itself gives an empty text for it before ansible-core 2.19."""
    return None if value is None or value == "" else boolean(value)


def plan_driver(look, settings):
    """See DOCUMENTATION."""
    known, versions = data.load("driver"), data.load("versions")
    gpu, name = _gpu(look["gpu"], look["host"]), settings["host"]
    want = {**settings["want"], **{key: _consent(settings["want"].get(key)) for key in CONSENT}}
    available = look.get("available")
    host = _host(look["host"], available)
    choice = driver_plan.choose(gpu, want, host, known, versions=versions, where=name)
    found = list(choice.findings)
    plan, changes = choice.plan, None
    if {finding.id for finding in found if finding.severity == "error"} <= UNASKED and not plan:
        granted = {**want, "reboot": True, "stop_services": True, "in_service": True}
        plan = driver_plan.choose(gpu, granted, host, known, versions=versions, where=name).plan
    if plan and look.get("simulation") is not None:
        simulation = driver_apt.read(look["simulation"])
        installed = {package: item["version"] for package, item in host["packages"].items()}
        against = driver_apt.compare(
            simulation,
            {**plan.packages, **dict.fromkeys(plan.headers)},
            version=plan.version,
            known=known,
            removes=tuple(plan.may_remove),
            installed=installed,
            finishes=plan.finishes,
            host=name,
        )
        found += [finding for finding in against if not _named(finding, simulation, plan)]
        changes = driver_show.changes(simulation, plan)
        # Libraries that nobody named come as dependencies, and belong to the driver all the same.
        along = [package for package in changes["along"] if names.of_driver(package, known)]
        plan.holds = sorted({*plan.holds, *along})
    errors = [finding for finding in found if finding.severity == "error"]
    if (
        available is None
        and {finding.id for finding in errors} <= LATER | UNASKED
        and want.get("source") != "preinstalled"
    ):
        errors = []
    case = driver_case.Case(gpu, want, host, known, versions=versions, where=name)
    waits = bool(plan and plan.reboot and want.get("reboot") is False)
    return {
        "plan": plan.as_dict() if plan and choice.plan and not errors else None,
        "shown": plan.as_dict() if plan else None,
        "changes": changes,
        "repository": driver_sources.repository(case),
        "source": driver_sources.text(case),
        "gone": driver_sources.gone(case, driver_sources.text(case)),
        "paths": driver_case.PATHS,
        "files": [
            {"path": driver_case.PATHS[kind], "content": text} for kind, text in (plan.files if plan else {}).items()
        ],
        "mark": _mark(plan, changes, host) if plan else None,
        "works": bool(plan and _works(plan, changes, waits)),
        "waits": bool(waits and not plan.changes),
        "changes_driver": bool(plan and (plan.changes or plan.reboot)),
        "disturbs": bool(plan and _disturbs(plan, known, want)),
        "satisfied": bool(plan and _satisfied(plan, host, known)),
        "stops": [str(finding) for finding in errors],
        "notes": [str(finding) for finding in found if finding.severity != "error"],
        "findings": [finding.as_dict() for finding in found],
        "lines": driver_show.lines(plan, changes, host, waits=waits) if plan else [],
    }


def _gpu(facts, surroundings):
    """What module gpu_facts returned, with the installed version by DKMS where modinfo did not know it."""
    driver = driver_state.with_installed(facts["driver"], surroundings["dkms"], surroundings["kernel"])
    return {**facts, "driver": driver}


def _host(told, available):
    """What module driver_facts returned, as driver_plan wants it."""
    host = {key: told[key] for key in driver_case.HOST if key in told}
    offered = available or {}
    host["available"] = available
    host["packages"] = {
        name: {**item, "origin": _origin(offered.get(name, ()), item["version"])}
        for name, item in told["packages"].items()
    }
    initrds = [item.get("initrd") or {} for item in told["kernels"].values()]
    host["nouveau_in_initramfs"] = any(item.get("nouveau") and not item.get("ours") for item in initrds)
    return host


def _origin(offered, version):
    return next((item["origin"] for item in offered if item["version"] == version), None)


def _named(finding, simulation, plan):
    """What the headers of a kernel need beside them (linux-headers-6.1.0-18-common) comes along and changes no kernel."""
    return finding.id == "apt-kernel" and any(
        change.name.startswith("linux-headers-") and change.old is None and str(change) in finding.message
        for change in simulation.changes
        if plan.headers
    )


def _mark(plan, changes, host):
    """What is under way, for the next run in case this one is ended: packages that may be half done, units that are down."""
    coming = {} if changes is None else {**changes["install"], **changes["along"]}
    coming.update({} if changes is None else {name: pair[1] for name, pair in changes["upgrade"].items()})
    earlier = (host.get("mark") or {}).get("packages") or {}
    gone = {} if changes is None else dict.fromkeys(changes["remove"])
    return {
        "version": plan.version,
        "packages": {**earlier, **gone, **coming},
        "stopped": [*plan.stop, *(unit for unit in plan.starts if unit not in plan.stop)],
    }


def _works(plan, changes, waits):
    """Whether packages, modules or services of the host change, files of the role's apart; nothing starts while a reboot is waited for."""
    of_apt = any(changes.values()) if changes else False
    return bool(
        of_apt
        or plan.changes
        or plan.finishes
        or plan.builds
        or plan.initramfs
        or plan.stop
        or (plan.starts and not waits)
        or (plan.reboot and not waits)
        or plan.gone
    )


def _disturbs(plan, known, want):
    """Whether nothing may serve meanwhile; DCGM alone may start anew beside what serves."""
    beside = set(known["dcgm"]["units"].values())
    return plan.changes or set(plan.stop) - beside or (plan.reboot and want.get("reboot"))


def _satisfied(plan, host, known):
    """Whether all packages are there in their version, as far as it is known without apt's lists."""
    there = host["packages"]
    return not plan.finishes and all(
        package in there
        and (not names.of_driver(package, known) or names.upstream(there[package]["version"]) == plan.version)
        for package in [*plan.packages, *plan.headers]
    )


def driver_builds(built, settings):
    """Kernels that the driver is not built for, as text, by the result of module driver_dkms.

    settings are plan, kernels (as module driver_facts returns them) and host.
    """
    plan = settings["plan"]
    wanted = {name: entry for name, entry in settings["kernels"].items() if name in plan["builds"]}
    kernels = {name: {**entry, "headers": True} for name, entry in wanted.items()}  # installed before, or refused
    found = driver_state.dkms_findings(built["status"], version=plan["version"], kernels=kernels, host=settings["host"])
    words = [f"{kernel}: {' / '.join(lines)}" for kernel, lines in sorted(built["words"].items())]
    return [str(finding) for finding in found] + (words if found else [])


def prove_driver(facts, settings):
    """What is not as planned on a host, as text.

    settings are cuda (the result of module cuda_init), plan, surroundings (the result of module driver_facts) and host.
    """
    facts = _gpu(facts, settings["surroundings"])
    found = driver_proof.findings(facts, settings["cuda"], settings["plan"], data.load("driver"), settings["host"])
    if settings["plan"]["source"] != "preinstalled":
        found += driver_proof.fabric(facts, settings["host"])
        found += driver_proof.nouveau(settings["surroundings"]["kernels"], settings["host"], bool(facts.get("nouveau")))
        found += driver_proof.options(settings["plan"], settings["surroundings"].get("params") or {}, settings["host"])
    return [str(finding) for finding in found]


def driver_turns(plan, hosts):
    """In which turns the hosts of a run get another driver: hosts, replicas, and those of the hosts that the run lacks (absent)."""
    return [{**turn, "absent": turns.absent(turn, hosts)} for turn in turns.turns(plan, hosts)]


def driver_outages(plan, settings):
    """Services that a turn would leave without any server; settings are turn, and active, host to names of active units."""
    active = {
        host: [unit[len("vllm@") : -len(".service")] for unit in units if unit.startswith("vllm@")]
        for host, units in settings["active"].items()
    }
    return turns.outages(plan, settings["turn"], active)


def driver_waiting(plan, settings):
    """Replicas of a turn's services that are out of service already; settings are turn, and waiting, hosts that wait for a reboot."""
    return turns.waiting(plan, settings["turn"], settings["waiting"])


class FilterModule:
    """Filters of this file."""

    def filters(self):
        return {
            "driver_plan": plan_driver,
            "driver_builds": driver_builds,
            "driver_proof": prove_driver,
            "driver_turns": driver_turns,
            "driver_outages": driver_outages,
            "driver_waiting": driver_waiting,
        }
