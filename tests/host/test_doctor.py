"""Ten faults, injected for real: the doctor names each, and the alert for it fires in a real Alertmanager.

Prometheus, Alertmanager and the node exporter are Debian's own; the rules are the role's, and of their waits only monitoring_alert_for
makes shorter ones. The engine is a stand-in for vLLM (tests/standin), which fails in the real one's words.

Lab hosts share this machine's kernel. Three faults need more than a command on the host: memory is short because the host's control
group has no more, and the kernel's messages about it reach the host's journal by way of this machine; a clock is wrong for the programs
that tell it (shift_clock.py); a full disk is a small one in memory over the caches.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import fcntl
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import testinfra

INVENTORY = Path(os.environ["MOLECULE_INVENTORY_FILE"]).parent
ROOT = Path(__file__).resolve().parents[2]
SOON = 90.0  # an alert waits 5 s, after scrapes and rules each 2 s; the doctor takes 10 s a look on a busy machine
ASK = "import urllib.request as u,sys; print(u.urlopen(sys.argv[1], timeout=5).read().decode())"
NAMES = ("gpu-01", "gpu-02", "mon")


@pytest.fixture(scope="module")
def hosts():
    return {name: testinfra.get_host(f"ansible://{name}?ansible_inventory={INVENTORY}") for name in NAMES}


def wait(so: Callable, otherwise, seconds: float = SOON):
    end = time.monotonic() + seconds
    while not (found := so()):
        assert time.monotonic() < end, otherwise() if callable(otherwise) else otherwise
        time.sleep(1)
    return found


def ask(hosts, url):
    return json.loads(hosts["mon"].check_output(f"python3 -c '{ASK}' '{url}'"))


def query(hosts, expression):
    told = ask(hosts, f"http://127.0.0.1:9090/api/v1/query?query={urllib.parse.quote(expression)}")
    return [{**entry["metric"], "value": float(entry["value"][1])} for entry in told["data"]["result"]]


def firing(hosts, **labels) -> list[dict]:
    """What Alertmanager has of these labels, silenced and inhibited ones, too; what is over it does not show."""
    told = ask(hosts, "http://127.0.0.1:9093/api/v2/alerts")
    return [alert for alert in told if labels.items() <= alert["labels"].items()]


def active(hosts, **labels) -> list[dict]:
    """Those of them that somebody would be told of."""
    return [alert for alert in firing(hosts, **labels) if alert["status"]["state"] == "active"]


def doctor(since: float | None = None) -> tuple[int, dict]:
    command = [str(ROOT / "scripts" / "fleet"), "doctor", "-i", str(INVENTORY), "--json"]
    command += [] if since is None else ["--since", f"@{int(since)}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout)


def serves(hosts) -> bool:
    return len(query(hosts, "gpu_fleet:replica_right == 1")) == 3


# --- a healthy fleet ------------------------------------------------------------------------------------------------------


def test_nothing_is_found_in_a_healthy_fleet_and_nothing_fires(hosts):
    wait(lambda: serves(hosts), "three replicas do not serve")
    time.sleep(10)  # a wrong rule has fired by then
    fires = {alert["labels"]["alertname"] for alert in firing(hosts)}
    assert fires <= {"KeyExpires"}, fires
    status, told = doctor(time.time() - 10)
    assert (status, told["findings"]) == (0, []), told


def test_a_key_that_has_ended_is_told_and_one_that_lasts_is_not(hosts):
    """From the gateways' own list of keys: its ends are numbers among the monitor's rules."""
    (alert,) = wait(lambda: firing(hosts, alertname="KeyExpires"), "no alert about the key that has ended")
    assert alert["labels"]["key"] == "former"
    ends = {entry["key"]: entry["value"] for entry in query(hosts, "gpu_fleet:key_expires_seconds")}
    assert ends == {
        name: datetime.datetime(year, 1, day, tzinfo=datetime.UTC).timestamp()
        for name, year, day in (("former", 2026, 2), ("lasting", 2100, 1))
    }
    rules = hosts["mon"].check_output("cat /etc/prometheus/gpu_fleet/rules.yml")
    assert "client-former" not in rules and "client-lasting" not in rules, "a key itself is among the rules"


# --- what a command on the host does not do -------------------------------------------------------------------------------


def processes(host) -> list[Path]:
    """The host's processes as this machine has them."""
    namespace = host.check_output("readlink /proc/1/ns/pid")
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdecimal() and os.readlink(process / "ns/pid") == namespace:
                found.append(process)
    return found


