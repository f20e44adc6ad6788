"""Take secrets and addresses out of what is sent to others: the same thing gets the same stand-in everywhere, so that it still can be followed.

Replaced are IPv4, IPv6 and MAC addresses (not loopback and not "any"), the fleet's host names, e-mail addresses, keys, tokens and passwords,
private keys, credentials in URLs, and prompts that a server logged. Standard library, Python 3.9.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Dict, Iterable, List, Tuple

IPV4 = re.compile(r"(?<![\w.])(\d{1,3}(?:\.\d{1,3}){3})(?![\w]|\.\d)")
# Versions have four numbers, too: cudnn 9.1.0.70.
VERSION_BEFORE = re.compile(r"(?:==|>=|<=|~=|[Vv]ersion[ :=]*|[-_]v?)$")
IPV6 = re.compile(r"(?<![\w:.])([0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7})(?![\w:.])")
MAC = re.compile(r"(?<![\w:])([0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2}){5}(?::[0-9A-Fa-f]{2}){0,14})(?![\w:])")
MAIL = re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b")
KEPT = ("127.", "0.0.0.0", "255.255.255.255")

_VALUE = r"""(?P<value>"[^"]*"|'[^']*'|\[[^\]]*\]|[^\s,;&'"}\])]+)"""
SECRETS: Tuple["re.Pattern[str]", ...] = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?P<value>.+?)-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL),
    re.compile(r"\b(?:Bearer|Basic)\s+" + _VALUE, re.IGNORECASE),
    re.compile(
        r"""(?:api[-_]?keys?|token|secret|passw(?:or)?d|passphrase|credentials?|authorization)["']?\s*[=:]\s*(?!Bearer|Basic|None\b|null\b|true\b|false\b)"""
        + _VALUE,
        re.IGNORECASE,
    ),
    re.compile(r"--api-key[ =]" + _VALUE),
    re.compile(r"://[^/\s:@]+:(?P<value>[^/\s@]+)@"),
    re.compile(r"\b(?P<value>hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})\b"),
    re.compile(r"\b(?P<value>eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*)"),
)
# `Received request ...: prompt: '...', params:` (vllm/entrypoints/logger.py, --enable-log-requests).
PROMPT = re.compile(r"(\bprompt: )(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(\bprompt_token_ids: )\[[^\]]*\]")
SECRET, SAID = "[secret]", "[prompt]"


class Redactor:
    """names: host names that are replaced, whole words. secrets: values that are known to be secret."""

    def __init__(self, names: Iterable[str] = (), secrets: Iterable[str] = ()) -> None:
        self.stands: Dict[Tuple[str, str], str] = {}
        self.counts: Dict[str, int] = {"secret": 0, "prompt": 0}
        known = sorted({name for name in names if len(name) > 1 and name != "localhost"}, key=len, reverse=True)
        self.names = re.compile(rf"(?<![\w.-])({'|'.join(map(re.escape, known))})(?![\w-]|\.\w)") if known else None
        for name in sorted(known, key=lambda name: (len(name), name)):
            self._stand("host", name)
        self.secrets: List[str] = sorted({text for text in secrets if len(text) >= 6}, key=len, reverse=True)

    def _stand(self, kind: str, text: str) -> str:
        key = (kind, text.lower())
        if key not in self.stands:
            number = 1 + sum(1 for other, _ in self.stands if other == kind)
            self.stands[key] = f"{kind}-{number}"
            self.counts[kind] = number
        return self.stands[key]

    def text(self, text: str) -> str:
        for known in self.secrets:
            if known in text:
                self.counts["secret"] += text.count(known)
                text = text.replace(known, SECRET)
        for pattern in SECRETS:
            text = pattern.sub(self._hide, text)
        text = PROMPT.sub(self._prompt, text)
        text = MAIL.sub(lambda found: self._stand("mail", found.group(0)), text)
        text = MAC.sub(lambda found: self._stand("mac", found.group(1)), text)
        text = IPV6.sub(self._six, text)
        text = IPV4.sub(self._four, text)
        if self.names:
            text = self.names.sub(lambda found: self._stand("host", found.group(1)), text)
        return text

    def _hide(self, found: "re.Match[str]") -> str:
        if found.group("value").strip("\"'") in ("", SECRET):
            return found.group(0)
        self.counts["secret"] += 1
        begin, end = found.span("value")
        base = found.start()
        return found.group(0)[: begin - base] + SECRET + found.group(0)[end - base :]

    def _prompt(self, found: "re.Match[str]") -> str:
        self.counts["prompt"] += 1
        return (found.group(1) or found.group(2)) + SAID

    def _four(self, found: "re.Match[str]") -> str:
        text = found.group(1)
        if VERSION_BEFORE.search(found.string[max(0, found.start() - 12) : found.start()]) or text.startswith(KEPT):
            return text
        return self._address(text)

    def _six(self, found: "re.Match[str]") -> str:
        text = found.group(1)
        # A time or a PCI address has colons, too; an address that is none is told by the library.
        return text if text in ("::", "::1") or ("::" not in text and text.count(":") < 7) else self._address(text)

    def _address(self, text: str) -> str:
        try:
            told = ipaddress.ip_address(text)
        except ValueError:
            return text
        return self._stand("address", str(told))
