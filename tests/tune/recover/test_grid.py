"""`edgeq.tune.recover.grid` against QuantizeLinear with the scale and zero point of onnxruntime's quantizer."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnxruntime.quantization.quant_utils import compute_scale_zp, get_qmin_qmax_for_qType

from edgeq.calibrate.range_method import grid_of
from edgeq.calibrate.ranges import Range
from edgeq.tune.recover.grid import rounded, scale_and_zero

TYPES = {"uint8": (onnx.TensorProto.UINT8, np.uint8), "int8": (onnx.TensorProto.INT8, np.int8)}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (0.0, 7.3), (-5.1, 0.0), (-0.01, 100.0)])
def test_as_the_quantizer_rounds(kind: str, symmetric: bool, low: float, high: float) -> None:
    number, dtype = TYPES[kind]
    least, most = get_qmin_qmax_for_qType(number, symmetric=symmetric)
    zero, scale = compute_scale_zp(np.float32(low), np.float32(high), least, most, symmetric)
    values = np.random.default_rng(0).uniform(1.5 * low - 1, 1.5 * high + 1, 999)
    limits = np.iinfo(dtype)
    wanted = (np.clip(np.rint(values / float(scale)) + int(zero), limits.min, limits.max) - int(zero)) * float(scale)
    made = rounded(values, Range(low, high), grid_of(kind, symmetric))
    # int8 symmetric leaves -128 out here; the type has it.
    inside = (values > -max(-low, high)) | (kind == "uint8") | (not symmetric)
    # A value halfway between two steps may go either way: the quantizer's scale is float32.
    assert (np.abs(made - wanted)[inside] > 1e-5 * (high - low)).mean() < 0.005


def test_an_empty_range_gives_zeros() -> None:
    grid = grid_of("uint8", False)
    assert scale_and_zero(Range(0.0, 0.0), grid)[0] == 0
    np.testing.assert_array_equal(rounded(np.array([-1.0, 2.0]), Range(0.0, 0.0), grid), [0.0, 0.0])
