"""Test the page in a real browser: no errors or requests, not wider than a phone, a candidate's settings on focus."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeq.reporting.page import render
from edgeq.reporting.read import read_report

from . import samples
from .browser import Page, browsing, find_browser

OVERFLOW = """[...document.querySelectorAll("body *")].filter(e => e.getBoundingClientRect().right > innerWidth + 1
  && !e.closest(".scroll") && !e.closest("pre") && !e.closest(".label-text")).map(e => e.outerHTML.slice(0, 80))"""
SMALL_TEXT = """Math.min(...[...document.querySelectorAll(".chart text")].filter(e => e.getBoundingClientRect().width)
  .map(e => parseFloat(getComputedStyle(e).fontSize) * e.getScreenCTM().a))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    program = find_browser()
    if program is None:
        pytest.skip("no chromium here (apt-get install chromium)")
    with browsing(program) as page:
        yield page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("report") / "report.html"
    place.write_text(render(read_report(samples.record())), "utf-8")
    return place


@pytest.mark.parametrize("width", [390, 1100])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_and_is_quiet(browser: Page, page: Path, width: int, dark: bool) -> None:
    browser.problems.clear()
    browser.requests.clear()
    browser.open(page, width=width, dark=dark)
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate(OVERFLOW) == []
    assert browser.evaluate(SMALL_TEXT) >= 10.5
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(20, 23, 27)") is dark
    assert browser.problems == []
    assert browser.requests == [page.resolve().as_uri()]


def test_tables_of_several_targets_scroll_on_a_phone(browser: Page, tmp_path: Path) -> None:
    place = tmp_path / "several.html"
    variants = {name: {**samples.variant(3), "title": "x86-64 with VNNI"} for name in ("server", "raspberry-pi-5")}
    place.write_text(render(read_report(samples.record(variants=variants))), "utf-8")
    browser.open(place, width=390)
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    assert browser.evaluate("document.querySelector('#variants .scroll').scrollWidth") > 390
    narrowest = "Math.min(...[...document.querySelectorAll('.scroll td:not(.n)')].map(e => e.clientWidth))"
    assert browser.evaluate(narrowest) >= 80  # words are not broken into letters


def test_hostile_names_do_nothing(browser: Page, tmp_path: Path) -> None:
    place = tmp_path / "hostile.html"
    names = "".join(samples.HOSTILE[:6])
    record = samples.renamed(samples.record(), names)
    record["variants"] = {names: samples.renamed(samples.variant(), names)}
    place.write_text(render(read_report(record)), "utf-8")
    browser.problems.clear()
    browser.requests.clear()
    browser.open(place, width=390)
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    assert browser.evaluate("document.scripts.length") == 1
    assert browser.problems == []
    assert browser.requests == [place.resolve().as_uri()]


def test_a_script_that_is_not_ours_does_not_run(browser: Page, page: Path, tmp_path: Path) -> None:
    place = tmp_path / "injected.html"
    text = page.read_text("utf-8").replace("<main>", "<main><script>document.title = 'owned'</script>")
    place.write_text(text, "utf-8")
    browser.problems.clear()
    browser.open(place)
    assert browser.evaluate("document.title") != "owned"
    assert any("Content Security Policy" in problem for problem in browser.problems)


def test_a_candidate_shows_its_settings(browser: Page, page: Path) -> None:
    browser.open(page)
    shown = "document.querySelector('.detail').innerText"
    assert "Point at a mark" in browser.evaluate(shown)
    browser.evaluate("document.querySelector('.wide [data-candidate=\"2\"]').focus()")
    values = browser.evaluate(shown)
    assert "exact" in values
    assert "sequential-correction" in values
    # one in each drawing: for wide screens and for phones
    assert browser.evaluate("document.querySelectorAll('.point.active').length") == 2


def test_it_prints(browser: Page, page: Path) -> None:
    browser.open(page, dark=True)
    printed = browser.pdf()
    assert printed.startswith(b"%PDF")
    assert 3 <= printed.count(b"/Type /Page\n") + printed.count(b"/Type /Page ") <= 20
    browser.open(page, dark=True, media="print")
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
