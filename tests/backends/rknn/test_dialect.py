"""Test the file in the compiler's dialect: what it must not contain, and that it computes what the plain Q/DQ file
computes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeq.backends.rknn.data import dialect
from edgeq.backends.rknn.dialect import (
    off_zero,
    open_swish,
    shift_constants,
    shifts,
    split_pools,
    write_defaults,
)
from edgeq.calibration.ranges import Range
from edgeq.errors import ModelError
from edgeq.model.convert import from_proto
from edgeq.model.graph import constant, is_constant
from edgeq.model.load import read_model, save_model
from edgeq.model.opset import lower_opset
from edgeq.quantization.params import scheme_params
from edgeq.run.session import SessionSettings, open_session
from tests.backends.build import random, residual
from tests.backends.rknn.build import SCHEME, build_artifact
from tests.graphs import proto

PAIR = "{0}q = QuantizeLinear({0}, s, z) {0}d = DequantizeLinear({0}q, s, z)"
SCALE = {"s": np.array(0.05, np.float32), "z": np.array(3, np.int8)}


def unfused(model: onnx.ModelProto | Path, folder: Path, **feed: NDArray[np.float32]) -> NDArray[np.float32]:
    path = model if isinstance(model, Path) else folder / "unfused.onnx"
    if not isinstance(model, Path):
        onnx.save(model, path)
    output: NDArray[np.float32] = open_session(path, SessionSettings(optimization="none")).run(None, feed)[0]
    return output


def rewritten(model: onnx.ModelProto, change: object, folder: Path) -> Path:
    onnx_model = from_proto(model)
    change(onnx_model)  # type: ignore[operator]
    save_model(onnx_model, folder / "rewritten.onnx")
    return folder / "rewritten.onnx"


@given(
    st.lists(st.integers(-128, 127), min_size=1, max_size=20),
    st.integers(-128, 127),
)
def test_shifted_integers_stand_for_the_same_numbers(values: list[int], zero: int) -> None:
    integers, zeros = np.array(values, np.int8), np.array(zero, np.int8)
    shift = shifts(integers, zeros, 0)
    moved, point = integers.astype(int) + shift, int(zeros) + int(shift)
    assert np.array_equal(moved - point, integers.astype(int) - zero)
    assert moved.min() >= -128
    assert moved.max() <= 127
    assert point != 0 or {-128, 127} <= set(values)
    if min(values) > -127 or max(values) < 127:  # they do not fill the range of a symmetric scale
        assert moved.min() > -128 or min(values) == -128


@given(st.floats(-1e4, 1e4, width=32), st.floats(-1e4, 1e4, width=32))
def test_no_range_has_zero_point_0_and_none_is_narrower(one: float, other: float) -> None:
    span = Range(min(one, other, 0.0), max(one, other, 0.0))
    moved = off_zero({"x": span}, SCHEME)["x"]
    old_params, new_params = scheme_params(span, SCHEME), scheme_params(moved, SCHEME)
    if int(old_params.zero_point) == 0 and span.high > span.low:
        assert int(new_params.zero_point) == -1
        assert np.isclose(new_params.scale, old_params.scale * 128 / 127, rtol=1e-6)
        low, high = old_params.range
        assert new_params.range[0] <= low * (1 - 1e-6)
        assert new_params.range[1] >= high * (1 - 1e-6)
    else:
        assert moved == span


def test_a_built_file_has_no_zero_point_0_but_those_of_biases(tmp_path: Path) -> None:
    artifact, prepared, samples = build_artifact(residual(), tmp_path)
    model = read_model(artifact.model)
    points = [
        constant(node.inputs[2])
        for node in model.graph
        if node.op_type in ("QuantizeLinear", "DequantizeLinear") and node.inputs[0] is not None
        if not (is_constant(node.inputs[0]) and node.inputs[0].dtype is ir.DataType.INT32)
    ]
    assert points
    assert all(np.all(point != 0) for point in points if point is not None)
    weights = [v for v in model.graph.initializers.values() if v.dtype is ir.DataType.INT8 and len(v.shape or ()) > 1]
    assert weights
    assert all(constant(weight).min() >= -127 for weight in weights)  # type: ignore[union-attr]
    feed = dict(next(iter(samples)).inputs)
    reference = open_session(prepared.path).run(None, feed)[0]
    output = unfused(artifact.model, tmp_path, **feed)
    assert np.abs(output - reference).max() < 0.1 * np.abs(reference).max()


def test_shifting_changes_no_value(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = {
        **SCALE,
        "w": rng.integers(-127, 128, (4, 3, 3, 3)).astype(np.int8),
        "ws": np.full(4, 0.01, np.float32),
        "wz": np.zeros(4, np.int8),
        "c": rng.integers(-127, 128, (1, 4, 1, 1)).astype(np.int8),
    }
    nodes = f"""
        {PAIR.format("x")}
        wd = DequantizeLinear<axis = 0>(w, ws, wz)
        y = Conv(xd, wd) {PAIR.format("y")}
        cd = DequantizeLinear(c, s)
        o = Add(yd, cd)
    """
    model = proto(f"g (float[1, 3, 8, 8] x) => (float[1, 4, 6, 6] o) {{ {nodes} }}", weights)
    feed = {"x": rng.normal(size=(1, 3, 8, 8)).astype(np.float32)}
    output = unfused(model, tmp_path, **feed)
    moved = rewritten(model, shift_constants, tmp_path)
    assert np.array_equal(unfused(moved, tmp_path, **feed), output)
    zeros = [constant(n.inputs[2]) for n in read_model(moved).graph if is_constant(n.inputs[0])]
    assert all(np.all(np.abs(zero) == 1) for zero in zeros)  # type: ignore[arg-type]


@pytest.mark.parametrize(("window", "count"), [(5, 1), (7, 1), (9, 2), (13, 3)])
def test_large_pools_are_chains_that_compute_the_same(window: int, count: int, tmp_path: Path) -> None:
    pads, kernel = [(window - 1) // 2] * 4, [window] * 2
    text = f"[pool] y = MaxPool<kernel_shape = {kernel}, pads = {pads}, strides = [1, 1]>(x)"
    model = proto(f"g (float[1, 2, 16, 16] x) => (float[1, 2, 16, 16] y) {{ {text} }}", {})
    x = random(1, 2, 16, 16)
    changed = rewritten(model, split_pools, tmp_path)
    assert np.array_equal(unfused(changed, tmp_path, x=x), unfused(model, tmp_path, x=x))
    nodes = list(read_model(changed).graph)
    assert len(nodes) == count
    assert nodes[-1].name == "pool"


@pytest.mark.parametrize("change", ["strides = [2, 2]", "ceil_mode = 1, strides = [1, 1]", "dilations = [2, 2]"])
def test_other_pools_stay(change: str) -> None:
    text = f"y = MaxPool<kernel_shape = [9, 9], pads = [4, 4, 4, 4], {change}>(x)"
    model = from_proto(proto(f"g (float[1, 2, 32, 32] x) => (float[N, C, H, W] y) {{ {text} }}", {}))
    assert split_pools(model) == {}


@pytest.mark.parametrize(("other", "opened"), [("xd", True), ("td", False)])
def test_the_pair_inside_a_swish_goes_where_both_read_one_tensor(other: str, opened: bool, tmp_path: Path) -> None:
    nodes = f"""
        {PAIR.format("x")} t = Neg(xd) {PAIR.format("t")}
        g = Sigmoid(xd) {PAIR.format("g")}
        m = Mul({other}, gd) {PAIR.format("m")}
        o = Identity(md)
    """
    model = proto(f"g (float[1, 8] x) => (float[1, 8] o) {{ {nodes} }}", SCALE)
    changed = rewritten(model, open_swish, tmp_path)
    assert ("gd" not in {name for node in onnx.load(changed).graph.node for name in node.input}) == opened
    x = random(1, 8)
    level = np.clip(np.rint(x / np.float32(0.05)) + 3, -128, 127)
    rounded = ((level - 3) * np.float32(0.05)).astype(np.float32)
    if opened:
        product = rounded / (1 + np.exp(-rounded))
        expected = (np.clip(np.rint(product / np.float32(0.05)) + 3, -128, 127) - 3) * np.float32(0.05)
        assert np.allclose(unfused(changed, tmp_path, x=x), expected, atol=1e-6)


def test_defaults_are_written_and_zeros_left_out() -> None:
    text = """
        l = LayerNormalization(x, w)
        y = Identity(l)
    """
    model = from_proto(proto(f"g (float[1, 8] x) => (float[1, 8] y) {{ {text} }}", {"w": np.ones(8, np.float32)}))
    write_defaults(model)
    assert next(iter(model.graph)).attributes.get_float("epsilon", 0.0) == pytest.approx(1e-5)


def test_a_newer_opset_is_lowered_where_operators_mean_the_same() -> None:
    model = from_proto(proto("g (float[1, 8] x) => (float[1, 8] y) { y = Relu(x) }", {}, opset=21))
    lower_opset(model, Path("m.onnx"), dialect().opset, "Rockchip's compiler")
    assert model.graph.opset_imports[""] == 19
    gelu = from_proto(proto("g (float[1, 8] x) => (float[1, 8] y) { [act] y = Gelu(x) }", {}, opset=21))
    with pytest.raises(ModelError, match=r"m\.onnx: 'act' is the Gelu of opset 21.* ends at 19\. Export"):
        lower_opset(gelu, Path("m.onnx"), dialect().opset, "Rockchip's compiler")


def test_an_excluded_layer_keeps_float_weights_and_pairs_on_both_sides(tmp_path: Path) -> None:
    artifact, _, _ = build_artifact(residual(), tmp_path, exclude=("last",))
    node = next(node for node in read_model(artifact.model).graph if node.name == "last")
    assert constant(node.inputs[1]).dtype == np.float32  # type: ignore[union-attr]
    assert node.inputs[0].producer().op_type == "DequantizeLinear"  # type: ignore[union-attr]
    assert [use.node.op_type for use in node.outputs[0].uses()] == ["QuantizeLinear"]


def test_chips_without_float16_refuse_float_layers(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="RV1106 has no float16 for 'last'"):
        build_artifact(residual(), tmp_path, exclude=("last",), target="rv1106")
