# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a fleet needs, in one folder that is carried to a site without a way out.

The folder::

    SHA256SUMS                        of everything below, for `sha256sum -c SHA256SUMS`; written last
    use.yml                           variables for the site's inventory: where the parts lie
    packages/debian-12-x86_64/        a flat apt repository: *.deb, Packages, Release, InRelease where it is signed
    packages/key.asc                  the key that it is signed with
    wheels/                           what vllm_runtime_wheelhouse takes
    models/NAME/                      what a model's `folder` takes

Hidden files are the work of a run (lists of apt, what is half fetched) and need not be carried.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple
from urllib.parse import unquote

SUMS = "SHA256SUMS"
USE = "use.yml"
PARTS = ("packages", "wheels", "models")
_URI = re.compile(r"^'(?P<uri>[^']+)' (?P<name>\S+) (?P<size>\d+) SHA256:(?P<sha256>[0-9a-f]{64})$")
_SUM = re.compile(r"^([0-9a-f]{64}) [ *](.+)$")
# Left free on the disk beyond what comes; file systems slow down or refuse when they are full.
RESERVE = 256 << 20


class MirrorError(Exception):
    """The folder cannot be filled; the message names what, why and the remedy."""


@dataclass(frozen=True)
class File:
    """One file of the folder. path: relative to it; source: address, or what says where it comes from."""

    path: str
    size: int
    sha256: Optional[str]  # None: known once it is there (small files of a hub)
    source: str = ""


@dataclass(frozen=True)
class Target:
    """What packages are resolved for."""

    system: str  # debian-12
    architecture: str  # x86_64

    @property
    def folder(self) -> str:
        return f"packages/{self.system}-{self.architecture}"


@dataclass
class Host:
    """What the inventory says of a GPU host, as far as it decides what is fetched."""

    name: str
    target: Target
    lock: str  # path of the lock on the controller; empty where there is none
    packages: List[str] = field(default_factory=list)
    driver: Dict[str, Any] = field(default_factory=dict)  # WANT of driver_case.py; empty: no driver comes by packages


@dataclass
class Content:
    """What is in the folder, or is to come: files by part, and what is worth saying."""

    files: Dict[str, List[File]] = field(default_factory=lambda: {part: [] for part in PARTS})
    notes: List[str] = field(default_factory=list)

    def every(self) -> List[File]:
        return [item for part in PARTS for item in self.files[part]]


# Packages


def apt_conf(root: str, architecture: str, acquire: str, etc: str = "/etc/apt") -> str:
    """Configuration of an apt that knows nothing of this machine but how it fetches; apt.conf(5).

    root          its folder
    architecture  of the target, as dpkg names it
    acquire       lines of the machine's own apt: proxy, certificates, retries
    etc           where the machine's logins and keys for sources without Signed-By are
    """
    return (
        f'Dir::Etc "{root}/etc";\n'
        f'Dir::Etc::sourcelist "{root}/etc/sources.list";\n'
        f'Dir::Etc::sourceparts "{root}/etc/sources.list.d";\n'
        f'Dir::Etc::preferences "{root}/etc/preferences";\n'
        f'Dir::Etc::preferencesparts "{root}/etc/preferences.d";\n'
        f'Dir::Etc::parts "{root}/etc/apt.conf.d";\n'
        f'Dir::Etc::netrc "{etc}/auth.conf";\n'
        f'Dir::Etc::netrcparts "{etc}/auth.conf.d";\n'
        f'Dir::Etc::trusted "{etc}/trusted.gpg";\n'
        f'Dir::Etc::trustedparts "{etc}/trusted.gpg.d";\n'
        f'Dir::State "{root}/state";\n'
        f'Dir::State::status "{root}/state/status";\n'
        f'Dir::Cache "{root}/cache";\n'
        f'Dir::Log "{root}/log";\n'
        f'APT::Architecture "{architecture}";\n'
        f'APT::Architectures {{ "{architecture}"; }};\n'
        # As the roles install.
        'APT::Install-Recommends "false";\n'
        'Acquire::Languages "none";\n'
        'Acquire::ForceHash "SHA256";\n'
        # The folder may be where apt's own user must not look.
        'APT::Sandbox::User "root";\n'
        f"{acquire}"
    )


