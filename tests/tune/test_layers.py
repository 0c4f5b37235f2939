"""Layers to keep in float, on noises that are made up."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from edgeq.tune.layers import Piece, affordable, noisy_pieces, shortest_exclusion

NOISES = st.lists(st.floats(0, 1), min_size=2, max_size=40)


def never() -> bool:
    return False


def test_the_noisy_layer_is_found_in_few_probes() -> None:
    macs = {f"n{i}": 100 for i in range(64)}
    asked = []

    def noise_of(nodes: Sequence[str]) -> float:
        asked.append(tuple(nodes))
        return sum(10.0 if n == "n37" else 0.01 for n in nodes)

    pieces = noisy_pieces(macs, noise_of, never)
    assert pieces[0].nodes == ("n37",)
    assert len(asked) <= 32


def test_what_saves_the_same_noise_for_less_comes_first() -> None:
    macs = {"dear": 1000, "cheap": 10}
    assert noisy_pieces(macs, lambda nodes: float(len(nodes)), never)[0].nodes == ("cheap",)


@given(NOISES)
def test_pieces_cover_every_layer_once(noises: list[float]) -> None:
    macs = {f"n{i}": i + 1 for i in range(len(noises))}
    pieces = noisy_pieces(macs, lambda nodes: sum(noises[int(n[1:])] for n in nodes), never)
    assert sorted(n for p in pieces for n in p.nodes) == sorted(macs)


@given(NOISES, st.floats(0, 5))
def test_the_shortest_beginning_that_meets_the_bar(noises: list[float], bar: float) -> None:
    pieces = [Piece((f"n{i}",), noise, 1) for i, noise in enumerate(sorted(noises, reverse=True))]
    total = sum(p.noise for p in pieces)

    def loss(nodes: tuple[str, ...]) -> float:
        return total - sum(p.noise for p in pieces if p.nodes[0] in nodes)

    found = shortest_exclusion(pieces[:-1], loss, bar, never)
    good = [k for k in range(1, len(pieces)) if loss(tuple(p.nodes[0] for p in pieces[:k])) <= bar]
    assert (len(found) if found else None) == (good[0] if good else None)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.sampled_from([0.0, 0.25, 0.5, 1.0, float("inf")]))
def test_no_more_pieces_than_there_is_room_for_and_never_all(macs: list[int], headroom: float) -> None:
    pieces = [Piece((f"n{i}",), 1.0, m) for i, m in enumerate(macs)]
    found = affordable(pieces, headroom)
    assert found == tuple(pieces[: len(found)])
    assert len(found) < len(pieces)
    assert sum(p.macs for p in found) <= headroom * sum(macs)
    if len(found) < len(pieces) - 1:
        assert sum(p.macs for p in pieces[: len(found) + 1]) > headroom * sum(macs)
    assert shortest_exclusion((), lambda nodes: 0.0, 0.5, never) is None


def test_time_that_runs_out_ends_the_search() -> None:
    pieces = [Piece((f"n{i}",), 1.0, 1) for i in range(32)]
    assert shortest_exclusion(pieces, lambda nodes: 1.0, 0.5, lambda: True) is None
    assert len(noisy_pieces({f"n{i}": 1 for i in range(64)}, lambda nodes: 1.0, lambda: True)) == 8
