"""Divide a constant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from edgeq.data.arithmetic import Arithmetic
from edgeq.data.state import Array
from edgeq.errors import DataError


@dataclass(frozen=True)
class Divide(Arithmetic):
    """x / a constant, or one constant a channel."""

    name: ClassVar[str] = "divide"
    help: ClassVar[str] = "x / CONSTANT"
    aliases: ClassVar[tuple[str, ...]] = ("std",)
    sign: ClassVar[str] = "/"

    def __post_init__(self) -> None:
        if 0.0 in (self.value if isinstance(self.value, tuple) else (self.value,)):
            raise DataError("divide: it divides by 0", "Correct the constant")

    def compute(self, array: Array, constant: Array) -> Array:
        """array / constant"""
        return array / constant


STEP = Divide
