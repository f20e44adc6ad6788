"""Two gateways share an address: who holds it, when it moves, and whose word counts. The tests run in order."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import os
import re
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest
import testinfra
import yaml

ROOT = Path(__file__).resolve().parents[2]
EPHEMERAL = Path(os.environ["MOLECULE_INVENTORY_FILE"]).parents[1]
INVENTORY = EPHEMERAL / "inventory"
PORT, METRICS = 8443, 8404
GATEWAYS = ("gw-01", "gw-02")


def _addresses(node):
    if isinstance(node, dict):
        for name, values in (node.get("hosts") or {}).items() if isinstance(node.get("hosts"), dict) else ():
            if values:
                yield name, values["ansible_host"]
        for value in node.values():
            yield from _addresses(value)


ADDRESS = dict(_addresses(yaml.safe_load((INVENTORY / "lab.yml").read_text())))
SHARED = re.sub(r"\d+$", "200", ADDRESS["gw-01"])


@pytest.fixture(scope="module")
def hosts():
    return {n: testinfra.get_host(f"ansible://{n}?ansible_inventory={INVENTORY}") for n in ("gpu-01", *GATEWAYS)}


def ask(where: str = SHARED, timeout: float = 5) -> int:
    """The status of a completion, 0 where nobody answers. The certificate has to be for this address."""
    trusting = ssl.create_default_context(cafile=str(EPHEMERAL / "secrets" / "ca.pem"))
    link = http.client.HTTPSConnection(where, PORT, timeout=timeout, context=trusting)
    told = {"Content-Type": "application/json", "Authorization": "Bearer client-all-client-all-client-all"}
    try:
        link.request("POST", "/v1/completions", json.dumps({"model": "chat"}), told)
        return link.getresponse().status
    except ssl.SSLCertVerificationError:
        raise
    except OSError:
        return 0
    finally:
        link.close()


def told(host, command: str) -> str | None:
    """What a command says; None where it fails, or the host cannot be reached, as while it boots."""
    try:
        said = host.run(command)
    except RuntimeError:  # of testinfra, for SSH's own exit status
        return None
    return said.stdout if said.rc == 0 else None


def holders(hosts) -> list[str]:
    """Gateways that have the shared address; one that cannot be asked has not."""
    return [name for name in GATEWAYS if f" {SHARED}/" in (told(hosts[name], "ip -o addr show") or "")]


def other(name: str) -> str:
    return next(gateway for gateway in GATEWAYS if gateway != name)


def wait(so, otherwise, seconds=60.0):
    end = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < end, otherwise
        time.sleep(0.3)


def outage(until: float) -> float:
    """Seconds from the first question that nobody answered to the first one after it that was, in so many seconds."""
    end, began = time.monotonic() + until, None
    while time.monotonic() < end:
        at = time.monotonic()
        if ask(timeout=1) != 200:
            began = began or at
        elif began:
            return at - began
        time.sleep(0.1)
    return 0.0 if began is None else until


def converge(**variables) -> str:
    command = [f"{Path(sys.executable).parent}/ansible-playbook", str(ROOT / "molecule/gateway_pair/converge.yml")]
    command += ["-i", str(INVENTORY), "-e", json.dumps(variables)]
    told = {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections")}
    done = subprocess.run(command, env={**os.environ, **told}, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout


def test_one_of_them_holds_the_address_and_answers_under_it(hosts):
    wait(lambda: len(holders(hosts)) == 1, "none or both hold it")
    wait(lambda: ask() == 200, "it does not answer under the shared address")
    assert [ask(ADDRESS[name]) for name in GATEWAYS] == [200, 200], "each answers under its own, too"


def test_haproxys_numbers_are_for_the_monitor_alone(hosts):
    asked = "import urllib.request;print(urllib.request.urlopen('http://%s:%d/metrics',timeout=10).read().decode())"
    for name in GATEWAYS:
        said = hosts["gpu-01"].check_output(f'python3 -c "{asked % (ADDRESS[name], METRICS)}"')
        assert 'haproxy_backend_active_servers{proxy="chat"} 1' in said
        strange = http.client.HTTPConnection(ADDRESS[name], METRICS, timeout=10)
        with pytest.raises((OSError, http.client.HTTPException)):
            strange.request("GET", "/metrics")
            strange.getresponse()


# VRRP 3 (RFC 5798): version and type, group, priority, one address, interval, checksum over the pseudo header; from gpu-01.
FORGED = """
import socket, struct, sys
me, shared, targets = sys.argv[1], sys.argv[2], sys.argv[3:]
def summed(data):
    total = sum(struct.unpack('!%dH' % (len(data) // 2), data))
    while total >> 16: total = (total & 0xffff) + (total >> 16)
    return ~total & 0xffff
link = socket.socket(socket.AF_INET, socket.SOCK_RAW, 112)
link.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, 255)
for target in targets:
    body = struct.pack('!BBBBHH4s', 0x31, 51, 254, 1, 100, 0, socket.inet_aton(shared))
    pseudo = socket.inet_aton(me) + socket.inet_aton(target) + struct.pack('!BBH', 0, 112, len(body))
    body = body[:6] + struct.pack('!H', summed(pseudo + body)) + body[8:]
    for _ in range(20): link.sendto(body, (target, 0))
"""


def test_the_word_of_a_stranger_moves_nothing(hosts):
    (holder,) = holders(hosts)
    targets = " ".join(ADDRESS[name] for name in GATEWAYS)
    hosts["gpu-01"].check_output(f"cat > /run/forged.py <<'END'\n{FORGED}\nEND")
    for _ in range(8):
        hosts["gpu-01"].check_output(f"python3 /run/forged.py {ADDRESS['gpu-01']} {SHARED} {targets}")
        assert holders(hosts) == [holder]
        time.sleep(0.5)
    for name in GATEWAYS:
        said = hosts[name].check_output("nft list table inet gpu_fleet_vrrp")
        assert int(re.search(r"counter packets (\d+)", said)[1]) >= 100, "it did not arrive, so that nothing was shown"
    assert ask() == 200


def test_it_moves_when_its_gateway_does_not_answer_and_stays_where_it_went(hosts):
    (holder,) = holders(hosts)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        gap = pool.submit(outage, 40)
        time.sleep(1)
        hosts[holder].check_output("systemctl stop gpu-fleet-gateway")
        seconds = gap.result()
    assert 0 < seconds < 20, seconds
    assert holders(hosts) == [other(holder)]
    hosts[holder].check_output("systemctl start gpu-fleet-gateway")
    for _ in range(10):
        assert holders(hosts) == [other(holder)]
        time.sleep(1)
    assert ask() == 200


def test_it_moves_at_once_when_it_is_given_up_and_when_its_host_reboots(hosts):
    (holder,) = holders(hosts)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        gap = pool.submit(outage, 30)
        time.sleep(1)
        hosts[holder].check_output("systemctl restart gpu-fleet-gateway-vrrp")
        assert gap.result() < 10
    wait(lambda: holders(hosts) == [other(holder)], "it did not move")
    (holder,) = holders(hosts)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        gap = pool.submit(outage, 60)
        time.sleep(1)
        booted = told(
            hosts[holder], "systemctl show --property=UserspaceTimestampMonotonic --value; stat -c %Z /run/systemd"
        )
        told(hosts[holder], "systemctl reboot")
        assert gap.result() < 20
    wait(lambda: told(hosts[holder], "systemctl is-active gpu-fleet-gateway-vrrp"), "it did not come back")
    again = told(
        hosts[holder], "systemctl show --property=UserspaceTimestampMonotonic --value; stat -c %Z /run/systemd"
    )
    assert again != booted, "it did not reboot"
    wait(lambda: ask(ADDRESS[holder]) == 200, "its HAProxy did not come back")
    for _ in range(5):
        assert holders(hosts) == [other(holder)]
        time.sleep(1)


def test_the_units_are_hardened_and_the_packages_own_is_off(hosts):
    for name in GATEWAYS:
        for unit in ("gpu-fleet-gateway", "gpu-fleet-gateway-vrrp"):
            said = hosts[name].check_output(f"systemd-analyze security --no-pager {unit}.service").splitlines()[-1]
            assert float(said.split(": ")[1].split()[0]) <= 3.0, said
        assert not hosts[name].service("keepalived").is_running
        assert not hosts[name].service("keepalived").is_enabled


def test_given_up_the_address_is_nowhere_and_each_answers_under_its_own(hosts):
    converge(gateway_virtual_address="")
    assert holders(hosts) == []
    for name in GATEWAYS:
        assert not hosts[name].file("/etc/systemd/system/gpu-fleet-gateway-vrrp.service").exists
        assert hosts[name].run("nft list table inet gpu_fleet_vrrp").rc != 0
    assert [ask(ADDRESS[name]) for name in GATEWAYS] == [200, 200]
    assert "changed=0" in converge(gateway_virtual_address="")
