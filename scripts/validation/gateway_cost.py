"""What the gateway costs: added latency and requests a second against direct, in one run on loopback; prints a table.

    .venv/bin/python scripts/validation/gateway_cost.py --haproxy /usr/sbin/haproxy [--requests 2000] [--connections 8]

The gateway runs with the role's own template, keys, maps and Lua; the replica behind it is a stand-in, another HAProxy that
answers at once. Requests of 1 KiB go directly and by the gateway (plain, and TLS as clients speak it) in turns, over
connections that are kept, so that whatever else the machine does meets all three alike.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import shlex
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jinja2
import yaml

ROOT = Path(__file__).resolve().parents[2]
ROLE = ROOT / "roles/gateway"
sys.path.insert(0, str(ROOT / "collections"))

KEY = "client-client-client-client-client"
REPLICA = """
global
  maxconn 4000
defaults
  mode http
  timeout client 60s
  timeout server 60s
  timeout connect 5s
frontend replica
  bind 127.0.0.1:{api}
  bind 127.0.0.1:{agent}
  http-request return status 200 content-type application/json string '{{"choices":[{{"text":" a"}}]}}'
"""
BODY = json.dumps({"prompt": "x" * 960, "model": "chat"}).encode()
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}


def free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def render(folder: Path, port: int, tls: bool, api: int, agent: int) -> Path:
    """The role's configuration and its maps, as the role would write them for one service with one replica."""
    from ansible_collections.gpu_fleet.vllm.plugins.module_utils import gateway

    plan = {
        "addresses": {"gpu-01": "127.0.0.1"},
        "services": {"chat": {"replicas": ["chat.0"], "served_model_names": ["chat"]}},
        "replicas": {"chat.0": {"service": "chat", "urls": {"gpu-01": ""}, "ports": {"api": api, "agent": agent}}},
    }
    settings = yaml.safe_load((ROLE / "defaults/main.yml").read_text())
    settings.update(gateway_tls=tls, gateway_port=port, gateway_addresses=["127.0.0.1"], gateway_concurrent=0)
    shown = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True)
    shown.filters["to_json"] = json.dumps
    text = shown.from_string((ROLE / "templates/haproxy.cfg.j2").read_text()).render(
        **settings,
        ansible_managed="scripts/validation/gateway_cost.py",
        __gateway_folder=folder,
        __gateway_run=folder,
        __gateway_state=folder / "servers",
        __gateway_backends=gateway.backends(plan, {}, 256),
        __gateway_bufsize=settings["gateway_body_max"] + 131072,
        __gateway_known="chat",
        __gateway_monitors=[],
        __gateway_externals=[],
    )
    keys = [{"name": "client", "key": KEY}]
    maps = {
        "keys": gateway.keys(keys, {"requests_per_minute": 0, "concurrent": 0}),
        "grants": gateway.grants(keys),
        "services": {"chat": "the-services-own-key"},
        "models": gateway.models(plan),
    }
    for name, entries in maps.items():
        (folder / f"{name}.map").write_text(gateway.map_text(entries))
    (folder / "models.json").write_text(json.dumps(gateway.model_list(plan)))
    for name in ("model.lua", "busy.http"):
        shutil.copy(ROLE / "files" / name, folder)
    if tls:
        made = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "1",
        ]
        made += ["-subj", "/CN=localhost", "-keyout", str(folder / "key"), "-out", str(folder / "crt")]
        subprocess.run(made, check=True, capture_output=True)
        (folder / "tls.pem").write_text((folder / "crt").read_text() + (folder / "key").read_text())
    (folder / "haproxy.cfg").write_text(text)
    return folder / "haproxy.cfg"


def connect(way: tuple[int, bool]) -> http.client.HTTPConnection:
    port, tls = way
    if not tls:
        return http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    trusting = ssl.create_default_context()
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=trusting)


def once(link: http.client.HTTPConnection) -> float:
    """One request; how long it took (ms). Raises RuntimeError where it is not answered with 200."""
    began = time.perf_counter()
    link.request("POST", "/v1/completions", BODY, HEADERS)
    reply = link.getresponse()
    reply.read()
    if reply.status != 200:
        raise RuntimeError(f"status {reply.status}")
    return 1000 * (time.perf_counter() - began)


def crowd(arguments: tuple[tuple[int, bool], int]) -> None:
    way, count = arguments
    link = connect(way)
    for _ in range(count):
        once(link)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--haproxy", default="/usr/sbin/haproxy", help="the command that runs HAProxy")
    parser.add_argument("--requests", type=int, default=2000, help="of each way")
    parser.add_argument("--connections", type=int, default=8, help="at once, for requests a second")
    arguments = parser.parse_args()
    command = shlex.split(arguments.haproxy)
    print(subprocess.run([*command, "-v"], capture_output=True, text=True, check=True).stdout.splitlines()[0])
    api, agent = free(), free()
    ways = {"direct": (api, False), "gateway, plain": (free(), False), "gateway, TLS": (free(), True)}
    running = []
    with tempfile.TemporaryDirectory() as place:
        try:
            (Path(place) / "replica.cfg").write_text(REPLICA.format(api=api, agent=agent))
            configurations = [Path(place) / "replica.cfg"]
            for number, (port, tls) in enumerate(list(ways.values())[1:]):
                folder = Path(place) / str(number)
                folder.mkdir()
                configurations.append(render(folder, port, tls, api, agent))
            for path in configurations:
                running.append(subprocess.Popen([*command, "-db", "-f", str(path)], stderr=subprocess.DEVNULL))
            time.sleep(4)  # the first check of the replica's agent
            links = {name: connect(way) for name, way in ways.items()}
            took: dict[str, list[float]] = {name: [] for name in ways}
            for number in range(arguments.requests + 50):
                for name, link in links.items():
                    spent = once(link)
                    if number >= 50:
                        took[name].append(spent)
            rates = {name: [] for name in ways}
            share = max(1, arguments.requests // arguments.connections)
            with multiprocessing.Pool(arguments.connections) as pool:
                for _ in range(3):
                    for name, way in ways.items():
                        began = time.perf_counter()
                        pool.map(crowd, [(way, share)] * arguments.connections, chunksize=1)
                        rates[name].append(share * arguments.connections / (time.perf_counter() - began))
        finally:
            for process in running:
                process.kill()
                process.wait()
    print(
        f"\n| way | p50 ms | p99 ms | added p50 | added p99 | requests/s, {arguments.connections} at once |\n|---|---|---|---|---|---|"
    )
    first = None
    for name, spent in took.items():
        p50, p99 = statistics.median(spent), statistics.quantiles(spent, n=100)[98]
        first = first or (p50, p99)
        print(
            f"| {name} | {p50:.2f} | {p99:.2f} | {p50 - first[0]:.2f} | {p99 - first[1]:.2f} | {statistics.median(rates[name]):.0f} |"
        )


if __name__ == "__main__":
    main()
