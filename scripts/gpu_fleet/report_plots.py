"""Line charts as SVG text: axes with units, nice ticks, lines told apart by colour, dash and mark, so that print and the
colour-blind can read them, too. Pure; no library, nothing loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

# In units of the view box: letters of 13 are still some 10 pixels where the chart is as wide as a phone.
WIDTH, HEIGHT, LETTER = 420.0, 300.0, 13.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 14.0, 12.0, 48.0
# Colours after Okabe and Ito, which are told apart by the colour-blind, darkened where they are pale on white; with eight lines, as
# many as a host has GPUs, colour and dash together tell them apart.
LOOKS = (
    ("#0072b2", ""),
    ("#b8540c", "7 4"),
    ("#7a2d6b", "2 3"),
    ("#00785a", "9 3 2 3"),
    ("#555555", "1 2"),
    ("#0072b2", "12 3"),
    ("#b8540c", ""),
    ("#7a2d6b", "7 4"),
)
MARKS = ("circle", "square", "diamond", "triangle", "cross", "square", "circle", "triangle")
LOG_FROM = 30.0  # how many times the least the most has to be for a logarithmic axis
MOST_MARKS = 60  # a line with more points is a course in time: no marks


@dataclass(frozen=True)
class Line:
    """A line: its name, points, and a word for each that is written beside it ("" for none)."""

    name: str
    points: Sequence[tuple[float, float]]
    words: Sequence[str] = ()


@dataclass(frozen=True)
class Chart:
    """What a chart shows. limits: horizontal lines, name and value; bands: name, from, to; near: a point to ring."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    limits: Sequence[tuple[str, float]] = ()
    bands: Sequence[tuple[str, float, float]] = ()
    ring: tuple[float, float] | None = None
    from_zero: bool = True
    marked: bool = field(default=True)


