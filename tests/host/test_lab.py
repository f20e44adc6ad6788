"""The lab's hosts are what roles and tests take them for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "molecule" / "shared"), str(ROOT / "scripts")]

from gpufleet_lab import cgroups  # noqa: E402
from gpufleet_lab.names import LabNames  # noqa: E402

PEER = {"gpu-01": "gpu-02", "gpu-02": "gpu-01"}


def test_the_host_has_its_own_name(host, host_name):
    assert host.check_output("hostname") == host_name


def test_the_host_has_booted_without_a_failed_unit(host):
    assert host.check_output("systemctl list-units --failed --plain --no-legend") == ""


def test_the_peer_is_reached_by_name(host, host_name):
    peer = PEER[host_name]
    said = host.check_output(
        "python3 -c %s",
        f"import socket; connection = socket.create_connection(('{peer}', 22), 5); print(connection.recv(8).decode())",
    )
    assert said.startswith("SSH-2.0")


def test_a_network_parameter_is_the_hosts_own(host):
    assert host.check_output("cat /proc/sys/net/ipv4/ip_local_port_range").split() == ["40000", "60999"]
    here = host.get_host("local://")
    assert here.check_output("cat /proc/sys/net/ipv4/ip_local_port_range").split() != ["40000", "60999"]


def test_a_packet_filter_is_the_hosts_own(host, host_name):
    own = f"only_{host_name.replace('-', '_')}"
    host.run_expect([0], f"nft add table inet {own}")
    tables = host.check_output("nft list tables")
    assert own in tables
    assert "gpufleet" not in tables


def test_a_unit_ends_with_all_its_processes(host):
    assert host.process.filter(args="sleep 4242"), "the unit's child does not run: nothing would be tested"
    host.run_expect([0], "systemctl kill --signal=KILL family.service")
    host.run_expect([0], "systemctl stop family.service")
    assert not host.process.filter(args="sleep 4242")
    said = host.check_output("journalctl --boot --no-pager --output=cat")
    assert "Failed to kill control group" not in said
    host.run_expect([0], "systemctl start family.service")


def test_a_host_weighs_as_much_as_a_few_processes_of_this_machine(host_name):
    group = LabNames.of("test-lab", ROOT).cgroup
    found = {}
    for root, kind in cgroups.hierarchies().items():
        name, one, _ = cgroups.WEIGHTS[kind]
        for part in (f"{group}/{host_name}", group):
            if (root / part / name).exists():
                found[part] = int((root / part / name).read_text()) / one
    assert found[f"{group}/{host_name}"] == cgroups.HOST_WEIGHT
    assert found[group] >= len(PEER) * cgroups.HOST_WEIGHT


def test_the_bridge_keeps_its_address_whichever_hosts_come_and_go(host, host_name):
    """Hosts remember it: with another one, what they answer would reach nobody until they ask again."""
    names = LabNames.of("test-lab", ROOT)
    assert Path(f"/sys/class/net/{names.bridge}/address").read_text().strip() == names.bridge_address
    known = host.check_output("ip -4 neighbour show dev host0")
    assert names.bridge_address in known


def test_the_root_is_the_hosts_own(host, host_name):
    host.run_expect([0], f"touch /srv/only-{host_name}")
    assert host.check_output("ls /srv") == f"only-{host_name}"


@pytest.mark.parametrize("absent", ["g++", "pip", "uv"])
def test_nothing_is_there_that_a_role_must_bring(host, absent):
    assert not host.exists(absent)
