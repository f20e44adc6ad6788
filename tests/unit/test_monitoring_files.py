"""What role monitoring writes: judged by promtool and amtool; and what the plan opens for it."""

import datetime
import json
import subprocess

import pytest
import yaml
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import gateway, monitoring, plan
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data, inventory
from gpu_fleet import debian
from test_monitoring_rules import plan as planned
from test_services_and_plan import fleet, services

KNOWN = {name: data.load(name) for name in ("metrics", "recordings", "alerts", "thresholds")}
HOSTS = {
    "gpu-01": {"address": "10.0.0.1", "groups": ["gpu_hosts"]},
    "gw": {"address": "10.0.0.8", "groups": ["gateways"]},
    "mon": {"address": "10.0.0.9", "groups": ["monitors"]},
}


def settings(folder, **changes):
    own = {
        name.removeprefix("monitoring_"): option.get("default")
        for name, option in data.role_options("monitoring").items()
    }
    return {**own, "keys": [], "host": "mon", "folder": str(folder), "local": True, **changes}


def written(folder, **changes):
    made = monitoring.files(planned(), KNOWN, HOSTS, settings(folder, **changes))
    (folder / "targets").mkdir(exist_ok=True)
    for name, content in made.items():
        text = json.dumps(content) if name.startswith("targets/") else yaml.safe_dump(content, sort_keys=False)
        (folder / name).write_text(text)
    return made


def judged(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "dcgm_port": 9400,
            "haproxy_port": 8404,
            "external_labels": {"fleet": "a"},
            "remote_write": [
                {"url": "https://store.example/write", "basic_auth": {"username": "a", "password_file": "/p"}}
            ],
            "alertmanagers": ["10.0.0.7:9093"],
            "objectives": {"chat": {"ttft_seconds": 1}},
        },
        {"local": False},
    ],
    ids=["plain", "all", "somebody else's"],
)
def test_promtool_takes_what_is_written(tmp_path, changes):
    made = written(tmp_path, **changes)
    status, said = judged(debian.program("promtool", "prometheus"), "check", "config", str(tmp_path / "prometheus.yml"))
    assert status == 0 and "rules found" in said, said
    assert ("alertmanager.yml" in made) is changes.get("local", True)
    assert ("targets/dcgm.json" in made) is ("dcgm_port" in changes)


def test_promtool_refuses_what_is_wrong(tmp_path):
    written(tmp_path, interval="soon")
    status, said = judged(debian.program("promtool", "prometheus"), "check", "config", str(tmp_path / "prometheus.yml"))
    assert status != 0 and "soon" in said


@pytest.mark.parametrize("receivers", [[], [{"name": "team", "webhook_configs": [{"url": "http://hook.example/"}]}]])
def test_amtool_takes_what_is_written(tmp_path, receivers):
    written(tmp_path, receivers=receivers, route={"repeat_interval": "1h"})
    amtool = debian.program("amtool", "prometheus-alertmanager")
    status, said = judged(amtool, "check-config", str(tmp_path / "alertmanager.yml"))
    assert status == 0, said


@pytest.mark.parametrize("day", ["2027-01-31", datetime.date(2028, 2, 29), "2026-12-31"])
def test_a_key_ends_when_the_gateway_refuses_it(day):
    assert monitoring.key_ends([{"name": "a", "expires": day}]) == {"a": float(gateway.expiry(day))}


def test_a_key_is_good_until_the_end_of_its_day():
    ends = monitoring.key_ends([{"name": "a", "expires": "2027-01-31"}, {"name": "b"}, {"name": "c", "expires": None}])
    assert ends == {"a": 1801440000.0}  # 2027-02-01T00:00:00Z


def openings(monitors, exporters, addresses):
    made = fleet(1)
    made = plan.Fleet(
        **{**made.__dict__, "monitors": monitors, "exporters": exporters, "exporter_addresses": addresses}
    )
    listed, _ = services.read([{"name": "chat", "model": "/m"}])
    built, _ = plan.build(listed, made)
    return built


@pytest.mark.parametrize(
    ("variables", "ports"),
    [
        ({}, [9100, 8404]),
        ({"monitoring_haproxy_port": None}, [9100]),
        ({"monitoring_haproxy_port": 8500}, [9100, 8500]),
    ],
)
def test_an_exporter_that_there_is_none_of_has_no_port(variables, ports):
    hostvars = {"gw": {"fleet_address": "10.0.0.8", **variables}}
    made = inventory.Inventory(hostvars, {"all": ["gw"], "gateways": ["gw"]})
    _, told, _ = inventory.read(made)
    assert told.exporters == {"gw": ports}


