"""Ctrl-C in the middle of `scripts/fleet deploy`, once and twice: what is said, and that the next run repairs.

    scripts/test long interrupts

Two bare lab hosts are brought to serve with the stand-in for vLLM (tests/standin), each of the first four runs is interrupted at
another moment, by the processes that the first host has then: while packages are installed, while the release is built, while a
configuration is written, while the server starts. Each next run begins at once and goes on. As on a terminal the signal goes to the
whole group of the command. Needs root and about ten minutes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import standin_fleet
import yaml
from standin_fleet import ROOT, Lab

HOSTS = ("gpu-01", "gpu-02")
WATCHER = Path(__file__).with_name("cut_short.py")
# Name, and what is looked for among the processes of the first host.
MOMENTS = {
    "packages": r"apt-get .*install",
    "release": r"/uv pip install",
    "configuration": r"systemctl show .*vllm@chat",
    "start": r"/bin/vllm serve --config",
}
# How often Ctrl-C is pressed, by moment; each in a lab of its own.
ORDERS = {"once-twice-once-twice": (1, 2, 1, 2), "twice-once-twice-once": (2, 1, 2, 1)}
BALLAST = 64_000_000  # bytes of the release: it is built for more than an instant


class Fleet:
    def __init__(self, folder: Path) -> None:
        self.lab = Lab("long-interrupts", *HOSTS)
        self.inventory = folder / "hosts.yml"
        self.folder = folder

    def up(self) -> None:
        self.lab.up()
        lock = standin_fleet.release(self.folder, BALLAST)
        made = standin_fleet.inventory(
            self.lab, *HOSTS, vllm_runtime_lock=str(lock), vllm_runtime_wheelhouse=str(lock.parent / "wheels")
        )
        made["all"]["vars"] = self.lab.inventory["vars"]
        self.inventory.write_text(yaml.safe_dump(made), encoding="utf-8")
        self.lab.put(HOSTS[0], WATCHER)

    def begin(self) -> subprocess.Popen[str]:
        """A deploy in a group of its own, as a shell with a terminal starts it."""
        return subprocess.Popen(
            [sys.executable, "-m", "gpu_fleet.cli", "deploy", "-i", str(self.inventory)],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT / "scripts"),
                "XDG_STATE_HOME": str(self.folder / "state"),
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def deploy(self) -> tuple[int, str]:
        run = self.begin()
        said, _ = run.communicate(timeout=1200)
        return run.returncode, said

    def wait_for(self, pattern: str) -> str:
        """The process of the first host that is waited for."""
        told = self.lab.on(HOSTS[0], f"python3 /root/{WATCHER.name} '{pattern}' 0 --only-tell", seconds=660)
        return json.loads(told)["seen"]


@pytest.fixture(scope="module", params=ORDERS)
def fleet(request, tmp_path_factory):
    made = Fleet(tmp_path_factory.mktemp("interrupts"))
    made.presses = dict(zip(MOMENTS, ORDERS[request.param], strict=True))
    try:
        made.up()
        yield made
    finally:
        made.lab.down()


@pytest.mark.parametrize("moment", MOMENTS)
def test_it_ends_and_says_what_is_done_and_the_command_for_the_rest(fleet, moment):
    run = fleet.begin()
    seen = fleet.wait_for(MOMENTS[moment])
    for press in range(fleet.presses[moment]):
        if press:
            # The first one was heard: the second is none that came with it.
            line = ""
            while "interrupted: ending what runs" not in line:
                line = run.stdout.readline()
                assert line, "it ended before it was interrupted twice"
        os.killpg(run.pid, signal.SIGINT)
    said, _ = run.communicate(timeout=60)
    print(f"\n{moment}, Ctrl-C {fleet.presses[moment]} times, at: {seen}\n{said}")
    assert run.returncode == 130
    assert "Traceback" not in said
    assert f"for the rest, which repairs what is half done: scripts/fleet deploy -i {fleet.inventory}" in said
    assert ("ended at once." in said) == (fleet.presses[moment] == 2)
    assert re.search(r"^gpu-01.*: (done \w+|nothing is done).*ended in ", said, re.MULTILINE)
    assert "failed:" not in said and "not reached" not in said, "what was ended is no failure of a host"
    # Whatever was half made does not carry the name of what is whole.
    unfinished = "for path in /opt/vllm/releases/0.*; do test ! -e $path || test -e $path/.complete || echo $path; done"
    assert [fleet.lab.on(host, unfinished) for host in HOSTS] == ["", ""]


def test_the_next_run_goes_on_and_repairs(fleet):
    status, said = fleet.deploy()
    assert status == 0, said
    for host in HOSTS:
        left = "find /opt/vllm/releases -maxdepth 1 '(' -name '*building*' -o -name '*incoming*' ')'"
        assert fleet.lab.on(host, f"dpkg --audit && {left}") == ""
        ask = standin_fleet.question(fleet.lab.address(host))
        assert fleet.lab.on(host, "python3 -", stdin=ask) == "200"
    assert [fleet.lab.on(host, f"systemctl is-active vllm@chat.{n}") for n, host in enumerate(HOSTS)] == ["active"] * 2


def test_and_the_one_after_it_changes_nothing(fleet):
    status, said = fleet.deploy()
    assert (status, said.splitlines()[-1]) == (0, "changes: gpu-01 0, gpu-02 0"), said
