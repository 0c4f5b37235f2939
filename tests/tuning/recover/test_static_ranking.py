"""Test `edgeq.tuning.recover.static_ranking`: the order of layers, and that layers kept in float run in float."""

from __future__ import annotations

import math
from pathlib import Path

import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeq.measure.kernel_times import kernel_times
from edgeq.model.load import read_model
from edgeq.model.macs import node_macs
from edgeq.tuning.float_layers import MacCosts, RankedLayer, find_affordable, select_float_layers
from edgeq.tuning.recover.run import Recoverer
from edgeq.tuning.recover.static_ranking import merge_units, rank_static, sort_by_worth
from edgeq.tuning.recover.unit_costs import Costs
from edgeq.tuning.recover.units import Unit
from tests.tuning.recover.nets import SCHEME, Net, few, job_of, noise_db, target, two_gates, uneven

SHAPE = [1, 3, 12, 12]
NAMES = tuple("abcdefg")
FIGURES = st.fixed_dictionaries({name: st.integers(1, 1000) for name in NAMES})


def _unit(name: str, *nodes: str) -> Unit:
    return Unit(name, nodes or (name,), (f"{name}_out",), ())


@given(FIGURES, FIGURES)
def test_most_noise_for_each_microsecond_first(noise: dict[str, int], cost: dict[str, int]) -> None:
    layers = [RankedLayer(name, (name,), float(value)) for name, value in noise.items()]
    order = sort_by_worth(layers, MacCosts(cost))
    worth = [layer.noise / cost[layer.name] for layer in order]
    assert worth == sorted(worth, reverse=True)
    assert {layer.name for layer in order} == set(NAMES)


def test_neighbours_are_worth_more_together() -> None:
    """Two neighbours in float are worth more together, because nothing between them has to be converted."""
    costs = Costs(dict.fromkeys("abc", 2.0), dict.fromkeys("abc", 1.0), {"t": 100.0}, {"t": "a"}, {"t": ("b",)})
    ranked = [RankedLayer(name, (name,), noise) for name, noise in (("a", 2.0), ("b", 1.0), ("c", 1.5))]
    assert [layer.name for layer in sort_by_worth(ranked, costs)] == ["c", "a", "b"]
    costs = Costs(dict.fromkeys("abc", 20.0), dict.fromkeys("abc", 1.0), {"t": 10.0}, {"t": "a"}, {"t": ("b",)})
    ranked = [RankedLayer(name, (name,), noise) for name, noise in (("a", 3.0), ("b", 1.0), ("c", 1.5))]
    assert [layer.name for layer in sort_by_worth(ranked, costs)] == ["a", "b", "c"]


def test_noise_of_a_rewritten_model_is_that_of_the_users_units() -> None:
    units = [_unit("first", "first", "sigmoid", "mul"), _unit("second"), _unit("third")]
    found = [
        RankedLayer("first", ("first",), 1.0),
        RankedLayer("first/value", ("first/value", "mul"), 2.0),
        RankedLayer("added", ("added", "second"), 4.0),
        RankedLayer("unknown", ("unknown",), 8.0),
    ]
    assert {r.name: r.noise for r in merge_units(found, units)} == {"second": 4.0, "first": 3.0}
    assert [r.name for r in merge_units(found, units)] == ["second", "first"]


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
@pytest.mark.parametrize("names", [(), ("split-gates",)])
def test_layers_kept_in_float_run_in_float(tmp_path: Path, form: str, names: tuple[str, ...]) -> None:
    """Layers kept in float run in float in the graph that ONNX Runtime executes in the shipped session."""
    model, samples = two_gates(uneven), few(6, SHAPE)
    job = job_of(model, tmp_path, samples)
    recoverer = Recoverer(job, target(), tmp_path)
    scheme = SCHEME.replace(format=form)
    feed = dict(samples.samples[0].inputs)

    def loss(nodes: tuple[str, ...]) -> float:
        tried = scheme.replace(exclude=nodes)
        built = recoverer.build(tried, names, tmp_path / "tried.onnx")
        return -noise_db(model, built.artifact.model, samples)

    plain = loss(())
    found = select_float_layers(rank_static(recoverer, job, scheme, names), loss, plain - 1.0, lambda: False)
    assert found, "keeping a layer in float gains a decibel"
    assert loss(found[-1]) <= plain - 1.0
    chosen = scheme.replace(exclude=found[-1])
    built = recoverer.build(chosen, names, tmp_path / "q.onnx")
    kinds = _kinds(model, built.artifact.model, built.artifact.settings(threads=1), feed)
    convs = {"first", "second", "depthwise", "last"}
    kept = convs & set(chosen.exclude)
    assert kept
    assert kept != convs
    assert {name: kinds[name] for name in convs} == {name: {"float"} if name in kept else {"int8"} for name in convs}


