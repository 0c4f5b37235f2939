"""Find the tensors that join values of unlike ranges.

A tensor may join values of very different sizes, such as boxes in pixels and scores, or columns of one layer in
different units. In 8 bits a tensor has one scale. A Concat input with a hundredth of the joint range gets only two or
three of 256 levels. The same is true for a column of a layer's output if another column is a hundred times larger.

If no layer follows the join, running the join in float costs almost nothing. The tensors from the last layer before the
join to the outputs then stay in float if an input of the join gets fewer than 16 levels. They also stay in float if a
column gets fewer than 16 levels. edgeq estimates the levels of a column from constants. If a layer reads the join, that
layer would have to run in float too. The limits are then stricter: an input must get fewer than 4 levels, and the
rounding error must exceed a twentieth of the layer's output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from edgeq.calibration.spreads import LEVELS, MIN_LEVELS, ModelSpreads
from edgeq.model.graph import (
    MAIN_DOMAINS,
    before_layers,
    consumers,
    is_op,
    moves_data,
    name_of,
    node_input,
    operator_of,
    readers,
)
from edgeq.model.parameters import float_constant, output_channels

JOINED = "joins values of unlike ranges: 8 bits would leave the narrowest too few of 256 levels"
COLUMNS = "has columns of unlike ranges: 8 bits would leave the narrowest too few of 256 levels"
TAIL = "leads to or from a join of unlike ranges after the last layer, where 8 bits gain nothing"
_MIN_INNER_LEVELS = MIN_LEVELS / 4
_MAX_NOISE = 0.05
# Share of the columns that may be narrow. In a layer with many features, some are always narrow.
_FEW_COLUMNS = 0.05
BOUNDED = ("ArgMax", "HardSigmoid", "LogSoftmax", "Sigmoid", "Softmax", "Tanh", "TopK")
_JOINED = {"Concat": slice(None), "ScatterElements": slice(0, 3, 2), "ScatterND": slice(0, 3, 2), "Where": slice(1, 3)}


def find_joins(measured: ModelSpreads) -> Mapping[str, str]:
    """Return name → reason, for the tensors next to joins of unlike ranges that must stay in float."""
    # After the last layer, float costs almost nothing. So the limits depend on the place in the graph.
    leading = before_layers(measured.model)
    layers = sum(bool(operator_of(node).mac_rule) for node in measured.model.graph)
    reasons: dict[str, str] = {}
    for node in measured.model.graph:
        if node.domain not in MAIN_DOMAINS or not node.outputs[0].name:
            continue
        output = node.outputs[0]
        joined, columns = _joined_levels(node, measured), math.inf
        if node not in leading:
            # Whether this layer is the only layer, so that nothing else could be quantized.
            alone = layers == 1 and bool(operator_of(node).mac_rule)
            # Bounded functions such as Sigmoid make errors in all columns matter alike, whatever the ranges of the
            # columns.
            columns = math.inf if alone or _is_scored(output) else _column_levels(node, measured)
            if joined < MIN_LEVELS or columns < MIN_LEVELS:
                # A tensor keeps the reason that it got before, because that is the more specific one.
                tail = dict.fromkeys(_tail(node, measured.model, leading), TAIL)
                reasons = {**tail, **reasons, name_of(output): JOINED if joined < MIN_LEVELS else COLUMNS}
        elif joined < _MIN_INNER_LEVELS and _is_lost(output, measured):
            reasons.update((name_of(value), JOINED) for value in (output, *_moved(output)))
    return reasons


def _joined_levels(node: ir.Node, measured: ModelSpreads) -> float:
    """Return how many levels the range of a join leaves for its narrowest input. Return infinity for other nodes."""
    places, joint = _JOINED.get(node.op_type), measured.spread(node.outputs[0])
    if places is None or joint is None or not joint.width:
        return math.inf
    widths = [_width(value, measured) for value in list(node.inputs)[places]]
    return min((joint.levels(width) for width in widths if width), default=math.inf)


def _width(value: ir.Value | None, measured: ModelSpreads) -> float:
    """Return the width of an operand's range; 0 if it is not known or all values are zero."""
    spread, numbers = measured.spread(value), float_constant(value)
    if spread is not None:
        # A tensor that contains only zero and one other number needs no levels between them.
        return spread.width if spread.magnitudes.size > 1 else 0.0
    finite = numbers[np.isfinite(numbers)] if numbers is not None else np.zeros(0)
    return float(finite.max(initial=0.0) - finite.min(initial=0.0))


