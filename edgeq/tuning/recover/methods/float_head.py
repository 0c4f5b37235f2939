"""Find detection heads that join boxes and scores in one tensor, and leave everything after the join in float.

A head often ends in a Concat of coordinates, which may be in the hundreds, and scores between 0 and 1. After the
Concat, there are only operators that move data. In integers, all values share one scale. The coordinates determine that
scale, so only a few steps are left for the scores. The nodes after the join compute nothing, so they cost almost
nothing in float.

A head is recognised by its structure. From a graph output, edgeq goes upstream through operators that only move data.
If it finds a Concat whose inputs have ranges of very different width, the nodes from that Concat on are the tail of a
head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from edgeq.calibration.ranges import Range
from edgeq.data.samples import Samples
from edgeq.model.graph import DATA_MOVEMENT, GraphIndex, name_of, readers
from edgeq.model.int8_prediction import hazardous_nodes
from edgeq.tuning.recover.base import Recovery, RecoveryState, Stage
from edgeq.tuning.recover.followers import Followers
from edgeq.util.display import Progress

HETEROGENEOUS = 4.0
"""If the widest input range of a Concat is at least this many times the narrowest, the ranges differ too much: the
narrowest loses 2 bits.
"""

# Operators that compute nothing, or almost nothing.
_MOVES = DATA_MOVEMENT - {"MaxPool", "Resize"} | {"Cast", "Concat"}


@dataclass(frozen=True)
class FloatHead(Recovery):
    """Leave the tails of detection heads, and the activation functions right before them, out of quantization."""

    name: str = "float-head"
    title: str = "tails that join boxes and scores in one tensor kept in float"
    stage: Stage = "ranges"
    free: bool = False
    order = 50
    keeps_float = True

    def apply(self, state: RecoveryState, samples: Samples, workdir: Path, progress: Progress) -> RecoveryState:
        """See `Recovery.apply`."""
        del samples, workdir, progress
        tail = find_heads(state.prepared.model, state.ranges)
        float_nodes = {*state.scheme.exclude, *hazardous_nodes(state.prepared.model, state.prepared.hazards)}
        new = sorted(set(tail) - float_nodes)
        if not new:
            return state.note(f"{self.name}: no further tail joins ranges that differ {HETEROGENEOUS:g} times")
        scheme = state.scheme.keep_in_float(new, f"kept in float by {self.name}: it follows a join of unlike ranges")
        return state.replace(scheme=scheme).note(f"{self.name}: kept in float: {', '.join(new)}")


def find_heads(model: ir.Model, ranges: Mapping[str, Range]) -> tuple[str, ...]:
    """Return the names of the nodes in the tails of detection heads, in the order of the graph. The result is empty if
    there are no such tails.

    Args:
        ranges: ranges by tensor; tensors without a range are not compared.
    """
    index = GraphIndex(model)
    tail: set[ir.Node] = set()
    for output in model.graph.outputs:
        moved = _find_moves(output)
        if any(node.op_type == "Concat" and is_heterogeneous(node, ranges) for node in moved):
            tail |= moved
    if not tail:
        return ()
    inside, followers = set(tail), Followers(model)
    for tensor in (name_of(value) for node in model.graph for value in node.outputs if value.name):
        # Include an activation function that only the tail reads. In integers, a score would be rounded before and
        # after it.
        follower = followers.find(tensor)
        extended = tail | set(follower.nodes)
        reading = {node for end in follower.ends for node in readers(index.values[end])}
        if follower.nodes and reading <= extended and reading & tail:
            inside |= extended
    return tuple(node.name or "" for node in model.graph if node in inside)


def is_heterogeneous(node: ir.Node, ranges: Mapping[str, Range]) -> bool:
    """Return whether the widest input of a Concat is at least `HETEROGENEOUS` times as wide as the narrowest."""
    input_ranges = [ranges.get(name_of(value)) for value in node.inputs]
    widths = [r.high - r.low for r in input_ranges if r is not None and r.high > r.low]
    return len(widths) > 1 and max(widths) >= HETEROGENEOUS * min(widths)


def _find_moves(output: ir.Value) -> set[ir.Node]:
    """Return the data-movement operators upstream of a value, up to the first operators that compute."""
    moves: set[ir.Node] = set()
    waiting: list[ir.Value | None] = [output]
    while waiting:
        value = waiting.pop()
        node = value.producer() if value is not None else None
        if node is not None and node.op_type in _MOVES and node not in moves:
            moves.add(node)
            # In all nodes but a Concat, the inputs after the first are shapes and indices.
            waiting.extend(node.inputs if node.op_type == "Concat" else node.inputs[:1])
    return moves


RECOVERY = FloatHead()
