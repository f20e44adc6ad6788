"""NVIDIA's packages on two played machines, and the failures that operators meet: the role is run with other variables, and
its words and the hosts are read.

Packages are stand-ins of a signed repository (tests/driver_repository); apt, dpkg, DKMS, systemd, unattended-upgrades and
reboots are real. gpu-01 is an HGX with NVSwitches, gpu-02 has none. The tests run in order, each with what the one before
left. Names say which of the fifteen failures (tests/unit/test_driver_plan.py) a test plays.
"""

from __future__ import annotations

import re

import pytest
from driver_play import (
    CONSENT,
    CUINIT,
    DRIVER,
    HGX,
    LAST,
    NEW,
    OLD,
    PLAIN,
    connect,
    installed,
    packages,
    play,
    refused,
    versions,
    write,
)


@pytest.fixture(scope="module")
def hgx():
    return connect(HGX)


@pytest.fixture(scope="module")
def plain():
    return connect(PLAIN)


# What the first run left


@pytest.mark.parametrize("name", [HGX, PLAIN])
def test_the_exact_version_is_installed_built_loaded_and_starts_cuda(name):
    machine = connect(name)
    assert versions(machine, *DRIVER) == {f"{OLD}-1"}
    kernel = machine.check_output("cat /srv/replay/proc/sys/kernel/osrelease")
    assert f"nvidia/{OLD}, {kernel}, x86_64: installed" in machine.check_output("dkms status")
    assert OLD in machine.check_output("cat /srv/replay/proc/driver/nvidia/version")
    assert machine.check_output(CUINIT) == "0"
    assert f"{OLD}" in machine.check_output("nvidia-smi --query-gpu=driver_version --format=csv,noheader,nounits")


@pytest.mark.parametrize("name", [HGX, PLAIN])
def test_failure_1_an_unattended_upgrade_leaves_the_driver_alone(name):
    """For real, and told to take everything that NVIDIA's repository has, where 615 is the newest."""
    machine = connect(name)
    machine.check_output("DEBIAN_FRONTEND=noninteractive apt-get -qq -y install unattended-upgrades >/dev/null")
    allow = 'Unattended-Upgrade::Origins-Pattern { "origin=NVIDIA"; };\n'
    write(machine, "/etc/apt/apt.conf.d/99-allow-nvidia", allow)
    assert "nvidia-kernel-open-dkms" in machine.check_output("apt-mark showhold").split()
    before = installed(machine)
    said = machine.run("unattended-upgrade --verbose --debug")
    assert said.rc == 0, said.stderr
    assert installed(machine) == before
    # Each of the three keeps it by itself. The block list, without hold and pin:
    held = machine.check_output("apt-mark showhold").split()
    machine.check_output(f"apt-mark unhold {' '.join(held)} && mv /etc/apt/preferences.d /etc/apt/preferences.away")
    alone = machine.run("unattended-upgrade --dry-run --verbose --debug")
    listed = re.findall(r"Packages that will be upgraded:(.*)", alone.stdout + alone.stderr)
    assert alone.rc == 0
    assert not [word for line in listed for word in line.split() if word in (*DRIVER, "nvidia-fabricmanager")]
    # and without the block list it would go to the newest branch: the trap is one
    machine.check_output("mv /etc/apt/apt.conf.d/52gpu-fleet-driver /root/")
    sprung = machine.run("unattended-upgrade --dry-run --verbose")
    assert re.search(r"Packages that will be upgraded:.*libcuda1.*nvidia-driver-cuda", sprung.stdout + sprung.stderr)
    # The pins, without hold and block list
    machine.check_output("mv /etc/apt/preferences.away /etc/apt/preferences.d")
    pinned = machine.check_output("apt-get -s dist-upgrade")
    assert not re.search(r"^Inst (libcuda1|libnvidia|nvidia-)", pinned, re.MULTILINE)
    machine.check_output("mv /root/52gpu-fleet-driver /etc/apt/apt.conf.d/")
    machine.check_output(f"rm -f /etc/apt/apt.conf.d/99-allow-nvidia; apt-mark hold {' '.join(held)}")


def test_failure_2_the_fabric_manager_has_exactly_the_drivers_version_and_stands_only_where_switches_are(hgx, plain):
    assert versions(hgx, "nvidia-fabricmanager", "libnvidia-nscq") == {f"{OLD}-1"}
    assert versions(plain, "nvidia-fabricmanager", "libnvidia-nscq") == {"none"}
    assert hgx.service("nvidia-fabricmanager").is_running
    assert hgx.service("nvidia-fabricmanager").is_enabled
    assert f"Fabric Manager version is : {OLD}" in hgx.check_output("nv-fabricmanager --version")
    assert {"nvidia-fabricmanager", "libnvidia-nscq"} <= set(hgx.check_output("apt-mark showhold").split())


def test_failure_2_a_second_run_does_not_restart_the_fabric_manager(hgx):
    before = hgx.check_output("systemctl show nvidia-fabricmanager -p MainPID,InvocationID")
    run = play(HGX)
    assert (run.status, run.changed) == (0, 0)
    assert hgx.check_output("systemctl show nvidia-fabricmanager -p MainPID,InvocationID") == before


