from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgeq.backends.cpu import CpuBackend
from edgeq.measure.accuracy import compare_sessions
from edgeq.measure.agreement import Agreement, OutputAgreement
from edgeq.measure.debug import debug
from edgeq.measure.error_sources import find_error_sources, list_excluded_nodes
from edgeq.measure.layers import LayerPair, compare_layers
from edgeq.run.session import open_session
from edgeq.util.records import plain
from tests.measure.quantized_models import SCHEMES, Quantized, float_model, quantize_all, read_graph


def widen_range(model: Path, tensor: str, factor: float, destination: Path) -> Path:
    """Copy a model and make the range of one activation `factor` times too wide."""
    graph = onnx.load(model)
    for constant in graph.graph.initializer:
        if constant.name == f"{tensor}_scale":
            scale = onnx.numpy_helper.to_array(constant) * np.float32(factor)
            constant.CopyFrom(onnx.numpy_helper.from_array(scale, constant.name))
    onnx.save(graph, destination)
    return destination


@pytest.mark.parametrize(
    ("form", "tensor", "nodes", "victim"),
    [
        ("u8s8", "dw_act", ("depthwise", "pointwise"), "pw_out"),
        ("s8s8", "dw_act", ("depthwise_clip", "pointwise"), "pw_out"),
        ("qoperator", "sum", ("residual", "pool"), "pooled"),
    ],
)
def test_a_range_that_is_too_wide_is_named(
    quantized: Quantized, tmp_path: Path, form: str, tensor: str, nodes: tuple[str, str], victim: str
) -> None:
    wide = widen_range(quantized.models[form], tensor, 60, tmp_path / "wide.onnx")
    diagnosis = debug(quantized.source, wide, quantized.data)
    worst = diagnosis.error_sources[0]
    assert (worst.name, worst.cause) == (tensor, "range")
    assert worst.exclude == nodes, "the tensor's maker and its only reader"
    assert worst.share > 0.5
    original = debug(quantized.source, quantized.models[form], quantized.data)
    suffers, suffered = (
        next(a for a in diagnosis.comparison.activations if a.name == victim) for diagnosis in (diagnosis, original)
    )
    assert suffers.accumulated.sqnr_db < suffered.accumulated.sqnr_db - 3
    assert victim not in {error_source.name for error_source in diagnosis.error_sources}, (
        "it is not a source of the error"
    )


def test_a_bias_that_does_not_fit_its_input_is_named(quantized: Quantized, tmp_path: Path) -> None:
    # The unit of a QLinearConv's bias is input scale times weight scale. So a wider range of the input makes it wrong.
    wide = widen_range(quantized.models["qoperator"], "dw_out", 60, tmp_path / "wide.onnx")
    worst = debug(quantized.source, wide, quantized.data).error_sources[0]
    assert (worst.node, worst.cause) == ("pointwise", "weights")


@pytest.mark.parametrize("form", ["u8u8-per-tensor", "dynamic"])
def test_channels_that_share_a_scale_are_named(tmp_path: Path, form: str) -> None:
    unequal = np.ones(16)
    unequal[3] = 40
    # Only channel 3 sets the scale of the depthwise weights. Its input is as small as its weights are large.
    scales = {"depthwise.weight": unequal, "stem.weight": 1 / unequal, "stem.bias": 1 / unequal}
    model = float_model(scales=scales)
    quantized = quantize_all(tmp_path, model, (form,))
    diagnosis = debug(quantized.source, quantized.models[form], quantized.data)
    named = [error_source for error_source in diagnosis.error_sources if error_source.cause == "weights"]
    assert named[0].node == "depthwise"
    assert named[0].exclude == ("depthwise",)
    assert "one scale for all channels" in named[0].reason


