"""Every recorded case: the right cause first, its line quoted, no advice against what the case warns of; nothing on healthy logs."""

import json
import re
from pathlib import Path

import conftest  # noqa: F401  makes the collection importable
import pytest
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import doctor as doctors

LOGS = Path(__file__).parent / "fixtures" / "logs"
CASES = [json.loads(line) for line in (LOGS / "expected.jsonl").read_text().splitlines()]
# Causes that the cases name otherwise than the signatures do.
CALLED: dict[str, str] = {}


def answer(*paths: Path) -> dict:
    doctor = doctors.doctor()
    for path in paths:
        doctor.read(path.name, path.read_text(errors="replace").split("\n"))
    return doctor.answer()


@pytest.mark.parametrize("case", CASES, ids=[case["file"] for case in CASES])
def test_case(case):
    told = answer(LOGS / case["file"])
    right = {case["cause_id"], *case["acceptable"]}
    found = [CALLED.get(finding["cause_id"], finding["cause_id"]) for finding in told["findings"]]
    assert (found[0] if found else "none") in right, found
    if case["cause_id"] != "none" and found:
        assert case["key"] in told["findings"][0]["evidence"]


# What advice may not say of a case, from its `trap`.
FORBIDDEN = {
    "03.log": "host memory|MemoryMax|oom-kill",  # the kill at the end is vLLM's own
    "11.log": "MemoryMax|kill -9",
    "37.log": r"(?:[Ss]et|[Uu]se|[Ee]xport|[Gg]ive) VLLM_TEST_",
    "65.log": r"(?:switch|turn)\w* (?:off )?ECC off|--enforce-eager",
    "83.log": r"(?:raise|increase|set) .{0,30}[Tt]imeout",
    "97.log": "MemoryMax|host memory",
    "117.log": "disable",
    "119.log": "warning",
    "137.log": "StartLimit",
}


@pytest.mark.parametrize("case", [case for case in CASES if case["file"] in FORBIDDEN], ids=lambda case: case["file"])
def test_advice_is_never_against_what_the_case_warns_of(case):
    first = answer(LOGS / case["file"])["findings"][0]
    assert not re.search(FORBIDDEN[case["file"]], first["fix"] + first["cause"])
