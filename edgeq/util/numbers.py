"""Format numbers for people: few digits, a unit, and a true minus sign. Shares and their differences are in percent.

`parse_share` and `parse_drop` read a share that a user typed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from edgeq.errors import UsageError

_MINUS = "\u2212"  # as wide as a plus sign, so that columns of signed numbers line up
# Figures of answers in comparison with those of the float model.
_SHARES = frozenset({"matched", "found", "extra", "below", "characters", "exact", "pixels", "frames"})
_THIN = "\u202f"  # keeps a number and its unit on one line


def significant(value: float, digits: int = 3) -> str:
    """Return `value` with `digits` significant digits, without an exponent between 1e-4 and 1e15."""
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -4 or exponent >= 15:
        return _signed(f"{value:.{digits - 1}e}")
    decimals = max(0, digits - 1 - exponent)
    return _signed(f"{round(value, digits - 1 - exponent):.{decimals}f}")


def fixed(value: float, decimals: int) -> str:
    """Return `value` with `decimals` digits after the point, a true minus sign, and no sign on a zero."""
    text = f"{value:.{decimals}f}"
    return _signed(text if float(text) else text.lstrip("-"))


def milliseconds(value: float) -> str:
    """Return a latency as text, in microseconds, milliseconds or seconds."""
    if abs(value) >= 1000:
        return f"{significant(value / 1000)}{_THIN}s"
    if abs(value) < 0.1:
        return f"{significant(value * 1000)}{_THIN}µs"
    return f"{significant(value)}{_THIN}ms"


def size(value: float) -> str:
    """Return a number of bytes as text, in decimal units."""
    return _scaled(value, ("B", "kB", "MB", "GB"))


def count(value: float) -> str:
    """Return a number of operations as text, in thousands, millions and so on."""
    return _scaled(value, ("", "k", "M", "G", "T"))


def _scaled(value: float, units: Sequence[str]) -> str:
    """Return `value` in the unit that leaves at most three digits before the point. Each unit is 1000 times the
    previous one.
    """
    for unit in units:
        if abs(value) < 999.5 or unit == units[-1]:
            break
        value /= 1000
    return f"{significant(value)}{_THIN}{unit}" if unit else significant(value)


def share(value: float, decimals: int = 1) -> str:
    """Return a fraction in percent. A fraction below 1 is never shown as 100 %, and a fraction above 0 never as 0 %."""
    percent = 100 * value
    text = f"{percent:.{decimals}f}"
    step = 10.0**-decimals
    if float(text) == 100 and value < 1:
        text = f"{100 - step:.{decimals}f}"
    elif float(text) == 0 and value > 0:
        return f"<{step:.{decimals}f}{_THIN}%"
    return f"{_signed(text)}{_THIN}%"


def signed(value: float, decimals: int) -> str:
    """Return a number as text, with a plus sign if it is positive."""
    text = fixed(value, decimals)
    return f"+{text}" if value > 0 and float(text.replace(_MINUS, "-")) else text


def times(value: float) -> str:
    """Return a factor, such as 2.10×."""
    return f"{value:.2f}×" if value < 99.5 else f"{significant(value)}×"


def decibels(value: float) -> str:
    """Return a level in dB with one decimal."""
    return f"{fixed(value, 1)}{_THIN}dB"


def metric(name: str, value: float) -> str:
    """Return the value of an accuracy metric as text: in percent if it is a share of samples, else with four digits."""
    return share(value, 2) if is_share(name) and 0 <= value <= 1 else significant(value, 4)


def difference(name: str, value: float) -> str:
    """Return the difference between two values of a metric, in percentage points if the metric is in percent."""
    return f"{signed(100 * value, 2)}{_THIN}pt" if is_share(name) else signed(value, 4)


def metric_name(name: str) -> str:
    """Return a metric's name the way people write it."""
    return {"top1": "top-1", "top5": "top-5", "auc": "AUC"}.get(name, name)


def is_share(name: str) -> bool:
    """Return whether a metric is a fraction that is usually stated in percent."""
    return name in _SHARES or name.casefold().startswith(("top", "map", "ar1", "accuracy"))


def _signed(text: str) -> str:
    return text.replace("-", _MINUS)


def parse_share(option: str, text: str | float | None) -> float | None:
    """Return the fraction that "0.01", "1%", "1pt" or 0.01 stands for; None if nothing is given.

    Raises:
        UsageError: the text is not a number, or the fraction is not between 0 and 1.
    """
    if text is None:
        return None
    number, scale = str(text).strip(), 1.0
    for suffix in ("%", "pt"):
        if number.endswith(suffix):
            number, scale = number.removesuffix(suffix), 0.01
    try:
        value = float(number) * scale
    except ValueError:
        raise UsageError(f"{option} {text!r} is not a number", "Write 0.01, 1% or 1pt") from None
    if not 0 <= value <= 1:
        raise UsageError(f"{option} {text!r} is not between 0 and 1", "Write 0.01, 1% or 1pt")
    return value


def parse_drop(text: str | float | None) -> float | None:
    """Return the largest loss of accuracy as a fraction. See `parse_share`.

    Raises:
        UsageError: see `parse_share`; or the text is "1", which would allow any loss.
    """
    if text is not None and not isinstance(text, str) and not 0 <= text <= 1:
        raise UsageError(f"the largest drop is {text}", "Give a number between 0 and 1")
    value = parse_share("⟨max_drop⟩", text)
    if value == 1 and isinstance(text, str) and text.strip()[-1].isdigit():
        raise UsageError(f"⟨max_drop⟩ {text} would allow any loss", f"Write {text}pt for {text} point, or 100%")
    return value
