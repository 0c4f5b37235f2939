"""HTML and SVG from values. What is not `Markup` is text from somewhere, and is escaped: there is no other way in."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from html import escape

Child = str | None
Attribute = str | int | float | bool | None

_HTML_VOID = frozenset({"meta", "br", "hr"})
_SVG_LEAVES = frozenset({"line", "rect", "circle", "path"})
# Characters that reorder or break the text around them: shown as numbers, so that no name dresses up as another.
_UNRULY = frozenset("\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")
_UNPRINTABLE = frozenset({"Cc", "Cs"})


class Markup(str):
    """HTML that is safe to put into the page as it is."""

    __slots__ = ()


def visible(text: str) -> str:
    """`text` on one line, its control and direction characters as ⟨202E⟩."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(c) for c in text)


def _visible(c: str) -> str:
    if c in "\t\n\r":
        return " "
    if c in _UNRULY or unicodedata.category(c) in _UNPRINTABLE:
        return f"⟨{ord(c):04X}⟩"
    return c


def text(value: str) -> Markup:
    """Escaped text, for content and attributes alike."""
    return value if isinstance(value, Markup) else Markup(escape(visible(value), quote=True))


def join(children: Iterable[Child], between: str = "") -> Markup:
    """Children one after another, plain strings among them escaped, None left out."""
    return Markup(text(between).join(text(child) for child in children if child is not None))


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """An element.

    `class_` is class, and `stroke_width` stroke-width. None and False leave an attribute out, True gives it without a
    value; numbers are written with at most two decimals.
    """
    written = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        written.append(key if value is True else f'{key}="{text(number(value))}"')
    opening = " ".join(written)
    if name in _HTML_VOID:
        return Markup(f"<{opening}>")
    if name in _SVG_LEAVES and not children:
        return Markup(f"<{opening}/>")
    return Markup(f"<{opening}>{join(children)}</{name}>")


def number(value: str | int | float) -> str:
    """A number as an attribute: two decimals, without trailing zeros."""
    if isinstance(value, float):
        shown = f"{value:.2f}".rstrip("0").rstrip(".")
        return "0" if shown == "-0" else shown
    return str(value)


def isolated(name: str, *, limit: int = 200, class_: str | None = None) -> Markup:
    """A name from a model: in a direction of its own, cut in the middle where longer than `limit`, whole on hover."""
    shown = shorten(name, limit)
    return tag("bdi", shown, class_=class_, title=shorten(name, 1000) if len(name) > limit else None)


def shorten(value: str, limit: int) -> str:
    """At most `limit` characters, the middle left out: names differ at their ends."""
    shown = visible(value[: limit * 4] + value[-limit:] if len(value) > limit * 5 else value)
    if len(shown) <= limit:
        return shown
    head = limit // 2
    return f"{shown[:head]}…{shown[len(shown) - (limit - 1 - head) :]}"
