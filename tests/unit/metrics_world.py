"""A Prometheus of its own on loopback, for tests: real rules, a real node exporter, and what servers and agents said once.

Prometheus and the node exporter are Debian's (gpu_fleet/debian.py). Replayed are: /metrics of a real vLLM (fixtures/metrics), the numbers
of a recorded GPU host, and those of an agent as its own code writes them.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request

import yaml
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import agent, host_metrics, monitoring
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data
from conftest import REPOSITORY
from gpu_fleet import debian

VLLM = REPOSITORY / "tests" / "unit" / "fixtures" / "metrics" / "vllm-0.32.0-cpu.txt"
KNOWN = {name: data.load(name) for name in ("metrics", "recordings", "alerts", "thresholds")}
SAYS = {
    "phase": "up",
    "held": "",
    "restarts": 1,
    "restarts_without_answer": 0,
    "limit_reached": False,
    "answers": True,
    "probe": {"right": True, "seconds": 0.2},
    "peers": {},
    "instance": "chat.0",
    "service": "chat",
    "rank": 0,
}
GPU = [
    ("gpu_fleet_host_metrics_time_seconds", {}, 1e9),
    ("gpu_fleet_gpu_memory_bytes", {"gpu": "0"}, 1 << 37),
    ("gpu_fleet_gpu_memory_used_bytes", {"gpu": "0"}, 1 << 30),
    ("gpu_fleet_gpu_utilization_ratio", {"gpu": "0"}, 0.5),
    ("gpu_fleet_gpu_temperature_celsius", {"gpu": "0"}, 40),
    ("gpu_fleet_gpu_power_watts", {"gpu": "0"}, 300),
    ("gpu_fleet_gpu_throttled", {"gpu": "0", "reason": "thermal"}, 0),
    ("gpu_fleet_gpu_ecc_uncorrected", {"gpu": "0"}, 1),
    ("gpu_fleet_gpu_nvlink_errors", {"gpu": "0", "kind": "crc"}, 0),
    ("gpu_fleet_xid_events", {"pci": "0000:1b:00.0", "xid": "79"}, 1),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Pages(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        page = self.server.pages.get(self.path.split("?")[0])
        # Who asked may have gone. A traceback in this thread is more than noise: Python 3.11 parses lines for it, and its parser fails
        # where another thread parses at the same moment.
        with contextlib.suppress(ConnectionError):
            self.send_response(200 if page else 404)
            self.end_headers()
            self.wfile.write((page or "").encode())

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(pages):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    server.pages = pages
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def running(*command, log):
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def query(url, expression):
    """What Prometheus answers: a list of (labels, value). Raises urllib.error.HTTPError where it refuses the query."""
    words = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{url}/api/v1/query?{words}", timeout=30) as answer:
        told = json.loads(answer.read())
    return [(entry["metric"], float(entry["value"][1])) for entry in told["data"]["result"]]


@contextlib.contextmanager
def prometheus(folder, plan, settings):
    """The address of a Prometheus that has seen the fleet of the plan, all of it played by this machine."""
    from test_monitoring_files import settings as role_settings

    texts, node_port, port = folder / "texts", free_port(), free_port()
    texts.mkdir()
    (texts / "gpu_fleet.prom").write_text(host_metrics.page(GPU))
    pages = {"/vllm": VLLM.read_text(), "/agent": agent.metrics(SAYS, 0)}
    with serving(pages) as page_port:
        told = role_settings(folder, **{"interval": "1s", "listen": "127.0.0.1", "prometheus_port": port, **settings})
        hosts = {name: {"address": "127.0.0.1", "groups": ["gpu_hosts"]} for name in list(plan["hosts"])[:1]}
        made = monitoring.files(plan, KNOWN, hosts, told)
        for job, where in (("vllm", page_port), ("vllm_agent", page_port), ("node", node_port)):
            for entry in made[f"targets/{job}.json"]:
                entry["targets"] = [f"127.0.0.1:{where}"]
        for config in made["prometheus.yml"]["scrape_configs"]:
            config["metrics_path"] = {"vllm": "/vllm", "vllm_agent": "/agent"}.get(config["job_name"], "/metrics")
        (folder / "targets").mkdir()
        for name, content in made.items():
            (folder / name).write_text(json.dumps(content) if name.endswith("json") else yaml.safe_dump(content))
        node = debian.program("prometheus-node-exporter", "prometheus-node-exporter")
        server = debian.program("prometheus", "prometheus")
        with (
            running(
                node,
                f"--web.listen-address=127.0.0.1:{node_port}",
                f"--collector.textfile.directory={texts}",
                log=folder / "node.log",
            ),
            running(
                server,
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
                log=folder / "prometheus.log",
            ),
        ):
            url = f"http://127.0.0.1:{port}"
            end = time.monotonic() + 120
            # Rates need two looks, rules of rules a few rounds.
            while True:
                with contextlib.suppress(OSError):
                    seen = "gpu_fleet:service_ttft_seconds:p95 and on (service) gpu_fleet:service_replicas_right == 2"
                    if query(url, seen) and query(url, 'ALERTS{alertstate="firing",alertname="EccErrors"}'):
                        break
                assert time.monotonic() < end, (folder / "prometheus.log").read_text()[-2000:]
                time.sleep(0.5)
            yield url
