"""Finding a head's arrays among a model's outputs."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from edgeq.errors import UsageError
from edgeq.measure.latency import Outputs


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
