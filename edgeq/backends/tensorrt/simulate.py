"""Turn a graph for TensorRT into a float32 graph that computes the same results on ONNX Runtime's CPU kernels.

The original graph cannot be used for that. ONNX Runtime's CPU provider has hardly any 16-bit kernels, so it computes
16-bit nodes in float32 and drops the roundings between them. (Seen in 1.31.1: 200 times 1000 times 0.001 is infinite in
float16, but the provider gives 200.) So the simulation stores every 16-bit tensor in float32. Where a tensor is made, a
pair of Cast nodes rounds it to its type. No optimisation level removes these Cast nodes. Q/DQ pairs stay as they are,
so integers times their scale are multiplied and summed in float32.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgeq.model.edit import Editor, insert_behind, replace_node
from edgeq.model.graph import DATA_MOVEMENT, is_op, name_of, only_reader
from edgeq.model.shapes import element_types
from edgeq.run.session import SessionSettings

SETTINGS = SessionSettings(optimization="none")
"""Settings that run the graph as written. The optimiser would quantize weights that stay in float, and fuse Q/DQ
differently.
"""

_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

# The results of these operators are values from their inputs, so there is nothing to round.
_EXACT = DATA_MOVEMENT | {
    "Concat",
    "Relu",
    "Clip",
    "Where",
    "Max",
    "Min",
    "Neg",
    "Abs",
    "GlobalMaxPool",
    "DequantizeLinear",
}


def simulation(model: ir.Model) -> ir.Model:
    """Return a float32 model that computes the same results as `model`, with the same signature and tensor names."""
    simulated = model.clone()
    graph, editor = simulated.graph, Editor(simulated)
    types = element_types(model)
    # Widening a 16-bit constant is exact, so constants need no rounding.
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype in _HALVES:
            value.const_value = ir.tensor(tensor.numpy().astype(np.float32), name=value.name)
            value.type = ir.TensorType(ir.DataType.FLOAT)
    nodes = tuple(graph)
    for node, following in zip(nodes, [*nodes[1:], None], strict=True):
        kinds = [types.get(value.name or "", ir.DataType.UNDEFINED) for value in node.outputs]
        if node.op_type == "Cast" and _at_border(node):
            continue
        # This Cast is the rounding. A pair of Casts does the same and gives float32 to the readers.
        if node.op_type == "Cast" and kinds[0] in _HALVES:
            _, rounded = _rounding(editor, node.inputs[0], str(node.outputs[0].name), kinds[0], node)
            replace_node(node, rounded)
        elif node.op_type == "Cast" and kinds[0] == ir.DataType.FLOAT and types.get(name_of(node.inputs[0])) in _HALVES:
            # The tensor is float32 already, so a Cast up has nothing to do, but its output's name must stay.
            node.op_type = "Identity"
            node.attributes.clear()
        elif node.op_type not in _EXACT and not _takes_in_its_reader(node):
            for value, kind in zip(node.outputs, kinds, strict=True):
                if kind in _HALVES:
                    name = str(value.name)
                    insert_behind(value, *_rounding(editor, value, name, kind, following), f"{name}_unrounded")
    for node in graph:
        for value in node.outputs:
            # The clone kept the types of the original tensors.
            if value.dtype in _HALVES and not value.is_graph_output():
                value.type = ir.TensorType(ir.DataType.FLOAT)
    return simulated


def _takes_in_its_reader(node: ir.Node) -> bool:
    """Return whether TensorRT folds the next node into this one, and so does not round the tensor between the two."""
    return is_op(node, "Conv", "ConvTranspose") and is_op(only_reader(node.outputs[0]), "BatchNormalization")


def _at_border(cast: ir.Node) -> bool:
    """Return whether `cast` widens a 16-bit model input or makes a 16-bit model output. The model's inputs and outputs
    keep their types.
    """
    source, output = cast.inputs[0], cast.outputs[0]
    of_input = source is not None and source.is_graph_input() and source.dtype in _HALVES
    return of_input or (output.is_graph_output() and output.dtype in _HALVES)


def _rounding(
    editor: Editor, source: ir.Value | None, name: str, kind: ir.DataType, following: ir.Node | None
) -> tuple[ir.Value, ir.Value]:
    """Insert a Cast of the tensor `name` to the 16-bit type and a Cast back, and return the outputs of both."""
    down = editor.node(
        "Cast", [source], f"{name}_to_16_bits", output=f"{name}_16_bits", before=following, attributes={"to": kind}
    )
    to = {"to": ir.DataType.FLOAT}
    return down, editor.node("Cast", [down], f"{name}_from_16_bits", before=following, attributes=to)
