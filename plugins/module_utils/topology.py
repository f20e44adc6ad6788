"""Reads the link tables of GPU hosts as people and machines hand them on: `nvidia-smi topo -m`, `nvidia-smi topo -p2p`,
`rocm-smi --showtopo`.

What was printed often arrives damaged: colour codes, lost tabs, glued or wrapped columns, log prefixes. A table is read
when every cell can be told for certain, else `Refused` is raised with the reason; nothing is guessed. A cell counts only
where its row has exactly the cells that the header announces and says X on the diagonal.

Links, best first, in nvidia-smi's words (its own man page, section topo): NV# (# bonded NVLinks), PIX (at most one PCIe
switch), PXB (several switches, no host bridge), PHB (a PCIe host bridge), NODE (several host bridges of one NUMA node),
SYS (across NUMA nodes; SOC in old drivers).
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Pattern, Sequence, Tuple

PCIE_LINKS = ("PIX", "PXB", "PHB", "NODE", "SYS")
AFFINITY_COLUMNS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
# OK and the reasons for no, as the legend of `nvidia-smi topo -p2p` has them.
P2P_STATES = {
    "OK": "status ok",
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "NS": "not supported",
    "U": "unknown",
}
# NVLinks between two GPUs: 18 on Hopper and Blackwell; twice that leaves room, and three digits are two glued numbers.
MOST_NVLINKS = 36

# A cell, as far as a letter or a blank ends it: `NV120-23` may be NV12 and 0-23 or NV1 and 20-23, so it is neither.
_TOPOLOGY_CELL = re.compile(r"X|NV[1-9]\d?(?![\d,./-])|PIX|PXB|PHB|NODE|SYS|SOC")
_P2P_CELL = re.compile(r"X|OK|CNS|GNS|TNS|NS|U")
_AMD_CELL = re.compile(r"XGMI|PCIE|0(?!\d)")
_ANY_CELL = re.compile(r"(?:X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC|OK|CNS|GNS|TNS|NS|U|XGMI|PCIE|\d+)(?![\w.])")
_COLOUR = re.compile("[\x1b\ufffd]?\\[[0-9;]{0,8}m|\x1b\\[[0-9;?]*[A-Za-z]|\ufffd")
_RULE = re.compile(r"[-=+|:_\s]*\Z")
_HEADER = re.compile(r"(?<!\w)GPU0(?![\w])")
_NAME = re.compile(r"[A-Za-z][\w.-]*\Z")
_AFFINITY = re.compile(r"(?:\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*|N/A)\Z")


class Refused(Exception):
    """The text is no table that can be read for certain.

    reason  one sentence for the reader
    kind    what the text is instead: nvidia_topo_m (damaged), nvidia_topo_p2p, amd_rocm_smi, none
    """

    def __init__(self, reason: str, kind: str = "nvidia_topo_m") -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind


def quality(link: str) -> Tuple[int, int]:
    """Sorts links, the best first: `min(links, key=quality)` is the best one. Raises ValueError for no link."""
    if link.startswith("NV"):
        return (0, -int(link[2:]))
    return (1 + PCIE_LINKS.index(link), 0)


def is_nvlink(link: str) -> bool:
    return link.startswith("NV")


def nvlinks(link: str) -> int:
    """How many NVLinks a link has; 0 for one over PCIe."""
    return int(link[2:]) if is_nvlink(link) else 0


@dataclass(frozen=True)
class Topology:
    """The links between the devices of one host.

    gpus            how many GPUs; they are numbered from 0 as nvidia-smi numbers them
    nics            names of the network adapters in the table, in its order
    cells           the cell of (row, column), devices numbered through: GPUs first, then network adapters
    cpu_affinity, numa_affinity, gpu_numa_id    a text for each GPU, "" where printed blank, None where that cannot be
                    told; None instead of them all: no such column
    """

    gpus: int
    nics: Tuple[str, ...] = ()
    cells: Dict[Tuple[int, int], str] = field(default_factory=dict)
    cpu_affinity: Optional[Tuple[Optional[str], ...]] = None
    numa_affinity: Optional[Tuple[Optional[str], ...]] = None
    gpu_numa_id: Optional[Tuple[Optional[str], ...]] = None

    def link(self, one: int, other: int) -> str:
        """The link between two devices; where its two cells differ, the worse one."""
        return max(self.cells[one, other], self.cells[other, one], key=quality)

    def pairs(self) -> Dict[Tuple[int, int], str]:
        """The link of every pair of GPUs, the lower number first."""
        return {(i, j): self.link(i, j) for i in range(self.gpus) for j in range(i + 1, self.gpus)}

    def asymmetric(self) -> List[Tuple[int, int]]:
        """Pairs of GPUs whose two cells differ."""
        return [pair for pair in self.pairs() if self.cells[pair] != self.cells[pair[1], pair[0]]]

    def among(self, group: Sequence[int]) -> List[str]:
        """The links of every pair within a group of GPUs."""
        return [self.link(i, j) for n, i in enumerate(group) for j in group[n + 1 :]]

    def as_dict(self) -> Dict[str, Any]:
        """gpus, pairs {"0-1": "NV18"}, worst, best, all_nvlink (None for one GPU), asymmetric, nvlink_widths."""
        pairs = self.pairs()
        links = sorted(set(pairs.values()), key=quality)
        return {
            "gpus": self.gpus,
            "pairs": {name(pair): link for pair, link in pairs.items()},
            "worst": links[-1] if links else None,
            "best": links[0] if links else None,
            "all_nvlink": all(is_nvlink(link) for link in links) if links else None,
            "asymmetric": [name(pair) for pair in self.asymmetric()],
            "nvlink_widths": [link for link in links if is_nvlink(link)],
        }


def name(pair: Sequence[int]) -> str:
    """How a pair of GPUs is written: `0-1`."""
    return "-".join(str(number) for number in pair)


def read(text: str) -> Topology:
    """The table that `nvidia-smi topo -m` printed, alone or among other lines. Raises Refused."""
    lines = _clean(text)
    tables = _tables(lines)
    wanted = [table for table in tables if table.kind == "nvidia_topo_m"]
    if not wanted:
        raise _no_matrix(text, lines, tables)
    found = [_topology(table) for table in wanted]
    if any(other != found[0] for other in found[1:]):
        raise Refused(f"the text holds {len(found)} tables that differ; which one is meant cannot be told")
    return found[0]


def read_p2p(text: str) -> Dict[str, str]:
    """The states of `nvidia-smi topo -p2p r` (or w, n, a, p): {"0-1": "OK"}, of two cells the one that is not OK.

    Raises Refused.
    """
    tables = [table for table in _tables(_clean(text)) if table.kind == "nvidia_topo_p2p"]
    if len(tables) != 1:
        raise Refused(f"the text holds {len(tables)} tables of nvidia-smi topo -p2p, one is needed", "none")
    rows = _rows(tables[0], _P2P_CELL)
    states = {}
    for i in range(tables[0].gpus):
        for j in range(i + 1, tables[0].gpus):
            both = [rows[i].cells[j], rows[j].cells[i]]
            states[name((i, j))] = next((state for state in both if state != "OK"), "OK")
    return states


def read_amd(text: str) -> Dict[str, Any]:
    """The link types of `rocm-smi --showtopo`: gpus, pairs {"0-1": "XGMI"}, worst, best, all_xgmi. Raises Refused."""
    for table in _tables(_clean(text)):
        if table.kind != "amd_rocm_smi":
            continue
        rows = _rows(table, _AMD_CELL, diagonal="0")
        pairs = {}
        for i in range(table.gpus):
            for j in range(i + 1, table.gpus):
                one, other = rows[i].cells[j], rows[j].cells[i]
                pairs[name((i, j))] = one if one == other else "PCIE"
        links = sorted(set(pairs.values()), reverse=True)  # XGMI before PCIE
        return {
            "gpus": table.gpus,
            "pairs": pairs,
            "worst": links[-1] if links else None,
            "best": links[0] if links else None,
            "all_xgmi": all(link == "XGMI" for link in links) if links else None,
        }
    raise Refused("the text holds no table of link types as rocm-smi --showtopo prints them", "none")


# Inside


@dataclass
class _Row:
    label: str
    prefix: str
    text: str
    line: str  # as it came, for the columns of what follows the cells
    mended: bool = False  # put together from pieces: believed only while nothing contradicts it
    cells: Tuple[str, ...] = ()
    rest: str = ""


@dataclass
class _Table:
    names: List[str]
    gpus: int
    affinity: int  # how many of the affinity columns the header has
    rows: List[_Row]
    mended: bool
    kind: str
    adapters: Dict[str, str]  # what the legend calls NIC0, NIC1


def _clean(text: str) -> List[str]:
    """Lines without colours, carriage returns, table rules of markdown and drawn lines."""
    plain = _COLOUR.sub("", text.replace("\r\n", "\n").replace("\r", "\n")).replace("\u00a0", " ")
    if all(line.lstrip().startswith(">") for line in plain.split("\n") if line.strip()):  # quoted, as in a mail
        plain = re.sub(r"(?m)^\s*> ?", "", plain)
    lines = [line.replace("|", "\t") if line.count("|") > 1 else line for line in plain.split("\n")]
    return ["" if _RULE.match(line) else line for line in lines]


def _is_header(line: str) -> Optional[int]:
    """Where GPU0 begins, if the line is the head of a table: names follow, no cell."""
    match = _HEADER.search(line)
    if not match:
        return None
    after = line[match.end() :].lstrip()
    if line[match.end() :] and not line[match.end()].isspace():
        return None
    first = after.split(None, 1)[0] if after else ""
    return None if first and (_ANY_CELL.match(first) or not _NAME.match(first)) else match.start()


def _row_start(line: str, labels: Pattern[str]) -> Optional[_Row]:
    """The row that begins on this line: a device's name, then a cell."""
    for match in labels.finditer(line):
        if _ANY_CELL.match(line[match.end() :].lstrip()) or _first_glued(line[match.end() :].lstrip()):
            return _Row(match.group(1), line[: match.start()].strip(), line[match.end() :], line)
    return None


