"""Draw random small graphs with the features of users' models.

These are shared weights, tensors with several readers, tensors that are also outputs, bodies that read from outside,
layers without bias, grouped layers, and layers with zero to three spatial axes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from edgeq.model.convert import to_proto
from edgeq.model.graph import name_of
from tests.tuning.recover.nets import Net

CHANNELS = 4
_SIZE = 5

_LAYERS = ("layer", "layer without bias", "grouped", "depthwise", "shared weights", "shared bias")
_OTHERS = ("relu", "leaky relu", "clip", "silu", "gelu", "hard swish", "square", "add", "multiply", "if", "softmax")


@st.composite
def nets(draw: Any, *, axes: int | None = None, chain: tuple[str, ...] = ()) -> tuple[ir.Model, dict[str, np.ndarray]]:
    """Draw (model, inputs). All tensors have the shape of the input: [N, 4, 5 ...] with `axes` spatial axes.

    Args:
        axes: number of spatial axes; None for 0 to 3.
        chain: kinds of nodes that follow each other somewhere in the model; "layer" for a layer of any kind.
    """
    net = Net(draw(st.integers(0, 10**6)))
    spatial = draw(st.integers(0, 3)) if axes is None else axes
    tensors = ["x"]
    kinds = st.sampled_from((*_LAYERS, *_OTHERS))
    before, behind = (draw(st.lists(kinds, max_size=3)) for _ in range(2))
    if not (before or chain or behind):
        before = [draw(kinds)]
    for place, kind in enumerate([*before, *chain, *behind]):
        linked = len(before) < place < len(before) + len(chain)
        source = tensors[-1] if linked or draw(st.booleans()) else draw(st.sampled_from(tensors))
        if kind == "layer":
            kind = draw(st.sampled_from(_LAYERS))
        name = f"t{place}"
        if kind in _LAYERS:
            _layer(draw, net, kind, source, name, spatial)
        else:
            _other(draw, net, kind, source, draw(st.sampled_from(tensors)), name)
        tensors.append(name)
    outputs = [tensors[-1], *draw(st.lists(st.sampled_from(tensors[1:]), max_size=1))]
    batch = draw(st.sampled_from([1, 2, "N"]))
    shape = [batch, CHANNELS, *[_SIZE] * spatial]
    model = net.model({"x": shape}, list(dict.fromkeys(outputs)))
    sizes = [2 if isinstance(s, str) else s for s in shape]
    return model, {"x": net.random.normal(0, 1, sizes).astype(np.float32)}


def _layer(draw: Any, net: Net, kind: str, source: str, name: str, spatial: int) -> None:
    groups = {"grouped": 2, "depthwise": CHANNELS}.get(kind, 1) if spatial else 1
    kernel = [3] * spatial
    attributes: dict[str, Any] = {}
    if spatial:
        op_type, shape = "Conv", (CHANNELS, CHANNELS // groups, *kernel)
        attributes = {"group": groups, "pads": [1] * 2 * spatial}
    else:
        op_type, shape = ("MatMul" if kind == "layer without bias" else "Gemm"), (CHANNELS, CHANNELS)
        if op_type == "Gemm":
            attributes = {"transB": draw(st.sampled_from([0, 1]))}
    weight, bias = f"{name}_w", f"{name}_b"
    fitting = [t.name for t in net.weights if t.name.endswith("_w") and tuple(t.dims) == shape]
    biases = [t.name for t in net.weights if t.name.endswith("_b") and tuple(t.dims) == (CHANNELS,)]
    if kind == "shared weights" and fitting:
        weight = draw(st.sampled_from(fitting))
    else:
        net.constant(weight, net.random.normal(0, 0.4, shape))
    inputs = [source, weight]
    if kind != "layer without bias":
        if kind == "shared bias" and biases:
            bias = draw(st.sampled_from(biases))
        elif op_type == "Gemm" and draw(st.booleans()):
            net.constant(bias, net.random.normal(size=draw(st.sampled_from([(), (1,), (1, CHANNELS)]))))
        else:
            net.constant(bias, net.random.normal(0, 0.3, CHANNELS))
        inputs.append(bias)
    net.nodes.append(helper.make_node(op_type, inputs, [name], name=f"{name}_{op_type}", **attributes))


def _other(draw: Any, net: Net, kind: str, a: str, b: str, name: str) -> None:
    if kind == "relu":
        net.node("Relu", [a], name)
    elif kind == "leaky relu":
        net.node("LeakyRelu", [a], name, alpha=0.1)
    elif kind == "clip":
        net.node("Clip", [a, net.constant(f"{name}_low", 0.0), net.constant(f"{name}_high", 6.0)], name)
    elif kind == "silu":
        gate = net.node("Sigmoid", [a], f"{name}_gate")
        net.node("Mul", [a, gate] if draw(st.booleans()) else [gate, a], name)
    elif kind == "gelu":
        scaled = net.node("Div", [a, net.constant(f"{name}_root", 2**0.5)], f"{name}_scaled")
        opened = net.node(
            "Add", [net.node("Erf", [scaled], f"{name}_erf"), net.constant(f"{name}_one", [1.0])], f"{name}_1"
        )
        net.node("Mul", [net.node("Mul", [a, opened], f"{name}_twice"), net.constant(f"{name}_half", 0.5)], name)
    elif kind == "hard swish":
        net.node("HardSwish", [a], name)
    elif kind == "square":
        net.node("Mul", [a, a], name)
    elif kind in ("add", "multiply"):
        net.node({"add": "Add", "multiply": "Mul"}[kind], [a, b], name)
    elif kind == "softmax":
        net.node("Softmax", [a], name, axis=1)
    else:
        branches = [_body("Sigmoid", a, f"{name}_then"), _body("Neg", a, f"{name}_else")]
        net.weights.append(numpy_helper.from_array(np.array(draw(st.booleans())), f"{name}_cond"))
        node = helper.make_node("If", [f"{name}_cond"], [name], name=f"{name}_If")
        node.attribute.extend(
            helper.make_attribute(key, body) for key, body in zip(("then_branch", "else_branch"), branches, strict=True)
        )
        net.nodes.append(node)


def _body(op_type: str, outer: str, name: str) -> onnx.GraphProto:
    """Return a body that reads a tensor from outside."""
    made = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
    return helper.make_graph([helper.make_node(op_type, [outer], [name], name=name)], name, [], [made])


def tensors_of(model: ir.Model, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return all tensors of the main graph."""
    from edgeq.run.session import SessionSettings, open_session

    names = [name_of(value) for node in model.graph for value in node.outputs]
    observed = to_proto(model)
    present = {output.name for output in observed.graph.output}
    observed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in present)
    session = open_session(observed.SerializeToString(), SessionSettings(optimization="none", intra_op_threads=1))
    return {**feed, **dict(zip(names, session.run(names, feed), strict=True))}
