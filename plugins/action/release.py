"""The controller's part of gpu_fleet.vllm.release: see plugins/modules/release.py for its documentation.

It knows the locks and the data, so it decides; the module on the host looks and does.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import locks, releases
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data, login


class ActionModule(ActionBase):
    """Look; when something is not right, bring what is needed and have it built."""

    TRANSFERS_FILES = True

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        try:
            return self._run(result, task_vars)
        except AnsibleActionFail as error:
            raise AnsibleActionFail(
                f"{task_vars['inventory_hostname']}: {error.message}", result=error.result
            ) from error

    def _run(self, result, task_vars):
        _, given = self.validate_argument_spec(
            argument_spec=releases.ARGUMENTS,
            required_if=[
                ("source", "mirror", ["index_url"]),
                ("source", "wheelhouse", ["wheelhouse", "wheelhouse_on_host"], True),
            ],
        )
        self._task_vars = task_vars
        self._named = {"version": given["version"], "accelerator": given["accelerator"]}
        candidates = self._locks(given)
        found = self._host(
            "look",
            root=given["root"],
            python=given["python"],
            packages=given["packages"],
            cuda=given["accelerator"].startswith("cu"),
            candidates={key: {"id": lock.id, "digest": lock.digest} for key, (lock, _) in candidates.items()},
        )
        python = found["python"]
        key = f"{python['version']} {python['architecture']}"
        if key not in candidates:
            raise AnsibleActionFail(self._no_lock(given, python, candidates))
        lock, text = candidates[key]
        result.update(_facts(given, lock, found))
        if found["closed"]:
            folders = ", ".join(found["closed"])
            result["warnings"] = [
                f"{task_vars['inventory_hostname']}: the service user cannot get to the releases; chmod o+x {folders}"
            ]
        right = found["state"] == "right"
        if given["state"] == "looked" or right:
            return {**result, "changed": False}
        result["changed"] = True
        if self._task.diff:
            result["diff"] = _diff(lock, found)
        if not self._task.check_mode:
            result.update(self._put_right(given, lock, text, found))
        return result

    def _locks(self, given: dict[str, Any]) -> dict[str, tuple[Any, str]]:
        """Locks that could fit, by Python and architecture. Raises AnsibleActionFail when one is damaged."""
        if given["lock"]:
            paths = [Path(given["lock"])]
        else:
            paths = sorted((data.ROOT / "locks").glob(f"vllm-{given['version']}-{given['accelerator']}-py*.lock"))
        found = {}
        for path in paths:
            try:
                text = path.read_text(encoding="utf-8")
                lock = locks.parse(text, str(path))
            except (OSError, locks.LockError) as error:
                raise AnsibleActionFail(str(error)) from error
            if (lock.version, lock.accelerator) != (given["version"], given["accelerator"]):
                raise AnsibleActionFail(
                    f"{path}: is for vLLM {lock.version} {lock.accelerator}, asked for is {given['version']} {given['accelerator']}"
                )
            found[f"{lock.python} {lock.architecture}"] = _with_addons(lock, text, given["addons"])
        return found

    @staticmethod
    def _no_lock(given: dict[str, Any], python: dict[str, Any], candidates: dict[str, Any]) -> str:
        have = ", ".join(sorted(candidates)) or "none at all"
        return (
            f"there is no lock for vLLM {given['version']} {given['accelerator']} on Python {python['version']} ({given['python']}), "
            f"{python['architecture']}; there are: {have}. Make one with `scripts/lock {given['version']} {given['accelerator']} --python "
            f"{python['version']}`, or name another interpreter of the host with vllm_runtime_python"
        )

    def _host(self, do: str, secrets: dict[str, str] | None = None, **step: Any) -> dict[str, Any]:
        """Run one step of the module on the host; its failure is this task's failure."""
        answer = self._execute_module(
            module_name="gpu_fleet.vllm.release",
            module_args={**self._named, "host_step": {"do": do, **step}, "host_secrets": secrets or {}},
            task_vars=self._task_vars,
        )
        if answer.get("failed"):
            raise AnsibleActionFail(answer.get("msg", f"{do} failed"), result=answer)
        return answer

    def _put_right(self, given: dict[str, Any], lock: Any, text: str, found: dict[str, Any]) -> dict[str, Any]:
        if found["removable"]:
            return self._host("repair", root=given["root"], id=lock.id, digest=lock.digest)
        incoming = (
            f"{given['root']}/.incoming"  # on the disk of the releases; what comes by way of /tmp may not fit there
        )
        files = [self._uv(given, found["python"]["architecture"])]
        if given["source"] == "wheelhouse" and not given["wheelhouse_on_host"]:
            files += _wheel_files(lock, Path(given["wheelhouse"]))
        self._send(files, incoming, releases.room_for(lock))
        source, secrets = _without_secrets(_source(given, lock, incoming))
        answer = self._host(
            "build",
            secrets,
            lock=text,
            root=given["root"],
            python=given["python"],
            uv=f"{incoming}/uv",
            incoming=incoming,
            wait=given["wait"],
            source=source,
        )
        return {"seconds": answer["seconds"]}

    @staticmethod
    def _uv(given: dict[str, Any], architecture: str) -> dict[str, Any]:
        """The pinned uv of the controller's environment; hosts need not have one."""
        path = given["uv"]
        if not path:
            if architecture != platform.machine():
                raise AnsibleActionFail(
                    f"the host is {architecture} and the controller {platform.machine()}: name a uv for {architecture} with vllm_runtime_uv"
                )
            try:
                from uv import find_uv_bin

                path = find_uv_bin()
            except (ImportError, FileNotFoundError):
                path = shutil.which("uv")
        if not path or not Path(path).is_file():
            raise AnsibleActionFail(
                "the controller has no uv; run scripts/bootstrap, or name the binary with vllm_runtime_uv"
            )
        return {"name": "uv", "path": str(path), "size": Path(path).stat().st_size, "sha256": _sha256(Path(path))}

    def _send(self, files: list[dict[str, Any]], folder: str, room: int) -> None:
        """Copy what the host lacks to the disk of the releases; what an interrupted run brought whole stays there."""
        wanted_by_host = [{key: item[key] for key in ("name", "size", "sha256")} for item in files]
        answer = self._host("want", folder=folder, files=wanted_by_host, room=room, uid=login.uid(self))
        if not answer["wanted"]:
            return
        for item in files:
            if item["name"] not in answer["wanted"]:
                continue
            try:
                self._connection.put_file(item["path"], f"{answer['arriving']}/{item['name']}")
            except AnsibleConnectionFailure:
                raise
            except AnsibleError as error:
                raise AnsibleActionFail(
                    f"{item['name']} ({item['size']} bytes) could not be sent to {folder}: {error}. What arrived whole is "
                    "kept for the next run"
                ) from error
        self._host("receive", folder=folder, files=wanted_by_host)


