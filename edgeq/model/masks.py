"""Masks of attention: what stands in front of a Softmax with numbers far below any score. A range that reaches that far
leaves the scores a single integer.

They are found by the graph alone, because calibration samples may be without a masked place. What statistics show
elsewhere is `edgeq.calibrate.hazards`'.
"""

from __future__ import annotations

import onnx_ir as ir

from edgeq.graph.query import MAIN_DOMAINS, constant_tensor, constant_values, is_op, name_of

REASON = "a mask before Softmax: with its large numbers in the range, 8 bits would not tell the scores apart"
# exp of a difference of 104 is 0 in float32; nothing that a Softmax tells apart is as far off as this.
_FAR = 1e3
# Elements: a mask of 2048 positions. What is larger is a table of embeddings, and takes long to read.
_LARGEST = 2**22
_PASSING = frozenset(
    {
        "Add", "Cast", "Concat", "Expand", "Gather", "Identity", "Max", "Min", "Mul", "Reshape", "Slice", "Split",
        "Squeeze", "Sub", "Transpose", "Trilu", "Unsqueeze", "Where",
    }
)  # fmt: skip
_MOVING = frozenset(
    {"Cast", "Expand", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
)  # what a mask that is an input goes through on its way to the scores
_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def find_masks(model: ir.Model) -> frozenset[str]:
    """Return the names of the nodes of the main graph that make or read a mask.

    Constants of 1000 and more, and inputs that are only added to what the model computes, are followed through
    additions, choices and data movement to the Softmax that they mask."""
    reach = {name_of(value): _FAR for value in model.graph.inputs if value.dtype in _FLOATS and _is_added(value)}
    for node in model.graph:
        if node.op_type in _PASSING and node.domain in MAIN_DOMAINS:
            far = max((_reach(value, reach) for value in node.inputs if value is not None), default=0.0)
            reach.update((name_of(output), far) for output in node.outputs if far >= _FAR)
    nodes: set[str] = set()
    seen: set[str] = set()
    pending = [node.inputs[0] for node in model.graph if is_op(node, "Softmax", "LogSoftmax")]
    while pending:
        value = pending.pop()
        name = name_of(value)
        if value is None or name not in reach or name in seen:
            continue
        seen.add(name)
        maker = value.producer()
        if maker is None:  # an input
            continue
        nodes.update(node.name or "" for node in (maker, *(use.node for use in value.uses())))
        pending.extend(maker.inputs)
    return frozenset(nodes)


def _is_added(value: ir.Value) -> bool:
    """Whether all that reads an input, behind data movement, adds it to what other nodes compute.

    The graph does not hold its numbers. They are those of a mask in what exporters write; activations are read by
    layers, too.
    """
    uses = value.uses()
    return bool(uses) and all(_adds(use.node, value) for use in uses)


def _adds(node: ir.Node, value: ir.Value) -> bool:
    if is_op(node, "Add"):
        other = node.inputs[1] if node.inputs[0] is value else node.inputs[0]
        return other is not None and other.producer() is not None and constant_tensor(other) is None
    return is_op(node, *_MOVING) and node.inputs[0] is value and _is_added(node.outputs[0])


def _reach(value: ir.Value, reach: dict[str, float]) -> float:
    tensor = constant_tensor(value)
    if tensor is None:
        return reach.get(name_of(value), 0.0)
    if tensor.dtype not in _FLOATS or not 0 < tensor.size <= _LARGEST:
        return 0.0
    values = constant_values(value)
    return float(max(values.max(), -values.min()))
