"""Write one SpaceToDepth in place of several strided slices and the Concat that joins them along the channels.

The "focus" layer at the start of some detectors consists of eight Slices and a Concat. A runtime copies strided slices
element by element before any layer can start. In a YOLOX-Nano, this takes 0.6 ms of 11 ms, and SpaceToDepth takes
0.14 ms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgeq.model.edit import Editor, replace_value
from edgeq.model.graph import (
    constant,
    is_op,
)
from edgeq.model.parameters import float_constant, set_parameter

# Axes of an image [N, C, H, W].
_HEIGHT, _WIDTH = 2, 3


@dataclass(frozen=True)
class _Blocks:
    """Describe a Concat of all phases of `source`. A phase is the tensor sampled with a stride of `size` on both image
    axes, starting at one row and column. `order[p]` is the index of the Concat's input with phase p = row * size +
    column.
    """

    source: ir.Value
    size: int
    order: tuple[int, ...]


def join_slices(model: ir.Model) -> int:
    """Replace every Concat of all phases of a tensor by SpaceToDepth, in place. The Slices stay in the graph, but no
    node reads them. Results do not change.

    If the phases are not in the order of SpaceToDepth, edgeq reorders the input channels of the convolutions that read
    them. If any other node reads such phases, the Concat stays.

    Returns:
        The number of Concats that were replaced.
    """
    concats = [(node, graph, _blocks(node)) for graph in model.graphs() for node in graph if is_op(node, "Concat")]
    return sum(_join(node, blocks, Editor(model, graph)) for node, graph, blocks in concats if blocks is not None)


def _join(concat: ir.Node, blocks: _Blocks, editor: Editor) -> bool:
    joined = concat.outputs[0]
    in_order = blocks.order == tuple(range(len(blocks.order)))
    layers = [use.node for use in joined.uses()]
    # Only the weights of a convolution can absorb another order of channels.
    if not in_order and (joined.is_graph_output() or not all(_can_take(layer, joined, blocks) for layer in layers)):
        return False
    node = ir.node("SpaceToDepth", [blocks.source], {"blocksize": blocks.size}, name=concat.name)
    editor.graph.insert_before(concat, node)
    packed = node.outputs[0]
    packed.type, packed.shape = joined.type, joined.shape
    if in_order:
        replace_value(joined, packed, keep_name=True)
        return True
    # The tensor gets a new name, because its channels are in another order.
    packed.name = editor.free_value_name(f"{joined.name}/space_to_depth")
    for layer in layers:
        weight = float_constant(layer.inputs[1])
        assert weight is not None
        parts = np.split(weight, len(blocks.order), axis=1)
        set_parameter(editor, layer, 1, np.concatenate([parts[i] for i in blocks.order], axis=1))
        layer.replace_input_with(0, packed)
    return True


def _blocks(concat: ir.Node) -> _Blocks | None:
    phases, sources = [], set()
    if concat.domain != "" or concat.attributes.get_int("axis", 0) not in (1, -3):
        return None
    for value in concat.inputs:
        source, phase = _phase(value)
        sources.add(source)
        phases.append(phase)
    source = sources.pop() if len(sources) == 1 else None
    # A block is a square, so its side is the root of the number of phases.
    size = round(len(phases) ** 0.5)
    grid_phases = [{_HEIGHT: (row, size), _WIDTH: (column, size)} for row in range(size) for column in range(size)]
    if (
        source is None
        or source.shape is None
        or len(source.shape) != 4
        or size < 2
        or source.dtype != ir.DataType.FLOAT
    ):
        return None
    if any(phases.count(phase) != 1 for phase in grid_phases) or len(phases) != len(grid_phases):
        return None
    return _Blocks(source, size, tuple(phases.index(phase) for phase in grid_phases))


def _phase(value: ir.Value | None) -> tuple[ir.Value | None, dict[int, tuple[int, int]]]:
    """Return the source of a sliced value, and (start, step) for each axis. Slices that end before the end of an axis
    are not followed.
    """
    offsets: dict[int, tuple[int, int]] = {}
    while value is not None:
        node = value.producer()
        # A Slice may cut one axis at a time, so a phase can be the work of several.
        if node is None or node.op_type != "Slice" or node.domain != "" or len(node.inputs) != 5:
            break
        arguments = [constant(v) for v in node.inputs[1:]]
        source = node.inputs[0]
        if source is None or source.shape is None or any(values is None for values in arguments):
            break
        starts, ends, axes, steps = (values.ravel().tolist() for values in arguments if values is not None)
        rank = len(source.shape)
        reaches_end = all(end >= _covering_end(source.shape[axis % rank]) for end, axis in zip(ends, axes, strict=True))
        if not reaches_end or any(axis % rank in offsets for axis in axes):
            break
        offsets.update({axis % rank: (start, step) for axis, start, step in zip(axes, starts, steps, strict=True)})
        value = source
    return value, offsets


def _covering_end(size: int | ir.SymbolicDim) -> int:
    """Return the smallest end that covers the whole axis."""
    return size if isinstance(size, int) else 2**31 - 1


def _can_take(layer: ir.Node, joined: ir.Value, blocks: _Blocks) -> bool:
    """Return whether `layer` is an ungrouped convolution with constant weights that reads `joined` as its data and
    nowhere else.
    """
    is_ungrouped = layer.op_type == "Conv" and layer.domain == "" and layer.attributes.get_int("group", 1) == 1
    if not is_ungrouped or layer.inputs[0] is not joined or list(layer.inputs).count(joined) > 1:
        return False
    weight = float_constant(layer.inputs[1])
    return weight is not None and weight.ndim == 4 and weight.shape[1] % len(blocks.order) == 0