def read_uris(text: str) -> List[File]:
    """What `apt-get --print-uris install` says would be fetched, under Acquire::ForceHash SHA256; names as archives have them.

    MirrorError for a line of another form: a package without that hash cannot be proved.
    """
    found = []
    for line in text.splitlines():
        if not line.startswith("'"):
            continue
        match = _URI.match(line)
        if not match:
            raise MirrorError(f"apt gives no SHA256 for {line}; its source cannot be carried")
        found.append(File(deb_name(match["name"]), int(match["size"]), match["sha256"], match["uri"]))
    return found


def deb_name(archive: str) -> str:
    """A package's file name without the epoch, as archives name it: apt's cache has `a_1%3a2-1_all.deb` for a 1:2-1.

    A percent sign in a name of a repository is asked for in different ways by different web servers' clients.
    """
    parts = unquote(archive).split("_")
    if len(parts) == 3 and ":" in parts[1]:
        parts[1] = parts[1].partition(":")[2]
    return "_".join(parts)


def entry(control: str, name: str, size: int, sha256: str) -> str:
    """A paragraph of Packages: the package's own control fields, and where and what its file is (deb822, repository format)."""
    fields = "\n".join(line for line in control.strip().splitlines() if line.strip())
    return f"{fields}\nFilename: ./{name}\nSize: {size}\nSHA256: {sha256}\n"


def release(target: Target, architecture: str, packages: Tuple[int, str], date: str) -> str:
    """The Release file of a flat repository; packages: size and SHA256 of Packages. date: RFC 2822, in UTC."""
    return (
        f"Origin: gpu_fleet\nLabel: gpu_fleet packages for {target.system}\nSuite: {target.system}\n"
        f"Architectures: {architecture} all\nDate: {date}\n"
        f"Description: what the fleet's roles install on {target.system}, {target.architecture}\n"
        f"SHA256:\n {packages[1]} {packages[0]} Packages\n"
    )


def same_release(text: str, other: str) -> bool:
    """Whether two Release files differ in nothing but their date."""
    return re.sub(r"(?m)^Date: .*\n", "", text) == re.sub(r"(?m)^Date: .*\n", "", other)


def one_file_each(found: Iterable[File], where: str) -> List[File]:
    """The same package for several hosts is one file. MirrorError when two files would have one name."""
    kept: Dict[str, File] = {}
    for item in found:
        known = kept.setdefault(item.path, item)
        if known.sha256 != item.sha256:
            raise MirrorError(
                f"{where}: {item.path} comes with two contents ({known.source} and {item.source}): "
                "take one of the two sources out of mirror_sources"
            )
    return [kept[path] for path in sorted(kept)]


def sources(target: Target, table: Mapping[str, Any], components: Sequence[str] = ()) -> str:
    """Sources of a system as its installer writes them, deb822; with further components.

    table  `sources` of data/mirror.yml
    """
    entry = table.get(target.system)
    if entry is None:
        raise MirrorError(
            f"no sources of {target.system} are known (known: {', '.join(table)}); give them in mirror_sources"
        )
    every = " ".join(dict.fromkeys([*entry["components"], *components]))
    paragraphs = [
        f"Types: deb\nURIs: {archive['uri']}\n"
        f"Suites: {' '.join(suite.format(code=entry['code']) for suite in archive['suites'])}\n"
        f"Components: {every}\nSigned-By: {entry['keyring']}\n"
        for archive in entry["archives"]
        if target.architecture in archive.get("only", [target.architecture])
    ]
    return "\n".join(paragraphs)


def own_sources(found: Sequence[Mapping[str, Any]], code: str, components: Sequence[str] = ()) -> str:
    """The controller's own sources of the system that it runs, deb822; empty when it has none of that release.

    found  what module_utils/driver_host.py reads of /etc/apt; other people's repositories are left out, as are those of other releases
    """
    suites = (code, f"{code}-updates", f"{code}-security")
    paragraphs = []
    for item in found:
        if item["suite"] not in suites or "main" not in item.get("components", []):
            continue
        every = " ".join(dict.fromkeys([*item["components"], *components]))
        text = f"Types: deb\nURIs: {item['uri']}\nSuites: {item['suite']}\nComponents: {every}\n"
        paragraphs.append(text + (f"Signed-By: {item['signed_by']}\n" if item.get("signed_by") else ""))
    return "\n".join(paragraphs)


# The driver