def _first_glued(text: str) -> bool:
    word = text.split(None, 1)[0] if text else ""
    return bool(re.match(r"(?:X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC|OK|CNS|GNS|TNS|NS|U|XGMI|PCIE)+\Z", word))


_LEGEND = re.compile(r"\s*(NIC\d+): (\S+)\s*\Z")
_LABEL = re.compile(r"(?<!\S)(GPU\d+|NIC\d+)(?=\s)")


def _tables(lines: List[str]) -> List[_Table]:
    """Every table of devices by devices in the text. Raises Refused for one that begins and cannot be followed."""
    tables: List[_Table] = []
    at = 0
    while at < len(lines):
        start = _is_header(lines[at])
        if start is None:
            at += 1
            continue
        table, at = _table(lines, at, start)
        if table is not None:
            tables.append(table)
    return tables


def _table(lines: List[str], at: int, start: int) -> Tuple[Optional[_Table], int]:
    """The table whose header begins at column `start` of line `at`, and where the text goes on after it."""
    header = [lines[at][start:].rstrip()]
    after = at + 1
    # What stands before the first row belongs to the header, wrapped by a terminal.
    while after < len(lines) and len(header) <= 4:
        if _row_start(lines[after], _LABEL) or _is_header(lines[after]) is not None:
            break
        if lines[after].strip():
            header.append(lines[after].rstrip())
        after += 1
    if after >= len(lines) or not _row_start(lines[after], _LABEL):
        if re.search(r"CPU\s*Aff", header[0]):
            raise Refused("a header stands there without its rows")
        return None, at + 1  # names without a row: a sentence, not a table
    names, affinity = _names("".join(header))
    rows, after = _collect(lines, after, names)
    gpus = sum(1 for label in names if label.startswith("GPU"))
    adapters = {found.group(1): found.group(2) for found in map(_LEGEND.match, lines) if found}
    return _Table(names, gpus, affinity, rows, len(header) > 1, _kind(rows), adapters), after


