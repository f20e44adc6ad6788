"""What an agent does about the rank that it watches: start, stop, kill or nothing, and why. Pure: no clock, file or network.

A replica's ranks live and die together: a rank that comes back alone never gets in again (measured). So each run of a
rank (systemd's InvocationID) belongs to runs of the others, its mates. Rank 0, the head, is the middle of a star:

* A worker that runs binds to the head's run that it sees first, or was started for, and says so. The head takes a
  worker that has bound to its own run as a mate. From then on either restarts when the other's run ends or changes.
* The head starts first, once all workers answer and none still runs with a former head. A worker starts once it sees a
  head's run that it has not left before. So any two of them meet again, in whatever order things come back.
* Only rank 0 counts, waits longer after each vain start, and stops at a limit: the workers follow it.

A rank whose GPU failed for good (agent_gpu.py) is taken out: killed, and not started again until the host has rebooted, or
somebody starts it, which is the word that it may. A new failure after that takes it out again.

What was stopped by somebody else (a unit that is down and that this agent does not hold) is never started. A rank that
does not answer is lost only when nothing else proves it there: for the head a right completion, which needs all ranks
(with data parallel ranks it does not: then that the host refuses the connection), for a worker the head's API.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Dict, List, Mapping, Optional

# Phases of a unit. up: it has a main process; coming: it is being started; ending: it is being stopped; between: it
# ended and systemd is about to start it again; down: nothing of it is there and systemd will not start it.
UP, COMING, ENDING, BETWEEN, DOWN = "up", "coming", "ending", "between", "down"
ALIVE = (UP, COMING)

FRESH = 6.0  # seconds that a peer's answer is taken for its present state
BEGIN = 30.0  # seconds that a start or the end of a killed unit may take before it is tried again
# An agent that itself wakes so many seconds late is on a host that starves its processes: no answer proves nothing then.
# Not for ever, since an engine that hangs and burns every core starves them, too.
LATE, STARVED_MOST = 2.0, 180.0
# So is a server whose processes all wait for a processor so much of the time. Others have them then, not an engine that hangs
# and burns them, so that it may last longer.
WAITING, WAITING_MOST = 0.5, 900.0
# Seconds between two starts that the firewall's gate refuses: whether it still does is known by trying alone.
GATED = 15.0
UNGUARDED = "the firewall does not guard its ports"
OUT = "It stays stopped until the host has rebooted or somebody starts it"
ROOM_GROWN = 256 << 20  # bytes by which room on the cache must have grown to be another chance


@dataclass(frozen=True)
class Settings:
    """Of one rank.

    lost_after      seconds without any sign of a peer, after which it is lost
    backoff         seconds from a failure to the next start; doubles with each start in vain, up to backoff_most
    limit, window   so many starts, none with a right completion, are the limit; a pause of window seconds ends the count
    spans           whether a completion proves that all ranks are there (not with data parallel ranks)
    room            bytes that must be free on the disk of the caches before a start
    """

    rank: int
    ranks: int
    lost_after: float = 15.0
    backoff: float = 5.0
    backoff_most: float = 300.0
    limit: int = 5
    window: float = 1800.0
    spans: bool = True
    room: int = 64 << 20


@dataclass(frozen=True)
class Unit:
    """A unit as the agent sees it. auto: this run was started by systemd's Restart=; said: how the last one ended;
    gated: the firewall's gate refused its last start."""

    phase: str
    invocation: str
    ready: bool = False
    enabled: bool = True
    auto: bool = False
    said: str = ""
    gated: bool = False


@dataclass(frozen=True)
class Peer:
    """What another rank's agent said last, and when (monotonic seconds); seen is None while it never answered.

    refused: when its host last refused the connection, which a host that is lost or cut off does not.
    """

    seen: Optional[float] = None
    state: Mapping[str, Any] = field(default_factory=dict)
    refused: Optional[float] = None


@dataclass(frozen=True)
class Probe:
    """One completion asked for. answered: the server said something, right or not; counters: sum of what
    moves in vLLM's own metrics while it works, after it."""

    invocation: str
    began: float
    ended: float
    right: bool
    answered: bool
    counters: Optional[float] = None
    problem: str = ""


