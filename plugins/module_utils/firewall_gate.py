# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""May a rank start? Only while the fleet's firewall table guards its ports: whoever reaches them can run code in the server.

    firewall_gate.py PORT|FIRST-LAST...     exit status 0: every port is guarded; 75: not, with the reason

The status is its own (EX_TEMPFAIL of sysexits.h): by it the rank's agent tells a wait for the firewall from a start in vain.

Guarded means that the table `inet gpu_fleet` is loaded and ends for these ports in a drop of whoever was not accepted before.
Role firewall installs it on the hosts, the unit of each rank runs it before the server (ExecStartPre=+).

A program and a module at once: standard library, Python 3.9 and newer, no import of the collection.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Dict, List, Sequence, Tuple

LIST = ("/usr/sbin/nft", "--json", "list", "chain", "inet", "gpu_fleet", "input")
REFUSED = 75
FIX = "Load it: systemctl start gpu-fleet-firewall (or run the playbook again). The rank starts then by itself"


def unguarded(chain: Dict[str, Any], ports: Sequence[Tuple[int, int]]) -> List[str]:
    """Those of the ports for which the chain has no drop of everybody else, as text. `chain` is nft's JSON."""
    dropped: List[Tuple[int, int]] = []
    hooked = any(item.get("chain", {}).get("hook") == "input" for item in chain.get("nftables", []))
    for item in chain.get("nftables", []):
        expr = item.get("rule", {}).get("expr", [])
        matches = [part["match"] for part in expr if "match" in part]
        if any("drop" in part for part in expr) and len(matches) == 1 and _is_tcp_port(matches[0]):
            right = matches[0]["right"]
            values = right["set"] if isinstance(right, dict) and "set" in right else [right]
            dropped += [_span(value) for value in values]
    return [
        str(low) if low == high else f"{low}-{high}"
        for low, high in ports
        if not hooked or not any(first <= low and high <= last for first, last in dropped)
    ]


def _is_tcp_port(match: Dict[str, Any]) -> bool:
    return match["op"] in ("==", "in") and match["left"] == {"payload": {"protocol": "tcp", "field": "dport"}}


def _span(value: Any) -> Tuple[int, int]:
    if isinstance(value, dict) and "range" in value:
        return value["range"][0], value["range"][1]
    return (value, value) if isinstance(value, int) else (1, 0)


def main(arguments: Sequence[str]) -> int:
    """See the module's text."""
    spans = [(int(text.partition("-")[0]), int(text.rpartition("-")[2])) for text in arguments]
    try:
        done = subprocess.run(LIST, capture_output=True, text=True, check=False)
    except OSError as error:
        print(f"The fleet's firewall cannot be asked ({LIST[0]}: {error.strerror}). {FIX}", file=sys.stderr)
        return REFUSED
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no answer"])[0]
        print(f"The fleet's firewall table is not loaded ({reason}): the rank's ports are open. {FIX}", file=sys.stderr)
        return REFUSED
    left = unguarded(json.loads(done.stdout), spans)
    if left:
        print(f"The fleet's firewall table does not guard {', '.join(left)}. {FIX}", file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
