# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a host says about its driver's surroundings: kernels, packages, sources, DKMS, initramfs; facts, no judgement.

All commands go through `run(argv, timeout) -> (exit status, stdout, stderr)` as in gpu_facts.py; files lie below `root`.
Commands of apt and dpkg have no root of their own, so a recorded host has the packages of the host that plays it.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

Run = Callable[[Sequence[str], float], Tuple[int, str, str]]

PATIENCE = 60.0
# What the role leaves while it changes a driver, and takes away when it is through.
MARK = "/var/lib/gpu_fleet/driver-change.json"
# What DKMS signs with unless its framework.conf names another: DKMS 3.0.10, prepare_signing
DKMS_KEYS = {"ubuntu": "/var/lib/shim-signed/mok/MOK.der", "": "/var/lib/dkms/mok.pub"}
MELLANOX = "0x15b3"  # vendor of the adapters that manage NVLink 5's switches, on the PCI bus
# Debian and Ubuntu: /etc/kernel/postinst.d/initramfs-tools
INITRD = "boot/initrd.img-{kernel}"
# dpkg(1), PACKAGE STATES; the ones in which nothing is left to do
SETTLED = ("installed", "config-files", "not-installed")


def gather(
    run: Run,
    *,
    root: str = "/",
    globs: Sequence[str] = (),
    modules: Sequence[str] = (),
    names: str = "",
    files: Iterable[str] = (),
) -> Dict[str, Any]:
    """Every fact of the module, each key always there.

    root     where the files of a recorded host lie; boot, etc/os-release and dpkg's are the host's own
    globs    of the packages that are looked for
    modules  that are looked for in the running kernel's folder
    names    of our file in /etc/modprobe.d
    files    that are read
    """
    release = _line(run, ["uname", "-r"])
    recorded = _text(root, "proc/sys/kernel/osrelease") if root != "/" else None
    kernel = (recorded or release or "").strip()
    installed = packages(run, globs)
    named = system(_text("/", "etc/os-release") or "")
    key = dkms_key("/", named or "")
    return {
        "system": named,
        "kernel": kernel or None,
        "kernels": kernels("/", run, names),
        "packages": {name: item for name, item in installed.items() if item["state"] == "installed"},
        "unsettled": {name: item["state"] for name, item in installed.items() if item["state"] not in SETTLED},
        "interrupted": _interrupted(),
        "audit": (_try(run, ["dpkg", "--audit"]) or ("", ""))[0],
        "sources": sources("/"),
        "secure_boot": _both(run, ["mokutil", "--sb-state"]),
        "key_enrolled": _enrolled(run, key),
        "dkms_key": key,
        "nvlink5": _nvlink5(root),
        "modules": _modules(kernel, modules),
        "loaded": _loaded(root, modules),
        "units": units(run),
        "dkms": (_try(run, ["dkms", "status"]) or ("", ""))[0],
        "runfile": any(os.path.lexists(f"/usr/bin/{name}") for name in ("nvidia-uninstall", "nvidia-installer")),
        "compat": _compat(run),
        "mark": _mark(),
        "files": {path: _text("/", path.lstrip("/")) for path in files},
        "params": params(_text(root, "proc/driver/nvidia/params") or ""),
    }


