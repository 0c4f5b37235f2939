"""Test the sequential correction: what it gains, what it leaves alone, and that it is its own fixed point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeq.model.load import read_model
from edgeq.quantization.params import weight_limits
from edgeq.tuning.recover.base import RecoveryState
from edgeq.tuning.recover.layers import Weights, find_layers
from edgeq.tuning.recover.methods import sequential_correction
from edgeq.tuning.recover.methods.sequential_correction import SequentialCorrection, round_layer, sum_patches
from edgeq.tuning.recover.quantized_file import QuantizedFile
from edgeq.tuning.recover.run import Recoverer
from edgeq.util.display import SILENT
from tests.tuning.recover.graphs import tensors_of
from tests.tuning.recover.nets import SCHEME, FewSamples, Net, few, job_of, noise_db, run, target, two_gates

SHAPE = [1, 3, 10, 10]
NAME = SequentialCorrection().name


def _biased(folder: Path, model: ir.Model, samples: FewSamples, form: str) -> RecoveryState:
    """Return a state whose integer weights are all rounded down, as rounding towards zero does with positive ones."""
    state = Recoverer(job_of(model, folder, samples), target(), folder).state(
        SCHEME.replace(format=form), [], folder / "plain.onnx"
    )
    assert state.artifact is not None
    file = QuantizedFile.load(state.artifact.model)
    for integer in file.integer_layers(find_layers(model)):
        file.set_weight(integer, np.maximum(file.weight(integer) - 1, -127))
    file.save(state.artifact.model)
    return state


def _means(model: ir.Model, path: Path, samples: FewSamples) -> np.ndarray:
    # Without optimization, the sums are exact: fused kernels saturate on processors without VNNI.
    pairs = [(run(model, s.inputs)[0], run(path, s.inputs, optimization="none")[0]) for s in samples]
    return np.abs(np.mean([(b - a).mean((0, 2, 3)) for a, b in pairs], axis=0))


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_mean_errors_of_biased_weights_go(tmp_path: Path, form: str) -> None:
    model, samples = two_gates(), few(16, [1, 3, 12, 12], mean=2.0)
    state = _biased(tmp_path, model, samples, form)
    assert state.artifact is not None
    (tmp_path / "work").mkdir()
    better = SequentialCorrection().apply(state, samples, tmp_path / "work", SILENT)
    assert better.artifact is not None
    held_out = few(16, [1, 3, 12, 12], mean=2.0, seed=2)
    before, after = (_means(model, s.artifact.model, held_out) for s in (state, better) if s.artifact)
    assert np.all(after < 0.35 * before)
    assert noise_db(model, better.artifact.model, held_out) > noise_db(model, state.artifact.model, held_out) + 3


def test_the_last_layers_mean_is_the_float_models(tmp_path: Path) -> None:
    """The corrected last layer has the float model's means to half a step."""
    net = Net()
    net.conv("x", "first", 3, 6, 3)
    net.node("Relu", ["first_out"], "r")
    net.conv("r", "last", 6, 4, 1)
    model, samples = net.model({"x": SHAPE}, ["last_out"]), few(16, SHAPE)
    state = _biased(tmp_path, model, samples, "QDQ")
    (tmp_path / "work").mkdir()
    better = SequentialCorrection().apply(state, samples, tmp_path / "work", SILENT)
    assert better.artifact is not None
    file = QuantizedFile.load(better.artifact.model)
    low, high = file.output_range(file.integer_layers(find_layers(model))[-1])
    assert np.all(_means(model, better.artifact.model, samples) < 0.5 * (high - low) / 255)


def _weights(path: Path, model: ir.Model) -> dict[str, np.ndarray]:
    file = QuantizedFile.load(path)
    return {integer.layer.name: file.weight(integer) for integer in file.integer_layers(find_layers(model))}


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
@pytest.mark.parametrize("weight_type", ["int8", "uint8"])
def test_a_corrected_network_gains_and_a_second_pass_changes_nothing(
    tmp_path: Path, form: str, weight_type: str
) -> None:
    samples, model = few(8, [1, 3, 12, 12], mean=3.0), two_gates()
    # With one scale of seven bits for all weights, the weights cause most of the noise.
    scheme = SCHEME.replace(
        format=form,
        weight_type=weight_type,
        weight_symmetric=weight_type == "int8",
        per_channel=False,
        reduce_range=True,
    )
    recoverer = Recoverer(job_of(model, tmp_path, samples), target(), tmp_path)
    plain = recoverer.state(scheme, [], tmp_path / "plain.onnx")
    better = recoverer.state(scheme, [NAME], tmp_path / "better.onnx")
    assert plain.artifact is not None
    assert better.artifact is not None
    held_out = few(8, [1, 3, 12, 12], mean=3.0, seed=2)
    assert noise_db(model, better.artifact.model, held_out) > noise_db(model, plain.artifact.model, held_out) + 1.5
    (tmp_path / "work").mkdir()
    twice = SequentialCorrection().apply(better, samples, tmp_path / "work", SILENT)
    assert twice.artifact is not None
    assert twice.artifact.model.read_bytes() == better.artifact.model.read_bytes()