def _with_addons(lock: Any, text: str, addons: list[str]) -> tuple[Any, str]:
    """The lock with what is added to it, and its text. Raises AnsibleActionFail where an add-on is missing or damaged."""
    for addon in addons:
        name = locks.addon_name(addon, lock.version, lock.accelerator, lock.python, lock.architecture)
        path = data.ROOT / "locks" / "addons" / name
        if not path.is_file():
            raise AnsibleActionFail(
                f"there is no lock of {addon} for vLLM {lock.version} {lock.accelerator}, Python {lock.python}, {lock.architecture}; "
                f"make it: scripts/lock {lock.version} {lock.accelerator} --python {lock.python} --addon {addon}"
            )
        try:
            lock = locks.merged(lock, locks.parse(path.read_text(encoding="utf-8"), str(path)), str(path))
        except locks.LockError as error:
            raise AnsibleActionFail(str(error)) from error
        text = locks.render(lock)
    return lock, text


def _facts(given: dict[str, Any], lock: Any, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "release": {
            "id": lock.id,
            "path": f"{given['root']}/{lock.id}",
            "version": lock.version,
            "accelerator": lock.accelerator,
            "python": f"{given['root']}/{lock.id}/bin/python",
            "python_version": lock.python,
            "lock_digest": lock.digest,
            "engine": lock.engine,
            "engine_by": lock.engine_by,
            "kernels_missing": list(lock.kernels_missing),
        },
        "state": found["state"],
        "differences": found["differences"],
        "other_releases": found["other_releases"],
        "packages_missing": found["packages_missing"],
        "foreign_cuda": found["foreign_cuda"],
        "headers": found["python"]["headers"],
    }


