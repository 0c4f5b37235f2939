"""Count multiply-accumulates.

A multiply-accumulate is one product added to a sum. Biases of convolutions and element-wise operators do not count.
Symbolic and unknown sizes count as 1, so a dynamic batch counts as one sample. `assumed_shapes` makes better guesses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from edgeq.model.graph import (
    bodies,
    constant_tensor,
    node_input,
    operator_of,
)
from edgeq.model.names import node_names
from edgeq.model.shapes import infer_shapes

Shape = tuple[int, ...]
IMAGE_SIDE, LENGTH = 224, 128
_UNNAMED = "?"
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def node_macs(model: ir.Model) -> dict[str, int]:
    """Return node name → multiply-accumulates of one inference, for every node. The number is 0 if the node multiplies
    no matrices.

    Nodes in bodies of Loop and Scan count once, because the number of iterations is not known. Of the branches of an
    If, only the one with the most work counts; the others are 0. Unnamed nodes get the names that
    `edgeq.model.names.name_nodes` would give them. Shapes that are missing in the model are inferred. The quantized and
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


# `Operator.mac_rule` → function that counts the multiply-accumulates of a node. Its arguments are the node, the shapes
# of its `mac_operands`, and the shape of its output.
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


def _broadcast(a: Shape, b: Shape) -> int:
    rank = max(len(a), len(b))
    padded = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True)
    return math.prod(max(pair) for pair in padded)
