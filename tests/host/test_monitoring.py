"""A monitor, a GPU host and a stranger: who may ask, what is seen, what fires. The engine is a stand-in for vLLM.

Prometheus, Alertmanager and the node exporter are Debian's own. What vLLM says of itself is the recording of a real server
(tests/unit/fixtures/metrics), which the stand-in repeats, with a queue put into it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tarfile
import time
import urllib.parse
from pathlib import Path

import pytest
import testinfra
import yaml

INVENTORY = Path(os.environ["MOLECULE_INVENTORY_FILE"]).parent
ROOT = Path(__file__).resolve().parents[2]
SOON = 60.0
ASK = "import urllib.request as u,sys; print(u.urlopen(sys.argv[1], timeout=5).read().decode())"
CONNECT = "import socket,sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)"


@pytest.fixture(scope="module")
def hosts():
    return {
        name: testinfra.get_host(f"ansible://{name}?ansible_inventory={INVENTORY}")
        for name in ("gpu-01", "mon", "stranger")
    }


@pytest.fixture(scope="module")
def ask(hosts):
    def get(url):
        return json.loads(hosts["mon"].check_output(f"python3 -c '{ASK}' '{url}'"))

    return get


@pytest.fixture(scope="module")
def query(ask):
    def get(expression):
        told = ask(f"http://127.0.0.1:9090/api/v1/query?query={urllib.parse.quote(expression)}")
        return {tuple(sorted(entry["metric"].items())): float(entry["value"][1]) for entry in told["data"]["result"]}

    return get


def wait(so, otherwise):
    end = time.monotonic() + SOON
    while not (found := so()):
        assert time.monotonic() < end, otherwise
        time.sleep(1)
    return found


def test_every_target_is_up_and_has_its_labels(hosts, ask):
    hosts["gpu-01"].run("rm -f /var/lib/standin/metrics")  # of an earlier run

    def all_up():
        targets = ask("http://127.0.0.1:9090/api/v1/targets")["data"]["activeTargets"]
        return targets if all(target["health"] == "up" for target in targets) else None

    targets = wait(all_up, "not every target is up")
    seen = {(t["labels"]["job"], t["labels"]["host"], t["labels"].get("replica")) for t in targets}
    assert seen == {
        ("vllm", "gpu-01", "chat.0"),
        ("vllm_agent", "gpu-01", "chat.0"),
        ("node", "gpu-01", None),
        ("node", "mon", None),
        ("prometheus", "mon", None),
        ("alertmanager", "mon", None),
    }


def test_rules_compute_what_a_real_server_said(hosts, query):
    recorded = (ROOT / "tests/unit/fixtures/metrics/vllm-0.32.0-cpu.txt").read_text()
    lines = [line for line in recorded.splitlines() if not line.startswith("vllm:generation_tokens_total")]
    text = "\n".join(lines).replace(
        'vllm:num_requests_waiting{engine="0",model_name="chat"} 0.0',
        'vllm:num_requests_waiting{engine="0",model_name="chat"} 7.0',
    )
    hosts["gpu-01"].run("mkdir -p /var/lib/standin")
    hosts["gpu-01"].check_output("printf '%%s\\n' %s > /var/lib/standin/metrics", text)
    wait(lambda: query("gpu_fleet:replica_waiting == 7"), "the queue is not seen")
    assert query("gpu_fleet:replica_waiting") == {
        (("__name__", "gpu_fleet:replica_waiting"), ("replica", "chat.0"), ("service", "chat")): 7.0
    }
    wait(lambda: query("gpu_fleet:service_replicas_right == 1"), "the replica is not seen to answer")
    assert query("count(gpu_fleet_probe_right) by (exported_service)") == {(): 1.0}, (
        "labels of the agent beside the target's"
    )
    wait(lambda: query('ALERTS{alertname="QueueLong",replica="chat.0"}'), "no alert is pending")


def test_an_alert_fires_in_alertmanager_with_values_and_runbook(ask):
    def fired():
        told = ask("http://127.0.0.1:9093/api/v2/alerts")
        return [alert for alert in told if alert["labels"]["alertname"] == "CertificateExpired"]

    (alert,) = wait(fired, "the certificate that ended in 2020 raises no alert")
    assert alert["labels"]["severity"] == "critical" and alert["labels"]["host"] == "gpu-01"
    assert "/etc/ssl/fleet-test.pem expired" in alert["annotations"]["summary"]
    assert (ROOT / alert["annotations"]["runbook_url"]).is_file()
    assert alert["labels"]["fleet"] == "lab"


def test_what_is_seen_goes_to_a_store_of_several_fleets(hosts, ask):
    """monitoring_remote_write: another Prometheus takes it, with the fleet's own label."""
    store = "/usr/bin/prometheus --config.file=/dev/null --storage.tsdb.path=/var/tmp/store --web.listen-address=127.0.0.1:9099"
    hosts["mon"].check_output(f"systemd-run --unit=store --collect {store} --web.enable-remote-write-receiver")
    try:
        up = urllib.parse.quote('up{job="vllm"}')

        def stored():
            with contextlib.suppress(AssertionError):  # it is starting
                return ask(f"http://127.0.0.1:9099/api/v1/query?query={up}")["data"]["result"]
            return None

        (entry,) = wait(stored, "nothing reaches the store")
        assert entry["value"][1] == "1" and entry["metric"]["fleet"] == "lab"
        assert (entry["metric"]["service"], entry["metric"]["replica"]) == ("chat", "chat.0")
    finally:
        hosts["mon"].check_output("systemctl stop store; rm -rf /var/tmp/store")


