"""Write operators that the file does not have as formulas of operators that it has. All of them compute in float."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgeq.backends.litert.layout import Order, model_order
from edgeq.backends.litert.lower import CannotWriteError, Lowering, Stored
from edgeq.backends.litert.network import TfliteTensor
from edgeq.backends.litert.operators.arithmetic import ACTIVATED, broadcast, refuse_large
from edgeq.backends.litert.operators.elements import write_unary
from edgeq.backends.litert.operators.reductions import axes_of, order_after, reduction
from edgeq.backends.litert.operators.windows import NHWC, VALID
from edgeq.model.graph import name_of, node_input


@dataclass(frozen=True)
class Formula:
    """Write the operators of a node's formula. Calling a formula writes one operator and returns its result."""

    work: Lowering
    node: ir.Node

    def __call__(self, kind: str, *inputs: TfliteTensor | float) -> TfliteTensor:
        """Write an operator on float tensors and numbers."""
        # A number gets the rank of the tensors, so that every operator reads tensors of one rank.
        rank = max(len(value.shape) for value in inputs if isinstance(value, TfliteTensor))
        tensors = [value if isinstance(value, TfliteTensor) else self._number(value, rank) for value in inputs]
        shape = np.broadcast_shapes(*(tensor.shape for tensor in tensors))
        result = self.work.partial(f"{self.node.outputs[0].name}/{kind.lower()}", shape)
        return self.work.emit(kind, tensors, result, ACTIVATED.get(kind))

    def over(
        self, kind: str, source: Stored, axes: Sequence[int], tensor: TfliteTensor, *, keeps: bool = True
    ) -> TfliteTensor:
        """Write a reduction of `tensor`, whose axes are those of `source`."""
        places = [place for place, axis in enumerate(source.order) if axis not in axes]
        shape = [tensor.shape[place] if place in places else 1 for place in range(len(tensor.shape))]
        shape = shape if keeps else [tensor.shape[place] for place in places]
        result = self.work.partial(f"{self.node.outputs[0].name}/{kind.lower()}", shape)
        return self.work.emit(kind, (tensor, axes_of(self.work, source, axes)), result, {"keepDims": keeps})

    def hold(self, result: TfliteTensor, order: Order) -> None:
        """Use `result` as the node's output."""
        output = self.node.outputs[0]
        self.work.hold(output, Stored(result, order, self.work.sizes(output)))

    def number(self, attribute: str, otherwise: float) -> float:
        """Return a number among the node's attributes."""
        return self.node.attributes.get_float(attribute, otherwise)

    def _number(self, value: float, rank: int) -> TfliteTensor:
        return self.work.fixed("number", np.full((1,) * rank, value, np.float32))


def softplus(f: Formula, x: TfliteTensor) -> TfliteTensor:
    """Write log(1 + exp(x)), without an overflow for large x."""
    return f("ADD", f("RELU", x), f("LOG", f("ADD", f("EXP", f("NEG", f("ABS", x))), 1.0)))


def _mish(f: Formula, x: TfliteTensor) -> TfliteTensor:
    return f("MUL", x, f("TANH", softplus(f, x)))


def _softsign(f: Formula, x: TfliteTensor) -> TfliteTensor:
    return f("DIV", x, f("ADD", f("ABS", x), 1.0))


def _swish(f: Formula, x: TfliteTensor) -> TfliteTensor:
    alpha = f.number("alpha", 1.0)
    return f("MUL", x, f("LOGISTIC", x if alpha == 1 else f("MUL", x, alpha)))


def _bent(f: Formula, x: TfliteTensor, outer: float, inner: float) -> TfliteTensor:
    """Write max(x, 0) + outer * (exp(min(x, 0) / inner) - 1)."""
    low = f("MINIMUM", x, 0.0)
    low = low if inner == 1 else f("DIV", low, inner)
    return f("ADD", f("RELU", x), f("MUL", f("SUB", f("EXP", low), 1.0), outer))


def _celu(f: Formula, x: TfliteTensor) -> TfliteTensor:
    alpha = f.number("alpha", 1.0)
    return _bent(f, x, alpha, alpha)


def _selu(f: Formula, x: TfliteTensor) -> TfliteTensor:
    alpha, gamma = f.number("alpha", 1.67326319217681884765625), f.number("gamma", 1.05070102214813232421875)
    return f("MUL", _bent(f, x, alpha, 1.0), gamma)


def _reciprocal(f: Formula, x: TfliteTensor) -> TfliteTensor:
    return f("DIV", 1.0, x)


def _is_nan(f: Formula, x: TfliteTensor) -> TfliteTensor:
    # Only a NaN differs from itself.
    result = f.work.partial(f"{f.node.outputs[0].name}/nan", x.shape, None, "bool")
    return f.work.emit("NOT_EQUAL", (x, x), result)


