"""Does the gateway on this host answer? As a program, asked by keepalived: gateway_answers.py URL; exit status 0 when it does.

Standard library only, Python 3.9.
"""

from __future__ import annotations

import http.client
import ssl
import sys
from urllib.parse import urlsplit

PATIENCE = 2.0  # seconds; the gateway answers this by itself and at once


def answers(url: str) -> bool:
    """Whether there is a 200. Its certificate is for the name that clients use, which is not asked for here."""
    told = urlsplit(url)
    link: http.client.HTTPConnection
    if told.scheme == "https":
        unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        unverified.check_hostname = False
        unverified.verify_mode = ssl.CERT_NONE
        link = http.client.HTTPSConnection(told.hostname or "", told.port, timeout=PATIENCE, context=unverified)
    else:
        link = http.client.HTTPConnection(told.hostname or "", told.port, timeout=PATIENCE)
    try:
        link.request("GET", told.path)
        return link.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        link.close()


if __name__ == "__main__":
    sys.exit(0 if answers(sys.argv[1]) else 1)
