"""Middleware of a server of vLLM that takes a service's former key as its own, while keys change.

vLLM takes several keys by `--api-key` alone, which wins over VLLM_API_KEY (vllm/entrypoints/serve/middleware/register.py of 0.32.0,
api_server.py of 0.26.0). On the command line everybody on the host could read them, and a configuration file (`--config`) is the
same to vLLM: up to 0.26.0 it writes all options that are not the default to its log, keys in clear (log_non_default_args; 0.32.0
writes ***). VLLM_API_KEY takes one. So the second key comes by the environment, too, and this class, named by `--middleware`, writes
the first in its place: vLLM adds it after its own check of keys, and what is added last is asked first (Starlette). Whoever has
neither key meets vLLM's own refusal. Keys are the instance's and not the generation's: a server that is started with this one again once
the former key is gone (a crash, a way back) takes its own key alone.

It runs inside of the server: standard library only, whatever Python the release has.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Any

KEY, FORMER = "VLLM_API_KEY", "GPU_FLEET_FORMER_KEY"


class FormerKey:
    """An ASGI application around another one."""

    def __init__(self, app: Any) -> None:
        self.app = app
        key, former = os.environ.get(KEY, ""), os.environ.get(FORMER, "")
        if not key:  # vLLM would ask for none
            raise RuntimeError(f"{KEY} has to be set")
        self.own = f"Bearer {key}".encode("ascii")
        self.former = hashlib.sha256(former.encode("ascii")).digest() if former else None

    def is_former(self, value: bytes) -> bool:
        scheme, _, told = value.partition(b" ")
        if self.former is None:
            return False
        return scheme.lower() == b"bearer" and hmac.compare_digest(hashlib.sha256(told).digest(), self.former)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket"):
            told = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
            if len(told) == 1 and self.is_former(told[0]):
                headers = [pair for pair in scope["headers"] if pair[0].lower() != b"authorization"]
                scope = {**scope, "headers": [*headers, (b"authorization", self.own)]}
        await self.app(scope, receive, send)