def test_exporters_are_open_to_monitors_alone():
    built = openings(["10.0.0.9"], {"gpu-01": [9100, 9400], "mon": [9100]}, {"mon": "10.0.0.9"})
    wanted = {"name": "exporters", "ports": ["9100", "9400"], "proto": "tcp", "from": ["10.0.0.9"]}
    assert wanted in built["hosts"]["gpu-01"]["openings"]
    assert built["exporters"]["mon"][0]["from"] == []


def test_a_fleet_without_monitors_has_no_opening_for_them():
    built = openings([], {"gpu-01": [9100]}, {})
    assert built["exporters"] == {}
    assert not [opening for opening in built["hosts"]["gpu-01"]["openings"] if opening["name"] == "exporters"]


ALERTS = [entry["alert"] for entry in KNOWN["alerts"]]


def faults(**changes):
    own = {
        name.removeprefix("monitoring_"): option.get("default")
        for name, option in data.role_options("monitoring").items()
    }
    return [message for message, _ in monitoring.judge({**own, **changes}, ["chat"], KNOWN["thresholds"], ALERTS)]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"thresholds": {"wating": 3}}, "monitoring_thresholds has wating"),
        ({"thresholds": {"waiting": "many"}}, "waiting is 'many'"),
        ({"alert_for": {"ReplicaDonw": "5s"}}, "monitoring_alert_for has ReplicaDonw"),
        ({"alert_for": {"ReplicaDown": 5}}, "ReplicaDown is 5"),
        ({"alert_for": {"ReplicaDown": "soon"}}, "ReplicaDown is 'soon'"),
        ({"objectives": {"chta": {}}}, "names chta, which is no service"),
        ({"objectives": {"chat": {"ttft": 1}}}, "chat has ttft"),
        ({"objectives": {"chat": {"ttft_seconds": 0}}}, "ttft_seconds is 0"),
        ({"objectives": {"chat": 3}}, "chat is 3"),
        ({"interval": "15"}, "monitoring_interval is '15'"),
        ({"mode": "files"}, "monitoring_files_into is empty"),
        ({"haproxy_port": "8404"}, "monitoring_haproxy_port is '8404'"),
        ({"haproxy_port": 0}, "monitoring_haproxy_port is 0"),
    ],
)
def test_what_is_wrong_is_told_before_a_host_is_touched(changes, says):
    (message,) = faults(**changes)
    assert says in message


@pytest.mark.parametrize("name", ["monitoring_dcgm_port", "monitoring_haproxy_port"])
def test_the_role_takes_null_for_an_exporter_that_there_is_none_of(name):
    """Ansible's own judge of a role's variables decides; where a default is not null, it takes null for a wrong int."""
    option = data.role_options("monitoring")[name]
    spec = {key: value for key, value in option.items() if key in ("type", "default")}
    assert not ArgumentSpecValidator({name: spec}).validate({name: None}).error_messages
    assert faults(**{name.removeprefix("monitoring_"): None}) == []


def test_the_defaults_have_no_fault():
    assert faults() == faults(thresholds={"waiting": 5}, objectives={"chat": {"ttft_seconds": 1.5}}) == []
    assert faults(alert_for={"ReplicaDown": "30s", "DiskFull": "0s", "CertificateExpired": "5m"}) == []


def test_how_long_an_alert_waits_is_a_setting(tmp_path):
    """It changes that alert alone; those without a time of their own take one, too."""

    def times(**changes):
        made = monitoring.files(planned(), KNOWN, HOSTS, settings(tmp_path, **changes))
        return {
            rule["alert"]: rule.get("for")
            for group in made["rules.yml"]["groups"]
            for rule in group["rules"]
            if "alert" in rule
        }

    plain, changed = times(), times(alert_for={"ReplicaDown": "5s", "CertificateExpired": "1m"})
    assert (plain["ReplicaDown"], plain["CertificateExpired"]) == ("2m", None)
    assert {name for name in plain if plain[name] != changed[name]} == {"ReplicaDown", "CertificateExpired"}
    assert (changed["ReplicaDown"], changed["CertificateExpired"]) == ("5s", "1m")