def root_of(host) -> Path:
    """The host's files, by way of its first process."""
    for process in processes(host):
        with contextlib.suppress(OSError):
            if re.search(r"^NSpid:.*\t1$", (process / "status").read_text(encoding="utf-8"), re.MULTILINE):
                return process / "root"
    raise LookupError("the host's first process is not found")


@contextlib.contextmanager
def short_of_memory(host) -> Iterator[None]:
    """The host has 256 MiB beyond what its processes use now, and no more: the kernel ends one of them when more is taken."""
    groups = []
    for process in processes(host):
        with contextlib.suppress(OSError):
            lines = (process / "cgroup").read_text(encoding="utf-8").splitlines()
            groups.append(dict(line.split(":", 2)[1:] for line in lines))
    if all("memory" in group for group in groups):  # version 1 of control groups, else 2
        root, name, file, none, used = "/sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes", "-1", "total_"
    else:
        root, name, file, none, used = "/sys/fs/cgroup", "", "memory.max", "max", ""
    group = Path(root + os.path.commonpath([paths[name] for paths in groups]))
    assert "/test-doctor-" in str(group), f"{group} is not of this lab"
    stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
    taken = sum(int(stat.get(f"{used}{kind}", 0)) for kind in ("rss", "anon", "shmem"))
    (group / file).write_text(str(taken + (256 << 20)), encoding="ascii")
    try:
        yield
    finally:
        (group / file).write_text(none, encoding="ascii")


@contextlib.contextmanager
def sees_its_kernel(host) -> Iterator[None]:
    """The host's journal has the kernel's messages, as that of a machine of its own has.

    A lab host has no /dev/kmsg and may read none. It gets one end of a pipe by that name, in which this machine puts each message as it
    comes, one a packet (pipe(7)), which is how the device gives them.
    """
    host.check_output("mkfifo -m 600 /dev/kmsg")
    # Whoever opens a pipe waits for its other end, and systemd's first process opens this one to write: here it is open for both.
    writer = os.open(root_of(host) / "dev/kmsg", os.O_RDWR | os.O_NONBLOCK)
    fcntl.fcntl(writer, fcntl.F_SETFL, fcntl.fcntl(writer, fcntl.F_GETFL) | os.O_DIRECT)
    reader = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    os.lseek(reader, 0, os.SEEK_END)
    host.check_output("systemctl restart systemd-journald")
    reads = "ls -l /proc/$(systemctl show -p MainPID --value systemd-journald)/fd | grep -q /dev/kmsg"
    wait(lambda: host.run(reads).rc == 0, "the host's journal does not look at its /dev/kmsg")
    stop = threading.Event()

    def hand_on() -> None:
        while not stop.wait(0.1):
            # EPIPE: some were overwritten before they were read.
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                while True:
                    give(os.read(reader, 8192))

    def give(message: bytes) -> None:
        """A report of the out-of-memory killer has more lines than a pipe has room for."""
        while not stop.is_set():
            with contextlib.suppress(BlockingIOError):
                os.write(writer, message)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=hand_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        host.check_output("rm /dev/kmsg && systemctl restart systemd-journald")
        os.close(writer)
        os.close(reader)


@contextlib.contextmanager
def out_of_memory(host) -> Iterator[None]:
    with sees_its_kernel(host), short_of_memory(host):
        yield


