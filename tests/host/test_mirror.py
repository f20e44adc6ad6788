"""Hosts of a site without a way out, deployed from a carried folder alone."""

from __future__ import annotations

import pytest

PACKAGES = "/var/lib/gpu_fleet/packages"
SOURCE = "/etc/apt/sources.list.d/gpu-fleet-carried.sources"


@pytest.mark.parametrize("name", ["nftables", "libnuma1"])
def test_a_package_came_from_the_folder(host, name):
    assert host.package(name).is_installed
    policy = host.check_output(f"apt-cache policy {name}")
    assert f"file:{PACKAGES}/" in policy
    assert "http" not in policy


def test_apt_reads_the_folder_and_nothing_else_and_says_so_quietly(host):
    done = host.run("LC_ALL=C apt-get update")
    assert done.rc == 0
    said = done.stdout + done.stderr
    assert not [line for line in said.splitlines() if line.startswith(("N:", "W:", "E:", "Err:"))], said
    assert host.check_output("ls /etc/apt/sources.list.d | grep -E 'list$|sources$'") == "gpu-fleet-carried.sources"
    assert host.file(SOURCE).contains("Trusted: yes")


def test_its_own_sources_are_set_aside_as_they_were(host):
    wanted = dict(reversed(line.split()) for line in host.file("/root/sources").content_string.splitlines())
    now = host.check_output("cd /etc/apt && sha256sum sources.list.d/*.gpu-fleet-aside").splitlines()
    aside = {line.split()[1].removesuffix(".gpu-fleet-aside"): line.split()[0] for line in now}
    assert wanted
    assert {name: aside[name] for name in wanted} == wanted


def test_a_source_that_somebody_added_is_set_aside_too(host, host_name):
    assert host.file("/etc/apt/sources.list.d/own.list.gpu-fleet-aside").exists == (host_name == "gpu-01")


def test_the_packages_are_as_they_were_carried(host):
    folder = host.check_output(f"ls -d {PACKAGES}/debian-*")
    told = host.check_output(f"awk '/^Filename/ {{f=$2}} /^SHA256/ {{print $2 \"  \" f}}' {folder}/Packages")
    assert told.count("\n") > 10
    host.run_expect([0], f"cd {folder} && echo '{told}' | sha256sum --strict --quiet -c -")


def test_release_and_model_are_there(host):
    (release,) = host.check_output("ls -d /opt/vllm/releases/0.32.0-cpu-*").split()
    assert host.check_output(f"env PYTHONDONTWRITEBYTECODE=1 {release}/bin/vllm") == "0.32.0+cpu"
    assert host.file("/var/lib/vllm/models/mini/config.json").contains("stand-in")


@pytest.fixture
def gpus(host, host_name):
    """The host that plays a machine with GPUs; the other one has nothing of them."""
    return host if host_name == "gpu-02" else None


def test_the_driver_came_from_the_folder_whole(host, gpus):
    found = host.run("dpkg-query -W -f '${Package} ${Version}\\n' 'nvidia-*' 'libnvidia-*' 'datacenter-gpu-manager-*'")
    if gpus is None:
        assert "nvidia-driver-cuda" not in found.stdout
        return
    have = dict(line.split() for line in found.stdout.splitlines() if len(line.split()) == 2)
    assert have["nvidia-driver-cuda"] == have["nvidia-kernel-open-dkms"] == "580.126.20-1"
    assert "580.126.20" in host.check_output("cat /srv/replay/proc/driver/nvidia/version")
    toolkit = [name for name in have if "container" in name]
    assert len(toolkit) == 4
    assert {have[name] for name in toolkit} == {"1.18.1-1"}


def test_dcgm_is_of_the_drivers_cuda_and_its_exporter_asks_the_hosts_engine(host, gpus):
    if gpus is None:
        assert not host.exists("nv-hostengine")
        return
    assert host.package("datacenter-gpu-manager-4-cuda13").version == "1:4.4.1-1"
    assert not host.package("datacenter-gpu-manager-4-cuda12").is_installed
    for unit in ("nvidia-dcgm.service", "nvidia-dcgm-exporter.service"):
        assert host.service(unit).is_running
        assert host.service(unit).is_enabled
    settings = host.check_output("systemctl show -P Environment nvidia-dcgm-exporter.service")
    assert "DCGM_REMOTE_HOSTENGINE_INFO=127.0.0.1:5555" in settings
    assert host.socket("tcp://127.0.0.1:9400").is_listening
    assert not host.socket("tcp://0.0.0.0:9400").is_listening


def test_no_packet_left_the_lab(lab_counters, host_name):
    told = lab_counters("test-mirror")
    assert told["hosts"][host_name]["packets"] == 0, told