def test_both_formats_get_equal_corrections(tmp_path: Path) -> None:
    model, samples = two_gates(), few(8, [1, 3, 12, 12], mean=2.0)
    recoverer = Recoverer(job_of(model, tmp_path, samples), target(), tmp_path)
    files = []
    for form in ("QDQ", "QOperator"):
        artifact = recoverer.state(SCHEME.replace(format=form), [NAME], tmp_path / f"{form}.onnx").artifact
        assert artifact is not None
        files.append(QuantizedFile.load(artifact.model))
    one, other = ({i.layer.name: (f, i) for i in f.integer_layers(find_layers(model))} for f in files)
    assert one.keys() == other.keys()
    for name, (file, integer) in one.items():
        twin_file, twin = other[name]
        # Sums of integers and of floats may be rounded to different sides of a half.
        assert np.mean(file.weight(integer) != twin_file.weight(twin)) < 0.02
        np.testing.assert_allclose(file.bias(integer), twin_file.bias(twin), atol=0.01)


@st.composite
def _rounded(draw: Any) -> tuple[Net, tuple[int, ...]]:
    net = Net(draw(st.integers(0, 10**6)))
    bias, groups = draw(st.booleans()), draw(st.sampled_from([1, 2, 4]))
    if draw(st.booleans()):
        net.conv("x", "y_conv", 4, 8, draw(st.sampled_from([1, 3])), groups=groups, bias=bias)
        net.nodes[-1].output[0] = "y"
        return net, (1, 4, 6, 6)
    inputs = ["x", net.constant("w", net.random.normal(size=(4, 6)))]
    if bias:
        net.node("Gemm", [*inputs, net.constant("b", net.random.normal(size=6))], "y")
    else:
        net.node("MatMul", inputs, "y")
    return net, (9, 4)


@given(drawn=_rounded(), per_channel=st.booleans(), weight_type=st.sampled_from(["int8", "uint8"]))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_rounding_never_raises_the_expected_error(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[Net, tuple[int, ...]], per_channel: bool, weight_type: str
) -> None:
    """For every output, the mean squared error over the patches is at most that of the nearest integers. The error is
    computed patch by patch; without a bias, its mean counts.
    """
    (net, shape), folder = drawn, tmp_path_factory.mktemp("rounded")
    model, samples = net.model({"x": shape}, ["y"]), few(4, shape, mean=1.0)
    scheme = SCHEME.replace(per_channel=per_channel, weight_type=weight_type, weight_symmetric=weight_type == "int8")
    state = Recoverer(job_of(model, folder, samples), target(), folder).state(scheme, [], folder / "q.onnx")
    assert state.artifact is not None
    file = QuantizedFile.load(state.artifact.model)
    (integer,) = file.integer_layers(find_layers(model))
    values = [sample.inputs["x"] for sample in samples]
    rows, old = Weights(model).rows(integer.layer), file.weight(integer)
    moments = sum_patches(integer.layer, values).moments()
    new = round_layer(rows, old, integer, moments, weight_limits(weight_type, False))
    random = np.random.default_rng(0)
    patches = np.concatenate([integer.layer.patches(value, 10**9, random) for value in values], axis=1)
    # The rounding of inputs, and the damping, add to the error as independent inputs would.
    centred = patches - (patches.mean(1, keepdims=True) if integer.bias is not None else 0)
    power = np.einsum("gpk,gpl->gkl", centred, centred) / patches.shape[1]
    extra = integer.input_scale**2 / 12 + 1e-3 * np.trace(power, axis1=1, axis2=2) / power.shape[1]
    scale = integer.per_row(integer.params.scale)
    errors = []
    for weights in (old, new):
        lost = rows - scale * weights
        output = centred @ lost.transpose(0, 2, 1)
        errors.append((output**2).mean(1) + extra[:, None] * (lost**2).sum(2))
    assert np.all(errors[1] <= errors[0] * (1 + 1e-3) + 1e-9)
    file.set_weight(integer, new)  # the integers fit their type


