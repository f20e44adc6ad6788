"""The few facts that roles use are those of module setup, and what role package_source left is what its own look would find."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest
import yaml
from ansible.module_utils.common import sys_info
from ansible.module_utils.facts.system import distribution
from ansible.module_utils.facts.system.platform import PlatformFactCollector
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import system_facts as facts
from ansible_collections.gpu_fleet.vllm.plugins.modules import system_facts
from conftest import REPOSITORY
from gpu_fleet import remedies
from module_run import ran
from plays import played

NAMES = ("distribution", "distribution_version", "distribution_major_version", "nodename")
SOURCE = yaml.safe_load((REPOSITORY / "data" / "package_source.yml").read_text())

# /etc/os-release of the systems, and Debian's /etc/debian_version.
SYSTEMS = {
    "debian-12": (
        'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nNAME="Debian GNU/Linux"\nVERSION_ID="12"\n'
        'VERSION="12 (bookworm)"\nVERSION_CODENAME=bookworm\nID=debian\n',
        "12.9\n",
        ("Debian", "12.9", "12"),
    ),
    "debian-13": (
        'PRETTY_NAME="Debian GNU/Linux 13 (trixie)"\nNAME="Debian GNU/Linux"\nVERSION_ID="13"\n'
        'VERSION="13 (trixie)"\nVERSION_CODENAME=trixie\nDEBIAN_VERSION_FULL=13.1\nID=debian\n',
        "13.1\n",
        ("Debian", "13.1", "13"),
    ),
    "ubuntu-22.04": (
        'PRETTY_NAME="Ubuntu 22.04.4 LTS"\nNAME="Ubuntu"\nVERSION_ID="22.04"\nVERSION="22.04.4 LTS (Jammy Jellyfish)"\n'
        "VERSION_CODENAME=jammy\nID=ubuntu\nID_LIKE=debian\n"
        "UBUNTU_CODENAME=jammy\n",
        "bookworm/sid\n",
        ("Ubuntu", "22.04", "22"),
    ),
    "ubuntu-24.04": (
        'PRETTY_NAME="Ubuntu 24.04.1 LTS"\nNAME="Ubuntu"\nVERSION_ID="24.04"\nVERSION="24.04.1 LTS (Noble Numbat)"\n'
        "VERSION_CODENAME=noble\nID=ubuntu\nID_LIKE=debian\n"
        "UBUNTU_CODENAME=noble\nLOGO=ubuntu-logo\n",
        "trixie/sid\n",
        ("Ubuntu", "24.04", "24"),
    ),
    # Counts as Debian for setup, and so for the roles.
    "raspbian-12": (
        'PRETTY_NAME="Raspbian GNU/Linux 12 (bookworm)"\nNAME="Raspbian GNU/Linux"\nVERSION_ID="12"\n'
        'VERSION="12 (bookworm)"\nVERSION_CODENAME=bookworm\nID=raspbian\nID_LIKE=debian\n',
        "12.9\n",
        ("Debian", "12", "12"),
    ),
    # None that roles take; it is refused by this name.
    "rocky-9": (
        'NAME="Rocky Linux"\nVERSION="9.4 (Blue Onyx)"\nID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.4"\n',
        None,
        ("Rocky", "9.4", "9"),
    ),
}


@pytest.fixture(params=SYSTEMS)
def system(request, tmp_path, monkeypatch):
    """The machine is one of these systems for both, setup's own code and ours; gives what they are to say."""
    text, version, wanted = SYSTEMS[request.param]
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "os-release").write_text(text)
    if version:
        (etc / "debian_version").write_text(version)
    else:
        (etc / "redhat-release").write_text("Rocky Linux release 9.4 (Blue Onyx)\n")
    (tmp_path / "usr" / "lib").mkdir(parents=True)
    distro = sys.modules[sys_info.distro.id.__module__]
    monkeypatch.setattr(distro, "_distro", distro.LinuxDistribution(root_dir=str(tmp_path)))
    content, lines = distribution.get_file_content, distribution.get_file_lines
    exists = distribution._file_exists
    below = lambda path: str(tmp_path / path.lstrip("/"))  # noqa: E731
    monkeypatch.setattr(distribution, "get_file_content", lambda path: content(below(path)))
    monkeypatch.setattr(distribution, "get_file_lines", lambda path: lines(below(path)))
    monkeypatch.setattr(distribution, "_file_exists", lambda path, allow_empty=False: exists(below(path), allow_empty))
    monkeypatch.setattr(facts, "OS_RELEASE", str(etc / "os-release"))
    return wanted


