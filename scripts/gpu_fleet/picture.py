"""The picture of a host's links: as SVG, as a terminal table, as JSON. All three tell the same.

Drawn are NUMA nodes side by side with their GPUs, an arc for each pair of GPUs in the colour of its link, network adapters
below. Where many pairs have one link, a bar says so once instead of dozens of lines that hide the others: "NVSwitch: every
pair NV18", "between NUMA nodes: every pair SYS". Pairs that differ from the rest, whose two directions differ or that a
finding names are always lines of their own.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpu_fleet import domain

topology = domain.module_util("topology")

# The legend of `nvidia-smi topo -m`; the last two are the link types of `rocm-smi --showtopo`.
WORDS = {
    "NV": "Connection traversing a bonded set of # NVLinks",
    "PIX": "Connection traversing at most a single PCIe bridge",
    "PXB": "Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)",
    "PHB": "Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)",
    "NODE": "Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node",
    "SYS": "Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)",
    "XGMI": "AMD Infinity Fabric (xGMI)",
    "PCIE": "PCIe",
}
CLASSES = tuple(WORDS)
# Colours on light and on dark ground (after Okabe and Ito: told apart with any colour vision), width in pixels, dashes,
# style in a terminal. The width of NVLink follows the number of links.
LOOKS = {
    "NV": ("#008a64", "#2fd3a3", 0.0, "", "green"),
    "PIX": ("#2f96d8", "#7cc8f5", 3.0, "", "cyan"),
    "PXB": ("#0b4f94", "#4a9be8", 2.6, "", "blue"),
    "PHB": ("#e09a00", "#f2bd3f", 2.4, "", "yellow"),
    "NODE": ("#a85800", "#df8a35", 2.0, "", "dark_orange"),
    "SYS": ("#cc2a1e", "#ff7d6e", 1.8, "6 4", "red"),
    "XGMI": ("#008a64", "#2fd3a3", 4.0, "", "green"),
    "PCIE": ("#a85800", "#df8a35", 2.0, "", "dark_orange"),
}
MARKS = {"error": ("#b3261e", "bold red"), "warning": ("#8a5a00", "yellow"), "info": ("#4b5563", "dim")}
# A bar stands for pairs when it spares at least this share of the lines, and only among this many GPUs.
BAR_SHARE = 0.6
BAR_GPUS = 5
FINDINGS_SHOWN = 12
_PAIRS = re.compile(r"(?<![\w.:/-])\d+-\d+(?![\w/-]|[.:]\w)")
# Width of a letter by its height: the widest of the common sans-serif fonts, so that text ends no later than computed.
LETTER = 0.64


@dataclass(frozen=True)
class Gpu:
    """number as the driver counts; the rest None where nobody told; numa is a text such as `0` or `0-1`."""

    number: int
    name: str | None = None
    memory_mib: int | None = None
    numa: str | None = None


@dataclass(frozen=True)
class Adapters:
    """Network adapters that have the same link to every GPU; a link is None where nobody told."""

    names: tuple[str, ...]
    links: Mapping[int, str | None]

    def nearest(self) -> str | None:
        """The best link that they have to any GPU."""
        told = [link for link in self.links.values() if link]
        return min(told, key=topology.quality) if told else None


@dataclass(frozen=True)
class Mark:
    """A finding, and the GPUs and pairs that it names."""

    id: str
    severity: str
    message: str
    gpus: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Picture:
    """What is drawn.

    links       the link of each pair of GPUs, the lower number first; empty where nobody told
    two_ways    of pairs whose two directions differ: the link as the lower and as the higher number sees it
    switched    whether it is certain that NVSwitches join the GPUs
    summary     the fields of Topology.as_dict()
    untold      why no links are known, None when they are
    """

    gpus: tuple[Gpu, ...]
    links: Mapping[tuple[int, int], str]
    summary: Mapping[str, Any]
    two_ways: Mapping[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    adapters: tuple[Adapters, ...] = ()
    marks: tuple[Mark, ...] = ()
    switched: bool = False
    host: str = ""
    untold: str | None = None


def describe(source: Any, findings: Iterable[Mapping[str, Any]] = (), host: str = "") -> Picture:
    """The picture of a host from what is known of it.

    source    what module gpu_facts returned (a mapping), a Topology, or the text of `nvidia-smi topo -m`
    findings  mappings with id, severity and message; GPUs (`GPU3`, a PCI address of the facts) and pairs (`0-1`) that
              a message names are marked, unless it has lists of its own: `gpus: [3]`, `pairs: ["0-1"]`
    host      its name, for the title

    Raises topology.Refused when the text, or the matrix in the facts, cannot be read for certain.
    """
    facts: Mapping[str, Any] = source if isinstance(source, Mapping) else {}
    table, amd, untold = None, None, None
    if isinstance(source, str):
        table = topology.read(source)
    elif not isinstance(source, Mapping):
        table = source
    else:
        text = facts["topology"]["matrix"]
        if text and facts["vendor"] == "amd":
            try:
                amd = topology.read_amd(text)
            except topology.Refused as refused:  # amd-smi prints its tables in ways of its own
                untold = refused.reason
        elif text:
            table = topology.read(text)
        else:
            untold = "the host told no links"
    gpus = _gpus(facts, table, amd)
    links: dict[tuple[int, int], str] = table.pairs() if table else {}
    if amd:
        links = {_pair(pair): link for pair, link in amd["pairs"].items()}
    return Picture(
        gpus=gpus,
        links=links,
        summary=_summary(table, amd, len(gpus)),
        two_ways={(i, j): (table.cells[i, j], table.cells[j, i]) for i, j in table.asymmetric()} if table else {},
        adapters=_adapters(facts, table, gpus),
        marks=tuple(_mark(finding, facts, {gpu.number for gpu in gpus}) for finding in findings),
        switched=_switched(facts, table),
        host=host,
        untold=untold if len(gpus) > 1 else None,
    )


def as_json(picture: Picture) -> dict[str, Any]:
    """The fields of Topology.as_dict() and, as `details`, what else is drawn."""
    return {
        **picture.summary,
        "details": {
            "names": {str(gpu.number): gpu.name for gpu in picture.gpus},
            "memory_mib": {str(gpu.number): gpu.memory_mib for gpu in picture.gpus},
            "numa": {str(gpu.number): gpu.numa for gpu in picture.gpus},
            "adapters": [
                {"names": list(group.names), "links": {str(gpu): link for gpu, link in group.links.items()}}
                for group in picture.adapters
            ],
            "nvswitch": picture.switched,
            "untold": picture.untold,
            "findings": [
                {
                    "id": mark.id,
                    "severity": mark.severity,
                    "message": mark.message,
                    "gpus": list(mark.gpus),
                    "pairs": [topology.name(pair) for pair in mark.pairs],
                }
                for mark in picture.marks
            ],
        },
    }


def table(picture: Picture) -> RenderableType:
    """For a terminal: the matrix of links, a line for each GPU, the findings. Eight GPUs fit in 80 columns."""
    parts: list[RenderableType] = [Text(_headline(picture), style="bold")]
    if picture.untold:
        parts.append(Text(f"No links to show: {picture.untold}"))
    else:
        block = 12 if len(picture.gpus) <= 12 and not picture.adapters else 8
        parts += [_matrix(picture, picture.gpus[at : at + block]) for at in range(0, len(picture.gpus), block)]
    if picture.two_ways:
        told = "; ".join(
            f"GPU{i} sees GPU{j} over {one}, GPU{j} sees GPU{i} over {other}"
            for (i, j), (one, other) in picture.two_ways.items()
        )
        parts.append(Text(f"* the two directions differ and the worse one counts: {told}"))
    parts += ["", _gpu_lines(picture)]
    for mark in picture.marks:
        parts.append(
            Text.assemble((mark.severity, MARKS.get(mark.severity, MARKS["info"])[1]), f" {mark.id}: {mark.message}")
        )
    return Group(*parts)


def svg(picture: Picture) -> str:
    """The picture as an SVG file: needs no other file, has a title and a description for who cannot see it."""
    return _Drawing(picture).text()


# What is known


def _pair(text: str) -> tuple[int, int]:
    one, other = sorted(int(number) for number in text.split("-"))
    return one, other


def _gpus(facts: Mapping[str, Any], table: Any, amd: Mapping[str, Any] | None) -> tuple[Gpu, ...]:
    told = {gpu["index"]: gpu for gpu in facts.get("gpus", ())}
    count = table.gpus if table else amd["gpus"] if amd else 0
    column = (table.numa_affinity if table else None) or ()
    found = []
    for number in sorted({*told, *range(count)}):
        gpu = told.get(number, {})
        numa = gpu.get("numa_node")
        if numa is None and number < len(column) and column[number] not in ("", "N/A"):
            numa = column[number]
        found.append(
            Gpu(number, gpu.get("name"), gpu.get("memory_mib"), None if numa is None else str(numa)),
        )
    return tuple(found)


def _summary(table: Any, amd: Mapping[str, Any] | None, gpus: int) -> dict[str, Any]:
    if table:
        return table.as_dict()
    summary = topology.Topology(gpus=0).as_dict() | {"gpus": gpus}
    if amd:
        summary |= {key: amd[key] for key in ("pairs", "worst", "best")}
        summary["all_nvlink"] = False if amd["pairs"] else None
    return summary


def _adapters(facts: Mapping[str, Any], table: Any, gpus: Sequence[Gpu]) -> tuple[Adapters, ...]:
    links: dict[str, dict[int, str | None]] = {}
    for at, name in enumerate(table.nics if table else ()):
        links[name] = {
            gpu.number: table.link(gpu.number, table.gpus + at) if gpu.number < table.gpus else None for gpu in gpus
        }
    for nic in facts.get("nics", ()):
        links.setdefault(nic["name"], {gpu.number: None for gpu in gpus})
    groups: dict[tuple[str | None, ...], list[str]] = {}
    for name, told in links.items():
        groups.setdefault(tuple(told.values()), []).append(name)
    return tuple(Adapters(tuple(names), links[names[0]]) for names in groups.values())


def _mark(finding: Mapping[str, Any], facts: Mapping[str, Any], there: set[int]) -> Mark:
    message = str(finding["message"])
    # "GPU2 has fewer, while GPU0 and GPU1 have some": what comes after `while` is the yardstick, not the fault.
    fault = message.split(", while ", maxsplit=1)[0]
    gpus = {int(number) for number in re.findall(r"\bGPU(\d+)\b", fault)}
    gpus |= {gpu["index"] for gpu in facts.get("gpus", ()) if gpu["pci_address"] and gpu["pci_address"] in fault}
    pairs = {_pair(found) for found in _PAIRS.findall(message) if len(set(found.split("-"))) > 1}
    if "gpus" in finding:
        gpus = set(finding["gpus"])
    if "pairs" in finding:
        pairs = {_pair(pair) for pair in finding["pairs"]}
    return Mark(
        id=str(finding["id"]),
        severity=str(finding["severity"]),
        message=message,
        gpus=tuple(sorted(gpus & there)),
        pairs=tuple(sorted(pair for pair in pairs if there.issuperset(pair))),
    )


def _switched(facts: Mapping[str, Any], table: Any) -> bool:
    """NVSwitches are seen, or the links of one GPU are more than any GPU has: not every pair has links of its own."""
    if facts and facts["nvswitch"]["devices"]:
        return True
    if not table:
        return False
    most = max((len(gpu["nvlinks"]) for gpu in facts.get("gpus", ())), default=0) or topology.MOST_NVLINKS
    return any(
        sum(topology.nvlinks(table.link(gpu, other)) for other in range(table.gpus) if other != gpu) > most
        for gpu in range(table.gpus)
    )


# Words


def _kind(link: str) -> str:
    return "NV" if topology.is_nvlink(link) else link


def _best_first(links: Iterable[str]) -> list[str]:
    return sorted(set(links), key=lambda link: (CLASSES.index(_kind(link)), -topology.nvlinks(link)))


def _model(gpu: Gpu) -> str:
    return (gpu.name or "").removeprefix("NVIDIA ").strip()


def _headline(picture: Picture) -> str:
    models = Counter(gpu.name for gpu in picture.gpus if gpu.name)
    if models and sum(models.values()) == len(picture.gpus):
        told = ", ".join(f"{count} × {name}" for name, count in models.items())
    else:
        told = f"{len(picture.gpus)} GPU{'s' if len(picture.gpus) != 1 else ''}" if picture.gpus else "no GPU"
    return f"{picture.host}: {told}" if picture.host else told


def _links_told(picture: Picture) -> str:
    """One sentence: which links there are."""
    if picture.untold:
        return f"Links are not known: {picture.untold}"
    counts = Counter(picture.links.values())
    if not counts:
        return "One GPU, so no pairs" if len(picture.gpus) == 1 else ""
    if len(counts) == 1:
        link, pairs = next(iter(counts.items()))
        if pairs == 1:
            return f"The pair is joined by {link}"
        return ("Joined by NVSwitch: every" if picture.switched else "Every") + f" pair {link} ({pairs} pairs)"
    return "Pairs: " + ", ".join(f"{counts[link]} {link}" for link in _best_first(counts))


def _numbers(numbers: Sequence[int]) -> str:
    """`GPU0–3, 6`."""
    return "GPU" + ", ".join(
        str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" if len(run) > 2 else f"{run[0]}, {run[1]}"
        for run in _runs(list(numbers))
    )


def _runs(numbers: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _names(names: Sequence[str]) -> str:
    """`mlx5_0, mlx5_1`; three and more that count on as `mlx5_0–mlx5_60 (61)`."""
    parsed = [re.fullmatch(r"(.*?)(\d+)", name, re.DOTALL) for name in names]
    parts: list[list[str]] = []
    for at, name in enumerate(names):
        here, before = parsed[at], parsed[at - 1] if at else None
        follows = here and before and here[1] == before[1] and int(here[2]) == int(before[2]) + 1
        if follows:
            parts[-1].append(name)
        else:
            parts.append([name])
    return ", ".join(f"{part[0]}–{part[-1]} ({len(part)})" if len(part) > 2 else ", ".join(part) for part in parts)


def _by_link(group: Adapters) -> list[tuple[str, str]]:
    """For a group of adapters the GPUs at each link: [("PIX", "GPU0"), ("SYS", "GPU1–3")]."""
    told = _best_first(link for link in group.links.values() if link)
    return [(link, _numbers([gpu for gpu, other in group.links.items() if other == link])) for link in told]


# The terminal


def _style(link: str) -> str:
    return LOOKS[_kind(link)][4]


def _matrix(picture: Picture, columns: Sequence[Gpu]) -> Table:
    grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    grid.add_column("", no_wrap=True, max_width=26, overflow="ellipsis", style="bold")
    for gpu in columns:
        grid.add_column(f"GPU{gpu.number}", no_wrap=True, min_width=5)
    for row in picture.gpus:
        cells = []
        for column in columns:
            pair = (min(row.number, column.number), max(row.number, column.number))
            link = picture.links.get(pair)
            if row.number == column.number:
                cells.append(Text("X", style="dim"))
            elif pair in picture.two_ways:
                link = picture.two_ways[pair][row.number > column.number]
                cells.append(Text(f"{link}*", style=f"bold {_style(link)}"))
            else:
                cells.append(Text(link, style=_style(link)) if link else Text("?"))
        grid.add_row(f"GPU{row.number}", *cells)
    for group in picture.adapters:
        told = [group.links.get(gpu.number) for gpu in columns]
        grid.add_row(
            Text(_clean(_names(group.names))), *(Text(link, style=_style(link)) if link else Text("?") for link in told)
        )
    return grid


def _gpu_lines(picture: Picture) -> Table:
    """Model, memory, NUMA node and nearest adapters of each GPU; what is not known of any has no column."""
    nearest = {gpu.number: _nearest(picture, gpu.number) for gpu in picture.gpus}
    columns: list[tuple[str, dict[int, Text], str]] = []
    for head, texts, justify in (
        ("model", {gpu.number: Text(_clean(_model(gpu))) for gpu in picture.gpus}, "left"),
        ("MiB", {gpu.number: Text(str(gpu.memory_mib or "")) for gpu in picture.gpus}, "right"),
        ("NUMA", {gpu.number: Text(gpu.numa or "") for gpu in picture.gpus}, "left"),
        ("nearest adapters", nearest, "left"),
    ):
        if any(text.plain for text in texts.values()):
            columns.append((head, texts, justify))
    lines = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    lines.add_column("", no_wrap=True, style="bold", min_width=max([4, *(len(f"GPU{gpu}") for gpu in nearest)]))
    for head, texts, justify in columns:
        # Names of adapters can be many: they give way, not what stands before them.
        least = (
            min(40, max(len(head), *(text.cell_len for text in texts.values()))) if head != "nearest adapters" else 8
        )
        lines.add_column(
            head,
            no_wrap=True,
            overflow="ellipsis",
            justify=justify,  # type: ignore[arg-type]
            min_width=least,
            max_width=max(40, least) if head == "model" else None,
        )
    for gpu in picture.gpus if columns else ():
        lines.add_row(f"GPU{gpu.number}", *(texts[gpu.number] for _, texts, _ in columns))
    return lines


def _nearest(picture: Picture, gpu: int) -> Text:
    told = [
        (link, name) for group in picture.adapters for name in group.names for link in [group.links.get(gpu)] if link
    ]
    if not told:
        return Text("")
    best = _best_first(link for link, _ in told)[0]
    names = _names([name for link, name in told if link == best])
    return Text.assemble((best, _style(best)), " ", _clean(names))


# The drawing


def _clean(text: str) -> str:
    """Without what no XML file may hold and no terminal should get."""
    return "".join(
        letter if letter in " \t" or unicodedata.category(letter) not in ("Cc", "Cs", "Co", "Cn") else "�"
        for letter in text
    )


def _wide(text: str, size: float) -> float:
    letters = sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)
    return letters * size * LETTER


def _wrap(text: str, size: float, room: float, lines: int = 99) -> list[str]:
    """Lines that fit in `room` pixels, the last one cut with … where there are more."""
    letters = max(4, int(room / (size * LETTER)))
    if _wide(text, size) > len(text) * size * LETTER:  # letters of double width
        letters = max(2, letters // 2)
    return textwrap.wrap(_clean(text), letters, max_lines=lines, placeholder="…", break_on_hyphens=False)


@dataclass(frozen=True)
class _Arc:
    pair: tuple[int, int]
    link: str
    label: str
    flags: tuple[int, ...]  # numbers of the findings that name it


@dataclass(frozen=True)
class _Bar:
    """One bar instead of many lines: where is `hub` (over all GPUs), `between` (NUMA nodes) or `within` (one of them)."""

    where: str
    link: str
    pairs: int
    label: str
    box: int = 0


def _boxes(gpus: Sequence[Gpu]) -> list[tuple[str | None, list[Gpu]]]:
    """GPUs by NUMA node, in the order of their first GPU."""
    boxes: dict[str | None, list[Gpu]] = {}
    for gpu in gpus:
        boxes.setdefault(gpu.numa, []).append(gpu)
    return list(boxes.items())


def _plan(picture: Picture, boxes: Sequence[tuple[str | None, list[Gpu]]]) -> tuple[list[_Bar], list[_Arc]]:
    """Which pairs bars stand for, and which are drawn."""
    flags: dict[tuple[int, int], list[int]] = {}
    for number, mark in enumerate(picture.marks, 1):
        for pair in mark.pairs:
            flags.setdefault(pair, []).append(number)
    box_of = {gpu.number: at for at, (_, group) in enumerate(boxes) for gpu in group}
    own = {pair for pair in picture.links if pair in flags or pair in picture.two_ways}
    plain = {pair: link for pair, link in picture.links.items() if pair not in own}
    barred: set[tuple[int, int]] = set()
    bars: list[_Bar] = []

    def bar(where: str, among: dict[tuple[int, int], str], total: int, start: str, box: int = 0) -> bool:
        link, count = Counter(among.values()).most_common(1)[0] if among else ("", 0)
        if not count or count < BAR_SHARE * total:
            return False
        what = f"every pair {link} ({count})" if count == total else f"all other pairs {link} ({count})"
        bars.append(_Bar(where, link, count, start + what, box))
        barred.update(pair for pair, other in among.items() if other == link)
        return True

    nvlinks = {pair: link for pair, link in plain.items() if topology.is_nvlink(link)}
    total = len(picture.links)
    uniform = len(boxes) == 1 or len(set(picture.links.values())) == 1
    hub = False
    if len(picture.gpus) >= BAR_GPUS or (picture.switched and len(picture.gpus) > 2):
        start = "NVSwitch: " if picture.switched and nvlinks else ""
        hub = bar("hub", plain if uniform else nvlinks, total, start)
    if not hub:
        for at, (_, group) in enumerate(boxes):
            inside = [pair for pair in picture.links if box_of[pair[0]] == box_of[pair[1]] == at]
            if len(group) >= BAR_GPUS:
                bar("within", {pair: plain[pair] for pair in inside if pair in plain}, len(inside), "", at)
        across = [pair for pair in picture.links if box_of[pair[0]] != box_of[pair[1]]]
        if len(across) > 3:
            told = {pair: plain[pair] for pair in across if pair in plain and pair not in nvlinks}
            bar("between", told, len(across), "between NUMA nodes: ")
    arcs = [
        _Arc(
            pair,
            link,
            "{} ≠ {}".format(*picture.two_ways[pair]) if pair in picture.two_ways else link,
            tuple(flags.get(pair, ())),
        )
        for pair, link in picture.links.items()
        if pair not in barred
    ]
    return bars, arcs


class _Drawing:
    """Lays one picture out, from top to bottom, and writes it. All lengths are pixels."""

    margin = 24.0
    pad = 14.0  # between a box and what is in it
    size = 12.0  # of most text

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self.boxes = _boxes(picture.gpus)
        self.bars, self.arcs = _plan(picture, self.boxes)
        count = len(picture.gpus)
        self.card = 108.0 if count <= 8 else 90.0 if count <= 12 else 76.0
        self.gap = 12.0 if count <= 8 else 8.0
        self.between = 34.0 if len(self.boxes) <= 4 else 18.0
        self.parts: list[str] = []
        self.kinds: set[str] = set()
        self.labels: list[tuple[float, float, float, float]] = []  # places taken: left, top, right, bottom
        self.widths = [
            max(
                len(group) * (self.card + self.gap) - self.gap + 2 * self.pad,
                _wide(self.box_name(numa), self.size) + 2 * self.pad if self.box_name(numa) else 0,
            )
            for numa, group in self.boxes
        ]
        inner = sum(self.widths) + self.between * max(0, len(self.boxes) - 1)
        self.nic_lines = [self.nic_text(group) for group in picture.adapters]
        self.nic_width = max(
            [104.0, *(_wide(text, 11) + 18 for _, lines in self.nic_lines for _, text in lines)], default=104.0
        )
        nics = len(self.nic_lines) * (self.nic_width + 10) - 10
        self.width = max(920.0, inner + 2 * self.margin, min(nics, 1400.0) + 2 * self.margin)
        self.left = (self.width - inner) / 2
        self.gpu_x: dict[int, float] = {}  # left edges
        self.box_x: list[float] = []
        at = self.left
        for (_, group), width in zip(self.boxes, self.widths, strict=True):
            self.box_x.append(at)
            used = len(group) * (self.card + self.gap) - self.gap
            for number, gpu in enumerate(group):
                self.gpu_x[gpu.number] = at + (width - used) / 2 + number * (self.card + self.gap)
            at += width + self.between

    def text(self) -> str:
        bottom = self.head()
        bottom = self.host(bottom)
        bottom = self.nics(bottom)
        bottom = self.legend(bottom)
        bottom = self.findings(bottom)
        height = bottom + self.margin
        picture = self.picture
        title = f"Links of {picture.host}" if picture.host else "Links of a GPU host"
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:.0f} {height:.0f}" '
                f'width="{self.width:.0f}" height="{height:.0f}" role="img" aria-labelledby="title desc">',
                f'<title id="title">{_xml(title)}</title>',
                f'<desc id="desc">{_xml(self.description())}</desc>',
                f"<style>{_css()}</style>",
                f'<rect class="ground" width="{self.width:.0f}" height="{height:.0f}" rx="8"/>',
                *self.parts,
                "</svg>",
                "",
            ]
        )

    def description(self) -> str:
        picture = self.picture
        told = [_headline(picture), _links_told(picture)]
        told += [
            f"{self.box_name(numa)}: {_numbers([gpu.number for gpu in group])}" for numa, group in self.boxes if numa
        ]
        told += [
            f"GPU{i} sees GPU{j} over {one}, GPU{j} sees GPU{i} over {other}"
            for (i, j), (one, other) in picture.two_ways.items()
        ]
        odd = [arc for arc in self.arcs if arc.pair not in picture.two_ways]
        if self.bars and odd:
            told.append("drawn as lines: " + ", ".join(f"{topology.name(arc.pair)} {arc.link}" for arc in odd))
        for group in picture.adapters:
            links = ", ".join(f"{link} to {gpus}" for link, gpus in _by_link(group)) or "links not told"
            told.append(f"network adapters {_names(group.names)}: {links}")
        told += [f"{mark.severity} {mark.id}: {mark.message}" for mark in picture.marks]
        return ". ".join(part for part in told if part) + "."

    def box_name(self, numa: str | None) -> str:
        if numa is not None:
            return f"NUMA node{'s' if re.search(r'[-,]', numa) else ''} {numa}"
        return "NUMA node not told" if len(self.boxes) > 1 else ""

    # Pieces, each returns where the next one may begin

    def head(self) -> float:
        room = self.width - 2 * self.margin
        at = self.margin + 16
        for line in _wrap(_headline(self.picture), 18, room, 2):
            self.write(self.margin, at, line, 18, "strong")
            at += 22
        for line in _wrap(_links_told(self.picture), 13, room, 3):
            self.write(self.margin, at, line, 13, "soft")
            at += 17
        return at

    def host(self, top: float) -> float:
        """NUMA nodes, bars, arcs and GPUs."""
        if not self.picture.gpus:
            return top
        place = {gpu.number: at for at, gpu in enumerate(gpu for _, group in self.boxes for gpu in group)}
        spans = [abs(place[arc.pair[0]] - place[arc.pair[1]]) for arc in self.arcs]
        across = [bar for bar in self.bars if bar.where == "between"]
        over = [bar for bar in self.bars if bar.where != "between"]
        box_top = top + 6 + (58 if across else 0)
        named = any(self.box_name(numa) for numa, _ in self.boxes)
        bar_y = box_top + (28 if named else 12)
        arcs_top = bar_y + (40 if over else -6)
        step = 17.0 if max(spans, default=0) <= 8 else 12.0
        gpu_y = arcs_top + (26 + step * max(spans) if spans else 22 if over else 12)
        cards = {gpu.number: self.card_lines(gpu) for gpu in self.picture.gpus}
        card_height = 30 + 14.0 * max(len(lines) for lines in cards.values())
        box_bottom = gpu_y + card_height + self.pad
        for x, width, (numa, _) in zip(self.box_x, self.widths, self.boxes, strict=True):
            self.add(
                f'<rect class="box" x="{x:.1f}" y="{box_top:.1f}" width="{width:.1f}" '
                f'height="{box_bottom - box_top:.1f}" rx="8"/>'
            )
            if self.box_name(numa):
                self.write(x + self.pad, box_top + 19, self.box_name(numa), self.size, "soft")
        for bar in across:
            ends = [x + width / 2 for x, width in zip(self.box_x, self.widths, strict=True)]
            self.bar(bar, top + 12, (ends[0] - 24, ends[-1] + 24), ends, box_top)
        for bar in over:
            group = self.picture.gpus if bar.where == "hub" else self.boxes[bar.box][1]
            # Beside the arcs, where there are any.
            aside = 10 if self.arcs else self.card / 2
            lefts = [self.gpu_x[gpu.number] for gpu in group]
            self.bar(bar, bar_y, (min(lefts), max(lefts) + self.card), [left + aside for left in lefts], gpu_y)
        self.draw_arcs(place, gpu_y, step)
        for gpu in self.picture.gpus:
            self.gpu(gpu, gpu_y, card_height, cards[gpu.number])
        self.gpu_bottom, self.box_bottom = gpu_y + card_height, box_bottom
        return box_bottom

    def card_lines(self, gpu: Gpu) -> list[str]:
        lines = _wrap(_model(gpu), 11, self.card - 8, 3)
        return [*lines, f"{gpu.memory_mib} MiB"] if gpu.memory_mib is not None else lines

    def gpu(self, gpu: Gpu, y: float, height: float, lines: list[str]) -> None:
        x = self.gpu_x[gpu.number]
        marks = [(number, mark) for number, mark in enumerate(self.picture.marks, 1) if gpu.number in mark.gpus]
        hint = ", ".join(
            part
            for part in (
                f"GPU{gpu.number}",
                gpu.name or "",
                f"{gpu.memory_mib} MiB" if gpu.memory_mib is not None else "",
                self.box_name(gpu.numa) if gpu.numa else "",
                *(f"{mark.id}: {mark.message}" for _, mark in marks),
            )
            if part
        )
        worst = min((mark.severity for _, mark in marks), key=_severity, default="")
        style = f' style="stroke:{MARKS.get(worst, MARKS["info"])[0]};stroke-width:3"' if worst else ""
        self.add(f'<g class="gpu" data-gpu="{gpu.number}"><title>{_xml(hint)}</title>')
        self.add(
            f'<rect class="card" x="{x:.1f}" y="{y:.1f}" width="{self.card:.1f}" height="{height:.1f}" rx="6"{style}/>'
        )
        middle = x + self.card / 2
        self.write(middle, y + 20, f"GPU{gpu.number}", 14, "strong", anchor="middle")
        for at, line in enumerate(lines):
            self.write(middle, y + 35 + 14 * at, line, 11, "", anchor="middle")
        for at, (number, mark) in enumerate(marks[:3]):
            self.badge(x + self.card - 4 - 19 * at, y + height, number, mark.severity)
        self.add("</g>")

    def bar(self, bar: _Bar, y: float, span: tuple[float, float], ends: Sequence[float], down_to: float) -> None:
        """A bar at `y` from left to right of `span`, with a line from it down to each of `ends`."""
        self.kinds.add(_kind(bar.link))
        room = _wide(bar.label, self.size) + 24
        left, right = span
        if right - left < room:
            middle = (left + right) / 2
            left, right = middle - room / 2, middle + room / 2
        left, right = max(4.0, left), min(self.width - 4, right)
        kind = _kind(bar.link)
        self.add(f'<g class="bar {bar.where}" data-link="{bar.link}" data-pairs="{bar.pairs}">')
        self.add(f"<title>{_xml(bar.label)}</title>")
        for x in ends:
            self.add(f'<path class="{kind}" {_stroke(bar.link, 4.0)} d="M{x:.1f},{y + 24:.1f} V{down_to:.1f}"/>')
        self.add(
            f'<rect class="hub {kind}" {_stroke(bar.link, 3.0)} x="{left:.1f}" y="{y:.1f}" width="{right - left:.1f}" '
            'height="26" rx="7"/>'
        )
        self.write((left + right) / 2, y + 17.5, bar.label, self.size, "strong", anchor="middle")
        self.add("</g>")

    def draw_arcs(self, place: Mapping[int, int], base: float, step: float) -> None:
        """Arcs over the GPUs: the worst first, so that the best lie on top; longer ones higher and outside."""
        ports: dict[tuple[int, int], float] = {}
        for gpu, x in self.gpu_x.items():
            others = [next(end for end in arc.pair if end != gpu) for arc in self.arcs if gpu in arc.pair]
            # From left to right: partners on the left, the nearest first; then on the right, the farthest first.
            left = sorted((o for o in others if place[o] < place[gpu]), key=lambda o: -place[o])
            right = sorted((o for o in others if place[o] > place[gpu]), key=lambda o: -place[o])
            aside = 10 if any(bar.where != "between" for bar in self.bars) else 0
            room = self.card - 24 - aside
            for at, other in enumerate([*left, *right]):
                share = 0.5 if len(others) == 1 else at / (len(others) - 1)
                spread = min(1.0, len(others) / 5)
                ports[gpu, other] = x + 12 + aside + room * (0.5 + (share - 0.5) * spread)
        few = Counter(arc.link for arc in self.arcs)
        widths = sum(topology.is_nvlink(link) for link in few)
        labels = []
        order = {link: at for at, link in enumerate(_best_first(few))}
        for arc in sorted(
            self.arcs, key=lambda arc: (bool(arc.flags or arc.pair in self.picture.two_ways), -order[arc.link])
        ):
            i, j = sorted(arc.pair, key=lambda gpu: place[gpu])
            x1, x2 = ports[i, j], ports[j, i]
            height = (10 + step * (place[j] - place[i])) * 4 / 3
            kind = _kind(arc.link)
            self.kinds.add(kind)
            hint = f"GPU{arc.pair[0]} and GPU{arc.pair[1]}: {arc.label}"
            odd = " asymmetric" if arc.pair in self.picture.two_ways else ""
            self.add(
                f'<path class="pair {kind}{odd}" data-pair="{topology.name(arc.pair)}" data-link="{arc.link}" '
                f'{_stroke(arc.link)} d="M{x1:.1f},{base:.1f} C{x1:.1f},{base - height:.1f} {x2:.1f},'
                f'{base - height:.1f} {x2:.1f},{base:.1f}"><title>{_xml(hint)}</title></path>'
            )
            needed = bool(odd or arc.flags)
            if needed or len(self.arcs) <= 16 or few[arc.link] <= 6 or (kind == "NV" and widths > 1):
                labels.append((not needed, order[arc.link], arc, x1, x2, height))
        for optional, _, arc, x1, x2, height in sorted(labels, key=lambda one: one[:2]):
            self.arc_label(arc, (x1, x2), base, height, optional)

    def arc_label(self, arc: _Arc, ends: tuple[float, float], base: float, height: float, optional: bool) -> None:
        x1, x2 = ends
        wide = _wide(arc.label, 11)
        spots = []
        for t in (0.5, 0.4, 0.6, 0.3, 0.7, 0.22, 0.78):
            # A point of the curve: it rises by 3t(1-t) of the height of its two handles.
            x = x1 + (x2 - x1) * (3 * t * t - 2 * t * t * t)
            y = base - 3 * t * (1 - t) * height
            spots.append((x - wide / 2 - 1, y - 7, x + wide / 2 + 1, y + 7))
        free = [spot for spot in spots if not any(_overlap(spot, other) for other in self.labels)]
        if not free and optional:
            return
        left, top, right, bottom = (free or spots)[0]
        self.labels.append((left, top, right + 19 * len(arc.flags), bottom))
        self.write((left + right) / 2, top + 11, arc.label, 11, "halo strong", anchor="middle")
        for at, number in enumerate(arc.flags):
            self.badge(right + 11 + 19 * at, top + 7, number, self.picture.marks[number - 1].severity)

    def badge(self, x: float, y: float, number: int, severity: str) -> None:
        colour = MARKS.get(severity, MARKS["info"])[0]
        self.add(f'<circle class="badge" cx="{x:.1f}" cy="{y:.1f}" r="9" fill="{colour}"/>')
        self.write(x, y + 4, str(number), 11, "on", anchor="middle")

    def nic_text(self, group: Adapters) -> tuple[list[str], list[tuple[str, str]]]:
        """Names, and lines with their class."""
        names = _wrap(_names(group.names), 11, 180, 3)
        lines = [(link, f"{link} {gpus}") for link, gpus in _by_link(group)] or [("", "link not told")]
        return names, [*(("name", name) for name in names), *lines]

    def nics(self, top: float) -> float:
        """Adapters below the GPUs they are nearest to, with a line for their best link; the rest is told in words."""
        groups = self.picture.adapters
        if not groups:
            return top
        per_row = max(1, int((self.width - 2 * self.margin + 10.1) // (self.nic_width + 10)))
        near = {
            at: [gpu for gpu, link in group.links.items() if link and link == group.nearest()]
            for at, group in enumerate(groups)
        }
        middles = {at: sum(self.gpu_x[gpu] for gpu in gpus) / len(gpus) for at, gpus in near.items() if gpus}
        order = sorted(near, key=lambda at: (middles.get(at, self.width), at))
        place: dict[int, tuple[float, float]] = {}
        y = top + 58
        heights = {at: 12 + 14.0 * len(self.nic_lines[at][1]) for at in order}
        for start in range(0, len(order), per_row):
            row = order[start : start + per_row]
            pitch = self.nic_width + 10
            # Under what they are nearest to, as far as the neighbours leave room.
            xs = [min(max(middles.get(at, 0) + self.card / 2 - self.nic_width / 2, self.margin), 1e9) for at in row]
            for number in range(1, len(xs)):
                xs[number] = max(xs[number], xs[number - 1] + pitch)
            last = self.width - self.margin - self.nic_width
            for number in range(len(xs) - 1, -1, -1):
                xs[number] = min(xs[number], last)
                last = xs[number] - pitch
            for at, x in zip(row, xs, strict=True):
                place[at] = (x, y)
            y += max(heights[at] for at in row) + 16
        ends = self.nic_ends(order, near)
        for at in order:
            link = groups[at].nearest()
            if not link:
                continue
            for x2, y2 in ends[at]:
                x1, y1 = place[at][0] + self.nic_width / 2, place[at][1]
                self.kinds.add(_kind(link))
                bend = min(40.0, (y1 - y2) * 0.6)
                self.add(
                    f'<path class="reach {_kind(link)}" data-link="{link}" {_stroke(link)} d="M{x1:.1f},{y1:.1f} '
                    f'C{x1:.1f},{y1 - bend:.1f} {x2:.1f},{y2 + bend:.1f} {x2:.1f},{y2:.1f}"/>'
                )
        for at in order:
            self.nic(groups[at], at, *place[at], heights[at])
        return y - 16

    def nic_ends(self, order: Sequence[int], near: Mapping[int, Sequence[int]]) -> dict[int, list[tuple[float, float]]]:
        """Where the lines of each group of adapters end: at the box when all its GPUs are equally near, else at GPUs."""
        aims: dict[int, list[tuple[str, int]]] = {at: [] for at in order}
        for at in order:
            for box, (_, group) in enumerate(self.boxes):
                wanted = [gpu.number for gpu in group if gpu.number in near[at]]
                if len(wanted) == len(group) > 1:
                    aims[at].append(("box", box))
                else:
                    aims[at] += [("gpu", gpu) for gpu in wanted]
        ends: dict[int, list[tuple[float, float]]] = {at: [] for at in order}
        for aim in {aim: None for at in order for aim in aims[at]}:
            users = [at for at in order if aim in aims[at]]
            left, wide = (
                (self.box_x[aim[1]], self.widths[aim[1]]) if aim[0] == "box" else (self.gpu_x[aim[1]], self.card)
            )
            for number, at in enumerate(users, 1):
                x = left + wide * number / (len(users) + 1)
                ends[at].append((x, self.box_bottom if aim[0] == "box" else self.gpu_bottom))
        return ends

    def nic(self, group: Adapters, at: int, x: float, y: float, height: float) -> None:
        self.add(f'<g class="nic"><title>{_xml(", ".join(group.names))}</title>')
        self.add(
            f'<rect class="card" x="{x:.1f}" y="{y:.1f}" width="{self.nic_width:.1f}" height="{height:.1f}" rx="6"/>'
        )
        for number, (link, line) in enumerate(self.nic_lines[at][1]):
            self.write(x + 9, y + 18 + 14 * number, line, 11, "strong" if link == "name" else "soft")
        self.add("</g>")

    def legend(self, top: float) -> float:
        seen = self.kinds | {_kind(link) for group in self.picture.adapters for link in group.links.values() if link}
        y = top + 34
        for kind in (kind for kind in CLASSES if kind in seen):
            sample = "NV12" if kind == "NV" else kind
            self.add(
                f'<path class="{kind}" {_stroke(sample)} d="M{self.margin:.1f},{y - 4:.1f} H{self.margin + 34:.1f}"/>'
            )
            self.write(self.margin + 44, y, "NV#" if kind == "NV" else kind, self.size, "strong")
            words = WORDS[kind] + ("; the more links, the thicker the line" if kind == "NV" else "")
            for line in _wrap(words, self.size, self.width - 2 * self.margin - 92):
                self.write(self.margin + 92, y, line, self.size, "soft")
                y += 16
            y += 3
        if self.picture.two_ways:
            told = "a ≠ b: the lower number sees the pair over a, the higher one over b; the worse one counts"
            for line in _wrap(told, self.size, self.width - 2 * self.margin):
                self.write(self.margin, y, line, self.size, "soft")
                y += 16
        return y - 16

    def findings(self, top: float) -> float:
        marks = self.picture.marks
        y = top + 34
        for number, mark in enumerate(marks[:FINDINGS_SHOWN], 1):
            self.badge(self.margin + 9, y - 4, number, mark.severity)
            for line in _wrap(f"{mark.severity} {mark.id}: {mark.message}", 12, self.width - 2 * self.margin - 28, 4):
                self.write(self.margin + 26, y, line, self.size)
                y += 16
            y += 6
        if len(marks) > FINDINGS_SHOWN:
            self.write(self.margin, y, f"and {len(marks) - FINDINGS_SHOWN} findings more", self.size)
            y += 22
        return y - 22 if marks else top

    # Elements

    def add(self, element: str) -> None:
        self.parts.append(element)

    def write(self, x: float, y: float, text: str, size: float, style: str = "", *, anchor: str = "") -> None:
        aligned = f' text-anchor="{anchor}"' if anchor else ""
        classes = f' class="{style}"' if style else ""
        self.add(f'<text{classes} x="{x:.1f}" y="{y:.1f}" font-size="{size:g}"{aligned}>{_xml(text)}</text>')


def _severity(severity: str) -> int:
    return list(MARKS).index(severity) if severity in MARKS else len(MARKS)


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _xml(text: str) -> str:
    return escape(_clean(text))


def _stroke(link: str, most: float = 9.0) -> str:
    """Width and dashes of a line; the colour comes with its class."""
    _, _, width, dashes, _ = LOOKS[_kind(link)]
    width = min(most, width or 0.8 + 1.15 * topology.nvlinks(link) ** 0.5)
    return f'stroke-width="{width:.1f}"' + (f" stroke-dasharray={quoteattr(dashes)}" if dashes else "")


def _css() -> str:
    """Colours, for a light and for a dark surrounding; the picture has a ground of its own in both."""
    light, dark = (" ".join(f".{kind}{{stroke:{look[at]}}}" for kind, look in LOOKS.items()) for at in (0, 1))
    return (
        "text{font-family:system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1b2430} .strong{font-weight:600} "
        ".soft{fill:#4a5666} .on{fill:#ffffff;font-weight:600} path{fill:none;stroke-linecap:butt} "
        ".halo{stroke:#f3f5f8;stroke-width:4;stroke-linejoin:round;paint-order:stroke} .ground{fill:#ffffff} "
        ".box{fill:#f3f5f8;stroke:#b9c2cf} .card{fill:#ffffff;stroke:#6b7787;stroke-width:1.2} .hub{fill:#ffffff} "
        f"{light} "
        # A narrow window makes it smaller; within @media, since converters to other formats take `auto` for nothing.
        "@media screen{svg{max-width:100%;height:auto}} "
        "@media (prefers-color-scheme:dark){text{fill:#e8edf3} .soft{fill:#b3bfcd} .on{fill:#ffffff} "
        ".halo{stroke:#1c232d} .ground{fill:#12171e} .box{fill:#1c232d;stroke:#46525f} "
        f".card{{fill:#2a333f;stroke:#8a97a6}} .hub{{fill:#12171e}} {dark}}}"
    )
