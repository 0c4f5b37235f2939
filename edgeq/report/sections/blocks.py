"""Building blocks of sections: tables, lists of facts, bars, folded parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edgeq.report.data import Pairs
from edgeq.report.markup import Child, Markup, isolated, join, tag


def section(anchor: str, title: str, *children: Child, lead: Child = None) -> Markup:
    """A section with its heading; empty where there is nothing in it."""
    content = join(children)
    if not content:
        return Markup()
    return tag(
        "section",
        tag("h2", title, id=f"{anchor}-title"),
        tag("p", lead, class_="lead") if lead else None,
        content,
        id=anchor,
        aria_labelledby=f"{anchor}-title",
    )


def facts(pairs: Pairs, *, class_: str | None = None) -> Markup:
    """Names and values in two columns."""
    if not pairs:
        return Markup()
    return tag(
        "dl",
        *(tag("div", tag("dt", key), tag("dd", isolated(value, limit=300))) for key, value in pairs),
        class_=class_,
    )


def table(
    heads: Sequence[str], body: Iterable[Sequence[Child]], *, text_columns: Sequence[int] = (0,), caption: str = ""
) -> Markup:
    """A table that scrolls sideways where it must; columns hold numbers, but for those in `text_columns`."""
    rows = [tag("tr", *(_cell(cell, i, text_columns) for i, cell in enumerate(row))) for row in body]
    if not rows:
        return Markup()
    head = tag(
        "tr", *(tag("th", h, scope="col", class_=None if i in text_columns else "n") for i, h in enumerate(heads))
    )
    inner = tag("table", tag("caption", caption) if caption else None, tag("thead", head), tag("tbody", *rows))
    return tag("div", inner, class_="scroll", tabindex=0, role="region", aria_label=caption or heads[0] or "table")


def _cell(cell: Child, index: int, text_columns: Sequence[int]) -> Markup:
    if index == 0:
        return tag("th", cell, scope="row")
    return tag("td", cell, class_=None if index in text_columns else "n")


def folded(summary: str, *children: Child) -> Markup:
    """Something to open; closed at first, and in print."""
    content = join(children)
    return tag("details", tag("summary", summary), content) if content else Markup()


def bar(parts: Sequence[tuple[float, str]], shown: str, *, label: str = "") -> Markup:
    """A bar of parts end to end, each a share (0 to 1) of the room and a kind, the value beside it.

    Args:
        label: what the value is; shown only where no column heading says it.
    """
    fills = [
        tag("span", class_=f"fill {kind}", style=f"width:{100 * min(1.0, max(0.0, share)):.1f}%")
        for share, kind in parts
        if share > 0
    ]
    return tag(
        "span",
        tag("span", label, class_="said") if label else None,
        tag("span", *fills, class_="track", aria_hidden="true"),
        tag("span", shown, class_="value"),
        class_="bar",
    )


SERIES = (("base", "float32"), ("other", "int8"))
"""The two kinds of bars, and their names."""


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    return tag(
        "ul",
        *(tag("li", tag("span", class_=f"swatch {kind}", aria_hidden="true"), name) for kind, name in entries),
        class_="legend",
    )


def notes(texts: Sequence[str], *, class_: str = "notes") -> Markup:
    return tag("ul", *(tag("li", isolated(text, limit=600)) for text in texts), class_=class_) if texts else Markup()
