"""scripts/fleet bench and report: what is asked of the playbook, the page, and what is refused. No host is asked here."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
import yaml
from conftest import REPOSITORY
from gpu_fleet import acceptances, api, cli_bench
from gpu_fleet.cli import app
from gpu_fleet.events import Event
from gpu_fleet.runs import FleetResult
from report_world import compared, documents
from typer.testing import CliRunner


def fleet(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def inventory(tmp_path):
    """An inventory with two kept runs of chat."""
    folder = tmp_path / "inventory"
    runs = folder / ".acceptance" / "chat"
    runs.mkdir(parents=True)
    for name, told in (("2026-11-30T10-00-00Z", documents()[0]), ("2026-11-30T11-00-00Z", compared())):
        (runs / f"{name}.json").write_text(json.dumps({**told, "name": name}))
    return folder


def test_report_shows_the_last_run(inventory):
    done = fleet("report", "-i", inventory)
    assert done.exit_code == 0
    page = inventory / ".acceptance" / "chat" / "2026-11-30T11-00-00Z.html"
    assert done.stdout.strip() == str(page) and "<!DOCTYPE html>" in page.read_text()


def test_report_compares_with_any_run(inventory, tmp_path):
    runs = inventory / ".acceptance" / "chat"
    done = fleet(
        *("report", runs / "2026-11-30T10-00-00Z.json", "--against", runs / "2026-11-30T11-00-00Z.json"),
        *("--out", tmp_path / "page.html", "--json"),
    )
    told = json.loads(done.stdout)
    assert told["differences"]["old"] == "2026-11-30T11-00-00Z" and "faster" in told["differences"]["text"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "one of them"),
        (("{inventory}/none.json",), "No such file"),
        (("{inventory}/broken.json",), "broken.json"),
        (("{inventory}/list.json",), "is no acceptance"),
        (("-i", "{inventory}", "--service", "else"), "scripts/fleet bench makes one"),
        (("-i", "{inventory}", "--out", "{inventory}/no/folder.html"), "No such file"),
    ],
)
def test_what_is_no_run_is_refused_in_a_sentence(inventory, words, said):
    (inventory / "broken.json").write_text("{")
    (inventory / "list.json").write_text("[]")
    done = fleet("report", *(word.format(inventory=inventory) for word in words))
    assert done.exit_code == 2 and said in done.output and "Traceback" not in done.output


def test_a_page_is_served_on_loopback(inventory):
    page = inventory / "page.html"
    page.write_text("hello")
    said, seen = [], threading.Event()

    def told(line, err):
        said.append(line)
        seen.set()

    cli_bench.typer, real = type("Typer", (), {"echo": staticmethod(told), "Exit": SystemExit}), cli_bench.typer
    try:
        threading.Thread(target=cli_bench._serve, args=(page, 0), daemon=True).start()
        assert seen.wait(10)
        with urllib.request.urlopen(said[0].split()[0], timeout=10) as answer:
            assert answer.read() == b"hello" and said[0].startswith("http://127.0.0.1:")
    finally:
        cli_bench.typer = real


def test_progress_is_read_from_the_waiting_task():
    state = {"runs": [{}, {}], "expected": 9, "now": "concurrency 4, repeat 1", "done": False}
    content = base64.b64encode(json.dumps(state).encode()).decode()
    assert cli_bench.progress({"content": content}) == ("concurrency 4, repeat 1", 2, 9)
    assert cli_bench.progress({}) is None and cli_bench.progress({"content": "!"}) is None


def played(monkeypatch, folder, outcome="pass"):
    """A run of the playbook that is none: it leaves a document where the playbook would."""
    asked = []

    def play(playbook, inventory, limit=None, *, check=False, on_event, variables, cancel=None):
        asked.append((playbook, variables))
        run = folder / "2026-11-30T10-00-00Z.json"
        run.write_text(json.dumps({**documents()[0], "name": "2026-11-30T10-00-00Z", "outcome": outcome}))
        told = {"event_data": {"res": {"dest": str(run)}}}
        on_event(Event("other", 0.0, task=acceptances.KEPT, raw=told))
        return FleetResult(status=int(outcome == "fail"))

    monkeypatch.setattr(api, "play", play)
    return asked


def test_bench_asks_for_what_is_said_and_leaves_the_rest_to_the_inventory(monkeypatch, tmp_path):
    asked = played(monkeypatch, tmp_path)
    done = fleet("bench", "-i", tmp_path, "chat", "--concurrency", 1, "--concurrency", 4, "--rate", 2.5, "--peak", 40)
    assert done.exit_code == 0, done.output
    assert asked == [
        (
            "accept",
            {
                "accept_service": "chat",
                "accept_concurrencies": [1, 4],
                "accept_rates": [2.5],
                "accept_requests_per_second": 40.0,
            },
        )
    ]
    assert "knee: concurrency 8" in done.output and (tmp_path / "2026-11-30T10-00-00Z.html").is_file()


def test_a_verdict_that_fails_is_the_exit_status(monkeypatch, tmp_path):
    played(monkeypatch, tmp_path, "fail")
    done = fleet("bench", "-i", tmp_path, "--json")
    assert done.exit_code == 1 and json.loads(done.stdout)["outcome"] == "fail"


def test_the_same_from_python(monkeypatch, tmp_path, inventory):
    asked, seen = played(monkeypatch, tmp_path, "fail"), []
    result = api.bench(tmp_path, "chat", variables={"accept_rates": [2.5]}, on_event=seen.append)
    assert asked == [("accept", {"accept_rates": [2.5], "accept_service": "chat"})]
    assert (result.exit_status, result.acceptance["outcome"], len(seen)) == (1, "fail", 1)
    last = inventory / ".acceptance/chat/2026-11-30T11-00-00Z.json"
    assert api.report(inventory) == api.report(last)
    assert api.report(last, inventory / ".acceptance/chat/2026-11-30T10-00-00Z.json").startswith("<!DOCTYPE html>")
    with pytest.raises(ValueError, match="has no run"):
        api.report(tmp_path / "nowhere")


def test_the_playbooks_tasks_are_called_as_the_verb_thinks():
    plays = yaml.safe_load((REPOSITORY / "playbooks" / "accept.yml").read_text())
    text = json.dumps(plays)
    assert f'"name": "{cli_bench.WAITING}"' in text and f'"name": "{acceptances.KEPT}"' in text


def test_the_programs_that_travel_start_under_the_systems_python(tmp_path):
    """As the hosts start them: a folder, isolated, without the collection."""
    from ansible_collections.gpu_fleet.vllm.plugins.filter import acceptance

    for file in acceptance.acceptance_program(str(tmp_path / "program")):
        path = tmp_path / "program" / file["path"].removeprefix(f"{tmp_path}/program/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file["content"])
    job = tmp_path / "job"
    job.mkdir()
    told = {"instance": "none.0", "url": None, "names": {}, "interval": 0.05, "seconds": "60"}
    (job / "sample.json").write_text(json.dumps(told))
    (job / "progress.json").write_text(
        json.dumps({"runs": [], "expected": 3, "elapsed": 1.0, "now": "x", "done": False})
    )
    command = [sys.executable, "-I", "-B", str(tmp_path / "program")]
    samples = job / "samples.jsonl"
    with subprocess.Popen([*command, "sample", str(job)], cwd="/") as running:
        while running.poll() is None and (not samples.is_file() or samples.read_text().count("\n") < 2):
            time.sleep(0.02)
        (job / "stop").touch()
        assert running.wait(60) == 0
    done = subprocess.run(
        [*command, "ended", str(job)], capture_output=True, text=True, check=False, timeout=60, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    looks = acceptance.samples({"samples": (job / "samples.jsonl").read_text() + '{"t": 1, "gp'})
    assert len(looks) > 1 and looks[0]["memory"]["host_mib"] > 0
    state = json.loads((job / "progress.json").read_text())
    assert state["done"] and "ended before it was done" in state["problem"]
