"""Action plugin of gpu_fleet.vllm.instance: lets the hosts of a replica know of each other's failure.

Ansible works on several hosts in processes of their own; a worker whose head died before the two ever met would wait
until its time is up. While it waits, each process looks for a mark that the process of another host left in the run's
own temporary folder on the controller.
"""

from __future__ import annotations

import pathlib
import time

from ansible import constants
from ansible.plugins.action import ActionBase


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
            mark.write_text(", ".join(gone))
        timeout = int(arguments.get("timeout") or 1800)
        deadline = time.monotonic() + timeout
        while not mark.exists() and time.monotonic() < deadline:
            looked = self._module(arguments, task_vars)
            if looked.get("failed") or looked.get("unreachable"):
                mark.write_text(host)
                return looked
            if not looked.get("pending"):
                return looked
        if mark.exists():
            reason = f"{mark.read_text()} failed, whose message says why; all ranks of a replica start together"
        else:
            reason = f"it was not ready within {timeout} s (vllm_service_start_timeout)"
            mark.write_text(host)
        self._module({"instance": instance, "state": "stopped"}, task_vars)
        return {"failed": True, "msg": f"{instance} did not start on {host}: {reason}. It was stopped"}
