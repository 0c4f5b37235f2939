"""Test charts: well-formed, inside their frame, one mark for each value, and empty without values."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeq.reporting.figures import EM, Box, text_width
from edgeq.reporting.layers import LayerView, TensorHistogram, histogram_chart, layer_profile
from edgeq.reporting.pareto import accuracy_text, pareto
from edgeq.reporting.timing import BenchReport, Latency, LatencyFigures, TimingRecord, bench_timing, latency_chart
from edgeq.reporting.tuning_record import TuningRecord
from edgeq.util.records import salvage

from . import samples

WIDTHS = [350.0, 880.0]


def latency(p50: float, p90: float, p99: float | None = None) -> Latency:
    return Latency(LatencyFigures(p50_ms=p50, p90_ms=p90, p99_ms=p99))


def parsed(drawn: str) -> ElementTree.Element:
    return ElementTree.fromstring(drawn)


def numbers_in(path: str) -> list[float]:
    return [float(n) for n in re.findall(r"-?\d+\.?\d*", path)]


def by_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [e for e in root.iter() if name in (e.get("class") or "").split()]


def text_boxes(root: ElementTree.Element, name: str) -> list[Box]:
    boxes = []
    for e in by_class(root, name):
        width, x, y = text_width(e.text or ""), float(e.get("x", "0")), float(e.get("y", "0"))
        left = {"middle": x - width / 2, "end": x - width}.get(e.get("text-anchor", ""), x)
        boxes.append(Box(left, y - EM, width, EM * 1.2))
    return boxes


def read_tuning(**changes: Any) -> TuningRecord:
    found: TuningRecord = salvage({**samples.tuning(), **changes}, TuningRecord)
    return found


@pytest.fixture
def tuning() -> TuningRecord:
    return read_tuning()


@pytest.mark.parametrize("width", WIDTHS)
def test_pareto_has_a_mark_for_each_measured_candidate(tuning: TuningRecord, width: float) -> None:
    root = parsed(pareto(tuning, width, 400))
    points = by_class(root, "point")
    # the candidate "early" has no figures
    assert sorted(int(p.get("data-candidate", "")) for p in points) == [0, 1, 2, 3, 4, 5]
    assert all(p.get("tabindex") == "0" for p in points)
    assert any("winner" in p.get("aria-label", "") for p in points)
    assert len(by_class(root, "chosen")) == 1
    assert len(by_class(root, "asked")) == 1
    for point in points:
        target = by_class(point, "target")[0]
        assert 0 <= float(target.get("cx", "")) <= width
        assert 0 <= float(target.get("cy", "")) <= 400


def test_a_hopeless_candidate_does_not_flatten_the_others(tuning: TuningRecord) -> None:
    root = parsed(pareto(tuning, 880, 400))
    off = by_class(root, "off")
    assert len(off) == 1
    heights = [float(by_class(p, "target")[0].get("cy", "")) for p in by_class(root, "point")]
    good = sorted(heights)[:3]
    assert good[2] - good[0] > 20
    labelled = next(p for p in by_class(root, "point") if "broken" in p.get("aria-label", ""))
    assert "off the scale" in labelled.get("aria-label", "")


def test_names_on_the_plot_keep_apart_and_inside() -> None:
    crowd = [samples.candidate(f"candidate-{i}", 0.5 + 0.0001 * i, 1.0 + 0.01 * i, pareto=True) for i in range(14)]
    root = parsed(pareto(read_tuning(candidates=crowd, float32={}, goal={}), 350, 360))
    boxes = text_boxes(root, "name")
    assert len(boxes) >= 2
    for i, box in enumerate(boxes):
        assert box.inside(Box(0, 0, 350, 360))
        assert not any(box.overlaps(other) for other in boxes[:i])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(0.5, 0.6), st.floats(0.5, 3.0), st.booleans()), min_size=1, max_size=12))
def test_nothing_drawn_is_faster_and_more_accurate_than_the_front(figures: list[tuple[float, float, bool]]) -> None:
    candidates = [samples.candidate(f"c{i}", top1, ms, pareto=True) for i, (top1, ms, _) in enumerate(figures)]
    for one, (_, _, whole) in zip(candidates, figures, strict=True):
        one["accuracy"]["complete"] = whole
    tuning = read_tuning(candidates=candidates, chosen=None)
    drawn = [one for one in tuning.drawn if not one.partial]
    known = [(tuning.latency_of(one) or 0.0, tuning.accuracy_of(one) or 0.0, one) for one in drawn]
    for ms, accuracy, one in known:
        beaten = any(m <= ms and a >= accuracy and (m, a) != (ms, accuracy) for m, a, _ in known)
        if one.mark == "front":
            assert not beaten
        elif one.mark == "behind" and not any((m, a) == (ms, accuracy) and o is not one for m, a, o in known):
            assert beaten


def test_early_eliminated_candidates_show_only_their_loss() -> None:
    part = samples.assessment(0.02, complete=False, samples=64, metrics={"top1": 0.9})
    early = samples.candidate("early", 0.9, 0.6, "eliminated", accuracy=part)
    tuning = read_tuning(candidates=[*samples.tuning()["candidates"][:3], early])
    assert "early" not in pareto(tuning, 880, 400)
    assert accuracy_text(tuning.drawn[-1], tuning) == "−2.00\u202fpt on 64"


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_crosses_a_name(width: float) -> None:
    steps = [samples.candidate(f"step {i}", 0.563 + 0.0004 * i, 0.6 + 0.1 * i, pareto=True) for i in range(10)]
    root = parsed(pareto(read_tuning(candidates=steps), width, 400))
    path = by_class(root, "front-line")[0].get("d", "")
    corners = [(float(x), float(y)) for x, y in re.findall(r"([\d.]+)[V,]([\d.]+)", path)]
    lines = [Box(0, float(by_class(root, "asked")[0].get("y1", "")), width, 0.1)]
    for (x, y), (next_x, next_y) in pairwise(corners):
        lines += [Box(x, y, next_x - x, 0.1), Box(next_x, min(y, next_y), 0.1, abs(next_y - y))]
    names = text_boxes(root, "name")
    assert names
    assert not any(name.overlaps(line) for name in names for line in lines)


def test_lower_can_be_better() -> None:
    plain = samples.tuning()
    for candidate in plain["candidates"]:
        if candidate["accuracy"]:
            candidate["accuracy"]["metrics"] = {"error": 1 - candidate["accuracy"]["metrics"]["top1"]}
    plain["float32"]["accuracy"] = {"error": 1 - 0.5678}
    turned = read_tuning(**{**plain, "metric": {"name": "error", "higher_is_better": False}})
    assert turned.least_accuracy == pytest.approx(0.4372)
    drawn = pareto(turned, 880, 400)
    assert "lower is better" in drawn
    assert "at most" in drawn
    assert len(by_class(parsed(drawn), "off")) >= 1


def test_one_candidate_is_no_plot() -> None:
    assert pareto(read_tuning(candidates=[samples.candidate("a", 0.5, 1.0)], float32={}), 880, 400) == ""


@pytest.mark.parametrize("width", WIDTHS)
def test_latency_rows(width: float) -> None:
    timing = bench_timing(salvage(samples.bench_report(), BenchReport))
    assert timing is not None
    root = parsed(latency_chart(timing, width))
    assert len(by_class(root, "area")) == 2
    assert len(by_class(root, "quantile")) == 6
    assert "latency (ms)" in "".join(root.itertext())
    boxes = text_boxes(root, "tick") + text_boxes(root, "name")
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])
        assert box.inside(Box(0, 0, width, 1000))


def test_percentiles_at_one_place_do_not_overlap() -> None:
    timing = TimingRecord({"a": latency(1.0, 1.001, 1.002), "b": latency(99.0, 99.1, 99.2)})
    root = parsed(latency_chart(timing, 350))
    boxes = text_boxes(root, "tick")
    assert sum("p50" in (e.text or "") for e in by_class(root, "tick")) == 2
    assert not any(box.overlaps(other) for i, box in enumerate(boxes) for other in boxes[:i])


def test_latency_without_histograms_still_shows_percentiles() -> None:
    root = parsed(latency_chart(TimingRecord({"a": latency(2.0, 2.5)}), 880))
    assert not by_class(root, "area")
    assert len(by_class(root, "quantile")) == 2
    assert latency_chart(TimingRecord({}), 880) == ""


def test_histogram_draws_each_threshold_and_shades_what_is_clipped() -> None:
    tensor = salvage(samples.histogram(), TensorHistogram)
    root = parsed(histogram_chart(tensor, 360))
    assert len(by_class(root, "range")) == 9
    assert len(by_class(root, "threshold")) == 2
    shaded = by_class(root, "outside")
    assert len(shaded) == 2
    assert all(float(s.get("width", "")) > 0 for s in shaded)
    bold = [e.text for e in by_class(root, "chosen") if e.tag == "text"]
    assert "percentile" in bold
    for box in text_boxes(root, "tick"):
        assert box.inside(Box(-1, 0, 362, 400))


def test_a_rare_value_is_seen() -> None:
    tensor = TensorHistogram("t", (0.0, 1.0, 2.0, 3.0), (1e9, 0.0, 1.0), ())
    area = by_class(parsed(histogram_chart(tensor, 360)), "area")[0].get("d", "")
    heights = [116 - float(v) for v in re.findall(r"V([\d.]+)H", area)]
    assert len(heights) == 2
    assert min(heights) >= 1.4
    assert histogram_chart(TensorHistogram("t", (0.0, 1.0), (0.0,), ()), 360) == ""


def test_layer_profile_has_two_panels() -> None:
    layers = [
        LayerView(f"l{i}", sqnr_db=30 - i, own_db=40 - i, float_us=10.0, int8_us=4.0, error_source=i == 3)
        for i in range(9)
    ]
    root = parsed(layer_profile(layers, 880))
    assert len(by_class(root, "dot")) == 9
    assert len(by_class(root, "bad")) == 1
    assert len(by_class(root, "joint")) == 1
    assert len(by_class(root, "base")) == len(by_class(root, "other")) == 9
    assert "(dB)" in "".join(root.itertext())
    assert "(µs)" in "".join(root.itertext())


def test_a_layer_that_adds_no_error_has_no_dot() -> None:
    layers = [
        LayerView("a", sqnr_db=20.0, own_db=30.0),
        LayerView("in float", sqnr_db=19.0),
        LayerView("b", sqnr_db=18.0, own_db=25),
    ]
    root = parsed(layer_profile(layers, 880))
    assert len(by_class(root, "dot")) == 2


def test_layer_profile_stays_small_with_many_layers() -> None:
    layers = [LayerView(f"l{i}", sqnr_db=30.0, float_us=1.0, int8_us=1.0) for i in range(20_000)]
    assert len(layer_profile(layers, 880)) < 300_000
    assert layer_profile([], 880) == layer_profile([LayerView("a")] * 5, 880) == ""


def test_a_gap_in_the_knowledge_is_a_gap_in_the_plot() -> None:
    layers = [LayerView("a", sqnr_db=30.0), LayerView("b"), LayerView("c", sqnr_db=20.0)]
    assert len(by_class(parsed(layer_profile(layers, 880)), "dot")) == 2