def _column_levels(node: ir.Node, measured: ModelSpreads) -> float:
    """Return how many levels the widest column of an output leaves for its narrow columns. The widths are estimated
    from constants: the columns of a weight, factors, or summands. The narrowest columns, a share of `_FEW_COLUMNS`, are
    ignored.
    """
    data = node_input(node, 0)
    weights = float_constant(node_input(node, 1))
    if is_op(node, "Conv", "Gemm", "MatMul") and weights is not None and weights.ndim > 1:
        channels = output_channels(node, weights.shape[-2:] if is_op(node, "MatMul") else weights.shape)
        axis = weights.ndim - 1 if weights.shape[-1] == channels and not is_op(node, "Conv") else 0
        if is_op(node, "Gemm"):
            axis = 0 if node.attributes.get_int("transB", 0) else 1
        sizes = np.sqrt(np.sum(np.moveaxis(weights, axis, 0).reshape(channels, -1) ** 2, axis=1)) * measured.rms(data)
        bias = float_constant(node_input(node, 2))
        sizes = sizes + np.abs(bias).reshape(-1) if bias is not None and bias.size == channels else sizes
    elif is_op(node, "Mul", "Add", "Div"):
        place = next((p for p in (0, 1) if float_constant(node.inputs[p]) is not None), None)
        factors = float_constant(node.inputs[place]) if place is not None else None
        if factors is None or place is None or (is_op(node, "Div") and place == 0):
            return math.inf
        operand_rms = measured.rms(node.inputs[1 - place])
        sizes = np.abs(factors).reshape(-1)
        if is_op(node, "Div"):
            sizes = 1 / sizes[sizes > 0]
        sizes = sizes + operand_rms if is_op(node, "Add") else sizes
    else:
        return math.inf
    sizes = sizes[(sizes > 0) & np.isfinite(sizes)]
    return (
        float(np.quantile(sizes, _FEW_COLUMNS, method="lower") / sizes.max()) * LEVELS if sizes.size > 1 else math.inf
    )


def _tail(node: ir.Node, model: ir.Model, leading: frozenset[ir.Node]) -> Iterator[str]:
    """Yield the names of the tensors from a join to the outputs. A tensor between the last layers and the join is
    included too if only this part of the graph reads it.
    """
    inside, waiting = {node}, [node]
    while waiting:
        at = waiting.pop()
        for reader in (reader for output in at.outputs for reader in readers(output)):
            if reader not in inside:
                inside.add(reader)
                waiting.append(reader)
    for at in reversed(list(model.graph)):
        reading = {reader for output in at.outputs for reader in readers(output)}
        if reading and reading <= inside and at not in leading and not operator_of(at).mac_rule:
            inside.add(at)
    for at in model.graph:
        if at in inside and not operator_of(at).mac_rule:
            yield from (name_of(output) for output in at.outputs if output.name)


def _is_scored(value: ir.Value) -> bool:
    """Return whether every reader of a tensor maps it to a bounded interval, as Sigmoid does. An error then matters
    equally in all columns.
    """
    reading = [reader for tensor in (value, *_moved(value)) for reader in readers(tensor) if not moves_data(reader)]
    return bool(reading) and all(is_op(reader, *BOUNDED) for reader in reading)


def _moved(value: ir.Value) -> Iterator[ir.Value]:
    """Yield the tensors that result from moving a tensor's data."""
    for reader in readers(value):
        if moves_data(reader):
            yield from reader.outputs
            yield from _moved(reader.outputs[0])


def _is_lost(value: ir.Value, measured: ModelSpreads) -> bool:
    """Return whether a layer that reads a join receives too much of the join's rounding error, or whether an operator
    that is not a layer reads the join.
    """
    for tensor in (value, *_moved(value)):
        noise = spread.noise if (spread := measured.spread(value)) is not None else 0.0
        for reader, place in consumers(tensor):
            weights = float_constant(node_input(reader, 1)) if place == 0 else None
            if moves_data(reader):
                continue
            if not is_op(reader, "Conv", "Gemm", "MatMul") or weights is None or weights.ndim < 2:
                return True
            channels = output_channels(reader, weights.shape[-2:] if is_op(reader, "MatMul") else weights.shape)
            output_noise = noise * math.sqrt(float(np.sum(weights**2)) / channels)
            if output_noise > _MAX_NOISE * measured.rms(reader.outputs[0]):
                return True
    return False
