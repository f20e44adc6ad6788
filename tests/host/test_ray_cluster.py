"""A real Ray cluster of two hosts: who is in it, who is kept out, and what is to be seen of its token."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import testinfra

INVENTORY = Path(os.environ["MOLECULE_INVENTORY_FILE"]).parent
RELEASE = "ls -d /opt/vllm/releases/0.32.0-cpu-*"
BOTH = range(20000, 20064)


@pytest.fixture(scope="module")
def hosts():
    names = ("gpu-01", "gpu-02", "stranger")
    return {name: testinfra.get_host(f"ansible://{name}?ansible_inventory={INVENTORY}") for name in names}


@pytest.fixture(params=["gpu-01", "gpu-02"])
def peer(request, hosts):
    return hosts[request.param]


@pytest.fixture
def head(hosts):
    return hosts["gpu-01"]


def ray(host, arguments: str, token: str | None = "/etc/ray/chat.0/token", mode: str = "token"):
    """Run a `ray` command with the token in this file, or with none."""
    named = f"RAY_AUTH_TOKEN_PATH={token}" if token else ""
    return host.run(
        f"env HOME=/nonexistent PYTHONDONTWRITEBYTECODE=1 RAY_AUTH_MODE={mode} {named} timeout 120 $({RELEASE})/bin/ray {arguments}"
    )


def address_of(host, name: str = "gpu-01") -> str:
    return host.check_output(f"getent ahostsv4 {name}").split()[0]


def test_it_runs_and_starts_with_its_host(peer):
    unit = peer.service("ray@chat.0.service")
    assert unit.is_running
    assert unit.is_enabled


def ask(host, program: str):
    """Run a program of Ray as the service user: what another user starts leaves files in which Ray's own cannot write."""
    host.run_test(f"install -d -o vllm /tmp/of-vllm && cat > /tmp/of-vllm/ask.py <<'END'\n{program}END")
    return host.run(
        f"su -s /bin/sh vllm -c 'env HOME=/tmp/of-vllm RAY_ADDRESS={address_of(host)}:20000 RAY_AUTH_MODE=token "
        "PYTHONDONTWRITEBYTECODE=1 RAY_AUTH_TOKEN_PATH=/etc/ray/chat.0/token RAY_USAGE_STATS_ENABLED=0 timeout 240 "
        f"$({RELEASE})/bin/python /tmp/of-vllm/ask.py'"
    )


def test_two_hosts_are_of_the_cluster(peer):
    said = ray(peer, f"status --address {address_of(peer)}:20000")
    assert said.rc == 0, said.stderr
    assert len(re.findall(r"^\s*1 node_[0-9a-f]+", said.stdout, re.MULTILINE)) == 2, said.stdout
    assert "0.0/2.0 GPU" in said.stdout  # as planned for: one on each


def test_work_runs_on_both_hosts_with_what_the_server_does_not_copy(head):
    """Each worker has its own host's address, which Ray has, too, and gloo's interface, as vLLM's workers need them."""
    asked = ask(
        head,
        "import os, ray; ray.init(logging_level='error')\n"
        "from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On\n"
        "work = ray.remote(num_cpus=1)(lambda: (os.environ['VLLM_HOST_IP'], os.environ['GLOO_SOCKET_IFNAME']))\n"
        "nodes = {n['NodeManagerAddress']: On(n['NodeID'], soft=False) for n in ray.nodes() if n['Alive']}\n"
        "told = {at: ray.get(work.options(scheduling_strategy=on).remote()) for at, on in sorted(nodes.items())}\n"
        "print(told)\n",
    )
    wanted = {
        address: (address, "host0") for address in sorted(address_of(head, name) for name in ("gpu-01", "gpu-02"))
    }
    assert str(wanted) in asked.stdout, asked.stdout + asked.stderr


@pytest.mark.parametrize("way", ["none", "wrong", "disabled"])
def test_without_the_token_even_a_peer_is_refused(head, way):
    head.run_test("printf %s wrong-token-wrong-token-wrong-token > /root/wrong; chmod 600 /root/wrong")
    token, mode = {"none": (None, "token"), "wrong": ("/root/wrong", "token"), "disabled": (None, "disabled")}[way]
    said = ray(head, f"status --address {address_of(head)}:20000", token, mode)
    assert said.rc != 0
    assert "node_" not in said.stdout
    assert re.search(r"(?i)token|unauthenticated|authenticat", said.stdout + said.stderr), said.stdout + said.stderr
    assert ray(head, f"status --address {address_of(head)}:20000").rc == 0


