from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from edgeq.model.convert import from_proto, to_proto
from edgeq.model.load import read_model
from edgeq.model.macs import node_macs, with_sizes
from tests import graphs

from .build import model, node, rand, small_cnn


def macs_of(proto: onnx.ModelProto) -> dict[str, int]:
    return node_macs(from_proto(proto))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Published: 41 M for MobileNet v1 0.25 at 224 (its paper), 2.66 M, 7.49 M and 0.264 M for MLPerf Tiny.
        ("mobilenet_v1_0.25_224", 41_030_528),
        ("mlperf_tiny_kws", 2_656_768),
        ("mlperf_tiny_vww", 7_489_664),
        ("mlperf_tiny_ad", 264_192),
        ("resnet20_cifar10", 40_551_040),  # 40.55 M in the ResNet paper's layer plan
        ("lenet_mnist", 2_293_000),
    ],
)
def test_real_models(shared_data: Path, name: str, expected: int) -> None:
    assert sum(node_macs(read_model(shared_data / name / "model.onnx")).values()) == expected


def convolution_by_hand(
    size: int, c_in: int, c_out: int, kernel: int, stride: int, dilation: int, group: int, transposed: bool
) -> tuple[int, int]:
    """Return the counted multiplications of a one-dimensional convolution without padding, and its output size."""
    reach = (kernel - 1) * dilation + 1
    count = 0
    if transposed:
        out = (size - 1) * stride + reach
        for _, c, k in itertools.product(range(size), range(c_in), range(kernel)):
            assert c < c_in
            assert k < kernel
            count += c_out // group
        return count, out
    out = (size - reach) // stride + 1
    for o, position, k, c in itertools.product(range(c_out), range(out), range(kernel), range(c_in)):
        if c // (c_in // group) == o // (c_out // group):
            assert position * stride + k * dilation < size
            count += 1
    return count, out


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(5, 9),
    per_group=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    group=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    batch=st.sampled_from([1, 2, "N"]),
    transposed=st.booleans(),
)
def test_convolutions_against_counting(
    size: int,
    per_group: tuple[int, int],
    group: int,
    kernel: int,
    stride: int,
    dilation: int,
    batch: Any,
    transposed: bool,
) -> None:
    c_in, c_out = per_group[0] * group, per_group[1] * group
    shape = (c_in, per_group[1], kernel) if transposed else (c_out, per_group[0], kernel)
    op_type = "ConvTranspose" if transposed else "Conv"
    op = node(op_type, ["x", "w"], ["y"], name="c", group=group, strides=[stride], dilations=[dilation])
    proto = model([op], {"x": [batch, c_in, size]}, weights={"w": rand(*shape)})
    expected, _ = convolution_by_hand(size, c_in, c_out, kernel, stride, dilation, group, transposed)
    assert macs_of(proto) == {"c": expected * (batch if isinstance(batch, int) else 1)}


class Number:
    multiplications = 0

    def __mul__(self, other: Number) -> Number:
        Number.multiplications += 1
        return self

    def __add__(self, other: Number) -> Number:
        return self


