"""What a host says about its driver's surroundings, as its tools print it; keys without gpg; apt in a folder of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import (
    driver_change,
    driver_host,
    driver_key,
    driver_scratch,
)

KERNEL = "6.1.0-50-cloud-amd64"

POLICY_ALL = """Package files:
 100 /var/lib/dpkg/status
     release a=now
 500 http://deb.example.org/debian-security bookworm-security/non-free amd64 Packages
     release v=12,o=Debian,a=oldstable-security,n=bookworm-security,l=Debian-Security,c=non-free,b=amd64
     origin deb.example.org
  -1 https://repo.example/cuda/debian12/x86_64  Packages
     release o=NVIDIA,l=NVIDIA CUDA,c=
     origin repo.example
Pinned packages:
     nvidia-smi -> 535.261.03-1 with priority 1001
"""
POLICY_NAMES = """nvidia-smi:
  Installed: 535.261.03-1
  Candidate: 535.309.01-0+deb12u1
  Version table:
     535.309.01-0+deb12u1 500
        500 http://deb.example.org/debian-security bookworm-security/non-free amd64 Packages
         -1 https://repo.example/cuda/debian12/x86_64  Packages
 *** 535.261.03-1 100
        100 /var/lib/dpkg/status
libcuda1:
  Installed: (none)
  Candidate: (none)
  Version table:
     1:580.1-1 -1
         -1 https://repo.example/cuda/debian12/x86_64  Packages
gone:
  Installed: 1.0
  Candidate: 1.0
  Version table:
 *** 1.0 100
        100 /var/lib/dpkg/status
"""


def test_what_is_offered_has_the_origin_of_its_source_and_what_only_dpkg_has_is_not_offered():
    found = driver_host.policy(POLICY_NAMES, driver_host.origins(POLICY_ALL))
    assert found == {
        "nvidia-smi": [
            {"version": "535.309.01-0+deb12u1", "origin": "Debian"},
            {"version": "535.309.01-0+deb12u1", "origin": "NVIDIA"},
        ],
        "libcuda1": [{"version": "1:580.1-1", "origin": "NVIDIA"}],
    }


def test_packages_that_a_glob_names_and_all_that_are_half_done():
    lines = [
        "nvidia-smi\t535.261.03-1\thold\tinstalled\tok",
        "libcuda1:amd64\t535.261.03-1\tinstall\tinstalled\tok",
        "libcuda1:i386\t535.261.03-1\tinstall\tinstalled\tok",
        "nano\t7.2-1\tinstall\thalf-configured\tok",
        "bash\t5.2-1\tinstall\tinstalled\tok",
        "vim\t9.0-1\tinstall\thalf-installed\treinstreq",
        "nvidia-old\t1.0\tdeinstall\tconfig-files\tok",
    ]
    found = driver_host.packages(lambda argv, timeout: (0, "\n".join(lines), ""), ["nvidia-*", "libcuda1"])
    assert {name: (item["hold"], item["state"]) for name, item in found.items()} == {
        "nvidia-smi": (True, "installed"),
        "libcuda1": (False, "installed"),
        "nano": (False, "half-configured"),
        "vim": (False, "reinst-required"),
        "nvidia-old": (False, "config-files"),
    }


def test_sources_of_both_forms():
    text = (
        "# Types: deb\nTypes: deb deb-src\nURIs: http://a.example/debian http://b.example/debian\nSuites: bookworm\n"
        "Components: main\n contrib\nSigned-By: /k.gpg\n\nTypes: deb\nEnabled: no\nURIs: http://c.example\nSuites: /\n\n"
        "Types: deb-src\nURIs: http://d.example\nSuites: bookworm\n"
    )
    found = driver_host.deb822("/x.sources", text)
    assert [(item["uri"], item["suite"], item["components"], item["signed_by"]) for item in found] == [
        ("http://a.example/debian", "bookworm", ["main", "contrib"], "/k.gpg"),
        ("http://b.example/debian", "bookworm", ["main", "contrib"], "/k.gpg"),
    ]
    lines = (
        "# deb http://x.example /\ndeb-src http://x.example /\n"
        "deb [arch=amd64 signed-by=/k.gpg] http://x.example/cuda /\ndeb http://y.example bookworm main contrib # own\n"
    )
    assert driver_host.one_line("/x.list", lines) == [
        {"file": "/x.list", "uri": "http://x.example/cuda", "suite": "/", "components": [], "signed_by": "/k.gpg"},
        {
            "file": "/x.list",
            "uri": "http://y.example",
            "suite": "bookworm",
            "components": ["main", "contrib"],
            "signed_by": None,
        },
    ]


@pytest.fixture
def root(tmp_path):
    """A host with a kernel that can be booted, one that is gone and left DKMS's modules, and one with an initramfs."""
    for name in (
        f"lib/modules/{KERNEL}/kernel",
        "lib/modules/6.1.0-9-gone/updates/dkms",
        "lib/modules/6.1.0-57/kernel",
    ):
        (tmp_path / name).mkdir(parents=True)
    build = tmp_path / f"lib/modules/{KERNEL}/build"
    build.mkdir()
    (build / "Makefile").write_text("")
    (tmp_path / "boot").mkdir()
    for name in (f"vmlinuz-{KERNEL}", "vmlinuz-6.1.0-57", "vmlinuz-6.1.0-57.old", "initrd.img-6.1.0-57"):
        (tmp_path / "boot" / name).write_text("")
    (tmp_path / "etc/modprobe.d").mkdir(parents=True)
    return tmp_path


