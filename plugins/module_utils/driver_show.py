# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A driver's plan as text: every package that comes, changes or goes, everything that is written, stopped or rebooted.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_apt
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.driver_case import DriverPlan


def changes(simulation: driver_apt.Simulation, plan: DriverPlan) -> Dict[str, Any]:
    """What apt would do: install and along name to version, upgrade name to [old, new], remove name to version."""
    named = {*plan.packages, *plan.headers}
    return {
        "install": {name: version for name, version in simulation.installed.items() if name in named},
        "along": {name: version for name, version in simulation.installed.items() if name not in named},
        "upgrade": {name: list(pair) for name, pair in simulation.upgraded.items()},
        "remove": dict(simulation.removed),
    }


def lines(
    plan: DriverPlan, told: Optional[Mapping[str, Any]], host: Mapping[str, Any], *, waits: bool = False
) -> List[str]:
    """One fact a line; changes that apt would make only where it was asked.

    waits  whether a reboot is due and left to the operator, before which nothing that was stopped starts
    """
    if plan.source == "preinstalled":
        return [f"driver {plan.version} (branch {plan.branch}, {plan.modules} modules) is there and stays as it is"]
    found = [
        f"driver {plan.version} (branch {plan.branch}) of source {plan.source}, {plan.modules} modules: {plan.reason}"
    ]
    found += [f"finish what an earlier run left half done: {name} ({state})" for name, state in plan.finishes.items()]
    if told is not None:
        found += _packages(plan, told)
    held = {name for name, item in host["packages"].items() if item.get("hold")}
    found += [f"hold {name}" for name in plan.holds if name not in held]
    found += [f"build the modules for kernel {kernel}" for kernel in plan.builds]
    if plan.initramfs:
        found.append("rebuild the initramfs of every kernel: nouveau is in it or loaded")
    found += [f"take away {path}" for path in plan.gone]
    found += [f"write {path}" for path in plan.writes]
    again = "by the next run after the reboot" if waits else "afterwards"
    found += [f"stop {unit}, start it again {again}" for unit in plan.stop]
    if waits:
        return found + [f"no reboot, though one is due and left to you: {why}" for why in plan.reboot_because]
    found += [f"start {unit}, which an earlier run stopped" for unit in plan.starts]
    found += [f"reboot: {why}" for why in plan.reboot_because]
    return found if len(found) > 1 else [*found, "nothing changes"]


def _packages(plan: DriverPlan, told: Mapping[str, Any]) -> List[str]:
    why = {name: f" ({reason})" for name, reason in plan.because.items()}
    why.update(dict.fromkeys(plan.headers, " (to build the modules for that kernel)"))
    found = [f"install {name} {version}{why.get(name, '')}" for name, version in sorted(told["install"].items())]
    found += [
        f"change {name} {old} to {new}{why.get(name, '')}" for name, (old, new) in sorted(told["upgrade"].items())
    ]
    found += [
        f"remove {name} {version or ''}".rstrip() + why.get(name, "")
        for name, version in sorted(told["remove"].items())
    ]
    return found + [f"install {name} {version} (they need it)" for name, version in sorted(told["along"].items())]
