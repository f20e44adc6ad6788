"""Action plugin of gpu_fleet.vllm.instance: lets the hosts of a replica know of each other's failure.

Ansible works on several hosts in processes of their own; a worker whose head died before the two ever met would wait
until its time is up. While it waits, each process looks for a mark that the process of another host left in the run's
own temporary folder on the controller.
"""

from __future__ import annotations

import json
import pathlib
import time

from ansible import constants
from ansible.plugins.action import ActionBase

EXPLAIN_SECONDS = 10  # how long a rank whose loss was another one's end gets to say its own cause


class ActionModule(ActionBase):
    """See plugins/modules/instance.py for the documentation."""

    TRANSFERS_FILES = False

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        mark = pathlib.Path(constants.DEFAULT_LOCAL_TMP) / f"{arguments.get('instance')}.failed"
        if arguments.get("state") != "watched" or self._task.check_mode:
            mark.unlink(missing_ok=True)
            return {**result, **self._module(arguments, task_vars)}
        return {**result, **self._watch(arguments, mark, task_vars)}

    def _module(self, arguments, task_vars):
        return self._execute_module(module_name="gpu_fleet.vllm.instance", module_args=arguments, task_vars=task_vars)

    def _watch(self, arguments, mark, task_vars):
        """Look in slices until the unit is ready, has failed, another host has, or the time is up."""
        host, instance = task_vars["inventory_hostname"], arguments["instance"]
        gone = [name for name in arguments.get("hosts") or [] if name not in task_vars["ansible_play_hosts"]]
        if gone:
            self._leave(mark, ", ".join(gone), "")
        timeout = int(arguments.get("timeout") or 1800)
        deadline = time.monotonic() + timeout
        while not mark.exists() and time.monotonic() < deadline:
            looked = self._module(arguments, task_vars)
            if looked.get("failed") or looked.get("unreachable"):
                self._leave(mark, host, looked.get("cause", ""))
                return looked
            if not looked.get("pending"):
                return looked
        other, cause = "", ""
        if mark.exists():
            left = json.loads(mark.read_text())
            other, cause = left["host"], left["cause"]
        else:
            self._leave(mark, host, "")
        # The one that failed first may only have lost this one: then the cause is here, or about to be.
        told = self._module(
            {
                "instance": instance,
                "state": "stopped",
                "explain": arguments.get("invocation") or "",
                "explain_for": EXPLAIN_SECONDS if cause == "peer" else 0,
            },
            task_vars,
        )
        return {"failed": True, "msg": message(instance, host, other, timeout, told)}

    @staticmethod
    def _leave(mark, host, cause):
        """A mark that other hosts' processes never see half written."""
        beside = mark.with_name(f"{mark.name}.{host}.new")
        beside.write_text(json.dumps({"host": host, "cause": cause}))
        beside.rename(mark)


def message(instance, host, other, timeout, told):
    """Why a start was given up on a host: its own cause, if its journal names one, and else where to look.

    other   the host that failed before; '' when the time is up
    told    what the module on the host returned: journal, cause
    """
    own = told.get("cause") == "own"
    if other and not own:
        reason = f"{other} failed, whose message says why; all ranks of a replica start together"
    elif other:
        reason = f"{other} failed, too"
    else:
        reason = f"it was not ready within {timeout} s (vllm_service_start_timeout)"
    said = f"{instance} did not start on {host}: {reason}. It was stopped"
    lines = told.get("journal") or []
    return "\n".join([f"{said}. The journal says:", *lines]) if lines and (own or not other) else said
