"""Names and notes from models and bundles, which are untrusted: on one line, isolated, shortened, never markup.

Escaping is Jinja2's; these are the filters that its templates use beside it.
"""

from __future__ import annotations

import unicodedata

from markupsafe import Markup

# Characters that reorder or break the text around them: shown as numbers, so that no name looks like another.
_UNRULY = frozenset("\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")
_UNPRINTABLE = frozenset({"Cc", "Cs"})


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


def escaped(value: object) -> Markup:
    """What stands in the page for any value: markup as it is, None as nothing, everything else as visible, escaped
    text."""
    if isinstance(value, Markup):
        return value
    return Markup.escape(visible("" if value is None else str(value)))


def isolated(name: str, limit: int = 200, class_: str = "") -> Markup:
    """A name from a model: in a direction of its own, cut in the middle where longer than `limit`, whole on hover."""
    attributes = Markup(' class="{}"').format(class_) if class_ else Markup()
    if len(name) > limit:
        attributes += Markup(' title="{}"').format(shorten(name, 1000))
    return Markup("<bdi{}>{}</bdi>").format(attributes, shorten(name, limit))


def shorten(value: str, limit: int) -> str:
    """At most `limit` characters, the middle left out: names differ at their ends."""
    shown = visible(value[: limit * 4] + value[-limit:] if len(value) > limit * 5 else value)
    if len(shown) <= limit:
        return shown
    head = limit // 2
    return f"{shown[:head]}…{shown[len(shown) - (limit - 1 - head) :]}"
