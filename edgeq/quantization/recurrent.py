"""Quantize GRU layers to integer products. The recurrence becomes a Scan, because ONNX Runtime has no integer GRU.

A step reads one small vector and all the weights, so memory limits the speed of a wide layer. Weights of a quarter of
the size save more time than the Scan's overhead costs. The equations are those of ONNX's GRU:

    z, r = sigmoid(X W_zr' + W_bias + H R_zr' + R_bias)
    n    = tanh(X W_n' + W_bias + r * (H R_n' + R_bias))    with linear_before_reset, else
    n    = tanh(X W_n' + W_bias + (r * H) R_n' + R_bias)
    H    = (1 - z) * n + z * H  =  n + z * (H - n)

X W' is one product for all steps. Every product is a DynamicQuantizeMatMul, which quantizes activations at run time.
Weights have one scale for each row of a gate, or one for each gate's matrix.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.model.edit import Editor, drop_unused_initializers, replace_value
from edgeq.model.graph import MICROSOFT, constant, is_op, node_input

MIN_MACS = 2**18
"""Smallest number of products in a step for which the Scan is faster than ONNX Runtime's float GRU. The Scan has an
overhead of 8 us a step. In measurements, the float kernel took 3.5 us for 98 thousand products and was twice as fast as
the Scan. For 960 thousand products it took 33 us, and the Scan was 1.7 times as fast."""

# Update, reset and hidden gate, in ONNX's order z, r, n.
_GATES = 3
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class IntegerWeights:
    """Set how weights become integers.

    Attributes:
        per_channel: True for one scale per output, False for one per matrix.
        limit: largest integer. With 63, one bit is left free for kernels that add two products in 16 bits.
    """

    per_channel: bool
    limit: int

    def quantize(self, matrix: Floats) -> tuple[NDArray[np.int8], Floats]:
        """Quantize a float32 matrix [inputs, outputs]. Return integers of the same shape, and scales, [outputs] or
        [].
        """
        largest = np.abs(matrix).max(axis=0 if self.per_channel else None)
        # A column of zeros needs some scale, and any scale represents zero exactly.
        scale = (np.where(largest > 0, largest, 1) / self.limit).astype(np.float32)
        return np.rint(matrix / scale).astype(np.int8), scale


def expand_grus(
    model: ir.Model, quantizer: IntegerWeights, *, exclude: Collection[str] = (), least_macs: int = MIN_MACS
) -> tuple[str, ...]:
    """Replace GRUs of the main graph with Scans over integer products, in place, if this saves time.

    Some layers do not change: narrow or excluded layers, and layers with computed weights, clipping, activation
    functions other than the default, sequence lengths or batch-first layout.

    Returns:
        Names of the replaced layers. Their new nodes are called "<name>/...".
    """
    replaced: list[str] = []
    for node in model.graph:
        layer = None if node.name in exclude else _read_layer(node, least_macs)
        if layer is not None:
            layer.expand(quantizer, model)
            replaced.append(str(node.name))
    if replaced:
        drop_unused_initializers(model.graph)
    return tuple(replaced)


@dataclass(frozen=True)
class _Direction:
    """Hold W [3 hidden, input], R [3 hidden, hidden] and both biases [3 hidden], in the gate order z, r, n."""

    w: Floats
    r: Floats
    w_bias: Floats
    r_bias: Floats
    reverse: bool


@dataclass(frozen=True)
class _Layer:
    node: ir.Node
    hidden: int
    reset_last: bool
    directions: tuple[_Direction, ...]

    def expand(self, quantizer: IntegerWeights, model: ir.Model) -> None:
        """Replace the layer by nodes that compute its outputs, except outputs that nothing reads."""
        writer = _StepWriter(str(self.node.name), Editor(model), self.node)
        states = self._initial_states(writer)
        results = [
            _scan(writer.within(str(index)), self, direction, quantizer, state)
            for index, (direction, state) in enumerate(zip(self.directions, states, strict=True))
        ]
        # Y [steps, directions, batch, hidden] contains all states. Y_h [directions, batch, hidden] contains the last
        # states.
        for output, position, axis in zip(self.node.outputs, (1, 0), (1, 0), strict=False):
            # Exporters declare both outputs and mostly read one of them.
            if output.uses() or output.is_graph_output():
                axes = writer.integers(f"axis{axis}", [axis])
                parts = [writer.node("Unsqueeze", [result[position], axes]) for result in results]
                joined = parts[0] if len(parts) == 1 else writer.node("Concat", parts, axis=axis)
                replace_value(output, joined, keep_name=True)
        model.graph.remove(self.node, safe=True)

    def _initial_states(self, writer: _StepWriter) -> list[ir.Value]:
        count = len(self.directions)
        data, initial_state = self.node.inputs[0], node_input(self.node, 5)
        if initial_state is not None:
            axis = writer.integers("axis0", [0])
            if count == 1:
                return [writer.node("Squeeze", [initial_state, axis])]
            split = writer.nodes("Split", [initial_state, writer.integers("ones", [1] * count)], count, axis=0)
            return [writer.node("Squeeze", [part, axis]) for part in split]
        batch = writer.node("Gather", [writer.node("Shape", [data]), writer.integers("axis1", [1])], axis=0)
        shape = writer.node("Concat", [batch, writer.integers("hidden", [self.hidden])], axis=0)
        return [writer.node("ConstantOfShape", [shape], value=ir.tensor(np.zeros(1, np.float32)))] * count


def _scan(
    writer: _StepWriter, layer: _Layer, direction: _Direction, quantizer: IntegerWeights, state: ir.Value
) -> Sequence[ir.Value]:
    """Return the last state [batch, hidden], and all states [steps, batch, hidden] in the order of the steps."""
    hidden = layer.hidden
    always = slice(0, _GATES * hidden if not layer.reset_last else 2 * hidden)
    w_bias, r_bias = direction.w_bias.copy(), direction.r_bias.copy()
    # Biases that are only added are added once, outside of the loop. What r multiplies must stay apart.
    w_bias[always] += r_bias[always]
    r_bias[always] = 0
    # The gates z and r are computed together: one large product is faster than two small ones.
    halves = writer.integers("zr+n", [2 * hidden, hidden])
    projected = writer.product(layer.node.inputs[0], direction.w.T, quantizer, "W", w_bias)
    x_zr, x_n = writer.nodes("Split", [projected, halves], 2, axis=-1)

    h, in_zr, in_n = (
        _row(writer.name(f"step/{name}"), size) for name, size in (("h", hidden), ("x_zr", 2 * hidden), ("x_n", hidden))
    )
    body = writer.body([h, in_zr, in_n])
    if layer.reset_last:
        h_zr, h_n = body.nodes("Split", [body.product(h, direction.r.T, quantizer, "R", r_bias), halves], 2, axis=-1)
    else:
        h_zr = body.product(h, direction.r[: 2 * hidden].T, quantizer, "R_zr")
    zr = body.node("Sigmoid", [body.node("Add", [in_zr, h_zr])])
    z, r = body.nodes("Split", [zr, writer.integers("z+r", [hidden, hidden])], 2, axis=-1)
    if layer.reset_last:
        carried = body.node("Mul", [r, h_n])
    else:
        carried = body.product(body.node("Mul", [r, h]), direction.r[2 * hidden :].T, quantizer, "R_n")
    n = body.node("Tanh", [body.node("Add", [in_n, carried])])
    new = body.node("Add", [n, body.node("Mul", [z, body.node("Sub", [h, n])])])
    # A Scan returns the state and the collected states as two outputs, which may not be the same tensor.
    for output in (new, body.node("Identity", [new])):
        output.shape, output.type = h.shape, h.type
        body.graph.outputs.append(output)
    backwards = [1 if direction.reverse else 0]
    return writer.nodes(
        "Scan",
        [state, x_zr, x_n],
        2,
        num_scan_inputs=2,
        body=body.graph,
        scan_input_directions=backwards * 2,
        scan_output_directions=backwards,
    )


class _StepWriter:
    """Create nodes whose names begin with one prefix. Constants are added to the main graph, each only once.

    Attributes:
        graph: graph that the nodes are added to: the main graph, or the body of a Scan that is not in the model yet.
    """

    def __init__(self, prefix: str, constants: Editor, successor: ir.Node | None, body: ir.Graph | None = None) -> None:
        self._prefix, self._before = prefix, successor
        self._constants = constants
        self._editor = constants if body is None else Editor(constants.model, body)
        self._count = 0
        self.graph = self._editor.graph

    def within(self, part: str) -> _StepWriter:
        """Return a maker that adds nodes to the same graph with a longer prefix."""
        return _StepWriter(self.name(part), self._constants, self._before)

    def body(self, inputs: Sequence[ir.Value]) -> _StepWriter:
        """Return a maker that adds nodes to a new body with these inputs."""
        name = self.name("step")
        return _StepWriter(name, self._constants, None, ir.Graph(inputs, [], nodes=[], name=name))

    def name(self, local: str) -> str:
        """Return `local` with the prefix."""
        return f"{self._prefix}/{local}"

    def node(self, op_type: str, inputs: Sequence[ir.Value | None], **attributes: Any) -> ir.Value:
        """Add a node and return its output."""
        return self.nodes(op_type, inputs, 1, **attributes)[0]

    def nodes(
        self, op_type: str, inputs: Sequence[ir.Value | None], count: int, **attributes: Any
    ) -> Sequence[ir.Value]:
        """Add a node and return its `count` outputs."""
        self._count += 1
        name = self.name(f"{op_type}_{self._count}")
        return self._editor.nodes(
            op_type,
            inputs,
            name,
            [name] if count == 1 else [f"{name}:{i}" for i in range(count)],
            before=self._before,
            attributes=attributes,
            domain=MICROSOFT if op_type == "DynamicQuantizeMatMul" else "",
        )

    def product(
        self, x: ir.Value | None, matrix: Floats, quantizer: IntegerWeights, local: str, bias: Floats | None = None
    ) -> ir.Value:
        """Return x [..., inputs] times matrix [inputs, outputs], plus bias [outputs]."""
        integers, scale = quantizer.quantize(matrix)
        inputs = [x, self._constant(local, integers), self._constant(f"{local}_scale", scale)]
        inputs.append(self._constant(f"{local}_zero", np.zeros(scale.shape, np.int8)))
        # The operator adds a missing bias at no cost.
        if bias is not None and bias.any():
            inputs.append(self._constant(f"{local}_bias", bias))
        return self.node("DynamicQuantizeMatMul", inputs)

    def integers(self, local: str, values: Sequence[int]) -> ir.Value:
        """Return an int64 constant with one axis."""
        return self._constant(local, np.array(values, np.int64))

    def _constant(self, local: str, values: NDArray[np.generic]) -> ir.Value:
        return self._constants.constant(self.name(local), values)


def _row(name: str, size: int) -> ir.Value:
    """Return a new input for a body, float32 [batch, size]."""
    return ir.Value(name=name, shape=ir.Shape([None, size]), type=ir.TensorType(ir.DataType.FLOAT))


def _read_layer(node: ir.Node, least_macs: int) -> _Layer | None:
    """Return the GRU layer of a node. Return None if the layer cannot be expanded or is too small to benefit."""
    attributes = node.attributes
    # The equations above hold for the default functions only.
    if not is_op(node, "GRU") or "clip" in attributes or "activations" in attributes:
        return None
    # A Scan runs along the first axis, for all sequences equally long.
    if attributes.get_int("layout", 0) or node_input(node, 4) is not None:
        return None
    w, r, b = (constant(node_input(node, place)) for place in (1, 2, 3))
    if w is None or r is None or (b is None and node_input(node, 3) is not None):
        return None
    # DynamicQuantizeMatMul has a kernel only for float32 activations, scales and biases.
    if any(weight is not None and weight.dtype != np.float32 for weight in (w, r, b)):
        return None
    count, rows, _ = w.shape
    # Narrow layers stay in float, where the overhead of a step would exceed what integers save.
    if rows * (w.shape[2] + r.shape[2]) < least_macs:
        return None
    biases = np.zeros((count, 2 * rows), np.float32) if b is None else b
    run_direction = attributes.get_string("direction", "forward")
    directions = tuple(
        _Direction(w[i], r[i], biases[i, :rows], biases[i, rows:], run_direction == "reverse" or i == 1)
        for i in range(count)
    )
    return _Layer(node, r.shape[2], bool(attributes.get_int("linear_before_reset", 0)), directions)
