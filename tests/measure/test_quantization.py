from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from edgeq.measure.quantization import Quantization, dynamic_quantization
from edgeq.session import open_session

INT8, UINT8 = (-128, 127), (0, 255)


def quantization(scale: Any, zero_point: Any, levels: tuple[int, int] = UINT8, **rest: Any) -> Quantization:
    return Quantization(np.asarray(scale, np.float32), np.asarray(zero_point, np.int64), *levels, **rest)


def run(nodes: list[Any], constants: dict[str, np.ndarray], x: np.ndarray, outputs: dict[str, int]) -> list[np.ndarray]:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return list(open_session(model.SerializeToString()).run(None, {"x": x}))


@pytest.mark.parametrize(("levels", "dtype"), [(UINT8, np.uint8), (INT8, np.int8)])
@pytest.mark.parametrize("per_channel", [False, True])
def test_round_trip_is_what_onnxruntime_computes(
    levels: tuple[int, int], dtype: type[np.integer[Any]], per_channel: bool
) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(0, 20, (2, 5, 3)).astype(np.float32)
    size = 5 if per_channel else 1
    scale = rng.uniform(0.05, 0.3, size).astype(np.float32)
    zero = rng.integers(levels[0], levels[1], size).astype(dtype)
    if not per_channel:
        scale, zero = scale[0], zero[0]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], axis=1),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], axis=1),
    ]
    integers = TensorProto.UINT8 if dtype is np.uint8 else TensorProto.INT8
    constants = {"s": np.asarray(scale), "z": np.asarray(zero)}
    q, y = run(nodes, constants, x, {"q": integers, "y": TensorProto.FLOAT})
    how = quantization(scale, zero, levels, axis=1)
    np.testing.assert_array_equal(how.round_trip(x), y)
    np.testing.assert_array_equal(how.dequantize(q), y)
    assert how.per_channel is per_channel


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40))
@settings(max_examples=30)
def test_dynamic_scale_is_what_onnxruntime_takes(values: list[float]) -> None:
    x = np.array(values, np.float32)
    how = dynamic_quantization(x)
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"])
    q, s, z = run([node], {}, x, {"q": TensorProto.UINT8, "s": TensorProto.FLOAT, "z": TensorProto.UINT8})
    if s == 0 or not np.isfinite(1 / s):
        return  # all zeros, or too small for a scale: nothing to quantize
    assert float(how.scale) == pytest.approx(float(s), rel=1e-6)
    # Half a step is where the two may round apart, by one.
    np.testing.assert_allclose(how.round_trip(x), (q.astype(np.float32) - z) * s, atol=1.01 * float(s))


def test_saturation_counts_what_is_clipped_by_more_than_rounding() -> None:
    how = quantization(0.5, 10)  # -5 to 122.5
    values = np.array([-6, -5.3, -5.2, 0, 122.7, 122.8, 500], np.float32)
    assert how.range == (-5.0, 122.5)
    assert how.saturated(values) == (2, 2)


def test_saturation_by_channel() -> None:
    how = quantization([1.0, 2.0], [0, 0], INT8, axis=0)
    assert how.saturated(np.array([[200.0, -200], [200, -300]])) == (2, 1)
    assert how.range == (-256.0, 254.0)


def test_a_scale_for_each_block() -> None:
    how = quantization([[1.0, 10.0, 100.0]], [[0, 0, 1]], INT8, axis=1, block=2)
    integers = np.array([[1, 2, 3, 4, 5]], np.int8)
    np.testing.assert_array_equal(how.dequantize(integers), [[1, 2, 30, 40, 400]])


def test_bits() -> None:
    assert quantization(1.0, 0).bits == 8
    assert quantization(1.0, 0, (-8, 7)).bits == 4


def test_as_constants() -> None:
    scale, zero = quantization(0.5, 3, INT8).to_tensors("s", "z")
    assert (scale.name, zero.name, zero.data_type) == ("s", "z", TensorProto.INT8)
    assert numpy_helper.to_array(zero) == 3