def test_a_stranger_reaches_no_port_of_it(hosts):
    """Ray's ports are of the replica's hosts; the peers find them open, or nothing would be proved."""
    ask = (
        "import socket, sys\n"
        "def is_open(port):\n"
        "    s = socket.socket(); s.settimeout(1)\n"
        "    return s.connect_ex((sys.argv[1], port)) == 0\n"
        "print([port for port in (22, *range(20000, 20010)) if is_open(port)])\n"
    )
    seen = {}
    for name in ("stranger", "gpu-02"):
        hosts[name].run_test(f"cat > /root/ask.py <<'END'\n{ask}END")
        seen[name] = hosts[name].check_output(f"python3 /root/ask.py {address_of(hosts[name])}")
    assert seen["stranger"] == "[22]"
    assert "22, 20000, 20001, 20002" in seen["gpu-02"]


def test_every_listener_has_its_pinned_port_or_is_of_the_kernels_range(peer):
    group = peer.check_output("systemctl show ray@chat.0.service --property=ControlGroup --value")
    pids = peer.check_output(f"cat /sys/fs/cgroup{group}/cgroup.procs").split()
    listening = peer.check_output("ss -Hltnp")
    own = [line.split()[3] for line in listening.splitlines() if any(f"pid={pid}," in line for pid in pids)]
    ports = {int(address.rpartition(":")[2]): address for address in own}
    low, high = map(int, peer.check_output("cat /proc/sys/net/ipv4/ip_local_port_range").split())
    # The raylet and what prepares environments; the agent of the dashboard has no port without the dashboard's packages.
    assert {20001, 20002, 20003} <= set(ports), own
    beyond = {port: address for port, address in ports.items() if port not in BOTH}
    assert all(low <= port <= high for port in beyond), beyond
    assert not [address for address in own if re.search(r":(8265|6379|10001|52365)$", address)]


def test_nobody_else_reads_the_token_and_it_is_in_no_command_line_and_no_log(peer):
    token = peer.file("/etc/ray/chat.0/token")
    assert (token.mode, token.user) == (0o600, "vllm")
    secret = token.content_string
    assert len(secret) > 30
    shown = peer.check_output(
        "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'; journalctl --no-pager; cat /etc/systemd/system/ray@*/* /etc/ray/chat.0/env"
    )
    assert "ray" in shown
    assert secret not in shown
    assert peer.run(f"grep -rlF {secret} /run/ray /etc/systemd /var/log").stdout == ""
    folder = peer.file("/run/ray/20000")  # its sockets are in it, and Ray opens what is below to all
    assert (folder.mode, folder.user) == (0o700, "vllm")


def test_no_process_of_it_is_roots_and_it_reports_to_nobody(peer):
    group = peer.check_output("systemctl show ray@chat.0.service --property=ControlGroup --value")
    users = peer.check_output(f"xargs -I PID stat --format=%U /proc/PID < /sys/fs/cgroup{group}/cgroup.procs").split()
    assert len(users) >= 3
    assert set(users) == {"vllm"}
    # Ray starts the dashboard's program all the same, for the reports that are off (start_api_server in
    # ray/_private/services.py): nothing of it listens.
    running = peer.check_output("for all in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $all; echo; done")
    dashboards = [line for line in running.splitlines() if "dashboard/dashboard.py" in line]
    assert all("--modules-to-load=UsageStatsHead --disable-frontend" in line for line in dashboards), dashboards
    assert peer.run("grep -rl usage_stats_enabled.:.true /run/ray/20000").stdout == ""


def test_a_worker_that_was_killed_is_back_by_itself(head):
    """Of the head's own processes the raylet; the unit ends and starts again."""
    before = head.check_output("systemctl show ray@chat.0.service --property=InvocationID --value")
    head.check_output("pkill -9 -f raylet/raylet")
    deadline = 60
    head.check_output(
        f"for i in $(seq {deadline}); do [ $(systemctl show ray@chat.0 -p InvocationID --value) != {before} ] && "
        "[ $(systemctl is-active ray@chat.0) = active ] && exit 0; sleep 1; done; exit 1"
    )


def test_no_part_of_it_starts_while_the_firewalls_table_is_not_loaded(hosts):
    worker = hosts["gpu-02"]
    worker.run_expect([0], "nft delete table inet gpu_fleet")
    assert worker.run("systemctl restart ray@chat.0").rc != 0
    said = worker.check_output("journalctl -u ray@chat.0 -n 20 -o cat")
    assert "The fleet's firewall table is not loaded" in said
    worker.run_expect([0], "systemctl reload gpu-fleet-firewall")
    worker.check_output("for i in $(seq 60); do systemctl is-active ray@chat.0 && exit 0; sleep 1; done; exit 1")
