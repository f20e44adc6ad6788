"""The stand-in for NVIDIA's repository is one that apt takes, holds the traps it is for, and says what it is."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import pytest
import yaml
from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tests" / "driver_repository"))
sys.path.insert(0, str(REPOSITORY / "tests" / "replay"))

import hosts
import packages
import repository
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_apt, mig
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import driver_packages as names

KNOWN = yaml.safe_load((REPOSITORY / "data" / "driver.yml").read_text())
NEW = packages.NEW


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return repository.make(tmp_path_factory.mktemp("repository") / "made")


class Apt:
    """apt-get with a root of its own; nothing of the machine is asked or changed."""

    def __init__(self, folder, *sources):
        for name in ("etc/preferences.d", "etc/apt.conf.d", "etc/trusted.gpg.d", "etc/sources.list.d"):
            (folder / name).mkdir(parents=True)
        for name in ("state/lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True)
        (folder / "status").touch()
        (folder / "etc" / "sources.list").write_text("\n".join(sources) + "\n")
        self.folder = folder

    def __call__(self, *arguments, program="apt-get"):
        folder = self.folder
        options = [f"Dir::Etc={folder}/etc", f"Dir::State={folder}/state", f"Dir::State::status={folder}/status"]
        options += [f"Dir::Cache={folder}/cache", "Debug::NoLocking=1", "APT::Architecture=amd64"]
        options += ["APT::Sandbox::User=root", "Dir::Etc::trustedparts=none"]
        argv = [program, *[word for option in options for word in ("-o", option)], *arguments]
        environment = {"LC_ALL": "C", "PATH": "/usr/bin:/bin"}
        ran = subprocess.run(argv, capture_output=True, text=True, env=environment, check=False)
        return ran.stdout + ran.stderr

    def installs(self, *arguments):
        return driver_apt.read(self("-s", "--no-install-recommends", "install", *arguments))


def source(made, key="key.gpg", name="nvidia"):
    return f"deb [arch=amd64 signed-by={made / key}] file:{made / name} /"


@pytest.fixture
def apt(made, tmp_path):
    ready = Apt(tmp_path, source(made))
    assert "E:" not in ready("update")
    # of Debian itself, and not here
    dependency = (
        "Package: {}\nStatus: install ok installed\nArchitecture: amd64\nVersion: 3.0\nMaintainer: a\nDescription: b\n"
    )
    (tmp_path / "status").write_text("\n".join(dependency.format(name) for name in ("dkms", "python3")))
    return ready


def test_apt_takes_the_signature_and_no_other(made, tmp_path):
    said = Apt(tmp_path / "good", source(made))("update")
    assert not [line for line in said.splitlines() if line.startswith(("W:", "E:"))], said
    said = Apt(tmp_path / "old", source(made, "old-key.gpg"))("update")
    assert "NO_PUBKEY" in said
    said = Apt(tmp_path / "both", source(made), source(made, "old-key.gpg"))("update")
    assert "Conflicting values set for option Signed-By" in said


def test_origin_and_label_are_what_pins_read(apt):
    assert "o=NVIDIA,l=NVIDIA CUDA" in apt("policy", program="apt-cache")


def test_every_name_of_the_data_for_debian_12_is_there(made):
    offered = {path.name.split("_")[0] for path in (made / "nvidia").glob("*.deb")}
    asked = set(KNOWN["toolkit"]) | set(names.fabric("nvidia", "debian-12", "580", KNOWN).values())
    for kind in names.KINDS:
        asked |= set(names.names("nvidia", "debian-12", "580", kind, KNOWN))
    asked |= {KNOWN["sources"]["nvidia"]["keyring"]["package"], "nvidia-persistenced", "nvlsm"}
    asked |= {f"nvidia-driver-pinning-{what}" for what in ("580", NEW)}
    assert asked <= offered


def test_every_package_says_that_it_is_a_stand_in(made):
    for path in [*(made / "nvidia").glob("*.deb"), *(made / "debian").glob("*.deb")]:
        command = ["dpkg-deb", "--field", str(path), "Description"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert said.startswith("stand-in, "), path.name


def test_an_exact_version_can_be_installed_and_libraries_run_away_without_pins(apt):
    exact = [f"{name}={NEW}-1" for name in ("nvidia-driver-cuda", "nvidia-kernel-open-dkms")]
    loose = apt.installs(*exact)
    assert (loose.errors, loose.installed["libcuda1"]) == ([], packages.DRIVERS[packages.LAST])
    kept = apt.installs(*exact, f"libcuda1={NEW}-1", f"libnvidia-ml1={NEW}-1")
    assert set(kept.installed.values()) == {f"{NEW}-1"}


def test_the_traps_spring(apt):
    jumped = apt.installs("cuda-drivers-580")
    assert names.branch(jumped.installed["nvidia-driver"]) == "615"
    carried = apt.installs("nvidia-kernel-dkms")
    assert carried.installed["nvidia-kernel-open-dkms"] == packages.DRIVERS[packages.LAST]
    gone = apt.installs(f"nvidia-driver-cuda={packages.WITHDRAWN}-1")
    assert any("held broken packages" in line for line in gone.errors)


@pytest.fixture
def played(tmp_path, monkeypatch):
    """A played machine with one loaded driver."""
    root = tmp_path / "played"
    hosts.lay_out(hosts.recording("h200x2"), root)
    (root / "proc" / "driver" / "nvidia" / "version").write_text(
        f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {NEW}  Release Build  (stand-in)\n"
    )
    (root / "replay.json").write_text(json.dumps(hosts.recording("h200x2")))
    monkeypatch.setenv("PLAYED_GPUS", str(root))
    return root


def library(made, version, folder):
    subprocess.run(["dpkg-deb", "-x", made / "nvidia" / f"libcuda1_{version}-1_amd64.deb", folder], check=True)
    return ctypes.CDLL(str(folder / packages.LIBRARY / "libcuda.so.1"))


def test_cuinit_returns_what_it_is_told_and_else_what_fits(made, played, tmp_path):
    cuda = library(made, NEW, tmp_path / "new")
    assert cuda.cuInit(0) == 0
    for number in (0, 802, 803, 999):
        (played / "cuinit").write_text(f"{number}\n")
        assert cuda.cuInit(0) == number
    (played / "cuinit").unlink()
    assert library(made, packages.OLD, tmp_path / "old").cuInit(0) == 803
    (played / "proc/driver/nvidia-nvswitch/devices/0000:05:00.0").mkdir(parents=True)
    assert cuda.cuInit(0) == 802
    (played / "proc/driver/nvidia/version").unlink()
    assert cuda.cuInit(0) == 100


def test_nvidia_smi_answers_for_the_loaded_driver_and_fails_as_the_real_one(made, played, tmp_path):
    subprocess.run(
        ["dpkg-deb", "-x", made / "nvidia" / f"nvidia-driver-cuda_{NEW}-1_amd64.deb", tmp_path / "smi"], check=True
    )

    def ask(*arguments):
        command = [sys.executable, tmp_path / "smi" / "usr" / "bin" / "nvidia-smi", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    query = ["--query-gpu=driver_version,persistence_mode", "--format=csv,noheader,nounits"]
    assert ask(*query).stdout == f"{NEW}, Disabled\n" * 2
    version = played / "proc/driver/nvidia/version"
    version.write_text(version.read_text().replace(NEW, packages.OLD))
    assert (ask(*query).returncode, "Driver/library version mismatch" in ask(*query).stdout) == (18, True)
    version.unlink()
    assert (ask(*query).returncode, "couldn't communicate" in ask(*query).stdout) == (9, True)


def test_mig_instances_are_made_listed_and_end_with_the_driver(made, played, tmp_path, monkeypatch):
    subprocess.run(
        ["dpkg-deb", "-x", made / "nvidia" / f"nvidia-driver-cuda_{NEW}-1_amd64.deb", tmp_path / "smi"], check=True
    )
    program = tmp_path / "smi" / "usr" / "bin" / "nvidia-smi"
    program.write_text(program.read_text().replace("/run/nvidia-stand-in", str(tmp_path / "run")))

    def run(argv):
        done = subprocess.run([sys.executable, program, *argv[1:]], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    layout = {"0": ["3g.40gb", "19"], "1": ["7g.80gb"]}
    assert mig.make(run, layout) == layout
    assert mig.instances(run, "0") == [("3g.40gb", "9"), ("1g.10gb", "19")]
    assert mig.make(run, layout) == {}
    (tmp_path / "run" / "mig.json").unlink()
    (played / "mig_makes_nothing").touch()
    with pytest.raises(mig.Wrong, match="-lgi does not list them"):
        mig.make(run, layout)