def test_rules_and_targets_as_files_for_a_prometheus_of_somebody_else(hosts, tmp_path):
    """monitoring_mode files: the same rules, targets with addresses, nothing of it on the hosts; the second run writes nothing."""
    into = tmp_path / "theirs"
    settings = {"monitoring_mode": "files", "monitoring_files_into": str(into), "monitoring_files_folder": str(into)}
    command = [Path(sys.executable).parent / "ansible-playbook", ROOT / "playbooks/monitoring.yml", "-i", INVENTORY]
    command += ["-e", json.dumps(settings)]
    before = hosts["mon"].check_output("ls -lR --time-style=full-iso /etc/prometheus /etc/systemd/system | sha256sum")
    plain = {**os.environ, "ANSIBLE_FORCE_COLOR": "0", "ANSIBLE_NOCOLOR": "1"}
    said = [subprocess.run(command, capture_output=True, text=True, check=True, env=plain).stdout for _ in range(2)]
    changed = [
        {line.split()[0]: "changed=0" not in line for line in text.splitlines() if "changed=" in line} for text in said
    ]
    assert changed[0]["mon"] and not changed[0]["gpu-01"] and not any(changed[1].values()), said
    after = hosts["mon"].check_output("ls -lR --time-style=full-iso /etc/prometheus /etc/systemd/system | sha256sum")
    assert before == after, "something was changed on the monitor"
    rules = yaml.safe_load((into / "rules.yml").read_text())
    assert rules == yaml.safe_load(hosts["mon"].check_output("cat /etc/prometheus/gpu_fleet/rules.yml"))
    targets = json.loads((into / "targets/vllm.json").read_text())
    assert [entry["labels"]["replica"] for entry in targets] == ["chat.0"]


@pytest.mark.parametrize(("name", "port"), [("gpu-01", 9100), ("mon", 9100), ("gpu-01", 8000), ("gpu-01", 8003)])
def test_a_stranger_reads_no_metrics(hosts, name, port):
    assert hosts["mon"].run(f"python3 -c '{CONNECT}' {name} {port}").rc == 0, "not even the monitor gets in"
    assert hosts["stranger"].run(f"python3 -c '{CONNECT}' {name} {port}").rc != 0


def test_prometheus_and_alertmanager_listen_on_the_monitor_alone(hosts):
    listening = hosts["mon"].check_output("ss -Hltn")
    for port in ("9090", "9093"):
        assert f"127.0.0.1:{port}" in listening and f"*:{port}" not in listening
    assert ":9094" not in listening, "Alertmanager's cluster"


