"""Choose ranges of tensors before a non-linear function for the least error after the function, not before it.

A convolution before SiLU may range from -139 to 23, and SiLU maps everything below -8 to nearly zero. Quantization
steps below -8 are wasted. So the search minimises, over the histogram of the tensor,

    sum over bins  count * sum over ends (f(quantized centre) - f(centre))^2

Here f is everything that follows element by element (`Followers`), whatever its operators. An activation function that
follows a convolution may be one node (Sigmoid, HardSwish), or several (x * Sigmoid(x), the Erf form of GELU). In every
form, it maps each element by itself, and the rest of the network sees only its result. So the search follows the tensor
through element-wise nodes, and evaluates them as a function of one number by running them on a list of numbers.

`Stepper` runs a model piece by piece, so that results of one piece can be changed before the next piece reads them. All
samples advance together. Only tensors that are still needed are kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.calibration.methods.mse import COARSE, REFINEMENTS
from edgeq.calibration.ranges import Range
from edgeq.calibration.statistics import TensorStatistics, linear_of
from edgeq.model.graph import MAIN_DOMAINS, MICROSOFT, GraphIndex, name_of, operator_of, readers, reads
from edgeq.model.quant_params import Grid
from edgeq.run.session import SessionSettings, open_session
from edgeq.tuning.recover.layers import Floats, initializer

if TYPE_CHECKING:
    import onnxruntime as ort


def open_piece(
    model: ir.Model,
    nodes: Sequence[ir.Node],
    feed: Mapping[str, Any],
    outputs: Sequence[str],
    settings: SessionSettings,
) -> ort.InferenceSession:
    """Return a session of `nodes`, with the initializers of `model` that they read.

    Args:
        nodes: nodes of the main graph, in the order of the graph.
        feed: examples of the session's inputs by name: arrays, or lists of arrays for sequences. The session also
            accepts other shapes.
        outputs: names of tensors that the nodes compute.
    """
    piece = onnx.ModelProto(ir_version=model.ir_version)
    piece.opset_import.extend(onnx.helper.make_opsetid(*entry) for entry in model.opset_imports.items())
    piece.graph.name = "piece"
    piece.graph.node.extend(ir.serde.serialize_node(node) for node in nodes)
    sources = dict.fromkeys(value for node in nodes for value in reads(node))
    constants = [value for value in sources if value.is_initializer() and value.name not in feed]
    piece.graph.initializer.extend(_serialize(value) for value in constants)
    piece.graph.input.extend(_describe_input(name, value) for name, value in feed.items())
    piece.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    return open_session(piece.SerializeToString(), settings)


def _serialize(initializer: ir.Value) -> onnx.TensorProto:
    tensor = initializer.const_value
    assert tensor is not None
    if isinstance(tensor, ir.ExternalTensor):  # a session opened from bytes has no folder to read from
        tensor = ir.Tensor(tensor.numpy(), dtype=tensor.dtype)
    tensor.name = initializer.name
    return ir.serde.serialize_tensor(tensor)


def _describe_input(name: str, value: Any) -> onnx.ValueInfoProto:
    """Return a graph input for values of the same type as `value`."""
    if isinstance(value, list):
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.asarray(value[0]).dtype if value else np.dtype(np.float32))
        return onnx.helper.make_tensor_sequence_value_info(name, kind, None)
    return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(np.asarray(value).dtype), None)


Array = NDArray[Any]


class Stepper:
    """Run the nodes of `model` in order, up to a given tensor.

    A node and its initializers are read when the node runs. So if an initializer changes, all nodes that have not run
    yet use the new value. Nodes run as written, without ONNX Runtime's optimisation.

    Args:
        model: a model with its nodes in topological order.
        feeds: the inputs by name, for each sample.
        threads: threads inside an operator; 0 for the runtime's default.
    """

    def __init__(self, model: ir.Model, feeds: Sequence[Mapping[str, Array]], *, threads: int = 0) -> None:
        self._model = model
        self._nodes = list(model.graph)
        self._settings = SessionSettings(optimization="none", intra_op_threads=threads)
        self._position = 0
        self._values: list[dict[str, Array]] = [dict(feed) for feed in feeds]
        self._place = {name_of(v): index for index, node in enumerate(self._nodes) for v in node.outputs if v.name}
        self._last_use: dict[str, int] = {}
        for index, node in enumerate(self._nodes):
            self._last_use.update((name_of(value), index) for value in reads(node))
        self._last_use.update((name_of(output), len(self._nodes)) for output in model.graph.outputs)

    def advance(self, tensor: str) -> list[Array]:
        """Run up to the node that computes `tensor`, and return its value for each sample."""
        stop = self._place[tensor] + 1
        if stop > self._position:
            self._run(stop, tensor)
        return [values[tensor] for values in self._values]

    def add(self, tensor: str, shift: Array) -> None:
        """Add `shift`, which broadcasts, to a tensor that has been computed, in every sample."""
        for values in self._values:
            values[tensor] = values[tensor] + shift

    def _run(self, stop: int, tensor: str) -> None:
        nodes = self._nodes[self._position : stop]
        computed = {name_of(output) for node in nodes for output in node.outputs if output.name}
        sources = {name_of(value) for node in nodes for value in reads(node)}
        inputs = sorted(sources & self._values[0].keys())
        live_names = sorted(name for name in computed if name == tensor or self._last_use.get(name, -1) >= stop)
        example = {name: self._values[0][name] for name in inputs}
        session = open_piece(self._model, nodes, example, live_names, self._settings)
        self._position = stop
        for values in self._values:
            results = session.run(live_names, {name: values[name] for name in inputs})
            values.update(zip(live_names, results, strict=True))
            for name in [n for n in values if n != tensor and self._last_use.get(n, -1) < stop]:
                del values[name]


Function = Callable[[NDArray[Any]], NDArray[Any]]
"""A function that maps n numbers to an array [ends, n]; float64 unless another type is mentioned."""


@dataclass(frozen=True, eq=False)
class Follower:
    """Describe the element-wise part that follows a tensor.

    Attributes:
        tensor: name of the tensor that the part follows.
        nodes: the part's nodes, in the order of the graph; empty if nothing element-wise follows.
        ends: names of tensors in the part that are graph outputs or that other nodes read. If other nodes read `tensor`
            directly, it is also among them.
    """

    tensor: str
    nodes: tuple[ir.Node, ...]
    ends: tuple[str, ...]


class Followers:
    """Find and evaluate the element-wise parts that follow tensors of one model's main graph."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._values = GraphIndex(model).values
        self._nodes = list(model.graph)
        self._places = {node: place for place, node in enumerate(self._nodes)}

    def find(self, tensor: str) -> Follower:
        """Return the nodes after `tensor` that compute each element from one element of `tensor` and from scalar
        constants.
        """
        if tensor not in self._values:
            return Follower(tensor, (), ())
        start = self._values[tensor]
        reached = [start]
        nodes: list[ir.Node] = []
        waiting = self._reader_places(start)
        while waiting:
            node = self._nodes[heapq.heappop(waiting)]
            # A node is queued once for each tensor that it reads.
            if node.outputs[0] not in reached and _is_elementwise(node, reached):
                nodes.append(node)
                reached.append(node.outputs[0])
                for behind in self._reader_places(node.outputs[0]):
                    heapq.heappush(waiting, behind)
        ends = [v for v in reached if v.is_graph_output() or any(reader not in nodes for reader in readers(v))]
        return Follower(tensor, tuple(nodes), tuple(name_of(end) for end in ends))

    def function(self, follower: Follower, dtype: type[np.floating[Any]] = np.float64) -> Function:
        """Return the function that the nodes of `follower` compute (in float32). The function can be called any number
        of times.

        Args:
            dtype: type of the function's results.
        """
        computed = [name for name in follower.ends if name != follower.tensor]
        if not computed:
            return lambda numbers: np.tile(np.asarray(numbers, dtype).reshape(1, -1), (len(follower.ends), 1))
        feed = {follower.tensor: np.zeros(1, np.float32)}
        settings = SessionSettings(optimization="basic", intra_op_threads=1)
        session = open_piece(self._model, follower.nodes, feed, computed, settings)

        def run(numbers: NDArray[Any]) -> NDArray[Any]:
            """Return [ends, n]: the result at each end for n values of the followed tensor."""
            flat = np.ascontiguousarray(numbers, np.float32).reshape(-1)
            results = dict(zip(computed, session.run(computed, {follower.tensor: flat}), strict=True))
            ends = [results.get(name, flat) for name in follower.ends]
            return np.stack([np.asarray(end, dtype).reshape(-1) for end in ends])

        return run

    def _reader_places(self, value: ir.Value) -> list[int]:
        """Return the positions in the graph of the nodes that read a value, as a heap."""
        return sorted(self._places[node] for node in readers(value))


