"""Choose which layers to leave in float, so that the model loses no more accuracy than allowed, at the least cost.

A ranking orders the layers. Layers that cause much noise at the outputs, relative to their cost in float, come first.
edgeq then measures how many of them are needed: it begins with one or with as many as the ranking predicts, doubles
their number until the loss is small enough, and then bisects. Finally, the layers that cost most are put back into
integers one by one. A layer stays in float if the loss would become too large with the layer in integers.

If a ranking cannot be computed from tensors, `rank_by_probing` measures it: the noise of a layer is the noise at the
outputs if only that layer is quantized. Noises of layers add up if they are small and independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, Protocol

EXCLUDE: Literal["exclude"] = "exclude"
"""The field of a scheme that names the nodes that stay in float."""
WIDE: Literal["wide"] = "wide"
"""The field of a scheme that names the nodes whose results get 16 bits instead of 8."""
EIGHT_BIT: Literal["eight_bit"] = "eight_bit"
"""The field of a scheme that names the products whose blocks get 8 bits instead of 4."""
# Each costs a build, so only the layers that cost most are tried.
REFINEMENTS = 4
# If a larger set of layers in float loses more than a smaller one, this many sizes are tried in addition to the powers
# of two.
_MIDDLE_SIZES = 6
# With 8 groups, a quarter of the probes is used before the first split.
_GROUPS = 8
_PROBES = 32  # largest number of measurements, including those of the first groups


@dataclass(frozen=True)
class RankedLayer:
    """Describe a layer, or several layers that go to float together.

    Attributes:
        name: a unique name in the ranking.
        nodes: names of its nodes in the float model.
        noise: power of the error that quantizing only this layer causes at the outputs, divided by the power of the
            outputs.
    """

    name: str
    nodes: tuple[str, ...]
    noise: float


class LayerCosts(Protocol):
    """Give the costs of layers in float, in any unit (microseconds, multiply-accumulates)."""

    @property
    def span(self) -> float:
        """Return the cost of all layers in float minus their cost in integers."""

    def extra_cost(self, name: str, float_names: Set[str]) -> float:
        """Return the additional cost of layer `name` in float, if the layers in `float_names` are already in float."""

    def predict_speed(self, float_names: Set[str], plain_speed: float) -> float:
        """Return how many times as fast as float32 a model is likely to be with some layers in float.

        Args:
            float_names: names of the layers in float.
            plain_speed: measured speed of the plain build relative to float32, above 0.
        """


@dataclass(frozen=True)
class MacCosts:
    """Give the costs of layers as multiply-accumulates, for use if nothing is timed.

    Attributes:
        macs: multiply-accumulates, by name of the layer.
    """

    macs: Mapping[str, int]

    @property
    def span(self) -> float:
        """Return the multiply-accumulates of all layers."""
        return float(sum(self.macs.values()))

    def extra_cost(self, name: str, float_names: Set[str]) -> float:
        """Return the layer's own multiply-accumulates, whichever other layers are in float."""
        return float(self.macs[name])

    def predict_speed(self, float_names: Set[str], plain_speed: float) -> float:
        """See `LayerCosts.predict_speed`. The time grows evenly with the multiply-accumulates in float."""
        share = sum(map(self.macs.__getitem__, float_names)) / self.span if self.span else 0.0
        return 1 / (1 / plain_speed + (1 - 1 / plain_speed) * share)


@dataclass(frozen=True)
class QuietLayer:
    """Describe a layer that adds no noise of its own, such as one that only moves values. If its neighbours are in
    integers, the layer is best in integers as well. Between layers in float, a layer in integers would quantize the
    values that it passes on.

    Attributes:
        name: a unique name among all layers of the ranking.
        nodes: names of its nodes in the float model.
        neighbours: names of the layers that it reads from, or that read from it.
    """

    name: str
    nodes: tuple[str, ...]
    neighbours: frozenset[str]