# Smallest divisor: 0 divided by it is 0.
_LEAST = float(np.finfo(np.float32).tiny)
# Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26; the error is at most 1.5e-7.
_ERF_P = 0.3275911
_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def _erf(f: Formula, x: TfliteTensor) -> TfliteTensor:
    """Write sign(x) (1 - (a1 t + … + a5 t^5) exp(-x²)) with t = 1 / (1 + p |x|)."""
    size = f("ABS", x)
    sign = f("DIV", x, f("MAXIMUM", size, _LEAST))  # TFLite Micro has no kernel for SIGN.
    t = f("DIV", 1.0, f("ADD", f("MUL", size, _ERF_P), 1.0))
    total = f("MUL", t, _ERF[0])
    for factor in _ERF[1:]:
        total = f("MUL", f("ADD", total, factor), t)
    return f("MUL", sign, f("SUB", 1.0, f("MUL", total, f("EXP", f("NEG", f("MUL", x, x))))))


FORMULAS: dict[str, Callable[[Formula, TfliteTensor], TfliteTensor]] = {
    "Celu": _celu,
    "Erf": _erf,
    "IsNaN": _is_nan,
    "Mish": _mish,
    "Reciprocal": _reciprocal,
    "Selu": _selu,
    "Softplus": softplus,
    "Softsign": _softsign,
    "Swish": _swish,
}
"""The formulas of operators on one tensor."""


def write_formula(work: Lowering, node: ir.Node) -> None:
    """Write an operator of `FORMULAS`."""
    source = _floats(work, node)
    f = Formula(work, node)
    f.hold(FORMULAS[node.op_type](f, source.tensor), source.order)


def write_elu(work: Lowering, node: ir.Node) -> None:
    """Write ELU. Its kernels have an alpha of 1, so another alpha becomes a formula."""
    alpha = node.attributes.get_float("alpha", 1.0)
    if alpha == 1:
        write_unary("ELU")(work, node)
        return
    source, f = _floats(work, node), Formula(work, node)
    f.hold(_bent(f, source.tensor, alpha, 1.0), source.order)


def write_pow(work: Lowering, node: ir.Node) -> None:
    """Write POW, or a MUL or SQRT if these compute the same."""
    _refuse_integers(work)
    (base, power), order = broadcast(work, node)
    f, exponent = Formula(work, node), power.tensor
    if exponent.values is not None:
        # The kernels take base and exponent of one type.
        numbers = exponent.values.astype(np.dtype(base.tensor.type))
        is_scalar = numbers.size == 1 and base.shape == work.sizes(node.outputs[0]) and base.tensor.type == "float32"
        # Squares and roots, as in normalizations, need no POW.
        if is_scalar and float(numbers.reshape(())) == 2:
            f.hold(_square(f, base.tensor), order)
            return
        if is_scalar and float(numbers.reshape(())) == 0.5:
            f.hold(f("SQRT", base.tensor), order)
            return
        exponent = work.fixed(name_of(node.inputs[1]), numbers)
    if base.tensor.type != exponent.type:
        raise CannotWriteError(f"its exponent is computed and of type {exponent.type}")
    work.write(node, "POW", (base.tensor, exponent), order)


def _square(f: Formula, x: TfliteTensor) -> TfliteTensor:
    return f("MUL", x, x)


_INNER: dict[str, Callable[[Formula, TfliteTensor], TfliteTensor]] = {
    "ReduceL1": lambda f, x: f("ABS", x),
    "ReduceL2": _square,
    "ReduceSumSquare": _square,
    "ReduceLogSum": lambda f, x: x,
}
_OUTER = {"ReduceL2": "SQRT", "ReduceLogSum": "LOG"}


def write_sum_of(work: Lowering, node: ir.Node) -> None:
    """Write a reduction that sums a function of the elements, such as ReduceL2."""
    _refuse_integers(work)
    source, axes, keeps = reduction(work, node)
    f = Formula(work, node)
    result = _INNER[node.op_type](f, source.tensor)
    if axes:
        result = f.over("SUM", source, axes, result, keeps=keeps)
    if node.op_type in _OUTER:
        result = f(_OUTER[node.op_type], result)
    f.hold(result, order_after(source.order, axes, keeps=keeps))


def write_log_sum_exp(work: Lowering, node: ir.Node) -> None:
    """Write m + log(sum(exp(x - m))), where m is the largest x."""
    _refuse_integers(work)
    source, axes, keeps = reduction(work, node)
    f = Formula(work, node)
    if not axes:
        f.hold(source.tensor, source.order)
        return
    # Without the largest x, exp would overflow for x above 88.
    largest = f.over("REDUCE_MAX", source, axes, source.tensor)
    total = f.over("SUM", source, axes, f("EXP", f("SUB", source.tensor, largest)))
    result, order = f("ADD", largest, f("LOG", total)), source.order
    if keeps:
        f.hold(result, order)
        return
    shape = tuple(1 if axis in axes else size for axis, size in enumerate(source.shape))
    output = node.outputs[0]
    work.hold(output, work.as_shape(Stored(result, order, shape), work.sizes(output), name_of(output)))


