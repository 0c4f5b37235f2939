"""Test bias correction: it subtracts the mean error if there is one, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from edgeq.tuning.recover.base import RecoveryState
from edgeq.tuning.recover.followers import Followers
from edgeq.tuning.recover.layers import find_layers
from edgeq.tuning.recover.methods.bias_correction import BiasCorrection, OutputView, find_shift, shrink
from edgeq.tuning.recover.quantized_file import QuantizedFile
from edgeq.tuning.recover.run import Recoverer
from edgeq.util.display import SILENT
from tests.tuning.recover.nets import SCHEME, FewSamples, Net, few, job_of, noise_db, run, target, two_gates

SHAPE = [1, 3, 10, 10]


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
    pairs = [(run(model, s.inputs)[0], run(path, s.inputs)[0]) for s in samples]
    return np.abs(np.mean([(b - a).mean((0, 2, 3)) for a, b in pairs], axis=0))


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_mean_errors_of_biased_weights_go(tmp_path: Path, form: str) -> None:
    model, samples = two_gates(), few(16, [1, 3, 12, 12], mean=2.0)
    state = _biased(tmp_path, model, samples, form)
    assert state.artifact is not None
    (tmp_path / "work").mkdir()
    better = BiasCorrection().apply(state, samples, tmp_path / "work", SILENT)
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
    better = BiasCorrection().apply(state, samples, tmp_path / "work", SILENT)
    assert better.artifact is not None
    file = QuantizedFile.load(better.artifact.model)
    low, high = file.output_range(file.integer_layers(find_layers(model))[-1])
    assert np.all(_means(model, better.artifact.model, samples) < 0.5 * (high - low) / 255)


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
    wanted = np.stack([view.means(view.table(value)) for value in floats])
    np.testing.assert_allclose(find_shift(view, wanted, integers), -shift, rtol=0.1)


def test_clipped_values_do_not_count() -> None:
    view = _view(limits=(0.0, 6.0))
    floats, integers = _samples(4, np.array([0.0, -0.5]))
    floats = [value - 10 for value in floats]
    integers = [value - 10 for value in integers]
    wanted = np.stack([view.means(view.table(value)) for value in floats])
    np.testing.assert_array_equal(find_shift(view, wanted, integers), 0)


@pytest.mark.parametrize("op_type", ["Log", "Sqrt", "Reciprocal"])
def test_functions_that_are_not_finite_shift_nothing(op_type: str) -> None:
    view = _view((op_type, ["c_out"], "y"))
    floats, integers = _samples(2, np.array([0.1, 0.1]))
    for value in (*floats, *integers):
        value[0, 0, 0, 0] = 0.0
    wanted = np.stack([view.means(view.table(value)) for value in floats])
    assert np.isfinite(find_shift(view, wanted, integers)).all()


def test_chance_is_left_alone() -> None:
    random = np.random.default_rng(0)
    noise = random.normal(0, 1, (16, 1000))
    assert np.mean(shrink(noise) ** 2) < 0.6 * np.mean(noise.mean(0) ** 2)
    sure = 5 + 0.1 * noise
    np.testing.assert_allclose(shrink(sure), sure.mean(0), rtol=1e-3)
    np.testing.assert_array_equal(shrink(noise[:1]), noise[0])


def test_positions_are_the_same_in_tensors_of_one_shape_and_no_single_column() -> None:
    view = _view()
    columns = np.broadcast_to(np.arange(512, dtype=np.float32), (1, 2, 512, 512))
    table = view.table(columns)
    np.testing.assert_array_equal(table, view.table(columns.copy()))
    assert len(np.unique(table)) > 400


def test_layers_without_a_bias_are_left_alone(tmp_path: Path) -> None:
    net = Net()
    net.conv("x", "c", 3, 4, 1, bias=False)
    model, samples = net.model({"x": SHAPE}, ["c_out"]), few(4, SHAPE)
    state = _biased(tmp_path, model, samples, "QDQ")
    same = BiasCorrection().apply(state, samples, tmp_path, SILENT)
    assert same.artifact == state.artifact
    assert "no layer has an int32 bias" in same.notes[-1]
