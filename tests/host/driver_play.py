"""Runs of role gpu_driver against the played machines of a scenario, for the tests beside this file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import testinfra

ROOT = Path(__file__).resolve().parents[2]
INVENTORY = Path(os.environ["MOLECULE_INVENTORY_FILE"]).parent
sys.path.insert(0, str(ROOT / "tests" / "driver_repository"))

import packages  # noqa: E402

OLD, NEW, NEXT, LAST = packages.OLD, packages.NEW, packages.NEXT, packages.LAST
HGX, PLAIN = "gpu-01", "gpu-02"
CONSENT = {"gpu_driver_reboot": True, "gpu_driver_stop_services": True}
DRIVER = ("libcuda1", "libnvidia-ml1", "nvidia-driver-cuda", "nvidia-kernel-open-dkms")
CUINIT = "python3 -c 'import ctypes; print(ctypes.CDLL(\"libcuda.so.1\").cuInit(0))'"
CONVERGE = "molecule/gpu_driver_nvidia/converge.yml"


@dataclass
class Run:
    """One run of the playbook: exit status and what it printed, with single spaces."""

    status: int
    said: str

    @property
    def changed(self) -> int:
        return sum(int(word.split("=")[1]) for word in self.said.split() if word.startswith("changed="))

    @property
    def planned(self) -> set[tuple[str, str, str]]:
        """Changes of packages in the plan that it showed: name, old or nothing, new or nothing."""
        found = {(name, "", new) for name, new in re.findall(r"- install (\S+) (\d\S*)", self.said)}
        found |= set(re.findall(r"- change (\S+) (\S+) to (\S+)", self.said))
        return found | {(name, old, "") for name, old in re.findall(r"- remove (\S+) (\S+)", self.said)}


def play(host: str, *options: str, playbook: str = CONVERGE, **variables) -> Run:
    command = [f"{Path(sys.executable).parent}/ansible-playbook", str(ROOT / playbook), "-i", str(INVENTORY)]
    command += ["--limit", host] if host else []
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
        "PLAYED": str(INVENTORY.parent / "played"),
        # molecule asks for colours on a terminal, and they would stand between the words.
        "ANSIBLE_FORCE_COLOR": "0",
        "ANSIBLE_NOCOLOR": "1",
    }
    done = subprocess.run(
        [*command, "-e", json.dumps(variables), *options], env=environment, capture_output=True, text=True, check=False
    )
    # The callback wraps long lines and writes an apostrophe twice in a quoted text.
    said = " ".join((done.stdout + done.stderr).split()).replace("''", "'")
    print(done.stdout[-12000:], done.stderr[-2000:])
    return Run(done.returncode, said)


def refused(hosts: str, *words: str, **variables) -> Run:
    """A run that is to stop for a reason that names the hosts, with no package changed and nothing stopped."""
    machines = {name: connect(name) for name in hosts.split(",")}
    before = {name: state(machine) for name, machine in machines.items()}
    run = play(hosts, **variables)
    assert run.status != 0, "the role went on"
    for word in (*machines, *words):
        assert word in run.said, f"it does not say: {word}"
    assert {name: state(machine) for name, machine in machines.items()} == before
    return run


def connect(name: str):
    return testinfra.get_host(f"ansible://{name}?ansible_inventory={INVENTORY}")


def installed(machine) -> dict[str, str]:
    form = "${db:Status-Abbrev} ${binary:Package} ${Version}\\n"
    lines = machine.check_output(f"dpkg-query -W -f '{form}'").splitlines()
    words = [line.split() for line in lines]
    return {name.split(":")[0]: version for status, name, version in words if status in ("ii", "hi")}


def state(machine) -> dict:
    """What a refusal may not change."""
    units = "nvidia-persistenced nvidia-fabricmanager"
    return {
        "packages": installed(machine),
        "held": machine.run("dpkg --get-selections | grep -w hold").stdout,
        "units": machine.run(f"systemctl show {units} -p Id,ActiveState,MainPID").stdout,
        "files": machine.check_output(
            "find /etc/apt /etc/modprobe.d /usr/share/keyrings -type f -exec sha256sum {} + | sort"
        ),
        "boot": machine.check_output("cut -d' ' -f22 /proc/1/stat"),
    }


def versions(machine, *names: str) -> set[str]:
    have = installed(machine)
    return {have.get(name, "none") for name in names}


def write(machine, path: str, text: str) -> None:
    machine.check_output(f"mkdir -p $(dirname {path}) && printf %s '{text}' > {path}")
