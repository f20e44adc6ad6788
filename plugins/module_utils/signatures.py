"""Signatures of failures: from the data of data/signatures to something that finds them in a line, fast. Pure, no YAML.

A signature is a mapping:
  id          name of the cause, as answers give it
  kind        cause (default); symptom: named only where no cause explains it; end: what remains of a failure, named only where
              nothing else is found; consequence: the same, never named; note: looks alarming, means nothing
  patterns    regular expressions, one of which the line has to hold; each needs a piece of fixed text of four letters or more
  not         regular expressions that the line must not hold
  with        regular expressions, one of which a line of the same process near by has to hold (they become evidence)
  without     regular expressions that no such line may hold
  levels      further levels of lines it is looked for in: warning, info. Errors, tracebacks and the kernel are always read
  scope       host: lines of other processes of the host count for `with` and `without` too
  only        kernel: lines of the kernel alone; systemd: of systemd alone
  judge       name of a function of diagnosis.py that looks at the values of the line
  over        ids that this one explains when both are found
  phase       start: a server that comes up afterwards, in the same run, shows that it was none
  when        what has to hold, as far as it is known, for it to count: vllm, [lowest, first without]; nvswitch, true or false
  least       how often lines of level info or warning have to say it on a host; what an error says counts at once
  severity    error (default), warning
  cause, fix  sentences; {name} is filled in from the pattern's group of that name, {name|else} says what stands there
              without one, and {: name|} puts what is before the name there with it
  ask         what these lines cannot tell and the command that would: a list of {what, command}
  source      where the message comes from
  example     {fires: a log, silent: one that looks like it}
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Collection, Dict, FrozenSet, Iterable, List, Mapping, Optional, Pattern, Sequence, Tuple

try:  # Python 3.11 moved the parser of expressions
    from re import _constants, _parser  # type: ignore[attr-defined]
except ImportError:
    import sre_constants as _constants
    import sre_parse as _parser

SHORTEST = 4
KNOWN = {
    *("id", "kind", "patterns", "not", "with", "without", "levels", "scope", "only", "judge", "over", "phase", "when"),
    *("least", "severity", "cause", "fix", "ask", "source", "example"),
}
KINDS = ("cause", "symptom", "end", "consequence", "note")
DIGIT = "\0"  # stands for a digit in a fixed text
DIGITS = str.maketrans("", "", "0123456789")

# What lines that matter have in common, by which most others are passed over at once. Whatever a signature needs and none of
# these is in, is added when signatures are compiled, so that nothing depends on this list but speed.
COMMON = (
    "rror",
    "xcept",
    "ail",
    "annot",
    "ould not",
    "ot found",
    "No such",
    "enied",
    "imed out",
    "imeout",
    "nvalid",
    "upported",
    "nable",
    "illed",
    "fault",
    "NCCL WARN",
    "NVRM",
    "ivisible",
    "emory",
    "status=",
    "efused",
    "nrecognized",
    "xpired",
    "arning",
)


class BadSignature(ValueError):
    """A signature that cannot be used; says which and why."""


@dataclass(frozen=True)
class Signature:
    """One, ready to be looked for."""

    id: str
    kind: str
    family: str
    patterns: Tuple[Pattern[str], ...]
    unless: Tuple[Pattern[str], ...]
    near: Tuple[Pattern[str], ...]
    far: Tuple[Pattern[str], ...]
    levels: FrozenSet[str]
    scope: str
    only: str
    judge: str
    over: FrozenSet[str]
    phase: str
    when: Mapping[str, Any]
    severity: str
    cause: str
    fix: str
    ask: Tuple[Mapping[str, str], ...]
    source: str
    place: int
    needs: Tuple[Any, ...] = ()
    least: int = 1

    def match(self, text: str) -> Optional["re.Match[str]"]:
        """Where one of the patterns stands in this line; None when none does, or when something speaks against it."""
        for pattern in self.patterns:
            found = pattern.search(text)
            if found:
                return None if any(other.search(text) for other in self.unless) else found
        return None

    def may(self, shape: str) -> bool:
        """Whether the fixed text of one of the patterns is in a line without digits."""
        return any(all(any(word in shape for word in clause) for clause in needed) for needed in self.needs)

    def applies(self, level: str, kernel: bool, program: str) -> bool:
        if self.only == "kernel":
            return kernel
        if self.only == "systemd":
            return program in ("systemd", "")
        return level in ("", "error") or level in self.levels

    def stands(self, facts: Mapping[str, Any]) -> bool:
        """Whether what is known of the host does not speak against it."""
        for name, wanted in self.when.items():
            known = facts.get(name)
            if known is None:
                continue
            if name == "vllm":
                lowest, first_without = wanted
                if (lowest and version(known) < version(lowest)) or (
                    first_without and version(known) >= version(first_without)
                ):
                    return False
            elif known != wanted:
                return False
        return True


@dataclass
class Book:
    """All signatures, and the words by which lines are chosen.

    triggers  a line without one of these holds no signature
    quiet     the same of lines whose level is info
    words     fixed text without digits, and the signatures that need it
    """

    signatures: Dict[str, Signature]
    triggers: Tuple[str, ...]
    quiet: Tuple[str, ...]
    words: Tuple[Tuple[str, Tuple[Signature, ...]], ...]
    _seen: Dict[str, Tuple[Signature, ...]] = field(default_factory=dict)

    def candidates(self, text: str) -> Tuple[Signature, ...]:
        """The signatures whose fixed text is in this line. Lines that differ in digits only are looked up once."""
        shape = text.translate(DIGITS)
        known = self._seen.get(shape)
        if known is None:
            found = {id(s): s for word, owners in self.words if word in shape for s in owners if s.may(shape)}
            known = tuple(sorted(found.values(), key=lambda s: s.place))
            if len(self._seen) < 20000 and len(shape) < 2000:
                self._seen[shape] = known
        return known


def version(text: Any) -> Tuple[int, ...]:
    """The numbers a version begins with: 0.9.1rc2 is (0, 9, 1)."""
    return tuple(int(part) for part in re.findall(r"\d+", str(text))[:3])


def compile_book(families: Mapping[str, Sequence[Mapping[str, Any]]]) -> Book:
    """Signatures by family (file) made ready. Raises BadSignature."""
    made: Dict[str, Signature] = {}
    words: Dict[str, List[Signature]] = {}
    for family in sorted(families):
        for entry in families[family]:
            signature = _signature(family, entry, len(made))
            if signature.id in made:
                raise BadSignature(f"{family}: {signature.id} is there twice")
            made[signature.id] = signature
            for pattern in signature.patterns:
                for word in fixed(pattern):
                    words.setdefault(word, []).append(signature)
    for signature in made.values():
        for name in signature.over:
            if name not in made:
                raise BadSignature(f"{signature.family}: {signature.id} is over {name}, which is not there")
    triggers = [word for word in COMMON if any(word in needed for needed in words)]
    triggers += _shortest_of({_piece(needed) for needed in words if not any(word in needed for word in COMMON)})
    told = [pattern for signature in made.values() if "info" in signature.levels for pattern in signature.patterns]
    quiet = _shortest_of({_piece(needed) for pattern in told for needed in fixed(pattern)})
    by_word: Dict[str, List[Signature]] = {}
    for word, owners in words.items():
        by_word.setdefault(word.replace(DIGIT, ""), []).extend(owners)
    return Book(made, tuple(triggers), tuple(quiet), tuple((word, tuple(owners)) for word, owners in by_word.items()))


def _shortest_of(pieces: Collection[str]) -> List[str]:
    """Those that no other one is in."""
    return sorted(a for a in pieces if not any(b in a for b in pieces if b != a))


def _piece(word: str) -> str:
    """The longest part of a fixed text that also stands in a line of JSON as it is: no digit, quote or backslash."""
    return max(re.split(r'[\0"\\\t]|[^ -~]', word), key=len)


def _signature(family: str, entry: Mapping[str, Any], place: int) -> Signature:
    name = entry.get("id", "?")
    unknown = sorted(set(entry) - KNOWN)
    if unknown:
        raise BadSignature(f"{family}: {name}: unknown {', '.join(unknown)}")
    kind = entry.get("kind", "cause")
    if kind not in KINDS:
        raise BadSignature(f"{family}: {name}: kind {kind}")

    def patterns(key: str) -> Tuple[Pattern[str], ...]:
        try:
            return tuple(re.compile(text) for text in entry.get(key) or ())
        except re.error as error:
            raise BadSignature(f"{family}: {name}: {key}: {error}") from error

    made = Signature(
        id=name,
        kind=kind,
        family=family,
        patterns=patterns("patterns"),
        unless=patterns("not"),
        near=patterns("with"),
        far=patterns("without"),
        levels=frozenset(entry.get("levels") or ()),
        scope=entry.get("scope", ""),
        only=entry.get("only", ""),
        judge=entry.get("judge", ""),
        over=frozenset(entry.get("over") or ()),
        phase=entry.get("phase", ""),
        when=entry.get("when") or {},
        severity=entry.get("severity", "error"),
        cause=entry.get("cause", ""),
        fix=entry.get("fix", ""),
        ask=tuple(entry.get("ask") or ()),
        source=entry.get("source", ""),
        place=place,
        least=entry.get("least", 1),
        needs=tuple(
            [[word.replace(DIGIT, "") for word in clause] for clause in clauses(pattern)]
            for pattern in patterns("patterns")
        ),
    )
    if not made.patterns:
        raise BadSignature(f"{family}: {name}: no patterns")
    for pattern in made.patterns:
        if any(len(_piece(word)) < SHORTEST for word in fixed(pattern)):
            raise BadSignature(f"{family}: {name}: no fixed text of {SHORTEST} letters in {pattern.pattern!r}")
    if not made.source or (kind in ("cause", "symptom", "end") and not (made.cause and made.fix)):
        raise BadSignature(f"{family}: {name}: cause, fix and source have to be there")
    return made


def fixed(pattern: Pattern[str]) -> List[str]:
    """Pieces of text without digits, one of which every line that matches has: the longest of each alternative."""
    return max(clauses(pattern), key=_shortest, default=[""])


def clauses(pattern: Pattern[str]) -> List[List[str]]:
    """All there is to know of a line that matches: of each of these lists, one piece of text is in it."""
    return [clause for clause in _clauses(_parser.parse(pattern.pattern)) if _shortest(clause)]


def _length(word: str) -> int:
    return len(word) - word.count(DIGIT)


def _shortest(clause: Sequence[str]) -> int:
    return min(map(_length, clause))


def _clauses(parsed: Iterable[Any]) -> List[List[str]]:
    out: List[List[str]] = []
    run = ""
    for operation, argument in parsed:
        if operation is _constants.LITERAL:
            # Digits are left out of the line that the text is looked for in, so the run goes on.
            run += DIGIT if chr(argument).isdigit() else chr(argument)
            continue
        if run:
            out.append([run])
            run = ""
        if operation is _constants.SUBPATTERN:
            out += _clauses(argument[-1])
        elif operation is _constants.BRANCH:
            best = [max(_clauses(branch), key=_shortest, default=[""]) for branch in argument[1]]
            out.append([word for words in best for word in words])
        elif operation in (_constants.MAX_REPEAT, _constants.MIN_REPEAT) and argument[0] >= 1:
            out += _clauses(argument[2])
    return [*out, [run]] if run else out


FIELD = re.compile(r"\{([^\w{}|]*)(\w+)(?:\|([^{}]*))?\}")


def fill(text: str, values: Mapping[str, Any]) -> str:
    """A sentence with what the line said in place of {name}.

    {name|else} has its own words for a line that did not say it; what stands before the name, as in {: name|}, goes with it.
    """

    def put(found: "re.Match[str]") -> str:
        value = values.get(found.group(2))
        return f"{found.group(1)}{value}" if value not in (None, "") else (found.group(3) or "")

    return FIELD.sub(put, text)
