"""A replica played in a second-by-second simulation: units as systemd runs them, ranks as vLLM behaves, agents, a network.

What is played of vLLM was measured: the head meets each worker's connection once; when one side ends, the other may end
or hang for ever; a rank that comes back alone never gets in again; /health says nothing of all that.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import agent_rules as rules

RESTART_SEC = 5
START_TIMEOUT = 180
PROBE_EVERY, DEADLINE = 5, 10
_numbers = itertools.count(1)


class Server:
    """One run of a rank."""

    def __init__(self, now: float, takes: float) -> None:
        self.began, self.takes = now, takes
        self.met: dict[int, Server] = {}  # head: rank to worker; worker: {0: head}
        self.alive, self.hung = True, False
        self.ready = False  # the unit's poller saw it answer once

    def loaded(self, now: float) -> bool:
        return now - self.began >= self.takes


class Host:
    """A machine with one rank, its unit and its agent."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.up, self.back_at = True, 0.0
        self.cut = False
        self.full = False
        self.phase, self.since = rules.DOWN, 0.0
        self.invocation, self.auto = "", False
        self.server: Server | None = None
        self.memory: rules.Memory | None = None
        self.paused = False
        self.enabled = True
        self.starts: list[tuple[float, str]] = []
        self.actions: list[tuple[float, str, str]] = []
        self.fails = 0  # starts that will crash
        self.open = self.gated = False  # the firewall's table is away; its gate refused the last start
        self.load = False
        self.gpu: str | None = ""  # what takes its GPUs out
        self.mark = ""
        self.agent_back_at = 0.0
        self.agent_starts()

    # -- agent ---------------------------------------------------------------------------------------------------------

    def agent_starts(self) -> None:
        settings = rules.Settings(self.rank, self.world.ranks, spans=self.world.spans)
        self.judge = rules.Judge(settings, self.memory and rules.Memory.load(self.memory.dump()))
        self.judge.m.boot = self.judge.m.boot or str(next(_numbers))
        self.peers = {rank: rules.Peer() for rank in self.judged}
        self.probe: rules.Probe | None = None
        self.probing: float | None = None
        self.next_probe = 0.0
        self.told: dict = {}

    @property
    def judged(self) -> range | tuple[int]:
        if self.rank:
            return (0,)
        return range(1, self.world.ranks)

    @property
    def agent_up(self) -> bool:
        return self.up and self.world.now >= self.agent_back_at

    def unit(self) -> rules.Unit:
        if self.server and self.world.session_works(self, False):
            self.server.ready = True
        ready = self.phase == rules.UP and self.server is not None and self.server.ready
        return rules.Unit(self.phase, self.invocation, ready, self.enabled, self.auto, gated=self.gated)

    def agent_step(self) -> None:
        now = self.world.now
        for rank in self.judged:
            other = self.world.hosts[rank]
            if other.agent_up and other.told and not (other.cut or self.cut):
                self.peers[rank] = rules.Peer(now, dict(other.told))
            elif other.up and not other.agent_up and not (other.cut or self.cut):
                self.peers[rank] = replace(self.peers[rank], refused=now)
        self.probe_step()
        head = self.world.hosts[0]
        api = now if self.rank and head.up and head.server and not (head.cut or self.cut) else None
        self.api = api or getattr(self, "api", None)
        room = 0 if self.full else 1 << 40
        api = self.api if self.rank else None
        gpu = {"gpu": self.gpu, "gpu_mark": self.mark}
        seen = rules.World(now, self.unit(), self.peers, self.probe, room, self.paused, api, **gpu)
        action = self.judge.step(seen)
        if action.kind != "none":
            self.actions.append((now, action.kind, action.reason))
        if action.kind in ("kill", "stop"):
            self.stop(kill=True)
            self.judge.acted(self.unit())
        elif action.kind == "start":
            self.start(auto=False)
        self.memory = self.judge.m
        self.told = self.judge.told(replace(seen, unit=self.unit()))

    def probe_step(self) -> None:
        if self.rank or not self.server or (not self.unit().ready and self.probing is None):
            self.probing = None
            return
        now, works = self.world.now, self.world.session_works(self, True)
        if self.probing is None and now >= self.next_probe:
            self.probing = now
        if self.probing is None:
            return
        counters = now if works else 7.0
        if works and not self.load:
            self.probe = rules.Probe(self.invocation, self.probing, now, True, True, counters)
            self.probing, self.next_probe = None, now + PROBE_EVERY
        elif now - self.probing >= DEADLINE:
            self.probe = rules.Probe(self.invocation, self.probing, now, False, False, counters)
            self.probing, self.next_probe = None, now

    # -- systemd ---------------------------------------------------------------------------------------------------------

    def start(self, auto: bool) -> None:
        if self.phase in rules.ALIVE:
            return
        self.phase, self.since, self.auto, self.gated = rules.COMING, self.world.now, auto, False
        self.invocation = f"{self.rank}-{next(_numbers)}"
        self.starts.append((self.world.now, "auto" if auto else "asked"))

    def end_server(self) -> None:
        if self.server:
            self.server.alive = False
        self.server = None

    def stop(self, kill: bool = False) -> None:
        self.end_server()
        self.phase, self.since = rules.DOWN, self.world.now

    def crash(self) -> None:
        self.end_server()
        if self.phase in rules.ALIVE:
            self.phase, self.since = rules.BETWEEN, self.world.now

    def reboot(self, seconds: float) -> None:
        self.end_server()
        self.phase, self.up, self.back_at = rules.DOWN, False, self.world.now + seconds
        self.memory = None  # /run is gone
        self.invocation = ""

    def unit_step(self) -> None:
        now = self.world.now
        if not self.up:
            if now >= self.back_at:
                self.up = True
                self.agent_starts()
                self.start(auto=False)  # enabled at boot
            return
        if self.phase == rules.BETWEEN and now - self.since >= RESTART_SEC:
            self.start(auto=True)
        elif self.phase == rules.UP and self.server and not self.unit().ready and now - self.since > START_TIMEOUT:
            self.crash()
        elif self.phase == rules.COMING and now - self.since >= 1:
            self.gated = self.open
            if self.open:
                self.crash()
                return
            if self.full or self.fails:
                self.fails = max(0, self.fails - 1)
                self.crash()
                return
            self.phase = rules.UP
            self.server = Server(now, self.world.random.choice((8, 20, 60)))

    # -- vLLM ------------------------------------------------------------------------------------------------------------

    def server_step(self) -> None:
        server, world = self.server, self.world
        if not server:
            return
        if self.rank:
            head = world.hosts[0]
            if 0 not in server.met and head.server and not (head.cut or self.cut) and self.rank not in head.server.met:
                server.met[0] = head.server
                head.server.met[self.rank] = server
        for other in server.met.values():
            if not other.alive and not server.hung:
                if world.random.random() < 0.5:
                    self.crash()
                    return
                server.hung = True