def test_the_configuration_of_the_packages_is_left_alone(hosts):
    for name in ("gpu-01", "mon"):
        assert hosts[name].check_output("dpkg -V prometheus-node-exporter; true") == ""
    assert hosts["mon"].check_output("dpkg -V prometheus prometheus-alertmanager; true") == ""


def test_the_units_are_sound(hosts):
    units = "prometheus.service prometheus-alertmanager.service prometheus-node-exporter.service gpu-fleet-host-metrics.service"
    done = hosts["mon"].run(f"systemd-analyze verify {units}")
    assert "gpu-fleet" not in done.stderr and "gpu_fleet" not in done.stderr, done.stderr


# --- the command line, over the whole fleet ---------------------------------------------------------------------------------


def fleet(verb, *arguments):
    command = [str(ROOT / "scripts" / "fleet"), verb, "-i", str(INVENTORY), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, done.stdout + ("" if done.stdout else done.stderr)


def test_fleet_status_is_what_prometheus_knows():
    status, said = fleet("status", "--json")
    told = json.loads(said)
    assert status == 1 and told["source"] == "prometheus"
    assert [(row["name"], row["wanted"]) for row in told["services"]] == [("chat", 1)]
    assert "CertificateExpired" in {alert["alert"] for alert in told["alerts"] if alert["state"] == "firing"}


def test_fleet_status_without_the_monitor():
    _, said = fleet("status", "--hosts", "--json")
    told = json.loads(said)
    assert told["source"] == "hosts" and told["services"][0]["right"] == 1


def test_the_doctor_names_the_certificate():
    status, said = fleet("doctor", "--json")
    found = {finding["cause_id"]: finding for finding in json.loads(said)["findings"]}
    assert status == 1 and "/etc/ssl/fleet-test.pem" in found["tls_certificate_invalid"]["evidence"]


def test_the_bundle_has_nothing_of_the_site(tmp_path):
    status, said = fleet("bundle", "--into", str(tmp_path / "case.tar.gz"))
    assert status == 0, said
    with tarfile.open(tmp_path / "case.tar.gz") as archive:
        texts = {member.name: archive.extractfile(member).read().decode() for member in archive}
    assert {"case/index.md", "case/findings.json"} <= set(texts)
    for name, text in texts.items():
        assert "chat-key" not in text and "gpu-01" not in text and not re.search(r"\b10\.\d+\.\d+\.\d+", text), name


CONFIG, SECRETS = "/etc/vllm/chat.0/current/config.yaml", "/etc/vllm/chat.0/secrets.env"
FAULTS = {
    "unknown flag put in by hand": (
        f"echo 'frobnicate: 1' >> {CONFIG}",
        f"sed -i /frobnicate/d {CONFIG}",
        "unrecognized_argument",
    ),
    "key file unreadable": (f"mv {SECRETS} {SECRETS}.gone", f"mv {SECRETS}.gone {SECRETS}", "unit_environment_missing"),
    "port taken": (
        "systemctl stop vllm@chat.0; systemd-run --unit=thief /usr/bin/python3 -m http.server 8000",
        "systemctl stop thief",
        "port_in_use",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_doctor_names_a_fault(hosts, query, fault):
    """Injected for real; the alert about the replica's agent is seen in Prometheus, pending before its two minutes are over."""
    breaks, mends, cause = FAULTS[fault]
    since = f"@{int(time.time())}"
    hosts["gpu-01"].run(breaks)
    hosts["gpu-01"].run("systemctl reset-failed vllm@chat.0; systemctl restart --no-block vllm@chat.0")
    try:
        told = {}

        def named():
            told.update(json.loads(fleet("doctor", "--since", since, "--json")[1]))
            return told["findings"] and told["findings"][0]["cause_id"] == cause

        wait(named, told)
        wait(lambda: query('ALERTS{alertname="ReplicaDown",replica="chat.0"}'), "no alert about the replica")
    finally:
        hosts["gpu-01"].run(mends)
        hosts["gpu-01"].run("systemctl reset-failed vllm@chat.0; systemctl restart --no-block vllm@chat.0")
        wait(lambda: query("gpu_fleet:replica_right == 1"), "it does not serve again")