def _collect(lines: List[str], after: int, names: List[str]) -> Tuple[List[_Row], int]:
    """The rows of these devices from a line on, wrapped ones put together, and the line after them. Raises Refused."""
    labels = re.compile(r"(?<!\S)(" + "|".join(re.escape(label) for label in names) + r")(?=\s)")
    rows: List[_Row] = []
    while after < len(lines):
        line = lines[after]
        row = _row_start(line, labels)
        strange = _row_start(line, _LABEL)
        if strange is not None and strange.label not in names:
            raise Refused(
                f"the header does not name {strange.label}, which has a row: the text is cut at its right side"
            )
        if row is not None and len(rows) == len(names):
            raise Refused(f"after the last row comes one row more, of {row.label}")
        if row is not None:
            rows.append(row)
        elif _is_header(line) is not None or re.match(r"\W*Legend", line):
            break
        elif line.strip():
            if len(rows) == len(names):
                break
            if not rows:
                raise Refused(f"the header names {' '.join(names)}, the first row is another device's")
            rows[-1].text = rows[-1].text.rstrip() + line.rstrip()
            rows[-1].mended = True
        after += 1
    return rows, after


def _kind(rows: List[_Row]) -> str:
    """Which tool printed it, by the first words of its cells."""
    words = {word for row in rows for word in row.text.split()}
    if words & {"XGMI", "PCIE"}:
        return "amd_rocm_smi"
    if words & {"OK", "CNS", "GNS", "TNS", "NS"}:
        return "nvidia_topo_p2p"
    if all(row.text.split()[:1] and row.text.split()[0].isdigit() for row in rows):
        return "numbers"  # weights and hops of rocm-smi
    return "nvidia_topo_m"


