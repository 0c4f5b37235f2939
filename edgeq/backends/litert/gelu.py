"""Find each group of operators from which an exporter built a Gelu, and replace the group with one Gelu.

A Gelu is x / 2 (1 + erf(x / sqrt 2)). A .tflite file has no Erf operator.
"""

from __future__ import annotations

import math

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from edgeq.model.edit import replace_value
from edgeq.model.graph import constant, is_op, name_of, only_reader

# Exporters round 1/√2 to float32 or to a few digits. A factor that is really another number differs by more.
_TOLERANCE = 1e-4


def join_gelu(model: ir.Model) -> int:
    """Replace every group of operators that computes a Gelu with one Gelu, in place, whatever the model's opset is.

    Returns:
        The number of groups that were replaced.
    """
    count = 0
    for node in list(model.graph):
        source = _scaled_by(node.inputs[0], 1 / math.sqrt(2)) if is_op(node, "Erf") else None
        result = _result(node, source) if source is not None else None
        if source is None or result is None:
            continue
        gelu = ir.node("Gelu", [source], name=result.name)
        # An ONNX model of an old opset has no Gelu, but this graph is only read by the lowering.
        model.graph.insert_before(result, gelu)
        gelu.outputs[0].type, gelu.outputs[0].shape = result.outputs[0].type, result.outputs[0].shape
        replace_value(result.outputs[0], gelu.outputs[0], keep_name=True)
        model.graph.remove(result, safe=True)
        count += 1
    # The parts stay behind without readers. They would be lowered like other nodes.
    if count:
        RemoveUnusedNodesPass()(model)
    return count


def parts_of_gelu(model: ir.Model) -> frozenset[str]:
    """Return the names of all nodes in groups of operators that compute a Gelu."""
    joined = model.clone()
    join_gelu(joined)
    survivors = {node.name for node in joined.graph if not is_op(node, "Gelu")}
    return frozenset(str(node.name) for node in model.graph if node.name not in survivors)


def _result(erf: ir.Node, source: ir.Value) -> ir.Node | None:
    """Return the node whose output is the Gelu of `source`, or None if other operators follow `erf`."""
    added = only_reader(erf.outputs[0])
    if added is None or not is_op(added, "Add") or not any(_is_number(value, 1.0) for value in added.inputs):
        return None
    product = only_reader(added.outputs[0])
    if product is None or not is_op(product, "Mul"):
        return None
    # Exporters write x (1 + erf) / 2 in two orders: the half belongs to x, or it comes last.
    factor = next(value for value in product.inputs if value is not added.outputs[0])
    if factor is not source:
        return product if _scaled_by(factor, 0.5) is source else None
    half = only_reader(product.outputs[0])
    return half if half is not None and _scaled_by(half.outputs[0], 0.5) is product.outputs[0] else None


def _scaled_by(value: ir.Value | None, factor: float) -> ir.Value | None:
    """Return the tensor that a Mul by `factor` or a Div by its inverse turns into `value`, or None if no such node
    makes `value`.
    """
    maker = value.producer() if value is not None else None
    if is_op(maker, "Div") and maker is not None and _is_number(maker.inputs[1], 1 / factor):
        return maker.inputs[0]
    if is_op(maker, "Mul") and maker is not None:
        for place in (0, 1):
            if _is_number(maker.inputs[place], factor):
                return maker.inputs[1 - place]
    return None


def _is_number(value: ir.Value | None, number: float) -> bool:
    constant_value = constant(value) if name_of(value) else None
    return (
        constant_value is not None
        and constant_value.size == 1
        and abs(float(constant_value.reshape(())) - number) < _TOLERANCE * abs(number)
    )
