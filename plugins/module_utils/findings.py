"""A finding: a named fact that is wrong, where it was seen, and what to do about it."""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass
from typing import Any, Dict, Iterable, List


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    id       stable name of the kind of fault, such as `port-taken`
    where    what it is about: a service, a host, a variable
    message  what was seen, with the value
    fix      what to do about it
    severity error, warning or info
    """

    id: str
    where: str
    message: str
    fix: str
    severity: str = "error"

    def __str__(self) -> str:
        return f"{self.where}: {self.message}. {self.fix}"

    def as_dict(self) -> Dict[str, Any]:
        return asdict(self)


def report(findings: Iterable[Finding]) -> str:
    """All findings as one numbered text, the way an error message shows them."""
    found = list(findings)
    head = f"{len(found)} thing{'s' if len(found) != 1 else ''} wrong in the inventory; no host was touched:"
    return "\n".join([head] + [f"  {number}. {finding}" for number, finding in enumerate(found, 1)])


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.7) -> str:
    """`Did you mean X? ` for the nearest known word, or nothing; cutoff is difflib's, 1 for equal words."""
    near: List[str] = difflib.get_close_matches(str(word), [str(k) for k in known], n=1, cutoff=cutoff)
    return f"Did you mean {near[0]}? " if near else ""
