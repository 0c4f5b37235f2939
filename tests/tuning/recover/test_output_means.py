"""Compare `recover.methods.weight_rounding` with a computation over all values, and check what it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from edgeq.tuning.recover.followers import Followers
from edgeq.tuning.recover.layers import find_layers
from edgeq.tuning.recover.methods import weight_rounding
from edgeq.tuning.recover.methods.bias_correction import OutputView, measure_float_means
from tests.tuning.recover.graphs import tensors_of
from tests.tuning.recover.nets import Net, few, prepared_of

SHAPE = [1, 3, 9, 9]
LIMITS = (-0.5, 1.5)


def _model() -> ir.Model:
    net = Net()
    net.conv("x", "first", 3, 4, 3)
    net.node("Relu", ["first_out"], "r")
    net.conv("r", "second", 4, 5, 1)
    return net.model({"x": SHAPE}, ["second_out"])


def _views(model: ir.Model, limits: tuple[float, float] = LIMITS) -> Mapping[str, OutputView]:
    followers = Followers(model)
    layers = find_layers(model)
    return {
        layer.name: OutputView(layer, followers.function(followers.find(layer.output), np.float32), limits)
        for layer in layers
    }


def test_means_are_those_of_all_values(tmp_path: Path) -> None:
    model, samples = _model(), few(4, SHAPE)
    found, largest = measure_float_means(prepared_of(model, tmp_path), _views(model), list(samples))
    tensors = [tensors_of(model, dict(sample.inputs)) for sample in samples]
    for name, low in (("first", 0.0), ("second", LIMITS[0])):  # a Relu follows the first layer
        clipped = [np.clip(t[f"{name}_out"].astype(np.float64), low, LIMITS[1]) for t in tensors]
        np.testing.assert_allclose(found[name], [[value.mean((0, 2, 3))] for value in clipped], atol=1e-6)
    assert largest == max(value.nbytes for t in tensors for name, value in t.items() if name.endswith("_out"))


def test_stored_means_are_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, samples = _model(), list(few(4, SHAPE))
    prepared, store = prepared_of(model, tmp_path), tmp_path / "store"
    store.mkdir()
    views = _views(model)
    some = {"second": views["second"]}
    plain, largest = measure_float_means(prepared, views, samples)
    measure_float_means(prepared, some, samples, store=store)
    assert measure_float_means(prepared, views, samples, store=store)[1] == largest
    monkeypatch.setattr(weight_rounding, "tensor_values", lambda *arguments: pytest.fail("the model was run"))
    again, known = measure_float_means(prepared, views, samples, store=store)
    assert known == largest
    for name in views:
        np.testing.assert_array_equal(again[name], plain[name])


def test_other_limits_are_another_view(tmp_path: Path) -> None:
    model, samples = _model(), list(few(2, SHAPE))
    prepared = prepared_of(model, tmp_path)
    (tmp_path / "store").mkdir()
    for limits in (LIMITS, (-np.inf, np.inf)):
        views = _views(model, limits)
        kept, _ = measure_float_means(prepared, views, samples, store=tmp_path / "store")
        plain, _ = measure_float_means(prepared, views, samples)
        for name in views:
            np.testing.assert_array_equal(kept[name], plain[name])
