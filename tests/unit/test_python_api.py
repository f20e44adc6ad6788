"""The fleet from Python: types, one run beside another, ending a run, and what a run leaves."""

import inspect
import io
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import types
import typing
from importlib import metadata
from pathlib import Path

import gpu_fleet
import pytest
import yaml
from conftest import REPOSITORY
from gpu_fleet import api, kept, places, runs


@pytest.fixture
def prod(tmp_path):
    shutil.copytree(REPOSITORY / "inventories/prod", tmp_path / "prod", ignore=shutil.ignore_patterns(".secrets"))
    return tmp_path / "prod"


@pytest.fixture
def asked(monkeypatch):
    """What is asked of ansible-runner, without running it."""
    told = []

    def run(playbook, inventory, **options):
        told.append((playbook, str(inventory), options))
        return runs.FleetResult()

    monkeypatch.setattr(runs, "run", run)
    return told


@pytest.mark.parametrize("name", gpu_fleet.__all__)
def test_everything_offered_is_there_and_typed(name):
    offered = getattr(gpu_fleet, name)
    if inspect.isfunction(offered):
        hints = typing.get_type_hints(offered)
        assert hints.pop("return") in ((str,) if name == "report" else (runs.FleetResult, dict[str, typing.Any]))
        assert set(hints) == set(inspect.signature(offered).parameters)
    assert offered.__doc__
    assert (Path(gpu_fleet.__file__).parent / "py.typed").exists()


def test_no_module_hides_what_is_offered():
    """Once gpu_fleet.NAME is imported as a module, the package's attribute is the module."""
    assert not {path.stem for path in Path(gpu_fleet.__file__).parent.glob("*.py")} & set(gpu_fleet.__all__)


def test_what_is_not_offered_is_no_attribute():
    with pytest.raises(AttributeError, match="teleport"):
        _ = gpu_fleet.teleport


@pytest.mark.parametrize(
    ("call", "playbook", "variables", "more"),
    [
        (lambda: api.validate("inv"), "validate", {}, {}),
        (lambda: api.plan("inv"), "validate", {"validate_ask_hub": True}, {}),
        (lambda: api.deploy("inv", "gpu-01", check=True), "site", {}, {"limit": "gpu-01", "check": True}),
        (lambda: api.verify("inv"), "verify", {}, {"check": True}),
        (lambda: api.upgrade("inv", "0.33.0"), "upgrade", {"vllm_runtime_version": "0.33.0"}, {}),
        (lambda: api.rollback("inv", "chat"), "rollback", {"vllm_service_rollback": "chat"}, {}),
        (
            lambda: api.drain("inv", ["chat.0"], deadline=5, admit=True),
            "drain",
            {"drain_instances": ["chat.0"], "drain_hosts": [], "drain_state": "admitted", "gateway_drain_deadline": 5},
            {},
        ),
        (
            lambda: api.topology("inv", learn=True),
            "topology",
            {"gpu_topology_fail_on": "never", "gpu_topology_learn": True, "gpu_topology_bandwidth": False},
            {},
        ),
        (lambda: api.mirror("inv", "/media/x"), "mirror", {"mirror_folder": "/media/x"}, {}),
        (lambda: api.deploy("inv", variables={"a": 1}), "site", {"a": 1}, {}),
        (
            lambda: api.upgrade("inv", "1", variables={"vllm_runtime_version": "2"}),
            "upgrade",
            {"vllm_runtime_version": "1"},
            {},
        ),
    ],
)
def test_each_function_plays_a_playbook_with_its_variables(asked, call, playbook, variables, more):
    assert call().ok
    ((name, inventory, options),) = asked
    assert (name, inventory, dict(options.get("variables", {}))) == (playbook, "inv", variables)
    assert {key: options[key] for key in more} == more


def test_what_is_not_named_is_no_drain():
    with pytest.raises(ValueError, match=r"chat\.0"):
        api.drain("inv")


def test_what_differs_makes_verify_a_failure(monkeypatch):
    found = runs.FleetResult(changed={"gpu-01": 1, "gpu-02": 0}, differing={"gpu-01": ["Write the unit"]})
    monkeypatch.setattr(runs, "run", lambda *_, **__: found)
    result = api.verify("inv")
    assert result.exit_status == 1
    assert [failure.host for failure in result.failures] == ["gpu-01"]
    assert result.failures[0].message.startswith("Write the unit differ. ansible-playbook playbooks/verify.yml")


