"""Who sees a start through knows which one: the watch is given what the start returned, in every place that starts a replica.

The tasks are those of role vllm_service, run for real on no host; the module that would reach systemd is a stand-in that
writes down what it was asked.
"""

import yaml
from conftest import REPOSITORY
from plays import played

MODULE = """#!/usr/bin/python
# Stand-in, made for a test.
from ansible.module_utils.basic import AnsibleModule

names = ["instance", "generation", "previous", "timeout", "state", "invocation", "hosts", "rank", "store_port"]
module = AnsibleModule(argument_spec={{name: {{"type": "raw"}} for name in names}})
with open({record!r}, "a") as record:
    record.write("%(instance)s %(state)s %(invocation)s\\n" % module.params)
module.exit_json(changed=False, invocation_id="run of " + module.params["instance"], previous="")
"""
START = {"instance": "chat.0", "generation": "1", "hosts": ["gpu-01"], "rank": 0, "store_port": 8001}


def tasks_of(node):
    """Every task that calls the module, in order, out of blocks too."""
    for task in node:
        if "gpu_fleet.vllm.instance" in task:
            yield task
        for key in ("block", "rescue", "always"):
            yield from tasks_of(task.get(key, []))


def pair(name):
    """The task of a file that starts a replica, here chat.0, and the one that sees it through."""
    found = list(tasks_of(yaml.safe_load((REPOSITORY / f"roles/vllm_service/tasks/{name}.yml").read_text())))
    watch = next(
        number for number, task in enumerate(found) if task["gpu_fleet.vllm.instance"].get("state") == "watched"
    )
    found[watch - 1]["loop"] = [START]  # which replicas these are is test_rollout.py's
    return [found[watch - 1], found[watch]]


def test_the_watch_is_given_the_run_that_the_start_began(tmp_path):
    home = tmp_path / "collections/ansible_collections/gpu_fleet/vllm/plugins/modules"
    home.mkdir(parents=True)
    (home / "instance.py").write_text(MODULE.format(record=str(tmp_path / "record")))
    tasks = [task for name in ("rollout", "restart", "fall_back") for task in pair(name)]
    play = [{"hosts": "localhost", "gather_facts": False, "tasks": tasks}]
    given = {"vllm_service_start_timeout": 9, "__vllm_service_stays": False}
    status, said = played(tmp_path, play, "localhost,", "-c", "local", **given)
    assert status == 0, said
    assert (tmp_path / "record").read_text().splitlines() == ["chat.0 None None", "chat.0 watched run of chat.0"] * 3
