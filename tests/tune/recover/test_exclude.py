"""`edgeq.tune.recover.exclude`: the search on made-up figures, and that what is kept in float runs in float."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeq.measure.kernels import kernel_times
from edgeq.scheme import Scheme
from edgeq.tune.recover.costs import Costs
from edgeq.tune.recover.exclude import (
    Ranked,
    Tried,
    affordable,
    by_worth,
    exclude_layers,
    merged,
    rank_for_exclusion,
    search,
)
from edgeq.tune.recover.run import Recoverer
from edgeq.tune.recover.sensitivity import LayerSensitivity
from edgeq.tune.recover.units import Unit
from tests.tune.recover.nets import SCHEME, few, job_of, noise_db, target, two_gates, uneven

SHAPE = [1, 3, 12, 12]
NAMES = tuple("abcdefg")


def _alone(costs: dict[str, float]) -> Costs:
    return Costs(costs, dict.fromkeys(costs, 0.0), {}, {}, {})


def _unit(name: str, *nodes: str) -> Unit:
    return Unit(name, nodes or (name,), (f"{name}_out",), ())


def _measured(noise: dict[str, float], tried: list[tuple[str, ...]]) -> Callable[[Sequence[str]], Tried]:
    def measured(kept: Sequence[str]) -> Tried:
        tried.append(tuple(kept))
        return Tried(tuple(kept), sum(value for name, value in noise.items() if name not in kept))

    return measured


FIGURES = st.fixed_dictionaries({name: st.floats(0.01, 10) for name in NAMES})


@given(FIGURES, FIGURES, st.floats(0, 30))
def test_what_is_found_meets_the_bar_and_gets_cheaper(
    noise: dict[str, float], cost: dict[str, float], bar: float
) -> None:
    costs, tried = _alone(cost), []
    order = by_worth([Ranked(_unit(name), value) for name, value in noise.items()], costs)
    worth = [noise[name] / max(cost[name], 1.0) for name in order]
    assert worth == sorted(worth, reverse=True)
    found = search(order[:-1], costs, _measured(noise, tried), bar, lambda: False)
    assert bool(found) == (noise[order[-1]] <= bar)
    for result in found:
        assert result.loss <= bar
        assert len(result.units) < len(NAMES)
    prices = [costs.of(result.units) for result in found]
    assert prices == sorted(prices, reverse=True)
    assert len(set(tried)) == len(tried), "nothing is built twice"
    assert len(tried) <= 3 + 3 + 4


@given(st.fixed_dictionaries({name: st.integers(1, 100) for name in NAMES}), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_as_many_as_the_latency_has_room_for_but_never_all(cost: dict[str, float], headroom: float) -> None:
    costs = Costs({name: 2 * us for name, us in cost.items()}, cost, {}, {}, {})
    spent = np.cumsum([cost[name] for name in NAMES])
    most = affordable(NAMES, costs, headroom)
    assert most == min(len(NAMES) - 1, int((spent <= 1.5 * headroom * spent[-1]).sum()))
    assert affordable(NAMES, costs, math.inf) == len(NAMES) - 1


def test_the_refinement_puts_back_what_is_not_needed() -> None:
    """The dear one is noisy, but the others suffice."""
    noise, cost = {"dear": 4.0, "b": 5.0, "c": 5.0, "d": 1.0}, {"dear": 50.0, "b": 45.0, "c": 45.0, "d": 40.0}
    tried: list[tuple[str, ...]] = []
    found = search(("dear", "b", "c", "d"), _alone(cost), _measured(noise, tried), 5.5, lambda: False)
    assert found[-1].units == ("b", "c")


def test_time_ends_the_search() -> None:
    tried: list[tuple[str, ...]] = []
    measured = _measured(dict.fromkeys(NAMES, 1.0), tried)
    assert search(NAMES, _alone(dict.fromkeys(NAMES, 1.0)), measured, 0.0, lambda: True) == ()
    assert tried == []
    assert search(NAMES, _alone(dict.fromkeys(NAMES, 1.0)), measured, 2.0, lambda: len(tried) >= 2) == ()
    assert len(tried) == 2
    assert search((), _alone({}), measured, 2.0, lambda: False) == ()


def test_neighbours_are_worth_more_together() -> None:
    """Between two units in float there is nothing to convert."""
    costs = Costs(dict.fromkeys("abc", 2.0), dict.fromkeys("abc", 1.0), {"t": 100.0}, {"t": "a"}, {"t": ("b",)})
    ranked = [Ranked(_unit(name), noise) for name, noise in (("a", 2.0), ("b", 1.0), ("c", 1.5))]
    assert by_worth(ranked, costs) == ("c", "a", "b")
    costs = Costs(dict.fromkeys("abc", 20.0), dict.fromkeys("abc", 1.0), {"t": 10.0}, {"t": "a"}, {"t": ("b",)})
    ranked = [Ranked(_unit(name), noise) for name, noise in (("a", 3.0), ("b", 1.0), ("c", 1.5))]
    assert by_worth(ranked, costs) == ("a", "b", "c")


def test_noise_of_a_rewritten_model_is_that_of_the_users_units() -> None:
    units = [_unit("first", "first", "sigmoid", "mul"), _unit("second"), _unit("third")]
    found = [
        LayerSensitivity(_unit("first"), 1.0),
        LayerSensitivity(_unit("first/value", "first/value", "mul"), 2.0),
        LayerSensitivity(_unit("added", "added", "second"), 4.0),
        LayerSensitivity(_unit("unknown"), 8.0),
    ]
    assert {r.unit.name: r.noise for r in merged(found, units)} == {"second": 4.0, "first": 3.0}
    assert [r.unit.name for r in merged(found, units)] == ["second", "first"]


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
@pytest.mark.parametrize("names", [(), ("split-gates",)])
def test_what_is_kept_in_float_runs_in_float(tmp_path: Path, form: str, names: tuple[str, ...]) -> None:
    """On the graph that ONNX Runtime really runs, in the session that ships."""
    model, samples = two_gates(uneven), few(6, SHAPE)
    job = job_of(model, tmp_path, samples)
    recoverer = Recoverer(job, target(), tmp_path)
    scheme = SCHEME.replace(format=form)
    feed = dict(samples.samples[0].inputs)

    def loss(tried: Scheme) -> float:
        built = recoverer.build(tried, names, tmp_path / "tried.onnx")
        return -noise_db(model, built.artifact.model, samples)

    plain = loss(scheme)
    found = exclude_layers(recoverer, job, scheme, names, loss, plain - 1.0, lambda: False)
    assert found, "keeping a layer in float gains a decibel"
    chosen = found[-1]
    assert loss(chosen) <= plain - 1.0
    built = recoverer.build(chosen, names, tmp_path / "q.onnx")
    kinds = _kinds(model, built.artifact.model, built.artifact.settings(threads=1), feed)
    convs = {"first", "second", "depthwise", "last"}
    kept = convs & set(chosen.exclude)
    assert kept
    assert kept != convs
    assert {name: kinds[name] for name in convs} == {name: {"float"} if name in kept else {"int8"} for name in convs}


def _kinds(model: onnx.ModelProto, path: Path, settings: object, feed: dict) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for kernel in kernel_times(path, settings, feed, model, runs=1):  # type: ignore[arg-type]
        if "Conv" in kernel.op_type:
            found.setdefault(kernel.name.removesuffix("/value"), set()).add(kernel.kind)
    return found


def test_what_is_excluded_already_is_not_ranked(tmp_path: Path) -> None:
    model, samples = two_gates(uneven), few(2, SHAPE)
    job = job_of(model, tmp_path, samples)
    unit = ("first", "first_act_gate_Sigmoid", "first_act_Mul")
    ranked, costs = rank_for_exclusion(Recoverer(job, target(), tmp_path), job, SCHEME.replace(exclude=unit), ())
    assert {r.unit.name for r in ranked} == {"second", "depthwise", "last"}
    assert set(costs.float_us) == {"first", "second", "depthwise", "last"}
