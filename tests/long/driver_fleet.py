"""One lab host with role gpu_driver on it, for the long tests of the driver: runs of the role, and what it shows against what it does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "molecule" / "shared" / "lab.py"
MOLECULE = ROOT / "molecule"
HOST = "gpu-01"
IMAGE = "linux-image-cloud-amd64"
PATIENCE = 1200.0


def lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(LAB), *arguments], capture_output=True, text=True, check=False)


@dataclass
class Run:
    """One run of the role. said: what it printed, with single spaces."""

    status: int
    said: str
    seconds: float

    @property
    def changed(self) -> int:
        return int(re.findall(r"changed=(\d+)", self.said)[0])

    @property
    def planned(self) -> set[tuple[str, str, str]]:
        """Changes of packages that the plan shows: name, old or nothing, new or nothing."""
        found = {(name, "", new) for name, new in re.findall(r"- install (\S+) (\d\S*)", self.said)}
        found |= set(re.findall(r"- change (\S+) (\S+) to (\S+)", self.said))
        return found | {(name, old, "") for name, old in re.findall(r"- remove (\S+) (\S+)", self.said)}


class Fleet:
    """The lab with its one host. suite: Debian's; scenario: whose playbooks and variables it has."""

    def __init__(self, name: str, suite: str, folder: Path, scenario: str) -> None:
        self.name, self.suite, self.folder, self.scenario = name, suite, folder, MOLECULE / scenario

    def ask(self, command: str) -> str:
        """What a command of the host prints, its errors too."""
        return lab("exec", self.name, HOST, "--", "sh", "-c", f"({command}) 2>&1").stdout.strip()

    def installed(self) -> dict[str, str]:
        lines = self.ask("dpkg-query -W -f '${db:Status-Status} ${Package} ${Version}\\n'").splitlines()
        return {name: version for state, name, version in (line.split(" ") for line in lines) if state == "installed"}

    def begin(self, **changes) -> None:
        self.end()
        up = lab("up", self.name, "--host", HOST, "--suite", self.suite)
        assert up.returncode == 0, up.stderr
        inventory = self.folder / "inventory"
        inventory.mkdir()
        (inventory / "lab.yml").write_text(Path(up.stdout.strip()).read_text(encoding="utf-8"), encoding="utf-8")
        told = yaml.safe_load((self.scenario / "molecule.yml").read_text(encoding="utf-8"))
        variables = {**told["provisioner"]["inventory"]["group_vars"]["gpu_hosts"], **changes}
        groups = {"gpu_hosts": {"hosts": {HOST: None}, "vars": variables}}
        (inventory / "groups.yml").write_text(json.dumps(groups), encoding="utf-8")
        if (self.scenario.name, self.suite) == ("gpu_driver_nvidia", "trixie"):
            # Headers of Debian 13 ask for their kernel's image, and the role lets none come.
            self.ask(
                f"apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends {IMAGE}"
            )
            assert "install ok" in self.ask(f"dpkg-query -W -f '${{Status}}' {IMAGE}")
        run = self.play("prepare.yml")
        assert run.status == 0, run.said[-6000:]

    def end(self) -> None:
        assert lab("down", self.name).returncode == 0

    def play(self, playbook: str, *options: str, **variables) -> Run:
        program = str(Path(sys.executable).parent / "ansible-playbook")
        command = [program, str(self.scenario / playbook), "-i", str(self.folder / "inventory"), *options]
        environment = {
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
            "PLAYED": str(self.folder / "played"),
            "ANSIBLE_NOCOLOR": "1",
        }
        began = time.monotonic()
        done = subprocess.run(
            [*command, "-e", json.dumps(variables)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        return Run(done.returncode, " ".join((done.stdout + done.stderr).split()), time.monotonic() - began)


def does_what_it_showed(fleet: Fleet, **variables) -> None:
    """A run in check mode names every package that the next one changes, by name and version, and no other."""
    before = fleet.installed()
    shown = fleet.play("converge.yml", "--check", "--diff", **variables)
    assert shown.status == 0, shown.said[-6000:]
    assert fleet.installed() == before
    run = fleet.play("converge.yml", **variables)
    assert run.status == 0, run.said[-6000:]
    after = fleet.installed()
    happened = {
        (name, before.get(name, ""), after.get(name, ""))
        for name in {*before, *after}
        if before.get(name) != after.get(name)
    }
    assert happened == shown.planned == run.planned
    assert happened
    assert not [item for item in happened if item[0] == "libc6" or item[0].startswith("linux-image")]
    print(f"\nshown in {shown.seconds:.0f} s, done in {run.seconds:.0f} s on a machine that others used, too")
