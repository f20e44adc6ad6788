"""scripts/fleet doctor: statuses, standard input, several files, what it refuses."""

import gzip
import json
from pathlib import Path

import conftest  # noqa: F401  makes scripts/gpu_fleet importable
import pytest
from gpu_fleet.cli import app
from typer.testing import CliRunner

LOGS = Path(__file__).parent / "fixtures" / "logs"
FOUND, HEALTHY = LOGS / "131.log", LOGS / "105.log"


def run(*arguments, **options):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)], **options)


def test_found():
    done = run("--from", FOUND, "--json")
    assert done.exit_code == 1
    first = json.loads(done.stdout)["findings"][0]
    assert {"cause_id", "severity", "host", "evidence", "cause", "fix", "confidence"} <= set(first)
    assert first["cause_id"] == "host_oom_killed"
    text = run("--from", FOUND)
    assert text.exit_code == 1
    assert "host_oom_killed" in text.stdout and "Fix: " in text.stdout


def test_nothing_found():
    done = run("--from", HEALTHY)
    assert (done.exit_code, done.stdout.splitlines()[0]) == (0, "nothing found")
    assert json.loads(run("--from", HEALTHY, "--json").stdout)["findings"] == []


def test_standard_input():
    assert run("--from", "-", input=FOUND.read_bytes()).exit_code == 1
    assert run("--from", "-", input=HEALTHY.read_bytes()).exit_code == 0


def test_several_files_are_one_case():
    told = json.loads(run("--from", HEALTHY, FOUND, "--json").stdout)
    assert len(told["read"]["sources"]) == 2
    assert told["findings"][0]["source"] == str(FOUND)
    assert json.loads(run("--from", HEALTHY, "--from", FOUND, "--json").stdout)["findings"] == told["findings"]


def test_compressed_cut_off_and_of_a_redirection_of_powershell(tmp_path):
    packed = gzip.compress(FOUND.read_bytes() * 50)
    (tmp_path / "a.gz").write_bytes(packed)
    (tmp_path / "cut.gz").write_bytes(packed[: len(packed) // 2])
    (tmp_path / "wide.log").write_bytes(FOUND.read_text().encode("utf-16"))
    for name in ("a.gz", "cut.gz", "wide.log"):
        done = run("--from", tmp_path / name, "--json")
        assert json.loads(done.stdout)["findings"][0]["cause_id"] == "host_oom_killed", name


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "one of them"),
        (("--from", FOUND, "--endpoint", "http://127.0.0.1:9/v1"), "one of them"),
        (("--from", LOGS), "Is a directory"),
        (("--from", "/nothing/here.log"), "No such file"),
        (("--from", FOUND, "--key-file", FOUND), "go with --endpoint"),
        (("--endpoint", "models.example"), "is no URL"),
        (("--endpoint", "http://127.0.0.1:9/v1", "--key-file", "/nothing"), "No such file"),
        (("--from", FOUND, "--facts", HEALTHY), "no result of gpu_facts"),
    ],
)
def test_refused(arguments, why):
    done = run(*arguments)
    assert done.exit_code == 2
    assert why in done.stderr


def test_empty_and_binary_input(tmp_path):
    (tmp_path / "empty.log").write_bytes(b"")
    (tmp_path / "x.journal").write_bytes(b"LPKSHHRH" + bytes(300))
    assert "no line" in run("--from", tmp_path / "empty.log").stderr
    done = run("--from", tmp_path / "x.journal")
    assert done.exit_code == 2
    assert "journalctl --file" in done.stderr


def test_what_is_no_log_finds_nothing(tmp_path):
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 300)
    assert run("--from", tmp_path / "noise").exit_code == 0


def test_facts_say_whether_a_fabric_manager_matters(tmp_path):
    (tmp_path / "log").write_text(
        "Nov 12 08:40:40 gpu-01 systemd[1]: nvidia-fabricmanager.service: Failed with result 'exit-code'.\n"
    )
    for devices, status in ((0, 0), (4, 1)):
        (tmp_path / "facts.json").write_text(json.dumps({"nvswitch": {"devices": devices}}))
        assert run("--from", tmp_path / "log", "--facts", tmp_path / "facts.json").exit_code == status


@pytest.mark.parametrize("content", ["", "  \n", "two words\n", "k\u00e9y\n"])
def test_bad_key_files(tmp_path, content):
    (tmp_path / "key").write_text(content, encoding="utf-8")
    done = run("--endpoint", "http://127.0.0.1:9/v1", "--key-file", tmp_path / "key")
    assert done.exit_code == 2
    assert str(tmp_path / "key") in done.stderr


def test_endpoint_that_nobody_serves(tmp_path):
    (tmp_path / "key").write_text("VLLM_API_KEY='abc'\n")
    done = run("--endpoint", "http://127.0.0.1:9/v1", "--key-file", tmp_path / "key", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["findings"][0]["cause_id"] == "client_cannot_connect"
