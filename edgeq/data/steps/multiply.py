"""Multiply a constant."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from edgeq.data.step import Arithmetic, Operator


@dataclass(frozen=True)
class Multiply(Arithmetic):
    """x * a constant, or one constant a channel."""

    name: ClassVar[str] = "multiply"
    help: ClassVar[str] = "x * CONSTANT; a number, a fraction such as 1/255, or [one,a,channel]"
    aliases: ClassVar[tuple[str, ...]] = ("scale",)
    sign: ClassVar[str] = "*"
    compute: ClassVar[Operator] = operator.mul


STEP = Multiply
