"""The fleet's table as text, and the judgement of other people's chains.

That the text loads and drops what it should is shown on hosts (molecule/firewall); `nft` itself judges it here where
it is installed and this user may make a network namespace.
"""

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import nftables

RANKS = {"name": "chat.0 ranks", "ports": ["29501", "40000-60999"], "from": ["10.0.0.2", "10.0.0.1"]}
API = {"name": "chat.0 api", "ports": [8000], "from": ["any"]}


def rules(*items, ssh=(22,)):
    text = nftables.render(nftables.parse_openings(items), ssh)
    return [line.strip() for line in text.splitlines() if line.startswith("\t\t") and "type filter" not in line]


def chain(  # noqa: PLR0917  (the order is that of `nft list`: family, table, chain)
    family="ip", table="filter", name="INPUT", policy="drop", rules=(), sets=(), hook="input"
):
    """What `nft -j list ruleset` says about one base chain."""
    where = {"family": family, "table": table}
    base = {"hook": hook, "policy": policy, "type": "filter", "prio": 0}
    return {
        "nftables": [
            {"chain": {**where, "name": name, **base}},
            *({"set": {**where, "name": found, "elem": elements}} for found, elements in sets),
            *({"rule": {**where, "chain": name, "expr": list(expr)}} for expr in rules),
        ]
    }


def match(protocol, field, right):
    return {"match": {"op": "==", "left": {"payload": {"protocol": protocol, "field": field}}, "right": right}}


def test_named_ports_are_accepted_from_the_named_and_dropped_from_the_rest():
    assert rules(API, RANKS) == [
        'iif "lo" accept',
        'tcp dport { 22 } accept comment "SSH, whatever else is said"',
        'tcp flags & (fin | syn | rst | ack) != syn accept comment "only what opens a connection is judged"',
        'tcp dport { 8000 } accept comment "chat.0 api"',
        'ip saddr { 10.0.0.1, 10.0.0.2 } tcp dport { 29501, 40000-60999 } accept comment "chat.0 ranks"',
        'tcp dport { 8000, 29501, 40000-60999 } counter drop comment "from nobody the fleet knows"',
    ]


def test_order_of_openings_and_addresses_does_not_change_the_text():
    turned = {**RANKS, "from": list(reversed(RANKS["from"])), "ports": list(reversed(RANKS["ports"]))}
    assert rules(API, RANKS) == rules(turned, API)


def test_ipv6_peers_get_a_rule_of_their_own():
    got = rules({**RANKS, "from": ["10.0.0.1", "fd00::1", "fd00:1::/64"]})
    assert 'ip6 saddr { fd00::1, fd00:1::/64 } tcp dport { 29501, 40000-60999 } accept comment "chat.0 ranks"' in got
    assert 'ip saddr { 10.0.0.1 } tcp dport { 29501, 40000-60999 } accept comment "chat.0 ranks"' in got


def test_interface_goes_before_the_address():
    assert 'iifname "eth1" tcp dport { 8000 } accept comment "chat.0 api"' in rules({**API, "interface": "eth1"})


def test_from_nobody_only_drops():
    got = rules({**RANKS, "from": []})
    assert not any("chat.0" in rule for rule in got)
    assert got[-1].startswith("tcp dport { 29501, 40000-60999 } counter drop")


def test_no_opening_drops_nothing():
    assert not any("drop" in rule for rule in rules())


def test_ssh_port_inside_an_opening_stays_open_to_all():
    got = rules({"name": "all", "ports": ["1-65535"], "from": []}, ssh=(22, "2222"))
    assert got.index('tcp dport { 22, 2222 } accept comment "SSH, whatever else is said"') < len(got) - 1


def test_udp_is_tracked_and_dropped_apart_from_tcp():
    got = rules({"name": "roce", "ports": ["4791"], "proto": "udp", "from": ["10.0.0.2"]}, API)
    assert 'meta l4proto udp ct state established,related accept comment "answers"' in got
    assert 'udp dport { 4791 } counter drop comment "from nobody the fleet knows"' in got
    assert 'tcp dport { 8000 } counter drop comment "from nobody the fleet knows"' in got


def test_only_our_own_table_is_replaced():
    text = nftables.render([])
    assert "flush" not in text
    assert text.index("table inet gpu_fleet\n") < text.index("delete table inet gpu_fleet\n")


def test_ports_are_merged():
    assert nftables.parse_ports(["8001", "8000", "8002-8010", "9000", "8005"]) == ((8000, 8010), (9000, 9000))