def _initramfs(*names):
    return lambda argv, timeout: (0, "\n".join(names), "") if argv[0] == "lsinitramfs" else (1, "", "")


def test_a_kernel_is_one_that_can_be_booted(root):
    found = driver_host.kernels(str(root), _initramfs("etc/modprobe.d/x.conf"), "x.conf")
    assert {name: item["headers"] for name, item in found.items()} == {KERNEL: True, "6.1.0-57": False}
    assert found[KERNEL]["initrd"] is None


def test_failure_12_nouveau_in_an_initramfs_that_is_older_than_our_file(root):
    ours = root / "etc/modprobe.d/x.conf"
    nouveau = "usr/lib/modules/6.1.0-57/kernel/drivers/gpu/drm/nouveau/nouveau.ko.xz"

    def look(*names):
        return driver_host.kernels(str(root), _initramfs(*names), "x.conf")["6.1.0-57"]["initrd"]

    assert look(nouveau) == {"nouveau": True, "ours": False}
    ours.write_text("blacklist nouveau\n")
    image = root / "boot/initrd.img-6.1.0-57"
    os.utime(image, (1, 1))
    assert look(nouveau, "etc/modprobe.d/x.conf") == {"nouveau": True, "ours": False}
    os.utime(image)
    assert look(nouveau, "etc/modprobe.d/x.conf") == {"nouveau": True, "ours": True}
    assert look("etc/modprobe.d/x.conf") == {"nouveau": False, "ours": True}


def test_failure_4_nvlink_5_is_seen_on_the_pci_bus_before_mlx5_ib_is_loaded(tmp_path):
    device = tmp_path / "sys/bus/pci/devices/0000:1a:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x15b3\n")
    (device / "vpd").write_bytes(b"\x82\x10\x00ConnectX-7 V0 SMDL=NIC")
    assert not driver_host._nvlink5(str(tmp_path))
    (device / "vpd").write_bytes(b"\x82\x10\x00ConnectX-7 V0 SMDL=SW_MNG\x78")
    assert driver_host._nvlink5(str(tmp_path))
    (device / "vendor").write_text("0x8086\n")
    assert not driver_host._nvlink5(str(tmp_path))
    loaded = tmp_path / "sys/class/infiniband/mlx5_0"
    loaded.mkdir(parents=True)
    (loaded / "device").symlink_to(device)
    assert driver_host._nvlink5(str(tmp_path))


