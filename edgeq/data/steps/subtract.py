"""Subtract a constant."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from edgeq.data.step import Arithmetic, Operator


@dataclass(frozen=True)
class Subtract(Arithmetic):
    """x - a constant, or one constant a channel."""

    name: ClassVar[str] = "subtract"
    help: ClassVar[str] = "x - CONSTANT"
    aliases: ClassVar[tuple[str, ...]] = ("mean",)
    sign: ClassVar[str] = "-"
    compute: ClassVar[Operator] = operator.sub


STEP = Subtract
