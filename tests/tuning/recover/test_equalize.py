"""Test cross-layer equalization: the function stays, the noise is as predicted, and uneven channels improve."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeq.calibration.channel_values import observe_channels
from edgeq.model.edit import Editor, replace_value
from edgeq.model.graph import GraphIndex, name_of
from edgeq.model.load import read_model
from edgeq.scheme import Scheme
from edgeq.tuning.recover.layers import Weights
from edgeq.tuning.recover.methods.cross_layer_equalization import (
    ChannelFigures,
    equalize,
    estimate_noise,
    find_best_factor,
    find_pairs,
    observe,
    scale_pair,
)
from edgeq.tuning.recover.run import Recoverer
from tests.tuning.recover.graphs import nets
from tests.tuning.recover.nets import SCHEME, Net, few, job_of, noise_db, run, target, uneven

SHAPE = [1, 3, 12, 12]
ONE_SCALE = SCHEME.replace(per_channel=False)


@given(nets(chain=("layer", "relu", "layer", "layer")), st.integers(0, 10**6))
@settings(max_examples=80)
def test_any_network_computes_what_it_did(drawn: tuple, seed: int) -> None:
    model, feed = drawn
    before = run(model, feed)
    random = np.random.default_rng(seed)
    for pair in find_pairs(model):
        # If the pair has a Clip, its bound limits the factors; another test below covers that.
        if math.isinf(pair.bound):
            scale_pair(Weights(model), pair, np.exp(random.normal(0, 1, pair.maker.outputs)))
    for a, b in zip(before, run(model, feed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * max(1.0, float(np.abs(a).max())))


def _chain(*, scales: np.ndarray, between: str = "Relu", depthwise: bool = True) -> ir.Model:
    """Return convolutions whose channels differ in size. The weights of the last one undo the differences."""
    net = Net()
    x = net.node(between, [net.conv("x", "first", 3, 8, 3, channels=scales)], "r", **_arguments(between))
    if depthwise:
        x = net.node("Relu", [net.conv(x, "depthwise", 8, 8, 3, groups=8)], "s")
    net.conv(x, "last", 8, 4, 1)
    last = next(t for t in net.weights if t.name == "last_w")
    values = onnx.numpy_helper.to_array(last) / np.asarray(scales, np.float32).reshape(1, 8, 1, 1)
    last.CopyFrom(onnx.numpy_helper.from_array(values, "last_w"))
    return net.model({"x": SHAPE}, ["last_out"])


def _arguments(op_type: str) -> dict[str, object]:
    return {"kernel_shape": [2, 2]} if op_type.endswith("Pool") else {}


@pytest.mark.parametrize("between", ["Relu", "LeakyRelu", "MaxPool", "AveragePool"])
def test_pairs(between: str) -> None:
    pairs = find_pairs(_chain(scales=np.ones(8), between=between))
    found = [(pair.maker.name, pair.tensor, [reader.name for reader in pair.readers]) for pair in pairs]
    assert found == [("first", "r", ["depthwise"]), ("depthwise", "s", ["last"])]


@pytest.mark.parametrize("between", ["Sigmoid", "HardSwish", "Softmax"])
def test_functions_that_do_not_commute_part_them(between: str) -> None:
    assert [pair.maker.name for pair in find_pairs(_chain(scales=np.ones(8), between=between))] == ["depthwise"]


def _clipped(low: float, high: float | None) -> ir.Model:
    """Return Conv with uneven channels, Clip, depthwise Conv, 1x1 Conv. Without `high` a node computes the bound."""
    net = Net()
    x = net.conv("x", "first", 3, 8, channels=uneven(8))
    if high is None:
        net.nodes.append(onnx.helper.make_node("ReduceMax", ["x"], ["high"], keepdims=0, name="bound"))
    else:
        net.constant("high", high)
    x = net.node("Clip", [x, net.constant("low", low), "high"], "act")
    net.conv(net.conv(x, "depthwise", 8, 8, groups=8), "last", 8, 4, 1)
    return net.model({"x": SHAPE}, ["last_out"])


def test_no_channel_is_scaled_beyond_a_clip(tmp_path: Path) -> None:
    samples = few(6, SHAPE)
    job = job_of(_clipped(0.0, 6.0), tmp_path, samples)
    model = job.prepared.model.clone()
    values = observe_channels(job.prepared, {"act": 1}, samples)
    factors = equalize(job.prepared, model, find_pairs(model), samples, SCHEME, values)
    assert factors["act"].min() < 0.5, "small channels grow"
    for sample in samples:
        before, after = run(job.prepared.path, sample.inputs)[0], run(model, sample.inputs)[0]
        np.testing.assert_allclose(after, before, rtol=1e-3, atol=1e-4 * float(np.abs(before).max()))


@pytest.mark.parametrize(("low", "high"), [(-1.0, 6.0), (0.0, None)])
def test_other_clips_part_them(low: float, high: float | None) -> None:
    assert [pair.maker.name for pair in find_pairs(_clipped(low, high))] == ["depthwise"]


def test_other_readers_part_them() -> None:
    model = _chain(scales=np.ones(8))
    model.graph.outputs.append(GraphIndex(model).values["r"])
    assert [pair.maker.name for pair in find_pairs(model)] == ["depthwise"]
    model = _chain(scales=np.ones(8))
    model.graph.outputs.append(Editor(model).node("Neg", [GraphIndex(model).values["s"]], "n"))
    assert [pair.maker.name for pair in find_pairs(model)] == ["first"]


@pytest.mark.parametrize(
    "scheme", [SCHEME, ONE_SCALE, SCHEME.replace(activation_type="int8", activation_symmetric=True)]
)
@pytest.mark.parametrize("scales", [np.ones(8), uneven(8)])
def test_the_noise_is_what_is_measured(tmp_path: Path, scheme: Scheme, scales: np.ndarray) -> None:
    """The predicted noise of a pair with an exact input is within 3.5 dB of the noise at its output."""
    model, samples = _chain(scales=scales, depthwise=False), few(8, SHAPE)
    job = job_of(model, tmp_path, samples)
    (pair,) = find_pairs(model)
    seen = observe(job.prepared, [pair], samples)
    noises = estimate_noise(Weights(model), pair, seen["x"], seen["r"], np.ones(8), scheme)
    state = Recoverer(job, target(), tmp_path).state(scheme, [], tmp_path / "q.onnx")
    assert state.artifact is not None
    quantized = read_model(state.artifact.model)
    _without_rounding(quantized, {"x", "last_out", "last_out_QuantizeLinear_Input"})
    errors = [run(quantized, s.inputs, optimization="none")[0] - run(model, s.inputs)[0] for s in samples]
    measured = float(np.mean([(e**2).sum(1).mean() for e in errors]))
    # The prediction ignores that the Relu removes part of the errors before it.
    assert abs(10 * np.log10(noises / measured)) < 3.5


def _without_rounding(model: ir.Model, tensors: set[str]) -> None:
    """Remove QuantizeLinear and DequantizeLinear of some tensors from a QDQ model."""
    for node in model.graph:
        quantizer = node.inputs[0].producer() if node.op_type == "DequantizeLinear" and node.inputs[0] else None
        if quantizer is not None and name_of(quantizer.inputs[0]) in tensors:
            output = node.outputs[0]
            exact = Editor(model).node("Identity", [quantizer.inputs[0]], "exact", before=node)
            replace_value(output, exact)


@pytest.mark.parametrize(
    "scheme", [SCHEME, ONE_SCALE, ONE_SCALE.replace(format="QOperator", weight_type="uint8", weight_symmetric=False)]
)
def test_scaled_channels_gain(tmp_path: Path, scheme: Scheme) -> None:
    model, samples = _chain(scales=uneven(8)), few(8, SHAPE)
    recoverer = Recoverer(job_of(model, tmp_path, samples), target(), tmp_path)
    plain = recoverer.state(scheme, [], tmp_path / "plain.onnx")
    better = recoverer.state(scheme, ["cross-layer-equalization"], tmp_path / "better.onnx")
    assert plain.artifact is not None
    assert better.artifact is not None
    held_out = few(8, SHAPE, seed=2)
    for sample in held_out:
        np.testing.assert_allclose(run(better.prepared.path, sample.inputs)[0], run(model, sample.inputs)[0], atol=1e-3)
    gain = noise_db(model, better.artifact.model, held_out) - noise_db(model, plain.artifact.model, held_out)
    assert gain > 6
    assert better.statistics.model_digest == better.prepared.digest


def test_leaves_balanced_channels_unchanged(tmp_path: Path) -> None:
    model, samples = _chain(scales=np.ones(8)), few(4, SHAPE)
    job = job_of(model, tmp_path, samples)
    state = Recoverer(job, target(), tmp_path).state(SCHEME, ["cross-layer-equalization"], tmp_path / "q.onnx")
    seen = observe(job.prepared, find_pairs(model), samples)
    gains = [
        find_best_factor(Weights(model), p, seen[p.maker.source], seen[p.tensor], SCHEME) for p in find_pairs(model)
    ]
    assert (state.prepared == job.prepared) is all(gain is None for gain in gains)


def test_dead_channels_keep_their_scale() -> None:
    model = _chain(scales=np.array([1, 0, 4, 16, 1, 0.1, 1, 1]) + 1e-30, depthwise=False)
    weights = Weights(model)
    dead = {"first_b": np.s_[1], "first_w": np.s_[1], "last_w": np.s_[:, 1]}
    for name, place in dead.items():
        values = weights.array(name).copy()
        values[place] = 0
        weights.replace(name, values)
    (pair,) = find_pairs(model)
    random = np.random.default_rng(0)
    rows = np.maximum(random.normal(size=(99, 8)) * [1, 0, 4, 16, 1, 0.1, 1, 1], 0)
    made = ChannelFigures(np.zeros(8), rows.max(0), (rows**2).mean(0))
    read = ChannelFigures(np.ones(3), np.ones(3), np.ones(3))
    factor = find_best_factor(Weights(model), pair, read, made, ONE_SCALE)
    assert factor is not None
    assert factor[1] == 1
    assert np.isfinite(factor).all()


def test_layers_all_in_float_are_left_alone(tmp_path: Path) -> None:
    model, samples = _chain(scales=uneven(8)), few(2, SHAPE)
    recoverer = Recoverer(job_of(model, tmp_path, samples), target(), tmp_path)
    scheme = SCHEME.replace(exclude=("first", "depthwise"))
    state = recoverer.state(scheme, ["cross-layer-equalization"], tmp_path / "q.onnx")
    assert "first" not in state.notes[0].split(":")[-1]
