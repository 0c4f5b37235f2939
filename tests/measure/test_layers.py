from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeq.data.samples import open_samples
from edgeq.errors import DataError
from edgeq.measure.layer_noise import ActivationComparison
from edgeq.measure.layers import collect_activations, compare_activations, compare_layers
from edgeq.measure.match_activations import match_activations
from edgeq.model.convert import from_proto, to_bytes
from edgeq.model.graph import GraphIndex
from edgeq.model.parts import with_outputs
from edgeq.model.quant_params import dynamic_params
from edgeq.run.session import SessionSettings, open_session
from edgeq.util.records import plain
from tests.graphs import proto
from tests.measure.fakes import FakeSample, FakeSamples
from tests.measure.quantized_models import SCHEMES, STATIC, Quantized, float_model, read_graph

pytestmark = pytest.mark.usefixtures("exact_kernels")

NONE = SessionSettings(optimization="none")


def compare(quantized: Quantized, form: str, **options: Any) -> dict[str, ActivationComparison]:
    reference, graph = read_graph(quantized.prepared.path), read_graph(quantized.models[form])
    samples = options.pop("samples", quantized.samples)
    activations = compare_activations(reference, graph, match_activations(reference, graph), samples, **options)
    return {activation.name: activation for activation in activations}


def everything(path: Path, samples: Any) -> dict[str, np.ndarray]:
    """Return every tensor of a model over all samples, as the brute force that the streaming figures must match."""
    model = onnx.load(path)
    names = [name for node in model.graph.node for name in node.output]
    session = open_session(to_bytes(with_outputs(from_proto(model), names)), NONE)
    outputs = [output.name for output in session.get_outputs()]
    tensors: dict[str, list[np.ndarray]] = {}
    for sample in samples:
        for name, value in zip(outputs, session.run(outputs, dict(sample.inputs)), strict=True):
            tensors.setdefault(name, []).append(value)
    return {name: np.stack(values) for name, values in tensors.items()}


def sqnr(reference: np.ndarray, candidate: np.ndarray) -> float:
    r, c = reference.astype(np.float64), candidate.astype(np.float64)
    return float(10 * np.log10((r**2).sum() / ((r - c) ** 2).sum()))


def as_read(form: str, name: str, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return a tensor in the form that its readers get, under the name that onnxruntime's quantizer gives it."""
    if form == "qoperator":
        integers = {"stem_act": "stem_out", "dw_act": "dw_out"}.get(name, name) + "_quantized"
        return tensors[integers]
    if form == "dynamic":
        return tensors[name]
    return tensors[name if name == "logits" else f"{name}_DequantizeLinear_Output"]


@pytest.mark.parametrize("form", SCHEMES)
def test_accumulated_figures_are_those_of_keeping_everything(quantized: Quantized, form: str) -> None:
    exact = everything(quantized.prepared.path, quantized.samples)
    tensors = everything(quantized.models[form], quantized.samples)
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(quantized.models[form]).graph.initializer}
    activations = compare(quantized, form)
    for name in ("stem_act", "dw_act", "pw_out", "sum", "pooled", "logits"):
        values = as_read(form, name, tensors)
        if form == "qoperator":
            tensor = {"stem_act": "stem_out", "dw_act": "dw_out"}.get(name, name)
            scale, zero = (constants[f"{tensor}_{part}"] for part in ("scale", "zero_point"))
            values = (values.astype(np.float32) - zero) * scale
        if activations[name].kind == "dynamic":
            values = np.stack([dynamic_params(sample).fake_quant(sample) for sample in values])
        accumulated = activations[name].accumulated
        assert accumulated.sqnr_db == pytest.approx(sqnr(exact[name], values), abs=1e-3), name
        assert accumulated.max_abs_error == pytest.approx(np.abs(exact[name] - values).max(), rel=1e-4)
        a, b = exact[name].ravel().astype(np.float64), values.ravel().astype(np.float64)
        assert accumulated.cosine == pytest.approx(a @ b / np.sqrt((a @ a) * (b @ b)))
        assert activations[name].minimum == exact[name].min()
        assert activations[name].maximum == exact[name].max()