def test_what_is_left_over_on_hosts_is_told_by_plan_and_verify(monkeypatch):
    asked = []

    def run(playbook, *_, **options):
        asked.append((playbook, options.get("variables")))
        return runs.FleetResult(changed={"gpu-01": 1}, differing={"gpu-01": ["Left"]}, left_over={"gpu-01": ["old.0"]})

    monkeypatch.setattr(runs, "run", run)
    result = api.plan("inv", ask_hosts=True)
    assert asked == [("plan", {"plan_ask_hosts": True})]
    assert (result.exit_status, result.failures[0].host) == (1, "gpu-01")
    assert "old.0" in result.failures[0].message
    assert result.as_dict()["left_over"] == {"gpu-01": ["old.0"]}
    assert "Left differ (old.0)." in api.verify("inv").failures[0].message


def test_no_such_inventory_or_playbook(prod):
    with pytest.raises(FileNotFoundError, match="/nowhere"):
        api.deploy("/nowhere")
    with pytest.raises(FileNotFoundError, match="teleport"):
        api.play("teleport", prod)


def test_the_example_plans_two_fleets_at_once(prod, tmp_path):
    """docs/examples/fleets.py, as a user runs it: one inventory is right, one is not, and neither sees the other."""
    wrong = tmp_path / "wrong"
    shutil.copytree(prod, wrong)
    variables = yaml.safe_load((wrong / "group_vars/gpu_hosts.yml").read_text())
    variables["vllm_services"][0]["args"]["swap-space"] = 4
    (wrong / "group_vars/gpu_hosts.yml").write_text(yaml.safe_dump(variables))
    # Relative, as a user names them: they are looked up where the program runs.
    done = subprocess.run(
        [sys.executable, REPOSITORY / "docs/examples/fleets.py", "prod", "wrong"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "scripts"), "XDG_STATE_HOME": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "prod: exit status 0, services chat, big, logs in" in done.stdout
    assert "wrong: exit status 2, services none" in done.stdout
    assert "swap-space is gone since vLLM" in done.stdout
    folders = sorted((tmp_path / "state/gpu_fleet/runs").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "result.json").stat().st_mode) == 0o600
        assert (folder / "artifacts/run/stdout").stat().st_size
        assert list((folder / "artifacts/run/job_events").glob("*.json"))
        # Variables, passwords and the environment are nobody's business afterwards.
        assert not (folder / "env").exists()
        assert not (folder / "artifacts/run/command").exists()


@pytest.fixture
def runner(monkeypatch):
    """In place of ansible-runner: hands on the events it is given, asks whether to end, and says with which status."""

    class Runner:
        def __init__(self):
            self.events, self.rc, self.asked, self.said = [], 0, {}, ""

        def run(self, *, event_handler, cancel_callback, **asked):
            self.asked = asked
            for event in self.events:
                event_handler(event)
                if cancel_callback():
                    self.rc = 254
                    break
            return types.SimpleNamespace(rc=self.rc, stdout=io.StringIO(self.said), stderr=None)

    runner = Runner()
    monkeypatch.setitem(sys.modules, "ansible_runner", runner)
    return runner


def happened(event, host="gpu-01", **told):
    return {"event": event, "event_data": {"host": host, "task": "Start", **told}}


def test_what_a_callback_raises_ends_the_run_and_is_raised(prod, runner):
    seen = []

    def refuse(event):
        seen.append(event)
        raise KeyError("mine")

    runner.events = [happened("runner_on_start"), happened("runner_on_ok")]
    with pytest.raises(KeyError, match="mine"):
        api.validate(prod, on_event=refuse)
    assert len(seen) == 1


def test_a_run_that_is_told_to_end_is_interrupted(prod, runner):
    runner.events = [happened("runner_on_start"), happened("runner_on_failed", res={"msg": "no"})]
    result = api.deploy(prod, cancel=lambda: True)
    assert (result.exit_status, result.interrupted, result.failures) == (130, True, [])


def test_failures_that_a_playbook_answered_itself_are_none(prod, runner):
    runner.events = [happened("runner_on_failed", res={"msg": "no"})]
    assert api.deploy(prod).failures == []
    runner.rc = 2
    assert [failure.message for failure in api.deploy(prod).failures] == ["no"]


def test_a_run_that_ends_before_its_first_task_is_refused_with_its_last_words(prod, runner):
    runner.rc = 1
    runner.said = "\x1b[0;31mERROR! Attempting to decrypt but no vault secrets found\x1b[0m\n"
    (failure,) = api.deploy(prod).failures
    assert failure.message == (
        "Attempting to decrypt but no vault secrets found. Say where the vault's password is: --vault-password-file FILE"
    )


# As ansible-playbook 2.18.19 prints it.
UNREAD = """[WARNING]:  * Failed to parse /srv/hosts.yml with auto plugin: no root
'plugin' key found, '/srv/hosts.yml' is not a valid YAML inventory
plugin config file
[WARNING]:  * Failed to parse /srv/hosts.yml with yaml plugin: We were unable
to read either as JSON nor YAML, these are the errors we got from each
[WARNING]:  * Failed to parse /srv/hosts.yml with ini plugin: Invalid host
pattern '---' supplied, '---' is normally a sign this is a YAML file.
ERROR! Completely failed to parse inventory source /srv/hosts.yml
"""


