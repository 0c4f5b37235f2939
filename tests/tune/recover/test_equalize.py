"""`edgeq.tune.recover.equalize`: the same function, channels that fill their range, less noise in integers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from onnx import helper

from edgeq.calibrate.collect import collect
from edgeq.model.load import load_model
from edgeq.progress import SILENT
from edgeq.tune.recover.base import State
from edgeq.tune.recover.equalize import Equalize, find_chains
from edgeq.tune.recover.run import recover
from tests.tune.recover.graphs import nets
from tests.tune.recover.nets import SCHEME, FewSamples, Net, few, job_of, noise_db, run, target, uneven

SHAPE = [1, 3, 12, 12]


def chain(*, clip: bool, low: float = 0.0, also_output: bool = False) -> onnx.ModelProto:
    """Conv with uneven channels, Clip(0, 6) or ReLU, MaxPool, depthwise Conv, ReLU, 1x1 Conv."""
    net = Net()
    x = net.conv("x", "first", 3, 8, channels=uneven(8))
    if clip:
        bounds = [net.constant("low", low), net.constant("high", 6.0)]
        x = net.node("Clip", [x, *bounds], "act")
    else:
        x = net.node("Relu", [x], "act")
    x = net.node("MaxPool", [x], "pooled", kernel_shape=[2, 2], strides=[2, 2])
    x = net.conv(x, "depthwise", 8, 8, groups=8)
    x = net.node("Relu", [x], "rectified")
    net.conv(x, "last", 8, 4, 1)
    return net.model({"x": SHAPE}, ["last_out", "pooled"] if also_output else ["last_out"])


def equalized(model: onnx.ModelProto, folder: Path, samples: FewSamples) -> State:
    job = job_of(model, folder, samples)
    assert job.statistics is not None
    return Equalize().apply(State(job.prepared, job.statistics, {}, SCHEME), samples, folder, SILENT)


@pytest.mark.parametrize("clip", [False, True])
def test_the_function_stays_and_channels_fill_their_range(tmp_path: Path, clip: bool) -> None:
    samples = few(6, SHAPE)
    model = chain(clip=clip)
    state = equalized(model, tmp_path, samples)
    assert "2 activations" in state.notes[0]
    for sample in samples:
        before, after = run(model, sample.inputs)[0], run(state.prepared.path, sample.inputs)[0]
        np.testing.assert_allclose(after, before, rtol=1e-3, atol=1e-4 * float(np.abs(before).max()))
    # A depthwise reader has a scale for each channel's weights, so nothing holds the activation back.
    reached = {
        path: collect(path, samples, ["pooled"], channels={"pooled": 1}).tensors["pooled"]
        for path in (tmp_path / "source.onnx", state.prepared.path)
    }
    before, after = (t.channels.maximum for t in reached.values() if t.channels is not None)
    assert (before < 0.5 * before.max()).any()
    assert (after > 0.6 * after.max()).all()
    assert after.max() <= before.max() * 1.0001


@given(nets())
@settings(max_examples=40, deadline=None)
def test_chains_of_random_graphs_can_be_scaled(drawn: tuple) -> None:
    """Every chain that is found bears any factors where nothing clips."""
    from edgeq.tune.recover.scaling import Weights

    model, feed = drawn
    before = run(model, feed)
    random = np.random.default_rng(0)
    for found in list(find_chains(model)):
        if np.isfinite(found.clip):
            continue
        weights = Weights(model)
        factor = np.exp(random.normal(0, 1, found.producer.outputs))
        weight, bias = weights.scaled_outputs(found.producer, factor)
        weights.replace(found.producer.weight, weight)
        if bias is not None:
            weights.replace(found.producer.bias, bias)
        for reader in found.readers:
            weights.scale_inputs(reader, 1 / factor)
    for a, b in zip(before, run(model, feed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * max(1.0, float(np.abs(a).max())))


def test_integers_gain(tmp_path: Path) -> None:
    samples = few(8, SHAPE)
    job = job_of(chain(clip=False), tmp_path, samples)
    plain = recover(job, target(), SCHEME, (), tmp_path / "plain.onnx")
    better = recover(job, target(), SCHEME, ("equalize",), tmp_path / "better.onnx")
    gained = noise_db(job.prepared.path, better.artifact.model, samples) - noise_db(
        job.prepared.path, plain.artifact.model, samples
    )
    assert gained > 3


@pytest.mark.parametrize(
    ("case", "tensors"),
    [("plain", {"pooled", "rectified"}), ("clip from -1", {"rectified"}), ("also an output", {"rectified"})],
)
def test_only_what_bears_a_factor_is_a_chain(case: str, tensors: set[str]) -> None:
    model = chain(clip=True, low=-1.0 if case == "clip from -1" else 0.0, also_output=case == "also an output")
    assert {found.tensor for found in find_chains(model)} == tensors


def test_a_residual_branch_is_no_chain() -> None:
    net = Net()
    x = net.node("Relu", [net.conv("x", "first", 3, 8)], "act")
    y = net.conv(x, "second", 8, 8)
    net.node("Add", [x, y], "sum")
    assert not list(find_chains(net.model({"x": SHAPE}, ["sum"])))


def test_nothing_to_do_is_said(tmp_path: Path) -> None:
    net = Net()
    net.conv("x", "only", 3, 4)
    state = equalized(net.model({"x": SHAPE}, ["only_out"]), tmp_path, few(2, SHAPE))
    assert state.notes == ("equalize: no activation lies between layers alone",)
    assert load_model(state.prepared.path).graph.node[0].op_type == "Conv"


def test_a_clip_from_bounds_computed_at_run_time_is_no_link() -> None:
    net = Net()
    x = net.conv("x", "first", 3, 8)
    net.nodes.append(helper.make_node("ReduceMax", ["x"], ["bound"], keepdims=0, name="bound"))
    x = net.node("Clip", [x, net.constant("low", 0.0), "bound"], "act")
    net.conv(x, "last", 8, 4, 1)
    assert not list(find_chains(net.model({"x": SHAPE}, ["last_out"])))