@dataclass(frozen=True)
class World:
    """All that is known at one moment. api_seen: when the head's API last answered, for workers.

    late: seconds by which the agent's own turn came later than it should.
    waiting: share of the last seconds in which the unit's processes wanted a processor and none of them had one.
    gpu, gpu_mark: what takes its GPUs out, or empty; None as long as nobody looked. Another mark is another failure.
    """

    now: float
    unit: Unit
    peers: Mapping[int, Peer] = field(default_factory=dict)
    probe: Optional[Probe] = None
    room: Optional[int] = None
    paused: bool = False
    api_seen: Optional[float] = None
    late: float = 0.0
    waiting: float = 0.0
    gpu: Optional[str] = None
    gpu_mark: str = ""


@dataclass(frozen=True)
class Action:
    """kind: none, start, stop (cancel a pending start) or kill (end at once, without drain)."""

    kind: str = "none"
    reason: str = ""


@dataclass
class Hold:
    """This agent keeps its unit down. started: when it asked for a start that has not begun yet."""

    kind: str  # restart, limit or gpu
    reason: str
    since: float
    not_before: float
    invocation: str
    started: Optional[float] = None
    head: str = ""
    room: Optional[int] = None


@dataclass
class Story:
    """A restart from what was seen to the first right answer."""

    seen: str
    at: float
    starts: int = 0


@dataclass
class Memory:
    """What an agent must not forget when it is restarted itself. A reboot ends it: `boot` then becomes another."""

    boot: str = ""
    invocation: str = ""
    mates: Dict[str, str] = field(default_factory=dict)
    left: str = ""
    hold: Optional[Hold] = None
    gated: bool = False  # until the gate lets a start pass
    restarts: List[float] = field(default_factory=list)  # since the last right completion
    total: int = 0
    answered: str = ""
    hand: int = 0
    lost: List[int] = field(default_factory=list)
    boots: Dict[str, str] = field(default_factory=dict)
    hands: Dict[str, int] = field(default_factory=dict)
    story: Optional[Story] = None
    last_story: str = ""
    excused: str = ""  # the mark of what its GPUs had when somebody started it all the same

    def dump(self) -> Dict[str, Any]:
        return asdict(self)

    @classmethod
    def load(cls, kept: Mapping[str, Any]) -> "Memory":
        """The memory as `dump` wrote it. Raises TypeError or ValueError for anything else."""
        memory = cls(**kept)
        memory.hold = Hold(**memory.hold) if isinstance(memory.hold, dict) else None
        memory.story = Story(**memory.story) if isinstance(memory.story, dict) else None
        return memory


