"""scripts/fleet as people use and misuse it: help, examples, completion, and one clear message for each wrong input."""

import json
import os
import re
import shlex
import subprocess
import sys

import commands
import pytest
import typer
from conftest import REPOSITORY
from gpu_fleet import runs, verbs
from gpu_fleet.cli import app
from typer.testing import CliRunner

COMMAND = typer.main.get_command(app)
VERBS = sorted(COMMAND.commands)
PROD = REPOSITORY / "inventories/prod"


def fleet(*arguments, stdin=None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def program(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "gpu_fleet.cli", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "scripts"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


# -- help ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_line_an_example_and_json(verb):
    told = fleet(verb, "--help").stdout
    short, examples = verbs.ABOUT[verb]
    assert len(short) <= 55, "it is cut off in the list of verbs"
    for example in examples:
        assert example in told
    if verb != "completion":
        assert "--json" in told
    shown = fleet("--help").stdout
    assert re.search(rf"^  {verb} +{re.escape(short)}$", shown, re.MULTILINE)


def test_nothing_is_told_of_a_verb_that_there_is_not():
    assert sorted(verbs.ABOUT) == VERBS


@pytest.mark.parametrize("line", [line for _short, lines in verbs.ABOUT.values() for line in lines])
def test_every_example_is_understood(line):
    assert commands.misused(line) == ""


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_that_ask_hosts_take_a_vault_and_passwords(verb):
    names = {name for parameter in COMMAND.commands[verb].params for name in parameter.opts}
    if "--inventory" in names:
        assert {"--extra-vars", "--vault-password-file", "--ask-become-pass", "--ask-pass"} <= names


def test_help_is_quick():
    """0.4 s were asked for; measured 0.09 s of an idle machine. Processor time, so that a busy one does not matter."""
    before = os.times()
    assert program("--help").returncode == 0
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert spent < 0.4


def test_no_colours_and_no_boxes_in_help():
    for told in (program("--help", FORCE_COLOR="1", NO_COLOR="1").stdout, fleet("deploy", "--help").stdout):
        assert "\x1b" not in told
        assert told.isascii()


# -- completion -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "offers"), [("scripts/fleet ro", {"rollback"}), ("fleet deploy --li", {"--limit"})])
def test_bash_completes(words, offers):
    done = program(_FLEET_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(len(words.split()) - 1))
    assert set(done.stdout.split()) == offers


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_what_shells_read(shell):
    told = fleet("completion", shell).stdout
    assert f"_FLEET_COMPLETE=complete_{shell}" in told
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=told, text=True, check=True)


# -- wrong inputs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.yml").write_text("- a\n")
    (tmp_path / "broken.yml").write_text("a: [")
    (tmp_path / "launch.yml").write_text("gpus: []\n")
    (tmp_path / "traffic.yml").write_text("traffic: many\n")
    (tmp_path / "binary").write_bytes(b"\x00\xff\x00")
    (tmp_path / "empty").touch()
    (tmp_path / "journal").write_bytes(b"LPKSHHRH" + bytes(100))
    (tmp_path / "key").write_text("two words\n")
    (tmp_path / "there.tar.gz").touch()
    whole = dict.fromkeys(("name", "service", "verdicts", "points", "knee", "objective"), "x")
    (tmp_path / "half.json").write_text(json.dumps(whole))
    return tmp_path


WRONG = [
    ("no inventory", "validate", "Missing option '-i'"),
    ("an inventory that is not there", "validate -i nowhere", "there is no inventory nowhere"),
    ("the same to deploy", "deploy -i nowhere", "An example to copy is inventories/prod"),
    ("the same to look", "doctor -i nowhere", "there is no inventory nowhere"),
    ("the same to archive", "bundle -i nowhere", "there is no inventory nowhere"),
    ("the same to see", "status -i nowhere", "there is no inventory nowhere"),
    ("an unknown verb", "depoly -i x", "No such command 'depoly'"),
    ("an unknown option", "deploy -i x --forec", "No such option: --forec"),
    ("a release left out", "upgrade -i x", "Missing option '--to'"),
    ("neither inventory nor launch", "plan", "one of them"),
    ("inventory and launch", "plan -i x --from list.yml", "one of them"),
    ("a launch that is not there", "plan --from nowhere.yml", "nowhere.yml: No such file or directory"),
    ("a launch that is no YAML", "plan --from broken.yml", "broken.yml: this is no YAML"),
    ("a list for a launch", "plan --from list.yml", "a mapping with gpus, model_config and vllm_version is"),
    ("a launch without GPUs", "plan --from launch.yml", "launch.yml: "),
    ("a table that is none", "topology --from binary", "binary: "),
    ("an empty table", "topology --from empty", "empty: "),
    ("learning from a file", "topology --from list.yml --learn", "go with an inventory (-i)"),
    ("a folder for a table", "topology --from .", "Is a directory"),
    ("traffic that is not there", "capacity --from nowhere.yml", "nowhere.yml"),
    ("traffic of the wrong type", "capacity --from traffic.yml", "traffic"),
    ("nothing to look at", "doctor", "one of them"),
    ("a log that is not there", "doctor --from nowhere.log", "nowhere.log: No such file or directory"),
    ("an empty log", "doctor --from empty", "empty: no line in it"),
    ("a journal file", "doctor --from journal", "journalctl --file journal -o json"),
    ("a key of two words", "doctor --endpoint http://127.0.0.1:9 --key-file key", "is no key"),
    ("a key that is not there", "doctor --endpoint http://127.0.0.1:9 --key-file nokey", "nokey: No such file"),
    ("an endpoint that is no URL", "doctor --endpoint models", "models"),
    ("no request at once", "doctor --endpoint http://127.0.0.1:9 --parallel 0", "'--parallel'"),
    ("a Prometheus that is no URL", "status --prometheus localhost", "such as http://127.0.0.1:9090"),
    ("a Prometheus that is not there", "status --prometheus http://127.0.0.1:9", "refused"),
    ("a document for people", "status --prometheus http://127.0.0.1:9 --watch 5 --json", "--watch is for people"),
    ("nothing to drain", "drain -i x", "name replicas, such as chat.0, or hosts (--host)"),
    ("no time to drain", "drain -i x chat.0 --deadline 0", "'--deadline'"),
    ("an archive that is there", "bundle -i x --into there.tar.gz", "there already; name another file with --into"),
    ("variables that are not there", "deploy -i x -e @nowhere.yml", "nowhere.yml: there is no such file"),
    ("a vault that cannot be opened", "deploy -i x --vault-password-file nope", "nope: there is no such file"),
    ("variables that are none", "deploy -i x -e 'a: ['", "write NAME=VALUE, a mapping such as"),
    ("a mapping that ends too early", "deploy -i x -e '{a: ['", "this is no YAML"),
    ("a file of variables that is no YAML", "deploy -i x -e @broken.yml", "broken.yml: this is no YAML"),
    ("load on a fleet that is not there", "bench -i nowhere", "there is no inventory nowhere"),
    ("settings for nobody", "tune -i nowhere chat", "there is no inventory nowhere"),
    ("a page of nothing", "report", "one of them"),
    ("a page of a fleet that is not there", "report -i nowhere", "there is no inventory nowhere"),
    ("a run that is none", "report list.yml", "list.yml: "),
    ("a run that is not whole", "report half.json", "the run x is not whole"),
    ("nothing to take away", "teardown -i x", "name services, such as chat"),
    ("a fleet to carry that is not there", "mirror -i nowhere", "there is no inventory nowhere"),
    ("a shell that it does not know", "completion tcsh", "'tcsh' is not one of"),
]


@pytest.mark.parametrize(("arguments", "says"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_a_wrong_input_is_one_message(files, arguments, says):
    done = fleet(*shlex.split(arguments))
    assert done.exit_code == 2
    said = done.stderr
    assert says in said
    assert "Traceback" not in said
    assert done.stdout == ""
    # What the parser of options says has two lines of usage before it.
    assert len([line for line in said.splitlines() if not line.startswith(("Usage:", "Try ", "\n")) and line]) <= 3


def test_at_least_thirty_wrong_inputs():
    assert len(WRONG) >= 30


def test_an_inventory_that_is_not_there_is_json_for_machines():
    done = fleet("deploy", "-i", "/nowhere", "--json")
    assert (done.exit_code, done.stderr) == (2, "")
    assert json.loads(done.stdout)["failures"][0]["message"].startswith("there is no inventory /nowhere")


def test_an_unknown_service_is_named_with_those_that_there_are():
    done = fleet("rollback", "-i", PROD, "--service", "caht")
    assert done.exit_code == 1
    assert "caht is no service of this inventory; there are chat, big. Nothing was changed" in " ".join(
        done.stderr.split()
    )


def test_what_is_shared_goes_to_every_run(monkeypatch, tmp_path):
    (tmp_path / "vault").write_text("secret\n")
    seen = []
    monkeypatch.setattr(runs, "run", lambda *_, **__: seen.append(runs.GIVEN.get()) or runs.FleetResult())
    monkeypatch.setattr("getpass.getpass", lambda prompt, stream: f"typed at {prompt}")
    done = fleet("deploy", "-i", PROD, "-e", "a=1", "--vault-password-file", tmp_path / "vault", "-K", "-k")
    assert done.exit_code == 0, done.output
    (given,) = seen
    assert given.variables == ("a=1",)
    assert given.environment == {"ANSIBLE_VAULT_PASSWORD_FILE": str(tmp_path / "vault")}
    assert given.flags == ("--ask-pass", "--ask-become-pass")
    # ansible-playbook's own questions (ansible-core 2.18, cli/__init__.py)
    answers = {
        question: next(word for pattern, word in given.passwords.items() if re.search(pattern, question))
        for question in ("SSH password: ", "BECOME password[defaults to SSH password]: ")
    }
    assert list(answers.values()) == ["typed at SSH password: ", "typed at BECOME password: "]


def test_failures_are_told_with_the_log(monkeypatch, tmp_path):
    failed = runs.FleetResult(
        status=2,
        failures=[runs.Failure("gpu-01", "Start", "it did not start. Look at its journal")],
        unreachable=["gpu-02"],
        why_unreachable={"gpu-02": "Connection refused"},
        folder=tmp_path,
    )
    monkeypatch.setattr(runs, "run", lambda *_, **__: failed)
    done = fleet("deploy", "-i", PROD)
    assert done.exit_code == 1
    assert done.stderr.splitlines() == [
        "gpu-01: Start: it did not start. Look at its journal",
        "gpu-02: not reached; nothing was changed there. Connection refused",
        f"the whole log: {tmp_path}/artifacts/run/stdout",
    ]
