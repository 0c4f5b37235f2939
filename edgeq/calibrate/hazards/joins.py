"""Joins of unlike ranges: boxes in pixels and scores in one tensor, and columns of one layer in different units.

In 8 bits a tensor has one scale. An input of a Concat whose range is a hundredth of the joint one is left two or three
of 256 levels. So is a column of an output that another column exceeds a hundred times.

Where no layer follows, float costs next to nothing. The join stays in float, from the last layer before it to the
outputs, where an input would be left fewer than 16 levels, or so would a column by its constants. Where a layer reads
the join, that layer would be in float. Then an input must be left fewer than 4, and the rounding must make a twentieth
of the layer's output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from edgeq.calibrate.hazards.measured import FEWEST, LEVELS, Measured
from edgeq.graph.operators import moves_data, operator_of
from edgeq.graph.query import MAIN_DOMAINS, consumers, is_op, name_of, node_input, readers
from edgeq.model.constants import float_constant, output_channels

JOINED = "joins values of unlike ranges: 8 bits would leave the narrowest too few of 256 levels"
COLUMNS = "has columns of unlike ranges: 8 bits would leave the narrowest too few of 256 levels"
TAIL = "leads to or from a join of unlike ranges behind the last layer, where 8 bits gain nothing"

_FEWEST_INSIDE = FEWEST / 4
_MOST_NOISE = 0.05
_FEW_COLUMNS = 0.05
"""Share of columns that may be small: some of many features always are."""
_BOUNDED = ("ArgMax", "HardSigmoid", "LogSoftmax", "Sigmoid", "Softmax", "Tanh", "TopK")
_JOINED = {"Concat": slice(None), "ScatterElements": slice(0, 3, 2), "ScatterND": slice(0, 3, 2), "Where": slice(1, 3)}


def find_joins(measured: Measured) -> Mapping[str, str]:
    """Return the tensors around joins of unlike ranges, by name, each with the reason."""
    before_layers = _before_layers(measured.model)
    layers = sum(bool(operator_of(node).mac_rule) for node in measured.model.graph)
    found: dict[str, str] = {}
    for node in measured.model.graph:
        if node.domain not in MAIN_DOMAINS or not node.outputs[0].name:
            continue
        output = node.outputs[0]
        joined, columns = _joined_levels(node, measured), math.inf
        if node not in before_layers:
            alone = layers == 1 and bool(operator_of(node).mac_rule)  # it is all that can be quantized
            columns = math.inf if alone or _is_scored(output) else _column_levels(node, measured)
            if joined < FEWEST or columns < FEWEST:
                tail = dict.fromkeys(_tail(node, measured.model, before_layers), TAIL)
                found = {**tail, **found, name_of(output): JOINED if joined < FEWEST else COLUMNS}
        elif joined < _FEWEST_INSIDE and _is_lost(output, measured):
            found.update((name_of(value), JOINED) for value in (output, *_moved(output)))
    return found


def _joined_levels(node: ir.Node, measured: Measured) -> float:
    """Return the levels that the joint range leaves the narrowest of what a node joins."""
    places, joint = _JOINED.get(node.op_type), measured.spread(node.outputs[0])
    if places is None or joint is None or not joint.width:
        return math.inf
    widths = [_width(value, measured) for value in list(node.inputs)[places]]
    return min((joint.levels(width) for width in widths if width), default=math.inf)


def _width(value: ir.Value | None, measured: Measured) -> float:
    """Return the width of the range of an operand; 0 where it is not known, or all zero."""
    spread, numbers = measured.spread(value), float_constant(value)
    if spread is not None:
        # Zero and one other number need no levels between them.
        return spread.width if spread.magnitudes.size > 1 else 0.0
    finite = numbers[np.isfinite(numbers)] if numbers is not None else np.zeros(0)
    return float(finite.max(initial=0.0) - finite.min(initial=0.0))


def _column_levels(node: ir.Node, measured: Measured) -> float:
    """Return the levels that the widest column of an output leaves the narrowest but a few, by the constants that make
    them: columns of a weight, factors, and summands."""
    first = node_input(node, 0)
    weights = float_constant(node_input(node, 1))
    if is_op(node, "Conv", "Gemm", "MatMul") and weights is not None and weights.ndim > 1:
        channels = output_channels(node, weights.shape[-2:] if is_op(node, "MatMul") else weights.shape)
        axis = weights.ndim - 1 if weights.shape[-1] == channels and not is_op(node, "Conv") else 0
        if is_op(node, "Gemm"):
            axis = 0 if node.attributes.get_int("transB", 0) else 1
        sizes = np.sqrt(np.sum(np.moveaxis(weights, axis, 0).reshape(channels, -1) ** 2, axis=1)) * measured.rms(first)
        bias = float_constant(node_input(node, 2))
        sizes = sizes + np.abs(bias).reshape(-1) if bias is not None and bias.size == channels else sizes
    elif is_op(node, "Mul", "Add", "Div"):
        place = next((p for p in (0, 1) if float_constant(node.inputs[p]) is not None), None)
        factors = float_constant(node.inputs[place]) if place is not None else None
        if factors is None or place is None or (is_op(node, "Div") and place == 0):
            return math.inf
        other = measured.rms(node.inputs[1 - place])
        sizes = np.abs(factors).reshape(-1)
        if is_op(node, "Div"):
            sizes = 1 / sizes[sizes > 0]
        sizes = sizes + other if is_op(node, "Add") else sizes
    else:
        return math.inf
    sizes = sizes[(sizes > 0) & np.isfinite(sizes)]
    return (
        float(np.quantile(sizes, _FEW_COLUMNS, method="lower") / sizes.max()) * LEVELS if sizes.size > 1 else math.inf
    )


def _before_layers(model: ir.Model) -> frozenset[ir.Node]:
    """Return the nodes from which some node that multiplies matrices can be reached."""
    found: set[ir.Node] = set()
    for node in reversed(list(model.graph)):
        behind = {reader for output in node.outputs for reader in readers(output)}
        if any(reader in found or operator_of(reader).mac_rule for reader in behind):
            found.add(node)
    return frozenset(found)


def _tail(node: ir.Node, model: ir.Model, before_layers: frozenset[ir.Node]) -> Iterator[str]:
    """Yield the tensors behind a join to the outputs, and those before it that only it and what lies behind it read,
    back to the last layers."""
    inside, waiting = {node}, [node]
    while waiting:
        at = waiting.pop()
        for reader in (reader for output in at.outputs for reader in readers(output)):
            if reader not in inside:
                inside.add(reader)
                waiting.append(reader)
    for at in reversed(list(model.graph)):
        reading = {reader for output in at.outputs for reader in readers(output)}
        if reading and reading <= inside and at not in before_layers and not operator_of(at).mac_rule:
            inside.add(at)
    for at in model.graph:
        if at in inside and not operator_of(at).mac_rule:
            yield from (name_of(output) for output in at.outputs if output.name)


def _is_scored(value: ir.Value) -> bool:
    """Return whether all that reads a tensor maps it to a bounded interval, so that one error counts the same in all
    columns."""
    reading = [reader for tensor in (value, *_moved(value)) for reader in readers(tensor) if not moves_data(reader)]
    return bool(reading) and all(is_op(reader, *_BOUNDED) for reader in reading)


def _moved(value: ir.Value) -> Iterator[ir.Value]:
    """Yield what data movement makes of a tensor."""
    for reader in readers(value):
        if moves_data(reader):
            yield from reader.outputs
            yield from _moved(reader.outputs[0])


def _is_lost(value: ir.Value, measured: Measured) -> bool:
    """Return whether rounding a join makes too much of what the layers behind it give; where something else reads it,
    that is so."""
    for tensor in (value, *_moved(value)):
        noise = spread.noise if (spread := measured.spread(value)) is not None else 0.0
        for reader, place in consumers(tensor):
            weights = float_constant(node_input(reader, 1)) if place == 0 else None
            if moves_data(reader):
                continue
            if not is_op(reader, "Conv", "Gemm", "MatMul") or weights is None or weights.ndim < 2:
                return True
            channels = output_channels(reader, weights.shape[-2:] if is_op(reader, "MatMul") else weights.shape)
            made = noise * math.sqrt(float(np.sum(weights**2)) / channels)
            if made > _MOST_NOISE * measured.rms(reader.outputs[0]):
                return True
    return False
