"""Subtract a constant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from edgeq.data.arithmetic import Arithmetic
from edgeq.data.state import Array


@dataclass(frozen=True)
class Subtract(Arithmetic):
    """x - a constant, or one constant a channel."""

    name: ClassVar[str] = "subtract"
    help: ClassVar[str] = "x - CONSTANT"
    aliases: ClassVar[tuple[str, ...]] = ("mean",)
    sign: ClassVar[str] = "-"

    def compute(self, array: Array, constant: Array) -> Array:
        """array - constant"""
        return array - constant


STEP = Subtract