def _is_elementwise(node: ir.Node, reached: list[ir.Value]) -> bool:
    """Return whether each element of a node's only output comes from one element of each `reached` tensor that it
    reads, and from scalar constants.
    """
    row = operator_of(node)
    if not row.elementwise or node.domain not in (*MAIN_DOMAINS, MICROSOFT) or len(node.outputs) != 1:
        return False
    places = len(node.inputs) if len(row.activations) > 1 else 1
    data, options = node.inputs[:places], node.inputs[places:]
    return all(value in reached or _is_scalar(value) for value in data) and all(map(_is_scalar, options))


def _is_scalar(value: ir.Value | None) -> bool:
    """Return whether an input is a constant float32 number, or is left out."""
    tensor = initializer(value)
    return value is None or (tensor is not None and tensor.size == 1 and tensor.dtype == ir.DataType.FLOAT)


_MAX_BINS = 1024
"""Largest number of histogram bins to evaluate. Neighbouring bins are joined until there are no more than this."""


def find_range_before(tensor: TensorStatistics, function: Function, grid: Grid) -> Range | None:
    """Return the range of `tensor` with the least expected squared error after `function`. Return None if the function
    is not finite (a logarithm, a reciprocal), because the error is undefined then.

    Args:
        grid: the integers that the range is mapped to.
    """
    low, high = min(tensor.minimum, 0.0), max(tensor.maximum, 0.0)
    if not tensor.count or low == high:
        return Range(0.0, 0.0)
    if grid.symmetric:
        high = max(-low, high)
        low = -high
    centres, counts = join_bins(*_filled_bins(tensor))
    targets = function(centres)
    if not np.isfinite(targets).all():
        return None

    def errors(shares: Floats) -> Floats:
        """Return the weighted squared error for n ranges: float[n]. Each row of `shares` contains factors by which the
        two ends of the whole range are multiplied.
        """
        sums = [_measure_error(centres, counts, targets, function, Range(low * a, high * b), grid) for a, b in shares]
        return np.array(sums)

    one_side = np.ones(1)
    lows = COARSE if low < 0 and not grid.symmetric else one_side
    highs = COARSE if high > 0 else one_side
    pairs = np.array([(b if grid.symmetric else a, b) for a in lows for b in highs])
    best, lowest_error = _pick_best(pairs, errors(pairs))
    for factor in REFINEMENTS:
        around = np.array([factor, 1.0, 1.0 / factor])
        a = np.minimum(best[0] * around, 1.0) if lows.size > 1 else one_side
        b = np.minimum(best[1] * around, 1.0) if highs.size > 1 else one_side
        pairs = np.array([(y if grid.symmetric else x, y) for x in a for y in b])
        candidate, error = _pick_best(pairs, errors(pairs))
        if error < lowest_error:
            best, lowest_error = candidate, error
    if not np.isfinite(lowest_error):
        return None
    return Range(float(low * best[0]), float(high * best[1]))


