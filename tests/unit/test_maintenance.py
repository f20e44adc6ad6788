"""vllm_host_state: maintenance: a host is taken out with what runs on it, and nothing else is.

The play runs for real on no host: the modules that would reach systemd and HAProxy are stand-ins that write down what they were
asked.
"""

from __future__ import annotations

import copy
import re

import pytest
import yaml
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import (
    bench_document,
    gateway,
    maintenance,
    monitoring,
    plan,
    rollout,
    services,
    status,
    teardown,
)
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data, inventory
from conftest import REPOSITORY
from plays import played, recorded, stand_ins
from test_services_and_plan import fleet, host
from test_validate import GOOD, HOSTS

SERVICES = """
- {name: chat, model: m, hosts: [gpu-01, gpu-02], gpus: [0]}
- {name: big, model: m, hosts: [gpu-02, gpu-03], hosts_per_replica: 2, gpus: [1], port_base: 8100}
- {name: small, model: m, hosts: [gpu-01, gpu-03], gpus: [2], port_base: 8200}
"""


def planned(*resting, text=SERVICES, outage=False):
    """The plan of three hosts, with some in maintenance, and its findings as text."""
    there = fleet(3)
    hosts = {name: host(name, number, maintenance=name in resting) for number, name in enumerate(there.hosts, 1)}
    read, found = services.read(yaml.safe_load(text))
    assert found == []
    known = {name: getattr(there, name) for name in there.__dataclass_fields__}
    made, found = plan.build(read, plan.Fleet(**{**known, "hosts": hosts, "outage": outage}))
    return made, found


# -- the plan --------------------------------------------------------------------------------------------------------------


def test_without_it_nothing_is_otherwise():
    made, found = planned()
    assert found == []
    assert made["maintenance"] == {"hosts": [], "replicas": {}}
    assert not any(server["resting"] for one in gateway.backends(made, {}, 8) for server in one["servers"])


def test_what_has_a_rank_on_the_host_rests_and_everything_else_is_byte_for_byte_the_same():
    """All of a replica rests, also its ranks on other hosts: one rank alone serves nobody."""
    before, _ = planned()
    made, found = planned("gpu-02")
    assert found[0].severity == "error" and "big" in found[0].where, "big has no other replica"
    assert made["maintenance"] == {"hosts": ["gpu-02"], "replicas": {"chat.1": ["gpu-02"], "big.0": ["gpu-02"]}}
    named = {name: [one["instance"] for one in entry["instances"]] for name, entry in made["hosts"].items()}
    assert named == {"gpu-01": ["chat.0", "small.0"], "gpu-02": [], "gpu-03": ["small.1"]}
    # Ports, firewall, peers and addresses stay, and so does every rank of what goes on.
    assert made["replicas"] == before["replicas"] and made["services"] == before["services"]
    for name, entry in made["hosts"].items():
        old = before["hosts"][name]
        assert {**entry, "instances": 0} == {**old, "instances": 0}
        assert entry["instances"] == [one for one in old["instances"] if one["instance"] not in ("chat.1", "big.0")]


def test_ray_rests_with_its_replica():
    text = (
        "[{name: big, model: m, executor: ray, hosts: [gpu-01, gpu-02], hosts_per_replica: 2, gpus: [0]},"
        " {name: chat, model: m, hosts: [gpu-01], gpus: [1], port_base: 8100}]"
    )
    made, _ = planned("gpu-02", text=text, outage=True)
    assert [entry["ray"] for entry in made["hosts"].values()] == [[], [], []]
    assert maintenance.resting_on(made, "gpu-01") == maintenance.resting_on(made, "gpu-02") == ["big.0"]
    assert [one["instance"] for one in made["hosts"]["gpu-01"]["instances"]] == ["chat.0"]
    assert made["hosts"]["gpu-01"]["blocks"] == planned(text=text)[0]["hosts"]["gpu-01"]["blocks"]


