"""Write normalizations and reductions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import onnx_ir as ir

from edgeq.backends.ncnn.dialect import dialect
from edgeq.backends.ncnn.lower import NcnnLowering, NotInNcnnError
from edgeq.backends.ncnn.network import Setting
from edgeq.model.graph import node_input


def write_batch_norm(work: NcnnLowering, node: ir.Node) -> None:
    """Write BatchNorm, for a node that could not be folded into a layer."""
    source = work.image(node.inputs[0])
    scale, bias, mean, variance = (work.floats(value).ravel() for value in node.inputs[1:5])
    settings: dict[int, Setting] = {0: scale.size, 1: node.attributes.get_float("epsilon", 1e-5)}
    made = work.emit("BatchNorm", (source,), source.dims, settings, vectors=(scale, mean, variance, bias))
    work.hold(node.outputs[0], made)


def write_layer_norm(work: NcnnLowering, node: ir.Node) -> None:
    """Write LayerNorm over the last axes."""
    shape = work.shape(node.inputs[0])
    axis = node.attributes.get_int("axis", -1) % len(shape)
    if len(node.outputs) > 1 and any(value.uses() for value in node.outputs[1:]):
        raise NotInNcnnError("its mean or deviation is read")
    size, rows = prod(shape[axis:]), prod(shape[:axis])
    source = work.shaped(work.blob(node.inputs[0]), (size,) if rows == 1 else (rows, size))
    bias = node_input(node, 2)
    gamma = np.broadcast_to(work.floats(node.inputs[1]), shape[axis:]).ravel()
    beta = np.zeros(size, np.float32) if bias is None else np.broadcast_to(work.floats(bias), shape[axis:]).ravel()
    settings: dict[int, Setting] = {0: size, 1: node.attributes.get_float("epsilon", 1e-5), 2: 1}
    work.hold(node.outputs[0], work.emit("LayerNorm", (source,), source.dims, settings, vectors=(gamma, beta)))


def write_instance_norm(work: NcnnLowering, node: ir.Node) -> None:
    """Write InstanceNorm."""
    shape = work.shape(node.inputs[0])
    if shape[0] != 1 or len(shape) < 3:
        raise NotInNcnnError("it normalizes several images, or no image")
    source = work.shaped(work.blob(node.inputs[0]), (shape[1], prod(shape[2:-1]), shape[-1]))
    scale, bias = (work.floats(value).ravel() for value in node.inputs[1:3])
    settings: dict[int, Setting] = {0: scale.size, 1: node.attributes.get_float("epsilon", 1e-5), 2: 1}
    work.hold(node.outputs[0], work.emit("InstanceNorm", (source,), source.dims, settings, vectors=(scale, bias)))


def write_reduction(work: NcnnLowering, node: ir.Node) -> None:
    """Write Reduction over axes of the tensor."""
    shape, axes = work.shape(node.inputs[0]), _reduced_axes(work, node)
    if not axes:
        work.hold(node.outputs[0], work.blob(node.inputs[0]))
        return
    source = work.image(node.inputs[0])
    # A sum over the batch, which has one entry, changes nothing.
    places = tuple(work.axis(node.inputs[0], axis) for axis in axes if axis or len(shape) == 1 or shape[0] != 1)
    dims = [1 if place in places else size for place, size in enumerate(source.dims)]
    settings: dict[int, Setting] = {0: dialect().reduction[node.op_type], 1: 0, 3: places, 4: 1, 5: 1}
    work.hold(node.outputs[0], work.emit("Reduction", (source,), dims, settings))


def _reduced_axes(work: NcnnLowering, node: ir.Node) -> Sequence[int]:
    """Return the axes of a reduction, an attribute or an input; all axes if it states none."""
    rank = len(work.shape(node.inputs[0]))
    value = node_input(node, 1)
    axes = work.numbers(value) if value is not None else node.attributes.get_ints("axes", [])
    if not axes and not node.attributes.get_int("noop_with_empty_axes", 0):
        axes = list(range(rank))
    return sorted(axis % rank for axis in axes)