@pytest.mark.parametrize("form", STATIC)
def test_rounding_and_saturation_are_those_of_the_scale_alone(quantized: Quantized, form: str) -> None:
    exact = everything(quantized.prepared.path, quantized.samples)
    for name, activation in compare(quantized, form).items():
        if name == "x":
            continue
        assert activation.range is not None
        low, high = activation.range
        step = (high - low) / 255
        integers = np.clip(np.rint(exact[name] / step), np.rint(low / step), np.rint(high / step))
        assert activation.rounding is not None
        assert activation.rounding.sqnr_db == pytest.approx(sqnr(exact[name], integers * step), abs=0.02)
        assert activation.saturated_low == pytest.approx((exact[name] < low - step / 2).mean(), abs=1e-4)
        assert activation.saturated_high == pytest.approx((exact[name] > high + step / 2).mean(), abs=1e-4)


def test_saturation_is_seen_where_the_data_leave_the_calibrated_range(quantized: Quantized) -> None:
    large_samples = [FakeSample(f"far{i}", {"x": 4 * s.inputs["x"]}) for i, s in enumerate(quantized.samples)]
    activations = compare(quantized, "u8s8", samples=FakeSamples(large_samples))
    assert activations["x"].saturated_low > 0.01
    assert activations["x"].saturated_high > 0.01
    assert activations["dw_act"].saturated_high == 0, "a Clip leaves nothing to clip"


