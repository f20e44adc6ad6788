"""Role gpu_driver on lab hosts of Debian 13: what the scenarios gpu_driver_nvidia and gpu_driver show on Debian 12, in short.

First packages of the names and versions that NVIDIA's repository for it has, stand-ins (tests/driver_repository), on a played
HGX with NVSwitches. Then Debian's own driver, for real, on a played machine with two GPUs. apt 3 with its own judge of
signatures, dpkg, DKMS, the kernel's headers, systemd and the reboot are Debian 13's. Needs root and twenty minutes.

    scripts/test long driver_debian_13
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "molecule" / "shared" / "lab.py"
MOLECULE = ROOT / "molecule"
sys.path[:0] = [str(ROOT / "tests" / "driver_repository")]

import packages  # noqa: E402

NAME, HOST = "long-debian-13", "gpu-01"
# NVIDIA's repository for Debian 13 began with branch 590.
FIRST, SECOND = packages.NEXT, packages.LAST
DRIVER = ("libcuda1", "libnvidia-ml1", "nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-persistenced")
FABRIC = ("nvidia-fabricmanager", "libnvidia-nscq")
CUINIT = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
# Debian's own. Its open modules of this version do not build for the kernels that it has now (6.12.117, seen 2026-11-30).
OWN, OWN_PACKAGES = "550.163.01", ("libcuda1", "nvidia-kernel-dkms", "nvidia-smi")
IMAGE = "linux-image-cloud-amd64"
CONSENT = {"gpu_driver_reboot": True, "gpu_driver_stop_services": True}
PATIENCE = 1200.0


def lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(LAB), *arguments], capture_output=True, text=True, check=False)


def ask(command: str) -> str:
    """What a command of the host prints, its errors too."""
    return lab("exec", NAME, HOST, "--", "sh", "-c", f"({command}) 2>&1").stdout.strip()


def installed() -> dict[str, str]:
    lines = ask("dpkg-query -W -f '${db:Status-Status} ${Package} ${Version}\\n'").splitlines()
    return {name: version for state, name, version in (line.split(" ") for line in lines) if state == "installed"}


@dataclass
class Run:
    """One run of the role. said: what it printed, with single spaces."""

    status: int
    said: str
    seconds: float

    @property
    def changed(self) -> int:
        return int(re.findall(r"changed=(\d+)", self.said)[0])

    @property
    def planned(self) -> set[tuple[str, str, str]]:
        """Changes of packages that the plan shows: name, old or nothing, new or nothing."""
        found = {(name, "", new) for name, new in re.findall(r"- install (\S+) (\d\S*)", self.said)}
        found |= set(re.findall(r"- change (\S+) (\S+) to (\S+)", self.said))
        return found | {(name, old, "") for name, old in re.findall(r"- remove (\S+) (\S+)", self.said)}


class Fleet:
    """The lab with its one host. scenario: whose playbooks and variables it has."""

    def __init__(self, folder: Path, scenario: str) -> None:
        self.folder, self.scenario = folder, MOLECULE / scenario

    def begin(self, **changes) -> None:
        lab("down", NAME)
        up = lab("up", NAME, "--host", HOST, "--suite", "trixie")
        assert up.returncode == 0, up.stderr
        inventory = self.folder / "inventory"
        inventory.mkdir()
        (inventory / "lab.yml").write_text(Path(up.stdout.strip()).read_text(encoding="utf-8"), encoding="utf-8")
        told = yaml.safe_load((self.scenario / "molecule.yml").read_text(encoding="utf-8"))
        variables = {**told["provisioner"]["inventory"]["group_vars"]["gpu_hosts"], **changes}
        groups = {"gpu_hosts": {"hosts": {HOST: None}, "vars": variables}}
        (inventory / "groups.yml").write_text(json.dumps(groups), encoding="utf-8")
        if self.scenario.name == "gpu_driver_nvidia":
            # Headers of Debian 13 ask for their kernel's image, and the role lets none come.
            ask(
                f"apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends {IMAGE}"
            )
            assert "install ok" in ask(f"dpkg-query -W -f '${{Status}}' {IMAGE}")
        run = self.play("prepare.yml")
        assert run.status == 0, run.said[-6000:]

    def play(self, playbook: str, *options: str, **variables) -> Run:
        program = str(Path(sys.executable).parent / "ansible-playbook")
        command = [program, str(self.scenario / playbook), "-i", str(self.folder / "inventory"), *options]
        environment = {
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
            "PLAYED": str(self.folder / "played"),
            "ANSIBLE_NOCOLOR": "1",
        }
        began = time.monotonic()
        done = subprocess.run(
            [*command, "-e", json.dumps(variables)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        return Run(done.returncode, " ".join((done.stdout + done.stderr).split()), time.monotonic() - began)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    made = Fleet(tmp_path_factory.mktemp("debian-13"), "gpu_driver_nvidia")
    try:
        made.begin()
        yield made
    finally:
        assert lab("down", NAME).returncode == 0


def does_what_it_showed(fleet: Fleet, **variables) -> None:
    """A run in check mode names every package that the next one changes, by name and version, and no other."""
    before = installed()
    shown = fleet.play("converge.yml", "--check", "--diff", **variables)
    assert shown.status == 0, shown.said[-6000:]
    assert installed() == before
    run = fleet.play("converge.yml", **variables)
    assert run.status == 0, run.said[-6000:]
    after = installed()
    happened = {
        (name, before.get(name, ""), after.get(name, ""))
        for name in {*before, *after}
        if before.get(name) != after.get(name)
    }
    assert happened == shown.planned == run.planned
    assert happened
    assert not [item for item in happened if item[0] == "libc6" or item[0].startswith("linux-image")]
    print(f"\nshown in {shown.seconds:.0f} s, done in {run.seconds:.0f} s on a machine that others used, too")


def proved(version: str) -> None:
    have = installed()
    exact = packages.DRIVERS[version]
    assert {name: have.get(name) for name in (*DRIVER, *FABRIC)} == dict.fromkeys((*DRIVER, *FABRIC), exact)
    assert {*DRIVER, *FABRIC} <= set(ask("apt-mark showhold").split())
    kernel = ask("cat /srv/replay/proc/sys/kernel/osrelease")
    assert f"nvidia/{version}, {kernel}, x86_64: installed" in ask("dkms status").splitlines()
    assert f"  {version}  " in ask("cat /srv/replay/proc/driver/nvidia/version")
    for unit in ("nvidia-fabricmanager", "nvidia-persistenced"):
        assert ask(f"systemctl is-active {unit}") == "active"
    assert lab("exec", NAME, HOST, "--", "python3", "-c", CUINIT).stdout.strip() == "0"
    assert ask("dpkg --audit") == ""
    assert ask("ls -A /var/lib/gpu_fleet") == ""


def test_it_is_debian_13(fleet):
    assert "VERSION_CODENAME=trixie" in ask("cat /etc/os-release")
    print("\n" + ask("dpkg-query -W apt dpkg python3 systemd"))


def test_the_driver_comes_as_it_was_shown_and_is_held_built_loaded_and_starts_cuda(fleet):
    does_what_it_showed(fleet, gpu_driver_version=FIRST)
    proved(FIRST)


def test_a_second_run_changes_nothing(fleet):
    run = fleet.play("converge.yml", gpu_driver_version=FIRST)
    assert (run.status, run.changed) == (0, 0), run.said[-6000:]


def test_failure_1_apt_and_unattended_upgrades_leave_it_alone(fleet):
    offered = ask("apt-cache madison nvidia-driver-cuda")
    assert packages.DRIVERS[SECOND] in offered
    assert not re.search(r"^(Inst|Remv) (lib)?nvidia", ask("apt-get -s dist-upgrade"), re.MULTILINE)
    assert '"libnvidia-"' in ask("apt-config dump Unattended-Upgrade::Package-Blacklist")


def test_failure_7_a_key_with_another_fingerprint_is_no_key(fleet):
    run = fleet.play("converge.yml", gpu_driver_version=SECOND, gpu_driver_repository_fingerprint="0" * 40, **CONSENT)
    assert run.status != 0
    assert "expected is 0000" in run.said
    proved(FIRST)


def test_nothing_is_rebooted_without_consent(fleet):
    run = fleet.play("converge.yml", gpu_driver_version=SECOND, gpu_driver_stop_services=True)
    assert run.status != 0
    assert "it takes a reboot" in run.said
    proved(FIRST)


def test_an_upgrade_reboots_with_consent_and_comes_as_it_was_shown(fleet):
    booted = ask("cut -d' ' -f22 /proc/1/stat")
    does_what_it_showed(fleet, gpu_driver_version=SECOND, **CONSENT)
    assert ask("cut -d' ' -f22 /proc/1/stat") != booted
    proved(SECOND)


def test_a_second_run_after_it_changes_nothing(fleet):
    run = fleet.play("converge.yml", gpu_driver_version=SECOND)
    assert (run.status, run.changed) == (0, 0), run.said[-6000:]


# Debian's own driver


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    made = Fleet(tmp_path_factory.mktemp("debian-13-own"), "gpu_driver")
    try:
        made.begin(gpu_driver_version=OWN, gpu_driver_modules="proprietary")
        yield made
    finally:
        assert lab("down", NAME).returncode == 0


def test_wheels_that_debians_own_driver_cannot_run_are_refused(own):
    before = installed(), ask("find /etc/apt -type f | sort")
    run = own.play("converge.yml", gpu_driver_releases=[{"version": "0.26.0", "accelerator": "cu130"}])
    assert run.status != 0
    assert "CUDA 13 wheels need 580.65.06 or newer" in run.said
    assert (installed(), ask("find /etc/apt -type f | sort")) == before


def test_debians_own_driver_comes_as_it_was_shown_and_is_held_and_built_and_loaded(own):
    does_what_it_showed(own)
    have, held = installed(), set(ask("apt-mark showhold").split())
    assert {name: have[name].rpartition("-")[0] for name in OWN_PACKAGES} == dict.fromkeys(OWN_PACKAGES, OWN)
    assert set(OWN_PACKAGES) <= held
    kernels = ask("ls /lib/modules").split()
    assert len(kernels) == 1, kernels
    assert f"nvidia-current/{OWN}, {kernels[0]}, x86_64: installed" in ask("dkms status").splitlines()
    assert f"  {OWN}  " in ask("cat /srv/replay/proc/driver/nvidia/version")
    assert ask("dpkg --audit") == ""
    print("\n" + ask("dpkg-query -W 'nvidia-*' 'libnvidia-*' libcuda1 dkms | grep -v '\t$'; dkms status"))


def test_a_second_run_with_debians_own_driver_changes_nothing(own):
    run = own.play("converge.yml")
    assert (run.status, run.changed) == (0, 0), run.said[-6000:]
    assert not re.search(r"^(Inst|Remv) (lib)?nvidia", ask("apt-get -s dist-upgrade"), re.MULTILINE)
