"""The page of an acceptance in a real browser (browser.py says how it is started): desktop, phone and print.

    scripts/test long report_browser

Pictures are kept in .cache/logs/report, a CI's artefact: CPU and GPU, wide and on a phone, and the print as PDF.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "collections"), str(ROOT / "tests" / "unit")]

from browser import Browser  # noqa: E402
from gpu_fleet import report_page as report  # noqa: E402
from report_world import compared, documents  # noqa: E402

KEPT = ROOT / ".cache" / "logs" / "report"
PHONE = 360
A4 = 688  # 182 mm between the margins, at 96 pixels an inch
# Of each chart: how many lines, the least points of one, how many marks and words are seen, and whether something sticks out.
CHARTS = """
Array.from(document.querySelectorAll('svg.chart')).map(chart => {
  const box = chart.getBoundingClientRect();
  const inside = e => { const b = e.getBoundingClientRect();
    return b.left >= box.left - 1 && b.right <= box.right + 1 && b.top >= box.top - 1 && b.bottom <= box.bottom + 1; };
  const seen = e => { const b = e.getBoundingClientRect(); return b.width > 0 || b.height > 0; };
  const lines = Array.from(chart.querySelectorAll('polyline.line'));
  const words = Array.from(chart.querySelectorAll('text'));
  return {name: chart.getAttribute('aria-label'), lines: lines.filter(seen).length,
    points: Math.min(...lines.map(line => line.points.numberOfItems)),
    out: words.filter(e => !inside(e)).map(e => e.textContent),
    letters: Math.min(...words.map(e => e.getBoundingClientRect().height)), width: box.width};
})
"""
OVERLAPS = """
Array.from(document.querySelectorAll('svg.chart')).flatMap(chart => {
  const boxes = Array.from(chart.querySelectorAll('text.tick')).map(e => [e.textContent, e.getBoundingClientRect()]);
  return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([b, q]) =>
    p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 2 && q.top < p.bottom - 2).map(([b, q]) => chart.getAttribute('aria-label') + ': ' + a + ' on ' + b));
})
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    one = Browser(tmp_path_factory.mktemp("browser"))
    yield one
    one.close()


def pages():
    return [*documents(), compared()]


@pytest.fixture(scope="module", params=pages(), ids=lambda told: told["name"])
def page(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / f"{request.param['name']}.html"
    path.write_text(report.page(request.param), encoding="utf-8")
    return path


@pytest.mark.parametrize("phone", [False, True], ids=["wide", "phone"])
def test_it_is_readable_and_quiet(browser, page, phone):
    browser.show(page, PHONE if phone else 1280, phone=phone)
    KEPT.mkdir(parents=True, exist_ok=True)
    browser.picture(KEPT / f"{page.stem}-{'phone' if phone else 'wide'}.png")
    assert browser.complaints() == []
    assert browser.asked_for() == [page.resolve().as_uri()], "nothing but the page itself"
    width = browser.value("document.documentElement.scrollWidth")
    assert width <= (PHONE if phone else 1280), "the page itself does not scroll sideways"
    charts = browser.value(CHARTS)
    assert len(charts) >= 6
    for chart in charts:
        assert chart["lines"] >= 1 and chart["points"] >= 2, chart
        assert chart["out"] == [], chart
        assert chart["letters"] >= (9 if phone else 11), chart
    assert browser.value(OVERLAPS) == []
    sizes = "Math.min(...Array.from(document.querySelectorAll('p, td, li, h1, h2')).map(e => parseFloat(getComputedStyle(e).fontSize)))"
    assert browser.value(sizes) >= 14


def test_pictures_in_it_are_drawn(browser, page):
    browser.show(page, 1280)
    drawn = browser.value("Array.from(document.images).map(i => [i.complete, i.naturalWidth])")
    assert all(done and width > 0 for done, width in drawn)
    assert len(drawn) == (1 if page.stem == "gpus" else 0)


def test_it_can_be_printed(browser, page):
    browser.do("Emulation.setEmulatedMedia", media="print")
    browser.show(page, A4)
    width = browser.value("document.documentElement.scrollWidth")
    browser.do("Emulation.setEmulatedMedia", media="")
    assert width <= A4, "nothing is cut off on paper"
    KEPT.mkdir(parents=True, exist_ok=True)
    path = KEPT / f"{page.stem}.pdf"
    browser.printed(path)
    assert path.read_bytes().startswith(b"%PDF") and path.stat().st_size > 20_000


def test_what_a_page_logs_is_seen(browser, tmp_path):
    """The test itself can fail: an error and a request are noticed."""
    path = tmp_path / "bad.html"
    path.write_text("<img src='nothing.png'><script>console.error('wrong'); nothing()</script>")
    browser.show(path, 800)
    assert any("wrong" in line for line in browser.complaints()) and any(
        "nothing" in line for line in browser.complaints()
    )
    assert any(url.endswith("nothing.png") for url in browser.asked_for())
