"""Test the proof: its warnings and limits on made-up values, and `prove` on real artifacts."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from edgeq_device.measure.claim import Claim
from onnx import numpy_helper

from edgeq.backends.base import Artifact
from edgeq.errors import CheckFailedError, RuntimeUnavailableError
from edgeq.measure import race, timed_model
from edgeq.measure.accuracy import Accuracy
from edgeq.measure.agreement import Agreement, OutputAgreement, SliceAgreement
from edgeq.measure.baseline import BaselineMargin
from edgeq.measure.coverage import Basis, Coverage, FloatNode, measure_coverage
from edgeq.measure.task import make_task
from edgeq.prove.opening import Opening
from edgeq.prove.proof import FLOAT, INT8, Proof, ProofSamples, Repair, RepairStep, SpeedComparison, prove
from edgeq.util.records import plain
from tests.backends.build import Bench, bench, residual


def agreement(sqnr_db: float, top1: float | None = 1.0, count: int = 1) -> Agreement:
    output = OutputAgreement(
        name="y", elements=5, sqnr_db=sqnr_db, cosine=1.0, max_abs_error=0.1, top1=top1, nonfinite=0,
        mismatched=0,
    )  # fmt: skip
    return Agreement((output,), count)


def accuracy(top1: float) -> Accuracy:
    return Accuracy({"top1": top1}, 100, "classification", "top1", higher_is_better=True)


NODE = FloatNode("conv", "Conv", 60, "kept in float on request")
GOOD = Proof(
    coverage=Coverage(int8_macs=40, float_macs=60, nodes=(), float_nodes=(NODE,), basis="native"),
    agreement=agreement(30.0),
    accuracy={FLOAT: accuracy(0.9), INT8: accuracy(0.88)},
    opening=Opening(30.0, 31.0),
    speed=None,
    samples=100,
    held_out=True,
)


def changed(**changes: Any) -> Proof:
    return dataclasses.replace(GOOD, **changes)


def test_nothing_to_warn_of() -> None:
    assert GOOD.warnings() == ()
    assert changed(agreement=agreement(5.0)).warnings() == (), "labels say more than agreement"
    assert changed(agreement=agreement(17.0, 0.9, 100)).warnings() == ()


def test_the_loss_has_an_interval() -> None:
    known = changed(drop_interval=(-0.005, 0.045))
    assert known.drop_sentence == "loss of top-1: 2.00 pt on 100 samples; on many others, −0.50 pt to 4.50 pt (95 %)"
    assert plain(known)["accuracy_drop_interval"] == [-0.005, 0.045]
    assert GOOD.drop_sentence == "loss of top-1: 2.00 pt on 100 samples"
    assert changed(accuracy={}).drop_sentence == ""


@pytest.mark.parametrize(
    ("sqnr_db", "top1", "count", "good"),
    [(17.0, 1.0, 100, True), (17.0, 0.97, 100, True), (17.0, None, 100, False), (14.0, 1.0, 100, False),
     (17.0, 0.9, 100, False), (17.0, 1.0, 10, False), (25.0, 0.5, 4, True)],
)  # fmt: skip
def test_class_scores_are_judged_by_their_classes(
    sqnr_db: float, top1: float | None, count: int, *, good: bool
) -> None:
    proof = changed(agreement=agreement(sqnr_db, top1, count), accuracy={}, samples=count)
    assert proof.falls_short(0.01) == (not good)
    if sqnr_db < 20 and top1 != 0.9:
        assert (proof.warnings() == ()) == good


def test_the_caveat_says_what_agreement_does_not_show() -> None:
    assert GOOD.caveat == "", "there are labels"
    assert "SQNR does not show" in changed(agreement=agreement(30.0, None), accuracy={}).caveat
    classes = changed(agreement=agreement(30.0, 0.95, 100), accuracy={})
    assert classes.caveat.startswith("top-1 is that of float32 in 95 of 100 samples, and in 89% to 98% of many others")
    assert plain(classes)["caveat"] == classes.caveat


def test_noise_above_what_a_model_adds_falls_short() -> None:
    margin = BaselineMargin("y", 3, 1.0)
    proof = changed(agreement=agreement(24.0), accuracy={}, baseline=margin)
    assert proof.falls_short(0.01)
    assert proof.limit(0.01) == pytest.approx(10**-2.9)
    assert "noise has 0.79 times the power" in proof.warnings()[0]
    for healthy in (changed(agreement=agreement(24.0), baseline=margin), changed(accuracy={}, baseline=None)):
        assert not healthy.falls_short(0.021)
        assert healthy.limit(0.021) == 0.021


STEPS = (RepairStep("the plain build", 0.2, 64, 1.0, "loses too much"), RepairStep("recovery", 0.03, 64, 1.0, "chosen"))
REPAIRED = Repair("default", 0.01, "labels", plain=0.2, loss=0.03, chosen="recovery", steps=STEPS)
NOISY = dataclasses.replace(REPAIRED, basis="noise", plain=1.0, loss=1.0, chosen="the plain build")


@pytest.mark.parametrize(("top1", "count"), [(0.95, 100), (0.75, 8), (None, 100)])
def test_few_samples_with_another_class_say_nothing(top1: float | None, count: int) -> None:
    assert changed(agreement=agreement(27.0, top1, count), accuracy={}).warnings() == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"agreement": agreement(5.0), "accuracy": {}},
            "follow float32 to only 5.0 dB SQNR: `⟨effort⟩ thorough` without ⟨effort=None⟩",
        ),
        (
            {"agreement": agreement(12.0), "accuracy": {}},
            "follow float32 with noise (12.0 dB SQNR): `⟨effort⟩ thorough` without ⟨effort=None⟩",
        ),
        ({"agreement": agreement(19.9), "accuracy": {}}, "with noise (19.9 dB SQNR)"),
        (
            {"agreement": agreement(5.0), "accuracy": {}, "repair": NOISY},
            "no build that was tried is better than the plain one: 0.0 dB SQNR; 20.0 dB SQNR wanted (2 builds",
        ),
        (
            {"accuracy": {FLOAT: accuracy(0.9), INT8: accuracy(0.87)}, "repair": REPAIRED},
            "falls from 90.00 % to 87.00 %: repaired: recovery: 20.00 points of loss before, 3.00 "
            "points of loss now; 1.00 points allowed (2 builds compared)",
        ),
        ({"agreement": agreement(17.0, 0.93, 100), "accuracy": {}}, "another top-1 than float32 in 7 of 100 samples"),
        ({"agreement": agreement(17.0, 0.625, 8), "accuracy": {}}, "another top-1 than float32 in 3 of 8 samples"),
        ({"accuracy": {FLOAT: accuracy(0.9), INT8: accuracy(0.7)}}, "accuracy falls from 90.00 % to 70.00 %"),
        (
            {"opening": Opening(10.0, 30.0)},
            "optimiser changes the outputs: 10.0 dB SQNR against float32 on the optimised",
        ),
        (
            {"coverage": Coverage(int8_macs=1, float_macs=60, nodes=(), float_nodes=(NODE,), basis="native")},
            "most of the arithmetic stays in float; the largest part is conv (Conv: kept in float on request)",
        ),
        ({"held_out": False}, "accuracy was measured on the calibration samples; give held-out samples with ⟨val⟩"),
    ],
)
def test_warnings(changes: dict[str, Any], words: str) -> None:
    (warning,) = changed(**changes).warnings()
    assert words in warning


def units(scores_db: float, *, mismatched: int = 0, elements: int = 96) -> Agreement:
    boxes = SliceAgreement(1, 0, 3, 600.0, 54.0, 1.0, 1.2)
    scores = SliceAgreement(1, 4, 11, 0.14, scores_db, 0.0, 0.14)
    output = OutputAgreement("output0", elements, 53.9, 1.0, 1.2, None, 0, mismatched, slices=(boxes, scores))
    return Agreement((output,), 20)


def test_a_poor_slice_is_named() -> None:
    (warning,) = changed(agreement=units(0.0), accuracy={}).warnings()
    assert warning == (
        "output 'output0', 4..11 on axis 1: 0.0 dB SQNR against float32 (53.9 dB over the whole output); their values "
        "reach 0.14 where others reach 600: `⟨effort⟩ thorough` without ⟨effort=None⟩ and ⟨recover⟩ may repair it; "
        "`edgeq debug` names the layers that cause it; measure accuracy with ⟨task⟩ before you deploy it"
    )
    assert changed(agreement=units(30.0), accuracy={}).warnings() == ()
    assert changed(agreement=units(0.0)).warnings() == (warning,), "a metric need not read what is dead"
    assert changed(agreement=units(8.0)).warnings() == ()
    assert plain(units(0.0))["sqnr_db"] == 0.0
    assert plain(units(0.0))["outputs"][0]["sqnr_db"] == 53.9


def test_samples_that_could_not_be_compared_are_named() -> None:
    (some,) = changed(agreement=units(30.0, mismatched=7)).warnings()
    assert some.startswith("output 'output0': 7 of 20 samples are left out of its figures")
    nothing = OutputAgreement("boxes", 0, -math.inf, 0.0, 0.0, None, 0, 20)
    (none,) = changed(agreement=Agreement((nothing,), 20), accuracy={}).warnings()
    assert none.startswith("output 'boxes': none of its 20 samples could be compared")
    (empty,) = changed(agreement=Agreement((), 20), accuracy={}).warnings()
    assert empty.startswith("no output could be compared")


@pytest.mark.parametrize(("high", "found"), [(0.9, True), (1.24, False)])
def test_slower_than_float_is_claimed_only_where_the_interval_says_so(high: float, found: bool) -> None:
    proof = changed(speed=SpeedComparison({}, Claim(0.8, 0.74, high, 0.97, 6)))
    assert [("SLOWER" in w) for w in proof.warnings()] == [True] * found
    assert proof.warnings(timed=False) == ()


def test_the_drop_is_in_the_primary_metric() -> None:
    assert GOOD.drop == pytest.approx(0.02)
    assert changed(accuracy={}).drop is None


@pytest.mark.parametrize(
    ("bars", "problem"),
    [
        ({"max_drop": 0.01}, "accuracy falls by 2.00 pt, more than the 1.00 pt allowed"),
        ({"require_coverage": 0.5}, "40.0% .* less than the 50.0% required; the largest operator in float is conv"),
    ],
)
def test_bars_that_are_not_met(bars: dict[str, float], problem: str) -> None:
    with pytest.raises(CheckFailedError, match=problem):
        GOOD.check(**{"max_drop": None, "require_coverage": None, **bars})


def test_bars_that_are_met() -> None:
    GOOD.check(max_drop=0.03, require_coverage=0.4)
    GOOD.check(max_drop=None, require_coverage=None)


def test_a_graph_without_arithmetic_does_not_meet_a_coverage_bar() -> None:
    nothing = changed(coverage=Coverage(0, 0, (), (), basis="native"))
    with pytest.raises(CheckFailedError, match=r"0\.0%"):
        nothing.check(max_drop=None, require_coverage=0.1)


@pytest.mark.parametrize(
    ("basis", "words"),
    [("forecast", r"make one; about 40\.0% .*: a forecast by rules, not measured"), ("unknown", "not to be seen")],
)
def test_a_coverage_bar_is_not_held_against_a_forecast(basis: Basis, words: str) -> None:
    how, reason = ("rules", "make one") if basis == "forecast" else ("not to be seen", "")
    guessed = changed(coverage=Coverage(40, 60, basis=basis, how=how, reason=reason))
    with pytest.raises(RuntimeUnavailableError, match=f"cannot be checked here: {words}"):
        guessed.check(max_drop=None, require_coverage=0.1)
    guessed.check(max_drop=0.03, require_coverage=None)


def test_json_has_no_infinity() -> None:
    record = plain(changed(agreement=agreement(math.inf), opening=Opening(math.inf, 10.0)))
    json.dumps(record, allow_nan=False)
    assert record["optimiser_sqnr_db"] == {"optimised": None, "unoptimised": 10.0}


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench(tmp_path_factory.mktemp("proof"), residual())


def proven(net: Bench, artifact: Artifact, **options: Any) -> Proof:
    feed, source = next(iter(net.samples)).inputs, net.prepared.model
    coverage = measure_coverage(artifact.model, artifact.settings(), feed, source, lambda name, op_type: "because")
    return prove(net.prepared, artifact, ProofSamples(net.samples, held_out=True), coverage, **options)


def test_a_proof_of_a_real_artifact(net: Bench) -> None:
    proof = proven(net, net.build(), timed=False)
    assert proof.coverage.int8_mac_share == 1
    assert proof.agreement.sqnr_db == pytest.approx(net.sqnr(net.build()), abs=0.1)
    assert proof.optimiser[0] == pytest.approx(proof.optimiser[1], abs=3)
    assert (proof.samples, proof.accuracy, proof.speed) == (4, {}, None)


def test_speed_is_a_ratio_of_interleaved_runs(net: Bench) -> None:
    speed = proven(net, net.build()).speed
    assert speed is not None
    assert set(speed.latency) == {FLOAT, INT8}
    assert plain(speed)["ratio"]["verdict"] == speed.ratio.verdict
    assert json.dumps(plain(speed), allow_nan=False)


def test_timing_changes_no_other_figure(net: Bench) -> None:
    plain_proof, timed = (proven(net, net.build(), timed=timed) for timed in (False, True))
    assert dataclasses.replace(timed, speed=None) == plain_proof


def test_labels_measure_both_models(tmp_path: Path) -> None:
    from edgeq.data.samples import open_samples

    net = bench(tmp_path, residual())
    np.savez(tmp_path / "val.npz", x=np.concatenate([s.inputs["x"] for s in net.samples]), y=np.arange(4))
    samples = open_samples(tmp_path / "val.npz", net.prepared.signature, preprocess="key=x,label=y")
    labelled = Bench(net.prepared, samples, tmp_path)
    proof = proven(labelled, net.build(), task=make_task("classification"), timed=False)
    assert set(proof.accuracy) == {FLOAT, INT8}
    assert proof.drop is not None


def broken(artifact: Artifact, place: Path) -> Artifact:
    """Return the artifact with NaN as an output scale."""
    proto = onnx.load(artifact.model)
    scale = next(t for t in proto.graph.initializer if t.name == "y_scale")
    scale.CopyFrom(numpy_helper.from_array(np.full(scale.dims, np.nan, np.float32), "y_scale"))
    place.write_bytes(proto.SerializeToString())
    return dataclasses.replace(artifact, model=place)


def test_outputs_that_are_not_finite_fail(net: Bench, tmp_path: Path) -> None:
    with pytest.raises(CheckFailedError, match="output 'y' is not finite"):
        proven(net, broken(net.build(), tmp_path / "broken.onnx"), timed=False)


def bare(artifact: Artifact, place: Path) -> Artifact:
    """Return the artifact as other tools write it, without protection against ONNX Runtime's changes at load."""
    proto = onnx.load(artifact.model)
    for node in proto.graph.node:
        if node.name.endswith("/kept_in_float"):
            node.input[1:] = [name.rpartition("/")[0] for name in node.input[1:]]
            del node.attribute[:]
    place.write_bytes(proto.SerializeToString())
    return dataclasses.replace(artifact, model=place, session_options={})


