"""Compare `edgeq.tuning.recover.methods.weight_rounding` with a computation over all patches at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeq.calibration.sampled_values import spread
from edgeq.quantization.gptq import damp
from edgeq.tuning.recover import patch_moments
from edgeq.tuning.recover.layers import WeightedLayer, find_layers
from edgeq.tuning.recover.methods import weight_rounding
from edgeq.tuning.recover.methods.weight_rounding import measure_moments
from tests.tuning.recover.graphs import tensors_of
from tests.tuning.recover.nets import FewSamples, Net, few, prepared_of


def _net() -> Net:
    net = Net()
    net.conv("x", "first", 2, 4, 3, strides=[2, 2])
    net.node("Relu", ["first_out"], "r")
    net.conv("r", "grouped", 4, 4, 3, groups=2)
    net.node("GlobalAveragePool", ["grouped_out"], "p")
    net.node("Flatten", ["p"], "f")
    net.node("Gemm", ["f", net.constant("w", net.random.normal(size=(4, 3)))], "g")
    return net


def _patches(layer: WeightedLayer, all_tensors: list[dict[str, np.ndarray]]) -> np.ndarray:
    random = np.random.default_rng(0)
    return np.concatenate([layer.patches(t[layer.source], 10**9, random) for t in all_tensors], axis=1).astype(
        np.float64
    )


@pytest.mark.parametrize("memory", [weight_rounding.MEMORY, 1])
def test_mean_and_covariance_are_those_of_all_patches(tmp_path: Path, memory: int) -> None:
    model = _net().model({"x": ["N", 2, 9, 9]}, ["g"])
    prepared = prepared_of(model, tmp_path)
    samples = few(6, [2, 2, 9, 9], mean=2.0)
    every = [tensors_of(model, dict(sample.inputs)) for sample in samples]
    found = list(measure_moments(prepared, find_layers(model), samples, memory=memory))
    assert [layer.name for layer, _ in found] == ["first", "grouped", "g_Gemm"]
    for layer, moments in found:
        patches = _patches(layer, every)
        assert moments.count == patches.shape[1]
        mean = patches.mean(1)
        centred = patches - mean[:, None]
        np.testing.assert_allclose(moments.mean, mean, atol=1e-5)
        np.testing.assert_allclose(
            moments.covariance, centred.transpose(0, 2, 1) @ centred / patches.shape[1], atol=1e-4
        )


def test_a_mean_far_from_zero_leaves_the_covariance_its_digits(tmp_path: Path) -> None:
    net = Net()
    net.node("MatMul", ["x", net.constant("w", np.ones((3, 2)))], "y")
    model = net.model({"x": [50, 3]}, ["y"])
    prepared = prepared_of(model, tmp_path)
    samples = few(8, [50, 3])
    shifted = FewSamples(
        tuple(type(s)(s.name, {"x": (s.inputs["x"] * 0.01 + 1000).astype(np.float32)}) for s in samples)
    )
    ((_, moments),) = measure_moments(prepared, find_layers(model), shifted)
    rows = np.concatenate([s.inputs["x"] for s in shifted]).astype(np.float64)
    np.testing.assert_allclose(moments.covariance[0], np.cov(rows.T, bias=True), rtol=1e-2, atol=1e-7)
    np.linalg.cholesky(damp(moments.covariance, 1e-6))


def test_few_positions_of_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_moments, "_MIN_PATCHES", 40)
    monkeypatch.setattr(patch_moments, "_PATCHES_PER_TAP", 1)
    model = _net().model({"x": ["N", 2, 9, 9]}, ["g"])
    prepared = prepared_of(model, tmp_path)
    ((_, moments),) = measure_moments(prepared, find_layers(model)[:1], few(4, [1, 2, 9, 9]))
    assert moments.count == 40


def test_stored_moments_are_not_computed_again(tmp_path: Path) -> None:
    model = _net().model({"x": ["N", 2, 9, 9]}, ["g"])
    prepared = prepared_of(model, tmp_path)
    layers = find_layers(model)
    store = tmp_path / "store"
    samples = few(4, [1, 2, 9, 9])
    first = {layer.name: moments for layer, moments in measure_moments(prepared, layers, samples, store=store)}
    prepared.path.write_bytes(b"no model")
    again = {layer.name: moments for layer, moments in measure_moments(prepared, layers, samples, store=store)}
    assert list(again) == list(first) == ["first", "grouped", "g_Gemm"]
    for name, moments in again.items():
        np.testing.assert_array_equal(moments.mean, first[name].mean)
        np.testing.assert_array_equal(moments.covariance, first[name].covariance)


def test_layers_too_large_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_rounding, "LARGEST", 2 * 18 * 18)
    model = _net().model({"x": ["N", 2, 9, 9]}, ["g"])
    prepared = prepared_of(model, tmp_path)
    layers = find_layers(model)
    assert [layer.groups * layer.taps**2 for layer in layers] == [18**2, 2 * 18**2, 16]
    monkeypatch.setattr(weight_rounding, "LARGEST", 18**2)
    assert [layer.name for layer, _ in measure_moments(prepared, layers, few(2, [1, 2, 9, 9]))] == ["first", "g_Gemm"]


@pytest.mark.parametrize(("there", "wanted", "found"), [(5, 9, [0, 1, 2, 3, 4]), (9, 3, [0, 3, 6]), (7, 3, [0, 2, 4])])
def test_samples_at_even_distances(there: int, wanted: int, found: list[int]) -> None:
    samples = few(there, [1])
    assert [s.name for s in spread(samples, wanted)] == [f"s{i}" for i in found]