def test_failure_11_the_key_of_dkms_is_where_the_system_has_it(tmp_path):
    assert driver_host.dkms_key(str(tmp_path), "debian-12") == {"path": "/var/lib/dkms/mok.pub", "there": False}
    ubuntu = "/var/lib/shim-signed/mok/MOK.der"
    assert driver_host.dkms_key(str(tmp_path), "ubuntu-24.04")["path"] == ubuntu
    (tmp_path / "var/lib/dkms").mkdir(parents=True)
    (tmp_path / "var/lib/dkms/mok.pub").write_text("key")
    assert driver_host.dkms_key(str(tmp_path), "debian-12")["there"]
    (tmp_path / "etc/dkms/framework.conf.d").mkdir(parents=True)
    (tmp_path / "etc/dkms/framework.conf").write_text("# mok_certificate=/not/this\n")
    (tmp_path / "etc/dkms/framework.conf.d/own.conf").write_text('mok_certificate="/etc/keys/own.der"\n')
    assert driver_host.dkms_key(str(tmp_path), "debian-12") == {"path": "/etc/keys/own.der", "there": False}


def test_parameters_of_the_loaded_driver():
    text = 'EnableGpuFirmware: 18\nEnableGpuFirmwareLogs: 2\nRegistryDwords: ""\nTemporaryFilePath: "/var/tmp"\n'
    found = driver_host.params(text)
    assert (found["EnableGpuFirmware"], found["RegistryDwords"], found["TemporaryFilePath"]) == ("18", "", "/var/tmp")
    assert driver_host.params("") == {}


def test_system():
    assert driver_host.system('NAME="x"\nVERSION_ID="12"\nVERSION="12 (bookworm)"\nID=debian\n') == "debian-12"
    assert driver_host.system('ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\n') == "ubuntu-24.04"
    assert driver_host.system("ID=arch\n") is None


def test_a_host_without_any_of_the_tools_is_an_answer():
    def none(argv, timeout):
        raise FileNotFoundError(argv[0])

    found = driver_host.gather(none, root="/nowhere", globs=["nvidia-*"])
    assert (found["packages"], found["units"], found["dkms"], found["secure_boot"]) == ({}, [], "", None)
    json.dumps(found)


# Keys


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    """A key as gpg makes it: folder, fingerprint as gpg says it, armoured and binary."""
    assert shutil.which("gpg"), "gpg is needed to judge the reading of keys by: apt install gpg"
    home = tmp_path_factory.mktemp("gpg")
    gpg = ["gpg", "--homedir", str(home), "--batch", "--quiet"]
    subprocess.run(
        [*gpg, "--passphrase", "", "--quick-generate-key", "a <a@example.org>", "ed25519", "sign"], check=True
    )
    told = subprocess.run([*gpg, "--with-colons", "--fingerprint"], check=True, capture_output=True, text=True).stdout
    fingerprint = next(line.split(":")[9] for line in told.splitlines() if line.startswith("fpr:"))
    armoured = subprocess.run([*gpg, "--armor", "--export"], check=True, capture_output=True).stdout
    binary = subprocess.run([*gpg, "--export"], check=True, capture_output=True).stdout
    return fingerprint, armoured, binary


def test_a_key_has_the_fingerprint_that_gpg_says(key):
    fingerprint, armoured, binary = key
    assert driver_key.fingerprints(binary) == [fingerprint]
    assert driver_key.dearmor(armoured) == binary
    assert driver_key.dearmor(binary) == binary
    assert driver_key.dearmor(armoured + armoured) == binary + binary


def test_what_is_no_key_is_said(key):
    _, armoured, binary = key
    for raw in (b"<html>not found</html>", binary[:-3], b"", armoured.replace(b"m", b"?", 1)):
        with pytest.raises(ValueError, match=r"\w"):
            driver_key.dearmor(raw)


# What is done, against what was planned


