"""What this machine is told about mirrors, proxies, certificates and names, read so that lab hosts inherit it.

Nothing of it is written into the repository: it goes into the root file systems below /var/cache and /var/lib only.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from .errors import UsageError
from .shell import PATH, run

APT = Path("/etc/apt")
# apt settings that decide how packages are fetched; the rest (hooks, what to keep) is this machine's own business.
_FETCHING = re.compile(r"Acquire::(http|https|ftp|Check-|Retries|ForceIPv)", re.IGNORECASE)


@dataclass(frozen=True)
class AptSettings:
    """Sources for one Debian release and what is needed to use them."""

    sources: str
    options: str
    keyrings: tuple[Path, ...] = ()
    logins: tuple[Path, ...] = ()


@dataclass(frozen=True)
class MachineSettings:
    """All a base root file system is made from."""

    apt: AptSettings
    certificates: tuple[Path, ...] = field(default=())


def debian_suite(os_release: str = "/etc/os-release") -> str:
    """The code name this machine runs; bookworm elsewhere than on Debian."""
    values = dict(
        line.split("=", 1) for line in Path(os_release).read_text(encoding="utf-8").splitlines() if "=" in line
    )
    name = values.get("VERSION_CODENAME", "").strip('"')
    return name if values.get("ID", "").strip('"') == "debian" and name else "bookworm"


def _uncommented(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


def stanzas(text: str) -> list[dict[str, str]]:
    """deb822 paragraphs; continuation lines stay part of their field. A disabled paragraph is left out."""
    found = []
    for paragraph in re.split(r"\n[ \t]*\n", _uncommented(text)):
        fields: dict[str, str] = {}
        name = ""
        for line in paragraph.splitlines():
            if line[:1] in (" ", "\t") and name:
                fields[name] += "\n" + line
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.strip()
                fields[name] = value.strip()
        if fields and fields.get("Enabled", "yes").lower() not in ("no", "false", "0"):
            found.append(fields)
    return found


def one_line_entry(line: str) -> dict[str, str] | None:
    """`deb [signed-by=KEY] URI SUITE COMPONENT...` as deb822 fields; None for anything else."""
    match = re.fullmatch(r"\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s*(.*?)\s*(?:#.*)?", line)
    if not match:
        return None
    options, uri, suite, components = match.groups()
    fields = {"Types": "deb", "URIs": uri, "Suites": suite, "Components": components}
    names = {
        "signed-by": "Signed-By",
        "trusted": "Trusted",
        "arch": "Architectures",
        "check-valid-until": "Check-Valid-Until",
    }
    for option in (options or "").split():
        key, _, value = option.partition("=")
        if key.lower() in names:
            fields[names[key.lower()]] = value.replace(",", " ")
    return fields


def _entries(folder: Path) -> list[dict[str, str]]:
    entries: list[dict[str, str]] = []
    files = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))]
    for path in files:
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix == ".sources":
            entries += stanzas(text)
        elif path.suffix == ".list":
            entries += [entry for line in text.splitlines() if (entry := one_line_entry(line))]
    return entries


def for_suite(entries: list[dict[str, str]], here: str, suite: str) -> list[dict[str, str]]:
    """The entries that carry Debian itself, for the release `suite`; third parties' are left out.

    Debian's own archives are told by their suites (bookworm, -updates, -security) and the component main. For
    another release than this machine's the same mirrors are used with the release's name put in.
    """
    own = {here, f"{here}-updates", f"{here}-security", f"{here}/updates"}
    kept = []
    for entry in entries:
        suites = [name for name in entry.get("Suites", "").split() if name in own]
        if "deb" in entry.get("Types", "").split() and suites and "main" in entry.get("Components", "").split():
            renamed = " ".join(name.replace(here, suite, 1) for name in suites)
            kept.append({**entry, "Types": "deb", "Suites": renamed, "Components": "main"})
    return kept


def apt_settings(suite: str, here: str | None = None, folder: Path = APT) -> AptSettings:
    """apt as this machine uses it. UsageError when it has no source of Debian's."""
    entries = for_suite(_entries(folder), here or debian_suite(), suite)
    if not entries:
        raise UsageError(
            f"no source of Debian's main component in {folder}/sources.list or sources.list.d: a lab host could not be made"
        )
    text = "\n\n".join("\n".join(f"{name}: {value}" for name, value in entry.items()) for entry in entries) + "\n"
    keys = [Path(word) for entry in entries for word in entry.get("Signed-By", "").split() if word.startswith("/")]
    keys += [
        path for path in sorted((folder / "trusted.gpg.d").glob("*")) if not path.name.startswith("debian-archive-")
    ]
    logins = sorted((folder / "auth.conf.d").glob("*.conf"))
    return AptSettings(text, _apt_options(), tuple(dict.fromkeys(key for key in keys if key.is_file())), tuple(logins))


def _apt_options() -> str:
    """Proxy and checks of this machine's apt, and the proxy its environment names."""
    lines = [
        line for line in run(["apt-config", "dump", "--format", '%F "%v";%n']).splitlines() if _FETCHING.match(line)
    ]
    lines = [line for line in lines if not line.endswith('"";')]
    for scheme in ("http", "https"):
        proxy = os.environ.get(f"{scheme}_proxy") or os.environ.get(f"{scheme.upper()}_PROXY")
        if proxy and not any(line.lower().startswith(f"acquire::{scheme}::proxy ") for line in lines):
            lines.append(f'Acquire::{scheme}::Proxy "{proxy}";')
    # A certificate file named by path is this machine's: its certificates reach the host through its own bundle.
    return "\n".join(line for line in lines if "::CAInfo" not in line and "::CAPath" not in line) + "\n"


def certificates(folder: Path = Path("/usr/local/share/ca-certificates")) -> tuple[Path, ...]:
    """Certificates somebody added to this machine, to be trusted by the hosts as well."""
    return tuple(sorted(path for path in folder.rglob("*.crt") if path.is_file()))


def settings(suite: str) -> MachineSettings:
    return MachineSettings(apt_settings(suite), certificates())


def resolv_conf() -> str:
    """Name servers a host can reach. A resolver on this machine's loopback is replaced by the ones it asks itself."""
    for candidate in ("/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"):
        try:
            text = Path(candidate).read_text(encoding="utf-8")
        except OSError:
            continue
        lines = [line for line in text.splitlines() if not re.match(r"\s*nameserver\s+(127\.|::1)", line)]
        if any(line.strip().startswith("nameserver") for line in lines):
            return "\n".join(lines) + "\n"
    return "# this machine names no resolver that a lab host could reach\n"


def http_proxy() -> str | None:
    """The proxy of this machine's environment, for the inventory's fleet_http_proxy."""
    names = ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY")
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def uplink_mtu() -> int:
    """MTU of the interface with the default route: the hosts keep to it, or large packets would vanish behind it."""
    done = subprocess.run(
        shlex.split("ip -o -4 route show default"),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": PATH},
    )
    match = re.search(r"\bdev (\S+)", done.stdout)
    try:
        return int(Path(f"/sys/class/net/{match.group(1)}/mtu").read_text(encoding="utf-8")) if match else 1500
    except OSError:
        return 1500