@dataclass(frozen=True)
class LayerRanking:
    """Rank layers in the order in which to leave them in float.

    Attributes:
        costs: costs of the layers, by name.
        slack: factor by which the allowed cost is raised if the costs are estimates.
        field: the field of the scheme that names the chosen layers, and so keeps them in float or gives them more bits.
        quiet: layers that go to float if all their neighbours do.
    """

    layers: tuple[RankedLayer, ...]
    costs: LayerCosts
    slack: float = 1.0
    field: Literal["exclude", "wide", "eight_bit"] = EXCLUDE
    quiet: tuple[QuietLayer, ...] = ()

    def nodes(self, layers: Sequence[RankedLayer]) -> tuple[str, ...]:
        """Return the names of all nodes that go to float with `layers`, including the nodes of quiet layers."""
        names = {layer.name for layer in layers}
        joined = {layer.name: layer for layer in self.quiet if layer.neighbours}
        while excluded := [name for name, layer in joined.items() if not layer.neighbours <= names | joined.keys()]:
            for name in excluded:
                del joined[name]
        every = [*(layer.nodes for layer in layers), *(layer.nodes for layer in joined.values())]
        return tuple(node for nodes in every for node in nodes)

    def count_quieting(self, share: float, limit: int) -> int:
        """Return the smallest number of layers in float, from 1 to `limit`, after which at most `share` of the noise of
        all layers remains. Return 1 if the noise is not known, and `limit` if no such number is enough.
        """
        if share >= 1 or not self._has_noise:
            return 1
        return next((count for count in range(1, limit) if self.remaining(self.layers[:count]) <= share), limit)

    def select_quieting(self, share: float, layers: Sequence[RankedLayer]) -> tuple[RankedLayer, ...]:
        """Return a cheap subset of `layers` that leaves at most `share` of the noise of all layers. Return the first
        layer if the noise is not known, and all `layers` if no subset is enough.

        The subset comes from the greedy algorithm for the minimum knapsack (Csirik et al., Heuristics
        for the 0-1 min-knapsack problem, 1991): layers join in their order. If a layer completes the set, the set
        is a candidate, and the layer is left out again: a cheaper one may follow that is just enough. The cheapest
        candidate wins. It costs at most twice as much as the best set.
        """
        if not self._has_noise:
            return tuple(layers[:1])
        members: list[RankedLayer] = []
        names: set[str] = set()
        best, best_cost, spent = tuple(layers), math.inf, 0.0
        for layer in layers:
            cost = spent + self.costs.extra_cost(layer.name, names)
            if self.remaining([*members, layer]) > share:
                members.append(layer)
                names.add(layer.name)
                spent = cost
            elif cost < best_cost:
                best, best_cost = (*members, layer), cost
        return best

    def remaining(self, layers: Collection[RankedLayer]) -> float:
        """Return the share of the noise of all layers that remains if `layers` are in float."""
        if not self._has_noise:
            return 1.0
        total = sum(layer.noise for layer in self.layers)
        # Rounding may leave a little more or less than nothing.
        return max(0.0, total - sum(layer.noise for layer in layers)) / total

    @property
    def _has_noise(self) -> bool:
        return 0 < sum(layer.noise for layer in self.layers) < math.inf


def select_float_layers(
    ranking: LayerRanking,
    evaluate: Callable[[tuple[str, ...]], float],
    max_drop: float,
    expired: Callable[[], bool],
    *,
    share: float = 1.0,
    headroom: float = math.inf,
    hopeless: float = math.inf,
    refinements: int = REFINEMENTS,
) -> tuple[tuple[str, ...], ...]:
    """Return sets of nodes to leave in float, each cheaper than the one before. With each of them, the model loses at
    most `max_drop`.

    If more layers in float never mean a larger loss, the last set costs at most as much as the shortest prefix of the
    ranking that loses at most `max_drop`. If more layers in float sometimes do mean a larger loss, sizes near the best
    one are tried as well. No set is evaluated twice.

    Args:
        evaluate: a function that returns the loss of the model with these nodes in float, in the unit of `max_drop`.
            The loss is infinite if that model cannot be built or its outputs are not finite.
        expired: a function that returns whether to stop and return the sets found so far.
        share: largest noise that may remain, as a share of the noise without layers in float. Losses grow with the
            power of the noise, so the first set to try is the shortest prefix that should leave no more than this
            share.
        headroom: largest cost, as a share of the ranking's span.
        hopeless: if the largest set loses more than this, no other set is tried. To find out, the largest set is
            evaluated first, but only if the headroom allows at most half of the layers.
        refinements: number of layers that the search tries to put back into integers.

    Returns:
        Names of the nodes of each set; empty if no affordable set was found in time.
    """
    order = find_affordable(ranking, headroom)
    solutions: list[tuple[RankedLayer, ...]] = []
    losses: dict[tuple[RankedLayer, ...], float] = {}

    def loss(layers: tuple[RankedLayer, ...]) -> float:
        """Return the loss with `layers` in float. If it is at most `max_drop`, add `layers` to `found`."""
        if layers not in losses:
            losses[layers] = evaluate(ranking.nodes(layers))
            if losses[layers] <= max_drop:
                solutions.append(layers)
        return losses[layers]

    def holds(layers: tuple[RankedLayer, ...]) -> bool:
        """Return whether the loss with `layers` in float is at most `max_drop`."""
        return loss(layers) <= max_drop

    # With more than half of the layers affordable, the largest set almost certainly succeeds, so it would tell nothing.
    limited = hopeless < math.inf and 2 < len(order) <= len(ranking.layers) // 2
    if limited and not expired() and loss(order) > hopeless:
        return ()
    failed, size = 0, ranking.count_quieting(share, len(order))
    while failed < len(order) and not expired():
        size = min(size, len(order))
        if holds(order[:size]):
            break
        # Doubling reaches the size in a few builds, and the bisection below then finds the smallest one.
        failed, size = size, 2 * size
    for _ in range(_MIDDLE_SIZES):
        between = (
            None if solutions or expired() else _find_middle({len(layers): lost for layers, lost in losses.items()})
        )
        if between is None:
            break
        holds(order[:between])
    if not solutions:
        return ()
    failed = max((len(layers) for layers in losses if len(layers) < len(solutions[-1])), default=0)
    while len(solutions[-1]) - failed > 1 and not expired():
        middle = (len(solutions[-1]) + failed) // 2
        if not holds(order[:middle]):
            failed = middle
    for layer in _sort_by_saving(solutions[-1], ranking.costs)[:refinements]:
        if expired() or len(solutions[-1]) == 1:
            break
        smaller = tuple(member for member in solutions[-1] if member != layer)
        if smaller != order[: len(smaller)]:  # prefixes of the order were evaluated above
            holds(smaller)
    return tuple(ranking.nodes(layers) for layers in solutions)


