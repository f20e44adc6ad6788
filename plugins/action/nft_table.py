"""Action plugin of gpu_fleet.vllm.nft_table: a new table stays only if the controller can come back over a new connection."""

from __future__ import annotations

import time

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

PAUSE = 1.0  # seconds between two tries to come back

display = Display()


class ActionModule(ActionBase):
    """See plugins/modules/nft_table.py for the documentation."""

    TRANSFERS_FILES = False

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        loaded = self._module(arguments, task_vars)
        trial = loaded.get("on_trial")
        if not trial or loaded.get("failed"):
            return {**result, **loaded}
        return {**result, **self._come_back(arguments, loaded, float(trial), task_vars)}

    def _module(self, arguments, task_vars):
        return self._execute_module(module_name="gpu_fleet.vllm.nft_table", module_args=arguments, task_vars=task_vars)

    def _come_back(self, arguments, loaded, seconds, task_vars):
        """Connect anew and confirm, until it works or the time is up."""
        end = time.monotonic() + seconds
        reason = ""
        while time.monotonic() < end:
            try:
                # An open connection passes the new table whatever it says; only a new one shows anything.
                if self._connection.transport != "local":
                    self._connection.reset()
                confirmed = self._module({**arguments, "confirm": True}, task_vars)
            except AnsibleConnectionFailure as failure:
                reason = str(failure.message)
                display.vv(f"not back yet: {reason}")
                time.sleep(PAUSE)
                continue
            if confirmed.get("failed"):
                return confirmed
            return {**loaded, "on_trial": 0}
        host = task_vars["inventory_hostname"]
        return {
            "failed": True,
            "msg": (
                f"{host}: with the new table no new connection came through within {seconds:g} s ({reason.strip()}). The host has "
                "gone back to the table it had, and its file was not written. Look at firewall_ssh_ports and at what stands between "
                "this controller and the host"
            ),
        }
