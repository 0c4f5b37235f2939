"""Write operators of two tensors, and powers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgeq.backends.ncnn.dialect import dialect
from edgeq.backends.ncnn.lower import NcnnLowering, NotInNcnnError, dims_of
from edgeq.backends.ncnn.network import Blob, Setting
from edgeq.model.graph import is_op, name_of

# The largest exponent that is written as products.
_MOST_FACTORS = 8


def write_pow(work: NcnnLowering, node: ir.Node) -> None:
    """Write the layers of a power with a constant exponent. ncnn's own power has no result for negative numbers."""
    exponents = work.floats(node.inputs[1]) if work.is_constant(node.inputs[1]) else np.zeros(0, np.float32)
    if exponents.size == 0 or len(set(exponents.ravel().tolist())) > 1:
        raise NotInNcnnError("its exponents are computed, or differ")
    exponent, source = float(exponents.ravel()[0]), work.blob(node.inputs[0])
    if exponent == 1:
        work.hold(node.outputs[0], source)
        return
    code = dialect().powers.get(f"{exponent:g}")
    if code is not None:
        work.hold(node.outputs[0], work.emit("UnaryOp", (source,), source.dims, {0: code}))
        return
    if exponent != int(exponent) or not 1 < exponent <= _MOST_FACTORS:
        raise NotInNcnnError(f"its exponent is {exponent:g}")
    product = source
    for _ in range(int(exponent) - 1):
        product = work.emit("BinaryOp", (product, source), source.dims, {0: dialect().binary["Mul"]})
    work.hold(node.outputs[0], product)


def write_binary(work: NcnnLowering, node: ir.Node) -> None:
    """Write BinaryOp of two tensors, or of a tensor and a number."""
    values = [value for value in node.inputs if value is not None]
    if len(values) == 1:
        work.hold(node.outputs[0], work.blob(values[0]))
        return
    left = values[0]
    # Max, Min and Sum take any number of tensors; the file's operation takes two.
    blob = _binary(work, node, left, values[1], None)
    for value in values[2:]:
        blob = _binary(work, node, None, value, blob)
    work.hold(node.outputs[0], blob)


def _binary(work: NcnnLowering, node: ir.Node, left: ir.Value | None, right: ir.Value, done: Blob | None) -> Blob:
    kind = "Add" if is_op(node, "Sum") else node.op_type
    code = dialect().binary[kind]
    for value, other, table in ((right, left, dialect().binary), (left, right, dialect().reversed)):
        if value is None or not work.is_constant(value) or (other is not None and work.is_constant(other)):
            continue
        number = work.floats(value)
        if number.size == 1:
            source = done or work.blob(other)
            settings: dict[int, Setting] = {0: table.get(kind, code), 1: 1, 2: float(number.reshape(()))}
            return work.emit("BinaryOp", (source,), source.dims, settings)
    dims = dims_of(work.shape(node.outputs[0]))
    blobs = [done] if done is not None else [_broadcastable(work, left, len(dims))]
    blobs.append(_broadcastable(work, right, len(dims)))
    # Two results of global pooling need no other axes.
    if len({blob.dims for blob in (work.blob(v) for v in (left, right) if v is not None)}) == 1 and done is None:
        blobs = [work.blob(left), work.blob(right)]
        dims = blobs[0].dims
    return work.emit("BinaryOp", blobs, dims, {0: code})


def _broadcastable(work: NcnnLowering, value: ir.Value | None, rank: int) -> Blob:
    """Return a blob with `rank` axes, whose last axes are those of the tensor, as ONNX's rule for broadcasting says."""
    shape = work.shape(value)
    trimmed = shape[max(len(shape) - rank, 0) :]
    if any(size != 1 for size in shape[: len(shape) - len(trimmed)]):
        raise NotInNcnnError(f"{name_of(value)!r} has more axes than the result")
    return work.shaped(work.blob(value), (*[1] * (rank - len(trimmed)), *trimmed))