def test_what_apt_would_do_beyond_the_plan_is_named():
    expected = {"install": {"a": "1"}, "along": {"b": "2"}, "upgrade": {"c": ["1", "2"]}, "remove": {"d": "1"}}
    before = {"c": "1", "d": "1", "e": "1", "f": "1"}
    did = driver_change.difference(before, {"a": "1", "b": "2", "c": "2", "e": "1", "f": "1"})
    assert driver_change.beyond(did, expected) == []
    did = driver_change.difference(before, {"a": "2", "c": "3", "e": "1", "g": "1", "d": "1"})
    assert driver_change.beyond(did, expected) == [
        "install a 2",
        "install g 1",
        "change c 1 to 3",
        "remove f 1",
    ]
    assert driver_change.without(did, {"a", "g", "c", "f"}) == {"install": {}, "upgrade": {}, "remove": {}}


@pytest.mark.parametrize(
    "text",
    [
        "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 4711 (apt-get)",
        "dpkg: error: dpkg frontend lock was locked by another process with pid 4711",
        "E: Unable to acquire the dpkg frontend lock (/var/lib/dpkg/lock-frontend), is another process using it?",
    ],
)
def test_a_lock_of_somebody_else_is_waited_for(text):
    assert driver_change.LOCKED.search(text)


def test_a_failed_build_is_no_lock():
    assert not driver_change.LOCKED.search(
        "Setting up clock-block\nError! Bad return status for module build on kernel: 6.1"
    )


def test_only_a_folder_of_ours_is_taken_again(tmp_path):
    assert driver_scratch.ours("/var/tmp/gpu-fleet-driver.abc")
    for folder in ("/var/tmp", "/etc/apt", "/var/tmp/gpu-fleet-driver.a/../x", str(tmp_path)):
        assert not driver_scratch.ours(folder)


def test_the_folder_has_the_hosts_configuration_with_the_planned_files_in_it(tmp_path):
    folder = "/etc/apt/sources.list.d"
    own = [name for name in sorted(os.listdir(folder)) if os.path.isfile(os.path.join(folder, name))]
    scratch = driver_scratch.Scratch(str(tmp_path))
    source = "/etc/apt/sources.list.d/gpu-fleet-driver.sources"
    text = "Types: deb\nURIs: https://a.example/\nSuites: /\nSigned-By: /usr/share/keyrings/a.gpg\n"
    scratch.configure(
        files={
            source: text,
            "/etc/apt/preferences.d/gpu-fleet-driver": "Package: a\nPin: version 1\nPin-Priority: 1001\n",
        },
        gone=[f"/etc/apt/sources.list.d/{own[0]}"] if own else [],
        keyring={"path": "/usr/share/keyrings/a.gpg", "raw": b"key"},
    )
    assert sorted(os.listdir(tmp_path / "sources.list.d")) == sorted([*own[1:], "gpu-fleet-driver.sources"])
    written = (tmp_path / "sources.list.d" / "gpu-fleet-driver.sources").read_text()
    assert written.endswith(f"Signed-By: {tmp_path}/keyring.gpg\n")
    assert (tmp_path / "keyring.gpg").read_bytes() == b"key"
    assert (tmp_path / "preferences.d" / "gpu-fleet-driver").exists()
    # Everything that apt would write lies below the folder; the lists are the host's until they are read anew.
    told = dict(part.split("=", 1) for part in scratch.options if "=" in part)
    elsewhere = {key for key, value in told.items() if not value.startswith(str(tmp_path))}
    assert elsewhere == {"Dir::State::lists"}
    scratch.remove()
    assert not tmp_path.exists()


def test_the_simulation_has_the_flags_of_the_installation(tmp_path):
    asked = []

    def run(argv, timeout):
        asked.append(list(argv))
        return 0, "", ""

    driver_scratch.Scratch(str(tmp_path)).simulate(run, ["a=1"])
    assert asked[0][-(len(driver_scratch.INSTALL) + 2) :] == ["-s", *driver_scratch.INSTALL, "a=1"]
    assert "--no-install-recommends" in driver_scratch.INSTALL
