"""The collection as others use it, on controllers of two kinds that have nothing of the checkout.

    scripts/test long controllers

A lab host of Debian 12 with its own Python 3.11 and the oldest ansible-core that is supported, and one of Debian 13 with its own
Python 3.13 and the newest, each in a virtual environment from PyPI: both install the tarball into an empty project, bring one bare
host of Debian 12 to a service that answers, change nothing in a second run, and do the same once more with the command `fleet` of the
wheel. The engine is the stand-in for vLLM (tests/standin), in wheels that the role vllm_runtime builds a release from. The public
collections come with the PyPI package `ansible`; Galaxy is not asked. Needs root, the network, and a quarter of an hour.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import standin_fleet
import yaml
from standin_fleet import ROOT, Lab

PROJECT, VENV = "/root/project", "/root/venv"
# The newest release, with the package that carries the public collections for it; the oldest is the one of requirements.in.
NEWEST = ("ansible-core==2.21.5", "ansible==14.5.0")
SHARED = ("ansible-runner", "jinja2", "pyyaml", "rich", "typer", "uv")


def pins() -> dict[str, str]:
    """What requirements.in names, as `name==version` by name."""
    text = (ROOT / "requirements.in").read_text(encoding="utf-8")
    return {pin.partition("==")[0]: pin for pin in re.findall(r"^[a-z0-9-]+==[0-9.]+", text, re.MULTILINE)}


@dataclass(frozen=True)
class Kind:
    """A kind of controller, and the host it is to bring up. python and core are what is looked for."""

    name: str
    suite: str
    python: str
    packages: tuple[str, ...]
    target: str
    # A wrong password is one more failed login with each retry of ssh: newer ansible-core does not tell it from a host that is out of
    # reach. Nobody has retries unless they set them; the lab does, for a machine that is short of time.
    retried: Mapping[str, int] = field(default_factory=dict)


PINS = pins()
KINDS = (
    Kind("debian-13", "trixie", "3.13", NEWEST, "gpu-02", {"ansible_ssh_retries": 0}),
    Kind("debian-12", "bookworm", "3.11", (PINS["ansible-core"], PINS["ansible"]), "gpu-01"),
)
GPUS = Lab("long-controllers", *(kind.target for kind in KINDS))


class Controller:
    """A lab host with Ansible in a virtual environment, an empty project and an inventory in it."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.host = f"control-{kind.name.rpartition('-')[2]}"
        self.lab = Lab(f"long-{self.host}", self.host, suite=kind.suite)

    def make(self, folder: Path, tarball: Path, wheel: Path) -> None:
        self.lab.up()
        self.tarball, self.wheel = tarball.name, wheel.name
        self.run(
            "apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install python3-venv",
            300,
        )
        packages = " ".join([*self.kind.packages, *(PINS[name] for name in SHARED)])
        self.run(
            f"python3 -m venv {VENV} && {VENV}/bin/python -m pip install --quiet --no-compile --disable-pip-version-check {packages}",
            900,
        )
        self.run(f"mkdir -p {PROJECT} -m 0755 /root/.ssh")
        lock = standin_fleet.release(folder)
        self.lab.put(self.host, tarball, wheel)
        self.lab.put(self.host, lock, lock.parent / "wheels", into=PROJECT)
        inventory = standin_fleet.inventory(
            GPUS,
            self.kind.target,
            vllm_runtime_lock=f"{PROJECT}/{lock.name}",
            vllm_runtime_wheelhouse=f"{PROJECT}/wheels",
        )
        (folder / "hosts.yml").write_text(yaml.safe_dump(inventory), encoding="utf-8")
        self.lab.put(self.host, folder / "hosts.yml", into=PROJECT)
        self.lab.put(self.host, GPUS.folder / "id", into="/root/.ssh", names={"id": "id_ed25519"})
        self.lab.put(self.host, GPUS.folder / "known_hosts", into="/root/.ssh")

    def run(self, script: str, seconds: float = 600) -> str:
        return self.lab.on(self.host, script, seconds=seconds)

    def here(self, command: str, seconds: float = 600) -> str:
        """A command of the virtual environment in the project, its colours off; what it prints, in single spaces."""
        settings = f"export PATH={VENV}/bin:$PATH ANSIBLE_NOCOLOR=1"
        # In braces: a command that sends its warnings elsewhere does so.
        said = self.run(f"cd {PROJECT} && {settings} && {{ {command}; }} 2>&1", seconds)
        return " ".join(said.split())


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The tarball, and the wheel of the command line that its content makes."""
    folder = tmp_path_factory.mktemp("built")
    galaxy = str(Path(sys.executable).parent / "ansible-galaxy")
    subprocess.run([galaxy, "collection", "build", "--output-path", str(folder)], cwd=ROOT, check=True)
    (tarball,) = folder.glob("*.tar.gz")
    (folder / "content").mkdir()
    subprocess.run(["tar", "--extract", "--file", str(tarball), "-C", str(folder / "content")], check=True)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            str(folder),
            str(folder / "content"),
        ],
        check=True,
    )
    (wheel,) = folder.glob("*.whl")
    return tarball, wheel


@pytest.fixture(scope="module")
def gpus():
    try:
        GPUS.up()
        yield GPUS
    finally:
        GPUS.down()


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def controller(request, built, gpus, tmp_path_factory):
    made = Controller(request.param)
    try:
        made.make(tmp_path_factory.mktemp("controller"), *built)
        yield made
    finally:
        made.lab.down()


def changed(said: str) -> int:
    """What the recap counts."""
    recap = re.search(r"PLAY RECAP .*?ok=\d+ changed=(\d+) unreachable=0 failed=0", said)
    assert recap, said[-3000:]
    return int(recap.group(1))


def test_it_is_the_python_and_the_ansible_that_it_is_to_be(controller):
    said = controller.here("ansible --version")
    print(f"\n{controller.kind.name}: {said[:60]}")
    assert f"[core {controller.kind.packages[0].partition('==')[2]}]" in said
    assert f"python version = {controller.kind.python}." in said
    assert controller.run(f". /etc/os-release; echo $VERSION_CODENAME; readlink -f {VENV}/bin/python").split() == [
        controller.kind.suite,
        f"/usr/bin/python{controller.kind.python}",
    ]


def test_the_tarball_is_installed_and_finds_what_it_needs(controller):
    """Its dependencies are looked for, and are those of the package `ansible`."""
    said = controller.here(f"ansible-galaxy collection install --offline /root/{controller.tarball}")
    assert "gpu_fleet.vllm:0.1.0 was installed successfully" in said
    listed = controller.here("ansible-galaxy collection list --format json 2>/dev/null")
    versions = {name: entry["version"] for found in json.loads(listed).values() for name, entry in found.items()}
    print(f"\n{ {name: versions[name] for name in ('gpu_fleet.vllm', 'ansible.posix', 'community.crypto')} }")
    assert controller.run(f"ls -A {PROJECT}").split() == ["hosts.yml", "standin.lock", "wheels"]


def test_site_by_full_name_from_a_bare_host_to_a_service_that_answers(controller):
    said = controller.here("ansible-playbook gpu_fleet.vllm.site -i hosts.yml", 1200)
    assert changed(said) > 10
    print(f"\n{controller.kind.name}: {said.count('[WARNING]')} warnings")
    assert "[DEPRECATION WARNING]" not in said, said
    asks = standin_fleet.question(GPUS.address(controller.kind.target))
    assert GPUS.on(controller.kind.target, "systemctl is-active vllm@chat.0") == "active"
    assert controller.lab.on(controller.host, "python3 -", stdin=asks) == "200"


def test_a_second_run_changes_nothing(controller):
    assert changed(controller.here("ansible-playbook gpu_fleet.vllm.site -i hosts.yml", 1200)) == 0


def test_nor_does_one_where_facts_are_no_variables(controller):
    """As sites may have it, and as ansible-core 2.24 has it unless it is told otherwise."""
    command = "ANSIBLE_INJECT_FACT_VARS=False ansible-playbook gpu_fleet.vllm.site -i hosts.yml"
    assert changed(controller.here(command, 1200)) == 0


def test_a_role_by_full_name_in_a_play_of_the_project(controller):
    variables = {"host_limits_nofile": 8192}
    play = [{"hosts": "gpu_hosts", "gather_facts": False, "roles": ["gpu_fleet.vllm.host_limits"], "vars": variables}]
    controller.lab.on(controller.host, f"cat >{PROJECT}/play.yml", stdin=json.dumps(play))
    assert changed(controller.here("ansible-playbook play.yml -i hosts.yml --check --diff")) > 0, "it did not look"
    play[0]["vars"] = {}
    controller.lab.on(controller.host, f"cat >{PROJECT}/play.yml", stdin=json.dumps(play))
    assert changed(controller.here("ansible-playbook play.yml -i hosts.yml")) == 0


def test_the_command_of_the_wheel(controller):
    controller.here(f"python -m pip install --quiet --disable-pip-version-check --no-deps /root/{controller.wheel}")
    said = controller.here("fleet --help")
    assert "Run a fleet of vLLM hosts." in said and "deploy" in said
    assert "chat.0" in controller.here("fleet validate -i hosts.yml")
    said = controller.here("fleet deploy -i hosts.yml", 1200)
    assert said.endswith(f"changes: {controller.kind.target} 0"), said[-3000:]


WRONG, RIGHT = "wrong-password-of-a-test", "right-password-of-a-test"


def test_a_wrong_password_is_one_message_and_is_tried_once(controller):
    """ansible-core 2.18 hands it on by sshpass, newer ones by SSH_ASKPASS; a host may lock an account after a few."""
    target = controller.kind.target
    controller.run("DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install sshpass", 300)
    user = "deployer"
    GPUS.on(target, f"useradd --create-home {user} && echo {user}:{RIGHT} | chpasswd")
    for name, password in (("wrong", WRONG), ("right", RIGHT)):
        login = json.dumps({"ansible_user": user, "ansible_password": password, **controller.kind.retried})
        controller.lab.on(controller.host, f"umask 077; cat >/root/{name}.json", stdin=login)
    said = controller.run(
        f"cd {PROJECT}; {VENV}/bin/fleet deploy -i hosts.yml -e @/root/wrong.json 2>&1; echo exit status $?", 300
    )
    print(f"\n{said}")
    (line,) = [
        line for line in said.splitlines() if line.startswith(f"{target}: not reached; nothing was changed there.")
    ]
    assert "The password is wrong" in line and "--ask-pass" in line
    assert said.endswith("exit status 1")
    assert WRONG not in said and "Traceback" not in said
    assert GPUS.on(target, f"journalctl -u ssh -o cat | grep -c '^Failed password for {user} '") == "1"
    # Only now: a connection that is kept would let the wrong one in.
    assert "rc=0" in controller.here(f"ansible {target} -i hosts.yml -m raw -a true -e @/root/right.json")
