"""Rules for operators that sum over axes: means, maxima, pools, Softmax and normalizations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import numpy as np
import onnx_ir as ir

from edgeq.model.gradients.tape import Gradients, Rule, Tape, Term, first_of
from edgeq.model.graph import geometry, node_input


def _reduction(share: Callable[[Term, Term, Term, int], Term]) -> Rule:
    """Return a rule for a reduction. `share` returns the gradient of the input from the gradient and the result, both
    with the reduced axes, from the input, and from the number of reduced elements.
    """

    def rule(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients:
        shape, axes_input = tape.shape(node.inputs[0]), node_input(node, 1)
        listed = node.attributes.get_ints("axes", []) if axes_input is None else tape.numbers(axes_input).reshape(-1)
        axes = {int(axis) % len(shape) for axis in listed}
        if not axes:
            if node.attributes.get_int("noop_with_empty_axes", 0):
                return [gradients[0]]
            axes = set(range(len(shape)))
        return [_shared(tape, node, gradients, axes, share)]

    return rule


def _global(share: Callable[[Term, Term, Term, int], Term]) -> Rule:
    """Return a rule for a pool over all spatial axes."""

    def rule(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients:
        return [_shared(tape, node, gradients, set(range(2, len(tape.shape(node.inputs[0])))), share)]

    return rule


def _shared(
    tape: Tape, node: ir.Node, gradients: Gradients, axes: set[int], share: Callable[[Term, Term, Term, int], Term]
) -> Term:
    shape = tape.shape(node.inputs[0])
    reduced = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    result = tape.read(node.outputs[0]).reshape(reduced)
    gradient, count = first_of(gradients).reshape(reduced), prod(shape[axis] for axis in axes)
    return share(gradient, result, tape.read(node.inputs[0]), count).expand(shape)


def _mean(gradient: Term, result: Term, x: Term, count: int) -> Term:
    return gradient * (1 / max(1, count))


def _total(gradient: Term, result: Term, x: Term, count: int) -> Term:
    return gradient


def _extreme(gradient: Term, result: Term, x: Term, count: int) -> Term:
    return x.apply("Equal", result).choose(gradient, 0.0)


def _norm(gradient: Term, result: Term, x: Term, count: int) -> Term:
    return gradient * (x / result).finite()


def _squares(gradient: Term, result: Term, x: Term, count: int) -> Term:
    return gradient * x * 2


def _average_pool(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients:
    shape, start = tape.shape(node.inputs[0]), tape.shape(node.outputs[0])
    form = geometry(node, shape[2:], tuple(node.attributes.get_ints("kernel_shape", [])))
    padded = bool(node.attributes.get_int("count_include_pad", 0))
    gradient, current = first_of(gradients), start
    # An average over a window is an average along each axis in turn, and so is its divisor.
    axes = zip(form.kernel, form.strides, form.dilations, form.pads, strict=True)
    for axis, (taps, stride, dilation, (begin, end)) in enumerate(axes, 2):
        size = shape[axis]
        matrix = np.zeros((start[axis], size), np.float32)
        for place, row in enumerate(matrix):
            window = place * stride - begin + dilation * np.arange(taps)
            inside = window[(window >= 0) & (window < size)]
            counted = window[(window >= -begin) & (window < size + end)] if padded else inside
            row[inside] = 1 / max(1, len(counted))
        gradient = gradient.along(current, axis, matrix)
        current = (*current[:axis], size, *current[axis + 1 :])
    return [gradient]


def _max_pool(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients | None:
    if len([output for output in node.outputs if output.name]) > 1:
        return None
    shape, start = tape.shape(node.inputs[0]), tape.shape(node.outputs[0])
    settings = {name: attribute for name, attribute in node.attributes.items() if name != "storage_order"}
    values = {name: attribute.value for name, attribute in settings.items()}
    _, places = tape.nodes("MaxPool", [tape.read(node.inputs[0])], 2, **values)
    flat = tape.zeros((prod(shape),)).apply(
        "ScatterElements",
        places.reshape((prod(start),)),
        first_of(gradients).reshape((prod(start),)),
        axis=0,
        reduction="add",
    )
    return [flat.reshape(shape)]


def _softmax(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients:
    axis, y = node.attributes.get_int("axis", -1), tape.read(node.outputs[0])
    gradient = first_of(gradients)
    return [y * (gradient - (gradient * y).sum([axis]))]


def _log_softmax(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients:
    axis, y = node.attributes.get_int("axis", -1), tape.read(node.outputs[0])
    gradient = first_of(gradients)
    return [gradient - y.apply("Exp") * gradient.sum([axis])]


def _normalized(gradient: Term, x: Term, axes: Sequence[int], epsilon: float) -> Term:
    """Return the gradient of (x - mean) / sqrt(variance + epsilon), both over `axes`."""

    def mean(term: Term) -> Term:
        return term.apply("ReduceMean", axes=list(axes), keepdims=1)

    centred = x - mean(x)
    inverse = 1 / (mean(centred * centred) + epsilon).apply("Sqrt")
    unit = centred * inverse
    return inverse * (gradient - mean(gradient) - unit * mean(gradient * unit))


def _layer_norm(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients | None:
    if any(map(tape.is_variable, node.inputs[1:])) or any(gradients[1:]):
        return None
    rank = len(tape.shape(node.inputs[0]))
    axes = range(node.attributes.get_int("axis", -1) % rank, rank)
    scaled = first_of(gradients) * tape.read(node.inputs[1])
    return [_normalized(scaled, tape.read(node.inputs[0]), axes, node.attributes.get_float("epsilon", 1e-5))]


def _per_channel(tape: Tape, node: ir.Node, place: int) -> Term:
    """Return the vector of channels at an input in a shape that broadcasts to the first input."""
    shape = tape.shape(node.inputs[0])
    return tape.read(node.inputs[place]).reshape((shape[1], *[1] * (len(shape) - 2)))


def _instance_norm(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients | None:
    if any(map(tape.is_variable, node.inputs[1:])):
        return None
    axes = range(2, len(tape.shape(node.inputs[0])))
    scaled = first_of(gradients) * _per_channel(tape, node, 1)
    return [_normalized(scaled, tape.read(node.inputs[0]), axes, node.attributes.get_float("epsilon", 1e-5))]


def _batch_norm(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients | None:
    training = node.attributes.get_int("training_mode", 0)
    if training or any(map(tape.is_variable, node.inputs[1:])):
        return None
    variance = _per_channel(tape, node, 4) + node.attributes.get_float("epsilon", 1e-5)
    return [first_of(gradients) * (_per_channel(tape, node, 1) / variance.apply("Sqrt"))]


RULES: Mapping[str, Rule] = {
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "GlobalAveragePool": _global(_mean),
    "GlobalMaxPool": _global(_extreme),
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
    "LogSoftmax": _log_softmax,
    "MaxPool": _max_pool,
    "ReduceL2": _reduction(_norm),
    "ReduceMax": _reduction(_extreme),
    "ReduceMean": _reduction(_mean),
    "ReduceMin": _reduction(_extreme),
    "ReduceSum": _reduction(_total),
    "ReduceSumSquare": _reduction(_squares),
    "Softmax": _softmax,
}
