"""Divide a constant."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from edgeq.data.step import Arithmetic, Operator
from edgeq.errors import DataError


@dataclass(frozen=True)
class Divide(Arithmetic):
    """x / a constant, or one constant a channel."""

    name: ClassVar[str] = "divide"
    help: ClassVar[str] = "x / CONSTANT"
    aliases: ClassVar[tuple[str, ...]] = ("std",)
    sign: ClassVar[str] = "/"
    compute: ClassVar[Operator] = operator.truediv

    def __post_init__(self) -> None:
        if 0.0 in (self.value if isinstance(self.value, tuple) else (self.value,)):
            raise DataError("divide: it divides by 0", "Correct the constant")


STEP = Divide
