"""Link tables of real hosts, and what damage makes of them: read right, or refused."""

from __future__ import annotations

import json
import os
import pathlib
import re

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import topology
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FOLDER = pathlib.Path(__file__).parent / "fixtures" / "topo"
CASES = [json.loads(line) for line in (FOLDER / "facts.jsonl").read_text().splitlines()]
TRUE = [case for case in CASES if not case["expected"].get("refuse")]
EXAMPLES = 3000
# The same examples every time, so that a red run can be run again; FUZZ_RANDOM=1 looks for new ones.
settings.register_profile("fuzz", derandomize="FUZZ_RANDOM" not in os.environ, database=None, deadline=None)
settings.load_profile("fuzz")


def text_of(case: dict) -> str:
    return (FOLDER / f"{case['id']}.txt").read_bytes().decode()


@pytest.mark.parametrize("case", TRUE, ids=lambda case: case["id"])
def test_a_real_table_is_read(case):
    found = topology.read(text_of(case))
    expected = {key: value for key, value in case["expected"].items() if key != "may_refuse"}
    assert found.as_dict() == expected
    assert list(found.nics) == list(case.get("nics") or [])
    for column in ("cpu_affinity", "numa_affinity", "gpu_numa_id"):
        told = getattr(found, column)
        assert (list(told) if told is not None else None) == case[column]


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["expected"].get("refuse")], ids=lambda case: case["id"]
)
def test_what_is_no_table_of_topo_m_is_refused_with_what_it_is(case):
    with pytest.raises(topology.Refused) as refused:
        topology.read(text_of(case))
    assert refused.value.kind == case["expected"]["kind"]
    assert refused.value.reason
    if "pairs" in case["expected"]:
        found = topology.read_amd(text_of(case))
        assert found == {key: case["expected"][key] for key in found}


def test_the_p2p_table_of_two_h200s():
    text = " \t\x1b[4mGPU0\tGPU1\t\x1b[0m\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\n\nLegend:\n\n  X    = Self\n"
    assert topology.read_p2p(text) == {"0-1": "OK"}
    assert topology.read_p2p(text.replace("GPU1\tOK", "GPU1\tCNS")) == {"0-1": "CNS"}
    with pytest.raises(topology.Refused):
        topology.read(text)


def test_the_order_of_links():
    assert sorted(["SYS", "NODE", "NV4", "PIX", "PHB", "NV18", "PXB"], key=topology.quality) == [
        *("NV18", "NV4", "PIX", "PXB", "PHB", "NODE", "SYS")
    ]


PAIR = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t{}\t0-7\t0\nGPU1\t{}\t X \t0-7\t0\n"


def test_of_two_cells_that_differ_the_worse_one_counts_and_the_pair_is_named():
    found = topology.read(PAIR.format("NV2", "SYS"))
    assert found.as_dict()["pairs"] == {"0-1": "SYS"}
    assert found.as_dict()["asymmetric"] == ["0-1"]


def test_the_old_name_of_sys():
    assert topology.read(PAIR.format("SOC", "SOC")).link(0, 1) == "SYS"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("Topology: see attachment", "no table"),
        (PAIR.format("NV18", "NV18").split("GPU1\t")[0] + "GPU1\tCPU Affinity\n", "without its rows"),
        ("\n".join(PAIR.format("SYS", "SYS").split("\n")[:2]), "row of GPU1 is missing"),
        (PAIR.format("SYS", "SYS").replace("GPU1\tCPU", "GPU2\tCPU"), "count its GPUs"),
        (PAIR.format("SYS", "FAST"), "row of GPU1 is missing"),
        (PAIR.format("FAST", "SYS"), "'FAST' where cell 2 of 2"),
        (PAIR.format("SYS", "SYS\tSYS"), "after its cells|not in its own"),
        (PAIR.format("NV18", "NV99"), "more NVLinks than any GPU"),
        (PAIR.format("NV120-7", "NV12"), "NV120-7"),
        (PAIR.format("SYS", "SYS") + PAIR.format("PIX", "PIX"), "2 tables that differ"),
        ("\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU1\tSYS\t X \n", "ends after its devices"),
        ("\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\nGPU1\tSYS\t0-7\n", "cut at its right side"),
        (PAIR.split("GPU0\t X", maxsplit=1)[0] + PAIR.format("PIX", "PIX"), "without its rows"),
        (PAIR.format("SYS", "SYS") + "GPU1\tSYS\t X \t0-7\t0\n", "row more"),
    ],
)
def test_what_cannot_be_told_for_certain_is_refused(text, reason):
    with pytest.raises(topology.Refused, match=reason):
        topology.read(text)


@pytest.mark.parametrize("case", TRUE, ids=lambda case: case["id"])
@pytest.mark.parametrize("width", [16, 20, 24, 32, 40, 48, 56, 64, 80, 120])
def test_a_table_cut_at_its_right_side_is_no_smaller_host(case, width):
    text = "\n".join(line[:width] for line in text_of(case).expandtabs(8).splitlines())
    try:
        assert topology.read(text).as_dict()["pairs"] == case["expected"]["pairs"]
    except topology.Refused as refused:
        assert refused.reason


def test_a_table_said_twice_is_one_table():
    assert topology.read(PAIR.format("SYS", "SYS") * 2).link(0, 1) == "SYS"


# Damage. What only looks different keeps its meaning; what loses something may at most show as halves that differ.