def test_a_service_that_nobody_would_serve_is_one_sentence_and_wants_consent():
    (refused,) = planned("gpu-01", "gpu-02", text=SERVICES.splitlines()[1])[1]
    assert (refused.id, refused.where, refused.severity) == ("maintenance", "service chat", "error")
    assert refused.message == (
        "nobody serves it: all its replicas (chat.0, chat.1) are in maintenance, with gpu-01, gpu-02 (vllm_host_state)"
    )
    assert "vllm_service_allow_outage: true" in refused.fix
    (told,) = planned("gpu-01", "gpu-02", text=SERVICES.splitlines()[1], outage=True)[1]
    assert (told.message, told.severity) == (refused.message, "info")


def test_it_is_shown_as_what_it_is():
    made, _ = planned("gpu-01")
    lines = plan.summary(made)
    assert "chat.0: in maintenance with gpu-01 (vllm_host_state): stopped, and started by nobody" in lines
    assert any(line.startswith("chat.1: vLLM 0.26.0 cu130 on gpu-02") for line in lines)
    # Not left over, and so taken away by nobody.
    assert teardown.planned_on(made, "gpu-01") == ["chat.0", "small.0"]
    assert teardown.going(["chat.0", "old.0"], made, "gpu-01", [], named=False) == ["old.0"]


def test_a_run_starts_and_restarts_the_others_alone():
    made, _ = planned("gpu-01")
    shared = {"restart_reasons": [], "settled": False, "active": "inactive", "running": False, "strangers": []}
    results = {
        name: [{"item": one, **shared} for one in entry["instances"]]
        for name, entry in made["hosts"].items()
        if name != "gpu-01"
    }
    said = {name: found for name, found in rollout.actions(made, results).items() if found}
    assert said == {"start": ["chat.1", "big.0", "small.1"]}
    # It serves nobody meanwhile, so that it is no reason to restart the other one.
    changed = {**shared, "restart_reasons": ["it changed"], "active": "active", "running": True}
    results = {name: [{**one, **changed} for one in all_of] for name, all_of in results.items()}
    assert [one["instance"] for one in rollout.actions(made, results)["refuse"]] == ["chat.1", "big.0", "small.1"]


def test_an_acceptance_takes_one_that_serves():
    made, _ = planned("gpu-01")
    assert bench_document.chosen(made, "chat") == "chat.1"
    with pytest.raises(bench_document.BadSetting, match="in maintenance"):
        bench_document.chosen(made, replica="chat.0")
    made, _ = planned("gpu-01", "gpu-02", outage=True)
    with pytest.raises(bench_document.BadSetting, match="all replicas of chat are in maintenance"):
        bench_document.chosen(made, "chat")


# -- the gateway -----------------------------------------------------------------------------------------------------------


def test_gateways_have_it_out_of_service_by_their_configuration():
    made, _ = planned("gpu-01")
    rests = {server["name"]: server["resting"] for one in gateway.backends(made, {}, 8) for server in one["servers"]}
    assert rests == {"chat.0": True, "chat.1": False, "big.0": False, "small.0": True, "small.1": False}


def test_its_admin_state_is_known_from_a_drain():
    """srv_admin_state of HAProxy 2.6.12: 5 for a server that is `disabled` in the configuration, 8 for a drained one, 0 when
    `disabled` is gone again, whatever it was before."""
    assert gateway.resting({"admin": "5"}) and gateway.drained({"admin": "5"})
    assert not gateway.resting({"admin": "8"}) and gateway.drained({"admin": "8"})
    assert not gateway.resting({"admin": "0"}) and not gateway.resting({})


# -- monitors --------------------------------------------------------------------------------------------------------------


def test_monitors_miss_nothing_and_say_it():
    made, _ = planned("gpu-01")
    places = {
        "gpu-01": {"address": "198.51.100.1", "groups": ["gpu_hosts"]},
        "gpu-02": {"address": "198.51.100.2", "groups": ["gpu_hosts"]},
    }
    jobs = monitoring.targets(made, places, {"node": 9100, "dcgm": 9400})
    for job in ("vllm", "vllm_agent", "node", "dcgm"):
        assert "gpu-01" not in {entry["labels"]["host"] for entry in jobs[job]}
        assert "gpu-02" in {entry["labels"]["host"] for entry in jobs[job]}
    places["gpu-01"]["groups"].append("gateways")
    jobs = monitoring.targets(made, places, {"node": 9100, "haproxy": 8404})
    assert "gpu-01" in {entry["labels"]["host"] for entry in jobs["node"]}
    said = {(one["record"], *one["labels"].values()) for one in monitoring._constants(made, {})}
    assert ("gpu_fleet:host_maintenance", "gpu-01") in said and (
        "gpu_fleet:replica_maintenance",
        "chat",
        "chat.0",
    ) in said
    assert ("gpu_fleet:replica_wanted", "chat", "chat.1") in said
    assert ("gpu_fleet:replica_wanted", "chat", "chat.0") not in said


