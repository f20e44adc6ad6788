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


def test_no_packet_left_the_lab(lab_counters, host_name):
    told = lab_counters("test-mirror")
    assert told["hosts"][host_name]["packets"] == 0, told
