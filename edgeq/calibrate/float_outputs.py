"""The outputs of the float model on the calibration samples, kept for a proof on the same samples.

A proof compares with them: where no other samples are given, the float model need not run over these again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.graph.query import name_of

_MOST_BYTES = 2**26
_LARGEST_ELEMENT = 8


class FloatOutputs:
    """What each sample gave; filled by several threads.

    Args:
        model: the float model.
        total: how many samples there are.

    Attributes:
        names: of the outputs; empty where they cannot be kept: too large, of sizes that depend on the sample, or made
            by no node.
    """

    def __init__(self, model: ir.Model, total: int) -> None:
        outputs = model.graph.outputs
        kept = total * sum(map(_most_bytes, outputs)) <= _MOST_BYTES
        self.names = tuple(map(name_of, outputs)) if kept else ()
        self._total = total
        self._by_place: dict[int, Mapping[str, NDArray[Any]]] = {}

    def keep(self, place: int, values: Mapping[str, Any]) -> None:
        """Keep the outputs of the sample at `place` among what was fetched of it."""
        self._by_place[place] = {name: values[name] for name in self.names}

    def all(self) -> Sequence[Mapping[str, NDArray[Any]]]:
        """Output name → array for each sample, in order; empty where not all of them were kept."""
        if not self.names or len(self._by_place) < self._total:
            return ()
        return tuple(self._by_place[place] for place in range(self._total))


def _most_bytes(output: ir.Value) -> float:
    """Bytes of one sample's output, whose first axis may be free; infinity where they are not known."""
    if output.producer() is None or output.shape is None:
        return math.inf
    known = [size for size in output.shape if isinstance(size, int)]
    free = len(output.shape) - len(known)
    first_alone = free == 0 or (free == 1 and not isinstance(output.shape[0], int))
    return math.prod(known) * _LARGEST_ELEMENT if first_alone else math.inf
