# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""apt and dpkg change the packages of a driver: what was compared, nothing else, and what an ended run left half done.

Their output goes to a file, not to a pipe: they go on when the run that started them is gone, and what they did can be read.

Standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from typing import Any, Collection, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_apt, driver_host, driver_scratch
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.driver_host import Run

LOG = "/var/log/gpu-fleet-driver.log"
# DEBIAN_FRONTEND is debconf(7)'s, NEEDRESTART_SUSPEND needrestart's (ex/apt/needrestart-apt_d of its source): no service is restarted
# by its hook. APT_LISTCHANGES_FRONTEND is apt-listchanges(1)'s.
ENVIRONMENT = {
    "LC_ALL": "C",
    "DEBIAN_FRONTEND": "noninteractive",
    "NEEDRESTART_SUSPEND": "1",
    "APT_LISTCHANGES_FRONTEND": "none",
}
# apt.conf(5) and dpkg(1): files that somebody changed stay as they are, new defaults where nobody did.
KEEP = ("-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold", "-o", "Dpkg::Use-Pty=0")
# apt-pkg/contrib/fileutl.cc and apt-pkg/deb/debsystem.cc; lib/dpkg/file.c and dbmodify.c
LOCKED = re.compile(
    r"Could not get lock|Unable to (lock|acquire the dpkg)|lock was locked by another process|is another process using it"
)
SETTLING = 5.0  # seconds between two tries of dpkg while somebody else has its lock


def packages(run: Run) -> Dict[str, str]:
    """Everything that is installed, name to version."""
    return {
        name: item["version"] for name, item in driver_host.packages(run, ["*"]).items() if item["state"] == "installed"
    }


def unsettled(run: Run) -> Set[str]:
    """What dpkg left half done."""
    found = driver_host.packages(run, [])
    return {name for name, item in found.items() if item["state"] not in driver_host.SETTLED}


def exact(
    run: Run, steps: Sequence[Sequence[str]], expected: Mapping[str, Mapping[str, Any]], names: Collection[str]
) -> Dict[str, str]:
    """The version of each package: as planned, or else as dpkg has it half done."""
    found = {name: item["version"] for name, item in driver_host.packages(run, []).items() if name in names}
    planned = {**expected.get("install", {}), **expected.get("along", {})}
    planned.update({name: pair[1] for name, pair in expected.get("upgrade", {}).items()})
    told = dict(argument.split("=", 1) for step in steps for argument in step if "=" in argument)
    return {name: {**found, **planned, **told}[name] for name in names if name in {**found, **planned, **told}}


def without(did: Mapping[str, Mapping[str, Any]], names: Collection[str]) -> Dict[str, Dict[str, Any]]:
    return {what: {name: value for name, value in table.items() if name not in names} for what, table in did.items()}


def difference(before: Mapping[str, str], after: Mapping[str, str]) -> Dict[str, Dict[str, Any]]:
    """install, upgrade (old, new) and remove, by name."""
    return {
        "install": {name: version for name, version in after.items() if name not in before},
        "upgrade": {
            name: [before[name], version] for name, version in after.items() if before.get(name, version) != version
        },
        "remove": {name: version for name, version in before.items() if name not in after},
    }


def beyond(did: Mapping[str, Mapping[str, Any]], expected: Mapping[str, Mapping[str, Any]]) -> List[str]:
    """What was done, or would be, and was not to be expected, as text."""
    told = []
    coming = {**expected.get("install", {}), **expected.get("along", {})}
    coming.update({name: pair[1] for name, pair in expected.get("upgrade", {}).items()})
    for name, version in did["install"].items():
        if coming.get(name) != version:
            told.append(f"install {name} {version}")
    for name, (old, new) in did["upgrade"].items():
        if coming.get(name) != new:
            told.append(f"change {name} {old} to {new}")
    told += [
        f"remove {name} {version}" for name, version in did["remove"].items() if name not in expected.get("remove", {})
    ]
    return told


def simulated(run: Run, arguments: Sequence[str]) -> Tuple[Dict[str, Dict[str, Any]], List[str]]:
    """What apt would do with the host's own configuration now, and its errors."""
    _status, out, err = run(["apt-get", "-s", *driver_scratch.INSTALL, *arguments], driver_scratch.PATIENCE)
    told = driver_apt.read(f"{out}\n{err}")
    did: Dict[str, Dict[str, Any]] = {
        "install": told.installed,
        "upgrade": {name: list(pair) for name, pair in told.upgraded.items()},
        "remove": dict(told.removed),
    }
    return did, told.errors or ([] if told.finished else ["the output of apt-get -s is not whole"])


def execute(argv: Sequence[str], patience: Optional[float] = None) -> Tuple[int, str]:
    """Run it to its end, whatever becomes of this process: exit status and output. patience: seconds to wait for a lock of dpkg."""
    end = time.monotonic() + (patience or 0)
    while True:
        begins = os.path.getsize(LOG) if os.path.exists(LOG) else 0
        with open(LOG, "ab") as log:
            os.chmod(LOG, 0o640)
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT},
                start_new_session=True,
            )
            status = process.wait()
        with open(LOG, "rb") as log:
            log.seek(begins)
            out = log.read().decode("utf-8", "backslashreplace")
        if status and LOCKED.search(out) and time.monotonic() < end:
            time.sleep(SETTLING)
            continue
        return status, out


def update(lock: int) -> Tuple[int, str]:
    return execute(["apt-get", "update", "-q", "-o", f"DPkg::Lock::Timeout={lock}"], lock)


def take_in(lock: int) -> Tuple[int, str]:
    """Have dpkg take in the journal of unfinished updates that an ended run left, without which apt does nothing.

    dpkg(1), --set-selections, with nothing to set: configures nothing. apt completes what is half done itself (seen with apt 2.6.1 and
    dpkg 1.21.22).
    """
    return execute(["dpkg", "--set-selections"], lock)


def install(arguments: Sequence[str], lock: int) -> Tuple[int, str]:
    return execute(
        ["apt-get", "-y", "-q", "-o", f"DPkg::Lock::Timeout={lock}", *KEEP, *driver_scratch.INSTALL, *arguments], lock
    )
