#!/usr/bin/python
# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Install the packages of a driver's plan, and nothing that it does not name."""

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_install
short_description: Have apt do what a driver's plan says, and nothing else
version_added: 0.1.0
description:
  - Has apt say once more what it would do, with the host's own sources and pins, and goes on only when that is what was planned. Then
    installs, and compares what dpkg has afterwards with the plan again.
  - Keeps configuration files that somebody changed, restarts no service by needrestart, waits for locks of others, writes what apt and
    dpkg say to /var/log/gpu-fleet-driver.log.
author: The gpu_fleet authors (@gpu-fleet)
options:
  steps:
    description: Arguments of C(apt-get install), one list a step, such as headers before the driver.
    type: list
    elements: list
    required: true
  expected:
    description: >-
      What was planned: C(install), C(along) and C(remove), name to version, C(upgrade), name to old and new version.
    type: dict
    required: true
  update:
    description: Whether to read the lists of packages first.
    type: bool
    default: true
  compare_only:
    description: >-
      Whether to stop after apt has said what it would do: nothing is installed, so that what is refused is refused before services
      stop.
    type: bool
    default: false
  finish:
    description: Whether something is to be finished that dpkg left half done. All of it has to be of this plan; apt finishes it.
    type: bool
    default: false
  lock_timeout:
    description: Seconds to wait for locks of apt and dpkg.
    type: int
    default: 600
attributes:
  check_mode: {support: full, description: Says what was planned as what would change.}
  diff_mode: {support: full, description: Shows packages before and after.}
"""

EXAMPLES = r"""
- name: Install the driver
  gpu_fleet.vllm.driver_install:
    steps: [["nvidia-smi=535.261.03-1"]]
    expected: {install: {nvidia-smi: 535.261.03-1}}
"""

RETURN = r"""
done:
  description: "What changed: C(install), C(upgrade) and C(remove)."
  type: dict
  returned: success
log: {description: Where apt's and dpkg's words are., type: str, returned: success}
"""

import socket

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_change, gpu_facts


def main():
    """Compare, do, compare."""
    module = AnsibleModule(
        argument_spec={
            "steps": {"type": "list", "elements": "list", "required": True},
            "expected": {"type": "dict", "required": True},
            "update": {"type": "bool", "default": True},
            "compare_only": {"type": "bool", "default": False},
            "finish": {"type": "bool", "default": False},
            "lock_timeout": {"type": "int", "default": 600},
        },
        supports_check_mode=True,
    )
    told = module.params
    expected = told["expected"]
    planned = {
        "install": {**expected.get("install", {}), **expected.get("along", {})},
        "upgrade": expected.get("upgrade", {}),
        "remove": expected.get("remove", {}),
    }
    if told["compare_only"]:
        if not module.check_mode:
            _compare(module, told, expected)
        module.exit_json(changed=False, done={what: {} for what in planned}, log=driver_change.LOG)
    if module.check_mode:
        module.exit_json(
            changed=any(planned.values()) or told["finish"], done=planned, diff=_diff(planned), log=driver_change.LOG
        )
    done = _change(module, told, expected)
    module.exit_json(changed=any(done.values()) or told["finish"], done=done, diff=_diff(done), log=driver_change.LOG)


def _compare(module, told, expected):
    """Read the lists, have apt say what it would do, and refuse what was not planned; the steps that are something."""
    lock = told["lock_timeout"]
    if told["finish"]:
        driver_change.take_in(lock)  # where that fails, apt fails next, and says why
    if told["update"]:
        status, out = driver_change.update(lock)
        if status:
            _fail(module, "apt-get update failed", out, "No package was changed")
    steps = [step for step in told["steps"] if step]
    would, errors = driver_change.simulated(gpu_facts.command, [argument for step in steps for argument in step])
    strange = driver_change.beyond(would, expected)
    if errors or strange:
        module.fail_json(
            msg=f"{socket.gethostname()}: apt would not do what was planned, no package was changed: {'; '.join(errors + strange)}. "
            "Somebody changed sources, pins or packages meanwhile; run it again and read the new plan"
        )
    return steps


def _change(module, told, expected):
    run, lock = gpu_facts.command, told["lock_timeout"]
    before, half = driver_change.packages(run), driver_change.unsettled(run)
    steps = _compare(module, told, expected)
    for step in steps:
        if (
            len(steps) > 1
        ):  # what apt does with a part alone is compared, too: to mend what is half done it may take another way
            would, errors = driver_change.simulated(run, step)
            strange = driver_change.beyond(would, expected)
            if errors or strange:
                module.fail_json(
                    msg=f"{socket.gethostname()}: apt would not do what was planned with {' '.join(step)} alone: "
                    f"{'; '.join(errors + strange)}. Finish what is half done first (`dpkg --audit`), then run it again"
                )
        status, out = driver_change.install(step, lock)
        if status:
            _fail(
                module,
                "apt-get install failed",
                out,
                "Run it again when that is put right: what is half done is finished then",
            )
    left = sorted(driver_change.unsettled(run) & half)
    if left:
        _complete(module, steps, left, expected, lock)
    done = driver_change.difference(before, driver_change.packages(run))
    strange = driver_change.beyond(driver_change.without(done, half), expected)
    if strange:
        module.fail_json(
            msg=f"{socket.gethostname()}: apt did what was not planned: {'; '.join(strange)}. Read {driver_change.LOG}"
        )
    return done


def _complete(module, steps, left, expected, lock):
    """What was unpacked in part, in the very version that is planned: apt takes it for installed."""
    run = gpu_facts.command
    exact = driver_change.exact(run, steps, expected, left)
    arguments = ["--reinstall", *(f"{name}={version}" for name, version in sorted(exact.items()))]
    would, errors = driver_change.simulated(run, arguments)
    strange = driver_change.beyond(driver_change.without(would, exact), expected)
    if errors or strange:
        module.fail_json(
            msg=f"{socket.gethostname()}: apt would not do what was planned with {' '.join(arguments)}: {'; '.join(errors + strange)}. "
            "Look at `dpkg --audit`"
        )
    status, out = driver_change.install(arguments, lock)
    still = sorted(driver_change.unsettled(run) & set(left))
    if status or still:
        _fail(module, f"{', '.join(still or left)} cannot be completed", out, "Look at `dpkg --audit`")


def _fail(module, what, out, fix):
    lines = [line.strip() for line in out.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("E:", "W:", "dpkg: error", "Error!", "Consult"))] or lines[-3:]
    module.fail_json(
        msg=f"{socket.gethostname()}: {what}: {' / '.join(errors)}. The whole output is in {driver_change.LOG}. {fix}",
        output=lines[-60:],
    )


def _diff(done):
    before = {**done["remove"], **{name: pair[0] for name, pair in done["upgrade"].items()}}
    after = {**done["install"], **{name: pair[1] for name, pair in done["upgrade"].items()}}
    return {
        side: "".join(f"{name} {version or ''}\n" for name, version in sorted(table.items()))
        for side, table in (("before", before), ("after", after))
    }


if __name__ == "__main__":
    main()
