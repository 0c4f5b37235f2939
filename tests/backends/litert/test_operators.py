"""Test each operator alone, on random integers, in each runtime, against the formula of QuantizeLinear."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeq.backends.litert.rules import check_kernels
from edgeq.errors import ModelError
from edgeq.run.session import SessionSettings, open_session
from tests.backends.litert.files import (
    MICRO,
    RUNTIMES,
    network_of,
    quantized,
    run,
    skip_what_the_portable_kernels_lack,
)
from tests.graphs import proto

RANDOM = np.random.default_rng(0)
SIGMOID, TANH = (1 / 256, -128), (1 / 128, 0)
X, Y = (0.031, -7), (0.043, 11)
IMAGE = [1, 4, 7, 9]
DOWN = "floor"


def floats(*shape: int) -> NDArray[np.float32]:
    """Return random weights."""
    return RANDOM.normal(0, 0.4, shape).astype(np.float32)


def integers(*values: int) -> NDArray[np.int64]:
    """Return int64 values for a shape, axes or indices."""
    return np.array(values, np.int64)


@dataclass(frozen=True)
class Case:
    """Hold a node and its inputs.

    Attributes:
        axis: the axis of the scales of its weights.
        lacking: True if TFLite Micro has no kernel for it.
        share: the least share of results that must equal the formula's; the others may differ by at most `apart`.
    """

    node: str
    output: list[int]
    inputs: dict[str, list[int]] = field(default_factory=lambda: {"x": IMAGE})
    constants: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    plain: dict[str, NDArray[Any]] = field(default_factory=dict)
    x: tuple[float, int] = X
    y: tuple[float, int] = Y
    share: float = 1.0
    apart: int = 1
    axis: int = 0
    opset: int = 17
    lacking: bool = False


TWO = {"x": IMAGE, "a": IMAGE}
WIDE, LONG = [1, 4, 8, 8], {"x": [1, 4, 8, 8]}
CASES = {
    "conv": Case(
        "y = Conv<pads=[1,1,1,1]>(x, w, b)",
        [1, 6, 7, 9],
        constants={"w": floats(6, 4, 3, 3), "b": floats(6)},
        share=0.99,
    ),
    "conv uneven pads": Case(
        "y = Conv<pads=[2,0,1,3], strides=[2,3], dilations=[1,2]>(x, w, b)",
        [1, 6, 4, 3],
        constants={"w": floats(6, 4, 3, 3), "b": floats(6)},
        share=0.97,
    ),
    "conv in groups": Case(
        "y = Conv<group=2>(x, w, b)", [1, 6, 5, 7], constants={"w": floats(6, 2, 3, 3), "b": floats(6)}, share=0.98
    ),
    "depthwise": Case(
        "y = Conv<pads=[1,1,1,1], strides=[2,2], group=4>(x, w, b)",
        [1, 8, 4, 5],
        constants={"w": floats(8, 1, 3, 3), "b": floats(8)},
        share=0.97,
    ),
    "conv of a sequence": Case(
        "y = Conv<pads=[1,1]>(x, w, b)",
        [1, 6, 12],
        {"x": [1, 4, 12]},
        constants={"w": floats(6, 4, 3), "b": floats(6)},
        share=0.95,
    ),
    "transposed conv": Case(
        "y = ConvTranspose<strides=[2,2], pads=[1,1,0,0]>(x, w)",
        [1, 3, 14, 18],
        constants={"w": floats(4, 3, 3, 3)},
        axis=1,
        share=0.9,
    ),
    "gemm": Case(
        "y = Gemm<transB=1>(x, w, b)",
        [1, 20],
        {"x": [1, 30]},
        constants={"w": floats(20, 30), "b": floats(20)},
        share=0.9,
    ),
    "flat gemm": Case(
        "f = Flatten(x)\ny = Gemm<transB=1>(f, w, b)",
        [1, 20],
        constants={"w": floats(20, 252), "b": floats(20)},
        y=(0.2, 0),
        share=0.9,
    ),
    "add": Case("y = Add(x, a)", IMAGE, TWO, share=0.97),
    "add a constant": Case("y = Add(x, c)", IMAGE, constants={"c": floats(4, 1, 1)}, share=0.97),
    "mul by a constant": Case("y = Mul(x, c)", IMAGE, constants={"c": floats(1, 4, 7, 1)}, share=0.9),
    "add broadcast": Case("y = Add(x, a)", IMAGE, {"x": IMAGE, "a": [4, 1, 1]}, share=0.97),
    "sub": Case("y = Sub(x, a)", IMAGE, TWO, share=0.97),
    "mul": Case("y = Mul(x, a)", IMAGE, TWO, y=(0.1, 3), share=0.96),
    "mul gate": Case("y = Mul(x, a)", IMAGE, {"x": IMAGE, "a": [1, 4, 1, 1]}, y=(0.1, 3), share=0.96),
    "max": Case("y = Max(x, a)", IMAGE, TWO, y=X, share=0.9),
    "min": Case("y = Min(x, a)", IMAGE, TWO, y=X, share=0.9),
    "sigmoid": Case("y = Sigmoid(x)", IMAGE, y=SIGMOID),
    "tanh": Case("y = Tanh(x)", IMAGE, y=TANH),
    "softmax": Case("y = Softmax<axis=1>(x)", IMAGE, y=SIGMOID, share=0.99),
    "hard swish": Case("y = HardSwish(x)", IMAGE, share=0.9),
    "hard sigmoid": Case("y = HardSigmoid<alpha=0.16666667>(x)", IMAGE, y=(1 / 255, -128), share=0.9),
    "leaky relu": Case("y = LeakyRelu<alpha=0.1>(x)", IMAGE, share=0.9),
    "prelu": Case("y = PRelu(x, slope)", IMAGE, constants={"slope": floats(4, 1, 1)}, share=0.9),
    "relu": Case("y = Relu(x)", IMAGE, y=X),
    "relu6": Case("y = Clip(x, low, high)", IMAGE, plain={"low": np.float32(0), "high": np.float32(2)}, y=X),
    "max pool": Case("y = MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(x)", [1, 4, 4, 5], y=X),
    "max pool ceil": Case(
        "y = MaxPool<kernel_shape=[3,3], strides=[2,2], ceil_mode=1>(x)", [1, 4, 4, 4], {"x": [1, 4, 8, 8]}, y=X
    ),
    "average pool": Case("y = AveragePool<kernel_shape=[4,4]>(x)", [1, 4, 4, 6], y=X, share=0.9),
    "average pool counting pads": Case(
        "y = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1>(x)", IMAGE, y=X, share=0.85
    ),
    "global average": Case("y = GlobalAveragePool(x)", [1, 4, 1, 1], y=(0.005, 3), share=0.0),
    "mean": Case("y = ReduceMean<axes=[2,3], keepdims=0>(x)", [1, 4], y=(0.005, 3), share=0.0),
    "concat": Case("y = Concat<axis=1>(x, a)", [1, 8, 7, 9], TWO, share=0.85),
    "pad": Case("y = Pad(x, p)", [1, 4, 10, 10], plain={"p": integers(0, 0, 1, 0, 0, 0, 2, 1)}, y=X),
    "pad with a number": Case(
        "y = Pad(x, p, v)", [1, 5, 7, 9], plain={"p": integers(0, 1, 0, 0, 0, 0, 0, 0), "v": np.float32(0.5)}, y=X
    ),
    "reflect": Case('y = Pad<mode="reflect">(x, p)', [1, 4, 9, 9], plain={"p": integers(0, 0, 1, 0, 0, 0, 1, 0)}, y=X),
    "slice": Case(
        "y = Slice(x, s, e, a, t)",
        [1, 2, 7, 4],
        plain={"s": integers(1, 0), "e": integers(3, -1), "a": integers(1, 3), "t": integers(1, 2)},
        y=X,
    ),
    "transpose": Case("y = Transpose<perm=[0,2,1,3]>(x)", [1, 7, 4, 9], y=X),
    "reshape": Case("y = Reshape(x, t)", [1, 9, 28], plain={"t": integers(1, 9, 28)}, y=X),
    "reshape back": Case("y = Reshape(x, t)", [1, 2, 2, 7, 9], plain={"t": integers(1, 2, 2, 7, 9)}, y=X),
    "gather": Case("y = Gather<axis=1>(x, p)", [1, 3, 7, 9], plain={"p": integers(3, 0, 0)}, y=X),
    "gather one": Case("y = Gather<axis=2>(x, p)", [1, 4, 9], plain={"p": np.int64(2)}, y=X),
    "depth to space": Case("y = DepthToSpace<blocksize=2>(x)", [1, 1, 16, 16], LONG, y=X),
    "depth to space, channels first": Case('y = DepthToSpace<blocksize=2, mode="CRD">(x)', [1, 1, 16, 16], LONG, y=X),
    "space to depth": Case("y = SpaceToDepth<blocksize=2>(x)", [1, 16, 4, 4], LONG, y=X),
    "resize nearest": Case(
        f'y = Resize<coordinate_transformation_mode="asymmetric", nearest_mode="{DOWN}">(x, , f)',
        [1, 4, 16, 16],
        LONG,
        plain={"f": np.array([1, 1, 2, 2], np.float32)},
        y=X,
    ),
    "resize linear": Case(
        'y = Resize<mode="linear">(x, , f)',
        [1, 4, 16, 16],
        LONG,
        plain={"f": np.array([1, 1, 2, 2], np.float32)},
        y=X,
        share=0.8,
    ),
    "matmul of two": Case(
        "y = MatMul(x, a)", [1, 2, 5, 6], {"x": [1, 2, 5, 8], "a": [1, 2, 8, 6]}, y=(0.1, 5), share=0.9
    ),
    "squeeze": Case("y = Squeeze(x, p)", [4, 7, 9], plain={"p": integers(0)}, y=X),
    "unsqueeze": Case("y = Unsqueeze(x, p)", [1, 1, 4, 7, 9], plain={"p": integers(1)}, y=X),
    "split": Case("y, z = Split<axis=1>(x)", [1, 2, 7, 9], y=X),
    "tile": Case("y = Tile(x, p)", [1, 8, 7, 18], plain={"p": integers(1, 2, 1, 2)}, y=X, lacking=True),
    "cast to the same type": Case("y = Cast<to=1>(x)", IMAGE, y=X),
    "expand": Case("y = Expand(x, p)", [3, 4, 7, 9], plain={"p": integers(3, 1, 1, 1)}, y=X),
    "top k": Case("y, i = TopK(x, k)", [1, 4, 7, 2], plain={"k": integers(2)}, y=X, lacking=True),
    "gather nd": Case("y = GatherND(x, p)", [2, 9], plain={"p": integers(0, 1, 2, 0, 3, -1).reshape(2, 3)}, y=X),
    "gather elements": Case(
        "y = GatherElements<axis=3>(x, p)", [1, 4, 7, 1], plain={"p": np.arange(28).reshape(1, 4, 7, 1) % 9}, y=X
    ),
    "largest of three": Case("n = HardSwish(x)\ny = Max(x, a, n)", IMAGE, TWO, y=(0.05, 0), share=0.85),
    "where": Case("y = Where(m, x, a)", IMAGE, TWO, plain={"m": np.arange(36).reshape(4, 1, 9) % 2 == 0}, share=0.95),
}


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_operator(case: Case, runtime: str) -> None:
    scales = {**dict.fromkeys(case.inputs, case.x), "y": case.y}
    if "a" in scales:
        scales["a"] = (0.027, 4)
    options = {"scales": scales, "plain": case.plain, "axis": case.axis}
    model = quantized(case.node, case.inputs, case.output, case.constants, **options)
    if runtime == MICRO and case.lacking:
        with pytest.raises(ModelError, match="no kernel"):
            check_kernels(network_of(model), "tflite-micro")
        return
    skip_what_the_portable_kernels_lack(network_of(model), runtime)
    random = np.random.default_rng(1)
    feed = {
        name: ((random.integers(-128, 128, shape) - scales[name][1]) * scales[name][0]).astype(np.float32)
        for name, shape in case.inputs.items()
    }
    expected = open_session(model.SerializeToString(), SessionSettings(optimization="none")).run(["y"], feed)[0]
    wanted = np.rint(expected / case.y[0]) + case.y[1]
    outputs = run(model, runtime, feed)
    assert outputs.shape == wanted.shape
    difference = np.abs(outputs - wanted)
    assert difference.max() <= case.apart
    assert np.mean(difference == 0) >= case.share


FLOATS = {
    **{name: case for name, case in CASES.items() if not case.constants.keys() - {"w", "b"}},
    **{
        name.lower(): Case(f"y = {name}(x)", [1, 4, 1, 1] if "Pool" in name else IMAGE)
        for name in ("Exp", "Abs", "Neg", "Cos", "Sin", "GlobalMaxPool")
    },
    "div": Case("y = Div(x, a)", IMAGE, TWO),
    "sum": Case("y = ReduceSum(x, p)", [1, 1, 7, 9], plain={"p": integers(1)}),
    "largest": Case("y = ReduceMax<axes=[1]>(x)", [1, 1, 7, 9]),
    "least": Case("y = ReduceMin<axes=[2], keepdims=0>(x)", [1, 4, 9]),
    "norm": Case(
        "y = BatchNormalization(x, s, b, m, v)",
        IMAGE,
        plain={name: np.abs(floats(4)) + np.float32(0.1) for name in ("s", "b", "m", "v")},
    ),
    "gelu": Case("y = Gelu(x)", IMAGE, opset=20, lacking=True),
    "layer norm": Case("y = LayerNormalization(x, s, b)", IMAGE, plain={"s": floats(9), "b": floats(9)}),
    "gelu of erf": Case(
        "a = Div(x, r)\ne = Erf(a)\nf = Add(e, one)\ng = Mul(x, f)\ny = Mul(g, h)",
        IMAGE,
        plain={"r": np.float32(2**0.5), "one": np.float32(1), "h": np.float32(0.5)},
        lacking=True,
    ),
    "gelu of erf, halved first": Case(
        "a = Mul(x, r)\ne = Erf(a)\nf = Add(one, e)\ng = Mul(x, h)\ny = Mul(g, f)",
        IMAGE,
        plain={"r": np.float32(0.5**0.5), "one": np.float32(1), "h": np.float32(0.5)},
        lacking=True,
    ),
    "log softmax": Case("y = LogSoftmax<axis=-1>(x)", IMAGE),
}


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("case", FLOATS.values(), ids=FLOATS.keys())
def test_operator_of_floats(case: Case, runtime: str) -> None:
    signature = ", ".join(f"float[{','.join(map(str, shape))}] {name}" for name, shape in case.inputs.items())
    body = "\n".join(f"[n{place}] {line}" for place, line in enumerate(case.node.splitlines()))
    shape = ",".join(map(str, case.output))
    weights = {**case.constants, **case.plain}
    model = proto(f"g ({signature}) => (float[{shape}] y) {{\n{body}\n}}", weights, opset=case.opset)
    if runtime == MICRO and case.lacking:
        with pytest.raises(ModelError, match="no kernel"):
            check_kernels(network_of(model), "tflite-micro")
        return
    random = np.random.default_rng(1)
    feed = {name: random.normal(0, 1, shape).astype(np.float32) for name, shape in case.inputs.items()}
    expected = open_session(model.SerializeToString()).run(["y"], feed)[0]
    outputs = run(model, runtime, feed)
    assert np.allclose(outputs, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_place_of_the_largest_integer_needs_no_floats(runtime: str) -> None:
    body = """g (float[1,4,7,9] x) => (int64[1,1,7,9] y) {
    [q] q = QuantizeLinear(x, s, z)
    [d] d = DequantizeLinear(q, s, z)
    [a] y = ArgMax<axis=1>(d)
    }"""
    model = proto(body, {"s": np.float32(X[0]), "z": np.int8(X[1])})
    assert {operator.kind for operator in network_of(model).operators} == {"ARG_MAX", "RESHAPE"}
    x = np.random.default_rng(1).normal(0, 1, IMAGE).astype(np.float32)
    settings = SessionSettings(optimization="none")
    assert np.array_equal(
        run(model, runtime, {"x": x}), open_session(model.SerializeToString(), settings).run(None, {"x": x})[0]
    )
