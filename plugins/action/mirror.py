"""Action plugin of gpu_fleet.vllm.mirror: see plugins/modules/mirror.py for its documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import mirror, models
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import mirror as fill
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils.inventory import Inventory

SHOWN = 200  # files named in a diff; a fleet may have thousands


class ActionModule(ActionBase):
    """Runs on the controller and opens no connection."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _VALID_ARGS = frozenset(
        (
            "folder",
            "parts",
            "packages",
            "kernels",
            "sources",
            "sign_with",
            "driver_source",
            "driver_repository",
            "driver_keyring",
        )
    )

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        assert task_vars is not None
        try:
            return {**result, **self._run(task_vars)}
        except (mirror.MirrorError, models.ModelError) as error:
            return {**result, "failed": True, "msg": str(error)}
        except OSError as error:
            return {**result, "failed": True, "msg": f"on the controller: {error}"}

    def _run(self, task_vars: dict[str, Any]) -> dict[str, Any]:
        inventory, basedir = Inventory(task_vars["hostvars"], task_vars["groups"]), self._loader.get_basedir()
        wish = self._wish()
        fleet = fill.hosts(inventory, basedir)
        if not fleet:
            raise mirror.MirrorError("the group gpu_hosts is empty: there is nothing to fetch for")
        first = fleet[0].name
        entries = inventory.role_value(first, "model_store", "model_store_models")
        allow_pickle = boolean(inventory.role_value(first, "model_store", "model_store_allow_pickle"))
        mistakes = [item for item in models.judge(entries) if item.severity == "error"]
        if mistakes:
            raise mirror.MirrorError("; ".join(str(item) for item in mistakes))
        run = fill.Mirror(wish, fleet, entries, allow_pickle, basedir)
        run.say = lambda text: Display().display(f"  {text}")
        missing = run.look()
        told: dict[str, Any] = {
            "summary": mirror.summary(
                run.content, missing, models.size, bool(wish.folder) and not self._task.check_mode
            ),
            "notes": run.content.notes,
            "missing": [item.path for item in missing],
            "files": len(run.content.every()),
            "bytes": sum(item.size for item in run.content.every()),
        }
        if self._task.diff:
            lines = [f"{item.path} {models.size(item.size)}\n" for item in missing[:SHOWN]]
            more = [f"and {len(missing) - SHOWN} more\n"] if len(missing) > SHOWN else []
            told["diff"] = {"before": "", "after": "".join(lines + more)}
        if wish.folder is None:
            return {**told, "changed": False, "left_over": []}
        changed = bool(missing) if self._task.check_mode else run.fill(missing)
        return {**told, "changed": changed, "left_over": run.left_over()}

    def _wish(self) -> fill.Wish:
        args = self._task.args
        folder = str(args.get("folder") or "")
        path = Path(folder).expanduser() if folder else None
        if path is not None and not path.is_absolute():
            raise mirror.MirrorError(f"mirror_folder is {folder!r}: write it as an absolute path")
        parts = tuple(args.get("parts") or mirror.PARTS)
        strange = sorted(set(parts) - set(mirror.PARTS))
        if strange:
            raise mirror.MirrorError(f"mirror_parts has {', '.join(strange)}; there are {', '.join(mirror.PARTS)}")
        return fill.Wish(
            path,
            parts,
            [str(name) for name in args.get("packages") or []],
            [str(name) for name in args.get("kernels") or []],
            dict(args.get("sources") or {}),
            str(args.get("sign_with") or ""),
            str(args.get("driver_source") or ""),
            str(args.get("driver_repository") or ""),
            str(args.get("driver_keyring") or ""),
        )
