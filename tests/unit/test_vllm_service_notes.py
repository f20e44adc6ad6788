"""Role vllm_service: what it looks at before it writes; what others added to its units, and what is left over, is shown and no more."""

import pytest
import yaml
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import serving_facts
from conftest import REPOSITORY
from plays import played

OURS = ["system/vllm@.service", "system/vllm@chat.0.service.d/generation.conf", "system/multi-user.target.wants/x.conf"]
OURS += ["system/vllm@.service.d/gpu-fleet-driver.conf"]  # of role gpu_driver
STRANGERS = ["system/ssh.service.d/zz.conf", "user/vllm@.service.d/zz.conf", "system/vllm@chat.0.service.d/notes.txt"]


def run(folder, *paths, options=(), **more):
    for path in paths:
        (folder / "systemd" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "systemd" / path).write_text("[Service]\n")
    role = {"name": "gpu_fleet.vllm.vllm_service", "tasks_from": "install", "rolespec_validate": False}
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False}
    plays = [{**play, "tasks": [{"ansible.builtin.include_role": role}]}]
    instances = [{"instance": "chat.0", "config": {"model": str(folder / "model")}}]
    given = {
        "vllm_service_user": "root",
        "vllm_runtime_release": {"accelerator": "cpu"},
        "fleet_plan": {
            "hosts": {"localhost": {"instances": instances, "ray": [{"instance": "big.0"}]}},
            "replicas": {"rest.0": {"hosts": ["localhost", "other"]}},
            "maintenance": {"hosts": ["other"], "replicas": {"rest.0": {}}},
        },
        "__vllm_service_root": str(folder / "vllm"),
        "__vllm_service_ray_root": str(folder / "ray"),
        "__vllm_service_systemd": [str(folder / "systemd")],
    }
    status, said = played(folder, plays, "localhost,", *options, **{**given, **more})
    assert "changed=0" in said
    return status, said


def quiet(*arguments, **options):
    status, said = run(*arguments, **options)
    assert status == 0, said
    return said


ADDED = [
    "system.control/vllm@chat.0.service.d/50-MemoryMax.conf",
    "system/vllm@.service.d/generation.conf",
    "system/vllm@.service.d/zz-mine.conf",
    "system/vllm@chat.0.service.d/zz-mine.conf",
    "system/vllm@my-.service.d/zz-mine.conf",
]


@pytest.mark.parametrize("options", [(), ("--check",)])
def test_drop_ins_of_somebody_else_are_shown_and_left(tmp_path, options):
    said = quiet(tmp_path, *OURS, *STRANGERS, *ADDED, options=options)
    shown = ", ".join(f"{tmp_path}/systemd/{path}" for path in ADDED)
    assert f"Drop-ins that are not ours on localhost, not touched: {shown}. They change" in said
    assert all((tmp_path / "systemd" / path).is_file() for path in ADDED)


def test_without_one_nothing_is_said(tmp_path):
    assert "Drop-ins that are not ours" not in quiet(tmp_path, *OURS, *STRANGERS)


@pytest.mark.parametrize("options", [(), ("--check",)])
def test_what_the_inventory_no_longer_names_is_shown_and_left(tmp_path, options):
    for name in ("vllm/chat.0", "vllm/old.1", "vllm/rest.0", "vllm/.hidden", "ray/big.0", "ray/old.1", "ray/large.2"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "vllm/note.0").write_text("no folder")
    said = quiet(tmp_path, options=options)
    assert "Left over on localhost and not touched: old.1, Ray of large.2, Ray of old.1. The inventory" in said
    assert "scripts/fleet teardown -i INVENTORY old large" in said
    assert sorted(path.name for path in (tmp_path / "vllm").iterdir()) == [
        ".hidden",
        "chat.0",
        "note.0",
        "old.1",
        "rest.0",
    ]


def test_what_is_all_named_is_not_shown(tmp_path):
    (tmp_path / "vllm/chat.0").mkdir(parents=True)
    (tmp_path / "ray/big.0").mkdir(parents=True)
    assert "Left over" not in quiet(tmp_path)


def test_a_host_without_a_driver_is_refused_before_anything(tmp_path):
    status, said = run(
        tmp_path, vllm_runtime_release={"accelerator": "cu130"}, vllm_service_user="nobody-has-this-name"
    )
    assert status == 2
    assert "localhost has no NVIDIA driver loaded (/proc/driver/nvidia/version is missing)" in said


def test_the_role_looks_at_each_run_before_anything_starts():
    tasks = yaml.safe_load((REPOSITORY / "roles/vllm_service/tasks/main.yml").read_text())
    files = [task[word] for task in tasks for word in task if word.endswith(("import_tasks", "include_tasks"))]
    assert files[0] == "install.yml"
    assert files.index("install.yml") < files.index("rollout.yml")


def test_a_user_is_known_by_name():
    assert serving_facts.has_user("root")
    assert not serving_facts.has_user("nobody-has-this-name")
