"""Rules for Prometheus: judged by promtool, one firing and one silent test an alert at least; by version of vLLM."""

import re
import subprocess

import pytest
import yaml
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import monitoring
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data
from conftest import REPOSITORY
from gpu_fleet import debian

KNOWN = {name: data.load(name) for name in ("metrics", "recordings", "alerts")}
ALERTS = {entry["alert"]: entry for entry in KNOWN["alerts"]}
DAY = 86400
THRESHOLDS = {name: entry["value"] for name, entry in data.load("thresholds").items()}


def plan(version="0.32.0"):
    """Two replicas of two hosts each, as plan.py makes them."""
    made = {"addresses": {}, "replicas": {}, "hosts": {}}
    for number in (0, 1):
        names = [f"gpu-0{2 * number + 1}", f"gpu-0{2 * number + 2}"]
        ports = {"api": 8000, "agent": 8003}
        for rank, name in enumerate(names):
            made["addresses"][name] = f"10.0.0.{2 * number + rank + 1}"
            made["hosts"][name] = {
                "instances": [
                    {
                        "instance": f"chat.{number}",
                        "service": "chat",
                        "rank": rank,
                        "ports": ports,
                        "agent_clients": ["10.0.0.9"],
                        "config": {"max-num-seqs": 16},
                    }
                ]
            }
        made["replicas"][f"chat.{number}"] = {
            "service": "chat",
            "hosts": names,
            "head": names[0],
            "urls": {names[0]: f"http://{made['addresses'][names[0]]}:8000"},
            "version": version,
            "data": 1,
        }
    return made


def settings(**changes):
    return {
        "thresholds": THRESHOLDS,
        "objectives": {"chat": {"ttft_seconds": 2.0, "itl_seconds": 0.15, "tokens_per_second": 1000, "running": 16}},
        "keys": {"acme": 10 * DAY},
        "runbooks": "https://wiki.example/runbooks",
        **changes,
    }


@pytest.fixture(scope="session")
def promtool():
    return debian.program("promtool", "prometheus")


