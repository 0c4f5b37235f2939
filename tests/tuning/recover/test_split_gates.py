"""Test `edgeq.tuning.recover.methods.split_gates`: only gates that matter are split, and it helps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeq.calibration.ranges import Range
from edgeq.calibration.sampled_values import drawn_rows
from edgeq.scheme import Scheme
from edgeq.tuning.recover.layers import find_layers
from edgeq.tuning.recover.methods.split_gates import VALUE, GateSplit, find_gates, select_splits
from edgeq.tuning.recover.run import Recoverer
from tests.tuning.recover.graphs import tensors_of
from tests.tuning.recover.nets import SCHEME, few, job_of, noise_db, prepared_of, run, target, two_gates, uneven

SHAPE = [1, 3, 12, 12]


@pytest.mark.parametrize("scheme", [SCHEME, SCHEME.replace(format="QOperator", activation_type="int8")])
def test_uneven_channels_gain(tmp_path: Path, scheme: Scheme) -> None:
    model, samples = two_gates(uneven), few(8, SHAPE)
    recoverer = Recoverer(job_of(model, tmp_path, samples), target(), tmp_path)
    plain = recoverer.state(scheme, [], tmp_path / "plain.onnx")
    split = recoverer.state(scheme, ["split-gates"], tmp_path / "split.onnx")
    for sample in few(3, SHAPE, seed=5):
        np.testing.assert_allclose(
            run(split.prepared.path, sample.inputs)[0], run(model, sample.inputs)[0], rtol=1e-3, atol=1e-3
        )
    assert plain.artifact is not None
    assert split.artifact is not None
    held_out = few(8, SHAPE, seed=2)
    assert noise_db(model, split.artifact.model, held_out) > noise_db(model, plain.artifact.model, held_out) + 3
    fixed = {name for name in split.ranges if name.endswith(VALUE)}
    assert fixed
    assert set(split.statistics.tensors) >= fixed, "statistics are of the model that is quantized"


def test_excluded_layers_are_not_split(tmp_path: Path) -> None:
    model, samples = two_gates(uneven), few(4, SHAPE)
    recoverer = Recoverer(job_of(model, tmp_path, samples), target(), tmp_path)
    scheme = SCHEME.replace(exclude=("first", "second", "depthwise"))
    state = recoverer.state(scheme, ["split-gates"], tmp_path / "q.onnx")
    assert "no layer is followed" in state.notes[0]
    assert state.prepared == recoverer.state(scheme, [], tmp_path / "p.onnx").prepared


def _plan(now: float, then: float) -> GateSplit:
    gate = find_gates(two_gates())[0]
    return GateSplit(gate, now, then, np.ones(8), Range(0.0, 1.0))


def test_splits_only_gates_that_gain_enough() -> None:
    plans = [_plan(10.0, 1.0), _plan(4.0, 3.9), _plan(3.0, 0.5), _plan(1.0, 2.0)]
    assert select_splits(plans, 0.1) == (plans[0], plans[2])
    assert select_splits(plans, 0.3) == (plans[0],), "2.5 is less than 0.3 of what is left"
    assert select_splits(plans, 0.6) == ()
    assert select_splits(plans, 0.0) == (plans[0], plans[2], plans[1])
    assert select_splits([], 0.1) == ()


def test_draws_are_rows_of_the_tensors(tmp_path: Path) -> None:
    model, samples = two_gates(), few(3, [1, 3, 12, 12])
    prepared = prepared_of(model, tmp_path)
    layers = find_layers(model)
    tensors = [tensors_of(model, dict(sample.inputs)) for sample in samples]
    axes = {layer.output: 1 for layer in layers} | {"x": 1}
    for name, rows in drawn_rows(prepared, axes, samples).items():
        every = np.concatenate([t[name].transpose(0, 2, 3, 1).reshape(-1, t[name].shape[1]) for t in tensors])
        assert len(rows) == 3 * 144
        np.testing.assert_allclose(np.sort(rows, axis=0), np.sort(every, axis=0), atol=1e-5)
