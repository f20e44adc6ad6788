"""The picture of a host's links: SVG, table and JSON of real link tables tell what the tables tell."""

from __future__ import annotations

import json
import pathlib
import re
from xml.etree import ElementTree

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import topology
from gpu_fleet import picture
from rich.console import Console

FOLDER = pathlib.Path(__file__).parent / "fixtures" / "topo"
CASES = [json.loads(line) for line in (FOLDER / "facts.jsonl").read_text().splitlines()]
READABLE = [case["id"] for case in CASES if not case["expected"].get("refuse")]
SVG = "{http://www.w3.org/2000/svg}"
# Mean width of a letter of common sans-serif fonts, by its height.
LETTER = 0.6


def read(case: str) -> topology.Topology:
    return topology.read((FOLDER / f"{case}.txt").read_bytes().decode())


def matrix(rows: list[list[str]], numa: list[str], nics: int = 0) -> str:
    """A table as nvidia-smi prints it; the last `nics` rows are network adapters."""
    gpus = len(rows) - nics
    names = [f"GPU{number}" for number in range(gpus)] + [f"NIC{number}" for number in range(nics)]
    lines = ["\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity"]
    for number, row in enumerate(rows):
        lines.append("\t".join([names[number], *row]) + (f"\t0-7\t{numa[number]}" if number < gpus else ""))
    return "\n".join(lines) + "\n"


def square(size: int, link) -> list[list[str]]:
    return [["X" if i == j else link(i, j) for j in range(size)] for i in range(size)]


def facts(text: str | None, gpus: int, **changed) -> dict:
    return {
        "vendor": "nvidia",
        "gpus": [
            {
                "index": number,
                "name": "NVIDIA H100 80GB HBM3",
                "memory_mib": 81559,
                "numa_node": number * 2 // gpus,
                "pci_address": f"0000:{number + 16:02x}:00.0",
                "nvlinks": [26.562] * 18,
            }
            for number in range(gpus)
        ],
        "nvswitch": {"devices": 0},
        "topology": {"matrix": text},
        "nics": [],
        **changed,
    }


