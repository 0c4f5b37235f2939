"""GRU layers with integer products: the recurrence written out as a Scan, since ONNX Runtime has no integer GRU.

What a step needs is one small vector and all the weights, so a wide layer waits for memory, and weights of a quarter
of the size are worth the Scan's overhead. The equations are those of ONNX's GRU:

    z, r = sigmoid(X W_zr' + W_bias + H R_zr' + R_bias)
    n    = tanh(X W_n' + W_bias + r * (H R_n' + R_bias))    with linear_before_reset, else
    n    = tanh(X W_n' + W_bias + (r * H) R_n' + R_bias)
    H    = (1 - z) * n + z * H  =  n + z * (H - n)

X W' is one product for all steps. Every product is a DynamicQuantizeMatMul: activations are quantized at run time,
weights per gate row or per gate matrix.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from edgeq.model.tensors import iter_graphs

LEAST_MACS = 2**18
"""Products of a step from which the Scan is faster than ONNX Runtime's float GRU. Measured: 8 us of overhead a step;
the float kernel takes 3.5 us for 98 thousand (half the Scan's speed) and 33 us for 960 thousand (1.7 times slower)."""

_DOMAIN = "com.microsoft"
_GATES = 3
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class IntegerWeights:
    """How weights become integers.

    Attributes:
        per_channel: one scale per output, else one per matrix.
        limit: the largest integer; 63 leaves room where kernels add two products in 16 bits.
    """

    per_channel: bool
    limit: int

    def quantize(self, matrix: Floats) -> tuple[NDArray[np.int8], Floats]:
        """[inputs, outputs] float32 → integers of that shape, and scales [outputs] or []."""
        largest = np.abs(matrix).max(axis=0 if self.per_channel else None)
        scale = (np.where(largest > 0, largest, 1) / self.limit).astype(np.float32)
        return np.rint(matrix / scale).astype(np.int8), scale


def expand_grus(
    model: onnx.ModelProto, how: IntegerWeights, *, exclude: Collection[str] = (), least_macs: int = LEAST_MACS
) -> tuple[str, ...]:
    """Replace, in place, each GRU of the main graph that gains by it with a Scan over integer products.

    Left alone: layers that are narrow, excluded or of computed weights, and those with clipping, activations of their
    own, sequence lengths or batch-first layout. Weights must be in memory.

    Returns:
        Names of the layers replaced. The nodes made of one are called "<name>/...".
    """
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    replaced: list[str] = []
    nodes: list[NodeProto] = []
    needed = {name for part in iter_graphs(graph) for node in part.node for name in node.input}
    needed.update(output.name for output in graph.output)
    for node in graph.node:
        layer = None if node.name in exclude else _read(node, constants, least_macs)
        if layer is None:
            nodes.append(node)
            continue
        nodes += layer.expand(how, graph, needed)
        replaced.append(node.name)
    if replaced:
        del graph.node[:]
        graph.node.extend(nodes)
        _drop_unused(graph)
        if all(entry.domain != _DOMAIN for entry in model.opset_import):
            model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
    return tuple(replaced)


@dataclass(frozen=True)
class _Direction:
    """W [3 hidden, input], R [3 hidden, hidden] and both biases [3 hidden], in the gate order z, r, n."""

    w: Floats
    r: Floats
    w_bias: Floats
    r_bias: Floats
    reverse: bool


@dataclass(frozen=True)
class _Layer:
    node: NodeProto
    hidden: int
    reset_last: bool
    directions: tuple[_Direction, ...]

    def expand(self, how: IntegerWeights, graph: onnx.GraphProto, needed: Collection[str]) -> list[NodeProto]:
        """The nodes that stand for the layer and give those of its outputs that are needed; their constants are added
        to `graph`."""
        made = _Maker(self.node.name, graph)
        states = self._initial_states(made)
        results = [
            _scan(made.within(str(index)), self, direction, how, state)
            for index, (direction, state) in enumerate(zip(self.directions, states, strict=True))
        ]
        # Y [steps, directions, batch, hidden] of all states, Y_h [directions, batch, hidden] of the last ones.
        for output, position, axis in zip(self.node.output, (1, 0), (1, 0), strict=False):
            if output in needed:
                axes = made.integers(f"axis{axis}", [axis])
                one = [output] if len(results) == 1 else []
                parts = [made.node("Unsqueeze", [result[position], axes], outputs=one) for result in results]
                if not one:
                    made.node("Concat", parts, outputs=[output], axis=axis)
        return made.nodes

    def _initial_states(self, made: _Maker) -> list[str]:
        count = len(self.directions)
        if len(self.node.input) > 5 and self.node.input[5]:
            axis = made.integers("axis0", [0])
            if count == 1:
                return [made.node("Squeeze", [self.node.input[5], axis])]
            split = made.node_of("Split", [self.node.input[5], made.integers("ones", [1] * count)], count, axis=0)
            return [made.node("Squeeze", [part, axis]) for part in split]
        batch = made.node("Gather", [made.node("Shape", [self.node.input[0]]), made.integers("axis1", [1])], axis=0)
        shape = made.node("Concat", [batch, made.integers("hidden", [self.hidden])], axis=0)
        zero = numpy_helper.from_array(np.zeros(1, np.float32))
        return [made.node("ConstantOfShape", [shape], value=zero)] * count


def _scan(made: _Maker, layer: _Layer, direction: _Direction, how: IntegerWeights, state: str) -> tuple[str, str]:
    """Last state [batch, hidden] and all states [steps, batch, hidden], in the order of the steps."""
    hidden = layer.hidden
    always = slice(0, _GATES * hidden if not layer.reset_last else 2 * hidden)
    w_bias, r_bias = direction.w_bias.copy(), direction.r_bias.copy()
    w_bias[always] += r_bias[always]
    r_bias[always] = 0
    halves = made.integers("zr+n", [2 * hidden, hidden])
    projected = made.product(layer.node.input[0], direction.w.T, how, "W", w_bias)
    x_zr, x_n = made.node_of("Split", [projected, halves], 2, axis=-1)

    body = made.body()
    h, in_zr, in_n = body.name("h"), body.name("x_zr"), body.name("x_n")
    if layer.reset_last:
        h_zr, h_n = body.node_of("Split", [body.product(h, direction.r.T, how, "R", r_bias), halves], 2, axis=-1)
    else:
        h_zr = body.product(h, direction.r[: 2 * hidden].T, how, "R_zr")
    zr = body.node("Sigmoid", [body.node("Add", [in_zr, h_zr])])
    z, r = body.node_of("Split", [zr, made.integers("z+r", [hidden, hidden])], 2, axis=-1)
    if layer.reset_last:
        carried = body.node("Mul", [r, h_n])
    else:
        carried = body.product(body.node("Mul", [r, h]), direction.r[2 * hidden :].T, how, "R_n")
    n = body.node("Tanh", [body.node("Add", [in_n, carried])])
    new = body.node("Add", [n, body.node("Mul", [z, body.node("Sub", [h, n])])])
    kept = body.node("Identity", [new])
    graph = body.graph([h, in_zr, in_n], [new, kept], sizes=[hidden, 2 * hidden, hidden])
    backwards = [1 if direction.reverse else 0]
    last, states = made.node_of(
        "Scan",
        [state, x_zr, x_n],
        2,
        num_scan_inputs=2,
        body=graph,
        scan_input_directions=backwards * 2,
        scan_output_directions=backwards,
    )
    return last, states


class _Maker:
    """Collects nodes with names below one prefix; constants go to the main graph, once each."""

    def __init__(self, prefix: str, graph: onnx.GraphProto) -> None:
        self._prefix = prefix
        self._graph = graph
        self._count = 0
        self.nodes: list[NodeProto] = []

    def within(self, part: str) -> _Maker:
        inner = _Maker(f"{self._prefix}/{part}", self._graph)
        inner.nodes = self.nodes
        return inner

    def body(self) -> _Maker:
        """Nodes of its own, constants of the main graph."""
        return _Maker(f"{self._prefix}/step", self._graph)

    def name(self, local: str) -> str:
        return f"{self._prefix}/{local}"

    def node(self, op_type: str, inputs: Sequence[str], *, outputs: Sequence[str] = (), **attributes: Any) -> str:
        return self.node_of(op_type, inputs, 1, outputs=outputs, **attributes)[0]

    def node_of(
        self, op_type: str, inputs: Sequence[str], count: int, *, outputs: Sequence[str] = (), **attributes: Any
    ) -> list[str]:
        self._count += 1
        name = self.name(f"{op_type}_{self._count}")
        made = list(outputs) or [name if count == 1 else f"{name}:{i}" for i in range(count)]
        domain = _DOMAIN if op_type == "DynamicQuantizeMatMul" else ""
        self.nodes.append(helper.make_node(op_type, inputs, made, name=name, domain=domain, **attributes))
        return made

    def product(self, x: str, matrix: Floats, how: IntegerWeights, local: str, bias: Floats | None = None) -> str:
        """x [..., inputs] times matrix [inputs, outputs], plus bias [outputs]."""
        integers, scale = how.quantize(matrix)
        inputs = [x, self.constant(local, integers), self.constant(f"{local}_scale", scale)]
        inputs.append(self.constant(f"{local}_zero", np.zeros(scale.shape, np.int8)))
        if bias is not None and bias.any():
            inputs.append(self.constant(f"{local}_bias", bias))
        return self.node("DynamicQuantizeMatMul", inputs)

    def integers(self, local: str, values: Sequence[int]) -> str:
        return self.constant(local, np.array(values, np.int64))

    def constant(self, local: str, values: NDArray[np.generic]) -> str:
        name = self.name(local)
        if all(tensor.name != name for tensor in self._graph.initializer):
            self._graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def graph(self, inputs: Sequence[str], outputs: Sequence[str], sizes: Sequence[int]) -> onnx.GraphProto:
        """The collected nodes as a Scan's body; inputs [batch, size], outputs [batch, first size]."""

        def value(name: str, size: int) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, size])

        ins = [value(name, size) for name, size in zip(inputs, sizes, strict=True)]
        return helper.make_graph(self.nodes, self._prefix, ins, [value(name, sizes[0]) for name in outputs])