def _names(header: str) -> Tuple[List[str], int]:
    """The devices that a header names, GPUs first, and how many affinity columns follow them. Raises Refused."""
    end = re.search(r"CPU\s*Aff|NUMA\s*Aff|GPU\s*NUMA", header)
    tail = re.sub(r"\s", "", header[end.start() :]) if end else ""
    full = "".join(AFFINITY_COLUMNS).replace(" ", "")
    columns = {full: 3, "CPUAffinityNUMAAffinity": 2, "CPUAffinity": 1, "": 0}.get(tail)
    if columns is None:
        raise Refused(
            f"the header ends in {header[end.start() :].strip()!r}, which no nvidia-smi prints" if end else ""
        )
    names: List[str] = []
    for word in header[: end.start() if end else None].split():
        pieces = re.findall(r"GPU\d+|NIC\d+", word)
        if "".join(pieces) == word:
            names.extend(pieces)
        elif _NAME.match(word):
            names.append(word)
        else:
            raise Refused(f"the header has {word!r} where the name of a device is expected")
    gpus = [label for label in names if re.match(r"GPU\d", label)]
    if gpus != [f"GPU{number}" for number in range(len(gpus))] or names[: len(gpus)] != gpus:
        raise Refused(f"the header does not count its GPUs from 0 upwards: {' '.join(gpus)}")
    if len(set(names)) != len(names):
        raise Refused("the header names a device twice")
    return names, columns


def _rows(table: _Table, cell: Pattern[str], diagonal: str = "X") -> List[_Row]:
    """The rows in the order of the header, each with exactly its cells. Raises Refused."""
    by_label: Dict[str, _Row] = {}
    for row in table.rows:
        if row.label in by_label:
            raise Refused(f"the row of {row.label} stands there twice")
        by_label[row.label] = row
    missing = [label for label in table.names if label not in by_label]
    if missing:
        raise Refused(f"the row of {missing[0]} is missing: the text is cut")
    shapes = {re.sub(r"\d+", "0", row.prefix) for row in table.rows}
    if len(shapes) > 1:
        raise Refused("what stands before the rows differs from row to row")
    if any(
        _ANY_CELL.search(f" {row.prefix} ") and _TOPOLOGY_CELL.fullmatch(row.prefix.split()[-1])
        for row in table.rows
        if row.prefix
    ):
        raise Refused("cells stand before the name of a row")
    rows = [by_label[label] for label in table.names]
    for number, row in enumerate(rows):
        _split(row, cell, len(rows))
        at = [column for column, value in enumerate(row.cells) if value == diagonal]
        if number not in at or (diagonal == "X" and at != [number]):
            raise Refused(f"the row of {row.label} says {diagonal} in column {at}, not in its own: a cell is missing")
    return rows


def _split(row: _Row, cell: Pattern[str], count: int) -> None:
    """Cut a row into its cells, glued ones too, and what follows them. Raises Refused."""
    cells: List[str] = []
    at = 0
    while len(cells) < count:
        blank = re.match(r"\s*", row.text[at:])
        at += blank.end() if blank else 0
        match = cell.match(row.text, at)
        if not match:
            word = row.text[at:].split(None, 1)
            seen = repr(word[0]) if word else "its end"
            raise Refused(f"the row of {row.label} has {seen} where cell {len(cells) + 1} of {count} is expected")
        if cells and blank is not None and not blank.group():
            row.mended = True
        cells.append(match.group())
        at = match.end()
    row.rest = row.text[at:]
    if row.rest and not row.rest[0].isspace():
        raise Refused(f"the row of {row.label} goes on without a blank after its last cell: {row.rest.split()[0]!r}")
    row.cells = tuple(cells)


