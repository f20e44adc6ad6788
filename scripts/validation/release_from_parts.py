"""Builds a lock's release on a machine that no index and no controller reaches, and that has some of its files already.

The role vllm_runtime is the way to build a release. This is for a machine to which gigabytes cannot be brought: it takes
wheels out of a folder, and every file of the wheels that are not there from an environment of the machine, each file
proved by the sha256 that the lock's own wheel has for it in its RECORD. So the release is the lock's, file by file,
and what is not is named.

On the controller, RECORDs of the wheels that the folder lacks, read out of the wheels on the index by ranges:
    .venv/bin/python scripts/validation/release_from_parts.py records LOCK WHEELS RECORDS.json
On the machine (`take` needs no wheels, so they may still be on their way):
    python3 scripts/validation/release_from_parts.py take LOCK RECORDS.json SITE_PACKAGES --uv UV --report REPORT.json
    python3 scripts/validation/release_from_parts.py install LOCK WHEELS --uv UV
Exit status: 0 good, 1 a file is missing or another (it is named in the report, and taken as it is when it is there).
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "plugins"))
locks = importlib.import_module("module_utils.locks")
RELEASES = Path("/opt/vllm/releases")


def parsed(path: Path) -> Any:
    return locks.parse(path.read_text(encoding="utf-8"), str(path))


def fetch_records(lock: Any, wheels: Path) -> dict[str, Any]:
    """Name to version, wheel, its hash, and RECORD, for the wheels that the folder lacks. pip does the talking."""
    from pip._internal.commands import create_command
    from pip._internal.index.collector import parse_links
    from pip._internal.network.lazy_wheel import LazyZipOverHTTP

    command: Any = create_command("download")
    options, _ = command.parse_args(["nothing"])
    session = command._build_session(options)
    collector = command._build_package_finder(options, session)._link_collector
    found = {}
    for wheel in lock.wheels:
        if (wheels / wheel.filename).exists():
            continue
        sources = collector.collect_sources(project_name=wheel.name, candidates_from_page=lambda _: ()).index_urls
        pages = [collector.fetch_response(source.link) for source in sources if source and source.link.scheme != "file"]
        links = [link for page in pages if page for link in parse_links(page) if link.filename == wheel.filename]
        link = next((link for link in links if link.hash == wheel.sha256), None)
        if link is None:
            sys.exit(f"the index has no {wheel.filename} with the lock's hash")
        with LazyZipOverHTTP(link.url_without_fragment, session) as remote, zipfile.ZipFile(remote) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
            found[wheel.name] = {
                "version": wheel.version,
                "wheel": wheel.filename,
                "record": archive.read(name).decode(),
            }
    return found


def take(records: dict[str, Any], site: Path, target: Path) -> dict[str, Any]:
    """Link every file of the RECORDs from SITE into the release; name to counts and to what is missing or another."""
    report: dict[str, Any] = {}
    with ThreadPoolExecutor() as pool:
        for name, package in sorted(records.items()):
            rows = [row for row in csv.reader(io.StringIO(package["record"])) if row and row[1]]
            states = list(pool.map(lambda row: take_one(site / row[0], target / row[0], row[1]), rows))
            entry: dict[str, Any] = {"version": package["version"], "files": len(rows), "same": states.count("same")}
            for state in ("another", "missing"):
                if names := [row[0] for row, told in zip(rows, states, strict=True) if told == state]:
                    entry[state] = names
            report[name] = entry
            # RECORD has no hash of itself; it is written out of the wheel's own.
            (row,) = [
                row
                for row in csv.reader(io.StringIO(package["record"]))
                if row and row[0].endswith(".dist-info/RECORD")
            ]
            (target / row[0]).parent.mkdir(parents=True, exist_ok=True)
            (target / row[0]).write_text(package["record"], encoding="utf-8")
    return report


def take_one(source: Path, target: Path, wanted: str) -> str:
    try:
        with open(source, "rb") as handle:
            digest = hashlib.sha256()
            while block := handle.read(1 << 22):
                digest.update(block)
    except OSError:
        return "missing"
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
    # RECORD's own spelling of a hash (packaging.python.org, "Recording installed projects").
    told = "sha256=" + base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
    return "same" if told == wanted else "another"


def uv(binary: Path, *arguments: str) -> None:
    """uv, with the options and the surroundings that plugins/module_utils/releases.py gives it."""
    cache = str(RELEASES / ".uv-cache")
    environment = {
        **os.environ,
        "UV_CACHE_DIR": cache,
        "UV_LINK_MODE": "hardlink",
        "UV_NO_CONFIG": "1",
        "UV_PYTHON_DOWNLOADS": "never",
    }
    environment.pop("VIRTUAL_ENV", None)
    subprocess.run([str(binary), *arguments], env=environment, check=True)


def install(lock: Any, wheels: Path, release: Path, binary: Path) -> int:
    """Install every wheel of the lock that the folder has, by its hash; returns how many."""
    there = [wheel for wheel in lock.wheels if (wheels / wheel.filename).exists()]
    requirements = RELEASES / "requirements.txt"
    requirements.write_text(
        "".join(f"{w.name}=={w.version} --hash=sha256:{w.sha256}\n" for w in there), encoding="utf-8"
    )
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-index", "--find-links", str(wheels)]
    uv(
        binary,
        "pip",
        "install",
        "--quiet",
        "--python",
        str(release / "bin/python"),
        *options,
        "--requirement",
        str(requirements),
    )
    return len(there)


def site_of(release: Path, lock: Any) -> Path:
    return release / "lib" / f"python{lock.python}" / "site-packages"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, places in (("records", ("wheels", "into")), ("take", ("records", "site")), ("install", ("wheels",))):
        verb = verbs.add_parser(name)
        for place in ("lock", *places):
            verb.add_argument(place, type=Path)
        if name != "records":
            verb.add_argument("--uv", type=Path, required=True)
        if name == "take":
            verb.add_argument("--report", type=Path, required=True)
    arguments = parser.parse_args()
    lock = parsed(arguments.lock)
    release = RELEASES / lock.id
    if arguments.verb == "records":
        arguments.into.write_text(json.dumps(fetch_records(lock, arguments.wheels)), encoding="utf-8")
        return 0
    if arguments.verb == "install":
        print(
            f"{install(lock, arguments.wheels, release, arguments.uv)} of {len(lock.wheels)} wheels installed into {release}"
        )
        return 0
    RELEASES.mkdir(parents=True, exist_ok=True)
    uv(arguments.uv, "venv", "--quiet", "--relocatable", "--no-project", "--python", sys.executable, str(release))
    report = take(json.loads(arguments.records.read_text(encoding="utf-8")), arguments.site, site_of(release, lock))
    arguments.report.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if any("missing" in entry or "another" in entry for entry in report.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
