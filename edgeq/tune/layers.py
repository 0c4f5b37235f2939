"""Which layers to keep in float, so that the accuracy asked for is met at the least cost.

The noise that a layer's quantization alone puts on the outputs is measured by quantizing nothing but it. Noises of
layers add up, as far as they are small and independent, so the noisiest must go in any case: layers are ordered by
noise, of about equal ones the cheaper first, and the shortest beginning of that order that meets the bar is looked for.
To spare measurements, groups of neighbours are measured first and only the noisiest are split.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_GROUPS = 8
_PROBES = 32


@dataclass(frozen=True)
class Piece:
    """Neighbouring layers, the noise that they cause by themselves (power, over the signal's) and their MACs."""

    nodes: tuple[str, ...]
    noise: float
    macs: int

    @property
    def order(self) -> tuple[int, int, tuple[str, ...]]:
        """Sorts the noisiest first, of those within a factor of about two the cheapest."""
        loudness = round(math.log2(self.noise)) if self.noise > 0 else -(10**6)
        return -loudness, self.macs, self.nodes


def noisy_pieces(
    macs: Mapping[str, int],
    noise_of: Callable[[Sequence[str]], float],
    expired: Callable[[], bool],
    *,
    probes: int = _PROBES,
) -> tuple[Piece, ...]:
    """Pieces that cover all layers, those best kept in float first.

    Args:
        macs: multiply-accumulates by layer, in execution order.
        noise_of: noise power over signal power where only these layers are quantized.
        expired: whether to stop splitting.
        probes: how many times `noise_of` may be asked.
    """
    names = list(macs)
    size = max(1, -(-len(names) // _GROUPS))

    def measured(nodes: Sequence[str]) -> Piece:
        return Piece(tuple(nodes), noise_of(nodes), sum(macs[n] for n in nodes))

    pieces = [measured(names[i : i + size]) for i in range(0, len(names), size)]
    left = probes - len(pieces)
    while left >= 2 and not expired():
        whole = max((p for p in pieces if len(p.nodes) > 1), key=lambda p: p.noise, default=None)
        if whole is None:
            break
        middle = len(whole.nodes) // 2
        pieces.remove(whole)
        pieces += [measured(whole.nodes[:middle]), measured(whole.nodes[middle:])]
        left -= 2
    return tuple(sorted(pieces, key=lambda p: p.order))


def affordable(pieces: Sequence[Piece], headroom: float) -> tuple[Piece, ...]:
    """The leading pieces that hold at most `headroom` of all multiply-accumulates, a share: what a layer costs in float
    over integers goes with these, roughly. Never all."""
    held = list(itertools.accumulate(piece.macs for piece in pieces))
    return tuple(piece for piece, macs in zip(pieces[:-1], held[:-1], strict=True) if macs <= headroom * held[-1])


def shortest_exclusion(
    pieces: Sequence[Piece],
    loss: Callable[[tuple[str, ...]], float],
    max_drop: float,
    expired: Callable[[], bool],
) -> tuple[str, ...] | None:
    """The fewest leading pieces without which `loss` is at most `max_drop`; None if not even all of them do.

    The number is doubled until the bar is met, then halved in between: `loss` falls with it, roughly.
    """

    def excluded(count: int) -> tuple[str, ...]:
        return tuple(node for piece in pieces[:count] for node in piece.nodes)

    if not pieces:
        return None
    low, high = 0, 1
    while loss(excluded(high)) > max_drop:
        low, high = high, min(2 * high, len(pieces))
        if low >= high or expired():
            return None
    while high - low > 1 and not expired():
        middle = (low + high) // 2
        if loss(excluded(middle)) <= max_drop:
            high = middle
        else:
            low = middle
    return excluded(high)
