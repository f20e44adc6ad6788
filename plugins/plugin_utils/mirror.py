"""Fill a folder with what a fleet needs: packages, wheels and models; see module_utils/mirror.py for what it looks like.

Runs on the controller only. Each part uses what the roles use: apt itself, the locks and their wheelhouse, the hub.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import (
    driver_case,
    driver_host,
    driver_plan,
    driver_sources,
    locks,
    mirror,
    models,
)
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.mirror import Content, File, Host, MirrorError, Target
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import cache, data, hub, mirror_apt
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils.inventory import Inventory

WORK = ".work"
SUMS_BEFORE = f".{mirror.SUMS}"


@dataclass
class Wish:
    """What the role is told; see its argument specification."""

    folder: Path | None
    parts: tuple[str, ...] = mirror.PARTS
    packages: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    sources: Mapping[str, str] = field(default_factory=dict)
    sign_with: str = ""
    driver_source: str = ""
    driver_repository: str = ""
    driver_keyring: str = ""


@dataclass
class Model:
    """One model and where its files come from: a folder of the controller, or a hub."""

    name: str
    root: Path | None
    remote: list[hub.Remote]
    files: list[File]
    entry: Mapping[str, Any]


def hosts(inventory: Inventory, basedir: str) -> list[Host]:
    """What the inventory says of its GPU hosts."""
    found = []
    versions, known = data.load("versions"), data.load("mirror")
    for name in inventory.group("gpu_hosts"):
        system = str(inventory.get(name, "fleet_system", "debian-12"))
        architecture = str(inventory.get(name, "fleet_architecture", "x86_64"))
        packages = _by_role(inventory, known)
        if inventory.role_value(name, "vllm_runtime", "vllm_runtime_packages_managed"):
            named = inventory.role_value(name, "vllm_runtime", "vllm_runtime_packages")
            packages += named or versions["systems"].get(system, {}).get("packages", [])
        host = Host(name, Target(system, architecture), _lock(inventory, name, system, architecture, basedir), packages)
        host.driver = _driver(inventory, name)
        found.append(host)
    return found


def _by_role(inventory: Inventory, known: Mapping[str, Any]) -> list[str]:
    """Packages that roles install by name, without those of roles whose group of hosts is empty."""
    only = known["only_with"]
    return [
        package
        for role, packages in known["roles"].items()
        if role not in only or inventory.group(only[role])
        for package in packages
    ]


def _lock(inventory: Inventory, name: str, system: str, architecture: str, basedir: str) -> str:
    """Path of the lock of the host's release, judged before by validate."""
    named = inventory.role_value(name, "vllm_runtime", "vllm_runtime_lock")
    if named:
        path = Path(str(named)).expanduser()
        return str(path if path.is_absolute() else Path(basedir) / path)
    versions = data.load("versions")
    accelerator = str(inventory.role_value(name, "vllm_runtime", "vllm_runtime_accelerator"))
    version = inventory.role_value(name, "vllm_runtime", "vllm_runtime_version")
    version = str(version or versions["defaults"]["cpu" if accelerator == "cpu" else "cuda"])
    python = str(inventory.role_value(name, "vllm_runtime", "vllm_runtime_python")).rpartition("python")[2]
    python = python if "." in python else versions["systems"].get(system, {}).get("python", "")
    return str(data.ROOT / "locks" / locks.lock_name(version, accelerator, python, architecture))


def _driver(inventory: Inventory, name: str) -> dict[str, Any]:
    """The host's wishes for its driver; empty where there is no such role or nothing is to be installed."""
    if "gpu_driver" not in data.role_names():
        return {}
    options = data.role_options("gpu_driver")
    want = {
        key: inventory.role_value(name, "gpu_driver", f"gpu_driver_{key}")
        for key in driver_case.WANT
        if f"gpu_driver_{key}" in options
    }
    want = {key: value for key, value in want.items() if value not in (None, "")}
    return {} if want.get("source", "preinstalled") == "preinstalled" else want


