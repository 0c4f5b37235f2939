"""Versions in an order."""

from __future__ import annotations

import re
from typing import Tuple


def parse_version(text: str) -> Tuple[int, ...]:
    """ "1.31.1" → (1, 31, 1); what follows the digits of a part ("1.20.0rc1") is left out; "" sorts before all."""
    # Python refuses to read thousands of digits.
    numbers = (re.match(r"[0-9]{1,18}", part) for part in text.split("."))
    return tuple(int(number.group()) for number in numbers if number is not None)
