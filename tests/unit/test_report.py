"""The page of an acceptance: whole, self-contained, everything escaped, every chart with points, axes and units.

tests/long/test_report_browser.py looks at it in a real browser.
"""

from __future__ import annotations

import copy
import html.parser
import json
import re
import xml.etree.ElementTree as ET

import pytest
from conftest import REPOSITORY
from gpu_fleet import report_page as report
from gpu_fleet import report_plots
from hypothesis import given, settings
from hypothesis import strategies as st
from report_world import compared, documents

VOID = {"meta", "link", "br", "img"}


class Page(html.parser.HTMLParser):
    """Tags in order, and whether each that was opened is closed."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.said = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        self.said.append(data)


@pytest.fixture(scope="module", params=documents(), ids=lambda told: told["name"])
def told(request):
    return request.param


def charts(page):
    return [ET.fromstring(text) for text in re.findall(r"<svg class=\"chart\".*?</svg>", page)]


def words(svg):
    return [element.text or "" for element in svg.iter("{http://www.w3.org/2000/svg}text")]


def test_a_page_is_whole_and_loads_nothing(told):
    text = report.page(told)
    page = Page(text)
    assert not page.open
    for tag, attributes in page.tags:
        assert tag not in ("script", "iframe", "object", "embed")
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href"):
            assert attributes.get(name, "data:").startswith("data:"), attributes
    assert not re.search(r"url\(|@import", text)
    assert "default-src 'none'" in text
    assert "width=device-width" in text and "@media print" in text


def test_every_chart_has_points_axes_and_units(told):
    drawn = charts(report.page(told))
    assert len(drawn) >= 6
    for chart in drawn:
        lines = [line for line in chart.iter("{http://www.w3.org/2000/svg}polyline") if line.get("class") == "line"]
        assert lines and all(len(line.get("points").split()) > 1 for line in lines), chart.get("aria-label")
        said = words(chart)
        assert [word for word in said if re.search(r"tokens/s|requests|seconds|ms|MiB|%", word)], said
        for line in lines:
            for x, y in (place.split(",") for place in line.get("points").split()):
                assert report_plots.LEFT - 1 <= float(x) <= report_plots.WIDTH and 0 <= float(y) <= report_plots.HEIGHT


def test_the_page_says_what_the_document_says(told):
    said = " ".join(Page(report.page(told)).said)
    for verdict in told["verdicts"]:
        assert verdict["name"] in said and all(
            " ".join(line.split()) in " ".join(said.split()) for line in verdict["evidence"]
        )
    assert f"{told['knee']['concurrency']:g}" in said and told["knee"]["rule"] in said
    assert told["versions"]["vllm"] in said and told["objective"]["from"] in said


def test_differences_are_in_it():
    said = " ".join(Page(report.page(compared())).said)
    assert "slower" in said and "then" in said and "they lie apart by up to" in said


def test_what_comes_from_outside_is_escaped():
    evil = '<script>alert("x")</script>'
    told = copy.deepcopy(documents()[0])
    told["service"] = told["name"] = told["model"] = told["notes"][:] = evil
    told["notes"] = [evil]
    told["config"][evil] = evil
    told["points"][0]["errors"] = {evil: 1}
    told["verdicts"][0]["evidence"] = [evil]
    page = Page(report.page(told))
    assert not [tag for tag, _ in page.tags if tag == "script"] and evil in "".join(page.said)


def test_a_host_with_gpus_shows_its_links_and_how_busy_they_were():
    facts = next(told for told in documents() if told["name"].startswith("gpus"))
    assert "data:image/svg+xml;base64," in report.page(facts)
    assert re.search(r"90%<br><span class=.quiet.>memory 20%", report.page(facts))


def test_nothing_measured_is_said_and_no_fault():
    told = copy.deepcopy(documents()[0])
    told |= {"points": [], "runs": [], "samples": {}, "recommendation": None, "too_small": [], "differences": None}
    told["knee"] = {**told["knee"], "concurrency": None, "seen": False}
    assert "nothing was measured" in report.page(told)


@pytest.mark.parametrize(("value", "round_up"), [(0.9, 1), (1.0, 1), (1.1, 2), (3, 5), (7, 10), (1234, 2000), (0, 1)])
def test_nice_numbers(value, round_up):
    assert report_plots.nice(value) == pytest.approx(round_up)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(1e-3, 1e7)), min_size=1, max_size=30), st.booleans())
@settings(max_examples=50, deadline=None)
def test_every_line_stays_inside_its_axes(points, from_zero):
    drawn = ET.fromstring(
        report_plots.svg(
            report_plots.Chart("t", "x, s", "y, ms", [report_plots.Line("one", points)], from_zero=from_zero)
        )
    )
    (line,) = drawn.iter("{http://www.w3.org/2000/svg}polyline")
    for place in line.get("points").split():
        x, y = (float(part) for part in place.split(","))
        assert report_plots.LEFT - 0.2 <= x <= report_plots.WIDTH - report_plots.RIGHT + 0.2
        assert report_plots.TOP - 0.2 <= y <= report_plots.HEIGHT - report_plots.BOTTOM + 0.2
    labels = [element for element in drawn.iter("{http://www.w3.org/2000/svg}text") if element.get("class") == "tick"]
    assert len(labels) <= 20


def test_json_and_page_are_of_the_same_document(told):
    assert report.page(json.loads(json.dumps(told))) == report.page(told)


def test_the_recorded_host_is_a_real_one():
    assert (REPOSITORY / "tests" / "unit" / "fixtures" / "hosts" / "h200x2.json").is_file()
