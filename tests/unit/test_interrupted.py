"""What is told of a run that was ended: how far each host is, and the command for the rest."""

from __future__ import annotations

import os
import signal
import sys

import pytest
import typer
from gpu_fleet import interrupted, verbs
from gpu_fleet.events import Event, Progress


def told(*steps):
    """Events, each as kind, host, stage and task."""
    progress = Progress()
    for at, (kind, host, stage, task) in enumerate(steps):
        progress.take(Event(kind, float(at), stage, task, host))
    return interrupted.reached(progress)


def through(host, *stages):
    """A host that did a task that changed something in each stage."""
    return [step for stage in stages for step in (("start", host, stage, "Do"), ("changed", host, stage, "Do"))]


def test_what_is_done_and_where_it_was_ended_by_hosts_that_are_equally_far():
    steps = [
        ("task", "", "firewall", "Do"),
        *through("gpu-01", "host_limits", "firewall"),
        *through("gpu-02", "host_limits", "firewall"),
        ("start", "gpu-01", "vllm_runtime", "Build the release"),
        ("start", "gpu-02", "vllm_runtime", "Build the release"),
        *through("gw-01", "gateway"),
        ("failed", "gw-02", "gateway", "Install"),
        ("unreachable", "gw-03", "gateway", "Install"),
        ("start", "gpu-03", "", "Gather facts"),
    ]
    assert told(*steps) == [
        "gpu-01, gpu-02: done host_limits, firewall; 2 changes; ended in vllm_runtime: Build the release",
        "gw-01: nothing is done; one change; ended in gateway: Do",
        "gw-02: done gateway; failed",
        "gw-03: done gateway; not reached",
        "gpu-03: nothing is done; ended in Gather facts",
    ]


def test_of_many_hosts_a_few_are_named():
    (line,) = told(*[step for number in range(64) for step in through(f"gpu-{number}", "nccl", "firewall")])
    assert line.startswith("gpu-0, gpu-1, gpu-2, gpu-3 and 60 more: done nccl; 2 changes; ended in firewall")
    assert told() == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["deploy", "-i", "my inventory", "--limit", "a,b"], "fleet deploy -i 'my inventory' --limit a,b"),
        (["deploy", "-e", "n=1", "-e", "@keys.yml", "-i", "x"], "fleet deploy -e n=1 -e @keys.yml -i x"),
        (["deploy", "-e", "api_key=k1", "-i", "key"], "fleet deploy -e api_key=... -i key"),
        (["deploy", "--extra-vars=my_token=t=u"], "fleet deploy --extra-vars=my_token=..."),
        (["deploy", "-ehub_password=p"], "fleet deploy -ehub_password=..."),
        (["deploy", "-e", '{"key": "k1"}', "-e", '{"n": 1}'], "fleet deploy -e ... -e '{\"n\": 1}'"),
    ],
)
def test_the_command_for_the_rest_tells_no_secret(words, line):
    assert interrupted.again("fleet", words) == line


def test_a_second_ctrl_c_ends_it_at_once_and_says_the_same(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fleet", "deploy", "-i", "inv"])

    def work(*, cancel, on_event):
        on_event(Event("start", 1.0, "nccl", "Do", "gpu-01"))
        os.kill(os.getpid(), signal.SIGINT)
        assert cancel()
        os.kill(os.getpid(), signal.SIGINT)

    former = signal.getsignal(signal.SIGINT)
    with pytest.raises(typer.Exit) as ended:
        verbs.call(work, True)
    assert ended.value.exit_code == 130 and signal.getsignal(signal.SIGINT) is former
    assert capsys.readouterr().err.splitlines()[-3:] == [
        "ended at once. What a task had begun on a host may still end there",
        "gpu-01: nothing is done; ended in nccl: Do",
        "for the rest, which repairs what is half done: fleet deploy -i inv",
    ]
