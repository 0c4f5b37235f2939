"""Provide small models of every kind that users of the older tools have: old and new opsets, 16-bit floats, subgraphs,
nodes without names, weights among the inputs, quantized models.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from tests.graphs import proto

SIZE = 8
KINDS = ("plain", "half", "unnamed", "weights as inputs", "if", "loop")
MIDDLE = {
    # An optimiser cannot fold it, because it depends on the input.
    "if": """
        [top] top = ReduceMax<keepdims = 0>(x)
        [choice] choice = Cast<to = 9>(top)
        [condition] condition = Or(choice, always)
        [if] r = If(condition)<
            then_branch = then () => (SHAPE inner) { [then_relu] inner = Relu(n) },
            else_branch = else () => (SHAPE inner) { [else_neg] inner = Neg(n) }
        >""",
    "loop": """
        [loop] r = Loop(times, go, n)<
            body = body (int64 i, bool on, SHAPE carried) => (bool on_out, SHAPE inner) {
                [keep_on] on_out = Identity(on)
                [body_relu] inner = Relu(carried)
            }
        >""",
}
"""From n to r, where that is not a Relu of its own."""
CONSTANTS = {"if": {"always": np.True_}, "loop": {"times": np.int64(2), "go": np.True_}}
MATRIX = [(kind, opset) for kind in KINDS for opset in range(9, 24)]


def classifier(path: Path, *, opset: int = 17, kind: str = "plain") -> Path:
    """Write Conv, BatchNormalization, Relu, MaxPool, pooling and a Gemm over [N, 3, 8, 8], with four scores."""
    random = np.random.default_rng(0)
    float_type = np.float16 if kind == "half" else np.float32
    element = "float16" if kind == "half" else "float"
    weights = {
        "w": random.normal(0, 0.2, (8, 3, 3, 3)),
        "b": random.normal(0, 0.1, 8),
        "bn.scale": random.uniform(0.5, 1.5, 8),
        "bn.bias": random.normal(0, 0.1, 8),
        "bn.mean": random.normal(0, 0.1, 8),
        "bn.var": random.uniform(0.5, 2, 8),
        "fc": random.normal(0, 0.3, (8, 4)),
        "fc.bias": random.normal(0, 0.1, 4),
    }
    shape = f"{element}[N, 8, {SIZE}, {SIZE}]"
    body = f"""g ({element}[N, 3, {SIZE}, {SIZE}] x) => ({element}[N, 4] y) {{
        [conv] c = Conv<pads = [1, 1, 1, 1]>(x, w, b)
        [bn] n = BatchNormalization(c, "bn.scale", "bn.bias", "bn.mean", "bn.var")
        {MIDDLE.get(kind, "[relu] r = Relu(n)").replace("SHAPE", shape)}
        [pool] p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r)
        [gap] g = GlobalAveragePool(p)
        [flatten] f = Flatten(g)
        [gemm] y = Gemm(f, fc, "fc.bias")
    }}"""
    ir_version = helper.find_min_ir_version_for([helper.make_opsetid("", opset)])
    if kind == "weights as inputs" and opset < 10:
        ir_version = 3
    constants = {name: values.astype(float_type) for name, values in weights.items()} | CONSTANTS.get(kind, {})
    model = proto(body, constants, opset=opset, ir_version=ir_version)
    if kind == "unnamed":
        for node in model.graph.node:
            node.name = ""
    if kind == "weights as inputs":
        held = model.graph.initializer
        model.graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in held)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def batch(index: int = 0, *, rows: int = 2, dtype: type = np.float32) -> NDArray[np.floating]:
    return np.random.default_rng(index).normal(size=(rows, 3, SIZE, SIZE)).astype(dtype)


class Reader:
    """Provide only get_next, as users write readers."""

    def __init__(self, count: int = 3, dtype: type = np.float32) -> None:
        self._feeds = iter([{"x": batch(index, dtype=dtype)} for index in range(count)])

    def get_next(self) -> dict[str, NDArray[np.floating]] | None:
        return next(self._feeds, None)
