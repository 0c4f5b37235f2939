"""Replace each BatchNormalization that was not folded into a layer by a depthwise convolution.

This is for backends that have no integer form of BatchNormalization.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from edgeq.calibration.ranges import Range
from edgeq.model.edit import Editor, replace_node
from edgeq.model.fold import norm_factors
from edgeq.model.graph import is_op, name_of, sizes
from edgeq.model.prepare import PreparedModel, save_rewritten


def norms_as_convolutions(
    prepared: PreparedModel, ranges: Mapping[str, Range], path: Path
) -> tuple[PreparedModel, Mapping[str, Range]]:
    """Return a copy of `prepared` in which each unfolded BatchNormalization is a 1 x 1 depthwise convolution. Also
    return the ranges, extended to the new tensors.

    A file is written to `path` only if something changes.
    """
    if not any(is_op(node, "BatchNormalization") for node in prepared.model.graph):
        return prepared, ranges
    model, more = prepared.model.clone(), dict(ranges)
    editor = Editor(model)
    norms = [node for node in model.graph if is_op(node, "BatchNormalization")]
    changed = sum(_as_convolution(node, editor, more) for node in norms)
    if not changed:
        return prepared, ranges
    return save_rewritten(
        prepared, model, path, f"{changed} BatchNormalization written as depthwise convolutions"
    ), more


def _as_convolution(norm: ir.Node, editor: Editor, ranges: dict[str, Range]) -> bool:
    """Replace a BatchNormalization by y = x * factor + shift for each channel, in place. Return whether this was
    possible.
    """
    source, result = norm.inputs[0], norm.outputs[0]
    shape, factors = sizes(source), norm_factors(norm)
    rank = len(source.shape) if source is not None and source.shape is not None else 0
    if source is None or rank < 2 or isinstance(factors, str):
        return False
    factor, added = factors
    channels, flat = len(factor), rank != 4
    if flat and shape is None:
        return False
    name = str(norm.name)
    data = source
    if shape is not None and flat:
        image = editor.constant(f"{name}/image", np.array([shape[0], channels, 1, -1], np.int64))
        data = editor.node("Reshape", [source, image], f"{name}/image_of", before=norm)
        ranges[name_of(data)] = ranges[name_of(source)]
    weight = editor.constant(f"{name}/weight", factor.reshape(-1, 1, 1, 1).astype(np.float32))
    shift = editor.constant(f"{name}/shift", added.astype(np.float32))
    output = editor.node(
        "Conv", [data, weight, shift], name, before=norm, attributes={"group": channels, "kernel_shape": [1, 1]}
    )
    if flat:
        ranges[name_of(output)] = ranges[name_of(result)]
        flat_shape = editor.constant(f"{name}/shape", np.array(shape, np.int64))
        output = editor.node("Reshape", [output, flat_shape], f"{name}/shape_of", before=norm)
    replace_node(norm, output)
    return True
