"""Compare `edgeq.measure.exclusions` with builds without the nodes, and with the nodes that `edgeq debug` names."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from edgeq.backends.cpu import CpuBackend
from edgeq.cli import group
from edgeq.measure.debug import debug
from edgeq.measure.float_nodes import keep_nodes_float
from edgeq.measure.layers import instrumented_session
from edgeq.measure.match_activations import match_activations
from edgeq.model.graph import GraphIndex
from edgeq.model.load import read_model
from edgeq.run.session import SessionSettings
from edgeq.scheme import Scheme
from tests.measure.quantized_models import SCHEMES, Quantized, float_model, quantize_all

pytestmark = pytest.mark.usefixtures("exact_kernels")

SETTINGS = SessionSettings(intra_op_threads=1)
SETS = [
    ("pointwise",),
    ("depthwise",),
    ("stem", "stem_relu"),
    ("pointwise", "residual"),
    ("depthwise", "depthwise_clip", "pointwise"),
    ("head",),
]


def _answers(model: object, quantized: Quantized) -> np.ndarray:
    session = instrumented_session(model, optimization="none", settings=SETTINGS)  # type: ignore[arg-type]
    return np.stack([session.run(None, dict(sample.inputs))[0] for sample in quantized.samples])


@pytest.mark.parametrize("form", SCHEMES)
@pytest.mark.parametrize("nodes", SETS, ids=",".join)
def test_it_computes_what_a_build_without_the_nodes_does(
    quantized: Quantized, form: str, nodes: tuple[str, ...], tmp_path: Path
) -> None:
    source, quantized_graph = GraphIndex(quantized.prepared.model), GraphIndex(read_model(quantized.models[form]))
    spliced = keep_nodes_float(source, quantized_graph, match_activations(source, quantized_graph), nodes)
    assert spliced is not None
    scheme = dataclasses.replace(SCHEMES[form], exclude=nodes)
    CpuBackend().build(quantized.prepared, quantized.ranges, scheme, tmp_path / "without.onnx")
    built = _answers(read_model(tmp_path / "without.onnx"), quantized)
    answers = _answers(spliced, quantized)
    quantized_answers = _answers(read_model(quantized.models[form]), quantized)
    step = np.ptp(built) / 200
    assert np.abs(answers - built).max() <= step  # a tie may be rounded to either side
    assert np.sqrt(np.mean((answers - built) ** 2)) <= max(
        0.25 * np.sqrt(np.mean((built - quantized_answers) ** 2)), 0.5 * step
    )


def test_missing_nodes_cannot_be_in_float(quantized: Quantized) -> None:
    source, quantized_graph = GraphIndex(quantized.prepared.model), GraphIndex(read_model(quantized.models["u8s8"]))
    assert keep_nodes_float(source, quantized_graph, match_activations(source, quantized_graph), ("nothing",)) is None


def test_debug_names_the_node_that_helps(tmp_path: Path) -> None:
    """`edgeq debug` names the layer whose channels differ most, and excluding it has the predicted effect."""
    scales = {"depthwise.weight": np.where(np.arange(16) == 3, 400.0, 1.0)}
    per_tensor = Scheme(per_channel=False)
    quantized = quantize_all(tmp_path, float_model(scales=scales), ("u8s8",))
    CpuBackend().build(quantized.prepared, quantized.ranges, per_tensor, tmp_path / "q.onnx")
    diagnosis = debug(quantized.source, tmp_path / "q.onnx", quantized.data)
    assert diagnosis.verdict != "healthy"
    best = diagnosis.exclusions[0]
    assert "depthwise" in best.nodes
    assert best.plain_db == pytest.approx(diagnosis.written.sqnr_db, abs=3)
    CpuBackend().build(
        quantized.prepared, quantized.ranges, per_tensor.replace(exclude=best.nodes), tmp_path / "better.onnx"
    )
    improved = debug(quantized.source, tmp_path / "better.onnx", quantized.data)
    assert improved.written.sqnr_db == pytest.approx(best.sqnr_db, abs=3)
    assert improved.written.sqnr_db > diagnosis.written.sqnr_db + 3
    arguments = ["debug", str(quantized.source), str(tmp_path / "q.onnx"), "--data", str(quantized.data)]
    output = CliRunner().invoke(group, arguments, env={"COLUMNS": "200"})
    assert f"→ {best.sqnr_db:.1f} dB: --exclude" in output.output


def test_a_healthy_model_needs_none(quantized: Quantized) -> None:
    assert debug(quantized.source, quantized.models["u8s8"], quantized.data, count=2).exclusions == ()