class World:
    def __init__(self, ranks: int, seed: int = 0, spans: bool = True) -> None:
        self.ranks, self.now, self.spans = ranks, 0.0, spans
        self.random = random.Random(seed)
        self.hosts = [Host(self, rank) for rank in range(ranks)]
        for host in self.hosts:
            host.start(auto=False)

    def session_works(self, head: Host, through: bool) -> bool:
        """Whether the head's session is whole: all workers met, loaded, alive. through: and the network lets it by."""
        server = head.server
        if head.rank:
            return bool(server and 0 in server.met and server.met[0].alive)
        if not server or server.hung or not server.loaded(self.now) or len(server.met) < self.ranks - 1:
            return False
        if through and self.ranks > 1 and any(host.cut for host in self.hosts):
            return False
        return all(met.alive and not met.hung and met.loaded(self.now) for met in server.met.values())

    @property
    def serves(self) -> bool:
        return self.session_works(self.hosts[0], True)

    def step(self) -> None:
        self.now += 1.0
        order = list(self.hosts)
        self.random.shuffle(order)
        for host in order:
            host.unit_step()
        for host in order:
            if host.up:
                host.server_step()
        for host in order:
            if host.up and host.agent_up:
                if host.agent_back_at and host.agent_back_at > self.now - 1:
                    host.agent_starts()
                host.agent_step()

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.step()

    def until_serves(self, most: float) -> float:
        """Seconds until it serves; fails when it does not within so many."""
        began = self.now
        while not self.serves:
            assert self.now - began < most, self.story()
            self.step()
        return self.now - began

    def story(self) -> str:
        lines = [f"now {self.now}"]
        for host in self.hosts:
            lines.append(
                f"rank {host.rank}: {host.phase} {host.invocation} waiting {host.judge.waiting!r} {host.judge.m}"
            )
            lines += [f"  {when:.0f} {kind}: {reason}" for when, kind, reason in host.actions[-12:]]
        return "\n".join(lines)