def test_failure_3_cuda_error_802_is_told_where_nvidia_smi_is_fine(hgx):
    hgx.check_output("echo 802 > /srv/replay/cuinit")
    assert hgx.check_output("nvidia-smi -L").count("GPU ") == 8
    run = play(HGX)
    hgx.check_output("rm /srv/replay/cuinit")
    assert run.status != 0
    assert "cuInit returned 802, CUDA_ERROR_SYSTEM_NOT_READY" in run.said
    assert "Fabric Manager of exactly the driver's version" in run.said


@pytest.mark.parametrize(
    ("code", "words"),
    [(803, "Compare /proc/driver/nvidia/version with libcuda"), (999, "Look whether nvidia-uvm is loaded")],
)
def test_other_codes_of_cuinit_are_told_with_their_remedy(plain, code, words):
    plain.check_output(f"echo {code} > /srv/replay/cuinit")
    run = play(PLAIN)
    plain.check_output("rm /srv/replay/cuinit")
    assert run.status != 0
    assert f"cuInit returned {code}, " in run.said
    assert words in run.said


# Refused before anything is changed


def test_failure_6_the_metapackage_and_apt_itself_stay_on_the_branch(plain):
    """cuda-drivers-580 is met by any newer branch; with the role's pins it is not. Asked as on a host without packages."""

    def branches(options: str) -> set[str]:
        bare = f"apt-get -s -o Dir::State::status=/dev/null {options} install cuda-drivers-580"
        coming = re.findall(r"^Inst (\S+) \((\d+)", plain.check_output(bare), re.MULTILINE)
        return {number for name, number in coming if re.match("nvidia-driver|nvidia-kernel|libnvidia|libcuda", name)}

    assert branches("") == {"580"}
    assert "615" in branches("-o Dir::Etc::preferencesparts=/none"), "the trap is none"


def test_failure_6_asked_580_by_the_metapackage_comes_580(plain):
    asked = ["cuda-drivers-580", "nvidia-driver-cuda", "nvidia-kernel-open-dkms"]
    run = play(PLAIN, "--check", gpu_driver_packages=asked, gpu_driver_version=NEW, **CONSENT)
    assert run.status == 0
    coming = [(name, new) for name, _, new in run.planned if new]
    names = {name: new for name, new in coming if name.startswith(("nvidia-", "libnvidia", "libcuda", "cuda-"))}
    assert {"cuda-drivers-580", "nvidia-driver", "nvidia-driver-cuda", "libcuda1"} <= set(names)
    assert {version.split(".")[0] for version in names.values()} == {"580"}


def test_failure_6_a_transitional_package_that_jumps_to_the_open_modules_is_refused(plain):
    refused(
        PLAIN, "615 has no proprietary modules", gpu_driver_version=LAST, gpu_driver_modules="proprietary", **CONSENT
    )


def test_failure_7_conflicting_signed_by_is_refused_and_taken_away_by_consent(plain):
    other = "/etc/apt/sources.list.d/cuda-debian12-x86_64.list"
    entry = "deb [signed-by=/srv/driver-repository/old-key.gpg] file:/srv/driver-repository/nvidia/ /\n"
    write(plain, other, entry)
    assert "Conflicting values set for option Signed-By" in plain.run("apt-get update").stderr
    refused(PLAIN, "Conflicting values set for option Signed-By", other, "gpu_driver_replace_sources: true")
    run = play(PLAIN, gpu_driver_replace_sources=True)
    assert run.status == 0
    assert not plain.file(other).exists
    assert plain.run("apt-get update").rc == 0


def test_failure_7_an_old_key_in_the_place_of_the_keyring_is_replaced(plain):
    keyring = "/usr/share/keyrings/cuda-archive-keyring.gpg"
    good = plain.file(keyring).sha256sum
    plain.check_output(f"cp /srv/driver-repository/old-key.gpg {keyring}")
    assert "NO_PUBKEY" in plain.run("apt-get update").stderr
    assert play(PLAIN).status == 0
    assert plain.file(keyring).sha256sum == good


def test_failure_7_a_key_with_another_fingerprint_is_no_key():
    refused(PLAIN, "expected is " + "0" * 40, gpu_driver_repository_fingerprint="0" * 40)


def test_failure_8_packages_of_another_provider_are_refused_by_name(plain):
    write(plain, "/etc/apt/sources.list.d/other.list", "deb [trusted=yes] file:/srv/driver-repository/debian/ /\n")
    plain.check_output(
        "apt-get -qq update && apt-get -qq -y install nvidia-alternative=535.309.01-0+deb12u1 --allow-downgrades >/dev/null 2>&1"
        " || apt-get -qq -y -o Dir::Etc::preferencesparts=/none install nvidia-alternative >/dev/null"
    )
    refused(
        PLAIN,
        "packages of another provider than nvidia are installed: nvidia-alternative 535.309.01-0+deb12u1 (Debian)",
        "the role removes none of them",
    )
    plain.check_output(
        "apt-get -qq -y purge nvidia-alternative >/dev/null && rm /etc/apt/sources.list.d/other.list && apt-get -qq update"
    )


