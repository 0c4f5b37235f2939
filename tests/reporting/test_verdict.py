"""Test that the verdict and its figures agree with the numbers and claim nothing more."""

from __future__ import annotations

from typing import Any

import pytest

from edgeq.reporting.read import ReportVerdict, read_report, verdict_of

from . import samples


def verdict(**changes: Any) -> ReportVerdict:
    data = read_report(samples.record(**changes))
    return verdict_of(data, data.main)


def only(**changes: Any) -> dict[str, Any]:
    """Return the variants of a record with one variant, with changes."""
    return {"int8": {**samples.variant(), "warnings": [], **changes}}


def ratio(estimate: float, low: float, high: float, pairs: int = 20) -> dict[str, float]:
    return {"estimate": estimate, "low": low, "high": high, "confidence": 1 - 2 * 0.5**pairs, "pairs": pairs}


def plain(text: str) -> str:
    return text.replace("\u202f", " ").replace("\u2212", "-")


def test_the_goal_was_met() -> None:
    found = verdict()
    assert (found.tone, found.status) == ("good", "Goal met")
    assert plain(found.sentence) == (
        "The int8 model runs 2.50× as fast as float32, loses 0.18 pt of top-1 (56.60 %) and takes 30 % of its space."
    )
    assert [f.label for f in found.figures] == ["Speed", "top-1", "Output SQNR", "Size", "In int8"]


def test_the_goal_was_not_met() -> None:
    found = verdict(tuning={**samples.tuning(), "chosen": None})
    assert (found.tone, found.status) == ("bad", "Goal not met")


def test_slower_is_reported_first() -> None:
    bench = samples.bench_report(1.0, 2.0)
    bench["scenarios"]["single-stream"]["ratios"]["int8"] = ratio(0.5, 0.4, 0.6)
    found = verdict(tuning=None, bench=bench, variants=only())
    assert found.tone == "bad"
    assert found.sentence.startswith("The int8 model is slower than float32 (0.50×)")


def test_a_difference_within_the_error_is_none() -> None:
    bench = samples.bench_report()
    bench["scenarios"]["single-stream"]["ratios"]["int8"] = ratio(1.05, 0.9, 1.2)
    found = verdict(tuning=None, bench=bench, variants=only())
    assert "about as fast as float32" in found.sentence
    assert found.figures[0].tone == "neutral"


def test_one_pair_of_runs_is_no_verdict() -> None:
    bench = samples.bench_report()
    bench["scenarios"]["single-stream"]["ratios"]["int8"] = ratio(1.53, 1.53, 1.53, pairs=1)
    found = verdict(bench=bench)
    assert (found.tone, found.status) == ("neutral", "Speed unproven")
    assert found.figures[0].value == "not measurable"
    assert "as fast" not in found.sentence


def test_an_estimate_is_called_unproven() -> None:
    bench = samples.bench_report()
    estimate = {"reason": "the machine was busy", "likely": [2.0, 1.5, 2.6]}
    bench["scenarios"]["single-stream"]["ratios"]["int8"] = {**ratio(1.53, 1.53, 1.53, pairs=1), **estimate}
    found = verdict(bench=bench)
    assert (found.tone, found.status) == ("neutral", "Speed unproven")
    assert found.figures[0].value == "about 2.00×"
    assert found.figures[0].note == "unproven: estimated, 1.50 to 2.60"
    assert found.warnings[-1] == "the speed is unproven: the machine was busy"
    assert "runs at about 2.00× the speed of float32, estimated and unproven" in found.sentence


def test_a_doubtful_goal_is_not_met() -> None:
    doubted = {**samples.tuning(), "goal_met": True, "doubts": ["accuracy in doubt: it loses 0.59 points"]}
    assert verdict(tuning=doubted).status == "Accuracy in doubt"
    missed = verdict(tuning={**doubted, "goal_met": False})
    assert missed.status == "Goal not met"
    assert f"{doubted['chosen']} comes closest" in missed.sentence


