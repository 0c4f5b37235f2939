"""Run models in the integers of a chip, with the interface of onnxruntime sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.espdl.chips import EspFamily
from edgeq.backends.espdl.interpret import run
from edgeq.backends.espdl.network import LIMITS, EspGraph, EspTensor
from edgeq.backends.espdl.rounding import FLOATS, ChipArithmetic, saturate, scale_of
from edgeq.errors import DataError


@dataclass(frozen=True)
class EspOutput:
    """Name one output, like an output of an onnxruntime session."""

    name: str


class EspSession:
    """Run an integer graph with float inputs and outputs, as an application on the chip would."""

    def __init__(self, graph: EspGraph, family: EspFamily) -> None:
        self._graph, self._arithmetic = graph, family.arithmetic

    def get_outputs(self) -> Sequence[EspOutput]:
        """Return the outputs in order, like `InferenceSession.get_outputs`."""
        return [EspOutput(port.name) for port in self._graph.outputs]

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> Sequence[Any]:
        """Run a batch, one sample after the other. The arguments are the same as in `InferenceSession.run`."""
        counts = {len(np.asarray(value)) for value in input_feed.values()}
        if len(counts) != 1:
            raise DataError("the inputs have different batch sizes", "Give one sample at a time")
        rows = [self._run_row(input_feed, row) for row in range(counts.pop())]
        ports = {port.name: port for port in self._graph.outputs}
        chosen = [ports[name] for name in output_names or ports]
        results = [[decode(row[port.tensor], port.tensor, port.order) for row in rows] for port in chosen]
        return [np.concatenate(parts) for parts in results]

    def _run_row(self, feed: Mapping[str, Any], row: int) -> dict[EspTensor, NDArray[Any]]:
        inputs = {
            port.tensor.name: encode(
                np.asarray(feed[port.name])[row : row + 1], port.tensor, port.order, self._arithmetic
            )
            for port in self._graph.inputs
        }
        return run(self._graph, inputs, self._arithmetic)


def encode(values: NDArray[Any], tensor: EspTensor, order: tuple[int, ...], arithmetic: ChipArithmetic) -> NDArray[Any]:
    """Return floats of the model as the integers of a tensor, rounded as the chip rounds."""
    steps = values.transpose(order).astype(FLOATS) * scale_of(-tensor.exponent)
    return saturate(arithmetic.round(steps), tensor.type)


def decode(values: NDArray[Any], tensor: EspTensor, order: tuple[int, ...]) -> NDArray[np.float32]:
    """Return the values of a tensor as floats of the model, in the model's order of axes."""
    floats = values.astype(FLOATS) * scale_of(tensor.exponent) if tensor.type in LIMITS else values.astype(FLOATS)
    return np.asarray(floats.transpose(np.argsort(order)), FLOATS)


@contextmanager
def opened(family: EspFamily, lowered: Callable[[Path], EspGraph]) -> Iterator[Callable[[Path, Any], EspSession]]:
    """Yield a function that opens a Q/DQ model as a session. See `Backend.simulator`.

    Args:
        lowered: function that returns the integer graph of a file.
    """
    yield lambda model, settings: EspSession(lowered(model), family)
