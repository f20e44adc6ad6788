"""scripts/fleet topology: what it says of saved matrices and facts, and with which exit status."""

from __future__ import annotations

import json
import pathlib
import sys
from xml.etree import ElementTree

import pytest
from conftest import REPOSITORY
from gpu_fleet.cli import app
from typer.testing import CliRunner

sys.path.insert(0, str(REPOSITORY / "tests" / "replay"))

import hosts

TOPO = pathlib.Path(__file__).parent / "fixtures" / "topo"
CASES = [json.loads(line) for line in (TOPO / "facts.jsonl").read_text().splitlines()]


def fleet(*arguments, stdin=None):
    return CliRunner().invoke(app, ["topology", *map(str, arguments)], input=stdin)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_every_saved_matrix(case):
    done = fleet("--from", TOPO / f"{case['id']}.txt", "--json")
    told = json.loads(done.stdout)
    if case["expected"].get("refuse"):
        assert done.exit_code == 2
        assert told["refused"]
        assert told["kind"] == case["kind"]
        return
    expected = {key: value for key, value in case["expected"].items() if key != "may_refuse"}
    assert {key: told[key] for key in expected} == expected
    assert done.exit_code == (1 if told["findings"] else 0)
    # Of all of them one has a link that is down.
    assert [found["id"] for found in told["findings"]] == (["nvlink-narrower"] if case["id"] == "41" else [])


def test_a_picture_and_a_table(tmp_path):
    done = fleet("--from", TOPO / "41.txt", "--svg", tmp_path / "host.svg")
    assert done.exit_code == 1
    assert ElementTree.parse(tmp_path / "host.svg").getroot().tag.endswith("svg")
    for words in ("NV17", "nvlink-narrower", "tensor parallel 2", "NCCL_P2P_LEVEL"):
        assert words in done.output


def test_saved_facts_are_judged_whole(tmp_path):
    saved = tmp_path / "facts.json"
    saved.write_text(json.dumps(hosts.facts("h100x8", gpus={3: {"remapped_rows.failure": "Yes"}})))
    done = fleet("--from", saved, "--json")
    assert done.exit_code == 1
    assert [found["id"] for found in json.loads(done.stdout)["findings"]] == ["row-remap-failed"]
    saved.write_text(json.dumps(hosts.facts("h100x8")))
    assert fleet("--from", saved).exit_code == 0


def test_names_and_encodings(tmp_path):
    odd = tmp_path / "d[b][red].txt"
    odd.write_bytes((TOPO / "65.txt").read_text().encode("utf-16"))
    done = fleet("--from", odd)
    assert done.exit_code == 0, done.output
    assert "d[b][red].txt" in done.output.replace("\n", "")
    assert fleet("--from", "-", stdin=b"\xe9\xff").exit_code == 2
    odd.write_text('{"a":' * 100000)
    assert fleet("--from", odd).exit_code == 2


@pytest.mark.parametrize(("place", "value"), [(("gpus", 0, "index"), "x"), (("nics",), [3]), (("gpus", 0), None)])
def test_facts_that_were_tampered_with_are_refused(tmp_path, place, value):
    facts = hosts.facts("h100x8")
    *path, last = place
    spot = facts
    for step in path:
        spot = spot[step]
    spot[last] = value
    (tmp_path / "x.json").write_text(json.dumps(facts))
    done = fleet("--from", tmp_path / "x.json")
    assert done.exit_code == 2, done.output
    assert "no whole result of gpu_facts" in done.output


def test_standard_input():
    assert fleet("--from", "-", stdin=(TOPO / "65.txt").read_text()).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "one of them"),
        (("--from", "-", "-i", "prod"), "one of them"),
        (("--from", "/nonexistent"), "No such file"),
        (("--from", TOPO / "65.txt", "--svg", "/nonexistent/x.svg"), "No such file"),
        (("-i", "/nonexistent"), "there is no inventory"),
        (("--from", "-", "--learn"), "go with an inventory"),
        (("--from", "-", "--limit", "x"), "go with an inventory"),
    ],
)
def test_wrong_use_is_one_line(arguments, says):
    done = fleet(*arguments, stdin="x")
    assert done.exit_code == 2
    assert says in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    "saved",
    ["{}", '{"gpus": [], "topology": {}, "driver": {}}', "[1]", "\x00\xff", '{"gpus": 1, "topology": 2, "driver": 3}'],
)
def test_what_is_neither_is_refused(tmp_path, saved):
    (tmp_path / "x").write_text(saved)
    done = fleet("--from", tmp_path / "x")
    assert done.exit_code == 2, done.output
