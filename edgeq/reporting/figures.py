"""Write names in readable form, and draw the elements that every chart consists of.

Names and notes from models and bundles are untrusted. So each one is kept on one line, isolated, shortened, and never
used as markup. Jinja2 does the escaping. Its templates use the filters in this module.

This module draws the parts of charts (elements, frame, axes with ticks, labels that do not overlap) without a plotting
library. A chart has a few kilobytes. It takes its colours from the page's style (light, dark and print), and has labels
for screen readers and `data-` attributes for the script.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from edgeq.util.numbers import (
    significant,
)

Pairs = tuple[tuple[str, str], ...]
# Characters of one value, and items of one list. An untrusted record may contain values of any length.
_TEXT_LIMIT = 2000
_SHOWN = 12


def pairs(values: Mapping[str, Any], limit: int) -> Pairs:
    """Return at most `limit` items as text. Lists are joined, mappings become k=v, and booleans become yes or no. Empty
    items are left out.
    """
    texts = ((string(key), _item_text(item)) for key, item in list(values.items())[:limit])
    return tuple((key, text) for key, text in texts if text)


def string(value: object) -> str:
    """Return a text, number or boolean as text. Return "" for other values."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        # Python refuses to write integers of thousands of digits, and no figure of a report is that large.
        return str(value) if abs(value) < 1 << 64 else ""
    # Only NaN differs from itself.
    return str(value)[:_TEXT_LIMIT] if isinstance(value, str | float) and value == value else ""


def _item_text(item: object) -> str:
    if isinstance(item, Mapping):
        texts = [f"{string(k)}={string(v)}" for k, v in item.items()]
    elif isinstance(item, list | tuple):
        texts = [string(v) for v in item]
    else:
        return string(item)
    joined = ", ".join(texts[:_SHOWN])
    return f"{joined} and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else joined


# Characters that reorder or break the text around them. The page shows them as numbers, so that one name cannot imitate
# another.
_UNRULY = frozenset("\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")
# Unicode's categories of control characters and of lone surrogates, which no encoding can write.
_UNPRINTABLE = frozenset({"Cc", "Cs"})


def visible(text: str) -> str:
    """Return `text` on one line, with control characters and bidirectional-text characters written as codes such as
    ⟨202E⟩.
    """
    # Nearly every name takes this short way.
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
    """Return a value in the form in which the page shows it. Markup is unchanged, None becomes empty, and everything
    else becomes visible, escaped text.
    """
    if isinstance(value, Markup):
        return value
    return Markup.escape(visible("" if value is None else str(value)))


def isolated(name: str, limit: int = 200, class_: str = "") -> Markup:
    """Return a name from a model as markup that isolates its text direction. A name longer than `limit` is cut in the
    middle, and a tooltip shows the whole name.
    """
    attributes = Markup(' class="{}"').format(class_) if class_ else Markup()
    if len(name) > limit:
        attributes += Markup(' title="{}"').format(shorten(name, 1000))
    return Markup("<bdi{}>{}</bdi>").format(attributes, shorten(name, limit))


def shorten(value: str, limit: int) -> str:
    """Shorten `value` to at most `limit` characters. The middle of longer text is cut out, because names differ at
    their ends.
    """
    # `visible` can write six characters for one, so cut a huge name before it is converted.
    text = visible(value[: limit * 4] + value[-limit:] if len(value) > limit * 5 else value)
    if len(text) <= limit:
        return text
    head = limit // 2
    return f"{text[:head]}…{text[len(text) - (limit - 1 - head) :]}"


# A reader counts in such steps without effort.
_NICE = (1.0, 2.0, 2.5, 5.0, 10.0)
_LOG_FROM = 8.0
"""An axis is logarithmic if its ends differ by more than this factor."""