class Judge:
    """The state machine of one rank. `step` once a second; `acted` after an action was carried out."""

    def __init__(self, settings: Settings, memory: Optional[Memory] = None) -> None:
        self.s = settings
        self.m = memory or Memory()
        self.lines: List[str] = []  # for the journal; the caller takes them
        self.waiting = ""
        self.streak = 0
        self._counters: Optional[float] = None
        self._last_probe = self._silent = self._starved = self._woke = float("-inf")
        self._starved_since: Optional[float] = None
        self._right_began: Optional[float] = None
        self._unstarted: Optional[Hold] = None  # what was said of it is not said again
        self._since: Dict[str, float] = {}  # how long something that is only borne for a while has been so

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self, w: World) -> Action:
        self._see_unit(w)
        self._see_load(w)
        self._see_peers(w)
        self._see_answers(w)
        phase = w.unit.phase
        if w.paused:
            if phase == DOWN:
                self.m.hold = None  # whoever works on it has stopped it, or will start it
            return Action()
        if phase == ENDING:
            return Action()
        if phase == DOWN:
            return self._down(w)
        if phase == BETWEEN:
            ended = f"its server ended ({w.unit.said})" if w.unit.said else "its server ended"
            return self._hold(w, "stop", self._out(w) or (UNGUARDED if w.unit.gated else ended))
        hold = self.m.hold
        if hold:  # killed, and still there
            return Action("kill", hold.reason) if w.now - hold.since > BEGIN else Action()
        reason = self._broken(w)
        return self._hold(w, "kill", reason) if reason else Action()

    def acted(self, unit: Unit) -> None:
        """The unit after a stop or kill was carried out: a run that systemd slipped in before is no new one."""
        if self.m.hold and unit.phase in (DOWN, ENDING):
            self.m.hold.invocation = self.m.invocation = unit.invocation

    # -- what is seen --------------------------------------------------------------------------------------------------

    def _see_unit(self, w: World) -> None:
        unit, m = w.unit, self.m
        if m.gated and unit.phase == UP:  # the start that came through is the one that counts
            m.gated = False
            self._count(w.now)
        if unit.invocation == m.invocation or not unit.invocation:
            return
        first, m.invocation = not m.invocation, unit.invocation
        if unit.phase == DOWN:
            if m.hold and m.hold.started is not None:
                # The start that was asked for began and was ended by somebody else between two turns. The head may have met it,
                # and the next run is another one.
                m.left, m.mates, m.hold = m.hold.head or m.left, {}, None
            return
        m.left = m.mates.get("0") or m.left
        m.mates = {}
        self.streak, self._right_began = 0, None
        hold, m.hold = m.hold, None
        if hold and hold.started is not None:
            if hold.head:
                m.mates["0"] = hold.head
        elif unit.auto:
            if not m.gated:
                self._count(w.now)
        elif not first:
            m.hand += 1
            m.gated = False
            m.restarts = []
            if w.gpu:
                m.excused = w.gpu_mark
            if hold:
                self.lines.append("started by somebody else: it is no longer held")

    def _see_load(self, w: World) -> None:
        """Whether this host starves its processes; it has got over that when there was no sign of it for a minute."""
        if w.late >= self.s.lost_after / 2:  # it stood still itself, and heard nobody meanwhile
            self._woke = w.now
        waits = w.waiting >= WAITING
        if w.late >= LATE or waits:
            self._starved_since = w.now if self._starved_since is None else self._starved_since
            if w.now - self._starved_since < (WAITING_MOST if waits else STARVED_MOST):
                self._starved = w.now
        elif self._starved_since is not None and w.now - max(self._starved, self._starved_since) > 60.0:
            self._starved_since = None

    def _see_peers(self, w: World) -> None:
        m, me, alive = self.m, str(self.s.rank), w.unit.phase in ALIVE
        for rank, peer in w.peers.items():
            name, said = str(rank), peer.state
            if peer.seen is not None and w.now - max(peer.seen, self._woke) >= self.s.lost_after and rank not in m.lost:
                m.lost.append(rank)
            if not self._fresh(w, rank):
                if peer.seen is not None:  # that no completion comes is its silence's doing, as long as it lasts
                    self._silent, self.streak = w.now, 0
                continue
            boot, hand = str(said.get("boot", "")), int(said.get("hand", 0))
            by_hand = m.hands.get(name, hand) != hand
            back = rank in m.lost or m.boots.get(name, boot) != boot or by_hand
            m.boots[name], m.hands[name] = boot, hand
            if rank in m.lost:
                m.lost.remove(rank)
            if back:
                self._anew(w, f"rank {rank} is back", wholly=by_hand)
            if not alive or said.get("phase") not in ALIVE or name in m.mates:
                continue
            theirs = said.get("mates", {})
            if self.s.rank == 0 and theirs.get("0") == w.unit.invocation:
                m.mates[name] = said["invocation"]
            if rank == 0 and said["invocation"] != m.left and theirs.get(me, w.unit.invocation) == w.unit.invocation:
                m.mates["0"] = said["invocation"]

    def _see_answers(self, w: World) -> None:
        m, probe, run = self.m, w.probe, w.unit.invocation
        if self.s.rank:
            head = w.peers.get(0, Peer()).state
            ours = head.get("mates", {}).get(str(self.s.rank)) == run
            if run and ours and head.get("answered") == m.mates.get("0") and m.mates.get("0"):
                self._answered(w)
        if probe is None or probe.ended <= self._last_probe or probe.invocation != run:
            return
        self._last_probe = probe.ended
        if probe.right:
            self.streak, self._right_began = 0, probe.began
            if self.s.rank == 0:
                self._answered(w)
        elif probe.answered or probe.began <= max(self._silent, self._starved):
            self.streak = 0
        elif self.streak and probe.counters is not None and probe.counters != self._counters:
            self.streak = 1  # it works for others: load is no death
        else:
            self.streak += 1
        self._counters = probe.counters

    def _answered(self, w: World) -> None:
        """The first right completion of this run ends the count and the story."""
        m = self.m
        if m.answered == w.unit.invocation:
            return
        m.answered, m.restarts = w.unit.invocation, []
        if m.story:
            starts = f"{m.story.starts} start{'s' if m.story.starts != 1 else ''}"
            m.last_story = f"healed: {m.story.seen}; {starts}; right answer {w.now - m.story.at:.0f} s later"
            self.lines.append(m.last_story)
            m.story = None

    # -- what is wrong with a run ------------------------------------------------------------------------------------------

    def _fresh(self, w: World, rank: int) -> bool:
        seen = w.peers.get(rank, Peer()).seen
        return seen is not None and w.now - seen <= FRESH

    def _gone(self, w: World, rank: int) -> str:
        """Why a peer counts as lost, or ''. One that never answered this agent is judged by nothing."""
        peer = w.peers.get(rank, Peer())
        seen = peer.seen
        if seen is None:
            return ""
        proof = w.api_seen if self.s.rank else self._right_began if self.s.spans else peer.refused
        silent = w.now - max(seen, proof if proof is not None else seen, self._woke)
        return f"rank {rank} has not answered for {w.now - seen:.0f} s" if silent >= self.s.lost_after else ""

    def _lasting(self, name: str, is_so: bool, now: float) -> bool:
        """Whether something has been so for as long as a peer may be silent."""
        if not is_so:
            self._since.pop(name, None)
            return False
        return now - self._since.setdefault(name, now) >= self.s.lost_after

    def _out(self, w: World) -> str:
        """Why its GPUs are out, unless somebody started it since."""
        return w.gpu if w.gpu and w.gpu_mark != self.m.excused else ""

    def _broken(self, w: World) -> str:
        if self._out(w):
            return self._out(w)
        others = (0,) if self.s.rank else range(1, self.s.ranks)
        for rank in others:
            reason = self._gone(w, rank)
            if not reason and self._fresh(w, rank):
                reason = self._lost_worker(w, rank) if rank else self._lost_head(w)
            if reason:
                return reason
        return "no answer twice and no progress in between" if self.streak >= 2 else ""

    def _lost_worker(self, w: World, rank: int) -> str:
        said, mate = w.peers[rank].state, self.m.mates.get(str(rank))
        blocked = said.get("blocked", "")
        if mate and said.get("phase") in (DOWN, BETWEEN):
            return f"rank {rank} is gone: {blocked or said.get('why') or 'its server ended'}"
        if mate and said.get("invocation") != mate:
            return f"rank {rank} was started anew"
        if mate and said.get("phase") == ENDING and self.s.spans:
            # A worker that is told to stop works no more, though it may take a while to end (measured): nothing comes any more.
            return f"rank {rank} is being stopped"
        if said.get("left") == w.unit.invocation:
            return f"rank {rank} left this run: {said.get('why') or 'its server ended'}"
        if self._lasting(f"blocked {rank}", bool(not mate and blocked), w.now):
            return f"rank {rank} will not start: {blocked}"
        return ""

    def _lost_head(self, w: World) -> str:
        said, mate = w.peers[0].state, self.m.mates.get("0")
        phase, theirs = said.get("phase"), said.get("mates", {}).get(str(self.s.rank))
        why = said.get("blocked") or said.get("why") or "its server ended"
        if mate and phase in (DOWN, BETWEEN):
            return f"the head is gone: {why}"
        if mate and said.get("invocation") != mate:
            return "the head was started anew"
        if phase in ALIVE and theirs and theirs != w.unit.invocation:
            return "the head runs with a former run of this rank"
        if phase in ALIVE and not mate and said.get("invocation") == self.m.left:
            return "the head still runs with what this rank left"
        if self._lasting("alone", not mate and phase in (DOWN, BETWEEN), w.now):
            return f"the head is not there: {why}"
        return ""

    # -- holding and starting ----------------------------------------------------------------------------------------------

    def _recent(self, now: float) -> int:
        """Starts in vain, one after the other; forgotten when the last is older than the window, however long each took."""
        if self.m.restarts and now - self.m.restarts[-1] > self.s.window:
            self.m.restarts = []
        return len(self.m.restarts)

    def _count(self, now: float) -> None:
        self.m.restarts.append(now)
        self.m.total += 1
        if self.m.story:
            self.m.story.starts += 1

    def _anew(self, w: World, reason: str, wholly: bool = True) -> None:
        """A new chance after the limit. wholly: starts in vain no longer count; else it is one start, or a rank that comes
        and goes for ever would never let the limit be reached."""
        self.m.restarts = [] if wholly else self.m.restarts[: self.s.limit - 1]
        if self.m.hold and self.m.hold.kind == "limit":
            self.m.hold.kind, self.m.hold.not_before = "restart", w.now
            self.lines.append(f"{reason}: it is started again after the limit")

    def _hold(self, w: World, kind: str, reason: str) -> Action:
        m = self.m
        if m.hold and m.hold.started is None:
            return Action(kind, m.hold.reason)
        again, m.gated = m.gated and w.unit.gated, w.unit.gated
        if not again and m.restarts and (m.gated or any(peer.state.get("gated") for peer in w.peers.values())):
            m.restarts.pop()  # what a gate refuses, here or there, is no start in vain
        vain = self._recent(w.now)
        limit = self.s.rank == 0 and vain >= self.s.limit
        delay = GATED if m.gated else min(self.s.backoff * 2.0 ** min(vain, 20), self.s.backoff_most)
        out, limit = bool(self._out(w)), limit and not self._out(w)
        sort = "gpu" if out else "limit" if limit else "restart"
        m.hold = Hold(sort, reason, w.now, w.now + delay, w.unit.invocation, room=w.room)
        head = w.peers.get(0, Peer()).state
        alive = self._fresh(w, 0) and head.get("phase") in ALIVE
        m.left = m.mates.get("0") or (str(head.get("invocation", "")) if alive else "") or m.left
        m.mates = {}
        self._since.clear()
        if m.story is None:
            m.story = Story(reason, w.now)
        if out:
            self.lines.append(f"OUT: {reason}. {OUT}")
            return Action(kind, reason)
        done = "killed" if kind == "kill" else "kept from starting alone"
        if m.gated:
            done = f"tried again every {GATED:.0f} s until it does"
        if not again:
            self.lines.append(f"{reason}: {done}")
        if limit:
            self.lines.append(
                f"LIMIT: {vain} starts without a right answer. It stays stopped until a lost rank is back or somebody starts it"
            )
        return Action(kind, reason)

    def _down(self, w: World) -> Action:
        m, hold = self.m, self.m.hold
        self.waiting = ""
        if hold is None:
            return Action()
        if self._stays_out(w, hold):
            self.waiting = hold.reason
            return Action()
        if hold.started is not None:
            if w.now - hold.started <= BEGIN:
                return Action()
            hold.started, hold.not_before = None, w.now + self.s.backoff
            if m.restarts:  # something that it needs did not start, Ray for one: no start in vain, but a wait
                m.restarts.pop()
            if hold is not self._unstarted:
                self.lines.append(f"systemd did not start it within {BEGIN:.0f} s: tried again until it does")
            self._unstarted = hold
        if hold.kind == "limit":
            low = hold.room is not None and hold.room < 4 * ROOM_GROWN
            if low and w.room is not None and w.room >= (hold.room or 0) + ROOM_GROWN:
                self._anew(w, "there is room on the cache again")
            else:
                self.waiting = "the limit is reached"
                return Action()
        self.waiting = self._not_able(w) or (self._waits_worker(w) if self.s.rank else self._waits_head(w))
        if self.waiting:
            return Action()
        hold.started = w.now
        head = w.peers.get(0, Peer()).state
        if self.s.rank and not m.gated:
            hold.head = str(head["invocation"])
        if not m.gated:
            self._count(w.now)
        m.left = m.left if self.s.rank else ""
        return Action("start", hold.reason)

    def _stays_out(self, w: World, hold: Hold) -> bool:
        """Whether a GPU keeps it down. An agent that was restarted itself has to look before it knows that none does any more."""
        if hold.kind != "gpu" and self._out(w):
            hold.kind, hold.reason, hold.started = "gpu", self._out(w), None
            self.lines.append(f"OUT: {hold.reason}. {OUT}")
        if hold.kind == "gpu" and w.gpu is not None and not self._out(w):
            hold.kind, hold.not_before = "restart", w.now
        return hold.kind == "gpu"

    def _not_able(self, w: World) -> str:
        if not w.unit.enabled:
            return "it is disabled"
        if w.room is not None and w.room < self.s.room:
            return f"{w.room >> 20} MiB are free on the disk of the caches, {self.s.room >> 20} MiB are wanted"
        return ""

    def _waits_head(self, w: World) -> str:
        for rank in range(1, self.s.ranks):
            if not self._fresh(w, rank):
                return f"rank {rank} does not answer"
            said = w.peers[rank].state
            if said.get("blocked"):
                return f"rank {rank}: {said['blocked']}"
            runs = said.get("phase") in (*ALIVE, ENDING, BETWEEN)
            if runs and (said.get("mates", {}).get("0") or said.get("phase") not in ALIVE):
                return f"rank {rank} still runs"
        if w.now < (self.m.hold.not_before if self.m.hold else w.now):
            return UNGUARDED if self.m.gated else "the wait after a failure"
        return ""

    def _waits_worker(self, w: World) -> str:
        if self.m.gated:  # alone, to see whether it comes through: the head waits until it does
            return UNGUARDED if self.m.hold and w.now < self.m.hold.not_before else ""
        if not self._fresh(w, 0):
            return "the head does not answer"
        said = w.peers[0].state
        if said.get("paused"):
            return "a play works on the head"
        if said.get("phase") not in ALIVE or said.get("gated"):
            return f"the head is not there: {said.get('blocked') or said.get('waiting') or 'it is about to start'}"
        if said.get("invocation") == self.m.left or said.get("mates", {}).get(str(self.s.rank)):
            return "the head still runs with a former run of this rank"
        return ""

    # -- what is told ----------------------------------------------------------------------------------------------------

    def blocked(self, w: World) -> str:
        """Why this rank would not start now, as far as it is not for the others' sake."""
        hold = self.m.hold
        if w.paused:
            return "a play works on it"
        if self.m.gated and (hold or w.unit.phase in (COMING, BETWEEN)):
            return UNGUARDED
        if w.unit.phase != DOWN:
            return ""
        if hold is None:
            return "stopped by an operator or a play"
        lasting = {"limit": "the limit of starts without a right answer is reached", "gpu": hold.reason}
        return lasting.get(hold.kind) or self._not_able(w)

    def told(self, w: World) -> Dict[str, Any]:
        """What peers need to know. Everything in it is public within the fleet."""
        m, hold = self.m, self.m.hold
        return {
            "rank": self.s.rank,
            "invocation": w.unit.invocation,
            "phase": w.unit.phase,
            "mates": dict(m.mates),
            "left": m.left,
            "blocked": self.blocked(w),
            "waiting": self.waiting if w.unit.phase == DOWN else "",
            "why": hold.reason if hold else "",
            "answered": m.answered,
            "paused": w.paused,
            "gated": m.gated and w.unit.phase != UP,
            "boot": m.boot,
            "hand": m.hand,
            "limit_reached": bool(hold and hold.kind == "limit"),
            "gpu_out": bool(hold and hold.kind == "gpu"),
            "restarts": m.total,
            "restarts_without_answer": self._recent(w.now),
        }
