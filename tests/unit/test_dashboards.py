"""Every query of every dashboard against a real Prometheus that watches a fleet; none is empty."""

import json
import time

import metrics_world
import pytest
from conftest import REPOSITORY

FOLDER = REPOSITORY / "roles" / "monitoring" / "files" / "dashboards"
NAMES = ("fleet", "service", "host")


def panels():
    for name in NAMES:
        for panel in json.loads((FOLDER / f"{name}.json").read_text())["panels"]:
            yield from ((name, panel["title"], target["expr"]) for target in panel["targets"])


@pytest.fixture
def url(fleet_prometheus):
    return fleet_prometheus


def test_there_are_the_three():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(NAMES)


def test_every_query_has_an_answer(url):
    empty = []
    end = time.monotonic() + 30
    for name, title, expression in panels():
        asked = expression.replace("$service", "chat").replace("$host", "gpu-01")
        while not metrics_world.query(url, asked):
            if time.monotonic() > end:
                empty.append((name, title, asked))
                break
            time.sleep(0.5)
    assert not empty


def test_a_query_for_nothing_is_noticed(url):
    assert metrics_world.query(url, "gpu_fleet:no_such_thing") == []


def test_variables_of_the_dashboards_have_values(url):
    assert {labels["service"] for labels, _ in metrics_world.query(url, "gpu_fleet:replica_wanted")} == {"chat"}
    assert {labels["host"] for labels, _ in metrics_world.query(url, 'up{job="node"}')} == {"gpu-01"}


def test_the_fleet_is_seen_as_it_is(url):
    """Labels are the target's, not the agent's own; the plan's constants are there."""
    ((labels, value),) = metrics_world.query(url, 'gpu_fleet_probe_right{replica="chat.0",rank="0"}')
    assert value == 1 and labels["host"] == "gpu-01" and not [name for name in labels if name.startswith("exported_")]
    assert metrics_world.query(url, 'gpu_fleet:replica_max_num_seqs{replica="chat.1"}')[0][1] == 16
