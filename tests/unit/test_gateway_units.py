"""The gateway's units and keepalived's configuration, rendered: hardened by systemd's own judgement, and whose word counts."""

import re
import subprocess

import jinja2
import pytest
import yaml
from conftest import REPOSITORY

ROLE = REPOSITORY / "roles/gateway"


def rendered(name, **variables):
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["bool"] = bool
    known = {
        **yaml.safe_load((ROLE / "defaults/main.yml").read_text()),
        "ansible_managed": "a test",
        "inventory_hostname": "gw-02",
        "groups": {"gateways": ["gw-01", "gw-02"]},
        "gateway_virtual_address": "192.0.2.100/24",
        "__gateway_folder": "/etc/gpu_fleet/gateway",
        "__gateway_run": "/run/gpu-fleet-gateway",
        "__gateway_state": "/var/lib/gpu-fleet-gateway/servers",
        "__gateway_lib": "/usr/local/lib/gpu_fleet",
        "__gateway_interface": "eth0",
        "__gateway_address": "192.0.2.2",
        "__gateway_peers": ["192.0.2.1"],
    }
    return environment.from_string((ROLE / "templates" / f"{name}.j2").read_text()).render(**{**known, **variables})


@pytest.mark.parametrize("unit", ["gpu-fleet-gateway.service", "gpu-fleet-gateway-vrrp.service"])
def test_exposure_is_at_most_3(unit, tmp_path):
    (tmp_path / unit).write_text(rendered(unit))
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(tmp_path / unit)]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    (exposure,) = re.findall(r"Overall exposure level for \S+: ([\d.]+)", said)
    assert float(exposure) <= 3.0


def test_a_port_below_1024_is_the_only_power_of_the_gateway():
    assert "CapabilityBoundingSet=CAP_NET_BIND_SERVICE" in rendered("gpu-fleet-gateway.service").splitlines()
    assert "CapabilityBoundingSet=" in rendered("gpu-fleet-gateway.service", gateway_port=8443).splitlines()


def test_keepalived_may_do_what_its_look_at_haproxy_takes():
    """setgroups: where it is refused, keepalived 2.2.7 takes every look for a success, and the address never moves."""
    (told,) = (
        line.partition("=")[2].split()
        for line in rendered("gpu-fleet-gateway-vrrp.service").splitlines()
        if line.startswith("CapabilityBoundingSet=")
    )
    assert {"CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_SETUID", "CAP_SETGID"} <= set(told)


def test_gateways_differ_in_priority_and_listen_to_each_other_alone():
    text = rendered("keepalived.conf")
    first = rendered("keepalived.conf", inventory_hostname="gw-01")
    assert [re.search(r"priority (\d+)", said)[1] for said in (first, text)] == ["150", "140"]
    assert re.search(r"unicast_src_ip 192.0.2.2\n\s+check_unicast_src\n\s+unicast_peer \{\n\s+192.0.2.1\n\s+\}", text)
    assert "https://127.0.0.1:443/healthz" in text
    assert text.count("{") == text.count("}")
    assert "ip saddr { 192.0.2.1 } accept" in rendered("vrrp.nft")
    six = {
        "__gateway_address": "2001:db8::2",
        "__gateway_peers": ["2001:db8::1"],
        "gateway_virtual_address": "2001:db8::9/64",
    }
    assert "ip6 saddr { 2001:db8::1 } accept" in rendered("vrrp.nft", **six)
    assert "https://[::1]:443/healthz" in rendered("keepalived.conf", **six)


def test_a_firewall_of_somebody_else_is_left_to_them():
    assert "nft" in rendered("gpu-fleet-gateway-vrrp.service")
    assert "nft" not in rendered("gpu-fleet-gateway-vrrp.service", firewall_managed_elsewhere=True)
