from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgeq.backends.tensorrt.pairs import stored_scale, weight_axis, weight_params

MAGNITUDES = st.floats(0, 1e4, width=32)


@given(MAGNITUDES, st.sampled_from(["float32", "float16", "bfloat16"]))
def test_a_scale_is_one_that_the_type_holds_and_covers_the_range(magnitude: float, rest: str) -> None:
    scale = stored_scale(magnitude, rest)  # type: ignore[arg-type]
    kinds = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    assert scale.astype(kinds[rest]).astype(np.float32) == scale
    assert scale > 0
    assert scale * 127 >= magnitude * (1 - 1e-5)


def test_a_range_of_nothing_has_a_scale() -> None:
    assert stored_scale(0.0) == pytest.approx(1 / 127)


@given(arrays(np.float32, (3, 4), elements=st.floats(-100, 100, width=32)))
def test_weights_come_back_to_half_a_step(weight: np.ndarray) -> None:
    params = weight_params(weight, 0, "float16")
    integers, scale = params.quantize(weight), params.scale
    assert integers.dtype == np.int8
    assert integers.min() >= -127
    error = np.abs(integers * scale[:, None] - weight)
    assert np.all(error <= scale[:, None] * 0.5001 + 1e-12)


def test_one_scale_in_all_without_an_axis() -> None:
    weight = np.array([[1.0, -2.0]], np.float32)
    params = weight_params(weight, None)
    assert params.scale.shape == ()
    assert params.quantize(weight).tolist() == [[64, -127]]


@pytest.mark.parametrize(
    ("op_type", "attributes", "rank", "axis"),
    [
        ("Conv", {}, 4, 0),
        ("ConvTranspose", {}, 4, 1),
        ("Gemm", {"transB": 1}, 2, 0),
        ("Gemm", {}, 2, 1),
        ("MatMul", {}, 2, 1),
        ("MatMul", {}, 3, None),
    ],
)
def test_outputs_lie_along(op_type: str, attributes: dict[str, int], rank: int, axis: int | None) -> None:
    node = ir.node(op_type, [ir.val("x"), ir.val("w")], attributes=attributes)
    assert weight_axis(node, rank) == axis