def _diff(lock: Any, found: dict[str, Any]) -> dict[str, str]:
    wanted = f"{lock.id}: {len(lock.wheels)} wheels, as installed from the lock {lock.digest[:12]}\n"
    before = {
        "absent": f"{lock.id}: absent\n",
        "incomplete": f"{lock.id}: incomplete ({found['detail']})\n",
        "altered": f"{lock.id}: {len(found['differences'])} files are not as installed\n{releases.shown(found['differences'])}\n",
    }[found["state"]]
    return {"before_header": "release", "after_header": "release", "before": before, "after": wanted}


def _wheel_files(lock: Any, folder: Path) -> list[dict[str, Any]]:
    """The lock's own wheels in the controller's folder. Raises AnsibleActionFail naming those that are not there."""
    files, missing = [], []
    for wheel in lock.wheels:
        path = folder.expanduser() / wheel.filename
        if wheel.made:
            continue
        if not path.is_file() or path.stat().st_size != wheel.size:
            missing.append(wheel.filename)
        files.append({"name": wheel.filename, "path": str(path), "size": wheel.size, "sha256": wheel.sha256})
    if missing:
        raise AnsibleActionFail(
            f"{folder} on the controller lacks {len(missing)} of {len(files)} wheels of {lock.id} ({', '.join(missing[:3])}...); fill it with "
            f"`python -m gpu_fleet.wheelhouse fetch locks/{locks.lock_name(lock.version, lock.accelerator, lock.python, lock.architecture)}`"
        )
    return files


def _source(given: dict[str, Any], lock: Any, incoming: str) -> dict[str, Any]:
    environment = {}
    if given["proxy"]:
        environment["ALL_PROXY"] = given["proxy"]
    if given["ca_certificate"]:
        environment["SSL_CERT_FILE"] = given["ca_certificate"]
    wheelhouse = given["source"] == "wheelhouse"
    return {
        "folder": (given["wheelhouse_on_host"] or incoming) if wheelhouse else None,
        "index_url": None if wheelhouse else given["index_url"],
        "extra_index_urls": [] if wheelhouse else given["extra_index_urls"],
        "find_links": [] if wheelhouse else given["find_links"],
        "fallbacks": _named_indices(lock) if given["source"] == "index" else {},
        "host_pip": given["source"] == "index" and not given["index_url"],
        "environment": environment,
    }


def _without_secrets(source: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The source as it may be shown, and its shown URLs to those with user and password, which must not be logged."""
    secrets: dict[str, str] = {}

    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: bare(item) for key, item in value.items()}
        if isinstance(value, list):
            return [bare(item) for item in value]
        shown = releases.without_user(value) if isinstance(value, str) else value
        if shown != value:
            secrets[shown] = value
        return shown

    return bare(source), secrets


def _named_indices(lock: Any) -> dict[str, str]:
    """Package to the public index of data/versions.yml that carries it, for packages which the ordinary index does not have."""
    special = {wheel.name for wheel in lock.wheels if "+" in wheel.version and not wheel.made}
    special |= {requirement.split("==", maxsplit=1)[0] for requirement in lock.kernels}
    return {
        name: index["url"].format(version=lock.version, accelerator=lock.accelerator)
        for index in data.load("versions")["indices"].values()
        for name in special & set(index["packages"])
    }


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