class Setup:
    """What setup's code asks of a module."""

    def get_bin_path(self, *_):
        return None

    def debug(self, *_):
        pass


def test_each_system_has_the_names_that_setup_gives_it(system, monkeypatch):
    theirs = distribution.Distribution(Setup()).get_distribution_facts()
    theirs |= PlatformFactCollector().collect(module=Setup())
    ours = ran(monkeypatch, system_facts, {})["ansible_facts"]
    assert {name: ours[f"ansible_{name}"] for name in NAMES} == {name: theirs[name] for name in NAMES}
    assert tuple(ours[f"ansible_{name}"] for name in NAMES[:3]) == system
    assert set(ours) == {f"ansible_{name}" for name in NAMES}


def test_on_this_machine_a_play_gets_from_both_the_same_facts(tmp_path):
    told = "{{ ansible_facts | dict2items | selectattr('key', 'in', names) | items2dict | to_json }}"
    copy = {"dest": str(tmp_path / "{{ by }}.json"), "content": told, "mode": "0600"}
    asked = {
        "ours": {"gpu_fleet.vllm.system_facts": {"package_source": SOURCE}},
        "theirs": {"ansible.builtin.setup": {"gather_subset": ["!all", "!min", "distribution", "platform"]}},
    }
    plays = [
        {
            "hosts": name,
            "gather_facts": False,
            "connection": "local",
            "tasks": [task, {"ansible.builtin.copy": copy, "vars": {"by": name, "names": list(NAMES)}}],
        }
        for name, task in asked.items()
    ]
    status, said = played(tmp_path, plays, {"all": {"hosts": {name: {} for name in asked}}})
    assert status == 0, said
    ours, theirs = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("ours", "theirs"))
    assert ours == theirs
    assert set(ours) == set(NAMES)


# -- what role package_source left


@pytest.fixture
def apt(tmp_path):
    """The folders of apt on a host that never had carried packages, and how the role names what it writes there."""
    for folder in ("sources.list.d", "apt.conf.d"):
        (tmp_path / folder).mkdir()
    (tmp_path / "sources.list").write_text("deb x\n")
    (tmp_path / "sources.list.d" / "own.list").write_text("deb y\n")
    (tmp_path / "apt.conf.d" / "90own").write_text("\n")
    made = json.loads(json.dumps(SOURCE).replace("/etc/apt", str(tmp_path)))
    return tmp_path, made


def test_nothing_is_left_where_it_never_was(apt, monkeypatch):
    _etc, made = apt
    said = ran(monkeypatch, system_facts, {"package_source": made})
    assert (said["package_source_left"], said["changed"]) == ([], False)
    assert ran(monkeypatch, system_facts, {})["package_source_left"] == []


@pytest.mark.parametrize(
    "name",
    [
        "sources.list.d/gpu-fleet-carried.sources",
        "apt.conf.d/90gpu-fleet-carried",
        "sources.list.gpu-fleet-aside",
        "sources.list.d/own.list.gpu-fleet-aside",
    ],
)
def test_whatever_the_role_wrote_or_set_aside_is_found(apt, name):
    etc, made = apt
    (etc / name).write_text("\n")
    assert facts.package_source_left(**made) == [str(etc / name)]


