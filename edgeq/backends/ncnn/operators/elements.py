"""Write operators that compute each element for itself, and Softmax."""

from __future__ import annotations

import onnx_ir as ir

from edgeq.backends.ncnn.dialect import dialect
from edgeq.backends.ncnn.lower import NcnnLowering, NotInNcnnError
from edgeq.backends.ncnn.network import Setting
from edgeq.backends.ncnn.operators.activations import clip_numbers, hard_numbers
from edgeq.model.graph import is_op


def write_element(work: NcnnLowering, node: ir.Node) -> None:
    """Write a layer without parameters. A Sigmoid whose only reader multiplies it by its input becomes a Swish."""
    source, output = work.blob(node.inputs[0]), node.outputs[0]
    if is_op(node, "Sigmoid"):
        product = work.sole_reader(output)
        if product is not None and is_op(product, "Mul") and node.inputs[0] in product.inputs:
            work.hold(work.merge(product), work.emit("Swish", (source,), source.dims))
            return
    work.hold(output, work.emit(dialect().elements[node.op_type], (source,), source.dims))


def write_unary(work: NcnnLowering, node: ir.Node) -> None:
    """Write UnaryOp."""
    source = work.blob(node.inputs[0])
    work.hold(node.outputs[0], work.emit("UnaryOp", (source,), source.dims, {0: dialect().unary[node.op_type]}))


def write_clip(work: NcnnLowering, node: ir.Node) -> None:
    """Write Clip."""
    numbers = clip_numbers(node)
    if numbers is None:
        raise NotInNcnnError("its bounds are computed")
    _one_to_one(work, node, "Clip", dict(enumerate(numbers)))


def write_leaky_relu(work: NcnnLowering, node: ir.Node) -> None:
    """Write ReLU with a slope."""
    _one_to_one(work, node, "ReLU", {0: node.attributes.get_float("alpha", 0.01)})


def write_elu(work: NcnnLowering, node: ir.Node) -> None:
    """Write ELU."""
    _one_to_one(work, node, "ELU", {0: node.attributes.get_float("alpha", 1.0)})


def write_hard(work: NcnnLowering, node: ir.Node) -> None:
    """Write HardSigmoid or HardSwish."""
    _one_to_one(work, node, node.op_type, dict(enumerate(hard_numbers(node))))


def write_gelu(work: NcnnLowering, node: ir.Node) -> None:
    """Write GELU, exact or with tanh."""
    _one_to_one(work, node, "GELU", {0: int(node.attributes.get_string("approximate", "none") == "tanh")})


def write_prelu(work: NcnnLowering, node: ir.Node) -> None:
    """Write PReLU, with one slope or one for each channel."""
    source, slopes = work.image(node.inputs[0]), work.floats(node.inputs[1])
    shape = work.shape(node.inputs[0])
    channels = source.dims[0]
    per_channel = slopes.size == channels and slopes.shape[0] == channels and slopes.ndim == len(shape) - 1
    if slopes.size != 1 and not per_channel:
        raise NotInNcnnError("its slopes are not one for each channel")
    made = work.emit("PReLU", (source,), source.dims, {0: slopes.size}, vectors=(slopes.ravel(),))
    work.hold(node.outputs[0], made)


def write_softmax(work: NcnnLowering, node: ir.Node) -> None:
    """Write Softmax over one axis."""
    source = work.image(node.inputs[0])
    axis = work.axis(node.inputs[0], node.attributes.get_int("axis", -1))
    work.hold(node.outputs[0], work.emit("Softmax", (source,), source.dims, {0: axis, 1: 1}))


def _one_to_one(work: NcnnLowering, node: ir.Node, kind: str, settings: dict[int, Setting]) -> None:
    source = work.blob(node.inputs[0])
    work.hold(node.outputs[0], work.emit(kind, (source,), source.dims, settings))
