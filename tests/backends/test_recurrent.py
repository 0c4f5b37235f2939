from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from edgeq.model.edit import from_proto, to_bytes, to_proto
from edgeq.quantization.recurrent import LEAST_MACS, IntegerWeights, expand_grus
from tests.backends.networks import operators, recurrent, run, sqnr_db

BITS8 = IntegerWeights(per_channel=True, limit=127)


def feed(*, initial: bool = False, directions: int = 1) -> dict[str, np.ndarray]:
    random = np.random.default_rng(2)
    found = {"x": random.normal(0, 1, (5, 2, 6)).astype(np.float32)}
    if initial:
        found["h0"] = random.normal(0, 1, (directions, 2, 8)).astype(np.float32)
    return found


def expanded(model: onnx.ModelProto, how: IntegerWeights = BITS8, **options: Any) -> onnx.ModelProto:
    graph = from_proto(model)
    assert expand_grus(graph, how, least_macs=0, **options) == ("layer",)
    copy = to_proto(graph)
    assert "GRU" not in operators(copy)
    onnx.checker.check_model(copy)
    return copy


@pytest.mark.usefixtures("only_exact_kernels")
@pytest.mark.parametrize("linear_before_reset", [0, 1])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("initial", [False, True])
def test_it_follows_the_float_layer(linear_before_reset: int, direction: str, initial: bool) -> None:
    model = recurrent(linear_before_reset=linear_before_reset, direction=direction, initial=initial)
    data = feed(initial=initial, directions=2 if direction == "bidirectional" else 1)
    exact, made = run(model, data), run(expanded(model), data)
    assert exact.keys() == made.keys()
    for name, values in exact.items():
        assert made[name].shape == values.shape
        # Mixed-up gates, directions or biases give a few dB. 8-bit products of vectors of 8 give thirty dB and more.
        assert sqnr_db(values, made[name]) > 30, name


@pytest.mark.usefixtures("only_exact_kernels")
def test_scales_per_channel_are_finer() -> None:
    model = recurrent(linear_before_reset=1)
    weights = next(t for t in model.graph.initializer if t.name == "w")
    values = onnx.numpy_helper.to_array(weights) * np.geomspace(0.01, 1, 24, dtype=np.float32)[None, :, None]
    weights.CopyFrom(onnx.numpy_helper.from_array(values.astype(np.float32), "w"))
    exact = run(model, feed())["y"]
    fine, coarse = (run(expanded(model, IntegerWeights(p, 127)), feed())["y"] for p in (True, False))
    assert sqnr_db(exact, fine) > sqnr_db(exact, coarse)


def test_seven_bits_stay_within_their_limit() -> None:
    made = expanded(recurrent(), IntegerWeights(per_channel=True, limit=63))
    integers = [onnx.numpy_helper.to_array(t) for t in made.graph.initializer if t.data_type == onnx.TensorProto.INT8]
    assert max(np.abs(a.astype(int)).max() for a in integers) == 63


@pytest.mark.usefixtures("only_exact_kernels")
@pytest.mark.parametrize("outputs", [("y", ""), ("", "y_h"), ("y",)])
def test_only_outputs_that_are_needed_are_made(outputs: tuple[str, ...]) -> None:
    model = recurrent(outputs=outputs)
    made = expanded(model)
    assert operators(made).count("Unsqueeze") == 1
    name = next(name for name in outputs if name)
    assert sqnr_db(run(model, feed())[name], run(made, feed())[name]) > 30


def test_a_weight_of_zeros_gives_zeros_and_no_warning() -> None:
    integers, scale = BITS8.quantize(np.zeros((3, 2), np.float32))
    assert not integers.any()
    assert np.isfinite(scale).all()


@pytest.mark.parametrize(
    "model",
    [
        recurrent(clip=3.0),
        recurrent(activations=["Sigmoid", "Tanh"]),
        recurrent(lengths=True),
        recurrent("LSTM", outputs=("y",)),
    ],
    ids=["clip", "activations", "sequence lengths", "another layer"],
)
def test_leaves_unsupported_layers_unchanged(model: onnx.ModelProto) -> None:
    graph = from_proto(model)
    before = to_bytes(graph)
    assert expand_grus(graph, BITS8, least_macs=0) == ()
    assert to_bytes(graph) == before


def test_narrow_and_excluded_layers_are_left_alone() -> None:
    assert expand_grus(from_proto(recurrent()), BITS8) == (), f"{3 * 8 * 14} products are fewer than {LEAST_MACS}"
    assert expand_grus(from_proto(recurrent()), BITS8, exclude=("layer",), least_macs=0) == ()


def test_computed_weights_are_left_alone() -> None:
    model = recurrent()
    weight = next(t for t in model.graph.initializer if t.name == "w")
    model.graph.initializer.remove(weight)
    model.graph.input.append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, list(weight.dims)))
    assert expand_grus(from_proto(model), BITS8, least_macs=0) == ()
