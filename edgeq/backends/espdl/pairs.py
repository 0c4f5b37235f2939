"""Fit the Q/DQ pairs of a model to the runtime's kernels, so that onnxruntime computes what a chip computes.

The integer kernel adds numbers of one exponent, so the exponents of the inputs of a sum change first. The kernel of
Softmax gives floats.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from edgeq.model.edit import Editor, replace_value
from edgeq.model.graph import clamp_bounds, is_op, only_reader
from edgeq.model.quant_params import QuantParams, params_of

_SUMS = ("Add", "Sub")


def align_sums(model: ir.Model) -> None:
    """Insert a Q/DQ pair with the scale of the result in front of each computed input of a sum that has another scale,
    in place.
    """
    editor = Editor(model)
    for node in [node for node in model.graph if is_op(node, *_SUMS)]:
        wanted = _params_behind(node.outputs[0])
        if wanted is None:
            continue
        for place, value in enumerate(node.inputs):
            maker = value.producer() if value is not None else None
            if value is None or maker is None or not is_op(maker, "DequantizeLinear"):
                continue
            # A constant is written with the right scale at once.
            params = (
                params_of(maker) if maker.inputs[0] is not None and maker.inputs[0].producer() is not None else None
            )
            if params is None or params.equals(wanted):
                continue
            name = f"{node.name}/aligned{place}"
            integers = editor.quantize(value, wanted, f"{name}/quantized", before=node)
            node.replace_input_with(place, editor.dequantize(integers, wanted, name, before=node))


def _params_behind(value: ir.Value) -> QuantParams | None:
    """Return the parameters of the QuantizeLinear that reads a value, or that is behind a clamp of it."""
    reader = only_reader(value)
    if reader is not None and clamp_bounds(reader) is not None:
        return _params_behind(reader.outputs[0])
    return params_of(reader) if is_op(reader, "QuantizeLinear") and reader is not None else None


def remove_float_pairs(model: ir.Model, op_types: Collection[str]) -> None:
    """Remove the Q/DQ pair between a node of these types and an output of the model, in place."""
    for node in [node for node in model.graph if is_op(node, *op_types)]:
        quantized = only_reader(node.outputs[0])
        restored = only_reader(quantized.outputs[0]) if quantized is not None else None
        if quantized is None or restored is None or not is_op(restored, "DequantizeLinear"):
            continue
        # A layer behind the pair needs its integers.
        if restored.outputs[0].is_graph_output() and not restored.outputs[0].uses():
            replace_value(restored.outputs[0], node.outputs[0], keep_name=True)
            model.graph.remove([restored, quantized], safe=True)
