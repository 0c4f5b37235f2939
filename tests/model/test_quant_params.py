from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from edgeq.model.convert import to_proto
from edgeq.model.edit import Editor
from edgeq.model.quant_params import LIMITS, QuantParams, dynamic_params
from tests.graphs import model

TYPES = [ir.DataType.UINT8, ir.DataType.INT8]
VALUES = hnp.arrays(np.float32, (3, 4), elements=st.floats(-100, 100, width=32))
SCALES = st.floats(2**-10, 10, width=32)


def by_onnx(params: QuantParams, values: NDArray[np.float32]) -> tuple[NDArray[np.generic], NDArray[np.float32]]:
    """Return the integers and their dequantized values by onnx's reference, on a graph that `Editor` made."""
    net = model("net (float[3,4] x) => (float[3,4] e) { e = Identity(x) }", opset=21, ir_version=10)
    editor = Editor(net)
    integers = editor.quantize(net.graph.inputs[0], params, "q")
    numbers = editor.dequantize(integers, params, "d")
    net.graph.outputs[:] = [integers, numbers]
    made = ReferenceEvaluator(to_proto(net)).run(None, {"x": values})
    return made[0], made[1]


@given(VALUES, SCALES, st.sampled_from(TYPES), st.data())
def test_the_arithmetic_is_that_of_onnx(
    values: NDArray[np.float32], scale: float, dtype: ir.DataType, data: st.DataObject
) -> None:
    zero = data.draw(st.integers(*LIMITS[dtype]))
    params = QuantParams(np.float32(scale), np.asarray(zero), dtype)
    integers, numbers = by_onnx(params, values)
    np.testing.assert_array_equal(params.quantize(values), integers)
    np.testing.assert_array_equal(params.dequantize(params.quantize(values)), numbers)
    np.testing.assert_array_equal(params.fake_quant(values), numbers)


@given(VALUES, hnp.arrays(np.float32, 4, elements=SCALES), st.sampled_from(TYPES))
def test_channels_have_scales_of_their_own(
    values: NDArray[np.float32], scale: NDArray[np.float32], dtype: ir.DataType
) -> None:
    params = QuantParams(scale, np.asarray([3, 0, 1, 2]), dtype, axis=1)
    integers, numbers = by_onnx(params, values)
    np.testing.assert_array_equal(params.quantize(values), integers)
    np.testing.assert_array_equal(params.fake_quant(values), numbers)


@given(st.floats(-50, 50, width=32), st.floats(0, 100, width=32), st.sampled_from(TYPES), st.booleans(), st.booleans())
def test_a_range_fits_with_zero_inside(
    low: float, span: float, dtype: ir.DataType, symmetric: bool, narrow: bool
) -> None:
    high = low + span
    params = QuantParams.from_range(low, high, dtype, symmetric=symmetric, narrow=narrow and dtype is ir.DataType.INT8)
    if not params.scale:
        assert low == high == 0 or max(high, 0) == min(low, 0)
        return
    least, most = params.range
    step = float(params.scale)
    # A zero point between two integers is rounded, which moves the range by half a step.
    assert least <= min(low, 0) + step * 0.51
    assert most >= max(high, 0) - step * 0.51
    assert params.low <= int(params.zero_point) <= params.high


def test_a_value_without_axes_is_rounded_alike() -> None:
    params = QuantParams(np.float32(0.5), np.asarray(0), ir.DataType.INT8)
    for value, rounded in ((0.8, 1.0), (100.0, 63.5)):
        left = params.fake_quant(np.asarray(value, np.float32))
        assert (left.shape, left.item()) == ((), rounded)


def test_blocks_share_a_scale() -> None:
    params = QuantParams(np.asarray([[1.0, 2.0]], np.float32), np.zeros((1, 2), np.int64), ir.DataType.INT4, 1, block=2)
    np.testing.assert_array_equal(params.fake_quant(np.asarray([[1.2, 2.6, 3.2, 50.0]], np.float32)), [[1, 3, 4, 14]])


def test_saturated_counts_what_clipping_costs() -> None:
    params = QuantParams(np.float32(1), np.asarray(0), ir.DataType.UINT8)
    assert params.saturated(np.asarray([-1.0, -0.4, 0.0, 255.4, 256.0, 300.0], np.float32)) == (1, 2)


@pytest.mark.parametrize("values", [[-1.0, 3.0], [2.0, 3.0], [0.0, 0.0], [-np.inf, 0.0, 1.0]])
def test_dynamic_quantization_holds_zero(values: list[float]) -> None:
    params = dynamic_params(np.asarray(values, np.float32))
    assert params.dequantize(params.quantize(np.zeros(1, np.float32))) == 0
    # The zero point is rounded, which moves the range by up to half a step.
    assert params.range[1] >= max(values) - 0.5 * float(params.scale)


def test_same_looks_at_what_integers_mean() -> None:
    one = QuantParams(np.asarray([2.0], np.float32), np.asarray([1]), ir.DataType.INT8)
    assert one.equals(QuantParams(np.float32(2), np.asarray(1), ir.DataType.INT8, axis=1))
    assert not one.equals(QuantParams(np.float32(2), np.asarray(1), ir.DataType.UINT8))
