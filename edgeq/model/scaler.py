"""Write the Scaler that converters of scikit-learn's pipelines put before the first layer as standard operators:

    Scaler(x) = (x - offset) scale

onnx infers no shape for Scaler, and without shapes, the layers after it could not be quantized. The difference is not
folded into the layer: columns of a table have their own units, which one range of 8 bits could not represent.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgeq.model.edit import Editor, replace_node

_DOMAIN = "ai.onnx.ml"


def write_scalers(model: ir.Model) -> int:
    """Convert every Scaler of float32 numbers to a Sub and a Mul, in place, and return their number."""
    count = 0
    for graph in model.graphs():
        editor = Editor(model, graph)
        for node in list(graph):
            if (node.domain, node.op_type) == (_DOMAIN, "Scaler"):
                count += _write_scaler(node, editor)
    return count


def _write_scaler(scaler: ir.Node, editor: Editor) -> bool:
    table = scaler.inputs[0]
    if table is None or table.dtype != ir.DataType.FLOAT:
        return False
    offset, scale = (
        editor.constant(f"{scaler.name}/{key}", np.array(scaler.attributes[key].as_floats(), np.float32))
        for key in ("offset", "scale")
    )
    centred = editor.node("Sub", [table, offset], f"{scaler.name}/centred", before=scaler, like=table)
    replace_node(scaler, editor.node("Mul", [centred, scale], f"{scaler.name}/scaled", before=scaler, like=table))
    return True