def _find_middle(losses: Mapping[int, float]) -> int | None:
    """Return the size halfway between the best of `losses` and the next larger one. If that size was tried, return the
    size halfway between the best and the next smaller one.

    Return None if fewer than two sizes were tried, if the largest one is the best, or if no size is left between them.
    """
    if len(losses) < 2:
        return None
    *_, second, largest = sorted(losses)
    best = min(losses, key=lambda size: (losses[size], -size)) if min(losses.values()) < math.inf else second
    if best == largest:
        return None
    larger = min(size for size in losses if size > best)
    smaller = max((size for size in losses if size < best), default=0)
    middles = ((best + neighbour + 1) // 2 for neighbour in (larger, smaller))
    return next((middle for middle in middles if middle not in losses and middle > 0), None)


def find_affordable(ranking: LayerRanking, headroom: float) -> tuple[RankedLayer, ...]:
    """Return the longest prefix of the ranking that costs at most `headroom` of the span. The last layer of the ranking
    is left out, because with all layers in float, the model would be the float model. The exception is a ranking whose
    layers get 8 bits instead of float.
    """
    limit = ranking.slack * headroom * ranking.costs.span if headroom < math.inf else math.inf
    float_names: set[str] = set()
    spent, count = 0.0, 0
    layer_count = len(ranking.layers) - (ranking.field != EIGHT_BIT)
    for position, layer in enumerate(ranking.layers[:layer_count], 1):
        spent += ranking.costs.extra_cost(layer.name, float_names)
        float_names.add(layer.name)
        if spent <= limit:
            count = position
    return ranking.layers[:count]


def rank_by_probing(
    macs: Mapping[str, int],
    noise_of: Callable[[Sequence[str]], float],
    expired: Callable[[], bool],
    *,
    singly: bool = False,
) -> LayerRanking:
    """Rank layers by noise. Among layers whose noise differs by less than about a factor of two, those with the fewest
    multiply-accumulates come first.

    To save measurements, groups of neighbours are measured first. Then the noisiest group is split again and again.

    Args:
        macs: multiply-accumulates by layer, in execution order.
        noise_of: a function that returns noise power over signal power at the outputs if only these layers are
            quantized.
        expired: a function that returns whether to stop splitting.
        singly: whether to measure each layer by itself, however long that takes.
    """
    names = list(macs)
    size = 1 if singly else max(1, -(-len(names) // _GROUPS))

    def measure(nodes: Sequence[str]) -> RankedLayer:
        """Return `nodes` as one layer with its noise. This costs one call of `noise_of`."""
        return RankedLayer(nodes[0], tuple(nodes), noise_of(nodes))

    def cost(layer: RankedLayer) -> int:
        """Return the multiply-accumulates of the layer."""
        return sum(macs[node] for node in layer.nodes)

    def order(layer: RankedLayer) -> tuple[float, int, tuple[str, ...]]:
        """Return a sort key: first the noise, rounded to a power of two, in descending order, then the cost in
        ascending order.
        """
        # Noise from few samples is uncertain by about a factor of two, so a smaller difference must not decide.
        magnitude = round(math.log2(layer.noise)) if layer.noise > 0 else -math.inf
        return -magnitude, cost(layer), layer.nodes

    pieces = [measure(names[start : start + size]) for start in range(0, len(names), size)]
    remaining = _PROBES - len(pieces)
    while remaining >= 2 and not expired():
        noisiest = max((piece for piece in pieces if len(piece.nodes) > 1), key=lambda piece: piece.noise, default=None)
        if noisiest is None:
            break
        middle = len(noisiest.nodes) // 2
        pieces.remove(noisiest)
        pieces += [measure(noisiest.nodes[:middle]), measure(noisiest.nodes[middle:])]
        remaining -= 2
    return LayerRanking(tuple(sorted(pieces, key=order)), MacCosts({piece.name: cost(piece) for piece in pieces}))


def _sort_by_saving(layers: Sequence[RankedLayer], costs: LayerCosts) -> list[RankedLayer]:
    """Return the layers of `layers` that save cost if they are put back into integers. The layer that saves most comes
    first.
    """
    names = {layer.name for layer in layers}
    saved = {layer.name: costs.extra_cost(layer.name, names) for layer in layers}
    return sorted((layer for layer in layers if saved[layer.name] > 0), key=lambda layer: -saved[layer.name])