def test_the_mean_after_the_activation_is_the_float_models(tmp_path: Path) -> None:
    """Compare the means after each SiLU with those of float32, with the layers before it corrected."""
    model, samples = two_gates(), few(16, [1, 3, 12, 12], mean=2.0)
    state = _biased(tmp_path, model, samples, "QDQ")
    (tmp_path / "work").mkdir()
    better = SequentialCorrection().apply(state, samples, tmp_path / "work", SILENT)
    names = ["first_act", "second_act", "depthwise_act", "last_out"]
    means = []
    for source in (model, *(read_model(s.artifact.model) for s in (state, better) if s.artifact)):
        tensors = [tensors_of(source, dict(sample.inputs)) for sample in samples]
        means.append([np.mean([t[name].mean((0, 2, 3)) for t in tensors], axis=0) for name in names])
    exact, plain, corrected = means
    for place in range(len(names)):
        error = np.abs(corrected[place] - exact[place]).max()
        assert error < 0.1 * np.abs(plain[place] - exact[place]).max()


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_shared_weights_groups_and_layers_without_a_bias(tmp_path: Path, form: str) -> None:
    net = Net()
    net.conv("x", "one", 3, 4, 3, channels=[0.3, 1, 2, 0.1])
    net.node("Relu", ["one_out"], "r")
    net.conv("r", "shared", 4, 4, 3)
    net.conv("shared_out", "twin", 4, 4, 3)
    net.nodes[-1].input[1] = "shared_w"
    net.weights = [w for w in net.weights if w.name != "twin_w"]
    net.conv("twin_out", "grouped", 4, 8, 3, groups=2, bias=False)
    net.conv("grouped_out", "depthwise", 8, 8, 3, groups=8)
    net.node("GlobalAveragePool", ["depthwise_out"], "p")
    net.node("Flatten", ["p"], "f")
    net.node(
        "Gemm", ["f", net.constant("w", net.random.normal(size=(6, 8))), net.constant("b", np.ones(6))], "y", transB=1
    )
    model, samples = net.model({"x": SHAPE}, ["y"]), few(8, SHAPE, mean=1.0)
    state = _biased(tmp_path, model, samples, form)
    assert state.artifact is not None
    before = _weights(state.artifact.model, model)
    (tmp_path / "work").mkdir()
    better = SequentialCorrection().apply(state, samples, tmp_path / "work", SILENT)
    assert better.artifact is not None
    after = _weights(better.artifact.model, model)
    assert {name for name in before if np.array_equal(before[name], after[name])} == {"shared", "twin"}
    held_out = few(8, SHAPE, mean=1.0, seed=2)
    assert noise_db(model, better.artifact.model, held_out) > noise_db(model, state.artifact.model, held_out) + 3
    assert better.notes[-1].startswith(f"{NAME}: the weights of 4 and the means of ")


def test_large_layers_and_fitted_pairs_keep_their_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, samples = two_gates(), few(8, [1, 3, 12, 12], mean=2.0)
    state = _biased(tmp_path, model, samples, "QDQ")
    assert state.artifact is not None
    before = _weights(state.artifact.model, model)
    states = {"fitted": state.replace(scheme=state.scheme.replace(fit_pairs=True)), "large": state}
    for name, start in states.items():
        if name == "large":
            monkeypatch.setattr(sequential_correction, "LARGEST", 8**2 - 1)  # the second layer has the fewest taps, 8
        (tmp_path / name).mkdir()
        better = SequentialCorrection().apply(start, samples, tmp_path / name, SILENT)
        assert better.artifact is not None
        after = _weights(better.artifact.model, model)
        assert all(np.array_equal(before[layer], after[layer]) for layer in before)
        assert noise_db(model, better.artifact.model, samples) > noise_db(model, state.artifact.model, samples) + 3


def test_a_model_of_shared_weights_stays_as_it_is(tmp_path: Path) -> None:
    net = Net()
    net.conv("x", "shared", 3, 3, 1)
    net.conv("shared_out", "twin", 3, 3, 1)
    net.nodes[-1].input[1] = "shared_w"
    net.weights = [w for w in net.weights if w.name != "twin_w"]
    model, samples = net.model({"x": SHAPE}, ["twin_out"]), few(4, SHAPE)
    state = _biased(tmp_path, model, samples, "QDQ")
    unchanged = SequentialCorrection().apply(state, samples, tmp_path, SILENT)
    assert unchanged.artifact == state.artifact
    assert "no layer has integer weights of its own" in unchanged.notes[-1]