def stand_ins(want: Mapping[str, Any], table: Mapping[str, Any], architecture: str) -> List[Dict[str, Any]]:
    """Hosts that a driver's packages are planned for, since the real ones are not asked: facts, want, host and why each.

    table  `stand_for` of data/mirror.yml
    """
    found = []
    modules = want.get("modules") or "auto"
    for name, kind in table.items():
        mine = dict(want)
        if kind.get("modules") and modules not in ("auto", kind["modules"]):
            continue
        if bool(kind.get("imex")) and not want.get("imex_nodes"):
            continue
        if not kind.get("imex"):
            mine["imex_nodes"] = []
        cards = [
            {"vendor_id": "10de", "device_id": id_, "address": "0000:01:00.0", "driver": None} for id_ in kind["ids"]
        ]
        facts = {
            "machine": architecture,
            "pci_gpus": cards,
            "gpus": [],
            "driver": {"loaded": None, "installed": None, "flavour": None, "cuda": None},
            "nvswitch": {"devices": kind.get("switches", 0)},
        }
        found.append(
            {"name": name, "why": kind["why"], "facts": facts, "want": mine, "nvlink5": bool(kind.get("nvlink5"))}
        )
    return found


# What is there, and what it takes


def sums(files: Mapping[str, str]) -> str:
    """SHA256SUMS of {path: digest}, as sha256sum writes it."""
    for path in files:
        if "\n" in path or "\\" in path:
            raise MirrorError(f"{path!r}: a name that sha256sum would have to escape; rename the file at its source")
    return "".join(f"{digest}  {path}\n" for path, digest in sorted(files.items()))


def read_sums(text: str) -> Dict[str, str]:
    """{path: digest}; lines of another form are left out."""
    matches = (_SUM.match(line) for line in text.splitlines())
    return {match.group(2): match.group(1) for match in matches if match}


def check_space(folder: str, wanted: Mapping[str, int], free: int, size: Any) -> None:
    """MirrorError when what has to come does not fit. wanted: bytes by part; size: how bytes are said."""
    total = sum(wanted.values())
    if total and total + RESERVE > free:
        told = ", ".join(f"{part} {size(count)}" for part, count in wanted.items() if count)
        raise MirrorError(
            f"{folder}: {size(total)} have to come ({told}), {size(free)} are free there and {size(RESERVE)} are to stay free. "
            "Make room, or name another folder (mirror_folder). Nothing was fetched"
        )


def use(models: Sequence[str], hub_models: Mapping[str, str], drivers: bool) -> str:
    """Variables for the site, as YAML. The folder's place is the variable fleet_carried, since nobody knows it yet.

    models      names, in the inventory's order
    hub_models  which of them came from a hub, and from where
    drivers     whether the driver's packages are there
    """
    lines = [
        "---",
        "# Where the parts of this folder lie. On the site's controller:",
        "#   ansible-playbook site.yml -i INVENTORY -e fleet_carried=/where/this/folder/lies -e @/where/this/folder/lies/use.yml",
        "vllm_runtime_source: wheelhouse",
        'vllm_runtime_wheelhouse: "{{ fleet_carried }}/wheels"',
        "package_source_folder: \"{{ fleet_carried }}/packages/{{ fleet_system | default('debian-12') }}-"
        "{{ fleet_architecture | default('x86_64') }}\"",
        "# The hosts' own sources cannot be reached from there; apt reads the carried packages alone.",
        "package_source_only: true",
    ]
    if drivers:
        lines += ["gpu_driver_source: mirror", 'gpu_driver_folder: "{{ package_source_folder }}"']
    if models:
        lines.append("model_store_models:")
        for name in models:
            origin = f"    # {hub_models[name]}" if name in hub_models else ""
            lines.append(f'  - {{name: {name}, folder: "{{{{ fleet_carried }}}}/models/{name}"}}{origin}')
    return "\n".join(lines) + "\n"


def summary(content: Content, missing: Iterable[File], size: Any, fetched: bool = False) -> List[str]:
    """A line a part: how much, and how much of it was not there; fetched: whether it came."""
    lacking, came = {item.path for item in missing}, "came now" if fetched else "are to come"
    lines = []
    for part in PARTS:
        mine = content.files[part]
        away = [item for item in mine if item.path in lacking]
        told = f"{part}: {len(mine)} files, {size(sum(item.size for item in mine))}"
        lines.append(told + (f"; {len(away)} of them, {size(sum(item.size for item in away))}, {came}" if away else ""))
    return lines
