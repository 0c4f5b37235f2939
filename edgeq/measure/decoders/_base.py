"""What a decoder is: a name, the outputs that it reads, and the function that decodes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from edgeq.measure.boxes import Detections
from edgeq.measure.latency import Outputs


class Decode(Protocol):
    def __call__(self, outputs: Outputs, size: tuple[int, int]) -> Detections:
        """Candidates of one image, boxes in pixels of the model's input of `size` (width, height), before suppression.

        Raises:
            UsageError: the outputs are not of this head.
        """


@dataclass(frozen=True)
class Decoder:
    """One detector head.

    Attributes:
        name: as `--decoder` has it.
        title: the outputs that it reads, with their shapes.
        decode: the function.
    """

    name: str
    title: str
    decode: Decode
