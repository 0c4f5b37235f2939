"""Test results in a notebook's page: whole words and readable colours under JupyterLab's styles, in both themes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeq.reporting.page import draw

from . import samples
from .browser import Page, browsing, find_browser

LEGIBLE = (Path(__file__).parent / "legible.js").read_text("utf-8").partition("\n")[2]
REAL = Path(sys.prefix) / "share/jupyter/nbconvert/templates/lab/static"
# JupyterLab's styles that apply to a result: the rules, and the variables of each theme.
RULES = """
.jp-RenderedHTMLCommon { color: var(--jp-content-font-color1); font-size: 14px; line-height: 1.6; padding-right: 20px; }
.jp-RenderedHTMLCommon h1:first-child, .jp-RenderedHTMLCommon h2 { line-height: 1; font-weight: 500; margin: 1.2em 0; }
.jp-RenderedHTMLCommon ul:not(.list-inline) { padding-left: 2em; }
.jp-RenderedHTMLCommon table { color: var(--jp-ui-font-color1); font-size: 13px; table-layout: fixed; }
.jp-RenderedHTMLCommon td, .jp-RenderedHTMLCommon th { padding: 0.5em; white-space: normal; border: none; }
:not(.jp-RenderedMarkdown).jp-RenderedHTMLCommon td { text-align: right; }
.jp-RenderedHTMLCommon tbody tr:nth-child(odd) { background: var(--jp-layout-color0); }
.jp-RenderedHTMLCommon tbody tr:nth-child(even) { background: var(--jp-rendermime-table-row-background); }
.jp-RenderedHTMLCommon pre { background-color: var(--jp-layout-color0); color: var(--jp-content-font-color1); }
.jp-OutputArea-child { display: table; table-layout: fixed; width: 100%; }
.jp-OutputArea-output { display: table-cell; width: 100%; overflow: auto; }
.jp-OutputArea-output pre { word-break: break-all; white-space: pre-wrap; }
.jp-OutputArea-output dt { font-weight: bold; float: left; width: 20%; padding: 0; margin: 0; }
.jp-OutputArea-output dd { float: left; width: 80%; padding: 0; margin: 0; }
"""
THEMES = {
    "light": """--jp-layout-color0: white; --jp-content-font-color0: rgba(0, 0, 0, 1);
        --jp-content-font-color1: rgba(0, 0, 0, 0.87); --jp-ui-font-color1: rgba(0, 0, 0, 0.87);
        --jp-rendermime-table-row-background: #f5f5f5;""",
    "dark": """--jp-layout-color0: #111; --jp-content-font-color0: rgba(255, 255, 255, 1);
        --jp-content-font-color1: rgba(255, 255, 255, 1); --jp-ui-font-color1: rgba(255, 255, 255, 0.87);
        --jp-rendermime-table-row-background: #212121;""",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    program = find_browser()
    if program is None:
        pytest.skip("no chromium here (apt-get install chromium)")
    with browsing(program) as page:
        yield page


def excerpt(theme: str) -> str:
    return f":root {{ {THEMES[theme]} }} {RULES}"


def installed(theme: str) -> str:
    files = [REAL / "index.css", REAL / f"theme-{theme}.css"]
    if not all(file.exists() for file in files):
        pytest.skip("JupyterLab's own styles are not installed here (pip install nbconvert)")
    return "\n".join(file.read_text("utf-8") for file in files)


@pytest.mark.parametrize("styles", [excerpt, installed], ids=lambda styles: styles.__name__)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_cell_is_legible_in_each_theme(browser: Page, tmp_path: Path, styles: object, theme: str) -> None:
    assert callable(styles)
    heads = ("Model", "What it is", "operators")
    record = {**samples.record(), "tables": [("Operators", heads, [("BatchNormalization", "a name", "1024")] * 3)]}
    page = tmp_path / "notebook.html"
    page.write_text(
        f"<!doctype html><html><head><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<style>{styles(theme)} body {{ margin: 0; background: var(--jp-layout-color0); }}</style></head>"
        f"<body data-jp-theme-light='{'true' if theme == 'light' else 'false'}'>"
        f"<div class='jp-OutputArea-child'><div class='jp-RenderedHTMLCommon jp-RenderedHTML jp-OutputArea-output'>"
        f"{draw(record)}</div></div></body></html>",
        "utf-8",
    )
    for width in (1280, 390):
        for dark_system in (False, True):
            browser.open(page, width=width, dark=dark_system)
            found = browser.evaluate(f"({LEGIBLE})('.edgeq')")
            for fault, texts in found.items():
                assert texts == [], f"{fault} at {width} px, dark system: {dark_system}"
            assert browser.evaluate("document.querySelectorAll('.edgeq table').length") > 3
