"""Fetch a repository of a model hub at a pinned revision, on the controller, with the standard library alone.

On the controller and not on the hosts: they usually have no way out, one download serves them all, and a token never
leaves this machine. Not with huggingface_hub: four requests do not need its fifteen packages on every controller.

What is asked (huggingface_hub 0.34 to 1.x, hf_api.py and file_download.py; https://huggingface.co/docs/hub/api):
- GET {endpoint}/api/models/{repo}/revision/{revision}?blobs=true: `siblings`, each with rfilename, size, blobId
  (git's SHA-1 of the file) and, for big files, lfs.sha256
- GET {endpoint}/{repo}/resolve/{revision}/{path}: the file, usually by redirect to a store; Range resumes

The environment is read as huggingface_hub reads it: HF_ENDPOINT, HF_TOKEN, else the file of HF_TOKEN_PATH, else
HF_HOME/token (default ~/.cache/huggingface/token).
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import http.client
import json
import os
import shutil
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpu_fleet.vllm.plugins.module_utils.models import HUB, ModelError, choose, judge_hub, size
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import cache

TIMEOUT = 60  # seconds without a byte
LOOK_TIMEOUT = 10  # the same where somebody waits for a plan
_CHUNK = 1 << 20
_ATTEMPTS = 3
_PARALLEL = 4  # big files come as shards; more connections than this do not help and are not polite


@dataclass(frozen=True)
class Remote:
    """One file of a repository. `sha256` of big files, `git_sha1` of the rest."""

    path: str
    size: int
    sha256: str | None
    git_sha1: str | None


class _NoTokenElsewhere(urllib.request.HTTPRedirectHandler):
    """A redirect to another host goes without the token: it is the hub's, not the file store's."""

    def redirect_request(  # noqa: PLR0917  (urllib says so)
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and urllib.parse.urlsplit(newurl).netloc != urllib.parse.urlsplit(req.full_url).netloc:
            new.remove_header("Authorization")
        return new


def endpoint() -> str:
    """The hub that is asked."""
    return (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")


def token() -> str | None:
    """The user's token; None without one."""
    if os.environ.get("HF_TOKEN"):
        return os.environ["HF_TOKEN"]
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    try:
        return Path(os.environ.get("HF_TOKEN_PATH") or home / "token").read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


Manifest = dict[str, dict[str, Any]]  # path to size and sha256, as cache.digests gives it


def fetch(  # noqa: PLR0917  (one thing to fetch, and how)
    name: str, repository: str, revision: str, allow_pickle: bool, look: bool = False, into: Path | None = None
) -> tuple[Path, list[str], Manifest]:
    """The folder with the repository's files at that revision, notes, and what was not fetched. Raises ModelError.

    Kept under gpu_fleet/models/hub of the cache, or in the folder `into`; whole files are not fetched twice, a partial one
    is continued. `look`, for check mode: big files stay where they are, since the hub tells their digests; only then
    something is not fetched.
    """
    _check(name, repository, revision)
    kept = cache.folder("models", "hub", repository.replace("/", "--"), revision)
    target = into or kept
    patience = LOOK_TIMEOUT if look else TIMEOUT
    with cache.locked(kept.with_suffix(".lock")):
        remote = {item.path: item for item in _listing(name, repository, revision, kept, patience)}
        content = choose(name, list(remote), allow_pickle)
        wanted = [item for path, item in remote.items() if path in content.files and not _is_whole(target / path, item)]
        if into is not None:
            wanted = [item for item in wanted if not _taken_over(kept / item.path, into / item.path, item)]
        left = {item.path: {"size": item.size, "sha256": item.sha256} for item in wanted if look and item.sha256}
        wanted = [item for item in wanted if item.path not in left]
        missing = sum(item.size for item in wanted)
        target.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target).free
        if missing > free:
            raise ModelError(
                f"model {name}: {size(missing)} have to come to {target} on the controller, {size(free)} are free there"
            )
        with concurrent.futures.ThreadPoolExecutor(_PARALLEL) as pool:
            for _done in pool.map(lambda item: _download(name, repository, revision, target, item, patience), wanted):
                pass
    return target, content.notes, left


def contents(name: str, repository: str, revision: str, allow_pickle: bool) -> tuple[list[Remote], list[str]]:
    """What of a repository is delivered, and notes; only the list is asked for. Raises ModelError."""
    _check(name, repository, revision)
    kept = cache.folder("models", "hub", repository.replace("/", "--"), revision)
    with cache.locked(kept.with_suffix(".lock")):
        remote = {item.path: item for item in _listing(name, repository, revision, kept, LOOK_TIMEOUT)}
    content = choose(name, list(remote), allow_pickle)
    return [remote[path] for path in content.files], content.notes


def is_whole(path: Path, item: Remote) -> bool:
    """Whether the file is there and is the hub's."""
    return _is_whole(path, item)