def run(promtool, *arguments, folder):
    done = subprocess.run([promtool, *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout + done.stderr


def series(text):
    name, _, values = text.rpartition("} ")
    return {"series": f"{name}}}", "values": values}


def cases():
    """Every test of every alert, as promtool takes it."""
    for name, entry in ALERTS.items():
        for number, test in enumerate(entry["tests"]):
            expected = []
            if "fires" in test:
                annotations = {"summary": test["says"], "runbook_url": f"https://wiki.example/runbooks/{name}.md"}
                labels = {"severity": entry["severity"], **test["labels"]}
                expected = [{"exp_labels": labels, "exp_annotations": annotations}]
            yield pytest.param(
                name,
                {
                    "interval": "1m",
                    "input_series": [series(text) for text in test.get("fires", test.get("silent"))],
                    "alert_rule_test": [{"eval_time": test["at"], "alertname": name, "exp_alerts": expected}],
                },
                test.get("other_keys"),
                id=f"{name}-{number}-{'fires' if expected else 'silent'}",
            )


def needed(rules, name):
    """An alert with the recording rules that it builds on: what else there is only costs promtool time."""
    by_name = {rule.get("record", rule.get("alert")): [] for group in rules["groups"] for rule in group["rules"]}
    for group in rules["groups"]:
        for rule in group["rules"]:
            by_name[rule.get("record", rule.get("alert"))].append(rule)
    wanted, left = set(), [name]
    while left:
        known = left.pop()
        if known not in wanted:
            wanted.add(known)
            left += [other for rule in by_name[known] for other in monitoring.OWN.findall(rule["expr"])]
    kept = [
        {**group, "rules": [r for r in group["rules"] if r.get("record", r.get("alert")) in wanted]}
        for group in rules["groups"]
    ]
    return {"groups": [group for group in kept if group["rules"]]}


def judge(promtool, folder, tests):
    """Each with rules of its own, in one run of promtool: a start takes longer than a test."""
    files = []
    for number, (name, test, keys) in enumerate(tests):
        rules = needed(monitoring.rules(plan(), KNOWN, settings(**({"keys": keys} if keys else {}))), name)
        (folder / f"rules-{number}.yml").write_text(yaml.safe_dump(rules))
        content = {
            "rule_files": [f"rules-{number}.yml"],
            "evaluation_interval": "1m",
            # Left out, promtool takes groups in any order, and an alert sometimes sees the recordings of a minute ago.
            "group_eval_order": [group["name"] for group in rules["groups"]],
            "tests": [test],
        }
        (folder / f"tests-{number}.yml").write_text(yaml.safe_dump(content, sort_keys=False))
        files.append(f"tests-{number}.yml")
    return run(promtool, "test", "rules", *files, folder=folder)


def test_each_alert_fires_and_keeps_silent_when_it_should(promtool, tmp_path):
    status, said = judge(promtool, tmp_path, [case.values for case in cases()])
    assert status == 0, said


@pytest.mark.parametrize("name", ALERTS)
def test_each_alert_is_tested_both_ways_and_says_what_to_do(name):
    entry = ALERTS[name]
    tests = entry["tests"]
    assert any("fires" in test for test in tests) and any("silent" in test for test in tests)
    assert entry["severity"] in ("critical", "warning", "info")
    assert "$value" in entry["summary"] or "$labels" in entry["summary"]
    assert entry["means"] and entry["look"] and entry["do"]
    assert (REPOSITORY / "docs" / "runbooks" / f"{name}.md").is_file()


def test_a_wrong_expectation_is_noticed(promtool, tmp_path):
    """The judge of the test above can say no."""
    test = next(case.values[1] for case in cases() if case.values[0] == "QueueLong")
    test["alert_rule_test"][0]["exp_alerts"][0]["exp_annotations"]["summary"] = "Replica chat.0: 22 requests wait"
    status, said = judge(promtool, tmp_path, [("QueueLong", test, None)])
    assert status != 0 and "22 requests wait" in said


@pytest.mark.parametrize("version", ["0.8.5", "0.10.2", "0.26.0", "0.32.0", "0.33.0"])
def test_promtool_takes_the_rules_of_every_version(promtool, tmp_path, version):
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(monitoring.rules(plan(version), KNOWN, settings())))
    status, said = run(promtool, "check", "rules", "rules.yml", folder=tmp_path)
    assert status == 0, said


def expressions(rules):
    return {rule.get("record", rule.get("alert")): rule["expr"] for group in rules["groups"] for rule in group["rules"]}


def test_names_follow_the_version():
    old, new = (expressions(monitoring.rules(plan(version), KNOWN, settings())) for version in ("0.8.5", "0.26.0"))
    assert "vllm:gpu_cache_usage_perc" in old["gpu_fleet:replica_kv_usage:ratio"]
    assert "vllm:kv_cache_usage_perc" in new["gpu_fleet:replica_kv_usage:ratio"]
    assert "time_per_output_token" in old["gpu_fleet:service_itl_seconds:p95"]
    assert "inter_token_latency" in new["gpu_fleet:service_itl_seconds:p95"]


def test_a_fleet_of_two_versions_has_the_names_of_both():
    mixed = plan("0.8.5")
    mixed["replicas"]["chat.1"]["version"] = "0.32.0"
    told = expressions(monitoring.rules(mixed, KNOWN, settings()))["gpu_fleet:replica_kv_usage:ratio"]
    assert "vllm:gpu_cache_usage_perc" in told and " or " in told and "vllm:kv_cache_usage_perc" in told


def test_what_no_version_has_is_left_out_with_what_builds_on_it():
    old, new = (expressions(monitoring.rules(plan(version), KNOWN, settings())) for version in ("0.26.0", "0.32.0"))
    assert {"gpu_fleet:replica_rejections:rate5m", "AdmissionRejections"} <= set(new)
    assert not {"gpu_fleet:replica_rejections:rate5m", "AdmissionRejections"} & set(old)
    without = expressions(monitoring.rules(plan(), KNOWN, settings(objectives={}, keys={})))
    assert not {"TtftAboveObjective", "ThroughputLow", "KeyExpires"} & set(without)


def test_no_rule_names_a_metric_of_vllm_itself():
    """Names are metrics.yml's alone: a rule with one would be wrong for another version."""
    for entry in [*KNOWN["recordings"], *KNOWN["alerts"]]:
        assert "vllm:" not in re.sub(r"\$\{[^}]*\}", "", entry["expr"]), entry


def test_thresholds_are_the_settings():
    told = expressions(monitoring.rules(plan(), KNOWN, settings(thresholds={**THRESHOLDS, "waiting": 7})))
    assert told["QueueLong"] == "gpu_fleet:replica_waiting > 7"


def test_targets_carry_service_replica_host_and_rank():
    hosts = {
        "gpu-01": {"address": "10.0.0.1", "groups": ["gpu_hosts"]},
        "gw": {"address": "fd00::1", "groups": ["gateways"]},
    }
    found = monitoring.targets(plan(), hosts, {"node": 9100, "dcgm": 9400, "haproxy": 8404})
    assert found["vllm"][0] == {
        "targets": ["10.0.0.1:8000"],
        "labels": {"service": "chat", "replica": "chat.0", "host": "gpu-01", "rank": "0"},
    }
    assert [entry["labels"]["rank"] for entry in found["vllm_agent"]] == ["0", "1", "0", "1"]
    assert found["node"][1] == {"targets": ["[fd00::1]:9100"], "labels": {"host": "gw"}}
    assert [entry["labels"]["host"] for entry in found["dcgm"]] == ["gpu-01"]
    assert [entry["labels"]["host"] for entry in found["haproxy"]] == ["gw"]


def test_an_agent_that_listens_on_its_host_alone_is_asked_there():
    alone = plan()
    alone["hosts"]["gpu-01"]["instances"][0]["agent_clients"] = []
    assert monitoring.targets(alone, {}, {})["vllm_agent"][0]["targets"] == ["127.0.0.1:8003"]
