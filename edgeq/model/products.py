"""Count products, merge convolutions whose results are added, and find attention masks.

A multiply-accumulate is one product added to a sum. Biases of convolutions and element-wise operators do not count.
Symbolic and unknown sizes count as 1, so a dynamic batch counts as one sample. `assumed_shapes` makes better guesses.

If several convolutions read one tensor and their results are added, edgeq replaces them by one convolution. Some
networks (RepVGG, MobileOne, ACNet) are trained with several branches in place of each convolution, and deployed with a
single convolution. This is possible because convolution is linear in its weights. The sum of two convolutions of one
input is a convolution with the sum of their weights, where the smaller kernel is padded with zeros. A
BatchNormalization of that input is a convolution with a kernel of size 1. Each branch that is not merged costs its own
products, and one more sum that is rounded to 8 bits.

An attention mask is added before a Softmax and contains numbers far below any score. A range that includes these
numbers maps all scores to a single integer. edgeq finds masks in the graph, because the calibration samples may contain
no masked position. `edgeq.calibration.hazards` finds other such tensors from statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from edgeq.model.clean import node_names
from edgeq.model.edit import Editor, replace_value, rewrite_nodes
from edgeq.model.fold import norm_factors
from edgeq.model.graph import (
    MAIN_DOMAINS,
    bodies,
    constant,
    constant_tensor,
    constant_values,
    every_node,
    geometry,
    is_op,
    name_of,
    node_input,
    only_reader,
    operator_of,
)
from edgeq.model.shapes import infer_shapes
from edgeq.model.tensors import Array, float_constant, set_parameter

Shape = tuple[int, ...]
IMAGE_SIDE, LENGTH = 224, 128
_UNNAMED = "?"
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def node_macs(model: ir.Model) -> dict[str, int]:
    """Return node name → multiply-accumulates of one inference, for every node. The number is 0 if the node multiplies
    no matrices.

    Nodes in bodies of Loop and Scan count once, because the number of iterations is not known. Of the branches of an
    If, only the one with the most work counts; the others are 0. Unnamed nodes get the names that
    `edgeq.model.clean.name_nodes` would give them. Shapes that are missing in the model are inferred. The quantized and
    fused forms of layers that ONNX Runtime creates are counted too.
    """
    described = all(
        output.shape is not None for graph in model.graphs() for node in graph for output in node.outputs if output.name
    )
    inferred = {} if described else infer_shapes(model)[0]

    def shape_of(value: ir.Value | None) -> Shape:
        """Return the shape of a value, with 1 for unknown sizes. Return () if the rank is not known."""
        if value is None:
            return ()
        tensor = constant_tensor(value)
        described = inferred.get(value.name or "", value)
        shape = described.shape if tensor is None else ir.Shape(list(tensor.shape))  # type: ignore[arg-type]
        return tuple(size if isinstance(size, int) and size > 0 else 1 for size in shape or ())

    def count(node: ir.Node) -> int:
        """Return the multiply-accumulates of one run of the node; 0 if a required shape is not known."""
        row = operator_of(node)
        if not row.mac_rule:
            return 0
        places = row.mac_operands or range(len(node.inputs))
        operands = [shape_of(node_input(node, place)) for place in places]
        return _RULES[row.mac_rule](node, operands, shape_of(node.outputs[0]))

    names = node_names(model)
    macs = {name: count(node) for node, name in names.items()}
    # A body comes after the node that contains it. So in reverse order the innermost branches are compared first.
    for node in (node for node in reversed(names) if node.op_type == "If"):
        branches = [[names[n] for n in graph.all_nodes()] for graph in bodies(node)]
        for skipped in sorted(branches, key=lambda branch: sum(macs[name] for name in branch))[:-1]:
            macs.update(dict.fromkeys(skipped, 0))
    return macs


def with_sizes(model: ir.Model, shapes: Mapping[str, Sequence[int]]) -> ir.Model:
    """Return a copy whose inputs have these sizes. Shapes of other tensors are kept if they follow from the symbols of
    the inputs, because inference does not find all shapes that an exporter wrote. Other shapes are removed and must be
    inferred again.
    """
    copy = model.clone()
    sizes_by_symbol: dict[str, int] = {}
    fits = True
    for value in copy.graph.inputs:
        if value.name and value.name in shapes:
            sizes = shapes[value.name]
            for size, number in zip(value.shape or (), sizes, strict=False):
                fits &= not isinstance(size, int) or size == number
                fits &= sizes_by_symbol.setdefault(_symbol(size), number) == number or _symbol(size) == _UNNAMED
            value.shape = ir.Shape(sizes)
    sizes_by_symbol.pop(_UNNAMED, None)
    for node in copy.graph:
        for output in node.outputs:
            output.shape = _resolve(output.shape, sizes_by_symbol) if fits else None
    return copy


def _resolve(shape: ir.Shape | None, sizes_by_symbol: Mapping[str, int]) -> ir.Shape | None:
    """Return the shape with numbers in place of known symbols. Return None if an unknown symbol remains."""
    sizes = [
        sizes_by_symbol.get(_symbol(size), 0) if isinstance(size, ir.SymbolicDim) else size for size in shape or ()
    ]
    return ir.Shape(sizes) if shape is not None and all(sizes) else None


def assumed_shapes(model: ir.Model, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return assumed shapes of the inputs that have free sizes, for counting.

    Sizes in `shapes` are used first. Otherwise, a symbol that is the first size of some input is the batch and becomes
    1. Any other size becomes `IMAGE_SIDE` in inputs with at least four dimensions, and `LENGTH` in others.
    """
    inputs = [v for v in model.graph.inputs if v.name and v.shape is not None and not v.is_initializer()]
    batches = {_symbol(v.shape[0]) for v in inputs if v.shape} - {_UNNAMED}
    assumed = {}
    for value in inputs:
        shape = value.shape or ()
        side = IMAGE_SIDE if len(shape) > 3 else LENGTH
        name = str(value.name)
        if name in shapes:
            assumed[name] = tuple(shapes[name])
        elif not all(isinstance(size, int) and size > 0 for size in shape):
            assumed[name] = tuple(
                size if isinstance(size, int) and size > 0 else 1 if not place or _symbol(size) in batches else side
                for place, size in enumerate(shape)
            )
    return assumed


