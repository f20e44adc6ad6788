"""Every signature fires on its own example and is silent on the one that looks like it; what cannot be used is refused."""

import conftest  # noqa: F401  makes the collection importable
import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import diagnosis, signatures
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import doctor as doctors

ALL = [entry for entries in doctors.families().values() for entry in entries]
NAMED = [entry for entry in ALL if entry.get("kind", "cause") in ("cause", "symptom", "end")]


def found(text):
    doctor = doctors.doctor()
    doctor.read("example", text.split("\n"))
    return [finding["cause_id"] for finding in doctor.answer()["findings"]]


@pytest.mark.parametrize("entry", NAMED, ids=[entry["id"] for entry in NAMED])
def test_fires_on_its_example(entry):
    assert found(entry["example"]["fires"])[:1] == [entry["id"]]


@pytest.mark.parametrize("entry", NAMED, ids=[entry["id"] for entry in NAMED])
def test_is_silent_on_what_looks_like_it(entry):
    assert entry["id"] not in found(entry["example"]["silent"])


def test_there_are_enough_of_them():
    assert len(NAMED) >= 150


@pytest.mark.parametrize("entry", NAMED, ids=[entry["id"] for entry in NAMED])
def test_words_are_filled_in_or_have_others(entry):
    """No {name} is left in what people read, whatever the line said."""
    for text in (entry["cause"], entry["fix"], *(ask["command"] for ask in entry.get("ask", ()))):
        assert not signatures.FIELD.search(signatures.fill(text, {}))


BASE = {"id": "x", "patterns": ["some words"], "cause": "c", "fix": "f", "source": "s"}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"patterns": ["a.*b"]}, "no fixed text"),
        ({"patterns": []}, "no patterns"),
        ({"patterns": ["some ("]}, "patterns"),
        ({"kind": "guess"}, "kind"),
        ({"fix": ""}, "cause, fix and source"),
        ({"over": ["nothing_known"]}, "not there"),
        ({"colour": "red"}, "unknown colour"),
        ({"judge": "nobody"}, "judge"),
    ],
)
def test_bad_ones_are_refused(changed, why):
    with pytest.raises(signatures.BadSignature, match=why):
        diagnosis.ready(signatures.compile_book({"family": [{**BASE, **changed}]}))


def test_two_of_one_name_are_refused():
    with pytest.raises(signatures.BadSignature, match="twice"):
        signatures.compile_book({"family": [BASE, BASE]})
