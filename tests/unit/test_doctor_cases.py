"""Every recorded case: the right cause first, its line quoted, no advice against what the case warns of; nothing on healthy logs."""

import json
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


"""What no advice may say of a case, from its `trap`: a word of the advice that would be wrong."""
