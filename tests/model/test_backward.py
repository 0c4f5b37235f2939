"""Compare gradients of `edgeq.model.backward` with differences of the float model's outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeq.model.backward import RULES, build_backward
from edgeq.model.graph import GraphIndex
from edgeq.model.parts import with_outputs
from edgeq.model.sessions import open_in_memory
from tests.graphs import attributes, model

Arrays = dict[str, np.ndarray[Any, Any]]
_STEP = 2e-3


def _values(net: ir.Model, inputs: Arrays) -> Arrays:
    """Return all tensors of a model, by name."""
    names = [str(value.name) for node in net.graph for value in node.outputs if value.name]
    session = open_in_memory(with_outputs(net, names))
    found = [output.name for output in session.get_outputs()]
    feed = {name: np.asarray(array) for name, array in inputs.items()}
    return {**feed, **dict(zip(found, session.run(None, feed), strict=True))}


def gradients(net: ir.Model, inputs: Arrays, *, seed: int = 0, names: Any = None) -> tuple[Arrays, Arrays]:
    """Return random directions at the outputs and where the graph ends, and the gradients of all tensors."""
    graph, values, rng = GraphIndex(net), _values(net, inputs), np.random.default_rng(seed)
    backward = build_backward(graph, values if names is None else names, values)
    directions = {name: rng.normal(size=values[name].shape).astype(np.float32) for name in backward.directions}
    feed = backward.feed(values) | {entry: directions[name] for name, entry in backward.directions.items()}
    session = open_in_memory(backward.model)
    results = dict(zip([o.name for o in session.get_outputs()], session.run(None, feed), strict=True))
    return directions, {name: results[output] for (name, _), output in backward.gradients.items()}


def check(net: ir.Model, inputs: Arrays, *, seed: int = 0, ends: tuple[str, ...] | None = None) -> None:
    """Check the gradients of the float inputs along a random line each."""
    directions, found = gradients(net, inputs, seed=seed)
    assert ends is None or set(directions) == set(ends)
    rng = np.random.default_rng(seed + 1)
    for name, array in inputs.items():
        if array.dtype != np.float32:
            continue
        line = rng.normal(size=array.shape).astype(np.float32)
        sides = [_values(net, {**inputs, name: array + np.float32(sign * _STEP) * line}) for sign in (1, -1)]
        slopes = {n: (sides[0][n].astype(np.float64) - sides[1][n]) / (2 * _STEP) for n in directions}
        expected = sum(float((slopes[n] * directions[n]).sum()) for n in directions)
        scale = sum(float(np.linalg.norm(slopes[n]) * np.linalg.norm(directions[n])) for n in directions)
        assert found[name].shape == array.shape
        assert float((found[name] * line).sum()) == pytest.approx(expected, abs=2e-2 * scale + 1e-3), name


def _array(*shape: int, seed: int = 0, low: float = -2.0, high: float = 2.0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)


_FUNCTIONS = """
    Abs Celu Cos Elu Erf Exp HardSigmoid HardSwish LeakyRelu Neg Relu Selu Sigmoid Sin Softplus Softsign Tanh Softmax
    LogSoftmax Identity Dropout GlobalAveragePool Flatten
    """


@pytest.mark.parametrize("op_type", _FUNCTIONS.split())
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 1000))
def test_functions_of_one_tensor(op_type: str, seed: int) -> None:
    check(model(f"g (float[2,3,4,5] x) => (float[] y) {{ y = {op_type}(x) }}"), {"x": _array(2, 3, 4, 5, seed=seed)})


@pytest.mark.parametrize("op_type", ["Log", "Sqrt", "Reciprocal"])
def test_functions_of_positive_numbers(op_type: str) -> None:
    check(model(f"g (float[6] x) => (float[] y) {{ y = {op_type}(x) }}"), {"x": _array(6, low=0.5, high=2)})


@pytest.mark.parametrize(
    ("text", "opset"),
    [
        ("y = Mish(x)", 18),
        ('y = Gelu <approximate = "none"> (x)', 20),
        ('y = Gelu <approximate = "tanh"> (x)', 20),
        ("y = com.microsoft.Gelu(x)", 17),
        ("y = com.microsoft.QuickGelu <alpha = 1.5> (x)", 17),
        ("y = Clip(x, low, high)", 17),
        ("y = Clip(x, , high)", 17),
        ("y = PRelu(x, slope)", 17),
        ("y = Pow(x2, three) x2 = Exp(x)", 17),
        ("y = Where(mask, x, slope)", 17),
        ("y = Elu <alpha = 0.5> (x)", 17),
        ("y = Celu <alpha = 0.5> (x)", 17),
        ("y = Cast <to = 1> (z) z = Cast <to = 11> (x)", 17),
        ("y = Trilu <upper = 0> (x)", 17),
        ("y = Transpose <perm = [2, 0, 1]> (x)", 17),
        ("y = Transpose(x)", 17),
        ("y = Reshape(x, sizes)", 17),
        ("y = Squeeze(z) z = Unsqueeze(x, one)", 17),
        ("y = Expand(z, big) z = Unsqueeze(x, one)", 17),
        ("y = Tile(x, repeats)", 17),
        ("y = Gather <axis = 1> (x, rows)", 17),
        ("y = Gather <axis = 2> (x, nought)", 17),
        ("y = GatherElements <axis = 1> (x, places)", 17),
        ("y = GatherND(x, points)", 17),
        ("y = ReduceMean <axes = [1], keepdims = 0> (x)", 17),
        ("y = ReduceMean(x)", 17),
        ("y = ReduceMean <keepdims = 0> (x, one)", 18),
        ("y = ReduceSum(x, one)", 17),
        ("y = ReduceMax <axes = [-1], keepdims = 0> (x)", 17),
        ("y = ReduceMin <axes = [0, 2]> (x)", 17),
        ("y = ReduceL2 <axes = [1]> (x)", 17),
        ("y = ReduceSumSquare <axes = [1]> (x)", 17),
        ("y = LayerNormalization <axis = -1> (x, weight, bias)", 17),
        ("y = LayerNormalization <axis = 1> (x, wide)", 17),
        ("y = InstanceNormalization(x, scale, shift)", 17),
        ("y = BatchNormalization(x, scale, shift, shift, spread)", 17),
        ("y, z = Split <axis = 1> (x, halves)", 17),
        ("z, y = Split <axis = 1> (x, halves)", 17),
        ("y = Slice(x, starts, ends, axes, steps)", 17),
        ("y = Slice(x, minus, far, axes, one2)", 17),
        ("y = Pad(x, pads)", 17),
        ('y = Pad <mode = "reflect"> (x, pads)', 17),
        ('y = Pad <mode = "edge"> (x, pads)', 17),
        ("y = Pad(x, crop)", 17),
        ('y = Einsum <equation = "abc,cd->bad"> (x, square)', 17),
    ],
)
def test_settings_of_operators(text: str, opset: int) -> None:
    constants = {
        "low": np.float32(-1), "high": np.float32(0.5), "slope": _array(4, 1, seed=5), "three": np.float32(2.5),
        "mask": np.arange(60).reshape(3, 4, 5) % 3 == 0, "sizes": np.array([5, -1]), "one": np.array([1]),
        "big": np.array([3, 7, 4, 5]), "repeats": np.array([2, 1, 3]), "rows": np.array([[0, 3], [3, -1]]),
        "nought": np.int64(0), "places": np.arange(24).reshape(3, 2, 4) % 4, "halves": np.array([1, 3]),
        "points": np.array([[0, 1], [2, 3], [0, 1]]),
        "weight": _array(5, seed=2), "bias": _array(5, seed=3), "wide": _array(4, 5, seed=2),
        "scale": _array(4, seed=2), "shift": _array(4, seed=3), "spread": _array(4, low=0.5, seed=3),
        "starts": np.array([0, 1]), "ends": np.array([100, 5]), "axes": np.array([1, -1]),
        "steps": np.array([3, 2]), "minus": np.array([-3, -4]), "far": np.array([-1, 2**31 - 1]),
        "one2": np.array([1, 1]), "pads": np.array([0, 1, 2, 1, 2, 0]), "crop": np.array([0, -1, 2, -1, 2, -2]),
        "square": _array(5, 6, seed=4),
    }  # fmt: skip
    names = text.replace("(", " ").replace(")", " ").replace(",", " ").split()
    weights = {name: value for name, value in constants.items() if name in names}
    # The nodes are listed in order of execution.
    first, _, second = text.partition(") ")
    ordered = f"{second} {first})" if second else text
    net = model(f"g (float[3,4,5] x) => (float[] y) {{ {ordered} }}", weights, opset=opset)
    check(net, {"x": _array(3, 4, 5)}, ends=("y",))


def test_the_maximum_of_an_image() -> None:
    x = np.random.default_rng(0).permutation(60).reshape(1, 3, 4, 5).astype(np.float32)
    check(model("g (float[1,3,4,5] x) => (float[] y) { y = GlobalMaxPool(x) }"), {"x": x}, ends=("y",))


@pytest.mark.parametrize("op_type", ["Add", "Sub", "Mul", "Div", "Max", "Min", "Sum"])
@pytest.mark.parametrize("shapes", [((2, 3, 4), (3, 1)), ((4,), (2, 1, 4)), ((2, 3), (2, 3)), ((), (2, 3))])
def test_broadcast_operands(op_type: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    first, second = (str(list(shape)) if shape else "" for shape in shapes)
    net = model(f"g (float{first} a, float{second} b) => (float[] y) {{ y = {op_type}(a, b) }}")
    check(net, {"a": _array(*shapes[0]), "b": _array(*shapes[1], seed=1, low=0.5)}, ends=("y",))


@pytest.mark.parametrize(
    "shapes",
    [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 1, 3, 4), (5, 4, 2)), ((4,), (4, 5)), ((2, 3, 4), (4,)), ((4,), (4,))],
)
def test_products_of_two_computed_operands(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    net = model(f"g (float{list(shapes[0])} a, float{list(shapes[1])} b) => (float[] y) {{ y = MatMul(a, b) }}")
    check(net, {"a": _array(*shapes[0]), "b": _array(*shapes[1], seed=1)}, ends=("y",))


@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
def test_gemm(trans_a: int, trans_b: int) -> None:
    first, second = ([4, 3] if trans_a else [3, 4]), ([5, 4] if trans_b else [4, 5])
    how = attributes({"transA": trans_a, "transB": trans_b, "alpha": 0.5, "beta": 2.0})
    net = model(f"g (float{first} a, float{second} b, float[5] c) => (float[] y) {{ y = Gemm {how} (a, b, c) }}")
    check(net, {"a": _array(*first), "b": _array(*second, seed=1), "c": _array(5)}, ends=("y",))


@st.composite
def _windows(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the attributes of a kernel on an image of 2 axes."""
    two = st.integers(1, 3)
    made: dict[str, Any] = {
        "kernel_shape": [draw(two), draw(two)],
        "strides": [draw(two), draw(two)],
        "dilations": [draw(st.integers(1, 2)), draw(st.integers(1, 2))],
    }
    auto = draw(st.sampled_from(["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]))
    if auto == "NOTSET":
        most = min(made["kernel_shape"])
        made["pads"] = [draw(st.integers(0, most - 1)) for _ in range(4)]
    else:
        made["auto_pad"] = auto
        made["dilations"] = [1, 1]
    return made


@settings(max_examples=40, deadline=None)
@given(how=_windows(), group=st.sampled_from([1, 2, 4]), depth=st.integers(1, 2), seed=st.integers(0, 99))
def test_convolutions(how: dict[str, Any], group: int, depth: int, seed: int) -> None:
    weight = _array(group * depth, 4 // group, *how["kernel_shape"], seed=seed + 1)
    text = f"y = Conv {attributes({**how, 'group': group})} (x, w, b)"
    net = model(f"g (float[2,4,7,8] x) => (float[] y) {{ {text} }}", {"w": weight, "b": _array(group * depth)})
    check(net, {"x": _array(2, 4, 7, 8, seed=seed)}, ends=("y",))


@settings(max_examples=40, deadline=None)
@given(how=_windows(), group=st.sampled_from([1, 2]), extra=st.integers(0, 1), seed=st.integers(0, 99))
def test_transposed_convolutions(how: dict[str, Any], group: int, extra: int, seed: int) -> None:
    if min(how["strides"]) > 1 and "pads" in how:
        how["output_padding"] = [extra, extra]
    weight = _array(4, 3, *how["kernel_shape"], seed=seed + 1)
    text = f"y = ConvTranspose {attributes({**how, 'group': group})} (x, w)"
    net = model(f"g (float[1,4,5,4] x) => (float[] y) {{ {text} }}", {"w": weight})
    check(net, {"x": _array(1, 4, 5, 4, seed=seed)})


@settings(max_examples=40, deadline=None)
@given(how=_windows(), ceil=st.booleans(), padded=st.booleans(), average=st.booleans(), seed=st.integers(0, 99))
def test_pools(how: dict[str, Any], ceil: bool, padded: bool, average: bool, seed: int) -> None:
    # Opset 17 has no dilated averages.
    how = {name: value for name, value in how.items() if name != "dilations" or not average}
    if average:
        how["count_include_pad"] = int(padded)
    if "pads" in how:
        how["ceil_mode"] = int(ceil)
    else:
        # The runtime refuses steps beyond the kernel here.
        how["strides"] = [min(pair) for pair in zip(how["strides"], how["kernel_shape"], strict=True)]
    text = f"y = {'AveragePool' if average else 'MaxPool'} {attributes(how)} (x)"
    # Distinct values with gaps have no ties.
    x = np.random.default_rng(seed).permutation(2 * 3 * 7 * 8).reshape(2, 3, 7, 8).astype(np.float32) / 10
    check(model(f"g (float[2,3,7,8] x) => (float[] y) {{ {text} }}"), {"x": x}, ends=("y",))


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("place", ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"])
def test_resized_images(mode: str, place: str) -> None:
    how = attributes({"mode": mode, "coordinate_transformation_mode": place})
    by_scale = 'x, "", scales', {"scales": np.array([1, 1, 2, 3], np.float32)}
    by_size = 'x, "", "", sizes', {"sizes": np.array([1, 2, 7, 3])}
    for inputs, weights in (by_scale, by_size):
        net = model(f"g (float[1,2,4,5] x) => (float[] y) {{ y = Resize {how} ({inputs}) }}", weights)
        check(net, {"x": _array(1, 2, 4, 5)}, ends=("y",))


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_blocks_of_pixels(mode: str) -> None:
    text = f'd = DepthToSpace <blocksize = 2, mode = "{mode}"> (x) e = Tanh(d) y = SpaceToDepth <blocksize = 2> (e)'
    check(model(f"g (float[2,8,4,6] x) => (float[] y) {{ {text} }}"), {"x": _array(2, 8, 4, 6)}, ends=("y",))


def test_a_network_with_branches() -> None:
    net = model(
        """g (float[1,3,8,8] x, int64[1,4] ids) => (float[] y, float[] z) {
            a = Conv <pads = [1,1,1,1], strides = [2,2]> (x, w) s = Sigmoid(a) b = Mul(a, s)
            shape = Shape(b) flat = Reshape(b, sizes) words = Gather(table, ids) scores = MatMul(flat, across)
            p = Softmax(scores) y = MatMul(p, words) c = Concat <axis = 2> (b, a) z = ReduceMean <axes = [2,3]> (c)
        }""",
        {"w": _array(4, 3, 3, 3), "sizes": np.array([1, 4, -1]), "across": _array(16, 4), "table": _array(9, 6)},
    )
    check(net, {"x": _array(1, 3, 8, 8), "ids": np.array([[1, 2, 8, 0]])}, ends=("y", "z"))


def test_operators_without_a_rule_end_the_graph() -> None:
    net = model(
        """g (float[4,6] x) => (float[] y, int64[] i) {
            a = Tanh(x) b = Mul(a, a) v, i = TopK(b, k) y = Exp(v)
        }""",
        {"k": np.array([2])},
    )
    directions, found = gradients(net, {"x": _array(4, 6)})
    # What a TopK computes is still judged by the output behind it.
    assert set(directions) == {"b", "y"}
    assert set(found) == {"x", "a", "b", "v", "y"}


def test_readers_apart_get_their_own_gradient() -> None:
    net = model("g (float[3] x) => (float[] y) { [left] a = Exp(x) [right] b = Neg(x) y = Add(a, b) }")
    x = _array(3)
    values = _values(net, {"x": x})
    backward = build_backward(GraphIndex(net), ["x"], values, apart=[("x", "left")])
    feed = backward.feed(values) | {entry: np.ones(3, np.float32) for entry in backward.directions.values()}
    results = dict(zip(backward.gradients, open_in_memory(backward.model).run(None, feed), strict=True))
    assert results["x", True] == pytest.approx(np.exp(x))
    assert results["x", False] == pytest.approx(-np.ones(3))


def test_a_model_serves_samples_of_its_shapes_and_settings() -> None:
    net = model("g (float[N,4] x, int64[1] start) => (float[] y) { y = Slice(x, start, end, axis) }",
                {"end": np.array([4]), "axis": np.array([1])})  # fmt: skip
    values = [_values(net, {"x": _array(rows, 4), "start": np.array([s])}) for rows, s in ((2, 1), (3, 1), (2, 2))]
    backward = build_backward(GraphIndex(net), ["x"], values[0])
    assert [backward.serves(sample) for sample in values] == [True, False, False]


def test_each_rule_names_an_operator() -> None:
    import onnx

    own = {"QuickGelu", "Swish"}
    known = {schema.name for schema in onnx.defs.get_all_schemas()} | own
    assert set(RULES) <= known