def to_blanks(text, draw):
    return text.expandtabs(8)


def single_blanks(text, draw):
    return re.sub(r"[ \t]+", " ", text)


def crlf(text, draw):
    return text.replace("\r", "").replace("\n", "\r\n")


def quoted(text, draw):
    return "".join(f"> {line}\n" for line in text.split("\n"))


def logged(text, draw):
    lines = text.split("\n")
    return "\n".join(f"Nov 29 08:00:{number % 60:02} host app[{number}]: {line}" for number, line in enumerate(lines))


def coloured(text, draw):
    return re.sub(r"(GPU\d+)", "\x1b[1;32m\\1\x1b[0m", text)


def trailing(text, draw):
    return "\n".join(line.ljust(240) for line in text.split("\n"))


def wrapped(text, draw):
    width = draw(st.integers(20, 200))
    lines = []
    for line in text.expandtabs(8).split("\n"):
        lines.extend([line[at : at + width] for at in range(0, len(line), width)] or [""])
    return "\n".join(lines)


def glued(text, draw):
    return re.sub(
        r"(?<=[A-Z0-9])[ \t]+(?=[A-Z])", lambda gap: "" if draw(st.integers(0, 9)) == 0 else gap.group(), text
    )


def no_tabs(text, draw):
    return text.replace("\t", "")


def indented(text, draw):
    return "\n".join("    " + line for line in text.split("\n"))


def double_spaced(text, draw):
    return text.replace("\n", "\n\n")


def surrounded(text, draw):
    return f"GPU topology of GPU0 and others:\n{text}\nGPU0 is fine.\n"


def upper_part(text, draw):
    return text[: draw(st.integers(0, len(text)))]


def lower_part(text, draw):
    return text[draw(st.integers(0, len(text))) :]


def lose_characters(text, draw):
    at = draw(st.integers(0, max(0, len(text) - 1)))
    return text[:at] + text[at + draw(st.integers(1, 12)) :]


def change_character(text, draw):
    at = draw(st.integers(0, max(0, len(text) - 1)))
    return text[:at] + draw(st.sampled_from("0123456789XNVPIBHSYOD \t\n-,|[\x1b\ufffd")) + text[at + 1 :]


def insert_character(text, draw):
    at = draw(st.integers(0, len(text)))
    return text[:at] + draw(st.sampled_from("0123456789XNVPIBHSYOD \t\n-,|")) + text[at:]


def lose_a_line(text, draw):
    lines = text.split("\n")
    del lines[draw(st.integers(0, len(lines) - 1))]
    return "\n".join(lines)


def repeat_a_line(text, draw):
    lines = text.split("\n")
    at = draw(st.integers(0, len(lines) - 1))
    return "\n".join(lines[: at + 1] + lines[at:])


def swap_lines(text, draw):
    lines = text.split("\n")
    at, other = draw(st.integers(0, len(lines) - 1)), draw(st.integers(0, len(lines) - 1))
    lines[at], lines[other] = lines[other], lines[at]
    return "\n".join(lines)


def lose_a_word(text, draw):
    words = list(re.finditer(r"\S+", text))
    word = draw(st.sampled_from(words)) if words else None
    return text[: word.start()] + text[word.end() :] if word else text


def noise_between(text, draw):
    lines = text.split("\n")
    noise = draw(st.sampled_from(["(APIServer pid=1) INFO: Application startup complete.", "42", "GPU0", "NV18", "X"]))
    lines.insert(draw(st.integers(0, len(lines))), noise)
    return "\n".join(lines)


LOOKS = [to_blanks, single_blanks, crlf, quoted, logged, coloured, trailing, wrapped, glued, no_tabs]
LOOKS += [indented, double_spaced, surrounded]
LOSSES = [upper_part, lower_part, lose_characters, change_character, insert_character, lose_a_line, repeat_a_line]
LOSSES += [swap_lines, lose_a_word, noise_between]


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_mangled_table_is_read_right_or_refused(data):
    case = data.draw(st.sampled_from(TRUE))
    text = text_of(case)
    for change in data.draw(st.lists(st.sampled_from(LOOKS), max_size=3)):
        text = change(text, data.draw)
    for change in data.draw(st.lists(st.sampled_from(LOSSES), max_size=1)):
        text = change(text, data.draw)
    try:
        found = topology.read(text).as_dict()
    except topology.Refused as refused:
        assert refused.reason
        return
    true = case["expected"]
    assert found["gpus"] == true["gpus"]
    wrong = {pair for pair, link in found["pairs"].items() if link != true["pairs"][pair]}
    assert wrong <= set(found["asymmetric"]), (wrong, text)


@settings(max_examples=500)
@given(st.sampled_from(TRUE), st.sampled_from(LOOKS[:7]), st.data())
def test_what_only_looks_different_is_still_read(case, change, data):
    """So that refusing everything would not pass for reading right."""
    may_refuse = case["expected"].get("may_refuse") or (change is logged and "wrapped_header" in case["quirks"])
    if not may_refuse:
        assert topology.read(change(text_of(case), data.draw)).as_dict() == case["expected"]


@settings(max_examples=500)
@given(st.text(alphabet="GPU012NICXVSOKHBDE \t\n-,", max_size=300))
def test_any_text_is_read_or_refused(text):
    for reader in (topology.read, topology.read_p2p, topology.read_amd):
        try:
            reader(text)
        except topology.Refused as refused:
            assert refused.kind
