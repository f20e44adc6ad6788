# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Real connections between hosts: listen for a moment on one, connect from the others, and judge what came of it.

A listener greets with one line, `gpu-fleet-reach NAME ADDRESS`: its own name, and the address under which it sees whoever
connected. So a second host with the same address, and address translation in between, show. Then it takes BULK bytes and
sends as many back: a path that drops full-sized packets (a switch with a smaller MTU than both hosts, with the ICMP that would
say so filtered) lets connections open and then hangs, which is how it meets a model's first all-reduce.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import selectors
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

GREETING = "gpu-fleet-reach"
BULK = 256 * 1024  # bytes each way: many full-sized packets, also of jumbo frames
_TOGETHER = 64  # connections at a time

# What may come of a connection.
CONNECTED, REFUSED, SILENCE, NO_WAY, STALLED = "connected", "refused", "silence", "no way", "stalled"


# --- Listening --------------------------------------------------------------------------------------------------


def bind(address: str, ports: Iterable[int]) -> Tuple[List[socket.socket], List[int]]:
    """Listening sockets on those ports that are free, and the ports that are not (somebody listens there already)."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sockets, taken = [], []
    for port in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        # Connections of the run before may wait in TIME_WAIT; a socket that listens is still refused.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen(128)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
            taken.append(port)
        else:
            sockets.append(listener)
    return sockets, taken


def serve(sockets: Sequence[socket.socket], name: str, seconds: float) -> None:
    """Greet and echo until the time is up; each connection has a thread and ends with it."""
    end = time.monotonic() + seconds
    with selectors.DefaultSelector() as ready:
        for listener in sockets:
            ready.register(listener, selectors.EVENT_READ)
        while (left := end - time.monotonic()) > 0:
            for key, _events in ready.select(left):
                try:
                    connection, peer = key.fileobj.accept()  # type: ignore[union-attr]
                except OSError:
                    continue
                threading.Thread(target=_greet, args=(connection, name, peer[0], seconds), daemon=True).start()


def _greet(connection: socket.socket, name: str, peer: str, seconds: float) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(seconds)
        connection.sendall(f"{GREETING} {name} {peer}\n".encode())
        if _take(connection, BULK) == BULK:
            connection.sendall(b"\0" * BULK)


def _take(connection: socket.socket, size: int) -> int:
    """Read up to so many bytes; fewer when the other side ended."""
    got = 0
    while got < size:
        part = connection.recv(min(65536, size - got))
        if not part:
            break
        got += len(part)
    return got


def detach(sockets: Sequence[socket.socket], name: str, seconds: float, pid_file: str) -> int:
    """Serve in a process of its own that nobody waits for; it ends by itself. Returns its process id."""
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        with os.fdopen(reader) as said:
            return int(said.read())
    os.setsid()
    if child := os.fork():
        os.write(writer, str(child).encode())
        os._exit(0)
    # Whoever started this reads its output to the end: nothing of theirs may stay open.
    null = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(null, handle)
    os.close(writer)
    os.close(reader)
    signal.alarm(int(seconds) + 5)
    with contextlib.suppress(OSError):
        _write(pid_file, f"{os.getpid()} {start_time(os.getpid())}\n")
    try:
        serve(sockets, name, seconds)
    finally:
        os._exit(0)


def stop(pid_file: str) -> bool:
    """End the process of `detach`, if it is still that one (process ids come again). True when there was one."""
    try:
        with open(pid_file, encoding="ascii") as handle:
            pid, began = handle.read().split()
        os.unlink(pid_file)
        if start_time(int(pid)) != began:
            return False
        os.kill(int(pid), signal.SIGTERM)
    except (OSError, ValueError):
        return False
    return True


def start_time(pid: int) -> str:
    """When a process began, in the kernel's ticks (field 22 of /proc/PID/stat, proc(5))."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as handle:
        return handle.read().rpartition(")")[2].split()[19]


def _write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    with open(path, "w", encoding="ascii") as handle:
        handle.write(text)


# --- Connecting -------------------------------------------------------------------------------------------------


def connect_all(
    targets: Sequence[Mapping[str, Any]], source: Optional[str], seconds: float, bulk: bool
) -> List[Dict[str, Any]]:
    """Every target ({host, address, port, ours}), all at once: a drop takes the whole time, which is then the time of all."""

    with ThreadPoolExecutor(_TOGETHER) as pool:
        return list(pool.map(lambda target: {**target, **connect(target, source, seconds, bulk)}, targets))


def connect(target: Mapping[str, Any], source: Optional[str], seconds: float, bulk: bool) -> Dict[str, Any]:
    """What comes of one connection: outcome, and name and seen from the greeting of a listener of ours."""
    result: Dict[str, Any] = {"outcome": CONNECTED, "name": None, "seen": None, "error": None}
    try:
        connection = socket.create_connection(
            (target["address"], target["port"]), seconds, (source, 0) if source else None
        )
    except TimeoutError:
        return {**result, "outcome": SILENCE}
    except ConnectionRefusedError:
        return {**result, "outcome": REFUSED}
    except OSError as error:
        # Python 3.9 raises socket.timeout, which is TimeoutError only from 3.10 on.
        silent = isinstance(error, socket.timeout)
        return {**result, "outcome": SILENCE if silent else NO_WAY, "error": error.strerror or str(error)}
    with connection:
        if not target.get("ours"):
            return result  # somebody's own service: not a byte is sent to it
        connection.settimeout(seconds)
        try:
            words = _line(connection).split()
            if len(words) != 3 or words[0] != GREETING:
                return {**result, "error": "no greeting"}
            result.update(name=words[1], seen=words[2])
            if bulk:
                connection.sendall(b"\0" * BULK)
                if _take(connection, BULK) != BULK:
                    result["outcome"] = STALLED
        except OSError:
            result["outcome"] = STALLED
    return result


