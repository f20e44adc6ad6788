"""Action plugin of gpu_fleet.vllm.reach: while a host connects to its peers, the controller connects to the host, as a stranger."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ansible.plugins.action import ActionBase
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import reach

# Silence is what is hoped for, and takes all of its time in every run: one SYN and its repetition after a second.
SILENCE = 1.5


class ActionModule(ActionBase):
    """See plugins/modules/reach.py for the documentation."""

    TRANSFERS_FILES = False

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        strange = arguments.pop("strange", None) or []
        if arguments.get("state") != "connected":
            return {**result, **self._module(arguments, task_vars)}
        with ThreadPoolExecutor(1) as beside:
            seconds = min(float(arguments.get("seconds", SILENCE)), SILENCE)
            met = beside.submit(reach.connect_all, strange, None, seconds, False)
            mine = self._module(arguments, task_vars) if arguments.get("targets") else {"changed": False, "results": []}
            return {**result, **mine, "strange": met.result()}

    def _module(self, arguments, task_vars):
        return self._execute_module(module_name="gpu_fleet.vllm.reach", module_args=arguments, task_vars=task_vars)
