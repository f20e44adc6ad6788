"""From lines of logs to the first cause: what failed, where, the line that says it, what to do, what cannot be told.

Pure: signatures, tables and lines come as arguments, an answer goes back. Read are any number of sources (log_lines.py says which
shapes), found are signatures (signatures.py), and judged is as follows.

- A line counts with its level: errors, tracebacks and the kernel always, warnings and notes only for the signatures that ask.
- What a failure leaves behind (an engine that reports its worker, a peer that lost its partner, systemd) is never a cause.
- A symptom, such as a timeout, is named only where nothing explains it; a cause that explains another takes its lines as evidence.
- What a start warned of and survived is none: the server came up afterwards in the same run.
- Among what remains the first in time comes first, over all hosts; what was recovered from comes last.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Deque, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import log_lines
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.findings import did_you_mean
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.log_lines import Line
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.signatures import (
    DIGITS,
    BadSignature,
    Book,
    Signature,
    fill,
)

RING = 300  # raw lines of a source that are kept for looking back
AHEAD = 60  # raw lines after a hit that still belong to it
KEEP_FIRST, KEEP_LAST = 10, 4  # hits of one signature on one host that are kept, the rest is counted
LONGEST = 1200  # letters of a line that evidence quotes
GAP = 7200.0  # seconds without a hit after which the next one is another failure
MOST_ERRORS, MOST_SHAPES = 40, 20000
YEAR = 366 * 86400.0  # stamps below that have no year

READY = "Application startup complete"
# A run begins: vLLM's banner of the server and of the engine.
BEGINS = re.compile(r"vLLM API server version|Initializing an? (?:V1 )?LLM engine")
# A run is ended on purpose: by a signal, or by systemd.
STOPS = re.compile(r"shutdown triggered|received signal=SIG(?:TERM|INT)|^Shutting down|^Stopping .{0,30}(?:vLLM|vllm)")
UNIT_BEGINS = re.compile(r"^(?:Started|Starting) |Scheduled restart job")
VERSION = re.compile(r"vLLM API server version v?(\d+\.\d+\.\d+)|LLM engine \(v(\d+\.\d+\.\d+)")
# What a line has that says where a run stands, or how large it is.
MARKS = (
    *(READY, "LLM engine", "server version", "Scheduled restart", "Suppressed ", "world_size=", "hutting down"),
    *("shutdown triggered", "received signal=", "Stopping "),
)
# The line that ends a traceback.
EXCEPTION = re.compile(r"^\s*(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Timeout|Failure|Interrupt|Exit)\b(?::| *$)")
CODE = re.compile(r"\s+raise [A-Za-z_][\w.]*\(")
QUIET = re.compile(
    r"CancelledError|KeyboardInterrupt|SystemExit|BrokenPipeError|ConnectionResetError|ClientDisconnect|GeneratorExit"
)
THREAD = ("Exception in thread", "Exception ignored in", "never retrieved", "During handling of the above exception")
HEX = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|[0-9a-f]{12,}")
SUPPRESSED = re.compile(r"Suppressed (\d+) messages from ")
UNKNOWN = "unrecognised_error"
ENDS = ("end", "consequence")


class Marker(NamedTuple):
    """A line that says where a run stands: `begins`, `ready` or `stops`."""

    what: str
    line: Line


@dataclass
class Hit:
    """A signature in a line, with the lines around it until they are judged."""

    signature: Signature
    line: Line
    values: Dict[str, Any]
    before: List[Tuple[int, str]] = field(default_factory=list)
    after: List[Tuple[int, str]] = field(default_factory=list)
    support: List[Line] = field(default_factory=list)
    absorbed: List["Hit"] = field(default_factory=list)
    again: List["Hit"] = field(default_factory=list)
    pattern: Any = None
    time: Optional[float] = None
    uncaught: bool = False
    open: int = 0

    @property
    def id(self) -> str:
        return self.signature.id

    @property
    def strong(self) -> bool:
        return self.signature.kind == "cause"


@dataclass
class Source:
    """One input: its name, how many lines it has, and what is known of it as a whole."""

    name: str
    lines: int = 0
    unread: int = 0
    suppressed: int = 0
    kernel: bool = False
    # By host and unit: number of the last line that says that a completion was answered.
    served: Dict[Tuple[str, str], int] = field(default_factory=dict)
    ends_inside: bool = False


class Doctor:
    """Reads sources one after the other, then answers.

    book    compiled signatures
    tables  removed_flags: data/removed_flags.yml; flags: names that vLLM knows
    facts   what is known of hosts by name, '' for all: vllm (version), nvswitch (yes or no)
    """

    def __init__(
        self,
        book: Book,
        tables: Optional[Mapping[str, Any]] = None,
        facts: Optional[Mapping[str, Mapping[str, Any]]] = None,
    ) -> None:
        self.book = book
        self.tables = tables or {}
        self.facts: Dict[str, Dict[str, Any]] = {host: dict(known) for host, known in (facts or {}).items()}
        self.sources: List[Source] = []
        self.hits: Dict[Tuple[str, str], List[Hit]] = {}
        self.last: Dict[Tuple[str, str], Deque[Hit]] = {}
        self.counts: Dict[Tuple[str, str], int] = {}
        self.markers: List[Marker] = []
        self.errors: List[Hit] = []
        self.hosts: Dict[str, None] = {}
        self.ranks = 0
        self._parsed: Dict[Tuple[int, int], List[Line]] = {}
        self._dull: Set[str] = set()
        self._triggers = tuple(dict.fromkeys((*book.triggers, *MARKS, "xcept", "rror:")))
        self._quiet = tuple(dict.fromkeys((*book.quiet, *MARKS)))

    # Reading

    def read(self, name: str, lines: Iterable[str]) -> None:
        """Take in one source, line by line."""
        source = Source(name)
        self.sources.append(source)
        index = len(self.sources) - 1
        ring: Deque[Tuple[int, str]] = deque(maxlen=RING)
        waiting: List[Hit] = []
        number = -1
        for number, raw in enumerate(lines):
            ring.append((number, raw))
            if waiting:
                for hit in waiting:
                    hit.after.append((number, raw))
                    hit.open -= 1
                waiting = [hit for hit in waiting if hit.open > 0]
            # A line of the journal's own JSON is looked at by what it says: its other fields are long, and no two are the same.
            said = log_lines.message(raw) if raw[:1] == "{" else raw
            if '" 200' in said and "HTTP/" in said and " (" not in said[-8:]:
                if "completions" in said or "responses" in said:
                    source.served[log_lines.owner(raw)] = number
                continue
            shape = self._shape(said)
            if shape in self._dull:
                continue
            if said is raw and raw[:1] == "{" and log_lines.opaque(raw):
                # An array of bytes: its digits are its letters.
                self._take(raw, index, number, ring, waiting)
                continue
            words = self._quiet if log_lines.informs(said) else self._triggers
            if any(map(said.__contains__, words)):
                if log_lines.unread(raw):
                    source.unread += 1
                    continue
                dull = not self._take(raw, index, number, ring, waiting)
            else:
                dull = not ("data]" in raw or raw[:1] == "{") or not log_lines.unread(raw)
                source.unread += not dull
            if dull and len(self._dull) < MOST_SHAPES and len(shape) < 2000:
                self._dull.add(shape)
        source.lines = number + 1
        source.ends_inside = _inside(ring)

    def _shape(self, said: str) -> str:
        """What a line has in common with those that say the same: a day of journal says the same things over and over.

        Lines that differ in digits only, or in the names of requests, are judged once.
        """
        shape = said.translate(DIGITS)
        if shape not in self._dull and HEX.search(said):
            shape = HEX.sub("", said).translate(DIGITS)
        return shape

    def _take(self, raw: str, index: int, number: int, ring: Deque[Tuple[int, str]], waiting: List[Hit]) -> bool:
        """One line that may matter; whether another one, with other digits, may."""
        matters = False
        for line in log_lines.parse(raw, (index, number)):
            if line.host and line.host not in self.hosts:
                self.hosts[line.host] = None
            if line.kernel:
                self.sources[index].kernel = True
            matters |= self._mark(line, index)
            for signature in self.book.candidates(line.said):
                if not signature.applies(line.level, line.kernel, line.program):
                    continue
                if signature.kind == "note" and self.counts.get((signature.id, line.host), 0) >= KEEP_FIRST:
                    continue  # it is told once, however often it was said
                matters = True
                found = signature.match(line.said)
                if found:
                    self._keep(Hit(signature, line, found.groupdict(), pattern=found.re), ring, waiting)
            if line.level in ("", "error") and EXCEPTION.search(line.said) and not QUIET.search(line.said):
                matters = True
                if len(self.errors) < MOST_ERRORS:
                    error = self._timed(Hit(_NONE, line, {}), ring)
                    error.before = list(ring)[:-1]
                    self.errors.append(error)
        return matters

    def _mark(self, line: Line, index: int) -> bool:
        """Note what a line says of the run; whether it says anything."""
        said = line.said
        if line.program != "systemd" and not any(map(said.__contains__, MARKS)):
            return False
        what = ""
        if READY in said:
            what = "ready"
        elif STOPS.search(said):
            what = "stops"
        elif BEGINS.search(said) or (
            line.program == "systemd" and "vllm" in line.unit + said and UNIT_BEGINS.search(said)
        ):
            what = "begins"
        if what and len(self.markers) < 5000:
            self.markers.append(Marker(what, line))
        found = VERSION.search(said)
        if found:
            self.facts.setdefault(line.host, {}).setdefault("vllm", found.group(1) or found.group(2))
        found = SUPPRESSED.search(said)
        if found:
            self.sources[index].suppressed += int(found.group(1))
        if "world_size=" in said:
            found = re.search(r"world_size=(\d+)", said)
            self.ranks = max(self.ranks, int(found.group(1)) if found else 0)
            return True
        return bool(what or found)

    def _keep(self, hit: Hit, ring: Deque[Tuple[int, str]], waiting: List[Hit]) -> None:
        key = (hit.id, hit.line.host)
        self.counts[key] = self.counts.get(key, 0) + 1
        kept = self.hits.setdefault(key, [])
        if len(kept) < KEEP_FIRST:
            kept.append(hit)
        else:
            self.last.setdefault(key, deque(maxlen=KEEP_LAST)).append(hit)
            if self.counts[key] > 50:
                # Thousands of the same: what stands around each is not looked at any more.
                self._timed(hit, ring)
                return
        self._timed(hit, ring)
        hit.before = list(ring)[:-1]
        hit.open = AHEAD
        waiting.append(hit)

    def _timed(self, hit: Hit, ring: Deque[Tuple[int, str]]) -> Hit:
        """A line without a stamp happened when the nearest one above it did."""
        hit.time = hit.line.time
        if hit.time is None:
            for number, raw in list(ring)[-40:][::-1]:
                stamped = [line.time for line in log_lines.parse(raw, (0, number)) if line.time is not None]
                if stamped:
                    hit.time = stamped[-1]
                    break
        return hit

    # Judging

    def answer(self) -> Dict[str, Any]:
        """What was found.

        Returns findings, first cause first: cause_id, severity, host, evidence (lines), cause, fix, confidence, and beside those
        time, source, line, hosts, count, recovered; notes: what looks alarming and is none; unknown: what these lines cannot tell and
        the command that would; read: lines, hosts, unread messages.
        """
        hits = [
            *(hit for kept in self.hits.values() for hit in kept),
            *(h for kept in self.last.values() for h in kept),
        ]
        self._year(hits)
        for hit in hits:
            self._look_around(hit)
        hits = [hit for hit in hits if self._counts(hit)]
        hits.sort(key=_order)
        notes = [hit for hit in hits if hit.signature.kind == "note"]
        hits = [hit for hit in hits if hit.signature.kind != "note" and not self._survived(hit, hits)]
        ends = [hit for hit in hits if hit.signature.kind in ENDS and not self._stopped(hit)]
        told = [hit for hit in hits if hit.signature.kind in ("cause", "symptom")]
        groups = [(self._explained(failure), self._recovered(failure, ends)) for failure in self._failures(told)]
        groups.sort(key=lambda group: group[1])
        if not groups:
            groups = [(self._unrecognised(ends), False), (self._healed(ends), True)]
        chosen = [hit for group, _ in groups for hit in group]
        findings = self._findings(groups, ends)
        return {
            "findings": findings,
            "notes": [
                {"note_id": name, "evidence": hit.line.text[:LONGEST], "meaning": hit.signature.cause}
                for name, hit in {h.id: h for h in reversed(notes)}.items()
            ],
            "unknown": self._unknown(chosen, ends),
            "read": {
                "lines": sum(source.lines for source in self.sources),
                "unread": sum(source.unread for source in self.sources),
                "hosts": list(self.hosts),
                "sources": [source.name for source in self.sources],
            },
        }

    def _year(self, hits: Sequence[Hit]) -> None:
        """Stamps without a year get the one that the others have."""
        times = [hit.time for hit in (*hits, *self.errors) if hit.time is not None and hit.time > YEAR]
        times += [mark.line.time for mark in self.markers if mark.line.time is not None and mark.line.time > YEAR]
        if not times:
            return
        year = 1970 + int(min(times) // 31556952)
        start = log_lines.seconds(year, 1, 1, 0, 0, 0) or 0.0
        for hit in (*hits, *self.errors):
            if hit.time is not None and hit.time < YEAR:
                hit.time += start

    def _lines(self, source: int, number: int, raw: str) -> List[Line]:
        """A raw line parsed, once for all signatures that look at it."""
        known = self._parsed.get((source, number))
        if known is None:
            known = self._parsed[(source, number)] = log_lines.parse(raw, (source, number))
        return known

    def _look_around(self, hit: Hit) -> None:
        if hit.signature.near:
            hit.support = self._near(hit, hit.signature.near)
        if hit.line.level == "" and not hit.line.kernel:
            hit.uncaught = self._uncaught(hit)

    def _near(self, hit: Hit, patterns: Sequence["re.Pattern[str]"]) -> List[Line]:
        """The lines around a hit, of its process and its run, that hold a pattern; of each pattern the nearest above, else below."""
        found: Dict[int, Line] = {}
        source = hit.line.place[0]

        def look(line: Line) -> None:
            other = line.process and hit.line.process and line.process != hit.line.process
            if (other and hit.signature.scope != "host") or (line.host and line.host != hit.line.host):
                return
            for index, pattern in enumerate(patterns):
                if index not in found and pattern.search(line.said):
                    found[index] = line

        look(hit.line)
        for number, raw in reversed(hit.before):
            lines = self._lines(source, number, raw)
            for line in reversed(lines):
                look(line)
            if any(BEGINS.search(line.said) for line in lines):
                break
        for number, raw in hit.after:
            lines = self._lines(source, number, raw)
            if any(BEGINS.search(line.said) for line in lines):
                break
            for line in lines:
                look(line)
        return sorted(found.values(), key=lambda line: line.place)

    def _uncaught(self, hit: Hit) -> bool:
        """Whether the line ends a traceback that no logger printed and no thread swallowed: the process ended with it."""
        for place in range(len(hit.before) - 1, max(-1, len(hit.before) - 151), -1):
            raw = hit.before[place][1]
            if "Traceback (most recent call last)" in raw:
                above = hit.before[place - 1][1] if place else ""
                level = [line.level for line in self._lines(hit.line.place[0], hit.before[place][0], raw)]
                return level == [""] and not any(word in above or word in raw for word in THREAD)
        return False

    def _counts(self, hit: Hit) -> bool:
        """Whether what stands near it, what is known of its host, and its own values let the signature count."""
        signature = hit.signature
        known = {**self.facts.get("", {}), **self.facts.get(hit.line.host, {})}
        if not signature.stands(known):
            return False
        often = self.counts.get((hit.id, hit.line.host), 1)
        if often < signature.least and hit.line.level in ("info", "warning"):
            return False
        if signature.near and not hit.support:
            return False
        if signature.far and self._near(hit, signature.far):
            return False
        if signature.judge:
            values = JUDGES[signature.judge](hit, self.tables)
            if values is None:
                return False
            hit.values.update(values)
        return True

    def _marks(self, hit: Hit, what: str) -> List[Line]:
        """The markers of a kind that concern the unit and host of a hit."""
        return [
            mark.line
            for mark in self.markers
            if mark.what == what
            and mark.line.place[0] == hit.line.place[0]
            and mark.line.host == hit.line.host
            and (not mark.line.unit or not hit.line.unit or mark.line.unit == hit.line.unit)
        ]

    def _served(self, hit: Hit) -> int:
        """Number of the last line in which the server of a hit answered a completion."""
        known = self.sources[hit.line.place[0]].served.items()
        line = hit.line
        return max(
            (
                at
                for (host, unit), at in known
                if host == line.host and (not unit or not line.unit or unit == line.unit)
            ),
            default=-1,
        )

    def _survived(self, hit: Hit, hits: Sequence[Hit]) -> bool:
        """Whether the server came up after it, in the same run: then it was no reason not to."""
        if hit.signature.phase != "start" or hit.uncaught or hit.line.kernel or hit.signature.kind in ENDS:
            return False
        source, number = hit.line.place
        ups = [line.place[1] for line in self._marks(hit, "ready") if line.place[1] > number]
        served = self._served(hit)
        if served > number:
            ups.append(served)
        if not ups:
            return False
        up = min(ups)
        ended = (hit.line.host, source)
        if any(
            other.signature.kind in ENDS
            and (other.line.host, other.line.place[0]) == ended
            and number <= other.line.place[1] < up
            for other in hits
        ):
            return False
        soft = hit.line.level in ("warning", "info")
        return soft or not any(number < line.place[1] < up for line in self._marks(hit, "begins"))

    def _stopped(self, hit: Hit) -> bool:
        """Whether the run was being ended on purpose: what its processes then say of each other is no failure."""
        number = hit.line.place[1]
        stops = [line.place[1] for line in self._marks(hit, "stops") if line.place[1] < number]
        return bool(stops) and not any(stops[-1] < line.place[1] < number for line in self._marks(hit, "begins"))

    def _failures(self, told: Sequence[Hit]) -> List[List[Hit]]:
        """Hits that belong together: a new failure begins after a recovery, or after hours of silence."""
        out: List[List[Hit]] = []
        for hit in told:
            last = out[-1][-1] if out else None
            if last is not None and last.time is not None and hit.time is not None and hit.time - last.time > GAP:
                last = None
            if last is not None and self._up_again(last, hit):
                last = None
            if last is None:
                out.append([])
            out[-1].append(hit)
        return out

    def _up_again(self, hit: Hit, until: Optional[Hit] = None) -> bool:
        """Whether the unit began anew after a hit and got ready, before the other one."""
        source, number = hit.line.place
        last = until.line.place[1] if until is not None and until.line.place[0] == source else float("inf")
        if until is not None and until.line.place[0] != source:
            return False
        begun = [line.place[1] for line in self._marks(hit, "begins") if line.place[1] > number]
        return bool(begun) and any(begun[0] < line.place[1] < last for line in self._marks(hit, "ready"))

    def _recovered(self, failure: Sequence[Hit], ends: Sequence[Hit]) -> bool:
        latest = {(hit.line.host, hit.line.unit): hit for hit in failure}
        return all(self._up_again(hit) for hit in latest.values())

    def _explained(self, failure: Sequence[Hit]) -> List[Hit]:
        """One hit a cause, without what another explains; causes first, in the order of time."""
        first: Dict[str, Hit] = {}
        owner_of = _owners(failure)
        for hit in failure:
            if owner_of[hit.line.place] is not hit.signature:
                continue
            known = first.setdefault(hit.id, hit)
            if _code(known) and not _code(hit) and hit.line.place[0] == known.line.place[0]:
                # What the exception says, not the code that raised it.
                known = first[hit.id] = hit
                continue
            # The same cause in other words tells more than the same words again.
            if hit.pattern not in [known.pattern, *(other.pattern for other in known.again)]:
                known.again.append(hit)
                said = {name: value for name, value in known.values.items() if value}
                known.values = {**hit.values, **said}
        gone: Dict[str, str] = {}
        for name, hit in first.items():
            for other in hit.signature.over:
                if other in first and other not in _chain(gone, name):
                    gone.setdefault(other, name)
        causes = [h for h in first.values() if h.strong and h.signature.severity == "error" and h.id not in gone]
        for name, hit in first.items():
            if hit.strong or name in gone:
                continue
            for cause in causes:
                between = [
                    line for line in self._marks(hit, "begins") if hit.line.place < line.place < cause.line.place
                ]
                if not between:
                    gone[name] = cause.id
                    break
        for name in gone:
            first[_chain(gone, name)[-1]].absorbed.append(first[name])
        left = [hit for name, hit in first.items() if name not in gone]
        return sorted(left, key=lambda hit: hit.signature.severity != "error")

    def _unrecognised(self, ends: Sequence[Hit]) -> List[Hit]:
        """A failure that no signature knows: its first exception, or the word of its end when not even that is there."""
        for error in self.errors:
            error.uncaught = self._uncaught(error) if error.line.level == "" else False
        ended = [hit for hit in ends if not self._up_again(hit)]
        echoes = {hit.line.place for hit in ends}
        own = [
            error
            for error in self.errors
            if error.line.place not in echoes
            and (error.uncaught or ended)
            and not [line for line in self._marks(error, "ready") if line.place > error.line.place]
            and self._served(error) < error.line.place[1]
        ]
        if own:
            own.sort(key=_order)
            return [Hit(_UNRECOGNISED, own[0].line, {"said": own[0].line.said.strip()[:200]}, time=own[0].time)]
        named = self._explained([hit for hit in ended if hit.signature.kind == "end"])
        if named:
            return named[:1]
        if ended:
            return [Hit(_NOT_HERE, ended[0].line, {}, time=ended[0].time)]
        return []

    def _healed(self, ends: Sequence[Hit]) -> List[Hit]:
        """An end whose cause is nowhere, of a server that came back: told as over."""
        return self._explained([hit for hit in ends if hit.signature.kind == "end" and self._up_again(hit)])[:1]

    # Answering

    def _findings(self, groups: Sequence[Tuple[List[Hit], bool]], ends: Sequence[Hit]) -> List[Dict[str, Any]]:
        out: List[Dict[str, Any]] = []
        names: Dict[str, Dict[str, Any]] = {}
        for group, recovered in groups:
            for place, hit in enumerate(group):
                if hit.id in names:
                    continue
                hosts = [host for name, host in self.counts if name == hit.id and host]
                made = {
                    "cause_id": hit.id,
                    "severity": hit.signature.severity,
                    "host": hit.line.host,
                    "evidence": "\n".join(_evidence(hit)),
                    "cause": fill(hit.signature.cause, hit.values),
                    "fix": fill(hit.signature.fix, hit.values),
                    "confidence": self._confidence(hit, place, ends),
                    "time": _stamp(hit.time),
                    "source": self.sources[hit.line.place[0]].name,
                    "line": hit.line.place[1] + 1,
                    "hosts": hosts,
                    "count": sum(n for (name, _), n in self.counts.items() if name == hit.id) or 1,
                    "recovered": recovered,
                }
                names[hit.id] = made
                out.append(made)
        return out

    def _confidence(self, hit: Hit, place: int, ends: Sequence[Hit]) -> str:
        if hit.id in (UNKNOWN, _NOT_HERE.id) or hit.signature.kind == "end" or hit.line.level in ("warning", "info"):
            return "low"
        if place or not hit.strong:
            return "medium"
        return "high"

    def _unknown(self, chosen: Sequence[Hit], ends: Sequence[Hit]) -> List[Dict[str, str]]:
        """What these lines cannot tell, each with the command that would."""
        out: List[Dict[str, str]] = []
        if not chosen and not ends:
            return out
        values = {**(chosen[0].values if chosen else {}), "unit": _unit([*chosen, *ends])}
        for hit in chosen:
            out += [{"what": fill(a["what"], values), "command": fill(a["command"], values)} for a in hit.signature.ask]
        unit = values["unit"]
        doubtful = [hit for hit in chosen if not hit.strong or hit.id in (UNKNOWN, _NOT_HERE.id)]
        if (doubtful or not chosen) and not any(source.kernel for source in self.sources):
            what = "whether the kernel killed a process or the driver reported an Xid: no kernel line is among these"
            out.append(
                {
                    "what": what,
                    "command": "journalctl -k -b -o short-iso | grep -E 'oom-kill|Killed process|NVRM: Xid|segfault'",
                }
            )
        if doubtful and self.ranks > 1 and len(self.hosts) < 2 and len(self.sources) < 2:
            what = f"what the other ranks said ({self.ranks} in all): the first cause may be on another host"
            out.append(
                {"what": what, "command": f"journalctl -u '{unit}' -b -o short-iso    # on every host of the replica"}
            )
        left = sum(source.unread for source in self.sources)
        if left:
            what = f"what {left} message{'s' if left > 1 else ''} said that the journal's output left out"
            out.append({"what": what, "command": f"journalctl -a -u '{unit}' -b -o json"})
        dropped = sum(source.suppressed for source in self.sources)
        if dropped:
            what = f"what {dropped} messages said that journald dropped by its rate limit"
            out.append(
                {
                    "what": what,
                    "command": f"systemctl edit '{unit}'    # LogRateLimitIntervalSec=0 under [Service], then start again",
                }
            )
        if any(source.ends_inside for source in self.sources):
            what = "how the last traceback ends: the log stops inside it"
            out.append({"what": what, "command": f"journalctl -u '{unit}' -b -n 400 -o short-iso"})
        unique = {(entry["what"], entry["command"]): entry for entry in out}
        return list(unique.values())


def _code(hit: Hit) -> bool:
    """Whether the line is code that a traceback shows under a frame."""
    return bool(CODE.match(hit.line.said))


def _chain(gone: Mapping[str, str], name: str) -> List[str]:
    """A cause and those that explain it, each the one before; two that explain each other make no circle."""
    out = [name]
    while out[-1] in gone and gone[out[-1]] not in out:
        out.append(gone[out[-1]])
    return out


def _owners(hits: Sequence[Hit]) -> Dict[Tuple[int, int], Signature]:
    """One line has one cause: a cause before a symptom, one that is over others before those, else the one that asks for most."""
    by_line: Dict[Tuple[int, int], List[Signature]] = {}
    for hit in hits:
        by_line.setdefault(hit.line.place, []).append(hit.signature)
    out = {}
    for place, signatures in by_line.items():
        over = {name for signature in signatures for name in signature.over}
        left = [signature for signature in signatures if signature.id not in over] or signatures
        out[place] = min(left, key=lambda signature: (signature.kind != "cause", signature.severity != "error"))
    return out


def _unit(hits: Iterable[Hit]) -> str:
    for hit in hits:
        if "vllm" in hit.line.unit:
            return hit.line.unit
        found = re.search(r"[\w@.:-]*vllm[\w@.:-]*\.service", hit.line.text)
        if found:
            return found.group(0)
    return "vllm@*"


def _stamp(time: Optional[float]) -> Optional[str]:
    """ISO 8601 in UTC; a stamp that had no year keeps none."""
    if time is None:
        return None
    import datetime

    told = datetime.datetime.fromtimestamp(time, datetime.timezone.utc)
    return told.strftime("%m-%d %H:%M:%S" if time < YEAR else "%Y-%m-%dT%H:%M:%SZ")


def _order(hit: Hit) -> Tuple[float, int, int, int, int]:
    time = hit.time if hit.time is not None else 0.0
    return (time, *hit.line.place, 0 if hit.signature.near else 1, hit.signature.place)


def _evidence(hit: Hit) -> List[str]:
    """What led to it, the line itself, and what followed from it."""
    lines = {line.place: line for line in hit.support[:4]}
    lines[hit.line.place] = hit.line
    for other in hit.again[:4]:
        lines.setdefault(other.line.place, other.line)
    for other in hit.absorbed[:4]:
        lines.setdefault(other.line.place, other.line)
        for line in other.support[:1]:
            lines.setdefault(line.place, line)
    return [_cut(lines[place].text) for place in sorted(lines)]


def _cut(text: str) -> str:
    text = text.strip()
    return text if len(text) <= LONGEST else text[:LONGEST] + " [...]"


def _inside(ring: Sequence[Tuple[int, str]]) -> bool:
    """Whether a log stops in a traceback: its last line is a frame or the code under one."""
    last = [raw for _, raw in ring if raw.strip()][-1:]
    return bool(last) and bool(
        re.search(r'Traceback \(most recent call last\):\W*$|^.*  File \\?"[^"]+", line \d+, in \S+\W*$', last[0])
    )


# Judges: what a pattern cannot see. Each gets a hit and the tables; None says that the signature does not count.


def _flags(hit: Hit) -> List[str]:
    """Options that argparse refused, without dashes and values."""
    return [
        word.lstrip("-").split("=")[0].replace("_", "-") for word in hit.values["args"].split() if word.startswith("--")
    ]


def removed_flag(hit: Hit, tables: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
    removed = tables.get("removed_flags") or {}
    flags = [flag for flag in _flags(hit) if flag in removed]
    if not flags:
        return None
    told = removed[flags[0]]
    return {"flag": f"--{flags[0]}", "gone": told["gone_in"], "instead": told["instead"]}


def strange_flag(hit: Hit, tables: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
    if removed_flag(hit, tables):
        return None
    flags = _flags(hit)
    known = tables.get("flags") or ()
    meant = did_you_mean(flags[0], known) if flags and known else ""
    return {"flag": f"--{flags[0]}" if flags else hit.values["args"][:60], "meant": meant}


def _gib(text: Optional[str]) -> Optional[float]:
    """`896.00 MiB` in GiB."""
    found = re.match(r"([\d.]+) ?([KMGT])i?B", text or "")
    if not found:
        return None
    return float(found.group(1)) * {"K": 2.0**-20, "M": 2.0**-10, "G": 1.0, "T": 1024.0}[found.group(2)]


def others_hold(hit: Hit, tables: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
    """Of an out-of-memory line: whether other processes hold a good part of the GPU, by torch's own numbers.

    `Process N has X` may be this process seen from inside a PID namespace, so only what torch itself allocated and reserved counts as
    its own, with 3 GiB or an eighth of the card for context, NCCL and graphs.
    """
    if "total" not in hit.values or hit.values["total"] is None:
        return {}
    said = hit.line.said
    total, free = _gib(hit.values["total"]), _gib(hit.values["free"])
    own = re.search(r"([\d.]+ [KMGT]i?B) (?:is )?allocated by PyTorch", said) or re.search(
        r"([\d.]+ [KMGT]i?B) already allocated", said
    )
    if total is None or free is None or own is None:
        return None
    reserved = re.search(r"([\d.]+ [KMGT]i?B) is reserved by PyTorch but unallocated", said)
    this = re.search(r"this process has ([\d.]+ [KMGT]i?B) memory in use", said)
    mine = (_gib(own.group(1)) or 0.0) + ((_gib(reserved.group(1)) or 0.0) if reserved else 0.0)
    if this:
        mine = max(mine, _gib(this.group(1)) or 0.0)
    foreign = total - free - mine
    if foreign < max(3.0, total / 8):
        return None
    return {"others": f"{foreign:.1f} GiB"}


def oom_limit(hit: Hit, tables: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
    """Whose limit the out-of-memory killer acted for, where the line says so."""
    said = hit.line.said
    unit = "MEMCG" in said or "Memory cgroup" in said
    host = "constraint=CONSTRAINT_NONE" in said or ("ut of memory: Killed" in said and not unit)
    return {"where": "the memory limit of its unit or container" if unit else "the host's memory" if host else None}


# Where vLLM looks at what it was told: one module for all of it until 0.9, a package since.
SETTINGS = re.compile(r'File \\?"[^"]*/vllm/(?:config(?:\.py|/)|engine/arg_utils\.py|platforms/)')
SAYS_ITSELF = re.compile(r"validation errors? for|Value error, |NotImplementedError: .*(?:support|implement)")


def settings_refused(hit: Hit, tables: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
    """Of an exception: whether vLLM's own look at its settings raised it, by the last frame above it."""
    if SAYS_ITSELF.search(hit.line.said):
        return {}
    for _, raw in list(hit.before)[:-13:-1]:
        if 'File "' in raw or 'File \\"' in raw:
            return {} if SETTINGS.search(raw) else None
    return None