@contextlib.contextmanager
def wrong_clock(host) -> Iterator[None]:
    """The node exporter and every Python that is started are an hour ahead."""
    program = base64.b64encode((ROOT / "tests/host/shift_clock.py").read_bytes()).decode()
    site = host.check_output("python3 -c 'import site; print(site.getsitepackages()[0])'")
    begins = "import runpy; runpy.run_path('/root/shift_clock.py')['main'](['3600'])"
    exporter = "$(systemctl show prometheus-node-exporter -p MainPID --value)"
    host.check_output(f"echo {program} | base64 -d > /root/shift_clock.py")
    host.check_output(f"python3 /root/shift_clock.py 3600 {exporter}")
    host.check_output(f'mkdir -p {site} && echo "{begins}" > {site}/shift_clock.pth')
    assert abs(float(host.check_output("python3 -c 'import time; print(time.time())'")) - time.time() - 3600) < 60
    try:
        yield
    finally:
        host.check_output(f"rm {site}/shift_clock.pth; python3 /root/shift_clock.py 0 {exporter}")


# --- the faults -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What is done to which host and undone, who is started anew for it, and who has to notice: finding and alert."""

    host: str
    cause: str
    evidence: str
    alert: dict[str, str]
    breaks: str = "true"
    mends: str = "true"
    unit: str = ""
    around: Callable = field(default=lambda host: contextlib.nullcontext())
    # Of an alert about what happened within the last quarter of an hour nobody waits for the end.
    ends: bool = True


CONFIG, SECRETS = "/etc/vllm/single.0/current/config.yaml", "/etc/vllm/single.0/secrets.env"
CACHE, SHARD = "/var/cache/vllm", "/var/lib/vllm/models/tiny/model-00002-of-00002.safetensors"
PEM = "/etc/ssl/fleet-test.pem"
REPLICA = {"alertname": "ReplicaDown", "replica": "single.0", "service": "single"}
DROPS = (
    "nft add table inet other; nft add chain inet other in '{ type filter hook input priority -10; }'; "
    'nft add rule inet other in ip saddr $(getent ahostsv4 gpu-01 | head -1 | cut -d" " -f1) drop'
)

FAULTS = {
    "port taken": Fault(
        host="gpu-01",
        unit="vllm@single.0",
        breaks="systemctl stop vllm@single.0; systemd-run --unit=thief /usr/bin/python3 -m http.server 8100",
        mends="systemctl stop thief",
        cause="port_in_use",
        evidence="ddress already in use",
        alert=REPLICA,
    ),
    "key file unreadable": Fault(
        host="gpu-01",
        unit="vllm@single.0",
        breaks=f"mv {SECRETS} {SECRETS}.away",
        mends=f"mv {SECRETS}.away {SECRETS}",
        cause="unit_environment_missing",
        evidence="environment files",
        alert=REPLICA,
    ),
    "unknown flag put in by hand": Fault(
        host="gpu-01",
        unit="vllm@single.0",
        breaks=f"echo 'frobnicate: 1' >> {CONFIG}",
        mends=f"sed -i /frobnicate/d {CONFIG}",
        cause="unrecognized_argument",
        evidence="--frobnicate",
        alert=REPLICA,
    ),
    "model folder incomplete": Fault(
        host="gpu-02",
        unit="vllm@single.1",
        breaks=f"mv {SHARD} /root/",
        mends=f"mv /root/$(basename {SHARD}) {SHARD}",
        cause="model_weights_incomplete",
        evidence="model-00002-of-00002.safetensors is not there",
        alert={"alertname": "ModelIncomplete", "host": "gpu-02", "model": "tiny"},
    ),
    "disk full": Fault(
        host="gpu-01",
        unit="vllm@single.0",
        breaks=f"mount -t tmpfs -o size=100m,mode=755 tmpfs {CACHE}; cat /dev/zero > {CACHE}/filler",
        mends=f"systemctl stop vllm@single.0; umount -l {CACHE}",
        cause="disk_full",
        evidence=f"{CACHE}: 0 MiB of 100 MiB are left",
        alert={"alertname": "DiskFull", "host": "gpu-01", "mountpoint": CACHE},
    ),
    "rank firewalled off": Fault(
        host="gpu-02",
        breaks=DROPS,
        mends="nft delete table inet other",
        cause="firewall_blocks_port",
        evidence="the agent of rank 1 answers on gpu-02 itself; that on gpu-01 reached it",
        alert={"alertname": "PeersUnreachable", "replica": "chat.0", "host": "gpu-01"},
    ),
    "wrong interface": Fault(
        host="gpu-02",
        unit="vllm@chat.0",
        breaks="sed -i s/^GLOO_SOCKET_IFNAME=.*/GLOO_SOCKET_IFNAME=eth9/ /etc/vllm/chat.0/current/env",
        mends="sed -i s/^GLOO_SOCKET_IFNAME=.*/GLOO_SOCKET_IFNAME=host0/ /etc/vllm/chat.0/current/env",
        cause="nccl_no_socket_interface",
        evidence="GLOO_SOCKET_IFNAME=eth9 in the environment of chat.0: there is no such interface",
        alert={"alertname": "ServiceDown", "service": "chat"},
    ),
    "clock wrong": Fault(
        host="gpu-02",
        around=wrong_clock,
        cause="clock_wrong",
        evidence=" s ahead of the controller's",
        alert={"alertname": "ClockWrong", "host": "gpu-02"},
    ),
    "expired certificate": Fault(
        host="gpu-01",
        breaks=f"cp {PEM} {PEM}.good; cp {PEM}.expired {PEM}",
        mends=f"mv {PEM}.good {PEM}",
        cause="tls_certificate_invalid",
        evidence=f"{PEM} ended 2020-01-01",
        alert={"alertname": "CertificateExpired", "host": "gpu-01", "path": PEM},
    ),
    "out of memory": Fault(
        host="gpu-01",
        unit="vllm@single.0",
        around=out_of_memory,
        breaks="mkdir -p /var/lib/standin; echo 800 > /var/lib/standin/eats",
        mends="rm /var/lib/standin/eats",
        cause="host_oom_killed",
        evidence="out of memory: Killed process",
        alert={"alertname": "OutOfMemory", "host": "gpu-01"},
        ends=False,
    ),
}