def drawn(*arguments, **more) -> ElementTree.Element:
    return ElementTree.fromstring(picture.svg(picture.describe(*arguments, **more)))


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def shown(source, width: int = 80, **more) -> list[str]:
    console = Console(width=width, record=True, color_system=None, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(picture.table(picture.describe(source, **more)))
    console.file.close()
    return [line.rstrip() for line in console.export_text().splitlines()]


def pairs_of(root: ElementTree.Element) -> dict[str, int]:
    """How many pairs of each link the picture shows, as lines and within bars."""
    counts: dict[str, int] = {}
    for element in root.iter():
        if "data-pair" in element.attrib or "data-pairs" in element.attrib:
            link = element.get("data-link")
            counts[link] = counts.get(link, 0) + int(element.get("data-pairs", "1"))
    return counts


def outside(root: ElementTree.Element) -> list[str]:
    """Texts and boxes that leave the picture."""
    _, _, width, height = (float(number) for number in root.get("viewBox").split())
    found = []
    for element in root.iter(f"{SVG}text"):
        x, y, wide = (
            float(element.get("x")),
            float(element.get("y")),
            len(element.text) * float(element.get("font-size")),
        )
        left = x - wide * LETTER / 2 if element.get("text-anchor") == "middle" else x
        if left < 0 or left + wide * LETTER > width or not 8 < y < height - 2:
            found.append(element.text)
    for element in root.iter(f"{SVG}rect"):
        x, y, wide, high = (float(element.get(key, "0")) for key in ("x", "y", "width", "height"))
        if x < 0 or y < 0 or x + wide > width + 0.1 or y + high > height + 0.1:
            found.append(f"rect at {x}, {y}")
    return found


@pytest.mark.parametrize("case", READABLE)
def test_the_drawing_of_a_real_host_has_every_gpu_and_every_pair(case):
    found = read(case)
    root = drawn(found, host="gpu-01")
    gpus = [element.get("data-gpu") for element in root.iter() if element.get("class") == "gpu"]
    assert gpus == [str(number) for number in range(found.gpus)]
    links = list(found.pairs().values())
    assert pairs_of(root) == {link: links.count(link) for link in links}
    assert outside(root) == []
    legend = set(texts(root))
    for link in links:
        assert ("NV#" if topology.is_nvlink(link) else link) in legend
    adapters = [element.find(f"{SVG}title").text for element in root.iter() if element.get("class") == "nic"]
    assert sorted(", ".join(adapters).split(", ") if adapters else []) == sorted(found.nics)


@pytest.mark.parametrize("case", READABLE)
def test_json_has_the_fields_of_the_reader_first_and_unchanged(case):
    found = read(case)
    told = picture.as_json(picture.describe(found))
    details = told.pop("details")
    assert told == found.as_dict()
    assert list(told) == list(found.as_dict())
    assert len(details["numa"]) == found.gpus
    links = {name: group["links"] for group in details["adapters"] for name in group["names"]}
    assert links == {
        name: {str(gpu): found.link(gpu, found.gpus + at) for gpu in range(found.gpus)}
        for at, name in enumerate(found.nics)
    }
    json.dumps(details)


@pytest.mark.parametrize("case", READABLE)
def test_the_table_fits_in_80_columns_and_has_every_cell(case):
    found = read(case)
    lines = shown(found)
    assert max(len(line) for line in lines) <= 80
    rows = {line.split()[0]: line.split()[1:] for line in lines if re.match(r"GPU\d+ .*\bX\b", line)}
    assert rows == {
        f"GPU{i}": [
            "X" if i == j else found.cells[i, j] + "*" * ((min(i, j), max(i, j)) in found.asymmetric())
            for j in range(found.gpus)
        ]
        for i in range(found.gpus)
    }


def test_eight_gpus_with_models_and_adapters_take_one_line_each_in_80_columns():
    text = (FOLDER / "65.txt").read_bytes().decode()
    lines = shown(facts(text, 8), host="gpu-04")
    # The heading, a matrix of a head, 8 GPUs and 4 adapters, a blank line, then a head and 8 GPUs.
    assert len(lines) == 1 + (1 + 8 + 4) + 1 + (1 + 8)
    assert "…" not in "".join(lines)
    assert re.fullmatch(r"GPU0 +H100 80GB HBM3 +81559 +0 +PIX mlx5_0", lines[16])


def test_sixteen_gpus_are_told_in_80_columns_and_drawn():
    text = matrix(
        square(16, lambda i, j: "SYS" if i // 8 != j // 8 else "PIX" if i // 2 == j // 2 else "NODE"),
        [str(number // 8) for number in range(16)],
    )
    lines = shown(text)
    assert max(len(line) for line in lines) <= 80
    assert sum(line.startswith("GPU15 ") for line in lines) == 3  # two blocks of the matrix and its NUMA node
    root = drawn(text)
    assert outside(root) == []
    assert pairs_of(root) == {"PIX": 8, "NODE": 48, "SYS": 64}


def test_a_switch_is_one_bar_and_no_line():
    root = drawn(facts((FOLDER / "65.txt").read_bytes().decode(), 8))
    assert [element for element in root.iter() if "data-pair" in element.attrib] == []
    assert "NVSwitch: every pair NV18 (28)" in texts(root)


def test_a_switch_is_named_only_where_it_is_certain():
    # Four GPUs with 18 links each may be wired directly with 6 links a pair, not with 12.
    wired, more = (matrix(square(4, lambda i, j, link=link: link), ["0"] * 4) for link in ("NV6", "NV12"))
    assert not picture.describe(wired).switched
    assert not picture.describe(facts(wired, 4)).switched
    assert picture.describe(facts(wired, 4, nvswitch={"devices": 4})).switched
    assert picture.describe(facts(more, 4)).switched
    assert not picture.describe(more).switched  # 36 links a GPU: more than any has today, not more than may be


def test_nvlinks_do_not_count_as_links_between_numa_nodes():
    told = texts(drawn(read("27")))
    assert told.count("NV6") == 6
    assert not any("NUMA nodes" in text for text in told)


def test_ten_gpus_with_adapters_of_long_names_keep_whole_cells_in_80_columns():
    text = matrix(square(14, lambda i, j: "NODE"), ["0"] * 10, nics=4)
    long = topology.read(
        text + "\n" + "".join(f"  NIC{n}: a_rather_long_name_of_an_adapter_{n * 2}\n" for n in range(4))
    )
    lines = shown(long)
    assert max(len(line) for line in lines) <= 80
    assert sum(line.split().count("NODE") for line in lines if line.startswith("GPU")) == 90 + 10


def test_a_narrower_gpu_in_a_switched_host_stands_out():
    text = matrix(square(8, lambda i, j: "NV16" if 3 in (i, j) else "NV18"), ["0"] * 4 + ["1"] * 4)
    root = drawn(text)
    assert "NVSwitch: all other pairs NV18 (21)" in texts(root)
    lines = [element.get("data-pair") for element in root.iter() if "data-pair" in element.attrib]
    assert sorted(lines) == ["0-3", "1-3", "2-3", "3-4", "3-5", "3-6", "3-7"]
    assert texts(root).count("NV16") == 7


def test_a_pair_whose_directions_differ_is_marked_everywhere():
    text = matrix(square(8, lambda i, j: "SYS" if (i, j) == (1, 6) else "NV18"), ["0"] * 8)
    root = drawn(text)
    odd = [element for element in root.iter() if "asymmetric" in (element.get("class") or "")]
    assert [(element.get("data-pair"), element.get("data-link")) for element in odd] == [("1-6", "SYS")]
    assert "SYS ≠ NV18" in texts(root)
    assert "GPU1 sees GPU6 over SYS" in root.find(f"{SVG}desc").text
    lines = shown(text)
    rows = {line.split()[0]: line.split() for line in lines if " X" in line}
    assert rows["GPU1"][7] == "SYS*"
    assert rows["GPU6"][2] == "NV18*"


def test_numa_nodes_are_boxes_and_what_is_not_told_is_one_without_a_name():
    def names(numa):
        root = drawn(matrix(square(4, lambda i, j: "PHB"), numa))
        boxes = [element for element in root.iter() if element.get("class") == "box"]
        return len(boxes), [text for text in texts(root) if text.startswith("NUMA")]

    assert names(["0", "0", "1", "1"]) == (2, ["NUMA node 0", "NUMA node 1"])
    assert names(["0-1"] * 4) == (1, ["NUMA nodes 0-1"])
    assert names(["N/A"] * 4) == (1, [])
    assert names(["0", "0", "N/A", "N/A"]) == (2, ["NUMA node 0", "NUMA node not told"])


def test_adapters_with_the_same_links_are_one_group():
    found = picture.describe(read("69"))
    assert [len(group.names) for group in found.adapters] == [62]
    assert "mlx5_0–mlx5_60 (61)," in " ".join(texts(drawn(read("69"))))


HOSTILE = "mlx<&>\"5'\x1b"


def test_names_are_escaped():
    text = matrix(square(3, lambda i, j: "PIX"), ["0", "0"], nics=1)
    table = topology.read(text)
    strange = topology.Topology(table.gpus, (HOSTILE,), table.cells, numa_affinity=("<0>", "<0>"))
    found = picture.describe(strange, host="<&host>")
    root = ElementTree.fromstring(picture.svg(found))
    assert "mlx<&>\"5'\ufffd" in texts(root)
    assert "NUMA node <0>" in texts(root)
    assert root.find(f"{SVG}title").text == "Links of <&host>"
    assert "\x1b" not in "\n".join(shown(strange))


def test_the_facts_say_model_memory_and_numa_node():
    root = drawn(facts((FOLDER / "41.txt").read_bytes().decode(), 8), host="gpu-03")
    told = texts(root)
    assert told[0] == "gpu-03: 8 × NVIDIA H100 80GB HBM3"
    assert told.count("81559 MiB") == 8
    assert "between NUMA nodes: every pair SYS (16)" in told


def test_findings_are_listed_and_mark_the_gpus_and_pairs_they_name():
    findings = [
        {"id": "nvlink-narrower", "severity": "warning", "message": "GPU3 has fewer, while GPU0 has 18: 2-3 NV17"},
        {"id": "xid", "severity": "error", "message": "Xid 79 since boot on 0000:15:00.0: fallen off the bus"},
        {"id": "group", "severity": "info", "message": "driver 570.124-1 and <this>", "gpus": [7], "pairs": ["0-4"]},
    ]
    source = facts((FOLDER / "41.txt").read_bytes().decode(), 8)
    found = picture.describe(source, findings)
    assert [(mark.gpus, mark.pairs) for mark in found.marks] == [((3,), ((2, 3),)), ((5,), ()), ((7,), ((0, 4),))]
    root = ElementTree.fromstring(picture.svg(found))
    assert outside(root) == []
    marked = [
        element.get("data-gpu")
        for element in root.iter()
        if element.get("class") == "gpu" and any("stroke" in part.get("style", "") for part in element)
    ]
    assert marked == ["3", "5", "7"]
    # The pair of a finding leaves the bar and becomes a line.
    assert "between NUMA nodes: all other pairs SYS (15)" in texts(root)
    assert pairs_of(root)["SYS"] == 16
    assert "info group: driver 570.124-1 and <this>" in texts(root)
    assert any("xid: Xid 79" in line for line in shown(source, findings=findings))


def test_many_findings_are_counted_not_drawn_over_the_edge():
    findings = [{"id": f"f{n}", "severity": "error", "message": "GPU0 " + "word " * 200} for n in range(20)]
    root = drawn(facts((FOLDER / "41.txt").read_bytes().decode(), 8), findings)
    assert "and 8 findings more" in texts(root)
    assert outside(root) == []


def test_a_host_that_told_no_links_is_drawn_without_them():
    source = facts(None, 2, nics=[{"name": "mlx5_0", "netdev": "eth1", "pci_address": "0000:01:00.0", "numa_node": 0}])
    root = drawn(source)
    assert "Links are not known: the host told no links" in texts(root)
    assert "link not told" in texts(root)
    assert pairs_of(root) == {}
    told = picture.as_json(picture.describe(source))
    assert (told["gpus"], told["pairs"], told["worst"], told["details"]["untold"]) == (
        2,
        {},
        None,
        "the host told no links",
    )
    assert "No links to show: the host told no links" in shown(source)


def test_a_host_without_gpus():
    source = facts(None, 0)
    assert outside(drawn(source, host="gpu-09")) == []
    assert "gpu-09: no GPU" in shown(source, host="gpu-09")
    assert picture.as_json(picture.describe(source))["gpus"] == 0


def test_amd_links_have_a_colour_of_their_own():
    case = next(
        case for case in CASES if case["expected"].get("kind") == "amd_rocm_smi" and "pairs" in case["expected"]
    )
    text = (FOLDER / f"{case['id']}.txt").read_bytes().decode()
    source = facts(text, case["expected"]["gpus"], vendor="amd")
    links = list(case["expected"]["pairs"].values())
    assert pairs_of(drawn(source)) == {link: links.count(link) for link in links}
    assert picture.as_json(picture.describe(source))["pairs"] == case["expected"]["pairs"]
    assert picture.describe({**source, "topology": {"matrix": "nothing"}}).untold


def test_what_cannot_be_read_is_refused():
    with pytest.raises(topology.Refused):
        picture.describe("no table")
    with pytest.raises(topology.Refused):
        picture.describe(facts("no table", 2))


def test_the_drawing_needs_no_other_file_and_speaks_to_screen_readers():
    text = picture.svg(picture.describe(read("65"), host="gpu-04"))
    assert re.findall(r"(?:href|src|url|@import|<script)", text) == []
    assert text.count("http") == 1  # the namespace
    root = ElementTree.fromstring(text)
    assert root.get("role") == "img"
    assert root.get("aria-labelledby") == "title desc"
    assert {root.find(f"{SVG}title").get("id"), root.find(f"{SVG}desc").get("id")} == {"title", "desc"}
    assert "every pair NV18 (28 pairs)" in root.find(f"{SVG}desc").text
    assert "prefers-color-scheme:dark" in text


def test_the_words_of_the_legend_cover_every_link_of_the_reader():
    assert {"NV", *topology.PCIE_LINKS} <= set(picture.WORDS) == set(picture.LOOKS)
