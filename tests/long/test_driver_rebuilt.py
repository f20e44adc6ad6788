"""Role gpu_driver upgrades Debian's own driver within its kind: open modules, real packages, on a lab host of Debian 12.

Debian has one version of its open modules at a time, so the upgrade is to the same packages rebuilt under a higher version
(tests/driver_repository/rebuild.py), in a repository beside Debian's that first says it is of the house, then that it is Debian's.
DKMS builds the modules of both versions from source. The machine with the GPUs is played, as in the scenario gpu_driver. Needs root and a quarter of an hour.

    scripts/test long driver_rebuilt
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from driver_fleet import HOST, Fleet, does_what_it_showed, lab

NAME = "long-rebuilt"
OLD, NEW, REVISION = "535.261.03", "535.261.90", "0rebuilt1"
PACKAGES = ("libcuda1", "nvidia-open-kernel-dkms", "nvidia-smi")
CONSENT = {"gpu_driver_reboot": True, "gpu_driver_stop_services": True}
AS_DEBIAN = """cd /srv/house && {
printf 'Origin: Debian\\nLabel: rebuilt\\nDate: %s\\nSHA256:\\n' "$(date -Ru)"
printf ' %s %s Packages\\n' "$(sha256sum Packages | cut -d' ' -f1)" "$(stat -c %s Packages)"
} > Release && apt-get -q update"""
REBUILD = Path(__file__).resolve().parents[1] / "driver_repository" / "rebuild.py"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    made = Fleet(NAME, "bookworm", tmp_path_factory.mktemp("rebuilt"), "gpu_driver")
    try:
        made.begin()
        yield made
    finally:
        made.end()


def proved(fleet: Fleet, version: str) -> None:
    have, held = fleet.installed(), set(fleet.ask("apt-mark showhold").split())
    assert {name: have[name].rpartition("-")[0] for name in PACKAGES} == dict.fromkeys(PACKAGES, version)
    assert set(PACKAGES) <= held
    kernels = fleet.ask("ls /lib/modules").split()
    assert len(kernels) == 1, kernels
    assert fleet.ask("dkms status").splitlines() == [f"nvidia-current-open/{version}, {kernels[0]}, x86_64: installed"]
    assert fleet.ask(f"/sbin/modinfo -k {kernels[0]} -F version nvidia-current-open") == version
    assert f"  {version}  " in fleet.ask("cat /srv/replay/proc/driver/nvidia/version")
    assert fleet.ask("dpkg --audit") == ""
    assert fleet.ask("ls -A /var/lib/gpu_fleet") == ""


def test_debians_own_open_driver_comes(fleet):
    does_what_it_showed(fleet)
    proved(fleet, OLD)


def test_a_newer_one_of_the_house_is_never_taken_for_debians(fleet):
    made = lab("exec", NAME, HOST, "--", "python3", "-c", REBUILD.read_text(), "/srv/house", NEW, REVISION)
    assert made.returncode == 0, made.stderr
    print("\n" + made.stdout)
    fleet.ask("echo 'deb [trusted=yes] file:/srv/house ./' > /etc/apt/sources.list.d/house.list; apt-get -q update")
    assert f"{NEW}-{REVISION}" in fleet.ask("apt-cache madison nvidia-open-kernel-dkms")
    assert not re.search(r"^(Inst|Remv) (lib)?(nvidia|cuda)", fleet.ask("apt-get -s dist-upgrade"), re.MULTILINE)
    run = fleet.play("converge.yml")
    assert (run.status, run.changed) == (0, 0), run.said[-6000:]
    run = fleet.play("converge.yml", gpu_driver_version=NEW, **CONSENT)
    assert run.status != 0
    assert f"nvidia-open-kernel-dkms {NEW} is not offered ({OLD}-1 is)" in run.said
    proved(fleet, OLD)


def test_an_update_of_debians_own_is_not_taken_without_consent(fleet):
    fleet.ask(AS_DEBIAN)
    assert re.search(r"o=Debian.*l=rebuilt", fleet.ask("apt-cache policy"))
    assert not re.search(r"^(Inst|Remv) (lib)?(nvidia|cuda)", fleet.ask("apt-get -s dist-upgrade"), re.MULTILINE)
    run = fleet.play("converge.yml", gpu_driver_version=NEW, gpu_driver_stop_services=True)
    assert run.status != 0
    assert f"it takes a reboot: driver {OLD} (open) is loaded" in run.said
    proved(fleet, OLD)


def test_an_upgrade_within_the_kind_does_what_it_showed_and_proves_the_new_one(fleet):
    before = set(fleet.installed())
    does_what_it_showed(fleet, gpu_driver_version=NEW, **CONSENT)
    proved(fleet, NEW)
    have = fleet.installed()
    assert set(have) == before
    assert f"{OLD}-" not in " ".join(have.values())


def test_a_second_run_changes_nothing(fleet):
    run = fleet.play("converge.yml", gpu_driver_version=NEW)
    assert (run.status, run.changed) == (0, 0), run.said[-6000:]


def test_back_within_the_kind_does_what_it_showed(fleet):
    does_what_it_showed(fleet, gpu_driver_version=OLD, **CONSENT)
    proved(fleet, OLD)
