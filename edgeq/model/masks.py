"""Find attention masks.

An attention mask is added before a Softmax and contains numbers far below any score. A range that includes these
numbers maps all scores to a single integer. edgeq finds masks in the graph, because the calibration samples may contain
no masked position. `edgeq.calibration.hazards` finds other such tensors from statistics.
"""

from __future__ import annotations

import onnx_ir as ir

from edgeq.model.graph import (
    MAIN_DOMAINS,
    constant_tensor,
    constant_values,
    is_op,
    name_of,
)

MASK_REASON = "a mask before Softmax: with its large numbers in the range, 8 bits could not distinguish the scores"
# exp(-104) is 0 in float32, so a Softmax gives 0 for a score that is this far below another.
_SENTINEL = 1e3
# Number of elements of a mask for 2048 x 2048 positions. Larger constants are embedding tables and slow to read.
_LARGEST = 2**22
_PASSING = frozenset(
    {
        "Add", "Cast", "Concat", "Expand", "Gather", "Identity", "Max", "Min", "Mul", "Reshape", "Slice", "Split",
        "Squeeze", "Sub", "Transpose", "Trilu", "Unsqueeze", "Where",
    }
)  # fmt: skip
_MOVING = frozenset(
    {"Cast", "Expand", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
)  # Operators that may come between a mask that is an input and the scores.
_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def find_masks(model: ir.Model) -> frozenset[str]:
    """Return the names of nodes of the main graph that read or write an attention mask.

    A mask begins at constants with a magnitude of 1000 or more, or at inputs that are only added to computed tensors.
    edgeq follows it through additions, selections and data movement to the Softmax.
    """
    reach = {name_of(value): _SENTINEL for value in model.graph.inputs if value.dtype in _FLOATS and _is_added(value)}
    for node in model.graph:
        if node.op_type in _PASSING and node.domain in MAIN_DOMAINS:
            magnitude = max((_reach(value, reach) for value in node.inputs if value is not None), default=0.0)
            reach.update((name_of(output), magnitude) for output in node.outputs if magnitude >= _SENTINEL)
    nodes: set[str] = set()
    visited: set[str] = set()
    pending = [node.inputs[0] for node in model.graph if is_op(node, "Softmax", "LogSoftmax")]
    while pending:
        value = pending.pop()
        name = name_of(value)
        if value is None or name not in reach or name in visited:
            continue
        visited.add(name)
        maker = value.producer()
        if maker is None:  # the value is an input of the model
            continue
        nodes.update(node.name or "" for node in (maker, *(use.node for use in value.uses())))
        pending.extend(maker.inputs)
    return frozenset(nodes)


def _is_added(value: ir.Value) -> bool:
    """Return whether all readers of an input add it to a computed tensor, directly or after data movement.

    The graph does not contain the values of an input. In exported models an input that is only added is a mask, whereas
    activations are read by layers.
    """
    uses = value.uses()
    return bool(uses) and all(_adds(use.node, value) for use in uses)


def _adds(node: ir.Node, value: ir.Value) -> bool:
    if is_op(node, "Add"):
        addend = node.inputs[1] if node.inputs[0] is value else node.inputs[0]
        return addend is not None and addend.producer() is not None and constant_tensor(addend) is None
    return is_op(node, *_MOVING) and node.inputs[0] is value and _is_added(node.outputs[0])


def _reach(value: ir.Value, reach: dict[str, float]) -> float:
    tensor = constant_tensor(value)
    if tensor is None:
        return reach.get(name_of(value), 0.0)
    if tensor.dtype not in _FLOATS or not 0 < tensor.size <= _LARGEST:
        return 0.0
    values = constant_values(value)
    return float(max(values.max(), -values.min()))