def _try(run: Run, argv: Sequence[str]) -> Optional[Tuple[str, str]]:
    """Standard output and error, whatever the exit status; None for a command that is not there or hangs."""
    try:
        _status, out, err = run(argv, PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return out, err


def _both(run: Run, argv: Sequence[str]) -> Optional[str]:
    told = _try(run, argv)
    return None if told is None else "".join(told)


def _line(run: Run, argv: Sequence[str]) -> Optional[str]:
    told = _try(run, argv)
    return told[0].strip() if told else None


def _text(root: str, name: str) -> Optional[str]:
    try:
        with open(os.path.join(root, name), encoding="utf-8", errors="backslashreplace") as handle:
            return handle.read()
    except OSError:
        return None


def system(os_release: str) -> Optional[str]:
    """debian-12 or ubuntu-24.04 of /etc/os-release, os-release(5)."""
    told = dict(re.findall(r'^(ID|VERSION_ID)="?([^"\n]*)"?$', os_release, re.MULTILINE))
    return f"{told['ID']}-{told['VERSION_ID']}" if len(told) == 2 else None


# Kernels


def kernels(root: str, run: Run, names: str = "") -> Dict[str, Dict[str, Any]]:
    """Every kernel that can be booted: its image is in /boot, or its own modules are there.

    A folder of /lib/modules that holds nothing but what DKMS once built is a kernel that is gone.
    headers  whether what modules are built against lies there
    initrd   nouveau: whether the module is in it; ours: whether our file of /etc/modprobe.d is, of the same age or newer; null
             without an initrd or without lsinitramfs
    """
    found: Dict[str, Dict[str, Any]] = {}
    lib = os.path.join(root, "lib/modules")
    folders = {name for name in _names(lib) if os.path.isdir(os.path.join(lib, name, "kernel"))}
    images = {name[8:] for name in _names(os.path.join(root, "boot")) if name.startswith("vmlinuz-")}
    for release in sorted(folders | images):
        if release.endswith((".old", ".bak")):
            continue
        found[release] = {
            "headers": os.path.exists(os.path.join(lib, release, "build", "Makefile")),
            "initrd": _initrd(root, run, release, names),
        }
    return found


def _names(folder: str) -> List[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _initrd(root: str, run: Run, release: str, names: str) -> Optional[Dict[str, bool]]:
    path = os.path.join(root, INITRD.format(kernel=release))
    if not os.path.exists(path):
        return None
    told = _try(run, ["lsinitramfs", path])
    if told is None or not told[0].strip():
        return None
    lines = told[0].splitlines()
    ours = os.path.join(root, "etc/modprobe.d", names)
    there = bool(names) and any(line.endswith(f"etc/modprobe.d/{names}") for line in lines)
    return {
        "nouveau": any(re.search(r"/nouveau\.ko(\.\w+)?$", line) for line in lines),
        "ours": there and os.path.exists(ours) and os.path.getmtime(path) >= os.path.getmtime(ours),
    }


def _modules(kernel: str, wanted: Sequence[str]) -> Optional[Dict[str, bool]]:
    """Whether the kernel has them, loadable or built in; None for a kernel without a list of its modules."""
    folder = f"lib/modules/{kernel}"
    lists = [_text("/", f"{folder}/{name}") for name in ("modules.dep", "modules.builtin")]
    if not kernel or lists[0] is None:
        return None
    text = "\n".join(item or "" for item in lists)
    return {name: bool(re.search(rf"(^|/){re.escape(name)}\.ko", text, re.MULTILINE)) for name in wanted}


def _loaded(root: str, wanted: Sequence[str]) -> List[str]:
    lines = (_text(root, "proc/modules") or "").splitlines()
    return [name for name in wanted if any(line.startswith(f"{name} ") for line in lines)]


# Packages


def packages(run: Run, globs: Sequence[str]) -> Dict[str, Dict[str, Any]]:
    """Packages of dpkg that a glob matches, and all that are not settled: version, hold, state, origin None."""
    form = "${binary:Package}\t${Version}\t${db:Status-Want}\t${db:Status-Status}\t${db:Status-Eflag}\n"
    told = _try(run, ["dpkg-query", "-W", "-f", form])
    found: Dict[str, Dict[str, Any]] = {}
    for line in (told[0] if told else "").splitlines():
        name, version, want, state, flag = line.split("\t")
        name = plain(name)
        state = "reinst-required" if flag == "reinstreq" else state
        if state not in SETTLED or any(fnmatch.fnmatchcase(name, pattern) for pattern in globs):
            found[name] = {"version": version, "hold": want == "hold", "state": state, "origin": None}
    return found


def plain(name: str) -> str:
    """Without the architecture, unless it is a foreign one."""
    return re.sub(r":(amd64|arm64|all)$", "", name)


def origins(text: str) -> Dict[str, str]:
    """Index line of `apt-cache policy` without names, such as `http://host/debian bookworm/main amd64 Packages`, to its origin (o=)."""
    found, last = {}, None
    for line in text.splitlines():
        index = re.match(r"^\s*-?\d+ (\S.*)$", line)
        label = re.match(r"^\s+release (.*)$", line)
        if index:
            last = index.group(1).strip()
        elif label and last is not None:
            parts = dict(part.partition("=")[::2] for part in label.group(1).split(","))
            found[last] = parts.get("o", "")
    return found


def policy(text: str, known: Mapping[str, str]) -> Dict[str, List[Dict[str, Any]]]:
    """What `apt-cache policy NAME...` says is offered: name to [{version, origin}], in its order, newest first.

    What only dpkg's status has is not offered. known: what `origins` found.
    """
    found: Dict[str, List[Dict[str, Any]]] = {}
    name, version, table = None, None, False
    for line in text.splitlines():
        head = re.match(r"^(\S+):$", line)
        entry = re.match(r"^ (?:\*\*\*|   ) (\S+) -?\d+$", line)
        index = re.match(r"^ {8}\s*-?\d+ (\S.*)$", line)
        if head:
            name, version, table = plain(head.group(1)), None, False
        elif line == "  Version table:":
            table = True
        elif table and entry:
            version = entry.group(1)
        elif table and index and name and version and not index.group(1).startswith("/var/lib/dpkg/status"):
            offered = found.setdefault(name, [])
            item = {"version": version, "origin": known.get(index.group(1).strip(), "")}
            if item not in offered:
                offered.append(item)
    return found


def available(
    run: Run, globs: Sequence[str], exact: Iterable[str] = (), options: Sequence[str] = ()
) -> Dict[str, List[Dict[str, Any]]]:
    """Everything that the sources offer of the packages that a glob matches, and of some by name.

    options  of apt, for another configuration than the host's own
    """
    every = _try(run, ["apt-cache", *options, "pkgnames"])
    names = set(every[0].split()) if every else set()
    wanted = sorted(
        {name for name in names if any(fnmatch.fnmatchcase(name, glob) for glob in globs)} | (set(exact) & names)
    )
    if not wanted:
        return {}
    indices = _try(run, ["apt-cache", *options, "policy"])
    told = _try(run, ["apt-cache", *options, "policy", *wanted])
    return policy(told[0], origins(indices[0])) if told and indices else {}


def _interrupted() -> bool:
    """dpkg's journal of unfinished updates: with files in it apt refuses to do anything."""
    return any(name.isdigit() for name in _names("/var/lib/dpkg/updates"))


# Sources


def sources(root: str) -> List[Dict[str, Any]]:
    """Every enabled entry of sources.list(5), one an address and suite, of both forms, in apt's order."""
    found: List[Dict[str, Any]] = []
    folder = os.path.join(root, "etc/apt/sources.list.d")
    paths = ["/etc/apt/sources.list", *(f"/etc/apt/sources.list.d/{name}" for name in sorted(_names(folder)))]
    for path in paths:
        text = _text(root, path.lstrip("/"))
        if text is not None and path.endswith(".sources"):
            found += deb822(path, text)
        elif text is not None and path.endswith(".list"):
            found += one_line(path, text)
    return found


def one_line(path: str, text: str) -> List[Dict[str, Any]]:
    """`deb [signed-by=FILE arch=amd64] URI SUITE COMPONENT...`"""
    found = []
    for line in text.splitlines():
        match = re.match(r"^\s*deb\s+(?:\[([^\]]*)\]\s*)?(\S+)\s+(\S+)([^#]*)", line)
        if match:
            options, uri, suite, rest = match.groups()
            told = dict(part.partition("=")[::2] for part in (options or "").split())
            entry = {"uri": uri, "suite": suite, "components": rest.split()}
            found.append({"file": path, **entry, "signed_by": told.get("signed-by") or None})
    return found


def deb822(path: str, text: str) -> List[Dict[str, Any]]:
    found = []
    for paragraph in re.split(r"\n\s*\n", re.sub(r"(?m)^#.*\n?", "", text)):
        told: Dict[str, str] = {}
        key = None
        for line in paragraph.splitlines():
            if re.match(r"^\s", line) and key:
                told[key] += "\n" + line.strip()
            elif ":" in line:
                key = line.partition(":")[0].strip().lower()
                told[key] = line.partition(":")[2].strip()
        if "deb" not in told.get("types", "").split() or told.get("enabled", "yes").lower() in ("no", "false", "0"):
            continue
        entry = {"components": told.get("components", "").split(), "signed_by": told.get("signed-by") or None}
        found += [
            {"file": path, "uri": uri, "suite": suite, **entry}
            for uri in told.get("uris", "").split()
            for suite in told.get("suites", "").split()
        ]
    return found


# What runs, and what lies about


def units(run: Run) -> List[str]:
    """Services that are active, on their way, or still going: what drains uses the GPUs to its end."""
    told = _try(
        run,
        [
            *("systemctl", "list-units", "--type=service", "--state=active,activating,reloading,deactivating"),
            *("--plain", "--no-legend", "--full"),
        ],
    )
    return [line.split()[0] for line in (told[0] if told else "").splitlines() if line.split()]


def dkms_key(root: str, named: str) -> Dict[str, Any]:
    """The certificate that DKMS signs with, and whether it is there: DKMS makes it with its first build only."""
    path = DKMS_KEYS.get(named.split("-", maxsplit=1)[0], DKMS_KEYS[""])
    folder = "etc/dkms/framework.conf.d"
    more = sorted(name for name in _names(os.path.join(root, folder)) if name.endswith(".conf"))
    for name in ("etc/dkms/framework.conf", *(f"{folder}/{name}" for name in more)):
        told = re.findall(r"^\s*mok_certificate=[\"']?([^\s\"']+)", _text(root, name) or "", re.MULTILINE)
        path = told[-1] if told else path
    return {"path": path, "there": os.path.exists(os.path.join(root, path.lstrip("/")))}


def _enrolled(run: Run, key: Mapping[str, Any]) -> Optional[bool]:
    """mokutil(1), --test-key: `FILE is already enrolled`."""
    told = _both(run, ["mokutil", "--test-key", key["path"]]) if key["there"] else None
    return None if told is None else "is already enrolled" in told


def params(text: str) -> Dict[str, str]:
    """Name to value of /proc/driver/nvidia/params: `EnableGpuFirmware: 18`, a text in quotes."""
    return {name: value.strip('"') for name, value in re.findall(r"^(\w+): (.*)$", text, re.MULTILINE)}


def _nvlink5(root: str) -> bool:
    """As the start script of NVIDIA's Fabric Manager looks: the VPD of an InfiniBand device has SW_MNG in it.

    That script has loaded mlx5_ib before; here nothing may be loaded yet, so the PCI bus is asked for the adapters, too.
    """
    folder = os.path.join(root, "sys/class/infiniband")
    devices = [os.path.join(folder, name, "device") for name in _names(folder)]
    bus = os.path.join(root, "sys/bus/pci/devices")
    devices += [
        os.path.join(bus, name)
        for name in sorted(_names(bus))
        if (_text(os.path.join(bus, name), "vendor") or "").strip() == MELLANOX
    ]
    return any(_manages_switches(os.path.join(device, "vpd")) for device in devices)


def _manages_switches(vpd: str) -> bool:
    try:
        with open(vpd, "rb") as handle:
            return b"SW_MNG" in handle.read()
    except OSError:
        return False


def _compat(run: Run) -> List[str]:
    """Folders of cuda-compat that the loader finds, by its cache and by the environment of every login."""
    told = _try(run, ["ldconfig", "-p"])
    found = {os.path.dirname(path) for path in re.findall(r"libcuda\.so\S* .*=> (\S+)", told[0] if told else "")}
    for line in (_text("/", "etc/environment") or "").splitlines():
        if line.startswith("LD_LIBRARY_PATH="):
            found |= set(line.partition("=")[2].strip("\"'").split(":"))
    return sorted(folder for folder in found if re.search(r"/(cuda-)?compat(/|$)|cuda-compat", folder))


def _mark() -> Optional[Dict[str, Any]]:
    text = _text("/", MARK.lstrip("/"))
    try:
        told = json.loads(text) if text else None
    except ValueError:
        return {}
    return told if isinstance(told, dict) or told is None else {}