def numbers(*shape: int) -> np.ndarray[Any, Any]:
    return np.array([Number() for _ in range(math.prod(shape))], dtype=object).reshape(shape)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.sampled_from(
        [
            ((3, 4), (4, 5)),
            ((2, 3, 4), (4, 5)),
            ((3, 4), (2, 4, 5)),
            ((2, 1, 3, 4), (3, 4, 2)),
            ((2, 3, 4), (2, 4, 1)),
            ((4,), (4, 5)),
            ((3, 4), (4,)),
            ((4,), (4,)),
        ]
    )
)
def test_matmul_against_counting(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = shapes
    Number.multiplications = 0
    np.matmul(numbers(*a), numbers(*b))
    proto = model([node("MatMul", ["x", "w"], ["y"], name="m")], {"x": a}, weights={"w": rand(*b)})
    assert macs_of(proto) == {"m": Number.multiplications}


@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
def test_gemm_transposes(trans_a: int, trans_b: int) -> None:
    op = node("Gemm", ["x", "w"], ["y"], name="g", transA=trans_a, transB=trans_b)
    weights = {"w": rand(5, 4) if trans_b else rand(4, 5)}
    assert macs_of(model([op], {"x": [4, 3] if trans_a else [3, 4]}, weights=weights)) == {"g": 3 * 4 * 5}


@pytest.mark.parametrize(("op_type", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
@pytest.mark.parametrize("directions", [1, 2])
def test_recurrent(op_type: str, gates: int, directions: int) -> None:
    steps, batch, width, hidden = 7, 2, 5, 3
    weights = {"w": rand(directions, gates * hidden, width), "r": rand(directions, gates * hidden, hidden)}
    direction = "bidirectional" if directions == 2 else "forward"
    op = node(op_type, ["x", "w", "r"], ["y"], name="r", hidden_size=hidden, direction=direction)
    expected = steps * batch * directions * gates * hidden * (width + hidden)
    assert macs_of(model([op], {"x": [steps, batch, width]}, weights=weights)) == {"r": expected}


def test_einsum() -> None:
    op = node("Einsum", ["x", "w"], ["y"], name="e", equation="bij,jk->bik")
    assert macs_of(model([op], {"x": [2, 3, 4]}, weights={"w": rand(4, 5)})) == {"e": 2 * 3 * 4 * 5}


def test_attention() -> None:
    op = node("Attention", ["q", "k", "v"], ["y"], name="a")
    shapes = {"q": [2, 4, 5, 8], "k": [2, 4, 7, 8], "v": [2, 4, 7, 6]}
    expected = 2 * 4 * 5 * 7 * 8 + 2 * 4 * 5 * 7 * 6
    assert macs_of(model([op], shapes, opset=23, ir_version=10)) == {"a": expected}
    op = node("Attention", ["q", "k", "v"], ["y"], name="a", q_num_heads=4, kv_num_heads=4)
    flat = {"q": [2, 5, 32], "k": [2, 7, 32], "v": [2, 7, 24]}
    assert macs_of(model([op], flat, opset=23, ir_version=10)) == {"a": expected}


def test_quantized_forms_count_as_their_float_ones() -> None:
    scales = {f"s{i}": np.float32(1) for i in range(3)} | {f"z{i}": np.uint8(0) for i in range(3)}
    weight = np.ones((6, 4, 3, 3), np.uint8)
    op = node("QLinearConv", ["x", "s0", "z0", "w", "s1", "z1", "s2", "z2"], ["y"], name="q")
    proto = model([op], {"x": [1, 4, 8, 8]}, weights={**scales, "w": weight}, dtype=TensorProto.UINT8)
    assert macs_of(proto) == {"q": 6 * 6 * 6 * 4 * 3 * 3}
    op = node("QGemm", ["x", "s0", "z0", "w", "s1", "z1"], ["y"], name="q", domain="com.microsoft", transB=1)
    weights = {**scales, "w": np.ones((5, 4), np.uint8)}
    proto = model([op], {"x": [3, 4]}, weights=weights, dtype=TensorProto.UINT8, domains=["com.microsoft"])
    assert macs_of(proto) == {"q": 3 * 4 * 5}


def test_unnamed_nodes_subgraphs_and_other_operators() -> None:
    body = helper.make_graph(
        [node("MatMul", ["x", "w"], ["t"], name="inside")],
        "then",
        [],
        [helper.make_tensor_value_info("t", TensorProto.FLOAT, [2, 5])],
    )
    other = helper.make_graph(
        [node("MatMul", ["x", "v"], ["e"], name="inside")],
        "else",
        [],
        [helper.make_tensor_value_info("e", TensorProto.FLOAT, [2, 5])],
    )
    nodes = [node("If", ["c"], ["m"], then_branch=body, else_branch=other), node("Relu", ["m"], ["y"])]
    weights = {"w": rand(4, 5), "v": rand(4, 5), "c": np.array(True)}
    counts = macs_of(model(nodes, {"x": [2, 4]}, weights=weights))
    assert sum(counts.values()) == 2 * 4 * 5, "of two branches one is run"
    assert set(counts) == {"If_0", "Relu_1", "inside", "inside_3"}


def test_the_model_is_left_as_it_was() -> None:
    proto = small_cnn()
    proto.graph.node[0].name = ""
    unnamed = from_proto(proto)
    before = to_proto(unnamed)
    assert node_macs(unnamed)["Conv_0"] == 8 * 8 * 8 * 27
    assert to_proto(unnamed) == before


def test_the_larger_branch_of_an_if_counts_with_its_recurrent_layers() -> None:
    """The MACs of an If are those of its larger branch, recurrent layers included.

    silero-vad has this form: one network with an LSTM for each sample rate.
    """
    body = """{name} () => (float[S,1,B,{hidden}] {name}_y)
        {{ {name}_w = Constant <value = float[1,{rows},5] {{ {w} }}> ()
        {name}_r = Constant <value = float[1,{rows},{hidden}] {{ {r} }}> ()
        {name}_y = LSTM <hidden_size = {hidden}> (x, {name}_w, {name}_r) }}"""

    def branch(name: str, hidden: int) -> str:
        rows = 4 * hidden
        return body.format(
            name=name, hidden=hidden, rows=rows, w=",".join(["1"] * rows * 5), r=",".join(["1"] * rows * hidden)
        )

    text = f"""<ir_version: 8, opset_import: ["": 17]> g (bool c, float[7,2,5] x) => (float y)
        {{ y = If (c) <then_branch = {branch("a", 2)}, else_branch = {branch("b", 3)}> }}"""
    macs = node_macs(from_proto(onnx.parser.parse_model(text)))
    assert sum(macs.values()) == 7 * 2 * (12 * 5 + 12 * 3)


def test_sizes_that_the_model_knows_and_inference_does_not_find_are_counted_with() -> None:
    """MACs use a size that only the file states, such as that of a Reshape to a computed shape."""
    known = graphs.model(f"""
        g (float[N, 2, 4, 4] x, int64[4] s) => (float[N, 8, 4, 4] y)
        <float[8, 2, 1, 1] w = {{{",".join("1" * 16)}}}, float[N, 2, 4, 4] r>
        {{ r = Reshape (x, s)
           [conv] y = Conv <kernel_shape = [1, 1]> (r, w) }}
        """)
    assert node_macs(with_sizes(known, {"x": (3, 2, 4, 4)}))["conv"] == 3 * 8 * 2 * 16
    # At sizes other than the described ones, the file's descriptions of tensors no longer hold.
    assert node_macs(with_sizes(known, {"x": (3, 2, 4, 8)}))["conv"] == 8 * 2
