"""Compare `edgeq.tuning.recover.methods.weight_rounding` with a trial of all roundings, and test it on a network."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from edgeq.quantization.gptq import damp, round_rows
from edgeq.tuning.recover.layers import Weights, find_layers
from edgeq.tuning.recover.methods.weight_rounding import measure_moments, weight_limits
from edgeq.tuning.recover.quantized_file import QuantizedFile
from edgeq.tuning.recover.run import Recoverer
from edgeq.util.display import SILENT
from tests.tuning.recover.nets import SCHEME, few, job_of, noise_db, target, two_gates


def _error(row: np.ndarray, metric: np.ndarray) -> float:
    return float(row @ metric @ row)


def test_close_to_the_best_of_all_roundings() -> None:
    shares = []
    for seed in range(20):
        random = np.random.default_rng(seed)
        mixing = random.normal(size=(6, 6))
        metric = damp((mixing @ mixing.T)[None] + 4.0, 0.01)
        row = random.normal(size=(1, 1, 6)) * 3
        found = round_rows(row, metric, np.array([[[-127]]]), np.array([[[127]]]))
        around = [sorted({int(np.floor(v)) + d for d in (-1, 0, 1, 2)}) for v in row[0, 0]]
        best = min(_error(row[0, 0] - np.array(q), metric[0]) for q in itertools.product(*around))
        plain = _error(row[0, 0] - np.rint(row[0, 0]), metric[0])
        mine = _error(row[0, 0] - found[0, 0], metric[0])
        shares.append((plain - mine) / (plain - best) if plain > best else 1.0)
    # It reaches most of the largest gain that any rounding has over rounding to the nearest.
    assert np.median(shares) > 0.8


def test_blocks_change_nothing() -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(2, 5, 30)) * 4
    mixing = random.normal(size=(2, 30, 40))
    metric = damp(mixing @ mixing.transpose(0, 2, 1), 0.01)
    low, high = np.full((1, 1, 1), -127), np.full((1, 1, 1), 127)
    whole = round_rows(rows, metric, low, high, block=30)
    np.testing.assert_array_equal(whole, round_rows(rows, metric, low, high, block=7))


def test_independent_inputs_leave_the_nearest_integer() -> None:
    rows = np.random.default_rng(0).normal(size=(1, 4, 9)) * 5
    found = round_rows(rows, np.eye(9)[None], np.full((1, 1, 1), -127), np.full((1, 1, 1), 127))
    np.testing.assert_array_equal(found, np.rint(rows))


def test_integers_stay_within_their_limits() -> None:
    rows = np.random.default_rng(0).normal(size=(1, 4, 9)) * 200
    found = round_rows(rows, np.eye(9)[None], np.full((1, 1, 1), -64), np.full((1, 1, 1), 64))
    assert found.min() == -64
    assert found.max() == 64


def test_limits_are_those_of_the_quantizer() -> None:
    assert weight_limits("int8", False) == (-127, 127)
    assert weight_limits("int8", True) == (-64, 64)
    assert weight_limits("uint8", False) == (0, 255)
    assert weight_limits("uint8", True) == (0, 127)


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
@pytest.mark.parametrize("weight_type", ["int8", "uint8"])
def test_a_network_gains_and_applying_it_twice_changes_nothing(tmp_path: Path, form: str, weight_type: str) -> None:
    samples = few(8, [1, 3, 12, 12], mean=3.0)
    model = two_gates()
    job = job_of(model, tmp_path, samples)
    # With one scale of seven bits for all weights, the weights cause most of the noise.
    scheme = SCHEME.replace(
        format=form,
        weight_type=weight_type,
        weight_symmetric=weight_type == "int8",
        per_channel=False,
        reduce_range=True,
    )
    recoverer = Recoverer(job, target(), tmp_path)
    plain = recoverer.state(scheme, [], tmp_path / "plain.onnx")
    better = recoverer.state(scheme, ["weight-rounding"], tmp_path / "better.onnx")
    assert plain.artifact is not None
    assert better.artifact is not None
    held_out = few(8, [1, 3, 12, 12], mean=3.0, seed=2)
    gain = noise_db(model, better.artifact.model, held_out) - noise_db(model, plain.artifact.model, held_out)
    assert gain > 1.5
    again = recoverer.build(scheme, ["weight-rounding"], tmp_path / "again.onnx", progress=SILENT)
    assert again.artifact.model.read_bytes() == better.artifact.model.read_bytes()


def test_weights_and_not_only_biases_are_better(tmp_path: Path) -> None:
    """Rounding improves weights, not only biases: each layer's error is smaller even without the mean error."""
    samples = few(8, [1, 3, 12, 12], mean=3.0)
    model = two_gates()
    job = job_of(model, tmp_path, samples)
    recoverer = Recoverer(job, target(), tmp_path)
    files = []
    for names in ([], ["weight-rounding"]):
        artifact = recoverer.state(SCHEME, names, tmp_path / "q.onnx").artifact
        assert artifact is not None
        files.append(QuantizedFile.load(artifact.model))
    floats = Weights(model)
    layers = find_layers(model)
    gains = []
    for layer, moments in measure_moments(job.prepared, layers, samples):
        left = []
        for file in files:
            (integer,) = file.integer_layers([layer])
            errors = floats.rows(layer) - integer.per_row(integer.params.scale) * file.weight(integer)
            left.append(float(np.einsum("gmk,gkl,gml->", errors, moments.covariance, errors)))
        gains.append(10 * np.log10(left[0] / left[1]))
    assert len(gains) == 4
    assert min(gains) > -0.1
    assert np.mean(gains) > 1
