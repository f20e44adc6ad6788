"""What pip is told on this machine, and the same said to uv.

Companies configure pip (an index of their own, an extra index, a folder of wheels, a CA bundle) and expect every
installer to follow. uv reads none of that, so this module reads pip's settings the way pip does and turns them into
uv's environment variables. Sources: https://pip.pypa.io/en/stable/topics/configuration/ (files, precedence, how
option names become variables) and https://docs.astral.sh/uv/reference/environment/ (uv's names).

Standard library only: it runs before the virtual environment exists.
"""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Later sections win: an option of `pip install` overrides the same option in [global].
SECTIONS = ("global", "install")


@dataclass(frozen=True)
class PipSettings:
    """pip's settings that decide where packages come from; addresses as they were written."""

    index_url: str | None = None
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    no_index: bool = False
    cert: str | None = None
    proxy: str | None = None
    trusted_hosts: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    timeout: str | None = None
    sources: tuple[str, ...] = field(default=(), compare=False)


def config_files(
    environ: Mapping[str, str], prefix: str = sys.prefix, base_prefix: str = sys.base_prefix
) -> list[Path]:
    """pip's configuration files, weakest first: machine, user, interpreter, then the one PIP_CONFIG_FILE names."""
    named = environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return []
    home = Path(environ.get("HOME") or "~").expanduser()
    xdg_machine = [
        Path(folder) / "pip" / "pip.conf" for folder in environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":") if folder
    ]
    xdg_user = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    # Inside a virtual environment pip reads that environment's file; the base interpreter's is kept too, since the
    # environment here is a tool of ours and the machine's owner configured the base.
    interpreter = [Path(base_prefix) / "pip.conf"] + ([Path(prefix) / "pip.conf"] if prefix != base_prefix else [])
    files = [
        *reversed(xdg_machine),
        Path("/etc/pip.conf"),
        home / ".pip" / "pip.conf",
        xdg_user / "pip" / "pip.conf",
        *interpreter,
    ]
    return files + ([Path(named)] if named else [])


def _from_files(files: Iterable[Path]) -> tuple[dict[str, str], list[str]]:
    """Options of all files (later ones win) and the files that were read."""
    by_section: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    read: list[str] = []
    for path in files:
        parser = configparser.RawConfigParser()
        try:
            text = path.read_text(encoding="utf-8")
        except OSError:
            continue
        try:
            parser.read_string(text)
        except configparser.Error as error:
            raise ValueError(
                f"{path}: not a pip configuration file ({error}); repair it, pip itself would refuse it too"
            ) from error
        read.append(str(path))
        for section in SECTIONS:
            if parser.has_section(section):
                by_section[section].update({key.replace("_", "-"): value for key, value in parser.items(section)})
    return {**by_section["global"], **by_section["install"]}, read


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """PIP_EXTRA_INDEX_URL=... is the option extra-index-url; an empty variable says nothing, as in pip."""
    return {
        name[len("PIP_") :].lower().replace("_", "-"): value
        for name, value in environ.items()
        if name.startswith("PIP_") and name != "PIP_CONFIG_FILE" and value
    }


def pip_settings(environ: Mapping[str, str] | None = None, files: Iterable[Path] | None = None) -> PipSettings:
    """Read pip's settings from its files and environment. Raises ValueError for a file that is no pip configuration."""
    environ = os.environ if environ is None else environ
    options, read = _from_files(config_files(environ) if files is None else files)
    options.update(_from_environment(environ))

    def many(name: str) -> tuple[str, ...]:
        return tuple(options.get(name, "").split())

    return PipSettings(
        index_url=options.get("index-url") or None,
        extra_index_urls=many("extra-index-url"),
        find_links=many("find-links"),
        no_index=options.get("no-index", "").lower() in ("1", "true", "yes", "on"),
        cert=options.get("cert") or None,
        proxy=options.get("proxy") or None,
        trusted_hosts=many("trusted-host"),
        constraints=many("constraint"),
        timeout=options.get("timeout") or options.get("default-timeout") or None,
        sources=tuple(read),
    )


def local_path(address: str) -> Path | None:
    """The folder or file on this machine that an index or find-links address means; None for a network address."""
    parts = urlsplit(address)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme and "://" in address else Path(address).expanduser()


def usable(addresses: Iterable[str]) -> tuple[str, ...]:
    """Addresses without the local ones that do not exist: pip warns about those, uv stops."""
    kept = []
    for address in addresses:
        path = local_path(address)
        if path is None or path.exists():
            kept.append(address)
    return tuple(kept)


def network_only(settings: PipSettings) -> PipSettings:
    """The settings another machine can use as well: no paths of this one."""

    def remote(addresses: Iterable[str]) -> tuple[str, ...]:
        return tuple(address for address in addresses if local_path(address) is None)

    index = settings.index_url if settings.index_url and local_path(settings.index_url) is None else None
    return PipSettings(
        index_url=index,
        extra_index_urls=remote(settings.extra_index_urls),
        find_links=remote(settings.find_links),
        no_index=settings.no_index,
        proxy=settings.proxy,
        trusted_hosts=settings.trusted_hosts,
        timeout=settings.timeout,
    )


def uv_environment(settings: PipSettings, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that make uv look where pip looks. What the caller's environment tells uv itself (UV_...) stays.

    `UV_INDEX_STRATEGY=unsafe-best-match` is pip's own behaviour: every index is asked for every package. With hashes
    in the lock an index cannot slip in another file. Constraints are not passed on: a lock is already exact.
    """
    environ = os.environ if environ is None else environ
    wanted: dict[str, str] = {}
    if settings.index_url and usable([settings.index_url]):
        wanted["UV_DEFAULT_INDEX"] = settings.index_url
    if extra := usable(settings.extra_index_urls):
        wanted["UV_INDEX"] = " ".join(extra)
        wanted["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    if links := usable(settings.find_links):
        wanted["UV_FIND_LINKS"] = ",".join(links)
    if settings.no_index:
        wanted["UV_NO_INDEX"] = "1"
    if settings.cert and Path(settings.cert).exists():
        wanted["SSL_CERT_FILE"] = settings.cert
    if settings.trusted_hosts:
        wanted["UV_INSECURE_HOST"] = " ".join(settings.trusted_hosts)
    if settings.proxy:
        wanted["ALL_PROXY"] = settings.proxy
    if settings.timeout and settings.timeout.isdigit():
        wanted["UV_HTTP_TIMEOUT"] = settings.timeout
    return {name: value for name, value in wanted.items() if name not in environ or not name.startswith("UV_")}
