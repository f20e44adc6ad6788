"""How servers of vLLM are spoken to: in clear, or by TLS with certificates of the fleet's private CA. Pure, standard library, Python 3.9.

A server takes its certificate by `--ssl-certfile` and `--ssl-keyfile`, which may be one file, and with `--enable-ssl-refresh` reads it
again when it changes (SSLCertRefresher in vllm/entrypoints/serve/utils/ssl.py of 0.26.0, vllm/entrypoints/launchers/utils/ssl.py of
0.32.0 and 0.33.0). It watches the file itself (watchfiles 1.3.0, inotify): one that is replaced by rename is read once more and never
again, so that its content is changed in place (module server_certificate).

A generation says by its plan.json how its server is spoken to; whoever speaks to a server goes by what it runs, not by what is planned.
"""

from __future__ import annotations

import json
import os
from typing import Any, Dict, Optional

FOLDER = "/etc/gpu_fleet/vllm"
PEM = f"{FOLDER}/tls.pem"  # the host's key and certificate: readable for the service user alone
# Options of `vllm serve` that are the collection's own; what else is said of TLS (--ssl-ciphers) is the service's.
OWNED = ("ssl-certfile", "ssl-keyfile", "ssl-ca-certs", "ssl-cert-reqs", "enable-ssl-refresh")


def options() -> Dict[str, Any]:
    """What has a server speak TLS, as `vllm serve --config` takes it."""
    return {"ssl-certfile": PEM, "ssl-keyfile": PEM, "enable-ssl-refresh": True}


def name(host: str) -> str:
    """What a host's certificate calls it. HAProxy's `verifyhost` compares names alone, and a host may be called by its address."""
    return f"{host.replace(':', '-')}.vllm"


def of_generation(folder: str) -> Optional[bool]:
    """Whether the server of a generation speaks TLS; None where there is no generation that could say so."""
    try:
        with open(os.path.join(folder, "plan.json"), encoding="utf-8") as text:
            told = json.load(text)
    except (OSError, ValueError):
        return None
    return bool(told.get("tls")) if isinstance(told, dict) else None


def url(planned: str, folder: str) -> str:
    """A URL of a server as the generation in a folder is spoken to; as planned where none says so."""
    tls = of_generation(folder)
    return planned if tls is None else f"http{'s' if tls else ''}://{planned.partition('://')[2]}"
