"""Test the race of engines: decisions on made-up figures, and one tuning run with a plug-in that is not installed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgeq_device.bundle.package import open_bundle
from edgeq_device.cli import main

import edgeq
from edgeq import demo
from edgeq.data.open_source import Data
from edgeq.errors import EngineError, RuntimeUnavailableError
from edgeq.hardware.detect import detect_machine
from edgeq.hardware.target import resolve
from edgeq.run.engines import Engine, EngineChoice, choose_engine, load_engines
from edgeq.run.session import Engines
from edgeq.scheme import Scheme
from edgeq.tuning import engines as tune_engines
from edgeq.tuning.budget import BudgetClock
from edgeq.tuning.engines import Field, add_entrants, find_field, is_suited
from edgeq.tuning.goal import Goal
from edgeq.tuning.journal import digest
from edgeq.tuning.search import search
from edgeq.tuning.space import Candidate
from edgeq.tuning.trials import Outcome
from edgeq.tuning.verdict import describe_verdict
from edgeq.util.records import plain
from tests import fake_engine
from tests.plugins import needs_plugin
from tests.tuning.fakes import BusyWith, Clock, Fact, FakeEvaluator, Notes, profile
from tests.tuning.steady import steady_timings

A, B = Candidate("a", Scheme()), Candidate("b", Scheme(per_channel=False))
UINT8 = Candidate("uint8", Scheme(weight_type="uint8"))


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("engines")
    (folder / "fake.toml").write_text(fake_engine.DESCRIPTION)
    return load_engines(folder)["fake"]


def run(
    engine: Engine,
    facts: Mapping[str, Fact],
    candidates: Sequence[Candidate] = (A, B),
    *,
    goal: Goal | None = None,
    threads: tuple[int, ...] = (0,),
    own: bool = True,
    **more: Any,
) -> tuple[Outcome, FakeEvaluator]:
    """Run a search with the fake engine in both precisions. Candidates in an engine are slow unless in `facts`."""
    slow = {f"{name} in fake": Fact(speed=0.1) for name in ("a", "b", "unquantized")}
    near = {f"{name} in fake:bf16": Fact(speed=0.2) for name in ("a", "b", "unquantized")}
    evaluator = FakeEvaluator({**slow, **near, **facts}, **more)
    field = Field((EngineChoice(engine), EngineChoice(engine, "bf16")), own)
    goal = replace(goal or Goal(), strict=True)
    deadline = BudgetClock(goal.budget_s, Clock())
    return search(candidates, profile(), evaluator, goal, deadline, threads=threads, engines=field), evaluator


def test_without_plugins_the_search_is_as_before() -> None:
    assert add_entrants([A, B, UINT8], Field()) == (A, B, UINT8)
    assert plain(A)["engine"] is None


def test_first_one_int8_candidate_and_the_float_model_enter_in_each_precision(fake: Engine) -> None:
    field = Field((EngineChoice(fake), EngineChoice(fake, "bf16")))
    assert [c.name for c in add_entrants([UINT8, A, B], field)] == [
        "uint8",
        "a",
        "a in fake",
        "a in fake:bf16",
        "unquantized in fake",
        "unquantized in fake:bf16",
        "b",
    ]
    assert "unquantized in fake" not in {c.name for c in add_entrants([A], field, unquantized=False)}


def test_names_a_remaining_candidate_of_another_engine(fake: Engine) -> None:
    outcome, _ = run(fake, {"a": Fact(2.0), "b": Fact(1.5), "a in fake": Fact(4.0), "b in fake": Fact(3.0)})
    kept = outcome.trial("a")
    dropped = replace(kept, candidate=kept.candidate.replace(name="minmax"), status="eliminated")
    lines = describe_verdict(replace(outcome, trials=(dropped, *outcome.trials)), Goal())
    assert any(line.startswith("runner-up in onnxruntime: a, 2.00 times float32's speed") for line in lines)


def test_candidates_run_only_in_engines_with_integer_kernels(fake: Engine) -> None:
    assert is_suited(A, fake)
    assert not is_suited(UINT8, fake)
    assert not is_suited(replace(A, builder="sequence"), fake)
    assert not is_suited(replace(A, scheme=Scheme(format="QOperator")), fake)
    assert not is_suited(replace(A, scheme=Scheme(mode="dynamic")), fake)


def test_a_faster_engine_wins_and_onnxruntime_is_the_fallback(fake: Engine) -> None:
    facts = {"a": Fact(2.0), "b": Fact(1.5), "a in fake": Fact(4.0), "b in fake": Fact(3.0)}
    outcome, _ = run(fake, facts)
    assert (outcome.chosen, outcome.fallback) == ("a in fake", "a")
    assert outcome.trial("a").assessment is not None
    assert outcome.trial("a").reason.endswith("; the fallback if fake is not installed")
    lines = describe_verdict(outcome, Goal())
    (line,) = (line for line in lines if "fake is" in line)
    assert line.startswith("runner-up in onnxruntime: a, 2.00 times float32's speed")
    assert line.endswith(", loses 0.00 points; runs where fake is not installed")
    record = plain(outcome.trial("a in fake"))
    assert (record["engine"], record["precision"]) == ("fake", "f32")
    assert (plain(outcome.trial("a"))["engine"], plain(outcome)["fallback"]) == ("onnxruntime", "a")


def test_the_loss_of_an_engine_that_is_as_fast_is_in_the_verdict(fake: Engine) -> None:
    facts = {"a": Fact(2.01, loss=0.004), "b": Fact(1.2), "unquantized in fake": Fact(2.0, share=0.0, sqnr_db=33)}
    outcome, _ = run(fake, facts)
    assert (outcome.chosen, outcome.fallback) == ("unquantized in fake", "a")
    (line,) = (line for line in describe_verdict(outcome, Goal()) if "runner-up" in line)
    assert line.startswith("runner-up in onnxruntime: a, 2.01 times float32's speed")
    assert ", loses 0.40 points" in line


def test_the_winner_can_be_unquantized(fake: Engine) -> None:
    facts = {"a": Fact(3.0, loss=0.2), "b": Fact(1.2), "unquantized in fake:bf16": Fact(2.0, share=0.0, sqnr_db=45)}
    outcome, _ = run(fake, facts)
    assert outcome.chosen == "unquantized in fake:bf16"
    assert outcome.fallback == "b"


@pytest.mark.parametrize(("speed", "fallback"), [(1.3, "a"), (0.7, "")])
def test_the_fallback_is_the_fastest_form_by_its_best_estimate(fake: Engine, speed: float, fallback: str) -> None:
    """Some form must run without the engine, so the best estimate decides even if nothing is certain."""
    facts = {"a": Fact(speed), "b": Fact(0.5), "a in fake": Fact(4.0), "unquantized in fake": Fact(0.1)}
    evaluator = BusyWith({**facts, "a in fake:bf16": Fact(0.2), "unquantized in fake:bf16": Fact(0.2)})
    evaluator.doubtful, evaluator.spread = "a", 0.5
    outcome = search((A, B), profile(), evaluator, Goal(), BudgetClock(None), engines=Field((EngineChoice(fake),)))
    assert (outcome.chosen, outcome.fallback) == ("a in fake", fallback)


def test_float32_is_the_fallback_without_an_accurate_int8_model(fake: Engine) -> None:
    facts = {"a": Fact(3.0, loss=0.2), "b": Fact(0.8), "unquantized in fake:bf16": Fact(2.0, share=0.0)}
    outcome, _ = run(fake, facts)
    assert (outcome.chosen, outcome.fallback) == ("unquantized in fake:bf16", "")
    assert any("float32 runs in onnxruntime's own kernels" in line for line in describe_verdict(outcome, Goal()))


def test_float_layers_can_be_bf16(fake: Engine) -> None:
    facts = {"a": Fact(2.0), "b": Fact(1.5), "a in fake": Fact(3.0), "a in fake:bf16": Fact(4.0)}
    outcome, evaluator = run(fake, facts)
    assert outcome.chosen == "a in fake:bf16"
    assert "build b in fake:bf16" in evaluator.log
    assert "build b in fake" not in evaluator.log
    assert "1.33 times the latency of a in fake:bf16" in outcome.trial("a in fake").reason


def test_a_lower_precision_that_is_no_faster_is_not_raced_further(fake: Engine) -> None:
    facts = {"a": Fact(2.0), "b": Fact(1.5), "a in fake": Fact(4.0), "a in fake:bf16": Fact(4.05)}
    outcome, evaluator = run(fake, facts)
    assert outcome.trial("a in fake:bf16").reason.endswith(
        "times the latency of a in fake, too little for its lower precision"
    )
    assert "build b in fake" in evaluator.log
    assert "build b in fake:bf16" not in evaluator.log


def test_a_lower_precision_that_may_be_faster_by_chance_gives_way(fake: Engine) -> None:
    """A lower precision is dropped if it may be faster only by chance.

    Candidates that are all in int8 run the same in both. Layers that a recovery later keeps in float would run in the
    lower precision.
    """
    facts = {"a": Fact(2.0), "b": Fact(1.5), "a in fake": Fact(4.0), "a in fake:bf16": Fact(4.2)}
    for reach, left in ((0.1, "fake"), (0.02, "fake:bf16")):
        outcome, evaluator = run(fake, facts, reach=reach)
        gone = "a in fake:bf16" if left == "fake" else "a in fake"
        assert "times the latency of a in fake" in outcome.trial(gone).reason
        assert f"build b in {left}" in evaluator.log


def test_a_precision_in_which_float_is_slower_is_not_raced_further(fake: Engine) -> None:
    facts = {"a": Fact(2.0), "b": Fact(1.5), "a in fake": Fact(4.0), "a in fake:bf16": Fact(4.4)}
    for speed, left in ((0.8, "fake"), (1.6, "fake:bf16")):
        floats = {"unquantized in fake": Fact(1.1), "unquantized in fake:bf16": Fact(speed)}
        outcome, evaluator = run(fake, {**facts, **floats})
        gone = "a in fake:bf16" if left == "fake" else "a in fake"
        assert "times the latency of a in fake" in outcome.trial(gone).reason
        assert f"build b in {left}" in evaluator.log


def test_on_a_busy_machine_no_engine_is_dropped_as_slower(fake: Engine) -> None:
    facts = {"a": Fact(2.0), "b": Fact(1.5), "a in fake": Fact(3.0), "a in fake:bf16": Fact(4.0)}
    outcome, evaluator = run(fake, facts, busy="the machine was busy")
    for name in ("a", "a in fake", "a in fake:bf16"):
        assert f"assess {name} 400" in evaluator.log
        assert "its speed is not known: the machine was busy" in outcome.trial(name).reason
    assert not [trial for trial in outcome.trials if "times the latency" in trial.reason]
    quiet, _ = run(fake, facts)
    assert "times the latency of" in quiet.trial("a in fake").reason


def test_saturating_engines_run_only_safe_weights(fake: Engine) -> None:
    engine = replace(fake, int8=replace(fake.int8, remedy_cost={"fit_pairs": 1, "reduce_range": 1}))
    field = Field((EngineChoice(engine),), saturating={"fake": ("U8S8",)})
    assert [c.name for c in add_entrants([UINT8, A], field)] == [
        "uint8",
        "a",
        "U8S8 per-channel fitted, minmax in fake",
        "U8S8 per-channel 7-bit, minmax in fake",
        "unquantized in fake",
    ]
    assert [c.scheme.fit_pairs for c in field.fitting_forms(A, engine)] == [True, False]
    assert field.fitting_forms(UINT8, engine) == ()
    assert replace(field, saturating={}).fitting_forms(A, engine) == (A,)


def test_an_engine_that_is_far_behind_is_not_raced_further(fake: Engine) -> None:
    outcome, evaluator = run(fake, {"a": Fact(2.0), "b": Fact(1.5)})
    alone = FakeEvaluator({"a": Fact(2.0), "b": Fact(1.5)})
    search([A, B], profile(), alone, Goal(), BudgetClock(None, Clock()))
    assert outcome.chosen == "a"
    assert "slower than float32" in outcome.trial("a in fake:bf16").reason
    assert "slower than float32" in outcome.trial("unquantized in fake:bf16").reason
    assert not [line for line in evaluator.log if line.startswith("assess") and "fake" in line]
    assert [x for x in evaluator.log if x.startswith("assess")] == [x for x in alone.log if x.startswith("assess")]
    assert "build b in fake" not in evaluator.log


def test_a_candidate_is_not_dropped_by_the_figures_of_another_engine(fake: Engine) -> None:
    facts = {"a": Fact(2.0, sqnr_db=10), "b": Fact(1.5, sqnr_db=10), "a in fake": Fact(4.0), "b in fake": Fact(3.0)}
    outcome, evaluator = run(fake, facts, methods=("x",))
    for name in ("a", "a in fake"):
        assert f"assess {name} 400" in evaluator.log
        assert outcome.trial(f"{name} + recovery").candidate.recoveries == ("x",)


def test_the_smallest_is_quantized(fake: Engine) -> None:
    facts = {"a": Fact(1.5, bytes=50), "b": Fact(1.5, bytes=60), "unquantized in fake:bf16": Fact(5, bytes=1, share=0)}
    outcome, _ = run(fake, facts, goal=Goal("size"))
    assert outcome.chosen == "a"


def test_threads_are_chosen_for_each_engine(fake: Engine) -> None:
    outcome, evaluator = run(fake, {"a": Fact(2.0), "a in fake": Fact(4.0)}, threads=(0, 1), thread_gain={1: 1.2})
    races = [f"race {kind} 0 first, {kind} 1 first" for kind in ("float32", "int8", "fake")]
    assert [line for line in evaluator.log if line.endswith("first")] == races
    assert outcome.chosen == "a in fake"


def test_engine_can_leave_onnxruntimes_own_kernels_out(fake: Engine) -> None:
    outcome, _ = run(fake, {"a": Fact(4.0), "a in fake": Fact(2.0)}, own=False)
    assert (outcome.chosen, outcome.fallback) == ("a in fake", "a")


def test_the_engine_is_part_of_what_measurements_are_filed_under(fake: Engine) -> None:
    both = [replace(A, engine=EngineChoice(fake, name)) for name in ("f32", "bf16")]
    assert len({digest(candidate) for candidate in (A, *both)}) == 3


@pytest.mark.parametrize(
    ("install", "behaviour"),
    [
        (fake_engine.install, "crashes at load"),
        (fake_engine.install, "crashes at run"),
        (fake_engine.install, "answers wrong"),
        (fake_engine.install_direct, "fails at import"),
        (fake_engine.install_direct, "crashes at compile"),
        (fake_engine.install_direct, "refuses the model"),
        (fake_engine.install_direct, "answers wrong"),
    ],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_a_broken_plugin_is_one_line_and_an_error_where_it_is_requested(
    install: Callable[..., Engine], behaviour: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = install(tmp_path, monkeypatch, behaviour)
    known = {"onnxruntime": load_engines()["onnxruntime"], "fake": broken}
    monkeypatch.setattr(tune_engines, "load_engines", lambda: known)
    machine, notes = detect_machine(), Notes()
    found = find_field(resolve("auto", machine), machine, progress=notes)
    assert found == Field()
    assert len(notes.texts) == 1
    assert notes.texts[0].startswith("fake is left out: ")
    with pytest.raises(EngineError, match="fake: "):
        find_field(resolve("auto", machine), machine, [EngineChoice(broken)])


def test_one_that_is_not_installed_is_no_word_unless_it_is_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = fake_engine.install(tmp_path, monkeypatch, version="")
    known = {"onnxruntime": load_engines()["onnxruntime"], "fake": absent}
    monkeypatch.setattr(tune_engines, "load_engines", lambda: known)
    machine, notes = detect_machine(), Notes()
    assert find_field(resolve("auto", machine), machine, progress=notes) == Field()
    assert notes.texts == []
    with pytest.raises(RuntimeUnavailableError, match="edgeq-fake-engine"):
        find_field(resolve("auto", machine), machine, [EngineChoice(absent)])


@needs_plugin("openvino")
@pytest.mark.slow
def test_a_race_with_openvino_and_its_bundle_on_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choices = [choose_engine("onnxruntime"), choose_engine("openvino")]
    goal = Goal(max_drop=0.05, budget_s=300)
    with steady_timings():
        result = edgeq.tune(demo.MODEL, Data(demo.CALIBRATION, count=20), tmp_path / "t", goal=goal, engines=choices)
    trials = {trial["name"]: trial for trial in result.record["candidates"]}
    assert trials["unquantized in openvino"]["screening"]["sqnr_db"] > 90
    assert {trial["engine"] for trial in trials.values()} == {"onnxruntime", "openvino"}
    assert result.record["versions"]["openvino"]
    # All candidates are equally fast here, and so the most accurate one wins.
    assert result.record["chosen"] == "unquantized in openvino"
    with open_bundle(tmp_path / "t") as bundle:
        variants = {variant.ep: variant for variant in bundle.components["model"]}
    assert set(variants) == {"CPUExecutionProvider", "OpenVINOExecutionProvider"}
    best = variants["OpenVINOExecutionProvider"]
    assert best.info["precision"] == "f32"
    assert best.info["coverage"]["how"] == "openvino, this machine"
    assert edgeq.verify(tmp_path / "t").passed
    # The runner uses the winner if its plug-in is installed, else the fallback.
    bundle_and_json = ["--bundle", str(tmp_path / "t"), "--json", "--force", "-o", str(tmp_path / "out.npz")]
    with np.load(demo.CALIBRATION) as samples:
        np.savez(tmp_path / "x.npz", image=samples["image"][:1])
    for absent, name in ((False, best.name), (True, variants["CPUExecutionProvider"].name)):
        if absent:
            monkeypatch.setattr("edgeq_device.engines.catalog.read_installed_version", lambda engine: "")
        assert main(["infer", str(tmp_path / "x.npz"), *bundle_and_json]) == 0
        assert json.loads(capsys.readouterr().out)["variant"] == name


def test_a_process_that_has_ended_is_started_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine.install(tmp_path, monkeypatch, "crashes at run")
    settings = edgeq.run.session.SessionSettings(engine=engine)
    with Engines() as opened:
        for _ in range(2):
            session = opened.open(demo.MODEL, settings)
            with pytest.raises(EngineError, match="fake"):
                session.run(None, {})
            assert opened.ended() == ("fake",)


def test_calibration_methods_and_recoveries_are_tried_in_every_engine(fake: Engine) -> None:
    kernel, method = Candidate("U8S8 per-channel, minmax", Scheme()), "U8S8 per-channel, mse"
    facts = {f"{kernel.name} in fake": Fact(3.0), f"{method} in fake": Fact(3.0), "unquantized": Fact(0.5)}
    evaluator = FakeEvaluator(facts, methods=("x",))
    field = Field((EngineChoice(fake),))
    search([kernel], profile(method=["mse"]), evaluator, Goal(), BudgetClock(None, Clock()), engines=field)
    built = {line.removeprefix("build ") for line in evaluator.log if line.startswith("build") and "unq" not in line}
    assert built == {f"{name}{where}" for name in (kernel.name, method) for where in ("", " in fake")} | {
        f"{kernel.name} + recovery",
        f"{kernel.name} in fake + recovery",
    }


def test_the_closer_of_two_equally_fast_candidates_stays(fake: Engine) -> None:
    close = {"a in fake": Fact(4.0, sqnr_db=30), "b in fake": Fact(4.08, sqnr_db=29)}
    own = {"a": Fact(2.0, sqnr_db=30), "b": Fact(2.04, sqnr_db=29)}
    outcome, _ = run(fake, {**own, **close})
    assert outcome.chosen == "a in fake"
    assert outcome.trial("b in fake").reason.startswith("no better than a in fake in latency, and its outputs' SQNR")
    apart, _ = run(fake, {**own, **close, "b in fake": Fact(4.2, sqnr_db=29)})
    assert apart.chosen == "b in fake"


def test_an_engine_slower_than_float32_gets_no_more_candidates(fake: Engine) -> None:
    facts = {"a": Fact(1.2), "b": Fact(1.2), "a in fake": Fact(0.95), "b in fake": Fact(3.0)}
    outcome, _ = run(fake, facts)
    assert outcome.chosen in ("a", "b")
    assert "b in fake" not in {trial.name for trial in outcome.trials}


def test_candidates_with_slow_layers_in_float_run_in_every_engine(fake: Engine) -> None:
    kernel = Candidate("U8S8 per-channel, minmax", Scheme())
    mixed = "U8S8 per-channel, minmax (1 in float)"
    facts = {kernel.name: Fact(1.4), mixed: Fact(1.5), f"{kernel.name} in fake": Fact(1.8)}
    evaluator = FakeEvaluator({**facts, "unquantized": Fact(0.5)}, slow=("x",))
    field = Field((EngineChoice(fake),))
    outcome = search([kernel], profile(), evaluator, Goal(), BudgetClock(None, Clock()), engines=field)
    assert f"{mixed} in fake" in {trial.name for trial in outcome.trials}


@pytest.mark.parametrize(("gains", "raced"), [({1: 1.6}, False), ({1: 1.3}, True), ({0: 1.6}, False)])
def test_threads_of_a_plugin_are_raced_where_others_leave_them_in_doubt(
    fake: Engine, gains: dict[int, float], raced: bool
) -> None:
    facts = {"a": Fact(2.0), "a in fake": Fact(3.0)}
    outcome, evaluator = run(fake, facts, threads=(0, 1), thread_gain=gains)
    assert any("race fake 0 first" in line for line in evaluator.log) == raced
    assert outcome.winner is not None
    assert outcome.winner.candidate.threads == outcome.baseline_threads == (0 if 1 in gains else 1)
