"""Observe the tensors of a float model: their extrema, and a sample of the elements of large tensors.

Every tensor that a session returns is written to memory, read again and thrown away. A few large tensors make up most
of this data. After the first samples, edgeq counts only a part of the elements of large tensors. From then on the graph
itself returns that part (Slice) and the extrema (ReduceMin, ReduceMax). The operators that compute the tensors do not
change, so the tensors' values stay identical to the last bit.

A NaN is not always visible in the extrema. A convolution or an addition of moderate numbers is always finite, so for
these operators it is enough to check the magnitudes of their inputs (`Bounds`). For other operators the graph also
returns the sum, which is NaN if an element is NaN.

`InstrumentedModel` fetches the observed tensors at the lowest cost:

- ONNX Runtime computes convolutions in a blocked channel layout if that is faster on the CPU. If an inner tensor is
  fetched, ONNX Runtime first converts it to the plain layout.
- Clip has a kernel only for the plain layout, so ONNX Runtime converts its input to the plain layout and its output
  back.
- Counting does not depend on the order of values. So edgeq saves the optimised graph once, removes the conversions that
  only serve the observation, and fetches the blocked tensor.
- If a tensor's channels do not fill the blocks, edgeq keeps its conversion, because the padding is not data.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from edgeq_device.prepare.arrays import to_array
from edgeq_device.system.places import make_scratch
from numpy.typing import NDArray

from edgeq.calibration.statistics import (
    CHUNK,
    FINITE,
    ChannelExtrema,
    Counter,
    Histogram,
    Nonfinite,
    TensorStatistics,
    in_units,
)
from edgeq.errors import CalibrationError, DataError
from edgeq.model.clean import names_read
from edgeq.model.graph import MAIN_DOMAINS, PERMUTATIONS, GraphIndex, indexed
from edgeq.model.sessions import Loadable
from edgeq.model.tensors import opset_of_proto, weight_bytes
from edgeq.run.session import SessionSettings

_BLOCKED = "com.microsoft.nchwc"
_WIDEST_BLOCK = 16
_LARGEST = 2**29
"""Largest size of a model's weights, in bytes, for which the optimised graph is written to the temporary folder."""
_WEIGHTS_BESIDE = {
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
        if weight_bytes(graph.model) > _LARGEST or not any(node.op_type == "Conv" for node in graph.graph):
            self._session = observed.open(settings)
            return
        self.folder, remove = make_scratch("edgeq-calibrate-")
        weakref.finalize(self, remove)
        written = self.folder / "optimised.onnx"
        self._session = observed.open(replace(settings, config=_WEIGHTS_BESIDE, save_optimized_to=written))
        self.optimised = onnx.load(written, load_external_data=False)
        blocked = without_conversions(self.optimised.graph, names, keep_layout)
        if blocked:
            self.fetched = [blocked.get(name, name) for name in names]
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
        small = self._reduced.run(inputs) if self._reduced is not None and place >= FIRST else None
        if small is not None:
            return small
        values = self.run(inputs, sample)
        possible = self.optimised is not None and not self._every_element and place >= FIRST
        if possible and self._building.acquire(blocking=False):
            # The lock is never released, because one reduced model is enough: either nearly all samples have the shapes
            # of this sample, or no shapes repeat.
            self._reduced = _Reduced(self, inputs, values)
        return list(values)


class Links:
    """Index the nodes of a graph by the names that they write and read. Do not change the graph while the index is in
    use.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.makers = {name: node for node in graph.node for name in node.output}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in names_read(node):
                self.readers.setdefault(name, []).append(node)
        self.outputs = {value.name for value in graph.output}


def without_conversions(
    graph: onnx.GraphProto, names: Sequence[str], keep_layout: Collection[str] = ()
) -> dict[str, str]:
    """Remove layout conversions from an optimised graph, in place. The graph's outputs become the tensors to fetch for
    `names`.

    Returns:
        Name → blocked tensor, for each of `names` whose values exist in the blocked layout, except `keep_layout`. If
        this is empty, the graph's outputs do not change.
    """
    wanted = set(names) - set(keep_layout)
    _unwrap_clips(graph)
    blocked: dict[str, str] = {}
    found: set[str] = set()
    for node in graph.node:
        name = node.output[0]
        if name not in wanted or not node.input:
            continue
        if _converts_back(node):
            blocked[name] = node.input[0]
        # A Clip that reads a blocked tensor now also returns a blocked tensor.
        elif _is(node, "Clip") and node.input[0] in found:
            blocked[name] = name
        else:
            continue
        found.add(blocked[name])
    if blocked:
        outputs = dict.fromkeys(blocked.get(name, name) for name in names)
        _forget(graph, outputs)  # The shapes in the file are those of the plain layout.
        del graph.output[:]
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        read = Links(graph)
        for node in list(graph.node):
            if _converts_back(node) and node.output[0] not in read.readers and node.output[0] not in outputs:
                graph.node.remove(node)
    return blocked


def _unwrap_clips(graph: onnx.GraphProto) -> None:
    """Turn blocked → plain → Clip → blocked into blocked → Clip if nothing else reads the Clip's output."""
    links = Links(graph)
    for node in list(graph.node):
        source = links.makers.get(node.input[0]) if _is(node, "Clip") else None
        clipped = node.output[0]
        after = links.readers.get(clipped, [])
        if source is None or not _converts_back(source) or not after or clipped in links.outputs:
            continue
        if all(_converts_to_blocked(reader) for reader in after):
            node.input[0] = source.input[0]
            _forget(graph, [clipped])
            for reader in after:
                for user in links.readers.get(reader.output[0], []):
                    user.input[:] = [clipped if name == reader.output[0] else name for name in user.input]
                graph.node.remove(reader)


def _forget(graph: onnx.GraphProto, names: Collection[str]) -> None:
    """Remove the stated shapes of tensors from a graph, in place."""
    kept = [value for value in graph.value_info if value.name not in names]
    del graph.value_info[:]
    graph.value_info.extend(kept)


def _is(node: onnx.NodeProto, *op_types: str) -> bool:
    return node.op_type in op_types and node.domain in MAIN_DOMAINS


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def _converts_back(node: onnx.NodeProto) -> bool:
    """Return whether a node converts from the blocked to the plain layout and the channels fill the blocks."""
    if (node.domain, node.op_type) != (_BLOCKED, "ReorderOutput"):
        return False
    given = _attributes(node)
    return given.get("channels", 1) % _WIDEST_BLOCK == 0 and not given.get("channels_last", 0)


def _converts_to_blocked(node: onnx.NodeProto) -> bool:
    return (node.domain, node.op_type) == (_BLOCKED, "ReorderInput") and not _attributes(node).get("channels_last", 0)


ALL_COUNTED = 1 << 13
"""Size of the largest tensor, in elements, that is counted completely in every sample."""
SPREAD = 1 << 12
"""Approximate number of elements that are counted in each sample of a larger tensor, after the first `PLENTY` elements.
"""
PLENTY = 1 << 18
"""Number of elements after which only an evenly spaced part is counted, for a tensor of more than `ALL_COUNTED`
elements. The number of earlier elements is estimated: edgeq assumes that the tensor had its current size in all earlier
samples. Each counted element has the weight of the elements that it represents. Extrema always include all elements.
"""
LARGE = 1 << 15
"""Size of the smallest tensor, in elements, whose part and extrema are computed in the graph. Such a tensor need not be
fetched."""


@dataclass(frozen=True)
class Seen:
    """Hold the number, extrema and dtype of the finite elements of one tensor in one sample, and the numbers of NaN and
    infinite elements.
    """

    count: int
    minimum: float
    maximum: float
    dtype: str
    nonfinite: Nonfinite = FINITE


@dataclass(frozen=True)
class Part:
    """Summarise a tensor of one sample without keeping all its values. A Part contains the extrema of all `size`
    elements, which are finite, and every `stride`-th element in `values`. The dtype is float32.
    """

    values: NDArray[np.float32]
    size: int
    stride: int
    minimum: float
    maximum: float


class Observer:
    """Observe one tensor over all samples. Several threads may call `observe` at once."""

    def __init__(
        self, start: TensorStatistics, channel_axis: int | None = None, *, every_element: bool = False
    ) -> None:
        self._every = every_element
        self._start = start
        self._counter: Counter | None = None
        self._lock = threading.Lock()
        self._axis = channel_axis
        self._channels = start.channels
        self._dtype = start.dtype
        self._samples, self._nonempty, self._count = start.samples, start.nonempty, start.count
        self._minimum, self._maximum = start.minimum, start.maximum
        self._sums = (start.minimum_sum, start.maximum_sum)
        self._nonfinite = start.nonfinite

    def observe(self, values: NDArray[Any] | Part, place: int = 0, *, visible: NDArray[np.bool_] | None = None) -> Seen:
        """Count one sample's finite values (float32 or float16, any shape) and update the extrema.

        Args:
            values: all values, or a `Part` if only a part is counted at this `place`.
            visible: which values count, in a shape that broadcasts to that of `values`; None means all.
            place: index of the sample, from 0. The counted part depends on this index and not on the progress of other
                threads, so the result is always the same.
        """
        with self._lock:
            counter = self._counter = self._counter or Counter(self._start.histogram)
        if isinstance(values, Part):
            with self._lock:
                counter.add(values.values, values.stride)
            seen = Seen(values.size, values.minimum + 0.0, values.maximum + 0.0, dtype_name(values.values))
        else:
            counted = values if visible is None else values[np.broadcast_to(visible, values.shape)]
            seen = self._add(counted, place, counter)
            if self._axis is not None and seen.count:
                self._observe_channels(values, self._axis, visible)
        self.note(seen)
        return seen

    def _add(self, values: NDArray[Any], place: int, counter: Counter) -> Seen:
        flat = np.ascontiguousarray(values).reshape(-1)
        plenty = flat.size > ALL_COUNTED and place * flat.size >= PLENTY
        stride = spread_stride(values.shape) if plenty and not self._every else 1
        low, high = math.inf, -math.inf
        nonfinite = FINITE
        for begin in range(0, flat.size, CHUNK):
            part = flat[begin : begin + CHUNK].astype(np.float32, copy=False)
            step = stride
            smallest, largest = float(np.minimum.reduce(part)), float(np.maximum.reduce(part))
            if not (math.isfinite(smallest) and math.isfinite(largest)):
                nonfinite += _nonfinite(part)
                part, step = part[np.isfinite(part)], 1
                smallest = float(np.minimum.reduce(part, initial=math.inf))
                largest = float(np.maximum.reduce(part, initial=-math.inf))
            low, high = min(low, smallest), max(high, largest)
            if step > 1:
                part = part[-begin % step :: step]
            with self._lock:
                counter.add(part, step)
        count = flat.size - nonfinite.nan - nonfinite.below - nonfinite.above
        return Seen(count, low + 0.0, high + 0.0, dtype_name(values), nonfinite)

    def note(self, seen: Seen) -> None:
        """Add the figures of one sample without its values. This is enough for tensors whose histogram is derived."""
        with self._lock:
            self._dtype = seen.dtype
            self._samples += 1
            self._nonfinite += seen.nonfinite
            if not seen.count:
                return
            self._nonempty += 1
            self._count += seen.count
            self._minimum, self._maximum = min(self._minimum, seen.minimum), max(self._maximum, seen.maximum)
            self._sums = (self._sums[0] + in_units(seen.minimum), self._sums[1] + in_units(seen.maximum))

    @property
    def nonfinite(self) -> Nonfinite:
        """Return how many elements so far were NaN or infinite."""
        return self._nonfinite

    def freeze(self, histogram: Histogram | None = None, *, last: bool = False) -> TensorStatistics:
        """Return the totals so far as an immutable value.

        Args:
            histogram: the tensor's histogram if it was derived instead of counted.
            last: whether to free the memory. No more samples may be observed then.
        """
        if histogram is None:
            histogram = self._start.histogram
            if self._counter is not None and self._count:
                histogram = self._counter.freeze(self._minimum, self._maximum)
            if last:
                self._counter = None
        return TensorStatistics(
            self._dtype,
            self._samples,
            self._nonempty,
            self._count,
            self._minimum,
            self._maximum,
            *self._sums,
            histogram,
            self._channels,
            self._nonfinite,
        )

    def _observe_channels(self, values: NDArray[Any], axis: int, visible: NDArray[np.bool_] | None) -> None:
        if axis >= values.ndim:
            raise CalibrationError(f"it has {values.ndim} dimensions and no channel axis {axis}")
        others = tuple(i for i in range(values.ndim) if i != axis)
        finite = np.isfinite(values) if visible is None else np.isfinite(values) & visible
        extrema = ChannelExtrema(
            axis,
            values.min(axis=others, where=finite, initial=np.inf).astype(np.float32) + np.float32(0),
            values.max(axis=others, where=finite, initial=-np.inf).astype(np.float32) + np.float32(0),
        )
        with self._lock:
            self._channels = extrema if self._channels is None else self._channels.merge(extrema)


def dtype_name(values: NDArray[Any]) -> str:
    """Return "float16" or "float32". Asking numpy for the name takes ten times as long."""
    return "float16" if values.dtype == np.float16 else "float32"


@lru_cache(maxsize=4096)
def spread_stride(shape: tuple[int, ...]) -> int:
    """Return the distance between counted elements, chosen so that about SPREAD elements are counted.

    The distance has no common factor with any dimension or with the block size of blocked layouts. So the counted
    elements are spread evenly over channels, rows and columns.
    """
    stride = -(-math.prod(shape) // SPREAD)
    while any(math.gcd(stride, size) > 1 for size in (*shape, 2)):
        stride += 1
    return stride


def _nonfinite(part: NDArray[np.float32]) -> Nonfinite:
    return Nonfinite(*(int(np.count_nonzero(found)) for found in (np.isnan(part), part == -np.inf, part == np.inf)))


FIRST = PLENTY // LARGE
"""Index of the first sample in which every large tensor is counted only in part."""
MODERATE, MOST_WEIGHT = 1e30, 1e6
"""Limits under which the output of a layer is finite: the largest magnitude of an activation, and the largest sum of
the magnitudes of a layer's weights or of its bias. The product of the limits is far inside the range of float32."""
_ROW = (96, 192, 768)
"""Smallest, best and largest number of elements in the rows into which a tensor is split before it is reduced. ONNX
Runtime's kernels reduce such rows in two thirds of the time that they need for one long row."""
_ADDED = "edgeq/reduced"
"""Prefix of the names of nodes and tensors that are added to a graph."""
_REARRANGED = PERMUTATIONS | {"Relu", "ReorderInput", "ReorderOutput"}


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
        self._summed = tuple(name for name, found in sources.items() if found is None)
        self._sources = {source for found in sources.values() for source in found or ()} - set(self._large)
        reduce_large(reduced, self._names, self._large, self._summed)
        self._session = model.open(reduced)

    def run(self, inputs: Inputs) -> list[NDArray[Any] | Part] | None:
        """Return the tensors of one sample. Return None if the complete tensors are needed: the shapes differ, a value
        is not finite, or a sum of finite values is not finite.
        """
        session = self._session
        if session is None or _shapes(inputs) != self._inputs:
            return None
        try:
            joined, *others = session.run(None, dict(inputs))
        # The usual cause is a tensor whose size depends on values. In any other case the complete run raises the error
        # too.
        except Exception:
            self._session = None
            return None
        *rows, count = self._rows
        begin, end = 2 * count, 2 * count + len(self._summed)
        lows, highs = np.minimum.reduceat(joined[:count], rows), np.maximum.reduceat(joined[count:begin], rows)
        if not (np.abs([lows, highs]).max() <= MODERATE and np.isfinite(joined[begin:end]).all()):
            return None
        whole = dict.fromkeys(name for name in self._names if name not in self._large)
        found: dict[str, NDArray[Any] | Part] = {}
        found.update(zip(whole, others, strict=True))
        if not all(_is_moderate(found.get(name, inputs.get(name))) for name in self._sources):
            return None
        for (name, (size, stride)), low, high in zip(self._large.items(), lows.tolist(), highs.tolist(), strict=True):
            begin, end = end, end - (-size // stride)
            found[name] = Part(joined[begin:end], size, stride, low, high)
        return [found[name] for name in self._names]


class Bounds:
    """Find measured tensors whose values prove that another tensor of the graph is finite.

    Args:
        graph: the graph.
        measured: names of the tensors whose values are observed.
        folder: folder of the weights that are stored outside the graph.
    """

    def __init__(self, graph: onnx.GraphProto, measured: Collection[str], folder: Path) -> None:
        self._makers, self._measured, self._folder = Links(graph).makers, measured, folder
        self._constants = {tensor.name: tensor for tensor in graph.initializer}

    def of(self, name: str) -> frozenset[str] | None:
        """Return the measured tensors that bound the tensor `name`. If no magnitude in them exceeds `MODERATE`, all
        values of `name` are finite. Return None if no such tensors are known.
        """
        node = self._makers.get(name)
        if node is None:
            return None
        if _is(node, "Add", "Sub"):
            data = list(node.input)
        elif node.op_type == "Conv" and _attributes(node).get("activation", b"") in (b"", b"Relu"):
            constants = [self._constant(value) for value in node.input[1:3] if value]
            if any(c is None or not np.abs(c).sum(dtype=np.float64) <= MOST_WEIGHT for c in constants):
                return None
            data = [node.input[0], *node.input[3:]]
        else:
            return None
        found = [self._source(value) for value in data]
        return frozenset(name for name in found if name is not None) if None not in found else None

    def _constant(self, name: str) -> NDArray[Any] | None:
        tensor = self._constants.get(name)
        return None if tensor is None else onnx.numpy_helper.to_array(tensor, str(self._folder))

    def _source(self, name: str) -> str | None:
        """Return the measured tensor whose values bound those of `name`."""
        while name not in self._measured:
            node = self._makers.get(name)
            if node is None or not (node.op_type in _REARRANGED or self._is_moderate_clip(node)):
                return None
            name = node.input[0]
        return name

    def _is_moderate_clip(self, node: onnx.NodeProto) -> bool:
        if not _is(node, "Clip"):
            return False
        given = _attributes(node)
        bounds: list[Any] = []
        for place, attribute, otherwise in ((1, "min", -math.inf), (2, "max", math.inf)):
            name = node.input[place] if place < len(node.input) else ""
            bounds.append(self._constant(name) if name else given.get(attribute, otherwise))
        low, high = bounds
        return low is not None and high is not None and bool(low <= MODERATE and high >= -MODERATE)


def _is_moderate(values: NDArray[Any] | Part | None) -> bool:
    array = np.asarray(values)
    return not array.size or bool(max(array.max(), -array.min()) <= MODERATE)


def reduce_large(
    model: onnx.ModelProto, names: Sequence[str], large: dict[str, tuple[int, int]], summed: Sequence[str]
) -> None:
    """Replace the outputs of an optimised graph, in place. The first output is a vector with the figures of all `large`
    tensors. The other tensors of `names` follow, each once.

    The vector is float32. It contains the minima of all rows (see `row_length`), then their maxima, in the order of
    `large`. The sums of `summed` follow, then the parts.

    Args:
        large: tensor name → (number of elements, distance between the elements of its part).
        summed: names of tensors whose sums are needed.
    """
    graph = model.graph

    def add(op_type: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """Append a node and return the name of its output."""
        graph.node.append(onnx.helper.make_node(op_type, inputs, [f"{_ADDED}/{name}"], **attributes))
        return f"{_ADDED}/{name}"

    def constant(name: str, *values: int) -> str:
        """Append an initializer and return its name."""
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(values), f"{_ADDED}/{name}"))
        return f"{_ADDED}/{name}"

    zero = constant("zero", 0)
    # Since opset 18 the axes are an input.
    as_input = opset_of_proto(model) >= 18
    axis = [constant("axis", 1)] if as_input else []
    along: dict[str, Any] = {"keepdims": 0} if as_input else {"keepdims": 0, "axes": [1]}
    wanted: dict[str, dict[str, str]] = {"ReduceMin": {}, "ReduceMax": {}, "ReduceSum": {}, "Slice": {}}
    # ONNX Runtime orders the nodes by walking back from an output, and visits the node that is last in the file first.
    # With the tensors in reverse order, it reduces the first tensor as soon as that tensor exists. The tensor is then
    # still in the caches, and the next operator may overwrite it.
    for name, (size, stride) in reversed(large.items()):
        length, step = constant(f"{name}/length", size), constant(f"{name}/step", stride)
        rows = add("Reshape", [name, constant(f"{name}/row", -1, row_length(size))], f"{name}/rows")
        for kind in ("ReduceMin", "ReduceMax"):
            wanted[kind][name] = add(kind, [rows, *axis], f"{name}/{kind}", **along)
        flat = add("Reshape", [name, length], f"{name}/flat")
        if name in summed:
            wanted["ReduceSum"][name] = add("ReduceSum", [flat], f"{name}/ReduceSum")
        wanted["Slice"][name] = add("Slice", [flat, zero, length, zero, step], f"{name}/part")
    parts = [made[name] for made in wanted.values() for name in large if name in made]
    outputs = [add("Concat", parts, "all", axis=0), *(name for name in dict.fromkeys(names) if name not in large)]
    del graph.output[:]
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)


def row_length(size: int) -> int:
    """Return the length of the rows into which a tensor of `size` elements is split before it is reduced. Return `size`
    if no length in the range of `_ROW` divides it.
    """
    least, best, most = _ROW
    found = [length for length in range(least, most + 1) if size % length == 0]
    return min(found, key=lambda length: abs(math.log(length / best)), default=size)


def _shapes(inputs: Inputs) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in inputs.items()}