def _read(node: NodeProto, constants: dict[str, TensorProto], least_macs: int) -> _Layer | None:
    if node.op_type != "GRU" or node.domain not in ("", "ai.onnx"):
        return None
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    inputs = [*node.input, *[""] * (6 - len(node.input))]
    if "clip" in attributes or "activations" in attributes or attributes.get("layout", 0) or inputs[4]:
        return None
    weights = [constants.get(name) for name in inputs[1:4]]
    if weights[0] is None or weights[1] is None or (weights[2] is None and inputs[3]):
        return None
    if any(tensor is not None and tensor.data_type != TensorProto.FLOAT for tensor in weights):
        return None
    w, r, b = (None if tensor is None else numpy_helper.to_array(tensor) for tensor in weights)
    assert w is not None
    assert r is not None
    count, rows, _ = w.shape
    if rows * (w.shape[2] + r.shape[2]) < least_macs:
        return None
    biases = np.zeros((count, 2 * rows), np.float32) if b is None else b
    run_direction = attributes.get("direction", b"forward").decode()
    directions = tuple(
        _Direction(w[i], r[i], biases[i, :rows], biases[i, rows:], run_direction == "reverse" or i == 1)
        for i in range(count)
    )
    return _Layer(node, r.shape[2], bool(attributes.get("linear_before_reset", 0)), directions)


def _drop_unused(graph: onnx.GraphProto) -> None:
    used = {name for part in iter_graphs(graph) for node in part.node for name in node.input}
    used.update(output.name for output in graph.output)
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
