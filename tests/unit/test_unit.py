"""What stands in the unit of an instance: its user, its groups and the devices it may open."""

import re
import stat
from types import SimpleNamespace

import jinja2
import pytest
import yaml
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import device_groups
from conftest import REPOSITORY

ROLE = REPOSITORY / "roles/vllm_service"


def rendered(name, **variables):
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.tests["match"] = lambda value, pattern: bool(re.match(pattern, value))
    return environment.from_string((ROLE / "templates" / name).read_text()).render(**variables)


def drop_in(accelerator="cu130", groups=()):
    return rendered(
        "unit.conf.j2",
        vllm_runtime_release={"accelerator": accelerator},
        __vllm_service_timeout=60,
        __vllm_service_there={"groups": list(groups)},
        __vllm_service_answering=["chat.0"],
        __vllm_service_config={"shutdown-timeout": 5, "served-model-name": ["chat"]},
        __vllm_service_instance={"instance": "chat.0", "rank": 0, "peers": [], "env": {}},
        __vllm_service_memlock="64G",
        __vllm_service_nofile=1024,
        __vllm_service_unit_digest="d",
        __vllm_service_url="http://198.51.100.1:8000",
    ).splitlines()


def test_a_request_in_flight_ends_within_30_s_of_a_stop():
    """By default: the time to finish, what systemd waits beyond it, and a rest for a busy machine."""
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text())
    (beyond,) = (int(line.partition("=")[2]) - 5 for line in drop_in() if line.startswith("TimeoutStopSec="))
    assert beyond > 0
    assert defaults["vllm_service_shutdown_timeout"] + beyond <= 25


def test_the_group_is_the_users_own():
    unit = rendered("vllm@.service.j2", vllm_service_user="serve", ansible_managed="").splitlines()
    assert "User=serve" in unit
    assert not [line for line in unit if line.startswith("Group=")]


def test_roles_follow_one_user():
    for role, variable in (("vllm_service", "user"), ("host_limits", "user"), ("nccl", "service_user")):
        defaults = yaml.safe_load((REPOSITORY / f"roles/{role}/defaults/main.yml").read_text())
        assert defaults[f"{role}_{variable}"] == "{{ fleet_service_user | default('vllm') }}"


def test_a_gpu_server_opens_gpus_and_rdma():
    lines = drop_in()
    assert "DevicePolicy=closed" in lines
    allowed = {line.split("=")[1] for line in lines if line.startswith("DeviceAllow=")}
    assert {"char-nvidia* rw", "char-infiniband* rw", "/dev/infiniband/rdma_cm rw", "char-gdrdrv rw"} <= allowed
    assert not [line for line in lines if line.startswith("SupplementaryGroups=")]


def test_nodes_of_a_group_make_it_a_group_of_the_unit():
    assert "SupplementaryGroups=44 video" in drop_in(groups=["44", "video"])
    assert not [line for line in drop_in("cpu") if line.startswith(("SupplementaryGroups=", "Device"))]


@pytest.mark.parametrize(
    ("mode", "gid", "groups"),
    [
        (0o660, 54321, ["54321"]),
        (0o666, 54321, []),  # for everybody
        (0o640, 54321, []),  # the group would not do either
        (0o664, 54321, ["54321"]),
        (0o660, 0, []),  # nobody is put into root's group
    ],
)
def test_the_groups_of_nodes(mode, gid, groups):
    assert device_groups.groups([{"path": "/dev/nvidia0", "mode": mode, "gid": gid}]) == groups


def test_a_group_is_named_where_it_has_a_name():
    assert device_groups.name(0) == "root"


def test_only_character_devices_count(monkeypatch):
    kinds = {"/dev/nvidia0": stat.S_IFCHR | 0o660, "/dev/nvidia-caps": stat.S_IFDIR | 0o755}
    monkeypatch.setattr(device_groups.glob, "glob", lambda pattern: list(kinds))
    monkeypatch.setattr(device_groups.os, "stat", lambda path: SimpleNamespace(st_mode=kinds[path], st_gid=44))
    assert device_groups.nodes(["/dev/nvidia*"]) == [{"path": "/dev/nvidia0", "mode": 0o660, "gid": 44}]


def test_before_there_are_nodes_the_driver_says_what_they_will_be():
    text = (
        "ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 44\nDeviceFileMode: 432\n"
    )
    assert device_groups.promised(text) == [{"path": "/dev/nvidia0", "mode": 0o660, "gid": 44}]
    assert device_groups.promised("") == []