@pytest.mark.parametrize(
    ("item", "word"),
    [
        ({**API, "ports": ["0"]}, "'0' is no port"),
        ({**API, "ports": ["70000"]}, "'70000' is no port"),
        ({**API, "ports": ["9-8"]}, "'9-8' is no port"),
        ({**API, "ports": ["8000; drop"]}, "is no port"),
        ({**API, "ports": []}, "ports is empty"),
        ({**API, "from": ["gpu-01"]}, "'gpu-01' is no IP address"),
        ({**API, "from": "any"}, "has to be a list"),
        ({"name": "x", "ports": [1]}, "from is missing"),
        ({**API, "proto": "sctp"}, "neither tcp nor udp"),
        ({**API, "name": 'x" drop'}, "name has to be"),
        ({**API, "interface": "eth*"}, "no interface name"),
        ({**API, "interface": "a" * 16}, "no interface name"),
        ({**API, "form": ["any"]}, "unknown key form"),
        ("8000", "is no opening"),
    ],
)
def test_faults_are_named(item, word):
    with pytest.raises(nftables.OpeningError, match=word.replace("(", r"\(")):
        nftables.parse_openings([item])


def test_all_faults_are_named_at_once():
    with pytest.raises(nftables.OpeningError) as error:
        nftables.parse_openings([{**API, "ports": ["x"]}, RANKS, {**RANKS, "from": ["y"]}])
    assert "chat.0 api" in str(error.value)
    assert "'y'" in str(error.value)


def found(ruleset, *items):
    return [obstacle.chain for obstacle in nftables.obstacles(ruleset, nftables.parse_openings(items))]


def test_chain_with_policy_drop_is_an_obstacle_and_named_with_a_remedy():
    (obstacle,) = nftables.obstacles(chain(), nftables.parse_openings([RANKS]))
    assert obstacle.chain == "ip filter INPUT"
    assert "chat.0 ranks (tcp 29501, 40000-60999)" in obstacle.reason
    assert (
        "nft insert rule ip filter INPUT ip saddr 10.0.0.1/32 tcp dport { 29501, 40000-60999 } accept"
        in obstacle.remedy
    )


@pytest.mark.parametrize(
    "ruleset",
    [
        chain(policy="accept"),
        chain(hook="forward"),
        chain(family="inet", table="gpu_fleet", name="input"),
        chain(family="bridge"),
        {"nftables": []},
        chain(policy="accept", rules=[[match("tcp", "dport", 25), {"drop": None}]]),
    ],
)
def test_chains_that_drop_nothing_of_ours_are_none(ruleset):
    assert found(ruleset, RANKS, API) == []


def test_last_rule_that_drops_all_counts_like_a_policy():
    assert found(chain(policy="accept", rules=[[{"counter": {}}, {"reject": {}}]]), API) == ["ip filter INPUT"]


def test_chain_of_ipv6_does_not_matter_to_ipv4_peers():
    assert found(chain(family="ip6"), RANKS) == []
    assert found(chain(family="ip6"), {**RANKS, "from": ["fd00::1"]}) == ["ip6 filter INPUT"]


ACCEPT = {"accept": None}
PORTS = match("tcp", "dport", {"set": [29501, {"range": [40000, 61000]}]})
PEERS = match("ip", "saddr", {"set": [{"prefix": {"addr": "10.0.0.0", "len": 24}}]})
NEW = {"match": {"op": "in", "left": {"ct": {"key": "state"}}, "right": ["new", "established"]}}
OLD = {"match": {"op": "in", "left": {"ct": {"key": "state"}}, "right": ["related", "established"]}}


@pytest.mark.parametrize(
    ("rule", "accepted"),
    [
        ([PORTS, ACCEPT], True),
        ([PEERS, PORTS, {"counter": {}}, ACCEPT], True),
        ([PEERS, ACCEPT], True),
        ([NEW, PORTS, ACCEPT], True),
        ([match("tcp", "dport", "@fleet"), ACCEPT], True),
        ([OLD, ACCEPT], False),
        ([PORTS, {"limit": {"rate": 1}}, ACCEPT], False),
        ([PORTS, {"xt": None}, ACCEPT], False),
        ([match("tcp", "dport", {"range": [40000, 50000]}), ACCEPT], False),
        ([match("udp", "dport", {"range": [1, 65535]}), ACCEPT], False),
        ([match("ip", "saddr", "10.0.0.1"), PORTS, ACCEPT], False),
        (
            [{"match": {"op": "!=", "left": {"payload": {"protocol": "tcp", "field": "dport"}}, "right": 22}}, ACCEPT],
            False,
        ),
        ([PORTS, {"drop": None}], False),
    ],
)
def test_only_a_plain_accept_of_all_ports_and_peers_clears_a_closed_chain(rule, accepted):
    sets = [("fleet", [29501, {"range": [40000, 60999]}])]
    assert found(chain(rules=[rule], sets=sets), RANKS) == ([] if accepted else ["ip filter INPUT"])


