"""Test the mitigation for kernels that saturate, with the costs in the second engine's description."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from edgeq.backends.base import Artifact
from edgeq.data.open_source import Data
from edgeq.errors import ModelError
from edgeq.hardware.detect import detect_machine
from edgeq.hardware.target import resolve
from edgeq.measure.checks import ArtifactCheck
from edgeq.prove.builds import Builds
from edgeq.prove.job import Job
from edgeq.prove.saturation import Decision, MitigationTrial, decide
from edgeq.prove.target_checks import saturation_check
from edgeq.run.engines import EngineChoice, load_engines
from edgeq.scheme import Scheme
from tests.opened import open_job


@pytest.fixture
def job(place: Path) -> Job:
    (place / "work").mkdir()
    return open_job(place / "net.onnx", Data("calib.npz"), Data("val.npz", "key=x,label=y"), place / "work")


def decided(job: Job, *priced: str) -> Decision:
    machine, openvino = detect_machine(), load_engines()["openvino"]
    target = resolve("haswell", machine)
    assert set(priced) <= set(openvino.int8.remedy_cost)
    engine = dataclasses.replace(
        openvino, int8=dataclasses.replace(openvino.int8, remedy_cost=dict.fromkeys(priced, 1.0))
    )
    (folder := Path("-".join(priced))).mkdir()
    builds = Builds(job, folder, timed=False, emulate=False)
    return decide(builds, target, target.profile.scheme, engine=engine)


def test_a_range_that_bears_the_samples_is_taken_where_none_that_bears_all_is_close(job: Job) -> None:
    found = decided(job, "fit_seen")
    assert [m.name for m in found.mitigations] == ["full range", "range fitted to the samples"]
    assert found.chosen.name == "range fitted to the samples"
    assert not found.chosen.safe
    assert found.exact_db - found.chosen.sqnr_db <= 0.5
    assert "on samples, and other inputs can saturate" in found.why
    assert "range fitted to the samples" not in {m.name for m in decided(job, "fit_seen", "fit_pairs").mitigations}


def test_without_samples_there_is_none_to_fit(job: Job) -> None:
    found = decided(dataclasses.replace(job, calibration=None), "fit_seen")
    assert "fit_seen needs calibration samples" in found.mitigations[1].failed
    assert found.chosen.name == "full range"


def test_the_full_range_comes_first_where_another_cannot_be_built(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    build = MitigationTrial.artifact

    def refused(self: MitigationTrial, scheme: Scheme) -> Artifact:
        if scheme.reduce_range:
            raise ModelError("it has no weights")
        return build(self, scheme)

    monkeypatch.setattr(MitigationTrial, "artifact", refused)
    first, second, third = decided(job, "fit_pairs", "reduce_range").mitigations
    assert (first.name, second.name, third.name) == ("full range", "fitted range", "7-bit weights")
    assert (first.failed, second.failed, third.failed) == ("", "", "it has no weights")


def test_weights_in_a_plugin_are_checked_by_the_model_of_its_kernels(job: Job) -> None:
    """Weights for a plug-in are checked on onnxruntime's graph with a model of the plug-in's kernels.

    The plug-in's own graph cannot be read.
    """
    builds = Builds(job, Path(), timed=False, emulate=False)
    openvino = EngineChoice(load_engines()["openvino"])

    def checked(name: str, **changes: bool) -> ArtifactCheck | None:
        target = resolve(name, detect_machine())
        built = builds.build(target, target.profile.scheme.replace(**{"reduce_range": False, **changes}))
        engine = dataclasses.replace(built.artifact, engine=openvino)
        return saturation_check(dataclasses.replace(built, artifact=engine), None)

    full, reduced = checked("haswell"), checked("haswell", reduce_range=True)
    assert full is not None
    assert reduced is not None
    assert (full.passed, reduced.passed) == (False, True)
    assert "can saturate" in full.detail
    assert checked("cascade-lake") is None
