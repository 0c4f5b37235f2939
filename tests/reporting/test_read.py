"""Test the reading of records: the full one is read, and no content of a record is an error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeq.measure.coverage import Coverage
from edgeq.reporting.layers import TensorHistogram, layer_rows
from edgeq.reporting.page import render
from edgeq.reporting.read import ReportData, VariantRecord, read_report
from edgeq.reporting.timing import BenchReport, bench_timing
from edgeq.reporting.tuning import trial_settings, tuning_facts
from edgeq.reporting.tuning_record import MOST_CANDIDATES, TuningRecord
from edgeq.util.records import salvage

from . import samples


def read_tuning(plain: dict[str, Any]) -> TuningRecord:
    found: TuningRecord = salvage(plain, TuningRecord)
    return found


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers(-(10**400), 10**400)
    | st.text(max_size=8)
    | st.sampled_from(samples.HOSTILE[:6]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return every path into a nested value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*path, key))
    return found


PLACES = places(samples.record())


def apart(changes: list[tuple[tuple[Any, ...], Any]]) -> bool:
    """Return whether no path is inside another."""
    return not any(a is not b and b[0][: len(a[0])] == a[0] for a in changes for b in changes)


# Change three places for each page, because drawing a page is slow.
@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(PLACES), JSON), min_size=3, max_size=3).filter(apart))
def test_any_value_anywhere_is_drawn_or_left_out(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    record = json.loads(json.dumps(samples.record()))
    for place, value in changes:
        inner = record
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
    page = render(read_report(record))
    assert page.endswith("</html>\n")
    page.encode("utf-8")
    assert "nan" not in page.lower().replace("nano", "")
    assert "Infinity" not in page


@pytest.mark.parametrize("missing", sorted(samples.record()))
def test_every_part_may_be_missing(missing: str) -> None:
    record = samples.record()
    del record[missing]
    assert "</html>" in render(read_report(record))


def test_an_empty_record_says_so() -> None:
    data = read_report({})
    assert data == ReportData("model")
    assert "This model has not been measured" in render(data)


def test_a_model_that_loses_accuracy_has_error_sources() -> None:
    body = samples.variant()
    body["accuracy"]["int8"]["metrics"]["top1"] = 0.4
    (variant,) = read_report(samples.record(variants={"int8": body})).variants
    layers, _ = variant.drawn_layers
    assert layers[2].error_source
    assert "block.2/Conv" in layers[2].advice
    assert not layers[3].error_source


def test_the_full_record_is_read() -> None:
    data = read_report(samples.record())
    (variant,) = data.variants
    assert variant.primary is not None
    assert variant.primary.name == "top1"
    assert variant.primary.gain == pytest.approx(-0.0018)
    assert (variant.worst_db, variant.top1) == (31.5, 0.982)
    assert variant.excluded == ("block.1/Conv",)
    layers, conversion_us = variant.drawn_layers
    assert conversion_us == 9.0
    assert len(layers) == 30
    third = layers[2]
    assert (third.name, third.own_db, third.float_us, third.int8_us) == ("block.2/Conv", 39.0, 102.0, 42.0)
    assert third.saturated == 0.01
    assert not any(layer.error_source for layer in layers)  # the model is close to float32
    assert data.timing is not None
    assert data.timing.ratios["int8"].verdict == "faster"
    assert ("gpu", "A GPU") in data.machine


def test_the_bundles_own_short_form_is_read() -> None:
    record = {
        "variants": {
            "v": {
                "accuracy": {
                    name: samples.accuracy({"top1": value}) for name, value in (("float32", 0.5), ("int8", 0.6))
                },
                "coverage": {"int8_mac_share": 0.5},
                "sqnr_db": 37.0,
            }
        }
    }
    (variant,) = read_report(record).variants
    assert [(m.name, m.float32, m.int8, m.primary) for m in variant.metrics] == [("top1", 0.5, 0.6, True)]
    assert variant.worst_db == 37.0
    assert variant.coverage is not None
    assert variant.coverage.int8_mac_share == 0.5


def test_a_record_of_edgeq_0_2_is_read() -> None:
    record = json.loads(json.dumps(samples.record()))
    body = record["variants"]["int8"]
    for part in (*body["accuracy"].values(), body["agreement"]):
        part["count"] = part.pop("samples")
    body["layers"]["culprits"] = body["layers"].pop("error_sources")
    assert read_report(record) == read_report(samples.record())


def test_tuning() -> None:
    tuning = read_tuning(samples.tuning())
    assert [trial.mark for trial in tuning.drawn] == [
        "float32",
        "chosen",
        "front",
        "behind",
        "front",
        "short",
        "dropped",
    ]
    assert tuning.least_accuracy == pytest.approx(0.5628)
    assert tuning.met
    assert dict(tuning_facts(tuning))["allowed loss"].startswith("0.50")
    assert dict(trial_settings(tuning.drawn[1]))["recoveries"] == "sequential-correction"
    assert tuning.accuracy_of(tuning.drawn[-1]) is None


def test_tuning_by_agreement() -> None:
    metric = {"name": "top-1 agreement", "higher_is_better": True}
    plain = {**samples.tuning(), "metric": metric, "float32": {"accuracy": {}}}
    plain["candidates"] = [
        {"name": "a", "status": "chosen", "accuracy": samples.assessment(0.02), "timing": None},
        {"name": "b", "status": "short", "accuracy": samples.assessment(0.3), "timing": None},
    ]
    tuning = read_tuning(plain)
    assert [tuning.accuracy_of(trial) for trial in tuning.drawn] == pytest.approx([1.0, 0.98, 0.7])


def test_a_part_of_the_samples_is_compared_by_its_loss() -> None:
    plain = samples.tuning()
    part = samples.assessment(0.01, complete=False, metrics={"top1": 0.9})
    plain["candidates"] = [samples.candidate("a", 0.5, 1.0, accuracy=part)]
    tuning = read_tuning(plain)
    assert tuning.accuracy_of(tuning.drawn[1]) == pytest.approx(0.5578)


def test_the_chosen_candidate_survives_any_limit() -> None:
    plain = samples.tuning()
    extra = [samples.candidate(f"c{i}", 0.5, 1.0) for i in range(1000)]
    plain["candidates"] = [*extra, *plain["candidates"]]
    tuning = read_tuning(plain)
    assert len(tuning.drawn) == MOST_CANDIDATES + 1
    assert any(trial.mark == "chosen" for trial in tuning.drawn)
    left_out = len(plain["candidates"]) - MOST_CANDIDATES
    assert f", {left_out} more are only in the record" in render(read_report(samples.record(tuning=plain)))


def test_times_without_errors_keep_the_kernels_order() -> None:
    kernels = salvage({"kernels": samples.kernels(["b", "a"])}, VariantRecord).kernels
    layers, conversion = layer_rows(None, kernels)
    assert [layer.name for layer in layers] == ["b", "a"]
    assert conversion == 9.0
    assert all(layer.sqnr_db is None for layer in layers)


def test_leaves_out_contradictory_records() -> None:
    assert salvage({"coverage": "x", "bytes": 5}, VariantRecord).coverage is None
    assert salvage({"int8_mac_share": 1.2, "int8_macs": 1}, Coverage).int8_mac_share == 1
    wrong = samples.histogram()
    wrong["edges"][3] = 99.0
    bad = [wrong, {"tensor": "t", "edges": [0, 1], "counts": [-1]}, {"tensor": "t", "edges": [0], "counts": []}]
    assert salvage(bad, tuple[TensorHistogram, ...]) == ()
    bench = samples.bench_report()
    bench["scenarios"]["single-stream"]["histogram_edges_ms"][5] = 0.0
    timing = bench_timing(salvage(bench, BenchReport))
    assert timing is not None
    assert timing.histogram_edges_ms == ()


def test_a_number_beyond_all_counts_is_left_out() -> None:
    record = json.loads(json.dumps(samples.record()))
    record["tuning"]["candidates"][0]["screening"]["bytes"] = 10**400
    assert render(read_report(record)).endswith("</html>\n")