def test_what_is_no_file_is_none_of_it_and_folders_may_be_missing(apt):
    etc, made = apt
    (etc / "sources.list.d" / "gpu-fleet-carried.sources").mkdir()
    (etc / "apt.conf.d" / "90gpu-fleet-carried").symlink_to(etc / "sources.list")
    (etc / ".x.gpu-fleet-aside").write_text("\n")
    assert facts.package_source_left(**{**made, "folders": [*made["folders"], str(etc / "none")]}) == []


def test_it_finds_what_module_find_found(apt, tmp_path):
    """The look that the role had before, with ansible.builtin.find, over all that may lie there."""
    etc, made = apt
    for name in ("sources.list.gpu-fleet-aside", "sources.list.d/gpu-fleet-carried.sources", ".h.gpu-fleet-aside"):
        (etc / name).write_text("\n")
    (etc / "apt.conf.d" / "90gpu-fleet-carried").symlink_to(etc / "sources.list")
    patterns = [os.path.basename(made["file"]), os.path.basename(made["silence"]), f"*{made['aside']}"]
    told = {
        "dest": str(tmp_path / "found.json"),
        "content": "{{ f.files | map(attribute='path') | to_json }}",
        "mode": "0600",
    }
    play = {
        "hosts": "localhost",
        "gather_facts": False,
        "connection": "local",
        "tasks": [
            {"ansible.builtin.find": {"paths": made["folders"], "patterns": patterns}, "register": "f"},
            {"ansible.builtin.copy": told},
        ],
    }
    status, said = played(tmp_path, [play])
    assert status == 0, said
    found = json.loads((tmp_path / "found.json").read_text())
    assert sorted(found) == sorted(facts.package_source_left(**made))
    assert len(found) == 2


def test_the_play_and_the_role_ask_by_the_same_names():
    lookup = "{{ lookup('gpu_fleet.vllm.data', 'package_source') }}"
    plays = yaml.safe_load((REPOSITORY / "playbooks" / "deploy.yml").read_text())
    asked = [task for play in plays for task in play.get("pre_tasks", []) if "gpu_fleet.vllm.system_facts" in task]
    assert [task["gpu_fleet.vllm.system_facts"]["package_source"] for task in asked] == [lookup]
    role = yaml.safe_load((REPOSITORY / "roles" / "package_source" / "vars" / "main.yml").read_text())
    assert role["__package_source_made"] == lookup


def first_words(folder, program):
    """What deploy.yml asks a host first, on one whose Python is this program."""
    plays = yaml.safe_load((REPOSITORY / "playbooks" / "deploy.yml").read_text())
    (tasks,) = [play["pre_tasks"] for play in plays if "pre_tasks" in play]
    (at,) = [number for number, task in enumerate(tasks) if "gpu_fleet.vllm.system_facts" in task]
    stand_in = folder / "python"
    stand_in.write_text(f"#!/bin/sh\n{program}\n")
    stand_in.chmod(0o755)
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": tasks[at : at + 2]}
    given = {"deploy_answer_within": 2, "ansible_python_interpreter": str(stand_in)}
    began = time.monotonic()
    status, said = played(folder, [play], **given)
    return status, said, time.monotonic() - began


def test_a_host_that_takes_connections_and_answers_nothing_holds_up_nobody(tmp_path):
    status, said, took = first_words(tmp_path, "exec sleep 60")
    assert status == 2
    assert "localhost took the connection and did not answer within 2 s" in said
    assert "--limit localhost" in said
    assert took < 40


def test_what_else_is_wrong_with_a_host_is_said_in_its_own_words(tmp_path):
    """By the task that fails the host, which is all that the command line tells of it."""
    status, said, _ = first_words(tmp_path, "echo /bin/sh: 1: python3: not found >&2; exit 127")
    assert status == 2
    assert "did not answer within" not in said
    told = said.rpartition("fatal: ")[2]
    assert "/bin/sh: 1: python3: not found" in told
    assert "install python3" in remedies.explained(told)