@dataclass(frozen=True)
class Scale:
    """Map low..high to start..end, linearly or logarithmically. Values outside this range map to the nearer end."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        return self.start + (self.end - self.start) * min(1.0, max(0.0, self.share(value)))

    def share(self, value: float) -> float:
        """Return the position of `value` between `low` (0) and `high` (1). For values outside, the result is below 0 or
        above 1.
        """
        if self.log:
            if value <= 0:
                return 0.0
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, limit: int = 6) -> tuple[float, ...]:
        """Return at most about `limit` round values between `low` and `high`. On a logarithmic axis, they are based on
        powers of ten.
        """
        return log_ticks(self.low, self.high, limit) if self.log else nice_ticks(self.low, self.high, limit)


def scale_for(
    values: Sequence[float], start: float, end: float, *, log: bool | None = None, pad: float = 0.06
) -> Scale:
    """Return a scale that contains all `values` and has a margin at both ends. `pad` is the margin as a share of the
    length.

    Args:
        log: True for a logarithmic axis, which needs positive values. With None, the spread of the values decides.
    """
    low, high = min(values), max(values)
    if log is None:
        log = low > 0 and high > _LOG_FROM * low
    if log:
        # Without a minimum, a single value would give an axis of no length.
        factor = max((high / low) ** pad, 1.02)
        return Scale(low / factor, high * factor, start, end, True)
    margin = (high - low) * pad or max(abs(high) * 0.05, 1e-9)
    return Scale(low - margin, high + margin, start, end)


def nice_ticks(low: float, high: float, limit: int = 6) -> tuple[float, ...]:
    """Return the multiples of a step within low..high. The step is 1, 2, 2.5 or 5 times a power of ten, and there are
    at most `limit` multiples.
    """
    if not high > low:
        return (low,)
    rough = (high - low) / max(1, limit - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    for nice in (*_NICE, 20.0, 25.0):
        step = nice * power
        # A tick at the end of the axis must not get lost by rounding.
        start, end = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if end - start + 1 <= limit:
            return tuple(i * step for i in range(start, end + 1))
    return ()


def log_ticks(low: float, high: float, limit: int = 6) -> tuple[float, ...]:
    """Return 1, 2 and 5 times powers of ten within low..high. If these are too many, return only some of them. If they
    are too few, return evenly spaced ticks.
    """
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        values = [f * 10.0**e for e in exponents for f in factors]
        inside = tuple(v for v in values if low * (1 - 1e-9) <= v <= high * (1 + 1e-9))
        if len(inside) <= limit:
            return inside if len(inside) >= 2 else nice_ticks(low, high, limit)
    return inside[:: math.ceil(len(inside) / limit)]


def tick_labels(ticks: Sequence[float]) -> tuple[str, ...]:
    """Return the ticks as text. Evenly spaced ticks all get the same number of decimals, which is enough to distinguish
    them.
    """
    if len(ticks) < 2:
        return tuple(significant(t) for t in ticks)
    steps = [b - a for a, b in pairwise(ticks)]
    even = max(steps) - min(steps) < 1e-6 * max(map(abs, steps))
    # A common number of decimals suits only evenly spaced ticks of ordinary size.
    if not even or max(map(abs, ticks)) >= 1e6 or min(steps) < 1e-6:
        return tuple(significant(t).rstrip("0").rstrip(".") if "." in significant(t) else significant(t) for t in ticks)
    decimals = 0
    while decimals < 6 and any(abs(t - round(t, decimals)) > 1e-6 * steps[0] for t in ticks):
        decimals += 1
    return tuple(f"{t:.{decimals}f}".replace("-", "\u2212") if abs(t) > steps[0] * 1e-6 else "0" for t in ticks)


EM = 12.0
"""Font size of chart text in user units, which are CSS pixels at full width."""
# Widths in em by Unicode's East Asian width. The exact ones depend on the reader's fonts.
_WIDE = {"W": 1.0, "F": 1.0}
_NARROW = frozenset("iljtfrI1.,:;|!'()[] -")


@dataclass(frozen=True)
class Box:
    """Describe a rectangle. Rectangles are used to keep labels from overlapping."""

    x: float
    y: float
    width: float
    height: float

    def overlaps(self, box: Box) -> bool:
        """Return whether the interiors intersect. Boxes that share only an edge do not overlap."""
        return (
            self.x < box.x + box.width
            and box.x < self.x + self.width
            and self.y < box.y + box.height
            and box.y < self.y + self.height
        )

    def inside(self, frame: Box) -> bool:
        """Return whether this box is entirely within `frame`."""
        return (
            self.x >= frame.x
            and self.y >= frame.y
            and self.x + self.width <= frame.x + frame.width
            and self.y + self.height <= frame.y + frame.height
        )


def text_width(text: str) -> float:
    """Return a generous estimate of the width of `text` in a sans-serif font."""
    return EM * sum(_WIDE.get(unicodedata.east_asian_width(c), 0.36 if c in _NARROW else 0.6) for c in text)


def fitted(text: str, width: float) -> str:
    """Return `text`, shortened in the middle until it is at most `width` long."""
    limit = len(text)
    short = shorten(text, limit) if limit else text
    while limit > 3 and text_width(short) > width:
        # Steps of a twelfth need few attempts for long names, too.
        limit -= max(1, limit // 12)
        short = shorten(text, limit)
    return short


def join(children: Iterable[str | None]) -> Markup:
    """Join `children` into one markup. Plain strings are escaped, and None is left out."""
    return Markup().join(escaped(child) for child in children if child is not None)


def tag(name: str, /, *children: str | None, **attributes: str | int | float | None) -> Markup:
    """Return an SVG element. The attribute `class_` becomes class, and `stroke_width` becomes stroke-width. An
    attribute that is None is left out. Floats have at most two decimals.
    """
    attributes_text = Markup().join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), escaped(_number(value)))
        for key, value in attributes.items()
        if value is not None
    )
    return Markup("<{0}{1}>{2}</{0}>").format(name, attributes_text, join(children))


def _number(value: str | int | float) -> str:
    if isinstance(value, float):
        text = f"{value:.2f}".rstrip("0").rstrip(".")
        # Rounding can leave the sign of a small negative number.
        return "0" if text == "-0" else text
    return str(value)


def label(x: float, y: float, text: str, *, anchor: str = "start", class_: str = "tick") -> Markup:
    """Return a text element with its baseline at (x, y) in the figure's units; `anchor` is start, middle or end."""
    return tag("text", text, x=x, y=y, text_anchor=anchor if anchor != "start" else None, class_=class_)


