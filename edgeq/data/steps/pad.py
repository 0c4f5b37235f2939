"""Fill an image up at its right and bottom, after or before arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from edgeq_device.prepare.frame import Frame

from edgeq.data.axes import ItemState, model_size
from edgeq.data.limits import check_size
from edgeq.data.step import NUMBER, Step
from edgeq.data.steps.image import FEWER, SIZE, Size, choose_size, describe_size, from_hwc, measure_image, to_hwc
from edgeq.errors import DataError
from edgeq.signature import TensorSpec


@dataclass(frozen=True)
class Pad(Step):
    """Fill an image up with one value at its right and bottom. Unlike a letterbox, it takes values of any dtype, so it
    can follow arithmetic, and leaves a larger image unchanged.
    """

    name = "pad"
    help = "SIZE[:VALUE]; at the right and bottom, to the model's size, or to at least SIZE; default value 0"
    size: Size = field(metadata=SIZE)
    value: float = field(default=0.0, metadata=NUMBER)

    def apply(self, state: ItemState, spec: TensorSpec | None) -> ItemState:
        """Return an image of at least the size that the model fixes, or of `size` if the model fixes none.

        Raises:
            DataError: the item is not an image, or the size is "model" and the model does not fix a size.
        """
        size = model_size(spec) or choose_size(self.size, spec)
        if size is None:
            raise DataError("pad = 'model' needs a model input of fixed height and width", "Give a size")
        height, width = measure_image(state)
        new_width, new_height = max(width, size[0]), max(height, size[1])
        check_size(
            new_width * new_height * state.array.nbytes // max(1, width * height), f"padded to {new_width}", FEWER
        )
        array = to_hwc(state.array, state.axes)
        margins = ((0, new_height - height), (0, new_width - width), (0, 0))
        array = np.pad(array, margins, constant_values=np.asarray(self.value, array.dtype))
        frame = (state.frame or Frame.of(width, height)).placed(0, 0, (new_width, new_height))
        return replace(state, array=from_hwc(array, state.axes), frame=frame)

    def describe(self) -> str:
        """Describe the size and the value."""
        target = describe_size(self.size)
        return f"filled with {self.value!r} at the right and bottom to the model's size, or to at least {target}"