def _kinds(model: ir.Model, path: Path, settings: object, feed: dict) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for kernel in kernel_times(path, settings, feed, model, runs=1):  # type: ignore[arg-type]
        if "Conv" in kernel.op_type:
            found.setdefault(kernel.name.removesuffix("/value"), set()).add(kernel.kind)
    return found


def test_excluded_layers_are_not_ranked(tmp_path: Path) -> None:
    model, samples = two_gates(uneven), few(2, SHAPE)
    job = job_of(model, tmp_path, samples)
    unit = ("first", "first_act_gate_Sigmoid", "first_act_Mul")
    ranking = rank_static(Recoverer(job, target(), tmp_path), job, SCHEME.replace(exclude=unit), ())
    assert {layer.name for layer in ranking.layers} == {"second", "depthwise", "last"}
    assert isinstance(ranking.costs, Costs)
    assert set(ranking.costs.float_us) == {"first", "second", "depthwise", "last"}
    assert ranking.costs.span == sum(ranking.costs.float_us.values()) - sum(ranking.costs.int8_us.values())
    assert len(find_affordable(ranking, math.inf)) == 2, "one layer stays in integers"


def test_in_another_engine_the_multiply_accumulates_limit_what_goes_to_float(tmp_path: Path) -> None:
    model, samples = two_gates(uneven), few(2, SHAPE)
    job = job_of(model, tmp_path, samples)
    recoverer = Recoverer(job, target(), tmp_path)
    ranking = rank_static(recoverer, job, SCHEME, (), profiled=False)
    macs = node_macs(model)
    whole = sum(macs.values())
    assert ranking.costs.span == whole
    for headroom in (0.1, 0.3, 0.6):
        share = sum(macs[node] for layer in find_affordable(ranking, headroom) for node in layer.nodes) / whole
        assert share <= 1.5 * headroom
    profiled = rank_static(recoverer, job, SCHEME, ())
    assert {layer.name for layer in ranking.layers} == {layer.name for layer in profiled.layers}


def test_operators_that_move_values_stay_in_float_between_float_layers(tmp_path: Path) -> None:
    """An operator that only moves values stays in float between float layers.

    It causes no noise itself, but in int8 it would quantize the tensors between these layers.
    """
    net = Net()
    score = net.node("Transpose", [net.conv("x", "score", 3, 4)], "moved", perm=[0, 2, 3, 1])
    net.node("ReduceMax", [net.node("Sigmoid", [score], "likely")], "best", axes=[3], keepdims=0)
    net.node("Transpose", [net.conv("x", "box", 3, 4)], "boxes", perm=[0, 2, 3, 1])
    model, samples = net.model({"x": SHAPE}, ["best", "boxes"]), few(6, SHAPE)
    job = job_of(model, tmp_path, samples)
    recoverer = Recoverer(job, target(), tmp_path)
    ranking = rank_static(recoverer, job, SCHEME, ())
    moving = {"moved_Transpose", "best_ReduceMax", "boxes_Transpose"}
    assert {layer.name for layer in ranking.quiet} == moving

    def in_float(*names: str) -> set[str]:
        return set(ranking.nodes([layer for layer in ranking.layers if layer.name in names]))

    assert in_float("score") == {"score"}
    assert in_float("likely_Sigmoid") == {"likely_Sigmoid", "best_ReduceMax"}
    nodes = in_float("score", "likely_Sigmoid")
    assert nodes == {"score", "moved_Transpose", "likely_Sigmoid", "best_ReduceMax"}
    built = recoverer.build(SCHEME.replace(exclude=tuple(nodes)), (), tmp_path / "q.onnx")
    quantizers = [node for node in read_model(built.artifact.model).graph if node.op_type == "QuantizeLinear"]
    read = {value.name for node in quantizers for value in node.inputs[:1] if value}
    assert not read & {"score_out", "moved", "likely", "best"}
    assert "box_out" in read
