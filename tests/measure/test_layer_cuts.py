from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from edgeq.measure.accuracy import compare_sessions
from edgeq.measure.layer_cuts import add_disturbances, disturbance_name
from edgeq.measure.layers import output_effects
from edgeq.measure.match_activations import match_activations
from edgeq.model.convert import to_bytes
from edgeq.model.graph import GraphIndex
from edgeq.run.session import SessionSettings, open_session
from tests.graphs import model
from tests.measure.fakes import FakeSample, FakeSamples
from tests.measure.quantized_models import Quantized, read_graph

NONE = SessionSettings(optimization="none")


def test_no_disturbance_changes_nothing_and_one_is_followed() -> None:
    net = model("net (float[2] x) => (float[2] y, float[2] z) { a = Add(x, x) y = Mul(a, a) z = Neg(y) }")
    session = open_session(to_bytes(add_disturbances(GraphIndex(net), ["x", "a", "y"])), NONE)
    assert [output.name for output in session.get_outputs()] == ["y/disturbance/added", "z"]

    def run(**disturbances: list[float]) -> list[list[float]]:
        feed = {disturbance_name(name): np.zeros((), np.float32) for name in ("x", "a", "y")}
        feed |= {disturbance_name(name): np.array(value, np.float32) for name, value in disturbances.items()}
        return [v.tolist() for v in session.run(None, {"x": np.array([1, 3], np.float32), **feed})]

    assert run() == [[4, 36], [-4, -36]]
    assert run(x=[1, 0]) == [[16, 36], [-16, -36]]
    assert run(a=[0, 1]) == [[4, 49], [-4, -49]]
    assert run(y=[1, 1]) == [[5, 37], [-5, -37]], "readers of an output get the disturbance too"


@pytest.mark.parametrize("form", ["u8s8", "qoperator"])
def test_the_effect_of_one_layer_is_that_of_a_model_with_only_this_layer_quantized(
    quantized: Quantized, form: str
) -> None:
    reference, graph = read_graph(quantized.prepared.path), read_graph(quantized.models[form])
    matches = match_activations(reference, graph)
    effects = output_effects(
        reference, graph, matches, ["pw_out", "logits"], quantized.samples, count=len(quantized.samples)
    )
    # Compute by hand: the float model with rounded weights and a rounded result of the pointwise Conv.
    partly = onnx.load(quantized.prepared.path)
    qdq = onnx.load(quantized.models["u8s8"])
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in qdq.graph.initializer}
    initializers = [t for t in partly.graph.initializer if t.name not in ("pointwise.weight", "pointwise.bias")]
    weight = constants["pointwise.weight_quantized"] * constants["pointwise.weight_scale"].reshape(-1, 1, 1, 1)
    bias = constants["pointwise.bias_quantized"] * constants["pointwise.bias_quantized_scale"]
    del partly.graph.initializer[:]
    partly.graph.initializer.extend(initializers)
    for name, value in (("pointwise.weight", weight), ("pointwise.bias", bias)):
        partly.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    for name in ("pw_out_scale", "pw_out_zero_point"):
        partly.graph.initializer.append(onnx.numpy_helper.from_array(constants[name], name))
    # Its input is rounded in both models, because that error belongs to the tensor before it. So round it here.
    for name in ("dw_act_scale", "dw_act_zero_point"):
        partly.graph.initializer.append(onnx.numpy_helper.from_array(constants[name], name))
    assert effects["pw_out"].samples == len(quantized.samples)
    by_hand = compare_sessions(
        open_session(_rounded(onnx.load(quantized.prepared.path), constants, {"dw_act": "rounded"}), NONE),
        open_session(_rounded(partly, constants, {"dw_act": "rounded", "pw_out": "rounded"}), NONE),
        quantized.samples,
    )
    assert effects["pw_out"].sqnr_db == pytest.approx(by_hand.sqnr_db, abs=1.0)
    assert 10 < effects["logits"].sqnr_db < 80


def _rounded(model: onnx.ModelProto, constants: dict[str, np.ndarray], tensors: dict[str, str]) -> bytes:
    """Put QuantizeLinear and DequantizeLinear after some tensors of a model and return it."""
    for tensor in tensors:
        present = {t.name for t in model.graph.initializer}
        for name in (f"{tensor}_scale", f"{tensor}_zero_point"):
            if name not in present:
                model.graph.initializer.append(onnx.numpy_helper.from_array(constants[name], name))
        for node in model.graph.node:
            for place, name in enumerate(node.input):
                if name == tensor:
                    node.input[place] = f"{tensor}/rounded"
        at = next(i for i, node in enumerate(model.graph.node) if tensor in node.output)
        scale, zero = f"{tensor}_scale", f"{tensor}_zero_point"
        model.graph.node.insert(at + 1, helper.make_node("QuantizeLinear", [tensor, scale, zero], [f"{tensor}/q"]))
        model.graph.node.insert(
            at + 2, helper.make_node("DequantizeLinear", [f"{tensor}/q", scale, zero], [f"{tensor}/rounded"])
        )
    return bytes(model.SerializeToString())


def test_layers_without_error_are_left_out(quantized: Quantized) -> None:
    reference, graph = read_graph(quantized.prepared.path), read_graph(quantized.models["dynamic"])
    matches = match_activations(reference, graph)
    effects = output_effects(reference, graph, matches, ["sum", "pw_out"], quantized.samples, count=2)
    assert set(effects) == {"pw_out"}
    assert effects["pw_out"].samples == 2


def test_samples_are_taken_evenly(quantized: Quantized) -> None:
    reference, graph = read_graph(quantized.prepared.path), read_graph(quantized.models["u8s8"])
    matches = match_activations(reference, graph)
    # Only every fourth sample differs from zero. With count = n / 4 exactly these are chosen.
    shape = (1, 3, 8, 8)
    arrays = [np.full(shape, float(i % 4 == 0), np.float32) for i in range(8)]
    mixed = FakeSamples([FakeSample(f"s{i}", {"x": a}) for i, a in enumerate(arrays)])
    ones = FakeSamples([FakeSample("one", {"x": arrays[0]})] * 2)
    mixed_effects, effects = (
        output_effects(reference, graph, matches, ["x", "sum"], s, count=2) for s in (mixed, ones)
    )
    assert mixed_effects == effects
