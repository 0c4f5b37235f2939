"""Run a float model and return the tensors to observe, at the lowest cost.

Every tensor that a session returns is written to memory, read again and thrown away. A few large tensors make up most
of this data. After the first samples, edgeq counts only a part of the elements of large tensors. From then on the graph
itself returns that part (Slice) and the extrema (ReduceMin, ReduceMax). The operators that compute the tensors do not
change, so the tensors' values stay identical to the last bit.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from edgeq_device.prepare.arrays import to_array
from edgeq_device.system.places import make_scratch
from numpy.typing import NDArray

from edgeq.calibration.layout import without_conversions
from edgeq.calibration.observer import LARGE, PLENTY, Part, spread_stride
from edgeq.calibration.reduced import MODERATE, Bounds, is_moderate, reduce_large, row_length
from edgeq.errors import DataError
from edgeq.model.graph import GraphIndex, indexed
from edgeq.model.sessions import Loadable
from edgeq.model.tensors import weight_bytes
from edgeq.run.session import SessionSettings

# Largest size of a model's weights, in bytes, for which the optimised graph is written to the temporary folder.
_LARGEST = 2**29
_EXTERNAL_WEIGHTS = {
    "session.optimized_model_external_initializers_file_name": "optimised.onnx.data",
    "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
}
_FLOATS = ("tensor(float)", "tensor(float16)")
Inputs = Mapping[str, NDArray[Any]]


class InstrumentedModel:
    """Run a model and return the tensors `names`, in that order.

    Args:
        model: the model, which is not changed.
        names: names of tensors that nodes of the main graph compute.
        keep_layout: names of the tensors that must keep their own layout. For the others, the order of the values does
            not matter.
        threads: number of threads inside an operator; 0 leaves the choice to ONNX Runtime.
        every_element: whether `observe` always returns large tensors completely.

    Attributes:
        fetched: for each of `names`, the tensor of the optimised graph that is fetched.
        optimised: the optimised graph; None if it was not written.
        folder: temporary folder with the weights of the optimised graph. It is deleted with this object.

    Raises:
        RuntimeUnavailableError: ONNX Runtime is missing, or refuses the model.
    """

    def __init__(
        self,
        model: ir.Model | GraphIndex,
        names: Sequence[str],
        *,
        keep_layout: Collection[str] = (),
        threads: int = 0,
        every_element: bool = False,
    ) -> None:
        graph = indexed(model)
        self.names = tuple(names)
        self.keep_layout = frozenset(keep_layout)
        self.threads = threads
        self.fetched = list(names)
        self.optimised: onnx.ModelProto | None = None
        self._every_element = every_element
        self._reduced: _Reduced | None = None
        self._building = threading.Lock()
        settings = SessionSettings(intra_op_threads=threads)
        observed = Loadable.of(graph).with_outputs(names)
        # Only models with convolutions use the blocked layout, and a large graph takes longer to write than it saves.
        if weight_bytes(graph.model) > _LARGEST or not any(node.op_type == "Conv" for node in graph.graph):
            self._session = observed.open(settings)
            return
        self.folder, remove = make_scratch("edgeq-calibrate-")
        weakref.finalize(self, remove)
        path = self.folder / "optimised.onnx"
        self._session = observed.open(replace(settings, config=_EXTERNAL_WEIGHTS, save_optimized_to=path))
        self.optimised = onnx.load(path, load_external_data=False)
        blocked = without_conversions(self.optimised.graph, names, keep_layout)
        if blocked:
            self.fetched = [blocked.get(name, name) for name in names]
            # The first session is freed before the second opens, so that the weights are in memory only once.
            del self._session
            self._session = self.open(self.optimised)

    def open(self, model: onnx.ModelProto) -> Any:
        """Open a variant of `optimised` without further optimisation."""
        settings = SessionSettings(intra_op_threads=self.threads, optimization="none")
        return Loadable.of_proto(model, self.folder).open(settings)

    def floats(self) -> frozenset[str]:
        """Return the names of the float32 and float16 tensors among `names`, by the types that ONNX Runtime infers."""
        kinds = {output.name: output.type for output in self._session.get_outputs()}
        return frozenset(n for n, fetched in zip(self.names, self.fetched, strict=True) if kinds[fetched] in _FLOATS)

    def run(self, inputs: Inputs, sample: str) -> list[NDArray[Any]]:
        """Return the tensors for one sample.

        Args:
            inputs: input name → array, with the types and shapes of the model's inputs.
            sample: name of the sample, for messages.

        Raises:
            DataError: ONNX Runtime refuses the sample.
        """
        try:
            values = self._session.run(self.fetched, dict(inputs))
        except Exception as error:  # onnxruntime raises unrelated types, and sometimes a plain Exception.
            text = " ".join(str(error).split())
            raise DataError(f"onnxruntime cannot run sample {sample}: {text}", "Check its names and shapes") from error
        return [to_array(value) for value in values]

    def observe(self, inputs: Inputs, sample: str, place: int) -> list[NDArray[Any] | Part]:
        """Return the tensors for one sample. For later samples, only a part of each large tensor is returned. Several
        threads may call it at once.

        Args:
            inputs, sample: see `run`.
            place: index of the sample among all samples, from 0.

        Raises:
            DataError: ONNX Runtime refuses the sample.
        """
        small = self._reduced.run(inputs) if self._reduced is not None and place >= FIRST_PARTIAL else None
        if small is not None:
            return small
        values = self.run(inputs, sample)
        possible = self.optimised is not None and not self._every_element and place >= FIRST_PARTIAL
        if possible and self._building.acquire(blocking=False):
            # The lock is never released, because one reduced model is enough: either nearly all samples have the shapes
            # of this sample, or no shapes repeat.
            self._reduced = _Reduced(self, inputs, values)
        return list(values)


FIRST_PARTIAL = PLENTY // LARGE
"""Index of the first sample in which every large tensor is counted only in part."""


class _Reduced:
    """Run a model that reduces large tensors in the graph, for samples whose inputs have the same shapes."""

    def __init__(self, model: InstrumentedModel, inputs: Inputs, values: Sequence[NDArray[Any]]) -> None:
        self._inputs = _shapes(inputs)
        self._names = model.fetched
        self._large = {
            name: (array.size, spread_stride(array.shape))
            for name, array in zip(model.fetched, values, strict=True)
            if array.size >= LARGE and array.dtype == np.float32 and name not in model.keep_layout
        }
        # Index of the first row of each large tensor among the rows of all large tensors, then the total number of
        # rows.
        self._rows = np.cumsum([0, *(size // row_length(size) for size, _ in self._large.values())])
        self._session: Any = None
        if not self._large:
            return
        assert model.optimised is not None
        reduced = onnx.ModelProto()
        reduced.CopyFrom(model.optimised)
        bounds = Bounds(reduced.graph, {*self._names, *inputs}, model.folder)
        sources = {name: bounds.of(name) for name in self._large}
        self._summed = tuple(name for name, bounding in sources.items() if bounding is None)
        self._sources = {source for bounding in sources.values() for source in bounding or ()} - set(self._large)
        reduce_large(reduced, self._names, self._large, self._summed)
        self._session = model.open(reduced)

    def run(self, inputs: Inputs) -> list[NDArray[Any] | Part] | None:
        """Return the tensors of one sample. Return None if the complete tensors are needed: the shapes differ, a value
        is not finite, or a sum of finite values is not finite.
        """
        session = self._session
        # The reduced graph contains the sizes of the tensors as constants.
        if session is None or _shapes(inputs) != self._inputs:
            return None
        try:
            joined, *small_values = session.run(None, dict(inputs))
        # The usual cause is a tensor whose size depends on values. In any other case the complete run raises the error
        # too.
        except Exception:
            self._session = None
            return None
        *rows, count = self._rows
        begin, end = 2 * count, 2 * count + len(self._summed)
        # The rows of a tensor are neighbours, so one call reduces the rows of all tensors.
        lows, highs = np.minimum.reduceat(joined[:count], rows), np.maximum.reduceat(joined[count:begin], rows)
        if not (np.abs([lows, highs]).max() <= MODERATE and np.isfinite(joined[begin:end]).all()):
            return None
        small_names = dict.fromkeys(name for name in self._names if name not in self._large)
        tensors: dict[str, NDArray[Any] | Part] = {}
        tensors.update(zip(small_names, small_values, strict=True))
        if not all(is_moderate(tensors.get(name, inputs.get(name))) for name in self._sources):
            return None
        for (name, (size, stride)), low, high in zip(self._large.items(), lows.tolist(), highs.tolist(), strict=True):
            begin, end = end, end - (-size // stride)
            tensors[name] = Part(joined[begin:end], size, stride, low, high)
        return [tensors[name] for name in self._names]


def _shapes(inputs: Inputs) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in inputs.items()}
