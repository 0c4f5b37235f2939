"""Test the choice of coarse scales: what it gains, its form in the file, and when it changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from edgeq.scheme import Scheme
from edgeq.tuning.recover.base import RecoveryState
from edgeq.tuning.recover.layers import Weights, find_layers
from edgeq.tuning.recover.methods.cross_layer_equalization import ChannelFigures, find_best_factor, find_pairs
from edgeq.tuning.recover.methods.sequential_correction import SequentialCorrection
from edgeq.tuning.recover.quantized_file import QuantizedFile
from edgeq.tuning.recover.run import Recoverer
from edgeq.util.display import SILENT
from tests.tuning.recover.nets import SCHEME, Net, few, job_of, run, sqnr_db, target

SHAPE = [1, 3, 12, 12]
NAME = SequentialCorrection().name
ONE_SCALE = SCHEME.replace(activation_type="int8", per_channel=False)
SHIFTS = ONE_SCALE.replace(activation_symmetric=True, scale="power-of-two", bias_bits=20)
SCHEMES = [ONE_SCALE, SHIFTS, SHIFTS.replace(per_channel=True)]
HELD_OUT = few(8, SHAPE, seed=2)


def edges(size: float = 200.0) -> ir.Model:
    """Return Conv, Clip, Conv. One channel of the first is so large that the Clip cuts nearly all of its values."""
    net, channels = Net(), np.ones(8)
    channels[3] = size
    net.constant("low", 0.0)
    net.constant("high", 6.0)
    x = net.node("Clip", [net.conv("x", "first", 3, 8, channels=channels), "low", "high"], "c")
    net.conv(x, "last", 8, 4, 1)
    return net.model({"x": SHAPE}, ["last_out"])


def corrected(folder: Path, model: ir.Model, scheme: Scheme, name: str = NAME) -> RecoveryState:
    recoverer = Recoverer(job_of(model, folder, few(8, SHAPE)), target(), folder)
    return recoverer.state(scheme, [name] if name else [], folder / f"{name}.onnx")


def file_of(state: RecoveryState) -> Path:
    assert state.artifact is not None
    return state.artifact.model


def quality(model: ir.Model, state: RecoveryState) -> float:
    # Without optimisation, no kernel can saturate.
    pairs = [(run(model, s.inputs)[0], run(file_of(state), s.inputs, optimization="none")[0]) for s in HELD_OUT]
    return sqnr_db(np.stack([a for a, _ in pairs]), np.stack([b for _, b in pairs]))


@pytest.mark.parametrize("scheme", [ONE_SCALE, SHIFTS])
def test_a_channel_that_a_clip_cuts_no_longer_decides_the_scale_of_all(tmp_path: Path, scheme: Scheme) -> None:
    model = edges()
    plain, better = corrected(tmp_path, model, scheme, ""), corrected(tmp_path, model, scheme)
    assert quality(model, better) > quality(model, plain) + 3
    scales = [
        {i.layer.name: i.params.scale.max() for i in QuantizedFile.load(file_of(s)).integer_layers(find_layers(model))}
        for s in (plain, better)
    ]
    assert scales[1]["first"] <= scales[0]["first"] / 2


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_file_has_scales_of_the_right_form_and_biases_that_follow_them(tmp_path: Path, scheme: Scheme) -> None:
    path = file_of(corrected(tmp_path, edges(), scheme))
    graph = onnx.load(path).graph
    values = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    scales = {n.output[0]: values[n.input[1]] for n in graph.node if n.op_type == "DequantizeLinear"}
    integers = {n.output[0]: values.get(n.input[0]) for n in graph.node if n.op_type == "DequantizeLinear"}
    layers = [node for node in graph.node if node.op_type == "Conv"]
    assert len(layers) == 2
    for node in layers:
        data, weight, bias = node.input
        np.testing.assert_array_equal(scales[bias], scales[data] * scales[weight])
        assert scales[weight].size == (integers[weight].shape[0] if scheme.per_channel else 1)
        assert np.abs(integers[bias].astype(np.int64)).max() < 2 ** (scheme.bias_bits - 1)
        if scheme.scale == "power-of-two":
            assert np.all(np.frexp(scales[weight])[0] == 0.5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_second_pass_changes_nothing(tmp_path: Path, scheme: Scheme) -> None:
    better = corrected(tmp_path, edges(), scheme)
    (tmp_path / "work").mkdir()
    twice = SequentialCorrection().apply(better, few(8, SHAPE), tmp_path / "work", SILENT)
    assert file_of(twice).read_bytes() == file_of(better).read_bytes()


def test_free_scales_for_each_channel_stay(tmp_path: Path) -> None:
    model, scales = edges(), []
    for name in ("", NAME):
        file = QuantizedFile.load(file_of(corrected(tmp_path, model, SCHEME, name)))
        scales.append(np.concatenate([i.params.scale for i in file.integer_layers(find_layers(model))]))
    np.testing.assert_array_equal(*scales)


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_a_bias_without_a_scale_of_its_own_keeps_the_scale_of_its_weight(tmp_path: Path, form: str) -> None:
    scheme = ONE_SCALE.replace(format=form, activation_type="uint8")
    file = QuantizedFile.load(file_of(corrected(tmp_path, edges(), scheme)))
    assert [bool(i.scales) for i in file.integer_layers(find_layers(edges()))] == [form == "QDQ"] * 2


@pytest.mark.parametrize("scheme", [SHIFTS, SCHEME])
def test_equalization_for_shifts_leaves_a_channel_alone_that_is_always_zero(scheme: Scheme) -> None:
    net, channels = Net(), np.array([1, 1e-6, 4, 16, 1, 0.1, 1, 1])
    net.conv(net.node("Relu", [net.conv("x", "first", 3, 8, channels=channels)], "r"), "last", 8, 4, 1)
    (pair,) = find_pairs(model := net.model({"x": SHAPE}, ["last_out"]))
    rows = np.maximum(np.random.default_rng(0).normal(size=(99, 8)), 0)
    rows[:, 1] = 0
    made = ChannelFigures(np.zeros(8), rows.max(0), (rows**2).mean(0))
    read = ChannelFigures(np.ones(3), np.ones(3), np.ones(3))
    factor = find_best_factor(Weights(model), pair, read, made, scheme.replace(per_channel=False))
    assert factor is not None
    assert (factor[1] == 1) == (scheme is SHIFTS)


def test_a_clamp_that_the_hardware_fuses_is_corrected_like_one_with_a_pair_before_it(tmp_path: Path) -> None:
    net = Net()
    net.conv(net.node("Relu", [net.conv("x", "first", 3, 8)], "r"), "last", 8, 4, 1)
    model, outputs = net.model({"x": SHAPE}, ["last_out"]), []
    for fused in ((), ("Relu",)):
        (folder := tmp_path / str(len(fused))).mkdir()
        path = file_of(corrected(folder, model, SHIFTS.replace(fused=fused)))
        kinds = [node.op_type for node in onnx.load(path).graph.node]
        assert ("QuantizeLinear" in kinds[kinds.index("Conv") : kinds.index("Relu")]) == (not fused)
        outputs.append(np.stack([run(path, s.inputs, optimization="none")[0] for s in HELD_OUT]))
    np.testing.assert_array_equal(*outputs)
