"""A run while it goes on: where each host is, with times, in a table that fits, and in plain lines."""

import io
import time

import pytest
from gpu_fleet import events
from gpu_fleet.progress import Board, Lines, clock, mishap, shown, table
from rich.console import Console

START = 1_000_000.0


class Story:
    """Events of a run as ansible-runner makes them, a second after the other."""

    def __init__(self):
        self.at = START
        self.told = []

    def _add(self, event, role="", task="", host="", **more):
        data = {
            "role": role,
            "task": task,
            "host": host,
            "task_uuid": f"{role}{task}",
            "res": more.pop("res", {}),
            **more,
        }
        created = events.datetime.datetime.fromtimestamp(self.at, events.datetime.UTC).isoformat()
        self.told.append(events.read({"event": event, "created": created, "event_data": data}))

    def task(self, role, task, hosts, seconds=1.0):
        """What each host does in a task: hosts is name to result (ok, changed, skipped, failed, unreachable)."""
        self._add("playbook_on_task_start", role, task)
        for host in hosts:
            self._add("runner_on_start", role, task, host)
        self.at += seconds
        for host, result in hosts.items():
            kind = "ok" if result == "changed" else result
            self._add(f"runner_on_{kind}", role, task, host, res={"changed": result == "changed", "msg": "why"})
        return self

    def end(self, **told):
        self._add("playbook_on_stats", **{"processed": {}, "dark": {}, "failures": {}, **told})
        return self


@pytest.fixture
def story():
    story = Story()
    story.task("gpu_fleet.vllm.validate", "Judge", {"gpu-01": "ok"})
    story.task("nccl", "Write the file", {"gpu-01": "changed", "gpu-02": "ok", "gpu-03": "skipped"}, 2.0)
    story.task(
        "vllm_runtime", "Build the release", {"gpu-01": "changed", "gpu-02": "unreachable", "gpu-03": "ok"}, 30.0
    )
    story.task("vllm_service", "Start", {"gpu-01": "failed", "gpu-03": "ok"}, 10.0)
    return story


def took(story):
    progress = events.Progress()
    for event in story.told:
        progress.take(event)
    return progress


def text(renderable, width=100):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    return console.file.getvalue()


def test_hosts_have_the_seconds_of_their_stages(story):
    progress = took(story)
    assert progress.stages == ["validate", "nccl", "vllm_runtime", "vllm_service"]
    assert progress.hosts["gpu-01"].stages == {"validate": 1.0, "nccl": 2.0, "vllm_runtime": 30.0, "vllm_service": 10.0}
    # A skipped task is no stage of a host.
    assert progress.hosts["gpu-03"].stages == {"vllm_runtime": 30.0, "vllm_service": 10.0}
    assert {name: host.state for name, host in progress.hosts.items()} == {
        "gpu-01": "failed",
        "gpu-02": "unreachable",
        "gpu-03": "works",
    }
    assert progress.hosts["gpu-01"].changes == 2


def test_a_stage_that_comes_again_is_added_up(story):
    story.task("nccl", "Look again", {"gpu-03": "ok"}, 5.0)
    story.task("nccl", "And again", {"gpu-03": "ok"}, 5.0)
    assert took(story).hosts["gpu-03"].stages["nccl"] == 10.0


def test_at_the_end_ansible_says_who_failed(story):
    progress = took(story.end(failures={"gpu-01": 1}, dark={"gpu-02": 1}))
    assert [host.state for host in progress.hosts.values()] == ["failed", "unreachable", "ok"]
    assert progress.over


def test_the_table_has_a_column_a_stage_and_the_seconds_that_go_on(story):
    story.task("vllm_service", "Probe", {"gpu-03": "ok"}, 0.0)
    story.told.pop()  # it has begun, and no result yet
    shows = text(table(took(story), story.at + 7, 100, 30)).splitlines()
    assert shows[0].split() == ["50", "s", "vllm_service:", "Probe"]
    assert shows[1].split() == ["host", "validate", "nccl", "vllm_runtime", "vllm_service", "changes"]
    assert shows[2].split() == ["gpu-01", "1", "s", "2", "s", "30", "s", "failed", "2", "failed"]
    assert shows[3].split() == ["gpu-02", "2", "s", "lost", "not", "reached"]
    assert shows[4].split() == ["gpu-03", "30", "s", "17", "s", "Probe"]


