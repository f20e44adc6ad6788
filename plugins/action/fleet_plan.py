"""Action plugin of gpu_fleet.vllm.fleet_plan: see plugins/modules/fleet_plan.py for its documentation."""

from __future__ import annotations

from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import plan
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.findings import report
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils.inventory import Inventory, read, sorted_out


class ActionModule(ActionBase):
    """Runs on the controller and opens no connection."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _VALID_ARGS = frozenset(("ask_hub",))

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        services, fleet, found = read(
            Inventory(task_vars["hostvars"], task_vars["groups"]),
            folder=self._loader.get_basedir(),
            ask_hub=boolean(self._task.args.get("ask_hub", False)),
        )
        plan_of_fleet, mistakes = plan.build(services, fleet)
        mistakes += fleet.launch.faults
        wrong, notes = sorted_out(found, mistakes)
        if wrong:
            # The message alone: Ansible prints every value of a failed result, and twice the same is a wall.
            result.update(failed=True, msg=report(wrong))
        else:
            summary = plan.summary(plan_of_fleet) + [f"note: {note}" for note in notes]
            result.update(changed=False, ansible_facts={"fleet_plan": plan_of_fleet}, summary=summary)
        return result
