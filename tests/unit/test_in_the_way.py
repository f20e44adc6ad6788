"""Gateways, where a run refused to start something in the place of what the inventory no longer names."""

from __future__ import annotations

import pytest
from conftest import REPOSITORY
from plays import played, stand_ins

REACHED = "- ansible.builtin.debug: {msg: 'the gateway is written'}\n"


def gateways(folder, *told):
    """What playbook gateways.yml does, with what each GPU host said in the run."""
    home = stand_ins(folder, {})
    (home / "playbooks").symlink_to(REPOSITORY / "playbooks")
    for role in ("gateway", "package_source"):
        (home / "roles" / role / "tasks").mkdir(parents=True)
        (home / "roles" / role / "tasks" / "main.yml").write_text(REACHED)
    # What nobody asks for is not looked at, be it as wrong as it may.
    local = {"ansible_connection": "local", "of_no_concern": "{{ lookup('file', '/nowhere') }}"}
    gpu = {f"gpu-0{number}": {**local, **each} for number, each in enumerate(told, 1)}
    children = {"gpu_hosts": {"hosts": gpu}, "gateways": {"hosts": {"gw-01": local}}}
    plays = [{"ansible.builtin.import_playbook": "gpu_fleet.vllm.gateways"}]
    return played(folder, plays, {"all": {"children": children}}, environment={"ANSIBLE_INVENTORY_ENABLED": "yaml"})


@pytest.mark.parametrize("told", [[], [{}, {}], [{"vllm_service_in_the_way": []}, {}]])
def test_gateways_are_written_where_nothing_is_in_the_way(tmp_path, told):
    status, said = gateways(tmp_path, *told)
    assert status == 0
    assert "the gateway is written" in said and "was left as it is" not in said


@pytest.mark.parametrize("by", ["vllm_service_in_the_way", "nccl_in_the_way"])
def test_gateways_keep_what_serves_in_the_place_of_what_was_refused(tmp_path, by):
    status, said = gateways(tmp_path, {"vllm_service_in_the_way": [], "nccl_in_the_way": []}, {by: ["talk.0"]}, {})
    assert status == 0
    assert "gw-01 was left as it is: talk.0 goes on" in said
    assert "the gateway is written" not in said
