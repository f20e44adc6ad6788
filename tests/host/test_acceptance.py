"""A service that is accepted under load: real vLLM (CPU build), its own generator, one host.

The tests run in order: the first run is what the later ones are compared with. What is measured here depends on the machine; what
is asked for does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import testinfra

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "collections")]

from ansible_collections.gpu_fleet.vllm.plugins.module_utils import capacity, throughput  # noqa: E402

INVENTORY = Path(os.environ["MOLECULE_INVENTORY_FILE"]).parent
ACCEPTANCE_SECONDS = 480.0
PAGES = ROOT / ".cache" / "logs" / "report"


@pytest.fixture(scope="module")
def gpu_01():
    return testinfra.get_host(f"ansible://gpu-01?ansible_inventory={INVENTORY}")


def fleet(*words: str) -> subprocess.CompletedProcess[str]:
    """scripts/fleet, without its bootstrap."""
    return subprocess.run(
        [sys.executable, "-m", "gpu_fleet.cli", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=1200,
    )


def bench(service: str, *words: str) -> tuple[dict, float]:
    """An acceptance; its document, and how long all of it took."""
    began = time.monotonic()
    done = fleet("bench", "-i", str(INVENTORY), service, "--json", *words)
    seconds = time.monotonic() - began
    assert done.stdout.startswith("{"), (done.stdout + done.stderr)[-4000:]
    told = json.loads(done.stdout)
    assert "verdicts" in told, done.stdout[-4000:]
    cores = {point["concurrency"]: point["generator_cores"] for point in told["points"]}
    print(
        f"measured: {service}: {seconds:.0f} s, {told['seconds']:.0f} s of it load; knee {told['knee']['concurrency']}, generator {cores}"
    )
    for verdict in told["verdicts"]:
        print(f"measured: {service}: {verdict['name']}: {verdict['outcome']}: {'; '.join(verdict['evidence'])[:300]}")
    for point in told["points"]:
        rounded = {
            name: round(value, 1)
            for name, value in point["median"].items()
            if name.split("_")[0] in ("output", "ttft", "itl")
        }
        print(f"measured: {service}: concurrency {point['concurrency']:g} x{point['repeats']}: {rounded}")
    return told, seconds


def outcomes(told: dict) -> dict[str, str]:
    return {verdict["name"]: verdict["outcome"] for verdict in told["verdicts"]}


@pytest.fixture(scope="module")
def first() -> tuple[dict, float]:
    return bench("chat", "--peak", "3")


def test_a_service_is_accepted_in_time(first):
    told, seconds = first
    assert seconds <= ACCEPTANCE_SECONDS
    found = outcomes(told)
    assert (found["memory"], found["full prompts"]) == ("pass", "pass")
    # One host without a GPU, and nothing was accepted before.
    assert (found["scaling"], found["sameness"]) == ("unknown", "unknown")
    assert told["outcome"] in ("pass", "warn")
    assert {point["repeats"] for point in told["points"]} == {3}, "all repeats are within the budget"


def test_the_knee_lies_where_seats_end(first):
    told, _ = first
    assert told["knee"]["seen"] and told["knee"]["limited_by"] == ["ttft_p95_ms"]
    assert [point["concurrency"] for point in told["points"]][-1] > told["knee"]["concurrency"], "and beyond"
    assert told["recommendation"]["settings"]["max-num-seqs"] <= told["knee"]["concurrency"]
    assert told["recommendation"]["replicas"] >= 1


def test_the_generator_is_not_the_limit_or_it_is_told(first):
    told, _ = first
    point = next(point for point in told["points"] if point["concurrency"] == told["knee"]["concurrency"])
    assert point["generator_cores"] < 0.2 or outcomes(told)["generator"] in ("warn", "fail")


def test_the_capacity_table_reads_it(first):
    import yaml

    told, _ = first
    kept = INVENTORY / ".acceptance" / "chat" / "measured.yml"
    read = throughput.read_measured(yaml.safe_load(kept.read_text()), throughput.Said())
    assert len(read.points) == len(told["points"])
    traffic = {"requests_per_second_at_peak": 3, "prompt_tokens": {"mean": 48}, "output_tokens": {"mean": 24}}
    answer = capacity.answer(
        {"traffic": traffic, "targets": {"ttft_p95_ms": 2000}, "measured": yaml.safe_load(kept.read_text())}
    )
    assert answer["outcome"] == "answered"


def test_the_page_is_kept(first):
    told, _ = first
    page = INVENTORY / ".acceptance" / "chat" / f"{told['name']}.html"
    text = page.read_text(encoding="utf-8")
    PAGES.mkdir(parents=True, exist_ok=True)
    (PAGES / "acceptance.html").write_text(text, encoding="utf-8")
    (PAGES / "acceptance.json").write_text(json.dumps(told), encoding="utf-8")
    assert "acceptance-acceptance" not in text + json.dumps(told), "no key is in it"
    done = fleet("report", "-i", str(INVENTORY), "--service", "chat")
    assert done.stdout.strip() == str(page)


def test_nothing_is_left_on_the_host(first, gpu_01):
    assert not gpu_01.file("/var/lib/gpu_fleet-bench").exists
    units = gpu_01.check_output("systemctl list-units --all --no-legend 'gpu-fleet-bench*'")
    assert units == ""


def test_the_knee_and_the_answers_are_the_same_three_times(first):
    told, _ = first
    for _ in range(2):
        again, seconds = bench("chat")
        assert seconds <= ACCEPTANCE_SECONDS
        assert again["knee"]["concurrency"] == told["knee"]["concurrency"]
        assert outcomes(again)["sameness"] in ("pass", "warn")
        # Repeated on both sides, so that something can be said; each row has its ranges.
        assert again["differences"]["noise"]["new"]["repeats"] == 3
        for row in again["differences"]["rows"]:
            parted = row["new"]["low"] > row["old"]["high"] or row["new"]["high"] < row["old"]["low"]
            assert (row["verdict"] in ("slower", "faster")) == parted, row
        print(f"measured: chat: against the run before: {again['differences']['text']}")


def test_seats_that_are_too_few_are_told_by_name():
    told, _ = bench(
        "tight", "--repeats", "1", *(word for load in (1, 2, 4, 8) for word in ("--concurrency", str(load)))
    )
    (verdict,) = [verdict for verdict in told["verdicts"] if verdict["name"] == "settings"]
    assert verdict["outcome"] == "warn" and "max-num-seqs 2 is too small" in verdict["evidence"][0]


def test_a_users_own_prompts_and_an_open_load(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"What is {number} plus {number}?"}) + "\n" for number in range(20))
    )
    told, _ = bench(
        *("tight", "--prompts", str(prompts), "--concurrency", "1", "--rate", "1", "--repeats", "1"),
        *("-e", "accept_full=false", "-e", "accept_seconds_per_point=10"),
    )
    assert told["settings"]["dataset"] == "jsonl" and told["points"][0]["completed"] >= 8
    assert told["open"][0]["completed"] >= 8 and told["open"][0]["failed_share"] == 0
    # Another load than the run before, and one repeat: nothing may be said of what is slower.
    assert {row["verdict"] for row in told["differences"]["rows"]} == {"unknown"}


def test_a_server_that_does_not_run_is_not_measured(gpu_01):
    gpu_01.check_output("systemctl stop vllm-agent@tight.0 vllm@tight.0")
    done = fleet("bench", "-i", str(INVENTORY), "tight")
    assert done.returncode == 1 and "vllm@tight.0 is inactive" in done.stderr and "Nothing was measured" in done.stderr
    assert not gpu_01.file("/var/lib/gpu_fleet-bench").exists