def _symbol(size: object) -> str:
    """Return the name of a symbolic size, or `_UNNAMED` for a size without a name."""
    return str(size.value) if isinstance(size, ir.SymbolicDim) and size.value else _UNNAMED


def _conv(node: ir.Node, operands: Sequence[Shape], output: Shape) -> int:
    # Each output element is a dot product over (C_in / groups) × kernel.
    weight = operands[1]
    if not weight:
        return 0
    if not output:
        return math.prod(weight)
    per_output = math.prod(weight[1:])
    if node.attributes.get_int("channels_last", 0):
        return math.prod(output) * per_output
    # The number of channels is read from the weight: its shape is known even if the size of the output is symbolic.
    return output[0] * weight[0] * math.prod(output[2:]) * per_output


def _conv_transpose(node: ir.Node, operands: Sequence[Shape], output: Shape) -> int:
    # Each input element is spread over (C_out / groups) × kernel outputs.
    data, weight = operands
    if not weight:
        return 0
    return (data[0] * math.prod(data[2:]) if len(data) > 2 else 1) * math.prod(weight)


def _matmul(node: ir.Node, operands: Sequence[Shape], output: Shape) -> int:
    a, b = operands
    if not a or not b:
        return math.prod(a) * math.prod(b)
    if node.attributes.get_int("transA", 0) and len(a) > 1:
        a = (*a[:-2], a[-1], a[-2])
    if node.attributes.get_int("transB", 0) and len(b) > 1:
        b = (*b[:-2], b[-1], b[-2])
    rows = a[-2] if len(a) > 1 else 1
    columns = b[-1] if len(b) > 1 else 1
    # The inner size may be a number in one operand and symbolic in the other.
    inner = max(a[-1], b[-2] if len(b) > 1 else b[0])
    return _broadcast(a[:-2], b[:-2]) * rows * columns * inner


def _recurrent(node: ir.Node, operands: Sequence[Shape], output: Shape) -> int:
    # X [sequence, batch, input], W [directions, gates × hidden, input], R [directions, gates × hidden, hidden].
    # DynamicQuantizeLSTM swaps the last two dimensions of W and R, which does not change the number of products.
    data, weight = operands
    gates = _GATES[operator_of(node).float_form or node.op_type]
    hidden = node.attributes.get_int("hidden_size", 0) or (weight[1] // gates if len(weight) == 3 else 0)
    if len(weight) != 3 or not hidden:
        return 0
    return math.prod(data[:2]) * (math.prod(weight) + weight[0] * gates * hidden * hidden)


def _einsum(node: ir.Node, operands: Sequence[Shape], output: Shape) -> int:
    # With two operands, every combination of values of all labels is one product. Ellipses are not supported.
    equation = node.attributes.get_string("equation", "").replace(" ", "")
    terms = equation.split("->")[0].split(",")
    if len(terms) < 2 or "..." in equation:
        return 0
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, operands, strict=False):
        for label, size in zip(term, shape, strict=False):
            sizes[label] = max(size, sizes.get(label, 1))
    return math.prod(sizes.values()) * (len(terms) - 1)