def _line(connection: socket.socket) -> str:
    text = b""
    while not text.endswith(b"\n") and len(text) < 512:
        part = connection.recv(1)
        if not part:
            break
        text += part
    return text.decode("ascii", "replace")


# --- What to prove ----------------------------------------------------------------------------------------------


def proof(plan: Mapping[str, Any], host: str) -> Dict[str, Any]:
    """Ports of ranks to listen on here, and those of the peers to connect to, by the plan of the fleet.

    Two of each replica stand for all: where its ranks meet (rank_store), and the first of the range that the kernel hands
    out. Both are in the one opening of the ranks; a firewall of somebody else may know only one of them.
    """
    ports: List[int] = []
    targets: List[Dict[str, Any]] = []
    for instance, replica in plan["replicas"].items():
        hosts = replica.get("ray_hosts") or replica["hosts"]
        if host not in hosts:
            continue
        ports += _rank_ports(plan, host, instance)
        for peer in hosts:
            if peer != host:
                address = plan["addresses"][peer]
                targets += [
                    {"host": peer, "address": address, "port": port} for port in _rank_ports(plan, peer, instance)
                ]
    unique = {(item["host"], item["port"]): item for item in targets}
    return {"ports": sorted(set(ports)), "targets": list(unique.values())}


def _rank_ports(plan: Mapping[str, Any], host: str, instance: str) -> List[int]:
    opening = next(item for item in plan["hosts"][host]["openings"] if item["name"] == f"{instance} ranks")
    first = [int(text.partition("-")[0]) for text in opening["ports"] if "-" in text]
    return [plan["replicas"][instance]["ports"]["rank_store"], *first[-1:]]


# --- Judging ----------------------------------------------------------------------------------------------------


def judge_peers(
    host: str,
    address: str,
    interface: Optional[str],
    results: Iterable[Mapping[str, Any]],
    obstacles: Mapping[str, Any],
) -> List[str]:
    """One sentence for each way to a peer that does not work; empty when all do. `obstacles` {host: text to add}."""
    told: Dict[Tuple[str, str, str], List[int]] = {}
    for item in results:
        reason = _peer_fault(address, interface, item)
        if reason:
            told.setdefault((item["host"], item["address"], reason), []).append(item["port"])
    sentences = []
    for (peer, there, reason), ports in told.items():
        numbers = ", ".join(map(str, sorted(set(ports))))
        more = f" {obstacles[peer]}" if obstacles.get(peer) else ""
        sentences.append(f"{host} ({address}) to {peer} ({there}), port {numbers}: {reason}{more}")
    return sentences


def _peer_fault(address: str, interface: Optional[str], item: Mapping[str, Any]) -> Optional[str]:
    outcome, peer = item["outcome"], item["host"]
    if outcome == CONNECTED and item["name"] not in (None, peer):
        return f"{item['name']} answered, not {peer}: two hosts have the same address. Give each its own."
    if outcome == CONNECTED and item["seen"] and _plain(item["seen"]) != _plain(address):
        return (
            f"{peer} sees {item['seen']}: the address is translated on the way, or packets leave by another interface. "
            "Peers let in fleet_address alone."
        )
    if outcome == REFUSED and not item.get("ours"):
        return None  # the host itself answers; nobody listens there yet
    return {
        CONNECTED: None,
        SILENCE: (
            "no answer: packets are dropped on the way there or back. Look at the firewalls of both hosts and of the network "
            f"between them{f' (interface {interface})' if interface else ''}."
        ),
        REFUSED: "refused, although somebody listens: a firewall on the way rejects, or another host has the address.",
        NO_WAY: f"{item['error']}. The networks of the two do not meet: correct fleet_address or the routes.",
        STALLED: (
            "small packets pass, full-sized ones do not: something on the way has a smaller MTU than the hosts. Set one MTU on "
            "hosts and switches, or a smaller one on the hosts."
        ),
    }[outcome]


def judge_stranger(results: Iterable[Mapping[str, Any]], openings: Iterable[Mapping[str, Any]]) -> List[str]:
    """One sentence for each port of ranks that let a stranger in. Its address is what the listener saw."""
    sentences = []
    for item in results:
        if item["outcome"] not in (CONNECTED, STALLED) or not item["seen"]:
            continue
        if not _let_in(item["seen"], item["port"], openings):
            sentences.append(
                f"{item['host']} ({item['address']}), port {item['port']}: a connection from {item['seen']}, which is no peer, was let "
                "in. Whoever reaches this port can run code in the server."
            )
    return sentences


def _let_in(seen: str, port: int, openings: Iterable[Mapping[str, Any]]) -> bool:
    """Whether an opening means to let this address in on this port."""
    for opening in openings:
        spans = (str(text).partition("-") for text in opening["ports"])
        if any(int(low) <= port <= int(high or low) for low, _, high in spans):
            sources = opening["from"]
            if "any" in sources or any(_plain(seen) in ipaddress.ip_network(item, strict=False) for item in sources):
                return True
    return False


def _plain(text: str) -> Any:
    """An address, out of `::ffff:10.0.0.1` the IPv4 one."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address