def test_an_inventory_without_a_host_is_refused(prod, runner):
    """ansible-playbook passes over every play and calls that a success."""
    runner.events = [{"event": "playbook_on_no_hosts_matched", "event_data": {}}]
    result = api.deploy(prod)
    assert (result.exit_status, result.refused) == (2, True)
    assert result.failures[0].message.startswith(f"{prod} has no host that is asked")
    runner.events.append(happened("runner_on_ok", res={}))
    assert api.deploy(prod).ok, "one play of several has none"


def test_of_an_inventory_that_cannot_be_read_the_reason_is_told_and_nothing_else(prod, runner):
    runner.rc, runner.said = 1, UNREAD
    (failure,) = api.deploy(prod).failures
    assert failure.message.splitlines() == [
        "Failed to parse /srv/hosts.yml with yaml plugin: We were unable to read either as JSON nor YAML, these are the errors we got from each",
        "Completely failed to parse inventory source /srv/hosts.yml",
    ]


def test_what_is_given_reaches_ansible_playbook(prod, runner, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    given = runs.Given(("@x.yml", "a=b c"), {"ANSIBLE_VAULT_PASSWORD_FILE": "v"}, {"^SSH": "p"}, ("--ask-pass",))
    api.deploy(prod, "gpu-01", check=True, variables={"n": 1}, given=given)
    assert shlex.split(runner.asked["cmdline"]) == ["--check", "--diff", "--ask-pass", "-e", "@x.yml", "-e", "a=b c"]
    assert runner.asked["project_dir"] == str(tmp_path)
    assert runner.asked["inventory"] == str(prod)
    assert runner.asked["playbook"] == str(REPOSITORY / "playbooks/site.yml")
    assert (runner.asked["limit"], runner.asked["extravars"], runner.asked["passwords"]) == (
        "gpu-01",
        {"n": 1},
        {"^SSH": "p", **runs._NEW_KEY},
    )
    environment = runner.asked["envvars"]
    assert environment["ANSIBLE_VAULT_PASSWORD_FILE"] == "v"
    assert environment["ANSIBLE_CONFIG"] == str(REPOSITORY / "ansible.cfg")
    assert environment["ANSIBLE_COLLECTIONS_PATH"].split(":")[0] == str(REPOSITORY / "collections")
    assert environment["ANSIBLE_HOST_KEY_CHECKING"] == "True"


def test_an_ansible_cfg_where_it_is_called_wins_over_our_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ANSIBLE_CONFIG", raising=False)
    (tmp_path / "ansible.cfg").touch()
    assert runs._environment()["ANSIBLE_CONFIG"] == str(tmp_path / "ansible.cfg")
    monkeypatch.setenv("ANSIBLE_CONFIG", "/etc/mine.cfg")
    monkeypatch.setenv("ANSIBLE_COLLECTIONS_PATH", "/srv/more")
    assert runs._environment()["ANSIBLE_CONFIG"] == "/etc/mine.cfg"
    assert runs._environment()["ANSIBLE_COLLECTIONS_PATH"].endswith(":/srv/more")


@pytest.mark.parametrize(
    ("text", "checked"),
    [
        ("", "True"),
        ("[defaults]\nforks = 5\n", "True"),
        ("[defaults]\nhost_key_checking = False\n", "False"),
        (
            "[defaults]\nhost_key_checking = no\n[ssh_connection]\nhost_key_checking = True\nssh_args = -o A=%h\n",
            "True",
        ),
        ("no settings\n", "True"),
    ],
)
def test_the_keys_of_hosts_are_checked_as_the_settings_say_and_not_as_ansible_runner_has_it(
    monkeypatch, tmp_path, text, checked
):
    monkeypatch.delenv("ANSIBLE_HOST_KEY_CHECKING", raising=False)
    (tmp_path / "ansible.cfg").write_text(text)
    monkeypatch.setenv("ANSIBLE_CONFIG", str(tmp_path / "ansible.cfg"))
    assert runs._environment()["ANSIBLE_HOST_KEY_CHECKING"] == checked
    monkeypatch.setenv("ANSIBLE_HOST_KEY_CHECKING", "0")
    assert runs._environment()["ANSIBLE_HOST_KEY_CHECKING"] == "0"


def test_a_host_that_this_machine_never_saw_is_not_waited_for():
    """What ssh asks then (sshconnect.c), on a terminal that nobody sees."""
    ((pattern, answer),) = runs._NEW_KEY.items()
    assert (
        re.search(pattern, "Are you sure you want to continue connecting (yes/no/[fingerprint])? ") and answer == "no"
    )
    assert re.search(pattern, "Are you sure you want to continue connecting (yes/no)? ")


@pytest.mark.parametrize("marker", ["galaxy.yml", "MANIFEST.json"])
def test_the_collection_is_found_beside_the_package_or_where_ansible_looks(monkeypatch, tmp_path, marker):
    own, other = tmp_path / "own", tmp_path / "collections/ansible_collections/gpu_fleet/vllm"
    other.mkdir(parents=True)
    own.mkdir()
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(own)
    with pytest.raises(places.NoCollection, match="ansible-galaxy collection install"):
        places.find(own)
    (other / "MANIFEST.json").touch()
    monkeypatch.setenv("ANSIBLE_COLLECTIONS_PATH", str(tmp_path / "collections"))
    assert places.find(own) == other
    (own / marker).touch()
    assert places.find(own) == own


def test_ctrl_c_ends_a_run_with_130(tmp_path):
    """A host that takes connections and says nothing: ssh would wait for a minute."""
    with socket.socket() as silent:
        for port in range(20000, 20100):  # below the range of ports that validate keeps for NCCL
            try:
                silent.bind(("127.0.0.1", port))
                break
            except OSError:
                continue
        silent.listen()
        silent.settimeout(60)
        host = {
            "ansible_host": "127.0.0.1",
            "ansible_port": silent.getsockname()[1],
            "fleet_gpus": 1,
            "ansible_timeout": 60,
        }
        service = {"vllm_services": [{"name": "chat", "model": "/srv/m"}], "vllm_service_api_keys": {"chat": "0" * 40}}
        inventory = {"all": {"children": {"gpu_hosts": {"hosts": {"gpu-01": host}, "vars": service}}}}
        (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory))
        fleet = subprocess.Popen(
            [sys.executable, "-m", "gpu_fleet.cli", "topology", "-i", "hosts.yml"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY / "scripts")},
            stderr=subprocess.PIPE,
            text=True,
        )
        connection, _ = silent.accept()
        with connection:
            fleet.send_signal(signal.SIGINT)
            _, said = fleet.communicate(timeout=30)
    assert fleet.returncode == 130
    assert "for the rest, which repairs what is half done: scripts/fleet topology -i hosts.yml\n" in said
    assert "gpu-01: done validate; ended in gpu_topology: Ask the host about its GPUs, links and driver\n" in said
    assert "Traceback" not in said