JUDGES = {
    "settings_refused": settings_refused,
    "oom_limit": oom_limit,
    "removed_flag": removed_flag,
    "strange_flag": strange_flag,
    "others_hold": others_hold,
}


def ready(book: Book) -> Book:
    """The same book; raises BadSignature when a signature asks for a judge that is not here."""
    for signature in book.signatures.values():
        if signature.judge and signature.judge not in JUDGES:
            raise BadSignature(f"{signature.family}: {signature.id}: judge {signature.judge} is not there")
    return book


def _own(name: str, cause: str, fix: str) -> Signature:
    """A signature that no file has, for what is found by other means."""
    none: Tuple[Any, ...] = ()
    return Signature(
        name,
        "symptom",
        "",
        none,
        none,
        none,
        none,
        frozenset(),
        "",
        "",
        "",
        frozenset(),
        "",
        {},
        "error",
        cause,
        fix,
        none,
        "",
        0,
    )


_NONE = _own("", "", "")
_UNRECOGNISED = _own(
    UNKNOWN,
    "No known cause is in these lines. The first error is: {said}",
    "Read what stands above that line; run again with VLLM_LOGGING_LEVEL=DEBUG if it says too little, and compare with the release's issues.",
)
_NOT_HERE = _own(
    "cause_not_in_these_lines",
    "The server ended, but these lines hold only its last words, not the reason.",
    "Give more of the log: everything from the start of the unit on, of all hosts of the replica, with the kernel's lines.",
)