def nice(most: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is not below a number."""
    if most <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= most * (1 - 1e-9))


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers over a range, its ends among them or beyond."""
    step = nice((high - low) / about or 1.0)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten over a range, its ends among them or beyond."""
    every = [step * 10.0**power for power in range(-6, 10) for step in (1, 2, 5)]
    below = [value for value in every if value <= low * (1 + 1e-9)][-1]
    above = next(value for value in every if value >= high * (1 - 1e-9))
    found = [value for value in every if below <= value <= above]
    return found if len(found) <= 8 else [value for value in found if f"{value:e}"[0] == "1" or value in (below, above)]


def number(value: float) -> str:
    """A tick's text: 1,500 or 0.25."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


@dataclass(frozen=True)
class Scale:
    """From values to places in the view box."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        if self.log:
            share = (math.log(max(value, self.low)) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.begin + (self.end - self.begin) * share


def _scales(chart: Chart) -> tuple[Scale, list[float], Scale, list[float]]:
    xs = [x for line in chart.lines for x, _ in line.points]
    ys = [y for line in chart.lines for _, y in line.points]
    shown = [*ys, *(value for _, value in chart.limits)]
    least = min((y for y in shown if y > 0), default=0.0)
    log = not chart.from_zero and least > 0 and min(shown) > 0 and max(shown) / least >= LOG_FROM
    across = ticks(0.0 if chart.from_zero or min(xs) >= 0 else min(xs), max(xs))
    up = log_ticks(least, max(shown)) if log else ticks(0.0, max(shown))
    return (
        Scale(across[0], across[-1], LEFT, WIDTH - RIGHT),
        across,
        Scale(up[0], up[-1], HEIGHT - BOTTOM, TOP, log),
        up,
    )


def svg(chart: Chart) -> str:
    """The chart; one without any point says so. Each point of a marked line has the class `point`, each line `line`."""
    lines = [line for line in chart.lines if line.points]
    head = (
        f'<svg class="chart" viewBox="0 0 {WIDTH:g} {HEIGHT + LETTER * 1.5 * len(lines):g}" role="img" '
        f'aria-label="{escape(chart.title, quote=True)}" xmlns="http://www.w3.org/2000/svg">'
    )
    if not lines:
        text = (
            f'<text x="{WIDTH / 2:g}" y="{HEIGHT / 2:g}" text-anchor="middle" class="none">nothing was measured</text>'
        )
        return f"{head}{text}</svg>"
    across, x_ticks, up, y_ticks = _scales(Chart(**{**chart.__dict__, "lines": lines}))
    parts = [head, *_axes(chart, across, x_ticks, up, y_ticks)]
    for name, begin, end in chart.bands:
        parts.append(
            f'<rect class="band" x="{across.at(begin):.1f}" y="{TOP:g}" width="{max(across.at(end) - across.at(begin), 1):.1f}" '
            f'height="{HEIGHT - BOTTOM - TOP:g}"><title>{escape(name)}</title></rect>'
            f'<text class="small" x="{across.at(begin) + 3:.1f}" y="{HEIGHT - BOTTOM - 5:g}">{escape(name)}</text>'
        )
    for name, value in chart.limits:
        y = up.at(value)
        # Above its line, and below it where the chart ends there. On the left, where loads and so latencies are small.
        letters = y - 4 if y > TOP + LETTER else y + LETTER
        parts.append(
            f'<line class="limit" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="small" x="{LEFT + 6:g}" y="{letters:.1f}">{escape(name)}</text>'
        )
    if chart.ring:
        x, y = across.at(chart.ring[0]), up.at(chart.ring[1])
        parts.append(f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="9"><title>knee</title></circle>')
    for place, line in enumerate(lines):
        parts += _line(line, place, across, up, chart.marked)
        parts += _legend(line, place)
    return "".join([*parts, "</svg>"])


def _axes(chart: Chart, across: Scale, x_ticks: Sequence[float], up: Scale, y_ticks: Sequence[float]) -> list[str]:
    bottom, parts = HEIGHT - BOTTOM, []
    for value in y_ticks:
        y = up.at(value)
        parts.append(
            f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 5:g}" y="{y + LETTER / 3:.1f}" text-anchor="end">{number(value)}</text>'
        )
    for value in x_ticks:
        x = across.at(value)
        anchor = "end" if value == x_ticks[-1] and len(number(value)) > 4 else "middle"
        parts.append(
            f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom:g}" y2="{bottom + 4:g}"/>'
            f'<text class="tick" x="{x:.1f}" y="{bottom + 4 + LETTER:g}" text-anchor="{anchor}">{number(value)}</text>'
        )
    label = f"{chart.y} (logarithmic)" if up.log else chart.y
    middle = (TOP + bottom) / 2
    return [
        *parts,
        f'<line class="axis" x1="{LEFT:g}" x2="{LEFT:g}" y1="{TOP:g}" y2="{bottom:g}"/>',
        f'<line class="axis" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{bottom:g}" y2="{bottom:g}"/>',
        f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2:g}" y="{HEIGHT - 8:g}" text-anchor="middle">{escape(chart.x)}</text>',
        f'<text class="label" transform="translate(13 {middle:g}) rotate(-90)" text-anchor="middle">{escape(label)}</text>',
    ]


def _line(line: Line, place: int, across: Scale, up: Scale, marked: bool) -> list[str]:
    colour, dash = LOOKS[place % len(LOOKS)]
    places = [(across.at(x), up.at(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [
        f'<polyline class="line" points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
    ]
    if not marked or len(places) > MOST_MARKS:
        return parts
    taken: list[tuple[float, float]] = []
    for index, (x, y) in enumerate(places):
        value_x, value_y = line.points[index]
        told = f"{line.name}: {number(value_y)} at {number(value_x)}"
        parts.append(f'<g class="point"><title>{escape(told)}</title>{_mark(place, x, y, colour)}</g>')
        word = line.words[index] if index < len(line.words) else ""
        # Words that would lie on each other are left out; the table has them all.
        if word and all(abs(x - other) > LETTER * 1.3 or abs(y - above) > LETTER for other, above in taken):
            taken.append((x, y))
            parts.append(f'<text class="small" x="{x:.1f}" y="{y - 7:.1f}" text-anchor="middle">{escape(word)}</text>')
    return parts


def _mark(place: int, x: float, y: float, colour: str) -> str:
    kind, r = MARKS[place % len(MARKS)], 4.0
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:g}" fill="{colour}"/>'
    if kind == "cross":
        path = f"M{x - r:.1f},{y - r:.1f} L{x + r:.1f},{y + r:.1f} M{x - r:.1f},{y + r:.1f} L{x + r:.1f},{y - r:.1f}"
        return f'<path d="{path}" stroke="{colour}" stroke-width="2"/>'
    corners = {
        "square": ((-r, -r), (r, -r), (r, r), (-r, r)),
        "diamond": ((0, -r * 1.3), (r * 1.3, 0), (0, r * 1.3), (-r * 1.3, 0)),
        "triangle": ((0, -r * 1.2), (r * 1.2, r), (-r * 1.2, r)),
    }[kind]
    path = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{path}" fill="{colour}"/>'


def _legend(line: Line, place: int) -> list[str]:
    """Below the chart, one line each: names are of any length."""
    colour, dash = LOOKS[place % len(LOOKS)]
    y = HEIGHT + LETTER * 1.5 * place + LETTER * 0.6
    return [
        f'<line x1="{LEFT:g}" x2="{LEFT + 34:g}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>',
        _mark(place, LEFT + 17, y, colour),
        f'<text class="small" x="{LEFT + 42:g}" y="{y + LETTER / 3:.1f}">{escape(line.name)}</text>',
    ]
