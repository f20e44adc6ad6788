# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The key of a package repository: out of its armour, and its fingerprint, without gpg, which a bare host does not have.

RFC 9580: ASCII armour is section 6, packet headers are 4.2, fingerprints of version 4 keys 5.5.4.2.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from typing import Iterator, List, Tuple

PUBLIC_KEY = 6
ARMOUR = re.compile(
    rb"-----BEGIN PGP PUBLIC KEY BLOCK-----\r?\n(.*?)\r?\n-----END PGP PUBLIC KEY BLOCK-----", re.DOTALL
)


def dearmor(raw: bytes) -> bytes:
    """The packets of a key file, armoured or not, as a binary keyring for apt. ValueError for what is no key."""
    blocks = ARMOUR.findall(raw)
    if blocks:
        raw = b"".join(_decoded(block) for block in blocks)
    if not fingerprints(raw):
        raise ValueError("there is no OpenPGP public key in it")
    return raw


def _decoded(block: bytes) -> bytes:
    lines = [line.strip() for line in block.splitlines()]
    if b"" in lines:  # headers such as Version: end with an empty line
        lines = lines[lines.index(b"") + 1 :]
    try:
        return base64.b64decode(b"".join(line for line in lines if not line.startswith(b"=")), validate=True)
    except binascii.Error as error:
        raise ValueError(f"its armour is damaged: {error}") from error


def fingerprints(raw: bytes) -> List[str]:
    """Those of the primary keys, in hexadecimal capitals. ValueError for what does not read as packets."""
    return [
        hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body).hexdigest().upper()
        for tag, body in _packets(raw)
        if tag == PUBLIC_KEY and body[:1] == b"\x04"
    ]


def _packets(raw: bytes) -> Iterator[Tuple[int, bytes]]:
    at = 0
    while at < len(raw):
        head = raw[at]
        if not head & 0x80:
            raise ValueError("it does not read as OpenPGP packets")
        at += 1
        if head & 0x40:
            tag, (length, size) = head & 0x3F, _new_length(raw, at)
        else:
            size = 1 << (head & 3)
            if size == 8:
                raise ValueError("it has a packet without a length")
            tag, length = (head >> 2) & 0x0F, int.from_bytes(raw[at : at + size], "big")
        at += size
        if at + length > len(raw):
            raise ValueError("it is cut off")
        yield tag, raw[at : at + length]
        at += length


def _new_length(raw: bytes, at: int) -> Tuple[int, int]:
    """(length, octets that say it)"""
    first = raw[at] if at < len(raw) else 0
    if first < 192:
        return first, 1
    if first < 224:
        return ((first - 192) << 8) + int.from_bytes(raw[at + 1 : at + 2], "big") + 192, 2
    if first == 255:
        return int.from_bytes(raw[at + 1 : at + 5], "big"), 5
    raise ValueError("it has a packet in parts")
