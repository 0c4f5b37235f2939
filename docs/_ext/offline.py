"""Fail the build if a page would make a browser load something from another site."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import SphinxError

# What a browser fetches by itself; <a href> is followed only by a click.
LOADS = {"src", "srcset", "poster", "data", "background"}
ELSEWHERE = re.compile(r"\s*(?:[a-z]+:)?//", re.IGNORECASE)
STYLE_LOADS = re.compile(r"""(?:url\(|@import)\s*["']?\s*(?:[a-z]+:)?//[^"')\s]*""", re.IGNORECASE)


class Loads(HTMLParser):
    """Return the addresses outside the site that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            loads = name in LOADS or (tag == "link" and name == "href")
            if value and ((loads and ELSEWHERE.match(value)) or (name == "style" and STYLE_LOADS.search(value))):
                self.found.append(value)


def outside(file: Path) -> list[str]:
    """Return the addresses that a page or a style sheet loads from other sites."""
    text = file.read_text("utf-8")
    if file.suffix == ".css":
        return STYLE_LOADS.findall(text)
    page = Loads()
    page.feed(text)
    return page.found


def check(app: Sphinx, problem: Exception | None) -> None:
    """Check all built pages."""
    if problem or app.builder.format != "html":
        return
    files = [file for file in Path(app.outdir).rglob("*") if file.suffix in (".html", ".css")]
    found = [f"{file.relative_to(app.outdir)}: {address}" for file in sorted(files) for address in outside(file)]
    if found:
        raise SphinxError("the site loads from elsewhere:\n" + "\n".join(found))


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the extension to Sphinx."""
    app.connect("build-finished", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
