"""The same causes in the words of other versions and programs; and lines of healthy servers that sound alarming."""

from pathlib import Path

import conftest  # noqa: F401  makes the collection importable
import pytest
import yaml
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import doctor as doctors

SAID = yaml.safe_load((Path(__file__).parent / "fixtures" / "doctor_wordings.yml").read_text(encoding="utf-8"))


def found(log):
    doctor = doctors.doctor()
    doctor.read("words", log.split("\n"))
    return [finding["cause_id"] for finding in doctor.answer()["findings"]]


@pytest.mark.parametrize("entry", SAID["causes"], ids=lambda entry: entry["cause"])
def test_cause(entry):
    assert (found(entry["log"]) or ["nothing"])[0] in entry["cause"].split("|")


@pytest.mark.parametrize("log", SAID["healthy"], ids=lambda log: log[:40])
def test_healthy(log):
    assert found(log) == []
