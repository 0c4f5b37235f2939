"""Infer the shapes of a model whose inputs have fixed sizes, and fold values that depend only on shapes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import RemoveUnusedNodesPass, ShapeInferencePass

from edgeq.errors import ModelError
from edgeq.model.clean import remove_no_ops, tidy
from edgeq.model.convert import to_proto
from edgeq.model.edit import Editor
from edgeq.model.graph import attributes, bodies, constant_tensor, is_op, is_random, name_of, sizes
from edgeq.model.parts import part_of

_SMALL = 4096


def at_batch_one(model: ir.Model, source: Path, format_name: str) -> ir.Model:
    """Return a clone of `model` whose input sizes, and all the sizes that follow from them, are fixed. An open batch
    size becomes 1.

    Args:
        source: the model's file, for messages.
        format_name: the format that needs fixed sizes, with an article, for messages.

    Raises:
        ModelError: an input has another open size than its batch.
    """
    fixed = model.clone()
    ir.external_data.load_to_model(fixed)
    # An engine's file may be made from a model that was never prepared. PyTorch's files have constants as nodes, and
    # an Identity for each further name of equal weights.
    tidy(fixed)
    remove_no_ops(fixed)
    for value in fixed.graph.inputs:
        if value.is_initializer() or not value.shape:
            continue
        # Only an open batch may be fixed here: one sample at a time is how these engines run. Other open sizes are the
        # user's.
        sizes_ = [1 if axis == 0 and not isinstance(size, int) else size for axis, size in enumerate(value.shape)]
        for axis, size in enumerate(sizes_):
            if not isinstance(size, int):
                name = size.value or f"{value.name}:{axis}"
                problem = f"{source}: input {value.name!r} has no fixed size on axis {axis} ({size.value or 'unknown'})"
                raise ModelError(problem, f"Give ⟨fix⟩ {name}=SIZE: {format_name} has fixed sizes")
        value.shape = ir.Shape(sizes_)
    for node in fixed.graph:
        # Shape inference does not know onnxruntime's own pairs, which 16-bit integers need. Their shapes are the same.
        if is_op(node, "QuantizeLinear", "DequantizeLinear"):
            node.domain = ""
    infer_shapes(fixed)
    return fixed


def infer_shapes(model: ir.Model) -> None:
    """Infer the shapes of all tensors of the main graph from those of its inputs, in place. Shape arithmetic is
    evaluated too. A tensor whose shape cannot be inferred loses the shape that it had.
    """
    for node in model.graph:
        for output in node.outputs:
            output.shape = None
    ShapeInferencePass(check_type=False, strict_mode=False)(model)


def fold_shapes(model: ir.Model) -> bool:
    """Replace integers that depend only on shapes by constants, and return whether any were replaced. This is possible
    because every shape is known once the batch is fixed.
    """
    editor = Editor(model)
    folded = False
    for node in list(model.graph):
        values = _integers(model, node)
        if values is None or values.size > _SMALL or values.dtype.kind not in "iub":
            continue
        node.outputs[0].replace_all_uses_with(editor.constant(name_of(node.outputs[0]), values))
        model.graph.remove(node, safe=True)
        folded = True
    if folded:
        RemoveUnusedNodesPass()(model)
    return folded


def _integers(model: ir.Model, node: ir.Node) -> NDArray[Any] | None:
    """Return the integers that a node computes from shapes and small integer constants. Return None if it reads
    anything else.
    """
    if node.domain or len(node.outputs) != 1 or node.outputs[0].is_graph_output():
        return None
    if node.op_type == "Shape" and (shape := sizes(node.inputs[0])) is not None:
        a = attributes(node)
        return np.array(shape, np.int64)[a.get("start", 0) : a.get("end")]
    tensors = [constant_tensor(value) for value in node.inputs if value is not None]
    if not tensors or is_random(node) or any(bodies(node)):
        return None
    if not all(t is not None and t.size <= _SMALL and t.dtype.numpy().kind in "iub" for t in tensors):
        return None
    shape = sizes(node.outputs[0])
    if shape is not None and math.prod(shape) > _SMALL:  # A small model can claim a shape that no memory holds.
        return None
    part = part_of(model, [node], (), node.outputs)
    return np.asarray(next(iter(ReferenceEvaluator(to_proto(part)).run(None, {}))))
