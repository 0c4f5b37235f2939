"""Test the trial of mitigations on kernels that do not saturate, on any machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgeq.data.open_source import Data
from edgeq.emulate.audit import KernelSimulation, SimulatedSession
from edgeq.hardware.detect import detect_machine
from edgeq.hardware.profile import load_profiles, match_profile
from edgeq.hardware.target import resolve
from edgeq.measure.accuracy import evaluate_sessions
from edgeq.model.saturation import exact_options, saturation_table
from edgeq.prove.builds import Builds
from edgeq.prove.job import build, computed_as_there
from edgeq.prove.saturation import MitigationTrial
from edgeq.run.session import open_session
from tests.opened import open_job


@pytest.fixture
def trial(place: Path) -> MitigationTrial:
    (place / "work").mkdir()
    job = open_job(place / "net.onnx", Data("calib.npz"), Data("val.npz", "key=x,label=y"), place / "work")
    haswell = resolve("haswell", detect_machine())
    builds = Builds(job, place / "work", timed=False, emulate=False)
    full = haswell.profile.scheme.replace(reduce_range=False, fit_pairs=False)
    return MitigationTrial(builds, haswell, full, table=saturation_table())


def test_they_are_run_exactly_on_any_machine(trial: MitigationTrial) -> None:
    assert not trial.weights(trial.full).safe
    found = trial.evaluate({"full": trial.full}, 3).agreement["full"]
    job = trial.job
    exact = SimulatedSession(KernelSimulation(trial.full.model, trial.full.settings(), saturating=False))
    sessions = {"float": open_session(job.prepared.path), "exact": exact}
    wanted = evaluate_sessions(sessions, job.validation, reference="float", count=3).agreement["exact"]
    assert found.sqnr_db == wanted.sqnr_db


def test_session_options_need_no_second_file(trial: MitigationTrial) -> None:
    scheme = trial.full.scheme.replace(session_options=exact_options())
    precise, seven = trial.artifact(scheme), trial.artifact(trial.full.scheme.replace(reduce_range=True))
    assert precise.model == trial.full.model
    assert precise.settings().config == exact_options()
    assert trial.weights(precise).safe
    assert seven.model != trial.full.model
    found = trial.evaluate({"full": trial.full, "7-bit": seven, "precise": precise}, 3).agreement
    assert list(found) == ["full", "7-bit", "precise"]
    assert found["precise"] == found["full"]
    assert found["7-bit"] != found["full"]


def test_other_session_options_give_what_a_build_gives(trial: MitigationTrial, place: Path) -> None:
    scheme = trial.full.scheme.replace(session_options=exact_options())
    haswell = resolve("haswell", detect_machine())
    (place / "anew").mkdir()
    anew = build(trial.job, haswell, scheme, place / "anew" / "model.onnx").artifact
    builds = Builds(trial.job, place / "anew", timed=False, emulate=False)
    builds.build(haswell, trial.full.scheme)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr("edgeq.prove.builds.build")
        made = builds.build(haswell, scheme).artifact
    assert made.model.read_bytes() == anew.model.read_bytes()
    assert replace(made, model=anew.model) == anew


def test_targets_with_exact_kernels_are_proven_on_exact_ones(trial: MitigationTrial) -> None:
    profiles, machine = load_profiles(), detect_machine()
    saturating, exact = profiles["x86-64-avx2"], profiles["x86-64-avx512-vnni"]
    pi, haswell = resolve("raspberry-pi-5", machine), resolve("haswell", machine)
    proven = computed_as_there(trial.full, pi, saturating)
    assert proven.proof_settings().config == exact_options()
    assert proven.settings() == trial.full.settings(), "what ships is what was built"
    assert computed_as_there(trial.full, haswell, saturating) == trial.full, "they are the target's own"
    assert computed_as_there(trial.full, pi, exact) == trial.full
    dynamic = replace(trial.full, scheme=trial.full.scheme.replace(mode="dynamic"))
    assert computed_as_there(dynamic, pi, saturating).proof_settings().config == exact_options()
    elsewhere = replace(trial.full, device="gpu")
    assert computed_as_there(elsewhere, pi, saturating) == elsewhere


def test_targets_that_share_a_build_are_proven_each_on_kernels_like_its_own(place: Path) -> None:
    (place / "work").mkdir()
    job = open_job(place / "net.onnx", Data("calib.npz"), Data("val.npz", "key=x,label=y"), place / "work")
    job = replace(job, host=load_profiles()["x86-64-avx2"])
    builds, machine = Builds(job, place / "work", timed=False, emulate=False), detect_machine()
    haswell, zen4 = resolve("haswell", machine), resolve("zen4", machine)
    scheme = zen4.profile.scheme
    built = [builds.build(target, scheme) for target in (haswell, zen4, haswell)]
    assert len({one.artifact.model for one in built}) == 1
    assert [dict(one.artifact.proof_options) for one in built] == [{}, exact_options(), {}]
    assert builds.build_at(zen4, scheme, place / "zen4.onnx").artifact.proof_options == exact_options()
    proofs = [builds.prove(one, scheme, native=False) for one in built]
    assert proofs[0].agreement == proofs[2].agreement
    if job.host == match_profile(machine, load_profiles()).profile:
        assert proofs[0].agreement != proofs[1].agreement