def test_failure_8_held_broken_packages_are_told_with_what_lacks(plain):
    run = refused(PLAIN, "held broken packages", "libcuda1", gpu_driver_version=packages.WITHDRAWN, **CONSENT)
    assert "Nothing was changed" in run.said


def test_failure_9_modules_that_a_gpu_does_not_work_with_are_refused(plain):
    devices = "/srv/replay/sys/bus/pci/devices"
    cards = plain.check_output(f"grep -l 0x2335 {devices}/*/device").split()
    for card in cards:
        plain.check_output(f"echo 0x2901 > {card}")  # B200
    refused(PLAIN, "work with the open modules only", gpu_driver_modules="proprietary")
    for card in cards:
        plain.check_output(f"echo 0x1db6 > {card}")  # V100
    refused(PLAIN, "work with the proprietary modules only", gpu_driver_modules="open")
    for card in cards:
        plain.check_output(f"echo 0x2335 > {card}")


def test_failure_10_a_kernel_whose_headers_nobody_has_is_refused(plain):
    plain.check_output("touch /boot/vmlinuz-6.1.0-1-stand-in")
    refused(PLAIN, "kernel 6.1.0-1-stand-in is installed, its headers are not", "linux-headers-6.1.0-1-stand-in")
    plain.check_output("rm /boot/vmlinuz-6.1.0-1-stand-in")


def test_failure_10_a_further_kernel_gets_headers_and_modules_before_it_is_booted(plain):
    running = plain.check_output("cat /srv/replay/proc/sys/kernel/osrelease")
    other = running.replace("-cloud-amd64", "-amd64")
    plain.check_output(f"touch /boot/vmlinuz-{other}")
    told = play(PLAIN, "--check")
    assert f"- install linux-headers-{other}" in told.said
    assert play(PLAIN).status == 0
    built = plain.check_output("dkms status")
    for kernel in (running, other):
        assert f"nvidia/{OLD}, {kernel}, x86_64: installed" in built
    assert f"linux-image-{other}" not in installed(plain)
    again = play(PLAIN)
    assert (again.status, again.changed) == (0, 0)


def test_failure_11_secure_boot_with_a_key_that_is_not_enrolled_is_refused(hgx):
    variable = "/srv/replay/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
    hgx.check_output(f"cp {variable} /root/secure-boot && printf '\\006\\000\\000\\000\\001' > {variable}")
    refused(
        HGX,
        "Secure Boot is on",
        "Key was rejected by service",
        "mokutil --import /var/lib/dkms/mok.pub",
        gpu_driver_version=NEW,
        **CONSENT,
    )
    hgx.check_output(f"cp /root/secure-boot {variable}")


def test_failure_15_the_open_modules_without_gpu_firmware_are_refused():
    refused(PLAIN, "the open modules do not work without the GPU's firmware", gpu_driver_gpu_firmware=False)


def test_failure_15_the_container_toolkit_has_one_version_or_none(plain):
    version = packages.TOOLKIT[0]
    refused(PLAIN, "nvidia-container-toolkit 9.9.9 is not offered", gpu_driver_toolkit="9.9.9")
    run = play(PLAIN, gpu_driver_toolkit=version)
    assert run.status == 0
    four = (
        "nvidia-container-toolkit",
        "nvidia-container-toolkit-base",
        "libnvidia-container-tools",
        "libnvidia-container1",
    )
    assert versions(plain, *four) == {version}
    assert set(four) <= set(plain.check_output("apt-mark showhold").split())
    assert (play(PLAIN, gpu_driver_toolkit=version).changed) == 0


def test_dcgm_of_the_drivers_cuda_runs_with_the_exporter_of_its_pair(plain):
    """Stand-ins both: how they are chosen, installed, held, started and asked is real."""
    pair = {"gpu_driver_dcgm": "4.4.1", "gpu_driver_dcgm_exporter": "4.5.2"}
    refused(PLAIN, "exporter 4.5.2 goes with DCGM 4.4.1", **{**pair, "gpu_driver_dcgm": "4.5.2"})
    run = play(PLAIN, **pair)
    assert run.status == 0
    parts = ("datacenter-gpu-manager-4-core", "datacenter-gpu-manager-4-cuda13")
    assert versions(plain, *parts) == {packages.DCGM[0]}
    assert "datacenter-gpu-manager-4-cuda12" not in installed(plain)
    assert {*parts, "datacenter-gpu-manager-exporter"} <= set(plain.check_output("apt-mark showhold").split())
    for unit in ("nvidia-dcgm", "nvidia-dcgm-exporter"):
        assert plain.service(unit).is_running
        assert plain.service(unit).is_enabled
    # On the address that is asked for, and of the host's engine, not of one of its own.
    address = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:9400/metrics').read().decode())"
    assert "stand_in 1" in plain.check_output(f'python3 -c "{address}"')
    told = plain.check_output("systemctl show nvidia-dcgm-exporter -p Environment")
    assert "DCGM_REMOTE_HOSTENGINE_INFO=127.0.0.1:5555" in told
    again = play(PLAIN, **pair)
    assert (again.status, again.changed) == (0, 0)