def test_two_runs_do_not_change_a_fleet_at_once(prod):
    with kept.changing(prod, "site"):
        result = api.deploy(prod)
        assert result.exit_status == 2
        assert "is being changed by another run (site, process" in result.failures[0].message
    # The lock is free again, and another fleet's was never taken.
    with kept.changing(prod, "site"), kept.changing(prod.parent, "site"):
        pass


def test_a_state_folder_that_cannot_be_written_is_said(prod, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    for result in (api.validate(prod), api.deploy(prod)):
        assert result.exit_status == 2
        assert "XDG_STATE_HOME" in result.failures[0].message


def test_an_old_ansible_is_refused(prod, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "2.17.9")
    (failure,) = api.validate(prod).failures
    assert failure.message.startswith("ansible-core 2.17.9 is too old, 2.18 or newer is needed")
    wanted = yaml.safe_load((REPOSITORY / "meta/runtime.yml").read_text())["requires_ansible"]
    assert wanted == f">={'.'.join(map(str, runs.OLDEST_ANSIBLE))}.0"


def test_a_missing_ansible_playbook_is_said(prod, monkeypatch):
    monkeypatch.setattr(runs, "_environment", lambda: {"PATH": "/nowhere"})
    assert "there is no ansible-playbook" in api.validate(prod).failures[0].message


def test_old_runs_go_and_those_that_go_on_stay(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    running = kept.new("site")
    made = []
    for number in range(kept.KEEP + 5):
        folder = tmp_path / f"gpu_fleet/runs/2020-01-01T00.00.{number:02}-plan-x"
        folder.mkdir()
        (folder / "result.json").write_text("{}")
        made.append(folder)
    kept.new("plan")
    assert [folder for folder in made if folder.exists()] == made[5:]
    assert running.exists()


@pytest.mark.parametrize(
    ("result", "status"),
    [
        (runs.FleetResult(), 0),
        (runs.FleetResult(status=2), 1),
        (runs.FleetResult(status=4, unreachable=["gpu-01"]), 1),
        (runs.FleetResult(status=1, refused=True), 2),
        (runs.FleetResult(status=1, interrupted=True), 130),
    ],
)
def test_exit_statuses_are_those_of_the_documentation(result, status):
    assert result.exit_status == status
    assert result.ok == (status == 0)
    assert result.as_dict()["exit_status"] == status