def test_status_is_well_with_it():
    made, _ = planned("gpu-01")
    assert status.pages(made, "gpu-01") == {}
    for name in ("chat.1", "big.0", "small.1"):
        made["replicas"][name]["version"] = "0.32.0"
    right = "gpu_fleet_probe_right 1\n"
    told = {
        name: {f"agent {one['instance']}": {"second": right} for one in entry["instances"] if one["rank"] == 0}
        for name, entry in made["hosts"].items()
        if name != "gpu-01"
    }
    found = status.from_hosts(made, data.load("metrics"), told, {})
    (away,) = (row for row in found["replicas"] if row["replica"] == "chat.0")
    assert (away["maintenance"], away["wanted"]) == (1.0, 0.0)
    assert [row["host"] for row in found["hosts"] if row["maintenance"]] == ["gpu-01"]
    (chat,) = (row for row in found["services"] if row["name"] == "chat")
    assert (chat["wanted"], chat["right"]) == (1.0, 1.0)
    assert not status.wrong(found)
    away["maintenance"] = None
    assert status.wrong(found)


def test_status_on_the_screen(capsys):
    from gpu_fleet import status_view
    from rich.console import Console

    made, _ = planned("gpu-01")
    found = status.from_hosts(made, data.load("metrics"), {}, {})
    Console(width=160).print(status_view.screen(found))
    shown = capsys.readouterr().out
    assert re.search(r"chat\.0 +maintenance", shown) and re.search(r"gpu-01 +maintenance", shown)
    assert re.search(r"chat\.1 +no", shown) and re.search(r"gpu-02 +no", shown)


# -- the inventory ---------------------------------------------------------------------------------------------------------


def judged(states, groups=None, **variables):
    hosts = {name: {**GOOD, **variables, **entry, **states.get(name, {})} for name, entry in HOSTS.items()}
    told = {"all": list(hosts), "gpu_hosts": list(hosts), **(groups or {})}
    read, known, found = inventory.read(inventory.Inventory(hosts, told))
    made, more = plan.build(read, known)
    wrong, notes = inventory.sorted_out(found, more)
    return made, [str(one) for one in wrong], [str(one) for one in notes]


def test_a_state_that_there_is_not_and_a_host_that_serves_no_model():
    _, wrong, _ = judged({"gpu-01": {"vllm_host_state": "maintenence"}})
    assert len(wrong) == 1
    assert "host gpu-01: vllm_host_state is 'maintenence'" in wrong[0] and "Did you mean maintenance?" in wrong[0]
    _, wrong, _ = judged(
        {"gpu-02": {"vllm_host_state": "maintenance"}}, {"gpu_hosts": ["gpu-01"], "gateways": ["gpu-02"]}
    )
    assert len(wrong) == 1 and "the host serves no model" in wrong[0]


@pytest.mark.parametrize("consent", [True, "true"])
def test_consent_as_a_variable_and_as_a_word_on_the_command_line(consent):
    out = {name: {"vllm_host_state": "maintenance"} for name in HOSTS}
    _, wrong, _ = judged(out)
    assert len(wrong) == 1 and "nobody serves it" in wrong[0]
    made, wrong, notes = judged(out, vllm_service_allow_outage=consent)
    assert wrong == [] and made["maintenance"]["hosts"] == list(HOSTS)
    assert any("nobody serves it" in note for note in notes)
    assert judged({"gpu-01": {"vllm_host_state": "serving"}})[1:] == judged({})[1:]


# -- the play --------------------------------------------------------------------------------------------------------------

