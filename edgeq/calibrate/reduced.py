"""The tensors of a float model, large ones without their values: their extrema, and the part of them that is counted.

What leaves a session is written to memory, read again and thrown away, and most of it is a few large tensors. Once of
those only a part is counted, the graph itself gives that part (Slice), the extrema (ReduceMin, ReduceMax) and whether
all values are finite (ReduceSum: a NaN is in the sum, and may be passed over by the others). The operators before are
those of the instrumented model, so every number is the same to the bit.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.calibrate.instrumented import InstrumentedModel
from edgeq.calibrate.observer import LARGE, PLENTY, Part, spread_stride
from edgeq.graph.convert import to_bytes
from edgeq.graph.edit import Editor
from edgeq.graph.index import GraphIndex
from edgeq.session import SessionSettings, open_session

FIRST = PLENTY // LARGE
"""The sample from which on of every large tensor a part is counted."""
_EXTREMA = ("ReduceMin", "ReduceMax", "ReduceSum")

Inputs = Mapping[str, NDArray[Any]]


class ReducedModel:
    """Gives the tensors of an instrumented model; may be used by several threads.

    Args:
        every_element: large tensors are given whole, always.
    """

    def __init__(self, model: InstrumentedModel, *, every_element: bool = False) -> None:
        self._model = model
        self._reduced: _Reduced | None = None
        self._building = threading.Lock()
        self._possible = model.optimised is not None and not every_element

    def run(self, inputs: Inputs, sample: str, place: int) -> list[NDArray[Any] | Part]:
        """The tensors of one sample, in the order of the model's names.

        Args:
            place: of the sample among all, from 0.

        Raises:
            DataError: ONNX Runtime refuses the sample.
        """
        small = self._reduced.run(inputs) if self._reduced is not None and place >= FIRST else None
        if small is not None:
            return small
        values = self._model.run(inputs, sample)
        if self._possible and place >= FIRST and self._building.acquire(blocking=False):
            # Never released: the first shapes that come are those of nearly all samples, or none come twice.
            self._reduced = _Reduced(self._model, inputs, values)
        return list(values)


class _Reduced:
    """The model for samples of the shapes of one."""

    def __init__(self, model: InstrumentedModel, inputs: Inputs, values: Sequence[NDArray[Any]]) -> None:
        self._inputs = _shapes(inputs)
        self._names = model.fetched
        self._large = {
            name: (array.size, spread_stride(array.shape))
            for name, array in zip(model.fetched, values, strict=True)
            if array.size >= LARGE and array.dtype == np.float32 and name not in model.keep_layout
        }
        self._session: Any = None
        if self._large:
            assert model.optimised is not None
            graph = ir.load(model.optimised)
            reduce_large(graph, self._names, self._large)
            written = model.optimised.with_name("reduced.onnx")
            written.write_bytes(to_bytes(graph))
            settings = SessionSettings(optimization="none", intra_op_threads=model.threads)
            self._session = open_session(written, settings)

    def run(self, inputs: Inputs) -> list[NDArray[Any] | Part] | None:
        """The tensors of one sample; None where it has to be seen whole: other shapes, or a value that is not finite
        (or a sum of finite ones that is not)."""
        session = self._session
        if session is None or _shapes(inputs) != self._inputs:
            return None
        try:
            joined, *others = session.run(None, dict(inputs))
        except Exception:  # a tensor whose size depends on values; anything else is raised by the whole run too
            self._session = None
            return None
        count = len(self._large)
        extrema = joined[: len(_EXTREMA) * count].reshape(-1, count)
        if not np.isfinite(extrema).all():
            return None
        found: dict[str, NDArray[Any] | Part] = {}
        end = extrema.size
        for (name, (size, stride)), low, high in zip(self._large.items(), *extrema[:2].tolist(), strict=True):
            begin, end = end, end - (-size // stride)
            found[name] = Part(joined[begin:end], size, stride, low, high)
        whole = dict.fromkeys(name for name in self._names if name not in self._large)
        found.update(zip(whole, others, strict=True))
        return [found[name] for name in self._names]


def reduce_large(model: ir.Model, names: Sequence[str], large: dict[str, tuple[int, int]]) -> None:
    """Make the outputs of an optimised graph, in place: a vector of all that is wanted of the `large` tensors, then
    the others of `names`, once each.

    The vector, float32: the minima, the maxima, the sums, in the order of `large`; then the parts.

    Args:
        large: tensor name → (its elements, the step from one element of its part to the next).
    """
    editor = Editor(model)
    values = GraphIndex(model).values
    zero = editor.constant("reduced/zero", np.array([0]))
    wanted: dict[str, list[ir.Value]] = {}
    # ONNX Runtime goes from an output to what it needs, and there first to the node that comes last in the file. So
    # the first tensor is reduced as soon as it is there, while it is in the caches and before an operator that could
    # then work in its place.
    for name, (size, stride) in reversed(large.items()):
        length = editor.constant("reduced/length", np.array([size]))
        step = editor.constant("reduced/step", np.array([stride]))
        flat = editor.node("Reshape", [values[name], length], f"{name}/flat")
        wanted[name] = [editor.node(kind, [flat], f"{name}/{kind}", attributes={"keepdims": 1}) for kind in _EXTREMA]
        wanted[name].append(editor.node("Slice", [flat, zero, length, zero, step], f"{name}/part"))
    parts = list(chain.from_iterable(zip(*(wanted[name] for name in large), strict=True)))
    joined = editor.node("Concat", parts, "reduced/all", attributes={"axis": 0})
    model.graph.outputs[:] = [joined, *(values[name] for name in dict.fromkeys(names) if name not in large)]


def _shapes(inputs: Inputs) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in inputs.items()}