def test_accept_behind_a_jump_counts():
    ruleset = chain(rules=[[{"jump": {"target": "fleet"}}]])
    ruleset["nftables"].append({"rule": {"family": "ip", "table": "filter", "chain": "fleet", "expr": [PORTS, ACCEPT]}})
    assert found(ruleset, RANKS) == []


def test_the_tool_that_made_a_chain_is_known():
    ufw = chain()
    ufw["nftables"].append({"chain": {"family": "ip", "table": "filter", "name": "ufw-before-input"}})
    (obstacle,) = nftables.obstacles(ufw, nftables.parse_openings([RANKS]))
    assert (obstacle.tool, obstacle.remedy) == ("ufw", "ufw made it")
    firewalld = chain("inet", "firewalld", "filter_INPUT", "accept", rules=[[{"reject": {"type": "icmpx"}}]])
    (obstacle,) = nftables.obstacles(firewalld, nftables.parse_openings([API]))
    assert obstacle.tool == "firewalld"


REJECT = {"reject": {"type": "icmpx"}}


@pytest.mark.parametrize(
    ("rule", "drops"),
    [
        ([match("tcp", "dport", 45000), {"drop": None}], True),
        ([match("tcp", "dport", {"range": [60000, 61000]}), REJECT], True),
        ([match("ip", "saddr", "10.0.0.1"), {"drop": None}], True),
        ([PEERS, match("tcp", "dport", 45000), {"counter": {}}, {"drop": None}], True),
        ([match("tcp", "dport", 25), {"drop": None}], False),
        ([match("udp", "dport", 45000), {"drop": None}], False),
        ([match("ip", "saddr", "192.0.2.1"), {"drop": None}], False),
        ([match("ip", "saddr", "@banned"), {"drop": None}], False),
        ([OLD, {"drop": None}], False),
        ([match("tcp", "dport", 45000), {"limit": {"rate": 1}}, {"drop": None}], False),
        ([match("tcp", "dport", 45000), {"xt": None}, {"drop": None}], False),
    ],
)
def test_a_rule_that_drops_some_of_an_opening_is_named_by_its_handle(rule, drops):
    ruleset = chain(policy="accept", rules=[rule], sets=[("banned", ["192.0.2.7"])])
    ruleset["nftables"][-1].get("rule", {})["handle"] = 7
    told = [obstacle.reason for obstacle in nftables.obstacles(ruleset, nftables.parse_openings([RANKS]))]
    assert [reason.partition(" drops")[0] for reason in told] == (["its rule with handle 7"] if drops else [])


def test_an_accept_before_the_drop_clears_it_and_one_after_does_not():
    drop = [match("tcp", "dport", 45000), {"drop": None}]
    assert found(chain(policy="accept", rules=[[PORTS, ACCEPT], drop]), RANKS) == []
    assert found(chain(policy="accept", rules=[drop, [PORTS, ACCEPT]]), RANKS) == ["ip filter INPUT"]


def test_a_drop_behind_a_jump_counts():
    ruleset = chain(policy="accept", rules=[[match("tcp", "dport", 45000), {"jump": {"target": "shut"}}]])
    ruleset["nftables"].append(
        {"rule": {"family": "ip", "table": "filter", "chain": "shut", "expr": [{"drop": None}], "handle": 9}}
    )
    (obstacle,) = nftables.obstacles(ruleset, nftables.parse_openings([RANKS]))
    assert obstacle.handle == 9


def test_the_interface_of_the_cluster_is_put_in_where_it_is_known():
    ranks = {**RANKS, "cluster": True}
    text = nftables.render(nftables.parse_openings([ranks], "eth1"))
    assert 'iifname "eth1" ip saddr { 10.0.0.1, 10.0.0.2 } tcp dport { 29501, 40000-60999 } accept' in text
    assert "iifname" not in nftables.render(nftables.parse_openings([ranks], None))
    assert "iifname" not in nftables.render(nftables.parse_openings([API], "eth1"))
    assert 'iifname "eth2"' in nftables.render(nftables.parse_openings([{**ranks, "interface": "eth2"}], "eth1"))


def test_old_iptables_with_policy_drop_is_an_obstacle():
    openings = nftables.parse_openings([RANKS])
    (obstacle,) = nftables.legacy_obstacles("*filter\n:INPUT DROP [0:0]\n", "iptables-legacy", openings)
    assert "--dports 29501,40000:60999" in obstacle.remedy
    assert (
        nftables.legacy_obstacles("*filter\n:INPUT ACCEPT [0:0]\n:FORWARD DROP [0:0]\n", "iptables-legacy", openings)
        == []
    )