def figure(width: float, height: float, description: str, *children: str | None, class_: str = "") -> Markup:
    """Return an SVG that scales to the available width. Screen readers read `description`."""
    return tag(
        "svg",
        *children,
        viewBox=f"0 0 {width:g} {height:g}",
        width=width,
        height=height,
        role="img",
        aria_label=description,
        class_=f"chart {class_}".rstrip(),
    )


def x_axis(scale: Scale, y: float, top: float, title: str, *, limit: int = 7) -> Markup:
    """Draw ticks below the line `y`, grid lines up to `top`, and the title. Labels that would touch are left out."""
    ticks = scale.ticks(limit)
    parts = [tag("line", x1=scale.start, x2=scale.end, y1=y, y2=y, class_="axis")]
    # The right end of the label before, which the next label must not touch.
    reached = float("-inf")
    for value, text in zip(ticks, tick_labels(ticks), strict=True):
        x = scale(value)
        parts.append(tag("line", x1=x, x2=x, y1=top, y2=y, class_="grid"))
        half = text_width(text) / 2
        if x - half > reached:
            parts.append(label(x, y + EM * 1.35, text, anchor="middle"))
            reached = x + half + EM / 2
    parts.append(label((scale.start + scale.end) / 2, y + EM * 2.9, title, anchor="middle", class_="title"))
    return tag("g", *parts)


def y_axis(scale: Scale, x: float, right: float, title: str, *, limit: int = 6) -> Markup:
    """Draw ticks left of the line `x`, grid lines to `right`, and the title above the axis in horizontal text.

    Args:
        scale: the scale; its `start` is the bottom.
    """
    ticks = scale.ticks(limit)
    parts = []
    for value, text in zip(ticks, tick_labels(ticks), strict=True):
        y = scale(value)
        parts.append(tag("line", x1=x, x2=right, y1=y, y2=y, class_="grid"))
        parts.append(label(x - 6, y + EM * 0.35, text, anchor="end"))
    parts.append(label(0, scale.end - EM, title, class_="title"))
    return tag("g", *parts)


def axis_width(scale: Scale, limit: int = 6) -> float:
    """Return the width of the labels of a y axis, including the gap to the axis."""
    return max((text_width(label) for label in tick_labels(scale.ticks(limit))), default=0.0) + 8


def place_label(
    x: float, y: float, width: float, frame: Box, occupied: Sequence[Box], *, gap: float = 9.0
) -> tuple[float, float, str, Box] | None:
    """Return a free place for a label next to the point (x, y): right, left, above, below, or at a corner.

    Returns:
        x and y of the baseline, the text-anchor, and the box of the label; None if every place is taken.
    """
    height = EM * 1.25
    places = (
        (x + gap, y + EM * 0.35, "start", Box(x + gap, y - height / 2, width, height)),
        (x - gap, y + EM * 0.35, "end", Box(x - gap - width, y - height / 2, width, height)),
        (x, y - gap, "middle", Box(x - width / 2, y - gap - height, width, height)),
        (x, y + gap + EM * 0.8, "middle", Box(x - width / 2, y + gap - 2, width, height)),
    )
    up, down = y - gap - height, y + gap
    corners = tuple(
        (px, top + EM, anchor, Box(box_x, top, width, height))
        for top in (up, down)
        for px, anchor, box_x in ((x + gap / 2, "start", x + gap / 2), (x - gap / 2, "end", x - gap / 2 - width))
    )
    for px, py, anchor, box in (*places, *corners):
        if box.inside(frame) and not any(box.overlaps(obstacle) for obstacle in occupied):
            return px, py, anchor, box
    return None
