"""Test `edgeq.debug`, the command as a function."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from click.testing import CliRunner
from edgeq_device.system.relay import format_json

import edgeq
from edgeq.backends.cpu import CpuBackend
from edgeq.cli import group
from edgeq.measure.layers import LayerComparison
from edgeq.model.prepare import prepare_model
from edgeq.reporting.page import render
from edgeq.reporting.read import read_report
from edgeq.scheme import IntegerType, Scheme
from edgeq.util.records import plain
from tests.graphs import proto
from tests.measure.quantized_models import Quantized


def test_it_answers_as_the_command_does(quantized: Quantized) -> None:
    model = next(iter(quantized.models.values()))
    diagnosis = edgeq.debug(str(quantized.source), model, quantized.data, count=4, worst=2)
    assert isinstance(diagnosis.comparison, LayerComparison)
    assert diagnosis.comparison.samples == 4
    arguments = [
        str(quantized.source),
        str(model),
        "--data",
        str(quantized.data),
        "--count",
        "4",
        "--worst",
        "2",
        "--json",
    ]
    said = CliRunner().invoke(group, ["debug", *arguments])
    assert json.loads(said.stdout) == json.loads(format_json(plain(diagnosis)))


def test_options_reach_the_sessions(quantized: Quantized) -> None:
    model = next(iter(quantized.models.values()))
    options = {"session.disable_prepacking": "1"}
    diagnosis = edgeq.debug(quantized.source, model, quantized.data, count=1, session_options=options, threads=1)
    assert dict(diagnosis.settings.config) == options
    assert diagnosis.settings.intra_op_threads == 1


def test_integers_that_an_operator_of_the_runtime_makes_are_no_activations(tmp_path: Path) -> None:
    ids = np.random.default_rng(2).integers(0, 20, (8, 6)).astype(np.int32)
    np.savez(tmp_path / "data.npz", ids=ids, mask=np.ones_like(ids))
    onnx.save(embedded_attention(), tmp_path / "float.onnx")
    types: dict[str, IntegerType] = {"MatMul": "int8"}
    prepared = prepare_model(tmp_path / "float.onnx", tmp_path / "prepared")
    scheme = Scheme(mode="dynamic", dynamic_weight_types=types)
    CpuBackend().build(prepared, {}, scheme, tmp_path / "q.onnx")
    diagnosis = edgeq.debug(tmp_path / "float.onnx", tmp_path / "q.onnx", tmp_path / "data.npz")
    assert "lengths" not in {activation.name for activation in diagnosis.comparison.activations}
    assert {source.op_type for source in diagnosis.error_sources} >= {"MatMul"}


def embedded_attention() -> onnx.ModelProto:
    """Return ids, mask [N, 6] → EmbedLayerNormalization → Attention → MatMul → y.

    The second output of EmbedLayerNormalization is the lengths.
    """
    rng = np.random.default_rng(5)
    shapes = {"words": (20, 16), "places": (6, 16), "g": (16,), "s": (16,), "qkv": (16, 48), "b": (48,), "w": (16, 8)}
    weights = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    body = """network (int32[N, 6] ids, int32[N, 6] mask) => (float[N, 6, 8] y) {
        [embed] x, lengths = com.microsoft.EmbedLayerNormalization(ids, "", words, places, "", g, s, mask)
        [attend] a = com.microsoft.Attention<num_heads = 2>(x, qkv, b, lengths)
        [head] y = MatMul(a, w)
    }"""
    return proto(body, weights)


def test_dead_scores_beside_boxes_are_not_healthy(tmp_path: Path) -> None:
    """Scores up to 0.14 that share one scale with boxes up to 600 are reported as lost."""
    rng = np.random.default_rng(3)
    x = np.concatenate([rng.uniform(1, 600, (8, 4, 20)), rng.uniform(0, 0.14, (8, 8, 20))], axis=1).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x)
    head = "network (float[N, 12, 20] x) => (float[N, 12, 20] y) "
    onnx.save(proto(head + "{ y = Relu (x) }"), tmp_path / "float.onnx")
    scale, zero = np.float32(600 / 255), np.uint8(0)
    body = "{ m = Relu (x) q = QuantizeLinear (m, s, z) y = DequantizeLinear (q, s, z) }"
    onnx.save(proto(head + body, {"s": scale, "z": zero}), tmp_path / "q.onnx")
    diagnosis = edgeq.debug(tmp_path / "float.onnx", tmp_path / "q.onnx", tmp_path / "data.npz")
    (output,) = diagnosis.optimised.outputs
    assert output.sqnr_db > 50
    assert diagnosis.verdict == "poor"
    (warning,) = diagnosis.warnings
    assert warning.startswith("output 'y', 4..11 on axis 1: 0.0 dB SQNR against float32")
    html = render(read_report(diagnosis.__page__()))
    assert "y, 4..11 on axis 1" in html
    assert "0.0 dB" in html
