"""Test `edgeq.tuning.recover.output_means`: means over all values, and biases that undo a shift."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from edgeq.tuning.recover import output_means
from edgeq.tuning.recover.followers import Followers
from edgeq.tuning.recover.layers import find_layers
from edgeq.tuning.recover.output_means import OutputView, find_shift, measure_float_means, shrink
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


def _view(*nodes: tuple[str, list[str], str], limits: tuple[float, float] = (-np.inf, np.inf)) -> OutputView:
    net = Net()
    net.conv("x", "c", 2, 2, 1)
    for op_type, inputs, output in nodes:
        net.node(op_type, inputs, output)
    model = net.model({"x": [1, 2, 3, 3]}, [nodes[-1][2] if nodes else "c_out"])
    followers = Followers(model)
    return OutputView(find_layers(model)[0], followers.function(followers.find("c_out")), limits)


def _samples(count: int, shift: np.ndarray, spread: float = 1.0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    random = np.random.default_rng(0)
    floats = [random.normal(0, spread, (1, 2, 40, 40)).astype(np.float32) for _ in range(count)]
    return floats, [(value + shift.reshape(1, 2, 1, 1)).astype(np.float32) for value in floats]


FUNCTIONS = {
    "nothing": (),
    "relu": (("Relu", ["c_out"], "y"),),
    "silu": (("Sigmoid", ["c_out"], "g"), ("Mul", ["c_out", "g"], "y")),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_shift_is_what_was_added(function: str) -> None:
    view = _view(*FUNCTIONS[function])
    shift = np.array([0.1, -0.05])
    floats, integers = _samples(4, shift)
    targets = view.means([view.table(value) for value in floats])
    np.testing.assert_allclose(find_shift(view, targets, integers), -shift, rtol=0.1)


def test_clipped_values_do_not_count() -> None:
    view = _view(limits=(0.0, 6.0))
    floats, integers = _samples(4, np.array([0.0, -0.5]))
    floats = [value - 10 for value in floats]
    integers = [value - 10 for value in integers]
    targets = view.means([view.table(value) for value in floats])
    np.testing.assert_array_equal(find_shift(view, targets, integers), 0)


@pytest.mark.parametrize("op_type", ["Log", "Sqrt", "Reciprocal"])
def test_functions_that_are_not_finite_shift_nothing(op_type: str) -> None:
    view = _view((op_type, ["c_out"], "y"))
    floats, integers = _samples(2, np.array([0.1, 0.1]))
    for value in (*floats, *integers):
        value[0, 0, 0, 0] = 0.0
    targets = view.means([view.table(value) for value in floats])
    assert np.isfinite(find_shift(view, targets, integers)).all()


def test_chance_is_left_alone() -> None:
    random = np.random.default_rng(0)
    noise = random.normal(0, 1, (16, 1000))
    assert np.mean(shrink(noise) ** 2) < 0.6 * np.mean(noise.mean(0) ** 2)
    sure = 5 + 0.1 * noise
    np.testing.assert_allclose(shrink(sure), sure.mean(0), rtol=1e-3)
    np.testing.assert_array_equal(shrink(noise[:1]), noise[0])


def test_batches_of_tables_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    view = _view(*FUNCTIONS["silu"])
    tables = [view.table(value) for value in (*_samples(3, np.zeros(2))[0], np.ones((1, 2, 1, 1), np.float32))]
    alone = np.stack([view.function(table).reshape(1, *table.shape).mean(2, dtype=np.float64) for table in tables])
    for batch in (1, 2**16):
        monkeypatch.setattr(output_means, "_BATCH", batch)
        np.testing.assert_allclose(view.means(tables), alone, rtol=1e-6)


def test_positions_are_the_same_in_tensors_of_one_shape_and_no_single_column() -> None:
    view = _view()
    columns = np.broadcast_to(np.arange(512, dtype=np.float32), (1, 2, 512, 512))
    table = view.table(columns)
    np.testing.assert_array_equal(table, view.table(columns.copy()))
    assert len(np.unique(table)) > 400
