"""Test quantize_qat: models with Q and DQ from training become integer operators."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx
import pytest

from compat.networks import residual
from edgeq.compat import QuantType
from edgeq.compat.files import quantize_qat
from edgeq.errors import ModelError
from tests.retargeting.networks import example, kinds, residual_s8s8, run, tflite_int8, torch_qat

pytestmark = pytest.mark.usefixtures("exact_kernels")


@pytest.mark.parametrize("make", [residual_s8s8, torch_qat, tflite_int8])
def test_integer_operators_that_answer_alike(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    given = make()
    written = quantize_qat(given, tmp_path / "q.onnx")
    onnx.checker.check_model(onnx.load(written.output))
    assert "QLinearConv" in kinds(written.output)
    inputs = example(given)
    one, other = run(written.output, inputs).astype(float), run(given, inputs, optimized=False).astype(float)
    assert np.abs(one - other).max() <= 0.02 * np.abs(other).max()


def test_types_and_nodes_are_the_callers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    onnx.save(residual_s8s8(), tmp_path / "f.onnx")
    with caplog.at_level(logging.WARNING):
        quantize_qat(
            tmp_path / "f.onnx",
            tmp_path / "q.onnx",
            op_types_to_quantize=["Conv"],
            per_channel=True,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=["Conv_c2"],
        )
    assert "decided in training" in caplog.text
    found = kinds(tmp_path / "q.onnx")
    assert (found.count("QLinearConv"), found.count("Conv"), found.count("Add")) == (1, 1, 1)
    assert {t.data_type for t in onnx.load(tmp_path / "q.onnx").graph.initializer} <= {
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.INT8,
        onnx.TensorProto.INT32,
        onnx.TensorProto.INT64,
    }


def test_a_float_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not quantized"):
        quantize_qat(residual(), tmp_path / "q.onnx")