@pytest.mark.parametrize("width", [40, 60, 72, 80, 200])
def test_it_fits_whatever_the_width(story, width):
    lines = text(table(took(story), story.at, width, 30), width).splitlines()
    assert all(len(line) <= width for line in lines)
    assert len(lines) == 5  # a line a host, none broken in two
    assert "gpu-01" in lines[2]


def test_stages_that_do_not_fit_are_added_up(story):
    shows = text(table(took(story), story.at, 72, 30), 72).splitlines()
    assert shows[1].split() == ["host", "before", "vllm_service", "changes"]
    assert shows[2].split()[:3] == ["gpu-01", "33", "s"]


def test_many_hosts_show_those_that_need_a_look(story):
    story.task("nccl", "Look", {f"host-{number}": "ok" for number in range(100)})
    shows = text(table(took(story), story.at, 100, 20)).splitlines()
    assert len(shows) <= 20
    assert shows[2].startswith("gpu-01")
    assert shows[-1] == "and 87 more hosts: 87 works"


def test_plain_lines_are_one_a_task_and_one_a_host(story):
    console = Console(file=io.StringIO(), width=80)
    with Lines(console, now=lambda: story.at) as lines:
        for event in story.end(failures={"gpu-01": 1}, dark={"gpu-02": 1}).told:
            lines.take(event)
    shows = console.file.getvalue().splitlines()
    assert [line.split("  ")[-1] for line in shows] == [
        "validate: Judge",
        "nccl: Write the file",
        "vllm_runtime: Build the release",
        "gpu-02 not reached: why",
        "vllm_service: Start",
        "gpu-01 failed: Start: why",
        "gpu-01: failed, 2 changes, 43 s of work",
        "gpu-02: not reached, 32 s of work",
        "gpu-03: ok, 40 s of work",
    ]
    assert "\x1b" not in console.file.getvalue()


def test_of_a_long_message_the_first_sentence_is_told_at_once_and_the_whole_once():
    said = "vLLM 0.32.0 is gone: the host's SSH key has changed. It sent another one.\nCompare it"
    event = events.Event("unreachable", 0.0, "nccl", "Look", "gpu-02", message=said)
    assert mishap(event) == "gpu-02 not reached: vLLM 0.32.0 is gone: the host's SSH key has changed"


def test_a_task_that_takes_long_says_so_where_there_is_no_terminal(story):
    console = Console(file=io.StringIO(), width=200)
    now = story.at
    with Lines(console, now=lambda: now) as lines:
        for event in story.told[:-2]:
            lines.take(event)
        now = story.at + 300
        until = time.monotonic() + 20
        while "still" not in console.file.getvalue() and time.monotonic() < until:
            time.sleep(0.05)  # it looks once a second
    assert "still vllm_service: Start (gpu-01, gpu-03)" in console.file.getvalue()


def test_the_live_table_is_left_behind_whole(story):
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with Board(console, now=lambda: story.at) as board:
        for event in story.end(failures={"gpu-01": 1}).told:
            board.take(event)
    last = console.file.getvalue().rsplit("host ", 1)[-1]
    assert "gpu-02 not reached: why" in console.file.getvalue()
    assert "gpu-01 failed: Start: why" not in last
    assert "vllm_service" in last
    assert "failed" in last


def test_what_is_shown_depends_on_where_it_goes(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert isinstance(shown(Console(file=io.StringIO())), Lines)
    terminal = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(shown(terminal), Board)
    assert terminal.no_color


@pytest.mark.parametrize(("seconds", "says"), [(0, "0 s"), (59.9, "59 s"), (185, "3:05"), (3723, "1:02:03")])
def test_times_are_short(seconds, says):
    assert clock(seconds) == says
