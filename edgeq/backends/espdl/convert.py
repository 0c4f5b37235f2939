"""Convert a Q/DQ model with power-of-two scales to an integer graph for a family of chips."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from edgeq.backends.espdl.chips import EspFamily
from edgeq.backends.espdl.graph import EspLowering
from edgeq.backends.espdl.network import EspGraph
from edgeq.backends.espdl.operators import HANDLERS
from edgeq.backends.espdl.rules import check
from edgeq.errors import ModelError
from edgeq.model.fixed_shapes import fold_shapes, infer_shapes
from edgeq.model.graph import is_op
from edgeq.model.load import read_model


def lower(model: ir.Model, family: EspFamily, source: Path) -> EspGraph:
    """Return the integer graph of a Q/DQ model at batch size 1.

    Args:
        source: the model's file, for messages.

    Raises:
        ModelError: the runtime cannot compute a node; the message names the node and the reason.
    """
    fixed = at_batch_one(model, source)
    while fold_shapes(fixed):  # The folded values may be shapes that other nodes read.
        infer_shapes(fixed)
    graph = EspLowering(fixed, family, HANDLERS).run()
    check(graph, family)
    return graph


def lower_file(model: Path, family: EspFamily) -> EspGraph:
    """Return the integer graph of a Q/DQ file. See `lower`."""
    return lower(read_model(model), family, model)


def at_batch_one(model: ir.Model, source: Path) -> ir.Model:
    """Return a clone of a model whose open batch size is 1.

    Raises:
        ModelError: another size is open.
    """
    fixed = model.clone()
    ir.external_data.load_to_model(fixed)
    for value in fixed.graph.inputs:
        if value.is_initializer() or not value.shape:
            continue
        sizes = [1 if axis == 0 and not isinstance(size, int) else size for axis, size in enumerate(value.shape)]
        for axis, size in enumerate(sizes):
            if not isinstance(size, int):
                name = size.value or f"{value.name}:{axis}"
                raise ModelError(
                    f"{source}: input {value.name!r} has no fixed size on axis {axis} ({size.value or 'unknown'})",
                    f"Give ⟨fix⟩ {name}=SIZE: an .espdl file has fixed sizes",
                )
        value.shape = ir.Shape(sizes)
    # ONNX infers shapes only through nodes of its own domain, and 16-bit pairs are in onnxruntime's.
    for node in fixed.graph:
        if is_op(node, "QuantizeLinear", "DequantizeLinear"):
            node.domain = ""
    infer_shapes(fixed)
    return fixed
