"""Replace 16-bit floats by float32. Ranges are observed in float32, and few CPUs compute in 16 bits."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgeq.model.edit import Editor
from edgeq.model.graph import (
    maker,
)

_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
# Attributes that name an element type: of Cast, and of operators such as EyeLike.
_TYPE_ATTRIBUTES = ("to", "dtype")


def widen_half(model: ir.Model) -> int:
    """Replace all computation in float16 or bfloat16 by float32, in place.

    Inputs and outputs of the model keep their types: a Cast follows each 16-bit input and precedes each 16-bit output.
    Constant nodes must have been turned into initializers before.

    Returns:
        The number of widened weights. It is 0 if the model has no 16-bit floats; then nothing changes.
    """
    widened = 0
    for graph in model.graphs():
        for value in graph.initializers.values():
            # Each 16-bit float is also a float32, so widening is exact.
            if value.dtype in _HALF and value.const_value is not None:
                array = np.asarray(value.const_value.numpy()).astype(np.float32)
                value.const_value = ir.tensor(array, name=value.name)
                value.dtype = ir.DataType.FLOAT
                widened += 1
        for node in graph:
            _widen_attributes(node)
            for output in node.outputs:
                if output.dtype in _HALF and not (output.is_graph_output() and graph is model.graph):
                    output.dtype = ir.DataType.FLOAT
        # Inputs of bodies are inner tensors, and no Cast is needed there.
        if graph is not model.graph:
            for value in graph.inputs:
                if value.dtype in _HALF:
                    value.dtype = ir.DataType.FLOAT
    editor = Editor(model)
    _cast_inputs(model.graph, editor)
    _cast_outputs(model.graph, editor)
    return widened


def _widen_attributes(node: ir.Node) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.INT and name in _TYPE_ATTRIBUTES and attribute.as_int() in _HALF:
            node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in _HALF:
            array = np.asarray(attribute.as_tensor().numpy()).astype(np.float32)
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(array))


def _cast_inputs(graph: ir.Graph, editor: Editor) -> None:
    first_node = graph[0] if len(graph) else None
    for value in graph.inputs:
        if value.dtype in _HALF and value.uses():
            wide = _cast(editor, value, f"{value.name}_float32", ir.DataType.FLOAT, successor=first_node)
            # The Cast itself now reads its own output, so its input is set back.
            value.replace_all_uses_with(wide)
            maker(wide).replace_input_with(0, value)


def _cast_outputs(graph: ir.Graph, editor: Editor) -> None:
    for index, value in enumerate(graph.outputs):
        name, dtype = str(value.name), value.dtype
        if dtype in _HALF and value.producer() is not None:
            value.dtype = ir.DataType.FLOAT
            value.name = editor.free_value_name(f"{name}_float32")
            narrow = _cast(editor, value, name, dtype)
            narrow.name = name
            graph.outputs[index] = narrow


def _cast(
    editor: Editor, source: ir.Value, name: str, dtype: ir.DataType, successor: ir.Node | None = None
) -> ir.Value:
    to = {"to": int(dtype)}
    return editor.node(
        "Cast", [source], f"{name}_cast", output=name, before=successor, like=source, dtype=dtype, attributes=to
    )
