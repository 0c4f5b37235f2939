"""Test quantize_dynamic against onnxruntime's own with the same options."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime.quantization as theirs
import pytest

from compat.networks import assert_same_quantization, relative_error, run
from edgeq.compat import QuantType
from edgeq.compat.files import quantize_dynamic
from edgeq.errors import ModelError, RuntimeUnavailableError, UsageError
from tests.graphs import proto


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_type": QuantType.QUInt8},
        {"per_channel": True, "reduce_range": True},
        {"op_types_to_quantize": ["MatMul"]},
        {"nodes_to_quantize": ["conv1"]},
        {"nodes_to_exclude": ["conv1"]},
        {"extra_options": {"WeightSymmetric": False, "MatMulConstBOnly": False}},
        {"extra_options": {"EnableSubgraph": True}},
    ],
    ids=str,
)
def test_it_writes_what_onnxruntime_does(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    quantize_dynamic(model, tmp_path / "ours.onnx", **options)
    theirs.quantize_dynamic(model, tmp_path / "theirs.onnx", **options)
    assert_same_quantization(tmp_path / "ours.onnx", tmp_path / "theirs.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "ours.onnx"))
    np.testing.assert_allclose(run(tmp_path / "ours.onnx")[0], run(tmp_path / "theirs.onnx")[0], rtol=1e-6)


def test_parameters_of_2020_to_2022_are_taken(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = onnx.load(model)
    with caplog.at_level(logging.WARNING):
        quantize_dynamic(
            given,
            tmp_path / "q.onnx",
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QUInt8,
            optimize_model=False,
            use_external_data_format=False,
            nodes_to_exclude=["no such"],
            extra_options={"CalibPercentile": 99.0},
        )
    assert relative_error(run(tmp_path / "q.onnx")[0], run(model)[0]) < 0.05
    assert "no node is named 'no such'" in caplog.text
    assert "CalibPercentile" in caplog.text


def test_the_attention_of_opset_23_stays_what_it_is(tmp_path: Path) -> None:
    """The Attention of opset 23 stays. onnxruntime's function writes a QAttention of three tensors, which it cannot
    load.
    """
    body = """net (float[1, 6, 32] x) => (float[1, 6, 32] y) {
        [project_q] q = MatMul(x, wq)
        [project_k] k = MatMul(x, wk)
        [project_v] v = MatMul(x, wv)
        [attend] y = Attention<q_num_heads = 4, kv_num_heads = 4>(q, k, v)
    }"""
    rng = np.random.default_rng(0)
    weights = {f"w{name}": rng.normal(size=(32, 32)).astype(np.float32) for name in "qkv"}
    onnx.save(proto(body, weights, opset=23, ir_version=11), tmp_path / "m.onnx")
    quantize_dynamic(tmp_path / "m.onnx", tmp_path / "q.onnx")
    written = [n.op_type for n in onnx.load(tmp_path / "q.onnx").graph.node]
    assert written.count("Attention") == 1
    assert written.count("MatMulInteger") == 3


def test_nothing_quantized_is_no_success(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nothing in it was quantized"):
        quantize_dynamic(model, tmp_path / "q.onnx", op_types_to_quantize=["LSTM"])
    assert not (tmp_path / "q.onnx").exists()


def test_refuses_unsupported_dynamic_requests(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeUnavailableError, match=r"refuses .*/16\.onnx: .*int16.*Choose other types") as caught:
        quantize_dynamic(model, tmp_path / "16.onnx", weight_type="QInt16")
    assert ".partial" not in str(caught.value)
    with pytest.raises(UsageError, match="as uint8"):
        quantize_dynamic(model, tmp_path / "q.onnx", activation_type=QuantType.QInt8)
    quantize_dynamic(model, tmp_path / "once.onnx")
    with pytest.raises(ModelError, match="quantized already"):
        quantize_dynamic(tmp_path / "once.onnx", tmp_path / "twice.onnx")
    assert not (tmp_path / "twice.onnx").exists()
