"""Role gpu_driver on lab hosts of Debian 13: what the scenarios gpu_driver_nvidia and gpu_driver show on Debian 12, in short.

First packages of the names and versions that NVIDIA's repository for it has, stand-ins (tests/driver_repository), on a played
HGX with NVSwitches. Then Debian's own driver, for real, on a played machine with two GPUs. apt 3 with its own judge of
signatures, dpkg, DKMS, the kernel's headers, systemd and the reboot are Debian 13's. Needs root and twenty minutes.

    scripts/test long driver_debian_13
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from driver_fleet import HOST, Fleet, does_what_it_showed, lab

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "driver_repository")]

import packages  # noqa: E402

NAME, SUITE = "long-debian-13", "trixie"
# NVIDIA's repository for Debian 13 began with branch 590.
FIRST, SECOND = packages.NEXT, packages.LAST
DRIVER = ("libcuda1", "libnvidia-ml1", "nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-persistenced")
FABRIC = ("nvidia-fabricmanager", "libnvidia-nscq")
CUINIT = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
# Debian's own. Its open modules of this version do not build for the kernels that it has now (6.12.117, seen 2026-11-30).
OWN, OWN_PACKAGES = "550.163.01", ("libcuda1", "nvidia-kernel-dkms", "nvidia-smi")
CONSENT = {"gpu_driver_reboot": True, "gpu_driver_stop_services": True}


def ask(command: str) -> str:
    return Fleet(NAME, SUITE, Path(), "").ask(command)


def installed() -> dict[str, str]:
    return Fleet(NAME, SUITE, Path(), "").installed()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    made = Fleet(NAME, SUITE, tmp_path_factory.mktemp("debian-13"), "gpu_driver_nvidia")
    try:
        made.begin()
        yield made
    finally:
        made.end()


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
    made = Fleet(NAME, SUITE, tmp_path_factory.mktemp("debian-13-own"), "gpu_driver")
    try:
        made.begin(gpu_driver_version=OWN, gpu_driver_modules="proprietary")
        yield made
    finally:
        made.end()


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
