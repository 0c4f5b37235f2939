from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeq.calibration.files import save_statistics
from edgeq.calibration.sentinels import NONFINITE
from edgeq.data.open_source import Data
from edgeq.errors import CalibrationError, ModelError, UsageError
from edgeq.hardware.target import resolve
from edgeq.jobs.calibrate import calibrate
from edgeq.model.prepare import prepare_model
from edgeq.prove import prepare as prepare_module
from edgeq.prove.job import build
from edgeq.scheme import Scheme
from tests.backends.build import mixed, random
from tests.graphs import proto
from tests.opened import open_job

NET = Path("net.onnx")
CALIB = Data("calib.npz")
VAL = Data("val.npz", "key=x,label=y")


def no_pass(*arguments: Any, **options: Any) -> Any:
    pytest.fail("the samples were run for nothing")


def test_calibration_and_validation(place: Path) -> None:
    job = open_job(NET, CALIB, VAL, place / "work")
    assert job.held_out
    assert job.statistics is not None
    assert job.calibration is not None
    assert (job.statistics.samples, len(job.calibration), len(job.validation)) == (4, 4, 3)
    assert job.statistics.model_digest == job.prepared.digest
    assert [sample.label for sample in job.validation] == [0, 1, 2]


def test_without_validation_the_calibration_samples_stand_in(place: Path) -> None:
    job = open_job(NET, CALIB, None, place / "work")
    assert not job.held_out
    assert job.validation is job.calibration


def test_count_bounds_calibration_alone(place: Path) -> None:
    job = open_job(NET, Data("calib.npz", count=2), VAL, place / "work")
    assert job.statistics is not None
    assert (job.statistics.samples, len(job.validation)) == (2, 3)


def test_arrays_in_memory_are_samples_too(place: Path) -> None:
    job = open_job(NET, Data([random(1, 8, 8, 8)]), None, place / "work")
    assert job.statistics is not None
    assert job.statistics.samples == 1


def test_given_statistics_show_hazards_too(tmp_path: Path) -> None:
    body = """g (float[1, 6, 8] x, bool[1, 6, 8] keep) => (float[1, 4] y) {
        [h] h = MatMul(x, square) [m] m = Where(keep, h, far) [p] p = ReduceMax<axes = [1], keepdims = 0>(m)
        [y] y = MatMul(p, w)
    }"""
    weights = {"square": random(8, 8), "far": np.float32(-np.inf), "w": random(8, 4)}
    model, data = tmp_path / "m.onnx", tmp_path / "x.npz"
    model.write_bytes(proto(body, weights).SerializeToString())
    keep = np.random.default_rng(0).random((8, 1, 6, 8)) < 0.8
    keep[:, :, 0] = True
    np.savez(data, x=random(8, 1, 6, 8), keep=keep)
    collected = open_job(model, Data(data), None, tmp_path / "one")
    assert collected.statistics is not None
    save_statistics(collected.statistics, tmp_path / "CAL")
    loaded = open_job(model, None, Data(data), tmp_path / "two", statistics=tmp_path / "CAL")
    for job in (collected, loaded):
        assert dict(job.prepared.hazards) == {"m": NONFINITE}
        built = build(job, resolve("generic-x86-64"), Scheme(), job.folder / "int8.onnx")
        assert built.artifact.notes[0] == f"in float: tensor 'm' {NONFINITE}"


def test_nothing_static_means_no_pass(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "collect", no_pass)
    job = open_job(NET, None, VAL, place / "work", static=False)
    assert (job.calibration, job.statistics) == (None, None)


