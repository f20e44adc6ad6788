"""The e2e tier, all with the real engine: the demo's own stages on a lab of its own, then tests/host/test_demo.py on
what they made; and scenarios of molecule/ that need the demo's wheels and model.

The lab has a third host, `stranger`, that is no part of the fleet. The inventory is a copy of the demo's, so that a
demo that is up is not touched.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from gpu_fleet import demo
from gpu_fleet.steps import ROOT, Runner, Step, StepFailed, undisturbed

LAB_NAME = "e2e"
FOLDER = ROOT / ".cache" / "e2e"
STRANGER = "stranger"
# Of molecule/, each with what its release has besides vLLM.
SCENARIOS: dict[str, tuple[str, ...]] = {"acceptance": (), "many_hosts": (), "ray_cluster": ("ray",), "tuning": ()}


def inventory() -> Path:
    """A fresh copy of the demo's inventory, without what belongs to a running demo."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    ignore = shutil.ignore_patterns("lab.yml", ".secrets", ".lab.yml*")
    return Path(shutil.copytree(demo.INVENTORY, FOLDER / "inventory", ignore=ignore))


def run(runner: Runner) -> None:
    """All of it; the lab is removed whatever happens."""
    remove(runner)
    fleet = demo.Fleet(runner, lab=LAB_NAME, inventory=inventory())
    try:
        demo.prepare(fleet)
        demo.boot(fleet, STRANGER)
        demo.deploy(fleet)
        runner.console.print(demo.times(fleet))
        step = runner.run(
            "e2e tests",
            [
                *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-s", "--tb=short"),
                *("--hosts=ansible://gpu_hosts", f"--ansible-inventory={fleet.inventory}", "tests/host/test_demo.py"),
            ],
            timeout=1500,
            extra={"GPU_FLEET_LAB": LAB_NAME, "GPU_FLEET_INVENTORY": str(fleet.inventory)},
        )
        for measured in re.findall(r"measured: .*", step.text()):
            runner.console.print(f"      {measured}", markup=False)
    except StepFailed:
        pass  # the step has shown what was wrong and counts as failed
    finally:
        remove(runner)


def scenario(runner: Runner, name: str, judge: Callable[[Step], None]) -> None:
    """One scenario of molecule/ with the demo's wheels and model; its lab is removed whatever happens."""
    fleet = demo.Fleet(runner)
    try:
        demo.prepare(fleet)
        for addon in SCENARIOS[name]:
            lock = demo.lock_file(fleet)
            lock = lock.parent / "addons" / f"{addon}-{lock.name}"
            fetch = [sys.executable, "-m", "gpu_fleet.wheelhouse", "fetch", str(lock), "--into", str(fleet.wheels)]
            demo.need(runner.run(f"wheels of {addon}", fetch))
        remove(runner, f"test-{name}")
        extra = {"GPU_FLEET_WHEELS": str(fleet.wheels), "GPU_FLEET_MODEL": str(fleet.model)}
        command = ["molecule", "test", "--scenario-name", name]
        step = runner.run(f"e2e {name}", command, timeout=3600, extra=extra)
        judge(step)
        for measured in re.findall(r"measured: .*", step.text()):
            runner.console.print(f"      {measured}", markup=False)
    except StepFailed:
        pass  # the step has shown what was wrong and counts as failed
    finally:
        remove(runner, f"test-{name}")


def remove(runner: Runner, lab: str = LAB_NAME) -> None:
    with undisturbed():
        runner.run("clean e2e", demo.lab_command("down", lab), timeout=120, quiet=True)
        runner.steps.pop()
