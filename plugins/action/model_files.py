"""The controller's side of delivering models: where they come from, what a host lacks, and sending that.

For each host: one look, then only the files that are missing or altered (big ones one by one, small ones in one
archive), then one step that checks and swaps. With nothing to do that is a single module call, whatever the number of
models.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.plugins.action import ActionBase
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import models
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import cache, hub, login

MODULE = "gpu_fleet.vllm.model_files"
BUNDLE = ".bundle.tar"
SMALL = 4 << 20  # bytes; starting a transfer costs as long as sending this much
SUMS = "SHA256SUMS"


class ActionModule(ActionBase):
    """See plugins/modules/model_files.py for the documentation."""

    TRANSFERS_FILES = True
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        host = (task_vars or {}).get("inventory_hostname", "?")
        try:
            sources, notes = self._sources()
        except models.ModelError as error:
            raise AnsibleActionFail(f"{error}. {host} was not touched") from error
        except OSError as error:
            raise AnsibleActionFail(f"on the controller: {error}. {host} was not touched") from error
        manifests = {name: manifest for name, (_root, manifest) in sources.items()}
        looked = self._on_the_host("look", manifests, task_vars, owner=login.uid(self))
        if looked.get("failed"):
            return {**result, **looked}
        sent = 0
        if looked["faults"] and not self._task.check_mode:
            for name, staging in looked["staging"].items():
                sent += self._send(host, name, sources[name], looked["need"][name], staging)
            installed = self._on_the_host("install", {name: manifests[name] for name in looked["faults"]}, task_vars)
            if installed.get("failed"):
                return {**result, **installed}
        lines = [fault for faults in looked["faults"].values() for fault in faults]
        return {
            **result,
            "changed": bool(lines),
            "faults": looked["faults"],
            "notes": notes,
            "sent_bytes": sent,
            "digests": {name: _whole(manifest) for name, manifest in manifests.items()},
            "left_over": looked["left_over"],
            "diff": {"before": "".join(f"{line}\n" for line in lines), "after": ""},
        }

    def _sources(self) -> tuple[dict[str, tuple[Path, models.Manifest]], list[str]]:
        """{name: (folder of the controller, manifest)} and what is worth saying. Raises ModelError for what is wrong."""
        found, notes = {}, []
        items = self._task.args.get("models") or []
        # As validate judges them, less what it lets pass: a placeholder is no commit.
        mistakes = models.judge(items, hub.endpoint())
        if mistakes:
            raise models.ModelError("; ".join(str(mistake) for mistake in mistakes))
        for item in items:
            name = str(item["name"])
            root, said, absent = self._source(name, item)
            content = models.choose(name, [*_paths(root), *absent], self._allow_pickle())
            manifest = cache.digests(root, [path for path in content.files if path not in absent]) | absent
            _check_sums(name, root, manifest)
            found[name] = (root, manifest)
            notes += [note for note in dict.fromkeys(said + content.notes) if note not in notes]
        return found, notes

    def _source(self, name: str, item: dict[str, Any]) -> tuple[Path, list[str], models.Manifest]:
        """Folder, notes, and the files that check mode leaves at the hub."""
        if item.get("hub"):
            return hub.fetch(
                name,
                str(item["hub"]),
                str(item.get("revision") or ""),
                self._allow_pickle(),
                look=self._task.check_mode,
            )
        root = Path(str(item["folder"])).expanduser()
        if not root.is_absolute():
            root = Path(self._loader.get_basedir()) / root
        if not root.is_dir():
            raise models.ModelError(f"model {name}: the controller has no folder {root}")
        return root, [], {}

    def _allow_pickle(self) -> bool:
        return str(self._task.args.get("allow_pickle", False)).lower() in ("true", "yes", "1", "on")

    def _on_the_host(
        self, step: str, manifests: dict[str, models.Manifest], task_vars: Any, **more: Any
    ) -> dict[str, Any]:
        arguments = {
            "step": step,
            "models": [{"name": name, "files": manifest} for name, manifest in manifests.items()],
            "path": self._task.args.get("path", "/var/lib/vllm/models"),
            "rehash": self._task.args.get("rehash", False),
            **more,
        }
        answer = self._execute_module(module_name=MODULE, module_args=arguments, task_vars=task_vars)
        answer.pop("invocation", None)  # manifests of many files would bury what matters
        return answer

    def _send(self, host: str, name: str, source: tuple[Path, models.Manifest], need: list[str], staging: str) -> int:
        """Bring files into the staging folder; returns bytes sent. The host checks their digests afterwards."""
        root, manifest = source
        small = [path for path in need if manifest[path]["size"] < SMALL]
        try:
            for path in need:
                if path not in small:
                    self._connection.put_file(os.path.realpath(root / path), f"{staging}/{path}")
            if small:
                with tempfile.NamedTemporaryFile(suffix=".tar") as bundle:
                    _bundle(bundle.name, root, small)
                    self._connection.put_file(bundle.name, f"{staging}/{BUNDLE}")
        except AnsibleError as error:
            wanted = models.size(sum(manifest[path]["size"] for path in need))
            raise AnsibleActionFail(
                f"{host}: model {name} could not be sent to {staging} ({wanted} in all): {error}. "
                "A former model is as it was; what arrived whole is kept for the next run"
            ) from error
        return sum(manifest[path]["size"] for path in need)


def _whole(manifest: models.Manifest) -> str:
    """One digest for a model: of its files' paths and digests."""
    lines = "".join(f"{path} {manifest[path]['sha256']}\n" for path in sorted(manifest))
    return hashlib.sha256(lines.encode()).hexdigest()


def _paths(root: Path) -> list[str]:
    """Files below a folder, links to files followed (a hub's cache is made of them), partial downloads left out."""
    return [
        os.path.relpath(os.path.join(where, name), root)
        for where, _dirs, names in os.walk(root)
        for name in names
        if not name.endswith(".part") and os.path.isfile(os.path.join(where, name))
    ]


def _check_sums(name: str, root: Path, manifest: models.Manifest) -> None:
    """A source that says its own digests has to have them: a copy that was cut short is found before it travels."""
    if SUMS not in manifest:
        return
    for line in (root / SUMS).read_text(encoding="utf-8").splitlines():
        digest, _space, path = line.partition(" ")
        path = path.lstrip(" *")
        if path in manifest and manifest[path]["sha256"] != digest:
            raise models.ModelError(
                f"model {name}: {root / path} is not what {SUMS} beside it says; fetch or prepare it again"
            )


def _bundle(target: str, root: Path, paths: list[str]) -> None:
    """One archive of small files, content and names alone."""
    with tarfile.open(target, "w") as archive:
        for path in paths:
            info = tarfile.TarInfo(path)
            full = root / path
            info.size = full.stat().st_size
            with full.open("rb") as handle:
                archive.addfile(info, handle)
