"""What host tests share. They run over SSH against the hosts of a lab, started by molecule's verify or by scripts/test."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "molecule" / "shared" / "lab.py"


@pytest.fixture(scope="session")
def lab_counters(request) -> Callable[..., dict]:
    """Ask a lab how many packets left it: `lab_counters("demo")`, `lab_counters("demo", reset=True)`."""

    def ask(name: str, reset: bool = False) -> dict:
        command = [sys.executable, str(LAB), "counters", name, *(["--reset"] if reset else [])]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    return ask


@pytest.fixture
def host_name(host) -> str:
    """The host's name in the inventory."""
    return host.backend.get_pytest_id().removeprefix("ansible://")