def test_statistics_instead_of_a_pass(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collected = calibrate(NET, "calib.npz", place / "stats")
    monkeypatch.setattr(prepare_module, "collect", no_pass)
    job = open_job(NET, None, VAL, place / "work", statistics=place / "stats")
    assert job.statistics == collected
    assert job.held_out


def test_statistics_of_another_model_are_refused(place: Path) -> None:
    (place / "other.onnx").write_bytes(mixed().SerializeToString())
    calibrate(place / "other.onnx", "calib.npz", place / "stats")
    with pytest.raises(CalibrationError, match="stats"):
        open_job(NET, None, VAL, place / "work", statistics=place / "stats")


def test_unfinished_statistics_are_refused(place: Path) -> None:
    whole = calibrate(NET, "calib.npz", place / "stats")
    save_statistics(dataclasses.replace(whole, total=whole.samples + 1), place / "stats", force=True)
    with pytest.raises(CalibrationError, match="stats is unfinished") as caught:
        open_job(NET, None, VAL, place / "work", statistics=place / "stats")
    assert "⟨resume=True⟩" in caught.value.fix


@pytest.mark.parametrize(
    ("data", "validation", "static", "fix"),
    [
        (None, None, True, "Give ⟨data⟩ or ⟨val⟩"),
        (None, None, False, "Give ⟨data⟩ or ⟨val⟩"),
        (None, VAL, True, "Give ⟨data⟩ or ⟨statistics⟩"),
    ],
)
def test_samples_that_are_missing(
    place: Path, data: Data | None, validation: Data | None, static: bool, fix: str
) -> None:
    with pytest.raises(UsageError) as caught:
        open_job(NET, data, validation, place / "work", static=static)
    assert caught.value.fix == fix


def test_excluded_names_are_looked_up_before_the_pass(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "collect", no_pass)
    with pytest.raises(UsageError, match="no node is named 'lost'"):
        open_job(NET, CALIB, None, place / "work", exclude=("last", "lost"))


def test_a_model_that_computes_nothing_in_float_is_refused(place: Path) -> None:
    onnx.save(proto("g (int64[1, 4] x) => (int64[1, 4] y) { y = Add(x, x) }"), place / "integers.onnx")
    np.savez(place / "integers.npz", x=np.zeros((2, 4), np.int64))
    with pytest.raises(ModelError, match=r"integers\.onnx computes nothing in float"):
        open_job(place / "integers.onnx", Data("integers.npz"), None, place / "work")


def test_a_model_in_float64_is_refused_as_such(place: Path) -> None:
    body = "double (double[N,2] x) => (double[N,2] y) <double[2] w = {1, 2}> { y = Mul(x, w) }"
    onnx.save(proto(body), "double.onnx")
    np.savez("double.npz", x=np.zeros((2, 2)))
    with pytest.raises(ModelError, match=r"double\.onnx computes in float64, .*Export it in float32"):
        open_job(Path("double.onnx"), Data("double.npz"), None, place / "work")


def test_the_scheme_is_the_profiles_with_what_was_set() -> None:
    target = resolve("x86-64-avx2")
    scheme = target.profile.scheme.replace(method="mse", per_channel=None)
    assert (scheme.method, scheme.per_channel, scheme.reduce_range) == ("mse", True, True)


@pytest.mark.parametrize(("method", "options"), [("minmax", {}), ("percentile", {"percentile": 99.0}), ("mse", {})])
def test_ranges_follow_the_scheme_without_another_pass(place: Path, method: str, options: dict[str, float]) -> None:
    job = open_job(NET, CALIB, None, place / "work")
    target = resolve("raspberry-pi-4")
    scheme = target.profile.scheme.replace(method=method, method_options=options)
    built = build(job, target, scheme, place / "int8.onnx")
    assert built.artifact.model == place / "int8.onnx"
    assert built.artifact.scheme.method == method
    spans = {name: found.high - found.low for name, found in built.ranges.items()}
    widest = build(job, target, target.profile.scheme, place / "minmax.onnx").ranges
    assert all(spans[name] <= (widest[name].high - widest[name].low) * 1.01 for name in spans)
    assert (method == "minmax") == (spans == {n: r.high - r.low for n, r in widest.items()})


def test_one_preparation_serves_every_target(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = open_job(NET, CALIB, None, place / "work")
    monkeypatch.setattr(prepare_module, "collect", no_pass)
    monkeypatch.setattr("edgeq.prove.prepare.prepare_model", no_pass)
    for name in ("haswell", "cascade-lake", "raspberry-pi-5"):
        target = resolve(name)
        built = build(job, target, target.profile.scheme, place / f"{name}.onnx")
        assert built.target.name == name
        assert built.artifact.model.is_file()
    assert prepare_model(NET, place / "again").digest == job.prepared.digest


def test_the_calibration_samples_given_again_are_not_held_out(place: Path) -> None:
    assert not open_job(NET, CALIB, Data("./calib.npz"), place / "work").held_out
    samples = [random(1, 8, 8, 8)]
    assert not open_job(NET, Data(samples), Data(samples), place / "work").held_out
    assert open_job(NET, Data(samples), Data(list(samples)), place / "work").held_out


@pytest.mark.parametrize(("count", "proof"), [(63, 63), (64, 16), (101, 25)])
@pytest.mark.usefixtures("place")
def test_many_samples_are_split_between_calibration_and_proof(count: int, proof: int, tmp_path: Path) -> None:
    np.savez("many.npz", x=random(count, 8, 8, 8))
    job = open_job(NET, Data("many.npz"), None, tmp_path / "work")
    assert job.calibration is not None
    assert (job.held_out, len(job.validation)) == (proof < count, proof)
    if job.held_out:
        assert len(job.calibration) + proof == count
        both = [*job.calibration, *job.validation]
        assert len({sample.inputs["x"].tobytes() for sample in both}) == count, "no sample serves twice"
        assert any("left out of the calibration" in note for note in job.prepared.notes)
