"""Hard sigmoids that exporters write out, written as the one operator that they are.

HardSigmoid(x) = max(0, min(1, alpha x + beta)) (ONNX) = Clip(x + b, 0, m) / m with alpha = 1 / m and beta = b / m. A
hard swish is x HardSigmoid(x), whose division exporters put behind the product: x Clip(x + 3, 0, 6) / 6. Written out,
each step is quantized by itself, which takes time and rounds to 8 bits again.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from edgeq.graph.edit import Editor, replace_value, rewrite_nodes
from edgeq.graph.query import clamp_bounds, constant_tensor, is_op, only_reader

# Of m, which exporters store as 6, or as 1 / 6 in float32.
_SAME = 1e-6


def write_hard_sigmoids(model: ir.Model) -> int:
    """Rewrite every Clip(x + b, 0, m) that a Div by m, or a Mul by 1 / m, follows, at once or behind a product, in
    place. Results stay the same to float32's accuracy.

    Returns:
        How many were rewritten.
    """
    return rewrite_nodes(model, _write, "Clip")


def _write(clip: ir.Node, editor: Editor) -> bool:
    least, most = clamp_bounds(clip) or (math.nan, math.nan)
    sum_of = clip.inputs[0]
    added = sum_of.producer() if sum_of is not None else None
    if added is None or sum_of is None or not is_op(added, "Add") or least != 0 or not 0 < most < math.inf:
        return False
    operand, offset = _with_number(added)
    reader = only_reader(clip.outputs[0])
    if operand is None or only_reader(sum_of) is not clip or reader is None:
        return False
    divided, product = reader, None
    if is_op(reader, "Mul") and _with_number(reader)[0] is None:
        product, after = reader, only_reader(reader.outputs[0])
        if after is None:
            return False
        divided = after
    if not math.isclose(_factor(divided), 1 / most, rel_tol=_SAME):
        return False
    attributes = {"alpha": 1 / most, "beta": offset / most}
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
    """The other operand of a node with one float32, and that number; None where both are computed, or it is no such
    number: onnxruntime has a HardSigmoid of float32 alone."""
    for place in (0, 1):
        tensor = constant_tensor(node.inputs[place])
        if tensor is not None and tensor.dtype == ir.DataType.FLOAT and tensor.size == 1 and len(tensor.shape) <= 1:
            return node.inputs[1 - place], float(tensor.numpy().reshape(()))
    return None, 0.0


def _factor(node: ir.Node) -> float:
    """What a Mul or Div by one number multiplies by; NaN for other nodes."""
    operand, number = _with_number(node)
    if operand is None or not number:
        return math.nan
    if is_op(node, "Mul"):
        return number
    return 1 / number if is_op(node, "Div") and node.inputs[0] is operand else math.nan
