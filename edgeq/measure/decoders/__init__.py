"""Detector heads: from a model's raw outputs to candidate boxes. One head a file, with its object `DECODER`.

Plug-ins add theirs by an entry point of the group `edgeq.decoders`; "path.py:function" names a function in a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from edgeq.errors import UsageError
from edgeq.measure.boxes import Detections
from edgeq.measure.latency import Outputs
from edgeq.util.registry import DECODERS, Registry, load_function, names_function


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


__all__ = ["REGISTRY", "Decode", "Decoder", "load_decoder"]

REGISTRY: Registry[Decoder] = Registry(
    DECODERS, lambda found: isinstance(found, Decoder), "edgeq.measure.decoders.Decoder"
)


def load_decoder(name: str) -> Decode:
    """The function of a registered decoder, or a user's "path.py:function".

    Raises:
        UsageError: unknown name, or a function that cannot be loaded.
    """
    return load_function(name, "decoder", UsageError) if names_function(name) else REGISTRY.load(name).decode


def single_image(outputs: Outputs) -> dict[str, NDArray[Any]]:
    """Outputs of shape [1, a, b] as [a, b]; others are no boxes or scores and are left out."""
    return {name: array[0] for name, array in outputs.items() if array.ndim == 3 and array.shape[0] == 1}


def only_head(outputs: Outputs, decoder: str, layout: str) -> NDArray[Any]:
    """The one output of shape [1, a, b], as [a, b]."""
    found = single_image(outputs)
    if len(found) != 1:
        raise wrong_head(outputs, decoder, layout)
    return next(iter(found.values()))


def wrong_head(outputs: Outputs, decoder: str, layout: str) -> UsageError:
    """The error for outputs that `decoder` cannot take; `layout` says what it takes."""
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in outputs.items())
    return UsageError(
        f"decoder {decoder} takes {layout}, the model gives {shapes}",
        "Choose another --decoder, or give your own as path.py:function",
    )