def _taken_over(known: Path, wanted: Path, item: Remote) -> bool:
    """Copy a file that the cache has whole already, instead of fetching it again."""
    if not _is_whole(known, item):
        return False
    wanted.parent.mkdir(parents=True, exist_ok=True)
    beside = wanted.with_name(f"{wanted.name}.part")
    shutil.copyfile(known, beside)
    beside.replace(wanted)
    return True


def _check(name: str, repository: str, revision: str) -> None:
    """ModelError for a name or a revision that the hub need not be asked for."""
    for mistake in judge_hub(name, repository, revision, endpoint()):
        raise ModelError(str(mistake))


def _listing(name: str, repository: str, revision: str, target: Path, patience: float) -> list[Remote]:
    """What the repository holds. A pinned revision never changes, so that it is asked for once."""
    kept = target.with_suffix(".json")
    if not kept.exists():
        url = f"{endpoint()}/api/models/{repository}/revision/{revision}?blobs=true"
        with _open(name, url, patience=patience) as answer:
            said = json.load(answer)
        if said.get("sha") not in (None, revision):
            raise ModelError(f"model {name}: {endpoint()} answered with revision {said['sha']}, asked was {revision}")
        beside = kept.with_suffix(".new")
        beside.write_text(json.dumps(said["siblings"]), encoding="utf-8")
        beside.replace(kept)
    return [_remote(name, item) for item in json.loads(kept.read_text(encoding="utf-8"))]


def _remote(name: str, item: dict[str, Any]) -> Remote:
    path, lfs = item["rfilename"], item.get("lfs") or {}
    if path.startswith("/") or any(part in ("", "..", ".") for part in path.split("/")):
        raise ModelError(f"model {name}: the repository has a file called {path!r}, which would lie outside its folder")
    if not lfs.get("sha256") and not item.get("blobId"):
        raise ModelError(f"model {name}: {endpoint()} gives no digest of {path}; nothing can be checked")
    return Remote(path, int(lfs.get("size") or item.get("size") or 0), lfs.get("sha256"), item.get("blobId"))


def _is_whole(path: Path, item: Remote) -> bool:
    """Whether the file is there and is the hub's; the digest cache spares reading it again."""
    if not path.is_file() or path.stat().st_size != item.size:
        return False
    if item.sha256:
        return cache.digests(path.parent, [path.name])[path.name]["sha256"] == item.sha256
    return _git_sha1(path) == item.git_sha1


def _git_sha1(path: Path) -> str:
    """What git calls a blob: SHA-1 over a header and the content. Only for files too small for LFS."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _download(  # noqa: PLR0917  (one call, from a thread)
    name: str, repository: str, revision: str, target: Path, item: Remote, patience: float
) -> None:
    """One file, continued where a connection was cut, checked, renamed into place."""
    final = target / item.path
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f"{final.name}.part")
    url = f"{endpoint()}/{repository}/resolve/{revision}/{urllib.parse.quote(item.path)}"
    for _attempt in range(_ATTEMPTS):
        _continue(name, url, partial, item.size, patience)
        if _is_whole(partial, item):
            partial.replace(final)
            return
        if partial.stat().st_size >= item.size:
            partial.unlink()
    raise ModelError(
        f"model {name}: {item.path} did not come as {endpoint()} announced it ({item.size} bytes) in {_ATTEMPTS} attempts. "
        "Run again; what is good is kept"
    )


def _continue(name: str, url: str, partial: Path, size_wanted: int, patience: float) -> None:
    """Append what is missing; a connection that is cut leaves what came."""
    have = partial.stat().st_size if partial.exists() else 0
    if have == size_wanted and partial.exists():
        return
    with (
        _open(name, url, have, patience) as answer,
        partial.open("ab" if have and answer.status == 206 else "wb") as handle,
    ):
        try:
            shutil.copyfileobj(answer, handle, _CHUNK)
        except (http.client.HTTPException, ConnectionError, TimeoutError):
            return  # the size says so to the caller, who tries again


def _open(name: str, url: str, start: int = 0, patience: float = TIMEOUT) -> Any:
    headers = {"User-Agent": "gpu_fleet.vllm"}
    if start:
        headers["Range"] = f"bytes={start}-"
    if token():
        headers["Authorization"] = f"Bearer {token()}"
    opener = urllib.request.build_opener(_NoTokenElsewhere)
    try:
        return opener.open(urllib.request.Request(url, headers=headers), timeout=patience)
    except urllib.error.HTTPError as error:
        remedy = {
            401: "Set HF_TOKEN: the repository is private or gated, or its name is wrong.",
            403: "Ask for access on the repository's page; HF_TOKEN has to belong to who has it.",
            404: "Look at name and revision.",
        }.get(error.code, "Try again later.")
        raise ModelError(f"model {name}: {url} answered {error.code} {error.reason}. {remedy}") from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        remedy = "Set HF_ENDPOINT to a mirror, or give the model as a folder."
        raise ModelError(f"model {name}: {url} cannot be reached ({reason}). {remedy}") from error
