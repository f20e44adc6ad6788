"""The collection as others use it: built, listed, installed in an empty folder, and used by its full name there."""

import json
import os
import shutil
import subprocess
import sys
import tarfile

import pytest
from conftest import REPOSITORY

BIN = os.path.dirname(sys.executable)


def run(*command, cwd, env=None):
    # Galaxy is never asked: the dependencies are in the package `ansible`. No path to the checkout: what is used is what is installed.
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": "", **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def tarball(tmp_path_factory):
    folder = tmp_path_factory.mktemp("build")
    run(f"{BIN}/ansible-galaxy", "collection", "build", "--output-path", str(folder), cwd=REPOSITORY)
    (built,) = folder.glob("gpu_fleet-vllm-*.tar.gz")
    return built


def test_content(tarball):
    with tarfile.open(tarball) as archive:
        members = archive.getmembers()
    names = [member.name for member in members]
    assert not [m.name for m in members if m.issym() or m.islnk()], "links"
    assert not [n for n in names if n.endswith((".whl", ".safetensors", ".gguf", ".pyc"))]
    assert not [n for n in names if n.split("/")[0] in ("collections", "prod", ".venv", ".git", ".cache", ".lab")]
    assert not [n for n in names if ".secrets" in n or n.endswith("inventories/demo/lab.yml")]
    assert {"data/versions.yml", "playbooks/site.yml", "roles/vllm_service/tasks/main.yml", "meta/runtime.yml"} <= set(
        names
    )
    assert tarball.stat().st_size < 5_000_000


@pytest.fixture(scope="module")
def installed(tarball, tmp_path_factory):
    """The folder of collections that the tarball was installed into."""
    folder = tmp_path_factory.mktemp("collections")
    (folder / "ansible.cfg").write_text("")
    command = ("collection", "install", "--offline", "--no-deps", "-p", str(folder), str(tarball))
    run(f"{BIN}/ansible-galaxy", *command, cwd=folder, env={"ANSIBLE_CONFIG": "ansible.cfg", "HOME": str(folder)})
    return folder


def test_installed_elsewhere_it_validates_and_plans_by_full_name(installed, tmp_path):
    (tmp_path / "ansible.cfg").write_text("")
    offline = {
        "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": str(installed),
        "HOME": str(tmp_path),
    }
    shutil.copytree(REPOSITORY / "inventories/prod", tmp_path / "prod", ignore=shutil.ignore_patterns(".secrets"))
    for playbook in ("validate", "plan"):
        said = run(f"{BIN}/ansible-playbook", f"gpu_fleet.vllm.{playbook}", "-i", "prod", cwd=tmp_path, env=offline)
        assert "failed=0" in said
    assert "pipeline-parallel-size: 2" in said or '"pipeline-parallel-size": 2' in said


def test_the_command_line_works_from_the_installed_collection(installed, tmp_path):
    """No checkout, no bootstrap: the Python that is named has what it needs; a Python that has not is told so."""
    fleet = installed / "ansible_collections/gpu_fleet/vllm/scripts/fleet"
    assert os.access(fleet, os.X_OK)
    shutil.copytree(REPOSITORY / "inventories/prod", tmp_path / "prod", ignore=shutil.ignore_patterns(".secrets"))
    environment = {"PYTHON": sys.executable, "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    told = json.loads(run(str(fleet), "plan", "-i", "prod", "--json", cwd=tmp_path, env=environment))
    assert told["exit_status"] == 0
    assert set(told["plan"]["services"]) == {"chat", "big"}
    assert told["folder"].startswith(str(tmp_path / "state"))
    assert not (fleet.parents[1] / ".venv").exists()
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    refused = subprocess.run(
        [fleet, "plan"], env={**os.environ, "PYTHON": str(bare)}, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "lacks: ansible_runner rich typer yaml. Name another Python in PYTHON" in refused.stderr
    assert "Traceback" not in refused.stderr
