"""Test that hazards and repairs leave no layer in float on hardware whose layers run only in integers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeq.backends.rknn.compile import platform_of
from edgeq.backends.rknn.data import chip_named
from edgeq.calibration.precision import DIVISOR
from edgeq.data.open_source import Data
from edgeq.hardware.target import load_targets, resolve
from edgeq.jobs.quantize import quantize
from edgeq.model.int8_prediction import predict_int8
from edgeq.model.int8_rules import int8_rules
from edgeq.prove.job import build, prepared_for
from edgeq.prove.request import Effort
from tests.backends.build import random
from tests.graphs import proto
from tests.opened import open_job

INSIDE = """g (float[1, 8, 8, 8] x) => (float[1, 8, 8, 8] y) {
    [first] c = Conv<pads = [1, 1, 1, 1]>(x, w) [size] a = Abs(c) [more] b = Add(a, small) [norm] n = Div(c, b)
    [last] y = Conv<pads = [1, 1, 1, 1]>(n, v)
}"""
AT_END = """g (float[1, 8, 8, 8] x) => (float[1, 16, 8, 8] y) {
    [first] c = Conv<pads = [1, 1, 1, 1]>(x, w) [boxes] b = Mul(c, big) [scores] s = Sigmoid(c)
    [join] y = Concat<axis = 1>(b, s)
}"""


def write(body: str, folder: Path) -> tuple[Path, Path]:
    """Write a model and 8 samples, and return their paths."""
    model, data = folder / "m.onnx", folder / "x.npz"
    weights = {"w": random(8, 8, 3, 3), "v": random(8, 8, 3, 3, seed=1), "small": np.float32(1e-3)}
    model.write_bytes(proto(body, {**weights, "big": np.float32(300)}).SerializeToString())
    np.savez(data, x=random(8, 1, 8, 8, 8, seed=2))
    return model, data


def test_a_divisor_keeps_no_layer_in_float_where_there_is_no_float(tmp_path: Path) -> None:
    model, data = write(INSIDE, tmp_path)
    job = open_job(model, Data(data), None, tmp_path / "work")
    chip, array = resolve("raspberry-pi-5"), resolve("gemmini")
    assert any(DIVISOR in note and note.startswith("in float") for note in _notes(job, chip, tmp_path))
    notes = _notes(job, array, tmp_path)
    assert any(DIVISOR in note and note.startswith("not kept in float, as gemmini has none") for note in notes)
    assert not any(note.startswith("in float") for note in notes)
    built = build(job, array, array.profile.scheme, tmp_path / "array.onnx")
    assert built.artifact.coverage is not None
    assert built.artifact.coverage.int8_mac_share == 1
    assert not any("tensor '" in node.reason for node in built.artifact.coverage.float_nodes)


def _notes(job, target, folder):  # type: ignore[no-untyped-def]
    return build(job, target, target.profile.scheme, folder / f"{target.name}.onnx").artifact.notes


def test_a_join_behind_the_last_layer_stays_in_float_there_too(tmp_path: Path) -> None:
    model, data = write(AT_END, tmp_path)
    job = open_job(model, Data(data), None, tmp_path / "work")
    assert job.prepared.hazards
    target = resolve("rv1106")
    found = predict_int8(job.prepared.graph, int8_rules("cpu"), hazards=prepared_for(job.prepared, target).hazards)
    assert {node.name for node in found if "tensor '" in node.reason} >= {"join"}
    assert [node.verdict for node in found if node.name == "first"] == ["int8"]


@pytest.mark.parametrize("effort", ["default", "thorough"])
def test_a_repair_without_float_writes_the_best_integers_and_names_layers(tmp_path: Path, effort: Effort) -> None:
    # One channel of the input is a thousand times the others, so no recovery gives the other channels more levels.
    model, data = tmp_path / "m.onnx", tmp_path / "x.npz"
    first = random(8, 8, 3, 3)
    first[:, 0] /= 1000
    body = """g (float[1, 8, 8, 8] x) => (float[1, 8, 8, 8] y) {
        [first] c = Conv<pads = [1, 1, 1, 1]>(x, w) [relu] r = Relu(c) [last] y = Conv<pads = [1, 1, 1, 1]>(r, v)
    }"""
    model.write_bytes(proto(body, {"w": first, "v": random(8, 8, 3, 3, seed=1)}).SerializeToString())
    samples = random(16, 1, 8, 8, 8, seed=2)
    samples[:, :, 0] *= 1000
    np.savez(data, x=samples)
    found = quantize(model, data, tmp_path / "int8.onnx", target="gemmini", timed=False, emulate=False, effort=effort)
    repair = found.proof.repair
    assert repair is not None
    assert not repair.met
    assert found.proof.coverage.int8_mac_share == 1
    assert not any("in float" in step.name for step in repair.steps)
    assert set(repair.noisiest) & {"first", "last"}
    assert any(repair.noisiest[0] in warning for warning in found.proof.warnings())


def test_the_targets_of_chips_without_float_state_it() -> None:
    chips = [target for target in load_targets().values() if target.backend == "rknn"]
    assert all(target.profile.integer_only != chip_named(platform_of(target)).float16 for target in chips)
    assert all(target.profile.why["integer_only"] for target in chips if target.profile.integer_only)


SHIFTS = """
title = "shifts"
architecture = "any"
rank = 999
backend = "cpu"
min_onnxruntime = "1.20"
integer_only = true

[scheme]
mode = "static"
format = "QDQ"
activation_type = "int8"
weight_type = "int8"
activation_symmetric = true
per_channel = false
scale = "power-of-two"
bias_bits = 20

[search]
method = ["minmax", "mse"]
"""


def test_a_repair_without_float_combines_recoveries_and_ranges(tmp_path: Path) -> None:
    # The input has one channel of a thousand times the size of the others, so no build is good enough.
    model, data, target = tmp_path / "m.onnx", tmp_path / "x.npz", tmp_path / "shifts.toml"
    first, samples = random(8, 8, 3, 3), random(16, 1, 8, 8, 8, seed=2)
    first[:, 0] /= 1000
    samples[:, :, 0] *= 1000
    body = """g (float[1, 8, 8, 8] x) => (float[1, 8, 8, 8] y) {
        [first] c = Conv<pads = [1, 1, 1, 1]>(x, w) [relu] r = Relu(c) [last] y = Conv<pads = [1, 1, 1, 1]>(r, v)
    }"""
    model.write_bytes(proto(body, {"w": first, "v": random(8, 8, 3, 3, seed=1)}).SerializeToString())
    np.savez(data, x=samples)
    target.write_text(SHIFTS)
    found = quantize(model, data, tmp_path / "int8.onnx", target=str(target), timed=False, emulate=False)
    repair = found.proof.repair
    assert repair is not None
    assert not repair.met
    names = [step.name for step in repair.steps]
    both, gentle = "cross-layer-equalization", "sequential-correction"
    assert any(both in name and "mse" not in name for name in names)
    assert any(both in name and "mse" in name for name in names)
    assert any(gentle in name and both not in name for name in names)
    assert "ranges by mse" in names
    assert not any("in float" in name for name in names)
    assert len(names) <= 8
    # Losses that differ by less than a quarter of the allowed loss count as equal.
    losses = [repair.plain, *(step.loss for step in repair.steps if step.loss is not None)]
    assert repair.loss <= min(losses) + repair.max_drop / 4
