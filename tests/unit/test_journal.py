"""The lines of a failed start that are shown must hold the one that decides, which stands above vLLM's last words."""

import json
import pathlib

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.journal import strip, why

LOGS = pathlib.Path(__file__).parent / "fixtures" / "logs"
KEYS = json.loads((LOGS / "keys.json").read_text())


@pytest.mark.parametrize(("name", "key"), KEYS.items())
def test_the_deciding_line_is_shown(name, key):
    noise = [f"INFO 01-01 00:00:00 [core.py:1] line {n}" for n in range(50)]
    lines = noise + (LOGS / name).read_text().splitlines() + noise
    shown = why(lines)
    assert any(key in line for line in shown)
    assert len(shown) < 40


def test_an_echo_is_not_the_cause():
    lines = [
        "start",
        "ValueError: the cause",
        *["noise"] * 50,
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    assert "ValueError: the cause" in why(lines)
    assert "[...]" in why(lines)


def test_without_any_error_the_end_is_shown():
    assert why([str(n) for n in range(30)]) == [str(n) for n in range(22, 30)]
    assert why([]) == []


def test_stamps_are_taken_off():
    assert strip("(EngineCore pid=12) ERROR 11-29 10:00:00 [core.py:1201] ValueError: x") == "ValueError: x"