class Mirror:
    """One run: what is needed, what of it is there, and fetching the rest."""

    def __init__(
        self, wish: Wish, fleet: Sequence[Host], entries: Sequence[Mapping[str, Any]], allow_pickle: bool, basedir: str
    ) -> None:
        self.wish, self.fleet, self.entries = wish, fleet, entries
        self.allow_pickle, self.basedir = allow_pickle, basedir
        self.content = Content()
        self.apts: dict[Target, mirror_apt.PrivateApt] = {}
        self.debs: dict[Target, list[File]] = {}
        self.locks: list[Any] = []
        self.models: list[Model] = []
        self.say: Callable[[str], None] = lambda text: None

    def look(self) -> list[File]:
        """Find out what is needed; returns what of it the folder does not have. Raises MirrorError, ModelError."""
        if "packages" in self.wish.parts:
            for target in dict.fromkeys(host.target for host in self.fleet):
                self._packages(target)
        if "wheels" in self.wish.parts:
            self._wheels()
        if "models" in self.wish.parts:
            for entry in self.entries:
                self._model(entry)
        return self._missing()

    def fill(self, missing: Sequence[File]) -> bool:
        """Fetch what is missing, and write what says what is there; returns whether anything changed."""
        folder = self._folder()
        folder.mkdir(parents=True, exist_ok=True)
        with self._turn(folder / ".lock"):
            lacking = {item.path for item in missing}
            wanted = {
                part: sum(item.size for item in files if item.path in lacking)
                for part, files in self.content.files.items()
            }
            mirror.check_space(str(folder), wanted, shutil.disk_usage(folder).free, models.size)
            if missing and (folder / mirror.SUMS).is_file():
                # It is of the folder as it was; the new one is written when all is there.
                (folder / mirror.SUMS).replace(folder / SUMS_BEFORE)
            for target, files in self.debs.items():
                self._fill_packages(target, files, lacking)
            if any(path.startswith("wheels/") for path in lacking):
                self._fill_wheels(folder / "wheels")
            for model in self.models:
                if any(item.path in lacking for item in model.files):
                    self._fill_model(model, folder / "models" / model.name)
            changed = self._finish(folder)
        return bool(missing) or changed

    @contextmanager
    def _turn(self, path: Path) -> Iterator[None]:
        """Hold the folder alone. What a killed run left fetching holds it, too, until it has ended."""
        with path.open("w", encoding="utf-8") as handle:
            try:
                flock(handle, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                self.say(f"another run is filling {path.parent}; waiting for it")
                flock(handle, LOCK_EX)
            for apt in self.apts.values():
                apt.holds = handle.fileno()
            try:
                yield
            finally:
                for apt in self.apts.values():
                    apt.holds = None

    def left_over(self) -> list[str]:
        """Files of the folder that nothing needs; they are not listed in SHA256SUMS and not touched."""
        folder = self.wish.folder
        if folder is None or not folder.is_dir():
            return []
        needed = {item.path for item in self.content.every()} | {mirror.SUMS, mirror.USE}
        needed |= set(self._indices())
        parts = [folder / part for part in self.wish.parts]
        there = (path.relative_to(folder) for part in parts for path in part.rglob("*") if path.is_file())
        return sorted(
            str(path)
            for path in there
            if str(path) not in needed and not any(part.startswith(".") for part in path.parts)
        )

    def _indices(self) -> list[str]:
        """What makes repositories of the packages' folders."""
        names = ("Packages", "Release", "InRelease") if self.wish.sign_with else ("Packages", "Release")
        found = [f"{target.folder}/{name}" for target in self.debs for name in names]
        return found + ([f"packages/{mirror_apt.KEY}"] if self.wish.sign_with and self.debs else [])

    def _folder(self) -> Path:
        if self.wish.folder is None:
            raise MirrorError("mirror_folder is empty: name the folder that is to be carried")
        return self.wish.folder

    def _missing(self) -> list[File]:
        folder = self.wish.folder
        every = self.content.every()
        if folder is None or not folder.is_dir():
            return every
        of_size = [
            item
            for item in every
            if (folder / item.path).is_file() and (folder / item.path).stat().st_size == item.size
        ]
        known = cache.digests(folder, [item.path for item in of_size])
        right = {item.path for item in of_size if item.sha256 in (None, known[item.path]["sha256"])}
        # Small files of a hub have another kind of digest.
        for model in self.models:
            for remote in model.remote:
                path = f"models/{model.name}/{remote.path}"
                if path in right and not hub.is_whole(folder / path, remote):
                    right.discard(path)
        return [item for item in every if item.path not in right]

    # Packages

    def _packages(self, target: Target) -> None:
        known = data.load("mirror")
        architecture = known["architectures"].get(target.architecture)
        if architecture is None:
            raise MirrorError(
                f"dpkg's name of {target.architecture} is not known (known: {', '.join(known['architectures'])})"
            )
        mine = [host for host in self.fleet if host.target == target]
        wishes = {
            json.dumps(self._upstream(host.driver), sort_keys=True): self._upstream(host.driver)
            for host in mine
            if host.driver
        }
        root = cache.folder("mirror", f"{target.system}-{target.architecture}")
        apt = self.apts[target] = mirror_apt.PrivateApt(root, target, architecture)
        self.say(f"packages of {target.system}: reading the lists")
        apt.prepare(self._sources(apt, target, list(wishes.values())))
        apt.prefer("")
        apt.update()
        base = list(dict.fromkeys([package for host in mine for package in host.packages] + self.wish.packages))
        headers = data.load("driver")["headers"].get(target.system.partition("-")[0], "")
        found = apt.resolve(base + [headers.format(kernel=kernel) for kernel in self.wish.kernels if headers])
        for want in wishes.values():
            found += self._driver_packages(apt, target, want)
        if wishes and not self.wish.kernels:
            self.content.notes.append(
                f"{target.system}: no kernel headers are carried, which DKMS needs where hosts do not have them; name the hosts' kernels (`uname -r`) in mirror_kernels"
            )
        self.debs[target] = mirror.one_file_each(found, target.system)
        self.content.files["packages"] += [
            File(f"{target.folder}/{item.path}", item.size, item.sha256, item.source) for item in self.debs[target]
        ]

    def _upstream(self, want: Mapping[str, Any]) -> dict[str, Any]:
        """A host's wish as it is fetched here: from where the driver's maker or the distribution has it, not from the site's mirror."""
        source = self.wish.driver_source or (
            want["source"] if want["source"] in ("nvidia", "distribution") else "nvidia"
        )
        own = want.get("repository") if want["source"] == "nvidia" else None
        changed = {"source": source, "repository": self.wish.driver_repository or own, "trusted": False}
        if want["source"] == "mirror":
            changed.update(suite="/", components=[])
        return {**want, **changed}

    def _sources(
        self, apt: mirror_apt.PrivateApt, target: Target, wishes: Sequence[Mapping[str, Any]]
    ) -> list[tuple[str, str]]:
        known = data.load("driver")["sources"]
        further = (
            known["distribution"]["components"].get(target.system, [])
            if any(want["source"] == "distribution" for want in wishes)
            else []
        )
        # NVIDIA's packages need some of Debian's contrib, too (data/driver.yml, shared).
        further = list(further) or (["contrib"] if wishes and target.system.startswith("debian") else [])
        given, (here, code) = self.wish.sources.get(target.system), mirror_apt.own_system()
        own = mirror.own_sources(driver_host.sources("/"), code, further) if here == target.system and not given else ""
        text = given or own or mirror.sources(target, data.load("mirror")["sources"], further)
        found = [("system", text)]
        repositories = {}
        for want in wishes:
            case = self._case(target, want, {})
            entry = driver_sources.repository(case)
            if entry:
                repositories[entry["uri"]] = entry
        for number, entry in enumerate(repositories.values()):
            keyring = (
                mirror_apt.key(apt.root, entry["key"], self.wish.driver_keyring, target.system)
                if _remote(entry, self.wish)
                else None
            )
            from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_packages

            told = driver_packages.source_text(
                uri=entry["uri"],
                suite=entry["suite"],
                signed_by=str(keyring) if keyring else None,
                components=entry["components"],
            )
            found.append((f"driver-{number}", told))
        return found

    @staticmethod
    def _case(target: Target, want: Mapping[str, Any], facts: Mapping[str, Any]) -> driver_case.Case:
        told = {"machine": target.architecture, **facts}
        return driver_case.Case(
            told, want, {"system": target.system}, data.load("driver"), versions=None, where=target.system
        )

    def _driver_packages(self, apt: mirror_apt.PrivateApt, target: Target, want: Mapping[str, Any]) -> list[File]:
        """What the plan of module_utils/driver_plan.py has for each kind of GPUs that its version knows."""
        known = data.load("driver")
        dcgm = known["dcgm"]
        globs = [*known["globs"], *known["own_versions"], *known["shared"], *dcgm["globs"], dcgm["exporter"]]
        exact = [*known["toolkit"], *known["sources"]["nvidia"]["subnet_manager"], *want.get("packages", [])]
        offered = apt.available(globs, exact)
        found: list[File] = []
        reasons = []
        for kind in mirror.stand_ins(want, data.load("mirror")["stand_for"], target.architecture):
            host = {"system": target.system, "available": offered, "nvlink5": kind["nvlink5"]}
            choice = driver_plan.choose(
                kind["facts"], kind["want"], host, known, where=f"{target.system}, {kind['why']}"
            )
            if choice.plan is None:
                reasons.append("; ".join(str(finding) for finding in choice.findings if finding.severity == "error"))
                continue
            warnings = [f"{target.system}: {item.message}" for item in choice.findings if item.severity == "warning"]
            self.content.notes += [told for told in warnings if told not in self.content.notes]
            apt.prefer(choice.plan.files["preferences"])
            try:
                found += apt.resolve(choice.plan.arguments)
            except MirrorError as error:
                reasons.append(str(error))
        apt.prefer("")
        if not found:
            raise MirrorError(
                f"the driver's packages for {target.system} cannot be planned: {reasons[0] if reasons else 'no kind of GPUs fits'}"
            )
        self.content.notes += [f"not carried: {reason}" for reason in dict.fromkeys(reasons)]
        return found

    def _fill_packages(self, target: Target, files: Sequence[File], lacking: set[str]) -> None:
        folder = self._folder() / target.folder
        apt = self.apts[target]
        away = [item for item in files if f"{target.folder}/{item.path}" in lacking]
        if away:
            apt.fetch(away, folder, self._folder() / WORK / folder.name, self.say)
        folder.mkdir(parents=True, exist_ok=True)
        mirror_apt.write_repository(folder, target, apt.architecture, files)
        mirror_apt.sign(folder, self.wish.sign_with)

    # Wheels

    def _wheels(self) -> None:
        for path in dict.fromkeys(host.lock for host in self.fleet):
            try:
                self.locks.append(locks.parse(Path(path).read_text(encoding="utf-8"), path))
            except OSError as error:
                raise MirrorError(
                    f"{path}: {error.strerror}; docs/releases.md names the locks that there are"
                ) from error
            except locks.LockError as error:
                raise MirrorError(str(error)) from error
        wheels = {wheel.filename: wheel for lock in self.locks for wheel in lock.wheels}
        self.content.files["wheels"] = [
            File(f"wheels/{name}", wheel.size, wheel.sha256, f"{wheel.name}=={wheel.version}")
            for name, wheel in sorted(wheels.items())
        ]

    def _fill_wheels(self, folder: Path) -> None:
        with _scripts():
            from gpu_fleet import wheelhouse
        told = [0]

        def progress(done: int, total: int, names: str) -> None:
            if total and done * 10 // total > told[0]:
                told[0] = done * 10 // total
                self.say(f"wheels: {models.size(done)} of {models.size(total)} ({names})")

        try:
            wheelhouse.fetch(self.locks, folder, say=self.say, progress=progress)
        except wheelhouse.WheelhouseError as error:
            raise MirrorError(str(error)) from error

    # Models

    def _model(self, entry: Mapping[str, Any]) -> None:
        name = str(entry["name"])
        if entry.get("hub"):
            remote, notes = hub.contents(name, str(entry["hub"]), str(entry.get("revision") or ""), self.allow_pickle)
            files = [
                File(f"models/{name}/{item.path}", item.size, item.sha256, f"{entry['hub']}@{entry['revision']}")
                for item in remote
            ]
            self.models.append(Model(name, None, remote, files, entry))
        else:
            root = Path(str(entry["folder"])).expanduser()
            root = root if root.is_absolute() else Path(self.basedir) / root
            if not root.is_dir():
                raise MirrorError(f"model {name}: the controller has no folder {root}")
            paths = sorted(
                str(path.relative_to(root))
                for path in root.rglob("*")
                if path.is_file() and not path.name.endswith(".part")
            )
            content = models.choose(name, paths, self.allow_pickle)
            notes, digests = content.notes, cache.digests(root, content.files)
            files = [
                File(f"models/{name}/{path}", told["size"], told["sha256"], str(root)) for path, told in digests.items()
            ]
            self.models.append(Model(name, root, [], files, entry))
        self.content.notes += notes
        self.content.files["models"] += files

    def _fill_model(self, model: Model, folder: Path) -> None:
        self.say(f"model {model.name}: {models.size(sum(item.size for item in model.files))}")
        if model.root is None:
            hub.fetch(model.name, str(model.entry["hub"]), str(model.entry["revision"]), self.allow_pickle, into=folder)
            return
        there = cache.digests(folder, [path for item in model.files if (folder / (path := _below(item))).is_file()])
        for item in model.files:
            path = _below(item)
            if there.get(path, {}).get("sha256") == item.sha256:
                continue
            final = folder / path
            final.parent.mkdir(parents=True, exist_ok=True)
            beside = final.with_name(f"{final.name}.part")
            shutil.copyfile(model.root / path, beside)
            beside.replace(final)

    # What says what is there

    def _finish(self, folder: Path) -> bool:
        """use.yml and SHA256SUMS, once every file was found right."""
        still = self._missing()
        if still:
            raise MirrorError(
                f"{folder}: {len(still)} files are not as they should be, {still[0].path} among them. Run again; what is good is kept"
            )
        from_hub = {
            str(entry["name"]): f"{entry['hub']} at {entry['revision']}" for entry in self.entries if entry.get("hub")
        }
        names = [str(entry["name"]) for entry in self.entries]
        text = mirror.use(names, from_hub, any(host.driver for host in self.fleet))
        changed = _text(folder / mirror.USE, text)
        paths = [item.path for item in self.content.every()] + [mirror.USE]
        paths += self._indices()
        digests = {path: told["sha256"] for path, told in cache.digests(folder, paths).items()}
        # Of parts that this run does not look after, what an earlier one said.
        others = {part for part in mirror.PARTS if part not in self.wish.parts}
        for name in (SUMS_BEFORE, mirror.SUMS) if others else ():
            if (folder / name).is_file():
                before = mirror.read_sums((folder / name).read_text(encoding="utf-8"))
                digests.update({path: told for path, told in before.items() if path.split("/")[0] in others})
        changed = _text(folder / mirror.SUMS, mirror.sums(digests)) or changed
        (folder / SUMS_BEFORE).unlink(missing_ok=True)
        shutil.rmtree(folder / WORK, ignore_errors=True)  # empty by now
        return changed


def _below(item: File) -> str:
    """A model's file as the model names it."""
    return item.path.split("/", 2)[2]


def _remote(entry: Mapping[str, Any], wish: Wish) -> bool:
    """Whether a repository needs a key: a local folder is trusted as the controller's own files are."""
    return bool(wish.driver_keyring) or not str(entry["uri"]).startswith(("file:", "copy:"))


def _text(path: Path, text: str) -> bool:
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
    return True


@contextmanager
def _scripts() -> Iterator[None]:
    """The command line's package, which has the wheelhouse, lies beside the plugins and is in no environment's path."""
    folder = str(data.ROOT / "scripts")
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
