"""Merge convolutions whose results are added.

If several convolutions read one tensor and their results are added, edgeq replaces them by one convolution. Some
networks (RepVGG, MobileOne, ACNet) are trained with several branches in place of each convolution, and deployed with a
single convolution. This is possible because convolution is linear in its weights. The sum of two convolutions of one
input is a convolution with the sum of their weights, where the smaller kernel is padded with zeros. A
BatchNormalization of that input is a convolution with a kernel of size 1. Each branch that is not merged costs its own
products, and one more sum that is rounded to 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from edgeq.model.edit import Editor, replace_value, rewrite_nodes
from edgeq.model.fold import norm_factors
from edgeq.model.graph import (
    geometry,
    is_op,
    node_input,
    only_reader,
)
from edgeq.model.parameters import Array, float_constant, set_parameter

_LINEAR = ("Conv", "BatchNormalization")


@dataclass(frozen=True)
class _Branch:
    """Describe a linear map of a tensor as a convolution.

    Attributes:
        weight: float64[C_out, C_in / group, kernel...]. For a BatchNormalization, float64[channels] with its factors.
        bias: float64[C_out].
        start: position of the first tap on each axis, relative to the window's origin. It is the negative of the
            padding before the input.
        excess: for each axis, the padding on both sides minus the number of elements that the kernel removes. Branches
            with equal strides and excess have results of the same size for every input.
    """

    node: ir.Node
    weight: Array
    bias: Array
    group: int = 1
    strides: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    excess: tuple[int, ...] = ()

    @property
    def kernel(self) -> tuple[int, ...]:
        """Return the number of taps along each axis, or () for a BatchNormalization."""
        return self.weight.shape[2:]


def merge_branches(model: ir.Model) -> int:
    """Replace an Add or Sub of two convolutions, or of a convolution and a BatchNormalization, by one Conv, in place.

    The two nodes must have constant weights and read the same tensor, and nothing else may read their results. One
    kernel must contain every tap of the other; then the merged layer needs no extra products. The Conv with the larger
    kernel keeps its name, and its result takes over the name of the sum. New weights are computed in float64 and stored
    in their old type.

    Returns:
        The number of sums that were merged.
    """
    return rewrite_nodes(model, _merge, "Add", "Sub")  # A merged sum can be a branch of the next sum.


def _merge(total: ir.Node, editor: Editor) -> bool:
    producers = [value.producer() if value is not None else None for value in total.inputs]
    nodes = [node for node in producers if node is not None and is_op(node, *_LINEAR) and node.graph is total.graph]
    if len(nodes) < 2 or nodes[0].inputs[0] is not nodes[1].inputs[0]:
        return False
    # Another reader needs the result of one branch alone, so the branch would have to stay.
    if any(only_reader(node.outputs[0]) is not total for node in nodes):
        return False
    left_branch, right_branch = (_read_branch(node) for node in nodes)
    if left_branch is None or right_branch is None:
        return False
    if total.op_type == "Sub":
        right_branch = replace(right_branch, weight=-right_branch.weight, bias=-right_branch.bias)
    larger, smaller = sorted(
        (left_branch, right_branch), key=lambda branch: (branch.weight.ndim, branch.weight.size), reverse=True
    )
    added = _pad_kernel(smaller, larger)
    if added is None:
        return False
    weight, bias = larger.weight + added, larger.bias + smaller.bias
    # A layer whose weights are not finite could not be quantized.
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        return False
    layer = larger.node
    set_parameter(editor, layer, 1, weight)
    set_parameter(editor, layer, 2, bias)
    replace_value(total.outputs[0], layer.outputs[0], keep_name=True)
    # The larger kernel holds all taps, so its node stays and only its weights change.
    editor.graph.remove([total, smaller.node], safe=True)
    return True


def _read_branch(node: ir.Node) -> _Branch | None:
    """Return the linear map of a node. Return None unless the node is known to be linear and has constant weights."""
    if node.op_type == "BatchNormalization":
        factors = norm_factors(node)
        return None if isinstance(factors, str) else _Branch(node, *factors)
    weight, bias_input = float_constant(node.inputs[1]), node_input(node, 2)
    # The padding of `auto_pad` depends on the size of the image, which may be free.
    if weight is None or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return None
    bias = np.zeros(len(weight)) if bias_input is None else float_constant(bias_input)
    if bias is None:
        return None
    window = geometry(node, (), weight.shape[2:])
    reach = [(taps - 1) * step for taps, step in zip(window.kernel, window.dilations, strict=True)]
    return _Branch(
        node,
        weight,
        bias,
        window.group,
        window.strides,
        window.dilations,
        tuple(-leading for leading, _ in window.pads),
        tuple(sum(pads) - r for pads, r in zip(window.pads, reach, strict=True)),
    )


def _pad_kernel(branch: _Branch, into: _Branch) -> Array | None:
    """Return the weights of a branch, padded to the kernel of `into`. Return None if they do not fit into that
    kernel.
    """
    if into.weight.ndim < 3:
        return None
    placed = np.zeros_like(into.weight)
    channels, inputs = into.weight.shape[:2]
    if branch.weight.ndim == 1:
        if inputs * into.group != channels or len(branch.weight) != channels:
            return None
        unit = (1,) * len(into.kernel)
        diagonal = np.zeros((channels, inputs, *unit))
        # Each group has as many input channels as output channels.
        diagonal[np.arange(channels), np.arange(channels) % inputs] = branch.weight.reshape(-1, *unit)
        zero = (0,) * len(unit)
        branch = _Branch(branch.node, diagonal, branch.bias, into.group, unit, unit, zero, zero)
    is_compatible = branch.group == into.group and branch.strides == into.strides and branch.excess == into.excess
    if not is_compatible or branch.weight.shape[:2] != into.weight.shape[:2]:
        return None
    places: list[slice] = []
    for axis, taps in enumerate(branch.kernel):
        step, distance = into.dilations[axis], branch.start[axis] - into.start[axis]
        first_tap, last_tap = distance // step, distance // step + taps - 1
        if distance % step or first_tap < 0 or last_tap >= into.kernel[axis]:
            return None
        if taps > 1 and branch.dilations[axis] != step:
            return None
        places.append(slice(first_tap, last_tap + 1))
    placed[(slice(None), slice(None), *places)] = branch.weight
    return placed
