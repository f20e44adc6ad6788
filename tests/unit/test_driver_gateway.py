"""playbooks/driver.yml and the gateways: aside before the units stop, let in once they serve again, left aside where it failed.

The play and the tasks of a turn are run for real, on no host: the change of the driver itself, and the modules that would
reach systemd and HAProxy, are stand-ins that write down what they were asked.
"""

from __future__ import annotations

import os
import shutil

import yaml
from conftest import REPOSITORY
from plays import played, recorded, stand_ins

CHANGE = """
- name: Change the driver
  gpu_fleet.vllm.change: {host: "{{ inventory_hostname }}"}

- name: Prove it
  ansible.builtin.fail: {msg: ["cuInit returned 999", "and more"]}
  when: inventory_hostname == broken
"""
# Parameters with their defaults, and the line.
MODULES = {
    "gateway_server": (
        dict.fromkeys(["servers", "state", "others", "deadline", "tls"]),
        "{state} {servers} others={others}",
    ),
    "instance": (
        {
            **dict.fromkeys(["instance", "generation", "timeout", "hosts", "rank", "store_port", "invocation"]),
            "state": "started",
        },
        "{instance} {state}",
    ),
    "start_time": ({"models": None}, ""),
    "change": ({"host": None}, "driver {host}"),
}
# A host each; off is disabled by an operator, and serves no more.
HOSTS = {"gpu-01": ["chat.0", "off.0"], "gpu-02": ["chat.1"], "gpu-03": []}
BROKEN = "gpu-02"


def plan():
    replicas = {
        name: {
            "service": name[:-2],
            "head": host,
            "hosts": [host],
            "urls": [host],
            "ports": {"api": 8000, "agent": 8003},
        }
        for host, names in HOSTS.items()
        for name in names
    }
    served = {
        service: {"served_model_names": [service], "replicas": [name for name in replicas if name[:-2] == service]}
        for service in ("chat", "off")
    }
    instances = {
        host: [{"instance": name, "rank": 0, "ports": {"rank_store": 1}, "config": {"model": "m"}} for name in names]
        for host, names in HOSTS.items()
    }
    return {
        "replicas": replicas,
        "services": served,
        "addresses": dict.fromkeys(HOSTS, "192.0.2.1"),
        "hosts": {host: {"instances": entries, "ray": []} for host, entries in instances.items()},
    }


def collection(folder):
    """The collection with its own roles, filters and play, and stand-ins for what would reach a host."""
    home = stand_ins(folder, MODULES)
    (home / "roles").mkdir()
    (home / "roles" / "gateway").symlink_to(REPOSITORY / "roles" / "gateway")
    shutil.copytree(REPOSITORY / "roles" / "gpu_driver", home / "roles" / "gpu_driver")
    tasks = home / "roles" / "gpu_driver" / "tasks"
    (tasks / "main.yml").write_text(CHANGE)
    (tasks / "look.yml").write_text("[]\n")


def run(folder, gateways, limit="all"):
    collection(folder)
    programs = folder / "bin"
    programs.mkdir()
    (programs / "systemctl").write_text(
        "#!/bin/sh\n# Stand-in, made for a test.\n"
        'case "$1 $2" in\n'
        '  "is-enabled vllm@off.0.service") echo disabled; exit 1 ;;\n'
        "  is-enabled*) echo enabled ;;\n"
        '  list-units*) [ "$HOST" = gpu-01 ] && echo "vllm@chat.0.service loaded active running x" '
        '|| echo "vllm@chat.1.service loaded active running x" ;;\n'
        "esac\n"
    )
    (programs / "systemctl").chmod(0o755)
    play = yaml.safe_load((REPOSITORY / "playbooks" / "driver.yml").read_text())[2]
    play["environment"] = {"HOST": "{{ inventory_hostname }}"}
    planned = {"disturbs": True, "waits": False, "plan": {"reboot": False}}
    there = [
        {"item": name, "stat": {"exists": True, "lnk_source": "generations/1"}}
        for name in ("chat.0", "off.0", "chat.1")
    ]
    variables = {
        "ansible_connection": "local",
        "fleet_plan": plan(),
        "__gpu_driver_generations": {
            "results": "{{ there | selectattr('item', 'in', __gpu_driver_instances) | list }}"
        },
        "there": there,
        "broken": BROKEN,
        "vllm_service_allow_outage": limit != "all",  # the others are not asked then
    }
    hosts = {name: {"__gpu_driver_planned": planned} for name in HOSTS}
    groups = {"gpu_hosts": {"hosts": hosts}, "gateways": {"hosts": dict.fromkeys(gateways)}}
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "ANSIBLE_INVENTORY_ENABLED": "ansible.builtin.yaml",
        "ANSIBLE_PIPELINING": "1",
    }
    inventory = {"all": {"children": groups if gateways else {"gpu_hosts": {"hosts": hosts}}}}
    status, said = played(folder, [play], inventory, "--limit", limit, environment=environment, **variables)
    return status, said, recorded(folder)


ASIDE, IN = "drained ['chat/chat.{}'] others=True", "admitted ['chat/chat.{}'] others=False"


def turn(number, gateways=2):
    """What one host's turn leaves in the record."""
    host = sorted(HOSTS)[number]
    return [
        *[ASIDE.format(number)] * gateways,
        *[f"{name} stopped" for name in HOSTS[host]],
        f"driver {host}",
        f"chat.{number} started",
        f"chat.{number} watched",
        *[IN.format(number)] * gateways,
    ]


def test_a_turn_is_aside_before_its_units_stop_and_let_in_once_it_serves_and_stays_aside_where_it_failed(tmp_path):
    status, said, record = run(tmp_path, ["gw-01", "gw-02"])
    assert status != 0
    # The second fails at its proof; the third, which nothing stands against, is not touched.
    assert record == [*turn(0), *turn(1)[:4]]
    assert "chat.0: aside at the gateways until served again" in said
    assert "cuInit returned 999 and more. What was taken aside at the gateways (gw-01, gw-02) stays so: chat.1." in said
    assert "drain_instances=chat.1 -e drain_state=admitted" in said


def test_without_a_gateway_the_units_stop_and_start_and_nothing_is_said_of_one(tmp_path):
    status, said, record = run(tmp_path, [], BROKEN)
    assert status != 0
    assert record == turn(1, 0)[:2]
    assert '"msg": "cuInit returned 999 and more"' in said
    assert "drain_instances" not in said