def _attention(node: ir.Node, operands: Sequence[Shape], output: Shape) -> int:
    # ONNX Attention: Q [batch, heads, q, d] or [batch, q, heads × d]. Its products are Q K^T and (weights) V.
    q, k, v = operands
    if len(q) < 3 or len(k) < 3 or len(v) < 3:
        return 0
    if len(q) == 4:
        return q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])
    query_heads = node.attributes.get_int("q_num_heads", node.attributes.get_int("num_heads", 1))
    value_heads = node.attributes.get_int("kv_num_heads", query_heads) or 1
    return q[0] * q[1] * k[1] * (q[2] + v[2] // value_heads * query_heads)


def _fused_attention(node: ir.Node, operands: Sequence[Shape], output: Shape) -> int:
    # com.microsoft Attention and QAttention: input [batch, sequence, in], weights [in, 3 × hidden]; then Q K^T and
    # (weights) V.
    data, weight = operands
    if len(data) != 3 or len(weight) != 2:
        return 0
    batch, sequence, _ = data
    return batch * sequence * math.prod(weight) + 2 * batch * sequence * sequence * (weight[1] // 3)


def _matmul_nbits(node: ir.Node, operands: Sequence[Shape], output: Shape) -> int:
    return math.prod(operands[0][:-1]) * node.attributes.get_int("K", 0) * node.attributes.get_int("N", 0)


_RULES: Mapping[str, Callable[[ir.Node, Sequence[Shape], Shape], int]] = {
    "conv": _conv,
    "conv-transpose": _conv_transpose,
    "matmul": _matmul,
    "recurrent": _recurrent,
    "einsum": _einsum,
    "attention": _attention,
    "fused-attention": _fused_attention,
    "nbits": _matmul_nbits,
}
"""`Operator.mac_rule` → function that counts the multiply-accumulates of a node. Its arguments are the node, the shapes
of its `mac_operands`, and the shape of its output."""


def _broadcast(a: Shape, b: Shape) -> int:
    rank = max(len(a), len(b))
    padded = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True)
    return math.prod(max(pair) for pair in padded)


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
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        return False
    layer = larger.node
    set_parameter(editor, layer, 1, weight)
    set_parameter(editor, layer, 2, bias)
    replace_value(total.outputs[0], layer.outputs[0], keep_name=True)
    editor.graph.remove([total, smaller.node], safe=True)
    return True


def _read_branch(node: ir.Node) -> _Branch | None:
    """Return the linear map of a node. Return None unless the node is known to be linear and has constant weights."""
    if node.op_type == "BatchNormalization":
        factors = norm_factors(node)
        return None if isinstance(factors, str) else _Branch(node, *factors)
    weight, bias_input = float_constant(node.inputs[1]), node_input(node, 2)
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


MASK_REASON = "a mask before Softmax: with its large numbers in the range, 8 bits could not distinguish the scores"
# exp(-104) is 0 in float32, so a Softmax gives 0 for a score that is this far below another.
_SENTINEL = 1e3
# Number of elements of a mask for 2048 x 2048 positions. Larger constants are embedding tables and slow to read.
_LARGEST = 2**22
_PASSING = frozenset(
    {
        "Add", "Cast", "Concat", "Expand", "Gather", "Identity", "Max", "Min", "Mul", "Reshape", "Slice", "Split",
        "Squeeze", "Sub", "Transpose", "Trilu", "Unsqueeze", "Where",
    }
)  # fmt: skip
_MOVING = frozenset(
    {"Cast", "Expand", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
)  # Operators that may come between a mask that is an input and the scores.
_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def find_masks(model: ir.Model) -> frozenset[str]:
    """Return the names of nodes of the main graph that read or write an attention mask.

    A mask begins at constants with a magnitude of 1000 or more, or at inputs that are only added to computed tensors.
    edgeq follows it through additions, selections and data movement to the Softmax.
    """
    reach = {name_of(value): _SENTINEL for value in model.graph.inputs if value.dtype in _FLOATS and _is_added(value)}
    for node in model.graph:
        if node.op_type in _PASSING and node.domain in MAIN_DOMAINS:
            magnitude = max((_reach(value, reach) for value in node.inputs if value is not None), default=0.0)
            reach.update((name_of(output), magnitude) for output in node.outputs if magnitude >= _SENTINEL)
    nodes: set[str] = set()
    visited: set[str] = set()
    pending = [node.inputs[0] for node in model.graph if is_op(node, "Softmax", "LogSoftmax")]
    while pending:
        value = pending.pop()
        name = name_of(value)
        if value is None or name not in reach or name in visited:
            continue
        visited.add(name)
        maker = value.producer()
        if maker is None:  # the value is an input of the model
            continue
        nodes.update(node.name or "" for node in (maker, *(use.node for use in value.uses())))
        pending.extend(maker.inputs)
    return frozenset(nodes)


def _is_added(value: ir.Value) -> bool:
    """Return whether all readers of an input add it to a computed tensor, directly or after data movement.

    The graph does not contain the values of an input. In exported models an input that is only added is a mask, whereas
    activations are read by layers.
    """
    uses = value.uses()
    return bool(uses) and all(_adds(use.node, value) for use in uses)


def _adds(node: ir.Node, value: ir.Value) -> bool:
    if is_op(node, "Add"):
        addend = node.inputs[1] if node.inputs[0] is value else node.inputs[0]
        return addend is not None and addend.producer() is not None and constant_tensor(addend) is None
    return is_op(node, *_MOVING) and node.inputs[0] is value and _is_added(node.outputs[0])


def _reach(value: ir.Value, reach: dict[str, float]) -> float:
    tensor = constant_tensor(value)
    if tensor is None:
        return reach.get(name_of(value), 0.0)
    if tensor.dtype not in _FLOATS or not 0 < tensor.size <= _LARGEST:
        return 0.0
    values = constant_values(value)
    return float(max(values.max(), -values.min()))


_SHORT = {ir.DataType.UINT8: "u8", ir.DataType.INT8: "s8"}
SMALLEST_SUFFIX = " with -128"
"""Suffix of a kind of product. It means that at least one weight has the smallest value of its type."""


def integer_products(model: ir.Model) -> tuple[str, ...]:
    """Return the kinds of integer products in a model, each once. Examples are "Conv u8s8" (types of activation and
    weight), "MatMul s8s8 with -128" and "MatMulNBits 4 asymmetric level 4" (accuracy level 4). For Q/DQ models, these
    are the kinds that a runtime can create by fusion.
    """
    return tuple(dict.fromkeys(kind for node in every_node(model) for kind in _kinds(node)))


def _kinds(node: ir.Node) -> Iterator[str]:
    row = operator_of(node)
    if row.mac_rule == "nbits":
        points = "symmetric" if node_input(node, 3) is None else "asymmetric"
        level = node.attributes.get_int("accuracy_level", 0)
        yield f"{node.op_type} {node.attributes.get_int('bits', 4)} {points} level {level}"
    elif row.mac_rule and row.weight is not None:
        activation = "u8" if row.dynamic else _type(integers(node, 0))
        weight_integers = integers(node, row.weight)
        if activation and (weight := _type(weight_integers)):
            kind = f"{'Conv' if row.mac_rule.startswith('conv') else 'MatMul'} {activation}{weight}"
            yield kind
            values = constant(weight_integers[0])
            if weight == "s8" and values is not None and values.min(initial=0) == np.iinfo(np.int8).min:
                yield kind + SMALLEST_SUFFIX


def integers(node: ir.Node, place: int) -> tuple[ir.Value | None, ...]:
    """Return the integers at an input and their zero point, or () if the input is a float. The input may also be a
    dequantized tensor; then the integers are those before the DequantizeLinear.
    """
    for places in operator_of(node).integers:
        if places.value == place:
            return node_input(node, place), node_input(node, places.zero_point)
    value = node_input(node, place)
    maker = value.producer() if value is not None else None
    if maker is None or maker.op_type != "DequantizeLinear":
        return ()
    return maker.inputs[0], node_input(maker, 2)


def _type(values: tuple[ir.Value | None, ...]) -> str:
    """Return the short name of the 8-bit type of integers or of their zero point. Return "" for other types and for
    floats.
    """
    types = [value.dtype for value in values if value is not None and value.dtype is not None]
    if not values:
        return ""
    return _SHORT.get(types[0], "") if types else "u8"
