"""Openings in the words of ufw and firewalld. What the tools really print and take is tried on hosts (molecule/firewall)."""

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import other_firewalls
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.nftables import parse_openings

RANKS = {
    "name": "chat.0 ranks",
    "ports": ["8001", "40000-60999"],
    "from": ["10.0.0.2", "fd00::/64"],
    "interface": "eth1",
}
API = {"name": "chat.0 api", "ports": [8000], "from": ["any"]}


def told(tool, answers, *items):
    """Commands that are missing, as they are typed; `answers` {beginning of a command: (rc, output)}."""

    def run(command):
        line = other_firewalls.shown(command)
        return next((answer for start, answer in answers.items() if line.startswith(start)), (0, ""))

    return [other_firewalls.shown(command) for command in other_firewalls.missing(tool, parse_openings(items), run)]


NOTHING = "Added user rules (see 'ufw status' for running firewall):\n(None)\n"
# As ufw 0.36.2 prints what was added.
ADDED = """\
Added user rules (see 'ufw status' for running firewall):
ufw allow 22/tcp
ufw allow in on eth1 from 10.0.0.2 to any port 8001,40000:60999 proto tcp comment 'gpu_fleet chat.0 ranks'
ufw allow 8000/tcp comment 'gpu_fleet chat.0 api'
"""


def test_ufw_gets_one_rule_for_each_source():
    assert told("ufw", {"ufw show added": (0, NOTHING)}, RANKS) == [
        "ufw allow in on eth1 proto tcp from 10.0.0.2 to any port 8001,40000:60999 comment 'gpu_fleet chat.0 ranks'",
        "ufw allow in on eth1 proto tcp from fd00::/64 to any port 8001,40000:60999 comment 'gpu_fleet chat.0 ranks'",
    ]


def test_ufw_is_left_alone_where_a_rule_is_there():
    (line,) = told("ufw", {"ufw show added": (0, ADDED)}, RANKS, API)
    assert "from fd00::/64" in line


@pytest.mark.parametrize("other", ["10.0.0.3", "10.0.0.0/24"])
def test_a_rule_of_another_source_is_none(other):
    assert (
        len(told("ufw", {"ufw show added": (0, ADDED.replace("10.0.0.2", other))}, {**RANKS, "from": ["10.0.0.2"]}))
        == 1
    )


def test_many_ports_are_several_rules():
    many = {**API, "ports": [*range(2000, 2040, 2), "5000-6000"]}
    lines = told("ufw", {"ufw show added": (0, NOTHING)}, many)
    counts = [len(line.partition(" port ")[2].partition(" ")[0].split(",")) for line in lines]
    assert counts == [15, 6]


def test_a_tool_that_cannot_be_asked_is_an_error():
    with pytest.raises(other_firewalls.ToolError, match="ufw show added: ERROR: problem running"):
        told("ufw", {"ufw show added": (1, "ERROR: problem running\n")}, API)


def test_firewalld_gets_rich_rules_now_and_for_later_in_the_interfaces_zone():
    answers = {
        "firewall-cmd --get-default-zone": (0, "public\n"),
        "firewall-cmd --get-zone-of-interface=eth1": (0, "cluster\n"),
        "firewall-cmd --zone=cluster '--query": (0, "yes"),
        "firewall-cmd --permanent --zone=cluster '--query": (1, "no"),
        "firewall-cmd --zone=public '--query": (1, "no"),
        "firewall-cmd --permanent --zone=public '--query": (0, "yes"),
    }
    lines = told("firewalld", answers, {**RANKS, "ports": [8001]}, API)
    assert lines == [
        "firewall-cmd --permanent --zone=cluster "
        '\'--add-rich-rule=rule family="ipv4" source address="10.0.0.2" port port="8001" protocol="tcp" accept\'',
        "firewall-cmd --permanent --zone=cluster "
        '\'--add-rich-rule=rule family="ipv6" source address="fd00::/64" port port="8001" protocol="tcp" accept\'',
        'firewall-cmd --zone=public \'--add-rich-rule=rule port port="8000" protocol="tcp" accept\'',
    ]


def test_an_interface_without_a_zone_is_in_the_default_one():
    answers = {
        "firewall-cmd --get-default-zone": (0, "public\n"),
        "firewall-cmd --get-zone-of-interface": (2, "no zone"),
        "firewall-cmd --zone=public '--query": (1, "no"),
    }
    assert all("--zone=public" in line for line in told("firewalld", answers, RANKS))
