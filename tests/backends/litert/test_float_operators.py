"""Test the operators that compute on floats, indices or conditions, in each runtime, against onnxruntime."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeq.backends.litert.rules import check_kernels
from edgeq.errors import ModelError
from edgeq.run.session import open_session
from tests.backends.litert.files import (
    MICRO,
    RUNTIMES,
    network_of,
    run,
    skip_what_the_portable_kernels_lack,
)
from tests.graphs import proto

MATRIX = np.random.default_rng(3).normal(size=(2, 3)).astype(np.float32)
IMAGE, ROWS = [1, 4, 3, 5], [2, 6]


def integers(*values: int) -> NDArray[np.int64]:
    """Return int64 values for a shape, axes or indices."""
    return np.array(values, np.int64)


def number(value: float) -> NDArray[np.float32]:
    """Return a float32 scalar."""
    return np.array(value, np.float32)


@dataclass(frozen=True)
class Formula:
    """Hold nodes that compute "y", which has the shape `output` and the type `type`. Their only inputs are "x" and, if
    `second` is given, "a".

    Attributes:
        indices: the values of the int64 input "i", if the nodes read one.
        lacking: whether TFLite Micro has no kernel for it.
    """

    nodes: str
    output: list[int]
    x: list[int] = field(default_factory=lambda: IMAGE)
    second: list[int] | None = None
    indices: NDArray[Any] | None = None
    constants: dict[str, Any] = field(default_factory=dict)
    type: str = "float"
    lacking: bool = False


FORMULAS = {
    **{
        name.lower(): Formula(f"y = {name}(x)", IMAGE)
        for name in ("Abs", "Ceil", "Cos", "Elu", "Erf", "Exp", "Floor", "Neg", "Round", "Selu", "Sin")
    },
    **{name.lower(): Formula(f"y = {name}(x)", IMAGE) for name in ("Celu", "Mish", "Reciprocal", "Softplus")},
    "sign": Formula("y = Sign(x)", IMAGE, lacking=True),
    "softsign": Formula("y = Softsign(x)", IMAGE),
    "softplus of large numbers": Formula("b = Mul(x, c)\ny = Softplus(b)", IMAGE, constants={"c": number(200)}),
    "elu with alpha": Formula("y = Elu<alpha=0.3>(x)", IMAGE),
    "celu with alpha": Formula("y = Celu<alpha=2.5>(x)", IMAGE),
    "is nan": Formula("b = Sqrt(x)\ny = IsNaN(b)", IMAGE, type="bool"),
    **{
        name.lower(): Formula(f"y = {name}(x, a)", IMAGE, second=[4, 1, 5], type="bool")
        for name in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
    },
    **{
        name.lower(): Formula(
            f"b = Greater(x, z)\nc = Less(a, z)\ny = {name}(b, c)",
            IMAGE,
            second=[4, 1, 5],
            constants={"z": number(0.1)},
            type="bool",
        )
        for name in ("And", "Or", "Xor")
    },
    "not": Formula("b = Greater(x, z)\ny = Not(b)", IMAGE, constants={"z": number(0.1)}, type="bool"),
    "where": Formula("b = Greater(x, z)\ny = Where(b, x, a)", IMAGE, second=[4, 1, 5], constants={"z": number(0.1)}),
    "where with a mask": Formula(
        "y = Where(m, x, c)",
        IMAGE,
        constants={"m": np.arange(20).reshape(4, 1, 5) % 3 == 0, "c": number(-1e4)},
    ),
    "where after a convolution": Formula(
        "c = Conv(x, w)\nb = Greater(c, z)\ny = Where(b, c, z)",
        [1, 2, 3, 5],
        constants={"w": np.random.default_rng(2).normal(size=(2, 4, 1, 1)).astype(np.float32), "z": number(0)},
    ),
    "largest of three": Formula("b = Neg(x)\ny = Max(x, a, b)", IMAGE, second=[4, 1, 5]),
    "sum of three": Formula("b = Neg(x)\ny = Sum(x, a, b)", IMAGE, second=[4, 1, 5]),
    "mean of three": Formula("b = Exp(x)\ny = Mean(x, a, b)", IMAGE, second=[4, 1, 5]),
    "square": Formula("y = Pow(x, p)", IMAGE, constants={"p": np.int64(2)}),
    "root": Formula("b = Abs(x)\ny = Pow(b, p)", IMAGE, constants={"p": number(0.5)}),
    "powers of a number": Formula("y = Pow(c, x)", IMAGE, constants={"c": number(1.5)}, lacking=True),
    "integers cubed": Formula(
        "y = Pow(i, p)\nz = Neg(x)",
        [4],
        indices=integers(-9, 0, 3, 40),
        constants={"p": np.int64(3)},
        type="int64",
        lacking=True,
    ),
    "cube": Formula("y = Pow(x, p)", IMAGE, constants={"p": number(3)}, lacking=True),
    "product with a constant on the left": Formula("y = MatMul(c, x)", [1, 4, 2, 5], constants={"c": MATRIX}),
    "product of unequal ranks": Formula("y = MatMul(x, a)", [1, 4, 3, 2], second=[5, 2]),
    "product with a vector": Formula("y = MatMul(x, a)", [1, 4, 3], second=[5]),
    "product of a vector": Formula("y = MatMul(a, x)", [1, 4, 5], second=[3]),
    "product of two vectors": Formula("y = MatMul(x, a)", [], x=[5], second=[5]),
    "arg max of rows": Formula("y = ArgMax<axis=1, keepdims=0>(x)", [2], x=ROWS, type="int64"),
    "arg max of channels": Formula(
        "c = Conv(x, w)\ny = ArgMax<axis=1>(c)",
        [1, 1, 3, 5],
        constants={"w": np.random.default_rng(2).normal(size=(6, 4, 1, 1)).astype(np.float32)},
        type="int64",
    ),
    "arg min": Formula("y = ArgMin<axis=2, keepdims=0>(x)", [1, 4, 5], type="int64"),
    "top k": Formula("y, i = TopK(x, k)", [1, 4, 3, 2], constants={"k": integers(2)}, lacking=True),
    "top k of channels": Formula("y, i = TopK<axis=1>(x, k)", [1, 3, 3, 5], constants={"k": integers(3)}, lacking=True),
    "places of top k": Formula(
        "v, y = TopK<axis=1>(x, k)", [1, 3, 3, 5], constants={"k": integers(3)}, type="int64", lacking=True
    ),
    "bottom k": Formula("y, i = TopK<largest=0>(x, k)", [1, 4, 3, 2], constants={"k": integers(2)}, lacking=True),
    "places of bottom k": Formula(
        "v, y = TopK<largest=0>(x, k)", [1, 4, 3, 2], constants={"k": integers(2)}, type="int64", lacking=True
    ),
    "gather nd": Formula("y = GatherND(x, i)", [3, 3, 5], indices=np.array([[0, 1], [0, -1], [-1, 3]])),
    "gather nd at constant places": Formula(
        "y = GatherND(x, p)", [2], x=ROWS, constants={"p": integers(1, -2, 0, 3).reshape(2, 2)}
    ),
    "gather elements": Formula("y = GatherElements<axis=1>(x, i)", [2, 2], x=ROWS, indices=np.array([[0, -1], [5, 2]])),
    "gather elements at constant places": Formula(
        "y = GatherElements<axis=0>(x, p)", [3, 6], x=ROWS, constants={"p": np.arange(18).reshape(3, 6) % 2}
    ),
    "gather at computed places": Formula("y = Gather<axis=1>(x, i)", [2, 3], x=ROWS, indices=integers(4, 0, 5)),
    "one hot": Formula(
        "y = OneHot(i, d, v)\nz = Neg(x)",
        [4, 5],
        indices=integers(0, 3, -1, 7),
        constants={"d": np.int64(5), "v": np.array([0.5, 2], np.float32)},
        lacking=True,
    ),
    "cumulated": Formula("y = CumSum(x, p)", IMAGE, constants={"p": np.int64(1)}),
    "cumulated from behind": Formula(
        "y = CumSum<exclusive=1, reverse=1>(x, p)", ROWS, x=ROWS, constants={"p": np.int64(-1)}
    ),
    "tiled": Formula("y = Tile(x, p)", [4, 18], x=ROWS, constants={"p": integers(2, 3)}, lacking=True),
    "expanded": Formula("y = Expand(x, p)", [3, 2, 6], x=ROWS, constants={"p": integers(3, 1, 1)}),
    "upper triangle": Formula("y = Trilu(x, k)", ROWS, x=ROWS, constants={"k": np.int64(1)}),
    "lower triangle": Formula("y = Trilu<upper=0>(x)", ROWS, x=ROWS),
    **{
        name: Formula(
            f"y = {name}<keepdims={keeps}>(x, p)", shape, constants={"p": integers(1, 3)}, lacking=name == "ReduceProd"
        )
        for name, keeps, shape in (
            ("ReduceL1", 1, [1, 1, 3, 1]),
            ("ReduceL2", 0, [1, 3]),
            ("ReduceSumSquare", 1, [1, 1, 3, 1]),
            ("ReduceLogSumExp", 0, [1, 3]),
            ("ReduceProd", 0, [1, 3]),
        )
    },
    "log of a sum": Formula("b = Exp(x)\ny = ReduceLogSum(b, p)", [1, 4, 1, 5], constants={"p": integers(2)}),
    "sum of everything": Formula("y = ReduceSum<keepdims=0>(x)", []),
    "reduction over no axes": Formula(
        "y = ReduceL2<noop_with_empty_axes=1>(x, p)", IMAGE, constants={"p": np.zeros(0, np.int64)}
    ),
    "unit length": Formula("y = LpNormalization<axis=1>(x)", IMAGE),
    "unit sum": Formula("y = LpNormalization<axis=-1, p=1>(x)", ROWS, x=ROWS),
    "instance norm": Formula(
        "y = InstanceNormalization(x, s, b)",
        IMAGE,
        constants={name: np.linspace(low, 1, 4, dtype=np.float32) for name, low in (("s", 0.5), ("b", -1))},
    ),
    "local response norm": Formula("y = LRN<size=3, alpha=0.5, bias=2.0>(x)", IMAGE),
    "cast of a condition": Formula("b = Greater(x, z)\ny = Cast<to=1>(b)", IMAGE, constants={"z": number(0)}),
    "cast to integers": Formula("b = Mul(x, c)\ny = Cast<to=7>(b)", IMAGE, constants={"c": number(9)}, type="int64"),
    "integers clipped": Formula(
        "y = Clip(i, l, h)\nz = Neg(x)",
        [4],
        indices=integers(-9, 0, 3, 40),
        constants={"l": np.int64(-2), "h": np.int64(9)},
        type="int64",
    ),
    "integers added": Formula(
        "y = Add(i, c)\nz = Neg(x)", [4], indices=integers(-9, 0, 3, 40), constants={"c": np.int64(5)}, type="int64"
    ),
    "zeros of a shape": Formula("b = ConstantOfShape(p)\ny = Sub(b, x)", IMAGE, constants={"p": integers(*IMAGE)}),
    "clipped by computed bounds": Formula("h = ReduceMean<keepdims=0>(x)\ny = Clip(x, , h)", IMAGE),
}


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("case", FORMULAS.values(), ids=FORMULAS.keys())
def test_formula(case: Formula, runtime: str) -> None:
    inputs = {"x": case.x} | ({"a": case.second} if case.second else {})
    signature = [f"float[{','.join(map(str, shape))}] {name}" for name, shape in inputs.items()]
    random = np.random.default_rng(1)
    feed: dict[str, Any] = {name: random.normal(0, 1, shape).astype(np.float32) for name, shape in inputs.items()}
    if case.indices is not None:
        signature.append(f"int64[{','.join(map(str, case.indices.shape))}] i")
        feed["i"] = case.indices
    body = "\n".join(f"[n{place}] {line}" for place, line in enumerate(case.nodes.splitlines()))
    shape = ",".join(map(str, case.output))
    model = proto(f"g ({', '.join(signature)}) => ({case.type}[{shape}] y) {{\n{body}\n}}", case.constants, opset=18)
    expected = open_session(model.SerializeToString()).run(["y"], feed)[0]
    network = network_of(model)
    skip_what_the_portable_kernels_lack(network, runtime)
    if runtime == MICRO and case.lacking:
        with pytest.raises(ModelError, match="tflite-micro has no kernel"):
            check_kernels(network, "tflite-micro")
        return
    outputs = run(model, runtime, feed)
    assert outputs.shape == expected.shape
    assert np.allclose(outputs, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    "nodes",
    [
        "b = ConstantOfShape(p)\nc = ReduceSum<keepdims=0>(b)\ny = Add(x, c)",
        "b = ConstantOfShape<value=int64[1] {0}>(p)\nc = Expand(x, p)\nd = GatherElements(c, b)\ny = ReduceSum(d)",
    ],
)
def test_refuses_a_large_constant_that_the_model_does_not_contain(nodes: str) -> None:
    body = "\n".join(f"[n{place}] {line}" for place, line in enumerate(nodes.splitlines()))
    model = proto(f"g (float[1] x) => (float[1] y) {{\n{body}\n}}", {"p": integers(1 << 16, 1 << 16)}, opset=18)
    with pytest.raises(ModelError, match="which is too large"):
        network_of(model)
