"""Convolutions of one tensor whose results are added, written as one convolution.

Networks are trained with several branches in the place of a convolution (RepVGG, MobileOne, ACNet) and deployed with
one: convolution is linear in its weights, so that the sum of two of the same input is the convolution with the sum of
their weights, the smaller kernel padded with zeros. A BatchNormalization of that input is a convolution of 1 x 1. What
is not merged costs each branch's products, and a sum that rounds to 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from edgeq.graph.edit import Editor, replace_value, rewrite_nodes
from edgeq.graph.geometry import geometry
from edgeq.graph.query import is_op, node_input, only_reader
from edgeq.model.constants import Array, float_constant, set_parameter
from edgeq.model.fold import norm_factors

_LINEAR = ("Conv", "BatchNormalization")


@dataclass(frozen=True)
class _Branch:
    """A linear map of a tensor, as a convolution.

    Attributes:
        weight: float64[C_out, C_in / group, kernel...]; of a BatchNormalization float64[channels], its factors.
        bias: float64[C_out].
        start: of each axis, where the first tap stands, seen from the window's origin: minus the padding before it.
        excess: of each axis, the padding on both sides less what the kernel takes away. Branches of equal strides and
            excess have results of one size, whatever the input's.
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
        """Taps along each axis; of a BatchNormalization none are known."""
        return self.weight.shape[2:]


def merge_branches(model: ir.Model) -> int:
    """Write every Add or Sub of two convolutions, or of one and a BatchNormalization, that have constant weights, read
    the same tensor and are read by it alone, as one Conv, in place. Only where the one kernel holds every tap of the
    other, so that nothing is multiplied that was not before. The Conv with the larger kernel keeps its name; its result
    takes the name of the sum's. Computed in float64, stored in the weights' own type.

    Returns:
        How many sums were merged.
    """
    return rewrite_nodes(model, _merge, "Add", "Sub")  # a sum that is merged may be a branch of the next one


def _merge(total: ir.Node, editor: Editor) -> bool:
    made = [value.producer() if value is not None else None for value in total.inputs]
    nodes = [node for node in made if node is not None and is_op(node, *_LINEAR) and node.graph is total.graph]
    if len(nodes) < 2 or nodes[0].inputs[0] is not nodes[1].inputs[0]:
        return False
    if any(only_reader(node.outputs[0]) is not total for node in nodes):
        return False
    first, second = (_branch(node) for node in nodes)
    if first is None or second is None:
        return False
    if total.op_type == "Sub":
        second = replace(second, weight=-second.weight, bias=-second.bias)
    larger, smaller = sorted((first, second), key=lambda branch: (branch.weight.ndim, branch.weight.size), reverse=True)
    added = _placed(smaller, larger)
    if added is None:
        return False
    weight, bias = larger.weight + added, larger.bias + smaller.bias
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        return False
    layer = larger.node
    set_parameter(editor, layer, 1, weight)
    set_parameter(editor, layer, 2, bias)
    replace_value(total.outputs[0], layer.outputs[0], keep_name=True)
    editor.graph.remove([total, smaller.node], safe=True)
    return True


def _branch(node: ir.Node) -> _Branch | None:
    """What a node computes; None where it is not known to be linear with constant weights."""
    if node.op_type == "BatchNormalization":
        factors = norm_factors(node)
        return None if isinstance(factors, str) else _Branch(node, *factors)
    weight, given = float_constant(node.inputs[1]), node_input(node, 2)
    if weight is None or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return None
    bias = np.zeros(len(weight)) if given is None else float_constant(given)
    if bias is None:
        return None
    known = geometry(node, (), weight.shape[2:])
    reach = [(taps - 1) * step for taps, step in zip(known.kernel, known.dilations, strict=True)]
    return _Branch(
        node,
        weight,
        bias,
        known.group,
        known.strides,
        known.dilations,
        tuple(-before for before, _ in known.pads),
        tuple(sum(pads) - r for pads, r in zip(known.pads, reach, strict=True)),
    )


def _placed(branch: _Branch, into: _Branch) -> Array | None:
    """The weights of a branch in the kernel of another one; None where they have no place in it."""
    if into.weight.ndim < 3:
        return None
    placed = np.zeros_like(into.weight)
    channels, inputs = into.weight.shape[:2]
    if branch.weight.ndim == 1:
        if inputs * into.group != channels or len(branch.weight) != channels:
            return None
        one = (1,) * len(into.kernel)
        diagonal = np.zeros((channels, inputs, *one))
        # Of each group as many inputs as outputs.
        diagonal[np.arange(channels), np.arange(channels) % inputs] = branch.weight.reshape(-1, *one)
        zero = (0,) * len(one)
        branch = _Branch(branch.node, diagonal, branch.bias, into.group, one, one, zero, zero)
    alike = branch.group == into.group and branch.strides == into.strides and branch.excess == into.excess
    if not alike or branch.weight.shape[:2] != into.weight.shape[:2]:
        return None
    places: list[slice] = []
    for axis, taps in enumerate(branch.kernel):
        step, distance = into.dilations[axis], branch.start[axis] - into.start[axis]
        first, last = distance // step, distance // step + taps - 1
        if distance % step or first < 0 or last >= into.kernel[axis]:
            return None
        if taps > 1 and branch.dilations[axis] != step:
            return None
        places.append(slice(first, last + 1))
    placed[(slice(None), slice(None), *places)] = branch.weight
    return placed
