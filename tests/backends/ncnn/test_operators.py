"""Test each operator alone: the file's answers in ncnn must be those of onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeq.errors import ModelError
from tests.backends.ncnn.networks import ncnn, run_ncnn, run_onnx, sqnr_db, write

LEAST_DB = 95.0
RANDOM = np.random.default_rng(0)
IMAGE, TOKENS, ROW = [1, 4, 6, 8], [1, 6, 8], [1, 12]


def floats(*shape: int) -> NDArray[np.float32]:
    """Return random weights."""
    return RANDOM.normal(0, 0.5, shape).astype(np.float32)


def ints(*values: int) -> NDArray[np.int64]:
    """Return int64 values."""
    return np.array(values, np.int64)


Case = tuple[str, list[int], list[int], dict[str, NDArray[Any]]]
W3, B8 = floats(8, 4, 3, 3), floats(8)

CASES: dict[str, Case] = {
    "convolution": ("Conv<pads=[1,1,1,1]>(x, w, b)", IMAGE, [1, 8, 6, 8], {"w": W3, "b": B8}),
    "strides and uneven pads": (
        "Conv<pads=[0,1,2,1], strides=[2,1], dilations=[1,2]>(x, w, b)",
        IMAGE,
        [1, 8, 3, 6],
        {"w": W3, "b": B8},
    ),
    "same padding": (
        'Conv<auto_pad="SAME_UPPER", strides=[2,2]>(x, w, b)',
        IMAGE,
        [1, 8, 3, 4],
        {"w": W3, "b": B8},
    ),
    "depthwise": ("Conv<group=4, pads=[1,1,1,1]>(x, w)", IMAGE, IMAGE, {"w": floats(4, 1, 3, 3)}),
    "depthwise with two kernels": ("Conv<group=4>(x, w)", IMAGE, [1, 8, 4, 6], {"w": floats(8, 1, 3, 3)}),
    "groups": ("Conv<group=2>(x, w)", IMAGE, [1, 6, 4, 6], {"w": floats(6, 2, 3, 3)}),
    "convolution of a sequence": ("Conv<pads=[1,1]>(x, w)", TOKENS, [1, 5, 8], {"w": floats(5, 6, 3)}),
    "transposed convolution": (
        "ConvTranspose<strides=[2,2]>(x, w, b)",
        IMAGE,
        [1, 5, 12, 16],
        {"w": floats(4, 5, 2, 2), "b": floats(5)},
    ),
    "transposed with output padding": (
        "ConvTranspose<strides=[2,2], pads=[1,1,1,1], output_padding=[1,1]>(x, w)",
        IMAGE,
        [1, 5, 12, 16],
        {"w": floats(4, 5, 3, 3)},
    ),
    "transposed depthwise": (
        "ConvTranspose<strides=[2,2], group=4>(x, w)",
        IMAGE,
        [1, 4, 12, 16],
        {"w": floats(4, 1, 2, 2)},
    ),
    "gemm": ("Gemm<transB=1>(x, w, b)", ROW, [1, 5], {"w": floats(5, 12), "b": floats(5)}),
    "gemm of several rows": ("Gemm(x, w)", [3, 12], [3, 5], {"w": floats(12, 5)}),
    "product with a matrix": ("MatMul(x, w)", TOKENS, [1, 6, 5], {"w": floats(8, 5)}),
    "product of images": ("MatMul(x, w)", IMAGE, [1, 4, 6, 5], {"w": floats(8, 5)}),
    "batch normalization": (
        "BatchNormalization(x, s, b, m, v)",
        IMAGE,
        IMAGE,
        {"s": floats(4), "b": floats(4), "m": floats(4), "v": np.abs(floats(4))},
    ),
    "max pool": ("MaxPool<kernel_shape=[3,2], strides=[2,2], pads=[1,0,1,0]>(x)", IMAGE, [1, 4, 3, 4], {}),
    "max pool with ceil": ("MaxPool<kernel_shape=[3,3], strides=[2,2], ceil_mode=1>(x)", IMAGE, [1, 4, 3, 4], {}),
    "average pool": ("AveragePool<kernel_shape=[3,3], pads=[1,1,1,1]>(x)", IMAGE, IMAGE, {}),
    "average pool that counts padding": (
        "AveragePool<kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1>(x)",
        IMAGE,
        IMAGE,
        {},
    ),
    "average of the whole image": ("AveragePool<kernel_shape=[6,8]>(x)", IMAGE, [1, 4, 1, 1], {}),
    "global average": ("GlobalAveragePool(x)", IMAGE, [1, 4, 1, 1], {}),
    "global maximum": ("GlobalMaxPool(x)", IMAGE, [1, 4, 1, 1], {}),
    "pool of one plane in three axes": (
        "MaxPool<kernel_shape=[1,3,3], strides=[2,1,2]>(x)",
        [1, 1, 6, 6, 8],
        [1, 1, 3, 4, 3],
        {},
    ),
    "add a number": ("Add(x, c)", IMAGE, IMAGE, {"c": floats(1).reshape(())}),
    "subtract from a number": ("Sub(c, x)", IMAGE, IMAGE, {"c": floats(1).reshape(())}),
    "divide a number": ("Div(c, x)", IMAGE, IMAGE, {"c": floats(1)}),
    "add to channels": ("Add(x, c)", IMAGE, IMAGE, {"c": floats(4, 1, 1)}),
    "multiply columns": ("Mul(x, c)", IMAGE, IMAGE, {"c": floats(8)}),
    "multiply rows": ("Mul(x, c)", TOKENS, TOKENS, {"c": floats(6, 1)}),
    "repeat both": ("Add(x, c)", [1, 4, 1, 8], IMAGE, {"c": floats(1, 1, 6, 1)}),
    "maximum": ("Max(x, c)", IMAGE, IMAGE, {"c": floats(1, 4, 6, 8)}),
    "square": ("Pow(x, c)", IMAGE, IMAGE, {"c": np.array(2, np.float32)}),
    "cube": ("Pow(x, c)", IMAGE, IMAGE, {"c": np.array(3, np.float32)}),
    "sigmoid": ("Sigmoid(x)", IMAGE, IMAGE, {}),
    "tanh": ("Tanh(x)", IMAGE, IMAGE, {}),
    "exp": ("Exp(x)", IMAGE, IMAGE, {}),
    "absolute": ("Abs(x)", IMAGE, IMAGE, {}),
    "floor": ("Floor(x)", IMAGE, IMAGE, {}),
    "leaky": ("LeakyRelu<alpha=0.2>(x)", IMAGE, IMAGE, {}),
    "elu": ("Elu<alpha=0.7>(x)", IMAGE, IMAGE, {}),
    "clip": ("Clip(x, l, h)", IMAGE, IMAGE, {"l": np.array(-0.5, np.float32), "h": np.array(0.3, np.float32)}),
    "hard swish": ("HardSwish(x)", IMAGE, IMAGE, {}),
    "hard sigmoid": ("HardSigmoid<alpha=0.2, beta=0.4>(x)", IMAGE, IMAGE, {}),
    "prelu": ("PRelu(x, s)", IMAGE, IMAGE, {"s": floats(4, 1, 1)}),
    "softplus": ("Softplus(x)", IMAGE, IMAGE, {}),
    "softmax of columns": ("Softmax<axis=-1>(x)", IMAGE, IMAGE, {}),
    "softmax of channels": ("Softmax<axis=1>(x)", IMAGE, IMAGE, {}),
    "softmax of tokens": ("Softmax<axis=1>(x)", TOKENS, TOKENS, {}),
    "resize nearest": (
        'Resize<mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor">(x, , s)',
        IMAGE,
        [1, 4, 12, 24],
        {"s": np.array([1, 1, 2, 3], np.float32)},
    ),
    "resize linear": (
        'Resize<mode="linear">(x, , s)',
        IMAGE,
        [1, 4, 9, 16],
        {"s": np.array([1, 1, 1.5, 2], np.float32)},
    ),
    "resize with corners": (
        'Resize<mode="linear", coordinate_transformation_mode="align_corners">(x, , , s)',
        IMAGE,
        [1, 4, 11, 15],
        {"s": ints(1, 4, 11, 15)},
    ),
    "depth to space, DCR": ("DepthToSpace<blocksize=2>(x)", IMAGE, [1, 1, 12, 16], {}),
    "depth to space, CRD": ('DepthToSpace<blocksize=2, mode="CRD">(x)', [1, 8, 3, 4], [1, 2, 6, 8], {}),
    "space to depth": ("SpaceToDepth<blocksize=2>(x)", IMAGE, [1, 16, 3, 4], {}),
    "pad an image": ("Pad(x, p)", IMAGE, [1, 4, 9, 11], {"p": ints(0, 0, 1, 0, 0, 0, 2, 3)}),
    "pad channels": ("Pad(x, p)", IMAGE, [1, 7, 6, 8], {"p": ints(0, 1, 0, 0, 0, 2, 0, 0)}),
    "pad by reflection": ('Pad<mode="reflect">(x, p)', IMAGE, [1, 4, 8, 10], {"p": ints(0, 0, 1, 1, 0, 0, 1, 1)}),
    "transpose an image": ("Transpose<perm=[0,2,3,1]>(x)", IMAGE, [1, 6, 8, 4], {}),
    "transpose tokens": ("Transpose<perm=[0,2,1]>(x)", TOKENS, [1, 8, 6], {}),
    "transpose four axes": ("Transpose<perm=[0,3,1,4,2]>(x)", [1, 2, 3, 4, 5], [1, 4, 2, 5, 3], {}),
    "transpose neighbours": ("Transpose<perm=[0,3,1,2,4]>(x)", [1, 2, 3, 4, 5], [1, 4, 2, 3, 5], {}),
    "reshape": ("Reshape(x, s)", IMAGE, [1, 24, 8], {"s": ints(1, 24, 8)}),
    "slice": ("Slice(x, b, e, a)", IMAGE, [1, 2, 6, 5], {"b": ints(1, 2), "e": ints(3, 7), "a": ints(1, 3)}),
    "slice with steps": (
        "Slice(x, b, e, a, s)",
        IMAGE,
        [1, 4, 3, 3],
        {"b": ints(1, 0), "e": ints(6, 8), "a": ints(2, 3), "s": ints(2, 3)},
    ),
    "slice channels with a step": (
        "Slice(x, b, e, a, s)",
        IMAGE,
        [1, 2, 6, 8],
        {"b": ints(1), "e": ints(9), "a": ints(1), "s": ints(2)},
    ),
    "gather a row": ("Gather<axis=2>(x, i)", IMAGE, [1, 4, 8], {"i": np.array(2, np.int64)}),
    "expand": ("Expand(x, s)", [1, 4, 1], [1, 4, 6], {"s": ints(1, 4, 6)}),
    "tile": ("Tile(x, s)", TOKENS, [1, 12, 24], {"s": ints(1, 2, 3)}),
    "mean of rows": ("ReduceMean<axes=[2,3], keepdims=0>(x)", IMAGE, [1, 4], {}),
    "sum of tokens": ("ReduceSum<keepdims=1>(x, a)", TOKENS, [1, 6, 1], {"a": ints(-1)}),
    "maximum of channels": ("ReduceMax<axes=[1], keepdims=0>(x)", IMAGE, [1, 6, 8], {}),
    "layer normalization": (
        "LayerNormalization<axis=-1>(x, g, b)",
        TOKENS,
        TOKENS,
        {"g": floats(8), "b": floats(8)},
    ),
    "instance normalization": (
        "InstanceNormalization(x, g, b)",
        IMAGE,
        IMAGE,
        {"g": floats(4), "b": floats(4)},
    ),
}


@ncnn
@pytest.mark.parametrize("name", CASES)
def test_an_operator_gives_the_answers_of_onnxruntime(name: str, tmp_path: Path) -> None:
    node, shape, output, constants = CASES[name]
    opset = 18 if "HardSwish" in node else 17
    sizes = [",".join(map(str, s)) for s in (shape, output)]
    text = f"g (float[{sizes[0]}] x) => (float[{sizes[1]}] y) {{ [n] y = {node} }}"
    model, file = write(tmp_path, text, constants, opset)
    inputs = {"x": np.random.default_rng(1).normal(0, 1.5, shape).astype(np.float32)}
    assert sqnr_db(run_onnx(model, inputs)["y"], run_ncnn(file, inputs)["y"]) >= LEAST_DB


@ncnn
@pytest.mark.parametrize("activation", ["Relu(h)", "Clip(h, l, u)", "LeakyRelu(h)", "Sigmoid(h)", "HardSwish(h)"])
def test_an_activation_becomes_a_part_of_its_layer(activation: str, tmp_path: Path) -> None:
    text = f"g (float[1,4,6,8] x) => (float[1,8,4,6] y) {{ [c] h = Conv(x, w, b) [a] y = {activation} }}"
    constants = {"w": W3, "b": B8, "l": np.array(-0.5, np.float32), "u": np.array(1, np.float32)}
    model, file = write(tmp_path, text, constants)
    inputs = {"x": np.random.default_rng(1).normal(0, 1, IMAGE).astype(np.float32)}
    assert sqnr_db(run_onnx(model, inputs)["y"], run_ncnn(file, inputs)["y"]) >= LEAST_DB


SEVERAL = """g (float[1,4,6,8] x) => (float[1,8,4,6] y, float[1,8,4,6] z, float[1,8,4,6] h) {
    [conv] h = Conv(x, w, b)
    [gate] s = Sigmoid(h)
    [silu] m = Mul(h, s)
    [sum] y = Add(m, h)
    [negative] z = Neg(h)
}"""


@ncnn
def test_a_tensor_may_have_several_readers_and_be_an_output(tmp_path: Path) -> None:
    model, file = write(tmp_path, SEVERAL, {"w": W3, "b": B8})
    inputs = {"x": np.random.default_rng(1).normal(0, 1, IMAGE).astype(np.float32)}
    expected, actual = run_onnx(model, inputs), run_ncnn(file, inputs)
    assert all(sqnr_db(expected[name], actual[name]) >= LEAST_DB for name in ("y", "z", "h"))


ATTENTION = """g (float[1,10,16] x) => (float[1,10,16] y) {
    [q] a = MatMul(x, wq) [qb] a2 = Add(a, bq) [qr] a3 = Reshape(a2, s) [qt] q = Transpose<perm=[0,2,1,3]>(a3)
    [k] b = MatMul(x, wk) [kr] b3 = Reshape(b, s) [kt] k = Transpose<perm=[0,2,3,1]>(b3)
    [v] c = MatMul(x, wv) [vr] c3 = Reshape(c, s) [vt] v = Transpose<perm=[0,2,1,3]>(c3)
    [scores] d = MatMul(q, k) [soft] e = Softmax<axis=-1>(d) [mix] f = MatMul(e, v)
    [back] g2 = Transpose<perm=[0,2,1,3]>(f) [flat] h = Reshape(g2, t) [norm] y = LayerNormalization(h, g, n)
}"""


@ncnn
def test_attention_is_written_as_products(tmp_path: Path) -> None:
    weights = {name: floats(16, 16) for name in ("wq", "wk", "wv")} | {
        "bq": floats(16),
        "g": floats(16),
        "n": floats(16),
    }
    model, file = write(tmp_path, ATTENTION, {**weights, "s": ints(1, 10, 4, 4), "t": ints(1, 10, 16)})
    inputs = {"x": np.random.default_rng(1).normal(0, 1, (1, 10, 16)).astype(np.float32)}
    assert sqnr_db(run_onnx(model, inputs)["y"], run_ncnn(file, inputs)["y"]) >= LEAST_DB


@ncnn
def test_stacked_matrices_are_repeated(tmp_path: Path) -> None:
    text = "g (float[1,2,3,4] a, float[5,2,4,6] b) => (float[5,2,3,6] y) { [n] y = MatMul(a, b) }"
    model, file = write(tmp_path, text, {})
    random = np.random.default_rng(1)
    inputs = {
        name: random.normal(0, 1, shape).astype(np.float32)
        for name, shape in (("a", (1, 2, 3, 4)), ("b", (5, 2, 4, 6)))
    }
    assert sqnr_db(run_onnx(model, inputs)["y"], run_ncnn(file, inputs)["y"]) >= LEAST_DB


@ncnn
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3)])
def test_a_recurrent_layer_keeps_the_meaning_of_its_gates(
    kind: str, gates: int, direction: str, tmp_path: Path
) -> None:
    count = 2 if direction == "bidirectional" else 1
    reset = ", linear_before_reset=1" if kind == "GRU" else ""
    text = f"""g (float[7,1,5] x) => (float[7,{count},1,6] y) {{
        [n] y = {kind}<hidden_size=6, direction="{direction}"{reset}>(x, w, r, b)
    }}"""
    constants = {
        "w": floats(count, gates * 6, 5),
        "r": floats(count, gates * 6, 6),
        "b": floats(count, 2 * gates * 6),
    }
    model, file = write(tmp_path, text, constants)
    inputs = {"x": np.random.default_rng(1).normal(0, 1, (7, 1, 5)).astype(np.float32)}
    assert sqnr_db(run_onnx(model, inputs)["y"], run_ncnn(file, inputs)["y"]) >= LEAST_DB


REFUSED = {
    "NonZero is not known": ("NonZero(x)", [4, "n"], "does not write this operator", "int64"),
    "a nearest place above": (
        'Resize<mode="nearest", nearest_mode="ceil">(x, , s)',
        [1, 4, 12, 16],
        "picks other pixels",
        "float",
    ),
    "cubic": ('Resize<mode="cubic">(x, , s)', [1, 4, 12, 16], "mode is cubic", "float"),
    "a root of a number": ("Pow(x, c)", IMAGE, "its exponent is 0.3", "float"),
    "a mean along the batch": ("Softmax<axis=0>(x)", IMAGE, "along the batch", "float"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_node_that_ncnn_cannot_express_is_named(name: str, tmp_path: Path) -> None:
    node, shape, reason, kind = REFUSED[name]
    text = f"g (float[1,4,6,8] x) => ({kind}[{','.join(map(str, shape))}] y) {{ [odd] y = {node} }}"
    constants = {"s": np.array([1, 1, 2, 2], np.float32), "c": np.array(0.3, np.float32)}
    with pytest.raises(ModelError, match=rf"node 'odd'.*{reason}"):
        write(tmp_path, text, constants)
