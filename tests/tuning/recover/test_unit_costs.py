"""Test `edgeq.tuning.recover.unit_costs`: the sum by definition, kernels counted for their unit, and a real profile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeq.tuning.recover.run import Recoverer
from edgeq.tuning.recover.unit_costs import Costs, find_unit, measure_costs
from edgeq.tuning.recover.units import find_units
from tests.tuning.recover.nets import SCHEME, few, job_of, target, two_gates

UNITS = ("a", "b", "c", "d")


@st.composite
def costs(draw: st.DrawFn) -> Costs:
    times = st.dictionaries(st.sampled_from(UNITS), st.floats(0, 100), min_size=4)
    edges = draw(st.lists(st.tuples(st.sampled_from(UNITS), st.lists(st.sampled_from(UNITS), min_size=1)), max_size=5))
    named = {f"t{i}": edge for i, edge in enumerate(edges)}
    return Costs(
        draw(times),
        draw(times),
        {name: draw(st.floats(0, 10)) for name in named},
        {name: maker for name, (maker, _) in named.items()},
        {name: tuple(found) for name, (_, found) in named.items()},
    )


def total(made: Costs, kept: set[str]) -> float:
    """Return the microseconds that `kept` in float adds to a model with all units in integers, by definition."""
    wanted = sum(made.float_us[unit] - made.int8_us[unit] for unit in kept)
    for tensor, price in made.conversion_us.items():
        kinds = [unit in kept for unit in (made.makers[tensor], *made.readers[tensor])]
        wanted += price * (any(kinds) and not all(kinds))
    return wanted


@given(costs(), st.sets(st.sampled_from(UNITS)), st.sampled_from(UNITS))
def test_the_price_of_one_more_layer_is_the_difference_of_totals(made: Costs, kept: set[str], name: str) -> None:
    wanted = total(made, kept | {name}) - total(made, kept - {name})
    assert made.extra_cost(name, kept - {name}) == pytest.approx(wanted, abs=1e-6)
    assert made.extra_cost(name, kept | {name}) == made.extra_cost(name, kept - {name})


def test_neighbours_in_float_share_their_conversions() -> None:
    made = Costs({"a": 5, "b": 5}, {"a": 2, "b": 2}, {"t": 10}, {"t": "a"}, {"t": ("b",)})
    assert made.extra_cost("a", set()) == made.extra_cost("b", set()) == 13
    assert made.extra_cost("b", {"a"}) == -7
    assert made.span == 6


@given(costs(), st.sets(st.sampled_from(UNITS)))
def test_a_set_costs_what_its_total_says(made: Costs, kept: set[str]) -> None:
    assert made.set_cost(kept) == pytest.approx(total(made, kept), abs=1e-6)


def test_speed_is_predicted_between_that_of_int8_and_that_of_float32() -> None:
    made = Costs({"a": 60, "b": 40}, {"a": 20, "b": 20}, {"t": 5}, {"t": "a"}, {"t": ("b",)})
    assert made.predict_speed(set(), 2.0) == pytest.approx(2.0)
    assert made.predict_speed({"a", "b"}, 2.0) == pytest.approx(1.0)
    # 45 of the 60 microseconds that separate the two are half of float32's time.
    assert made.predict_speed({"a"}, 2.0) == pytest.approx(1 / (0.5 + 0.5 * 45 / 60))
    # The measurement says that int8 is slower, so every unit in float is believed to cost at least half of its price.
    assert made.predict_speed({"a"}, 0.9) == pytest.approx(1 / (1 / 0.9 + 0.5 * 45 / 100))
    assert Costs({}, {}, {}, {}, {}).predict_speed({"a"}, 1.3) == 1.3


@given(costs(), st.sets(st.sampled_from(UNITS)), st.sampled_from(UNITS), st.floats(0.2, 8))
def test_a_unit_that_costs_time_never_makes_a_model_faster(
    made: Costs, kept: set[str], name: str, speed: float
) -> None:
    before, now = (made.predict_speed(names, speed) for names in (kept, kept | {name}))
    assert 0 < now <= speed * 2 * (1 + 1e-9)
    if made.extra_cost(name, kept) >= 0:
        assert now <= before * (1 + 1e-9)


@pytest.mark.parametrize(
    ("kernel", "unit"),
    [
        ("Conv_1", "one"),
        ("Conv_10", "ten"),
        ("Conv_1_quant", "one"),
        ("Conv_10_nchwc", "ten"),
        ("Conv_12", None),
        ("c_QuantizeLinear", "c"),
        ("other", None),
    ],
)
def test_kernels_belong_to_the_longest_name_that_ends_at_a_word(kernel: str, unit: str | None) -> None:
    assert find_unit(kernel, {"Conv_1": "one", "Conv_10": "ten", "c": "c"}) == unit


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_both_models_are_measured(tmp_path: Path, form: str) -> None:
    model, samples = two_gates(), few(2, [1, 3, 12, 12])
    job = job_of(model, tmp_path, samples)
    state = Recoverer(job, target(), tmp_path).state(SCHEME.replace(format=form), [], tmp_path / "q.onnx")
    assert state.artifact is not None
    units = find_units(model)
    feed = {name: np.asarray(value) for name, value in samples.samples[0].inputs.items()}
    made = measure_costs(units, job.prepared, state.artifact.model, state.artifact.settings(threads=1), feed)
    names = [unit.name for unit in units]
    assert sorted(made.float_us) == sorted(made.int8_us) == sorted(names)
    assert all(us > 0 for us in (*made.float_us.values(), *made.int8_us.values()))
    assert set(made.conversion_us) == {"first_act", "second_act", "depthwise_act"}
    assert all(us > 0 for us in made.conversion_us.values())
    assert made.conversion_us["first_act"] == pytest.approx(made.conversion_us["second_act"])
    assert made.span == pytest.approx(sum(made.float_us.values()) - sum(made.int8_us.values()))
