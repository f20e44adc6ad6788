"""Limits as systemd spells them. Pure: standard library, Python 3.9 and newer, no Ansible import."""

from __future__ import annotations

import re
from typing import Any

INFINITE = "infinity"
INFINITY = -1  # as the kernel's RLIM_INFINITY reads, and as module_utils/units.py tells an unlimited one
# systemd.exec(5), "Process Properties": sizes with these suffixes, base 1024. Fractions and SOFT:HARD, which systemd
# takes as well, are left out: limits.conf cannot say the same.
_SIZE = re.compile(r"([1-9][0-9]*)([KMGTPE]?)")
_LARGEST = 2**63 - 1
SPELLINGS = "Write bytes, a number with K, M, G or T (base 1024, such as 64G), or infinity"


def locked_bytes(text: Any) -> int:
    """Bytes of a limit of locked memory, INFINITY for the word infinity. Raises ValueError with the remedy."""
    if str(text) == INFINITE:
        return INFINITY
    told = _SIZE.fullmatch(str(text))
    size = int(told.group(1)) << 10 * " KMGTPE".index(told.group(2) or " ") if told else 0
    if not 0 < size <= _LARGEST:
        raise ValueError(f"{text!r} is no size of memory. {SPELLINGS}")
    return size