def write_lp_norm(work: Lowering, node: ir.Node) -> None:
    """Write x / |x|, where |x| is the sum of magnitudes or the root of the sum of squares along an axis."""
    source, f = _floats(work, node), Formula(work, node)
    axes, p = [node.attributes.get_int("axis", -1) % len(source.shape)], node.attributes.get_int("p", 2)
    parts = f("ABS", source.tensor) if p == 1 else _square(f, source.tensor)
    length = f.over("SUM", source, axes, parts)
    length = length if p == 1 else f("SQRT", length)
    # ONNX gives 0 for a vector of zeros, and 0 / 0 would be NaN.
    f.hold(f("DIV", source.tensor, f("MAXIMUM", length, _LEAST)), source.order)


def write_mean_of(work: Lowering, node: ir.Node) -> None:
    """Write the mean of broadcast tensors."""
    _refuse_integers(work)
    sides, order = broadcast(work, node)
    f, total = Formula(work, node), sides[0].tensor
    for side in sides[1:]:
        total = f("ADD", total, side.tensor)
    f.hold(f("MUL", total, 1 / len(sides)), order)


def write_norm(work: Lowering, node: ir.Node) -> None:
    """Write a LayerNormalization or InstanceNormalization: (x - mean) / sqrt(variance + epsilon), times its scale, plus
    its bias.
    """
    if any(value.uses() for value in node.outputs[1:]):
        raise CannotWriteError("its second or third output is read")
    source, f = _floats(work, node), Formula(work, node)
    rank = len(source.shape)
    factor, shift = node.inputs[1], node_input(node, 2)
    if node.op_type == "LayerNormalization":
        # LayerNormalization covers all axes from `axis` on, and its scale has their shape in the model's order.
        source = work.arranged(source, model_order(rank))
        axes = list(range(node.attributes.get_int("axis", -1) % rank, rank))
        wide = [work.floats(v) if v is not None else np.zeros(1, np.float32) for v in (factor, shift)]
    else:
        axes, column = list(range(2, rank)), [-1 if axis == 1 else 1 for axis in source.order]
        wide = [work.floats(v).reshape(column) for v in (factor, shift)]
    # The variance of the centred values is more exact than the mean of squares minus the square of the mean.
    centred = f("SUB", source.tensor, f.over("MEAN", source, axes, source.tensor))
    variance = f.over("MEAN", source, axes, _square(f, centred))
    scaled = f("MUL", centred, f("RSQRT", f("ADD", variance, f.number("epsilon", 1e-5))))
    for kind, numbers in zip(("MUL", "ADD"), wide, strict=True):
        raised = numbers.reshape((1,) * (rank - numbers.ndim) + numbers.shape)
        scaled = f(kind, scaled, work.fixed(f"{name_of(node.outputs[0])}/{kind.lower()}", raised))
    f.hold(scaled, source.order)


def write_lrn(work: Lowering, node: ir.Node) -> None:
    """Write x / (bias + alpha / size * the sum of squares over the nearest `size` channels) ^ beta.

    The sum is a CONV_2D with a band of ones. LOCAL_RESPONSE_NORMALIZATION has no kernel in TFLite Micro, and the
    portable kernels of LiteRT leave the last channel of each window out.
    """
    source, size = _floats(work, node), node.attributes.get_int("size", 1)
    rank, channels = len(source.shape), source.shape[1]
    if rank != 4:
        raise CannotWriteError(f"its input has {rank} axes")
    refuse_large((channels, channels))
    source, f = work.arranged(source, NHWC), Formula(work, node)
    # ONNX's window has one more channel behind the centre than in front of it if `size` is even.
    below, above = (size - 1) // 2, size // 2
    neighbours = np.tril(np.triu(np.ones((channels, channels), np.float32), -below), above)
    band = work.fixed(f"{node.name}/band", neighbours.reshape(channels, 1, 1, channels))
    bias = work.fixed(f"{node.name}/bias", np.zeros(channels, np.float32))
    total = work.partial(f"{node.outputs[0].name}/total", source.tensor.shape)
    ones = {"strideH": 1, "strideW": 1, "dilationHFactor": 1, "dilationWFactor": 1}
    work.emit("CONV_2D", (_square(f, source.tensor), band, bias), total, {"padding": VALID, **ones})
    scaled = f("ADD", f("MUL", total, f.number("alpha", 1e-4) / size), f.number("bias", 1.0))
    # x^-beta. The base is positive, because `bias` is.
    power = f("EXP", f("MUL", f("LOG", scaled), -f.number("beta", 0.75)))
    f.hold(f("MUL", source.tensor, power), source.order)


def _floats(work: Lowering, node: ir.Node) -> Stored:
    """Return a node's first input as floats."""
    _refuse_integers(work)
    source = work.activation(node.inputs[0])
    return work.in_order(source)


def _refuse_integers(work: Lowering) -> None:
    if work.integer:
        raise CannotWriteError("it has no int8 kernel")
