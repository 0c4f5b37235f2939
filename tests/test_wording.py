"""Check the form of the pages; CONTRIBUTING.md, "Style", has the rules for words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def lines_of_page(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of every line outside of code blocks."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and not line.startswith("    "):
            yield number, line


def test_pages_are_wrapped() -> None:
    """Pages are wrapped at 120 characters. Tables and code blocks may have longer lines."""
    pages = sorted((*(REPOSITORY / "docs").rglob("*.md"), *REPOSITORY.glob("*.md")))
    long = [
        f"{path.relative_to(REPOSITORY)}:{number}"
        for path in pages
        for number, line in lines_of_page(path.read_text("utf-8"))
        if len(line) > 120 and not line.startswith("|")
    ]
    assert not long, f"wrap {', '.join(long)}"
