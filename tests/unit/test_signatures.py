"""Every signature fires on its own example and is silent on the one that looks like it; what cannot be used is refused."""

import conftest  # noqa: F401  makes the collection importable
import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import diagnosis, signatures
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import doctor as doctors

ALL = [entry for entries in doctors.families().values() for entry in entries]
NAMED = [entry for entry in ALL if entry.get("kind", "cause") in ("cause", "symptom", "end")]
NEVER = [entry for entry in ALL if entry not in NAMED]  # notes and consequences


def read(text):
    doctor = doctors.doctor()
    doctor.read("example", text.split("\n"))
    return doctor


def found(text):
    return [finding["cause_id"] for finding in read(text).answer()["findings"]]


@pytest.mark.parametrize("entry", NAMED, ids=[entry["id"] for entry in NAMED])
def test_fires_on_its_example(entry):
    assert found(entry["example"]["fires"])[:1] == [entry["id"]]


@pytest.mark.parametrize("entry", NAMED, ids=[entry["id"] for entry in NAMED])
def test_is_silent_on_what_looks_like_it(entry):
    assert entry["id"] not in found(entry["example"]["silent"])


@pytest.mark.parametrize("entry", NEVER, ids=[entry["id"] for entry in NEVER])
def test_what_is_no_cause_is_known_and_never_named(entry):
    """A note is told as one, of a consequence alone it is said that the reason is not among the lines."""
    fires, silent = (read(entry["example"][name]) for name in ("fires", "silent"))
    assert any(name == entry["id"] for name, _ in fires.hits)
    assert not any(name == entry["id"] for name, _ in silent.hits)
    answer = fires.answer()
    named = [finding["cause_id"] for finding in answer["findings"]]
    assert named == ([] if entry["kind"] == "note" else ["cause_not_in_these_lines"])
    assert [note["note_id"] for note in answer["notes"]] == ([entry["id"]] if entry["kind"] == "note" else [])


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