def test_the_flags_do_what_they_say(quantized: Quantized, tmp_path: Path) -> None:
    wide = widen_range(quantized.models["u8s8"], "sum", 20, tmp_path / "wide.onnx")
    diagnosis = debug(quantized.source, wide, quantized.data)
    # Without the named nodes the quantizer does not quantize the tensor, and so the wrong range does not matter.
    scheme = dataclasses.replace(SCHEMES["u8s8"], exclude=list_excluded_nodes(diagnosis.error_sources[:1]))
    artifact = CpuBackend().build(quantized.prepared, quantized.ranges, scheme, tmp_path / "better.onnx")
    names = {t.name for t in onnx.load(artifact.model).graph.initializer}
    assert diagnosis.error_sources[0].name == "sum"
    assert "sum_scale" not in names
    float_session = open_session(quantized.prepared.path)
    original_db, excluded_db = (
        compare_sessions(float_session, session, quantized.samples).sqnr_db
        for session in (open_session(wide), open_session(artifact.model, artifact.settings()))
    )
    assert excluded_db > original_db + 6


def test_a_dynamic_range_is_excluded_by_its_quantizing_readers(quantized: Quantized) -> None:
    reference, graph = read_graph(quantized.prepared.path), read_graph(quantized.models["dynamic"])
    activations = {a.name: a for a in compare_layers(reference, graph, quantized.samples).activations}
    # The residual Add reads the float tensor that the depthwise Conv quantizes for itself.
    assert activations["sum"].reads == ("pw_out", "stem_act")
    assert activations["sum"].exact_reads == ("stem_act",)
    assert activations["dw_out"].exact_reads == ()
    loud = Agreement((OutputAgreement("logits", 1, 10.0, 1.0, 0.1, None, 0, 0),), 1)
    activations["stem_act"] = dataclasses.replace(activations["stem_act"], effect=loud)
    (error_source,) = find_error_sources(tuple(activations.values()), (), loud)
    assert error_source.exclude == ("depthwise",)


def test_noise_is_charged_once(quantized: Quantized) -> None:
    reference, graph = read_graph(quantized.prepared.path), read_graph(quantized.models["u8s8"])
    comparison = compare_layers(reference, graph, quantized.samples)
    noise = {a.name: a.noise for a in comparison.activations}
    # Flatten requantizes values that are already on the same grid.
    assert noise["features"].added < 1e-6
    assert noise["features"].inherited > noise["features"].added
    assert noise["x"].weights == 0
    assert noise["pw_out"].weights > 0
    assert noise["pw_out"].range > 0


def test_the_layer_with_a_wide_range_is_the_noisiest(quantized: Quantized, tmp_path: Path) -> None:
    wide = widen_range(quantized.models["u8s8"], "sum", 20, tmp_path / "wide.onnx")
    pair = LayerPair(read_graph(quantized.prepared.path), read_graph(wide))
    noise = pair.output_noise(quantized.samples)
    assert max(noise, key=lambda name: noise[name]) == "sum"
    effect = pair.output_effects(["sum"], quantized.samples, count=2)["sum"]
    assert 10 ** (-effect.sqnr_db / 10) == pytest.approx(noise["sum"], rel=1)


def test_a_model_against_itself_has_no_error_sources(quantized: Quantized) -> None:
    reference = read_graph(quantized.prepared.path)
    comparison = compare_layers(reference, reference, quantized.samples)
    assert all(a.noise.added == 0 for a in comparison.activations)
    noise = LayerPair(reference, reference).output_noise(quantized.samples)
    assert set(noise.values()) == {0.0}


def test_as_json(quantized: Quantized, tmp_path: Path) -> None:
    wide = widen_range(quantized.models["u8s8"], "sum", 20, tmp_path / "wide.onnx")
    record = plain(debug(quantized.source, wide, quantized.data))
    error_source = json.loads(json.dumps(record, allow_nan=False))["error_sources"][0]
    assert set(error_source) == {"name", "node", "op_type", "output_sqnr_db", "share", "cause", "reason", "exclude"}
    assert find_error_sources((), (), debug(quantized.source, wide, quantized.data).written) == ()
