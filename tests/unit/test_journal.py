"""The lines of a failed start that are shown must hold the one that decides, which stands above vLLM's last words."""

import json
import pathlib

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.action import instance
from ansible_collections.gpu_fleet.vllm.plugins.module_utils.journal import kind, strip, why

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


LOST = "RuntimeError: NCCL error: remote process exited or there was a network error"
OWN = "NCCL WARN Bootstrap : no socket interface found"


def test_a_rank_that_lost_another_is_told_from_the_one_with_the_cause():
    assert kind(["start", "Failed to recv, got 0 bytes", "ValueError: what followed"]) == "peer"
    assert kind(["start", LOST]) == "peer"
    assert kind(["start", "x: Connection closed by peer [198.51.100.2]:40123"]) == "peer"
    assert kind(["start", OWN, "Failed to recv, got 0 bytes"]) == "own"
    assert kind(["all is well"]) == ""


def test_the_message_of_a_given_up_start_shows_this_ranks_own_cause():
    own = instance.message("chat.0", "gpu-02", "gpu-01", 60, {"cause": "own", "journal": [OWN]})
    assert own.startswith("chat.0 did not start on gpu-02: gpu-01 failed, too. It was stopped. The journal says:")
    assert OWN in own
    # One that only lost the other has nothing to add to the other's message.
    lost = instance.message("chat.0", "gpu-02", "gpu-01", 60, {"cause": "peer", "journal": [LOST]})
    assert "gpu-01 failed, whose message says why" in lost
    assert LOST not in lost
    late = instance.message("chat.0", "gpu-02", "", 60, {"cause": "", "journal": ["loading"]})
    assert "not ready within 60 s (vllm_service_start_timeout)" in late
    assert "loading" in late
