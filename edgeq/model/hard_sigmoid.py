"""Replace hard sigmoids that consist of several nodes by one operator:

    HardSigmoid(x) = max(0, min(1, alpha x + beta)) = Clip(x + b, 0, m) / m        alpha = 1 / m, beta = b / m

A hard swish is x HardSigmoid(x). Exporters write its division after the product: x Clip(x + 3, 0, 6) / 6. If the steps
stay separate nodes, each is quantized separately, which takes time and rounds to 8 bits again.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from edgeq.model.edit import Editor, replace_value, rewrite_nodes
from edgeq.model.graph import (
    clamp_bounds,
    constant_tensor,
    is_op,
    only_reader,
)

# Relative tolerance for m. Exporters store m as 6, or its reciprocal as 1 / 6 in float32.
_TOLERANCE = 1e-6


def write_hard_sigmoids(model: ir.Model) -> int:
    """Convert every Clip(x + b, 0, m) that is followed by a Div by m or a Mul by 1 / m to a HardSigmoid, in place. A
    product may be in between. Results stay the same to float32's accuracy.

    Returns:
        The number of hard sigmoids that were replaced.
    """
    return rewrite_nodes(model, _write_hard_sigmoid, "Clip")


def _write_hard_sigmoid(clip: ir.Node, editor: Editor) -> bool:
    low, high = clamp_bounds(clip) or (math.nan, math.nan)
    sum_of = clip.inputs[0]
    added = sum_of.producer() if sum_of is not None else None
    if added is None or sum_of is None or not is_op(added, "Add") or low != 0 or not 0 < high < math.inf:
        return False
    operand, offset = _with_number(added)
    reader = only_reader(clip.outputs[0])
    if operand is None or only_reader(sum_of) is not clip or reader is None:
        return False
    divided, product = reader, None
    if is_op(reader, "Mul") and _with_number(reader)[0] is None:
        product, next_reader = reader, only_reader(reader.outputs[0])
        if next_reader is None:
            return False
        divided = next_reader
    if not math.isclose(_factor(divided), 1 / high, rel_tol=_TOLERANCE):
        return False
    attributes = {"alpha": 1 / high, "beta": offset / high}
    result = clip.outputs[0]
    gate = editor.node(
        "HardSigmoid", [operand], f"{clip.name}/hard_sigmoid", before=clip, like=result, attributes=attributes
    )
    if product is not None:
        product.replace_input_with(list(product.inputs).index(result), gate)
    replace_value(divided.outputs[0], gate if product is None else product.outputs[0], keep_name=True)
    editor.graph.remove([divided, clip, added], safe=True)
    return True


def _with_number(node: ir.Node) -> tuple[ir.Value | None, float]:
    """For a node with a float32 scalar, return the other operand and the scalar. The operand is None if neither input
    is a float32 scalar. Other types do not count, because onnxruntime has HardSigmoid only in float32.
    """
    for place in (0, 1):
        tensor = constant_tensor(node.inputs[place])
        if tensor is not None and tensor.dtype == ir.DataType.FLOAT and tensor.size == 1 and len(tensor.shape) <= 1:
            return node.inputs[1 - place], float(tensor.numpy().reshape(()))
    return None, 0.0


def _factor(node: ir.Node) -> float:
    """Return the factor of a Mul or Div by a scalar; NaN for other nodes."""
    operand, number = _with_number(node)
    if operand is None or not number:
        return math.nan
    if is_op(node, "Mul"):
        return number
    return 1 / number if is_op(node, "Div") and node.inputs[0] is operand else math.nan