def test_a_layer_that_onnxruntime_requantizes_is_caught(tmp_path: Path) -> None:
    net = bench(tmp_path, residual())
    artifact = net.build(exclude=("depthwise",))
    shielded = proven(net, artifact, timed=False)
    requantized = proven(net, bare(artifact, tmp_path / "bare.onnx"), timed=False)
    assert requantized.coverage.int8_mac_share == 1 > shielded.coverage.int8_mac_share
    assert shielded.agreement.sqnr_db >= requantized.agreement.sqnr_db


def test_a_small_model_is_timed_in_several_processes(net: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of one process would not show how the next process differs."""
    monkeypatch.setattr(timed_model, "SESSIONS", 3)
    monkeypatch.setattr(race.CompetingLoad, "measure_busy", lambda self: 0.0)
    timed: list[dict[str, list[Any]]] = []
    measure = race.measure_interleaved

    def measured(runners: Any, **how: Any) -> Any:
        timed.append(runners)
        return measure(runners, **how)

    monkeypatch.setattr(race, "measure_interleaved", measured)
    found = proven(net, net.build())
    (runners,) = timed
    processes = [[runner.session.guest.process for runner in runners[name][1:]] for name in (FLOAT, INT8)]
    assert len(set(processes[0])) == 2
    assert processes[0] == processes[1], "both models of a pair run in one process"
    assert found.speed is not None
    assert found.speed.ratio.pairs <= 3, "each pair is two sessions"


@pytest.mark.parametrize("calm_by_now", [False, True])
def test_next_to_other_work_no_process_starts_for_a_timing(
    net: Bench, monkeypatch: pytest.MonkeyPatch, *, calm_by_now: bool
) -> None:
    """Without hope of a claim, the open sessions give the estimate. If they give a claim, more sessions confirm it."""
    monkeypatch.setattr(timed_model, "SESSIONS", 3)
    monkeypatch.setattr(race.CompetingLoad, "measure_busy", lambda self: 0.5)
    claimed = Claim(2.0, 1.9, 2.1, 0.95, 20) if calm_by_now else Claim(reason="busy")
    monkeypatch.setattr(race, "make_claim", lambda baseline, rival: claimed)
    counts: list[list[int]] = []
    measure = race.measure_interleaved

    def measured(runners: Any, **how: Any) -> Any:
        counts.append([len(sessions) for sessions in runners.values()])
        return measure(runners, **how)

    monkeypatch.setattr(race, "measure_interleaved", measured)
    assert proven(net, net.build()).speed is not None
    assert counts == ([[1, 1], [3, 3]] if calm_by_now else [[1, 1]])
