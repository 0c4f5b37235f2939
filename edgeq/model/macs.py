"""Multiply-accumulates of each node: what share of the work a node is.

A multiply-accumulate is one product added to a sum; a convolution's bias and element-wise operators count nothing.
Sizes that are symbolic or unknown count as 1, so a dynamic batch counts one sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import onnx

from edgeq.model.names import name_nodes
from edgeq.model.shapes import infer_shapes
from edgeq.model.skeleton import skeleton
from edgeq.model.tensors import iter_graphs

Shape = tuple[int, ...]


def node_macs(model: onnx.ModelProto) -> dict[str, int]:
    """Node name → multiply-accumulates of one inference, for every node, 0 for those that multiply no matrices.

    Nodes of If, Loop and Scan bodies count once: how often they run is not known. Unnamed nodes get the names that
    `edgeq.model.names.name_nodes` would give them. Shapes come from the model; where it has none they are inferred.
    Also counts the quantized and fused forms that ONNX Runtime rewrites layers to.
    """
    if not _all_named(model):
        copy = skeleton(model)
        name_nodes(copy)
        model = copy
    shapes = _known_shapes(model)
    counts: dict[str, int] = {}
    for graph in iter_graphs(model.graph):
        for node in graph.node:
            rule = _RULES.get(node.op_type)
            counts[node.name] = rule(node, shapes) if rule else 0
    return counts


def _conv(node: onnx.NodeProto, shapes: Mapping[str, Shape], weight_at: int = 1) -> int:
    # Each output element is a dot product over (C_in / groups) × kernel.
    weight = shapes.get(_input(node, weight_at), ())
    output = shapes.get(node.output[0], ())
    if not weight:
        return 0
    if not output:
        return math.prod(weight)
    per_output = math.prod(weight[1:])
    if _attribute(node, "channels_last", 0):
        return math.prod(output) * per_output
    # Channels come from the weight: shape inference knows it even where the output's size is symbolic.
    return output[0] * weight[0] * math.prod(output[2:]) * per_output


def _conv_transpose(node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> int:
    # Each input element is spread over (C_out / groups) × kernel outputs.
    weight = shapes.get(_input(node, 1), ())
    data = shapes.get(_input(node, 0), ())
    if not weight:
        return 0
    return (data[0] * math.prod(data[2:]) if len(data) > 2 else 1) * math.prod(weight)


def _matmul(node: onnx.NodeProto, shapes: Mapping[str, Shape], a_at: int = 0, b_at: int = 1) -> int:
    a, b = shapes.get(_input(node, a_at), ()), shapes.get(_input(node, b_at), ())
    if not a or not b:
        return math.prod(a) * math.prod(b)
    if _attribute(node, "transA", 0) and len(a) > 1:
        a = (*a[:-2], a[-1], a[-2])
    if _attribute(node, "transB", 0) and len(b) > 1:
        b = (*b[:-2], b[-1], b[-2])
    rows = a[-2] if len(a) > 1 else 1
    columns = b[-1] if len(b) > 1 else 1
    # One of the two may know the inner size where the other is symbolic.
    inner = max(a[-1], b[-2] if len(b) > 1 else b[0])
    return _broadcast(a[:-2], b[:-2]) * rows * columns * inner


def _recurrent(gates: int) -> Callable[[onnx.NodeProto, Mapping[str, Shape]], int]:
    def count(node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> int:
        # X [sequence, batch, input], W [directions, gates × hidden, input], R [directions, gates × hidden, hidden];
        # DynamicQuantizeLSTM has W and R with their last two dimensions swapped, which leaves the products alone.
        data, weight = shapes.get(_input(node, 0), ()), shapes.get(_input(node, 1), ())
        hidden = _attribute(node, "hidden_size", 0)
        if len(weight) != 3 or not hidden:
            return 0
        recurrent = weight[0] * gates * hidden * hidden
        return math.prod(data[:2]) * (math.prod(weight) + recurrent)

    return count


def _einsum(node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> int:
    # Of two operands: each combination of all labels is one product. Ellipses are not resolved.
    equation = next((a.s.decode() for a in node.attribute if a.name == "equation"), "").replace(" ", "")
    terms = equation.split("->")[0].split(",")
    if len(terms) < 2 or "..." in equation:
        return 0
    sizes: dict[str, int] = {}
    for term, name in zip(terms, node.input, strict=False):
        for label, size in zip(term, shapes.get(name, ()), strict=False):
            sizes[label] = max(size, sizes.get(label, 1))
    return math.prod(sizes.values()) * (len(terms) - 1)


def _attention(node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> int:
    # ONNX Attention: Q [batch, heads, q, d] or [batch, q, heads × d]; products Q K^T and (weights) V.
    q, k, v = (shapes.get(_input(node, i), ()) for i in range(3))
    if len(q) < 3 or len(k) < 3 or len(v) < 3:
        return 0
    if len(q) == 4:
        return q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])
    query_heads = _attribute(node, "q_num_heads", _attribute(node, "num_heads", 1))
    value_heads = _attribute(node, "kv_num_heads", query_heads) or 1
    return q[0] * q[1] * k[1] * (q[2] + v[2] // value_heads * query_heads)


def _fused_attention(node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> int:
    # com.microsoft Attention and QAttention: input [batch, sequence, in], weights [in, 3 × hidden], then as above.
    data, weight = shapes.get(_input(node, 0), ()), shapes.get(_input(node, 1), ())
    if len(data) != 3 or len(weight) != 2:
        return 0
    batch, sequence, _ = data
    return batch * sequence * math.prod(weight) + 2 * batch * sequence * sequence * (weight[1] // 3)


def _any_attention(node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> int:
    return _fused_attention(node, shapes) if node.domain == "com.microsoft" else _attention(node, shapes)


def _matmul_nbits(node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> int:
    data = shapes.get(_input(node, 0), ())
    return math.prod(data[:-1]) * _attribute(node, "K", 0) * _attribute(node, "N", 0)


_RULES: dict[str, Callable[[onnx.NodeProto, Mapping[str, Shape]], int]] = {
    "Conv": _conv,
    "FusedConv": _conv,
    "NhwcFusedConv": _conv,
    "ConvInteger": _conv,
    "ConvIntegerToFloat": _conv,
    "QLinearConv": lambda node, shapes: _conv(node, shapes, 3),
    "ConvTranspose": _conv_transpose,
    "Gemm": _matmul,
    "FusedGemm": _matmul,
    "QGemm": lambda node, shapes: _matmul(node, shapes, 0, 3),
    "MatMul": _matmul,
    "FusedMatMul": _matmul,
    "MatMulInteger": _matmul,
    "MatMulIntegerToFloat": _matmul,
    "DynamicQuantizeMatMul": _matmul,
    "QLinearMatMul": lambda node, shapes: _matmul(node, shapes, 0, 3),
    "MatMulNBits": _matmul_nbits,
    "RNN": _recurrent(1),
    "GRU": _recurrent(3),
    "LSTM": _recurrent(4),
    "DynamicQuantizeLSTM": _recurrent(4),
    "Einsum": _einsum,
    "Attention": _any_attention,
    "MultiHeadAttention": _attention,
    "QAttention": _fused_attention,
}


def _known_shapes(model: onnx.ModelProto) -> dict[str, Shape]:
    listed = [*model.graph.input, *model.graph.value_info, *model.graph.output]
    values = {v.name: v for v in listed if v.type.tensor_type.HasField("shape")}
    if any(o and o not in values for node in model.graph.node for o in node.output):
        values.update(infer_shapes(model)[0])
    for graph in iter_graphs(model.graph):
        if graph is not model.graph:
            values.update((v.name, v) for v in [*graph.input, *graph.value_info, *graph.output])
    shapes = {
        name: tuple(d.dim_value if d.dim_value > 0 else 1 for d in v.type.tensor_type.shape.dim)
        for name, v in values.items()
        if v.type.tensor_type.HasField("shape")
    }
    for graph in iter_graphs(model.graph):
        shapes.update((t.name, tuple(t.dims)) for t in graph.initializer)
        for node in graph.node:
            if node.op_type == "Constant":
                shapes.update((node.output[0], tuple(a.t.dims)) for a in node.attribute if a.name == "value")
    return shapes


def _broadcast(a: Shape, b: Shape) -> int:
    rank = max(len(a), len(b))
    padded = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True)
    return math.prod(max(pair) for pair in padded)


def _input(node: onnx.NodeProto, index: int) -> str:
    return node.input[index] if index < len(node.input) else ""


def _attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((int(a.i) for a in node.attribute if a.name == name), default)


def _all_named(model: onnx.ModelProto) -> bool:
    names = [node.name for graph in iter_graphs(model.graph) for node in graph.node]
    return all(names) and len(set(names)) == len(names)
