"""Rules for operators that multiply matrices: convolutions, products and Einsum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import onnx_ir as ir

from edgeq.model.gradients.tape import Gradients, Rule, Shape, Tape, Term, first_of
from edgeq.model.graph import geometry, node_input


def _matmul(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients:
    a, b = node.inputs
    left, right = tape.shape(a), tape.shape(b)
    # A vector is a matrix of one row or column.
    rows = left if len(left) > 1 else (1, *left)
    columns = right if len(right) > 1 else (*right, 1)
    batch = np.broadcast_shapes(rows[:-2], columns[:-2])
    gradient = first_of(gradients)
    square = gradient.reshape((*batch, rows[-2], columns[-1]))

    def swapped(value: ir.Value | None, shape: Shape) -> Term:
        term = tape.read(value) if shape == tape.shape(value) else tape.read(value).reshape(shape)
        return term.transpose([*range(len(shape) - 2), len(shape) - 1, len(shape) - 2])

    parts: list[Term | None] = [None, None]
    if tape.is_variable(a):
        product = square.apply("MatMul", swapped(b, columns))
        parts[0] = product.reduce_to((*batch, *rows[-2:]), rows).reshape(left)
    if tape.is_variable(b):
        product = swapped(a, rows).apply("MatMul", square)
        parts[1] = product.reduce_to((*batch, *columns[-2:]), columns).reshape(right)
    return parts


def _gemm(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients:
    a, b = node.inputs[:2]
    c = node_input(node, 2)
    settings = node.attributes
    flips = settings.get_int("transA", 0), settings.get_int("transB", 0)
    alpha, beta = settings.get_float("alpha", 1.0), settings.get_float("beta", 1.0)
    gradient = first_of(gradients)
    parts: list[Term | None] = [None, None, None]
    if tape.is_variable(a):
        # A = G B' of the operands as they are multiplied; a transposed A gets the transposed product.
        factors = (tape.read(b), gradient) if flips[0] else (gradient, tape.read(b))
        sides = (flips[1], 1) if flips[0] else (0, 1 - flips[1])
        parts[0] = Term.of("Gemm", *factors, alpha=alpha, transA=sides[0], transB=sides[1])
    if tape.is_variable(b):
        factors = (gradient, tape.read(a)) if flips[1] else (tape.read(a), gradient)
        sides = (1, flips[0]) if flips[1] else (1 - flips[0], 0)
        parts[1] = Term.of("Gemm", *factors, alpha=alpha, transA=sides[0], transB=sides[1])
    if tape.is_variable(c):
        parts[2] = (gradient * beta).reduce_to(tape.shape(node.outputs[0]), tape.shape(c))
    return parts[: len(node.inputs)]


def _conv(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients | None:
    image, weight = node.inputs[:2]
    if any(map(tape.is_variable, node.inputs[1:])):
        return None
    gradient = first_of(gradients)
    shape, (outputs, depth, *kernel) = tape.shape(image), tape.shape(weight)
    form = geometry(node, shape[2:], tuple(kernel))
    group, result = form.group, tape.shape(node.outputs[0])
    reach = [(size - 1) * dilation for size, dilation in zip(kernel, form.dilations, strict=True)]
    if group == 1 and prod(form.strides) > 1:
        full = tuple(
            (size - 1) * stride + length + 1
            for size, stride, length in zip(result[2:], form.strides, reach, strict=True)
        )
        transposed = gradient.apply(
            "ConvTranspose", tape.read(weight), strides=list(form.strides), dilations=list(form.dilations)
        )
        return [transposed.fit((*shape[:2], *full), [0, 0, *(begin for begin, _ in form.pads)], shape)]
    # A convolution with the mirrored weight is the same sum. The runtime's convolutions are much faster than its
    # transposed ones, above all with groups.
    spread, start = gradient.spread(result, (1, 1, *form.strides))
    begins = [begin - length for (begin, _), length in zip(form.pads, reach, strict=True)]
    sizes = [size + length for size, length in zip(shape[2:], reach, strict=True)]
    blocks = tape.numbers(weight).reshape(group, outputs // group, depth, *kernel).swapaxes(1, 2)
    mirrored = np.flip(blocks, tuple(range(3, blocks.ndim))).reshape(group * depth, outputs // group, *kernel)
    ends = [size - length + begin for begin, length, size in zip(begins, start[2:], sizes, strict=True)]
    pads = [*(-begin for begin in begins), *ends]
    # The kernel pads for free, but it cannot crop.
    if min(pads) < 0:
        spread, pads = spread.fit(start, [0, 0, *begins], (*result[:2], *sizes)), [0] * len(pads)
    return [spread.apply("Conv", tape.constant(mirrored), dilations=list(form.dilations), group=group, pads=pads)]


def _conv_transpose(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients | None:
    image, weight = node.inputs[:2]
    if any(map(tape.is_variable, node.inputs[1:])):
        return None
    gradient = first_of(gradients)
    shape, kernel = tape.shape(image)[2:], tape.shape(weight)[2:]
    form = geometry(node, shape, kernel)
    auto = node.attributes.get_string("auto_pad", "NOTSET")
    extra = node.attributes.get_ints("output_padding", [0] * len(kernel))
    pads = list(form.pads)
    if "output_shape" in node.attributes or auto.startswith("SAME"):
        results = tape.shape(node.outputs[0])[2:]
        sizes = zip(shape, results, kernel, form.strides, form.dilations, extra, strict=True)
        totals = [s * (n - 1) + e + (k - 1) * d + 1 - size for n, size, k, s, d, e in sizes]
        # If the padding is odd, the names say at which end the extra element is.
        less, more = [total // 2 for total in totals], [total - total // 2 for total in totals]
        pads = list(zip(less, more, strict=True) if auto == "SAME_UPPER" else zip(more, less, strict=True))
    if min(min(pair) for pair in pads) < 0:
        return None
    return [
        gradient.apply(
            "Conv",
            tape.read(weight),
            strides=list(form.strides),
            dilations=list(form.dilations),
            group=form.group,
            pads=[*(begin for begin, _ in pads), *(end for _, end in pads)],
        )
    ]


def _einsum(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients | None:
    equation = node.attributes.get_string("equation", "").replace(" ", "")
    if len(node.inputs) != 2 or "." in equation or "->" not in equation:
        return None
    operands, result = equation.split("->")
    letters = operands.split(",")
    parts: list[Term | None] = []
    for place, value in enumerate(node.inputs):
        if not tape.is_variable(value):
            parts.append(None)
            continue
        term, mate = letters[place], letters[1 - place]
        # A repeated letter is a diagonal, and a letter of this operand alone is summed.
        if len(set(term)) < len(term) or len(set(mate)) < len(mate) or not set(term) <= {*mate, *result}:
            return None
        factors: Sequence[Term | None] = (gradients[0], tape.read(node.inputs[1 - place]))
        parts.append(Term.of("Einsum", *factors, equation=f"{result},{mate}->{term}"))
    return parts


RULES: Mapping[str, Rule] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Einsum": _einsum,
    "Gemm": _gemm,
    "MatMul": _matmul,
}
