"""scripts/demo: a two-host vLLM fleet on this machine that answers in plain English, from nothing, with one command.

    scripts/demo [QUESTION]     make what is missing, ask, print the answer and the times
    scripts/demo down           take it away again (what was downloaded is kept)

Every stage looks at what is there, so that a second run is quick and one that was cut short goes on. Logs lie in
.cache/logs/demo. Exit status: 0 it answered, 1 a stage failed, 2 used wrongly or a right or a tool is missing.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from gpu_fleet.steps import LAB, LOGS, ROOT, Runner, Step, StepFailed, interruptible, undisturbed

PYTHON = sys.executable
INVENTORY = ROOT / "inventories" / "demo"
HOSTS = ("gpu-01", "gpu-02")
SERVICE, HEAD, PORT = "chat", "gpu-01", 8000
MODEL = "smollm2-135m-instruct"
ON_HOSTS = "/srv/wheelhouse"  # where the hosts see the folder of wheels
QUESTION = "What is the capital of France? Answer in one sentence."
ANSWER_SECONDS = 120.0


def cache_folder() -> Path:
    """What is downloaded or made once for all clones of a user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpu_fleet"


@dataclass
class Fleet:
    """A fleet on a lab: its inventory, its hosts, and the runner whose steps make it."""

    runner: Runner
    lab: str = "demo"
    inventory: Path = INVENTORY
    hosts: tuple[str, ...] = HOSTS
    model: Path | None = None  # the folder with the model, once it is prepared
    stages: dict[str, float] = field(default_factory=dict)  # seconds, by what was done

    @property
    def wheels(self) -> Path:
        return cache_folder() / "wheels"

    @property
    def lab_file(self) -> Path:
        return self.inventory / "lab.yml"

    def variables(self) -> dict[str, Any]:
        """The inventory's group variables as they are written, templates unread."""
        return yaml.safe_load((self.inventory / "group_vars" / "gpu_hosts.yml").read_text(encoding="utf-8"))

    def address(self, host: str = HEAD) -> str:
        return yaml.safe_load(self.lab_file.read_text(encoding="utf-8"))["all"]["hosts"][host]["ansible_host"]

    def key(self) -> str:
        return (self.inventory / ".secrets" / SERVICE).read_text(encoding="utf-8").split()[0]

    def url(self, path: str = "") -> str:
        return f"http://{self.address()}:{PORT}{path}"


# -- stages -----------------------------------------------------------------------------------------------------------------


def need(step: Step) -> Step:
    """Go on only after success; the step has shown what was wrong."""
    if not step.ok:
        raise StepFailed(step.name)
    return step


def lab_command(*arguments: str) -> list[str]:
    return [PYTHON, str(LAB), *arguments]


def lock_file(fleet: Fleet) -> Path:
    """The lock of the release that the demo's inventory names, for the Python its hosts have."""
    variables = fleet.variables()
    name = f"vllm-{variables['vllm_runtime_version']}-{variables['vllm_runtime_accelerator']}-py311-x86_64.lock"
    return ROOT / "locks" / name


def prepare(fleet: Fleet) -> None:
    """Wheels, model and the hosts' root file system, all at once: they wait for different things."""
    fleet.wheels.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    done = fleet.runner.together(
        {
            "wheels": [
                PYTHON,
                "-m",
                "gpu_fleet.wheelhouse",
                "fetch",
                str(lock_file(fleet)),
                "--into",
                str(fleet.wheels),
            ],
            "model": [PYTHON, "-m", "gpu_fleet.model", "prepare", MODEL],
            "root file system": lab_command("base"),
        },
        label="bringing wheels, model and root file system",
    )
    for name, step in done.items():
        fleet.stages[f"  {name}"] = step.seconds
    failed = [step for step in done.values() if not step.ok]
    if failed:
        raise StepFailed(failed[0].name)
    fleet.model = Path(last_path(done["model"]))
    fleet.stages["wheels, model, root file system"] = time.monotonic() - began


def last_path(step: Step) -> str:
    """The path that a command printed as its answer, after whatever else it said."""
    return re.findall(r"^(/.+)$", step.text(), re.MULTILINE)[-1]