def test_ratio_and_milliseconds_are_of_the_same_runs() -> None:
    bench = samples.bench_report(12.9, 8.2)
    claimed = {**ratio(1.73, 1.6, 1.8), "baseline_ms": 12.9, "ms": 7.46}
    bench["scenarios"]["single-stream"]["ratios"]["int8"] = claimed
    assert verdict(bench=bench).figures[0].note == "1.60 to 1.80; 12.9 → 7.46 ms"


@pytest.mark.parametrize(("int8", "tone"), [(0.5678, "good"), (0.57, "good"), (0.5650, "good"), (0.50, "bad")])
def test_accuracy_is_judged(int8: float, tone: str) -> None:
    accuracy = {
        "float32": samples.accuracy({"top1": 0.5678}),
        "int8": samples.accuracy({"top1": int8}),
    }
    found = verdict(variants=only(accuracy=accuracy))
    assert next(f for f in found.figures if f.label == "top-1").tone == tone


def test_the_goal_of_the_user_decides() -> None:
    asked = samples.tuning()
    asked["goal"]["max_drop"] = 0.1
    accuracy = {
        "float32": samples.accuracy({"top1": 0.5678}),
        "int8": samples.accuracy({"top1": 0.50}),
    }
    assert verdict(variants=only(accuracy=accuracy), tuning=asked).status == "Goal met"
    assert verdict(variants=only(accuracy=accuracy)).status == "Look closer"


def test_lower_is_better() -> None:
    accuracy = {
        "float32": samples.accuracy({"error": 1.0}, higher_is_better=False),
        "int8": samples.accuracy({"error": 1.5}, higher_is_better=False),
    }
    found = verdict(variants=only(accuracy=accuracy))
    assert "loses" in found.sentence
    assert next(f for f in found.figures if f.label == "error").tone == "bad"


def test_without_labels_agreement_speaks() -> None:
    found = verdict(tuning=None, variants=only(accuracy={}))
    assert "top answer in 98.2 %" in plain(found.sentence)
    poor = {"outputs": [samples.output(5.9, top1=None)]}
    found = verdict(tuning=None, bench=None, variants=only(accuracy={}, agreement=poor))
    assert found.tone == "bad"
    assert "5.9 dB" in plain(found.sentence)


def test_nothing_measured() -> None:
    data = read_report({})
    assert verdict_of(data, data.main).status == "No measurements"


def test_warnings_temper_a_good_result() -> None:
    assert verdict(tuning=None).tone == "neutral"
    assert verdict(tuning=None, variants=only()).tone == "good"


def test_each_target_has_a_verdict_of_its_own() -> None:
    poor = only()["int8"] | {"title": "A board", "accuracy": {**samples.variant()["accuracy"]}}
    poor["accuracy"] = {"float32": poor["accuracy"]["float32"], "int8": samples.accuracy({"top1": 0.3})}
    data = read_report(samples.record(variants={**only(title="A server"), "my board": poor}))
    first, second = (verdict_of(data, variant) for variant in data.variants)
    assert (first.status, first.target, first.commands) == ("Goal met", "A server", ())
    assert (second.status, second.target) == ("Look closer", "A board")
    assert second.commands == ("edgeq debug MODEL.onnx BUNDLE --variant 'my board' --data SAMPLES",)
    assert plain(second.sentence).startswith("The int8 model loses 26.78 pt of top-1")


def test_a_slow_model_says_what_to_type() -> None:
    found = verdict(variants=only(), tuning=None, bench=samples.bench_report(1.0, 2.0) | {
        "scenarios": {"single-stream": {
            "models": {"float32": {"latency": samples.figures(1.0)}, "int8": {"latency": samples.figures(2.0)}},
            "ratios": {"int8": ratio(0.5, 0.4, 0.6)},
        }}
    })  # fmt: skip
    assert (found.status, found.commands) == ("Look closer", ("edgeq report BUNDLE --bench",))


def test_a_goal_that_was_missed_says_how_to_go_on() -> None:
    found = verdict(tuning={**samples.tuning(), "chosen": None}, variants=only())
    assert found.commands == ("edgeq tune MODEL.onnx --data SAMPLES --max-drop MORE --resume -o BUNDLE",)