@pytest.mark.parametrize("form", ["u8s8", "qoperator"])
def test_a_layer_alone_is_fed_with_exact_inputs(
    quantized: Quantized, form: str, request: pytest.FixtureRequest
) -> None:
    if form == "qoperator":
        request.getfixturevalue("only_exact_kernels")
    # Computes the pointwise Conv by hand, from its rounded input and dequantized weights, and rounds its result.
    exact = everything(quantized.prepared.path, quantized.samples)
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(quantized.models["u8s8"]).graph.initializer}
    shape = (-1, 1, 1, 1)
    weight = constants["pointwise.weight_quantized"] * constants["pointwise.weight_scale"].reshape(shape)
    bias = constants["pointwise.bias_quantized"] * constants["pointwise.bias_quantized_scale"]

    def rounded(values: np.ndarray, name: str) -> np.ndarray:
        scale, zero = (constants[f"{name}_{part}"].astype(np.float64) for part in ("scale", "zero_point"))
        return (np.clip(np.rint(values / scale) + zero, 0, 255) - zero) * scale

    def conv(values: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.einsum("snchw,oc->snohw", values, w[:, :, 0, 0]) + b.reshape(-1, 1, 1)

    inputs = rounded(exact["dw_act"].astype(np.float64), "dw_act")
    alone = rounded(conv(inputs, weight, bias), "pw_out")
    reference = read_graph(quantized.prepared.path)
    excused = conv(inputs, reference.constant("pointwise.weight"), reference.constant("pointwise.bias"))
    activation = compare(quantized, form)["pw_out"]
    assert activation.layer.sqnr_db == pytest.approx(sqnr(exact["pw_out"], alone), abs=0.05)
    assert activation.inputs.sqnr_db == pytest.approx(sqnr(exact["pw_out"], excused), abs=0.01)
    assert activation.reads == ("dw_act",)
    assert compare(quantized, form)["sum"].reads == ("pw_out", "stem_act")


def test_a_float_layer_has_no_error_of_its_own(quantized: Quantized) -> None:
    activations = compare(quantized, "dynamic")
    for name in ("sum", "pooled"):
        assert activations[name].kind == "float"
        assert activations[name].rounding is None
        assert activations[name].layer.sqnr_db == math.inf
        assert activations[name].accumulated.sqnr_db < 60


@pytest.mark.parametrize("form", ["u8s8", "qoperator", "dynamic"])
def test_waves_change_nothing(quantized: Quantized, form: str) -> None:
    assert compare(quantized, form, memory=1) == compare(quantized, form)


def test_padding_rows_of_a_gathered_batch_do_not_count(quantized: Quantized) -> None:
    samples = list(quantized.samples)
    assert all(len(sample.inputs["x"]) == 1 for sample in samples), "the test pads two rows to four"
    two = np.concatenate([sample.inputs["x"] for sample in samples[:2]])
    padded = np.concatenate([two, 50 * np.ones_like(two)])
    gathered = FakeSample("batch", {"x": padded}, context={"rows": ({}, {})})
    alone = FakeSample("two", {"x": two})
    gathered_activations, activations = (
        compare(quantized, "u8s8", samples=FakeSamples([s])) for s in (gathered, alone)
    )
    for name in gathered_activations:
        assert gathered_activations[name].accumulated.elements == activations[name].accumulated.elements
        assert gathered_activations[name].accumulated.sqnr_db == pytest.approx(
            activations[name].accumulated.sqnr_db, abs=1e-3
        )


def test_samples_are_read_once_a_wave_and_never_kept(quantized: Quantized) -> None:
    samples = FakeSamples([FakeSample(s.name, s.inputs) for s in quantized.samples])
    compare(quantized, "u8s8", samples=samples)
    assert samples.decoded == len(samples) + 1, "the first one more, for the sizes"


def test_no_samples_is_an_error(quantized: Quantized) -> None:
    with pytest.raises(DataError, match="no samples"):
        compare(quantized, "u8s8", samples=FakeSamples([]))


def test_collected_activations_come_one_sample_at_a_time(quantized: Quantized) -> None:
    stream = collect_activations(quantized.prepared.model, ["stem_act", "logits"], quantized.samples)
    sample, tensors = next(stream)
    assert set(tensors) == {"stem_act", "logits"}
    (logits,) = open_session(quantized.prepared.path, NONE).run(["logits"], dict(sample.inputs))
    np.testing.assert_array_equal(tensors["logits"], logits)
    assert len(list(stream)) == len(quantized.samples) - 1


def test_plain_values(quantized: Quantized) -> None:
    reference, graph = read_graph(quantized.prepared.path), read_graph(quantized.models["u8s8"])
    comparison = compare_layers(reference, graph, quantized.samples)
    record = plain(comparison)
    assert record["samples"] == len(quantized.samples)
    assert record["weights"][0]["name"] == "stem.weight"
    assert {key for a in record["activations"] for key in a} == {
        "name", "node", "op_type", "folded", "quantized_name", "kind", "range", "minimum", "maximum", "reads",
        "exact_reads", "accumulated", "layer", "inputs", "rounding", "saturated", "noise", "output_sqnr_db",
    }  # fmt: skip


def test_infinities_in_an_activation() -> None:
    # Infinite values, such as an attention mask of minus infinity, are left out of the sums. Finite values still count.
    net = proto(
        "net (float[1,2] x) => (float[1,2] y) <float[1,2] mask = {0, 0}> { masked = Add(x, mask) y = Exp(masked) }"
    )
    net.graph.initializer[0].float_data[1] = -math.inf  # ONNX's text form has no infinity
    model = GraphIndex(from_proto(net))
    matches = [dataclasses.replace(m, dynamic=True) for m in match_activations(model, model)]
    samples = FakeSamples([FakeSample("s", {"x": np.array([[1.0, 2.0]], np.float32)})])
    activations = {a.name: a for a in compare_activations(model, model, matches, samples)}
    assert activations["masked"].accumulated.elements == 1
    assert plain(activations["masked"])["minimum"] is None


def test_the_small_model_is_what_the_tests_think(quantized: Quantized) -> None:
    assert quantized.source.read_bytes() == float_model().SerializeToString()
    assert len(open_samples(quantized.data, quantized.prepared.signature)) == 16
