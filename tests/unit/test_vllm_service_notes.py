"""Role vllm_service: what others added to its units is shown, and nothing else."""

import pytest
import yaml
from conftest import REPOSITORY
from plays import played

OURS = ["system/vllm@.service", "system/vllm@chat.0.service.d/generation.conf", "system/multi-user.target.wants/x.conf"]
OURS += ["system/vllm@.service.d/gpu-fleet-driver.conf"]  # of role gpu_driver
STRANGERS = ["system/ssh.service.d/zz.conf", "user/vllm@.service.d/zz.conf", "system/vllm@chat.0.service.d/notes.txt"]


def run(folder, *paths, options=()):
    for path in paths:
        (folder / "systemd" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "systemd" / path).write_text("[Service]\n")
    role = {"name": "gpu_fleet.vllm.vllm_service", "tasks_from": "dropins", "rolespec_validate": False}
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False}
    plays = [{**play, "tasks": [{"ansible.builtin.include_role": role}]}]
    status, said = played(folder, plays, "localhost,", *options, __vllm_service_systemd=[str(folder / "systemd")])
    assert status == 0, said
    assert "changed=0" in said
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
    said = run(tmp_path, *OURS, *STRANGERS, *ADDED, options=options)
    shown = ", ".join(f"{tmp_path}/systemd/{path}" for path in ADDED)
    assert f"Drop-ins that are not ours on localhost, not touched: {shown}. They change" in said
    assert all((tmp_path / "systemd" / path).is_file() for path in ADDED)


def test_without_one_nothing_is_said(tmp_path):
    assert "Drop-ins that are not ours" not in run(tmp_path, *OURS, *STRANGERS)


def test_the_role_looks_at_each_run_before_anything_starts():
    tasks = yaml.safe_load((REPOSITORY / "roles/vllm_service/tasks/main.yml").read_text())
    files = [task[word] for task in tasks for word in task if word.endswith(("import_tasks", "include_tasks"))]
    assert files.index("dropins.yml") < files.index("rollout.yml")
