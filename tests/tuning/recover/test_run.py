"""Test `recover.run`: the order of stages, one model for several builds, and requests that cannot be met."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from edgeq.errors import UsageError
from edgeq.model.convert import to_bytes
from edgeq.model.load import read_model
from edgeq.tuning.recover.methods import recoveries, recovery_groups
from edgeq.tuning.recover.run import Recoverer
from tests.tuning.recover.nets import SCHEME, few, job_of, noise_db, target, two_gates, uneven

SHAPE = [1, 3, 12, 12]
RECOVERIES = recoveries()
STATIC = {name: recovery for name, recovery in RECOVERIES.items() if "static" in recovery.modes}
STAGES = ("model", "ranges", "artifact")


def test_recoveries_stand_in_the_order_of_their_stages() -> None:
    assert tuple(RECOVERIES) == (
        "cross-layer-equalization",
        "smoothquant",
        "split-gates",
        "float-head",
        "nonlinear-ranges",
        "sequential-correction",
        "weight-rounding",
    )
    stages = [STAGES.index(recovery.stage) for recovery in RECOVERIES.values()]
    assert stages == sorted(stages)
    assert all(name == recovery.name and recovery.title for name, recovery in RECOVERIES.items())
    free, *others = recovery_groups()
    assert set(free) == {name for name, recovery in STATIC.items() if recovery.free}
    assert others == [("split-gates",), ("float-head",)]


def test_all_together_help_and_are_reported(tmp_path: Path) -> None:
    model, samples = two_gates(uneven), few(8, SHAPE)
    recoverer = Recoverer(job_of(model, tmp_path, samples), target(), tmp_path)
    plain = recoverer.build(SCHEME, (), tmp_path / "plain.onnx")
    every = recoverer.build(SCHEME, tuple(STATIC), tmp_path / "every.onnx")
    assert every.artifact.model == tmp_path / "every.onnx"
    held_out = few(8, SHAPE, seed=2)
    assert noise_db(model, every.artifact.model, held_out) > noise_db(model, plain.artifact.model, held_out) + 3
    found = [note.split(":")[0] for note in every.artifact.notes]
    assert sorted(name for name in found if name in STATIC) == sorted(STATIC)


def test_each_alone_builds_and_does_no_harm(tmp_path: Path) -> None:
    model, samples = two_gates(uneven), few(8, SHAPE)
    recoverer = Recoverer(job_of(model, tmp_path, samples), target(), tmp_path)
    plain = noise_db(model, recoverer.build(SCHEME, [], tmp_path / "p.onnx").artifact.model, samples)
    for name in STATIC:
        built = recoverer.build(SCHEME, [name], tmp_path / f"{name}.onnx")
        assert noise_db(model, built.artifact.model, samples) > plain - 0.5, name


def test_the_order_of_names_decides_nothing(tmp_path: Path) -> None:
    job = job_of(two_gates(uneven), tmp_path, few(4, SHAPE))
    one = Recoverer(job, target(), tmp_path).build(SCHEME, tuple(STATIC), tmp_path / "one.onnx")
    names = tuple(reversed(STATIC))
    other = Recoverer(job, target(), tmp_path).build(SCHEME, names, tmp_path / "other.onnx")
    assert one.artifact.model.read_bytes() == other.artifact.model.read_bytes()


def test_recoveries_without_work_build_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recoverer = Recoverer(job_of(two_gates(uneven), tmp_path, few(4, SHAPE)), target(), tmp_path)
    names = ["split-gates", "sequential-correction"]
    first = recoverer.build(SCHEME, names, tmp_path / "a.onnx")
    monkeypatch.setattr("edgeq.tuning.recover.run.build_derived", None)
    again = recoverer.build(SCHEME, [*names, "smoothquant"], tmp_path / "b.onnx")
    assert again.artifact.model.read_bytes() == first.artifact.model.read_bytes()
    (added,) = set(again.artifact.notes) - set(first.artifact.notes)
    assert added.startswith("smoothquant: no product")
    assert set(first.artifact.notes) < set(again.artifact.notes)


def test_models_are_made_once_for_each_scheme_that_matters(tmp_path: Path) -> None:
    recoverer = Recoverer(job_of(two_gates(uneven), tmp_path, few(4, SHAPE)), target(), tmp_path)
    names = ["split-gates", "sequential-correction"]
    first = recoverer.state(SCHEME, names, tmp_path / "a.onnx")
    again = recoverer.state(SCHEME.replace(format="QOperator"), ["split-gates"], tmp_path / "b.onnx")
    assert again.prepared == first.prepared
    other = recoverer.state(SCHEME.replace(exclude=("first",)), names, tmp_path / "c.onnx")
    assert other.prepared != first.prepared
    assert other.scheme.exclude == ("first",)
    assert "last" not in first.changed
    untouched = recoverer.state(SCHEME.replace(exclude=("last",)), names, tmp_path / "d.onnx")
    assert untouched.prepared == first.prepared
    assert untouched.scheme.exclude == ("last",)


def test_refuses_unknown_and_unsuitable_recoveries(tmp_path: Path) -> None:
    job = job_of(two_gates(), tmp_path, few(2, SHAPE))
    recoverer = Recoverer(job, target(), tmp_path)
    with pytest.raises(UsageError, match="unknown recovery 'magic'"):
        recoverer.build(SCHEME, ("magic",), tmp_path / "q.onnx")
    with pytest.raises(UsageError, match=r"unknown recovery 'bias-correction'\. Use sequential-correction"):
        recoverer.build(SCHEME, ("bias-correction",), tmp_path / "q.onnx")
    with pytest.raises(UsageError, match=r"weight-rounding needs .* not static\. Use sequential-correction"):
        recoverer.build(SCHEME, ("weight-rounding",), tmp_path / "q.onnx")
    with pytest.raises(UsageError, match="static"):
        recoverer.build(SCHEME.replace(mode="dynamic"), ("sequential-correction",), tmp_path / "q.onnx")
    unfed = Recoverer(dataclasses.replace(job, calibration=None), target(), tmp_path)
    with pytest.raises(UsageError, match="samples"):
        unfed.build(SCHEME, ("sequential-correction",), tmp_path / "q.onnx")


@pytest.mark.parametrize("name", [name for name, recovery in RECOVERIES.items() if recovery.stage == "model"])
def test_the_model_in_memory_is_that_of_the_file(tmp_path: Path, name: str) -> None:
    job = job_of(two_gates(uneven), tmp_path, few(4, SHAPE))
    before = to_bytes(job.prepared.model)
    state = Recoverer(job, target(), tmp_path).state(SCHEME, [name], tmp_path / "q.onnx")
    assert to_bytes(state.prepared.model) == to_bytes(read_model(state.prepared.path))
    assert to_bytes(job.prepared.model) == before == to_bytes(read_model(job.prepared.path))