MODULES = {
    "gateway_server": (
        dict.fromkeys(["servers", "state", "others", "deadline", "tls"]),
        "{state} {servers} others={others}",
    ),
    "teardown": (dict.fromkeys(["state", "instances", "made"]), "{state} {instances}"),
}
REACHED = "127.0.0.1"


def run(folder, made, off=(), refusing=(), limit="all", **variables):
    """The play on three hosts and a gateway; `off` cannot be reached, at `refusing` the gateway refuses a drain."""
    home = stand_ins(folder, MODULES)
    if refusing:
        module = home / "plugins" / "modules" / "gateway_server.py"
        refuses = "module.fail_json(msg='no other replica is admitted') or module.exit_json("
        module.write_text(module.read_text().replace("module.exit_json(", refuses))
    local = {"ansible_connection": "local"}
    # Where nobody listens, by SSH.
    away = {"ansible_host": REACHED, "ansible_port": 9, "ansible_ssh_common_args": "-o ConnectTimeout=3"}
    hosts = {name: away if name in off else local for name in made["hosts"]}
    groups = {"gpu_hosts": {"hosts": hosts}, "gateways": {"hosts": {"gw-01": local}}}
    environment = {
        "ANSIBLE_DISPLAY_SKIPPED_HOSTS": "true",  # whatever a configuration says: what was begun is counted
        "ANSIBLE_INVENTORY_ENABLED": "ansible.builtin.yaml",
    }
    plays = (REPOSITORY / "playbooks/maintenance.yml").read_text()
    options = ("--limit", limit)
    inventory = {"all": {"children": groups}}
    status_, said = played(folder, plays, inventory, *options, environment=environment, fleet_plan=made, **variables)
    return status_, said, recorded(folder)


def test_it_is_drained_by_one_host_and_stopped_on_all_and_one_that_is_off_fails_nothing(tmp_path):
    status_, said, record = run(tmp_path, planned("gpu-01", "gpu-02", outage=True)[0], off=("gpu-01",))
    assert status_ == 0
    drained = [f"drained ['{name[:-2]}/{name}'] others=True" for name in ("big.0", "chat.0", "chat.1", "small.0")]
    assert sorted(record) == [*drained, "stopped ['big.0']", "stopped ['chat.1', 'big.0']"]
    assert "gpu-02 is in maintenance (vllm_host_state); at rest here: chat.1, big.0" in said
    assert "gpu-03 is not in maintenance, but another host of the same replica is; at rest here: big.0" in said
    assert "gpu-01 was not reached. What starts there when it comes back gets nothing from any gateway" in said


def test_what_a_gateway_does_not_let_go_goes_on_whole(tmp_path):
    status_, _, record = run(tmp_path, planned("gpu-02", outage=True)[0], refusing=("gw-01",))
    assert status_ != 0
    assert not [line for line in record if line.startswith("stopped") and line != "stopped []"]


def test_with_consent_the_gateway_is_not_asked_for_others_and_part_of_a_replica_speaks_for_it(tmp_path):
    made = planned("gpu-02", outage=True)[0]
    status_, _, record = run(tmp_path, made, limit="gpu-03", vllm_service_allow_outage=True)
    assert status_ == 0
    assert record == ["drained ['big/big.0'] others=False", "stopped ['big.0']"]


def test_without_it_no_host_is_asked_anything(tmp_path):
    status_, said, record = run(tmp_path, planned()[0], off=("gpu-01", "gpu-02", "gpu-03"))
    assert (status_, record) == (0, [])
    assert said.count("TASK") == 1 and "ok=" not in said


def test_hosts_in_maintenance_are_left_as_they_are_by_what_changes_hosts():
    """The first task that a host would have, of every play that would prepare, change or ask one that may be off."""
    for playbook in ("deploy", "leftovers", "rollback", "status"):
        plays = yaml.safe_load((REPOSITORY / f"playbooks/{playbook}.yml").read_text())
        play = copy.deepcopy(next(one for one in plays if "hosts" in one))
        first = (play.get("pre_tasks") or play["tasks"])[0]
        assert first["ansible.builtin.meta"] == "end_host", playbook
        assert "inventory_hostname in fleet_plan.maintenance.hosts" in str(first["when"])
        assert play["gather_facts"] is False
