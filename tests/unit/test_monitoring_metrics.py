"""data/metrics.yml against what vLLM really says.

fixtures/metrics/vllm-0.32.0-cpu.txt is the /metrics of a running server (the CPU release of the lock, SmolLM2-135M, after answered, refused
and wrong requests). The files -registered.txt are what the PrometheusStatLogger of those releases, run by itself, registers: no server of
them can run without a GPU. haproxy-2.6.12.txt is of a real HAProxy; node exporter and Prometheus run in metrics_world.py.
"""

import re

import metrics_world
import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import agent, host_metrics, monitoring
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data
from conftest import REPOSITORY

METRICS = data.load("metrics")
FIXTURES = REPOSITORY / "tests" / "unit" / "fixtures" / "metrics"
RECORDED = {path.name.split("-")[1]: path.name for path in sorted(FIXTURES.glob("vllm-*.txt"))}
NEWER = ("0.32.0", "0.33.0")  # releases that refuse requests for a full queue


def types(version):
    """The metrics of a recording: name on the wire to type."""
    text = (FIXTURES / RECORDED[version]).read_text()
    return dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))


def test_every_release_that_is_offered_has_a_recording():
    assert set(data.load("versions")["releases"]) <= set(RECORDED)


@pytest.mark.parametrize("version", RECORDED)
@pytest.mark.parametrize("notion", METRICS)
def test_each_name_is_on_the_metrics_page_of_that_version(version, notion):
    try:
        (name,) = monitoring.names(METRICS, notion, [version])
    except monitoring.Absent:
        assert notion == "rejections" and version not in NEWER
        return
    if notion == "http_requests" and "registered" in RECORDED[version]:
        return  # of the HTTP server, which does not run there; the same instrumentator as in the recorded release
    assert types(version).get(name) == METRICS[notion]["type"]


@pytest.mark.parametrize("version", RECORDED)
def test_what_is_gone_is_not_there(version):
    there = types(version)
    for notion in METRICS.values():
        for entry in notion["names"]:
            if "last" in entry:
                assert entry["name"] not in there


def test_labels_that_rules_filter_by_are_there():
    text = (FIXTURES / RECORDED["0.32.0"]).read_text()
    assert re.search(r'^vllm:request_success_total\{[^}]*finished_reason="error"', text, re.MULTILINE)
    assert re.search(r'^vllm:request_success_total\{[^}]*finished_reason="abort"', text, re.MULTILINE)
    assert re.search(r'^http_requests_total\{[^}]*status="5xx"', text, re.MULTILINE)
    assert re.search(r'^vllm:admission_rejections_total\{[^}]*reason="max_num_queued_reqs"', text, re.MULTILINE)


ASKED = " ".join(entry["expr"] for entry in [*data.load("alerts"), *data.load("recordings")])


def test_names_of_haproxy_are_on_its_page():
    text = (FIXTURES / "haproxy-2.6.12.txt").read_text()
    used = set(re.findall(r"\bhaproxy_\w+", ASKED))
    assert used and used <= set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert 'haproxy_backend_http_responses_total{proxy="chat",code="5xx"} 1' in text
    assert 'haproxy_backend_active_servers{proxy="gateway.keys"} 0' in text, (
        "a backend of tables alone counts as one without servers"
    )


def test_names_of_the_agent_are_its_own():
    used = set(re.findall(r"\bgpu_fleet_\w+", ASKED)) - set(host_metrics.HELP)
    assert used and used <= set(agent.METRICS)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\b(?:node|prometheus)_[a-z_]+", ASKED))))
def test_names_of_node_exporter_and_prometheus_are_there(fleet_prometheus, name):
    assert metrics_world.query(fleet_prometheus, name)
