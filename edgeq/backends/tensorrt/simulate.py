"""What a graph with explicit quantization computes, as a float32 graph that ONNX Runtime's CPU kernels run exactly.

The graph itself cannot be run for that: ONNX Runtime's CPU provider has hardly any 16-bit kernels, computes such nodes
in float32 and drops the roundings between them (seen in 1.31.1: 200 times 1000 times 0.001 is infinite in float16, and
its result is 200). So every tensor of a 16-bit type becomes a float32 tensor that is rounded to that type where it is
made: by a pair of Cast nodes, which no optimisation level removes. Q/DQ pairs stay what they are: integers times their
scale, multiplied and summed in float32.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgeq.graph.edit import Editor, insert_behind, replace_node
from edgeq.graph.operators import DATA_MOVEMENT
from edgeq.graph.query import is_op, name_of, only_reader
from edgeq.model.shapes import element_types
from edgeq.session import SessionSettings

SETTINGS = SessionSettings(optimization="none")
"""As written: the optimiser would quantize weights that were left in float and fuse Q/DQ in its own way."""
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
# Their results are among the values that they read, so there is nothing to round.
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
    """A model with the signature and tensor names of `model`, which computes in float32 what that computes."""
    simulated = model.clone()
    graph, editor = simulated.graph, Editor(simulated)
    types = element_types(model)
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
        if node.op_type == "Cast" and kinds[0] in _HALVES:
            _, rounded = _rounding(editor, node.inputs[0], str(node.outputs[0].name), kinds[0], node)
            replace_node(node, rounded)
        elif node.op_type == "Cast" and kinds[0] == ir.DataType.FLOAT and types.get(name_of(node.inputs[0])) in _HALVES:
            node.op_type = "Identity"
            node.attributes.clear()
        elif node.op_type not in _EXACT and not _takes_in_its_reader(node):
            for value, kind in zip(node.outputs, kinds, strict=True):
                if kind in _HALVES:
                    name = str(value.name)
                    insert_behind(value, *_rounding(editor, value, name, kind, following), f"{name}_unrounded")
    for node in graph:
        for value in node.outputs:
            if value.dtype in _HALVES and not value.is_graph_output():
                value.type = ir.TensorType(ir.DataType.FLOAT)
    return simulated


def _takes_in_its_reader(node: ir.Node) -> bool:
    """Return whether TensorRT folds the node behind into this one, so that nothing is rounded between the two."""
    return is_op(node, "Conv", "ConvTranspose") and is_op(only_reader(node.outputs[0]), "BatchNormalization")


def _at_border(cast: ir.Node) -> bool:
    """Whether it widens an input of the model that is in 16 bits, or makes such an output: those keep their types."""
    source, made = cast.inputs[0], cast.outputs[0]
    of_input = source is not None and source.is_graph_input() and source.dtype in _HALVES
    return of_input or (made.is_graph_output() and made.dtype in _HALVES)


def _rounding(
    editor: Editor, source: ir.Value | None, name: str, kind: ir.DataType, before: ir.Node | None
) -> tuple[ir.Value, ir.Value]:
    """A Cast to the 16-bit type and one back, of tensor `name`: their outputs."""
    down = editor.node(
        "Cast", [source], f"{name}_to_16_bits", output=f"{name}_16_bits", before=before, attributes={"to": kind}
    )
    to = {"to": ir.DataType.FLOAT}
    return down, editor.node("Cast", [down], f"{name}_from_16_bits", before=before, attributes=to)