@pytest.fixture(scope="module", autouse=True)
def expired(hosts):
    made = subprocess.run([sys.executable, str(ROOT / "tests/host/expired.py")], capture_output=True, check=True)
    text = base64.b64encode(made.stdout).decode()
    hosts["gpu-01"].check_output(f"echo {text} | base64 -d > {PEM}.expired")


@pytest.mark.parametrize("name", FAULTS)
def test_the_doctor_names_it_and_its_alert_fires(hosts, name):
    fault = FAULTS[name]
    host = hosts[fault.host]
    again = f"systemctl reset-failed {fault.unit}; systemctl restart --no-block {fault.unit}" if fault.unit else "true"
    wait(lambda: serves(hosts), "the fleet does not serve before")
    before = firing(hosts, **fault.alert)
    assert not before, f"it fires before: {before}"
    with fault.around(host):
        since = time.time()
        try:
            done = host.run(f"{fault.breaks}; {again}")
            assert done.rc == 0, done.stderr
            told: dict = {}

            def named():
                told.update(doctor(since)[1])
                first = (told["findings"] or [{}])[0]
                return first.get("cause_id") == fault.cause and fault.evidence in first["evidence"] and first

            first = wait(named, lambda: json.dumps(told, indent=1))
            assert first["host"] == fault.host and first["severity"] == "error" and first["confidence"] == "high"
            (alert,) = wait(lambda: active(hosts, **fault.alert), lambda: f"Alertmanager has {firing(hosts)}")
        finally:
            host.run(f"{fault.mends}; {again}")
    began = datetime.datetime.fromisoformat(alert["startsAt"]).timestamp()
    assert began >= since - 1, "it is an older one"
    assert (ROOT / alert["annotations"]["runbook_url"]).is_file()
    wait(lambda: serves(hosts), "the fleet does not serve after")
    if fault.ends:
        wait(lambda: not query(hosts, _selector(fault.alert)), "the alert does not end")
        wait(lambda: not firing(hosts, **fault.alert), "Alertmanager does not forget it")


def _selector(labels: dict[str, str]) -> str:
    inner = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f'ALERTS{{alertstate="firing",{inner}}}'


def test_the_doctor_finds_nothing_any_more(hosts):
    """Every fault was taken back: of what the journals keep nothing counts that happened before the servers came up."""
    wait(lambda: serves(hosts), "the fleet does not serve")
    status, told = doctor(time.time() - 5)
    assert (status, told["findings"]) == (0, []), told
