"""Where a run's time went: every second is a task's or between two, and who kept the others waiting is named."""

import json

from gpu_fleet import runs, timing
from test_progress import Story


def timed(story):
    times = timing.Timing()
    for event in story.told:
        times.take(event)
    return times.as_dict()


def story():
    told = Story()
    told.task("gpu_fleet.vllm.nccl", "Write the file", {"gpu-01": "changed", "gpu-02": "ok", "gpu-03": "skipped"}, 2.0)
    told.at += 0.5
    told.task("gpu_fleet.vllm.vllm_runtime", "Build the release", {"gpu-01": "ok", "gpu-02": "failed"}, 30.0)
    told.at += 1.0
    return told.end()


def test_every_second_is_a_tasks_or_between_two():
    told = timed(story())
    assert [(task["stage"], task["wall"]) for task in told["tasks"]] == [("vllm_runtime", 30.0), ("nccl", 2.0)]
    assert (told["between"], told["seconds"]) == (1.5, 33.5)
    assert [task["hosts"] for task in told["tasks"]] == [2, 2], "who skips it has no share in it"


def test_the_host_that_the_others_wait_for_is_named():
    told = Story()
    told._add("playbook_on_task_start", "nccl", "Look")
    for host, seconds in (("gpu-01", 1.0), ("gpu-02", 7.0), ("gpu-03", 2.0)):
        told.at += seconds
        told._add("runner_on_ok", "nccl", "Look", host, duration=seconds)
    (task,) = timed(told)["tasks"]
    assert (task["slowest"], task["longest"], task["work"], task["wall"]) == ("gpu-02", 7.0, 10.0, 10.0)
    assert "nccl: Look (3 hosts, 10.0 s of work, gpu-02 longest with 7.0 s)" in timing.lines(timed(told))[-1]


def test_a_run_without_a_task_has_no_times():
    told = timed(Story().end())
    assert told == {"seconds": 0.0, "between": 0.0, "tasks": []}
    assert timing.lines(told)[0] == "0.0 s in 0 tasks, by stage:"


def test_a_run_keeps_them_and_the_command_line_prints_them(tmp_path, monkeypatch):
    (tmp_path / "hosts.yml").write_text("all: {hosts: {gpu-01: {ansible_connection: local}}}\n")
    (tmp_path / "playbooks").mkdir()
    play = [
        {"hosts": "all", "gather_facts": False, "tasks": [{"name": "Wait", "ansible.builtin.pause": {"seconds": 1}}]}
    ]
    (tmp_path / "playbooks" / "site.yml").write_text(json.dumps(play))
    monkeypatch.setattr(runs, "COLLECTION", tmp_path)
    result = runs.run("site", tmp_path / "hosts.yml")
    assert result.status == 0, result.failures
    (task,) = result.times["tasks"]
    assert task["task"] == "Wait" and 1.0 <= task["wall"] <= result.seconds
    assert json.loads((result.folder / "profile.json").read_text()) == result.times
