"""Numbers as people read them: few digits, a unit, a proper minus sign.

Names and notes from models and bundles, which are untrusted: on one line, isolated, shortened, never markup.

Escaping is Jinja2's; these are the filters that its templates use beside it.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

_MINUS = "\u2212"
_THIN = "\u202f"


def significant(value: float, digits: int = 3) -> str:
    """Return `value` with so many significant digits, never in exponent form between 1e-4 and 1e15."""
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -4 or exponent >= 15:
        return _signed(f"{value:.{digits - 1}e}")
    decimals = max(0, digits - 1 - exponent)
    return _signed(f"{round(value, digits - 1 - exponent):.{decimals}f}")


def fixed(value: float, decimals: int) -> str:
    """Return `value` with `decimals` digits after the point, a true minus sign, and no sign on a zero."""
    shown = f"{value:.{decimals}f}"
    return _signed(shown if float(shown) else shown.lstrip("-"))


def milliseconds(value: float) -> str:
    """Return a latency, in microseconds, milliseconds or seconds."""
    if abs(value) >= 1000:
        return f"{significant(value / 1000)}{_THIN}s"
    if abs(value) < 0.1:
        return f"{significant(value * 1000)}{_THIN}µs"
    return f"{significant(value)}{_THIN}ms"


def size(value: float) -> str:
    """Write bytes, in decimal units."""
    return _scaled(value, ("B", "kB", "MB", "GB"))


def count(value: float) -> str:
    """Return a count in thousands, millions and so on, as operations are counted."""
    return _scaled(value, ("", "k", "M", "G", "T"))


def _scaled(value: float, units: Sequence[str]) -> str:
    """Return `value` in the unit, each a thousand of the one before, that leaves it at most three digits."""
    for unit in units:
        if abs(value) < 999.5 or unit == units[-1]:
            break
        value /= 1000
    return f"{significant(value)}{_THIN}{unit}" if unit else significant(value)


def share(value: float, decimals: int = 1) -> str:
    """Return a fraction in percent. What is not all is never rounded to 100 %, nor what is not nothing to 0 %."""
    percent = 100 * value
    shown = f"{percent:.{decimals}f}"
    step = 10.0**-decimals
    if float(shown) == 100 and value < 1:
        shown = f"{100 - step:.{decimals}f}"
    elif float(shown) == 0 and value > 0:
        return f"<{step:.{decimals}f}{_THIN}%"
    return f"{_signed(shown)}{_THIN}%"


def signed(value: float, decimals: int) -> str:
    """Write a number with a plus sign where it is positive."""
    shown = fixed(value, decimals)
    return f"+{shown}" if value > 0 and float(shown.replace(_MINUS, "-")) else shown


def times(value: float) -> str:
    """Return a factor: 2.10×."""
    return f"{value:.2f}×" if value < 99.5 else f"{significant(value)}×"


def decibels(value: float) -> str:
    """Return a level in dB with one decimal."""
    return f"{fixed(value, 1)}{_THIN}dB"


def metric(name: str, value: float) -> str:
    """Return the value of an accuracy metric: those that are shares of samples in percent, others with four digits."""
    return share(value, 2) if is_share(name) and 0 <= value <= 1 else significant(value, 4)


def difference(name: str, value: float) -> str:
    """Return a difference of two values of a metric: in points where the metric is in percent."""
    return f"{signed(100 * value, 2)}{_THIN}pt" if is_share(name) else signed(value, 4)


def metric_name(name: str) -> str:
    """Return a metric's name as people write it."""
    return {"top1": "top-1", "top5": "top-5", "auc": "AUC"}.get(name, name)


def is_share(name: str) -> bool:
    """Tell whether a metric is a fraction that people state in percent."""
    return name.casefold().startswith(("top", "map", "ar1", "accuracy"))


def _signed(shown: str) -> str:
    return shown.replace("-", _MINUS)


Pairs = tuple[tuple[str, str], ...]
_TEXT_LIMIT = 2000
_SHOWN = 12


def pairs(values: Mapping[str, Any], limit: int) -> Pairs:
    """Return at most `limit` items as text: lists joined, mappings as k=v, yes and no; empty ones are left out."""
    shown = ((string(key), _shown(item)) for key, item in list(values.items())[:limit])
    return tuple((key, text) for key, text in shown if text)


def string(value: object) -> str:
    """Return text, numbers and booleans as text, else ""."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value) if abs(value) < 1 << 64 else ""
    return str(value)[:_TEXT_LIMIT] if isinstance(value, str | float) and value == value else ""


def _shown(item: object) -> str:
    if isinstance(item, Mapping):
        texts = [f"{string(k)}={string(v)}" for k, v in item.items()]
    elif isinstance(item, list | tuple):
        texts = [string(v) for v in item]
    else:
        return string(item)
    joined = ", ".join(texts[:_SHOWN])
    return f"{joined} and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else joined


# Characters that reorder or break the text around them: shown as numbers, so that no name looks like another.
_UNRULY = frozenset("\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")
_UNPRINTABLE = frozenset({"Cc", "Cs"})


def visible(text: str) -> str:
    """Return `text` on one line, its control and direction characters as ⟨202E⟩."""
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
    """Return at most `limit` characters, the middle left out: names differ at their ends."""
    shown = visible(value[: limit * 4] + value[-limit:] if len(value) > limit * 5 else value)
    if len(shown) <= limit:
        return shown
    head = limit // 2
    return f"{shown[:head]}…{shown[len(shown) - (limit - 1 - head) :]}"