def join_bins(centres: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """Join neighbouring bins until there are at most `_MAX_BINS`. The centre of joined bins is a mean weighted by
    count.
    """
    while len(centres) > _MAX_BINS:
        if len(centres) % 2:
            centres, counts = np.append(centres, centres[-1]), np.append(counts, 0.0)
        pairs, weights = centres.reshape(-1, 2), counts.reshape(-1, 2)
        counts = weights.sum(1)
        centres = np.where(counts > 0, (pairs * weights).sum(1) / np.maximum(counts, 1e-300), pairs.mean(1))
    return centres, counts


def _filled_bins(tensor: TensorStatistics) -> tuple[Floats, Floats]:
    linear = linear_of(tensor.histogram)
    filled = linear.counts > 0
    return linear.centres()[filled], linear.counts[filled]


def _measure_error(
    centres: Floats, counts: Floats, targets: Floats, function: Function, span: Range, grid: Grid
) -> float:
    """Return the summed squared error. The function is evaluated once for each integer, not for each bin."""
    params = grid.params(span.low, span.high)
    levels = params.dequantize(np.arange(params.low, params.high + 1))
    outputs = function(levels)[:, params.quantize(centres).astype(np.intp) - params.low]
    if not np.isfinite(outputs).all():
        return np.inf
    return float(((outputs - targets) ** 2 @ counts).sum())


def _pick_best(pairs: Floats, errors: Floats) -> tuple[Floats, float]:
    place = int(np.argmin(errors))
    return pairs[place], float(errors[place])