def _affinity(row: _Row, columns: int) -> List[Optional[str]]:
    """What a row says in the affinity columns: "" for a blank one, None where it cannot be told which one is blank.

    Raises Refused for anything else.
    """
    words = row.rest.split()
    strange = [word for word in words if not _AFFINITY.match(word)]
    if strange or len(words) > columns:
        what = strange[0] if strange else words[-1]
        raise Refused(f"the row of {row.label} has {what!r} after its cells")
    if len(words) == columns:
        return list(words)
    if row.mended:
        raise Refused(f"the row of {row.label} was wrapped or glued and lacks a column")
    # Where blanks were printed, tabs tell which; nvidia-smi puts two before the last column.
    values = row.rest.split("\t")[1:]
    if len(values) == columns + 1 and columns == 3:
        values = values[:2] + values[3:]
    if len(values) == columns:
        return [value.strip() for value in values]
    # So do the stops of tabs that a terminal has turned into blanks: the one filling that gives this very line.
    base = row.line[: len(row.line) - len(row.rest)]
    fits = []
    for filled in itertools.combinations(range(columns), len(words)):
        told = [words[filled.index(column)] if column in filled else "" for column in range(columns)]
        tail = "".join(f"\t{value}" for value in told[:2]) + "".join(f"\t\t{value}" for value in told[2:])
        if (base + tail).expandtabs(8).rstrip() == row.line.rstrip():
            fits.append(told)
    return list(fits[0]) if len(fits) == 1 else [None] * columns


def _topology(table: _Table) -> Topology:
    """A table of `topo -m`, cell by cell. Raises Refused."""
    if not table.affinity:
        raise Refused("the header ends after its devices, where every nvidia-smi has CPU Affinity: the text is cut")
    rows = _rows(table, _TOPOLOGY_CELL)
    cells: Dict[Tuple[int, int], str] = {}
    full: List[bool] = []
    texts: List[List[Optional[str]]] = []
    for number, row in enumerate(rows):
        is_gpu = number < table.gpus
        texts.append(_affinity(row, table.affinity if is_gpu else 0))
        full.append(
            not row.mended and not table.mended and (not is_gpu or ("" not in texts[-1] and None not in texts[-1]))
        )
        for column, value in enumerate(row.cells):
            if number != column:
                cells[number, column] = "SYS" if value == "SOC" else value
                if quality(cells[number, column])[1] < -MOST_NVLINKS:
                    raise Refused(f"the row of {row.label} has {value}, more NVLinks than any GPU has")
    found = Topology(
        gpus=table.gpus,
        nics=tuple(table.adapters.get(label, label) for label in table.names[table.gpus :]),
        cells=cells,
        **{
            key: tuple(texts[gpu][column] for gpu in range(table.gpus)) if column < table.affinity else None
            for column, key in enumerate(("cpu_affinity", "numa_affinity", "gpu_numa_id"))
        },
    )
    for one, other in found.asymmetric():
        if not (full[one] and full[other]):
            raise Refused(
                f"GPU{one} and GPU{other} contradict each other ({cells[one, other]}, {cells[other, one]}) "
                "in rows that did not arrive whole"
            )
    return found


def _no_matrix(text: str, lines: List[str], tables: List[_Table]) -> Refused:
    """Why there is no table of `topo -m` in the text, and what there is."""
    kinds = {table.kind for table in tables}
    if "ROCm System Management Interface" in text or "amd_rocm_smi" in kinds:
        return Refused("this is what rocm-smi prints about AMD GPUs, not nvidia-smi topo -m", "amd_rocm_smi")
    if "nvidia_topo_p2p" in kinds:
        return Refused(
            "this is a table of nvidia-smi topo -p2p (states of peer access), not of topo -m", "nvidia_topo_p2p"
        )
    if not any(line.strip() for line in lines):
        return Refused("the text is empty", "none")
    return Refused(
        "there is no table of nvidia-smi topo -m in it: no line that begins with GPU0 and names devices", "none"
    )
