"""Which tensors to raise from 8 to 16 bits, for hardware that computes on either: by noise removed for each byte of
traffic that it costs.

The noise of a tensor is what the outputs show where nothing but this tensor is rounded to 8 bits, in the float model on
this machine's kernels: a simulator of the hardware would take a thousand times as long and say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Literal

import onnx_ir as ir

from edgeq.calibrate.ranges import Range
from edgeq.graph.edit import Editor, insert_behind
from edgeq.graph.quant_params import QuantParams
from edgeq.graph.query import is_op, name_of, only_reader, sizes
from edgeq.model.session import open_in_memory
from edgeq.tune.float_layers import MacCosts, RankedLayer, Ranking

FIELD: Literal["wide"] = "wide"
"""The field of a scheme that names the nodes whose results are raised."""
_ACTIVATION = ir.DataType.UINT8
_CLIPPING = ("Relu", "Clip")


def rank_tensors(
    model: ir.Model, ranges: Mapping[str, Range], noise_of: Callable[[Any], float], expired: Callable[[], bool]
) -> Ranking:
    """Nodes in the order in which to raise what they make; their costs are bytes.

    Args:
        model: the prepared float model.
        ranges: of its tensors, as they are quantized.
        noise_of: noise power over signal power at the outputs of an open session.
        expired: whether to stop measuring; what was not measured comes last.
    """
    found: dict[str, RankedLayer] = {}
    costs: dict[str, int] = {}
    for node in model.graph:
        name, made = str(node.name), name_of(node.outputs[0])
        unknown = made not in ranges or node.outputs[0].dtype not in (None, ir.DataType.FLOAT)
        if unknown or _is_clipped(node.outputs[0]):
            continue
        costs[name] = prod(sizes(node.outputs[0]) or (1,))
        noise = 0.0 if expired() else noise_of(open_in_memory(_rounded(model, made, ranges[made])))
        before = node.inputs[0] if is_op(node, *_CLIPPING) and node.inputs else None
        maker = before.producer() if before is not None and _is_clipped(before) else None
        found[name] = RankedLayer(name, (name,) if maker is None else (str(maker.name), name), noise)
    order = sorted(found.values(), key=lambda layer: (-layer.noise / max(1, costs[layer.name]), layer.name))
    return Ranking(tuple(order), MacCosts(costs), field=FIELD)


def _is_clipped(value: ir.Value) -> bool:
    """Whether its only reader clips it: the range of what that makes takes its place, and it is never rounded."""
    reader = only_reader(value)
    return reader is not None and is_op(reader, *_CLIPPING)


def _rounded(model: ir.Model, tensor: str, span: Range) -> ir.Model:
    """`model` with one tensor rounded to 8 bits."""
    changed = model.clone()
    editor = Editor(changed)
    value = next(value for node in changed.graph for value in node.outputs if value.name == tensor)
    params = QuantParams.from_range(span.low, span.high, _ACTIVATION)
    quantized = editor.quantize(value, params, f"{tensor}/rounded")
    insert_behind(value, quantized, editor.dequantize(quantized, params, f"{tensor}/restored"), f"{tensor}/exact")
    changed.graph.sort()
    return changed
