"""The order of the colour channels."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from edgeq.data.records import State
from edgeq.data.step import Step, one_of, through_pillow
from edgeq.errors import DataError
from edgeq.signature import TensorSpec


@dataclass(frozen=True)
class Channels(Step):
    """The order of the colour channels from here on; "L" turns colour to grey as Pillow does."""

    name: ClassVar[str] = "channels"
    help: ClassVar[str] = "RGB, BGR, or L for grey"
    order: str = field(metadata=one_of("RGB", "BGR", "L"))

    def apply(self, state: State, spec: TensorSpec | None) -> State:
        """The channels in the wanted order; an image that has it already is unchanged.

        Raises:
            DataError: the item is no image of three channels.
        """
        if self.order == "L":
            if "C" not in state.axes:
                return state
            rgb = state if state.channels != "BGR" else Channels("RGB").apply(state, spec)
            array = through_pillow(rgb, "channels = L", lambda image: image.convert("L"))
            return State(array, state.axes, "", state.geometry)
        if state.channels == self.order:
            return state
        if state.channels not in ("RGB", "BGR") or "C" not in state.axes:
            raise DataError(f"channels = {self.order} needs an image with red, green and blue", "Leave the step out")
        axis = state.axes.index("C")
        return replace(state, array=np.flip(state.array, axis), channels=self.order)

    def describe(self) -> str:
        """The order, or the integer arithmetic of grey."""
        return {
            "RGB": "channels in order red, green, blue",
            "BGR": "channels in order blue, green, red",
            "L": "grey = (19595*R + 38470*G + 7471*B + 32768) >> 16, one channel",
        }[self.order]


STEP = Channels