def boot(fleet: Fleet, *more_hosts: str) -> None:
    """Boot the hosts and write down, for the inventory, how they are reached."""
    hosts = [word for host in (*fleet.hosts, *more_hosts) for word in ("--host", host)]
    step = need(
        fleet.runner.run(
            "lab", lab_command("up", fleet.lab, *hosts, "--bind", f"{fleet.wheels}:{ON_HOSTS}"), timeout=300
        )
    )
    fleet.stages["lab"] = step.seconds
    write_lab_file(fleet, Path(last_path(step)))


def write_lab_file(fleet: Fleet, lab_inventory: Path) -> None:
    """The lab's inventory and what the demo's variables need of this machine. Hosts that are no part of it stay out."""
    content = yaml.safe_load(lab_inventory.read_text(encoding="utf-8"))
    content["all"]["hosts"] = {host: content["all"]["hosts"][host] for host in fleet.hosts}
    address = content["all"]["hosts"][HEAD]["ansible_host"]
    content["all"]["vars"] |= {
        "demo_wheelhouse": str(fleet.wheels),
        "demo_wheelhouse_on_host": ON_HOSTS,
        "demo_model": str(fleet.model),
        "demo_controller": address.rsplit(".", 1)[0] + ".1",  # this machine's own address in the lab
    }
    text = "---\n# Written by scripts/demo; gone with the lab.\n" + yaml.safe_dump(content, sort_keys=False)
    temporary = fleet.lab_file.with_name(".lab.yml.new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(fleet.lab_file)


def play(fleet: Fleet, name: str, *arguments: str, timeout: float = 1200.0) -> Step:
    """Run a playbook on the fleet, every task's time at the end of its log."""
    return fleet.runner.run(
        name,
        ["ansible-playbook", "-i", str(fleet.inventory), *arguments],
        timeout=timeout,
        extra={
            "ANSIBLE_CALLBACKS_ENABLED": "ansible.posix.profile_tasks",
            "PROFILE_TASKS_TASK_OUTPUT_LIMIT": "all",
            # Otherwise a task is named only when its first result is in, and a long one is never shown.
            "ANSIBLE_DISPLAY_SKIPPED_HOSTS": "true",
        },
    )


def deploy(fleet: Fleet) -> Step:
    step = need(play(fleet, "site.yml", "site.yml"))
    fleet.stages["site.yml"] = step.seconds
    for role, seconds in role_seconds(step.text()).items():
        fleet.stages[f"  {role}"] = seconds
    return step


def role_seconds(log: str) -> dict[str, float]:
    """Seconds spent in each role by profile_tasks' closing table (`role : task ----- 1.23s`), in order of appearance."""
    seconds: dict[str, float] = {}
    for name, value in re.findall(r"^(\S.*?) -+ ([0-9.]+)s$", log, re.MULTILINE):
        role = name.split(" : ")[0] if " : " in name else "other"
        seconds[role.removeprefix("gpu_fleet.vllm.")] = seconds.get(role.removeprefix("gpu_fleet.vllm."), 0.0) + float(
            value
        )
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


# -- talking to it ------------------------------------------------------------------------------------------------------------


class Refused(Exception):
    """The server answered with an error. `status` is HTTP's."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:200]}")
        self.status = status


def post(url: str, body: Mapping[str, Any], key: str, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
    """POST JSON with a key. Straight to the lab's address, whatever proxy this machine uses for the world."""
    request = urllib.request.Request(
        url,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=seconds) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise Refused(error.code, error.read().decode("utf-8", "replace")) from error


def ask(fleet: Fleet, question: str, *, key: str | None = None, tokens: int = 64) -> str:
    """Ask the service over the network and return its answer. Refused, or OSError when nobody answers."""
    body = {
        "model": SERVICE,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": tokens,
        "temperature": 0,
    }
    answer = post(fleet.url("/v1/chat/completions"), body, fleet.key() if key is None else key)
    return answer["choices"][0]["message"]["content"].strip()


# -- the program ----------------------------------------------------------------------------------------------------------------


def up(fleet: Fleet, question: str, bootstrap_seconds: float | None = None) -> None:
    """All stages, then the question."""
    say = fleet.runner.console.print
    began = time.monotonic()
    if bootstrap_seconds is not None:
        fleet.stages["this machine's own needs"] = bootstrap_seconds
    prepare(fleet)
    boot(fleet)
    deploy(fleet)
    asked = time.monotonic()
    try:
        answer = ask(fleet, question)
    except (Refused, OSError) as error:
        say(f"  [red]FAILED[/red]  {fleet.url()} does not answer: {error}", markup=True)
        raise StepFailed("question") from error
    fleet.stages["question"] = time.monotonic() - asked
    fleet.stages["in all"] = time.monotonic() - began + (bootstrap_seconds or 0.0)
    say()
    say(f"  You:   {question}", markup=False)
    say(f"  {SERVICE}:  {answer}", markup=False)
    say()
    say(times(fleet))
    say(usage(fleet), markup=False)


def times(fleet: Fleet) -> Table:
    table = Table("stage", "seconds", title="Times", title_justify="left")
    table.columns[1].justify = "right"
    for stage, seconds in fleet.stages.items():
        if not stage.startswith("  ") or seconds >= 0.5:
            table.add_row(stage, f"{seconds:.1f}", style="bold" if stage == "in all" else None)
    return table


def usage(fleet: Fleet) -> str:
    inventory = fleet.inventory.relative_to(ROOT) if fleet.inventory.is_relative_to(ROOT) else fleet.inventory
    return f"""
Ask it yourself:
  curl -s {fleet.url("/v1/chat/completions")} -H "Authorization: Bearer $(cat {inventory}/.secrets/{SERVICE})" \\
    -H 'Content-Type: application/json' -d '{{"model": "{SERVICE}", "messages": [{{"role": "user", "content": "Who are you?"}}], "max_tokens": 40}}'
Look at a host:     molecule/shared/lab.py exec {fleet.lab} {HEAD} -- systemctl status 'vllm@*'
Run Ansible again:  .venv/bin/ansible-playbook site.yml -i {inventory}
Take it away:       scripts/demo down
"""


def down(fleet: Fleet) -> int:
    """Remove hosts, inventory and key. What was downloaded stays, and is named."""
    with undisturbed():
        step = fleet.runner.run("lab down", lab_command("down", fleet.lab), timeout=120)
        if step.ok:
            fleet.lab_file.unlink(missing_ok=True)
            shutil.rmtree(fleet.inventory / ".secrets", ignore_errors=True)
            fleet.runner.console.print(
                f"Kept for the next time: {cache_folder()}, /var/cache/gpu_fleet_lab", markup=False
            )
    return 0 if step.ok else 1


def failed_status(runner: Runner) -> int:
    """2 when the machine lacks a right or a tool (the lab says so by its own exit status), 1 for everything else."""
    last = next((step for step in reversed(runner.steps) if not step.ok), None)
    return 2 if last and last.name in ("lab", "root file system", "lab down") and last.returncode == 2 else 1


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if any(argument.startswith("-") for argument in arguments) or len(arguments) > 1:
        print(__doc__)
        return 0 if arguments[0] in ("-h", "--help") else 2
    fleet = Fleet(Runner(LOGS / "demo"))
    say = fleet.runner.console.print
    bootstrap = os.environ.get("GPU_FLEET_BOOTSTRAP_SECONDS")
    with open(fleet.runner.folder / ".lock", "w", encoding="utf-8") as lock, interruptible():
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("demo: another scripts/demo runs in this checkout; wait for it or end it", markup=False)
            return 2
        try:
            if arguments == ["down"]:
                return down(fleet)
            up(fleet, arguments[0] if arguments else QUESTION, float(bootstrap) if bootstrap else None)
            return 0
        except StepFailed as failure:
            say(
                f"demo: stopped at '{failure}'; run scripts/demo again to go on, scripts/demo down to clear up",
                markup=False,
            )
            return failed_status(fleet.runner)
        except KeyboardInterrupt:
            with undisturbed():
                fleet.runner.stop()
            say("demo: interrupted; run scripts/demo again to go on, scripts/demo down to clear up", markup=False)
            return 130


if __name__ == "__main__":
    sys.exit(main())
