"""What role gpu_driver leaves behind on Debian 12 after an upgrade that was cut short: Debian's own driver, for every kernel."""

from __future__ import annotations

import re

import pytest

VERSION = "535.309.01"
PACKAGES = ("nvidia-kernel-dkms", "libcuda1", "nvidia-smi")


def kernels(host):
    return host.run("ls /lib/modules").stdout.split()


@pytest.mark.parametrize("name", PACKAGES)
def test_the_exact_version_is_installed_and_held(host, name):
    told = host.run(f"dpkg-query -W -f '${{Version}} ${{db:Status-Abbrev}}' {name}").stdout.split()
    assert told == [f"{VERSION}-0+deb12u1", "hi"]


def test_every_part_of_the_driver_has_that_version(host):
    lines = host.run("dpkg-query -W -f '${Package} ${Version} ${db:Status-Abbrev}\\n'").stdout.splitlines()
    parts = {line.split()[0]: line.split()[1] for line in lines if line.endswith("i ") and "nvidia" in line.split()[0]}
    by_themselves = re.compile(r"nvidia-(kernel-common|support|installer-cleanup|modprobe)|glx-alternative-nvidia")
    own = {name: version for name, version in parts.items() if not by_themselves.fullmatch(name)}
    assert len(own) >= 8, own
    assert set(own.values()) == {f"{VERSION}-0+deb12u1"}, own


def test_nothing_of_the_other_kind_of_modules_is_left(host):
    assert "open" not in host.run("dpkg-query -W -f '${db:Status-Abbrev} ${Package}\\n' 'nvidia-*' | grep ^.i").stdout


def test_dkms_has_it_for_every_kernel_that_can_be_booted(host):
    status = host.run("dkms status").stdout
    found = kernels(host)
    assert len(found) == 1, found
    for kernel in found:
        assert re.search(rf"^nvidia-current/{VERSION}, {kernel}, x86_64: installed$", status, re.MULTILINE), status
        assert host.run(f"/sbin/modinfo -k {kernel} -F version nvidia-current").stdout.strip() == VERSION


def test_each_kernel_has_headers_and_none_was_upgraded(host):
    for kernel in kernels(host):
        assert host.file(f"/lib/modules/{kernel}/build/Makefile").exists
        assert host.run(f"dpkg-query -W -f '${{db:Status-Abbrev}}' linux-image-{kernel}").stdout == "ii "


def test_dpkg_has_nothing_half_done(host):
    assert host.run("dpkg --audit").stdout == ""
    assert host.run("ls /var/lib/dpkg/updates").stdout == ""


def test_the_note_of_what_was_under_way_is_gone(host):
    assert not host.file("/var/lib/gpu_fleet/driver-change.json").exists
    assert "gpu-fleet-driver" not in host.run("ls /var/tmp").stdout


def test_apt_itself_upgrades_no_part_of_the_driver(host):
    assert not re.search(r"^(Inst|Remv) (lib)?nvidia", host.run("apt-get -s dist-upgrade").stdout, re.MULTILINE)
    policy = host.run("apt-cache policy libcuda1").stdout
    assert f"Candidate: {VERSION}-0+deb12u1" in policy


def test_unattended_upgrades_is_told_to_leave_it_alone(host):
    told = host.run("apt-config dump Unattended-Upgrade::Package-Blacklist").stdout
    for part in ("nvidia-", "libnvidia-", "libcuda1$"):
        assert f'"{part}"' in told


def test_nouveau_stays_away_in_each_initramfs(host):
    assert host.file("/etc/modprobe.d/gpu-fleet-driver.conf").content_string.startswith("blacklist nouveau\n")
    for kernel in kernels(host):
        image = f"/boot/initrd.img-{kernel}"
        listed = host.run(f"lsinitramfs {image}").stdout
        assert "/nouveau.ko" in listed  # a stand-in, which side_effect.yml put there
        assert "etc/modprobe.d/gpu-fleet-driver.conf" in listed
        assert host.run(f"test {image} -nt /etc/modprobe.d/gpu-fleet-driver.conf").rc == 0


def test_what_was_stopped_runs_again(host):
    assert host.service("nvidia-dcgm").is_running


def test_the_source_is_one_file_of_the_hosts_own_mirror(host):
    text = host.file("/etc/apt/sources.list.d/gpu-fleet-driver.sources").content_string
    assert "Components: contrib non-free non-free-firmware\n" in text
    assert "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg" in text
    assert host.run("apt-get update").stderr.count("configured multiple times") == 0
