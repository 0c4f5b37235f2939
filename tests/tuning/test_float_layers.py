"""Test the choice of layers to keep in float, on made-up noises and losses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeq.tuning.float_layers import (
    EIGHT_BIT,
    LayerRanking,
    MacCosts,
    RankedLayer,
    find_affordable,
    rank_by_probing,
    select_float_layers,
)

NOISES = st.lists(st.floats(0, 1), min_size=2, max_size=40)
NAMES = tuple("abcdefgh")
INF = math.inf


def never() -> bool:
    return False


def ranking(macs: dict[str, int], slack: float = 1.0) -> LayerRanking:
    return LayerRanking(tuple(RankedLayer(name, (name,), 1.0) for name in macs), MacCosts(macs), slack)


def recorded(
    loss: Callable[[frozenset[str]], float], evaluated: list[tuple[str, ...]]
) -> Callable[[tuple[str, ...]], float]:
    def evaluate(nodes: tuple[str, ...]) -> float:
        evaluated.append(nodes)
        return loss(frozenset(nodes))

    return evaluate


@st.composite
def monotone_losses(draw: st.DrawFn) -> Callable[[frozenset[str]], float]:
    """Draw a loss that never grows with more layers: the weighted count of constraints that a set of layers misses."""
    hits = st.tuples(st.frozensets(st.sampled_from(NAMES), min_size=1), st.integers(1, 8))
    constraints = draw(st.lists(hits, max_size=8))
    return lambda kept: float(sum(weight for needed, weight in constraints if not needed & kept))


@given(
    st.lists(st.integers(1, 100), min_size=len(NAMES), max_size=len(NAMES)),
    monotone_losses(),
    st.integers(0, 20),
    st.sampled_from([0.25, 0.5, 1.0, INF]),
)
def test_against_brute_force_on_losses_that_never_grow_with_more_layers_in_float(
    sizes: list[int], loss: Callable[[frozenset[str]], float], max_drop: float, headroom: float
) -> None:
    macs = dict(zip(NAMES, sizes, strict=True))
    evaluated: list[tuple[str, ...]] = []
    found = select_float_layers(ranking(macs), recorded(loss, evaluated), max_drop, never, headroom=headroom)
    limit = headroom * sum(macs.values())
    prefixes = [NAMES[:size] for size in range(1, len(NAMES)) if sum(macs[n] for n in NAMES[:size]) <= limit]
    holding = [prefix for prefix in prefixes if loss(frozenset(prefix)) <= max_drop]
    assert bool(found) == bool(holding)
    assert all(loss(frozenset(nodes)) <= max_drop for nodes in found)
    costs = [sum(macs[n] for n in nodes) for nodes in found]
    assert costs == sorted(costs, reverse=True)
    assert len(set(costs)) == len(costs)
    assert len(set(evaluated)) == len(evaluated), "nothing is evaluated twice"
    assert len(evaluated) <= 3 + 3 + 4
    if not found:
        return
    shortest = min(holding, key=len)
    assert shortest in found
    subsets = itertools.chain.from_iterable(itertools.combinations(shortest, size) for size in range(len(shortest)))
    least = min((sum(macs[n] for n in s) for s in subsets if s and loss(frozenset(s)) <= max_drop), default=INF)
    assert costs[-1] <= sum(macs[n] for n in shortest)
    assert costs[-1] >= min(least, sum(macs[n] for n in shortest))


def test_the_refinement_puts_back_what_is_not_needed() -> None:
    """The refinement puts layers back into integers if the others suffice: here the costly, noisy layer."""
    noise = {"costly": 4.0, "b": 5.0, "c": 5.0, "d": 1.0, "e": 0.0}
    ranked = ranking({"costly": 50, "b": 45, "c": 45, "d": 40, "e": 1})
    found = select_float_layers(ranked, lambda kept: sum(v for k, v in noise.items() if k not in kept), 5.5, never)
    assert found[-1] == ("b", "c")
    unrefined = select_float_layers(
        ranked, lambda kept: sum(v for k, v in noise.items() if k not in kept), 5.5, never, refinements=0
    )
    assert unrefined[-1] == ("costly", "b", "c")


def test_time_ends_the_search_with_what_was_found() -> None:
    evaluated: list[tuple[str, ...]] = []
    ranked = ranking(dict.fromkeys(NAMES, 1))
    evaluate = recorded(lambda kept: float(len(NAMES) - len(kept)), evaluated)
    assert select_float_layers(ranked, evaluate, 4.0, lambda: True) == ()
    assert evaluated == []
    assert select_float_layers(ranked, evaluate, 2.0, lambda: len(evaluated) >= 2) == ()
    assert len(evaluated) == 2
    evaluated.clear()
    assert [len(s) for s in select_float_layers(ranked, evaluate, 3.0, lambda: len(evaluated) >= 4)] == [7]
    assert len(evaluated) == 4
    assert select_float_layers(ranking({}), evaluate, 2.0, never) == ()


@given(st.lists(st.one_of(st.floats(0, 40), st.just(INF)), min_size=9, max_size=9), st.floats(0, 20))
def test_whatever_the_losses_what_is_found_holds(losses: list[float], max_drop: float) -> None:
    evaluated: list[tuple[str, ...]] = []
    evaluate = recorded(lambda kept: losses[len(kept)], evaluated)
    found = select_float_layers(ranking(dict.fromkeys(NAMES, 1)), evaluate, max_drop, never)
    assert all(losses[len(nodes)] <= max_drop for nodes in found)
    assert len(set(evaluated)) == len(evaluated), "nothing is evaluated twice"
    assert all(0 < len(nodes) < len(NAMES) for nodes in evaluated)


@pytest.mark.parametrize("last", [INF, 25.0])
def test_sizes_around_the_best_are_tried_where_the_largest_is_no_better(last: float) -> None:
    """Sizes around the best one are tried if the largest is not better.

    Here 9 to 13 of 16 layers are enough, but 15 lose everything. No power of two is in that range.
    """
    names = [f"n{i}" for i in range(16)]
    evaluated: list[tuple[str, ...]] = []

    def loss(kept: frozenset[str]) -> float:
        return last if len(kept) == 15 else 1.0 if 9 <= len(kept) <= 13 else 20.0 - len(kept)

    found = select_float_layers(ranking(dict.fromkeys(names, 1)), recorded(loss, evaluated), 2.0, never)
    assert len(found[-1]) == 9
    assert len(evaluated) <= 5 + 3 + 3 + 4


WORTHS = st.lists(st.tuples(st.floats(0.01, 100), st.integers(1, 50)), min_size=2, max_size=8)


@given(noises=WORTHS, share=st.floats(0.001, 0.999))
def test_the_counted_layers_leave_as_much_noise_as_is_allowed(noises: list[tuple[float, int]], share: float) -> None:
    ranking = ranked_by_worth(noises)
    count = ranking.count_quieting(share, len(noises))
    assert ranking.remaining(ranking.layers[:count]) <= share or count == len(noises)
    assert count == 1 or ranking.remaining(ranking.layers[: count - 1]) > share


@given(noises=WORTHS, share=st.floats(0.001, 0.999))
def test_the_selected_layers_cost_at_most_twice_as_much_as_the_best(
    noises: list[tuple[float, int]], share: float
) -> None:
    ranking = ranked_by_worth(noises)
    layers, macs = ranking.layers, dict(ranking.costs.macs) if isinstance(ranking.costs, MacCosts) else {}
    sets = [chosen for size in range(1, len(layers) + 1) for chosen in itertools.combinations(layers, size)]
    enough = [sum(macs[m.name] for m in chosen) for chosen in sets if ranking.remaining(chosen) <= share]
    selected = ranking.select_quieting(share, layers)
    assert sum(macs[layer.name] for layer in selected) <= 2 * min(enough, default=sum(macs.values()))
    assert ranking.remaining(selected) <= share or selected == layers


def ranked_by_worth(noises: list[tuple[float, int]]) -> LayerRanking:
    """Return a ranking of layers with these noises and costs, most noise per cost first."""
    order = sorted(noises, key=lambda pair: -pair[0] / pair[1])
    layers = tuple(RankedLayer(f"n{place}", (f"n{place}",), noise) for place, (noise, _) in enumerate(order))
    return LayerRanking(layers, MacCosts({layer.name: cost for layer, (_, cost) in zip(layers, order, strict=True)}))


def test_gives_up_if_all_float_layers_lose_too_much() -> None:
    evaluated: list[tuple[str, ...]] = []
    ranked = ranking(dict.fromkeys(NAMES, 1))
    evaluate = recorded(lambda kept: float(len(NAMES) - len(kept)), evaluated)
    assert select_float_layers(ranked, evaluate, 1.0, never, headroom=0.5, hopeless=3.0) == ()
    assert [len(nodes) for nodes in evaluated] == [4]
    for headroom, allowed in ((0.5, 4.0), (INF, 3.0)):
        evaluated.clear()
        found = select_float_layers(ranked, evaluate, allowed, never, headroom=headroom, hopeless=4.0)
        assert len(found[-1]) == len(NAMES) - allowed
        assert len(set(evaluated)) == len(evaluated), "nothing is evaluated twice"


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.sampled_from([0.0, 0.25, 0.5, 1.0, INF]))
def test_no_more_layers_than_are_affordable_and_never_all(macs: list[int], headroom: float) -> None:
    ranked = ranking({f"n{i}": m for i, m in enumerate(macs)}, slack=1.5)
    found = find_affordable(ranked, headroom)
    assert found == ranked.layers[: len(found)]
    assert len(found) < len(ranked.layers)
    assert sum(macs[: len(found)]) <= 1.5 * headroom * sum(macs) or not found
    if len(found) < len(macs) - 1:
        assert sum(macs[: len(found) + 1]) > 1.5 * headroom * sum(macs)


def test_the_noisy_layer_is_found_in_few_probes() -> None:
    macs = {f"n{i}": 100 for i in range(64)}
    probed = []

    def noise_of(nodes: Sequence[str]) -> float:
        probed.append(tuple(nodes))
        return sum(10.0 if n == "n37" else 0.01 for n in nodes)

    assert rank_by_probing(macs, noise_of, never).layers[0].nodes == ("n37",)
    assert len(probed) <= 32


def test_each_layer_by_itself() -> None:
    ranked = rank_by_probing({f"n{i}": 1 for i in range(50)}, lambda nodes: float(nodes[0] == "n7"), never, singly=True)
    assert [len(layer.nodes) for layer in ranked.layers] == [1] * 50
    assert ranked.layers[0].name == "n7"


def test_the_cheaper_of_equally_noisy_layers_comes_first() -> None:
    macs = {"costly": 1000, "cheap": 10}
    ranked = rank_by_probing(macs, lambda nodes: float(len(nodes)), never)
    assert ranked.layers[0].nodes == ("cheap",)
    assert ranked.costs.span == 1010


@given(NOISES)
def test_ranked_layers_cover_every_layer_once(noises: list[float]) -> None:
    macs = {f"n{i}": i + 1 for i in range(len(noises))}
    ranked = rank_by_probing(macs, lambda nodes: sum(noises[int(n[1:])] for n in nodes), never)
    assert sorted(n for layer in ranked.layers for n in layer.nodes) == sorted(macs)
    assert ranked.costs.span == sum(macs.values())


def test_time_that_runs_out_ends_the_splitting() -> None:
    assert len(rank_by_probing({f"n{i}": 1 for i in range(64)}, lambda nodes: 1.0, lambda: True).layers) == 8


def test_all_products_may_get_eight_bits() -> None:
    layers = tuple(RankedLayer(name, (name,), 1.0) for name in NAMES)
    ranked = LayerRanking(layers, MacCosts(dict.fromkeys(NAMES, 1)), field=EIGHT_BIT)
    (*_, found) = select_float_layers(ranked, lambda nodes: 0.0 if len(nodes) == len(NAMES) else 1.0, 0.5, never)
    assert found == NAMES
