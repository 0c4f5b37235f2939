"""Write Q/DQ pairs in front of the layers that ncnn computes on integers.

Only the inputs of these layers and their weights get pairs. ncnn returns the results of all layers as floats, so no
other tensor is rounded, and biases stay float32.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import onnx_ir as ir

from edgeq.calibration.ranges import Range
from edgeq.errors import CalibrationError
from edgeq.model.edit import Editor, drop_unused_initializers
from edgeq.model.graph import channel_axis, constant_values, name_of
from edgeq.quantization.params import scheme_params, weight_params
from edgeq.quantization.qdq import insert_pair, restore_constant
from edgeq.scheme import Scheme


def pair_layers(
    model: ir.Model, names: Collection[str], ranges: Mapping[str, Range], scheme: Scheme, source: Path
) -> None:
    """Write pairs for the layers `names` of a model, in place. Layers that read one tensor share its pair.

    Args:
        source: the model's file, for messages.

    Raises:
        CalibrationError: the input of a layer has no range.
    """
    editor, rounded = Editor(model), dict[ir.Value, ir.Value]()
    restored: dict[tuple[ir.Value, int], ir.Value] = {}
    for node in [node for node in model.graph if node.name in names]:
        value, weight = node.inputs[0], node.inputs[1]
        assert value is not None
        assert weight is not None
        if value not in rounded:
            span = ranges.get(name_of(value))
            if span is None:
                problem = f"{source}: tensor {name_of(value)!r} has no range"
                raise CalibrationError(problem, "The calibration belongs to another model: calibrate this one again")
            rounded[value] = insert_pair(editor, value, scheme_params(span, scheme), before=node)[1]
        node.replace_input_with(0, rounded[value])
        values = constant_values(weight)
        axis = channel_axis(node) % values.ndim
        if (weight, axis) not in restored:
            params = weight_params(values, axis if scheme.per_channel else None, scheme)
            # Another layer may read the same weights along another axis.
            name = name_of(weight) if all(weight is not other for other, _ in restored) else f"{weight.name}/{axis}"
            restored[weight, axis] = restore_constant(editor, name, values, params, node)
        node.replace_input_with(1, restored[weight, axis])
    drop_unused_initializers(model.graph)
